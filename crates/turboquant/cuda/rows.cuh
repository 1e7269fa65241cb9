// From a unit's packed words to tensor-core operands. Each lane reads its own words only.
#pragma once
#include "layout.cuh"

namespace tq {

// Words 4 * Q .. of a lane (4, or what is left) from a section of WORDS words a lane.
template <int WORDS, int Q>
TQ_DEVICE void load_words(u32 (&w)[4], const u8* section, int lane) {
    constexpr int FIRST = 4 * Q, REST = WORDS - FIRST;
    if constexpr (REST >= 4) {
        Words4 v = *reinterpret_cast<const Words4*>(section + word_offset(WORDS, FIRST, lane));
#pragma unroll
        for (int i = 0; i < 4; i++) w[i] = v.w[i];
    } else {
        if constexpr (REST >= 2) {
            Words2 v = *reinterpret_cast<const Words2*>(section + word_offset(WORDS, FIRST, lane));
            w[0] = v.w[0], w[1] = v.w[1];
        }
        if constexpr (REST & 1)
            w[REST - 1] = *reinterpret_cast<const u32*>(section + word_offset(WORDS, WORDS - 1, lane));
    }
}

// ---- keys: B operands, column = token of the tile ----
//
// Lloyd-Max keys become int8 for m16n8k32; step s covers dims 32 s .. 32 s + 31, and lane (g, t)
// brings dims 32 s + 8 t + 0..3 (b0) and 4..7 (b1). A last half step of 16 dims (head_dim 80) brings
// dims 32 s + 4 t + 0..3 and b1 = 0. All other keys become 16-bit floats for m16n8k16; step s covers
// dims 16 s .. 16 s + 15, lane (g, t) brings dims 16 s + 4 t + {0, 1} (b0) and {2, 3} (b1).

template <class R>
TQ_ANYWHERE int key_steps() {
    return is_lloyd(R::KEY) ? (R::D + 31) / 32 : R::D / 16;
}

// An integer code v stands for v + 1/2, so that ~v is its negative.

// Eight sign-magnitude codes: b0 = codes 0-3, b1 = codes 4-7.
TQ_DEVICE void lookup_sign_magnitude(const u32 (&book)[2], u32 w, u32& b0, u32& b1) {
    u32 magnitude = w & 0x77777777u;
    b0 = byte_permute(book[0], book[1], magnitude) ^ byte_permute(w, w, 0xba98u);  // signs spread over bytes
    u32 up = w << 4;
    b1 = byte_permute(book[0], book[1], magnitude >> 16) ^ byte_permute(up, up, 0xba98u);
}

// The last half step of 16 dims: four codes of tile 0 in the lower half of the word, of tile 1 in the upper,
// each a nibble of sign and magnitude.
TQ_DEVICE void lookup_half_step(const u32 (&book)[2], u32 w, u32& tile0, u32& tile1) {
    u32 magnitude = w & 0x77777777u, up = w << 4;  // every second sign is a byte's top bit in w, the others in up
    tile0 = byte_permute(book[0], book[1], magnitude) ^ byte_permute(up, w, 0xd9c8u);
    tile1 = byte_permute(book[0], book[1], magnitude >> 16) ^ byte_permute(up, w, 0xfbeau);
}

// Calls use(step, tile 0's b0, b1, tile 1's b0, b1) for every step.
template <class R, class F>
TQ_DEVICE void for_each_key_step(const u8* keys, const u32 (&book)[2], int lane, F&& use) {
    constexpr int WORDS = R::KEY_WORDS;
    if constexpr (R::KEY == LLOYD4) {
        unrolled<(WORDS + 3) / 4>([&](auto q) {
            constexpr int Q = decltype(q)::value;
            u32 w[4];
            load_words<WORDS, Q>(w, keys, lane);
            auto full = [&](int step, u32 tile0, u32 tile1) {
                u32 x0, x1, y0, y1;
                lookup_sign_magnitude(book, tile0, x0, x1);
                lookup_sign_magnitude(book, tile1, y0, y1);
                use(step, x0, x1, y0, y1);
            };
            if constexpr (4 * Q + 2 <= WORDS) full(2 * Q, w[0], w[1]);
            if constexpr (4 * Q + 4 <= WORDS) full(2 * Q + 1, w[2], w[3]);
            if constexpr (WORDS % 2 && 4 * Q + 4 > WORDS) {
                u32 x, y;
                lookup_half_step(book, w[WORDS - 1 - 4 * Q], x, y);
                use((WORDS - 1) / 2, x, 0u, y, 0u);
            }
        });
    } else if constexpr (R::KEY == LLOYD3) {
        // 64 dims: two words of 2-bit parts and one of top bits, tile 0 | tile 1 << 16 in each.
        u32 w[WORDS];
        unrolled<(WORDS + 3) / 4>([&](auto q) {
            constexpr int Q = decltype(q)::value;
            u32 part[4];
            load_words<WORDS, Q>(part, keys, lane);
#pragma unroll
            for (int i = 0; i < 4; i++)
                if (4 * Q + i < WORDS) w[4 * Q + i] = part[i];
        });
#pragma unroll
        for (int block = 0; block < R::D / 64; block++) {
            u32 p0 = w[3 * block], p1 = w[3 * block + 1], top = w[3 * block + 2];
            u32 a = (p0 & 0x33333333u) | ((top << 2) & 0x44444444u);
            u32 b = ((p0 >> 2) & 0x33333333u) | ((top << 1) & 0x44444444u);
            u32 c = (p1 & 0x33333333u) | (top & 0x44444444u);
            u32 d = ((p1 >> 2) & 0x33333333u) | ((top >> 1) & 0x44444444u);
            auto look = [&](u32 s) { return byte_permute(book[0], book[1], s); };
            use(2 * block, look(a), look(b), look(a >> 16), look(b >> 16));
            use(2 * block + 1, look(c), look(d), look(c >> 16), look(d >> 16));
        }
    } else if constexpr (R::KEY == FP8) {
        unrolled<(WORDS + 3) / 4>([&](auto q) {
            constexpr int Q = decltype(q)::value;
            u32 w[4];
            load_words<WORDS, Q>(w, keys, lane);
            auto step = [&](int s, u32 tile0, u32 tile1) {
                use(s, e4m3x2_to_f16x2(tile0 & 0xffff), e4m3x2_to_f16x2(tile0 >> 16), e4m3x2_to_f16x2(tile1 & 0xffff),
                    e4m3x2_to_f16x2(tile1 >> 16));
            };
            step(2 * Q, w[0], w[1]);
            if constexpr (4 * Q + 4 <= WORDS) step(2 * Q + 1, w[2], w[3]);
        });
    } else {
        unrolled<WORDS / 4>([&](auto q) {
            u32 w[4];
            load_words<WORDS, decltype(q)::value>(w, keys, lane);
            use(decltype(q)::value, w[0], w[1], w[2], w[3]);
        });
    }
}

// ---- values: A operands, row = dim. Block i covers dims 16 i .. 16 i + 15 ----
//
// a0, a1: dims 16 i + g, 16 i + 8 + g of tokens 2t, 2t+1; a2, a3: the same of tokens 8+2t, 9+2t.
// Uniform codes are used as they are masked out: an integer below 2^10 is a subnormal fp16 of value
// code * weight * 2^-24, which tensor cores multiply exactly.

constexpr float SUBNORMAL = 5.9604644775390625e-8f;  // 2^-24

// The code taken off before the sum: about the middle.
template <int VALUE>
TQ_ANYWHERE int code_center() {
    return VALUE == UNIFORM3 ? 4 : 8;
}
// Weight of the masked code of rows g (half 0) and 8 + g (half 1) of block i.
template <int VALUE>
TQ_ANYWHERE int code_weight(int i, int half) {
    if (VALUE == UNIFORM4) return half ? 16 : 1;
    if (VALUE == UNIFORM3) {
        constexpr int W[8] = {1, 8, 64, 1, 8, 1, 8, 32};
        return W[i % 4 * 2 + half];
    }
    return 1;
}

// Calls use(block, a0, a1, a2, a3) for every block.
template <class R, class F>
TQ_DEVICE void for_each_value_block(const u8* values, int lane, F&& use) {
    constexpr int WORDS = R::VALUE_WORDS;
    if constexpr (R::VALUE == UNIFORM4) {
        // 32 dims: word 2q low pair, word 2q + 1 high pair; 4 nibbles a half: dims g, 8+g, 16+g, 24+g.
        unrolled<(WORDS + 3) / 4>([&](auto q) {
            constexpr int Q = decltype(q)::value;
            u32 w[4];
            load_words<WORDS, Q>(w, values, lane);
            auto two = [&](int i, u32 low, u32 high) {
                use(i, low & 0x000f000fu, low & 0x00f000f0u, high & 0x000f000fu, high & 0x00f000f0u);
                low >>= 8, high >>= 8;
                use(i + 1, low & 0x000f000fu, low & 0x00f000f0u, high & 0x000f000fu, high & 0x00f000f0u);
            };
            if constexpr (4 * Q + 2 <= WORDS) two(4 * Q, w[0], w[1]);
            if constexpr (4 * Q + 4 <= WORDS) two(4 * Q + 2, w[2], w[3]);
            if constexpr (WORDS % 2 && 4 * Q + 4 > WORDS) {  // last 16 dims: low byte low pair, high byte high pair
                u32 x = w[WORDS - 1 - 4 * Q], y = x >> 8;
                use(WORDS - 1, x & 0x000f000fu, x & 0x00f000f0u, y & 0x000f000fu, y & 0x00f000f0u);
            }
        });
    } else if constexpr (R::VALUE == UNIFORM3) {
        // 64 dims: 8 codes of 3 bits a token and lane, dims 8 c + g. Words: x of the low pair, x of the
        // high pair (codes 0-4 and the low bit of code 7), y (a byte each: codes 5, 6, top of code 7).
        u32 w[WORDS];
        unrolled<(WORDS + 3) / 4>([&](auto q) {
            constexpr int Q = decltype(q)::value;
            u32 part[4];
            load_words<WORDS, Q>(part, values, lane);
#pragma unroll
            for (int i = 0; i < 4; i++)
                if (4 * Q + i < WORDS) w[4 * Q + i] = part[i];
        });
#pragma unroll
        for (int block = 0; block < R::D / 64; block++) {
            u32 xl = w[3 * block], xh = w[3 * block + 1], yl = w[3 * block + 2], yh = yl >> 8;
            u32 ul = xl >> 9, uh = xh >> 9;
            use(4 * block, xl & 0x00070007u, xl & 0x00380038u, xh & 0x00070007u, xh & 0x00380038u);
            use(4 * block + 1, xl & 0x01c001c0u, ul & 0x00070007u, xh & 0x01c001c0u, uh & 0x00070007u);
            use(4 * block + 2, ul & 0x00380038u, yl & 0x00070007u, uh & 0x00380038u, yh & 0x00070007u);
            use(4 * block + 3, yl & 0x00380038u, (yl & 0x00c000c0u) | ((xl >> 10) & 0x00200020u), yh & 0x00380038u,
                (yh & 0x00c000c0u) | ((xh >> 10) & 0x00200020u));
        }
    } else if constexpr (R::VALUE == FP8) {
        unrolled<(WORDS + 3) / 4>([&](auto q) {
            constexpr int Q = decltype(q)::value;
            u32 w[4];
            load_words<WORDS, Q>(w, values, lane);
            auto one = [&](int i, u32 low, u32 high) {
                use(i, e4m3x2_to_f16x2(low & 0xffff), e4m3x2_to_f16x2(low >> 16), e4m3x2_to_f16x2(high & 0xffff),
                    e4m3x2_to_f16x2(high >> 16));
            };
            one(2 * Q, w[0], w[1]);
            if constexpr (4 * Q + 4 <= WORDS) one(2 * Q + 1, w[2], w[3]);
        });
    } else {
        unrolled<WORDS / 4>([&](auto q) {
            u32 w[4];
            load_words<WORDS, decltype(q)::value>(w, values, lane);
            use(decltype(q)::value, w[0], w[1], w[2], w[3]);
        });
    }
}

// Zeroes this lane's words of the value tokens from `valid` on, so that stale bytes (a NaN in fp8 or
// bf16) cannot reach a sum as 0 * NaN. Uniform codes are finite whatever they are.
template <class R>
TQ_DEVICE void clear_values_from(u8* values, int lane, int valid) {
    if constexpr (!is_uniform(R::VALUE)) {
        int t = lane % 4;
#pragma unroll 1
        for (int word = 0; word < R::VALUE_WORDS; word++) {
            int high = R::VALUE == FP8 ? word % 2 : word % 4 / 2;
            bool first = 8 * high + 2 * t < valid, second = 8 * high + 2 * t + 1 < valid;
            u32 mask = R::VALUE == FP8 ? (first ? 0x00ff00ffu : 0u) | (second ? 0xff00ff00u : 0u)
                                       : (first ? 0x0000ffffu : 0u) | (second ? 0xffff0000u : 0u);
            u32* p = reinterpret_cast<u32*>(values + word_offset(R::VALUE_WORDS, word, lane));
            *p &= mask;
        }
    }
}

}  // namespace tq
