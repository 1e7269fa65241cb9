//! Partial softmax states: made per run of positions, merged in order, finished once.
//!
//! Scores are kept in base 2 (`s * log2(e)`), so that every exponential is an `exp2`.

/// What a group of query rows has seen so far: for each row the largest score, the sum of
/// `2^(score - max)`, and the sum of `2^(score - max) * value`.
#[derive(Debug)]
pub(super) struct State<'a> {
    /// `[rows]`; -inf while nothing was seen.
    pub(super) max: &'a mut [f32],
    /// `[rows]`
    pub(super) sum: &'a mut [f32],
    /// `[rows, value_head_dim]`
    pub(super) acc: &'a mut [f32],
}

impl State<'_> {
    /// Floats that a state of `rows` rows takes.
    pub(super) fn len(rows: usize, value_head_dim: usize) -> usize {
        rows * (value_head_dim + 2)
    }

    /// The state laid over `buffer` (of [`State::len`]).
    pub(super) fn over(buffer: &mut [f32], rows: usize) -> State<'_> {
        let (max, rest) = buffer.split_at_mut(rows);
        let (sum, acc) = rest.split_at_mut(rows);
        State { max, sum, acc }
    }

    /// Forgets everything.
    pub(super) fn clear(&mut self) {
        self.max.fill(f32::NEG_INFINITY);
        self.sum.fill(0.0);
        self.acc.fill(0.0);
    }

    /// Adds what `later` saw.
    pub(super) fn merge(&mut self, later: &State<'_>) {
        let width = self.acc.len() / self.max.len();
        for (row, (acc, other)) in
            self.acc.chunks_exact_mut(width).zip(later.acc.chunks_exact(width)).enumerate()
        {
            let (mine, theirs, max) = common_max(self.max[row], later.max[row]);
            self.max[row] = max;
            self.sum[row] = self.sum[row] * mine + later.sum[row] * theirs;
            for (a, b) in acc.iter_mut().zip(other) {
                *a = *a * mine + *b * theirs;
            }
        }
    }

    /// Adds a logit without a value per row (`sinks`, natural units), then writes the outputs and, if
    /// wanted, the natural-log sums.
    pub(super) fn finish(&self, sinks: Option<&[f32]>, out: &mut [f32], lse: Option<&mut [f32]>) {
        let width = self.acc.len() / self.max.len();
        let mut lse = lse;
        for (row, (out, acc)) in out.chunks_exact_mut(width).zip(self.acc.chunks_exact(width)).enumerate() {
            let (mut max, mut sum, mut factor) = (self.max[row], self.sum[row], 1.0);
            if let Some(sinks) = sinks {
                let sink = sinks[row] * std::f32::consts::LOG2_E;
                let (mine, theirs, both) = common_max(max, sink);
                (max, sum, factor) = (both, sum * mine + theirs, mine);
            }
            let weight = if sum == 0.0 { 0.0 } else { factor / sum };
            for (out, acc) in out.iter_mut().zip(acc) {
                *out = acc * weight;
            }
            if let Some(lse) = &mut lse {
                lse[row] =
                    if sum == 0.0 { f32::NEG_INFINITY } else { (max + sum.log2()) * std::f32::consts::LN_2 };
            }
        }
    }
}

/// Factors that bring two sums to their common maximum, and that maximum.
fn common_max(a: f32, b: f32) -> (f32, f32, f32) {
    let max = a.max(b);
    // Two empty states: -inf - -inf would be NaN.
    if max == f32::NEG_INFINITY { (1.0, 1.0, max) } else { ((a - max).exp2(), (b - max).exp2(), max) }
}
