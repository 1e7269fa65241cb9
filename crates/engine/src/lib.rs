//! From a model file and token ids to generated token ids, over a compressed paged KV cache.

pub mod attention;
pub mod batch;
pub mod cache;
pub mod config;
pub mod engine;
pub mod error;
pub mod executor;
pub mod gguf;
pub mod inspect;
pub mod model;
pub mod plan;
pub mod request;
pub mod runner;
pub mod sampler;
pub mod scheduler;
pub mod sequence;
pub mod session;
mod weights;

pub use weights::{DtypeCount, WeightSummary};
