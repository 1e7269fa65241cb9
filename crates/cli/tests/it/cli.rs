//! The command line: answers, tables, exit codes and error sentences.

use std::{
    io::{Read, Write},
    process::{Command, Output, Stdio},
};

use crate::support::{Folder, tiny_model, turboquant};

fn output(command: &mut Command) -> (i32, String, String) {
    let Output { status, stdout, stderr } = command.stdin(Stdio::null()).output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (status.code().unwrap(), text(stdout), text(stderr))
}

#[test]
fn run_answers_and_then_says_what_it_cost() {
    let (_folder, model) = tiny_model("run");
    let run = |arguments: &[&str]| {
        let mut command = turboquant();
        command
            .args(["run", "--max-tokens", "20", "--ignore-eos", "-m"])
            .arg(&model)
            .args(arguments)
            .arg("hi");
        output(&mut command)
    };
    let (code, answer, table) = run(&[]);
    assert_eq!(code, 0, "{table}");
    assert!(answer.chars().count() > 5, "{answer:?}");
    assert_eq!(run(&[]).1, answer, "greedy answers repeat");
    // 3 layers of 2 heads of 16, keys and values, in 4 bytes.
    assert!(table.contains("auto (f32)") && table.contains("768 B, in bf16 384 B: ratio 0.50"), "{table}");
    for line in ["KV memory", "memory", "prefill", "decode"] {
        assert!(table.lines().any(|l| l.starts_with(line)), "{line} in {table}");
    }

    let (code, _, table) = run(&["--kv-cache-dtype", "turboquant_3bit_nc", "--kv-boundary-layers", "1"]);
    assert_eq!(code, 0, "{table}");
    let lines: Vec<Vec<&str>> = table.lines().map(|line| line.split_whitespace().collect()).collect();
    assert!(lines.contains(&vec!["0", "auto", "(f32)", "boundary", "layer", "256"]), "{table}");
    // 2 heads of (6 + 2) B of key and (6 + 4) B of value.
    assert!(lines.contains(&vec!["1", "turboquant_3bit_nc", "as", "asked", "36"]), "{table}");

    let (_, sampled, _) = run(&["--temperature", "1", "--seed", "3"]);
    assert_eq!(run(&["--temperature", "1", "--seed", "3"]).1, sampled, "a seed repeats");
    assert_ne!(run(&["--temperature", "1", "--seed", "4"]).1, sampled);
    assert_eq!(run(&["--threads", "1"]).1, answer, "threads change nothing");
}

#[test]
fn a_chat_reads_lines_and_remembers() {
    let (_folder, model) = tiny_model("chat");
    let chat_with = |max_tokens: &str, input: &str| {
        let mut child = turboquant()
            .args(["run", "--max-tokens", max_tokens, "--ignore-eos", "-m"])
            .arg(&model)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
        let output = child.wait_with_output().unwrap();
        assert!(output.status.success());
        (output.stdout, String::from_utf8(output.stderr).unwrap())
    };
    let chat = |input: &str| chat_with("8", input);
    let (one, _) = chat("first\n");
    let (two, table) = chat("first\n\nsecond\n/exit\nthird\n");
    assert!(two.starts_with(&one) && two.len() > one.len(), "{two:?} does not go on from {one:?}");
    assert!(table.contains("prefill"), "{table}");
    let (forgotten, _) = chat("first\n/clear\nfirst\n");
    assert_eq!(forgotten, [one.clone(), one].concat());

    // 512 tokens of context, a token per byte: the oldest messages must go.
    let (_, notes) = chat(&format!("{}\n", "x".repeat(200)).repeat(4));
    assert!(notes.contains("no longer fit"), "{notes}");
    let (_, notes) = chat(&format!("{}\nshort\n", "x".repeat(600)));
    assert!(notes.contains("more than"), "{notes}");

    // More than the context has room for ends an answer, not the chat.
    let (text, table) = chat_with("500", "first\nsecond\n");
    assert!(text.len() > 500 && table.contains("decode"), "{table}");
}

#[test]
fn compare_prints_a_table_or_json() {
    let (_folder, model) = tiny_model("compare");
    let compare = |arguments: &[&str]| {
        let mut command = turboquant();
        command
            .args(["compare", "--context", "300", "--score-tokens", "40", "-m"])
            .arg(&model)
            .args(arguments);
        output(&mut command)
    };
    let (code, json, stderr) = compare(&["--json", "--kv-boundary-layers", "0,1"]);
    assert_eq!(code, 0, "{stderr}");
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    let rows = json["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 2 + 4 * 2);
    assert!(rows[0]["divergence"].is_null());
    // fp8 halves bf16; 3-bit rows of 2 heads of 16 take 36 B per layer against 128.
    assert_eq!(rows[1]["ratio_to_bf16"], 2.0);
    assert_eq!(
        (&rows[8]["kv_cache_dtype"], &rows[8]["boundary_layers"]),
        (&"turboquant_3bit_nc".into(), &0.into())
    );
    assert_eq!(rows[8]["kv_bytes_per_token"], 108.0);
    let kl = |row: usize| rows[row]["divergence"]["kl_mean"].as_f64().unwrap();
    assert!(rows[1..].iter().all(|row| row["divergence"]["kl_mean"].as_f64().unwrap() > 0.0));
    assert!(kl(8) > kl(2), "3 bits are worse than 8 and 4: {json}");

    let (code, table, stderr) = compare(&[]);
    assert_eq!((code, table.lines().count()), (0, 1 + 1 + 6), "{table}{stderr}");
}

#[test]
fn wrong_use_is_code_2_and_one_sentence() {
    let (folder, model) = tiny_model("wrong-use");
    let model = model.to_str().unwrap();
    let short = folder.path().join("short.txt");
    std::fs::write(&short, "Not much.").unwrap();
    let rows: [(&[&str], &str); 15] = [
        (&["run", "-m", "no-such-model", "hi"], "smollm2"),
        (&["run", "-m", model, "--kv-cache-dtype", "int3", "hi"], "turboquant_4bit_nc"),
        (&["run", "-m", model, "--page-size", "17", "hi"], "16, 32"),
        (&["run", "-m", model, "--max-model-len", "100000", "hi"], "512"),
        (&["run", "-m", model, "--max-tokens", "600", "hi"], "512"),
        (&["run", "-m", model, "--temperature", "-1", "hi"], "temperature"),
        (&["run", "-m", model, "--threads", "0", "hi"], "1..=1024"),
        (&["run", "-m", model, "--threads", "100000", "hi"], "1..=1024"),
        (&["run", "-m", model, "--kv-cache-dtype-skip-layers", "9", "--", "hi"], "layer 9"),
        (&["run", "-m", model, "--raw"], "prompt"),
        (&["compare", "-m", model, "--context", "600"], "512"),
        (&["compare", "-m", model, "--context", "300", "--score-tokens", "300"], "--score-tokens"),
        (&["compare", "-m", model, "--context", "300", "--text", short.to_str().unwrap()], "--text"),
        (&["serve", "-m", model, "--kv-cache-memory", "much"], "4GiB"),
        (&["serve", "-m", model, "--port", "0", "--kv-cache-memory", "900TiB"], "the machine has"),
    ];
    for (arguments, part) in rows {
        let (code, stdout, stderr) = output(turboquant().args(arguments));
        assert_eq!(code, 2, "{arguments:?}: {stderr}");
        assert!(stderr.starts_with("error: ") && stderr.contains(part), "{arguments:?}: {stderr}");
        assert_eq!(stdout, "", "{arguments:?}");
    }
}

#[test]
fn failures_are_code_1_and_name_the_file() {
    let (folder, model) = tiny_model("failures");
    let file = |name: &str, bytes: &[u8]| {
        let path = folder.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        path
    };
    let broken = file("broken.gguf", b"GGUF\x03\0\0\0 and no more");
    let text = file("text.gguf", b"this is no model");
    std::fs::write(model.join("tokenizer.json"), "{}").unwrap();
    for path in [broken, text, model] {
        let (code, _, stderr) = output(turboquant().args(["run", "-m"]).arg(&path).arg("hi"));
        assert_eq!(code, 1, "{stderr}");
        assert!(stderr.contains(path.to_str().unwrap()), "{stderr}");
        assert_eq!(stderr.lines().count(), 1, "{stderr}");
    }
}

/// The same file is refused with the same code, whatever was to be done with it: 2 where it is whole and
/// not for this program, 1 where it is damaged.
#[test]
fn every_command_refuses_a_file_with_the_same_code() {
    let (folder, model) = tiny_model("same-code");
    let config = std::fs::read_to_string(model.join("config.json")).unwrap();
    let folder_with = |name: &str, config: &str| {
        let path = folder.path().join(name);
        std::fs::create_dir_all(&path).unwrap();
        for file in ["model.safetensors", "tokenizer.json", "tokenizer_config.json"] {
            std::fs::copy(model.join(file), path.join(file)).unwrap();
        }
        std::fs::write(path.join("config.json"), config).unwrap();
        path
    };
    let damaged = folder.path().join("damaged.gguf");
    std::fs::write(&damaged, b"GGUF\x03\0\0\0 and no more").unwrap();
    let empty = folder.path().join("empty");
    std::fs::create_dir_all(&empty).unwrap();
    let rows = [
        (damaged, 1, "damaged"),
        (folder_with("no-json", "{"), 1, "EOF"),
        (
            folder_with(
                "unknown",
                &config.replace("\"llama\"", "\"no-such\"").replace("LlamaFor", "NoSuchFor"),
            ),
            2,
            "no-such",
        ),
        (
            folder_with(
                "heads",
                &config.replace("\"num_key_value_heads\": 2", "\"num_key_value_heads\": \"x\""),
            ),
            2,
            "num_key_value_heads",
        ),
        (empty, 2, "is not a model"),
    ];
    for (path, expected, reason) in rows {
        for command in [&["plan"][..], &["run", "--raw", "-m"], &["compare", "-m"]] {
            let mut command_line = turboquant();
            command_line.args(command).arg(&path);
            if command[0] == "run" {
                command_line.arg("hi");
            }
            let (code, stdout, stderr) = output(&mut command_line);
            assert_eq!((code, stdout.as_str()), (expected, ""), "{command:?}: {stderr}");
            assert!(stderr.contains(reason) && stderr.lines().count() == 1, "{command:?}: {stderr}");
            assert_eq!(stderr.matches(path.to_str().unwrap()).count(), 1, "{command:?}: {stderr}");
        }
    }
}

#[test]
fn an_alias_that_cannot_be_fetched_names_every_source() {
    let home = Folder::new("home");
    // Nothing listens on port 9 here.
    let (code, _, stderr) = output(
        turboquant()
            .args(["run", "-m", "smollm2", "hi"])
            .env("TURBOQUANT_HOME", home.path())
            .env("HF_HOME", home.path())
            .env("HF_ENDPOINT", "http://127.0.0.1:9")
            .env("PIP_INDEX_URL", "http://127.0.0.1:9/")
            .env("PIP_CONFIG_FILE", "/dev/null"),
    );
    assert_eq!(code, 1, "{stderr}");
    let error = stderr.lines().last().unwrap();
    for source in [home.path().to_str().unwrap(), "hub", "Python index", "cannot be reached"] {
        assert!(error.contains(source), "{source} in {stderr}");
    }
}

#[test]
fn a_reader_that_leaves_is_no_error() {
    let (_folder, model) = tiny_model("pipe");
    for listens_to_stderr in [true, false] {
        let mut child = turboquant()
            .args(["run", "--max-tokens", "400", "--ignore-eos", "-m"])
            .arg(&model)
            .arg("hi")
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        drop(child.stdout.take());
        if !listens_to_stderr {
            drop(child.stderr.take());
        }
        let output = child.wait_with_output().unwrap();
        assert_eq!(String::from_utf8_lossy(&output.stderr), "");
        assert!(output.status.success());
    }
    // Nobody hears the table, and nothing breaks.
    let mut child = turboquant()
        .args(["run", "--max-tokens", "4", "-m"])
        .arg(&model)
        .arg("hi")
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stderr.take());
    assert!(child.wait().unwrap().success());
}

#[test]
fn a_server_stays_when_the_reader_of_its_address_leaves() {
    let (_folder, model) = tiny_model("serve-pipe");
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let mut child = turboquant()
        .args(["serve", "--port", &free.port().to_string(), "-m"])
        .arg(&model)
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let start = std::time::Instant::now();
    let health = b"GET /health HTTP/1.0\r\n\r\n";
    let answered = loop {
        if let Ok(mut stream) = std::net::TcpStream::connect(free) {
            let mut answer = String::new();
            let sent = stream.write_all(health).and_then(|()| stream.read_to_string(&mut answer));
            if sent.is_ok() && answer.contains("200 OK") {
                break true;
            }
        }
        if child.try_wait().unwrap().is_some() || start.elapsed().as_secs() > 60 {
            break false;
        }
        std::thread::sleep(std::time::Duration::from_millis(20));
    };
    let _ = child.kill();
    child.wait().unwrap();
    assert!(answered);
}
