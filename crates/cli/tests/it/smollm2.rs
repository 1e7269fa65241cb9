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
