//! The command line.

use std::{net::IpAddr, path::PathBuf};

use clap::{Args, Parser, Subcommand};
use turboquant::format::CacheDtype;
use turboquant_engine::plan::SkipLayers;

use crate::plan::PlanArgs;

/// Language models with a compressed KV cache.
#[derive(Debug, Parser)]
#[command(name = "turboquant", version, about, max_term_width = 100)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Answer a prompt, or chat when there is none.
    Run(RunArgs),
    /// Run one text through every cache format and print what each costs and saves.
    Compare(CompareArgs),
    /// Serve the model over HTTP as the OpenAI API does.
    Serve(ServeArgs),
    /// Say what a model's cache takes and what fits, without loading the model.
    Plan(PlanArgs),
}

impl Command {
    /// Fixes the number of threads that compute. Call it before any thread exists.
    pub(crate) fn set_threads(&self) {
        let model = match self {
            Self::Run(args) => &args.model,
            Self::Compare(args) => &args.model,
            Self::Serve(args) => &args.model,
            Self::Plan(_) => return,
        };
        if let Some(threads) = model.threads {
            #[expect(unsafe_code, reason = "the pools read their size from the environment only")]
            // SAFETY: no other thread runs that could read the environment.
            unsafe {
                std::env::set_var("RAYON_NUM_THREADS", threads.to_string());
            }
        }
    }
}

/// Which model, and how it keeps keys and values.
#[derive(Debug, Args)]
pub(crate) struct ModelArgs {
    /// A GGUF file, a model folder, a hub id (organisation/name, or organisation/name:file.gguf), or
    /// one of the aliases smollm2 and gemma3-270m.
    #[arg(short, long, value_name = "MODEL")]
    pub(crate) model: String,

    #[command(flatten)]
    pub(crate) paging: PagingArgs,

    /// Threads to compute with; by default one per core.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub(crate) threads: Option<u16>,
}

/// How long sequences may become, and in what pages they are kept.
#[derive(Debug, Args)]
pub(crate) struct PagingArgs {
    /// Longest sequence, prompt and answer together; by default the model's, or what fits.
    #[arg(long, value_name = "TOKENS", value_parser = at_least_one)]
    pub(crate) max_model_len: Option<usize>,

    /// Tokens of a cache page.
    #[arg(long, visible_alias = "block-size", value_name = "TOKENS", default_value_t = 16)]
    pub(crate) page_size: usize,
}

/// What a step may hold.
#[derive(Debug, Args)]
pub(crate) struct StepArgs {
    /// Sequences that run at once.
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = at_least_one)]
    pub(crate) max_num_seqs: usize,

    /// Tokens of one step; layers with a window hold as many beside it while a prompt is read.
    #[arg(long, value_name = "TOKENS", default_value_t = 512, value_parser = at_least_one)]
    pub(crate) max_num_batched_tokens: usize,
}

/// The format of the cache.
#[derive(Debug, Args)]
pub(crate) struct CacheArgs {
    /// auto (the model's dtype), fp8, turboquant_k8v4, turboquant_4bit_nc, turboquant_k3v4_nc or
    /// turboquant_3bit_nc.
    #[arg(long, value_name = "DTYPE", default_value = "auto")]
    pub(crate) kv_cache_dtype: CacheDtype,

    /// Leave this many first and last layers at the model's dtype; by default 2 with TurboQuant
    /// formats.
    #[arg(long, value_name = "N")]
    pub(crate) kv_boundary_layers: Option<usize>,

    /// Leave these layers at the model's dtype: numbers from 0, or the word sliding_window, with commas or
    /// spaces between them; what follows and is no layer comes after --.
    #[arg(long, value_name = "LAYERS", num_args = 1.., value_delimiter = ',')]
    pub(crate) kv_cache_dtype_skip_layers: Vec<String>,
}

impl CacheArgs {
    /// The skip list, parsed.
    pub(crate) fn skip_layers(&self) -> anyhow::Result<SkipLayers> {
        let list = self.kv_cache_dtype_skip_layers.join(",");
        list.parse()
            .map_err(|error| crate::error::wrong_use(format!("--kv-cache-dtype-skip-layers: {error}")))
    }
}

/// How tokens are chosen.
#[derive(Debug, Args)]
pub(crate) struct SamplingArgs {
    /// Most tokens to generate per answer; by default as many as fit.
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    pub(crate) max_tokens: Option<usize>,
    /// 0 takes the likeliest token each time; higher values take more chances.
    #[arg(long, value_name = "T", default_value_t = 0.0, allow_negative_numbers = true)]
    pub(crate) temperature: f32,
    /// Choose among the K likeliest tokens; 0 is all.
    #[arg(long, value_name = "K", default_value_t = 0, allow_negative_numbers = true)]
    pub(crate) top_k: usize,
    /// Choose among the likeliest tokens that have this probability together.
    #[arg(long, value_name = "P", default_value_t = 1.0, allow_negative_numbers = true)]
    pub(crate) top_p: f32,
    /// Leave out tokens less likely than this fraction of the likeliest.
    #[arg(long, value_name = "P", default_value_t = 0.0, allow_negative_numbers = true)]
    pub(crate) min_p: f32,
    /// Make tokens of the prompt and the answer less likely; 1 is off.
    #[arg(long, value_name = "X", default_value_t = 1.0, allow_negative_numbers = true)]
    pub(crate) repetition_penalty: f32,
    /// Make tokens of the answer less likely; 0 is off.
    #[arg(long, value_name = "X", default_value_t = 0.0, allow_negative_numbers = true)]
    pub(crate) presence_penalty: f32,
    /// Make tokens of the answer less likely, once per occurrence; 0 is off.
    #[arg(long, value_name = "X", default_value_t = 0.0, allow_negative_numbers = true)]
    pub(crate) frequency_penalty: f32,
    /// The same seed gives the same answer.
    #[arg(long, value_name = "N")]
    pub(crate) seed: Option<u64>,
    /// End the answer before this text; may be given several times.
    #[arg(long, value_name = "TEXT")]
    pub(crate) stop: Vec<String>,
    /// Go on past the model's own end of the answer.
    #[arg(long)]
    pub(crate) ignore_eos: bool,
}

/// `turboquant run`
#[derive(Debug, Args)]
pub(crate) struct RunArgs {
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    #[command(flatten)]
    pub(crate) cache: CacheArgs,
    #[command(flatten)]
    pub(crate) sampling: SamplingArgs,
    /// What the assistant is told first.
    #[arg(long, value_name = "TEXT")]
    pub(crate) system: Option<String>,
    /// Give the model the prompt as it is, without its chat template.
    #[arg(long)]
    pub(crate) raw: bool,
    /// Read the prompt from a file.
    #[arg(long, value_name = "FILE", conflicts_with = "prompt")]
    pub(crate) prompt_file: Option<PathBuf>,
    /// The prompt; without one, a chat begins.
    pub(crate) prompt: Option<String>,
}

/// `turboquant compare`
#[derive(Debug, Args)]
pub(crate) struct CompareArgs {
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    /// Tokens of the text: all but the last are context, the last ones are scored.
    #[arg(long, value_name = "TOKENS", default_value_t = 2048, value_parser = at_least_one)]
    pub(crate) context: usize,
    /// The text; by default Hamlet, as far as it goes.
    #[arg(long, value_name = "FILE")]
    pub(crate) text: Option<PathBuf>,
    /// Tokens at the end of the text that are scored, one decode row each.
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = at_least_one)]
    pub(crate) score_tokens: usize,
    /// First and last layers that TurboQuant formats leave at the model's dtype; several numbers make
    /// a row each.
    #[arg(long, value_name = "N,N", value_delimiter = ',')]
    pub(crate) kv_boundary_layers: Vec<usize>,
    /// Print JSON (docs/compare-schema.md) instead of the table.
    #[arg(long)]
    pub(crate) json: bool,
}

/// `turboquant serve`
#[derive(Debug, Args)]
pub(crate) struct ServeArgs {
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    #[command(flatten)]
    pub(crate) cache: CacheArgs,
    /// Address to listen on.
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1")]
    pub(crate) host: IpAddr,
    /// Port to listen on; 0 takes a free one.
    #[arg(long, value_name = "PORT", default_value_t = 8000)]
    pub(crate) port: u16,
    /// Name of the model in the API; by default the name given with -m.
    #[arg(long, value_name = "NAME")]
    pub(crate) served_model_name: Option<String>,
    /// Memory of the KV cache, such as 512MiB or 4GiB.
    #[arg(long, value_name = "SIZE", default_value = "1GiB", value_parser = byte_size)]
    pub(crate) kv_cache_memory: u64,
    #[command(flatten)]
    pub(crate) steps: StepArgs,
    /// Answers that may wait for their turn; a request for more is refused with 503.
    #[arg(long, value_name = "N", default_value_t = 1024)]
    pub(crate) max_queued_requests: usize,
    /// Largest request body.
    #[arg(long, value_name = "SIZE", default_value = "16MiB", value_parser = byte_size)]
    pub(crate) max_body_size: u64,
}

pub(crate) fn at_least_one(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(0) => Err("must be at least 1".to_owned()),
        Ok(number) => Ok(number),
        Err(_) => Err("must be a whole number".to_owned()),
    }
}

/// `4GiB`, `500MB`, `1048576`.
pub(crate) fn byte_size(text: &str) -> Result<u64, String> {
    const UNITS: [(&str, u64); 11] = [
        ("KiB", 1 << 10),
        ("MiB", 1 << 20),
        ("GiB", 1 << 30),
        ("TiB", 1 << 40),
        ("KB", 1000),
        ("kB", 1000),
        ("MB", 1_000_000),
        ("GB", 1_000_000_000),
        ("TB", 1_000_000_000_000),
        ("B", 1),
        ("", 1),
    ];
    let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let factor = UNITS.iter().find(|(name, _)| *name == unit.trim()).map(|(_, factor)| *factor);
    let size = number.parse::<f64>().ok().zip(factor).map(|(number, factor)| number * factor as f64);
    match size {
        Some(size) if (1.0..1e18).contains(&size) => Ok(size as u64),
        _ => Err("must be a size such as 512MiB or 4GiB".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_definition_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn sizes() {
        let rows = [("1", 1), ("4GiB", 4 << 30), ("1.5 MiB", 3 << 19), ("500MB", 500_000_000), ("2kB", 2000)];
        for (text, size) in rows {
            assert_eq!(byte_size(text), Ok(size), "{text}");
        }
        for text in ["", "0", "x", "-1GiB", "1XB", "1e99GiB", "..", "99999999999TiB"] {
            assert!(byte_size(text).is_err(), "{text}");
        }
    }

    #[test]
    fn skip_lists_take_commas_and_spaces() {
        let parse = |list: &[&str]| {
            let args = ["turboquant", "serve", "-m", "x", "--kv-cache-dtype-skip-layers"];
            let Command::Serve(args) = Cli::parse_from(args.iter().chain(list)).command else {
                panic!("not serve")
            };
            args.cache.skip_layers()
        };
        let expected: SkipLayers = "0,31,sliding_window".parse().unwrap();
        assert_eq!(parse(&["0,31", "sliding_window"]).unwrap(), expected);
        assert_eq!(parse(&["0", "31", "sliding_window"]).unwrap(), expected);
        assert!(parse(&["first"]).is_err());
    }
}
