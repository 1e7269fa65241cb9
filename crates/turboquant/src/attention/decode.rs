//! Decode: every query attends to packed rows only.

use std::{ops::Range, slice::ChunksExactMut};

use super::{
    AttentionError, AttentionParams, BLOCK_TOKENS, Cpu, DecodeRow, MAX_PARTIALS, Pages, SPLIT_TOKENS, Shape,
    block::{Block, BlockRow, tiles},
    check_length, check_table,
    kernels::{self, ScoreScale},
    queries::Queries,
    softmax::State,
    visible,
    work::for_each_unit,
};
use crate::rows::Isa;

impl Cpu<'_> {
    /// Attention of single query tokens; several may belong to one sequence. `queries` is
    /// `[rows, num_qo_heads, key_head_dim]`, as the model makes them (not rotated); `out`
    /// `[rows, num_qo_heads, value_head_dim]`; `lse`, if wanted, `[rows, num_qo_heads]`.
    ///
    /// # Errors
    /// Lengths that do not fit, and block tables that do not lead every visible position to a page.
    pub fn decode(
        &self,
        pages: Pages<'_>,
        params: &AttentionParams<'_>,
        queries: &[f32],
        rows: &[DecodeRow<'_>],
        out: &mut [f32],
        lse: Option<&mut [f32]>,
    ) -> Result<(), AttentionError> {
        let shape = Shape::new(pages, params)?;
        let heads = rows.len() * shape.num_qo_heads;
        check_length("queries", heads * shape.key_head_dim, queries.len())?;
        check_length("out", heads * shape.value_head_dim, out.len())?;
        if let Some(lse) = &lse {
            check_length("lse", heads, lse.len())?;
        }
        for (i, row) in rows.iter().enumerate() {
            let range = visible(params.window, row.seq_len);
            check_table(i, row.block_table, range, pages.codec.page_size(), shape.num_pages)?;
        }
        let call =
            Call { isa: self.isa, pages, params, shape, queries, rows, scale: ScoreScale::new(params) };
        let mut no_lse = Vec::new();
        let lse = match lse {
            Some(lse) => lse,
            None => {
                no_lse.resize(heads, 0.0);
                &mut no_lse
            }
        };
        let group = shape.gqa_group;
        let outputs = Outputs {
            out: out.chunks_exact_mut(group * shape.value_head_dim),
            lse: lse.chunks_exact_mut(group),
            next: 0,
        };
        // By head, the longest row must leave room to balance: at most half of a thread's share.
        let tokens = |row: &DecodeRow<'_>| visible(params.window, row.seq_len).len();
        let longest = rows.iter().map(tokens).max().unwrap_or(0);
        let all = rows.iter().map(tokens).sum::<usize>() * shape.num_kv_heads;
        let threads = self.exec.threads();
        if threads == 1 || longest * threads * 2 <= all {
            call.by_head(self, outputs);
        } else {
            call.by_split(self, outputs);
        }
        Ok(())
    }
}

/// A decode, checked.
struct Call<'a> {
    isa: Isa,
    pages: Pages<'a>,
    params: &'a AttentionParams<'a>,
    shape: Shape,
    queries: &'a [f32],
    rows: &'a [DecodeRow<'a>],
    scale: ScoreScale,
}

/// The query heads that share a KV head, in one row.
struct HeadGroup<'a> {
    /// `row * num_kv_heads + head`
    index: usize,
    /// `[gqa_group, value_head_dim]`
    out: &'a mut [f32],
    /// `[gqa_group]`
    lse: &'a mut [f32],
}

struct Outputs<'a> {
    out: ChunksExactMut<'a, f32>,
    lse: ChunksExactMut<'a, f32>,
    next: usize,
}

impl<'a> Iterator for Outputs<'a> {
    type Item = HeadGroup<'a>;
    fn next(&mut self) -> Option<HeadGroup<'a>> {
        let (out, lse) = (self.out.next()?, self.lse.next()?);
        self.next += 1;
        Some(HeadGroup { index: self.next - 1, out, lse })
    }
    fn size_hint(&self) -> (usize, Option<usize>) {
        self.out.size_hint()
    }
}

impl ExactSizeIterator for Outputs<'_> {}

impl Call<'_> {
    /// Enough rows for all threads: each head group from its first to its last split on one thread.
    fn by_head(&self, cpu: &Cpu<'_>, outputs: Outputs<'_>) {
        let len = State::len(self.shape.gqa_group, self.shape.value_head_dim);
        let scratch = || (self.scratch(), vec![0.0; len], vec![0.0; len]);
        for_each_unit(cpu.exec, outputs, scratch, |(scratch, whole, part), unit: HeadGroup<'_>| {
            let mut whole = State::over(whole, self.shape.gqa_group);
            whole.clear();
            for split in self.splits(unit.index) {
                let mut part = State::over(part, self.shape.gqa_group);
                self.split(scratch, unit.index, split, &mut part);
                whole.merge(&part);
            }
            self.finish(unit, &whole);
        });
    }

    /// Few rows: the threads share the splits of each head group. Rounds keep the number of partial
    /// states bounded; they are merged in order of position, as [`Call::by_head`] does.
    fn by_split(&self, cpu: &Cpu<'_>, outputs: Outputs<'_>) {
        let group = self.shape.gqa_group;
        let len = State::len(group, self.shape.value_head_dim);
        let mut partials = vec![0.0; MAX_PARTIALS.max(8 * cpu.exec.threads()) * len];
        let mut whole = vec![0.0; len];
        let mut whole = State::over(&mut whole, group);
        let groups = outputs.len();
        let mut pending =
            (0..groups).flat_map(|index| self.splits(index).map(move |split| (index, split))).peekable();
        let mut outputs = outputs;
        let mut current = outputs.next();
        whole.clear();
        loop {
            let round: Vec<_> = pending.by_ref().take(partials.len() / len).collect();
            let units = round.iter().cloned().zip(partials.chunks_exact_mut(len));
            for_each_unit(
                cpu.exec,
                units,
                || self.scratch(),
                |scratch, ((index, split), part)| {
                    self.split(scratch, index, split, &mut State::over(part, group));
                },
            );
            for ((index, _), part) in round.iter().zip(partials.chunks_exact_mut(len)) {
                while let Some(unit) = current.take_if(|unit| unit.index < *index) {
                    self.finish(unit, &whole);
                    whole.clear();
                    current = outputs.next();
                }
                whole.merge(&State::over(part, group));
            }
            if pending.peek().is_none() {
                break;
            }
        }
        while let Some(unit) = current {
            self.finish(unit, &whole);
            whole.clear();
            current = outputs.next();
        }
    }

    /// The visible positions of a head group, cut at multiples of [`SPLIT_TOKENS`].
    fn splits(&self, index: usize) -> impl Iterator<Item = Range<usize>> + Send + use<> {
        let visible = visible(self.params.window, self.rows[index / self.shape.num_kv_heads].seq_len);
        let splits = visible.start / SPLIT_TOKENS..visible.end.div_ceil(SPLIT_TOKENS);
        splits.map(move |split| {
            (split * SPLIT_TOKENS).max(visible.start)..((split + 1) * SPLIT_TOKENS).min(visible.end)
        })
    }

    /// Attention of a head group to the positions `range`.
    fn split(&self, scratch: &mut Scratch, index: usize, range: Range<usize>, state: &mut State<'_>) {
        let Shape { num_kv_heads, gqa_group, key_head_dim, .. } = self.shape;
        let (row, head) = (index / num_kv_heads, index % num_kv_heads);
        state.clear();
        let Scratch { queries, block, scores, corrections } = scratch;
        let width = gqa_group * key_head_dim;
        queries.floats.copy_from_slice(&self.queries[index * width..][..width]);
        queries.meet_packed(self.isa, self.pages.codec, gqa_group);
        let tiles_at = |start| tiles(self.pages, self.rows[row].block_table, head, start, &range);
        let first = range.start / BLOCK_TOKENS * BLOCK_TOKENS;
        let mut next = tiles_at(first);
        for start in (first..range.end).step_by(BLOCK_TOKENS) {
            let tiles = next;
            next = tiles_at(start + BLOCK_TOKENS);
            kernels::prefetch(&next);
            let seen = range.start.saturating_sub(start)..(range.end - start).min(BLOCK_TOKENS);
            block.fill_keys(self.isa, self.pages.codec, &tiles);
            kernels::scores(self.isa, queries.rows(0..gqa_group), block, seen.clone(), scores);
            for (i, scores) in scores.iter_mut().enumerate() {
                let (max, sum) = (&mut state.max[i], &mut state.sum[i]);
                corrections[i] = kernels::softmax_step(
                    self.isa,
                    scores,
                    &block.factors,
                    seen.clone(),
                    self.scale,
                    max,
                    sum,
                );
            }
            block.fill_values(self.isa, self.pages.codec, &tiles, seen.clone());
            kernels::accumulate(self.isa, scores, seen, block, corrections, state.acc);
        }
    }

    fn scratch(&self) -> Scratch {
        let block = Block::packed(self.isa, self.pages.codec);
        Scratch {
            queries: Queries::new(self.shape.gqa_group, self.shape.key_head_dim, &block),
            block,
            scores: vec![BlockRow([0.0; BLOCK_TOKENS]); self.shape.gqa_group],
            corrections: vec![0.0; self.shape.gqa_group],
        }
    }

    fn finish(&self, unit: HeadGroup<'_>, state: &State<'_>) {
        let group = self.shape.gqa_group;
        let first = unit.index % self.shape.num_kv_heads * group;
        let sinks = self.params.sinks.map(|sinks| &sinks[first..first + group]);
        state.finish(sinks, unit.out, Some(unit.lse));
    }
}

/// What a thread needs.
struct Scratch {
    block: Block,
    /// `[gqa_group]`
    queries: Queries,
    /// `[gqa_group]`
    scores: Vec<BlockRow>,
    /// `[gqa_group]`
    corrections: Vec<f32>,
}
