"""A sleep-mode back end for vLLM.

With CUALLOC_VLLM=1 in the environment, the plug-in of this package makes cualloc the allocator of vLLM's processes, and
this selects the back end:

    CUALLOC_VLLM=1 vllm serve MODEL --enable-sleep-mode --sleep-mode-backend cualloc

vLLM then gets its tagged memory from cualloc: weights and the key-value cache keep their addresses while they sleep.
"""

import contextlib
import os

from cualloc import _library

try:
    import vllm as _
    from vllm.device_allocator.sleep_mode_backend import SleepModeBackend, SleepModeBackendFactory
except ModuleNotFoundError as error:
    raise _library.not_installed(error, "vllm", "vLLM") from None

import cualloc.torch as ours

NAME = "cualloc"
_DEFAULT_TAG = "default"
# The tags that a selective wake may leave asleep: it restores all others.
_DEFERRABLE = ("weights", "kv_cache")
# The tags whose contents vLLM keeps at each level.
_KEPT = ("runtime", "cudagraph")


class TaggedMemory:
    """vLLM's interface to memory that sleeps (`vllm.device_allocator.MemAllocator`), over the tags of cualloc."""

    _graphs = None

    def use_memory_pool(self, tag=None):
        """Returns a context manager within which the thread's allocations get a tag."""
        return ours.tag(tag or _DEFAULT_TAG)

    @contextlib.contextmanager
    def cudagraph_pool(self):
        """Yields the id of the pool for captures, whose memory has the tag "cudagraph"."""
        import torch

        if self._graphs is None:
            self._graphs = ours.tag_pool(torch.cuda.graph_pool_handle(), "cudagraph")
        yield self._graphs

    def sleep(self, offload_tags=None):
        """Suspends all tagged memory, and keeps the contents of these tags."""
        kept = _names((_DEFAULT_TAG,) if offload_tags is None else offload_tags)
        ours.sleep(keep=[tag for tag in _known() if tag in kept])

    def discard(self, tags):
        """Suspends the memory of these tags without their contents."""
        if meant := [tag for tag in _known() if tag in _names(tags)]:
            ours.sleep(meant)

    def wake_up(self, tags=None):
        """Restores the memory of these tags and of all that cannot be deferred; without tags all memory."""
        ours.wake([tag for tag in _known() if tags is None or tag in tags or tag not in _DEFERRABLE])

    def get_current_usage(self):
        """Returns the bytes of tagged memory that are reserved."""
        return ours.stats()["graph_pools"] if ours.installed() else 0

    def release_pools(self):
        """Does nothing: tags have no Python objects to release."""

    close = release_pools


MEMORY = TaggedMemory()


class Backend(SleepModeBackend):
    """Suspends memory at its addresses. Communicators, compiled kernels and captured graphs stay valid."""

    def suspend(self, level=1):
        self._state = "SUSPENDED"
        MEMORY.sleep(("weights", *_KEPT) if level == 1 else _KEPT)

    def resume(self, tags=None):
        self._state = "RESUMING"
        MEMORY.wake_up(tags)
        self._state = "RUNNING"

    def discard(self, tags):
        MEMORY.discard(tags)
        self._state = "SUSPENDED"

    @classmethod
    def is_supported(cls):
        return ours.installed()

    @classmethod
    def preserves_communicators(cls):
        return True

    @classmethod
    def preserves_compiled_artifacts(cls):
        return True

    @classmethod
    def preserves_graphs_with_communicators(cls):
        return True


def register():
    """Registers the back end, and with CUALLOC_VLLM=1 makes cualloc the allocator of this process. vLLM calls it as a
    plug-in in each of its processes, possibly several times, before CUDA is used."""
    with contextlib.suppress(ValueError):
        # A second registration is an error.
        SleepModeBackendFactory.register_backend(NAME, __name__, Backend.__name__)
    if os.environ.get("CUALLOC_VLLM") == "1":
        ours.install()
        from vllm.device_allocator.cumem import CuMemAllocator

        CuMemAllocator.get_instance = staticmethod(lambda: MEMORY)


def _names(tags):
    return (tags,) if isinstance(tags, str) else tuple(tags)


def _known():
    return sorted({tag for _, tag in _library.tags()})
