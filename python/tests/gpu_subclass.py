"""What PyTorch supports only with a subclass of its allocator class, on a GPU: gpu_subclass.py native|cualloc [NAME]...

Prints one line of JSON for each piece of work: what it computed, and the most that was reserved."""

import ctypes
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import traceback

import torch

import cualloc
import cualloc.torch as ours

MIB = 1 << 20


def hexed(values):
    return [float(value).hex() for value in values]


def sequential(width):
    layers = [torch.nn.Linear(width, width), torch.nn.GELU(), torch.nn.Linear(width, width)]
    return torch.nn.Sequential(*layers).cuda()


def train(compiled, model, batches, width):
    """Losses of training with batches of several sizes, and the time of a step once all sizes are captured."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses, begun = [], 0
    for step in range(40):
        if step == 20:
            torch.cuda.synchronize()
            begun = time.perf_counter()
        torch.manual_seed(step)
        data = torch.randn(batches[step % len(batches)], width, device="cuda")
        torch.compiler.cudagraph_mark_step_begin()
        loss = compiled(data).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
    torch.cuda.synchronize()
    return {"values": hexed(losses), "step_ms": (time.perf_counter() - begun) * 1000 / 20}


def trees_train(backend):
    torch.manual_seed(0)
    model = sequential(512)
    return train(torch.compile(model, **backend), model, [64, 256], 512)


def trees_paths(backend):
    """Several functions of one pool in changing orders, whose results live while others run: checkpoints are restored,
    also behind work in flight."""

    @functools.partial(torch.compile, **backend)
    def first(x):
        return x * 2 + 1, (x - 1).relu()

    @functools.partial(torch.compile, **backend)
    def second(x, y):
        return (x @ y).tanh()

    @functools.partial(torch.compile, **backend)
    def third(x):
        return torch.cat([x, x]).cumsum(0)

    sums = []
    with torch.no_grad():
        for step in range(24):
            torch.manual_seed(step)
            x = torch.randn(256, 256, device="cuda")
            torch.compiler.cudagraph_mark_step_begin()
            if step % 3 == 0:
                torch.cuda._sleep(20_000_000)
            a, b = first(x)
            if step % 2:
                c = second(a, b)
                d = third(c) if step % 4 == 1 else third(b)
            else:
                d = third(a)
                c = second(b, d[:256])
            sums.append((a.sum() + b.sum() * 2 + c.sum() * 3 + d.sum() * 5).item())
    return {"values": hexed(sums)}


def mem_pool(_):
    pool = torch.cuda.MemPool(use_on_oom=True)
    before = torch.cuda.memory_allocated()
    with torch.cuda.use_mem_pool(pool):
        inside = [torch.full((size * MIB // 4,), float(size), device="cuda") for size in (3, 20, 7)]
    outside = torch.ones(5 * MIB // 4, device="cuda")
    counted = pool.use_count()
    segments = pool.snapshot()
    live = sum(b["size"] for s in segments for b in s["blocks"] if b["state"] == "active_allocated")
    values = [t.sum().item() for t in (*inside, outside)]
    within = all(
        any(s["address"] <= t.data_ptr() < s["address"] + s["total_size"] for s in segments) for t in inside
    )
    free = inside.pop(1).data_ptr()
    with torch.cuda.use_mem_pool(pool):
        again = torch.empty(20 * MIB // 4, device="cuda")
    reused = again.data_ptr() == free
    del inside, again, outside
    del pool
    torch.cuda.empty_cache()
    return {"values": hexed(values), "uses": counted, "live": live, "within": within, "reused": reused,
            "left": torch.cuda.memory_allocated() - before}


PLAIN = """
#include <cuda_runtime_api.h>
#include <sys/types.h>
static int live;
extern "C" void *plain_alloc(ssize_t bytes, int, cudaStream_t) {
    void *memory = nullptr;
    live += cudaMalloc(&memory, bytes) == cudaSuccess;
    return memory;
}
extern "C" void plain_free(void *memory, ssize_t, int, cudaStream_t) { live -= cudaFree(memory) == cudaSuccess; }
extern "C" int plain_live() { return live; }
"""


def mem_pool_over_an_allocator(_):
    if not shutil.which("nvcc"):
        return {"values": [], "skipped": "there is no nvcc"}
    with tempfile.TemporaryDirectory() as folder:
        source, library = os.path.join(folder, "plain.cpp"), os.path.join(folder, "plain.so")
        with open(source, "w", encoding="utf-8") as file:
            file.write(PLAIN)
        command = ["nvcc", "-shared", "-Xcompiler", "-fPIC", "-cudart", "shared", source, "-o", library]
        subprocess.run(command, check=True)
        plain = ctypes.CDLL(library)
        allocator = torch.cuda.memory.CUDAPluggableAllocator(library, "plain_alloc", "plain_free")
    pool = torch.cuda.MemPool(allocator.allocator())
    with torch.cuda.use_mem_pool(pool):
        x, y = (torch.full((MIB,), float(n), device="cuda") for n in (2, 3))
    used = plain.plain_live() > 0
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool.id):
        z = x * y + 1
    graph.replay()
    values = [t.sum().item() for t in (x, y, z)]
    graph.reset()
    del x, y, z, graph
    del pool
    torch.cuda.empty_cache()
    return {"values": hexed(values), "used": used, "left": plain.plain_live()}


def out_of_memory(_):
    seen = []
    torch._C._cuda_attach_out_of_memory_observer(lambda device, size, total, free: seen.append(size))
    pool = torch.cuda.MemPool(use_on_oom=True)
    with torch.cuda.use_mem_pool(pool):
        spare = torch.empty(512 * MIB, dtype=torch.uint8, device="cuda")
    del spare
    torch.cuda.set_per_process_memory_fraction(0.05)
    kept, size = [], 256 * MIB
    try:
        while True:
            kept.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
    except torch.OutOfMemoryError as error:
        text = str(error).splitlines()[0]
    torch.cuda.set_per_process_memory_fraction(1.0)
    held = sum(t.numel() for t in kept)
    del kept, pool
    works = torch.ones(1024, device="cuda").sum().item()
    return {"observed": seen == [size], "text": text[:60], "held_share": round(held / torch.cuda.mem_get_info()[1], 3),
            "values": hexed([works])}


def benchmark(_):
    torch.manual_seed(0)
    layer = torch.nn.Conv2d(16, 32, 3, padding=1).cuda()
    data = torch.randn(8, 16, 64, 64, device="cuda")
    expected = layer(data)
    torch.backends.cudnn.benchmark = True
    close = [torch.allclose(layer(data), expected, atol=1e-2) for _ in range(3)]
    return {"values": [], "close": close, "on": torch.backends.cudnn.benchmark}


def figures(_):
    x = torch.empty(10 * MIB, dtype=torch.uint8, device="cuda")
    stats = torch.cuda.memory_stats()
    snapshot = torch.cuda.memory_snapshot()
    addresses = [s["address"] <= x.data_ptr() < s["address"] + s["total_size"] for s in snapshot]
    accelerator = torch.accelerator.memory_allocated() if hasattr(torch.accelerator, "memory_allocated") else None
    return {
        "allocated": stats["allocated_bytes.all.current"] == torch.cuda.memory_allocated() >= 10 * MIB,
        "accelerator": accelerator in (None, torch.cuda.memory_allocated()),
        "in_snapshot": sum(addresses) == 1,
        "fraction": torch.cuda.get_per_process_memory_fraction(),
        "values": [],
    }


def history(_):
    """The events of a few blocks, one of them used by another stream, and the stacks of events and of live blocks."""
    torch.cuda.empty_cache()
    torch.cuda.memory._record_memory_history(max_entries=1000)
    side = torch.cuda.Stream()
    large = torch.empty(30 * MIB, dtype=torch.uint8, device="cuda")
    shared = torch.empty(1000, dtype=torch.uint8, device="cuda")
    torch.cuda._sleep(20_000_000)
    side.wait_stream(torch.cuda.current_stream())
    shared.record_stream(side)
    freed, address = large.data_ptr(), shared.data_ptr()
    del large, shared
    kept = torch.empty(30 * MIB, dtype=torch.uint8, device="cuda")
    torch.cuda.set_per_process_memory_fraction(0.01)
    try:
        torch.empty(8 << 30, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError:
        pass
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    again = torch.empty(1000, dtype=torch.uint8, device="cuda")
    seen = torch.cuda.memory._snapshot()
    events = seen["device_traces"][torch.cuda.current_device()]
    blocks = [b for s in seen["segments"] for b in s["blocks"] if b["address"] == kept.data_ptr()]
    stacks = [e["frames"] for e in events if e["action"] == "alloc"] + [b["frames"] for b in blocks]
    times = [e["time_us"] for e in events]
    mine = [e for e in events if e.get("addr") == address]
    torch.cuda.memory._record_memory_history(None)
    off = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
    del kept, again
    return {
        "events": sorted((e["action"], e["size"]) for e in events if not e["action"].startswith(("segment", "oom"))),
        "oom": sum(e["action"] == "oom" for e in events),
        "segments": any(e["action"].startswith("segment_") for e in events),
        "order": [e["action"] for e in mine if not e["action"].startswith("segment_")][:3],
        "stacks": len(stacks) == 5 and all(any(f["name"] == "history" for f in frames) for frames in stacks),
        "recent": times == sorted(times) and abs(times[-1] / 1e6 - time.time()) < 60,
        "freed": any(e["action"] == "free_completed" and e["addr"] == freed for e in events),
        "off": off,
        "values": [],
    }


def profiler(_):
    """Bytes that the profiler attributes to an operator, and to its end."""
    kinds = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=kinds, profile_memory=True) as profile:
        x = torch.empty(10 * MIB, dtype=torch.uint8, device="cuda")
        del x
    rows = {row.key: row.self_device_memory_usage for row in profile.key_averages()}
    return {"allocated": rows.get("aten::empty"), "freed": rows.get("[memory]"), "values": []}


WORK = {
    "cudagraphs_paths": (trees_paths, {"backend": "cudagraphs"}),
    "inductor_train": (trees_train, {"mode": "reduce-overhead"}),
    "inductor_paths": (trees_paths, {"mode": "reduce-overhead"}),
    "mem_pool": (mem_pool, None),
    "mem_pool_over_an_allocator": (mem_pool_over_an_allocator, None),
    "out_of_memory": (out_of_memory, None),
    "history": (history, None),
    "profiler": (profiler, None),
    "benchmark": (benchmark, None),
    "figures": (figures, None),
}


def main(allocator, *names):
    torch.backends.cuda.matmul.allow_tf32 = False
    if allocator == "cualloc":
        begun = time.perf_counter()
        ours.install(subclass=True)
        print(json.dumps({"install_s": round(time.perf_counter() - begun, 2), **ours.capabilities()}), flush=True)
    failed = 0
    for name in names or WORK:
        work, argument = WORK[name]
        torch.cuda.reset_peak_memory_stats()
        try:
            row = work(argument)
        except Exception as error:
            failed += 1
            row = {"error": f"{type(error).__name__}: {error}"[:2000]}
            traceback.print_exc()
        torch._dynamo.reset()
        row["reserved_MiB"] = torch.cuda.max_memory_reserved() >> 20
        if allocator == "cualloc":
            try:
                ours.check()
            except cualloc.Error as error:
                failed += 1
                row["check"] = str(error)
        print(json.dumps({"work": name, "allocator": allocator, **row}), flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
