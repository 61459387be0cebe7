#!/usr/bin/env python3
"""Packs a wheel: wheel.py FOLDER VERSION PLATFORM OUT, of the package `cualloc` that is in the folder.

The same files give the same wheel, byte by byte.
"""

import base64
import hashlib
import os
import sys
import zipfile

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
LARGEST = 8 << 20
REPOSITORY = "https://github.com/cualloc/cualloc"
URLS = {
    "Repository": REPOSITORY,
    "Documentation": f"{REPOSITORY}/tree/main/docs/clients",
    "Changelog": f"{REPOSITORY}/blob/main/CHANGELOG.md",
    "Issues": f"{REPOSITORY}/issues",
}
CLASSIFIERS = (
    "Development Status :: 4 - Beta",
    "Environment :: GPU :: NVIDIA CUDA",
    "Intended Audience :: Developers",
    "Operating System :: POSIX :: Linux",
    "Programming Language :: Python :: 3",
    "Programming Language :: Rust",
    "Topic :: Scientific/Engineering :: Artificial Intelligence",
    "Typing :: Typed",
)


def metadata(version):
    with open(os.path.join(ROOT, "python", "README.md"), encoding="utf-8") as file:
        description = file.read()
    return (
        "Metadata-Version: 2.4\n"
        "Name: cualloc\n"
        f"Version: {version}\n"
        "Summary: A caching allocator of GPU memory for PyTorch, CuPy, RAPIDS and NumPy\n"
        "Author: The cualloc developers\n"
        "Keywords: cuda,gpu,memory,allocator,pytorch,cupy,rmm,numpy,dlpack\n"
        "License-Expression: MIT OR Apache-2.0\n"
        "License-File: LICENSE-APACHE\n"
        "License-File: LICENSE-MIT\n"
        "Requires-Python: >=3.9\n"
        + "".join(f"Classifier: {name}\n" for name in CLASSIFIERS)
        + "".join(f"Project-URL: {label}, {url}\n" for label, url in URLS.items())
        + "Description-Content-Type: text/markdown\n"
        f"\n{description}"
    )


def main(folder, version, platform, out):
    tag = f"py3-none-{platform}"
    about = f"cualloc-{version}.dist-info"
    files = {}
    for name in sorted(os.listdir(os.path.join(folder, "cualloc"))):
        with open(os.path.join(folder, "cualloc", name), "rb") as file:
            files[f"cualloc/{name}"] = file.read()
    files["cualloc/_version.py"] = f'__version__ = "{version}"\n'.encode()
    for name in ("LICENSE-APACHE", "LICENSE-MIT"):
        with open(os.path.join(ROOT, name), "rb") as file:
            files[f"{about}/licenses/{name}"] = file.read()
    files[f"{about}/METADATA"] = metadata(version).encode()
    files[f"{about}/entry_points.txt"] = b"[vllm.general_plugins]\ncualloc = cualloc.vllm:register\n"
    wheel = f"Wheel-Version: 1.0\nGenerator: cualloc\nRoot-Is-Purelib: false\nTag: {tag}\n"
    files[f"{about}/WHEEL"] = wheel.encode()
    record = f"{about}/RECORD"
    rows = []
    for name, content in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        rows.append(f"{name},sha256={digest},{len(content)}\n")
    files[record] = "".join([*rows, f"{record},,\n"]).encode()

    path = os.path.join(out, f"cualloc-{version}-{tag}.whl")
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            entry = zipfile.ZipInfo(name)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = (0o755 if name.endswith(".so") else 0o644) << 16
            archive.writestr(entry, content)
    size = os.path.getsize(path)
    print(f"{path}: {size / 1048576:.2f} MiB")
    if size > LARGEST:
        sys.exit(f"that is more than {LARGEST >> 20} MiB")


if __name__ == "__main__":
    main(*sys.argv[1:])
