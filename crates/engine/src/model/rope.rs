//! Rotary position embedding: frequencies with their scalings, and the rotation.

use std::f64::consts::PI;

/// How long-context models stretch the frequencies.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum RopeScaling {
    /// As trained.
    None,
    /// Positions divided by `factor`.
    Linear { factor: f64 },
    /// Low frequencies divided by `factor`, high ones kept, between them a blend.
    Llama3 { factor: f64, low_freq_factor: f64, high_freq_factor: f64, original_max_len: f64 },
    /// The same idea over dimensions, with a factor on cos and sin.
    Yarn {
        factor: f64,
        beta_fast: f64,
        beta_slow: f64,
        original_max_len: f64,
        attention_factor: f64,
        truncate: bool,
    },
    /// Each frequency divided by its own factor (`rope_freqs.weight` of GGUF files).
    PerFrequency(Vec<f32>),
}

/// The rotation of one kind of layer.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Rope {
    /// `[rotary_dim / 2]`; elements `i` and `i + rotary_dim / 2` of a head turn by
    /// `position * inv_freq[i]`.
    inv_freq: Vec<f32>,
    /// Factor on cos and sin.
    scale: f32,
}

impl Rope {
    /// `rotary_dim` is even.
    pub(crate) fn new(theta: f64, rotary_dim: usize, scaling: &RopeScaling) -> Self {
        let half = rotary_dim / 2;
        let plain: Vec<f64> = (0..half).map(|i| theta.powf(-((2 * i) as f64) / rotary_dim as f64)).collect();
        let mut scale = 1.0;
        let inv_freq: Vec<f64> = match scaling {
            RopeScaling::None => plain,
            RopeScaling::Linear { factor } => plain.iter().map(|freq| freq / factor).collect(),
            RopeScaling::PerFrequency(factors) => {
                plain.iter().zip(factors).map(|(freq, factor)| freq / f64::from(*factor)).collect()
            }
            RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_len } => plain
                .iter()
                .map(|freq| {
                    let wavelength = 2.0 * PI / freq;
                    let blend = (original_max_len / wavelength - low_freq_factor)
                        / (high_freq_factor - low_freq_factor);
                    let blend = blend.clamp(0.0, 1.0);
                    (1.0 - blend) * freq / factor + blend * freq
                })
                .collect(),
            RopeScaling::Yarn {
                factor,
                beta_fast,
                beta_slow,
                original_max_len,
                attention_factor,
                truncate,
            } => {
                scale = *attention_factor;
                let dim = rotary_dim as f64;
                // The dimension that makes `turns` turns over the original length.
                let dimension =
                    |turns: f64| dim * (original_max_len / (turns * 2.0 * PI)).ln() / (2.0 * theta.ln());
                let (mut low, mut high) = (dimension(*beta_fast), dimension(*beta_slow));
                if *truncate {
                    (low, high) = (low.floor(), high.ceil());
                }
                let (low, mut high) = (low.max(0.0), high.min(dim - 1.0));
                if low == high {
                    high += 0.001;
                }
                plain
                    .iter()
                    .enumerate()
                    .map(|(i, freq)| {
                        let stretched = ((i as f64 - low) / (high - low)).clamp(0.0, 1.0);
                        freq / factor * stretched + freq * (1.0 - stretched)
                    })
                    .collect()
            }
        };
        Rope { inv_freq: inv_freq.into_iter().map(|freq| freq as f32).collect(), scale: scale as f32 }
    }

    /// Frequencies, and the factor on cos and sin.
    #[cfg(test)]
    pub(crate) fn frequencies(&self) -> (&[f32], f32) {
        (&self.inv_freq, self.scale)
    }

    /// cos and sin of each row: `[rows, rotary_dim / 2]` pairs.
    pub(crate) fn angles(&self, positions: &[u32]) -> RopeAngles {
        let cos_sin = positions
            .iter()
            .flat_map(|position| {
                self.inv_freq.iter().map(|freq| {
                    let (sin, cos) = (*position as f32 * freq).sin_cos();
                    (cos * self.scale, sin * self.scale)
                })
            })
            .collect();
        RopeAngles { half: self.inv_freq.len(), cos_sin }
    }
}

/// The rotations of the rows of one step.
#[derive(Debug)]
pub(crate) struct RopeAngles {
    half: usize,
    cos_sin: Vec<(f32, f32)>,
}

impl RopeAngles {
    /// Turns one head of a row in place; elements past the rotary width stay.
    pub(crate) fn rotate(&self, row: usize, head: &mut [f32]) {
        let angles = &self.cos_sin[row * self.half..][..self.half];
        let (first, rest) = head.split_at_mut(self.half);
        for ((a, b), (cos, sin)) in first.iter_mut().zip(rest).zip(angles) {
            (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
        }
    }
}
