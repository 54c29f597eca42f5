"""Where a NaN or inf began: planted faults are found, clean models raise no alarm."""

import re

import pytest
import torch
from torch import nn

import gaff
from tests.clean import CLEAN
from tests.faults import FAULTS


@pytest.mark.filterwarnings("ignore:std")
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_found_where_it_is(fault):
    model, step = fault.build()
    report = gaff.find_nonfinite(step, model=model)
    assert report, report
    assert (report.op, report.direction) == (fault.op, fault.direction), report
    if fault.direction != "before":
        assert report.module == fault.module, report
        assert report.site.startswith(f"{fault.module}/{fault.op}#"), report
        assert report.line.startswith("faults.py:"), report
    else:
        assert report.site.startswith(fault.module), report
    assert re.search(fault.cause, report.cause), report


@pytest.mark.parametrize("build", CLEAN, ids=lambda build: build.__name__)
def test_no_alarm_on_a_clean_step(build):
    torch.manual_seed(0)
    model, step = build()
    report = gaff.find_nonfinite(step, model=model)
    assert not report, report
    assert report.ops


class Kept(nn.Linear):
    def __init__(self):
        super().__init__(2, 2)
        self.register_buffer("ema", torch.ones(2))


def divided(tensor):
    with torch.no_grad():
        tensor.div_(0)


@pytest.mark.parametrize(
    ("spoil", "direction", "site"),
    [
        (lambda model, optimizer: divided(model.weight), "forward", "(step)/div_#0"),
        (lambda model, optimizer: divided(model.ema), "forward", "(step)/div_#0"),
        (lambda model, optimizer: divided(model.weight.grad), "forward", "(step)/div_#0"),
        (lambda model, optimizer: model.weight.data.fill_(float("nan")), "written", "weight:param"),
        (lambda model, optimizer: (optimizer.step(), model.weight.data.div_(0)), "written", "weight:param"),
    ],
)
def test_state_that_code_spoils_is_not_blamed_on_an_optimizer(spoil, direction, site):
    model = Kept()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step():
        model(torch.ones(1, 2)).sum().backward()
        spoil(model, optimizer)

    report = gaff.find_nonfinite(step, model=model)
    assert (report.direction, report.site) == (direction, site)


@pytest.mark.parametrize("own", [None, 1])
def test_asking_what_an_op_overflowed_draws_no_number_and_writes_no_buffer(own):
    """The op is run again in float64."""
    norm = nn.BatchNorm1d(2, dtype=torch.float64)
    norm.weight.data.fill_(1e308)
    x = torch.tensor([[1.0, 2.0], [3.0, 1e3]], dtype=torch.float64)

    def step():
        generator = None if own is None else torch.Generator().manual_seed(own)
        torch.manual_seed(0)
        norm.running_mean.zero_()
        out = norm(x) * 10
        big = torch.full((2,), 6e4).half()
        drawn = torch.normal(big.float() * 1e34, 1e38, generator=generator).half()
        later = torch.rand(2) if generator is None else torch.rand(2, generator=generator)
        return out, drawn, later, norm.running_mean.clone()

    bare = step()
    found = []
    assert gaff.find_nonfinite(lambda: found.append(step()) or found[0][0])
    assert torch.equal(found[0][2], bare[2])
    assert torch.equal(found[0][3], bare[3])


def test_a_normalization_that_overflows_is_not_told_as_a_buffer_that_somebody_wrote():
    """It writes its running statistics itself, and does not use them in training."""
    norm, x = nn.BatchNorm1d(2), torch.full((8, 2), 3e38)
    x[:, 1] = torch.arange(8.0)
    report = gaff.find_nonfinite(lambda: norm(x), model=norm)
    assert report.op == "batch_norm"
    assert report.cause.startswith("overflow inside batch_norm")


@pytest.mark.parametrize(
    "pole", [lambda: torch.lgamma(torch.zeros(2)), lambda: torch.xlogy(torch.ones(2), torch.zeros(2)),
             lambda: torch.zeros(2) ** torch.tensor(-1.0)]
)  # fmt: skip
def test_poles_are_no_overflows(pole):
    report = gaff.find_nonfinite(lambda: pole() * 1.0)
    assert "infinite in float64, too: a pole" in report.cause
