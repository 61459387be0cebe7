// Times every allocation and free of the allocator that PyTorch uses, whichever it is.
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/csrc/cuda/CUDAPluggableAllocator.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>

namespace {

using Clock = std::chrono::steady_clock;
using Allocator = c10::cuda::CUDACachingAllocator::CUDAAllocator;

// Calls and their nanoseconds, also by the number of bits of a call's nanoseconds.
struct Times {
    std::atomic<std::uint64_t> calls{0}, nanoseconds{0};
    std::array<std::atomic<std::uint64_t>, 64> by_bits{};
};

Times times[2];
Allocator *timed = nullptr;

struct Call {
    explicit Call(Times &to) : to(to) {}
    ~Call() {
        const auto spent = std::chrono::nanoseconds(Clock::now() - start).count();
        const auto nanoseconds = static_cast<std::uint64_t>(spent);
        to.calls.fetch_add(1, std::memory_order_relaxed);
        to.nanoseconds.fetch_add(nanoseconds, std::memory_order_relaxed);
        const int bits = nanoseconds ? 64 - __builtin_clzll(nanoseconds) : 0;
        to.by_bits[bits].fetch_add(1, std::memory_order_relaxed);
    }
    Times &to;
    Clock::time_point start = Clock::now();
};

void release(void *memory) {
    if (!memory) return;
    Call call(times[1]);
    timed->raw_delete(memory);
}

// Its base class implements what this program does not use.
struct Meter final : torch::cuda::CUDAPluggableAllocator::CUDAPluggableAllocator {
    Meter() : CUDAPluggableAllocator(nullptr, nullptr) {}

    void *raw_alloc_with_stream(std::size_t bytes, cudaStream_t stream) override {
        Call call(times[0]);
        return timed->raw_alloc_with_stream(bytes, stream);
    }

    void *raw_alloc(std::size_t bytes) override {
        return raw_alloc_with_stream(bytes, c10::cuda::getCurrentCUDAStream());
    }

    c10::DataPtr allocate(std::size_t bytes) override {
        void *memory = raw_alloc(bytes);
        return {memory, memory, &release, c10::Device(c10::kCUDA, c10::cuda::current_device())};
    }

    void raw_delete(void *memory) override { release(memory); }

    c10::DeleterFnPtr raw_deleter() const override { return &release; }

    void recordStream(const c10::DataPtr &memory, c10::cuda::CUDAStream stream) override {
        c10::DataPtr block(memory.get(), memory.get(), timed->raw_deleter(), memory.device());
        timed->recordStream(block, stream);
        block.release_context();
    }

    void init(int devices) override {
        timed->init(devices);
        initialized_ = true;
    }
};

} // namespace

extern "C" {

// Puts timed functions between PyTorch and its allocator, before the device is used.
__attribute__((visibility("default"))) void meter_start() {
    static Meter meter;
    timed = c10::cuda::CUDACachingAllocator::allocator.load();
    c10::cuda::CUDACachingAllocator::allocator.store(&meter);
}

// Statistics are asked of the timed allocator again. Blocks of the timed functions stay valid.
__attribute__((visibility("default"))) void meter_stop() { c10::cuda::CUDACachingAllocator::allocator.store(timed); }

__attribute__((visibility("default"))) void meter_reset() {
    for (Times &one : times) {
        one.calls = 0;
        one.nanoseconds = 0;
        for (auto &count : one.by_bits) count = 0;
    }
}

// Of allocations (0) or frees (1): calls, nanoseconds, then the calls of 0 to 63 bits of nanoseconds.
__attribute__((visibility("default"))) void meter_read(int which, std::uint64_t *to) {
    *to++ = times[which].calls;
    *to++ = times[which].nanoseconds;
    for (const auto &count : times[which].by_bits) *to++ = count;
}

// Nanoseconds that the meter itself adds to a call.
__attribute__((visibility("default"))) double meter_own_cost() {
    Times own;
    for (int i = 0; i < 100000; i++) Call call(own);
    return static_cast<double>(own.nanoseconds) / 100000;
}

} // extern "C"
