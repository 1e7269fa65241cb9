//! Any bytes as a `config.json`: a config or a refusal, a plan or a refusal, never a panic.
#![no_main]

use libfuzzer_sys::fuzz_target;
use turboquant::format::CacheDtype;
use turboquant_engine::{
    config::ModelConfig,
    plan::{Plan, PlanOptions},
};

fuzz_target!(|bytes: &[u8]| {
    let Ok(config) = ModelConfig::from_hf(&String::from_utf8_lossy(bytes)) else { return };
    for dtype in CacheDtype::ALL {
        if let Ok(plan) = Plan::build(&config, &PlanOptions { dtype, ..PlanOptions::default() }) {
            let slabs: u64 = plan
                .slabs()
                .map(|slab| slab.page_bytes as u64 * plan.groups[slab.group].num_pages as u64)
                .sum();
            assert_eq!(slabs, plan.page_pool_bytes());
        }
    }
});
