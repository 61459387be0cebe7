/*
 * A program of the driver's API, as any other, on the simulated driver:
 *
 *   cargo build --example simdriver --features sim
 *   cc -I. examples/simdriver/program.c target/debug/examples/libsimdriver.so -o program
 *   LD_LIBRARY_PATH=target/debug/examples ./program
 *
 * With the vendor's header instead of ours, and linked with -lcuda, it runs on a GPU; its kernel is then one of a
 * module of the program's own.
 */
#include "wrapper.h"

#include <stdio.h>

CUresult cuCtxPushCurrent_v2(CUcontext ctx);
CUresult cuCtxPopCurrent_v2(CUcontext *pctx);
CUresult cuCtxCreate_v2(CUcontext *pctx, unsigned int flags, CUdevice dev);
CUresult cuCtxDestroy_v2(CUcontext ctx);
CUresult cuDevicePrimaryCtxGetState(CUdevice dev, unsigned int *flags, int *active);
CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void *from, size_t bytes);
CUresult cuMemcpyDtoH_v2(void *to, CUdeviceptr from, size_t bytes);
CUresult cuMemsetD32_v2(CUdeviceptr to, unsigned int value, size_t count);
CUresult cuEventElapsedTime(float *ms, CUevent start, CUevent end);
CUresult cuStreamAddCallback(CUstream stream, void (*function)(CUstream, CUresult, void *), void *data, unsigned int flags);
CUresult cuGetProcAddress_v2(const char *symbol, void **out, int version, cuuint64_t flags, int *status);

#define TRY(call)                                                              \
  do {                                                                         \
    CUresult code_ = (call);                                                   \
    if (code_ != CUDA_SUCCESS) {                                               \
      fprintf(stderr, "line %d: %s returned %d\n", __LINE__, #call, code_);    \
      return 1;                                                                \
    }                                                                          \
  } while (0)
#define EXPECT(truth)                                                          \
  do {                                                                         \
    if (!(truth)) {                                                            \
      fprintf(stderr, "line %d: not so: %s\n", __LINE__, #truth);              \
      return 1;                                                                \
    }                                                                          \
  } while (0)

static void note(CUstream stream, CUresult code, void *data) {
  (void)stream;
  *(int *)data += code == CUDA_SUCCESS;
}

int main(void) {
  CUcontext context, own, popped;
  CUstream stream;
  CUevent start, end;
  CUdeviceptr memory;
  unsigned int flags, words[4] = {1, 2, 3, 4};
  int active, status, calls = 0;
  float ms = -1;
  void *address;

  TRY(cuInit(0));
  TRY(cuDevicePrimaryCtxGetState(0, &flags, &active));
  EXPECT(!active);
  TRY(cuDevicePrimaryCtxRetain(&context, 0));
  TRY(cuDevicePrimaryCtxGetState(0, &flags, &active));
  EXPECT(active);
  TRY(cuCtxPushCurrent_v2(context));
  TRY(cuCtxCreate_v2(&own, 0, 0));
  TRY(cuCtxGetCurrent(&popped));
  EXPECT(popped == own && own != context);
  TRY(cuCtxDestroy_v2(own));
  TRY(cuCtxGetCurrent(&popped));
  EXPECT(popped == context);

  /* Copies and fills that wait. */
  TRY(cuMemAlloc_v2(&memory, sizeof words));
  TRY(cuMemcpyHtoD_v2(memory, words, sizeof words));
  TRY(cuMemsetD32_v2(memory, 7, 2));
  TRY(cuMemcpyDtoH_v2(words, memory, sizeof words));
  EXPECT(words[0] == 7 && words[1] == 7 && words[2] == 3 && words[3] == 4);

  /* A graph that is captured and launched twice, between two events, and a callback behind it. */
  CUmodule module;
  CUfunction fill;
  CUgraph graph;
  CUgraphExec exec;
  cuuint64_t count = 4;
  unsigned int seed = 40;
  void *parameters[] = {&memory, &count, &seed};
  TRY(cuModuleLoadData(&module, ""));
  TRY(cuModuleGetFunction(&fill, module, "cualloc_fill"));
  TRY(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
  TRY(cuEventCreate(&start, CU_EVENT_DEFAULT));
  TRY(cuEventCreate(&end, CU_EVENT_DEFAULT));
  TRY(cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
  TRY(cuLaunchKernel(fill, 1, 1, 1, 32, 1, 1, 0, stream, parameters, 0));
  TRY(cuStreamEndCapture(stream, &graph));
  TRY(cuGraphInstantiateWithFlags(&exec, graph, 0));
  TRY(cuGraphDestroy(graph));
  TRY(cuEventRecord(start, stream));
  TRY(cuGraphLaunch(exec, stream));
  TRY(cuGraphLaunch(exec, stream));
  TRY(cuEventRecord(end, stream));
  TRY(cuStreamAddCallback(stream, note, &calls, 0));
  TRY(cuStreamSynchronize(stream));
  TRY(cuEventElapsedTime(&ms, start, end));
  TRY(cuMemcpyDtoH_v2(words, memory, sizeof words));
  EXPECT(words[0] == 40 && words[3] == 43 && calls == 1 && ms >= 0);

  /* Functions by name, as the runtime asks for them. */
  TRY(cuGetProcAddress_v2("cuMemAlloc", &address, 12000, 0, &status));
  EXPECT(status == 0 && ((__typeof__(cuMemAlloc_v2) *)address)(&memory, 0) == CUDA_ERROR_INVALID_VALUE);
  TRY(cuGetProcAddress_v2("cuStreamGetCaptureInfo", &address, 12000, 0, &status));
  EXPECT(address == (void *)cuStreamGetCaptureInfo_v2);
  TRY(cuGetProcAddress_v2("cuNothing", &address, 12000, 0, &status));
  EXPECT(status == 1 && !address);

  TRY(cuGraphExecDestroy(exec));
  TRY(cuMemFree_v2(memory));
  TRY(cuCtxPopCurrent_v2(&popped));
  EXPECT(popped == context);
  TRY(cuDevicePrimaryCtxRelease_v2(0));
  puts("ok");
  return 0;
}
