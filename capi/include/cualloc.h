/* cualloc: a caching allocator of GPU memory. Written from capi/src by cbindgen: do not edit.
 *
 * Functions return CUALLOC_OK (0) or another code below; cualloc_last_error() has a text then. After a failure, every
 * value that a call returns through a pointer is 0. All functions may be called from any thread, with any context
 * current or none, and leave that as it is (except cualloc_make_current). Handles (cualloc_t *, cualloc_options_t *,
 * cualloc_pool_t *) are numbers, never dereferenced and never reused: a null handle is CUALLOC_INVALID_ARGUMENT, any
 * other value that is not a live handle CUALLOC_CLOSED. In a forked child of the process that made it, every use of a
 * handle is CUALLOC_CONTEXT_LOST. Addresses of device memory are uint64_t (CUdeviceptr); streams and contexts are
 * handles of the CUDA driver as void *. docs/clients/c.md describes building, installation and use. */


#ifndef CUALLOC_H
#define CUALLOC_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/**
 * The version of the interface: a number that grows with every addition. Functions are removed, or types changed, only
 * together with a new run-time name of the library.
 */
#define CUALLOC_ABI_VERSION 12

/**
 * For cualloc_dlpack_export: a DLManagedTensor, not a DLManagedTensorVersioned.
 */
#define CUALLOC_DLPACK_LEGACY (1 << 63)

/**
 * Requests of the capture whose id is cualloc_scope_t.capture, on all its streams.
 */
#define CUALLOC_SCOPE_CAPTURE 1

/**
 * Requests of the next capture in which the calling thread allocates, on all its streams.
 */
#define CUALLOC_SCOPE_NEXT_CAPTURE 2

/**
 * Requests on the stream cualloc_scope_t.stream, captured or not.
 */
#define CUALLOC_SCOPE_STREAM 3

/**
 * Requests on streams for which cualloc_scope_t.when returns true.
 */
#define CUALLOC_SCOPE_WHEN 4

/**
 * Requests of the calling thread, on all streams, captured or not.
 */
#define CUALLOC_SCOPE_THREAD 5

/**
 * The call succeeded.
 */
#define CUALLOC_OK 0

/**
 * Out of memory: every way to obtain more was tried.
 */
#define CUALLOC_OUT_OF_MEMORY 1

/**
 * An argument is null, 0, too large or an invalid setting. Nothing was done.
 */
#define CUALLOC_INVALID_ARGUMENT 2

/**
 * The address does not belong to this allocator. Nothing was done.
 */
#define CUALLOC_NOT_OURS 3

/**
 * The address belongs to this allocator, but no live block begins there: the block was freed before, or the address is
 * inside a block where its first byte is required. Nothing was done.
 */
#define CUALLOC_NOT_LIVE 4

/**
 * The stream, or a stream that the call would have to wait for, is being captured into a graph, and no scope of a
 * graph pool matches. Nothing was done.
 */
#define CUALLOC_CAPTURING 5

/**
 * The handle does not belong to a live allocator (or live options, or a live graph pool): it was destroyed or never
 * existed. Or the process that shares a block has ended.
 */
#define CUALLOC_CLOSED 6

/**
 * There is no usable CUDA driver.
 */
#define CUALLOC_NO_DRIVER 7

/**
 * A CUDA driver call failed; the text names it.
 */
#define CUALLOC_DRIVER 8

/**
 * The context is gone or broken, the process is a forked child of the one that created the allocator, or the process
 * is exiting. Device memory is left alone.
 */
#define CUALLOC_CONTEXT_LOST 9

/**
 * The device, or this build of the library, does not support the request.
 */
#define CUALLOC_UNSUPPORTED 10

/**
 * A bug in the library: the call stopped half-way. The allocator should not be used any more.
 */
#define CUALLOC_PANIC 11

/**
 * Blocks, guards or a call on another thread prevent the call, or the thread is in a predicate of a scope. Nothing was
 * done.
 */
#define CUALLOC_BUSY 12

/**
 * The memory is suspended, or, for a resume, is not. Nothing was done.
 */
#define CUALLOC_SUSPENDED 13

/**
 * A file could not be created or written, or another process not be reached; the text says why.
 */
#define CUALLOC_IO 14

/**
 * The segments are about to be unmapped, and no request can obtain their memory.
 */
#define CUALLOC_SEGMENT_DEATH 0

/**
 * The segments have been mapped, and no block has been allocated there yet, unless they are restored after a
 * suspension.
 */
#define CUALLOC_SEGMENT_BIRTH 1

/**
 * The size of a buffer for any token, in bytes.
 */
#define CUALLOC_TOKEN_BYTES 256

/**
 * For cualloc_share: fail if the export exposes bytes outside the block.
 */
#define CUALLOC_SHARE_REFUSE_FOREIGN 1

/**
 * Memory is plentiful: the allocator saves driver calls.
 */
#define CUALLOC_MEMORY_PLENTIFUL 0

/**
 * Memory counts as scarce because of profile=dense: the allocator saves bytes.
 */
#define CUALLOC_MEMORY_SCARCE_PROFILE 1

/**
 * Memory is scarce because the limit is near.
 */
#define CUALLOC_MEMORY_SCARCE_LIMIT 2

/**
 * Memory is scarce because the device has little free memory beyond the headroom.
 */
#define CUALLOC_MEMORY_SCARCE_DEVICE 3

/**
 * Memory is scarce because the driver refused an allocation.
 */
#define CUALLOC_MEMORY_SCARCE_REFUSED 4

/**
 * All memory of the allocator; `which` is ignored.
 */
#define CUALLOC_SELECT_ALL 0

/**
 * The memory of a graph pool; `which` is its handle (cualloc_pool_create).
 */
#define CUALLOC_SELECT_POOL 2

/**
 * The memory of all graph pools and ranges with a tag (cualloc_pool_create_tagged, cualloc_torch_pool_tag,
 * cualloc_range_create); `which` is the zero-terminated text of the tag.
 */
#define CUALLOC_SELECT_TAG 3

/**
 * Contents are lost: they are undefined after the resume until they are written.
 */
#define CUALLOC_CONTENTS_DROP 0

/**
 * Contents are kept in page-locked host memory, which is cached for the next suspend until a trim.
 */
#define CUALLOC_CONTENTS_PINNED 1

/**
 * Contents are kept in plain host memory.
 */
#define CUALLOC_CONTENTS_HOST 2

/**
 * Result of cualloc_torch_pool_state: the scope was ended, or never begun.
 */
#define CUALLOC_TORCH_POOL_ENDED 0

/**
 * Result of cualloc_torch_pool_state: the scope was not ended, and its capture is over as far as is known.
 */
#define CUALLOC_TORCH_POOL_OPEN 1

/**
 * Result of cualloc_torch_pool_state: the capture of the scope is still in progress.
 */
#define CUALLOC_TORCH_POOL_GOES_ON 2

/**
 * State of a block: a caller owns it.
 */
#define CUALLOC_BLOCK_LIVE 0

/**
 * State of a block: free, and work in flight may still use it.
 */
#define CUALLOC_BLOCK_PENDING 1

/**
 * State of a block: free.
 */
#define CUALLOC_BLOCK_FREE 2

/**
 * State of a block: its bytes are part of a live block at another address.
 */
#define CUALLOC_BLOCK_ALIASED 3

/**
 * State of a block: a call of another thread works on it.
 */
#define CUALLOC_BLOCK_BUSY 4

/**
 * The blocks of a graph pool at some time. A handle, like cualloc_t.
 */
typedef struct cualloc_checkpoint_t cualloc_checkpoint_t;

/**
 * A block of another process. A handle, like cualloc_t.
 */
typedef struct cualloc_import_t cualloc_import_t;

/**
 * Options for a new allocator. A handle, like cualloc_t.
 */
typedef struct cualloc_options_t cualloc_options_t;

/**
 * An owner of memory. A handle, like cualloc_t.
 */
typedef struct cualloc_owner_t cualloc_owner_t;

/**
 * A graph pool. A handle, like cualloc_t.
 */
typedef struct cualloc_pool_t cualloc_pool_t;

/**
 * A growable range. A handle, like cualloc_t.
 */
typedef struct cualloc_range_t cualloc_range_t;

/**
 * An allocator. A handle: a number that is never dereferenced and never reused, so that an invalid one is detected.
 */
typedef struct cualloc_t cualloc_t;

/**
 * Called once for each block of a checkpoint, with the data of the call, the address of the block's first byte, and
 * its size in bytes. It must not throw. It may call the library.
 */
typedef void (*cualloc_checkpoint_block_t)(void *data, uint64_t address, uint64_t bytes);

/**
 * Releases memory: called once, with the data that it was registered with, on any thread. It must not throw.
 */
typedef void (*cualloc_release_t)(void *data);

/**
 * A quantity over time, in bytes or as a number, depending on the field.
 */
typedef struct cualloc_counter_t {
  /**
   * The current value.
   */
  uint64_t current;
  /**
   * The largest value since the start, or since cualloc_reset_peaks.
   */
  uint64_t peak;
  /**
   * The sum of everything ever added. The sum of everything removed is total minus current.
   */
  uint64_t total;
} cualloc_counter_t;

/**
 * Statistics of one kind of block.
 */
typedef struct cualloc_pool_stats_t {
  /**
   * Requested bytes of live blocks.
   */
  struct cualloc_counter_t requested;
  /**
   * Bytes of live blocks, after rounding.
   */
  struct cualloc_counter_t allocated;
  /**
   * Bytes reserved from the driver.
   */
  struct cualloc_counter_t reserved;
  /**
   * Bytes of live blocks, and of freed ones that streams other than their own still use.
   */
  struct cualloc_counter_t active;
  /**
   * Number of live blocks.
   */
  struct cualloc_counter_t blocks;
  /**
   * Number of pieces of memory reserved from the driver (segments or physical handles).
   */
  struct cualloc_counter_t segments;
} cualloc_pool_stats_t;

/**
 * Statistics of an allocator, a consistent snapshot. Set struct_size to sizeof(cualloc_stats_t) before the call. Later
 * versions of the library add fields at the end: a smaller structure of the caller gets the fields that it has, and in
 * a larger one the fields that the library does not know are left untouched.
 *
 * Peaks of requested, active and blocks can be upper bounds; those of allocated and reserved are exact.
 */
typedef struct cualloc_stats_t {
  /**
   * Size of this structure in bytes, as the caller knows it. Not changed.
   */
  size_t struct_size;
  /**
   * Requested bytes of live blocks.
   */
  struct cualloc_counter_t requested;
  /**
   * Bytes of live blocks, after rounding.
   */
  struct cualloc_counter_t allocated;
  /**
   * Bytes reserved from the driver.
   */
  struct cualloc_counter_t reserved;
  /**
   * Bytes of live blocks, and of freed ones that streams other than their own still use.
   */
  struct cualloc_counter_t active;
  /**
   * Number of live blocks.
   */
  struct cualloc_counter_t blocks;
  /**
   * Number of pieces of memory reserved from the driver (segments or physical handles).
   */
  struct cualloc_counter_t segments;
  /**
   * Allocations that failed for lack of memory.
   */
  uint64_t ooms;
  /**
   * Driver allocations that failed for lack of memory and were tried again after memory was released.
   */
  uint64_t retries;
  /**
   * Driver calls so far, by all users of this library in the process.
   */
  uint64_t driver_calls;
  /**
   * Allocations served from cached memory.
   */
  uint64_t hits;
  /**
   * Allocations that needed memory from the driver, or failed.
   */
  uint64_t misses;
  /**
   * The limit on bytes reserved from the driver, UINT64_MAX if there is none.
   */
  uint64_t limit;
  /**
   * Bytes of free memory, including memory that pending work still uses.
   */
  uint64_t free_bytes;
  /**
   * Size of the largest free piece, in bytes.
   */
  uint64_t largest_free;
  /**
   * Number of streams that the allocator currently knows.
   */
  uint64_t streams;
  /**
   * The figures of small blocks. Which blocks count as small depends on the policy.
   */
  struct cualloc_pool_stats_t small_pool;
  /**
   * The figures of all other blocks.
   */
  struct cualloc_pool_stats_t large_pool;
  /**
   * Bytes that graph pools reserve from the driver, including released pools that still have memory. They count
   * against the limit and in held, but not in reserved.
   */
  uint64_t graph_pools;
  /**
   * Bytes of the device that growth leaves free.
   */
  uint64_t headroom;
  /**
   * Whether the packed policy currently saves driver calls or bytes, and why: CUALLOC_MEMORY_PLENTIFUL or one of
   * CUALLOC_MEMORY_SCARCE_*.
   */
  uint64_t regime;
  /**
   * Bytes that growable ranges reserve from the driver, including decommitted ones. They count against the limit and
   * in held, but not in reserved.
   */
  uint64_t ranges;
  /**
   * The part of ranges that is decommitted.
   */
  uint64_t ranges_leaving;
  /**
   * The figures of graph pools, which no figure above except graph_pools includes.
   */
  struct cualloc_pool_stats_t pooled;
  /**
   * Bytes held from the driver for any purpose: reserved, graph_pools and ranges.
   */
  struct cualloc_counter_t held;
} cualloc_stats_t;

/**
 * A predicate: whether requests on a stream go to a pool. Receives the data of its scope. Called by allocating
 * threads, possibly by several at the same time, without any lock held: for each request outside of captures, and
 * within a capture once per stream and thread while the set of open scopes is unchanged. It must not throw. It may
 * call the library, but allocating from an allocator that has open scopes fails with CUALLOC_BUSY.
 */
typedef bool (*cualloc_when_t)(void *data, void *stream);

/**
 * Called once with the scope's data, after the last call of the scope's predicate.
 */
typedef void (*cualloc_done_t)(void *data);

/**
 * Selects the requests that go to a pool. Set struct_size to sizeof(cualloc_scope_t), set kind, and set all other
 * fields to 0 unless the kind uses them. Later versions of the library add fields at the end.
 */
typedef struct cualloc_scope_t {
  /**
   * Size of this structure in bytes, as the caller knows it.
   */
  size_t struct_size;
  /**
   * The kind of scope: CUALLOC_SCOPE_CAPTURE, ...
   */
  int32_t kind;
  /**
   * The id of a capture, as returned by cuStreamGetCaptureInfo.
   */
  uint64_t capture;
  /**
   * A stream, as passed to cualloc_alloc.
   */
  void *stream;
  /**
   * The predicate.
   */
  cualloc_when_t when;
  /**
   * Null, or the function to call when the predicate is no longer needed.
   */
  cualloc_done_t done;
  /**
   * Passed to both functions.
   */
  void *data;
} cualloc_scope_t;

/**
 * Statistics of a graph pool. Set struct_size to sizeof(cualloc_footprint_t) before the call; the structure grows as
 * cualloc_stats_t does.
 */
typedef struct cualloc_footprint_t {
  /**
   * Size of this structure in bytes, as the caller knows it. Not changed.
   */
  size_t struct_size;
  /**
   * Bytes of live blocks, after rounding.
   */
  uint64_t live;
  /**
   * Number of live blocks.
   */
  uint64_t blocks;
  /**
   * Bytes of free memory.
   */
  uint64_t free_bytes;
  /**
   * The largest number of bytes that were live at the same time.
   */
  uint64_t peak;
  /**
   * Bytes reserved from the driver.
   */
  uint64_t physical;
  /**
   * Number of graphs, executables made of them, and launches that may use the pool's addresses.
   */
  uint64_t leases;
} cualloc_footprint_t;

/**
 * Options of a range. Set struct_size to sizeof(cualloc_range_options_t), and all other fields to 0 unless they are
 * used. Later versions of the library add fields at the end.
 */
typedef struct cualloc_range_options_t {
  /**
   * Size of this structure in bytes, as the caller knows it.
   */
  size_t struct_size;
  /**
   * Bytes that are committed together: a power of two from 2 MiB to 64 MiB; 0 means 2 MiB.
   */
  uint64_t granule;
  /**
   * Number of equal parts that are committed together; 0 means 1. All sizes, offsets and bits count one stripe.
   */
  uint64_t stripes;
  /**
   * Bytes from the start of one stripe to that of the next, in whole granules; 0 for stripes without a gap.
   */
  uint64_t stripe_stride;
  /**
   * Null, or a zero-terminated text: the tag by which the memory is suspended (CUALLOC_SELECT_TAG), and named in
   * reports.
   */
  const char *tag;
} cualloc_range_options_t;

/**
 * Sizes of a range in bytes, over all stripes. Set struct_size to sizeof(cualloc_range_stats_t) before the call; the
 * structure grows as cualloc_stats_t does.
 */
typedef struct cualloc_range_stats_t {
  /**
   * Size of this structure in bytes, as the caller knows it. Not changed.
   */
  size_t struct_size;
  /**
   * Bytes of addresses, with memory or without.
   */
  uint64_t reserved;
  /**
   * Bytes of committed memory.
   */
  uint64_t committed;
  /**
   * Bytes of decommitted memory that has not left the range.
   */
  uint64_t leaving;
  /**
   * Bytes of a granule in one stripe.
   */
  uint64_t granule;
} cualloc_range_stats_t;

/**
 * A function that frees memory which the program can do without. It receives the data of its registration and the
 * number of bytes that a request lacks.
 */
typedef void (*cualloc_pressure_t)(void *data, uint64_t bytes);

/**
 * Returns the current place in the program: a context (cualloc_context) whose name is a stack, outermost function
 * first, separated by semicolons, or 0 for the native stack of the thread. Receives the data passed to
 * cualloc_set_stack_source.
 *
 * Called by threads that have just been given a block, without any lock held, possibly by several at the same time. It
 * must not throw. Allocations made inside it are not sampled.
 */
typedef uint32_t (*cualloc_stack_source_t)(void *data);

/**
 * Physical memory at its address, as a segment hook receives it.
 */
typedef struct cualloc_mapped_segment_t {
  /**
   * A number that no other segment of the allocator ever has, not even a later one at the same address.
   */
  uint64_t id;
  /**
   * Address of the first byte.
   */
  uint64_t address;
  /**
   * Size in bytes.
   */
  uint64_t bytes;
  /**
   * The number of the graph pool that it belongs to (cualloc_pool_number); 0 if it belongs to none.
   */
  uint64_t pool;
} cualloc_mapped_segment_t;

/**
 * A segment hook: receives its data, CUALLOC_SEGMENT_BIRTH or CUALLOC_SEGMENT_DEATH, and the segments, valid during the
 * call. Called without any lock held, by the threads whose calls change segments, possibly by several at the same time.
 * It must not throw. It may call the library, except for cualloc_add_peer; calls that suspend or resume memory fail
 * there with CUALLOC_BUSY.
 */
typedef void (*cualloc_segment_hook_t)(void *data,
                                       int32_t change,
                                       const struct cualloc_mapped_segment_t *segments,
                                       size_t count);

/**
 * Allocates a segment: device memory of this many bytes, a multiple of 2 MiB, for use on a stream. Returns its
 * address, a multiple of 512, or 0 if there is no memory. Receives the data of its source. Called without any lock
 * held; it must not throw, and may call the library.
 */
typedef uint64_t (*cualloc_segment_alloc_t)(void *data, uint64_t bytes, void *stream);

/**
 * Frees a segment, which no work uses any more. Otherwise as cualloc_segment_alloc_t.
 */
typedef void (*cualloc_segment_free_t)(void *data, uint64_t address, uint64_t bytes);

/**
 * Where the segments of a pool come from. Set struct_size to sizeof(cualloc_source_t). Later versions of the library
 * add fields at the end.
 */
typedef struct cualloc_source_t {
  /**
   * Size of this structure in bytes, as the caller knows it.
   */
  size_t struct_size;
  /**
   * Allocates a segment.
   */
  cualloc_segment_alloc_t alloc;
  /**
   * Frees a segment.
   */
  cualloc_segment_free_t free_segment;
  /**
   * Null, or the function to call once the source is no longer used.
   */
  cualloc_done_t done;
  /**
   * Passed to all three functions.
   */
  void *data;
} cualloc_source_t;

/**
 * A block of a segment. Later versions of the library add fields at the end.
 */
typedef struct cualloc_block_t {
  /**
   * Address of the first byte.
   */
  uint64_t address;
  /**
   * Size in bytes.
   */
  uint64_t bytes;
  /**
   * Requested bytes; 0 unless it is live.
   */
  uint64_t requested;
  /**
   * The driver's id of the stream that owns it or owned it last; 0 if none is known.
   */
  uint64_t stream;
  /**
   * CUALLOC_BLOCK_LIVE, ...
   */
  int32_t state;
  /**
   * The number of the graph pool that it belongs to (cualloc_pool_number); 0 if it belongs to none.
   */
  uint64_t pool;
} cualloc_block_t;

/**
 * PyTorch's id of a pool, passed by value (MempoolId_t).
 */
typedef struct cualloc_torch_pool_id_t {
  /**
   * Not 0 for a pool that a capture created.
   */
  uint64_t first;
  /**
   * Not 0 for a pool that a program created.
   */
  uint64_t second;
} cualloc_torch_pool_id_t;

/**
 * A segment of the driver, or a contiguous run of mapped handles. Later versions of the library add fields at the end.
 */
typedef struct cualloc_segment_t {
  /**
   * Address of the first byte.
   */
  uint64_t address;
  /**
   * Size in bytes.
   */
  uint64_t bytes;
  /**
   * Number of blocks, whose visits follow.
   */
  uint64_t blocks;
  /**
   * Whether it belongs to the small pool.
   */
  bool small;
  /**
   * Whether it is a second mapping of bytes of other segments, so that its size does not count as reserved. Only its
   * live blocks are visited.
   */
  bool view;
} cualloc_segment_t;

/**
 * Called for each segment, before its blocks. It must not throw. It may call the library.
 */
typedef void (*cualloc_visit_segment_t)(void *data, const struct cualloc_segment_t *segment);

/**
 * Called for each block of the last visited segment, by ascending address. It must not throw. It may call the library.
 */
typedef void (*cualloc_visit_block_t)(void *data, const struct cualloc_block_t *block);

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

/**
 * Returns the version of this library's interface: CUALLOC_ABI_VERSION of the header it was built with. A program
 * compiled with a larger number may use functions that are missing here.
 *
 * May be called from any thread at any time.
 */
uint32_t cualloc_abi_version(void);

/**
 * Returns why the calling thread's last failed call failed: a zero-terminated UTF-8 text of at most 4095 bytes. Empty
 * before the first failure; never null; successful calls do not change it. The text is overwritten by the thread's
 * next failing call and is invalid once the thread has ended. It is meant for people: programs should test the code.
 *
 * May be called from any thread at any time. Each thread has its own text.
 */
const char *cualloc_last_error(void);

/**
 * Returns the code of the calling thread's last failed call; CUALLOC_OK before the first failure. Successful calls do
 * not change it. Useful after functions that do not return a code.
 *
 * May be called from any thread at any time. Each thread has its own code.
 */
int32_t cualloc_last_code(void);

/**
 * Allocates bytes (at least 1) of device memory for use on a stream (a CUstream or cudaStream_t). Writes the address
 * of the first byte, a multiple of 512, to *out.
 *
 * Work of that stream may use the memory immediately. Another stream that uses it must itself wait for this one, and
 * the use must be reported by cualloc_record_stream. Null and 1 are the legacy default stream of the allocator's
 * context; 2 is the calling thread's own default stream there, whatever context is current. Any other stream must be
 * retired with cualloc_retire_stream before it is destroyed.
 *
 * Errors: CUALLOC_OUT_OF_MEMORY once every way to obtain memory was tried (the text is a full report);
 * CUALLOC_INVALID_ARGUMENT for a null handle or out, for 0 bytes or more than any device has, or for a stream of
 * another device; CUALLOC_CAPTURING; CUALLOC_BUSY in a predicate of a scope, if the allocator has open scopes;
 * CUALLOC_CLOSED; CUALLOC_CONTEXT_LOST; CUALLOC_DRIVER. *out is then 0, and no memory is leaked.
 *
 * May be called from any thread, with any current context.
 *
 * The caller guarantees:
 * `stream` is a live stream, or null, 1 or 2; `out` is null or writable.
 */
int32_t cualloc_alloc(struct cualloc_t *allocator,
                      size_t bytes,
                      void *stream,
                      uint64_t *out);

/**
 * Like cualloc_alloc, at an address that is a multiple of alignment: a power of two, at most 2 MiB (2097152).
 *
 * Errors: as cualloc_alloc, and CUALLOC_INVALID_ARGUMENT for an unsupported alignment.
 *
 * May be called from any thread, with any current context.
 *
 * The caller guarantees:
 * As cualloc_alloc.
 */
int32_t cualloc_alloc_aligned(struct cualloc_t *allocator,
                              size_t bytes,
                              size_t alignment,
                              void *stream,
                              uint64_t *out);

/**
 * Frees the block that begins at ptr; an address of 0 is ignored. Never waits: work submitted to the block's stream,
 * or to a recorded stream, before this call may still use the block. The stream of the block, and every stream
 * recorded on it, must be alive or retired.
 *
 * Errors: CUALLOC_NOT_OURS, CUALLOC_NOT_LIVE (also a second free), CUALLOC_CAPTURING, CUALLOC_INVALID_ARGUMENT for a
 * null handle, CUALLOC_CLOSED, CUALLOC_CONTEXT_LOST, CUALLOC_DRIVER. After an error nothing has changed.
 *
 * May be called from any thread, with any current context.
 *
 * The caller guarantees:
 * No work that uses the block is submitted to the device after this call.
 */
int32_t cualloc_free(struct cualloc_t *allocator,
                     uint64_t ptr);

/**
 * Frees a block whose last use was on the given stream: records that stream's use, then frees the block as
 * cualloc_free does. The memory is reused only after the work submitted to the stream so far has completed.
 *
 * Errors: as cualloc_free and cualloc_record_stream. If the free fails after the use was recorded, the block stays
 * live and the use stays recorded.
 *
 * May be called from any thread, with any current context.
 *
 * The caller guarantees:
 * As cualloc_free; `stream` is a live stream, or null, 1 or 2.
 */
int32_t cualloc_free_on(struct cualloc_t *allocator,
                        uint64_t ptr,
                        void *stream);

/**
 * Records that another stream uses the block that contains ptr (any address inside it). Once freed, the block is
 * reused only after the work submitted to that stream before the free has completed. In a capture that a graph pool
 * serves, the use takes effect at the end of the capture.
 *
 * Errors: CUALLOC_NOT_OURS, CUALLOC_NOT_LIVE, CUALLOC_CAPTURING in any other capture, CUALLOC_BUSY for a capturing
 * stream in a predicate of a scope, CUALLOC_INVALID_ARGUMENT for a null handle, CUALLOC_CLOSED, CUALLOC_CONTEXT_LOST,
 * CUALLOC_DRIVER.
 *
 * May be called from any thread, with any current context.
 *
 * The caller guarantees:
 * `stream` is a live stream of any device, or null, 1 or 2.
 */
int32_t cualloc_record_stream(struct cualloc_t *allocator,
                              uint64_t ptr,
                              void *stream);

/**
 * Adopts a stream: the caller promises that it lives until it is retired, so the allocator may use its handle in calls
 * that do not pass it. Other streams can then reuse memory freed on it sooner. Adoption is an optimisation, never
 * needed for correctness. Null and 1 are always adopted.
 *
 * Errors: CUALLOC_CAPTURING; CUALLOC_INVALID_ARGUMENT for a null handle or a stream of another context than the
 * allocator's; CUALLOC_UNSUPPORTED if stream is 2 (the per-thread default stream); CUALLOC_CLOSED;
 * CUALLOC_CONTEXT_LOST; CUALLOC_DRIVER.
 *
 * May be called from any thread, with any current context.
 *
 * The caller guarantees:
 * `stream` is a live stream, or null or 1, and lives until cualloc_retire_stream has succeeded for it or the allocator
 * is destroyed.
 */
int32_t cualloc_adopt_stream(struct cualloc_t *allocator,
                             void *stream);

/**
 * Retires a stream, so that it can be destroyed: it gets no more work that uses memory of this allocator. Must be
 * called while the stream is still alive, for every allocator that it was passed to. Live blocks of the stream stay
 * valid and can be freed later. For a stream that this allocator does not know, returns CUALLOC_OK.
 *
 * Errors: CUALLOC_CAPTURING; CUALLOC_INVALID_ARGUMENT for a null handle, and for 2 if only another thread's default
 * stream is known; CUALLOC_CLOSED; CUALLOC_CONTEXT_LOST; CUALLOC_DRIVER. After an error nothing has changed, and the
 * stream must not be destroyed yet.
 *
 * May be called from any thread, with any current context.
 *
 * The caller guarantees:
 * `stream` is a live stream, or null, 1 or 2.
 */
int32_t cualloc_retire_stream(struct cualloc_t *allocator,
                              void *stream);

/**
 * Waits until all work submitted to a stream so far is complete. Like cuStreamSynchronize, except that the stream's
 * context need not be current.
 *
 * Errors: CUALLOC_CAPTURING while the stream is being captured, or, for null and 1, while a stream that synchronises
 * with the legacy stream is being captured (the capture stays valid unless it begins during the call);
 * CUALLOC_INVALID_ARGUMENT for a null handle; CUALLOC_CLOSED; CUALLOC_CONTEXT_LOST and CUALLOC_DRIVER, also for errors
 * of the work itself.
 *
 * May be called from any thread.
 *
 * The caller guarantees:
 * `stream` is a live stream of the allocator's context, or null, 1 or 2.
 */
int32_t cualloc_stream_synchronize(struct cualloc_t *allocator,
                                   void *stream);

/**
 * Makes all work submitted to a stream from now on wait, on the device, for all work submitted to another stream so
 * far.
 *
 * Errors: CUALLOC_CAPTURING if only one of the two is being captured; CUALLOC_INVALID_ARGUMENT for a null handle;
 * CUALLOC_CLOSED; CUALLOC_CONTEXT_LOST; CUALLOC_DRIVER.
 *
 * May be called from any thread, with any current context.
 *
 * The caller guarantees:
 * Both are live streams, or null, 1 or 2.
 */
int32_t cualloc_stream_wait(struct cualloc_t *allocator,
                            void *stream,
                            void *other);

/**
 * Copies bytes between two addresses, of device or host memory, in the order of a stream; returns before the copy is
 * complete.
 *
 * Errors: CUALLOC_INVALID_ARGUMENT for a null handle; CUALLOC_CLOSED; CUALLOC_CONTEXT_LOST; CUALLOC_DRIVER.
 *
 * May be called from any thread, with any current context.
 *
 * The caller guarantees:
 * `stream` is a live stream, or null, 1 or 2. Both ranges are accessible on the allocator's device or the host until
 * the copy is complete, and do not overlap. Until then no other code writes to them, or reads the one that is written.
 */
int32_t cualloc_copy(struct cualloc_t *allocator,
                     uint64_t to,
                     uint64_t from,
                     size_t bytes,
                     void *stream);

/**
 * Writes the usable size of the live block that begins at ptr, in bytes: the requested size, rounded up.
 *
 * Errors: CUALLOC_NOT_OURS, CUALLOC_NOT_LIVE (also for an address inside a block), CUALLOC_INVALID_ARGUMENT for a null
 * handle or out, CUALLOC_CLOSED, CUALLOC_CONTEXT_LOST. *out is then 0.
 *
 * May be called from any thread.
 *
 * The caller guarantees:
 * `out` is null or writable.
 */
int32_t cualloc_usable_size(struct cualloc_t *allocator,
                            uint64_t ptr,
                            uint64_t *out);

/**
 * Writes the address of the first byte and the usable size of the live block that contains ptr (any address inside
 * it).
 *
 * Errors: CUALLOC_NOT_OURS, CUALLOC_NOT_LIVE, CUALLOC_INVALID_ARGUMENT for a null handle, base or bytes,
 * CUALLOC_CLOSED, CUALLOC_CONTEXT_LOST. *base and *bytes are then 0.
 *
 * May be called from any thread.
 *
 * The caller guarantees:
 * `base` and `bytes` are null or writable.
 */
int32_t cualloc_base(struct cualloc_t *allocator,
                     uint64_t ptr,
                     uint64_t *base,
                     uint64_t *bytes);

/**
 * Creates a checkpoint of a graph pool: the blocks that are live in it now. cualloc_pool_restore returns to it.
 *
 * Errors: CUALLOC_INVALID_ARGUMENT for a null pool or out; CUALLOC_CLOSED for a pool that was released;
 * CUALLOC_CONTEXT_LOST. *out is then null.
 *
 * May be called from any thread, also during a capture.
 *
 * The caller guarantees:
 * `out` is null or writable.
 */
int32_t cualloc_pool_checkpoint(struct cualloc_pool_t *pool,
                                struct cualloc_checkpoint_t **out);

/**
 * Calls a function for each block of a checkpoint, by ascending address.
 *
 * Errors: CUALLOC_INVALID_ARGUMENT for a null checkpoint or function; CUALLOC_CLOSED for a checkpoint that was freed;
 * CUALLOC_CONTEXT_LOST in a forked child.
 *
 * May be called from any thread. No lock is held while the function runs.
 *
 * The caller guarantees:
 * It is safe to call `visit` with `data`.
 */
int32_t cualloc_checkpoint_visit(const struct cualloc_checkpoint_t *checkpoint,
                                 cualloc_checkpoint_block_t visit,
                                 void *data);

/**
 * Makes exactly the blocks of a checkpoint live in its pool, each at its address. Blocks that are live now but not in
 * the checkpoint cease to be live: they must not be freed any more, because a later block may have the same address.
 * Blocks of the checkpoint that are not live now become live again, and are freed with cualloc_free. Checkpoints of a
 * pool may be restored in any order and any number of times.
 *
 * Does not wait for device work: memory of blocks that cease to be live is reused after the work that uses it has
 * ended, as after a free.
 *
 * Errors: CUALLOC_BUSY while a capture in progress or a call of another thread uses the pool; CUALLOC_SUSPENDED for a
 * suspended pool; CUALLOC_INVALID_ARGUMENT for a null pool or checkpoint, a checkpoint of another pool, or one whose
 * memory the pool has returned since; CUALLOC_CLOSED for a pool that was released or a checkpoint that was freed;
 * CUALLOC_CONTEXT_LOST; CUALLOC_DRIVER. After an error nothing has changed.
 *
 * May be called from any thread.
 *
 * The caller guarantees:
 * Blocks that are live now but not in the checkpoint are used only by graphs that were captured with them.
 */
int32_t cualloc_pool_restore(struct cualloc_pool_t *pool,
                             const struct cualloc_checkpoint_t *checkpoint);

/**
 * Frees a checkpoint. Blocks are not affected. Null is ignored.
 *
 * Errors: CUALLOC_CLOSED for a checkpoint that was freed before; CUALLOC_CONTEXT_LOST in a forked child.
 *
 * May be called from any thread.
 */
int32_t cualloc_checkpoint_free(struct cualloc_checkpoint_t *checkpoint);

/**
 * Creates an owner of memory. release is called with data once this owner and all tensors exported with it
 * (cualloc_dlpack_export) are released. For a block of a shared allocator (cualloc_shared), release can be
 * cualloc_torch_delete, and data the block's address.
 *
 * Errors: CUALLOC_INVALID_ARGUMENT for a null release or out; CUALLOC_CONTEXT_LOST in a forked child. *out is then
 * null, and release is not called.
 *
 * May be called from any thread.
 *
 * The caller guarantees:
 * `release` may be called with `data`, from any thread. `out` is null or writable.
 */
int32_t cualloc_owner_create(cualloc_release_t release,
                             void *data,
                             struct cualloc_owner_t **out);

/**
 * Releases an owner. Tensors exported with it keep the memory.
 *
 * Errors: CUALLOC_INVALID_ARGUMENT for null; CUALLOC_CLOSED for an owner that was released before;
 * CUALLOC_CONTEXT_LOST in a forked child.
 *
 * May be called from any thread.
 */
int32_t cualloc_owner_release(struct cualloc_owner_t *owner);

/**
 * Exports memory as a DLPack tensor: writes to *out a DLManagedTensorVersioned, or, if flags has the bit
 * CUALLOC_DLPACK_LEGACY, a DLManagedTensor. tensor points to a DLTensor of dlpack.h, which is copied with its shape
 * and strides. The other bits of flags are those of DLManagedTensorVersioned. The consumer calls the tensor's
 * deleter, on any thread. The function orders no streams (cualloc_stream_wait) and records no uses
 * (cualloc_record_stream).
 *
 * Errors: CUALLOC_INVALID_ARGUMENT for a null argument, a negative number of dimensions, or dimensions without a
 * shape; CUALLOC_CLOSED for an owner that was released; CUALLOC_CONTEXT_LOST in a forked child. *out is then null.
 *
 * May be called from any thread.
 *
 * The caller guarantees:
 * `tensor` is null or points to a DLTensor of the owner's memory, whose shape and strides have ndim numbers or are
 * null. `out` is null or writable.
 */
int32_t cualloc_dlpack_export(struct cualloc_owner_t *owner,
                              const void *tensor,
                              uint64_t flags,
                              void **out);

/**
 * Returns the destructor (PyCapsule_Destructor) of Python capsules that hold tensors of cualloc_dlpack_export: it
 * deletes a tensor that no consumer has taken over, runs no Python code, and leaves a pending exception as it is. The
 * arguments are the functions PyCapsule_IsValid and PyCapsule_GetPointer of the process; only the first call uses
 * them. Null if one of them is null.
 *
 * May be called from any thread.
 *
 * The caller guarantees:
 * Both are null, or the functions of these names.
 */
void (*cualloc_dlpack_capsule_destructor(int32_t (*is_valid)(void*, const char*),
                                         void *(*pointer)(void*, const char*)))(void *capsule);

/**
 * Returns new, empty options to be freed with cualloc_options_free; null on failure.
 *
 * May be called from any thread.
 */
struct cualloc_options_t *cualloc_options_new(void);

/**
 * Frees options. Allocators created with them are not affected. Null, or options freed before, are ignored.
 *
 * May be called from any thread.
 */
void cualloc_options_free(struct cualloc_options_t *options);

/**
 * Sets one option; the last value set for a key wins.
 *
 * The keys are those of CUALLOC_CONFIG: policy (auto, packed, classic), limit (bytes, with K, M, G or T, or a share of
 * the device such as 80%), headroom (bytes), waits (scarce, always, never), profile (default, dense), peers (1+3),
 * decay (10s), keep (20%), captures (watched, never), debug (off, or guard, poison, quarantine:SIZE, leaks, joined by
 * +). With the prefix tune.: views, capture_checks, unretired_streams, self_test (on, off), checks (context, none),
 * handle and host_cache (bytes), nvtx (auto, off). One more key is device: cuda (the default), or sim, a simulated device of 80 GiB
 * in host memory, if the library was built with the feature sim. tune.checks defaults to none, and
 * tune.unretired_streams is on in shared allocators. cualloc_create rejects settings that contradict each other.
 *
 * Errors: CUALLOC_INVALID_ARGUMENT for null, an unknown key, a value that the key does not accept, or text that is not
 * UTF-8; CUALLOC_CLOSED for options that were freed; CUALLOC_UNSUPPORTED for device=sim without the simulator.
 *
 * May be called from any thread.
 *
 * The caller guarantees:
 * `key` and `value` are null or zero-terminated.
 */
int32_t cualloc_options_set(struct cualloc_options_t *options,
                            const char *key,
                            const char *value);

/**
 * Creates an allocator for a device, numbered from 0 as CUDA_VISIBLE_DEVICES orders them, on the device's primary
 * context, which the CUDA runtime uses too. Loads the driver on first use. options may be null. Settings that options
 * do not set come from the environment variable CUALLOC_CONFIG.
 *
 * Errors: CUALLOC_INVALID_ARGUMENT for a null out, a device that does not exist, or settings that contradict each
 * other; CUALLOC_CLOSED for options that were freed; CUALLOC_NO_DRIVER; CUALLOC_UNSUPPORTED if the device cannot do
 * what the settings ask for, or if 4096 allocators are open; CUALLOC_CONTEXT_LOST in a forked child; CUALLOC_DRIVER.
 * *out is then null.
 *
 * May be called from any thread. The current context does not matter and stays current.
 *
 * The caller guarantees:
 * `out` is null or writable.
 */
int32_t cualloc_create(int32_t device,
                       const struct cualloc_options_t *options,
                       struct cualloc_t **out);

/**
 * Creates an allocator in a context of the caller (a CUcontext); null means the context that is current on the calling
 * thread. The caller keeps ownership of the context and destroys it after cualloc_destroy. If it is destroyed earlier,
 * the first call that detects this, and every later call that needs the context, fails with CUALLOC_CONTEXT_LOST and
 * makes no further driver calls on it.
 *
 * Errors: as cualloc_create, and CUALLOC_INVALID_ARGUMENT if the context does not exist or none is current.
 *
 * May be called from any thread.
 *
 * The caller guarantees:
 * `cu_context` is null or a live context of the driver; `out` is null or writable.
 */
int32_t cualloc_create_in(void *cu_context,
                          const struct cualloc_options_t *options,
                          struct cualloc_t **out);

/**
 * Makes the allocator's context current on the calling thread if none is, as the CUDA runtime does in a thread's first
 * call. A context that is already current stays current. No other function of this library needs a current context,
 * but code that uses the memory may: calls of the runtime make one current themselves; calls of the driver, and C++
 * libraries built on it, do not.
 *
 * Errors: CUALLOC_INVALID_ARGUMENT for a null handle, CUALLOC_CLOSED, CUALLOC_CONTEXT_LOST, CUALLOC_DRIVER.
 *
 * May be called from any thread.
 */
int32_t cualloc_make_current(struct cualloc_t *allocator);

/**
 * Returns all memory to the driver and ends the handle. May wait for device work that used freed blocks. Calls of
 * other threads that are in progress with this allocator complete first, or fail with CUALLOC_CLOSED, as all later
 * ones do. The allocator's graph pools and their scopes end with it. After CUALLOC_OK the library no longer uses the
 * context.
 *
 * Errors: CUALLOC_BUSY while blocks are live, a graph may use memory of a pool, a guard keeps memory, or a call in
 * progress holds memory, on another thread or (in a predicate of a scope) on the calling thread itself;
 * CUALLOC_CAPTURING if it would have to wait for a stream that is being captured; CUALLOC_DRIVER. After these, nothing
 * was done and the allocator remains usable. CUALLOC_CONTEXT_LOST: the context is lost; the memory is not released,
 * but the handle is ended (except in a forked child or while the process exits). CUALLOC_INVALID_ARGUMENT for null;
 * CUALLOC_CLOSED for a handle that was ended before.
 *
 * May be called from any thread.
 */
int32_t cualloc_destroy(struct cualloc_t *allocator);

/**
 * Returns unused memory to the driver until at most keep bytes are reserved. Never waits for device work. Writes to
 * *released how many bytes were returned, and to *pending how many more can be returned once pending work has ended;
 * each pointer may be null. Page-locked host memory of earlier suspensions is freed as well.
 *
 * Errors: CUALLOC_INVALID_ARGUMENT for a null handle, CUALLOC_CLOSED, CUALLOC_CONTEXT_LOST, CUALLOC_DRIVER. Both
 * numbers are then 0.
 *
 * May be called from any thread, with any current context.
 *
 * The caller guarantees:
 * `released` and `pending` are null or writable.
 */
int32_t cualloc_trim(struct cualloc_t *allocator,
                     uint64_t keep,
                     uint64_t *released,
                     uint64_t *pending);

/**
 * Like cualloc_trim, except that page-locked host memory stays, which the next suspension uses.
 *
 * Errors: as cualloc_trim.
 *
 * May be called from any thread, with any current context.
 *
 * The caller guarantees:
 * `released` and `pending` are null or writable.
 */
int32_t cualloc_trim_device(struct cualloc_t *allocator,
                            uint64_t keep,
                            uint64_t *released,
                            uint64_t *pending);

/**
 * Like cualloc_trim with keep 0, but waits on the host for the work of streams that are not capturing. Memory that
 * cannot be waited for because of a capture is counted as pending, not reported as an error. Waiting for a whole
 * context would invalidate captures unknown to the allocator, so it does that only for memory of streams that were
 * neither created by the library nor adopted (cualloc_adopt_stream), and only while no scope of a graph pool is open
 * for captures.
 *
 * Errors: as cualloc_trim.
 *
 * May be called from any thread, with any current context.
 *
 * The caller guarantees:
 * `released` and `pending` are null or writable.
 */
int32_t cualloc_empty_cache(struct cualloc_t *allocator,
                            uint64_t *released,
                            uint64_t *pending);

/**
 * Limits the bytes reserved from the driver; UINT64_MAX removes the limit. After the limit is lowered, memory above it
 * stays reserved until it is trimmed. With 0 no more memory is reserved.
 *
 * Errors: CUALLOC_INVALID_ARGUMENT for a null handle, CUALLOC_CLOSED, CUALLOC_CONTEXT_LOST in a forked child.
 *
 * May be called from any thread.
 */
int32_t cualloc_set_limit(struct cualloc_t *allocator,
                          uint64_t bytes);

/**
 * Lets another device access the allocator's memory: all that is reserved now, and all that is reserved later. Returns
 * once the device has access. Access cannot be revoked. Does nothing for a device that has access.
 *
 * Errors: CUALLOC_UNSUPPORTED if the device cannot access the memory of the allocator's device, and under the classic
 * policy; CUALLOC_INVALID_ARGUMENT for a null handle or a negative device, CUALLOC_CLOSED, CUALLOC_CONTEXT_LOST,
 * CUALLOC_DRIVER, also if no device has this number. If a driver call failed, the device may have access to part of
 * the memory, and the call can be repeated.
 *
 * May be called from any thread, with any current context. Threads that allocate meanwhile are not blocked.
 */
int32_t cualloc_add_peer(struct cualloc_t *allocator,
                         int32_t device);

/**
 * Writes the allocator's statistics, a consistent snapshot. Set out->struct_size to the structure's size before the
 * call; the structure may be that of an older or a newer version.
 *
 * Errors: CUALLOC_INVALID_ARGUMENT for a null handle or out, or a struct_size smaller than the field itself;
 * CUALLOC_CLOSED. The fields are then 0, if out is not null and has a valid size.
 *
 * May be called from any thread. In a forked child, and after the context was lost, the statistics are those of an
 * allocator without memory, or the last known ones.
 *
 * The caller guarantees:
 * `out` is null or points to a structure of `struct_size` bytes.
 */
int32_t cualloc_stats(struct cualloc_t *allocator,
                      struct cualloc_stats_t *out);

/**
 * Sets all peaks to the current values, atomically.
 *
 * Errors: CUALLOC_INVALID_ARGUMENT for a null handle, CUALLOC_CLOSED, CUALLOC_CONTEXT_LOST in a forked child.
 *
 * May be called from any thread.
 */
int32_t cualloc_reset_peaks(struct cualloc_t *allocator);

/**
 * Walks all of the allocator's state, recomputes every count and compares: for tests and diagnosis. Takes time
 * proportional to the number of blocks.
 *
 * Errors: CUALLOC_PANIC if anything disagrees (a bug in the library; the text says what); CUALLOC_INVALID_ARGUMENT for
 * a null handle or, with debug=guard, if the program wrote past the end of a block; CUALLOC_CLOSED;
 * CUALLOC_CONTEXT_LOST in a forked child.
 *
 * May be called from any thread, concurrently with other calls.
 */
int32_t cualloc_check(struct cualloc_t *allocator);

/**
 * Creates a graph pool: memory for stream captures, in an arena of its own. Its addresses stay valid as long as a
 * graph captured with them, an executable made of it, or a launch of that may use them. Scopes (cualloc_pool_enter)
 * send requests to it; the requests are ordinary calls of cualloc_alloc, and blocks are freed with cualloc_free.
 * Inside a capture, freed memory is reused after the nodes that used it last. The caller promises that launches of
 * graphs that share a pool are ordered one after another on the device: docs/graphs.md.
 *
 * Errors: CUALLOC_UNSUPPORTED under the classic policy; CUALLOC_INVALID_ARGUMENT for a null handle or out;
 * CUALLOC_CLOSED; CUALLOC_CONTEXT_LOST. *out is then null.
 *
 * May be called from any thread.
 *
 * The caller guarantees:
 * `out` is null or writable.
 */
int32_t cualloc_pool_create(struct cualloc_t *allocator,
                            struct cualloc_pool_t **out);

/**
 * Like cualloc_pool_create, with a tag: a text by which all pools that share it are suspended together
 * (CUALLOC_SELECT_TAG). Every driver handle holds memory of one pool only. A process keeps the texts of its tags, at
 * most 65536.
 *
 * Errors: as cualloc_pool_create, and CUALLOC_INVALID_ARGUMENT for a tag that is null, not UTF-8, or one too many.
 *
 * May be called from any thread.
 *
 * The caller guarantees:
 * `tag` is null or zero-terminated; `out` is null or writable.
 */
int32_t cualloc_pool_create_tagged(struct cualloc_t *allocator,
                                   const char *tag,
                                   struct cualloc_pool_t **out);

/**
 * Opens a scope: sends matching requests to a pool until *scope is left. If several scopes match a request, one for
 * its capture takes precedence, then one for its stream, then a predicate, then one for its thread; among scopes of
 * the same kind, the one entered last. A capture gets no more memory of the pool once all its scopes are left, so
 * leave a scope only after cuStreamEndCapture.
 *
 * For a scope with a predicate: if this call fails, done is not called, and the predicate is not called any more,
 * although threads may have called it during the call. Otherwise done is called on any thread once the scope was left,
 * or ended with the pool or the allocator, and the last call of the predicate has returned.
 *
 * Errors: CUALLOC_INVALID_ARGUMENT for a null pool, which, when or scope, a struct_size smaller than that of the first
 * version, an unknown kind, or a stream of another device; CUALLOC_CLOSED for a pool that was released;
 * CUALLOC_CAPTURING for CUALLOC_SCOPE_STREAM with a stream that is being captured already (use another kind);
 * CUALLOC_BUSY for CUALLOC_SCOPE_WHEN inside a predicate; CUALLOC_CONTEXT_LOST; CUALLOC_DRIVER. *scope is then 0.
 *
 * May be called from any thread.
 *
 * The caller guarantees:
 * `which` is null or points to `struct_size` bytes. If its kind needs a stream, that is a live stream, or null, 1 or
 * 2, and is retired before it is destroyed. The predicate and its data may be used from any thread until done is
 * called. `scope` is null or writable.
 */
int32_t cualloc_pool_enter(struct cualloc_pool_t *pool,
                           const struct cualloc_scope_t *which,
                           uint64_t *scope);

/**
 * Leaves a scope. Blocks allocated through it are not affected. Its predicate is not called any more: this call waits
 * for threads that are in it, unless the calling thread is itself in a predicate.
 *
 * Errors: CUALLOC_INVALID_ARGUMENT for a null pool, or for a scope that was left before or belongs to another pool;
 * CUALLOC_CLOSED for a pool that was released, which has left its scopes; CUALLOC_CONTEXT_LOST.
 *
 * May be called from any thread.
 */
int32_t cualloc_pool_leave(struct cualloc_pool_t *pool,
                           uint64_t scope);

/**
 * Ends a pool's handle: no further capture uses the pool, and its open scopes are left. The memory returns to the
 * driver once no graph, executable, launch or block uses it. cualloc_destroy releases the pools of its allocator, and
 * returns CUALLOC_BUSY while a graph may use their memory.
 *
 * Errors: CUALLOC_INVALID_ARGUMENT for null, CUALLOC_CLOSED for a pool that was released before,
 * CUALLOC_CONTEXT_LOST.
 *
 * May be called from any thread, also during a capture.
 */
int32_t cualloc_pool_release(struct cualloc_pool_t *pool);

/**
 * Permits requests outside of captures to get free memory that graphs of the pool write, from now on. Without the
 * permission, a pool in which new work is warmed up before each capture holds the memory of all warm-ups.
 *
 * Errors: CUALLOC_INVALID_ARGUMENT for a null pool; CUALLOC_CLOSED for a pool that was released; CUALLOC_CONTEXT_LOST.
 *
 * May be called from any thread.
 *
 * The caller guarantees:
 * If a block is allocated from the pool outside of captures after this call, no graph of the pool is launched while its
 * contents are needed.
 */
int32_t cualloc_pool_reuse_graph_memory(struct cualloc_pool_t *pool);

/**
 * Releases free memory of a pool to the driver, as far as whole handles are free, after waiting for the work that uses
 * them. A pool that a graph or a capture in progress may use keeps its memory. Writes the released bytes to *released,
 * unless it is null.
 *
 * Errors: CUALLOC_INVALID_ARGUMENT for a null pool; CUALLOC_CLOSED for a pool that was released; CUALLOC_SUSPENDED;
 * CUALLOC_CONTEXT_LOST; CUALLOC_DRIVER. *released is then 0.
 *
 * May be called from any thread.
 *
 * The caller guarantees:
 * `released` is null or writable.
 */
int32_t cualloc_pool_empty_cache(struct cualloc_pool_t *pool,
                                 uint64_t *released);

/**
 * Writes the current statistics of a pool. Set out->struct_size before the call. The pool's bytes are not part of the
 * figures of cualloc_stats, but they count against the limit.
 *
 * Errors: CUALLOC_INVALID_ARGUMENT for a null pool or out, or a struct_size smaller than the field itself;
 * CUALLOC_CLOSED; CUALLOC_CONTEXT_LOST. The fields are then 0, if out is not null and has a valid size.
 *
 * May be called from any thread.
 *
 * The caller guarantees:
 * `out` is null or points to a structure of `struct_size` bytes.
 */
int32_t cualloc_pool_footprint(struct cualloc_pool_t *pool,
                               struct cualloc_footprint_t *out);

/**
 * Declares that a graph (a CUgraph) that was not captured with a pool uses its memory: the pool's addresses stay as
 * long as the graph, the executables made of it, and their launches.
 *
 * Errors: CUALLOC_INVALID_ARGUMENT for null; CUALLOC_CLOSED; CUALLOC_CONTEXT_LOST; CUALLOC_DRIVER, also if the driver
 * cannot report the end of a graph.
 *
 * May be called from any thread.
 *
 * The caller guarantees:
 * `graph` is null or a live graph that no other thread uses during the call.
 */
int32_t cualloc_pool_retain(struct cualloc_pool_t *pool,
                            void *graph);

/**
 * Reserves addresses for a range of at least bytes per stripe, without memory, and writes its handle to *range and its
 * first address to *base. The allocator cannot be destroyed while the range exists.
 *
 * Errors: CUALLOC_OUT_OF_MEMORY if the driver refuses the addresses (the text names their size); CUALLOC_UNSUPPORTED
 * under the classic policy; CUALLOC_INVALID_ARGUMENT for a null handle, range or base, 0 bytes, or an invalid option;
 * CUALLOC_CLOSED; CUALLOC_CONTEXT_LOST; CUALLOC_DRIVER. *range is then null, and *base 0.
 *
 * May be called from any thread.
 *
 * The caller guarantees:
 * `options` is null or points to `struct_size` bytes, with a tag that is null or zero-terminated; `range` and `base` are
 * null or writable.
 */
int32_t cualloc_range_create(struct cualloc_t *allocator,
                             uint64_t bytes,
                             const struct cualloc_range_options_t *options,
                             struct cualloc_range_t **range,
                             uint64_t *base);

/**
 * Gives memory to all granules that overlap bytes from offset on; granules with memory stay as they are. The contents
 * of new memory are undefined. The memory may be used on the stream from here on, and on streams ordered after it.
 *
 * Idle memory of the allocator in pieces of the granule's size is used first; the rest comes from the driver. If that
 * is too little, the call makes room as an allocation does. On a stream that is being captured it waits for nothing and
 * calls no callback. If a granule was decommitted and may still be in use, the stream waits for that use on the device.
 *
 * Errors: CUALLOC_OUT_OF_MEMORY (the text says how many bytes are missing); CUALLOC_SUSPENDED;
 * CUALLOC_INVALID_ARGUMENT for a null range, bytes beyond its end, or a stream of another device; CUALLOC_CLOSED;
 * CUALLOC_CONTEXT_LOST; CUALLOC_DRIVER. No granule has changed then.
 *
 * May be called from any thread.
 *
 * The caller guarantees:
 * `stream` is live, or null, 1 or 2, and is retired before it is destroyed.
 */
int32_t cualloc_range_commit(struct cualloc_range_t *range,
                             uint64_t offset,
                             uint64_t bytes,
                             void *stream);

/**
 * Removes the memory of all granules that lie inside bytes from offset on. Other requests get it once the work
 * submitted so far to the stream, and to the streams named by cualloc_range_record, has ended. It must not be used any
 * more, not even by a graph that was captured before. Granules without memory are ignored.
 *
 * Errors: CUALLOC_CAPTURING for a stream that is being captured; otherwise as cualloc_range_commit, without
 * CUALLOC_OUT_OF_MEMORY.
 *
 * May be called from any thread.
 *
 * The caller guarantees:
 * As for cualloc_range_commit.
 */
int32_t cualloc_range_decommit(struct cualloc_range_t *range,
                               uint64_t offset,
                               uint64_t bytes,
                               void *stream);

/**
 * Records that another stream uses the granules that overlap bytes from offset on: when they are decommitted, their
 * memory serves other requests only after the work submitted to that stream until then.
 *
 * Errors: as cualloc_range_decommit.
 *
 * May be called from any thread.
 *
 * The caller guarantees:
 * As for cualloc_range_commit.
 */
int32_t cualloc_range_record(struct cualloc_range_t *range,
                             uint64_t offset,
                             uint64_t bytes,
                             void *stream);

/**
 * Writes the sizes of a range to *stats, as many fields as its struct_size says.
 *
 * Errors: CUALLOC_INVALID_ARGUMENT for a null range or stats, or a struct_size that is not set; CUALLOC_CLOSED;
 * CUALLOC_CONTEXT_LOST. The fields are then 0, if they could be written.
 *
 * May be called from any thread.
 *
 * The caller guarantees:
 * `stats` is null, or points to `struct_size` writable bytes.
 */
int32_t cualloc_range_stats(const struct cualloc_range_t *range,
                            struct cualloc_range_stats_t *stats);

/**
 * Writes one bit for each granule of a stripe, 1 if it is committed, to the first words of bits: the first granule is
 * the lowest bit of the first word. Further words become 0; granules beyond the words are left out.
 *
 * Errors: CUALLOC_INVALID_ARGUMENT for a null range or bits; CUALLOC_CLOSED; CUALLOC_CONTEXT_LOST.
 *
 * May be called from any thread.
 *
 * The caller guarantees:
 * `bits` is null, or points to `words` writable words.
 */
int32_t cualloc_range_map(const struct cualloc_range_t *range,
                          uint64_t *bits,
                          size_t words);

/**
 * Ends a range: decommits all its memory, as cualloc_range_decommit does, and frees its addresses once the memory has
 * left. The handle has ended then. Null is ignored.
 *
 * Errors: as cualloc_range_decommit; the range then continues to exist.
 *
 * May be called from any thread.
 *
 * The caller guarantees:
 * As for cualloc_range_commit. No call on another thread uses the range's memory later.
 */
int32_t cualloc_range_destroy(struct cualloc_range_t *range,
                              void *stream);

/**
 * Sets the function that is called, without any lock held, when a request or a commit finds too little memory and no
 * work is left to wait for: it may decommit memory of ranges, and free blocks. Memory that it decommits serves the
 * request that lacked memory as soon as the work that uses it has ended. Requests that the function makes itself do
 * not call it. Null removes it.
 *
 * A call of the function that is in progress on another thread may end after it was replaced or removed.
 *
 * Errors: CUALLOC_INVALID_ARGUMENT for a null handle; CUALLOC_CLOSED; CUALLOC_CONTEXT_LOST in a forked child.
 *
 * May be called from any thread.
 *
 * The caller guarantees:
 * The function may be called with the data from any thread until it was removed, or the allocator destroyed. It must
 * not throw.
 */
int32_t cualloc_on_pressure(struct cualloc_t *allocator,
                            cualloc_pressure_t callback,
                            void *data);

/**
 * Starts recording all allocators of the process: to a file that is written until cualloc_record_stop or, if path is
 * null, to memory, whose newest events cualloc_record_dump writes. Blocks that are live now are recorded as held. The
 * file is new, readable by its owner only, and replaces an existing one; `cualloc replay`, `view` and `export` read
 * it. A process has at most one recording at a time.
 *
 * Errors: CUALLOC_BUSY while a recording is running, including one started by CUALLOC_RECORD; CUALLOC_IO if the file
 * cannot be created; CUALLOC_CONTEXT_LOST in a forked child.
 *
 * May be called from any thread, with any current context. Calls in progress on other threads may be missed.
 *
 * The caller guarantees:
 * `path` is null or zero-terminated.
 */
int32_t cualloc_record_start(const char *path);

/**
 * Like cualloc_record_start, with the stacks of sampled allocations: one per `bytes` allocated, on average (rounded up
 * to a multiple of 512; 0 for none). A rate of some hundreds of KiB is cheap enough to leave on: a stack takes
 * microseconds, and milliseconds the first time. `cualloc export --to pprof` and `view` use the stacks to show which
 * code holds how much.
 *
 * Errors: as cualloc_record_start.
 *
 * May be called from any thread, with any current context. Calls in progress on other threads may be missed.
 *
 * The caller guarantees:
 * `path` is null or zero-terminated.
 */
int32_t cualloc_record_start_with_stacks(const char *path,
                                         uint64_t bytes);

/**
 * Sets the function that samples of stacks (cualloc_record_start_with_stacks, CUALLOC_RECORD=stacks:SIZE:FILE) call
 * for the place in the program; null restores the native stack of the thread. When the function is replaced or
 * removed, this call waits until no other thread is in the former one, at most two seconds, because such a thread may
 * wait for something that the caller holds. The former function and its data must stay valid until this call returns
 * or, after a timeout, until the calls in progress are over.
 *
 * May be called from any thread at any time.
 *
 * The caller guarantees:
 * `source` may be called from any thread, by several at the same time, as described at cualloc_stack_source_t.
 */
void cualloc_set_stack_source(cualloc_stack_source_t source,
                              void *data);

/**
 * Writes the current contents of the recording's rings to a file: for a recording to memory, the newest 32767 events
 * of each stream cache and as many of all others. The recording goes on. The file is created as by
 * cualloc_record_start, and appears once it is complete.
 *
 * Errors: CUALLOC_INVALID_ARGUMENT for null, or if no recording started by cualloc_record_start is running;
 * CUALLOC_IO; CUALLOC_CONTEXT_LOST in a forked child.
 *
 * May be called from any thread, with any current context.
 *
 * The caller guarantees:
 * `path` is null or zero-terminated.
 */
int32_t cualloc_record_dump(const char *path);

/**
 * Like cualloc_record_dump, but writes a PyTorch memory snapshot as a pickle, for PyTorch's tools and viewer.
 *
 * Errors: as cualloc_record_dump.
 *
 * May be called from any thread, with any current context.
 *
 * The caller guarantees:
 * `path` is null or zero-terminated.
 */
int32_t cualloc_record_snapshot(const char *path);

/**
 * Stops the recording and completes its file. Writes to *events the number of events in the file, 0 if there is no
 * file, and to *lost the number of events that were overwritten before the writer thread read them; either pointer may
 * be null.
 *
 * Errors: CUALLOC_INVALID_ARGUMENT if no recording started by cualloc_record_start is running; CUALLOC_IO if the file
 * could not be written (the recording has ended, and the file is readable up to the failure); CUALLOC_CONTEXT_LOST in
 * a forked child.
 *
 * May be called from any thread, with any current context.
 *
 * The caller guarantees:
 * `events` and `lost` are null or writable.
 */
int32_t cualloc_record_stop(uint64_t *events,
                            uint64_t *lost);

/**
 * Returns the number of a context, a name for what a thread is doing, for cualloc_set_context. Parts separated by
 * semicolons form a stack, outermost first: "train;forward". Equal names have equal numbers. Returns 0 if the name is
 * null or not UTF-8, or if 65535 other names are in use, so a program should keep the numbers it gets. Of a name
 * longer than 4096 bytes the innermost parts are kept.
 *
 * May be called from any thread at any time; takes a lock.
 *
 * The caller guarantees:
 * `name` is null or zero-terminated.
 */
uint32_t cualloc_context(const char *name);

/**
 * Sets the context of the calling thread and returns the previous one. Recordings and the reports of compute-sanitizer
 * show its name for everything the thread allocates and frees from then on. 0 is no context.
 *
 * May be called from any thread at any time. Each thread has its own context. Costs one store.
 */
uint32_t cualloc_set_context(uint32_t context);

/**
 * Calls a hook whenever an allocator has mapped memory or is about to unmap it, for registrations and exports that
 * follow the memory. Second mappings of the same memory (views) are not reported, nor is memory that is mapped
 * already. Replaces the hook with the same name.
 *
 * done is called once, on any thread, when the hook is no longer used: after it was removed or replaced and its last
 * call has returned, or after the allocator has ended. It is not called if this call returns an error.
 *
 * Errors: CUALLOC_INVALID_ARGUMENT for a null handle, name or hook, or a name that is not UTF-8; CUALLOC_CLOSED;
 * CUALLOC_CONTEXT_LOST in a forked child.
 *
 * May be called from any thread.
 *
 * The caller guarantees:
 * `name` is null or zero-terminated. The functions may be called with the data from any thread until `done` is called.
 */
int32_t cualloc_add_segment_hook(struct cualloc_t *allocator,
                                 const char *name,
                                 cualloc_segment_hook_t hook,
                                 cualloc_done_t done,
                                 void *data);

/**
 * Removes the hook with this name. Calls of it that are in progress may still run when this call returns.
 *
 * Errors: CUALLOC_INVALID_ARGUMENT for a null handle or name, a name that is not UTF-8, or if there is no such hook;
 * CUALLOC_CLOSED; CUALLOC_CONTEXT_LOST in a forked child.
 *
 * May be called from any thread.
 *
 * The caller guarantees:
 * `name` is null or zero-terminated.
 */
int32_t cualloc_remove_segment_hook(struct cualloc_t *allocator,
                                    const char *name);

/**
 * Returns the number of a graph pool, unique in its allocator, by which cualloc_block_t and cualloc_mapped_segment_t
 * name it; 0 if the handle belongs to no pool.
 *
 * May be called from any thread at any time.
 */
uint64_t cualloc_pool_number(struct cualloc_pool_t *pool);

/**
 * Shares the live block around an address: writes a token, a zero-terminated ASCII text without spaces of less than
 * CUALLOC_TOKEN_BYTES, by which other processes of the same user on this machine open the block
 * (cualloc_share_open). A token holds nothing; it is valid as long as the block is live, and equal blocks have equal
 * tokens. *offset is the offset of the address in the block, and *foreign_bytes the number of bytes outside the block
 * that an importer can access, because physical handles are shared as a whole; either pointer may be null. flags is 0
 * or CUALLOC_SHARE_REFUSE_FOREIGN.
 *
 * Work that fills the block must be complete before an importer uses it. The first call starts a thread that serves
 * importers.
 *
 * Errors: CUALLOC_INVALID_ARGUMENT for a null allocator or token, a size below CUALLOC_TOKEN_BYTES, unknown flags, and
 * foreign bytes that are refused; CUALLOC_NOT_OURS, CUALLOC_NOT_LIVE; CUALLOC_UNSUPPORTED for memory whose handles
 * cannot be exported, and except on Linux; CUALLOC_SUSPENDED, CUALLOC_CLOSED, CUALLOC_CONTEXT_LOST, CUALLOC_DRIVER;
 * CUALLOC_IO if the system refuses the thread or its sockets.
 *
 * May be called from any thread.
 *
 * The caller guarantees:
 * `token` is null or writable for `size` bytes; `offset` and `foreign_bytes` are null or writable.
 */
int32_t cualloc_share(struct cualloc_t *allocator,
                      uint64_t address,
                      uint32_t flags,
                      char *token,
                      size_t size,
                      uint64_t *offset,
                      uint64_t *foreign_bytes);

/**
 * Opens a token of cualloc_share, usually in another process: maps the block into the context of an allocator, which
 * is not involved otherwise. *address is the first byte of the block in this process, and *bytes its size. The memory
 * stays valid until cualloc_share_close, also if the exporter frees it or ends. Blocks in the same handles share a
 * mapping.
 *
 * Errors: CUALLOC_INVALID_ARGUMENT for a null argument and for a text that is no token; CUALLOC_NOT_LIVE for a block
 * that was freed; CUALLOC_CLOSED if its process has ended; CUALLOC_IO if that process cannot be reached;
 * CUALLOC_UNSUPPORTED if the device cannot access the memory, if that process refuses, and except on Linux;
 * CUALLOC_CONTEXT_LOST, CUALLOC_DRIVER. *out is then null.
 *
 * May be called from any thread.
 *
 * The caller guarantees:
 * `token` is null or zero-terminated; `out`, `address` and `bytes` are null or writable.
 */
int32_t cualloc_share_open(struct cualloc_t *allocator,
                           const char *token,
                           struct cualloc_import_t **out,
                           uint64_t *address,
                           uint64_t *bytes);

/**
 * Ends an import. Waits on the host for all work of the context that the memory is mapped for, so the exporter may
 * reuse the memory then. While a stream of the context is captured, a later call ends the import instead. The address
 * is invalid afterwards.
 *
 * Errors: CUALLOC_INVALID_ARGUMENT for null; CUALLOC_CLOSED for an import that was closed before;
 * CUALLOC_CONTEXT_LOST in a forked child; CUALLOC_UNSUPPORTED except on Linux.
 *
 * May be called from any thread.
 */
int32_t cualloc_share_close(struct cualloc_import_t *import);

/**
 * Sets the options that shared allocators (cualloc_shared) are created with; null means the defaults. The options are
 * copied. For these allocators unretired_streams is on unless it is set to off: streams that are not adopted may be
 * destroyed without being retired.
 *
 * Errors: CUALLOC_BUSY if a shared allocator already exists; CUALLOC_CLOSED for options that were freed;
 * CUALLOC_CONTEXT_LOST in a forked child.
 *
 * May be called from any thread.
 */
int32_t cualloc_shared_options(const struct cualloc_options_t *options);

/**
 * Returns the allocator of a device (numbered from 0) that all parts of the process share, on the device's primary
 * context. The first call creates it, with the options of cualloc_shared_options. The functions for PyTorch
 * (cualloc_torch_alloc) allocate from it. It lives as long as the process and should not be destroyed: after a destroy
 * every call with it, by any of its users, returns CUALLOC_CLOSED.
 *
 * Errors: as cualloc_create. *out is then null, and the next call tries again.
 *
 * May be called from any thread. The current context does not matter and stays current.
 *
 * The caller guarantees:
 * `out` is null or writable.
 */
int32_t cualloc_shared(int32_t device,
                       struct cualloc_t **out);

/**
 * Returns the allocator of a device that cualloc_shared has created, null if there is none. Creates neither an
 * allocator nor a context.
 *
 * May be called from any thread at any time.
 */
struct cualloc_t *cualloc_shared_made(int32_t device);

/**
 * Creates a graph pool whose segments come from another allocator. A segment is as large as the request that needs it,
 * rounded up to 2 MiB. The pool divides segments into blocks, and frees them when it returns its memory. It cannot be
 * suspended, and gives peers no access to its segments (cualloc_add_peer). Segments count as reserved bytes, so they
 * leave less of the limit to other memory, but may exceed the limit.
 *
 * done is called once, on any thread: after the pool and its memory are gone, or before this call returns an error. It
 * is not called for a null out or for an invalid source.
 *
 * Errors: as cualloc_pool_create, and CUALLOC_INVALID_ARGUMENT for a null source, alloc or free_segment, or a
 * struct_size smaller than that of the first version. *out is then null.
 *
 * May be called from any thread.
 *
 * The caller guarantees:
 * `source` is null or points to `struct_size` bytes. Its functions may be called with its data from any thread until
 * done is called. A segment is memory of the allocator's device that nothing else uses until it is freed. `out` is
 * null or writable.
 */
int32_t cualloc_pool_create_over(struct cualloc_t *allocator,
                                 const struct cualloc_source_t *source,
                                 struct cualloc_pool_t **out);

/**
 * Returns memory to the driver and keeps its addresses, so that other processes can use the memory until
 * cualloc_resume. select is one of CUALLOC_SELECT_..., and which identifies the selected pool or tag; contents is one
 * of CUALLOC_CONTENTS_... Blocks stay live, and may be freed while suspended. Waits for all work of the contexts
 * involved. Writes the number of bytes returned to the driver to *bytes.
 *
 * Errors: CUALLOC_SUSPENDED if the memory is already suspended; CUALLOC_BUSY while a guard keeps memory or a call on
 * another thread holds some; CUALLOC_CAPTURING; CUALLOC_UNSUPPORTED under the classic policy; CUALLOC_INVALID_ARGUMENT
 * for a null handle or bytes, an unknown number, a pool of another allocator or a tag that no pool has;
 * CUALLOC_CLOSED; CUALLOC_CONTEXT_LOST; CUALLOC_DRIVER. Nothing is suspended then, with one exception: if the driver
 * fails a call and then also fails to undo the earlier ones, the memory is suspended, and cualloc_resume restores it.
 *
 * May be called from any thread, with any current context.
 *
 * The caller guarantees:
 * Until cualloc_resume has succeeded no work that uses the memory is submitted to a device. Discarded contents are
 * written before they are read. `which` is, for CUALLOC_SELECT_TAG, null or a zero-terminated text; `bytes` is
 * null or writable.
 */
int32_t cualloc_suspend(struct cualloc_t *allocator,
                        int32_t select,
                        void *which,
                        int32_t contents,
                        uint64_t *bytes);

/**
 * Restores suspended memory at its addresses, with access for all devices that had it and with the contents that were
 * kept. Writes the number of restored bytes to *bytes.
 *
 * Errors: CUALLOC_OUT_OF_MEMORY (the text states how many bytes are missing); CUALLOC_SUSPENDED if none of the memory
 * is suspended; CUALLOC_BUSY while a call on another thread suspends or resumes; CUALLOC_INVALID_ARGUMENT for a null
 * handle or bytes, an unknown number, a pool of another allocator or a tag that no pool has; CUALLOC_CLOSED;
 * CUALLOC_CONTEXT_LOST; CUALLOC_DRIVER. The memory then stays suspended, and the call may be repeated.
 *
 * May be called from any thread, with any current context.
 *
 * The caller guarantees:
 * `which` is, for CUALLOC_SELECT_TAG, null or a zero-terminated text; `bytes` is null or writable.
 */
int32_t cualloc_resume(struct cualloc_t *allocator,
                       int32_t select,
                       void *which,
                       uint64_t *bytes);

/**
 * Allocates bytes on a device for use on a stream, as PyTorch requests them: from the device's shared allocator
 * (cualloc_shared), which is created if there is none. Returns null for 0 bytes, which is not a failure, and after
 * every failure, whose code cualloc_last_code() returns. If memory is exhausted, cualloc_last_error() begins with the
 * wording of PyTorch's own error.
 *
 * Errors: as cualloc_alloc and cualloc_create.
 *
 * May be called from any thread, with any current context.
 *
 * The caller guarantees:
 * As cualloc_alloc.
 */
void *cualloc_torch_alloc(size_t bytes,
                          int32_t device,
                          void *stream);

/**
 * Frees a block returned by cualloc_torch_alloc. Never waits and never reports an error: a null pointer is ignored,
 * and memory is left alone if its context is lost, in a forked child and while the process exits. If a block cannot be
 * freed now, for example because a stream is being captured, a later call frees it.
 *
 * May be called from any thread, with any current context.
 *
 * The caller guarantees:
 * As cualloc_free.
 */
void cualloc_torch_free(void *ptr,
                        size_t _bytes,
                        int32_t device,
                        void *_stream);

/**
 * Like cualloc_torch_free, for a block of any device: finds the device by the address.
 *
 * May be called from any thread, with any current context.
 *
 * The caller guarantees:
 * As cualloc_free.
 */
void cualloc_torch_delete(void *ptr);

/**
 * Retries the frees that cualloc_torch_free and cualloc_torch_delete deferred. Those that fail again stay deferred.
 *
 * May be called from any thread, with any current context.
 */
void cualloc_torch_retry_frees(void);

/**
 * PyTorch's hook when a pluggable allocator is set (with 0 devices) and when CUDA is initialised: loads the driver, so
 * that the first allocation finds it. If there is no driver, that allocation reports the error.
 *
 * May be called from any thread.
 */
void cualloc_torch_init(int32_t device_count);

/**
 * PyTorch's hook for torch.cuda.empty_cache(): calls cualloc_empty_cache for all shared allocators.
 *
 * May be called from any thread, with any current context.
 */
void cualloc_torch_reset(void);

/**
 * PyTorch's hook for torch.cuda.set_per_process_memory_fraction(): limits the bytes reserved from the driver to this
 * fraction of the device's memory.
 *
 * Errors: CUALLOC_INVALID_ARGUMENT for a fraction outside 0 to 1; as cualloc_create. Nothing has changed then.
 *
 * May be called from any thread.
 */
int32_t cualloc_torch_fraction(double fraction,
                               int32_t device);

/**
 * PyTorch's hook for the block that contains an address, on any device: returns the address of its first byte, and
 * writes its size to *bytes. For memory of others, returns the address itself and writes 0.
 *
 * May be called from any thread.
 *
 * The caller guarantees:
 * `bytes` is null or writable.
 */
void *cualloc_torch_base(void *ptr,
                         size_t *bytes);

/**
 * As cualloc_stats, with the quantities as PyTorch defines them: the figures of all blocks and of large_pool include
 * graph pools, and reserved is held. Peaks of other bytes are then upper bounds, but not above the peak of held.
 *
 * Errors: as cualloc_stats.
 *
 * May be called from any thread.
 *
 * The caller guarantees:
 * As cualloc_stats.
 */
int32_t cualloc_torch_stats(struct cualloc_t *allocator,
                            struct cualloc_stats_t *out);

/**
 * Describes the block that contains an address, on any device: writes the device's number to *device, and the block to
 * *block. Returns whether there is one.
 *
 * May be called from any thread, with any current context.
 *
 * The caller guarantees:
 * Both pointers are null or writable.
 */
bool cualloc_torch_block(void *ptr,
                         int32_t *device,
                         struct cualloc_block_t *block);

/**
 * PyTorch's hook for Tensor.record_stream: cualloc_record_stream for the block that contains an address, on any
 * device. Returns CUALLOC_OK for null and for memory of others, since a tensor may use memory of another allocator.
 *
 * Errors: as cualloc_record_stream, except CUALLOC_NOT_OURS.
 *
 * May be called from any thread, with any current context.
 *
 * The caller guarantees:
 * As cualloc_record_stream.
 */
int32_t cualloc_torch_record_stream(void *ptr,
                                    void *stream);

/**
 * PyTorch's hook before a capture (and for any other use of a pool): until cualloc_torch_pool_end, sends requests on
 * those streams of a device that the predicate accepts to the pool with this id, which is created if there is none.
 * Pools are graph pools of the device's shared allocator.
 *
 * Errors: as cualloc_create, cualloc_pool_create and cualloc_pool_enter; then nothing was begun, and done is not
 * called.
 *
 * May be called from any thread, with any current context.
 *
 * The caller guarantees:
 * As cualloc_pool_enter.
 */
int32_t cualloc_torch_pool_begin(int32_t device,
                                 struct cualloc_torch_pool_id_t id,
                                 cualloc_when_t when,
                                 cualloc_done_t done,
                                 void *data);

/**
 * PyTorch's hook after a capture: ends the scope that cualloc_torch_pool_begin opened with this id, preferring one
 * opened on the calling thread. Returns CUALLOC_OK if there is no such scope or it was already ended.
 *
 * Errors: CUALLOC_CONTEXT_LOST in a forked child.
 *
 * May be called from any thread, with any current context.
 */
int32_t cualloc_torch_pool_end(int32_t device,
                               struct cualloc_torch_pool_id_t id);

/**
 * PyTorch's hook when a graph is destroyed: called once for each begin. The last call releases the pool
 * (cualloc_pool_release). For a pool that was not begun, returns CUALLOC_OK.
 *
 * Errors: CUALLOC_CONTEXT_LOST in a forked child; CUALLOC_CLOSED if the device's allocator was destroyed.
 *
 * May be called from any thread, with any current context.
 */
int32_t cualloc_torch_pool_release(int32_t device, struct cualloc_torch_pool_id_t id);

/**
 * PyTorch's hook when a program creates a pool (MemPool): counts one use of the pool with this id. If there is none,
 * creates it, with segments from the source unless source is null; otherwise the source is not used, and its done is
 * called. cualloc_torch_pool_release ends the use.
 *
 * Errors: as cualloc_create and cualloc_pool_create_over; then nothing was counted.
 *
 * May be called from any thread, with any current context.
 *
 * The caller guarantees:
 * `source` is null, or as for cualloc_pool_create_over.
 */
int32_t cualloc_torch_pool_retain(int32_t device,
                                  struct cualloc_torch_pool_id_t id,
                                  const struct cualloc_source_t *source);

/**
 * Sets the tag of the pool with this id (cualloc_pool_create_tagged), in place of an earlier one. If there is no such
 * pool now, it gets the tag when it is created. The tag holds for all memory of the pool, also that of graphs that
 * were captured before.
 *
 * Errors: CUALLOC_INVALID_ARGUMENT for a tag as in cualloc_pool_create_tagged; CUALLOC_SUSPENDED while the pool is
 * suspended; CUALLOC_UNSUPPORTED for a pool with segments of another allocator; CUALLOC_CLOSED; CUALLOC_CONTEXT_LOST.
 * After an error the tag is unchanged.
 *
 * May be called from any thread.
 *
 * The caller guarantees:
 * `tag` is null or zero-terminated.
 */
int32_t cualloc_torch_pool_tag(int32_t device,
                               struct cualloc_torch_pool_id_t id,
                               const char *tag);

/**
 * Returns the number of uses of the pool with this id: calls of begin and retain that no release has matched. 0 if
 * there is no such pool, and in a forked child.
 *
 * May be called from any thread.
 */
uint64_t cualloc_torch_pool_uses(int32_t device,
                                 struct cualloc_torch_pool_id_t id);

/**
 * Returns how often the calling thread has called cualloc_torch_pool_release. A layer above uses it to detect whether
 * a version of PyTorch releases the pool of a capture that failed.
 *
 * May be called from any thread.
 */
uint64_t cualloc_torch_pool_releases(void);

/**
 * Returns the number of the newest scope that the calling thread has begun and not ended; 0 if there is none, and in a
 * forked child. Numbers grow and are never reused.
 *
 * May be called from any thread.
 */
uint64_t cualloc_torch_pool_newest(void);

/**
 * Writes the device and the pool id of the open scope with this number (cualloc_torch_pool_newest). Either pointer may
 * be null; both values are 0 after a failure.
 *
 * Errors: CUALLOC_NOT_LIVE if the scope was ended or never begun; CUALLOC_CONTEXT_LOST in a forked child.
 *
 * May be called from any thread.
 *
 * The caller guarantees:
 * `device` and `id` are null or writable.
 */
int32_t cualloc_torch_pool_name(uint64_t number,
                                int32_t *device,
                                struct cualloc_torch_pool_id_t *id);

/**
 * Returns the state of the scope with this number: CUALLOC_TORCH_POOL_ENDED, CUALLOC_TORCH_POOL_OPEN, or, if its
 * predicate accepts the stream, CUALLOC_TORCH_POOL_GOES_ON. With a null stream the predicate is not called. In a
 * forked child all scopes are ended.
 *
 * May be called from any thread, with any current context.
 *
 * The caller guarantees:
 * `stream` is null or a live stream.
 */
int32_t cualloc_torch_pool_state(uint64_t number,
                                 void *stream);

/**
 * Ends and releases the scope with this number (cualloc_torch_pool_newest), for captures that failed or were never
 * ended, for which PyTorch calls no hook. Does nothing if the predicate accepts the stream, since the capture is then
 * still in progress; with a null stream the predicate is not called. For a scope that was already ended, returns
 * CUALLOC_OK.
 *
 * Errors: CUALLOC_CONTEXT_LOST in a forked child.
 *
 * May be called from any thread, with any current context.
 *
 * The caller guarantees:
 * `stream` is null or a live stream.
 */
int32_t cualloc_torch_pool_abandon(uint64_t number,
                                   void *stream);

/**
 * Returns the graph pool that currently belongs to PyTorch's pool with this id, for cualloc_pool_footprint,
 * cualloc_pool_checkpoint and cualloc_pool_restore; null if there is none. PyTorch releases the pool.
 *
 * May be called from any thread.
 */
struct cualloc_pool_t *cualloc_torch_pool(int32_t device, struct cualloc_torch_pool_id_t id);

/**
 * Calls a function for each segment of an allocator and another for each block of it, by ascending address, as they
 * are at the time of the call. Memory of graph pools is not among them (cualloc_pool_visit).
 *
 * Errors: CUALLOC_INVALID_ARGUMENT for a null handle or function; CUALLOC_CLOSED; CUALLOC_CONTEXT_LOST in a forked
 * child.
 *
 * May be called from any thread. No lock is held while the functions run.
 *
 * The caller guarantees:
 * It is safe to call the functions with `data`. What they receive is valid during that call.
 */
int32_t cualloc_visit(struct cualloc_t *allocator,
                      cualloc_visit_segment_t segment,
                      cualloc_visit_block_t block,
                      void *data);

/**
 * Like cualloc_visit, for the memory of one graph pool.
 *
 * Errors: as cualloc_visit; CUALLOC_CLOSED also for a pool that was released; CUALLOC_DRIVER.
 *
 * May be called from any thread. No lock is held while the functions run.
 *
 * The caller guarantees:
 * As cualloc_visit.
 */
int32_t cualloc_pool_visit(struct cualloc_pool_t *pool,
                           cualloc_visit_segment_t segment,
                           cualloc_visit_block_t block,
                           void *data);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* CUALLOC_H */
