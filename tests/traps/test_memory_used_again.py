"""Memory of an argument that was freed and used again is the run's own."""

import gc

import torch
from torch import nn

import gaff
from gaff.compat.memory import storage_life


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


def test_memory_is_known_to_be_held_by_whoever_holds_it():
    tensor = torch.randn(3)
    life = storage_life(tensor)
    weight = torch.ones(3, requires_grad=True)
    view, product = tensor[1:], (weight * tensor).sum()  # a view, and what autograd has saved
    del tensor
    gc.collect()
    assert life() is not None
    del view
    assert life() is not None
    product.backward()
    assert life() is None
