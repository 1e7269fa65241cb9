//! Models of the hub, through its own cache, so that other tools share the files.

use std::{
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
        mpsc::{self, RecvTimeoutError},
    },
    thread,
    time::Duration,
};

use anyhow::{Context, Result, anyhow, bail};
use hf_hub::{
    Cache, CacheRepo, Repo, RepoType,
    api::{
        Progress,
        sync::{ApiBuilder, ApiError, ApiRepo},
    },
};
use indicatif::ProgressBar;

use super::progress;

/// How long the hub may take to answer at all, and how long a download may stand still.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);
const STALL_TIMEOUT: Duration = Duration::from_secs(60);

const CONFIG: &str = "config.json";

/// `organisation/name` or `organisation/name:file.gguf`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct HubId {
    /// `organisation/name`.
    pub(crate) repo: String,
    /// A file of the repository.
    pub(crate) file: Option<String>,
}

impl HubId {
    /// `None` if `text` has another shape.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let (repo, file) = match text.split_once(':') {
            Some((repo, file)) => (repo, Some(file.to_owned())),
            None => (text, None),
        };
        let part = |part: &str| {
            part.starts_with(|c: char| c.is_ascii_alphanumeric())
                && part.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c))
        };
        let (organisation, name) = repo.split_once('/')?;
        let file_is_plain = file.as_deref().is_none_or(|file| {
            file.ends_with(".gguf") && file.split('/').all(|part| !part.is_empty() && part != "..")
        });
        (part(organisation) && part(name) && file_is_plain).then(|| Self { repo: repo.to_owned(), file })
    }
}

/// The model's GGUF file or folder, downloaded unless it is in the hub's cache.
pub(crate) fn resolve(id: &HubId) -> Result<PathBuf> {
    resolve_with(id, ApiBuilder::from_env(), &Cache::from_env())
}

fn resolve_with(id: &HubId, client: ApiBuilder, cache: &Cache) -> Result<PathBuf> {
    let cached = cache.repo(Repo::new(id.repo.clone(), RepoType::Model));
    if let Some(path) = from_cache(id, &cached) {
        return Ok(path);
    }
    let repo = repository(id, client)?;
    let names = file_names(&repo)?;
    match wanted(id, &names)? {
        Wanted::File(name) => download(&repo, name),
        Wanted::Folder(names) => {
            let paths = names.into_iter().map(|name| download(&repo, name)).collect::<Result<Vec<_>>>()?;
            let folder = paths.first().and_then(|path| path.parent()).map(Path::to_owned);
            folder.with_context(|| format!("the hub's {} has no files", id.repo))
        }
    }
}

/// What a plan needs: the model if it is in the hub's cache, else its `config.json` alone. A file of a
/// repository and a repository of GGUF files say nothing before they are here.
pub(crate) fn resolve_config(id: &HubId) -> Result<PathBuf> {
    resolve_config_with(id, ApiBuilder::from_env(), &Cache::from_env())
}

fn resolve_config_with(id: &HubId, client: ApiBuilder, cache: &Cache) -> Result<PathBuf> {
    let cached = cache.repo(Repo::new(id.repo.clone(), RepoType::Model));
    if id.file.is_some() {
        return resolve_with(id, client, cache);
    }
    if let Some(path) = from_cache(id, &cached).or_else(|| cached.get(CONFIG)) {
        return Ok(path);
    }
    let repo = repository(id, client)?;
    let names = file_names(&repo)?;
    match wanted(id, &names)? {
        Wanted::Folder(_) => download(&repo, CONFIG.to_owned()),
        Wanted::File(name) => download(&repo, name),
    }
}

fn repository(id: &HubId, client: ApiBuilder) -> Result<Arc<ApiRepo>> {
    client
        .with_progress(false)
        .with_retries(2)
        .build()
        .map(|api| Arc::new(api.model(id.repo.clone())))
        .context("the hub's client cannot be made")
}

/// What is already here, if it is complete.
fn from_cache(id: &HubId, cached: &CacheRepo) -> Option<PathBuf> {
    if let Some(file) = &id.file {
        return cached.get(file);
    }
    let folder = cached.get("config.json")?.parent()?.to_owned();
    folder.join("tokenizer.json").is_file().then_some(())?;
    if folder.join("model.safetensors").is_file() {
        return Some(folder);
    }
    let index = std::fs::read_to_string(folder.join("model.safetensors.index.json")).ok()?;
    let index: serde_json::Value = serde_json::from_str(&index).ok()?;
    let mut shards = index["weight_map"].as_object()?.values();
    shards.all(|shard| shard.as_str().is_some_and(|shard| folder.join(shard).is_file())).then_some(folder)
}

/// Files to fetch.
#[derive(Debug, PartialEq, Eq)]
enum Wanted {
    File(String),
    Folder(Vec<String>),
}

/// Chooses from the repository's files: weights as safetensors with the small files beside them, or
/// the one GGUF file.
fn wanted(id: &HubId, names: &[String]) -> Result<Wanted> {
    const SMALL: [&str; 6] = [
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "model.safetensors.index.json",
    ];
    let ggufs: Vec<&str> = names.iter().map(String::as_str).filter(|name| name.ends_with(".gguf")).collect();
    if let Some(file) = &id.file {
        if !names.contains(file) {
            let there = if ggufs.is_empty() { "no GGUF file".to_owned() } else { ggufs.join(", ") };
            bail!("the hub's {} has no file {file}; it has {there}", id.repo);
        }
        return Ok(Wanted::File(file.clone()));
    }
    let is_weights = |name: &str| {
        name.ends_with(".safetensors") && !name.contains('/') && !name.starts_with("consolidated")
    };
    let mut chosen: Vec<String> =
        names.iter().filter(|name| SMALL.contains(&name.as_str())).cloned().collect();
    if names.iter().any(|name| is_weights(name)) {
        for needed in ["config.json", "tokenizer.json"] {
            if !chosen.iter().any(|name| name == needed) {
                bail!("the hub's {} has no {needed}", id.repo);
            }
        }
        chosen.extend(names.iter().filter(|name| is_weights(name)).cloned());
        return Ok(Wanted::Folder(chosen));
    }
    match ggufs.as_slice() {
        [] => bail!("the hub's {} has neither safetensors nor GGUF files", id.repo),
        [one] => Ok(Wanted::File((*one).to_owned())),
        several => bail!(
            "the hub's {0} has {1} GGUF files; name one, as in {0}:{2} (there are {3})",
            id.repo,
            several.len(),
            several[0],
            several.join(", ")
        ),
    }
}

/// The client has no time limits, so it runs on a thread of its own that is left behind when it
/// takes too long.
fn file_names(repo: &Arc<ApiRepo>) -> Result<Vec<String>> {
    let (sender, receiver) = mpsc::channel();
    let repo = Arc::clone(repo);
    thread::spawn(move || sender.send(repo.info()));
    let info = receiver
        .recv_timeout(ANSWER_TIMEOUT)
        .map_err(|_| anyhow!("the hub did not answer within {} s", ANSWER_TIMEOUT.as_secs()))?
        .map_err(plain)?;
    Ok(info.siblings.into_iter().map(|sibling| sibling.rfilename).collect())
}

/// The error's own words: its causes repeat them.
fn plain(error: ApiError) -> anyhow::Error {
    anyhow!("{error}")
}

fn download(repo: &Arc<ApiRepo>, name: String) -> Result<PathBuf> {
    let received = Arc::new(AtomicU64::new(0));
    let bar = Bar { bar: progress::bytes(0, &name), received: Arc::clone(&received) };
    let (sender, receiver) = mpsc::channel();
    let worker = (Arc::clone(repo), name.clone());
    thread::spawn(move || sender.send(worker.0.download_with_progress(&worker.1, bar)));
    let mut before = u64::MAX;
    loop {
        match receiver.recv_timeout(STALL_TIMEOUT) {
            Ok(result) => {
                return result.map_err(plain).with_context(|| format!("{name} could not be downloaded"));
            }
            Err(RecvTimeoutError::Timeout) => {
                let now = received.load(Ordering::Relaxed);
                if now == before {
                    bail!(
                        "the download of {name} stood still for {} s after {now} bytes; run the command \
                         again to go on from there",
                        STALL_TIMEOUT.as_secs()
                    );
                }
                before = now;
            }
            Err(RecvTimeoutError::Disconnected) => bail!("the download of {name} broke off"),
        }
    }
}

struct Bar {
    bar: ProgressBar,
    received: Arc<AtomicU64>,
}

impl Progress for Bar {
    fn init(&mut self, size: usize, _filename: &str) {
        // Also called when a broken connection is taken up again; what is there already follows.
        self.bar.set_length(size as u64);
        self.bar.set_position(0);
    }
    fn update(&mut self, size: usize) {
        self.received.fetch_add(size as u64, Ordering::Relaxed);
        self.bar.inc(size as u64);
    }
    fn finish(&mut self) {
        self.bar.finish_and_clear();
    }
}

#[cfg(test)]
mod tests {
    use std::{
        io::{BufRead, BufReader, Write},
        net::TcpListener,
    };

    use super::*;

    /// A hub that lists files and serves one of them, which breaks off in the middle the first time.
    /// Returns its address.
    fn flaky_hub(listed: &[&str], served: &'static str, contents: &'static [u8]) -> String {
        let siblings: Vec<_> = listed.iter().map(|name| serde_json::json!({ "rfilename": name })).collect();
        let listing = serde_json::json!({ "sha": "c0", "siblings": siblings }).to_string();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        thread::spawn(move || {
            let mut broken = false;
            for stream in listener.incoming() {
                let mut stream = stream.unwrap();
                let mut lines = BufReader::new(stream.try_clone().unwrap()).lines();
                let request = lines.next().unwrap().unwrap();
                let head: Vec<String> =
                    lines.map(Result::unwrap).take_while(|line| !line.is_empty()).collect();
                if request.starts_with("GET /api/models/a/b/") {
                    write!(
                        stream,
                        "HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: {}\r\n\r\n{listing}",
                        listing.len()
                    )
                    .unwrap();
                    continue;
                }
                assert!(request.starts_with(&format!("GET /a/b/resolve/main/{served} ")), "{request}");
                let range = head.iter().find_map(|line| line.strip_prefix("Range: bytes=")).unwrap();
                let (start, end) = range.split_once('-').unwrap();
                let start: usize = start.parse().unwrap();
                let end = end.parse().map_or(contents.len(), |end: usize| end + 1);
                let body = &contents[start..end];
                write!(
                    stream,
                    "HTTP/1.1 206 Partial Content\r\nConnection: close\r\nx-repo-commit: c0\r\netag: \"e0\"\r\n\
                     Content-Range: bytes {start}-{}/{}\r\nContent-Length: {}\r\n\r\n",
                    end - 1,
                    contents.len(),
                    body.len()
                )
                .unwrap();
                let whole = body.len() == 1 || std::mem::replace(&mut broken, true);
                stream.write_all(if whole { body } else { &body[..body.len() / 2] }).unwrap();
            }
        });
        address
    }

    #[test]
    fn a_file_is_found_downloaded_over_a_broken_connection_and_cached() {
        let contents: &[u8] = (0..100_000u32).map(|i| (i % 251) as u8).collect::<Vec<u8>>().leak();
        let folder = std::env::temp_dir().join(format!("tq-hub-{}", std::process::id()));
        let client = |address: String| {
            ApiBuilder::new().with_endpoint(address).with_cache_dir(folder.clone()).with_token(None)
        };
        let cache = Cache::new(folder.clone());
        let id = HubId::parse("a/b").unwrap();
        let path = resolve_with(&id, client(flaky_hub(&["README.md", "x.gguf"], "x.gguf", contents)), &cache)
            .unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), contents);
        // A named file that is there needs no hub.
        let id = HubId::parse("a/b:x.gguf").unwrap();
        let nowhere = client("http://127.0.0.1:9".to_owned());
        assert_eq!(resolve_with(&id, nowhere, &cache).unwrap(), path);
        std::fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn a_plan_fetches_the_config_alone() {
        let folder = std::env::temp_dir().join(format!("tq-hub-config-{}", std::process::id()));
        let client = |address: String| {
            ApiBuilder::new().with_endpoint(address).with_cache_dir(folder.clone()).with_token(None)
        };
        let cache = Cache::new(folder.clone());
        let id = HubId::parse("a/b").unwrap();
        let listed = ["config.json", "model.safetensors", "tokenizer.json"];
        let hub = flaky_hub(&listed, "config.json", b"{\"model_type\": \"llama\"}");
        let path = resolve_config_with(&id, client(hub), &cache).unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"{\"model_type\": \"llama\"}");
        // The second time it is here.
        let nowhere = client("http://127.0.0.1:9".to_owned());
        assert_eq!(resolve_config_with(&id, nowhere, &cache).unwrap(), path);
        std::fs::remove_dir_all(folder).unwrap();
    }

    fn names(list: &[&str]) -> Vec<String> {
        list.iter().map(|name| (*name).to_owned()).collect()
    }

    #[test]
    fn ids() {
        let id = HubId::parse("Qwen/Qwen3-0.6B").unwrap();
        assert_eq!((id.repo.as_str(), id.file), ("Qwen/Qwen3-0.6B", None));
        let id = HubId::parse("a/b:c/d.Q4_1.gguf").unwrap();
        assert_eq!(id.file.as_deref(), Some("c/d.Q4_1.gguf"));
        for wrong in ["smollm2", "a/b/c", "./a", "../a", "a/", "/a", "a/b:c.txt", "a/b:../c.gguf", "a b/c"] {
            assert_eq!(HubId::parse(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn files_to_fetch() {
        let id = HubId::parse("a/b").unwrap();
        let folder = names(&[
            ".gitattributes",
            "README.md",
            "config.json",
            "consolidated.safetensors",
            "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors",
            "model.safetensors.index.json",
            "onnx/model.onnx",
            "tokenizer.json",
        ]);
        let Wanted::Folder(chosen) = wanted(&id, &folder).unwrap() else { panic!("not a folder") };
        assert_eq!(
            chosen,
            [
                "config.json",
                "model.safetensors.index.json",
                "tokenizer.json",
                "model-00001-of-00002.safetensors",
                "model-00002-of-00002.safetensors",
            ]
        );
        assert_eq!(wanted(&id, &names(&["x.gguf"])).unwrap(), Wanted::File("x.gguf".to_owned()));

        let several = wanted(&id, &names(&["x.gguf", "y.gguf"])).unwrap_err().to_string();
        assert!(several.contains("a/b:x.gguf"), "{several}");
        let no_tokenizer =
            wanted(&id, &names(&["config.json", "model.safetensors"])).unwrap_err().to_string();
        assert!(no_tokenizer.contains("tokenizer.json"), "{no_tokenizer}");
        let named = HubId::parse("a/b:z.gguf").unwrap();
        let absent = wanted(&named, &names(&["x.gguf"])).unwrap_err().to_string();
        assert!(absent.contains("z.gguf") && absent.contains("x.gguf"), "{absent}");
    }
}
