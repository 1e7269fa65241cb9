//! Weight matrices, kept in the type of the file.
#![expect(unsafe_code, reason = "file bytes are read straight into typed blocks")]

use candle_core::quantized::GgmlDType;
use candle_core::quantized::k_quants::{
    BlockQ2K, BlockQ3K, BlockQ4_0, BlockQ4_1, BlockQ4K, BlockQ5_0, BlockQ5_1, BlockQ5K, BlockQ6K, BlockQ8_0,
    GgmlType,
};
use half::{bf16, f16};

use super::{Loader, TensorEntry, WeightFiles};
use crate::error::LoadError;

const SUPPORTED: &str = "F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K";

/// Types that any bytes are a value of, without padding.
///
/// # Safety
/// `Self` is `repr(C)` or primitive, has no padding, and every bit pattern is valid.
unsafe trait Plain: GgmlType {}

// SAFETY: primitive.
unsafe impl Plain for f32 {}
// SAFETY: transparent over u16.
unsafe impl Plain for f16 {}
// SAFETY: transparent over u16.
unsafe impl Plain for bf16 {}
// SAFETY: this block and those below are repr(C), made of f16, u8 and i8 only; candle asserts that
// their size is the sum of their fields.
unsafe impl Plain for BlockQ4_0 {}
// SAFETY: as above.
unsafe impl Plain for BlockQ4_1 {}
// SAFETY: as above.
unsafe impl Plain for BlockQ5_0 {}
// SAFETY: as above.
unsafe impl Plain for BlockQ5_1 {}
// SAFETY: as above.
unsafe impl Plain for BlockQ8_0 {}
// SAFETY: as above.
unsafe impl Plain for BlockQ2K {}
// SAFETY: as above.
unsafe impl Plain for BlockQ3K {}
// SAFETY: as above.
unsafe impl Plain for BlockQ4K {}
// SAFETY: as above.
unsafe impl Plain for BlockQ5K {}
// SAFETY: as above.
unsafe impl Plain for BlockQ6K {}

fn bytes_mut<T: Plain>(blocks: &mut [T]) -> &mut [u8] {
    // SAFETY: `Plain` has no padding to read and accepts every byte that may be written; the length
    // is that of the slice, the alignment of u8 is 1.
    unsafe { std::slice::from_raw_parts_mut(blocks.as_mut_ptr().cast(), size_of_val(blocks)) }
}

/// A weight matrix, row after row.
#[derive(Debug)]
pub(crate) enum Blocks {
    F32(Vec<f32>),
    F16(Vec<f16>),
    Bf16(Vec<bf16>),
    Q4_0(Vec<BlockQ4_0>),
    Q4_1(Vec<BlockQ4_1>),
    Q5_0(Vec<BlockQ5_0>),
    Q5_1(Vec<BlockQ5_1>),
    Q8_0(Vec<BlockQ8_0>),
    Q2K(Vec<BlockQ2K>),
    Q3K(Vec<BlockQ3K>),
    Q4K(Vec<BlockQ4K>),
    Q5K(Vec<BlockQ5K>),
    Q6K(Vec<BlockQ6K>),
}

/// Runs `$body` with `$blocks` bound to the typed vector.
macro_rules! with_blocks {
    ($self:expr, $blocks:ident => $body:expr) => {
        match $self {
            Blocks::F32($blocks) => $body,
            Blocks::F16($blocks) => $body,
            Blocks::Bf16($blocks) => $body,
            Blocks::Q4_0($blocks) => $body,
            Blocks::Q4_1($blocks) => $body,
            Blocks::Q5_0($blocks) => $body,
            Blocks::Q5_1($blocks) => $body,
            Blocks::Q8_0($blocks) => $body,
            Blocks::Q2K($blocks) => $body,
            Blocks::Q3K($blocks) => $body,
            Blocks::Q4K($blocks) => $body,
            Blocks::Q5K($blocks) => $body,
            Blocks::Q6K($blocks) => $body,
        }
    };
}

impl Blocks {
    /// `elements` zeros; `None` for a type without products.
    fn zeros(dtype: GgmlDType, elements: usize) -> Option<Self> {
        fn vec<T: GgmlType>(elements: usize) -> Vec<T> {
            vec![T::zeros(); elements / T::BLCK_SIZE]
        }
        Some(match dtype {
            GgmlDType::F32 => Blocks::F32(vec(elements)),
            GgmlDType::F16 => Blocks::F16(vec(elements)),
            GgmlDType::BF16 => Blocks::Bf16(vec(elements)),
            GgmlDType::Q4_0 => Blocks::Q4_0(vec(elements)),
            GgmlDType::Q4_1 => Blocks::Q4_1(vec(elements)),
            GgmlDType::Q5_0 => Blocks::Q5_0(vec(elements)),
            GgmlDType::Q5_1 => Blocks::Q5_1(vec(elements)),
            GgmlDType::Q8_0 => Blocks::Q8_0(vec(elements)),
            GgmlDType::Q2K => Blocks::Q2K(vec(elements)),
            GgmlDType::Q3K => Blocks::Q3K(vec(elements)),
            GgmlDType::Q4K => Blocks::Q4K(vec(elements)),
            GgmlDType::Q5K => Blocks::Q5K(vec(elements)),
            GgmlDType::Q6K => Blocks::Q6K(vec(elements)),
            GgmlDType::Q8_1 | GgmlDType::Q8K => return None,
        })
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        with_blocks!(self, blocks => bytes_mut(blocks))
    }
}

/// `[rows, cols]`
#[derive(Debug)]
pub(crate) struct Matrix {
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    pub(crate) blocks: Blocks,
}

impl Matrix {
    /// `out = rows start.. of the matrix` as f32; `out.len()` is a multiple of `cols`.
    pub(crate) fn dequantize_rows(&self, start: usize, out: &mut [f32]) {
        fn rows<T: GgmlType>(blocks: &[T], start: usize, out: &mut [f32]) {
            let start = start / T::BLCK_SIZE;
            T::to_float(&blocks[start..start + out.len() / T::BLCK_SIZE], out);
        }
        with_blocks!(&self.blocks, blocks => rows(blocks, start * self.cols, out))
    }
}

/// One tensor among those that are stacked into a matrix.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Part<'a> {
    pub(crate) name: &'a str,
    pub(crate) rows: usize,
    /// Rows of a head whose halves are interleaved in the file, as `llama` GGUF files have them for
    /// RoPE on neighbours; they are put back to first half, second half.
    pub(crate) interleaved_heads: Option<usize>,
}

impl<'a> Part<'a> {
    pub(crate) fn new(name: &'a str, rows: usize) -> Self {
        Part { name, rows, interleaved_heads: None }
    }
}

impl Loader<'_> {
    /// Stacks `parts` along the rows: one product instead of several. Only neighbours of the same type
    /// can share a matrix.
    pub(crate) fn stack(&mut self, parts: &[Part<'_>], cols: usize) -> Result<Vec<Matrix>, LoadError> {
        let dtypes =
            parts.iter().map(|part| self.dtype(part, cols)).collect::<Result<Vec<GgmlDType>, _>>()?;
        let mut matrices = Vec::new();
        let mut rest = parts;
        for run in dtypes.chunk_by(|a, b| a == b) {
            let (own, others) = rest.split_at(run.len());
            matrices.push(self.read_stack(own, run[0], cols)?);
            rest = others;
        }
        Ok(matrices)
    }

    /// The type of a tensor that must be there with this shape.
    fn dtype(&self, part: &Part<'_>, cols: usize) -> Result<GgmlDType, LoadError> {
        let entry = self.files.entry(part.name, &[part.rows, cols])?;
        let got = match &entry.dtype {
            Ok(dtype) if Blocks::zeros(*dtype, 0).is_some() => return Ok(*dtype),
            Ok(dtype) => format!("{dtype:?}"),
            Err(name) => name.clone(),
        };
        Err(LoadError::Dtype {
            path: self.files.file_path(entry).into(),
            tensor: part.name.into(),
            got,
            supported: SUPPORTED,
        })
    }

    /// One matrix of parts that all have type `dtype`.
    fn read_stack(&mut self, parts: &[Part<'_>], dtype: GgmlDType, cols: usize) -> Result<Matrix, LoadError> {
        let rows = parts.iter().map(|part| part.rows).sum();
        let mut blocks = Blocks::zeros(dtype, rows * cols).unwrap_or(Blocks::F32(Vec::new()));
        let row_bytes = cols / dtype.block_size() * dtype.type_size();
        let mut rest = blocks.bytes_mut();
        for part in parts {
            let entry = self.files.entry(part.name, &[part.rows, cols])?;
            let (own, others) = rest.split_at_mut(part.rows * row_bytes);
            self.files.read(part.name, entry, 0, own)?;
            if let Some(heads) = part.interleaved_heads {
                own.chunks_exact_mut(own.len() / heads).for_each(|head| deinterleave(head, row_bytes));
            }
            self.mark_used(part.name);
            self.count(dtype, own.len());
            rest = others;
        }
        Ok(Matrix { rows, cols, blocks })
    }
}

/// Even rows first, then the odd ones.
fn deinterleave(head: &mut [u8], row_bytes: usize) {
    let source = head.to_vec();
    let half = source.len() / row_bytes / 2;
    for (i, row) in source.chunks_exact(row_bytes).enumerate() {
        let target = i / 2 + (i % 2) * half;
        head[target * row_bytes..][..row_bytes].copy_from_slice(row);
    }
}

/// A float tensor as f32.
pub(crate) fn read_floats(
    files: &WeightFiles,
    name: &str,
    entry: &TensorEntry,
) -> Result<Vec<f32>, LoadError> {
    fn read<T: Plain>(files: &WeightFiles, name: &str, entry: &TensorEntry) -> Result<Vec<f32>, LoadError> {
        let elements = entry.shape.iter().product();
        let mut raw = vec![T::zeros(); elements];
        files.read(name, entry, 0, bytes_mut(&mut raw))?;
        let mut values = vec![0f32; elements];
        T::to_float(&raw, &mut values);
        Ok(values)
    }
    let got = match &entry.dtype {
        Ok(GgmlDType::F32) => return read::<f32>(files, name, entry),
        Ok(GgmlDType::F16) => return read::<f16>(files, name, entry),
        Ok(GgmlDType::BF16) => return read::<bf16>(files, name, entry),
        Ok(other) => format!("{other:?}"),
        Err(name) => name.clone(),
    };
    Err(LoadError::Dtype {
        path: files.file_path(entry).into(),
        tensor: name.into(),
        got,
        supported: "F32, F16, BF16",
    })
}
