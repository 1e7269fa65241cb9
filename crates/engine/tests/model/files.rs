//! Model files made on the spot.

use std::{
    collections::HashMap,
    fs,
    path::{Path, PathBuf},
    sync::atomic::{AtomicUsize, Ordering},
};

use candle_core::Tensor;

/// Tensors by name.
pub(crate) type Tensors = HashMap<String, Tensor>;

/// A path under this crate's `testdata`.
pub(crate) fn testdata(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata").join(path)
}

/// A folder that is removed with this value.
pub(crate) struct Folder(pub(crate) PathBuf);

impl Folder {
    pub(crate) fn new() -> Self {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("turboquant-files-{}-{count}", std::process::id()));
        fs::create_dir_all(&path).unwrap();
        Folder(path)
    }

    /// Writes `config.json` and `model.safetensors`.
    pub(crate) fn with_model(config: &serde_json::Value, tensors: &Tensors) -> Self {
        let folder = Folder::new();
        fs::write(folder.0.join("config.json"), config.to_string()).unwrap();
        candle_core::safetensors::save(tensors, folder.0.join("model.safetensors")).unwrap();
        folder
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        // Left behind if it cannot be removed; the test has passed or failed before.
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// A metadata value of a GGUF file.
pub(crate) enum Meta<'a> {
    U32(u32),
    F32(f32),
    Str(&'a str),
    U32s(&'a [u32]),
    Bools(&'a [bool]),
    Strs(&'a [&'a str]),
}

/// The bytes of a GGUF file (version 3) with f32 tensors, its data aligned to 32.
pub(crate) fn gguf(metadata: &[(String, Meta<'_>)], tensors: &[(String, Tensor)]) -> Vec<u8> {
    fn string(out: &mut Vec<u8>, text: &str) {
        out.extend((text.len() as u64).to_le_bytes());
        out.extend(text.as_bytes());
    }
    fn array(out: &mut Vec<u8>, kind: u32, len: usize) {
        out.extend(9u32.to_le_bytes());
        out.extend(kind.to_le_bytes());
        out.extend((len as u64).to_le_bytes());
    }
    let mut out = b"GGUF\x03\0\0\0".to_vec();
    out.extend((tensors.len() as u64).to_le_bytes());
    out.extend((metadata.len() as u64).to_le_bytes());
    for (key, value) in metadata {
        string(&mut out, key);
        match value {
            Meta::U32(n) => out.extend(4u32.to_le_bytes().into_iter().chain(n.to_le_bytes())),
            Meta::F32(x) => out.extend(6u32.to_le_bytes().into_iter().chain(x.to_le_bytes())),
            Meta::Str(text) => {
                out.extend(8u32.to_le_bytes());
                string(&mut out, text);
            }
            Meta::U32s(values) => {
                array(&mut out, 4, values.len());
                values.iter().for_each(|n| out.extend(n.to_le_bytes()));
            }
            Meta::Bools(values) => {
                array(&mut out, 7, values.len());
                out.extend(values.iter().map(|flag| u8::from(*flag)));
            }
            Meta::Strs(values) => {
                array(&mut out, 8, values.len());
                values.iter().for_each(|text| string(&mut out, text));
            }
        }
    }
    let mut offset = 0u64;
    for (name, tensor) in tensors {
        string(&mut out, name);
        out.extend((tensor.rank() as u32).to_le_bytes());
        tensor.dims().iter().rev().for_each(|dim| out.extend((*dim as u64).to_le_bytes()));
        out.extend(0u32.to_le_bytes());
        out.extend(offset.to_le_bytes());
        offset = (offset + 4 * tensor.elem_count() as u64).next_multiple_of(32);
    }
    for (_, tensor) in tensors {
        out.resize(out.len().next_multiple_of(32), 0);
        for value in tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap() {
            out.extend(value.to_le_bytes());
        }
    }
    out
}
