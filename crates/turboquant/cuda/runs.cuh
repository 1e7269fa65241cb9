// How the work of a decode launch is divided.
//
// The work is one list of units (16 tokens of one KV head): KV heads and row blocks, sequences, their
// units. Every CTA, one on a multiprocessor, takes an equal run of that list, computed from the lengths on the
// device, so one captured launch serves any lengths. Where all sequences are equally long, runs end at the ends of
// segments if that costs little: a segment that begins inside a run costs a pause.
#pragma once
#include "layout.cuh"
#include "params.cuh"

namespace tq {

// The units of one sequence, the same for all its heads and row blocks.
struct Span {
    i32 first;  // first unit
    i32 count;  // at least 1: an empty sequence has one unit with nothing to see
    i32 len;    // tokens
};
TQ_DEVICE Span span_of(const DecodeParams& p, int seq) {
    i32 len = p.seq_lens[seq];
    len = len < 0 ? 0 : len;
    i32 low = p.window > 0 ? len - (p.q_len - 1) - p.window : 0;
    i32 first = low > 0 ? low / UNIT : 0;
    i32 count = (len + UNIT - 1) / UNIT - first;
    return {first, count < 1 ? 1 : count, len};
}

// A place in the list of units.
struct Place {
    u32 list;  // head * row_blocks + row_block
    i32 seq;
    Span span;
    u32 unit;  // of the span
};

// The units of one head and row block of one sequence.
struct alignas(16) Segment {
    u32 begin, end;  // list indices
    i32 seq, head, row_block, rows;
    u32 first_run, last_run;
    i32 first_unit, len;  // of the sequence
};

constexpr int SEGMENT_PLACES = 3;  // in shared memory

// C: DecodeConfig.
template <class C>
struct Runs {
    const DecodeParams& p;
    u8* smem;
    u32 total, share;      // units of the list and of a run
    u32 period, in_period; // units within which runs follow one another without a gap; runs of a period
    u32 per_list;          // units of one KV head and row block, over all sequences
    int row_blocks;        // of a KV head
    int starts_every;      // sequences from one entry of starts to the next

    TQ_DEVICE u32* starts() const { return reinterpret_cast<u32*>(smem + C::STARTS_AT); }

    // Measures the list and cuts it into runs.
    TQ_DEVICE void plan(int warp, int lane) {
        // What is needed later is often cold, at least its address translation: it is fetched while the lengths are read.
        if (threadIdx.x == 0) prefetch(p.q);
        if (threadIdx.x == 1) prefetch(p.partials);
        if (threadIdx.x == 2) prefetch(p.out);
        u64 line = (u64(blockIdx.x) * C::THREADS + threadIdx.x) * 128, table_bytes = u64(p.num_seqs) * p.max_pages * 4;
        if (table_bytes <= 1 << 20 && line < table_bytes) prefetch(reinterpret_cast<const u8*>(p.block_tables) + line);
        row_blocks = (p.gqa_group * p.q_len + C::ROWS - 1) / C::ROWS;
        starts_every = (p.num_seqs + C::THREADS - 1) / C::THREADS;
        u32 length = span_of(p, 0).count, uneven = 0;
        per_list = length;
        if (p.num_seqs > 1) add_up(length, uneven, warp, lane);
        u32 lists = p.num_kv_heads * row_blocks, segments = lists * p.num_seqs;
        total = per_list * lists;
        share = (total + gridDim.x - 1) / gridDim.x;
        period = total, in_period = gridDim.x;
        if (!uneven) {
            u32 runs = segments <= gridDim.x ? gridDim.x / segments : 1;  // of a segment
            u32 aligned = runs > 1 ? (length + runs - 1) / runs : (segments + gridDim.x - 1) / gridDim.x * length;
            if (aligned <= share + 4 * C::NUM_WARPS) {
                share = aligned;
                if (runs > 1) period = length, in_period = runs;
            }
        }
        // few units: whole rounds of the warps, or of half of them
        constexpr u32 ROUND = C::NUM_WARPS < 8 ? C::NUM_WARPS : 8;
        if (share < 4 * C::NUM_WARPS) share = (share + ROUND - 1) / ROUND * ROUND;
    }
    // The sequences' units: where each starts, their sum, and whether some sequence has more or less than `length`.
    TQ_DEVICE void add_up(u32 length, u32& uneven, int warp, int lane) {
        u32* sums = reinterpret_cast<u32*>(smem + C::SUMS_AT);
        u32* others = sums + C::NUM_WARPS;
        auto has_sequences = [&](int w) { return w * 32 * starts_every < p.num_seqs; };
        u32 units = 0, inclusive = 0;
        if (has_sequences(warp)) {
            bool other = false;
#pragma unroll 1
            for (int i = 0; i < starts_every; i++) {
                int seq = threadIdx.x * starts_every + i;
                if (seq >= p.num_seqs) break;
                u32 count = span_of(p, seq).count;
                units += count, other |= count != length;
            }
            other = any_lane(other);
            inclusive = units;
#pragma unroll
            for (int d = 1; d < 32; d *= 2) {
                u32 before = __shfl_up_sync(TQ_FULL_WARP, inclusive, d);
                if (lane >= d) inclusive += before;
            }
            if (lane == 31) sums[warp] = inclusive, others[warp] = other;
        }
        if (has_sequences(1)) __syncthreads();
        if (has_sequences(warp)) {
            u32 before = inclusive - units;
            for (int w = 0; w < warp; w++) before += sums[w];
            starts()[threadIdx.x] = before;
        }
        __syncthreads();
        per_list = 0;
#pragma unroll 1
        for (int w = 0; w < C::NUM_WARPS && has_sequences(w); w++) per_list += sums[w], uneven |= others[w];
    }

    // List indices of a run; it may be empty.
    TQ_DEVICE u32 begin_of(u32 run) const {
        u32 first = run / in_period * period, at = run % in_period * share;
        return first + (at < period ? at : period);
    }
    TQ_DEVICE u32 end_of(u32 run) const {
        u32 first = run / in_period * period, at = run % in_period * share + share;
        u32 end = first + (at < period ? at : period);
        return end < total ? end : total;
    }
    TQ_DEVICE u32 run_of(u32 index) const { return index / period * in_period + index % period / share; }

    // Where a list index stands. KV heads are outermost, so that the CTAs of all heads pass a page at
    // about the same time.
    TQ_DEVICE Place locate(u32 index) const {
        Place place;
        place.list = index / per_list;
        index -= place.list * per_list;
        int low = 0, high = (p.num_seqs + starts_every - 1) / starts_every;  // last entry at or below index
        while (high - low > 1) {
            int middle = (low + high) / 2;
            if (starts()[middle] <= index) low = middle;
            else high = middle;
        }
        place.seq = low * starts_every, place.unit = low == 0 ? index : index - starts()[low];
        place.span = span_of(p, place.seq);
        while (place.unit >= u32(place.span.count)) {
            place.unit -= place.span.count;
            place.seq++;
            place.span = span_of(p, place.seq);
        }
        return place;
    }

    // Where a unit stands: its page, and its place in there among the units of all heads.
    struct Spot {
        i32 page;
        u32 unit;
    };
    TQ_DEVICE Spot spot_of(u32 index) const {
        Place place = locate(index);
        u32 unit = place.unit + place.span.first, per_page = p.page_size / UNIT;
        i32 page = p.block_tables[i64(place.seq) * p.max_pages + unit / per_page];
        return {page, unit % per_page * p.num_kv_heads + place.list / row_blocks};
    }
    TQ_DEVICE const u8* address_of(const Spot& spot, int unit_bytes) const {
        return p.pages + i64(spot.page < 0 ? 0 : spot.page) * p.page_bytes + i64(spot.unit) * unit_bytes;
    }

    // ---- segments: one warp works one out and leaves it in shared memory for the others ----

    TQ_DEVICE Segment& segment(int place) { return reinterpret_cast<Segment*>(smem + C::SEGMENTS_AT)[place]; }
    TQ_DEVICE void post_segment(u32 index, int at, int lane) {
        Place place = locate(index);
        Segment x;
        x.begin = index - place.unit;
        x.end = x.begin + place.span.count;
        x.seq = place.seq, x.head = place.list / row_blocks, x.row_block = place.list % row_blocks;
        x.rows = p.gqa_group * p.q_len - x.row_block * C::ROWS;
        x.rows = x.rows < C::ROWS ? x.rows : C::ROWS;
        x.first_run = run_of(x.begin), x.last_run = run_of(x.end - 1);
        x.first_unit = place.span.first, x.len = place.span.len;
        if (lane == 0) segment(at) = x;
    }
};

}  // namespace tq
