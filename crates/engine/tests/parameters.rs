//! Estimated parameters against published sizes.

use std::path::PathBuf;

use turboquant_engine::config::ModelConfig;

#[test]
fn estimates_meet_published_sizes() {
    // Parameters of the language model in billions, as the model cards say (two to four digits).
    let published = [
        ("Llama-3.1-8B", 8.03, 16.0),
        ("Mistral-7B-Instruct-v0.3", 7.25, 16.0),
        ("Ministral-8B-Instruct-2410", 8.02, 16.0),
        ("Qwen3-0.6B", 0.596, 16.0),
        ("Phi-4-mini-instruct", 3.84, 16.0),
        ("Gemma-2-9b", 9.24, 16.0),
        ("Gemma-4-26B-A4B", 25.2, 16.0),
        ("gpt-oss-20b", 20.9, 4.25),
        ("gpt-oss-120b", 116.8, 4.25),
        ("DeepSeek-V3", 671.0, 8.0),
        ("MiniMax-M1", 456.0, 16.0),
        ("MiniMax-M2.5", 229.0, 8.0),
        ("Qwen3-Next-80B-A3B-Thinking", 80.0, 16.0),
        ("Nemotron-3-Nano-30B-A3B", 31.6, 16.0),
        ("Nemotron-H-56B-Base-8K", 56.0, 16.0),
        ("Jamba-1.5-Mini", 51.6, 16.0),
        ("Falcon-H1-7B.trimmed", 7.59, 16.0),
        ("Granite-4.0-H-1B", 1.46, 16.0),
        ("LFM2-2.6B.trimmed", 2.57, 16.0),
        ("LFM2.5-VL-1.6B", 1.17, 16.0),
        ("Bamba-9B-v2", 9.78, 16.0),
        ("Kimi-Linear-48B-A3B.reassembled", 48.0, 16.0),
        ("MiMo-V2-Flash", 309.0, 8.0),
    ];
    for (name, billions, bits) in published {
        let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(format!("testdata/configs/{name}.json"));
        let estimate = ModelConfig::from_hf_file(&path).unwrap().parameters.unwrap();
        let off = estimate.parameters as f64 / 1e9 / billions - 1.0;
        assert!(off.abs() < 0.03, "{name}: {} is off by {:.1} %", estimate.parameters, 100.0 * off);
        assert_eq!(estimate.bits, bits, "{name}");
    }
}
