//! The real model `smollm2`, which these tests fetch if it is not there:
//! `cargo test --release -p turboquant-cli -- --ignored smollm2`

use std::{path::Path, process::Command};

use crate::support::{Server, turboquant};
use serde_json::Value;

#[test]
#[ignore = "needs the model smollm2 (93 MB)"]
fn smollm2_answers_on_the_command_line() {
    let golden: Value = serde_json::from_str(include_str!("../../testdata/smollm2_golden.json")).unwrap();
    // The answer of which transformers is surest: its best token is always 0.57 ahead of the second.
    let answer = &golden["answers"][2];
    let output = turboquant()
        .args(["run", "-m", "smollm2", "--max-tokens", "48"])
        .arg(answer["messages"][0]["content"].as_str().unwrap())
        .output()
        .unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!(text.trim_end(), answer["greedy_text"].as_str().unwrap());
}

#[test]
#[ignore = "needs the model smollm2 (93 MB) and a Python with the openai package in TURBOQUANT_PYTHON"]
fn smollm2_serves_the_official_client() {
    let python = std::env::var("TURBOQUANT_PYTHON").unwrap_or_else(|_| "python3".to_owned());
    let arguments = ["--kv-cache-dtype", "turboquant_4bit_nc", "--max-model-len", "2048"];
    let server = Server::start(Path::new("smollm2"), &arguments);
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/openai_client.py");
    let status = Command::new(python)
        .arg(script)
        .args([&format!("http://{}", server.address), "smollm2"])
        .status()
        .unwrap();
    assert!(status.success());
}

/// Bounds a quarter above what was measured on 2026-11-29 (mean KL divergence 0.0058, 0.0092, 0.031,
/// 0.107, 0.134; top-1 agreement 96.9, 92.6, 87.1, 77.0, 76.2 %; 256 tokens after 768 of Hamlet).
#[test]
#[ignore = "needs the model smollm2 (93 MB)"]
fn smollm2_presets_stay_close_to_auto() {
    let output = turboquant()
        .args(["compare", "-m", "smollm2", "--context", "1024", "--score-tokens", "256", "--json"])
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let comparison: Value = serde_json::from_slice(&output.stdout).unwrap();
    let bounds = [
        ("fp8", 0.008, 0.93),
        ("turboquant_k8v4", 0.012, 0.89),
        ("turboquant_4bit_nc", 0.040, 0.83),
        ("turboquant_k3v4_nc", 0.136, 0.73),
        ("turboquant_3bit_nc", 0.170, 0.72),
    ];
    let rows = &comparison["rows"].as_array().unwrap()[1..];
    assert_eq!(rows.len(), bounds.len());
    for (row, (dtype, kl_mean, top1)) in rows.iter().zip(bounds) {
        assert_eq!(row["kv_cache_dtype"], dtype);
        let divergence = &row["divergence"];
        let got = |field: &str| divergence[field].as_f64().unwrap();
        assert!(got("kl_mean") < kl_mean && got("top1_agreement") > top1, "{row}");
        // Nor much closer: a score that never read the packed rows would be 0.
        assert!(got("kl_mean") > kl_mean / 4.0, "{row}");
    }
}
