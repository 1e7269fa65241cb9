//! Dense attention in f64 over decoded rows: slow, obvious, and what every kernel is held to.

use std::ops::Range;

use super::{AttentionParams, Pages};
use crate::rows::Isa;

/// Keys and values of one sequence in f64, keys in the basis of the queries.
#[derive(Debug, Clone, PartialEq)]
pub struct Dense {
    num_kv_heads: usize,
    /// One `[num_kv_heads, key_head_dim]` per token.
    keys: Vec<Vec<f64>>,
    /// One `[num_kv_heads, value_head_dim]` per token.
    values: Vec<Vec<f64>>,
}

impl Dense {
    /// Decodes the packed rows of the first `tokens` positions.
    ///
    /// # Panics
    /// If the block table does not lead every position to a page of the slab.
    pub fn from_pages(pages: Pages<'_>, block_table: &[i32], tokens: usize) -> Dense {
        let (codec, rows) = (pages.codec, pages.codec.rows());
        let (page_size, page_bytes, heads) = (codec.page_size(), codec.page_bytes(), codec.num_kv_heads());
        let (mut key, mut value) = (vec![0.0; rows.key_head_dim()], vec![0.0; rows.value_head_dim()]);
        let mut slots = vec![0; page_bytes];
        let mut dense = Dense { num_kv_heads: heads, keys: Vec::new(), values: Vec::new() };
        for token in 0..tokens {
            if token % page_size == 0 {
                let at = block_table[token / page_size] as usize * page_bytes;
                let page = &pages.slab[at..at + page_bytes];
                codec.page_to_slots(page, &mut slots).expect("both are one page long");
            }
            let token_bytes = heads * rows.layout().slot_bytes;
            let (mut keys, mut values) = (Vec::new(), Vec::new());
            for slot in
                slots[token % page_size * token_bytes..][..token_bytes].chunks_exact(token_bytes / heads)
            {
                rows.decode_key_raw_basis(Isa::Scalar, slot, &mut key);
                rows.decode_value(Isa::Scalar, slot, &mut value);
                keys.extend(key.iter().map(|x| f64::from(*x)));
                values.extend(value.iter().map(|x| f64::from(*x)));
            }
            dense.keys.push(keys);
            dense.values.push(values);
        }
        dense
    }

    /// Appends one token's raw rows `[num_kv_heads, key_head_dim]` and `[num_kv_heads, value_head_dim]`.
    pub fn push(&mut self, keys: &[f32], values: &[f32]) {
        self.keys.push(keys.iter().map(|x| f64::from(*x)).collect());
        self.values.push(values.iter().map(|x| f64::from(*x)).collect());
    }

    /// Attention of one token's query `[num_qo_heads, key_head_dim]` to the positions `visible`:
    /// outputs `[num_qo_heads, value_head_dim]` and natural-log sums `[num_qo_heads]`. `value_head_dim`
    /// is asked for because there may be no tokens.
    ///
    /// # Panics
    /// If lengths do not fit.
    pub fn attend(
        &self,
        params: &AttentionParams<'_>,
        query: &[f32],
        visible: Range<usize>,
        value_head_dim: usize,
    ) -> (Vec<f64>, Vec<f64>) {
        let (mut out, mut lse) = (Vec::new(), Vec::new());
        let group = params.num_qo_heads / self.num_kv_heads;
        for (h, query) in query.chunks_exact(query.len() / params.num_qo_heads).enumerate() {
            let scores: Vec<f64> = visible
                .clone()
                .map(|token| {
                    let key = &self.keys[token][h / group * query.len()..][..query.len()];
                    let dot: f64 = query.iter().zip(key).map(|(q, k)| f64::from(*q) * k).sum();
                    let score = dot * f64::from(params.sm_scale);
                    params.soft_cap.map_or(score, |cap| f64::from(cap) * (score / f64::from(cap)).tanh())
                })
                .collect();
            let sink = params.sinks.map_or(f64::NEG_INFINITY, |sinks| f64::from(sinks[h]));
            let max = scores.iter().fold(sink, |max, s| max.max(*s));
            let sum: f64 = scores.iter().chain([&sink]).map(|s| (s - max).exp()).sum();
            let log_sum = if max == f64::NEG_INFINITY { max } else { max + sum.ln() };
            let mut weighted = vec![0.0; value_head_dim];
            for (token, score) in visible.clone().zip(&scores) {
                let value = &self.values[token][h / group * value_head_dim..][..value_head_dim];
                for (w, v) in weighted.iter_mut().zip(value) {
                    *w += (score - log_sum).exp() * v;
                }
            }
            out.extend(weighted);
            lse.push(log_sum);
        }
        (out, lse)
    }
}
