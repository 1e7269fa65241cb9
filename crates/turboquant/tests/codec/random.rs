//! The number generators that the recipes of the test inputs name.

/// Uniform in [0, 1): splitmix64 at position `i` of the stream `seed`.
pub(crate) fn u(seed: u64, i: u64) -> f64 {
    let mut z = seed.wrapping_add((i + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15));
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^= z >> 31;
    (z >> 11) as f64 * 2f64.powi(-53)
}

/// About N(0, 1): twelve uniform numbers less 6.
pub(crate) fn g(seed: u64, i: u64) -> f64 {
    (0..12).map(|k| u(seed, 12 * i + k)).sum::<f64>() - 6.0
}

/// `rows` rows `v[t][c] = g(seed, t * width + c)`.
pub(crate) fn rows(seed: u64, rows: usize, width: usize) -> Vec<Vec<f32>> {
    (0..rows).map(|t| (0..width).map(|c| g(seed, (t * width + c) as u64) as f32).collect()).collect()
}

#[test]
fn generators_give_their_test_values() {
    assert_eq!(u(1, 0), 0.566_561_575_172_280_9);
    assert_eq!(u(1, 1), 0.745_781_757_262_701_1);
    assert!((g(1, 0) - 1.424_348_090_515_651_1).abs() < 1e-12);
    assert!((g(1, 1) + 0.618_904_259_878_568_1).abs() < 1e-12);
}
