//! A tiny random model with a tokenizer, and a server that runs it.

use std::{
    collections::BTreeMap,
    fs,
    io::{BufRead, BufReader},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use serde_json::{Value, json};

use crate::http;

/// The program under test.
pub(crate) fn turboquant() -> Command {
    Command::new(env!("CARGO_BIN_EXE_turboquant"))
}

/// A folder that is removed when dropped.
pub(crate) struct Folder(PathBuf);

impl Folder {
    pub(crate) fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("turboquant-{name}-{}", std::process::id()));
        fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// A model folder called `tiny`: Llama with random weights, 512 tokens of context, and a vocabulary
/// of single bytes.
pub(crate) fn tiny_model(name: &str) -> (Folder, PathBuf) {
    let folder = Folder::new(name);
    let model = folder.path().join("tiny");
    fs::create_dir_all(&model).unwrap();
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../engine/testdata/tiny/llama");
    for file in ["config.json", "generation_config.json", "model.safetensors"] {
        fs::copy(source.join(file), model.join(file)).unwrap();
    }
    fs::write(model.join("tokenizer.json"), byte_tokenizer().to_string()).unwrap();
    let template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: ";
    let config = json!({"bos_token": "<s>", "eos_token": "</s>", "chat_template": template});
    fs::write(model.join("tokenizer_config.json"), config.to_string()).unwrap();
    (folder, model)
}

/// Ids 0 to 2 are `<pad>`, `<s>` and `</s>`; the others are bytes, without the three that UTF-8 never
/// uses.
fn byte_tokenizer() -> Value {
    let specials = ["<pad>", "<s>", "</s>"];
    let mut vocab: BTreeMap<String, usize> =
        specials.iter().enumerate().map(|(id, token)| ((*token).to_owned(), id)).collect();
    let mut next_unprintable = 0x100;
    for byte in 0..=255u8 {
        let printable = matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
        let code = if printable {
            u32::from(byte)
        } else {
            next_unprintable += 1;
            next_unprintable - 1
        };
        if !matches!(byte, 0xc0 | 0xc1 | 0xff) {
            let id = vocab.len();
            vocab.insert(char::from_u32(code).unwrap().to_string(), id);
        }
    }
    let added: Vec<Value> = specials
        .iter()
        .enumerate()
        .map(|(id, content)| {
            json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
                   "normalized": false, "special": true})
        })
        .collect();
    let byte_level =
        json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
    json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added, "normalizer": null,
        "pre_tokenizer": byte_level, "post_processor": null, "decoder": byte_level,
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                  "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "vocab": vocab,
                  "merges": []},
    })
}

/// `turboquant serve` on a free port; stopped when dropped.
pub(crate) struct Server {
    child: Child,
    /// `127.0.0.1:PORT`
    pub(crate) address: String,
}

impl Server {
    pub(crate) fn start(model: &Path, arguments: &[&str]) -> Self {
        let mut child = turboquant()
            .args(["serve", "--port", "0", "-m"])
            .arg(model)
            .args(arguments)
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let address = line.split("http://").nth(1).and_then(|rest| rest.split(' ').next());
        let address = address.unwrap_or_else(|| panic!("no address in {line:?}")).to_owned();
        Self { child, address }
    }

    /// A request with a JSON body; status and body of the answer.
    pub(crate) fn post(&self, path: &str, body: &Value) -> (u16, Value) {
        http::post(&self.address, path, body).json()
    }

    /// Most memory that the process has taken so far, in KiB.
    pub(crate) fn peak_memory(&self) -> usize {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap();
        let line = status.lines().find(|line| line.starts_with("VmHWM:")).unwrap();
        line.split_whitespace().nth(1).unwrap().parse().unwrap()
    }

    /// The counters of `/health`.
    pub(crate) fn health(&self) -> Value {
        let (status, health) = http::get(&self.address, "/health").json();
        assert_eq!(status, 200, "{health}");
        health
    }

    /// Waits until `/health` is as wanted; fails after `limit`.
    pub(crate) fn wait_until(&self, limit: Duration, wanted: impl Fn(&Value) -> bool) {
        let start = Instant::now();
        loop {
            let health = self.health();
            if wanted(&health) {
                return;
            }
            assert!(start.elapsed() < limit, "not so after {limit:?}: {health}");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Waits until a request has begun.
    pub(crate) fn wait_until_running(&self) {
        self.wait_until(Duration::from_secs(20), |health| health["running"] != 0);
    }

    /// Waits until nothing runs, waits or holds pages; fails after `limit`.
    pub(crate) fn wait_until_idle(&self, limit: Duration) {
        self.wait_until(limit, |health| {
            health["running"] == 0 && health["waiting"] == 0 && health["pages_in_use"] == 0
        });
    }

    /// Sends SIGTERM.
    pub(crate) fn signal(&self) {
        let pid = self.child.id().to_string();
        assert!(Command::new("kill").args(["-TERM", &pid]).status().unwrap().success());
    }

    /// Sends SIGTERM and returns whether the server ended well within `limit`.
    pub(crate) fn terminate(&mut self, limit: Duration) -> bool {
        self.signal();
        let start = Instant::now();
        while start.elapsed() < limit {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status.success();
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        false
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
