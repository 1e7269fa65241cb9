//! Prefill: new tokens attend to packed rows before them and to each other's raw keys and values.

use std::ops::Range;

use super::{
    AttentionError, AttentionParams, BLOCK_TOKENS, Cpu, Pages, PrefillChunk, Shape,
    block::{Block, BlockRow, tiles},
    check_length, check_table,
    kernels::{self, ScoreScale},
    queries::Queries,
    softmax::State,
    visible,
    work::for_each_unit,
};
use crate::rows::Isa;

/// Query rows that go through a block together.
const CHUNK_ROWS: usize = 12;
/// Query rows of a unit of work, at most; one token's heads may be more.
const UNIT_ROWS: usize = 192;

impl Cpu<'_> {
    /// Attention of new tokens at the positions from `context_len` on, each to the packed rows before
    /// `context_len` and to the raw keys and values of the chunk up to its own. `out` is
    /// `[num_tokens, num_qo_heads, value_head_dim]`.
    ///
    /// # Errors
    /// Lengths that do not fit, and a block table that does not lead every visible position to a page.
    pub fn prefill(
        &self,
        pages: Pages<'_>,
        params: &AttentionParams<'_>,
        chunk: &PrefillChunk<'_>,
        out: &mut [f32],
    ) -> Result<(), AttentionError> {
        let shape = Shape::new(pages, params)?;
        let query_width = shape.num_qo_heads * shape.key_head_dim;
        let tokens = chunk.queries.len() / query_width;
        check_length("queries", tokens * query_width, chunk.queries.len())?;
        check_length("keys", tokens * shape.num_kv_heads * shape.key_head_dim, chunk.keys.len())?;
        check_length("values", tokens * shape.num_kv_heads * shape.value_head_dim, chunk.values.len())?;
        check_length("out", tokens * shape.num_qo_heads * shape.value_head_dim, out.len())?;
        if tokens == 0 {
            return Ok(());
        }
        let context = chunk.context_len;
        let seen = visible(params.window, context.saturating_add(1)).start.min(context)..context;
        check_table(0, chunk.block_table, seen, pages.codec.page_size(), shape.num_pages)?;

        let Shape { num_kv_heads, gqa_group, value_head_dim, .. } = shape;
        let fair = (tokens * num_kv_heads).div_ceil(4 * self.exec.threads());
        let unit_tokens = fair.min(UNIT_ROWS / gqa_group).max(1);
        let mut units: Vec<Unit<'_>> = Vec::new();
        for first in (0..tokens).step_by(unit_tokens) {
            let tokens = first..tokens.min(first + unit_tokens);
            units.extend((0..num_kv_heads).map(|head| Unit {
                head,
                tokens: tokens.clone(),
                out: Vec::new(),
            }));
        }
        for (i, out) in out.chunks_exact_mut(gqa_group * value_head_dim).enumerate() {
            let (token, head) = (i / num_kv_heads, i % num_kv_heads);
            units[token / unit_tokens * num_kv_heads + head].out.push(out);
        }
        // Later tokens see more: begin with the longest units.
        let units = units.into_iter().rev();
        let call = Call { isa: self.isa, pages, params, shape, chunk, scale: ScoreScale::new(params) };
        let scratch = || call.scratch(unit_tokens * gqa_group);
        for_each_unit(self.exec, units, scratch, |scratch, unit| call.unit(scratch, unit));
        Ok(())
    }
}

/// Consecutive tokens of the chunk at one KV head.
struct Unit<'a> {
    head: usize,
    tokens: Range<usize>,
    /// One `[gqa_group, value_head_dim]` per token.
    out: Vec<&'a mut [f32]>,
}

/// A prefill, checked.
struct Call<'a> {
    isa: Isa,
    pages: Pages<'a>,
    params: &'a AttentionParams<'a>,
    shape: Shape,
    chunk: &'a PrefillChunk<'a>,
    scale: ScoreScale,
}

impl Call<'_> {
    fn unit(&self, scratch: &mut Scratch, unit: Unit<'_>) {
        let Shape { num_qo_heads, num_kv_heads, gqa_group, key_head_dim, value_head_dim, .. } = self.shape;
        let rows = unit.tokens.len() * gqa_group;
        let Scratch { queries, packed, raw, chunk, state } = scratch;
        let mut state = State::over(&mut state[..State::len(rows, value_head_dim)], rows);
        state.clear();
        let context = self.chunk.context_len;
        let width = gqa_group * key_head_dim;
        let load = |queries: &mut Queries| {
            for (token, query) in unit.tokens.clone().zip(queries.floats.chunks_exact_mut(width)) {
                let at = (token * num_qo_heads + unit.head * gqa_group) * key_head_dim;
                query.copy_from_slice(&self.chunk.queries[at..at + width]);
            }
        };
        let seen_by =
            |row: usize| visible(self.params.window, context + unit.tokens.start + row / gqa_group + 1);

        load(queries);
        queries.meet_packed(self.isa, self.pages.codec, rows);
        let seen = seen_by(0).start.min(context)..context;
        for start in (seen.start / BLOCK_TOKENS * BLOCK_TOKENS..context).step_by(BLOCK_TOKENS) {
            let tiles = tiles(self.pages, self.chunk.block_table, unit.head, start, &seen);
            packed.fill_keys(self.isa, self.pages.codec, &tiles);
            packed.fill_values(self.isa, self.pages.codec, &tiles, within_block(start, seen.clone()));
            self.attend(queries, packed, chunk, &mut state, |row| {
                within_block(start, seen_by(row).start..context)
            });
        }

        load(queries);
        let first = seen.end.max(seen_by(0).start) - context;
        for start in (first / BLOCK_TOKENS * BLOCK_TOKENS..unit.tokens.end).step_by(BLOCK_TOKENS) {
            raw.fill_raw(BLOCK_TOKENS.min(unit.tokens.end - start), |token| {
                let row = (start + token) * num_kv_heads + unit.head;
                let key = &self.chunk.keys[row * key_head_dim..][..key_head_dim];
                (key, &self.chunk.values[row * value_head_dim..][..value_head_dim])
            });
            self.attend(queries, raw, chunk, &mut state, |row| within_block(context + start, seen_by(row)));
        }

        let head = unit.head * gqa_group;
        let sinks = self.params.sinks.map(|sinks| &sinks[head..head + gqa_group]);
        for (i, out) in unit.out.into_iter().enumerate() {
            let rows = i * gqa_group..(i + 1) * gqa_group;
            let acc = &mut state.acc[rows.start * value_head_dim..rows.end * value_head_dim];
            State { max: &mut state.max[rows.clone()], sum: &mut state.sum[rows], acc }
                .finish(sinks, out, None);
        }
    }

    /// All rows of a unit (of `state`) against a block. `seen` gives the tokens of the block that a row
    /// sees.
    fn attend(
        &self,
        queries: &Queries,
        block: &Block,
        scratch: &mut Chunk,
        state: &mut State<'_>,
        seen: impl Fn(usize) -> Range<usize>,
    ) {
        let (all, width) = (state.max.len(), self.shape.value_head_dim);
        let mut finite = None;
        for first in (0..all).step_by(CHUNK_ROWS) {
            let rows = first..all.min(first + CHUNK_ROWS);
            let len = rows.len();
            let seen: [Range<usize>; CHUNK_ROWS] = std::array::from_fn(|r| seen(first + r.min(len - 1)));
            let columns = union(&seen);
            if columns.is_empty() {
                continue;
            }
            let (scores, corrections) = (&mut scratch.scores[..len], &mut scratch.corrections[..len]);
            kernels::scores(self.isa, queries.rows(rows.clone()), block, columns.clone(), scores);
            for (r, scores) in scores.iter_mut().enumerate() {
                let (max, sum) = (&mut state.max[first + r], &mut state.sum[first + r]);
                let seen = seen[r].clone();
                corrections[r] =
                    kernels::softmax_step(self.isa, scores, &block.factors, seen, self.scale, max, sum);
            }
            let acc = &mut state.acc[rows.start * width..rows.end * width];
            if seen.iter().all(|s| *s == columns) || *finite.get_or_insert_with(|| block.values_are_finite())
            {
                kernels::accumulate(self.isa, scores, columns, block, corrections, acc);
            } else {
                // A weight of 0 does not hide a NaN that another row of the chunk sees.
                for (r, acc) in acc.chunks_exact_mut(width).enumerate() {
                    let (scores, correction) = (&scores[r..=r], &corrections[r..=r]);
                    kernels::accumulate(self.isa, scores, seen[r].clone(), block, correction, acc);
                }
            }
        }
    }

    fn scratch(&self, rows: usize) -> Scratch {
        let Shape { key_head_dim, value_head_dim, .. } = self.shape;
        let packed = Block::packed(self.isa, self.pages.codec);
        Scratch {
            queries: Queries::new(rows, key_head_dim, &packed),
            packed,
            raw: Block::wide(key_head_dim, value_head_dim),
            chunk: Chunk {
                scores: [BlockRow([0.0; BLOCK_TOKENS]); CHUNK_ROWS],
                corrections: [0.0; CHUNK_ROWS],
            },
            state: vec![0.0; State::len(rows, value_head_dim)],
        }
    }
}

/// The part of `positions` that lies in the block from `start` on, counted from its start.
fn within_block(start: usize, positions: Range<usize>) -> Range<usize> {
    let local = |position: usize| position.saturating_sub(start).min(BLOCK_TOKENS);
    let end = local(positions.end);
    local(positions.start).min(end)..end
}

/// The smallest range that covers the non-empty ones of `ranges`.
fn union(ranges: &[Range<usize>]) -> Range<usize> {
    ranges.iter().filter(|range| !range.is_empty()).fold(0..0, |all, range| {
        if all.is_empty() { range.clone() } else { all.start.min(range.start)..all.end.max(range.end) }
    })
}

/// What a thread needs.
struct Scratch {
    /// As many rows as the largest unit.
    queries: Queries,
    packed: Block,
    raw: Block,
    chunk: Chunk,
    /// A [`State`] of the unit's rows.
    state: Vec<f32>,
}

struct Chunk {
    scores: [BlockRow; CHUNK_ROWS],
    corrections: [f32; CHUNK_ROWS],
}
