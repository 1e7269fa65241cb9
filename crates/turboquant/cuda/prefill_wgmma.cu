// One prefill kernel for sm_90a, specialised by macros: TQ_D, TQ_KEY, TQ_VALUE (numbers of tq::Format),
// TQ_IO (0 bf16, 1 fp16), TQ_SOFTCAP.
#include "prefill_wgmma.cuh"

using Config = tq::PrefillConfig<tq::Row<TQ_D, TQ_KEY, TQ_VALUE>, TQ_IO, TQ_SOFTCAP>;

// Threads, dynamic shared bytes, query rows of a CTA.
extern "C" __device__ const int turboquant_prefill_info[3] = {Config::THREADS, Config::SHARED_BYTES, Config::TILE_ROWS};

extern "C" __global__ void __launch_bounds__(Config::THREADS, 1)
    turboquant_prefill(const __grid_constant__ tq::PrefillParams params) {
    extern __shared__ __align__(1024) u8 shared[];
    tq::Prefill<Config>(params, shared).run();
}
