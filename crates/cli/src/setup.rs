//! From the command line to a loaded model and a plan of its cache.

use std::sync::Arc;

use anyhow::Result;
use turboquant::format::CacheDtype;
use turboquant_engine::{
    engine::{Engine, EngineConfig, StartError},
    model::{LoadedModel, OpenedModel},
    plan::{Plan, PlanOptions},
    runner::Runner,
};

use crate::{
    args::{CacheArgs, ModelArgs},
    console::say,
    error::{refused, wrong_use},
    models,
    report::size,
    text::TextModel,
};

/// A model with its text side.
pub(crate) struct Loaded {
    /// The name it was asked for by, or its file's.
    pub(crate) name: String,
    pub(crate) text: TextModel,
    pub(crate) model: Arc<LoadedModel>,
}

/// Finds, fetches and loads the model.
pub(crate) fn load(args: &ModelArgs) -> Result<Loaded> {
    let files = models::resolve(&args.model)?;
    // Refusals first. Then the tokenizer, which takes more memory while it is built than it keeps: what
    // it gives back the weights can use.
    let opened = OpenedModel::open(&files.path).map_err(refused)?;
    let text = TextModel::load(&files.path)?;
    let model = Arc::new(opened.load().map_err(refused)?);
    Ok(Loaded { name: files.name, text, model })
}

impl Loaded {
    /// Tokens that end an answer: the model's files and the tokenizer know some each.
    pub(crate) fn stop_ids(&self) -> Vec<u32> {
        let mut ids = self.model.eos_token_ids.clone();
        ids.extend(self.text.stop_ids());
        ids.into_iter().collect()
    }

    /// What the arguments say about the cache; its size is left at the default.
    pub(crate) fn plan_options(&self, model: &ModelArgs, cache: &CacheArgs) -> Result<PlanOptions> {
        Ok(PlanOptions {
            dtype: cache.kv_cache_dtype,
            boundary_layers: cache.kv_boundary_layers,
            skip_layers: cache.skip_layers()?,
            ..self.default_plan_options(model.paging.page_size)
        })
    }

    /// Options that ask for nothing but a page size.
    pub(crate) fn default_plan_options(&self, page_size: usize) -> PlanOptions {
        PlanOptions {
            dtype: CacheDtype::Auto,
            page_size,
            key_bias_norms: self.model.key_bias_norms.clone(),
            ..PlanOptions::default()
        }
    }

    /// The plan; whatever stands against it is something the user asked for.
    pub(crate) fn plan(&self, options: &PlanOptions) -> Result<Plan> {
        Plan::build(&self.model.config, options).map_err(|error| wrong_use(error.to_string()))
    }

    /// Allocates the cache.
    ///
    /// The system hands out memory that it does not have and ends the process when it is used, so a
    /// cache that cannot ever be filled is refused here.
    pub(crate) fn runner(&self, plan: &Plan) -> Result<Runner> {
        let needed = plan.total_bytes();
        if let Some(memory) = machine_memory().filter(|memory| needed > *memory) {
            return Err(wrong_use(format!(
                "the KV cache would take {}, but the machine has {} of memory; give the cache less, or plan \
                 for fewer tokens",
                size(needed),
                size(memory)
            )));
        }
        Ok(Runner::new(Arc::clone(&self.model), plan)?)
    }
}

/// Bytes of main memory, where the system says.
fn machine_memory() -> Option<u64> {
    size_in("/proc/meminfo", "MemTotal:")
}

/// The most bytes that this process has had in main memory, where the system says.
pub(crate) fn peak_memory() -> Option<u64> {
    size_in("/proc/self/status", "VmHWM:")
}

fn size_in(file: &str, field: &str) -> Option<u64> {
    let text = std::fs::read_to_string(file).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(field))?;
    line.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// Starts the engine; limits that do not work together are wrong use.
pub(crate) fn start_engine(runner: Runner, config: EngineConfig) -> Result<Engine> {
    Engine::start(runner, config).map_err(|error| match error {
        StartError::Limits(limits) => wrong_use(limits.to_string()),
        StartError::Thread(_) => error.into(),
    })
}

/// What the plan has to say, on stderr.
pub(crate) fn print_notices(plan: &Plan) {
    for notice in &plan.notices {
        say(format_args!("note: {notice}"));
    }
}
