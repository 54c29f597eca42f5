"""Memory of an argument that was freed and used again is the run's own."""

import torch
from torch import nn

import gaff


class Frees(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, box):
        x = box.pop()
        h = self.a(x)
        del x
        g = self.b(h)
        return g.relu_()


def test_no_value_is_refused_for_somebody_elses_memory():
    model = Frees()
    for _ in range(20):
        with torch.no_grad(), gaff.capture(model, "b") as got:
            model([torch.randn(4, 64)])
        assert got["b"].shape == (4, 64)
