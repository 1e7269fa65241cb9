//! Every row kernel: equal bytes on every instruction set, and the reference against f64 arithmetic.

use half::{bf16, f16};
use proptest::prelude::*;
use turboquant::{
    format::{CacheDtype, KeyFormat, NativeDtype, Preset, RowFormat, ValueFormat},
    layout::head_dims,
    rows::{Element, EncodeReport, Isa, RowCodec, pack_codes, unpack_codes},
};

fn formats() -> impl Strategy<Value = RowFormat> {
    let native = prop_oneof![Just(NativeDtype::F32), Just(NativeDtype::F16), Just(NativeDtype::Bf16)];
    let dtypes = prop::sample::select(CacheDtype::ALL.to_vec());
    (dtypes, native).prop_map(|(dtype, native)| dtype.row_format(native))
}

fn widths() -> impl Strategy<Value = usize> {
    prop::sample::select(head_dims().collect::<Vec<_>>())
}

/// Rows of one kind each: ordinary ones at many scales, with outliers, of few distinct values, and of
/// arbitrary bits.
fn elements(width: usize) -> impl Strategy<Value = Vec<f32>> {
    let ordinary = prop::collection::vec(-1f32..1.0, width);
    let scaled = (ordinary.clone(), -40i32..40)
        .prop_map(|(row, exponent)| row.into_iter().map(|x| x * 2f32.powi(exponent)).collect());
    let outlier = (ordinary.clone(), 0..width, -1e6f32..1e6).prop_map(|(mut row, at, x)| {
        row[at] = x;
        row
    });
    let few = prop::collection::vec(prop::sample::select(vec![0.0, -0.0, 1.0, -1.0, 0.5]), width);
    let bits = prop::collection::vec(any::<u32>().prop_map(f32::from_bits), width);
    let large = prop::collection::vec(-3.4e38f32..3.4e38, width);
    prop_oneof![4 => ordinary, 4 => scaled, 2 => outlier, 1 => few, 1 => bits, 1 => large]
}

fn codec_and_rows() -> impl Strategy<Value = (RowCodec, Vec<f32>, Vec<f32>)> {
    (formats(), widths(), widths()).prop_flat_map(|(format, key_head_dim, value_head_dim)| {
        let codec = RowCodec::new(format, key_head_dim, value_head_dim).unwrap();
        (Just(codec), elements(key_head_dim), elements(value_head_dim))
    })
}

fn slot<K: Element, V: Element>(
    codec: &RowCodec,
    isa: Isa,
    key: &[K],
    value: &[V],
) -> (Vec<u8>, EncodeReport) {
    let (mut slot, mut report) = (vec![0xEE; codec.layout().slot_bytes], EncodeReport::default());
    codec.encode_slot(isa, key, value, &mut slot, &mut report);
    (slot, report)
}

/// Bits of the numbers, with one NaN for all.
fn bits(row: &[f32]) -> Vec<u32> {
    row.iter().map(|x| if x.is_nan() { f32::NAN.to_bits() } else { x.to_bits() }).collect()
}

/// Key in the stored basis, key in its own basis, value.
fn decoded(codec: &RowCodec, isa: Isa, slot: &[u8]) -> [Vec<f32>; 3] {
    let mut key = vec![0.0; codec.key_head_dim()];
    let mut raw_key = key.clone();
    let mut value = vec![0.0; codec.value_head_dim()];
    codec.decode_key(isa, slot, &mut key);
    codec.decode_key_raw_basis(isa, slot, &mut raw_key);
    codec.decode_value(isa, slot, &mut value);
    [key, raw_key, value]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn packed_bytes_are_equal_on_every_isa((codec, key, value) in codec_and_rows()) {
        let half = |row: &[f32]| row.iter().map(|x| f16::from_f32(*x)).collect::<Vec<_>>();
        let brain = |row: &[f32]| row.iter().map(|x| bf16::from_f32(*x)).collect::<Vec<_>>();
        let expected = slot(&codec, Isa::Scalar, &key, &value);
        let expected_half = slot(&codec, Isa::Scalar, &half(&key), &half(&value));
        let expected_brain = slot(&codec, Isa::Scalar, &brain(&key), &brain(&value));
        for isa in Isa::available() {
            prop_assert_eq!(&slot(&codec, isa, &key, &value), &expected);
            prop_assert_eq!(&slot(&codec, isa, &half(&key), &half(&value)), &expected_half);
            prop_assert_eq!(&slot(&codec, isa, &brain(&key), &brain(&value)), &expected_brain);
        }
    }

    #[test]
    fn rotated_queries_are_equal_on_every_isa((codec, query, _) in codec_and_rows()) {
        let mut expected = query.clone();
        codec.rotate_query(Isa::Scalar, &mut expected);
        for isa in Isa::available() {
            let mut rotated = query.clone();
            codec.rotate_query(isa, &mut rotated);
            prop_assert_eq!(bits(&rotated), bits(&expected));
        }
    }

    #[test]
    fn finite_rows_decode_to_finite_rows((codec, key, value) in codec_and_rows()) {
        prop_assume!(key.iter().chain(&value).all(|x| x.is_finite()));
        let (slot, report) = slot(&codec, Isa::detect(), &key, &value);
        prop_assert_eq!(report.non_finite, 0);
        for row in decoded(&codec, Isa::detect(), &slot) {
            prop_assert!(row.iter().all(|x| x.is_finite()));
        }
    }

    /// Any bytes at all: no panic, and the same numbers on every instruction set.
    #[test]
    fn arbitrary_slots_decode_alike(
        (codec, noise) in (formats(), widths(), widths()).prop_flat_map(|(format, key, value)| {
            let codec = RowCodec::new(format, key, value).unwrap();
            let slot_bytes = codec.layout().slot_bytes;
            (Just(codec), prop::collection::vec(any::<u8>(), slot_bytes))
        })
    ) {
        let expected = decoded(&codec, Isa::Scalar, &noise).map(|row| bits(&row));
        for isa in Isa::available() {
            prop_assert_eq!(&decoded(&codec, isa, &noise).map(|row| bits(&row)), &expected);
        }
    }

    #[test]
    fn packing_is_undone_by_unpacking(bits in 3u8..=4, noise in prop::collection::vec(any::<u8>(), 576), width in widths()) {
        let codes: Vec<u8> = noise[..width].iter().map(|code| code & ((1 << bits) - 1)).collect();
        let mut expected = vec![0; width / 8 * usize::from(bits)];
        pack_codes(Isa::Scalar, bits, &codes, &mut expected);
        for isa in Isa::available() {
            let (mut packed, mut unpacked) = (vec![0; expected.len()], vec![0; width]);
            pack_codes(isa, bits, &codes, &mut packed);
            unpack_codes(isa, bits, &packed, &mut unpacked);
            prop_assert_eq!(&packed, &expected);
            prop_assert_eq!(&unpacked, &codes);
        }
    }
}

#[test]
fn codes_are_packed_from_the_low_bits_up() {
    let codes = [1, 2, 3, 4, 5, 6, 7, 0];
    for isa in Isa::available() {
        let mut four = [0; 4];
        pack_codes(isa, 4, &codes, &mut four);
        assert_eq!(four, [0x21, 0x43, 0x65, 0x07]);
        let mut three = [0; 3];
        pack_codes(isa, 3, &codes, &mut three);
        let word = 1 | 2 << 3 | 3 << 6 | 4 << 9 | 5 << 12 | 6 << 15 | 7u32 << 18;
        assert_eq!(three, word.to_le_bytes()[..3]);
    }
}

/// One row through f64 arithmetic on the dense matrix.
struct Exact {
    norm: f64,
    /// Rotated, unit length.
    y: Vec<f64>,
}

fn exact(codec: &RowCodec, key: &[f32]) -> Exact {
    let rotation = codec.rotation().unwrap();
    let norm = key.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt();
    let scale =
        1.0 / key.iter().enumerate().map(|(i, _)| f64::from(rotation.sign(i, 0)).powi(2)).sum::<f64>().sqrt();
    let y = (0..key.len())
        .map(|j| {
            let sum: f64 =
                key.iter().enumerate().map(|(i, x)| f64::from(*x) * f64::from(rotation.sign(i, j))).sum();
            sum * scale / (norm + 1e-8)
        })
        .collect();
    Exact { norm, y }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn keys_follow_f64_arithmetic(
        bits in 3u8..=4,
        (exponent, key) in widths().prop_flat_map(|width| (-20i32..12, prop::collection::vec(-1f32..1.0, width))),
    ) {
        let key: Vec<f32> = key.into_iter().map(|x| x * 2f32.powi(exponent)).collect();
        let format = RowFormat { key: KeyFormat::LloydMax { bits }, value: ValueFormat::Uniform { bits: 4 } };
        let codec = RowCodec::new(format, key.len(), 16).unwrap();
        let codebook = codec.codebook().unwrap();
        let Exact { norm, y } = exact(&codec, &key);
        for isa in Isa::available() {
            let (mut codes, mut report) = (vec![0; key.len()], EncodeReport::default());
            let meta = codec.encode_key(isa, &key, &mut codes, &mut report);
            // fp16: half a unit in the last of 11 bits, or of the subnormal step; and f32's own error.
            let bound = (norm * 2f64.powi(-11)).max(2f64.powi(-25)) + norm * 1e-6;
            prop_assert!((meta.norm.to_f64() - norm).abs() <= bound, "norm {} for {norm}", meta.norm);
            for (code, y) in codes.iter().zip(&y) {
                let count = |shift: f64| codebook.midpoints().iter().filter(|m| y + shift >= f64::from(**m)).count();
                let (least, most) = (count(-1e-6), count(1e-6));
                prop_assert!((least..=most).contains(&usize::from(*code)), "code {code} for {y}");
            }
            // Decoding puts the stored norm on the direction of the centroids.
            let direction: Vec<f64> = codes.iter().map(|c| f64::from(codebook.centroids()[usize::from(*c)])).collect();
            let length = direction.iter().map(|c| c * c).sum::<f64>().sqrt();
            let mut decoded = vec![0.0; key.len()];
            codec.key_from_codes(isa, &codes, meta, &mut decoded);
            for (x, c) in decoded.iter().zip(&direction) {
                let expected = c / length * meta.norm.to_f64();
                prop_assert!((f64::from(*x) - expected).abs() <= expected.abs() * 1e-6, "{x} for {expected}");
            }
        }
    }

    #[test]
    fn values_follow_f64_arithmetic(
        bits in 3u8..=4,
        (exponent, offset, value) in widths().prop_flat_map(|width| {
            (-8i32..10, -10f32..10.0, prop::collection::vec(-1f32..1.0, width))
        }),
    ) {
        let value: Vec<f32> = value.into_iter().map(|x| (x + offset) * 2f32.powi(exponent)).collect();
        let format = RowFormat { key: KeyFormat::Fp8, value: ValueFormat::Uniform { bits } };
        let codec = RowCodec::new(format, 16, value.len()).unwrap();
        let low = f64::from(value.iter().copied().fold(f32::INFINITY, f32::min));
        let high = f64::from(value.iter().copied().fold(f32::NEG_INFINITY, f32::max));
        let scale = (high - low) / f64::from((1 << bits) - 1);
        let half_ulp = |x: f64| (x.abs() * 2f64.powi(-11)).max(2f64.powi(-25)) + x.abs() * 1e-6;
        for isa in Isa::available() {
            let (mut codes, mut report) = (vec![0; value.len()], EncodeReport::default());
            let meta = codec.encode_value(isa, &value, &mut codes, &mut report);
            prop_assert!((meta.scale.to_f64() - scale).abs() <= half_ulp(scale) + low.abs().max(high.abs()) * 1e-6);
            prop_assert!((meta.zero.to_f64() - low).abs() <= half_ulp(low));
            let mut decoded = vec![0.0; value.len()];
            codec.value_from_codes(isa, &codes, meta, &mut decoded);
            let reach = 0.5 * scale + half_ulp(low) + half_ulp(scale) * 15.0 + 1e-5 * high.abs().max(low.abs());
            for ((code, x), v) in codes.iter().zip(&decoded).zip(&value) {
                let position = (f64::from(*v) - low) / scale + 0.5;
                prop_assert!((position - 0.5 - f64::from(*code)).abs() <= 0.5 + 1e-3, "code {code} at {position}");
                let expected = f64::from(*code) * meta.scale.to_f64() + meta.zero.to_f64();
                prop_assert!((f64::from(*x) - expected).abs() <= 1e-6 * (expected.abs() + low.abs() + 1.0));
                prop_assert!((f64::from(*x) - f64::from(*v)).abs() <= reach, "{x} for {v}");
            }
        }
    }
}

#[test]
fn native_rows_of_their_own_dtype_are_exact() {
    let bits: Vec<u16> = (0..=u16::MAX).collect();
    for isa in Isa::available() {
        for row in bits.chunks_exact(64) {
            let halves: Vec<f16> = row.iter().map(|b| f16::from_bits(*b)).collect();
            let brains: Vec<bf16> = row.iter().map(|b| bf16::from_bits(*b)).collect();
            check_native(isa, NativeDtype::F16, &halves, |x| x.to_le_bytes().to_vec());
            check_native(isa, NativeDtype::Bf16, &brains, |x| x.to_le_bytes().to_vec());
        }
        let floats: Vec<f32> = bits[..64].iter().map(|b| f32::from_bits(u32::from(*b) * 65_537)).collect();
        check_native(isa, NativeDtype::F32, &floats, |x| x.to_le_bytes().to_vec());
    }
}

/// Bytes in, bytes out, but for NaNs, which stay NaNs.
fn check_native<T: Element>(isa: Isa, dtype: NativeDtype, row: &[T], to_bytes: impl Fn(&T) -> Vec<u8>) {
    let codec = RowCodec::new(CacheDtype::Auto.row_format(dtype), 64, 64).unwrap();
    let (slot, report) = slot(&codec, isa, row, row);
    let [key, raw_key, value] = decoded(&codec, isa, &slot);
    assert_eq!(report.saturated, 0);
    let bytes = slot[codec.layout().key_codes.clone()].chunks_exact(dtype.bytes());
    for (i, ((x, element), key_bytes)) in row.iter().zip(&key).zip(bytes).enumerate() {
        let wide = x.widen();
        if wide.is_nan() {
            assert!(element.is_nan() && value[i].is_nan() && raw_key[i].is_nan());
        } else {
            assert_eq!(key_bytes, to_bytes(x));
            assert_eq!([element.to_bits(), value[i].to_bits(), raw_key[i].to_bits()], [wide.to_bits(); 3]);
        }
    }
}

#[test]
fn a_codec_is_shared_between_threads() {
    let format = CacheDtype::TurboQuant(Preset::ThreeBitNc).row_format(NativeDtype::Bf16);
    let codec = RowCodec::new(format, 128, 64).unwrap();
    let other = codec.clone();
    assert!(std::ptr::eq(codec.layout(), other.layout()));
    std::thread::spawn(move || assert_eq!(other.value_head_dim(), 64)).join().unwrap();
}
