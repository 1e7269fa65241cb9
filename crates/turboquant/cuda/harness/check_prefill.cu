// Checks the prefill kernels against double precision; exits 1 on any mismatch.
//   check_prefill KERNEL_FOLDER [PATHS [DIMS [FORMATS]]] [quick]    comma separated; quick: small batches only
//   paths: mma wgmma; formats: 4bit_nc k8v4 k3v4_nc 3bit_nc fp8 bf16 f16
//
// Every case is one launch over a ragged batch. Beside the error of every output row it must hold that
//   - unused slots of the pages may hold zeros, NaNs or Infs,
//   - a request alone gives the bits it gives in the batch,
//   - a request whose queries, keys and values are NaN changes no bit of its neighbours,
//   - without lse the output is the same, and nothing is written behind either.
#include <algorithm>
#include <atomic>
#include <mutex>
#include <random>
#include <thread>

#include "arguments.h"
#include "gpu.h"
#include "reference.h"

constexpr int HEADS = 2;             // KV heads
constexpr int GUARD = 64;            // elements behind out and lse
constexpr uint16_t POISON = 0x7fff;  // a NaN of bf16 and of fp16
// Relative L2, before out is rounded to bf16, of all rows of a case together and of any one of them. A row may
// hang on a few large scores, which 16-bit operands (a rotated query, bf16 weights) know to about 2^-11 of their size.
constexpr double LIMIT = 2e-3, ROW_LIMIT = 6e-3;
constexpr double LSE_LIMIT = 1e-2;

struct Request {
    int prefix, tokens;  // in pages; new
};

struct Case {
    const char* what;
    int dim, key, value, io, gqa, page_size, window;
    bool sinks;
    float softcap;
    bool fused;  // keys and values in one tensor [num_tokens, 2, num_kv_heads, head_dim]
    std::vector<Request> requests;

    // made by prepare()
    ref::Layout layout;
    std::vector<uint8_t> pages;
    std::vector<uint8_t> unused;  // 1 bits belong to no token
    std::vector<int> tables, starts, prefixes;
    int max_pages = 1;
    std::vector<uint16_t> q, kv;  // kv: keys, then values, or both in turn
    int64_t kv_stride, value_at;  // elements
    std::vector<float> sink;
    std::vector<int> book;
    std::vector<double> out, lse;

    int num_tokens() const { return starts.back(); }
    int num_seqs() const { return int(requests.size()); }
    float number(uint16_t raw) const { return io == ref::BF16 ? ref::bf16_value(raw) : ref::f16_value(raw); }
    uint16_t bits(float x) const { return io == ref::BF16 ? ref::bf16_bits(x) : ref::f16_bits(x); }
};

// Keys and values of a KV head at position i of its request.
static void draw(std::mt19937& rng, int i, std::vector<float>& k, std::vector<float>& v) {
    std::normal_distribution<float> normal;
    for (auto& x : k) x = normal(rng) * (i % 37 == 5 ? 3.0f : 1.0f);
    for (auto& x : v) x = normal(rng) * (i % 53 == 7 ? 20.0f : 1.0f) + 0.3f;
    if (i % 71 == 9) std::fill(v.begin(), v.end(), 0.25f);  // a constant value row: scale 0
    if (i % 83 == 11) std::fill(k.begin(), k.end(), 0.0f);
}

static void prepare(Case& c, int seed) {
    std::mt19937 rng(seed);
    std::normal_distribution<float> normal;
    std::vector<float> mids;
    if (ref::is_lloyd(c.key)) {
        auto centroids = ref::centroids(c.dim, ref::bits_of(c.key));
        mids = ref::midpoints(centroids);
        c.book = ref::odd_codebook(centroids);
    }
    c.layout = {c.dim, c.key, c.value, HEADS, c.page_size, c.book};
    int num_pages = 1;  // page 0 belongs to nobody
    c.starts = {0};
    for (Request r : c.requests) {
        int need = (r.prefix + c.page_size - 1) / c.page_size;
        num_pages += need;
        c.max_pages = std::max(c.max_pages, need);
        c.starts.push_back(c.starts.back() + r.tokens);
        c.prefixes.push_back(r.prefix);
    }
    std::vector<int> order(num_pages - 1);
    for (int i = 0; i < num_pages - 1; i++) order[i] = i + 1;
    std::shuffle(order.begin(), order.end(), rng);
    int64_t page_bytes = c.layout.page_bytes();
    c.tables.assign(c.num_seqs() * c.max_pages, -1);
    c.pages.assign(num_pages * page_bytes, 0);
    c.unused.assign(num_pages * page_bytes, 0);
    std::fill(c.unused.begin(), c.unused.begin() + page_bytes, 0xff);

    size_t row = size_t(HEADS) * c.dim, rows = size_t(c.num_tokens());
    c.q.resize(rows * c.gqa * row), c.kv.resize(2 * rows * row);
    c.kv_stride = int64_t(c.fused ? 2 * row : row), c.value_at = int64_t(c.fused ? row : rows * row);
    for (auto& x : c.q) x = c.bits(normal(rng) * 1.5f);
    if (c.sinks)
        for (int i = 0; i < HEADS * c.gqa; i++) c.sink.push_back(normal(rng) + 1);
    c.out.resize(c.q.size());
    c.lse.resize(c.q.size() / c.dim);

    int next = 0;
    for (int s = 0; s < c.num_seqs(); s++) {
        Request r = c.requests[s];
        int* table = c.tables.data() + s * c.max_pages;
        int owned = (r.prefix + c.page_size - 1) / c.page_size;
        for (int i = 0; i < owned; i++) table[i] = order[next++];
        for (int h = 0; h < HEADS; h++) {
            std::vector<std::vector<double>> keys, values;  // not rotated
            std::vector<float> k(c.dim), v(c.dim);
            for (int i = 0; i < r.prefix; i++) {
                draw(rng, i, k, v);
                auto packed = ref::encode(k, v, c.key, c.value, mids);
                uint8_t* page = c.pages.data() + table[i / c.page_size] * page_bytes;
                c.layout.write(page, i % c.page_size, h, packed);
                if (ref::is_lloyd(c.key)) {
                    keys.push_back(c.layout.stored_key(page, i % c.page_size, h));
                    ref::rotate(keys.back(), true);
                } else {
                    keys.push_back(ref::decode_key(packed, c.key, c.book));
                }
                values.push_back(ref::decode_value(packed, c.value));
            }
            for (int i = r.prefix; i < owned * c.page_size; i++)
                c.layout.mark(c.unused.data() + table[i / c.page_size] * page_bytes, i % c.page_size, h);
            for (int j = 0; j < r.tokens; j++) {
                draw(rng, r.prefix + j, k, v);
                uint16_t* to = c.kv.data() + (c.starts[s] + j) * c.kv_stride + h * c.dim;
                keys.emplace_back(), values.emplace_back();
                for (int d = 0; d < c.dim; d++) {
                    to[d] = c.bits(k[d]), to[c.value_at + d] = c.bits(v[d]);
                    keys.back().push_back(c.number(to[d])), values.back().push_back(c.number(to[c.value_at + d]));
                }
            }
            for (int j = 0; j < r.tokens; j++)
                for (int g = 0; g < c.gqa; g++) {
                    size_t at = (size_t(c.starts[s]) + j) * HEADS * c.gqa + h * c.gqa + g;
                    std::vector<double> q(c.dim);
                    for (int d = 0; d < c.dim; d++) q[d] = c.number(c.q[at * c.dim + d]);
                    int end = r.prefix + j + 1, begin = c.window > 0 ? std::max(0, end - c.window) : 0;
                    auto a = ref::attend(q, keys, values, begin, end, 1 / std::sqrt(double(c.dim)), c.softcap,
                                         c.sinks ? &c.sink[h * c.gqa + g] : nullptr);
                    std::copy(a.out.begin(), a.out.end(), c.out.begin() + at * c.dim);
                    c.lse[at] = a.lse;
                }
        }
        // pages that no query sees any more have been given back
        for (int i = 0; c.window > 0 && (i + 1) * c.page_size <= r.prefix + 1 - c.window; i++) {
            std::fill_n(c.unused.begin() + table[i] * page_bytes, page_bytes, 0xff);
            table[i] = -1;
        }
    }
}

struct Output {
    std::vector<uint16_t> out;
    std::vector<float> lse;
    bool operator==(const Output& o) const {
        return out == o.out && lse.size() == o.lse.size() && std::memcmp(lse.data(), o.lse.data(), 4 * lse.size()) == 0;
    }
};

// A case on the card.
struct Launch {
    const Case& c;
    const Kernel& kernel;
    Device<uint8_t> pages;
    Device<int> tables, starts, prefixes;
    Device<uint16_t> q, kv, out;
    Device<float> lse, sink;

    Launch(const Case& c_, const Kernel& k)
        : c(c_), kernel(k), pages(c_.pages.size()), tables(c_.tables), prefixes(c_.prefixes), q(c_.q), kv(c_.kv),
          out(c_.q.size() + GUARD), lse(c_.lse.size() + GUARD), sink(c_.sink) {
        std::vector<int> ends = c.starts;  // then [0, tokens] of each request alone
        for (Request r : c.requests) ends.push_back(0), ends.push_back(r.tokens);
        starts = Device<int>(ends);
        poison();
    }
    void upload(Device<uint16_t>& to, const std::vector<uint16_t>& v) {
        if (!v.empty()) CUDA(cudaMemcpy(to.at, v.data(), 2 * v.size(), cudaMemcpyHostToDevice));
    }
    void poison() {
        upload(out, std::vector<uint16_t>(out.count, POISON));
        CUDA(cudaMemset(lse.at, 0xff, 4 * lse.count));
    }
    void fill_unused(uint16_t with) {
        auto filled = c.pages;
        for (size_t i = 0; i < filled.size(); i++)
            filled[i] = (filled[i] & ~c.unused[i]) | (uint8_t(with >> (i % 2 * 8)) & c.unused[i]);
        CUDA(cudaMemcpy(pages.at, filled.data(), filled.size(), cudaMemcpyHostToDevice));
    }
    tq::PrefillParams params(bool with_lse) const {
        tq::PrefillParams p = {};
        p.out = out.at, p.lse = with_lse ? lse.at : nullptr, p.q = q.at, p.key = kv.at, p.value = kv.at + c.value_at;
        p.pages = pages.at, p.block_tables = tables.at, p.query_starts = starts.at, p.prefix_lens = prefixes.at;
        p.sinks = c.sinks ? sink.at : nullptr, p.page_bytes = c.layout.page_bytes();
        p.key_stride = p.value_stride = c.kv_stride;
        if (!c.book.empty()) std::memcpy(p.codebook, ref::codebook_bytes(c.book).data(), 8);
        p.num_seqs = c.num_seqs(), p.num_kv_heads = HEADS, p.gqa_group = c.gqa, p.page_size = c.page_size;
        p.max_pages = c.max_pages, p.window = c.window, p.sm_scale = float(1 / std::sqrt(double(c.dim))), p.softcap = c.softcap;
        return p;
    }
    Output finish() {
        cudaError_t status = cudaDeviceSynchronize();
        if (status != cudaSuccess) {
            std::fprintf(stderr, "%s, head_dim %d, key %d, value %d, group %d: %s\n", c.what, c.dim, c.key, c.value, c.gqa,
                         cudaGetErrorString(status));
            std::_Exit(2);
        }
        Output o = {out.host(), lse.host()};
        poison();
        return o;
    }
    Output together(bool with_lse = true) {
        launch_prefill(kernel, params(with_lse), c.num_tokens(), 0);
        return finish();
    }
    Output one_by_one() {
        for (int s = 0; s < c.num_seqs(); s++) {
            tq::PrefillParams p = params(true);
            size_t first = size_t(c.starts[s]), row = size_t(HEADS) * c.gqa;
            p.out = out.at + first * row * c.dim, p.lse = lse.at + first * row, p.q = q.at + first * row * c.dim;
            p.key = kv.at + first * c.kv_stride, p.value = kv.at + first * c.kv_stride + c.value_at;
            p.block_tables += s * c.max_pages, p.query_starts += c.num_seqs() + 1 + 2 * s, p.prefix_lens += s, p.num_seqs = 1;
            launch_prefill(kernel, p, c.requests[s].tokens, 0);
        }
        return finish();
    }
    // Requests s with s % 2 == parity have queries, keys and values of nothing but `with`.
    Output with_bad_neighbours(int parity, uint16_t with) {
        auto bad_q = c.q, bad_kv = c.kv;
        for (int t = 0; t < c.num_tokens(); t++) {
            if (request_of(t) % 2 != parity) continue;
            std::fill_n(bad_q.begin() + size_t(t) * HEADS * c.gqa * c.dim, HEADS * c.gqa * c.dim, with);
            std::fill_n(bad_kv.begin() + t * c.kv_stride, HEADS * c.dim, with);
            std::fill_n(bad_kv.begin() + t * c.kv_stride + c.value_at, HEADS * c.dim, with);
        }
        upload(q, bad_q), upload(kv, bad_kv);
        Output o = together();
        upload(q, c.q), upload(kv, c.kv);
        return o;
    }
    int request_of(int token) const {
        return int(std::upper_bound(c.starts.begin(), c.starts.end(), token) - c.starts.begin()) - 1;
    }
    // Row [token, query head] whose bits differ, among requests for which `counts` holds; -1: none.
    template <class F>
    int64_t first_difference(const Output& a, const Output& b, bool with_lse, F&& counts) const {
        int heads = HEADS * c.gqa;
        for (int64_t row = 0; row < int64_t(c.lse.size()); row++) {
            if (!counts(request_of(int(row / heads)))) continue;
            if (std::memcmp(&a.out[row * c.dim], &b.out[row * c.dim], 2 * c.dim)) return row;
            if (with_lse && std::memcmp(&a.lse[row], &b.lse[row], 4)) return row;
        }
        return -1;
    }
};

struct Tally {
    int cases = 0, failed = 0;
    double whole = 0;                                  // worst case, all its rows together, bf16 before rounding
    double f16 = 0, bf16 = 0, unrounded = 0, lse = 0;  // worst row
};

static void check(const Case& c, const char* format, const std::string& path, Tally& tally) {
    Launch launch(c, load_prefill(path, c.dim, c.key, c.value, c.io, c.softcap > 0));
    std::string complaints;
    auto complain = [&](const std::string& what, int64_t row) {
        int heads = HEADS * c.gqa, token = int(row / heads), s = launch.request_of(token);
        char where[160];
        std::snprintf(where, sizeof where, "\n     %s: request %d (prefix %d, %d new), its token %d, query head %d", what.c_str(), s,
                      c.requests[s].prefix, c.requests[s].tokens, token - c.starts[s], int(row % heads));
        complaints += where;
    };
    auto same = [&](const char* what, const Output& a, const Output& b, bool with_lse, auto&& counts) {
        int64_t row = launch.first_difference(a, b, with_lse, counts);
        if (row >= 0) complain(what, row);
    };
    auto all = [](int) { return true; };

    launch.fill_unused(0x0000);
    Output o = launch.together();
    launch.fill_unused(0xffff);
    same("NaNs in unused slots change bits", o, launch.together(), true, all);
    same("alone it has other bits", o, launch.one_by_one(), true, all);
    launch.fill_unused(c.key == ref::BF16 ? 0x7f80 : 0x7c00);
    same("Infs in unused slots change bits", o, launch.together(), true, all);
    same("without lse it has other bits", o, launch.together(false), false, all);
    for (int parity : {0, 1})
        same("a neighbour's NaNs change bits", o, launch.with_bad_neighbours(parity, POISON), true,
             [&](int s) { return s % 2 != parity; });
    for (int i = 0; i < GUARD; i++) {
        uint32_t word;
        std::memcpy(&word, &o.lse[c.lse.size() + i], 4);
        if (o.out[c.q.size() + i] != POISON || word != 0xffffffffu) {
            complaints += "\n     written behind out or lse";
            break;
        }
    }

    double error = 0, unrounded = 0, lse_error = 0, all_diff = 0, all_norm = 0, all_rounding = 0;
    int64_t worst = 0, worst_lse = 0;
    for (size_t row = 0; row < c.lse.size(); row++) {
        double diff = 0, norm = 0, rounding = 0;
        for (int d = 0; d < c.dim; d++) {
            double y = c.number(o.out[row * c.dim + d]), want = c.out[row * c.dim + d];
            double rounded = c.io == ref::BF16 ? ref::bf16_value(ref::bf16_bits(float(want))) : want;
            diff += (y - want) * (y - want), norm += want * want, rounding += (rounded - want) * (rounded - want);
        }
        all_diff += diff, all_norm += norm, all_rounding += rounding;
        // of bf16 outputs the rounding that the exact result would suffer is taken out
        double e = norm > 0 ? std::sqrt(diff / norm) : diff == 0 ? 0 : 1e9;
        double before = diff < rounding ? 0 : norm > 0 ? std::sqrt((diff - rounding) / norm) : e;
        double l = std::fabs(c.lse[row] - o.lse[row]);
        // a NaN is the worst there is
        for (double* x : {&e, &before, &l})
            if (std::isnan(*x)) *x = INFINITY;
        error = std::fmax(error, e);
        if (before > unrounded) unrounded = before, worst = int64_t(row);
        if (l > lse_error) lse_error = l, worst_lse = int64_t(row);
    }
    double whole = all_norm > 0 ? std::sqrt(std::fmax(0.0, all_diff - all_rounding) / all_norm) : 0;
    if (!(whole <= LIMIT)) complain("error of all rows together", worst);
    if (unrounded > ROW_LIMIT) complain("error", worst);
    tally.whole = std::fmax(tally.whole, whole);
    if (lse_error > LSE_LIMIT) complain("lse", worst_lse);
    double& raw = c.io == ref::BF16 ? tally.bf16 : tally.f16;
    raw = std::fmax(raw, error);
    if (c.io == ref::BF16) tally.unrounded = std::fmax(tally.unrounded, unrounded);
    tally.lse = std::fmax(tally.lse, lse_error);
    tally.cases++;
    if (!complaints.empty()) {
        tally.failed++;
        std::printf("FAIL %s %s D %d, %s, io %d group %d page %d window %d: error %.2e (%.2e before rounding), lse %.2e%s\n",
                    path.c_str(), format, c.dim, c.what, c.io, c.gqa, c.page_size, c.window, error, unrounded, lse_error,
                    complaints.c_str());
        std::fflush(stdout);
    }
}

struct Format {
    const char* name;
    int key, value;
};
static const Format FORMATS[] = {{"4bit_nc", ref::LLOYD4, ref::UNIFORM4}, {"k8v4", ref::FP8, ref::UNIFORM4},
                                 {"k3v4_nc", ref::LLOYD3, ref::UNIFORM4}, {"3bit_nc", ref::LLOYD3, ref::UNIFORM3},
                                 {"fp8", ref::FP8, ref::FP8},             {"bf16", ref::BF16, ref::BF16},
                                 {"f16", ref::F16, ref::F16}};

static std::vector<Case> cases_of(const Format& f, int dim, bool quick) {
    // lengths around tiles of 64 and 128 rows, prefixes around units of 16 tokens
    const std::vector<Request> mixed = {{0, 129}, {0, 1},     {0, 0},     {130, 64}, {16, 1},    {77, 0},  {517, 65}, {63, 63}, {0, 64},
                                        {1, 127}, {128, 128}, {300, 1},   {15, 17},  {1000, 40}, {0, 32},  {33, 31},  {64, 33}, {0, 2}},
                               few = {{0, 65}, {77, 0}, {130, 33}, {16, 1}, {0, 0}, {200, 17}, {0, 5}},
                               empty_ends = {{0, 0}, {50, 0}, {0, 40}, {32, 16}, {9, 0}};
    std::vector<Case> cases;
    int io = f.key == ref::BF16 ? ref::BF16 : ref::F16;
    struct Options {
        int window = 0;
        bool sinks = false;
        float softcap = 0;
        bool fused = false;
    };
    auto add = [&](const char* what, const std::vector<Request>& requests, int gqa, int page, int io_, Options o) {
        cases.push_back({what, dim, f.key, f.value, io_, gqa, page, o.window, o.sinks, o.softcap, o.fused, requests});
    };
    if (quick) {
        add("small batch", few, 4, 16, io, {});
        add("window, sinks", few, 3, 32, io, {40, true});
        return cases;
    }
    add("mixed batch", mixed, 4, 16, io, {});
    add("group of 16", few, 16, 16, io, {});
    add("window of 100", mixed, 4, 16, io, {100});
    if (dim != 64 && dim != 128 && dim != 256) return cases;
    for (int gqa : {1, 2, 3, 5, 6, 7, 8}) add("groups", few, gqa, 16, io, {});
    for (int page : {48, 64, 256}) add("page sizes", mixed, 4, page, io, {});
    add("window of 1", few, 4, 16, io, {1});
    add("window of 17", mixed, 3, 32, io, {17});
    add("sinks", mixed, 4, 16, io, {0, true});
    add("soft cap", mixed, 4, 16, io, {0, false, 20});
    add("window, sinks, soft cap", mixed, 6, 64, io, {70, true, 20});
    add("keys and values in one tensor", few, 4, 16, io, {0, false, 0, true});
    add("requests without tokens first and last", empty_ends, 4, 16, io, {});
    if (f.key > ref::F16) {
        add("bf16", mixed, 4, 16, ref::BF16, {});
        add("bf16, window, sinks", few, 8, 16, ref::BF16, {40, true});
    }
    return cases;
}

int main(int argc, char** argv) {
    bool quick = argc > 1 && std::string(argv[argc - 1]) == "quick";
    argc -= quick;
    kernel_folder = argc > 1 ? argv[1] : ".";
    auto arg = [&](int i, const char* otherwise) { return split(argc > i ? argv[i] : otherwise, ','); };
    cudaDeviceProp card;
    CUDA(cudaGetDeviceProperties(&card, 0));
    bool hopper = card.major == 9 && card.minor == 0;
    auto paths = arg(2, hopper ? "mma,wgmma" : "mma");
    auto dims = arg(3, "64,80,96,128,192,256"), names = arg(4, "4bit_nc,k8v4,k3v4_nc,3bit_nc,fp8,bf16,f16");
    for (auto& path : paths)
        if (path != "mma" && (path != "wgmma" || !hopper)) {
            std::fprintf(stderr, "no path %s on %s (%d.%d); mma runs everywhere, wgmma on 9.0\n", path.c_str(), card.name, card.major, card.minor);
            return 2;
        }

    struct Todo {
        const Format* format;
        Case c;
    };
    std::vector<Todo> todo;
    std::map<std::tuple<std::string, int, std::string>, Tally> tallies;  // format, head_dim, path
    for (auto& name : names)
        for (auto& dim_text : dims) {
            int dim = std::stoi(dim_text);
            auto* f = std::find_if(std::begin(FORMATS), std::end(FORMATS), [&](const Format& x) { return name == x.name; });
            if (f == std::end(FORMATS)) {
                std::fprintf(stderr, "no row format %s\n", name.c_str());
                return 2;
            }
            if (f->key == ref::LLOYD3 && dim % 64 != 0) continue;
            bool served = false;
            for (auto& path : paths) served |= serves_prefill(path, dim, f->key);
            if (!served) continue;
            for (Case& c : cases_of(*f, dim, quick)) todo.push_back({f, c});
        }

    std::mutex card_in_use;
    std::atomic<size_t> next{0};
    std::vector<std::thread> pool;
    for (unsigned i = 0; i < std::max(1u, std::thread::hardware_concurrency()); i++)
        pool.emplace_back([&] {
            CUDA(cudaSetDevice(0));
            CUDA(cudaFree(nullptr));
            for (size_t n; (n = next++) < todo.size();) {
                Case c = todo[n].c;
                prepare(c, int(n) + 1);
                std::lock_guard<std::mutex> lock(card_in_use);
                for (auto& path : paths)
                    if (serves_prefill(path, c.dim, c.key))
                        check(c, todo[n].format->name, path, tallies[{todo[n].format->name, c.dim, path}]);
            }
        });
    for (auto& t : pool) t.join();

    int failed = 0, cases = 0;
    std::printf("prefill against double precision on %s; relative L2 of the worst case (whole; limit %.0e; bf16: before rounding of out) and of\n"
                "the worst row (limit %.0e)\n", card.name, LIMIT, ROW_LIMIT);
    std::printf("%-8s %4s %-6s %6s %7s %9s %9s %9s %9s %9s\n", "format", "D", "path", "cases", "failed", "whole", "fp16", "bf16", "unrounded", "lse");
    for (auto& [key, t] : tallies) {
        auto& [format, dim, path] = key;
        auto number = [](double x) {
            char text[16];
            std::snprintf(text, sizeof text, "%.2e", x);
            return std::string(x == 0 ? "" : text);
        };
        std::printf("%-8s %4d %-6s %6d %7d %9s %9s %9s %9s %9s\n", format.c_str(), dim, path.c_str(), t.cases, t.failed, number(t.whole).c_str(),
                    number(t.f16).c_str(), number(t.bf16).c_str(), number(t.unrounded).c_str(), number(t.lse).c_str());
        failed += t.failed, cases += t.cases;
    }
    std::printf("prefill: %d cases, %d failed\n", cases, failed);
    return failed || cases == 0 ? 1 : 0;
}
