// Placeholder: launches, computes nothing.
#include "prefill_mma.cuh"

extern "C" __device__ const int turboquant_prefill_info[3] = {128, 0, 64};

extern "C" __global__ void turboquant_prefill(const __grid_constant__ tq::PrefillParams params) {
    static_assert(tq::Row<TQ_D, TQ_KEY, TQ_VALUE>::D == TQ_D && (TQ_IO == 0 || TQ_IO == 1), "macros");
    static_assert(TQ_SOFTCAP || !TQ_SOFTCAP, "macros");
    if (params.num_seqs < 0) *params.lse = 0.0f;
}
