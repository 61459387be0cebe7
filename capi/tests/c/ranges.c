/* Growable ranges by the header alone: a cache that grows, shrinks and gives way. The driver is that of this machine, or
 * what CUALLOC_DRIVER names. */
#include "common.h"
#include "load.h"

enum { MIB = 1 << 20, GRANULE = 2 * MIB, GRANULES = 100 };

static int (*create_stream)(void **, unsigned);
static int (*destroy_stream)(void *);
static int (*synchronize)(void *);
static int (*begin_capture)(void *, int);
static int (*end_capture)(void *, void **);
static int (*destroy_graph)(void *);
static int (*fill)(unsigned long long, unsigned char, size_t, void *);
static int (*to_host)(void *, unsigned long long, size_t);

static cualloc_t *gpu;

static void start(void) {
    void *driver = the_driver(), *context;
    int (*init)(unsigned), (*retain)(void **, int), (*set_context)(void *);
    find(driver, "cuInit", &init);
    find(driver, "cuDevicePrimaryCtxRetain", &retain);
    find(driver, "cuCtxSetCurrent", &set_context);
    find(driver, "cuStreamCreate", &create_stream);
    find(driver, "cuStreamDestroy_v2", &destroy_stream);
    find(driver, "cuStreamSynchronize", &synchronize);
    find(driver, "cuStreamBeginCapture_v2", &begin_capture);
    find(driver, "cuStreamEndCapture", &end_capture);
    find(driver, "cuGraphDestroy", &destroy_graph);
    find(driver, "cuMemsetD8Async", &fill);
    find(driver, "cuMemcpyDtoH_v2", &to_host);
    CHECK(init(0) == 0 && retain(&context, 0) == 0 && set_context(context) == 0);
    EXPECT(CUALLOC_OK, cualloc_create_in(0, NULL_OPTIONS, &gpu));
}

static cualloc_range_stats_t stats_of(const cualloc_range_t *range) {
    cualloc_range_stats_t stats;
    stats.struct_size = sizeof stats;
    EXPECT(CUALLOC_OK, cualloc_range_stats(range, &stats));
    CHECK(stats.struct_size == sizeof stats && stats.granule == GRANULE);
    return stats;
}

struct cache {
    cualloc_range_t *range;
    void *stream;
    uint64_t asked;
};

static void give_way(void *data, uint64_t bytes) {
    struct cache *cache = (struct cache *)data;
    cache->asked += bytes;
    EXPECT(CUALLOC_OK, cualloc_range_decommit(cache->range, 4 * GRANULE, 96 * GRANULE, cache->stream));
}

static void wrong(void *stream) {
    cualloc_range_options_t options;
    cualloc_range_stats_t stats;
    cualloc_range_t *range;
    uint64_t base, bits = 0;
    memset(&options, 0, sizeof options);
    NOTHING(CUALLOC_INVALID_ARGUMENT, cualloc_range_create(gpu, GRANULE, &options, &range, &base), range);
    options.struct_size = sizeof options;
    options.granule = 3 * MIB;
    NOTHING(CUALLOC_INVALID_ARGUMENT, cualloc_range_create(gpu, GRANULE, &options, &range, &base), range);
    options.granule = 0;
    NOTHING(CUALLOC_INVALID_ARGUMENT, cualloc_range_create(gpu, 0, &options, &range, &base), base);
    NOTHING(CUALLOC_INVALID_ARGUMENT, cualloc_range_create(gpu, GRANULE, &options, &range, 0), range);
    NOTHING(CUALLOC_CLOSED, cualloc_range_create((cualloc_t *)(uintptr_t)4096, GRANULE, 0, &range, &base), range);
    EXPECT(CUALLOC_OK, cualloc_range_create(gpu, 4 * GRANULE, 0, &range, &base));
    EXPECT(CUALLOC_INVALID_ARGUMENT, cualloc_range_commit(range, 1, 4 * GRANULE, stream));
    EXPECT(CUALLOC_INVALID_ARGUMENT, cualloc_range_decommit(range, UINT64_MAX, UINT64_MAX, stream));
    EXPECT(CUALLOC_INVALID_ARGUMENT, cualloc_range_record(0, 0, 1, stream));
    EXPECT(CUALLOC_INVALID_ARGUMENT, cualloc_range_map(range, 0, 1));
    stats.struct_size = 0;
    EXPECT(CUALLOC_INVALID_ARGUMENT, cualloc_range_stats(range, &stats));
    EXPECT(CUALLOC_BUSY, cualloc_destroy(gpu));
    EXPECT(CUALLOC_OK, cualloc_range_destroy(range, stream));
    EXPECT(CUALLOC_CLOSED, cualloc_range_destroy(range, stream));
    EXPECT(CUALLOC_CLOSED, cualloc_range_map(range, &bits, 1));
    EXPECT(CUALLOC_OK, cualloc_range_destroy(0, stream));
    EXPECT(CUALLOC_INVALID_ARGUMENT, cualloc_on_pressure(0, give_way, 0));
}

int main(void) {
    cualloc_range_options_t options;
    cualloc_stats_t all;
    cualloc_range_t *other;
    struct cache cache;
    void *stream, *second, *graph;
    uint64_t base, block, elsewhere, bits[3];
    unsigned char byte;
    start();
    CHECK(create_stream(&stream, 1) == 0 && create_stream(&second, 1) == 0);
    wrong(stream);

    memset(&options, 0, sizeof options);
    options.struct_size = sizeof options;
    options.stripes = 2;
    options.stripe_stride = 128 * (uint64_t)GRANULE;
    options.tag = "cache";
    EXPECT(CUALLOC_OK, cualloc_range_create(gpu, GRANULES * (uint64_t)GRANULE, &options, &cache.range, &base));
    EXPECT(CUALLOC_OK, cualloc_range_commit(cache.range, GRANULE + 1, 65 * (uint64_t)GRANULE, stream));
    memset(bits, 255, sizeof bits);
    EXPECT(CUALLOC_OK, cualloc_range_map(cache.range, bits, 3));
    CHECK(bits[0] == UINT64_MAX - 1 && bits[1] == 7 && bits[2] == 0);
    CHECK(stats_of(cache.range).committed == 2 * 66 * (uint64_t)GRANULE);
    CHECK(fill(base + options.stripe_stride + 66 * (uint64_t)GRANULE, 7, GRANULE, second) == 0);
    EXPECT(CUALLOC_OK, cualloc_range_record(cache.range, 66 * (uint64_t)GRANULE, 1, second));
    CHECK(synchronize(second) == 0 && to_host(&byte, base + options.stripe_stride + 66 * (uint64_t)GRANULE, 1) == 0);
    CHECK(byte == 7);
    EXPECT(CUALLOC_OK, cualloc_range_decommit(cache.range, 10 * (uint64_t)GRANULE - 1, GRANULE + 2, stream));
    CHECK(stats_of(cache.range).leaving == 2 * (uint64_t)GRANULE);
    all.struct_size = sizeof all;
    EXPECT(CUALLOC_OK, cualloc_stats(gpu, &all));
    CHECK(all.ranges == 2 * 66 * (uint64_t)GRANULE && all.ranges_leaving == 2 * (uint64_t)GRANULE);

    /* A stream that is being captured commits complete memory, and decommits none. */
    CHECK(begin_capture(stream, 1) == 0);
    EXPECT(CUALLOC_OK, cualloc_range_commit(cache.range, 90 * (uint64_t)GRANULE, 1, stream));
    EXPECT(CUALLOC_CAPTURING, cualloc_range_decommit(cache.range, 90 * (uint64_t)GRANULE, GRANULE, stream));
    CHECK(end_capture(stream, &graph) == 0 && destroy_graph(graph) == 0);

    /* The cache gives way to a request beyond the limit, and to another range. */
    cache.stream = stream;
    cache.asked = 0;
    EXPECT(CUALLOC_OK, cualloc_on_pressure(gpu, give_way, &cache));
    EXPECT(CUALLOC_OK, cualloc_set_limit(gpu, 300 * (uint64_t)MIB));
    EXPECT(CUALLOC_OK, cualloc_alloc(gpu, 100 * MIB, second, &block));
    CHECK(cache.asked > 0 && stats_of(cache.range).committed == 2 * 3 * (uint64_t)GRANULE);
    EXPECT(CUALLOC_OK, cualloc_range_create(gpu, 128 * (uint64_t)GRANULE, 0, &other, &elsewhere));
    EXPECT(CUALLOC_OUT_OF_MEMORY, cualloc_range_commit(other, 0, 128 * (uint64_t)GRANULE, second));
    EXPECT(CUALLOC_OK, cualloc_range_commit(other, 0, 16 * (uint64_t)GRANULE, second));
    CHECK(elsewhere != 0 && stats_of(other).committed == 16 * (uint64_t)GRANULE);
    EXPECT(CUALLOC_OK, cualloc_on_pressure(gpu, 0, 0));

    EXPECT(CUALLOC_OK, cualloc_free(gpu, block));
    EXPECT(CUALLOC_OK, cualloc_range_destroy(other, second));
    EXPECT(CUALLOC_OK, cualloc_range_destroy(cache.range, stream));
    EXPECT(CUALLOC_OK, cualloc_retire_stream(gpu, stream));
    EXPECT(CUALLOC_OK, cualloc_retire_stream(gpu, second));
    CHECK(destroy_stream(stream) == 0 && destroy_stream(second) == 0);
    EXPECT(CUALLOC_OK, cualloc_destroy(gpu));
    puts("well");
    return 0;
}
