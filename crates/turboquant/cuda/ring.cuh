// A warp's private ring of units in shared memory, filled ahead of use by asynchronous copies.
#pragma once
#include "layout.cuh"

namespace tq {

template <class R, int STAGES>
struct Ring {
    static constexpr int STAGE_BYTES = R::UNIT_BYTES;
    static constexpr int BYTES = STAGES * STAGE_BYTES;

    u32 stages;    // shared address, 16-byte aligned
    u32 barriers;  // shared address of STAGES mbarriers
    int stage;     // the next to wait for, and after that to fill again
    u32 phase;

    TQ_DEVICE void init(u8* stages_, u64* barriers_, int lane) {
        stages = shared_address(stages_);
        barriers = shared_address(barriers_);
        stage = 0, phase = 0;
#if TQ_BULK_COPY
        if (lane < STAGES) barrier_init(barriers + 8 * lane, 1);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
        warp_sync();
    }

    // Starts the copy of a unit into `to`. `from` is lane `source`'s. Every fill is closed, also one that
    // was skipped, so that their count stays in step.
    TQ_DEVICE void fill(int to, const u8* from, int source, int lane) {
        u32 dst = stages + to * STAGE_BYTES;
#if TQ_BULK_COPY
        if (lane == source) {
            u32 bar = barriers + 8 * to;
            barrier_expect(bar, STAGE_BYTES);
            bulk_copy(dst, from, STAGE_BYTES, bar);
        }
#else
        const u8* c = reinterpret_cast<const u8*>(__shfl_sync(TQ_FULL_WARP, reinterpret_cast<u64>(from), source)) + lane * 16;
        dst += lane * 16;
#pragma unroll
        for (int at = 0; at < STAGE_BYTES; at += 512)
            if (at + 512 <= STAGE_BYTES || at + lane * 16 < STAGE_BYTES) copy16(dst + at, c + at);
#endif
    }
    TQ_DEVICE void close_fill() {
#if !TQ_BULK_COPY
        copy_commit();
#endif
    }
    TQ_DEVICE void wait() {
#if TQ_BULK_COPY
        barrier_wait(barriers + 8 * stage, phase);
#else
        copy_wait<STAGES - 1>();
        warp_sync();
#endif
    }
    TQ_DEVICE void advance() {
        stage++;
        if (stage == STAGES) stage = 0, phase ^= 1;
    }
};

}  // namespace tq
