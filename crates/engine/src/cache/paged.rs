//! The pages of one layer.

use turboquant::{
    page::{PageCodec, PageError},
    rows::RowCodec,
};

use super::{CacheError, memory::Slab};
use crate::plan::PagedPlan;

/// Keys and values of one layer.
#[derive(Debug)]
pub(crate) struct PagedLayer {
    /// Index into the plan's groups.
    pub(crate) group: usize,
    /// Shape of a page.
    pub(crate) codec: PageCodec,
    slab: Slab,
}

impl PagedLayer {
    /// Pages of `page_size` tokens in `slab`.
    pub(super) fn new(
        layer: usize,
        plan: &PagedPlan,
        page_size: usize,
        slab: Slab,
    ) -> Result<Self, CacheError> {
        let rows = RowCodec::new(plan.format, plan.key_head_dim, plan.value_head_dim)
            .map_err(|source| CacheError::Rows { layer, source })?;
        let codec = PageCodec::new(rows, plan.num_kv_heads, page_size)
            .map_err(|source| CacheError::Page { layer, source })?;
        if codec.page_bytes() != plan.page_bytes {
            let source =
                PageError::Length { what: "page", expected: codec.page_bytes(), got: plan.page_bytes };
            return Err(CacheError::Page { layer, source });
        }
        Ok(Self { group: plan.group, codec, slab })
    }

    /// `[num_pages, page_bytes]`
    pub(crate) fn slab(&self) -> &[u8] {
        self.slab.bytes()
    }

    /// The codec, and the slab to write to.
    pub(crate) fn parts_mut(&mut self) -> (&PageCodec, &mut [u8]) {
        (&self.codec, self.slab.bytes_mut())
    }
}
