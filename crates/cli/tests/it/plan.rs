//! `plan`: tables and JSON from configs alone, exit code 2 and a sentence for what is wrong.

use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::support::{tiny_model, turboquant};

fn testdata(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../engine/testdata").join(path)
}

/// Exit code, stdout and stderr of `plan PATH ARGUMENTS`.
fn plan(path: &Path, arguments: &[&str]) -> (i32, String, String) {
    let output = turboquant().arg("plan").arg(path).args(arguments).output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (output.status.code().unwrap(), text(output.stdout), text(output.stderr))
}

fn json(path: &Path, arguments: &[&str]) -> Value {
    let (code, out, error) = plan(path, &[arguments, &["--json"]].concat());
    assert_eq!(code, 0, "{error}");
    serde_json::from_str(&out).unwrap()
}

#[test]
fn a_hybrid_matches_the_log_of_vllm_and_says_what_fits() {
    let path = testdata("cases/qwen3.6-35b-a3b.json");
    let arguments =
        ["--kv-cache-dtype", "turboquant_k8v4", "--as", "vllm", "--compare", "--kv-cache-memory", "10GiB"];
    let (code, out, error) = plan(&path, &arguments);
    assert_eq!((code, error.as_str()), (0, ""));
    let lines: Vec<Vec<&str>> = out.lines().map(|line| line.split_whitespace().collect()).collect();
    let has = |words: &str| lines.contains(&words.split_whitespace().collect());
    assert!(has("3, 7, ... 39 (10) all tokens 2 x 256 turboquant_k8v4 asked for 776 -"), "{out}");
    assert!(has("0-2, 4-6, ... 36-38 (30) state - - - - 2,146,304"), "{out}");
    assert!(has("this plan 7,760") && has("bf16 in all layers 20,480"), "{out}");
    assert!(has("block size 2,768 tokens"), "{out}");
    assert!(has("padding of a recurrent state 1,664 B on 2,146,304 B (0.08 %)"), "{out}");
    for dtype in ["auto", "fp8", "turboquant_4bit_nc", "turboquant_k3v4_nc", "turboquant_3bit_nc"] {
        assert!(lines.iter().any(|line| line.first() == Some(&dtype) && line.len() > 7), "{dtype}: {out}");
    }

    let document = json(&path, &arguments);
    assert_eq!(document["schema"], 1);
    assert_eq!(document["plan"]["bytes_per_token"]["beyond_window"], 7760);
    assert_eq!(document["plan"]["layers"][0]["state_bytes"], 2_146_304);
    assert_eq!(document["vllm"]["block_tokens"], 2768);
    assert_eq!(document["vllm"]["unified"]["padding_bytes"], 1664);
    assert_eq!(document["compare"][3]["kv_cache_dtype"], "turboquant_4bit_nc");
    assert_eq!(document["compare"][3]["bytes_per_token"]["inside_window"], 5240);
    let plan = &document["plan"];
    let total = plan["capacity"]["total_bytes"].as_u64().unwrap();
    let pools: u64 =
        plan["groups"].as_array().unwrap().iter().map(|group| group["bytes"].as_u64().unwrap()).sum();
    assert_eq!(total, pools + 16 * 30 * 2_146_304);
    assert_eq!(total + plan["capacity"]["unused_bytes"].as_u64().unwrap(), 10 << 30);
}

#[test]
fn a_dense_model_has_its_boundary_in_the_whole_model_ratio() {
    let path = testdata("configs/Llama-3.1-8B-Instruct.json");
    let document =
        json(&path, &["--kv-cache-dtype", "turboquant_4bit_nc", "--memory", "24GiB", "--reserve", "1GiB"]);
    let plan = &document["plan"];
    // 32 * 512 / (28 * 134 + 4 * 512) = 2.82 per KV head.
    let ratio = plan["ratio_to_bf16"]["at_max_model_len"].as_f64().unwrap();
    assert!((ratio - 16_384.0 / 5800.0).abs() < 1e-9, "{ratio}");
    let reasons: Vec<&str> =
        plan["layers"].as_array().unwrap().iter().map(|l| l["reason"].as_str().unwrap()).collect();
    assert_eq!(
        (reasons[1], reasons[2], reasons[29], reasons[30]),
        ("boundary", "requested", "requested", "boundary")
    );
    assert_eq!(plan["weights"]["source"], "estimated");
    let weights = plan["weights"]["bytes"].as_u64().unwrap();
    assert_eq!(plan["options"]["kv_memory_bytes"].as_u64().unwrap(), (23 << 30) - weights);
}

#[test]
fn weights_of_a_folder_are_counted() {
    let (_folder, model) = tiny_model("plan");
    let document = json(&model, &[]);
    let weights = &document["plan"]["weights"];
    assert_eq!(weights["source"], "safetensors");
    let file = std::fs::metadata(model.join("model.safetensors")).unwrap().len();
    let counted = weights["bytes"].as_u64().unwrap();
    // The file's header is all that is not weights.
    assert!(counted < file && counted > file - 16_384, "{counted} of {file}");
    assert_eq!(document["plan"]["model"]["name"], "tiny");
    let (code, out, _) = plan(&model, &["--weights-dtype", "fp8"]);
    assert!(code == 0 && out.contains("--weights-dtype has no effect"), "{out}");
}

#[test]
fn what_is_wrong_is_said_in_one_sentence_with_exit_code_2() {
    let case = |name: &str| testdata(&format!("cases/{name}.json"));
    let qwen = testdata("configs/Qwen3-0.6B.json");
    let rows: [(PathBuf, &[&str], &str); 9] = [
        (case("not-derivable"), &[], "hidden_size 1792 is no multiple of num_attention_heads 24"),
        (testdata("layer_kinds.json"), &[], "model_type is absent"),
        (testdata("no-such.json"), &[], "no-such.json"),
        (qwen.clone(), &["--tensor-parallel-size", "3"], "16 query heads do not divide by 3"),
        (qwen.clone(), &["--memory", "1GiB"], "leaves nothing for a cache"),
        (qwen.clone(), &["--max-model-len", "50000"], "50000 is more than the 40960 tokens"),
        (
            qwen.clone(),
            &["--kv-cache-memory", "100MiB", "--max-model-len", "40960"],
            "the longest that fits has",
        ),
        (qwen.clone(), &["--kv-cache-dtype-skip-layers", "28"], "layers 0 to 27"),
        (qwen, &["--kv-cache-dtype", "int4"], "is no KV cache dtype"),
    ];
    for (path, arguments, expected) in rows {
        let (code, out, error) = plan(&path, arguments);
        assert_eq!((code, out.as_str()), (2, ""), "{arguments:?}: {error}");
        assert!(error.contains(expected), "{arguments:?}: {error}");
    }
}

/// Sequences of 100 tokens take 7 pages of 16 each, however the tokens add up.
#[test]
fn without_a_limit_all_sequences_find_room() {
    for page_size in ["16", "64", "256"] {
        let arguments = ["--max-model-len", "100", "--max-num-seqs", "3", "--page-size", page_size];
        let document = json(&testdata("tiny/llama/config.json"), &arguments);
        assert_eq!(document["plan"]["capacity"]["sequences_at_max_model_len"], 3.0, "{page_size}");
    }
}
