"""Captures as PyTorch makes them: what it calls, and in which order."""

import ctypes
import itertools
import threading

from torch import _C

# The simulated driver and the C++ part (fake_graphs.cpp), of which tests say where they are.
driver = fake = None
# The stream that is current on each thread, a handle.
current = threading.local()

_ids = itertools.count(1)
_GLOBAL, _THREAD_LOCAL = 0, 1


def graph_pool_handle():
    return (0, next(_ids))


def done(code, what):
    if code != 0:
        raise RuntimeError(f"CUDA error {code}: {what}")


class CUDAGraph:
    # What is done for a capture that fails: nothing, its end (PyTorch 2.12), or its end and the pool's release when the
    # graph is reset or goes (2.14).
    ends_failures, releases_failures = False, False
    allocated = capturing = False
    # Hooks behind the beginning and the end of a capture.
    has_begun = has_ended = staticmethod(lambda: None)

    def __init__(self):
        self.made, self.exec, self.ended = ctypes.c_void_p(fake.fake_graph_new()), ctypes.c_void_p(), False
        self.stream = ctypes.c_void_p(current.stream)

    def capture_begin(self, pool=None, capture_error_mode="global", device=0):
        self.stream, self.device, self.id = ctypes.c_void_p(current.stream), device, pool or (next(_ids), 0)
        text = ctypes.create_string_buffer(4096)
        hook = _C.current.functions["set_begin_allocate_to_pool"]
        if fake.fake_graph_begin(self.made, hook, device, *map(ctypes.c_uint64, self.id), text, ctypes.c_size_t(4096)):
            raise RuntimeError(text.value.decode())
        self.allocated = self.capturing = self.releases_failures
        done(driver.cuStreamBeginCapture_v2(self.stream, _THREAD_LOCAL), "begin")
        done(fake.fake_graph_captures(self.made, self.stream), "info")
        self.has_begun()

    def capture_end(self):
        if current.stream != self.stream.value:
            raise RuntimeError("Capture must end on the same stream it began on.")
        made = ctypes.c_void_p()
        code = driver.cuStreamEndCapture(self.stream, ctypes.byref(made))
        if code == 0 or self.ends_failures:
            self.stop()
        done(code, "end")
        self.ended = self.allocated = True
        self.has_ended()
        done(driver.cuGraphInstantiateWithFlags(ctypes.byref(self.exec), made, ctypes.c_uint64(0)), "instantiate")
        done(driver.cuGraphDestroy(made), "destroy")

    def stop(self):
        _C.current.functions["set_end_allocate_to_pool_fn"](self.device, _C.PoolId(*self.id))
        self.capturing = False

    def pool(self):
        assert self.ended
        return self.id

    def replay(self):
        done(driver.cuGraphLaunch(self.exec, self.stream), "launch")

    def reset(self):
        if self.capturing:
            self.stop()
        if self.allocated:
            _C.current.functions["set_release_pool"](self.device, _C.PoolId(*self.id))
        if self.exec:
            done(driver.cuGraphExecDestroy(self.exec), "destroy")
            self.exec = ctypes.c_void_p()
        self.ended = self.allocated = False

    def __del__(self):
        self.reset()
        fake.fake_graph_delete(self.made)


class graph:
    def __init__(self, made, pool=None):
        self.made, self.pool = made, pool

    def __enter__(self):
        _C._cuda_emptyCache()
        self.made.capture_begin(self.pool)

    def __exit__(self, *_):
        self.made.capture_end()
