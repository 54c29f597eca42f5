"""What runs a model to look at it leaves the model as it was, its weights, too."""

import warnings

import pytest
import torch
from torch import nn

import gaff


class Writes(nn.Module):
    """Writes to a parameter of its own in its forward."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x):
        with torch.no_grad():
            self.scale.mul_(0.5)
        return x * self.scale


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


@pytest.mark.parametrize("look", LOOKS)
def test_weights_that_a_model_writes_to_by_itself_are_told(look):
    told = "this run itself changed parameters in place: 0.scale; they are not restored"
    model = nn.Sequential(Writes())
    if look == "trace":
        assert told in LOOKS[look](model, torch.ones(2, 3)).notes
    else:
        with pytest.warns(UserWarning, match=told):
            LOOKS[look](model, torch.ones(2, 3))
