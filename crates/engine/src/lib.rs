//! From a model file and token ids to generated token ids, over a compressed paged KV cache.

pub mod batch;
pub mod config;
pub mod plan;
