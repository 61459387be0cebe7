"""Statistics of the shared allocators under PyTorch's names."""

import torch

from cualloc import _library
from cualloc._library import LIBRARY

# PyTorch's name of each quantity, and ours.
_QUANTITIES = {
    "allocation": "blocks",
    "segment": "segments",
    "active": "blocks",
    "allocated_bytes": "allocated",
    "reserved_bytes": "reserved",
    "active_bytes": "active",
    "requested_bytes": "requested",
}
# Free memory in partly used segments, which PyTorch cannot release; cualloc can release all free memory.
_WITHOUT = ("inactive_split", "inactive_split_bytes")
_NOTHING = {"current": 0, "peak": 0, "allocated": 0, "freed": 0}

# Totals and current values at the last reset of the totals, by device.
_bases = {}


def _stat(counter, base):
    """Returns a counter relative to a base, a total and a current value noted earlier."""
    total, current = base
    freed = counter.total - counter.current
    return {
        "current": counter.current,
        "peak": counter.peak,
        "allocated": counter.total - total,
        "freed": freed - (total - current),
    }


def _pools(figures):
    return {"all": figures, "small_pool": figures.small_pool, "large_pool": figures.large_pool}


def nested(device):
    """Returns what `torch._C._cuda_memoryStats` returns for a device."""
    figures = _library.stats(device, LIBRARY.cualloc_torch_stats)
    bases = _bases.get(device, {})

    def base(*place):
        return bases.get(place, (0, 0))

    result = {
        name: {pool: _stat(getattr(part, ours), base(pool, ours)) for pool, part in _pools(figures).items()}
        for name, ours in _QUANTITIES.items()
    }
    for name in _WITHOUT:
        result[name] = {pool: dict(_NOTHING) for pool in _pools(figures)}
    segments = _stat(figures.segments, base("all", "segments"))
    result.update(
        num_alloc_retries=figures.retries - base("retries")[0],
        num_ooms=figures.ooms - base("ooms")[0],
        num_oom_rejections=0,
        num_sync_all_streams=0,
        num_device_alloc=segments["allocated"],
        num_device_free=segments["freed"],
        max_split_size=-1,
        oversize_allocations=dict(_NOTHING),
        oversize_segments=dict(_NOTHING),
    )
    return result


def reset_accumulated(device):
    """Replaces `torch._C._cuda_resetAccumulatedMemoryStats`: totals count from now on."""
    figures = _library.stats(device, LIBRARY.cualloc_torch_stats)
    noted = {("retries",): (figures.retries, 0), ("ooms",): (figures.ooms, 0)}
    for pool, part in _pools(figures).items():
        for kind in _library.KINDS:
            counter = getattr(part, kind)
            noted[pool, kind] = (counter.total, counter.current)
    _bases[device] = noted


def reset_peaks(device):
    """Replaces `torch._C._cuda_resetPeakMemoryStats`: sets the peaks to the current values."""
    _library.reset_peaks(device)


def fraction(device):
    """Replaces `torch._C._cuda_getMemoryFraction`: the fraction of the device's memory that may be reserved."""
    # The limit in bytes is known only once the allocator exists.
    _library.allocator(device)
    limit = _library.stats(device).limit
    total = torch.cuda.get_device_properties(device).total_memory
    return min(limit / total, 1.0)
