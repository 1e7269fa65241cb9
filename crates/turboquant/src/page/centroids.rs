//! Centroids as integers, for kernels that multiply words.

use crate::codebook::Codebook;

/// Largest integer of a centroid: the squares of 64 such integers still sum up below 2^32.
const LARGEST: i32 = 8191;

/// The centroids of a codebook times a common factor, rounded to words, as byte tables for a 16-entry
/// look-up. The factor itself is of no interest: keys are centroids over their norm.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct IntegerCentroids {
    /// Low and high byte of the word of code `i`; of code `i % 8` for 3 bits.
    pub(crate) by_code: [[u8; 16]; 2],
    /// For 3 bits, by an index whose bits 0, 1 and 3 are the code's bits 0, 1 and 2.
    pub(crate) by_split_code: [[u8; 16]; 2],
    /// Largest absolute value.
    pub(crate) largest: i32,
}

impl IntegerCentroids {
    pub(crate) fn new(codebook: &Codebook) -> IntegerCentroids {
        let centroids = codebook.centroids();
        let outermost = f64::from(centroids[centroids.len() - 1]);
        let words = |largest: i32| {
            let factor = f64::from(largest) / outermost;
            centroids.iter().map(move |c| (f64::from(*c) * factor, (f64::from(*c) * factor).round()))
        };
        // Some factors bring all centroids close to integers: a third of the rounding error.
        let error = |largest: i32| {
            words(largest).map(|(exact, word)| (exact - word).powi(2)).sum::<f64>().sqrt()
                / f64::from(largest)
        };
        let mut best = (LARGEST, error(LARGEST));
        for largest in LARGEST / 2..LARGEST {
            let error = error(largest);
            if error < best.1 {
                best = (largest, error);
            }
        }
        let words: Vec<i16> = words(best.0).map(|(_, word)| word as i16).collect();
        let table = |code: &dyn Fn(usize) -> usize| {
            let bytes: [[u8; 2]; 16] = std::array::from_fn(|i| words[code(i) % words.len()].to_le_bytes());
            [bytes.map(|[low, _]| low), bytes.map(|[_, high]| high)]
        };
        IntegerCentroids {
            by_code: table(&|i| i),
            by_split_code: table(&|i| (i & 3) | (i >> 1 & 4)),
            largest: best.0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_close_to_the_centroids_and_their_squares_fit() {
        for bits in [3u8, 4] {
            for head_dim in [16, 64, 80, 128, 256, 576] {
                let codebook = Codebook::shared(head_dim, bits);
                let integers = IntegerCentroids::new(&codebook);
                let [low, high] = integers.by_code;
                let factor = f64::from(integers.largest) / f64::from(codebook.centroids()[(1 << bits) - 1]);
                let mut squares = 0.0;
                for (i, c) in codebook.centroids().iter().enumerate() {
                    let word = f64::from(i16::from_le_bytes([low[i], high[i]]));
                    squares += (word / factor / f64::from(*c) - 1.0).powi(2) * f64::from(*c).powi(2);
                    let split = (i & 3) | (i & 4) << 1;
                    let [low, high] = integers.by_split_code;
                    if bits == 3 {
                        assert_eq!(f64::from(i16::from_le_bytes([low[split], high[split]])), word);
                    }
                }
                let sigma = 1.0 / (head_dim as f64).sqrt();
                let rms = (squares / f64::from(1u32 << bits)).sqrt() / sigma;
                assert!(rms < 1e-4, "head_dim {head_dim}, {bits} bits: rms error of {rms:.1e} sigma");
                assert!(64 * i64::from(integers.largest).pow(2) < 1 << 32);
            }
        }
    }
}
