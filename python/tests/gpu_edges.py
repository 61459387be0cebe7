"""What goes wrong on purpose, on a GPU: gpu_edges.py CASE. Ends with `well`, and exit code 0."""

import ctypes
import gc
import multiprocessing
import os
import subprocess
import sys
import tempfile
import threading
import warnings


def installed(**settings):
    import torch

    import cualloc.torch

    cualloc.torch.install(**settings)
    return torch, cualloc.torch


def gpus():
    import torch

    return torch.cuda.device_count()


def runtime():
    """The CUDA runtime that PyTorch has loaded."""
    import glob

    with open("/proc/self/maps") as maps:
        paths = {line.split()[-1] for line in maps if "libcudart.so" in line}
    found = sorted(paths) or glob.glob("/usr/local/cuda*/lib64/libcudart.so*")
    return ctypes.CDLL(found[0])


def out_of_memory():
    torch, ours = installed(limit="2G")
    caught = 0
    kept = [torch.zeros(64 << 20, device="cuda") for _ in range(4)]
    for number in range(100):
        try:
            torch.empty((3 + number % 5) << 30, dtype=torch.int8, device="cuda")
        except torch.OutOfMemoryError as error:
            assert "CUDA out of memory. Tried to allocate" in str(error), error
            caught += 1
        # The program goes on.
        assert float((kept[number % 4] + 1).sum()) == 64 << 20
    assert caught == 100, caught
    assert ours.capabilities()["out_of_memory"] == "torch.OutOfMemoryError"
    assert torch.cuda.memory_stats()["num_ooms"] == 100
    for bytes, words in [(8000000000 << 30, "more than 1EB"), (800000000 << 30, "800000000.00 GiB")]:
        try:
            torch.empty(bytes, dtype=torch.int8, device="cuda")
            raise AssertionError("that much memory is nowhere")
        except torch.OutOfMemoryError as error:
            assert words in str(error), error
    del kept
    torch.cuda.empty_cache()
    half = torch.empty(1 << 30, dtype=torch.int8, device="cuda")
    assert torch.cuda.memory_allocated() == 1 << 30
    del half
    ours.check()


def external_stream():
    torch, ours = installed()
    cuda = runtime()
    for _ in range(3):
        handle = ctypes.c_void_p()
        torch.zeros(1, device="cuda")
        assert cuda.cudaStreamCreateWithFlags(ctypes.byref(handle), 1) == 0
        stream = torch.cuda.ExternalStream(handle.value)
        with torch.cuda.stream(stream):
            tensors = [torch.full((1 << 20,), float(i), device="cuda") for i in range(32)]
            assert [float(t[0]) for t in tensors] == list(range(32))
        del tensors
        stream.synchronize()
        assert cuda.cudaStreamDestroy(handle) == 0
        del stream
        kept = []
        for number in range(10_000):
            tensor = torch.empty(((number * 7919) % 4096 + 1) * 256, device="cuda")
            tensor[0] = number
            kept.append((tensor, number))
            if len(kept) > 64:
                tensor, value = kept.pop((number * 31) % 64)
                assert number % 100 or float(tensor[0]) == value
        del kept, tensor
    torch.cuda.synchronize()
    ours.check()


def retired_stream():
    """Tensors that are freed after their stream is gone."""
    torch, ours = installed()
    cuda, handle = runtime(), ctypes.c_void_p()
    torch.zeros(1, device="cuda")
    assert cuda.cudaStreamCreateWithFlags(ctypes.byref(handle), 1) == 0
    stream = torch.cuda.ExternalStream(handle.value)
    with torch.cuda.stream(stream):
        tensors = [torch.full((1 << 20,), float(i), device="cuda") for i in range(32)]
    stream.synchronize()
    ours.retire_stream(stream)
    assert cuda.cudaStreamDestroy(handle) == 0
    del tensors
    for _ in range(1000):
        torch.empty(1 << 20, device="cuda").zero_()
    torch.cuda.synchronize()
    ours.check()


def forgotten_stream():
    """The same without a retirement of the stream."""
    torch, ours = installed()
    cuda, handle = runtime(), ctypes.c_void_p()
    torch.zeros(1, device="cuda")
    for turn in range(20):
        assert cuda.cudaStreamCreateWithFlags(ctypes.byref(handle), 1) == 0
        stream = torch.cuda.ExternalStream(handle.value)
        with torch.cuda.stream(stream):
            tensors = [torch.full((1 << number,), float(turn), device="cuda") for number in range(24)]
            total = sum(float(tensor[-1]) for tensor in tensors)
        assert total == 24 * turn
        assert cuda.cudaStreamDestroy(handle) == 0
        del stream, tensors
        for number in range(500):
            x = torch.full((1 << (number % 23),), 1.0, device="cuda")
            assert number % 50 or float(x[-1]) == 1
            del x
    torch.cuda.synchronize()
    ours.check()


def record_stream():
    """A block is not used anew while a recorded stream works on it, and is afterwards."""
    torch, ours = installed()
    side = torch.cuda.Stream()
    for _ in range(100):
        x = torch.randn(40 << 20, device="cuda")
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(1_000_000)
            y = x * 2
        x.record_stream(side)
        address = x.data_ptr()
        expected = x[123].item() * 2
        del x
        z = torch.zeros(40 << 20, device="cuda")
        torch.cuda.current_stream().wait_stream(side)
        assert y[123].item() == expected
        del y, z
    assert address
    # Never more than a few at once: what waits is waited for.
    assert torch.cuda.max_memory_reserved() < 100 * (160 << 20) // 8
    ours.check()


def statistics():
    torch, ours = installed(limit=0.5)
    import cualloc

    total = torch.cuda.get_device_properties(0).total_memory
    assert abs(torch.cuda.get_per_process_memory_fraction() - 0.5) < 0.01
    torch.cuda.set_per_process_memory_fraction(0.25)
    assert abs(torch.cuda.get_per_process_memory_fraction() - 0.25) < 0.001
    try:
        torch.empty(int(total * 0.3), dtype=torch.int8, device="cuda")
        raise AssertionError("more than the fraction")
    except torch.OutOfMemoryError:
        pass
    torch.cuda.set_per_process_memory_fraction(1.0)
    before = torch.cuda.memory_allocated()
    x = torch.empty(1000, dtype=torch.int8, device="cuda")
    y = torch.empty(30 << 20, dtype=torch.int8, device="cuda")
    assert torch.cuda.memory_allocated() - before == 1024 + (30 << 20)
    del x, y
    assert torch.cuda.memory_allocated() == before
    assert torch.cuda.max_memory_allocated() >= before + (30 << 20)
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.max_memory_allocated() == before
    torch.cuda.reset_accumulated_memory_stats()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == 0
    assert "PyTorch CUDA memory summary" in torch.cuda.memory_summary()
    assert torch.accelerator.memory_allocated() == before
    assert torch.accelerator.memory_stats()["reserved_bytes.all.current"] == torch.cuda.memory_reserved()
    assert torch.cuda.mem_get_info()[1] > 0
    assert "held from the driver" in ours.summary() and ours.stats()["blocks"]["total"] > 0
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= before + (2 << 20)
    released, pending = ours.trim()
    assert released >= 0 and pending >= 0
    ours.install()
    ours.install(limit=0.5)
    try:
        ours.install(limit="1G")
        raise AssertionError("other settings")
    except RuntimeError as error:
        assert "other settings" in str(error)
    assert issubclass(cualloc.OutOfMemory, RuntimeError)


def sleep_and_wake():
    """Rounds of both of vLLM's levels: tensors, and graphs that were captured, give what they gave before."""
    torch, ours = installed()
    x, words = torch.randn(256, 4096, device="cuda"), torch.zeros(1 << 20, device="cuda")
    # Workspaces of libraries come first, without a tag.
    torch.mm(x, x.t())
    with ours.tag("weights"):
        layers = [torch.nn.Linear(4096, 4096) for _ in range(4)]
        model = torch.nn.Sequential(*layers).cuda().eval().requires_grad_(False)
    with ours.tag("cache"):
        cache = torch.zeros(256 << 20, dtype=torch.uint8, device="cuda")
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(side):
        model(x)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=side):
        y = model(x)
        words.copy_(cache[: 1 << 20])
    graph.replay()
    expected, eager = y.clone(), model(x)
    addresses = [weight.data_ptr() for weight in (*model.parameters(), cache)]
    tagged = sum(weight.nbytes for weight in (*model.parameters(), cache))
    kept = {name: weight.cpu() for name, weight in model.state_dict().items()}
    captured_with = ours.graph_pool(graph.pool())["physical"]

    def right(turn):
        cache.fill_(turn)
        graph.replay()
        assert torch.equal(y, expected) and torch.equal(model(x), eager), turn
        assert float(words.min()) == float(words.max()) == turn
        assert [weight.data_ptr() for weight in (*model.parameters(), cache)] == addresses

    for turn in range(20):
        y.zero_()
        assert ours.sleep(keep="weights", pinned=turn % 4 != 3) >= tagged
        assert ours.stats()["graph_pools"] == captured_with
        # Meanwhile the memory is used otherwise.
        filler = [torch.full((64 << 20,), -1.0, device="cuda") for _ in range(2)]
        assert all(float(one.max()) == -1.0 for one in filler)
        del filler
        assert ours.wake("weights") > 0 and torch.equal(model(x), eager)
        assert ours.wake("cache") > 0 and ours.wake() == 0
        right(turn + 1)
        y.zero_()
        assert ours.sleep() >= tagged and ours.sleep() <= 4 << 20 and ours.wake() >= tagged
        model.load_state_dict(kept)
        right(turn + 100)
    assert ours.sleep("cache", keep=True) > 0 and ours.wake() > 0
    assert int(cache.min()) == int(cache.max()) == 119
    ours.check()


def pools_are_emptied():
    """Free memory of a MemPool returns to the driver, and snapshots list the bytes of its views once."""
    torch, ours = installed()
    if not ours.capabilities()["mem_pool"]:
        return print("SKIPPED: there is no subclass")
    pool, mib = torch.cuda.MemPool(), 1 << 20
    with torch.cuda.use_mem_pool(pool):
        blocks = [torch.full((16 * mib,), float(number), device="cuda") for number in range(6)]
        del blocks[1], blocks[2]
        blocks.append(torch.full((32 * mib,), 9.0, device="cuda"))
    held = ours.graph_pool(pool)["physical"]
    of_pool, everything = pool.snapshot(), torch.cuda.memory_snapshot()
    assert sum(segment["total_size"] for segment in of_pool) == held
    assert sum(one["total_size"] for one in everything) == torch.cuda.memory_reserved()
    listed = [one for segment in of_pool for one in segment["blocks"]]
    live = {one["address"]: one["size"] for one in listed if one["state"] == "active_allocated"}
    assert live == {block.data_ptr(): block.nbytes for block in blocks}
    del blocks[0], blocks[-1]
    released, _ = ours.trim(pool=pool)
    assert released >= 3 * 64 * mib and ours.graph_pool(pool)["physical"] == held - released
    assert [float(one.min()) for one in blocks] == [float(one.max()) for one in blocks] == [2.0, 4.0, 5.0]
    ours.check()


def snapshots():
    """What PyTorch's functions for its viewer say, and that the viewer's own tool reads it."""
    torch, ours = installed()
    import pickle

    from torch.cuda import _memory_viz

    kept = torch.zeros(5 << 20, dtype=torch.int8, device="cuda")
    torch.cuda.memory._record_memory_history()
    more = torch.zeros(7 << 20, dtype=torch.int8, device="cuda")
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "snapshot.pickle")
        torch.cuda.memory._dump_snapshot(path)
        with open(path, "rb") as file:
            made = pickle.load(file)
    torch.cuda.memory._record_memory_history(None)
    blocks = {block["address"]: block for segment in made["segments"] for block in segment["blocks"]}
    for tensor in (kept, more):
        assert blocks[tensor.data_ptr()]["requested_size"] == tensor.nbytes
    assert any("snapshots" in frame["name"] for frame in blocks[more.data_ptr()]["frames"])
    assert _memory_viz.segsum(made) and _memory_viz.trace_plot(made)
    assert sum(block["state"] == "active_allocated" for block in blocks.values()) == ours.stats()["blocks"]["current"]
    assert len(torch.cuda.memory_snapshot()) > 0
    ours.check()


def trials_of_cudnn():
    """Under the pluggable interface a program that turns them on runs without them."""
    torch, ours = installed(subclass=False)
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 64, 3), torch.nn.ReLU(), torch.nn.Conv2d(64, 8, 5)).cuda()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        torch.backends.cudnn.benchmark = True
        for size in (32, 64, 96):
            with torch.backends.cudnn.flags(enabled=True, benchmark=True):
                y = model(torch.ones(4, 3, size, size, device="cuda"))
            model.zero_grad()
            y.sum().backward()
            assert all(bool(weight.grad.isfinite().all()) for weight in model.parameters())
    assert any("cuDNN's own choice" in str(one.message) for one in said)
    ours.check()


def late():
    import torch

    import cualloc.torch

    torch.zeros(1, device="cuda")
    try:
        cualloc.torch.install()
        raise AssertionError("too late")
    except RuntimeError as error:
        assert "before" in str(error), error
    assert torch.cuda.get_allocator_backend() == "native"


def mem_pool():
    import torch

    import cualloc.torch

    pool = cualloc.torch.mem_pool()
    with torch.cuda.use_mem_pool(pool):
        x = torch.full((30 << 20,), 3.0, device="cuda")
    held = cualloc.torch.stats()["reserved"]["current"]
    assert held >= 30 << 20, held
    assert float(x.sum()) == 3.0 * (30 << 20)
    del x
    gc.collect()
    del pool
    torch.cuda.empty_cache()
    assert cualloc.torch.stats()["blocks"]["current"] == 0


class Numbers:
    def __len__(self):
        return 64

    def __getitem__(self, at):
        import torch

        return torch.full((1000,), float(at))


def workers():
    """Forked workers of a DataLoader, page-locked memory, saving and loading."""
    torch, ours = installed()
    kept = torch.arange(1000, device="cuda")
    loader = torch.utils.data.DataLoader(
        Numbers(), batch_size=8, num_workers=2, pin_memory=True, multiprocessing_context="fork"
    )
    assert sum(float(batch.cuda(non_blocking=True)[:, 0].sum()) for batch in loader) == sum(range(64))

    def child(queue):
        # What was inherited is left alone, and CUDA is refused.
        try:
            torch.zeros(1, device="cuda")
            queue.put("worked")
        except RuntimeError as error:
            queue.put(str(error))

    fork = multiprocessing.get_context("fork")
    queue = fork.Queue()
    process = fork.Process(target=child, args=(queue,))
    process.start()
    assert "forked" in queue.get(timeout=60)
    process.join()
    assert process.exitcode == 0, process.exitcode
    with tempfile.TemporaryFile() as file:
        torch.save({"kept": kept}, file)
        file.seek(0)
        assert torch.equal(torch.load(file)["kept"], kept)
    ours.check()


def threads():
    torch, ours = installed()
    wrong = []

    def work(number):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for turn in range(300):
                value = float(number * 1000 + turn)
                x = torch.full(((turn * 7919) % 100_000 + 1,), value, device="cuda")
                y = x + 1
                if turn % 10 == 0 and float(y[-1]) != value + 1:
                    wrong.append((number, turn))
        stream.synchronize()

    crowd = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    [thread.start() for thread in crowd]
    [thread.join() for thread in crowd]
    assert not wrong, wrong
    ours.check()


def exit_with_tensors():
    """A process that ends with live tensors of several streams and threads says nothing and ends well."""
    program = """
import threading, torch, cualloc.torch
cualloc.torch.install()
stream = torch.cuda.Stream()
kept = [torch.zeros(1 << 20, device="cuda") for _ in range(20)]
with torch.cuda.stream(stream):
    kept += [torch.zeros(1 << 20, device="cuda") for _ in range(20)]
def work():
    with torch.cuda.stream(torch.cuda.Stream()):
        kept.extend(torch.zeros(1 << number, device="cuda") for number in range(20))
threads = [threading.Thread(target=work) for _ in range(4)]
[thread.start() for thread in threads]
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100)
    assert ended.returncode == 0 and not ended.stdout and not ended.stderr, (ended.returncode, ended.stderr)


def second_device():
    torch, ours = installed(config="peers=0+1" if gpus() > 1 else None)
    if torch.cuda.device_count() < 2:
        return print("SKIPPED: one GPU")
    x = torch.full((1 << 20,), 2.0, device="cuda:1")
    assert float(x.sum()) == 2.0 * (1 << 20)
    y = x.to("cuda:0")
    del x
    assert float(y.sum()) == 2.0 * (1 << 20)
    assert float(y.to("cuda:1").sum()) == 2.0 * (1 << 20)
    assert torch.cuda.memory_allocated(1) >= 0 and ours.stats(1)["blocks"]["total"] > 0
    ours.check(0)
    ours.check(1)


def fallback():
    """A PyTorch whose error cannot be thrown: a RuntimeError, said once."""
    import torch

    import cualloc.torch

    cualloc.torch._ERROR = cualloc.torch._OLD_ERROR = "no such constructor"
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        cualloc.torch.install(limit="1G", subclass=False)
        assert sum("RuntimeError" in str(warning.message) for warning in said) == 1
    for _ in range(10):
        try:
            torch.empty(4 << 30, dtype=torch.int8, device="cuda")
            raise AssertionError("more than the limit")
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            assert "out of memory" in str(error), error
    assert cualloc.torch.capabilities()["out_of_memory"] == "RuntimeError"


def cupy():
    import cupy

    import cualloc
    import cualloc.cupy

    cualloc.cupy.install(limit="4G")
    from cualloc import _library

    x = cupy.arange(1 << 20, dtype=cupy.float32)
    assert float(x[-1]) == (1 << 20) - 1
    assert _library.stats(0).allocated.current >= 4 << 20
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(4)]
    for turn in range(200):
        first, second = streams[turn % 4], streams[(turn + 1 + turn // 4 % 3) % 4]
        with first:
            a = cupy.full(((turn * 7919) % 500_000 + 1,), turn, dtype=cupy.float32)
        event = first.record()
        second.wait_event(event)
        with second:
            b = a + 1
        cualloc.cupy.record_stream(a, second)
        del a
        with first:
            c = cupy.zeros(500_000, dtype=cupy.float32)
        second.synchronize()
        assert float(b[-1]) == turn + 1
        del b, c
    for _ in range(20):
        try:
            cupy.empty(8 << 30, dtype=cupy.int8)
            raise AssertionError("more than the limit")
        except cupy.cuda.memory.OutOfMemoryError:
            pass
    a = cupy.random.rand(500, 500)
    assert abs(float((a @ cupy.linalg.inv(a)).trace()) - 500) < 1e-3
    del a, x
    gc.collect()
    _library.check(0)
    assert cupy.empty(0).size == 0


def jax():
    """Tensors of PyTorch as arrays of JAX, and back, without a copy."""
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    torch, ours = installed()
    import jax

    # Of several GPUs it leaves another one current when it starts.
    jax.devices()
    torch.cuda.set_device(0)
    x = torch.arange(1 << 20, dtype=torch.float32, device="cuda")
    y = jax.dlpack.from_dlpack(x)
    assert y.unsafe_buffer_pointer() == x.data_ptr()
    assert float((y * 2).sum()) == float((x * 2).sum())
    back = torch.from_dlpack(y + 1)
    assert float(back[10]) == 11
    address = x.data_ptr()
    del x, y
    gc.collect()
    assert address
    ours.check()


def rmm():
    import cualloc.rmm
    import rmm as library

    cualloc.rmm.install(limit="2G")
    stream = library.pylibrmm.stream.Stream()
    kept = [library.DeviceBuffer(size=1000 * number, stream=stream) for number in range(100)]
    assert all(buffer.ptr for buffer in kept[1:])
    try:
        library.DeviceBuffer(size=4 << 30)
        raise AssertionError("more than the limit")
    except MemoryError:
        pass
    del kept
    gc.collect()


def documents():
    """The programs of the documents run to their end."""
    from test_package import snippets

    for name, text in snippets():
        ended = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=100)
        if "ModuleNotFoundError" in ended.stderr:
            print(f"SKIPPED: {name}: {ended.stderr.splitlines()[-1]}")
            continue
        assert ended.returncode == 0, (name, ended.stderr)


CASES = [
    *(out_of_memory, external_stream, retired_stream, forgotten_stream, record_stream, statistics, sleep_and_wake, late),
    *(snapshots, trials_of_cudnn, mem_pool, workers, threads, exit_with_tensors, second_device, fallback),
    *(pools_are_emptied, cupy, jax, rmm, documents),
]


def chosen(cases):
    """Runs the one that the command names, or prints their names."""
    if sys.argv[1] == "--list":
        print(*(case.__name__ for case in cases))
        return
    try:
        {case.__name__: case for case in cases}[sys.argv[1]]()
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "cualloc":
            raise
        print(f"SKIPPED: {error}")
    print("well")


if __name__ == "__main__":
    chosen(CASES)
