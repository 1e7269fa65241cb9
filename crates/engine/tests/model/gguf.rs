//! GGUF files: the tiny models of every family in llama.cpp's names and orders give transformers' logits;
//! damaged files are refused.

use std::{collections::BTreeSet, fs, path::Path};

use crate::dense::DenseAttention;
use crate::files::{Folder, Meta, Tensors, gguf, testdata};
use candle_core::{DType, Device, Tensor};
use turboquant_engine::{
    batch::{Phase, Segment, StepBatch},
    gguf::Metadata,
    model::LoadedModel,
};

/// Largest difference of a logit; the logits themselves are within +-8.
const MAX_ERROR: f32 = 3e-5;

/// llama.cpp's name of a tensor of transformers.
fn gguf_name(name: &str, post_norms: bool) -> String {
    let fixed = [
        ("model.embed_tokens.weight", "token_embd.weight"),
        ("model.norm.weight", "output_norm.weight"),
        ("lm_head.weight", "output.weight"),
    ];
    if let Some((_, gguf)) = fixed.iter().find(|(hf, _)| *hf == name) {
        return (*gguf).into();
    }
    let (layer, rest) = name.strip_prefix("model.layers.").unwrap().split_once('.').unwrap();
    let (stem, kind) = rest.rsplit_once('.').unwrap();
    let stem = match stem {
        "input_layernorm" => "attn_norm",
        "self_attn.q_proj" => "attn_q",
        "self_attn.k_proj" => "attn_k",
        "self_attn.v_proj" => "attn_v",
        "self_attn.qkv_proj" => "attn_qkv",
        "self_attn.o_proj" => "attn_output",
        "self_attn.q_norm" => "attn_q_norm",
        "self_attn.k_norm" => "attn_k_norm",
        "post_attention_layernorm" if post_norms => "post_attention_norm",
        "post_attention_layernorm" | "pre_feedforward_layernorm" => "ffn_norm",
        "mlp.gate_proj" => "ffn_gate",
        "mlp.up_proj" | "mlp.gate_up_proj" => "ffn_up",
        "mlp.down_proj" => "ffn_down",
        "post_feedforward_layernorm" => "post_ffw_norm",
        other => panic!("{other}"),
    };
    format!("blk.{layer}.{stem}.{kind}")
}

/// As llama.cpp's converter reorders the rows of queries and keys of `llama` models: both halves of a
/// head interleaved.
fn interleave(weight: &Tensor, heads: usize) -> Tensor {
    let (rows, cols) = weight.dims2().unwrap();
    let halves = weight.reshape((heads, 2, rows / heads / 2, cols)).unwrap();
    halves.transpose(1, 2).unwrap().contiguous().unwrap().reshape((rows, cols)).unwrap()
}

/// The GGUF form of a model, `extra` metadata below the architecture's name overriding what is derived.
fn to_gguf(
    config: &serde_json::Value,
    tensors: Tensors,
    architecture: &str,
    extra: Vec<(&str, Meta<'_>)>,
) -> Vec<u8> {
    let number = |field: &str| Meta::U32(config[field].as_u64().unwrap() as u32);
    let heads = |field: &str| config[field].as_u64().unwrap() as usize;
    let head_dim = config["head_dim"].as_u64().unwrap_or(16) as u32;
    let keys = vec![
        ("block_count", number("num_hidden_layers")),
        ("context_length", number("max_position_embeddings")),
        ("embedding_length", number("hidden_size")),
        ("feed_forward_length", number("intermediate_size")),
        ("attention.head_count", number("num_attention_heads")),
        ("attention.head_count_kv", number("num_key_value_heads")),
        ("attention.layer_norm_rms_epsilon", Meta::F32(config["rms_norm_eps"].as_f64().unwrap() as f32)),
        ("attention.key_length", Meta::U32(head_dim)),
        ("attention.value_length", Meta::U32(head_dim)),
    ];
    let kept = keys.into_iter().filter(|(key, _)| extra.iter().all(|(other, _)| other != key));
    let kept: Vec<_> = kept.collect();
    let mut metadata = vec![("general.architecture".to_string(), Meta::Str(architecture))];
    metadata.extend(kept.into_iter().chain(extra).map(|(key, value)| match key.strip_prefix('/') {
        Some(global) => (global.to_string(), value),
        None => (format!("{architecture}.{key}"), value),
    }));
    metadata.push(("tokenizer.ggml.tokens".into(), Meta::Strs(&["a", "b", "c"])));
    metadata.push(("tokenizer.ggml.eos_token_id".into(), Meta::U32(2)));
    metadata.push(("tokenizer.ggml.eot_token_id".into(), Meta::U32(7)));

    let gemma = architecture.starts_with("gemma");
    let llama = architecture == "llama";
    let mut tensors: Vec<(String, Tensor)> = tensors
        .into_iter()
        .map(|(hf, tensor)| {
            let tensor = match hf.as_str() {
                name if llama && name.contains("q_proj") => interleave(&tensor, heads("num_attention_heads")),
                name if llama && name.contains("k_proj") => interleave(&tensor, heads("num_key_value_heads")),
                name if gemma && name.contains("norm") => (tensor + 1.0).unwrap(),
                _ => tensor,
            };
            (gguf_name(&hf, gemma), tensor)
        })
        .collect();
    tensors.sort_by(|a, b| a.0.cmp(&b.0));
    gguf(&metadata, &tensors)
}

fn read_config(folder: &Path) -> serde_json::Value {
    serde_json::from_str(&fs::read_to_string(folder.join("config.json")).unwrap()).unwrap()
}

/// The GGUF form of the tiny model `name`.
fn tiny_as_gguf(name: &str, architecture: &str, extra: Vec<(&str, Meta<'_>)>) -> Vec<u8> {
    let folder = testdata("tiny").join(name);
    let tensors = candle_core::safetensors::load(folder.join("model.safetensors"), &Device::Cpu).unwrap();
    to_gguf(&read_config(&folder), tensors, architecture, extra)
}

/// One layer, a vocabulary of 16: some 5 KB.
fn smallest(extra: Vec<(&str, Meta<'_>)>) -> Vec<u8> {
    let folder = testdata("shards/00-ok");
    let mut tensors = Tensors::new();
    for shard in ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"] {
        tensors.extend(candle_core::safetensors::load(folder.join(shard), &Device::Cpu).unwrap());
    }
    to_gguf(&read_config(&folder), tensors, "llama", extra)
}

fn load(bytes: &[u8]) -> Result<LoadedModel, turboquant_engine::error::LoadError> {
    let folder = Folder::new();
    let path = folder.0.join("model.gguf");
    fs::write(&path, bytes).unwrap();
    LoadedModel::load(&path)
}

fn check(name: &str, architecture: &str, extra: Vec<(&str, Meta<'_>)>) -> LoadedModel {
    let model = load(&tiny_as_gguf(name, architecture, extra)).unwrap();
    let golden = testdata("tiny").join(name).join("golden.safetensors");
    let golden = candle_core::safetensors::load(golden, &Device::Cpu).unwrap();
    let ids = golden["input_ids"].to_dtype(DType::U32).unwrap().flatten_all().unwrap();
    let ids: Vec<u32> = ids.to_vec1().unwrap();
    for phase in [Phase::Prefill, Phase::Decode] {
        let batch = StepBatch {
            positions: (0..ids.len() as u32).collect(),
            logits_rows: (0..ids.len() as u32).collect(),
            segments: vec![Segment { rows: 0..ids.len(), phase, block_tables: Vec::new() }],
            token_ids: ids.clone(),
            slot_mapping: Vec::new(),
        };
        let logits = model.forward(&batch, &mut DenseAttention::default()).unwrap();
        let difference = (logits - golden["logits_full"].squeeze(0).unwrap()).unwrap().abs().unwrap();
        let worst = difference.flatten_all().unwrap().max(0).unwrap().to_scalar::<f32>().unwrap();
        println!("{name} as {architecture}, {phase:?}: max error {worst:.2e}");
        assert!(worst <= MAX_ERROR, "{name} {phase:?}: {worst}");
    }
    model
}

#[test]
fn llama() {
    let model = check("llama", "llama", Vec::new());
    assert_eq!(model.eos_token_ids, BTreeSet::from([2, 7]));
    assert_eq!(model.config.max_model_len, 512);
    assert_eq!(model.vocab_size, 256);
}

#[test]
fn mistral_is_llama_with_a_window() {
    check("mistral", "llama", vec![("attention.sliding_window", Meta::U32(16))]);
}

#[test]
fn qwen2() {
    let model = check("qwen2", "qwen2", Vec::new());
    assert!(model.key_bias_norms.iter().all(|norm| norm.is_some_and(|norm| norm > 0.5 && norm < 6.0)));
}

#[test]
fn qwen3() {
    let model = check("qwen3", "qwen3", Vec::new());
    assert_eq!(model.key_bias_norms, [None; 3]);
}

#[test]
fn gemma2() {
    let model = check("gemma2", "gemma2", vec![("attention.sliding_window", Meta::U32(16))]);
    let windows: Vec<_> = model.config.layers.iter().map(|layer| layer.attention().unwrap().window).collect();
    assert_eq!(windows, [Some(16), None, Some(16), None]);
}

/// Neither the pattern nor the RoPE base of the sliding layers is in published files.
#[test]
fn gemma3() {
    let keys =
        || vec![("attention.sliding_window", Meta::U32(16)), ("rope.freq_base", Meta::F32(1_000_000.0))];
    let model = check("gemma3_text", "gemma3", keys());
    let windows = |model: &LoadedModel| -> Vec<_> {
        model.config.layers.iter().map(|layer| layer.attention().unwrap().window).collect()
    };
    assert_eq!(windows(&model), [Some(16), Some(16), Some(16), Some(16), Some(16), None]);
    let flags = [true, true, true, true, true, false];
    for pattern in [Meta::U32(6), Meta::Bools(&flags)] {
        let mut keys = keys();
        keys.push(("attention.sliding_window_pattern", pattern));
        assert_eq!(windows(&check("gemma3_text", "gemma3", keys)), windows(&model));
    }
}

#[test]
fn phi3() {
    check("phi3", "phi3", Vec::new());
}

/// A number for all layers, or one per layer: never the first one for all.
#[test]
fn kv_heads_may_be_listed_by_layer() {
    let key = "attention.head_count_kv";
    check("llama", "llama", vec![(key, Meta::U32s(&[2, 2, 2]))]);
    for (heads, reason) in [
        (&[2, 2][..], "or a list of 3 of them"),
        (&[0, 2, 2], "is 0 in layer 0"),
        (&[2, 3, 2], "is 3 in layer 1, which does not divide its 4 query heads"),
        (&[2, 1, 2], "blk.1.attn_k.weight has shape [32, 64], the configuration says [16, 64]"),
    ] {
        let bytes = tiny_as_gguf("llama", "llama", vec![(key, Meta::U32s(heads))]);
        let error = load(&bytes).unwrap_err().to_string();
        assert!(error.contains(reason), "{heads:?}: {error}");
    }
}

#[test]
fn what_is_not_supported_is_named() {
    for (extra, reason) in [
        (("/general.alignment", Meta::U32(0)), "general.alignment is 0"),
        (("/general.alignment", Meta::U32(48)), "general.alignment is 48"),
        (("/split.count", Meta::U32(3)), "split.count is 3"),
        (("expert_count", Meta::U32(8)), "llama.expert_count is 8: mixtures of experts"),
        (("rope.scaling.type", Meta::Str("longrope")), "llama.rope.scaling.type is longrope"),
        (("rope.dimension_count", Meta::U32(3)), "llama.rope.dimension_count is 3"),
        (("block_count", Meta::U32(2)), "tensor blk.1.attn_norm.weight is missing"),
        (("block_count", Meta::U32(u32::MAX)), "llama.block_count"),
        (("attention.key_length", Meta::U32(1 << 30)), "llama.attention.key_length is 1073741824"),
        (("attention.head_count", Meta::Str("two")), "llama.attention.head_count"),
        (("feed_forward_length", Meta::U32(15)), "ffn_gate.weight has shape [16, 8]"),
        (("embedding_length", Meta::U32(16)), "has shape"),
    ] {
        let error = load(&smallest(vec![extra])).unwrap_err().to_string();
        assert!(error.contains(reason) && error.contains("model.gguf"), "{reason}: {error}");
    }
    let bytes = tiny_as_gguf("qwen3", "lfm2", Vec::new());
    let error = load(&bytes).unwrap_err().to_string();
    assert!(error.contains("`lfm2` is not supported; supported are llama, qwen2"), "{error}");
}

#[test]
fn layers_beyond_the_block_count_are_refused() {
    let bytes = tiny_as_gguf("llama", "llama", vec![("block_count", Meta::U32(2))]);
    let error = load(&bytes).unwrap_err().to_string();
    assert!(
        error.contains(
            "model.gguf: tensor blk.2.attn_k.weight is of a layer beyond the 2 of the configuration"
        ),
        "{error}"
    );
}

/// Types are numbers in the file: 23 is IQ4_XS, 3 is Q4_1, which takes fewer bytes.
#[test]
fn unknown_types_and_wrong_sizes_are_named() {
    let good = smallest(Vec::new());
    let name = b"blk.0.attn_q.weight";
    let at = good.windows(name.len()).position(|window| window == name).unwrap() + name.len();
    let dtype_at = at + 4 + 2 * 8;
    let with_dtype = |dtype: u32| {
        let mut bytes = good.clone();
        bytes[dtype_at..dtype_at + 4].copy_from_slice(&dtype.to_le_bytes());
        load(&bytes).unwrap_err().to_string()
    };
    let error = with_dtype(23);
    assert!(error.contains("tensor blk.0.attn_q.weight has type IQ4_XS; supported are F32"), "{error}");
    let error = with_dtype(12345);
    assert!(error.contains("has type number 12345"), "{error}");
    let error = with_dtype(3);
    assert!(error.contains("blk.0.attn_q.weight has rows of 8 elements, Q4_1 has blocks of 32"), "{error}");
    let mut bytes = good.clone();
    bytes[dtype_at + 4..dtype_at + 12].copy_from_slice(&64u64.to_le_bytes());
    let error = load(&bytes).unwrap_err().to_string();
    assert!(error.contains("overlap"), "{error}");
    bytes[dtype_at + 4..dtype_at + 12].copy_from_slice(&u64::MAX.to_le_bytes());
    let error = load(&bytes).unwrap_err().to_string();
    assert!(error.contains("tensor blk.0.attn_q.weight is cut off"), "{error}");
}

/// What comes out of a damaged file must not flood or garble a terminal.
#[test]
fn names_that_are_no_names_are_refused_in_one_short_line() {
    let good = smallest(Vec::new());
    let name = b"blk.0.attn_q.weight";
    let at = good.windows(name.len()).position(|window| window == name).unwrap();
    let refusal = |at: usize, patch: &[u8], tail: usize| {
        let mut bytes = good.clone();
        bytes.extend(vec![b'x'; tail]);
        bytes[at..at + patch.len()].copy_from_slice(patch);
        let error = load(&bytes).unwrap_err().to_string();
        assert!(error.len() < 500 && !error.contains(char::is_control), "{error}");
        error
    };
    assert!(refusal(at, b"\n", 0).contains("holds control characters"));
    assert!(refusal(at, b"\xff", 0).contains("is no UTF-8 text"));
    assert!(refusal(at - 8, &1025u64.to_le_bytes(), 4096).contains("has 1025 bytes"));
}

#[test]
fn cut_files_are_refused() {
    let good = smallest(Vec::new());
    assert!(load(&good).is_ok());
    for cut in 0..good.len() {
        let error = load(&good[..cut]).unwrap_err().to_string();
        assert!(error.contains("model.gguf"), "cut at {cut}: {error}");
    }
    let error = load(&good[..good.len() - 1]).unwrap_err().to_string();
    assert!(error.contains("tensor token_embd.weight is cut off"), "{error}");
    for (bytes, reason) in [
        (&b"version https://git-lfs.github.com/spec/v1"[..], "Git LFS pointer"),
        (b"<!DOCTYPE html>", "web page"),
        (b"GGUF\0\0\0\x03 and so on", "big-endian"),
        (b"GGUF\x01\0\0\0 and so on", "versions 2 and 3"),
        (b"GGML and so on", "does not start with GGUF"),
    ] {
        let error = load(bytes).unwrap_err().to_string();
        assert!(error.contains(reason), "{error}");
    }
}

/// Whatever the bytes of the header are, the answer is a model or an error, and nothing is allocated
/// because a number in the file says so.
#[test]
fn changed_headers_do_no_harm() {
    let good = smallest(Vec::new());
    let header = good.windows(12).rposition(|window| window == b"token_embd.w").unwrap() + 60;
    let mut state = 1u32;
    let mut next = |below: usize| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as usize % below
    };
    let folder = Folder::new();
    let path = folder.0.join("model.gguf");
    let mut refused = 0;
    for _ in 0..4000 {
        let mut bytes = good.clone();
        for _ in 0..1 + next(3) {
            let at = next(header);
            bytes[at] = [0, 1, 0x7f, 0x80, 0xff, next(256) as u8][next(6)];
        }
        refused += usize::from(load(&bytes).is_err());
        // The same reader, keeping vocabularies.
        fs::write(&path, &bytes).unwrap();
        let _ = Metadata::read(&path);
    }
    assert!(refused > 1000, "{refused}");
}
