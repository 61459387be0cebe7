/*
 * A tool as NVTX has them: it fills in its functions, and writes every call with every field to standard output.
 *
 * WITHOUT_MEMORY and WITHOUT_DOMAINS leave out what a tool may lack. Texts and layouts are those of NVTX 3.
 */
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#define CHECK(what)                                          \
  do {                                                       \
    if (!(what)) {                                           \
      fprintf(stderr, "%d: %s\n", __LINE__, #what);          \
      abort();                                               \
    }                                                        \
  } while (0)

typedef struct { size_t bytes; const void *at; } range;
typedef struct {
  uint16_t version, bytes; uint32_t category; int32_t color_type; uint32_t color; int32_t payload_type, reserved;
  uint64_t payload; int32_t text_type; const char *text;
} attributes;
typedef struct {
  uint16_t compatible, bytes; uint32_t reserved, usage, type; size_t range_bytes; const range *range;
  uint32_t category, text_type; const char *text;
} heap_description;
typedef struct {
  uint16_t compatible, bytes; uint32_t type; void *heap; size_t count, element; const range *ranges; void **handles;
} register_batch;
typedef struct { uint16_t compatible, bytes; uint32_t by; size_t count, element; void *const *regions; } unregister_batch;
typedef struct { uint32_t by, text_type; const void *region; const char *text; uint32_t category, reserved; } name;
typedef struct {
  uint16_t compatible, bytes; uint32_t reserved; size_t count, element; const name *names; size_t reserved_end;
} names_batch;
typedef struct { size_t number, slots; intptr_t *functions; } segment;
typedef struct {
  uint16_t version, bytes, module, compatible; size_t segments; segment *first; void *export, *info;
} module_info;
typedef struct { size_t bytes; int (*table)(int module, void ****table, unsigned *count); } callbacks;
typedef struct { size_t bytes; uint32_t version, reserved; void (*told)(uint32_t version); } version_info;

_Static_assert(sizeof(heap_description) == 48 && sizeof(register_batch) == 48, "NVTX 3");
_Static_assert(sizeof(unregister_batch) == 32 && sizeof(names_batch) == 40 && sizeof(name) == 32, "NVTX 3");
_Static_assert(sizeof(attributes) == 48 && sizeof(module_info) == 40, "NVTX 3");

static char domain;
static size_t heaps;

static void *domain_create(const char *text) {
  printf("NVTX domain %s\n", text);
  return &domain;
}
static void category(void *of, uint32_t number, const char *text) {
  CHECK(of == &domain);
  printf("NVTX category %u %s\n", number, text);
}
static void checked(void *of, const attributes *what) {
  CHECK(of == &domain && what->version == 3 && what->bytes == sizeof *what && what->text_type == 1);
  CHECK(!what->color_type && !what->color && !what->payload_type && !what->reserved && !what->payload);
}
static void mark(void *of, const attributes *what) {
  checked(of, what);
  printf("NVTX mark %u %s\n", what->category, what->text);
}
static int push(void *of, const attributes *what) {
  checked(of, what);
  printf("NVTX push %u %s\n", what->category, what->text);
  return 0;
}
static int pop(void *of) {
  CHECK(of == &domain);
  printf("NVTX pop\n");
  return 0;
}

#ifdef WITHOUT_DOMAINS
#define DOMAIN NULL
#else
#define DOMAIN (&domain)
#endif

static void *heap_register(void *of, const heap_description *heap) {
  CHECK(of == DOMAIN && heap->compatible == 0x102 && heap->bytes == sizeof *heap && !heap->reserved);
  CHECK(heap->usage == 1 && heap->type == 1 && heap->range_bytes == sizeof(range) && !heap->category);
  CHECK(heap->text_type == 1);
  printf("NVTX heap %p %zu %s\n", heap->range->at, heap->range->bytes, heap->text);
  return (void *)++heaps;
}
static void heap_unregister(void *of, void *heap) {
  CHECK(of == DOMAIN);
  printf("NVTX heap-gone %zu\n", (size_t)heap);
}
static void regions_register(void *of, const register_batch *batch) {
  CHECK(of == DOMAIN && batch->compatible == 0x102 && batch->bytes == sizeof *batch && batch->type == 1);
  CHECK(batch->count == 1 && batch->element == sizeof(range) && !batch->handles);
  printf("NVTX born %zu %p %zu\n", (size_t)batch->heap, batch->ranges->at, batch->ranges->bytes);
}
static void regions_unregister(void *of, const unregister_batch *batch) {
  CHECK(of == DOMAIN && batch->compatible == 0x102 && batch->bytes == sizeof *batch && batch->by == 1);
  CHECK(batch->count == 1 && batch->element == sizeof(void *));
  printf("NVTX gone %p\n", batch->regions[0]);
}
static void regions_name(void *of, const names_batch *batch) {
  const name *one = batch->names;
  CHECK(of == DOMAIN && batch->compatible == 0x102 && batch->bytes == sizeof *batch && !batch->reserved);
  CHECK(batch->count == 1 && batch->element == sizeof *one && !batch->reserved_end);
  CHECK(one->by == 1 && one->text_type == 1 && !one->category && !one->reserved);
  printf("NVTX name %p %s\n", one->region, one->text);
}

int InitializeInjectionNvtx2(const void *(*export)(uint32_t)) {
#ifdef WITHOUT_DOMAINS
  (void)export, (void)mark, (void)push, (void)pop, (void)category, (void)domain_create;
  return 1;
#else
  const callbacks *known = export(1);
  const version_info *version = export(3);
  void ***table = NULL;
  unsigned count = 0;
  CHECK(known && known->bytes == sizeof *known && version && version->bytes == sizeof *version);
  CHECK(version->version == 3 && !export(2));
  version->told(3);
  CHECK(!known->table(1, &table, &count) && known->table(5, &table, &count) == 1 && count == 16 && !table[16]);
  CHECK(known->table(5, NULL, NULL) == 1);
  *table[1] = mark;
  *table[4] = push;
  *table[5] = pop;
  *table[8] = category;
  *table[12] = domain_create;
  return 1;
#endif
}

int InitializeInjectionNvtxExtension(module_info *module) {
  CHECK(module->version == 3 && module->bytes == sizeof *module && module->module == 1);
  CHECK(module->compatible == 0x102 && module->segments == 1 && !module->export && !module->info);
  CHECK(module->first->number == 1 && module->first->slots == 63);
  setvbuf(stdout, NULL, _IOLBF, 0);
#ifdef WITHOUT_MEMORY
  (void)heap_register, (void)heap_unregister, (void)regions_register, (void)regions_unregister, (void)regions_name;
  return 0;
#else
  intptr_t *functions = module->first->functions;
  functions[0] = (intptr_t)heap_register;
  functions[1] = (intptr_t)heap_unregister;
  functions[3] = (intptr_t)regions_register;
  functions[5] = (intptr_t)regions_unregister;
  functions[6] = (intptr_t)regions_name;
  return 1;
#endif
}
