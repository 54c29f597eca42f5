"""What runs a model to look at it leaves the model as it was, its weights, too."""

import warnings

import pytest
import torch
from torch import nn

import gaff


def _assign(module):
    module.scale.data = module.scale.data * 0.5


def _replace(module):
    module.scale = nn.Parameter(module.scale.detach() * 0.5)


WRITES = {
    "in place": lambda module: module.scale.mul_(0.5),
    "in place by data": lambda module: module.scale.data.mul_(0.5),
    "other data": _assign,
    "another parameter": _replace,
}


class Writes(nn.Module):
    """Writes to a parameter of its own in its forward."""

    def __init__(self, write):
        super().__init__()
        self.scale, self.write = nn.Parameter(torch.ones(3)), write

    def forward(self, x):
        with torch.no_grad():
            self.write(self)
        return x * self.scale


class Grows(nn.Module):
    """Makes its head when it first sees the width of its input."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(3, 3), None

    def forward(self, x):
        if self.head is None:
            self.head = nn.Linear(x.shape[-1], 2)
        return self.head(self.body(x))


LOOKS = {
    "trace": lambda model, x: gaff.trace(model, x, backward=lambda y: y.sum()),
    "sites": lambda model, x: str(gaff.sites(model, x, ops=True)),
    "anatomy": lambda model, x: str(gaff.anatomy(model, x)),
}


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("make", [nn.Embedding, nn.EmbeddingBag])
def test_weights_that_a_forward_of_torch_shortens_are_put_back(make, look):
    model = nn.Sequential(make(5, 4, max_norm=0.1), nn.Linear(4, 2))
    before = model[0].weight.detach().clone()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        LOOKS[look](model, torch.arange(5).reshape(1, 5))
    assert torch.equal(model[0].weight, before)


@pytest.mark.parametrize("how", WRITES)
@pytest.mark.parametrize("look", LOOKS)
def test_weights_that_a_model_writes_to_by_itself_are_told(look, how):
    told = "this run itself changed parameters: 0.scale; they are not restored"
    model = nn.Sequential(Writes(WRITES[how]))
    if look == "trace":
        assert told in LOOKS[look](model, torch.ones(2, 3)).notes
    else:
        with pytest.warns(UserWarning, match=told):
            LOOKS[look](model, torch.ones(2, 3))


@pytest.mark.parametrize("backward", [None, lambda y: y.sum()])
def test_a_module_that_the_run_itself_adds_is_told(backward):
    model = Grows()
    told = gaff.trace(model, torch.ones(2, 3), backward=backward)
    assert "this run itself added modules, whose calls are not here: head; traced once more, they are" in told.notes
    again = gaff.trace(model, torch.ones(2, 3), backward=backward)
    assert "head" in {row.site for row in again.rows}
    assert not again.notes
