"""What libraries do that build models in their own ways: each shape of it by hand, since they are no dependencies."""

import pytest
import torch
from torch import nn

import gaff
from gaff import edits


class Graph:
    """A batch of graphs: callable, with ``keys``, and no mapping; its rows are those of no tensor that it holds."""

    def __init__(self, sizes):
        self.x = torch.randn(sum(sizes), 4)
        self.of = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
        self.count = len(sizes)

    def keys(self):
        return ["x", "of"]

    def __getitem__(self, key):
        return getattr(self, key)

    def __call__(self, *_names):
        return iter(())


class Pooled(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 2)

    def forward(self, graph):
        return torch.zeros(graph.count, 2).index_add(0, graph.of, self.lin(graph.x))


def test_a_batch_that_is_callable_is_an_input():
    told = str(gaff.sites(Pooled(), Graph([3, 2])))
    assert "5x4 -> 5x2" in told
    assert "/index_add" in str(gaff.sites(Pooled(), Graph([3, 2]), ops=True))


def test_features_of_batches_that_are_objects_are_joined():
    model, batches = Pooled(), [Graph([3, 2]), Graph([1, 4, 2])]
    found = gaff.take(model, ":output").over(batches)[":output"]
    assert torch.equal(found, torch.cat([model(one) for one in batches]))


class Table(nn.Module):
    """Parameters by names with dots, as tables of tensors have them, and an == that compares elements."""

    def __init__(self):
        super().__init__()
        self._parameters["0.weight"] = nn.Parameter(torch.randn(2, 4))

    def __eq__(self, other):
        return self._parameters["0.weight"] == other

    __hash__ = nn.Module.__hash__


class Functional(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = Table()

    def forward(self, x):
        return x @ self.table._parameters["0.weight"].T

    def named_parameters(self, prefix="", recurse=True):  # without remove_duplicate
        return super().named_parameters(prefix, recurse)


def test_a_parameter_whose_name_has_dots_is_addressed_as_it_is_listed():
    model, x = Functional(), torch.ones(1, 4)
    with gaff.capture(model, "table.0.weight:param", "table.0.weight:grad") as got:
        model(x).sum().backward()
    weight = model.table._parameters["0.weight"]
    assert torch.equal(got["table.0.weight:param"], weight)
    assert torch.equal(got["table.0.weight:grad"], weight.grad)
    with gaff.edit(model, {"table.0.weight:param": edits.zero()}):
        assert model(x).abs().sum() == 0
    assert not any(one._forward_hooks or one._forward_pre_hooks or "forward" in vars(one) for one in model.modules())
    assert "8 parameters" in str(gaff.trace(Functional(), x, backward=lambda out: out.sum()))
    assert "table" in str(gaff.sites(model, "table.0.weight:param"))


def test_a_model_whose_named_parameters_takes_no_such_argument_is_watched(tmp_path):
    model = Functional()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with gaff.watch(model, optimizer, out=tmp_path / "run", every=1):
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(3, 4)).square().sum().backward()
            optimizer.step()
    assert gaff.load(tmp_path / "run").verdict.state != "failed"


@pytest.mark.parametrize("look", [gaff.sites, gaff.trace, gaff.anatomy])
def test_gradients_of_another_dtype_than_their_parameters_are_put_back(look):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model(torch.randn(3, 4)).square().sum().backward()
    for one in model[0].parameters():
        one.data = one.data.double()
    weight, mean = model[0].weight, model[1].running_mean.clone()
    gradient, held, version = weight.grad, weight.data_ptr(), weight._version
    look(nn.Sequential(model[0], Cast(), model[1]), torch.randn(3, 4).double())
    assert weight.grad is gradient
    assert (weight.dtype, weight.data_ptr(), weight._version) == (torch.float64, held, version)
    assert torch.equal(model[1].running_mean, mean)


class Cast(nn.Module):
    def forward(self, x):
        return x.float()


def test_a_skipped_step_keeps_a_gradient_of_another_dtype():
    model = nn.Linear(2, 2)
    model(torch.ones(1, 2)).sum().backward()
    weight, gradient = model.weight, model.weight.grad
    gradient[0, 0] = torch.nan
    weight.data = weight.data.bfloat16()
    optimizer = torch.optim.SGD([weight], 0.1, foreach=False)
    with gaff.clip_gradients(optimizer, norm=1.0, nonfinite="skip"):
        optimizer.step()
    assert weight.grad is gradient
