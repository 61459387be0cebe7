/*
 * A driver without a device behind it. Functions that are written neither here nor in
 * `fake_calls.c` are appended by the tests as `int name(void)`, which succeeds and does nothing.
 *
 * Once the process exits, and in a forked child, every call ends the process with a code of its
 * own, so that a call which must not happen does not go unnoticed.
 */
#include <stddef.h>
#include <stdlib.h>
#include <unistd.h>

#ifndef VERSION
#define VERSION 13000
#endif
#ifndef INIT
#define INIT 0
#endif

typedef unsigned long long u64;

static int down;
static pid_t owner;
static int initialisations;
static int retained;
static u64 next_handle = 0x7000;
static __thread void *current;
static __thread int mode;

static void shut_down(void) { down = 1; }

void fake_check(void) {
  if (down) _exit(77);
  if (owner && owner != getpid()) _exit(78);
}

int cuInit(unsigned flags) {
  fake_check();
  int code = INIT;
  initialisations++;
  if (code) return code;
  if (!owner) {
    owner = getpid();
    atexit(shut_down);
  }
  return flags ? 1 : 0;
}

int cuDriverGetVersion(int *version) { *version = VERSION; return 0; }

int cuGetErrorName(int code, const char **text) {
  *text = code == 12345 ? "CUDA_ERROR_FROM_THE_FUTURE" : NULL;
  return code == 12345 ? 0 : 1;
}
int cuGetErrorString(int code, const char **text) {
  *text = code == 12345 ? "not invented yet" : NULL;
  return code == 12345 ? 0 : 1;
}

int cuDeviceGetCount(int *count) { fake_check(); *count = 2; return 0; }
int cuDeviceGet(int *device, int ordinal) {
  fake_check();
  if (ordinal < 0 || ordinal > 1) return 101;
  *device = ordinal;
  return 0;
}
int cuDeviceGetName(char *name, int length, int device) {
  fake_check();
  /* Fills all of it, without a terminating zero. */
  for (int i = 0; i < length; i++) name[i] = 'x';
  (void)device;
  return 0;
}
int cuDeviceGetAttribute(int *value, int attribute, int device) {
  fake_check();
  (void)device;
  if (attribute > 200) return 1;
  *value = attribute == 102 || attribute == 103;
  return 0;
}

int cuDevicePrimaryCtxRetain(void **context, int device) {
  fake_check();
  retained++;
  *context = (void *)(size_t)(0x1000 + device);
  return 0;
}
int cuDevicePrimaryCtxRelease_v2(int device) {
  fake_check();
  (void)device;
  return retained-- > 0 ? 0 : 201;
}
int cuCtxGetCurrent(void **context) { fake_check(); *context = current; return 0; }
int cuCtxSetCurrent(void *context) { fake_check(); current = context; return 0; }
int cuCtxGetDevice(int *device) {
  fake_check();
  if (!current) return 201;
  *device = (int)(size_t)current & 1;
  return 0;
}
int cuCtxGetId(void *context, u64 *id) { fake_check(); *id = (u64)(size_t)context + 5; return 0; }
int cuThreadExchangeStreamCaptureMode(int *other) {
  fake_check();
  int before = mode;
  if (*other < 0 || *other > 2) return 1;
  mode = *other;
  *other = before;
  return 0;
}

int cuStreamCreate(void **stream, unsigned flags) {
  fake_check();
  if (!current) return 201;
  *stream = (void *)(size_t)(next_handle += 16);
  return flags == 1 ? 0 : 1;
}
int cuStreamGetId(void *stream, u64 *id) {
  fake_check();
  size_t handle = (size_t)stream;
  if (handle > 2) *id = handle + 3;
  else if (!current) return 201;
  /* The per-thread stream differs by thread: by the address of something that belongs to it. */
  else if (handle == 2) *id = (u64)(size_t)&current;
  else *id = (u64)(size_t)current + 7;
  return 0;
}
int cuStreamQuery(void *stream) { fake_check(); (void)stream; return 600; }
int cuEventCreate(void **event, unsigned flags) {
  fake_check();
  if (!current || mode != 2) return 201;
  *event = (void *)(size_t)(next_handle += 16);
  return flags == 2 ? 0 : 1;
}
int cuEventQuery(void *event) { fake_check(); (void)event; return 600; }
int cuEventDestroy_v2(void *event) { fake_check(); return event && current ? 0 : 400; }
int cuStreamDestroy_v2(void *stream) { fake_check(); return stream && current ? 0 : 400; }

/* The size is the code to fail with; small ones succeed. */
int cuMemAlloc_v2(u64 *address, size_t bytes) {
  fake_check();
  if (bytes && bytes < 1000) return (int)bytes;
  *address = next_handle += 16;
  return 0;
}
int cuMemCreate(u64 *handle, size_t bytes, const void *prop, u64 flags) {
  fake_check();
  (void)prop;
  (void)flags;
  if (bytes && bytes < 1000) return (int)bytes;
  *handle = next_handle += 16;
  return 0;
}
