/*
 * The part of the fake driver that looks at what it is given: each function succeeds only if every
 * argument is the one that the test of the wrappers passes, in its place. The prototypes are those
 * of our own header.
 */
#include "wrapper.h"

void fake_check(void);
#define EXPECT(condition) return fake_check(), (condition) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE

#define A 0xa000ull
#define B 0xb000ull
#define HOST ((void *)0xc000)
#define STREAM ((CUstream)0xd000)
#define EVENT ((CUevent)0xe000)
#define HANDLE 0xf000ull
#define POOL ((CUmemoryPool)0x1f000)
#define GRAPH ((CUgraph)0x2f000)
#define NODE ((CUgraphNode)0x7f000)

CUresult cuEventRecord(CUevent event, CUstream stream) { EXPECT(event == EVENT && stream == STREAM); }
CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned int flags) {
  EXPECT(stream == STREAM && event == EVENT && flags == 0);
}

CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t bytes, CUstream stream) {
  EXPECT(to == A && value == 2 && bytes == 3 && stream == STREAM);
}
CUresult cuMemsetD32Async(CUdeviceptr to, unsigned int value, size_t words, CUstream stream) {
  EXPECT(to == A && value == 0x12345678 && words == 3 && stream == STREAM);
}
CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
  EXPECT(to == A && from == B && bytes == 3 && stream == STREAM);
}
CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void *from, size_t bytes, CUstream stream) {
  EXPECT(to == A && from == HOST && bytes == 3 && stream == STREAM);
}
CUresult cuMemcpyDtoHAsync_v2(void *to, CUdeviceptr from, size_t bytes, CUstream stream) {
  EXPECT(to == HOST && from == A && bytes == 3 && stream == STREAM);
}
CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
  EXPECT(to == A && from == B && bytes == 3 && stream == STREAM);
}
CUresult cuMemcpyPeerAsync(CUdeviceptr to, CUcontext to_context, CUdeviceptr from, CUcontext from_context, size_t bytes, CUstream stream) {
  EXPECT(to == A && to_context == (CUcontext)0x1000 && from == B && from_context == (CUcontext)0x1001 && bytes == 3 && stream == STREAM);
}

CUresult cuMemFree_v2(CUdeviceptr address) { EXPECT(address == A); }
CUresult cuMemGetInfo_v2(size_t *free, size_t *total) { *free = 5; *total = 7; EXPECT(1); }
CUresult cuMemHostAlloc(void **address, size_t bytes, unsigned int flags) {
  *address = HOST; EXPECT(bytes == 3 && flags == 5);
}
CUresult cuMemFreeHost(void *address) { EXPECT(address == HOST); }

static int good(const CUmemAllocationProp *p) {
  return p->type == 1 && p->requestedHandleTypes == 1 && p->location.type == 1 && p->location.id == 1 &&
         !p->win32HandleMetaData && !p->allocFlags.compressionType && p->allocFlags.gpuDirectRDMACapable == 1 && !p->allocFlags.usage;
}
CUresult cuMemGetAllocationGranularity(size_t *bytes, const CUmemAllocationProp *prop, CUmemAllocationGranularity_flags which) {
  *bytes = 3; EXPECT(good(prop) && which == 0);
}
CUresult cuMemAddressReserve(CUdeviceptr *address, size_t bytes, size_t alignment, CUdeviceptr hint, unsigned long long flags) {
  *address = A; EXPECT(bytes == 3 && alignment == 4 && hint == B && flags == 0);
}
CUresult cuMemAddressFree(CUdeviceptr address, size_t bytes) { EXPECT(address == A && bytes == 3); }
CUresult cuMemMap(CUdeviceptr address, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long flags) {
  EXPECT(address == A && bytes == 3 && offset == 0 && handle == HANDLE && flags == 0);
}
CUresult cuMemUnmap(CUdeviceptr address, size_t bytes) { EXPECT(address == A && bytes == 3); }
static int both(const CUmemAccessDesc *list, size_t count) {
  if (count != 2) return 0;
  for (int i = 0; i < 2; i++)
    if (list[i].location.type != 1 || list[i].location.id != i || list[i].flags != 3) return 0;
  return 1;
}
CUresult cuMemSetAccess(CUdeviceptr address, size_t bytes, const CUmemAccessDesc *list, size_t count) {
  EXPECT(address == A && bytes == 3 && both(list, count));
}
CUresult cuMemGetAccess(unsigned long long *flags, const CUmemLocation *location, CUdeviceptr address) {
  *flags = 3; EXPECT(location->type == 1 && location->id == 1 && address == A);
}

CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *address) {
  *handle = HANDLE; EXPECT(address == (void *)A);
}
int dup(int);
CUresult cuMemExportToShareableHandle(void *out, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType kind, unsigned long long flags) {
  *(int *)out = dup(0); EXPECT(handle == HANDLE && kind == 1 && flags == 0);
}
CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *from, CUmemAllocationHandleType kind) {
  *handle = HANDLE;
  EXPECT(kind == 1 && from == (void *)0);
}
CUresult cuMemGetHandleForAddressRange(void *out, CUdeviceptr address, size_t bytes, CUmemRangeHandleType kind, unsigned long long flags) {
  *(int *)out = dup(0); EXPECT(address == A && bytes == 3 && kind == 1 && flags == 0);
}

CUresult cuMemPoolCreate(CUmemoryPool *pool, const CUmemPoolProps *p) {
  *pool = POOL;
  int zero = !p->usage && !p->win32SecurityAttributes;
  for (unsigned i = 0; i < sizeof p->reserved; i++) zero &= !p->reserved[i];
  EXPECT(zero && p->allocType == 1 && p->handleTypes == 1 && p->location.type == 1 && p->location.id == 1 && p->maxSize == 3);
}
CUresult cuMemPoolDestroy(CUmemoryPool pool) { EXPECT(pool == POOL); }
CUresult cuDeviceGetDefaultMemPool(CUmemoryPool *pool, CUdevice device) { *pool = POOL; EXPECT(device == 1); }
CUresult cuMemPoolTrimTo(CUmemoryPool pool, size_t keep) { EXPECT(pool == POOL && keep == 3); }
static CUmemPool_attribute last;
static unsigned long long stored;
CUresult cuMemPoolSetAttribute(CUmemoryPool pool, CUmemPool_attribute attribute, void *value) {
  last = attribute;
  stored = attribute <= 3 ? *(unsigned *)value : *(unsigned long long *)value;
  EXPECT(pool == POOL);
}
CUresult cuMemPoolGetAttribute(CUmemoryPool pool, CUmemPool_attribute attribute, void *value) {
  if (attribute <= 3) *(unsigned *)value = (unsigned)stored;
  else *(unsigned long long *)value = stored;
  EXPECT(pool == POOL && attribute == last);
}
CUresult cuMemPoolSetAccess(CUmemoryPool pool, const CUmemAccessDesc *list, size_t count) {
  EXPECT(pool == POOL && both(list, count));
}
CUresult cuMemPoolGetAccess(CUmemAccess_flags *flags, CUmemoryPool pool, CUmemLocation *location) {
  *flags = 3; EXPECT(pool == POOL && location->type == 1 && location->id == 1);
}
CUresult cuMemPoolExportToShareableHandle(void *out, CUmemoryPool pool, CUmemAllocationHandleType kind, unsigned long long flags) {
  *(int *)out = dup(0); EXPECT(pool == POOL && kind == 1 && flags == 0);
}
CUresult cuMemPoolImportFromShareableHandle(CUmemoryPool *pool, void *from, CUmemAllocationHandleType kind, unsigned long long flags) {
  *pool = POOL; EXPECT(from == (void *)0 && kind == 1 && flags == 0);
}
CUresult cuMemPoolExportPointer(CUmemPoolPtrExportData *data, CUdeviceptr address) {
  data->reserved[63] = 7; EXPECT(address == A);
}
CUresult cuMemAllocFromPoolAsync(CUdeviceptr *address, size_t bytes, CUmemoryPool pool, CUstream stream) {
  *address = A; EXPECT(bytes == 3 && pool == POOL && stream == STREAM);
}
CUresult cuMemFreeAsync(CUdeviceptr address, CUstream stream) { EXPECT(address == A && stream == STREAM); }

CUresult cuModuleLoadData(CUmodule *module, const void *image) {
  *module = (CUmodule)0x3f000; EXPECT(*(const char *)image == 'P');
}
CUresult cuModuleUnload(CUmodule module) { EXPECT(module == (CUmodule)0x3f000); }
CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
  *function = (CUfunction)0x4f000;
  EXPECT(module == (CUmodule)0x3f000 && name[0] == 'k' && !name[1]);
}
CUresult cuLaunchKernel(CUfunction f, unsigned int gx, unsigned int gy, unsigned int gz, unsigned int bx, unsigned int by, unsigned int bz, unsigned int shared, CUstream stream, void **parameters, void **extra) {
  EXPECT(f == (CUfunction)0x4f000 && gx == 1 && gy == 2 && gz == 3 && bx == 4 && by == 5 && bz == 6 && shared == 7 && stream == STREAM && **(int **)parameters == 42 && !extra);
}
CUresult cuLaunchHostFunc(CUstream stream, CUhostFn function, void *data) {
  function(data);
  EXPECT(stream == STREAM);
}

CUresult cuStreamBeginCapture_v2(CUstream stream, CUstreamCaptureMode mode) { EXPECT(stream == STREAM && mode == 1); }
CUresult cuStreamEndCapture(CUstream stream, CUgraph *graph) { *graph = GRAPH; EXPECT(stream == STREAM); }
CUresult cuStreamGetCaptureInfo_v2(CUstream stream, CUstreamCaptureStatus *status, cuuint64_t *id, CUgraph *graph, const CUgraphNode **nodes, size_t *count) {
  *status = stream == STREAM ? CU_STREAM_CAPTURE_STATUS_ACTIVE : CU_STREAM_CAPTURE_STATUS_NONE;
  *id = 11; EXPECT(!graph && !nodes && !count);
}
CUresult cuStreamGetCaptureInfo_v3(CUstream stream, CUstreamCaptureStatus *status, cuuint64_t *id, CUgraph *graph, const CUgraphNode **nodes, const CUgraphEdgeData **edges, size_t *count) {
  static const CUgraphNode list[] = {NODE, (CUgraphNode)0x7f008};
  static const CUgraphEdgeData data[] = {{0}, {1, 0, 1, {0}}};
  *status = stream == STREAM ? CU_STREAM_CAPTURE_STATUS_ACTIVE : CU_STREAM_CAPTURE_STATUS_NONE;
  *id = 11; *graph = GRAPH; *nodes = list; *edges = data; *count = 2; EXPECT(1);
}
CUresult cuStreamUpdateCaptureDependencies_v2(CUstream stream, CUgraphNode *nodes, const CUgraphEdgeData *edges, size_t count, unsigned int flags) {
  EXPECT(stream == STREAM && nodes[0] == NODE && edges[0].type == 1 && count == 1 && flags == 1);
}
CUresult cuStreamBeginCaptureToGraph(CUstream stream, CUgraph graph, const CUgraphNode *nodes, const CUgraphEdgeData *edges, size_t count, CUstreamCaptureMode mode) {
  EXPECT(stream == STREAM && graph == GRAPH && nodes[0] == NODE && edges[0].from_port == 0 && count == 1 && mode == 1);
}
CUresult cuGraphCreate(CUgraph *graph, unsigned int flags) { *graph = GRAPH; EXPECT(!flags); }
CUresult cuGraphClone(CUgraph *graph, CUgraph original) { *graph = GRAPH; EXPECT(original == GRAPH); }
CUresult cuGraphAddEmptyNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *after, size_t count) {
  *node = NODE; EXPECT(graph == GRAPH && count == 0);
}
CUresult cuGraphAddMemsetNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *after, size_t count, const CUDA_MEMSET_NODE_PARAMS *p, CUcontext context) {
  *node = NODE; EXPECT(graph == GRAPH && after[0] == NODE && count == 1 && p->dst == 0x7000000 && p->value == 9 && p->width == 3 && p->height == 1 && p->elementSize == 1 && context);
}
CUresult cuGraphGetNodes(CUgraph graph, CUgraphNode *nodes, size_t *count) {
  *count = 1;
  if (nodes) nodes[0] = NODE;
  EXPECT(graph == GRAPH);
}
CUresult cuGraphNodeGetDependencies_v2(CUgraphNode node, CUgraphNode *nodes, CUgraphEdgeData *edges, size_t *count) {
  size_t there = 5, room = *count;
  if (!nodes) { *count = there; EXPECT(node == NODE && !edges); }
  for (*count = 0; *count < room && *count < there; ++*count) {
    nodes[*count] = (CUgraphNode)(0x8f000 + 8 * *count);
    edges[*count].type = *count == 4;
  }
  EXPECT(node == NODE);
}
CUresult cuGraphInstantiateWithFlags(CUgraphExec *exec, CUgraph graph, unsigned long long flags) {
  *exec = (CUgraphExec)0x9f000; EXPECT(graph == GRAPH && !flags);
}
CUresult cuGraphLaunch(CUgraphExec exec, CUstream stream) { EXPECT(exec == (CUgraphExec)0x9f000 && stream == STREAM); }
CUresult cuGraphExecUpdate_v2(CUgraphExec exec, CUgraph graph, CUgraphExecUpdateResultInfo *info) {
  EXPECT(exec == (CUgraphExec)0x9f000 && graph == GRAPH && !info->errorNode);
}
CUresult cuGraphExecDestroy(CUgraphExec exec) { EXPECT(exec == (CUgraphExec)0x9f000); }
CUresult cuUserObjectRelease(CUuserObject object, unsigned int count) { EXPECT(object == (CUuserObject)0x5f000 && count == 1); }
CUresult cuGraphDestroy(CUgraph graph) { EXPECT(graph == GRAPH); }
CUresult cuUserObjectCreate(CUuserObject *object, void *data, CUhostFn destroy, unsigned int count, unsigned int flags) {
  *object = (CUuserObject)0x5f000; EXPECT(data && destroy && count == 1 && flags == 1);
}
CUresult cuGraphRetainUserObject(CUgraph graph, CUuserObject object, unsigned int count, unsigned int flags) {
  EXPECT(graph == GRAPH && object == (CUuserObject)0x5f000 && count == 1 && flags <= 1);
}
