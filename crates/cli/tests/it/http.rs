//! Just enough of an HTTP client to see what the server really sends.

use std::{
    io::{Read, Write},
    net::TcpStream,
    time::Duration,
};

use serde_json::Value;

/// An answer, read to its end.
pub(crate) struct Response {
    pub(crate) status: u16,
    /// As sent, in lower case.
    pub(crate) head: String,
    pub(crate) body: Vec<u8>,
}

impl Response {
    pub(crate) fn json(&self) -> (u16, Value) {
        let body = serde_json::from_slice(&self.body);
        let body = body.unwrap_or_else(|_| panic!("not JSON: {:?}", String::from_utf8_lossy(&self.body)));
        (self.status, body)
    }

    /// Data of the events of a stream, `[DONE]` taken off the end.
    pub(crate) fn events(&self) -> Vec<Value> {
        assert_eq!(self.status, 200, "{:?}", String::from_utf8_lossy(&self.body));
        assert!(self.head.contains("content-type: text/event-stream"), "{}", self.head);
        let text = std::str::from_utf8(&self.body).unwrap();
        let mut data: Vec<&str> = text.lines().filter_map(|line| line.strip_prefix("data: ")).collect();
        assert_eq!(data.pop(), Some("[DONE]"));
        data.into_iter().map(|data| serde_json::from_str(data).unwrap()).collect()
    }
}

pub(crate) fn get(address: &str, path: &str) -> Response {
    raw(address, format!("GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").as_bytes())
}

pub(crate) fn post(address: &str, path: &str, body: &Value) -> Response {
    finish(open(address, path, body.to_string().as_bytes()))
}

/// Sends a POST request and leaves the answer unread.
pub(crate) fn open(address: &str, path: &str, body: &[u8]) -> TcpStream {
    let mut stream = connect(address);
    let head = format!(
        "POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n\
         Content-Length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes()).unwrap();
    stream.write_all(body).unwrap();
    stream
}

/// Sends bytes as they are.
pub(crate) fn raw(address: &str, request: &[u8]) -> Response {
    let mut stream = connect(address);
    stream.write_all(request).unwrap();
    finish(stream)
}

fn connect(address: &str) -> TcpStream {
    let stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    stream
}

/// Reads the answer.
pub(crate) fn finish(mut stream: TcpStream) -> Response {
    let mut bytes = Vec::new();
    stream.read_to_end(&mut bytes).unwrap();
    let end = bytes.windows(4).position(|window| window == b"\r\n\r\n").unwrap();
    let head = String::from_utf8(bytes[..end].to_vec()).unwrap().to_lowercase();
    let body = bytes[end + 4..].to_vec();
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    let chunked = head.contains("transfer-encoding: chunked");
    Response { status, head, body: if chunked { unchunk(&body) } else { body } }
}

fn unchunk(mut body: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    loop {
        let line = body.windows(2).position(|window| window == b"\r\n").unwrap();
        let len = usize::from_str_radix(std::str::from_utf8(&body[..line]).unwrap(), 16).unwrap();
        if len == 0 {
            return out;
        }
        out.extend_from_slice(&body[line + 2..][..len]);
        body = &body[line + 2 + len + 2..];
    }
}
