/* Streams and a context of the caller's, made with the driver's own functions: the driver of this machine, or what
 * CUALLOC_DRIVER names. With an argument the last part is that the context dies first. */
#include "common.h"
#include "load.h"

#include <time.h>

typedef int (*stream_fn)(void *);
typedef int (*fill_fn)(unsigned long long, unsigned char, size_t, void *);

static void uses(cualloc_t *allocator, void *first, void *second, fill_fn fill, stream_fn wait) {
    int turn;
    for (turn = 0; turn < 1000; turn++) {
        uint64_t small, large;
        size_t bytes = (size_t)(turn % 7 + 1) << 18;
        EXPECT(CUALLOC_OK, cualloc_alloc(allocator, 3000, first, &small));
        EXPECT(CUALLOC_OK, cualloc_alloc(allocator, bytes, first, &large));
        CHECK(fill(large, (unsigned char)turn, bytes, first) == 0);
        CHECK(wait(first) == 0);
        EXPECT(CUALLOC_OK, cualloc_record_stream(allocator, small, second));
        CHECK(fill(large, 0, bytes, second) == 0);
        EXPECT(CUALLOC_OK, cualloc_free_on(allocator, large, second));
        EXPECT(CUALLOC_OK, cualloc_free(allocator, small));
    }
}

static void pairs(cualloc_t *allocator, void *stream, size_t bytes) {
    enum { PAIRS = 100000 };
    struct timespec begin, end;
    uint64_t ptr;
    int turn;
    for (turn = -1000; turn < PAIRS; turn++) {
        if (turn == 0) timespec_get(&begin, TIME_UTC);
        if (cualloc_alloc(allocator, bytes, stream, &ptr) != 0 || cualloc_free(allocator, ptr) != 0)
            EXPECT(CUALLOC_OK, CUALLOC_PANIC);
    }
    timespec_get(&end, TIME_UTC);
    printf("%zu bytes: %.1f ns a pair\n", bytes,
           ((double)(end.tv_sec - begin.tv_sec) * 1e9 + (double)(end.tv_nsec - begin.tv_nsec)) / PAIRS);
}

int main(int argc, char **argv) {
    void *driver = the_driver();
    int (*init)(unsigned), (*retain)(void **, int), (*release)(int), (*set)(void *), (*create)(void **, unsigned);
    stream_fn destroy, wait;
    fill_fn fill;
    cualloc_t *allocator;
    void *context, *first, *second;
    uint64_t ptr = 1;
    (void)argv;
    find(driver, "cuInit", &init);
    find(driver, "cuDevicePrimaryCtxRetain", &retain);
    find(driver, "cuDevicePrimaryCtxRelease_v2", &release);
    find(driver, "cuCtxSetCurrent", &set);
    find(driver, "cuStreamCreate", &create);
    find(driver, "cuStreamDestroy_v2", &destroy);
    find(driver, "cuStreamSynchronize", &wait);
    find(driver, "cuMemsetD8Async", &fill);
    CHECK(init(0) == 0);
    NOTHING(CUALLOC_INVALID_ARGUMENT, cualloc_create_in(0, NULL_OPTIONS, &allocator), allocator);
    CHECK(retain(&context, 0) == 0 && set(context) == 0);
    EXPECT(CUALLOC_OK, cualloc_create_in(0, NULL_OPTIONS, &allocator));
    CHECK(create(&first, 1) == 0 && create(&second, 1) == 0);
    EXPECT(CUALLOC_OK, cualloc_adopt_stream(allocator, first));
    uses(allocator, first, second, fill, wait);
    /* No context is current from here on. */
    CHECK(set(0) == 0);
    pairs(allocator, first, 4096);
    pairs(allocator, first, 8u << 20);
    EXPECT(CUALLOC_OK, cualloc_check(allocator));
    EXPECT(CUALLOC_OK, cualloc_alloc(allocator, 1000, second, &ptr));
    EXPECT(CUALLOC_OK, cualloc_retire_stream(allocator, first));
    EXPECT(CUALLOC_OK, cualloc_retire_stream(allocator, second));
    CHECK(destroy(first) == 0 && destroy(second) == 0);
    EXPECT(CUALLOC_BUSY, cualloc_destroy(allocator));
    /* A block outlives its stream. */
    EXPECT(CUALLOC_OK, cualloc_free(allocator, ptr));
    EXPECT(CUALLOC_OK, cualloc_empty_cache(allocator, 0, 0));
    if (argc > 1) {
        CHECK(release(0) == 0);
        NOTHING(CUALLOC_CONTEXT_LOST, cualloc_alloc(allocator, 64u << 20, 0, &ptr), ptr);
        EXPECT(CUALLOC_CONTEXT_LOST, cualloc_alloc(allocator, 1000, 0, &ptr));
        EXPECT(CUALLOC_CONTEXT_LOST, cualloc_trim(allocator, 0, 0, 0));
        EXPECT(CUALLOC_CONTEXT_LOST, cualloc_destroy(allocator));
    } else {
        EXPECT(CUALLOC_OK, cualloc_destroy(allocator));
        /* It is ours still. */
        CHECK(set(context) == 0 && set(0) == 0);
        CHECK(release(0) == 0);
    }
    EXPECT(CUALLOC_CLOSED, cualloc_destroy(allocator));
    puts("well");
    return 0;
}
