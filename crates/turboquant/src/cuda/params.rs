//! The kernels' parameter structs, field by field as in `cuda/params.cuh`. Pointers are device addresses.

use crate::codebook::Codebook;

/// Parameters of a decode launch.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DecodeParams {
    /// bf16 or fp16 `[num_seqs * q_len, num_qo_heads, head_dim]`.
    pub out: u64,
    /// f32 `[num_seqs * q_len, num_qo_heads]`, natural log, sinks included; or 0.
    pub lse: u64,
    /// `[num_seqs * q_len, num_qo_heads, head_dim]`, not rotated.
    pub q: u64,
    /// `[num_pages, page_bytes]`.
    pub pages: u64,
    /// i32 `[num_seqs, max_pages]`.
    pub block_tables: u64,
    /// i32 `[num_seqs]`: tokens in the cache, the query tokens included.
    pub seq_lens: u64,
    /// f32 `[num_qo_heads]`, or 0.
    pub sinks: u64,
    /// f32, room for the parts of a split, every byte 0xff before a launch and after it: see
    /// [`super::launch::DecodeKernel::partials`].
    pub partials: u64,
    /// Bytes of a page.
    pub page_bytes: i64,
    /// See [`codebook_words`].
    pub codebook: [u32; 2],
    /// Sequences.
    pub num_seqs: i32,
    /// KV heads.
    pub num_kv_heads: i32,
    /// Query heads of a KV head.
    pub gqa_group: i32,
    /// Query tokens of a sequence, the last of its tokens.
    pub q_len: i32,
    /// Tokens of a page, a multiple of 16.
    pub page_size: i32,
    /// Columns of `block_tables`.
    pub max_pages: i32,
    /// Tokens a query sees, itself included; 0: all.
    pub window: i32,
    /// Factor of the scores.
    pub sm_scale: f32,
    /// Soft cap of the scores; 0: none.
    pub softcap: f32,
}

/// Parameters of a store launch.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StoreParams {
    /// bf16 or fp16 `[num_tokens, num_kv_heads, head_dim]`.
    pub key: u64,
    /// As `key`.
    pub value: u64,
    /// i64 `[num_tokens]`: page * page_size + offset; negative: skip.
    pub slot_mapping: u64,
    /// `[num_pages, page_bytes]`.
    pub pages: u64,
    /// Bytes of a page.
    pub page_bytes: i64,
    /// Elements from a token's key to the next.
    pub key_stride: i64,
    /// Elements from a token's value to the next.
    pub value_stride: i64,
    /// See [`codebook_words`].
    pub codebook: [u32; 2],
    /// Tokens.
    pub num_tokens: i32,
    /// KV heads.
    pub num_kv_heads: i32,
    /// Tokens of a page, a multiple of 16.
    pub page_size: i32,
    /// Midpoints of the codebook, ascending; 3-bit keys use 7 of them.
    pub midpoints: [f32; 15],
}

/// Parameters of a prefill launch. Request `s` has the new tokens `query_starts[s] .. query_starts[s + 1]`, at
/// positions `prefix_lens[s]` and on; they see the packed tokens before them and the raw keys and values
/// of the new ones, causally.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PrefillParams {
    /// bf16 or fp16 `[num_tokens, num_qo_heads, head_dim]`.
    pub out: u64,
    /// f32 `[num_tokens, num_qo_heads]`, natural log, sinks included; or 0.
    pub lse: u64,
    /// `[num_tokens, num_qo_heads, head_dim]`, not rotated.
    pub q: u64,
    /// `[num_tokens, num_kv_heads, head_dim]`: keys of the new tokens, as they came.
    pub key: u64,
    /// As `key`.
    pub value: u64,
    /// `[num_pages, page_bytes]`.
    pub pages: u64,
    /// i32 `[num_seqs, max_pages]`.
    pub block_tables: u64,
    /// i32 `[num_seqs + 1]`: first new token of each request, ascending from 0.
    pub query_starts: u64,
    /// i32 `[num_seqs]`: tokens in pages before the first new one.
    pub prefix_lens: u64,
    /// f32 `[num_qo_heads]`, or 0.
    pub sinks: u64,
    /// Bytes of a page.
    pub page_bytes: i64,
    /// Elements from a token's key to the next.
    pub key_stride: i64,
    /// Elements from a token's value to the next.
    pub value_stride: i64,
    /// See [`codebook_words`].
    pub codebook: [u32; 2],
    /// Requests.
    pub num_seqs: i32,
    /// KV heads.
    pub num_kv_heads: i32,
    /// Query heads of a KV head.
    pub gqa_group: i32,
    /// Tokens of a page, a multiple of 16.
    pub page_size: i32,
    /// Columns of `block_tables`.
    pub max_pages: i32,
    /// Tokens a query sees, itself included; 0: all.
    pub window: i32,
    /// Factor of the scores.
    pub sm_scale: f32,
    /// Soft cap of the scores; 0: none.
    pub softcap: f32,
}

// The same numbers are asserted in params.cuh.
const _: () = assert!(size_of::<DecodeParams>() == 120);
const _: () = assert!(std::mem::offset_of!(DecodeParams, page_bytes) == 64);
const _: () = assert!(std::mem::offset_of!(DecodeParams, num_seqs) == 80);
const _: () = assert!(std::mem::offset_of!(DecodeParams, softcap) == 112);
const _: () = assert!(size_of::<StoreParams>() == 136);
const _: () = assert!(std::mem::offset_of!(StoreParams, codebook) == 56);
const _: () = assert!(std::mem::offset_of!(StoreParams, midpoints) == 76);
const _: () = assert!(size_of::<PrefillParams>() == 144);
const _: () = assert!(std::mem::offset_of!(PrefillParams, page_bytes) == 80);
const _: () = assert!(std::mem::offset_of!(PrefillParams, codebook) == 104);
const _: () = assert!(std::mem::offset_of!(PrefillParams, num_seqs) == 112);
const _: () = assert!(std::mem::offset_of!(PrefillParams, softcap) == 140);

/// The codebook as the kernels multiply with it: odd integers in the centroids' proportions, one per
/// code. The largest is the one up to 255 with which 16 levels fit well; 8 levels fit with 255. Rounding
/// adds 0.007 dB (16 levels) and 0.001 dB (8) to the codec's error.
pub fn odd_centroids(codebook: &Codebook) -> Vec<i32> {
    let centroids = codebook.centroids();
    let largest = centroids[centroids.len() - 1];
    let half_largest = if centroids.len() == 16 { 122.5 } else { 127.5 };
    centroids
        .iter()
        .map(|c| {
            let half =
                (f64::from(c.abs() / largest) * half_largest - 0.5).round_ties_even().clamp(0.0, 127.0);
            let odd = 2 * half as i32 + 1;
            if *c < 0.0 { -odd } else { odd }
        })
        .collect()
}

/// The codebook as the kernels take it: 8 bytes v, standing for the odd integer 2v + 1. With 16
/// centroids the positive ones, ascending; with 8 all of them.
pub fn codebook_words(codebook: &Codebook) -> [u32; 2] {
    let odd = odd_centroids(codebook);
    let eight = &odd[odd.len() - 8..];
    let mut bytes = [0; 8];
    for (byte, odd) in bytes.iter_mut().zip(eight) {
        *byte = (odd >> 1) as u8;
    }
    let [a, b, c, d, e, f, g, h] = bytes;
    [u32::from_le_bytes([a, b, c, d]), u32::from_le_bytes([e, f, g, h])]
}

/// The thresholds of a codebook, padded to 15.
pub fn midpoint_table(codebook: &Codebook) -> [f32; 15] {
    let mut table = [f32::INFINITY; 15];
    for (to, from) in table.iter_mut().zip(codebook.midpoints()) {
        *to = *from;
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codebooks_are_odd_symmetric_and_close() {
        for head_dim in [16, 80, 96, 128, 192, 240, 256] {
            for bits in [3, 4] {
                let codebook = Codebook::shared(head_dim, bits);
                let odd = odd_centroids(&codebook);
                let largest = *codebook.centroids().last().unwrap();
                for (i, (o, c)) in odd.iter().zip(codebook.centroids()).enumerate() {
                    assert_eq!(o & 1, 1);
                    assert_eq!(*o, -odd[odd.len() - 1 - i]);
                    assert!(
                        (*o as f32 / odd[odd.len() - 1] as f32 - c / largest).abs() <= 1.01 / 245.0,
                        "{o} for {c}"
                    );
                }
                let words = codebook_words(&codebook);
                let bytes: Vec<i8> = words.iter().flat_map(|w| w.to_le_bytes()).map(|b| b as i8).collect();
                let want: Vec<i32> = odd[odd.len() - 8..].to_vec();
                assert_eq!(bytes.iter().map(|v| 2 * i32::from(*v) + 1).collect::<Vec<_>>(), want);
            }
        }
    }

    /// Expected squared error of the grid itself and of its rounding, on the Gaussian it is made for.
    #[test]
    fn rounding_the_codebook_costs_less_than_a_hundredth_of_a_decibel() {
        for bits in [3, 4] {
            let codebook = Codebook::shared(128, bits);
            let odd = odd_centroids(&codebook);
            let sigma = 1.0 / 128f64.sqrt();
            // Norm correction divides any common factor out, so the best one is allowed here.
            let (mut xo, mut oo, mut exact, mut xx) = (0.0, 0.0, 0.0, 0.0);
            for i in -60_000..=60_000 {
                let x = f64::from(i) * 1e-4;
                let weight = (-x * x / 2.0).exp();
                let y = x * sigma;
                let code = codebook.midpoints().iter().filter(|m| y >= f64::from(**m)).count();
                let (c, o) = (f64::from(codebook.centroids()[code]), f64::from(odd[code]));
                exact += weight * (y - c) * (y - c);
                xo += weight * y * o;
                oo += weight * o * o;
                xx += weight * y * y;
            }
            let rounded = xx - xo * xo / oo;
            let decibel = 10.0 * (rounded / exact).log10();
            assert!(decibel < 0.01, "{bits} bits: {decibel} dB");
        }
    }
}
