"""An rmm with as much of its resources as an allocator meets."""

from types import SimpleNamespace


class CallbackMemoryResource:
    def __init__(self, allocate, deallocate):
        self.allocate, self.deallocate = allocate, deallocate


chosen = {}
mr = SimpleNamespace(CallbackMemoryResource=CallbackMemoryResource, set_per_device_resource=chosen.__setitem__)
