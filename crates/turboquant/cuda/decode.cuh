// Attention of a few query rows over paged, packed rows (decode, speculative verify).
//
// Every CTA takes a run of units (runs.cuh). A run may end inside a head ("segment"): its part then goes to
// `partials`, to be merged (merge.cuh).
//
// In a CTA every warp takes every NUM_WARPS-th unit of the run through its own ring and keeps its own
// softmax state; warps meet only where a segment ends.
//
//   S = Q K^T: A = 16 query rows, B = 8 tokens. With Lloyd-Max keys the 16 rows are 8 rows in two
//       int8 terms (256 * high + low).
//   O^T = V^T P^T: A = 16 dims, B = 8 query rows. P comes out of S in exactly this operand's order.
//   Uniform values: value = code * scale + low = (code - center) * scale + (low + center * scale), so
//       that the two sums stay small. scale goes into P; one more A operand holds low + center * scale in
//       row 0 and 1 in row 1 (the softmax sum, over P as rounded), another the constant center.
#pragma once
#include "merge.cuh"
#include "params.cuh"
#include "ring.cuh"
#include "rotate.cuh"
#include "rows.cuh"

namespace tq {

constexpr float P_BITS = 8.0f;       // P carries 2^8, so that fp16 holds it down to 2^-32

// IO: dtype of q and out. BLOCKS: blocks of 8 query rows in a CTA. STAGES: units in flight per warp.
// Q_RESIDENT: the query operands stay in registers; else they are read from shared memory at each use.
template <class Row_, int IO_, int BLOCKS_, int NUM_WARPS_, int STAGES_, bool SOFTCAP_, bool Q_RESIDENT_, int TOGETHER_>
struct DecodeConfig {
    using R = Row_;
    static constexpr int IO = IO_, BLOCKS = BLOCKS_, NUM_WARPS = NUM_WARPS_, STAGES = STAGES_;
    static constexpr bool SOFTCAP = SOFTCAP_, Q_RESIDENT = Q_RESIDENT_;
    static constexpr int TOGETHER = TOGETHER_;  // units a warp works on at a time
    static_assert(TOGETHER == 1 || TQ_BULK_COPY, "the ring waits for one group of cp.async at a time");
    static constexpr int D = R::D;
    static constexpr int ROWS = 8 * BLOCKS;
    static constexpr int THREADS = 32 * NUM_WARPS;
    static constexpr int STEPS = key_steps<R>();
    static constexpr int VALUE_BLOCKS = D / 16;
    static constexpr int Q_TILES = is_lloyd(R::KEY) ? BLOCKS : 1;  // A operands of 16 rows
    // Warps merge through the ring stage they read last; blocks of 16 dims at a time, as many as fit.
    static constexpr int STAGE_BYTES = Ring<R, STAGES>::STAGE_BYTES;
    static constexpr bool MERGE_IN_RING = STAGE_BYTES >= ROWS * 64;
    static constexpr int MERGE_BLOCKS = MERGE_IN_RING ? (STAGE_BYTES / (ROWS * 64) < VALUE_BLOCKS ? STAGE_BYTES / (ROWS * 64) : VALUE_BLOCKS) : 2;
    static constexpr int MERGE_DIMS = 16 * MERGE_BLOCKS;

    static constexpr int RING_AT = 0;
    static constexpr int MERGE_AT = NUM_WARPS * Ring<R, STAGES>::BYTES;
    static constexpr int Q_AT = MERGE_AT + (MERGE_IN_RING ? 0 : NUM_WARPS * ROWS * MERGE_DIMS * 4);
    static constexpr int STATE_AT = Q_AT + Q_TILES * STEPS * 512;
    static constexpr int STATE_STRIDE = NUM_WARPS + (NUM_WARPS % 8 == 0 ? 4 : 0);  // so that rows fall on different banks
    static constexpr int TOTAL_AT = STATE_AT + 2 * ROWS * STATE_STRIDE * 4;
    static constexpr int SCALE_AT = TOTAL_AT + ROWS * 8;
    static constexpr int HALF_AT = SCALE_AT + ROWS * 4;
    static constexpr int BARRIERS_AT = HALF_AT + ROWS * 4;
    static constexpr int SPACES_AT = BARRIERS_AT + NUM_WARPS * STAGES * 8;  // u32 [NUM_WARPS] where each merges
    static constexpr int SEGMENTS_AT = (SPACES_AT + NUM_WARPS * 4 + 15) / 16 * 16;  // Segment [SEGMENT_PLACES]
    static constexpr int SUMS_AT = SEGMENTS_AT + SEGMENT_PLACES * int(sizeof(Segment));  // u32 [NUM_WARPS] units of each warp's sequences
    static constexpr int STARTS_AT = SUMS_AT + 2 * NUM_WARPS * 4;  // [THREADS] list index where every n-th sequence starts
    static constexpr int SHARED_BYTES = STARTS_AT + THREADS * 4;
    static_assert(BLOCKS == 1 || BLOCKS == 2, "8 or 16 query rows");
    static constexpr int ROWS_A_WARP = (ROWS + NUM_WARPS - 1) / NUM_WARPS;
};

template <class C>
struct Decode {
    using R = typename C::R;
    const DecodeParams& p;
    u8* smem;
    Runs<C> runs;
    Merge<C> merge;
    int warp, lane, g, t;
    u32 run_end;  // list index
    static constexpr int PLANNER = C::NUM_WARPS - 1;  // the warp that works out where the next segment stands

    TQ_DEVICE Decode(const DecodeParams& params, u8* shared) : p(params), smem(shared), runs{params, shared}, merge{params, shared} {
        warp = __shfl_sync(TQ_FULL_WARP, threadIdx.x / 32, 0);  // so that the compiler sees one value a warp
        lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    }

    // ---- queries ----

    static constexpr int PER_LANE = (C::D + 31) / 32;
    struct RawQueries {
        u16 x[C::ROWS_A_WARP][PER_LANE];
    };
    TQ_DEVICE void load_queries(RawQueries& raw, const Segment& segment) {
        const u16* q = static_cast<const u16*>(p.q);
#pragma unroll
        for (int k = 0; k < C::ROWS_A_WARP; k++) {
            int r = warp + k * C::NUM_WARPS, row = segment.row_block * C::ROWS + r;
            if (r >= segment.rows) break;
            int token = p.q_len == 1 ? 0 : row / p.gqa_group;
            i64 at = ((i64(segment.seq) * p.q_len + token) * p.num_kv_heads + segment.head) * p.gqa_group + row - token * p.gqa_group;
#pragma unroll
            for (int i = 0; i < PER_LANE; i++) {
                int d = lane + 32 * i;
                raw.x[k][i] = d < C::D ? q[at * C::D + d] : u16(0);
            }
        }
    }
    // Rotates (Lloyd-Max keys), scales and rounds the rows of a segment into A operands.
    TQ_DEVICE void stage_queries(const RawQueries& raw, int live) {
        constexpr int N = PER_LANE;
        u8* operands = smem + C::Q_AT;
        float* scales = reinterpret_cast<float*>(smem + C::SCALE_AT);
#pragma unroll
        for (int k = 0; k < C::ROWS_A_WARP; k++) {
            int r = warp + k * C::NUM_WARPS;
            if (r >= C::ROWS) break;
            float x[N] = {}, top = 0.0f;
            if (r < live) {
#pragma unroll
                for (int i = 0; i < N; i++) x[i] = C::IO == BF16 ? bf16_to_f32(raw.x[k][i]) : f16_to_f32(raw.x[k][i]);
                if constexpr (is_lloyd(R::KEY)) rotate_row<C::D>(x, lane);
#pragma unroll
                for (int i = 0; i < N; i++) top = fmaxf(top, fabsf(x[i]));
                top = warp_max(top);
            }
            float scale;  // x = scale * stored
            if constexpr (is_lloyd(R::KEY)) {
                scale = top * (2.0f / (32512.0f * R::NORM_GAIN)) * NORM_UNIT;  // 127 * 256; codes are halves
                float inverse = top > 0.0f ? 32512.0f * fast_reciprocal(top) : 0.0f;
                i32 sum = 0;
#pragma unroll
                for (int i = 0; i < N; i++) {
                    int step = i, e = lane, byte, reg, column;
                    if (32 * i + 32 <= C::D) {
                        column = e / 8, reg = e % 8 / 4 * 2, byte = e % 4;
                    } else {  // half step; its upper half is zero
                        column = e % 16 / 4, reg = e / 16 * 2, byte = e % 4;
                    }
                    i32 v = __float2int_rn(x[i] * inverse);
                    i32 high = (v + 128) >> 8;
                    u8* to = operands + ((r / 8 * C::STEPS + step) * 32 + r % 8 * 4 + column) * 16 + reg * 4 + byte;
                    to[0] = u8(high);
                    to[4] = u8(v - high * 256);
                    sum += v;
                }
#pragma unroll
                for (int bit = 16; bit; bit /= 2) sum += __shfl_xor_sync(TQ_FULL_WARP, sum, bit);
                if (lane == 0) reinterpret_cast<i32*>(smem + C::HALF_AT)[r] = sum >> 1;
            } else {
                // fp16 operands: a power of two brings the largest element near 2^8
                u32 exponent = __float_as_uint(top) >> 23;
                bool plain = R::KEY == BF16 || exponent < 40 || exponent > 230;
                float up = plain ? 1.0f : __uint_as_float((127 + 135 - exponent) << 23);
                scale = plain ? 1.0f : __uint_as_float((127 + exponent - 135) << 23);
#pragma unroll
                for (int i = 0; i < N; i++) {
                    int d = lane + 32 * i;
                    if (d < C::D) {
                        int step = d / 16, column = d % 16 / 4, reg = d % 4 / 2 * 2 + r / 8, half = d % 2;
                        u16* to = reinterpret_cast<u16*>(operands + (step * 32 + r % 8 * 4 + column) * 16 + reg * 4) + half;
                        *to = R::KEY == BF16 ? f32_to_bf16(x[i]) : f32_to_f16(x[i] * up);
                        if (C::BLOCKS == 1) to[2] = 0;
                    }
                }
            }
            if (lane == 0) scales[r] = scale * p.sm_scale * (C::SOFTCAP ? 1.0f / p.softcap : LOG2E);
        }
    }

    // ---- a warp's state of one segment ----

    // P, and so every sum, carries 2^8.
    struct State {
        float o[C::BLOCKS][C::VALUE_BLOCKS][4];  // rows: dims g, 8 + g of the block; columns: query rows 2t, 2t + 1
        float sums[C::BLOCKS][4];   // uniform values; columns as o: row 0 = P * (low + center * scale), row 1 = P
        float center[C::BLOCKS][4]; // uniform values; columns as o: center * P * scale in every row
        float sum[C::BLOCKS];       // other values: this lane's part of the sum of P of query row g
        float top[C::BLOCKS];       // running maximum of query row g (log2), less P_BITS
        u32 gain;                   // fp16 pair, a power of two: brings the value scales to 1 or a little less
        u32 gain_limit;             // fp16 pair: value scales above this ask for another gain
    };
    struct Rows {
        float scale[C::BLOCKS];                // of query row g: stored units to log2 (or softcap argument)
        i32 half_sum[C::BLOCKS];               // half the sum of the integer query
        i32 first;                             // first query row of the block
    };
    static constexpr bool UNIFORM = is_uniform(R::VALUE);

    struct Queries {
        u32 kept[C::Q_RESIDENT ? C::Q_TILES : 1][C::Q_RESIDENT ? C::STEPS : 1][4];
    };
    TQ_DEVICE Words4 staged_query(int tile, int step) {
        return *reinterpret_cast<const Words4*>(smem + C::Q_AT + ((tile * C::STEPS + step) * 32 + lane) * 16);
    }
    TQ_DEVICE Words4 query(const Queries& queries, int tile, int step) {
        if constexpr (C::Q_RESIDENT) {
            const u32(&w)[4] = queries.kept[tile][step];
            return {{w[0], w[1], w[2], w[3]}};
        } else {
            return staged_query(tile, step);
        }
    }

    // Moves the running maxima to this unit's, and the gain to its value scales; rarely taken.
    TQ_DEVICE void rescale(State& s, const float (&tops)[C::BLOCKS], u32 scale_top) {
        float step = 1.0f;
        if constexpr (UNIFORM) {
            float top = fmaxf(f16_to_f32(u16(scale_top)), f16_to_f32(u16(scale_top >> 16)));
            top = fmaxf(top, shuffle_xor(top, 1));
            top = fmaxf(top, shuffle_xor(top, 2));
            bool fresh = s.gain == 0;
            if (fresh || top > f16_to_f32(u16(s.gain_limit))) {
                i32 exponent = i32(__float_as_uint(top) >> 23) - 126;  // top < 2^exponent
                exponent = exponent < -15 ? -15 : exponent;
                float gain = __uint_as_float((127 - exponent) << 23);
                step = fresh ? 0.0f : gain * inverse_of_power(f16_to_f32(u16(s.gain)));
                s.gain = pack_f16(gain, gain);
                s.gain_limit = pack_f16(2.0f * inverse_of_power(gain), 2.0f * inverse_of_power(gain));
            }
        }
#pragma unroll
        for (int b = 0; b < C::BLOCKS; b++) {
            float top = tops[b];
            top = fmaxf(top, shuffle_xor(top, 1));
            top = fmaxf(top, shuffle_xor(top, 2));
            top = fmaxf(top - P_BITS, s.top[b]);
            float keep = fast_exp2(s.top[b] - top);
            s.top[b] = top;
            float keep0 = shuffle(keep, 8 * t), keep1 = shuffle(keep, 8 * t + 4);
            if constexpr (UNIFORM) {
                s.sums[b][0] *= keep0, s.sums[b][1] *= keep1;
                keep0 *= step, keep1 *= step;
                s.center[b][0] *= keep0, s.center[b][1] *= keep1;
            } else {
                s.sum[b] *= keep;
            }
#pragma unroll
            for (int i = 0; i < C::VALUE_BLOCKS; i++) {
                s.o[b][i][0] *= keep0, s.o[b][i][1] *= keep1;
                s.o[b][i][2] *= keep0, s.o[b][i][3] *= keep1;
            }
        }
    }

    // Units that a warp works on together, so that one's latencies hide the other's.
    struct Unit {
        u8* at;
        i32 token;  // its first; tokens of this lane: 2t, 2t+1, 8+2t, 9+2t after it
    };
    struct Scores {
        float x[C::BLOCKS][4];  // log2
        Words2 scale, low;      // of the values, uniform only
    };

    TQ_DEVICE void score(Scores& out, const Rows& rows, const Queries& queries, const Unit& unit) {
        const u8* fields = unit.at + R::UNIT_CODE_BYTES + t * 8;
        if constexpr (UNIFORM) {
            out.scale = *reinterpret_cast<const Words2*>(fields + R::SCALE_FIELD * 32);
            out.low = *reinterpret_cast<const Words2*>(fields + R::SCALE_FIELD * 32 + 32);
        }
        if constexpr (is_lloyd(R::KEY)) {
            i32 dot[C::BLOCKS][2][4];
#pragma unroll
            for (int b = 0; b < C::BLOCKS; b++) {
#pragma unroll
                for (int tile = 0; tile < 2; tile++) {
                    dot[b][tile][0] = dot[b][tile][1] = 0;
                    dot[b][tile][2] = dot[b][tile][3] = rows.half_sum[b];
                }
            }
            for_each_key_step<R>(unit.at, p.codebook, lane, [&](int step, u32 x0, u32 x1, u32 y0, u32 y1) {
#pragma unroll
                for (int b = 0; b < C::BLOCKS; b++) {
                    Words4 q = query(queries, b, step);
                    mma_s8(dot[b][0], q.w[0], q.w[1], q.w[2], q.w[3], x0, x1);
                    mma_s8(dot[b][1], q.w[0], q.w[1], q.w[2], q.w[3], y0, y1);
                }
            });
            Words2 n = *reinterpret_cast<const Words2*>(fields);
            float norm[4] = {low_norm(n.w[0]), high_norm(n.w[0]), low_norm(n.w[1]), high_norm(n.w[1])};
#pragma unroll
            for (int b = 0; b < C::BLOCKS; b++) {
#pragma unroll
                for (int k = 0; k < 4; k++)
                    out.x[b][k] = float(dot[b][k / 2][k % 2] * 256 + dot[b][k / 2][2 + k % 2]) * norm[k] * rows.scale[b];
            }
        } else {
            float dot[2][4] = {};
            for_each_key_step<R>(unit.at, p.codebook, lane, [&](int step, u32 x0, u32 x1, u32 y0, u32 y1) {
                Words4 q = query(queries, 0, step);
                if constexpr (R::KEY == BF16) {
                    mma_bf16(dot[0], q.w[0], q.w[1], q.w[2], q.w[3], x0, x1);
                    mma_bf16(dot[1], q.w[0], q.w[1], q.w[2], q.w[3], y0, y1);
                } else {
                    mma_f16(dot[0], q.w[0], q.w[1], q.w[2], q.w[3], x0, x1);
                    mma_f16(dot[1], q.w[0], q.w[1], q.w[2], q.w[3], y0, y1);
                }
            });
#pragma unroll
            for (int b = 0; b < C::BLOCKS; b++) {
#pragma unroll
                for (int k = 0; k < 4; k++) out.x[b][k] = dot[k / 2][2 * b + k % 2] * rows.scale[b];
            }
        }
        if constexpr (C::SOFTCAP) {
            float cap = p.softcap * LOG2E;
#pragma unroll
            for (int b = 0; b < C::BLOCKS; b++) {
#pragma unroll
                for (int k = 0; k < 4; k++) out.x[b][k] = tanhf(out.x[b][k]) * cap;
            }
        }
    }

    // Hides what a query row does not see, and everything behind the sequence's end.
    TQ_DEVICE void mask(Scores& out, const Rows& rows, const Unit& unit, i32 len) {
#pragma unroll
        for (int b = 0; b < C::BLOCKS; b++) {
            i32 back = p.q_len - 1 - (rows.first + 8 * b + g) / p.gqa_group;  // tokens after this row's own
            i32 end = len - (back < 0 ? 0 : back);
            i32 begin = p.window > 0 ? end - p.window : 0;
#pragma unroll
            for (int k = 0; k < 4; k++) {
                i32 at = unit.token + k / 2 * 8 + 2 * t + k % 2;
                if (at < begin || at >= end) out.x[b][k] = -__int_as_float(0x7f800000);
            }
        }
        if constexpr (UNIFORM) {
#pragma unroll
            for (int k = 0; k < 4; k++) {
                i32 at = unit.token + k / 2 * 8 + 2 * t + k % 2;
                u32 keep = at < len ? ~0u : k % 2 ? 0x0000ffffu : 0xffff0000u;
                out.scale.w[k / 2] &= keep, out.low.w[k / 2] &= keep;
            }
        } else if (unit.token + UNIT > len) {
            clear_values_from<R>(unit.at + R::UNIT_KEY_BYTES, lane, len - unit.token);
            fence_before_async_write();
        }
    }

    TQ_DEVICE void add_values(State& s, const Scores& in, const Unit& unit) {
        u32 p0[C::BLOCKS], p1[C::BLOCKS], rest0[C::BLOCKS], rest1[C::BLOCKS];
#pragma unroll
        for (int b = 0; b < C::BLOCKS; b++) {
            float w[4];
#pragma unroll
            for (int k = 0; k < 4; k++) {
                w[k] = fast_exp2(in.x[b][k] - s.top[b]);
                if constexpr (!UNIFORM) s.sum[b] += w[k];
            }
            if constexpr (R::VALUE == BF16) {  // two terms: bf16 alone would cost 1e-3
                p0[b] = pack_bf16(w[0], w[1]), p1[b] = pack_bf16(w[2], w[3]);
                auto left = [](float exact, u32 pair, int half) {
                    return exact - __uint_as_float(half ? pair & 0xffff0000u : pair << 16);
                };
                rest0[b] = pack_bf16(left(w[0], p0[b], 0), left(w[1], p0[b], 1));
                rest1[b] = pack_bf16(left(w[2], p1[b], 0), left(w[3], p1[b], 1));
            } else {
                p0[b] = pack_f16(w[0], w[1]), p1[b] = pack_f16(w[2], w[3]);
            }
        }
        if constexpr (UNIFORM) {
            // row 0: low + center * scale; row 1: 1; lanes of other rows: 0
            constexpr u32 CENTER = code_center<R::VALUE>(), CENTER_F16 = CENTER == 8 ? 0x48004800u : 0x44004400u;
            u32 is_low = g == 0 ? 0x3c003c00u : 0u, center = g == 0 ? CENTER_F16 : 0u, one = g == 1 ? 0x3c003c00u : 0u;
            u32 a0 = fma_f16x2(in.low.w[0], is_low, fma_f16x2(in.scale.w[0], center, one));
            u32 a2 = fma_f16x2(in.low.w[1], is_low, fma_f16x2(in.scale.w[1], center, one));
            u32 scale0 = mul_f16x2(in.scale.w[0], s.gain), scale1 = mul_f16x2(in.scale.w[1], s.gain);
#pragma unroll
            for (int b = 0; b < C::BLOCKS; b++) {
                mma_f16(s.sums[b], a0, 0, a2, 0, p0[b], p1[b]);
                p0[b] = mul_f16x2(p0[b], scale0), p1[b] = mul_f16x2(p1[b], scale1);
                mma_f16(s.center[b], CENTER * 0x10001u, 0, CENTER * 0x10001u, 0, p0[b], p1[b]);
            }
        }
        for_each_value_block<R>(unit.at + R::UNIT_KEY_BYTES, lane, [&](int i, u32 a0, u32 a1, u32 a2, u32 a3) {
#pragma unroll
            for (int b = 0; b < C::BLOCKS; b++) {
                if constexpr (R::VALUE == BF16) {
                    mma_bf16(s.o[b][i], a0, a1, a2, a3, p0[b], p1[b]);
                    mma_bf16(s.o[b][i], a0, a1, a2, a3, rest0[b], rest1[b]);
                } else {
                    mma_f16(s.o[b][i], a0, a1, a2, a3, p0[b], p1[b]);
                }
            }
        });
    }

    template <int UNITS>
    TQ_DEVICE void consume(State& s, const Rows& rows, const Queries& queries, const Unit (&units)[UNITS], i32 len, bool edge) {
        Scores scores[UNITS];
#pragma unroll
        for (int u = 0; u < UNITS; u++) score(scores[u], rows, queries, units[u]);
        if (edge) {
#pragma unroll
            for (int u = 0; u < UNITS; u++) mask(scores[u], rows, units[u], len);
        }
        float top[C::BLOCKS];
        u32 scale_top = 0;
        bool late = false;
#pragma unroll
        for (int b = 0; b < C::BLOCKS; b++) {
            top[b] = scores[0].x[b][0];
#pragma unroll
            for (int k = 1; k < 4 * UNITS; k++) top[b] = fmaxf(top[b], scores[k / 4].x[b][k % 4]);
            late |= top[b] > s.top[b] + (P_BITS + LATE_RESCALE);
        }
        if constexpr (UNIFORM) {
            scale_top = max_f16x2(scores[0].scale.w[0], scores[0].scale.w[1]);
#pragma unroll
            for (int u = 1; u < UNITS; u++)
                scale_top = max_f16x2(scale_top, max_f16x2(scores[u].scale.w[0], scores[u].scale.w[1]));
            late |= any_greater_f16x2(scale_top, s.gain_limit);
        }
        if (any_lane(late)) rescale(s, top, scale_top);
#pragma unroll
        for (int u = 0; u < UNITS; u++) add_values(s, scores[u], units[u]);
    }

    // ---- where a segment, or this CTA's part of it, ends ----

    // [ROWS][STATE_STRIDE] running maxima (log2) of the CTA's warps, and as many sums.
    TQ_DEVICE float* warp_tops(int row) { return reinterpret_cast<float*>(smem + C::STATE_AT) + row * C::STATE_STRIDE; }
    TQ_DEVICE float* warp_sums(int row) { return warp_tops(row) + C::ROWS * C::STATE_STRIDE; }
    TQ_DEVICE float cta_top(int row) {
        float tops[C::NUM_WARPS];
        load_each(tops, warp_tops(row));
        float top = tops[0];
#pragma unroll
        for (int w = 1; w < C::NUM_WARPS; w++) top = fmaxf(top, tops[w]);
        return top;
    }
    template <class T, int N>
    TQ_DEVICE static void load_each(T (&to)[N], const T* from) {  // 16-byte loads where there are enough
        struct alignas(16) Four {
            T x[4];
        };
        if constexpr (N % 4 == 0) {
#pragma unroll
            for (int w = 0; w < N; w += 4) {
                Four four = *reinterpret_cast<const Four*>(from + w);
                to[w] = four.x[0], to[w + 1] = four.x[1], to[w + 2] = four.x[2], to[w + 3] = four.x[3];
            }
        } else {
#pragma unroll
            for (int w = 0; w < N; w++) to[w] = from[w];
        }
    }

    // Leaves this warp's running maxima and sums for the others, and where its output will stand.
    TQ_DEVICE void post_state(State& s, u32 space) {
#pragma unroll
        for (int b = 0; b < C::BLOCKS; b++) {
            if (t == 0) warp_tops(8 * b + g)[warp] = s.top[b];
            if constexpr (UNIFORM) {
                if (g == 1) warp_sums(8 * b + 2 * t)[warp] = s.sums[b][0], warp_sums(8 * b + 2 * t + 1)[warp] = s.sums[b][1];
            } else {
                float sum = s.sum[b];
                sum += shuffle_xor(sum, 1);
                sum += shuffle_xor(sum, 2);
                if (t == 0) warp_sums(8 * b + g)[warp] = sum;
            }
        }
        if (lane == 0) spaces()[warp] = space;
    }
    TQ_DEVICE u32* spaces() { return reinterpret_cast<u32*>(smem + C::SPACES_AT); }

    // Sums the warps' output; calls emit(row, dim, unnormalised o of 4 dims) for all of the live rows. The states of all
    // are posted.
    template <class Emit>
    TQ_DEVICE void merge_warps(State& s, int live, Emit&& emit) {
        for (int row = warp; row < live; row += C::NUM_WARPS) {
            float top = lane < C::NUM_WARPS ? warp_tops(row)[lane] : NEVER, sum = lane < C::NUM_WARPS ? warp_sums(row)[lane] : 0.0f;
            float above = warp_max(top);
            sum *= fast_exp2(top - above);
#pragma unroll
            for (int bit = 16; bit; bit /= 2) sum += shuffle_xor(sum, bit);
            if (lane == 0) merge.total_of(row) = make_float2(above, sum);
        }
        float unit = 1.0f;
        if constexpr (UNIFORM) unit = s.gain == 0 ? 0.0f : inverse_of_power(SUBNORMAL * f16_to_f32(u16(s.gain)));
        float factor[C::BLOCKS][2], low[C::BLOCKS][2];
#pragma unroll
        for (int b = 0; b < C::BLOCKS; b++) {
#pragma unroll
            for (int c = 0; c < 2; c++) {
                int row = 8 * b + 2 * t + c;
                factor[b][c] = fast_exp2(warp_tops(row)[warp] - cta_top(row));
                low[b][c] = 0.0f;
                if constexpr (UNIFORM) low[b][c] = shuffle(s.sums[b][c], t) * factor[b][c] - s.center[b][c] * (factor[b][c] * unit);
                factor[b][c] *= unit;
            }
        }
        // [ROWS][MERGE_DIMS], dims exchanged so that the rows of a warp's store fall on different banks
        constexpr int W = C::MERGE_DIMS, MASK = W % 32 == 0 ? 24 : 8;
        float* mine = reinterpret_cast<float*>(smem + spaces()[warp]);
#pragma unroll
        for (int first = 0; first < C::VALUE_BLOCKS; first += C::MERGE_BLOCKS) {
#pragma unroll
            for (int b = 0; b < C::BLOCKS; b++) {
                if (8 * b + 2 * t >= live) continue;
#pragma unroll
                for (int i = first; i < first + C::MERGE_BLOCKS && i < C::VALUE_BLOCKS; i++) {
#pragma unroll
                    for (int k = 0; k < 4; k++) {
                        int row = 8 * b + 2 * t + k % 2, d = 16 * (i - first) + 8 * (k / 2) + g;
                        mine[row * W + (d ^ (8 * t & MASK))] =
                            s.o[b][i][k] * (factor[b][k % 2] * (1.0f / code_weight<R::VALUE>(i, k / 2))) + low[b][k % 2];
                    }
                }
            }
            __syncthreads();
            constexpr int LEFT = C::D;
            int across = (LEFT - 16 * first < W ? LEFT - 16 * first : W) / 4;  // vectors of 4 dims
            for (int at = threadIdx.x; at < live * across; at += C::THREADS) {
                int row = at / across, d = at % across * 4;
                const u8* place = smem + (row * W + (d ^ (row / 2 % 4 * 8 & MASK))) * 4;
                u32 from[C::NUM_WARPS];
                load_each(from, spaces());
                float4 o = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
                for (int w = 0; w < C::NUM_WARPS; w++) {
                    float4 more = *reinterpret_cast<const float4*>(place + from[w]);
                    o.x += more.x, o.y += more.y, o.z += more.z, o.w += more.w;
                }
                emit(row, 16 * first + d, o);
            }
            __syncthreads();
        }
        fence_before_async_write();
    }

    // ---- a warp's copies ----

    struct Copies {
        typename Runs<C>::Spot spot;  // this lane's of the 32 units looked up last
        int used;                     // of those
        int stage;                    // to fill next
        u32 next;                     // list index of the next unit to copy
    };
    TQ_DEVICE void look_up(Copies& c) {
        u32 index = c.next + lane * C::NUM_WARPS;
        c.spot = runs.spot_of(index < run_end ? index : run_end - 1);
        c.used = 0;
    }
    TQ_DEVICE void copy_one(Copies& c, Ring<R, C::STAGES>& ring) {
        if (c.next < run_end) {
            if (c.used == 32) look_up(c);
            ring.fill(c.stage, runs.address_of(c.spot, R::UNIT_BYTES), c.used, lane);
            c.stage = c.stage + 1 == C::STAGES ? 0 : c.stage + 1;
            c.used++;
            c.next += C::NUM_WARPS;
        }
        ring.close_fill();
    }

    TQ_DEVICE void run() {
        Ring<R, C::STAGES> ring;
        ring.init(smem + C::RING_AT + warp * Ring<R, C::STAGES>::BYTES,
                  reinterpret_cast<u64*>(smem + C::BARRIERS_AT) + warp * C::STAGES, lane);
        start_after_previous();
        runs.plan(warp, lane);
        u32 run_begin = runs.begin_of(blockIdx.x);
        run_end = runs.end_of(blockIdx.x);
        if (run_begin >= run_end) return;

        // The queries are asked for before the queue to memory is long. One warp works out which they are, the
        // others meanwhile where their units are.
        Copies copies = {{0, 0}, 32, 0, run_begin + warp};
        if (warp == PLANNER) runs.post_segment(run_begin, 0, lane);
        else if (copies.next < run_end) look_up(copies);
        __syncthreads();
        u32 at = run_begin;
        RawQueries raw;
        load_queries(raw, runs.segment(0));
#pragma unroll 1
        for (int i = 0; i < C::STAGES - 1; i++) copy_one(copies, ring);
        bool shares_first = false;
        int place = 0;  // of the segment: 0 the run's first, 1 and 2 in turn the others

#pragma unroll 1
        while (true) {
            const Segment& x = runs.segment(place);
            int next_place = place == 1 ? 2 : 1;
            stage_queries(raw, x.rows);
            __syncthreads();
            bool more = x.end < run_end;
            if (more && warp == PLANNER) runs.post_segment(x.end, next_place, lane);
            Queries queries;
            Rows rows;
            State s;
            begin_segment(x, queries, rows, s);
            u32 end = x.end < run_end ? x.end : run_end;
            // the units of which every row sees every token: `inner` from index `inner_begin`
            i32 seen_from = p.window > 0 ? x.len - p.window : 0, seen_to = x.len - (p.q_len - 1);
            i32 first_inner = (seen_from > 0 ? (seen_from + UNIT - 1) / UNIT : 0) - x.first_unit;
            i32 inner = (seen_to > 0 ? seen_to / UNIT : 0) - x.first_unit - first_inner;
            u32 inner_begin = x.begin + first_inner, first_index = x.begin - x.first_unit;
            i32 len = x.len;
            inner = inner > 0 ? inner : 0;
            // this warp's first unit of the run's part in this segment
            u32 next = at + (warp + C::NUM_WARPS - (at - run_begin) % C::NUM_WARPS) % C::NUM_WARPS;
            auto unit_of = [&](u32 index, int stage) {
                return Unit{smem + C::RING_AT + (warp * C::STAGES + stage) * C::STAGE_BYTES, i32(index - first_index) * UNIT};
            };
            auto at_edge = [&](u32 index) { return index - inner_begin >= u32(inner); };
            if constexpr (C::TOGETHER > 1) {
#pragma unroll 1
                while (next + (C::TOGETHER - 1) * C::NUM_WARPS < end) {
                    Unit units[C::TOGETHER];
                    bool edge = false;
                    copy_one(copies, ring);
#pragma unroll
                    for (int u = 0; u < C::TOGETHER; u++) {
                        ring.wait();
                        units[u] = unit_of(next, ring.stage);
                        edge |= at_edge(next);
                        ring.advance();
                        next += C::NUM_WARPS;
                    }
                    consume(s, rows, queries, units, len, edge);
                    warp_sync();
#pragma unroll 1
                    for (int u = 1; u < C::TOGETHER; u++) copy_one(copies, ring);
                }
            }
#pragma unroll 1
            for (; next < end; next += C::NUM_WARPS) {
                copy_one(copies, ring);
                ring.wait();
                Unit units[1] = {unit_of(next, ring.stage)};
                ring.advance();
                consume(s, rows, queries, units, len, at_edge(next));
                warp_sync();
            }
            u32 ring_at = C::RING_AT + warp * C::STAGES * C::STAGE_BYTES;
            int free_stage = ring.stage == 0 ? C::STAGES - 1 : ring.stage - 1;
            post_state(s, C::MERGE_IN_RING ? ring_at + free_stage * C::STAGE_BYTES : C::MERGE_AT + warp * C::ROWS * C::MERGE_DIMS * 4);
            __syncthreads();
            if (more) load_queries(raw, runs.segment(next_place));
            bool shared = x.first_run != x.last_run;
            merge_warps(s, x.rows, [&](int row, int d, const float4& o) {
                float2 total = merge.total_of(row);
                if (shared) merge.write_part(x, row, d, o, total);
                else merge.write_out(x, row, d, o, total.x, total.y);
            });
            if (!more) {
                if (shares_first || shared) merge.merge_shared(runs.segment(0), shares_first, x, shared, warp, lane);
                break;
            }
            shares_first |= shared;
            at = x.end;
            place = next_place;
        }
    }

    TQ_DEVICE void begin_segment(const Segment& x, Queries& queries, Rows& rows, State& s) {
        if constexpr (C::Q_RESIDENT) {
#pragma unroll
            for (int b = 0; b < C::Q_TILES; b++) {
#pragma unroll
                for (int step = 0; step < C::STEPS; step++) {
                    Words4 w = staged_query(b, step);
#pragma unroll
                    for (int k = 0; k < 4; k++) queries.kept[b][step][k] = w.w[k];
                }
            }
        }
        const float* scales = reinterpret_cast<const float*>(smem + C::SCALE_AT);
        const i32* halves = reinterpret_cast<const i32*>(smem + C::HALF_AT);
#pragma unroll
        for (int b = 0; b < C::BLOCKS; b++) {
            rows.scale[b] = scales[8 * b + g];
            rows.half_sum[b] = halves[8 * b + g];
            s.top[b] = NEVER, s.sum[b] = 0.0f;
#pragma unroll
            for (int k = 0; k < 4; k++) s.sums[b][k] = s.center[b][k] = 0.0f;
#pragma unroll
            for (int i = 0; i < C::VALUE_BLOCKS; i++) s.o[b][i][0] = s.o[b][i][1] = s.o[b][i][2] = s.o[b][i][3] = 0.0f;
        }
        rows.first = x.row_block * C::ROWS;
        s.gain = 0, s.gain_limit = 0;
    }
};

}  // namespace tq
