//! Which instructions the row kernels use.

#![cfg_attr(
    target_arch = "x86_64",
    expect(unsafe_code, reason = "the one place that calls functions compiled for AVX2")
)]

use std::sync::OnceLock;

use half::{bf16, f16};

#[cfg(target_arch = "x86_64")]
use super::avx2;
use super::scalar;
use crate::{codebook::Codebook, hadamard::Rotation};

/// An instruction set that this machine has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Isa {
    /// The reference: plain Rust, runs everywhere.
    Scalar,
    /// x86-64 with AVX2, FMA and F16C.
    Avx2(Avx2),
}

/// Proof that the machine has AVX2, FMA and F16C: only [`Avx2::detect`] makes one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Avx2(());

impl Avx2 {
    /// The proof, where the machine has the instructions.
    pub fn detect() -> Option<Avx2> {
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c")
        {
            return Some(Avx2(()));
        }
        None
    }
}

impl Isa {
    /// Every instruction set of this machine, the preferred one first.
    pub fn available() -> Vec<Isa> {
        Avx2::detect().map(Isa::Avx2).into_iter().chain([Isa::Scalar]).collect()
    }

    /// The preferred instruction set of this machine; looked up once.
    pub fn detect() -> Isa {
        static DETECTED: OnceLock<Isa> = OnceLock::new();
        *DETECTED.get_or_init(|| Isa::available()[0])
    }

    /// "scalar" or "avx2".
    pub fn name(self) -> &'static str {
        match self {
            Isa::Scalar => "scalar",
            Isa::Avx2(_) => "avx2",
        }
    }
}

macro_rules! kernels {
    ($(fn $name:ident($($arg:ident: $type:ty),*) $(-> $out:ty)?;)*) => {
        /// Each kernel of [`scalar`], on the chosen instruction set.
        impl Isa {
            $(pub(super) fn $name(self, $($arg: $type),*) $(-> $out)? {
                match self {
                    #[cfg(target_arch = "x86_64")]
                    // SAFETY: an `Avx2` exists only where `detect` found the features that every
                    // function of the module enables.
                    Isa::Avx2(_) => unsafe { avx2::$name($($arg),*) },
                    _ => scalar::$name($($arg),*),
                }
            })*
        }
    };
}

kernels! {
    fn widen_f32(src: &[f32], dst: &mut [f32]) -> u64;
    fn widen_f16(src: &[f16], dst: &mut [f32]) -> u64;
    fn widen_bf16(src: &[bf16], dst: &mut [f32]) -> u64;
    fn rotate(rotation: &Rotation, x: &mut [f32]);
    fn lloyd_max_codes(rotation: &Rotation, codebook: &Codebook, x: &mut [f32], codes: &mut [u8]) -> f32;
    fn centroid_values(codebook: &Codebook, codes: &[u8], factor: f32, out: &mut [f32]);
    fn centroid_squares(codebook: &Codebook, codes: &[u8]) -> f32;
    fn min_max(x: &[f32]) -> (f32, f32);
    fn uniform_codes(x: &[f32], scale: f32, zero: f32, levels: f32, codes: &mut [u8]);
    fn uniform_values(codes: &[u8], scale: f32, zero: f32, out: &mut [f32]);
    fn fp8_bytes(x: &[f32], bytes: &mut [u8]) -> u64;
    fn fp8_values(bytes: &[u8], out: &mut [f32]);
    fn f16_bytes(x: &[f32], bytes: &mut [u8]) -> u64;
    fn f16_values(bytes: &[u8], out: &mut [f32]);
    fn bf16_bytes(x: &[f32], bytes: &mut [u8]) -> u64;
    fn bf16_values(bytes: &[u8], out: &mut [f32]);
    fn pack3(codes: &[u8], packed: &mut [u8]);
    fn pack4(codes: &[u8], packed: &mut [u8]);
    fn unpack3(packed: &[u8], codes: &mut [u8]);
    fn unpack4(packed: &[u8], codes: &mut [u8]);
}
