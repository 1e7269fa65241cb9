//! Zero, constant, huge, tiny and non-finite rows: the rules written at `turboquant::rows`.

use half::{bf16, f16};
use turboquant::{
    format::{CacheDtype, NativeDtype, Preset},
    rows::{EncodeReport, Isa, RowCodec},
};

use crate::random;

const HEAD_DIM: usize = 128;
const ROTATED: [Preset; 3] = [Preset::FourBitNc, Preset::K3V4Nc, Preset::ThreeBitNc];

struct Decoded {
    slot: Vec<u8>,
    report: EncodeReport,
    key: Vec<f32>,
    raw_key: Vec<f32>,
    value: Vec<f32>,
}

fn codec(dtype: CacheDtype, native: NativeDtype) -> RowCodec {
    RowCodec::new(dtype.row_format(native), HEAD_DIM, HEAD_DIM).unwrap()
}

fn round_trip(codec: &RowCodec, isa: Isa, key: &[f32], value: &[f32]) -> Decoded {
    let (mut slot, mut report) = (vec![0; codec.layout().slot_bytes], EncodeReport::default());
    codec.encode_slot(isa, key, value, &mut slot, &mut report);
    let (mut key, mut raw_key, mut value) = (vec![0.0; HEAD_DIM], vec![0.0; HEAD_DIM], vec![0.0; HEAD_DIM]);
    codec.decode_key(isa, &slot, &mut key);
    codec.decode_key_raw_basis(isa, &slot, &mut raw_key);
    codec.decode_value(isa, &slot, &mut value);
    Decoded { slot, report, key, raw_key, value }
}

fn field(slot: &[u8], at: Option<usize>) -> f16 {
    let at = at.unwrap();
    f16::from_le_bytes([slot[at], slot[at + 1]])
}

/// `check` on every preset of `presets` and every instruction set.
fn each(presets: &[Preset], check: impl Fn(&RowCodec, Isa)) {
    for preset in presets {
        let codec = codec(CacheDtype::TurboQuant(*preset), NativeDtype::Bf16);
        Isa::available().into_iter().for_each(|isa| check(&codec, isa));
    }
}

fn cosine(a: &[f32], b: &[f32]) -> f64 {
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>();
    dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()
}

fn one_hot(at: usize, x: f32) -> Vec<f32> {
    let mut row = vec![0.0; HEAD_DIM];
    row[at] = x;
    row
}

#[test]
fn zero_keys_and_values_decode_to_zeros() {
    each(&Preset::ALL, |codec, isa| {
        for zero in [0.0, -0.0] {
            let row = [zero; HEAD_DIM];
            let decoded = round_trip(codec, isa, &row, &row);
            assert!(decoded.report.is_clean());
            for x in decoded.key.iter().chain(&decoded.raw_key).chain(&decoded.value) {
                assert_eq!(*x, 0.0);
            }
            if codec.layout().norm.is_some() {
                assert_eq!(field(&decoded.slot, codec.layout().norm).to_bits(), 0);
            }
        }
    });
}

#[test]
fn zero_keys_get_the_code_above_the_centre() {
    each(&ROTATED, |codec, isa| {
        let mut codes = vec![0; HEAD_DIM];
        let meta = codec.encode_key(isa, &[0f32; HEAD_DIM], &mut codes, &mut EncodeReport::default());
        let middle = codec.codebook().unwrap().centroids().len() as u8 / 2;
        assert_eq!((codes, meta.norm), (vec![middle; HEAD_DIM], f16::ZERO));
    });
}

#[test]
fn constant_values_come_back_as_fp16() {
    each(&Preset::ALL, |codec, isa| {
        let exact = round_trip(codec, isa, &[0.0; HEAD_DIM], &[3.25; HEAD_DIM]);
        assert_eq!(exact.value, [3.25; HEAD_DIM]);
        assert_eq!(field(&exact.slot, codec.layout().scale), f16::ZERO);
        let tiny = round_trip(codec, isa, &[0.0; HEAD_DIM], &[1e-8; HEAD_DIM]);
        assert!(tiny.value.iter().all(|x| (x - 1e-8).abs() <= 1e-7));
        assert!(exact.report.is_clean() && tiny.report.is_clean());

        let mut nearly = [1.0; HEAD_DIM];
        nearly[40] = 1.000_000_1;
        let nearly = round_trip(codec, isa, &[0.0; HEAD_DIM], &nearly);
        assert_eq!(nearly.value, [1.0; HEAD_DIM]);
        assert_eq!(nearly.report, EncodeReport { underflowed: 1, ..Default::default() });
    });
}

#[test]
fn an_outlier_in_a_value_costs_one_step_at_most() {
    each(&Preset::ALL, |codec, isa| {
        let value = one_hot(77, 1000.0);
        let decoded = round_trip(codec, isa, &[0.0; HEAD_DIM], &value);
        let step = if codec.layout().value_row_bytes == 52 { 143.0 } else { 66.7 };
        for (x, v) in decoded.value.iter().zip(&value) {
            assert!((x - v).abs() <= step, "{x} for {v}");
        }
    });
}

#[test]
fn one_hot_keys_keep_their_direction() {
    each(&Preset::ALL, |codec, isa| {
        let key = one_hot(5, 7.0);
        let decoded = round_trip(codec, isa, &key, &key);
        assert!(cosine(&decoded.raw_key, &key) >= 0.98);
    });
}

#[test]
fn huge_keys_keep_their_direction_and_saturate_the_norm() {
    each(&ROTATED, |codec, isa| {
        let key = &random::rows(51, 1, HEAD_DIM)[0];
        let ordinary = round_trip(codec, isa, key, &[0.0; HEAD_DIM]);
        // Norms about 1.1e5, 1e18, and beyond where the squares overflow f32.
        for scale in [1e4, 1e17, 1e25, 6e37] {
            let huge: Vec<f32> = key.iter().map(|x| x * scale).collect();
            let decoded = round_trip(codec, isa, &huge, &[0.0; HEAD_DIM]);
            assert_eq!(decoded.report, EncodeReport { saturated: 1, ..Default::default() });
            assert_eq!(field(&decoded.slot, codec.layout().norm), f16::MAX);
            assert!(cosine(&decoded.key, &ordinary.key) > 0.9999, "scale {scale}");
            let norm = decoded.key.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt();
            assert!((norm - 65504.0).abs() < 1.0, "{norm}");
        }
    });
}

#[test]
fn tiny_keys_become_zeros_and_are_counted() {
    each(&ROTATED, |codec, isa| {
        for (x, counted) in [(1e-12, 1), (f32::from_bits(1), 0)] {
            let decoded = round_trip(codec, isa, &[x; HEAD_DIM], &[0.0; HEAD_DIM]);
            assert!(decoded.key.iter().all(|x| *x == 0.0));
            // The squares of subnormal elements are 0 in f32: such a key counts as zero.
            assert_eq!(decoded.report, EncodeReport { underflowed: counted, ..Default::default() });
        }
    });
}

#[test]
fn values_beyond_fp16_saturate() {
    each(&Preset::ALL, |codec, isa| {
        let largest = f16::MAX.to_f32();
        // The range fits though the largest element does not: as vLLM, no field overflows.
        let wide = round_trip(codec, isa, &[0.0; HEAD_DIM], &one_hot(3, 1e5));
        assert!(wide.report.is_clean());
        assert!((wide.value[3] - 1e5).abs() < 100.0);
        // The minimum does not fit: codes count from the limit, so the rest of the row is right.
        let low = round_trip(codec, isa, &[0.0; HEAD_DIM], &one_hot(3, -1e5));
        assert_eq!(low.report, EncodeReport { saturated: 1, ..Default::default() });
        assert_eq!(low.value[3], -largest);
        assert!(low.value.iter().enumerate().all(|(i, x)| i == 3 || x.abs() < 10_000.0));
        // Nothing fits.
        for x in [3e38, -3e38] {
            let all = round_trip(codec, isa, &[0.0; HEAD_DIM], &[x; HEAD_DIM]);
            assert!(all.report.saturated >= 1);
            assert!(
                all.value.iter().all(|y| y.is_finite() && y.signum() == x.signum() && y.abs() >= largest)
            );
        }
        let mut both = [3e38; HEAD_DIM];
        both[0] = -3e38;
        let both = round_trip(codec, isa, &[0.0; HEAD_DIM], &both);
        assert_eq!(both.report.saturated, 2);
        assert!(both.value[0] == -largest && both.value[1] > largest && both.value[1].is_finite());
    });
}

#[test]
fn non_finite_rows_are_nan_and_touch_no_neighbour() {
    each(&Preset::ALL, |codec, isa| {
        let layout = codec.layout();
        let rows = random::rows(52, 2, HEAD_DIM);
        let clean = round_trip(codec, isa, &rows[0], &rows[1]);
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut row = rows[0].clone();
            row[9] = bad;
            // In the value: the key row keeps its bytes.
            let decoded = round_trip(codec, isa, &rows[0], &row);
            assert_eq!(decoded.report.non_finite, 1);
            assert_eq!(decoded.slot[..layout.key_row_bytes], clean.slot[..layout.key_row_bytes]);
            assert!(decoded.slot[layout.value_codes.clone()].iter().all(|byte| *byte == 0));
            assert!(
                field(&decoded.slot, layout.scale).is_nan() && field(&decoded.slot, layout.zero).is_nan()
            );
            assert!(decoded.value.iter().all(|x| x.is_nan()));
            // In the key: the value row keeps its bytes.
            let decoded = round_trip(codec, isa, &row, &rows[1]);
            assert_eq!(decoded.report.non_finite, 1);
            assert_eq!(decoded.slot[layout.key_row_bytes..], clean.slot[layout.key_row_bytes..]);
            if layout.norm.is_some() {
                assert_eq!(field(&decoded.slot, layout.norm).to_bits(), 0x7E00);
                assert!(decoded.key.iter().all(|x| x.is_nan()));
            } else {
                // e4m3 keeps the damage to one element, and has no infinity.
                let expected = if bad.is_nan() {
                    0x7F
                } else if bad > 0.0 {
                    0x7E
                } else {
                    0xFE
                };
                assert_eq!(decoded.slot[9], expected);
                assert_eq!(decoded.slot[10..layout.key_row_bytes], clean.slot[10..layout.key_row_bytes]);
            }
        }
    });
}

#[test]
fn clipped_fp8_keys_are_counted() {
    let codec = codec(CacheDtype::TurboQuant(Preset::K8V4), NativeDtype::Bf16);
    for isa in Isa::available() {
        let (mut slot, mut report) = (vec![0; codec.layout().slot_bytes], EncodeReport::default());
        // 64 keys with channel 9 at 600, and channel 10 at 900 on the first.
        for (token, mut key) in random::rows(41, 64, HEAD_DIM).into_iter().enumerate() {
            key[9] = 600.0;
            if token == 0 {
                key[10] = 900.0;
            }
            codec.encode_slot(isa, &key, &[0f32; HEAD_DIM], &mut slot, &mut report);
        }
        assert_eq!(report, EncodeReport { fp8_clipped: 65, ..Default::default() });
    }
}

#[test]
fn native_rows_saturate_finite_elements_only() {
    for isa in Isa::available() {
        let mut row = one_hot(0, 1e5);
        (row[1], row[2], row[3]) = (f32::MAX, f32::NEG_INFINITY, -65_519.0);
        let half = round_trip(&codec(CacheDtype::Auto, NativeDtype::F16), isa, &row, &row);
        assert_eq!(half.report, EncodeReport { saturated: 4, non_finite: 2, ..Default::default() });
        assert_eq!(half.key[..4], [65504.0, 65504.0, f32::NEG_INFINITY, -65504.0]);
        let brain = round_trip(&codec(CacheDtype::Auto, NativeDtype::Bf16), isa, &row, &row);
        assert_eq!(brain.report, EncodeReport { saturated: 2, non_finite: 2, ..Default::default() });
        assert_eq!(brain.value[1..3], [bf16::MAX.to_f32(), f32::NEG_INFINITY]);
        let single = round_trip(&codec(CacheDtype::Auto, NativeDtype::F32), isa, &row, &row);
        assert_eq!((single.key, single.value), (row.clone(), row));
    }
}

#[test]
fn reports_add_up() {
    let one = EncodeReport { fp8_clipped: 1, saturated: 2, underflowed: 3, non_finite: 4 };
    let mut sum = one;
    sum += one;
    assert_eq!(sum, EncodeReport { fp8_clipped: 2, saturated: 4, underflowed: 6, non_finite: 8 });
    assert!(!sum.is_clean() && EncodeReport::default().is_clean());
}
