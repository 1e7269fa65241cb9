//! The attention block around the backend: projections, per-head norms, RoPE.

use candle_core::Tensor;

use super::norm::RmsNorm;
use super::rope::RopeAngles;
use super::rows::for_each_row;
use super::{AttentionBackend, LayerAttention};
use crate::error::EngineError;
use crate::weights::linear::{Linear, with_values};

/// Attention of one layer.
#[derive(Debug)]
pub(crate) struct AttentionBlock {
    /// Query rows, then key rows, then value rows.
    pub(crate) qkv: Linear,
    pub(crate) out: Linear,
    /// Over `key_head_dim` of each query head.
    pub(crate) q_norm: Option<RmsNorm>,
    /// Over `key_head_dim` of each key head.
    pub(crate) k_norm: Option<RmsNorm>,
    /// Index into the step's angles.
    pub(crate) rope: usize,
    pub(crate) params: LayerAttention,
}

impl AttentionBlock {
    /// `[rows, hidden] -> [rows, hidden]`
    pub(crate) fn forward(
        &self,
        layer: usize,
        x: &Tensor,
        angles: &[RopeAngles],
        backend: &mut dyn AttentionBackend,
    ) -> Result<Tensor, EngineError> {
        let params = &self.params;
        let (heads, kv_heads) = (params.num_qo_heads, params.num_kv_heads);
        let qkv = self.qkv.forward(x)?;
        let rows = qkv.dim(0)?;
        let angles = &angles[self.rope];
        let k_start = heads * params.key_head_dim;
        let v_start = k_start + kv_heads * params.key_head_dim;
        let q = take_heads(&qkv, 0, heads, params.key_head_dim, self.q_norm.as_ref(), Some(angles))?;
        let k = take_heads(&qkv, k_start, kv_heads, params.key_head_dim, self.k_norm.as_ref(), Some(angles))?;
        let v = take_heads(&qkv, v_start, kv_heads, params.value_head_dim, None, None)?;
        let attended = backend.attend(layer, &q, &k, &v, params)?;
        Ok(self.out.forward(&attended.reshape((rows, heads * params.value_head_dim))?)?)
    }
}

/// Columns `start..` of `qkv` as `[rows, heads, head_dim]`, normed and turned.
fn take_heads(
    qkv: &Tensor,
    start: usize,
    heads: usize,
    head_dim: usize,
    norm: Option<&RmsNorm>,
    angles: Option<&RopeAngles>,
) -> candle_core::Result<Tensor> {
    let (rows, stride) = qkv.dims2()?;
    let width = heads * head_dim;
    let mut out = vec![0f32; rows * width];
    with_values(qkv, |qkv| {
        for_each_row(&mut out, width, |row, out| {
            let source = &qkv[row * stride + start..][..width];
            for (source, head) in source.chunks_exact(head_dim).zip(out.chunks_exact_mut(head_dim)) {
                match norm {
                    Some(norm) => norm.row(source, head),
                    None => head.copy_from_slice(source),
                }
                if let Some(angles) = angles {
                    angles.rotate(row, head);
                }
            }
        });
    })?;
    Tensor::from_vec(out, (rows, heads, head_dim), qkv.device())
}
