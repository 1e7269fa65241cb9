//! The slabs of a plan: zeroed memory that takes space only where it was touched.

use std::io;

use memmap2::MmapMut;

use super::CacheError;
use crate::plan::Plan;

/// Zeroed bytes, aligned to a page of the system. The system backs them with memory when they are
/// first touched.
#[derive(Debug)]
pub(super) struct Slab(Option<MmapMut>);

impl Slab {
    /// `bytes` zeros, or what the system says instead.
    fn zeroed(bytes: u64) -> io::Result<Self> {
        if bytes == 0 {
            return Ok(Slab(None));
        }
        match isize::try_from(bytes) {
            Ok(bytes) => MmapMut::map_anon(bytes.unsigned_abs()).map(|memory| Slab(Some(memory))),
            Err(_) => Err(io::ErrorKind::OutOfMemory.into()),
        }
    }

    pub(super) fn bytes(&self) -> &[u8] {
        self.0.as_deref().unwrap_or_default()
    }

    pub(super) fn bytes_mut(&mut self) -> &mut [u8] {
        self.0.as_deref_mut().unwrap_or_default()
    }
}

/// Everything that a plan allocates, whether or not this engine can run the model.
#[derive(Debug)]
pub struct CacheMemory {
    /// In the order of [`Plan::slabs`].
    pub(super) pages: Vec<Slab>,
    /// Per layer with a recurrent state, `num_states` of them.
    states: Vec<Slab>,
}

impl CacheMemory {
    /// Allocates what the plan says, without touching it.
    ///
    /// # Errors
    /// [`CacheError::Memory`] when the system refuses.
    pub fn allocate(plan: &Plan) -> Result<Self, CacheError> {
        let total = plan.total_bytes();
        let slab = |layer, unit: usize, count: usize| {
            let bytes = (unit as u64).saturating_mul(count as u64);
            Slab::zeroed(bytes).map_err(|source| CacheError::Memory { layer, bytes, total, source })
        };
        let pages = plan.slabs().map(|s| slab(s.layer, s.page_bytes, plan.groups[s.group].num_pages));
        let states = plan.layers.iter().enumerate();
        let states = states.map(|(layer, planned)| slab(layer, planned.state_bytes, plan.num_states));
        Ok(Self { pages: pages.collect::<Result<_, _>>()?, states: states.collect::<Result<_, _>>()? })
    }

    /// Bytes of all slabs, touched or not.
    pub fn bytes(&self) -> u64 {
        self.pages.iter().chain(&self.states).map(|slab| slab.bytes().len() as u64).sum()
    }
}
