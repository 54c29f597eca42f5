"""``gaff doctor``: what gaff finds here, and whether it does here what it promises; made to be pasted into a report."""

from __future__ import annotations

import argparse
import copy
import os
import platform
import re
import shutil
import sys
from collections.abc import Callable, Iterable
from importlib import metadata
from typing import TYPE_CHECKING, Any

from gaff.cli.options import add_debug, add_json
from gaff.errors import GaffError
from gaff.version import __version__

if TYPE_CHECKING:
    from torch import Tensor

SUMMARY = "say what gaff finds on this machine, and whether it works here"
_FOR_DEVELOPERS = ("dev", "peers")  # extras that nobody needs to use gaff


def add_to(parser: argparse.ArgumentParser) -> None:
    """Declare how it is told."""
    add_json(parser)
    add_debug(parser)
    parser.epilog = "example: gaff doctor --json"


def run(options: argparse.Namespace) -> int:
    """Look and tell; 0 where everything that gaff relies on works here, 3 where something does not."""
    from gaff.cli.printing import print_data, show
    from gaff.views.text import table

    told = {"versions": versions(), "statistics kernel": kernel_facts(), "private functions of torch": grounds(),
            "promises, tried now": promises(), "extras": extras(), "surroundings": surroundings()}  # fmt: skip
    failed = [name for part in ("private functions of torch", "promises, tried now") for name, how in told[part].items()
              if not how.startswith("works")]  # fmt: skip
    if options.json:
        print_data({**told, "failed": failed})
    else:
        parts = [table((title, ""), list(rows.items())) for title, rows in told.items()]
        end = f"does not work here: {', '.join(failed)}" if failed else "everything that gaff relies on works here"
        show("\n\n".join([*parts, end]))
    return 3 if failed else 0


def versions() -> dict[str, str]:
    """Of gaff, Python, torch and the system."""
    import torch

    return {"gaff": __version__, "Python": platform.python_version(), "torch": str(torch.__version__),
            "system": f"{platform.system()} {platform.release()}, {platform.machine()}"}  # fmt: skip


def kernel_facts() -> dict[str, str]:
    """Which build of the statistics kernel is loaded, or why none is; and the compiler that could build one."""
    import torch

    from gaff.training.statistics import kernel, on_gpu

    devices = [torch.device("cuda", at) for at in range(torch.cuda.device_count())]
    on_gpus = {f"on {one}": on_gpu.load(one)[1] or "Triton's kernels" for one in devices}
    compiler = os.environ.get("CXX") or next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
    try:
        level = kernel.level()
    except GaffError as error:
        return {"loaded": f"none: {error}", "compiler": compiler or "none found"}
    if level == kernel.PLAIN and not os.environ.get("GAFF_KERNEL"):
        level = "none: plain torch counts the same, more slowly; python -m gaff.training.statistics.kernel builds one"
    where = [name for name in kernel.LEVELS if kernel.packed(name).is_file()]
    return {"loaded": level, "in this installation": ", ".join(where) or "none, the source only",
            "compiler": compiler or "none found", **on_gpus}  # fmt: skip


def grounds() -> dict[str, str]:
    """Functions of torch without a public promise that gaff uses, each tried; what happens where one does not work."""
    from gaff.compat.checkpoints import sees_checkpoints
    from gaff.compat.memory import lazy_clone

    return {
        "copy-on-write copies": "works"
        if lazy_clone() is not None
        else "missing: values are kept by reference, and checked on reading",
        "checkpoints told apart": "works" if sees_checkpoints() else "missing: edits under checkpointing are refused",
    }


def promises() -> dict[str, str]:
    """What gaff promises, tried on a small model: each works, or what came instead."""
    return {name: _tried(check) for name, check in _PROMISES.items()}


def _tried(check: Callable[[], bool]) -> str:
    """Whether a check holds; an error of it is what is to be told here, whatever it is."""
    try:
        return "works" if check() else "another number than the truth"
    except Exception as error:  # noqa: BLE001  # it is told, and is what this command is for
        return f"{type(error).__name__}: {error}".partition("\n")[0]


def extras() -> dict[str, str]:
    """By extra of gaff the packages that it needs: with their versions, or that they are not installed."""
    found: dict[str, list[str]] = {}
    for line in _requirements():
        match = re.match(r"([\w.-]+)(?:\[[^\]]*\])?.*extra == ['\"]([\w-]+)['\"]", line)
        if match is None or match[2] in _FOR_DEVELOPERS or match[1] == "gaff":
            continue
        found.setdefault(match[2], []).append(_installed(match[1]))
    return {name: ", ".join(packages) for name, packages in sorted(found.items())}


def _requirements() -> Iterable[str]:
    try:
        return metadata.requires("gaff") or ()
    except metadata.PackageNotFoundError:  # it runs from a folder of sources that was never installed
        return ()


def _installed(package: str) -> str:
    try:
        return f"{package} {metadata.version(package)}"
    except metadata.PackageNotFoundError:
        return f"{package} not installed"


def surroundings() -> dict[str, str]:
    """Devices, threads, terminal, and the variables of the environment that gaff reads."""
    import torch

    devices = [f"cuda:{at} {torch.cuda.get_device_name(at)}" for at in range(torch.cuda.device_count())]
    size = shutil.get_terminal_size()
    named = ("GAFF_KERNEL", "GAFF_CACHE", "CXX", "NO_COLOR", "OMP_NUM_THREADS", "TORCH_COMPILE_DISABLE")
    return {
        "devices": ", ".join([f"cpu ({torch.get_num_threads()} threads)", *devices]),
        "processor": torch.backends.cpu.get_cpu_capability(),
        "terminal": f"{size.columns} columns, {sys.stdout.encoding}"
        if sys.stdout.isatty()
        else "none (a file or a pipe)",
        "environment": ", ".join(f"{name}={os.environ[name]}" for name in named if name in os.environ) or "as usual",
    }


def _model() -> tuple[Any, Tensor]:
    import torch
    from torch import nn

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 2)), torch.randn(5, 3, device="cpu")


def _keeps_what_is_overwritten() -> bool:
    import torch

    import gaff

    model, x = _model()
    with gaff.capture(model, "0") as got:
        model(x)
    return torch.equal(got["0"], torch.nn.functional.linear(x, model[0].weight, model[0].bias))


def _tells_the_own_gradient() -> bool:
    import torch

    import gaff

    model, x = _model()
    with gaff.capture(model, "2:grad_input", "2.weight:grad") as got:
        model(x).sum().backward()
    given = torch.ones(5, 2, device="cpu")
    hidden = torch.relu(model[0](x))
    return torch.allclose(got["2:grad_input"], given @ model[2].weight) and torch.allclose(
        got["2.weight:grad"], given.T @ hidden
    )


def _edits_under_a_checkpoint() -> bool:
    import torch
    from torch.utils.checkpoint import checkpoint

    import gaff

    model, x = _model()
    twin = copy.deepcopy(model)
    with gaff.edit(model, {"0": gaff.edits.scale(0.5)}):
        checkpoint(model, x, use_reentrant=False).sum().backward()
    twin[2](torch.relu(twin[0](x) * 0.5)).sum().backward()
    return all(torch.equal(one.grad, two.grad)
               for one, two in zip(model.parameters(), twin.parameters(), strict=True))  # fmt: skip


def _changes_no_bit() -> bool:
    import torch

    import gaff

    model, x = _model()
    twin = copy.deepcopy(model)
    for one, is_watched in ((model, True), (twin, False)):
        optimizer = torch.optim.AdamW(one.parameters())
        with gaff.watch(one, optimizer) if is_watched else torch.enable_grad():
            for _ in range(3):
                optimizer.zero_grad()
                one(x).square().sum().backward()
                optimizer.step()
    return all(torch.equal(one, two) for one, two in zip(model.parameters(), twin.parameters(), strict=True))


_PROMISES: dict[str, Callable[[], bool]] = {
    "a value that is overwritten later": _keeps_what_is_overwritten,
    "a layer's own gradients": _tells_the_own_gradient,
    "an edit under a checkpoint": _edits_under_a_checkpoint,
    "a watched step has the bits of a bare one": _changes_no_bit,
}
