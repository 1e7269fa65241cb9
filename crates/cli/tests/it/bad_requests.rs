//! Requests that are wrong, odd, or use nulls as real clients do: what each must get.

use crate::{
    http,
    support::{Server, tiny_model},
};
use serde_json::{Value, json};

fn send(server: &Server, path: &str, body: &[u8]) -> (u16, Value) {
    http::finish(http::open(&server.address, path, body)).json()
}

/// A chat request whose message is `content` as it stands.
fn chat(content: &[u8]) -> Vec<u8> {
    [br#"{"max_tokens":4,"messages":[{"role":"user","content":"#, content, b"}]}"].concat()
}

#[test]
fn text_that_is_no_unicode_is_refused_as_json() {
    let (_folder, model) = tiny_model("unicode");
    let server = Server::start(&model, &[]);
    let refused: [(&str, Vec<u8>); 7] = [
        ("lone high surrogate", chat(br#""emoji \ud83d""#)),
        ("lone low surrogate", chat(br#""x \ude00 y""#)),
        ("surrogates in the wrong order", chat(br#""\ude00\ud83d""#)),
        ("bytes that are no UTF-8", chat(b"\"\xc3\x28\"")),
        (
            "in the arguments of a tool call",
            br#"{"max_tokens":4,"messages":[{"role":"user","content":"q"},{"role":"assistant","content":null,
                "tool_calls":[{"id":"c1","type":"function","function":{"name":"f","arguments":"{\"a\":\"\udcad\"}"}}]},
                {"role":"tool","tool_call_id":"c1","content":"r"}]}"#
                .to_vec(),
        ),
        ("no JSON", b"max_tokens=4".to_vec()),
        ("no object", b"[1, 2]".to_vec()),
    ];
    for (what, body) in refused {
        let (status, answer) = send(&server, "/v1/chat/completions", &body);
        assert_eq!(
            (status, &answer["error"]["type"]),
            (400, &json!("invalid_request_error")),
            "{what}: {answer}"
        );
    }
    let streamed = br#"{"prompt":"\udcf0","stream":true}"#;
    assert_eq!(send(&server, "/v1/completions", streamed).0, 400);

    // A pair of surrogates is one character of four bytes: "user: ok ", it, "\nassistant: ".
    let (status, answer) = send(&server, "/v1/chat/completions", &chat(br#""ok \ud83d\ude00""#));
    assert_eq!((status, &answer["usage"]["prompt_tokens"]), (200, &json!(25)), "{answer}");
    // NUL is a character like any other.
    let (status, answer) = send(&server, "/v1/chat/completions", &chat(br#""a\u0000b""#));
    assert_eq!((status, &answer["usage"]["prompt_tokens"]), (200, &json!(21)), "{answer}");
}

#[test]
fn nulls_and_missing_fields() {
    let (_folder, model) = tiny_model("nulls");
    let server = Server::start(&model, &[]);
    let call =
        json!([{"id": "call_1", "type": "function", "function": {"name": "read_meter", "arguments": "{}"}}]);
    let user = json!({"role": "user", "content": "Read the meter"});
    let result = json!({"role": "tool", "tool_call_id": "call_1", "content": "31.5"});
    let tools =
        json!([{"type": "function", "function": {"name": "read_meter", "parameters": {"type": "object"}}}]);
    let hi = json!([{"role": "user", "content": "hi"}]);
    let rows = [
        (
            200,
            "null content beside tool calls",
            json!({
                "messages": [user, {"role": "assistant", "content": null, "tool_calls": call}, result], "tools": tools,
            }),
        ),
        (
            200,
            "no content beside tool calls",
            json!({
                "messages": [user, {"role": "assistant", "tool_calls": call}, result],
            }),
        ),
        (
            200,
            "everything null",
            json!({
                "messages": hi, "stop": null, "seed": null, "temperature": null, "top_p": null, "n": null, "tools": null,
                "tool_choice": null, "stream": null, "stream_options": null, "logprobs": null, "top_logprobs": null,
                "logit_bias": null, "user": null, "response_format": null, "presence_penalty": null,
                "frequency_penalty": null, "max_completion_tokens": null,
            }),
        ),
        (
            400,
            "neither content nor calls",
            json!({
                "messages": [user, {"role": "assistant", "content": null, "tool_calls": null}, user],
            }),
        ),
        (
            200,
            "text in parts",
            json!({
                "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
            }),
        ),
        (200, "a field nobody knows", json!({"messages": hi, "some_future_field": {"x": 1}})),
        (400, "no messages", json!({"messages": []})),
        (400, "messages missing", json!({})),
    ];
    for (expected, what, mut body) in rows {
        body["max_tokens"] = json!(4);
        let (status, answer) = server.post("/v1/chat/completions", &body);
        assert_eq!(status, expected, "{what}: {answer}");
        if what == "neither content nor calls" {
            assert_eq!(answer["error"]["param"], "messages[1]", "{answer}");
        }
    }
}

#[test]
fn the_models_name_is_checked() {
    let (_folder, model) = tiny_model("names");
    let server = Server::start(&model, &["--served-model-name", "my/model"]);
    for wrong in ["tiny", "no-such-model", ""] {
        let (status, answer) = server.post("/v1/completions", &json!({"model": wrong, "prompt": "a"}));
        assert_eq!((status, &answer["error"]["code"]), (404, &json!("model_not_found")), "{answer}");
        assert_eq!(answer["error"]["param"], "model");
        assert!(answer["error"]["message"].as_str().unwrap().contains("my/model"), "{answer}");
    }
    for right in [json!("my/model"), Value::Null] {
        let body = json!({"model": right, "prompt": "a", "max_tokens": 1});
        let (status, answer) = server.post("/v1/completions", &body);
        assert_eq!((status, &answer["model"]), (200, &json!("my/model")), "{answer}");
    }
    assert_eq!(http::get(&server.address, "/v1/models/my/model").status, 200);
}

#[test]
fn what_is_out_of_range_or_not_supported_is_named() {
    let (_folder, model) = tiny_model("ranges");
    let server = Server::start(&model, &[]);
    let rows = [
        ("max_tokens", json!(0)),
        ("max_tokens", json!(-1)),
        ("max_tokens", json!("many")),
        ("n", json!(0)),
        ("n", json!(1000)),
        ("temperature", json!(-0.1)),
        ("temperature", json!("hot")),
        ("top_p", json!(0)),
        ("top_p", json!(1.5)),
        ("top_k", json!(-2)),
        ("min_p", json!(2)),
        ("presence_penalty", json!(3)),
        ("frequency_penalty", json!(-3)),
        ("repetition_penalty", json!(0)),
        ("logprobs", json!(21)),
        ("logit_bias", json!({"a": 1})),
        ("logit_bias", json!({"256": 1})),
        ("stop", json!(1)),
        ("stop_token_ids", json!([999])),
        ("stream", json!("yes")),
        ("prompt", json!([])),
        ("prompt", json!("")),
        ("prompt", json!([256])),
        ("prompt", json!({"text": "a"})),
        ("prompt", json!(["a", [1]])),
        ("bad_words", json!(["a"])),
        ("guided_regex", json!("a")),
        ("include_stop_str_in_output", json!(true)),
        ("suffix", json!("b")),
        ("best_of", json!(2)),
        ("response_format", json!({"type": "json_object"})),
    ];
    for (field, value) in rows {
        let mut body = json!({"prompt": "a", "max_tokens": 1});
        body[field] = value.clone();
        let (status, answer) = server.post("/v1/completions", &body);
        assert_eq!((status, &answer["error"]["param"]), (400, &json!(field)), "{field}: {value}: {answer}");
        let message = answer["error"]["message"].as_str().unwrap();
        assert!(message.contains(field) && !message.contains("enum"), "{answer}");
    }
    for (field, value) in [
        ("tool_choice", json!("required")),
        ("top_logprobs", json!(2)),
        ("functions", json!([{"name": "f"}])),
        ("messages", json!("hi")),
    ] {
        let mut body = json!({"messages": [{"role": "user", "content": "a"}], "max_tokens": 1});
        body[field] = value;
        let (status, answer) = server.post("/v1/chat/completions", &body);
        assert_eq!((status, &answer["error"]["param"]), (400, &json!(field)), "{answer}");
    }
    let image = json!({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]});
    let (status, answer) = server.post("/v1/chat/completions", &image);
    assert_eq!((status, &answer["error"]["param"]), (400, &json!("messages[0].content[0]")), "{answer}");
    assert_eq!(server.post("/v1/completions", &json!({"prompt": "a", "max_tokens": 1})).0, 200);
}

/// A body of about `bytes` that repeats `entry` (which ends with a comma) between `head` and `tail`.
fn filled(bytes: usize, head: &str, entry: &str, tail: &str) -> Vec<u8> {
    [head, &entry.repeat(bytes / entry.len()), tail].concat().into_bytes()
}

#[test]
fn large_bodies_cost_memory_in_proportion() {
    let (_folder, model) = tiny_model("large-bodies");
    let server = Server::start(&model, &["--max-body-size", "4MiB"]);
    let rows = [
        (400, "prompt", r#"{"prompt":["#, "1,", "1]}"),
        (400, "prompt", r#"{"prompt":["#, "\"a\",", "\"a\"]}"),
        (400, "prompt", r#"{"prompt":["#, "[],", "[]]}"),
        (400, "stop", r#"{"prompt":"a","stop":["#, "\"a\",", "\"a\"]}"),
        (400, "stop_token_ids", r#"{"prompt":"a","stop_token_ids":["#, "1,", "1]}"),
        (400, "guided_json", r#"{"prompt":"a","guided_json":["#, "{},", "{}]}"),
        (400, "tool_choice", r#"{"prompt":"a","tool_choice":["#, "{},", "{}]}"),
        (200, "", r#"{"prompt":"a","max_tokens":1,"x":["#, "{},", "{}]}"),
        (400, "messages[0].role", r#"{"messages":["#, "{},", "{}]}"),
        (400, "messages[0].content[0]", r#"{"messages":[{"role":"user","content":["#, "{},", "{}]}]}"),
    ];
    for (expected, param, head, entry, tail) in rows {
        let path = if param.starts_with("messages") { "/v1/chat/completions" } else { "/v1/completions" };
        let body = filled((4 << 20) - 100, head, entry, tail);
        let (status, answer) = send(&server, path, &body);
        assert_eq!(status, expected, "{head}: {answer}");
        let blamed = answer["error"]["param"].as_str();
        let context = answer["error"]["code"] == "context_length_exceeded";
        assert!(status == 200 || context || blamed == Some(param), "{head}: {answer}");
        // The body as it came, and token ids of four bytes for every two of text; lists grow by doubling.
        let peak = server.peak_memory();
        assert!(peak < (16 + 6 * 4) << 10, "{head}: {peak} KiB");
    }
}
