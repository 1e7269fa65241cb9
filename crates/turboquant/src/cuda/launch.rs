//! Loading kernels and launching them.
#![expect(unsafe_code, reason = "kernel launches take device addresses")]

use std::sync::Arc;

use cudarc::driver::{
    CudaContext, CudaFunction, CudaModule, CudaSlice, CudaStream, DeviceRepr, DriverError, LaunchConfig,
    PushKernelArg, sys,
};

use super::{
    GpuError, compile, driver_error,
    params::{DecodeParams, PrefillParams, StoreParams},
    variant::{GpuRows, PrefillChoice, PrefillShape, Variant, check_page_size, select_prefill},
};

// SAFETY: repr(C) structs of numbers, as the kernels declare them (params.cuh).
unsafe impl DeviceRepr for DecodeParams {}
// SAFETY: as above.
unsafe impl DeviceRepr for StoreParams {}
// SAFETY: as above.
unsafe impl DeviceRepr for PrefillParams {}

/// A card, and the kernels it has been asked for.
#[derive(Debug, Clone)]
pub struct Gpu {
    context: Arc<CudaContext>,
    capability: (i32, i32),
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
        let capability = context.compute_capability().map_err(|error| driver_error(what(), &error))?;
        let count = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT;
        let multiprocessors = context.attribute(count).map_err(|error| driver_error(what(), &error))?;
        Ok(Gpu {
            context,
            capability,
            target: compile::target_of(capability.0, capability.1),
            multiprocessors: multiprocessors.max(1) as u32,
        })
    }

    /// The context, for streams and memory.
    pub fn context(&self) -> &Arc<CudaContext> {
        &self.context
    }

    /// The compute capability, major and minor.
    pub fn capability(&self) -> (i32, i32) {
        self.capability
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

impl Loaded {
    /// Lets the kernel take the dynamic shared memory that its facts ask for.
    fn take_shared_memory(&self, variant: &Variant) -> Result<(), GpuError> {
        let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        let set = self.function.set_attribute(attribute, self.info[1] as i32);
        set.map_err(|error| driver_error(format!("preparing kernel {variant}"), &error))
    }
}

fn refuse<T>(variant: &Variant, what: &'static str, got: i64, expected: &str) -> Result<T, GpuError> {
    Err(GpuError::Argument { kernel: variant.to_string(), what, got, expected: expected.to_owned() })
}

/// Numbers by name, each with the least it may be.
fn check_counts(variant: &Variant, counts: &[(&'static str, i32, i32)]) -> Result<(), GpuError> {
    match counts.iter().find(|(_, got, least)| got < least) {
        None => Ok(()),
        Some(&(what, got, least)) => refuse(variant, what, i64::from(got), &format!("{least} or more")),
    }
}

/// A kernel is made with or without a soft cap; the parameters must mean the same.
fn check_softcap(variant: &Variant, softcap: f32) -> Result<(), GpuError> {
    match variant.softcap() {
        Some(true) if !(softcap > 0.0 && softcap.is_finite()) => {
            refuse(variant, "softcap", softcap as i64, "a cap above 0, or to be loaded without one")
        }
        Some(false) if softcap != 0.0 => {
            refuse(variant, "softcap", softcap as i64, "0, or to be loaded with a soft cap")
        }
        _ => Ok(()),
    }
}

/// A decode kernel on a card.
#[derive(Debug, Clone)]
pub struct DecodeKernel {
    variant: Variant,
    loaded: Loaded,
    grid: u32,
    head_dim: usize,
    can_overlap: bool,
    overlaps: bool, // launches may set up while the stream's previous kernel ends
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
        loaded.take_shared_memory(&variant)?;
        let grid = gpu.multiprocessors * loaded.info[3].max(1);
        Ok(DecodeKernel {
            variant,
            loaded,
            grid,
            head_dim: rows.head_dim,
            can_overlap: gpu.capability >= (9, 0),
            overlaps: false,
        })
    }

    /// Lets a launch set up while the stream's previous kernel ends, where the card can (compute capability
    /// 9.0): 0.4 us a launch on an H200. For a card on which one stream launches decode: CUDA does not say
    /// that cooperative launches of two streams stay apart if CTAs of one may come early.
    #[must_use]
    pub fn overlapping(mut self) -> Self {
        self.overlaps = self.can_overlap;
        self
    }

    /// What [`DecodeParams::partials`] points to for this kernel, whatever the lengths: floats whose bytes are
    /// all 0xff, which says that no part is there yet. A launch leaves them so; after one that failed, make
    /// them anew.
    ///
    /// # Errors
    /// CUDA's own.
    pub fn partials(&self, stream: &Arc<CudaStream>) -> Result<CudaSlice<u32>, GpuError> {
        let words = 2 * self.grid as usize * self.loaded.info[4] as usize;
        let filled = stream.clone_htod(&vec![u32::MAX; words]);
        filled.map_err(|error| driver_error(format!("making room for the parts of {}", self.variant), &error))
    }

    /// Attention of `num_seqs * q_len` query tokens, on `stream`.
    ///
    /// # Safety
    /// Every address of `params` points to device memory as its field says, of the sizes that the
    /// lengths on the device imply; `partials` was made by this kernel ([`DecodeKernel::partials`]) or by one
    /// that makes more; launches that share it follow one another.
    ///
    /// # Errors
    /// Numbers that the kernel cannot serve, and CUDA's own.
    pub unsafe fn launch(&self, stream: &Arc<CudaStream>, params: &DecodeParams) -> Result<(), GpuError> {
        let Some(params) = decode_params(&self.variant, params)? else { return Ok(()) };
        let params = &params;
        // Cooperative: CTAs wait for each other's parts, so all of them must be on the card at once.
        let launched = if self.overlaps {
            // SAFETY: as for this function.
            unsafe { self.launch_overlapping(stream, params) }
        } else {
            let config = LaunchConfig {
                grid_dim: (self.grid, 1, 1),
                block_dim: (self.loaded.info[0], 1, 1),
                shared_mem_bytes: self.loaded.info[1],
            };
            // SAFETY: the kernel takes one DecodeParams by value; the caller vouches for its addresses.
            unsafe { stream.launch_builder(&self.loaded.function).arg(params).launch_cooperative(config) }
                .map(|_| ())
        };
        let what = || {
            format!(
                "launching {} for {} sequences of head_dim {}",
                self.variant, params.num_seqs, self.head_dim
            )
        };
        launched.map_err(|error| driver_error(what(), &error))
    }

    /// A cooperative launch (CTAs wait for each other's parts, so all of them must be on the card at once) that
    /// may set up while the stream's previous kernel ends; the kernel itself waits for that end before it reads.
    ///
    /// # Safety
    /// As [`DecodeKernel::launch`].
    unsafe fn launch_overlapping(
        &self,
        stream: &Arc<CudaStream>,
        params: &DecodeParams,
    ) -> Result<(), DriverError> {
        use sys::CUlaunchAttributeID_enum as Id;
        let attribute = |id, value| sys::CUlaunchAttribute { id, value, pad: [0; 4] };
        let mut attributes = [
            attribute(Id::CU_LAUNCH_ATTRIBUTE_COOPERATIVE, sys::CUlaunchAttributeValue { cooperative: 1 }),
            attribute(
                Id::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
                sys::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
            ),
        ];
        let config = sys::CUlaunchConfig {
            gridDimX: self.grid,
            gridDimY: 1,
            gridDimZ: 1,
            blockDimX: self.loaded.info[0],
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: self.loaded.info[1],
            hStream: stream.cu_stream(),
            attrs: attributes.as_mut_ptr(),
            numAttrs: attributes.len() as u32,
        };
        let mut arguments = [std::ptr::from_ref(params).cast_mut().cast::<std::ffi::c_void>()];
        stream.context().bind_to_thread()?;
        // SAFETY: the kernel takes one DecodeParams by value, which the driver copies; the caller vouches for its
        // addresses.
        unsafe {
            sys::cuLaunchKernelEx(
                &config,
                self.loaded.function.cu_function(),
                arguments.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        }
        .result()
    }
}

/// The parameters as the kernel takes them; `None` where there is nothing to do.
fn decode_params(variant: &Variant, params: &DecodeParams) -> Result<Option<DecodeParams>, GpuError> {
    let refuse = |what, got: i128, expected: &str| {
        refuse(variant, what, i64::try_from(got).unwrap_or(i64::MAX), expected)
    };
    check_page_size(usize::try_from(params.page_size).unwrap_or(0))?;
    let counts = [
        ("num_kv_heads", params.num_kv_heads, 1),
        ("gqa_group", params.gqa_group, 1),
        ("q_len", params.q_len, 1),
        ("max_pages", params.max_pages, 1),
        ("num_seqs", params.num_seqs, 0),
        ("window", params.window, 0),
    ];
    check_counts(variant, &counts)?;
    check_softcap(variant, params.softcap)?;
    if params.num_seqs == 0 {
        return Ok(None);
    }
    let addresses = [("pages", params.pages, 16), ("partials", params.partials, 16), ("out", params.out, 8)];
    for (what, address, multiple) in addresses {
        if !address.is_multiple_of(multiple) {
            return refuse(what, address.into(), &format!("an address that is a multiple of {multiple}"));
        }
    }
    if params.page_bytes < 0 || params.page_bytes % 16 != 0 {
        return refuse("page_bytes", params.page_bytes.into(), "a multiple of 16");
    }
    // list indices are 32 bits wide
    let wide = |number: i32| i128::from(number);
    let rows = wide(params.gqa_group) * wide(params.q_len);
    if rows >= 1 << 16 {
        return refuse("gqa_group * q_len", rows, "fewer than 65536 query rows of a KV head");
    }
    let lists = wide(params.num_kv_heads) * (rows + 7) / 8;
    let units = wide(params.num_seqs) * (wide(params.max_pages) * wide(params.page_size / 16) + 1);
    if lists * units >= 1 << 31 {
        return refuse("a batch of units", lists * units, "fewer than 2^31 over all heads");
    }
    // longer than any sequence, and far from where the kernel's differences would wrap
    Ok(Some(DecodeParams { window: params.window.min(1 << 30), ..*params }))
}

/// A prefill kernel on a card.
#[derive(Debug, Clone)]
pub struct PrefillKernel {
    choice: PrefillChoice,
    loaded: Loaded,
}

impl PrefillKernel {
    /// The kernel that [`select_prefill`] names for this card.
    ///
    /// # Errors
    /// Shapes without a kernel, compiling and loading.
    pub fn load(gpu: &Gpu, shape: &PrefillShape) -> Result<PrefillKernel, GpuError> {
        let choice = select_prefill(gpu.capability, shape)?;
        let loaded = gpu.load(&choice.variant, 3)?;
        loaded.take_shared_memory(&choice.variant)?;
        Ok(PrefillKernel { choice, loaded })
    }

    /// Which kernel this is, and why; prints as one line.
    pub fn choice(&self) -> &PrefillChoice {
        &self.choice
    }

    /// Attention of `num_tokens` new tokens, the last of `query_starts`, on `stream`. No workspace is needed.
    ///
    /// # Safety
    /// Every address of `params` points to device memory as its field says, of the sizes that
    /// `num_tokens` and the lengths on the device imply.
    ///
    /// # Errors
    /// Numbers that the kernel cannot serve, and CUDA's own.
    pub unsafe fn launch(
        &self,
        stream: &Arc<CudaStream>,
        params: &PrefillParams,
        num_tokens: usize,
    ) -> Result<(), GpuError> {
        let Some(grid) = prefill_grid(&self.choice.variant, self.loaded.info[2], params, num_tokens)? else {
            return Ok(());
        };
        let config = LaunchConfig {
            grid_dim: (grid, 1, 1),
            block_dim: (self.loaded.info[0], 1, 1),
            shared_mem_bytes: self.loaded.info[1],
        };
        // SAFETY: the kernel takes one PrefillParams by value; the caller vouches for its addresses.
        let launched = unsafe { stream.launch_builder(&self.loaded.function).arg(params).launch(config) };
        let what = || {
            format!(
                "launching {} for {num_tokens} tokens of {} requests",
                self.choice.variant, params.num_seqs
            )
        };
        launched.map(|_| ()).map_err(|error| driver_error(what(), &error))
    }
}

/// CTAs of a prefill launch: a tile has `tile_rows` query rows of one request and KV head, and each request
/// may leave one unfinished. None if there is nothing to do.
fn prefill_grid(
    variant: &Variant,
    tile_rows: u32,
    params: &PrefillParams,
    num_tokens: usize,
) -> Result<Option<u32>, GpuError> {
    let refuse = |what, got, expected: &str| refuse(variant, what, got, expected);
    check_page_size(usize::try_from(params.page_size).unwrap_or(0))?;
    let counts = [
        ("num_kv_heads", params.num_kv_heads, 1),
        ("gqa_group", params.gqa_group, 1),
        ("num_seqs", params.num_seqs, 0),
        ("max_pages", params.max_pages, 0),
        ("window", params.window, 0),
    ];
    check_counts(variant, &counts)?;
    check_softcap(variant, params.softcap)?;
    if !(params.sm_scale > 0.0 && params.sm_scale.is_finite()) {
        return refuse("sm_scale", params.sm_scale as i64, "a finite number above 0");
    }
    if params.num_seqs == 0 && num_tokens > 0 {
        return refuse("num_seqs", 0, "1 or more where there are tokens");
    }
    if num_tokens == 0 {
        return Ok(None);
    }
    let row = i64::from(params.num_kv_heads) * variant.head_dim() as i64;
    for (what, stride) in [("key_stride", params.key_stride), ("value_stride", params.value_stride)] {
        if stride < row || !stride.unsigned_abs().is_multiple_of(8) {
            return refuse(
                what,
                stride,
                &format!("a multiple of 8, {row} (num_kv_heads * head_dim) or more"),
            );
        }
    }
    // copies of 16 bytes
    for (what, address) in [
        ("out", params.out),
        ("q", params.q),
        ("key", params.key),
        ("value", params.value),
        ("pages", params.pages),
    ] {
        if !address.is_multiple_of(16) {
            return refuse(what, address as i64, "an address that is a multiple of 16");
        }
    }
    if params.page_bytes < 0 || !params.page_bytes.unsigned_abs().is_multiple_of(16) {
        return refuse("page_bytes", params.page_bytes, "a multiple of 16");
    }
    // rows of a KV head are counted in 32 bits, and so are CTAs
    let rows = num_tokens.checked_mul(params.gqa_group as usize).filter(|rows| *rows < 1 << 31);
    let Some(rows) = rows else {
        return refuse("num_tokens", num_tokens as i64, "fewer than 2^31 query rows of a KV head");
    };
    let tiles = rows as u64 / u64::from(tile_rows.max(1)) + params.num_seqs as u64;
    match tiles.checked_mul(params.num_kv_heads as u64).filter(|grid| *grid < 1 << 31) {
        Some(grid) => Ok(Some(grid as u32)),
        None => refuse("num_tokens", num_tokens as i64, "fewer than 2^31 tiles over all KV heads"),
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
    use crate::{
        cuda::variant::IoDtype,
        format::{CacheDtype, NativeDtype, Preset},
    };

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

    const DECODE: DecodeParams = DecodeParams {
        out: 0x1008,
        lse: 0,
        q: 0x2000,
        pages: 0x5000,
        block_tables: 0x6000,
        seq_lens: 0x7000,
        sinks: 0,
        partials: 0x8000,
        page_bytes: 16 * 8 * 134,
        codebook: [0; 2],
        num_seqs: 3,
        num_kv_heads: 8,
        gqa_group: 4,
        q_len: 1,
        page_size: 16,
        max_pages: 10,
        window: 0,
        sm_scale: 0.1,
        softcap: 0.0,
    };

    #[test]
    fn a_decode_that_cannot_run_is_a_sentence() {
        let format = CacheDtype::TurboQuant(Preset::FourBitNc).row_format(NativeDtype::Bf16);
        let rows = GpuRows::new(format, 128, IoDtype::Bf16).unwrap();
        let variant = Variant::decode(rows, 4, false);
        let many = i32::MAX / 16 * 16;
        let cases = [
            (DecodeParams { page_size: 24, ..DECODE }, "pages of 24 tokens"),
            (DecodeParams { q_len: 0, ..DECODE }, "q_len 0, and needs 1 or more"),
            (DecodeParams { num_seqs: -1, ..DECODE }, "num_seqs -1, and needs 0 or more"),
            (DecodeParams { window: -1, ..DECODE }, "window -1, and needs 0 or more"),
            (DecodeParams { softcap: 30.0, ..DECODE }, "softcap 30, and needs 0"),
            (
                DecodeParams { out: 0x1004, ..DECODE },
                "out 4100, and needs an address that is a multiple of 8",
            ),
            (DecodeParams { partials: 0x8008, ..DECODE }, "partials 32776"),
            (DecodeParams { page_bytes: 1000, ..DECODE }, "page_bytes 1000, and needs a multiple of 16"),
            (DecodeParams { gqa_group: 1 << 16, q_len: 1 << 16, ..DECODE }, "fewer than 65536 query rows"),
            (DecodeParams { max_pages: i32::MAX, num_seqs: i32::MAX, ..DECODE }, "fewer than 2^31"),
            (DecodeParams { max_pages: many, ..DECODE }, "fewer than 2^31 over all heads"),
        ];
        for (params, want) in cases {
            let error = decode_params(&variant, &params).unwrap_err().to_string();
            assert!(error.contains(want), "{error}");
        }
        assert_eq!(decode_params(&variant, &DECODE).unwrap(), Some(DECODE));
        assert_eq!(decode_params(&variant, &DecodeParams { num_seqs: 0, ..DECODE }).unwrap(), None);
        let wide = decode_params(&variant, &DecodeParams { window: i32::MAX, ..DECODE }).unwrap();
        assert_eq!(wide.unwrap().window, 1 << 30);
    }

    fn prefill(softcap: bool) -> Variant {
        let format = CacheDtype::TurboQuant(Preset::FourBitNc).row_format(NativeDtype::Bf16);
        let shape = PrefillShape { format, head_dim: 128, io: IoDtype::Bf16, alibi: false, softcap };
        select_prefill((9, 0), &shape).unwrap().variant
    }

    const PREFILL: PrefillParams = PrefillParams {
        out: 0x1000,
        lse: 0,
        q: 0x2000,
        key: 0x3000,
        value: 0x4000,
        pages: 0x5000,
        block_tables: 0x6000,
        query_starts: 0x7000,
        prefix_lens: 0x8000,
        sinks: 0,
        page_bytes: 16 * 8 * 134,
        key_stride: 8 * 128,
        value_stride: 8 * 128,
        codebook: [0; 2],
        num_seqs: 3,
        num_kv_heads: 8,
        gqa_group: 4,
        page_size: 16,
        max_pages: 10,
        window: 0,
        sm_scale: 0.1,
        softcap: 0.0,
    };

    #[test]
    fn a_prefill_grid_has_a_tile_for_every_row() {
        // one whole tile of 128 rows and a rest: at most tokens * 4 / 128 + 3 tiles, of 8 heads
        for (tokens, want) in
            [(0, None), (1, Some(8 * 3)), (32, Some(8 * 4)), (33, Some(8 * 4)), (8192, Some(8 * 259))]
        {
            assert_eq!(prefill_grid(&prefill(false), 128, &PREFILL, tokens).unwrap(), want, "{tokens}");
        }
        let nothing = PrefillParams { num_seqs: 0, max_pages: 0, ..PREFILL };
        assert_eq!(prefill_grid(&prefill(false), 128, &nothing, 0).unwrap(), None);
    }

    #[test]
    fn a_prefill_that_cannot_run_is_a_sentence() {
        let cases = [
            (PrefillParams { page_size: 24, ..PREFILL }, "pages of 24 tokens"),
            (PrefillParams { num_kv_heads: 0, ..PREFILL }, "num_kv_heads 0, and needs 1 or more"),
            (PrefillParams { gqa_group: -1, ..PREFILL }, "gqa_group -1"),
            (PrefillParams { num_seqs: 0, ..PREFILL }, "where there are tokens"),
            (PrefillParams { window: -5, ..PREFILL }, "window -5, and needs 0 or more"),
            (PrefillParams { softcap: 30.0, ..PREFILL }, "softcap 30, and needs 0"),
            (
                PrefillParams { key_stride: 1000, ..PREFILL },
                "key_stride 1000, and needs a multiple of 8, 1024",
            ),
            (PrefillParams { value_stride: 1028, ..PREFILL }, "value_stride 1028"),
            (PrefillParams { sm_scale: -3.0, ..PREFILL }, "sm_scale -3, and needs a finite number above 0"),
            (PrefillParams { sm_scale: f32::NAN, ..PREFILL }, "sm_scale 0, and needs a finite"),
            (PrefillParams { q: 0x2008, ..PREFILL }, "q 8200, and needs an address"),
            (PrefillParams { page_bytes: 17_150, ..PREFILL }, "page_bytes 17150"),
            (
                PrefillParams {
                    num_kv_heads: 1 << 20,
                    key_stride: 1 << 27,
                    value_stride: 1 << 27,
                    num_seqs: 1 << 12,
                    ..PREFILL
                },
                "2^31 tiles",
            ),
            (PrefillParams { gqa_group: i32::MAX, ..PREFILL }, "2^31 query rows"),
        ];
        for (params, sentence) in cases {
            let text = prefill_grid(&prefill(false), 128, &params, 100).unwrap_err().to_string();
            assert!(text.contains(sentence), "{text}");
        }
        let text = prefill_grid(&prefill(true), 128, &PREFILL, 100).unwrap_err().to_string();
        assert!(text.contains("soft cap") && text.contains("softcap 0, and needs a cap above 0"), "{text}");
        let capped = PrefillParams { softcap: 30.0, ..PREFILL };
        assert!(prefill_grid(&prefill(true), 128, &capped, 100).unwrap().is_some());
    }
}
