"""`cualloc.Buffer` with NumPy, PyTorch and CuPy on a GPU: gpu_buffer.py [NAME]...

Prints a line for each case; exit code 1 if one failed. Without names it runs all cases; --list names them."""

import gc
import subprocess
import sys
import time
import traceback

import cualloc
from cualloc import _library

MIB = 1 << 20
CASES = {}


class Skipped(Exception):
    pass


def case(function):
    CASES[function.__name__] = function
    return function


def library(name):
    try:
        return __import__(name)
    except ImportError:
        raise Skipped(f"{name} is not installed") from None


def live():
    gc.collect()
    return _library.stats(0).requested.current


@case
def numpy_both_ways():
    np = library("numpy")
    rates = []
    for count in (1, 1000, 1 << 20, 1 << 28):
        array = np.arange(count, dtype=np.float32)
        buffer = cualloc.Buffer(array.nbytes).view("float32", array.shape)
        begun = time.monotonic()
        buffer.copy_from(array)
        middle = time.monotonic()
        back = buffer.to_numpy()
        rates = [array.nbytes / 1e9 / took for took in (middle - begun, time.monotonic() - middle)]
        assert np.array_equal(back, array)
    assert np.array_equal(np.from_dlpack(buffer, device="cpu"), array)
    try:
        np.from_dlpack(buffer)
    except (BufferError, RuntimeError) as error:
        assert "nsupported device" in str(error), error
    else:
        raise AssertionError("NumPy takes memory of a device")
    return f"1 GiB to the device at {rates[0]:.1f} GB/s, and back at {rates[1]:.1f} GB/s"


@case
def torch_takes_a_buffer():
    torch = library("torch")
    buffer = cualloc.Buffer(64 * MIB, stream=torch.cuda.current_stream()).view(torch.float32, (4096, 4096))
    tensor = torch.from_dlpack(buffer)
    assert tensor.data_ptr() == buffer.ptr and tensor.shape == (4096, 4096) and tensor.dtype == torch.float32
    tensor.copy_(torch.arange(1 << 24, device="cuda").view(4096, 4096))
    buffer.free()
    assert live() == 64 * MIB and float(tensor[4095, 4095]) == (1 << 24) - 1
    del tensor
    assert live() == 0
    halves = cualloc.Buffer(1 << 20).view("bfloat16")
    assert torch.from_dlpack(halves).fill_(2).sum() == 1 << 20
    for kind in (torch.uint8, torch.int64, torch.float64, torch.complex64, torch.bool, torch.float8_e4m3fn):
        assert torch.from_dlpack(cualloc.Buffer(1 << 20).view(kind)).dtype == kind, kind


@case
def a_buffer_takes_a_tensor():
    torch = library("torch")
    before = torch.cuda.memory_allocated()
    tensor = torch.arange(1 << 22, dtype=torch.int32, device="cuda") * 3
    buffer = cualloc.from_dlpack(tensor)
    assert (buffer.ptr, buffer.dtype, buffer.shape) == (tensor.data_ptr(), "int32", (1 << 22,))
    del tensor
    back = bytearray(buffer.nbytes)
    buffer.copy_to(back)
    assert int.from_bytes(back[-4:], "little") == 3 * ((1 << 22) - 1)
    assert torch.cuda.memory_allocated() == before + (16 << 20)
    again = torch.from_dlpack(buffer)
    buffer.free()
    assert int(again[5]) == 15
    del again
    gc.collect()
    assert torch.cuda.memory_allocated() == before
    for wrong in (torch.zeros(4, 4, device="cuda").t()[1:], torch.zeros(3)):
        try:
            cualloc.from_dlpack(wrong)
        except BufferError:
            continue
        raise AssertionError("a tensor that is not contiguous, or on the host, was taken")


@case
def cupy_both_ways():
    cupy = library("cupy")
    buffer = cualloc.Buffer(4 * MIB).view("float32")
    for array in (cupy.from_dlpack(buffer), cupy.asarray(buffer)):
        assert array.data.ptr == buffer.ptr and array.dtype == cupy.float32 and array.shape == (MIB,)
        array[:] = cupy.arange(MIB, dtype=cupy.float32)
        cupy.cuda.get_current_stream().synchronize()
        back = bytearray(buffer.nbytes)
        buffer.copy_to(back)
        assert back == cupy.asnumpy(array).tobytes()
    del array, buffer
    assert live() == 0
    values = cupy.arange(1000, dtype=cupy.int64)
    taken = cualloc.from_dlpack(values)
    assert taken.ptr == values.data.ptr and int(taken.to_numpy()[-1]) == 999
    side = cupy.cuda.Stream(non_blocking=True)
    with side:
        moved = cupy.from_dlpack(cualloc.Buffer.from_numpy(back)) + 1
    side.synchronize()
    assert cupy.asnumpy(moved)[:4].tolist() == [byte + 1 for byte in back[:4]]


@case
def streams_wait_for_each_other():
    torch = library("torch")
    mine, theirs = torch.cuda.Stream(), torch.cuda.Stream()
    for turn in range(20):
        buffer = cualloc.Buffer(64 * MIB, stream=mine).view("int32")
        with torch.cuda.stream(mine):
            tensor = torch.from_dlpack(buffer)
            torch.cuda._sleep(20_000_000)
            tensor.fill_(turn)
        with torch.cuda.stream(theirs):
            # PyTorch names the current stream, which waits.
            assert int(torch.from_dlpack(buffer).sum()) == turn * (16 << 20), turn
        # Memory is not reused while the other stream works on it.
        with torch.cuda.stream(theirs):
            late = torch.from_dlpack(buffer)
            torch.cuda._sleep(20_000_000)
            total = late.sum()
        buffer.free()
        del tensor, late
        other = cualloc.Buffer(64 * MIB, stream=mine)
        with torch.cuda.stream(mine):
            torch.from_dlpack(other).fill_(255)
        with torch.cuda.stream(theirs):
            assert int(total) == turn * (16 << 20), turn
        other.free()
    torch.cuda.synchronize()
    assert live() == 0


@case
def out_of_memory_is_a_memory_error():
    kept = cualloc.Buffer(512 * MIB)
    try:
        cualloc.Buffer(1 << 39)
    except MemoryError as error:
        assert isinstance(error, cualloc.OutOfMemory) and "holder" in str(error), error
    else:
        raise AssertionError("512 GiB were allocated")
    kept.copy_from(bytes(kept.nbytes))
    kept.free()
    assert live() == 0


@case
def another_process_opens_it():
    buffer = cualloc.Buffer(64 * MIB)
    buffer.copy_from(b"\7" * buffer.nbytes)
    program = """if True:
        import sys, cualloc
        buffer = cualloc.Buffer.open_shared(sys.argv[1])
        back = bytearray(buffer.nbytes)
        buffer.copy_to(back)
        assert back == b"\\7" * len(back)
        buffer.copy_from(b"\\5" * len(back))
    """
    subprocess.run([sys.executable, "-c", program, buffer.share()], check=True, timeout=60)
    back = bytearray(buffer.nbytes)
    buffer.copy_to(back)
    assert back == b"\5" * len(back)


@case
def a_program_ends_with_live_capsules():
    library("torch")
    program = """if True:
        import builtins, ctypes, cualloc, torch
        buffer = cualloc.Buffer(1 << 20)
        tensors = [torch.from_dlpack(buffer), torch.from_dlpack(cualloc.from_dlpack(torch.zeros(10, device="cuda")))]
        builtins.kept = [buffer.__dlpack__(), buffer.__dlpack__(max_version=(1, 0)), torch.from_dlpack(buffer)]
        cycle = [cualloc.from_dlpack(torch.zeros(10, device="cuda"))]
        cycle.append(cycle)
    """
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100)
    assert (ended.returncode, ended.stderr) == (0, ""), ended


@case
def threads_release_tensors():
    torch = library("torch")
    import threading

    buffer, wrong = cualloc.Buffer(MIB), []

    def work():
        try:
            for _ in range(500):
                tensor = torch.from_dlpack(buffer)
                back = cualloc.from_dlpack(tensor)
                del tensor
                assert back.ptr == buffer.ptr
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong
    buffer.free()
    assert live() == 0


def main():
    if sys.argv[1:] == ["--list"]:
        print(*CASES, sep="\n")
        return 0
    failures = 0
    for name in sys.argv[1:] or CASES:
        try:
            print(f"{name}: {CASES[name]() or 'well'}", flush=True)
            _library.check(0)
        except Skipped as why:
            print(f"{name}: SKIPPED: {why}", flush=True)
        except BaseException:
            failures += 1
            print(f"{name}: FAILED", flush=True)
            traceback.print_exc()
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
