"""Where the compiled kernel is and how it is built: ``python -m gaff.training.statistics.kernel``, for this machine."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from gaff.errors import GaffError

SOURCE = Path(__file__).with_name("kernel.cpp")
PACKED = Path(__file__).with_name("libobserve.so")  # in wheels; for processors with AVX2
_FLAGS = ("-O3", "-fno-trapping-math", "-std=c++17", "-fPIC", "-shared", "-DTORCH_TARGET_VERSION=0x020a000000000000")
_OFF = "GAFF_NO_KERNEL"


@lru_cache
def load() -> Any:
    """Something with ``observe_``, ``observe_many_``, ``observe_units_`` for CPU tensors; None where nothing is built.

    Loads the library into this process and registers its ops with torch's dispatcher.
    """
    if os.environ.get(_OFF):
        return None
    built = path_of_build()
    found = built if built.is_file() else PACKED if PACKED.is_file() and _has_wide_registers() else None
    if found is None or (found is built and not _is_ours(built)):
        return None
    import torch

    try:
        torch.ops.load_library(str(found))
    except OSError:  # of another platform or torch: plain torch counts the same
        return None
    return SimpleNamespace(**{name: _op(name) for name in ("observe_", "observe_many_", "observe_units_")})


@lru_cache
def _op(name: str) -> Any:
    """One of the loaded ops, known to tracing; which torch wants to hear once in a process."""
    import torch

    torch.library.register_fake(f"gaff::{name}", lambda *arguments: None)
    return getattr(torch.ops.gaff, name).default


def build() -> Path:
    """Compile the kernel for this machine's processor, into the user's cache; about five seconds.

    Raises GaffError where there is no compiler or it fails.
    """
    target = path_of_build()
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise GaffError("no C++ compiler found: expected c++, g++ or clang++, or its path in CXX")
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    compile_to(target, compiler, _native())
    load.cache_clear()
    return target


def compile_to(target: Path, compiler: str, machine: str) -> None:
    """Written beside and renamed: a second process that does the same harms nobody."""
    import torch

    root = Path(torch.__file__).parent
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder) / target.name
        libraries = ["-L" + str(root / "lib"), "-ltorch_cpu", "-ltorch"]
        command = [compiler, *_FLAGS, machine, f"-I{root / 'include'}", str(SOURCE), "-o", str(made), *libraries]
        done = subprocess.run([one for one in command if one], capture_output=True, text=True, check=False)
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if "error" in line] or ["no message"]
            raise GaffError(f"{compiler} failed with exit code {done.returncode}: {lines[0][:300]}")
        os.replace(made, target)


def path_of_build() -> Path:
    """Of this source on this processor."""
    cache = os.environ.get("GAFF_CACHE") or os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    key = "\n".join((SOURCE.read_text(), *_FLAGS, platform.machine(), _processor(), sys.platform))
    return Path(cache) / "gaff" / f"kernel-{hashlib.sha256(key.encode()).hexdigest()[:16]}.so"


def _native() -> str:
    return "-march=native" if platform.machine().lower() in ("x86_64", "amd64") else "-mcpu=native"


def _is_ours(path: Path) -> bool:
    """Whether nobody else can have written it."""
    found = path.stat()
    return not hasattr(os, "getuid") or (found.st_uid in (os.getuid(), 0) and not found.st_mode & 0o022)


@lru_cache
def _processor() -> str:
    """Its model and what it can do, as far as the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(wanted)))


def _has_wide_registers() -> bool:
    return platform.machine().lower() not in ("x86_64", "amd64") or " avx2 " in _processor()


if __name__ == "__main__":
    sys.stdout.write(f"{build()}\n")
