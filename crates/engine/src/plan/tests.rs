use turboquant::format::{CacheDtype, NativeDtype, Preset};

use super::*;
use crate::config::{AttentionSpec, CacheSpec, ModelConfig, StateSpec};

const FOUR_BIT: CacheDtype = CacheDtype::TurboQuant(Preset::FourBitNc);

fn attention(num_kv_heads: usize, head_dim: usize, window: Option<usize>) -> CacheSpec {
    CacheSpec::Attention(AttentionSpec {
        num_qo_heads: 8 * num_kv_heads,
        num_kv_heads,
        key_head_dim: head_dim,
        value_head_dim: head_dim,
        window,
    })
}

fn state(bytes: usize) -> CacheSpec {
    CacheSpec::Recurrent(StateSpec {
        conv_bytes: 0,
        recurrent_bytes: bytes,
        num_heads: 16,
        grouped_conv_bytes: 0,
        num_groups: 1,
        dtype_named: true,
    })
}

fn model(layers: Vec<CacheSpec>) -> ModelConfig {
    ModelConfig::new("test", NativeDtype::Bf16, 32768, layers)
}

fn reasons(plan: &Plan) -> Vec<Option<FormatReason>> {
    plan.layers.iter().map(|layer| layer.paged.map(|paged| paged.reason)).collect()
}

#[test]
fn boundary_layers_of_dense_models_stay_native_and_are_capped_at_half() {
    use FormatReason::{Boundary as B, Requested as R};
    let options = PlanOptions { dtype: FOUR_BIT, ..PlanOptions::default() };
    for (count, expected) in
        [(1, vec![R]), (3, vec![B, R, B]), (4, vec![B, B, B, B]), (6, vec![B, B, R, R, B, B])]
    {
        let plan = Plan::build(&model(vec![attention(2, 64, None); count]), &options).unwrap();
        assert_eq!(reasons(&plan), expected.into_iter().map(Some).collect::<Vec<_>>(), "{count} layers");
    }
    let mut hybrid = vec![attention(2, 64, None); 5];
    hybrid.push(state(1024));
    let plan = Plan::build(&model(hybrid.clone()), &options).unwrap();
    assert_eq!(reasons(&plan), [Some(R), Some(R), Some(R), Some(R), Some(R), None]);
    let one = PlanOptions { boundary_layers: Some(1), ..options.clone() };
    assert_eq!(
        reasons(&Plan::build(&model(hybrid), &one).unwrap())[..5],
        [Some(B), Some(R), Some(R), Some(R), Some(B)]
    );
    let none = PlanOptions { boundary_layers: Some(0), ..options.clone() };
    let dense = model(vec![attention(2, 64, None); 6]);
    assert_eq!(reasons(&Plan::build(&dense, &none).unwrap()), [Some(R); 6]);
    // fp8 and auto have no boundary unless asked.
    let fp8 = PlanOptions { dtype: CacheDtype::Fp8, ..options };
    assert_eq!(reasons(&Plan::build(&dense, &fp8).unwrap()), [Some(R); 6]);
}

#[test]
fn windows_get_a_group_of_their_own_that_holds_windows_and_a_prefill() {
    let config =
        model(vec![attention(1, 64, Some(100)), attention(2, 64, None), attention(1, 64, Some(100))]);
    let options = PlanOptions {
        budget: Budget::Tokens(32768),
        max_num_seqs: 3,
        max_num_batched_tokens: 512,
        ..PlanOptions::default()
    };
    let plan = Plan::build(&config, &options).unwrap();
    assert_eq!(plan.groups.len(), 2);
    let (window, full) = (&plan.groups[0], &plan.groups[1]);
    assert_eq!((window.lifetime, &window.layers[..]), (Lifetime::Window(100), &[0, 2][..]));
    assert_eq!((full.lifetime, &full.layers[..]), (Lifetime::Full, &[1][..]));
    // Two layers of 1 head: 16 tokens * 64 * 2 elements * 2 bytes each.
    assert_eq!((window.page_bytes, full.page_bytes), (2 * 4096, 8192));
    assert_eq!(full.num_pages, 2048);
    // 100 tokens touch at most 8 pages of 16; three sequences, and 512 tokens of prefill.
    assert_eq!(window.num_pages, 3 * 8 + 32);
    assert_eq!(plan.page_pool_bytes(), 2048 * 8192 + 56 * 8192);
    // A short pool of full pages bounds the window pool, too.
    let short = PlanOptions { budget: Budget::Tokens(64), ..options };
    let plan = Plan::build(&config, &short).unwrap();
    assert_eq!((plan.groups[0].num_pages, plan.groups[1].num_pages), (4, 4));
    assert_eq!(plan.max_model_len, 64);
}

#[test]
fn memory_is_used_up_to_less_than_one_page_and_states_come_first() {
    let config = model(vec![state(1_000_000), attention(2, 128, None), attention(2, 128, Some(64))]);
    let options = PlanOptions {
        dtype: FOUR_BIT,
        budget: Budget::Memory(50_000_000),
        max_num_seqs: 4,
        ..PlanOptions::default()
    };
    let plan = Plan::build(&config, &options).unwrap();
    assert_eq!(plan.num_states, 4);
    assert_eq!(plan.state_bytes_per_sequence(), 1_000_000);
    let total = plan.total_bytes();
    assert!(total <= 50_000_000 && total + 2 * 16 * 2 * 134 > 50_000_000, "{total}");
    let states = PlanOptions { max_num_seqs: 60, ..options.clone() };
    assert!(matches!(
        Plan::build(&config, &states),
        Err(PlanError::States { needed: 60_000_000, available: 50_000_000, fit: 49, .. })
    ));
    let nothing = PlanOptions { budget: Budget::Memory(4_000_100), ..options.clone() };
    assert!(matches!(Plan::build(&config, &nothing), Err(PlanError::NoPage { .. })));
    let long = PlanOptions { budget: Budget::Memory(5_000_000), max_model_len: Some(32768), ..options };
    let Err(PlanError::DoesNotFit { needed, longest, .. }) = Plan::build(&config, &long) else {
        panic!("5 MB hold no 32768 tokens")
    };
    let fits = PlanOptions { budget: Budget::Memory(needed), ..long.clone() };
    assert_eq!(Plan::build(&config, &fits).unwrap().max_model_len, 32768);
    let shorter = PlanOptions { max_model_len: Some(longest), ..long };
    assert_eq!(Plan::build(&config, &shorter).unwrap().max_model_len, longest);
}

#[test]
fn ranks_divide_heads_or_replicate_them() {
    let config = model(vec![attention(2, 128, None)]);
    let heads = |ranks| {
        let options = PlanOptions { tensor_parallel: ranks, ..PlanOptions::default() };
        Plan::build(&config, &options).map(|plan| plan.layers[0].paged.unwrap().num_kv_heads)
    };
    assert_eq!([heads(1), heads(2), heads(4), heads(8), heads(16)], [Ok(2), Ok(1), Ok(1), Ok(1), Ok(1)]);
    let error = heads(3).unwrap_err().to_string();
    assert_eq!(error, "--tensor-parallel-size 3 does not fit layer 0: 16 query heads do not divide by 3");
    assert!(matches!(heads(32), Err(PlanError::TensorParallel { .. })));
}

#[test]
fn wrong_options_are_refused_in_words() {
    let config = model(vec![attention(2, 128, None); 2]);
    let options = PlanOptions { dtype: FOUR_BIT, ..PlanOptions::default() };
    let error = |options: PlanOptions| Plan::build(&config, &options).unwrap_err().to_string();
    let skip = PlanOptions { skip_layers: "2".parse().unwrap(), ..options.clone() };
    assert_eq!(error(skip), "--kv-cache-dtype-skip-layers names layer 2, but the model has layers 0 to 1");
    assert!(error(PlanOptions { page_size: 24, ..options.clone() }).contains("24"));
    assert!(error(PlanOptions { max_num_seqs: 0, ..options.clone() }).contains("--max-num-seqs"));
    let long = PlanOptions { max_model_len: Some(40_000), ..options.clone() };
    assert!(error(long).contains("40000 is more than the 32768"));
    let odd = model(vec![attention(2, 84, None)]);
    assert!(Plan::build(&odd, &options).unwrap_err().to_string().contains("84"));
    assert_eq!("3 x".parse::<SkipLayers>(), Err(BadSkipLayer("x".to_owned())));
    let huge = model(vec![attention(usize::MAX / 8, 128, None)]);
    assert_eq!(Plan::build(&huge, &options), Err(PlanError::TooLarge));
}

#[test]
fn flags_without_effect_in_auto_are_named() {
    let config = model(vec![attention(2, 128, None); 4]);
    let notices = |options| {
        let plan = Plan::build(&config, &PlanOptions { max_model_len: Some(64), ..options }).unwrap();
        plan.notices
    };
    let auto = PlanOptions {
        skip_layers: "1,sliding_window".parse().unwrap(),
        boundary_layers: Some(1),
        ..PlanOptions::default()
    };
    assert_eq!(
        notices(auto.clone()),
        [
            "--kv-cache-dtype-skip-layers has no effect: every layer is in auto",
            "--kv-boundary-layers has no effect: every layer is in auto"
        ]
    );
    assert!(notices(PlanOptions { boundary_layers: Some(0), ..PlanOptions::default() }).is_empty());
    let coded = PlanOptions { dtype: FOUR_BIT, skip_layers: "1".parse().unwrap(), ..auto };
    assert!(notices(coded).is_empty());
}

#[test]
fn a_key_bias_keeps_a_layer_native_under_coded_keys_only() {
    let config = model(vec![attention(2, 128, None); 6]);
    let norms = vec![None, Some(605.0), Some(22.0), Some(31.0), Some(33.0), Some(f32::NAN)];
    let plan = |dtype| {
        let options = PlanOptions {
            dtype,
            boundary_layers: Some(0),
            key_bias_norms: norms.clone(),
            ..PlanOptions::default()
        };
        Plan::build(&config, &options).unwrap()
    };
    use FormatReason::{KeyBias as K, Requested as R};
    let four = plan(FOUR_BIT);
    assert_eq!(reasons(&four), [R, K, R, R, K, K].map(Some));
    assert!(four.notices.iter().any(|notice| notice.contains("layer 1") && notice.contains("605")));
    assert_eq!(reasons(&plan(CacheDtype::TurboQuant(Preset::ThreeBitNc))), [R, K, K, K, K, K].map(Some));
    assert_eq!(reasons(&plan(CacheDtype::TurboQuant(Preset::K8V4))), [R, K, R, R, R, K].map(Some));
    assert_eq!(reasons(&plan(CacheDtype::Auto)), [R; 6].map(Some));
}
