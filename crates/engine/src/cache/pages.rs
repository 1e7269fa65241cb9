//! Who owns which page: a pool of page ids per group, and leases that give pages back on drop.
//!
//! Plain data, no memory behind it: a page id means `page_bytes` bytes in the slab of every layer
//! of the group.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::{
    batch::PREFILL_BLOCK,
    plan::{Lifetime, Plan},
};

/// Entry of a block table whose page was given back.
pub const NO_PAGE: i32 = -1;

/// Fewer pages are free than were asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("page group {group} has {free} free pages of {total}, {needed} are needed")]
pub struct OutOfPages {
    /// Index into [`Plan::groups`].
    pub group: usize,
    /// Pages asked for.
    pub needed: usize,
    /// Pages that are free.
    pub free: usize,
    /// Pages of the pool.
    pub total: usize,
}

/// The pages of one group. Clones share the pool.
#[derive(Debug, Clone)]
pub struct PagePool {
    /// Free ids; the last one is handed out next, so that a pool that was never full keeps to the
    /// pages it has touched.
    free: Arc<Mutex<Vec<i32>>>,
    num_pages: usize,
}

impl PagePool {
    /// Pages `0..num_pages`, all free. Ids beyond `i32::MAX` do not exist.
    pub fn new(num_pages: usize) -> Self {
        let last = i32::try_from(num_pages).unwrap_or(i32::MAX);
        Self { free: Arc::new(Mutex::new((0..last).rev().collect())), num_pages: last as usize }
    }

    /// Pages of the pool.
    pub fn num_pages(&self) -> usize {
        self.num_pages
    }

    /// Pages that nobody owns.
    pub fn num_free(&self) -> usize {
        self.lock().len()
    }

    fn lock(&self) -> MutexGuard<'_, Vec<i32>> {
        // A list of ids is whole between any two pushes.
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The block table of one sequence in one group. Owns its pages; dropping it gives them back.
#[derive(Debug)]
pub struct PageLease {
    pool: PagePool,
    block_table: Vec<i32>,
    /// Entries before this one are [`NO_PAGE`].
    first_held: usize,
}

impl PageLease {
    /// Owns nothing yet.
    pub fn new(pool: PagePool) -> Self {
        Self { pool, block_table: Vec::new(), first_held: 0 }
    }

    /// Page id of each block of `page_size` tokens; [`NO_PAGE`] where it was given back.
    pub fn block_table(&self) -> &[i32] {
        &self.block_table
    }

    /// Pages owned.
    pub fn num_held(&self) -> usize {
        self.block_table.len() - self.first_held
    }

    /// Extends the block table to `num_blocks` entries; takes nothing when that many are not free.
    fn grow_to(&mut self, num_blocks: usize) -> bool {
        let Some(more) = num_blocks.checked_sub(self.block_table.len()) else { return true };
        let mut free = self.pool.lock();
        let Some(rest) = free.len().checked_sub(more) else { return false };
        self.block_table.extend(free.drain(rest..).rev());
        true
    }

    /// Gives back the pages of blocks `..num_blocks`.
    fn release_before(&mut self, num_blocks: usize) {
        let end = num_blocks.min(self.block_table.len());
        if end <= self.first_held {
            return;
        }
        let mut free = self.pool.lock();
        free.extend(self.block_table[self.first_held..end].iter_mut().map(|page| {
            let id = *page;
            *page = NO_PAGE;
            id
        }));
        self.first_held = end;
    }
}

impl Drop for PageLease {
    fn drop(&mut self) {
        self.release_before(self.block_table.len());
    }
}

/// Pages of one group, counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageUsage {
    /// Pages of the pool.
    pub total: usize,
    /// Pages that nobody owns.
    pub free: usize,
}

/// The pools of all groups.
#[derive(Debug, Clone)]
pub struct PagePools {
    page_size: usize,
    groups: Vec<(Lifetime, PagePool)>,
}

impl PagePools {
    /// Free pools of the sizes the plan names.
    pub fn new(plan: &Plan) -> Self {
        let groups = plan.groups.iter().map(|group| (group.lifetime, PagePool::new(group.num_pages)));
        Self { page_size: plan.page_size, groups: groups.collect() }
    }

    /// Tokens of a page.
    pub fn page_size(&self) -> usize {
        self.page_size
    }

    /// Number of page groups.
    pub fn num_groups(&self) -> usize {
        self.groups.len()
    }

    /// Free and total pages of each group.
    pub fn usage(&self) -> Vec<PageUsage> {
        let usage = |pool: &PagePool| PageUsage { total: pool.num_pages(), free: pool.num_free() };
        self.groups.iter().map(|(_, pool)| usage(pool)).collect()
    }

    /// Block tables of a sequence that owns nothing yet.
    pub fn sequence(&self) -> SequencePages {
        let leases = self.groups.iter().map(|(lifetime, pool)| (*lifetime, PageLease::new(pool.clone())));
        SequencePages { page_size: self.page_size, leases: leases.collect() }
    }

    /// Whether a sequence of `tokens` cached tokens could run if it were alone.
    ///
    /// # Errors
    /// Names the first group whose whole pool is too small.
    pub fn check_capacity(&self, tokens: usize) -> Result<(), OutOfPages> {
        for (group, (lifetime, pool)) in self.groups.iter().enumerate() {
            let needed = peak_pages(*lifetime, self.page_size, tokens);
            let total = pool.num_pages();
            if needed > total {
                return Err(OutOfPages { group, needed, free: total, total });
            }
        }
        Ok(())
    }

    /// Cached tokens of the longest sequence that could run if it were alone.
    pub fn capacity(&self) -> usize {
        // peak_pages grows with the tokens, so the answer is the last length that passes.
        let full = self.groups.iter().filter(|(lifetime, _)| *lifetime == Lifetime::Full);
        let bound = full.map(|(_, pool)| pool.num_pages().saturating_mul(self.page_size)).min();
        let (mut low, mut high) = (0, bound.unwrap_or(u32::MAX as usize));
        while low < high {
            let middle = low + (high - low).div_ceil(2);
            if self.check_capacity(middle).is_ok() {
                low = middle;
            } else {
                high = middle - 1;
            }
        }
        low
    }
}

/// Most pages that a sequence of `tokens` tokens holds at once in a group, if its prefill goes
/// block by block.
///
/// A window group holds the window of the block's first row and the block itself, which may begin
/// and end inside a page.
pub fn peak_pages(lifetime: Lifetime, page_size: usize, tokens: usize) -> usize {
    let all = tokens.div_ceil(page_size);
    match lifetime {
        Lifetime::Full => all,
        Lifetime::Window(window) => {
            let live = window.saturating_sub(1).saturating_add(PREFILL_BLOCK);
            all.min(live.div_ceil(page_size).saturating_add(1))
        }
    }
}

/// The block tables of one sequence, one per group. Dropping it gives all pages back.
#[derive(Debug)]
pub struct SequencePages {
    page_size: usize,
    leases: Vec<(Lifetime, PageLease)>,
}

impl SequencePages {
    /// Tokens that fit without new pages and with the pages that are free: the end, exclusive, of
    /// what [`SequencePages::reserve`] would grant.
    pub fn reachable(&self) -> usize {
        let blocks = |lease: &PageLease| lease.block_table.len() + lease.pool.num_free();
        self.leases
            .iter()
            .map(|(_, lease)| blocks(lease).saturating_mul(self.page_size))
            .min()
            .unwrap_or(usize::MAX)
    }

    /// Owns pages for the tokens `..end` that are still in their window.
    ///
    /// # Errors
    /// When a group has too few free pages; then no group has changed.
    pub fn reserve(&mut self, end: usize) -> Result<(), OutOfPages> {
        let num_blocks = end.div_ceil(self.page_size);
        let before: Vec<usize> = self.leases.iter().map(|(_, lease)| lease.block_table.len()).collect();
        for group in 0..self.leases.len() {
            let lease = &mut self.leases[group].1;
            if lease.grow_to(num_blocks) {
                continue;
            }
            let error = OutOfPages {
                group,
                needed: num_blocks - lease.block_table.len(),
                free: lease.pool.num_free(),
                total: lease.pool.num_pages(),
            };
            for ((_, lease), len) in self.leases.iter_mut().zip(before) {
                let grown = lease.block_table.split_off(len.min(lease.block_table.len()));
                lease.pool.lock().extend(grown.into_iter().rev());
            }
            return Err(error);
        }
        Ok(())
    }

    /// Gives back pages that no query at `next_position` or later can see.
    pub fn release_outside_window(&mut self, next_position: usize) {
        for (lifetime, lease) in &mut self.leases {
            if let Lifetime::Window(window) = *lifetime {
                // The query at `next_position` sees `window` tokens, itself included.
                let first_seen = (next_position + 1).saturating_sub(window);
                lease.release_before(first_seen / self.page_size);
            }
        }
    }

    /// Pages per group that a sequence of `tokens` tokens may still ask for before it is computed.
    pub fn outstanding(&self, tokens: usize) -> impl Iterator<Item = usize> + '_ {
        self.leases.iter().map(move |(lifetime, lease)| {
            peak_pages(*lifetime, self.page_size, tokens).saturating_sub(lease.num_held())
        })
    }

    /// Pages per group that must be spare for the sequence to go on for a while once its tokens are
    /// computed: a window is full some day, all tokens are not.
    pub fn growth(&self) -> impl Iterator<Item = usize> + '_ {
        self.leases.iter().map(|(lifetime, _)| usize::from(*lifetime == Lifetime::Full))
    }

    /// Gives all pages back.
    pub fn clear(&mut self) {
        for (_, lease) in &mut self.leases {
            *lease = PageLease::new(lease.pool.clone());
        }
    }

    /// Pages owned, per group.
    pub fn num_held(&self) -> Vec<usize> {
        self.leases.iter().map(|(_, lease)| lease.num_held()).collect()
    }

    /// One block table per group.
    pub fn block_tables(&self) -> Vec<Vec<i32>> {
        self.leases.iter().map(|(_, lease)| lease.block_table.clone()).collect()
    }

    /// Number of page groups.
    pub fn num_groups(&self) -> usize {
        self.leases.len()
    }

    /// `page_id * page_size + offset` of a position in a group, or -1 where no page is owned.
    pub fn slot(&self, group: usize, position: usize) -> i64 {
        match self.leases[group].1.block_table.get(position / self.page_size) {
            Some(&page) if page != NO_PAGE => {
                i64::from(page) * self.page_size as i64 + (position % self.page_size) as i64
            }
            _ => -1,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::GroupPlan;

    fn plan(groups: &[(Lifetime, usize)]) -> Plan {
        let groups = groups.iter().map(|&(lifetime, num_pages)| GroupPlan {
            lifetime,
            tokens_per_row: 1,
            layers: vec![],
            page_bytes: 1,
            num_pages,
        });
        Plan { page_size: 16, groups: groups.collect(), ..Plan::default() }
    }

    fn free(pools: &PagePools) -> Vec<usize> {
        pools.usage().iter().map(|group| group.free).collect()
    }

    #[test]
    fn pages_come_back_on_drop_and_are_never_owned_twice() {
        let pools = PagePools::new(&plan(&[(Lifetime::Full, 8)]));
        let (mut a, mut b) = (pools.sequence(), pools.sequence());
        a.reserve(33).unwrap();
        b.reserve(80).unwrap();
        assert_eq!(a.block_tables(), [[0, 1, 2]]);
        assert_eq!(b.block_tables(), [[3, 4, 5, 6, 7]]);
        assert_eq!(free(&pools), [0]);
        drop(a);
        assert_eq!(free(&pools), [3]);
        assert_eq!(b.reserve(129), Err(OutOfPages { group: 0, needed: 4, free: 3, total: 8 }));
        b.reserve(128).unwrap();
        b.clear();
        assert_eq!(free(&pools), [8]);
    }

    #[test]
    fn a_refused_reservation_changes_no_group() {
        let pools = PagePools::new(&plan(&[(Lifetime::Full, 4), (Lifetime::Window(16), 2)]));
        let mut pages = pools.sequence();
        pages.reserve(16).unwrap();
        assert_eq!(pages.reserve(48), Err(OutOfPages { group: 1, needed: 2, free: 1, total: 2 }));
        assert_eq!(free(&pools), [3, 1]);
        assert_eq!(pages.reachable(), 32);
        pages.reserve(32).unwrap();
        assert_eq!(free(&pools), [2, 0]);
    }

    #[test]
    fn a_window_gives_back_pages_only_when_no_later_query_sees_them() {
        let pools = PagePools::new(&plan(&[(Lifetime::Full, 8), (Lifetime::Window(20), 8)]));
        let mut pages = pools.sequence();
        pages.reserve(64).unwrap();
        // The query at 35 sees 16..=35, the one at 34 sees token 15, the last of the first page.
        pages.release_outside_window(34);
        assert_eq!(pages.num_held(), [4, 4]);
        pages.release_outside_window(35);
        assert_eq!(pages.num_held(), [4, 3]);
        assert_eq!(pages.block_tables()[1], [NO_PAGE, 1, 2, 3]);
        assert_eq!((pages.slot(0, 15), pages.slot(1, 15), pages.slot(1, 17)), (15, -1, 17));
        pages.release_outside_window(35);
        assert_eq!(free(&pools), [4, 5]);
        // The page that came back serves the next block.
        pages.reserve(65).unwrap();
        assert_eq!(pages.block_tables()[1], [NO_PAGE, 1, 2, 3, 0]);
        assert_eq!(pages.slot(0, 1000), -1);
        drop(pages);
        assert_eq!(free(&pools), [8, 8]);
    }

    #[test]
    fn capacity_counts_the_window_and_the_block_in_flight() {
        // 511 tokens of window, 256 in flight: 48 pages, and one for the ends.
        assert_eq!(peak_pages(Lifetime::Window(512), 16, 100_000), 49);
        assert_eq!(peak_pages(Lifetime::Window(512), 16, 100), 7);
        assert_eq!(peak_pages(Lifetime::Full, 16, 100_000), 6250);
        let pools = PagePools::new(&plan(&[(Lifetime::Full, 100), (Lifetime::Window(512), 49)]));
        assert_eq!(pools.capacity(), 1600);
        assert!(pools.check_capacity(1600).is_ok());
        let small = PagePools::new(&plan(&[(Lifetime::Full, 100), (Lifetime::Window(512), 40)]));
        assert_eq!(small.capacity(), 640);
        assert_eq!(small.check_capacity(641).unwrap_err().group, 1);
    }
}
