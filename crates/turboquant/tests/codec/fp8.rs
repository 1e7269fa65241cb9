//! e4m3 bytes against the table of its values.

use turboquant::{
    format::{CacheDtype, NativeDtype},
    fp8,
    rows::{EncodeReport, Isa, RowCodec},
};

/// Values 0, 2^-9, ..., 448 of the bytes 0x00 to 0x7E, from the definition of the format.
fn magnitudes() -> Vec<f64> {
    (0..0x7F)
        .map(|byte: i32| match (byte >> 3, f64::from(byte & 7)) {
            (0, mantissa) => mantissa / 512.0,
            (exponent, mantissa) => (1.0 + mantissa / 8.0) * 2f64.powi(exponent - 7),
        })
        .collect()
}

/// Nearest byte by search, ties to the even one; saturating.
fn nearest(x: f32) -> u8 {
    if x.is_nan() {
        return 0x7F;
    }
    let (x, sign) = (f64::from(x), if x.is_sign_negative() { 0x80 } else { 0 });
    let magnitudes = magnitudes();
    let distance = |byte: u8| (magnitudes[usize::from(byte)] - x.abs().min(1e6)).abs();
    let better = |a: u8, b: u8| distance(a).total_cmp(&distance(b)).then((a & 1).cmp(&(b & 1)));
    sign | (0..0x7Fu8).min_by(|a, b| better(*a, *b)).unwrap()
}

/// Every half-precision number, and the f32 next to each value and to each border between values.
fn inputs() -> Vec<f32> {
    let mut inputs: Vec<f32> = (0..=u16::MAX).map(|bits| half::f16::from_bits(bits).to_f32()).collect();
    inputs.extend((0..=u16::MAX).map(|bits| half::bf16::from_bits(bits).to_f32()));
    for pair in magnitudes().windows(2) {
        for x in [pair[0], (pair[0] + pair[1]) / 2.0, pair[1]] {
            let x = x as f32;
            inputs.extend([x, x.next_up(), x.next_down()].into_iter().flat_map(|x| [x, -x]));
        }
    }
    inputs
}

#[test]
fn bytes_are_the_nearest_and_equal_on_every_isa() {
    let mut inputs = inputs();
    inputs.resize(inputs.len().next_multiple_of(64), 0.0);
    let codec = RowCodec::new(CacheDtype::Fp8.row_format(NativeDtype::Bf16), 64, 64).unwrap();
    for row in inputs.chunks_exact(64) {
        let expected: Vec<u8> = row.iter().map(|x| nearest(*x)).collect();
        let beyond = row.iter().filter(|x| x.is_finite() && x.abs() > 448.0).count() as u64;
        let non_finite = row.iter().filter(|x| !x.is_finite()).count() as u64;
        for isa in Isa::available() {
            let (mut bytes, mut report) = (vec![0; 64], EncodeReport::default());
            codec.encode_key(isa, row, &mut bytes, &mut report);
            assert_eq!(bytes, expected, "{row:?} on {}", isa.name());
            let counted = EncodeReport { fp8_clipped: beyond, non_finite, ..Default::default() };
            assert_eq!(report, counted, "{row:?} on {}", isa.name());
        }
    }
}

#[test]
fn bytes_decode_to_the_table_on_every_isa() {
    let codec = RowCodec::new(CacheDtype::Fp8.row_format(NativeDtype::Bf16), 128, 128).unwrap();
    let slot: Vec<u8> = (0..=255).collect();
    for isa in Isa::available() {
        let (mut positive, mut negative) = (vec![0.0; 128], vec![0.0; 128]);
        codec.decode_key(isa, &slot, &mut positive);
        codec.decode_value(isa, &slot, &mut negative);
        for (byte, value) in magnitudes().into_iter().enumerate() {
            assert_eq!(f64::from(positive[byte]), value);
            assert_eq!(f64::from(negative[byte]), -value);
            assert!(negative[byte].is_sign_negative());
        }
        assert!(positive[127].is_nan() && negative[127].is_nan());
    }
}

#[test]
fn listed_numbers_round_as_stated() {
    let table = [
        (0.0, 0.0),
        (1.0, 1.0),
        (1.06, 1.0),
        (-1.0625, -1.0),
        (17.0, 16.0),
        (19.0, 20.0),
        (0.1, 0.1015625),
        (240.0, 240.0),
        (300.0, 288.0),
        (447.9, 448.0),
        (448.0, 448.0),
        (464.0, 448.0),
        (465.0, 448.0),
        (1000.0, 448.0),
        (-1000.0, -448.0),
        (65504.0, 448.0),
        (0.015625, 0.015625),
        (0.001953125, 0.001953125),
        (0.0009765625, 0.0),
        (1.5 / 1024.0, 0.001953125),
        (3e-05, 0.0),
        (f32::INFINITY, 448.0),
        (f32::NEG_INFINITY, -448.0),
    ];
    for (x, y) in table {
        assert_eq!(fp8::decode(fp8::encode(x)), y, "{x}");
    }
    assert_eq!(fp8::encode(f32::NAN), 0x7F);
    assert_eq!(fp8::encode(-f32::NAN), 0x7F);
}
