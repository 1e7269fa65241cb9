//! Gated feed-forward block.

use candle_core::{Result, Tensor};

use super::rows::for_each_row;
use crate::weights::linear::{Linear, with_values};

/// On the gate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Activation {
    /// `x * sigmoid(x)`
    Silu,
    /// GELU by its tanh approximation.
    GeluTanh,
}

impl Activation {
    fn apply(self, x: f32) -> f32 {
        match self {
            Activation::Silu => x / (1.0 + (-x).exp()),
            Activation::GeluTanh => {
                const SQRT_2_OVER_PI: f32 = 0.797_884_6;
                0.5 * x * (1.0 + (SQRT_2_OVER_PI * (x + 0.044715 * x * x * x)).tanh())
            }
        }
    }
}

/// `down(activation(gate(x)) * up(x))`
#[derive(Debug)]
pub(crate) struct Mlp {
    /// Gate rows, then up rows.
    pub(crate) gate_up: Linear,
    pub(crate) down: Linear,
    pub(crate) activation: Activation,
}

impl Mlp {
    /// `[rows, hidden] -> [rows, hidden]`
    pub(crate) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let gate_up = self.gate_up.forward(x)?;
        let (rows, twice) = gate_up.dims2()?;
        let width = twice / 2;
        let mut out = vec![0f32; rows * width];
        with_values(&gate_up, |gate_up| {
            for_each_row(&mut out, width, |row, out| {
                let (gate, up) = gate_up[row * twice..][..twice].split_at(width);
                for ((y, gate), up) in out.iter_mut().zip(gate).zip(up) {
                    *y = self.activation.apply(*gate) * up;
                }
            });
        })?;
        self.down.forward(&Tensor::from_vec(out, (rows, width), x.device())?)
    }
}
