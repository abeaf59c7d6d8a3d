# Copyright 2026 The transformers-titans authors.
# SPDX-License-Identifier: Apache-2.0
"""Compiles the C++ of this folder for this machine, on first use, and keeps the result on disk.

The libraries know neither Python nor PyTorch: they take raw pointers through ctypes, so a C++ compiler is all that is
needed.
"""

import array
import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path

import torch


logger = logging.getLogger(__name__)

# Threads of their own, no OpenMP: PyTorch's own would be a second one in the process, or a different one.
FLAGS = ("-O3", "-std=c++17", "-shared", "-fPIC", "-pthread", "-fno-math-errno", "-fno-trapping-math")


@functools.cache
def native_library(source: str, *defines: str) -> ctypes.CDLL:
    """A compiled library, built if it is not kept from an earlier run.

    Args:
        source: name of its C++ file.
        defines: names of macros to define.

    Raises:
        ImportError: there is no C++ source beside this file, as in a checkpoint's remote code, or no C++ compiler.
        RuntimeError: the compiler fails.
    """
    folder = Path(__file__).parent
    if not (folder / source).is_file():
        raise ImportError(
            f'backend="native" needs {source} beside {Path(__file__).name}, and a checkpoint carries Python alone: '
            'install the package transformers-titans, or take backend="chunked"'
        )
    compiler = _compiler()
    command = [*compiler, *FLAGS, *_machine_flags(), *(f"-D{name}" for name in defines)]
    library = _cache_folder() / f"{Path(source).stem}_{_digest(command, folder / source)}.so"
    if not library.is_file():
        logger.warning(f"Compiling {source} into {library}; this happens once and takes about ten seconds")
        _build([*command, str(folder / source)], library)
    return ctypes.CDLL(str(library))


def pointers(tensors: Iterable[torch.Tensor | None]) -> ctypes.Array:
    """Where the tensors' numbers lie, null for None; the tensors themselves are the caller's to keep."""
    addresses = array.array("Q", [0 if t is None else t.data_ptr() for t in tensors])
    # Made from the list of addresses itself, ctypes would take four times as long.
    return (ctypes.c_void_p * len(addresses)).from_buffer(addresses)


def _compiler() -> list[str]:
    """The command $CXX, or the first of the usual compilers that is installed."""
    command = shlex.split(os.environ.get("CXX", ""))
    for candidate in [command] if command else (["c++"], ["g++"], ["clang++"]):
        if shutil.which(candidate[0]):
            return candidate
    missing = f"$CXX, {command[0]!r}, is not" if command else "neither c++, g++ nor clang++ is"
    raise ImportError(
        f'backend="native" compiles C++ on first use, and {missing} on PATH: install a C++17 compiler (Debian and '
        'Ubuntu: apt install g++; macOS: xcode-select --install), or take backend="chunked"'
    )


def _machine_flags() -> list[str]:
    return ["-mcpu=native"] if platform.machine() in ("arm64", "aarch64") else ["-march=native"]


def _cache_folder() -> Path:
    """Where torch keeps extensions that are built on first use."""
    root = os.environ.get("TORCH_EXTENSIONS_DIR")
    if root is None:
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torch_extensions"
    return Path(root) / "transformers_titans"


def _digest(command: list[str], source: Path) -> str:
    """Of the sources, the command and what the compiler says of itself and of this machine's processor."""
    macros = subprocess.run([*command, "-dM", "-E", "-x", "c++", os.devnull], capture_output=True)
    digest = hashlib.sha256(repr(command).encode() + macros.stdout)
    for path in sorted([source, *source.parent.glob("native_*.h")]):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:20]


def _build(command: list[str], library: Path) -> None:
    library.parent.mkdir(parents=True, exist_ok=True)
    # Built aside and moved into place: processes that start together must not load half a library.
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        built = Path(folder) / library.name
        run = subprocess.run([*command, "-o", str(built)], capture_output=True, text=True)
        if run.returncode:
            raise RuntimeError(
                f"compiling {Path(command[-1]).name} failed: {shlex.join(command)}\n{run.stderr[-4000:]}"
            )
        built.replace(library)
