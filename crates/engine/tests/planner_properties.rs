//! Plans of arbitrary layers: order does not matter, more memory never holds less, ranks cover the
//! whole, window pools never run out first.

use proptest::prelude::*;
use turboquant::format::{CacheDtype, NativeDtype};
use turboquant_engine::{
    config::{AttentionSpec, CacheSpec, CompressedSpec, ModelConfig, StateSpec},
    plan::{Budget, Lifetime, Plan, PlanError, PlanOptions},
};

const LEN: usize = 65_536;

fn attention() -> impl Strategy<Value = AttentionSpec> {
    let window = prop_oneof![Just(None), prop::sample::select(vec![1, 100, 128, 4096]).prop_map(Some)];
    (0..5u32, 0..4u32, 2..72usize, window).prop_map(|(kv, group, eighths, window)| AttentionSpec {
        num_qo_heads: 1 << (kv + group),
        num_kv_heads: 1 << kv,
        key_head_dim: 8 * eighths,
        value_head_dim: 8 * eighths,
        window,
    })
}

fn state() -> impl Strategy<Value = StateSpec> {
    (1..64usize, 1..4096usize, 0..3u32, 0..64usize).prop_map(|(per_head, channels, groups, state)| {
        let grouped_conv_bytes = (1 << groups) * state * 2;
        StateSpec {
            conv_bytes: 16 * channels * 6 + grouped_conv_bytes,
            recurrent_bytes: 16 * per_head * 4,
            num_heads: 16,
            grouped_conv_bytes,
            num_groups: 1 << groups,
            dtype_named: false,
        }
    })
}

fn layer() -> impl Strategy<Value = CacheSpec> {
    prop_oneof![
        4 => attention().prop_map(CacheSpec::Attention),
        2 => state().prop_map(CacheSpec::Recurrent),
        1 => (attention(), state()).prop_map(|(attention, state)| CacheSpec::Hybrid(attention, state)),
        1 => (1..600usize, 0..2usize).prop_map(|(width, indexer)| CacheSpec::Latent {
            num_qo_heads: 16,
            width,
            indexer_width: 128 * indexer
        }),
        1 => (1..600usize, prop::sample::select(vec![0, 4, 128])).prop_map(|(width, ratio)| {
            CacheSpec::Compressed(CompressedSpec {
                num_qo_heads: 16, width, window: 128, ratio, indexer_width: 64, state_bytes: 100,
            })
        }),
        1 => Just(CacheSpec::None),
    ]
}

fn model(layers: Vec<CacheSpec>) -> ModelConfig {
    ModelConfig::new("any", NativeDtype::Bf16, LEN, layers)
}

fn dtype() -> impl Strategy<Value = CacheDtype> {
    prop::sample::select(CacheDtype::ALL.to_vec())
}

proptest! {
    #[test]
    fn any_order_of_layers_takes_the_same(
        (layers, shuffled) in prop::collection::vec(layer(), 1..24)
            .prop_flat_map(|layers| (Just(layers.clone()), Just(layers).prop_shuffle())),
        dtype in dtype(),
        tokens in 1..200_000usize,
    ) {
        let options = PlanOptions {
            dtype, boundary_layers: Some(0), budget: Budget::Tokens(tokens), max_num_seqs: 3, ..PlanOptions::default()
        };
        let plan = Plan::build(&model(layers), &options).unwrap();
        let other = Plan::build(&model(shuffled), &options).unwrap();
        prop_assert_eq!(plan.total_bytes(), other.total_bytes());
        prop_assert_eq!(plan.bytes_per_token(), other.bytes_per_token());
        prop_assert_eq!(plan.sequence_bytes(tokens), other.sequence_bytes(tokens));
        prop_assert_eq!(plan.slabs().count(), other.slabs().count());
        // Groups are the sum of their slabs.
        for (index, group) in plan.groups.iter().enumerate() {
            let slabs: usize = plan.slabs().filter(|slab| slab.group == index).map(|slab| slab.page_bytes).sum();
            prop_assert_eq!(slabs, group.page_bytes);
        }
    }

    #[test]
    fn bytes_grow_with_tokens_and_tokens_with_memory(
        layers in prop::collection::vec(layer(), 1..24),
        dtype in dtype(),
        (few, many) in (1..300_000usize, 1..300_000usize),
        (small, large) in (1u64..1 << 36, 1u64..1 << 36),
        max_num_seqs in 1..40usize,
    ) {
        let config = model(layers);
        let build = |budget| Plan::build(&config, &PlanOptions { dtype, budget, max_num_seqs, ..PlanOptions::default() });
        let (few, many) = (few.min(many), few.max(many));
        let (less, more) = (build(Budget::Tokens(few)).unwrap(), build(Budget::Tokens(many)).unwrap());
        prop_assert!(less.total_bytes() <= more.total_bytes());
        prop_assert!(less.num_tokens <= more.num_tokens);
        prop_assert!(less.sequence_bytes(few) <= more.sequence_bytes(many));
        let (small, large) = (small.min(large), small.max(large));
        match (build(Budget::Memory(small)), build(Budget::Memory(large))) {
            (Ok(less), Ok(more)) => {
                prop_assert!(less.num_tokens <= more.num_tokens);
                prop_assert!(less.total_bytes() <= small && more.total_bytes() <= large);
            }
            (Err(_), _) => {}
            (Ok(_), Err(error)) => prop_assert!(false, "fits in {} but not in {}: {}", small, large, error),
        }
    }

    #[test]
    fn ranks_cover_the_whole(layers in prop::collection::vec(layer(), 1..12), dtype in dtype(), log_ranks in 0..6u32) {
        let ranks = 1usize << log_ranks;
        let config = model(layers);
        let build = |tensor_parallel| {
            Plan::build(&config, &PlanOptions { dtype, tensor_parallel, ..PlanOptions::default() })
        };
        let whole = build(1).unwrap();
        let share = match build(ranks) {
            Ok(share) => share,
            Err(PlanError::TensorParallel { layer, .. }) => {
                // Refused for heads that do not divide, and for nothing else.
                let heads = match &config.layers[layer] {
                    CacheSpec::Attention(spec) => spec.num_qo_heads,
                    CacheSpec::Hybrid(spec, state) => spec.num_qo_heads.min(state.num_heads),
                    _ => 16,
                };
                prop_assert!(ranks > heads);
                return Ok(());
            }
            Err(error) => return Err(TestCaseError::fail(error.to_string())),
        };
        for (index, (whole, share)) in whole.layers.iter().zip(&share.layers).enumerate() {
            let pages = |paged: Option<turboquant_engine::plan::PagedPlan>| paged.map_or(0, |paged| paged.page_bytes);
            let (all, part) = (pages(whole.paged), pages(share.paged));
            match &config.layers[index] {
                CacheSpec::Attention(spec) | CacheSpec::Hybrid(spec, _) => {
                    // Each KV head on `max(1, ranks / heads)` ranks.
                    let copies = (ranks / spec.num_kv_heads).max(1);
                    prop_assert_eq!(part * ranks, all * copies);
                }
                _ => prop_assert_eq!(part, all, "a latent is not divided"),
            }
            prop_assert!(share.state_bytes * ranks >= whole.state_bytes);
            if let Some(state) = config.layers[index].state()
                && ranks <= state.num_groups
            {
                prop_assert_eq!(share.state_bytes * ranks, whole.state_bytes);
            }
        }
    }

    #[test]
    fn window_pools_never_run_out_before_the_pool_for_all_tokens(
        window in 1..5000usize,
        lengths in prop::collection::vec(1..20_000usize, 1..12),
        spare in 0..4usize,
        chunk in 1..600usize,
        page_size in prop::sample::select(vec![16, 32, 64]),
    ) {
        let spec = |window| CacheSpec::Attention(AttentionSpec {
            num_qo_heads: 1, num_kv_heads: 1, key_head_dim: 16, value_head_dim: 16, window,
        });
        let pages = |length: usize| length.div_ceil(page_size);
        let tokens = lengths.iter().map(|&length| pages(length)).sum::<usize>() * page_size;
        let options = PlanOptions {
            budget: Budget::Tokens(tokens),
            page_size,
            max_num_seqs: lengths.len() + spare,
            max_num_batched_tokens: chunk,
            ..PlanOptions::default()
        };
        let plan = Plan::build(&model(vec![spec(None), spec(Some(window))]), &options).unwrap();
        let pool = plan.groups.iter().find(|group| group.lifetime != Lifetime::Full).unwrap();
        // All sequences decode but the first, which has just stored a chunk of its prompt: it still holds
        // the window of the chunk's first token.
        let held = |length: usize, stored: usize| {
            let first = (length - stored.min(length)).saturating_sub(window - 1);
            pages(length) - first / page_size
        };
        let held: usize = lengths
            .iter()
            .enumerate()
            .map(|(index, &length)| held(length, if index == 0 { chunk } else { 1 }))
            .sum();
        prop_assert!(held <= pool.num_pages, "{} pages held, {} planned", held, pool.num_pages);
    }
}
