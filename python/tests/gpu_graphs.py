"""CUDA graphs of PyTorch on a GPU.

    gpu_graphs.py native|reuse|cualloc WORK     prints one line of JSON: callables, shared or decode
    gpu_graphs.py CASE                          ends with `well`, and exit code 0: what goes wrong on purpose, and the like
    gpu_graphs.py --list                        the cases

`reuse` is PyTorch's own allocator with graph_capture_record_stream_reuse. The work is the same on each run where PyTorch
is deterministic. What work holds is asked of the driver, so it is the same figure for every allocator: it counts the
executables of graphs, too, and what other processes do meanwhile. Cases ask cualloc.
"""

import contextlib
import gc
import hashlib
import json
import os
import shutil
import sys
import threading
import time

allocator = sys.argv[1] if len(sys.argv) == 3 else "cualloc"
os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
if allocator == "reuse":
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "graph_capture_record_stream_reuse:True"

import torch
import torch.nn as nn
import torch.nn.functional as F

MIB = 1 << 20
before, most = 0, 0


def held():
    """Bytes that the device has given away since the start, and the most so far."""
    global most
    free, total = torch.cuda.mem_get_info()
    most = max(most, total - free - before)
    return total - free - before


def start():
    global before, most
    if allocator == "cualloc":
        import cualloc.torch

        cualloc.torch.install()
    torch.manual_seed(0)
    # Contexts and libraries are loaded before anything is counted.
    small = torch.ones(64, 64, device="cuda")
    small @ small
    small.bfloat16() @ small.bfloat16()
    torch.cuda.synchronize()
    before, most = held(), 0


def held_by_us(pools=0):
    """Bytes that cualloc holds when nothing is cached, and pools of graphs hold so much at most: the driver tells of a
    graph's end a little later."""
    import cualloc.torch

    for _ in range(1000):
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        figures = cualloc.torch.stats()
        if figures["graph_pools"] <= pools:
            break
        time.sleep(0.001)
    return figures["reserved"]["current"] + figures["graph_pools"]


def are_all(tensor, value):
    return float(tensor.min()) == float(tensor.max()) == value


def digest(values):
    return hashlib.sha1(repr(values).encode()).hexdigest()[:12]


def captured(run, pool=None, stream=None):
    """A graph of a function, after it ran outside; the seconds of its capture, and what it returned."""
    side = stream or torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph, begun = torch.cuda.CUDAGraph(), time.perf_counter()
    with torch.cuda.graph(graph, pool=pool, stream=stream):
        output = run()
    return graph, time.perf_counter() - begun, output


def replayed(graph, times=200):
    """Milliseconds of a replay, the median of five rounds."""
    rounds = []
    for _ in range(5):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        for _ in range(times):
            graph.replay()
        torch.cuda.synchronize()
        rounds.append(1e3 * (time.perf_counter() - begun) / times)
    return sorted(rounds)[2]


# ---- work ----------------------------------------------------------------------------------------------------------


def callables(steps=30):
    """A training loop whose parts are graphed callables, one pool for the two of them."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    pool = torch.cuda.graph_pool_handle()

    def part():
        return nn.Sequential(nn.Linear(2048, 8192), nn.GELU(), nn.Linear(8192, 2048), nn.LayerNorm(2048)).cuda()

    parts, g = (part(), part()), torch.Generator().manual_seed(1)
    # As they will be called: the first part's input needs no gradient.
    samples = tuple((torch.randn(512, 2048, device="cuda", requires_grad=later),) for later in (False, True))
    begun = time.perf_counter()
    parts = torch.cuda.make_graphed_callables(parts, samples, pool=pool)
    capture = time.perf_counter() - begun
    held()
    weights = [weight for one in parts for weight in one.parameters()]
    optimizer, losses, times = torch.optim.SGD(weights, 0.05), [], []
    for _ in range(steps):
        x, y = (torch.randn(512, 2048, generator=g).cuda() for _ in range(2))
        begun = time.perf_counter()
        loss = F.mse_loss(parts[1](parts[0](x)), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        losses.append(loss.item())
        times.append(1e3 * (time.perf_counter() - begun))
        held()
    return losses, capture, sorted(times)[steps // 2], pool, parts


def shared(sizes=35):
    """Chains of layers of many sizes in one pool, captured in no order and from four streams, with branches beside the
    chain whose tensors are recorded there."""
    pool, g = torch.cuda.graph_pool_handle(), torch.Generator().manual_seed(2)
    streams = [torch.cuda.Stream() for _ in range(4)]
    side = torch.cuda.Stream()
    x, out = torch.randn(8 * MIB, generator=g).cuda(), torch.zeros(8 * MIB, device="cuda")

    def chain(rows):
        def run():
            main = torch.cuda.current_stream()
            y = x[:rows] * 1.01
            for layer in range(24):
                if layer % 4 == 0:
                    side.wait_stream(main)
                    with torch.cuda.stream(side):
                        z = y * 0.5
                        y.record_stream(side)
                    y = y.sin() + 1
                    main.wait_stream(side)
                    z.record_stream(main)
                    y = y + z
                    del z
                else:
                    y = (y + layer).cos()
            out[:rows].copy_(y)

        return run

    order = torch.randperm(sizes, generator=g).tolist()
    graphs, capture = {}, 0.0
    for number, at in enumerate(order):
        rows = (at + 1) * (8 * MIB // sizes)
        graphs[rows], seconds, _ = captured(chain(rows), pool, streams[number % 4])
        capture += seconds
        held()
    sums, largest = [], max(graphs)
    for turn in range(100):
        rows = sorted(graphs)[(turn * 13) % sizes]
        graphs[rows].replay()
        sums.append(float(out[:rows].double().sum()))
        held()
    return sums, capture, replayed(graphs[largest]), pool, graphs


class Decoder(nn.Module):
    """A GPT that decodes word by word, with a cache of fixed shape."""

    def __init__(self, width=1024, heads=16, blocks=12, words=32000, length=512, batch=64):
        super().__init__()
        self.heads, self.length = heads, length
        self.embed, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.before = nn.ModuleList(nn.LayerNorm(width) for _ in range(blocks))
        self.after = nn.ModuleList(nn.LayerNorm(width) for _ in range(blocks))
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(blocks))
        self.out = nn.ModuleList(nn.Linear(width, width) for _ in range(blocks))
        self.up = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(blocks))
        self.down = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)
        shape = (blocks, 2, batch, heads, length, width // heads)
        self.register_buffer("cache", torch.zeros(shape))

    def forward(self, word, place):
        batch = word.shape[0]
        x = self.embed(word) + self.places(place)
        seen = (torch.arange(self.length, device=word.device) <= place)[None, None, None]
        for number in range(len(self.qkv)):
            parts = self.qkv[number](self.before[number](x)).view(batch, 3, self.heads, 1, -1)
            q, k, v = parts.unbind(1)
            keys, values = self.cache[number, 0, :batch], self.cache[number, 1, :batch]
            keys.index_copy_(2, place, k)
            values.index_copy_(2, place, v)
            y = F.scaled_dot_product_attention(q, keys, values, attn_mask=seen)
            x = x + self.out[number](y.reshape(batch, -1))
            x = x + self.down[number](F.gelu(self.up[number](self.after[number](x))))
        return self.head(self.norm(x)).argmax(-1)


def decode(words=48):
    """A decoding loop with a graph for each of 16 batch sizes, in one pool."""
    sizes = [1, 2, 4, 6, 8, 10, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64]
    with torch.inference_mode():
        model, pool = Decoder().cuda().bfloat16().eval(), torch.cuda.graph_pool_handle()
        word, place = torch.zeros(64, dtype=torch.long, device="cuda"), torch.zeros(1, dtype=torch.long, device="cuda")
        begin = torch.randint(0, 32000, (64,), generator=torch.Generator().manual_seed(3)).cuda()
        torch.cuda.synchronize()
        held()

        def step(batch):
            return lambda: word[:batch].copy_(model(word[:batch], place))

        def answers(batch, run):
            """The words of an answer, one decoding step after another."""
            model.cache.zero_()
            word.copy_(begin)
            said = []
            for number in range(words):
                place.fill_(number)
                run()
                said.append(word[:batch].tolist())
            held()
            return said

        graphs, capture = {}, 0.0
        order = torch.randperm(len(sizes), generator=torch.Generator().manual_seed(4)).tolist()
        for at in order:
            graphs[sizes[at]], seconds, _ = captured(step(sizes[at]), pool)
            capture += seconds
            held()
        tokens = [answers(batch, graphs[batch].replay) for batch in sizes]
        for batch in (1, 12, 64):
            assert answers(batch, step(batch)) == tokens[sizes.index(batch)], f"{batch}: graph and eager differ"
        return tokens, capture, replayed(graphs[64], 50), pool, graphs


def work(run):
    start()
    # A pool is there as long as its graphs are.
    values, capture, replay, pool, graphs = run()
    gc.collect()
    torch.cuda.synchronize()
    held()
    result = dict(
        allocator=allocator,
        work=f"graphs-{run.__name__}",
        values=digest(values),
        peak_MiB=most >> 20,
        reserved_MiB=torch.cuda.max_memory_reserved() >> 20,
        capture_ms=round(1e3 * capture, 2),
        replay_ms=round(replay, 4),
    )
    if allocator == "cualloc":
        import cualloc.torch

        cualloc.torch.check()
        result["check"] = "clean"
        figures = cualloc.torch.graph_pool(pool)
        result["pool_MiB"] = figures["physical"] >> 20
        result["reserved_MiB"] += result["pool_MiB"]
        result["pool_ratio"] = round(figures["physical"] / max(figures["peak"], 1), 4)
        del graphs
        gc.collect()
        assert cualloc.torch.graph_pool(pool) is None, "its last graph has gone"
    print(json.dumps(result), flush=True)


# ---- cases ---------------------------------------------------------------------------------------------------------


def reclaim(count):
    """What streams of a capture used is used again behind all of them, and no sooner."""
    main, sides = torch.cuda.Stream(), [torch.cuda.Stream() for _ in range(count - 1)]
    graph, n = torch.cuda.CUDAGraph(), 4 * MIB
    total = torch.zeros(n, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=main):
        data = torch.full((n,), 3.0, device="cuda")
        address, results = data.data_ptr(), []
        for side in sides:
            side.wait_stream(main)
            with torch.cuda.stream(side):
                results.append(data * 2)
                data.record_stream(side)
        del data
        early = torch.full((n,), 100.0, device="cuda")
        assert early.data_ptr() != address, "the side streams read it still"
        for side in sides[:-1]:
            main.wait_stream(side)
        if len(sides) > 1:
            other = torch.full((n,), 100.0, device="cuda")
            assert other.data_ptr() != address, "one side stream reads it still"
            del other
        main.wait_stream(sides[-1])
        late = torch.full((n,), 100.0, device="cuda")
        assert late.data_ptr() == address, "all are behind"
        total.copy_(sum(results[1:], results[0]))
        for result in results:
            result.record_stream(main)
        del early, late, result, results
    for _ in range(20):
        total.zero_()
        graph.replay()
        assert are_all(total, 6.0 * (count - 1)), total


def reclaim_2_streams():
    reclaim(2)


def reclaim_4_streams():
    reclaim(4)


def reset_and_recapture():
    """A tensor outlives its graph, and its pool's memory goes when both have gone."""
    import cualloc.torch

    graph, held_after = torch.cuda.CUDAGraph(), []
    for turn in range(8):
        with torch.cuda.graph(graph):
            x = torch.zeros(64 * MIB, device="cuda")
            for _ in range(turn + 1):
                x = x + 1
        graph.replay()
        assert are_all(x, turn + 1)
        graph.reset()
        assert are_all(x, turn + 1)
        assert cualloc.torch.stats()["graph_pools"] >= 256 * MIB
        del x
        held_after.append(held_by_us())
    assert cualloc.torch.stats()["graph_pools"] == 0
    assert max(held_after[1:]) == held_after[1], held_after
    cualloc.torch.check()


def out_of_memory_in_a_capture():
    import cualloc.torch

    for bytes in (1 << 40, 1 << 50):
        graph, kept = torch.cuda.CUDAGraph(), None
        try:
            with torch.cuda.graph(graph):
                kept = torch.zeros(MIB, device="cuda") + 1
                torch.empty(bytes, dtype=torch.int8, device="cuda")
            raise AssertionError("that much memory is nowhere")
        except torch.OutOfMemoryError as error:
            assert "out of memory" in str(error)
        del kept
        again, _, out = captured(lambda: torch.full((MIB,), 5.0, device="cuda") * 2)
        again.replay()
        assert are_all(out, 10.0)
    cualloc.torch.check()


def spoilt_capture():
    """A capture that fails leaves nothing that the next ones or eager work would meet."""
    import cualloc.torch

    current = torch.cuda.current_stream()
    for turn in range(20):
        graph, stale = torch.cuda.CUDAGraph(), torch.ones(MIB, device="cuda")
        try:
            with torch.cuda.graph(graph):
                x = stale * 2
                del stale
                torch.cuda.synchronize()
            raise AssertionError("a capture cannot wait")
        except RuntimeError:
            # PyTorch goes on with the stream that was captured.
            torch.cuda.set_stream(current)
        assert cualloc._library.LIBRARY.cualloc_torch_pool_newest() == 0
        del x, graph
        good, _, out = captured(lambda: torch.full((MIB,), float(turn), device="cuda") + 1)
        good.replay()
        assert are_all(out, turn + 1.0)
    torch.cuda.synchronize()
    del good, out
    cualloc.torch.check()


def threads_beside_a_capture():
    """Others allocate, free and run during captures, in both modes that let them."""
    import cualloc.torch

    for mode in ("thread_local", "relaxed"):
        stop, wrong, rounds = threading.Event(), [], [0, 0]

        def work(number):
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                while not stop.is_set():
                    x = torch.full((MIB // 4,), float(number), device="cuda")
                    y = x + 1
                    del x
                    if not are_all(y, number + 1.0):
                        wrong.append(number)
                    rounds[number] += 1

        threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
        [thread.start() for thread in threads]
        x = torch.ones(MIB, device="cuda")
        stream = torch.cuda.Stream()
        for _ in range(10):
            graph = torch.cuda.CUDAGraph()
            torch.cuda.synchronize()
            with torch.cuda.stream(stream):
                graph.capture_begin(capture_error_mode=mode)
                y = x
                for _ in range(200):
                    y = y + 1
                graph.capture_end()
            graph.replay()
            torch.cuda.synchronize()
            assert are_all(y, 201.0)
            del y
        stop.set()
        [thread.join() for thread in threads]
        assert not wrong and all(rounds), (wrong, rounds)
    cualloc.torch.check()


def workspaces_do_not_pile_up():
    import cualloc.torch

    a = torch.randn(1024, 1024, device="cuda")
    stream = torch.cuda.Stream()
    held_after = []
    for _ in range(100):
        graph, _, out = captured(lambda: a @ a, stream=stream)
        graph.replay()
        torch.cuda.synchronize()
        del graph, out
        held_after.append(held_by_us())
    assert max(held_after[1:]) == held_after[1], held_after
    cualloc.torch.check()


def emptied_between_replays():
    graphs = [captured(lambda n=n: torch.full((n * MIB,), float(n), device="cuda").sqrt()) for n in (1, 5, 16)]
    for _ in range(10):
        torch.cuda.empty_cache()
        filler = [torch.full((32 * MIB,), -1.0, device="cuda") for _ in range(4)]
        for (graph, _, out), n in zip(graphs, (1, 5, 16)):
            graph.replay()
            assert are_all(out, float(torch.tensor(float(n)).sqrt()))
        assert all(float(one.max()) == -1.0 for one in filler)
        del filler


def graphs_sleep():
    """The memory of captured graphs sleeps and returns at its addresses: replays compute the same."""
    import cualloc.torch

    model = nn.Sequential(nn.Linear(2048, 8192), nn.GELU(), nn.Linear(8192, 2048)).cuda().half().eval()
    pool = cualloc.torch.tag_pool(torch.cuda.graph_pool_handle(), "graphs")
    later, inputs, made = torch.cuda.CUDAGraph(), {}, {}
    with torch.no_grad():
        for rows in (512, 64, 2048):
            inputs[rows] = torch.randn(rows, 2048, device="cuda", dtype=torch.half)
            made[rows] = captured(lambda rows=rows: model(inputs[rows]), pool=pool)
        mine = torch.cuda.MemPool() if cualloc.torch.capabilities()["mem_pool"] else None
        with torch.cuda.use_mem_pool(mine) if mine else contextlib.nullcontext():
            held = torch.full((16 * MIB,), 3.0, device="cuda")
        with torch.cuda.graph(later):
            output = model(inputs[64]) + held[0]
    cualloc.torch.tag_pool(later.pool(), "later")
    if mine:
        cualloc.torch.tag_pool(mine, "pool")

    def results():
        for graph in (*(graph for graph, _, _ in made.values()), later):
            graph.replay()
        return digest([one.float().sum().item() for one in (*(out for _, _, out in made.values()), output)])

    right, at = results(), [out.data_ptr() for _, _, out in made.values()]
    for keep in (False, True, "graphs", ["later", "graphs"], False):
        asleep = cualloc.torch.stats()["graph_pools"]
        cualloc.torch.sleep(keep=keep)
        assert cualloc.torch.stats()["graph_pools"] == 0 == cualloc.torch.graph_pool(pool)["physical"]
        # Others use the memory meanwhile.
        filler = torch.full((asleep // 4,), -1.0, device="cuda")
        cualloc.torch.wake()
        assert cualloc.torch.stats()["graph_pools"] == asleep
        assert keep is not True or are_all(held, 3.0)
        held.fill_(3.0)
        assert results() == right and [out.data_ptr() for _, _, out in made.values()] == at
        assert are_all(filler, -1.0)
        del filler
    cualloc.torch.check()


def compiled_without_trees():
    if not (shutil.which("gcc") or shutil.which("cc")):
        return print("SKIPPED: there is no compiler")
    import torch._inductor.config

    torch._inductor.config.triton.cudagraph_trees = False
    model = nn.Sequential(nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 512)).cuda().eval()
    x = torch.randn(64, 512, device="cuda")
    with torch.no_grad():
        fast, right = torch.compile(model, mode="reduce-overhead"), model(x)
        for _ in range(5):
            assert torch.allclose(fast(x), right, atol=1e-2)


WORK = {run.__name__: run for run in (callables, shared, decode)}
CASES = [
    *(reclaim_2_streams, reclaim_4_streams, reset_and_recapture, out_of_memory_in_a_capture, spoilt_capture),
    *(threads_beside_a_capture, workspaces_do_not_pile_up, emptied_between_replays),
    *(graphs_sleep, compiled_without_trees),
]

if __name__ == "__main__":
    if sys.argv[1] == "--list":
        print(*(case.__name__ for case in CASES))
    elif len(sys.argv) == 3:
        work(WORK[sys.argv[2]])
    else:
        start()
        {case.__name__: case for case in CASES}[sys.argv[1]]()
        print("well")
