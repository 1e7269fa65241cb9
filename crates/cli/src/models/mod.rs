//! A model's name to its files: a path, a hub id, or one of the aliases.

mod alias;
mod cache;
mod hub;
mod progress;
mod python_index;

use std::path::{Path, PathBuf};

use anyhow::Result;

use self::{alias::ALIASES, cache::Home, hub::HubId};
use crate::error::wrong_use;

/// A model that lies on this machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ModelFiles {
    /// What to call it: the alias, the hub id, or the file's or folder's own name.
    pub(crate) name: String,
    /// A GGUF file or a folder with `config.json`.
    pub(crate) path: PathBuf,
}

/// Finds the model called `name`, downloading it if need be.
pub(crate) fn resolve(name: &str) -> Result<ModelFiles> {
    find(name, hub::resolve)
}

/// As [`resolve`], but of a model of the hub that is not here the path is its `config.json` alone.
pub(crate) fn resolve_config(name: &str) -> Result<ModelFiles> {
    find(name, hub::resolve_config)
}

fn find(name: &str, from_hub: fn(&HubId) -> Result<PathBuf>) -> Result<ModelFiles> {
    let path = Path::new(name);
    if path.exists() {
        return Ok(ModelFiles { name: own_name(path), path: path.to_owned() });
    }
    if let Some(alias) = ALIASES.iter().find(|alias| alias.name == name) {
        let path = alias::resolve(alias, &Home::from_env()?)?;
        return Ok(ModelFiles { name: name.to_owned(), path });
    }
    if let Some(id) = HubId::parse(name) {
        let path = from_hub(&id)?;
        return Ok(ModelFiles { name: name.to_owned(), path });
    }
    let aliases: Vec<&str> = ALIASES.iter().map(|alias| alias.name).collect();
    Err(wrong_use(format!(
        "'{name}' is no file or folder here; -m takes a GGUF file, a model folder, a hub id \
         (organisation/name or organisation/name:file.gguf) or one of: {}",
        aliases.join(", ")
    )))
}

fn own_name(path: &Path) -> String {
    let absolute = path.canonicalize();
    let path = absolute.as_deref().unwrap_or(path);
    let name = if path.is_dir() { path.file_name() } else { path.file_stem() };
    name.map_or_else(|| path.display().to_string(), |name| name.to_string_lossy().into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_is_taken_as_it_is_and_called_by_its_own_name() {
        let folder = std::env::temp_dir().join(format!("tq-models-{}", std::process::id()));
        let file = folder.join("Some-Model.Q4_1.gguf");
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::write(&file, "").unwrap();
        let found = resolve(file.to_str().unwrap()).unwrap();
        assert_eq!(found, ModelFiles { name: "Some-Model.Q4_1".to_owned(), path: file });
        assert_eq!(resolve(folder.to_str().unwrap()).unwrap().path, folder);
        std::fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn a_name_that_is_nothing_is_refused_with_what_would_be_something() {
        for name in ["no-such-model", "./no/such/file.gguf", "a/b/c", "org/", ""] {
            let error = resolve(name).unwrap_err().to_string();
            assert!(error.contains("smollm2") && error.contains("hub id"), "{name:?}: {error}");
        }
    }
}
