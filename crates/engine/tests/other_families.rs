//! Families of which no published config lies here, by the rules of their transformers 5.23 classes.

use turboquant_engine::config::{CacheSpec, ConfigError, ModelConfig};

/// A config of `layers` layers with 8 query heads, 2 KV heads and hidden size 512, and `fields`.
fn read(model_type: &str, layers: usize, fields: &str) -> Result<ModelConfig, ConfigError> {
    ModelConfig::from_hf(&format!(
        r#"{{"model_type": "{model_type}", "num_hidden_layers": {layers}, "hidden_size": 512,
            "num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 65536 {}{fields}}}"#,
        if fields.is_empty() { "" } else { "," }
    ))
}

/// One letter a layer: F full, S sliding, L state, B both, V latent, M nothing, R reads another.
fn letters(model_type: &str, layers: usize, fields: &str) -> String {
    let config = read(model_type, layers, fields).unwrap_or_else(|error| panic!("{model_type}: {error}"));
    config
        .layers
        .iter()
        .map(|layer| match layer {
            CacheSpec::Attention(spec) if spec.window.is_none() => 'F',
            CacheSpec::Attention(_) => 'S',
            CacheSpec::Latent { .. } => 'V',
            CacheSpec::Compressed(_) => 'C',
            CacheSpec::Recurrent(_) => 'L',
            CacheSpec::Hybrid(..) => 'B',
            CacheSpec::Shared { .. } => 'R',
            CacheSpec::None => 'M',
        })
        .collect()
}

#[test]
fn which_layers_slide() {
    let window = r#""sliding_window": 128"#;
    let rows = [
        // `sliding_window` alone: all layers, or none when it is null.
        ("mistral", window.to_owned(), "SSSSSSSS"),
        ("mistral", r#""sliding_window": null"#.to_owned(), "FFFFFFFF"),
        // MistralConfig: sliding_window defaults to 4096.
        ("mistral", String::new(), "SSSSSSSS"),
        ("mixtral", String::new(), "FFFFFFFF"),
        ("starcoder2", window.to_owned(), "SSSSSSSS"),
        // LlamaConfig knows no window.
        ("llama", window.to_owned(), "FFFFFFFF"),
        // Qwen2Config: from max_window_layers on, when switched on.
        ("qwen2", format!(r#"{window}, "use_sliding_window": true, "max_window_layers": 5"#), "FFFFFSSS"),
        ("qwen3", format!(r#"{window}, "use_sliding_window": true, "max_window_layers": 0"#), "SSSSSSSS"),
        // Qwen2MoeConfig: even layers below max_window_layers.
        ("qwen2_moe", format!(r#"{window}, "use_sliding_window": true, "max_window_layers": 4"#), "SFSFFFFF"),
        ("qwen3_moe", format!(r#"{window}, "use_sliding_window": true"#), "SSSSSSSS"),
        ("qwen3_moe", window.to_owned(), "FFFFFFFF"),
        // (i + 1) % n == 0 is full.
        ("gemma2", window.to_owned(), "SFSFSFSF"),
        ("cohere2", format!(r#"{window}, "sliding_window_pattern": 3"#), "SSFSSFSS"),
        ("cohere2", window.to_owned(), "SSSFSSSF"),
        ("exaone4", window.to_owned(), "SSSFSSSF"),
        ("exaone4", r#""sliding_window": null"#.to_owned(), "FFFFFFFF"),
        ("afmoe", format!(r#"{window}, "global_attn_every_n_layers": 2"#), "SFSFSFSF"),
        ("olmo3", String::new(), "SSSFSSSF"),
        // CwmConfig: i % 4 == 0 is full.
        ("cwm", window.to_owned(), "FSSSFSSS"),
        // Dots1Config: from max_window_layers on, whatever use_sliding_window says.
        ("dots1", format!(r#"{window}, "max_window_layers": 6"#), "FFFFFFSS"),
        // SmolLM3Config: layers without RoPE, when switched on.
        ("smollm3", format!(r#"{window}, "use_sliding_window": true"#), "FFFSFFFS"),
        (
            "smollm3",
            format!(r#"{window}, "use_sliding_window": true, "no_rope_layers": [0,1,1,1,1,1,1,0]"#),
            "SFFFFFFS",
        ),
        ("smollm3", window.to_owned(), "FFFFFFFF"),
        // Gemma3nTextConfig: (i + 1) % 5 == 0 is full; the last ones reuse.
        ("gemma3n_text", r#""num_kv_shared_layers": 2"#.to_owned(), "SSSSFSRR"),
        // Gemma4TextConfig: (i + 1) % 6 == 0 is full, and the last layer.
        ("gemma4_text", String::new(), "SSSSSFSF"),
        ("gemma3_text", r#""sliding_window_pattern": 2"#.to_owned(), "SFSFSFSF"),
    ];
    for (model_type, fields, expected) in rows {
        assert_eq!(letters(model_type, 8, &fields), expected, "{model_type} {fields}");
    }
}

#[test]
fn which_layers_are_recurrent() {
    let mamba = r#""mamba_d_state": 16, "mamba_n_heads": 16, "mamba_d_head": 64"#;
    let rows = [
        ("jamba", r#""mamba_d_state": 16"#.to_owned(), "LLLLFLLLLLLL"),
        ("jamba", r#""attn_layer_period": 4, "attn_layer_offset": 1"#.to_owned(), "LFLLLFLLLFLL"),
        // ZambaConfig: two Mamba layers and a hybrid one, then i % 6 == 4 of the rest.
        ("zamba", String::new(), "LLBLLLLBLLLL"),
        ("zamba2", r#""hybrid_layer_ids": [1, 7]"#.to_owned(), "LBLLLLLBLLLL"),
        ("bamba", format!(r#"{mamba}, "attn_layer_indices": [0, 11]"#), "FLLLLLLLLLLF"),
        ("bamba", mamba.to_owned(), "LLLLLLLLLLLL"),
        ("falcon_h1", mamba.to_owned(), "BBBBBBBBBBBB"),
        ("olmo_hybrid", String::new(), "LLLFLLLFLLLF"),
        ("recurrent_gemma", String::new(), "LLSLLSLLSLLS"),
        ("recurrent_gemma", r#""block_types": ["attention", "recurrent"]"#.to_owned(), "SLSLSLSLSLSL"),
        ("mamba", String::new(), "LLLLLLLLLLLL"),
        ("falcon_mamba", String::new(), "LLLLLLLLLLLL"),
        ("mamba2", String::new(), "LLLLLLLLLLLL"),
        ("lfm2", String::new(), "FFFFFFFFFFFF"),
        ("minimax_text_01", r#""attn_type_list": [0,0,1,0,0,1,0,0,1,0,0,1]"#.to_owned(), "LLFLLFLLFLLF"),
        ("bailing_hybrid", r#""kv_lora_rank": 64, "qk_rope_head_dim": 32"#.to_owned(), "LLLLLVLLLLLV"),
        (
            "kimi_linear",
            r#""kv_lora_rank": 64, "qk_rope_head_dim": 32, "linear_attn_config": {"num_heads": 8, "head_dim": 64,
               "full_attn_layers": [1, 12]}"#
                .to_owned(),
            "VLLLLLLLLLLV",
        ),
        ("nemotron_h", r#""hybrid_override_pattern": "M-ME*EM-M*-E", "mamba_num_heads": 8, "mamba_head_dim": 64"#.to_owned(), "LMLMFMLMLFMM"),
    ];
    for (model_type, fields, expected) in rows {
        assert_eq!(letters(model_type, 12, &fields), expected, "{model_type} {fields}");
    }
}

#[test]
fn states_have_the_shapes_of_their_kind() {
    let state = |model_type: &str, fields: &str| {
        let config = read(model_type, 4, fields).unwrap_or_else(|error| panic!("{model_type}: {error}"));
        config
            .layers
            .iter()
            .find_map(|layer| layer.state().copied())
            .map(|s| (s.conv_bytes, s.recurrent_bytes))
    };
    // Mamba-1, expand 2: 1024 channels, kernel 4, state 16.
    assert_eq!(state("mamba", ""), Some((1024 * 3 * 2, 1024 * 16 * 4)));
    // Mamba-2: 1024 channels and 2 * 8 groups * 128, state 128.
    assert_eq!(state("mamba2", ""), Some(((1024 + 2048) * 3 * 2, 1024 * 128 * 4)));
    // RG-LRU: a convolution and one number per channel.
    assert_eq!(state("recurrent_gemma", r#""lru_width": 640"#), Some((640 * 3 * 2, 640 * 4)));
    // OLMo-Hybrid derives: 8 heads, keys of 3/4 * 512 / 8 = 48, values of 96.
    assert_eq!(state("olmo_hybrid", ""), Some(((2 * 384 + 768) * 3 * 2, 8 * 48 * 96 * 4)));
    // A dtype in the file.
    let half = r#""mamba_ssm_dtype": "bfloat16", "linear_num_key_heads": 4, "linear_num_value_heads": 8,
        "linear_key_head_dim": 32, "linear_value_head_dim": 32"#;
    assert_eq!(state("qwen3_next", half), Some(((2 * 128 + 256) * 3 * 2, 8 * 32 * 32 * 2)));
    let error = read("qwen3_next", 4, &half.replace("bfloat16", "int4")).expect_err("no dtype").to_string();
    assert!(error.starts_with("mamba_ssm_dtype: 'int4'"), "{error}");
}

#[test]
fn layers_of_deci_have_heads_of_their_own_or_none() {
    let blocks = r#""block_configs": [
        {"attention": {"n_heads_in_group": 4}}, {"attention": {"no_op": true, "n_heads_in_group": null}},
        {"attention": {"n_heads_in_group": 8}}, {"attention": {"replace_with_linear": true}}]"#;
    assert_eq!(letters("nemotron-nas", 4, blocks), "FMFM");
    let config = read("nemotron-nas", 4, blocks).expect("a config");
    let heads: Vec<usize> =
        config.layers.iter().filter_map(CacheSpec::attention).map(|spec| spec.num_kv_heads).collect();
    assert_eq!(heads, [2, 1]);
    assert_eq!(letters("deci", 3, r#""num_key_value_heads_per_layer": [4, 2, 1]"#), "FFF");
    let odd = blocks.replace("\"n_heads_in_group\": 8", "\"n_heads_in_group\": 3");
    let error = read("deci", 4, &odd).expect_err("3 of 8").to_string();
    assert!(error.starts_with("block_configs[2].attention.n_heads_in_group: 3 does not divide"), "{error}");
    let error = read("deci", 4, "").expect_err("no blocks").to_string();
    assert!(error.starts_with("block_configs is missing"), "{error}");
}

#[test]
fn kv_heads_can_be_a_list() {
    let list = r#""num_key_value_heads": [8, 0, 4, 2], "head_dim": 64"#;
    let json =
        format!(r#"{{"model_type": "llama", "num_hidden_layers": 4, "num_attention_heads": 8, {list}}}"#);
    let config = ModelConfig::from_hf(&json).expect("a config");
    let heads = |layer: &CacheSpec| layer.attention().map(|spec| spec.num_kv_heads);
    assert_eq!(config.layers.iter().map(heads).collect::<Vec<_>>(), [Some(8), None, Some(4), Some(2)]);
    let error =
        |list: &str| ModelConfig::from_hf(&json.replace("[8, 0, 4, 2]", list)).expect_err(list).to_string();
    assert!(error("[8, 4]").starts_with("num_key_value_heads: it has 2 entries"));
    assert!(error("[8, 4, 3, 2]").starts_with("num_key_value_heads: 3 KV heads do not divide"));
    assert!(error("[8, 4, -1, 2]").starts_with("num_key_value_heads[2] is -1"));
}

#[test]
fn head_widths_differ_per_layer_where_the_file_says_so() {
    // What transformers 5 writes for Gemma-4: one object per layer that differs.
    let config = read(
        "gemma4_text",
        6,
        r#""head_dim": 16, "per_layer_config": {"5": {"head_dim": 32, "num_key_value_heads": 4}}"#,
    )
    .expect("a config");
    let shapes: Vec<(usize, usize)> = config
        .layers
        .iter()
        .filter_map(CacheSpec::attention)
        .map(|spec| (spec.num_kv_heads, spec.key_head_dim))
        .collect();
    assert_eq!(shapes, [(2, 16), (2, 16), (2, 16), (2, 16), (2, 16), (4, 32)]);
}

#[test]
fn indexers_of_glm_are_shared_where_the_file_says_so() {
    let fields =
        |more: &str| format!(r#""kv_lora_rank": 64, "qk_rope_head_dim": 32, "index_head_dim": 128 {more}"#);
    let widths = |more: &str| {
        let config = read("glm_moe_dsa", 6, &fields(more)).unwrap_or_else(|error| panic!("{error}"));
        let width = |layer: &CacheSpec| match layer {
            CacheSpec::Latent { indexer_width, .. } => *indexer_width,
            _ => usize::MAX,
        };
        config.layers.iter().map(width).collect::<Vec<_>>()
    };
    assert_eq!(widths(""), [128; 6]);
    assert_eq!(widths(r#", "index_topk_pattern": "FSSFSS""#), [128, 0, 0, 128, 0, 0]);
    // max(i - 2 + 1, 0) % 3 == 0.
    assert_eq!(widths(r#", "index_topk_freq": 3"#), [128, 128, 0, 0, 128, 0]);
}

#[test]
fn contradictions_are_refused() {
    let rows = [
        (
            "llama",
            r#""num_key_value_heads": 3"#,
            "num_key_value_heads: 3 KV heads do not divide num_attention_heads 8",
        ),
        ("jamba", r#""attn_layer_period": 4, "attn_layer_offset": 4"#, "attn_layer_offset: 4 is not below"),
        (
            "gemma3n_text",
            r#""num_kv_shared_layers": 8"#,
            "num_kv_shared_layers: 8 of 8 layers leave no owner",
        ),
        (
            "gemma3n_text",
            r#""num_kv_shared_layers": 4"#,
            "num_kv_shared_layers: no earlier layer of its kind",
        ),
        (
            "bamba",
            r#""mamba_d_state": 16, "mamba_n_heads": 16, "mamba_d_head": 63"#,
            "mamba_d_head: 16 heads of 63",
        ),
        (
            "bamba",
            r#""attn_layer_indices": [8], "mamba_d_state": 16, "mamba_n_heads": 16"#,
            "attn_layer_indices[0] is 8",
        ),
        ("gemma3_text", r#""use_bidirectional_attention": true"#, "use_bidirectional_attention: an encoder"),
        (
            "mistral",
            r#""layer_types": ["mamba"]"#,
            "layer_types: it has 1 entries, but num_hidden_layers is 8",
        ),
        ("mistral", r#""torch_dtype": "int8""#, "torch_dtype: 'int8' is no dtype of a cache"),
        ("minimax", "", "layer_types is missing"),
        ("granitemoehybrid", "", "layer_types is missing"),
        ("nemotron_h", r#""hybrid_override_pattern": "M*X""#, "hybrid_override_pattern[2] is 'X'"),
        (
            "kimi_linear",
            r#""kv_lora_rank": 64, "qk_rope_head_dim": 32, "linear_attn_config": {"num_heads": 8, "head_dim": 64,
               "full_attn_layers": [4, 8], "kda_layers": [1, 2, 3]}"#,
            "linear_attn_config.kda_layers: together with full_attn_layers",
        ),
        (
            "deepseek_v4",
            r#""head_dim": 64, "index_head_dim": 16, "sliding_window": 16, "compress_ratios": [0,4,128,5,0,0,0,0]"#,
            "compress_ratios[3]",
        ),
    ];
    for (model_type, fields, expected) in rows {
        let error = read(model_type, 8, fields).expect_err(model_type).to_string();
        assert!(error.starts_with(expected), "{model_type} {fields}: {error}");
    }
}
