use std::path::PathBuf;

use super::{stop::StopSet, stream::TextStream, *};

/// Token ids that llama.cpp's own tokenizer tests expect, for a folder of its vocabulary files
/// (`ggml-vocab-*.gguf` with `.inp` and `.out` beside them). They are not in this repository: run
/// with `TURBOQUANT_VOCABS=.../llama.cpp/models cargo test -p turboquant-cli -- --ignored vocabularies`.
#[test]
#[ignore = "needs llama.cpp's vocabulary files in TURBOQUANT_VOCABS"]
fn vocabularies_of_llama_cpp() {
    let folder = PathBuf::from(std::env::var("TURBOQUANT_VOCABS").unwrap());
    for name in [
        "gpt-2",
        "llama-bpe",
        "qwen2",
        "qwen35",
        "starcoder",
        "refact",
        "command-r",
        "llama-spm",
        "phi-3",
        "mpt",
    ] {
        let file = folder.join(format!("ggml-vocab-{name}.gguf"));
        let text = TextModel::load(&file).unwrap();
        let companion = |extension: &str| {
            std::fs::read_to_string(file.with_extension(format!("gguf.{extension}"))).unwrap()
        };
        let inputs = companion("inp");
        let inputs: Vec<&str> = inputs.split("\n__ggml_vocab_test__\n").collect();
        let outputs = companion("out");
        let outputs: Vec<&str> = outputs.lines().collect();
        // The list ends with a separator.
        assert_eq!(inputs.len(), outputs.len() + 1, "{name}");
        for (input, output) in inputs.iter().zip(&outputs) {
            let expected: Vec<u32> = output.split_whitespace().map(|id| id.parse().unwrap()).collect();
            assert_eq!(text.encode_rendered(input).unwrap(), expected, "{name}: {input:?}");
            if !name.ends_with("spm") && name != "phi-3" {
                assert_eq!(text.tokens().decode(&expected), *input, "{name}: back to text");
            }
        }
    }
}

/// A metadata value of a GGUF file.
enum Meta<'a> {
    Number(u32),
    Text(&'a str),
    Texts(&'a [&'a str]),
    Numbers(&'a [u32]),
    Floats(&'a [f32]),
}

/// Writes a GGUF file without tensors and reads its text side.
fn load_gguf(name: &str, metadata: &[(&str, Meta)]) -> Result<TextModel> {
    fn text(out: &mut Vec<u8>, text: &str) {
        out.extend((text.len() as u64).to_le_bytes());
        out.extend(text.as_bytes());
    }
    fn list(out: &mut Vec<u8>, kind: u32, len: usize) {
        out.extend([9u32, kind].map(u32::to_le_bytes).concat());
        out.extend((len as u64).to_le_bytes());
    }
    let mut out = b"GGUF\x03\0\0\0".to_vec();
    out.extend([0, metadata.len() as u64].map(u64::to_le_bytes).concat());
    for (key, value) in metadata {
        text(&mut out, key);
        match value {
            Meta::Number(number) => out.extend([4, *number].map(u32::to_le_bytes).concat()),
            Meta::Text(value) => {
                out.extend(8u32.to_le_bytes());
                text(&mut out, value);
            }
            Meta::Texts(values) => {
                list(&mut out, 8, values.len());
                values.iter().for_each(|value| text(&mut out, value));
            }
            Meta::Numbers(values) => {
                list(&mut out, 4, values.len());
                out.extend(values.iter().flat_map(|value| value.to_le_bytes()));
            }
            Meta::Floats(values) => {
                list(&mut out, 6, values.len());
                out.extend(values.iter().flat_map(|value| value.to_le_bytes()));
            }
        }
    }
    let path = std::env::temp_dir().join(format!("turboquant-{name}-{}.gguf", std::process::id()));
    std::fs::write(&path, out).unwrap();
    let text = TextModel::load(&path);
    std::fs::remove_file(path).unwrap();
    text
}

/// The file is read before the model is loaded, so nothing of it is known to be sound.
#[test]
fn a_damaged_file_is_refused_in_words() {
    for alignment in [0, 48] {
        let damaged = load_gguf("alignment", &[("general.alignment", Meta::Number(alignment))]);
        let error = format!("{:#}", damaged.err().unwrap());
        assert!(error.contains(&format!("general.alignment is {alignment}, not a power of two")), "{error}");
    }
    let error = format!("{:#}", load_gguf("no-tokens", &[]).err().unwrap());
    assert!(error.contains("key tokenizer.ggml.tokens is missing"), "{error}");
    let tokens = ("tokenizer.ggml.tokens", Meta::Number(3));
    let error = format!("{:#}", load_gguf("tokens-number", &[tokens]).err().unwrap());
    assert!(error.contains("tokenizer.ggml.tokens is 3, expected a list of texts"), "{error}");
}

#[test]
fn a_vocabulary_with_scores() {
    let tokens = [
        "<unk>",
        "<s>",
        "</s>",
        "<0x0A>",
        "<0xC3>",
        "<0xA9>",
        "\u{2581}",
        "a",
        "b",
        "ab",
        "\u{2581}a",
        "\u{2581}ab",
        "\u{2581}\u{2581}",
        "<end_of_turn>",
    ];
    let types = [2, 3, 3, 6, 6, 6, 1, 1, 1, 1, 1, 1, 4, 3];
    let scores = [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, -9.0, -9.0, -9.0, -1.0, -2.0, -3.0, 0.0, 0.0];
    let text = load_gguf(
        "scores",
        &[
            ("tokenizer.ggml.model", Meta::Text("llama")),
            ("tokenizer.ggml.tokens", Meta::Texts(&tokens)),
            ("tokenizer.ggml.token_type", Meta::Numbers(&types)),
            ("tokenizer.ggml.scores", Meta::Floats(&scores)),
            ("tokenizer.ggml.bos_token_id", Meta::Number(1)),
            ("tokenizer.ggml.eos_token_id", Meta::Number(2)),
        ],
    )
    .unwrap();
    // BOS, a space before the text, the best-scored pair first ("ab"), and bytes for what is no token.
    assert_eq!(text.encode("ab").unwrap(), [1, 11]);
    assert_eq!(text.encode("aab\né").unwrap(), [1, 10, 9, 3, 4, 5]);
    assert_eq!(text.encode_rendered("</s>").unwrap(), [2]);
    // Two spaces are a token that was put in by hand, and spaces when it comes out again.
    let ids = text.encode_rendered("b  b").unwrap();
    assert_eq!(ids, [6, 8, 12, 8]);
    assert_eq!(text.tokens().decode(&ids), " b  b");
    assert_eq!(text.tokens().decode(&[1, 11, 3, 4, 5, 2]), " ab\né");
    assert_eq!(text.stop_ids(), [2, 13]);
}

#[test]
fn a_vocabulary_with_merges() {
    let tokens = ["<|end|>", "a", "b", "Ġ", "ab", "Ġab", "<tool>"];
    let text = load_gguf(
        "merges",
        &[
            ("tokenizer.ggml.model", Meta::Text("gpt2")),
            ("tokenizer.ggml.pre", Meta::Text("gpt-2")),
            ("tokenizer.ggml.tokens", Meta::Texts(&tokens)),
            ("tokenizer.ggml.token_type", Meta::Numbers(&[3, 1, 1, 1, 1, 1, 4])),
            ("tokenizer.ggml.merges", Meta::Texts(&["a b", "Ġ ab"])),
        ],
    )
    .unwrap();
    let ids = text.encode("ab aab<tool> ab<|end|>").unwrap();
    assert_eq!(ids, [4, 3, 1, 4, 6, 5, 0]);
    assert_eq!(text.tokens().decode(&ids), "ab aab<tool> ab");
    assert_eq!(text.stop_ids(), [0]);
}

#[derive(serde::Deserialize)]
struct Golden {
    rows: Vec<GoldenRow>,
}

#[derive(serde::Deserialize)]
struct GoldenRow {
    text: String,
    ids: Vec<u32>,
}

fn check_golden(model: &str, golden: &str) {
    let golden: Golden = serde_json::from_str(golden).unwrap();
    assert!(golden.rows.len() > 50);
    let path = crate::models::resolve(model).unwrap().path;
    let text = TextModel::load(&path).unwrap();
    for row in golden.rows {
        assert_eq!(text.encode(&row.text).unwrap(), row.ids, "{:?}", row.text);
        let mut stream = TextStream::new(text.tokens().clone(), StopSet::default(), 0);
        let mut pieces = String::new();
        for &id in &row.ids {
            assert!(!stream.push(id, &mut pieces));
        }
        stream.finish(&mut pieces);
        assert_eq!(pieces, text.tokens().decode(&row.ids), "{:?}", row.text);
        // Special tokens have no text, and U+2581 is how SentencePiece writes a space.
        if !row.text.contains(['<', '\u{2581}']) {
            assert_eq!(pieces, row.text);
        }
    }
}

#[test]
#[ignore = "needs the model smollm2 (93 MB)"]
fn smollm2_token_ids() {
    check_golden("smollm2", include_str!("../../testdata/smollm2_ids.json"));
}

#[test]
#[ignore = "needs the model gemma3-270m (238 MB, its own licence)"]
fn gemma3_270m_token_ids() {
    check_golden("gemma3-270m", include_str!("../../testdata/gemma3_270m_ids.json"));
}

#[test]
#[ignore = "needs the model smollm2 (93 MB)"]
fn smollm2_chat_prompt() {
    let path = crate::models::resolve("smollm2").unwrap().path;
    let text = TextModel::load(&path).unwrap();
    let message = minijinja::context! { role => "user", content => "What is the capital of France?" };
    let prompt = text.render_chat(&[message], None).unwrap().unwrap();
    // As transformers 5.23.0 renders it.
    assert_eq!(
        prompt,
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n\
         <|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    );
    let ids = text.encode_rendered(&prompt).unwrap();
    assert_eq!(text.tokens().decode(&ids[..4]), "system\nYou");
    assert_eq!(text.stop_ids(), [0, 2]);
}
