"""A decode loop whose cache of keys and values grows in place while activations shrink, beside a second process that uses
the memory when it is returned:

    python decode.py

The graph of a decode step is captured once, when the cache has 1 GiB. It needs a GPU with 16 GiB of free memory."""

import subprocess
import sys
import time

import torch

GIB = 1 << 30
# The keys and values of a token, and the number of tokens that a step attends to.
ROW, WINDOW = 1 << 20, 64
ROWS = GIB // ROW


def beside():
    """The second process: takes memory with PyTorch's own allocator as soon as the device has it."""
    torch.zeros(1, device="cuda")
    print("ready", flush=True)
    for line in sys.stdin:
        free, wanted = map(int, line.split())
        limit = time.monotonic() + 20
        while torch.cuda.mem_get_info()[0] < free + wanted:
            if time.monotonic() > limit:
                sys.exit("the memory was not returned")
        seen = time.monotonic()
        taken = torch.full((wanted,), 7, dtype=torch.uint8, device="cuda")
        if taken.min() != 7 or taken.max() != 7:
            sys.exit("the second process read a wrong value")
        print(seen, taken.numel(), flush=True)


def main():
    import cualloc.torch

    # The handles of activations have the size of the granules of the cache, which reuses them.
    cualloc.torch.install(limit="6G", config="tune.handle=32M")
    other = subprocess.Popen([sys.executable, __file__, "beside"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    if other.stdout.readline() != "ready\n":
        sys.exit("the second process has no GPU")

    cache = cualloc.torch.reserve(4 * GIB, granule=32 << 20, tag="cache")
    cache.commit(0, GIB)
    rows = cache.tensor.view(torch.float16).view(-1, ROW // 2)
    place = torch.zeros(1, dtype=torch.long, device="cuda")
    back, answer = torch.arange(WINDOW, device="cuda"), torch.zeros(2, device="cuda")

    def step():
        """Stores a row for a token, and adds up the rows of the tokens before it."""
        rows.index_copy_(0, place, (place % 1000).half().expand(1, ROW // 2))
        seen = rows.index_select(0, (place - back).clamp_min(0)).float()
        answer.copy_(seen[:, :: ROW // 2 - 1].sum(0))
        place.add_(1)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()

    def decode(first, last):
        """Runs the steps of the tokens from `first` to `last`, and checks the answer of the last one."""
        place.fill_(first)
        torch.cuda.synchronize()
        begun = time.monotonic()
        for _ in range(first, last):
            graph.replay()
        torch.cuda.synchronize()
        spent = time.monotonic() - begun
        right = float(sum(max(last - 1 - n, 0) % 1000 for n in range(WINDOW)))
        if answer.tolist() != [right, right]:
            sys.exit(f"expected {right} twice, found {answer.tolist()}")
        return spent / (last - first)

    # Together with the largest cache they are more than the limit.
    activations = [torch.ones(GIB // 4, device="cuda") for _ in range(4)]
    for size in range(1, 5):
        spent = decode((size - 1) * ROWS, size * ROWS)
        held = cualloc.torch.stats()
        held = (held["reserved"]["current"] + held["ranges"] + held["graph_pools"]) / GIB
        print(
            f"cache {size} GiB, activations {len(activations)} GiB: {held:.2f} GiB held, {spent * 1e6:.0f} us per step"
        )
        if size < 4:
            if activations.pop().min() != 1:
                sys.exit("an activation changed")
            cache.commit(size * GIB, (size + 1) * GIB)

    # Requests have ended: the cache shrinks, and the other process uses the memory. Decoding goes on.
    cualloc.torch.trim()
    free = torch.cuda.mem_get_info()[0]
    cache.decommit(GIB, 4 * GIB)
    print(free, 2 * GIB, file=other.stdin, flush=True)
    torch.cuda.synchronize()
    begun = time.monotonic()
    released, _ = cualloc.torch.trim()
    decode(0, ROWS)
    seen, taken = other.stdout.readline().split() or sys.exit("the second process failed")
    print(f"{released / GIB:.2f} GiB returned; another process saw them after {1e3 * (float(seen) - begun):.1f} ms")
    decode(0, ROWS)
    print(f"it uses {int(taken) / GIB:.2f} GiB while decoding goes on with {cache.committed / GIB:.0f} GiB")
    other.stdin.close()
    if other.wait(timeout=20) != 0:
        sys.exit("the second process failed")
    cache.close()
    cualloc.torch.check()


if __name__ == "__main__":
    beside() if sys.argv[1:] == ["beside"] else main()
