//! Models: files of both formats, and logits against those of transformers.
#![expect(clippy::unwrap_used, clippy::print_stdout, reason = "a test may")]

#[path = "../dense/mod.rs"]
mod dense;
mod files;
mod gguf;
mod loading;
mod tiny;
