// Where a segment ends: its output, merged over the parts of all runs that share it.
//
// A run that ends inside a segment writes its part to `partials`: for every 4 dims of a row the unnormalised
// outputs, and running maximum (log2) and sum of the row. When a CTA has done its run it merges a slice of each
// segment it shares from the parts of all. Nobody is told when a part is there: a word that has not come yet
// holds ABSENT, and whoever has read it puts ABSENT back for the next launch. A launch is cooperative, so all CTAs
// are on the card at once, and none waits before its own parts are written.
#pragma once
#include "runs.cuh"

namespace tq {

constexpr u32 ABSENT = 0xffffffffu;  // a NaN that no instruction makes

// C: DecodeConfig.
template <class C>
struct Merge {
    const DecodeParams& p;
    u8* smem;

    // Running maximum (log2) and sum of a row, of this CTA.
    TQ_DEVICE float2& total_of(int row) { return reinterpret_cast<float2*>(smem + C::TOTAL_AT)[row]; }

    // Four dims of a row of the output, and lse; `top` and `sum` without the sink, `o` unnormalised.
    TQ_DEVICE void write_out(const Segment& x, int row, int d, const float4& o, float top, float sum) {
        row += x.row_block * C::ROWS;
        int token = p.q_len == 1 ? 0 : row / p.gqa_group, q_head = x.head * p.gqa_group + row - token * p.gqa_group;
        i64 at = (i64(x.seq) * p.q_len + token) * p.num_kv_heads * p.gqa_group + q_head;
        float factor = 1.0f;
        if (p.sinks) {
            float sink = p.sinks[q_head] * LOG2E;
            float above = fmaxf(top, sink);
            factor = fast_exp2(top - above);
            sum = sum * factor + fast_exp2(sink - above);
            top = above;
        }
        factor = sum == 0.0f ? 0.0f : factor * fast_reciprocal(sum);  // nothing seen: 0
        auto pack = [](float a, float b) { return C::IO == BF16 ? pack_bf16(a, b) : pack_f16(a, b); };
        *reinterpret_cast<Words2*>(static_cast<u16*>(p.out) + at * C::D + d) = {{pack(o.x * factor, o.y * factor), pack(o.z * factor, o.w * factor)}};
        if (p.lse && d == 0) p.lse[at] = sum == 0.0f ? -__int_as_float(0x7f800000) : (top + fast_log2(sum)) * LN2;
    }

    // A run has at most two parts: of the segment it begins in and of the one it ends in.
    // float4 [ROWS][D / 4] outputs, float2 [ROWS][D / 4] (maximum, sum)
    static constexpr int PART = C::ROWS * C::D * 3 / 2;  // floats
    TQ_DEVICE float* part_of(const Segment& x, u32 run) { return p.partials + i64(2 * run + (run == x.first_run)) * PART; }

    TQ_DEVICE void write_part(const Segment& x, int row, int d, const float4& o, const float2& total) {
        float* part = part_of(x, blockIdx.x);
        send(part + row * C::D + d, o);
        send(part + C::ROWS * C::D + (row * C::D + d) / 2, total);
    }

    // Merges this CTA's slices of the segments it shares, half of the warps one and half the other.
    TQ_DEVICE void merge_shared(const Segment& first, bool shares_first, const Segment& last, bool shares_last, int warp, int lane) {
        constexpr int HALF = C::NUM_WARPS > 1 ? C::NUM_WARPS / 2 : 1;
        bool halves = shares_first && shares_last && C::NUM_WARPS > 1;
#pragma unroll 1
        for (int turn = shares_first ? 0 : 1; turn < (shares_last ? 2 : 1); turn++) {
            if (halves && turn != warp / HALF) continue;
            auto pick = [&](auto a, auto b) { return turn == 0 ? a : b; };
            Segment x;
            x.seq = pick(first.seq, last.seq), x.head = pick(first.head, last.head);
            x.row_block = pick(first.row_block, last.row_block), x.rows = pick(first.rows, last.rows);
            x.first_run = pick(first.first_run, last.first_run), x.last_run = pick(first.last_run, last.last_run);
            merge_slice(x, halves ? warp % HALF : warp, halves ? HALF : C::NUM_WARPS, lane);
        }
    }

    // The lanes of a warp take some parts each, of one vector of 4 dims or of neighbouring ones.
    TQ_DEVICE void merge_slice(const Segment& x, int warp, int warps, int lane) {
        constexpr u32 TOGETHER = 4;  // parts a lane reads at a time
        u32 parts = x.last_run - x.first_run + 1, mine = blockIdx.x - x.first_run;
        u32 lanes = 1;  // of a vector
        while (lanes * TOGETHER < parts && lanes < 32) lanes *= 2;
        u32 side = 32 / lanes;  // vectors side by side
        u32 vectors = x.rows * C::D / 4, end = vectors * (mine + 1) / parts;
#pragma unroll 1
        for (u32 begin = vectors * mine / parts + warp * side; begin < end; begin += warps * side) {
            u32 vector = begin + lane % side;
            bool inside = vector < end;
            int row = vector / (C::D / 4), d = vector % (C::D / 4) * 4;
            float top = NEVER, sum = 0.0f, o[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 1
            for (u32 part = 0; part < parts; part += TOGETHER * lanes) {
                float2 state[TOGETHER];
                float4 some[TOGETHER];
                float* from[TOGETHER];
#pragma unroll
                for (u32 i = 0; i < TOGETHER; i++) {
                    u32 at = part + i * lanes + lane / side;
                    from[i] = inside && at < parts ? part_of(x, x.first_run + at) + row * C::D + d : nullptr;
                    state[i] = make_float2(NEVER, 0.0f), some[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                }
                bool absent;
#pragma unroll 1
                do {
                    absent = false;
#pragma unroll
                    for (u32 i = 0; i < TOGETHER; i++)
                        if (from[i]) receive(from[i], some[i]), receive(from[i] + C::ROWS * C::D - (row * C::D + d) / 2, state[i]);
#pragma unroll
                    for (u32 i = 0; i < TOGETHER; i++) absent |= is_absent(state[i].x, state[i].y, some[i].x) || is_absent(some[i].y, some[i].z, some[i].w);
                    absent = any_lane(absent);
                    if (absent) pause();
                } while (absent);
#pragma unroll
                for (u32 i = 0; i < TOGETHER; i++) {
                    float never = __uint_as_float(ABSENT);
                    if (from[i]) {
                        *reinterpret_cast<float4*>(from[i]) = make_float4(never, never, never, never);
                        *reinterpret_cast<float2*>(from[i] + C::ROWS * C::D - (row * C::D + d) / 2) = make_float2(never, never);
                    }
                }
                float above = top;
#pragma unroll
                for (u32 i = 0; i < TOGETHER; i++) above = fmaxf(above, state[i].x);
                float keep = fast_exp2(top - above);
                top = above, sum *= keep;
#pragma unroll
                for (int k = 0; k < 4; k++) o[k] *= keep;
#pragma unroll
                for (u32 i = 0; i < TOGETHER; i++) {
                    float w = fast_exp2(state[i].x - top);
                    sum += state[i].y * w;
                    o[0] += some[i].x * w, o[1] += some[i].y * w, o[2] += some[i].z * w, o[3] += some[i].w * w;
                }
            }
            float above = top;
            for (u32 bit = side; bit < 32; bit *= 2) above = fmaxf(above, shuffle_xor(above, bit));
            float keep = fast_exp2(top - above);
            sum *= keep;
#pragma unroll
            for (int k = 0; k < 4; k++) o[k] *= keep;
            for (u32 bit = side; bit < 32; bit *= 2) {
                sum += shuffle_xor(sum, bit);
#pragma unroll
                for (int k = 0; k < 4; k++) o[k] += shuffle_xor(o[k], bit);
            }
            if (inside && lane < side) write_out(x, row, d, make_float4(o[0], o[1], o[2], o[3]), above, sum);
        }
    }

    TQ_DEVICE static bool is_absent(float a, float b, float c) {
        return __float_as_uint(a) == ABSENT || __float_as_uint(b) == ABSENT || __float_as_uint(c) == ABSENT;
    }
};

}  // namespace tq
