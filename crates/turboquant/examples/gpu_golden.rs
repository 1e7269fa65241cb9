//! Writes the pages that `cuda/harness/check_store.cu` holds a card's bytes to.
//!
//! `cargo run --release -p turboquant --features cuda --example gpu_golden -- crates/turboquant/testdata/gpu_pages.bin`

#[path = "../tests/cuda/golden_pages.rs"]
mod golden_pages;

use std::{env, fs, process::ExitCode};

fn main() -> ExitCode {
    let Some(path) = env::args().nth(1) else {
        eprintln!("gpu_golden: name the file to write");
        return ExitCode::from(2);
    };
    match fs::write(&path, golden_pages::file()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("gpu_golden: cannot write {path}: {error}");
            ExitCode::FAILURE
        }
    }
}
