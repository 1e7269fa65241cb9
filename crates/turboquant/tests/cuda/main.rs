//! The order of bytes in a GPU page, without a GPU.
#![cfg(feature = "cuda")]

mod golden_pages;

use half::f16;
use proptest::prelude::*;
use safetensors::SafeTensors;
use turboquant::{
    cuda::{
        page::{GREATEST_EXACT_NORM, GpuPageError, GpuPages},
        variant::IoDtype,
    },
    format::{CacheDtype, NativeDtype, Preset},
    layout::RowLayout,
};

/// FNV-1a of the first 80 tokens of vLLM's slots in five GPU pages, as `cuda/harness/reference.h`
/// writes them: the page order that the kernels were checked against on a card.
const PAGES: [(usize, Preset, u64); 12] = [
    (64, Preset::K8V4, 0x836f_2834_f1e2_334f),
    (64, Preset::FourBitNc, 0xd4cd_5ae2_1c09_011e),
    (64, Preset::K3V4Nc, 0xdc7f_0a41_a1a7_81e5),
    (64, Preset::ThreeBitNc, 0xf297_cb68_4256_4d5a),
    (128, Preset::K8V4, 0x9617_94b5_d2d1_0071),
    (128, Preset::FourBitNc, 0x7661_c863_288f_44ca),
    (128, Preset::K3V4Nc, 0x563a_3f9a_a960_3112),
    (128, Preset::ThreeBitNc, 0xea64_3978_555e_188d),
    (256, Preset::K8V4, 0x9194_72f7_c7f1_88e9),
    (256, Preset::FourBitNc, 0x45cf_4904_964b_f541),
    (256, Preset::K3V4Nc, 0xd498_c931_5f26_e944),
    (256, Preset::ThreeBitNc, 0x5f4f_9431_f26a_5e68),
];

fn fnv(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |h, b| (h ^ u64::from(*b)).wrapping_mul(0x0100_0000_01b3))
}

#[test]
fn vllm_slots_become_the_pages_the_kernels_read_and_come_back() {
    for (head_dim, preset, hash) in PAGES {
        let path = format!("{}/testdata/vllm_slots_d{head_dim}.safetensors", env!("CARGO_MANIFEST_DIR"));
        let bytes = std::fs::read(path).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let dtype = CacheDtype::TurboQuant(preset);
        let slots = file.tensor(&format!("{}.slots", dtype.name())).unwrap().data().to_vec();
        let pages =
            GpuPages::new(dtype.row_format(NativeDtype::Bf16), head_dim, IoDtype::Bf16, 2, 16).unwrap();
        let mut all = Vec::new();
        for slots in slots.chunks_exact(pages.page_bytes()).take(5) {
            let mut page = vec![0xAA; pages.page_bytes()];
            pages.slots_to_page(slots, &mut page).unwrap();
            let mut back = vec![0x55; slots.len()];
            pages.page_to_slots(&page, &mut back).unwrap();
            assert_eq!(back, slots, "{dtype} {head_dim}");
            all.extend(page);
        }
        assert_eq!(all.len(), 5 * pages.page_bytes());
        assert_eq!(fnv(&all), hash, "{dtype} {head_dim}");
    }
}

fn formats() -> Vec<(CacheDtype, usize)> {
    let mut all = Vec::new();
    for dtype in CacheDtype::ALL {
        let three_bits = matches!(
            dtype,
            CacheDtype::TurboQuant(Preset::K3V4Nc) | CacheDtype::TurboQuant(Preset::ThreeBitNc)
        );
        let step = if three_bits { 64 } else { 16 };
        all.extend((step..=256).step_by(step).map(|head_dim| (dtype, head_dim)));
    }
    all
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    /// Any codes, any scale and minimum, any norm that an encoder makes of a key up to the bound.
    #[test]
    fn any_slots_come_back(
        (dtype, head_dim) in prop::sample::select(formats()),
        page_size in prop::sample::select(vec![16, 32]),
        seed in prop::collection::vec(any::<u8>(), 997),
        norms in prop::collection::vec(0.0..GREATEST_EXACT_NORM, 7),
        tiny in 0u16..2000,
    ) {
        let format = dtype.row_format(NativeDtype::F16);
        let pages = GpuPages::new(format, head_dim, IoDtype::F16, 2, page_size).unwrap();
        let layout = RowLayout::new(format, head_dim, head_dim).unwrap();
        let mut slots: Vec<u8> = (0..pages.page_bytes()).map(|i| seed[i % 997] ^ (i / 997) as u8).collect();
        if let Some(norm) = layout.norm {
            for (i, slot) in slots.chunks_exact_mut(layout.slot_bytes).enumerate() {
                let bits = match i % 9 {
                    7 => 0,
                    8 => tiny,
                    k => f16::from_f32(norms[k]).to_bits(),
                };
                slot[norm..norm + 2].copy_from_slice(&bits.to_le_bytes());
                if i == 5 {
                    slot[norm..norm + 2].copy_from_slice(&f16::NAN.to_bits().to_le_bytes());
                }
            }
        }
        let mut page = vec![0; slots.len()];
        pages.slots_to_page(&slots, &mut page).unwrap();
        let mut back = vec![0; slots.len()];
        pages.page_to_slots(&page, &mut back).unwrap();
        prop_assert_eq!(back, slots);
    }
}

/// The file that the harness reads on a GPU host is what the scalar reference writes today.
#[test]
fn golden_pages_are_the_scalar_references() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/testdata/gpu_pages.bin");
    assert!(
        std::fs::read(path).unwrap() == golden_pages::file(),
        "write testdata/gpu_pages.bin anew, as examples/gpu_golden.rs says"
    );
}

#[test]
fn buffers_of_another_length_are_refused() {
    let format = CacheDtype::Fp8.row_format(NativeDtype::Bf16);
    let pages = GpuPages::new(format, 64, IoDtype::Bf16, 1, 16).unwrap();
    let refused = pages.slots_to_page(&[0; 2047], &mut [0; 2048]).unwrap_err();
    assert_eq!(refused, GpuPageError::Length { what: "slots", expected: 2048, got: 2047 });
    let refused = pages.page_to_slots(&[0; 3], &mut [0; 2048]).unwrap_err();
    assert_eq!(refused.to_string(), "page of 3 bytes where 2048 bytes are needed");
}
