// Raw keys and values of new tokens to packed pages: one warp a (token, KV head). The arithmetic and the
// order of sums are those of the crate's scalar rows, so the codes are theirs too.
#pragma once
#include "params.cuh"
#include "layout.cuh"
#include "rotate.cuh"

namespace tq {

// IO: dtype of key and value.
template <class Row_, int IO_>
struct Store {
    using R = Row_;
    static constexpr int IO = IO_, D = R::D, N = (D + 31) / 32;
    static_assert(R::KEY > F16 || R::KEY == IO, "an unpacked key keeps its dtype");
    static_assert(R::VALUE > F16 || R::VALUE == IO, "an unpacked value keeps its dtype");

    const StoreParams& p;
    int lane, g, t, tile, half;  // place of the token in its unit: key lanes 4 g .. 4 g + 3 of `tile`, value pair t
    u8 *keys, *values;
    u16* fields;

    TQ_DEVICE explicit Store(const StoreParams& params) : p(params) { lane = threadIdx.x % 32; }

    TQ_DEVICE static float widen(u16 raw) { return IO == BF16 ? bf16_to_f32(raw) : f16_to_f32(raw); }
    TQ_DEVICE static bool finite(float x) { return (__float_as_uint(x) & 0x7f800000u) != 0x7f800000u; }
    TQ_DEVICE static u32 or_lanes(u32 x, int from, int to) {  // over lanes that differ in bits from .. to
        for (int bit = from; bit <= to; bit *= 2) x |= __shfl_xor_sync(TQ_FULL_WARP, x, bit);
        return x;
    }
    // 8 partial sums (element i in sum i % 8), then a fixed tree; no fused multiply-add.
    TQ_DEVICE float sum_squares(const float (&x)[N]) {
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < N; i++) {
            float square = __fmul_rn(x[i], x[i]);
#pragma unroll
            for (int k = 0; k < 4; k++)
                if (32 * i + 8 * k < D) sum = __fadd_rn(sum, shuffle(square, lane % 8 + 8 * k));
        }
        sum = __fadd_rn(sum, shuffle_xor(sum, 4));
        sum = __fadd_rn(sum, shuffle_xor(sum, 2));
        return __fadd_rn(sum, shuffle_xor(sum, 1));
    }
    TQ_DEVICE static u32 e4m3(float x) {
        u32 sign = __float_as_uint(x) >> 24 & 0x80u;
        float magnitude = fabsf(x);
        if (magnitude != magnitude) return 0x7f;
        if (magnitude < 0.015625f) return sign | (__float_as_uint(__fadd_rn(magnitude, 16384.0f)) - __float_as_uint(16384.0f));
        u32 bits = __float_as_uint(fminf(magnitude, 448.0f));
        return sign | (((bits + 0x7ffffu + (bits >> 20 & 1)) >> 20) - (120u << 3));
    }
    TQ_DEVICE static u16 saturated_f16(float x) {
        u16 h = f32_to_f16(x);
        return (h & 0x7fff) == 0x7c00 && finite(x) ? u16((h & 0x8000) | 0x7bff) : h;
    }
    // What codes are chosen against: x, or the limit that its fp16 form hit.
    TQ_DEVICE static float in_reach(float x, u16 stored) {
        return fabsf(x) >= 65520.0f ? f16_to_f32(stored) : x;
    }
    // norm16 * NORM_GAIN / length as 5 exponent and 11 mantissa bits, nearest even, saturating.
    TQ_DEVICE static u16 folded_norm(u16 norm16, float length) {
        float x = __fdiv_rn(__fmul_rn(f16_to_f32(norm16), R::NORM_GAIN), length);
        float tiny = __fmul_rn(x, 1.0f / NORM_UNIT);  // exponent bias 127 to 15; subnormals fall into place
        u32 bits = __float_as_uint(tiny);
        bits = (bits + 0x7ffu + (bits >> 12 & 1)) >> 12;
        return u16(bits > 0xffffu ? 0xffffu : bits);
    }

    TQ_DEVICE void put_key(const u16 (&raw)[N]) {
        constexpr int WORDS = R::KEY_WORDS;
        if constexpr (is_lloyd(R::KEY)) {
            constexpr int BITS = R::KEY == LLOYD4 ? 4 : 3;
            float x[N];
            bool bad = false;
#pragma unroll
            for (int i = 0; i < N; i++) x[i] = widen(raw[i]), bad |= !finite(x[i]);
            bad = any_lane(bad);
            float norm = __fsqrt_rn(sum_squares(x)), back = 1.0f;
            if (!finite(norm) && !bad) {  // the squares overflow
                back = 8.271806125530277e-25f;  // 2^-80
#pragma unroll
                for (int i = 0; i < N; i++) x[i] *= back;
                norm = __fsqrt_rn(sum_squares(x));
            }
            float divisor = __fadd_rn(norm, 1e-8f);
#pragma unroll
            for (int i = 0; i < N; i++) x[i] = __fdiv_rn(x[i], divisor);
            rotate_row<D>(x, lane);
            u32 code[N];
            i32 square = 0;
#pragma unroll
            for (int i = 0; i < N; i++) {
                code[i] = 0;
#pragma unroll
                for (int m = 0; m < (1 << BITS) - 1; m++) code[i] += x[i] >= p.midpoints[m];
                if (bad) code[i] = 0;
                i32 v = R::KEY == LLOYD4 ? i32(p.codebook[(code[i] >= 8 ? code[i] - 8 : 7 - code[i]) / 4] >> ((code[i] >= 8 ? code[i] - 8 : 7 - code[i]) % 4 * 8) & 0xff)
                                         : i32(i32(p.codebook[code[i] / 4] << (24 - code[i] % 4 * 8)) >> 24);
                square += lane + 32 * i < D ? (2 * v + 1) * (2 * v + 1) : 0;
            }
#pragma unroll
            for (int bit = 16; bit; bit /= 2) square += __shfl_xor_sync(TQ_FULL_WARP, square, bit);
            if (lane == 0) fields[0] = bad ? u16(0xffff) : folded_norm(f32_to_f16(fminf(__fdiv_rn(norm, back), 65504.0f)), __fsqrt_rn(float(square)));
            int e = lane % 8, column = 4 * g + lane / 8;
            if constexpr (R::KEY == LLOYD4) {
#pragma unroll
                for (int i = 0; i < N; i++) {
                    u32 magnitude = code[i] >= 8 ? code[i] - 8 : 7 - code[i], sign = code[i] >= 8 ? 0u : 1u;
                    if (32 * i + 32 > D) {  // the last 16 dims: half a word a token
                        u32 w = or_lanes((magnitude | sign << 3) << 4 * (lane % 4), 1, 2);
                        if (lane < 16 && lane % 4 == 0)
                            *reinterpret_cast<u16*>(keys + word_offset(WORDS, WORDS - 1, 4 * g + lane / 4) + 2 * tile) = u16(w);
                        continue;
                    }
                    u32 w = or_lanes(magnitude << 4 * e | sign << (e < 4 ? 8 * e + 7 : 8 * (e - 4) + 3), 1, 4);
                    if (e == 0) *reinterpret_cast<u32*>(keys + word_offset(WORDS, 2 * i + tile, column)) = w;
                }
            } else {
#pragma unroll
                for (int block = 0; block < N / 2; block++) {
                    u32 top = 0;
#pragma unroll
                    for (int step = 0; step < 2; step++) {
                        u32 c = code[2 * block + step];
                        u32 low = or_lanes((c & 3) << (e % 4 * 4 + e / 4 * 2), 1, 4);
                        top |= (c >> 2) << (e % 4 * 4 + step * 2 + e / 4);
                        if (e == 0) *reinterpret_cast<u16*>(keys + word_offset(WORDS, 3 * block + step, column) + 2 * tile) = u16(low);
                    }
                    top = or_lanes(top, 1, 4);
                    if (e == 0) *reinterpret_cast<u16*>(keys + word_offset(WORDS, 3 * block + 2, column) + 2 * tile) = u16(top);
                }
            }
        } else if constexpr (R::KEY == FP8) {
#pragma unroll
            for (int i = 0; i < N; i++) {
                int d = lane + 32 * i;
                u32 w = or_lanes(e4m3(widen(raw[i])) << 8 * (lane % 4), 1, 2);
                if (d < D && lane % 4 == 0)
                    *reinterpret_cast<u32*>(keys + word_offset(WORDS, d / 16 * 2 + tile, 4 * g + d % 16 / 4)) = w;
            }
        } else {
#pragma unroll
            for (int i = 0; i < N; i++) {
                int d = lane + 32 * i;
                u32 w = or_lanes(u32(raw[i]) << 16 * (lane % 2), 1, 1);
                if (d < D && lane % 2 == 0)
                    *reinterpret_cast<u32*>(keys + word_offset(WORDS, d / 16 * 4 + tile * 2 + d % 4 / 2, 4 * g + d % 16 / 4)) = w;
            }
        }
    }

    TQ_DEVICE void put_value(const u16 (&raw)[N]) {
        constexpr int WORDS = R::VALUE_WORDS;
        int high = tile, column = 4 * (lane % 8) + t;
        if constexpr (is_uniform(R::VALUE)) {
            constexpr int BITS = R::VALUE == UNIFORM4 ? 4 : 3;
            constexpr float LEVELS = (1 << BITS) - 1;
            float x[N];
            bool bad = false;
            float low = __int_as_float(0x7f800000), top = -low;
#pragma unroll
            for (int i = 0; i < N; i++) {
                x[i] = widen(raw[i]);
                if (lane + 32 * i < D) bad |= !finite(x[i]), low = fminf(low, x[i]), top = fmaxf(top, x[i]);
            }
            bad = any_lane(bad);
            low = __fadd_rn(-warp_max(-low), 0.0f), top = warp_max(top);  // -0 to +0
            u16 low16 = saturated_f16(low);
            low = in_reach(low, low16);
            float scale = fmaxf(__fdiv_rn(__fsub_rn(top, low), LEVELS), 1e-8f);
            u16 scale16 = saturated_f16(scale);
            scale = in_reach(scale, scale16);
            if (lane == 0) {
                fields[16 * R::SCALE_FIELD] = bad ? u16(0x7e00) : scale16;
                fields[16 * R::SCALE_FIELD + 16] = bad ? u16(0x7e00) : low16;
            }
            u32 code[N];
#pragma unroll
            for (int i = 0; i < N; i++) {
                float u = __fadd_rn(__fdiv_rn(__fsub_rn(x[i], low), scale), 0.5f);
                code[i] = bad || lane + 32 * i >= D ? 0 : u32(fminf(fmaxf(u, 0.0f), LEVELS));
            }
            if constexpr (R::VALUE == UNIFORM4) {
#pragma unroll
                for (int i = 0; i < N; i++) {
                    if (32 * i + 32 <= D) {
                        u32 w = or_lanes(code[i] << 4 * (lane / 8), 8, 16);
                        if (lane < 8) *reinterpret_cast<u16*>(values + word_offset(WORDS, 2 * i + high, column) + 2 * half) = u16(w);
                    } else {  // the last 16 dims: a byte a token
                        u32 w = or_lanes(code[i] << 4 * (lane / 8 % 2), 8, 8);
                        if (lane < 8) values[word_offset(WORDS, WORDS - 1, column) + 2 * half + high] = u8(w);
                    }
                }
            } else {
#pragma unroll
                for (int block = 0; block < N / 2; block++) {
                    u32 x = 0, y = 0;
#pragma unroll
                    for (int k = 0; k < 2; k++) {
                        int c = 4 * k + lane / 8;
                        u32 v = code[2 * block + k];
                        if (c < 3) x |= v << 3 * c;
                        else if (c < 5) x |= v << (9 + 3 * (c - 3));
                        else if (c < 7) y |= v << 3 * (c - 5);
                        else x |= (v & 1) << 15, y |= (v >> 1) << 6;
                    }
                    x = or_lanes(x, 8, 16), y = or_lanes(y, 8, 16);
                    if (lane < 8) {
                        *reinterpret_cast<u16*>(values + word_offset(WORDS, 3 * block + high, column) + 2 * half) = u16(x);
                        values[word_offset(WORDS, 3 * block + 2, column) + 2 * half + high] = u8(y);
                    }
                }
            }
        } else {
#pragma unroll
            for (int i = 0; i < N; i++) {
                int d = lane + 32 * i, row = d % 16 / 8;
                if (d >= D) continue;
                if constexpr (R::VALUE == FP8)
                    values[word_offset(WORDS, d / 16 * 2 + high, column) + 2 * row + half] = u8(e4m3(widen(raw[i])));
                else
                    *reinterpret_cast<u16*>(values + word_offset(WORDS, d / 16 * 4 + 2 * high + row, column) + 2 * half) = raw[i];
            }
        }
    }

    TQ_DEVICE void run() {
        i64 row = i64(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;
        if (row >= i64(p.num_tokens) * p.num_kv_heads) return;
        i64 token = row / p.num_kv_heads;
        int head = int(row % p.num_kv_heads);
        i64 slot = p.slot_mapping[token];
        if (slot < 0) return;
        i64 page = slot / p.page_size;
        int offset = int(slot % p.page_size), in_unit = offset % UNIT;
        g = in_unit % 8, t = in_unit % 8 / 2, tile = in_unit / 8, half = in_unit % 2;
        keys = p.pages + page * p.page_bytes + i64(offset / UNIT * p.num_kv_heads + head) * R::UNIT_BYTES;
        values = keys + R::UNIT_KEY_BYTES;
        fields = reinterpret_cast<u16*>(keys + R::UNIT_CODE_BYTES) + field_place(in_unit);
        const u16* key = static_cast<const u16*>(p.key) + token * p.key_stride + i64(head) * D;
        const u16* value = static_cast<const u16*>(p.value) + token * p.value_stride + i64(head) * D;
        u16 k[N], v[N];
#pragma unroll
        for (int i = 0; i < N; i++) {
            bool in = lane + 32 * i < D;
            k[i] = in ? key[lane + 32 * i] : u16(0);
            v[i] = in ? value[lane + 32 * i] : u16(0);
        }
        put_key(k);
        put_value(v);
    }
};

}  // namespace tq
