//! `turboquant plan`: what a model's cache takes, before anything is loaded.

mod render;
mod units;

use std::{io::Write, path::PathBuf};

use anyhow::{Context, Result};
use clap::{Args, ValueEnum};
use serde::Serialize;
use turboquant::format::CacheDtype;
use turboquant_engine::{
    inspect::{ModelFacts, WeightSource},
    plan::{
        Budget, PlanOptions, VllmPages,
        report::{CapacityReport, RateReport, RatioReport, Report},
    },
};

use crate::{
    args::{CacheArgs, PagingArgs, StepArgs, at_least_one, byte_size},
    error::{refused_facts, wrong_use},
    models,
};

/// `turboquant plan`
#[derive(Debug, Args)]
pub(crate) struct PlanArgs {
    /// A config.json, a model folder, a GGUF file, a hub id or an alias.
    pub(crate) model: String,
    #[command(flatten)]
    pub(crate) cache: CacheArgs,
    /// Memory of one device for weights and cache, such as 24GiB.
    #[arg(long, value_name = "SIZE", value_parser = byte_size)]
    pub(crate) memory: Option<u64>,
    /// Part of --memory that is kept free for activations and the runtime.
    #[arg(long, value_name = "SIZE", value_parser = byte_size, requires = "memory")]
    pub(crate) reserve: Option<u64>,
    /// Memory for the cache alone, as `serve` takes it.
    #[arg(long, value_name = "SIZE", value_parser = byte_size, conflicts_with = "memory")]
    pub(crate) kv_cache_memory: Option<u64>,
    #[command(flatten)]
    pub(crate) paging: PagingArgs,
    #[command(flatten)]
    pub(crate) steps: StepArgs,
    /// Devices that share the heads; all figures are of one.
    #[arg(long, value_name = "T", default_value_t = 1, value_parser = at_least_one)]
    pub(crate) tensor_parallel_size: usize,
    /// Bits of a weight where the weights themselves are not at hand; by default the config's.
    #[arg(long, value_name = "DTYPE", default_value = "auto")]
    pub(crate) weights_dtype: WeightsDtype,
    /// Print all formats side by side.
    #[arg(long)]
    pub(crate) compare: bool,
    /// Print JSON (docs/plan-schema.md) instead of tables.
    #[arg(long)]
    pub(crate) json: bool,
    /// Print what another engine's pages would take, too.
    #[arg(long = "as", value_name = "ENGINE")]
    pub(crate) compare_engine: Option<Engine>,
}

/// Engines whose page rules are known.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Engine {
    /// vLLM 0.33.
    Vllm,
}

/// How wide estimated weights are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum WeightsDtype {
    /// The config's quantization_config, else its dtype.
    Auto,
    /// 32 bits.
    Float32,
    /// 16 bits.
    Bfloat16,
    /// 16 bits.
    Float16,
    /// 8 bits.
    Fp8,
    /// 8 bits.
    Int8,
    /// GGUF Q8_0: 8 bits and a 16-bit scale per 32 weights.
    #[value(name = "q8_0")]
    Q8_0,
    /// GGUF Q4_K: 4.5 bits.
    #[value(name = "q4_k")]
    Q4K,
    /// 4 bits and a scale byte per 32 weights.
    Mxfp4,
    /// 4 bits and a scale byte per 16 weights.
    Nvfp4,
    /// 4 bits and a 16-bit scale and zero per 128 weights.
    Int4,
}

impl WeightsDtype {
    fn bits(self) -> Option<f32> {
        Some(match self {
            WeightsDtype::Auto => return None,
            WeightsDtype::Float32 => 32.0,
            WeightsDtype::Bfloat16 | WeightsDtype::Float16 => 16.0,
            WeightsDtype::Fp8 | WeightsDtype::Int8 => 8.0,
            WeightsDtype::Q8_0 => 8.5,
            WeightsDtype::Q4K | WeightsDtype::Nvfp4 => 4.5,
            WeightsDtype::Mxfp4 => 4.25,
            WeightsDtype::Int4 => 4.25,
        })
    }
}

/// Prints the plan.
///
/// What the options ask for and the model cannot have is wrong use.
pub(crate) fn run(args: &PlanArgs) -> Result<()> {
    let (name, path) = find(&args.model)?;
    let mut facts = ModelFacts::read(&path).map_err(refused_facts)?;
    override_weights(&mut facts, args.weights_dtype);
    let options = options(args, &facts)?;
    let mut out = std::io::stdout().lock();
    let text =
        if args.json { json(args, &name, &facts, &options)? } else { text(args, &name, &facts, &options)? };
    out.write_all(text.as_bytes())?;
    out.flush().context("cannot print the plan")
}

/// A path as it is; other names by the model resolver.
fn find(model: &str) -> Result<(String, PathBuf)> {
    let path = PathBuf::from(model);
    if path.is_file() && path.extension().is_some_and(|extension| extension == "json") {
        let stem = path.file_stem().map_or_else(String::new, |stem| stem.to_string_lossy().into_owned());
        // `models/Name/config.json` is Name's.
        let folder = path.parent().and_then(|folder| folder.file_name());
        let name = match (stem.as_str(), folder) {
            ("config", Some(folder)) => folder.to_string_lossy().into_owned(),
            _ => stem,
        };
        return Ok((name, path));
    }
    let files = models::resolve_config(model)?;
    Ok((files.name, files.path))
}

fn override_weights(facts: &mut ModelFacts, dtype: WeightsDtype) {
    let Some(bits) = dtype.bits() else { return };
    if let WeightSource::Estimated(estimate) = &mut facts.weight_source {
        estimate.bits = bits;
        facts.weight_bytes = Some(estimate.bytes());
    } else {
        facts.notices.push("--weights-dtype has no effect: the weights' files were counted".to_owned());
    }
}

fn options(args: &PlanArgs, facts: &ModelFacts) -> Result<PlanOptions> {
    Ok(PlanOptions {
        dtype: args.cache.kv_cache_dtype,
        boundary_layers: args.cache.kv_boundary_layers,
        skip_layers: args.cache.skip_layers()?,
        page_size: args.paging.page_size,
        budget: budget(args, facts)?,
        max_model_len: args.paging.max_model_len,
        max_num_seqs: args.steps.max_num_seqs,
        max_num_batched_tokens: args.steps.max_num_batched_tokens,
        tensor_parallel: args.tensor_parallel_size,
        key_bias_norms: Vec::new(),
    })
}

/// What the cache may take: the memory without weights and reserve. Without any limit, room for all
/// sequences at full length.
fn budget(args: &PlanArgs, facts: &ModelFacts) -> Result<Budget> {
    if let Some(bytes) = args.kv_cache_memory {
        return Ok(Budget::Memory(bytes));
    }
    let Some(memory) = args.memory else {
        let len = args.paging.max_model_len.unwrap_or(facts.config.max_model_len);
        // Sequences do not share pages.
        let len = len.checked_next_multiple_of(args.paging.page_size).unwrap_or(len);
        return Ok(Budget::Tokens(len.saturating_mul(args.steps.max_num_seqs)));
    };
    let Some(weights) = facts.weight_bytes else {
        return Err(wrong_use(
            "--memory cannot be split: the config does not say enough to estimate the weights; \
             give --kv-cache-memory, the memory of the cache alone",
        ));
    };
    let weights = weights.div_ceil(args.tensor_parallel_size.max(1) as u64);
    let reserve = args.reserve.unwrap_or(0);
    match memory.checked_sub(weights.saturating_add(reserve)) {
        Some(rest) if rest > 0 => Ok(Budget::Memory(rest)),
        _ => Err(wrong_use(format!(
            "--memory {} leaves nothing for a cache: a device's share of the weights takes {}{}",
            units::size(memory),
            units::size(weights),
            if reserve > 0 { format!(" and {} are reserved", units::size(reserve)) } else { String::new() }
        ))),
    }
}

fn report(name: &str, facts: &ModelFacts, options: &PlanOptions) -> Result<Report> {
    Report::build(name, facts, options).map_err(|error| wrong_use(format!("{name}: {error}")))
}

/// The same plan in every format; a format that the model cannot have says why.
fn compared(
    name: &str,
    facts: &ModelFacts,
    options: &PlanOptions,
) -> Vec<(CacheDtype, Result<Report, String>)> {
    CacheDtype::ALL
        .into_iter()
        .map(|dtype| {
            let options = PlanOptions { dtype, ..options.clone() };
            (dtype, Report::build(name, facts, &options).map_err(|error| error.to_string()))
        })
        .collect()
}

fn text(args: &PlanArgs, name: &str, facts: &ModelFacts, options: &PlanOptions) -> Result<String> {
    let report = report(name, facts, options)?;
    let mut text = render::plan(&report, args.memory, args.reserve);
    text.push_str(&fewer_sequences(&report, name, facts, options));
    if args.compare {
        text.push_str(&render::comparison(&compared(name, facts, options)));
    }
    if args.compare_engine == Some(Engine::Vllm) {
        let pages = Report::vllm(facts, options).map_err(|error| wrong_use(error.to_string()))?;
        text.push_str(&render::vllm(&report, &pages));
    }
    Ok(text)
}

/// What fits when no more sequences are planned for than run at full length. Window pools and states
/// grow with `--max-num-seqs`, whether or not so many sequences ever run.
fn fewer_sequences(report: &Report, name: &str, facts: &ModelFacts, options: &PlanOptions) -> String {
    let max_num_seqs = (report.capacity.sequences_at_max_model_len as usize).max(1);
    if max_num_seqs >= options.max_num_seqs || !matches!(options.budget, Budget::Memory(_)) {
        return String::new();
    }
    let fewer = PlanOptions { max_num_seqs, ..options.clone() };
    match Report::build(name, facts, &fewer) {
        Ok(fewer) if fewer.capacity.tokens > report.capacity.tokens => {
            render::fewer_sequences(max_num_seqs, &fewer)
        }
        _ => String::new(),
    }
}

fn json(args: &PlanArgs, name: &str, facts: &ModelFacts, options: &PlanOptions) -> Result<String> {
    let vllm = match args.compare_engine {
        Some(Engine::Vllm) => {
            Some(Report::vllm(facts, options).map_err(|error| wrong_use(error.to_string()))?)
        }
        None => None,
    };
    let document = Document {
        schema: 1,
        plan: report(name, facts, options)?,
        compare: args.compare.then(|| {
            compared(name, facts, options)
                .into_iter()
                .map(|(dtype, report)| Row::new(dtype, report))
                .collect()
        }),
        vllm,
    };
    Ok(format!("{}\n", serde_json::to_string_pretty(&document)?))
}

/// The whole output of `--json`.
#[derive(Serialize)]
struct Document {
    schema: u32,
    plan: Report,
    #[serde(skip_serializing_if = "Option::is_none")]
    compare: Option<Vec<Row>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    vllm: Option<VllmPages>,
}

/// One format of `--compare`: figures, or why there are none.
#[derive(Serialize)]
struct Row {
    kv_cache_dtype: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    refusal: Option<String>,
    #[serde(flatten)]
    figures: Option<Figures>,
}

/// The figures of a [`Report`] that differ between formats.
#[derive(Serialize)]
struct Figures {
    bytes_per_token: RateReport,
    ratio_to_bf16: RatioReport,
    capacity: CapacityReport,
}

impl Row {
    fn new(dtype: CacheDtype, report: Result<Report, String>) -> Self {
        let (figures, refusal) = match report {
            Ok(report) => {
                let Report { bytes_per_token, ratio_to_bf16, capacity, .. } = report;
                (Some(Figures { bytes_per_token, ratio_to_bf16, capacity }), None)
            }
            Err(refusal) => (None, Some(refusal)),
        };
        Row { kv_cache_dtype: dtype.name(), refusal, figures }
    }
}
