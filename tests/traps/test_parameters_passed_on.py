"""A forward that passes on a parameter which is edited: it ties it, copies the module, or saves it."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

import gaff
from gaff import edits


class Ties(nn.Module):
    """A tied autoencoder; ``once``: at its first call only."""

    def __init__(self, *, once):
        super().__init__()
        self.enc, self.dec, self.once, self.is_tied = nn.Linear(4, 4), nn.Linear(4, 4), once, False

    def forward(self, x):
        if not (self.once and self.is_tied):
            self.dec.weight, self.is_tied = self.enc.weight, True
        return self.dec(torch.tanh(self.enc(x)))


class Copies(nn.Module):
    """Makes copies of a part of itself as it runs, as a target network at the first call."""

    def __init__(self):
        super().__init__()
        self.layer, self.copies = nn.Linear(4, 4), []

    def forward(self, x):
        file = io.BytesIO()
        torch.save(self.layer, file)
        file.seek(0)
        self.copies = [
            copy.deepcopy(self.layer),
            pickle.loads(pickle.dumps(self.layer)),
            torch.load(file, weights_only=False),
        ]
        return self.layer(x)


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("once", [True, False])
def test_weights_that_a_forward_ties_are_edited_in_both_places_and_tied_afterwards(once, frozen):
    torch.manual_seed(0)
    model, x = Ties(once=once).requires_grad_(not frozen), torch.randn(3, 4)
    register = nn.Module.register_parameter
    weight = model.enc.weight.detach() * 0.5
    expected = torch.tanh(x @ weight.T + model.enc.bias) @ weight.T + model.dec.bias
    with gaff.edit(model, {"enc.weight:param": edits.scale(0.5)}):
        torch.testing.assert_close(model(x), expected)
    assert model.dec.weight is model.enc.weight
    assert type(model.dec.weight) is nn.Parameter
    assert len(list(model.parameters())) == 3
    assert nn.Module.register_parameter is register
    torch.testing.assert_close(model(x), model.dec(torch.tanh(model.enc(x))))
    assert model.double().dec.weight.dtype == torch.float64


@pytest.mark.parametrize("frozen", [True, False])
def test_what_a_forward_copies_or_saves_is_the_parameter_itself(frozen):
    torch.manual_seed(0)
    model = Copies().requires_grad_(not frozen)
    before = model.layer.weight.detach().clone()
    with gaff.edit(model, {"layer.weight:param": edits.scale(3.0)}):
        model(torch.ones(1, 4))
    assert vars(model.layer.weight) == {}
    for one in model.copies:
        assert (type(one.weight), vars(one.weight), one.weight.requires_grad) == (nn.Parameter, {}, not frozen)
        assert torch.equal(one.weight, before)
