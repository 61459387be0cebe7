/* Runs the main function of the program PROGRAM in a destructor of a pthread key, in the third round of those: the
 * thread-local variables of the library that have destructors are gone by then. */
#define main program
#include PROGRAM
#undef main

#include <pthread.h>
#include <unistd.h>

enum { LATE_ROUNDS = 3 };

static pthread_key_t late_key;
static int late_count, late_ended;
static char **late_arguments;

static void late(void *round) {
    if ((uintptr_t)round < LATE_ROUNDS) {
        CHECK(pthread_setspecific(late_key, (void *)((uintptr_t)round + 1)) == 0);
        return;
    }
    late_ended = program(late_count, late_arguments) == 0;
}

/* Has everything that a call leaves with a thread, then ends. */
static void *late_thread(void *unused) {
    uint64_t ptr;
    cualloc_t *allocator = new_allocator();
    (void)unused;
    EXPECT(CUALLOC_OK, cualloc_alloc(allocator, 4096, stream_of(2), &ptr));
    EXPECT(CUALLOC_OK, cualloc_free(allocator, ptr));
    EXPECT(CUALLOC_OK, cualloc_destroy(allocator));
    CHECK(cualloc_torch_pool_newest() == 0);
    CHECK(pthread_setspecific(late_key, (void *)1) == 0);
    return 0;
}

int main(int argc, char **argv) {
    pthread_t id;
    late_count = argc;
    late_arguments = argv;
    /* A call that waits for itself never returns. */
    alarm(600);
    CHECK(pthread_key_create(&late_key, late) == 0);
    CHECK(pthread_create(&id, 0, late_thread, 0) == 0 && pthread_join(id, 0) == 0);
    CHECK(late_ended);
    return 0;
}
