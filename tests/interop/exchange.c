/* Another library at the other end of an exchange: the structures of DLPack and of the Arrow C Device
 * data interface, declared here from their specifications and from nothing else. Device memory is never
 * touched. */
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

typedef struct { uint32_t major, minor; } Version;
typedef struct { int32_t type; int32_t id; } Device;
typedef struct { uint8_t code, bits; uint16_t lanes; } DataType;
typedef struct {
    void *data;
    Device device;
    int32_t ndim;
    DataType dtype;
    int64_t *shape;
    int64_t *strides;
    uint64_t byte_offset;
} Tensor;
typedef struct Legacy {
    Tensor tensor;
    void *manager_ctx;
    void (*deleter)(struct Legacy *);
} Legacy;
typedef struct Versioned {
    Version version;
    void *manager_ctx;
    void (*deleter)(struct Versioned *);
    uint64_t flags;
    Tensor tensor;
} Versioned;

struct ArrowArray {
    int64_t length, null_count, offset, n_buffers, n_children;
    const void **buffers;
    struct ArrowArray **children;
    struct ArrowArray *dictionary;
    void (*release)(struct ArrowArray *);
    void *private_data;
};
struct ArrowDeviceArray {
    struct ArrowArray array;
    int64_t device_id;
    int32_t device_type;
    void *sync_event;
    int64_t reserved[3];
};

/* What a consumer reads out of a structure. */
typedef struct {
    uint64_t data;
    int64_t rows, stride;
    uint64_t byte_offset;
    int32_t device_type, device_id, ndim;
    int32_t code, bits, lanes;
    uint32_t major, minor;
    uint64_t flags;
} Seen;

static void see(const Tensor *t, Seen *seen) {
    seen->data = (uint64_t)(uintptr_t)t->data;
    seen->rows = t->shape ? t->shape[0] : -1;
    seen->stride = t->strides ? t->strides[0] : -1;
    seen->byte_offset = t->byte_offset;
    seen->device_type = t->device.type;
    seen->device_id = t->device.id;
    seen->ndim = t->ndim;
    seen->code = t->dtype.code;
    seen->bits = t->dtype.bits;
    seen->lanes = t->dtype.lanes;
}

void see_legacy(const Legacy *m, Seen *seen) { see(&m->tensor, seen); }

void see_versioned(const Versioned *m, Seen *seen) {
    see(&m->tensor, seen);
    seen->major = m->version.major;
    seen->minor = m->version.minor;
    seen->flags = m->flags;
}

void delete_legacy(Legacy *m) { m->deleter(m); }
void delete_versioned(Versioned *m) { m->deleter(m); }
void delete_null_like(const Legacy *m) { m->deleter(NULL); }
void delete_null_like_versioned(const Versioned *m) { m->deleter(NULL); }

/* A producer: `released` is called when its tensor is deleted. */
typedef struct {
    void (*released)(void *);
    void *argument;
    int64_t shape[1], strides[1];
} Owner;

static void fill(Tensor *t, Owner *owner, const Seen *as) {
    owner->shape[0] = as->rows;
    owner->strides[0] = as->stride;
    t->data = (void *)(uintptr_t)as->data;
    t->device.type = as->device_type;
    t->device.id = as->device_id;
    t->ndim = as->ndim;
    t->dtype.code = (uint8_t)as->code;
    t->dtype.bits = (uint8_t)as->bits;
    t->dtype.lanes = (uint16_t)as->lanes;
    t->shape = owner->shape;
    /* 0 stands for no strides. */
    t->strides = as->stride == 0 ? NULL : owner->strides;
    t->byte_offset = as->byte_offset;
}

static void end(Owner *owner) {
    owner->released(owner->argument);
    free(owner);
}

static void free_legacy(Legacy *m) { end(m->manager_ctx); free(m); }
static void free_versioned(Versioned *m) { end(m->manager_ctx); free(m); }

static Owner *own(void (*released)(void *), void *argument) {
    Owner *owner = calloc(1, sizeof *owner);
    owner->released = released;
    owner->argument = argument;
    return owner;
}

Legacy *make_legacy(const Seen *as, void (*released)(void *), void *argument) {
    Legacy *m = calloc(1, sizeof *m);
    Owner *owner = own(released, argument);
    fill(&m->tensor, owner, as);
    m->manager_ctx = owner;
    m->deleter = free_legacy;
    return m;
}

Versioned *make_versioned(const Seen *as, void (*released)(void *), void *argument) {
    Versioned *m = calloc(1, sizeof *m);
    Owner *owner = own(released, argument);
    fill(&m->tensor, owner, as);
    m->version.major = as->major;
    m->version.minor = as->minor;
    m->flags = as->flags;
    m->manager_ctx = owner;
    m->deleter = free_versioned;
    return m;
}

/* Arrow. */
typedef struct {
    uint64_t data, validity;
    int64_t length, null_count, offset, n_buffers, n_children;
    int64_t device_id;
    int32_t device_type;
    uint64_t event;
    int64_t reserved;
    int32_t released;
} SeenArrow;

void see_arrow(const struct ArrowDeviceArray *a, SeenArrow *seen) {
    seen->released = a->array.release == NULL;
    seen->length = a->array.length;
    seen->null_count = a->array.null_count;
    seen->offset = a->array.offset;
    seen->n_buffers = a->array.n_buffers;
    seen->n_children = a->array.n_children;
    seen->validity = a->array.n_buffers > 0 ? (uint64_t)(uintptr_t)a->array.buffers[0] : 0;
    seen->data = a->array.n_buffers > 1 ? (uint64_t)(uintptr_t)a->array.buffers[1] : 0;
    seen->device_id = a->device_id;
    seen->device_type = a->device_type;
    seen->event = a->sync_event ? (uint64_t)(uintptr_t) * (void **)a->sync_event : 0;
    seen->reserved = a->reserved[0] | a->reserved[1] | a->reserved[2];
}

void release_arrow(struct ArrowDeviceArray *a) {
    if (a->array.release) a->array.release(&a->array);
}

/* Moving: copy, then mark the source as released. */
void move_arrow(struct ArrowDeviceArray *from, struct ArrowDeviceArray *to) {
    *to = *from;
    from->array.release = NULL;
}

struct ArrowDeviceArray *new_arrow(void) { return calloc(1, sizeof(struct ArrowDeviceArray)); }
void free_arrow(struct ArrowDeviceArray *a) { free(a); }

typedef struct {
    void (*released)(void *);
    void *argument;
    void *event;
    const void *buffers[2];
} ArrowOwner;

static void end_arrow(struct ArrowArray *array) {
    ArrowOwner *owner = array->private_data;
    owner->released(owner->argument);
    free(owner);
    array->release = NULL;
}

void make_arrow(struct ArrowDeviceArray *a, const SeenArrow *as, void (*released)(void *), void *argument) {
    ArrowOwner *owner = calloc(1, sizeof *owner);
    owner->released = released;
    owner->argument = argument;
    owner->event = (void *)(uintptr_t)as->event;
    owner->buffers[0] = (void *)(uintptr_t)as->validity;
    owner->buffers[1] = (void *)(uintptr_t)as->data;
    a->array.length = as->length;
    a->array.null_count = as->null_count;
    a->array.offset = as->offset;
    a->array.n_buffers = as->n_buffers;
    a->array.n_children = as->n_children;
    a->array.buffers = owner->buffers;
    a->array.children = NULL;
    a->array.dictionary = NULL;
    a->array.release = as->released ? NULL : end_arrow;
    a->array.private_data = owner;
    a->device_id = as->device_id;
    a->device_type = as->device_type;
    a->sync_event = as->event ? &owner->event : NULL;
    a->reserved[0] = a->reserved[1] = a->reserved[2] = 0;
}

/* Sizes and offsets, as the compiler sees them. */
size_t layout(int index) {
    const size_t all[] = {
        sizeof(struct ArrowDeviceArray),
        offsetof(struct ArrowDeviceArray, array),
        offsetof(struct ArrowDeviceArray, device_id),
        offsetof(struct ArrowDeviceArray, device_type),
        offsetof(struct ArrowDeviceArray, sync_event),
        offsetof(struct ArrowDeviceArray, reserved),
        sizeof(struct ArrowArray),
        sizeof(Tensor),
        sizeof(Legacy),
        offsetof(Legacy, manager_ctx),
        offsetof(Legacy, deleter),
        sizeof(Versioned),
        offsetof(Versioned, manager_ctx),
        offsetof(Versioned, deleter),
        offsetof(Versioned, flags),
        offsetof(Versioned, tensor),
    };
    return all[index];
}
