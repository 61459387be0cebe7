/* The simulated driver in a child that was forked while another thread was inside of it: such a child may exit. The
 * driver is what CUALLOC_DRIVER names. */
#define _GNU_SOURCE
#include "common.h"
#include "load.h"

#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

enum { PAGE = 4096 };

static void *driver, *context;
static int inside[2], onwards[2];
static char *page;
static unsigned long long memory;

/* The thread is where the driver reads the page: it stays there until it is told to go on. */
static void faulted(int signal) {
    char byte = 0;
    (void)signal;
    if (write(inside[1], &byte, 1) != 1 || read(onwards[0], &byte, 1) != 1) _exit(3);
    if (mprotect(page, PAGE, PROT_READ) != 0) _exit(3);
}

static void *upload(void *none) {
    int (*set)(void *);
    int (*copy)(unsigned long long, const void *, size_t, void *);
    find(driver, "cuCtxSetCurrent", &set);
    find(driver, "cuMemcpyHtoDAsync_v2", &copy);
    CHECK(set(context) == 0);
    CHECK(copy(memory, page, PAGE, 0) == 0);
    return none;
}

int main(void) {
    int (*init)(unsigned), (*retain)(void **, int), (*set)(void *), (*allocate)(unsigned long long *, size_t);
    struct sigaction action;
    pthread_t thread;
    pid_t child;
    char byte = 0;
    int status = 0;
    driver = the_driver();
    find(driver, "cuInit", &init);
    find(driver, "cuDevicePrimaryCtxRetain", &retain);
    find(driver, "cuCtxSetCurrent", &set);
    find(driver, "cuMemAlloc_v2", &allocate);
    CHECK(init(0) == 0 && retain(&context, 0) == 0 && set(context) == 0 && allocate(&memory, PAGE) == 0);
    CHECK(pipe(inside) == 0 && pipe(onwards) == 0);
    page = mmap(0, PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(page != (char *)MAP_FAILED);
    memset(&action, 0, sizeof action);
    action.sa_handler = faulted;
    CHECK(sigaction(SIGSEGV, &action, 0) == 0);
    CHECK(pthread_create(&thread, 0, upload, 0) == 0);
    CHECK(read(inside[0], &byte, 1) == 1);
    child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        alarm(30);
        exit(0);
    }
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(write(onwards[1], &byte, 1) == 1);
    CHECK(pthread_join(thread, 0) == 0);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    puts("well");
    return 0;
}
