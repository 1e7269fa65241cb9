//! `turboquant run`: one answer, or a chat.

mod chat;
mod generation;

use std::io::{self, Write};

use anyhow::{Context, Result};
use minijinja::{Value as JinjaValue, context};
use turboquant_engine::{
    engine::EngineConfig,
    plan::{Budget, Plan, PlanOptions},
    sampler::SamplingParams,
};

use self::generation::{Generator, Speed};
use crate::{
    args::{RunArgs, SamplingArgs},
    console::say,
    error::wrong_use,
    report::{cache_summary, size},
    setup::{self, Loaded},
    text::stop::StopSet,
};

/// Tokens of context that a chat has without `--max-model-len`, if the model was made for as many.
const CHAT_CONTEXT: usize = 8192;

/// Tokens of a step; a prompt is computed in chunks of this.
const MAX_NUM_BATCHED_TOKENS: usize = 512;

/// Runs the command.
pub(crate) fn run(args: &RunArgs) -> Result<()> {
    let prompt = match (&args.prompt, &args.prompt_file) {
        (Some(prompt), _) => Some(prompt.clone()),
        (None, Some(file)) => Some(
            std::fs::read_to_string(file)
                .with_context(|| format!("{} cannot be read as text", file.display()))?,
        ),
        (None, None) => None,
    };
    let loaded = setup::load(&args.model)?;
    match prompt {
        Some(prompt) => answer(args, &loaded, &prompt),
        None => chat::run(args, &loaded),
    }
}

/// One prompt, one answer, one table.
fn answer(args: &RunArgs, loaded: &Loaded, prompt: &str) -> Result<()> {
    let prompt = prompt_ids(args, loaded, prompt)?;
    let params = sampling_params(&args.sampling);
    // Without limits the cache is made for what is asked, not for all the model could take.
    let context = prompt.len() + params.max_tokens.unwrap_or(CHAT_CONTEXT);
    let mut session = start(args, loaded, context.max(CHAT_CONTEXT))?;
    let mut stdout = io::stdout().lock();
    let answer = session.generator.generate(prompt, params, |text| {
        stdout.write_all(text.as_bytes())?;
        stdout.flush()
    })?;
    if !answer.ends_with('\n') {
        stdout.write_all(b"\n")?;
    }
    stdout.flush()?;
    session.print_summary();
    Ok(())
}

fn prompt_ids(args: &RunArgs, loaded: &Loaded, prompt: &str) -> Result<Vec<u32>> {
    let text = &loaded.text;
    if !args.raw && text.has_chat_template() {
        let system = args.system.as_ref().map(|content| context! { role => "system", content });
        let user = context! { role => "user", content => prompt };
        let messages: Vec<JinjaValue> = system.into_iter().chain([user]).collect();
        if let Some(rendered) = text.render_chat(&messages, None) {
            return text.encode_rendered(&rendered?);
        }
    }
    if args.system.is_some() {
        return Err(wrong_use("--system needs a model with a chat template, and no --raw"));
    }
    if !args.raw {
        say("note: the model has no chat template, so it continues the prompt as it stands");
    }
    text.encode(prompt)
}

fn sampling_params(args: &SamplingArgs) -> SamplingParams {
    SamplingParams {
        max_tokens: args.max_tokens,
        temperature: args.temperature,
        top_k: args.top_k,
        top_p: args.top_p,
        min_p: args.min_p,
        repetition_penalty: args.repetition_penalty,
        presence_penalty: args.presence_penalty,
        frequency_penalty: args.frequency_penalty,
        seed: args.seed,
        ignore_eos: args.ignore_eos,
        ..SamplingParams::default()
    }
}

/// A running engine for one sequence at a time.
struct Session {
    plan: Plan,
    weight_bytes: usize,
    generator: Generator,
}

/// Starts an engine for sequences of up to `context` tokens, or what the arguments and the model say.
fn start(args: &RunArgs, loaded: &Loaded, context: usize) -> Result<Session> {
    let max_model_len =
        args.model.paging.max_model_len.unwrap_or(context.min(loaded.model.config.max_model_len));
    let options = PlanOptions {
        budget: Budget::Tokens(max_model_len),
        max_model_len: Some(max_model_len),
        max_num_seqs: 1,
        max_num_batched_tokens: MAX_NUM_BATCHED_TOKENS,
        ..loaded.plan_options(&args.model, &args.cache)?
    };
    let plan = loaded.plan(&options)?;
    setup::print_notices(&plan);
    let config = EngineConfig {
        max_num_seqs: 1,
        max_num_batched_tokens: MAX_NUM_BATCHED_TOKENS,
        // The next question of a chat may come before the engine has let go of the last answer.
        max_queued_requests: 1,
        max_model_len: plan.max_model_len,
        eos_token_ids: loaded.stop_ids(),
    };
    let engine = setup::start_engine(loaded.runner(&plan)?, config)?;
    let tokens = loaded.text.tokens().clone();
    let generator = Generator::new(engine, tokens, StopSet::new(args.sampling.stop.iter().cloned()));
    Ok(Session { plan, weight_bytes: loaded.model.weights.bytes, generator })
}

impl Session {
    /// Formats, memory and speed, on stderr.
    fn print_summary(&self) {
        let plan = &self.plan;
        let Speed { prompt_tokens, prefill, decoded_tokens, decode, peak_pages } = self.generator.speed();
        say(format_args!("\n{}", cache_summary(plan)));
        let used: u64 =
            plan.groups.iter().zip(peak_pages).map(|(group, &pages)| (group.page_bytes * pages) as u64).sum();
        say(format_args!("KV memory     {} used of {} planned", size(used), size(plan.total_bytes())));
        if let Some(peak) = setup::peak_memory() {
            let weights = size(self.weight_bytes as u64);
            say(format_args!("memory        {} at most, {weights} of it weights", size(peak)));
        }
        let rate = |tokens: usize, seconds: f64| {
            if tokens == 0 || seconds <= 0.0 {
                "-".to_owned()
            } else {
                format!("{:.1}", tokens as f64 / seconds)
            }
        };
        say(format_args!(
            "prefill       {} tokens/s ({prompt_tokens} tokens)",
            rate(*prompt_tokens, prefill.as_secs_f64())
        ));
        say(format_args!(
            "decode        {} tokens/s ({decoded_tokens} tokens)",
            rate(*decoded_tokens, decode.as_secs_f64())
        ));
        self.generator.warnings().into_iter().for_each(say);
    }
}
