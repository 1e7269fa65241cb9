//! Pages in the GPU's order, encoded by the scalar reference from made-up rows: what
//! `cuda/harness/check_store.cu` compares a card's bytes with. `golden_element` there makes the same rows.
//!
//! File: "tqpages1", then per page head_dim, key, value, io (numbers of `tq::Format` in `cuda/layout.cuh`)
//! and bytes as u32, little-endian, and the page: 16 tokens, one KV head.

use half::{bf16, f16};
use turboquant::{
    cuda::{page::GpuPages, variant::IoDtype},
    format::{CacheDtype, KeyFormat, NativeDtype, Preset, RowFormat, ValueFormat},
    rows::{Element, EncodeReport, Isa, RowCodec},
};

const TOKENS: usize = 16;

/// Bits of element `d` of a key (side 0) or value (1): random exponents and mantissas, then rows that
/// codecs trip over.
fn element(io: IoDtype, side: usize, token: usize, d: usize) -> u16 {
    let mut h = (((side * TOKENS + token) * 256 + d) as u32).wrapping_mul(0x9e37_79b1);
    h = (h ^ h >> 16).wrapping_mul(0x85eb_ca6b);
    h = (h ^ h >> 13).wrapping_mul(0xc2b2_ae35);
    h ^= h >> 16;
    let (mantissa_bits, bias) = match io {
        IoDtype::Bf16 => (7, 127u32),
        IoDtype::F16 => (10, 15),
    };
    let word = |sign: u32, exponent: u32, mantissa: u32| {
        (sign << 15 | exponent << mantissa_bits | mantissa & ((1 << mantissa_bits) - 1)) as u16
    };
    let (sign, mantissa, top) = (h >> 31, h >> 8, 2 * bias + 1);
    match (token, d) {
        (8, _) => word(d as u32 & 1, 0, 0),
        (9, _) => word(0, bias - 2, 0),
        (10, 3) => word(0, bias, 0),
        (10, _) => 0,
        (11, 5) => word(0, top, 1 << (mantissa_bits - 1)),
        (12, 7) => word(0, top, 0),
        (13, _) => word(sign, top - 1, mantissa),
        (14, _) => word(sign, 0, mantissa),
        (15, _) => word(0, bias + 7, mantissa),
        _ => word(sign, bias - 7 + (h & 7), mantissa),
    }
}

fn page<T: Element>(format: RowFormat, head_dim: usize, io: IoDtype, from_bits: fn(u16) -> T) -> Vec<u8> {
    let codec = RowCodec::new(format, head_dim, head_dim).expect("a served width");
    let pages = GpuPages::new(format, head_dim, io, 1, TOKENS).expect("a served shape");
    let slot_bytes = codec.layout().slot_bytes;
    let mut slots = vec![0; pages.page_bytes()];
    for (token, slot) in slots.chunks_exact_mut(slot_bytes).enumerate() {
        let row = |side| (0..head_dim).map(|d| from_bits(element(io, side, token, d))).collect::<Vec<T>>();
        codec.encode_slot(Isa::Scalar, &row(0), &row(1), slot, &mut EncodeReport::default());
    }
    let mut page = vec![0; slots.len()];
    pages.slots_to_page(&slots, &mut page).expect("both are one page long");
    page
}

/// The whole file.
pub(crate) fn file() -> Vec<u8> {
    let mut file = b"tqpages1".to_vec();
    let mut add = |dtype: CacheDtype, head_dim: usize, io: IoDtype| {
        let format = dtype.row_format(match io {
            IoDtype::Bf16 => NativeDtype::Bf16,
            IoDtype::F16 => NativeDtype::F16,
        });
        let page = match io {
            IoDtype::Bf16 => page(format, head_dim, io, bf16::from_bits),
            IoDtype::F16 => page(format, head_dim, io, f16::from_bits),
        };
        let native = |dtype| u32::from(dtype == NativeDtype::F16);
        let key = match format.key {
            KeyFormat::Native(dtype) => native(dtype),
            KeyFormat::Fp8 => 2,
            KeyFormat::LloydMax { bits } => 7 - u32::from(bits),
        };
        let value = match format.value {
            ValueFormat::Native(dtype) => native(dtype),
            ValueFormat::Fp8 => 2,
            ValueFormat::Uniform { bits } => 9 - u32::from(bits),
        };
        for word in [head_dim as u32, key, value, io as u32, page.len() as u32] {
            file.extend(word.to_le_bytes());
        }
        file.extend(page);
    };
    let preset = CacheDtype::TurboQuant;
    for head_dim in (16..=256).step_by(16) {
        add(preset(Preset::FourBitNc), head_dim, IoDtype::Bf16);
    }
    for head_dim in (64..=256).step_by(64) {
        add(preset(Preset::K3V4Nc), head_dim, IoDtype::Bf16);
        add(preset(Preset::ThreeBitNc), head_dim, IoDtype::Bf16);
    }
    for head_dim in [80, 128] {
        add(preset(Preset::K8V4), head_dim, IoDtype::Bf16);
        add(preset(Preset::FourBitNc), head_dim, IoDtype::F16);
        add(CacheDtype::Fp8, head_dim, IoDtype::Bf16);
    }
    add(preset(Preset::ThreeBitNc), 128, IoDtype::F16);
    add(preset(Preset::K8V4), 80, IoDtype::F16);
    add(CacheDtype::Fp8, 80, IoDtype::F16);
    add(CacheDtype::Auto, 80, IoDtype::Bf16);
    add(CacheDtype::Auto, 80, IoDtype::F16);
    file
}
