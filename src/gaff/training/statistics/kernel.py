"""Where the compiled kernel is and how it is built: ``python -m gaff.training.statistics.kernel``, for this machine.

``kernel.cpp`` is built against torch's stable ABI and uses no Python, so one build serves every Python and every torch
from 2.10 on. A wheel carries a build for each level of processors (``LEVELS``), of which the best that torch sees here
is loaded. A build for this very processor (``native``, in the user's cache) comes first. ``GAFF_KERNEL`` names another:
a level, ``native``, or ``plain`` for torch without any. torch is imported only when a library is loaded or built.
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
NATIVE, PLAIN, BASELINE = "native", "plain", "baseline"
# by level, best first: the compiler's flags, and what torch.backends.cpu.get_cpu_capability() says of such processors
_X86 = {
    "avx512": (("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx2", "-mfma"), "AVX512"),
    "avx2": (("-mavx2", "-mfma"), "AVX2"),
}
IS_X86 = platform.machine().lower() in ("x86_64", "amd64")
LEVELS: dict[str, tuple[tuple[str, ...], str]] = {**(_X86 if IS_X86 else {}), BASELINE: ((), "")}
_FLAGS = ("-O3", "-fno-trapping-math", "-std=c++17", "-fPIC", "-shared", "-DTORCH_TARGET_VERSION=0x020a000000000000")
CHOICE = "GAFF_KERNEL"


def packed(level: str) -> Path:
    """Where a wheel carries the build for a level, if it does."""
    return SOURCE.with_name(f"libobserve-{level}.so")


def load() -> Any:
    """The kernel's ops for CPU tensors, ``observe_``, ``observe_many_``, ``observe_units_``; None without a build.

    Loads the library into this process and registers its ops with torch's dispatcher, once: the answer is kept. A build
    in the cache that another user could have written is not loaded, and a library that does not fit this torch or
    platform is passed over. The ops take the arguments of the functions of ``plain``. Raises GaffError where
    ``GAFF_KERNEL`` names none that can run here.
    """
    return _chosen()[1]


def level() -> str:
    """Which build is loaded: ``native``, one of ``LEVELS``, or ``plain``; loads it. Raises as ``load`` does."""
    return _chosen()[0]


@lru_cache
def _chosen() -> tuple[str, Any]:
    """The name of the build that is loaded, and its ops."""
    import torch

    for name in _wanted():
        for library in (path_of_build(name), packed(name)):
            if not library.is_file() or (library != packed(name) and not _is_ours(library)):
                continue
            try:
                torch.ops.load_library(str(library))
            except OSError:  # of another platform or torch: plain torch counts the same
                continue
            return name, SimpleNamespace(**{one: _op(one) for one in ("observe_", "observe_many_", "observe_units_")})
    choice = os.environ.get(CHOICE, "")
    if choice not in ("", PLAIN):
        raise GaffError(f"{CHOICE}={choice!r}: there is no such build here: python -m gaff.training.statistics.kernel "
                        f"{choice} makes it")  # fmt: skip
    return PLAIN, None


def _wanted() -> tuple[str, ...]:
    """The builds that may be loaded, best first. Raises GaffError for a choice that is none, or cannot run here."""
    choice, runnable = os.environ.get(CHOICE, ""), levels_here()
    if not choice:
        return (NATIVE, *runnable)
    if choice not in (NATIVE, PLAIN, *LEVELS):
        raise GaffError(f"{CHOICE}={choice!r}: expected one of {', '.join((NATIVE, PLAIN, *LEVELS))}")
    if choice in LEVELS and choice not in runnable:
        raise GaffError(f"{CHOICE}={choice!r}: this processor cannot run it: expected one of {', '.join(runnable)}")
    return () if choice == PLAIN else (choice,)


def levels_here() -> tuple[str, ...]:
    """The levels that this processor can run, as torch sees it, best first."""
    import torch

    names = list(LEVELS)
    seen = torch.backends.cpu.get_cpu_capability()
    best = next((name for name, (_, capability) in LEVELS.items() if capability == seen), BASELINE)
    return tuple(names[names.index(best) :])


@lru_cache
def _op(name: str) -> Any:
    """One of the loaded ops, with the shape function that torch asks for before it lets compiled code call an op."""
    import torch

    torch.library.register_fake(f"gaff::{name}", lambda *arguments: None)
    return getattr(torch.ops.gaff, name).default


def build(level: str = NATIVE) -> Path:
    """Compile the kernel into the user's cache, for this machine's processor or a level; takes about five seconds.

    Returns the library's path; a later ``load`` finds it. ``CXX`` names another compiler than the first that is found.
    Raises GaffError where there is no compiler or it fails.
    """
    if level not in (NATIVE, *LEVELS):
        raise GaffError(f"no level {level!r}: expected one of {', '.join((NATIVE, *LEVELS))}")
    target = path_of_build(level)
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    compile_to(target, level)
    forget()
    return target


def forget() -> None:
    """Look for a build anew at the next ``load``; a library that is loaded stays in the process."""
    _chosen.cache_clear()


def compile_to(target: Path, level: str = NATIVE) -> None:
    """Compile the kernel to ``target``, for this machine's processor or for a level.

    The library is written beside ``target`` and renamed, so that a second process which does the same, or loads it just
    now, meets a whole file. Raises GaffError without a compiler, or with its first error.
    """
    import torch

    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise GaffError("no C++ compiler found: expected c++, g++ or clang++, or its path in CXX")
    root = Path(torch.__file__).parent
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder) / target.name
        libraries = ["-L" + str(root / "lib"), "-ltorch_cpu", "-ltorch"]
        machine = _native() if level == NATIVE else LEVELS[level][0]
        command = [compiler, *_FLAGS, *machine, f"-I{root / 'include'}", str(SOURCE), "-o", str(made), *libraries]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError as error:
            raise GaffError(f"{compiler} cannot be run: {error.strerror}; CXX names another compiler") from None
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if "error" in line] or ["no message"]
            raise GaffError(f"{compiler} failed with exit code {done.returncode}: {lines[0][:300]}")
        os.replace(made, target)


def path_of_build(level: str = NATIVE) -> Path:
    """Where the build of this source, for this processor or a level, lies or would lie.

    The name holds a checksum of source, flags and processor: a cache that several machines share has a build for each,
    and a changed source is built anew. The folder is ``GAFF_CACHE``, else ``XDG_CACHE_HOME``, else ``~/.cache``.
    """
    cache = os.environ.get("GAFF_CACHE") or os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    machine = (_processor(),) if level == NATIVE else (level, *LEVELS[level][0])
    key = "\n".join((SOURCE.read_text(encoding="utf-8"), *_FLAGS, platform.machine(), *machine, sys.platform))
    return Path(cache) / "gaff" / f"kernel-{hashlib.sha256(key.encode()).hexdigest()[:16]}.so"


def _native() -> tuple[str, ...]:
    """The compiler's flag for all that this processor can do; it differs between x86 and others."""
    return ("-march=native",) if IS_X86 else ("-mcpu=native",)


def _is_ours(path: Path) -> bool:
    """Whether nobody but this user, or root, can have written the file: what is loaded runs with the user's rights."""
    found = path.stat()
    return not hasattr(os, "getuid") or (found.st_uid in (os.getuid(), 0) and not found.st_mode & 0o022)


@lru_cache
def _processor() -> str:
    """The processor's model and what it can do, as far as the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(wanted)))


if __name__ == "__main__":
    sys.stdout.write(f"{build(*sys.argv[1:2])}\n")
