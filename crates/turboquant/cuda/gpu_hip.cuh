// The machine words of gpu.cuh for AMD, and CUDA's names for what the compiler has built in. clang's
// `-x hip` needs neither a HIP header nor a device library for it. Compiled for gfx942 and gfx1100; not run
// on any card.
//
// The kernels count in warps of 32 lanes. A wave of 64 (gfx942) holds two of them, which may part ways:
// shuffles and votes stay inside a warp's half. Products do not use the matrix units: they keep the operand
// layout of mma.sync and fetch what they need by shuffles. Copies are not asynchronous.
#pragma once

#define __host__ __attribute__((host))
#define __device__ __attribute__((device))
#define __global__ __attribute__((global))
#define __shared__ __attribute__((shared))
#define __forceinline__ inline __attribute__((always_inline))
#define __align__(n) __attribute__((aligned(n)))
#define __launch_bounds__(...) __attribute__((launch_bounds(__VA_ARGS__)))
#define __grid_constant__

// ---- where a thread stands ----

struct HipIndex {
    u32 x;
};
#define threadIdx (HipIndex{__builtin_amdgcn_workitem_id_x()})
#define blockIdx (HipIndex{__builtin_amdgcn_workgroup_id_x()})
#define blockDim (HipIndex{__builtin_amdgcn_workgroup_size_x()})
#define gridDim (HipIndex{__builtin_amdgcn_grid_size_x() / __builtin_amdgcn_workgroup_size_x()})

// ---- numbers ----

struct alignas(8) float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
TQ_DEVICE float2 make_float2(float x, float y) { return {x, y}; }
TQ_DEVICE float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

TQ_DEVICE u32 __float_as_uint(float x) { return __builtin_bit_cast(u32, x); }
TQ_DEVICE float __uint_as_float(u32 x) { return __builtin_bit_cast(float, x); }
TQ_DEVICE float __int_as_float(i32 x) { return __builtin_bit_cast(float, x); }
TQ_DEVICE i32 __float2int_rn(float x) { return i32(__builtin_rintf(x)); }

// Rounded each for itself: never fused.
TQ_DEVICE float __fadd_rn(float a, float b) {
#pragma clang fp contract(off)
    return a + b;
}
TQ_DEVICE float __fsub_rn(float a, float b) {
#pragma clang fp contract(off)
    return a - b;
}
TQ_DEVICE float __fmul_rn(float a, float b) {
#pragma clang fp contract(off)
    return a * b;
}
TQ_DEVICE float __fdiv_rn(float a, float b) {
#pragma clang fp contract(off)
    return a / b;
}
TQ_DEVICE float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
TQ_DEVICE float __fsqrt_rn(float x) { return __builtin_sqrtf(x); }

TQ_DEVICE float fabsf(float x) { return __builtin_fabsf(x); }
TQ_DEVICE float fminf(float a, float b) { return __builtin_fminf(a, b); }
TQ_DEVICE float fmaxf(float a, float b) { return __builtin_fmaxf(a, b); }
TQ_DEVICE float log2f(float x) { return __builtin_amdgcn_logf(x); }
TQ_DEVICE float tanhf(float x) {  // 1 - 2 / (e^2x + 1), to about 1e-7
    return 1.0f - 2.0f / (__builtin_amdgcn_exp2f(x * 2.8853900817779268f) + 1.0f);
}

// ---- a warp: 32 lanes, half a wave where that has 64 ----

#if __AMDGCN_WAVEFRONT_SIZE__ == 64
TQ_DEVICE u32 hip_wave_lane() { return __builtin_amdgcn_mbcnt_hi(~0u, __builtin_amdgcn_mbcnt_lo(~0u, 0u)); }
TQ_DEVICE u32 hip_ballot(bool b) { return u32(__builtin_amdgcn_ballot_w64(b) >> (hip_wave_lane() & 32u)); }
#else
TQ_DEVICE u32 hip_wave_lane() { return __builtin_amdgcn_mbcnt_lo(~0u, 0u); }
TQ_DEVICE u32 hip_ballot(bool b) { return __builtin_amdgcn_ballot_w32(b); }
#endif

template <class T>
TQ_DEVICE T __shfl_sync(u32, T x, int lane) {
    i32 from = i32(((hip_wave_lane() & 32u) | (u32(lane) & 31u)) * 4u);
    if constexpr (sizeof(T) == 8) {
        u64 bits = __builtin_bit_cast(u64, x);
        u32 low = u32(__builtin_amdgcn_ds_bpermute(from, i32(u32(bits))));
        u32 high = u32(__builtin_amdgcn_ds_bpermute(from, i32(u32(bits >> 32))));
        return __builtin_bit_cast(T, u64(high) << 32 | low);
    } else {
        static_assert(sizeof(T) == 4, "words of 32 or 64 bits");
        return __builtin_bit_cast(T, __builtin_amdgcn_ds_bpermute(from, __builtin_bit_cast(i32, x)));
    }
}
template <class T>
TQ_DEVICE T __shfl_xor_sync(u32 all, T x, int mask) {
    return __shfl_sync(all, x, int(hip_wave_lane()) ^ mask);
}
template <class T>
TQ_DEVICE T __shfl_up_sync(u32 all, T x, int by) {
    int lane = int(hip_wave_lane() & 31u);
    return __shfl_sync(all, x, lane < by ? lane : lane - by);
}
TQ_DEVICE u32 __ballot_sync(u32, bool b) { return hip_ballot(b); }
TQ_DEVICE int __ffs(u32 x) { return __builtin_ffs(i32(x)); }
TQ_DEVICE int __any_sync(u32, bool b) { return hip_ballot(b) != 0; }
TQ_DEVICE void __syncwarp() {
    __builtin_amdgcn_fence(__ATOMIC_ACQ_REL, "wavefront");
    __builtin_amdgcn_wave_barrier();
}

// ---- a block, the card ----

TQ_DEVICE void __syncthreads() {
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
    __builtin_amdgcn_s_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}

namespace tq {

TQ_DEVICE void prefetch(const void* p) { __builtin_prefetch(p); }
// Words passed from one multiprocessor to another: each arrives for itself, in no order.
TQ_DEVICE void send(float* at, float x) { __hip_atomic_store(at, x, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT); }
TQ_DEVICE void send(float* at, const float4& x) { send(at, x.x), send(at + 1, x.y), send(at + 2, x.z), send(at + 3, x.w); }
TQ_DEVICE void send(float* at, const float2& x) { send(at, x.x), send(at + 1, x.y); }
TQ_DEVICE void receive(const float* at, float& x) { x = __hip_atomic_load(at, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT); }
TQ_DEVICE void receive(const float* at, float4& x) { receive(at, x.x), receive(at + 1, x.y), receive(at + 2, x.z), receive(at + 3, x.w); }
TQ_DEVICE void receive(const float* at, float2& x) { receive(at, x.x), receive(at + 1, x.y); }
TQ_DEVICE void start_after_previous() {}
TQ_DEVICE void pause() { __builtin_amdgcn_s_sleep(2); }

typedef _Float16 HalfPair __attribute__((ext_vector_type(2)));
typedef u32 HipWords4 __attribute__((ext_vector_type(4)));

TQ_DEVICE float f16_to_f32(u16 h) { return float(__builtin_bit_cast(_Float16, h)); }
TQ_DEVICE u16 f32_to_f16(float f) { return __builtin_bit_cast(u16, _Float16(f)); }
TQ_DEVICE u32 pack_f16(float lo, float hi) { return u32(f32_to_f16(hi)) << 16 | f32_to_f16(lo); }
TQ_DEVICE u16 f32_to_bf16(float f) {
    u32 bits = __float_as_uint(f);
    if (f != f) return 0x7fff;
    return u16((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}
TQ_DEVICE u32 pack_bf16(float lo, float hi) { return u32(f32_to_bf16(hi)) << 16 | f32_to_bf16(lo); }
TQ_DEVICE float fast_exp2(float x) { return __builtin_amdgcn_exp2f(x); }
TQ_DEVICE float fast_log2(float x) { return __builtin_amdgcn_logf(x); }
TQ_DEVICE float fast_reciprocal(float x) { return __builtin_amdgcn_rcpf(x); }
TQ_DEVICE float fast_rsqrt(float x) { return __builtin_amdgcn_rsqf(x); }

// A nibble of the selector names a byte of a (0-3) or b (4-7); its top bit asks for that byte's sign instead.
TQ_DEVICE u32 byte_permute(u32 a, u32 b, u32 selector) {
    u32 names = ((selector & 0xffffu) | selector << 8) & 0x00ff00ffu;
    names = (names | names << 4) & 0x0f0f0f0fu;  // a byte each
    u32 bytes = __builtin_amdgcn_perm(b, a, names & 0x07070707u);
    u32 signs = (bytes >> 7 & 0x01010101u) * 0xffu, asked = (names >> 3 & 0x01010101u) * 0xffu;
    return (bytes & ~asked) | (signs & asked);
}

TQ_DEVICE u32 mul_f16x2(u32 a, u32 b) {
#pragma clang fp contract(off)
    return __builtin_bit_cast(u32, __builtin_bit_cast(HalfPair, a) * __builtin_bit_cast(HalfPair, b));
}
TQ_DEVICE u32 add_f16x2(u32 a, u32 b) {
#pragma clang fp contract(off)
    return __builtin_bit_cast(u32, __builtin_bit_cast(HalfPair, a) + __builtin_bit_cast(HalfPair, b));
}
TQ_DEVICE u32 fma_f16x2(u32 a, u32 b, u32 c) {
    return __builtin_bit_cast(u32, __builtin_elementwise_fma(__builtin_bit_cast(HalfPair, a), __builtin_bit_cast(HalfPair, b),
                                                             __builtin_bit_cast(HalfPair, c)));
}
TQ_DEVICE u32 max_f16x2(u32 a, u32 b) {
    return __builtin_bit_cast(u32, __builtin_elementwise_max(__builtin_bit_cast(HalfPair, a), __builtin_bit_cast(HalfPair, b)));
}
TQ_DEVICE bool any_greater_f16x2(u32 a, u32 b) {
    return f16_to_f32(u16(a)) > f16_to_f32(u16(b)) || f16_to_f32(u16(a >> 16)) > f16_to_f32(u16(b >> 16));
}

// ---- products with the operand layout of mma.sync. A [16 x k] row major, B [k x 8], C [16 x 8] ----
//
// Lane 4 g + t: a0, a2 of A's row g, a1, a3 of row 8 + g; b0, b1 of B's column g; c of C's rows g, g, 8 + g,
// 8 + g, columns 2t, 2t + 1, 2t, 2t + 1. `dot(sum, a, b)` adds the product of two words.
template <class T, class Dot>
TQ_DEVICE void mma_by_shuffles(T (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1, Dot dot) {
    int lane = int(hip_wave_lane() & 31u), row = lane / 4 * 4, left = lane % 4 * 8, right = left + 4;
    auto of = [](u32 x, int from) { return __shfl_sync(TQ_FULL_WARP, x, from); };
#pragma unroll 1
    for (int t = 0; t < 4; t++) {
        u32 x0 = of(a0, row + t), x1 = of(a1, row + t), x2 = of(a2, row + t), x3 = of(a3, row + t);
        u32 l0 = of(b0, left + t), l1 = of(b1, left + t), r0 = of(b0, right + t), r1 = of(b1, right + t);
        c[0] = dot(dot(c[0], x0, l0), x2, l1), c[1] = dot(dot(c[1], x0, r0), x2, r1);
        c[2] = dot(dot(c[2], x1, l0), x3, l1), c[3] = dot(dot(c[3], x1, r0), x3, r1);
    }
}
TQ_DEVICE void mma_s8(i32 (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    mma_by_shuffles(c, a0, a1, a2, a3, b0, b1, [](i32 sum, u32 a, u32 b) {
#pragma unroll
        for (int i = 0; i < 4; i++) sum += i32(i32(a << (24 - 8 * i)) >> 24) * i32(i32(b << (24 - 8 * i)) >> 24);
        return sum;
    });
}
TQ_DEVICE void mma_f16(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    mma_by_shuffles(c, a0, a1, a2, a3, b0, b1, [](float sum, u32 a, u32 b) {
        return sum + f16_to_f32(u16(a)) * f16_to_f32(u16(b)) + f16_to_f32(u16(a >> 16)) * f16_to_f32(u16(b >> 16));
    });
}
TQ_DEVICE void mma_bf16(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    mma_by_shuffles(c, a0, a1, a2, a3, b0, b1, [](float sum, u32 a, u32 b) {
        return sum + __uint_as_float(a << 16) * __uint_as_float(b << 16) +
               __uint_as_float(a & 0xffff0000u) * __uint_as_float(b & 0xffff0000u);
    });
}

// ---- memory ----

TQ_DEVICE u32 shared_address(const void* p) {
    return u32(u64((const __attribute__((address_space(3))) char*)p));
}
TQ_DEVICE void fence_before_async_write() {}
template <class T>
using HipShared = __attribute__((address_space(3))) T;
TQ_DEVICE void copy16(u32 dst, const void* src) {
    *reinterpret_cast<HipShared<HipWords4>*>(dst) = *static_cast<const HipWords4*>(src);
}
TQ_DEVICE void copy16_or_zero(u32 dst, const void* src, bool there) {
    *reinterpret_cast<HipShared<HipWords4>*>(dst) = there ? *static_cast<const HipWords4*>(src) : HipWords4{0, 0, 0, 0};
}
TQ_DEVICE void store_shared(u32 at, u32 a, u32 b, u32 c, u32 d) {
    *reinterpret_cast<HipShared<HipWords4>*>(at) = HipWords4{a, b, c, d};
}
TQ_DEVICE void store_shared(u32 at, u32 a, u32 b) {
    reinterpret_cast<HipShared<u32>*>(at)[0] = a, reinterpret_cast<HipShared<u32>*>(at)[1] = b;
}
TQ_DEVICE void store_shared(u32 at, u32 a) { *reinterpret_cast<HipShared<u32>*>(at) = a; }
TQ_DEVICE void store_shared(u32 at, u16 a) { *reinterpret_cast<HipShared<u16>*>(at) = a; }
TQ_DEVICE void opaque(u32& x) { asm volatile("" : "+v"(x)); }

// As ldmatrix: lane l names row l % 8 of matrix l / 8, and gets elements 2t, 2t + 1 of row g (transposed: of
// column g) of each.
TQ_DEVICE void load_matrices(u32 (&r)[4], u32 at) {
    int lane = int(hip_wave_lane() & 31u);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        u32 row = __shfl_sync(TQ_FULL_WARP, at, 8 * i + lane / 4);
        r[i] = *reinterpret_cast<HipShared<u32>*>(row + lane % 4 * 4);
    }
}
TQ_DEVICE void load_transposed(u32 (&r)[4], u32 at) {
    int lane = int(hip_wave_lane() & 31u);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        u32 low = __shfl_sync(TQ_FULL_WARP, at, 8 * i + lane % 4 * 2), high = __shfl_sync(TQ_FULL_WARP, at, 8 * i + lane % 4 * 2 + 1);
        u32 column = u32(lane / 4 * 2);
        r[i] = *reinterpret_cast<HipShared<u16>*>(low + column) | u32(*reinterpret_cast<HipShared<u16>*>(high + column)) << 16;
    }
}
TQ_DEVICE void copy_commit() {}
template <int N>
TQ_DEVICE void copy_wait() {}

}  // namespace tq
