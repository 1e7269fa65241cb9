// The rotation of keys and queries, y = x @ H, with the matrix and the order of sums of the crate's
// `hadamard.rs` and `rows/scalar.rs`, so that the codes are theirs. One warp holds a row: element
// lane + 32 * i in x[i], 0 from head_dim on.
//
// H is Sylvester's matrix S(D) where D is a power of two, else P (x) S(n), over sqrt(D): P is Paley's matrix of
// order D / n, and element p * n + j belongs to row p of P and row j of S. n is 4, 8 or 16 for every D
// here, so that n neighbouring lanes hold a piece. P is worked out by the compiler, as signs only.
#pragma once
#include "gpu.cuh"

namespace tq {

struct Construction {
    int order;      // of P; 1: there is none
    int field;      // elements of the field P is built over
    int kind;       // 1: order = field + 1. 2: order = 2 (field + 1)
    int sylvester;  // n
};

// The prime that n is a power of; 0 if n is no power of an odd prime.
TQ_ANYWHERE int prime_of(int n) {
    for (int p = 3; p <= n; p += 2) {
        if (n % p != 0) continue;
        while (n % p == 0) n /= p;
        return n == 1 ? p : 0;
    }
    return 0;
}
TQ_ANYWHERE Construction construction_of(int width) {
    int n = 1, odd = width;
    while (odd % 2 == 0) odd /= 2, n *= 2;
    if (odd == 1) return {1, 0, 0, width};
    for (int order = odd * 4; n >= 4; order *= 2, n /= 2) {
        if ((order - 1) % 4 == 3 && prime_of(order - 1)) return {order, order - 1, 1, n / 4};
        if ((order / 2 - 1) % 4 == 1 && prime_of(order / 2 - 1)) return {order, order / 2 - 1, 2, n / 4};
    }
    return {0, 0, 0, 0};
}

// Whether the elements of a field are squares. Element e is the polynomial whose coefficients are the
// digits of e in base `prime`.
struct Characters {
    int field, prime;
    signed char of[64];  // 1: a square, -1: none, 0: zero
};
// By the powers of x modulo x^degree - (polynomial with the digits of low); false unless they meet every
// element but zero.
TQ_ANYWHERE bool find_characters(Characters& c, int low) {
    for (int e = 0; e < 64; e++) c.of[e] = 0;
    int top = c.field / c.prime, power = 1;
    for (int exponent = 0; exponent < c.field - 1; exponent++) {
        if (power == 0 || c.of[power] != 0) return false;
        c.of[power] = exponent % 2 == 0 ? 1 : -1;
        int carry = power / top, shifted = power % top * c.prime, next = 0;
        for (int place = 1; place < c.field; place *= c.prime)
            next += (shifted / place % c.prime + carry * (low / place % c.prime)) % c.prime * place;
        power = next;
    }
    return true;
}
// The bordered character matrix of order field + 1: zero diagonal, border of ones.
TQ_ANYWHERE int bordered(const Characters& c, int kind, int i, int j) {
    if (i == 0 || j == 0) return i == j ? 0 : j == 0 && kind == 1 ? -1 : 1;
    int difference = 0;
    for (int place = 1; place < c.field; place *= c.prime)
        difference += ((i - 1) / place % c.prime + c.prime - (j - 1) / place % c.prime) % c.prime * place;
    return c.of[difference];
}

// P: bit i of column j is set where entry (i, j) is negative.
struct PaleyColumns {
    u64 at[64];
};
TQ_ANYWHERE PaleyColumns paley_columns(Construction m) {
    PaleyColumns columns = {};
    Characters c = {m.field, prime_of(m.field), {}};
    for (int low = 0; low < m.field; low++)
        if (find_characters(c, low)) break;
    for (int j = 0; j < m.order; j++) {
        for (int i = 0; i < m.order; i++) {
            int entry = 0;
            if (m.kind == 1) {
                entry = bordered(c, 1, i, j) + (i == j ? 1 : 0);
            } else {  // (x) [[1, 1], [1, -1]], and on the diagonal [[1, -1], [-1, -1]]
                entry = bordered(c, 2, i / 2, j / 2) * (i % 2 && j % 2 ? -1 : 1);
                if (i / 2 == j / 2) entry = i % 2 || j % 2 ? -1 : 1;
            }
            if (entry < 0) columns.at[j] |= u64(1) << i;
        }
    }
    return columns;
}
// Any two columns differ in half of their signs.
TQ_ANYWHERE bool orthogonal(const PaleyColumns& columns, int order) {
    for (int a = 0; a < order; a++) {
        for (int b = 0; b < a; b++) {
            int differ = 0;
            for (u64 bits = columns.at[a] ^ columns.at[b]; bits; bits &= bits - 1) differ++;
            if (2 * differ != order) return false;
        }
    }
    return true;
}

TQ_ANYWHERE float one_over_root(int n) {
    double root = n;
    for (int i = 0; i < 40; i++) root = (root + n / root) / 2;
    return float(1.0 / root);
}

template <int D>
struct Rotation {
    static constexpr int PER_LANE = (D + 31) / 32;
    static constexpr Construction MADE_OF = construction_of(D);
    static constexpr int ORDER = MADE_OF.order, SYLVESTER = MADE_OF.sylvester;
    static constexpr PaleyColumns PALEY = paley_columns(MADE_OF);
    static constexpr float SCALE = one_over_root(D);
    static_assert(ORDER == 1 || (ORDER >= 12 && ORDER <= 60 && SYLVESTER <= 16 && orthogonal(PALEY, ORDER)),
                  "no rotation of this head_dim");
};

// x @ (P (x) identity). 32 / n rows of P stand in one register of the warp.
template <int D>
TQ_DEVICE void multiply_by_paley(float (&x)[Rotation<D>::PER_LANE], int lane) {
    constexpr int N = Rotation<D>::PER_LANE, ORDER = Rotation<D>::ORDER, S = Rotation<D>::SYLVESTER, ROWS = 32 / S;
    u32 low[N], high[N];  // this lane's columns of P
    unrolled<N>([&](auto k) {
        constexpr int K = decltype(k)::value;
        low[K] = high[K] = 0;
        unrolled<ROWS>([&](auto row) {
            constexpr int J = ROWS * K + decltype(row)::value;
            if constexpr (J < ORDER) {
                constexpr u64 COLUMN = Rotation<D>::PALEY.at[J];
                if (lane / S == J % ROWS) low[K] = u32(COLUMN), high[K] = u32(COLUMN >> 32);
            }
        });
    });
    float y[N];
#pragma unroll
    for (int k = 0; k < N; k++) y[k] = 0.0f;
#pragma unroll
    for (int i = 0; i < ORDER; i++) {
        u32 z = __float_as_uint(shuffle(x[i / ROWS], i % ROWS * S + lane % S));
#pragma unroll
        for (int k = 0; k < N; k++) {
            u32 sign = (i < 32 ? low[k] << (31 - i % 32) : high[k] << (31 - i % 32)) & 0x80000000u;
            y[k] = __fadd_rn(y[k], __uint_as_float(z ^ sign));
        }
    }
#pragma unroll
    for (int k = 0; k < N; k++) x[k] = lane + 32 * k < D ? y[k] : 0.0f;
}

template <int D>
TQ_DEVICE void rotate_row(float (&x)[Rotation<D>::PER_LANE], int lane) {
    constexpr int S = Rotation<D>::SYLVESTER, N = Rotation<D>::PER_LANE;
#pragma unroll
    for (int bit = 1; bit < (S < 32 ? S : 32); bit *= 2) {
#pragma unroll
        for (int i = 0; i < N; i++) {
            float other = shuffle_xor(x[i], bit);
            x[i] = lane & bit ? other - x[i] : x[i] + other;
        }
    }
#pragma unroll
    for (int bit = 1; bit < S / 32; bit *= 2) {
#pragma unroll
        for (int i = 0; i < N; i++) {
            if (i & bit) continue;
            float a = x[i], b = x[i | bit];
            x[i] = a + b;
            x[i | bit] = a - b;
        }
    }
    if constexpr (Rotation<D>::ORDER > 1) multiply_by_paley<D>(x, lane);
#pragma unroll
    for (int i = 0; i < N; i++) x[i] *= Rotation<D>::SCALE;
}

TQ_DEVICE float warp_max(float x) {
#pragma unroll
    for (int bit = 16; bit; bit /= 2) x = fmaxf(x, shuffle_xor(x, bit));
    return x;
}
TQ_DEVICE float warp_sum(float x) {
#pragma unroll
    for (int bit = 16; bit; bit /= 2) x += shuffle_xor(x, bit);
    return x;
}

}  // namespace tq
