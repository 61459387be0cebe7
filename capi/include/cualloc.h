/* cualloc: a caching allocator of GPU memory. Written from capi/src by cbindgen: do not edit.
 *
 * Functions return CUALLOC_OK (0) or another code below; cualloc_last_error() has a text then. What a call returns
 * through a pointer is 0 after every failure. All of them may be called from any thread, with any context current or
 * none, and leave that as it is (but for cualloc_make_current). Handles (cualloc_t *, cualloc_options_t *,
 * cualloc_pool_t *) are numbers, never dereferenced and never used again: null is CUALLOC_INVALID_ARGUMENT, any other
 * value that is no living handle CUALLOC_CLOSED. In a forked child of the process that made them nothing but
 * CUALLOC_CONTEXT_LOST can be had of them. Addresses of device memory are uint64_t (CUdeviceptr), streams and contexts are handles of the CUDA driver
 * as void *. How it is built, installed and used: docs/clients/c.md. */


#ifndef CUALLOC_H
#define CUALLOC_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/**
 * Which interface this is: a number that grows with every addition. Nothing is taken away and no type changes
 * without a new run-time name of the library.
 */
#define CUALLOC_ABI_VERSION 6

/**
 * Requests of the capture with the id that cualloc_scope_t.capture has, on all its streams.
 */
#define CUALLOC_SCOPE_CAPTURE 1

/**
 * Requests of the next capture for which the calling thread asks for memory, on all its streams.
 */
#define CUALLOC_SCOPE_NEXT_CAPTURE 2

/**
 * Requests on the stream cualloc_scope_t.stream, captured or not.
 */
#define CUALLOC_SCOPE_STREAM 3

/**
 * Requests on streams to which cualloc_scope_t.when says yes.
 */
#define CUALLOC_SCOPE_WHEN 4

/**
 * Requests of the calling thread, on all streams, captured or not.
 */
#define CUALLOC_SCOPE_THREAD 5

/**
 * The call did what it was asked to do.
 */
#define CUALLOC_OK 0

/**
 * There is no memory, after everything was tried.
 */
#define CUALLOC_OUT_OF_MEMORY 1

/**
 * An argument is null, 0, too large or no valid setting. Nothing was done.
 */
#define CUALLOC_INVALID_ARGUMENT 2

/**
 * The address is not memory of this allocator. Nothing was done.
 */
#define CUALLOC_NOT_OURS 3

/**
 * The address is memory of this allocator, and no live block begins there: it was freed before, or is inside a
 * block where its first byte was asked for. Nothing was done.
 */
#define CUALLOC_NOT_LIVE 4

/**
 * The stream, or a stream that would have to be waited for, is being captured into a graph, and no scope of a graph
 * pool fits. Nothing was done.
 */
#define CUALLOC_CAPTURING 5

/**
 * The handle is not one of a living allocator (or of living options, or a graph pool): it was destroyed, or never was
 * one.
 */
#define CUALLOC_CLOSED 6

/**
 * There is no usable CUDA driver.
 */
#define CUALLOC_NO_DRIVER 7

/**
 * A call of the CUDA driver failed; the text names it.
 */
#define CUALLOC_DRIVER 8

/**
 * The context is gone or broken, the process is a forked child of the one that made the allocator, or it is
 * ending. Device memory is left alone.
 */
#define CUALLOC_CONTEXT_LOST 9

/**
 * The device, or this build of the library, cannot do what is asked for.
 */
#define CUALLOC_UNSUPPORTED 10

/**
 * A defect of the library: it stopped half-way. The allocator should not be used any more.
 */
#define CUALLOC_PANIC 11

/**
 * Blocks, guards or a call on another thread are in the way, or the thread is in a predicate of a scope. Nothing was
 * done.
 */
#define CUALLOC_BUSY 12

/**
 * The memory is suspended, or is not where it should be brought back. Nothing was done.
 */
#define CUALLOC_SUSPENDED 13

/**
 * A file could not be made or written; the text says why.
 */
#define CUALLOC_IO 14

/**
 * Memory is plentiful: the allocator saves driver calls.
 */
#define CUALLOC_MEMORY_PLENTIFUL 0

/**
 * Memory is scarce, because profile=dense says so: the allocator saves bytes.
 */
#define CUALLOC_MEMORY_SCARCE_PROFILE 1

/**
 * Memory is scarce, because the limit is near.
 */
#define CUALLOC_MEMORY_SCARCE_LIMIT 2

/**
 * Memory is scarce, because the device has little free beside the headroom.
 */
#define CUALLOC_MEMORY_SCARCE_DEVICE 3

/**
 * Memory is scarce, because the driver refused some.
 */
#define CUALLOC_MEMORY_SCARCE_REFUSED 4

/**
 * Everything that the allocator has; `which` is not looked at.
 */
#define CUALLOC_SELECT_ALL 0

/**
 * The memory of a graph pool; `which` is its handle (cualloc_pool_create).
 */
#define CUALLOC_SELECT_POOL 2

/**
 * The memory of all graph pools with a tag (cualloc_pool_create_tagged); `which` is the tag's text, which ends with a
 * zero.
 */
#define CUALLOC_SELECT_TAG 3

/**
 * Contents are lost: nobody may read them afterwards before they are written.
 */
#define CUALLOC_CONTENTS_DROP 0

/**
 * Contents are kept in page-locked host memory, which is kept for the next time, until a trim.
 */
#define CUALLOC_CONTENTS_PINNED 1

/**
 * Contents are kept in plain host memory.
 */
#define CUALLOC_CONTENTS_HOST 2

/**
 * Of cualloc_torch_pool_state: it was ended, or never begun.
 */
#define CUALLOC_TORCH_POOL_ENDED 0

/**
 * Of cualloc_torch_pool_state: it was not ended, and its capture is over as far as is known.
 */
#define CUALLOC_TORCH_POOL_OPEN 1

/**
 * Of cualloc_torch_pool_state: its capture goes on.
 */
#define CUALLOC_TORCH_POOL_GOES_ON 2

/**
 * Options for a new allocator. A handle, as cualloc_t is.
 */
typedef struct cualloc_options_t cualloc_options_t;

/**
 * A graph pool. A handle, as cualloc_t is.
 */
typedef struct cualloc_pool_t cualloc_pool_t;

/**
 * An allocator. A handle: a number that is never dereferenced and never used again, so that a wrong one is found
 * out.
 */
typedef struct cualloc_t cualloc_t;

/**
 * A quantity over time: bytes or a number, as the field that holds it says.
 */
typedef struct cualloc_counter_t {
  /**
   * Now.
   */
  uint64_t current;
  /**
   * The largest value since the start, or since cualloc_reset_peaks.
   */
  uint64_t peak;
  /**
   * Everything that was ever added. What was taken away is this less current.
   */
  uint64_t total;
} cualloc_counter_t;

/**
 * Figures of the blocks of one kind.
 */
typedef struct cualloc_pool_stats_t {
  /**
   * Bytes of live blocks, as they were asked for.
   */
  struct cualloc_counter_t requested;
  /**
   * Bytes of live blocks, rounded up as they are handed out.
   */
  struct cualloc_counter_t allocated;
  /**
   * Bytes held from the driver.
   */
  struct cualloc_counter_t reserved;
  /**
   * Bytes of live blocks, and of freed ones that streams other than their own still use.
   */
  struct cualloc_counter_t active;
  /**
   * Live blocks, a number.
   */
  struct cualloc_counter_t blocks;
  /**
   * Pieces of memory held from the driver (segments or physical handles), a number.
   */
  struct cualloc_counter_t segments;
} cualloc_pool_stats_t;

/**
 * Figures of an allocator, all of one instant. The caller sets struct_size to sizeof(cualloc_stats_t) before the
 * call. Later versions of the library add fields at the end: a caller with a smaller structure gets the fields that
 * it has, and of a larger one the library leaves untouched what it does not know.
 *
 * Peaks of requested, active and blocks can be upper bounds; those of allocated and reserved are exact.
 */
typedef struct cualloc_stats_t {
  /**
   * Bytes of this structure as the caller knows it. Not changed.
   */
  size_t struct_size;
  /**
   * Bytes of live blocks, as they were asked for.
   */
  struct cualloc_counter_t requested;
  /**
   * Bytes of live blocks, rounded up as they are handed out.
   */
  struct cualloc_counter_t allocated;
  /**
   * Bytes held from the driver.
   */
  struct cualloc_counter_t reserved;
  /**
   * Bytes of live blocks, and of freed ones that streams other than their own still use.
   */
  struct cualloc_counter_t active;
  /**
   * Live blocks, a number.
   */
  struct cualloc_counter_t blocks;
  /**
   * Pieces of memory held from the driver (segments or physical handles), a number.
   */
  struct cualloc_counter_t segments;
  /**
   * Allocations that failed for lack of memory.
   */
  uint64_t ooms;
  /**
   * Driver allocations that failed for lack of memory and were tried again after room was made.
   */
  uint64_t retries;
  /**
   * Calls of the driver so far, by everything in the process that uses this library.
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
   * The bound on bytes held from the driver, UINT64_MAX if there is none.
   */
  uint64_t limit;
  /**
   * Bytes of free memory, whatever work still uses it.
   */
  uint64_t free_bytes;
  /**
   * Bytes of the largest piece of it.
   */
  uint64_t largest_free;
  /**
   * Streams that the allocator knows now.
   */
  uint64_t streams;
  /**
   * The part of it all that small blocks have. Which blocks are small is the policy's business.
   */
  struct cualloc_pool_stats_t small_pool;
  /**
   * The part of it all that other blocks have.
   */
  struct cualloc_pool_stats_t large_pool;
  /**
   * Bytes that graph pools hold from the driver, those that were released and still have them among them. No other
   * figure here counts them; the limit does.
   */
  uint64_t graph_pools;
  /**
   * Bytes of the device that growth leaves free.
   */
  uint64_t headroom;
  /**
   * Whether the packed policy saves driver calls or bytes, and why: CUALLOC_MEMORY_PLENTIFUL or one of
   * CUALLOC_MEMORY_SCARCE_*.
   */
  uint64_t regime;
} cualloc_stats_t;

/**
 * Whether requests on a stream go to a pool; with the data of its scope. Called by threads that allocate, without any
 * lock held, by several at once: for each request outside of captures, and in a capture once for each stream and
 * thread, as long as the same scopes are open. It must not throw. It may call the library, but an allocation from an
 * allocator that has open scopes is CUALLOC_BUSY there.
 */
typedef bool (*cualloc_when_t)(void *data, void *stream);

/**
 * Is told, once, that nobody will call the predicate of a scope any more; with the scope's data.
 */
typedef void (*cualloc_done_t)(void *data);

/**
 * Which requests go to a pool. All fields but struct_size, which is set to sizeof(cualloc_scope_t), and kind are 0
 * unless the kind needs them. Later versions of the library add fields at the end.
 */
typedef struct cualloc_scope_t {
  /**
   * Bytes of this structure as the caller knows it.
   */
  size_t struct_size;
  /**
   * CUALLOC_SCOPE_CAPTURE, ...
   */
  int32_t kind;
  /**
   * The id of a capture, as cuStreamGetCaptureInfo tells it.
   */
  uint64_t capture;
  /**
   * A stream, as cualloc_alloc takes it.
   */
  void *stream;
  /**
   * The predicate.
   */
  cualloc_when_t when;
  /**
   * Null, or what is told when the predicate is not needed any more.
   */
  cualloc_done_t done;
  /**
   * What both are called with.
   */
  void *data;
} cualloc_scope_t;

/**
 * What a graph pool holds. The caller sets struct_size to sizeof(cualloc_footprint_t) before the call; it grows as
 * cualloc_stats_t does.
 */
typedef struct cualloc_footprint_t {
  /**
   * Bytes of this structure as the caller knows it. Not changed.
   */
  size_t struct_size;
  /**
   * Bytes of live blocks, rounded up as they are handed out.
   */
  uint64_t live;
  /**
   * Live blocks, a number.
   */
  uint64_t blocks;
  /**
   * Bytes of free memory.
   */
  uint64_t free_bytes;
  /**
   * The most bytes of live blocks at once.
   */
  uint64_t peak;
  /**
   * Bytes held from the driver.
   */
  uint64_t physical;
  /**
   * Graphs, with the executables made of them and their launches, that may use the pool's addresses: a number.
   */
  uint64_t leases;
} cualloc_footprint_t;

/**
 * Where the program is: a context (cualloc_context) whose name is a stack, outermost function first with semicolons
 * between, or 0 for the stack of the thread. With the data that was given with it.
 *
 * Called by threads that were just given a block, without any lock held, by several at once. It must not throw. What it
 * allocates itself is not sampled.
 */
typedef uint32_t (*cualloc_stack_source_t)(void *data);

/**
 * PyTorch's name of a pool, as its functions pass it by value (MempoolId_t).
 */
typedef struct cualloc_torch_pool_id_t {
  /**
   * Of a pool that a capture has made; else 0.
   */
  uint64_t first;
  /**
   * Of a pool that a program has made; else 0.
   */
  uint64_t second;
} cualloc_torch_pool_id_t;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

/**
 * The interface that this library has: CUALLOC_ABI_VERSION of the header it was built with. A program that was
 * compiled with a larger number may miss functions here.
 *
 * Any thread, any time.
 */
uint32_t cualloc_abi_version(void);

/**
 * Why the calling thread's last failed call failed: UTF-8, ended by a zero, at most 4095 bytes. Empty if none
 * failed yet; a call that succeeds does not change it. Never null. The text is overwritten by the thread's next
 * call that fails, and is gone when the thread ends. For people: programs go by the code.
 *
 * Any thread, any time; each has its own text.
 */
const char *cualloc_last_error(void);

/**
 * The code of the calling thread's last failed call; CUALLOC_OK if none failed yet. A call that succeeds does not
 * change it. For those functions that do not return a code.
 *
 * Any thread, any time; each has its own.
 */
int32_t cualloc_last_code(void);

/**
 * Allocates bytes (at least 1) of device memory for use on a stream (a CUstream or cudaStream_t). *out is the first
 * byte's address, a multiple of 512.
 *
 * The memory may be used by work of that stream at once. Another stream that uses it must wait for this one by
 * itself, and cualloc_record_stream must say so. Null and 1 are the legacy default stream of the allocator's context,
 * 2 is the calling thread's own default stream there, whatever context is current. Before any other stream is
 * destroyed cualloc_retire_stream must be called.
 *
 * Errors: CUALLOC_OUT_OF_MEMORY, after everything was tried: the text has the whole picture;
 * CUALLOC_INVALID_ARGUMENT for a null handle or out, 0 bytes or more than any device has, or a stream of another
 * device; CUALLOC_CAPTURING; CUALLOC_BUSY in a predicate of a scope, if the allocator has open scopes; CUALLOC_CLOSED;
 * CUALLOC_CONTEXT_LOST; CUALLOC_DRIVER. *out is 0 then, and nothing is lost.
 *
 * Any thread, whatever context is current.
 *
 * What the caller answers for:
 * `stream` is a live stream, or null, 1 or 2; `out` is null or may be written.
 */
int32_t cualloc_alloc(struct cualloc_t *allocator,
                      size_t bytes,
                      void *stream,
                      uint64_t *out);

/**
 * cualloc_alloc at an address that is a multiple of alignment: a power of two, at most 2 MiB (2097152).
 *
 * Errors: as cualloc_alloc, and CUALLOC_INVALID_ARGUMENT for another alignment.
 *
 * Any thread, whatever context is current.
 *
 * What the caller answers for:
 * As cualloc_alloc.
 */
int32_t cualloc_alloc_aligned(struct cualloc_t *allocator,
                              size_t bytes,
                              size_t alignment,
                              void *stream,
                              uint64_t *out);

/**
 * Frees the block that begins at ptr; 0 is CUALLOC_OK. Never waits: work that was given to the block's stream before
 * this call may still use it, and so may work of recorded streams. The stream of the block, and every stream recorded
 * on it, must be alive or retired.
 *
 * Errors: CUALLOC_NOT_OURS, CUALLOC_NOT_LIVE (also a second free), CUALLOC_CAPTURING, CUALLOC_INVALID_ARGUMENT for a
 * null handle, CUALLOC_CLOSED, CUALLOC_CONTEXT_LOST, CUALLOC_DRIVER. In each of them nothing has changed.
 *
 * Any thread, whatever context is current.
 *
 * What the caller answers for:
 * Nobody gives the device work after this call that uses the block.
 */
int32_t cualloc_free(struct cualloc_t *allocator,
                     uint64_t ptr);

/**
 * cualloc_free of a block that a stream used last: that stream used it until now, and nobody will again. The memory
 * is used anew when the work is done that the stream was given so far.
 *
 * Errors: as cualloc_free and cualloc_record_stream. If the free fails after the use was recorded, the block is live
 * and that use stays recorded.
 *
 * Any thread, whatever context is current.
 *
 * What the caller answers for:
 * As cualloc_free; `stream` is a live stream, or null, 1 or 2.
 */
int32_t cualloc_free_on(struct cualloc_t *allocator,
                        uint64_t ptr,
                        void *stream);

/**
 * Says that another stream uses the block around ptr (any address inside it). After its free the block is used anew
 * only when the work is done that the stream was given until the free. In a capture that a graph pool serves, the use
 * counts from the end of the capture on.
 *
 * Errors: CUALLOC_NOT_OURS, CUALLOC_NOT_LIVE, CUALLOC_CAPTURING in any other capture, CUALLOC_BUSY for a stream that
 * captures in a predicate of a scope, CUALLOC_INVALID_ARGUMENT for a null handle, CUALLOC_CLOSED, CUALLOC_CONTEXT_LOST,
 * CUALLOC_DRIVER.
 *
 * Any thread, whatever context is current.
 *
 * What the caller answers for:
 * `stream` is a live stream of any device, or null, 1 or 2.
 */
int32_t cualloc_record_stream(struct cualloc_t *allocator,
                              uint64_t ptr,
                              void *stream);

/**
 * Takes the caller's word that a stream lives until it is retired, so that the allocator may use its handle in calls
 * that do not name it: memory freed on it can then be had by other streams sooner. Not needed for correctness. Null
 * and 1 are kept anyway.
 *
 * Errors: CUALLOC_CAPTURING, CUALLOC_INVALID_ARGUMENT for a null handle or a stream of another context than the
 * allocator's, CUALLOC_UNSUPPORTED for 2, CUALLOC_CLOSED, CUALLOC_CONTEXT_LOST, CUALLOC_DRIVER.
 *
 * Any thread, whatever context is current.
 *
 * What the caller answers for:
 * `stream` is a live stream, or null or 1, and lives until cualloc_retire_stream has succeeded for it or the allocator
 * is destroyed.
 */
int32_t cualloc_adopt_stream(struct cualloc_t *allocator,
                             void *stream);

/**
 * Says that a stream gets no more work that uses memory of this allocator, so that it can be destroyed. To be called
 * while the stream is still alive, for every allocator that it was passed to. Blocks that are live on it stay valid
 * and can be freed later. A stream that this allocator does not know is CUALLOC_OK.
 *
 * Errors: CUALLOC_CAPTURING; CUALLOC_INVALID_ARGUMENT for a null handle, and for 2 where only another thread's own
 * default stream is known; CUALLOC_CLOSED; CUALLOC_CONTEXT_LOST; CUALLOC_DRIVER. In each of them nothing has changed,
 * and the stream must live on.
 *
 * Any thread, whatever context is current.
 *
 * What the caller answers for:
 * `stream` is a live stream, or null, 1 or 2.
 */
int32_t cualloc_retire_stream(struct cualloc_t *allocator,
                              void *stream);

/**
 * Waits until everything that a stream was given so far is complete, whatever context is current: as
 * cuStreamSynchronize, which wants the stream's own.
 *
 * Errors: CUALLOC_CAPTURING while the stream, or for null and 1 another stream of its context that waits for it, is
 * captured: nothing is spoilt, unless that begins meanwhile; CUALLOC_INVALID_ARGUMENT for a null handle; CUALLOC_CLOSED; CUALLOC_CONTEXT_LOST and
 * CUALLOC_DRIVER, also for errors of the work itself.
 *
 * Any thread.
 *
 * What the caller answers for:
 * `stream` is a live stream of the allocator's context, or null, 1 or 2.
 */
int32_t cualloc_stream_synchronize(struct cualloc_t *allocator,
                                   void *stream);

/**
 * The bytes that may be used of the live block that begins at ptr: those that were asked for, rounded up.
 *
 * Errors: CUALLOC_NOT_OURS, CUALLOC_NOT_LIVE (also for an address inside a block), CUALLOC_INVALID_ARGUMENT for a
 * null handle or out, CUALLOC_CLOSED, CUALLOC_CONTEXT_LOST. *out is 0 then.
 *
 * Any thread.
 *
 * What the caller answers for:
 * `out` is null or may be written.
 */
int32_t cualloc_usable_size(struct cualloc_t *allocator,
                            uint64_t ptr,
                            uint64_t *out);

/**
 * The live block around ptr, which may be any address inside it: its first byte's address and its usable bytes.
 *
 * Errors: CUALLOC_NOT_OURS, CUALLOC_NOT_LIVE, CUALLOC_INVALID_ARGUMENT for a null handle, base or bytes,
 * CUALLOC_CLOSED, CUALLOC_CONTEXT_LOST. *base and *bytes are 0 then.
 *
 * Any thread.
 *
 * What the caller answers for:
 * `base` and `bytes` are null or may be written.
 */
int32_t cualloc_base(struct cualloc_t *allocator,
                     uint64_t ptr,
                     uint64_t *base,
                     uint64_t *bytes);

/**
 * New options, with nothing set; null if that is not possible. To be freed with cualloc_options_free.
 *
 * Any thread.
 */
struct cualloc_options_t *cualloc_options_new(void);

/**
 * Frees options. Allocators that were made with them stay as they are. Null, and what was freed before, change
 * nothing.
 *
 * Any thread.
 */
void cualloc_options_free(struct cualloc_options_t *options);

/**
 * Sets one option; the last value of a key counts.
 *
 * Keys are those of CUALLOC_CONFIG: policy (auto, packed, classic), limit (bytes, with K, M, G or T, or a share of
 * the device as 80%), headroom (bytes), waits (scarce, always, never), profile (default, dense), peers (1+3), decay
 * (10s), keep (20%), captures (watched, never), debug (off, or guard, poison, quarantine:SIZE, leaks with + between),
 * and with the prefix tune. views, capture_checks, unretired_streams, self_test (on, off), checks (context, none),
 * handle (bytes), nvtx (auto, off). And device: cuda (the default), or sim, a simulated device of 80 GiB in host
 * memory, in a library that was built with the feature sim. tune.checks is none unless it is set, and
 * tune.unretired_streams is on in shared allocators. Settings that contradict each other are refused by
 * cualloc_create.
 *
 * Errors: CUALLOC_INVALID_ARGUMENT for null, an unknown key, a value that the key does not take, or text that is not
 * UTF-8; CUALLOC_CLOSED for options that were freed; CUALLOC_UNSUPPORTED for device=sim without the simulator.
 *
 * Any thread.
 *
 * What the caller answers for:
 * `key` and `value` are null or end with a zero.
 */
int32_t cualloc_options_set(struct cualloc_options_t *options,
                            const char *key,
                            const char *value);

/**
 * Makes an allocator for a device, by its number from 0 (CUDA_VISIBLE_DEVICES counts), on the device's primary
 * context, which the CUDA runtime uses too. Loads the driver when it is first needed. options may be null: then the
 * environment variable CUALLOC_CONFIG has the settings, as it has those that options do not set.
 *
 * Errors: CUALLOC_INVALID_ARGUMENT for a null out, a device that is not there, or settings that contradict each
 * other; CUALLOC_CLOSED for options that were freed; CUALLOC_NO_DRIVER; CUALLOC_UNSUPPORTED if the device cannot do
 * what the settings ask for, or 4096 allocators are open; CUALLOC_CONTEXT_LOST in a forked child; CUALLOC_DRIVER.
 * *out is null then.
 *
 * Any thread, whatever context is current. That stays current.
 *
 * What the caller answers for:
 * `out` is null or may be written.
 */
int32_t cualloc_create(int32_t device,
                       const struct cualloc_options_t *options,
                       struct cualloc_t **out);

/**
 * Makes an allocator in a context of the caller's (a CUcontext); null means the one that is current on the calling
 * thread. The context stays the caller's, who destroys it after cualloc_destroy. If it is destroyed before, calls
 * that need it fail with CUALLOC_CONTEXT_LOST from the first one on that finds out, and nothing more is called on it.
 *
 * Errors: as cualloc_create, and CUALLOC_INVALID_ARGUMENT if there is no such context, or none is current.
 *
 * Any thread.
 *
 * What the caller answers for:
 * `cu_context` is null or a live context of the driver; `out` is null or may be written.
 */
int32_t cualloc_create_in(void *cu_context,
                          const struct cualloc_options_t *options,
                          struct cualloc_t **out);

/**
 * Makes the allocator's context current on the calling thread if none is, as the CUDA runtime's first call there
 * does. One that is current stays. No other function needs a context to be current, but what others do with the
 * memory may: the runtime's calls make one current for themselves, the driver's and those of C++ over it do not.
 *
 * Errors: CUALLOC_INVALID_ARGUMENT for a null handle, CUALLOC_CLOSED, CUALLOC_CONTEXT_LOST, CUALLOC_DRIVER.
 *
 * Any thread.
 */
int32_t cualloc_make_current(struct cualloc_t *allocator);

/**
 * Gives all memory back to the driver and ends the handle. May wait for work of the device: for that which used freed
 * blocks. Calls that other threads are in with this allocator come to their end first, or fail with CUALLOC_CLOSED,
 * as all later ones do. Its graph pools end with it, and their scopes. When this has returned CUALLOC_OK, nothing of
 * the context is used any more.
 *
 * Errors: CUALLOC_BUSY while blocks are live, a graph may use memory of a pool, a guard keeps memory or a call on
 * another thread holds some, also one of the calling thread's own (in a predicate of a scope); CUALLOC_CAPTURING if a
 * stream would have to be waited for that is being captured; CUALLOC_DRIVER. In each of them nothing was done, and
 * the allocator goes on. CUALLOC_CONTEXT_LOST: the context is gone, memory is left alone, and the handle is ended all
 * the same (not so in a forked child, and not while the process ends). CUALLOC_INVALID_ARGUMENT for null,
 * CUALLOC_CLOSED for a handle that was ended before.
 *
 * Any thread.
 */
int32_t cualloc_destroy(struct cualloc_t *allocator);

/**
 * Gives memory that nobody uses back to the driver until at most keep bytes of it are held. Never waits for work of
 * the device. *released are the bytes that went back, *pending those that would have, but for work that still uses
 * them; each may be null.
 *
 * Errors: CUALLOC_INVALID_ARGUMENT for a null handle, CUALLOC_CLOSED, CUALLOC_CONTEXT_LOST, CUALLOC_DRIVER. Both
 * numbers are 0 then.
 *
 * Any thread, whatever context is current.
 *
 * What the caller answers for:
 * `released` and `pending` are null or may be written.
 */
int32_t cualloc_trim(struct cualloc_t *allocator,
                     uint64_t keep,
                     uint64_t *released,
                     uint64_t *pending);

/**
 * cualloc_trim of everything, which waits on the host for the work of streams that do not capture. What a capture
 * keeps from being waited for is pending, and no error. It waits for whole contexts, which spoils captures of which the
 * allocator cannot know, only for memory of streams that were neither made by the library nor adopted
 * (cualloc_adopt_stream), and while no scope of a graph pool is open for captures.
 *
 * Errors: as cualloc_trim.
 *
 * Any thread, whatever context is current.
 *
 * What the caller answers for:
 * `released` and `pending` are null or may be written.
 */
int32_t cualloc_empty_cache(struct cualloc_t *allocator,
                            uint64_t *released,
                            uint64_t *pending);

/**
 * Bounds the bytes held from the driver; UINT64_MAX lifts the bound. Memory above a lowered bound stays until it is
 * trimmed. With 0 nothing more is taken from the driver.
 *
 * Errors: CUALLOC_INVALID_ARGUMENT for a null handle, CUALLOC_CLOSED, CUALLOC_CONTEXT_LOST in a forked child.
 *
 * Any thread.
 */
int32_t cualloc_set_limit(struct cualloc_t *allocator,
                          uint64_t bytes);

/**
 * Writes the allocator's figures, all of one instant. out->struct_size must be set to the structure's size before the
 * call; it may be that of an older or a newer version.
 *
 * Errors: CUALLOC_INVALID_ARGUMENT for a null handle or out, or a struct_size that is smaller than itself;
 * CUALLOC_CLOSED. The fields are 0 then, if there is an out with a size.
 *
 * Any thread. In a forked child, and after the context was lost, the figures are those of an allocator without memory
 * or the last ones.
 *
 * What the caller answers for:
 * `out` is null or points to a structure that has as many bytes as its `struct_size` says.
 */
int32_t cualloc_stats(struct cualloc_t *allocator,
                      struct cualloc_stats_t *out);

/**
 * Sets all peaks to the current values, at one instant.
 *
 * Errors: CUALLOC_INVALID_ARGUMENT for a null handle, CUALLOC_CLOSED, CUALLOC_CONTEXT_LOST in a forked child.
 *
 * Any thread.
 */
int32_t cualloc_reset_peaks(struct cualloc_t *allocator);

/**
 * Walks everything the allocator knows, computes every number anew, and compares: for tests and diagnosis. What it
 * costs grows with the number of blocks.
 *
 * Errors: CUALLOC_PANIC if something does not agree, which is a defect of the library: the text says what;
 * CUALLOC_INVALID_ARGUMENT for a null handle, and for a block that the program wrote behind, where debug=guard looks for
 * that; CUALLOC_CLOSED, CUALLOC_CONTEXT_LOST in a forked child.
 *
 * Any thread, also beside calls of others.
 */
int32_t cualloc_check(struct cualloc_t *allocator);

/**
 * Makes a pool of memory for stream captures: an arena of its own, whose addresses stay as they are as long as a graph
 * that was captured with them, an executable made of it or a launch of that may use them. Requests go there by scopes
 * (cualloc_pool_enter); they are ordinary calls of cualloc_alloc, and blocks are freed by cualloc_free. Inside a
 * capture freed memory is used again behind the nodes that used it last. The caller promises that launches of graphs
 * that share a pool are ordered one behind another on the device: docs/graphs.md.
 *
 * Errors: CUALLOC_UNSUPPORTED under the classic policy; CUALLOC_INVALID_ARGUMENT for a null handle or out,
 * CUALLOC_CLOSED, CUALLOC_CONTEXT_LOST. *out is null then.
 *
 * Any thread.
 *
 * What the caller answers for:
 * `out` is null or may be written.
 */
int32_t cualloc_pool_create(struct cualloc_t *allocator,
                            struct cualloc_pool_t **out);

/**
 * cualloc_pool_create of a pool with a tag, a text by which all pools that have it are suspended together
 * (CUALLOC_SELECT_TAG). No handle of the driver has memory of two pools. A process keeps the texts of its tags, 65536
 * at most.
 *
 * Errors: as cualloc_pool_create; CUALLOC_INVALID_ARGUMENT also for a tag that is null or not UTF-8, or one too many.
 *
 * Any thread.
 *
 * What the caller answers for:
 * `tag` is null or ends with a zero; `out` is null or may be written.
 */
int32_t cualloc_pool_create_tagged(struct cualloc_t *allocator,
                                   const char *tag,
                                   struct cualloc_pool_t **out);

/**
 * Sends requests to a pool from here on, until *scope is left. Of several scopes that fit a request that of its
 * capture counts, else of its stream, of a predicate, of its thread; and among equals the one that was entered last.
 * A capture whose scopes were all left gets no more memory of the pool, so leave after cuStreamEndCapture.
 *
 * With a predicate: where this fails done is not called, and nobody will call the predicate any more, but threads may
 * have called it meanwhile. Else done is called, on whichever thread, when the scope was left, or ended with the pool
 * or the allocator, and nobody will call the predicate any more.
 *
 * Errors: CUALLOC_INVALID_ARGUMENT for a null pool, which, when or scope, a struct_size smaller than that of the first
 * version, an unknown kind, or a stream of another device; CUALLOC_CLOSED for a pool that was released;
 * CUALLOC_CAPTURING for CUALLOC_SCOPE_STREAM with a stream that is being captured already, for which there are the
 * other kinds; CUALLOC_BUSY for CUALLOC_SCOPE_WHEN inside a predicate; CUALLOC_CONTEXT_LOST; CUALLOC_DRIVER. *scope is
 * 0 then.
 *
 * Any thread.
 *
 * What the caller answers for:
 * `which` is null or points to as many bytes as its `struct_size` says; a stream there is live, or null, 1 or 2, and
 * retired before it is destroyed; predicate and data may be used from any thread until done is called. `scope` is null
 * or may be written.
 */
int32_t cualloc_pool_enter(struct cualloc_pool_t *pool,
                           const struct cualloc_scope_t *which,
                           uint64_t *scope);

/**
 * Leaves a scope. Blocks that it gave stay as they are. Its predicate is not called any more: a thread that is in it
 * is waited for, unless the calling thread is in a predicate itself.
 *
 * Errors: CUALLOC_INVALID_ARGUMENT for a null pool, and a scope that was left before or is not one of this pool;
 * CUALLOC_CLOSED for a pool that was released, which has left its scopes; CUALLOC_CONTEXT_LOST.
 *
 * Any thread.
 */
int32_t cualloc_pool_leave(struct cualloc_pool_t *pool,
                           uint64_t scope);

/**
 * Ends a pool's handle: no further capture comes. Scopes that are open are left. The memory goes back to the driver
 * as soon as no graph, executable or launch, and no block, uses it. cualloc_destroy ends the pools of its allocator;
 * while a graph may use their memory it is CUALLOC_BUSY.
 *
 * Errors: CUALLOC_INVALID_ARGUMENT for null, CUALLOC_CLOSED for a pool that was released before,
 * CUALLOC_CONTEXT_LOST.
 *
 * Any thread, also while a capture is under way.
 */
int32_t cualloc_pool_release(struct cualloc_pool_t *pool);

/**
 * Writes what a pool holds now. out->struct_size must be set before the call. The figures of cualloc_stats do not
 * count it, the limit does.
 *
 * Errors: CUALLOC_INVALID_ARGUMENT for a null pool or out, or a struct_size that is smaller than itself;
 * CUALLOC_CLOSED, CUALLOC_CONTEXT_LOST. The fields are 0 then, if there is an out with a size.
 *
 * Any thread.
 *
 * What the caller answers for:
 * `out` is null or points to a structure that has as many bytes as its `struct_size` says.
 */
int32_t cualloc_pool_footprint(struct cualloc_pool_t *pool,
                               struct cualloc_footprint_t *out);

/**
 * Says that a graph (a CUgraph) which was not captured with a pool uses its memory: the pool's addresses stay as long
 * as the graph, the executables made of it, and their launches.
 *
 * Errors: CUALLOC_INVALID_ARGUMENT for null, CUALLOC_CLOSED, CUALLOC_CONTEXT_LOST; CUALLOC_DRIVER, also where the
 * driver tells nobody of a graph's end.
 *
 * Any thread.
 *
 * What the caller answers for:
 * `graph` is null or a live graph, which no other thread uses meanwhile.
 */
int32_t cualloc_pool_retain(struct cualloc_pool_t *pool,
                            void *graph);

/**
 * Begins to record all allocators of the process: to a file that is written until cualloc_record_stop, or, where path
 * is null, to memory, of which cualloc_record_dump writes what is newest. What is live now is recorded as held. The
 * file is new, for its owner alone, and replaces what stands there; `cualloc replay`, `view` and `export` read it.
 * One recording runs in a process.
 *
 * Errors: CUALLOC_BUSY while one runs, also the one that CUALLOC_RECORD began; CUALLOC_IO if the file cannot be made;
 * CUALLOC_CONTEXT_LOST in a forked child.
 *
 * Any thread, whatever context is current. A call under way on another thread may be missed.
 *
 * What the caller answers for:
 * `path` is null or ends with a zero.
 */
int32_t cualloc_record_start(const char *path);

/**
 * As cualloc_record_start, with the stacks of some allocations: one for each `bytes` that are asked for, on the average
 * (rounded up to a multiple of 512; 0 for none). With some hundreds of KiB it can stay on: a stack takes microseconds,
 * and milliseconds at its first time. `cualloc export --to pprof` and `view` tell from them who holds how much.
 *
 * Errors: as cualloc_record_start.
 *
 * Any thread, whatever context is current. A call under way on another thread may be missed.
 *
 * What the caller answers for:
 * `path` is null or ends with a zero.
 */
int32_t cualloc_record_start_with_stacks(const char *path,
                                         uint64_t bytes);

/**
 * Has samples of stacks (cualloc_record_start_with_stacks, CUALLOC_RECORD=stacks:SIZE:FILE) ask a function for the place
 * in the program; with null they take the stack of the thread again. When another function is set, or null, this waits until
 * no other thread is in the former one, for two seconds at most: that thread may wait for something that the caller
 * holds. The function and its data must stay until then, or, where that was not enough, until those calls are over.
 *
 * Any thread, any time.
 *
 * What the caller answers for:
 * The function may be called as it says, by any thread.
 */
void cualloc_set_stack_source(cualloc_stack_source_t source,
                              void *data);

/**
 * Writes a file of what the recording's rings hold now: of one to memory the newest 32767 events of each stream cache,
 * and as many others. The recording goes on. The file is made as by cualloc_record_start, when it is whole.
 *
 * Errors: CUALLOC_INVALID_ARGUMENT for null, or if no recording runs that cualloc_record_start began; CUALLOC_IO;
 * CUALLOC_CONTEXT_LOST in a forked child.
 *
 * Any thread, whatever context is current.
 *
 * What the caller answers for:
 * `path` is null or ends with a zero.
 */
int32_t cualloc_record_dump(const char *path);

/**
 * As cualloc_record_dump, but a memory snapshot of PyTorch's, as a pickle: its tools and its viewer open it.
 *
 * Errors: as cualloc_record_dump.
 *
 * Any thread, whatever context is current.
 *
 * What the caller answers for:
 * `path` is null or ends with a zero.
 */
int32_t cualloc_record_snapshot(const char *path);

/**
 * Ends the recording, and its file. *events is how many the file has, 0 if there is none, and *lost how many the thread
 * that writes it came too late for; either may be null.
 *
 * Errors: CUALLOC_INVALID_ARGUMENT if no recording runs that cualloc_record_start began; CUALLOC_IO if the file could
 * not be written: it is good as far as it goes, and the recording has ended; CUALLOC_CONTEXT_LOST in a forked child.
 *
 * Any thread, whatever context is current.
 *
 * What the caller answers for:
 * `events` and `lost` are null or may be written.
 */
int32_t cualloc_record_stop(uint64_t *events,
                            uint64_t *lost);

/**
 * The number of a name for what a thread is doing, for cualloc_set_context. Parts between semicolons are a stack,
 * outermost first: "train;forward". The same name has the same number. 0 if the name is null or not UTF-8, or 65535
 * others are known already: a program keeps the numbers that it gets. Of a name longer than 4096 bytes the innermost
 * parts are kept.
 *
 * Any thread, any time; takes a lock.
 *
 * What the caller answers for:
 * `name` is null or ends with a zero.
 */
uint32_t cualloc_context(const char *name);

/**
 * Puts the calling thread into a context until it is put into another: what it allocates and frees carries the name in
 * recordings, and in the reports of compute-sanitizer. 0 is none. Returns the context that it was in.
 *
 * Any thread, any time; each is in one of its own. Costs one store.
 */
uint32_t cualloc_set_context(uint32_t context);

/**
 * Sets what shared allocators (cualloc_shared) are made with; null means the defaults. The options are copied. Of
 * these allocators unretired_streams is on unless it is set to off: streams that are not adopted may be destroyed
 * without being retired.
 *
 * Errors: CUALLOC_BUSY if there is a shared allocator already; CUALLOC_CLOSED for options that were freed;
 * CUALLOC_CONTEXT_LOST in a forked child.
 *
 * Any thread.
 */
int32_t cualloc_shared_options(const struct cualloc_options_t *options);

/**
 * The allocator that all parts of the process share for a device (its number from 0), on the device's primary context.
 * The first call makes it, with what cualloc_shared_options has set. Memory of the functions for PyTorch
 * (cualloc_torch_alloc) is its memory. It lives as long as the process: nobody should destroy it, and after a
 * destroy every call with it, of whoever shares it, is CUALLOC_CLOSED.
 *
 * Errors: as cualloc_create. *out is null then, and the next call tries again.
 *
 * Any thread, whatever context is current. That stays current.
 *
 * What the caller answers for:
 * `out` is null or may be written.
 */
int32_t cualloc_shared(int32_t device,
                       struct cualloc_t **out);

/**
 * The allocator of a device that cualloc_shared has made, null if there is none: makes nothing, no context either.
 *
 * Any thread, any time.
 */
struct cualloc_t *cualloc_shared_made(int32_t device);

/**
 * Gives memory back to the driver and keeps its addresses, so that other processes can have it until cualloc_resume.
 * select is one of CUALLOC_SELECT_.. and which says of what; contents is one of CUALLOC_CONTENTS_... Blocks stay live,
 * and may be freed meanwhile. Waits for all work of the contexts involved. *bytes is what the driver has back.
 *
 * Errors: CUALLOC_SUSPENDED if it is suspended already, CUALLOC_BUSY while a guard keeps memory or a call on another
 * thread holds some, CUALLOC_CAPTURING, CUALLOC_UNSUPPORTED under the classic policy, CUALLOC_INVALID_ARGUMENT for a
 * null handle or bytes, an unknown number, a pool of another allocator or a tag that no pool has, CUALLOC_CLOSED,
 * CUALLOC_CONTEXT_LOST, CUALLOC_DRIVER. Nothing is suspended then; but if the driver, after it refused a call, refuses to take back what was done, the memory is
 * suspended, and cualloc_resume brings it back.
 *
 * Any thread, whatever context is current.
 *
 * What the caller answers for:
 * Until cualloc_resume has succeeded nobody gives a device work that uses the memory. Contents that are not kept are
 * not read before they are written. `which` is, for CUALLOC_SELECT_TAG, null or a text that ends with a zero; `bytes` is
 * null or may be written.
 */
int32_t cualloc_suspend(struct cualloc_t *allocator,
                        int32_t select,
                        void *which,
                        int32_t contents,
                        uint64_t *bytes);

/**
 * Brings suspended memory back to its addresses, with access for all devices that had it and with the contents that
 * were kept. *bytes is what is there again.
 *
 * Errors: CUALLOC_OUT_OF_MEMORY: the text says how many bytes are missing; CUALLOC_SUSPENDED if nothing of it is
 * suspended, CUALLOC_BUSY while a call on another thread suspends or resumes, CUALLOC_INVALID_ARGUMENT for a null
 * handle or bytes, an unknown number, a pool of another allocator or a tag that no pool has, CUALLOC_CLOSED,
 * CUALLOC_CONTEXT_LOST, CUALLOC_DRIVER. It is suspended as before then, and may be tried again.
 *
 * Any thread, whatever context is current.
 *
 * What the caller answers for:
 * `which` is, for CUALLOC_SELECT_TAG, null or a text that ends with a zero; `bytes` is null or may be written.
 */
int32_t cualloc_resume(struct cualloc_t *allocator,
                       int32_t select,
                       void *which,
                       uint64_t *bytes);

/**
 * Allocates bytes on a device for use on a stream, as PyTorch asks for them: from the device's shared allocator
 * (cualloc_shared), which is made if there is none. Null for 0 bytes, which is no failure, and after every
 * failure, whose code cualloc_last_code() has: then cualloc_last_error() begins, where memory is what lacks, with
 * the words of PyTorch's own error.
 *
 * Errors: as cualloc_alloc and cualloc_create.
 *
 * Any thread, whatever context is current.
 *
 * What the caller answers for:
 * As cualloc_alloc.
 */
void *cualloc_torch_alloc(size_t bytes,
                          int32_t device,
                          void *stream);

/**
 * Frees what cualloc_torch_alloc returned. Never waits and never fails aloud: a null pointer, and memory of a context
 * that is gone, of a forked child or of a process that ends, are left alone. A block that cannot be freed now, because
 * a stream is being captured say, is freed by a later call.
 *
 * Any thread, whatever context is current.
 *
 * What the caller answers for:
 * As cualloc_free.
 */
void cualloc_torch_free(void *ptr,
                        size_t _bytes,
                        int32_t device,
                        void *_stream);

/**
 * PyTorch's hook when a pluggable allocator is set (with 0 devices) and when CUDA begins: loads the driver, so that a
 * first allocation finds it. Without one that allocation says so.
 *
 * Any thread.
 */
void cualloc_torch_init(int32_t device_count);

/**
 * PyTorch's hook for torch.cuda.empty_cache(): cualloc_empty_cache of all shared allocators.
 *
 * Any thread, whatever context is current.
 */
void cualloc_torch_reset(void);

/**
 * PyTorch's hook for torch.cuda.set_per_process_memory_fraction(): bounds what is held from the driver to this part of
 * the device's memory.
 *
 * Errors: CUALLOC_INVALID_ARGUMENT for what is not from 0 to 1; as cualloc_create. Nothing has changed then.
 *
 * Any thread.
 */
int32_t cualloc_torch_fraction(double fraction,
                               int32_t device);

/**
 * PyTorch's hook for the block around an address, of whichever device: its first byte, and in *bytes its size. Of an
 * address that is not ours it is the address itself and 0.
 *
 * Any thread.
 *
 * What the caller answers for:
 * `bytes` is null or may be written.
 */
void *cualloc_torch_base(void *ptr,
                         size_t *bytes);

/**
 * PyTorch's hook for Tensor.record_stream: cualloc_record_stream for the block around an address, of whichever device.
 * Memory that is not ours, and null, are CUALLOC_OK: a tensor may stand on memory of others.
 *
 * Errors: as cualloc_record_stream, but for CUALLOC_NOT_OURS.
 *
 * Any thread, whatever context is current.
 *
 * What the caller answers for:
 * As cualloc_record_stream.
 */
int32_t cualloc_torch_record_stream(void *ptr,
                                    void *stream);

/**
 * PyTorch's hook before a capture (and for any other use of a pool): from here on requests on a device's streams to
 * which the predicate says yes go to the pool with this id, which is made if there is none, until
 * cualloc_torch_pool_end. Pools are graph pools of the device's shared allocator.
 *
 * Errors: as cualloc_create, cualloc_pool_create and cualloc_pool_enter; nothing was begun then, and done is not
 * called.
 *
 * Any thread, whatever context is current.
 *
 * What the caller answers for:
 * As cualloc_pool_enter.
 */
int32_t cualloc_torch_pool_begin(int32_t device,
                                 struct cualloc_torch_pool_id_t id,
                                 cualloc_when_t when,
                                 cualloc_done_t done,
                                 void *data);

/**
 * PyTorch's hook after a capture: ends what cualloc_torch_pool_begin has begun with this id, on the calling thread if
 * it was there. What was not begun, or was ended before, is CUALLOC_OK.
 *
 * Errors: CUALLOC_CONTEXT_LOST in a forked child.
 *
 * Any thread, whatever context is current.
 */
int32_t cualloc_torch_pool_end(int32_t device,
                               struct cualloc_torch_pool_id_t id);

/**
 * PyTorch's hook when a graph goes: once for each begin. The last one releases the pool (cualloc_pool_release). A pool
 * that was not begun is CUALLOC_OK.
 *
 * Errors: CUALLOC_CONTEXT_LOST in a forked child; CUALLOC_CLOSED if the device's allocator was destroyed.
 *
 * Any thread, whatever context is current.
 */
int32_t cualloc_torch_pool_release(int32_t device,
                                   struct cualloc_torch_pool_id_t id);

/**
 * How often the calling thread has called cualloc_torch_pool_release. From it a layer above learns whether a version of
 * PyTorch releases the pool of a capture that failed.
 *
 * Any thread.
 */
uint64_t cualloc_torch_pool_releases(void);

/**
 * The number of what the calling thread has begun last of all that it has begun and not ended; 0 if there is none, and
 * in a forked child. Numbers grow, and are never used again.
 *
 * Any thread.
 */
uint64_t cualloc_torch_pool_newest(void);

/**
 * The device and the id of what was begun with this number (cualloc_torch_pool_newest) and not ended. Either pointer may
 * be null; both get 0 after a failure.
 *
 * Errors: CUALLOC_NOT_LIVE if it was ended, or never begun; CUALLOC_CONTEXT_LOST in a forked child.
 *
 * Any thread.
 *
 * What the caller answers for:
 * `device` and `id` are null or may be written.
 */
int32_t cualloc_torch_pool_name(uint64_t number,
                                int32_t *device,
                                struct cualloc_torch_pool_id_t *id);

/**
 * What became of what was begun with this number: CUALLOC_TORCH_POOL_ENDED, CUALLOC_TORCH_POOL_OPEN, or, if its
 * predicate says yes to the stream, CUALLOC_TORCH_POOL_GOES_ON. With null the predicate is not asked. In a forked child
 * all of them are ended.
 *
 * Any thread, whatever context is current.
 *
 * What the caller answers for:
 * `stream` is null or a live stream.
 */
int32_t cualloc_torch_pool_state(uint64_t number,
                                 void *stream);

/**
 * For captures of which PyTorch says nothing, since they failed or nobody has ended them: ends and releases what was
 * begun with this number (cualloc_torch_pool_newest). Nothing is done if its predicate says yes to the stream, since
 * the capture goes on then; with null it is not asked. What was ended before is CUALLOC_OK.
 *
 * Errors: CUALLOC_CONTEXT_LOST in a forked child.
 *
 * Any thread, whatever context is current.
 *
 * What the caller answers for:
 * `stream` is null or a live stream.
 */
int32_t cualloc_torch_pool_abandon(uint64_t number,
                                   void *stream);

/**
 * The graph pool that PyTorch's pool with this id is now, for cualloc_pool_footprint; null if there is none. It is
 * PyTorch's to release.
 *
 * Any thread.
 */
struct cualloc_pool_t *cualloc_torch_pool(int32_t device,
                                          struct cualloc_torch_pool_id_t id);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* CUALLOC_H */
