// Times the decode kernels with KV from memory: every launch of a captured graph reads pages no recent
// launch has read. Prints one table; "overlap": launches that may set up while the previous one ends.
//   time_decode KERNEL_FOLDER [FORMATS [SHAPES [BATCHES [CONTEXTS [GRID]]]]]   comma separated
//   formats: 4bit_nc k8v4 k3v4_nc 3bit_nc fp8 bf16; shapes: 32/8/128 and the like
#include <algorithm>
#include <numeric>
#include <random>

#include "arguments.h"
#include "gpu.h"
#include "random_pages.h"

int main(int argc, char** argv) {
    kernel_folder = argc > 1 ? argv[1] : ".";
    auto arg = [&](int i, const char* otherwise) { return split(argc > i ? argv[i] : otherwise, ','); };
    auto formats = arg(2, "4bit_nc,k8v4,k3v4_nc,3bit_nc,fp8,bf16"), shapes = arg(3, "32/8/128,24/4/256,16/2/256");
    auto batches = arg(4, "1,8,32,64"), contexts = arg(5, "1024,8192,32768,131072");
    int grid = argc > 6 ? std::atoi(argv[6]) : 0;
    const size_t TOKENS = size_t(64) * 131072, PAGE = 16;
    cudaDeviceProp prop;
    CUDA(cudaGetDeviceProperties(&prop, 0));
    std::printf("%s, %d multiprocessors; KV from memory, pages of %zu in random order, graph replay, median\n", prop.name,
                prop.multiProcessorCount, PAGE);
    std::printf("%-8s %-9s %4s %7s %9s %9s %7s %9s\n", "format", "shape", "B", "ctx", "us", "GB/s", "of4610", "overlap");

    size_t pages = TOKENS / PAGE;
    std::vector<int> order(pages);
    std::iota(order.begin(), order.end(), 0);
    if (!std::getenv("TQ_IN_ORDER")) std::shuffle(order.begin(), order.end(), std::mt19937(7));
    Device<int> tables(order);
    cudaStream_t stream;
    CUDA(cudaStreamCreate(&stream));
    for (auto& shape : shapes) {
        auto parts = split(shape, '/');
        int qo = std::stoi(parts[0]), kv = std::stoi(parts[1]), dim = std::stoi(parts[2]), gqa = qo / kv;
        for (auto& name : formats) {
            int key = name == "4bit_nc" ? ref::LLOYD4 : name == "k8v4" || name == "fp8" ? ref::FP8 : name == "bf16" ? ref::BF16 : ref::LLOYD3;
            int value = name == "3bit_nc" ? ref::UNIFORM3 : name == "fp8" ? ref::FP8 : name == "bf16" ? ref::BF16 : ref::UNIFORM4;
            std::vector<int> book;
            if (ref::is_lloyd(key)) book = ref::odd_codebook(ref::centroids(dim, ref::bits_of(key)));
            ref::Layout layout{dim, key, value, kv, int(PAGE), book};
            size_t page_bytes = layout.page_bytes();
            Device<uint8_t> pool(pages * page_bytes);
            fill_pages_of(layout, pool.at, pages * page_bytes);
            CUDA(cudaDeviceSynchronize());
            auto launch = decode_launch(dim, key, value, ref::BF16, gqa, false, grid);
            std::mt19937 rng(3);
            std::normal_distribution<float> normal;
            std::vector<uint16_t> q(size_t(64) * qo * dim);
            for (auto& x : q) x = ref::bf16_bits(normal(rng));
            Device<uint16_t> d_q(q), d_out(q.size());
            Device<float> lse(size_t(64) * qo);
            Device<uint32_t> partials(launch.partials());
            for (auto& batch_text : batches)
                for (auto& context_text : contexts) {
                    int batch = std::stoi(batch_text), context = std::stoi(context_text);
                    if (batch < 1 || batch > 64 || context < int(PAGE) || size_t(batch) * context > TOKENS) {
                        std::fprintf(stderr, "%d x %d: at most 64 sequences and %zu tokens in all\n", batch, context, TOKENS);
                        return 2;
                    }
                    size_t set_pages = size_t(batch) * context / PAGE, set_bytes = set_pages * page_bytes;
                    size_t sets = std::min<size_t>(std::min<size_t>(256, pages / set_pages), 1 + 280000000 / set_bytes);
                    Device<int> lens(std::vector<int>(batch, context));
                    tq::DecodeParams p = {};
                    p.out = d_out.at, p.lse = lse.at, p.q = d_q.at, p.pages = pool.at, p.seq_lens = lens.at;
                    p.partials = reinterpret_cast<float*>(partials.at), p.page_bytes = page_bytes;
                    if (!book.empty()) std::memcpy(p.codebook, ref::codebook_bytes(book).data(), 8);
                    p.num_seqs = batch, p.num_kv_heads = kv, p.gqa_group = gqa, p.q_len = 1, p.page_size = PAGE;
                    p.max_pages = context / PAGE, p.sm_scale = 1 / std::sqrt(float(dim));
                    double us[2];
                    for (int overlap = 0; overlap < 2; overlap++) {
                        launch.overlap = overlap;
                        double ms = median_ms(stream, 1, 20, [&] {
                            for (size_t s = 0; s < sets; s++) {
                                p.block_tables = tables.at + s * set_pages;
                                launch(p, stream);
                            }
                        });
                        us[overlap] = ms * 1e3 / sets;
                    }
                    double gbs = set_bytes / us[0] * 1e-3;
                    std::printf("%-8s %-9s %4d %7d %9.2f %9.0f %6.1f%% %9.2f\n", name.c_str(), shape.c_str(), batch, context, us[0], gbs, gbs / 46.10, us[1]);
                    std::fflush(stdout);
                }
        }
    }
    return 0;
}
