//! The float types that rows are made from.

use half::{bf16, f16};

use super::Isa;

mod sealed {
    pub trait Sealed {}
    impl Sealed for f32 {}
    impl Sealed for half::f16 {}
    impl Sealed for half::bf16 {}
}

/// An element of an unpacked key or value: f32, f16 or bf16.
pub trait Element: Copy + Send + Sync + sealed::Sealed + 'static {
    /// The value, exactly.
    fn widen(self) -> f32;
    /// Widens a slice; returns how many elements are not finite.
    #[doc(hidden)]
    fn widen_slice(isa: Isa, src: &[Self], dst: &mut [f32]) -> u64;
}

impl Element for f32 {
    fn widen(self) -> f32 {
        self
    }
    fn widen_slice(isa: Isa, src: &[f32], dst: &mut [f32]) -> u64 {
        isa.widen_f32(src, dst)
    }
}

impl Element for f16 {
    fn widen(self) -> f32 {
        self.to_f32()
    }
    fn widen_slice(isa: Isa, src: &[f16], dst: &mut [f32]) -> u64 {
        isa.widen_f16(src, dst)
    }
}

impl Element for bf16 {
    fn widen(self) -> f32 {
        self.to_f32()
    }
    fn widen_slice(isa: Isa, src: &[bf16], dst: &mut [f32]) -> u64 {
        isa.widen_bf16(src, dst)
    }
}
