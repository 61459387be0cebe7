/* Recordings and contexts. The argument is a folder for files. */
#include "common.h"

static char path[4096];

static const char *file(const char *folder, const char *name) {
    CHECK(snprintf(path, sizeof path, "%s/%s", folder, name) < (int)sizeof path);
    return path;
}

/* Whether a file holds a text. */
static int holds(const char *name, const char *text) {
    static char bytes[1 << 20];
    FILE *opened = fopen(name, "rb");
    size_t count, at;
    CHECK(opened != 0);
    count = fread(bytes, 1, sizeof bytes, opened);
    CHECK(fclose(opened) == 0);
    for (at = 0; at + strlen(text) <= count; at++)
        if (memcmp(bytes + at, text, strlen(text)) == 0) return 1;
    return 0;
}

static int asked = 0;

/* The name of a function that a macro may have renamed. */
#define NAME_OF(function) #function
#define NAME(function) NAME_OF(function)

static uint32_t where(void *data) {
    ++*(int *)data;
    return cualloc_context("script;line 7");
}

int main(int argc, char **argv) {
    cualloc_t *allocator = new_allocator();
    uint64_t ptr, events = 7, lost = 7;
    uint32_t weights, before;
    CHECK(argc == 2);
    EXPECT(CUALLOC_INVALID_ARGUMENT, cualloc_record_stop(&events, &lost));
    CHECK(events == 0 && lost == 0 && strstr(cualloc_last_error(), "no recording") != 0);
    EXPECT(CUALLOC_INVALID_ARGUMENT, cualloc_record_dump(file(argv[1], "none")));
    EXPECT(CUALLOC_IO, cualloc_record_start(file(argv[1], "no/such/folder")));
    CHECK(strstr(cualloc_last_error(), "cannot write") != 0);

    weights = cualloc_context("model;weights");
    CHECK(weights != 0 && cualloc_context("model;weights") == weights);
    CHECK(cualloc_context(0) == 0 && cualloc_last_code() == CUALLOC_INVALID_ARGUMENT);
    CHECK(cualloc_context("\xff\xfe") == 0);
    before = cualloc_set_context(weights);
    CHECK(before == 0 && cualloc_set_context(weights) == weights);

    EXPECT(CUALLOC_OK, cualloc_record_start(file(argv[1], "whole.rec")));
    EXPECT(CUALLOC_BUSY, cualloc_record_start(0));
    EXPECT(CUALLOC_OK, cualloc_alloc(allocator, 1000, 0, &ptr));
    EXPECT(CUALLOC_OK, cualloc_free(allocator, ptr));
    EXPECT(CUALLOC_INVALID_ARGUMENT, cualloc_record_dump(0));
    EXPECT(CUALLOC_OK, cualloc_record_stop(&events, &lost));
    /* The two, the allocator, its stream, and memory of the driver. */
    CHECK(events >= 5 && lost == 0);
    CHECK(holds(file(argv[1], "whole.rec"), "cuallocR") && holds(path, "model;weights"));

    /* A byte between two samples: each block is one. */
    EXPECT(CUALLOC_OK, cualloc_record_start_with_stacks(file(argv[1], "stacks.rec"), 1));
    cualloc_set_stack_source(where, &asked);
    EXPECT(CUALLOC_OK, cualloc_alloc(allocator, 100000, 0, &ptr));
    EXPECT(CUALLOC_OK, cualloc_free(allocator, ptr));
    cualloc_set_stack_source(0, 0);
    EXPECT(CUALLOC_OK, cualloc_alloc(allocator, 100000, 0, &ptr));
    EXPECT(CUALLOC_OK, cualloc_free(allocator, ptr));
    EXPECT(CUALLOC_OK, cualloc_record_stop(&events, &lost));
    CHECK(asked == 1 && lost == 0);
    CHECK(holds(file(argv[1], "stacks.rec"), "script;line 7") && holds(path, ";" NAME(main)));

    EXPECT(CUALLOC_OK, cualloc_record_start(0));
    EXPECT(CUALLOC_OK, cualloc_alloc(allocator, 1000, 0, &ptr));
    EXPECT(CUALLOC_IO, cualloc_record_dump(file(argv[1], "no/such/folder")));
    EXPECT(CUALLOC_OK, cualloc_record_dump(file(argv[1], "newest.rec")));
    CHECK(holds(path, "model;weights"));
    EXPECT(CUALLOC_INVALID_ARGUMENT, cualloc_record_snapshot(0));
    EXPECT(CUALLOC_IO, cualloc_record_snapshot(file(argv[1], "no/such/folder")));
    EXPECT(CUALLOC_OK, cualloc_record_snapshot(file(argv[1], "newest.pickle")));
    CHECK(holds(path, "device_traces") && holds(path, "weights") && !holds(path, "cuallocR"));
    EXPECT(CUALLOC_OK, cualloc_record_stop(0, 0));
    EXPECT(CUALLOC_INVALID_ARGUMENT, cualloc_record_stop(0, 0));
    EXPECT(CUALLOC_INVALID_ARGUMENT, cualloc_record_snapshot(file(argv[1], "none")));
    CHECK(cualloc_set_context(before) == weights);
    EXPECT(CUALLOC_OK, cualloc_free(allocator, ptr));
    EXPECT(CUALLOC_OK, cualloc_destroy(allocator));
    puts("ended well");
    return 0;
}
