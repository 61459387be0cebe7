"""One program of PyTorch on a GPU, which prints one line of JSON: gpu_torch.py ALLOCATOR WORK [STEPS]

ALLOCATOR: native, expandable, pluggable (ours through PyTorch's pluggable interface) or cualloc. WORK: train, conv,
streams or generate; its values are the same in each run where PyTorch is deterministic. If CUALLOC_TIMED names a
folder, the calls of the allocator in the second half of the steps are timed (meter.py).
"""

import hashlib
import json
import os
import sys
import time

allocator, work = sys.argv[1:3]
os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
if allocator == "expandable":
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"

import torch
import torch.nn as nn
import torch.nn.functional as F

ours, meter = allocator in ("cualloc", "pluggable"), None
if ours:
    import cualloc.torch

    cualloc.torch.install(subclass=allocator == "cualloc")
if os.environ.get("CUALLOC_TIMED"):
    from meter import Meter

    meter = Meter(os.environ["CUALLOC_TIMED"])
torch.manual_seed(0)
torch.use_deterministic_algorithms(True, warn_only=True)
torch.backends.cudnn.benchmark = False
torch.set_float32_matmul_precision("high")
losses, times = [], []


def timed(start, steps):
    """Notes the time of a step. The meter forgets the first half of the steps."""
    times.append(time.perf_counter() - start)
    if meter and len(times) == steps // 2:
        torch.cuda.synchronize()
        meter.reset()


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def attend(self, x, cache=None):
        batch, length, width = x.shape
        parts = self.qkv(self.before(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        if cache is not None:
            k, v = torch.cat([cache[0], k], 2), torch.cat([cache[1], v], 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=length > 1)
        return y.transpose(1, 2).reshape(batch, length, width), (k, v)

    def forward(self, x, cache=None):
        y, cache = self.attend(x, cache)
        x = x + self.out(y)
        return x + self.mlp(self.after(x)), cache


class Model(nn.Module):
    def __init__(self, width=1024, heads=16, blocks=12, words=32000):
        super().__init__()
        self.embed, self.norm = nn.Embedding(words, width), nn.LayerNorm(width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(blocks))
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x, _ = block(x)
        return self.head(self.norm(x))


def between(low, high, generator):
    return int(torch.randint(low, high, (1,), generator=generator))


def step(model, loss, optimizer, start, steps):
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    losses.append(loss.item())
    timed(start, steps)


def train(steps=24):
    """Sequences of varying lengths."""
    model = Model().cuda()
    optimizer, g = torch.optim.AdamW(model.parameters(), 3e-4), torch.Generator().manual_seed(1)
    for _ in range(steps):
        length, batch = between(128, 1024, g), between(4, 17, g)
        x = torch.randint(0, 32000, (batch, length), generator=g).cuda()
        start = time.perf_counter()
        with torch.autocast("cuda", torch.bfloat16):
            loss = F.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())
        step(model, loss, optimizer, start, steps)


def conv(steps=30):
    """Images of varying sizes."""

    def layer(inputs, outputs, stride=1):
        return nn.Sequential(nn.Conv2d(inputs, outputs, 3, stride, 1), nn.BatchNorm2d(outputs), nn.ReLU())

    sizes = [(3, 64), (64, 128, 2), (128, 128), (128, 256, 2), (256, 256), (256, 512, 2), (512, 512)]
    layers = [layer(*size) for size in sizes]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 100)).cuda()
    optimizer, g = torch.optim.SGD(model.parameters(), 0.05), torch.Generator().manual_seed(4)
    for _ in range(steps):
        count, size = between(8, 65, g), 32 * between(2, 7, g)
        x = torch.randn(count, 3, size, size, generator=g).cuda()
        y = torch.randint(0, 100, (count,), generator=g).cuda()
        start = time.perf_counter()
        step(model, F.cross_entropy(model(x), y), optimizer, start, steps)


def streams(steps=80):
    """Copies on a side stream, recorded on the main one; results on a third."""
    layers = [nn.Sequential(nn.Linear(4096, 4096), nn.GELU()) for _ in range(6)]
    model = nn.Sequential(*layers).cuda()
    side, out, g = torch.cuda.Stream(), torch.cuda.Stream(), torch.Generator().manual_seed(3)
    hosts = [torch.randn(between(256, 8192, g), 4096, generator=g).pin_memory() for _ in range(6)]
    pending = []
    main = torch.cuda.current_stream()
    for number in range(steps):
        start = time.perf_counter()
        with torch.cuda.stream(side):
            x = hosts[number % len(hosts)].cuda(non_blocking=True)
            scaled = x * 1.5
        main.wait_stream(side)
        x.record_stream(main)
        scaled.record_stream(main)
        y = model(scaled) + x
        del x, scaled
        out.wait_stream(main)
        y.record_stream(out)
        with torch.cuda.stream(out):
            pending.append(y.double().sum(1).mean())
        del y
        if number % 10 == 9:
            torch.cuda.synchronize()
            losses.extend(float(value) for value in pending)
            pending.clear()
        timed(start, steps)


def generate(steps=4, words=80):
    """Answers word by word, with a cache that grows."""
    model, g = Model().cuda().bfloat16().eval(), torch.Generator().manual_seed(2)
    with torch.inference_mode():
        for _ in range(steps):
            start = time.perf_counter()
            x = torch.randint(0, 32000, (between(8, 33, g), 64), generator=g).cuda()
            caches = [None] * len(model.blocks)
            for _ in range(words):
                h = model.embed(x)
                for number, block in enumerate(model.blocks):
                    h, caches[number] = block(h, caches[number])
                x = model.head(model.norm(h[:, -1:])).argmax(-1)
            losses.append(float(x.float().mean()))
            timed(start, steps)


{"train": train, "conv": conv, "streams": streams, "generate": generate}[work](*map(int, sys.argv[3:]))
torch.cuda.synchronize()
times.sort()
if meter:
    meter.stop()


def pair(bytes, count=20_000):
    """Microseconds of making and dropping a tensor, PyTorch's own part included."""
    torch.empty(bytes, dtype=torch.int8, device="cuda")
    start = time.perf_counter()
    for _ in range(count):
        torch.empty(bytes, dtype=torch.int8, device="cuda")
    return round(1e6 * (time.perf_counter() - start) / count, 3)


figures = torch.cuda.memory_stats()
reserved, requested = figures["reserved_bytes.all.peak"], figures["requested_bytes.all.peak"]
result = dict(
    allocator=allocator,
    work=work,
    losses=hashlib.sha1(repr(losses).encode()).hexdigest()[:12],
    last=losses[-1],
    step_ms=round(1e3 * times[len(times) // 2], 3),
    sum_s=round(sum(times), 3),
    reserved_MiB=reserved >> 20,
    requested_MiB=requested >> 20,
    ratio=round(reserved / requested, 4),
    active_ratio=round(reserved / figures["active_bytes.all.peak"], 4),
    **meter.figures() if meter else {"pair_us": {"4 KiB": pair(4 << 10), "1 MiB": pair(1 << 20)}},
)
if ours:
    cualloc.torch.check()
    result["check"] = "clean"
    result["driver_calls"] = cualloc.torch.stats()["driver_calls"]
print(json.dumps(result), flush=True)
