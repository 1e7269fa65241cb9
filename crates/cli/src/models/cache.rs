//! Where downloaded models lie, and how a file gets there whole or not at all.

use std::{
    fs::{self, File},
    io::{Read, Write},
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, ensure};
use sha2::{Digest, Sha256};

/// `TURBOQUANT_HOME`, else `~/.cache/turboquant`.
#[derive(Debug, Clone)]
pub(crate) struct Home {
    root: PathBuf,
}

impl Home {
    pub(crate) fn from_env() -> Result<Self> {
        let var = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        let root = var("TURBOQUANT_HOME")
            .or_else(|| var("XDG_CACHE_HOME").map(|cache| cache.join("turboquant")))
            .or_else(|| var("HOME").map(|home| home.join(".cache").join("turboquant")))
            .context("there is no place for models: set TURBOQUANT_HOME to a folder")?;
        Ok(Self::at(root))
    }

    pub(crate) fn at(root: PathBuf) -> Self {
        Self { root }
    }

    /// Complete model files.
    pub(crate) fn models(&self) -> PathBuf {
        self.root.join("models")
    }

    /// Downloads that are complete but not unpacked yet.
    pub(crate) fn downloads(&self) -> PathBuf {
        self.root.join("downloads")
    }
}

/// A file that is written under another name until it is complete and its checksum is right.
pub(crate) struct IncomingFile {
    file: File,
    partial: PathBuf,
    target: PathBuf,
    hash: Sha256,
}

impl IncomingFile {
    /// Begins `target`, making its folder.
    pub(crate) fn create(target: &Path) -> Result<Self> {
        if let Some(folder) = target.parent() {
            fs::create_dir_all(folder).with_context(|| format!("{} cannot be made", folder.display()))?;
        }
        let mut name = target.as_os_str().to_owned();
        name.push(format!(".partial-{}", std::process::id()));
        let partial = PathBuf::from(name);
        let file =
            File::create(&partial).with_context(|| format!("{} cannot be written", partial.display()))?;
        Ok(Self { file, partial, target: target.to_owned(), hash: Sha256::new() })
    }

    /// Appends all of `reader`; `progress` hears of every chunk.
    pub(crate) fn append(&mut self, mut reader: impl Read, progress: impl Fn(u64)) -> Result<()> {
        let mut buffer = vec![0; 1 << 16];
        loop {
            let len = reader.read(&mut buffer).context("the download cannot be read")?;
            if len == 0 {
                return Ok(());
            }
            self.hash.update(&buffer[..len]);
            self.file
                .write_all(&buffer[..len])
                .with_context(|| format!("{} cannot be written", self.partial.display()))?;
            progress(len as u64);
        }
    }

    /// Checks the SHA-256 and gives the file its name.
    pub(crate) fn finish(mut self, sha256: &str) -> Result<()> {
        let got = hex(&std::mem::take(&mut self.hash).finalize());
        ensure!(got == sha256, "its checksum is {got} instead of {sha256}");
        self.file.sync_all()?;
        fs::rename(&self.partial, &self.target)
            .with_context(|| format!("{} cannot be written", self.target.display()))
    }
}

impl Drop for IncomingFile {
    fn drop(&mut self) {
        // Gone already when `finish` has renamed it.
        let _ = fs::remove_file(&self.partial);
    }
}

/// SHA-256 of a file, in hex.
pub(crate) fn sha256(path: &Path) -> Result<String> {
    let mut file = File::open(path).with_context(|| format!("{} cannot be read", path.display()))?;
    let mut hash = Sha256::new();
    std::io::copy(&mut file, &mut hash).with_context(|| format!("{} cannot be read", path.display()))?;
    Ok(hex(&hash.finalize()))
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of "abc", from FIPS 180-2.
    const ABC: &str = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";

    #[test]
    fn a_file_appears_only_when_its_checksum_is_right() {
        let folder = std::env::temp_dir().join(format!("tq-cache-{}", std::process::id()));
        let target = folder.join("deep").join("file");
        let mut wrong = IncomingFile::create(&target).unwrap();
        wrong.append(&b"abd"[..], |_| {}).unwrap();
        assert!(wrong.finish(ABC).unwrap_err().to_string().contains("checksum"));
        assert_eq!(fs::read_dir(target.parent().unwrap()).unwrap().count(), 0, "nothing is left behind");

        let mut right = IncomingFile::create(&target).unwrap();
        right.append(&b"ab"[..], |_| {}).unwrap();
        assert!(!target.exists());
        right.append(&b"c"[..], |_| {}).unwrap();
        right.finish(ABC).unwrap();
        assert_eq!(fs::read(&target).unwrap(), b"abc");
        assert_eq!(sha256(&target).unwrap(), ABC);
        fs::remove_dir_all(folder).unwrap();
    }
}
