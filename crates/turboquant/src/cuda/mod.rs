//! Kernels for NVIDIA cards: store, decode and prefill over packed pages in device memory.
//!
//! The sources stand in `crates/turboquant/cuda`: device code with raw pointers and one parameter struct
//! each ([`params`]), no framework. [`variant`] says which kernel serves a shape, or in one sentence why
//! none does. Kernels are compiled at first use through NVRTC and kept on disk ([`compile`]); driver and
//! NVRTC are opened at run time, so this builds, and its tests run, without CUDA. [`launch`] loads and
//! launches. [`page`] is the order of bytes in a page on a GPU, with a lossless converter to vLLM's slots.

pub mod compile;
pub mod launch;
pub mod page;
pub mod params;
pub mod variant;

/// Why a GPU cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GpuError {
    /// No driver library.
    #[error("no NVIDIA driver was found on this machine (libcuda cannot be opened)")]
    NoDriver,
    /// NVRTC is missing where a kernel has to be compiled.
    #[error(
        "kernel {kernel} has to be compiled and NVRTC was not found; install the CUDA toolkit or set CUDA_HOME"
    )]
    NoNvrtc {
        /// The kernel.
        kernel: String,
    },
    /// A shape without a kernel.
    #[error(transparent)]
    Variant(#[from] variant::VariantError),
    /// NVRTC refused the source.
    #[error("kernel {kernel} cannot be compiled for sm_{arch}: {message}")]
    Compile {
        /// The kernel.
        kernel: String,
        /// Architecture, as in `sm_90a` without the prefix.
        arch: String,
        /// NVRTC's own words.
        message: String,
    },
    /// A driver call failed.
    #[error("{what} failed: {message}")]
    Driver {
        /// The step, with kernel and shape where there is one.
        what: String,
        /// CUDA's own words.
        message: String,
    },
    /// A launch whose numbers do not fit together.
    #[error("kernel {kernel} was given {what} {got}, and needs {expected}")]
    Argument {
        /// The kernel.
        kernel: String,
        /// The argument.
        what: &'static str,
        /// What was given.
        got: i64,
        /// What would do.
        expected: String,
    },
}

pub(crate) fn driver_error(what: impl Into<String>, error: &cudarc::driver::DriverError) -> GpuError {
    GpuError::Driver { what: what.into(), message: error.to_string() }
}
