//! GGUF files: metadata and the directory of tensors.
//!
//! Read here and not by candle because a file is input: candle's reader divides by a
//! `general.alignment` of 0, takes 32 bytes for each byte of an array, and does not say which tensor
//! has a type that it does not know.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::fs::File;
use std::io::{BufReader, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use candle_core::quantized::GgmlDType;

use super::{TensorEntry, WeightFiles, not_weights};
use crate::error::LoadError;

/// Arrays of more elements than this are vocabularies: hyper-parameters have one per layer.
const MAX_ARRAY: u64 = 4096;

/// Bytes of a name. The format allows 64 for tensors and 65535 for keys; no key comes near that.
const MAX_NAME: usize = 1024;

/// A metadata value.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Value {
    Int(i128),
    Float(f64),
    Bool(bool),
    String(String),
    Array(Vec<Value>),
    /// A list of texts, of a vocabulary.
    Texts(Texts),
    /// An array of more than [`MAX_ARRAY`] numbers, of a vocabulary.
    Numbers(Vec<f64>),
    /// An array that was not kept.
    Skipped,
}

/// Texts one behind the other: a vocabulary in little more than the bytes it has in the file.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Texts {
    text: String,
    /// Where each text ends.
    ends: Vec<usize>,
}

impl Texts {
    /// How many.
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// The text at `index`.
    pub fn get(&self, index: usize) -> Option<&str> {
        let end = *self.ends.get(index)?;
        let start = index.checked_sub(1).map_or(0, |before| self.ends[before]);
        Some(&self.text[start..end])
    }

    /// All of them, in order.
    pub fn iter(&self) -> impl Iterator<Item = &str> {
        let starts = std::iter::once(0).chain(self.ends.iter().copied());
        self.ends.iter().zip(starts).map(|(&end, start)| &self.text[start..end])
    }
}

impl<'a> FromIterator<&'a str> for Texts {
    fn from_iter<I: IntoIterator<Item = &'a str>>(texts: I) -> Self {
        let mut all = Texts::default();
        for text in texts {
            all.text.push_str(text);
            all.ends.push(all.text.len());
        }
        all
    }
}

/// Which arrays are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Keep {
    /// Those that hyper-parameters have.
    HyperParameters,
    /// Those of tokenizers, too.
    Vocabulary,
}

impl fmt::Display for Value {
    /// For messages: text in quotes and without control characters, lists by their kind.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Value::Int(number) => write!(f, "{number}"),
            Value::Float(number) => write!(f, "{number}"),
            Value::Bool(flag) => write!(f, "{flag}"),
            Value::String(text) if text.len() > MAX_NAME => f.write_str("a long text"),
            Value::String(text) => write!(f, "{text:?}"),
            Value::Array(values) => write!(f, "a list of {}", values.len()),
            Value::Texts(texts) => write!(f, "a list of {} texts", texts.len()),
            Value::Numbers(numbers) => write!(f, "a list of {}", numbers.len()),
            Value::Skipped => f.write_str("a long list"),
        }
    }
}

/// A GGUF file, its weights still on disk.
#[derive(Debug)]
pub(crate) struct Gguf {
    pub(crate) metadata: HashMap<String, Value>,
    pub(crate) files: WeightFiles,
}

impl Gguf {
    /// Reads everything but weights and vocabulary.
    pub(crate) fn open(path: &Path) -> Result<Self, LoadError> {
        Self::read(path, Keep::HyperParameters)
    }

    /// Reads everything but the weights, and of the metadata's arrays what `keep` says.
    pub(crate) fn read(path: &Path, keep: Keep) -> Result<Self, LoadError> {
        let io = |source| LoadError::Io { path: path.into(), source };
        let file = File::open(path).map_err(io)?;
        let size = file.metadata().map_err(io)?.len();
        let mut reader = Reader { file: BufReader::new(file), path: path.into(), left: size, keep };
        reader.magic()?;
        let tensor_count = reader.u64("tensor count")?;
        let metadata_count = reader.u64("metadata count")?;
        let mut metadata = HashMap::new();
        for _ in 0..metadata_count {
            let key = reader.name("a metadata key")?;
            let kind = reader.u32(&key)?;
            let value = reader.value(&key, kind, 0)?;
            if metadata.insert(key.clone(), value).is_some() {
                return Err(reader.malformed(format!("metadata key {key} is there twice")));
            }
        }
        let mut tensors = BTreeMap::new();
        for _ in 0..tensor_count {
            let (name, entry) = reader.tensor()?;
            if tensors.contains_key(&name) {
                return Err(reader.malformed(format!("tensor {name} is there twice")));
            }
            tensors.insert(name, entry);
        }
        let alignment = match metadata.get("general.alignment") {
            None => 32,
            Some(Value::Int(alignment @ 1..=0x8000_0000)) if alignment.count_ones() == 1 => *alignment as u64,
            Some(other) => {
                return Err(reader.malformed(format!("general.alignment is {other}, not a power of two")));
            }
        };
        place(path, &mut tensors, (size - reader.left).next_multiple_of(alignment), size)?;
        let mut file = reader.file.into_inner();
        file.seek(SeekFrom::Start(0)).map_err(io)?;
        let files = vec![(path.to_path_buf(), Mutex::new(file))];
        Ok(Gguf { metadata, files: WeightFiles { path: path.into(), files, tensors } })
    }
}

/// Makes offsets count from the start of the file, and checks that no tensor leaves it or overlaps
/// another one.
fn place(
    path: &Path,
    tensors: &mut BTreeMap<String, TensorEntry>,
    data_start: u64,
    size: u64,
) -> Result<(), LoadError> {
    let malformed = |reason: String| LoadError::Malformed { path: path.into(), reason };
    let mut sorted: Vec<(&String, &mut TensorEntry)> = tensors.iter_mut().collect();
    sorted.sort_by_key(|(_, entry)| (entry.offset, entry.bytes));
    for (name, entry) in &mut sorted {
        let start = data_start.checked_add(entry.offset);
        let end = start.and_then(|start| start.checked_add(entry.bytes));
        match (start, end) {
            (Some(start), Some(end)) if end <= size => entry.offset = start,
            _ => {
                return Err(malformed(format!(
                    "tensor {name} is cut off: {} bytes at {} from {data_start}, in a file of {size} bytes",
                    entry.bytes, entry.offset
                )));
            }
        }
    }
    for pair in sorted.windows(2) {
        if pair[0].1.offset + pair[0].1.bytes > pair[1].1.offset {
            return Err(malformed(format!("tensors {} and {} overlap", pair[0].0, pair[1].0)));
        }
    }
    Ok(())
}

struct Reader {
    file: BufReader<File>,
    path: PathBuf,
    /// Bytes up to the end of the file.
    left: u64,
    keep: Keep,
}

impl Reader {
    fn malformed(&self, reason: String) -> LoadError {
        LoadError::Malformed { path: self.path.clone(), reason }
    }

    fn magic(&mut self) -> Result<(), LoadError> {
        let start = self.bytes(8.min(self.left), "the magic number")?;
        if let Some(what) = not_weights(&start) {
            return Err(self.malformed(what.into()));
        }
        if !start.starts_with(b"GGUF") {
            return Err(self.malformed("it does not start with GGUF".into()));
        }
        match start.get(4..8) {
            Some([2 | 3, 0, 0, 0]) => Ok(()),
            Some([0, 0, 0, version]) => {
                Err(self.malformed(format!("it is big-endian (version {version}), this reader is not")))
            }
            Some(version) => Err(self.malformed(format!(
                "its version is {}; supported are versions 2 and 3",
                version.iter().rev().fold(0u32, |number, byte| number << 8 | u32::from(*byte))
            ))),
            None => Err(self.malformed("it ends inside of its version".into())),
        }
    }

    /// `count` bytes, once it is known that the file has them.
    fn bytes(&mut self, count: u64, what: &str) -> Result<Vec<u8>, LoadError> {
        if count > self.left {
            return Err(self.malformed(format!(
                "the file ends inside of {what}: {count} bytes announced, {} left",
                self.left
            )));
        }
        let mut bytes = vec![0; count as usize];
        self.file
            .read_exact(&mut bytes)
            .map_err(|source| LoadError::Io { path: self.path.clone(), source })?;
        self.left -= count;
        Ok(bytes)
    }

    fn array<const N: usize>(&mut self, what: &str) -> Result<[u8; N], LoadError> {
        let bytes = self.bytes(N as u64, what)?;
        let mut array = [0; N];
        array.copy_from_slice(&bytes);
        Ok(array)
    }

    fn u32(&mut self, what: &str) -> Result<u32, LoadError> {
        Ok(u32::from_le_bytes(self.array(what)?))
    }

    fn u64(&mut self, what: &str) -> Result<u64, LoadError> {
        Ok(u64::from_le_bytes(self.array(what)?))
    }

    fn string(&mut self, what: &str) -> Result<String, LoadError> {
        let length = self.u64(what)?;
        Ok(String::from_utf8_lossy(&self.bytes(length, what)?).into_owned())
    }

    /// A key or a tensor's name: one line of text, fit for a message.
    fn name(&mut self, what: &str) -> Result<String, LoadError> {
        let length = self.u64(what)?;
        if length > MAX_NAME as u64 && length <= self.left {
            return Err(self.malformed(format!("{what} has {length} bytes, more than {MAX_NAME}")));
        }
        match String::from_utf8(self.bytes(length, what)?) {
            Ok(name) if !name.contains(char::is_control) => Ok(name),
            Ok(name) => Err(self.malformed(format!("{what} holds control characters: {name:?}"))),
            Err(error) => {
                let name = String::from_utf8_lossy(error.as_bytes()).into_owned();
                Err(self.malformed(format!("{what} is no UTF-8 text: {name:?}")))
            }
        }
    }

    fn skip(&mut self, count: u64, what: &str) -> Result<(), LoadError> {
        match i64::try_from(count) {
            Ok(step) if count <= self.left => {
                self.file
                    .seek_relative(step)
                    .map_err(|source| LoadError::Io { path: self.path.clone(), source })?;
                self.left -= count;
                Ok(())
            }
            _ => Err(self.malformed(format!(
                "the file ends inside of {what}: {count} bytes announced, {} left",
                self.left
            ))),
        }
    }

    fn value(&mut self, key: &str, kind: u32, depth: usize) -> Result<Value, LoadError> {
        Ok(match kind {
            0 => Value::Int(u8::from_le_bytes(self.array(key)?).into()),
            1 => Value::Int(i8::from_le_bytes(self.array(key)?).into()),
            2 => Value::Int(u16::from_le_bytes(self.array(key)?).into()),
            3 => Value::Int(i16::from_le_bytes(self.array(key)?).into()),
            4 => Value::Int(u32::from_le_bytes(self.array(key)?).into()),
            5 => Value::Int(i32::from_le_bytes(self.array(key)?).into()),
            6 => Value::Float(f32::from_le_bytes(self.array(key)?).into()),
            7 => match self.array(key)? {
                [0] => Value::Bool(false),
                [1] => Value::Bool(true),
                [other] => return Err(self.malformed(format!("{key} is a boolean of value {other}"))),
            },
            8 => Value::String(self.string(key)?),
            9 => self.array_value(key, depth)?,
            10 => Value::Int(u64::from_le_bytes(self.array(key)?).into()),
            11 => Value::Int(i64::from_le_bytes(self.array(key)?).into()),
            12 => Value::Float(f64::from_le_bytes(self.array(key)?)),
            other => return Err(self.malformed(format!("{key} has the unknown value type {other}"))),
        })
    }

    fn array_value(&mut self, key: &str, depth: usize) -> Result<Value, LoadError> {
        if depth > 0 {
            return Err(self.malformed(format!("{key} is an array of arrays")));
        }
        let kind = self.u32(key)?;
        let length = self.u64(key)?;
        let element_bytes = match kind {
            0 | 1 | 7 => 1,
            2 | 3 => 2,
            4..=6 => 4,
            10..=12 => 8,
            _ => 0,
        };
        let vocabulary = self.keep == Keep::Vocabulary;
        if length > MAX_ARRAY && element_bytes > 0 {
            let bytes = length.saturating_mul(element_bytes);
            if vocabulary && kind != 7 {
                return self.numbers(key, kind, bytes, element_bytes as usize).map(Value::Numbers);
            }
            self.skip(bytes, key)?;
            return Ok(Value::Skipped);
        }
        if kind == 8 && vocabulary {
            return self.texts(key, length).map(Value::Texts);
        }
        if kind == 8 {
            for _ in 0..length {
                let bytes = self.u64(key)?;
                self.skip(bytes, key)?;
            }
            return Ok(Value::Skipped);
        }
        (0..length).map(|_| self.value(key, kind, depth + 1)).collect::<Result<Vec<_>, _>>().map(Value::Array)
    }

    /// What is no UTF-8 in a text becomes U+FFFD.
    fn texts(&mut self, key: &str, length: u64) -> Result<Texts, LoadError> {
        let mut texts = Texts::default();
        for _ in 0..length {
            let bytes = self.u64(key)?;
            texts.text.push_str(&String::from_utf8_lossy(&self.bytes(bytes, key)?));
            texts.ends.push(texts.text.len());
        }
        Ok(texts)
    }

    /// `bytes` bytes of numbers that take `width` each.
    fn numbers(&mut self, key: &str, kind: u32, bytes: u64, width: usize) -> Result<Vec<f64>, LoadError> {
        fn sized<const N: usize>(bytes: &[u8]) -> [u8; N] {
            let mut array = [0; N];
            array.copy_from_slice(bytes);
            array
        }
        let number = |at: &[u8]| match kind {
            0 => f64::from(at[0]),
            1 => f64::from(at[0] as i8),
            2 => u16::from_le_bytes(sized(at)).into(),
            3 => i16::from_le_bytes(sized(at)).into(),
            4 => u32::from_le_bytes(sized(at)).into(),
            5 => i32::from_le_bytes(sized(at)).into(),
            6 => f32::from_le_bytes(sized(at)).into(),
            10 => u64::from_le_bytes(sized(at)) as f64,
            11 => i64::from_le_bytes(sized(at)) as f64,
            _ => f64::from_le_bytes(sized(at)),
        };
        let bytes = self.bytes(bytes, key)?;
        Ok(bytes.chunks_exact(width).map(number).collect())
    }

    /// Name, and an entry whose offset counts from the start of the data.
    fn tensor(&mut self) -> Result<(String, TensorEntry), LoadError> {
        let name = self.name("a tensor name")?;
        let dims = self.u32(&name)?;
        if dims > 4 {
            return Err(self.malformed(format!("tensor {name} has {dims} dimensions")));
        }
        let mut shape = Vec::new();
        for _ in 0..dims {
            let dim = self.u64(&name)?;
            shape.push(usize::try_from(dim).unwrap_or(usize::MAX));
        }
        let row = shape.first().copied().unwrap_or(1);
        shape.reverse();
        let dtype = dtype(self.u32(&name)?);
        let offset = self.u64(&name)?;
        let elements = shape.iter().try_fold(1usize, |product, dim| product.checked_mul(*dim));
        let bytes = match &dtype {
            Err(_) => Some(0), // refused if it is used
            Ok(dtype) if !row.is_multiple_of(dtype.block_size()) => {
                return Err(self.malformed(format!(
                    "tensor {name} has rows of {row} elements, {dtype:?} has blocks of {}",
                    dtype.block_size()
                )));
            }
            Ok(dtype) => {
                elements.and_then(|elements| (elements / dtype.block_size()).checked_mul(dtype.type_size()))
            }
        };
        let Some(bytes) = bytes else {
            return Err(self.malformed(format!("tensor {name} of shape {shape:?} is impossibly large")));
        };
        Ok((name, TensorEntry { file: 0, offset, bytes: bytes as u64, shape, dtype }))
    }
}

/// By its number in the file; `Err` is the name of one that candle has no blocks for.
fn dtype(number: u32) -> Result<GgmlDType, String> {
    Ok(match number {
        0 => GgmlDType::F32,
        1 => GgmlDType::F16,
        2 => GgmlDType::Q4_0,
        3 => GgmlDType::Q4_1,
        6 => GgmlDType::Q5_0,
        7 => GgmlDType::Q5_1,
        8 => GgmlDType::Q8_0,
        9 => GgmlDType::Q8_1,
        10 => GgmlDType::Q2K,
        11 => GgmlDType::Q3K,
        12 => GgmlDType::Q4K,
        13 => GgmlDType::Q5K,
        14 => GgmlDType::Q6K,
        15 => GgmlDType::Q8K,
        30 => GgmlDType::BF16,
        16 => return Err("IQ2_XXS".into()),
        17 => return Err("IQ2_XS".into()),
        18 => return Err("IQ3_XXS".into()),
        19 => return Err("IQ1_S".into()),
        20 => return Err("IQ4_NL".into()),
        21 => return Err("IQ3_S".into()),
        22 => return Err("IQ2_S".into()),
        23 => return Err("IQ4_XS".into()),
        29 => return Err("IQ1_M".into()),
        39 => return Err("MXFP4".into()),
        other => return Err(format!("number {other}")),
    })
}
