// What the two prefill kernels share: which query rows a CTA works on, the tiles of keys and values in
// shared memory, and how they are filled from raw rows and from packed pages.
//
// A CTA takes TILE_ROWS query rows of one request and KV head; row = token * gqa_group + head of the
// group. It passes over the packed prefix first, with the query rotated where the keys are, then over
// the raw keys and values of the new tokens, with the query as it came. Nothing is kept between tiles
// but the softmax state and the output, so scratch does not grow with the prefix.
//
// Tiles hold 16-bit floats in rows of 128 bytes (64 elements), the 16-byte chunks of row r exchanged by
// chunk ^ (r % 8), as ldmatrix and wgmma want them:
//   keys            [D / 64 rounded up][TOKENS rows][64 dims]
//   raw values      the same
//   packed values   [TOKENS / 64][D rows][64 tokens], since a word of packed values holds two tokens of a dim
#pragma once
#include "params.cuh"
#include "rotate.cuh"
#include "rows.cuh"

namespace tq {

// ---- query rows of a CTA ----

struct QueryTile {
    i32 seq, head;
    i32 q_len, prefix_len;
    i32 first_token;  // of the request in q, key and value
    i32 first_row;    // of the request
    i32 rows;         // live; 0: nothing to do

    // Positions [begin, end) that any row sees.
    i32 begin, end;
};

// Late tiles come first: they see the most keys. Called by whole warps; the result is the same in every lane.
template <int TILE_ROWS>
TQ_DEVICE QueryTile find_tile(const PrefillParams& p, int lane) {
    QueryTile x;
    x.head = blockIdx.x % p.num_kv_heads;
    i32 index = blockIdx.x / p.num_kv_heads;
    x.rows = 0;
    for (i32 last = p.num_seqs - 1; last >= 0; last -= 32) {
        i32 seq = last - lane;
        i32 tiles = 0;
        if (seq >= 0) tiles = ((p.query_starts[seq + 1] - p.query_starts[seq]) * p.gqa_group + TILE_ROWS - 1) / TILE_ROWS;
        i32 through = tiles;
#pragma unroll
        for (int d = 1; d < 32; d *= 2) {
            i32 other = __shfl_up_sync(TQ_FULL_WARP, through, d);
            if (lane >= d) through += other;
        }
        u32 behind = __ballot_sync(TQ_FULL_WARP, through > index);
        if (behind == 0) {
            index -= __shfl_sync(TQ_FULL_WARP, through, 31);
            continue;
        }
        int at = __ffs(behind) - 1;
        x.seq = last - at;
        index = __shfl_sync(TQ_FULL_WARP, through, at) - 1 - index;  // tile of the request
        x.first_token = p.query_starts[x.seq];
        x.q_len = p.query_starts[x.seq + 1] - x.first_token;
        x.prefix_len = p.prefix_lens[x.seq];
        x.first_row = index * TILE_ROWS;
        i32 left = x.q_len * p.gqa_group - x.first_row;
        x.rows = left < TILE_ROWS ? left : TILE_ROWS;
        x.end = x.prefix_len + (x.first_row + x.rows - 1) / p.gqa_group + 1;
        x.begin = p.window > 0 ? x.prefix_len + x.first_row / p.gqa_group + 1 - p.window : 0;
        x.begin = x.begin < 0 ? 0 : x.begin;
        return x;
    }
    return x;
}

// Row of q, out and lse.
TQ_DEVICE i64 query_at(const PrefillParams& p, const QueryTile& x, i32 row) {
    i32 r = x.first_row + row;
    return (i64(x.first_token) + r / p.gqa_group) * p.num_kv_heads * p.gqa_group + x.head * p.gqa_group + r % p.gqa_group;
}

// ---- places in a tile ----

TQ_ANYWHERE int tile_place(int rows, int row, int chunk) {  // byte offset; a chunk is 8 elements
    return (chunk / 8 * rows + row) * 128 + ((chunk % 8) ^ (row % 8)) * 16;
}
TQ_ANYWHERE int key_tile_bytes(int d, int tokens) { return (d + 63) / 64 * tokens * 128; }
TQ_ANYWHERE int packed_value_tile_bytes(int d, int tokens) { return (tokens + 63) / 64 * d * 128; }

// ---- queries ----

// Type of the products over the packed prefix: unpacked bf16 rows stay bf16, all else is fp16.
template <class R>
TQ_ANYWHERE bool packed_is_bf16() {
    return R::KEY == BF16;
}

// Writes row `row` (of the CTA) of the query as an A operand into row `to` of a tile of ROWS rows. For
// the packed prefix it is rotated where the keys are, and brought near 2^8 by a power of two, so that
// fp16 holds it. Returns what a score has to be multiplied with to be the product of query and key.
template <class R, int IO, int ROWS, bool PACKED>
TQ_DEVICE float stage_query(const PrefillParams& p, const QueryTile& x, i32 row, u32 tile, int to, int lane) {
    constexpr int D = R::D, N = (D + 31) / 32;
    const u16* q = static_cast<const u16*>(p.q) + query_at(p, x, row) * D;
    u16 raw[N];
#pragma unroll
    for (int i = 0; i < N; i++) raw[i] = row < x.rows && lane + 32 * i < D ? q[lane + 32 * i] : u16(0);
    float scale = 1.0f;
    if constexpr (PACKED && !(packed_is_bf16<R>() && IO == BF16)) {
        float v[N], top = 0.0f;
#pragma unroll
        for (int i = 0; i < N; i++) v[i] = IO == BF16 ? bf16_to_f32(raw[i]) : f16_to_f32(raw[i]);
        if constexpr (is_lloyd(R::KEY)) rotate_row<D>(v, lane);
#pragma unroll
        for (int i = 0; i < N; i++) top = fmaxf(top, fabsf(v[i]));
        top = warp_max(top);
        u32 exponent = __float_as_uint(top) >> 23;
        if (exponent >= 40 && exponent <= 230) {
            float up = __uint_as_float((127 + 135 - exponent) << 23);
            scale = __uint_as_float((127 + exponent - 135) << 23);
#pragma unroll
            for (int i = 0; i < N; i++) v[i] *= up;
        }
#pragma unroll
        for (int i = 0; i < N; i++) raw[i] = f32_to_f16(v[i]);
    }
#pragma unroll
    for (int i = 0; i < N; i++) {
        int d = lane + 32 * i;
        if (d < D) store_shared(tile + tile_place(ROWS, to, d / 8) + d % 8 * 2, raw[i]);
    }
    return scale;
}

// ---- raw keys and values ----

// Rows first .. first + TOKENS - 1 of a [tokens, stride] array into a tile; rows from `count` on are zero.
// A thread keeps to one chunk and takes every STEP-th row, so that its addresses advance by constants.
template <int D, int TOKENS, int THREADS>
TQ_DEVICE void copy_rows(u32 tile, const u16* rows, i64 stride, i32 first, i32 count, int thread) {
    constexpr int CHUNKS = D / 8;
    constexpr int STEP = THREADS >= 8 * CHUNKS ? 8 : THREADS >= 4 * CHUNKS ? 4 : THREADS >= 2 * CHUNKS ? 2 : 1;
    static_assert(THREADS >= CHUNKS && TOKENS % STEP == 0, "a row's chunks need a thread each");
    int chunk = thread % CHUNKS, row = thread / CHUNKS;
    if (row >= STEP) return;
    u32 dst = tile + tile_place(TOKENS, row, chunk);
    const u16* src = rows + i64(first + row) * stride + chunk * 8;
    if (first + TOKENS <= count) {
#pragma unroll
        for (int i = 0; i < TOKENS; i += STEP, src += STEP * stride) copy16((dst ^ (i % 8 * 16)) + i * 128, src);
    } else {
#pragma unroll 1
        for (int i = 0; i < TOKENS; i += STEP, src += STEP * stride) {
            bool there = first + row + i < count;
            copy16_or_zero((dst ^ (i % 8 * 16)) + i * 128, there ? src : rows, there);
        }
    }
}

// ---- packed keys and values: one warp a unit, read from shared or device memory ----


// Keys of a unit into rows first .. first + 15 of a key tile. Lloyd-Max codes go in bare, exact in fp16; a
// score has to be multiplied with its token's norm, of which norms[first ..] gets 16. `fields` is where
// the unit's fields begin.
template <class R, int TOKENS>
TQ_DEVICE void unpack_keys(u32 tile, float* norms, const u8* keys, const u8* fields, int first, const u32 (&book)[2], int lane) {
    int g = lane / 4, t = lane % 4;
    int row[2] = {first + g, first + 8 + g};
    if constexpr (is_lloyd(R::KEY)) {
        u32 upper = 0x64646464u;
        opaque(upper);  // in a register, so that the selector is the instruction's constant
        // int8 v stands for v + 1/2: 1024 + 128 + v as its bits, less 1152, plus 1/2
        auto two = [&](u32 codes, u32 selector) {
            return add_f16x2(add_f16x2(byte_permute(codes ^ 0x80808080u, upper, selector), 0xe480e480u), 0x38003800u);
        };
        for_each_key_step<R>(keys, book, lane, [&](int step, u32 x0, u32 x1, u32 y0, u32 y1) {
            auto put = [&](int row, u32 a, u32 b) {
                if (32 * step + 32 <= R::D)
                    store_shared(tile + tile_place(TOKENS, row, 4 * step + t), two(a, 0x4140u), two(a, 0x4342u), two(b, 0x4140u), two(b, 0x4342u));
                else  // 16 dims, four a lane
                    store_shared(tile + tile_place(TOKENS, row, 4 * step + t / 2) + t % 2 * 8, two(a, 0x4140u), two(a, 0x4342u));
            };
            put(row[0], x0, x1), put(row[1], y0, y1);
        });
        if (lane < UNIT)
            norms[first + lane] = low_norm(reinterpret_cast<const u16*>(fields)[field_place(lane)]) * (NORM_UNIT * 2.0f / R::NORM_GAIN);
    } else {
        for_each_key_step<R>(keys, book, lane, [&](int step, u32 x0, u32 x1, u32 y0, u32 y1) {
            store_shared(tile + tile_place(TOKENS, row[0], 2 * step + t / 2) + t % 2 * 8, x0, x1);
            store_shared(tile + tile_place(TOKENS, row[1], 2 * step + t / 2) + t % 2 * 8, y0, y1);
        });
    }
}

// An integer code times `weight` (a power of two) as the code in fp16.
template <int WEIGHT>
TQ_DEVICE u32 code_f16x2(u32 masked) {
    constexpr u32 ONE_OVER = WEIGHT == 1 ? 0x3c00 : WEIGHT == 8 ? 0x3000 : WEIGHT == 16 ? 0x2c00 : WEIGHT == 32 ? 0x2800 : 0x2400;
    constexpr u32 OFFSET = 0x8000 | (0x6400 - (0x3c00 - ONE_OVER));  // -1024 / WEIGHT
    return fma_f16x2(masked | 0x64006400u, ONE_OVER * 0x10001u, OFFSET * 0x10001u);
}

// The scales of two tokens, made smaller where the largest code would not be a finite fp16.
template <int VALUE>
TQ_DEVICE u32 bounded_scale(u32 scale, u32 low) {
    constexpr u32 TOP = VALUE == UNIFORM4 ? 0x4b80u : 0x4700u;  // 15, 7
    u32 top = fma_f16x2(scale, TOP * 0x10001u, low);
    auto infinite = [](u32 h) { return (h & 0x7fffu) == 0x7c00u; };
    auto bound = [](u32 scale, u32 low) {
        float most = (65504.0f - f16_to_f32(u16(low))) * (VALUE == UNIFORM4 ? 1.0f / 15.0f : 1.0f / 7.0f) * (1.0f - 1.0f / 1024.0f);
        return u32(f32_to_f16(fminf(f16_to_f32(u16(scale)), most)));
    };
    if (infinite(top)) scale = (scale & 0xffff0000u) | bound(scale, low);
    if (infinite(top >> 16)) scale = (scale & 0xffffu) | bound(scale >> 16, low >> 16) << 16;
    return scale;
}

// Values of a unit into columns first .. first + 15 of a packed value tile. Tokens from `valid` on are zero.
template <class R>
TQ_DEVICE void unpack_values(u32 tile, const u8* values, const u8* fields, int first, int valid, int lane) {
    constexpr int D = R::D;
    int g = lane / 4, t = lane % 4;
    u32 keep[2];  // of tokens 2t, 2t+1 and 8+2t, 9+2t
#pragma unroll
    for (int k = 0; k < 2; k++)
        keep[k] = (8 * k + 2 * t < valid ? 0x0000ffffu : 0u) | (8 * k + 2 * t + 1 < valid ? 0xffff0000u : 0u);
    Words2 scale = {}, low = {};
    if constexpr (is_uniform(R::VALUE)) {
        fields += R::SCALE_FIELD * 32 + t * 8;
        scale = *reinterpret_cast<const Words2*>(fields);
        low = *reinterpret_cast<const Words2*>(fields + 32);
#pragma unroll
        for (int k = 0; k < 2; k++) {
            scale.w[k] &= keep[k], low.w[k] &= keep[k];
            scale.w[k] = bounded_scale<R::VALUE>(scale.w[k], low.w[k]);
        }
    }
    u32 at[2];
#pragma unroll
    for (int k = 0; k < 2; k++) at[k] = tile + tile_place(D, g, first / 8 + k) + t * 4;
    for_each_value_block<R>(values, lane, [&](int i, u32 a0, u32 a1, u32 a2, u32 a3) {
        u32 a[4] = {a0, a1, a2, a3};
        unrolled<4>([&](auto k) {
            constexpr int K = decltype(k)::value, LATE = K / 2, UPPER = K % 2;
            u32 w = a[K];
            if constexpr (is_uniform(R::VALUE)) {
                // which weight is known where `i` is: always after unrolling
                int weight = code_weight<R::VALUE>(i, UPPER);
                u32 code = weight == 1    ? code_f16x2<1>(w)
                           : weight == 8  ? code_f16x2<8>(w)
                           : weight == 16 ? code_f16x2<16>(w)
                           : weight == 32 ? code_f16x2<32>(w)
                                          : code_f16x2<64>(w);
                w = fma_f16x2(code, scale.w[LATE], low.w[LATE]);
            } else {
                w &= keep[LATE];
            }
            store_shared(at[LATE] + (16 * i + 8 * UPPER) * 128, w);
        });
    });
}

}  // namespace tq
