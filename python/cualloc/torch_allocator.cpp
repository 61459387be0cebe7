// A subclass of PyTorch's allocator class that calls the C library. It is compiled against the headers of the PyTorch
// that loads it (_shim.py).
//
// Its base class implements every function of the interface, so this file also compiles with versions of PyTorch that
// add functions. The subclass overrides the base's allocations and frees, which lock a mutex and search a map.
#include "cualloc.h"
#include "torch_history.h"
#include "torch_table.h"

#include <c10/core/impl/GPUTrace.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/csrc/cuda/CUDAPluggableAllocator.h>
#include <torch/version.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

namespace {

using c10::CachingAllocator::Stat;
using c10::CachingAllocator::StatArray;
using c10::CachingDeviceAllocator::DeviceStats;
using Base = torch::cuda::CUDAPluggableAllocator::CUDAPluggableAllocator;
using Filter = std::function<bool(cudaStream_t)>;

cualloc_torch_pool_id_t id_of(MempoolId_t id) { return {id.first, id.second}; }

// Returns the statistics in the terms of PyTorch, which include pools of graphs.
cualloc_stats_t stats_of(c10::DeviceIndex device) {
    cualloc_stats_t stats{};
    stats.struct_size = sizeof stats;
    if (cualloc_t *allocator = cualloc_shared_made(device)) cualloc_torch_stats(allocator, &stats);
    return stats;
}

[[noreturn]] void raise(std::int32_t code, const std::string &text) {
    if (code == CUALLOC_OUT_OF_MEMORY) TORCH_CHECK_WITH(OutOfMemoryError, false, text);
    TORCH_CHECK(false, text);
    std::abort();
}

void check(std::int32_t code) {
    if (code != CUALLOC_OK) raise(code, cualloc_last_error());
}

// Reports an allocation that was made, or a free that follows, to torch.profiler.
void report_to_profiler(void *memory, bool allocated) {
    cualloc_block_t block{};
    std::int32_t ordinal = 0;
    if (!cualloc_torch_block(memory, &ordinal, &block)) return;
    const auto device = static_cast<c10::DeviceIndex>(ordinal);
    const cualloc_stats_t stats = stats_of(device);
    const std::int64_t change = allocated ? block.bytes : -static_cast<std::int64_t>(block.bytes);
    const std::size_t live = stats.allocated.current - (allocated ? 0 : block.bytes);
    c10::reportMemoryUsageToProfiler(memory, change, live, stats.reserved.current, c10::Device(c10::kCUDA, device));
}

void trace(void *memory, bool allocated) {
    if (!memory) return;
    if (C10_UNLIKELY(c10::memoryProfilingEnabled())) report_to_profiler(memory, allocated);
    const c10::impl::PyInterpreter *interpreter = c10::impl::GPUTrace::get_trace();
    if (!interpreter) return;
    const auto at = reinterpret_cast<std::uintptr_t>(memory);
    if (allocated) {
        (*interpreter)->trace_gpu_memory_allocation(c10::kCUDA, at);
    } else {
        (*interpreter)->trace_gpu_memory_deallocation(c10::kCUDA, at);
    }
}

// All blocks have this deleter: PyTorch recognises blocks of the allocator by comparing their deleter with it.
void delete_block(void *memory) {
    if (C10_UNLIKELY(history.watches()) && memory) history.freed(memory);
    trace(memory, false);
    cualloc_torch_delete(memory);
}

c10::DataPtr owner_of(void *memory, c10::DeviceIndex device) {
    return {memory, memory, &delete_block, c10::Device(c10::kCUDA, device)};
}

// A filter that throws, because the driver refuses to report a stream's state, does not accept the stream.
bool ask(void *filter, void *stream) {
    try {
        return (*static_cast<Filter *>(filter))(static_cast<cudaStream_t>(stream));
    } catch (...) {
        return false;
    }
}

void forget(void *filter) { delete static_cast<Filter *>(filter); }

// Another allocator as the source of a pool's segments. Nothing may be thrown into the C library.
struct SegmentsOf {
    std::shared_ptr<CUDAAllocator> allocator;
    c10::DeviceIndex device;

    static std::uint64_t allocate(void *data, std::uint64_t bytes, void *stream) {
        const auto &self = *static_cast<SegmentsOf *>(data);
        try {
            const c10::cuda::CUDAGuard guard(self.device);
            // The allocator may call functions that are refused while a stream captures.
            const c10::cuda::CUDAStreamCaptureModeGuard relaxed{cudaStreamCaptureModeRelaxed};
            void *memory = self.allocator->raw_alloc_with_stream(bytes, static_cast<cudaStream_t>(stream));
            return reinterpret_cast<std::uintptr_t>(memory);
        } catch (...) {
            return 0;
        }
    }

    static void free(void *data, std::uint64_t address, std::uint64_t) {
        const auto &self = *static_cast<SegmentsOf *>(data);
        try {
            const c10::cuda::CUDAGuard guard(self.device);
            const c10::cuda::CUDAStreamCaptureModeGuard relaxed{cudaStreamCaptureModeRelaxed};
            self.allocator->raw_delete(reinterpret_cast<void *>(address));
        } catch (const std::exception &error) {
            TORCH_WARN("cannot free a segment of a torch.cuda.MemPool: ", error.what());
        }
    }

    static void done(void *data) { delete static_cast<SegmentsOf *>(data); }
};

// The live blocks of a pool at some time.
struct Checkpoint final : AllocatorState {
    Checkpoint(cualloc_pool_t *pool, MempoolId_t id) : id(id) { check(cualloc_pool_checkpoint(pool, &handle)); }
    Checkpoint(const Checkpoint &) = delete;
    Checkpoint &operator=(const Checkpoint &) = delete;
    ~Checkpoint() override { cualloc_checkpoint_free(handle); }

    std::vector<void *> blocks() const {
        std::vector<void *> found;
        const auto add = [](void *data, std::uint64_t address, std::uint64_t) noexcept {
            static_cast<std::vector<void *> *>(data)->push_back(reinterpret_cast<void *>(address));
        };
        check(cualloc_checkpoint_visit(handle, add, &found));
        return found;
    }

    MempoolId_t id;
    cualloc_checkpoint_t *handle = nullptr;
};

// Fills a statistic from a counter, whose totals count from those of `base`.
void fill(Stat &to, const cualloc_counter_t &from, const cualloc_counter_t &base) {
    to.current = static_cast<std::int64_t>(from.current);
    to.peak = static_cast<std::int64_t>(from.peak);
    to.allocated = static_cast<std::int64_t>(from.total - base.total);
    to.freed = static_cast<std::int64_t>((from.total - from.current) - (base.total - base.current));
}

// What a visit to segments and blocks adds to. Each segment of a snapshot is a run of blocks. Bytes that a view shows are
// listed there while they are in a live block, and at home otherwise, so that no byte counts twice.
struct Visit {
    std::vector<SegmentInfo> &segments;
    c10::DeviceIndex device;
    MempoolId_t id;
    bool small = false;
    // The end of the block that was visited last, 0 before the first one of a segment.
    std::size_t end = 0;

    static void segment(void *data, const cualloc_segment_t *found) noexcept {
        auto &visit = *static_cast<Visit *>(data);
        visit.small = found->small;
        visit.end = 0;
    }

    static void block(void *data, const cualloc_block_t *found) noexcept {
        auto &visit = *static_cast<Visit *>(data);
        if (found->state == CUALLOC_BLOCK_ALIASED) return;
        if (found->address != visit.end) visit.begin(found->address);
        visit.end = found->address + found->bytes;
        BlockInfo block;
        block.size = found->bytes;
        block.requested_size = found->requested;
        block.allocated = found->state == CUALLOC_BLOCK_LIVE;
        block.active = block.allocated || found->state == CUALLOC_BLOCK_PENDING;
        SegmentInfo &segment = visit.segments.back();
        segment.total_size += block.size;
        segment.requested_size += block.requested_size;
        segment.allocated_size += block.allocated ? block.size : 0;
        segment.active_size += block.active ? block.size : 0;
        segment.blocks.push_back(std::move(block));
    }

    void begin(std::size_t address) {
        SegmentInfo segment;
        segment.device = device;
        segment.address = address;
        segment.is_large = !small;
        segment.is_expandable = true;
        segment.owner_private_pool_id = id;
#if TORCH_VERSION_MINOR >= 11
        // NCCL registers segments in this order, which must be the same in all ranks.
        segment.registration_counter = static_cast<std::int32_t>(segments.size());
#endif
        segments.push_back(std::move(segment));
    }
};

} // namespace

namespace cualloc_torch {

// Its functions are exported for mismatch().
struct __attribute__((visibility("default"))) Allocator final : Base {
    Allocator()
        : Base([](std::size_t bytes, int device,
                  cudaStream_t stream) { return cualloc_torch_alloc(bytes, device, stream); },
               [](void *memory, std::size_t, int, cudaStream_t) { cualloc_torch_delete(memory); }) {}

    // ---- blocks

    void *obtain(std::size_t bytes, c10::DeviceIndex device, cudaStream_t stream) {
        if (C10_UNLIKELY(history.watches())) {
            history.follow(device);
            Context context = history.context(RecordContext::STATE);
            void *memory = obtain_untraced(bytes, device, stream);
            if (memory) history.allocated(memory, bytes, device, stream, std::move(context));
            return memory;
        }
        return obtain_untraced(bytes, device, stream);
    }

    void *obtain_untraced(std::size_t bytes, c10::DeviceIndex device, cudaStream_t stream) {
        void *memory = cualloc_torch_alloc(bytes, device, stream);
        if (C10_UNLIKELY(!memory && bytes != 0)) memory = obtain_scarce(bytes, device, stream);
        trace(memory, true);
        return memory;
    }

    c10::DataPtr allocate(std::size_t bytes) override {
        const c10::DeviceIndex device = c10::cuda::current_device();
        return owner_of(obtain(bytes, device, c10::cuda::getCurrentCUDAStream(device)), device);
    }

    c10::DeleterFnPtr raw_deleter() const override { return &delete_block; }

    void *raw_alloc(std::size_t bytes) override {
        const c10::DeviceIndex device = c10::cuda::current_device();
        return obtain(bytes, device, c10::cuda::getCurrentCUDAStream(device));
    }

    void *raw_alloc_with_stream(std::size_t bytes, cudaStream_t stream) override {
        return obtain(bytes, c10::cuda::current_device(), stream);
    }

    void raw_delete(void *memory) override { delete_block(memory); }

    void recordStream(const c10::DataPtr &memory, c10::cuda::CUDAStream stream) override {
        if (memory.get() && memory.get_deleter() == &delete_block) {
            check(cualloc_torch_record_stream(memory.get(), stream.stream()));
            if (C10_UNLIKELY(history.watches())) history.used(memory.get(), stream.stream());
        }
    }

    void *getBaseAllocation(void *memory, std::size_t *bytes) override { return cualloc_torch_base(memory, bytes); }

    // ---- the device's memory

    void init(int devices) override {
        cualloc_torch_init(devices);
        initialized_ = true;
    }

    double getMemoryFraction(c10::DeviceIndex device) override {
        cualloc_t *allocator = nullptr;
        check(cualloc_shared(device, &allocator));
        const auto total = static_cast<double>(driver_memory(device).second);
        return std::min(static_cast<double>(stats_of(device).limit) / total, 1.0);
    }

    void setMemoryFraction(double fraction, c10::DeviceIndex device) override {
        check(cualloc_torch_fraction(fraction, device));
    }

    void emptyCache(MempoolId_t id) override {
        if (id == MempoolId_t{0, 0}) return cualloc_torch_reset();
        cualloc_torch_retry_frees();
        for (c10::DeviceIndex device = 0; device < c10::cuda::device_count(); device++) {
            cualloc_pool_t *pool = cualloc_torch_pool(device, id_of(id));
            const std::int32_t code = pool ? cualloc_pool_empty_cache(pool, nullptr) : CUALLOC_OK;
            // Another thread may release the pool. Suspended memory is not there.
            if (code != CUALLOC_CLOSED && code != CUALLOC_SUSPENDED) check(code);
        }
    }

    // Reports the bytes that one request could get at most. Free memory counts even if it is not contiguous, because
    // views make it so, and even if work in flight may still use it.
    void cacheInfo(c10::DeviceIndex device, std::size_t *largest) override {
        const cualloc_stats_t stats = stats_of(device);
        const std::uint64_t free = driver_memory(device).first, reserved = stats.reserved.current;
        const std::uint64_t driver = free - std::min(free, stats.headroom);
        const std::uint64_t below = stats.limit - std::min(stats.limit, reserved);
        *largest = static_cast<std::size_t>(stats.free_bytes + std::min(driver, below));
    }

    // PyTorch calls this once for each pair of devices, before work of the first uses memory of the second.
    void enablePeerAccess(c10::DeviceIndex user, c10::DeviceIndex owner) override {
        Base::enablePeerAccess(user, owner);
        cualloc_t *allocator = nullptr;
        check(cualloc_shared(owner, &allocator));
        const std::int32_t code = cualloc_add_peer(allocator, user);
        // The classic policy allocates memory that cudaDeviceEnablePeerAccess makes accessible, which the base called.
        if (code != CUALLOC_UNSUPPORTED) check(code);
    }

    cudaError_t memcpyAsync(void *to, int to_device, const void *from, int from_device, std::size_t bytes,
                            cudaStream_t stream, bool) override {
        // Between devices the driver copies without access of one to the other's memory.
        if (to_device != from_device) return cudaMemcpyPeerAsync(to, to_device, from, from_device, bytes, stream);
        return cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream);
    }

    std::string name() override { return "cualloc"; }

    // ---- statistics

    DeviceStats getDeviceStats(c10::DeviceIndex device) override {
        const cualloc_stats_t now = stats_of(device);
        const std::lock_guard<std::mutex> lock(mutex_);
        const cualloc_stats_t &base = bases_[device];
        DeviceStats stats;
        const auto row = [&](StatArray &to, auto field) {
            fill(to[0], now.*field.first, base.*field.first);
            fill(to[1], now.small_pool.*field.second, base.small_pool.*field.second);
            fill(to[2], now.large_pool.*field.second, base.large_pool.*field.second);
        };
        using All = cualloc_stats_t;
        using Pool = cualloc_pool_stats_t;
        row(stats.allocation, std::pair(&All::blocks, &Pool::blocks));
        row(stats.active, std::pair(&All::blocks, &Pool::blocks));
        row(stats.segment, std::pair(&All::segments, &Pool::segments));
        row(stats.allocated_bytes, std::pair(&All::allocated, &Pool::allocated));
        row(stats.reserved_bytes, std::pair(&All::reserved, &Pool::reserved));
        row(stats.active_bytes, std::pair(&All::active, &Pool::active));
        row(stats.requested_bytes, std::pair(&All::requested, &Pool::requested));
        stats.num_alloc_retries = static_cast<std::int64_t>(now.retries - base.retries);
        stats.num_ooms = static_cast<std::int64_t>(now.ooms - base.ooms);
        stats.num_device_alloc = stats.segment[0].allocated;
        stats.num_device_free = stats.segment[0].freed;
        stats.max_split_size = -1;
        return stats;
    }

    void resetAccumulatedStats(c10::DeviceIndex device) override {
        const cualloc_stats_t now = stats_of(device);
        const std::lock_guard<std::mutex> lock(mutex_);
        bases_[device] = now;
    }

    void resetPeakStats(c10::DeviceIndex device) override {
        if (cualloc_t *allocator = cualloc_shared_made(device)) check(cualloc_reset_peaks(allocator));
    }

    // Segments and blocks, of one pool or of all memory, and the history.
#if TORCH_VERSION_MINOR >= 11
    SnapshotInfo snapshot(MempoolId_t wanted, bool events) override {
#else
    SnapshotInfo snapshot(MempoolId_t wanted) override {
        constexpr bool events = true;
#endif
        SnapshotInfo found{};
        const bool all = wanted == MempoolId_t{0, 0};
        for (c10::DeviceIndex device = 0; device < c10::cuda::device_count(); device++) {
            cualloc_t *allocator = cualloc_shared_made(device);
            if (!allocator) continue;
            Visit visit{found.segments, device, {0, 0}};
            if (all) check(cualloc_visit(allocator, &Visit::segment, &Visit::block, &visit));
            for (const auto &[id, scarce] : pools_of(device)) {
                visit.id = id;
                cualloc_pool_t *pool = all || id == wanted ? cualloc_torch_pool(device, id_of(id)) : nullptr;
                const std::int32_t code =
                    pool ? cualloc_pool_visit(pool, &Visit::segment, &Visit::block, &visit) : CUALLOC_OK;
                // Another thread may release the pool.
                if (code != CUALLOC_CLOSED) check(code);
            }
        }
        found.device_traces.resize(c10::cuda::device_count());
        found.config_metadata.last_allocator_settings = "cualloc";
        history.complete(found, all, events);
        return found;
    }

    bool isHistoryEnabled() override { return history.records(); }

#if TORCH_VERSION_MINOR >= 11
    void recordHistory(bool enabled, CreateContextFn recorder, std::size_t entries, RecordContext when, bool clear,
                       const std::vector<std::string> &names) override {
        std::set<TraceEntry::Action> skipped;
        for (const auto &name : names) skipped.insert(c10::CachingDeviceAllocator::parseTraceEntryAction(name));
#else
    void recordHistory(bool enabled, CreateContextFn recorder, std::size_t entries, RecordContext when,
                       bool clear) override {
        const std::set<TraceEntry::Action> skipped;
#endif
        history.record(enabled, recorder, entries, when, clear, skipped);
        follow_segments();
    }

    void attachAllocatorTraceTracker(AllocatorTraceTracker tracker) override {
        history.attach(std::move(tracker));
        follow_segments();
    }

    void recordAnnotation(const std::vector<std::pair<std::string, std::string>> &metadata) override {
        if (history.records()) history.annotate(c10::cuda::current_device(), metadata);
    }

    void pushCompileContext(std::string &name) override { History::compilations().push_back(name); }

    void popCompileContext() override {
        if (!History::compilations().empty()) History::compilations().pop_back();
    }

#if TORCH_VERSION_MINOR >= 10
    void setUserMetadata(const std::string &metadata) override { History::metadata() = metadata; }

    std::string getUserMetadata() override { return History::metadata(); }
#endif
#if TORCH_VERSION_MINOR >= 12
    Context getContextForPointer(const void *memory) override { return history.context_of(memory); }
#endif
#if TORCH_VERSION_MINOR >= 14
    bool supportsUserMetadata() override { return true; }

    void annotateMemory(const void *memory, const std::string &metadata) override {
        history.annotate(memory, metadata);
    }
#endif

    void attachOutOfMemoryObserver(OutOfMemoryObserver observer) override {
        const std::lock_guard<std::mutex> lock(mutex_);
        observers_.push_back(std::move(observer));
    }

    // ---- pools

    void beginAllocateToPool(c10::DeviceIndex device, MempoolId_t id, Filter filter) override {
        auto kept = std::make_unique<Filter>(std::move(filter));
        check(cualloc_torch_pool_begin(device, id_of(id), ask, forget, kept.get()));
        kept.release();
        note_pool(device, id);
    }

    void endAllocateToPool(c10::DeviceIndex device, MempoolId_t id) override {
        check(cualloc_torch_pool_end(device, id_of(id)));
    }

    void releasePool(c10::DeviceIndex device, MempoolId_t id) override {
        // Destructors call this. It fails only in a forked child, and for an allocator that is gone.
        cualloc_torch_pool_release(device, id_of(id));
        if (cualloc_torch_pool_uses(device, id_of(id)) == 0) {
            const std::lock_guard<std::mutex> lock(mutex_);
            pools_.erase({device, id});
        }
    }

    int getPoolUseCount(c10::DeviceIndex device, MempoolId_t id) override {
        return static_cast<int>(cualloc_torch_pool_uses(device, id_of(id)));
    }

#if TORCH_VERSION_MINOR >= 11
    void createOrIncrefPool(c10::DeviceIndex device, MempoolId_t id, std::shared_ptr<CUDAAllocator> source) override {
        create_pool(device, id, std::move(source));
    }

    void setUseOnOOM(c10::DeviceIndex device, MempoolId_t id, bool use) override { use_when_scarce(device, id, use); }
#else
    void createOrIncrefPool(c10::DeviceIndex device, MempoolId_t id, CUDAAllocator *source) override {
        // The caller keeps the allocator alive.
        create_pool(device, id, std::shared_ptr<CUDAAllocator>(source, [](CUDAAllocator *) {}));
    }

    void setUseOnOOM(c10::DeviceIndex device, MempoolId_t id) override { use_when_scarce(device, id, true); }
#endif

#if TORCH_VERSION_MINOR >= 10
    // Pools split all memory, so that they hold less.
    void setNoSplit(c10::DeviceIndex, MempoolId_t) override {}
#endif

    bool checkPoolLiveAllocations(c10::DeviceIndex device, MempoolId_t id,
                                  const std::unordered_set<void *> &expected) override {
        const std::vector<void *> live = checkpoint_of(device, id)->blocks();
        return std::unordered_set<void *>(live.begin(), live.end()) == expected;
    }

    // Only graph trees use checkpoints. They warm up the next function between launches, and drop its tensors before the
    // next launch of a graph that may write their memory.
    std::shared_ptr<AllocatorState> getCheckpointState(c10::DeviceIndex device, MempoolId_t id) override {
        check(cualloc_pool_reuse_graph_memory(pool_of(device, id)));
        return checkpoint_of(device, id);
    }

    // PyTorch treats all blocks of the pool as freed and those of the checkpoint as allocated anew, so each of these
    // gets a new owner, which the caller hands to a storage or releases.
    CheckpointDelta setCheckpointPoolState(c10::DeviceIndex device, std::shared_ptr<AllocatorState> state) override {
        const auto to = std::dynamic_pointer_cast<Checkpoint>(state);
        TORCH_CHECK(to, "expected a checkpoint of cualloc, found one of another allocator");
        CheckpointDelta delta;
        delta.ptrs_freed = checkpoint_of(device, to->id)->blocks();
        if (history.watches()) {
            for (void *block : delta.ptrs_freed) history.freed(block);
        }
        check(cualloc_pool_restore(pool_of(device, to->id), to->handle));
        for (void *block : to->blocks()) {
            if (history.watches()) note_restored(block, device);
            delta.dataptrs_allocd.push_back(owner_of(block, device));
        }
        return delta;
    }

    // ---- sharing

    ShareableHandle shareIpcHandle(void *memory) override {
        for (c10::DeviceIndex device = 0; device < c10::cuda::device_count(); device++) {
            cualloc_t *allocator = cualloc_shared_made(device);
            if (!allocator) continue;
            char token[CUALLOC_TOKEN_BYTES];
            std::uint64_t offset = 0;
            const std::int32_t code = cualloc_share(allocator, reinterpret_cast<std::uintptr_t>(memory), 0, token,
                                                    sizeof token, &offset, nullptr);
            if (code == CUALLOC_NOT_OURS) continue;
            check(code);
            return {static_cast<std::ptrdiff_t>(offset), token};
        }
        raise(CUALLOC_NOT_OURS, "cannot share a tensor whose memory is not cualloc's");
    }

    // PyTorch calls this with the device of the tensor as the current one.
    std::shared_ptr<void> getIpcDevPtr(std::string token) override {
        cualloc_t *allocator = nullptr;
        check(cualloc_shared(c10::cuda::current_device(), &allocator));
        cualloc_import_t *import = nullptr;
        std::uint64_t address = 0, bytes = 0;
        check(cualloc_share_open(allocator, token.c_str(), &import, &address, &bytes));
        return {reinterpret_cast<void *>(address), [import](void *) { cualloc_share_close(import); }};
    }

private:
    using PoolName = std::pair<c10::DeviceIndex, MempoolId_t>;

    static std::pair<std::uint64_t, std::uint64_t> driver_memory(c10::DeviceIndex device) {
        const c10::cuda::CUDAGuard guard(device);
        std::size_t free = 0, total = 0;
        C10_CUDA_CHECK(cudaMemGetInfo(&free, &total));
        return {free, total};
    }

    // Allocators that do not exist yet are followed from their first allocation on.
    static void follow_segments() {
        for (c10::DeviceIndex device = 0; device < c10::cuda::device_count(); device++) {
            if (cualloc_shared_made(device)) history.follow(device);
        }
    }

    static void note_restored(void *memory, c10::DeviceIndex device) {
        cualloc_block_t block{};
        if (cualloc_torch_block(memory, nullptr, &block)) {
            history.allocated(memory, block.requested, device, nullptr, history.context(RecordContext::STATE));
        }
    }

    static cualloc_pool_t *pool_of(c10::DeviceIndex device, MempoolId_t id) {
        cualloc_pool_t *pool = cualloc_torch_pool(device, id_of(id));
        TORCH_CHECK(pool, "no pool has the id (", id.first, ", ", id.second, ") on device ", device);
        return pool;
    }

    static std::shared_ptr<Checkpoint> checkpoint_of(c10::DeviceIndex device, MempoolId_t id) {
        cualloc_torch_retry_frees();
        return std::make_shared<Checkpoint>(pool_of(device, id), id);
    }

    void create_pool(c10::DeviceIndex device, MempoolId_t id, std::shared_ptr<CUDAAllocator> allocator) {
        cualloc_source_t source{};
        if (allocator) {
            source.struct_size = sizeof source;
            source.alloc = &SegmentsOf::allocate;
            source.free_segment = &SegmentsOf::free;
            source.done = &SegmentsOf::done;
            source.data = new SegmentsOf{std::move(allocator), device};
        }
        check(cualloc_torch_pool_retain(device, id_of(id), source.data ? &source : nullptr));
        note_pool(device, id);
    }

    void note_pool(c10::DeviceIndex device, MempoolId_t id) {
        history.name_pool(device, cualloc_pool_number(cualloc_torch_pool(device, id_of(id))), id);
        const std::lock_guard<std::mutex> lock(mutex_);
        pools_.try_emplace({device, id}, false);
    }

    void use_when_scarce(c10::DeviceIndex device, MempoolId_t id, bool use) {
        const std::lock_guard<std::mutex> lock(mutex_);
        pools_[{device, id}] = use;
    }

    // The pools of a device, each with whether it serves requests for which there is no other memory.
    std::vector<std::pair<MempoolId_t, bool>> pools_of(c10::DeviceIndex device) {
        const std::lock_guard<std::mutex> lock(mutex_);
        std::vector<std::pair<MempoolId_t, bool>> found;
        for (const auto &[name, scarce] : pools_) {
            if (name.first == device) found.emplace_back(name.second, scarce);
        }
        return found;
    }

    // Serves a request that failed: runs PyTorch's callbacks that free memory and retries, then tries the pools that
    // the program marked for this (use_on_oom). If both fail, calls the observers and throws.
    void *obtain_scarce(std::size_t bytes, c10::DeviceIndex device, cudaStream_t stream) {
        const std::int32_t code = cualloc_last_code();
        const std::string text = cualloc_last_error();
        if (code != CUALLOC_OUT_OF_MEMORY) raise(code, text);
        bool freed = false;
        for (const auto &name : c10::FreeCudaMemoryCallbacksRegistry()->Keys()) {
            freed |= c10::FreeCudaMemoryCallbacksRegistry()->Create(name)->Execute();
        }
        if (void *memory = freed ? cualloc_torch_alloc(bytes, device, stream) : nullptr) return memory;
        for (const auto &[id, scarce] : pools_of(device)) {
            if (void *memory = scarce ? allocate_in_pool(bytes, device, stream, id) : nullptr) return memory;
        }
        std::vector<OutOfMemoryObserver> observers;
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            observers = observers_;
        }
        const auto [free, total] = driver_memory(device);
        if (history.watches()) history.out_of_memory(bytes, device, stream, free);
        const cualloc_stats_t stats = stats_of(device);
        c10::reportOutOfMemoryToProfiler(static_cast<std::int64_t>(bytes), stats.allocated.current,
                                         stats.reserved.current, c10::Device(c10::kCUDA, device));
        for (const auto &observer : observers) observer(device, bytes, total, free);
        raise(code, text);
    }

    static void *allocate_in_pool(std::size_t bytes, c10::DeviceIndex device, cudaStream_t stream, MempoolId_t id) {
        cualloc_pool_t *pool = cualloc_torch_pool(device, id_of(id));
        cualloc_scope_t scope{};
        scope.struct_size = sizeof scope;
        scope.kind = CUALLOC_SCOPE_THREAD;
        std::uint64_t number = 0;
        if (!pool || cualloc_pool_enter(pool, &scope, &number) != CUALLOC_OK) return nullptr;
        void *memory = cualloc_torch_alloc(bytes, device, stream);
        cualloc_pool_leave(pool, number);
        return memory;
    }

    std::mutex mutex_;
    // Guarded by the mutex.
    std::map<c10::DeviceIndex, cualloc_stats_t> bases_;
    std::vector<OutOfMemoryObserver> observers_;
    // Whether each pool serves requests for which there is no other memory.
    std::map<PoolName, bool> pools_;
};

} // namespace cualloc_torch

extern "C" {

// Returns how PyTorch's class differs from the one that this library was compiled with, as far as the loaded libraries
// show it: a text that is valid until the next call. Null without a difference.
__attribute__((visibility("default"))) const char *cualloc_torch_mismatch() {
    static std::string why;
    why = find_mismatch("_ZTVN13cualloc_torch9AllocatorE");
    return why.empty() ? nullptr : why.c_str();
}

// Makes the subclass PyTorch's allocator. Returns null, or the reason why that failed: a text that is valid until the
// next call.
__attribute__((visibility("default"))) const char *cualloc_torch_install() {
    static std::string why;
    try {
        // Never destroyed: tensors may be freed while the process exits.
        static const auto *made = new std::shared_ptr<Base>(std::make_shared<cualloc_torch::Allocator>());
        torch::cuda::CUDAPluggableAllocator::changeCurrentAllocator(*made);
        c10::SetAllocator(c10::kCUDA, made->get());
        return nullptr;
    } catch (const std::exception &error) {
        why = error.what();
        return why.c_str();
    }
}

} // extern "C"
