"""What a program has noted on a parameter is found on what stands in for it, and what it notes there is not lost."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import gaff
from gaff import edits


class Gained(nn.Module):
    """Reads a number from its parameter, counts its calls on it, and takes a note away, as libraries do."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 2))
        self.weight.gain, self.weight.calls, self.weight.once = 3.0, 0, True

    def forward(self, x):
        self.weight.calls += 1
        if hasattr(self.weight, "once"):
            del self.weight.once
        self.weight.seen = "here"
        return x @ self.weight * self.weight.gain


def test_an_edited_parameter_has_the_attributes_of_the_parameter():
    model, x = Gained(), torch.ones(1, 2)
    with gaff.edit(model, {"weight:param": edits.scale(0.5)}):
        assert model(x).tolist() == [[3.0, 3.0]]
        assert model(x).tolist() == [[3.0, 3.0]]
    assert (model.weight.calls, model.weight.seen, hasattr(model.weight, "once")) == (2, "here", False)
    assert set(vars(model.weight)) == {"gain", "calls", "seen"}


def test_of_two_sessions_the_last_word_counts():
    model, x = Gained(), torch.ones(1, 2)
    one, two = (gaff.edit(model, {"weight:param": edits.scale(0.5)}) for _ in range(2))
    with one, two:
        assert model(x).tolist() == [[1.5, 1.5]]
    assert model.weight.calls == 1


def test_a_recomputation_finds_them_too():
    model, x = Gained(), torch.ones(1, 2, requires_grad=True)
    with gaff.edit(model, {"weight:param": edits.scale(0.5)}):
        checkpoint(model, x, use_reentrant=False).sum().backward()
    assert x.grad.tolist() == [[3.0, 3.0]]
    assert model.weight.calls == 2


def test_a_tensor_of_the_user_gets_nothing_that_stays():
    model, x, value = Gained(), torch.ones(1, 2), torch.zeros(2, 2)
    value.gain = 7.0
    with gaff.edit(model, {"weight:param": edits.replace(value)}):
        model(x)
    assert vars(value) == {"gain": 7.0}
    assert model.weight.gain == 3.0
    assert model.weight.calls == 1
