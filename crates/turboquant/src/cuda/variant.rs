//! Which kernel serves a shape: the one place that decides, and says why not.

use std::fmt;

use crate::format::{KeyFormat, NativeDtype, RowFormat, ValueFormat};

/// Largest head_dim of a kernel.
pub const MAX_GPU_HEAD_DIM: usize = 256;
/// Most query rows (`gqa_group * q_len`) that one pass over the cache serves.
const ROWS_OF_TWO_BLOCKS: usize = 8;

/// A shape without a kernel.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum VariantError {
    /// A width outside the kernels'.
    #[error("no GPU kernel serves head_dim {got}; a multiple of 16 from 16 to {MAX_GPU_HEAD_DIM} is needed")]
    HeadDim {
        /// The width asked for.
        got: usize,
    },
    /// A width whose 3-bit codes the page order does not hold.
    #[error(
        "no GPU kernel packs 3-bit codes of head_dim {got}; a multiple of 64 is needed, and turboquant_4bit_nc serves every multiple of 16"
    )]
    ThreeBits {
        /// The width asked for.
        got: usize,
    },
    /// Rows of f32, or of another dtype than the activations.
    #[error("no GPU kernel keeps {rows} rows for {io} activations")]
    Native {
        /// Dtype of the rows.
        rows: &'static str,
        /// Dtype of keys, values and queries.
        io: &'static str,
    },
    /// A page that is no whole number of units.
    #[error("no GPU kernel reads pages of {got} tokens; a multiple of 16 is needed")]
    PageSize {
        /// Tokens of a page.
        got: usize,
    },
}

/// Dtype of keys, values, queries and outputs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum IoDtype {
    /// bfloat16.
    Bf16,
    /// IEEE half.
    F16,
}

impl IoDtype {
    const fn name(self) -> &'static str {
        match self {
            IoDtype::Bf16 => "bf16",
            IoDtype::F16 => "f16",
        }
    }
    const fn native(self) -> NativeDtype {
        match self {
            IoDtype::Bf16 => NativeDtype::Bf16,
            IoDtype::F16 => NativeDtype::F16,
        }
    }
}

/// The rows of a layer, as the kernels know them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct GpuRows {
    pub(crate) head_dim: usize,
    pub(crate) key: u8,
    pub(crate) value: u8,
    pub(crate) io: IoDtype,
}

impl GpuRows {
    /// The rows of `format` at `head_dim`, for activations of dtype `io`.
    ///
    /// # Errors
    /// Widths and dtypes that no kernel serves.
    ///
    /// ```
    /// use turboquant::{cuda::variant::{GpuRows, IoDtype}, format::{CacheDtype, NativeDtype, Preset}};
    /// let format = CacheDtype::TurboQuant(Preset::FourBitNc).row_format(NativeDtype::Bf16);
    /// assert!(GpuRows::new(format, 80, IoDtype::Bf16).is_ok());
    /// let refused = GpuRows::new(format, 72, IoDtype::Bf16).unwrap_err();
    /// assert!(refused.to_string().contains("head_dim 72"));
    /// ```
    pub fn new(format: RowFormat, head_dim: usize, io: IoDtype) -> Result<GpuRows, VariantError> {
        if head_dim == 0 || head_dim > MAX_GPU_HEAD_DIM || !head_dim.is_multiple_of(16) {
            return Err(VariantError::HeadDim { got: head_dim });
        }
        let three_bits =
            format.key == KeyFormat::LloydMax { bits: 3 } || format.value == ValueFormat::Uniform { bits: 3 };
        if three_bits && !head_dim.is_multiple_of(64) {
            return Err(VariantError::ThreeBits { got: head_dim });
        }
        let native = |dtype: NativeDtype| {
            if dtype == io.native() {
                return Ok(io as u8);
            }
            let rows = match dtype {
                NativeDtype::F32 => "f32",
                NativeDtype::F16 => "f16",
                NativeDtype::Bf16 => "bf16",
            };
            Err(VariantError::Native { rows, io: io.name() })
        };
        let key = match format.key {
            KeyFormat::Native(dtype) => native(dtype)?,
            KeyFormat::Fp8 => 2,
            KeyFormat::LloydMax { bits } => {
                if bits == 4 {
                    3
                } else {
                    4
                }
            }
        };
        let value = match format.value {
            ValueFormat::Native(dtype) => native(dtype)?,
            ValueFormat::Fp8 => 2,
            ValueFormat::Uniform { bits } => {
                if bits == 4 {
                    5
                } else {
                    6
                }
            }
        };
        Ok(GpuRows { head_dim, key, value, io })
    }

    /// Whether keys are rotated and coded by a Lloyd-Max codebook.
    pub fn has_norm(&self) -> bool {
        self.key >= 3
    }

    /// Whether values stand on an even grid.
    pub fn has_scale(&self) -> bool {
        self.value >= 5
    }
}

/// Checks a page size.
///
/// # Errors
/// A size that is no positive multiple of 16.
pub fn check_page_size(page_size: usize) -> Result<(), VariantError> {
    if page_size > 0 && page_size.is_multiple_of(16) {
        Ok(())
    } else {
        Err(VariantError::PageSize { got: page_size })
    }
}

/// One compiled kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Variant {
    /// Attention of a few query rows over packed pages.
    Decode {
        /// The rows.
        rows: GpuRows,
        /// Query rows of a CTA, in eights: 1 or 2.
        blocks: u8,
        /// Whether scores are capped.
        softcap: bool,
    },
    /// Raw keys and values to packed pages.
    Store {
        /// The rows.
        rows: GpuRows,
    },
}

impl Variant {
    /// The decode kernel for `query_rows = gqa_group * q_len` rows of a KV head.
    pub fn decode(rows: GpuRows, query_rows: usize, softcap: bool) -> Variant {
        let blocks = if query_rows > ROWS_OF_TWO_BLOCKS { 2 } else { 1 };
        Variant::Decode { rows, blocks, softcap }
    }

    /// The store kernel.
    pub fn store(rows: GpuRows) -> Variant {
        Variant::Store { rows }
    }

    pub(crate) fn entry(&self) -> &'static str {
        match self {
            Variant::Decode { .. } => "turboquant_decode",
            Variant::Store { .. } => "turboquant_store",
        }
    }

    pub(crate) fn info_symbol(&self) -> &'static str {
        match self {
            Variant::Decode { .. } => "turboquant_decode_info",
            Variant::Store { .. } => "turboquant_store_info",
        }
    }

    fn rows(&self) -> GpuRows {
        match self {
            Variant::Decode { rows, .. } | Variant::Store { rows } => *rows,
        }
    }

    /// Macro definitions that specialise the source.
    pub fn defines(&self) -> Vec<String> {
        let GpuRows { head_dim, key, value, io } = self.rows();
        let mut defines = vec![
            format!("TQ_D={head_dim}"),
            format!("TQ_KEY={key}"),
            format!("TQ_VALUE={value}"),
            format!("TQ_IO={}", io as u8),
        ];
        if let Variant::Decode { blocks, softcap, .. } = self {
            defines.push(format!("TQ_BLOCKS={blocks}"));
            defines.push(format!("TQ_SOFTCAP={softcap}"));
        }
        defines
    }

    /// The whole source as one text; needs no include path.
    pub fn source(&self) -> String {
        let parts: &[&str] = match self {
            Variant::Decode { .. } => &[
                include_str!("../../cuda/gpu.cuh"),
                include_str!("../../cuda/layout.cuh"),
                include_str!("../../cuda/params.cuh"),
                include_str!("../../cuda/rotate.cuh"),
                include_str!("../../cuda/rows.cuh"),
                include_str!("../../cuda/ring.cuh"),
                include_str!("../../cuda/merge.cuh"),
                include_str!("../../cuda/decode.cuh"),
                include_str!("../../cuda/decode.cu"),
            ],
            Variant::Store { .. } => &[
                include_str!("../../cuda/gpu.cuh"),
                include_str!("../../cuda/layout.cuh"),
                include_str!("../../cuda/params.cuh"),
                include_str!("../../cuda/rotate.cuh"),
                include_str!("../../cuda/store.cuh"),
                include_str!("../../cuda/store.cu"),
            ],
        };
        let own = |line: &&str| !line.starts_with("#include") && !line.starts_with("#pragma once");
        parts.iter().flat_map(|part| part.lines().filter(own)).flat_map(|line| [line, "\n"]).collect()
    }
}

impl fmt::Display for Variant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let GpuRows { head_dim, key, value, io } = self.rows();
        let name = |format: u8| {
            ["bf16", "f16", "fp8", "lloyd4", "lloyd3", "uniform4", "uniform3"][usize::from(format)]
        };
        let (key, value, io) = (name(key), name(value), io.name());
        match self {
            Variant::Decode { blocks, softcap, .. } => {
                let cap = if *softcap { ", soft cap" } else { "" };
                write!(
                    f,
                    "decode (head_dim {head_dim}, {key} keys, {value} values, {io}, {} rows{cap})",
                    8 * blocks
                )
            }
            Variant::Store { .. } => {
                write!(f, "store (head_dim {head_dim}, {key} keys, {value} values, {io})")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::{CacheDtype, Preset};

    #[test]
    fn every_shape_has_a_kernel_or_a_sentence() {
        let preset = |p| CacheDtype::TurboQuant(p).row_format(NativeDtype::Bf16);
        let auto = |dtype| CacheDtype::Auto.row_format(dtype);
        let cases = [
            (preset(Preset::FourBitNc), 128, Ok(())),
            (preset(Preset::ThreeBitNc), 64, Ok(())),
            (preset(Preset::K3V4Nc), 256, Ok(())),
            (preset(Preset::K8V4), 80, Ok(())),
            (CacheDtype::Fp8.row_format(NativeDtype::Bf16), 192, Ok(())),
            (auto(NativeDtype::Bf16), 96, Ok(())),
            (preset(Preset::FourBitNc), 16, Ok(())),
            (preset(Preset::FourBitNc), 80, Ok(())),
            (preset(Preset::FourBitNc), 240, Ok(())),
            (preset(Preset::ThreeBitNc), 192, Ok(())),
            (preset(Preset::ThreeBitNc), 96, Err(VariantError::ThreeBits { got: 96 })),
            (preset(Preset::K3V4Nc), 80, Err(VariantError::ThreeBits { got: 80 })),
            (preset(Preset::FourBitNc), 512, Err(VariantError::HeadDim { got: 512 })),
            (preset(Preset::K8V4), 72, Err(VariantError::HeadDim { got: 72 })),
            (auto(NativeDtype::F32), 128, Err(VariantError::Native { rows: "f32", io: "bf16" })),
            (auto(NativeDtype::F16), 128, Err(VariantError::Native { rows: "f16", io: "bf16" })),
        ];
        for (format, head_dim, want) in cases {
            assert_eq!(
                GpuRows::new(format, head_dim, IoDtype::Bf16).map(|_| ()),
                want,
                "{format:?} {head_dim}"
            );
        }
        assert_eq!(check_page_size(24), Err(VariantError::PageSize { got: 24 }));
        assert_eq!(check_page_size(48), Ok(()));
    }

    #[test]
    fn nine_query_rows_take_two_blocks() {
        let format = CacheDtype::Fp8.row_format(NativeDtype::Bf16);
        let rows = GpuRows::new(format, 128, IoDtype::F16).unwrap();
        for (query_rows, want) in [(1, "8 rows"), (8, "8 rows"), (9, "16 rows"), (64, "16 rows")] {
            assert!(Variant::decode(rows, query_rows, false).to_string().contains(want));
        }
        let source = Variant::decode(rows, 1, false).source();
        assert!(!source.contains("#include") && source.contains("turboquant_decode("));
    }
}
