// Attention of many query rows with mma.sync: packed prefix and new tokens in one pass, for any card
// from sm_80 on.
//
// A warp owns M_TILES * 16 query rows and goes through every tile of TOKENS tokens alone; the CTA meets
// once a tile, when the next tile's buffers change hands: right after that barrier the tile to come is
// filled (raw rows by cp.async, packed units by the warps themselves from bytes that a cp.async brought in
// during the tile before), so that a whole tile of products hides each copy.
//
//   S = Q K^T: A = 16 query rows x 16 dims, B = 16 dims x 8 tokens, both by ldmatrix. Lloyd-Max keys go in
//       as bare codes, and their norms multiply S.
//   O = P V: A = P, which is S's accumulator as it lies; B = 16 tokens x 8 dims, by ldmatrix from packed
//       values (which lie transposed), by ldmatrix.trans from raw ones.
//
// With 32 rows a warp each B operand feeds two products; with 16 the shared memory is the limit.
#pragma once
#include "prefill.cuh"

namespace tq {

constexpr float P_BITS = 8.0f;        // P carries 2^8, so that fp16 holds it down to 2^-32

template <bool IS_BF16>
TQ_DEVICE void multiply(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    if constexpr (IS_BF16) mma_bf16(c, a[0], a[1], a[2], a[3], b0, b1);
    else mma_f16(c, a[0], a[1], a[2], a[3], b0, b1);
}

// M_TILES: 16 query rows each, of a warp. BUFFERS: tiles of keys and of values in shared memory. STAGED:
// packed bytes come through shared memory a tile ahead; else they are read when they are unpacked.
template <class Row_, int IO_, bool SOFTCAP_, int NUM_WARPS_, int M_TILES_, int TOKENS_, int BUFFERS_, bool STAGED_>
struct PrefillConfig {
    using R = Row_;
    static constexpr int IO = IO_, NUM_WARPS = NUM_WARPS_, M_TILES = M_TILES_, TOKENS = TOKENS_, BUFFERS = BUFFERS_;
    static constexpr bool SOFTCAP = SOFTCAP_, STAGED = STAGED_;
    static constexpr int D = R::D;
    static constexpr int THREADS = 32 * NUM_WARPS;
    static constexpr int WARP_ROWS = 16 * M_TILES;
    static constexpr int TILE_ROWS = WARP_ROWS * NUM_WARPS;
    static constexpr int UNITS = TOKENS / UNIT;  // of a tile
    // Each warp unpacks keys or values of one unit of a tile, or both where warps are few.
    static constexpr bool SPLIT_UNITS = NUM_WARPS >= 2 * UNITS;
    // Operands are loaded a step ahead of the product. With more dims the compiler leaves that loop rolled.
    static constexpr bool AHEAD = D <= 128;

    static constexpr int QUERY_BYTES = key_tile_bytes(D, TILE_ROWS);
    static constexpr int KEY_BYTES = key_tile_bytes(D, TOKENS);
    static constexpr int VALUE_BYTES = KEY_BYTES > packed_value_tile_bytes(D, TOKENS) ? KEY_BYTES : packed_value_tile_bytes(D, TOKENS);
    static constexpr int KEY_AT = QUERY_BYTES;
    static constexpr int VALUE_AT = KEY_AT + BUFFERS * KEY_BYTES;
    static constexpr int STAGING_AT = VALUE_AT + BUFFERS * VALUE_BYTES;
    static constexpr int NORM_AT = STAGING_AT + (STAGED ? UNITS * R::UNIT_BYTES : 0);  // float [BUFFERS][TOKENS]
    static constexpr int SHARED_BYTES = NORM_AT + (is_lloyd(R::KEY) ? BUFFERS * TOKENS * 4 : 0);

    static_assert(M_TILES == 1 || M_TILES == 2, "16 or 32 query rows a warp");
    static_assert(TOKENS % 32 == 0 && NUM_WARPS % UNITS == 0, "a warp unpacks one unit of a tile");
    static_assert(BUFFERS == 1 || BUFFERS == 2, "one tile, or one and the next");
    static_assert(R::KEY != BF16 || IO == BF16, "bf16 rows are multiplied as bf16");
};

template <class C>
struct Prefill {
    using R = typename C::R;
    static constexpr int D = C::D, M = C::M_TILES, TOKENS = C::TOKENS;
    static constexpr bool LLOYD = is_lloyd(R::KEY);
    const PrefillParams& p;
    u8* smem;
    u32 base;  // of smem
    int warp, lane, g, t;
    int first_row;  // this warp's of the CTA's rows
    QueryTile x;
    u32 plain_at, crossed_at;  // this lane's row and chunk for load_matrices, see below

    // What a row of this warp sees: all of [inner_begin, inner_end), some of [seen_begin, seen_end).
    i32 seen_begin, seen_end, inner_begin, inner_end;

    struct State {
        float o[M][D / 8][4];               // rows g, 8 + g of the tile; dims 2t, 2t + 1 of the block
        float top[M][2];                    // running maximum (log2), less P_BITS
        float sum[M][2];                    // this lane's part
        float scale[M][2];                  // packed phase: what makes a score a log2 (or the soft cap's argument)
    };

    TQ_DEVICE Prefill(const PrefillParams& params, u8* shared) : p(params), smem(shared), base(shared_address(shared)) {
        warp = __shfl_sync(TQ_FULL_WARP, threadIdx.x / 32, 0);  // so that the compiler sees one value a warp
        lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
        first_row = warp * C::WARP_ROWS;
        // Matrices in the order (rows 0-7, 8-15) x (chunks 0, 1): chunk first, as B operands want tiles
        // whose rows are columns of B, or row first, as A operands and transposed B operands do.
        int r = lane % 8, bit3 = lane / 8 % 2, bit4 = lane / 16;
        plain_at = (bit4 * 8 + r) * 128 + (bit3 ^ r) * 16;
        crossed_at = (bit3 * 8 + r) * 128 + (bit4 ^ r) * 16;
    }
    // Chunks 2 * pair, 2 * pair + 1 of rows first .. first + 15, in a tile of `rows` rows; `lane_at` is
    // tile + plain_at or crossed_at. Bits 5 and 6 of an address hold the chunk's upper bits.
    static TQ_DEVICE u32 matrices_at(u32 lane_at, int rows, int first, int pair) {
        return (lane_at ^ (pair % 4 * 32)) + (pair / 4 * rows + first) * 128;
    }
    TQ_DEVICE u32 key_tile(int buffer) { return base + C::KEY_AT + buffer * C::KEY_BYTES; }
    TQ_DEVICE u32 value_tile(int buffer) { return base + C::VALUE_AT + buffer * C::VALUE_BYTES; }

    // ---- queries: each warp stages the rows it uses ----

    TQ_DEVICE float score_unit() { return p.sm_scale * (C::SOFTCAP ? 1.0f / p.softcap : LOG2E); }
    TQ_DEVICE void stage_packed_queries(State& s) {
        float mine = 1.0f;  // of row `lane` of the warp
        constexpr int TOGETHER = (D & (D - 1)) == 0 ? 4 : 1;  // other rotations are long code
#pragma unroll TOGETHER
        for (int r = 0; r < C::WARP_ROWS; r++) {
            int row = first_row + r;
            float scale = stage_query<R, C::IO, C::TILE_ROWS, true>(p, x, row, base, row, lane);
            if (lane == r) mine = scale;
        }
#pragma unroll
        for (int m = 0; m < M; m++) {
#pragma unroll
            for (int h = 0; h < 2; h++) s.scale[m][h] = shuffle(mine, 16 * m + 8 * h + g) * score_unit();
        }
        warp_sync();
    }
    TQ_DEVICE void start_raw_queries() {
        constexpr int CHUNKS = D / 8;
        warp_sync();  // all lanes have read the last packed tile's
#pragma unroll 4
        for (int at = lane; at < C::WARP_ROWS * CHUNKS; at += 32) {
            int row = first_row + at / CHUNKS, chunk = at % CHUNKS;
            bool there = row < x.rows;
            const u16* q = static_cast<const u16*>(p.q) + query_at(p, x, there ? row : 0) * D;
            copy16_or_zero(base + tile_place(C::TILE_ROWS, row, chunk), q + chunk * 8, there);
        }
        copy_commit();
    }

    // ---- packed tiles ----

    // This warp's unit of the packed tile to come.
    struct Packed {
        i32 next;   // unit of the sequence to fetch next
        i32 last;   // last unit of the prefix
        i32 page;   // where `next` stands
        bool keys, values;
    };
    TQ_DEVICE i32 page_of(const Packed& a) {
        i32 unit = a.next < a.last ? a.next : a.last;
        return p.block_tables[i64(x.seq) * p.max_pages + unit / (p.page_size / UNIT)];
    }
    TQ_DEVICE const u8* source_of(const Packed& a) {
        i32 unit = a.next < a.last ? a.next : a.last;
        i32 index = unit % (p.page_size / UNIT) * p.num_kv_heads + x.head;
        return p.pages + i64(a.page < 0 ? 0 : a.page) * p.page_bytes + i64(index) * R::UNIT_BYTES;
    }
    TQ_DEVICE u8* staging() { return smem + C::STAGING_AT + warp % C::UNITS * R::UNIT_BYTES; }
    template <int BEGIN, int END>
    TQ_DEVICE void copy_part(const u8* from) {
        u32 to = shared_address(staging());
#pragma unroll
        for (int at = BEGIN; at < END; at += 512)
            if (at + 512 <= END || at + lane * 16 < END) copy16_or_zero(to + at + lane * 16, from + at + lane * 16, true);
    }
    // Starts the copy of this warp's next unit.
    TQ_DEVICE void fetch(Packed& a) {
        const u8* from = source_of(a);
        if constexpr (C::STAGED) {
            constexpr int FIELDS = R::UNIT_CODE_BYTES, VALUE_FIELDS = FIELDS + 32 * R::SCALE_FIELD;
            if (!C::SPLIT_UNITS) {
                copy_part<0, R::UNIT_BYTES>(from);
            } else if (a.keys) {
                copy_part<0, R::UNIT_KEY_BYTES>(from);
                if constexpr (is_lloyd(R::KEY)) copy_part<FIELDS, FIELDS + 32>(from);
            } else if (a.values) {
                copy_part<R::UNIT_KEY_BYTES, FIELDS>(from);
                if constexpr (is_uniform(R::VALUE)) copy_part<VALUE_FIELDS, VALUE_FIELDS + 64>(from);
            }
            copy_commit();
        }
        a.next += C::UNITS;
        a.page = page_of(a);
    }
    TQ_DEVICE float* norms(int buffer) { return reinterpret_cast<float*>(smem + C::NORM_AT) + buffer * TOKENS; }
    // Unpacks the unit fetched last into its place in a tile, and fetches the next.
    TQ_DEVICE void fill_packed(Packed& a, int buffer) {
        const u8* unit;
        i32 index = a.next;
        if constexpr (C::STAGED) {
            copy_wait<0>();
            warp_sync();
            unit = staging(), index -= C::UNITS;
        } else {
            unit = source_of(a);
        }
        const u8* fields = unit + R::UNIT_CODE_BYTES;
        int first = warp % C::UNITS * UNIT;
        if (a.keys) unpack_keys<R, TOKENS>(key_tile(buffer), norms(buffer), unit, fields, first, p.codebook, lane);
        if (a.values) unpack_values<R>(value_tile(buffer), unit + R::UNIT_KEY_BYTES, fields, first, x.prefix_len - index * UNIT, lane);
        if constexpr (C::STAGED) warp_sync();
        fetch(a);
    }

    // ---- raw tiles ----

    // Rows first .. first + TOKENS - 1 of the request into a tile; those behind its end are zero.
    TQ_DEVICE void copy_tile(u32 tile, const void* rows, i64 stride, i32 first) {
        constexpr int CHUNKS = D / 8, ALL = TOKENS * CHUNKS, STEP = C::THREADS / CHUNKS;
        constexpr bool WHOLE_ROWS = C::THREADS % CHUNKS == 0;  // then a thread's chunk is the same in every round
        const u16* request = static_cast<const u16*>(rows) + x.first_token * stride + x.head * D;
        u32 thread = threadIdx.x;
        opaque(thread);  // places are found anew for each tile, not kept in registers
        const u16* begin = request + i64(first + i32(thread / CHUNKS)) * stride + thread % CHUNKS * 8;
#pragma unroll
        for (int i = 0; i < (ALL + C::THREADS - 1) / C::THREADS; i++) {
            u32 at = thread + i * C::THREADS;
            if (ALL % C::THREADS != 0 && at >= ALL) break;
            i32 row = WHOLE_ROWS ? thread / CHUNKS + i * STEP : at / CHUNKS, chunk = WHOLE_ROWS ? thread % CHUNKS : at % CHUNKS;
            const u16* from = WHOLE_ROWS ? begin + i * STEP * stride : request + i64(first + row) * stride + chunk * 8;
            bool there = first + row < x.q_len;
            copy16_or_zero(tile + tile_place(TOKENS, row, chunk), there ? from : request, there);
        }
    }
    TQ_DEVICE void fill_raw(i32 first, int buffer) {
        copy_tile(key_tile(buffer), p.key, p.key_stride, first);
        copy_tile(value_tile(buffer), p.value, p.value_stride, first);
        copy_commit();
    }

    // ---- one tile ----

    using Scores = float[M][TOKENS / 8][4];

    // Hides what a row does not see; `first` is the position of the tile's first token.
    TQ_DEVICE void mask(Scores& c, i32 first, i32 limit) {
#pragma unroll
        for (int m = 0; m < M; m++) {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                i32 row = x.first_row + first_row + 16 * m + 8 * h + g;
                i32 end = x.prefix_len + row / p.gqa_group + 1 - first;
                i32 begin = p.window > 0 ? end - p.window : 0;
                end = end < limit - first ? end : limit - first;
#pragma unroll
                for (int n = 0; n < TOKENS / 8; n++) {
#pragma unroll
                    for (int k = 0; k < 2; k++) {
                        i32 at = 8 * n + 2 * t + k;
                        if (at < begin || at >= end) c[m][n][2 * h + k] = -__int_as_float(0x7f800000);
                    }
                }
            }
        }
    }

    // Moves the running maxima to this tile's; rarely taken.
    TQ_DEVICE void rescale(State& s, const float (&tops)[M][2]) {
#pragma unroll
        for (int m = 0; m < M; m++) {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                float top = tops[m][h];
                top = fmaxf(top, shuffle_xor(top, 1));
                top = fmaxf(top, shuffle_xor(top, 2));
                top = fmaxf(top - P_BITS, s.top[m][h]);
                float keep = fast_exp2(s.top[m][h] - top);
                s.top[m][h] = top, s.sum[m][h] *= keep;
#pragma unroll
                for (int i = 0; i < D / 8; i++) s.o[m][i][2 * h] *= keep, s.o[m][i][2 * h + 1] *= keep;
            }
        }
    }

    TQ_DEVICE void load_queries(u32 (&a)[M][4], u32 queries, int step) {
#pragma unroll
        for (int m = 0; m < M; m++) load_matrices(a[m], matrices_at(queries, C::TILE_ROWS, 16 * m, step));
    }
    template <bool PACKED>
    TQ_DEVICE void score(Scores& c, int buffer) {
        constexpr bool IS_BF16 = PACKED ? packed_is_bf16<R>() : C::IO == BF16;
        constexpr int STEPS = D / 16, PAIRS = TOKENS / 16, ALL = STEPS * PAIRS;
        u32 queries = base + first_row * 128 + crossed_at, keys = key_tile(buffer) + plain_at;
#pragma unroll
        for (int m = 0; m < M; m++) {
#pragma unroll
            for (int n = 0; n < TOKENS / 8; n++) c[m][n][0] = c[m][n][1] = c[m][n][2] = c[m][n][3] = 0.0f;
        }
        u32 a[2][M][4], b[2][4];
        if constexpr (C::AHEAD) {
            load_queries(a[0], queries, 0);
            load_matrices(b[0], matrices_at(keys, TOKENS, 0, 0));
        }
#pragma unroll
        for (int at = 0; at < ALL; at++) {
            int step = at / PAIRS, n = at % PAIRS * 2, now = C::AHEAD ? at + 1 : at;
            if constexpr (C::AHEAD) {
                if (n == 2 * PAIRS - 4 && step + 1 < STEPS) load_queries(a[(step + 1) % 2], queries, step + 1);
            } else {
                if (n == 0) load_queries(a[step % 2], queries, step);
            }
            if (now < ALL) load_matrices(b[now % 2], matrices_at(keys, TOKENS, now % PAIRS * 16, now / PAIRS));
#pragma unroll
            for (int m = 0; m < M; m++) {
                multiply<IS_BF16>(c[m][n], a[step % 2][m], b[at % 2][0], b[at % 2][1]);
                multiply<IS_BF16>(c[m][n + 1], a[step % 2][m], b[at % 2][2], b[at % 2][3]);
            }
        }
        if constexpr (PACKED && LLOYD) {
            const float2* norm_pairs = reinterpret_cast<const float2*>(norms(buffer));
#pragma unroll
            for (int n = 0; n < TOKENS / 8; n++) {
                float2 norm = norm_pairs[4 * n + t];
#pragma unroll
                for (int m = 0; m < M; m++) {
#pragma unroll
                    for (int k = 0; k < 4; k++) c[m][n][k] *= k % 2 ? norm.y : norm.x;
                }
            }
        }
    }

    TQ_DEVICE void load_values(u32 (&b)[4], u32 values, int at, bool packed) {
        int step = at / (D / 16), i = at % (D / 16);
        if (packed) load_matrices(b, matrices_at(values, D, 16 * i, step));
        else load_transposed(b, matrices_at(values, TOKENS, 16 * step, i));
    }

    template <bool PACKED>
    TQ_DEVICE void consume(State& s, int buffer, i32 first, i32 limit) {
        constexpr bool IS_BF16 = PACKED ? packed_is_bf16<R>() : C::IO == BF16;
        if (first >= seen_end || first + TOKENS <= seen_begin) return;
        auto unit = [&](int m, int h) { return PACKED ? s.scale[m][h] : score_unit(); };  // of c
        Scores c;
        score<PACKED>(c, buffer);
        if constexpr (C::SOFTCAP) {
            // cap * tanh(y) = cap - 2 cap / (1 + e^2y)
            float cap = p.softcap * LOG2E;
#pragma unroll
            for (int m = 0; m < M; m++) {
#pragma unroll
                for (int n = 0; n < TOKENS / 8; n++) {
#pragma unroll
                    for (int k = 0; k < 4; k++)
                        c[m][n][k] = cap - 2.0f * cap * fast_reciprocal(1.0f + fast_exp2(c[m][n][k] * (unit(m, k / 2) * (2.0f * LOG2E))));
                }
            }
        }
        if (first < inner_begin || first + TOKENS > inner_end || first + TOKENS > limit) mask(c, first, limit);

        auto scale = [&](int m, int h) { return C::SOFTCAP ? 1.0f : unit(m, h); };
        float tops[M][2];
        bool late = false;
#pragma unroll
        for (int m = 0; m < M; m++) {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                float top = c[m][0][2 * h];
#pragma unroll
                for (int n = 0; n < TOKENS / 8; n++) top = fmaxf(top, fmaxf(c[m][n][2 * h], c[m][n][2 * h + 1]));
                tops[m][h] = top * scale(m, h);
                late |= tops[m][h] > s.top[m][h] + (P_BITS + LATE_RESCALE);
            }
        }
        if (any_lane(late)) rescale(s, tops);

        u32 values = value_tile(buffer) + (PACKED ? plain_at : crossed_at);
        u32 b[2][4];
        if constexpr (C::AHEAD) load_values(b[0], values, 0, PACKED);
        unrolled<TOKENS / 16>([&](auto step_) {
            constexpr int STEP = decltype(step_)::value, PAIRS = D / 16;
            u32 weights[M][4];
#pragma unroll
            for (int m = 0; m < M; m++) {
#pragma unroll
                for (int n = 0; n < 2; n++) {
                    float(&w)[4] = c[m][2 * STEP + n];
#pragma unroll
                    for (int k = 0; k < 4; k++) {
                        w[k] = fast_exp2(w[k] * scale(m, k / 2) - s.top[m][k / 2]);
                        if constexpr (!IS_BF16) s.sum[m][k / 2] += w[k];
                    }
                    weights[m][2 * n] = IS_BF16 ? pack_bf16(w[0], w[1]) : pack_f16(w[0], w[1]);
                    weights[m][2 * n + 1] = IS_BF16 ? pack_bf16(w[2], w[3]) : pack_f16(w[2], w[3]);
                }
                // The sum is over weights as the product sees them: bf16 rounds so coarsely that it would show.
                if constexpr (IS_BF16) {
#pragma unroll
                    for (int k = 0; k < 4; k++) {
                        u32 pair = weights[m][k];
                        s.sum[m][k % 2] += __uint_as_float(pair << 16) + __uint_as_float(pair & 0xffff0000u);
                    }
                }
            }
#pragma unroll
            for (int i = 0; i < PAIRS; i++) {
                int at = STEP * PAIRS + i, now = C::AHEAD ? at + 1 : at;
                if (now < TOKENS / 16 * PAIRS) load_values(b[now % 2], values, now, PACKED);
#pragma unroll
                for (int m = 0; m < M; m++) {
                    multiply<IS_BF16>(s.o[m][2 * i], weights[m], b[at % 2][0], b[at % 2][1]);
                    multiply<IS_BF16>(s.o[m][2 * i + 1], weights[m], b[at % 2][2], b[at % 2][3]);
                }
            }
        });
    }

    // ---- the end ----

    // Rows go out through the warp's own rows of the query tile, so that a store is 16 bytes a lane.
    TQ_DEVICE void write_out(State& s) {
        warp_sync();
#pragma unroll
        for (int m = 0; m < M; m++) {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                int row = first_row + 16 * m + 8 * h + g;
                bool live = row < x.rows;
                float top = s.top[m][h], sum = s.sum[m][h], factor = 1.0f;
                sum += shuffle_xor(sum, 1);
                sum += shuffle_xor(sum, 2);
                if (p.sinks) {
                    float sink = p.sinks[x.head * p.gqa_group + (x.first_row + row) % p.gqa_group] * LOG2E;
                    float above = fmaxf(top, sink);
                    factor = fast_exp2(top - above);
                    sum = sum * factor + fast_exp2(sink - above);
                    top = above;
                }
                factor = sum == 0.0f ? 0.0f : factor / sum;  // nothing seen: 0
                if (p.lse && live && t == 0)
                    p.lse[query_at(p, x, row)] = sum == 0.0f ? -__int_as_float(0x7f800000) : (top + log2f(sum)) * LN2;
#pragma unroll
                for (int i = 0; i < D / 8; i++) {
                    float a = s.o[m][i][2 * h] * factor, b = s.o[m][i][2 * h + 1] * factor;
                    store_shared(base + tile_place(C::TILE_ROWS, row, i) + 4 * t, C::IO == BF16 ? pack_bf16(a, b) : pack_f16(a, b));
                }
            }
        }
        warp_sync();
        constexpr int CHUNKS = D / 8;
#pragma unroll 4
        for (int at = lane; at < C::WARP_ROWS * CHUNKS; at += 32) {
            int row = first_row + at / CHUNKS, chunk = at % CHUNKS;
            if (row >= x.rows) break;
            Words4 w = *reinterpret_cast<const Words4*>(smem + tile_place(C::TILE_ROWS, row, chunk));
            *reinterpret_cast<Words4*>(static_cast<u16*>(p.out) + query_at(p, x, row) * D + chunk * 8) = w;
        }
    }

    // ---- the whole ----

    TQ_DEVICE void find_seen() {
        i32 row = first_row, end = row + C::WARP_ROWS;
        end = end < x.rows ? end : x.rows;
        seen_begin = seen_end = 0;
        inner_begin = inner_end = 0;
        if (row >= end) return;
        inner_end = x.prefix_len + (x.first_row + row) / p.gqa_group + 1;
        seen_end = x.prefix_len + (x.first_row + end - 1) / p.gqa_group + 1;
        if (p.window > 0) seen_begin = inner_end - p.window, inner_begin = seen_end - p.window;
    }

    // Tile n of the list of all tiles lies in this buffer.
    static TQ_DEVICE int buffer_of(i32 n) { return C::BUFFERS == 2 ? n % 2 : 0; }

    TQ_DEVICE void run() {
        x = find_tile<C::TILE_ROWS>(p, lane);
        if (x.rows == 0) return;
        find_seen();
        State s;
#pragma unroll
        for (int m = 0; m < M; m++) {
#pragma unroll
            for (int h = 0; h < 2; h++) s.top[m][h] = NEVER, s.sum[m][h] = 0.0f;
#pragma unroll
            for (int i = 0; i < D / 8; i++) s.o[m][i][0] = s.o[m][i][1] = s.o[m][i][2] = s.o[m][i][3] = 0.0f;
        }
        // Packed tiles start with a unit that is seen: pages before it may be gone.
        i32 packed_first = x.begin / UNIT * UNIT;
        i32 packed = x.begin < x.prefix_len ? (x.prefix_len - packed_first + TOKENS - 1) / TOKENS : 0;
        i32 raw_first = x.begin > x.prefix_len ? x.begin - x.prefix_len : 0;
        i32 total = packed + (x.end - x.prefix_len - raw_first + TOKENS - 1) / TOKENS;

        if (packed > 0) {
            Packed a;
            a.next = packed_first / UNIT + warp % C::UNITS, a.last = (x.prefix_len - 1) / UNIT;
            a.keys = !C::SPLIT_UNITS || warp < C::UNITS;
            a.values = !C::SPLIT_UNITS || (warp >= C::UNITS && warp < 2 * C::UNITS);
            a.page = page_of(a);
            if constexpr (C::STAGED) fetch(a);
            stage_packed_queries(s);
            if constexpr (C::BUFFERS == 2) fill_packed(a, 0);
#pragma unroll 1
            for (i32 n = 0; n < packed; n++) {
                __syncthreads();
                i32 filled = C::BUFFERS == 2 ? n + 1 : n;
                if (filled < packed) fill_packed(a, buffer_of(filled));
                else fill_raw(raw_first, buffer_of(filled));
                if constexpr (C::BUFFERS == 1) __syncthreads();
                consume<true>(s, buffer_of(n), packed_first + n * TOKENS, x.prefix_len);
            }
        } else if constexpr (C::BUFFERS == 2) {
            fill_raw(raw_first, 0);
        }
        start_raw_queries();
#pragma unroll 1
        for (i32 n = packed; n < total; n++) {
            i32 first = raw_first + (n - packed) * TOKENS;
            if constexpr (C::BUFFERS == 2) copy_wait<0>();
            __syncthreads();
            if constexpr (C::BUFFERS == 2) {
                if (n + 1 < total) fill_raw(first + TOKENS, buffer_of(n + 1));
            } else {
                fill_raw(first, 0);
                copy_wait<0>();
                __syncthreads();
            }
            consume<false>(s, buffer_of(n), x.prefix_len + first, x.end);
        }
        copy_wait<0>();
        write_out(s);
    }
};

}  // namespace tq
