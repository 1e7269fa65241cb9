//! Weight matrices in the types in which they stay in memory, and the repacking of those types that
//! candle has no vector kernel for.
#![expect(unsafe_code, reason = "file bytes are read straight into typed blocks")]

use candle_core::quantized::GgmlDType;
use candle_core::quantized::k_quants::{
    self, BlockQ2K, BlockQ3K, BlockQ4_0, BlockQ4_1, BlockQ4K, BlockQ5_1, BlockQ5K, BlockQ6K, BlockQ8_0,
    GgmlType,
};
use half::{bf16, f16};
use rayon::prelude::*;

use super::{Loader, TensorEntry, WeightFiles};
use crate::error::LoadError;

const SUPPORTED: &str = "F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K";

/// Bytes of a file that are converted at a time.
const CHUNK_BYTES: usize = 1 << 20;

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
            Blocks::Q8_0($blocks) => $body,
            Blocks::Q2K($blocks) => $body,
            Blocks::Q3K($blocks) => $body,
            Blocks::Q4K($blocks) => $body,
            Blocks::Q5K($blocks) => $body,
            Blocks::Q6K($blocks) => $body,
        }
    };
}

/// The type in memory of a tensor that has `dtype` in the file; `None` if it is not supported.
fn dtype_in_memory(dtype: GgmlDType) -> Option<GgmlDType> {
    use GgmlDType::*;
    match dtype {
        F32 | F16 | BF16 | Q4_0 | Q8_0 | Q2K | Q3K | Q4K | Q5K | Q6K => Some(dtype),
        Q4_1 | Q5_0 | Q5_1 => Some(Q8_0),
        _ => None,
    }
}

impl Blocks {
    /// `elements` zeros.
    fn zeros(dtype: GgmlDType, elements: usize) -> Self {
        fn vec<T: GgmlType>(elements: usize) -> Vec<T> {
            vec![T::zeros(); elements / T::BLCK_SIZE]
        }
        match dtype {
            GgmlDType::F32 => Blocks::F32(vec(elements)),
            GgmlDType::F16 => Blocks::F16(vec(elements)),
            GgmlDType::BF16 => Blocks::Bf16(vec(elements)),
            GgmlDType::Q4_0 => Blocks::Q4_0(vec(elements)),
            GgmlDType::Q2K => Blocks::Q2K(vec(elements)),
            GgmlDType::Q3K => Blocks::Q3K(vec(elements)),
            GgmlDType::Q4K => Blocks::Q4K(vec(elements)),
            GgmlDType::Q5K => Blocks::Q5K(vec(elements)),
            GgmlDType::Q6K => Blocks::Q6K(vec(elements)),
            _ => Blocks::Q8_0(vec(elements)),
        }
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
    pub(crate) fn bytes(&self) -> usize {
        with_blocks!(&self.blocks, blocks => size_of_val(&blocks[..]))
    }

    /// `out = rows start.. of the matrix` as f32; `out.len()` is a multiple of `cols`.
    pub(crate) fn dequantize_rows(&self, start: usize, out: &mut [f32]) {
        fn rows<T: GgmlType>(blocks: &[T], start: usize, out: &mut [f32]) {
            let start = start / T::BLCK_SIZE;
            T::to_float(&blocks[start..start + out.len() / T::BLCK_SIZE], out);
        }
        with_blocks!(&self.blocks, blocks => rows(blocks, start * self.cols, out))
    }

    /// `out [m, rows] = x [m, cols] * self^T`. A row of the result depends on that row of `x` alone,
    /// not on `m`.
    pub(crate) fn matmul(&self, m: usize, x: &[f32], out: &mut [f32]) -> candle_core::Result<()> {
        with_blocks!(&self.blocks, blocks => k_quants::matmul((m, self.cols, self.rows), x, blocks, out))
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
    /// Stacks `parts` along the rows: one product instead of several. Only neighbours of the same
    /// type in memory can share a matrix.
    pub(crate) fn stack(&mut self, parts: &[Part<'_>], cols: usize) -> Result<Vec<Matrix>, LoadError> {
        let dtypes = parts
            .iter()
            .map(|part| {
                let entry = self.files.entry(part.name, &[part.rows, cols])?;
                self.supported(part.name, entry, cols)
            })
            .collect::<Result<Vec<_>, _>>()?;
        let mut matrices = Vec::new();
        let mut first = 0;
        while first < parts.len() {
            let (_, dtype) = dtypes[first];
            let run = dtypes[first..].iter().take_while(|(_, other)| *other == dtype).count();
            let rows = parts[first..first + run].iter().map(|part| part.rows).sum();
            let mut matrix = Matrix { rows, cols, blocks: Blocks::zeros(dtype, rows * cols) };
            let mut row = 0;
            for (part, (in_file, _)) in parts[first..first + run].iter().zip(&dtypes[first..]) {
                self.fill(&mut matrix, row, *in_file, part)?;
                row += part.rows;
                self.mark_used(part.name);
                self.count(dtype, matrix.bytes() / rows * part.rows);
                if *in_file != dtype {
                    *self.summary.repacked.entry(format!("{in_file:?}")).or_default() += 1;
                }
            }
            matrices.push(matrix);
            first += run;
        }
        Ok(matrices)
    }

    /// Type in the file and type in memory.
    fn supported(
        &self,
        name: &str,
        entry: &TensorEntry,
        cols: usize,
    ) -> Result<(GgmlDType, GgmlDType), LoadError> {
        let refuse = |got: String| LoadError::Dtype {
            path: self.files.file_path(entry).into(),
            tensor: name.into(),
            got,
            supported: SUPPORTED,
        };
        let in_file = entry.dtype.clone().map_err(refuse)?;
        let in_memory = dtype_in_memory(in_file).ok_or_else(|| refuse(format!("{in_file:?}")))?;
        if !cols.is_multiple_of(in_file.block_size()) {
            return Err(LoadError::Malformed {
                path: self.files.file_path(entry).into(),
                reason: format!(
                    "tensor {name} has rows of {cols} elements in blocks of {}",
                    in_file.block_size()
                ),
            });
        }
        Ok((in_file, in_memory))
    }

    /// Reads a part into the rows of `matrix` from `row` on.
    fn fill(
        &self,
        matrix: &mut Matrix,
        row: usize,
        in_file: GgmlDType,
        part: &Part<'_>,
    ) -> Result<(), LoadError> {
        let entry = self.files.entry(part.name, &[part.rows, matrix.cols])?;
        let row_bytes = matrix.bytes() / matrix.rows;
        match (&mut matrix.blocks, in_file) {
            (Blocks::Q8_0(blocks), GgmlDType::Q4_1 | GgmlDType::Q5_0 | GgmlDType::Q5_1) => {
                let row_blocks = matrix.cols / BlockQ8_0::BLCK_SIZE;
                let out = &mut blocks[row * row_blocks..][..part.rows * row_blocks];
                match in_file {
                    GgmlDType::Q4_1 => repack::<BlockQ4_1>(self.files, part.name, entry, out)?,
                    GgmlDType::Q5_1 => repack::<BlockQ5_1>(self.files, part.name, entry, out)?,
                    _ => repack_q5_0(self.files, part.name, entry, out)?,
                }
            }
            (blocks, _) => {
                let out = &mut blocks.bytes_mut()[row * row_bytes..][..part.rows * row_bytes];
                self.files.read(part.name, entry, 0, out)?;
            }
        }
        if let Some(heads) = part.interleaved_heads {
            let rows = &mut matrix.blocks.bytes_mut()[row * row_bytes..][..part.rows * row_bytes];
            for head in rows.chunks_exact_mut(part.rows / heads * row_bytes) {
                deinterleave(head, row_bytes);
            }
        }
        Ok(())
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

/// Through f32, with a new scale per block.
fn repack<T: Plain>(
    files: &WeightFiles,
    name: &str,
    entry: &TensorEntry,
    out: &mut [BlockQ8_0],
) -> Result<(), LoadError> {
    let mut chunk = vec![T::zeros(); (CHUNK_BYTES / size_of::<T>()).min(out.len())];
    let mut offset = 0;
    for out in out.chunks_mut(chunk.len()) {
        let chunk = &mut chunk[..out.len()];
        files.read(name, entry, offset, bytes_mut(chunk))?;
        offset += size_of_val(chunk) as u64;
        chunk.par_chunks(256).zip(out.par_chunks_mut(256)).for_each(|(blocks, out)| {
            let mut values = [0f32; 256 * 32];
            let values = &mut values[..blocks.len() * 32];
            T::to_float(blocks, values);
            BlockQ8_0::from_float(values, out);
        });
    }
    Ok(())
}

/// Without loss: the scale is kept, and codes of 5 bits minus 16 fit into 8.
fn repack_q5_0(
    files: &WeightFiles,
    name: &str,
    entry: &TensorEntry,
    out: &mut [BlockQ8_0],
) -> Result<(), LoadError> {
    const BLOCK: usize = 22; // scale 2, high bits 4, low nibbles 16
    let chunk_blocks = (CHUNK_BYTES / BLOCK).min(out.len());
    let mut chunk = vec![0u8; chunk_blocks * BLOCK];
    let mut offset = 0;
    for out in out.chunks_mut(chunk_blocks) {
        let chunk = &mut chunk[..out.len() * BLOCK];
        files.read(name, entry, offset, chunk)?;
        offset += chunk.len() as u64;
        let out = bytes_mut(out);
        chunk.par_chunks(256 * BLOCK).zip(out.par_chunks_mut(256 * 34)).for_each(|(chunk, out)| {
            for (block, out) in chunk.chunks_exact(BLOCK).zip(out.chunks_exact_mut(34)) {
                let high = u32::from_le_bytes([block[2], block[3], block[4], block[5]]);
                out[..2].copy_from_slice(&block[..2]);
                for (i, nibbles) in block[6..].iter().enumerate() {
                    let first = nibbles & 15 | ((high >> i & 1) as u8) << 4;
                    let second = nibbles >> 4 | ((high >> (i + 16) & 1) as u8) << 4;
                    out[2 + i] = first.wrapping_sub(16);
                    out[18 + i] = second.wrapping_sub(16);
                }
            }
        });
    }
    Ok(())
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
