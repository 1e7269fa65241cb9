//! Model files: which tensors there are, and their bytes.
//!
//! Both formats come down to one directory of tensors ([`WeightFiles`]). Bytes are read into the
//! place where they stay, one tensor at a time: no file is mapped, so a file that shrinks while the
//! model runs cannot crash the process, and the peak of memory is the weights themselves.

pub(crate) mod blocks;
pub(crate) mod gguf;
pub(crate) mod linear;
mod product;
pub(crate) mod safetensors;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, HashSet};
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use candle_core::quantized::GgmlDType;

use crate::error::LoadError;

/// Where the bytes of a tensor are.
#[derive(Debug, Clone)]
pub(crate) struct TensorEntry {
    /// Index into [`WeightFiles::files`].
    pub(crate) file: usize,
    /// From the start of the file.
    pub(crate) offset: u64,
    /// Length in bytes.
    pub(crate) bytes: u64,
    /// Rows first: `[out, in]` for a matrix.
    pub(crate) shape: Vec<usize>,
    /// `Err` is the name of a type that products cannot read.
    pub(crate) dtype: Result<GgmlDType, String>,
}

/// The tensors of a model.
#[derive(Debug)]
pub(crate) struct WeightFiles {
    /// The model file, or the folder of the shards: named in errors about missing tensors.
    pub(crate) path: PathBuf,
    pub(crate) files: Vec<(PathBuf, Mutex<File>)>,
    pub(crate) tensors: BTreeMap<String, TensorEntry>,
}

impl WeightFiles {
    pub(crate) fn contains(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    /// The entry of a tensor that must be there with this shape.
    pub(crate) fn entry(&self, name: &str, expected: &[usize]) -> Result<&TensorEntry, LoadError> {
        let entry = self
            .tensors
            .get(name)
            .ok_or_else(|| LoadError::MissingTensor { path: self.path.clone(), tensor: name.into() })?;
        if entry.shape != expected {
            return Err(LoadError::Shape {
                path: self.file_path(entry).into(),
                tensor: name.into(),
                got: entry.shape.clone(),
                expected: expected.into(),
            });
        }
        Ok(entry)
    }

    pub(crate) fn file_path(&self, entry: &TensorEntry) -> &Path {
        &self.files[entry.file].0
    }

    /// Fills `out` with the tensor's bytes from `offset` on.
    pub(crate) fn read(
        &self,
        name: &str,
        entry: &TensorEntry,
        offset: u64,
        out: &mut [u8],
    ) -> Result<(), LoadError> {
        let (path, file) = &self.files[entry.file];
        let mut file = file.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        file.seek(SeekFrom::Start(entry.offset + offset)).and_then(|_| file.read_exact(out)).map_err(
            |source| {
                if source.kind() == std::io::ErrorKind::UnexpectedEof {
                    LoadError::Malformed {
                        path: path.clone(),
                        reason: format!("the file ends inside of tensor {name}"),
                    }
                } else {
                    LoadError::Io { path: path.clone(), source }
                }
            },
        )
    }
}

/// To sort names by, layers by their number: 2 comes before 10.
pub(crate) fn layer_order(name: &str) -> Vec<Result<u64, &str>> {
    name.split('.').map(|part| part.parse().map_err(|_| part)).collect()
}

/// What a file is that often lies where weights should be, from its first bytes.
fn not_weights(start: &[u8]) -> Option<&'static str> {
    if start.is_empty() {
        Some("the file is empty")
    } else if start.starts_with(b"version ") {
        Some("it is a Git LFS pointer, not the weights: fetch them with `git lfs pull`")
    } else if start.trim_ascii_start().starts_with(b"<") {
        Some("it is a web page, not the weights")
    } else {
        None
    }
}

/// Tensors of one type.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct DtypeCount {
    /// How many.
    pub tensors: usize,
    /// Bytes in memory.
    pub bytes: usize,
}

/// What the weights take in memory.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct WeightSummary {
    /// All weights; a matrix that is shared counts once.
    pub bytes: usize,
    /// By type, which is that of the file; vectors are F32 whatever they were.
    pub by_dtype: BTreeMap<String, DtypeCount>,
}

/// Reads tensors in the form in which the model keeps them, and keeps the books.
pub(crate) struct Loader<'a> {
    pub(crate) files: &'a WeightFiles,
    pub(crate) summary: WeightSummary,
    used: HashSet<String>,
}

impl<'a> Loader<'a> {
    pub(crate) fn new(files: &'a WeightFiles) -> Self {
        Loader { files, summary: WeightSummary::default(), used: HashSet::new() }
    }

    fn count(&mut self, dtype: GgmlDType, bytes: usize) {
        let count = self.summary.by_dtype.entry(format!("{dtype:?}")).or_default();
        count.tensors += 1;
        count.bytes += bytes;
        self.summary.bytes += bytes;
    }

    /// A vector (norm weight, bias) as f32.
    pub(crate) fn vector(&mut self, name: &str, len: usize) -> Result<Vec<f32>, LoadError> {
        let entry = self.files.entry(name, &[len])?;
        let values = blocks::read_floats(self.files, name, entry)?;
        self.used.insert(name.into());
        self.count(GgmlDType::F32, len * 4);
        Ok(values)
    }

    /// Tensors that the file has and the model does not use.
    pub(crate) fn unused(&self) -> Vec<&str> {
        let mut names: Vec<&str> = (self.files.tensors.keys())
            .map(String::as_str)
            .filter(|name| !self.used.contains(*name))
            .collect();
        names.sort_by_key(|&name| layer_order(name));
        names
    }

    /// Counts a tensor as used without reading it.
    pub(crate) fn mark_used(&mut self, name: &str) {
        self.used.insert(name.into());
    }
}
