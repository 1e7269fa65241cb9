//! TurboQuant: a compressed KV cache for language models.
//!
//! This crate holds the codec, the packed pages and the attention kernels that read them. It knows
//! no tensor library: slices go in, packed rows and attention outputs come out.

pub mod codebook;
pub mod error;
pub mod exec;
pub mod format;
pub mod fp8;
pub mod hadamard;
pub mod layout;
pub mod rows;
