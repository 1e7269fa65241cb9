//! Folders of `.safetensors` files: which shards belong to the model, and what is in them.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use candle_core::quantized::GgmlDType;
use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};

use super::{TensorEntry, WeightFiles, layer_order, not_weights};
use crate::error::LoadError;

type Entries = Vec<(String, TensorEntry)>;

const INDEX: &str = "model.safetensors.index.json";

/// The tensors of a model folder.
///
/// With an index file, the shards that it names, all of which must be there. Without one,
/// `model.safetensors`, or else every `.safetensors` file of the folder; names that end in
/// `-00001-of-00002` must be complete.
pub(crate) fn open(folder: &Path) -> Result<WeightFiles, LoadError> {
    let index = folder.join(INDEX);
    let (shards, weight_map) = if index.is_file() {
        let weight_map = read_weight_map(&index)?;
        let mut shards: Vec<String> = weight_map.values().cloned().collect();
        shards.sort_unstable();
        shards.dedup();
        (shards, weight_map)
    } else {
        (shards_without_index(folder)?, BTreeMap::new())
    };
    for shard in &shards {
        if !folder.join(shard).is_file() {
            return Err(LoadError::Shards {
                path: index,
                reason: format!("it names {shard}, which is not in the folder"),
            });
        }
    }
    let mut files = Vec::new();
    let mut tensors: BTreeMap<String, TensorEntry> = BTreeMap::new();
    for shard in &shards {
        let path = folder.join(shard);
        let (file, entries) = open_file(&path, files.len())?;
        for (name, entry) in entries {
            match weight_map.get(&name) {
                Some(owner) if owner != shard => continue,
                None if !weight_map.is_empty() => {
                    tracing::warn!("{} holds {name}, which {INDEX} does not list", path.display());
                }
                _ => {}
            }
            if let Some(other) = tensors.insert(name.clone(), entry) {
                let other: &(PathBuf, Mutex<File>) = &files[other.file];
                return Err(LoadError::Shards {
                    path,
                    reason: format!("tensor {name} is also in {}", other.0.display()),
                });
            }
        }
        files.push((path, file));
    }
    let missing = weight_map.iter().filter(|(name, _)| !tensors.contains_key(*name));
    if let Some((name, shard)) = missing.min_by_key(|&(name, _)| layer_order(name)) {
        return Err(LoadError::MissingTensor { path: folder.join(shard), tensor: name.clone() });
    }
    Ok(WeightFiles { path: folder.into(), files, tensors })
}

/// Tensor name to shard name.
fn read_weight_map(path: &Path) -> Result<BTreeMap<String, String>, LoadError> {
    #[derive(serde::Deserialize)]
    struct Index {
        weight_map: BTreeMap<String, String>,
    }
    let refuse = |reason: String| LoadError::Shards { path: path.into(), reason };
    let text = std::fs::read_to_string(path).map_err(|source| LoadError::Io { path: path.into(), source })?;
    let index: Index = serde_json::from_str(&text).map_err(|error| refuse(error.to_string()))?;
    if index.weight_map.is_empty() {
        return Err(refuse("weight_map is empty".into()));
    }
    for (tensor, shard) in &index.weight_map {
        let plain = Path::new(shard).file_name().is_some_and(|name| name == shard.as_str());
        if !plain || shard.contains(['/', '\\']) {
            return Err(refuse(format!(
                "{tensor} is mapped to {shard:?}, which is not a plain file name of this folder"
            )));
        }
    }
    Ok(index.weight_map)
}

fn shards_without_index(folder: &Path) -> Result<Vec<String>, LoadError> {
    let listing =
        std::fs::read_dir(folder).map_err(|source| LoadError::Io { path: folder.into(), source })?;
    let mut names = Vec::new();
    for item in listing {
        let item = item.map_err(|source| LoadError::Io { path: folder.into(), source })?;
        if let Ok(name) = item.file_name().into_string()
            && name.ends_with(".safetensors")
        {
            names.push(name);
        }
    }
    names.sort_unstable();
    if names.iter().any(|name| name == "model.safetensors") {
        for stray in names.iter().filter(|name| *name != "model.safetensors") {
            tracing::warn!("{} is not read: the model is model.safetensors", folder.join(stray).display());
        }
        return Ok(vec!["model.safetensors".into()]);
    }
    if names.is_empty() {
        return Err(LoadError::NotAModel { path: folder.into() });
    }
    for name in &names {
        let Some((stem, total)) = shard_of(name) else { continue };
        for number in 1..=total {
            let shard = format!("{stem}-{number:05}-of-{total:05}.safetensors");
            if !names.contains(&shard) {
                return Err(LoadError::Shards {
                    path: folder.into(),
                    reason: format!("{name} is one of {total} shards, but {shard} is not there"),
                });
            }
        }
    }
    Ok(names)
}

/// `model-00001-of-00002.safetensors` to `("model", 2)`.
fn shard_of(name: &str) -> Option<(&str, u32)> {
    let (rest, total) = name.strip_suffix(".safetensors")?.rsplit_once("-of-")?;
    let (stem, number) = rest.rsplit_once('-')?;
    (number.len() == 5 && total.len() == 5).then_some(())?;
    number.parse::<u32>().ok()?;
    Some((stem, total.parse().ok()?))
}

/// One file, the `index`th of the model: its handle and its tensors, layer by layer.
pub(crate) fn open_file(path: &Path, index: usize) -> Result<(Mutex<File>, Entries), LoadError> {
    let io = |source| LoadError::Io { path: path.into(), source };
    let malformed = |reason: String| LoadError::Malformed { path: path.into(), reason };
    let mut file = File::open(path).map_err(io)?;
    let file_bytes = file.metadata().map_err(io)?.len();
    let header = read_header(path, &mut file, file_bytes)?;
    let metadata: Metadata = serde_json::from_slice(&header).map_err(|error| {
        malformed(match culprit(&header) {
            Some((tensor, reason)) => format!("tensor {tensor}: {reason}"),
            None => format!("the header is not valid: {error}"),
        })
    })?;
    let data_start = 8 + header.len() as u64;
    let data_bytes = metadata.data_len() as u64;
    if data_start + data_bytes != file_bytes {
        let data_here = file_bytes - data_start;
        let cut = metadata
            .tensors()
            .into_iter()
            .filter(|(_, info)| info.data_offsets.1 as u64 > data_here)
            .min_by_key(|(name, info)| (info.data_offsets, name.clone()));
        return Err(malformed(match cut {
            Some((name, _)) => {
                format!("the tensors take {data_bytes} bytes and the file has {data_here}: {name} is cut off")
            }
            None => format!(
                "the tensors take {data_bytes} bytes and the file has {data_here}: the rest is unaccounted for"
            ),
        }));
    }
    let mut entries: Entries = metadata
        .tensors()
        .into_iter()
        .map(|(name, info)| {
            let (start, end) = info.data_offsets;
            let entry = TensorEntry {
                file: index,
                offset: data_start + start as u64,
                bytes: (end - start) as u64,
                shape: info.shape.clone(),
                dtype: match info.dtype {
                    Dtype::F32 => Ok(GgmlDType::F32),
                    Dtype::F16 => Ok(GgmlDType::F16),
                    Dtype::BF16 => Ok(GgmlDType::BF16),
                    other => Err(format!("{other:?}")),
                },
            };
            (name, entry)
        })
        .collect();
    entries.sort_by(|(a, _), (b, _)| layer_order(a).cmp(&layer_order(b)));
    Ok((Mutex::new(file), entries))
}

/// The JSON header; never allocates more than the file has.
fn read_header(path: &Path, file: &mut File, file_bytes: u64) -> Result<Vec<u8>, LoadError> {
    let io = |source| LoadError::Io { path: path.into(), source };
    let malformed = |reason: String| LoadError::Malformed { path: path.into(), reason };
    let mut start = [0u8; 8];
    let present = file_bytes.min(8) as usize;
    file.read_exact(&mut start[..present]).map_err(io)?;
    if let Some(what) = not_weights(&start[..present]) {
        return Err(malformed(what.into()));
    }
    if present < 8 {
        return Err(malformed(format!("it has {present} bytes, less than the header's length field")));
    }
    let header_bytes = u64::from_le_bytes(start);
    if header_bytes > file_bytes - 8 {
        return Err(malformed(format!(
            "it announces a header of {header_bytes} bytes, but has {file_bytes} bytes in all"
        )));
    }
    let mut header = vec![0u8; header_bytes as usize];
    file.read_exact(&mut header).map_err(io)?;
    Ok(header)
}

/// The first tensor of a refused header that is wrong by itself.
fn culprit(header: &[u8]) -> Option<(String, String)> {
    let entries: BTreeMap<String, serde_json::Value> = serde_json::from_slice(header).ok()?;
    entries.into_iter().filter(|(name, _)| name != "__metadata__").find_map(|(name, value)| {
        let info: TensorInfo = match serde_json::from_value(value) {
            Ok(info) => info,
            Err(error) => return Some((name, error.to_string())),
        };
        let (start, end) = info.data_offsets;
        let bits = info.shape.iter().try_fold(info.dtype.bitsize(), |product, dim| product.checked_mul(*dim));
        let (Some(bits), Some(bytes)) = (bits, end.checked_sub(start)) else {
            return Some((name, format!("shape {:?} or offsets {start}..{end} are impossible", info.shape)));
        };
        (bits != bytes.saturating_mul(8)).then(|| {
            (
                name,
                format!("shape {:?} of {:?} does not take the {bytes} bytes it has", info.shape, info.dtype),
            )
        })
    })
}
