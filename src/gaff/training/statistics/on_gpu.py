"""Whether Triton's kernels (``fused``) can be used on a device: tried once, with a tensor of one element."""

from __future__ import annotations

import os
import subprocess
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import torch

from gaff.record.statistics import EMPTY
from gaff.training.statistics import kernel, plain

_DEVICES = ("cuda", "xpu")  # that torch's Triton compiles for; "cuda" is AMD's, too


@lru_cache
def load(device: torch.device) -> tuple[Any, str]:
    """What counts on a device: the module ``fused``, or None; and, where it should be there and is not, why.

    The first call for a device makes Triton compile a kernel, or find it in its cache, and waits for the device; the
    answer is kept. ``GAFF_KERNEL=plain`` asks for torch alone.
    """
    if device.type not in _DEVICES or os.environ.get(kernel.CHOICE) == kernel.PLAIN:
        return None, ""
    why = "Triton is not installed"
    if find_spec("triton") is not None:
        try:
            from gaff.training.statistics import fused

            row, known = torch.tensor([EMPTY, EMPTY], dtype=torch.float64, device=device).unbind(0)
            one = torch.ones(1, device=device)
            fused.observe_(one, row, True)
            plain.observe_(one, known, True)
            if torch.equal(row, known):
                return fused, ""
            why = "Triton's kernels count wrongly here"
        except (RuntimeError, OSError, ImportError, AttributeError, TypeError, subprocess.SubprocessError) as error:
            why = f"Triton cannot be used here ({type(error).__name__}: {str(error)[:200]})"
    return None, f"tensors on {device} are counted by plain torch, some seventy kernels for each: {why}"
