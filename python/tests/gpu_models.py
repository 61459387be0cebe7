"""Training of five models by torch.compile(mode="reduce-overhead"), on a GPU: gpu_models.py [MODEL]...

Each model is trained with changing batch sizes, which makes shapes dynamic, and with an attribute that changes, which
makes it compile anew. Three processes, two with PyTorch's own allocator and one with cualloc, compute the losses, then
run ten phases of equal steps by turns. Prints one line of JSON for each model; exit code 1 if losses differ although
those of the two native processes are equal. Two models are of `transformers`; without it they are written here."""

import gc
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

import torch
import torch.nn as nn
import torch.nn.functional as F

MARK, WORDS, LENGTH, WIDTH = "@@", 1024, 64, 256
# Steps with a batch size and the value of the attribute.
PLAN = [(size, power) for size, power in ((16, 1), (32, 1), (24, 1), (16, 2)) for _ in range(6)]
PHASES, STEPS, SECONDS = 10, 30, 230


class Trained(nn.Module):
    """A model with its loss. The attribute `power` is a constant of the compiled code."""

    def __init__(self, model, shape, words=None):
        super().__init__()
        self.model, self.shape, self.words, self.power = model, shape, words, 1

    def batch(self, size):
        if self.words:
            return torch.randint(0, self.words, (size, *self.shape), device="cuda")
        return torch.randn(size, *self.shape, device="cuda")

    def forward(self, x):
        if not self.words:
            return self.model(x).square().mean() ** self.power
        y = self.model(x)
        y = getattr(y, "logits", y)
        return F.cross_entropy(y[:, :-1].flatten(0, 1), x[:, 1:].flatten()) ** self.power


class Attention(nn.Module):
    def __init__(self, causal):
        super().__init__()
        self.causal, self.parts, self.out = causal, nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        batch, length, _ = x.shape
        q, k, v = self.parts(x).view(batch, length, 3, 4, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(y.transpose(1, 2).reshape(batch, length, WIDTH))


class Residual(nn.Module):
    def __init__(self, *inner):
        super().__init__()
        self.inner = nn.Sequential(*inner)

    def forward(self, x):
        return x + self.inner(x)


def transformer(causal):
    blocks = []
    for _ in range(3):
        blocks += [Residual(nn.LayerNorm(WIDTH), Attention(causal))]
        blocks += [Residual(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))]
    return nn.Sequential(nn.Embedding(WORDS, WIDTH), *blocks, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS))


def mlp():
    blocks = [Residual(nn.LayerNorm(1024), nn.Linear(1024, 2048), nn.GELU(), nn.Linear(2048, 1024)) for _ in range(4)]
    return Trained(nn.Sequential(*blocks), (1024,))


def conv():
    def block():
        convolution = nn.Conv2d(32, 32, 3, padding=1)
        return Residual(convolution, nn.GroupNorm(4, 32), nn.SiLU())

    return Trained(nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), block(), block(), block()), (3, 32, 32))


class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.across, self.within = nn.LayerNorm(WIDTH), nn.Linear(LENGTH, LENGTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = x + self.across(self.norm(x).transpose(1, 2)).transpose(1, 2)
        return x + F.gelu(self.within(x))


def mixer():
    return Trained(nn.Sequential(*(Mixer() for _ in range(4))), (LENGTH, WIDTH))


def of_transformers(kind):
    """GPT-2 or BERT of `transformers` with random weights, and whether it is theirs."""
    sizes = {"vocab_size": WORDS, "attn_implementation": "sdpa"}
    try:
        import transformers as theirs

        if kind == "gpt":
            config = theirs.GPT2Config(n_positions=LENGTH, n_embd=WIDTH, n_layer=3, n_head=4, use_cache=False, **sizes)
            config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
            return theirs.GPT2LMHeadModel(config)
        sizes.update(hidden_size=WIDTH, num_hidden_layers=3, num_attention_heads=4, intermediate_size=4 * WIDTH)
        config = theirs.BertConfig(**sizes)
        config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
        return theirs.BertForMaskedLM(config)
    except ImportError:
        return transformer(kind == "gpt")


def gpt():
    return Trained(of_transformers("gpt"), (LENGTH,), WORDS)


def bert():
    return Trained(of_transformers("bert"), (LENGTH,), WORDS)


MODELS = {build.__name__: build for build in (mlp, conv, mixer, gpt, bert)}


# ---- a process with one of the allocators --------------------------------------------------------------------------


class Worker:
    def __init__(self, allocator):
        self.ours = None
        if allocator == "cualloc":
            import cualloc.torch as ours

            ours.install(subclass=True)
            self.ours = ours

    def step(self, size, power):
        self.model.power = power
        torch.compiler.cudagraph_mark_step_begin()
        loss = self.compiled(self.model.batch(size))
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss

    def losses(self, name):
        """Trains a model anew, and returns the losses and the most that was reserved."""
        self.model = self.compiled = self.optimizer = None
        torch._dynamo.reset()
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        torch.manual_seed(0)
        self.model = MODELS[name]().cuda()
        self.compiled = torch.compile(self.model, mode="reduce-overhead")
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        values = [self.step(*one).item().hex() for one in PLAN]
        reserved = torch.cuda.max_memory_reserved()
        if self.ours:
            self.ours.check()
            assert reserved == self.ours.stats()["held"]["peak"]
        theirs = type(self.model.model).__module__.startswith("transformers")
        return {"losses": values, "reserved": reserved, "transformers": theirs}

    def phase(self, _):
        """Milliseconds of a step."""
        torch.cuda.synchronize()
        begun = time.perf_counter()
        for number in range(STEPS):
            self.step(PLAN[number * 6 % 18][0], 1)
        torch.cuda.synchronize()
        return {"step_ms": 1e3 * (time.perf_counter() - begun) / STEPS}


def work(allocator):
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    worker = Worker(allocator)
    for line in sys.stdin:
        what, name = line.split()
        try:
            said = getattr(worker, what)(name)
        except Exception as error:
            said = {"error": f"{type(error).__name__}: {error}"[:1000]}
        print(MARK + json.dumps(said), flush=True)


# ---- the process that compares them --------------------------------------------------------------------------------


def ask(process, what, name):
    print(what, name, file=process.stdin, flush=True)


def answer(process):
    for line in process.stdout:
        if line.startswith(MARK):
            return json.loads(line.removeprefix(MARK))
    return {"error": f"the process ended with {process.wait()}"}


def compare(name, workers):
    """The row of a model."""
    # Compilation takes most of the time, and the processes share what it makes.
    for process in workers.values():
        ask(process, "losses", name)
    made = {allocator: answer(process) for allocator, process in workers.items()}
    if errors := {allocator: one["error"] for allocator, one in made.items() if "error" in one}:
        return {"model": name, "wrong": True, "errors": errors}
    times = {allocator: [] for allocator in workers}
    for phase in range(PHASES + 1):
        for allocator in sorted(workers, reverse=phase % 2 == 1):
            ask(workers[allocator], "phase", name)
            said = answer(workers[allocator])
            if "error" in said:
                return {"model": name, "wrong": True, "errors": {allocator: said["error"]}}
            # The first phase captures what changed since the losses.
            times[allocator] += [said["step_ms"]] if phase else []
    medians = {allocator: statistics.median(row) for allocator, row in times.items()}
    losses = [made[allocator]["losses"] for allocator in ("native", "native_again", "cualloc")]
    reserved = {allocator: one["reserved"] >> 20 for allocator, one in made.items()}
    return {
        "model": name,
        "of_transformers": made["native"]["transformers"],
        "steps": len(PLAN),
        "native_repeats": losses[0] == losses[1],
        "losses_equal": losses[0] == losses[2],
        "wrong": losses[0] == losses[1] != losses[2],
        "reserved_MiB": reserved,
        "reserved_ok": reserved["cualloc"] <= reserved["native"],
        "step_ms": {allocator: round(median, 4) for allocator, median in medians.items()},
        "quotient": round(medians["cualloc"] / medians["native"], 4),
        "native_quotient": round(medians["native_again"] / medians["native"], 4),
    }


def main(names):
    begun, wrong = time.monotonic(), False
    if not importlib.util.find_spec("transformers"):
        print("SKIPPED: models of transformers, which is not installed: gpt and bert are written here", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        environment = dict(os.environ, TORCHINDUCTOR_CACHE_DIR=folder, CUBLAS_WORKSPACE_CONFIG=":4096:8")
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": environment}
        workers = {
            allocator: subprocess.Popen([sys.executable, __file__, "work", allocator], **pipes)
            for allocator in ("native", "native_again", "cualloc")
        }
        try:
            for name in names or MODELS:
                if time.monotonic() - begun > SECONDS * 0.8:
                    print(f"SKIPPED: {name}, for lack of time", flush=True)
                    continue
                row = compare(name, workers)
                wrong |= row["wrong"]
                print(json.dumps(row), flush=True)
        finally:
            for process in workers.values():
                process.stdin.close()
                process.kill()
                process.wait()
    print(f"{time.monotonic() - begun:.0f} s", file=sys.stderr)
    return wrong


if __name__ == "__main__":
    sys.exit(work(sys.argv[2]) if sys.argv[1:2] == ["work"] else main(sys.argv[1:]))
