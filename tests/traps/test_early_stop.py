"""take runs the model no further than it must, and leaves every context clean."""

import torch
from torch import nn

import gaff


class Stages(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = nn.Linear(3, 3)
        self.two = nn.Linear(3, 3)
        self.calls = []

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = self.one(x)
            self.calls.append("one")
            try:
                x = self.two(x)
            finally:
                self.calls.append("after two")
        self.calls.append("end")
        return x


def test_nothing_after_the_last_site_runs():
    model, x = Stages(), torch.randn(2, 3)
    found = gaff.take(model, "one")(x)
    assert found["one"].dtype == torch.bfloat16
    assert model.calls == []
    gaff.take(model, "two")(x)
    assert model.calls == ["one", "after two"]
    assert not torch.is_autocast_enabled("cpu")
    assert not any(module._forward_hooks for module in model.modules())


class Swallows(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = nn.Linear(3, 3)

    def forward(self, x):
        try:
            return self.one(x)
        except Exception:
            return x


def test_a_model_that_swallows_the_stop_is_noticed():
    model, x = Swallows(), torch.randn(2, 3)
    extractor = gaff.take(model, "one")
    assert torch.equal(extractor(x)["one"], model.one(x))
    assert "swallowed the early stop" in str(extractor.receipt)
