/* Two devices in one process: an allocator on each, access of one to the memory of the other, a copy between them, and
 * the errors for a wrong device. On the driver of this machine, or on what CUALLOC_DRIVER names. */
#include "common.h"
#include "load.h"

enum { BYTES = 4 << 20 };

typedef int (*fill_fn)(unsigned long long, unsigned char, size_t, void *);
typedef int (*copy_fn)(unsigned long long, void *, unsigned long long, void *, size_t, void *);
typedef int (*read_fn)(void *, unsigned long long, size_t);

int main(void) {
    void *driver = the_driver();
    int (*init)(unsigned), (*count)(int *), (*retain)(void **, int), (*release)(int), (*set)(void *);
    int (*create)(void **, unsigned), (*destroy)(void *), (*wait)(void *), (*can_access)(int *, int, int);
    fill_fn fill;
    copy_fn copy;
    read_fn get;
    cualloc_t *allocators[2], *none;
    void *contexts[2], *streams[2];
    uint64_t source, target, ptr;
    unsigned char *host = (unsigned char *)malloc(BYTES);
    int devices = 0, accessible = 0, device;
    size_t at;
    find(driver, "cuInit", &init);
    find(driver, "cuDeviceGetCount", &count);
    find(driver, "cuDeviceCanAccessPeer", &can_access);
    find(driver, "cuDevicePrimaryCtxRetain", &retain);
    find(driver, "cuDevicePrimaryCtxRelease_v2", &release);
    find(driver, "cuCtxSetCurrent", &set);
    find(driver, "cuStreamCreate", &create);
    find(driver, "cuStreamDestroy_v2", &destroy);
    find(driver, "cuStreamSynchronize", &wait);
    find(driver, "cuMemsetD8Async", &fill);
    find(driver, "cuMemcpyPeerAsync", &copy);
    find(driver, "cuMemcpyDtoH_v2", &get);
    CHECK(host != 0 && init(0) == 0 && count(&devices) == 0 && devices >= 2);
    for (device = 0; device < 2; device++) {
        CHECK(retain(&contexts[device], device) == 0 && set(contexts[device]) == 0);
        CHECK(create(&streams[device], 1) == 0);
        EXPECT(CUALLOC_OK, cualloc_create(device, NULL_OPTIONS, &allocators[device]));
    }
    NOTHING(CUALLOC_INVALID_ARGUMENT, cualloc_create(devices, NULL_OPTIONS, &none), none);

    /* Device 1 may access the memory of device 0, what it holds now and what it will hold. */
    CHECK(can_access(&accessible, 1, 0) == 0);
    EXPECT(accessible ? CUALLOC_OK : CUALLOC_UNSUPPORTED, cualloc_add_peer(allocators[0], 1));
    EXPECT(CUALLOC_DRIVER, cualloc_add_peer(allocators[0], devices));

    EXPECT(CUALLOC_OK, cualloc_alloc(allocators[0], BYTES, streams[0], &source));
    EXPECT(CUALLOC_OK, cualloc_alloc(allocators[1], BYTES, streams[1], &target));
    CHECK(set(contexts[0]) == 0 && fill(source, 0x5a, BYTES, streams[0]) == 0 && wait(streams[0]) == 0);
    CHECK(set(contexts[1]) == 0 && copy(target, contexts[1], source, contexts[0], BYTES, streams[1]) == 0);
    /* The copy ran on a stream of the other device, which the block's free has to wait for. */
    EXPECT(CUALLOC_OK, cualloc_record_stream(allocators[0], source, streams[1]));
    EXPECT(CUALLOC_OK, cualloc_free(allocators[0], source));
    CHECK(wait(streams[1]) == 0 && get(host, target, BYTES) == 0);
    for (at = 0; at < BYTES; at++) CHECK(host[at] == 0x5a);

    /* A block belongs to one allocator, and is allocated on a stream of its device. */
    NOTHING(CUALLOC_INVALID_ARGUMENT, cualloc_alloc(allocators[0], BYTES, streams[1], &ptr), ptr);
    EXPECT(CUALLOC_NOT_OURS, cualloc_free(allocators[0], target));
    EXPECT(CUALLOC_OK, cualloc_free(allocators[1], target));

    for (device = 0; device < 2; device++) {
        /* Stream 1 was recorded by the allocator of device 0 as well. */
        EXPECT(CUALLOC_OK, cualloc_retire_stream(allocators[0], streams[device]));
    }
    EXPECT(CUALLOC_OK, cualloc_retire_stream(allocators[1], streams[1]));
    for (device = 0; device < 2; device++) {
        CHECK(set(contexts[device]) == 0 && destroy(streams[device]) == 0);
        EXPECT(CUALLOC_OK, cualloc_destroy(allocators[device]));
        CHECK(set(0) == 0 && release(device) == 0);
    }
    free(host);
    puts("well");
    return 0;
}
