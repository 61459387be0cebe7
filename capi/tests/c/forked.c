/* A forked child gets an answer to every call, and its parent's memory is left alone. */
#define _POSIX_C_SOURCE 200809L
#include "common.h"

#include <sys/wait.h>
#include <unistd.h>

int main(void) {
    cualloc_t *allocator = new_allocator(), *made = (cualloc_t *)1;
    cualloc_pool_t *pool = 0, *none = (cualloc_pool_t *)1;
    cualloc_scope_t scope = scope_of(CUALLOC_SCOPE_THREAD);
    uint64_t ptr = 0, other = 1, entered = 0;
    int status = 0;
    pid_t child;
    EXPECT(CUALLOC_OK, cualloc_alloc(allocator, 4096, 0, &ptr));
    EXPECT(CUALLOC_OK, cualloc_pool_create(allocator, &pool));
    EXPECT(CUALLOC_OK, cualloc_pool_enter(pool, &scope, &entered));
    child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        cualloc_stats_t stats;
        alarm(60);
        stats.struct_size = sizeof stats;
        NOTHING(CUALLOC_CONTEXT_LOST, cualloc_alloc(allocator, 4096, 0, &other), other);
        EXPECT(CUALLOC_CONTEXT_LOST, cualloc_free(allocator, ptr));
        EXPECT(CUALLOC_CONTEXT_LOST, cualloc_record_stream(allocator, ptr, 0));
        EXPECT(CUALLOC_CONTEXT_LOST, cualloc_retire_stream(allocator, 0));
        EXPECT(CUALLOC_CONTEXT_LOST, cualloc_trim(allocator, 0, 0, 0));
        EXPECT(CUALLOC_CONTEXT_LOST, cualloc_empty_cache(allocator, 0, 0));
        EXPECT(CUALLOC_CONTEXT_LOST, cualloc_make_current(allocator));
        EXPECT(CUALLOC_CONTEXT_LOST, cualloc_stream_synchronize(allocator, 0));
        EXPECT(CUALLOC_CONTEXT_LOST, cualloc_set_limit(allocator, 1));
        EXPECT(CUALLOC_CONTEXT_LOST, cualloc_reset_peaks(allocator));
        EXPECT(CUALLOC_CONTEXT_LOST, cualloc_usable_size(allocator, ptr, &other));
        EXPECT(CUALLOC_CONTEXT_LOST, cualloc_check(allocator));
        NOTHING(CUALLOC_CONTEXT_LOST, cualloc_pool_create(allocator, &none), none);
        EXPECT(CUALLOC_CONTEXT_LOST, cualloc_pool_enter(pool, &scope, &other));
        EXPECT(CUALLOC_CONTEXT_LOST, cualloc_pool_leave(pool, entered));
        EXPECT(CUALLOC_CONTEXT_LOST, cualloc_pool_release(pool));
        EXPECT(CUALLOC_CONTEXT_LOST, cualloc_destroy(allocator));
        EXPECT(CUALLOC_OK, cualloc_stats(allocator, &stats));
        CHECK(stats.blocks.current == 0);
        CHECK(cualloc_options_new() == 0);
        CHECK(cualloc_create(0, NULL_OPTIONS, &made) != CUALLOC_OK && made == 0);
        _exit(0);
    }
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    EXPECT(CUALLOC_OK, cualloc_free(allocator, ptr));
    EXPECT(CUALLOC_OK, cualloc_pool_leave(pool, entered));
    EXPECT(CUALLOC_OK, cualloc_pool_release(pool));
    EXPECT(CUALLOC_OK, cualloc_destroy(allocator));
    puts("well");
    return 0;
}
