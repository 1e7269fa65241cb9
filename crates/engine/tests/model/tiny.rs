//! Logits of tiny random models against those of transformers 5.23.0 in f32.

use std::path::{Path, PathBuf};

use crate::dense::DenseAttention;
use candle_core::{DType, Device, Tensor};
use turboquant_engine::batch::{Phase, Segment, StepBatch};
use turboquant_engine::model::LoadedModel;

/// Largest difference of a logit; the logits themselves are within +-8.
const MAX_ERROR: f32 = 3e-5;

fn tiny(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata/tiny").join(name)
}

fn step(token_ids: &[u32], start: usize, phase: Phase) -> StepBatch {
    StepBatch {
        token_ids: token_ids.to_vec(),
        positions: (start..start + token_ids.len()).map(|p| p as u32).collect(),
        segments: vec![Segment { rows: 0..token_ids.len(), phase, block_tables: Vec::new() }],
        slot_mapping: Vec::new(),
        logits_rows: (0..token_ids.len() as u32).collect(),
    }
}

fn max_error(got: &Tensor, golden: &Tensor) -> f32 {
    let difference = (got - golden).unwrap().abs().unwrap();
    let worst = difference.flatten_all().unwrap().max(0).unwrap().to_scalar::<f32>().unwrap();
    assert!(worst.is_finite());
    worst
}

fn check(name: &str) {
    let model = LoadedModel::load(&tiny(name)).unwrap();
    let golden = candle_core::safetensors::load(tiny(name).join("golden.safetensors"), &Device::Cpu).unwrap();
    let ids = golden["input_ids"].to_dtype(DType::U32).unwrap().flatten_all().unwrap();
    let ids: Vec<u32> = ids.to_vec1().unwrap();

    let full = model.forward(&step(&ids, 0, Phase::Prefill), &mut DenseAttention::default()).unwrap();
    let full_error = max_error(&full, &golden["logits_full"].squeeze(0).unwrap());

    let mut attention = DenseAttention::default();
    let mut logits = vec![model.forward(&step(&ids[..32], 0, Phase::Prefill), &mut attention).unwrap()];
    for (position, id) in ids.iter().enumerate().skip(32) {
        logits.push(model.forward(&step(&[*id], position, Phase::Decode), &mut attention).unwrap());
    }
    let cached = Tensor::cat(&logits, 0).unwrap();
    let cached_error = max_error(&cached, &golden["logits_prefill32_then_decode"].squeeze(0).unwrap());

    println!("{name}: max error {full_error:.2e} in one pass, {cached_error:.2e} prefill 32 then decode");
    assert!(full_error <= MAX_ERROR, "{name}: {full_error}");
    assert!(cached_error <= MAX_ERROR, "{name}: {cached_error}");
}

#[test]
fn llama() {
    check("llama");
}

#[test]
fn mistral() {
    check("mistral");
}

#[test]
fn ministral() {
    check("ministral");
}

#[test]
fn qwen2() {
    check("qwen2");
}

#[test]
fn qwen3() {
    check("qwen3");
}

#[test]
fn gemma2() {
    check("gemma2");
}

#[test]
fn gemma3() {
    check("gemma3_text");
}

#[test]
fn phi3() {
    check("phi3");
}
