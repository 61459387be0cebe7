"""Two ranks that train together over NCCL, one GPU each: torchrun --nproc-per-node 2 gpu_ddp.py native|cualloc"""

import hashlib
import json
import os
import sys
import time

os.environ["CUDA_VISIBLE_DEVICES"] = os.environ["LOCAL_RANK"]
os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"

import torch
import torch.distributed as dist
import torch.nn as nn

ours, rank = sys.argv[1] == "cualloc", int(os.environ["LOCAL_RANK"])
if ours:
    import cualloc.torch

    cualloc.torch.install()
dist.init_process_group("nccl")
torch.manual_seed(0)
torch.use_deterministic_algorithms(True, warn_only=True)
layers = [nn.Sequential(nn.Linear(2048, 2048), nn.GELU()) for _ in range(12)]
model = nn.parallel.DistributedDataParallel(nn.Sequential(*layers).cuda())
optimizer, g, losses = torch.optim.AdamW(model.parameters(), 1e-3), torch.Generator().manual_seed(7 + rank), []
start = time.perf_counter()
for _ in range(40):
    count = int(torch.randint(256, 8192, (1,), generator=g))
    x = torch.randn(count, 2048, generator=g).cuda()
    loss = (model(x) - x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    losses.append(loss.item())
torch.cuda.synchronize()
dist.barrier()
figures = torch.cuda.memory_stats()
reserved, requested = figures["reserved_bytes.all.peak"], figures["requested_bytes.all.peak"]
result = dict(
    allocator=sys.argv[1],
    work=f"ddp-{rank}",
    losses=hashlib.sha1(repr(losses).encode()).hexdigest()[:12],
    step_ms=round(1e3 * (time.perf_counter() - start) / len(losses), 3),
    reserved_MiB=reserved >> 20,
    requested_MiB=requested >> 20,
    ratio=round(reserved / requested, 4),
)
if ours:
    cualloc.torch.check()
    result["check"] = "clean"
print(json.dumps(result), flush=True)
dist.destroy_process_group()
