// One decode kernel, specialised by macros: TQ_D, TQ_KEY, TQ_VALUE (numbers of tq::Format), TQ_IO
// (0 bf16, 1 fp16), TQ_BLOCKS (8 query rows each), TQ_SOFTCAP. The rest has defaults.
#include "decode.cuh"

#ifndef TQ_CTAS  // on a multiprocessor
#define TQ_CTAS 1
#endif
#ifndef TQ_Q_RESIDENT
#define TQ_Q_RESIDENT (TQ_D * TQ_BLOCKS <= 128)
#endif
#ifndef TQ_TOGETHER
// Measured on an H200: two where the second block of queries or 3-bit values ask for long chains. Copies by cp.async are
// awaited a unit at a time.
#define TQ_TOGETHER (TQ_BULK_COPY && WARPS < 16 && fits(3) && (TQ_BLOCKS > 1 || TQ_VALUE == tq::UNIFORM3) ? 2 : 1)
#endif

using Row = tq::Row<TQ_D, TQ_KEY, TQ_VALUE>;

// Shared memory of a multiprocessor, less the 1 KiB each CTA costs beside its own.
#if defined(__HIP__)
constexpr int SHARED_BUDGET = 65 * 1024;  // 64 KiB a block, and no such cost
#elif defined(__CUDA_ARCH__) && (__CUDA_ARCH__ == 860 || __CUDA_ARCH__ == 890 || __CUDA_ARCH__ >= 1200)
constexpr int SHARED_BUDGET = 100 * 1024;
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr int SHARED_BUDGET = 164 * 1024;
#else
constexpr int SHARED_BUDGET = 228 * 1024;
#endif

template <int WARPS, int STAGES, int TOGETHER = 1>
using Sized = tq::DecodeConfig<Row, TQ_IO, TQ_BLOCKS, WARPS, STAGES, TQ_SOFTCAP, TQ_Q_RESIDENT, TOGETHER>;
constexpr int CTA_BUDGET = SHARED_BUDGET / TQ_CTAS - 1024;

#ifndef TQ_WARPS
// As many as run best on an H200; fewer where their rings of two stages do not fit.
template <int WARPS>
TQ_ANYWHERE int warps_that_fit() {
    if constexpr (WARPS == 1 || Sized<WARPS, 2>::SHARED_BYTES <= CTA_BUDGET) return WARPS;
    else return warps_that_fit<WARPS / 2>();
}
constexpr int WARPS = warps_that_fit<(Row::UNIT_BYTES > 10000 ? 4 : Row::UNIT_BYTES > 6000 || TQ_D * TQ_BLOCKS > 128 ? 8 : 16)>();
#else
constexpr int WARPS = TQ_WARPS;
#endif

template <int STAGES, int TOGETHER = 1>
using With = Sized<WARPS, STAGES, TOGETHER>;
TQ_ANYWHERE bool fits(int stages) { return With<1>::SHARED_BYTES + (stages - 1) * (With<2>::SHARED_BYTES - With<1>::SHARED_BYTES) <= CTA_BUDGET; }
#ifndef TQ_STAGES
#define TQ_STAGES (fits(12) ? 12 : fits(10) ? 10 : fits(8) ? 8 : fits(7) ? 7 : fits(6) ? 6 : fits(5) ? 5 : fits(4) ? 4 : fits(3) ? 3 : 2)
#endif
using Config = With<TQ_STAGES, TQ_TOGETHER>;
static_assert(Config::SHARED_BYTES <= CTA_BUDGET, "two stages of one warp must fit");

// What a launch needs to know: threads, dynamic shared bytes, query rows of a block, CTAs of a
// multiprocessor, floats of a part, stages.
extern "C" __device__ const int turboquant_decode_info[6] = {
    Config::THREADS, Config::SHARED_BYTES, Config::ROWS, TQ_CTAS, tq::Merge<Config>::PART, TQ_STAGES};

extern "C" __global__ void __launch_bounds__(Config::THREADS, TQ_CTAS)
    turboquant_decode(const __grid_constant__ tq::DecodeParams params) {
    extern __shared__ __align__(128) u8 shared[];
    tq::Decode<Config>(params, shared).run();
}
