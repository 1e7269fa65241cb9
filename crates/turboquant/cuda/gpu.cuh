// The few machine words the kernels need: 32-bit lanes, warp shuffles, tensor-core products,
// asynchronous copies. No toolkit header is included, so the sources compile through NVRTC alone. CUDA's
// words stand here; gpu_hip.cuh has the same for AMD.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef int i32;
typedef long long i64;

#define TQ_DEVICE __device__ __forceinline__
#define TQ_ANYWHERE __host__ __device__ __forceinline__ constexpr
#define TQ_FULL_WARP 0xffffffffu

#if defined(TQ_BULK_COPY)
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define TQ_BULK_COPY 1  // cp.async.bulk with mbarriers
#else
#define TQ_BULK_COPY 0  // cp.async, 16 bytes a lane
#endif
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
#define TQ_FP8_CONVERT 1
#else
#define TQ_FP8_CONVERT 0
#endif

#if defined(__HIP__)
#include "gpu_hip.cuh"
#else
namespace tq {

// ---- numbers ----

TQ_DEVICE float f16_to_f32(u16 h) {
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h));
    return f;
}
TQ_DEVICE u16 f32_to_f16(float f) {
    u16 h;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(f));
    return h;
}
TQ_DEVICE u32 pack_f16(float lo, float hi) {
    u32 w;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(w) : "f"(hi), "f"(lo));
    return w;
}
TQ_DEVICE u32 pack_bf16(float lo, float hi) {
    u32 w;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(w) : "f"(hi), "f"(lo));
    return w;
}
TQ_DEVICE u16 f32_to_bf16(float f) { return u16(pack_bf16(f, 0.0f)); }
TQ_DEVICE float fast_exp2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
TQ_DEVICE float fast_log2(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
TQ_DEVICE float fast_rsqrt(float x) {
    float y;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
TQ_DEVICE float fast_reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
TQ_DEVICE u32 byte_permute(u32 a, u32 b, u32 selector) {
    u32 d;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(selector));
    return d;
}

// Pairs of fp16.
TQ_DEVICE u32 mul_f16x2(u32 a, u32 b) {
    u32 d;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}
TQ_DEVICE u32 fma_f16x2(u32 a, u32 b, u32 c) {
    u32 d;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}
TQ_DEVICE u32 add_f16x2(u32 a, u32 b) {
    u32 d;
    asm("add.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}
TQ_DEVICE u32 max_f16x2(u32 a, u32 b) {
    u32 d;
    asm("max.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}
TQ_DEVICE bool any_greater_f16x2(u32 a, u32 b) {
    u32 d;
    asm("{ .reg .pred x, y; setp.gt.f16x2 x|y, %1, %2; or.pred x, x, y; selp.u32 %0, 1, 0, x; }"
        : "=r"(d)
        : "r"(a), "r"(b));
    return d != 0;
}

// ---- tensor cores (mma.sync, sm_80 on). A [16 x k] row major, B [k x 8], C [16 x 8] ----

TQ_DEVICE void mma_s8(i32 (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
TQ_DEVICE void mma_f16(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
TQ_DEVICE void mma_bf16(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// ---- memory ----

TQ_DEVICE u32 shared_address(const void* p) { return u32(__cvta_generic_to_shared(p)); }

// Orders this thread's ordinary shared-memory accesses before a later bulk copy onto them.
TQ_DEVICE void fence_before_async_write() {
#if TQ_BULK_COPY
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}
#if TQ_BULK_COPY
TQ_DEVICE void barrier_init(u32 bar, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(arrivals) : "memory");
}
TQ_DEVICE void barrier_expect(u32 bar, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
TQ_DEVICE void barrier_wait(u32 bar, u32 parity) {
    asm volatile(
        "{\n .reg .pred done;\n"
        "again:\n mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n @!done bra again;\n}" ::"r"(bar),
        "r"(parity)
        : "memory");
}
TQ_DEVICE void bulk_copy(u32 dst, const void* src, u32 bytes, u32 bar) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(dst),
                 "l"(src), "r"(bytes), "r"(bar)
                 : "memory");
}
#endif
TQ_DEVICE void copy16(u32 dst, const void* src) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(dst), "l"(src) : "memory");
}
// 16 bytes, or 16 zero bytes.
TQ_DEVICE void copy16_or_zero(u32 dst, const void* src, bool there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(there ? 16 : 0) : "memory");
}
TQ_DEVICE void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N>
TQ_DEVICE void copy_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

// Fetches the line at p, and with it the translation of its address; p need not be read later.
TQ_DEVICE void prefetch(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }
// Words passed from one multiprocessor to another: each arrives for itself, in no order.
TQ_DEVICE void send(float* at, const float4& x) {
    asm volatile("st.relaxed.gpu.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(at), "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w) : "memory");
}
TQ_DEVICE void send(float* at, const float2& x) {
    asm volatile("st.relaxed.gpu.global.v2.f32 [%0], {%1, %2};" ::"l"(at), "f"(x.x), "f"(x.y) : "memory");
}
TQ_DEVICE void receive(const float* at, float4& x) {
    asm volatile("ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "l"(at) : "memory");
}
TQ_DEVICE void receive(const float* at, float2& x) {
    asm volatile("ld.relaxed.gpu.global.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "l"(at) : "memory");
}
TQ_DEVICE void pause() { asm volatile("nanosleep.u32 40;"); }

// Lets the next launch of the stream set up, if it was asked for so, and waits for what the previous wrote.
TQ_DEVICE void start_after_previous() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Not ordered against ordinary loads, so that those may be started earlier: a barrier must stand between.
TQ_DEVICE void store_shared(u32 at, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(a), "r"(b), "r"(c), "r"(d));
}
TQ_DEVICE void store_shared(u32 at, u32 a, u32 b) {
    asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(at), "r"(a), "r"(b));
}
TQ_DEVICE void store_shared(u32 at, u32 a) { asm volatile("st.shared.b32 [%0], %1;" ::"r"(at), "r"(a)); }
TQ_DEVICE void store_shared(u32 at, u16 a) { asm volatile("st.shared.b16 [%0], %1;" ::"r"(at), "h"(a)); }

// A value the compiler cannot see through: it is worked out where it stands, or kept in a register.
TQ_DEVICE void opaque(u32& x) { asm volatile("" : "+r"(x)); }
// A barrier of the first `threads` threads.
TQ_DEVICE void named_sync(int threads) { asm volatile("bar.sync 1, %0;" ::"r"(threads) : "memory"); }

// Four 8x8 matrices of 16-bit floats; lane l gives the address of row l % 8 of matrix l / 8.
TQ_DEVICE void load_matrices(u32 (&r)[4], u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at));
}
TQ_DEVICE void load_transposed(u32 (&r)[4], u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at));
}

}  // namespace tq
#endif  // CUDA

namespace tq {

// ---- for every card ----

constexpr float LOG2E = 1.4426950408889634f;
constexpr float LN2 = 0.6931471805599453f;
constexpr float NEVER = -1e30f;       // running maximum before the first score
constexpr float LATE_RESCALE = 6.0f;  // a score may pass the running maximum by 2^6 before it is moved

// 1 / x for a power of two.
TQ_DEVICE float inverse_of_power(float x) { return __uint_as_float(0x7f000000u - __float_as_uint(x)); }
TQ_DEVICE float bf16_to_f32(u16 h) { return __uint_as_float(u32(h) << 16); }

// The stored key norm, 5 exponent and 11 mantissa bits, in the lower or upper half of a word; the
// float is the norm times 2^-112.
TQ_DEVICE float low_norm(u32 w) { return __uint_as_float((w << 12) & 0x0ffff000u); }
TQ_DEVICE float high_norm(u32 w) { return __uint_as_float((w >> 4) & 0x0ffff000u); }
constexpr float NORM_UNIT = 5.192296858534828e33f;  // 2^112

// Two e4m3 bytes (low 16 bits) as two fp16. The bit form serves cards without the instruction and
// gives the same numbers for every finite byte; its NaN bytes come out as 480.
TQ_DEVICE u32 e4m3x2_to_f16x2(u32 two) {
#if TQ_FP8_CONVERT
    u32 w;
    asm("{ .reg .b16 t; cvt.u16.u32 t, %1; cvt.rn.f16x2.e4m3x2 %0, t; }" : "=r"(w) : "r"(two));
    return w;
#else
    u32 spread = byte_permute(two, 0, 0x1404);  // bytes to the upper half of each 16 bits
    u32 bits = (spread & 0x80008000u) | ((spread & 0x7f007f00u) >> 1);
    return mul_f16x2(bits, 0x5c005c00u);  // times 256: bias 7 to 15
#endif
}

// ---- warp ----

TQ_DEVICE float shuffle(float x, int lane) { return __shfl_sync(TQ_FULL_WARP, x, lane); }
TQ_DEVICE float shuffle_xor(float x, int mask) { return __shfl_xor_sync(TQ_FULL_WARP, x, mask); }
TQ_DEVICE bool any_lane(bool b) { return __any_sync(TQ_FULL_WARP, b) != 0; }
TQ_DEVICE void warp_sync() { __syncwarp(); }

struct alignas(16) Words4 {
    u32 w[4];
};
struct alignas(8) Words2 {
    u32 w[2];
};

// Compile-time loop: f(Int<0>), f(Int<1>), ...
template <int I>
struct Int {
    static constexpr int value = I;
};
template <int N, int I = 0, class F>
TQ_DEVICE void unrolled(F&& f) {
    if constexpr (I < N) {
        f(Int<I>{});
        unrolled<N, I + 1>(f);
    }
}

}  // namespace tq
