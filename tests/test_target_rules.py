"""What a loss of torch's takes for something else: signs, rows that add up to more than one, classes of a CTC loss."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gaff


def rules(tmp_path, loss_of, outputs=4):
    torch.manual_seed(0)
    model = nn.Linear(8, outputs)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    with gaff.watch(out=tmp_path / "run", every=1):
        for _ in range(12):
            optimizer.zero_grad()
            loss_of(model, torch.randn(16, 8)).backward()
            optimizer.step()
    record = gaff.load(tmp_path / "run")
    return {one.rule for one in record.findings}, record.verdict


def labels(low):
    return (torch.rand(16) > 0.5).float() * (1 - low) + low


LOSSES = {
    "cosine": lambda low: lambda model, x: F.cosine_embedding_loss(model(x), model(-x), labels(low)),
    "cosine by name": lambda low: (
        lambda model, x: F.cosine_embedding_loss(input1=model(x), input2=model(-x), target=labels(low))
    ),
    "ranking": lambda low: lambda model, x: F.margin_ranking_loss(model(x)[:, 0], model(-x)[:, 0], labels(low)),
    "hinge": lambda low: lambda model, x: F.hinge_embedding_loss(model(x)[:, 0], labels(low)),
    "soft margin": lambda low: lambda model, x: F.soft_margin_loss(model(x)[:, 0], labels(low)),
    "module": lambda low: lambda model, x: nn.CosineEmbeddingLoss()(model(x), model(-x), labels(low)),
}


@pytest.mark.parametrize("low", [0.0, -1.0, 1.0])
@pytest.mark.parametrize("name", LOSSES)
def test_zeros_where_signs_are_wanted(tmp_path, name, low):
    found, verdict = rules(tmp_path, LOSSES[name](low))
    assert ("targets_no_signs" in found) == (low == 0)
    if low == 0:
        assert (verdict.state, verdict.name) == ("wrong", "targets_no_signs")


def test_pairs_that_are_left_out_among_signs(tmp_path):
    found, _ = rules(
        tmp_path, lambda model, x: F.cosine_embedding_loss(model(x), model(-x), torch.arange(16.0) % 3 - 1)
    )
    assert "targets_no_signs" not in found


@pytest.mark.parametrize(
    ("rows", "is_told"),
    [
        (lambda: (torch.rand(16, 4) > 0.3).float(), True),
        (lambda: torch.rand(16, 4).softmax(1), False),
        (lambda: F.one_hot(torch.arange(16) % 4).float() * (torch.arange(16) % 2)[:, None], False),
        (lambda: torch.randn(16, 4), False),
    ],
    ids=["several classes", "probabilities", "some left out", "no probabilities at all"],
)
def test_rows_that_add_up_to_more_than_one(tmp_path, rows, is_told):
    found, _ = rules(tmp_path, lambda model, x: F.cross_entropy(model(x), rows()))
    assert ("targets_add_up" in found) == is_told


@pytest.mark.parametrize(("dim", "is_moved"), [(2, False), (0, False), (1, False), (1, True), (2, True), (-1, True)])
def test_classes_of_a_ctc_loss_that_the_softmax_does_not_run_over(tmp_path, dim, is_moved):
    def loss_of(model, x):
        scores = model(x.expand(10, 16, 8))
        given = scores.transpose(0, 1) if is_moved else scores
        return F.ctc_loss(
            given.log_softmax(dim) if not is_moved else given.transpose(1, 2).log_softmax(dim).transpose(1, 2),
            torch.randint(1, 6, (given.shape[1], 3)),
            torch.full((given.shape[1],), len(given)),
            torch.full((given.shape[1],), 3),
            zero_infinity=True,
        )

    found, verdict = rules(tmp_path, loss_of, outputs=6)
    is_right = dim % 3 == (1 if is_moved else 2)
    assert ("softmax_axis" in found) == (not is_right)
    assert is_right or verdict.name == "softmax_axis"


@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated:FutureWarning")
@pytest.mark.parametrize("norm", ["", "spectral", "old spectral", "weight", "old weight"])
def test_the_last_bias_of_a_critic_gets_none_whatever_its_weight_is_made_of(tmp_path, norm):
    wrap = {
        "": lambda layer: layer,
        "spectral": nn.utils.parametrizations.spectral_norm,
        "old spectral": nn.utils.spectral_norm,
        "weight": nn.utils.parametrizations.weight_norm,
        "old weight": nn.utils.weight_norm,
    }[norm]
    torch.manual_seed(0)
    critic = nn.Sequential(wrap(nn.Linear(8, 16)), nn.LeakyReLU(0.2), wrap(nn.Linear(16, 1)))
    optimizer = torch.optim.Adam(critic.parameters(), 1e-3)
    with gaff.watch(critic, optimizer, out=tmp_path / "run", every=1):
        for _ in range(20):
            optimizer.zero_grad()
            (critic(torch.randn(32, 8)) - critic(torch.randn(32, 8) + 1)).mean().backward()
            optimizer.step()
    assert not [one for one in gaff.load(tmp_path / "run").findings if one.rule == "zero_gradient"]


def test_a_first_loss_above_guessing_is_no_fault_where_nearly_nothing_is_left_of_it(tmp_path):
    def margin(model, x):
        y = x[:, :4].argmax(1)
        cosines = F.linear(F.normalize(x), F.normalize(model.weight))
        return F.cross_entropy(64 * (cosines - 0.35 * F.one_hot(y, 4)), y)

    torch.manual_seed(0)
    model = nn.Linear(8, 4, bias=False)
    x = torch.randn(64, 8) * 0.1 + 3 * F.one_hot(torch.arange(64) % 4, 8)
    optimizer = torch.optim.Adam(model.parameters(), 0.05)
    with gaff.watch(model, optimizer, out=tmp_path / "run", every=1):
        for _ in range(200):
            optimizer.zero_grad()
            margin(model, x).backward()
            optimizer.step()
    record = gaff.load(tmp_path / "run")
    assert [one.rule for one in record.findings] == ["initial_loss"]
    assert record.verdict.state == "healthy", record.verdict
