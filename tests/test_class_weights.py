"""Weights of classes that make a loss more one-sided than its labels are, and those that do not."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gaff
from gaff.training.watch.class_weights import weighed

OFTEN = torch.tensor([0.6, 0.3, 0.1])


def found(tmp_path, loss_of, outputs=3):
    """The finding of ``class_weights`` in a training on labels that come as ``OFTEN`` says; None where there is none."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, outputs))
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    with gaff.watch(out=tmp_path / "run", every=1):
        for _ in range(20):
            y = OFTEN.multinomial(40, replacement=True)
            x = torch.randn(40, 8) + 2 * y[:, None]
            optimizer.zero_grad()
            loss_of(model(x), y).backward()
            optimizer.step()
    return next((one for one in gaff.load(tmp_path / "run").findings if one.rule == "class_weights"), None)


def over_classes(weight):
    return lambda scores, labels: F.cross_entropy(scores, labels, weight=torch.tensor(weight))


def of_two(pos_weight):
    def loss(scores, labels):
        targets = (labels == 2).float()[:, None].expand_as(scores)
        return F.binary_cross_entropy_with_logits(scores, targets, pos_weight=torch.tensor(pos_weight))

    return loss


@pytest.mark.parametrize(
    ("loss_of", "outputs", "told"),
    [
        (over_classes([1.0, 1.0, 1000.0]), 3, "class 2 has 99."),
        (over_classes([0.6, 0.3, 0.1]), 3, "the weights of a loss grow with how often their classes come"),
        (of_two(0.11), 1, "the weights of a loss grow with how often their classes come"),
        (of_two(1000.0), 1, "class 1 has 99."),
        (over_classes([1.0, 1.0, 1.0]), 3, ""),
        (over_classes([1.0, 2.0, 6.0]), 3, ""),
        (over_classes([1.0, 1.0, 3.0]), 3, ""),
        (over_classes([1.0, 0.5, 1.0]), 3, ""),
        (over_classes([0.0, 0.0, 1.0]), 3, ""),
        (over_classes([0.0, 1.0, 3.0]), 3, ""),
        (of_two(9.0), 1, ""),
        (of_two(1.0), 1, ""),
        (of_two([0.11, 0.11]), 2, "the weights of a loss grow with how often their classes come"),
        (of_two([9.0, 9.0]), 2, ""),
        (of_two([0.11, 9.0]), 2, ""),
    ],
)
def test_weights_that_are_turned_around_or_far_too_large_are_told(tmp_path, loss_of, outputs, told):
    finding = found(tmp_path, loss_of, outputs)
    assert (finding is not None) == bool(told)
    assert finding is None or finding.message.startswith(told)


def test_what_weights_make_of_counts():
    told = weighed(torch.tensor([80.0, 20.0, 3.0, 0.0]), torch.tensor([4.0, 1.0, 0.0, 7.0]))
    assert {name: round(float(one), 4) for name, one in told.items()} == {
        "heaviest": 0.0,
        "share": round(320 / 340, 4),
        "own": 0.8,
        "slope": 1.0,
        "fit": 1.0,
        "spread": 0.6931,
    }
    assert weighed(torch.ones(2), None) == {}
