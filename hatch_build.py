"""With GAFF_PACK_KERNEL=1 a wheel carries the compiled statistics kernel; torch must be importable where it is built.

GAFF_PACK_KERNEL=1 pip wheel . --no-build-isolation --no-deps
"""

import os
import platform
import shutil
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class KernelHook(BuildHookInterface):  # type: ignore[misc]
    """Compiles for processors that nearly every machine has; others build the kernel for themselves."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version != "standard" or not os.environ.get("GAFF_PACK_KERNEL"):
            return
        sys.path.insert(0, str(Path(self.root) / "src"))
        from gaff.training.statistics import kernel

        compiler = os.environ.get("CXX") or shutil.which("c++") or "g++"
        machine = "-march=x86-64-v3" if platform.machine().lower() in ("x86_64", "amd64") else ""
        target = Path(self.root) / "build" / "libobserve.so"
        target.parent.mkdir(exist_ok=True)
        kernel.compile_to(target, compiler, machine)
        build_data["force_include"][str(target)] = "gaff/training/statistics/libobserve.so"
        build_data["pure_python"] = False
        build_data["infer_tag"] = True
