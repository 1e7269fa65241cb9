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
    #[error(
        "no GPU kernel serves head_dim {got}, only multiples of 16 up to {MAX_GPU_HEAD_DIM}; the CPU kernels take other widths"
    )]
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
    /// A card older than the kernels.
    #[error(
        "no GPU kernel runs on compute capability {major}.{minor}; 8.0 or later is needed (Ampere, Ada, Hopper, Blackwell)"
    )]
    Capability {
        /// Major number of the card's.
        major: i32,
        /// Minor number.
        minor: i32,
    },
    /// A position bias that no kernel adds.
    #[error(
        "no kernel adds ALiBi slopes, and attention without them would be wrong; run a model with another position encoding"
    )]
    Alibi,
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

/// How a prefill kernel multiplies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PrefillPath {
    /// `mma.sync`: compute capability 8.0 and later.
    Mma,
    /// Warpgroup products: compute capability 9.0 alone.
    Wgmma,
}

/// Whether the wgmma kernel takes these rows: its tiles hold whole runs of 64 dims, and beside them
/// packed bytes have to fit into shared memory, which unpacked rows of 256 dims do not.
fn fits_wgmma(rows: GpuRows) -> bool {
    rows.head_dim.is_multiple_of(64) && (rows.head_dim < 256 || rows.key >= 2)
}

/// What a layer asks of prefill.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PrefillShape {
    /// Rows of the pages.
    pub format: RowFormat,
    /// Width of a head.
    pub head_dim: usize,
    /// Dtype of queries, keys, values and outputs.
    pub io: IoDtype,
    /// Whether scores get ALiBi slopes.
    pub alibi: bool,
    /// Whether scores are capped.
    pub softcap: bool,
}

/// The kernel that serves a [`PrefillShape`]; prints as one line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PrefillChoice {
    /// The kernel.
    pub variant: Variant,
    /// Why this one.
    pub reason: PrefillReason,
}

/// Why a [`PrefillPath`] was chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PrefillReason {
    /// wgmma: the card has it, and the rows fit.
    Wgmma,
    /// mma.sync: the card has no wgmma.
    Card {
        /// Major number of its compute capability.
        major: i32,
        /// Minor number.
        minor: i32,
    },
    /// mma.sync: there is no wgmma kernel for these rows.
    Rows,
}

/// The prefill kernel for `shape` on a card of the compute capability `(major, minor)`, and why.
///
/// # Errors
/// Cards, widths, rows and position biases without a kernel.
///
/// ```
/// use turboquant::{cuda::variant::{IoDtype, PrefillShape, select_prefill}, format::{CacheDtype, NativeDtype, Preset}};
/// let format = CacheDtype::TurboQuant(Preset::FourBitNc).row_format(NativeDtype::Bf16);
/// let shape = PrefillShape { format, head_dim: 128, io: IoDtype::Bf16, alibi: false, softcap: false };
/// let choice = select_prefill((8, 9), &shape).unwrap();
/// assert!(choice.to_string().ends_with("the card's compute capability is 8.9, and wgmma needs 9.0"));
/// assert!(select_prefill((9, 0), &PrefillShape { alibi: true, ..shape }).is_err());
/// ```
pub fn select_prefill(
    (major, minor): (i32, i32),
    shape: &PrefillShape,
) -> Result<PrefillChoice, VariantError> {
    if major < 8 {
        return Err(VariantError::Capability { major, minor });
    }
    if shape.alibi {
        return Err(VariantError::Alibi);
    }
    let rows = GpuRows::new(shape.format, shape.head_dim, shape.io)?;
    let fits = fits_wgmma(rows);
    let (path, reason) = match (major, minor) {
        (9, 0) if fits => (PrefillPath::Wgmma, PrefillReason::Wgmma),
        (9, 0) => (PrefillPath::Mma, PrefillReason::Rows),
        _ => (PrefillPath::Mma, PrefillReason::Card { major, minor }),
    };
    Ok(PrefillChoice { variant: Variant::Prefill { rows, softcap: shape.softcap, path }, reason })
}

impl fmt::Display for PrefillReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PrefillReason::Wgmma => f.write_str("the card has wgmma, and these rows fit its tiles"),
            PrefillReason::Card { major, minor } => {
                write!(f, "the card's compute capability is {major}.{minor}, and wgmma needs 9.0")
            }
            PrefillReason::Rows => f.write_str("there is no wgmma kernel for these rows at this head_dim"),
        }
    }
}

impl fmt::Display for PrefillChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.variant, self.reason)
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
    /// Attention of new tokens over packed pages and their own raw keys and values.
    Prefill {
        /// The rows of the pages.
        rows: GpuRows,
        /// Whether scores are capped.
        softcap: bool,
        /// How it multiplies.
        path: PrefillPath,
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
            Variant::Prefill { .. } => "turboquant_prefill",
        }
    }

    pub(crate) fn info_symbol(&self) -> &'static str {
        match self {
            Variant::Decode { .. } => "turboquant_decode_info",
            Variant::Store { .. } => "turboquant_store_info",
            Variant::Prefill { .. } => "turboquant_prefill_info",
        }
    }

    pub(crate) fn head_dim(&self) -> usize {
        self.rows().head_dim
    }

    fn rows(&self) -> GpuRows {
        match self {
            Variant::Decode { rows, .. } | Variant::Store { rows } | Variant::Prefill { rows, .. } => *rows,
        }
    }

    /// Whether scores are capped; none for kernels without scores.
    pub(crate) fn softcap(&self) -> Option<bool> {
        match self {
            Variant::Decode { softcap, .. } | Variant::Prefill { softcap, .. } => Some(*softcap),
            Variant::Store { .. } => None,
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
        if let Variant::Decode { blocks, .. } = self {
            defines.push(format!("TQ_BLOCKS={blocks}"));
        }
        if let Some(softcap) = self.softcap() {
            defines.push(format!("TQ_SOFTCAP={softcap}"));
        }
        defines
    }

    /// The whole source as one text; needs no include path.
    pub fn source(&self) -> String {
        let every = [
            include_str!("../../cuda/gpu.cuh"),
            include_str!("../../cuda/layout.cuh"),
            include_str!("../../cuda/params.cuh"),
            include_str!("../../cuda/rotate.cuh"),
        ];
        let (rows, prefill) = (include_str!("../../cuda/rows.cuh"), include_str!("../../cuda/prefill.cuh"));
        let parts: &[&str] = match self {
            Variant::Decode { .. } => &[
                rows,
                include_str!("../../cuda/ring.cuh"),
                include_str!("../../cuda/runs.cuh"),
                include_str!("../../cuda/merge.cuh"),
                include_str!("../../cuda/decode.cuh"),
                include_str!("../../cuda/decode.cu"),
            ],
            Variant::Store { .. } => {
                &[include_str!("../../cuda/store.cuh"), include_str!("../../cuda/store.cu")]
            }
            Variant::Prefill { path: PrefillPath::Mma, .. } => &[
                rows,
                prefill,
                include_str!("../../cuda/prefill_mma.cuh"),
                include_str!("../../cuda/prefill_mma.cu"),
            ],
            Variant::Prefill { path: PrefillPath::Wgmma, .. } => &[
                rows,
                prefill,
                include_str!("../../cuda/wgmma.cuh"),
                include_str!("../../cuda/prefill_wgmma.cuh"),
                include_str!("../../cuda/prefill_wgmma.cu"),
            ],
        };
        let own = |line: &&str| !line.starts_with("#include") && !line.starts_with("#pragma once");
        every
            .iter()
            .chain(parts)
            .flat_map(|part| part.lines().filter(own))
            .flat_map(|line| [line, "\n"])
            .collect()
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
            Variant::Prefill { softcap, path, .. } => {
                let cap = if *softcap { ", soft cap" } else { "" };
                let path = match path {
                    PrefillPath::Mma => "mma.sync",
                    PrefillPath::Wgmma => "wgmma",
                };
                write!(f, "prefill by {path} (head_dim {head_dim}, {key} keys, {value} values, {io}{cap})")
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

    /// Card, head_dim, ALiBi and soft cap against the kernel that serves them, or the sentence.
    #[test]
    fn one_function_chooses_the_prefill_kernel() {
        use PrefillPath::{Mma, Wgmma};
        use PrefillReason as Why;
        let preset = |p| CacheDtype::TurboQuant(p).row_format(NativeDtype::Bf16);
        let (four, k8v4) = (preset(Preset::FourBitNc), preset(Preset::K8V4));
        let (fp8, auto) =
            (CacheDtype::Fp8.row_format(NativeDtype::Bf16), CacheDtype::Auto.row_format(NativeDtype::Bf16));
        let (ada, hopper, blackwell) = ((8, 9), (9, 0), (10, 0));
        let not_hopper = |(major, minor)| Why::Card { major, minor };
        let served = [
            (hopper, four, 64, Wgmma, Why::Wgmma),
            (hopper, four, 128, Wgmma, Why::Wgmma),
            (hopper, four, 256, Wgmma, Why::Wgmma),
            (hopper, preset(Preset::K3V4Nc), 128, Wgmma, Why::Wgmma),
            (hopper, preset(Preset::ThreeBitNc), 256, Wgmma, Why::Wgmma),
            (hopper, k8v4, 128, Wgmma, Why::Wgmma),
            (hopper, k8v4, 256, Wgmma, Why::Wgmma),
            (hopper, fp8, 64, Wgmma, Why::Wgmma),
            (hopper, fp8, 96, Mma, Why::Rows),
            (hopper, four, 80, Mma, Why::Rows),
            (hopper, four, 192, Wgmma, Why::Wgmma),
            (hopper, auto, 128, Wgmma, Why::Wgmma),
            (hopper, auto, 256, Mma, Why::Rows),
            (hopper, k8v4, 192, Wgmma, Why::Wgmma),
            ((8, 0), four, 128, Mma, not_hopper((8, 0))),
            (ada, four, 128, Mma, not_hopper(ada)),
            (ada, k8v4, 80, Mma, not_hopper(ada)),
            (blackwell, four, 128, Mma, not_hopper(blackwell)),
            ((12, 0), auto, 192, Mma, not_hopper((12, 0))),
        ];
        for softcap in [false, true] {
            for (card, format, head_dim, path, reason) in served {
                let shape = PrefillShape { format, head_dim, io: IoDtype::Bf16, alibi: false, softcap };
                let choice = select_prefill(card, &shape).unwrap();
                assert_eq!(choice.reason, reason, "{card:?} {choice}");
                assert!(
                    matches!(choice.variant, Variant::Prefill { path: p, softcap: s, .. } if p == path && s == softcap),
                    "{card:?} {choice}"
                );
                let text = choice.to_string();
                assert_eq!(text.contains("soft cap"), softcap, "{text}");
                assert!(text.contains(if path == Mma { "by mma.sync" } else { "by wgmma" }), "{text}");
                // with slopes nothing serves it
                let refused = select_prefill(card, &PrefillShape { alibi: true, ..shape }).unwrap_err();
                assert_eq!(refused, VariantError::Alibi);
                assert!(refused.to_string().contains("ALiBi"));
            }
        }
        let refused = [
            ((7, 5), four, 128, VariantError::Capability { major: 7, minor: 5 }, "8.0 or later"),
            (hopper, four, 512, VariantError::HeadDim { got: 512 }, "the CPU kernels"),
            (hopper, k8v4, 272, VariantError::HeadDim { got: 272 }, "the CPU kernels"),
            (ada, auto, 72, VariantError::HeadDim { got: 72 }, "multiples of 16"),
            (
                hopper,
                preset(Preset::ThreeBitNc),
                96,
                VariantError::ThreeBits { got: 96 },
                "turboquant_4bit_nc serves",
            ),
        ];
        for (card, format, head_dim, error, remedy) in refused {
            let shape = PrefillShape { format, head_dim, io: IoDtype::Bf16, alibi: false, softcap: false };
            let got = select_prefill(card, &shape).unwrap_err();
            assert_eq!(got, error);
            assert!(got.to_string().contains(remedy), "{got}");
        }
    }

    #[test]
    fn prefill_sources_are_whole() {
        let format = CacheDtype::TurboQuant(Preset::FourBitNc).row_format(NativeDtype::Bf16);
        for card in [(8, 0), (9, 0)] {
            let shape = PrefillShape { format, head_dim: 128, io: IoDtype::F16, alibi: false, softcap: true };
            let variant = select_prefill(card, &shape).unwrap().variant;
            let source = variant.source();
            assert!(!source.contains("#include") && source.contains("turboquant_prefill("));
            assert!(variant.defines().contains(&"TQ_SOFTCAP=true".to_owned()));
            assert!(!variant.defines().iter().any(|define| define.starts_with("TQ_BLOCKS")));
        }
    }
}
