"""Op sites where tools of this kind go silently wrong: each was wrong here once."""

import contextlib
import gc
import sys
import threading
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import gaff
from gaff.errors import PlanError


class Runs(nn.Module):
    """A forward that is given."""

    def __init__(self, function, *inner):
        super().__init__()
        self.function = function
        self.inner = nn.ModuleList(inner)

    def forward(self, *args):
        return self.function(self, *args)


@pytest.fixture
def x():
    torch.manual_seed(0)
    return torch.randn(3, 4, requires_grad=True)


def region(h):
    return torch.relu(torch.relu(h) * 2 + 1).sin()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_recomputation_counts_from_where_its_region_began(x, use_reentrant):
    model = Runs(lambda self, x: checkpoint(region, x, use_reentrant=use_reentrant))
    (wanted,) = torch.autograd.grad((torch.relu(torch.relu(x) * 2 + 1) * 3).sin().sum(), x)
    with gaff.edit(model, {"/relu#1": lambda t: t * 3}):
        model(x).sum().backward()
    assert torch.allclose(x.grad, wanted)


def test_gradients_in_a_region_of_a_reentrant_checkpoint_belong_to_their_op(x):
    plain = Runs(lambda self, x: region(x))
    again = Runs(lambda self, x: checkpoint(region, x, use_reentrant=True))
    kept = []
    for model in (plain, again):
        with gaff.capture(model, "/relu#1:grad_output", "/relu#1:input_grad", "/sin:input_grad") as got:
            model(x).sum().backward()
        kept.append([got[name] for name in got])
        assert not any(row.reason for row in got.receipt.rows)
    assert all(torch.equal(one, other) for one, other in zip(*kept, strict=True))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_two_sessions_act_in_the_same_order_in_a_recomputation(x, use_reentrant):
    def run(is_checkpointed):
        inner = lambda h: torch.sin(h * 2).cos()  # noqa: E731
        outer = lambda self, x: checkpoint(inner, x, use_reentrant=use_reentrant) if is_checkpointed else inner(x)  # noqa: E731
        model, leaf = Runs(outer), x.detach().clone().requires_grad_()
        with gaff.edit(model, {"/sin": lambda t: t * 3}), gaff.edit(model, {"/sin": lambda t: t + 0.7}):
            model(leaf).sum().backward()
        return leaf.grad

    assert torch.allclose(run(False), run(True))


def test_an_edited_input_of_an_op_that_writes_in_place(x):
    def add(self, x):
        y = x * 2
        y.add_(1)
        return y

    def put(self, x):
        y = x * 2
        y[0] = 1
        return y

    with gaff.edit(model := Runs(add), {"/add_:input[0]": gaff.edits.scale(10)}):
        assert torch.allclose(model(x), x * 20 + 1)
    with gaff.edit(model := Runs(put), {"/setitem:input[0]": gaff.edits.scale(10)}):
        assert torch.allclose(model(x), torch.cat([torch.ones(1, 4), (x * 20)[1:]]))


def test_an_op_with_out_is_refused():
    def add(self, x):
        out = torch.empty(3, 4)
        torch.add(x, 1, out=out)
        return out * 2

    with (
        pytest.raises(PlanError, match="'add' writes with out="),
        gaff.edit(model := Runs(add), {"/add": gaff.edits.zero()}),
    ):
        model(torch.zeros(3, 4))


def test_what_an_op_with_out_writes_to_is_not_edited_either():
    def add(self, x):
        out = torch.zeros(3, 4)
        return torch.add(x, 1, out=out)

    with (
        pytest.raises(PlanError, match="'add' writes with out=: what it writes to cannot be edited"),
        gaff.edit(model := Runs(add), {"/add:input[out]": gaff.edits.zero()}),
    ):
        model(torch.zeros(3, 4))
    with gaff.edit(model, {"/add:input[0]": gaff.edits.scale(2.0)}):
        assert torch.equal(model(torch.ones(3, 4)), torch.full((3, 4), 3.0))


@torch.library.custom_op("gaff_tests::plus", mutates_args={"x"})
def plus(x: torch.Tensor, by: float) -> None:
    x.add_(by)


def test_ops_that_only_write_are_numbered_and_not_edited():
    def twice(self, x):
        y, z = x * 1, x * 10
        plus(y, 1.0)
        plus(z, 2.0)
        return y + z

    x = torch.ones(3, 4)
    with gaff.capture(model := Runs(twice), "/plus#0:input", "/plus#1:input") as got:
        assert torch.equal(model(x), x * 14)
    assert torch.equal(got["/plus#0:input"], x)
    assert torch.equal(got["/plus#1:input"], x * 10)
    with (
        pytest.raises(PlanError, match="'plus' writes into an argument that was edited, and its name does not tell"),
        gaff.edit(model, {"/plus#1:input": gaff.edits.scale(2.0)}),
    ):
        model(x)


@pytest.mark.parametrize("address", ["/_foreach_add_:output[1]", "/_foreach_add_:input[0][1]"])
def test_an_op_that_writes_into_a_list_is_not_edited(address):
    def adds(self, x):
        both = [x * 1, x * 2]
        torch._foreach_add_(both, 1.0)
        return both[0] + both[1]

    x = torch.ones(3, 4)
    with (
        pytest.raises(PlanError, match="'_foreach_add_' writes into"),
        gaff.edit(model := Runs(adds), {address: gaff.edits.fill(7.0)}),
    ):
        model(x)
    with gaff.capture(model, "/_foreach_add_:input[0][1]") as got:
        assert torch.equal(model(x), x * 5)
    assert torch.equal(got["/_foreach_add_:input[0][1]"], x * 2)


def test_an_op_that_changes_its_own_shape(x):
    def squeeze(self, x):
        y = x[:1] * 2
        y.squeeze_(0)
        return y.softmax(0)

    with gaff.edit(model := Runs(squeeze), {"/squeeze_": gaff.edits.scale(3.0)}):
        assert torch.allclose(model(x), (x[0] * 6).softmax(0))
    with (
        pytest.raises(PlanError, match="changes the shape of its input itself"),
        gaff.edit(model := Runs(squeeze), {"/squeeze_:input[0]": gaff.edits.scale(3.0)}),
    ):
        model(x)


def test_attention_is_looked_into_with_the_functions_of_the_moment(monkeypatch):
    attention, x = nn.MultiheadAttention(8, 2, batch_first=True), torch.randn(2, 5, 8)
    with gaff.capture(attention, "/linear#0"):
        attention(x, x, x, need_weights=False)
    real = F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *args, **kwargs: real(*args, **kwargs) * 0.5)
    bare = attention(x, x, x, need_weights=False)[0]
    with gaff.capture(attention, "/linear#0"):
        assert torch.equal(attention(x, x, x, need_weights=False)[0], bare)


def test_ops_inside_a_transform_are_told_or_refused(x):
    model = Runs(lambda self, x: torch.mul(torch.vmap(lambda row: torch.mul(row, 3))(torch.mul(x, 2)), 5))
    with gaff.capture(model, "/mul") as got:
        model(x)
    assert len(got.all("/mul")) == 2
    assert "left out, and not numbered" in got.receipt.rows[0].reason
    with pytest.raises(PlanError, match=r"torch.func transform"), gaff.edit(model, {"/mul": gaff.edits.zero()}):
        model(x)
    with gaff.edit(model, {"/mul#1": gaff.edits.zero()}):
        assert not model(x).any()


def test_threads_make_one_stream_an_op():
    def many(self, x):
        for _ in range(8):
            x = torch.add(x, 1.0)
        return x

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(20):
            model, barrier = Runs(many), threading.Barrier(4)

            def run(number, model=model, barrier=barrier):
                barrier.wait()
                model(torch.full((2,), 100.0 * number))

            with gaff.capture(model, "/add#4", threads="all") as got:
                threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
            assert sorted(float(value[0]) for value in got.all("/add#4")) == [5, 105, 205, 305]
    finally:
        sys.setswitchinterval(interval)


def test_a_function_mode_that_somebodys_hooks_open_and_close(x):
    model, opened = Runs(lambda self, x: torch.relu(x) + torch.ones(4)), []

    def enter(module, args):
        opened.append(torch.device("meta"))
        opened[-1].__enter__()

    model.register_forward_pre_hook(enter)
    model.register_forward_hook(lambda *args: opened.pop().__exit__(None, None, None))
    with gaff.capture(model, "/relu"):
        model(x.to("meta"))
    assert torch.ones(1).device.type == "cpu"
    assert torch._C._len_torch_function_stack() == 0


def test_a_handle_removed_in_the_middle_of_a_forward(x):
    inner = nn.Linear(4, 4)
    model = Runs(lambda self, x: torch.relu(self.inner[0](x)).sin(), inner)
    handle = gaff.edit(model, {"/relu": gaff.edits.scale(2)}).attach()
    model(x)
    inner.register_forward_hook(lambda *args: handle.remove())
    model(x)
    assert torch._C._len_torch_function_stack() == 0


@pytest.mark.filterwarnings("ignore:gaff. not bitwise")
def test_a_fused_layer_that_is_no_submodule_is_noted():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    model = Runs(lambda self, x: layer(x) + 1)
    with torch.no_grad(), gaff.capture(model, "/add") as got:
        model(torch.randn(2, 5, 8))
    assert any("fast path was not taken" in note for note in got.receipt.notes)


@pytest.mark.parametrize("kind", ["capture", "edit"])
def test_a_closed_session_keeps_no_model_alive(x, kind):
    gc.collect()
    gc.disable()
    try:
        model = Runs(lambda self, x: torch.relu(x))
        alive = weakref.ref(model)
        if kind == "capture":
            with gaff.capture(model, "/relu", "/relu:grad_output", gaff.maybe("/sin")):
                model(x).sum().backward()
        else:
            with gaff.edit(model, {"/relu": gaff.edits.scale(2)}):
                model(x).sum().backward()
        del model
        assert alive() is None
    finally:
        gc.enable()


def test_an_exception_that_the_model_catches_past_all_hooks(x):
    class Stop(BaseException):
        pass

    class Raises(nn.Module):
        def forward(self, x):
            torch.sin(x)
            raise Stop

    def catches(self, x):
        x = torch.relu(x)
        with contextlib.suppress(Stop):
            self.inner[0](x)
        return torch.relu(x - 1)

    model = Runs(catches, Raises())
    with gaff.edit(model, {"/relu": gaff.edits.fill(7), "inner.0/sin": gaff.edits.scale(1)}):
        assert model(x).eq(7).all()
    with gaff.capture(model, "/relu", "inner.0/sin") as got:
        model(x)
    assert len(got.all("/relu")) == 2
    assert torch._C._len_torch_function_stack() == 0


def test_both_names_of_a_shared_module_name_its_ops(x):
    shared = Runs(lambda self, x: torch.relu(x) * 2)
    model = Runs(lambda self, x: self.inner[1](self.inner[0](x)), shared, shared)
    with gaff.capture(model, "inner.0/relu", "inner.1/relu") as got:
        model(x)
    assert [len(got.all(name)) for name in ("inner.0/relu", "inner.1/relu", "inner.1/relu#0")] == [2, 2, 2]


def test_an_op_that_is_given_what_it_writes_by_keyword(x):
    def draw(self, x):
        y = x.detach() * 2
        nn.init.normal_(tensor=y)
        return y

    with gaff.edit(model := Runs(draw), {"/normal_": gaff.edits.fill(7)}):
        assert model(x).eq(7).all()


def test_a_forward_that_is_a_function_of_torch(x):
    class Sine(nn.Module):
        forward = staticmethod(torch.sin)

    with gaff.capture(model := Sine(), "/sin") as got:
        model(x)
    assert torch.equal(got["/sin"], x.sin())


def test_names_are_those_that_the_user_wrote(x):
    def forward(self, x):
        y = 1 - x
        y = 2 / y
        y = y.T.type(torch.float64)
        y = F.threshold(y, 0.1, 0.0)
        return y[0] @ y[0]

    with gaff.capture(model := Runs(forward), "/*") as got:
        model(x)
    names = "sub#0 div#0 T#0 type#0 threshold#0 getitem#0 getitem#1 matmul#0"
    assert list(got) == [f"/{name}" for name in names.split()]


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_region_knows_the_modules_inside_it(x, use_reentrant):
    inner = Runs(lambda self, x: torch.tanh(x) * 2)
    body = lambda self, x: torch.tanh(self.inner[0](x)) + x  # noqa: E731
    plain = Runs(body, inner)
    again = Runs(lambda self, x: checkpoint(lambda x: body(self, x), x, use_reentrant=use_reentrant), inner)
    found = []
    for model in (plain, again):
        x.grad = None
        with gaff.edit(model, {"/tanh": gaff.edits.scale(0.5)}):
            model(x).sum().backward()
        found.append(x.grad)
    assert torch.equal(*found)


def test_a_module_made_on_the_fly_is_its_callers(x):
    with gaff.capture(model := Runs(lambda self, x: nn.Softmax(-1)(x) * 2), "/softmax") as got:
        model(x)
    assert torch.equal(got["/softmax"], x.softmax(-1))


@pytest.mark.parametrize("order", [0, 1])
def test_sessions_on_a_model_and_on_a_part_of_it(x, order):
    inner = Runs(lambda self, x: torch.tanh(x))
    middle = Runs(lambda self, x: torch.tanh(self.inner[0](x)), inner)
    whole = Runs(lambda self, x: torch.tanh(self.inner[0](x)), middle)
    sessions = [gaff.capture(whole, "**/tanh", "/tanh"), gaff.capture(middle, "/tanh")]
    with sessions[order], sessions[1 - order]:
        whole(x)
    assert [len(sessions[0].all(name)) for name in ("/tanh", "inner.0/tanh", "inner.0.inner.0/tanh")] == [1, 1, 1]
    assert torch.equal(sessions[1]["/tanh"], x.tanh().tanh())


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_sessions_keep_their_order_whichever_met_an_op_of_a_region_first(x, use_reentrant):
    def loop(v, w):
        for _ in range(3):
            v = torch.tanh(v + w)
        return v

    def forward(self, x):
        w = torch.relu(x)
        v = 1 - w
        return checkpoint(loop, v, w, use_reentrant=use_reentrant) + v if self.is_checkpointed else loop(v, w) + v

    found = []
    for is_checkpointed in (False, True):
        model, leaf = Runs(forward), x.detach().clone().requires_grad_()
        model.is_checkpointed = is_checkpointed
        with (
            gaff.edit(model, {"/sub#0": lambda t: t * 1.3, "/tanh#1": lambda t: t * 1.3}),
            gaff.edit(model, {"/tanh#1": torch.cos, "/tanh#0:input[0]": torch.cos, "/add#0": torch.cos}),
        ):
            model(leaf).square().sum().backward()
        found.append(leaf.grad)
    assert torch.allclose(*found)


@pytest.mark.parametrize("site", ["/relu", "inner.0"])
def test_what_a_reentrant_checkpoint_is_given_and_does_not_use_gets_none(x, site):
    def forward(self, x):
        h = torch.relu(x) if site == "/relu" else self.inner[0](x)
        return checkpoint(lambda h, x: torch.sin(x), h, x, use_reentrant=True)

    model = Runs(forward, nn.ReLU())
    with gaff.capture(model, f"{site}:grad_output") as got:
        model(x).sum().backward()
    assert got[f"{site}:grad_output"] is None
    with gaff.edit(model, {gaff.maybe(f"{site}:grad_output"): lambda gradient: gradient * 2}):
        model(x).sum().backward()


class Sine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin().sin()

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * x.cos() * x.sin().cos()


@pytest.mark.parametrize(("address", "is_inside"), [("/sin#0", True), ("/sin#1", True), ("/sin#2", False)])
def test_an_op_inside_a_custom_function_is_not_edited_and_others_of_its_name_are(x, address, is_inside):
    model = Runs(lambda _, x: (Sine.apply(x) * 2).sin())
    if is_inside:
        with pytest.raises(PlanError, match="the edited op sin of Runs runs inside SineBackward"):
            with gaff.edit(model, {address: gaff.edits.scale(0.5)}):
                model(x)
    else:
        with gaff.edit(model, {address: gaff.edits.scale(0.5)}):
            assert torch.equal(model(x), 0.5 * (x.sin().sin() * 2).sin())


def test_what_stands_in_for_a_forward_has_its_name():
    model = Runs(lambda _, x: x)
    with gaff.edit(model, {":output": gaff.edits.skip()}):
        assert model.forward.__name__ == "forward"
        assert model.forward.__func__ is Runs.forward
        model(torch.ones(1))


def test_an_op_that_returns_what_it_was_given_has_made_nothing():
    """As ``.to`` does in the norms of transformers: the residual stream goes on as what it was."""

    class Block(nn.Module):
        def forward(self, x):
            y = x + 1
            normed = y.to(torch.float32).contiguous() * 2
            return y + normed.relu_()

    rows = {row.site: row for row in gaff.sites(Block(), torch.randn(2), ops=True).rows}
    assert [maker for _, maker in rows["/add#1"].inputs] == ["/add#0", "/relu_#0"]
    assert [maker for _, maker in rows["/mul#0"].inputs] == ["/add#0"]


@torch.library.custom_op("gaff_corners::update_", mutates_args=("state",))
def update_(a: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    state.add_(a)
    return state * 2


@torch.library.custom_op("gaff_corners::bump", mutates_args=("a",))
def bump(a: torch.Tensor) -> None:
    a.add_(1)


@torch.library.custom_op("gaff_corners::scaled_dot_product_attention", mutates_args=())
def others_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    q, k, v = (one.transpose(1, 2) for one in (q, k, v))  # [batch, positions, heads, features]
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).contiguous()


def test_the_name_of_a_custom_op_tells_nothing_of_what_it_writes():
    def forward(_, x):
        a, state = x * 1, torch.ones_like(x)
        return torch.stack([a, state, update_(a, state)])

    model, x = Runs(forward), torch.tensor([-1.0, 2.0])
    plain = model(x)
    with gaff.edit(model, {"/update_": gaff.edits.scale(3)}):
        edited = model(x)
    assert torch.equal(edited, torch.stack([plain[0], plain[1], 3 * plain[2]]))


def test_an_op_in_place_by_keywords_writes_to_its_input():
    low = torch.full((2,), -0.1)

    def forward(_, x):
        y = x * 1
        torch.clamp_(min=low, input=y)
        return y

    model, x = Runs(forward), torch.tensor([-1.0, 2.0])
    with gaff.edit(model, {"/clamp_": gaff.edits.scale(2)}):
        assert torch.equal(model(x), torch.tensor([-0.2, 4.0]))
    assert torch.equal(low, torch.full((2,), -0.1))


def test_an_edit_of_detach_in_place_is_written_into_the_tensor():
    def forward(_, x):
        h = x * 1
        h.detach_()
        return h + 0

    model, x = Runs(forward), torch.ones(2, requires_grad=True)
    with gaff.edit(model, {"/detach_": gaff.edits.scale(2)}):
        out = model(x)
    assert torch.equal(out, torch.full((2,), 2.0))
    assert not out.requires_grad


def test_attention_of_a_library_is_not_told_by_torchs_formula():
    model, q = Runs(lambda _, q: others_attention(q, q, q)), torch.randn(1, 4, 2, 8)
    address = "/scaled_dot_product_attention:weights"
    with gaff.capture(model, address) as got:
        model(q)
    with pytest.raises(gaff.ExactnessError, match="is not torch's own"):
        got[address]


def test_an_op_that_returns_nothing_is_told_as_such():
    def forward(_, x):
        y = x * 1
        bump(y)
        return y

    model = Runs(forward)
    with pytest.raises(
        gaff.NeverFiredError, match="it ran in the own forward of the model <Runs>, and returned nothing"
    ):
        with gaff.capture(model, "/bump"):
            model(torch.ones(2))
    with gaff.capture(model, "/bump:input[0]") as got:
        model(torch.ones(2))
    assert torch.equal(got["/bump:input[0]"], torch.ones(2))


def test_ops_under_a_device_are_at_the_line_of_the_model():
    def forward(_, x):
        with torch.device("cpu"):
            return x.relu() + 1

    rows = gaff.sites(Runs(forward), torch.randn(2), ops=True)
    assert "_device.py" not in str(rows)
    assert "test_op_corners.py" in str(rows)


class Overwriting(nn.Module):
    """Writes into what a layer has made, and into a tensor given as ``out``; names of functions do not tell."""

    def __init__(self):
        super().__init__()
        self.layer, self.drop = nn.Linear(4, 4), nn.Dropout(0.5, inplace=True)

    def forward(self, x):
        first, second, third = self.layer(x), self.layer(x) * 2, torch.zeros(2, 4)
        F.relu(first, True)
        self.drop(second)
        with torch.no_grad():
            torch.mul(x, 3, out=third)
        return first.sin() + second.cos() + third.tan()


def test_who_has_written_into_a_tensor_has_made_what_it_holds():
    sites = gaff.sites(Overwriting(), torch.randn(2, 4), ops=True)
    rows = {row.site: row for row in sites.rows if hasattr(row, "inputs")}
    made = [maker for name in ("sin", "cos", "tan") for _, maker in rows[f"/{name}#0"].inputs]
    assert made == ["/relu#0", "drop", "/mul#1"]


def test_what_a_function_writes_by_its_position_is_edited_as_its_copy_is():
    model, x = Overwriting().eval(), torch.randn(2, 4)
    with gaff.edit(model, {"drop/dropout#0": gaff.edits.scale(0.0), "/relu#0": gaff.edits.scale(2.0)}):
        got = model(x)
    first = model.layer(x).relu() * 2
    assert torch.equal(got, first.sin() + 1 + (x * 3).tan())
