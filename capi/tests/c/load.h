/* The driver that the library uses, or its simulator, for programs that call it themselves. Behind common.h. */
#ifndef CUALLOC_TESTS_LOAD_H
#define CUALLOC_TESTS_LOAD_H

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

static void *the_driver(void) {
    const char *name = getenv("CUALLOC_DRIVER");
    void *driver = dlopen(name ? name : "libcuda.so.1", RTLD_NOW);
    CHECK(driver != 0);
    return driver;
}

/* Stores the address of a function of the driver. */
static void find(void *driver, const char *name, void *function) {
    void *found = dlsym(driver, name);
    CHECK(found != 0);
    memcpy(function, &found, sizeof found);
}

#endif
