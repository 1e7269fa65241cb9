//! Requests from their bytes, without a server.

use serde_json::{Value, json};

use super::{
    error::ApiError,
    request::{ChatRequest, CompletionRequest, UNSUPPORTED},
    values::{MAX_CHOICES, MAX_STOP_BYTES, MAX_STOP_TOKEN_IDS, MAX_STOPS, PromptInput},
};

fn completion(body: &Value) -> Result<CompletionRequest, ApiError> {
    CompletionRequest::parse(body.to_string().as_bytes(), "served")
}

/// A completion with one more field.
fn with(field: &str, value: &Value) -> Result<CompletionRequest, ApiError> {
    completion(&json!({"prompt": "a", field: value}))
}

fn chat(body: &Value) -> Result<ChatRequest, ApiError> {
    ChatRequest::parse(body.to_string().as_bytes(), "served")
}

/// The field that is blamed, the code and the message.
fn blamed<T: std::fmt::Debug>(request: Result<T, ApiError>) -> (String, String, String) {
    let error = serde_json::to_value(request.unwrap_err().into_envelope()).unwrap();
    let text = |key: &str| error["error"][key].as_str().unwrap_or_default().to_owned();
    (text("param"), text("code"), text("message"))
}

fn refused(request: Result<CompletionRequest, ApiError>, field: &str, words: &str) {
    let (param, _, message) = blamed(request);
    assert_eq!(param, field, "{message}");
    assert!(message.contains(words), "{message}");
    assert!(!message.contains("column"), "a place in a part of the body: {message}");
}

#[test]
fn prompts_come_in_four_shapes_that_do_not_mix() {
    let text = |text: &str| PromptInput::Text(text.to_owned());
    let tokens = |ids: &[u32]| PromptInput::Tokens(ids.to_vec());
    for (prompt, expected) in [
        (json!("a\u{e9}\n"), vec![text("a\u{e9}\n")]),
        (json!(["a", ""]), vec![text("a"), text("")]),
        (json!([1, 4_294_967_295_u32]), vec![tokens(&[1, u32::MAX])]),
        (json!([[1], [], [2, 3]]), vec![tokens(&[1]), tokens(&[]), tokens(&[2, 3])]),
    ] {
        assert_eq!(completion(&json!({"prompt": prompt})).unwrap().prompts, expected, "{prompt}");
    }
    for prompt in [json!(["a", 1]), json!([1, "a"]), json!([[1], 2]), json!([1, [2]]), json!(["a", [1]])] {
        refused(completion(&json!({"prompt": prompt})), "prompt", "cannot mix");
    }
    for prompt in [json!(-1), json!([-1]), json!([1.5]), json!([4_294_967_296_u64]), json!([null])] {
        refused(completion(&json!({"prompt": prompt})), "prompt", "expected a t");
    }
    refused(completion(&json!({"prompt": []})), "prompt", "empty list");
    refused(completion(&json!({"prompt": null})), "prompt", "missing");
}

#[test]
fn too_many_answers_blame_what_multiplies_them() {
    let texts = |count: usize| json!(vec!["a"; count]);
    assert_eq!(completion(&json!({"prompt": texts(MAX_CHOICES)})).unwrap().prompts.len(), MAX_CHOICES);
    refused(completion(&json!({"prompt": texts(MAX_CHOICES + 1)})), "prompt", "more than 128 prompts");
    refused(completion(&json!({"prompt": vec![[1]; MAX_CHOICES + 1]})), "prompt", "more than 128 prompts");
    refused(completion(&json!({"prompt": texts(MAX_CHOICES / 2 + 1), "n": 2})), "n", "128");
    refused(completion(&json!({"prompt": "a", "n": MAX_CHOICES + 1})), "n", "128");
    // One prompt, however many tokens it has.
    assert!(completion(&json!({"prompt": vec![1; 10_000]})).is_ok());
}

#[test]
fn stop_strings_and_stop_tokens_are_limited() {
    let longest = "é".repeat(MAX_STOP_BYTES / 2);
    assert!(with("stop", &json!(longest)).is_ok());
    assert!(with("stop", &json!(vec![longest.clone(); MAX_STOPS])).is_ok());
    refused(with("stop", &json!(longest.clone() + "a")), "stop", "1025 bytes, the most are 1024");
    refused(with("stop", &json!(["a", longest + "a"])), "stop", "1025 bytes, the most are 1024");
    refused(with("stop", &json!(vec!["a"; MAX_STOPS + 1])), "stop", "more than 64 stop strings");
    refused(with("stop", &json!([1])), "stop", "expected a string");
    let ids = |count: usize| with("stop_token_ids", &json!(vec![1; count]));
    assert_eq!(ids(MAX_STOP_TOKEN_IDS).unwrap().options.params.stop_token_ids.len(), MAX_STOP_TOKEN_IDS);
    refused(ids(MAX_STOP_TOKEN_IDS + 1), "stop_token_ids", "more than 1024 token ids");
}

#[test]
fn what_is_not_supported_is_refused_unless_it_asks_for_nothing() {
    let asked_anyway =
        [json!({}), json!({"type": "object"}), json!(true), json!(7), json!("x"), json!(["x"])];
    for field in &UNSUPPORTED {
        assert!(with(field.name, &Value::Null).is_ok(), "{}", field.name);
        for harmless in field.harmless {
            let value: Value = serde_json::from_str(harmless).unwrap();
            assert!(with(field.name, &value).is_ok(), "{}: {harmless}", field.name);
        }
        for value in &asked_anyway {
            let (param, code, _) = blamed(with(field.name, value));
            assert_eq!((param.as_str(), code.as_str()), (field.name, "unsupported_parameter"), "{value}");
        }
    }
    // Empty, but not the default.
    for (name, value) in [
        ("prompt_logprobs", json!(0)),
        ("guided_choice", json!([])),
        ("guided_regex", json!("")),
        ("best_of", json!(0)),
        ("length_penalty", json!(0)),
        ("response_format", json!({})),
    ] {
        assert_eq!(blamed(with(name, &value)).1, "unsupported_parameter", "{name}: {value}");
    }
    // Other spellings of the same value.
    for body in
        [r#"{"prompt":"a","best_of":1.0}"#, r#"{"prompt":"a","bad_words":[ ] , "length_penalty": 1e0}"#]
    {
        assert!(CompletionRequest::parse(body.as_bytes(), "served").is_ok(), "{body}");
    }
}

#[test]
fn the_readme_lists_what_is_not_supported() {
    let readme = include_str!("../../README.md");
    let row =
        readme.lines().find(|line| line.contains("| refused with 400 `unsupported_parameter`")).unwrap();
    let fields = row.trim_start_matches("| ").split(" | ").next().unwrap();
    let listed: Vec<&str> = fields.split("; ").collect();
    let expected: Vec<String> = UNSUPPORTED
        .iter()
        .map(|field| {
            let harmless: Vec<String> = field.harmless.iter().map(|value| format!("`{value}`")).collect();
            let harmless =
                if harmless.is_empty() { String::new() } else { format!(" ({})", harmless.join(", ")) };
            format!("`{}`{harmless}", field.name)
        })
        .collect();
    assert_eq!(listed, expected);
}

#[test]
fn tool_calls_cannot_be_forced_in_either_endpoint() {
    let messages = json!([{"role": "user", "content": "a"}]);
    let function = json!({"type": "function", "function": {"name": "f"}});
    for choice in [json!("required"), function.clone(), json!("")] {
        let expected = ("tool_choice".to_owned(), "unsupported_parameter".to_owned());
        let (param, code, _) = blamed(with("tool_choice", &choice));
        assert_eq!((param, code), expected, "{choice}");
        let (param, code, _) = blamed(chat(&json!({"messages": messages, "tool_choice": choice})));
        assert_eq!((param, code), expected, "{choice}");
    }
    for (choice, tools) in [(json!(null), true), (json!("auto"), true), (json!("none"), false)] {
        assert!(with("tool_choice", &choice).is_ok(), "{choice}");
        let request =
            chat(&json!({"messages": messages, "tools": [function], "tool_choice": choice})).unwrap();
        assert_eq!(request.tools.is_some(), tools, "{choice}");
    }
}

#[test]
fn the_first_wrong_message_and_part_are_named() {
    let user = json!({"role": "user", "content": "a"});
    let parts = |parts: Value| json!({"role": "user", "content": parts});
    let text = json!({"type": "text", "text": "a"});
    for (messages, param) in [
        (json!([user, {}, {"role": "user"}]), "messages[1].role"),
        (json!([user, {"role": "user"}, {}]), "messages[1].content"),
        (json!([parts(json!([text, {}, {"type": "image_url"}]))]), "messages[0].content[1]"),
        (json!([parts(json!([text, text, {"type": "image_url"}, {}])), {}]), "messages[0].content[2]"),
        (json!([1]), "messages"),
        (json!({}), "messages"),
        (json!([parts(json!(1))]), "messages"),
    ] {
        assert_eq!(blamed(chat(&json!({"messages": messages}))).0, param, "{messages}");
    }
    let request = chat(&json!({"messages": [parts(json!([text, {"text": "", "x": [1]}, text]))]})).unwrap();
    assert_eq!(request.messages[0].get_attr("content").unwrap().as_str(), Some("a\n\na"));
}

#[test]
fn names_of_fields_may_be_escaped_or_repeated_and_unknown_ones_are_skipped() {
    let body =
        br#"{"x":{"prompt":[1,{"a":"\u0041"}]},"pro\u006dpt":"a","prompt":"b","":null,"max_tokens":3}"#;
    let request = CompletionRequest::parse(body, "served").unwrap();
    assert_eq!(request.prompts, [PromptInput::Text("b".to_owned())]);
    assert_eq!(request.options.params.max_tokens, Some(3));
    for broken in
        [&br#"{"prompt":"a","x":[1,]}"#[..], br#"{"prompt":"a"} {}"#, b"[]", b"", b"{\"prompt\":\"\xff\"}"]
    {
        let error = CompletionRequest::parse(broken, "served");
        assert!(blamed(error).2.starts_with("The request body is not "), "{broken:?}");
    }
}
