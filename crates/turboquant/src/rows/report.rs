//! What an encoder had to give up, so that callers can say so.

use std::ops::AddAssign;

/// Counts of departures from exact encoding, summed over the rows encoded into it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct EncodeReport {
    /// Finite elements beyond +-448 that an e4m3 row clipped.
    pub fp8_clipped: u64,
    /// Norms, scales, minima and native elements that became the largest finite value of their type.
    pub saturated: u64,
    /// Norms of non-zero keys and scales of non-constant values that fp16 rounds to 0.
    pub underflowed: u64,
    /// Input elements that were NaN or infinite.
    pub non_finite: u64,
}

impl EncodeReport {
    /// Whether nothing was given up.
    pub fn is_clean(&self) -> bool {
        *self == EncodeReport::default()
    }
}

impl AddAssign for EncodeReport {
    fn add_assign(&mut self, other: EncodeReport) {
        self.fp8_clipped += other.fp8_clipped;
        self.saturated += other.saturated;
        self.underflowed += other.underflowed;
        self.non_finite += other.non_finite;
    }
}
