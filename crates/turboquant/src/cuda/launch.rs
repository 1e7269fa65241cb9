//! Loading kernels and launching them.
#![expect(unsafe_code, reason = "kernel launches take device addresses")]

use std::sync::Arc;

use cudarc::driver::{
    CudaContext, CudaFunction, CudaModule, CudaStream, DeviceRepr, LaunchConfig, PushKernelArg, sys,
};

use super::{
    GpuError, compile, driver_error,
    params::{DecodeParams, StoreParams},
    variant::{GpuRows, Variant, check_page_size},
};

// SAFETY: repr(C) structs of numbers, as the kernels declare them (params.cuh).
unsafe impl DeviceRepr for DecodeParams {}
// SAFETY: as above.
unsafe impl DeviceRepr for StoreParams {}

/// A card, and the kernels it has been asked for.
#[derive(Debug, Clone)]
pub struct Gpu {
    context: Arc<CudaContext>,
    target: String,
    multiprocessors: u32,
}

impl Gpu {
    /// Card `ordinal`.
    ///
    /// # Errors
    /// No driver, no such card.
    pub fn open(ordinal: usize) -> Result<Gpu, GpuError> {
        // SAFETY: only tries to open the library; without it, every driver call would panic.
        if !unsafe { sys::is_culib_present() } {
            return Err(GpuError::NoDriver);
        }
        let what = || format!("opening GPU {ordinal}");
        let context = CudaContext::new(ordinal).map_err(|error| driver_error(what(), &error))?;
        let (major, minor) = context.compute_capability().map_err(|error| driver_error(what(), &error))?;
        let count = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT;
        let multiprocessors = context.attribute(count).map_err(|error| driver_error(what(), &error))?;
        Ok(Gpu {
            context,
            target: compile::target_of(major, minor),
            multiprocessors: multiprocessors.max(1) as u32,
        })
    }

    /// The context, for streams and memory.
    pub fn context(&self) -> &Arc<CudaContext> {
        &self.context
    }

    /// Target of the kernels, `90a` and the like.
    pub fn target(&self) -> &str {
        &self.target
    }

    fn load(&self, variant: &Variant, info_len: usize) -> Result<Loaded, GpuError> {
        let code = compile::cubin(variant, &self.target, compile::default_cache().as_deref())?;
        let failed = |step: &str, error| driver_error(format!("{step} kernel {variant}"), &error);
        let module: Arc<CudaModule> = self
            .context
            .load_module(cudarc::nvrtc::Ptx::from_binary(code))
            .map_err(|error| failed("loading", error))?;
        let function = module.load_function(variant.entry()).map_err(|error| failed("finding", error))?;
        let stream = self.context.default_stream();
        let global =
            module.get_global(variant.info_symbol(), &stream).map_err(|error| failed("reading", error))?;
        let bytes: Vec<u8> = stream.clone_dtoh(&global).map_err(|error| failed("reading", error))?;
        let info: Vec<i32> = bytes.as_chunks().0.iter().map(|word| i32::from_le_bytes(*word)).collect();
        if info.len() < info_len || info.iter().any(|number| *number < 0) {
            return Err(GpuError::Argument {
                kernel: variant.to_string(),
                what: "launch facts",
                got: info.len() as i64,
                expected: format!("{info_len}"),
            });
        }
        Ok(Loaded { function, info: info.into_iter().map(|number| number as u32).collect() })
    }
}

#[derive(Debug, Clone)]
struct Loaded {
    function: CudaFunction,
    info: Vec<u32>,
}

/// A decode kernel on a card.
#[derive(Debug, Clone)]
pub struct DecodeKernel {
    variant: Variant,
    loaded: Loaded,
    grid: u32,
    head_dim: usize,
}

impl DecodeKernel {
    /// The kernel for `query_rows = gqa_group * q_len` rows of a KV head.
    ///
    /// # Errors
    /// Compiling and loading.
    pub fn load(
        gpu: &Gpu,
        rows: GpuRows,
        query_rows: usize,
        softcap: bool,
    ) -> Result<DecodeKernel, GpuError> {
        let variant = Variant::decode(rows, query_rows, softcap);
        let loaded = gpu.load(&variant, 6)?;
        let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        loaded
            .function
            .set_attribute(attribute, loaded.info[1] as i32)
            .map_err(|error| driver_error(format!("preparing kernel {variant}"), &error))?;
        let grid = gpu.multiprocessors * loaded.info[3].max(1);
        Ok(DecodeKernel { variant, loaded, grid, head_dim: rows.head_dim })
    }

    /// Floats that [`DecodeParams::partials`] points to, whatever the lengths.
    pub fn partial_floats(&self) -> usize {
        2 * self.grid as usize * self.loaded.info[4] as usize
    }

    /// Words that [`DecodeParams::counters`] points to; zero before the first launch.
    pub fn counters(&self) -> usize {
        4 * self.grid as usize
    }

    /// Attention of `num_seqs * q_len` query tokens, on `stream`.
    ///
    /// # Safety
    /// Every address of `params` points to device memory as its field says, of the sizes that the
    /// lengths on the device imply; launches that share `partials` or `counters` follow one another.
    ///
    /// # Errors
    /// Numbers that the kernel cannot serve, and CUDA's own.
    pub unsafe fn launch(&self, stream: &Arc<CudaStream>, params: &DecodeParams) -> Result<(), GpuError> {
        let refuse = |what, got: i64, expected: &str| {
            Err(GpuError::Argument {
                kernel: self.variant.to_string(),
                what,
                got,
                expected: expected.to_owned(),
            })
        };
        check_page_size(usize::try_from(params.page_size).unwrap_or(0))?;
        for (what, got) in [
            ("num_kv_heads", params.num_kv_heads),
            ("gqa_group", params.gqa_group),
            ("q_len", params.q_len),
            ("max_pages", params.max_pages),
        ] {
            if got < 1 {
                return refuse(what, i64::from(got), "1 or more");
            }
        }
        if params.num_seqs < 1 {
            return if params.num_seqs == 0 {
                Ok(())
            } else {
                refuse("num_seqs", i64::from(params.num_seqs), "0 or more")
            };
        }
        // list indices are 32 bits wide
        let rows = i64::from(params.gqa_group) * i64::from(params.q_len);
        let lists = i64::from(params.num_kv_heads) * (rows + 7) / 8;
        let units =
            i64::from(params.num_seqs) * (i64::from(params.max_pages) * i64::from(params.page_size / 16) + 1);
        if lists.checked_mul(units).is_none_or(|n| n >= 1 << 31) {
            return refuse("a batch of units", units, "fewer than 2^31 over all heads");
        }
        let config = LaunchConfig {
            grid_dim: (self.grid, 1, 1),
            block_dim: (self.loaded.info[0], 1, 1),
            shared_mem_bytes: self.loaded.info[1],
        };
        // SAFETY: the kernel takes one DecodeParams by value; the caller vouches for its addresses.
        let launched = unsafe { stream.launch_builder(&self.loaded.function).arg(params).launch(config) };
        let what = || {
            format!(
                "launching {} for {} sequences of head_dim {}",
                self.variant, params.num_seqs, self.head_dim
            )
        };
        launched.map(|_| ()).map_err(|error| driver_error(what(), &error))
    }
}

/// A store kernel on a card.
#[derive(Debug, Clone)]
pub struct StoreKernel {
    variant: Variant,
    loaded: Loaded,
}

impl StoreKernel {
    /// The kernel for `rows`.
    ///
    /// # Errors
    /// Compiling and loading.
    pub fn load(gpu: &Gpu, rows: GpuRows) -> Result<StoreKernel, GpuError> {
        let variant = Variant::store(rows);
        let loaded = gpu.load(&variant, 2)?;
        Ok(StoreKernel { variant, loaded })
    }

    /// Stores `num_tokens` tokens, on `stream`.
    ///
    /// # Safety
    /// Every address of `params` points to device memory as its field says.
    ///
    /// # Errors
    /// Numbers that the kernel cannot serve, and CUDA's own.
    pub unsafe fn launch(&self, stream: &Arc<CudaStream>, params: &StoreParams) -> Result<(), GpuError> {
        check_page_size(usize::try_from(params.page_size).unwrap_or(0))?;
        let rows = i64::from(params.num_tokens) * i64::from(params.num_kv_heads);
        if rows <= 0 {
            return Ok(());
        }
        let threads = self.loaded.info[0].max(32);
        let a_block = i64::from(threads / 32);
        let blocks = (rows + a_block - 1) / a_block;
        let config = LaunchConfig {
            grid_dim: (u32::try_from(blocks).unwrap_or(u32::MAX), 1, 1),
            block_dim: (threads, 1, 1),
            shared_mem_bytes: 0,
        };
        // SAFETY: the kernel takes one StoreParams by value; the caller vouches for its addresses.
        let launched = unsafe { stream.launch_builder(&self.loaded.function).arg(params).launch(config) };
        let what = || format!("launching {} for {} tokens", self.variant, params.num_tokens);
        launched.map(|_| ()).map_err(|error| driver_error(what(), &error))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A machine without a card gets a sentence; one with a card opens it.
    #[test]
    fn no_gpu_is_a_sentence() {
        match Gpu::open(0) {
            Ok(gpu) => assert!(!gpu.target().is_empty()),
            Err(error) => {
                let text = error.to_string();
                assert!(
                    text.contains("no NVIDIA driver was found") || text.contains("opening GPU 0"),
                    "{text}"
                );
            }
        }
    }
}
