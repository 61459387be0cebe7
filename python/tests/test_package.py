"""The package without a GPU: with a stub of each library that it serves, over a simulated driver with two devices.

    PYTHONPATH=UNPACKED_WHEEL CUALLOC_DRIVER=libsimdriver.so python3 -m unittest discover python/tests

Each test is a process of its own, since an allocator is installed once in a process.
"""

import ctypes
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import unittest
import warnings
from types import SimpleNamespace

HERE = os.path.dirname(os.path.abspath(__file__))


def installed(**settings):
    import torch

    import cualloc.torch

    cualloc.torch.install(**settings)
    return torch, cualloc.torch, torch._C.current.functions


def driver():
    """The simulated driver, with a context of device 0 current."""
    library = ctypes.CDLL(os.environ["CUALLOC_DRIVER"])
    context, device = ctypes.c_void_p(), ctypes.c_int()
    assert library.cuInit(0) == 0 and library.cuDeviceGet(ctypes.byref(device), 0) == 0
    assert library.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) == 0
    assert library.cuCtxSetCurrent(context) == 0
    return library


def stream(library):
    made = ctypes.c_void_p()
    assert library.cuStreamCreate(ctypes.byref(made), 1) == 0
    return made.value


def tried(bytes, device=0, stream=None):
    """What the library allocates for PyTorch, the code of its last error, and the text."""
    from cualloc import _library

    alloc = _library.LIBRARY.cualloc_torch_alloc
    alloc.restype, alloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
    made = alloc(bytes, device, stream)
    return made, _library.LIBRARY.cualloc_last_code(), _library.LIBRARY.cualloc_last_error().decode()


def raises(kind, words, call, *arguments, **named):
    try:
        call(*arguments, **named)
    except kind as error:
        assert words in str(error), error
        return error
    raise AssertionError(f"{call} did not fail")


# ---- PyTorch -------------------------------------------------------------------------------------------------------


def hooks_and_devices():
    import cualloc

    torch, ours, call = installed()
    assert {"alloc", "free", "set_init_fn", "set_reset_fn", "set_base_alloc_fn"} <= call.keys()
    assert {"set_memory_fraction_fn", "set_record_stream_fn"} <= call.keys()
    call["set_init_fn"](2)
    assert call["alloc"](0, 0, None) is None
    # Whoever asks a device for figures does not begin to use it.
    assert torch._C._cuda_memoryStats(1)["reserved_bytes"]["all"]["peak"] == 0 == ours.stats(1)["blocks"]["total"]
    torch._C._cuda_resetPeakMemoryStats(1)
    torch._C._cuda_resetAccumulatedMemoryStats(1)
    assert ours.trim(device=1) == (0, 0)
    ours.check(1)
    assert cualloc._library.LIBRARY.cualloc_shared_made(1) is None and "limit none" in ours.summary(1)
    # The second device before the first one.
    second = call["alloc"](3 << 20, 1, None)
    first = call["alloc"](1000, 0, None)
    assert first and second and ours.stats(1)["blocks"]["current"] == 1 == ours.stats()["blocks"]["current"]
    size = ctypes.c_size_t()
    assert call["set_base_alloc_fn"](second + 100, ctypes.byref(size)) == second and size.value == 3 << 20
    assert call["set_base_alloc_fn"](7, ctypes.byref(size)) == 7 and size.value == 0
    call["set_record_stream_fn"](first, None)
    # Memory of others, and none.
    call["set_record_stream_fn"](1 << 20, None)
    call["set_record_stream_fn"](None, None)
    call["free"](first, 1000, 0, None)
    call["free"](second, 3 << 20, 1, None)
    call["free"](None, 0, 0, None)
    assert ours.stats()["reserved"]["current"] > 0 < ours.stats(1)["reserved"]["current"]
    torch._C._cuda_emptyCache()
    assert ours.stats()["reserved"]["current"] == 0 == ours.stats("cuda:1")["reserved"]["current"]
    ours.check()
    ours.check(1)


def statistics_have_the_keys_of_pytorch():
    torch, ours, call = installed()
    blocks = [call["alloc"](bytes, 0, None) for bytes in (1000, 600, 5 << 20)]
    stats = torch._C._cuda_memoryStats(0)
    assert stats == torch._C._accelerator_getDeviceStats(0)
    arrays = ("allocation", "segment", "active", "inactive_split")
    arrays += tuple(f"{name}_bytes" for name in ("allocated", "reserved", "active", "inactive_split", "requested"))
    numbers = ("num_alloc_retries", "num_ooms", "num_sync_all_streams", "num_device_alloc", "num_device_free")
    numbers += ("max_split_size", "num_oom_rejections")
    single = ("oversize_allocations", "oversize_segments")
    assert set(stats) == {*arrays, *numbers, *single}, set(stats)
    for name in arrays:
        assert set(stats[name]) == {"all", "small_pool", "large_pool"}
        for part in (*stats[name].values(), stats["oversize_segments"]):
            assert set(part) == {"current", "peak", "allocated", "freed"}
            assert part["allocated"] - part["freed"] == part["current"], (name, part)
    assert all(isinstance(stats[name], int) for name in numbers)
    assert stats["allocated_bytes"]["all"]["current"] == 1024 + 1024 + (5 << 20)
    assert stats["requested_bytes"]["all"]["current"] == 1000 + 600 + (5 << 20)
    assert stats["allocation"]["all"]["current"] == 3 == stats["active"]["all"]["current"]
    held = stats["reserved_bytes"]["all"]
    assert held["current"] >= 5 << 20 and held["current"] == ours.stats()["reserved"]["current"]
    call["free"](blocks[2], 5 << 20, 0, None)
    torch._C._cuda_resetPeakMemoryStats(0)
    torch._C._cuda_resetAccumulatedMemoryStats(0)
    call["free"](blocks[0], 1000, 0, None)
    stats = torch._C._cuda_memoryStats(0)
    part = stats["allocated_bytes"]["all"]
    assert part == {"current": 1024, "peak": 2048, "allocated": 0, "freed": 1024}, part
    assert stats["allocation"]["all"] == {"current": 1, "peak": 2, "allocated": 0, "freed": 1}
    text = ours.summary()
    assert "in live blocks" in text and "1.00 KiB" in text, text
    assert ours.trim() == (held["current"], 0) or ours.stats()["reserved"]["current"] < held["current"]


def limits_and_fractions():
    torch, ours, call = installed(limit=0.5, config={"tune.views": False})
    assert torch._C._cuda_getMemoryFraction(0) == 0.5
    assert ours.stats()["limit"] == 40 << 30
    torch._C._cuda_setMemoryFraction(0.25, 0)
    assert ours.stats()["limit"] == 20 << 30
    # Nothing to do, and something else.
    ours.install()
    ours.install(limit=0.5, config="tune.views=off")
    raises(RuntimeError, "other settings", ours.install, limit="1G")
    raises(ValueError, "twice", ours.install, limit=1, config="limit=2")
    for limit, bytes in [("60%", 48 << 30), (3 << 30, 3 << 30), ("2G", 2 << 30), (2.0 * 2**30, 2 << 30)]:
        from cualloc import _library

        with _library._options(_library.settings_of(limit, None)) as options:
            made, figures = ctypes.c_void_p(), _library.Stats(struct_size=ctypes.sizeof(_library.Stats))
            create = _library.LIBRARY.cualloc_create
            create.argtypes = [ctypes.c_int32, ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p)]
            assert create(0, options, ctypes.byref(made)) == 0
            assert _library.LIBRARY.cualloc_stats(made, ctypes.byref(figures)) == 0
            assert figures.limit == bytes, (limit, figures.limit)


def wrong_settings_are_refused():
    import cualloc
    import cualloc.torch

    raises(cualloc.Error, "nonsense", cualloc.torch.install, config="nonsense=1")
    assert not cualloc.torch.installed() and not cualloc.torch.capabilities()["installed"]
    # And leave nothing behind.
    cualloc.torch.install(limit="1G")
    assert cualloc.torch.installed()


def without_a_library_for_this_pytorch_the_pluggable_interface_is_used():
    import cualloc.torch

    raises(RuntimeError, "0.stub is older than 2.9", cualloc.torch.install, subclass=True)
    assert not cualloc.torch.installed() and cualloc.torch.capabilities()["interface"] is None
    cualloc.torch.install()
    works = cualloc.torch.capabilities()
    assert works["interface"] == "pluggable" and "older" in works["why_pluggable"]
    assert not works["mem_pool"] and not works["cudagraph_trees"]


def out_of_memory_has_the_words_of_pytorch():
    torch, ours, call = installed(limit="1G")
    kept = call["alloc"](512 << 20, 0, None)

    def text(bytes, device=0):
        made, code, said = tried(bytes, device)
        assert made is None
        return said, code

    said, code = text(2 << 30)
    begin = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 80.00 GiB of which "
    assert code == 1 and said.startswith(begin), said
    figures = "(limit): requested 2.00 GiB, live 512.00 MiB, bound 1.00 GiB (limit), missing 1.50 GiB"
    holder = "holder       512.00 MiB in 1 block: blocks of 512.00 MiB to 1.00 GiB on stream"
    words = ("is free; 1024.00 MiB allowed", "512.00 MiB is allocated by PyTorch", "out of memory on device 0")
    for part in (*words, figures, "Raise the limit by 1610612736 bytes", holder):
        assert part in said, said
    assert "Others hold" not in said, said
    assert torch._C._cuda_memoryStats(0)["num_ooms"] == 1
    # Another user of the device.
    others, handle = driver(), ctypes.c_uint64()
    assert others.cuMemAlloc_v2(ctypes.byref(handle), ctypes.c_size_t(70 << 30)) == 0
    said = text(2 << 30)[0]
    assert "Others hold 70.00 GiB: other processes, " in said and ", others hold 70.00 GiB" in said, said
    assert others.cuMemFree_v2(handle) == 0
    # Tags come first, the largest before the others.
    made = []
    for tag, bytes in (("cache", 96 << 20), ("weights", 256 << 20), ("workspace", 32 << 20)):
        with ours.tag(tag):
            made.append((call["alloc"](bytes, 0, None), bytes))
    said = text(2 << 30)[0]
    assert "(limit): requested 2.00 GiB, live 896.00 MiB, bound 1.00 GiB" in said, said
    holders = [line.split(":")[1].strip() for line in said.splitlines() if line.strip().startswith("holder")]
    assert holders[1:] == ["tag weights", "tag cache", "tag workspace"], said
    for ptr, bytes in made:
        call["free"](ptr, bytes, 0, None)
    assert "Tried to allocate 800000000.00 GiB. GPU 0 has a total capacity of 80.00 GiB" in text(800000000 << 30)[0]
    assert text(8000000000 << 30) == ("CUDA out of memory. Tried to allocate more than 1EB memory.", 1)
    said, code = text(1, 2)
    assert code == 2 and "there is no device 2" in said
    call["free"](kept, 512 << 20, 0, None)
    assert tried(900 << 20)[0], "and the program goes on"
    ours.check()


def streams_of_pytorch_are_adopted_and_others_are_not():
    torch, ours, call = installed()
    simulated = driver()
    mine, foreign = stream(simulated), stream(simulated)
    torch.cuda.handles = iter([mine, mine])
    pool = [torch.cuda.Stream(), torch.cuda.Stream(device=0, priority=-1)]
    external = torch.cuda.ExternalStream(foreign)
    wrapped = torch.cuda.Stream(stream_id=foreign, device_index=0, device_type=1)
    assert pool[0].cuda_stream == mine and external.cuda_stream == foreign == wrapped.cuda_stream
    assert ours._adopted == {(0, mine)}
    kept = [call["alloc"](1 << 20, 0, handle) for handle in (mine, foreign, None)]
    assert all(kept)
    call["set_record_stream_fn"](kept[2], foreign)
    for block, handle in zip(kept, (mine, foreign, None)):
        call["free"](block, 1 << 20, 0, handle)
    # Its owner destroys it, and no call uses it any more.
    assert simulated.cuStreamDestroy_v2(ctypes.c_void_p(foreign)) == 0
    live = [call["alloc"](((turn * 7919) % 4096 + 1) * 1024, 0, mine if turn % 2 else None) for turn in range(2000)]
    assert len(set(live)) == 2000 and all(live)
    for block in live:
        call["free"](block, 0, 0, None)
    assert call["alloc"](1 << 20, 0, mine)
    ours.check()


def a_stream_is_retired_before_its_tensors_are_freed():
    torch, ours, call = installed()
    simulated = driver()
    external = torch.cuda.ExternalStream(stream(simulated))
    kept = [call["alloc"](3 << 20, 0, external.cuda_stream) for _ in range(10)]
    ours.retire_stream(external)
    assert simulated.cuStreamDestroy_v2(ctypes.c_void_p(external.cuda_stream)) == 0
    for block in kept:
        call["free"](block, 3 << 20, 0, external.cuda_stream)
    assert ours.stats()["blocks"]["current"] == 0
    ours.check()


def a_stream_is_destroyed_before_its_tensors_are_freed():
    torch, ours, call = installed()
    simulated = driver()
    for turn in range(3):
        handle = stream(simulated)
        # As PyTorch wraps it for the program, which says nothing to anybody when it destroys it.
        assert torch.cuda.ExternalStream(handle).cuda_stream == handle
        kept = [call["alloc"](bytes, 0, handle) for bytes in [1000, 3 << 20, 40 << 20] * 20]
        # Others' blocks that the stream uses, too.
        used = [call["alloc"](bytes, 0, None) for bytes in [1000, 3 << 20, 40 << 20] * 4]
        for block in used:
            call["set_record_stream_fn"](block, handle)
        assert simulated.cuStreamDestroy_v2(ctypes.c_void_p(handle)) == 0
        for block in kept:
            call["free"](block, 0, 0, handle)
        for block in used:
            call["free"](block, 0, 0, None)
        assert ours.stats()["blocks"]["current"] == 0
        live = []
        for number in range(10_000):
            live.append(call["alloc"](number * 7919 % 4096 * 256 + 1, 0, None))
            if len(live) > 64:
                call["free"](live.pop(number * 31 % 64), 0, 0, None)
        assert len(set(live)) == 64
        for block in live:
            call["free"](block, 0, 0, None)
    ours.check()
    assert ours.stats()["reserved"]["peak"] < 3 << 30


def a_free_during_a_capture_is_made_up_for():
    torch, ours, call = installed()
    simulated = driver()
    mine = stream(simulated)
    torch.cuda.handles = iter([mine])
    torch.cuda.Stream()
    kept = [call["alloc"](bytes, 0, mine) for bytes in (4096, 5 << 20)]
    graph = ctypes.c_void_p()
    assert simulated.cuStreamBeginCapture_v2(ctypes.c_void_p(mine), 2) == 0
    from cualloc import _library

    assert tried(30 << 20, 0, mine)[:2] == (None, _library.CAPTURING)
    for block in kept:
        call["free"](block, 0, 0, mine)
    assert ours.stats()["blocks"]["current"] > 0, "the stream captures"
    assert simulated.cuStreamEndCapture(ctypes.c_void_p(mine), ctypes.byref(graph)) == 0
    again = call["alloc"](1000, 0, None)
    assert ours.stats()["blocks"]["current"] == 1
    call["free"](again, 1000, 0, None)
    ours.check()


# ---- PyTorch: graphs -----------------------------------------------------------------------------------------------


def graphs(**settings):
    """PyTorch with its captures, and two streams; the case ends here where there is no compiler for its C++ part."""
    import shutil
    torch, ours, call = installed(**settings)
    if not shutil.which("g++"):
        sys.exit(0)
    with tempfile.TemporaryDirectory() as folder:
        built = os.path.join(folder, "fake_graphs.so")
        source = os.path.join(HERE, "fake_graphs.cpp")
        subprocess.run(["g++", "-std=c++17", "-shared", "-fPIC", source, "-o", built], check=True)
        fake = ctypes.CDLL(built)
    simulated = driver()
    fake.fake_graph_new.restype = ctypes.c_void_p
    fake.fake_driver(simulated.cuStreamGetCaptureInfo_v2)
    torch.cuda.graphs.driver, torch.cuda.graphs.fake = simulated, fake
    mine, other = stream(simulated), stream(simulated)
    torch.cuda.graphs.current.stream = mine
    # A stream of PyTorch's own: that of another owner is not asked at a free whether it captures.
    torch.cuda.handles = iter([mine])
    torch.cuda.Stream()
    return SimpleNamespace(
        torch=torch, ours=ours, call=call, driver=simulated, filters=fake.fake_filters, mine=mine, other=other
    )


LAYER = 2 << 20


def layers(at, count=10):
    """Layers one behind another, each in memory of the one before; what stays."""
    places = set()
    for _ in range(count):
        block = at.call["alloc"](LAYER, 0, at.mine)
        places.add(block)
        at.call["free"](block, LAYER, 0, at.mine)
    assert len(places) == 1, places
    return at.call["alloc"](LAYER, 0, at.mine)


def a_graph_has_a_pool():
    at = graphs()
    torch, ours, call = at.torch, at.ours, at.call
    assert ours.capabilities()["cuda_graphs"] and not ours.capabilities()["cudagraph_trees"]
    eager = call["alloc"](LAYER, 0, at.mine)
    made = torch.cuda.CUDAGraph()
    with torch.cuda.graph(made):
        assert at.filters() == 1
        kept = layers(at)
        # Other streams find what they would find without it.
        outside = call["alloc"](LAYER, 0, at.other)
        assert ours.graph_pool(made.id)["blocks"] == 1
        call["free"](outside, LAYER, 0, at.other)
        # Made before, freed inside: made up for after the capture, and no request asks for it sooner.
        def calls():
            before = ours.stats()["driver_calls"]
            for _ in range(100):
                call["free"](call["alloc"](600, 0, None), 600, 0, None)
            return ours.stats()["driver_calls"] - before

        calls()
        without = calls()
        call["free"](eager, LAYER, 0, at.mine)
        assert calls() == without and ours.stats()["blocks"]["current"] == 1
    assert at.filters() == 0 and ours.stats()["blocks"]["current"] == 0
    held = ours.graph_pool(made.pool())
    assert held["blocks"] == 1 == held["leases"] and held["live"] == LAYER and held["physical"] >= held["peak"], held
    made.replay()
    call["free"](kept, LAYER, 0, at.mine)
    # What is captured no more is eager again.
    again = call["alloc"](LAYER, 0, at.mine)
    assert ours.graph_pool(made.pool())["blocks"] == 0
    call["free"](again, LAYER, 0, at.mine)
    torch._C._cuda_emptyCache()
    assert ours.graph_pool(made.pool()) == {**held, "blocks": 0, "live": 0, "free_bytes": held["physical"]}
    made.replay()
    pool = made.pool()
    made.reset()
    assert ours.graph_pool(pool) is None and ours.graph_pool((0, 77)) is None
    ours.check()


def captures_share_a_pool():
    at = graphs()
    torch, ours, call = at.torch, at.ours, at.call
    pool = torch.cuda.graph_pool_handle()
    made, kept, held = [], [], []
    for count in range(4):
        made.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(made[-1], pool if count < 3 else made[0].pool()):
            kept.append(layers(at))
        call["free"](kept.pop(), LAYER, 0, at.mine)
        held.append(ours.graph_pool(pool)["physical"])
    assert len(set(held)) == 1 and ours.graph_pool(pool)["leases"] == 4, held
    [one.replay() for one in made]
    # One goes, and is captured anew; the last one to go takes the pool along.
    made[0].reset()
    with torch.cuda.graph(made[0], pool):
        kept.append(layers(at))
    assert ours.graph_pool(pool)["physical"] == held[0]
    for left in (3, 2, 1, 0):
        made.pop().reset()
        assert (ours.graph_pool(pool) is None) == (left == 0)
    # Its block outlives it.
    call["free"](kept.pop(), LAYER, 0, at.mine)
    # A release too many, an end too many, and one of what was never begun.
    for hook in ("set_end_allocate_to_pool_fn", "set_release_pool"):
        call[hook](0, torch._C.PoolId(*pool))
        call[hook](1, torch._C.PoolId(7, 7))
    assert at.filters() == 0
    ours.check()


def threads_capture_beside_each_other():
    at = graphs()
    torch, ours, call = at.torch, at.ours, at.call
    pool, wrong = torch.cuda.graph_pool_handle(), []

    def work(number):
        at.driver.cuCtxSetCurrent(context)
        mine = torch.cuda.graphs.current.stream = stream(at.driver)
        for turn in range(20):
            made = torch.cuda.CUDAGraph()
            made_in = pool if number % 2 == 0 and turn % 2 == 0 else None
            made.capture_begin(made_in)
            blocks = [call["alloc"](LAYER, 0, mine) for _ in range(3)]
            inside = ours.graph_pool(made.id)["blocks"]
            for block in blocks:
                call["free"](block, LAYER, 0, mine)
            made.capture_end()
            made.replay()
            made.reset()
            if inside < 3 or not all(blocks):
                wrong.append((number, turn, inside, blocks))

    context = ctypes.c_void_p()
    at.driver.cuCtxGetCurrent(ctypes.byref(context))
    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert not wrong, wrong
    assert at.filters() == 0 and ours.graph_pool(pool) is None
    assert ours.stats()["blocks"]["current"] == 0
    ours.check()


def captures_that_fail_leave_nothing(**contract):
    at = graphs()
    vary(at, contract)
    torch, ours, call = at.torch, at.ours, at.call
    eager, mine = call["alloc"](LAYER, 0, at.mine), ctypes.c_void_p(at.mine)
    made = torch.cuda.CUDAGraph()

    def spoilt():
        with torch.cuda.graph(made):
            block = layers(at)
            call["free"](eager, LAYER, 0, at.mine)
            # A stream that joins and is not joined again.
            event = ctypes.c_void_p()
            assert at.driver.cuEventCreate(ctypes.byref(event), 2) == 0
            assert at.driver.cuEventRecord(event, mine) == 0
            assert at.driver.cuStreamWaitEvent(ctypes.c_void_p(at.other), event, 0) == 0
            assert at.driver.cuMemsetD8Async(ctypes.c_uint64(block), 0, ctypes.c_size_t(1), ctypes.c_void_p(at.other)) == 0
            call["free"](block, LAYER, 0, at.mine)

    raises(RuntimeError, "end", spoilt)
    assert at.filters() == 0 and ours.graph_pool(made.id) is None
    again = call["alloc"](LAYER, 0, at.mine)
    assert ours.stats()["blocks"]["current"] == 1, "what was freed inside is made up for"
    call["free"](again, LAYER, 0, at.mine)
    # One inside another on the same stream, which fails to begin: the outer one goes on.
    inner = torch.cuda.CUDAGraph()
    with torch.cuda.graph(made):
        raises(RuntimeError, "begin", inner.capture_begin)
        assert at.filters() == 1 and ours.graph_pool(inner.id) is None
        kept = layers(at)
        assert ours.graph_pool(made.id)["blocks"] == 1
    made.replay()
    call["free"](kept, LAYER, 0, at.mine)
    made.reset()
    # An end without a beginning.
    raises(RuntimeError, "end", made.capture_end)
    # A device that is not there.
    raises(RuntimeError, "there is no device 7", inner.capture_begin, device=7)
    # Something else fails behind the beginning, and behind the end: the capture goes on, and the graph is there.
    def fails():
        raise RuntimeError("a hook")

    hooked = torch.cuda.CUDAGraph()
    hooked.has_begun = hooked.has_ended = fails
    raises(RuntimeError, "a hook", hooked.capture_begin)
    kept = layers(at)
    assert at.filters() == 1 and ours.graph_pool(hooked.id)["blocks"] == 1
    raises(RuntimeError, "a hook", hooked.capture_end)
    assert at.filters() == 0 and ours.graph_pool(hooked.id)["blocks"] == 1 and hooked.pool()
    call["free"](kept, LAYER, 0, at.mine)
    hooked.reset()
    assert ours.graph_pool(hooked.id) is None
    # The graph object is destroyed, and its filter is not called.
    del made, inner, hooked
    assert call["alloc"](LAYER, 0, at.other) and at.filters() == 0
    ours.check()


def captures_that_fail_leave_nothing_where_pytorch_ends_them():
    captures_that_fail_leave_nothing(ends_failures=True)


def captures_that_fail_leave_nothing_where_pytorch_releases_them():
    captures_that_fail_leave_nothing(ends_failures=True, releases_failures=True)


def vary(at, contract):
    """What this PyTorch does for captures that fail: versions differ."""
    for name, value in contract.items():
        setattr(at.torch.cuda.CUDAGraph, name, value)


def captures_beside_each_other_fail_alone_where_pytorch_ends_them():
    captures_beside_each_other_fail_alone(ends_failures=True)


def captures_beside_each_other_fail_alone_where_pytorch_releases_them():
    captures_beside_each_other_fail_alone(ends_failures=True, releases_failures=True)


def captures_beside_each_other_fail_alone(**contract):
    at = graphs()
    vary(at, contract)
    torch, ours, call = at.torch, at.ours, at.call
    current, driver = torch.cuda.graphs.current, at.driver

    def over(stream):
        graph = ctypes.c_void_p()
        assert driver.cuStreamEndCapture(ctypes.c_void_p(stream), ctypes.byref(graph)) == 0

    def begun(stream, pool=None):
        made, current.stream = torch.cuda.CUDAGraph(), stream
        made.capture_begin(pool)
        return made

    # The one that was begun first fails: the other one goes on.
    first, second = begun(at.mine), begun(at.other)
    over(at.mine)
    current.stream = at.mine
    raises(RuntimeError, "end", first.capture_end)
    assert at.filters() == 1 and ours.graph_pool(first.id) is None
    current.stream = at.other
    kept = call["alloc"](LAYER, 0, at.other)
    assert ours.graph_pool(second.id)["blocks"] == 1
    second.capture_end()
    call["free"](kept, LAYER, 0, at.other)
    second.reset()
    assert at.filters() == 0 and ours.graph_pool(second.id) is None
    # One fails on another thread.
    first, context = begun(at.mine), ctypes.c_void_p()
    driver.cuCtxGetCurrent(ctypes.byref(context))
    over(at.mine)

    def ends():
        driver.cuCtxSetCurrent(context)
        current.stream = at.mine
        raises(RuntimeError, "end", first.capture_end)

    thread = threading.Thread(target=ends)
    thread.start()
    thread.join()
    assert at.filters() == 0 and ours.graph_pool(first.id) is None
    # One goes without an end.
    first = begun(at.mine)
    pool = first.id
    assert at.filters() == 1
    del first
    assert at.filters() == 0 and ours.graph_pool(pool) is None
    over(at.mine)
    # An end on a wrong stream ends nothing, so that all of a shared pool's graphs release it once.
    first = begun(at.mine)
    first.capture_end()
    second = begun(at.mine, first.id)
    current.stream = at.other
    raises(RuntimeError, "same stream", second.capture_end)
    assert at.filters() == 1 and call["alloc"](LAYER, 0, at.mine)
    current.stream = at.mine
    second.capture_end()
    second.reset()
    assert at.filters() == 0 and ours.graph_pool(first.id) is not None
    first.reset()
    assert ours.graph_pool(first.id) is None
    # Of graphs that share a pool one fails, and is kept. What the others have begun and hold stays theirs.
    first = begun(at.mine)
    first.capture_end()
    failed = begun(at.mine, first.id)
    over(at.mine)
    raises(RuntimeError, "end", failed.capture_end)
    third = begun(at.mine, first.id)
    failed.reset()
    del failed
    assert at.filters() == 1 and ours.graph_pool(first.id) is not None
    kept = call["alloc"](LAYER, 0, at.mine)
    assert ours.graph_pool(first.id)["blocks"] == 1
    # One that fails to begin on a stream that is captured.
    failed = torch.cuda.CUDAGraph()
    raises(RuntimeError, "begin", failed.capture_begin, first.id)
    del failed
    assert at.filters() == 1
    third.capture_end()
    call["free"](kept, LAYER, 0, at.mine)
    first.reset()
    assert ours.graph_pool(third.id) is not None
    third.reset()
    assert ours.graph_pool(third.id) is None and at.filters() == 0
    # One without an end, in a pool that another graph has.
    first = begun(at.mine)
    first.capture_end()
    failed = begun(at.mine, first.id)
    del failed
    over(at.mine)
    assert at.filters() == 0 and ours.graph_pool(first.id) is not None
    first.reset()
    assert ours.graph_pool(first.id) is None
    ours.check()


def ranges_grow_in_place():
    at = graphs()
    ours, call = at.ours, at.call
    granule = 2 << 20
    cache = ours.reserve(63 * granule + 1, tag="cache")
    assert cache.nbytes == 64 * granule and cache.committed == 0
    assert cache.tensor.shape == (64 * granule,) and cache.tensor.device == 0
    cache.commit(granule - 1, 4 * granule + 1)
    assert cache.committed == 5 * granule and cache.map() == [True] * 5 + [False] * 59
    address = ctypes.c_uint64(cache.tensor.data_ptr + 4 * granule)
    assert at.driver.cuMemsetD8Async(address, 7, ctypes.c_size_t(granule), ctypes.c_void_p(at.mine)) == 0
    cache.record(0, granule, ours.torch.cuda.ExternalStream(at.mine))
    cache.decommit(1, 2 * granule)
    assert cache.map()[:3] == [True, False, True] and ours.stats()["ranges"] == 5 * granule
    assert ours.stats()["ranges_leaving"] == granule
    # What was decommitted returns to the driver, too, and does not come back.
    assert ours.sleep("cache") == 5 * granule and ours.stats()["ranges"] == 0
    raises(ours._library.Error, "suspended", cache.commit, 0, 1)
    assert ours.wake("cache") == 4 * granule
    rows = ours.reserve(4 * granule, granule=2 * granule, stripes=3)
    rows.commit(0, 1)
    assert rows.tensor.shape == (3, 4 * granule) and rows.committed == 6 * granule
    raises(ValueError, "expected lo <= hi", rows.commit, 2, 1)
    raises(ours._library.Error, "granule", ours.reserve, granule, granule=3)
    raises(ours._library.OutOfMemory, "out of memory", ours.reserve(1 << 40).commit, 0, 1 << 40)
    with rows:
        pass
    cache.close()
    cache.close()
    block = call["alloc"](LAYER, 0, at.mine)
    call["free"](block, LAYER, 0, at.mine)
    ours.check()


def contents(at):
    """Functions that fill a layer with a byte, copy a layer to another, and return whether a layer holds a byte."""
    stream, size = ctypes.c_void_p(at.mine), ctypes.c_size_t(LAYER)

    def fill(address, value):
        assert at.driver.cuMemsetD8Async(ctypes.c_uint64(address), value, size, stream) == 0

    def copy(to, source):
        assert at.driver.cuMemcpyDtoDAsync_v2(ctypes.c_uint64(to), ctypes.c_uint64(source), size, stream) == 0

    def holds(address, value):
        seen = (ctypes.c_ubyte * LAYER)()
        assert at.driver.cuMemcpyDtoHAsync_v2(seen, ctypes.c_uint64(address), size, stream) == 0
        assert at.driver.cuStreamSynchronize(stream) == 0
        return bytes(seen) == bytes([value]) * LAYER

    return fill, copy, holds


def pools_of_graphs_sleep():
    at = graphs()
    torch, ours, call = at.torch, at.ours, at.call
    fill, copy, holds = contents(at)
    pool = ours.tag_pool(torch.cuda.graph_pool_handle(), "graphs")
    assert ours.graph_pool(pool) is None and ours.sleep("graphs") == 0 == ours.wake()
    first, second, outside = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph(), call["alloc"](LAYER, 0, at.mine)
    inputs, outputs = [], []
    for graph, name in ((first, pool), (second, None)):
        with torch.cuda.graph(graph, pool=name):
            block, output, temporary = (call["alloc"](LAYER, 0, at.mine) for _ in range(3))
            copy(temporary, block)
            copy(output, temporary)
            call["free"](temporary, LAYER, 0, at.mine)
        inputs.append(block)
        outputs.append(output)
    assert ours.tag_pool(second.pool(), "others") == second.pool()
    raises(ValueError, "unknown tag 'graph'", ours.sleep, "graph")

    def replayed(graph, output, value):
        fill(output, 0)
        graph.replay()
        return holds(output, value)

    held = ours.stats()["graph_pools"]
    for turn in range(4):
        fill(inputs[0], turn + 1)
        fill(inputs[1], turn + 11)
        assert replayed(first, outputs[0], turn + 1) and replayed(second, outputs[1], turn + 11)
        released = ours.sleep(keep="graphs") if turn % 2 else ours.sleep("graphs", keep=True)
        assert released >= held // (1 if turn % 2 else 2)
        assert ours.graph_pool(pool)["physical"] == 0 and ours.graph_pool(pool)["leases"] == 1
        assert turn % 2 or replayed(second, outputs[1], turn + 11)
        fill(outside, 9)
        raises(ours._library.Error, "suspended", ours.tag_pool, pool, "others")
        assert ours.wake() == (held if turn % 2 else held // 2) and ours.stats()["graph_pools"] == held
        assert replayed(first, outputs[0], turn + 1)
        if turn % 2:
            fill(inputs[1], turn + 21)
            assert replayed(second, outputs[1], turn + 21)
        ours.check()
    # PyTorch uses the id of a pool again, and another tag replaces the first.
    for block in (inputs[0], outputs[0]):
        call["free"](block, LAYER, 0, at.mine)
    first.reset()
    torch._C._cuda_emptyCache()
    assert ours.graph_pool(pool) is None
    with torch.cuda.graph(first, pool=pool):
        block = call["alloc"](LAYER, 0, at.mine)
    assert ours.sleep("graphs", keep=True) == LAYER == ours.wake("graphs")
    ours.tag_pool(pool, "others")
    assert ours.sleep("graphs") == 0 and ours.sleep("others") > LAYER
    ours.wake()
    for block in (block, inputs[1], outputs[1], outside):
        call["free"](block, LAYER, 0, at.mine)
    raises(ValueError, "embedded null", ours.tag_pool, pool, "a\0b")
    for graph in (first, second):
        graph.reset()
    torch._C._cuda_emptyCache()
    assert ours.stats()["graph_pools"] == 0
    ours.check()


def free_memory_of_a_pool_returns():
    at = graphs()
    torch, ours, call = at.torch, at.ours, at.call
    from cualloc import _library

    library, pool, graph = _library.LIBRARY, torch.cuda.graph_pool_handle(), torch.cuda.CUDAGraph()
    assert ours.trim(pool=pool) == (0, 0)
    # As PyTorch creates a MemPool.
    assert library.cualloc_torch_pool_retain(0, _library.PoolId(*pool), None) == 0
    which, number = _library.Scope(struct_size=ctypes.sizeof(_library.Scope), kind=_library.SCOPE_THREAD), ctypes.c_uint64()
    handle = library.cualloc_torch_pool(0, _library.PoolId(*pool))
    assert library.cualloc_pool_enter(handle, ctypes.byref(which), ctypes.byref(number)) == 0
    kept, freed = (call["alloc"](LAYER, 0, at.mine) for _ in range(2))
    call["free"](freed, LAYER, 0, at.mine)
    assert library.cualloc_pool_leave(handle, number) == 0
    assert ours.trim(pool=SimpleNamespace(id=pool)) == (LAYER, 0) == (ours.graph_pool(pool)["physical"], 0)
    with torch.cuda.graph(graph, pool=pool):
        call["free"](call["alloc"](LAYER, 0, at.mine), LAYER, 0, at.mine)
    assert ours.trim(pool=pool) == (0, 0), "the graph may use it"
    graph.reset()
    call["free"](kept, LAYER, 0, at.mine)
    assert ours.trim(pool=pool)[0] >= LAYER and ours.graph_pool(pool)["physical"] == 0
    ours.check()


def tags_sleep_and_wake():
    at = graphs()
    torch, ours, call = at.torch, at.ours, at.call
    from cualloc import _library

    fill, copy, holds = contents(at)

    def free():
        left, total = ctypes.c_size_t(), ctypes.c_size_t()
        assert at.driver.cuMemGetInfo_v2(ctypes.byref(left), ctypes.byref(total)) == 0
        return left.value

    assert ours.sleep() == 0 == ours.wake()
    raises(ValueError, "unknown tag 'weights'", ours.sleep, "weights")
    with ours.tag("weights"):
        weights = call["alloc"](LAYER, 0, at.mine)
        with ours.tag("cache"):
            cache = call["alloc"](LAYER, 0, at.mine)
        more = call["alloc"](LAYER, 0, at.mine)
        with ours.tag("weights", device="cuda:1"):
            # The default stream is that of the current context, or of the device's own if there is none.
            context = ctypes.c_void_p()
            assert at.driver.cuCtxGetCurrent(ctypes.byref(context)) == 0 == at.driver.cuCtxSetCurrent(None)
            second = call["alloc"](LAYER, 1, None)
            assert at.driver.cuCtxSetCurrent(context) == 0
    plain = call["alloc"](LAYER, 0, at.mine)
    for number, block in enumerate((weights, cache, more, plain)):
        fill(block, number + 1)
    made = torch.cuda.CUDAGraph()
    with torch.cuda.graph(made):
        copy(plain, weights)
    raises(ValueError, "unknown tag 'caches'", ours.sleep, ["weights", "caches"])
    raises(ValueError, "unknown tag 'wheights'", ours.sleep, keep="wheights")
    raises(ValueError, "unknown tag 'caches'", ours.wake, "caches")
    assert ours.stats()["graph_pools"] == 3 * LAYER and ours.stats(1)["graph_pools"] == LAYER
    torch._C._cuda_emptyCache()
    for turn, keep in enumerate(("weights", ["weights", "cache"], True)):
        before = free()
        assert ours.sleep(keep=keep, pinned=turn != 1) == 4 * LAYER
        assert free() - before == 3 * LAYER and ours.stats()["graph_pools"] == 0
        # Suspended memory stays suspended, and serves no request.
        assert ours.sleep("weights") == 0
        with ours.tag("cache"):
            assert tried(LAYER, 0, at.mine)[:2] == (None, _library.SUSPENDED)
        assert holds(plain, 4 if turn == 0 else 1)
        assert ours.wake("weights") == 3 * LAYER and ours.wake(("weights",)) == 0
        assert holds(weights, 1) and holds(more, 3)
        made.replay()
        assert holds(plain, 1)
        assert ours.wake() == LAYER and free() == before
        if turn > 0:
            assert holds(cache, 2)
        fill(cache, 2)
    # Without contents, by one tag; and the blocks are freed meanwhile.
    assert ours.sleep("cache") == LAYER
    call["free"](cache, LAYER, 0, at.mine)
    assert ours.wake("cache") == LAYER
    with ours.tag("cache"):
        assert call["alloc"](LAYER, 0, at.mine) == cache
    ours.sleep(keep=True)
    # There is no room any more.
    taken, room = ctypes.c_uint64(), free()
    assert at.driver.cuMemAlloc_v2(ctypes.byref(taken), ctypes.c_size_t(room - LAYER)) == 0
    raises(ours._library.OutOfMemory, "out of memory", ours.wake, "weights")
    assert ours.wake("cache") == LAYER
    assert at.driver.cuMemFree_v2(taken) == 0
    assert ours.wake() == 3 * LAYER and holds(weights, 1)
    for block, device in ((weights, 0), (cache, 0), (more, 0), (plain, 0), (second, 1)):
        call["free"](block, LAYER, device, at.mine if device == 0 else None)
    made.reset()
    torch._C._cuda_emptyCache()
    assert ours.stats()["graph_pools"] == 0 == ours.stats(1)["graph_pools"]
    ours.check()
    ours.check(1)


def vllm_sleeps_by_tags():
    """What vLLM's worker does with a back end of its sleep mode."""
    import importlib
    import importlib.metadata

    from vllm.device_allocator.cumem import CuMemAllocator
    from vllm.device_allocator.sleep_mode_backend import SleepModeBackendFactory

    at = graphs()
    (plugin,) = importlib.metadata.entry_points(group="vllm.general_plugins")
    register = plugin.load()
    register()
    raises(AssertionError, "own allocator", CuMemAllocator.get_instance)
    os.environ["CUALLOC_VLLM"] = "1"
    register()
    module, kind = SleepModeBackendFactory.names["cualloc"]
    backend = getattr(importlib.import_module(module), kind)
    assert backend.is_supported() and backend.preserves_communicators()
    backend, memory = backend(), CuMemAllocator.get_instance()

    def value(address, new=None):
        """Writes a byte of a block, or reads it."""
        byte, stream = ctypes.c_ubyte(new or 0), ctypes.c_void_p(at.mine)
        if new is not None:
            return at.driver.cuMemsetD8Async(ctypes.c_uint64(address), byte, ctypes.c_size_t(LAYER), stream)
        assert at.driver.cuMemcpyDtoHAsync_v2(ctypes.byref(byte), ctypes.c_uint64(address), ctypes.c_size_t(1), stream) == 0
        assert at.driver.cuStreamSynchronize(stream) == 0
        return byte.value

    assert memory.get_current_usage() == 0 and backend.state() == "RUNNING"
    blocks = {}
    for number, tag in enumerate(("weights", "kv_cache", "runtime", None)):
        with memory.use_memory_pool(tag=tag):
            blocks[tag] = at.call["alloc"](LAYER, 0, at.mine)
        assert value(blocks[tag], number + 1) == 0
    assert memory.get_current_usage() == 4 * LAYER
    with memory.cudagraph_pool() as pool, memory.cudagraph_pool() as again:
        assert len(pool) == 2 and pool == again
    assert (0, "cudagraph") in at.ours._library.tags()
    # Level 1 keeps the weights, and a selective wake leaves the cache asleep.
    backend.suspend(1)
    assert backend.state() == "SUSPENDED" and memory.get_current_usage() == 0
    backend.resume(["weights"])
    assert memory.get_current_usage() == 3 * LAYER
    assert value(blocks["weights"]) == 1 and value(blocks["runtime"]) == 3
    backend.resume()
    assert backend.state() == "RUNNING" and memory.get_current_usage() == 4 * LAYER
    # Level 2 keeps what vLLM cannot load again.
    backend.suspend(2)
    backend.resume(None)
    assert value(blocks["runtime"]) == 3
    value(blocks["weights"], 5)
    backend.discard(("kv_cache", "unknown"))
    assert backend.state() == "SUSPENDED" and memory.get_current_usage() == 3 * LAYER
    memory.wake_up(["kv_cache"])
    assert value(blocks["weights"]) == 5 and memory.get_current_usage() == 4 * LAYER
    memory.sleep("weights")
    memory.wake_up()
    assert value(blocks["weights"]) == 5
    for block in blocks.values():
        at.call["free"](block, LAYER, 0, at.mine)
    memory.close()
    at.ours.check()


def tags_need_the_allocator():
    import cualloc.torch

    with_tag = lambda: cualloc.torch.tag("weights").__enter__()
    raises(RuntimeError, "cualloc.torch.install()", with_tag)
    raises(RuntimeError, "cualloc.torch.install()", cualloc.torch.tag_pool, (0, 1), "graphs")
    assert cualloc.torch.sleep() == 0 and not cualloc.torch.capabilities()["sleep"]


def tests_of_pytorch_are_chosen_by_name():
    program = '''
import unittest
import torch

ours = bool(torch._C.current)

class TestCuda(unittest.TestCase):
    def test_graph_is_right(self):
        assert ours

    def test_streams_are_wrong(self):
        self.assertTrue(not ours)

    def test_out_of_memory_is_wrong_with_both(self):
        self.assertEqual(1, 2)

    def test_graph_skips(self):
        self.skipTest("no reason")

    def test_graph_memory_stats_and_use_result_after_destroy_graph(self):
        raise AssertionError("left out")

class TestCudaMallocAsync(unittest.TestCase):
    def test_memory_snapshot_with_cpp(self):
        raise AssertionError("left out")

class TestCudaOptimsCUDA(unittest.TestCase):
    def test_graph_optims(self):
        assert ours

    def test_of_nothing_like_it(self):
        raise AssertionError("not about memory")

class TestMemPool(unittest.TestCase):
    def test_graph_capture_reclaim_2_streams(self):
        assert ours

    def test_mempool_with_allocator(self):
        raise AssertionError("left out")
'''
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "test_cuda.py")
        with open(path, "w", encoding="utf-8") as file:
            file.write(program)
        command = [sys.executable, "-B", os.path.join(HERE, "gpu_pytorch_tests.py"), path]
        ended = subprocess.run(command, capture_output=True, text=True)
        with open(path, "w", encoding="utf-8") as file:
            file.write(program.replace("assertTrue(not ours)", "assertTrue(ours)"))
        right = subprocess.run([*command, "--jobs", "2"], capture_output=True, text=True)
        with open(path, "w", encoding="utf-8") as file:
            file.write("import unittest")
        nothing = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 1 and "failed    TestCuda.test_streams_are_wrong" in ended.stdout, ended
    assert "fails with PyTorch's own allocator, too: TestCuda.test_out_of_memory_is" in ended.stdout, ended.stdout
    left = "left out: 2 for the reasons above, 1 that are not about memory"
    both = f"1 skipped by themselves, 1 failed, 0 left the allocator unsound, 2 fail with PyTorch's own, too; {left}"
    assert f"3 well, {both}" in ended.stdout, ended.stdout
    assert right.returncode == 0 and f"4 well, {both.replace('1 failed', '0 failed')}" in right.stdout, right
    assert nothing.returncode == 1, nothing
    assert "test_of_nothing" not in ended.stdout
    assert "left out  TestCudaMallocAsync.test_memory_snapshot_with_cpp: " in ended.stdout


def the_classic_policy_has_no_graphs():
    at = graphs(config="policy=classic")
    made = at.torch.cuda.CUDAGraph()
    raises(RuntimeError, "graph pools without virtual memory management", made.capture_begin)
    raises(RuntimeError, "graph pools without virtual memory management", at.ours.tag("weights").__enter__)
    assert at.filters() == 0 and at.ours.graph_pool(made.id) is None
    assert at.call["alloc"](LAYER, 0, at.mine)


def what_only_pytorchs_own_allocator_does_says_so():
    torch, ours, call = installed()
    for name in ("_cuda_getCheckpointState", "_cuda_setCheckpointPoolState", "_cuda_checkPoolLiveAllocations"):
        raises(RuntimeError, "cudagraph_trees = False", getattr(torch._C, name), 0, (0, 1))
    raises(RuntimeError, "torch.cuda.graph_pool_handle()", torch.cuda.MemPool)
    raises(RuntimeError, "cualloc.torch.graph_pool(pool)", torch._C._cuda_memorySnapshot, (0, 1, True))


def snapshots_are_those_of_pytorch():
    torch, ours, call = installed()
    from cualloc import record

    kept = call["alloc"](5 << 20, 0, None)

    def blocks(made):
        return {block["address"]: block for segment in made["segments"] for block in segment["blocks"]}

    # Without a history what is live is there, and nothing is recorded afterwards.
    made = torch._C._cuda_memorySnapshot(None)
    assert made.keys() >= {"segments", "device_traces", "allocator_settings", "external_annotations"}, made.keys()
    assert blocks(made)[kept]["state"] == "active_allocated" and blocks(made)[kept]["requested_size"] == 5 << 20
    raises(RuntimeError, "no recording runs", record.stop)

    def this_function(bytes):
        return call["alloc"](bytes, 0, None)

    torch._C._cuda_record_memory_history("all", "all", "python", 1000, False)
    torch._C._cuda_record_memory_history("all", "all", "python", 1000, False)
    more = this_function(7 << 20)
    call["free"](kept, 5 << 20, 0, None)
    made = torch._C._cuda_memorySnapshot((0, 0, True))
    assert blocks(made)[more]["state"] == "active_allocated" and blocks(made).get(kept, {}).get("state") != "active_allocated"
    events = [(event["action"], event["addr"]) for event in made["device_traces"][0]]
    assert ("alloc", more) in events and ("free_completed", kept) in events, events
    (event,) = (event for event in made["device_traces"][0] if (event["action"], event["addr"]) == ("alloc", more))
    assert any("this_function" in frame["name"] for frame in event["frames"]), event
    assert not any(torch._C._cuda_memorySnapshot((0, 0, False))["device_traces"])
    # Begun anew, and ended.
    torch._C._cuda_record_memory_history("all", "all", "python", 1000, True)
    made = torch._C._cuda_memorySnapshot()
    assert more in blocks(made) and ("free_completed", kept) not in [
        (event["action"], event["addr"]) for event in made["device_traces"][0]
    ]
    torch._C._cuda_record_memory_history(None)
    torch._C._cuda_record_memory_history(None)
    raises(RuntimeError, "no recording runs", record.stop)
    # Of a recording that the program has begun.
    record.start()
    raises(RuntimeError, "another recording", torch._C._cuda_record_memory_history, "all")
    assert more in blocks(torch._C._cuda_memorySnapshot())
    record.stop()
    assert ours.capabilities()["memory_snapshot"]
    call["free"](more, 7 << 20, 0, None)
    ours.check()


def trials_of_cudnn_stay_off():
    import torch

    import cualloc.torch

    torch.backends.cudnn.benchmark = True
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        warned = lambda: [one.filename for one in said if "cuDNN's own choice" in str(one.message)]
        cualloc.torch.install()
        assert not torch.backends.cudnn.benchmark and len(warned()) == 1, said
        torch.backends.cudnn.benchmark = True
        torch._C._set_cudnn_benchmark(True)
        assert not torch.backends.cudnn.benchmark and not torch._C._get_cudnn_benchmark()
        assert len(warned()) == 3 and warned()[1] == __file__, said
        torch.backends.cudnn.benchmark = False
        assert len(warned()) == 3


def a_pytorch_with_other_hooks_has_no_graphs():
    import torch

    del torch._C._FUNCTIONS["set_begin_allocate_to_pool"]
    torch, ours, call = installed()
    assert not ours.capabilities()["cuda_graphs"] and "set_release_pool" not in call


def a_late_install_says_so():
    import torch

    import cualloc.torch

    torch._C.initialized = True
    raises(RuntimeError, "before the first tensor", cualloc.torch.install)
    assert torch._C.current is None and not cualloc.torch.installed()


def a_pytorch_without_cuda_is_named():
    import torch

    import cualloc.torch

    del torch._C._cuda_customAllocator
    raises(RuntimeError, "built without CUDA", cualloc.torch.install)
    assert not cualloc.torch.installed()


def another_allocator_came_first():
    import torch

    import cualloc.torch

    torch._C.current = "another one"
    raises(RuntimeError, "already initialized", cualloc.torch.install)
    assert not cualloc.torch.installed()


def what_cannot_be_thrown_is_said_once():
    import torch

    import cualloc.torch

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        cualloc.torch.install()
        cualloc.torch.install()
    assert [warning for warning in said if "RuntimeError" in str(warning.message)] == said[:1] and len(said) == 1
    assert said[0].filename == __file__, said[0].filename
    assert cualloc.torch.capabilities()["out_of_memory"] == "RuntimeError"
    assert torch._C.current is not None


def lack_of_memory_is_thrown_as_the_error_of_pytorch(*flags):
    import torch

    import cualloc.torch

    if not shutil.which("g++"):
        return print("SKIPPED: there is no g++")
    with tempfile.TemporaryDirectory() as folder:
        os.mkdir(os.path.join(folder, "lib"))
        fake = os.path.join(folder, "lib", "libc10.so")
        source = os.path.join(HERE, "fake_c10.cpp")
        subprocess.run(["g++", "-std=c++17", *flags, "-shared", "-fPIC", source, "-o", fake], check=True)
        os.symlink(fake, os.path.join(folder, "lib", "libc10_cuda.so"))
        library = ctypes.CDLL(fake)
        torch.__file__ = os.path.join(folder, "__init__.py")
        cualloc.torch.install(limit="1G")
    assert cualloc.torch.capabilities()["out_of_memory"] == "torch.OutOfMemoryError"
    allocate, text = cualloc.torch._companion().cualloc_torch_alloc_or_throw, ctypes.create_string_buffer(4096)

    def thrown(bytes, device=0):
        code = library.fake_allocate(allocate, ctypes.c_size_t(bytes), device, text, ctypes.c_size_t(len(text)))
        return code, text.value.decode()

    for _ in range(100):
        code, said = thrown(2 << 30)
        assert code == 1 and said.startswith("CUDA out of memory. Tried to allocate 2.00 GiB"), (code, said)
    assert thrown(1 << 20)[0] == 0
    # What is no lack of memory is another error.
    assert thrown(1, 7) == (2, "there is no device 7: the driver has 2")
    assert torch._C._cuda_memoryStats(0)["num_ooms"] == 100
    cualloc.torch.check()


def lack_of_memory_is_thrown_with_the_strings_of_earlier_versions():
    lack_of_memory_is_thrown_as_the_error_of_pytorch("-D_GLIBCXX_USE_CXX11_ABI=0")


def pools_take_segments():
    import torch

    import cualloc.torch

    pool = cualloc.torch.mem_pool(use_on_oom=True)
    call = pool.allocator.functions
    segment = call["alloc"](20 << 20, 0, None)
    assert segment and pool.use_on_oom and torch._C.current is None
    # Null, which PyTorch looks for in this role.
    assert call["alloc"](1 << 50, 0, None) is None
    call["free"](segment, 20 << 20, 0, None)
    assert cualloc.torch.mem_pool().allocator is pool.allocator
    cualloc.torch.install()
    raises(RuntimeError, "PyTorch's own", cualloc.torch.mem_pool)


def a_forked_child_is_left_alone():
    torch, ours, call = installed()
    kept = [call["alloc"](bytes, 0, None) for bytes in (1000, 5 << 20)]
    child = os.fork()
    if child == 0:
        code = 1
        try:
            from cualloc import _library

            for block in kept:
                call["free"](block, 0, 0, None)
            torch._C._cuda_emptyCache()
            for device in (0, 1):
                assert tried(1000, device)[:2] == (None, _library.CONTEXT_LOST)
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert ours.stats()["blocks"]["current"] == 2
    ours.check()


def threads_share_an_allocator():
    torch, ours, call = installed()
    simulated = driver()
    handles = [stream(simulated) for _ in range(4)]

    def work(handle):
        for turn in range(300):
            block = call["alloc"]((turn * 7919) % 100_000 + 1, turn % 2, handle if turn % 2 == 0 else None)
            assert block
            call["free"](block, 0, turn % 2, None)

    threads = [threading.Thread(target=work, args=(handle,)) for handle in handles]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert ours.stats()["blocks"] == {"current": 0, "peak": ours.stats()["blocks"]["peak"], "total": 600}
    ours.check()
    ours.check(1)


def it_ends_with_live_blocks():
    torch, ours, call = installed()
    kept = [call["alloc"](1 << number, number % 2, None) for number in range(25)]
    torch.kept, torch.free = kept, call["free"]

    class Late:
        def __del__(self):
            for number, block in enumerate(kept):
                self.free(block, 0, number % 2, None)

        free = call["free"]

    torch.late = Late()


# ---- CuPy, RMM -----------------------------------------------------------------------------------------------------


def cupy_allocates_on_its_current_stream():
    import cupy

    import cualloc.cupy
    from cualloc import _library

    cualloc.cupy.install(limit="1G")
    (malloc,) = cupy.chosen
    simulated = driver()
    cupy.stream.ptr = stream(simulated)
    first = malloc(1000)
    assert first.ptr and first.mem.size == 1000 and first.mem.device_id == 0
    assert _library.stats(0).streams == 1 and _library.stats(0).requested.current == 1000
    array = SimpleNamespace(data=first)
    cualloc.cupy.record_stream(array, SimpleNamespace(ptr=0))
    error = raises(cupy.OutOfMemoryError, "limit 1,073,741,824", malloc, 2 << 30)
    assert "allocated so far: 1,024" in str(error) and "out of memory" in str(error.__cause__)
    del error
    # More than any device has, and than there are addresses.
    for bytes in (2**40 + 1, 2**50, 2**64 + 5):
        raises(cupy.OutOfMemoryError, f"{bytes:,}", malloc, bytes)
    assert malloc(0).mem.size == 0
    del array, first
    assert _library.stats(0).blocks.current == 0
    # Array on memory of others.
    other = cupy.MemoryPointer(cupy.UnownedMemory(1, 1, None), 0)
    cualloc.cupy.record_stream(SimpleNamespace(data=other), cupy.stream)
    _library.check(0)


def what_a_capture_refuses_is_freed_by_later_calls():
    import cualloc.cupy
    from cualloc import _library

    cualloc.cupy.install(limit="1G")
    answers, freed = [_library.CAPTURING, _library.CAPTURING, 0], []

    def free(allocator, address):
        freed.append((allocator, address))
        return answers.pop(0)

    _library.give_back(free, 1, 77)
    # Both a request and a trim make up for it, and what is still refused waits for the next of them.
    block = cualloc.cupy.malloc(1000)
    assert freed == [(1, 77)] * 2
    _library.trim(0, 0)
    assert freed == [(1, 77)] * 3 and not answers
    _library.trim(0, 0)
    assert len(freed) == 3
    del block
    _library.check(0)


def cupy_and_pytorch_share_memory():
    torch, ours, call = installed(limit="1G")
    import cualloc.cupy

    cualloc.cupy.install()
    raises(RuntimeError, "other settings", cualloc.cupy.install, limit="2G")
    block = cualloc.cupy.malloc(100 << 20)
    assert ours.stats()["allocated"]["current"] == 100 << 20
    address = block.ptr
    del block
    assert call["alloc"](100 << 20, 0, None) == address


def rmm_has_a_resource():
    import rmm

    import cualloc.rmm
    from cualloc import _library

    cualloc.rmm.install(limit="1G", devices=(0, 1))
    assert rmm.chosen.keys() == {0, 1}

    class Stream:
        def __cuda_stream__(self):
            return 0, 0

    block = rmm.chosen[1].allocate(5 << 20, Stream())
    assert block and _library.stats(1).blocks.current == 1 and _library.stats(0).blocks.current == 0
    assert rmm.chosen[0].allocate(0, Stream()) == 0
    for bytes in (2 << 30, 2**40, 2**50):
        raises(MemoryError, "out of memory", rmm.chosen[0].allocate, bytes, Stream())
    rmm.chosen[1].deallocate(block, 5 << 20, Stream())
    rmm.chosen[0].deallocate(0, 0, Stream())
    assert _library.stats(1).blocks.current == 0


def numbers_that_do_not_fit_are_refused():
    import cupy

    import cualloc
    import cualloc.cupy
    import cualloc.record
    import cualloc.rmm
    import cualloc.torch as ours
    from cualloc import _library

    for limit, kind in ((-1, ValueError), (-0.5, ValueError), (2**64, OverflowError), (2.0**64, OverflowError)):
        raises(kind, "the limit", ours.install, limit=limit)
    # Texts are the library's to read.
    raises(cualloc.Error, str(2**64), ours.install, config={"limit": 2**64})
    raises(cualloc.Error, "-1", ours.install, config="limit=-1")
    # Nothing of it stays.
    cualloc.cupy.install(limit="1G")
    driver()
    array = SimpleNamespace(data=cualloc.cupy.malloc(1000))
    kept = _library.stats(0).requested.current
    bad = ((-1, ValueError, "negative"), (2**64, OverflowError, "fit into 64 bits"))
    for number, kind, words in (*bad, (2**64 + 1, *bad[1][1:]), (-(2**64), *bad[0][1:])):
        raises(kind, words, ours.trim, number)
        raises(kind, words, cualloc.record.start, stacks=number)
        raises(kind, words, _library.allocate, 0, 1000, number)
        raises(kind, words, cualloc.cupy.record_stream, array, SimpleNamespace(ptr=number))
        raises(kind, words, ours.graph_pool, (number, 0), 0)
        raises(kind, words, ours.graph_pool, (0, number), 0)
        gone = SimpleNamespace(device=SimpleNamespace(index=0), cuda_stream=number)
        raises(kind, words, ours.retire_stream, gone)
        raises(kind, words, cualloc.rmm._handle, SimpleNamespace(__cuda_stream__=lambda number=number: (0, number)))
    raises(ValueError, "negative", cualloc.cupy.malloc, -1)
    raises(ValueError, "negative", _library.allocate, 0, -(2**64) + 1000, None)
    # The number of device 0 with more bits before it.
    for device, kind in ((-1, ValueError), (2**31, OverflowError), (2**32, OverflowError), (-(2**32), ValueError)):
        raises(kind, "the number of a device", _library.allocate, device, 1000, None)
        raises(kind, "the number of a device", cualloc.rmm.resource, device)
        for call in (ours.stats, ours.check, _library.reset_peaks, lambda device: ours.trim(0, device)):
            raises(kind, "the number of a device", call, device)
        raises(kind, "the number of a device", ours.graph_pool, (0, 1), device)
        raises(kind, "the number of a device", _library.suspend, device, "tag", 0)
    raises(TypeError, "float", ours.trim, 1.0)
    assert _library.stats(0).requested.current == kept and cupy.chosen
    cualloc.cupy.record_stream(array, SimpleNamespace(ptr=0))
    ours.check(0)


def recordings_have_contexts():
    import cualloc
    import cualloc.record as record
    from cualloc import _library

    driver()
    raises(cualloc.Error, "no recording", record.stop)
    raises(cualloc.Error, "cannot write the recording", record.start, "/no/such/folder/file")
    for take in (record.start, record.dump, record.snapshot):
        raises(ValueError, "null byte", take, "cut\0off")
    raises(ValueError, "null byte", record.context("cut\0off").__enter__)
    with tempfile.TemporaryDirectory() as folder:
        whole, newest = os.path.join(folder, "whole.rec"), os.path.join(folder, "newest.rec")
        record.start(whole)
        raises(cualloc.Error, "another recording", record.start)
        with record.context("train;forward"):
            address = _library.allocate(0, 1000, None)
            with record.context("train;inner"):
                pass
        _library.checked(_library.LIBRARY.cualloc_free(_library.allocator(0), address))
        events, lost = record.stop()
        assert events >= 5 and lost == 0, (events, lost)
        with open(whole, "rb") as file:
            written = file.read()
        assert written.startswith(b"cuallocR") and b"train;forward" in written
        stacks = os.path.join(folder, "stacks.rec")
        record.start(stacks, stacks=1)
        for _ in range(2):
            # Each from the same place: comprehensions are functions of their own before Python 3.12.
            address = _library.allocate(0, 100_000, None)
            _library.checked(_library.LIBRARY.cualloc_free(_library.allocator(0), address))
        record.stop()
        with open(stacks, "rb") as file:
            written = file.read()
        # Functions of Python, the innermost last, without those of the package, and each place once.
        assert written.count(b":recordings_have_contexts") == 1 and b"_library.py" not in written
        record.start()
        record.dump(newest)
        assert record.stop() == (0, 0)
        assert os.path.getsize(newest) > 64
    assert _library.LIBRARY.cualloc_set_context(0) == 0, "the thread is in none again"


def the_package_describes_itself():
    import importlib
    import importlib.metadata

    import cualloc
    from cualloc import _library

    about = importlib.metadata.metadata("cualloc")
    assert cualloc.__version__ == about["Version"]
    assert os.path.exists(os.path.join(os.path.dirname(cualloc.__file__), "py.typed"))
    assert about["Author"] and about["Keywords"] and about.get_all("Classifier")
    urls = dict(url.split(", ") for url in about.get_all("Project-URL"))
    assert {"Repository", "Documentation", "Issues"} <= urls.keys(), urls
    for module, product in (("torch", "PyTorch"), ("cupy", "CuPy"), ("rmm", "RMM"), ("vllm", "vLLM")):
        sys.modules[module] = None
        words = f"cualloc.{module} requires {product}, which is not installed"
        error = raises(ImportError, words, importlib.import_module, f"cualloc.{module}")
        assert error.name == module
    # An import that fails inside of the library is not taken for a missing library.
    inner = ModuleNotFoundError("No module named 'numpy'", name="numpy")
    assert _library.not_installed(inner, "torch", "PyTorch") is inner
    _library.PATH = "/no/such/libcualloc.so"
    raises(ImportError, "cannot load the C library", _library._load)


def it_ends_beside_threads_at_samples():
    import importlib
    import cualloc.record as record
    from cualloc import _library

    driver()
    record.start(stacks=4096)
    importlib.reload(record)
    begun = [threading.Event() for _ in range(3)]

    def work(event):
        while True:
            for _ in range(50):
                address = _library.allocate(0, 100_000, None)
                _library.checked(_library.LIBRARY.cualloc_free(_library.allocator(0), address))
            event.set()

    for event in begun:
        threading.Thread(target=work, args=(event,), daemon=True).start()
    for event in begun:
        assert event.wait(60)


def cases(names, helpers):
    """The functions without arguments of a file, by its global names, but for those that help others."""
    own = (one for one in names.values() if getattr(one, "__module__", None) == names["__name__"] and hasattr(one, "__code__"))
    return {one.__name__: one for one in own if not one.__code__.co_argcount and one.__name__ not in helpers}


def own_cases():
    return cases(globals(), {"driver", "graphs", "installed", "snippets", "own_cases"})


def run_case(test, file, name):
    """Runs a case of a file in a process of its own."""
    environment = dict(os.environ, CUALLOC_SIM_DEVICES="2")
    environment.pop("CUALLOC_CONFIG", None)
    paths = [os.path.join(HERE, "stub"), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    command = [sys.executable, "-B", "-X", "faulthandler", os.path.abspath(file), name]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    if ended.stdout.startswith("SKIPPED"):
        test.skipTest(ended.stdout)
    test.assertEqual((ended.returncode, ended.stdout), (0, ""), ended.stderr)
    quiet = [line for line in ended.stderr.splitlines() if "RuntimeWarning" not in line and "install(" not in line]
    test.assertEqual(quiet, [])


def add_tests(to, found, file):
    """Adds a test for each case to a class."""
    for name in found:
        setattr(to, f"test_{name}", lambda self, name=name: run_case(self, file, name))


class Package(unittest.TestCase):
    pass


add_tests(Package, own_cases(), __file__)


def snippets():
    """The programs of the documents, by file."""
    folder = os.path.join(HERE, "..", "..", "docs", "clients")
    for name in sorted(os.listdir(folder)):
        with open(os.path.join(folder, name), encoding="utf-8") as file:
            for text in re.findall(r"^```python\n(.*?)^```$", file.read(), re.M | re.S):
                yield name, text


class Documents(unittest.TestCase):
    def test_programs_of_the_documents_name_what_there_is(self):
        found = list(snippets())
        self.assertEqual({name for name, _ in found}, {"cupy.md", "jax.md", "python.md", "pytorch.md", "rmm.md"})
        for name, text in found:
            compile(text, name, "exec")
            for module, function in re.findall(r"cualloc\.([a-z]\w*)\.(\w+)\(", text):
                path = os.path.join(HERE, "..", "cualloc", f"{module}.py")
                with open(path, encoding="utf-8") as source:
                    self.assertIn(f"\ndef {function}(", source.read(), name)


if __name__ == "__main__":
    own_cases()[sys.argv[1]]()
