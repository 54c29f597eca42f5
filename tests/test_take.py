"""take: a feature extractor that stops early, trains, reads data sets."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import gaff
from zoo import Net, Shared, Structured


def test_features_are_those_of_the_full_run():
    model, x = Net(), torch.randn(2, 3, 8, 8)
    with gaff.capture(model, "conv", "relu", "fc1:input") as got:
        model(x)
    with torch.no_grad():
        found = gaff.take(model, "conv", "relu", "fc1:input")(x)
    assert list(found) == ["conv", "relu", "fc1:input"]
    assert all(torch.equal(found[name], got[name]) for name in found)


def test_features_train_through_the_extractor():
    model, x = Net(), torch.randn(2, 3, 8, 8)
    twin = copy.deepcopy(model)
    head = nn.Sequential(gaff.take(model, "conv"), _Pick("conv"), nn.Flatten(), nn.Linear(160, 2))
    head(x).sum().backward()
    true = torch.autograd.grad(
        nn.functional.linear(twin.conv(x).flatten(1), head[3].weight, head[3].bias).sum(), twin.conv.weight
    )
    assert torch.equal(model.conv.weight.grad, true[0])
    assert "0.model.conv.weight" in head.state_dict()


class _Pick(nn.Module):
    def __init__(self, name):
        super().__init__()
        self.name = name

    def forward(self, features):
        return features[self.name]


def test_a_pattern_gives_every_site_and_structures_stay_structures():
    model, x = Structured(), torch.randn(2, 4)
    found = gaff.take(model, "*", ":output[extra][second]")(x)
    assert list(found) == ["lin", "pair", ":output[extra][second]"]
    assert type(found["pair"]).__name__ == "Pair"


def test_dict_inputs_and_reductions():
    class Takes(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(3, 3)

        def forward(self, *, x, scale=1):
            return self.lin(x * scale)

    model, x = Takes(), torch.randn(2, 3)
    found = gaff.take(model, {"lin": gaff.keep.rows(0)}, dtype="float64")(x=x, scale=2)
    assert torch.equal(found["lin"], model.lin(x * 2)[:1].double())


def test_a_data_set_batch_by_batch():
    model, images = Net(), torch.randn(10, 3, 8, 8)
    extractor = gaff.take(model, "fc1", "relu")
    loader = DataLoader(TensorDataset(images, torch.arange(10)), batch_size=4)
    found = extractor(loader)
    torch.testing.assert_close(found["fc1"], model(images))  # other batches add up otherwise
    assert found["relu"].shape == (10, 10, 4, 4)
    assert not found["fc1"].requires_grad
    doubled = extractor.over(loader, inputs=lambda batch: batch[0] * 2, progress=False)
    assert torch.allclose(doubled["fc1"], model(images * 2))


class Records(Dataset):
    def __len__(self):
        return 3

    def __getitem__(self, index):
        return {"x": torch.full((index + 1, 3), float(index))}


def test_dict_batches_are_keywords_and_ragged_features_are_refused():
    class Takes(nn.Module):
        def forward(self, x):
            return x + 1

    with pytest.raises(gaff.SiteError, match=":output: its shape differs between batches, \\(1, 3\\) and \\(2, 3\\)"):
        gaff.take(Takes(), ":output")(DataLoader(Records()))
    found = gaff.take(Takes(), ":output", reduce=gaff.keep.mean(1))(DataLoader(Records()))
    assert found[":output"].tolist() == [[1.0] * 3, [2.0] * 3, [3.0] * 3]


def test_a_module_called_more_than_once_needs_to_say_which():
    model, x = Shared(), torch.randn(2, 4)
    with pytest.raises(
        gaff.PlanError, match="shared: is one module under 2 names .*say which call, such as 'shared@0'"
    ):
        gaff.take(model, "shared")
    assert torch.equal(gaff.take(model, "shared@0")(x)["shared@0"], model.shared(torch.tanh(model.shared(x)) * 0 + x))

    class Loop(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(4, 4)
            self.end = nn.Tanh()

        def forward(self, x):
            return self.end(self.lin(self.lin(x)))

    loop = Loop()
    with pytest.raises(gaff.SiteError, match="lin: was called 2 times in the run: say which, such as 'lin@0'"):
        gaff.take(loop, "lin", "end")(x)
    assert torch.equal(gaff.take(loop, "lin@1", "end")(x)["lin@1"], loop.lin(loop.lin(x)))


def test_what_cannot_be_taken():
    model, x = Net(), torch.randn(1, 3, 8, 8)
    with pytest.raises(gaff.PlanError, match="conv:grad_output: take gives forward values only"):
        gaff.take(model, "conv:grad_output")
    with pytest.raises(TypeError, match="unexpected keyword argument 'last'"):
        gaff.take(model, "conv", last=1)
    with pytest.raises(gaff.PlanError, match="take was given no site"):
        gaff.take(model)
    with pytest.raises(gaff.PlanError, match="the extractor has not been called yet"):
        gaff.take(model, "conv").receipt
    with pytest.raises(gaff.NeverFiredError, match="'conv@3' never fired"):
        gaff.take(model, "conv@3")(x)


def test_an_argument_changed_in_place_is_what_it_was():
    model = nn.Sequential(nn.ReLU(inplace=True), nn.Tanh())
    found = gaff.take(model, "0:input", "1")(-torch.ones(2, 2))
    assert found["0:input"].tolist() == [[-1, -1], [-1, -1]]


def test_features_without_rows_of_their_own_are_not_joined():
    model = nn.LSTM(3, 7, batch_first=True)
    loader = DataLoader(TensorDataset(torch.randn(8, 5, 3)), batch_size=4)
    with pytest.raises(gaff.SiteError, match=r":output\[1\]\[0\]: has shape \(1, 4, 7\), and the batch 4 examples"):
        gaff.take(model, ":output[1][0]")(loader)
    assert gaff.take(model, ":output[0]")(loader)[":output[0]"].shape == (8, 5, 7)
    with pytest.raises(gaff.PlanError, match="the loader gave no batch"):
        gaff.take(model, ":output[0]").over([])
    with pytest.raises(gaff.PlanError, match="inputs=0 cannot be called"):
        gaff.take(model, ":output[0]").over(loader, inputs=0)


@pytest.mark.parametrize("inside", ["1", gaff.maybe("1")])
def test_a_model_that_holds_an_extractor_is_taken_from(inside):
    """The inner extractor must not take the outer one's early stop for its own."""
    body = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 3))

    class Big(nn.Module):
        def __init__(self):
            super().__init__()
            self.features = gaff.take(body, inside)
            self.head = nn.Linear(6, 2)

        def forward(self, x):
            return self.head(self.features(x)["1"])

    x = torch.randn(5, 3)
    found = gaff.take(Big(), "features.model.0")(x)
    assert torch.equal(found["features.model.0"], body[0](x))


@pytest.mark.parametrize("training", [True, False])
def test_an_extractor_begins_in_the_mode_of_its_model(training):
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).train(training)
    extractor = gaff.take(model, "1")
    assert extractor.training is training
    before = extractor.training
    extractor.eval()
    extractor.train(before)
    assert model[1].training is training
