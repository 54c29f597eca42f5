"""Terms of a loss: a cross entropy that another one drowns, and its value among others."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gaff
from gaff.training.watch.loss_graph import facts_of_graph


class Two(nn.Module):
    """A class and a number for each row."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 32), nn.ReLU())
        self.classes, self.number = nn.Linear(32, 5), nn.Linear(32, 1)

    def forward(self, x):
        hidden = self.body(x)
        return self.classes(hidden), self.number(hidden)[:, 0]


def findings(tmp_path, other, rate):
    """Of a training with the sum of a cross entropy and ``other(model, number, x)``."""
    torch.manual_seed(0)
    model = Two()
    optimizer = torch.optim.SGD(model.parameters(), rate)
    with gaff.watch(out=tmp_path / "run", every=5):
        for _ in range(120):
            x = torch.randn(64, 16)
            scores, number = model(x)
            optimizer.zero_grad()
            loss = F.cross_entropy(scores, x[:, :5].argmax(1)) + other(model, number, x)
            loss.backward()
            optimizer.step()
    return [one for one in gaff.load(tmp_path / "run").findings if one.rule == "term_drowned"]


def in_raw_units(model, number, x):
    return F.mse_loss(number, 1000 * x[:, 6])


def penalty(model, number, x):
    return 3 * sum(one.abs().sum() for one in model.parameters())


@pytest.mark.parametrize(("other", "rate"), [(in_raw_units, 1e-7), (penalty, 0.003)])
def test_a_cross_entropy_that_another_term_drowns_is_told(tmp_path, other, rate):
    (found,) = findings(tmp_path, other, rate)
    assert "the cross entropy in 'loss' is 1.6" in found.message
    assert "among 5 classes, as in guessing; the whole loss was" in found.message


@pytest.mark.parametrize(
    ("other", "rate"),
    [
        (lambda model, number, x: F.mse_loss(number, x[:, 6]), 0.1),
        (lambda model, number, x: 1e-4 * penalty(model, number, x), 0.1),
        (lambda model, number, x: torch.tensor(1000.0), 0.1),  # a large number beside it drowns nothing
    ],
    ids=["of one size", "small penalty", "constant"],
)
def test_terms_beside_which_classes_are_learned(tmp_path, other, rate):
    assert findings(tmp_path, other, rate) == []


@pytest.mark.parametrize(
    "options",
    [{}, {"ignore_index": 2}, {"weight": torch.tensor([1.0, 2.0, 0.5])}, {"label_smoothing": 0.0}],
    ids=["plain", "ignored", "weighted", "not smoothed"],
)
@pytest.mark.parametrize("shape", [(6,), (6, 4), (6, 2, 2)])
def test_the_value_of_a_cross_entropy_in_a_sum(options, shape):
    torch.manual_seed(0)
    scores = torch.randn(6, 3, *shape[1:], requires_grad=True)
    target = torch.randint(0, 3, shape)
    part = F.cross_entropy(scores, target, **options)
    told = facts_of_graph(3 * part + 2 * scores.square().sum(), "loss")["part"]
    assert told["among"] == 3
    torch.testing.assert_close(told["value"], part.detach())


def test_no_value_is_told_of_several_of_them_nor_of_a_sum_of_rows():
    scores = torch.randn(6, 3, requires_grad=True)
    target = torch.randint(0, 3, (6,))
    twice = F.cross_entropy(scores, target) + F.cross_entropy(2 * scores, target)
    added = F.cross_entropy(scores, target, reduction="sum") + scores.sum()
    assert "part" not in facts_of_graph(twice, "loss")
    assert "part" not in facts_of_graph(added, "loss")
