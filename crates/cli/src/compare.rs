//! `turboquant compare`: one text through every cache format.
//!
//! The first part of the text is prefilled, the rest is scored token by token on the decode path: a
//! score taken from a prefill would read raw keys and values and say nothing about the packed ones.

mod divergence;

use std::{
    io::Write,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use serde::Serialize;
use turboquant::format::CacheDtype;
use turboquant_engine::{
    plan::{Budget, DEFAULT_BOUNDARY_LAYERS, Plan, PlanOptions},
    session::Session,
};

use self::divergence::{Divergence, LogProbs};
use crate::{
    args::CompareArgs,
    console::say,
    error::wrong_use,
    health,
    report::{Table, grouped, sequence_bytes},
    setup::{self, Loaded},
};

/// Acts I and II of Hamlet; see `assets/README.md`.
const DEFAULT_TEXT: &str = include_str!("../assets/hamlet.txt");

/// Tokens of a prefill chunk.
const MAX_NUM_BATCHED_TOKENS: usize = 512;

/// Tokens that are scored in one step where time is not taken.
const SCORE_CHUNK: usize = 32;

/// Steps of one token whose time is taken, at the end of the text.
const TIMED_STEPS: usize = 33;

/// The whole result.
#[derive(Debug, Serialize)]
struct Comparison {
    /// Of docs/compare-schema.md.
    schema: u32,
    model: String,
    context: usize,
    score_tokens: usize,
    rows: Vec<Row>,
}

/// One format.
#[derive(Debug, Serialize)]
struct Row {
    kv_cache_dtype: &'static str,
    /// First and last layers that stay in the model's dtype.
    boundary_layers: usize,
    kv_bytes_per_token: f64,
    /// bf16 bytes over these bytes, all layers together.
    ratio_to_bf16: f64,
    prefill_tokens_per_second: f64,
    /// At the full context, median of single steps.
    decode_tokens_per_second: f64,
    /// From the first row, `auto`; absent there.
    divergence: Option<Divergence>,
}

/// Runs the command.
pub(crate) fn run(args: &CompareArgs) -> Result<()> {
    if args.score_tokens >= args.context {
        return Err(wrong_use(format!(
            "--score-tokens {} must be less than --context {}: the tokens before are what the cache holds",
            args.score_tokens, args.context
        )));
    }
    let text = match &args.text {
        Some(file) => std::fs::read_to_string(file)
            .with_context(|| format!("{} cannot be read as text", file.display()))?,
        None => DEFAULT_TEXT.to_owned(),
    };
    let loaded = setup::load(&args.model)?;
    let longest = args.model.paging.max_model_len.unwrap_or(loaded.model.config.max_model_len);
    if args.context > longest {
        return Err(wrong_use(format!(
            "--context {} is more than the model's {longest} tokens",
            args.context
        )));
    }
    let mut tokens = loaded.text.encode(&text)?;
    if tokens.len() < args.context {
        return Err(wrong_use(format!(
            "the text has {} tokens, fewer than --context {}; give a longer one with --text",
            tokens.len(),
            args.context
        )));
    }
    tokens.truncate(args.context);

    let mut rows = Vec::new();
    let mut reference = None;
    for (dtype, boundary_layers) in settings(&loaded, args) {
        say(format_args!("{dtype}, {boundary_layers} boundary layers ..."));
        let options = PlanOptions {
            dtype,
            boundary_layers: Some(boundary_layers),
            budget: Budget::Tokens(args.context),
            max_model_len: Some(args.context),
            max_num_batched_tokens: MAX_NUM_BATCHED_TOKENS,
            ..loaded.default_plan_options(args.model.paging.page_size)
        };
        let plan = loaded.plan(&options)?;
        setup::print_notices(&plan);
        rows.push(measure(
            &loaded,
            &plan,
            &tokens,
            args.score_tokens,
            &mut reference,
            (dtype, boundary_layers),
        )?);
    }
    let comparison = Comparison {
        schema: 1,
        model: loaded.name,
        context: args.context,
        score_tokens: args.score_tokens,
        rows,
    };
    let mut stdout = std::io::stdout().lock();
    if args.json {
        serde_json::to_writer_pretty(&mut stdout, &comparison).map_err(std::io::Error::from)?;
        writeln!(stdout)?;
    } else {
        write!(stdout, "{}", table(&comparison))?;
    }
    Ok(())
}

/// `auto` first. Boundary layers make a difference to TurboQuant formats only.
fn settings(loaded: &Loaded, args: &CompareArgs) -> Vec<(CacheDtype, usize)> {
    let default = if loaded.model.config.is_hybrid() { 0 } else { DEFAULT_BOUNDARY_LAYERS };
    let mut settings = Vec::new();
    for dtype in CacheDtype::ALL {
        match dtype {
            CacheDtype::TurboQuant(_) if args.kv_boundary_layers.is_empty() => {
                settings.push((dtype, default))
            }
            CacheDtype::TurboQuant(_) => {
                settings.extend(args.kv_boundary_layers.iter().map(|&layers| (dtype, layers)));
            }
            CacheDtype::Auto | CacheDtype::Fp8 => settings.push((dtype, 0)),
        }
    }
    settings
}

/// One format over the text. The first call fills `reference`, the others are held against it.
fn measure(
    loaded: &Loaded,
    plan: &Plan,
    tokens: &[u32],
    score_tokens: usize,
    reference: &mut Option<LogProbs>,
    (dtype, boundary_layers): (CacheDtype, usize),
) -> Result<Row> {
    let (prompt, scored) = tokens.split_at(tokens.len() - score_tokens);
    let mut session = Session::new(loaded.runner(plan)?, MAX_NUM_BATCHED_TOKENS);
    let start = Instant::now();
    session.prefill(prompt)?;
    let prefill = start.elapsed();

    let mut log_probs = LogProbs::new(loaded.model.vocab_size);
    let mut divergence = reference.as_ref().map(|_| divergence::Collector::default());
    let mut steps: Vec<Duration> = Vec::new();
    let (untimed, timed) = scored.split_at(scored.len().saturating_sub(TIMED_STEPS));
    for chunk in untimed.chunks(SCORE_CHUNK).chain(timed.chunks(1)) {
        let start = Instant::now();
        let logits = session.score(chunk)?;
        if chunk.len() == 1 {
            steps.push(start.elapsed());
        }
        for row in logits.rows() {
            ensure!(
                divergence::is_distribution(row),
                "{dtype}: the model's logits are not all numbers, so there is nothing to compare"
            );
            match (reference.as_ref(), divergence.as_mut()) {
                (Some(reference), Some(divergence)) => divergence.add(reference, row),
                _ => log_probs.push(row),
            }
        }
    }
    health::warnings(session.runner().cache_health()).into_iter().for_each(say);
    let divergence = divergence.map(divergence::Collector::finish);
    if reference.is_none() {
        *reference = Some(log_probs);
    }
    steps.sort_unstable();
    let (bytes, bf16) = sequence_bytes(plan, tokens.len());
    Ok(Row {
        kv_cache_dtype: dtype.name(),
        boundary_layers,
        kv_bytes_per_token: bytes as f64 / tokens.len() as f64,
        ratio_to_bf16: bf16 as f64 / bytes.max(1) as f64,
        prefill_tokens_per_second: prompt.len() as f64 / prefill.as_secs_f64(),
        decode_tokens_per_second: 1.0 / steps[steps.len() / 2].as_secs_f64(),
        divergence,
    })
}

fn table(comparison: &Comparison) -> String {
    let mut table = Table::new(&[
        "KV cache",
        ">boundary",
        ">B/token",
        ">vs bf16",
        ">prefill t/s",
        ">decode t/s",
        ">KL mean",
        ">KL median",
        ">KL 99.9 %",
        ">top-1",
    ]);
    for row in &comparison.rows {
        let mut cells = vec![
            row.kv_cache_dtype.to_owned(),
            row.boundary_layers.to_string(),
            grouped(row.kv_bytes_per_token.round() as u64),
            format!("{:.2}x", row.ratio_to_bf16),
            format!("{:.1}", row.prefill_tokens_per_second),
            format!("{:.1}", row.decode_tokens_per_second),
        ];
        match &row.divergence {
            Some(divergence) => cells.extend([
                format!("{:.5}", divergence.kl_mean),
                format!("{:.5}", divergence.kl_median),
                format!("{:.4}", divergence.kl_p999),
                format!("{:.1} %", 100.0 * divergence.top1_agreement),
            ]),
            None => cells.extend(["-"; 4].map(str::to_owned)),
        }
        table.row(cells);
    }
    format!(
        "{}, {} tokens of context, the last {} scored on the decode path; KL divergence in nats from auto\n{table}",
        comparison.model, comparison.context, comparison.score_tokens
    )
}
