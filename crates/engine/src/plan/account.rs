//! What a plan takes: per token, per sequence, in all.

use super::{Lifetime, Plan, SideKind, Slab};

/// Bytes that one more token adds to a sequence, averaged over a page where rows stand for several.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TokenBytes {
    /// While every window still grows.
    pub inside: f64,
    /// Once every window is full.
    pub beyond: f64,
}

impl Plan {
    /// Everything that is allocated in pages, in layer order.
    pub fn slabs(&self) -> impl Iterator<Item = Slab> + '_ {
        self.layers.iter().enumerate().flat_map(|(index, layer)| {
            let paged = layer.paged.iter().map(move |paged| Slab {
                layer: index,
                side: None,
                group: paged.group,
                page_bytes: paged.page_bytes,
            });
            paged.chain(layer.side.iter().map(move |side| Slab {
                layer: index,
                side: Some(side.kind),
                group: side.group,
                page_bytes: side.page_bytes,
            }))
        })
    }

    /// Bytes of all pages.
    pub fn page_pool_bytes(&self) -> u64 {
        self.groups.iter().map(|group| group.page_bytes as u64 * group.num_pages as u64).sum()
    }

    /// Bytes of one sequence's recurrent states.
    pub fn state_bytes_per_sequence(&self) -> u64 {
        self.layers.iter().map(|layer| layer.state_bytes as u64).sum()
    }

    /// Bytes of pages and states: what an allocator of this plan takes.
    pub fn total_bytes(&self) -> u64 {
        self.page_pool_bytes() + self.num_states as u64 * self.state_bytes_per_sequence()
    }

    /// Bytes of the pages (states apart) that one more token adds.
    pub fn bytes_per_token(&self) -> TokenBytes {
        let mut bytes = TokenBytes { inside: 0.0, beyond: 0.0 };
        for group in &self.groups {
            let per_token = group.page_bytes as f64 / (self.page_size * group.tokens_per_row) as f64;
            bytes.inside += per_token;
            if group.lifetime == Lifetime::Full {
                bytes.beyond += per_token;
            }
        }
        bytes
    }

    /// Bytes of the rows of one sequence of `tokens` tokens, to the row and not to the page, states
    /// apart.
    pub fn sequence_bytes(&self, tokens: usize) -> u64 {
        let of_group = |group: &super::GroupPlan| {
            let rows = match group.lifetime {
                Lifetime::Full => tokens / group.tokens_per_row,
                Lifetime::Window(window) => tokens.min(window),
            };
            (group.page_bytes / self.page_size) as u64 * rows as u64
        };
        self.groups.iter().map(of_group).sum()
    }

    /// Bytes per token of the slabs beside keys, values and latents, of one kind.
    pub fn side_bytes_per_token(&self, kind: SideKind) -> f64 {
        let sides = self.layers.iter().flat_map(|layer| &layer.side).filter(|side| side.kind == kind);
        sides
            .map(|side| {
                side.page_bytes as f64 / (self.page_size * self.groups[side.group].tokens_per_row) as f64
            })
            .sum()
    }
}
