//! `turboquant serve`: the model over HTTP, as the OpenAI API does it.

mod app;
mod chat;
mod completions;
mod error;
mod fields;
mod openai;
mod request;
mod router;
mod stream;
#[cfg(test)]
mod tests;
mod values;

use std::{
    io::{self, Write},
    net::SocketAddr,
    sync::Arc,
    time::Duration,
};

use anyhow::{Context, Result};
use axum::serve::ListenerExt;
use tokio::{
    net::TcpListener,
    signal::unix::{SignalKind, signal},
};
use turboquant_engine::{
    engine::{Engine, EngineConfig, EngineHandle},
    plan::{Budget, PlanOptions},
};

use self::app::App;
use crate::{
    args::ServeArgs,
    console::say,
    health,
    report::{cache_summary, size},
    setup,
};

/// How long answers in progress may take after the server was told to stop.
const SHUTDOWN_GRACE: Duration = Duration::from_secs(30);

/// How long clients may take after that to hear that their answers broke off.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// How often the cache's health is looked at.
const HEALTH_INTERVAL: Duration = Duration::from_secs(30);

/// Serves until it is told to stop.
pub(crate) fn run(args: &ServeArgs) -> Result<()> {
    // An address that is taken should be known before the model is loaded.
    let address = SocketAddr::new(args.host, args.port);
    let listener = std::net::TcpListener::bind(address)
        .with_context(|| format!("cannot listen on {address}; choose another with --host and --port"))?;
    listener.set_nonblocking(true)?;
    let loaded = setup::load(&args.model)?;
    let options = PlanOptions {
        budget: Budget::Memory(args.kv_cache_memory),
        max_model_len: args.model.paging.max_model_len,
        max_num_seqs: args.steps.max_num_seqs,
        max_num_batched_tokens: args.steps.max_num_batched_tokens,
        ..loaded.plan_options(&args.model, &args.cache)?
    };
    let plan = loaded.plan(&options)?;
    let config = EngineConfig {
        max_num_seqs: plan.max_num_seqs,
        max_num_batched_tokens: args.steps.max_num_batched_tokens,
        max_queued_requests: args.max_queued_requests,
        max_model_len: plan.max_model_len,
        eos_token_ids: loaded.stop_ids(),
    };
    setup::print_notices(&plan);
    let engine = setup::start_engine(loaded.runner(&plan)?, config)?;
    let model = args.served_model_name.clone().unwrap_or_else(|| loaded.name.clone());
    say(cache_summary(&plan));
    say(format_args!(
        "capacity      {} sequences at once, {} tokens each at most; {} of KV memory",
        plan.max_num_seqs,
        plan.max_model_len,
        size(plan.total_bytes())
    ));
    let app = Arc::new(App::new(engine.handle(), loaded.text, model, args.max_body_size));
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let result = runtime.block_on(serve(listener, app, engine));
    // Threads that still tokenise for clients that have gone are not waited for.
    runtime.shutdown_background();
    result.context("the server failed")
}

async fn serve(listener: std::net::TcpListener, app: Arc<App>, engine: Engine) -> io::Result<()> {
    let listener = TcpListener::from_std(listener)?;
    let address = listener.local_addr()?;
    let mut stop = Stop::new()?;
    tokio::spawn(watch_health(engine.handle()));
    let (stopping, stopped) = tokio::sync::oneshot::channel::<()>();
    // Whoever reads this line may go away; the clients do not.
    let _ = writeln!(io::stdout(), "Serving {} on http://{address} (Ctrl-C stops)", app.model);
    // Tokens are small: they must not wait for more to fill a packet.
    let listener = listener.tap_io(|stream| {
        if let Err(error) = stream.set_nodelay(true) {
            tracing::debug!("TCP_NODELAY: {error}");
        }
    });
    let server = axum::serve(listener, router::router(app)).with_graceful_shutdown(async {
        // The sender is only dropped with the server itself.
        let _ = stopped.await;
    });
    let mut server = std::pin::pin!(server.into_future());
    tokio::select! {
        result = &mut server => return result,
        () = stop.requested() => {}
    }
    let grace = SHUTDOWN_GRACE.as_secs();
    say(format_args!("Stopping: no new connections; answers in progress may take {grace} s."));
    let _ = stopping.send(());
    tokio::select! {
        result = &mut server => return result,
        () = stop.requested() => {}
        () = tokio::time::sleep(SHUTDOWN_GRACE) => {}
    }
    // Answers that still run end with an error that says so, not as if they were complete.
    let last_words = async {
        let ended = tokio::task::spawn_blocking(|| engine.shutdown()).await;
        ended.map_err(io::Error::other).and(server.await)
    };
    tokio::time::timeout(LAST_WORDS, last_words).await.unwrap_or(Ok(()))
}

/// Says what the cache could not store exactly, when that has changed.
async fn watch_health(engine: EngineHandle) {
    let mut said = Vec::new();
    let mut interval = tokio::time::interval(HEALTH_INTERVAL);
    loop {
        interval.tick().await;
        let warnings = health::warnings(&engine.stats().cache_health);
        if warnings != said {
            warnings.iter().for_each(say);
            said = warnings;
        }
    }
}

/// SIGINT and SIGTERM.
struct Stop {
    interrupt: tokio::signal::unix::Signal,
    terminate: tokio::signal::unix::Signal,
}

impl Stop {
    fn new() -> io::Result<Self> {
        Ok(Self { interrupt: signal(SignalKind::interrupt())?, terminate: signal(SignalKind::terminate())? })
    }

    /// Waits for the next of either.
    async fn requested(&mut self) {
        tokio::select! {
            _ = self.interrupt.recv() => {}
            _ = self.terminate.recv() => {}
        }
    }
}
