"""Texts and tables of what is unusual: names that end alike, blocks that differ in one thing, counts near a unit."""

import json

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gaff
from gaff.inspection.anatomy import Anatomy
from gaff.views.run_text import site_table
from gaff.views.text import bytes_text, count_text


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.act, self.fc = nn.ReLU(), nn.Linear(8, 8)

    def forward(self, x):
        return self.act(self.fc(x))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc, self.fc, self.act, self.out = Encoder(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1)

    def forward(self, x):
        seen = self.enc(x)
        return self.out(self.act(self.fc(seen)) + seen)


def test_findings_stand_at_their_own_module(tmp_path):
    torch.manual_seed(0)
    model = Net()
    with torch.no_grad():
        model.fc.bias.fill_(-1000.0)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with gaff.watch(model, optimizer, out=tmp_path / "run", every=1, tell=lambda line: None):
        for _ in range(30):
            optimizer.zero_grad()
            model(torch.randn(32, 8)).square().mean().backward()
            optimizer.step()
    record = gaff.load(tmp_path / "run")
    lines = {line.split()[0]: line for line in site_table(record, record.findings, plain=True).splitlines()}
    assert "dead_units" in lines["act"]
    assert "dead_units" not in lines["enc.act"]


def test_ops_at_a_depth_have_no_parameters():
    trace = gaff.trace(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), torch.randn(2, 5, 16), ops=True)
    (line,) = [one for one in trace.table(depth=2).splitlines() if one.startswith("self_attn/multi_head")]
    assert "1088" not in line


@pytest.mark.parametrize(("kind", "lines"), [("buffer", 3), ("dtype", 3), ("", 1)])
def test_modules_that_differ_have_a_line_each(kind, lines):
    class Part(nn.Module):
        def __init__(self, at):
            super().__init__()
            self.at = at
            if kind == "buffer":
                self.register_buffer("mask", torch.zeros(at + 1))

        def forward(self, x):
            return x.to([torch.float32, torch.float16, torch.float64][self.at]) if kind == "dtype" else x

    told = str(gaff.sites(nn.Sequential(*map(Part, range(3))), torch.randn(2, 3)))
    assert sum("Part" in line for line in told.splitlines()) == lines


def test_a_block_whose_gradient_is_zero_is_not_folded_with_others():
    weights = torch.tensor([1.0, 1.0, 0.0, 1.0])

    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4)) for _ in range(4))

        def forward(self, x):
            return sum(weight * block(x) for weight, block in zip(weights, self.blocks, strict=True))

    told = gaff.trace(Sum(), torch.randn(2, 4), backward=lambda output: output.sum()).tree()
    assert "(4x)" not in told
    assert "grad 2x4 zero" in told


def test_counts_near_a_unit():
    assert [count_text(one) for one in (999_499, 999_600, 12_345)] == ["999K", "1M", "12.3K"]
    assert bytes_text(999_700_000) == "1GB"


def test_the_range_of_what_is_averaged_says_so():
    class Long(nn.Module):
        def forward(self, x):
            return x * 2

    trace = gaff.trace(Long(), torch.randn(1, 5000), pictures=True)
    assert any("values (averaged to fit)" in one.title for one in trace.pictures)


def test_the_legacy_hook_hangs_on_the_node_of_the_first_output():
    class Two(nn.Module):
        def forward(self, x):
            return x.neg(), x.abs()

    told = gaff.anatomy(Two(), torch.rand(3, requires_grad=True))
    assert "hangs on one node, the last of the forward: NegBackward0" in str(told)
    assert Anatomy.from_json(told.to_json()) == told
    broken = json.loads(told.to_json())
    broken["legacy_node"] = 99
    with pytest.raises(gaff.RecordError, match="no node 99"):
        Anatomy.from_json(json.dumps(broken))


def test_the_loss_of_an_empty_batch_is_told_as_that():
    def step():
        return F.cross_entropy(torch.zeros(0, 3, requires_grad=True), torch.zeros(0, dtype=torch.long))

    assert "the loss of an empty batch" in str(gaff.find_nonfinite(step))


def test_what_overflows_backward_is_no_nan_for_certain():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Linear(2, 2)

        def forward(self, x):
            seen = self.w(x)
            return (seen * 3e38).sum() + (seen * 3e38).sum()

    model = Twice()

    def step():
        model(torch.full((1, 2), 1e-3)).backward()

    assert str(gaff.find_nonfinite(step, model=model)).startswith("NaN or inf made in the backward pass")


@pytest.mark.parametrize(
    ("options", "is_fused"),
    [
        ({"batch_first": True}, True),
        ({"batch_first": False}, False),
        ({"batch_first": True, "activation": F.silu}, False),
        ({"batch_first": True, "bias": False}, False),
    ],
)
@pytest.mark.filterwarnings("ignore:gaff. not bitwise")
def test_a_slower_path_is_told_where_there_is_a_faster_one(options, is_fused):
    layer = nn.TransformerEncoderLayer(16, 2, 32, **options).eval()
    with torch.no_grad(), gaff.capture(layer, "linear1") as got:
        layer(torch.randn(3, 5, 16))
    assert ("not bitwise" in str(got.receipt)) == is_fused
