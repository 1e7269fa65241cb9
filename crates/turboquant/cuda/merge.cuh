// Where a segment ends: its output, merged over the parts of all runs that share it.
//
// A run that ends inside a segment writes its part, [ROWS, head_dim] unnormalised outputs and
// [ROWS] x (running maximum in log2, sum), to `partials`. Whoever comes last merges, first within groups of
// GROUP runs, then over the groups; nobody waits.
#pragma once
#include "layout.cuh"
#include "params.cuh"

namespace tq {

constexpr int GROUP = 8;  // runs whose parts are merged first

// The units of one head and row block of one sequence.
struct Segment {
    u32 begin, end;  // list indices
    i32 seq, head, row_block, rows;
    u32 first_run, last_run;
    i32 first_unit, len;  // of the sequence
};

// C: DecodeConfig.
template <class C>
struct Merge {
    const DecodeParams& p;
    u8* smem;

    TQ_DEVICE u32* flag() { return reinterpret_cast<u32*>(smem + C::FLAG_AT); }
    // Running maximum (log2) and sum of a row, of this CTA or of what it merged.
    TQ_DEVICE float2& total_of(int row) { return reinterpret_cast<float2*>(smem + C::TOTAL_AT)[row]; }

    // out and lse of one element; `top` and `sum` without the sink, `o` unnormalised.
    TQ_DEVICE void write_out(int seq, int head, int row, int d, float o, float top, float sum) {
        int q_head = head * p.gqa_group + row % p.gqa_group;
        i64 at = (i64(seq) * p.q_len + row / p.gqa_group) * p.num_kv_heads * p.gqa_group + q_head;
        if (p.sinks) {
            float sink = p.sinks[q_head] * LOG2E;
            float above = fmaxf(top, sink), keep = fast_exp2(top - above);
            o *= keep;
            sum = sum * keep + fast_exp2(sink - above);
            top = above;
        }
        float y = sum == 0.0f ? 0.0f : o / sum;  // nothing seen: 0
        static_cast<u16*>(p.out)[at * C::D + d] = C::IO == BF16 ? f32_to_bf16(y) : f32_to_f16(y);
        if (p.lse && d == 0) p.lse[at] = sum == 0.0f ? -__int_as_float(0x7f800000) : (top + log2f(sum)) * LN2;
    }

    static constexpr int PART = C::ROWS * (C::D + 2);  // floats: [ROWS, D], then [ROWS] x (top, sum)

    // A run has at most two parts: of the segment it begins in and of the one it ends in.
    TQ_DEVICE u32 slot_of(const Segment& x, u32 run) { return 2 * run + (run == x.first_run); }
    TQ_DEVICE float* part_of(const Segment& x, u32 run) { return p.partials + i64(slot_of(x, run)) * PART; }
    TQ_DEVICE u32* group_counter(const Segment& x, u32 run) { return p.counters + 2 * slot_of(x, run); }
    TQ_DEVICE u32* segment_counter(const Segment& x) { return p.counters + 1 + 2 * slot_of(x, x.first_run); }

    // Whether this CTA is the last of `count` to come by; then everything the others wrote is visible.
    TQ_DEVICE bool last_of(u32 count, u32* counter) {
        __threadfence();
        __syncthreads();
        if (threadIdx.x == 0) {
            bool last = atomicAdd(counter, 1u) == count - 1;
            if (last) *counter = 0;
            *flag() = last;
        }
        __syncthreads();
        bool last = *flag() != 0;
        if (last) __threadfence();
        return last;
    }

    // Four dims of a row, merged over the parts of runs run(0) .. run(count - 1).
    struct Merged {
        float o[4], top, sum;
    };
    template <class F>
    TQ_DEVICE Merged merge_parts(const Segment& x, u32 count, F&& run, int row, int d) {
        Merged m = {{0.0f, 0.0f, 0.0f, 0.0f}, NEVER, 0.0f};
        for (u32 base = 0; base < count; base += GROUP) {
            float2 state[GROUP];
            float4 o[GROUP];
#pragma unroll
            for (u32 i = 0; i < GROUP; i++) {
                const float* part = part_of(x, run(base + i < count ? base + i : base));
                state[i] = __ldcg(reinterpret_cast<const float2*>(part + C::ROWS * C::D) + row);
                o[i] = __ldcg(reinterpret_cast<const float4*>(part + row * C::D + d));
            }
            float top = m.top;
#pragma unroll
            for (u32 i = 0; i < GROUP; i++) top = fmaxf(top, state[i].x);
            float keep = fast_exp2(m.top - top);
            m.top = top, m.sum *= keep;
#pragma unroll
            for (int k = 0; k < 4; k++) m.o[k] *= keep;
#pragma unroll
            for (u32 i = 0; i < GROUP; i++) {
                float w = base + i < count ? fast_exp2(state[i].x - top) : 0.0f;
                m.sum += state[i].y * w;
                m.o[0] += o[i].x * w, m.o[1] += o[i].y * w, m.o[2] += o[i].z * w, m.o[3] += o[i].w * w;
            }
        }
        return m;
    }
    TQ_DEVICE void write_four(const Segment& x, int row, int d, const Merged& m) {
#pragma unroll
        for (int k = 0; k < 4; k++) write_out(x.seq, x.head, x.row_block * C::ROWS + row, d + k, m.o[k], m.top, m.sum);
    }

    TQ_DEVICE void group_of(const Segment& x, u32& first, u32& last) {  // of this CTA's part
        u32 begin = blockIdx.x / GROUP * GROUP;
        first = begin > x.first_run ? begin : x.first_run;
        last = begin + GROUP - 1 < x.last_run ? begin + GROUP - 1 : x.last_run;
    }
    // Announces this CTA's part; merges the parts of its group if it comes last, and the segment if that
    // was its last group.
    TQ_DEVICE void merge_group(const Segment& x) {
        u32 first, last;
        group_of(x, first, last);
        u32 first_group = x.first_run / GROUP, last_group = x.last_run / GROUP;
        if (!last_of(last - first + 1, group_counter(x, first))) return;
        for (int at = threadIdx.x * 4; at < x.rows * C::D; at += C::THREADS * 4) {
            int row = at / C::D, d = at % C::D;
            Merged m = merge_parts(x, last - first + 1, [&](u32 i) { return first + i; }, row, d);
            if (first_group == last_group) {
                write_four(x, row, d, m);
            } else {
                // other threads still read the states: the new ones wait in shared memory
                *reinterpret_cast<float4*>(part_of(x, first) + row * C::D + d) = make_float4(m.o[0], m.o[1], m.o[2], m.o[3]);
                if (d == 0) total_of(row) = make_float2(m.top, m.sum);
            }
        }
        __syncthreads();
        if (first_group == last_group) return;
        if (threadIdx.x < x.rows)
            reinterpret_cast<float2*>(part_of(x, first) + C::ROWS * C::D)[threadIdx.x] = total_of(threadIdx.x);
        if (!last_of(last_group - first_group + 1, segment_counter(x))) return;
        for (int at = threadIdx.x * 4; at < x.rows * C::D; at += C::THREADS * 4) {
            int row = at / C::D, d = at % C::D;
            auto group_first = [&](u32 i) { return i == 0 ? x.first_run : (first_group + i) * GROUP; };
            write_four(x, row, d, merge_parts(x, last_group - first_group + 1, group_first, row, d));
        }
        __syncthreads();
    }
};

}  // namespace tq
