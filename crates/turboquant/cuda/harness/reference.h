// What the kernels are held to, on the host: the codec by the book, the page order as a table, and
// attention in double precision over the decoded rows. Slow and plain on purpose; shares only the
// sizes of layout.cuh with the kernels.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

namespace ref {

enum { BF16, F16, FP8, LLOYD4, LLOYD3, UNIFORM4, UNIFORM3 };

inline int bits_of(int format) { return format <= F16 ? 16 : format == FP8 ? 8 : format == LLOYD4 || format == UNIFORM4 ? 4 : 3; }
inline bool is_lloyd(int f) { return f == LLOYD4 || f == LLOYD3; }
inline bool is_uniform(int f) { return f == UNIFORM4 || f == UNIFORM3; }

// ---- 16- and 8-bit floats ----

inline float f16_value(uint16_t h) {
    int sign = h >> 15, e = h >> 10 & 31, m = h & 1023;
    float v = e == 31 ? (m ? NAN : INFINITY) : e ? std::ldexp(1024.0f + m, e - 25) : std::ldexp(float(m), -24);
    return sign ? -v : v;
}
inline uint16_t f16_bits(float f) {  // nearest even, saturating
    uint16_t sign = std::signbit(f) ? 0x8000 : 0;
    double a = std::fabs(double(f));
    if (std::isnan(f)) return sign | 0x7e00;
    if (a == 0) return sign;
    if (a >= 65520) return sign | 0x7bff;
    int e;
    std::frexp(a, &e);
    e = e - 1 < -14 ? -14 : e - 1;
    double m = std::nearbyint(std::ldexp(a, 10 - e));
    uint16_t r = e == -14 ? uint16_t(m) : uint16_t((e + 15) << 10) + uint16_t(m - 1024);
    return sign | r;
}
inline float bf16_value(uint16_t h) {
    uint32_t u = uint32_t(h) << 16;
    float f;
    std::memcpy(&f, &u, 4);
    return f;
}
inline uint16_t bf16_bits(float f) {
    uint32_t u;
    std::memcpy(&u, &f, 4);
    return uint16_t((u + 0x7fff + (u >> 16 & 1)) >> 16);
}
inline float e4m3_value(uint8_t b) {
    int e = b >> 3 & 15, m = b & 7;
    float v = e == 15 && m == 7 ? NAN : e ? std::ldexp(8.0f + m, e - 10) : std::ldexp(float(m), -9);
    return b & 0x80 ? -v : v;
}
inline uint8_t e4m3_bits(float f) {  // nearest even, saturating at 448
    uint8_t sign = std::signbit(f) ? 0x80 : 0;
    if (std::isnan(f)) return sign | 0x7f;
    double a = std::fabs(double(f));
    if (a == 0) return sign;
    if (a >= 448) return sign | 0x7e;
    int e;
    std::frexp(a, &e);
    e = e - 1 < -6 ? -6 : e - 1;
    double m = std::nearbyint(std::ldexp(a, 3 - e));
    int r = e == -6 ? int(m) : ((e + 7) << 3) + int(m) - 8;
    return sign | uint8_t(r > 0x7e ? 0x7e : r);
}

// ---- Lloyd-Max codebook of N(0, 1/head_dim) ----

inline std::vector<float> centroids(int dim, int bits) {
    double sigma = 1 / std::sqrt(double(dim));
    int n = 1 << bits;
    std::vector<double> c(n);
    for (int i = 0; i < n; i++) c[i] = -3.5 * sigma + 7 * sigma * (i + 0.5) / n;
    for (int round = 0; round < 200; round++) {
        std::vector<double> next = c;
        double moved = 0;
        for (int i = 0; i < n; i++) {
            double a = i ? (c[i - 1] + c[i]) / 2 : -10.5 * sigma, b = i + 1 < n ? (c[i] + c[i + 1]) / 2 : 10.5 * sigma;
            double mass = 0, moment = 0, h = (b - a) / 200;
            for (int k = 0; k <= 200; k++) {
                double x = a + h * k, w = k == 0 || k == 200 ? 0.5 : 1.0;
                double pdf = std::exp(-x * x / (2 * sigma * sigma)) / (sigma * std::sqrt(2 * M_PI));
                mass += w * pdf * h, moment += w * x * pdf * h;
            }
            if (mass > 1e-15) next[i] = moment / mass;
            moved = std::fmax(moved, std::fabs(next[i] - c[i]));
        }
        if (moved < 1e-10) break;
        c = next;
    }
    return std::vector<float>(c.begin(), c.end());
}
inline std::vector<float> midpoints(const std::vector<float>& c) {
    std::vector<float> m;
    for (size_t i = 0; i + 1 < c.size(); i++) m.push_back((c[i] + c[i + 1]) / 2);
    return m;
}
// The codebook the kernels use: odd integers in the centroids' proportions. The largest is the one up to
// 255 with which 16 levels fit well; 8 levels fit with 255.
inline std::vector<int> odd_codebook(const std::vector<float>& c) {
    std::vector<int> odd;
    double half_largest = c.size() == 16 ? 122.5 : 127.5;
    for (float x : c) {
        int v = int(std::nearbyint(std::fabs(x) / c.back() * half_largest - 0.5));
        v = v < 0 ? 0 : v > 127 ? 127 : v;
        odd.push_back(x < 0 ? -(2 * v + 1) : 2 * v + 1);
    }
    return odd;
}
// As the kernels take it: bytes v, of the positive half for 16 centroids, of all 8 (~v if negative) otherwise.
inline std::vector<int8_t> codebook_bytes(const std::vector<int>& odd) {
    std::vector<int8_t> bytes(8, 0);
    for (size_t i = 0; i < 8 && i < odd.size(); i++) {
        int o = odd[odd.size() == 16 ? 8 + i : i];
        bytes[i] = int8_t(o > 0 ? o / 2 : ~(-o / 2));
    }
    return bytes;
}

// Entry (i, j) of Paley's first matrix of order q + 1, q a prime, 3 (mod 4): ones in the first row and
// on the diagonal, -1 in the rest of the first column, else whether i - j is a square modulo q.
inline int paley(int order, int i, int j) {
    int q = order - 1;
    if (i == j || i == 0) return 1;
    if (j == 0) return -1;
    for (int k = 1; k < q; k++)
        if (k * k % q == (i - j + q) % q) return 1;
    return -1;
}
// y = x @ H over sqrt(dim), or x @ H^T: Sylvester's matrix for a power of two, else Paley's (x) Sylvester's.
inline void rotate(std::vector<double>& x, bool back = false) {
    int dim = int(x.size()), n = dim & -dim, order = 1;
    if (n != dim) {
        order = dim == 80 || dim == 160 ? 20 : dim == 48 || dim == 96 || dim == 192 ? 12 : 0;
        if (order == 0) std::fprintf(stderr, "no rotation of head_dim %d\n", dim), std::exit(2);
        n = dim / order;
    }
    std::vector<double> y(dim, 0.0);
    for (int i = 0; i < dim; i++)
        for (int j = 0; j < dim; j++) {
            int sylvester = __builtin_parity((i % n) & (j % n)) ? -1 : 1;
            int sign = sylvester * (order == 1 ? 1 : paley(order, i / n, j / n));
            if (back) y[i] += x[j] * sign;
            else y[j] += x[i] * sign;
        }
    for (int j = 0; j < dim; j++) x[j] = y[j] / std::sqrt(double(dim));
}

// ---- rows ----

struct Row {  // one head at one token
    std::vector<int> key, value;             // codes, or the bits of a float
    uint16_t norm = 0, scale = 0, low = 0;   // fp16 fields
};

// The nearest thing to a tie: how far the decision was from a threshold, in units of the step.
struct Margins {
    std::vector<float> key, value;
};

inline Row encode(const std::vector<float>& k, const std::vector<float>& v, int key_format, int value_format,
                  const std::vector<float>& mids, Margins* margins = nullptr) {
    int dim = int(k.size());
    Row r;
    r.key.resize(dim), r.value.resize(dim);
    if (is_lloyd(key_format)) {
        double square = 0;
        for (float x : k) square += double(x) * x;
        float n = float(std::sqrt(square));
        std::vector<double> y(dim);
        for (int i = 0; i < dim; i++) y[i] = k[i] / (double(n) + 1e-8);
        rotate(y);
        for (int i = 0; i < dim; i++) {
            int code = 0;
            float margin = 1e9f;
            for (float m : mids) code += y[i] >= m, margin = std::fmin(margin, float(std::fabs(y[i] - m)));
            r.key[i] = code;
            if (margins) margins->key.push_back(margin * std::sqrt(float(dim)));
        }
        r.norm = f16_bits(n);
    } else {
        for (int i = 0; i < dim; i++)
            r.key[i] = key_format == FP8 ? e4m3_bits(k[i]) : key_format == BF16 ? bf16_bits(k[i]) : f16_bits(k[i]);
    }
    if (is_uniform(value_format)) {
        int levels = (1 << bits_of(value_format)) - 1;
        float lo = v[0], hi = v[0];
        for (float x : v) lo = std::fmin(lo, x), hi = std::fmax(hi, x);
        float s = (hi - lo) / levels;
        if (s <= 1e-8f) s = 1e-8f;
        for (int i = 0; i < dim; i++) {
            float u = (v[i] - lo) / s + 0.5f;
            int q = int(u);
            r.value[i] = q < 0 ? 0 : q > levels ? levels : q;
            if (margins) margins->value.push_back(std::fabs(u - std::nearbyint(u)));
        }
        r.scale = f16_bits(s), r.low = f16_bits(lo);
    } else {
        for (int i = 0; i < dim; i++)
            r.value[i] = value_format == FP8 ? e4m3_bits(v[i]) : value_format == BF16 ? bf16_bits(v[i]) : f16_bits(v[i]);
    }
    return r;
}

inline float odd_norm(const Row& r, const std::vector<int>& book) {
    int64_t square = 0;
    for (int c : r.key) square += int64_t(book[c]) * book[c];
    return std::sqrt(float(square));
}
// Key in the rotated basis when the format rotates, with the kernels' rounded codebook and the fp16 norm.
inline std::vector<double> decode_key(const Row& r, int format, const std::vector<int>& book) {
    std::vector<double> k;
    if (is_lloyd(format)) {
        double square = 0;
        for (int c : r.key) square += double(book[c]) * book[c];
        for (int c : r.key) k.push_back(f16_value(r.norm) * book[c] / std::sqrt(square));
    } else {
        for (int c : r.key) k.push_back(format == FP8 ? e4m3_value(c) : format == BF16 ? bf16_value(c) : f16_value(c));
    }
    return k;
}
inline std::vector<double> decode_value(const Row& r, int format) {
    std::vector<double> v;
    for (int c : r.value)
        v.push_back(is_uniform(format) ? c * double(f16_value(r.scale)) + f16_value(r.low)
                    : format == FP8    ? e4m3_value(c)
                    : format == BF16   ? bf16_value(c)
                                       : f16_value(c));
    return v;
}

// ---- pages ----

struct Layout {
    int dim, key_format, value_format, num_kv_heads, page_size;
    std::vector<int> book;  // odd_codebook, Lloyd-Max keys only
    int key_words() const { return dim * bits_of(key_format) / 64; }
    int value_words() const { return dim * bits_of(value_format) / 64; }
    int num_fields() const { return is_lloyd(key_format) + 2 * is_uniform(value_format); }
    int64_t unit_code_bytes() const { return 128 * int64_t(key_words() + value_words()); }
    int64_t unit_bytes() const { return unit_code_bytes() + 32 * num_fields(); }
    int slot_bytes() const { return dim * (bits_of(key_format) + bits_of(value_format)) / 8 + 2 * num_fields(); }
    int64_t page_bytes() const { return int64_t(page_size) * num_kv_heads * slot_bytes(); }

    static int word_byte(int words, int word, int lane) {
        int full = words / 4 * 4;
        if (word < full) return word / 4 * 512 + lane * 16 + word % 4 * 4;
        if (words - full >= 2 && word < full + 2) return full * 128 + lane * 8 + (word - full) * 4;
        return (full + (words - full >= 2 ? 2 : 0)) * 128 + lane * 4;
    }
    // Bits of one code: pieces of (bit within the unit's section, which bits of the code, how many).
    struct Piece {
        int64_t bit;
        int from, count;
    };
    std::vector<Piece> key_pieces(int token, int d) const {
        int tile = token / 8, g = token % 8, words = key_words();
        auto at = [&](int word, int t, int bit) { return int64_t(word_byte(words, word, 4 * g + t)) * 8 + bit; };
        if (key_format == LLOYD4) {
            if (dim % 32 && d >= dim - 16) return {{at(words - 1, d % 16 / 4, tile * 16 + d % 4 * 4), 0, 4}};
            int word = d / 32 * 2 + tile, t = d % 32 / 8, e = d % 8;  // magnitude e; its sign
            return {{at(word, t, 4 * e), 0, 3}, {at(word, t, e < 4 ? 8 * e + 7 : 8 * (e - 4) + 3), 3, 1}};
        }
        if (key_format == LLOYD3) {
            int block = d / 64, step = d % 64 / 32, t = d % 32 / 8, e = d % 8;
            return {{at(3 * block + step, t, tile * 16 + e % 4 * 4 + e / 4 * 2), 0, 2},
                    {at(3 * block + 2, t, tile * 16 + e % 4 * 4 + step * 2 + e / 4), 2, 1}};
        }
        if (key_format == FP8) return {{at(d / 16 * 2 + tile, d % 16 / 4, d % 4 * 8), 0, 8}};
        return {{at(d / 16 * 4 + tile * 2 + d % 4 / 2, d % 16 / 4, d % 2 * 16), 0, 16}};
    }
    std::vector<Piece> value_pieces(int token, int d) const {
        int high = token / 8, t = token % 8 / 2, half = token % 2, g = d % 8, words = value_words();
        auto at = [&](int word, int bit) { return int64_t(word_byte(words, word, 4 * g + t)) * 8 + bit; };
        if (value_format == UNIFORM4) {
            if (dim % 32 && d >= dim - 16) return {{at(words - 1, half * 16 + high * 8 + d % 16 / 8 * 4), 0, 4}};
            return {{at(d / 32 * 2 + high, half * 16 + d % 32 / 8 * 4), 0, 4}};
        }
        if (value_format == UNIFORM3) {
            int block = d / 64, c = d % 64 / 8, x = 3 * block + high, y = 3 * block + 2;
            if (c < 3) return {{at(x, half * 16 + 3 * c), 0, 3}};
            if (c < 5) return {{at(x, half * 16 + 9 + 3 * (c - 3)), 0, 3}};
            if (c < 7) return {{at(y, half * 16 + high * 8 + 3 * (c - 5)), 0, 3}};
            return {{at(x, half * 16 + 15), 0, 1}, {at(y, half * 16 + high * 8 + 6), 1, 2}};
        }
        if (value_format == FP8) return {{at(d / 16 * 2 + high, (d % 16 / 8 * 2 + half) * 8), 0, 8}};
        return {{at(d / 16 * 4 + high * 2 + d % 16 / 8, half * 16), 0, 16}};
    }
    uint8_t* key_section(uint8_t* page, int token, int head) const {
        return page + (int64_t(token / 16) * num_kv_heads + head) * unit_bytes();
    }
    uint16_t* fields(uint8_t* page, int token, int head) const {  // stride 16 from a field to the next
        int u = token % 16, place = u % 8 / 2 * 4 + u / 8 * 2 + u % 2;
        return reinterpret_cast<uint16_t*>(key_section(page, token, head) + unit_code_bytes()) + place;
    }
    static void put(uint8_t* section, const std::vector<Piece>& pieces, int code) {
        for (const Piece& p : pieces)
            for (int i = 0; i < p.count; i++) {
                uint8_t mask = uint8_t(1 << ((p.bit + i) % 8)), &byte = section[(p.bit + i) / 8];
                byte = code >> (p.from + i) & 1 ? byte | mask : byte & ~mask;
            }
    }
    static int get(const uint8_t* section, const std::vector<Piece>& pieces) {
        int code = 0;
        for (const Piece& p : pieces)
            for (int i = 0; i < p.count; i++) code |= (section[(p.bit + i) / 8] >> ((p.bit + i) % 8) & 1) << (p.from + i);
        return code;
    }
    // 4-bit codes 0..15 to sign and magnitude and back.
    static int sign_magnitude(int code) { return code >= 8 ? code - 8 : 8 | (7 - code); }
    static int from_sign_magnitude(int x) { return x & 8 ? 7 - (x & 7) : x + 8; }

    // The norm as stored: norm * gain / |codes|, 5 exponent and 11 mantissa bits, nearest even.
    uint16_t folded(uint16_t norm, float length) const {
        float x = f16_value(norm) * gain() / length;
        if (x == 0) return 0;
        int e;
        std::frexp(double(x), &e);
        e = e - 1 < -14 ? -14 : e - 1;
        double m = std::nearbyint(std::ldexp(double(x), 11 - e));
        int64_t r = e == -14 ? int64_t(m) : (int64_t(e + 15) << 11) + int64_t(m) - 2048;
        return uint16_t(r > 0xffff ? 0xffff : r);
    }
    double unfolded(uint16_t stored) const {  // what one unit of an odd integer code is worth
        int e = stored >> 11, m = stored & 2047;
        return (e ? std::ldexp(2048.0 + m, e - 26) : std::ldexp(double(m), -25)) / gain();
    }
    float gain() const { return dim < 32 ? 512.0f : dim < 80 ? 1024.0f : dim < 128 ? 1536.0f : 2048.0f; }
    // A Lloyd-Max key as the page holds it: its folded norm times integer codes.
    std::vector<double> stored_key(uint8_t* page, int token, int head) const {
        std::vector<double> k;
        double unit = unfolded(*fields(page, token, head));
        for (int d = 0; d < dim; d++) {
            int code = get(key_section(page, token, head), key_pieces(token % 16, d));
            k.push_back(unit * book[key_format == LLOYD4 ? from_sign_magnitude(code) : code]);
        }
        return k;
    }
    void write(uint8_t* page, int token, int head, const Row& r) const {
        uint8_t* k = key_section(page, token, head);
        for (int d = 0; d < dim; d++) {
            put(k, key_pieces(token % 16, d), key_format == LLOYD4 ? sign_magnitude(r.key[d]) : r.key[d]);
            put(k + 128 * key_words(), value_pieces(token % 16, d), r.value[d]);
        }
        uint16_t* f = fields(page, token, head);
        if (is_lloyd(key_format)) *f = folded(r.norm, odd_norm(r, book)), f += 16;
        if (is_uniform(value_format)) f[0] = r.scale, f[16] = r.low;
    }
    // Sets every bit that belongs to this token and head.
    void mark(uint8_t* page, int token, int head) const {
        uint8_t* k = key_section(page, token, head);
        for (int d = 0; d < dim; d++) {
            put(k, key_pieces(token % 16, d), 0xffff);
            put(k + 128 * key_words(), value_pieces(token % 16, d), 0xffff);
        }
        uint16_t* f = fields(page, token, head);
        for (int i = 0; i < num_fields(); i++) f[16 * i] = 0xffff;
    }
    Row read(const uint8_t* page_, int token, int head) const {
        uint8_t* page = const_cast<uint8_t*>(page_);
        Row r;
        const uint8_t* k = key_section(page, token, head);
        for (int d = 0; d < dim; d++) {
            int code = get(k, key_pieces(token % 16, d));
            r.key.push_back(key_format == LLOYD4 ? from_sign_magnitude(code) : code);
            r.value.push_back(get(k + 128 * key_words(), value_pieces(token % 16, d)));
        }
        const uint16_t* f = fields(page, token, head);
        uint16_t stored = 0;
        if (is_lloyd(key_format)) stored = *f, f += 16;
        if (is_uniform(value_format)) r.scale = f[0], r.low = f[16];
        if (is_lloyd(key_format)) {
            float length = odd_norm(r, book);
            uint16_t n = 0;  // the smallest norm that is stored so: folded() never falls
            for (int step = 0x4000; step; step /= 2)
                if (n + step < 0x7c00 && folded(n + step - 1, length) < stored) n += step;
            r.norm = n;
        }
        return r;
    }
};

// ---- attention of one query row over decoded rows [len][dim], in double ----

struct Attention {
    std::vector<double> out;
    double lse;  // natural log, sink included
};
inline Attention attend(const std::vector<double>& q, const std::vector<std::vector<double>>& keys,
                        const std::vector<std::vector<double>>& values, int begin, int end, double sm_scale,
                        double softcap, const float* sink) {
    std::vector<double> score;
    double top = sink ? *sink : -INFINITY;
    for (int i = begin; i < end; i++) {
        double s = 0;
        for (size_t d = 0; d < q.size(); d++) s += q[d] * keys[i][d];
        s *= sm_scale;
        if (softcap > 0) s = softcap * std::tanh(s / softcap);
        score.push_back(s);
        top = std::fmax(top, s);
    }
    Attention a;
    a.out.assign(q.size(), 0.0);
    double sum = sink ? std::exp(*sink - top) : 0;
    for (int i = begin; i < end; i++) {
        double p = std::exp(score[i - begin] - top);
        sum += p;
        for (size_t d = 0; d < q.size(); d++) a.out[d] += p * values[i][d];
    }
    if (sum > 0)
        for (double& o : a.out) o /= sum;
    a.lse = sum > 0 ? top + std::log(sum) : -INFINITY;
    return a;
}

}  // namespace ref
