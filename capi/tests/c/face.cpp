// The C++ face: owners, exceptions.
#include <cualloc.hpp>

#include "common.h"

#include <memory>
#include <string>
#include <type_traits>

template <class F>
static std::int32_t code_of(F&& run) {
    try {
        run();
    } catch (const cualloc::error& error) {
        CHECK(std::string(error.what()) != "");
        return error.code();
    } catch (const std::bad_alloc& error) {
        CHECK(std::string(error.what()).find("out of memory") != std::string::npos);
        return CUALLOC_OUT_OF_MEMORY;
    }
    return CUALLOC_OK;
}

static_assert(std::is_nothrow_copy_constructible<cualloc::out_of_memory>::value, "exceptions are copied");
static_assert(!std::is_copy_constructible<cualloc::block>::value, "a block has one owner");
static_assert(!std::is_copy_constructible<cualloc::allocator>::value, "an allocator has one owner");

static_assert(!std::is_copy_constructible<cualloc::pool>::value, "a pool has one owner");
static_assert(!std::is_copy_constructible<cualloc::scope>::value, "a scope is left once");

static void pools(const cualloc::allocator& gpu) {
    cualloc::pool pool(gpu), other(gpu);
    int asked = 0;
    auto counted = std::make_shared<int>(0);
    {
        cualloc::scope scope = pool.enter_thread();
        cualloc::block inside = gpu.allocate(1 << 20);
        CHECK(pool.footprint().blocks == 1 && pool.footprint().live == 1 << 20);
        cualloc::scope inner = other.enter_stream(nullptr);
        cualloc::block next = gpu.allocate(1 << 20);
        CHECK(other.footprint().blocks == 1 && pool.footprint().blocks == 1);
        inner.leave();
        CHECK(!inner && code_of([&] { inner.leave(); }) == CUALLOC_INVALID_ARGUMENT);
        scope = other.enter_when([&asked, counted](void* stream) {
            asked++;
            if (asked == 1) throw 1;
            return stream == nullptr;
        });
        /* The first one was left when it was overwritten, or is in `inner` now. */
        CHECK(scope && counted.use_count() == 2);
        cualloc::block refused = gpu.allocate(1 << 20);
        CHECK(asked > 0 && other.footprint().blocks == 1);
        cualloc::block taken = gpu.allocate(1 << 20);
        CHECK(other.footprint().blocks == 2);
    }
    CHECK(counted.use_count() == 1);
    CHECK(pool.footprint().blocks == 0 && other.footprint().blocks == 0);
    {
        cualloc::scope scopes[] = {pool.enter_capture(77), pool.enter_next_capture()};
        cualloc::block outside = gpu.allocate(1 << 20);
        CHECK(pool.footprint().blocks == 0 && scopes[0] && scopes[1]);
        cualloc::pool moved = std::move(pool);
        CHECK(pool.get() == nullptr);
        moved.release();
        CHECK(code_of([&] { scopes[0].leave(); }) == CUALLOC_CLOSED);
        CHECK(code_of([&] { moved.enter_thread(); }) == CUALLOC_INVALID_ARGUMENT);
    }
    CHECK(code_of([&] { other.retain(nullptr); }) == CUALLOC_INVALID_ARGUMENT);
}

int main() {
    const char* device = getenv("CUALLOC_DEVICE");
    cualloc::options options;
    options.set("device", device ? device : "sim").set("limit", "64M");
    CHECK(code_of([&] { options.set("limit", "x"); }) == CUALLOC_INVALID_ARGUMENT);
    const std::string longer("1G\0x", 4);
    CHECK(code_of([&] { options.set("limit", longer); }) == CUALLOC_INVALID_ARGUMENT);
    cualloc::allocator gpu(0, options);
    {
        cualloc::block first = gpu.allocate(1000);
        cualloc::block second = gpu.allocate(1 << 20, std::align_val_t{65536}, nullptr);
        CHECK(first && second && second.ptr() % 65536 == 0 && second.size() == 1 << 20);
        CHECK(first.as<float>() != nullptr);
        first.record_stream(reinterpret_cast<void*>(2));
        CHECK(code_of([&] { gpu.close(); }) == CUALLOC_BUSY);
        cualloc::block moved = std::move(first);
        CHECK(!first && moved);
        CHECK(gpu.stats().blocks.current == 2);
        moved.free_on(reinterpret_cast<void*>(2));
        CHECK(!moved && gpu.stats().blocks.current == 1);
        second.free();
        CHECK(code_of([&] { second.free_on(nullptr); }) == CUALLOC_OK);
        second = gpu.allocate(512);
        const std::uint64_t ptr = second.release();
        CHECK(cualloc_free(gpu.get(), ptr) == CUALLOC_OK);
    }
    CHECK(code_of([&] { gpu.allocate(1u << 30); }) == CUALLOC_OUT_OF_MEMORY);
    CHECK(code_of([&] { gpu.allocate(0); }) == CUALLOC_INVALID_ARGUMENT);
    gpu.set_limit(UINT64_MAX);
    gpu.adopt_stream(nullptr);
    gpu.synchronize(nullptr);
    gpu.make_current();
    CHECK(code_of([] { cualloc::check(cualloc_stream_synchronize(nullptr, nullptr)); }) == CUALLOC_INVALID_ARGUMENT);
    gpu.retire_stream(reinterpret_cast<void*>(2));
    CHECK(gpu.empty_cache().pending == 0);
    gpu.trim(0);
    gpu.reset_peaks();
    gpu.check_everything();
    pools(gpu);
    gpu.check_everything();
    cualloc::allocator moved = std::move(gpu);
    CHECK(gpu.get() == nullptr && moved.stats().blocks.current == 0);
    moved.close();
    CHECK(code_of([&] { cualloc::allocator(-1, options); }) == CUALLOC_INVALID_ARGUMENT);
    puts("well");
}
