//! Hyper-parameters of a decoder, whatever file they come from.

use super::mlp::Activation;
use super::rope::Rope;
use crate::config::AttentionSpec;

/// All that the families differ in.
#[derive(Debug)]
pub(crate) struct DecoderSpec {
    pub(crate) hidden_size: usize,
    pub(crate) intermediate_size: usize,
    pub(crate) vocab_size: usize,
    pub(crate) norm_eps: f32,
    /// Norm weights are stored minus one.
    pub(crate) norm_minus_one: bool,
    pub(crate) activation: Activation,
    /// Factor on the embeddings.
    pub(crate) embed_scale: Option<f32>,
    /// The output head is the embedding matrix.
    pub(crate) tied: bool,
    /// Biases on queries, keys and values.
    pub(crate) qkv_bias: bool,
    /// Bias on the output projection.
    pub(crate) out_bias: bool,
    /// Biases of the feed-forward block.
    pub(crate) mlp_bias: bool,
    /// Queries, keys and values are one tensor, gate and up another.
    pub(crate) fused: bool,
    /// RMS norm over each query and key head.
    pub(crate) qk_norm: bool,
    /// Norms also behind the attention and the feed-forward block, before they are added.
    pub(crate) post_norms: bool,
    /// Factor on the scores.
    pub(crate) sm_scale: f32,
    /// Soft cap of the scores.
    pub(crate) attention_soft_cap: Option<f32>,
    /// Soft cap of the logits.
    pub(crate) logits_soft_cap: Option<f32>,
    pub(crate) ropes: Vec<Rope>,
    pub(crate) layers: Vec<LayerSpec>,
}

/// One layer.
#[derive(Debug)]
pub(crate) struct LayerSpec {
    pub(crate) attention: AttentionSpec,
    /// Index into [`DecoderSpec::ropes`].
    pub(crate) rope: usize,
}

impl DecoderSpec {
    /// Llama: what a family does not say otherwise.
    pub(crate) fn plain(
        hidden_size: usize,
        intermediate_size: usize,
        vocab_size: usize,
        norm_eps: f32,
        ropes: Vec<Rope>,
        layers: Vec<LayerSpec>,
    ) -> Self {
        let head_dim = layers.first().map_or(1, |layer| layer.attention.key_head_dim);
        DecoderSpec {
            hidden_size,
            intermediate_size,
            vocab_size,
            norm_eps,
            norm_minus_one: false,
            activation: Activation::Silu,
            embed_scale: None,
            tied: false,
            qkv_bias: false,
            out_bias: false,
            mlp_bias: false,
            fused: false,
            qk_norm: false,
            post_norms: false,
            sm_scale: 1.0 / (head_dim as f32).sqrt(),
            attention_soft_cap: None,
            logits_soft_cap: None,
            ropes,
            layers,
        }
    }
}
