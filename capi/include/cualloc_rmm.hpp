/* A cualloc allocator as a memory resource of CCCL (cuda::mr), and so of RMM 26.08 and later.
 *
 *     rmm::mr::set_current_device_resource(cualloc::memory_resource::shared(0));
 *
 * takes the allocator that all parts of the process share, PyTorch's and CuPy's among them. Programs over RMM destroy
 * streams without a word to anybody, which that one expects; one of one's own does with the option unretired_streams=on.
 *
 * Header only; needs the headers of CCCL 3 (they come with RMM), and with RMM's error.hpp beside them memory that runs
 * out is an rmm::out_of_memory. */
#ifndef CUALLOC_RMM_HPP
#define CUALLOC_RMM_HPP

#include <cuda/memory_resource>
#include <cuda/stream_ref>

#if __has_include(<rmm/error.hpp>)
#include <rmm/error.hpp>
#endif

#include "cualloc.hpp"

namespace cualloc {

/* Names an allocator, which stays its owner's and is destroyed after the last block of this resource was freed.
 * Copies are the same resource. Any thread may use it. */
class memory_resource {
  public:
    explicit memory_resource(const allocator& of) noexcept : handle_(of.get()) {}
    explicit memory_resource(cualloc_t* of) noexcept : handle_(of) {}

    /* Over the allocator that all parts of the process share for a device (cualloc_shared). It is never destroyed, and
     * callers need not retire streams there. Throws as cualloc::check does. */
    static memory_resource shared(std::int32_t device = 0) {
        cualloc_t* made = nullptr;
        check(cualloc_shared(device, &made));
        return memory_resource(made);
    }

    /* Memory in the order of a stream. 0 bytes are a null pointer. Throws as cualloc::check does. */
    void* allocate(cuda::stream_ref stream, std::size_t bytes, std::size_t alignment = 256) {
        if (bytes == 0) return nullptr;
        make_current();
        std::uint64_t ptr = 0;
        /* Every address is a multiple of 512. */
        const std::int32_t code = alignment <= 512
            ? cualloc_alloc(handle_, bytes, stream.get(), &ptr)
            : cualloc_alloc_aligned(handle_, bytes, alignment, stream.get(), &ptr);
        if (code != CUALLOC_OK) fail(code, bytes);
        return reinterpret_cast<void*>(static_cast<std::uintptr_t>(ptr));
    }

    /* Frees behind what the stream was given so far; it may be another one than that of the allocation. */
    void deallocate(cuda::stream_ref stream, void* ptr, std::size_t, std::size_t = 256) noexcept {
        cualloc_free_on(handle_, reinterpret_cast<std::uintptr_t>(ptr), stream.get());
    }

    /* Memory that every stream may use at once: waits for what was given to the legacy default stream. */
    void* allocate_sync(std::size_t bytes, std::size_t alignment = 256) {
        void* ptr = allocate(cuda::stream_ref{cudaStream_t{}}, bytes, alignment);
        const std::int32_t code = ptr == nullptr ? CUALLOC_OK : cualloc_stream_synchronize(handle_, nullptr);
        if (code != CUALLOC_OK) {
            const error failed(code, cualloc_last_error());
            cualloc_free(handle_, reinterpret_cast<std::uintptr_t>(ptr));
            throw failed;
        }
        return ptr;
    }

    /* Frees memory that no work uses any more. */
    void deallocate_sync(void* ptr, std::size_t, std::size_t = 256) noexcept {
        cualloc_free(handle_, reinterpret_cast<std::uintptr_t>(ptr));
    }

    cualloc_t* get() const noexcept { return handle_; }

    friend bool operator==(const memory_resource& left, const memory_resource& right) noexcept {
        return left.handle_ == right.handle_;
    }
    friend bool operator!=(const memory_resource& left, const memory_resource& right) noexcept {
        return left.handle_ != right.handle_;
    }
    friend void get_property(const memory_resource&, cuda::mr::device_accessible) noexcept {}

  private:
    /* As cudaMalloc does: a thread that has no context gets one, the allocator's, without which stream_ref::sync
     * fails. Looked at once: who takes it from the thread again gives it another. */
    void make_current() const {
        static thread_local cualloc_t* made = nullptr;
        if (made == handle_) return;
        check(cualloc_make_current(handle_));
        made = handle_;
    }

    /* More than any device has is lack of memory to those who ask by cuda::mr. */
    static constexpr std::size_t most = std::size_t{1} << 40;

    [[noreturn]] static void fail(std::int32_t code, std::size_t bytes) {
        if (code == CUALLOC_INVALID_ARGUMENT && bytes > most) code = CUALLOC_OUT_OF_MEMORY;
#if __has_include(<rmm/error.hpp>)
        if (code == CUALLOC_OUT_OF_MEMORY) throw rmm::out_of_memory(cualloc_last_error());
#endif
        check(code);
        throw error(code, "a call failed");
    }

    cualloc_t* handle_;
};

static_assert(cuda::mr::resource_with<memory_resource, cuda::mr::device_accessible>,
              "a memory_resource is a resource of cuda::mr");

}  // namespace cualloc

#endif
