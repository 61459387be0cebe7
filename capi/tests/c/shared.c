/* Allocators that the parts of a process share, and the functions for PyTorch over them, on the simulator: right calls,
 * wrong ones, from 8 threads. */
#include "common.h"

#include <pthread.h>

#define THREADS 8

static size_t rounds;

static void before_the_first(void) {
    cualloc_options_t *options = new_options();
    cualloc_t *made = (cualloc_t *)1;
    EXPECT(CUALLOC_OK, cualloc_last_code());
    EXPECT(CUALLOC_INVALID_ARGUMENT, cualloc_shared(0, 0));
    EXPECT(CUALLOC_INVALID_ARGUMENT, cualloc_last_code());
    EXPECT(CUALLOC_OK, cualloc_options_set(options, "limit", "1G"));
    EXPECT(CUALLOC_OK, cualloc_shared_options(options));
    cualloc_options_free(options);
    EXPECT(CUALLOC_CLOSED, cualloc_shared_options(options));
    NOTHING(CUALLOC_INVALID_ARGUMENT, cualloc_shared(-1, &made), made);
    EXPECT(CUALLOC_INVALID_ARGUMENT, cualloc_shared(1 << 30, &made));
    EXPECT(CUALLOC_INVALID_ARGUMENT, cualloc_torch_fraction(0.5, -1));
    /* Without any, nothing is to be done. */
    CHECK(cualloc_shared_made(0) == 0 && cualloc_shared_made(-1) == 0 && cualloc_shared_made(1 << 30) == 0);
    cualloc_torch_init(0);
    cualloc_torch_reset();
    cualloc_torch_free((void *)4096, 1, 0, 0);
    cualloc_torch_free((void *)4096, 1, -1, 0);
    EXPECT(CUALLOC_OK, cualloc_torch_record_stream((void *)4096, 0));
}

static void *works(void *argument) {
    size_t turn = (size_t)argument;
    cualloc_t *shared, *again;
    EXPECT(CUALLOC_OK, cualloc_shared(0, &shared));
    for (size_t i = 0; i < rounds * 10; i++) {
        size_t bytes = (turn + i * 7919) % 300000 + 1, size = 1;
        char *memory = (char *)cualloc_torch_alloc(bytes, 0, 0);
        uint64_t usable;
        CHECK(memory != 0);
        CHECK(cualloc_torch_base(memory + bytes - 1, &size) == memory && size >= bytes);
        CHECK(cualloc_torch_base(memory, 0) == memory);
        EXPECT(CUALLOC_OK, cualloc_torch_record_stream(memory, 0));
        EXPECT(CUALLOC_OK, cualloc_usable_size(shared, (uint64_t)(uintptr_t)memory, &usable));
        cualloc_torch_free(memory, bytes, 0, 0);
        /* A second one changes nothing. */
        cualloc_torch_free(memory, bytes, 1, 0);
        CHECK(cualloc_torch_base((void *)4096, &size) == (void *)4096 && size == 0);
        CHECK(cualloc_torch_alloc(0, 0, 0) == 0);
        CHECK(cualloc_torch_alloc((size_t)2 << 30, 0, 0) == 0);
        EXPECT(CUALLOC_OUT_OF_MEMORY, cualloc_last_code());
        CHECK(strstr(cualloc_last_error(), "CUDA out of memory. Tried to allocate 2.00 GiB.") == cualloc_last_error());
        CHECK(cualloc_torch_alloc(512, 7, 0) == 0);
        EXPECT(CUALLOC_INVALID_ARGUMENT, cualloc_last_code());
        EXPECT(CUALLOC_OK, cualloc_shared(0, &again));
        CHECK(again == shared);
    }
    return 0;
}

int main(int count, char **arguments) {
    pthread_t threads[THREADS];
    cualloc_t *shared;
    cualloc_stats_t stats;
    stats.struct_size = sizeof stats;
    rounds = count > 1 ? strtoul(arguments[1], 0, 10) : 1;
    before_the_first();
    for (size_t i = 0; i < THREADS; i++) CHECK(pthread_create(&threads[i], 0, works, (void *)i) == 0);
    for (size_t i = 0; i < THREADS; i++) CHECK(pthread_join(threads[i], 0) == 0);

    EXPECT(CUALLOC_OK, cualloc_shared(0, &shared));
    CHECK(cualloc_shared_made(0) == shared);
    EXPECT(CUALLOC_BUSY, cualloc_shared_options(0));
    EXPECT(CUALLOC_OK, cualloc_stats(shared, &stats));
    CHECK(stats.limit == (uint64_t)1 << 30 && stats.blocks.current == 0 && stats.blocks.total == THREADS * rounds * 10);
    CHECK(stats.ooms == THREADS * rounds * 10);
    EXPECT(CUALLOC_OK, cualloc_torch_fraction(0.5, 0));
    EXPECT(CUALLOC_OK, cualloc_stats(shared, &stats));
    CHECK(stats.limit == (uint64_t)40 << 30);
    EXPECT(CUALLOC_INVALID_ARGUMENT, cualloc_torch_fraction(1.5, 0));
    EXPECT(CUALLOC_INVALID_ARGUMENT, cualloc_torch_fraction(-0.5, 0));
    CHECK(stats.reserved.current > 0);
    cualloc_torch_reset();
    EXPECT(CUALLOC_OK, cualloc_stats(shared, &stats));
    CHECK(stats.reserved.current == 0);
    EXPECT(CUALLOC_OK, cualloc_check(shared));

    /* A program should not call this; if it does, it gets an error. */
    EXPECT(CUALLOC_OK, cualloc_destroy(shared));
    CHECK(cualloc_torch_alloc(512, 0, 0) == 0);
    EXPECT(CUALLOC_CLOSED, cualloc_last_code());
    cualloc_torch_free((void *)4096, 1, 0, 0);
    puts("well");
    return 0;
}
