/* Errors for compute-sanitizer to find: `planted overrun`, `stale`, `leak`, or `clean`, which has none. In each the block
 * has the name "planted;weights". On a GPU alone: the driver is libcuda.so.1. */
#include "common.h"

#include <dlfcn.h>

typedef int (*one_fn)(unsigned);
typedef int (*retain_fn)(void **, int);
typedef int (*set_fn)(void *);
typedef int (*load_fn)(void **, const void *);
typedef int (*function_fn)(void **, void *, const char *);
typedef int (*launch_fn)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *,
                         void **, void **);
typedef int (*wait_fn)(void);

static const char KERNEL[] = ".version 7.0\n.target sm_70\n.address_size 64\n"
                             ".visible .entry write(.param .u64 at) {\n"
                             "  .reg .b64 %rd<2>; .reg .b16 %h<2>;\n"
                             "  ld.param.u64 %rd1, [at]; mov.u16 %h1, 7; st.global.u8 [%rd1], %h1; ret;\n}\n";

static void *driver;

/* ISO C has no conversion of an object's address to a function's. */
static void find(const char *name, void *function) {
    void *found = dlsym(driver, name);
    CHECK(found != 0);
    memcpy(function, &found, sizeof found);
}

int main(int argc, char **argv) {
    one_fn init;
    retain_fn retain;
    set_fn set;
    load_fn load;
    function_fn get;
    launch_fn launch;
    wait_fn wait;
    void *context, *module, *function, *arguments[1];
    cualloc_t *allocator;
    uint64_t ptr, other;
    int stale = argc > 1 && strcmp(argv[1], "stale") == 0, leak = argc > 1 && strcmp(argv[1], "leak") == 0;
    int overrun = argc > 1 && strcmp(argv[1], "overrun") == 0;
    CHECK(argc == 2);
    driver = dlopen("libcuda.so.1", RTLD_NOW);
    CHECK(driver != 0);
    find("cuInit", &init);
    find("cuDevicePrimaryCtxRetain", &retain);
    find("cuCtxSetCurrent", &set);
    find("cuModuleLoadData", &load);
    find("cuModuleGetFunction", &get);
    find("cuLaunchKernel", &launch);
    find("cuCtxSynchronize", &wait);
    CHECK(init(0) == 0 && retain(&context, 0) == 0 && set(context) == 0);
    CHECK(load(&module, KERNEL) == 0 && get(&function, module, "write") == 0);
    EXPECT(CUALLOC_OK, cualloc_create(0, 0, &allocator));
    cualloc_set_context(cualloc_context("planted;weights"));
    EXPECT(CUALLOC_OK, cualloc_alloc(allocator, 63, 0, &ptr));
    cualloc_set_context(0);
    EXPECT(CUALLOC_OK, cualloc_alloc(allocator, 1 << 20, 0, &other));
    if (stale) EXPECT(CUALLOC_OK, cualloc_free(allocator, ptr));
    if (overrun) ptr += 63;
    arguments[0] = &ptr;
    CHECK(launch(function, 1, 1, 1, 1, 1, 1, 0, 0, arguments, 0) == 0);
    printf("the kernel ended with %d\n", wait());
    if (overrun) ptr -= 63;
    if (!leak && !stale) cualloc_free(allocator, ptr);
    cualloc_free(allocator, other);
    if (!leak) cualloc_destroy(allocator);
    puts("ended well");
    return 0;
}
