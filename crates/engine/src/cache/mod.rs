//! The memory of the cache: page ids and the slabs behind them.
//!
//! Every layer that stores has a slab of its own; one page id indexes the slabs of all layers of a
//! group. The cache takes exactly the plan's bytes, and real memory only for pages that were used.

mod memory;
mod paged;
pub mod pages;

use std::io;

use turboquant::{error::CodecError, page::PageError, rows::EncodeReport};

use crate::plan::{LayerPlan, Plan};
use pages::PagePools;

pub use memory::CacheMemory;
pub(crate) use paged::PagedLayer;

/// A cache that cannot be made or does not serve the model.
#[derive(Debug, thiserror::Error)]
pub enum CacheError {
    /// The system gave no memory.
    #[error(
        "no memory for the KV cache: it takes {total} bytes, and the system refused {bytes} of them for \
         layer {layer} ({source}); plan for fewer tokens or a smaller format"
    )]
    Memory {
        /// Whose slab.
        layer: usize,
        /// Bytes asked for.
        bytes: u64,
        /// Bytes of the whole cache.
        total: u64,
        /// The system's answer.
        source: io::Error,
    },
    /// Rows that the codec does not store.
    #[error("layer {layer}: {source}")]
    Rows {
        /// Model layer.
        layer: usize,
        /// Why not.
        source: CodecError,
    },
    /// Pages that the codec does not make.
    #[error("layer {layer}: {source}")]
    Page {
        /// Model layer.
        layer: usize,
        /// Why not.
        source: PageError,
    },
    /// A kind of cache that this engine has no attention for.
    #[error("layer {layer} keeps {what}, which this engine cannot run yet")]
    Unsupported {
        /// Model layer.
        layer: usize,
        /// What it keeps.
        what: &'static str,
    },
}

/// What the encoder had to give up so far, per model layer.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CacheHealth {
    /// One report per model layer; clean where the layer stores nothing.
    pub layers: Vec<EncodeReport>,
}

impl CacheHealth {
    /// Over all layers.
    pub fn total(&self) -> EncodeReport {
        let mut total = EncodeReport::default();
        self.layers.iter().for_each(|report| total += *report);
        total
    }
}

/// All memory of the cache, and its page pools.
#[derive(Debug)]
pub struct KvCache {
    pools: PagePools,
    /// Per model layer, where it stores keys and values of its own.
    layers: Vec<Option<PagedLayer>>,
    /// Per model layer: the layer whose pages it reads.
    owners: Vec<usize>,
    health: CacheHealth,
}

impl KvCache {
    /// Allocates what the plan says.
    ///
    /// # Errors
    /// Memory that the system refuses, and layers that this engine cannot run.
    pub fn new(plan: &Plan) -> Result<Self, CacheError> {
        for (layer, planned) in plan.layers.iter().enumerate() {
            check_supported(layer, planned, plan)?;
        }
        // Every supported layer has one slab at most, so that the slabs are in layer order.
        let mut slabs = CacheMemory::allocate(plan)?.pages.into_iter();
        let mut layers = Vec::with_capacity(plan.layers.len());
        for (layer, planned) in plan.layers.iter().enumerate() {
            let paged = planned.paged.as_ref().and_then(|paged| Some((paged, slabs.next()?)));
            let paged = paged.map(|(paged, slab)| PagedLayer::new(layer, paged, plan.page_size, slab));
            layers.push(paged.transpose()?);
        }
        let owners = plan.layers.iter().enumerate().map(|(layer, planned)| planned.owner.unwrap_or(layer));
        Ok(Self {
            pools: PagePools::new(plan),
            owners: owners.collect(),
            health: CacheHealth { layers: vec![EncodeReport::default(); layers.len()] },
            layers,
        })
    }

    /// The page pools.
    pub fn pools(&self) -> &PagePools {
        &self.pools
    }

    /// What the encoder had to give up so far.
    pub fn health(&self) -> &CacheHealth {
        &self.health
    }

    /// Bytes of all slabs, touched or not: [`Plan::total_bytes`].
    pub fn allocated_bytes(&self) -> u64 {
        self.layers.iter().flatten().map(|layer| layer.slab().len() as u64).sum()
    }

    /// The layer whose pages `layer` reads, and its index.
    pub(crate) fn owner(&self, layer: usize) -> Option<(usize, &PagedLayer)> {
        let owner = *self.owners.get(layer)?;
        Some((owner, self.layers[owner].as_ref()?))
    }

    /// A layer to store into, and its report.
    pub(crate) fn layer_mut(&mut self, layer: usize) -> Option<(&mut PagedLayer, &mut EncodeReport)> {
        Some((self.layers.get_mut(layer)?.as_mut()?, self.health.layers.get_mut(layer)?))
    }
}

fn check_supported(layer: usize, planned: &LayerPlan, plan: &Plan) -> Result<(), CacheError> {
    let refuse = |what| Err(CacheError::Unsupported { layer, what });
    if planned.state_bytes > 0 {
        return refuse("a recurrent state");
    }
    if let Some(paged) = &planned.paged {
        if paged.value_head_dim == 0 {
            return refuse("a latent");
        }
        if plan.groups[paged.group].tokens_per_row != 1 {
            return refuse("compressed vectors");
        }
    }
    if planned.side.is_empty() { Ok(()) } else { refuse("rows beside its keys and values") }
}

#[cfg(test)]
mod tests;
