//! The allocator against the plan.

use super::*;
use crate::{
    config::{AttentionSpec, CacheSpec, ModelConfig, StateSpec},
    plan::{Budget, PlanOptions},
};
use turboquant::format::{CacheDtype, NativeDtype};

fn attention(window: Option<usize>, head_dim: usize) -> CacheSpec {
    CacheSpec::Attention(AttentionSpec {
        num_qo_heads: 8,
        num_kv_heads: 2,
        key_head_dim: head_dim,
        value_head_dim: head_dim,
        window,
    })
}

fn options(dtype: CacheDtype, tokens: usize) -> PlanOptions {
    PlanOptions { dtype, budget: Budget::Tokens(tokens), max_num_seqs: 3, ..PlanOptions::default() }
}

#[test]
fn the_cache_takes_the_bytes_of_the_plan() {
    let layers = vec![
        attention(None, 64),
        attention(Some(200), 80),
        CacheSpec::Shared { owner: 0 },
        attention(Some(200), 80),
        attention(None, 64),
        attention(None, 64),
    ];
    let config = ModelConfig::new("test", NativeDtype::Bf16, 8192, layers);
    for dtype in CacheDtype::ALL {
        let plan = Plan::build(&config, &options(dtype, 5000)).unwrap();
        let cache = KvCache::new(&plan).unwrap();
        assert_eq!(cache.allocated_bytes(), plan.total_bytes());
        assert_eq!(CacheMemory::allocate(&plan).unwrap().bytes(), plan.total_bytes());
        assert_eq!(cache.pools().num_groups(), 2);
        assert!(cache.pools().capacity() >= 5000);
    }
}

#[test]
fn untouched_pages_are_zero() {
    let config = ModelConfig::new("test", NativeDtype::F16, 8192, vec![attention(None, 64)]);
    let cache = KvCache::new(&Plan::build(&config, &options(CacheDtype::Auto, 100)).unwrap()).unwrap();
    let (_, layer) = cache.owner(0).unwrap();
    assert_eq!(layer.slab().len(), 7 * 16 * 2 * 2 * 64 * 2);
    assert!(layer.slab().iter().all(|&byte| byte == 0));
}

/// Bytes of this process that are in memory.
#[cfg(target_os = "linux")]
fn resident_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() * 1024
}

#[test]
#[cfg(target_os = "linux")]
fn pages_take_memory_when_they_are_touched() {
    let config = ModelConfig::new("test", NativeDtype::F16, 1 << 20, vec![attention(None, 256)]);
    let plan = Plan::build(&config, &options(CacheDtype::Auto, 1 << 20)).unwrap();
    assert_eq!(plan.total_bytes(), 2 << 30);
    let before = resident_bytes();
    let cache = KvCache::new(&plan).unwrap();
    // Other tests run meanwhile, but take nothing like this.
    assert!(resident_bytes() < before + (1 << 29));
    assert_eq!(cache.allocated_bytes(), 2 << 30);
}

#[test]
fn memory_that_nobody_has_is_refused_in_words() {
    let config = ModelConfig::new("test", NativeDtype::F32, 1 << 40, vec![attention(None, 512)]);
    let plan = Plan::build(&config, &options(CacheDtype::Auto, 1 << 34)).unwrap();
    let error = KvCache::new(&plan).unwrap_err();
    assert!(matches!(error, CacheError::Memory { layer: 0, .. }), "{error}");
    let text = error.to_string();
    assert!(text.starts_with("no memory for the KV cache: it takes 140737488355328 bytes"), "{text}");
    // Past the address space, too.
    let mut plan = plan;
    plan.groups[0].num_pages = usize::MAX;
    assert!(matches!(KvCache::new(&plan), Err(CacheError::Memory { .. })));
}

#[test]
fn hybrids_can_be_allocated_and_not_yet_run() {
    let state = StateSpec {
        conv_bytes: 100,
        recurrent_bytes: 1000,
        num_heads: 1,
        grouped_conv_bytes: 0,
        num_groups: 1,
        dtype_named: false,
    };
    let layers = vec![CacheSpec::Recurrent(state), attention(None, 64), CacheSpec::Recurrent(state)];
    let config = ModelConfig::new("test", NativeDtype::Bf16, 8192, layers);
    let plan = Plan::build(&config, &options(CacheDtype::Fp8, 1000)).unwrap();
    assert_eq!(CacheMemory::allocate(&plan).unwrap().bytes(), plan.total_bytes());
    let error = KvCache::new(&plan).unwrap_err().to_string();
    assert_eq!(error, "layer 0 keeps a recurrent state, which this engine cannot run yet");
}
