//! Headers of safetensors files, good and bad.

use std::path::{Path, PathBuf};

use super::safetensors::open_file;
use super::{TensorEntry, WeightFiles, blocks};

fn file(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata/safetensors");
    folder.join(name).with_extension("safetensors")
}

/// The tensors of a file that is accepted, sorted by name.
fn accepted(name: &str) -> (WeightFiles, Vec<(String, TensorEntry)>) {
    let path = file(name);
    let (handle, mut entries) = open_file(&path, 0).unwrap();
    entries.sort_by(|a, b| a.0.cmp(&b.0));
    let files = WeightFiles { path: path.clone(), files: vec![(path, handle)], tensors: Default::default() };
    (files, entries)
}

#[test]
fn good_files_are_read() {
    for name in ["01-ok", "02-ok-space-padded-header", "30-unordered-names-ok"] {
        let (files, entries) = accepted(name);
        let read = |i: usize| blocks::read_floats(&files, &entries[i].0, &entries[i].1).unwrap();
        assert_eq!((entries[0].0.as_str(), read(0)), ("a", vec![1.0, 2.0]), "{name}");
        assert_eq!((entries[1].0.as_str(), read(1)), ("b", vec![3.0, 4.0]), "{name}");
    }
    let (_, entries) = accepted("23-ok-metadata");
    assert!(!entries.is_empty() && entries.iter().all(|(name, _)| name != "__metadata__"));
    let (_, entries) = accepted("24-ok-empty-tensor");
    assert!(entries.iter().any(|(_, entry)| entry.bytes == 0));
    let (files, entries) = accepted("25-ok-scalar");
    assert_eq!(entries[0].1.shape, Vec::<usize>::new());
    assert_eq!(blocks::read_floats(&files, "scalar", &entries[0].1).unwrap().len(), 1);
}

/// File, and what its refusal must say beside its name.
const REFUSED: [(&str, &str); 24] = [
    ("03-nul-padded-header", "header"),
    ("04-header-len-over-file", "announces a header of"),
    ("05-header-len-2^63", "announces a header of 9223372036854775808 bytes"),
    ("06-header-len-max", "announces a header of 18446744073709551615 bytes"),
    ("07-seven-bytes", "7 bytes"),
    ("08-empty-file", "the file is empty"),
    ("09-overlap", "`b`"),
    ("10-gap", "`b`"),
    ("11-trailing-bytes", "unaccounted for"),
    ("12-truncated-data", "b is cut off"),
    ("13-inverted-offsets", "tensor a"),
    ("14-one-offset", "tensor a"),
    ("15-shape-too-large", "tensor a: shape"),
    ("16-shape-too-small", "tensor a: shape"),
    ("17-shape-product-wraps", "tensor a: shape"),
    ("18-shape-product-wraps-with-zero", "tensor a: shape"),
    ("19-unknown-dtype", "tensor a: unknown variant"),
    ("20-duplicate-name", "`a`"),
    ("21-header-is-array", "header"),
    ("22-metadata-not-strings", "header"),
    ("26-negative-offset", "tensor a"),
    ("27-float-shape", "tensor a"),
    ("28-git-lfs-pointer", "Git LFS pointer"),
    ("29-html-error-page", "web page"),
];

#[test]
fn bad_files_are_refused_by_name() {
    for (name, reason) in REFUSED {
        let error = open_file(&file(name), 0).unwrap_err().to_string();
        assert!(error.contains(&format!("{name}.safetensors")), "{name}: {error}");
        assert!(error.contains(reason), "{name}: {error}");
    }
}

#[test]
fn every_file_is_tested() {
    let folder = file("x").parent().unwrap().to_path_buf();
    assert_eq!(std::fs::read_dir(folder).unwrap().count(), REFUSED.len() + 6);
}
