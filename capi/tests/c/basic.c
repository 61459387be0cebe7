/* One of each call, as a program uses them. */
#include "common.h"

static void options(void) {
    cualloc_options_t *options = cualloc_options_new();
    cualloc_t *made = (cualloc_t *)options;
    CHECK(options != 0);
    EXPECT(CUALLOC_OK, cualloc_options_set(options, "limit", "64M"));
    EXPECT(CUALLOC_OK, cualloc_options_set(options, "policy", "classic"));
    EXPECT(CUALLOC_OK, cualloc_options_set(options, "profile", "dense"));
    EXPECT(CUALLOC_INVALID_ARGUMENT, cualloc_options_set(options, "colour", "red"));
    CHECK(strstr(cualloc_last_error(), "colour") != 0);
    EXPECT(CUALLOC_INVALID_ARGUMENT, cualloc_options_set(options, "limit", "much"));
    EXPECT(CUALLOC_INVALID_ARGUMENT, cualloc_options_set(options, "limit", "1G,tune.views=off"));
    EXPECT(CUALLOC_INVALID_ARGUMENT, cualloc_options_set(options, "limit", "\xff\xfe"));
    EXPECT(CUALLOC_INVALID_ARGUMENT, cualloc_options_set(options, "device", "tpu"));
    /* Each of them is right by itself. */
    NOTHING(CUALLOC_INVALID_ARGUMENT, cualloc_create(0, options, &made), made);
    cualloc_options_free(options);
    cualloc_options_free(options);
    cualloc_options_free(0);
    EXPECT(CUALLOC_CLOSED, cualloc_options_set(options, "limit", "64M"));
    NOTHING(CUALLOC_CLOSED, cualloc_create(0, options, &made), made);
}

static void figures(cualloc_t *allocator, uint64_t blocks, uint64_t requested) {
    cualloc_stats_t stats;
    struct {
        cualloc_stats_t known;
        uint64_t later[4];
    } larger;
    size_t size;
    memset(&stats, 0x5a, sizeof stats);
    stats.struct_size = sizeof stats;
    EXPECT(CUALLOC_OK, cualloc_stats(allocator, &stats));
    CHECK(stats.struct_size == sizeof stats);
    CHECK(stats.blocks.current == blocks && stats.requested.current == requested);
    CHECK(stats.allocated.current >= requested && stats.reserved.current >= stats.allocated.current);
    CHECK(stats.requested.peak >= requested && stats.requested.total >= requested);
    CHECK(stats.small_pool.blocks.current + stats.large_pool.blocks.current == blocks);
    CHECK(stats.driver_calls > 0 && stats.limit == UINT64_MAX);
    /* One of a later version: what is not registered with this allocator is left alone. */
    memset(&larger, 0x5a, sizeof larger);
    larger.known.struct_size = sizeof larger;
    EXPECT(CUALLOC_OK, cualloc_stats(allocator, &larger.known));
    CHECK(larger.known.struct_size == sizeof larger);
    CHECK(larger.known.blocks.current == blocks && larger.later[0] == 0x5a5a5a5a5a5a5a5au);
    larger.known.struct_size = SIZE_MAX;
    EXPECT(CUALLOC_OK, cualloc_stats(allocator, &larger.known));
    CHECK(larger.later[0] == 0x5a5a5a5a5a5a5a5au);
    /* And of earlier ones: nothing is written behind their end. */
    for (size = sizeof(size_t); size < sizeof stats; size += 4) {
        const unsigned char *bytes = (const unsigned char *)&stats;
        memset(&stats, 0x5a, sizeof stats);
        stats.struct_size = size;
        EXPECT(CUALLOC_OK, cualloc_stats(allocator, &stats));
        CHECK(bytes[size] == 0x5a);
        CHECK(size < 16 || stats.requested.current == requested);
    }
    stats.struct_size = 0;
    EXPECT(CUALLOC_INVALID_ARGUMENT, cualloc_stats(allocator, &stats));
}

static void blocks(cualloc_t *allocator) {
    uint64_t small = 1, large = 1, aligned = 1, base = 1, bytes = 1, released = 1, pending = 1;
    size_t alignment;
    EXPECT(CUALLOC_OK, cualloc_alloc(allocator, 1000, 0, &small));
    EXPECT(CUALLOC_OK, cualloc_alloc(allocator, 10u << 20, 0, &large));
    CHECK(small != 0 && small % 512 == 0 && large != 0 && large % 512 == 0);
    for (alignment = 1; alignment <= 2097152; alignment *= 2) {
        EXPECT(CUALLOC_OK, cualloc_alloc_aligned(allocator, 3000, alignment, 0, &aligned));
        CHECK(aligned % alignment == 0);
        EXPECT(CUALLOC_OK, cualloc_free(allocator, aligned));
    }
    figures(allocator, 2, 1000 + (10u << 20));
    EXPECT(CUALLOC_OK, cualloc_usable_size(allocator, small, &bytes));
    CHECK(bytes == 1024);
    EXPECT(CUALLOC_OK, cualloc_base(allocator, large + 4097, &base, &bytes));
    CHECK(base == large && bytes == 10u << 20);
    NOTHING(CUALLOC_NOT_LIVE, cualloc_usable_size(allocator, large + 512, &bytes), bytes);
    EXPECT(CUALLOC_NOT_LIVE, cualloc_free(allocator, large + 512));
    EXPECT(CUALLOC_NOT_LIVE, cualloc_free(allocator, small + 512));
    EXPECT(CUALLOC_OK, cualloc_record_stream(allocator, large + 1, stream_of(2)));
    EXPECT(CUALLOC_OK, cualloc_adopt_stream(allocator, stream_of(1)));
    EXPECT(CUALLOC_OK, cualloc_check(allocator));
    EXPECT(CUALLOC_BUSY, cualloc_destroy(allocator));
    CHECK(strstr(cualloc_last_error(), "2 blocks") != 0);
    EXPECT(CUALLOC_OK, cualloc_free_on(allocator, large, stream_of(2)));
    EXPECT(CUALLOC_NOT_LIVE, cualloc_free_on(allocator, large, stream_of(2)));
    EXPECT(CUALLOC_OK, cualloc_free(allocator, small));
    EXPECT(CUALLOC_NOT_LIVE, cualloc_free(allocator, small));
    EXPECT(CUALLOC_OK, cualloc_free(allocator, 0));
    EXPECT(CUALLOC_OK, cualloc_free_on(allocator, 0, 0));
    EXPECT(CUALLOC_OK, cualloc_retire_stream(allocator, stream_of(2)));
    EXPECT(CUALLOC_OK, cualloc_retire_stream(allocator, stream_of(2)));
    EXPECT(CUALLOC_OK, cualloc_trim(allocator, UINT64_MAX, &released, &pending));
    CHECK(released == 0);
    EXPECT(CUALLOC_OK, cualloc_trim(allocator, 0, 0, 0));
    NOTHING(CUALLOC_OK, cualloc_empty_cache(allocator, &released, &pending), pending);
    figures(allocator, 0, 0);
}

static void memory_runs_out(cualloc_t *allocator) {
    uint64_t ptr = 1;
    cualloc_stats_t stats;
    stats.struct_size = sizeof stats;
    EXPECT(CUALLOC_OK, cualloc_set_limit(allocator, 8u << 20));
    NOTHING(CUALLOC_OUT_OF_MEMORY, cualloc_alloc(allocator, 64u << 20, 0, &ptr), ptr);
    CHECK(strstr(cualloc_last_error(), "out of memory on device 0 (limit): requested 64.00 MiB") != 0);
    CHECK(strstr(cualloc_last_error(), "bound 8.00 MiB (limit), missing 56.00 MiB") != 0);
    CHECK(strstr(cualloc_last_error(), "Raise the limit by 58720256 bytes") != 0);
    EXPECT(CUALLOC_OK, cualloc_stats(allocator, &stats));
    CHECK(stats.ooms == 1 && stats.limit == 8u << 20);
    EXPECT(CUALLOC_OK, cualloc_set_limit(allocator, UINT64_MAX));
    EXPECT(CUALLOC_OK, cualloc_alloc(allocator, 64u << 20, 0, &ptr));
    EXPECT(CUALLOC_OK, cualloc_free(allocator, ptr));
    EXPECT(CUALLOC_OK, cualloc_reset_peaks(allocator));
    EXPECT(CUALLOC_OK, cualloc_stats(allocator, &stats));
    CHECK(stats.allocated.peak == 0 && stats.allocated.total >= 64u << 20);
}

int main(int argc, char **argv) {
    cualloc_t *allocator, *other;
    uint64_t ptr = 1;
    (void)argc;
    (void)argv;
    CHECK(cualloc_abi_version() == CUALLOC_ABI_VERSION);
    CHECK(cualloc_last_error() != 0 && cualloc_last_error()[0] == 0);
    options();
    allocator = new_allocator();
    other = new_allocator();
    CHECK(allocator != other);
    blocks(allocator);
    memory_runs_out(allocator);
    /* Memory of another allocator. */
    EXPECT(CUALLOC_OK, cualloc_alloc(other, 4096, 0, &ptr));
    EXPECT(CUALLOC_NOT_OURS, cualloc_free(allocator, ptr));
    EXPECT(CUALLOC_NOT_OURS, cualloc_record_stream(allocator, ptr, 0));
    EXPECT(CUALLOC_OK, cualloc_free(other, ptr));
    EXPECT(CUALLOC_OK, cualloc_destroy(allocator));
    EXPECT(CUALLOC_CLOSED, cualloc_destroy(allocator));
    EXPECT(CUALLOC_CLOSED, cualloc_free(allocator, 0));
    EXPECT(CUALLOC_OK, cualloc_check(other));
    EXPECT(CUALLOC_OK, cualloc_destroy(other));
    puts("well");
    return 0;
}
