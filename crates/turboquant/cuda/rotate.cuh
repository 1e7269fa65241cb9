// The orthogonal rotation of keys and queries: Walsh-Hadamard blocks of the largest power of two
// that divides head_dim, over sqrt(block). One warp holds a row: element lane + 32 * i in x[i].
#pragma once
#include "gpu.cuh"

namespace tq {

template <int D>
struct Rotation {
    static constexpr int BLOCK = D & -D;
    static constexpr int PER_LANE = (D + 31) / 32;
};

template <int D>
TQ_DEVICE void rotate_row(float (&x)[Rotation<D>::PER_LANE], int lane) {
    constexpr int BLOCK = Rotation<D>::BLOCK, N = Rotation<D>::PER_LANE;
#pragma unroll
    for (int bit = 1; bit < (BLOCK < 32 ? BLOCK : 32); bit *= 2) {
#pragma unroll
        for (int i = 0; i < N; i++) {
            float other = shuffle_xor(x[i], bit);
            x[i] = lane & bit ? other - x[i] : x[i] + other;
        }
    }
#pragma unroll
    for (int bit = 1; bit < BLOCK / 32; bit *= 2) {
#pragma unroll
        for (int i = 0; i < N; i++) {
            if (i & bit) continue;
            float a = x[i], b = x[i | bit];
            x[i] = a + b;
            x[i | bit] = a - b;
        }
    }
    // 1 / sqrt(BLOCK), BLOCK a power of two up to 256
    constexpr float SCALE = BLOCK == 16    ? 0.25f
                            : BLOCK == 32  ? 0.17677669529663687f
                            : BLOCK == 64  ? 0.125f
                            : BLOCK == 128 ? 0.08838834764831845f
                                           : 0.0625f;
#pragma unroll
    for (int i = 0; i < N; i++) x[i] *= SCALE;
}

TQ_DEVICE float warp_max(float x) {
#pragma unroll
    for (int bit = 16; bit; bit /= 2) x = fmaxf(x, shuffle_xor(x, bit));
    return x;
}
TQ_DEVICE float warp_sum(float x) {
#pragma unroll
    for (int bit = 16; bit; bit /= 2) x += shuffle_xor(x, bit);
    return x;
}

}  // namespace tq
