// The order of bytes in a page on a GPU, and the sizes of rows. `src/cuda/page.rs` holds the same
// table for the host; a test compares the two.
//
// A page of P tokens (P a multiple of 16) and H heads takes exactly P * H * slot bytes, as in vLLM:
//
//   [P/16 units][H heads][16 key code rows | 16 value code rows | key norm | value scale | value minimum]
//
// A unit is 16 tokens of one head; each of its fields is 16 fp16 numbers. Inside a unit the bytes stand in
// the order in which the 32 lanes of a warp feed them to the tensor cores; lane = 4 * g + t, g = 0..7,
// t = 0..3.
//
//   key codes: lane (g, t) holds its quarter of tokens g (tile 0) and 8 + g (tile 1).
//   value codes: lane (g, t) holds dims g (mod 8) of tokens 2t, 2t+1 (low) and 8+2t, 9+2t (high),
//     the two tokens of a pair in the two halves of a word.
//   4-bit key codes are stored as sign and magnitude: of the 8 codes of a word, magnitude e in bits
//     4e..4e+2; the sign (1: negative) of codes 0-3 in bits 8e+7, of codes 4-7 in bits 8(e-4)+3. Where
//     head_dim is no multiple of 32, the last word holds 4 codes of tile 0 (low) and 4 of tile 1 (high): code
//     c has its magnitude in bits 4c..4c+2 of its half and its sign in bit 4c+3. So no two tokens share a byte.
//   The words of a lane are numbered 0..n-1; words 4q..4q+3 of all lanes form a run of 512 bytes,
//   16 a lane; what is left (n mod 4) follows as a run of 8 bytes a lane, then one of 4.
//   Key norm: the kernels multiply it with integer codes, so it holds norm * NORM_GAIN / |codes|, as
//     a float of 5 exponent and 11 mantissa bits (fp16's range, its sign bit given to the mantissa).
//     With that one bit more no two fp16 norms of a row fall together, so vLLM's slot comes back
//     bit for bit.
//   fields: tokens in the order 0 1 8 9 2 3 10 11 4 5 12 13 6 7 14 15.
#pragma once
#include "gpu.cuh"

namespace tq {

enum Format : int {
    BF16 = 0,
    F16 = 1,
    FP8 = 2,      // e4m3, scale 1
    LLOYD4 = 3,   // keys only
    LLOYD3 = 4,   // keys only
    UNIFORM4 = 5, // values only
    UNIFORM3 = 6, // values only
};

constexpr int UNIT = 16;  // tokens

TQ_ANYWHERE int code_bits(int format) {
    return format == BF16 || format == F16 ? 16 : format == FP8 ? 8 : format == LLOYD4 || format == UNIFORM4 ? 4 : 3;
}
// Between 122.5 sqrt(D) and 182.5 sqrt(D): whatever the codes, a norm of 7900 still fits and fp16's smallest
// step is still told apart (4-bit codes are odd numbers from 11 to 245, 3-bit codes from 29 to 255).
TQ_ANYWHERE float norm_gain(int head_dim) {
    return head_dim < 32 ? 512.0f : head_dim < 80 ? 1024.0f : head_dim < 128 ? 1536.0f : 2048.0f;
}
TQ_ANYWHERE bool is_lloyd(int key) { return key == LLOYD4 || key == LLOYD3; }
TQ_ANYWHERE bool is_uniform(int value) { return value == UNIFORM4 || value == UNIFORM3; }

template <int D_, int KEY_, int VALUE_>
struct Row {
    static constexpr int D = D_;
    static constexpr int KEY = KEY_;
    static constexpr int VALUE = VALUE_;
    static constexpr int KEY_CODE_BYTES = D * code_bits(KEY) / 8;
    static constexpr int VALUE_CODE_BYTES = D * code_bits(VALUE) / 8;
    static constexpr int NUM_FIELDS = (is_lloyd(KEY) ? 1 : 0) + (is_uniform(VALUE) ? 2 : 0);
    static constexpr int SLOT_BYTES = KEY_CODE_BYTES + VALUE_CODE_BYTES + 2 * NUM_FIELDS;
    static constexpr int UNIT_KEY_BYTES = UNIT * KEY_CODE_BYTES;
    static constexpr int UNIT_CODE_BYTES = UNIT * (KEY_CODE_BYTES + VALUE_CODE_BYTES);
    static constexpr int UNIT_FIELD_BYTES = UNIT * 2 * NUM_FIELDS;
    static constexpr int UNIT_BYTES = UNIT_CODE_BYTES + UNIT_FIELD_BYTES;
    static constexpr int SCALE_FIELD = is_lloyd(KEY) ? 1 : 0;  // index of the value scale among the fields
    static constexpr float NORM_GAIN = norm_gain(D);
    static constexpr int KEY_WORDS = UNIT_KEY_BYTES / 128;     // words a lane
    static constexpr int VALUE_WORDS = UNIT * VALUE_CODE_BYTES / 128;
    static_assert(D % 16 == 0 && D <= 256, "head_dim must be a multiple of 16 up to 256");
    static_assert(code_bits(KEY) != 3 || D % 64 == 0, "3-bit keys need head_dim to be a multiple of 64");
    static_assert(code_bits(VALUE) != 3 || D % 64 == 0, "3-bit values need head_dim to be a multiple of 64");
};

// Byte offset of word `word` of `lane` in a section of `words` words a lane.
TQ_ANYWHERE int word_offset(int words, int word, int lane) {
    int full = words / 4 * 4;
    if (word < full) return word / 4 * 512 + lane * 16 + word % 4 * 4;
    int rest = words - full;
    if (rest >= 2 && word < full + 2) return full * 128 + lane * 8 + (word - full) * 4;
    int pairs = rest >= 2 ? 2 : 0;
    return (full + pairs) * 128 + lane * 4;
}

// Place of a token of the unit in a run of fields.
TQ_ANYWHERE int field_place(int token) { return token % 8 / 2 * 4 + token / 8 * 2 + token % 2; }

}  // namespace tq
