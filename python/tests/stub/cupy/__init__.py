"""A cupy with as much of its memory as an allocator meets."""

from types import SimpleNamespace


class UnownedMemory:
    def __init__(self, ptr, size, owner, device_id=-1):
        self.ptr, self.size, self._owner, self.device_id = ptr, size, owner, device_id


class MemoryPointer:
    def __init__(self, mem, offset):
        self.mem, self.ptr = mem, mem.ptr + offset


class OutOfMemoryError(MemoryError):
    def __init__(self, size, total, limit=0):
        super().__init__(f"Out of memory allocating {size:,} bytes (allocated so far: {total:,}, limit {limit:,})")


chosen = []
stream = SimpleNamespace(ptr=0)
cuda = SimpleNamespace(
    UnownedMemory=UnownedMemory,
    MemoryPointer=MemoryPointer,
    memory=SimpleNamespace(OutOfMemoryError=OutOfMemoryError),
    device=SimpleNamespace(get_device_id=lambda: 0),
    get_current_stream=lambda: stream,
    set_allocator=chosen.append,
)
