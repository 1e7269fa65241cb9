use std::path::PathBuf;

use super::{stream::TextStream, *};

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
        let mut stream = TextStream::new(text.tokens().clone(), Vec::new(), 0);
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
