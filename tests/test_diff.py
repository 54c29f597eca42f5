"""Where two part: planted differences are found first and at their site, and what is equal is called so."""

import copy
import json
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gaff
from gaff.cli import main
from gaff.inspection.diff.difference import DiffRow
from gaff.inspection.diff.pairs import Pairing
from gaff.inspection.sketches import digest, sketch


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.one, self.two = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.two(torch.tanh(self.one(self.norm(x))))


class Net(nn.Module):
    def __init__(self, blocks=4):
        super().__init__()
        self.blocks = nn.ModuleList(Block(16) for _ in range(blocks))
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Port(nn.Module):
    """The same net under other names."""

    def __init__(self, net):
        super().__init__()
        self.layers, self.out = net.blocks, net.head

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.out(x)


X = torch.randn(32, 16, generator=torch.Generator().manual_seed(3))


def traced(model, x=X):
    return gaff.trace(model, x, backward=lambda y: y.float().square().mean())


def spoil_weight(net):
    with torch.no_grad():
        net.blocks[2].one.weight[3, 5] += 1e-3


def spoil_eps(net):
    net.blocks[1].norm.eps = 1e-3


def spoil_order(net):
    with torch.no_grad():
        net.blocks[2].two.weight.copy_(net.blocks[2].two.weight[torch.randperm(16)])  # the same values elsewhere
        net.blocks[2].two.bias.zero_()


def spoil_bias(net):
    with torch.no_grad():
        net.head.bias += 1e-4


def spoil_one_type(net):
    net.blocks[3].two.register_forward_hook(lambda module, args, y: y.bfloat16().float())


@pytest.mark.parametrize(
    ("spoil", "site"),
    [(spoil_weight, "blocks.2.one"), (spoil_eps, "blocks.1.norm"), (spoil_order, "blocks.2.two"), (spoil_bias, "head"),
     (spoil_one_type, "blocks.3.two")],
)  # fmt: skip
def test_a_planted_difference_is_the_first(spoil, site):
    net = Net()
    if spoil is spoil_order:
        with torch.no_grad():
            net.blocks[2].two.bias.zero_()
    other = copy.deepcopy(net)
    spoil(other)
    found = gaff.diff(traced(net), traced(other))
    assert found
    assert (found.first.site, found.first.phase) == (site, "forward")
    assert f"they differ first at {site}, forward" in found.verdict


def test_a_difference_in_backward_alone_is_found_there():
    class Turned(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return -grad

    net = Net()
    other = copy.deepcopy(net)
    real = other.blocks[1].forward
    other.blocks[1].forward = lambda x: Turned.apply(real(x))
    found = gaff.diff(traced(net), traced(other))
    assert found.first.phase == "backward"
    assert found.first.site == "blocks.1.two"


def test_the_same_model_twice_is_the_same_to_the_last_bit():
    net = Net()
    found = gaff.diff(traced(net), traced(copy.deepcopy(net)))
    assert not found
    assert {row.state for row in found.rows} == {"same"}
    assert "the same in all of" in found.verdict
    assert found.first is None


def test_a_port_is_matched_by_order_and_shape():
    net = Net()
    found = gaff.diff(traced(net), traced(Port(copy.deepcopy(net))))
    assert not found
    assert {(row.site, row.other) for row in found.rows} >= {("blocks.2.one", "layers.2.one"), ("head", "out")}
    other = Port(copy.deepcopy(net))
    other.layers[3].norm.eps = 0.1
    found = gaff.diff(traced(net), traced(other))
    assert (found.first.site, found.first.other) == ("blocks.3.norm", "layers.3.norm")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_another_precision_is_rounding_but_not_with_a_tolerance_of_nothing(dtype):
    net = Net()
    a, b = traced(net), traced(copy.deepcopy(net).to(dtype), X.to(dtype))
    assert not gaff.diff(a, b)
    assert "equal within rounding" in gaff.diff(a, b).verdict
    assert gaff.diff(a, b, tolerance=0.0)


@pytest.mark.parametrize("eps", [1e-5, 0.5])
def test_what_bfloat16_has_rounded_stays_rounded_in_float32(eps):
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16)) for _ in range(3)]
    net, x = nn.Sequential(*layers, nn.LayerNorm(16)), torch.randn(8, 16)
    other = copy.deepcopy(net)
    other[2][0].eps = eps
    one = gaff.trace(net, x, backward=lambda y: y.pow(3).mean())
    with torch.autocast("cpu", dtype=torch.bfloat16):  # layer norms are in float32 there
        two = gaff.trace(other, x, backward=lambda y: y.float().pow(3).mean())
    found = gaff.diff(one, two)
    assert [found.first.site] == ["2.0"] if eps == 0.5 else found.first is None


class Attending(nn.Module):
    def __init__(self, is_told, bias=0.0):
        super().__init__()
        self.is_told, self.bias = is_told, bias

    def forward(self, x):
        weights = (x @ x.mT).softmax(-1)
        return (weights @ x + self.bias, weights) if self.is_told else (weights @ x + self.bias, None)


@pytest.mark.parametrize("bias", [0.0, 0.1])
def test_one_that_returns_more_tensors_is_compared_by_the_first(bias):
    x = torch.randn(2, 4, 8)
    found = gaff.diff(gaff.trace(Attending(True), x), gaff.trace(Attending(False, bias), x))
    if bias:
        assert found.first.site == ":output"
    else:
        assert not found
        assert any(
            ":output returns 2x4x8, 2x4x4 in A and 2x4x8 in B: their moments agree" in note for note in found.notes
        )


def test_a_batch_without_rows_is_another_input():
    net, x = nn.Linear(4, 4), torch.randn(3, 4)
    found = gaff.diff(gaff.trace(net, x), gaff.trace(net, x[:0]))
    assert found.verdict.startswith("they were given different inputs: shape 3x4 against 0x4")


def test_complex_elements_that_differ_are_told_without_a_number():
    net, other, x = nn.Identity(), nn.Identity(), torch.randn(3, dtype=torch.complex64)
    found = gaff.diff(gaff.trace(net, x), gaff.trace(other, x * 1))
    assert not found
    net.forward = lambda x: x.conj().resolve_conj()
    assert "forward: the elements differ, a difference" in gaff.diff(gaff.trace(net, x), gaff.trace(other, x)).verdict


def test_modes_classes_and_settings_that_differ_are_told():
    a = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8), nn.ReLU())
    b = copy.deepcopy(a)
    b[1], b[3] = nn.GELU("tanh"), nn.SiLU()
    b[2].eps = 1e-3
    b[3].eval()
    x = torch.randn(3, 4)
    notes = gaff.diff(gaff.trace(a, x), gaff.trace(b, x)).notes
    assert "3 is in training mode in A and in eval mode in B" in notes
    assert "3 is a ReLU in A and a SiLU in B" in notes
    assert "1 is approximate='none' in A and approximate='tanh' in B, the first of 2 calls so" in notes
    assert gaff.diff(gaff.trace(a, x), gaff.trace(copy.deepcopy(a), x)).notes == ()
    whole = gaff.diff(gaff.trace(a, x), gaff.trace(copy.deepcopy(a).eval(), x)).notes
    assert whole == ("0 is in training mode in A and in eval mode in B, the first of all calls so",)


def test_a_layer_less_is_told():
    net, other = Net(), Net(3)
    other.blocks.load_state_dict({key: value for key, value in net.blocks.state_dict().items() if key[0] != "3"})
    other.head.load_state_dict(net.head.state_dict())
    found = gaff.diff(traced(net), traced(other))
    assert set(found.only_a) >= {"blocks.3", "blocks.3.norm", "blocks.3.one", "blocks.3.two"}
    assert found.first.site == "head"


def test_nan_in_one_is_a_difference_and_in_both_is_none():
    net = Net()
    with torch.no_grad():
        net.blocks[1].two.bias[0] = float("nan")
    assert not gaff.diff(traced(net), traced(copy.deepcopy(net)))
    other = copy.deepcopy(net)
    with torch.no_grad():
        other.blocks[1].two.bias[0] = 0.0
    assert gaff.diff(traced(net), traced(other)).first.site == "blocks.1.two"


@pytest.mark.parametrize("shape", [(1,), (31,), (32,), (3, 33), (2**20 + 5,), (5, 7, 9)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_sketch_tells_the_norm_and_a_digest_the_bits(shape, dtype):
    x = torch.randn(shape).to(dtype)
    y = x.clone()
    y.view(-1)[-1] += 1
    assert digest(x) == digest(x.clone())
    assert digest(x) != digest(y)
    assert torch.equal(sketch(x)[0], sketch(x.clone())[0])
    apart = (sketch(y)[0] - sketch(x)[0]).norm().item()
    assert apart == pytest.approx((y.double() - x.double()).norm().item(), rel=0.2)
    ratio = sketch(x)[0].norm().item() / x.double().norm().item()
    assert 0.3 < ratio < 1.9


def test_a_sketch_knows_strides_and_passes_over_what_is_not_finite():
    x = torch.randn(6, 8)
    assert torch.equal(sketch(x.t())[0], sketch(x.t().contiguous())[0])
    assert digest(x.t()) == digest(x.t().contiguous())
    bad = x.clone()
    bad[0, 0] = float("inf")
    assert torch.isfinite(sketch(bad)[0]).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 2, 12, 3626, 11520, 12822, 16064])
def test_no_change_that_is_the_same_in_all_elements_cancels_in_a_digest(dtype, size):
    x = torch.randn(size, dtype=torch.float64).to(dtype)
    others = [-x, x * 2, x * 4, x * 16, x / 2]
    if size > 2:
        others.append(torch.cat([-x[:2], x[2:]]))
    marks = [int(digest(torch.view_as_real(one) if dtype.is_complex else one)) for one in (x, *others)]
    assert len(set(marks)) == len(marks)


def test_one_element_of_any_stride_has_a_digest():
    doubles = torch.arange(8, dtype=torch.float64)
    assert digest(doubles[::8]) == digest(doubles[:1].clone())
    assert digest(doubles[1:][::7]) != digest(doubles[::8])


def test_a_model_of_doubles_whose_output_is_negated_is_not_the_same():
    mine = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)).double()
    theirs = copy.deepcopy(mine)
    theirs[1].weight.data.neg_()
    theirs[1].bias.data.neg_()
    x = torch.randn(16, 8, dtype=torch.float64)
    parted = gaff.diff(gaff.trace(mine, x), gaff.trace(theirs, x))
    assert parted
    assert "differ first at 1," in parted.verdict
    assert any("the values of 1.weight are not the same" in note for note in parted.notes)


class Returns(nn.Module):
    """Returns what it is told, times what it is given."""

    def __init__(self, *values):
        super().__init__()
        self.values = values

    def forward(self, x):
        found = tuple(value * x.to(value.dtype) for value in self.values)
        return found if len(found) > 1 else found[0]


def returned(*values):
    return gaff.trace(nn.Sequential(Returns(*values)), torch.ones(()))


SMALL, NAN, INF = 1 + 1e-7, math.nan, math.inf


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([torch.ones(3).bfloat16(), torch.tensor(0.3).bfloat16()], [torch.ones(3).bfloat16(), torch.tensor(NAN).bfloat16()]),
        ([torch.ones(3), torch.tensor(0.0)], [torch.ones(3), torch.tensor(INF)]),
        ([torch.zeros(3, dtype=torch.complex64)], [torch.full((3,), NAN, dtype=torch.complex64)]),
        ([torch.tensor([1.0, NAN, 2.0])], [torch.tensor([SMALL, INF, 2.0])]),
        ([torch.tensor([1.0, INF, -INF])], [torch.tensor([SMALL, -INF, INF])]),
        ([torch.tensor([1.0, NAN, 0.0])], [torch.tensor([SMALL, 0.0, NAN])]),
        ([torch.tensor([1.0, INF])], [torch.tensor([1.0, -INF])]),
        ([torch.tensor([1.0, NAN]).to_sparse()], [torch.tensor([1.0, 2.0]).to_sparse()]),
    ],
)  # fmt: skip
def test_what_is_not_finite_is_never_rounding(one, other):
    found = gaff.diff(returned(*one), returned(*other))
    assert found
    assert found.first.delta == math.inf, found
    assert not gaff.diff(returned(*one), returned(*one))


@pytest.mark.slow
def test_two_elements_that_are_exchanged_are_a_difference():
    x = torch.arange(4096).float()
    for at in range(0, 4064, 32):
        y = x.clone()
        y[at], y[at + 32] = x[at + 32], x[at]
        assert gaff.diff(returned(x), returned(y)), at


def train(out, lr=0.01, seed=0, spoil=None, dtype=torch.float32):
    torch.manual_seed(0)
    net = Net(2).to(dtype)
    optimizer = torch.optim.SGD(net.parameters(), lr)
    data = torch.Generator().manual_seed(seed)
    with gaff.watch(net, optimizer, out=out, every=1):
        for step in range(20):
            optimizer.zero_grad()
            if spoil is not None:
                spoil(net, step)
            net(torch.randn(32, 16, generator=data).to(dtype)).square().mean().backward()
            optimizer.step()
    return gaff.load(out)


def test_two_runs_alike_are_the_same(tmp_path):
    found = gaff.diff(train(tmp_path / "a"), train(tmp_path / "b"))
    assert not found
    assert {row.state for row in found.rows} == {"same"}


def test_another_learning_rate_parts_first_in_the_first_update(tmp_path):
    train(tmp_path / "a")
    train(tmp_path / "b", lr=0.02)
    found = gaff.diff(tmp_path / "a", str(tmp_path / "b"))
    assert found.first.step == 0
    assert found.first.site.endswith(":update")


def test_a_learning_rate_a_little_higher_parts_there_though_it_is_less_than_noise(tmp_path):
    found = gaff.diff(train(tmp_path / "a", lr=0.01), train(tmp_path / "b", lr=0.01001))
    assert (found.first.phase, found.first.step, found.first.site.split(":")[-1]) == ("parameter", 0, "update")
    assert "is rounding or noise" in found.verdict
    assert found.notes[0] == "other settings: optimizer, lr is 0.01 in A and 0.01001 in B"
    assert found.notes[1].startswith("the first number that differs at all is")
    forgiven = gaff.diff(tmp_path / "a", tmp_path / "b", tolerance=1e9)
    assert not forgiven
    assert "equal within the tolerance of 1e+09" in forgiven.verdict


def test_weights_that_begin_with_other_numbers_part_there_however_noisy_the_run_is(tmp_path):
    def spoil(net, step):
        if step == 0:
            next(net.parameters()).data.mul_(1.0005)

    found = gaff.diff(train(tmp_path / "a", lr=1.0), train(tmp_path / "b", lr=1.0, spoil=spoil))
    assert (found.first.phase, found.first.step, found.first.state) == ("weights", 0, "parted")
    assert found.first.tolerance < 1e-4


def test_losses_of_noisy_runs_part_where_one_is_far_larger(tmp_path):
    def noisy(out, factor):
        torch.manual_seed(0)
        net = Net(2)
        optimizer = torch.optim.SGD(net.parameters(), 1e-6)
        with gaff.watch(net, optimizer, out=out, every=1):
            for step in range(20):
                optimizer.zero_grad()
                F.mse_loss(net(torch.randn(4, 16)) * 0, torch.full((4, 3), factor * 2.0 ** (step % 3))).backward()
                optimizer.step()
        return gaff.load(out)

    found = gaff.diff(noisy(tmp_path / "a", 1.0), noisy(tmp_path / "b", 1e3))
    [loss] = [row for row in found.rows if row.phase == "loss"]
    assert loss.state == "parted", loss
    assert loss.tolerance < 1


def test_another_batch_is_named_before_all_it_causes(tmp_path):
    found = gaff.diff(train(tmp_path / "a"), train(tmp_path / "b", seed=1))
    assert (found.first.phase, found.first.step) == ("batch", 0)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_same_batches_in_another_type_are_told_by_their_numbers(tmp_path, dtype):
    a = train(tmp_path / "a")
    found = gaff.diff(a, train(tmp_path / "b", dtype=dtype))
    [batch] = [row for row in found.rows if row.phase == "batch"]
    assert (batch.state, batch.number) == ("close", "type")
    assert found.first is None or found.first.site.endswith(":update")  # too small for bfloat16
    other = gaff.diff(a, train(tmp_path / "c", dtype=dtype, seed=1))
    assert (other.first.phase, other.first.step) == ("batch", 0)


def test_a_weight_that_changes_on_the_way_is_found_in_its_step(tmp_path):
    def spoil(net, step):
        if step == 12:
            with torch.no_grad():
                net.blocks[1].one.weight *= 3

    found = gaff.diff(train(tmp_path / "a"), train(tmp_path / "b", spoil=spoil))
    assert found.first.step == 12
    assert found.first.site == "blocks.1.one.weight:param"


def test_pairs_prefer_names_then_the_longest_rows_of_equals():
    pairing = Pairing(["x1", "y2", "z3"], ["a1", "y2", "b2", "c3"])
    pairing.by_name(str)
    pairing.by_likeness("digit", *([one[1] for one in rows] for rows in (pairing.a, pairing.b)))
    assert [tuple(pair) for pair in pairing.pairs] == [(0, 0, "digit"), (1, 1, "address"), (2, 3, "digit")]
    assert pairing.left() == ([], [2])


def test_pairs_between_others_do_not_cross_them():
    pairing = Pairing(["x", "same", "y"], ["same", "a", "b"])
    pairing.by_name(str)
    pairing.by_likeness("any", ["k", None, "k"], [None, "k", "k"], is_between=True)
    assert [tuple(pair) for pair in pairing.pairs] == [(1, 0, "address"), (2, 1, "any")]


class Apart(nn.Module):
    """Attention with a layer each for queries, keys and values."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(6, 8)
        self.norm = nn.LayerNorm(8)
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8) for _ in range(4))
        self.out = nn.Linear(8, 3)

    def forward(self, x):
        x = self.embed(x)
        y = self.norm(x)
        return self.out(x + self.o(F.scaled_dot_product_attention(self.q(y), self.k(y), self.v(y))))


class Fused(nn.Module):
    """The same by other names, with one layer for all three, and the attention by hand."""

    def __init__(self, original, scale=8**-0.5):
        super().__init__()
        self.wte, self.ln, self.attn, self.head = (
            nn.Linear(6, 8),
            nn.LayerNorm(8),
            FusedAttention(scale),
            nn.Linear(8, 3),
        )
        with torch.no_grad():
            for name in ("weight", "bias"):
                parts = [getattr(getattr(original, one), name) for one in "qkv"]
                getattr(self.attn.qkv, name).copy_(torch.cat(parts))
        for mine, theirs in ((self.wte, "embed"), (self.ln, "norm"), (self.attn.proj, "o"), (self.head, "out")):
            mine.load_state_dict(getattr(original, theirs).state_dict())

    def forward(self, x):
        x = self.wte(x)
        return self.head(x + self.attn(self.ln(x)))


class FusedAttention(nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.qkv, self.proj, self.scale = nn.Linear(8, 24), nn.Linear(8, 8), scale

    def forward(self, y):
        q, k, v = self.qkv(y).chunk(3, -1)
        return self.proj((q @ k.transpose(-1, -2) * self.scale).softmax(-1) @ v)


def test_a_port_that_fuses_layers_is_the_same_where_it_returns_the_same():
    torch.manual_seed(0)
    a = Apart()
    x = torch.randn(2, 5, 6)
    traces = [gaff.trace(one, x, backward=lambda y: y.square().sum()) for one in (a, Fused(a))]
    found = gaff.diff(*traces)
    assert not found
    assert {(row.site, row.other) for row in found.rows} >= {("o", "attn.proj"), ("embed", "wte"), ("norm", "ln")}
    assert set(found.only_a) == {"q", "k", "v"}


def test_a_port_with_a_fault_is_told_at_the_first_layer_behind_it():
    torch.manual_seed(0)
    a = Apart()
    x = torch.randn(2, 5, 6)
    found = gaff.diff(gaff.trace(a, x), gaff.trace(Fused(a, scale=1.0), x))
    assert (found.first.site, found.first.other) == ("o", "attn.proj")
    assert "note: between norm, which agrees, and that: q, k, v in A; attn.qkv in B" in str(found)


def test_weights_that_were_not_copied_are_named():
    torch.manual_seed(0)
    a, b = Apart(), Apart()
    b.load_state_dict(a.state_dict())
    with torch.no_grad():
        b.v.weight.copy_(a.v.weight.roll(1, 0))
    found = gaff.diff(gaff.trace(a, torch.ones(1, 2, 6)), gaff.trace(b, torch.ones(1, 2, 6)))
    assert found.first.site == "v"
    assert "the values of v.weight are not the same in both, the first of 1 of 14 parameters" in str(found)


def test_modules_are_paired_by_hand(tmp_path, capsys):
    torch.manual_seed(0)
    a, x = Apart(), torch.randn(2, 5, 6)
    b = Fused(Apart())  # of other weights
    traces = gaff.trace(a, x), gaff.trace(b, x)
    found = gaff.diff(*traces, pairs={"o": "attn.proj", "out": "head"})
    assert {(row.site, row.other) for row in found.rows if row.how == "pairs"} >= {
        ("o", "attn.proj"),
        ("out", "head"),
    }
    for name, one in zip("ab", traces, strict=True):
        one.save(tmp_path / f"{name}.json")
    files = [str(tmp_path / f"{name}.json") for name in "ab"]
    assert main(["diff", *files, "--pair", "o=attn.proj", "--json"]) == 3
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert ("o", "attn.proj", "pairs") in {(row["site"], row["other"], row["how"]) for row in rows}
    assert main(["diff", *files, "--pair", "o"]) == 1
    assert "--pair o: expected A=B" in capsys.readouterr().err
    with pytest.raises(gaff.PlanError, match="pairs names 'x', which is no module of A"):
        gaff.diff(*traces, pairs={"x": "head"})


def test_the_command_tells_saves_and_says_by_its_exit_code(tmp_path, capsys):
    net = Net()
    other = copy.deepcopy(net)
    spoil_eps(other)
    traced(net).save(tmp_path / "a.json")
    traced(other).save(tmp_path / "b.json")
    assert main(["diff", str(tmp_path / "a.json"), str(tmp_path / "a.json")]) == 0
    assert main(["diff", str(tmp_path / "a.json"), str(tmp_path / "b.json"), "--html", str(tmp_path / "d.html")]) == 3
    assert "they differ first at blocks.1.norm" in capsys.readouterr().out
    assert '"kind":"diff"' in (tmp_path / "d.html").read_text()
    assert main(["diff", str(tmp_path / "a.json"), str(tmp_path / "b.json"), "--json"]) == 3
    told = json.loads(capsys.readouterr().out)
    assert told["first"]["site"] == "blocks.1.norm"
    assert main(["diff", str(tmp_path / "a.json"), str(tmp_path / "b.json"), "--tolerance", "2"]) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["{trace}", "{run}"], "expected two runs, or two traces"), (["{trace}", "{none}"], "is not there"),
     (["{trace}", "{trace}", "--tolerance", "-1"], "expected a relative difference of 0 or more"),
     (["{trace}", "{trace}", "--tolerance", "nan"], "expected a relative difference of 0 or more")],
)  # fmt: skip
def test_what_cannot_be_compared_is_told_in_a_line(tmp_path, capsys, arguments, message):
    traced(Net(1)).save(tmp_path / "trace.json")
    train(tmp_path / "run")
    names = {"trace": tmp_path / "trace.json", "run": tmp_path / "run", "none": tmp_path / "none"}
    assert main(["diff", *(one.format(**names) for one in arguments)]) == 1
    assert message in capsys.readouterr().err
    with pytest.raises(gaff.errors.PlanError, match="diff was given a int"):
        gaff.diff(1, 2)


def test_runs_of_a_folder_are_listed_also_those_that_cannot_be_read(tmp_path, capsys):
    train(tmp_path / "runs" / "good")
    bad = tmp_path / "runs" / "bad"
    bad.mkdir()
    (bad / "rank0.gaff").write_bytes(b"nothing")
    assert main(["runs", str(tmp_path / "runs")]) == 0
    text = capsys.readouterr().out
    assert "nothing wrong was found in 20 steps" in text
    assert "is no record of gaff" in text
    assert main(["runs", str(tmp_path / "runs"), "--json"]) == 0
    assert {one["ended"] for one in json.loads(capsys.readouterr().out)} == {"yes", ""}
    assert main(["runs", str(tmp_path)]) == 1
    assert "holds no run" in capsys.readouterr().err


class Same(nn.Module):
    """Returns what it was built with, whatever comes in."""

    def __init__(self, *outputs):
        super().__init__()
        self.outputs = outputs

    def forward(self, x):
        return self.outputs[0] if len(self.outputs) == 1 else self.outputs


NAN, INF = float("nan"), float("inf")
BIG = torch.randn(2, 2**20)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ([torch.tensor([NAN, 1.0, 2.0])], [torch.tensor([NAN, 100.0, 205.0])]),
        ([torch.tensor([NAN, 1.0, 2.0])], [torch.tensor([INF, 1.0, 2.0])]),
        ([torch.tensor([NAN, 0.0, 2.0])], [torch.tensor([0.0, NAN, 2.0])]),
        ([BIG], [BIG.flip(0)]),
        ([torch.ones(3), torch.ones(3)], [torch.ones(3), 2 * torch.ones(3)]),
        ([torch.ones(3, dtype=torch.complex64)], [torch.ones(3, dtype=torch.complex64) * 1j]),
        ([torch.tensor([1.0, 2.0], dtype=torch.float64)], [torch.tensor([1.0, 2.0 + 1e-9], dtype=torch.float64)]),
        ([torch.tensor([1e200], dtype=torch.float64)], [torch.tensor([2e200], dtype=torch.float64)]),
    ],
    ids=["nan in both", "inf for nan", "nan elsewhere", "blocks swapped", "second output", "complex", "double", "huge"],
)
def test_what_is_not_the_same_is_never_called_so(a, b):
    x = torch.zeros(1)
    found = gaff.diff(gaff.trace(Same(*a), x), gaff.trace(Same(*b), x))
    assert found, found
    assert not gaff.diff(gaff.trace(Same(*a), x), gaff.trace(Same(*a), x))


def test_other_shapes_and_signs_of_zero_are_not_the_same_bits():
    a, b = torch.zeros(2, 3), -0.0 * torch.arange(6.0).view(2, 3)
    found = gaff.diff(gaff.trace(Same(a), torch.zeros(1)), gaff.trace(Same(b), torch.zeros(1)))
    assert {row.state for row in found.rows if row.phase == "forward"} == {"close"}
    assert "the first bits that differ are those of :output" in str(found)
    found = gaff.diff(*(gaff.trace(Same(one), torch.zeros(1)) for one in (a, a.view(3, 2))))
    assert (found.first.site, found.first.number) == (":output", "shape")


@pytest.mark.parametrize("is_short", [True, False])
def test_layers_that_torch_has_fused_are_others_at_their_addresses(is_short):
    torch.manual_seed(0)
    one = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU(),
                        nn.Flatten(), nn.Linear(8 * 16, 5))  # fmt: skip
    one(3 * torch.randn(16, 3, 8, 8) + 1)
    one.eval()
    other = copy.deepcopy(one)
    for at in (0, 3):
        other[at], other[at + 1] = torch.nn.utils.fuse_conv_bn_eval(other[at], other[at + 1]), nn.Identity()
    if is_short:
        other = nn.Sequential(*(layer for layer in other if not isinstance(layer, nn.Identity)))
    x = torch.randn(4, 3, 8, 8)
    assert not gaff.diff(gaff.trace(one, x), gaff.trace(other, x))
    with torch.no_grad():
        other[0].weight.mul_(1.01)
    assert gaff.diff(gaff.trace(one, x), gaff.trace(other, x)).first.site == "0"


def test_another_input_is_told_before_what_it_causes():
    net = Net()
    found = gaff.diff(traced(net), traced(net, X.flip(1)))
    assert (found.first.phase, found.first.state) == ("input", "parted")
    assert "they were given different inputs: " in found.verdict
    assert found.rows[1].state == "parted"
    twice = gaff.diff(traced(net), traced(net, 2 * X))
    assert "different inputs: 50 % apart" in twice.verdict
    close = gaff.diff(traced(net), traced(net, X * (1 + 2**-23)))
    assert close.first is None or close.first.phase != "input"
    assert close.rows[0].state == "close"
    assert close.rows[0].delta > 1e-9


def test_one_layer_of_another_type_is_named():
    class Cast(nn.Module):
        def __init__(self, linear):
            super().__init__()
            self.linear = linear.bfloat16()

        def forward(self, x):
            return self.linear(x.bfloat16())

    torch.manual_seed(0)
    a = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Identity())
    b = copy.deepcopy(a)
    b[1] = Cast(b[1])
    found = gaff.diff(gaff.trace(a, X[:, :4]), gaff.trace(b, X[:, :4]))
    assert any("is float32 in A and bfloat16 in B" in note for note in found.notes)


def test_a_gradient_that_ceases_and_nan_of_one_run_are_differences(tmp_path):
    def freeze(net, step):
        if step == 9:
            net.head.weight.requires_grad_(False)
            net.head.weight.grad = None

    train(tmp_path / "a")
    train(tmp_path / "b", spoil=freeze)
    found = gaff.diff(tmp_path / "a", tmp_path / "b")
    assert found.first.step == 9
    row = next(row for row in found.rows if row.site == "head.weight:grad")
    assert (row.state, row.number, row.b) == ("parted", "presence", "absent")


def test_a_difference_in_evaluation_is_found(tmp_path):
    records = []
    for name, factor in (("a", 1.0), ("b", 3.0)):
        torch.manual_seed(0)
        net = Net(1)
        optimizer = torch.optim.SGD(net.parameters(), 0.01)
        data = torch.Generator().manual_seed(0)
        with gaff.watch(net, optimizer, out=tmp_path / name, every=1):
            for _ in range(12):
                optimizer.zero_grad()
                net(torch.randn(8, 16, generator=data)).square().mean().backward()
                optimizer.step()
            net.eval()
            with torch.no_grad():
                net(factor * X)
        records.append(gaff.load(tmp_path / name))
    found = gaff.diff(*records)
    assert found.first.phase == "evaluation"


def test_differences_are_told_as_people_read_them():
    run = DiffRow("a", "a", "forward", "parted", math.log(10), 0.001, "rms", step=3)
    assert (run.told(run.delta), run.told(run.tolerance), run.told(720.0)) == (
        "10x",
        "(1 + 0.001)x",
        "720 of the logarithm",
    )
    assert DiffRow("a", "a", "forward", "parted", 1.5, 0.37, "max", step=3).told(1.5) == "150 % of the rms"
    assert DiffRow("a", "a", "forward", "parted", 0.996, 0.37, "mean").told(0.996) == "99.6 %"
    assert run.told(math.inf) == "inf"


def test_whole_numbers_do_not_round():
    class Off(nn.Module):
        def __init__(self, off):
            super().__init__()
            self.off = off

        def forward(self, x):
            ids = x.clone()
            ids[1, 2] += self.off
            return ids

    x = torch.randint(40_000, 59_000, (64, 128), generator=torch.Generator().manual_seed(0))
    found = gaff.diff(gaff.trace(nn.Sequential(Off(0)), x), gaff.trace(nn.Sequential(Off(1)), x))
    assert found.first.site == "0"
    narrow = gaff.diff(gaff.trace(nn.Sequential(Off(0)), x), gaff.trace(nn.Sequential(Off(0)), x.int()))
    assert not narrow  # in another type, and equal


def test_a_batch_of_another_size_is_another_one():
    model, x = nn.Sequential(nn.Linear(2, 3), nn.ReLU()), torch.randn(4, 2)
    found = gaff.diff(gaff.trace(model, x), gaff.trace(model, torch.cat([x, x])))
    assert [(row.a, row.b) for row in found.rows[:2]] == [("4x2", "8x2"), ("4x3", "8x3")]
    assert {row.number for row in found.rows[:2]} == {"shape"}
    assert "different inputs: shape 4x2 against 8x2" in found.verdict
    turned = gaff.diff(gaff.trace(nn.Flatten(), x), gaff.trace(nn.Flatten(0), x))
    assert (turned.first.number, turned.first.a, turned.first.b) == ("shape", "4x2", "8")  # what a caller gets
    turned = gaff.diff(*(gaff.trace(nn.Sequential(nn.Flatten(at), nn.Flatten(0)), x) for at in (0, 1)))
    assert not turned  # as many elements in another shape inside


@pytest.mark.slow
@pytest.mark.parametrize("change", ["double", "channels_last", "bfloat16"])
def test_gradients_that_cancel_are_the_rounding_of_those_before_them(change):
    """That of a bias before batch norm is zero in theory; so are all that pass a layer norm from the mean of its output."""
    torch.manual_seed(0)
    normed = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4))
    ended = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 16), nn.LayerNorm(16))
    x = torch.randn(4, 3, 8, 8)
    memory_format = torch.channels_last if change == "channels_last" else torch.preserve_format
    dtype = {"double": torch.float64, "bfloat16": torch.bfloat16}.get(change, torch.float32)
    for model, loss in ((normed, lambda y: y.float().square().mean()), (ended, lambda y: y.float().mean())):
        other = copy.deepcopy(model).to(dtype=dtype, memory_format=memory_format)
        given = x.to(dtype=dtype, memory_format=memory_format)
        found = gaff.diff(gaff.trace(model, x, backward=loss), gaff.trace(other, given, backward=loss))
        assert not found, found.verdict
        with torch.no_grad():
            other[-1].weight.mul_(1.5)
        assert gaff.diff(gaff.trace(model, x, backward=loss), gaff.trace(other, given, backward=loss))


def test_runs_of_other_lengths_say_how_much_was_compared(tmp_path):
    records = []
    for name, steps in (("a", 12), ("b", 9)):
        torch.manual_seed(0)
        net = Net(1)
        optimizer = torch.optim.SGD(net.parameters(), 0.01)
        with gaff.watch(net, optimizer, out=tmp_path / name, every=1):
            for _ in range(steps):
                optimizer.zero_grad()
                net(torch.ones(8, 16)).square().mean().backward()
                optimizer.step()
        records.append(gaff.load(tmp_path / name))
    notes = gaff.diff(*records).notes
    assert "A made 12 steps and B 9: the 9 that were looked at in both were compared" in notes
    assert not any("were compared" in note for note in gaff.diff(records[0], records[0]).notes)


def test_a_tolerance_that_is_given_is_meant_of_small_gradients_too():
    """A part of a thousandth of the output's gradient, and a difference of a tenth in it alone."""

    class Small(nn.Module):
        def __init__(self, factor):
            super().__init__()
            self.first, self.last, self.factor = nn.Linear(4, 4), nn.Linear(4, 4), factor

        def forward(self, x):
            h = self.first(x)
            return self.last(x) + 1e-3 * (self.factor * h + (1 - self.factor) * h.detach())

    torch.manual_seed(0)
    one, x = Small(1.0), torch.randn(3, 4)
    other = Small(1.1)
    other.load_state_dict(one.state_dict())
    traces = [gaff.trace(model, x, backward=lambda y: y.square().sum()) for model in (one, other)]
    found = gaff.diff(*traces, tolerance=0.01)
    assert found.first.site.startswith("first"), found
    assert found.first.delta == pytest.approx(0.1 / 1.1, rel=0.2)


@pytest.mark.slow
def test_rounding_adds_up_from_the_first_bits_that_differ_on():
    """However deep the model is: what came before, and is the same, has no part in it."""
    torch.manual_seed(0)
    one = nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(60)]).bfloat16()
    other = copy.deepcopy(one)
    x = torch.randn(4, 32).bfloat16()
    with torch.no_grad():
        other[55][0].weight.mul_(1.15)
    found = gaff.diff(gaff.trace(one, x), gaff.trace(other, x))
    assert found
    assert found.rows[next(at for at, row in enumerate(found.rows) if row.state == "parted")].site == "55.0"
    assert not gaff.diff(gaff.trace(one, x), gaff.trace(copy.deepcopy(one).float(), x.float()))


@pytest.mark.parametrize("between", [nn.Identity(), nn.Dropout(0.1)])
@pytest.mark.parametrize("at", [1, 2, 6])
def test_layers_behind_one_that_does_nothing_are_found_by_their_weights(between, at):
    torch.manual_seed(0)
    one = nn.Sequential(*[layer for _ in range(3) for layer in (nn.Linear(8, 8), nn.ReLU())], nn.Linear(8, 2)).eval()
    other = nn.Sequential(*copy.deepcopy(one)[:at], between, *copy.deepcopy(one)[at:]).eval()
    x = torch.randn(4, 8)
    found = gaff.diff(gaff.trace(one, x), gaff.trace(other, x))
    assert not found, found.verdict
    assert found.verdict.startswith("the same in all of")
    assert len(found.only_b) == 1
    assert not found.only_a
    with torch.no_grad():
        other[-1].bias.add_(1.0)
    found = gaff.diff(gaff.trace(one, x), gaff.trace(other, x))
    assert "they differ first at 6" in found.verdict


def test_what_was_put_in_between_is_found_whichever_of_the_two_has_it():
    first, last = nn.Linear(16, 16), nn.Linear(16, 4)
    longer = nn.Sequential(first, nn.ReLU(), nn.Dropout(0.1), last).eval()
    shorter = nn.Sequential(first, nn.ReLU(), last).eval()
    x = torch.randn(8, 16)
    traces = gaff.trace(longer, x), gaff.trace(shorter, x)
    assert not gaff.diff(*traces)
    assert not gaff.diff(*reversed(traces))


def test_a_small_gradient_that_is_halved_is_no_rounding():
    """A branch with a tiny scale; the other model loses half of the gradient in it, and the forward has the same bits."""

    class Small(nn.Module):
        def __init__(self, *, is_halved):
            super().__init__()
            self.branch, self.head = nn.Sequential(*(nn.Linear(16, 16) for _ in range(6))), nn.Linear(16, 4)
            self.is_halved = is_halved

        def forward(self, x):
            h = self.branch(x)
            return self.head(x + 1e-7 * (h.detach() * 0.5 + h * 0.5 if self.is_halved else h))

    torch.manual_seed(0)
    a, b, x = Small(is_halved=False), Small(is_halved=True), torch.randn(8, 16)
    b.load_state_dict(a.state_dict())
    traces = [gaff.trace(model, x, backward=lambda y: y.square().mean()) for model in (a, b)]
    found = gaff.diff(*traces)
    assert found
    assert "branch" in str(found.verdict)


def test_a_list_of_modules_is_named_in_a_pair():
    class Stack(nn.Module):
        def __init__(self, name):
            super().__init__()
            self.encoder = nn.Module()
            setattr(self.encoder, name, nn.ModuleList(nn.Linear(4, 4) for _ in range(2)))
            self.name = name

        def forward(self, x):
            for one in getattr(self.encoder, self.name):
                x = one(x).tanh()
            return x

    torch.manual_seed(0)
    traces = [gaff.trace(Stack(name), torch.ones(1, 4)) for name in ("layer", "block")]
    found = gaff.diff(*traces, pairs={"encoder.layer": "encoder.block"})
    assert ("encoder.layer.0", "encoder.block.0") in {(row.site, row.other) for row in found.rows}


@pytest.mark.parametrize("changed", ["labels", "twice"])
def test_a_loss_that_changes_in_one_step_is_where_two_runs_part(tmp_path, changed):
    def train(name, change):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
        optimizer, x = torch.optim.Adam(net.parameters()), torch.randn(384, 16)
        y = x[:, :4].argmax(1)
        with gaff.watch(net, optimizer, out=tmp_path / name, every=1):
            for step in range(12):
                rows = slice(32 * step, 32 * step + 32)
                optimizer.zero_grad()
                smoothing = 0.1 if change == "labels" and step >= 4 else 0.0
                loss = F.cross_entropy(net(x[rows]), y[rows], label_smoothing=smoothing)
                (loss * 2 if change == "twice" else loss).backward()
                optimizer.step()

    train("a", "")
    train("b", changed)
    found = gaff.diff(tmp_path / "a", tmp_path / "b")
    at = 4 if changed == "labels" else 0
    assert f"they differ first at loss:loss at step {at}, loss:" in found.verdict
    assert f"the first number that differs at all is loss:loss at step {at}" in found.notes


def test_weights_that_lie_at_one_anothers_places_are_told_where_they_lie():
    """Queries and keys loaded the wrong way round: both models have the same calls, so that names pair them."""
    torch.manual_seed(0)

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k, self.v, self.o = (nn.Linear(16, 16) for _ in range(4))

        def forward(self, x):
            return self.o(nn.functional.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x)))

    a, b, x = Attention(), Attention(), torch.randn(2, 5, 16)
    b.load_state_dict(
        {{"q": "k", "k": "q"}.get(name[0], name[0]) + name[1:]: one for name, one in a.state_dict().items()}
    )
    found = gaff.diff(gaff.trace(a, x), gaff.trace(b, x))
    assert found.first.site == "q"
    assert any("q.weight are not the same in both (B has those of A in k.weight)" in note for note in found.notes)


def test_layers_that_moved_on_in_a_stack_of_the_same_length_are_found_by_their_weights():
    """The first is gone and a new one is the last: what was shifted is no exchange."""
    torch.manual_seed(0)
    layers, x = [nn.Linear(6, 6) for _ in range(4)], torch.randn(2, 6)
    found = gaff.diff(gaff.trace(nn.Sequential(*layers), x), gaff.trace(nn.Sequential(*layers[1:], nn.Linear(6, 6)), x))
    assert (found.only_a, found.only_b) == (("0",), ("3",))
    assert [(row.site, row.other) for row in found.rows if row.phase == "forward"][:3] == [
        ("1", "0"),
        ("2", "1"),
        ("3", "2"),
    ]


def test_weights_that_are_alike_by_chance_are_not_called_moved():
    """Ones of another norm layer are where they were in both."""
    a = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4), nn.LayerNorm(4))
    b = copy.deepcopy(a)
    with torch.no_grad():
        b[1].weight.mul_(1.5)
    found = gaff.diff(gaff.trace(a, x := torch.randn(2, 4)), gaff.trace(b, x))
    assert any("the values of 1.weight are not the same in both, the first of" in note for note in found.notes)


def test_a_layer_with_other_weights_differs_though_the_end_agrees():
    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            self.inside, self.out, self.gate = nn.Linear(4, 4), nn.Linear(4, 2), nn.Parameter(torch.zeros(()))

        def forward(self, x):
            return self.out(x + self.gate * torch.relu(self.inside(x)))

    torch.manual_seed(0)
    one, x = Gated(), torch.randn(3, 4)
    other = copy.deepcopy(one)
    nn.init.normal_(other.inside.weight)
    assert gaff.diff(gaff.trace(one, x), gaff.trace(other, x)).first.site == "inside"


class Residual(nn.Module):
    """A block whose norm is as new as all others."""

    def __init__(self):
        super().__init__()
        self.norm, self.wide, self.narrow = nn.LayerNorm(6), nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x):
        return x + self.narrow(self.wide(self.norm(x)).relu())


def of_blocks():
    torch.manual_seed(0)
    return [Residual() for _ in range(5)]


def of_layers():
    torch.manual_seed(0)
    return [nn.Linear(6, 6), nn.LayerNorm(6), nn.ReLU(), nn.Linear(6, 6), nn.LayerNorm(6), nn.ReLU(), nn.Linear(6, 3)]


INSERTED = {
    "tanh": nn.Tanh,
    "identity": nn.Identity,
    "dropout in training": nn.Dropout,
    "norm": lambda: nn.LayerNorm(6),
}


@pytest.mark.slow
@pytest.mark.parametrize("is_held", [False, True])
@pytest.mark.parametrize("kind", INSERTED)
@pytest.mark.parametrize("make", [of_blocks, of_layers])
def test_a_layer_that_was_put_into_a_list_is_the_only_one_that_is_extra(make, kind, is_held):
    at, layers, x = 3, make(), torch.randn(4, 6)
    longer = copy.deepcopy(layers)
    longer.insert(at, INSERTED[kind]())
    hold = (
        (lambda one: nn.ModuleDict({"in": one})["in"])
        if not is_held
        else (lambda one: nn.Sequential(one, nn.Identity()))
    )
    one, other = (hold(nn.Sequential(*found)) for found in (layers, longer))
    for a, b, extra in ((one, other, "only_b"), (other, one, "only_a")):
        told = gaff.diff(gaff.trace(a, x), gaff.trace(b, x))
        assert getattr(told, extra) == (f"0.{at}" if is_held else str(at),)
        assert not (told.only_a if extra == "only_b" else told.only_b)
        assert not [
            note for note in told.notes if "are not the same" in note or " is a " in note or " mode in " in note
        ]
        if kind in ("tanh", "dropout in training"):
            [between] = [note for note in told.notes if note.startswith("between")]
            assert between.endswith(f": {getattr(told, extra)[0]} in {extra[-1].upper()}")


@pytest.mark.parametrize("change", ["dropped", "twice"])
def test_a_block_that_is_left_out_or_comes_twice_is_told_whole(change):
    blocks, x = of_blocks(), torch.randn(4, 6)
    others = copy.deepcopy(blocks)
    if change == "dropped":
        del others[2]
    else:
        others.insert(3, copy.deepcopy(others[2]))
    told = gaff.diff(gaff.trace(nn.Sequential(*blocks), x), gaff.trace(nn.Sequential(*others), x))
    number, alone, rest = (2, told.only_a, told.only_b) if change == "dropped" else (3, told.only_b, told.only_a)
    assert alone == (str(number), f"{number}.norm", f"{number}.wide", f"{number}.narrow")
    assert rest == ()


class Detector(nn.Module):
    """As many boxes as there are scores above a threshold; ``ends``: what it returns of them."""

    def __init__(self, threshold, ends=lambda boxes, scores: {"boxes": boxes, "scores": scores}):
        super().__init__()
        self.body, self.threshold, self.ends = nn.Linear(16, 5), threshold, ends

    def forward(self, x):
        found = self.body(x)
        kept = found[:, 4] > self.threshold
        return self.ends(found[kept, :4], found[kept, 4])


@pytest.mark.parametrize(
    ("other", "told"),
    [(Detector(100.0), "0x4, 0"), (Detector(0.2, lambda *_: None), "None"), (Detector(0.2, lambda _, s: 3.0), "float")],
    ids=["none found", "nothing returned", "a number returned"],
)
def test_outputs_of_which_one_has_no_element_are_not_the_same(other, told):
    torch.manual_seed(0)
    model = Detector(0.2)
    other.load_state_dict(model.state_dict())
    traces = gaff.trace(model, X), gaff.trace(other, X)
    for one, another in (traces, traces[::-1]):
        found = gaff.diff(one, another)
        assert found.first.site == ":output"
        assert found.first.number == "shape"
        assert told in (found.first.a, found.first.b)
        assert "which no rounding explains" in found.verdict


def test_what_could_not_be_compared_is_named():
    torch.manual_seed(0)
    model = Detector(0.2, lambda _, scores: scores.sum().item())
    other = copy.deepcopy(model)
    other.ends = lambda _, scores: 2 * scores.sum().item()
    found = gaff.diff(gaff.trace(model, X), gaff.trace(other, X))
    assert any(
        "1 call returned nothing that can be compared" in note and ":output (float)" in note for note in found.notes
    )


def test_compiled_code_that_was_traced_eagerly_is_told():
    torch.manual_seed(0)
    model = Net(1)
    compiled = torch.compile(model, backend="eager")
    found = gaff.diff(gaff.trace(model, X), gaff.trace(compiled, X))
    assert not found
    assert any(note.startswith("of B: compiled code ran eagerly") for note in found.notes), found.notes
    both = gaff.diff(gaff.trace(compiled, X), gaff.trace(compiled, X))
    assert any(note.startswith("of both: compiled code ran eagerly") for note in both.notes), both.notes


@pytest.mark.parametrize("seed", range(3))
def test_another_memory_format_is_rounding_behind_batch_norm_too(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5),
    )  # fmt: skip
    other = copy.deepcopy(model).to(memory_format=torch.channels_last)
    images = torch.randn(8, 3, 16, 16)
    given = images, images.to(memory_format=torch.channels_last)
    found = gaff.diff(traced(copy.deepcopy(model), given[0]), traced(copy.deepcopy(other), given[1]))
    assert not found, found.verdict
    with torch.no_grad():
        other[4].weight.mul_(1.001)
    assert gaff.diff(traced(model, given[0]), traced(other, given[1])).first.site == "4"


def trained_with(out, *, seed=0, frozen=False, rate=1e-3, name="loss"):
    """A run of ten steps whose second group of parameters has its own learning rate."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    model[2].weight.requires_grad_(not frozen)
    groups = [{"params": list(model[0].parameters())}, {"params": list(model[2].parameters()), "lr": rate}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    data = torch.Generator().manual_seed(1)
    with gaff.watch(model, optimizer, out=out, every=1):
        for _ in range(10):
            x = torch.randn(16, 8, generator=data)
            optimizer.zero_grad()
            loss = (model(x) - x[:, :1]).square().mean()
            if name == "total":
                total = 2 * loss.detach() + loss
                total.backward()
            else:
                loss.backward()
            optimizer.step()
    return gaff.load(out)


def test_what_came_before_the_forward_is_where_runs_part(tmp_path):
    base = trained_with(tmp_path / "base")
    other = gaff.diff(base, trained_with(tmp_path / "seed", seed=1))
    assert (other.first.site, other.first.phase, other.first.step) == ("0.weight:param", "weights", 0)
    frozen = gaff.diff(base, trained_with(tmp_path / "frozen", frozen=True))
    assert (frozen.first.site, frozen.first.number, frozen.first.step) == ("2.weight:grad", "presence", 0)
    assert "there against absent" in frozen.verdict
    turned = gaff.diff(gaff.load(tmp_path / "frozen"), base)
    assert (turned.first.site, turned.first.a, turned.first.b) == ("2.weight:grad", "absent", "there")


def test_what_a_group_has_from_the_first_is_told_as_its_own(tmp_path):
    found = gaff.diff(trained_with(tmp_path / "a"), trained_with(tmp_path / "b", rate=1.02e-3))
    assert any("optimizer, group 1, lr is 0.001 in A and 0.00102 in B" in note for note in found.notes), found.notes


def test_a_loss_of_another_name_is_compared_with_it(tmp_path):
    found = gaff.diff(trained_with(tmp_path / "a"), trained_with(tmp_path / "b", name="total"))
    assert (found.first.site, found.first.other, found.first.step) == ("loss:loss", "loss:total", 0)
    assert found.first.how == "order"


class Scaled(nn.Module):
    """One layer under a name of its own, and its output times a number."""

    def __init__(self, name, factor):
        super().__init__()
        self.name, self.factor = name, factor
        self.add_module(name, nn.Linear(16, 3))

    def forward(self, x):
        return getattr(self, self.name)(x) * self.factor


def test_a_pair_that_was_given_by_hand_is_compared_though_the_end_agrees():
    torch.manual_seed(0)
    one, other = Scaled("f", 1.0), Scaled("g", 0.5)
    other.g.load_state_dict({name: 2 * value for name, value in one.f.state_dict().items()})
    traces = gaff.trace(one, X), gaff.trace(other, X)
    assert not gaff.diff(*traces)
    found = gaff.diff(*traces, pairs={"f": "g"})
    assert (found.first.site, found.first.other) == ("f", "g")
    assert found.first.delta == pytest.approx(0.5, rel=0.05)
    with pytest.raises(gaff.PlanError, match="expected a dict, such as"):
        gaff.diff(*traces, pairs={"f": 5})


class Pair(nn.Module):
    """Returns whole numbers and others, in either order."""

    def __init__(self, label=0, *, is_whole_first=False, is_flipped=False):
        super().__init__()
        self.fc = nn.Linear(512, 8, bias=False)
        self.label, self.is_whole_first, self.is_flipped = label, is_whole_first, is_flipped

    def forward(self, x):
        made = x.flip(1) @ self.fc.weight.flip(1).T if self.is_flipped else x @ self.fc.weight.T
        whole = torch.arange(8) == self.label
        return (whole, made) if self.is_whole_first else (made, whole)


@pytest.mark.parametrize("is_whole_first", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_whole_numbers_do_not_round_and_others_do_wherever_they_stand(is_whole_first, dtype):
    torch.manual_seed(0)
    weights, x = Pair().state_dict(), torch.randn(4, 512).to(dtype)
    traces = []
    for given in ({}, {"is_flipped": True}, {"label": 1}):
        model = Pair(is_whole_first=is_whole_first, **given).to(dtype)
        model.load_state_dict(weights)
        traces.append(gaff.trace(model, x))
    assert not gaff.diff(*traces[:2])  # another order of a sum
    found = gaff.diff(traces[0], traces[2])
    assert found
    assert (found.first.state, found.first.tolerance) == ("parted", 0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_token_of_two_thousand_is_another_input(dtype):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(5000, 8), nn.Linear(8, 8)).to(dtype)
    ids = torch.randint(5000, (1, 2048))
    other = ids.clone()
    other[0, 7] += 1
    assert "they were given different inputs" in str(gaff.diff(gaff.trace(model, ids), gaff.trace(model, other)))
    assert not gaff.diff(gaff.trace(model, ids), gaff.trace(model, ids.int()))  # the same numbers


class Crossed(nn.Module):
    def __init__(self):
        super().__init__()
        self.queries, self.keys = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, y):
        return self.queries(x) @ self.keys(y).T


def test_keywords_in_another_order_are_the_same_input():
    model, x, y = Crossed(), torch.randn(2, 4), torch.randn(3, 4)
    known = gaff.trace(model, x=x, y=y)
    for other in (gaff.trace(model, y=y, x=x), gaff.trace(model, x, y), gaff.trace(model, x, y=y)):
        assert not gaff.diff(known, other)
    assert gaff.diff(known, gaff.trace(model, x=y, y=x))


def test_the_same_numbers_in_another_shape_are_another_input():
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Softmax(0), nn.Flatten(0)), torch.randn(2, 6, 4)
    found = gaff.diff(gaff.trace(model, x), gaff.trace(model, x.view(3, 4, 4)))
    assert "they were given different inputs: shape 2x6x4 against 3x4x4" in found.verdict


def test_modules_whose_names_are_odd_digits_are_paired():
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(nn.Sequential())
        models[-1].add_module("²", nn.Linear(4, 4))
    x = torch.randn(2, 4)
    assert not gaff.diff(gaff.trace(models[0], x), gaff.trace(models[1], x))
