// The memory resource, compiled with RMM's headers, and run on the simulator by way of cuda::mr.
#include <cualloc_rmm.hpp>

#include "common.h"

#include <rmm/mr/per_device_resource.hpp>
#include <rmm/device_buffer.hpp>

#include <thread>

// Compiled, and run only where there is a GPU.
static void on_a_gpu() {
    cualloc::allocator gpu(0);
    rmm::mr::set_current_device_resource(cualloc::memory_resource(gpu));
    const cuda::stream_ref stream{cudaStream_t{}};
    {
        rmm::device_buffer buffer(std::size_t{1} << 20, stream);
        CHECK(gpu.stats().requested.current == 1u << 20);
        buffer.resize(std::size_t{4} << 20, stream);
        rmm::device_buffer copy(buffer, stream);
        CHECK(copy.size() == buffer.size() && copy.data() != buffer.data());
    }
    CHECK(gpu.stats().blocks.current == 0);
    cualloc::memory_resource resource(gpu);
    std::thread([&] {
        /* Has no context: that of the resource is there from the first request on. */
        void* other = resource.allocate(stream, 1000);
        stream.sync();
        resource.deallocate(stream, other, 1000);
    }).join();
    void* ptr = resource.allocate_sync(1000);
    resource.deallocate_sync(ptr, 1000);
    rmm::mr::reset_current_device_resource();
}

int main(int count, char**) {
    cualloc::options options;
    options.set("device", "sim").set("limit", "64M");
    cualloc::allocator gpu(0, options);
    {
        cuda::mr::any_resource<cuda::mr::device_accessible> any{cualloc::memory_resource(gpu)};
        const cuda::stream_ref stream{cudaStream_t{}};
        void* first = any.allocate(stream, 1000, 256);
        void* second = any.allocate(stream, 1000, 1 << 16);
        CHECK(first != nullptr && reinterpret_cast<std::uintptr_t>(second) % (1 << 16) == 0);
        CHECK(gpu.stats().blocks.current == 2);
        any.deallocate(stream, second, 1000, 1 << 16);
        any.deallocate(stream, first, 1000, 256);
        CHECK(gpu.stats().blocks.current == 0);
        {
            cualloc::memory_resource resource(gpu);
            void* at_once = resource.allocate_sync(1000);
            CHECK(at_once != nullptr && resource.allocate_sync(0) == nullptr);
            resource.deallocate_sync(at_once, 1000);
        }
        CHECK(any.allocate(stream, 0, 256) == nullptr);
        any.deallocate(stream, nullptr, 0, 256);
        /* More than the limit, than any device has, and than there are addresses. */
        for (const std::size_t bytes : {std::size_t{1} << 30, std::size_t{1} << 50, ~std::size_t{0}}) {
            bool caught = false;
            try {
                any.allocate(stream, bytes, 256);
            } catch (const rmm::out_of_memory&) {
                caught = true;
            }
            CHECK(caught);
        }
        auto copy = any;
        CHECK(copy == any);
    }
    gpu.close();
    CHECK(cualloc_shared_options(options.get()) == CUALLOC_OK);
    auto everybodys = cualloc::memory_resource::shared();
    CHECK(everybodys == cualloc::memory_resource::shared(0) && everybodys.get() == cualloc_shared_made(0));
    everybodys.deallocate(cuda::stream_ref{cudaStream_t{}}, everybodys.allocate(cuda::stream_ref{cudaStream_t{}}, 1000), 1000);
    bool caught = false;
    try {
        cualloc::memory_resource::shared(-1);
    } catch (const cualloc::error& error) {
        caught = error.code() == CUALLOC_INVALID_ARGUMENT;
    }
    CHECK(caught);
    if (count > 1) on_a_gpu();
    puts("well");
}
