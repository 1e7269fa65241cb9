// Loading and launching the compiled kernels from the harness programs.
#pragma once
#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <map>
#include <string>
#include <vector>

#include "../layout.cuh"
#include "../params.cuh"

#define CUDA(call)                                                                                     \
    do {                                                                                               \
        cudaError_t status_ = (call);                                                                  \
        if (status_ != cudaSuccess) {                                                                  \
            std::fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #call, cudaGetErrorString(status_)); \
            std::exit(2);                                                                              \
        }                                                                                              \
    } while (0)
#define DRIVER(call)                                                                 \
    do {                                                                             \
        CUresult status_ = (call);                                                   \
        if (status_ != CUDA_SUCCESS) {                                               \
            const char* text_ = "?";                                                 \
            cuGetErrorString(status_, &text_);                                       \
            std::fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #call, text_); \
            std::exit(2);                                                            \
        }                                                                            \
    } while (0)

struct Kernel {
    CUfunction function = nullptr;
    CUmodule module = nullptr;
    int info[8] = {};
};

inline std::string kernel_folder = ".";

// `name` is the cubin's; `symbol` the kernel in it; `symbol`_info its launch facts.
inline Kernel& load_kernel(const std::string& name, const std::string& symbol, int shared_at) {
    static std::map<std::string, Kernel> loaded;
    auto found = loaded.find(name);
    if (found != loaded.end()) return found->second;
    Kernel k;
    CUmodule module;
    CUresult status = cuModuleLoad(&module, (kernel_folder + "/" + name + ".cubin").c_str());
    if (status != CUDA_SUCCESS) {
        const char* text = "?";
        cuGetErrorString(status, &text);
        std::fprintf(stderr, "cannot load kernel %s: %s\n", name.c_str(), text);
        std::exit(2);
    }
    k.module = module;
    DRIVER(cuModuleGetFunction(&k.function, module, symbol.c_str()));
    CUdeviceptr info;
    size_t bytes;
    DRIVER(cuModuleGetGlobal(&info, &bytes, module, (symbol + "_info").c_str()));
    DRIVER(cuMemcpyDtoH(k.info, info, bytes < sizeof k.info ? bytes : sizeof k.info));
    DRIVER(cuFuncSetAttribute(k.function, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, k.info[shared_at]));
    return loaded[name] = k;
}

inline std::string decode_name(int dim, int key, int value, int io, int blocks, bool softcap) {
    char name[96];
    std::snprintf(name, sizeof name, "decode_d%d_k%d_v%d_io%d_b%d_s%d", dim, key, value, io, blocks, int(softcap));
    return name;
}

inline Kernel& load_store(int dim, int key, int value, int io) {
    char name[96];
    std::snprintf(name, sizeof name, "store_d%d_k%d_v%d_io%d", dim, key, value, io);
    return load_kernel(name, "turboquant_store", 1);
}
inline void launch_store(const Kernel& k, tq::StoreParams params, cudaStream_t stream) {
    void* args[] = {&params};
    int64_t rows = int64_t(params.num_tokens) * params.num_kv_heads, a_block = k.info[0] / 32;
    if (rows == 0) return;
    DRIVER(cuLaunchKernel(k.function, unsigned((rows + a_block - 1) / a_block), 1, 1, k.info[0], 1, 1, 0, stream, args, nullptr));
}

// Grid of a decode launch, and room for its parts.
struct DecodeLaunch {
    Kernel* kernel;
    int grid;
    bool overlap = false;  // may set up while the stream's previous kernel ends
    std::vector<uint32_t> partials() const { return std::vector<uint32_t>(size_t(2) * grid * kernel->info[4], ~0u); }  // as a launch wants and leaves them
    void operator()(tq::DecodeParams params, cudaStream_t stream) const {
        void* args[] = {&params};
        CUlaunchAttribute attributes[2] = {};
        attributes[0].id = CU_LAUNCH_ATTRIBUTE_COOPERATIVE, attributes[0].value.cooperative = 1;
        attributes[1].id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, attributes[1].value.programmaticStreamSerializationAllowed = 1;
        CUlaunchConfig config = {};
        config.gridDimX = grid, config.gridDimY = config.gridDimZ = 1;
        config.blockDimX = kernel->info[0], config.blockDimY = config.blockDimZ = 1;
        config.sharedMemBytes = kernel->info[1], config.hStream = stream;
        config.attrs = attributes, config.numAttrs = overlap ? 2 : 1;
        DRIVER(cuLaunchKernelEx(&config, kernel->function, args, nullptr));
    }
};
inline DecodeLaunch decode_launch(int dim, int key, int value, int io, int rows, bool softcap, int grid = 0) {
    int blocks = rows > 8 ? 2 : 1;
    Kernel& k = load_kernel(decode_name(dim, key, value, io, blocks, softcap), "turboquant_decode", 1);
    int device, sms;
    CUDA(cudaGetDevice(&device));
    CUDA(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device));
    return {&k, grid ? grid : sms * k.info[3]};
}

// Whether `path` ("mma" or "wgmma") has a kernel for the rows; build.sh builds the same ones.
inline bool serves_prefill(const std::string& path, int dim, int key) {
    if (path == "mma") return true;
    return dim % 64 == 0 && (dim < 256 || key >= tq::FP8);  // as fits_wgmma in variant.rs
}
inline Kernel& load_prefill(const std::string& path, int dim, int key, int value, int io, bool softcap) {
    char name[96];
    std::snprintf(name, sizeof name, "prefill_%s_d%d_k%d_v%d_io%d_s%d", path.c_str(), dim, key, value, io, int(softcap));
    return load_kernel(name, "turboquant_prefill", 1);
}
inline void launch_prefill(const Kernel& k, tq::PrefillParams params, int num_tokens, cudaStream_t stream) {
    void* args[] = {&params};
    int64_t tiles = int64_t(num_tokens) * params.gqa_group / k.info[2] + params.num_seqs;
    DRIVER(cuLaunchKernel(k.function, unsigned(params.num_kv_heads * tiles), 1, 1, k.info[0], 1, 1, k.info[1], stream, args, nullptr));
}

// Milliseconds that a captured graph of `launches()` takes: the median of `repeats` replays after `warm_ups`, or of
// as many as 60 ms hold, but three at least.
template <class F>
inline double median_ms(cudaStream_t stream, int warm_ups, int repeats, F&& launches) {
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    launches();
    CUDA(cudaStreamEndCapture(stream, &graph));
    CUDA(cudaGraphInstantiate(&exec, graph, 0));
    cudaEvent_t begin, end;
    CUDA(cudaEventCreate(&begin));
    CUDA(cudaEventCreate(&end));
    std::vector<float> times;
    double spent = 0;
    for (int r = 0; r < warm_ups + repeats && (r < warm_ups + 3 || spent < 60); r++) {
        CUDA(cudaEventRecord(begin, stream));
        CUDA(cudaGraphLaunch(exec, stream));
        CUDA(cudaEventRecord(end, stream));
        CUDA(cudaEventSynchronize(end));
        float ms;
        CUDA(cudaEventElapsedTime(&ms, begin, end));
        if (r >= warm_ups) times.push_back(ms);
        spent += ms;
    }
    CUDA(cudaEventDestroy(begin));
    CUDA(cudaEventDestroy(end));
    CUDA(cudaGraphExecDestroy(exec));
    CUDA(cudaGraphDestroy(graph));
    std::sort(times.begin(), times.end());
    return times[times.size() / 2];
}

template <class T>
struct Device {
    T* at = nullptr;
    size_t count = 0;
    Device() = default;
    explicit Device(size_t n) : count(n) { CUDA(cudaMalloc(&at, n * sizeof(T) + 16)); }
    explicit Device(const std::vector<T>& v) : Device(v.size()) {
        if (!v.empty()) CUDA(cudaMemcpy(at, v.data(), v.size() * sizeof(T), cudaMemcpyHostToDevice));
    }
    Device(const Device&) = delete;
    Device& operator=(Device&& o) noexcept {
        std::swap(at, o.at), std::swap(count, o.count);
        return *this;
    }
    Device(Device&& o) noexcept { *this = std::move(o); }
    ~Device() { cudaFree(at); }
    std::vector<T> host() const {
        std::vector<T> v(count);
        CUDA(cudaMemcpy(v.data(), at, count * sizeof(T), cudaMemcpyDeviceToHost));
        return v;
    }
};
