// Checks the store kernels: against the host codec, against the pages that the crate's scalar reference
// wrote, and, with vLLM's own bytes, store and decode together. Exits 1 on any mismatch.
//   check_store KERNEL_FOLDER [TESTDATA_FOLDER [--small]]    --small: a few cases, for compute-sanitizer
#include <algorithm>
#include <numeric>
#include <random>
#include <string>

#include "gpu.h"
#include "reference.h"

static int failed = 0;

// A code may differ only where the decision was a matter of rounding.
static bool same_codes(const std::vector<int>& got, const std::vector<int>& want, const std::vector<float>& margin, float tie,
                       int& ties) {
    for (size_t i = 0; i < want.size(); i++) {
        if (got[i] == want[i]) continue;
        if (margin.empty() || margin[i] > tie || std::abs(got[i] - want[i]) != 1) return false;
        ties++;
    }
    return true;
}

static void against_host(int dim, int key, int value, int io, int page_size, int seed) {
    constexpr int HEADS = 3, TOKENS = 70;
    std::mt19937 rng(seed);
    std::normal_distribution<float> normal;
    std::vector<float> mids;
    std::vector<int> book;
    if (ref::is_lloyd(key)) {
        auto c = ref::centroids(dim, ref::bits_of(key));
        mids = ref::midpoints(c), book = ref::odd_codebook(c);
    }
    ref::Layout layout{dim, key, value, HEADS, page_size, book};
    int pages = (TOKENS + page_size - 1) / page_size + 2;
    std::vector<int64_t> slots(pages * page_size);
    std::iota(slots.begin(), slots.end(), 0);
    std::shuffle(slots.begin(), slots.end(), rng);
    slots.resize(TOKENS);
    slots[5] = -1, slots[40] = -7;
    std::vector<uint16_t> k(size_t(TOKENS) * HEADS * dim), v(k.size());
    auto bits = [&](float x) { return io == ref::BF16 ? ref::bf16_bits(x) : ref::f16_bits(x); };
    auto number = [&](uint16_t x) { return io == ref::BF16 ? ref::bf16_value(x) : ref::f16_value(x); };
    for (int t = 0; t < TOKENS; t++)
        for (int h = 0; h < HEADS; h++)
            for (int d = 0; d < dim; d++) {
                size_t at = (size_t(t) * HEADS + h) * dim + d;
                float a = normal(rng) * (d == 3 ? 20 : 1) + (d == 7 ? 8 : 0), b = normal(rng) + (d == 5 ? 6 : 0);
                if (t == 10) a = 0;
                if (t == 11) b = 0.25f;
                if (t == 12) a *= 1e-3f;
                if (t == 13) a *= 100, b *= 100;
                if (t == 14) a = d == 9 ? 4.0f : 0.0f;
                if (t == 15) b = 0;
                if (t == 16) a *= 1e-6f;
                k[at] = bits(a), v[at] = bits(b);
            }
    std::vector<uint8_t> before(pages * layout.page_bytes());
    for (auto& x : before) x = uint8_t(rng());
    Device<uint16_t> d_k(k), d_v(v);
    Device<int64_t> d_slots(slots);
    Device<uint8_t> d_pages(before);
    tq::StoreParams p = {};
    p.key = d_k.at, p.value = d_v.at, p.slot_mapping = reinterpret_cast<const i64*>(d_slots.at), p.pages = d_pages.at;
    p.page_bytes = layout.page_bytes(), p.key_stride = p.value_stride = HEADS * dim;
    p.num_tokens = TOKENS, p.num_kv_heads = HEADS, p.page_size = page_size;
    std::copy(mids.begin(), mids.end(), p.midpoints);
    if (!book.empty()) std::memcpy(p.codebook, ref::codebook_bytes(book).data(), 8);
    launch_store(load_store(dim, key, value, io), p, 0);
    CUDA(cudaDeviceSynchronize());
    auto pages_now = d_pages.host();

    auto expected = before;  // to see that nothing else was written
    int ties = 0;
    bool ok = true;
    for (int t = 0; t < TOKENS && ok; t++) {
        if (slots[t] < 0) continue;
        for (int h = 0; h < HEADS && ok; h++) {
            std::vector<float> a(dim), b(dim);
            for (int d = 0; d < dim; d++)
                a[d] = number(k[(size_t(t) * HEADS + h) * dim + d]), b[d] = number(v[(size_t(t) * HEADS + h) * dim + d]);
            ref::Margins margins;
            auto want = ref::encode(a, b, key, value, mids, &margins);
            int offset = int(slots[t] % page_size);
            uint8_t* page = pages_now.data() + slots[t] / page_size * layout.page_bytes();
            auto got = layout.read(page, offset, h);
            ok = same_codes(got.key, want.key, margins.key, 1e-5f, ties) && same_codes(got.value, want.value, margins.value, 1e-4f, ties) &&
                 std::abs(got.norm - want.norm) <= 1 && got.scale == want.scale && got.low == want.low;
            if (!ok)
                std::printf("FAIL store D %d key %d value %d io %d page %d: token %d head %d: norm %04x for %04x, scale %04x for %04x, low %04x for %04x\n",
                            dim, key, value, io, page_size, t, h, got.norm, want.norm, got.scale, want.scale, got.low, want.low);
            layout.write(expected.data() + slots[t] / page_size * layout.page_bytes(), offset, h, got);
        }
    }
    if (ok && expected != pages_now) {
        ok = false;
        std::printf("FAIL store D %d key %d value %d io %d page %d: bytes of other tokens changed\n", dim, key, value, io, page_size);
    }
    if (ok && ties > TOKENS * HEADS * dim / 1000) ok = false, std::printf("FAIL store D %d key %d: %d ties\n", dim, key, ties);
    failed += !ok;
}

// ---- the scalar reference's bytes (testdata/gpu_pages.bin) ----

// Element d of a key (side 0) or value (1) of the 16 tokens, as examples/gpu_golden.rs makes it: random
// exponents and mantissas, then rows that codecs trip over.
static uint16_t golden_element(int io, int side, int token, int d) {
    uint32_t h = uint32_t((side * 16 + token) * 256 + d) * 0x9e3779b1u;
    h ^= h >> 16, h *= 0x85ebca6bu, h ^= h >> 13, h *= 0xc2b2ae35u, h ^= h >> 16;
    int mantissa_bits = io == ref::BF16 ? 7 : 10, bias = io == ref::BF16 ? 127 : 15;
    auto word = [&](uint32_t sign, int exponent, uint32_t mantissa) {
        return uint16_t(sign << 15 | uint32_t(exponent) << mantissa_bits | (mantissa & ((1u << mantissa_bits) - 1)));
    };
    int top = 2 * bias + 1, spread = h & 7;
    uint32_t sign = h >> 31, mantissa = h >> 8;
    switch (token) {
        case 8: return word(d & 1, 0, 0);                                       // zeros of either sign
        case 9: return word(0, bias - 2, 0);                                    // a constant
        case 10: return d == 3 ? word(0, bias, 0) : word(0, 0, 0);              // one element alone
        case 11: if (d == 5) return word(0, top, ~0u << (mantissa_bits - 1)); break;  // NaN
        case 12: if (d == 7) return word(0, top, 0); break;                     // infinity
        case 13: return word(sign, top - 1, mantissa);                          // the largest numbers
        case 14: return word(sign, 0, mantissa);                                // subnormals
        case 15: return word(0, bias + 7, mantissa);                            // an offset
    }
    return word(sign, bias - 7 + spread, mantissa);
}
static void against_golden(const std::string& folder) {
    FILE* f = std::fopen((folder + "/gpu_pages.bin").c_str(), "rb");
    char magic[8];
    if (!f || std::fread(magic, 1, 8, f) != 8 || std::memcmp(magic, "tqpages1", 8) != 0) {
        std::printf("FAIL cannot read %s/gpu_pages.bin\n", folder.c_str());
        failed++;
        return;
    }
    int records = 0, wrong = 0;
    for (uint32_t head[5]; std::fread(head, 4, 5, f) == 5; records++) {
        int dim = int(head[0]), key = int(head[1]), value = int(head[2]), io = int(head[3]);
        std::vector<uint8_t> want(head[4]);
        if (std::fread(want.data(), 1, want.size(), f) != want.size()) want.clear();
        std::vector<float> mids;
        std::vector<int> book;
        if (ref::is_lloyd(key)) {
            auto c = ref::centroids(dim, ref::bits_of(key));
            mids = ref::midpoints(c), book = ref::odd_codebook(c);
        }
        ref::Layout layout{dim, key, value, 1, 16, book};
        std::vector<uint16_t> k, v;
        std::vector<int64_t> slots(16);
        std::iota(slots.begin(), slots.end(), 0);
        for (int t = 0; t < 16; t++)
            for (int d = 0; d < dim; d++) k.push_back(golden_element(io, 0, t, d)), v.push_back(golden_element(io, 1, t, d));
        Device<uint16_t> d_k(k), d_v(v);
        Device<int64_t> d_slots(slots);
        Device<uint8_t> d_page(std::vector<uint8_t>(layout.page_bytes(), 0xaa));
        tq::StoreParams p = {};
        p.key = d_k.at, p.value = d_v.at, p.slot_mapping = reinterpret_cast<const i64*>(d_slots.at), p.pages = d_page.at;
        p.page_bytes = layout.page_bytes(), p.key_stride = p.value_stride = dim;
        p.num_tokens = 16, p.num_kv_heads = 1, p.page_size = 16;
        std::copy(mids.begin(), mids.end(), p.midpoints);
        if (!book.empty()) std::memcpy(p.codebook, ref::codebook_bytes(book).data(), 8);
        launch_store(load_store(dim, key, value, io), p, 0);
        CUDA(cudaDeviceSynchronize());
        auto got = d_page.host();
        if (got == want) continue;
        wrong++, failed++;
        size_t at = 0;
        while (at < want.size() && at < got.size() && got[at] == want[at]) at++;
        std::printf("FAIL page of the scalar reference: D %d key %d value %d io %d: byte %zu of %zu is %02x, not %02x\n", dim, key, value,
                    io, at, want.size(), at < got.size() ? got[at] : 0, at < want.size() ? want[at] : 0);
        if (got.size() != want.size()) continue;
        for (int t = 0; t < 16; t++) {
            auto a = layout.read(got.data(), t, 0), b = layout.read(want.data(), t, 0);
            if (a.key != b.key || a.value != b.value || a.norm != b.norm || a.scale != b.scale || a.low != b.low)
                std::printf("     token %d:%s%s norm %04x/%04x scale %04x/%04x low %04x/%04x\n", t, a.key != b.key ? " key codes" : "",
                            a.value != b.value ? " value codes" : "", a.norm, b.norm, a.scale, b.scale, a.low, b.low);
        }
    }
    std::fclose(f);
    if (records == 0) failed++;
    std::printf("%s %d pages of the scalar reference, %d differ\n", wrong || !records ? "FAIL" : "ok  ", records, wrong);
}

// ---- vLLM's bytes ----

struct Safetensors {
    std::string header;
    std::vector<uint8_t> data;
    bool open(const std::string& path) {
        FILE* f = std::fopen(path.c_str(), "rb");
        if (!f) return false;
        uint64_t n = 0;
        if (std::fread(&n, 8, 1, f) != 1) return false;
        header.resize(n);
        if (std::fread(&header[0], 1, n, f) != n) return false;
        uint8_t buffer[65536];
        for (size_t got; (got = std::fread(buffer, 1, sizeof buffer, f)) > 0;) data.insert(data.end(), buffer, buffer + got);
        std::fclose(f);
        return true;
    }
    template <class T>
    std::vector<T> get(const std::string& name) const {
        size_t at = header.find("\"" + name + "\":");
        at = header.find("\"data_offsets\":[", at) + 16;
        size_t begin = std::strtoull(header.c_str() + at, nullptr, 10);
        size_t end = std::strtoull(header.c_str() + header.find(',', at) + 1, nullptr, 10);
        std::vector<T> v((end - begin) / sizeof(T));
        std::memcpy(v.data(), data.data() + begin, v.size() * sizeof(T));
        return v;
    }
};

static void against_vllm(const std::string& folder, int dim) {
    Safetensors file;
    std::string path = folder + "/vllm_slots_d" + std::to_string(dim) + ".safetensors";
    if (!file.open(path)) {
        std::printf("FAIL cannot read %s\n", path.c_str());
        failed++;
        return;
    }
    constexpr int HEADS = 2, GROUP = 4, SEQS = 3, PAGE = 16;
    auto k = file.get<uint16_t>("key"), v = file.get<uint16_t>("value"), q = file.get<uint16_t>("query");
    auto slots32 = file.get<int32_t>("slot_mapping"), table = file.get<int32_t>("block_table"), lens = file.get<int32_t>("seq_lens");
    std::vector<int64_t> slots(slots32.begin(), slots32.end());
    int tokens = int(slots.size()), pages = 1 + *std::max_element(table.begin(), table.end());
    struct {
        const char* name;
        int key, value;
    } presets[] = {{"turboquant_k8v4", ref::FP8, ref::UNIFORM4}, {"turboquant_4bit_nc", ref::LLOYD4, ref::UNIFORM4},
                   {"turboquant_k3v4_nc", ref::LLOYD3, ref::UNIFORM4}, {"turboquant_3bit_nc", ref::LLOYD3, ref::UNIFORM3}};
    for (auto& preset : presets) {
        std::vector<float> mids;
        std::vector<int> book;
        if (ref::is_lloyd(preset.key)) {
            auto c = ref::centroids(dim, ref::bits_of(preset.key));
            mids = ref::midpoints(c), book = ref::odd_codebook(c);
        }
        ref::Layout layout{dim, preset.key, preset.value, HEADS, PAGE, book};
        Device<uint16_t> d_k(k), d_v(v), d_q(q), d_out(q.size());
        Device<int64_t> d_slots(slots);
        Device<uint8_t> d_pages(std::vector<uint8_t>(pages * layout.page_bytes(), 0xff));
        Device<int32_t> d_table(table), d_lens(lens);
        tq::StoreParams s = {};
        s.key = d_k.at, s.value = d_v.at, s.slot_mapping = reinterpret_cast<const i64*>(d_slots.at), s.pages = d_pages.at;
        s.page_bytes = layout.page_bytes(), s.key_stride = s.value_stride = HEADS * dim;
        s.num_tokens = tokens, s.num_kv_heads = HEADS, s.page_size = PAGE;
        std::copy(mids.begin(), mids.end(), s.midpoints);
        if (!book.empty()) std::memcpy(s.codebook, ref::codebook_bytes(book).data(), 8);
        launch_store(load_store(dim, preset.key, preset.value, ref::BF16), s, 0);
        auto launch = decode_launch(dim, preset.key, preset.value, ref::BF16, GROUP, false);
        Device<float> lse(SEQS * HEADS * GROUP);
        Device<uint32_t> partials(launch.partials());
        tq::DecodeParams p = {};
        p.out = d_out.at, p.lse = lse.at, p.q = d_q.at, p.pages = d_pages.at, p.block_tables = d_table.at, p.seq_lens = d_lens.at;
        p.partials = reinterpret_cast<float*>(partials.at), p.page_bytes = layout.page_bytes();
        std::memcpy(p.codebook, s.codebook, 8);
        p.num_seqs = SEQS, p.num_kv_heads = HEADS, p.gqa_group = GROUP, p.q_len = 1, p.page_size = PAGE;
        p.max_pages = int(table.size()) / SEQS, p.sm_scale = float(1 / std::sqrt(double(dim)));
        launch(p, 0);
        CUDA(cudaDeviceSynchronize());

        // codes and fields of every row against vLLM's slot
        auto page_bytes = d_pages.host();
        auto want = file.get<uint8_t>(std::string(preset.name) + ".slots");
        int slot_bytes = int(want.size()) / tokens / HEADS, key_bits = ref::bits_of(preset.key), value_bits = ref::bits_of(preset.value);
        long codes = 0, off_by_one = 0, wrong = 0, fields = 0;
        for (int t = 0; t < tokens; t++)
            for (int h = 0; h < HEADS; h++) {
                auto row = layout.read(page_bytes.data() + slots[t] / PAGE * layout.page_bytes(), int(slots[t] % PAGE), h);
                const uint8_t* slot = want.data() + (size_t(t) * HEADS + h) * slot_bytes;
                auto code = [&](int base, int bits, int d) {
                    int c = 0;
                    for (int b = 0; b < bits; b++) c |= (slot[base + (d * bits + b) / 8] >> ((d * bits + b) % 8) & 1) << b;
                    return c;
                };
                auto half = [&](int at) { return uint16_t(slot[at] | slot[at + 1] << 8); };
                int value_at = dim * key_bits / 8 + (ref::is_lloyd(preset.key) ? 2 : 0), scale_at = value_at + dim * value_bits / 8;
                for (int d = 0; d < dim; d++) {
                    int a = std::abs(row.key[d] - code(0, key_bits, d)), b = std::abs(row.value[d] - code(value_at, value_bits, d));
                    codes += 2, off_by_one += (a == 1) + (b == 1), wrong += (a > 1) + (b > 1);
                }
                if (ref::is_lloyd(preset.key)) fields += row.norm != half(value_at - 2);
                fields += row.scale != half(scale_at), fields += row.low != half(scale_at + 2);
            }
        // the decode of those rows against double precision; vLLM's own output beside it (its exact
        // codebook and other ties matter where keys are 100 times larger than usual)
        auto theirs = file.get<float>(std::string(preset.name) + ".attention");
        auto out = d_out.host();
        double diff = 0, norm = 0, diff_theirs = 0, norm_theirs = 0;
        for (int seq = 0; seq < SEQS; seq++)
            for (int h = 0; h < HEADS; h++) {
                std::vector<std::vector<double>> keys, values;
                for (int i = 0; i < lens[seq]; i++) {
                    int page = table[seq * (table.size() / SEQS) + i / PAGE];
                    auto row = layout.read(page_bytes.data() + page * layout.page_bytes(), i % PAGE, h);
                    keys.push_back(ref::decode_key(row, preset.key, book));
                    values.push_back(ref::decode_value(row, preset.value));
                }
                for (int g = 0; g < GROUP; g++) {
                    size_t at = (size_t(seq) * HEADS * GROUP + h * GROUP + g) * dim;
                    std::vector<double> row_q(dim);
                    for (int d = 0; d < dim; d++) row_q[d] = ref::bf16_value(q[at + d]);
                    if (ref::is_lloyd(preset.key)) ref::rotate(row_q);
                    auto want_out = ref::attend(row_q, keys, values, 0, lens[seq], 1 / std::sqrt(double(dim)), 0, nullptr).out;
                    for (int d = 0; d < dim; d++) {
                        double y = ref::bf16_value(out[at + d]), w = want_out[d], v = theirs[at + d];
                        diff += (y - w) * (y - w), norm += w * w;
                        diff_theirs += (y - v) * (y - v), norm_theirs += v * v;
                    }
                }
            }
        double error = std::sqrt(diff / norm), error_theirs = std::sqrt(diff_theirs / norm_theirs);
        bool ok = wrong == 0 && off_by_one * 500 <= codes && fields * 100 <= tokens * HEADS && error < 5e-3;
        std::printf("%s vLLM's slots %-20s D %3d: %ld codes, %ld off by one, %ld wrong; %ld fields differ; attention %.1e (vLLM's %.1e)\n",
                    ok ? "ok  " : "FAIL", preset.name, dim, codes, off_by_one, wrong, fields, error, error_theirs);
        failed += !ok;
    }
}

int main(int argc, char** argv) {
    kernel_folder = argc > 1 ? argv[1] : ".";
    CUDA(cudaFree(nullptr));
    bool small = argc > 3 && std::string(argv[3]) == "--small";
    if (argc > 2) {
        against_golden(argv[2]);
        for (int dim : {64, 128, 256})
            if (!small || dim == 64) against_vllm(argv[2], dim);
    }
    using namespace ref;
    const int formats[][2] = {{LLOYD4, UNIFORM4}, {FP8, UNIFORM4}, {LLOYD3, UNIFORM4}, {LLOYD3, UNIFORM3}, {FP8, FP8}, {BF16, BF16}, {F16, F16}};
    int cases = 0;
    for (auto& f : formats)
        for (int dim : {64, 80, 96, 128, 192, 256})
            for (int io : {int(BF16), int(F16)})
                for (int page : {16, 64}) {
                    if (f[0] == LLOYD3 && dim % 64) continue;  // the page order has no place for such codes
                    if (small && (page != 16 || (dim != 80 && dim != 192))) continue;
                    if (f[0] <= F16 && f[0] != io) continue;
                    against_host(dim, f[0], f[1], io, page, ++cases);
                }
    std::printf("store: %d cases against the host codec; %d failures in all\n", cases, failed);
    return failed ? 1 : 0;
}
