//! What a codec refuses.

/// A row shape that this crate does not store.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CodecError {
    /// A width outside the accepted ones.
    #[error(
        "{side} head_dim {got} cannot be stored; a multiple of 8 from {min} to {max} is needed",
        min = crate::layout::MIN_HEAD_DIM,
        max = crate::layout::MAX_HEAD_DIM
    )]
    HeadDim {
        /// "key" or "value".
        side: &'static str,
        /// The width asked for.
        got: usize,
    },
    /// A code width other than 3 or 4.
    #[error("{side} codes of {got} bits cannot be stored; 3 or 4 bits are needed")]
    Bits {
        /// "key" or "value".
        side: &'static str,
        /// The bits asked for.
        got: u8,
    },
}
