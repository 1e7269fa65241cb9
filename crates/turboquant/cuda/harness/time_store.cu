// Times the store kernels: tokens to random slots, graph replay.   time_store KERNEL_FOLDER
#include <algorithm>
#include <numeric>
#include <random>

#include "gpu.h"
#include "reference.h"

int main(int argc, char** argv) {
    kernel_folder = argc > 1 ? argv[1] : ".";
    CUDA(cudaFree(nullptr));
    struct {
        const char* name;
        int key, value;
    } formats[] = {{"4bit_nc", ref::LLOYD4, ref::UNIFORM4}, {"k8v4", ref::FP8, ref::UNIFORM4}, {"k3v4_nc", ref::LLOYD3, ref::UNIFORM4},
                   {"3bit_nc", ref::LLOYD3, ref::UNIFORM3}, {"fp8", ref::FP8, ref::FP8},       {"bf16", ref::BF16, ref::BF16}};
    const int shapes[][2] = {{8, 128}, {4, 256}, {2, 256}}, counts[] = {1, 8, 64, 1024, 8192};
    constexpr int PAGE = 16, LAUNCHES = 16;
    std::printf("store, us a layer\n%-8s %-7s", "format", "Hkv/D");
    for (int n : counts) std::printf(" %8d", n);
    std::printf("\n");
    cudaStream_t stream;
    CUDA(cudaStreamCreate(&stream));
    for (auto& shape : shapes)
        for (auto& format : formats) {
            int heads = shape[0], dim = shape[1];
            std::vector<float> mids;
            std::vector<int> book;
            if (ref::is_lloyd(format.key)) {
                auto c = ref::centroids(dim, ref::bits_of(format.key));
                mids = ref::midpoints(c), book = ref::odd_codebook(c);
            }
            ref::Layout layout{dim, format.key, format.value, heads, PAGE, book};
            const int most = 8192, pages = LAUNCHES * most / PAGE;
            std::mt19937 rng(1);
            std::normal_distribution<float> normal;
            std::vector<uint16_t> x(size_t(most) * heads * dim);
            for (auto& v : x) v = ref::bf16_bits(normal(rng));
            std::vector<int> order(pages);
            std::iota(order.begin(), order.end(), 0);
            std::shuffle(order.begin(), order.end(), rng);
            std::vector<int64_t> slots(size_t(pages) * PAGE);
            for (size_t i = 0; i < slots.size(); i++) slots[i] = int64_t(order[i / PAGE]) * PAGE + i % PAGE;
            load_store(dim, format.key, format.value, ref::BF16);  // not while capturing
            Device<uint16_t> k(x), v(x);
            Device<int64_t> d_slots(slots);
            Device<uint8_t> d_pages(size_t(pages) * layout.page_bytes());
            std::printf("%-8s %d/%-5d", format.name, heads, dim);
            for (int n : counts) {
                tq::StoreParams p = {};
                p.key = k.at, p.value = v.at, p.pages = d_pages.at, p.page_bytes = layout.page_bytes();
                p.key_stride = p.value_stride = heads * dim, p.num_tokens = n, p.num_kv_heads = heads, p.page_size = PAGE;
                std::copy(mids.begin(), mids.end(), p.midpoints);
                if (!book.empty()) std::memcpy(p.codebook, ref::codebook_bytes(book).data(), 8);
                double ms = median_ms(stream, 2, 10, [&] {
                    for (int i = 0; i < LAUNCHES; i++) {
                        p.slot_mapping = reinterpret_cast<const i64*>(d_slots.at) + size_t(i) * most;
                        launch_store(load_store(dim, format.key, format.value, ref::BF16), p, stream);
                    }
                });
                std::printf(" %8.2f", ms * 1e3 / LAUNCHES);
            }
            std::printf("\n");
        }
    return 0;
}
