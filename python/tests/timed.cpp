// Our functions for PyTorch, and how long their callers were in them.
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>

extern "C" {
void *cualloc_torch_alloc_or_throw(std::size_t bytes, int device, void *stream);
void cualloc_torch_free(void *memory, std::size_t bytes, int device, void *stream);
}

namespace {

using Clock = std::chrono::steady_clock;
std::atomic<std::uint64_t> spent{0}, calls{0};

struct Timed {
    Clock::time_point start = Clock::now();
    ~Timed() {
        spent += static_cast<std::uint64_t>(std::chrono::nanoseconds(Clock::now() - start).count());
        calls++;
    }
};

} // namespace

extern "C" {

void *timed_alloc(std::size_t bytes, int device, void *stream) {
    Timed timed;
    return cualloc_torch_alloc_or_throw(bytes, device, stream);
}

void timed_free(void *memory, std::size_t bytes, int device, void *stream) {
    Timed timed;
    cualloc_torch_free(memory, bytes, device, stream);
}

// Nanoseconds in both so far.
std::uint64_t timed_spent() { return spent; }

std::uint64_t timed_calls() { return calls; }

}
