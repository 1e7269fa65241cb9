// One store kernel, specialised by macros: TQ_D, TQ_KEY, TQ_VALUE (numbers of tq::Format), TQ_IO (0
// bf16, 1 fp16). A block of 128 threads stores 4 rows.
#include "store.cuh"

extern "C" __device__ const int turboquant_store_info[2] = {128, 0};

extern "C" __global__ void __launch_bounds__(128) turboquant_store(const __grid_constant__ tq::StoreParams params) {
    tq::Store<tq::Row<TQ_D, TQ_KEY, TQ_VALUE>, TQ_IO>(params).run();
}
