/* Graph pools: captures of the driver's own through them, and everything that is wrong with a scope or a pool. The
 * driver is that of this machine, or what CUALLOC_DRIVER names. */
#include "common.h"
#include "load.h"

#include <pthread.h>

enum { THREADS = 4, LAYERS = 20, LAYER = 1 << 20, GLOBAL = 0, THREAD_LOCAL = 1 };

static int (*begin_capture)(void *, int);
static int (*end_capture)(void *, void **);
static int (*capture_info)(void *, int *, uint64_t *, void *, void *, void *);
static int (*instantiate)(void **, void *, unsigned long long);
static int (*launch)(void *, void *);
static int (*destroy_exec)(void *);
static int (*destroy_graph)(void *);
static int (*create_stream)(void **, unsigned);
static int (*destroy_stream)(void *);
static int (*synchronize)(void *);
static int (*fill)(unsigned long long, unsigned char, size_t, void *);
static int (*to_host)(void *, unsigned long long, size_t);
static int (*set_context)(void *);

static cualloc_t *gpu;
static void *context;

static void start(void) {
    void *driver = the_driver();
    int (*init)(unsigned), (*retain)(void **, int);
    find(driver, "cuInit", &init);
    find(driver, "cuDevicePrimaryCtxRetain", &retain);
    find(driver, "cuCtxSetCurrent", &set_context);
    find(driver, "cuStreamBeginCapture_v2", &begin_capture);
    find(driver, "cuStreamEndCapture", &end_capture);
    find(driver, "cuStreamGetCaptureInfo_v2", &capture_info);
    find(driver, "cuGraphInstantiateWithFlags", &instantiate);
    find(driver, "cuGraphLaunch", &launch);
    find(driver, "cuGraphExecDestroy", &destroy_exec);
    find(driver, "cuGraphDestroy", &destroy_graph);
    find(driver, "cuStreamCreate", &create_stream);
    find(driver, "cuStreamDestroy_v2", &destroy_stream);
    find(driver, "cuStreamSynchronize", &synchronize);
    find(driver, "cuMemsetD8Async", &fill);
    find(driver, "cuMemcpyDtoH_v2", &to_host);
    CHECK(init(0) == 0 && retain(&context, 0) == 0 && set_context(context) == 0);
    EXPECT(CUALLOC_OK, cualloc_create_in(0, NULL_OPTIONS, &gpu));
}

static uint64_t entered(cualloc_pool_t *pool, int32_t kind) {
    cualloc_scope_t scope = scope_of(kind);
    uint64_t number = 0;
    EXPECT(CUALLOC_OK, cualloc_pool_enter(pool, &scope, &number));
    CHECK(number != 0);
    return number;
}

static cualloc_footprint_t holds(cualloc_pool_t *pool) {
    cualloc_footprint_t out;
    out.struct_size = sizeof out;
    EXPECT(CUALLOC_OK, cualloc_pool_footprint(pool, &out));
    CHECK(out.struct_size == sizeof out && out.physical >= out.live);
    return out;
}

static uint64_t held(void) {
    cualloc_stats_t stats;
    stats.struct_size = sizeof stats;
    EXPECT(CUALLOC_OK, cualloc_stats(gpu, &stats));
    return stats.reserved.current;
}

/* Layers one behind another, each in memory of the one before; what the last one wrote stays. */
static void *captured(void *stream, uint64_t *output) {
    void *graph = 0;
    uint64_t first = 0, at;
    int layer;
    CHECK(begin_capture(stream, THREAD_LOCAL) == 0);
    for (layer = 0; layer < LAYERS; layer++) {
        EXPECT(CUALLOC_OK, cualloc_alloc(gpu, LAYER, stream, &at));
        CHECK(layer == 0 || at == first);
        first = at;
        CHECK(fill(at, (unsigned char)layer, LAYER, stream) == 0);
        EXPECT(CUALLOC_OK, cualloc_free(gpu, at));
    }
    EXPECT(CUALLOC_OK, cualloc_alloc(gpu, 4096, stream, output));
    CHECK(fill(*output, 77, 4096, stream) == 0);
    CHECK(end_capture(stream, &graph) == 0 && graph != 0);
    return graph;
}

static void a_graph_keeps_its_memory(void *stream) {
    cualloc_pool_t *pool = 0;
    void *graph, *exec;
    unsigned char bytes[4096];
    uint64_t scope, output = 0, eager = held();
    EXPECT(CUALLOC_OK, cualloc_pool_create(gpu, &pool));
    scope = entered(pool, CUALLOC_SCOPE_NEXT_CAPTURE);
    graph = captured(stream, &output);
    EXPECT(CUALLOC_OK, cualloc_pool_leave(pool, scope));
    CHECK(held() == eager);
    CHECK(holds(pool).leases == 1 && holds(pool).blocks == 1 && holds(pool).live == 4096);
    CHECK(holds(pool).peak >= LAYER && holds(pool).peak < 2 * LAYER);
    CHECK(instantiate(&exec, graph, 0) == 0 && destroy_graph(graph) == 0);
    CHECK(launch(exec, stream) == 0 && launch(exec, stream) == 0 && synchronize(stream) == 0);
    CHECK(to_host(bytes, output, sizeof bytes) == 0 && bytes[0] == 77 && bytes[4095] == 77);
    EXPECT(CUALLOC_OK, cualloc_free(gpu, output));
    /* Its memory is the executable's now. */
    EXPECT(CUALLOC_OK, cualloc_empty_cache(gpu, 0, 0));
    CHECK(holds(pool).physical > 0 && holds(pool).blocks == 0);
    EXPECT(CUALLOC_BUSY, cualloc_destroy(gpu));
    EXPECT(CUALLOC_OK, cualloc_pool_release(pool));
    EXPECT(CUALLOC_CLOSED, cualloc_pool_release(pool));
    EXPECT(CUALLOC_BUSY, cualloc_destroy(gpu));
    CHECK(launch(exec, stream) == 0 && synchronize(stream) == 0);
    CHECK(destroy_exec(exec) == 0);
    EXPECT(CUALLOC_OK, cualloc_empty_cache(gpu, 0, 0));
    EXPECT(CUALLOC_OK, cualloc_check(gpu));
}

/* Two graphs of one pool take what the larger one needs. */
static void graphs_share_a_pool(void *stream, void *other) {
    cualloc_pool_t *pool = 0;
    void *graphs[2];
    uint64_t scope, outputs[2], alone;
    EXPECT(CUALLOC_OK, cualloc_pool_create(gpu, &pool));
    scope = entered(pool, CUALLOC_SCOPE_NEXT_CAPTURE);
    graphs[0] = captured(stream, &outputs[0]);
    EXPECT(CUALLOC_OK, cualloc_pool_leave(pool, scope));
    alone = holds(pool).physical;
    scope = entered(pool, CUALLOC_SCOPE_NEXT_CAPTURE);
    graphs[1] = captured(other, &outputs[1]);
    EXPECT(CUALLOC_OK, cualloc_pool_leave(pool, scope));
    CHECK(holds(pool).physical == alone && holds(pool).leases == 2 && outputs[0] != outputs[1]);
    /* One that was not captured with it. */
    EXPECT(CUALLOC_OK, cualloc_pool_retain(pool, graphs[0]));
    CHECK(holds(pool).leases == 3);
    EXPECT(CUALLOC_INVALID_ARGUMENT, cualloc_pool_retain(pool, 0));
    EXPECT(CUALLOC_OK, cualloc_free(gpu, outputs[0]));
    EXPECT(CUALLOC_OK, cualloc_free(gpu, outputs[1]));
    CHECK(destroy_graph(graphs[0]) == 0 && destroy_graph(graphs[1]) == 0);
    EXPECT(CUALLOC_OK, cualloc_pool_release(pool));
}

static void *requested(void *stream) {
    uint64_t at = 0;
    CHECK(set_context(context) == 0);
    EXPECT(CUALLOC_OK, cualloc_alloc(gpu, LAYER, stream, &at));
    return (void *)(uintptr_t)at;
}

static void requested_and_freed(void *stream) {
    EXPECT(CUALLOC_OK, cualloc_free(gpu, (uint64_t)(uintptr_t)requested(stream)));
}

static uint64_t on_another_thread(void *stream) {
    pthread_t thread;
    void *at;
    CHECK(pthread_create(&thread, 0, requested, stream) == 0 && pthread_join(thread, &at) == 0);
    return (uint64_t)(uintptr_t)at;
}

/* Whether a block is one of a pool's. */
static int is_of(cualloc_pool_t *pool, uint64_t block) {
    uint64_t before = holds(pool).blocks;
    EXPECT(CUALLOC_OK, cualloc_free(gpu, block));
    return holds(pool).blocks + 1 == before;
}

static void scopes_by_capture_stream_and_thread(void *stream, void *other) {
    cualloc_pool_t *pool = 0;
    cualloc_scope_t scope;
    uint64_t number, at, id = 0;
    void *graph;
    int status = 0;
    EXPECT(CUALLOC_OK, cualloc_pool_create(gpu, &pool));
    /* Without a scope a capture gets nothing, and goes on. */
    CHECK(begin_capture(stream, THREAD_LOCAL) == 0);
    EXPECT(CUALLOC_CAPTURING, cualloc_alloc(gpu, LAYER, stream, &at));
    CHECK(at == 0 && capture_info(stream, &status, &id, 0, 0, 0) == 0 && status == 1);
    scope = scope_of(CUALLOC_SCOPE_CAPTURE);
    scope.capture = id;
    EXPECT(CUALLOC_OK, cualloc_pool_enter(pool, &scope, &number));
    EXPECT(CUALLOC_OK, cualloc_alloc(gpu, LAYER, stream, &at));
    CHECK(is_of(pool, at));
    CHECK(!is_of(pool, (uint64_t)(uintptr_t)requested(other)));
    CHECK(end_capture(stream, &graph) == 0 && destroy_graph(graph) == 0);
    EXPECT(CUALLOC_OK, cualloc_pool_leave(pool, number));

    scope = scope_of(CUALLOC_SCOPE_STREAM);
    scope.stream = other;
    EXPECT(CUALLOC_OK, cualloc_pool_enter(pool, &scope, &number));
    CHECK(is_of(pool, on_another_thread(other)));
    CHECK(!is_of(pool, (uint64_t)(uintptr_t)requested(stream)));
    EXPECT(CUALLOC_OK, cualloc_pool_leave(pool, number));
    CHECK(!is_of(pool, (uint64_t)(uintptr_t)requested(other)));

    number = entered(pool, CUALLOC_SCOPE_THREAD);
    CHECK(is_of(pool, (uint64_t)(uintptr_t)requested(stream)));
    CHECK(!is_of(pool, on_another_thread(stream)));
    EXPECT(CUALLOC_OK, cualloc_pool_leave(pool, number));
    EXPECT(CUALLOC_OK, cualloc_pool_release(pool));
}

struct asked {
    cualloc_pool_t *pool;
    uint64_t scope;
    void *stream;
    uint64_t freed;
    int asked, done, leaves;
};

static bool when(void *data, void *stream) {
    struct asked *asked = (struct asked *)data;
    cualloc_scope_t other = scope_of(CUALLOC_SCOPE_WHEN);
    uint64_t at = 0, number = 1;
    asked->asked++;
    CHECK(asked->done == 0);
    /* It may call anything, but a request of its own would be sent to it. */
    EXPECT(CUALLOC_BUSY, cualloc_alloc(gpu, LAYER, asked->stream, &at));
    EXPECT(CUALLOC_BUSY, cualloc_alloc(gpu, 512, 0, &at));
    EXPECT(CUALLOC_BUSY, cualloc_alloc_aligned(gpu, 512, 4096, asked->stream, &at));
    CHECK(at == 0 && strstr(cualloc_last_error(), "predicate") != 0);
    EXPECT(CUALLOC_OK, cualloc_free(gpu, asked->freed));
    asked->freed = 0;
    EXPECT(CUALLOC_BUSY, cualloc_destroy(gpu));
    other.when = when;
    other.data = data;
    NOTHING(CUALLOC_BUSY, cualloc_pool_enter(asked->pool, &other, &number), number);
    if (asked->leaves) {
        EXPECT(CUALLOC_OK, cualloc_pool_leave(asked->pool, asked->scope));
        EXPECT(CUALLOC_INVALID_ARGUMENT, cualloc_pool_leave(asked->pool, asked->scope));
        CHECK(asked->done == 0);
    }
    return stream == asked->stream;
}

static void done(void *data) { ((struct asked *)data)->done++; }

static void scopes_by_predicate(void *stream, void *other) {
    struct asked asked;
    cualloc_scope_t scope = scope_of(CUALLOC_SCOPE_WHEN);
    uint64_t number = 1, at;
    memset(&asked, 0, sizeof asked);
    scope.data = &asked;
    scope.done = done;
    EXPECT(CUALLOC_OK, cualloc_pool_create(gpu, &asked.pool));
    NOTHING(CUALLOC_INVALID_ARGUMENT, cualloc_pool_enter(asked.pool, &scope, &number), number);
    scope.when = when;
    asked.stream = stream;
    EXPECT(CUALLOC_OK, cualloc_alloc(gpu, LAYER, stream, &asked.freed));
    EXPECT(CUALLOC_OK, cualloc_pool_enter(asked.pool, &scope, &asked.scope));
    EXPECT(CUALLOC_OK, cualloc_alloc(gpu, LAYER, stream, &at));
    CHECK(asked.asked > 0 && is_of(asked.pool, at));
    EXPECT(CUALLOC_OK, cualloc_alloc(gpu, LAYER, other, &at));
    CHECK(!is_of(asked.pool, at) && asked.done == 0);
    EXPECT(CUALLOC_OK, cualloc_pool_leave(asked.pool, asked.scope));
    CHECK(asked.done == 1);
    /* One that leaves its own scope. */
    asked.done = 0;
    asked.leaves = 1;
    EXPECT(CUALLOC_OK, cualloc_pool_enter(asked.pool, &scope, &asked.scope));
    EXPECT(CUALLOC_OK, cualloc_alloc(gpu, LAYER, stream, &at));
    CHECK(asked.done == 1 && is_of(asked.pool, at));
    /* One that ends with its pool. */
    asked.done = 0;
    asked.leaves = 0;
    EXPECT(CUALLOC_OK, cualloc_pool_enter(asked.pool, &scope, &asked.scope));
    EXPECT(CUALLOC_OK, cualloc_pool_release(asked.pool));
    CHECK(asked.done == 1);
    EXPECT(CUALLOC_CLOSED, cualloc_pool_enter(asked.pool, &scope, &number));
    CHECK(asked.done == 1 && number == 0);
}

static void no_pool(cualloc_pool_t *pool, int32_t code) {
    cualloc_scope_t scope = scope_of(CUALLOC_SCOPE_THREAD);
    cualloc_footprint_t footprint;
    uint64_t number;
    NOTHING(code, cualloc_pool_enter(pool, &scope, &number), number);
    EXPECT(code, cualloc_pool_leave(pool, 1));
    memset(&footprint, 0x5a, sizeof footprint);
    footprint.struct_size = sizeof footprint;
    EXPECT(code, cualloc_pool_footprint(pool, &footprint));
    CHECK(footprint.live == 0 && footprint.leases == 0);
    EXPECT(code, cualloc_pool_retain(pool, &scope));
    EXPECT(code, cualloc_pool_release(pool));
}

static void wrong_arguments(void) {
    static char foreign[64];
    cualloc_pool_t *pool = 0, *other = 0, *stale = 0, *none = (cualloc_pool_t *)1;
    cualloc_scope_t scope = scope_of(CUALLOC_SCOPE_THREAD);
    cualloc_footprint_t footprint;
    uint64_t number = 1, first, second;
    size_t size;
    EXPECT(CUALLOC_INVALID_ARGUMENT, cualloc_pool_create(gpu, 0));
    NOTHING(CUALLOC_INVALID_ARGUMENT, cualloc_pool_create(0, &none), none);
    NOTHING(CUALLOC_CLOSED, cualloc_pool_create((cualloc_t *)foreign, &none), none);
    EXPECT(CUALLOC_OK, cualloc_pool_create(gpu, &pool));
    EXPECT(CUALLOC_OK, cualloc_pool_create(gpu, &other));
    EXPECT(CUALLOC_OK, cualloc_pool_create(gpu, &stale));
    EXPECT(CUALLOC_OK, cualloc_pool_release(stale));
    CHECK(pool != other);
    no_pool(0, CUALLOC_INVALID_ARGUMENT);
    no_pool(stale, CUALLOC_CLOSED);
    no_pool((cualloc_pool_t *)gpu, CUALLOC_CLOSED);
    no_pool((cualloc_pool_t *)foreign, CUALLOC_CLOSED);
    no_pool((cualloc_pool_t *)UINTPTR_MAX, CUALLOC_CLOSED);
    EXPECT(CUALLOC_CLOSED, cualloc_destroy((cualloc_t *)pool));

    EXPECT(CUALLOC_INVALID_ARGUMENT, cualloc_pool_enter(pool, &scope, 0));
    NOTHING(CUALLOC_INVALID_ARGUMENT, cualloc_pool_enter(pool, 0, &number), number);
    for (size = 0; size < sizeof scope; size += 8) {
        scope.struct_size = size;
        EXPECT(CUALLOC_INVALID_ARGUMENT, cualloc_pool_enter(pool, &scope, &number));
    }
    scope = scope_of(99);
    EXPECT(CUALLOC_INVALID_ARGUMENT, cualloc_pool_enter(pool, &scope, &number));
    scope = scope_of(0);
    EXPECT(CUALLOC_INVALID_ARGUMENT, cualloc_pool_enter(pool, &scope, &number));

    first = entered(pool, CUALLOC_SCOPE_THREAD);
    second = entered(other, CUALLOC_SCOPE_THREAD);
    CHECK(first != second);
    /* One of another pool, twice, and none. */
    EXPECT(CUALLOC_INVALID_ARGUMENT, cualloc_pool_leave(pool, second));
    EXPECT(CUALLOC_OK, cualloc_pool_leave(pool, first));
    EXPECT(CUALLOC_INVALID_ARGUMENT, cualloc_pool_leave(pool, first));
    CHECK(strstr(cualloc_last_error(), "already been left") != 0);
    EXPECT(CUALLOC_INVALID_ARGUMENT, cualloc_pool_leave(pool, 0));
    EXPECT(CUALLOC_INVALID_ARGUMENT, cualloc_pool_leave(pool, UINT64_MAX));
    /* A number is never used again. */
    number = entered(pool, CUALLOC_SCOPE_THREAD);
    CHECK(number != first && number != second);
    EXPECT(CUALLOC_INVALID_ARGUMENT, cualloc_pool_leave(pool, first));
    EXPECT(CUALLOC_OK, cualloc_pool_leave(pool, number));
    EXPECT(CUALLOC_OK, cualloc_pool_release(other));
    EXPECT(CUALLOC_CLOSED, cualloc_pool_leave(other, second));

    EXPECT(CUALLOC_INVALID_ARGUMENT, cualloc_pool_footprint(pool, 0));
    footprint.struct_size = 0;
    EXPECT(CUALLOC_INVALID_ARGUMENT, cualloc_pool_footprint(pool, &footprint));
    memset(&footprint, 0x5a, sizeof footprint);
    footprint.struct_size = 2 * sizeof(uint64_t);
    EXPECT(CUALLOC_OK, cualloc_pool_footprint(pool, &footprint));
    CHECK(footprint.live == 0 && footprint.blocks == 0x5a5a5a5a5a5a5a5au);
    EXPECT(CUALLOC_OK, cualloc_pool_release(pool));
}

/* Every thread has its captures, and everyone leaves scopes of everyone. */
static uint64_t shared_scopes[THREADS];
static cualloc_pool_t *shared_pool;
static int rounds = 100, told;

static bool never(void *data, void *stream) {
    (void)data;
    (void)stream;
    return false;
}

static void count(void *data) { __atomic_fetch_add((int *)data, 1, __ATOMIC_SEQ_CST); }

static void *captures(void *unused) {
    cualloc_scope_t scope = scope_of(CUALLOC_SCOPE_WHEN);
    void *stream;
    int round;
    (void)unused;
    scope.when = never;
    scope.done = count;
    scope.data = &told;
    CHECK(set_context(context) == 0 && create_stream(&stream, 1) == 0);
    for (round = 0; round < rounds; round++) {
        cualloc_pool_t *pool = 0;
        void *graph;
        uint64_t output, number, shared, theirs;
        EXPECT(CUALLOC_OK, cualloc_pool_create(gpu, &pool));
        EXPECT(CUALLOC_OK, cualloc_pool_enter(shared_pool, &scope, &shared));
        theirs = __atomic_exchange_n(&shared_scopes[round % THREADS], shared, __ATOMIC_SEQ_CST);
        number = entered(pool, CUALLOC_SCOPE_NEXT_CAPTURE);
        graph = captured(stream, &output);
        EXPECT(CUALLOC_OK, cualloc_pool_leave(pool, number));
        CHECK(holds(pool).leases == 1 && holds(pool).blocks == 1);
        if (theirs != 0) EXPECT(CUALLOC_OK, cualloc_pool_leave(shared_pool, theirs));
        EXPECT(CUALLOC_OK, cualloc_free(gpu, output));
        CHECK(destroy_graph(graph) == 0);
        if (round % 2 == 0) EXPECT(CUALLOC_OK, cualloc_pool_release(pool));
    }
    EXPECT(CUALLOC_OK, cualloc_retire_stream(gpu, stream));
    CHECK(destroy_stream(stream) == 0);
    return 0;
}

static void other_threads(void) {
    pthread_t threads[THREADS];
    int i;
    EXPECT(CUALLOC_OK, cualloc_pool_create(gpu, &shared_pool));
    for (i = 0; i < THREADS; i++) CHECK(pthread_create(&threads[i], 0, captures, 0) == 0);
    for (i = 0; i < THREADS; i++) CHECK(pthread_join(threads[i], 0) == 0);
    EXPECT(CUALLOC_OK, cualloc_pool_release(shared_pool));
    CHECK(told == THREADS * rounds);
    EXPECT(CUALLOC_OK, cualloc_check(gpu));
}

/* When a scope was left no thread is in its predicate, so what it looks at may go. */
static int alive, stop;

static bool looks(void *data, void *stream) {
    (void)stream;
    CHECK(__atomic_load_n((int *)data, __ATOMIC_SEQ_CST));
    CHECK(__atomic_load_n((int *)data, __ATOMIC_SEQ_CST));
    return false;
}

static void *requests(void *stream) {
    CHECK(set_context(context) == 0);
    while (!__atomic_load_n(&stop, __ATOMIC_SEQ_CST)) {
        uint64_t at;
        EXPECT(CUALLOC_OK, cualloc_alloc(gpu, 4096, stream, &at));
        EXPECT(CUALLOC_OK, cualloc_free(gpu, at));
    }
    return 0;
}

static void a_predicate_that_was_left_is_not_entered(void *stream) {
    pthread_t threads[THREADS];
    cualloc_scope_t scope = scope_of(CUALLOC_SCOPE_WHEN);
    int i, round;
    scope.when = looks;
    scope.data = &alive;
    EXPECT(CUALLOC_OK, cualloc_pool_create(gpu, &shared_pool));
    for (i = 0; i < THREADS; i++) CHECK(pthread_create(&threads[i], 0, requests, stream) == 0);
    for (round = 0; round < 20 * rounds; round++) {
        uint64_t number;
        __atomic_store_n(&alive, 1, __ATOMIC_SEQ_CST);
        EXPECT(CUALLOC_OK, cualloc_pool_enter(shared_pool, &scope, &number));
        requested_and_freed(stream);
        EXPECT(CUALLOC_OK, cualloc_pool_leave(shared_pool, number));
        __atomic_store_n(&alive, 0, __ATOMIC_SEQ_CST);
    }
    __atomic_store_n(&stop, 1, __ATOMIC_SEQ_CST);
    for (i = 0; i < THREADS; i++) CHECK(pthread_join(threads[i], 0) == 0);
    EXPECT(CUALLOC_OK, cualloc_pool_release(shared_pool));
}

/* Pools and scopes that are left over end with the allocator. */
static void ends_with_its_allocator(void) {
    cualloc_pool_t *pool = 0;
    cualloc_scope_t scope = scope_of(CUALLOC_SCOPE_WHEN);
    uint64_t number;
    int ended = 0;
    scope.when = never;
    scope.done = count;
    scope.data = &ended;
    EXPECT(CUALLOC_OK, cualloc_pool_create(gpu, &pool));
    EXPECT(CUALLOC_OK, cualloc_pool_enter(pool, &scope, &number));
    EXPECT(CUALLOC_OK, cualloc_destroy(gpu));
    CHECK(ended == 1);
    no_pool(pool, CUALLOC_CLOSED);
    EXPECT(CUALLOC_CLOSED, cualloc_pool_create(gpu, &pool));
}

int main(int argc, char **argv) {
    cualloc_options_t *options = cualloc_options_new();
    cualloc_t *classic = 0;
    cualloc_pool_t *none = (cualloc_pool_t *)1;
    void *stream, *other;
    if (argc > 1) rounds = atoi(argv[1]);
    start();
    CHECK(create_stream(&stream, 1) == 0 && create_stream(&other, 1) == 0);
    EXPECT(CUALLOC_OK, cualloc_options_set(options, "policy", "classic"));
    EXPECT(CUALLOC_OK, cualloc_create_in(0, options, &classic));
    NOTHING(CUALLOC_UNSUPPORTED, cualloc_pool_create(classic, &none), none);
    EXPECT(CUALLOC_OK, cualloc_destroy(classic));
    cualloc_options_free(options);
    a_graph_keeps_its_memory(stream);
    graphs_share_a_pool(stream, other);
    scopes_by_capture_stream_and_thread(stream, other);
    scopes_by_predicate(stream, other);
    wrong_arguments();
    other_threads();
    a_predicate_that_was_left_is_not_entered(other);
    EXPECT(CUALLOC_OK, cualloc_retire_stream(gpu, stream));
    EXPECT(CUALLOC_OK, cualloc_retire_stream(gpu, other));
    CHECK(destroy_stream(stream) == 0 && destroy_stream(other) == 0);
    ends_with_its_allocator();
    puts("well");
    return 0;
}
