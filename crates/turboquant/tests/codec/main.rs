//! The codec against vLLM's bytes, f64 arithmetic and itself on every instruction set.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod codebook;
mod fp8;
mod golden;
mod hadamard;
mod layout;
mod quality;
mod random;
mod rows;
mod unusual;
