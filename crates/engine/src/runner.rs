//! A batch through the model: token ids and block tables in, logits out.

use std::sync::Arc;

use crate::{
    attention::PagedAttention,
    batch::StepBatch,
    cache::{CacheError, CacheHealth, KvCache, pages::PagePools},
    error::EngineError,
    executor::ModelPool,
    model::{AttentionBackend, LoadedModel},
    plan::Plan,
};

/// What computes a step: a loaded model, or a stand-in for one in tests.
pub trait StepModel {
    /// Token ids are below this.
    fn vocab_size(&self) -> usize;

    /// Logits `[logits_rows, vocab_size]` of a step.
    ///
    /// # Errors
    /// See [`LoadedModel::forward`].
    fn forward(
        &self,
        batch: &StepBatch,
        attention: &mut dyn AttentionBackend,
    ) -> Result<candle_core::Tensor, EngineError>;
}

impl StepModel for LoadedModel {
    fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    fn forward(
        &self,
        batch: &StepBatch,
        attention: &mut dyn AttentionBackend,
    ) -> Result<candle_core::Tensor, EngineError> {
        LoadedModel::forward(self, batch, attention)
    }
}

/// Logits of the wanted rows of a step.
#[derive(Debug, Clone, PartialEq)]
pub struct Logits {
    vocab_size: usize,
    /// `[num_rows, vocab_size]`
    values: Vec<f32>,
}

impl Logits {
    /// Wanted rows.
    pub fn num_rows(&self) -> usize {
        self.values.len() / self.vocab_size
    }

    /// `[vocab_size]`, `row` counted among the wanted ones.
    pub fn row(&self, row: usize) -> &[f32] {
        &self.values[row * self.vocab_size..][..self.vocab_size]
    }

    /// As [`Logits::row`], to overwrite.
    pub fn row_mut(&mut self, row: usize) -> &mut [f32] {
        &mut self.values[row * self.vocab_size..][..self.vocab_size]
    }

    /// All rows, in order.
    pub fn rows(&self) -> impl ExactSizeIterator<Item = &[f32]> {
        self.values.chunks_exact(self.vocab_size)
    }
}

/// A model and a cache for it.
#[derive(Debug)]
pub struct Runner<M = LoadedModel> {
    model: Arc<M>,
    cache: KvCache,
}

impl<M: StepModel> Runner<M> {
    /// Allocates the cache that `plan` describes. Several runners may share a model.
    ///
    /// # Errors
    /// See [`KvCache::new`].
    pub fn new(model: Arc<M>, plan: &Plan) -> Result<Self, CacheError> {
        Ok(Self { model, cache: KvCache::new(plan)? })
    }

    /// Computes a step. Its rows are in the cache afterwards.
    ///
    /// # Errors
    /// See [`LoadedModel::forward`].
    pub fn run(&mut self, batch: &StepBatch) -> Result<Logits, EngineError> {
        self.run_unless(batch, &|| false)
    }

    /// As [`Runner::run`], but gives the step up at the next layer once it is `abandoned`.
    ///
    /// # Errors
    /// [`EngineError::Abandoned`] then, with the rows of some layers in the cache.
    pub fn run_unless(
        &mut self,
        batch: &StepBatch,
        abandoned: &dyn Fn() -> bool,
    ) -> Result<Logits, EngineError> {
        let mut attention = PagedAttention::new(&mut self.cache, batch, &ModelPool).unless(abandoned);
        let logits = self.model.forward(batch, &mut attention)?;
        let (vocab_size, wanted) = (self.model.vocab_size(), batch.logits_rows.len());
        let values = logits.flatten_all()?.to_vec1::<f32>()?;
        if values.len() != wanted * vocab_size {
            return Err(EngineError::Batch(format!(
                "{wanted} rows of {vocab_size} logits are wanted, the model made {} values",
                values.len()
            )));
        }
        Ok(Logits { vocab_size, values })
    }

    /// The model.
    pub fn model(&self) -> &M {
        &self.model
    }

    /// The page pools.
    pub fn pools(&self) -> &PagePools {
        self.cache.pools()
    }

    /// Bytes of the cache.
    pub fn cache_bytes(&self) -> u64 {
        self.cache.allocated_bytes()
    }

    /// What the cache's encoders had to give up so far.
    pub fn cache_health(&self) -> &CacheHealth {
        self.cache.health()
    }
}
