//! TurboQuant: a compressed KV cache for language models.
//!
//! This crate holds the codec, the packed pages and the attention kernels that read them. It knows
//! no tensor library: slices go in, packed rows and attention outputs come out.
//!
//! # The algorithm
//!
//! A cache stores, per token and KV head, one key row and one value row. The byte format is that of
//! vLLM's `turboquant_*` cache dtypes.
//!
//! *Keys* (b-bit presets). Attention needs inner products with queries, and an orthonormal matrix
//! keeps those. So a key `k` is split into its norm and its direction, and the direction is rotated by
//! a Hadamard matrix H:
//!
//! ```text
//! n = |k|        y = k / (n + 1e-8) @ H
//! ```
//!
//! Whatever the key was, the elements of `y` now look like draws from N(0, 1/head_dim), for which the
//! best scalar quantiser is known in advance: [Lloyd-Max centroids](codebook) of 3 or 4 bits. The row
//! is the codes and `n` as fp16. Reading takes the centroids `c` of the codes, gives them unit length
//! again (*norm correction*: coding shrinks them by 0.3 to 1.5 %) and scales by the norm:
//!
//! ```text
//! score = n16 * <q @ H, c / |c|> * sm_scale
//! ```
//!
//! The query is rotated once per step; no key is ever rotated back. [`hadamard`] says what H is for
//! each head_dim. `turboquant_k8v4` and `fp8` store keys as [e4m3](fp8) instead, unrotated and with
//! scale 1.
//!
//! *Values* are not rotated, so that the output needs no rotation either. Each row has an even grid of
//! 3 or 4 bits from its minimum to its maximum:
//!
//! ```text
//! s = max((max - min) / (2^b - 1), 1e-8)     code = trunc((v - min) / s + 0.5)     v' = code * s16 + min16
//! ```
//!
//! The codes are chosen with the f32 pair and read with its fp16 rounding, as vLLM does, for the sake
//! of equal bytes.
//!
//! | preset | key row | value row | bytes at head_dim 128 (bf16: 512) |
//! |---|---|---|---|
//! | `turboquant_k8v4` | e4m3 | 4 bits | 196 |
//! | `turboquant_4bit_nc` | 4 bits, rotated | 4 bits | 134 |
//! | `turboquant_k3v4_nc` | 3 bits, rotated | 4 bits | 118 |
//! | `turboquant_3bit_nc` | 3 bits, rotated | 3 bits | 102 |
//!
//! Limits worth knowing: a large constant bias in a few key channels (some Qwen2.5 layers) eats the
//! range of rotated codes, and e4m3 keys beyond 448 are clipped; [`rows::EncodeReport`] counts the
//! second, and a model's layers of the first kind belong in a wider format.
//!
//! # Where things are
//!
//! [`format`](mod@format) names the formats, [`layout`] gives every byte offset, [`rows`] encodes and
//! decodes on the instruction set that [`rows::Isa`] names. Packed bytes do not depend on the
//! instruction set.

pub mod attention;
#[cfg(target_arch = "x86_64")]
mod avx2;
pub mod codebook;
#[cfg(feature = "cuda")]
pub mod cuda;
pub mod error;
pub mod exec;
pub mod format;
pub mod fp8;
pub mod hadamard;
pub mod layout;
pub mod page;
pub mod rows;
