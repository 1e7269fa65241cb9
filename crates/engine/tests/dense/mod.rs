//! Attention as the textbook has it: dense, in f64, one sequence, nothing packed.

use candle_core::{Device, Tensor};
use turboquant_engine::error::EngineError;
use turboquant_engine::model::{AttentionBackend, LayerAttention};

/// Keys and values of one sequence; rows of a step follow those of the steps before.
#[derive(Default)]
pub(crate) struct DenseAttention {
    layers: Vec<Layer>,
}

/// `[tokens][num_kv_heads * head_dim]`
#[derive(Default)]
struct Layer {
    keys: Vec<Vec<f32>>,
    values: Vec<Vec<f32>>,
}

impl AttentionBackend for DenseAttention {
    fn attend(
        &mut self,
        layer: usize,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        params: &LayerAttention,
    ) -> Result<Tensor, EngineError> {
        let (rows, heads, key_dim) = q.dims3()?;
        let (_, kv_heads, value_dim) = v.dims3()?;
        assert_eq!(k.dims(), [rows, kv_heads, key_dim]);
        assert_eq!((heads, kv_heads), (params.num_qo_heads, params.num_kv_heads));
        assert_eq!((key_dim, value_dim), (params.key_head_dim, params.value_head_dim));
        self.layers.resize_with(self.layers.len().max(layer + 1), Default::default);
        let Layer { keys, values } = &mut self.layers[layer];
        let start = keys.len();
        keys.extend(k.flatten_from(1)?.to_vec2::<f32>()?);
        values.extend(v.flatten_from(1)?.to_vec2::<f32>()?);
        let q = q.to_vec3::<f32>()?;
        let mut out = Vec::with_capacity(rows * heads * value_dim);
        for (row, q) in q.iter().enumerate() {
            let end = start + row + 1;
            let begin = params.window.map_or(0, |window| end.saturating_sub(window));
            for (head, q) in q.iter().enumerate() {
                let kv_head = head / (heads / kv_heads);
                let mut scores: Vec<f64> = keys[begin..end]
                    .iter()
                    .map(|k| {
                        let k = &k[kv_head * key_dim..][..key_dim];
                        let dot: f64 = q.iter().zip(k).map(|(q, k)| f64::from(*q) * f64::from(*k)).sum();
                        let score = dot * f64::from(params.sm_scale);
                        params.soft_cap.map_or(score, |cap| f64::from(cap) * (score / f64::from(cap)).tanh())
                    })
                    .collect();
                let sink = params.sinks.as_ref().map(|sinks| f64::from(sinks[head]));
                let max = scores.iter().copied().chain(sink).fold(f64::NEG_INFINITY, f64::max);
                scores.iter_mut().for_each(|score| *score = (*score - max).exp());
                let sum: f64 = scores.iter().sum::<f64>() + sink.map_or(0.0, |sink| (sink - max).exp());
                for i in 0..value_dim {
                    let weighted = scores
                        .iter()
                        .zip(&values[begin..end])
                        .map(|(p, v)| p * f64::from(v[kv_head * value_dim + i]));
                    out.push((weighted.sum::<f64>() / sum) as f32);
                }
            }
        }
        Ok(Tensor::from_vec(out, (rows, heads, value_dim), &Device::Cpu)?)
    }
}
