#!/usr/bin/env python3
"""bf16 attention of torch (cuDNN and FlashAttention-2 backends) at the shapes of time_prefill and time_decode, in
the same columns.

    time_sdpa.py [prefill|decode|all] [SHAPES [BATCHES [CONTEXTS]]]      comma separated
"""
import sys

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
PREFILL = {  # new tokens, tokens in all
    "32/8/128": [(2048, 2048), (8192, 8192), (32768, 32768), (512, 33280), (2048, 34816), (8192, 40960)],
    "24/4/256": [(8192, 8192), (32768, 32768), (2048, 34816)],
    "16/2/256": [(8192, 8192), (2048, 34816)],
    "32/8/64": [(8192, 8192), (2048, 34816)],
}
POOL_TOKENS = 64 * 131072


def median(times):
    times = sorted(times)
    return (times[(len(times) - 1) // 2] + times[len(times) // 2]) / 2


def timed(call, repeats):
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / repeats


def first_line(error):
    return str(error).strip().splitlines()[0][:120]


def check(out):
    if not torch.isfinite(out).all():
        return " FAIL: not all finite"
    return "" if out.any() else " FAIL: all zero"


def prefill(shapes):
    print("bf16 SDPA, prefill, one sequence, causal (continuation: lower right), median of 10")
    print(f"{'path':<6} {'format':<8} {'shape':<9} {'new':>6} {'total':>7} {'ms':>9} {'TFLOP/s':>8}")
    good = True
    for shape in shapes:
        heads, kv_heads, dim = map(int, shape.split("/"))
        for new, total in PREFILL.get(shape, []):
            q = torch.randn(1, heads, new, dim, device="cuda", dtype=torch.bfloat16)
            k, v = (torch.randn(1, kv_heads, total, dim, device="cuda", dtype=torch.bfloat16) for _ in range(2))
            # the bias goes to FlashAttention as such; cuDNN takes a mask, made outside the timing
            masks = {}
            if new < total:
                mask = torch.ones(new, total, device="cuda", dtype=torch.bool).tril(total - new)
                masks = {"cudnn": mask, "flash": causal_lower_right(new, total)}
            flops = 4 * heads * dim * (new * (total - new) + new * new / 2)
            for name, backend in BACKENDS.items():
                columns = f"{name:<6} {'bf16' if total > new else 'fresh':<8} {shape:<9} {new:>6} {total:>7}"
                try:
                    with sdpa_kernel(backend), torch.no_grad():
                        how = {"attn_mask": masks[name]} if masks else {"is_causal": True}
                        call = lambda: F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **how)
                        verdict = check(call())
                        timed(call, 2)
                        repeats = max(1, min(20, int(2 / timed(call, 1))))
                        ms = median([timed(call, repeats) for _ in range(10)])
                except RuntimeError as error:
                    print(f"{columns} not served: {first_line(error)}", flush=True)
                    continue
                good &= not verdict
                print(f"{columns} {ms:>9.3f} {flops / ms * 1e-9:>8.0f}{verdict}", flush=True)
    return good


def decode(shapes, batches, contexts):
    print("bf16 SDPA, decode, KV from memory (contiguous, not paged), graph replay, median")
    print(f"{'format':<8} {'shape':<9} {'B':>4} {'ctx':>7} {'us':>9} {'GB/s':>9} {'of4610':>7}")
    good = True
    for shape in shapes:
        heads, kv_heads, dim = map(int, shape.split("/"))
        token = kv_heads * dim
        most = max(batches) * max(contexts)
        pool = torch.empty(2, max(most, min(POOL_TOKENS, 256 * most)) * token, device="cuda", dtype=torch.bfloat16)
        for part in pool.view(-1).split(1 << 28):
            part.normal_()
        for batch in batches:
            for context in contexts:
                q = torch.randn(batch, heads, 1, dim, device="cuda", dtype=torch.bfloat16)
                numbers = batch * context * token
                set_bytes = 4 * numbers
                sets = min(256, pool.shape[1] // numbers, 1 + 280_000_000 // set_bytes)
                kv = [
                    [pool[i, s * numbers : (s + 1) * numbers].view(batch, kv_heads, context, dim) for i in range(2)]
                    for s in range(sets)
                ]
                for name, backend in BACKENDS.items():
                    columns = f"{name:<8} {shape:<9} {batch:>4} {context:>7}"
                    try:
                        with sdpa_kernel(backend), torch.no_grad():
                            call = lambda s: F.scaled_dot_product_attention(q, *kv[s], enable_gqa=True)
                            verdict = check(call(0))
                            torch.cuda.synchronize()
                            graph = torch.cuda.CUDAGraph()
                            with torch.cuda.graph(graph):
                                for s in range(sets):
                                    call(s)
                            timed(graph.replay, 1)
                            times, spent = [], 0.0
                            while len(times) < 20 and (len(times) < 3 or spent < 60):
                                times.append(timed(graph.replay, 1))
                                spent += times[-1]
                    except RuntimeError as error:
                        print(f"{columns} not served: {first_line(error)}", flush=True)
                        continue
                    us = median(times) * 1e3 / sets
                    rate = set_bytes / us * 1e-3
                    good &= not verdict
                    print(f"{columns} {us:>9.2f} {rate:>9.0f} {rate / 46.10:>6.1f}%{verdict}", flush=True)
                    del graph
        del pool
    return good


def main():
    arguments = sys.argv[1:]
    what = arguments[0] if arguments else "all"
    if what not in ("prefill", "decode", "all"):
        sys.exit(f"time_sdpa: {what!r} is none of prefill, decode, all")
    listed = lambda i, otherwise: (arguments[i] if len(arguments) > i else otherwise).split(",")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}")
    good = True
    if what != "decode":
        good &= prefill(listed(1, "32/8/128,24/4/256,16/2/256,32/8/64"))
    if what != "prefill":
        batches, contexts = ([int(x) for x in listed(i, d)] for i, d in ((2, "1,8,32,64"), (3, "1024,8192,32768,131072")))
        good &= decode(listed(1, "32/8/128,24/4/256,16/2/256"), batches, contexts)
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
