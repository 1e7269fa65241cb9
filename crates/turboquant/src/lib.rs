//! TurboQuant: a compressed KV cache for language models.
//!
//! This crate holds the codec, the packed pages and the attention kernels that read them. It knows
//! no tensor library: slices go in, packed rows and attention outputs come out.

pub mod exec;
pub mod format;
