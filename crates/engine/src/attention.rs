//! Attention of one step over the cache: stores the step's keys and values, then lets every row
//! attend as its phase says.

use std::ops::Range;

use candle_core::Tensor;
use turboquant::{
    attention::{AttentionParams, Cpu, DecodeRow, Pages, PagesMut, PrefillChunk},
    exec::Executor,
};

use crate::{
    batch::{PREFILL_BLOCK, Phase, Segment, StepBatch},
    cache::{KvCache, PagedLayer},
    error::EngineError,
    model::{AttentionBackend, LayerAttention},
    weights::linear::with_values,
};

/// The attention of one step.
pub struct PagedAttention<'a> {
    cache: &'a mut KvCache,
    batch: &'a StepBatch,
    cpu: Cpu<'a>,
    abandoned: &'a dyn Fn() -> bool,
}

impl<'a> PagedAttention<'a> {
    /// For the rows of `batch`, on the threads of `exec`.
    pub fn new(cache: &'a mut KvCache, batch: &'a StepBatch, exec: &'a dyn Executor) -> Self {
        Self { cache, batch, cpu: Cpu::new(exec), abandoned: &|| false }
    }

    /// Refuses to attend once `abandoned`, which is asked at every layer.
    #[must_use]
    pub fn unless(self, abandoned: &'a dyn Fn() -> bool) -> Self {
        Self { abandoned, ..self }
    }
}

impl AttentionBackend for PagedAttention<'_> {
    fn attend(
        &mut self,
        layer: usize,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        params: &LayerAttention,
    ) -> Result<Tensor, EngineError> {
        if (self.abandoned)() {
            return Err(EngineError::Abandoned);
        }
        let rows = self.batch.num_rows();
        let out = with_values(q, |q| {
            with_values(k, |k| with_values(v, |v| self.attend_values(layer, q, k, v, params)))
        })???;
        Ok(Tensor::from_vec(out?, (rows, params.num_qo_heads, params.value_head_dim), q.device())?)
    }
}

/// Queries, keys and values of a step, with their widths.
struct Rows<'a> {
    q: &'a [f32],
    k: &'a [f32],
    v: &'a [f32],
    q_width: usize,
    k_width: usize,
    v_width: usize,
}

impl PagedAttention<'_> {
    /// `[rows, num_qo_heads, value_head_dim]`
    fn attend_values(
        &mut self,
        layer: usize,
        q: &[f32],
        k: &[f32],
        v: &[f32],
        params: &LayerAttention,
    ) -> Result<Vec<f32>, EngineError> {
        let missing = || EngineError::Batch(format!("layer {layer} has no pages in the cache"));
        let failed = |source| EngineError::Attention { layer, source };
        let (owner, paged) = self.cache.owner(layer).ok_or_else(missing)?;
        check_shape(layer, paged, params)?;
        // A layer that shares the pages of another one finds its keys and values there.
        if owner == layer {
            let (paged, report) = self.cache.layer_mut(layer).ok_or_else(missing)?;
            let slots = self.batch.slot_mapping.get(paged.group).ok_or_else(missing)?;
            let (codec, slab) = paged.parts_mut();
            *report += self.cpu.store(PagesMut { codec, slab }, k, v, slots).map_err(failed)?;
        }
        let (_, paged) = self.cache.owner(layer).ok_or_else(missing)?;
        let pages = Pages { codec: &paged.codec, slab: paged.slab() };
        let attention = AttentionParams {
            num_qo_heads: params.num_qo_heads,
            sm_scale: params.sm_scale,
            window: params.window,
            soft_cap: params.soft_cap,
            sinks: params.sinks.as_deref(),
        };
        let rows = Rows {
            q,
            k,
            v,
            q_width: params.num_qo_heads * params.key_head_dim,
            k_width: params.num_kv_heads * params.key_head_dim,
            v_width: params.num_kv_heads * params.value_head_dim,
        };
        let out_width = params.num_qo_heads * params.value_head_dim;
        let mut out = vec![0f32; self.batch.num_rows() * out_width];
        let mut decode_rows = Vec::new();
        for run in runs(&self.batch.segments) {
            let range = run[0].rows.start..run[run.len() - 1].rows.end;
            let out = &mut out[range.start * out_width..range.end * out_width];
            match run[0].phase {
                Phase::Decode => {
                    decode_rows.clear();
                    for segment in run {
                        let block_table = &segment.block_tables[paged.group][..];
                        decode_rows.extend(segment.rows.clone().map(|row| DecodeRow {
                            block_table,
                            seq_len: self.batch.positions[row] as usize + 1,
                        }));
                    }
                    let queries = &q[range.start * rows.q_width..range.end * rows.q_width];
                    self.cpu.decode(pages, &attention, queries, &decode_rows, out, None).map_err(failed)?;
                }
                Phase::Prefill => {
                    let block_table = &run[0].block_tables[paged.group][..];
                    self.prefill(pages, &attention, &rows, range, block_table, out).map_err(failed)?;
                }
            }
        }
        Ok(out)
    }

    /// The rows of one prompt, block by block: raw within the block, packed before it.
    fn prefill(
        &self,
        pages: Pages<'_>,
        params: &AttentionParams<'_>,
        rows: &Rows<'_>,
        range: Range<usize>,
        block_table: &[i32],
        out: &mut [f32],
    ) -> Result<(), turboquant::attention::AttentionError> {
        let out_width = out.len() / range.len();
        for block in range.clone().step_by(PREFILL_BLOCK) {
            let block = block..(block + PREFILL_BLOCK).min(range.end);
            let chunk = PrefillChunk {
                queries: &rows.q[block.start * rows.q_width..block.end * rows.q_width],
                keys: &rows.k[block.start * rows.k_width..block.end * rows.k_width],
                values: &rows.v[block.start * rows.v_width..block.end * rows.v_width],
                block_table,
                context_len: self.batch.positions[block.start] as usize,
            };
            let out =
                &mut out[(block.start - range.start) * out_width..(block.end - range.start) * out_width];
            self.cpu.prefill(pages, params, &chunk, out)?;
        }
        Ok(())
    }
}

/// Decode segments that follow one another go together; prefill segments go alone.
fn runs(segments: &[Segment]) -> impl Iterator<Item = &[Segment]> {
    segments.chunk_by(|a, b| a.phase == Phase::Decode && b.phase == Phase::Decode)
}

fn check_shape(layer: usize, paged: &PagedLayer, params: &LayerAttention) -> Result<(), EngineError> {
    let rows = paged.codec.rows();
    let stored = (paged.codec.num_kv_heads(), rows.key_head_dim(), rows.value_head_dim());
    let given = (params.num_kv_heads, params.key_head_dim, params.value_head_dim);
    if stored == given {
        return Ok(());
    }
    Err(EngineError::Batch(format!(
        "layer {layer}: the cache stores (KV heads, key width, value width) {stored:?}, the model has {given:?}"
    )))
}

#[cfg(test)]
mod tests;
