//! Which token ids end an answer.

use anyhow::Result;
use serde_json::Value;
use turboquant_engine::gguf::Metadata;

use super::gguf::GgufVocab;

/// The union of what `config.json`, `generation_config.json` and the tokenizer's EOS name; sorted.
pub(crate) fn from_configs(
    config: &Value,
    generation_config: &Value,
    tokenizer_eos: Option<u32>,
) -> Vec<u32> {
    let fields =
        [&config["eos_token_id"], &config["text_config"]["eos_token_id"], &generation_config["eos_token_id"]];
    sorted(fields.into_iter().flat_map(ids).chain(tokenizer_eos))
}

/// A field holds one id, a list of ids, or something that is no id (null, -1).
fn ids(field: &Value) -> Vec<u32> {
    let one = |value: &Value| value.as_u64().and_then(|id| u32::try_from(id).ok());
    match field {
        Value::Array(list) => list.iter().filter_map(one).collect(),
        other => one(other).into_iter().collect(),
    }
}

/// GGUF files name one id per purpose and often leave out the second of two; so the control tokens
/// that end a text or a turn in the model families served here count as well.
pub(crate) fn from_gguf(metadata: &Metadata, vocab: &GgufVocab) -> Result<Vec<u32>> {
    const KEYS: [&str; 3] = ["eos", "eot", "eom"];
    const NAMES: [&str; 8] = [
        "<|endoftext|>",
        "<|im_end|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end_of_text|>",
        "<end_of_turn>",
        "<|end|>",
        "</s>",
    ];
    let mut found = Vec::new();
    for key in KEYS {
        found.extend(metadata.token_id(&format!("tokenizer.ggml.{key}_token_id"))?);
    }
    found.extend(vocab.control_tokens().filter(|(_, token)| NAMES.contains(token)).map(|(id, _)| id));
    Ok(sorted(found.into_iter()))
}

fn sorted(ids: impl Iterator<Item = u32>) -> Vec<u32> {
    let mut ids: Vec<u32> = ids.collect();
    ids.sort_unstable();
    ids.dedup();
    ids
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// The sets are joined, never overwritten by the shorter one; an empty set is legal.
    #[test]
    fn stop_ids_of_published_configurations() {
        let none = Value::Null;
        type Row<'a> = (&'a str, Value, Value, Option<u32>, &'a [u32]);
        let rows: [Row; 10] = [
            (
                "Qwen",
                json!({"eos_token_id": 151645}),
                json!({"eos_token_id": [151645, 151643]}),
                None,
                &[151643, 151645],
            ),
            (
                "only generation_config has the list",
                json!({"eos_token_id": 2}),
                json!({"eos_token_id": [2, 128131]}),
                None,
                &[2, 128131],
            ),
            ("Gemma", json!({"eos_token_id": 1}), json!({"eos_token_id": [1, 106]}), Some(106), &[1, 106]),
            (
                "Llama 3",
                json!({"eos_token_id": [128001, 128008, 128009]}),
                none.clone(),
                None,
                &[128001, 128008, 128009],
            ),
            ("nested", json!({"text_config": {"eos_token_id": [1, 106]}}), none.clone(), None, &[1, 106]),
            ("only the tokenizer knows", json!({}), json!({}), Some(151645), &[151645]),
            (
                "the tokenizer names another",
                json!({"eos_token_id": 151643}),
                json!({"eos_token_id": 151643}),
                Some(151645),
                &[151643, 151645],
            ),
            ("null", json!({"eos_token_id": null}), json!({"eos_token_id": null}), Some(2), &[2]),
            ("-1", json!({"eos_token_id": -1}), none.clone(), Some(2), &[2]),
            ("nothing anywhere", json!({}), none, None, &[]),
        ];
        for (name, config, generation_config, eos, expected) in rows {
            assert_eq!(from_configs(&config, &generation_config, eos), expected, "{name}");
        }
    }
}
