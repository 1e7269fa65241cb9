//! Figures of the codec on stated inputs, against figures measured elsewhere on the same inputs.

use turboquant::{
    format::{CacheDtype, KeyFormat, NativeDtype, Preset, RowFormat, ValueFormat},
    rows::{EncodeReport, Isa, RowCodec},
};

use crate::random::{self, g};

fn key_codec(bits: u8, head_dim: usize) -> RowCodec {
    let format = RowFormat { key: KeyFormat::LloydMax { bits }, value: ValueFormat::Uniform { bits: 4 } };
    RowCodec::new(format, head_dim, head_dim).unwrap()
}

/// The key in its own basis after a round trip.
fn round_trip(codec: &RowCodec, key: &[f32]) -> Vec<f32> {
    let mut slot = vec![0; codec.layout().slot_bytes];
    let mut report = EncodeReport::default();
    codec.encode_slot(Isa::detect(), key, &vec![0f32; codec.value_head_dim()], &mut slot, &mut report);
    assert!(report.is_clean());
    let mut out = vec![0.0; key.len()];
    codec.decode_key_raw_basis(Isa::detect(), &slot, &mut out);
    out
}

fn dot(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
}

/// `|x' - x|^2 / |x|^2`.
fn relative_error(x: &[f32], decoded: &[f32]) -> f64 {
    let difference: Vec<f32> = x.iter().zip(decoded).map(|(a, b)| a - b).collect();
    dot(&difference, &difference) / dot(x, x)
}

#[test]
fn widths_that_are_no_power_of_two_lose_no_more() {
    for head_dim in [80, 96, 112, 192, 576] {
        let (vectors, queries) = (random::rows(22, 200, head_dim), random::rows(25, 200, head_dim));
        for (bits, bound) in [(4, 0.0105), (3, 0.038)] {
            let codec = key_codec(bits, head_dim);
            let mut error = 0.0;
            for (v, q) in vectors.iter().zip(&queries) {
                let (mut rotated_v, mut rotated_q) = (v.clone(), q.clone());
                codec.rotate_query(Isa::detect(), &mut rotated_v);
                codec.rotate_query(Isa::detect(), &mut rotated_q);
                let lengths = (dot(v, v) * dot(q, q)).sqrt();
                assert!((dot(&rotated_v, &rotated_q) - dot(v, q)).abs() < 1e-4 * lengths);
                error += relative_error(v, &round_trip(&codec, v)) / vectors.len() as f64;
            }
            println!("head_dim {head_dim}, {bits} bits: relative squared error {error:.4}");
            assert!(error <= bound, "head_dim {head_dim}, {bits} bits: {error}");
        }
    }
}

#[test]
fn error_is_that_of_the_optimal_grid_at_every_width() {
    for head_dim in [64, 128, 256] {
        let vectors = random::rows(23, 200, head_dim);
        for (bits, expected, uncorrected_norm) in [(3, 0.030..0.037, 0.986), (4, 0.0085..0.0105, 0.997)] {
            let codec = key_codec(bits, head_dim);
            let centroids = codec.codebook().unwrap().centroids();
            let (mut error, mut norm_ratio, mut used) = (0.0, 0.0, vec![false; centroids.len()]);
            for v in &vectors {
                error += relative_error(v, &round_trip(&codec, v)) / vectors.len() as f64;
                let mut codes = vec![0; head_dim];
                codec.encode_key(Isa::detect(), v, &mut codes, &mut EncodeReport::default());
                let centroids: Vec<f32> = codes.iter().map(|c| centroids[usize::from(*c)]).collect();
                norm_ratio += dot(&centroids, &centroids).sqrt() / vectors.len() as f64;
                codes.iter().for_each(|c| used[usize::from(*c)] = true);
            }
            println!("head_dim {head_dim}, {bits} bits: error {error:.5}, uncorrected norm {norm_ratio:.4}");
            assert!(expected.contains(&error), "head_dim {head_dim}, {bits} bits: {error}");
            assert!((norm_ratio - uncorrected_norm).abs() < 0.004, "{norm_ratio}");
            assert!(used.iter().all(|used| *used), "head_dim {head_dim}, {bits} bits: unused codes");
        }
    }
}

/// Mean KL divergence and top-1 agreement of attention over `keys` against the same over `decoded`.
fn divergence(queries: &[Vec<f32>], keys: &[Vec<f32>], decoded: &[Vec<f32>]) -> (f64, f64) {
    let softmax = |keys: &[Vec<f32>], query: &[f32]| {
        let logits: Vec<f64> = keys.iter().map(|k| dot(k, query) / (query.len() as f64).sqrt()).collect();
        let top = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = logits.iter().map(|l| (l - top).exp()).sum();
        let log_probs: Vec<f64> = logits.iter().map(|l| l - top - sum.ln()).collect();
        let argmax = logits.iter().position(|l| *l == top).unwrap();
        (log_probs, argmax)
    };
    let (mut kl, mut agree) = (0.0, 0.0);
    for query in queries {
        let (p, p_top) = softmax(keys, query);
        let (q, q_top) = softmax(decoded, query);
        kl += p.iter().zip(&q).map(|(p, q)| p.exp() * (p - q)).sum::<f64>();
        agree += f64::from(u8::from(p_top == q_top));
    }
    (kl / queries.len() as f64, agree / queries.len() as f64)
}

/// Keys with a bias of `amplitude` in four channels, as some models have.
fn biased_keys(amplitude: f64) -> Vec<Vec<f32>> {
    let bias = |channel: usize| match channel {
        64 => -amplitude,
        3 | 17 | 101 => amplitude,
        _ => 0.0,
    };
    (0..256u64).map(|t| (0..128).map(|c| (bias(c) + g(7, t * 128 + c as u64)) as f32).collect()).collect()
}

/// A bias eats the range of the codes: the plain codec is unfit for such layers, and by how much is
/// stated here. Removing the channels' mean first makes it fit again.
#[test]
fn biased_keys_ruin_plain_codes() {
    let queries = random::rows(11, 64, 128);
    // amplitude, bits, KL, top-1
    let measured = [
        (0.0, 3, 0.017, 0.84),
        (0.0, 4, 0.0047, 0.94),
        (30.0, 3, 0.38, 0.30),
        (30.0, 4, 0.11, 0.56),
        (300.0, 3, 14.8, 0.13),
        (300.0, 4, 5.3, 0.09),
    ];
    for (amplitude, bits, expected_kl, expected_top1) in measured {
        let keys = biased_keys(amplitude);
        let codec = key_codec(bits, 128);
        let decoded: Vec<_> = keys.iter().map(|k| round_trip(&codec, k)).collect();
        let (kl, top1) = divergence(&queries, &keys, &decoded);
        println!("amplitude {amplitude}, {bits} bits: KL {kl:.4}, top-1 {top1:.3}");
        assert!((kl / expected_kl - 1.0).abs() < 0.15, "amplitude {amplitude}, {bits} bits: KL {kl}");
        assert!((top1 - expected_top1).abs() < 0.05, "amplitude {amplitude}, {bits} bits: top-1 {top1}");

        let mean: Vec<f32> =
            (0..128).map(|c| keys.iter().map(|k| k[c]).sum::<f32>() / keys.len() as f32).collect();
        let shift =
            |row: &[f32], sign: f32| row.iter().zip(&mean).map(|(x, m)| x + sign * m).collect::<Vec<_>>();
        let decoded: Vec<_> = keys.iter().map(|k| shift(&round_trip(&codec, &shift(k, -1.0)), 1.0)).collect();
        let (kl, top1) = divergence(&queries, &keys, &decoded);
        println!("  with the mean removed: KL {kl:.4}, top-1 {top1:.3}");
        assert!(kl <= 0.05 && top1 >= 0.75, "amplitude {amplitude}, {bits} bits: KL {kl}, top-1 {top1}");
    }
}

/// e4m3 keys, unrotated, keep a bias in its own channels.
#[test]
fn biased_keys_survive_in_e4m3() {
    let queries = random::rows(11, 64, 128);
    let format = CacheDtype::TurboQuant(Preset::K8V4).row_format(NativeDtype::Bf16);
    let codec = RowCodec::new(format, 128, 128).unwrap();
    for amplitude in [0.0, 30.0, 300.0] {
        let keys = biased_keys(amplitude);
        let decoded: Vec<_> = keys.iter().map(|k| round_trip(&codec, k)).collect();
        let (kl, top1) = divergence(&queries, &keys, &decoded);
        println!("amplitude {amplitude}, e4m3: KL {kl:.5}, top-1 {top1:.3}");
        assert!(kl <= 0.05 && top1 >= 0.75, "amplitude {amplitude}: KL {kl}, top-1 {top1}");
    }
}
