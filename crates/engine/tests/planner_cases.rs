//! Configs that public planners got wrong, with the right figures.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::path::PathBuf;

use turboquant::format::{CacheDtype, NativeDtype};
use turboquant_engine::{
    config::{CacheSpec, ConfigError, ModelConfig},
    plan::{FormatReason, Plan, PlanError, PlanOptions},
};

fn text(name: &str) -> String {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("testdata/cases").join(format!("{name}.json"));
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{name}: {error}"))
}

fn config(name: &str) -> ModelConfig {
    ModelConfig::from_hf(&text(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
}

/// All layers in the dtype asked for.
fn plain(dtype: CacheDtype) -> PlanOptions {
    PlanOptions { dtype, boundary_layers: Some(0), ..PlanOptions::default() }
}

/// The default boundary layers.
fn default(dtype: CacheDtype) -> PlanOptions {
    PlanOptions { dtype, ..PlanOptions::default() }
}

fn build(config: &ModelConfig, options: PlanOptions) -> Plan {
    Plan::build(config, &options).unwrap()
}

/// bf16, k8v4, 4bit_nc, k3v4_nc, 3bit_nc.
const DTYPES: [usize; 5] = [0, 2, 3, 4, 5];

/// Bytes per token (inside, beyond) of the five dtypes.
fn per_token(config: &ModelConfig, options: fn(CacheDtype) -> PlanOptions) -> ([f64; 5], [f64; 5]) {
    let bytes = DTYPES.map(|index| build(config, options(CacheDtype::ALL[index])).bytes_per_token());
    (bytes.map(|bytes| bytes.inside), bytes.map(|bytes| bytes.beyond))
}

fn attending(config: &ModelConfig) -> Vec<usize> {
    layers(config, |spec| matches!(spec, CacheSpec::Attention(attention) if attention.window.is_none()))
}

fn sliding(config: &ModelConfig) -> Vec<usize> {
    layers(config, |spec| spec.attention().is_some_and(|attention| attention.window.is_some()))
}

fn layers(config: &ModelConfig, pick: impl Fn(&CacheSpec) -> bool) -> Vec<usize> {
    (0..config.layers.len()).filter(|&layer| pick(&config.layers[layer])).collect()
}

const K8V4: CacheDtype = CacheDtype::ALL[2];
const FOUR_BIT: CacheDtype = CacheDtype::ALL[3];

#[test]
fn linear_attention_hybrid_charges_its_ten_attention_layers() {
    for name in ["qwen3.6-35b-a3b", "interval-only"] {
        let config = config(name);
        assert_eq!(attending(&config), (3..40).step_by(4).collect::<Vec<_>>(), "{name}");
        assert_eq!(layers(&config, |spec| matches!(spec, CacheSpec::Recurrent(_))).len(), 30);
        assert!(config.is_hybrid());
        // 10 layers * 2 heads * slot of 1024/388/262/230/198 bytes at head_dim 256; no boundary on hybrids.
        let expected = [20480.0, 7760.0, 5240.0, 4600.0, 3960.0];
        assert_eq!(per_token(&config, default), (expected, expected));
        let plan = build(&config, default(K8V4));
        assert_eq!(plan.layers[0].state_bytes, 49_152 + 2_097_152);
        assert_eq!(plan.state_bytes_per_sequence(), 30 * 2_146_304);
        assert_eq!(plan.layers.len(), 40);
    }
}

#[test]
fn skip_lists_count_model_layers() {
    let config = config("qwen3.6-35b-a3b");
    let skip =
        |list: &str| build(&config, PlanOptions { skip_layers: list.parse().unwrap(), ..default(K8V4) });
    let plan = skip("3,39");
    assert_eq!(plan.bytes_per_token().inside, 10304.0);
    let kept: Vec<usize> = (0..40)
        .filter(|&layer| plan.layers[layer].paged.is_some_and(|paged| paged.reason == FormatReason::SkipList))
        .collect();
    assert_eq!(kept, [3, 39]);
    assert_eq!(skip("11").bytes_per_token().inside, 9032.0);
    let none = skip("0");
    assert_eq!(none.bytes_per_token().inside, 7760.0);
    assert!(none.notices.iter().any(|notice| {
        notice == "--kv-cache-dtype-skip-layers 0 has no effect: layer 0 is recurrent and holds no keys and values"
    }));
}

#[test]
fn two_head_shapes_in_one_model() {
    let config = config("gemma-4-31b");
    assert_eq!(attending(&config), (5..60).step_by(6).collect::<Vec<_>>());
    assert_eq!(sliding(&config).len(), 50);
    // 50 * 16 * slot(256) + 10 * 4 * slot(512).
    assert_eq!(
        per_token(&config, plain),
        (
            [901_120.0, 341_280.0, 230_320.0, 202_160.0, 174_000.0],
            [81_920.0, 30_880.0, 20_720.0, 18_160.0, 15_600.0]
        )
    );
    let sliding_bf16 = |dtype| PlanOptions { skip_layers: "sliding_window".parse().unwrap(), ..plain(dtype) };
    assert_eq!(per_token(&config, sliding_bf16).0, [901_120.0, 850_080.0, 839_920.0, 837_360.0, 834_800.0]);
    let auto = build(&config, plain(CacheDtype::Auto));
    let sequences =
        [(512, 461_373_440), (1024, 922_746_880), (32_768, 3_523_215_360), (262_144, 22_313_697_280)];
    for (tokens, bytes) in sequences {
        assert_eq!(auto.sequence_bytes(tokens), bytes, "{tokens}");
    }
    let packed = build(&config, plain(FOUR_BIT));
    assert_eq!(packed.sequence_bytes(32_768), 893_583_360);
    assert_eq!(packed.sequence_bytes(262_144), 5_646_254_080);
    // Pools of their own: pages stay at 16 tokens in both groups, nothing is padded.
    let groups: Vec<usize> = packed.groups.iter().map(|group| group.page_bytes).collect();
    assert_eq!(groups, [16 * 50 * 4192, 16 * 10 * 2072]);
}

#[test]
fn shared_layers_own_nothing_and_read_the_last_owner_of_their_kind() {
    let config = config("gemma-3n-e4b");
    let owners: Vec<usize> = layers(&config, |spec| spec.attention().is_some());
    assert_eq!(owners, (0..20).collect::<Vec<_>>());
    assert_eq!(attending(&config), [4, 9, 14, 19]);
    let plan = build(&config, plain(CacheDtype::Auto));
    for layer in 20..35 {
        let owner = if [24, 29, 34].contains(&layer) { 19 } else { 18 };
        assert_eq!(plan.layers[layer].owner, Some(owner), "{layer}");
        assert!(plan.layers[layer].paged.is_none());
    }
    assert_eq!(
        per_token(&config, plain),
        ([40_960.0, 15_520.0, 10_480.0, 9200.0, 7920.0], [8192.0, 3104.0, 2096.0, 1840.0, 1584.0])
    );
    for (tokens, bytes) in [(512, 20_971_520), (8192, 83_886_080), (32_768, 285_212_672)] {
        assert_eq!(plan.sequence_bytes(tokens), bytes);
    }
    // The boundary counts layers that own keys and values.
    let plan = build(&config, default(FOUR_BIT));
    let boundary: Vec<usize> = (0..35)
        .filter(|&layer| plan.layers[layer].paged.is_some_and(|paged| paged.reason == FormatReason::Boundary))
        .collect();
    assert_eq!(boundary, [0, 1, 18, 19]);
}

#[test]
fn a_latent_is_one_vector_and_stays_native() {
    let config = config("deepseek-v3");
    assert_eq!(config.layers.len(), 61);
    assert_eq!(config.max_model_len, 163_840);
    for dtype in CacheDtype::ALL {
        let plan = build(&config, default(dtype));
        assert_eq!(plan.bytes_per_token().inside, 70_272.0, "{dtype}");
        let paged = plan.layers[0].paged.unwrap();
        assert_eq!((paged.num_kv_heads, paged.key_head_dim, paged.value_head_dim), (1, 576, 0));
        let said = plan.notices.iter().any(|notice| notice.contains("does not apply to latent"));
        assert_eq!(said, dtype != CacheDtype::Auto, "{dtype}");
        assert_eq!(paged.reason == FormatReason::Latent, dtype != CacheDtype::Auto);
    }
}

#[test]
fn head_dim_is_read_before_it_is_derived() {
    let check = |name: &str, head_dim: usize, expected: [f64; 5]| {
        let config = config(name);
        assert_eq!(config.layers[0].attention().unwrap().key_head_dim, head_dim, "{name}");
        assert_eq!(per_token(&config, plain).0, expected, "{name}");
        config
    };
    let nemo = check("mistral-nemo", 128, [163_840.0, 62_720.0, 42_880.0, 37_760.0, 32_640.0]);
    assert_eq!(per_token(&nemo, default).0, [163_840.0, 72_832.0, 54_976.0, 50_368.0, 45_760.0]);
    check("kanana-like", 128, [131_072.0, 50_176.0, 34_304.0, 30_208.0, 26_112.0]);
    check("head-dim-null", 128, [131_072.0, 50_176.0, 34_304.0, 30_208.0, 26_112.0]);
    let gemma = check("gemma-3-270m-like", 256, [18_432.0, 6984.0, 4716.0, 4140.0, 3564.0]);
    assert_eq!(attending(&gemma), [5, 11, 17]);
    assert_eq!(per_token(&gemma, plain).1, [3072.0, 1164.0, 786.0, 690.0, 594.0]);
    let error = ModelConfig::from_hf(&text("not-derivable")).unwrap_err().to_string();
    assert_eq!(
        error,
        "head_dim: it is missing and cannot be derived: hidden_size 1792 is no multiple of num_attention_heads 24"
    );
}

#[test]
fn head_dim_80_and_null_kv_heads() {
    let config = config("phi-2");
    assert_eq!(config.dtype, NativeDtype::F16);
    let spec = config.layers[0].attention().unwrap();
    assert_eq!((spec.num_kv_heads, spec.key_head_dim), (32, 80));
    assert_eq!(per_token(&config, plain).0, [327_680.0, 126_976.0, 88_064.0, 77_824.0, 67_584.0]);
    assert_eq!(per_token(&config, default).0, [327_680.0, 152_064.0, 118_016.0, 109_056.0, 100_096.0]);
}

#[test]
fn windows_that_are_switched_off_do_not_count() {
    let off = config("swa-off");
    assert!(sliding(&off).is_empty());
    let all = [28_672.0, 10_976.0, 7504.0, 6608.0, 5712.0];
    assert_eq!(per_token(&off, plain), (all, all));
    assert_eq!(per_token(&off, default).0, [28_672.0, 13_504.0, 10_528.0, 9760.0, 8992.0]);
    let on = config("swa-on-21");
    assert_eq!(sliding(&on), (21..28).collect::<Vec<_>>());
    assert_eq!(on.layers[21].attention().unwrap().window, Some(4096));
    assert_eq!(per_token(&on, plain), (all, [21_504.0, 8232.0, 5628.0, 4956.0, 4284.0]));
    assert!(sliding(&config("swa-on-28")).is_empty());
}

#[test]
fn pattern_letters_and_infinity() {
    let config = config("nemotron-3-nano-infinity");
    assert_eq!(attending(&config), [5, 12, 19, 26, 33, 42]);
    assert_eq!(layers(&config, |spec| matches!(spec, CacheSpec::Recurrent(_))).len(), 23);
    assert_eq!(layers(&config, |spec| *spec == CacheSpec::None).len(), 23);
    assert_eq!(per_token(&config, default).0, [6144.0, 2352.0, 1608.0, 1416.0, 1224.0]);
    let plan = build(&config, default(FOUR_BIT));
    assert_eq!(plan.layers[0].state_bytes, 36_864 + 2_097_152);
}

#[test]
fn short_convolution_hybrid_charges_its_six_attention_layers() {
    let config = config("lfm2-1.2b");
    assert_eq!(attending(&config), [2, 5, 8, 10, 12, 14]);
    assert_eq!(config.layers[2].attention().unwrap().key_head_dim, 64);
    assert_eq!(per_token(&config, default).0, [12_288.0, 4800.0, 3360.0, 2976.0, 2592.0]);
    assert_eq!(build(&config, default(CacheDtype::Auto)).sequence_bytes(32_768), 402_653_184);
}

#[test]
fn ranks_replicate_kv_heads_and_latents() {
    let qwen = config("qwen2.5-3b");
    let deepseek = config("deepseek-v2-lite");
    let of = |config: &ModelConfig, dtype, ranks| {
        Plan::build(config, &PlanOptions { tensor_parallel: ranks, ..plain(dtype) })
            .map(|plan| plan.bytes_per_token().inside)
    };
    for (index, whole) in DTYPES.into_iter().zip([36_864.0, 14_112.0, 9648.0, 8496.0, 7344.0]) {
        let dtype = CacheDtype::ALL[index];
        assert_eq!(of(&qwen, dtype, 1), Ok(whole));
        for ranks in [2, 4, 8, 16] {
            assert_eq!(of(&qwen, dtype, ranks), Ok(whole / 2.0), "{dtype} on {ranks}");
        }
    }
    for ranks in [1, 2, 4, 8] {
        assert_eq!(of(&deepseek, CacheDtype::Auto, ranks), Ok(31_104.0));
    }
    for config in [&qwen, &deepseek] {
        let error = of(config, CacheDtype::Auto, 3).unwrap_err();
        assert!(matches!(error, PlanError::TensorParallel { ranks: 3, .. }));
        assert!(error.to_string().contains("16 query heads do not divide by 3"), "{error}");
    }
}

#[test]
fn a_short_window_in_every_other_layer() {
    let config = config("gpt-oss-120b");
    assert_eq!(sliding(&config), (0..36).step_by(2).collect::<Vec<_>>());
    assert_eq!(config.max_model_len, 131_072);
    assert!(config.learned_sinks);
    assert_eq!(
        per_token(&config, plain),
        ([73_728.0, 28_800.0, 20_160.0, 17_856.0, 15_552.0], [36_864.0, 14_400.0, 10_080.0, 8928.0, 7776.0])
    );
    let plan = build(&config, plain(CacheDtype::Auto));
    for (tokens, bytes) in [(128, 9_437_184), (4096, 155_713_536), (131_072, 4_836_556_800)] {
        assert_eq!(plan.sequence_bytes(tokens), bytes);
    }
}

#[test]
fn fields_that_gemma_3_leaves_out() {
    let config = config("gemma-3-4b-minimal");
    assert_eq!(attending(&config), [5, 11, 17, 23, 29]);
    let spec = config.layers[0].attention().unwrap();
    assert_eq!(
        (spec.num_qo_heads, spec.num_kv_heads, spec.key_head_dim, spec.window),
        (8, 4, 256, Some(1024))
    );
    assert_eq!(
        per_token(&config, plain),
        ([139_264.0, 52_768.0, 35_632.0, 31_280.0, 26_928.0], [20_480.0, 7760.0, 5240.0, 4600.0, 3960.0])
    );
    assert!(
        config
            .notices
            .iter()
            .any(|notice| notice.starts_with("text_config.num_key_value_heads is missing: 4"))
    );
}

#[test]
fn context_lengths_are_scaled_once() {
    let length = |max: usize, scaling: &str| {
        let json = format!(
            r#"{{"model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
                "num_hidden_layers": 2, "max_position_embeddings": {max}, "rope_scaling": {scaling}}}"#
        );
        ModelConfig::from_hf(&json).map(|config| config.max_model_len)
    };
    let cases = [
        (32_768, r#"{"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}"#, 131_072),
        (
            32_768,
            r#"{"rope_type": "telechat3-yarn", "factor": 4.0, "original_max_position_embeddings": 8192}"#,
            32_768,
        ),
        (163_840, r#"{"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096}"#, 163_840),
        (
            131_072,
            r#"{"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096}"#,
            131_072,
        ),
        (
            131_072,
            r#"{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192}"#,
            131_072,
        ),
        (
            10_485_760,
            r#"{"rope_type": "llama3", "factor": 16.0, "original_max_position_embeddings": 8192}"#,
            10_485_760,
        ),
        (
            1_048_576,
            r#"{"rope_type": "deepseek_yarn", "factor": 32, "original_max_position_embeddings": 32768}"#,
            1_048_576,
        ),
        (40_960, r#"{"rope_type": "yarn", "factor": 4.0}"#, 163_840),
        (40_960, "null", 40_960),
    ];
    for (max, scaling, expected) in cases {
        assert_eq!(length(max, scaling), Ok(expected), "{scaling}");
    }
    for factor in ["Infinity", "1e30", "-4", "0.5", "\"4\""] {
        let scaling = format!(r#"{{"rope_type": "yarn", "factor": {factor}}}"#);
        let error = length(40_960, &scaling).unwrap_err().to_string();
        assert!(error.contains("rope_scaling.factor"), "{error}");
    }
}

/// The same text with one field replaced, or removed with `None`.
fn with(text: &str, path: &[&str], value: Option<serde_json::Value>) -> String {
    let mut root: serde_json::Value = serde_json::from_str(text).unwrap();
    let mut at = &mut root;
    for key in &path[..path.len() - 1] {
        at = &mut at[*key];
    }
    let map = at.as_object_mut().unwrap();
    match value {
        Some(value) => map.insert(path[path.len() - 1].to_owned(), value),
        None => map.remove(path[path.len() - 1]),
    };
    root.to_string()
}

#[test]
fn a_missing_field_is_refused_with_its_path() {
    let nested = text("qwen3.6-35b-a3b");
    for field in [
        "num_key_value_heads",
        "num_hidden_layers",
        "num_attention_heads",
        "linear_num_value_heads",
        "linear_key_head_dim",
    ] {
        for value in [None, Some(serde_json::Value::Null)] {
            // Null KV heads mean as many as query heads, in every class.
            if field == "num_key_value_heads" && value.is_some() {
                continue;
            }
            let error = ModelConfig::from_hf(&with(&nested, &["text_config", field], value)).unwrap_err();
            assert_eq!(
                error,
                ConfigError::Missing {
                    path: format!("text_config.{field}"),
                    decides: "how many bytes the cache takes"
                }
            );
        }
    }
    let error = ModelConfig::from_hf(&with(&text("deepseek-v3"), &["kv_lora_rank"], None)).unwrap_err();
    assert!(error.to_string().starts_with("kv_lora_rank is missing"), "{error}");
}

#[test]
fn hostile_numbers_are_refused_with_their_path() {
    use serde_json::json;
    let nested = text("qwen3.6-35b-a3b");
    let values = [
        json!(1e30),
        json!(-1),
        json!(0),
        json!("40"),
        json!([40]),
        json!({}),
        json!(true),
        json!(2.5),
        json!(u64::MAX),
    ];
    for field in [
        "num_hidden_layers",
        "num_key_value_heads",
        "num_attention_heads",
        "head_dim",
        "linear_conv_kernel_dim",
    ] {
        for value in &values {
            let error = ModelConfig::from_hf(&with(&nested, &["text_config", field], Some(value.clone())));
            let error = error.expect_err(&format!("{field} = {value}")).to_string();
            assert!(error.starts_with(&format!("text_config.{field}")), "{value}: {error}");
        }
    }
    let infinite = text("deepseek-v3").replace("\"kv_lora_rank\": 512", "\"kv_lora_rank\": Infinity");
    let error = ModelConfig::from_hf(&infinite).unwrap_err().to_string();
    assert_eq!(error, "kv_lora_rank must be an integer, but is \"Infinity\"");
    let float = with(&text("deepseek-v3"), &["kv_lora_rank"], Some(json!({"__float__": "Infinity"})));
    assert!(
        ModelConfig::from_hf(&float).unwrap_err().to_string().starts_with("kv_lora_rank must be an integer")
    );
}

#[test]
fn unknown_families_and_layers_are_refused_by_name() {
    use serde_json::json;
    let error =
        ModelConfig::from_hf(r#"{"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]}"#);
    let error = error.unwrap_err().to_string();
    assert!(
        error.starts_with("model_type is \"t5\" and architectures is \"T5ForConditionalGeneration\""),
        "{error}"
    );
    assert!(error.contains("looked for model_type") && error.contains("qwen3_next"), "{error}");
    assert!(ModelConfig::from_hf("{}").unwrap_err().to_string().contains("absent"));
    assert!(matches!(ModelConfig::from_hf("[]"), Err(ConfigError::WrongType { .. })));
    // A file without model_type is known by its architecture.
    let llama = with(&text("kanana-like"), &["model_type"], None);
    assert_eq!(ModelConfig::from_hf(&llama).unwrap().model_type, "llama");
    let mut layers = vec![json!("linear_attention"); 40];
    layers[7] = json!("quantum_attention");
    let nested = with(&text("qwen3.6-35b-a3b"), &["text_config", "layer_types"], Some(json!(layers)));
    let error = ModelConfig::from_hf(&nested).unwrap_err().to_string();
    assert!(error.starts_with("text_config.layer_types[7] is 'quantum_attention'"), "{error}");
    layers.truncate(39);
    let short = with(&text("qwen3.6-35b-a3b"), &["text_config", "layer_types"], Some(json!(layers)));
    let error = ModelConfig::from_hf(&short).unwrap_err().to_string();
    assert!(
        error.contains("text_config.layer_types: it has 39 entries, but num_hidden_layers is 40"),
        "{error}"
    );
    // One entry more is the multi-token-prediction layer, which is not counted.
    layers.resize(41, json!("full_attention"));
    layers[7] = json!("full_attention");
    let longer = with(&text("qwen3.6-35b-a3b"), &["text_config", "layer_types"], Some(json!(layers)));
    assert_eq!(ModelConfig::from_hf(&longer).unwrap().layers.len(), 40);
}
