// The history of PyTorch's memory functions (torch.cuda.memory._record_memory_history) and its trace trackers.
#pragma once

#include "cualloc.h"

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/util/ApproximateClock.h>
#include <torch/version.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace {

using namespace c10::cuda::CUDACachingAllocator;
using c10::cuda::MempoolId_t;
using Context = std::shared_ptr<c10::GatheredContext>;

// Events of a process, as far as PyTorch has asked for them. Foreign functions (context recorders, trackers) run
// without the lock.
class History {
public:
    // A live block, or a freed one that work of other streams may still use.
    struct Known {
        Context context;
        std::size_t bytes = 0;
        void *stream = nullptr;
        c10::DeviceIndex device = 0;
        MempoolId_t pool{0, 0};
        // Whether its free completes later than it was requested.
        bool shared = false;
    };

    // Whether calls must be reported: the only question of most calls.
    bool watches() const { return watches_.load(std::memory_order_relaxed); }

    bool records() const { return records_.load(std::memory_order_relaxed); }

    void record(bool enabled, CreateContextFn recorder, std::size_t entries, RecordContext when, bool clear,
                std::set<TraceEntry::Action> skipped) {
        TORCH_CHECK(when == RecordContext::NEVER || recorder, "expected a function that records contexts, found none");
        const std::lock_guard<std::mutex> lock(mutex_);
        records_ = enabled;
        recorder_ = enabled ? recorder : nullptr;
        when_ = enabled ? when : RecordContext::NEVER;
        most_ = std::max<std::size_t>(entries, 1);
        skipped_ = std::move(skipped);
        if (!enabled || clear) {
            entries_.clear();
            annotations_.clear();
        }
        if (!enabled) {
            known_.clear();
            pending_.clear();
        }
        watches_ = enabled || !trackers_.empty();
    }

    void attach(AllocatorTraceTracker tracker) {
        const std::lock_guard<std::mutex> lock(mutex_);
        trackers_.push_back(std::make_shared<AllocatorTraceTracker>(std::move(tracker)));
        watches_ = true;
    }

    // Reports the segments of a device's allocator from now on.
    void follow(c10::DeviceIndex device) {
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            if (!followed_.insert(device).second) return;
        }
        cualloc_t *allocator = nullptr;
        if (cualloc_shared(device, &allocator) != CUALLOC_OK) return;
        auto *data = reinterpret_cast<void *>(static_cast<std::intptr_t>(device));
        cualloc_add_segment_hook(allocator, "torch", &History::segments, nullptr, data);
    }

    void name_pool(c10::DeviceIndex device, std::uint64_t number, MempoolId_t id) {
        const std::lock_guard<std::mutex> lock(mutex_);
        pools_[{device, number}] = id;
    }

    // The current place in the program, if contexts of this level are recorded.
    Context context(RecordContext level) const {
        const CreateContextFn recorder = recorder_.load();
        return recorder && when_.load() >= level ? recorder() : nullptr;
    }

    void allocated(void *memory, std::size_t bytes, c10::DeviceIndex device, void *stream, Context context) {
        cualloc_block_t block{};
        cualloc_torch_block(memory, nullptr, &block);
        Known known{std::move(context), bytes, stream, device};
        std::vector<TraceEntry> entries;
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            known.pool = pool_of(device, block.pool);
            complete_within(address_of(memory), bytes, entries);
            entries.push_back(entry(TraceEntry::ALLOC, address_of(memory), known, context_of_event(known.context)));
            known_[address_of(memory)] = std::move(known);
        }
        publish(std::move(entries));
    }

    // Called before the free, after which another thread may be given the block.
    void freed(void *memory) {
        cualloc_block_t block{};
        std::int32_t device = 0;
        if (!cualloc_torch_block(memory, &device, &block)) return;
        Context context = this->context(RecordContext::ALL);
        std::vector<TraceEntry> entries;
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            Known known{nullptr, block.requested, nullptr, static_cast<c10::DeviceIndex>(device)};
            known.pool = pool_of(known.device, block.pool);
            const auto at = known_.find(address_of(memory));
            if (at != known_.end()) {
                known = std::move(at->second);
                known_.erase(at);
            }
            if (context) known.context = std::move(context);
            entries.push_back(
                entry(TraceEntry::FREE_REQUESTED, address_of(memory), known, context_of_event(known.context)));
            if (known.shared) {
                pending_[address_of(memory)] = std::move(known);
            } else {
                entries.push_back(
                    entry(TraceEntry::FREE_COMPLETED, address_of(memory), known, context_of_event(known.context)));
            }
        }
        publish(std::move(entries));
    }

    // A stream other than the block's own uses it.
    void used(void *memory, void *stream) {
        const std::lock_guard<std::mutex> lock(mutex_);
        const auto at = known_.find(address_of(memory));
        if (at != known_.end() && at->second.stream != stream) at->second.shared = true;
    }

    void out_of_memory(std::size_t bytes, c10::DeviceIndex device, void *stream, std::size_t free) {
        Known known{context(RecordContext::STATE), bytes, stream, device};
        std::vector<TraceEntry> entries;
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            entries.push_back(entry(TraceEntry::OOM, free, known, context_of_event(known.context)));
        }
        publish(std::move(entries));
    }

    void annotate(c10::DeviceIndex device, const std::vector<std::pair<std::string, std::string>> &metadata) {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (!records_) return;
        Annotation annotation(device, c10::getApproximateTime());
        for (const auto &[name, value] : metadata) annotation.recordUserMetadata(name, value);
        annotations_.push_back(std::move(annotation));
        if (annotations_.size() > most_) annotations_.pop_front();
    }

#if TORCH_VERSION_MINOR >= 14
    // Attaches metadata to a live block.
    void annotate(const void *memory, const std::string &metadata) {
        std::vector<TraceEntry> entries;
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            const auto at = known_.find(address_of(memory));
            if (at == known_.end()) return;
            entries.push_back(entry(TraceEntry::ANNOTATE, at->first, at->second, nullptr));
            entries.back().user_metadata_ = metadata;
        }
        publish(std::move(entries));
    }
#endif

    // The context of a live block.
    Context context_of(const void *memory) const {
        const std::lock_guard<std::mutex> lock(mutex_);
        const auto at = known_.find(address_of(memory));
        return at == known_.end() ? nullptr : at->second.context;
    }

    // Adds contexts and, if wanted, events to a snapshot. Completes the frees that a snapshot of all memory shows to be
    // complete.
    void complete(SnapshotInfo &snapshot, bool all, bool events) {
        if (all) publish(take_completed(snapshot));
        const std::lock_guard<std::mutex> lock(mutex_);
        if (!records_) return;
        std::map<c10::DeviceIndex, std::size_t> active;
        for (auto &segment : snapshot.segments) {
            std::uintptr_t at = segment.address;
            for (auto &block : segment.blocks) {
                const auto known = block.allocated ? known_.find(at) : known_.end();
                if (known != known_.end()) block.context_when_allocated = known->second.context;
                at += block.size;
            }
            active[segment.device] += segment.active_size;
        }
        const auto nanoseconds = converter_.makeConverter();
        const auto microseconds = [&](auto &time) { time.t_ = nanoseconds(time.approx_t_) / 1000; };
        if (events) {
            for (const auto &kept : entries_) {
                auto &trace = snapshot.device_traces.at(kept.device_);
                trace.push_back(kept);
                microseconds(trace.back().time_);
            }
        }
        snapshot.external_annotations.assign(annotations_.begin(), annotations_.end());
        for (auto &annotation : snapshot.external_annotations) microseconds(annotation.time_);
        for (const auto &[device, bytes] : active) {
            keep(entry(TraceEntry::SNAPSHOT, 0, Known{nullptr, bytes, nullptr, device}, nullptr));
        }
    }

    // The compilations and the metadata that events of the calling thread carry.
    static std::vector<std::string> &compilations() {
        static thread_local std::vector<std::string> names;
        return names;
    }

    static std::string &metadata() {
        static thread_local std::string text;
        return text;
    }

private:
    using Annotation = decltype(SnapshotInfo::external_annotations)::value_type;

    static std::uintptr_t address_of(const void *memory) { return reinterpret_cast<std::uintptr_t>(memory); }

    static TraceEntry entry(TraceEntry::Action action, std::size_t address, const Known &known, Context context) {
        const auto &names = compilations();
        TraceEntry made(action, known.device, address, known.bytes, static_cast<cudaStream_t>(known.stream), known.pool,
                        c10::getApproximateTime(), std::move(context), names.empty() ? "N/A" : names.back());
#if TORCH_VERSION_MINOR >= 10
        made.user_metadata_ = metadata();
#endif
        return made;
    }

    // Below the level ALLOC only live blocks have contexts.
    Context context_of_event(const Context &context) const {
        return when_.load() >= RecordContext::ALLOC ? context : nullptr;
    }

    MempoolId_t pool_of(c10::DeviceIndex device, std::uint64_t number) const {
        const auto found = pools_.find({device, number});
        return found == pools_.end() ? MempoolId_t{0, 0} : found->second;
    }

    // Frees are complete unless the snapshot lists their memory as pending.
    std::vector<TraceEntry> take_completed(const SnapshotInfo &snapshot) {
        std::map<std::uintptr_t, std::uintptr_t> open;
        for (const auto &segment : snapshot.segments) {
            std::uintptr_t at = segment.address;
            for (const auto &block : segment.blocks) {
                if (block.active && !block.allocated) open[at] = at + block.size;
                at += block.size;
            }
        }
        std::vector<TraceEntry> completed;
        const std::lock_guard<std::mutex> lock(mutex_);
        for (auto at = pending_.begin(); at != pending_.end();) {
            const auto after = open.upper_bound(at->first);
            if (after != open.begin() && at->first < std::prev(after)->second) {
                ++at;
                continue;
            }
            completed.push_back(
                entry(TraceEntry::FREE_COMPLETED, at->first, at->second, context_of_event(at->second.context)));
            at = pending_.erase(at);
        }
        return completed;
    }

    // The frees of blocks whose memory is allocated again are complete.
    void complete_within(std::uintptr_t at, std::size_t bytes, std::vector<TraceEntry> &entries) {
        auto found = pending_.upper_bound(at);
        if (found != pending_.begin() && std::prev(found)->first + std::prev(found)->second.bytes > at) --found;
        while (found != pending_.end() && found->first < at + bytes) {
            entries.push_back(entry(TraceEntry::FREE_COMPLETED, found->first, found->second,
                                    context_of_event(found->second.context)));
            found = pending_.erase(found);
        }
    }

    // With the lock.
    void keep(const TraceEntry &made) {
        if (!records_ || skipped_.count(made.action_) != 0) return;
        entries_.push_back(made);
        if (entries_.size() > most_) entries_.pop_front();
    }

    void publish(std::vector<TraceEntry> entries) {
        std::vector<std::shared_ptr<AllocatorTraceTracker>> trackers;
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            for (const auto &made : entries) keep(made);
            trackers = trackers_;
        }
        for (const auto &tracker : trackers) {
            for (const auto &made : entries) (*tracker)(made);
        }
    }

    static void segments(void *data, std::int32_t change, const cualloc_mapped_segment_t *segments, std::size_t count);

    std::atomic<bool> watches_{false}, records_{false};
    std::atomic<CreateContextFn> recorder_{nullptr};
    std::atomic<RecordContext> when_{RecordContext::NEVER};
    c10::ApproximateClockToUnixTimeConverter converter_;
    mutable std::mutex mutex_;
    // Guarded by the mutex.
    std::size_t most_ = 1;
    std::deque<TraceEntry> entries_;
    std::deque<Annotation> annotations_;
    std::set<TraceEntry::Action> skipped_;
    std::vector<std::shared_ptr<AllocatorTraceTracker>> trackers_;
    std::set<c10::DeviceIndex> followed_;
    std::map<std::pair<c10::DeviceIndex, std::uint64_t>, MempoolId_t> pools_;
    std::unordered_map<std::uintptr_t, Known> known_;
    std::map<std::uintptr_t, Known> pending_;
};

// Never destroyed: tensors may be freed while the process exits.
History &history = *new History;

void History::segments(void *data, std::int32_t change, const cualloc_mapped_segment_t *segments, std::size_t count) {
    if (!history.watches()) return;
    const auto device = static_cast<c10::DeviceIndex>(reinterpret_cast<std::intptr_t>(data));
    const bool born = change == CUALLOC_SEGMENT_BIRTH;
    // NCCL registers the segments of pools by these events, and ignores mappings.
    const auto action_in = [born](bool pool) {
        if (pool) return born ? TraceEntry::SEGMENT_ALLOC : TraceEntry::SEGMENT_FREE;
        return born ? TraceEntry::SEGMENT_MAP : TraceEntry::SEGMENT_UNMAP;
    };
    std::vector<TraceEntry> entries;
    try {
        const Context context = history.context(RecordContext::ALLOC);
        {
            const std::lock_guard<std::mutex> lock(history.mutex_);
            for (std::size_t i = 0; i < count; i++) {
                Known known{nullptr, segments[i].bytes, nullptr, device};
                known.pool = history.pool_of(device, segments[i].pool);
                const auto action = action_in(segments[i].pool != 0);
                entries.push_back(entry(action, segments[i].address, known, context));
            }
        }
        history.publish(std::move(entries));
    } catch (const std::exception &error) {
        TORCH_WARN("a trace tracker failed: ", error.what());
    }
}

} // namespace
