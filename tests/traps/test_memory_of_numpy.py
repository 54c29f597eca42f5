"""NumPy arrays on memory that is captured: they keep showing what the model has there."""

import torch
from torch import nn

import gaff


class Exports(nn.Module):
    def forward(self, x):
        h = x * 2
        self.array = h.numpy()
        return h


def test_an_array_follows_its_tensor_and_outlives_the_capture():
    model = nn.Sequential(Exports(), nn.ReLU(inplace=True))
    with torch.no_grad(), gaff.capture(model, "0") as got:
        model(-torch.ones(1000, 100))
    assert got["0"].sum().item() == -200_000.0
    assert model[0].array.sum() == 0.0  # the ReLU wrote there
    del got
    assert model[0].array.sum() == 0.0


def test_an_array_on_a_workspace_of_the_model_follows_it():
    class Works(nn.Module):
        def __init__(self):
            super().__init__()
            self.places = [torch.zeros(1000)]
            self.array = self.places[0].numpy()

        def forward(self, x):
            return torch.mul(x, 2, out=self.places[0])

    model = nn.Sequential(Works(), nn.Identity())
    with torch.no_grad(), gaff.capture(model, "0") as got:
        model(torch.ones(1000))
        model(torch.ones(1000) * 3)
        assert model[0].array.sum() == 6000.0
    assert got.run(0)["0"].sum().item() == 2000.0
