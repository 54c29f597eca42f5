"""Models of torchvision and timm; left out where these are not installed (``make vision`` installs them)."""

import pytest
import torch

if torch.version.cuda is None:  # the wheel of torchvision holds CUDA operators only; declared, it can be imported
    _LIBRARY = torch.library.Library("torchvision", "DEF")
    for _name in ("nms", "qnms"):
        _LIBRARY.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

try:
    import timm  # noqa: F401
    import torchvision  # noqa: F401
except ImportError:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
