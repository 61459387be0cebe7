"""PyTorch's own tests of memory, streams and CUDA graphs, with cualloc as its allocator, on a GPU.

    gpu_pytorch_tests.py TEST_CUDA_PY                   all of them, each a process of its own; exit code 0 if none failed
    gpu_pytorch_tests.py TEST_CUDA_PY --jobs N          so many at a time (6)
    gpu_pytorch_tests.py TEST_CUDA_PY NAME [--native]   one, CLASS.METHOD, in this process; with PyTorch's own allocator
    gpu_pytorch_tests.py TEST_CUDA_PY --list            what would be run, and what is left out, with the reason

TEST_CUDA_PY is test/test_cuda.py of the sources of the PyTorch that is installed, which are not in its package. It needs
what that needs: psutil, expecttest, hypothesis. Of TestCuda and TestCudaMallocAsync all are run, of other classes those
about graphs, but for those of LEFT_OUT. One that fails is run with PyTorch's own allocator, too: if it fails there as
well, it says nothing of ours, and is counted apart.
"""

import importlib.util
import itertools
import os
import subprocess
import sys
import unittest
from concurrent.futures import ThreadPoolExecutor

_FIGURES = "compares with the figures of segments that PyTorch's own allocator makes"
_SNAPSHOT = "asks for stacks or settings in a snapshot of PyTorch's own allocator"
_SETTINGS = "sets PyTorch's own allocator otherwise, or turns it off, and asks what it makes of that"
_ELSEWHERE = "is not about memory"

# By the beginning of CLASS.METHOD, the longest one counts.
LEFT_OUT = {
    "": _ELSEWHERE,
    "TestCuda.": None,
    "TestCuda.test_graph_memory_stats_and_use_result_after_destroy_graph": _FIGURES,
    "TestCuda.test_memory_stats_of_multiple_generators_and_graphs": _FIGURES,
    "TestCuda.test_cuda_graph_allocator_propagates_stream": _SNAPSHOT,
    "TestCuda.test_repeat_graph_capture_cublas_workspace_memory": "counts what other processes hold, too: "
    "gpu_graphs.py workspaces_do_not_pile_up asks the same of cualloc's own figures",
    "TestCuda.test_memory_stats": _FIGURES,
    "TestCuda.test_graph_two_successive": _FIGURES,
    "TestCuda.test_record_stream": "asks, at its end, that a block is at once where PyTorch's own allocator would put it",
    "TestCudaMallocAsync.": None,
    "TestCudaMallocAsync.test_cycles": "asks for stacks that PyTorch's own allocator takes",
    "TestCudaMallocAsync.test_memory_": _SNAPSHOT,
    "TestCudaMallocAsync.test_cpp_memory_snapshot": _SNAPSHOT,
    "TestCudaMallocAsync.test_allocator_settings": _SETTINGS,
    "TestCudaMallocAsync.test_allocator_backend": _SETTINGS,
    "TestCudaMallocAsync.test_cachingAllocator_raw_alloc": _SETTINGS,
    "TestBlockStateAbsorption.": None,
    "TestMemPool.": None,
    "TestCachingHostAllocatorCudaGraph.": "is about page-locked memory, which stays PyTorch's own",
}
# Those that fill the device, or look at what is free there, run when no other does.
ALONE = ("out_of_memory", "_oom", "fraction", "_expandable", "device_memory_used", "large", "huge", "overflow")


def reason(name):
    """Why a test is left out; none if it is not."""
    known = max((known for known in LEFT_OUT if name.startswith(known)), key=len)
    about_graphs = "graph" in name.partition(".")[2] or "CudaGraph" in name
    return None if known == "" and about_graphs else LEFT_OUT[known]


def loaded(path, native=False):
    """All tests of the file, by CLASS.METHOD."""
    if not native:
        import cualloc.torch

        cualloc.torch.install()
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
    spec = importlib.util.spec_from_file_location("test_cuda", path)
    module = sys.modules["test_cuda"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    tests = {}
    for kind in vars(module).values():
        if isinstance(kind, type) and issubclass(kind, unittest.TestCase) and kind.__module__ == "test_cuda":
            for method in unittest.TestLoader().getTestCaseNames(kind):
                tests[f"{kind.__name__}.{method}"] = kind(method)
    return tests


def one(path, name, native):
    outcome = unittest.TextTestRunner(verbosity=2).run(loaded(path, native)[name])
    if not native:
        import cualloc.torch

        try:
            cualloc.torch.check()
        except cualloc.Error as error:
            print(error, file=sys.stderr)
            print("unsound")
            return 1
    print("skipped" if outcome.skipped else "well" if outcome.wasSuccessful() else "failed")
    return 0 if outcome.wasSuccessful() else 1


def outcome(path, name, *more):
    """What a process that runs one test says of it, and its last words."""
    command = [sys.executable, __file__, path, name, *more]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    except subprocess.TimeoutExpired:
        return "failed", "it has not ended after 300 seconds"
    said = ended.stdout.split()[-1:] or ["failed"]
    answer = said[0] if ended.returncode == 0 or said == ["unsound"] else "failed"
    return answer, ended.stderr[-2000:]


def judged(path, name):
    return name, *outcome(path, name)


def each(path, jobs):
    listed = subprocess.run([sys.executable, __file__, path, "--list"], capture_output=True, text=True, check=True)
    rows = [line.split("\t") for line in listed.stdout.splitlines() if "\t" in line]
    counts = {"well": 0, "skipped": 0, "failed": 0, "native": 0, "unsound": 0}
    for name, why in rows:
        if why and why != _ELSEWHERE:
            print(f"left out  {name}: {why}")
    wanted = [name for name, why in rows if not why]
    alone = [name for name in wanted if any(part in name for part in ALONE)]
    with ThreadPoolExecutor(jobs) as pool:
        beside = pool.map(lambda name: judged(path, name), sorted(set(wanted) - set(alone)))
        # What is beside others may fail for want of memory or time, so it is all done before anything is tried again.
        for name, answer, text in itertools.chain(list(beside), (judged(path, name) for name in alone)):
            if answer == "failed" and outcome(path, name, "--native")[0] == "failed":
                answer = "native"
            counts[answer] += 1
            words = "fails with PyTorch's own allocator, too:" if answer == "native" else f"{answer:<9}"
            print(words, name, flush=True)
            if answer in ("failed", "unsound"):
                print(text)
    left = [why for _, why in rows if why]
    print(
        f"{counts['well']} well, {counts['skipped']} skipped by themselves, {counts['failed']} failed, "
        f"{counts['unsound']} left the allocator unsound, "
        f"{counts['native']} fail with PyTorch's own, too; left out: {len(left) - left.count(_ELSEWHERE)} for the "
        f"reasons above, {left.count(_ELSEWHERE)} that are not about memory"
    )
    # A file in which nothing is found is none of PyTorch's.
    return 0 if counts["well"] and not counts["failed"] + counts["unsound"] else 1


if __name__ == "__main__":
    file, named = sys.argv[1], sys.argv[2:]
    if named == ["--list"]:
        for known in sorted(loaded(file)):
            print(f"{known}\t{reason(known) or ''}")
    elif named and not named[0].startswith("--"):
        sys.exit(one(file, named[0], named[1:] == ["--native"]))
    else:
        sys.exit(each(file, int(named[1]) if named[:1] == ["--jobs"] else 6))
