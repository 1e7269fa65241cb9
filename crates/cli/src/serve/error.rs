//! Errors as the OpenAI API words them.

use axum::{
    Json,
    http::{StatusCode, header},
    response::{IntoResponse, Response},
};
use serde::Serialize;
use turboquant_engine::request::GenerationError;

/// An error response: a status and the one object that clients parse.
#[derive(Debug)]
pub(crate) struct ApiError {
    status: StatusCode,
    body: ErrorBody,
    /// Seconds after which a client may try again.
    retry_after: Option<u16>,
}

#[derive(Debug, Clone, Serialize)]
pub(crate) struct ErrorBody {
    message: String,
    #[serde(rename = "type")]
    kind: &'static str,
    param: Option<String>,
    code: Option<&'static str>,
}

/// `{"error": {...}}`, alone or as an event of a stream.
#[derive(Debug, Serialize)]
pub(crate) struct ErrorEnvelope {
    pub(crate) error: ErrorBody,
}

impl ApiError {
    fn new(status: StatusCode, kind: &'static str, message: impl Into<String>) -> Self {
        let body = ErrorBody { message: message.into(), kind, param: None, code: None };
        Self { status, body, retry_after: None }
    }

    fn about(mut self, param: impl Into<String>) -> Self {
        self.body.param = Some(param.into());
        self
    }

    fn code(mut self, code: &'static str) -> Self {
        self.body.code = Some(code);
        self
    }

    /// 400: a request that is wrong as a whole.
    pub(crate) fn invalid(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "invalid_request_error", message)
    }

    /// 400: one field is wrong.
    pub(crate) fn invalid_param(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self::invalid(message).about(param)
    }

    /// 400: a field asks for something this server does not do.
    pub(crate) fn unsupported(param: &'static str, message: impl Into<String>) -> Self {
        Self::invalid_param(param, message).code("unsupported_parameter")
    }

    /// 400: prompt and answer do not fit.
    pub(crate) fn context_length(max_model_len: usize, what: &str) -> Self {
        Self::invalid(format!("This model's maximum context length is {max_model_len} tokens, but {what}."))
            .code("context_length_exceeded")
    }

    /// 404: a model that is not served.
    pub(crate) fn no_such_model(asked: &str, served: &str) -> Self {
        let message = format!("The model `{asked}` does not exist; this server has `{served}`.");
        Self::new(StatusCode::NOT_FOUND, "invalid_request_error", message)
            .about("model")
            .code("model_not_found")
    }

    /// 404: a path that does not exist.
    pub(crate) fn no_such_path(method: &str, path: &str) -> Self {
        let message = format!("There is no {method} {path} here; see GET /v1/models.");
        Self::new(StatusCode::NOT_FOUND, "invalid_request_error", message)
    }

    /// 405: a path that exists for other methods.
    pub(crate) fn wrong_method(method: &str, path: &str) -> Self {
        let message = format!("{path} does not take {method} requests.");
        Self::new(StatusCode::METHOD_NOT_ALLOWED, "invalid_request_error", message)
    }

    /// 413: a body over the server's own limit.
    pub(crate) fn body_too_large(limit: u64) -> Self {
        let message = format!("The request body is larger than the {limit} bytes this server accepts.");
        Self::new(StatusCode::PAYLOAD_TOO_LARGE, "invalid_request_error", message).code("request_too_large")
    }

    /// 503: too many requests wait already. Official clients try again by themselves.
    pub(crate) fn queue_full(message: impl Into<String>) -> Self {
        Self { retry_after: Some(1), ..Self::unavailable(message).code("queue_full") }
    }

    /// 503: the engine takes no more requests.
    pub(crate) fn unavailable(message: impl Into<String>) -> Self {
        Self::new(StatusCode::SERVICE_UNAVAILABLE, "server_error", message)
    }

    /// 500: a failure of ours.
    pub(crate) fn internal(message: impl Into<String>) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "server_error", message)
    }

    /// An answer that broke off.
    pub(crate) fn generation(error: &GenerationError) -> Self {
        match error {
            GenerationError::Stopped(_) => Self::unavailable(format!("{error}.")),
            _ => Self::internal(format!("{error}.")),
        }
    }

    /// The object inside, for an error in the middle of a stream.
    pub(crate) fn into_envelope(self) -> ErrorEnvelope {
        ErrorEnvelope { error: self.body }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = (self.status, Json(ErrorEnvelope { error: self.body })).into_response();
        if let Some(seconds) = self.retry_after {
            response.headers_mut().insert(header::RETRY_AFTER, seconds.into());
        }
        response
    }
}
