"""Two runs: modules that have other numbers in one of them, and weights that were others from the beginning."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gaff

INPUTS = torch.randn(320, 16, generator=torch.Generator().manual_seed(0))
LABELS = INPUTS[:, :4].argmax(1)


def run(folder, put=(), change=lambda net: None, names=("net",)):
    """A run of ten steps of three linear layers; ``put``: modules put in, each with its place in the list."""
    torch.manual_seed(0)
    layers = [nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4)]
    for at, module in put:
        layers.insert(at, module)
    nets = [nn.Sequential(*layers)] + [nn.Linear(16, 4) for _ in names[1:]]
    change(nets[0])
    optimizer = torch.optim.SGD([one for net in nets for one in net.parameters()], 0.1)
    torch.manual_seed(1)
    with gaff.watch(dict(zip(names, nets, strict=True)) if len(names) > 1 else nets[0], out=folder, every=1):
        for step in range(10):
            x, y = INPUTS[32 * step : 32 * step + 32], LABELS[32 * step : 32 * step + 32]
            loss = sum(F.cross_entropy(net(x), y) for net in nets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return gaff.load(folder)


@pytest.mark.parametrize("names", [("net",), ("net", "other")])
@pytest.mark.parametrize(
    "put", [[(2, nn.Identity())], [(2, nn.Dropout(0.0)), (1, nn.Identity())], [(5, nn.Identity())]]
)
def test_what_does_nothing_in_a_list_of_modules_makes_no_difference(tmp_path, put, names):
    found = gaff.diff(run(tmp_path / "a", names=names), run(tmp_path / "b", put, names=names))
    assert found.verdict.startswith("the same in all of")
    assert found.only_a == ()


def test_what_follows_a_dropout_that_was_put_in_is_held_against_the_same_layer(tmp_path):
    a, b = run(tmp_path / "a"), run(tmp_path / "b", [(4, nn.Dropout(0.5))])
    found = gaff.diff(a, b)
    assert (found.first.site, found.first.other, found.first.phase) == ("4", "5", "forward")
    assert {(row.site, row.other) for row in found.rows if row.phase == "forward"} >= {
        ("2", "2"),
        ("3", "3"),
        ("4", "5"),
    }
    assert ("4.weight:update", "5.weight:update") in {(row.site, row.other) for row in found.rows}
    assert any(name.startswith("4") for name in found.only_b)


def test_a_layer_that_was_put_in_among_others_of_its_size_moves_those_behind_it(tmp_path):
    def run_of(folder, has_more):
        torch.manual_seed(0)
        layers = [nn.Linear(16, 16) for _ in range(3)]
        if has_more:
            more = nn.Linear(16, 16)
            nn.init.eye_(more.weight)
            nn.init.zeros_(more.bias)
            layers.insert(1, more)
        net = nn.Sequential(*layers)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        with gaff.watch(net, out=folder, every=1):
            for _ in range(4):
                optimizer.zero_grad()
                net(INPUTS[:32]).square().mean().backward()
                optimizer.step()
        return gaff.load(folder)

    found = gaff.diff(run_of(tmp_path / "a", False), run_of(tmp_path / "b", True))
    at_first = {(row.site, row.other): row.state for row in found.rows if row.phase in ("weights", "forward")}
    assert ("1", "2") in at_first
    assert ("2", "3") in at_first
    assert found.first.step > 0  # the layer in between returns what it is given until it has learned


def test_modules_of_runs_can_be_paired_by_hand(tmp_path):
    a, b = run(tmp_path / "a"), run(tmp_path / "b", [(2, nn.Identity())])
    found = gaff.diff(a, b, pairs={"2": "3", "3": "4", "4": "5"})
    assert found.verdict.startswith("the same in all of")
    assert {row.how for row in found.rows if row.site.startswith("2")} == {"pairs"}
    with pytest.raises(gaff.PlanError, match="pairs names '7', which is no module of A"):
        gaff.diff(a, b, pairs={"7": "3"})


def _one(net):
    net[2].weight[3, 5] += 1e-3


def _rows(net):
    net[2].weight.copy_(net[2].weight.roll(1, 0))


def _swapped(net):
    net[2].weight[0, 0], net[2].weight[0, 1] = net[2].weight[0, 1].clone(), net[2].weight[0, 0].clone()


@pytest.mark.parametrize("change", [_one, _rows, _swapped])
def test_weights_that_were_others_at_first_are_the_first_difference(tmp_path, change):
    a, b = run(tmp_path / "a"), run(tmp_path / "b", change=torch.no_grad()(change))
    found = gaff.diff(a, b)
    assert (found.first.site, found.first.phase, found.first.step) == ("2.weight:param", "weights", 0)
    assert "the elements differ" in found.verdict


def test_how_far_weights_were_apart_is_told_by_the_norm_of_the_difference(tmp_path):
    size = {}

    @torch.no_grad()
    def changed(net):
        added = 1e-3 * torch.randn_like(net[2].weight)
        size["told"] = (added.norm() / net[2].weight.norm()).item()
        net[2].weight += added

    found = gaff.diff(run(tmp_path / "a"), run(tmp_path / "b", change=changed))
    row = next(row for row in found.rows if row.site == "2.weight:param")
    assert row.state == "parted"
    if row.number == "elements":
        assert 0.3 * size["told"] < row.delta < 3 * size["told"]


def test_rounding_of_first_weights_is_no_difference(tmp_path):
    def rounded(net):
        for weight in net.parameters():
            weight.data = (weight.data.double() * (1 + 1e-8)).float()

    found = gaff.diff(run(tmp_path / "a"), run(tmp_path / "b", change=rounded))
    assert not found


class Smooth(nn.Module):
    """A function between its layers, whose result is what the second one is given."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 4)

    def forward(self, x):
        return self.second(F.gelu(self.first(x)))


def test_what_layers_inside_are_given_is_no_batch(tmp_path):
    for name, dtype in (("single", torch.float32), ("double", torch.float64)):
        torch.manual_seed(0)
        net = Smooth().to(dtype)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        with gaff.watch(net, out=tmp_path / name, every=1):
            for step in range(10):
                x, y = INPUTS[32 * step : 32 * step + 32].to(dtype), LABELS[32 * step : 32 * step + 32]
                optimizer.zero_grad()
                F.cross_entropy(net(x), y).backward()
                optimizer.step()
    found = gaff.diff(gaff.load(tmp_path / "single"), gaff.load(tmp_path / "double"))
    assert "different batches" not in found.verdict
    assert next(row.state for row in found.rows if row.phase == "batch") == "close"


@pytest.mark.parametrize("begin", [0.0, 0.5])
def test_parameters_that_rounding_moves_are_no_difference(begin, tmp_path):
    for name, factor in (("one", 1.0), ("other", 1.0 + 2e-7)):  # as of another order of summation
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))
        with torch.no_grad():
            net[0].bias += begin * (name == "other")
        optimizer = torch.optim.Adam(net.parameters(), 1e-3)
        with gaff.watch(net, out=tmp_path / name, every=1):
            for step in range(10):
                x, y = INPUTS[32 * step : 32 * step + 32], LABELS[32 * step : 32 * step + 32]
                optimizer.zero_grad()
                (factor * F.cross_entropy(net(x), y)).backward()
                optimizer.step()
    found = gaff.diff(gaff.load(tmp_path / "one"), gaff.load(tmp_path / "other"))
    if begin:
        assert found.verdict.startswith("they differ first at 0.bias:param at step 0")
    else:
        assert found.verdict.startswith("equal within rounding or noise")
        assert any("whose gradients are rounding" in note and note.endswith(": 0.bias") for note in found.notes)
