/* Errors for compute-sanitizer to find: `planted overrun`, `stale`, `leak`, or `clean`, which has none. In each the block
 * has the name "planted;weights". On a GPU alone. */
#include "common.h"
#include "load.h"

static const char KERNEL[] = ".version 7.0\n.target sm_70\n.address_size 64\n"
                             ".visible .entry write(.param .u64 at) {\n"
                             "  .reg .b64 %rd<2>; .reg .b16 %h<2>;\n"
                             "  ld.param.u64 %rd1, [at]; mov.u16 %h1, 7; st.global.u8 [%rd1], %h1; ret;\n}\n";

int main(int argc, char **argv) {
    void *driver = the_driver();
    int (*init)(unsigned), (*retain)(void **, int), (*set)(void *), (*wait)(void);
    int (*load)(void **, const void *), (*get)(void **, void *, const char *);
    int (*launch)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **);
    void *context, *module, *function, *arguments[1];
    cualloc_t *allocator;
    uint64_t ptr, other;
    int stale = argc > 1 && strcmp(argv[1], "stale") == 0, leak = argc > 1 && strcmp(argv[1], "leak") == 0;
    int overrun = argc > 1 && strcmp(argv[1], "overrun") == 0;
    CHECK(argc == 2);
    find(driver, "cuInit", &init);
    find(driver, "cuDevicePrimaryCtxRetain", &retain);
    find(driver, "cuCtxSetCurrent", &set);
    find(driver, "cuModuleLoadData", &load);
    find(driver, "cuModuleGetFunction", &get);
    find(driver, "cuLaunchKernel", &launch);
    find(driver, "cuCtxSynchronize", &wait);
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
