//! RoPE frequencies against those of transformers, from the same `config.json` fields.

use serde_json::Value;

use super::hf::{HfConfig, tied};
use crate::config::ModelConfig;

#[test]
fn frequencies_are_those_of_transformers() {
    let cases: Vec<Value> = serde_json::from_str(include_str!("../../../testdata/rope.json")).unwrap();
    assert_eq!(cases.len(), 7);
    for case in cases {
        let root = case["config"].clone();
        let geometry = ModelConfig::from_hf(&root.to_string()).unwrap();
        let config = HfConfig { path: "config.json".into(), root, geometry };
        let rope = config.rope(10_000.0, false).unwrap();
        let expected: Vec<f32> =
            case["inv_freq"].as_array().unwrap().iter().map(|x| x.as_f64().unwrap() as f32).collect();
        let (got, scale) = rope.frequencies();
        assert_eq!(got.len(), expected.len(), "{}", case["name"]);
        for (got, expected) in got.iter().zip(&expected) {
            assert!((got - expected).abs() <= 4e-6 * expected, "{}: {got} {expected}", case["name"]);
        }
        let factor = case["attention_factor"].as_f64().unwrap() as f32;
        assert!((scale - factor).abs() <= 1e-6, "{}: {scale} {factor}", case["name"]);
    }
}

#[test]
fn the_tied_flag_is_found_in_all_its_spellings() {
    for (config, default, expected) in [
        (r#"{"tie_word_embeddings": true}"#, false, true),
        (r#"{"tie_word_embeddings": false}"#, true, false),
        (r#"{"tie_word_embeddings": null}"#, false, false),
        (r"{}", false, false),
        (r"{}", true, true),
        (r#"{"text_config": {"tie_word_embeddings": true}}"#, false, true),
        (r#"{"tie_word_embeddings": false, "text_config": {"tie_word_embeddings": true}}"#, false, true),
        (r#"{"tie_word_embeddings": true, "text_config": {}}"#, false, true),
        (r#"{"tie_embedding": true}"#, false, true),
    ] {
        let root = serde_json::from_str(config).unwrap();
        assert_eq!(tied(&root, default), expected, "{config}");
    }
}
