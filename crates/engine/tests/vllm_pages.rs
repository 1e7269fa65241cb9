//! vLLM's unified pages, against its log lines and worked figures.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::path::PathBuf;

use turboquant::format::CacheDtype;
use turboquant_engine::{
    config::ModelConfig,
    plan::{PlanOptions, VllmPages},
};

fn config(path: &str) -> ModelConfig {
    ModelConfig::from_hf_file(&PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("testdata").join(path)).unwrap()
}

fn pages(config: &ModelConfig, dtype: CacheDtype, skip: &str) -> VllmPages {
    let options = PlanOptions { dtype, skip_layers: skip.parse().unwrap(), ..PlanOptions::default() };
    VllmPages::build(config, &options).unwrap()
}

/// auto, k8v4, 4bit_nc, k3v4_nc, 3bit_nc: block tokens, page bytes, padding bytes, padding in per cent to
/// two digits.
type Rows = [(u64, u64, u64, &'static str); 5];

fn check(config: &ModelConfig, expected: Rows) {
    for (index, (tokens, page, padding, percent)) in [0, 2, 3, 4, 5].into_iter().zip(expected) {
        let dtype = CacheDtype::ALL[index];
        let pages = pages(config, dtype, "");
        let unified = pages.unified.unwrap();
        assert_eq!(
            (pages.block_tokens, unified.page_bytes, unified.padding_bytes),
            (tokens, page, padding),
            "{dtype}"
        );
        assert_eq!(format!("{:.2}", unified.padding_percent), percent, "{dtype}");
        assert_eq!(unified.native_tokens, None);
        assert!(pages.native_layers.is_empty(), "hybrids have no boundary");
    }
}

#[test]
fn qwen3_6_matches_a_public_start_up_log() {
    // The log of k8v4 printed 2768 tokens and 0.08 %. State: conv 49,152 + ssm 2,097,152.
    check(
        &config("cases/qwen3.6-35b-a3b.json"),
        [
            (1056, 2_162_688, 16_384, "0.76"),
            (2768, 2_147_968, 1664, "0.08"),
            (4096, 2_146_304, 0, "0.00"),
            (4672, 2_149_120, 2816, "0.13"),
            (5424, 2_147_904, 1600, "0.07"),
        ],
    );
}

#[test]
fn nemotron_3_nano_by_the_same_rule() {
    check(
        &config("cases/nemotron-3-nano-infinity.json"),
        [
            (2096, 2_146_304, 12_288, "0.58"),
            (5456, 2_138_752, 4736, "0.22"),
            (7968, 2_135_424, 1408, "0.07"),
            (9056, 2_137_216, 3200, "0.15"),
            (10_464, 2_134_656, 640, "0.03"),
        ],
    );
}

#[test]
fn one_skipped_layer_makes_the_page_a_common_multiple() {
    let config = config("cases/qwen3.6-35b-a3b.json");
    // lcm of 2 heads of 388/262/230/198 bytes and of 2 * 1024; 16 of them; padding; tokens of a packed
    // and of a native layer.
    let expected = [
        (2, 198_656, 3_178_496, 1_032_192, 4096, 1552),
        (3, 268_288, 4_292_608, 2_146_304, 8192, 2096),
        (4, 235_520, 3_768_320, 1_622_016, 8192, 1840),
        (5, 202_752, 3_244_032, 1_097_728, 8192, 1584),
    ];
    for (index, lcm, page, padding, packed, native) in expected {
        let dtype = CacheDtype::ALL[index];
        let pages = pages(&config, dtype, "3");
        let unified = pages.unified.unwrap();
        assert_eq!(pages.native_layers, [3]);
        assert_eq!(
            (unified.bytes_per_token, unified.page_bytes, unified.padding_bytes),
            (lcm, page, padding),
            "{dtype}"
        );
        assert_eq!((unified.packed_tokens, unified.native_tokens), (packed, Some(native)), "{dtype}");
    }
}

#[test]
fn dense_models_keep_the_block_size_and_two_native_layers_at_each_end() {
    let llama = config("configs/Llama-3.1-8B-Instruct.json");
    let pages_of = |dtype| pages(&llama, dtype, "");
    let packed = pages_of(CacheDtype::ALL[3]);
    assert_eq!(packed.native_layers, [0, 1, 30, 31]);
    assert_eq!((packed.unified, packed.block_tokens), (None, 16));
    // 28 layers of 8 * 134 and 4 of 8 * 512 bytes per token.
    assert_eq!(packed.block_bytes, 16 * (28 * 1072 + 4 * 4096));
    assert_eq!(packed.sequence_bytes(33), 3 * packed.block_bytes);
    assert!(packed.refusals.is_empty());
    assert!(pages_of(CacheDtype::Fp8).native_layers.is_empty());
    // A window of 128: 128 - 1 + 512 tokens in blocks of 16, and one more.
    let gpt_oss = config("configs/gpt-oss-20b.json");
    let auto = pages(&gpt_oss, CacheDtype::Auto, "");
    let layer = 16 * 2048;
    assert_eq!(auto.sequence_bytes(131_072), 12 * layer * 8192 + 12 * layer * 41);
}

#[test]
fn what_vllm_does_not_run_is_said() {
    let refusals = |path, skip| pages(&config(path), CacheDtype::ALL[3], skip).refusals;
    assert!(refusals("configs/DeepSeek-V3.json", "")[0].contains("MLA"));
    assert!(refusals("cases/phi-2.json", "")[0].contains("head_dim 80"));
    assert!(refusals("configs/gpt-oss-20b.json", "")[0].contains("sliding-window"));
    assert!(refusals("configs/gpt-oss-20b.json", "sliding_window").is_empty());
    assert!(
        refusals("configs/MiMo-V2-Flash.json", "sliding_window")
            .iter()
            .any(|text| text.contains("as wide as"))
    );
}
