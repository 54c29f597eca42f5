"""Small models that are trained on all the data until they have arrived: nothing is wrong with them."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gaff


class Gaussian(nn.Module):
    """A mean, by maximum likelihood."""

    def __init__(self):
        super().__init__()
        self.mean = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        return (x - self.mean).square().mean()


def regression(decay):
    def made():
        x = torch.randn(200, 3)
        y = (x @ torch.tensor([0.5, -0.4, 0.2]))[:, None] + torch.randn(200, 1)
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, weight_decay=decay)
        return model, optimizer, lambda: F.mse_loss(model(x), y)

    return made


def likelihood():
    x, model = 2 + torch.randn(200, 1), Gaussian()
    return model, torch.optim.SGD(model.parameters(), 0.1), lambda: model(x)


def from_zero():
    x = torch.randn(400, 10)
    y = (x @ torch.randn(10) * 0.3 + torch.randn(400) > 0).float()
    model = nn.Linear(10, 1)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.Adam(model.parameters(), 0.05)
    return model, optimizer, lambda: F.binary_cross_entropy_with_logits(model(x)[:, 0], y)


@pytest.mark.parametrize(
    "made",
    [regression(0.0), regression(0.01), likelihood, from_zero],
    ids=["least squares", "ridge", "likelihood", "from zero"],
)
def test_a_model_that_has_arrived_is_healthy(tmp_path, made):
    torch.manual_seed(0)
    model, optimizer, loss = made()
    with gaff.watch(model, optimizer, out=tmp_path / "run", every=25):
        for _ in range(1500):
            optimizer.zero_grad()
            loss().backward()
            optimizer.step()
    record = gaff.load(tmp_path / "run")
    assert record.verdict.state == "healthy", record.verdict
