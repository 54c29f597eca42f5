"""An output that is made to require grad after its module returned has a gradient."""

import torch
from torch import nn

import gaff


class Frozen(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Linear(2, 2).requires_grad_(False)
        self.head = nn.Linear(2, 1)
        self.features = None

    def forward(self, x):
        self.features = self.backbone(x).requires_grad_()
        return self.head(self.features).sum()


def test_it_is_told():
    model = Frozen()
    with gaff.capture(model, "backbone:grad_output") as got:
        model(torch.randn(1, 2)).backward()
    assert torch.equal(got["backbone:grad_output"], model.features.grad)
