"""Op sites: what a module's own forward does, seen, kept and changed as if it were written by hand."""

import re
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import gaff
from gaff.errors import NeverFiredError, PlanError, SiteError


class Block(nn.Module):
    """A residual block with functional ops, by hand the same with ``taps``."""

    def __init__(self, width=4):
        super().__init__()
        self.a = nn.Linear(width, width)
        self.b = nn.Linear(width, width)

    def forward(self, x, taps=None):
        def tap(name, value):
            if taps is None:
                return value
            return taps(name, value)

        y = tap("relu#0", F.relu(self.a(x)))
        y = tap("mul#0", self.b(y) * 2)
        z = tap("add#0", x + y)
        return tap("relu#1", torch.relu(z))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(Block(), Block())
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        x = self.layers(x)
        x = x.view(x.shape[0], -1)
        return self.head(x)


def make():
    torch.manual_seed(0)
    return Net(), torch.randn(3, 4)


def by_hand(block, x):
    seen = {}

    def tap(name, value):
        value.retain_grad()
        seen[name] = value
        return value

    return block(x, tap), seen


def test_every_op_is_what_a_hand_instrumented_forward_sees():
    block, x = Block(), torch.randn(3, 4)
    y, seen = by_hand(block, x)
    y.sum().backward()
    with gaff.capture(block, "/*", "/*:grad_output") as got:
        block(x).sum().backward()
    assert [name for name in got if ":" not in name] == [f"/{name}" for name in ("relu#0", "mul#0", "add#0", "relu#1")]
    for name, value in seen.items():
        assert torch.equal(got[f"/{name}"], value)
        assert torch.equal(got[f"/{name}:grad_output"], value.grad)


def test_ops_of_modules_inside_are_not_the_modules_own():
    model, x = make()
    with gaff.capture(model, "/*") as got:
        model(x)
    assert list(got) == ["/view#0"]
    assert torch.equal(got["/view"], model.layers(x).view(3, -1))


def test_inputs_and_shares_of_an_op():
    block, x = Block(), torch.randn(3, 4, requires_grad=True)
    with gaff.capture(
        block, "/add:input[1]", "/mul:input[1]", "/add:grad_input", "/add:input_grad", "/add:input"
    ) as got:
        block(x).sum().backward()
    assert got["/mul:input[1]"] == 2
    assert torch.equal(got["/add:input"], x)
    assert torch.equal(got["/add:input_grad"], x.grad)
    assert not torch.equal(got["/add:grad_input"], x.grad)  # the residual's own share, without that of a(x)


def test_an_address_without_a_number_names_the_only_op_or_asks_which():
    block, x = Block(), torch.randn(3, 4)
    with gaff.capture(block, "/relu", "/add") as got:
        block(x)
    assert torch.equal(got["/add"], got["/add#0"])
    assert len(got.all("/relu")) == 2
    with pytest.raises(SiteError, match=r"'/relu' names 2 ops: say which, /relu#0, /relu#1"):
        got["/relu"]


def test_an_op_that_two_patterns_name_is_kept_once_and_told_for_both():
    block, x = Block(), torch.randn(3, 4)
    with gaff.capture(block, "/*", "/add", "/add#0") as got:
        block(x)
    assert list(got).count("/add#0") == 1
    assert [row.pattern for row in got.receipt.rows if row.site == "/add#0"] == ["/*", "/add", "/add#0"]


def test_calls_are_those_of_the_module():
    class Loop(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = Block()

        def forward(self, x):
            for _ in range(3):
                x = self.cell(x)
            return x

    loop, x = Loop(), torch.randn(2, 4)
    with gaff.capture(loop, "cell/add") as got:
        loop(x)
        loop(x)
    assert len(got.all("cell/add")) == 6
    assert torch.equal(got.run(1)["cell/add@2"], got.all("cell/add")[5])


def test_an_op_that_is_not_there_is_told_with_what_is():
    block, x = Block(), torch.randn(3, 4)
    with (
        pytest.raises(
            NeverFiredError, match=r"no such op in the own forward of the model <Block>, which ran add, mul, relu"
        ),
        gaff.capture(block, "/addd"),
    ):
        block(x)
    with pytest.raises(PlanError, match="an op has no :param"):
        gaff.capture(block, "/add:param")


def test_early_stop_at_an_op():
    model, x = make()
    calls = []
    model.head.register_forward_hook(lambda *_: calls.append(1))
    found = gaff.take(model, "layers.1/add")(x)["layers.1/add"]
    assert not calls
    with gaff.capture(model, "layers.1/add") as got:
        model(x)
    assert torch.equal(found, got["layers.1/add"])
    with pytest.raises(SiteError, match=r"layers.1/relu: is 2 ops.*layers.1/relu#0"):
        gaff.take(model, "layers.1/relu")(x)
    assert torch.equal(gaff.take(model, "layers.1/relu#1")(x)["layers.1/relu#1"], model.layers(x))


EDITS = {
    "relu#0": (gaff.edits.scale(0.5), lambda t: t * 0.5),
    "add#0": (gaff.edits.add(1.0), lambda t: t + 1.0),
    "mul#0": (lambda t: t.tanh(), lambda t: t.tanh()),
}


@pytest.mark.parametrize("name", EDITS)
@pytest.mark.parametrize("way", ["plain", "nonreentrant", "reentrant", "region", "reentrant region", "nested"])
@pytest.mark.parametrize("late", [False, True], ids=["backward inside", "backward after"])
def test_an_edited_op_is_a_hand_edited_model(name, way, late):
    edit, change = EDITS[name]
    block, x = Block(), torch.randn(3, 4, requires_grad=True)

    def hand(x):
        return block(x, lambda at, value: change(value) if at == name else value)

    hand(x).square().sum().backward()
    wanted = [x.grad, *(parameter.grad for parameter in block.parameters())]
    x.grad = None
    block.zero_grad()

    class Around(nn.Module):
        """The block inside a checkpoint, or its forward called as a function of the checkpointing module."""

        def __init__(self):
            super().__init__()
            self.block = block

        def forward(self, x):
            if way == "plain":
                return self.block(x)
            if way == "nested":
                return checkpoint(lambda x: checkpoint(self.block, x, use_reentrant=False), x, use_reentrant=False)
            run = self.block.forward if way.endswith("region") else self.block
            return checkpoint(run, x, use_reentrant=way.startswith("reentrant"))

    site = f"/{name}" if way.endswith("region") else f"block/{name}"
    model = Around()
    with gaff.edit(model, {site: edit}) as changed:
        y = model(x)
        if not late:
            y.square().sum().backward()
    if late:
        y.square().sum().backward()
    for own, other in zip([x.grad, *(parameter.grad for parameter in block.parameters())], wanted, strict=True):
        assert torch.equal(own, other)
    assert changed.receipt.rows[0].hits == 1
    del y
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("way", ["nonreentrant", "reentrant", "region", "reentrant region"])
def test_gradients_of_ops_under_checkpointing(way):
    block, x = Block(), torch.randn(3, 4, requires_grad=True)
    y, seen = by_hand(block, x)
    y.square().sum().backward()
    run = block.forward if way.endswith("region") else block

    class Around(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = block

        def forward(self, x):
            return checkpoint(run, x, use_reentrant=way.startswith("reentrant"))

    site = "" if way.endswith("region") else "block"
    model = Around()
    with gaff.capture(model, f"{site}/*:grad_output", f"{site}/*") as got:
        model(x).square().sum().backward()
    for name, value in seen.items():
        assert torch.equal(got[f"{site}/{name}:grad_output"], value.grad)
        assert len(got.all(f"{site}/{name}")) == 1


class Writes(nn.Module):
    def forward(self, x):
        y = x * 2
        y.add_(1)
        y[:, 0] = y[:, 1]
        y += x
        F.relu(y, inplace=True)
        return y.sum(1)


def test_ops_that_write_in_place_before_and_after():
    x = torch.randn(3, 4)
    model = Writes()
    with gaff.capture(model, "/*", "/*:input[0]") as got:
        model(x)
    doubled = x * 2
    added = doubled + 1
    written = added.clone()
    written[:, 0] = added[:, 1]
    total = written + x
    assert torch.equal(got["/mul"], doubled)
    assert torch.equal(got["/add_#0:input[0]"], doubled)
    assert torch.equal(got["/add_#0"], added)
    assert torch.equal(got["/setitem:input[0]"], added)
    assert torch.equal(got["/setitem"], written)
    assert torch.equal(got["/add_#1:input[0]"], written)
    assert torch.equal(got["/add_#1"], total)
    assert torch.equal(got["/relu:input[0]"], total)
    assert torch.equal(got["/relu"], total.relu())


@pytest.mark.parametrize("site", ["/add_#0", "/setitem", "/add_#1", "/relu"])
def test_an_edit_of_an_op_that_writes_in_place_reaches_all_who_look(site):
    x = torch.randn(3, 4, requires_grad=True)

    def hand(x):
        y = x * 2
        y = y + 1
        y = y * 3 if site == "/add_#0" else y
        y = torch.cat([y[:, 1:2], y[:, 1:]], 1)
        y = y * 3 if site == "/setitem" else y
        y = y + x
        y = y * 3 if site == "/add_#1" else y
        y = y.relu()
        y = y * 3 if site == "/relu" else y
        return y.sum(1)

    wanted = hand(x)
    (gradient,) = torch.autograd.grad(wanted.square().sum(), x)
    model = Writes()
    with gaff.edit(model, {site: gaff.edits.scale(3)}):
        y = model(x)
        (own,) = torch.autograd.grad(y.square().sum(), x)
    assert torch.allclose(y, wanted)
    assert torch.allclose(own, gradient)


@pytest.mark.parametrize("order", [0, 1])
def test_captures_see_edited_ops_whichever_session_came_first(order):
    block, x = Block(), torch.randn(3, 4)
    capture = gaff.capture(block, "/add", "/relu#1:input[0]", "/mul#0:input[0]")
    edit = gaff.edit(block, {"/add": gaff.edits.zero(), "/mul:input[0]": gaff.edits.fill(1)})
    first, second = (capture, edit) if order else (edit, capture)
    with first, second:
        block(x)
    assert not capture["/add"].any()
    assert not capture["/relu#1:input[0]"].any()
    assert torch.equal(capture["/mul#0:input[0]"], torch.ones(3, 4))
    assert torch._C._len_torch_function_stack() == 0


def test_hooks_of_others_are_not_ops_of_the_module():
    block, x = Block(), torch.randn(3, 4)
    block.register_forward_pre_hook(lambda module, args: (args[0] - 1,))
    block.register_forward_hook(lambda module, args, output: output - 1)
    with gaff.capture(block, "/*") as got:
        block.register_forward_pre_hook(lambda module, args: (args[0] - 1,))
        block(x)
    assert "/sub#0" not in list(got)
    assert len(got) == 4


def test_threads_are_kept_apart():
    block = Block()
    inputs = [torch.randn(3, 4) for _ in range(4)]
    with gaff.capture(block, "/add", threads="all") as got:
        threads = [threading.Thread(target=lambda x=x: [block(x) for _ in range(10)]) for x in inputs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(got.all("/add")) == 40


def test_a_branch_that_shifts_the_numbers_is_told():
    class Branch(nn.Module):
        def forward(self, x, is_first):
            if is_first:
                x = torch.tanh(x)
            return torch.tanh(x)

    model, x = Branch(), torch.randn(3)
    with gaff.capture(model, "/tanh#0") as got:
        model(x, True)
        model(x, False)
    assert "another line of the code ran as this op" in got.receipt.rows[0].reason
    with gaff.capture(model, "/tanh#0") as got:
        model(x, True)
        model(x, True)
    assert not got.receipt.rows[0].reason


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_nothing_is_left_after_an_exception_in_forward(error):
    class Fails(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Block()

        def forward(self, x, fails):
            x = self.inner(x + 1)
            if fails:
                raise error("stop")
            return x * 2

    model, x = Fails(), torch.randn(3, 4)
    with gaff.capture(model, "/*", "inner/*") as got:
        with pytest.raises(error):
            model(x, True)
        model(x, False)
    assert torch._C._len_torch_function_stack() == 0
    assert torch.equal(got.run(1)["/mul"], model(x, False))
    assert [len(got.all(f"/{name}")) for name in ("add", "mul")] == [2, 1]


def test_multi_head_attention_is_looked_into_with_equal_bits():
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    x = torch.randn(2, 5, 8)
    plain = attention(x, x, x, need_weights=True)
    with gaff.capture(attention, "/softmax", "/bmm", "/multi_head_attention_forward") as got:
        watched = attention(x, x, x, need_weights=True)
    assert all(torch.equal(one, other) for one, other in zip(plain, watched, strict=True))
    assert torch.equal(got["/softmax"].view(2, 2, 5, 5).mean(1), plain[1])
    with gaff.edit(attention, {"/softmax": gaff.edits.zero()}):
        edited = attention(x, x, x)
    assert torch.equal(edited[0], attention.out_proj(torch.zeros(2, 5, 8)))


def test_an_edit_inside_a_custom_function_is_refused():
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return torch.mul(x, 2)

        @staticmethod
        def backward(ctx, gradient):
            return gradient * 2

    class Uses(nn.Module):
        def forward(self, x):
            return Double.apply(x)

    model, x = Uses(), torch.randn(3, requires_grad=True)
    with pytest.raises(PlanError, match="custom autograd Function"), gaff.edit(model, {"/mul": gaff.edits.zero()}):
        model(x)
    with gaff.capture(model, "/mul") as got:
        model(x)
    assert torch.equal(got["/mul"], x * 2)


def test_autocast_and_no_grad():
    block, x = Block(), torch.randn(3, 4)
    with gaff.capture(block, "/*") as got, torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        y = block(x)
    assert got["/relu#0"].dtype == torch.bfloat16
    assert torch.equal(got["/relu#1"], y)
    with gaff.capture(block, "/*") as got, torch.inference_mode():
        y = block(x)
    assert torch.equal(got["/relu#1"], y)


@pytest.mark.parametrize("other", ["/add", "/*"])
def test_ops_that_another_session_asks_for_ran_too(other):
    block, x = Block(), torch.randn(3, 4)
    for opened in (gaff.capture, lambda block, pattern: gaff.edit(block, {pattern: gaff.edits.zero()})):
        with (
            pytest.raises(NeverFiredError, match=r"which ran add(#\S+)?, mul(#\S+)?, relu"),
            opened(block, "/softmax"),
            gaff.capture(block, other),
        ):
            block(x)


def test_who_asks_for_the_softmax_of_fused_attention_is_told_where_its_weights_are():
    layer, x = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), torch.randn(2, 3, 8)
    told = r"attention is fused there: ask self_attn/scaled_dot_product_attention:weights"
    with pytest.raises(NeverFiredError, match=told), gaff.capture(layer, "self_attn/softmax"):
        layer(x)


def test_reasons_of_ops_that_did_not_run():
    model, x = make()
    cases = {
        "layers.0/add#7": r"which ran add#0, mul, relu",
        "layers/add": r"own forward of layers <Sequential>, which ran none",
        "**/softmax": r"none of the 8 modules that it names ran such an op",
        "layers.0/add@1": r"or not so often",
    }
    for pattern, message in cases.items():
        with pytest.raises(NeverFiredError, match=message), gaff.capture(model, pattern, gaff.maybe("layers.0/add")):
            model(x)
        with pytest.raises(NeverFiredError, match=message), gaff.edit(model, {pattern: gaff.edits.zero()}):
            model(x)
    with gaff.edit(model, {"**/relu": gaff.edits.scale(1)}) as changed:
        model(x)
    assert len(changed.receipt.rows) == 4
    with gaff.capture(model, gaff.maybe("**/softmax")) as got:
        model(x)
    assert [row.reason.partition(",")[0] for row in got.receipt.rows] == [
        "none of the 8 modules that it names ran such an op"
    ]


def test_a_plan_of_ops_is_saved_and_read():
    plan = gaff.Plan.edit({"layers.*/add#0": gaff.edits.scale(0.5), "/view:input[0]": gaff.edits.zero()})
    again = gaff.Plan.from_json(plan.to_json())
    assert again.digest == plan.digest
    model, x = make()
    with gaff.edit(model, again) as changed:
        model(x)
    assert [row.hits for row in changed.receipt.rows] == [1, 1, 1]


class WritesThroughViews(nn.Module):
    """Writes to a half of what ``a`` returned, and by an alias to what ``b`` returned."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(3, 6), nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x):
        h = self.a(x)
        h[:, :3].mul_(2.0)
        other, same = self.b(h[:, 3:]), self.c(h[:, :3])
        other.detach().add_(1.0)
        return other.relu() + same


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
def test_who_made_an_input_is_the_last_that_wrote_to_it_also_through_a_view(mode):
    with mode():
        sites = str(gaff.sites(WritesThroughViews(), torch.randn(5, 3), ops=True))
    assert re.search(r"/getitem#1 +5x6 /mul_#0 ", sites), sites
    assert re.search(r"/relu#0 +5x3 /add_#0 ", sites), sites
    assert re.search(r"b/linear#0 +5x3 /getitem#1,", sites), sites
    assert re.search(r"c/linear#0 +5x3 /getitem#2,", sites), sites


def test_a_write_to_other_elements_of_the_same_memory_makes_nothing_of_a_tensor():
    class Halves(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(3, 6), nn.Linear(3, 3)

        def forward(self, x):
            h = self.a(x)
            left, right = h[:, :3], h[:, 3:]
            left.mul_(2.0)
            return self.b(right)

    sites = str(gaff.sites(Halves(), torch.randn(5, 3), ops=True))
    assert re.search(r"b/linear#0 +5x3 /getitem#1,", sites), sites
