// One prefill kernel for any card from sm_80 on, specialised by macros: TQ_D, TQ_KEY, TQ_VALUE (numbers
// of tq::Format), TQ_IO (0 bf16, 1 fp16), TQ_SOFTCAP. The rest has defaults.
#include "prefill_mma.cuh"

using Row = tq::Row<TQ_D, TQ_KEY, TQ_VALUE>;

// Shared memory of a multiprocessor, less the 1 KiB each CTA costs beside its own.
#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ == 860 || __CUDA_ARCH__ == 890 || __CUDA_ARCH__ >= 1200)
constexpr int SHARED_BUDGET = 100 * 1024;
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr int SHARED_BUDGET = 164 * 1024;
#else
constexpr int SHARED_BUDGET = 228 * 1024;
#endif

#ifndef TQ_TOKENS
#define TQ_TOKENS 64
#endif
#ifndef TQ_M_TILES  // 32 rows a warp while their output fits its registers
#define TQ_M_TILES (TQ_D <= 128 ? 2 : 1)
#endif
template <int WARPS, int BUFFERS, bool STAGED>
using With = tq::PrefillConfig<Row, TQ_IO, TQ_SOFTCAP, WARPS, TQ_M_TILES, TQ_TOKENS, BUFFERS, STAGED>;

#ifndef TQ_WARPS  // with 32 rows a warp, two CTAs of 4 out of step; with 16, one of 8, so that more rows share a tile
#define TQ_WARPS (TQ_M_TILES == 1 && With<8, 1, false>::SHARED_BYTES <= SHARED_BUDGET - 1024 ? 8 : 4)
#endif
#ifndef TQ_CTAS  // on a multiprocessor
#define TQ_CTAS (TQ_M_TILES == 2 && TQ_WARPS == 4 && With<TQ_WARPS, 1, false>::SHARED_BYTES <= SHARED_BUDGET / 2 - 1024 ? 2 : 1)
#endif
constexpr int CTA_BUDGET = SHARED_BUDGET / TQ_CTAS - 1024;
#ifndef TQ_BUFFERS
#define TQ_BUFFERS (With<TQ_WARPS, 2, false>::SHARED_BYTES <= CTA_BUDGET ? 2 : 1)
#endif
#ifndef TQ_STAGED
#define TQ_STAGED (With<TQ_WARPS, TQ_BUFFERS, true>::SHARED_BYTES <= CTA_BUDGET)
#endif
using Config = With<TQ_WARPS, TQ_BUFFERS, TQ_STAGED>;
static_assert(Config::SHARED_BYTES <= CTA_BUDGET, "the tiles do not fit in shared memory");

// What a launch needs to know: threads, dynamic shared bytes, query rows of a CTA.
extern "C" __device__ const int turboquant_prefill_info[3] = {Config::THREADS, Config::SHARED_BYTES, Config::TILE_ROWS};

extern "C" __global__ void __launch_bounds__(Config::THREADS, TQ_CTAS)
    turboquant_prefill(const __grid_constant__ tq::PrefillParams params) {
    extern __shared__ __align__(128) u8 shared[];
    tq::Prefill<Config>(params, shared).run();
}
