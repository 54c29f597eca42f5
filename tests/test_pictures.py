"""Pictures show what passed: every cell against the tensor, attention and class activation against written-out ones."""

import base64
import gc
import json
import weakref

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import gaff
from gaff.cli import main
from gaff.inspection.pictures import attention_of
from gaff.inspection.trace import Trace


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3, padding=1)
        self.relu = nn.ReLU(inplace=True)
        self.more = nn.Conv2d(6, 4, 3, padding=1)
        self.fc = nn.Linear(4, 5)

    def forward(self, x):
        return self.fc(self.more(self.relu(self.conv(x))).mean((2, 3)))


X = torch.rand(2, 3, 16, 12, generator=torch.Generator().manual_seed(1))


def values(picture):
    """What the bytes of a picture stand for."""
    low, high = (-picture.limit, picture.limit) if picture.limit else (picture.low, picture.high)
    table = np.frombuffer(picture.data, np.uint8).reshape(picture.size).astype(np.float64)
    return torch.tensor(low + table / 255 * (high - low))


def pictured(model, *args, **options):
    trace = gaff.trace(model, *args, pictures=True, **options)
    return {(one.site, one.kind): one for one in trace.pictures}


def close(found, wanted, picture):
    step = (2 * picture.limit if picture.limit else picture.high - picture.low) / 255
    assert found.shape == wanted.shape
    assert (found - wanted.double()).abs().max() <= 0.51 * step + 1e-6


def test_feature_maps_are_of_the_first_example_before_anything_wrote_over_them():
    model = Net()
    with gaff.capture(model, "conv", "relu", "more", "conv:grad_output") as got:
        model(X)[:, 1].sum().backward()
    found = pictured(model, X, backward=lambda y: y[:, 1].sum())
    for site in ("conv", "relu", "more"):
        picture = found[site, "feature maps"]
        assert picture.shape == tuple(got[site].shape)
        assert (picture.limit > 0) == bool(got[site][0].min() < 0)
        assert (picture.low, picture.high) == (got[site][0].min().item(), got[site][0].max().item())
        close(values(picture), got[site][0], picture)
    gradient = found["conv:grad_output", "feature maps"]
    assert gradient.limit > 0
    close(values(gradient), got["conv:grad_output"][0], gradient)


def test_an_image_is_shown_as_it_is():
    picture = pictured(Net(), X)[":input[0]", "image"]
    assert picture.size == (16, 12, 3)
    close(values(picture), X[0].permute(1, 2, 0), picture)


def test_a_class_activation_map_is_grad_cam():
    model = Net()
    activations = model.more(model.relu(model.conv(X)))
    activations.retain_grad()
    model.fc(activations.mean((2, 3)))[0, 2].backward()
    weights = activations.grad[0].mean((1, 2))
    wanted = (weights[:, None, None] * activations[0]).sum(0).relu()
    picture = pictured(model, X, backward=lambda y: y[0, 2])["more", "class activation"]
    assert picture.over == 0  # the photo
    close(values(picture)[0], wanted.detach(), picture)


def test_large_maps_are_averaged_and_many_cut_and_it_is_said():
    model = nn.Sequential(nn.Conv2d(1, 100, 1))
    picture = pictured(model, torch.randn(1, 1, 200, 200))["0", "feature maps"]
    assert picture.size[0] == 36
    assert picture.title == "feature maps (first 36 of 100 channels, averaged to fit)"
    assert len(picture.data) <= 50_000


def test_what_is_not_finite_is_counted():
    class Bad(nn.Module):
        def forward(self, x):
            y = x.clone()
            y[0, 0, 1, 1] = float("nan")
            return y

    model = nn.Sequential(Bad())
    picture = pictured(model, torch.rand(1, 2, 5, 5))["0", "feature maps"]
    assert picture.title == "feature maps (1 not finite, drawn at the ends of the scale)"
    assert np.frombuffer(picture.data, np.uint8).reshape(picture.size)[0, 1, 1] == 0


@pytest.mark.parametrize(
    "case", ["plain", "causal", "longer", "bool", "added", "groups", "scale", "nothing", "three", "five"]
)
def test_attention_inside_the_fused_call_is_what_it_uses(case):
    torch.manual_seed(0)
    heads = 2 if case == "groups" else 4
    q, k, v = torch.randn(2, 4, 5, 8), torch.randn(2, heads, 7, 8), torch.eye(7).expand(2, heads, 7, 7)
    if case == "three":
        q, k, v = q[:, 0], k[:, 0], v[:, 0]
    if case == "five":
        q, k, v = (one.view(2, 2, 2, *one.shape[-2:]) for one in (q, k, v))
    masked = torch.zeros(5, 7, dtype=torch.bool)
    masked[1:] = True
    options = {
        "nothing": {"attn_mask": masked, "scale": 0.0}, "three": {}, "five": {}, "plain": {}, "causal": {"is_causal": True}, "longer": {}, "scale": {"scale": 0.3},
        "bool": {"attn_mask": torch.rand(5, 7) > 0.3}, "added": {"attn_mask": torch.randn(2, 1, 5, 7)},
        "groups": {"enable_gqa": True},
    }[case]  # fmt: skip
    wanted = functional.scaled_dot_product_attention(q, k, v, **options)  # of the identity: the probabilities
    found = attention_of("scaled_dot_product_attention", functional.scaled_dot_product_attention, (q, k, v), options)
    assert torch.isfinite(found).all()
    torch.testing.assert_close(found[0].reshape(wanted[0].shape), wanted[0].nan_to_num())


def test_attention_of_transformers_is_drawn_whichever_way_it_is_computed():
    from transformers import BertConfig, BertModel

    found = {}
    for way in ("sdpa", "eager"):
        torch.manual_seed(0)
        config = BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
                            vocab_size=20, attn_implementation=way)  # fmt: skip
        model = BertModel(config).eval()
        pictures = pictured(model, torch.tensor([[1, 2, 3, 4, 5]]))
        found[way] = next(one for (_, kind), one in pictures.items() if kind == "attention")
        assert found[way].size == (2, 5, 5)
    close(values(found["sdpa"]), values(found["eager"]), found["sdpa"])


def test_tokens_by_channels_and_values():
    model = nn.Sequential(nn.Linear(6, 10))
    tokens = pictured(model, torch.randn(2, 7, 6))["0", "tokens x channels"]
    assert tokens.size == (1, 7, 10)
    row = pictured(model, torch.randn(3, 6))["0", "values"]
    assert row.size == (1, 1, 10)


def test_looking_at_pictures_changes_no_bit_and_keeps_nothing_alive():
    model = Net()
    state = torch.get_rng_state()
    bare = model(X)
    wanted = bare.detach().clone()
    bare.sum().backward()
    gradients = [one.grad.clone() for one in model.parameters()]
    model.zero_grad()
    held = []

    def backward(y):
        held.append(weakref.ref(y))
        assert torch.equal(y, wanted)
        return y.sum()

    trace = gaff.trace(model, X, backward=backward, pictures=True)
    del bare
    gc.collect()
    assert held[0]() is None
    assert all(one.grad is None for one in model.parameters())
    model(X).sum().backward()
    assert all(torch.equal(one.grad, other) for one, other in zip(model.parameters(), gradients, strict=True))
    assert torch.equal(torch.get_rng_state(), state)
    assert trace.pictures


def test_a_trace_with_pictures_is_saved_and_read(tmp_path):
    trace = gaff.trace(Net(), X, pictures=True, backward=lambda y: y.sum())
    trace.save(tmp_path / "t.json")
    assert Trace.load(tmp_path / "t.json") == trace
    told = json.loads((tmp_path / "t.json").read_text())
    told["pictures"][0]["data"] = base64.b64encode(b"123").decode()
    with pytest.raises(gaff.errors.RecordError, match="a picture of 'image' and size"):
        Trace.from_json(json.dumps(told))


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(4, 4) for _ in range(4))

    def forward(self, x):
        y = self.a(x)
        return self.d(self.b(y) + self.c(y))


def test_edges_tell_who_took_what_from_whom_and_what_is_only_guessed():
    trace = gaff.trace(Branching(), torch.randn(2, 4))
    names = [row.site for row in trace.rows]
    edges = {(names[one], names[other], known) for one, other, known in trace.edges}
    assert ("a", "b", True) in edges
    assert ("a", "c", True) in edges
    assert {("b", "d", False), ("c", "d", False)} <= edges  # through an addition, which is no module
    with torch.no_grad():
        trace = gaff.trace(Branching(), torch.randn(2, 4))
    names = [row.site for row in trace.rows]
    edges = {(names[one], names[other], known) for one, other, known in trace.edges}
    assert ("c", "d", False) in edges  # without a graph: just the call before
    assert not any(one == "b" for one, _, _ in edges)
    exact = gaff.trace(Branching(), torch.randn(2, 4), ops=True)
    names = [row.site for row in exact.rows]
    known = {(names[one], names[other]) for one, other, is_known in exact.edges if is_known}
    assert {("b/linear#0", "/add#0"), ("c/linear#0", "/add#0"), ("/add#0", "d/linear#0")} <= known


def test_the_page_of_a_trace_holds_its_rows_and_pictures(tmp_path, capsys):
    page = tmp_path / "page.html"
    code = main(["trace", "examples/digits.py:model", "examples/digits.py:image", "--backward", "--html", str(page)])
    assert code == 0
    text = page.read_text()
    assert '"kind":"trace"' in text
    assert '"site":"features.4"' in text
    assert '"kind":"class activation"' in text
    assert '"sketch"' not in text


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.down, self.relu = (
            nn.Conv2d(3, 3, 1),
            nn.BatchNorm2d(3),
            nn.Conv2d(3, 3, 1),
            nn.ReLU(),
        )

    def forward(self, x):
        y = self.norm(self.conv(x))
        y += self.down(x)
        return self.relu(y)


def test_an_addition_in_place_does_not_hide_a_branch():
    trace = gaff.trace(Residual(), torch.rand(1, 3, 4, 4))
    names = [row.site for row in trace.rows]
    edges = {(names[one], names[other], known) for one, other, known in trace.edges}
    assert {("norm", "relu", False), ("down", "relu", False), ("conv", "norm", True)} <= edges


def test_a_class_activation_map_names_its_class():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 5))
    titles = {
        one.title for one in gaff.trace(net, torch.rand(2, 1, 8, 8), backward=lambda y: y[0, 3], pictures=True).pictures
    }
    assert "class activation map of class 3 over the input" in titles
    net.config = type("Config", (), {"id2label": {3: "cat"}})()
    titles = {
        one.title for one in gaff.trace(net, torch.rand(2, 1, 8, 8), backward=lambda y: y[0, 3], pictures=True).pictures
    }
    assert "class activation map of class 3 (cat) over the input" in titles
    titles = {
        one.title for one in gaff.trace(net, torch.rand(2, 1, 8, 8), backward=lambda y: y.sum(), pictures=True).pictures
    }
    assert "class activation map over the input" in titles  # of no single class
