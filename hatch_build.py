"""With GAFF_PACK_KERNEL=1 a wheel carries the compiled statistics kernel; torch must be importable where it is built.

GAFF_PACK_KERNEL=1 pip wheel . --no-build-isolation --no-deps

The kernel has no Python in it, and one build serves every torch from 2.10 on: the wheel is for every Python 3 on this
platform. Without the variable it is for every platform, and carries the source.
"""

import os
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class KernelHook(BuildHookInterface):  # type: ignore[misc]
    """Compiles a build for each level of processors of this platform, of which one is loaded where gaff runs."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version != "standard" or not os.environ.get("GAFF_PACK_KERNEL"):
            return
        sys.path.insert(0, str(Path(self.root) / "src"))
        from gaff.training.statistics import kernel

        folder = Path(self.root) / "build"
        folder.mkdir(exist_ok=True)
        for level in kernel.LEVELS:
            name = kernel.packed(level).name
            kernel.compile_to(folder / name, level)
            build_data["force_include"][str(folder / name)] = f"gaff/training/statistics/{name}"
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform}"
