/* What the programs have in common. Compiled as C11 and as C++17. */
#ifndef COMMON_H
#define COMMON_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cualloc.h>

#define NULL_OPTIONS ((cualloc_options_t *)0)

/* Ends the program unless a call returns this code. */
#define EXPECT(code, call)                                                                         \
    do {                                                                                           \
        int32_t got_ = (call);                                                                     \
        if (got_ != (code)) {                                                                      \
            fprintf(stderr, "%s:%d: %s is %d and not %d: %s\n", __FILE__, __LINE__, #call,         \
                    (int)got_, (int)(code), cualloc_last_error());                                 \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

#define CHECK(condition)                                                                           \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition);                \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

/* A call that fails with this code, and makes its result 0. */
#define NOTHING(code, call, out)                                                                   \
    do {                                                                                           \
        (out) = (__typeof__(out))(uintptr_t)7;                                                     \
        EXPECT(code, call);                                                                        \
        CHECK((out) == 0);                                                                         \
    } while (0)

/* Options for the simulator, unless CUALLOC_DEVICE says cuda. */
static inline cualloc_options_t *new_options(void) {
    const char *device = getenv("CUALLOC_DEVICE");
    cualloc_options_t *options = cualloc_options_new();
    CHECK(options != 0);
    EXPECT(CUALLOC_OK, cualloc_options_set(options, "device", device ? device : "sim"));
    return options;
}

/* An allocator on the first device. */
static inline cualloc_t *new_allocator(void) {
    cualloc_options_t *options = new_options();
    cualloc_t *made = 0;
    EXPECT(CUALLOC_OK, cualloc_create(0, options, &made));
    CHECK(made != 0);
    cualloc_options_free(options);
    return made;
}

static inline cualloc_scope_t scope_of(int32_t kind) {
    cualloc_scope_t scope;
    memset(&scope, 0, sizeof scope);
    scope.struct_size = sizeof scope;
    scope.kind = kind;
    return scope;
}

static inline void *stream_of(uintptr_t special) { return (void *)special; }

#endif
