//! Closeness of attention outputs.

use turboquant::rows::Isa;

/// Largest relative L2 error of an output against the oracle over decoded rows. Vector kernels
/// multiply words; the largest errors are those of scores far from 0.
fn relative_l2(isa: Isa) -> f64 {
    match isa {
        Isa::Scalar => 1e-5,
        Isa::Avx2(_) => 3e-4,
    }
}

/// Holds `got` to `expected`: places of NaN and infinities equal; each element within the bound for
/// `isa` of 8 times the root mean square of its row of `width`, or of itself; the whole within that
/// bound and a cosine of 1 less it. Returns the relative L2 error.
#[track_caller]
pub(crate) fn assert_close(place: &str, isa: Isa, got: &[f32], expected: &[f64], width: usize) -> f64 {
    assert_eq!(got.len(), expected.len(), "{place}: lengths");
    let allowed = relative_l2(isa);
    let (mut worst, mut worst_ratio) = (0, 0.0);
    let (mut dot, mut squares, mut got_squares, mut error) = (0.0, 0.0, 0.0, 0.0);
    for (row, (got_row, expected_row)) in got.chunks(width).zip(expected.chunks(width)).enumerate() {
        let rms = (expected_row.iter().map(|x| x * x).sum::<f64>() / width as f64).sqrt();
        for (i, (&g, &e)) in got_row.iter().zip(expected_row).enumerate() {
            let g = f64::from(g);
            assert!(
                g.is_finite() == e.is_finite() && (g.is_finite() || g.is_nan() == e.is_nan()),
                "{place}: row {row} element {i} is {g}, expected {e}"
            );
            if !g.is_finite() {
                continue;
            }
            let bound = allowed * (8.0 * rms).max(e.abs()) + 1e-30;
            if (g - e).abs() / bound > worst_ratio {
                (worst, worst_ratio) = (row * width + i, (g - e).abs() / bound);
            }
            dot += g * e;
            squares += e * e;
            got_squares += g * g;
            error += (g - e) * (g - e);
        }
    }
    let relative = if squares == 0.0 { error.sqrt() } else { (error / squares).sqrt() };
    let cosine =
        if squares == 0.0 && got_squares == 0.0 { 1.0 } else { dot / (squares * got_squares).sqrt() };
    assert!(
        worst_ratio <= 1.0 && relative <= allowed && cosine >= 1.0 - allowed,
        "{place}: relative L2 {relative:.2e}, cosine {cosine}, worst at row {} element {} ({} where {} is expected, \
         {worst_ratio:.2} of its bound)",
        worst / width,
        worst % width,
        got[worst],
        expected[worst],
    );
    relative
}

/// Equal in every bit.
#[track_caller]
pub(crate) fn assert_same_bits(place: &str, a: &[f32], b: &[f32]) {
    assert_eq!(a.len(), b.len(), "{place}: lengths");
    for (i, (a, b)) in a.iter().zip(b).enumerate() {
        assert_eq!(a.to_bits(), b.to_bits(), "{place}: element {i} is {a} and {b}");
    }
}
