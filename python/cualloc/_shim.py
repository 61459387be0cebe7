"""The subclass of PyTorch's allocator class, as a library that fits one build of PyTorch.

PyTorch's class changes with its versions, so the library is compiled against the headers of the installed PyTorch. The
cache keeps it under PyTorch's version and the contents of the source and of the class's headers. A library that was
built with the package, for the same git version of PyTorch, is used first, if its class is that of the loaded PyTorch.
"""

import contextlib
import ctypes
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import tempfile
import warnings

import torch

_HERE = os.path.dirname(os.path.abspath(__file__))
_SOURCE = os.path.join(_HERE, "torch_allocator.cpp")
_HEADERS = [os.path.join(_HERE, name) for name in ("torch_history.h", "torch_table.h", "cualloc.h")]
_LIBRARY = os.path.join(_HERE, "libcualloc.so")
# The first version whose class torch_allocator.cpp is written for.
_OLDEST = (2, 9)
# The headers that define PyTorch's class.
_CLASS = ("c10/core/Allocator.h", "c10/cuda/CUDACachingAllocator.h", "torch/csrc/cuda/CUDAPluggableAllocator.h")
# A compiler that hangs must not stop the program.
_SECONDS = 300


class Unavailable(Exception):
    """Why there is no library for this PyTorch."""


def load():
    """Returns the library for the installed PyTorch, which is compiled if there is none yet; raises Unavailable."""
    version = re.match(r"(\d+)\.(\d+)", torch.__version__)
    if version is None or tuple(map(int, version.groups())) < _OLDEST:
        raise Unavailable(f"PyTorch {torch.__version__} is older than {_OLDEST[0]}.{_OLDEST[1]}")
    if getattr(torch.version, "hip", None):
        raise Unavailable("PyTorch is built for ROCm")
    built = _built()
    # PyTorch has no git version where it was built from an archive.
    if torch.version.git_version not in (None, "Unknown") and os.path.exists(built):
        library, why = _loaded(built)
        if library is not None:
            return library
        warnings.warn(f"{built} does not fit PyTorch {torch.__version__}: {why}", RuntimeWarning, stacklevel=4)
    path = _compiled()
    library, why = _loaded(path)
    if library is None:
        raise Unavailable(f"{path} does not fit PyTorch {torch.__version__}: {why}")
    return library


def _built():
    """Returns the path of the library for this PyTorch that may have been built with the package."""
    return os.path.join(_HERE, _name(""))


def _loaded(path):
    """Loads a library, and returns it, or None and why it does not fit the loaded PyTorch."""
    try:
        library = ctypes.CDLL(path)
        library.cualloc_torch_mismatch.restype = ctypes.c_char_p
        why = library.cualloc_torch_mismatch()
    except (OSError, AttributeError) as error:
        return None, str(error)
    return (library, None) if why is None else (None, why.decode(errors="replace"))


def _name(suffix):
    """Returns the library's file name. PyTorch's git version and the ABI of its strings identify the class."""
    strings = "cxx11" if torch._C._GLIBCXX_USE_CXX11_ABI else "old"
    return f"torch-{torch.version.git_version}-{strings}{suffix}.so"


def _compiled():
    """Returns the path of the library in the cache, which is compiled if it is not there."""
    key = hashlib.sha256(f"{torch.__version__} {torch.version.cuda}".encode())
    headers = os.path.join(os.path.dirname(os.path.abspath(torch.__file__)), "include")
    for path in (_SOURCE, *_HEADERS, *(os.path.join(headers, name) for name in _CLASS)):
        try:
            with open(path, "rb") as file:
                key.update(file.read())
        except OSError as error:
            raise Unavailable(f"cannot read {path}: {error.strerror}") from None
    path = os.path.join(_cache(), _name(f"-{key.hexdigest()[:16]}"))
    if not os.path.exists(path):
        build(_SOURCE, path, _LIBRARY)
    return path


def _cache():
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(home, "cualloc")


def build(source, path, *libraries):
    """Compiles a library from `source` and `libraries` against the installed PyTorch; raises Unavailable."""
    compiler = shlex.split(os.environ.get("CXX") or "g++")
    if not compiler or shutil.which(compiler[0]) is None:
        raise Unavailable("there is no C++ compiler (g++, or the one that CXX names)")
    root = os.path.dirname(os.path.abspath(torch.__file__))
    includes = [_HERE, os.path.join(root, "include"), os.path.join(root, "include/torch/csrc/api/include")]
    includes += _cuda_headers(root)
    command = [*compiler, "-std=c++20", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-w"]
    command += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"]
    command += [f"-isystem{include}" for include in includes]
    command += [source, *libraries, f"-L{os.path.join(root, 'lib')}", "-ltorch_cuda", "-lc10_cuda", "-lc10"]
    command += ["-Wl,-z,nodelete"]
    # The CUDA runtime is loaded with PyTorch.
    command += ["-Wl,--unresolved-symbols=ignore-all", "-Wl,--allow-shlib-undefined"]
    failed = _Failed(f"{path}.failed", compiler[0], command)
    failed.ensure_not_repeated()
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with tempfile.TemporaryDirectory(dir=os.path.dirname(path)) as folder:
            made = os.path.join(folder, "made.so")
            ended = subprocess.run([*command, "-o", made], capture_output=True, text=True, timeout=_SECONDS)
            if ended.returncode == 0:
                # Other processes may compile it, too: the last one's is as good as the first one's.
                return os.replace(made, path)
        first = next((line for line in ended.stderr.splitlines() if "error" in line), ended.stderr[:200])
        # A compiler that was ended by a signal may succeed next time.
        raise failed.remember(f"{compiler[0]} cannot compile {source}: {first.strip()}", ended.returncode > 0)
    except subprocess.TimeoutExpired:
        raise failed.remember(f"{compiler[0]} did not compile {source} in {_SECONDS} s") from None
    except (OSError, subprocess.SubprocessError) as error:
        raise Unavailable(f"cannot compile {source}: {error}") from None


class _Failed:
    """A file that stores why a compilation failed, so that not every process repeats it. It holds for the command and
    the compiler's file; the library's path stands for the sources."""

    def __init__(self, path, compiler, command):
        found = os.path.realpath(shutil.which(compiler))
        self._path = path
        self._key = [command, found, os.stat(found).st_mtime_ns]

    def ensure_not_repeated(self):
        """Raises Unavailable if the same compilation has failed before."""
        try:
            with open(self._path, encoding="utf-8") as file:
                known = json.load(file)
            if known["key"] == self._key:
                raise Unavailable(f"{known['why']} (stored in {self._path}; delete the file to compile again)")
        except (OSError, ValueError, KeyError, TypeError):
            pass

    def remember(self, why, lasting=True):
        """Stores a reason that lasts, and returns it as an exception."""
        if lasting:
            written = f"{self._path}.{os.getpid()}"
            with contextlib.suppress(OSError):
                with open(written, "w", encoding="utf-8") as file:
                    json.dump({"why": why, "key": self._key}, file)
                os.replace(written, self._path)
        return Unavailable(why)


def _cuda_headers(root):
    """Returns the existing folders of CUDA headers, of wheels that PyTorch depends on first and of toolkits last;
    raises Unavailable if none has the CUDA runtime's header."""
    site = os.path.dirname(root)
    places = [os.path.join(site, "nvidia", part, "include") for part in ("cu13", "cuda_runtime", "cuda_crt")]
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    places += [os.path.join(home, "include") for home in homes if home]
    found = [place for place in places if os.path.isdir(place)]
    if not any(os.path.exists(os.path.join(place, "cuda_runtime_api.h")) for place in found):
        raise Unavailable("there are no headers of the CUDA runtime: install nvidia-cuda-runtime, or set CUDA_HOME")
    return found
