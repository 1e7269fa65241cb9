// Attention of many query rows with mma.sync: packed prefix and new tokens in one pass, for any card
// from sm_80 on.
//
// A warp owns M_TILES * 16 query rows and goes through every tile of TOKENS tokens, or through its half
// of it, alone; the CTA meets once a tile, when the next tile's buffers change hands: after that barrier
// the tile to come is filled (raw rows by cp.async, packed units by the warps themselves from bytes that a
// cp.async brought in during the tile before), so that a whole tile of products hides each copy.
//
//   S = Q K^T: A = 16 query rows x 16 dims, B = 16 dims x 8 tokens, both by ldmatrix.
//   O = P V: A = P, which is S's accumulator as it lies; B = 16 tokens x 8 dims, by ldmatrix from packed
//       values (which lie transposed), by ldmatrix.trans from raw ones.
//
// Lloyd-Max keys go into the product as bare codes, exact, and their norms multiply S: fp16 keys that
// carry the norm would be rounded once more. As for the rotated query, fp16 costs up to 2e-3 of the
// output where logits vary much (standard deviation 4.5); with INTEGER_KEYS it is int8 in two terms,
// 256 * high + low, as many products as fp16 takes, and costs nothing.
//
// With 32 rows a warp each B operand feeds two products; with 16 the shared memory is the limit.
#pragma once
#include "prefill.cuh"

namespace tq {

constexpr float LOG2E = 1.4426950408889634f;
constexpr float LN2 = 0.6931471805599453f;
constexpr float NEVER = -1e30f;       // running maximum before the first score
constexpr float LATE_RESCALE = 6.0f;  // a score may pass the running maximum by 2^6 before it is moved
constexpr float P_BITS = 8.0f;        // P carries 2^8, so that fp16 holds it down to 2^-32

enum Product { OF_F16, OF_BF16, OF_S8 };
template <Product KIND>
TQ_DEVICE void multiply(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    if constexpr (KIND == OF_BF16) mma_bf16(c, a[0], a[1], a[2], a[3], b0, b1);
    else mma_f16(c, a[0], a[1], a[2], a[3], b0, b1);
}
template <Product KIND>
TQ_DEVICE void multiply(i32 (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    mma_s8(c, a[0], a[1], a[2], a[3], b0, b1);
}

// M_TILES: 16 query rows each, of a warp. SPLITS: parts of a tile's tokens; each has its own warps for all
// query rows. BUFFERS: tiles of keys and of values in shared memory. STAGED: packed bytes come through
// shared memory a tile ahead; else they are read when they are unpacked. INTERLEAVED: they are unpacked
// between the products of P and V, not before the tile's. INTEGER_KEYS: see above.
template <class Row_, int IO_, bool SOFTCAP_, int NUM_WARPS_, int M_TILES_, int TOKENS_, int SPLITS_, int BUFFERS_, bool STAGED_,
          bool INTERLEAVED_, bool INTEGER_KEYS_>
struct PrefillConfig {
    using R = Row_;
    static constexpr int IO = IO_, NUM_WARPS = NUM_WARPS_, M_TILES = M_TILES_, TOKENS = TOKENS_, SPLITS = SPLITS_, BUFFERS = BUFFERS_;
    static constexpr bool SOFTCAP = SOFTCAP_, STAGED = STAGED_;
    static constexpr int D = R::D;
    static constexpr int THREADS = 32 * NUM_WARPS;
    static constexpr int WARP_ROWS = 16 * M_TILES;
    static constexpr int ROW_WARPS = NUM_WARPS / SPLITS;
    static constexpr int TILE_ROWS = WARP_ROWS * ROW_WARPS;
    static constexpr int SEEN = TOKENS / SPLITS;  // tokens of a tile that a warp goes through
    static constexpr int UNITS = TOKENS / UNIT;  // of a tile
    // Each warp unpacks keys or values of one unit of a tile, or both where warps are few.
    static constexpr bool SPLIT_UNITS = NUM_WARPS >= 2 * UNITS;
    static constexpr bool INTERLEAVED = INTERLEAVED_ && !SPLIT_UNITS && STAGED && BUFFERS == 2;
    static constexpr bool INTEGER_KEYS = INTEGER_KEYS_ && is_lloyd(R::KEY);
    // Operands are loaded a step ahead of the product; with more dims that spills.
    static constexpr bool AHEAD = D <= 128;
    // Keeps the compiler from bringing all loads of S to its start, which spills where the terms of integer
    // keys stand in a row. With more dims they are a loop.
    static constexpr bool IN_ORDER = D <= 64;

    static constexpr int QUERY_BYTES = key_tile_bytes(D, TILE_ROWS);
    static constexpr int KEY_BYTES = key_tile_bytes(D, TOKENS);
    static constexpr int VALUE_BYTES = KEY_BYTES > packed_value_tile_bytes(D, TOKENS) ? KEY_BYTES : packed_value_tile_bytes(D, TOKENS);
    static constexpr int KEY_AT = QUERY_BYTES;
    static constexpr int VALUE_AT = KEY_AT + BUFFERS * KEY_BYTES;
    static constexpr int STAGING_AT = VALUE_AT + BUFFERS * VALUE_BYTES;
    static constexpr int NORM_AT = STAGING_AT + (STAGED ? UNITS * R::UNIT_BYTES : 0);  // float [BUFFERS][TOKENS]
    static constexpr int SCALE_AT = NORM_AT + (is_lloyd(R::KEY) ? BUFFERS * TOKENS * 4 : 0);  // float [TILE_ROWS]
    static constexpr int HALF_AT = SCALE_AT + TILE_ROWS * 4;                                 // i32 [TILE_ROWS]
    static constexpr int SHARED_BYTES = HALF_AT + (INTEGER_KEYS ? TILE_ROWS * 4 : 0);

    static_assert(M_TILES == 1 || M_TILES == 2, "16 or 32 query rows a warp");
    static_assert(TOKENS % 32 == 0 && NUM_WARPS % UNITS == 0, "a warp unpacks one unit of a tile");
    static_assert(SPLITS == 1 || (SPLITS == 2 && SEEN % 64 == 0), "a part of a packed value tile is whole blocks");
    static_assert(SPLITS == 1 || BUFFERS * (KEY_BYTES + VALUE_BYTES) >= TILE_ROWS * D * 4, "parts merge where the tiles were");
    static_assert(BUFFERS == 1 || BUFFERS == 2, "one tile, or one and the next");
    static_assert(R::KEY != BF16 || IO == BF16, "bf16 rows are multiplied as bf16");
};

template <class C>
struct Prefill {
    using R = typename C::R;
    static constexpr int D = C::D, M = C::M_TILES, TOKENS = C::TOKENS, SEEN = C::SEEN;
    static constexpr bool INTEGER = C::INTEGER_KEYS;
    static constexpr bool LLOYD = is_lloyd(R::KEY);
    static constexpr int BLOCKS64 = (D + 63) / 64;  // 64 dims of integer keys: four chunks
    const PrefillParams& p;
    u8* smem;
    u32 base;  // of smem
    int warp, lane, g, t;
    int first_row, part;  // this warp's of the CTA's rows, and of a tile's tokens
    QueryTile x;
    u32 plain_at, crossed_at;  // this lane's row and chunk for load_matrices, see below

    // What a row of this warp sees: all of [inner_begin, inner_end), some of [seen_begin, seen_end).
    i32 seen_begin, seen_end, inner_begin, inner_end;

    struct State {
        float o[M][D / 8][4];               // rows g, 8 + g of the tile; dims 2t, 2t + 1 of the block
        float top[M][2];                    // running maximum (log2), less P_BITS
        float sum[M][2];                    // this lane's part
        float scale[M][2];                  // stored units to log2 (or soft cap argument), of this phase
    };

    TQ_DEVICE Prefill(const PrefillParams& params, u8* shared) : p(params), smem(shared), base(shared_address(shared)) {
        warp = __shfl_sync(TQ_FULL_WARP, threadIdx.x / 32, 0);  // so that the compiler sees one value a warp
        lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
        first_row = warp % C::ROW_WARPS * C::WARP_ROWS, part = C::SPLITS == 1 ? 0 : warp / C::ROW_WARPS;
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

    // ---- queries ----

    TQ_DEVICE float* scales() { return reinterpret_cast<float*>(smem + C::SCALE_AT); }
    TQ_DEVICE i32* halves() { return reinterpret_cast<i32*>(smem + C::HALF_AT); }
    TQ_DEVICE float* norms(int buffer) { return reinterpret_cast<float*>(smem + C::NORM_AT) + buffer * TOKENS; }

    // Integer keys and queries lie in the order in which a lane unpacks keys: of 64 dims, chunk t of 16
    // bytes holds dims 8t .. 8t + 7 and 32 + 8t .. 32 + 8t + 7 (of a last 16 dims, 4t .. 4t + 3).
    static TQ_DEVICE int integer_place(int d) {
        bool last = D % 32 != 0 && d >= D / 32 * 32;
        int column = last ? d % 32 / 4 : d % 32 / 8, byte = last ? d % 4 : d % 8;
        return d / 64 * 64 + column * 16 + d % 64 / 32 * 8 + byte;
    }
    // Writes a rotated row in two int8 terms, the high ones in the first half of its chunks. Returns what a
    // product times the key's norm has to be multiplied with; `half` is half the sum of the high
    // terms, since a code v stands for v + 1/2.
    TQ_DEVICE float stage_integer_query(int row, i32& half) {
        constexpr int N = (D + 31) / 32;
        const u16* q = static_cast<const u16*>(p.q) + query_at(p, x, row) * D;
        float v[N], top = 0.0f;
#pragma unroll
        for (int i = 0; i < N; i++) {
            u16 raw = row < x.rows && lane + 32 * i < D ? q[lane + 32 * i] : u16(0);
            v[i] = C::IO == BF16 ? bf16_to_f32(raw) : f16_to_f32(raw);
        }
        rotate_row<D>(v, lane);
#pragma unroll
        for (int i = 0; i < N; i++) top = fmaxf(top, fabsf(v[i]));
        top = warp_max(top);
        if constexpr (D % 64 != 0) {  // dims that are not there
            for (int at = lane; at < 8 * BLOCKS64; at += 32) store_shared(base + tile_place(C::TILE_ROWS, row, at), 0, 0, 0, 0);
            warp_sync();
        }
        float inverse = top > 0.0f ? 32512.0f / top : 0.0f;  // 127 * 256
        half = 0;
#pragma unroll
        for (int i = 0; i < N; i++) {
            int d = lane + 32 * i;
            if (d >= D) break;
            i32 whole = __float2int_rn(v[i] * inverse), high = (whole + 128) >> 8;
            int place = integer_place(d);
            smem[tile_place(C::TILE_ROWS, row, place / 16) + place % 16] = u8(high);
            smem[tile_place(C::TILE_ROWS, row, place / 16 + 4 * BLOCKS64) + place % 16] = u8(whole - high * 256);
            half += whole;
        }
#pragma unroll
        for (int bit = 16; bit; bit /= 2) half += __shfl_xor_sync(TQ_FULL_WARP, half, bit);
        half = (half + 256) >> 9;
        return top * (2.0f / (127.0f * R::NORM_GAIN));
    }
    TQ_DEVICE float score_unit() { return p.sm_scale * (C::SOFTCAP ? 1.0f / p.softcap : LOG2E); }
    TQ_DEVICE void stage_packed_queries(State& s) {
#pragma unroll 4
        for (int i = 0; i < C::TILE_ROWS / C::NUM_WARPS; i++) {
            int row = warp * (C::TILE_ROWS / C::NUM_WARPS) + i;
            i32 half = 0;
            float scale;
            if constexpr (INTEGER) scale = stage_integer_query(row, half);
            else scale = stage_query<R, C::IO, C::TILE_ROWS, true>(p, x, row, base, row, lane);
            if (lane == 0) {
                scales()[row] = scale;
                if constexpr (INTEGER) halves()[row] = half;
            }
        }
        __syncthreads();
#pragma unroll
        for (int m = 0; m < M; m++) {
#pragma unroll
            for (int h = 0; h < 2; h++) s.scale[m][h] = scales()[first_row + 16 * m + 8 * h + g] * score_unit();
        }
    }
    TQ_DEVICE void start_raw_queries(State& s) {
        constexpr int CHUNKS = D / 8;
#pragma unroll 4
        for (int at = threadIdx.x; at < C::TILE_ROWS * CHUNKS; at += C::THREADS) {
            int row = at / CHUNKS, chunk = at % CHUNKS;
            bool there = row < x.rows;
            const u16* q = static_cast<const u16*>(p.q) + query_at(p, x, there ? row : 0) * D;
            copy16_or_zero(base + tile_place(C::TILE_ROWS, row, chunk), q + chunk * 8, there);
        }
        copy_commit();
#pragma unroll
        for (int m = 0; m < M; m++) s.scale[m][0] = s.scale[m][1] = score_unit();
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
    // Chunk of a row of integer keys: exchanged so that neither ldmatrix nor the stores of eight lanes, four
    // chunks of two rows, meet in a bank.
    static TQ_DEVICE u32 code_place(int row, int chunk) {
        return (chunk / 8 * TOKENS + row) * 128 + ((chunk % 8) ^ (row % 2 * 4 + row % 8 / 2)) * 16;
    }
    // Lloyd-Max codes of a unit's keys into rows first .. first + 15 of the tile, and their norms.
    template <int PART, int PARTS>
    TQ_DEVICE void unpack_codes(int buffer, const u8* unit, int first) {
        u32 tile = key_tile(buffer);
        if constexpr (INTEGER) {
            u32 held[4] = {};
            for_each_key_step<R>(unit, p.codebook, lane, [&](int step, u32 x0, u32 x1, u32 y0, u32 y1) {
                if (step / 2 * PARTS / ((key_steps<R>() + 1) / 2) != PART) return;
                u32 at[2] = {tile + code_place(first + g, step / 2 * 4 + t), tile + code_place(first + 8 + g, step / 2 * 4 + t)};
                if (step % 2) {
                    store_shared(at[0], held[0], held[1], x0, x1);
                    store_shared(at[1], held[2], held[3], y0, y1);
                } else if (step == key_steps<R>() - 1) {
                    store_shared(at[0], x0, x1, 0, 0);
                    store_shared(at[1], y0, y1, 0, 0);
                } else {
                    held[0] = x0, held[1] = x1, held[2] = y0, held[3] = y1;
                }
            });
        } else {
            // v + 1/2: 1024 + 128 + v as its bits, less 1152, plus 1/2
            auto two = [](u32 codes, u32 selector) {
                return add_f16x2(add_f16x2(byte_permute(codes ^ 0x80808080u, 0x64646464u, selector), 0xe480e480u), 0x38003800u);
            };
            for_each_key_step<R>(unit, p.codebook, lane, [&](int step, u32 x0, u32 x1, u32 y0, u32 y1) {
                if (step * PARTS / key_steps<R>() != PART) return;
                auto put = [&](int row, u32 a, u32 b) {
                    if (32 * step + 32 <= D)
                        store_shared(tile + tile_place(TOKENS, row, 4 * step + t), two(a, 0x4140u), two(a, 0x4342u), two(b, 0x4140u), two(b, 0x4342u));
                    else  // 16 dims, four a lane
                        store_shared(tile + tile_place(TOKENS, row, 4 * step + t / 2) + t % 2 * 8, two(a, 0x4140u), two(a, 0x4342u));
                };
                put(first + g, x0, x1), put(first + 8 + g, y0, y1);
            });
        }
        if (PART == 0 && lane < UNIT) {
            u32 norm = reinterpret_cast<const u16*>(unit + R::UNIT_CODE_BYTES)[field_place(lane)];
            norms(buffer)[first + lane] = low_norm(norm) * (INTEGER ? NORM_UNIT : NORM_UNIT * (2.0f / R::NORM_GAIN));
        }
    }
    // The unit fetched last goes into its place in a tile, at once or in parts.
    struct Fill {
        const u8* unit;
        int buffer;
        i32 valid;  // tokens of the prefix, from the unit's first on
    };
    TQ_DEVICE Fill begin_fill(const Packed& a, int buffer) {
        if constexpr (C::STAGED) {
            copy_wait<0>();
            warp_sync();
            return {staging(), buffer, x.prefix_len - (a.next - C::UNITS) * UNIT};
        } else {
            return {source_of(a), buffer, x.prefix_len - a.next * UNIT};
        }
    }
    template <int PART, int PARTS>
    TQ_DEVICE void fill_part(const Packed& a, const Fill& f) {
        int first = warp % C::UNITS * UNIT;
        if (!C::SPLIT_UNITS || a.keys) {
            if constexpr (LLOYD) unpack_codes<PART, PARTS>(f.buffer, f.unit, first);
            else unpack_keys<R, TOKENS, PART, PARTS>(key_tile(f.buffer), f.unit, first, p.codebook, lane);
        }
        if (!C::SPLIT_UNITS || a.values) unpack_values<R, PART, PARTS>(value_tile(f.buffer), f.unit, first, f.valid, lane);
    }
    TQ_DEVICE void end_fill(Packed& a) {
        if constexpr (C::STAGED) warp_sync();
        fetch(a);
    }
    TQ_DEVICE void fill_packed(Packed& a, int buffer) {
        Fill f = begin_fill(a, buffer);
        fill_part<0, 1>(a, f);
        end_fill(a);
    }

    // ---- raw tiles ----

    TQ_DEVICE void fill_raw(i32 first, int buffer) {
        i64 key_at = x.first_token * p.key_stride + x.head * D, value_at = x.first_token * p.value_stride + x.head * D;
        copy_rows<D, TOKENS, C::THREADS>(key_tile(buffer), static_cast<const u16*>(p.key) + key_at, p.key_stride, first, x.q_len, threadIdx.x);
        copy_rows<D, TOKENS, C::THREADS>(value_tile(buffer), static_cast<const u16*>(p.value) + value_at, p.value_stride, first, x.q_len, threadIdx.x);
        copy_commit();
    }

    // ---- one tile ----

    using Scores = float[M][SEEN / 8][4];

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
                for (int n = 0; n < SEEN / 8; n++) {
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
    // Adds the products of STEPS steps over the chunks of keys and, from step `first` on, of queries.
    template <int STEPS, Product KIND, class T>
    TQ_DEVICE void multiply_keys(T (&c)[M][SEEN / 8][4], u32 queries, int first, u32 keys) {
        constexpr int PAIRS = SEEN / 16, ALL = STEPS * PAIRS;
        u32 a[2][M][4], b[2][4];
        if constexpr (C::AHEAD) {
            load_queries(a[0], queries, first);
            load_matrices(b[0], matrices_at(keys, TOKENS, 0, 0));
        }
#pragma unroll
        for (int at = 0; at < ALL; at++) {
            int step = at / PAIRS, n = at % PAIRS * 2, now = C::AHEAD ? at + 1 : at;
            if constexpr (C::AHEAD) {
                if (n == 2 * PAIRS - 4 && step + 1 < STEPS) load_queries(a[(step + 1) % 2], queries, first + step + 1);
            } else {
                if (n == 0) load_queries(a[step % 2], queries, first + step);
            }
            if (now < ALL) load_matrices(b[now % 2], matrices_at(keys, TOKENS, now % PAIRS * 16, now / PAIRS));
            if constexpr (C::IN_ORDER) warp_sync();
#pragma unroll
            for (int m = 0; m < M; m++) {
                multiply<KIND>(c[m][n], a[step % 2][m], b[at % 2][0], b[at % 2][1]);
                multiply<KIND>(c[m][n + 1], a[step % 2][m], b[at % 2][2], b[at % 2][3]);
            }
        }
    }
    template <class T>
    static TQ_DEVICE void set_zero(T (&c)[M][SEEN / 8][4]) {
#pragma unroll
        for (int m = 0; m < M; m++) {
#pragma unroll
            for (int n = 0; n < SEEN / 8; n++) c[m][n][0] = c[m][n][1] = c[m][n][2] = c[m][n][3] = 0;
        }
    }

    // Products of queries and integer keys over 256, as floats that have MAGIC_VALUE too much: the low term
    // first; a 256th of it, and of the halves, goes on into the high term's sums. They stay below 2^22, so
    // with MAGIC added their bits are that float.
    static constexpr i32 MAGIC = 0x4b400000;
    static constexpr float MAGIC_VALUE = 12582912.0f;
    TQ_DEVICE void score_integers(i32 (&dot)[M][SEEN / 8][4], u32 queries, u32 keys) {
        int r = lane % 8;  // as plain_at, in code_place's order
        keys += (lane / 16 * 8 + r) * 128 + (lane / 8 % 2 ^ (r % 2 * 4 + r / 2)) * 16;
        constexpr int STEPS = 2 * BLOCKS64;  // of a term
        set_zero(dot);
#pragma unroll (C::IN_ORDER ? 2 : 1)
        for (int term = 1; term >= 0; term--) {
            if constexpr (BLOCKS64 == 1) multiply_keys<STEPS, OF_S8>(dot, queries ^ (term * 64), 0, keys);
            else if constexpr (BLOCKS64 % 2 == 0) multiply_keys<STEPS, OF_S8>(dot, queries + term * (BLOCKS64 / 2 * C::TILE_ROWS * 128), 0, keys);
            else multiply_keys<STEPS, OF_S8>(dot, queries, term * STEPS, keys);
            if (term == 1) {
#pragma unroll
                for (int m = 0; m < M; m++) {
                    i32 half[2] = {halves()[first_row + 16 * m + g] + MAGIC, halves()[first_row + 16 * m + 8 + g] + MAGIC};
#pragma unroll
                    for (int n = 0; n < SEEN / 8; n++) {
#pragma unroll
                        for (int k = 0; k < 4; k++) dot[m][n][k] = (dot[m][n][k] >> 8) + half[k / 2];
                    }
                }
            }
        }
    }

    template <bool PACKED>
    TQ_DEVICE void score(Scores& c, int buffer) {
        constexpr Product KIND = (PACKED ? packed_is_bf16<R>() : C::IO == BF16) ? OF_BF16 : OF_F16;
        u32 queries = base + first_row * 128 + crossed_at, keys = key_tile(buffer) + part * (SEEN * 128);
        i32 dot[M][SEEN / 8][4];
        if constexpr (PACKED && INTEGER) {
            score_integers(dot, queries, keys);
        } else {
            set_zero(c);
            multiply_keys<D / 16, KIND>(c, queries, 0, keys + plain_at);
        }
        if constexpr (PACKED && LLOYD) {
            const float2* norm_pairs = reinterpret_cast<const float2*>(norms(buffer) + part * SEEN);
#pragma unroll
            for (int n = 0; n < SEEN / 8; n++) {
                float2 pair = norm_pairs[4 * n + t];
                float norm[2] = {pair.x, pair.y};
                float off[2] = {norm[0] * -MAGIC_VALUE, norm[1] * -MAGIC_VALUE};  // exact: norms have 12 bits
#pragma unroll
                for (int m = 0; m < M; m++) {
#pragma unroll
                    for (int k = 0; k < 4; k++)
                        c[m][n][k] = INTEGER ? __fmaf_rn(__int_as_float(dot[m][n][k]), norm[k % 2], off[k % 2]) : c[m][n][k] * norm[k % 2];
                }
            }
        }
    }

    TQ_DEVICE void load_values(u32 (&b)[4], u32 values, int at, bool packed) {
        int step = at / (D / 16), i = at % (D / 16);
        if (packed) load_matrices(b, matrices_at(values, D, 16 * i, step));
        else load_transposed(b, matrices_at(values, TOKENS, 16 * step, i));
    }

    // With FILL it also unpacks the next tile's unit between the products of P and V.
    template <bool PACKED, bool FILL = false>
    TQ_DEVICE void consume(State& s, int buffer, i32 first, i32 limit, Packed* a = nullptr) {
        constexpr Product KIND = (PACKED ? packed_is_bf16<R>() : C::IO == BF16) ? OF_BF16 : OF_F16;
        first += part * SEEN;
        if (first >= seen_end || first + SEEN <= seen_begin) {
            if constexpr (FILL) fill_packed(*a, buffer ^ 1);
            return;
        }
        Scores c;
        score<PACKED>(c, buffer);
        if constexpr (C::SOFTCAP) {
            // cap * tanh(y) = cap - 2 cap / (1 + e^2y)
            float cap = p.softcap * LOG2E;
#pragma unroll
            for (int m = 0; m < M; m++) {
#pragma unroll
                for (int n = 0; n < SEEN / 8; n++) {
#pragma unroll
                    for (int k = 0; k < 4; k++)
                        c[m][n][k] = cap - 2.0f * cap * fast_reciprocal(1.0f + fast_exp2(c[m][n][k] * (s.scale[m][k / 2] * (2.0f * LOG2E))));
                }
            }
        }
        if (first < inner_begin || first + SEEN > inner_end || first + SEEN > limit) mask(c, first, limit);

        auto scale = [&](int m, int h) { return C::SOFTCAP ? 1.0f : s.scale[m][h]; };
        float tops[M][2];
        bool late = false;
#pragma unroll
        for (int m = 0; m < M; m++) {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                float top = c[m][0][2 * h];
#pragma unroll
                for (int n = 0; n < SEEN / 8; n++) top = fmaxf(top, fmaxf(c[m][n][2 * h], c[m][n][2 * h + 1]));
                tops[m][h] = top * scale(m, h);
                late |= tops[m][h] > s.top[m][h] + (P_BITS + LATE_RESCALE);
            }
        }
        if (any_lane(late)) rescale(s, tops);

        Fill next;
        if constexpr (FILL) next = begin_fill(*a, buffer ^ 1);
        u32 values = value_tile(buffer) + (PACKED ? plain_at + part * (SEEN / 64 * D * 128) : crossed_at + part * (SEEN * 128));
        u32 b[2][4];
        if constexpr (C::AHEAD) load_values(b[0], values, 0, PACKED);
        unrolled<SEEN / 16>([&](auto step_) {
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
                        s.sum[m][k / 2] += w[k];
                    }
                    weights[m][2 * n] = KIND == OF_BF16 ? pack_bf16(w[0], w[1]) : pack_f16(w[0], w[1]);
                    weights[m][2 * n + 1] = KIND == OF_BF16 ? pack_bf16(w[2], w[3]) : pack_f16(w[2], w[3]);
                }
            }
#pragma unroll
            for (int i = 0; i < PAIRS; i++) {
                int at = STEP * PAIRS + i, now = C::AHEAD ? at + 1 : at;
                if (now < SEEN / 16 * PAIRS) load_values(b[now % 2], values, now, PACKED);
#pragma unroll
                for (int m = 0; m < M; m++) {
                    multiply<KIND>(s.o[m][2 * i], weights[m], b[at % 2][0], b[at % 2][1]);
                    multiply<KIND>(s.o[m][2 * i + 1], weights[m], b[at % 2][2], b[at % 2][3]);
                }
                if constexpr (FILL) {
                    if (i == D / 32) fill_part<STEP, SEEN / 16>(*a, next);
                }
            }
        });
        if constexpr (FILL) end_fill(*a);
    }

    // ---- the end ----

    // The parts of a tile's tokens come together in the warps of part 0.
    TQ_DEVICE void merge_parts(State& s) {
        constexpr int GROUP = 32 * C::ROW_WARPS, OTHERS = M * (D / 8);
        float4* outputs = reinterpret_cast<float4*>(smem + C::KEY_AT) + threadIdx.x % GROUP;  // [M * D / 8][GROUP]
        float4* states = reinterpret_cast<float4*>(smem) + threadIdx.x % GROUP;               // [M][GROUP], over the queries
        static_assert(M * GROUP * 16 <= C::QUERY_BYTES && OTHERS * GROUP * 16 <= C::STAGING_AT - C::KEY_AT, "");
        __syncthreads();
        if (part == 1) {
#pragma unroll
            for (int m = 0; m < M; m++) {
                states[m * GROUP] = make_float4(s.top[m][0], s.top[m][1], s.sum[m][0], s.sum[m][1]);
#pragma unroll
                for (int i = 0; i < D / 8; i++) outputs[(m * (D / 8) + i) * GROUP] = make_float4(s.o[m][i][0], s.o[m][i][1], s.o[m][i][2], s.o[m][i][3]);
            }
        }
        __syncthreads();
        if (part == 1) return;
#pragma unroll
        for (int m = 0; m < M; m++) {
            float4 other = states[m * GROUP];
            float tops[2] = {fmaxf(s.top[m][0], other.x), fmaxf(s.top[m][1], other.y)};
            float mine[2] = {fast_exp2(s.top[m][0] - tops[0]), fast_exp2(s.top[m][1] - tops[1])};
            float theirs[2] = {fast_exp2(other.x - tops[0]), fast_exp2(other.y - tops[1])};
            s.sum[m][0] = s.sum[m][0] * mine[0] + other.z * theirs[0], s.sum[m][1] = s.sum[m][1] * mine[1] + other.w * theirs[1];
            s.top[m][0] = tops[0], s.top[m][1] = tops[1];
#pragma unroll
            for (int i = 0; i < D / 8; i++) {
                float4 o = outputs[(m * (D / 8) + i) * GROUP];
                float w[4] = {o.x, o.y, o.z, o.w};
#pragma unroll
                for (int k = 0; k < 4; k++) s.o[m][i][k] = s.o[m][i][k] * mine[k / 2] + w[k] * theirs[k / 2];
            }
        }
        named_sync(32 * C::ROW_WARPS);  // the states are read, rows may go over them
    }

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
            i32 n = 0;
            if constexpr (C::INTERLEAVED) {
#pragma unroll 1
                for (; n < packed - 1; n++) {
                    __syncthreads();
                    consume<true, true>(s, buffer_of(n), packed_first + n * TOKENS, x.prefix_len, &a);
                }
            }
#pragma unroll 1
            for (; n < packed; n++) {
                __syncthreads();
                i32 filled = C::BUFFERS == 2 ? n + 1 : n;
                if (!C::INTERLEAVED && filled < packed) fill_packed(a, buffer_of(filled));
                else fill_raw(raw_first, buffer_of(filled));
                if constexpr (C::BUFFERS == 1) __syncthreads();
                consume<true>(s, buffer_of(n), packed_first + n * TOKENS, x.prefix_len);
            }
        } else if constexpr (C::BUFFERS == 2) {
            fill_raw(raw_first, 0);
        }
        if (packed > 0) __syncthreads();  // the packed phase's queries are read
        start_raw_queries(s);
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
        if constexpr (C::SPLITS == 2) {
            merge_parts(s);
            if (part == 1) return;
        }
        write_out(s);
    }
};

}  // namespace tq
