//! The server over HTTP, with a tiny random model.

use std::{io::Read, net::Shutdown, thread, time::Duration};

use crate::{
    http,
    support::{Server, tiny_model},
};
use serde_json::{Value, json};

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";

fn greedy(prompt: &str, max_tokens: usize) -> Value {
    json!({"model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": true})
}

fn with(mut body: Value, fields: Value) -> Value {
    let fields = fields.as_object().unwrap().clone();
    body.as_object_mut().unwrap().extend(fields);
    body
}

fn error_code(body: &Value) -> &str {
    body["error"]["code"].as_str().unwrap_or("")
}

#[test]
fn health_and_models() {
    let (_folder, model) = tiny_model("health");
    let server = Server::start(&model, &[]);
    assert_eq!(server.health()["status"], "ok");
    let (status, models) = http::get(&server.address, "/v1/models").json();
    assert_eq!((status, &models["object"], &models["data"][0]["id"]), (200, &json!("list"), &json!("tiny")));
    assert_eq!(models["data"][0]["max_model_len"], 512);
    let (status, one) = http::get(&server.address, "/v1/models/tiny").json();
    assert_eq!((status, &one["object"]), (200, &json!("model")));

    let (status, body) = http::get(&server.address, "/v1/models/no-such-model").json();
    assert_eq!((status, error_code(&body)), (404, "model_not_found"));
    let (status, body) = http::get(&server.address, "/v2/nothing").json();
    assert_eq!((status, &body["error"]["type"]), (404, &json!("invalid_request_error")));
    let (status, body) = http::get(&server.address, CHAT).json();
    assert_eq!((status, &body["error"]["type"]), (405, &json!("invalid_request_error")));
}

#[test]
fn a_streamed_answer_is_the_whole_answer_in_pieces() {
    let (_folder, model) = tiny_model("pieces");
    let server = Server::start(&model, &[]);
    let messages = json!([{"role": "user", "content": "hi"}]);
    let body =
        json!({"model": "tiny", "messages": messages, "max_tokens": 40, "seed": 7, "ignore_eos": true});
    let (status, whole) = server.post(CHAT, &body);
    assert_eq!((status, &whole["object"]), (200, &json!("chat.completion")));
    assert_eq!(whole["choices"][0]["message"]["role"], "assistant");
    assert_eq!(whole["choices"][0]["finish_reason"], "length");
    // One token per byte: "user: hi\nassistant: ".
    assert_eq!(whole["usage"], json!({"prompt_tokens": 20, "completion_tokens": 40, "total_tokens": 60}));

    let streamed = with(body, json!({"stream": true, "stream_options": {"include_usage": true}}));
    let mut events = http::post(&server.address, CHAT, &streamed).events();
    let last = events.pop().unwrap();
    assert_eq!((&last["choices"], &last["usage"]), (&json!([]), &whole["usage"]));
    let mut text = String::new();
    for event in &events {
        assert_eq!((&event["id"], &event["created"]), (&last["id"], &last["created"]));
        assert_eq!((&event["object"], &event["model"]), (&json!("chat.completion.chunk"), &json!("tiny")));
        assert!(event["usage"].is_null(), "{event}");
        assert_eq!(event["choices"].as_array().unwrap().len(), 1, "{event}");
        text.push_str(event["choices"][0]["delta"]["content"].as_str().unwrap_or(""));
    }
    assert_eq!(events[0]["choices"][0]["delta"]["role"], "assistant");
    assert_eq!(events.last().unwrap()["choices"][0]["finish_reason"], "length");
    let finishes = events.iter().filter(|event| !event["choices"][0]["finish_reason"].is_null());
    assert_eq!(finishes.count(), 1);
    assert_eq!(text, whole["choices"][0]["message"]["content"]);
}

#[test]
fn usage_comes_only_when_asked_for() {
    let (_folder, model) = tiny_model("usage");
    let server = Server::start(&model, &[]);
    let body = with(greedy("hi", 4), json!({"stream": true}));
    for event in http::post(&server.address, COMPLETIONS, &body).events() {
        assert!(event["usage"].is_null(), "{event}");
        assert_eq!(
            (&event["object"], event["choices"].as_array().unwrap().len()),
            (&json!("text_completion"), 1)
        );
    }
    let body = with(greedy("hi", 4), json!({"stream_options": {"include_usage": true}}));
    let (status, body) = server.post(COMPLETIONS, &body);
    assert_eq!((status, &body["error"]["param"]), (400, &json!("stream_options")));
}

#[test]
fn many_clients_get_what_one_gets() {
    let (_folder, model) = tiny_model("many");
    let server = Server::start(&model, &["--kv-cache-dtype", "turboquant_4bit_nc"]);
    let bodies: Vec<Value> = (0..12)
        .map(|i| {
            let prompt = "the quick brown fox ".repeat(1 + i % 5);
            let body = with(greedy(&prompt, 24), json!({"seed": i, "stream": false}));
            if i % 2 == 0 { body } else { with(body, json!({"temperature": 0.9, "top_p": 0.95})) }
        })
        .collect();
    let alone: Vec<Value> =
        bodies.iter().map(|body| server.post(COMPLETIONS, body).1["choices"].clone()).collect();
    thread::scope(|scope| {
        let (server, alone) = (&server, &alone);
        let clients: Vec<_> = bodies
            .iter()
            .enumerate()
            .map(|(i, body)| {
                scope.spawn(move || {
                    let (status, answer) = server.post(COMPLETIONS, body);
                    assert_eq!((status, &answer["choices"]), (200, &alone[i]), "client {i}");
                })
            })
            .collect();
        clients.into_iter().for_each(|client| client.join().unwrap());
    });
    server.wait_until_idle(Duration::from_secs(2));
}

#[test]
fn several_prompts_and_several_answers() {
    let (_folder, model) = tiny_model("several");
    let server = Server::start(&model, &[]);
    let one = |prompt: &str| server.post(COMPLETIONS, &greedy(prompt, 8)).1["choices"][0]["text"].clone();
    let body = with(greedy("", 8), json!({"prompt": ["ab", "xyz"], "n": 2}));
    let (_, answer) = server.post(COMPLETIONS, &body);
    let texts: Vec<&Value> =
        answer["choices"].as_array().unwrap().iter().map(|choice| &choice["text"]).collect();
    let (ab, xyz) = (one("ab"), one("xyz"));
    assert_eq!(texts, [&ab, &ab, &xyz, &xyz]);
    let indices: Vec<&Value> = answer["choices"].as_array().unwrap().iter().map(|c| &c["index"]).collect();
    assert_eq!(indices, [0, 1, 2, 3]);
    assert_eq!(answer["usage"], json!({"prompt_tokens": 5, "completion_tokens": 32, "total_tokens": 37}));

    // Token ids: 'a' and 'b' follow 3 specials and their own number of bytes.
    let ids = with(greedy("", 8), json!({"prompt": [b'a' + 3, b'b' + 3]}));
    assert_eq!(server.post(COMPLETIONS, &ids).1["choices"][0]["text"], ab);
    let echo = with(greedy("ab", 8), json!({"echo": true}));
    assert_eq!(
        server.post(COMPLETIONS, &echo).1["choices"][0]["text"],
        format!("ab{}", ab.as_str().unwrap())
    );

    // Sampled answers of one request differ, and the same seed gives the same again.
    let sampled = with(greedy("ab", 16), json!({"n": 3, "seed": 1, "temperature": 1.0}));
    let (first, second) = (server.post(COMPLETIONS, &sampled).1, server.post(COMPLETIONS, &sampled).1);
    assert_eq!(first["choices"], second["choices"]);
    assert_ne!(first["choices"][0]["text"], first["choices"][1]["text"]);
}

#[test]
fn stop_strings_end_the_text_before_them() {
    let (_folder, model) = tiny_model("stop");
    let server = Server::start(&model, &[]);
    let (_, whole) = server.post(COMPLETIONS, &greedy("stop", 40));
    let whole = whole["choices"][0]["text"].as_str().unwrap().to_owned();
    // Two neighbouring characters from the middle, which are two tokens at least.
    let chars: Vec<char> = whole.chars().collect();
    let stop: String = chars[10..12].iter().collect();
    let expected = whole.split(&stop).next().unwrap();
    for stream in [false, true] {
        let body = with(greedy("stop", 40), json!({"stop": [stop, "never"], "stream": stream}));
        let (text, finish) = if stream {
            let events = http::post(&server.address, COMPLETIONS, &body).events();
            let texts = events.iter().map(|event| event["choices"][0]["text"].as_str().unwrap());
            (texts.collect::<String>(), events.last().unwrap()["choices"][0]["finish_reason"].clone())
        } else {
            let answer = server.post(COMPLETIONS, &body).1;
            let choice = &answer["choices"][0];
            assert!(answer["usage"]["completion_tokens"].as_u64().unwrap() < 40, "{answer}");
            (choice["text"].as_str().unwrap().to_owned(), choice["finish_reason"].clone())
        };
        assert_eq!((text.as_str(), finish), (expected, json!("stop")), "stream: {stream}");
    }
    let (_, answer) =
        server.post(COMPLETIONS, &with(greedy("stop", 40), json!({"stop": stop, "min_tokens": 40})));
    assert_eq!(answer["choices"][0]["text"], json!(whole), "no stop string counts before min_tokens");
    assert_eq!(answer["choices"][0]["finish_reason"], "length");
    server.wait_until_idle(Duration::from_secs(2));
    // Answers that a stop string has ended are complete.
    let health = server.health();
    assert_eq!((&health["finished"], &health["aborted"]), (&json!(4), &json!(0)));
}

#[test]
fn log_probabilities() {
    let (_folder, model) = tiny_model("logprobs");
    let server = Server::start(&model, &[]);
    let (_, answer) = server.post(COMPLETIONS, &with(greedy("p", 6), json!({"logprobs": 3})));
    let lists = &answer["choices"][0]["logprobs"];
    for list in ["tokens", "token_logprobs", "top_logprobs", "text_offset"] {
        assert_eq!(lists[list].as_array().unwrap().len(), 6, "{list}");
    }
    for i in 0..6 {
        // The greedy token is the likeliest one.
        let likeliest = lists["top_logprobs"][i].as_object().unwrap().values();
        let likeliest = likeliest.map(|p| p.as_f64().unwrap()).fold(f64::NEG_INFINITY, f64::max);
        assert_eq!(lists["token_logprobs"][i].as_f64().unwrap(), likeliest);
        assert!(likeliest < 0.0);
    }

    // Tokens of a byte each: characters of several bytes have several tokens at one offset.
    let (_, answer) = server.post(COMPLETIONS, &with(greedy("p", 60), json!({"logprobs": 0})));
    let (text, lists) = (&answer["choices"][0]["text"], &answer["choices"][0]["logprobs"]);
    let tokens = lists["tokens"].as_array().unwrap().iter().map(|token| token.as_str().unwrap());
    let mut expected = Vec::new();
    let (mut bytes, mut places) = (Vec::new(), Vec::new());
    for token in tokens {
        places.push(bytes.len());
        match token.strip_prefix("bytes:\\x") {
            Some(hex) => bytes.push(u8::from_str_radix(hex, 16).unwrap()),
            None => bytes.extend_from_slice(token.as_bytes()),
        }
    }
    let mut chars = 0;
    for chunk in bytes.utf8_chunks() {
        for char in chunk.valid().chars() {
            expected.extend(std::iter::repeat_n(chars, char.len_utf8()));
            chars += 1;
        }
        expected.extend(std::iter::repeat_n(chars, chunk.invalid().len()));
        chars += usize::from(!chunk.invalid().is_empty());
    }
    assert_eq!(text.as_str().unwrap().chars().count(), chars);
    let expected: Vec<usize> = places.into_iter().map(|place| expected[place]).collect();
    assert!(expected.windows(2).any(|pair| pair[0] == pair[1]), "no character is split: {text}");
    assert_eq!(lists["text_offset"], json!(expected));

    // The chosen token has its place even where no others are asked for.
    let (_, answer) = server.post(COMPLETIONS, &with(greedy("p", 6), json!({"logprobs": 0})));
    let lists = &answer["choices"][0]["logprobs"];
    for i in 0..6 {
        let chosen = lists["tokens"][i].as_str().unwrap();
        assert_eq!(lists["top_logprobs"][i], json!({chosen: lists["token_logprobs"][i]}));
    }

    let chat = json!({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, "temperature": 0,
                      "ignore_eos": true, "logprobs": true, "top_logprobs": 2});
    let (_, answer) = server.post(CHAT, &chat);
    let content = answer["choices"][0]["logprobs"]["content"].as_array().unwrap();
    assert_eq!(content.len(), 5);
    let bytes = content.iter().flat_map(|token| token["bytes"].as_array().unwrap());
    let bytes: Vec<u8> = bytes.map(|byte| byte.as_u64().unwrap() as u8).collect();
    assert_eq!(String::from_utf8_lossy(&bytes), answer["choices"][0]["message"]["content"].as_str().unwrap());
    assert!(content.iter().all(|token| token["top_logprobs"].as_array().unwrap().len() == 2));
}

#[test]
fn a_prompt_that_is_too_long_is_refused_before_anything_starts() {
    let (_folder, model) = tiny_model("long");
    let server = Server::start(&model, &["--max-model-len", "400"]);
    let long = "the quick brown fox ".repeat(400);
    for stream in [false, true] {
        let chat =
            json!({"messages": [{"role": "user", "content": long}], "max_tokens": 8, "stream": stream});
        let completion = with(greedy(&long, 8), json!({"stream": stream}));
        // Prompts that fit, with answers that do not.
        let answer = with(greedy("hi", 399), json!({"stream": stream}));
        for (path, body) in [(CHAT, chat), (COMPLETIONS, completion), (COMPLETIONS, answer)] {
            let (status, body) = server.post(path, &body);
            assert_eq!((status, error_code(&body)), (400, "context_length_exceeded"), "{body}");
            let message = body["error"]["message"].as_str().unwrap();
            assert!(message.contains("maximum") && message.contains("400 tokens"), "{message}");
        }
    }
    assert_eq!(server.health()["pages_in_use"], 0);
    assert_eq!(server.post(COMPLETIONS, &greedy("hi", 2)).0, 200);
}

#[test]
fn bodies_are_judged_by_the_servers_own_limit() {
    let (_folder, model) = tiny_model("bodies");
    let server = Server::start(&model, &["--max-body-size", "4MiB"]);
    let body = |bytes: usize| greedy(&"a ".repeat(bytes / 2), 1);
    let (status, answer) = server.post(COMPLETIONS, &body(3 << 20));
    assert_eq!((status, error_code(&answer)), (400, "context_length_exceeded"), "{answer}");
    let (status, answer) = server.post(COMPLETIONS, &body(5 << 20));
    assert_eq!((status, &answer["error"]["type"]), (413, &json!("invalid_request_error")), "{answer}");
    // Announced without a length.
    let mut chunked =
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
            .to_vec();
    for _ in 0..5 {
        chunked.extend_from_slice(b"100000\r\n");
        chunked.extend(std::iter::repeat_n(b' ', 0x10_0000));
        chunked.extend_from_slice(b"\r\n");
    }
    chunked.extend_from_slice(b"0\r\n\r\n");
    let (status, answer) = http::raw(&server.address, &chunked).json();
    assert_eq!((status, &answer["error"]["type"]), (413, &json!("invalid_request_error")), "{answer}");
    // Announced and never sent.
    let announced = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 10737418240\r\n\r\n";
    assert_eq!(http::raw(&server.address, announced).status, 413);
    assert_eq!(server.post(COMPLETIONS, &greedy("hi", 1)).0, 200);
}

#[test]
fn nobody_generates_for_a_client_that_has_gone() {
    let (_folder, model) = tiny_model("gone");
    let server = Server::start(&model, &["--max-num-seqs", "2"]);
    let soon = Duration::from_secs(2);
    for stream in [true, false] {
        // Two run and the others wait: far more than can be done before the client is gone.
        let body = with(greedy("hi", 500), json!({"stream": stream, "n": 40}));
        let stream = http::open(&server.address, COMPLETIONS, body.to_string().as_bytes());
        server.wait_until_running();
        let before = server.health()["generated_tokens"].as_u64().unwrap();
        stream.shutdown(Shutdown::Both).unwrap();
        drop(stream);
        server.wait_until_idle(soon);
        let generated = server.health()["generated_tokens"].as_u64().unwrap() - before;
        assert!(generated < 10_000, "{generated} of 20000 tokens for nobody: {body}");
    }
}

/// A connection of which the sending half is closed cannot be told from one that is closed, so it counts
/// as that.
#[test]
fn a_client_that_closes_its_sending_half_has_gone() {
    let (_folder, model) = tiny_model("half-closed");
    let server = Server::start(&model, &["--max-num-seqs", "2"]);
    let body = with(greedy("hi", 500), json!({"n": 40}));
    let mut stream = http::open(&server.address, COMPLETIONS, body.to_string().as_bytes());
    stream.shutdown(Shutdown::Write).unwrap();
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).unwrap();
    assert_eq!(String::from_utf8_lossy(&answer), "");
    server.wait_until_idle(Duration::from_secs(2));
    assert!(server.health()["generated_tokens"].as_u64().unwrap() < 10_000);
}

#[test]
fn a_full_queue_is_503_and_says_when_to_come_back() {
    let (_folder, model) = tiny_model("queue");
    let server = Server::start(&model, &["--max-num-seqs", "1", "--max-queued-requests", "2"]);
    let body = with(greedy("hi", 500), json!({"stream": true, "n": 3}));
    let streams = http::open(&server.address, COMPLETIONS, body.to_string().as_bytes());
    server.wait_until(Duration::from_secs(20), |health| health["waiting"] == 2);
    let chat = json!({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2});
    for stream in [false, true] {
        for (path, body) in [(COMPLETIONS, greedy("hi", 2)), (CHAT, chat.clone())] {
            let response = http::post(&server.address, path, &with(body, json!({"stream": stream})));
            assert!(response.head.contains("\r\nretry-after: 1"), "{}", response.head);
            let (status, body) = response.json();
            assert_eq!((status, error_code(&body)), (503, "queue_full"), "{body}");
            assert_eq!(body["error"]["type"], "server_error");
            let message = body["error"]["message"].as_str().unwrap();
            assert!(message.contains("3 requests run or wait"), "{message}");
        }
    }
    drop(streams);
    server.wait_until_idle(Duration::from_secs(2));
    // Two prompts where one place is free: neither is begun.
    let body = with(greedy("hi", 500), json!({"stream": true, "n": 2}));
    let streams = http::open(&server.address, COMPLETIONS, body.to_string().as_bytes());
    server.wait_until(Duration::from_secs(20), |health| health["waiting"] == 1);
    let aborted = server.health()["aborted"].clone();
    let response =
        http::post(&server.address, COMPLETIONS, &with(greedy("", 2), json!({"prompt": ["a", "b"]})));
    assert_eq!(response.json().0, 503);
    thread::sleep(Duration::from_millis(20)); // some steps, in which what was queued would be given up
    assert_eq!((&server.health()["waiting"], &server.health()["aborted"]), (&json!(1), &aborted));
    drop(streams);
    server.wait_until_idle(Duration::from_secs(2));
    assert_eq!(server.post(COMPLETIONS, &greedy("hi", 2)).0, 200);
    // More at once than can ever be taken: to try again would be in vain.
    let (status, body) =
        server.post(COMPLETIONS, &with(greedy("hi", 2), json!({"prompt": ["a", "b"], "n": 2})));
    assert_eq!((status, &body["error"]["param"]), (400, &json!("n")), "{body}");
    let (status, body) = server.post(CHAT, &with(chat, json!({"n": 4})));
    assert_eq!((status, &body["error"]["param"]), (400, &json!("n")), "{body}");
}

#[test]
fn sigterm_lets_answers_finish_and_then_ends() {
    let (_folder, model) = tiny_model("sigterm");
    let mut server = Server::start(&model, &[]);
    let body = with(greedy("hi", 500), json!({"stream": true, "n": 20}));
    let stream = http::open(&server.address, COMPLETIONS, body.to_string().as_bytes());
    server.wait_until_running();
    let reader = thread::spawn(move || http::finish(stream).events());
    assert!(server.terminate(Duration::from_secs(20)), "the server did not end by itself");
    let events = reader.join().unwrap();
    let whole = events.iter().filter(|event| event["choices"][0]["finish_reason"] == "length");
    assert_eq!(whole.count(), 20);
}

/// A second signal does not wait for answers; their clients must not take what they have for the whole.
#[test]
fn an_answer_that_breaks_off_says_so() {
    let (_folder, model) = tiny_model("break-off");
    let mut server = Server::start(&model, &["--max-num-seqs", "2"]);
    let body = with(greedy("hi", 500), json!({"stream": true, "n": 40}));
    let stream = http::open(&server.address, COMPLETIONS, body.to_string().as_bytes());
    server.wait_until_running();
    let reader = thread::spawn(move || http::finish(stream).events());
    server.signal();
    // Signals of one kind that come too close are one.
    thread::sleep(Duration::from_millis(200));
    assert!(server.terminate(Duration::from_secs(20)), "the server did not end by itself");
    let events = reader.join().unwrap();
    let error = events.last().unwrap()["error"]["message"].as_str().unwrap();
    assert!(error.contains("stopped"), "{error}");
}
