"""Gradients accumulated over groups of batches, of which the last of an epoch is shorter."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gaff

OVER, LEFT = 8, 1  # batches of a group, and of the last one of an epoch
EPOCHS, GROUPS = 12, 4


def groups():
    """The groups of an epoch, each a list of batches of inputs and labels that can be learned."""
    images, labels = torch.randn(512, 12), torch.arange(512) % 4
    images = images + 2 * F.one_hot(labels, 12)
    batches = list(zip(images.split(8), labels.split(8), strict=True))
    starts = [*range(0, OVER * GROUPS, OVER)]
    return [batches[at : at + OVER] for at in starts] + [batches[-LEFT:]]


@pytest.mark.parametrize("every", [1, None])
@pytest.mark.parametrize("by_items", [False, True])
def test_a_shorter_last_group_is_neither_a_spike_nor_a_loss_that_rises(by_items, every, tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    told = groups()
    with gaff.watch(out=tmp_path / "run", **({"every": every} if every else {})):
        for _ in range(EPOCHS):
            for group in told:
                items = sum(len(labels) for _, labels in group)
                for inputs, labels in group:
                    how, by = ("sum", items) if by_items else ("mean", len(group))
                    loss = F.cross_entropy(model(inputs), labels, reduction=how) / by
                    loss.backward()
                optimizer.step()
                optimizer.zero_grad()
    record = gaff.load(tmp_path / "run")
    values, passes = record.scalar("loss"), record.scalar("passes:loss")
    assert len(values) == len(passes) == EPOCHS * (GROUPS + 1)
    assert passes.values == ([OVER] * GROUPS + [LEFT]) * EPOCHS
    assert values.values[GROUPS] > 4 * values.values[GROUPS - 1]  # what backward was called on, as it was
    assert record.findings == []
    assert record.verdict.state == "healthy"
    assert "0.125" in str(record.verdict) or by_items
    began, _, ended = str(record.verdict).split(" from about ")[1].split(",")[0].split(" ")[:3]
    assert float(ended) < 0.8 * float(began) < 0.3


def test_a_loss_of_one_pass_a_step_has_no_count_of_them(tmp_path):
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with gaff.watch(out=tmp_path / "run"):
        for _ in range(3):
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert not any(name.startswith("passes:") for name in gaff.load(tmp_path / "run").scalars)


def test_a_spike_of_a_divided_loss_is_told_in_its_own_scale(tmp_path):
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.ones(()))
    optimizer = torch.optim.SGD([weight], 1e-6)
    with gaff.watch(nn.ParameterList([weight]), out=tmp_path / "run", every=1):
        for step in range(60):
            for _ in range(4):
                loss = weight * (100.0 if step == 50 else 1 + 0.01 * (step % 3)) / 4
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    found = [one for one in gaff.load(tmp_path / "run").findings if one.rule == "loss_spike"]
    assert found[0].message.startswith("the loss 'loss' jumped to 25 from about 0.25")
