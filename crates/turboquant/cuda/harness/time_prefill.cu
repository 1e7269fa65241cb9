// Times the prefill kernels: one sequence, causal, bf16 queries, pages of 16 tokens in random order; median
// of 10. TFLOP/s counts only what is visible. A few rows are held to double precision; exits 1 if they
// or any element is not what it should be.
//   time_prefill KERNEL_FOLDER [PATHS [FORMATS [SHAPES]]]    comma separated
//   paths: mma wgmma; formats (of the prefix): 4bit_nc k8v4 k3v4_nc 3bit_nc fp8 bf16; shapes: 32/8/128 and the like
#include <algorithm>
#include <numeric>
#include <random>
#include <thread>

#include "arguments.h"
#include "gpu.h"
#include "random_pages.h"

struct Shape {
    const char* name;
    int qo, kv, dim, tokens, total;
};
static const Shape SHAPES[] = {
    {"32/8/128", 32, 8, 128, 2048, 2048},   {"32/8/128", 32, 8, 128, 8192, 8192},   {"32/8/128", 32, 8, 128, 32768, 32768},
    {"32/8/128", 32, 8, 128, 512, 33280},   {"32/8/128", 32, 8, 128, 2048, 34816},  {"32/8/128", 32, 8, 128, 8192, 40960},
    {"24/4/256", 24, 4, 256, 8192, 8192},   {"24/4/256", 24, 4, 256, 32768, 32768}, {"24/4/256", 24, 4, 256, 2048, 34816},
    {"16/2/256", 16, 2, 256, 8192, 8192},   {"16/2/256", 16, 2, 256, 2048, 34816},  {"32/8/64", 32, 8, 64, 8192, 8192},
    {"32/8/64", 32, 8, 64, 2048, 34816},
};
constexpr int PAGE = 16;
constexpr double LIMIT = 4e-3;  // 2e-3 and the rounding of bf16 outputs

// One KV head on the host, keys not rotated. Positions below the prefix come from the pages.
struct Head {
    std::vector<std::vector<double>> keys, values;
};
static Head decode_head(const ref::Layout& layout, const std::vector<uint8_t>& pages, const std::vector<int>& table, int prefix,
                        const std::vector<uint16_t>& raw_keys, const std::vector<uint16_t>& raw_values, int head) {
    size_t total = prefix + raw_keys.size() / layout.dim;
    Head x{std::vector<std::vector<double>>(total), std::vector<std::vector<double>>(total)};
    unsigned workers = std::max(1u, std::thread::hardware_concurrency());
    std::vector<std::thread> pool;
    for (unsigned w = 0; w < workers; w++)
        pool.emplace_back([&, w] {
            for (size_t i = w; i < total; i += workers) {
                if (i >= size_t(prefix)) {
                    for (int d = 0; d < layout.dim; d++) {
                        size_t at = (i - prefix) * layout.dim + d;
                        x.keys[i].push_back(ref::bf16_value(raw_keys[at])), x.values[i].push_back(ref::bf16_value(raw_values[at]));
                    }
                    continue;
                }
                uint8_t* page = const_cast<uint8_t*>(pages.data()) + table[i / PAGE] * layout.page_bytes();
                auto row = layout.read(page, int(i % PAGE), head);
                if (ref::is_lloyd(layout.key_format)) {
                    x.keys[i] = layout.stored_key(page, int(i % PAGE), head);
                    ref::rotate(x.keys[i], true);
                } else {
                    x.keys[i] = ref::decode_key(row, layout.key_format, layout.book);
                }
                x.values[i] = ref::decode_value(row, layout.value_format);
            }
        });
    for (auto& t : pool) t.join();
    return x;
}

template <class F>
static double median_ms(F&& launch, cudaStream_t stream) {
    cudaEvent_t a, b;
    CUDA(cudaEventCreate(&a));
    CUDA(cudaEventCreate(&b));
    auto time = [&](int repeats) {
        CUDA(cudaEventRecord(a, stream));
        for (int i = 0; i < repeats; i++) launch();
        CUDA(cudaEventRecord(b, stream));
        CUDA(cudaEventSynchronize(b));
        float ms;
        CUDA(cudaEventElapsedTime(&ms, a, b));
        return double(ms) / repeats;
    };
    time(2);
    int repeats = std::max(1, std::min(20, int(2 / time(1))));
    std::vector<double> times;
    for (int i = 0; i < 10; i++) times.push_back(time(repeats));
    std::sort(times.begin(), times.end());
    CUDA(cudaEventDestroy(a));
    CUDA(cudaEventDestroy(b));
    return (times[4] + times[5]) / 2;
}

int main(int argc, char** argv) {
    kernel_folder = argc > 1 ? argv[1] : ".";
    auto arg = [&](int i, const char* otherwise) { return split(argc > i ? argv[i] : otherwise, ','); };
    cudaDeviceProp card;
    CUDA(cudaGetDeviceProperties(&card, 0));
    auto paths = arg(2, card.major == 9 && card.minor == 0 ? "mma,wgmma" : "mma");
    auto formats = arg(3, "4bit_nc,k8v4,fp8,bf16"), wanted = arg(4, "32/8/128,24/4/256,16/2/256,32/8/64");
    std::printf("%s; prefill, one sequence, causal, bf16, pages of %d in random order, median of 10\n", card.name, PAGE);
    std::printf("%-6s %-8s %-9s %6s %7s %9s %8s %9s\n", "path", "format", "shape", "new", "total", "ms", "TFLOP/s", "error");
    cudaStream_t stream;
    CUDA(cudaStreamCreate(&stream));
    bool good = true;
    for (const Shape& x : SHAPES) {
        if (std::find(wanted.begin(), wanted.end(), x.name) == wanted.end()) continue;
        int prefix = x.total - x.tokens, gqa = x.qo / x.kv;
        size_t q_count = size_t(x.tokens) * x.qo * x.dim, kv_count = size_t(x.tokens) * x.kv * x.dim;
        Device<uint16_t> q(q_count), key(kv_count), value(kv_count), out(q_count);
        fill_normal<<<4096, 256>>>(q.at, q_count, 1);
        fill_normal<<<4096, 256>>>(key.at, kv_count, 2);
        fill_normal<<<4096, 256>>>(value.at, kv_count, 3);
        Device<float> lse(size_t(x.tokens) * x.qo);
        Device<int> starts(std::vector<int>{0, x.tokens}), prefixes(std::vector<int>{prefix});
        std::vector<int> order(prefix / PAGE);
        std::iota(order.begin(), order.end(), 0);
        std::shuffle(order.begin(), order.end(), std::mt19937(7));
        Device<int> table(order);
        // query rows to look at, all of one KV head
        int head = x.kv - 1;
        const int sample[] = {0, 1, x.tokens / 2 + 5, x.tokens - 1};
        auto raw_head = [&](const Device<uint16_t>& from) {
            std::vector<uint16_t> v(size_t(x.tokens) * x.dim);
            CUDA(cudaMemcpy2D(v.data(), 2 * x.dim, from.at + head * x.dim, size_t(2) * x.kv * x.dim, 2 * x.dim, x.tokens, cudaMemcpyDeviceToHost));
            return v;
        };
        auto keys = raw_head(key), values = raw_head(value);

        for (auto& name : formats) {
            int k = name == "4bit_nc" ? ref::LLOYD4 : name == "k8v4" || name == "fp8" ? ref::FP8 : name == "bf16" ? ref::BF16 : ref::LLOYD3;
            int v = name == "3bit_nc" ? ref::UNIFORM3 : name == "fp8" ? ref::FP8 : name == "bf16" ? ref::BF16 : ref::UNIFORM4;
            if (prefix == 0 && name != formats[0]) continue;  // nothing is packed
            std::vector<int> book;
            if (ref::is_lloyd(k)) book = ref::odd_codebook(ref::centroids(x.dim, ref::bits_of(k)));
            ref::Layout layout{x.dim, k, v, x.kv, PAGE, book};
            size_t bytes = order.size() * layout.page_bytes();
            Device<uint8_t> pages(bytes);
            if (bytes) fill_pages_of(layout, pages.at, bytes);
            CUDA(cudaDeviceSynchronize());
            Head decoded;
            for (auto& path : paths) {
                if (!serves_prefill(path, x.dim, k)) continue;
                tq::PrefillParams p = {};
                p.out = out.at, p.lse = lse.at, p.q = q.at, p.key = key.at, p.value = value.at, p.pages = pages.at;
                p.block_tables = table.at, p.query_starts = starts.at, p.prefix_lens = prefixes.at;
                p.page_bytes = layout.page_bytes(), p.key_stride = p.value_stride = int64_t(x.kv) * x.dim;
                if (!book.empty()) std::memcpy(p.codebook, ref::codebook_bytes(book).data(), 8);
                p.num_seqs = 1, p.num_kv_heads = x.kv, p.gqa_group = gqa, p.page_size = PAGE;
                p.max_pages = std::max(1, prefix / PAGE), p.sm_scale = 1 / std::sqrt(float(x.dim));
                const Kernel& kernel = load_prefill(path, x.dim, k, v, ref::BF16, false);
                CUDA(cudaMemset(out.at, 0xff, 2 * q_count));
                double ms = median_ms([&] { launch_prefill(kernel, p, x.tokens, stream); }, stream);
                double pairs = double(x.tokens) * prefix + double(x.tokens) * x.tokens / 2;
                double flops = 4 * pairs * x.qo * x.dim;

                auto result = out.host();
                bool finite = true, zero = true;
                for (uint16_t y : result) finite &= (y & 0x7f80) != 0x7f80, zero &= (y & 0x7fff) == 0;
                if (decoded.keys.empty()) {
                    auto host_pages = pages.host();
                    decoded = decode_head(layout, host_pages, order, prefix, keys, values, head);
                }
                double error = 0;
                for (int token : sample) {
                    size_t row = (size_t(token) * x.qo + head * gqa + gqa - 1) * x.dim;
                    std::vector<uint16_t> raw(x.dim);
                    CUDA(cudaMemcpy(raw.data(), q.at + row, 2 * x.dim, cudaMemcpyDeviceToHost));
                    std::vector<double> query(raw.size());
                    for (int d = 0; d < x.dim; d++) query[d] = ref::bf16_value(raw[d]);
                    auto a = ref::attend(query, decoded.keys, decoded.values, 0, prefix + token + 1, p.sm_scale, 0, nullptr);
                    double diff = 0, norm = 0;
                    for (int d = 0; d < x.dim; d++) {
                        double y = ref::bf16_value(result[row + d]);
                        diff += (y - a.out[d]) * (y - a.out[d]), norm += a.out[d] * a.out[d];
                    }
                    double e = std::sqrt(diff / norm);
                    error = std::isnan(e) ? INFINITY : std::fmax(error, e);
                }
                bool ok = finite && !zero && error <= LIMIT;
                good &= ok;
                std::printf("%-6s %-8s %-9s %6d %7d %9.3f %8.0f %9.1e%s\n", path.c_str(), prefix ? name.c_str() : "fresh", x.name, x.tokens,
                            x.total, ms, flops / ms * 1e-9, error,
                            !finite ? " FAIL: not all finite" : zero ? " FAIL: all zero" : !ok ? " FAIL" : "");
                std::fflush(stdout);
            }
        }
    }
    return good ? 0 : 1;
}
