// Checks the decode kernels against double precision over the rows as the page holds them; exits 1 on any
// mismatch. Against rows with the fp16 norm of vLLM's slot, which the page holds folded to 11 mantissa bits
// (2^-12 of a logit at most), the worst error is printed beside.
//   check_decode KERNEL_FOLDER [--small]    --small: a few short cases, for compute-sanitizer
#include <algorithm>
#include <atomic>
#include <random>
#include <thread>

#include "gpu.h"
#include "reference.h"

struct Case {
    const char* what;
    int dim, key, value, io, gqa, q_len, page_size, window;
    bool sinks;
    float softcap;
    std::vector<int> lens;

    // made by prepare()
    ref::Layout layout;
    std::vector<uint8_t> pages;
    std::vector<uint8_t> used;  // 1 where a byte belongs to a token
    std::vector<int> tables;
    int max_pages = 0;
    std::vector<uint16_t> q;
    std::vector<float> sink;
    std::vector<int> book;
    std::vector<double> out, lse;
    std::vector<double> out_of_slots;  // with the fp16 norms
};
constexpr int HEADS = 2;

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
    int seqs = int(c.lens.size()), num_pages = 1;
    for (int len : c.lens) {
        int need = (len + c.page_size - 1) / c.page_size;
        num_pages += need;
        c.max_pages = std::max(c.max_pages, need);
    }
    c.max_pages = std::max(c.max_pages, 1);
    c.tables.assign(seqs * c.max_pages, -1);
    std::vector<int> order(num_pages - 1);
    for (int i = 0; i < num_pages - 1; i++) order[i] = i + 1;
    std::shuffle(order.begin(), order.end(), rng);
    int64_t page_bytes = c.layout.page_bytes();
    c.pages.assign(num_pages * page_bytes, 0);
    c.used.assign(num_pages * page_bytes, 0);
    int rows = c.gqa * c.q_len;
    c.q.resize(size_t(seqs) * rows * HEADS * c.dim);
    for (auto& x : c.q) {
        float v = normal(rng) * 1.5f;
        x = c.io == ref::BF16 ? ref::bf16_bits(v) : ref::f16_bits(v);
    }
    if (c.sinks)
        for (int i = 0; i < HEADS * c.gqa; i++) c.sink.push_back(normal(rng) + 1);
    c.out.resize(c.q.size());
    c.out_of_slots.resize(c.q.size());
    c.lse.resize(c.q.size() / c.dim);

    int next = 0;
    for (int s = 0; s < seqs; s++) {
        int len = c.lens[s];
        for (int i = 0; i * c.page_size < len; i++) c.tables[s * c.max_pages + i] = order[next++];
        for (int h = 0; h < HEADS; h++) {
            std::vector<std::vector<double>> keys, slot_keys, values;
            for (int i = 0; i < len; i++) {
                std::vector<float> k(c.dim), v(c.dim);
                float size = i % 37 == 5 ? 3.0f : 1.0f;
                for (auto& x : k) x = normal(rng) * size;
                for (auto& x : v) x = normal(rng) * (i % 53 == 7 ? 20.0f : 1.0f) + 0.3f;
                if (i % 71 == 9) std::fill(v.begin(), v.end(), 0.25f);  // a constant value row: scale 0
                if (i % 83 == 11) std::fill(k.begin(), k.end(), 0.0f);
                auto row = ref::encode(k, v, c.key, c.value, mids);
                uint8_t* page = c.pages.data() + c.tables[s * c.max_pages + i / c.page_size] * page_bytes;
                uint8_t* mark = c.used.data() + (page - c.pages.data());
                c.layout.write(page, i % c.page_size, h, row);
                c.layout.mark(mark, i % c.page_size, h);
                auto back = c.layout.read(page, i % c.page_size, h);
                if (back.key != row.key || back.value != row.value || back.norm != row.norm || back.scale != row.scale ||
                    back.low != row.low) {
                    std::fprintf(stderr, "the page does not give back its row: norm %x, read %x\n", row.norm, back.norm);
                    std::exit(1);
                }
                slot_keys.push_back(ref::decode_key(row, c.key, c.book));
                keys.push_back(ref::is_lloyd(c.key) ? c.layout.stored_key(page, i % c.page_size, h) : slot_keys.back());
                values.push_back(ref::decode_value(row, c.value));
            }
            for (int j = 0; j < c.q_len; j++)
                for (int gq = 0; gq < c.gqa; gq++) {
                    size_t at = (size_t(s) * c.q_len + j) * HEADS * c.gqa + h * c.gqa + gq;
                    std::vector<double> q(c.dim);
                    for (int d = 0; d < c.dim; d++)
                        q[d] = c.io == ref::BF16 ? ref::bf16_value(c.q[at * c.dim + d]) : ref::f16_value(c.q[at * c.dim + d]);
                    if (ref::is_lloyd(c.key)) ref::rotate(q);
                    int end = std::max(0, len - (c.q_len - 1 - j));
                    int begin = c.window > 0 ? std::max(0, end - c.window) : 0;
                    auto attend = [&](const std::vector<std::vector<double>>& k) {
                        return ref::attend(q, k, values, begin, end, 1 / std::sqrt(double(c.dim)), c.softcap,
                                           c.sinks ? &c.sink[h * c.gqa + gq] : nullptr);
                    };
                    auto a = attend(keys), b = ref::is_lloyd(c.key) ? attend(slot_keys) : a;
                    std::copy(a.out.begin(), a.out.end(), c.out.begin() + at * c.dim);
                    std::copy(b.out.begin(), b.out.end(), c.out_of_slots.begin() + at * c.dim);
                    c.lse[at] = a.lse;
                }
        }
    }
}

// Runs the case with the unused bytes set to `fill`; returns the raw output.
static std::vector<uint16_t> run(const Case& c, uint16_t fill, int grid, std::vector<float>& lse) {
    auto pages = c.pages;
    for (size_t i = 0; i < pages.size(); i++)
        pages[i] = (pages[i] & c.used[i]) | (uint8_t(fill >> (i % 2 * 8)) & ~c.used[i]);
    int rows = c.gqa * c.q_len, seqs = int(c.lens.size());
    auto launch = decode_launch(c.dim, c.key, c.value, c.io, rows, c.softcap > 0, grid);
    launch.overlap = grid == 0;
    Device<uint8_t> d_pages(pages);
    Device<int> d_tables(c.tables), d_lens(c.lens);
    Device<uint16_t> d_q(c.q);
    std::vector<uint16_t> poison(c.q.size(), 0x7fff);
    Device<uint16_t> d_out(poison), d_out_again(poison);
    Device<float> d_lse(std::vector<float>(c.lse.size(), 1e9f)), d_sink(c.sink);
    Device<uint32_t> partials(launch.partials());
    tq::DecodeParams p = {};
    p.out = d_out.at, p.lse = d_lse.at, p.q = d_q.at, p.pages = d_pages.at, p.block_tables = d_tables.at;
    p.seq_lens = d_lens.at, p.sinks = c.sinks ? d_sink.at : nullptr, p.partials = reinterpret_cast<float*>(partials.at);
    p.page_bytes = c.layout.page_bytes();
    if (!c.book.empty()) std::memcpy(p.codebook, ref::codebook_bytes(c.book).data(), 8);
    p.num_seqs = seqs, p.num_kv_heads = HEADS, p.gqa_group = c.gqa, p.q_len = c.q_len, p.page_size = c.page_size;
    p.max_pages = c.max_pages, p.window = c.window, p.sm_scale = float(1 / std::sqrt(double(c.dim))), p.softcap = c.softcap;
    launch(p, 0);
    p.out = d_out_again.at;  // and once more right behind, with the same parts
    launch(p, 0);
    cudaError_t status = cudaDeviceSynchronize();
    if (status != cudaSuccess) {
        std::fprintf(stderr, "%s D %d key %d value %d: %s\n", c.what, c.dim, c.key, c.value, cudaGetErrorString(status));
        std::exit(2);
    }
    if (partials.host() != launch.partials()) std::fprintf(stderr, "a part was left behind\n"), std::exit(1);
    lse = d_lse.host();
    auto out = d_out.host();
    if (d_out_again.host() != out) std::fprintf(stderr, "%s: the second launch differs\n", c.what), std::exit(1);
    return out;
}

int main(int argc, char** argv) {
    kernel_folder = argc > 1 ? argv[1] : ".";
    CUDA(cudaFree(nullptr));
    bool small = argc > 2 && std::string(argv[2]) == "--small";
    using namespace ref;
    std::vector<int> lens = {130, 0, 1, 517, 15, 16, 1000, 33};
    if (small) lens = {70, 0, 1, 33};
    std::vector<Case> cases;
    const int formats[][2] = {{LLOYD4, UNIFORM4}, {FP8, UNIFORM4}, {LLOYD3, UNIFORM4}, {LLOYD3, UNIFORM3},
                              {FP8, FP8},         {BF16, BF16},    {F16, F16}};
    for (auto& f : formats) {
        int io = f[0] == BF16 ? BF16 : F16;
        auto add = [&](const char* what, int dim, int gqa, int q_len, int page, int window, bool sinks, float cap, int io_) {
            if (f[0] == LLOYD3 && dim % 64) return;  // the page order has no place for such codes
            cases.push_back({what, dim, f[0], f[1], io_, gqa, q_len, page, window, sinks, cap, lens});
        };
        if (small) {
            add("plain", 80, 4, 1, 16, 0, false, 0, io);
            add("plain", 192, 4, 1, 16, 0, false, 0, io);
            add("group 16", 128, 16, 1, 16, 0, false, 0, io);
            add("verify 1+1, window, sinks", 128, 4, 2, 32, 40, true, 0, io);
            continue;
        }
        if (f[0] == LLOYD4)
            for (int dim : {48, 160}) add("plain", dim, 4, 1, 16, 0, false, 0, io);
        for (int dim : {64, 80, 96, 128, 192, 256}) {
            add("plain", dim, 4, 1, 16, 0, false, 0, io);
            add("group 16", dim, 16, 1, 16, 0, false, 0, io);
        }
        for (int dim : {64, 128, 256}) {
            for (int gqa : {1, 2, 3, 6, 7, 8}) add("groups", dim, gqa, 1, 16, 0, false, 0, io);
            add("pages of 64", dim, 4, 1, 64, 0, false, 0, io);
            add("pages of 256", dim, 4, 1, 256, 0, false, 0, io);
            add("window", dim, 4, 1, 16, 100, false, 0, io);
            add("sinks", dim, 4, 1, 16, 0, true, 0, io);
            add("softcap", dim, 4, 1, 16, 0, false, 20, io);
            add("verify 1+3", dim, 4, 4, 16, 0, false, 0, io);
            add("verify 1+1, window, sinks", dim, 4, 2, 32, 40, true, 0, io);
            add("verify 1+4 of 8", dim, 8, 5, 16, 0, false, 0, io);
            add("bf16 q", dim, 4, 1, 16, 0, false, 0, f[0] == F16 ? F16 : BF16);
        }
    }
    std::atomic<size_t> next{0};
    std::vector<std::thread> pool;
    for (unsigned i = 0; i < std::max(1u, std::thread::hardware_concurrency()); i++)
        pool.emplace_back([&] {
            for (size_t n; (n = next++) < cases.size();) prepare(cases[n], int(n) + 1);
        });
    for (auto& t : pool) t.join();

    int failed = 0;
    double worst_f16 = 0, worst_bf16 = 0, worst_lse = 0, worst_slots = 0;
    int above = 0;
    for (Case& c : cases) {
        for (int grid : {0, 3}) {
            std::vector<float> lse, lse_nan;
            auto out = run(c, 0x0000, grid, lse);
            auto out_nan = run(c, 0xffff, grid, lse_nan), out_inf = run(c, 0x7c7c, grid, lse_nan);
            bool same = out == out_nan && out == out_inf && std::memcmp(lse.data(), lse_nan.data(), lse.size() * 4) == 0;
            double error = 0, lse_error = 0, slots_error = 0;
            size_t worst = 0;
            for (size_t row = 0; row < c.lse.size(); row++) {
                auto from = [&](const std::vector<double>& want) {
                    double diff = 0, norm = 0;
                    for (size_t at = row * c.dim; at < (row + 1) * c.dim; at++) {
                        double y = c.io == BF16 ? bf16_value(out[at]) : f16_value(out[at]);
                        diff += (y - want[at]) * (y - want[at]), norm += want[at] * want[at];
                    }
                    double e = norm > 0 ? std::sqrt(diff / norm) : diff == 0 ? 0 : 1e9;
                    return std::isnan(e) ? INFINITY : e;  // a NaN is the worst there is
                };
                double e = from(c.out), of_slots = from(c.out_of_slots);
                if (c.io == F16) slots_error = std::fmax(slots_error, of_slots);
                double l = c.lse[row] == lse[row] ? 0 : std::fabs(c.lse[row] - lse[row]);
                if (std::isnan(l)) l = INFINITY;
                if (e > error) error = e, worst = row;
                lse_error = std::fmax(lse_error, l);
            }
            // bf16 output alone rounds by up to 2^-9 of an element
            double bound = c.io == BF16 ? 2.6e-3 : 2e-3;
            bool ok = error <= bound && lse_error <= 5e-3 && same;
            (c.io == BF16 ? worst_bf16 : worst_f16) = std::max(c.io == BF16 ? worst_bf16 : worst_f16, error);
            worst_lse = std::max(worst_lse, lse_error), worst_slots = std::max(worst_slots, slots_error);
            above += slots_error > 2e-3;
            if (!ok) {
                failed++;
                std::printf("FAIL %-26s D %3d key %d value %d io %d group %2d q_len %d page %3d grid %d: error %.2e at row %zu (of %zu), lse %.2e%s\n",
                            c.what, c.dim, c.key, c.value, c.io, c.gqa, c.q_len, c.page_size, grid, error, worst,
                            c.lse.size(), lse_error, same ? "" : ", stale bytes change the result");
            }
        }
    }
    std::printf("decode: %zu cases x 2 grids x 3 fillings, %d failed; worst relative L2 of a row: %.2e (fp16 out), %.2e (bf16 out); lse %.1e\n",
                cases.size(), failed, worst_f16, worst_bf16, worst_lse);
    std::printf("against rows with the slot's fp16 norm: worst %.2e (fp16 out), %d runs above 2e-3\n", worst_slots, above);
    return failed ? 1 : 0;
}
