"""Two GPUs, without a setting: gpu_two.py native|cualloc in one process, or with two ranks under torchrun.

Prints one line of JSON for each piece of work: what it computed."""

import json
import os
import sys

os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
os.environ["NCCL_NVLS_ENABLE"] = "0"

import torch
import torch.distributed as dist
import torch.nn as nn

MIB = 1 << 20


def hexed(values):
    return [float(value).hex() for value in values]


def layers(width, depth):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(depth)))


def copies():
    """Copies between devices, by the driver where the layouts are equal, else by kernels that access the peer."""
    values = []
    for round in range(3):
        # The memory grows after the first kernel has accessed the peer.
        x = torch.arange(MIB * (round + 1), dtype=torch.float32, device="cuda:0").view(1024, -1)
        y = x.to("cuda:1")
        values += [y.sum().item(), (y + 1).to("cuda:0").sum().item()]
        for source, target in ((x, "cuda:1"), (y, "cuda:0")):
            strided = torch.empty(x.shape[1] // 2, x.shape[0], device=target).t()
            strided.copy_(source[:, ::2])
            values.append(strided.double().square().sum().item())
    return values


def train(model, optimizer, width, rows, rank=0):
    """Losses of training with batches of several sizes."""
    losses = []
    for step in range(20):
        torch.manual_seed(step * 2 + rank)
        x = torch.randn(rows + 64 * (step % 3), width, device="cuda")
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
    return losses


def data_parallel():
    model = nn.DataParallel(layers(512, 4).cuda(), device_ids=[0, 1])
    return train(model, torch.optim.SGD(model.parameters(), 0.1), 512, 256)


def sharded(rank):
    from torch.distributed.fsdp import fully_shard

    model = layers(1024, 6).cuda()
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    return train(model, torch.optim.AdamW(model.parameters(), 1e-3), 1024, 128, rank)


def registered(rank):
    """Sums over NCCL of memory that NCCL has registered: a pool over NCCL's own allocator, and a plain pool."""
    backend = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cuda"))
    values = []
    for pool in (torch.cuda.MemPool(backend.mem_allocator), torch.cuda.MemPool()):
        with torch.cuda.use_mem_pool(pool):
            x = torch.full((4 * MIB,), rank + 1.0, device="cuda")
        backend.register_mem_pool(pool)
        with torch.cuda.use_mem_pool(pool):
            # A segment that the pool gets after its registration.
            y = torch.full((16 * MIB,), rank + 3.0, device="cuda")
        for tensor in (x, y):
            dist.all_reduce(tensor)
            values.append(tensor.double().sum().item())
        torch.cuda.synchronize()
        backend.deregister_mem_pool(pool)
        del x, y
    return values


def main(allocator):
    ranked = "LOCAL_RANK" in os.environ
    rank = int(os.environ.get("LOCAL_RANK", 0))
    if allocator == "cualloc":
        import cualloc.torch

        cualloc.torch.install()
    torch.use_deterministic_algorithms(True, warn_only=True)
    if ranked:
        torch.cuda.set_device(rank)
        dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    work = {"fsdp": lambda: sharded(rank), "registered": lambda: registered(rank)} if ranked else {}
    failed = 0
    for name, run in (work or {"copies": copies, "data_parallel": data_parallel}).items():
        row = {"work": f"{name}-{rank}" if ranked else name, "allocator": allocator}
        try:
            row["values"] = hexed(run())
            if allocator == "cualloc":
                for device in [rank] if ranked else range(2):
                    cualloc.torch.check(device)
        except Exception as error:
            failed += 1
            row["error"] = f"{type(error).__name__}: {error}"[:1000]
        print(json.dumps(row), flush=True)
    if ranked:
        dist.barrier()
        dist.destroy_process_group()
    return failed


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
