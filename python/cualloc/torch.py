"""cualloc as PyTorch's allocator of GPU memory.

    import cualloc.torch

    cualloc.torch.install(limit="60G")

before anything uses CUDA. From then on `torch.cuda.memory_*` report cualloc's statistics, and running out of memory
raises `torch.OutOfMemoryError`. `capabilities()` reports what works and what does not.
"""

import contextlib
import ctypes
import functools
import os
import pickle
import tempfile
import threading
import warnings

from cualloc import _library, record

try:
    import torch

    from cualloc import _shim, _torch_stats
except ModuleNotFoundError as error:
    raise _library.not_installed(error, "torch", "PyTorch") from None

_COMPANION = os.path.join(os.path.dirname(os.path.abspath(__file__)), "libcualloc_torch.so")
# Where PyTorch's own error is found: its constructor (wheels up to 2.6 use a string type from before C++11), and the
# type with its table of functions.
_ERROR = "_ZN3c105ErrorC1ENS_14SourceLocationENSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE"
_OLD_ERROR = "_ZN3c105ErrorC1ENS_14SourceLocationESs"
_TYPE, _TABLE = "_ZTIN3c1016OutOfMemoryErrorE", "_ZTVN3c1016OutOfMemoryErrorE"
_TYPE_LIBRARIES = ("libc10_cuda.so", "libtorch_cuda.so", "libtorch_python.so")

_lock = threading.RLock()
# Never freed: PyTorch calls these objects until the process ends.
_current = None
# Why there is no subclass.
_why_pluggable = None
_raises_own_error = False
_takes_graphs = False
_provider = None
_adopted = set()


def install(limit=None, config=None, subclass=None):
    """Makes cualloc the allocator of all CUDA memory of PyTorch, on every device.

    `limit` bounds the reserved memory of each device: bytes, "40G", "80%", or a fraction up to 1.0. `config` has the
    settings of CUALLOC_CONFIG, as its text or as a dictionary; settings given here override the environment variable.

    It installs a subclass of PyTorch's allocator class where a library for the installed PyTorch exists or can be
    compiled, which takes up to half a minute once. Otherwise it uses PyTorch's pluggable interface, which supports
    less: `capabilities()` returns what works, and why there is no subclass. With `subclass=True` a missing library raises
    RuntimeError. With `subclass=False` the pluggable interface is used. It is also used by default where another module
    has put a function in place of the class `torch.cuda.memory.CUDAPluggableAllocator`, for example to measure each
    call.

    Call it before CUDA is used: PyTorch cannot replace an allocator that holds memory, and a late call raises
    RuntimeError. A second call changes nothing; with different settings it raises RuntimeError.
    """
    global _current
    with _lock:
        if not hasattr(torch._C, "_cuda_customAllocator"):
            raise RuntimeError(f"this PyTorch ({torch.__version__}) is built without CUDA")
        if _current is None and torch.cuda.is_initialized():
            raise RuntimeError(
                "PyTorch already uses CUDA with its own allocator: call cualloc.torch.install() before "
                "the first tensor on a GPU, and before anything else that starts CUDA"
            )
        _library.configure(limit, config)
        if _current is not None:
            return
        _current = _install_subclass(required=subclass is True) if subclass is not False else None
        if _current is None:
            pluggable = _pluggable(_COMPANION, "cualloc_torch_alloc_or_throw")
            torch.cuda.memory.change_current_allocator(pluggable)
            _current = pluggable
            _say_what_fails()
            _redirect()
            _refuse()
            _leave_benchmark_off()
            _replace_snapshots()
        _adopt_streams()
        _end_failed_captures()


def installed():
    """Whether cualloc is PyTorch's allocator."""
    return _current is not None


def _install_subclass(required):
    """Makes the subclass PyTorch's allocator and returns its library. If that is not possible, sets `_why_pluggable`,
    and returns None, or raises RuntimeError if the subclass is required."""
    global _why_pluggable
    try:
        if not required and not isinstance(torch.cuda.memory.CUDAPluggableAllocator, type):
            raise _shim.Unavailable("another module has replaced torch.cuda.memory.CUDAPluggableAllocator")
        shim = _shim.load()
        shim.cualloc_torch_install.restype = ctypes.c_char_p
        why = shim.cualloc_torch_install()
        if why is None:
            return shim
        _why_pluggable = why.decode(errors="replace").splitlines()[0]
    except _shim.Unavailable as error:
        _why_pluggable = str(error)
    if required:
        raise RuntimeError(f"cannot subclass PyTorch's allocator: {_why_pluggable}")


def _is_subclass():
    return isinstance(_current, ctypes.CDLL)


# ---- setting up ----------------------------------------------------------------------------------------------------


@functools.cache
def _companion():
    """Loads the functions that may throw. They refer to the C library by name, so it must be loaded first."""
    try:
        return ctypes.CDLL(_COMPANION)
    except OSError as error:
        raise RuntimeError(
            f"{_COMPANION}, without which an allocation that fails would crash, cannot be loaded: {error}"
        ) from error


def _pluggable(library, allocate):
    """Creates a PyTorch pluggable allocator over the shared allocators, from a library and its allocation function."""
    global _takes_graphs
    companion, plain = _companion(), _library.LIBRARY
    # The companion exports all functions of the library that it is linked with.
    made = torch.cuda.memory.CUDAPluggableAllocator(library, allocate, "cualloc_torch_free")
    hooks = {
        "set_init_fn": plain.cualloc_torch_init,
        "set_reset_fn": plain.cualloc_torch_reset,
        "set_base_alloc_fn": plain.cualloc_torch_base,
        "set_memory_fraction_fn": companion.cualloc_torch_fraction_or_throw,
        "set_record_stream_fn": companion.cualloc_torch_record_stream_or_throw,
    }
    graphs = {
        "set_begin_allocate_to_pool": companion.cualloc_torch_pool_begin_or_throw,
        "set_end_allocate_to_pool_fn": plain.cualloc_torch_pool_end,
        "set_release_pool": plain.cualloc_torch_pool_release,
    }
    # Early versions of PyTorch have other hooks, with other names: a capture fails there.
    if all(hasattr(made.allocator(), hook) for hook in graphs):
        hooks.update(graphs)
        _takes_graphs = True
    for hook, function in hooks.items():
        getattr(made.allocator(), hook)(ctypes.cast(function, ctypes.c_void_p).value)
    return made


def _exported(library, name):
    """Returns the address of an exported symbol of a library, or None."""
    try:
        return ctypes.addressof(ctypes.c_char.in_dll(library, name))
    except ValueError:
        return None


def _loaded(name):
    """Returns one of PyTorch's libraries, which is already loaded; None if there is none of that name."""
    place = os.path.join(os.path.dirname(os.path.abspath(torch.__file__)), "lib", name)
    try:
        return ctypes.CDLL(place, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        return None


def _say_what_fails():
    """Makes failed allocations throw PyTorch's own error, if this version of PyTorch supports it."""
    global _raises_own_error
    core = _loaded("libc10.so")
    new, old = (core and _exported(core, name) for name in (_ERROR, _OLD_ERROR))
    libraries = filter(None, map(_loaded, _TYPE_LIBRARIES))
    kinds = ((_exported(library, _TYPE), _exported(library, _TABLE)) for library in libraries)
    kind, table = next((found for found in kinds if all(found)), (None, None))
    bind = _companion().cualloc_torch_bind
    bind.restype = ctypes.c_int32
    bind.argtypes = [ctypes.c_void_p, ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p]
    _raises_own_error = bool(bind(new or old, not new, kind, table))
    if not _raises_own_error:
        warnings.warn(
            f"cualloc cannot throw the own error of PyTorch {torch.__version__}: running out of memory raises "
            "RuntimeError with 'out of memory' in its text instead of torch.OutOfMemoryError",
            RuntimeWarning,
            stacklevel=3,
        )


def _redirect():
    """Redirects PyTorch's functions about memory to cualloc, where they would ask an allocator that does not answer.

    Replaces the functions below the public ones, so code that has already imported the public ones is served too.
    """
    functions = {
        "_cuda_memoryStats": _torch_stats.nested,
        "_cuda_resetPeakMemoryStats": _torch_stats.reset_peaks,
        "_cuda_resetAccumulatedMemoryStats": _torch_stats.reset_accumulated,
        "_cuda_getMemoryFraction": _torch_stats.fraction,
        # A pluggable allocator never reports that it is initialised.
        "_accelerator_isAllocatorInitialized": torch.cuda.is_initialized,
        "_accelerator_getDeviceStats": _torch_stats.nested,
        "_accelerator_resetPeakStats": _torch_stats.reset_peaks,
        "_accelerator_resetAccumulatedStats": _torch_stats.reset_accumulated,
    }
    _replace(functions)


def _adopt_streams():
    """Adopts streams created by torch.cuda.Stream, which live as long as the process.

    A stream that only wraps a handle (ExternalStream, or the current stream by its id) may be destroyed by its owner.
    """
    kind = torch.cuda.Stream
    original = kind.__new__

    @functools.wraps(original)
    def new(cls, *arguments, **named):
        stream = original(cls, *arguments, **named)
        if not named.keys() & {"stream_id", "stream_ptr"}:
            _adopt(stream.device.index, stream.cuda_stream)
        return stream

    kind.__new__ = staticmethod(new)


def _adopt(device, handle):
    # The default streams are adopted from the start.
    if handle in (0, 1, 2) or (device, handle) in _adopted:
        return
    # A stream that cannot be adopted now, for example during its capture, works without adoption, only slower.
    code = _library.LIBRARY.cualloc_adopt_stream(_library.allocator(device), _library.stream_number(handle))
    if code == _library.OK:
        _adopted.add((device, handle))


class _Begun:
    """A pool scope that a capture has begun: its number, the pool it belongs to, and its stream."""

    def __init__(self, number, stream):
        self.number, self.stream = number, stream
        self.device, self.id = ctypes.c_int32(), _library.PoolId()
        _library.LIBRARY.cualloc_torch_pool_name(number, ctypes.byref(self.device), ctypes.byref(self.id))


def _end_failed_captures():
    """Ends the pool scopes of failed captures. When a capture fails or is never ended, PyTorch up to 2.13 does not
    release its pool, and up to 2.11 does not even end its scope. Later versions do both when the graph is reset or
    destroyed. So the graph is reset here, and the steps that PyTorch leaves out are done in its place: neither may
    happen twice, since others may share the pool."""
    kind, library = torch.cuda.CUDAGraph, _library.LIBRARY
    begin, end, reset, goes = kind.capture_begin, kind.capture_end, kind.reset, getattr(kind, "__del__", None)
    newest = library.cualloc_torch_pool_newest

    def end_capture(graph, begun):
        before = library.cualloc_torch_pool_releases()
        try:
            reset(graph)
        except Exception as error:
            # The capture's own error is the one to raise.
            warnings.warn(f"a capture that failed was not reset: {error}", RuntimeWarning, stacklevel=4)
        finally:
            graph._cualloc_begun = None
            if library.cualloc_torch_pool_releases() == before:
                if library.cualloc_torch_pool_state(begun.number, None) == _library.POOL_OPEN:
                    library.cualloc_torch_pool_abandon(begun.number, None)
                else:
                    library.cualloc_torch_pool_release(begun.device, begun.id)

    def goes_on(begun):
        return library.cualloc_torch_pool_state(begun.number, begun.stream) == _library.POOL_GOES_ON

    def captured(graph):
        """Whether a graph exists and the failure came after it. PyTorch then releases the pool with the graph."""
        try:
            graph.pool()
        except Exception:
            return False
        return True

    @functools.wraps(begin)
    def capture_begin(self, *arguments, **named):
        before = newest()

        def note():
            if newest() > before:
                self._cualloc_begun = _Begun(newest(), torch.cuda.current_stream().cuda_stream)
                return self._cualloc_begun

        try:
            begin(self, *arguments, **named)
        except BaseException:
            # A failure after the beginning (in hooks of later versions) leaves the capture as it is.
            if (begun := note()) and not goes_on(begun):
                end_capture(self, begun)
            raise
        note()

    @functools.wraps(end)
    def capture_end(self):
        try:
            end(self)
        except BaseException:
            begun = getattr(self, "_cualloc_begun", None)
            # On a wrong stream the call fails and the capture goes on; then the stream is still capturing.
            if begun and not goes_on(begun):
                if captured(self):
                    self._cualloc_begun = None
                else:
                    end_capture(self, begun)
            raise
        # From here on PyTorch owns the scope and releases it with the graph.
        self._cualloc_begun = None

    # Runs before the destructor, after which the capture's filter must not be called. A weak reference's callback would
    # run later.
    def __del__(self):
        begun = getattr(self, "_cualloc_begun", None)
        if begun and library.cualloc_torch_pool_state(begun.number, None) == _library.POOL_OPEN:
            end_capture(self, begun)
        if goes is not None:
            goes(self)

    kind.capture_begin, kind.capture_end, kind.__del__ = capture_begin, capture_end, __del__


_NO_TREES = (
    "cualloc cannot restore the blocks of a pool through PyTorch's pluggable interface, as graph trees (torch.compile "
    "with mode='reduce-overhead') need: see cualloc.torch.capabilities()['why_pluggable'], use torch.cuda.graph or "
    "torch.cuda.make_graphed_callables, or turn the trees off with "
    "torch._inductor.config.triton.cudagraph_trees = False"
)
_NO_MEM_POOL = (
    "cualloc cannot serve torch.cuda.MemPool through PyTorch's pluggable interface: see "
    "cualloc.torch.capabilities()['why_pluggable'], or share the memory of a pool between graphs by "
    "torch.cuda.graph_pool_handle()"
)


_NO_POOL_SNAPSHOT = (
    "cualloc cannot take a snapshot of one pool: cualloc.torch.graph_pool(pool) reports what it holds, and "
    "torch.cuda.memory_snapshot() covers all memory"
)
_NO_BENCHMARK = (
    "torch.backends.cudnn.benchmark stays False: benchmarking queries the free bytes in the cache of PyTorch's "
    "own allocator, which cualloc has replaced. Convolutions use cuDNN's own choice of algorithm"
)


# Whether PyTorch's history is being recorded.
_records = False


def _history(enabled=None, context="all", stacks=None, entries=None, clear=False, *_, **__):
    """Replaces `torch._C._cuda_record_memory_history`: records with the Python stack of each allocation, if `context`
    is given. The recorder determines how many events are kept."""
    global _records
    with _lock:
        if _records and (not enabled or clear is True):
            _records = False
            try:
                record.stop()
            except _library.Error as error:
                # The recording was ended elsewhere, or this is a forked child.
                if error.code not in (_library.INVALID_ARGUMENT, _library.CONTEXT_LOST):
                    raise
        if enabled and not _records:
            record.start(stacks=512 if context else 0)
            _records = True


def _history_legacy(enabled=None, context=True, entries=None, traces=False, cpp=False, clear=False, *_, **__):
    """Replaces `torch._C._cuda_record_memory_history_legacy`, whose arguments have another order."""
    _history(enabled, context or traces, clear=clear)


def _recorded():
    """Returns a snapshot of cualloc's recorder, as dictionaries. Without a history it has only live blocks."""
    with tempfile.TemporaryDirectory() as folder, _lock:
        path = os.path.join(folder, "snapshot")
        try:
            record.snapshot(path)
        except _library.Error as error:
            if error.code != _library.INVALID_ARGUMENT:
                raise
            record.start()
            try:
                record.snapshot(path)
            finally:
                record.stop()
        with open(path, "rb") as file:
            return pickle.load(file)


def _snapshot(of=None):
    """Replaces `torch._C._cuda_memorySnapshot` under the pluggable interface: takes a pool's id and whether events are
    wanted, returns dictionaries."""
    if of is not None and tuple(of[:2]) != (0, 0):
        raise RuntimeError(_NO_POOL_SNAPSHOT)
    made = _recorded()
    if of is not None and len(of) >= 3 and not of[2]:
        made["device_traces"] = [[] for _ in made["device_traces"]]
    return made


def _refuse():
    """Answers calls that PyTorch directs at its own allocator only, or makes them fail with a helpful message."""

    def refusing(words):
        def refuse(*_, **__):
            raise RuntimeError(words)

        return refuse

    functions = {
        "_cuda_getCheckpointState": refusing(_NO_TREES),
        "_cuda_setCheckpointPoolState": refusing(_NO_TREES),
        "_cuda_checkPoolLiveAllocations": refusing(_NO_TREES),
    }
    _replace(functions)
    if hasattr(torch.cuda, "MemPool"):
        torch.cuda.MemPool.__init__ = refusing(_NO_MEM_POOL)


def _replace_snapshots():
    """Replaces PyTorch's functions that record a history and take snapshots: cualloc's recorder has the history."""
    _replace(
        {
            "_cuda_memorySnapshot": _snapshot,
            "_cuda_record_memory_history": _history,
            "_cuda_record_memory_history_legacy": _history_legacy,
            "_cuda_isHistoryEnabled": lambda: _records,
        }
    )


def _replace(functions):
    for name, function in functions.items():
        if hasattr(torch._C, name):
            setattr(torch._C, name, function)


def _leave_benchmark_off():
    """Keeps cuDNN's benchmarking off in programs that turn it on: otherwise their first convolution would fail."""
    if not hasattr(torch._C, "_set_cudnn_benchmark"):
        return
    original = torch._C._set_cudnn_benchmark

    @functools.wraps(original)
    def set_benchmark(on):
        if on:
            warnings.warn(_NO_BENCHMARK, RuntimeWarning, stacklevel=3)
        original(False)

    if torch._C._get_cudnn_benchmark():
        set_benchmark(True)
    torch._C._set_cudnn_benchmark = set_benchmark
    # The attribute of torch.backends.cudnn holds the function itself.
    flag = vars(type(torch.backends.cudnn)).get("benchmark")
    if hasattr(flag, "setter"):
        flag.setter = set_benchmark


# ---- public queries ------------------------------------------------------------------------------------------------


def _device(device):
    if isinstance(device, int):
        return device
    found = torch.device("cuda" if device is None else device)
    if found.type != "cuda":
        raise ValueError(f"expected a CUDA device, found {device}")
    return torch.cuda.current_device() if found.index is None else found.index


def stats(device=None):
    """Returns the statistics of a device's allocator (by default the current device's) as dictionaries: bytes
    `requested`, `allocated` (after rounding) and `reserved` from the driver, each with `current`, `peak` and `total`;
    numbers of `blocks` and `segments`; `ooms`, `hits`, `misses`, and more (cualloc_stats_t in cualloc.h). `pooled`
    are the same figures of pools of graphs, and `held` is all memory from the driver: reserved memory, pools and ranges.
    `regime` is 0 while memory is plentiful, else the reason why it is scarce (CUALLOC_MEMORY_SCARCE_* in cualloc.h)."""
    return _library.plain(_library.stats(_device(device)))


def summary(device=None):
    """Returns the statistics of a device's allocator as a text of several lines."""
    device = _device(device)
    figures = _library.stats(device, _library.LIBRARY.cualloc_torch_stats)

    def row(name, counter):
        return f"  {name:<22} {_size(counter.current):>12} {_size(counter.peak):>12}"

    limit = "none" if figures.limit == _library.NO_LIMIT else _size(figures.limit)
    share = figures.allocated.current / figures.reserved.current if figures.reserved.current else 1.0
    return "\n".join(
        [
            f"cualloc on device {device:<4}          now         peak",
            row("asked for", figures.requested),
            row("in live blocks", figures.allocated),
            row("held from the driver", figures.reserved),
            f"  {share:.1%} of what is held is in {figures.blocks.current} live blocks; largest free piece "
            f"{_size(figures.largest_free)}; limit {limit}",
            f"  {figures.hits} allocations from cached memory, {figures.misses} not; {figures.ooms} found no memory; "
            f"{figures.driver_calls} calls of the driver",
        ]
    )


def _size(bytes):
    for unit in ("B", "KiB", "MiB"):
        if bytes < 1024:
            return f"{bytes:.0f} B" if unit == "B" else f"{bytes:.2f} {unit}"
        bytes /= 1024
    return f"{bytes:.2f} GiB"


def trim(keep=0, device=None, pool=None):
    """Returns unused memory to the driver until at most `keep` bytes are reserved, without waiting for device work.
    Returns the bytes given back, and the bytes that pending work kept from being given back. `torch.cuda.empty_cache()`
    does the same with `keep=0`, and waits.

    With `pool`, a torch.cuda.MemPool or its id, it returns the free memory of that pool instead, as far as whole handles
    are free, and waits. A pool that a captured graph may use keeps its memory."""
    if pool is not None:
        return _library.empty_pool(_device(device), _pool_id(pool)), 0
    return _library.trim(_device(device), keep)


def graph_pool(pool, device=None):
    """Returns the statistics of a torch.cuda.MemPool or a pool of CUDA graphs on a device, the latter by its id
    (`torch.cuda.graph_pool_handle()`, or `pool()` of a graph), as a dictionary. Bytes: `live` in blocks, `free_bytes`,
    `peak` of live ones, `physical` reserved from the driver. Numbers: live `blocks`, and `leases` of graphs. None if no
    graph was captured with it, or all were reset. `stats()["pooled"]` is the sum over all pools."""
    return _library.graph_pool(_device(device), _pool_id(pool))


def reserve(nbytes, granule=None, stripes=1, tag=None, device=None):
    """Reserves addresses for a tensor of up to `nbytes` bytes that grows and shrinks in place, for example a cache of keys
    and values. Memory is committed and decommitted in granules: a power of two from 2 MiB, the default, to 64 MiB.

        cache = cualloc.torch.reserve(64 << 30, granule=32 << 20)
        cache.commit(0, 1 << 30)
        keys = cache.tensor[: 1 << 30].view(torch.bfloat16)

    With `stripes` the tensor has that many rows of `nbytes`, which are committed together. A `tag` is that of `sleep` and
    `wake`. Decommitted memory serves tensors of cualloc and other ranges."""
    from cualloc._torch_range import Range

    return Range(nbytes, granule, stripes, tag, _device(device))


# ---- sleep ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def tag(name, device=None):
    """Tags everything that this thread allocates within the context manager on a device (by default the current one)
    with a name that `sleep` and `wake` use.

        with cualloc.torch.tag("weights"):
            model = Model().cuda()

    Each tag of a device has its own memory. Memory freed there is reused only for the same tag, and returns to the
    driver by `trim()` and `torch.cuda.empty_cache()` once all of it is unused. In nested tags the inner one applies;
    the private memory of a captured graph has the tag of its pool (`tag_pool`). Threads started by autograd or others
    are not tagged."""
    _ensure_installed()
    with _library.tagged(_device(device), str(name)):
        yield


def tag_pool(pool, name, device=None):
    """Tags the memory of a pool on a device (by default the current one), so that `sleep` and `wake` include it: of a
    torch.cuda.MemPool, or of CUDA graphs by the pool's id (`torch.cuda.graph_pool_handle()`, or `pool()` of a graph).
    Returns the pool.

        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=cualloc.torch.tag_pool(torch.cuda.graph_pool_handle(), "graphs")):
            output = model(input)

    A pool may be tagged before its first capture, or when graphs already use it. With `keep`, `sleep` restores the
    contents of the pool's live tensors. Other memory of the pool holds what a graph writes before it reads."""
    _ensure_installed()
    _library.set_pool_tag(_device(device), _pool_id(pool), str(name))
    return pool


def _pool_id(pool):
    return getattr(pool, "id", pool)


def _ensure_installed():
    if _current is None:
        raise RuntimeError("tags require cualloc as PyTorch's allocator: call cualloc.torch.install() first")


def sleep(tags=None, keep=False, pinned=True):
    """Returns tagged memory to the driver, on all devices, so that other programs can use it until `wake`. Tensors keep
    their addresses, so captured graphs stay valid. Returns the number of bytes given to the driver.

    `tags` selects one or several tags; all by default. `keep` selects the tags whose contents are restored: one or
    several tags, True for all, or False. The contents of others are lost: after `wake` they must be written before they
    are read. Contents are kept in page-locked host memory, which is cached for the next `sleep` until a `trim`; with
    `pinned=False` in plain memory.

    `sleep(keep="weights")` corresponds to vLLM's level 1, and `sleep()` to level 2. Free memory without a tag is
    released too.

    Waits for all work of the devices. Until `wake`, no stream may use the tensors or a graph captured with them, but
    the tensors may be freed. An unknown tag raises ValueError; a tag that already sleeps is skipped. If a tag fails,
    for example because of a capture in progress, the tags before it stay asleep, and `wake` restores them."""
    known = _library.tags()
    meant = _meant(tags, known)
    kept = _meant(None if keep is True else keep or (), known)
    how = _library.CONTENTS_PINNED if pinned else _library.CONTENTS_HOST
    bytes = 0
    for device, name in meant:
        contents = how if (device, name) in kept else _library.CONTENTS_DROP
        bytes += _library.suspend(device, name, contents) or 0
    for device in {device for device, _ in meant}:
        bytes += _library.trim(device, 0, host=False)[0]
    return bytes


def wake(tags=None):
    """Restores memory that `sleep` released, at its addresses: all of it, or that of one or several tags. Returns the
    number of restored bytes. Without enough memory it raises cualloc.OutOfMemory, which states how much is missing;
    memory that still sleeps can be woken later. An unknown tag raises ValueError; a tag that is awake is skipped."""
    return sum(_library.resume(device, name) or 0 for device, name in _meant(tags, _library.tags()))


def _meant(tags, known):
    """Returns the selected devices and tags, out of the known ones."""
    if tags is None:
        return known
    names = {tags} if isinstance(tags, str) else set(tags)
    there = {name for _, name in known}
    if lacking := sorted(names - there):
        raise ValueError(f"unknown tag {lacking[0]!r}; known tags: {sorted(there)}")
    return [(device, name) for device, name in known if name in names]


def check(device=None):
    """Recomputes and verifies all statistics of a device's allocator; raises cualloc.Error if anything disagrees. For
    tests."""
    _library.check(_device(device))


def retire_stream(stream):
    """Retires a stream before its owner destroys it: it gets no more work that uses tensors of this process. Needed for
    an ExternalStream that is destroyed before its tensors are freed."""
    handle = _library.allocator(stream.device.index)
    _library.checked(_library.LIBRARY.cualloc_retire_stream(handle, _library.stream_number(stream.cuda_stream)))


def mem_pool(**options):
    """Returns a torch.cuda.MemPool whose segments come from cualloc, while PyTorch's own allocator, which must be the
    current one, divides them into blocks. Options are those of MemPool (`use_on_oom`, `no_split`). Keep it as long as
    tensors use it."""
    global _provider
    if _current is not None:
        raise RuntimeError("cualloc is PyTorch's allocator, but a MemPool requires PyTorch's own")
    with _lock:
        if _provider is None:
            # An allocation function that returns null on failure, as PyTorch expects here.
            _provider = _pluggable(_library.PATH, "cualloc_torch_alloc")
    return torch.cuda.MemPool(_provider.allocator(), **options)


def capabilities():
    """Returns what works with cualloc as PyTorch's allocator, by name: True, False, or a description. `interface` is
    "subclass" or "pluggable", None before `install`. `why_pluggable` is why `install` found no subclass to use; None if
    it found one or did not look for one."""
    subclass = _is_subclass()
    return {
        "installed": installed(),
        "interface": ("subclass" if subclass else "pluggable") if installed() else None,
        "why_pluggable": _why_pluggable,
        "out_of_memory": "torch.OutOfMemoryError" if subclass or _raises_own_error else "RuntimeError",
        "memory_stats": hasattr(torch._C, "_cuda_memoryStats"),
        "memory_fraction": True,
        "record_stream": True,
        "mem_pool": subclass,
        "mem_pool_segments": hasattr(torch.cuda, "MemPool"),
        "cuda_graphs": subclass or _takes_graphs,
        "cudagraph_trees": subclass,
        "sleep": installed(),
        "memory_snapshot": installed(),
        # Under the pluggable interface programs may turn it on, but it stays off.
        "cudnn_benchmark": subclass,
        "cuda_ipc": subclass,
    }
