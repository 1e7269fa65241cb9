//! Attention on packed pages, on every instruction set of this machine, against the dense f64 oracle.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod compare;
mod decode;
mod extremes;
mod fixture;
mod golden;
mod independence;
mod pages;
mod prefill;
mod refusals;
mod sinks;
