"""Models of torchvision and timm; left out where these are not installed (``make vision`` installs them)."""

import pytest
import torch

import schemas

schemas.declare()

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
