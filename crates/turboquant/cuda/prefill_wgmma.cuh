// Prefill on Hopper: a warpgroup fills tiles of keys, another tiles of values; two consumer warpgroups of
// 64 query rows each multiply them (wgmma). Raw tiles come through cp.async; packed tiles are unpacked
// by the producers' warps, whose packed bytes arrive ahead through rings of bulk copies.
//
// Consumers work a tile ahead: S of the next tile is started, then O += P V of this one, and the softmax
// of the next runs while the tensor cores are busy.
#pragma once
#include "prefill.cuh"
#include "wgmma.cuh"

namespace tq {


template <class Row_, int IO_, bool SOFTCAP_>
struct PrefillConfig {
    using R = Row_;
    static constexpr int IO = IO_, D = R::D;
    static constexpr bool SOFTCAP = SOFTCAP_;
    static constexpr int CONSUMERS = 2;               // warpgroups
    static constexpr int TILE_ROWS = 64 * CONSUMERS;
    static constexpr int THREADS = 128 * (2 + CONSUMERS);
    static constexpr int TOKENS = D <= 128 ? 128 : 64;  // of a tile: what two stages of keys and values leave room for
    static constexpr int STAGES = 2;
    static constexpr int COLUMNS = D % 128 == 0 ? 128 : 64;  // of O in one wgmma
    static constexpr int PARTS = D / COLUMNS;
    static constexpr int UNITS_A_WARP = TOKENS / UNIT / 4;   // of a tile; 4 warps unpack keys, 4 values

    static constexpr int TILE_BYTES = D / 64 * TOKENS * 128;
    static constexpr int QUERY_BYTES = D / 64 * 64 * 128;    // of a consumer
    static constexpr int KEYS_AT = CONSUMERS * QUERY_BYTES;
    static constexpr int VALUES_AT = KEYS_AT + STAGES * TILE_BYTES;
    static constexpr int NORMS_AT = VALUES_AT + STAGES * TILE_BYTES;  // float [STAGES][TOKENS], of Lloyd-Max keys
    static constexpr int RING_AT = NORMS_AT + (is_lloyd(R::KEY) ? STAGES * TOKENS * 4 : 0);
    // A warp's ring of packed bytes: its keys and, where they have one, norms; or its values and their fields.
    static constexpr int NORM_BYTES = is_lloyd(R::KEY) ? 2 * UNIT : 0;
    static constexpr int KEY_SLOT = R::UNIT_KEY_BYTES + NORM_BYTES;
    static constexpr int VALUE_SLOT = R::UNIT_BYTES - R::UNIT_KEY_BYTES;
    static constexpr int FIT = (227 * 1024 - 512 - RING_AT) / (4 * (KEY_SLOT + VALUE_SLOT));
    static constexpr int SLOTS = FIT > 4 * UNITS_A_WARP ? 4 * UNITS_A_WARP : FIT;
    static constexpr int VALUE_RING_AT = RING_AT + 4 * SLOTS * KEY_SLOT;
    static constexpr int BARRIERS_AT = VALUE_RING_AT + 4 * SLOTS * VALUE_SLOT;  // u64: keys full, values full, keys empty, values empty; rings
    static constexpr int SHARED_BYTES = BARRIERS_AT + 8 * (4 * STAGES + 8 * SLOTS);
    static_assert(D % 64 == 0 && TILE_BYTES % 1024 == 0, "tiles of whole 64-element rows");
    static_assert(SLOTS >= 1, "no room for packed bytes");
};

template <class C>
struct Prefill {
    using R = typename C::R;
    static constexpr int D = C::D, TOKENS = C::TOKENS, SCORES = TOKENS / 2, OUT = C::COLUMNS / 2;
    const PrefillParams& p;
    u8* smem;
    u32 base;  // shared address of smem
    int warp, lane;
    QueryTile x;
    i32 packed_first, raw_first;  // first token of each phase: position; new token of the request
    i32 packed_tiles, raw_tiles;

    TQ_DEVICE Prefill(const PrefillParams& params, u8* shared) : p(params), smem(shared) {
        base = shared_address(smem);
        warp = __shfl_sync(TQ_FULL_WARP, threadIdx.x / 32, 0);
        lane = threadIdx.x % 32;
    }
    TQ_DEVICE u32 full(bool values, int stage) { return base + C::BARRIERS_AT + 8 * (2 * values + stage); }
    TQ_DEVICE u32 empty(bool values, int stage) { return full(values, stage) + 8 * 2 * C::STAGES; }
    TQ_DEVICE u32 keys_at(int stage) { return base + C::KEYS_AT + stage * C::TILE_BYTES; }
    TQ_DEVICE float* norms_at(int stage) { return reinterpret_cast<float*>(smem + C::NORMS_AT) + stage * TOKENS; }
    TQ_DEVICE u32 values_at(int stage) { return base + C::VALUES_AT + stage * C::TILE_BYTES; }

    TQ_DEVICE void run() {
        x = find_tile<C::TILE_ROWS>(p, lane);
        if (x.rows <= 0) return;
        packed_first = x.begin / UNIT * UNIT;
        packed_tiles = x.begin < x.prefix_len ? (x.prefix_len - packed_first + TOKENS - 1) / TOKENS : 0;
        raw_first = x.begin > x.prefix_len ? x.begin - x.prefix_len : 0;
        raw_tiles = (x.end - x.prefix_len - raw_first + TOKENS - 1) / TOKENS;
        if (threadIdx.x == 0) {
            for (int stage = 0; stage < C::STAGES; stage++) {
                for (int values = 0; values < 2; values++) {
                    barrier_init(full(values, stage), 4 * TQ_ARRIVING_LANES);  // producer warps
                    barrier_init(empty(values, stage), 4 * C::CONSUMERS * TQ_ARRIVING_LANES);  // consumer warps
                }
            }
            asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        }
        __syncthreads();
        if (warp < 4) {
            fewer_registers<40>();
            produce<false>();
        } else if (warp < 8) {
            fewer_registers<40>();
            produce<true>();
        } else {
            more_registers<216>();
            consume();
        }
    }

    // ---- producers ----

    TQ_DEVICE void wait_empty(bool values, int tile) {
        barrier_wait(empty(values, tile % C::STAGES), (tile / C::STAGES & 1) ^ 1);
    }
    // Says that this warp's share of a tile is written.
    TQ_DEVICE void announce(bool values, int stage) {
        fence_async();
        warp_sync();
        if (lane < TQ_ARRIVING_LANES) barrier_arrive(full(values, stage));
    }

    template <bool VALUES>
    TQ_DEVICE void produce() {
        int tile = 0;
        if (packed_tiles > 0) produce_packed<VALUES>(tile);
        i64 stride = VALUES ? p.value_stride : p.key_stride;
        const u16* rows = static_cast<const u16*>(VALUES ? p.value : p.key) + x.first_token * stride + i64(x.head) * D;
        i32 count = x.end - x.prefix_len;
#pragma unroll 1
        for (int j = 0; j < raw_tiles; j++, tile++) {
            int stage = tile % C::STAGES;
            wait_empty(VALUES, tile);
            copy_rows<D, TOKENS, 128>(VALUES ? values_at(stage) : keys_at(stage), rows, stride, raw_first + j * TOKENS, count, threadIdx.x % 128);
            asm volatile("cp.async.wait_all;" ::: "memory");
            announce(VALUES, stage);
        }
    }

    // Unit 4 i + warp of the prefix's part is this warp's i-th. Its packed bytes are asked for SLOTS units ahead.
    template <bool VALUES>
    TQ_DEVICE void produce_packed(int& tile) {
        constexpr int SLOT = VALUES ? C::VALUE_SLOT : C::KEY_SLOT;
        int w = warp % 4;
        u8* ring = smem + (VALUES ? C::VALUE_RING_AT : C::RING_AT) + w * C::SLOTS * SLOT;
        u32 barriers = base + C::BARRIERS_AT + 8 * (4 * C::STAGES + warp * C::SLOTS);
        if (lane < C::SLOTS) barrier_init(barriers + 8 * lane, 1);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        warp_sync();

        i32 units = (x.prefix_len - packed_first + UNIT - 1) / UNIT;
        i32 mine = units > w ? (units - w + 3) / 4 : 0;
        i32 asked = 0;
        const u8* source = nullptr;  // this lane's of 32 units
        auto ask = [&](int slot) {
            if (asked >= mine) return;
            if (asked % 32 == 0) {
                i32 i = asked + lane < mine ? asked + lane : mine - 1;
                i32 unit = packed_first / UNIT + 4 * i + w, per_page = p.page_size / UNIT;
                i32 page = p.block_tables[i64(x.seq) * p.max_pages + unit / per_page];
                source = p.pages + i64(page < 0 ? 0 : page) * p.page_bytes + i64(unit % per_page * p.num_kv_heads + x.head) * R::UNIT_BYTES;
            }
            if (lane == asked % 32) {
                u32 dst = shared_address(ring) + slot * SLOT, bar = barriers + 8 * slot;
                barrier_expect(bar, SLOT);
                if constexpr (VALUES) {
                    bulk_copy(dst, source + R::UNIT_KEY_BYTES, SLOT, bar);
                } else {
                    bulk_copy(dst, source, R::UNIT_KEY_BYTES, bar);
                    if constexpr (C::NORM_BYTES > 0) bulk_copy(dst + R::UNIT_KEY_BYTES, source + R::UNIT_CODE_BYTES, C::NORM_BYTES, bar);
                }
            }
            asked++;
        };
#pragma unroll 1
        for (int i = 0; i < C::SLOTS; i++) ask(i);
        i32 got = 0, slot = 0;
        u32 phase = 0;
#pragma unroll 1
        for (int j = 0; j < packed_tiles; j++, tile++) {
            int stage = tile % C::STAGES;
            wait_empty(VALUES, tile);
#pragma unroll 1
            for (int k = 0; k < C::UNITS_A_WARP; k++, got++) {
                int first = (4 * k + w) * UNIT;
                const u8* unit = ring + slot * SLOT;
                if (got < mine) barrier_wait(barriers + 8 * slot, phase);
                if constexpr (VALUES) {  // those behind the prefix become zero
                    i32 valid = x.prefix_len - (packed_first + j * TOKENS + first);
                    unpack_values<R>(values_at(stage), unit, unit + R::UNIT_CODE_BYTES - R::UNIT_KEY_BYTES, first, valid, lane);
                } else if (got < mine) {  // those behind the prefix are masked, whatever they are
                    unpack_keys<R, TOKENS>(keys_at(stage), norms_at(stage), unit, unit + R::UNIT_KEY_BYTES, first, p.codebook, lane);
                }
                warp_sync();
                ask(slot);
                slot++;
                if (slot == C::SLOTS) slot = 0, phase ^= 1;
            }
            announce(VALUES, stage);
        }
    }

    // ---- consumers ----

    struct Softmax {
        float top[2], sum[2];  // of rows g and 8 + g of the warp; top in log2, sum this lane's part
        float scale[2];        // stored product to log2, or to the soft cap's argument
        i32 position[2];
    };

    // S = Q K^T of a tile, started.
    template <bool PACKED>
    TQ_DEVICE void start_scores(float (&s)[SCORES], u64 queries, int tile) {
        constexpr bool IS_BF16 = PACKED ? packed_is_bf16<R>() : C::IO == BF16;
        int stage = tile % C::STAGES;
        barrier_wait(full(false, stage), tile / C::STAGES & 1);
        u64 keys = operand_along_rows(keys_at(stage));
        pin(s);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < D / 16; k++)
            wgmma_shared<IS_BF16>(s, moved(queries, k / 4 * 64 * 128 + k % 4 * 32), moved(keys, k / 4 * TOKENS * 128 + k % 4 * 32), k > 0);
        wgmma_commit();
    }
    // Scores from the product, whose tile of keys may be overwritten then.
    template <bool PACKED>
    TQ_DEVICE void take_scores(float (&s)[SCORES], int tile) {
        pin(s);
        if constexpr (PACKED && is_lloyd(R::KEY)) {
            const float* norms = norms_at(tile % C::STAGES) + lane % 4 * 2;
#pragma unroll
            for (int j = 0; j < TOKENS / 8; j++) {
                float2 norm = *reinterpret_cast<const float2*>(norms + 8 * j);
                s[4 * j] *= norm.x, s[4 * j + 1] *= norm.y, s[4 * j + 2] *= norm.x, s[4 * j + 3] *= norm.y;
            }
        }
        warp_sync();
        release(false, tile);
    }
    // O += P V of a tile, started.
    template <bool PACKED>
    TQ_DEVICE void start_output(float (&o)[C::PARTS][OUT], const u32 (&weights)[TOKENS / 16][4], int tile) {
        constexpr bool IS_BF16 = PACKED ? packed_is_bf16<R>() : C::IO == BF16;
        int stage = tile % C::STAGES;
        barrier_wait(full(true, stage), tile / C::STAGES & 1);
        u64 values = PACKED ? operand_along_rows(values_at(stage)) : operand_across_rows(values_at(stage), TOKENS * 128);
#pragma unroll
        for (int i = 0; i < C::PARTS; i++) pin(o[i]);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < TOKENS / 16; k++) {
#pragma unroll
            for (int i = 0; i < C::PARTS; i++) {
                u32 at = PACKED ? k / 4 * D * 128 + k % 4 * 32 + i * C::COLUMNS * 128 : k * 16 * 128 + i * C::COLUMNS / 64 * TOKENS * 128;
                wgmma_registers<IS_BF16, !PACKED>(o[i], weights[k], moved(values, at));
            }
        }
        wgmma_commit();
    }
    TQ_DEVICE void release(bool values, int tile) {
        if (lane < TQ_ARRIVING_LANES) barrier_arrive(empty(values, tile % C::STAGES));
    }

    // Turns scores into weights; what is already summed has to be multiplied by `keep` if true is returned.
    // The sum is over weights as the product sees them: bf16 rounds so coarsely that it would show.
    template <bool IS_BF16>
    TQ_DEVICE bool soften(float (&s)[SCORES], Softmax& m, float (&keep)[2], i32 first, i32 end, bool edge) {
        int t = lane % 4;
        if constexpr (C::SOFTCAP) {
            float cap = p.softcap * LOG2E;
#pragma unroll
            for (int i = 0; i < SCORES; i++) {  // tanh(y) = 1 - 2 / (1 + exp(2 y))
                float y = s[i] * m.scale[i / 2 % 2] * (2.0f * LOG2E);
                s[i] = cap - 2.0f * cap / (1.0f + fast_exp2(y));
            }
        }
        if (edge) {
#pragma unroll
            for (int i = 0; i < SCORES; i++) {
                i32 at = first + i / 4 * 8 + 2 * t + i % 2, row = m.position[i / 2 % 2];
                bool seen = at <= row && at < end && (p.window <= 0 || at > row - p.window);
                if (!seen) s[i] = -__int_as_float(0x7f800000);
            }
        }
        float top[2] = {s[0], s[2]};
#pragma unroll
        for (int i = 0; i < SCORES; i++) top[i / 2 % 2] = fmaxf(top[i / 2 % 2], s[i]);
        bool late = false;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            top[r] = fmaxf(top[r], shuffle_xor(top[r], 1));
            top[r] = fmaxf(top[r], shuffle_xor(top[r], 2));
            if constexpr (!C::SOFTCAP) top[r] *= m.scale[r];
            late |= top[r] > m.top[r] + LATE_RESCALE;
        }
        late = any_lane(late);
        if (late) {
#pragma unroll
            for (int r = 0; r < 2; r++) {
                top[r] = fmaxf(top[r], m.top[r]);
                keep[r] = fast_exp2(m.top[r] - top[r]);
                m.top[r] = top[r];
                m.sum[r] *= keep[r];
            }
        }
        float sum[2][2] = {};
#pragma unroll
        for (int i = 0; i < SCORES; i++) {
            int r = i / 2 % 2;
            s[i] = fast_exp2(C::SOFTCAP ? s[i] - m.top[r] : fmaf(s[i], m.scale[r], -m.top[r]));
            if (IS_BF16 && i % 2) {
                u32 two = pack_bf16(s[i - 1], s[i]);
                s[i - 1] = __uint_as_float(two << 16), s[i] = __uint_as_float(two & 0xffff0000u);
            }
            if (i % 2) sum[r][0] += s[i - 1], sum[r][1] += s[i];
        }
        m.sum[0] += sum[0][0] + sum[0][1], m.sum[1] += sum[1][0] + sum[1][1];
        return late;
    }

    template <bool IS_BF16>
    TQ_DEVICE void pack(u32 (&weights)[TOKENS / 16][4], const float (&s)[SCORES]) {
#pragma unroll
        for (int i = 0; i < SCORES / 2; i++)
            weights[i / 4][i % 4] = IS_BF16 ? byte_permute(__float_as_uint(s[2 * i]), __float_as_uint(s[2 * i + 1]), 0x7632)
                                            : pack_f16(s[2 * i], s[2 * i + 1]);
    }

    // All tiles of a phase; token 0 of the phase stands at position `first`, and `end` is behind its last.
    template <bool PACKED>
    TQ_DEVICE void attend(float (&o)[C::PARTS][OUT], Softmax& m, int& tile, int tiles, i32 first, i32 end) {
        constexpr bool IS_BF16 = PACKED ? packed_is_bf16<R>() : C::IO == BF16;
        int group = warp / 4 - 2, g = lane / 4;
        u32 query_tile = base + group * C::QUERY_BYTES;
        warpgroup_sync(1 + group);  // the last phase's products have read the queries
#pragma unroll
        for (int half = 0; half < 2; half++) {
#pragma unroll 4
            for (int r = 0; r < 8; r++) {
                int row = warp % 4 * 16 + half * 8 + r;
                float scale = stage_query<R, C::IO, 64, PACKED>(p, x, 64 * group + row, query_tile, row, lane);
                if (r == g) m.scale[half] = scale * p.sm_scale * (C::SOFTCAP ? 1.0f / p.softcap : LOG2E);
            }
        }
        fence_async();
        warpgroup_sync(1 + group);
        u64 queries = operand_along_rows(query_tile);

        // tokens that every row of this consumer sees
        i32 inner_end = x.prefix_len + (x.first_row + 64 * group) / p.gqa_group + 1;
        inner_end = inner_end < end ? inner_end : end;
        i32 inner_begin = p.window > 0 ? x.prefix_len + (x.first_row + 64 * group + 63) / p.gqa_group + 1 - p.window : 0;
        auto soften_tile = [&](float(&s)[SCORES], float(&keep)[2], int j) {
            i32 at = first + j * TOKENS;
            return soften<IS_BF16>(s, m, keep, at, end, at < inner_begin || at + TOKENS > inner_end);
        };

        float s[SCORES], keep[2];
        u32 weights[TOKENS / 16][4];
        start_scores<PACKED>(s, queries, tile);
        wgmma_wait<0>();
        take_scores<PACKED>(s, tile);
        if (soften_tile(s, keep, 0)) rescale(o, keep);
        pack<IS_BF16>(weights, s);
#pragma unroll 1
        for (int j = 1; j < tiles; j++, tile++) {
            start_scores<PACKED>(s, queries, tile + 1);
            start_output<PACKED>(o, weights, tile);
            wgmma_wait<1>();
            take_scores<PACKED>(s, tile + 1);
            bool late = soften_tile(s, keep, j);
            wgmma_wait<0>();
#pragma unroll
            for (int i = 0; i < C::PARTS; i++) pin(o[i]);
            release(true, tile);
            if (late) rescale(o, keep);
            pack<IS_BF16>(weights, s);
        }
        start_output<PACKED>(o, weights, tile);
        wgmma_wait<0>();
#pragma unroll
        for (int i = 0; i < C::PARTS; i++) pin(o[i]);
        release(true, tile);
        tile++;
    }

    TQ_DEVICE void rescale(float (&o)[C::PARTS][OUT], const float (&keep)[2]) {
#pragma unroll
        for (int i = 0; i < C::PARTS; i++) {
#pragma unroll
            for (int k = 0; k < OUT; k++) o[i][k] *= keep[k / 2 % 2];
        }
    }

    TQ_DEVICE void consume() {
        int group = warp / 4 - 2, g = lane / 4, t = lane % 4;
        i32 row[2];
        Softmax m;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            row[r] = 64 * group + warp % 4 * 16 + 8 * r + g;
            m.top[r] = NEVER, m.sum[r] = 0.0f;
            m.position[r] = x.prefix_len + (x.first_row + row[r]) / p.gqa_group;
        }
        float o[C::PARTS][OUT];
#pragma unroll
        for (int i = 0; i < C::PARTS; i++) {
#pragma unroll
            for (int k = 0; k < OUT; k++) o[i][k] = 0.0f;
        }
        int tile = 0;
        if (packed_tiles > 0) attend<true>(o, m, tile, packed_tiles, packed_first, x.prefix_len);
        if (raw_tiles > 0) attend<false>(o, m, tile, raw_tiles, x.prefix_len + raw_first, x.end);
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float sum = m.sum[r];
            sum += shuffle_xor(sum, 1);
            sum += shuffle_xor(sum, 2);
            if (row[r] >= x.rows) continue;
            i64 at = query_at(p, x, row[r]);
            float keep = 1.0f, top = m.top[r];
            if (p.sinks) {
                float sink = p.sinks[at % (i64(p.num_kv_heads) * p.gqa_group)] * LOG2E;
                float above = fmaxf(top, sink);
                keep = fast_exp2(top - above);
                sum = sum * keep + fast_exp2(sink - above);
                top = above;
            }
            float factor = sum == 0.0f ? 0.0f : keep / sum;
            if (p.lse && t == 0) p.lse[at] = sum == 0.0f ? -__int_as_float(0x7f800000) : (top + log2f(sum)) * LN2;
            u16* out = static_cast<u16*>(p.out) + at * D;
#pragma unroll
            for (int i = 0; i < C::PARTS; i++) {
#pragma unroll
                for (int j = 0; j < OUT / 4; j++) {
                    float a = o[i][4 * j + 2 * r] * factor, b = o[i][4 * j + 2 * r + 1] * factor;
                    *reinterpret_cast<u32*>(out + i * C::COLUMNS + 8 * j + 2 * t) = C::IO == BF16 ? pack_bf16(a, b) : pack_f16(a, b);
                }
            }
        }
    }
};

}  // namespace tq
