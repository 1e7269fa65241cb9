//! Paths, and bodies on their way in.

use std::{sync::Arc, time::Duration};

use axum::{
    Json, Router,
    body::{Body, HttpBody},
    extract::{Path, Request, State},
    http::{HeaderValue, header},
    response::{IntoResponse, Response},
    routing::{get, post},
};
use futures::StreamExt;
use serde_json::json;

use super::{
    app::App,
    chat, completions,
    error::ApiError,
    openai::{ModelList, ModelObject},
};

pub(crate) fn router(app: Arc<App>) -> Router {
    Router::new()
        .route("/health", get(health))
        .route("/v1/models", get(models))
        .route("/v1/models/{*model}", get(model))
        .route("/v1/completions", post(post_completions))
        .route("/v1/chat/completions", post(post_chat))
        .fallback(no_such_path)
        .method_not_allowed_fallback(wrong_method)
        .with_state(app)
}

/// 200 while the engine runs. The counters are for people and tests.
async fn health(State(app): State<Arc<App>>) -> Response {
    let stats = app.engine.stats();
    if let Some(reason) = stats.stopped {
        return ApiError::unavailable(format!("The engine has stopped: {reason}.")).into_response();
    }
    let pages_in_use: usize = stats.pages.iter().map(|pool| pool.total - pool.free).sum();
    Json(json!({
        "status": "ok",
        "running": stats.num_running,
        "waiting": stats.num_waiting,
        "pages_in_use": pages_in_use,
        "generated_tokens": stats.generation_tokens,
        "finished": stats.finished,
        "aborted": stats.aborted,
    }))
    .into_response()
}

fn model_object(app: &App) -> ModelObject {
    ModelObject {
        id: app.model.clone(),
        object: "model",
        created: app.created,
        owned_by: "turboquant",
        max_model_len: app.max_model_len(),
    }
}

async fn models(State(app): State<Arc<App>>) -> Json<ModelList> {
    Json(ModelList { object: "list", data: vec![model_object(&app)] })
}

async fn model(State(app): State<Arc<App>>, Path(name): Path<String>) -> Result<Json<ModelObject>, ApiError> {
    if name == app.model {
        Ok(Json(model_object(&app)))
    } else {
        Err(ApiError::no_such_model(&name, &app.model))
    }
}

async fn post_completions(State(app): State<Arc<App>>, request: Request) -> Response {
    match read_body(request, app.max_body_size).await {
        Ok(body) => completions::handle(app, body).await.into_response(),
        Err(error) => error,
    }
}

async fn post_chat(State(app): State<Arc<App>>, request: Request) -> Response {
    match read_body(request, app.max_body_size).await {
        Ok(body) => chat::handle(app, body).await.into_response(),
        Err(error) => error,
    }
}

async fn no_such_path(request: Request) -> ApiError {
    ApiError::no_such_path(request.method().as_str(), request.uri().path())
}

async fn wrong_method(request: Request) -> ApiError {
    ApiError::wrong_method(request.method().as_str(), request.uri().path())
}

/// The body, if it is at most `limit` bytes. Memory follows what arrives, not what was announced.
async fn read_body(request: Request, limit: u64) -> Result<Vec<u8>, Response> {
    let body = request.into_body();
    if body.size_hint().lower() > limit {
        return Err(too_large(body, limit).await);
    }
    let mut bytes = Vec::new();
    let mut chunks = body.into_data_stream();
    while let Some(chunk) = chunks.next().await {
        let chunk = chunk.map_err(|error| {
            ApiError::invalid(format!("The request body could not be read: {error}.")).into_response()
        })?;
        if bytes.len() as u64 + chunk.len() as u64 > limit {
            return Err(too_large(Body::from_stream(chunks), limit).await);
        }
        bytes.extend_from_slice(&chunk);
    }
    Ok(bytes)
}

/// The 413 response. Most clients listen only after they have sent everything, so what still comes is read and
/// thrown away for a while; then the connection closes.
async fn too_large(rest: Body, limit: u64) -> Response {
    let mut rest = rest.into_data_stream();
    let drain = async { while let Some(Ok(_)) = rest.next().await {} };
    // Either way it ends with the response.
    let _ = tokio::time::timeout(Duration::from_secs(5), drain).await;
    let mut response = ApiError::body_too_large(limit).into_response();
    response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    response
}

/// Runs `work`, which may take long, where it holds up no other request.
pub(crate) async fn off_the_runtime<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    match tokio::task::spawn_blocking(work).await {
        Ok(result) => result,
        Err(error) => Err(ApiError::internal(format!("The request could not be prepared: {error}."))),
    }
}
