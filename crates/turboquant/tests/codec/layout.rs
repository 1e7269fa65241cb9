//! Literal sizes and offsets of slots.

use turboquant::{
    error::CodecError,
    format::{CacheDtype, KeyFormat, NativeDtype, Preset, RowFormat, ValueFormat},
    layout::{RowLayout, head_dims},
};

fn layout(preset: Preset, head_dim: usize) -> RowLayout {
    let format = CacheDtype::TurboQuant(preset).row_format(NativeDtype::Bf16);
    RowLayout::new(format, head_dim, head_dim).unwrap()
}

#[test]
fn fields_lie_where_vllm_puts_them() {
    use Preset::{FourBitNc, K3V4Nc, K8V4, ThreeBitNc};
    // head_dim, preset, end of key codes, norm, value codes, scale, zero, slot bytes
    let table = [
        (64, K8V4, 64, None, 64..96, 96, 98, 100),
        (64, FourBitNc, 32, Some(32), 34..66, 66, 68, 70),
        (64, K3V4Nc, 24, Some(24), 26..58, 58, 60, 62),
        (64, ThreeBitNc, 24, Some(24), 26..50, 50, 52, 54),
        (128, K8V4, 128, None, 128..192, 192, 194, 196),
        (128, FourBitNc, 64, Some(64), 66..130, 130, 132, 134),
        (128, K3V4Nc, 48, Some(48), 50..114, 114, 116, 118),
        (128, ThreeBitNc, 48, Some(48), 50..98, 98, 100, 102),
        (256, K8V4, 256, None, 256..384, 384, 386, 388),
        (256, FourBitNc, 128, Some(128), 130..258, 258, 260, 262),
        (256, K3V4Nc, 96, Some(96), 98..226, 226, 228, 230),
        (256, ThreeBitNc, 96, Some(96), 98..194, 194, 196, 198),
    ];
    for (head_dim, preset, key_end, norm, value_codes, scale, zero, slot_bytes) in table {
        let layout = layout(preset, head_dim);
        assert_eq!(layout.key_codes, 0..key_end);
        assert_eq!(layout.norm, norm);
        assert_eq!(layout.value_codes, value_codes);
        assert_eq!((layout.scale, layout.zero), (Some(scale), Some(zero)));
        assert_eq!(layout.slot_bytes, slot_bytes);
        assert_eq!(layout.key_row_bytes, layout.value_codes.start);
        assert_eq!(layout.value_row_bytes, zero + 2 - layout.value_codes.start);
    }
}

#[test]
fn slots_have_the_literal_sizes() {
    let head_dims = [64, 80, 96, 128, 192, 256, 512];
    let table = [
        (Preset::K8V4, [100, 124, 148, 196, 292, 388, 772]),
        (Preset::FourBitNc, [70, 86, 102, 134, 198, 262, 518]),
        (Preset::K3V4Nc, [62, 76, 90, 118, 174, 230, 454]),
        (Preset::ThreeBitNc, [54, 66, 78, 102, 150, 198, 390]),
    ];
    for (preset, slot_bytes) in table {
        assert_eq!(head_dims.map(|head_dim| layout(preset, head_dim).slot_bytes), slot_bytes);
    }
    // A page of one layer with 8 KV heads, head_dim 128, 16 tokens.
    let page_bytes = Preset::ALL.map(|preset| 16 * 8 * layout(preset, 128).slot_bytes);
    assert_eq!(page_bytes, [25_088, 17_152, 15_104, 13_056]);
}

#[test]
fn only_k3v4_at_odd_multiples_of_8_has_a_pad_byte() {
    for head_dim in head_dims() {
        for preset in Preset::ALL {
            let expected = usize::from(preset == Preset::K3V4Nc && head_dim % 16 == 8);
            assert_eq!(layout(preset, head_dim).pad_bytes(), expected, "{preset:?} head_dim {head_dim}");
        }
    }
}

#[test]
fn plain_rows_are_as_wide_as_their_elements() {
    for head_dim in head_dims() {
        let slot_bytes = |dtype: CacheDtype, native| {
            RowLayout::new(dtype.row_format(native), head_dim, head_dim).unwrap().slot_bytes
        };
        assert_eq!(slot_bytes(CacheDtype::Auto, NativeDtype::F32), 8 * head_dim);
        assert_eq!(slot_bytes(CacheDtype::Auto, NativeDtype::F16), 4 * head_dim);
        assert_eq!(slot_bytes(CacheDtype::Auto, NativeDtype::Bf16), 4 * head_dim);
        assert_eq!(slot_bytes(CacheDtype::Fp8, NativeDtype::Bf16), 2 * head_dim);
    }
}

#[test]
fn key_and_value_widths_are_separate() {
    let format = CacheDtype::TurboQuant(Preset::FourBitNc).row_format(NativeDtype::Bf16);
    let layout = RowLayout::new(format, 192, 128).unwrap();
    assert_eq!((layout.norm, layout.value_codes.clone()), (Some(96), 98..162));
    assert_eq!((layout.scale, layout.zero, layout.slot_bytes), (Some(162), Some(164), 166));
}

#[test]
fn other_widths_and_bits_are_refused_in_a_sentence() {
    assert_eq!(head_dims().count(), 71);
    for dtype in CacheDtype::ALL {
        let format = dtype.row_format(NativeDtype::F16);
        for bad in [0, 1, 8, 12, 17, 100, 127, 577, 584, 1024, usize::MAX] {
            assert_eq!(RowLayout::new(format, bad, 64), Err(CodecError::HeadDim { side: "key", got: bad }));
            assert_eq!(RowLayout::new(format, 64, bad), Err(CodecError::HeadDim { side: "value", got: bad }));
        }
    }
    let error = CodecError::HeadDim { side: "key", got: 100 }.to_string();
    assert_eq!(error, "key head_dim 100 cannot be stored; a multiple of 8 from 16 to 576 is needed");

    let five = RowFormat { key: KeyFormat::LloydMax { bits: 5 }, value: ValueFormat::Fp8 };
    let error = RowLayout::new(five, 64, 64).unwrap_err();
    assert_eq!(error.to_string(), "key codes of 5 bits cannot be stored; 3 or 4 bits are needed");
    let two = RowFormat { key: KeyFormat::Fp8, value: ValueFormat::Uniform { bits: 2 } };
    assert_eq!(RowLayout::new(two, 64, 64), Err(CodecError::Bits { side: "value", got: 2 }));
}
