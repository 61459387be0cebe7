/* Allocators that are destroyed while other threads are in calls with them. */
#include "common.h"

#include <pthread.h>

enum { THREADS = 4 };

static cualloc_t *allocator;

/* Allocates and frees until the allocator is gone. */
static void *worker(void *number) {
    size_t turn = (size_t)(uintptr_t)number, bytes;
    for (;; turn++) {
        uint64_t ptr = 1, base, size;
        cualloc_stats_t stats;
        bytes = turn * 7919 % 300000 + 1;
        int32_t code = cualloc_alloc(allocator, bytes, 0, &ptr);
        if (code == CUALLOC_CLOSED) {
            CHECK(ptr == 0);
            return 0;
        }
        CHECK(code == CUALLOC_OK && ptr != 0);
        /* It has a live block, so it cannot be destroyed now. */
        EXPECT(CUALLOC_OK, cualloc_base(allocator, ptr, &base, &size));
        CHECK(base == ptr && size >= bytes);
        EXPECT(CUALLOC_OK, cualloc_free(allocator, ptr));
        stats.struct_size = sizeof stats;
        code = cualloc_stats(allocator, &stats);
        CHECK(code == CUALLOC_OK || code == CUALLOC_CLOSED);
        code = cualloc_trim(allocator, 0, 0, 0);
        CHECK(code == CUALLOC_OK || code == CUALLOC_CLOSED);
    }
}

/* Two of them at once: one ends the allocator, the other is told that it is gone. */
static void *ender(void *ended) {
    for (;;) {
        int32_t code = cualloc_destroy(allocator);
        if (code == CUALLOC_OK) {
            *(int *)ended = 1;
            return 0;
        }
        if (code == CUALLOC_CLOSED) return 0;
        CHECK(code == CUALLOC_BUSY);
    }
}

int main(int argc, char **argv) {
    int round, rounds = argc > 1 ? atoi(argv[1]) : 100;
    for (round = 0; round < rounds; round++) {
        pthread_t workers[THREADS], enders[2];
        int ended[2] = {0, 0}, i;
        cualloc_t *handle = new_allocator();
        CHECK(handle != allocator);
        allocator = handle;
        for (i = 0; i < THREADS; i++)
            CHECK(pthread_create(&workers[i], 0, worker, (void *)(uintptr_t)(i * 1000 + round)) == 0);
        for (i = 0; i < 2; i++) CHECK(pthread_create(&enders[i], 0, ender, &ended[i]) == 0);
        for (i = 0; i < 2; i++) CHECK(pthread_join(enders[i], 0) == 0);
        for (i = 0; i < THREADS; i++) CHECK(pthread_join(workers[i], 0) == 0);
        CHECK(ended[0] + ended[1] == 1);
    }
    puts("well");
    return 0;
}
