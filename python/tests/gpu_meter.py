"""Time inside PyTorch's allocator, by the same timed functions for each: gpu_meter.py [ROUNDS [WORK=STEPS...]]

Each row is the median of ROUNDS (3) processes, which alternate between the allocators.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile

rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 3
works = dict(one.split("=") for one in sys.argv[2:] or ["train=120", "conv=400", "streams=2000"])
allocators = ("native", "expandable", "pluggable", "cualloc")
program = os.path.join(os.path.dirname(os.path.abspath(__file__)), "gpu_torch.py")
names = ("inside_ms", "alloc_ns", "alloc_50%_ns", "alloc_99%_ns", "alloc_99.9%_ns", "free_ns", "free_50%_ns",
         "free_99%_ns", "free_99.9%_ns", "step_ms", "ratio")  # fmt: skip
with tempfile.TemporaryDirectory() as folder:
    # The meter is built once, by the first process.
    environment = {**os.environ, "CUALLOC_TIMED": folder}
    print("work", "allocator", "over native", "same losses", *names, sep="\t", flush=True)
    for work, steps in works.items():
        rows = {allocator: [] for allocator in allocators}
        for _ in range(rounds):
            for allocator in allocators:
                command = [sys.executable, program, allocator, work, steps]
                ended = subprocess.run(command, env=environment, capture_output=True, text=True)
                if ended.returncode != 0:
                    sys.exit(f"{' '.join(command)}: {ended.stderr[-3000:]}")
                rows[allocator].append(json.loads(ended.stdout.splitlines()[-1]))
        median = lambda allocator, name: statistics.median(row[name] for row in rows[allocator])
        for allocator in allocators:
            over = median(allocator, "inside_ms") / median("native", "inside_ms")
            losses = {row["losses"] for row in rows[allocator]} == {row["losses"] for row in rows["native"]}
            figures = [f"{median(allocator, name):g}" for name in names]
            print(work, allocator, f"{over:.2f}", losses, *figures, sep="\t", flush=True)
