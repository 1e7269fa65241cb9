//! From a model file and token ids to generated token ids, over a compressed paged KV cache.
#![expect(dead_code, reason = "GGUF files and the other families build on these parts")]

pub mod batch;
pub mod cache;
pub mod config;
pub mod error;
pub mod model;
pub mod plan;
pub mod sampler;
pub mod scheduler;
pub mod sequence;
mod weights;

pub use weights::{DtypeCount, WeightSummary};
