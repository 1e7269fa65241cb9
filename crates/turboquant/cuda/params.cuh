// One struct per kernel, by value. `src/cuda/params.rs` mirrors them field by field.
#pragma once
#include "gpu.cuh"

namespace tq {

struct DecodeParams {
    void* out;                // [num_seqs * q_len, num_qo_heads, head_dim] bf16 or fp16
    float* lse;               // [num_seqs * q_len, num_qo_heads] natural log, sinks included; or null
    const void* q;            // [num_seqs * q_len, num_qo_heads, head_dim], not rotated
    const u8* pages;          // [num_pages, page_bytes]
    const i32* block_tables;  // [num_seqs, max_pages]
    const i32* seq_lens;      // [num_seqs] tokens in the cache, the q_len query tokens included
    const float* sinks;       // [num_qo_heads] or null
    float* partials;          // [2 * grid, part floats], all bytes 0xff before and after
    i64 page_bytes;
    u32 codebook[2];          // int8 [8], v for the odd integer 2v + 1 of a centroid: 4-bit keys, the positive
                              // centroids, ascending; 3-bit keys, all
    i32 num_seqs;
    i32 num_kv_heads;
    i32 gqa_group;            // query heads of a KV head
    i32 q_len;                // query tokens of a sequence, the last q_len of its seq_len
    i32 page_size;            // tokens, a multiple of 16
    i32 max_pages;
    i32 window;               // tokens a query sees, itself included, at most 2^30; 0: all
    float sm_scale;
    float softcap;            // 0: none
};

struct PrefillParams {
    void* out;                // [num_tokens, num_qo_heads, head_dim] bf16 or fp16
    float* lse;               // [num_tokens, num_qo_heads] natural log, sinks included; or null
    const void* q;            // [num_tokens, num_qo_heads, head_dim], not rotated
    const void* key;          // [num_tokens, num_kv_heads, head_dim] raw keys of the new tokens
    const void* value;        // as key
    const u8* pages;          // [num_pages, page_bytes]
    const i32* block_tables;  // [num_seqs, max_pages]
    const i32* query_starts;  // [num_seqs + 1] first new token of each request, ascending
    const i32* prefix_lens;   // [num_seqs] tokens in pages before the first new one
    const float* sinks;       // [num_qo_heads] or null
    i64 page_bytes;
    i64 key_stride;           // elements from a token to the next
    i64 value_stride;
    u32 codebook[2];          // as in DecodeParams
    i32 num_seqs;
    i32 num_kv_heads;
    i32 gqa_group;
    i32 page_size;            // tokens, a multiple of 16
    i32 max_pages;
    i32 window;               // tokens a query sees, itself included; 0: all
    float sm_scale;
    float softcap;            // 0: none
};

struct StoreParams {
    const void* key;          // [num_tokens, num_kv_heads, head_dim] bf16 or fp16
    const void* value;        // as key
    const i64* slot_mapping;  // [num_tokens] page * page_size + offset, negative: skip
    u8* pages;                // [num_pages, page_bytes]
    i64 page_bytes;
    i64 key_stride;           // elements from a token to the next
    i64 value_stride;
    u32 codebook[2];          // as in DecodeParams
    i32 num_tokens;
    i32 num_kv_heads;
    i32 page_size;            // tokens, a multiple of 16
    float midpoints[15];      // of the Lloyd-Max codebook, ascending; 3-bit keys use 7
};

// The same numbers are asserted in src/cuda/params.rs.
static_assert(sizeof(DecodeParams) == 120 && sizeof(StoreParams) == 136 && sizeof(PrefillParams) == 144,
              "host and device must agree");
#ifndef __CUDACC_RTC__
static_assert(__builtin_offsetof(DecodeParams, page_bytes) == 64 && __builtin_offsetof(DecodeParams, num_seqs) == 80 &&
                  __builtin_offsetof(DecodeParams, softcap) == 112,
              "host and device must agree");
static_assert(__builtin_offsetof(PrefillParams, page_bytes) == 80 && __builtin_offsetof(PrefillParams, codebook) == 104 &&
                  __builtin_offsetof(PrefillParams, softcap) == 140,
              "host and device must agree");
static_assert(__builtin_offsetof(StoreParams, codebook) == 56 && __builtin_offsetof(StoreParams, midpoints) == 76,
              "host and device must agree");
#endif

}  // namespace tq
