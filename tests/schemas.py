"""Operators that the wheel of torchvision wants to find, and has for CUDA alone."""

import torch

_HELD = []  # a library's operators go with it


def declare() -> None:
    """Declare them once in this process, so that torchvision can be imported beside a torch without CUDA."""
    if torch.version.cuda is None and not _HELD:
        _HELD.append(torch.library.Library("torchvision", "DEF"))
        for name in ("nms", "qnms"):
            _HELD[0].define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
