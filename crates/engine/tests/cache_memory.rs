//! The allocator takes the plan's bytes, for every published config and without weights.

use std::{fs, path::Path};

use turboquant::format::{CacheDtype, Preset};
use turboquant_engine::{
    cache::{CacheError, CacheMemory, KvCache},
    config::ModelConfig,
    plan::{Budget, Plan, PlanOptions},
};

#[test]
fn every_published_config_is_allocated_as_planned() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata/configs");
    let mut runnable = 0;
    let files: Vec<_> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert!(files.len() > 40);
    for path in files {
        let config = ModelConfig::from_hf_file(&path).unwrap();
        for dtype in [CacheDtype::Auto, CacheDtype::TurboQuant(Preset::FourBitNc)] {
            let options = PlanOptions {
                dtype,
                budget: Budget::Memory(6 << 30),
                max_num_seqs: 2,
                ..PlanOptions::default()
            };
            let name = format!("{} {dtype}", path.display());
            let plan = Plan::build(&config, &options).unwrap_or_else(|error| panic!("{name}: {error}"));
            assert!(plan.total_bytes() > 0, "{name}");
            let memory = CacheMemory::allocate(&plan).unwrap();
            assert_eq!(memory.bytes(), plan.total_bytes(), "{name}");
            drop(memory);
            match KvCache::new(&plan) {
                Ok(cache) => {
                    assert_eq!(cache.allocated_bytes(), plan.total_bytes(), "{name}");
                    assert!(cache.pools().capacity() >= plan.max_model_len, "{name}");
                    runnable += 1;
                }
                Err(CacheError::Unsupported { .. }) => {}
                Err(error) => panic!("{name}: {error}"),
            }
        }
    }
    assert!(runnable > 20, "{runnable}");
}
