"""What is watched of large models: fused attention, routers of mixtures of experts, massive activations."""

import math
from collections import deque

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gaff
from gaff.record.sample import Load, Sample
from gaff.record.statistics import SAMPLED, WIDTH, Numbers, bucket_of
from gaff.training.rules import large
from gaff.training.rules.registry import Past
from gaff.training.watch import attention
from gaff.training.watch.routers import routings_of

KEY = ("net", "gate")


class Attention(nn.Module):
    """Self-attention by torch's fused op, with whatever else that is given."""

    def __init__(self, **given):
        super().__init__()
        self.qkv, self.out, self.given = nn.Linear(16, 48), nn.Linear(16, 16), given

    def heads(self, x):
        return [part.unflatten(-1, (2, 8)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1)]

    def forward(self, x):
        return self.out(F.scaled_dot_product_attention(*self.heads(x), **self.given).transpose(1, 2).flatten(-2))


class Block(nn.Module):
    """A mixture of experts in which each token goes to the one that a Linear scores highest."""

    def __init__(self, experts=4, shows=False):
        super().__init__()
        self.gate = Router(experts) if shows else nn.Linear(16, experts)
        self.experts = nn.ModuleList([nn.Linear(16, 16) for _ in range(experts)])

    def forward(self, x):
        scores = self.gate(x)
        scores, chosen = scores if isinstance(scores, tuple) else (scores, scores.argmax(-1))
        weight = scores.softmax(-1)
        return torch.stack([
            expert(x) * weight[..., at, None] * (chosen == at)[..., None] for at, expert in enumerate(self.experts)
        ]).sum(0)  # fmt: skip


class Router(nn.Module):
    """Returns scores and the expert of each token, of which it never takes the last one."""

    def __init__(self, experts):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(experts, 16))

    def forward(self, x):
        scores = x @ self.weight.T
        return scores, scores[..., :-1].argmax(-1)


class Behind(nn.Module):
    """As many layers as classes: nothing that scores experts."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(16, 16) for _ in range(4)])
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).relu()
        return self.head(x)


def watched(model, x, tmp_path, steps=12):
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with gaff.watch(model, out=tmp_path / "run", every=1):
        for _ in range(steps):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return gaff.load(tmp_path / "run")


def value_of(record, site, name):
    return record.series(site, name).values[0]


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("length", [5, 200])
def test_fused_attention_is_told_as_the_plain_formula_gives_it(is_causal, length, tmp_path):
    torch.manual_seed(0)
    model, x = Attention(is_causal=is_causal), 3 * torch.randn(3, length, 16)
    with torch.no_grad():
        query, key, _ = model.heads(x[:1])
        scores = query @ key.transpose(-2, -1) / math.sqrt(8)
        step = ((length - 1) // 64 + 1) | 1
        rows = torch.arange(step - 1, length, step)
        keys = torch.arange(length)
        seen = (keys <= rows[:, None]) if is_causal else torch.ones(len(rows), length, dtype=torch.bool)
        scores = scores[:, :, rows].masked_fill(~seen, -torch.inf)
        weights = scores.softmax(-1)
        entropy = torch.special.entr(weights).sum(-1).sum() / (2 * seen.sum(-1).log().sum())
        first = weights[:, :, seen.sum(-1) > 1, 0].mean()
    record = watched(model, x, tmp_path, steps=1)
    site = "/scaled_dot_product_attention:weights"
    told = {name: value_of(record, site, name) for name in ("entropy", "first_key", "logit", "max")}
    assert told["entropy"] == pytest.approx(float(entropy), rel=1e-4)
    assert told["first_key"] == pytest.approx(float(first), rel=1e-4)
    assert told["logit"] == pytest.approx(float(scores.max()), rel=1e-4)
    assert told["max"] == pytest.approx(float(weights.max()), rel=1e-4)


def test_attention_to_very_many_keys_is_left_out_with_a_note(monkeypatch, tmp_path):
    monkeypatch.setattr(attention, "_MOST_SCORES", 9)
    record = watched(Attention(), torch.randn(2, 5, 16), tmp_path, steps=1)
    assert "/scaled_dot_product_attention:weights" not in map(str, record.sites)
    told = "/scaled_dot_product_attention:weights: attention of 2 heads to 5 keys is too much to be computed once more"
    assert told in record.notes


def test_a_router_without_tokens_does_not_end_the_watching(tmp_path):
    record = watched(Block(), torch.randn(0, 16), tmp_path, steps=2)
    assert record.verdict.name == "nonfinite"  # the mean of nothing
    assert not [one for one in record.notes if "failure" in one or "Error" in one]
    assert len(record.looks) == 2


def test_what_is_masked_counts_for_nothing(tmp_path):
    torch.manual_seed(0)
    mask = torch.zeros(6, 6)
    mask[:, 3:] = torch.finfo(torch.float32).min
    model = Attention(attn_mask=mask)
    with torch.no_grad():
        model.qkv.weight.mul_(0.0)  # every key that is seen is as good as another
    record = watched(model, torch.randn(2, 6, 16), tmp_path, steps=1)
    site = "/scaled_dot_product_attention:weights"
    assert value_of(record, site, "entropy") == pytest.approx(1.0, abs=1e-5)
    assert value_of(record, site, "first_key") == pytest.approx(1 / 3, abs=1e-5)


def test_a_watched_step_with_fused_attention_has_the_bits_of_a_bare_one(tmp_path):
    def trained(around):
        torch.manual_seed(0)
        model, x = Attention(dropout_p=0.1), torch.randn(2, 6, 16)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with around(model):
            for _ in range(3):
                model(x).square().mean().backward()
                optimizer.step()
        return [*model.parameters(), torch.get_rng_state()]

    bare = trained(lambda model: torch.enable_grad())
    looked = trained(lambda model: gaff.watch(model, out=tmp_path / "run", every=1))
    assert all(torch.equal(a, b) for a, b in zip(bare, looked, strict=True))
    assert F.scaled_dot_product_attention is torch._C._nn.scaled_dot_product_attention


def test_routers_are_found_by_structure():
    model = nn.Sequential(Block(), Block(shows=True), Behind())
    found = {path: routings_of(model)[one] for path, one in model.named_modules() if one in routings_of(model)}
    assert found["0.gate"].experts == 4
    assert found["0.gate"].number is None
    assert found["1.gate"].gate == "1.gate"
    assert found["0.experts.2"].number == 2
    assert "0" not in found
    assert "1.experts" not in found


def test_loads_are_counted(tmp_path):
    torch.manual_seed(0)
    model, x = Block(), torch.randn(64, 16)
    counts = model.gate(x).argmax(-1).bincount(minlength=4)
    record = watched(model, x, tmp_path, steps=1)
    assert value_of(record, "gate", "load") == pytest.approx(float(counts.max()) / 16)
    assert all(map(math.isnan, record.series("gate", "idle").values))  # of first choices it is not known
    entropy = torch.special.entr(model.gate(x).detach().softmax(-1)).sum(-1).mean() / math.log(4)
    assert value_of(record, "gate", "choice") == pytest.approx(float(entropy), rel=0.02)


def test_an_expert_that_gets_no_token_is_found(tmp_path):
    torch.manual_seed(0)
    record = watched(Block(shows=True), torch.randn(64, 16), tmp_path, steps=24)
    found = [one for one in record.findings if one.rule == "dead_experts"]
    assert found
    assert found[0].evidence["idle"] == [3]
    assert "experts 3 of 4 got none of" in found[0].message


class Sparse(Block):
    """Calls each expert with its own tokens only, and the last one with none."""

    def forward(self, x):
        chosen = self.gate(x)[..., :-1].argmax(-1)
        return torch.cat([expert(x[chosen == at]) for at, expert in enumerate(self.experts[:-1])])


def test_where_tokens_go_is_told_by_what_experts_are_called_with(tmp_path):
    torch.manual_seed(0)
    model, x = Sparse(), torch.randn(64, 16)
    counts = model.gate(x)[..., :-1].argmax(-1).bincount(minlength=4)
    record = watched(model, x, tmp_path, steps=24)
    assert value_of(record, "gate", "load") == pytest.approx(float(counts.max()) / 16)
    assert value_of(record, "gate", "idle") == 0.25
    assert [one.evidence["idle"] for one in record.findings if one.rule == "dead_experts"] == [[3]]
    assert not [one for one in record.findings if one.rule == "no_gradient"]


def test_a_classifier_behind_as_many_layers_as_classes_is_no_router(tmp_path):
    record = watched(Behind(), torch.randn(64, 16), tmp_path, steps=2)
    assert all(map(math.isnan, record.series("head", "load").values))


def test_tokens_that_no_expert_gets_are_dropped():
    load = Load((3, 3, 0, 1), True, 10, 3)
    assert load.number("dropped") == pytest.approx(0.3)
    assert load.number("idle") == pytest.approx(0.25)
    assert load.number("load") == pytest.approx(3 * 4 / 7)
    assert math.isnan(Load((3, 3, 0, 1), False, 7, 0).number("idle"))
    assert math.isnan(Load((0, 0), True, 0, 0).number("load"))


def sample_of(load):
    sample = Sample(5, "train", 1.0)
    sample.loads[KEY] = load
    past = Past()
    for _ in range(8):
        past.loads.setdefault(KEY, deque(maxlen=16)).append(load)
    return sample, past


def test_a_router_that_has_collapsed_is_found():
    assert list(large.router_collapse(*sample_of(Load((97, 1, 1, 1), False, 100, 0))))
    assert not list(large.router_collapse(*sample_of(Load((70, 10, 10, 10), False, 100, 0))))
    assert not list(large.router_collapse(*sample_of(Load((100, 100, 0, 0), True, 100, 0))))  # two for each token
    assert not list(large.dead_experts(*sample_of(Load((97, 3, 0, 0), False, 100, 0))))  # first choices say nothing
    assert list(large.dead_experts(*sample_of(Load((97, 3, 0, 0), True, 100, 0))))


def test_a_massive_activation_is_a_fact():
    row = [0.0] * WIDTH
    row[0], row[3], row[4], row[SAMPLED] = 1000, -1.0, 5000.0, 1000
    row[SAMPLED + 1 + bucket_of(-1)] = 999  # magnitudes from a half to one
    row[SAMPLED + 1 + bucket_of(12)] = 1
    numbers = Numbers(row)
    assert numbers.median_magnitude == 1.0
    sample = Sample(1, "train", 0.0)
    sample.rows["net", "h.0"] = numbers
    hits = list(large.massive_activation(sample, Past()))
    assert [one.evidence for one in hits] == [{"largest": 5000.0, "median_at_most": 1.0}]
    row[4] = 90.0
    sample = Sample(1, "train", 0.0)
    sample.rows["net", "h.0"] = Numbers(row)
    assert not list(large.massive_activation(sample, Past()))
    row[3], row[4] = -3.4e38, 5000.0  # a mask
    sample.rows["net", "h.0"] = Numbers(row)
    assert not list(large.massive_activation(sample, Past()))
    assert Numbers([0.0] * WIDTH).median_magnitude == 0.0


def test_scores_that_have_grown_are_found_unless_the_loss_falls():
    sample, past = Sample(50, "train", 1.0), Past()
    sample.shares["logit", KEY] = 2000.0
    assert [one.evidence["largest_score"] for one in large.attention_logits(sample, past)] == [2000.0]
    past.losses["loss"], past.recent["loss"] = [4.0, 4.0, 4.0], deque([1.0, 1.0])
    assert not list(large.attention_logits(sample, past))
