"""Figures of growable ranges in a decode loop, on a GPU: gpu_decode.py [NAME]...

Prints one line of JSON for each: `steps` compares a growing cache with a static one, `idle` is the share of a commit
that idle memory serves, `visible` the time until another process sees what was returned."""

import json
import statistics
import subprocess
import sys
import time

import torch

import cualloc.torch as ours

MIB, GIB = 1 << 20, 1 << 30
GRANULE = 32 * MIB
ROW, WINDOW, ROWS = MIB // 4, 256, 4096


def captured(rows):
    """The graph of a decode step over a cache, the place of its token, its answer, and what else the graph uses."""
    place, back = torch.zeros(1, dtype=torch.long, device="cuda"), torch.arange(WINDOW, device="cuda")
    answer, weight = torch.zeros(1, device="cuda"), torch.randn(4096, 4096, device="cuda", dtype=torch.half) / 64
    hidden = torch.randn(16, 4096, device="cuda", dtype=torch.half)

    def step():
        hidden.copy_((hidden @ weight).tanh())
        rows.index_copy_(0, place, (place % 1000).half().expand(1, ROW // 2))
        answer.copy_(rows.index_select(0, (place - back).clamp_min(0))[:, -1].float().sum(0, keepdim=True))
        place.add_(1)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph, place, answer, (back, hidden, weight)


def timed(graph, place, answer, grow):
    """Milliseconds of a step, the mean over all tokens; `grow` is called before each token."""
    place.zero_()
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for token in range(ROWS):
        grow(token)
        graph.replay()
    torch.cuda.synchronize()
    spent = 1e3 * (time.perf_counter() - begun) / ROWS
    right = float(sum((ROWS - 1 - n) % 1000 for n in range(WINDOW)))
    assert answer.item() == right, (answer.item(), right)
    return spent


def steps():
    """Ten alternating pairs of a cache that grows from 32 MiB to 1 GiB, out of idle memory, and one that is there."""
    fixed = torch.zeros(ROWS * ROW, dtype=torch.uint8, device="cuda")
    range_ = ours.reserve(ROWS * ROW, granule=GRANULE)
    range_.commit(0, GRANULE)
    every = GRANULE // ROW

    def grow(token):
        if token % every == 0:
            range_.commit(token * ROW, token * ROW + GRANULE)

    works = {
        "static": (captured(fixed.view(torch.half).view(-1, ROW // 2)), lambda token: None),
        "growing": (captured(range_.tensor.view(torch.half).view(-1, ROW // 2)), grow),
    }
    times = {name: [] for name in works}
    for pair in range(11):
        for name in sorted(works, reverse=pair % 2 == 1):
            (graph, place, answer, _), before = works[name]
            spent = timed(graph, place, answer, before)
            # The first pair loads what is loaded once.
            times[name] += [spent] if pair else []
            range_.decommit(0, ROWS * ROW)
            torch.cuda.synchronize()
            ours.trim()
            range_.commit(0, GRANULE)
            # Its idle handles serve the growth.
            torch.empty(GIB, dtype=torch.uint8, device="cuda")
    medians = {f"{name}_ms": round(statistics.median(row), 5) for name, row in times.items()}
    noise = max(times["static"]) / min(times["static"])
    range_.close()
    quotient = medians["growing_ms"] / medians["static_ms"]
    return {**medians, "quotient": round(quotient, 4), "static_spread": round(noise, 4), "pairs": 10}


def held():
    stats = ours.stats()
    return stats["reserved"]["current"] + stats["graph_pools"] + stats["ranges"] + stats["ranges_leaving"]


def idle():
    """How much of a commit of 10 GiB idle memory of a training phase serves."""
    layers = [layer for _ in range(6) for layer in (torch.nn.Linear(8192, 8192), torch.nn.GELU())]
    model = torch.nn.Sequential(*layers).cuda()
    optimizer = torch.optim.Adam(model.parameters())
    for step in range(6):
        loss = model(torch.randn(8192 - 512 * (step % 3), 8192, device="cuda")).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    del loss, model, optimizer, layers
    torch.cuda.synchronize()
    before, calls = held(), ours.stats()["driver_calls"]
    with ours.reserve(10 * GIB, granule=GRANULE) as cache:
        begun = time.perf_counter()
        cache.commit(0, 10 * GIB)
        spent, new = time.perf_counter() - begun, max(held() - before, 0)
        assert cache.committed == 10 * GIB
        calls = ours.stats()["driver_calls"] - calls
    share = 1 - new / (10 * GIB)
    figures = {"idle_GiB": before / GIB, "share": share, "commit_ms": 1e3 * spent, "calls": calls}
    return {name: round(figure, 4) for name, figure in figures.items()}


WATCHER = """
import sys, time, torch
torch.cuda.mem_get_info()
print("ready", flush=True)
for line in sys.stdin:
    wanted, limit = int(line), time.monotonic() + 10
    while torch.cuda.mem_get_info()[0] < wanted and time.monotonic() < limit: pass
    print(time.monotonic(), flush=True)
"""


def visible():
    """From `trim` until another process sees 4 GiB that a range decommitted."""
    other = subprocess.Popen([sys.executable, "-c", WATCHER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert other.stdout.readline() == "ready\n"
    times = []
    for _ in range(7):
        with ours.reserve(4 * GIB, granule=GRANULE) as cache:
            ours.trim()
            cache.commit(0, 4 * GIB)
            free = torch.cuda.mem_get_info()[0]
            cache.decommit(0, 4 * GIB)
            torch.cuda.synchronize()
            print(free + 4 * GIB - GRANULE, file=other.stdin, flush=True)
            # The other process polls by now.
            time.sleep(0.05)
            begun = time.monotonic()
            ours._library.trim(torch.cuda.current_device(), 0, host=False)
            trimmed = time.monotonic()
            times.append((1e3 * (float(other.stdout.readline()) - begun), 1e3 * (trimmed - begun)))
    other.stdin.close()
    assert other.wait(timeout=20) == 0
    seen, trim = zip(*times)
    figures = {"visible_ms": statistics.median(seen), "worst_ms": max(seen), "trim_ms": statistics.median(trim)}
    return {name: round(figure, 2) for name, figure in figures.items()}


def main(names):
    ours.install(config="tune.handle=32M")
    torch.manual_seed(0)
    for work in (steps, idle, visible):
        if not names or work.__name__ in names:
            print(json.dumps({"work": f"decode-{work.__name__}", **work()}), flush=True)
    torch.cuda.synchronize()
    ours.check()


if __name__ == "__main__":
    main(sys.argv[1:])
