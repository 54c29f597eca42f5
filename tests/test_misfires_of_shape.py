"""Healthy programs whose batches, weights or layers look odd from outside, by what rules ask of them; and the faults
beside them, which stay told."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import SWALR
from torch.utils.data import DataLoader, TensorDataset

import gaff


def run(tmp_path, model, step, steps=40, rate=1e-2):
    """A run of ``step(number)``, which returns the losses of a step; its findings by rule, and its verdict."""
    optimizer = torch.optim.Adam(model.parameters(), rate)
    with gaff.watch(out=tmp_path / "run", every=1):
        for number in range(steps):
            optimizer.zero_grad()
            for loss in step(number):
                loss.backward()
            optimizer.step()
    record = gaff.load(tmp_path / "run")
    return {one.rule for one in record.findings}, record.verdict


def classes(count, wide=6):
    torch.manual_seed(0)
    images = torch.randn(count, wide)
    return images, images[:, :3].argmax(1)


@pytest.mark.parametrize("is_whole", [True, False])
def test_a_step_over_all_batches_of_a_loader_is_not_on_the_same_batch(tmp_path, is_whole):
    loader = DataLoader(TensorDataset(*classes(160)), 40 if is_whole else 16)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))

    def step(number):
        for x, y in loader if is_whole else [next(iter(loader))]:
            yield F.cross_entropy(model(x), y) / 4

    found, _ = run(tmp_path, model, step)
    assert ("same_batch" in found) is not is_whole


@pytest.mark.parametrize("is_whole", [True, False])
def test_batches_of_one_class_that_a_step_goes_over_are_no_constant_labels(tmp_path, is_whole):
    images, labels = classes(240)
    batches = [(images[labels == kind], labels[labels == kind]) for kind in range(3)]
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))

    def step(number):
        for x, y in batches if is_whole else [batches[number % 3]]:
            yield F.cross_entropy(model(x), y) / 3

    found, _ = run(tmp_path, model, step)
    assert ("labels_constant" in found) is not is_whole


@pytest.mark.parametrize("are_several", [True, False])
def test_several_models_at_once_on_the_same_inputs_are_no_examples_alike(tmp_path, are_several):
    torch.manual_seed(0)

    class Several(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Parameter(torch.randn(8, 2, 16) if are_several else torch.randn(2, 16))
            self.last = nn.Parameter(torch.randn(8, 16, 1) / 4 if are_several else torch.randn(16, 1) / 4)

        def forward(self, x):
            return (x @ self.first).sin() @ self.last

    places = torch.rand(20, 2).expand(8, 20, 2)
    targets = torch.randn(8, 20, 1)
    model = Several()
    found, _ = run(tmp_path, model, lambda number: [F.mse_loss(model(places), targets)])
    assert ("examples_alike" in found) is not are_several


@pytest.mark.parametrize("kind", ["tables", "layers"])
def test_tables_that_are_added_up_may_begin_at_zero(tmp_path, kind):
    torch.manual_seed(0)

    class Tables(nn.Module):
        def __init__(self):
            super().__init__()
            self.here, self.left = (nn.Parameter(torch.zeros(12, 6)) for _ in range(2))

        def forward(self, x):
            return self.here[x] + self.left[x.roll(1, 1)]

    class Layers(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.other_weight = (nn.Parameter(torch.full((12, 6), 0.1)) for _ in range(2))

        def forward(self, x):
            return F.one_hot(x, 12).float() @ self.weight @ self.other_weight.T @ self.weight

    tokens = torch.randint(0, 12, (32, 10))
    model = Tables() if kind == "tables" else Layers()
    found, _ = run(tmp_path, model, lambda number: [F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten() % 6)])
    assert ("symmetric_units" in found) == (kind == "layers")


@pytest.mark.parametrize("is_lost", [True, False])
def test_a_gate_of_parameters_beside_the_data_loses_no_signal(tmp_path, is_lost):
    torch.manual_seed(0)

    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            self.theta, self.gate = nn.Parameter(torch.full((10,), 0.1)), nn.Sigmoid()
            self.body = nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 1))

        def forward(self, x):
            gates = self.gate(self.theta.expand(len(x), -1))
            return self.body(gates if is_lost else x * gates)[:, 0]

    x = torch.randn(64, 10)
    y = (x.sum(1) > 0).float()
    model = Gated()
    found, _ = run(tmp_path, model, lambda number: [F.binary_cross_entropy_with_logits(model(x), y)])
    assert ("no_signal" in found or "output_constant" in found) is is_lost


@pytest.mark.parametrize("value", [1.0, 0.5])
def test_nodes_without_features_are_given_ones(tmp_path, value):
    torch.manual_seed(0)

    class Graph(nn.Module):
        def __init__(self):
            super().__init__()
            self.edges = (torch.rand(40, 40) < 0.1).float()
            self.first, self.last = nn.Linear(1, 16), nn.Linear(16, 1)

        def forward(self, x):
            return self.last(self.edges @ torch.tanh(self.first(self.edges @ x)))

    model, ones = Graph(), torch.full((40, 1), value)
    targets = model.edges.sum(1, keepdim=True)
    found, _ = run(tmp_path, model, lambda number: [F.mse_loss(model(ones), targets)])
    assert ("input_constant" in found) == (value != 1.0)


@pytest.mark.parametrize("loss", ["mse", "binary"])
def test_guessing_is_of_all_batches_where_each_is_a_group_of_its_own(tmp_path, loss):
    torch.manual_seed(0)
    groups = torch.randn(64, 4)
    weight = torch.tensor([2.0, -1.0, 1.0, 0.5])

    def batch(number):
        group = groups[number % 64]
        x = group + 0.1 * torch.randn(32, 4)
        if loss == "mse":
            return x, (x @ weight)[:, None] + 0.5 * torch.randn(32, 1)
        likely = (4 * (group @ weight)).sigmoid().clamp(0.1, 0.9)
        return x, (torch.rand(32, 1) < likely).float()

    model = nn.Linear(4, 1)

    def step(number):
        x, y = batch(number)
        yield F.mse_loss(model(x), y) if loss == "mse" else F.binary_cross_entropy_with_logits(model(x), y)

    _, verdict = run(tmp_path, model, step, 300)
    assert verdict.state == "healthy", str(verdict)
    looks = [one for _, one in gaff.load(tmp_path / "run").events("look") if "guess" in one]
    told = torch.cat([batch(number)[1] for number in range(64)])
    share = told.mean()
    entropy = -(share * share.log() + (1 - share) * (1 - share).log())
    expected = told.var() if loss == "mse" else entropy
    assert looks[-1]["guess"] == pytest.approx(expected.item(), rel=0.15)


@pytest.mark.parametrize("since", [6, 99])
def test_a_schedule_that_waits_for_its_turn_has_been_stepped(tmp_path, since):
    torch.manual_seed(0)
    loader = DataLoader(TensorDataset(*classes(640)), 32, shuffle=True)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    schedule = SWALR(optimizer, swa_lr=0.02, anneal_epochs=2)
    with gaff.watch(out=tmp_path / "run", every=1):
        for epoch in range(7):
            for x, y in loader:
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
            if epoch >= since:
                schedule.step()
    found = {one.rule for one in gaff.load(tmp_path / "run").findings}
    assert ("schedule_not_stepped" in found) == (since == 99)
