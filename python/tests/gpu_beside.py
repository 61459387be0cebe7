"""Captures of others, and other processes, beside programs that allocate, on a GPU: gpu_beside.py CASE. Ends with `well`,
and exit code 0."""

import ctypes
import os
import subprocess
import sys
import threading
import traceback

from gpu_edges import chosen, installed, runtime


def captures():
    """Captures of others in each mode beside threads that allocate, and one that empties the cache: none is spoilt."""
    torch, ours = installed()
    cuda = runtime()
    kept = torch.zeros(1 << 20, device="cuda")
    ended, wrong, rounds = threading.Event(), [], [0]

    def guarded(work):
        try:
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                number = 0
                while not ended.is_set():
                    work(number)
                    number += 1
        except BaseException as error:
            wrong.append(error)

    def allocate(number):
        blocks = [torch.empty(((number * 7919 + other * 104729) % 3_000_000) + 1, device="cuda") for other in range(8)]
        del blocks

    def empty(number):
        torch.cuda.empty_cache()
        rounds[0] += 1

    crowd = [threading.Thread(target=guarded, args=(work,)) for work in [allocate] * 8 + [empty]]
    [thread.start() for thread in crowd]
    handle, graph = ctypes.c_void_p(), ctypes.c_void_p()
    assert cuda.cudaStreamCreateWithFlags(ctypes.byref(handle), 1) == 0
    number = 0
    # At least a thousand of both.
    while not wrong and (number < 1000 or rounds[0] < 1000):
        codes = [cuda.cudaStreamBeginCapture(handle, number % 3)]
        for _ in range(3):
            codes.append(cuda.cudaMemsetAsync(ctypes.c_void_p(kept.data_ptr()), 0, ctypes.c_size_t(4 << 20), handle))
        codes.append(cuda.cudaStreamEndCapture(handle, ctypes.byref(graph)))
        if any(codes) or not graph.value:
            wrong.append((number, codes))
            break
        assert cuda.cudaGraphDestroy(graph) == 0
        number += 1
    ended.set()
    [thread.join() for thread in crowd]
    assert not wrong, wrong[:3]
    print(f"{number} captures, {rounds[0]} times emptied")
    torch.cuda.synchronize()
    ours.check()


def first_capture(number):
    """One capture, the first of this process, beside eight threads that allocate."""
    torch, ours = installed()
    cuda, kept = runtime(), torch.zeros(1 << 20, device="cuda")
    ended, begun = threading.Event(), threading.Barrier(9)

    def work():
        with torch.cuda.stream(torch.cuda.Stream()):
            begun.wait()
            while not ended.is_set():
                blocks = [torch.empty(3000 << size, device="cuda") for size in range(10)]
                del blocks

    crowd = [threading.Thread(target=work) for _ in range(8)]
    [thread.start() for thread in crowd]
    handle, graph = ctypes.c_void_p(), ctypes.c_void_p()
    assert cuda.cudaStreamCreateWithFlags(ctypes.byref(handle), 1) == 0
    begun.wait()
    codes = [cuda.cudaStreamBeginCapture(handle, number % 3)]
    for _ in range(20):
        codes.append(cuda.cudaMemsetAsync(ctypes.c_void_p(kept.data_ptr()), 0, ctypes.c_size_t(4096), handle))
    codes.append(cuda.cudaStreamEndCapture(handle, ctypes.byref(graph)))
    ended.set()
    [thread.join() for thread in crowd]
    assert not any(codes) and graph.value, codes
    ours.check()


def first_captures():
    """As many processes as there are first captures: forked from one that has loaded PyTorch and not begun CUDA."""
    import torch

    import cualloc.torch

    assert not torch.cuda.is_initialized() and not cualloc.torch.installed()
    count, running, wrong = int(os.environ.get("CUALLOC_FIRST_CAPTURES", "1000")), {}, []

    def ends():
        process, status = os.wait()
        number = running.pop(process)
        if status != 0:
            wrong.append((number, status))

    for number in range(count):
        if len(running) == 12:
            ends()
        process = os.fork()
        if process == 0:
            code = 1
            try:
                first_capture(number)
                code = 0
            except BaseException:
                traceback.print_exc()
                sys.stderr.flush()
            finally:
                os._exit(code)
        running[process] = number
    while running:
        ends()
    assert not wrong, wrong
    print(f"{count} first captures")


def two_processes():
    """A second process whose limit is above what the first has left: both go on, or hear what lacks."""
    torch, ours = installed()
    total = torch.cuda.get_device_properties(0).total_memory
    kept = torch.empty(int(total * 0.6), dtype=torch.int8, device="cuda")
    program = """
import torch, cualloc.torch
cualloc.torch.install(limit=0.9)
blocks = []
try:
    while True:
        blocks.append(torch.full((1 << 27,), float(len(blocks)), device="cuda"))
except torch.OutOfMemoryError as error:
    said = str(error)
assert len(blocks) > 10 and all(float(block[-1]) == number for number, block in enumerate(blocks)), len(blocks)
assert "thers hold" in said, said
del blocks[::2]
more = torch.full((1 << 27,), 7.0, device="cuda")
assert float(more.sum()) == 7.0 * (1 << 27)
cualloc.torch.check()
print("well")
"""
    second = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=110)
    assert second.returncode == 0 and second.stdout.strip() == "well", second.stderr
    kept[-1] = 1
    assert int(kept[-1]) == 1
    ours.check()


if __name__ == "__main__":
    chosen([captures, first_captures, two_processes])
