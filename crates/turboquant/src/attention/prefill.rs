//! Prefill: new tokens attend to packed rows before them and to each other's raw keys and values.

use std::ops::Range;

use super::{
    AttentionError, AttentionParams, BLOCK_TOKENS, Cpu, Pages, PrefillChunk, Shape,
    block::{Block, ScoreRow, tiles},
    check_length, check_table,
    kernels::{self, ScoreScale},
    softmax::State,
    visible,
    work::for_each_unit,
};
use crate::rows::Isa;

/// Query rows that go through a block together.
const CHUNK_ROWS: usize = 6;
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
        let scratch = || Scratch::new(&shape, unit_tokens * gqa_group);
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
        let Scratch { queries, block, chunk: scores, state } = scratch;
        let queries = &mut queries[..rows * key_head_dim];
        let mut state = State::over(&mut state[..State::len(rows, value_head_dim)], rows);
        state.clear();
        let context = self.chunk.context_len;
        let first_row = |token: usize| (token * num_qo_heads + unit.head * gqa_group) * key_head_dim;
        // Raw queries for the raw keys, rotated ones for the packed keys.
        let load = |queries: &mut [f32]| {
            for (token, queries) in
                unit.tokens.clone().zip(queries.chunks_exact_mut(gqa_group * key_head_dim))
            {
                queries.copy_from_slice(&self.chunk.queries[first_row(token)..][..gqa_group * key_head_dim]);
            }
        };
        let seen_by =
            |row: usize| visible(self.params.window, context + unit.tokens.start + row / gqa_group + 1);

        load(queries);
        for query in queries.chunks_exact_mut(key_head_dim) {
            self.pages.codec.rows().rotate_query(self.isa, query);
        }
        let packed = seen_by(0).start.min(context)..context;
        for start in (packed.start / BLOCK_TOKENS * BLOCK_TOKENS..context).step_by(BLOCK_TOKENS) {
            let tiles = tiles(self.pages, self.chunk.block_table, unit.head, start, &packed);
            block.widen_keys(self.isa, self.pages, &tiles);
            block.widen_values(self.isa, self.pages, &tiles, within_block(start, packed.clone()));
            self.attend(queries, block, scores, &mut state, |row| {
                within_block(start, seen_by(row).start..context)
            });
        }

        load(queries);
        let first = packed.end.max(seen_by(0).start) - context;
        for start in (first / BLOCK_TOKENS * BLOCK_TOKENS..unit.tokens.end).step_by(BLOCK_TOKENS) {
            block.copy_raw(BLOCK_TOKENS.min(unit.tokens.end - start), |token| {
                let row = (start + token) * num_kv_heads + unit.head;
                let key = &self.chunk.keys[row * key_head_dim..][..key_head_dim];
                (key, &self.chunk.values[row * value_head_dim..][..value_head_dim])
            });
            self.attend(queries, block, scores, &mut state, |row| {
                within_block(context + start, seen_by(row))
            });
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

    /// All rows of a unit against a block. `seen` gives the tokens of the block that a row sees.
    fn attend(
        &self,
        queries: &[f32],
        block: &Block,
        scratch: &mut Chunk,
        state: &mut State<'_>,
        seen: impl Fn(usize) -> Range<usize>,
    ) {
        let (key_width, width) = (self.shape.key_head_dim, self.shape.value_head_dim);
        let mut finite = None;
        for (i, queries) in queries.chunks(CHUNK_ROWS * key_width).enumerate() {
            let (first, rows) = (i * CHUNK_ROWS, queries.len() / key_width);
            let seen: [Range<usize>; CHUNK_ROWS] = std::array::from_fn(|r| seen(first + r.min(rows - 1)));
            let columns = union(&seen);
            if columns.is_empty() {
                continue;
            }
            let (scores, corrections) = (&mut scratch.scores[..rows], &mut scratch.corrections[..rows]);
            kernels::scores(self.isa, queries, &block.keys, &block.factors, scores);
            for (r, scores) in scores.iter_mut().enumerate() {
                let (max, sum) = (&mut state.max[first + r], &mut state.sum[first + r]);
                corrections[r] =
                    kernels::softmax_step(self.isa, scores, seen[r].clone(), self.scale, max, sum);
            }
            let acc = &mut state.acc[first * width..(first + rows) * width];
            if seen.iter().all(|s| *s == columns) || *finite.get_or_insert_with(|| block.values_are_finite())
            {
                kernels::accumulate(self.isa, scores, columns, &block.values, corrections, acc);
            } else {
                // A weight of 0 does not hide a NaN that another row of the chunk sees.
                for (r, acc) in acc.chunks_exact_mut(width).enumerate() {
                    let (scores, correction) = (&scores[r..=r], &corrections[r..=r]);
                    kernels::accumulate(self.isa, scores, seen[r].clone(), &block.values, correction, acc);
                }
            }
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
    /// `[unit rows, key_head_dim]`
    queries: Vec<f32>,
    block: Block,
    chunk: Chunk,
    /// A [`State`] of the unit's rows.
    state: Vec<f32>,
}

struct Chunk {
    scores: [ScoreRow; CHUNK_ROWS],
    corrections: [f32; CHUNK_ROWS],
}

impl Scratch {
    fn new(shape: &Shape, rows: usize) -> Scratch {
        Scratch {
            queries: vec![0.0; rows * shape.key_head_dim],
            block: Block::new(shape.key_head_dim, shape.value_head_dim),
            chunk: Chunk {
                scores: [ScoreRow([0.0; BLOCK_TOKENS]); CHUNK_ROWS],
                corrections: [0.0; CHUNK_ROWS],
            },
            state: vec![0.0; State::len(rows, shape.value_head_dim)],
        }
    }
}
