"""What runs a model to look at it leaves the model as it was, its weights, too."""

import random
import warnings

import numpy as np
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


class Noisy(nn.Module):
    """Draws from a generator of its own."""

    def __init__(self, kind):
        super().__init__()
        seeded = {"NumPy": np.random.default_rng(0), "NumPy's older": np.random.RandomState(0),
                  "Python": random.Random(0), "torch": torch.Generator().manual_seed(0)}  # fmt: skip
        self.kept, self.kind = [seeded[kind]], kind

    def forward(self, x):
        source = self.kept[0]
        if self.kind == "torch":
            return x + torch.randn(1, generator=source)
        return x + (source.random() if self.kind == "Python" else float(source.normal()))


@pytest.mark.parametrize("kind", ["NumPy", "NumPy's older", "Python", "torch"])
def test_generators_that_modules_keep_are_where_they_were(kind):
    model, twin, x = nn.Sequential(Noisy(kind)), nn.Sequential(Noisy(kind)), torch.zeros(1, 1)
    gaff.trace(model, x)
    gaff.sites(model, x, ops=True)
    assert torch.equal(model(x), twin(x))


class Holding(nn.Module):
    def __init__(self, held, writes=False):
        super().__init__()
        self.register_buffer("held", held)
        self.register_buffer("count", torch.tensor(0))
        self.writes = writes

    def forward(self, x):
        self.count += 1
        if self.writes:
            self.held.zero_()
        return x * 2


def odd_buffers():
    weights = torch.eye(4)
    yield torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])
    yield torch.quantize_per_channel(weights, torch.ones(4), torch.zeros(4), 0, torch.quint8)
    yield torch.zeros(4, dtype=torch.uint8).view(torch.uint4)


@pytest.mark.filterwarnings("ignore::UserWarning")  # of torch, that nested tensors are a prototype
@pytest.mark.parametrize("at", range(3))
def test_buffers_that_torch_cannot_compare_or_copy_keep_nothing_from_being_restored(at):
    model = nn.Sequential(Holding(list(odd_buffers())[at]))
    gaff.trace(model, torch.ones(2))
    assert model[0].count.item() == 0


def test_a_buffer_that_cannot_be_copied_and_was_written_to_is_told(monkeypatch):
    def fails(self):
        raise NotImplementedError("clone")  # as torch does for kinds that it cannot copy

    model = nn.Sequential(Holding(torch.ones(4), writes=True))
    monkeypatch.setattr(torch.Tensor, "clone", fails)
    trace = gaff.trace(model, torch.ones(2))
    assert any("changed parameters: held" in note for note in trace.notes), trace.notes
