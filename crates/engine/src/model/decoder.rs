//! The decoder that all supported families are instances of.

use std::sync::Arc;

use candle_core::{Device, Tensor};

use super::attention::AttentionBlock;
use super::families::Source;
use super::mlp::Mlp;
use super::names::{LayerTensor, Names};
use super::norm::RmsNorm;
use super::rope::Rope;
use super::rows::{add, for_each_row, soft_cap};
use super::spec::{DecoderSpec, LayerSpec};
use super::{AttentionBackend, LayerAttention};
use crate::batch::StepBatch;
use crate::error::{EngineError, LoadError};
use crate::weights::Loader;
use crate::weights::blocks::{Matrix, Part};
use crate::weights::linear::{Linear, with_values};

#[derive(Debug)]
pub(crate) struct Decoder {
    /// `[vocab, hidden]`
    embedding: Arc<Matrix>,
    embed_scale: Option<f32>,
    ropes: Vec<Rope>,
    layers: Vec<Layer>,
    norm: RmsNorm,
    /// `[vocab, hidden]`, the embedding itself when tied.
    head: Linear,
    logits_soft_cap: Option<f32>,
}

#[derive(Debug)]
struct Layer {
    attention_norm: RmsNorm,
    attention: AttentionBlock,
    post_attention_norm: Option<RmsNorm>,
    mlp_norm: RmsNorm,
    mlp: Mlp,
    post_mlp_norm: Option<RmsNorm>,
    /// Largest L2 norm over the KV heads.
    key_bias_norm: Option<f32>,
}

impl Decoder {
    pub(crate) fn load(loader: &mut Loader<'_>, source: &Source) -> Result<Self, LoadError> {
        let (spec, names) = (&source.spec, &source.names);
        let embedding_name = names.embedding();
        let embedding =
            Arc::new(one(loader.stack(&[Part::new(&embedding_name, spec.vocab_size)], spec.hidden_size)?));
        let head = if spec.tied {
            Arc::clone(&embedding)
        } else {
            Arc::new(one(loader.stack(&[Part::new(&names.head(), spec.vocab_size)], spec.hidden_size)?))
        };
        let layers = (spec.layers.iter().enumerate())
            .map(|(index, layer)| load_layer(loader, spec, layer, names, index))
            .collect::<Result<_, _>>()?;
        Ok(Decoder {
            embedding,
            embed_scale: spec.embed_scale,
            ropes: spec.ropes.clone(),
            layers,
            norm: load_norm(loader, spec, &names.final_norm(), spec.hidden_size)?,
            head: Linear::new(vec![head], None),
            logits_soft_cap: spec.logits_soft_cap,
        })
    }

    pub(crate) fn key_bias_norms(&self) -> Vec<Option<f32>> {
        self.layers.iter().map(|layer| layer.key_bias_norm).collect()
    }

    /// The batch is checked.
    pub(crate) fn forward(
        &self,
        batch: &StepBatch,
        backend: &mut dyn AttentionBackend,
    ) -> Result<Tensor, EngineError> {
        let angles: Vec<_> = self.ropes.iter().map(|rope| rope.angles(&batch.positions)).collect();
        let mut x = self.embed(&batch.token_ids)?;
        for (index, layer) in self.layers.iter().enumerate() {
            let normed = layer.attention_norm.forward(&x)?;
            let mut y = layer.attention.forward(index, &normed, &angles, backend)?;
            if let Some(norm) = &layer.post_attention_norm {
                y = norm.forward(&y)?;
            }
            x = add(&x, &y)?;
            let mut y = layer.mlp.forward(&layer.mlp_norm.forward(&x)?)?;
            if let Some(norm) = &layer.post_mlp_norm {
                y = norm.forward(&y)?;
            }
            x = add(&x, &y)?;
        }
        let x = take_rows(&x, &batch.logits_rows)?;
        let logits = self.head.forward(&self.norm.forward(&x)?)?;
        Ok(match self.logits_soft_cap {
            Some(cap) => soft_cap(&logits, cap)?,
            None => logits,
        })
    }

    /// `[rows, hidden]`
    fn embed(&self, token_ids: &[u32]) -> candle_core::Result<Tensor> {
        let width = self.embedding.cols;
        let mut out = vec![0f32; token_ids.len() * width];
        for_each_row(&mut out, width, |row, out| {
            self.embedding.dequantize_rows(token_ids[row] as usize, out);
            if let Some(scale) = self.embed_scale {
                out.iter_mut().for_each(|x| *x *= scale);
            }
        });
        Tensor::from_vec(out, (token_ids.len(), width), &Device::Cpu)
    }
}

/// Rows of `x` in the given order.
fn take_rows(x: &Tensor, rows: &[u32]) -> candle_core::Result<Tensor> {
    let width = x.dim(1)?;
    let out = with_values(x, |x| {
        rows.iter().flat_map(|row| &x[*row as usize * width..][..width]).copied().collect::<Vec<_>>()
    })?;
    Tensor::from_vec(out, (rows.len(), width), x.device())
}

/// A stack of one part is one matrix.
fn one(mut matrices: Vec<Matrix>) -> Matrix {
    matrices.swap_remove(0)
}

fn load_norm(
    loader: &mut Loader<'_>,
    spec: &DecoderSpec,
    name: &str,
    width: usize,
) -> Result<RmsNorm, LoadError> {
    let mut weight = loader.vector(name, width)?;
    if spec.norm_minus_one {
        weight.iter_mut().for_each(|w| *w += 1.0);
    }
    Ok(RmsNorm { weight, eps: spec.norm_eps })
}

fn load_layer(
    loader: &mut Loader<'_>,
    spec: &DecoderSpec,
    layer: &LayerSpec,
    names: &Names,
    index: usize,
) -> Result<Layer, LoadError> {
    use LayerTensor::*;
    let hidden = spec.hidden_size;
    let attention = layer.attention;
    let norm =
        |loader: &mut Loader<'_>, tensor, width| load_norm(loader, spec, &names.weight(index, tensor), width);
    let optional_norm = |loader: &mut Loader<'_>, wanted: bool, tensor, width| {
        wanted.then(|| norm(loader, tensor, width)).transpose()
    };
    let q_rows = attention.num_qo_heads * attention.key_head_dim;
    let k_rows = attention.num_kv_heads * attention.key_head_dim;
    let v_rows = attention.num_kv_heads * attention.value_head_dim;
    let out_cols = attention.num_qo_heads * attention.value_head_dim;
    let interleaved = |heads| names.interleaved_heads().then_some(heads);
    let qkv_parts: &[(LayerTensor, usize, Option<usize>)] = if spec.fused {
        &[(Qkv, q_rows + k_rows + v_rows, None)]
    } else {
        &[
            (Query, q_rows, interleaved(attention.num_qo_heads)),
            (Key, k_rows, interleaved(attention.num_kv_heads)),
            (Value, v_rows, None),
        ]
    };
    let gate_up_parts: &[(LayerTensor, usize, Option<usize>)] = if spec.fused {
        &[(GateUp, 2 * spec.intermediate_size, None)]
    } else {
        &[(Gate, spec.intermediate_size, None), (Up, spec.intermediate_size, None)]
    };
    let linear = |loader: &mut Loader<'_>, parts: &[(LayerTensor, usize, Option<usize>)], cols, bias| {
        load_linear(loader, names, index, parts, cols, bias)
    };
    let attention_norm = norm(loader, AttentionNorm, hidden)?;
    let (qkv, qkv_bias) = linear(loader, qkv_parts, hidden, spec.qkv_bias)?;
    let key_bias = qkv_bias.as_ref().map(|bias| &bias[q_rows..q_rows + k_rows]);
    let key_bias_norm = key_bias.map(|bias| {
        bias.chunks_exact(attention.key_head_dim)
            .map(|head| head.iter().map(|b| b * b).sum::<f32>().sqrt())
            .fold(0.0, f32::max)
    });
    let (out, out_bias) = linear(loader, &[(Output, hidden, None)], out_cols, spec.out_bias)?;
    let block = AttentionBlock {
        qkv: Linear::new(qkv, qkv_bias),
        out: Linear::new(out, out_bias),
        q_norm: optional_norm(loader, spec.qk_norm, QueryNorm, attention.key_head_dim)?,
        k_norm: optional_norm(loader, spec.qk_norm, KeyNorm, attention.key_head_dim)?,
        rope: layer.rope,
        params: LayerAttention {
            num_qo_heads: attention.num_qo_heads,
            num_kv_heads: attention.num_kv_heads,
            key_head_dim: attention.key_head_dim,
            value_head_dim: attention.value_head_dim,
            sm_scale: spec.sm_scale,
            window: attention.window,
            soft_cap: spec.attention_soft_cap,
            sinks: None,
        },
    };
    let post_attention_norm = optional_norm(loader, spec.post_norms, PostAttentionNorm, hidden)?;
    let mlp_norm = norm(loader, MlpNorm, hidden)?;
    let (gate_up, gate_up_bias) = linear(loader, gate_up_parts, hidden, spec.mlp_bias)?;
    let (down, down_bias) = linear(loader, &[(Down, hidden, None)], spec.intermediate_size, spec.mlp_bias)?;
    Ok(Layer {
        attention_norm,
        attention: block,
        post_attention_norm,
        mlp_norm,
        mlp: Mlp {
            gate_up: Linear::new(gate_up, gate_up_bias),
            down: Linear::new(down, down_bias),
            activation: spec.activation,
        },
        post_mlp_norm: optional_norm(loader, spec.post_norms, PostMlpNorm, hidden)?,
        key_bias_norm,
    })
}

/// Matrices and, if there is one, the bias of the stacked `parts`: tensor, rows, heads whose rows are
/// interleaved.
#[expect(clippy::type_complexity, reason = "taken apart at once")]
fn load_linear(
    loader: &mut Loader<'_>,
    names: &Names,
    layer: usize,
    parts: &[(LayerTensor, usize, Option<usize>)],
    cols: usize,
    has_bias: bool,
) -> Result<(Vec<Arc<Matrix>>, Option<Vec<f32>>), LoadError> {
    let weights: Vec<String> = parts.iter().map(|(tensor, ..)| names.weight(layer, *tensor)).collect();
    let stacked: Vec<Part<'_>> = parts
        .iter()
        .zip(&weights)
        .map(|((_, rows, heads), name)| Part { name, rows: *rows, interleaved_heads: *heads })
        .collect();
    let matrices = loader.stack(&stacked, cols)?.into_iter().map(Arc::new).collect();
    if !has_bias {
        return Ok((matrices, None));
    }
    let mut bias = Vec::new();
    for (tensor, rows, heads) in parts {
        let part = loader.vector(&names.bias(layer, *tensor), *rows)?;
        match heads {
            Some(heads) => {
                for head in part.chunks_exact(rows / heads) {
                    bias.extend(head.iter().step_by(2).chain(head.iter().skip(1).step_by(2)));
                }
            }
            None => bias.extend(part),
        }
    }
    Ok((matrices, Some(bias)))
}
