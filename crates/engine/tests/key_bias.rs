//! The limits of `key_bias_limit`, measured: what a constant bias on the keys does to attention.

use turboquant::{
    format::{CacheDtype, KeyFormat, NativeDtype, Preset},
    rows::{EncodeReport, Isa, RowCodec},
};
use turboquant_engine::plan::key_bias_limit;

const DIM: usize = 128;
const TOKENS: usize = 256;
const QUERIES: usize = 64;

/// SplitMix64 as a uniform number, and the sum of twelve of them as a nearly normal one.
fn normal(seed: u64, index: u64) -> f32 {
    let uniform = |i: u64| {
        let mut z = seed.wrapping_add((i + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15));
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((z ^ (z >> 31)) >> 11) as f64 * 2f64.powi(-53)
    };
    ((0..12).map(|k| uniform(12 * index + k)).sum::<f64>() - 6.0) as f32
}

/// Mean KL divergence of the attention weights and agreement of the largest, keys stored as `dtype`
/// against exact keys; the keys are normal with a bias of `amplitude` on four channels.
fn damage(dtype: CacheDtype, amplitude: f32, rope: bool) -> (f64, f64) {
    let codec = RowCodec::new(dtype.row_format(NativeDtype::Bf16), DIM, DIM).expect("128 is a width");
    let isa = Isa::detect();
    let bias = |channel: usize| match channel {
        64 => -amplitude,
        3 | 17 | 101 => amplitude,
        _ => 0.0,
    };
    let mut report = EncodeReport::default();
    let mut keys = Vec::new();
    for token in 0..TOKENS {
        let mut key: Vec<f32> = (0..DIM).map(|c| bias(c) + normal(7, (token * DIM + c) as u64)).collect();
        if rope {
            rotate(&mut key, token);
        }
        let mut codes = vec![0; codec.key_codes_len()];
        let meta = codec.encode_key(isa, &key, &mut codes, &mut report);
        let mut stored = vec![0.0; DIM];
        codec.key_from_codes(isa, &codes, meta, &mut stored);
        keys.push((key, stored));
    }
    let weights = |logits: Vec<f64>| {
        let top = logits.iter().copied().fold(f64::MIN, f64::max);
        let exp: Vec<f64> = logits.iter().map(|x| (x - top).exp()).collect();
        let sum: f64 = exp.iter().sum();
        exp.into_iter().map(|x| x / sum).collect::<Vec<f64>>()
    };
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(x, y)| f64::from(*x) * f64::from(*y)).sum::<f64>();
    let largest = |p: &[f64]| (0..p.len()).max_by(|&a, &b| p[a].total_cmp(&p[b]));
    let (mut divergence, mut agreement) = (0.0, 0.0);
    for row in 0..QUERIES {
        let query: Vec<f32> = (0..DIM).map(|c| normal(11, (row * DIM + c) as u64)).collect();
        let mut rotated = query.clone();
        codec.rotate_query(isa, &mut rotated);
        let scale = (DIM as f64).sqrt();
        let exact = weights(keys.iter().map(|(key, _)| dot(&query, key) / scale).collect());
        let ours = weights(keys.iter().map(|(_, stored)| dot(&rotated, stored) / scale).collect());
        let terms =
            exact.iter().zip(&ours).map(|(p, q)| if *p > 0.0 { p * (p / q.max(1e-300)).ln() } else { 0.0 });
        divergence += terms.sum::<f64>();
        agreement += f64::from(u8::from(largest(&exact) == largest(&ours)));
    }
    (divergence / QUERIES as f64, agreement / QUERIES as f64)
}

/// RoPE of base 1,000,000 at position `token`, halves paired.
fn rotate(key: &mut [f32], token: usize) {
    for i in 0..DIM / 2 {
        let angle = token as f64 * 1e6f64.powf(-2.0 * i as f64 / DIM as f64);
        let (sin, cos) = (angle.sin() as f32, angle.cos() as f32);
        let (a, b) = (key[i], key[i + DIM / 2]);
        key[i] = a * cos - b * sin;
        key[i + DIM / 2] = b * cos + a * sin;
    }
}

/// The norm of the bias at `amplitude` on four channels.
fn norm(amplitude: f32) -> f32 {
    2.0 * amplitude
}

const FOUR_BIT: CacheDtype = CacheDtype::TurboQuant(Preset::FourBitNc);
const THREE_BIT: CacheDtype = CacheDtype::TurboQuant(Preset::ThreeBitNc);

#[test]
fn the_damage_is_that_of_an_independent_implementation() {
    // Mean KL divergence and agreement measured with another implementation of the same codec.
    let measured = [
        (FOUR_BIT, 0.0, 0.0047, 0.94),
        (FOUR_BIT, 30.0, 0.11, 0.56),
        (FOUR_BIT, 300.0, 5.3, 0.09),
        (THREE_BIT, 0.0, 0.017, 0.84),
        (THREE_BIT, 30.0, 0.38, 0.30),
        (THREE_BIT, 300.0, 14.8, 0.13),
    ];
    for (dtype, amplitude, divergence, agreement) in measured {
        let (kl, top) = damage(dtype, amplitude, false);
        assert!((kl / divergence - 1.0).abs() < 0.03, "{dtype} {amplitude}: {kl}");
        assert!((top - agreement).abs() < 0.025, "{dtype} {amplitude}: {top}");
    }
}

#[test]
fn a_layer_at_the_limit_is_still_good_and_half_as_much_again_is_not() {
    for dtype in [CacheDtype::Fp8, FOUR_BIT, THREE_BIT] {
        let limit =
            key_bias_limit(dtype.row_format(NativeDtype::Bf16).key, DIM).expect("coded keys have a limit");
        let worst = |scale: f32| {
            [false, true]
                .map(|rope| damage(dtype, scale * limit / norm(1.0), rope).0)
                .into_iter()
                .fold(0.0, f64::max)
        };
        assert!(worst(1.0) <= 0.05, "{dtype} at {limit}: {}", worst(1.0));
        assert!(worst(1.5) > 0.05, "{dtype} at 1.5 * {limit}: {}", worst(1.5));
    }
    assert_eq!(key_bias_limit(KeyFormat::Native(NativeDtype::Bf16), DIM), None);
}

#[test]
fn layers_with_the_bias_of_qwen2_5_are_kept_as_they_are() {
    // Qwen2.5-7B: layers 0 and 27 have 605 and 921, the others about 22 over their four heads.
    for dtype in [CacheDtype::Fp8, FOUR_BIT, THREE_BIT] {
        let limit =
            key_bias_limit(dtype.row_format(NativeDtype::Bf16).key, DIM).expect("coded keys have a limit");
        assert!(norm(300.0) > limit && 605.0 > limit && 22.0 / 2.0 < limit, "{dtype}: {limit}");
    }
    let (kl, top) = damage(CacheDtype::Auto, 300.0, true);
    assert!(kl <= 0.05 && top >= 0.75, "{kl} {top}");
}
