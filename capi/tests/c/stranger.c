/* A program that has the header alone and tests all of it: every function with null, foreign, freed,
 * stale and huge arguments, from 8 threads, of which half have no current context. First what the header says of each
 * of them, to the code; then chance.
 *
 * The driver is that of this machine, or what CUALLOC_DRIVER names. Arguments: rounds, and the seed of the first thread. */
#include "common.h"
#include "load.h"

#include <pthread.h>
#include <stdbool.h>

enum { THREADS = 8, BLOCKS = 24, LONG_TEXT = 1 << 20 };

static int (*current_context)(void **);
static int (*set_context)(void *);
static int (*create_stream)(void **, unsigned);
static int (*destroy_stream)(void *);
static int (*create_context)(void **, unsigned, int);
static int (*destroy_context)(void *);

static void *context;
/* One for all threads, one that was destroyed, and what else may be taken for an allocator. */
static cualloc_t *common, *stale;
static cualloc_options_t *stale_options, *live_options;
static cualloc_pool_t *stale_pool, *live_pool;
static char text[LONG_TEXT + 1];
static const char no_utf8[] = "\xff\xfe";
static int rounds = 30;
static unsigned seed = 1;

static void start(void) {
    void *driver = the_driver();
    int (*init)(unsigned), (*retain)(void **, int);
    find(driver, "cuInit", &init);
    find(driver, "cuDevicePrimaryCtxRetain", &retain);
    find(driver, "cuCtxGetCurrent", &current_context);
    find(driver, "cuCtxSetCurrent", &set_context);
    find(driver, "cuStreamCreate", &create_stream);
    find(driver, "cuStreamDestroy_v2", &destroy_stream);
    find(driver, "cuCtxCreate_v2", &create_context);
    find(driver, "cuCtxDestroy_v2", &destroy_context);
    CHECK(init(0) == 0 && retain(&context, 0) == 0);
}

/* What holds after every call, whatever it was asked. */
static int32_t sound(int32_t code) {
    const char *said = cualloc_last_error();
    CHECK(code >= CUALLOC_OK && code <= CUALLOC_IO && code != CUALLOC_PANIC);
    CHECK(said != 0 && strlen(said) <= 4095);
    if (code != CUALLOC_OK) CHECK(cualloc_last_code() == code && said[0] != 0);
    return code;
}

static void keeps_context(void *before) {
    void *after = (void *)1;
    CHECK(current_context(&after) == 0 && after == before);
}

#define IS(code, call) EXPECT(code, sound(call))
#define REFUSED(code, call, out) NOTHING(code, sound(call), out)

/* ---- what the header says ------------------------------------------------------------------------------------- */

static void functions_of_an_allocator(cualloc_t *handle, int32_t code) {
    static const int32_t selects[] = {CUALLOC_SELECT_ALL, CUALLOC_SELECT_POOL, CUALLOC_SELECT_TAG};
    uint64_t out = 7, other = 7;
    cualloc_pool_t *pool = (cualloc_pool_t *)7;
    cualloc_stats_t figures;
    size_t i;
    memset(&figures, 7, sizeof figures);
    figures.struct_size = sizeof figures;
    REFUSED(code, cualloc_alloc(handle, SIZE_MAX, 0, &out), out);
    REFUSED(code, cualloc_alloc_aligned(handle, 1, SIZE_MAX, 0, &out), out);
    IS(code, cualloc_free(handle, UINT64_MAX));
    IS(code, cualloc_free_on(handle, UINT64_MAX, 0));
    IS(code, cualloc_record_stream(handle, UINT64_MAX, 0));
    IS(code, cualloc_adopt_stream(handle, 0));
    IS(code, cualloc_retire_stream(handle, 0));
    IS(code, cualloc_stream_synchronize(handle, 0));
    IS(code, cualloc_make_current(handle));
    REFUSED(code, cualloc_usable_size(handle, 1, &out), out);
    out = 7;
    IS(code, cualloc_base(handle, 1, &out, &other));
    CHECK(out == 0 && other == 0);
    out = other = 7;
    IS(code, cualloc_trim(handle, UINT64_MAX, &out, &other));
    CHECK(out == 0 && other == 0);
    out = other = 7;
    IS(code, cualloc_empty_cache(handle, &out, &other));
    CHECK(out == 0 && other == 0);
    IS(code, cualloc_trim(handle, 0, 0, 0));
    IS(code, cualloc_empty_cache(handle, 0, 0));
    IS(code, cualloc_set_limit(handle, 0));
    IS(code, cualloc_reset_peaks(handle));
    IS(code, cualloc_check(handle));
    IS(code, cualloc_stats(handle, &figures));
    CHECK(figures.struct_size == sizeof figures && figures.hits == 0 && figures.graph_pools == 0);
    REFUSED(code, cualloc_pool_create(handle, &pool), pool);
    REFUSED(code, cualloc_pool_create_tagged(handle, "tag", &pool), pool);
    for (i = 0; i < sizeof selects / sizeof *selects; i++) {
        REFUSED(code, cualloc_suspend(handle, selects[i], 0, CUALLOC_CONTENTS_DROP, &out), out);
        REFUSED(code, cualloc_resume(handle, selects[i], 0, &out), out);
    }
    IS(code, cualloc_destroy(handle));
}

static bool yes(void *data, void *stream) {
    (void)data;
    (void)stream;
    return true;
}

static void functions_of_a_pool(cualloc_pool_t *pool, int32_t code) {
    cualloc_scope_t which;
    cualloc_footprint_t held;
    uint64_t scope;
    int32_t kind;
    for (kind = CUALLOC_SCOPE_CAPTURE; kind <= CUALLOC_SCOPE_THREAD; kind++) {
        which = scope_of(kind);
        which.when = kind == CUALLOC_SCOPE_WHEN ? yes : 0;
        REFUSED(code, cualloc_pool_enter(pool, &which, &scope), scope);
    }
    IS(code, cualloc_pool_leave(pool, 1));
    IS(code, cualloc_pool_leave(pool, UINT64_MAX));
    IS(code, cualloc_pool_release(pool));
    memset(&held, 7, sizeof held);
    held.struct_size = sizeof held;
    IS(code, cualloc_pool_footprint(pool, &held));
    CHECK(held.live == 0 && held.leases == 0);
    IS(pool == 0 ? CUALLOC_INVALID_ARGUMENT : code, cualloc_pool_retain(pool, (void *)context));
}

static void wrong_handles(void) {
    char foreign[64];
    uintptr_t near = (uintptr_t)common;
    void *closed[] = {stale,          stale_options, stale_pool,         live_pool,           live_options, foreign,
                      (void *)1,      (void *)8,     (void *)UINTPTR_MAX, (void *)(near + 1), (void *)(near - 1),
                      (void *)~near, (void *)(near ^ ((uintptr_t)1 << 63))};
    size_t i;
    memset(foreign, 0, sizeof foreign);
    functions_of_an_allocator(0, CUALLOC_INVALID_ARGUMENT);
    functions_of_a_pool(0, CUALLOC_INVALID_ARGUMENT);
    for (i = 0; i < sizeof closed / sizeof *closed; i++) {
        cualloc_t *made = (cualloc_t *)7;
        functions_of_an_allocator((cualloc_t *)closed[i], CUALLOC_CLOSED);
        if (closed[i] != (void *)live_pool) functions_of_a_pool((cualloc_pool_t *)closed[i], CUALLOC_CLOSED);
        if (closed[i] == (void *)live_options) continue;
        IS(CUALLOC_CLOSED, cualloc_options_set((cualloc_options_t *)closed[i], "limit", "1G"));
        cualloc_options_free((cualloc_options_t *)closed[i]);
        REFUSED(CUALLOC_CLOSED, cualloc_create(0, (cualloc_options_t *)closed[i], &made), made);
        REFUSED(CUALLOC_CLOSED, cualloc_create_in(context, (cualloc_options_t *)closed[i], &made), made);
    }
    cualloc_options_free(0);
    IS(CUALLOC_INVALID_ARGUMENT, cualloc_options_set(0, "limit", "1G"));
    /* They are unharmed. */
    IS(CUALLOC_OK, cualloc_options_set(live_options, "limit", "1G"));
    IS(CUALLOC_OK, cualloc_check(common));
}

static void nowhere_to_write(cualloc_t *own, cualloc_pool_t *pool) {
    static const size_t small[] = {0, 1, sizeof(size_t) - 1};
    cualloc_scope_t which = scope_of(CUALLOC_SCOPE_THREAD);
    cualloc_stats_t figures;
    cualloc_footprint_t held;
    uint64_t out = 7;
    size_t i;
    IS(CUALLOC_INVALID_ARGUMENT, cualloc_create(0, 0, 0));
    IS(CUALLOC_INVALID_ARGUMENT, cualloc_create_in(context, 0, 0));
    IS(CUALLOC_INVALID_ARGUMENT, cualloc_shared(0, 0));
    IS(CUALLOC_INVALID_ARGUMENT, cualloc_alloc(own, 1, 0, 0));
    IS(CUALLOC_INVALID_ARGUMENT, cualloc_alloc_aligned(own, 1, 1, 0, 0));
    IS(CUALLOC_INVALID_ARGUMENT, cualloc_usable_size(own, 1, 0));
    IS(CUALLOC_INVALID_ARGUMENT, cualloc_base(own, 1, 0, 0));
    REFUSED(CUALLOC_INVALID_ARGUMENT, cualloc_base(own, 1, 0, &out), out);
    IS(CUALLOC_INVALID_ARGUMENT, cualloc_stats(own, 0));
    IS(CUALLOC_INVALID_ARGUMENT, cualloc_pool_create(own, 0));
    IS(CUALLOC_INVALID_ARGUMENT, cualloc_pool_create_tagged(own, "tag", 0));
    IS(CUALLOC_INVALID_ARGUMENT, cualloc_pool_enter(pool, 0, &out));
    IS(CUALLOC_INVALID_ARGUMENT, cualloc_pool_enter(pool, &which, 0));
    IS(CUALLOC_INVALID_ARGUMENT, cualloc_pool_footprint(pool, 0));
    IS(CUALLOC_INVALID_ARGUMENT, cualloc_pool_retain(pool, 0));
    IS(CUALLOC_INVALID_ARGUMENT, cualloc_suspend(own, CUALLOC_SELECT_ALL, 0, CUALLOC_CONTENTS_DROP, 0));
    IS(CUALLOC_INVALID_ARGUMENT, cualloc_resume(own, CUALLOC_SELECT_ALL, 0, 0));
    for (i = 0; i < sizeof small / sizeof *small; i++) {
        memset(&figures, 7, sizeof figures);
        memset(&held, 7, sizeof held);
        figures.struct_size = held.struct_size = which.struct_size = small[i];
        IS(CUALLOC_INVALID_ARGUMENT, cualloc_stats(own, &figures));
        IS(CUALLOC_INVALID_ARGUMENT, cualloc_pool_footprint(pool, &held));
        IS(CUALLOC_INVALID_ARGUMENT, cualloc_pool_enter(pool, &which, &out));
        /* There is no place that it could have written to. */
        CHECK(figures.hits == UINT64_C(0x0707070707070707) && held.live == UINT64_C(0x0707070707070707));
    }
}

static void structures_of_other_versions(cualloc_t *own) {
    struct {
        cualloc_stats_t known;
        unsigned char more[256];
    } larger;
    struct {
        size_t struct_size;
        cualloc_counter_t requested;
        unsigned char behind[sizeof(cualloc_stats_t)];
    } smaller;
    size_t i;
    memset(&larger, 7, sizeof larger);
    memset(&smaller, 7, sizeof smaller);
    larger.known.struct_size = sizeof larger;
    smaller.struct_size = sizeof smaller.struct_size + sizeof smaller.requested + 3;
    IS(CUALLOC_OK, cualloc_stats(own, &larger.known));
    IS(CUALLOC_OK, cualloc_stats(own, (cualloc_stats_t *)(void *)&smaller));
    CHECK(larger.known.limit == UINT64_MAX && smaller.requested.current == larger.known.requested.current);
    for (i = 0; i < sizeof larger.more; i++) CHECK(larger.more[i] == 7);
    for (i = 3; i < sizeof smaller.behind; i++) CHECK(smaller.behind[i] == 7);
}

static void sizes_and_addresses(cualloc_t *own, void *stream) {
    static const size_t sizes[] = {0, SIZE_MAX, SIZE_MAX - 1, SIZE_MAX - 511, SIZE_MAX / 2, SIZE_MAX / 2 + 1};
    static const size_t wrong[] = {0, 3, 511, 513, (size_t)1 << 22, (size_t)1 << 63, SIZE_MAX};
    static const uint64_t foreign[] = {1, 512, 4095, UINT64_MAX, (uint64_t)1 << 63, UINT64_MAX - 511};
    uint64_t block, out = 7, bytes;
    size_t i, alignment;
    for (i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        REFUSED(CUALLOC_INVALID_ARGUMENT, cualloc_alloc(own, sizes[i], stream, &out), out);
        REFUSED(CUALLOC_INVALID_ARGUMENT, cualloc_alloc_aligned(own, sizes[i], 1 << 21, stream, &out), out);
    }
    for (i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        REFUSED(CUALLOC_INVALID_ARGUMENT, cualloc_alloc_aligned(own, 1, wrong[i], stream, &out), out);
    }
    for (i = 0; i < sizeof foreign / sizeof *foreign; i++) {
        IS(CUALLOC_NOT_OURS, cualloc_free(own, foreign[i]));
        IS(CUALLOC_NOT_OURS, cualloc_free_on(own, foreign[i], 0));
        IS(CUALLOC_NOT_OURS, cualloc_record_stream(own, foreign[i], 0));
        REFUSED(CUALLOC_NOT_OURS, cualloc_usable_size(own, foreign[i], &out), out);
        REFUSED(CUALLOC_NOT_OURS, cualloc_base(own, foreign[i], &bytes, &out), out);
    }
    IS(CUALLOC_NOT_OURS, cualloc_record_stream(own, 0, 0));
    for (alignment = 1; alignment <= (size_t)1 << 21; alignment <<= 1) {
        IS(CUALLOC_OK, cualloc_alloc_aligned(own, 1, alignment, stream, &out));
        CHECK(out != 0 && out % alignment == 0);
        IS(CUALLOC_OK, cualloc_free(own, out));
    }
    REFUSED(CUALLOC_OUT_OF_MEMORY, cualloc_alloc(own, (size_t)1 << 40, stream, &out), out);
    IS(CUALLOC_OK, cualloc_alloc(own, 100000, stream, &block));
    CHECK(block % 512 == 0);
    IS(CUALLOC_OK, cualloc_base(own, block + 99999, &out, &bytes));
    CHECK(out == block && bytes >= 100000);
    IS(CUALLOC_OK, cualloc_record_stream(own, block + 1, stream));
    IS(CUALLOC_NOT_LIVE, cualloc_free(own, block + 512));
    REFUSED(CUALLOC_NOT_LIVE, cualloc_usable_size(own, block + 512, &out), out);
    IS(CUALLOC_NOT_OURS, cualloc_free(common, block));
    IS(CUALLOC_NOT_OURS, cualloc_free_on(common, block, 0));
    IS(CUALLOC_NOT_OURS, cualloc_record_stream(common, block, 0));
    IS(CUALLOC_NOT_OURS, cualloc_free(own, (uintptr_t)&block));
    IS(CUALLOC_BUSY, cualloc_destroy(own));
    IS(CUALLOC_OK, cualloc_free_on(own, block, stream));
    IS(CUALLOC_NOT_LIVE, cualloc_free(own, block));
    IS(CUALLOC_NOT_LIVE, cualloc_free_on(own, block, stream));
    IS(CUALLOC_NOT_LIVE, cualloc_record_stream(own, block, stream));
    IS(CUALLOC_NOT_LIVE, cualloc_base(own, block, &out, &bytes));
    CHECK(out == 0 && bytes == 0);
    IS(CUALLOC_OK, cualloc_free(own, 0));
    IS(CUALLOC_UNSUPPORTED, cualloc_adopt_stream(own, (void *)2));
}

static void settings(void) {
    static const char *const pairs[][2] = {
        {"", ""},           {"limit", ""},         {"limit", "-1"},      {"limit", "18446744073709551616"}, {"limit", "1Q"},
        {"limit", "101%"}, {"policy", "nonsense"}, {"Limit", "1G"},     {"li mit", "1G"},                  {"device", "tpu"},
        {"peers", "1+"},   {"tune.views", "on,off"},   {"tune.views=on", "off"}, {"decay", "forever"},             {"debug", "guard+"},
        {no_utf8, "1"},    {"limit", no_utf8},    {text, "1"},         {"limit", text},                   {"tune.handle", "0"}};
    size_t i;
    cualloc_options_t *options = cualloc_options_new();
    cualloc_t *made = (cualloc_t *)7;
    CHECK(options != 0);
    for (i = 0; i < sizeof pairs / sizeof *pairs; i++)
        IS(CUALLOC_INVALID_ARGUMENT, cualloc_options_set(options, pairs[i][0], pairs[i][1]));
    IS(CUALLOC_INVALID_ARGUMENT, cualloc_options_set(options, 0, "1"));
    IS(CUALLOC_INVALID_ARGUMENT, cualloc_options_set(options, "limit", 0));
    IS(CUALLOC_OK, cualloc_options_set(options, "policy", "classic"));
    IS(CUALLOC_OK, cualloc_options_set(options, "peers", "1"));
    REFUSED(CUALLOC_INVALID_ARGUMENT, cualloc_create_in(context, options, &made), made);
    cualloc_options_free(options);
    cualloc_options_free(options);
    IS(CUALLOC_CLOSED, cualloc_options_set(options, "limit", "1G"));
}

static void devices(void) {
    static const int32_t bad[] = {-1, 128, INT32_MAX, INT32_MIN};
    uint64_t bytes;
    size_t i;
    for (i = 0; i < sizeof bad / sizeof *bad; i++) {
        cualloc_t *made = (cualloc_t *)7;
        cualloc_torch_pool_id_t id = {UINT64_MAX, (uint64_t)i};
        REFUSED(CUALLOC_INVALID_ARGUMENT, cualloc_create(bad[i], 0, &made), made);
        made = (cualloc_t *)7;
        IS(CUALLOC_INVALID_ARGUMENT, cualloc_shared(bad[i], &made));
        CHECK(made == 0 && cualloc_shared_made(bad[i]) == 0);
        CHECK(cualloc_torch_alloc(1, bad[i], 0) == 0 && cualloc_last_code() == CUALLOC_INVALID_ARGUMENT);
        IS(CUALLOC_INVALID_ARGUMENT, cualloc_torch_fraction(0.5, bad[i]));
        IS(CUALLOC_INVALID_ARGUMENT, cualloc_torch_pool_begin(bad[i], id, yes, 0, 0));
        IS(CUALLOC_OK, cualloc_torch_pool_end(bad[i], id));
        IS(CUALLOC_OK, cualloc_torch_pool_release(bad[i], id));
        CHECK(cualloc_torch_pool(bad[i], id) == 0);
        cualloc_torch_free((void *)512, SIZE_MAX, bad[i], 0);
        cualloc_torch_init(bad[i]);
    }
    bytes = 0;
    CHECK(cualloc_torch_alloc(0, 0, 0) == 0);
    CHECK(cualloc_torch_alloc(SIZE_MAX, 0, 0) == 0 && cualloc_last_code() == CUALLOC_OUT_OF_MEMORY);
    cualloc_torch_free(0, 0, 0, 0);
    cualloc_torch_free((void *)UINTPTR_MAX, SIZE_MAX, 0, 0);
    CHECK(cualloc_torch_base((void *)UINTPTR_MAX, 0) == (void *)UINTPTR_MAX);
    CHECK(cualloc_torch_base(0, (size_t *)&bytes) == 0 && bytes == 0);
    IS(CUALLOC_OK, cualloc_torch_record_stream(0, 0));
    IS(CUALLOC_OK, cualloc_torch_record_stream((void *)UINTPTR_MAX, 0));
    IS(CUALLOC_INVALID_ARGUMENT, cualloc_torch_fraction(-1e300, 0));
    IS(CUALLOC_INVALID_ARGUMENT, cualloc_torch_fraction(strtod("nan", 0), 0));
    IS(CUALLOC_INVALID_ARGUMENT, cualloc_torch_fraction(strtod("inf", 0), 0));
    IS(CUALLOC_OK, cualloc_torch_pool_abandon(0, 0));
    IS(CUALLOC_OK, cualloc_torch_pool_abandon(UINT64_MAX, 0));
    IS(CUALLOC_NOT_LIVE, cualloc_torch_pool_name(0, 0, 0));
    CHECK(cualloc_torch_pool_state(UINT64_MAX, 0) == CUALLOC_TORCH_POOL_ENDED);
    CHECK(cualloc_torch_pool_newest() == 0 && cualloc_torch_pool_releases() > 0);
}

/* ---- pools and their callbacks ---------------------------------------------------------------------------------- */

struct asked {
    cualloc_t *own;
    cualloc_pool_t *pool;
    int asked, done;
};

/* Calls back into the library with everything that it should not. */
static bool meddles(void *data, void *stream) {
    struct asked *asked = data;
    cualloc_scope_t which = scope_of(CUALLOC_SCOPE_WHEN);
    uint64_t out = 7;
    (void)stream;
    asked->asked++;
    which.when = yes;
    REFUSED(CUALLOC_BUSY, cualloc_pool_enter(asked->pool, &which, &out), out);
    IS(CUALLOC_BUSY, cualloc_destroy(asked->own));
    REFUSED(CUALLOC_BUSY, cualloc_alloc(asked->own, 700, 0, &out), out);
    IS(CUALLOC_OK, cualloc_check(asked->own));
    return true;
}

static void is_done(void *data) { ((struct asked *)data)->done++; }

static void pools(cualloc_t *own, cualloc_pool_t *other, void *stream) {
    static const int32_t kinds[] = {0, 6, -1, INT32_MAX, INT32_MIN};
    struct asked asked = {own, 0, 0, 0};
    cualloc_scope_t which;
    cualloc_footprint_t held;
    uint64_t scope, again, block;
    size_t i;
    REFUSED(CUALLOC_INVALID_ARGUMENT, cualloc_pool_create_tagged(own, 0, &asked.pool), asked.pool);
    IS(CUALLOC_INVALID_ARGUMENT, cualloc_pool_create_tagged(own, no_utf8, &asked.pool));
    IS(CUALLOC_OK, cualloc_pool_create_tagged(own, "a;b", &asked.pool));
    for (i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        which = scope_of(kinds[i]);
        REFUSED(CUALLOC_INVALID_ARGUMENT, cualloc_pool_enter(asked.pool, &which, &scope), scope);
    }
    which.kind = CUALLOC_SCOPE_WHEN;
    which.done = is_done;
    which.data = &asked;
    IS(CUALLOC_INVALID_ARGUMENT, cualloc_pool_enter(asked.pool, &which, &scope));
    CHECK(asked.done == 0);
    which.when = meddles;
    IS(CUALLOC_OK, cualloc_pool_enter(asked.pool, &which, &scope));
    IS(CUALLOC_OK, cualloc_alloc(own, 3 << 20, stream, &block));
    CHECK(asked.asked > 0 && asked.done == 0);
    held.struct_size = sizeof held;
    IS(CUALLOC_OK, cualloc_pool_footprint(asked.pool, &held));
    CHECK(held.blocks == 1 && held.live >= 3 << 20 && held.physical >= held.live);
    IS(CUALLOC_INVALID_ARGUMENT, cualloc_pool_leave(other, scope));
    IS(CUALLOC_INVALID_ARGUMENT, cualloc_pool_leave(asked.pool, scope + 1000000));
    IS(CUALLOC_OK, cualloc_pool_leave(asked.pool, scope));
    CHECK(asked.done == 1);
    IS(CUALLOC_INVALID_ARGUMENT, cualloc_pool_leave(asked.pool, scope));
    /* A scope that is never left, and suspended memory. */
    IS(CUALLOC_OK, cualloc_pool_enter(asked.pool, &which, &again));
    CHECK(again != scope);
    IS(CUALLOC_INVALID_ARGUMENT, cualloc_suspend(own, -1, 0, 0, &again));
    IS(CUALLOC_INVALID_ARGUMENT, cualloc_suspend(own, 4, 0, 0, &again));
    IS(CUALLOC_INVALID_ARGUMENT, cualloc_suspend(own, CUALLOC_SELECT_ALL, 0, 3, &again));
    IS(CUALLOC_INVALID_ARGUMENT, cualloc_suspend(own, CUALLOC_SELECT_TAG, 0, 0, &again));
    IS(CUALLOC_INVALID_ARGUMENT, cualloc_suspend(own, CUALLOC_SELECT_TAG, (void *)(uintptr_t)"b", 0, &again));
    IS(CUALLOC_INVALID_ARGUMENT, cualloc_suspend(own, CUALLOC_SELECT_POOL, live_pool, 0, &again));
    IS(CUALLOC_SUSPENDED, cualloc_resume(own, CUALLOC_SELECT_POOL, asked.pool, &again));
    IS(CUALLOC_OK, cualloc_suspend(own, CUALLOC_SELECT_POOL, asked.pool, CUALLOC_CONTENTS_HOST, &again));
    CHECK(again >= 3 << 20);
    REFUSED(CUALLOC_SUSPENDED, cualloc_suspend(own, CUALLOC_SELECT_TAG, (void *)(uintptr_t)"a;b", 0, &again), again);
    IS(CUALLOC_OK, cualloc_resume(own, CUALLOC_SELECT_TAG, (void *)(uintptr_t)"a;b", &again));
    IS(CUALLOC_OK, cualloc_pool_release(asked.pool));
    CHECK(asked.done == 2);
    functions_of_a_pool(asked.pool, CUALLOC_CLOSED);
    IS(CUALLOC_OK, cualloc_free(own, block));
}

/* ---- a context that dies ---------------------------------------------------------------------------------------- */

static void a_dead_context(void *before) {
    cualloc_t *own;
    cualloc_pool_t *pool;
    cualloc_stats_t figures;
    void *doomed;
    uint64_t block, out = 7, other = 7;
    CHECK(create_context(&doomed, 0, 0) == 0);
    IS(CUALLOC_OK, cualloc_create_in(0, 0, &own));
    IS(CUALLOC_OK, cualloc_pool_create(own, &pool));
    IS(CUALLOC_OK, cualloc_alloc(own, 5000, 0, &block));
    CHECK(destroy_context(doomed) == 0 && set_context(before) == 0);
    REFUSED(CUALLOC_CONTEXT_LOST, cualloc_alloc(own, 64 << 20, 0, &out), out);
    IS(CUALLOC_CONTEXT_LOST, cualloc_alloc_aligned(own, 1, 1, 0, &out));
    IS(CUALLOC_CONTEXT_LOST, cualloc_free(own, block));
    IS(CUALLOC_CONTEXT_LOST, cualloc_free_on(own, block, 0));
    IS(CUALLOC_CONTEXT_LOST, cualloc_record_stream(own, block, 0));
    IS(CUALLOC_CONTEXT_LOST, cualloc_trim(own, 0, &out, &other));
    IS(CUALLOC_CONTEXT_LOST, cualloc_empty_cache(own, &out, &other));
    IS(CUALLOC_CONTEXT_LOST, cualloc_suspend(own, CUALLOC_SELECT_ALL, 0, CUALLOC_CONTENTS_DROP, &out));
    CHECK(out == 0 && other == 0);
    figures.struct_size = sizeof figures;
    IS(CUALLOC_OK, cualloc_stats(own, &figures));
    sound(cualloc_pool_release(pool));
    IS(CUALLOC_CONTEXT_LOST, cualloc_destroy(own));
    functions_of_an_allocator(own, CUALLOC_CLOSED);
    functions_of_a_pool(pool, CUALLOC_CLOSED);
}

/* ---- chance ------------------------------------------------------------------------------------------------------- */

static uint64_t next(uint64_t *state) {
    *state = *state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return *state >> 33;
}

/* What is allocated from the common allocator beside the others, with every other function between. */
static void storm(uint64_t *state, void *stream) {
    uint64_t blocks[BLOCKS] = {0}, sizes[BLOCKS] = {0}, out, other;
    cualloc_stats_t figures;
    cualloc_t *made;
    int turn, at;
    for (turn = 0; turn < 40 * BLOCKS; turn++) {
        at = (int)(next(state) % BLOCKS);
        if (blocks[at] == 0) {
            sizes[at] = next(state) % (next(state) % 8 == 0 ? 9000000 : 9000) + 1;
            if (next(state) % 2)
                IS(CUALLOC_OK, cualloc_alloc(common, sizes[at], stream, &blocks[at]));
            else
                IS(CUALLOC_OK, cualloc_alloc_aligned(common, sizes[at], (size_t)1 << next(state) % 16, 0, &blocks[at]));
            IS(CUALLOC_OK, cualloc_usable_size(common, blocks[at], &out));
            CHECK(out >= sizes[at]);
            continue;
        }
        IS(CUALLOC_OK, cualloc_base(common, blocks[at] + next(state) % sizes[at], &out, &other));
        CHECK(out == blocks[at] && other >= sizes[at]);
        switch (next(state) % 10) {
        case 0: sound(cualloc_trim(common, next(state) << 10, &out, 0)); break;
        case 1: sound(cualloc_empty_cache(common, 0, &other)); break;
        case 2: IS(CUALLOC_OK, cualloc_record_stream(common, blocks[at] + sizes[at] - 1, stream)); break;
        case 3: IS(CUALLOC_OK, cualloc_reset_peaks(common)); break;
        case 4:
            figures.struct_size = sizeof figures;
            IS(CUALLOC_OK, cualloc_stats(common, &figures));
            CHECK(figures.blocks.current > 0 && figures.allocated.current >= sizes[at]);
            break;
        case 5: IS(CUALLOC_INVALID_ARGUMENT, cualloc_alloc(common, SIZE_MAX - next(state) % 4096, stream, &out)); break;
        case 6: CHECK(cualloc_context(next(state) % 2 ? text : "storm;turn") != 0 && cualloc_context(no_utf8) == 0); break;
        case 7: cualloc_set_context(cualloc_set_context((uint32_t)next(state))); break;
        case 8: IS(CUALLOC_NOT_OURS, cualloc_free(common, next(state) % 4096 + 1)); break;
        default:
            REFUSED(CUALLOC_INVALID_ARGUMENT, cualloc_create(INT32_MAX - (int32_t)(next(state) % 1000), 0, &made), made);
        }
        if (next(state) % 2) {
            IS(CUALLOC_OK, next(state) % 2 ? cualloc_free_on(common, blocks[at], stream) : cualloc_free(common, blocks[at]));
            blocks[at] = 0;
        }
    }
    for (at = 0; at < BLOCKS; at++) IS(CUALLOC_OK, cualloc_free(common, blocks[at]));
}

static void *thread(void *which) {
    uint64_t state = seed + (uintptr_t)which;
    void *before = (uintptr_t)which % 2 ? context : 0, *stream;
    cualloc_pool_t *pool;
    cualloc_t *own;
    int round;
    CHECK(set_context(context) == 0 && create_stream(&stream, 1) == 0 && set_context(before) == 0);
    CHECK(cualloc_last_error()[0] == 0 && cualloc_last_code() == CUALLOC_OK);
    if (before == 0) {
        REFUSED(CUALLOC_INVALID_ARGUMENT, cualloc_create_in(0, 0, &own), own);
    }
    for (round = 0; round < rounds; round++) {
        IS(CUALLOC_OK, cualloc_create_in(context, 0, &own));
        IS(CUALLOC_OK, cualloc_pool_create(own, &pool));
        wrong_handles();
        nowhere_to_write(own, pool);
        structures_of_other_versions(own);
        sizes_and_addresses(own, stream);
        settings();
        devices();
        pools(own, pool, stream);
        keeps_context(before);
        if (round % 8 == 0) a_dead_context(before);
        storm(&state, stream);
        IS(CUALLOC_OK, cualloc_check(own));
        IS(CUALLOC_OK, cualloc_retire_stream(own, stream));
        IS(CUALLOC_OK, cualloc_destroy(own));
        functions_of_an_allocator(own, CUALLOC_CLOSED);
        functions_of_a_pool(pool, CUALLOC_CLOSED);
        keeps_context(before);
    }
    IS(CUALLOC_OK, cualloc_retire_stream(common, stream));
    CHECK(set_context(context) == 0 && destroy_stream(stream) == 0);
    return 0;
}

int main(int argc, char **argv) {
    pthread_t threads[THREADS];
    cualloc_pool_t *pool;
    cualloc_stats_t figures;
    uintptr_t i;
    if (argc > 1) rounds = atoi(argv[1]);
    if (argc > 2) seed = (unsigned)atoi(argv[2]);
    memset(text, 'x', LONG_TEXT);
    CHECK(cualloc_abi_version() >= CUALLOC_ABI_VERSION);
    start();
    IS(CUALLOC_OK, cualloc_create_in(context, 0, &stale));
    IS(CUALLOC_OK, cualloc_pool_create(stale, &stale_pool));
    IS(CUALLOC_OK, cualloc_destroy(stale));
    stale_options = cualloc_options_new();
    live_options = cualloc_options_new();
    cualloc_options_free(stale_options);
    IS(CUALLOC_OK, cualloc_create_in(context, 0, &common));
    IS(CUALLOC_OK, cualloc_pool_create(common, &live_pool));
    IS(CUALLOC_OK, cualloc_pool_create(common, &pool));
    for (i = 0; i < THREADS; i++) CHECK(pthread_create(&threads[i], 0, thread, (void *)i) == 0);
    for (i = 0; i < THREADS; i++) CHECK(pthread_join(threads[i], 0) == 0);
    IS(CUALLOC_OK, cualloc_check(common));
    figures.struct_size = sizeof figures;
    IS(CUALLOC_OK, cualloc_stats(common, &figures));
    CHECK(figures.blocks.current == 0 && figures.requested.current == 0 && figures.allocated.current == 0);
    cualloc_torch_reset();
    IS(CUALLOC_OK, cualloc_destroy(common));
    functions_of_a_pool(pool, CUALLOC_CLOSED);
    functions_of_a_pool(live_pool, CUALLOC_CLOSED);
    cualloc_options_free(live_options);
    puts("well");
    return 0;
}
