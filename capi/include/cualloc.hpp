/* cualloc for C++17: the functions of cualloc.h with owners and exceptions. Header only.
 *
 *     cualloc::options options;
 *     options.set("limit", "8G");
 *     cualloc::allocator gpu(0, options);
 *     cualloc::block block = gpu.allocate(1 << 20, stream);
 *     kernel<<<blocks, threads, 0, stream>>>(block.as<float>());
 *
 * What a call needs and what it promises stands in cualloc.h. Where memory runs out std::bad_alloc is thrown (a
 * cualloc::out_of_memory, whose what() has the whole picture), else cualloc::error. */
#ifndef CUALLOC_HPP
#define CUALLOC_HPP

/* MSVC reports 199711L in __cplusplus unless /Zc:__cplusplus is set. */
#if (defined(_MSVC_LANG) ? _MSVC_LANG : __cplusplus) < 201703L
#error "cualloc.hpp requires C++17 or later (-std=c++17, /std:c++17)"
#endif

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>

#include "cualloc.h"

namespace cualloc {

/* A call failed; code() is its result. */
class error : public std::runtime_error {
  public:
    error(std::int32_t code, const char* text) : std::runtime_error(text), code_(code) {}
    std::int32_t code() const noexcept { return code_; }

  private:
    std::int32_t code_;
};

/* Device memory ran out. */
class out_of_memory : public std::bad_alloc {
  public:
    explicit out_of_memory(const char* text) : text_(text) {}
    const char* what() const noexcept override { return text_.what(); }

  private:
    /* Copies share its text, so that copying throws nothing. */
    std::runtime_error text_;
};

/* Throws what a result means, if it means a failure. */
inline void check(std::int32_t code) {
    if (code == CUALLOC_OK) return;
    if (code == CUALLOC_OUT_OF_MEMORY) throw out_of_memory(cualloc_last_error());
    throw error(code, cualloc_last_error());
}

/* Settings of a new allocator. */
class options {
  public:
    options() : handle_(cualloc_options_new()) {
        if (handle_ == nullptr) throw std::runtime_error(cualloc_last_error());
    }
    options(options&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
    options& operator=(options&& other) noexcept {
        std::swap(handle_, other.handle_);
        return *this;
    }
    ~options() { cualloc_options_free(handle_); }

    /* Strings of C would end at a null byte, which is an error here. */
    options& set(const std::string& key, const std::string& value) {
        if ((key + value).find('\0') != std::string::npos) {
            throw error(CUALLOC_INVALID_ARGUMENT, "a setting has a null byte in it");
        }
        check(cualloc_options_set(handle_, key.c_str(), value.c_str()));
        return *this;
    }
    cualloc_options_t* get() const noexcept { return handle_; }

  private:
    cualloc_options_t* handle_;
};

/* Device memory with one owner, freed in the order of its stream. May outlive its allocator object only if that did
 * not destroy the allocator, which it does not while blocks are live. */
class block {
  public:
    block() noexcept = default;
    block(cualloc_t* allocator, std::uint64_t ptr, std::size_t bytes) noexcept
        : allocator_(allocator), ptr_(ptr), bytes_(bytes) {}
    block(block&& other) noexcept
        : allocator_(other.allocator_),
          ptr_(std::exchange(other.ptr_, 0)),
          bytes_(std::exchange(other.bytes_, 0)) {}
    block& operator=(block&& other) noexcept {
        std::swap(allocator_, other.allocator_);
        std::swap(ptr_, other.ptr_);
        std::swap(bytes_, other.bytes_);
        return *this;
    }
    /* A failure is ignored: the block is lost then. free() reports it. */
    ~block() {
        if (ptr_ != 0) cualloc_free(allocator_, ptr_);
    }

    std::uint64_t ptr() const noexcept { return ptr_; }
    /* Bytes as they were asked for. */
    std::size_t size() const noexcept { return bytes_; }
    explicit operator bool() const noexcept { return ptr_ != 0; }
    template <class T = void>
    T* as() const noexcept {
        return reinterpret_cast<T*>(static_cast<std::uintptr_t>(ptr_));
    }

    void record_stream(void* stream) const { check(cualloc_record_stream(allocator_, ptr_, stream)); }
    /* Frees now. After a failure the block is live still. */
    void free() {
        check(cualloc_free(allocator_, ptr_));
        ptr_ = 0;
    }
    /* Frees behind what a stream was given so far. */
    void free_on(void* stream) {
        check(cualloc_free_on(allocator_, ptr_, stream));
        ptr_ = 0;
    }
    /* Gives up ownership. */
    std::uint64_t release() noexcept { return std::exchange(ptr_, 0); }

  private:
    cualloc_t* allocator_ = nullptr;
    std::uint64_t ptr_ = 0;
    std::size_t bytes_ = 0;
};

/* What went back to the driver, and what waits for work. */
struct trimmed {
    std::uint64_t released = 0;
    std::uint64_t pending = 0;
};

/* An allocator with one owner. All methods may be called from any thread. */
class allocator {
  public:
    /* On the primary context of a device, with the settings of CUALLOC_CONFIG. */
    explicit allocator(std::int32_t device) { check(cualloc_create(device, nullptr, &handle_)); }
    allocator(std::int32_t device, const options& settings) {
        check(cualloc_create(device, settings.get(), &handle_));
    }
    /* In a context of the caller's, a CUcontext; null is the one that is current. */
    static allocator in(void* context) { return in(context, nullptr); }
    static allocator in(void* context, const options& settings) { return in(context, settings.get()); }

    allocator(allocator&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
    allocator& operator=(allocator&& other) noexcept {
        std::swap(handle_, other.handle_);
        return *this;
    }
    /* As close(); where that fails (blocks are live) the allocator stays until the process ends. */
    ~allocator() {
        if (handle_ != nullptr) cualloc_destroy(handle_);
    }
    /* Gives everything back. After a failure the allocator goes on. */
    void close() {
        check(cualloc_destroy(handle_));
        handle_ = nullptr;
    }
    cualloc_t* get() const noexcept { return handle_; }

    block allocate(std::size_t bytes, void* stream = nullptr) const {
        std::uint64_t ptr = 0;
        check(cualloc_alloc(handle_, bytes, stream, &ptr));
        return block(handle_, ptr, bytes);
    }
    block allocate(std::size_t bytes, std::align_val_t alignment, void* stream = nullptr) const {
        std::uint64_t ptr = 0;
        const auto multiple = static_cast<std::size_t>(alignment);
        check(cualloc_alloc_aligned(handle_, bytes, multiple, stream, &ptr));
        return block(handle_, ptr, bytes);
    }

    void adopt_stream(void* stream) const { check(cualloc_adopt_stream(handle_, stream)); }
    void retire_stream(void* stream) const { check(cualloc_retire_stream(handle_, stream)); }
    void synchronize(void* stream) const { check(cualloc_stream_synchronize(handle_, stream)); }
    void make_current() const { check(cualloc_make_current(handle_)); }
    trimmed trim(std::uint64_t keep) const {
        trimmed done;
        check(cualloc_trim(handle_, keep, &done.released, &done.pending));
        return done;
    }
    trimmed empty_cache() const {
        trimmed done;
        check(cualloc_empty_cache(handle_, &done.released, &done.pending));
        return done;
    }
    void set_limit(std::uint64_t bytes) const { check(cualloc_set_limit(handle_, bytes)); }
    cualloc_stats_t stats() const {
        cualloc_stats_t figures = {};
        figures.struct_size = sizeof figures;
        check(cualloc_stats(handle_, &figures));
        return figures;
    }
    void reset_peaks() const { check(cualloc_reset_peaks(handle_)); }
    void check_everything() const { check(cualloc_check(handle_)); }

  private:
    struct nothing {};
    explicit allocator(nothing) noexcept {}
    static allocator in(void* context, cualloc_options_t* settings) {
        allocator made{nothing{}};
        check(cualloc_create_in(context, settings, &made.handle_));
        return made;
    }

    cualloc_t* handle_ = nullptr;
};

/* Sends requests to a pool until it goes. Its pool may go before. */
class scope {
  public:
    scope() noexcept = default;
    scope(cualloc_pool_t* pool, std::uint64_t number) noexcept : pool_(pool), number_(number) {}
    scope(scope&& other) noexcept : pool_(other.pool_), number_(std::exchange(other.number_, 0)) {}
    scope& operator=(scope&& other) noexcept {
        std::swap(pool_, other.pool_);
        std::swap(number_, other.number_);
        return *this;
    }
    /* A failure is ignored: a pool that was released has left its scopes. leave() reports it. */
    ~scope() {
        if (number_ != 0) cualloc_pool_leave(pool_, number_);
    }
    void leave() { check(cualloc_pool_leave(pool_, std::exchange(number_, 0))); }
    explicit operator bool() const noexcept { return number_ != 0; }

  private:
    cualloc_pool_t* pool_ = nullptr;
    std::uint64_t number_ = 0;
};

/* Memory for stream captures, with one owner. All methods may be called from any thread. */
class pool {
  public:
    explicit pool(const allocator& of) { check(cualloc_pool_create(of.get(), &handle_)); }
    pool(pool&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
    pool& operator=(pool&& other) noexcept {
        std::swap(handle_, other.handle_);
        return *this;
    }
    /* As release(); a failure, as of an allocator that was closed before, is ignored. */
    ~pool() {
        if (handle_ != nullptr) cualloc_pool_release(handle_);
    }
    /* No further capture comes. Graphs keep the memory that they use. */
    void release() { check(cualloc_pool_release(std::exchange(handle_, nullptr))); }
    cualloc_pool_t* get() const noexcept { return handle_; }

    scope enter_capture(std::uint64_t id) const {
        cualloc_scope_t which = of(CUALLOC_SCOPE_CAPTURE);
        which.capture = id;
        return enter(which);
    }
    scope enter_next_capture() const { return enter(of(CUALLOC_SCOPE_NEXT_CAPTURE)); }
    scope enter_stream(void* stream) const {
        cualloc_scope_t which = of(CUALLOC_SCOPE_STREAM);
        which.stream = stream;
        return enter(which);
    }
    /* A predicate that throws says no. No thread is in it when the scope was left. */
    scope enter_when(std::function<bool(void*)> when) const {
        using predicate = std::function<bool(void*)>;
        auto kept = std::make_unique<predicate>(std::move(when));
        cualloc_scope_t which = of(CUALLOC_SCOPE_WHEN);
        which.when = [](void* data, void* stream) {
            try {
                return (*static_cast<predicate*>(data))(stream);
            } catch (...) {
                return false;
            }
        };
        which.done = [](void* data) { delete static_cast<predicate*>(data); };
        which.data = kept.get();
        scope entered = enter(which);
        kept.release();
        return entered;
    }
    scope enter_thread() const { return enter(of(CUALLOC_SCOPE_THREAD)); }

    cualloc_footprint_t footprint() const {
        cualloc_footprint_t figures = {};
        figures.struct_size = sizeof figures;
        check(cualloc_pool_footprint(handle_, &figures));
        return figures;
    }
    /* A graph (a CUgraph) that was not captured with the pool uses its memory. */
    void retain(void* graph) const { check(cualloc_pool_retain(handle_, graph)); }

  private:
    static cualloc_scope_t of(std::int32_t kind) {
        cualloc_scope_t which = {};
        which.struct_size = sizeof which;
        which.kind = kind;
        return which;
    }
    scope enter(const cualloc_scope_t& which) const {
        std::uint64_t number = 0;
        check(cualloc_pool_enter(handle_, &which, &number));
        return scope(handle_, number);
    }

    cualloc_pool_t* handle_ = nullptr;
};

}  // namespace cualloc

#endif
