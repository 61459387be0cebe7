"""Tensors sent to another process on a GPU: gpu_share.py [NAME]...

Prints one line of JSON for each case. Without names it runs all cases; --list names them."""

import ctypes
import json
import os
import signal
import sys
import time
import traceback

import torch
import torch.multiprocessing as multiprocessing

import cualloc.torch as ours
from cualloc import _library

ours.install()

MIB = 1 << 20
SENDS = 2000


def receive(tensors, answers):
    """The other process: checks each tensor, changes it, and answers. None ends it."""
    kept = []
    for case, tensor, value, keep in iter(tensors.get, None):
        seen = bool((tensor == value).all())
        tensor.add_(1)
        torch.cuda.synchronize()
        answers.put((case, seen, tensor.data_ptr()))
        if keep:
            kept.append(tensor)
        del tensor
    answers.put(("end", len(kept), 0))


class Other:
    """A process that receives tensors."""

    def __init__(self):
        context = multiprocessing.get_context("spawn")
        self.tensors, self.answers = context.Queue(), context.Queue()
        self.process = context.Process(target=receive, args=(self.tensors, self.answers), daemon=True)
        self.process.start()

    def send(self, case, tensor, value, keep=False):
        torch.cuda.synchronize()
        self.tensors.put((case, tensor, value, keep))

    def answer(self):
        return self.answers.get(timeout=120)

    def end(self):
        self.tensors.put(None)
        assert self.answer()[0] == "end"
        self.process.join(60)
        assert self.process.exitcode == 0, self.process.exitcode

    def kill(self):
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join(60)
        # No process reads the rest of the queue, so this one must not wait for that when it exits.
        self.tensors.cancel_join_thread()


def returned(before):
    """Waits until the sender has its memory back, and verifies its statistics."""
    until = time.monotonic() + 60
    while True:
        torch.cuda.ipc_collect()
        torch.cuda.empty_cache()
        left = torch.cuda.memory_allocated() - before
        if left == 0:
            break
        assert time.monotonic() < until, f"{left} bytes are still allocated"
        time.sleep(0.01)
    ours.check()


def exchange(tensors):
    """Sends tensors of which each has one value; the other process adds one."""
    other = Other()
    for case, (tensor, value) in enumerate(tensors):
        other.send(case, tensor, value)
    for case, (tensor, value) in enumerate(tensors):
        answered = other.answer()
        assert answered[:2] == (case, True), answered
        assert bool((tensor == value + 1).all()), f"tensor {case} was not changed here"
    return other


def plain():
    sizes = [1, 1000, 70_000, 3 * MIB, 60 * MIB]
    tensors = [(torch.full((size,), float(at), device="cuda"), float(at)) for at, size in enumerate(sizes)]
    exchange(tensors).end()
    return {"tensors": len(tensors)}


def slices():
    whole = torch.zeros(64, MIB, device="cuda")
    parts = [whole[at] for at in range(0, 64, 7)] + [whole[1:60:14, 5:100]]
    for at, part in enumerate(parts):
        part.fill_(float(at))
    # The last one overlaps none of the others.
    exchange([(part, float(at)) for at, part in enumerate(parts)]).end()
    return {"tensors": len(parts)}


def small():
    tensors = [torch.full((64,), float(at), device="cuda") for at in range(1000)]
    exchange([(tensor, float(at)) for at, tensor in enumerate(tensors)]).end()
    return {"tensors": len(tensors)}


def mem_pool():
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        tensors = [(torch.full((size,), 3.0, device="cuda"), 3.0) for size in (100, 5 * MIB, 20 * MIB)]
    exchange(tensors).end()
    del tensors, pool
    return {"tensors": 3}


def again():
    """One tensor sent many times is one mapping, and the last time costs what the first does."""
    tensor, other = torch.zeros(3 * MIB, device="cuda"), Other()
    addresses, times = set(), []
    for case in range(SENDS):
        begun = time.perf_counter()
        other.send(case, tensor, float(case), keep=True)
        answered = other.answer()
        times.append(time.perf_counter() - begun)
        assert answered[:2] == (case, True), answered
        addresses.add(answered[2])
    assert len(addresses) == 1, addresses
    other.end()
    early, late = (sorted(part)[len(part) // 2] * 1e6 for part in (times[100:300], times[-200:]))
    return {"sends": SENDS, "us_early": round(early), "us_late": round(late)}


def killed():
    """The other process is killed half way. PyTorch keeps what it sent to it for good, but the allocator is in order."""
    tensors, other = [torch.full((MIB // 2,), 1.0, device="cuda") for _ in range(400)], Other()
    for case, tensor in enumerate(tensors):
        other.send(case, tensor, 1.0, keep=True)
    for _ in range(len(tensors) // 2):
        other.answer()
    other.kill()
    ours.check()
    assert all(bool((tensor == 2).all()) for tensor in tensors[: len(tensors) // 2])
    exchange([(torch.full((MIB,), 5.0, device="cuda"), 5.0)]).end()
    return {"tensors": len(tensors)}


def call(name, *arguments):
    _library.checked(getattr(_library.LIBRARY, name)(*arguments))


def open_tokens(tokens, answers):
    """Another process, which opens tokens of the C library until it is killed."""
    handle = ctypes.c_void_p(_library.allocator(0))
    for token in iter(tokens.get, None):
        opened, address, size = ctypes.c_void_p(), ctypes.c_uint64(), ctypes.c_uint64()
        outputs = [ctypes.byref(value) for value in (opened, address, size)]
        call("cualloc_share_open", handle, ctypes.c_char_p(token), *outputs)
        answers.put(size.value)


def tokens():
    """Memory that was freed while another process used it returns when that is killed."""
    context = multiprocessing.get_context("spawn")
    names, answers = context.Queue(), context.Queue()
    process = context.Process(target=open_tokens, args=(names, answers), daemon=True)
    process.start()
    torch.cuda.empty_cache()
    reserved, handle = torch.cuda.memory_reserved(), ctypes.c_void_p(_library.allocator(0))
    tensors = [torch.zeros(64 * MIB, dtype=torch.uint8, device="cuda") for _ in range(8)]
    torch.cuda.synchronize()
    for tensor in tensors:
        token = ctypes.create_string_buffer(256)
        call("cualloc_share", handle, ctypes.c_uint64(tensor.data_ptr()), 0, token, ctypes.c_size_t(256), None, None)
        names.put(token.value)
        assert answers.get(timeout=120) == 64 * MIB
    del tensors, tensor
    torch.cuda.empty_cache()
    held = torch.cuda.memory_reserved() - reserved
    assert held >= 8 * 64 * MIB, f"only {held} bytes are kept for the other process"
    os.kill(process.pid, signal.SIGKILL)
    process.join(60)
    until = time.monotonic() + 60
    while torch.cuda.memory_reserved() > reserved:
        assert time.monotonic() < until, f"{torch.cuda.memory_reserved() - reserved} bytes have not returned"
        time.sleep(0.01)
        torch.cuda.empty_cache()
    return {"held_MiB": held >> 20}


CASES = [plain, slices, small, mem_pool, again, tokens, killed]


def main():
    if sys.argv[1:] == ["--list"]:
        print(*(case.__name__ for case in CASES), sep="\n")
        return
    failed = 0
    for case in CASES:
        if sys.argv[1:] and case.__name__ not in sys.argv[1:]:
            continue
        row = {"work": case.__name__}
        try:
            before = torch.cuda.memory_allocated()
            row |= case()
            if case is not killed:
                returned(before)
        except Exception as error:
            traceback.print_exc()
            row["error"] = f"{type(error).__name__}: {error}"
            failed += 1
        print(json.dumps(row), flush=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
