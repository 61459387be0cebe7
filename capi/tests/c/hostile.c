/* Every function with null, foreign, freed, stale and huge arguments, from 8 threads, while others do right. */
#include "common.h"

#include <pthread.h>

enum { THREADS = 8 };

static cualloc_t *shared, *stale;
static cualloc_options_t *stale_options;
static int rounds = 100;

/* Calls that take a handle, with one that is no good. */
static void no_handle(cualloc_t *handle, int32_t code) {
    uint64_t first = 1, second = 1;
    cualloc_stats_t stats;
    EXPECT(code, cualloc_destroy(handle));
    EXPECT(code, cualloc_alloc(handle, 512, 0, &first));
    CHECK(first == 0);
    first = 1;
    EXPECT(code, cualloc_alloc_aligned(handle, 512, 512, 0, &first));
    CHECK(first == 0);
    EXPECT(code, cualloc_free(handle, 0));
    EXPECT(code, cualloc_free(handle, 512));
    EXPECT(code, cualloc_free_on(handle, 512, 0));
    EXPECT(code, cualloc_record_stream(handle, 512, 0));
    EXPECT(code, cualloc_adopt_stream(handle, 0));
    EXPECT(code, cualloc_retire_stream(handle, 0));
    EXPECT(code, cualloc_stream_synchronize(handle, 0));
    EXPECT(code, cualloc_make_current(handle));
    first = 1;
    EXPECT(code, cualloc_trim(handle, 0, &first, &second));
    CHECK(first == 0 && second == 0);
    first = second = 1;
    EXPECT(code, cualloc_empty_cache(handle, &first, &second));
    CHECK(first == 0 && second == 0);
    EXPECT(code, cualloc_set_limit(handle, 1));
    stats.struct_size = sizeof stats;
    stats.hits = 1;
    EXPECT(code, cualloc_stats(handle, &stats));
    CHECK(stats.hits == 0);
    EXPECT(code, cualloc_reset_peaks(handle));
    first = second = 1;
    EXPECT(code, cualloc_usable_size(handle, 512, &first));
    CHECK(first == 0);
    first = 1;
    EXPECT(code, cualloc_base(handle, 512, &first, &second));
    CHECK(first == 0 && second == 0);
    EXPECT(code, cualloc_check(handle));
}

static void no_options(cualloc_options_t *options, int32_t code) {
    cualloc_t *made = (cualloc_t *)1;
    EXPECT(code, cualloc_options_set(options, "limit", "1G"));
    if (options != 0) {
        EXPECT(code, cualloc_create(0, options, &made));
        CHECK(made == 0);
        made = (cualloc_t *)1;
        EXPECT(code, cualloc_create_in(0, options, &made));
        CHECK(made == 0);
    }
    cualloc_options_free(options);
}

static void no_result(cualloc_t *allocator) {
    uint64_t one = 1;
    EXPECT(CUALLOC_INVALID_ARGUMENT, cualloc_create(0, NULL_OPTIONS, 0));
    EXPECT(CUALLOC_INVALID_ARGUMENT, cualloc_create_in(0, NULL_OPTIONS, 0));
    EXPECT(CUALLOC_INVALID_ARGUMENT, cualloc_alloc(allocator, 512, 0, 0));
    EXPECT(CUALLOC_INVALID_ARGUMENT, cualloc_alloc_aligned(allocator, 512, 512, 0, 0));
    EXPECT(CUALLOC_INVALID_ARGUMENT, cualloc_stats(allocator, 0));
    EXPECT(CUALLOC_INVALID_ARGUMENT, cualloc_usable_size(allocator, 512, 0));
    EXPECT(CUALLOC_INVALID_ARGUMENT, cualloc_base(allocator, 512, 0, &one));
    CHECK(one == 0);
    one = 1;
    EXPECT(CUALLOC_INVALID_ARGUMENT, cualloc_base(allocator, 512, &one, 0));
    CHECK(one == 0);
}

static void sizes(cualloc_t *allocator) {
    static const size_t bad[] = {0, SIZE_MAX, SIZE_MAX - 511, (size_t)1 << 63};
    size_t i;
    uint64_t ptr;
    for (i = 0; i < sizeof bad / sizeof *bad; i++) {
        ptr = 1;
        EXPECT(CUALLOC_INVALID_ARGUMENT, cualloc_alloc(allocator, bad[i], 0, &ptr));
        CHECK(ptr == 0);
        ptr = 1;
        EXPECT(CUALLOC_INVALID_ARGUMENT, cualloc_alloc_aligned(allocator, bad[i], 4096, 0, &ptr));
        CHECK(ptr == 0);
        ptr = 1;
        /* None of them is a power of two up to 2 MiB. */
        EXPECT(CUALLOC_INVALID_ARGUMENT, cualloc_alloc_aligned(allocator, 512, bad[i], 0, &ptr));
        CHECK(ptr == 0);
    }
    EXPECT(CUALLOC_INVALID_ARGUMENT, cualloc_alloc_aligned(allocator, 512, 3, 0, &ptr));
    EXPECT(CUALLOC_INVALID_ARGUMENT, cualloc_alloc_aligned(allocator, 512, 4194304, 0, &ptr));
    /* More than the device has, and no impossible size. */
    ptr = 1;
    EXPECT(CUALLOC_OUT_OF_MEMORY, cualloc_alloc(allocator, (size_t)1 << 40, 0, &ptr));
    CHECK(ptr == 0);
}

static void addresses(cualloc_t *allocator) {
    static const uint64_t bad[] = {1, 512, 4095, UINT64_MAX, (uint64_t)1 << 63, UINT64_MAX - 511};
    size_t i;
    for (i = 0; i < sizeof bad / sizeof *bad; i++) {
        uint64_t first = 1, second = 1;
        EXPECT(CUALLOC_NOT_OURS, cualloc_free(allocator, bad[i]));
        EXPECT(CUALLOC_NOT_OURS, cualloc_free_on(allocator, bad[i], 0));
        EXPECT(CUALLOC_NOT_OURS, cualloc_record_stream(allocator, bad[i], 0));
        EXPECT(CUALLOC_NOT_OURS, cualloc_usable_size(allocator, bad[i], &first));
        CHECK(first == 0);
        first = 1;
        EXPECT(CUALLOC_NOT_OURS, cualloc_base(allocator, bad[i], &first, &second));
        CHECK(first == 0 && second == 0);
    }
    EXPECT(CUALLOC_NOT_OURS, cualloc_record_stream(allocator, 0, 0));
}

static void right(cualloc_t *allocator, size_t round) {
    uint64_t ptr[16], size = 0;
    size_t i, bytes;
    for (i = 0; i < 16; i++) {
        bytes = ((round * 16 + i) * 977) % 200000 + 1;
        EXPECT(CUALLOC_OK, cualloc_alloc(allocator, bytes, stream_of(i % 3), &ptr[i]));
        EXPECT(CUALLOC_OK, cualloc_usable_size(allocator, ptr[i], &size));
        CHECK(size >= bytes);
    }
    for (i = 0; i < 16; i++) {
        if (i % 4 == 0)
            EXPECT(CUALLOC_OK, cualloc_free_on(allocator, ptr[i], stream_of(2)));
        else
            EXPECT(CUALLOC_OK, cualloc_free(allocator, ptr[i]));
    }
}

static void *thread(void *unused) {
    static char foreign[64];
    int round;
    (void)unused;
    for (round = 0; round < rounds; round++) {
        cualloc_t *own;
        no_handle(0, CUALLOC_INVALID_ARGUMENT);
        no_handle(stale, CUALLOC_CLOSED);
        no_handle((cualloc_t *)foreign, CUALLOC_CLOSED);
        no_handle((cualloc_t *)1, CUALLOC_CLOSED);
        no_handle((cualloc_t *)UINTPTR_MAX, CUALLOC_CLOSED);
        no_handle((cualloc_t *)stale_options, CUALLOC_CLOSED);
        no_options(0, CUALLOC_INVALID_ARGUMENT);
        no_options(stale_options, CUALLOC_CLOSED);
        no_options((cualloc_options_t *)foreign, CUALLOC_CLOSED);
        no_options((cualloc_options_t *)shared, CUALLOC_CLOSED);
        EXPECT(CUALLOC_INVALID_ARGUMENT, cualloc_options_set(stale_options, 0, "1"));
        EXPECT(CUALLOC_INVALID_ARGUMENT, cualloc_options_set(stale_options, "limit", 0));
        no_result(shared);
        sizes(shared);
        addresses(shared);
        right(shared, (size_t)round);
        if (round % 10 == 0) {
            own = new_allocator();
            right(own, (size_t)round);
            EXPECT(CUALLOC_OK, cualloc_retire_stream(own, stream_of(2)));
            EXPECT(CUALLOC_OK, cualloc_destroy(own));
            no_handle(own, CUALLOC_CLOSED);
            EXPECT(CUALLOC_OK, cualloc_check(shared));
            EXPECT(CUALLOC_OK, cualloc_trim(shared, 0, 0, 0));
        }
    }
    EXPECT(CUALLOC_OK, cualloc_retire_stream(shared, stream_of(2)));
    return 0;
}

static void devices(void) {
    static const int32_t bad[] = {-1, 1024, INT32_MAX, INT32_MIN};
    cualloc_options_t *options = new_options();
    size_t i;
    for (i = 0; i < sizeof bad / sizeof *bad; i++) {
        cualloc_t *made = (cualloc_t *)1;
        EXPECT(CUALLOC_INVALID_ARGUMENT, cualloc_create(bad[i], options, &made));
        CHECK(made == 0);
    }
    cualloc_options_free(options);
}

int main(int argc, char **argv) {
    pthread_t threads[THREADS];
    cualloc_stats_t stats;
    int i;
    if (argc > 1) rounds = atoi(argv[1]);
    devices();
    stale = new_allocator();
    EXPECT(CUALLOC_OK, cualloc_destroy(stale));
    stale_options = cualloc_options_new();
    cualloc_options_free(stale_options);
    shared = new_allocator();
    for (i = 0; i < THREADS; i++) CHECK(pthread_create(&threads[i], 0, thread, 0) == 0);
    for (i = 0; i < THREADS; i++) CHECK(pthread_join(threads[i], 0) == 0);
    EXPECT(CUALLOC_OK, cualloc_check(shared));
    stats.struct_size = sizeof stats;
    EXPECT(CUALLOC_OK, cualloc_stats(shared, &stats));
    CHECK(stats.blocks.current == 0 && stats.requested.current == 0);
    EXPECT(CUALLOC_OK, cualloc_destroy(shared));
    puts("well");
    return 0;
}
