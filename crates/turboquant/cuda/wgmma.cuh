// Warpgroup products (wgmma, sm_90a): operands, fences, and the barriers between producer and consumers.
#pragma once
#include "gpu.cuh"

namespace tq {

// ---- operands in shared memory: rows of 128 bytes, 16-byte chunks exchanged by row % 8 ----

// Rows of the operand follow one another (its k runs along the 128 bytes): 8 rows are 1024 bytes.
TQ_DEVICE u64 operand_along_rows(u32 address) { return u64(address >> 4) | u64(1) << 16 | u64(64) << 32 | u64(1) << 62; }
// k runs from row to row; 64 columns stand in a row, the next 64 `block` bytes on.
TQ_DEVICE u64 operand_across_rows(u32 address, u32 block) {
    return u64(address >> 4) | u64(block >> 4) << 16 | u64(64) << 32 | u64(1) << 62;
}
TQ_DEVICE u64 moved(u64 operand, u32 bytes) {  // never carries into the upper half
    return (operand & 0xffffffff00000000u) | (u32(operand) + (bytes >> 4));
}

// ---- order ----

TQ_DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
TQ_DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>
TQ_DEVICE void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
// Keeps the compiler from reading or writing accumulators on the wrong side of a fence or wait.
template <int N>
TQ_DEVICE void pin(float (&c)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(c[i])::"memory");
}

// ---- C[64, N] += A[64, 16] B[16, N]: a thread of warp w, lane (g, t) holds C[16 w + g + 8 i][8 j + 2 t + k] in c[4 j + 2 i + k] ----

#define TQ_C8(i) "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3]), "+f"(c[i + 4]), "+f"(c[i + 5]), "+f"(c[i + 6]), "+f"(c[i + 7])
#define TQ_C32(i) TQ_C8(i), TQ_C8(i + 8), TQ_C8(i + 16), TQ_C8(i + 24)
#define TQ_LIST32 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define TQ_LIST64 TQ_LIST32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"

// A and B in shared memory, both with k along the rows. `keep`: whether c is added to.
#define TQ_WGMMA_SS(N, TYPE, LIST, REGS, A, B, KEEP)                                                             \
    asm volatile("{ .reg .pred keep; setp.ne.b32 keep, " KEEP ", 0;\n"                                            \
                 "wgmma.mma_async.sync.aligned.m64n" N "k16.f32." TYPE "." TYPE " {" LIST "}, " A ", " B          \
                 ", keep, 1, 1, 0, 0; }"                                                                          \
                 : REGS                                                                                           \
                 : "l"(a), "l"(b), "r"(int(keep)))
// A in registers (the layout of mma's 16 x 16 A operand in each warp).
#define TQ_WGMMA_RS(N, TYPE, LIST, REGS, A, B, TRANS)                                                             \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" N "k16.f32." TYPE "." TYPE " {" LIST "}, {" A "}, " B        \
                 ", 1, 1, 1, " TRANS ";"                                                                          \
                 : REGS                                                                                           \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(int(ACROSS)))

template <bool IS_BF16, int REGS>
TQ_DEVICE void wgmma_shared(float (&c)[REGS], u64 a, u64 b, bool keep) {
    static_assert(REGS == 32 || REGS == 64, "64 or 128 columns");
    if constexpr (REGS == 32) {
        if constexpr (IS_BF16) TQ_WGMMA_SS("64", "bf16", TQ_LIST32, TQ_C32(0), "%32", "%33", "%34");
        else TQ_WGMMA_SS("64", "f16", TQ_LIST32, TQ_C32(0), "%32", "%33", "%34");
    } else {
#define TQ_C64 TQ_C32(0), TQ_C32(32)
        if constexpr (IS_BF16) TQ_WGMMA_SS("128", "bf16", TQ_LIST64, TQ_C64, "%64", "%65", "%66");
        else TQ_WGMMA_SS("128", "f16", TQ_LIST64, TQ_C64, "%64", "%65", "%66");
    }
}
// ACROSS: B's k runs from row to row.
template <bool IS_BF16, bool ACROSS, int REGS>
TQ_DEVICE void wgmma_registers(float (&c)[REGS], const u32 (&a)[4], u64 b) {
    static_assert(REGS == 32 || REGS == 64, "64 or 128 columns");
    if constexpr (REGS == 32) {
        if constexpr (IS_BF16) TQ_WGMMA_RS("64", "bf16", TQ_LIST32, TQ_C32(0), "%32,%33,%34,%35", "%36", "%37");
        else TQ_WGMMA_RS("64", "f16", TQ_LIST32, TQ_C32(0), "%32,%33,%34,%35", "%36", "%37");
    } else {
        if constexpr (IS_BF16) TQ_WGMMA_RS("128", "bf16", TQ_LIST64, TQ_C64, "%64,%65,%66,%67", "%68", "%69");
        else TQ_WGMMA_RS("128", "f16", TQ_LIST64, TQ_C64, "%64,%65,%66,%67", "%68", "%69");
    }
}

// ---- between warps ----

// Lanes that arrive for their warp. compute-sanitizer's racecheck knows only a thread's own arrival, so it wants 32.
#ifndef TQ_ARRIVING_LANES
#define TQ_ARRIVING_LANES 1
#endif
TQ_DEVICE void barrier_arrive(u32 bar) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory"); }
TQ_DEVICE void warpgroup_sync(int id) { asm volatile("bar.sync %0, 128;" ::"r"(id) : "memory"); }
// Ordinary shared-memory accesses before, the tensor cores' after.
TQ_DEVICE void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
template <int REGISTERS>
TQ_DEVICE void more_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <int REGISTERS>
TQ_DEVICE void fewer_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

}  // namespace tq
