//! Kernel sources to machine code through NVRTC, kept on disk.
#![expect(unsafe_code, reason = "NVRTC is a C library")]

use std::{
    ffi::CString,
    fs,
    hash::{DefaultHasher, Hash, Hasher},
    mem,
    path::{Path, PathBuf},
};

use cudarc::nvrtc::{result, sys};

use super::{GpuError, variant::Variant};

/// The target name for a compute capability: `90a` for 9.0, `89` for 8.9.
pub fn target_of(major: i32, minor: i32) -> String {
    let suffix = if major >= 9 { "a" } else { "" };
    format!("{major}{minor}{suffix}")
}

/// Machine code of `variant` for `sm_<target>`: from `cache`, else compiled and written there.
///
/// # Errors
/// NVRTC missing where it is needed, and its complaints. A cache that cannot be written is no error.
pub fn cubin(variant: &Variant, target: &str, cache: Option<&Path>) -> Result<Vec<u8>, GpuError> {
    let source = variant.source();
    let mut options = vec![
        format!("--gpu-architecture=sm_{target}"),
        "--std=c++17".to_owned(),
        "-default-device".to_owned(),
    ];
    options.extend(variant.defines().iter().map(|define| format!("-D{define}")));
    let kept = cache.map(|folder| folder.join(format!("{:016x}.cubin", key_of(&source, &options))));
    if let Some(code) = kept.as_ref().and_then(|path| fs::read(path).ok()).filter(|code| is_elf(code)) {
        return Ok(code);
    }
    if !open_nvrtc() {
        return Err(GpuError::NoNvrtc { kernel: variant.to_string() });
    }
    let code = compile(variant, target, &source, &options)?;
    if let Some(path) = kept {
        keep(&path, &code);
    }
    Ok(code)
}

/// Where kernels are kept unless the caller says otherwise: `turboquant/kernels` in the user's cache folder.
pub fn default_cache() -> Option<PathBuf> {
    let base = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from).filter(|path| path.is_absolute());
    let base = base.or_else(|| std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".cache")))?;
    Some(base.join("turboquant").join("kernels"))
}

fn key_of(source: &str, options: &[String]) -> u64 {
    let mut hasher = DefaultHasher::new();
    (source, options, env!("CARGO_PKG_VERSION")).hash(&mut hasher);
    hasher.finish()
}

fn is_elf(code: &[u8]) -> bool {
    code.starts_with(b"\x7fELF")
}

/// Written beside and renamed, so that no reader meets half a file.
fn keep(path: &Path, code: &[u8]) {
    let Some(folder) = path.parent() else { return };
    let part = path.with_extension(format!("{}.part", std::process::id()));
    let written = fs::create_dir_all(folder)
        .and_then(|()| fs::write(&part, code))
        .and_then(|()| fs::rename(&part, path));
    if written.is_err() {
        // The kernel works all the same; it is compiled again next time.
        let _ = fs::remove_file(&part);
    }
}

/// Opens NVRTC by name, else from the usual folders of a CUDA toolkit.
fn open_nvrtc() -> bool {
    // SAFETY: only tries to open the library.
    if unsafe { sys::is_culib_present() } {
        return true;
    }
    let homes = ["CUDA_HOME", "CUDA_PATH"].into_iter().filter_map(std::env::var_os).map(PathBuf::from);
    for home in homes.chain([PathBuf::from("/usr/local/cuda")]) {
        for folder in [home.join("lib64"), home.join("lib")] {
            if preload(&folder) {
                // SAFETY: as above.
                return unsafe { sys::is_culib_present() };
            }
        }
    }
    false
}

/// Loads NVRTC and the library beside it that it opens by name. True if NVRTC was there.
fn preload(folder: &Path) -> bool {
    let Ok(entries) = fs::read_dir(folder) else { return false };
    let mut files: Vec<PathBuf> = entries.filter_map(|entry| Some(entry.ok()?.path())).collect();
    // "libnvrtc-builtins" sorts before "libnvrtc.": the one that is needed comes first
    files.sort();
    let mut found = false;
    for file in files {
        let name = file.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        if !(name.starts_with("libnvrtc.so.") || name.starts_with("libnvrtc-builtins.so."))
            || name.contains(".alt.")
        {
            continue;
        }
        // SAFETY: NVRTC's libraries may be loaded at any time; their initialisers have no preconditions.
        if let Ok(library) = unsafe { libloading::Library::new(&file) } {
            found |= name.starts_with("libnvrtc.so.");
            mem::forget(library);
        }
    }
    found
}

fn compile(variant: &Variant, target: &str, source: &str, options: &[String]) -> Result<Vec<u8>, GpuError> {
    let failed =
        |message: String| GpuError::Compile { kernel: variant.to_string(), arch: target.to_owned(), message };
    let text = CString::new(source).map_err(|_| failed("the source holds a NUL byte".to_owned()))?;
    let program = result::create_program(&text, None).map_err(|error| failed(error.to_string()))?;
    // SAFETY: `program` was created above and is destroyed once, below.
    let compiled = unsafe { result::compile_program(program, options) };
    let code = match compiled {
        Ok(()) => machine_code(program).map_err(|error| failed(error.to_string())),
        Err(error) => {
            // SAFETY: `program` is alive.
            let log = unsafe { result::get_program_log(program) }.unwrap_or_default();
            let log: Vec<u8> = log.iter().map(|c| *c as u8).take_while(|c| *c != 0).collect();
            let log = String::from_utf8_lossy(&log);
            let first = log.lines().find(|line| line.contains("error")).unwrap_or_default();
            Err(failed(format!("{error}; {first}")))
        }
    };
    // SAFETY: as above.
    let destroyed = unsafe { result::destroy_program(program) };
    destroyed.map_err(|error| failed(error.to_string()))?;
    code
}

fn machine_code(program: sys::nvrtcProgram) -> Result<Vec<u8>, result::NvrtcError> {
    let mut bytes = 0;
    // SAFETY: `program` has been compiled; the call writes one number.
    unsafe { sys::nvrtcGetCUBINSize(program, &mut bytes) }.result()?;
    let mut code = vec![0u8; bytes];
    // SAFETY: `code` has the size that NVRTC asked for.
    unsafe { sys::nvrtcGetCUBIN(program, code.as_mut_ptr().cast()) }.result()?;
    Ok(code)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        cuda::variant::{GpuRows, IoDtype, PrefillShape, select_prefill},
        format::{CacheDtype, NativeDtype, Preset},
    };

    fn variant() -> Variant {
        let format = CacheDtype::TurboQuant(Preset::FourBitNc).row_format(NativeDtype::Bf16);
        Variant::decode(GpuRows::new(format, 128, IoDtype::Bf16).unwrap(), 4, false)
    }

    #[test]
    fn targets_of_cards() {
        let names: Vec<String> = [(8, 0), (8, 9), (9, 0), (10, 0)].map(|(a, b)| target_of(a, b)).to_vec();
        assert_eq!(names, ["80", "89", "90a", "100a"]);
    }

    /// With NVRTC on the machine the one text of every prefill kernel compiles.
    #[test]
    fn prefill_compiles_or_says_what_is_missing() {
        let format = CacheDtype::TurboQuant(Preset::FourBitNc).row_format(NativeDtype::Bf16);
        for capability in [(8, 0), (9, 0)] {
            let shape =
                PrefillShape { format, head_dim: 128, io: IoDtype::Bf16, alibi: false, softcap: true };
            let choice = select_prefill(capability, &shape).unwrap();
            match cubin(&choice.variant, &target_of(capability.0, capability.1), None) {
                Ok(code) => assert!(is_elf(&code)),
                Err(error) => assert!(matches!(error, GpuError::NoNvrtc { .. }), "{error}"),
            }
        }
    }

    /// With NVRTC on the machine the kernel compiles, is kept, and comes back from the disk; without it
    /// the error says what to do.
    #[test]
    fn compiles_and_keeps_or_says_what_is_missing() {
        let folder = std::env::temp_dir().join(format!("turboquant-kernels-{}", std::process::id()));
        match cubin(&variant(), "90a", Some(&folder)) {
            Ok(code) => {
                assert!(is_elf(&code));
                let files: Vec<_> = fs::read_dir(&folder).unwrap().collect();
                assert_eq!(files.len(), 1);
                let path = files[0].as_ref().unwrap().path();
                fs::write(&path, b"\x7fELF changed").unwrap();
                assert_eq!(cubin(&variant(), "90a", Some(&folder)).unwrap(), b"\x7fELF changed");
                fs::write(&path, b"damaged").unwrap();
                assert_eq!(cubin(&variant(), "90a", Some(&folder)).unwrap(), code);
                let wrong = cubin(&variant(), "1", None).unwrap_err().to_string();
                assert!(wrong.contains("decode (head_dim 128") && wrong.contains("sm_1"), "{wrong}");
            }
            Err(error) => {
                assert!(matches!(error, GpuError::NoNvrtc { .. }), "{error}");
                assert!(error.to_string().contains("NVRTC was not found"));
            }
        }
        let _ = fs::remove_dir_all(&folder);
    }
}
