// Contents made on the card, for the programs that time.
#pragma once
#include "reference.h"

__device__ inline unsigned hash(unsigned long long x) {
    x ^= x >> 33, x *= 0xff51afd7ed558ccdull, x ^= x >> 33, x *= 0xc4ceb9fe1a85ec53ull, x ^= x >> 33;
    return unsigned(x);
}
// Codes at random, floats of moderate size; fields near those of normal rows.
__global__ void fill_pages(unsigned* words, size_t total, size_t code_words, size_t key_words, size_t unit_words, int key,
                           int value, int fields) {
    for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < total; i += size_t(gridDim.x) * blockDim.x) {
        size_t at = i % unit_words;
        unsigned r = hash(i), w = r;
        if (at < code_words) {
            int format = at < key_words ? key : value;
            if (format == ref::FP8) w = (r & 0x87878787u) | 0x30303030u | ((r >> 3) & 0x08080808u);
            if (format == ref::BF16) w = (r & 0x807f807fu) | 0x3f003f00u;
            if (format == ref::F16) w = (r & 0x83ff83ffu) | 0x38003800u;
        } else {
            int field = (at - code_words) / 8;
            unsigned base = fields == 3 && field == 0 ? 0x93009300u : field == fields - 2 ? 0x32663266u : 0xbe00be00u;
            w = base ^ (r & 0x001f001fu);
        }
        words[i] = w;
    }
}
// The layout's pages, all `bytes` of them.
inline void fill_pages_of(const ref::Layout& layout, uint8_t* pages, size_t bytes) {
    fill_pages<<<4096, 256>>>(reinterpret_cast<unsigned*>(pages), bytes / 4, layout.unit_code_bytes() / 4, layout.key_words() * 32,
                              layout.unit_bytes() / 4, layout.key_format, layout.value_format, layout.num_fields());
}
// Standard normal numbers as bf16.
__global__ void fill_normal(unsigned short* to, size_t n, unsigned seed) {
    for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < n; i += size_t(gridDim.x) * blockDim.x) {
        unsigned long long at = 2 * (i + (size_t(seed) << 40));
        float u = (hash(at) + 1.0f) * 2.3283064e-10f, turn = hash(at + 1) * 4.6566129e-10f;
        float x = sqrtf(-2.0f * logf(u)) * cospif(turn);
        to[i] = (unsigned short)((__float_as_uint(x) + 0x8000u) >> 16);
    }
}
