/* Pairs of 4096 bytes through the C library, for benches/lines.sh:
 *
 *     pair c_adopted|c_default N
 *
 * on a stream that was adopted, or on the legacy default stream by the null handle. The driver that CUALLOC_DRIVER names
 * is used for the allocator and for the stream. */
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cualloc.h"

static int failed(const char *what, int code) {
    fprintf(stderr, "%s: %d, %s\n", what, code, cualloc_last_error());
    return 1;
}

int main(int count, char **words) {
    if (count != 3) return failed("pair NAME N", 2);
    cualloc_t *allocator = NULL;
    int code = cualloc_create(0, NULL, &allocator);
    if (code) return failed("cualloc_create", code);
    void *stream = NULL;
    if (!strcmp(words[1], "c_adopted")) {
        void *driver = dlopen(getenv("CUALLOC_DRIVER"), RTLD_NOW);
        int (*create)(void **, unsigned) = NULL;
        if (driver) *(void **)&create = dlsym(driver, "cuStreamCreate");
        if (!create) return failed("cuStreamCreate is not there", 0);
        code = cualloc_make_current(allocator);
        if (!code) code = create(&stream, 1);
        if (!code) code = cualloc_adopt_stream(allocator, stream);
        if (code) return failed("the stream", code);
    }
    for (long i = atol(words[2]); i > 0 && !code; i--) {
        uint64_t block;
        code = cualloc_alloc(allocator, 4096, stream, &block);
        if (!code) code = cualloc_free(allocator, block);
    }
    return code ? failed("a pair", code) : 0;
}
