//! Every published config in `testdata/configs`: which layers hold what, and how many bytes.
//!
//! Expected figures are worked out by hand from the fields of each file. Per token and layer, keys and
//! values in bf16 take `2 * heads * (key width + value width)` bytes. States, with `k` the kernel of the
//! convolution: Mamba-2 `(inner + 2 * groups * state) * (k - 1) * 2 + inner * state * 4`; Mamba-1
//! `inner * (k - 1) * 2 + inner * state * 4`; delta rule `(2 * Hk * dk + Hv * dv) * (k - 1) * 2 +
//! Hv * dk * dv * 4`; lightning attention `H * d * d * 4`; short convolution `hidden * (k - 1) * 2`.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{collections::BTreeMap, path::PathBuf};

use turboquant::{format::CacheDtype, page::PageCodec, rows::RowCodec};
use turboquant_engine::{
    config::{CacheSpec, ModelConfig},
    plan::{Budget, Plan, PlanOptions, SideKind},
};

fn testdata(path: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("testdata").join(path)
}

fn config(name: &str) -> ModelConfig {
    ModelConfig::from_hf_file(&testdata(&format!("configs/{name}.json")))
        .unwrap_or_else(|error| panic!("{name}: {error}"))
}

fn auto_plan(config: &ModelConfig) -> Plan {
    let options = PlanOptions { budget: Budget::Tokens(4096), ..PlanOptions::default() };
    Plan::build(config, &options).unwrap()
}

/// Layers in one line: `29 state + 3 full 8x128`; `kv x key/value w window`.
fn describe(config: &ModelConfig) -> String {
    let mut counts: Vec<(String, usize)> = Vec::new();
    for layer in &config.layers {
        let heads = |spec: &turboquant_engine::config::AttentionSpec| {
            let width = if spec.key_head_dim == spec.value_head_dim {
                format!("{}x{}", spec.num_kv_heads, spec.key_head_dim)
            } else {
                format!("{}x{}/{}", spec.num_kv_heads, spec.key_head_dim, spec.value_head_dim)
            };
            match (spec.window, config.chunked_windows) {
                (None, _) => format!("full {width}"),
                (Some(window), false) => format!("sliding {width} w{window}"),
                (Some(window), true) => format!("chunked {width} w{window}"),
            }
        };
        let text = match layer {
            CacheSpec::Attention(spec) => heads(spec),
            CacheSpec::Latent { width, indexer_width: 0, .. } => format!("latent {width}"),
            CacheSpec::Latent { width, indexer_width, .. } => format!("latent {width}+{indexer_width}"),
            CacheSpec::Compressed(spec) => {
                format!("compressed {} w{} r{}+{}", spec.width, spec.window, spec.ratio, spec.indexer_width)
            }
            CacheSpec::Recurrent(_) => "state".to_owned(),
            CacheSpec::Hybrid(spec, _) => format!("state and {}", heads(spec)),
            CacheSpec::Shared { .. } => "shared".to_owned(),
            CacheSpec::None => "nothing".to_owned(),
        };
        match counts.iter_mut().find(|(known, _)| *known == text) {
            Some((_, count)) => *count += 1,
            None => counts.push((text, 1)),
        }
    }
    let parts: Vec<String> = counts.into_iter().map(|(text, count)| format!("{count} {text}")).collect();
    parts.join(" + ")
}

struct Row {
    name: &'static str,
    layers: &'static str,
    /// Bytes per token beyond and inside the windows, in the model's dtype.
    beyond: f64,
    inside: f64,
    /// Bytes of state per layer that has one.
    state: usize,
    max_model_len: usize,
}

const fn row(
    name: &'static str,
    layers: &'static str,
    beyond: f64,
    inside: f64,
    state: usize,
    max_model_len: usize,
) -> Row {
    Row { name, layers, beyond, inside, state, max_model_len }
}

#[rustfmt::skip]
const ROWS: [Row; 47] = [
    // attn_layer_indices 9, 18, 27. State: inner 128*64 = 8192, 1 group, state 128:
    // (8192+256)*3*2 + 8192*128*4. Tokens: 3 * 2*8*256.
    row("Bamba-9B-v2", "29 state + 3 full 8x128", 12288.0, 12288.0, 50_688 + 4_194_304, 262_144),
    // attn_layer_indices null: none attends. State 256: (8192+512)*6 + 8192*256*4.
    row("Bamba.class-default", "32 state", 0.0, 0.0, 52_224 + 8_388_608, 262_144),
    // MLA: 61 * (512+64) * 2 = 70,272, and indexer keys 61 * 128 * 2 = 15,616 (DynamicIndexedLayer keeps
    // [tokens, index_head_dim] in every layer).
    row("DeepSeek-V3.2", "61 latent 576+128", 70_272.0 + 15_616.0, 70_272.0 + 15_616.0, 0, 163_840),
    row("DeepSeek-V3", "61 latent 576", 70_272.0, 70_272.0, 0, 163_840),
    // compress_ratios of the first 43 layers: 2 x 0, 21 x 4, 20 x 128. K = V is stored once (the cache class
    // points values at keys): window 43*512*2; compressed 21*(512+128)*2/4 + 20*512*2/128. States differ by
    // layer and are checked below.
    row("DeepSeek-V4-Flash",
        "2 compressed 512 w128 r0+0 + 21 compressed 512 w128 r4+128 + 20 compressed 512 w128 r128+0",
        6_720.0 + 160.0, 44_032.0 + 6_720.0 + 160.0, 0, 1_048_576),
    // Every layer both. mamba_d_ssm 3072, 1 group, state 256: (3072+512)*6 + 3072*256*4. 44 * 2*2*256.
    row("Falcon-H1-7B.trimmed", "44 state and full 2x128", 45_056.0, 45_056.0, 21_504 + 3_145_728, 262_144),
    // mamba_d_ssm 1024: (1024+512)*6 + 1024*256*4. 32 * 2*8*256.
    row("Falcon-H1.class-default", "32 state and full 8x128", 131_072.0, 131_072.0, 9_216 + 1_048_576, 8192),
    // 78 * 576 * 2 = 89,856; indexer 78 * 128 * 2 = 19,968. head_dim 64 of the file is not the cache's.
    row("GLM-5", "78 latent 576+128", 89_856.0 + 19_968.0, 89_856.0 + 19_968.0, 0, 202_752),
    // No layer_types: odd layers full. 21 * 2*8*512.
    row("Gemma-2-9b", "21 sliding 8x256 w4096 + 21 full 8x256", 172_032.0, 344_064.0, 0, 8192),
    // Neither pattern nor layer_types: every sixth of 62 full. max_position_embeddings is the class's
    // 131,072, already scaled. 10 * 2*16*256; 62 * 2*16*256.
    row("Gemma-3-27b-it", "52 sliding 16x128 w1024 + 10 full 16x128", 81_920.0, 507_904.0, 0, 131_072),
    // Full layers 2 heads of 512 (K and V both stored although attention_k_eq_v). 5 * 2*2*1024;
    // 25 * 2*8*512.
    row("Gemma-4-26B-A4B", "25 sliding 8x256 w1024 + 5 full 2x512", 20_480.0, 20_480.0 + 204_800.0, 0, 262_144),
    row("Gemma-4-31B-IT-NVFP4", "50 sliding 16x256 w1024 + 10 full 4x512", 81_920.0, 901_120.0, 0, 262_144),
    // inner 48*64 = 3072, 1 group, state 128: (3072+256)*6 + 3072*128*4. 4 * 2*4*256.
    row("Granite-4.0-H-1B", "36 state + 4 full 4x128", 8192.0, 8192.0, 19_968 + 1_572_864, 131_072),
    row("Granite-4.0-H-Tiny.trimmed", "36 state + 4 full 4x128", 8192.0, 8192.0, 19_968 + 1_572_864, 131_072),
    row("GraniteMoeHybrid.class-default", "32 state", 0.0, 0.0, 52_224 + 8_388_608, 2048),
    // i % 8 == 4. Mamba-1: inner 8192, state 16: 8192*6 + 8192*16*4. 4 * 2*8*256.
    row("Jamba-1.5-Mini", "28 state + 4 full 8x128", 16_384.0, 16_384.0, 49_152 + 524_288, 262_144),
    row("Jamba.class-default", "28 state + 4 full 8x128", 16_384.0, 16_384.0, 49_152 + 524_288, 262_144),
    // full_attn_layers 4, 8, ..., 92, 93, counted from 1. 96 heads of 128: 3*12288*6 + 96*128*128*4.
    // 24 * 576 * 2.
    row("Kimi-K3", "69 state + 24 latent 576", 27_648.0, 27_648.0, 221_184 + 6_291_456, 1_048_576),
    // layer_types of the file: 4, 8, ..., 24 counted from 0. 32 heads of 128: 3*4096*6 + 32*128*128*4.
    row("Kimi-Linear-48B-A3B.class-default", "21 state + 6 latent 576", 6_912.0, 6_912.0, 73_728 + 2_097_152, 1_048_576),
    // full_attn_layers 4, 8, 12, 16, 20, 24, 27 counted from 1; head_dim 72 of the file is unused.
    row("Kimi-Linear-48B-A3B.reassembled", "20 state + 7 latent 576", 8_064.0, 8_064.0, 73_728 + 2_097_152, 1_048_576),
    // conv_L_cache 3: 2048 * 2 * 2. 8 * 2*8*128; 6 * 2*8*128.
    row("LFM2-2.6B.trimmed", "22 state + 8 full 8x64", 16_384.0, 16_384.0, 8192, 128_000),
    row("LFM2.5-VL-1.6B", "10 state + 6 full 8x64", 12_288.0, 12_288.0, 8192, 128_000),
    row("LFM2.class-default", "32 full 8x80", 81_920.0, 81_920.0, 0, 128_000),
    row("Llama-3.1-8B", "32 full 8x128", 131_072.0, 131_072.0, 0, 131_072),
    row("Llama-3.1-8B-Instruct", "32 full 8x128", 131_072.0, 131_072.0, 0, 131_072),
    // no_rope_layers absent: every fourth full. 12 and 48 times 2*8*256.
    row("Llama-4-Scout-17B-16E", "36 chunked 8x128 w8192 + 12 full 8x128", 49_152.0, 196_608.0, 0, 10_485_760),
    // hybrid_layer_pattern: 9 x 0. Keys 192, values 128: full 4 heads, sliding 8 by swa_num_key_value_heads
    // (the transformers class says 4; the file is right). The window counts the query besides the 128 of
    // sliding_window_size. 9*2*4*320; 39*2*8*320.
    row("MiMo-V2-Flash", "9 full 4x192/128 + 39 sliding 8x192/128 w129", 23_040.0, 222_720.0, 0, 262_144),
    // attn_type_list: 10 x 1. Lightning: 64*128*128*4.
    row("MiniMax-M1", "70 state + 10 full 8x128", 40_960.0, 40_960.0, 4_194_304, 10_240_000),
    // model_type says mixtral; every layer full.
    row("MiniMax-M2-AWQ", "62 full 8x128", 253_952.0, 253_952.0, 0, 196_608),
    row("MiniMax-M2.5", "62 full 8x128", 253_952.0, 253_952.0, 0, 196_608),
    row("MiniMax-Text-01-hf", "70 state + 10 full 8x128", 40_960.0, 40_960.0, 4_194_304, 10_240_000),
    // head_dim null: 4096/32. 32 heads: 32*128*128*4.
    row("MiniMax.class-default", "16 full 8x128 + 16 state", 65_536.0, 65_536.0, 2_097_152, 131_072),
    // layer_types although model_type is mistral; the window equals the context.
    row("Ministral-8B-Instruct-2410", "9 full 8x128 + 27 sliding 8x128 w32768", 36_864.0, 147_456.0, 0, 32_768),
    row("Mistral-7B-Instruct-v0.3", "32 full 8x128", 131_072.0, 131_072.0, 0, 32_768),
    // inner 64*64, 8 groups, state 128: (4096+2048)*6 + 4096*128*4. 6 * 2*2*256.
    row("Nemotron-3-Nano-30B-A3B", "23 state + 23 nothing + 6 full 2x128", 6144.0, 6144.0, 36_864 + 2_097_152, 262_144),
    // inner 256*64, 8 groups, state 256: (16384+4096)*6 + 16384*256*4. 10 * 2*8*256; attention_head_dim.
    row("Nemotron-H-56B-Base-8K", "54 state + 54 nothing + 10 full 8x128", 40_960.0, 40_960.0, 122_880 + 16_777_216, 8192),
    // layers_block_type alone, no num_hidden_layers. (8192+2048)*6 + 8192*128*4.
    row("Nemotron-H.class-default", "1 state + 2 nothing + 1 full 8x128", 4096.0, 4096.0, 61_440 + 4_194_304, 4096),
    // 30 heads, keys 96, values 192: (2*2880+5760)*6 + 30*96*192*4. 8 * 2*30*256.
    row("OLMo-Hybrid-7B.class-default", "24 state + 8 full 30x128", 122_880.0, 122_880.0, 69_120 + 2_211_840, 65_536),
    // The window of 262,144 is longer than the context: full.
    row("Phi-4-mini-instruct", "32 full 8x128", 131_072.0, 131_072.0, 0, 131_072),
    row("Qwen3-0.6B", "28 full 8x128", 114_688.0, 114_688.0, 0, 40_960),
    // full_attention_interval 4, no list. 16/32 heads of 128: (2*2048+4096)*6 + 32*128*128*4. 12 * 2*2*512.
    row("Qwen3-Next-80B-A3B-Thinking", "36 state + 12 full 2x256", 24_576.0, 24_576.0, 49_152 + 2_097_152, 262_144),
    // 16/48 heads: (4096+6144)*6 + 48*128*128*4. 16 * 2*4*512.
    row("Qwen3.5-27B", "48 state + 16 full 4x256", 65_536.0, 65_536.0, 61_440 + 3_145_728, 262_144),
    row("Qwen3.5-35B-A3B", "30 state + 10 full 2x256", 20_480.0, 20_480.0, 49_152 + 2_097_152, 262_144),
    // head_dim 2*3584/32 = 224. inner 7168, 2 groups, state 64: (7168+256)*6 + 7168*64*4. 13 * 2*32*448.
    row("Zamba2-7B", "68 state + 13 state and full 32x224", 372_736.0, 372_736.0, 44_544 + 1_835_008, 4096),
    // head_dim 160; inner 5120, 1 group: (5120+128)*6 + 5120*64*4. 9 * 2*32*320.
    row("Zamba2.class-default", "45 state + 9 state and full 32x160", 184_320.0, 184_320.0, 31_488 + 1_310_720, 4096),
    // 18 * 2*8*128 each way.
    row("gpt-oss-120b", "18 sliding 8x64 w128 + 18 full 8x64", 36_864.0, 73_728.0, 0, 131_072),
    row("gpt-oss-20b", "12 sliding 8x64 w128 + 12 full 8x64", 24_576.0, 49_152.0, 0, 131_072),
];

#[test]
fn every_config_has_its_layers_and_bytes() {
    let mut wrong = Vec::new();
    for expected in &ROWS {
        let config = config(expected.name);
        let plan = auto_plan(&config);
        let tokens = plan.bytes_per_token();
        let states: Vec<usize> =
            plan.layers.iter().map(|layer| layer.state_bytes).filter(|&bytes| bytes > 0).collect();
        let got = (describe(&config), tokens.beyond, tokens.inside, config.max_model_len);
        let want = (expected.layers.to_owned(), expected.beyond, expected.inside, expected.max_model_len);
        if got != want {
            wrong.push(format!("{}:\n  got  {got:?}\n  want {want:?}", expected.name));
        }
        let stateful = config.layers.iter().filter(|layer| layer.state().is_some()).count();
        if expected.name != "DeepSeek-V4-Flash" && states != vec![expected.state; stateful] {
            wrong.push(format!("{}: states {states:?}, want {}", expected.name, expected.state));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    let files = std::fs::read_dir(testdata("configs")).unwrap().count();
    assert_eq!(files, ROWS.len(), "a config without a row");
}

/// The letter of a layer in `layer_kinds.json`.
fn letter(config: &ModelConfig, layer: &CacheSpec) -> &'static str {
    match layer {
        CacheSpec::Attention(spec) if spec.window.is_none() => "F",
        CacheSpec::Attention(_) if config.chunked_windows => "K",
        CacheSpec::Attention(_) => "S",
        CacheSpec::Latent { indexer_width: 0, .. } => "F",
        CacheSpec::Latent { .. } => "I",
        CacheSpec::Compressed(spec) => match spec.ratio {
            0 => "S",
            4 => "C",
            _ => "H",
        },
        CacheSpec::Recurrent(_) if config.model_type.starts_with("lfm2") => "V",
        CacheSpec::Recurrent(_) => "L",
        CacheSpec::Hybrid(..) => "B",
        CacheSpec::Shared { .. } => "shared",
        CacheSpec::None => "M",
    }
}

#[test]
fn every_layer_is_where_its_class_has_it() {
    let text = std::fs::read_to_string(testdata("layer_kinds.json")).unwrap();
    let kinds: BTreeMap<String, String> = serde_json::from_str(&text).unwrap();
    assert_eq!(kinds.len(), 46);
    for (name, expected) in &kinds {
        let config = config(name);
        let got: String = config.layers.iter().map(|layer| letter(&config, layer)).collect();
        // The class keeps Phi-4-mini's window, which no sequence reaches.
        let expected =
            if name == "Phi-4-mini-instruct" { expected.replace('S', "F") } else { expected.clone() };
        assert_eq!(got, expected, "{name}");
    }
}

#[test]
fn compressed_layers_keep_what_waits_for_the_next_vector() {
    let plan = auto_plan(&config("DeepSeek-V4-Flash"));
    // Ratio 4: projections and gates (2) of 3 waiting tokens of twice the width and of the 4 kept from the
    // last window, for the vector (512) and the indexer's key (128), bf16. Ratio 128: 127 waiting tokens.
    let sparse = 2 * (3 * 2 + 4) * (512 + 128) * 2;
    let heavy = 2 * 127 * 512 * 2;
    let of = |layer: usize| plan.layers[layer].state_bytes;
    assert_eq!([of(0), of(1), of(2), of(3), of(42)], [0, 0, sparse, heavy, sparse]);
    assert_eq!(plan.state_bytes_per_sequence(), 21 * sparse as u64 + 20 * heavy as u64);
    assert_eq!(plan.side_bytes_per_token(SideKind::CompressedKv), 21.0 * 256.0 + 20.0 * 8.0);
    assert_eq!(plan.side_bytes_per_token(SideKind::CompressedIndexerKeys), 21.0 * 64.0);
    // 1024 tokens: 128 in each window, 256 compressed vectors and keys, 8 heavily compressed vectors.
    assert_eq!(plan.sequence_bytes(1024), 43 * 128 * 1024 + 21 * 256 * (1024 + 256) + 20 * 8 * 1024);
}

#[test]
fn every_page_has_the_bytes_that_the_codec_writes() {
    let mut checked = 0;
    for expected in &ROWS {
        let config = config(expected.name);
        for dtype in CacheDtype::ALL {
            for page_size in [16, 64] {
                let options = PlanOptions { dtype, page_size, ..PlanOptions::default() };
                let plan = Plan::build(&config, &options).unwrap();
                // Latents are not rows of the codec.
                for paged in plan
                    .layers
                    .iter()
                    .filter_map(|layer| layer.paged)
                    .filter(|paged| paged.value_head_dim > 0)
                {
                    let rows = RowCodec::new(paged.format, paged.key_head_dim, paged.value_head_dim).unwrap();
                    let pages = PageCodec::new(rows, paged.num_kv_heads, page_size).unwrap();
                    assert_eq!(pages.page_bytes(), paged.page_bytes, "{} {dtype}", expected.name);
                    checked += 1;
                }
            }
        }
    }
    assert!(checked > 1000, "{checked}");
}
