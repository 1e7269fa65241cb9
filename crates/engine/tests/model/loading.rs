//! Model folders: shards, tied embeddings, ends of generation, and what is refused.

use std::{collections::BTreeSet, fs, path::Path};

use crate::dense::DenseAttention;
use crate::files::{Folder, Tensors, testdata};
use candle_core::{DType, Device, Tensor};
use serde_json::{Value, json};
use turboquant_engine::{
    batch::{Phase, Segment, StepBatch},
    error::LoadError,
    model::{LoadedModel, eos_token_ids},
};

fn read_json(path: &Path) -> Value {
    serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap()
}

fn logits(model: &LoadedModel) -> Vec<Vec<f32>> {
    let token_ids = vec![3, 1, 4, 1, 5, 9, 2, 6];
    let batch = StepBatch {
        positions: (0..8).collect(),
        logits_rows: (0..8).collect(),
        segments: vec![Segment { rows: 0..8, phase: Phase::Prefill, block_tables: Vec::new() }],
        token_ids,
        slot_mapping: Vec::new(),
    };
    model.forward(&batch, &mut DenseAttention::default()).unwrap().to_vec2().unwrap()
}

#[test]
fn shards_that_belong_together_are_read() {
    let whole = LoadedModel::load(&testdata("shards/00-ok")).unwrap();
    assert_eq!(whole.weights.bytes, 3424);
    assert_eq!(whole.weights.by_dtype["F32"].tensors, 12);
    assert_eq!(whole.eos_token_ids, BTreeSet::from([2]));
    for other in ["02-stray-shard", "04-no-index-two-shards", "07-index-lists-too-few"] {
        let other = LoadedModel::load(&testdata("shards").join(other)).unwrap();
        assert_eq!(logits(&other), logits(&whole));
    }
}

#[test]
fn shards_that_do_not_are_refused() {
    for (folder, reasons) in [
        ("01-missing-shard", &["model-00002-of-00002.safetensors, which is not in the folder"][..]),
        ("03-tensor-not-in-named-shard", &["lm_head.weight", "model-0000"]),
        ("05-no-index-one-of-two", &["one of 2 shards", "model-00002-of-00002.safetensors is not there"]),
        ("06-path-outside", &["lm_head.weight", "../01-missing-shard", "not a plain file name"]),
        ("08-truncated-shard", &["-of-00002.safetensors is damaged", "is cut off"]),
        ("09-shape-disagrees", &["self_attn.k_proj.weight has shape [8, 8]", "says [4, 8]"]),
        ("10-empty-weight-map", &["weight_map is empty"]),
    ] {
        let error = LoadedModel::load(&testdata("shards").join(folder)).unwrap_err().to_string();
        for reason in reasons {
            assert!(error.contains(reason), "{folder}: {error}");
        }
    }
}

/// The one-layer Llama of `shards/00-ok`.
fn small_llama() -> (Value, Tensors) {
    let folder = testdata("shards/00-ok");
    let mut tensors = Tensors::new();
    for shard in ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"] {
        tensors.extend(candle_core::safetensors::load(folder.join(shard), &Device::Cpu).unwrap());
    }
    (read_json(&folder.join("config.json")), tensors)
}

fn load(config: &Value, tensors: &Tensors) -> Result<LoadedModel, LoadError> {
    LoadedModel::load(&Folder::with_model(config, tensors).0)
}

/// Which matrix makes the logits.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Head {
    Embedding,
    Own,
}

#[test]
fn embeddings_are_tied_when_the_config_says_so() {
    let (config, tensors) = small_llama();
    let with = |field: Value, head: Option<Tensor>| {
        let (mut config, mut tensors) = (config.clone(), tensors.clone());
        config.as_object_mut().unwrap().remove("tie_word_embeddings");
        config.as_object_mut().unwrap().extend(field.as_object().unwrap().clone());
        tensors.remove("lm_head.weight");
        tensors.extend(head.map(|head| ("lm_head.weight".to_string(), head)));
        load(&config, &tensors)
    };
    let embedding = || Some(tensors["model.embed_tokens.weight"].clone());
    let own = || Some(tensors["lm_head.weight"].clone());
    let empty = || Some(Tensor::zeros(0, DType::F32, &Device::Cpu).unwrap());
    let untied = json!({"tie_word_embeddings": false});
    let by_embedding = logits(&with(untied.clone(), embedding()).unwrap());
    let by_own = logits(&with(untied.clone(), own()).unwrap());
    assert_ne!(by_embedding, by_own);

    let tied = || json!({"tie_word_embeddings": true});
    for (name, field, head, expected) in [
        ("tied, no head", tied(), None, Head::Embedding),
        ("tied, identical head", tied(), embedding(), Head::Embedding),
        ("tied, another head", tied(), own(), Head::Embedding),
        ("tied, empty placeholder", tied(), empty(), Head::Embedding),
        ("no flag, llama", json!({}), own(), Head::Own),
        ("null", json!({"tie_word_embeddings": null}), own(), Head::Own),
    ] {
        let model = with(field, head).unwrap();
        assert_eq!(
            logits(&model),
            if expected == Head::Own { &by_own[..] } else { &by_embedding[..] },
            "{name}"
        );
        // 16 x 8 floats, counted once when tied.
        assert_eq!(model.weights.bytes, if expected == Head::Own { 3424 } else { 3424 - 512 }, "{name}");
    }
    for field in [untied, json!({})] {
        let error = with(field, None).unwrap_err().to_string();
        assert!(error.contains("tensor lm_head.weight is missing"), "{error}");
    }
}

/// Multimodal files: the language model's fields are nested, its tensors have another prefix.
#[test]
fn nested_language_models_are_found() {
    let tiny = testdata("tiny/qwen3");
    let mut text = read_json(&tiny.join("config.json"));
    let tensors = candle_core::safetensors::load(tiny.join("model.safetensors"), &Device::Cpu).unwrap();
    text.as_object_mut().unwrap().remove("tie_word_embeddings");
    let tied = |inner: Option<bool>, outer: Option<bool>| {
        let mut text = text.clone();
        let mut config = json!({"model_type": "wrapper_vl"});
        if let Some(inner) = inner {
            text["tie_word_embeddings"] = inner.into();
        }
        if let Some(outer) = outer {
            config["tie_word_embeddings"] = outer.into();
        }
        config["text_config"] = text;
        config
    };
    let reference = {
        let mut config = text.clone();
        config["tie_word_embeddings"] = true.into();
        logits(&load(&config, &tensors).unwrap())
    };
    for prefix in ["model.language_model.", "language_model.model."] {
        let nested: Tensors = (tensors.iter())
            .filter_map(|(name, tensor)| {
                Some((format!("{prefix}{}", name.strip_prefix("model.")?), tensor.clone()))
            })
            .collect();
        for (inner, outer) in [(Some(true), None), (Some(true), Some(false)), (None, Some(true))] {
            let model = load(&tied(inner, outer), &nested).unwrap();
            assert_eq!(logits(&model), reference, "{inner:?} {outer:?}");
        }
        let error = load(&tied(None, None), &nested).unwrap_err().to_string();
        assert!(error.contains("lm_head.weight is missing"), "{error}");
    }
}

/// Gemma's default is tied. Its older spelling of RoPE, dtype and pattern means the same.
#[test]
fn older_spellings_of_gemma_mean_the_same() {
    let tiny = testdata("tiny/gemma3_text");
    let mut tensors = candle_core::safetensors::load(tiny.join("model.safetensors"), &Device::Cpu).unwrap();
    let mut config = read_json(&tiny.join("config.json"));
    tensors.insert("lm_head.weight".into(), tensors["model.embed_tokens.weight"].clone());
    let new = logits(&load(&config, &tensors).unwrap());
    let fields = config.as_object_mut().unwrap();
    for field in ["rope_parameters", "layer_types", "_sliding_window_pattern", "dtype", "tie_word_embeddings"]
    {
        fields.remove(field);
    }
    let old = json!({
        "rope_theta": 1_000_000.0, "rope_local_base_freq": 10_000.0, "rope_scaling": null,
        "sliding_window_pattern": 6, "torch_dtype": "float32",
    });
    fields.extend(old.as_object().unwrap().clone());
    tensors.remove("lm_head.weight");
    assert_eq!(logits(&load(&config, &tensors).unwrap()), new);
    // The scaling is that of the full layers alone; here it must change something.
    config["rope_scaling"] = json!({"rope_type": "linear", "factor": 8.0});
    assert_ne!(logits(&load(&config, &tensors).unwrap()), new);
}

#[test]
fn what_is_wrong_is_named() {
    let (config, tensors) = small_llama();
    for (field, value, reason) in [
        ("model_type", json!("mamba"), "architecture `mamba` is not supported; supported are llama, mistral"),
        ("hidden_size", json!(null), "hidden_size"),
        ("hidden_size", json!("eight"), "hidden_size"),
        ("intermediate_size", json!(1u64 << 40), "intermediate_size is 1099511627776"),
        (
            "intermediate_size",
            json!(17),
            "mlp.gate_proj.weight has shape [16, 8], the configuration says [17, 8]",
        ),
        ("vocab_size", json!(17), "model.embed_tokens.weight has shape [16, 8]"),
        ("hidden_act", json!("relu"), "hidden_act is relu, supported is silu"),
        ("attention_bias", json!(true), "self_attn.q_proj.bias is missing"),
        (
            "rope_scaling",
            json!({"type": "dynamic", "factor": 2.0}),
            "has type dynamic, whose frequencies change",
        ),
        ("rope_scaling", json!({"rope_type": "linear"}), "rope_parameters.factor is missing"),
        ("rope_scaling", json!({"rope_type": "spiral"}), "unknown type spiral"),
        ("rope_scaling", json!({"rope_type": 5}), "rope_type must be a string, but is 5"),
        ("rope_parameters", json!({"full_attention": {}}), "differs by kind of layer"),
        ("rope_theta", json!(-1.0), "rope_theta is -1.0, expected a positive number"),
        ("num_hidden_layers", json!(2), "model.layers.1.input_layernorm.weight is missing"),
    ] {
        let mut config = config.clone();
        config[field] = value;
        let error = load(&config, &tensors).unwrap_err().to_string();
        assert!(error.contains(reason), "{field}: {error}");
    }
    for name in tensors.keys() {
        let mut fewer = tensors.clone();
        fewer.remove(name);
        let error = load(&config, &fewer).unwrap_err().to_string();
        assert!(error.contains(&format!("tensor {name} is missing")), "{error}");
        let mut wide = tensors.clone();
        wide.insert(name.clone(), tensors[name].to_dtype(DType::F64).unwrap());
        let error = load(&config, &wide).unwrap_err().to_string();
        assert!(error.contains(&format!("tensor {name} has type F64; supported are F32")), "{error}");
    }
    let error = LoadedModel::load(&testdata("configs")).unwrap_err().to_string();
    assert!(error.contains("expected a .gguf file, or a folder with config.json"), "{error}");
    let error = LoadedModel::load(Path::new("/nowhere/model.gguf")).unwrap_err().to_string();
    assert!(error.contains("cannot read /nowhere/model.gguf"), "{error}");
}

/// Layers beyond the configured ones would be left out, and the answers be those of another model.
#[test]
fn layers_beyond_the_configuration_are_refused_by_the_first_tensor() {
    let (config, tensors) = small_llama();
    let layer = |number: usize| -> Tensors {
        let of_first = tensors.iter().filter(|(name, _)| name.starts_with("model.layers.0."));
        of_first.map(|(name, tensor)| (name.replace(".0.", &format!(".{number}.")), tensor.clone())).collect()
    };
    let mut more = tensors.clone();
    (1..12).for_each(|number| more.extend(layer(number)));
    let mut with_layers = config.clone();
    with_layers["num_hidden_layers"] = json!(12);
    load(&with_layers, &more).unwrap();
    for (configured, first) in [(1, 1), (2, 2), (9, 9), (10, 10)] {
        with_layers["num_hidden_layers"] = json!(configured);
        let folder = Folder::with_model(&with_layers, &more);
        let error = LoadedModel::load(&folder.0).unwrap_err().to_string();
        let tensor = format!(
            "model.safetensors: tensor model.layers.{first}.input_layernorm.weight is of a layer beyond the \
             {configured} of the configuration"
        );
        assert!(error.contains(&tensor), "{error}");
    }

    // Layers of other parts are no surplus, and other tensors are left out with a warning.
    let mut others = tensors.clone();
    for name in ["vision_tower.encoder.layers.7.weight", "model.layers.0.self_attn.rotary_emb.inv_freq"] {
        others.insert(name.into(), Tensor::zeros(2, DType::F32, &Device::Cpu).unwrap());
    }
    load(&config, &others).unwrap();
}

/// Of several tensors that are missing the first one in the order of layers is named, every time.
#[test]
fn the_first_missing_tensor_is_named() {
    let (config, tensors) = small_llama();
    let mut twelve = config.clone();
    twelve["num_hidden_layers"] = json!(12);
    for _ in 0..4 {
        let error = load(&twelve, &tensors).unwrap_err().to_string();
        assert!(error.contains("model.layers.1.input_layernorm.weight is missing"), "{error}");
    }
    // By an index that names more than there is.
    let folder = Folder::with_model(&config, &tensors);
    let mut map: serde_json::Map<String, Value> =
        tensors.keys().map(|name| (name.clone(), json!("model.safetensors"))).collect();
    for layer in [10, 2, 11] {
        map.insert(format!("model.layers.{layer}.mlp.up_proj.weight"), json!("model.safetensors"));
    }
    std::fs::write(folder.0.join("model.safetensors.index.json"), json!({"weight_map": map}).to_string())
        .unwrap();
    let error = LoadedModel::load(&folder.0).unwrap_err().to_string();
    assert!(error.contains("tensor model.layers.2.mlp.up_proj.weight is missing"), "{error}");
}

#[test]
fn sixteen_bit_weights_give_the_logits_of_their_values() {
    let (config, tensors) = small_llama();
    for dtype in [DType::BF16, DType::F16] {
        let cast = |to| -> Tensors {
            let cast = |tensor: &Tensor| tensor.to_dtype(dtype).unwrap().to_dtype(to).unwrap();
            tensors.iter().map(|(name, tensor)| (name.clone(), cast(tensor))).collect()
        };
        let narrow = load(&config, &cast(dtype)).unwrap();
        assert_eq!(narrow.weights.by_dtype.len(), 2, "norms are f32");
        let wide = load(&config, &cast(DType::F32)).unwrap();
        let pairs = logits(&narrow).concat().into_iter().zip(logits(&wide).concat());
        let worst = pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(worst <= 1e-6, "{dtype:?}: {worst}");
    }
}

#[test]
fn ends_of_generation_are_joined() {
    let nested = json!({"text_config": {"eos_token_id": [1, 106]}});
    for (config, generation, expected) in [
        (json!({"eos_token_id": 151645}), json!({"eos_token_id": [151645, 151643]}), &[151643, 151645][..]),
        (json!({"eos_token_id": 2}), json!({"eos_token_id": [2, 128131]}), &[2, 128131]),
        (json!({"eos_token_id": 1}), json!({"eos_token_id": [1, 106]}), &[1, 106]),
        (json!({"eos_token_id": [128001, 128008, 128009]}), Value::Null, &[128001, 128008, 128009]),
        (nested, Value::Null, &[1, 106]),
        (json!({}), json!({}), &[]),
        (json!({"eos_token_id": 151643}), json!({"eos_token_id": 151643}), &[151643]),
        (json!({"eos_token_id": null}), json!({"eos_token_id": null}), &[]),
        (json!({"eos_token_id": -1}), Value::Null, &[]),
        (json!({"eos_token_id": 2, "pad_token_id": 2}), Value::Null, &[2]),
    ] {
        let got = eos_token_ids(&config, Some(&generation).filter(|json| !json.is_null()));
        assert_eq!(got, expected.iter().copied().collect(), "{config} {generation}");
    }
}
