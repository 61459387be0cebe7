"""PyTorch's own tests of CUDA graphs, with cualloc as its allocator, on a GPU.

    gpu_pytorch_tests.py TEST_CUDA_PY             all of them, each a process of its own; exit code 0 if none failed
    gpu_pytorch_tests.py TEST_CUDA_PY NAME        one, CLASS.METHOD, in this process
    gpu_pytorch_tests.py TEST_CUDA_PY --list      what would be run, and what is left out, with the reason

TEST_CUDA_PY is test/test_cuda.py of the sources of the PyTorch that is installed, which are not in its package. It needs
what that needs: psutil, expecttest, hypothesis. All methods with `graph` in their names are run but those of LEFT_OUT.
"""

import importlib.util
import os
import subprocess
import sys
import unittest

_FIGURES = "compares with the figures of segments that PyTorch's own allocator makes"
_TREES = "sets the blocks of a pool back, or asks for its segments, as the graph trees of torch.compile do"
_POOL = "makes a torch.cuda.MemPool of PyTorch's own allocator"
_SNAPSHOT = "asks for a snapshot of PyTorch's own allocator"

# By the beginning of CLASS.METHOD, the longest one counts.
LEFT_OUT = {
    "TestCuda.test_graph_memory_stats_and_use_result_after_destroy_graph": _FIGURES,
    "TestCuda.test_memory_stats_of_multiple_generators_and_graphs": _FIGURES,
    "TestCuda.test_cuda_graph_allocator_propagates_stream": _SNAPSHOT,
    "TestCuda.test_repeat_graph_capture_cublas_workspace_memory": "counts what other processes hold, too: "
    "gpu_graphs.py workspaces_do_not_pile_up asks the same of cualloc's own figures",
    "TestBlockStateAbsorption.": _TREES,
    "TestMemPool.": _POOL,
    "TestCachingHostAllocatorCudaGraph.": "is about page-locked memory, which stays PyTorch's own",
}
# Of those classes all the same.
WANTED = ("TestMemPool.test_graph_capture_reclaim_",)


def reason(name):
    """Why a test is left out; none if it is not."""
    if name.startswith(WANTED):
        return None
    found = [known for known in LEFT_OUT if name.startswith(known)]
    return LEFT_OUT[max(found, key=len)] if found else None


def loaded(path):
    """The tests of the file that are about graphs, by CLASS.METHOD."""
    import cualloc.torch

    cualloc.torch.install()
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
    spec = importlib.util.spec_from_file_location("test_cuda", path)
    module = sys.modules["test_cuda"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    tests = {}
    for kind in vars(module).values():
        if isinstance(kind, type) and issubclass(kind, unittest.TestCase):
            for method in unittest.TestLoader().getTestCaseNames(kind):
                if "graph" in method or "CudaGraph" in kind.__name__ or kind.__name__ == "TestBlockStateAbsorption":
                    tests[f"{kind.__name__}.{method}"] = kind(method)
    return tests


def one(path, name):
    outcome = unittest.TextTestRunner(verbosity=2).run(loaded(path)[name])
    import cualloc.torch

    cualloc.torch.check()
    print("skipped" if outcome.skipped else "well" if outcome.wasSuccessful() else "failed")
    return 0 if outcome.wasSuccessful() else 1


def each(path):
    listed = subprocess.run([sys.executable, __file__, path, "--list"], capture_output=True, text=True, check=True)
    rows = [line.split("\t") for line in listed.stdout.splitlines() if "\t" in line]
    counts = {"well": 0, "skipped": 0, "failed": 0}
    for name, why in rows:
        if why:
            print(f"left out  {name}: {why}")
            continue
        try:
            ended = subprocess.run([sys.executable, __file__, path, name], capture_output=True, text=True, timeout=300)
            said = ended.stdout.split()[-1:] or ["failed"]
            answer, text = said[0] if ended.returncode == 0 else "failed", ended.stderr[-2000:]
        except subprocess.TimeoutExpired:
            answer, text = "failed", "it has not ended after 300 seconds"
        counts[answer] += 1
        print(f"{answer:<9} {name}", flush=True)
        if answer == "failed":
            print(text)
    left = sum(bool(why) for _, why in rows)
    print(f"{counts['well']} well, {counts['skipped']} skipped by themselves, {counts['failed']} failed, {left} left out")
    # A file in which nothing is found is none of PyTorch's.
    return 0 if counts["well"] and not counts["failed"] else 1


if __name__ == "__main__":
    if sys.argv[2:] == ["--list"]:
        for known in sorted(loaded(sys.argv[1])):
            print(f"{known}\t{reason(known) or ''}")
    elif len(sys.argv) == 3:
        sys.exit(one(*sys.argv[1:]))
    else:
        sys.exit(each(sys.argv[1]))
