"""Where the compiled kernel is and how it is built: ``python -m gaff.training.statistics.kernel``, for this machine.

``kernel.cpp`` is built against torch's stable ABI, so one build serves every torch from 2.10 on. A build of this
machine (in the user's cache) comes before the one in the wheel. ``GAFF_NO_KERNEL=1`` switches both off. torch is
imported only when a library is loaded or built.
"""

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
    """The kernel's ops for CPU tensors, ``observe_``, ``observe_many_``, ``observe_units_``; None without a build.

    Loads the library into this process and registers its ops with torch's dispatcher, once: the answer is kept. A build
    in the cache that another user could have written is not loaded, and a library that does not fit this torch or
    platform is passed over. The ops take the arguments of the functions of ``plain``.
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
    """One of the loaded ops, with the shape function that torch asks for before it lets compiled code call an op."""
    import torch

    torch.library.register_fake(f"gaff::{name}", lambda *arguments: None)
    return getattr(torch.ops.gaff, name).default


def build() -> Path:
    """Compile the kernel for this machine's processor, into the user's cache; takes about five seconds.

    Returns the library's path; a later ``load`` finds it. ``CXX`` names another compiler than the first that is found.
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
    """Compile the kernel to ``target`` with ``compiler``; ``machine``: its flag for the processor, or an empty text.

    The library is written beside ``target`` and renamed, so that a second process which does the same, or loads it just
    now, meets a whole file. Raises GaffError with the compiler's first error.
    """
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
    """Where the build of this source, for this processor, lies or would lie.

    The name holds a checksum of source, flags and processor: a cache that several machines share has a build for each,
    and a changed source is built anew. The folder is ``GAFF_CACHE``, else ``XDG_CACHE_HOME``, else ``~/.cache``.
    """
    cache = os.environ.get("GAFF_CACHE") or os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    key = "\n".join((SOURCE.read_text(), *_FLAGS, platform.machine(), _processor(), sys.platform))
    return Path(cache) / "gaff" / f"kernel-{hashlib.sha256(key.encode()).hexdigest()[:16]}.so"


def _native() -> str:
    """The compiler's flag for all that this processor can do; it differs between x86 and others."""
    return "-march=native" if platform.machine().lower() in ("x86_64", "amd64") else "-mcpu=native"


def _is_ours(path: Path) -> bool:
    """Whether nobody but this user, or root, can have written the file: what is loaded runs with the user's rights."""
    found = path.stat()
    return not hasattr(os, "getuid") or (found.st_uid in (os.getuid(), 0) and not found.st_mode & 0o022)


@lru_cache
def _processor() -> str:
    """The processor's model and what it can do, as far as the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(wanted)))


def _has_wide_registers() -> bool:
    """Whether the library of the wheel can run here: its build for x86 needs AVX2."""
    return platform.machine().lower() not in ("x86_64", "amd64") or " avx2 " in _processor()


if __name__ == "__main__":
    sys.stdout.write(f"{build()}\n")
