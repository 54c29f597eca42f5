"""A parameter that another stands in for: given back whatever happens, once for all sessions, to no other thread."""

import contextlib
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import prune
from torch.utils import checkpoint as checkpoints
from torch.utils.checkpoint import checkpoint

import gaff
from gaff import edits
from gaff.engine.parameters import substitutes


class Single(nn.Module):
    """A linear layer, and something to do before it is called."""

    def __init__(self, before=lambda model: None):
        super().__init__()
        self.lin = nn.Linear(3, 3)
        self.before = before

    def forward(self, x):
        self.before(self)
        return self.lin(x)


def is_untouched(model, weight, value):
    return model.lin.weight is weight and torch.equal(weight, value)


@pytest.mark.parametrize("together", [True, False])
def test_two_edits_of_one_parameter_compose(together):
    model, x = Single(), torch.randn(2, 3)
    weight, value = model.lin.weight, model.lin.weight.detach().clone()
    true = nn.functional.linear(x, value * 2 + 1, model.lin.bias)
    if together:
        with gaff.edit(model, {"lin.weight:param": edits.scale(2.0), "*.weight:param": edits.add(1.0)}):
            assert torch.equal(model(x), true)
            assert torch.equal(model(x), true)
    else:
        with (
            gaff.edit(model, {"lin.weight:param": edits.scale(2.0)}),
            gaff.edit(model, {"lin.weight:param": edits.add(1.0)}),
        ):
            assert torch.equal(model(x), true)
            assert torch.equal(model(x), true)
    assert is_untouched(model, weight, value)


def test_sessions_closed_in_any_order_give_the_parameter_back():
    model, x = Single(), torch.randn(2, 3)
    weight, value = model.lin.weight, model.lin.weight.detach().clone()
    first, second = (gaff.edit(model, {"lin.weight:param": edits.scale(2.0)}).attach() for _ in range(2))
    model(x)
    first.remove()
    assert torch.equal(model(x), nn.functional.linear(x, value * 2, model.lin.bias))
    second.remove()
    assert is_untouched(model, weight, value)


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_what_jumps_out_of_the_model_leaves_the_parameter(error):
    def fail(model):
        raise error

    model, x = Single(), torch.randn(2, 3)
    weight, value = model.lin.weight, model.lin.weight.detach().clone()
    handle = gaff.edit(model, {"lin.weight:param": edits.zero()}).attach()
    model(x)
    model.before = fail
    with pytest.raises(error):
        model(x)
    assert is_untouched(model, weight, value)
    handle.remove()


def test_an_edit_that_raises_leaves_the_parameters_of_the_others():
    def fail(tensor):
        raise ValueError

    model = Single()
    weight, value = model.lin.weight, model.lin.weight.detach().clone()
    handle = gaff.edit(model, {"lin.weight:param": edits.zero(), gaff.maybe("lin.bias:param"): fail}).attach()
    with pytest.raises(ValueError):  # noqa: PT011  # the edit's own
        model(torch.randn(2, 3))
    assert is_untouched(model, weight, value)
    handle.remove()


@pytest.mark.parametrize("order", [1, -1])
def test_the_gradient_of_the_parameter_itself_is_edited_and_captured(order):
    model, x = Single(), torch.randn(2, 3)
    changes = {"lin.weight:param": edits.scale(0.5), "lin.weight:grad": edits.add(1.0)}
    with gaff.capture(model, "lin.weight:grad") as got, gaff.edit(model, dict(list(changes.items())[::order])):
        model(x).sum().backward()
    true = 0.5 * x.sum(0).expand(3, 3)
    torch.testing.assert_close(model.lin.weight.grad, true + 1)
    torch.testing.assert_close(got["lin.weight:grad"], true + 1)  # though the capture was there first


@pytest.mark.parametrize("write", ["in place", "past torch", "by NumPy", "other data", "replaced"])
def test_a_model_that_changes_the_parameter_in_its_forward_is_refused(write):
    def change(model):
        if write == "in place":
            with torch.no_grad():
                model.lin.weight.mul_(2)
        elif write == "past torch":  # no version counter tells
            model.lin.weight.data.clamp_(-0.01, 0.01)
        elif write == "by NumPy":
            model.lin.weight.detach().numpy()[0, 0] = 7.0
        elif write == "other data":
            model.lin.weight.data = torch.ones(3, 3)
        else:
            model.lin.weight = nn.Parameter(torch.ones(3, 3))

    model = Single(change)
    with (
        pytest.raises(
            gaff.ExactnessError, match=r"lin\.weight:param: .*the model changed this parameter during the run"
        ),
        gaff.edit(model, {"lin.weight:param": edits.scale(2.0)}),
    ):
        model(torch.randn(2, 3))


def test_a_model_that_asks_where_its_edited_parameter_lies_changes_nothing_by_that():
    model, x = Single(lambda model: model.lin.weight.data_ptr()), torch.randn(2, 3)  # torch parts the copies for it
    with gaff.edit(model, {"lin.weight:param": edits.scale(2.0)}):
        out = model(x)
    torch.testing.assert_close(out, nn.functional.linear(x, 2 * model.lin.weight, model.lin.bias))


@pytest.mark.parametrize("where", ["_put", "_step_aside", "_step_back", "_end"])
@pytest.mark.parametrize("is_before", [True, False])
@pytest.mark.parametrize("at", [0, 1])
def test_what_breaks_off_in_the_middle_gives_the_parameter_back(monkeypatch, where, is_before, at):
    """As Ctrl-C may, which the program catches; then it goes on."""
    owner = substitutes.Standing if hasattr(substitutes.Standing, where) else substitutes
    own, calls = getattr(owner, where), []

    def breaking(*given):
        calls.append(None)
        if is_before and len(calls) == at + 1:
            raise KeyboardInterrupt
        made = own(*given)
        if not is_before and len(calls) == at + 1:
            raise KeyboardInterrupt
        return made

    model, x = Single(), torch.randn(2, 3)
    weight, true = model.lin.weight, model(x)
    monkeypatch.setattr(owner, where, breaking)
    with gaff.edit(model, {"lin.weight:param": edits.scale(2.0)}):
        with contextlib.suppress(KeyboardInterrupt):
            for _ in range(3):
                model(x)
        doubled = model(x)
    torch.testing.assert_close(doubled, nn.functional.linear(x, 2 * weight, model.lin.bias))
    assert model.lin.weight is weight
    assert type(weight) is nn.Parameter
    assert torch.equal(model(x), true)
    assert not substitutes._BY_TENSOR


def test_another_thread_does_not_get_the_edited_value():
    model, x = Single(), torch.randn(2, 3)
    entered, left, found = threading.Event(), threading.Event(), []

    def other():
        entered.wait(10)
        try:
            found.append(model(x))
        except gaff.PlanError as error:
            found.append(error)
        left.set()

    def wait(model):
        if threading.current_thread() is threading.main_thread():
            entered.set()
            left.wait(10)

    model.before = wait
    thread = threading.Thread(target=other)
    thread.start()
    with gaff.edit(model, {"lin.weight:param": edits.zero()}):
        model(x)
    thread.join()
    assert isinstance(found[0], gaff.PlanError)
    assert "runs on another thread" in str(found[0])


def test_a_model_that_turns_grad_mode_on_itself():
    model = Single()
    model.forward = torch.enable_grad()(model.forward)
    with gaff.edit(model, {"lin.weight:param": edits.scale(2.0)}):
        with torch.no_grad():
            y = model(torch.ones(2, 3))
        y.sum().backward()
    assert torch.equal(model.lin.weight.grad, torch.full((3, 3), 4.0))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_autocast_inside_the_model_and_a_checkpoint(use_reentrant):
    model, low = Single(), torch.randn(3, 1)
    x = torch.randn(2, 3)
    found = []
    for kind in (None, use_reentrant):

        def forward(z, kind=kind):
            with torch.autocast("cpu", torch.bfloat16):
                region = lambda t: torch.tanh(model.lin(t))  # noqa: E731
                return (region(z) if kind is None else checkpoint(region, z, use_reentrant=kind)).float()

        model.forward = forward
        leaf = x.clone().requires_grad_()
        model.zero_grad()
        with gaff.edit(
            model, {"lin.weight:param": lambda w: w + low @ low.T, "lin.bias:param": edits.project(torch.ones(3))}
        ):
            model(leaf).sum().backward()
        found.append([leaf.grad, model.lin.weight.grad])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("kind", [None, False, True])
@pytest.mark.parametrize("wrap", ["weight_norm", "prune"])
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_hooks_of_others_that_use_the_parameter_get_the_edited_value(wrap, kind):
    lin = nn.Linear(3, 3)
    if wrap == "prune":
        prune.random_unstructured(lin, "weight", amount=0.3)
        site, weight = "lin.weight_orig:param", lambda: lin.weight_orig * 3 * lin.weight_mask
    else:
        torch.nn.utils.weight_norm(lin)
        site, weight = "lin.weight_g:param", lambda: torch._weight_norm(lin.weight_v, lin.weight_g * 3, 0)
    model = nn.Module()
    model.lin = lin
    region = lambda t: torch.tanh(lin(t))  # noqa: E731
    model.forward = region if kind is None else lambda t: checkpoint(region, t, use_reentrant=kind)
    x = torch.randn(2, 3)
    true, found = x.clone().requires_grad_(), x.clone().requires_grad_()
    torch.tanh(nn.functional.linear(true, weight(), lin.bias)).pow(2).sum().backward()
    gradients = [one.grad.clone() for one in lin.parameters() if one.grad is not None]
    lin.zero_grad()
    with gaff.edit(model, {site: edits.scale(3.0)}):
        model(found).pow(2).sum().backward()
    torch.testing.assert_close(found.grad, true.grad)
    for one, other in zip([one.grad for one in lin.parameters() if one.grad is not None], gradients, strict=True):
        torch.testing.assert_close(one, other)


def test_old_style_hooks_of_the_root_itself():
    lin, x = prune.identity(nn.Linear(3, 3), "weight"), torch.ones(1, 3)
    with gaff.edit(lin, {"weight_orig:param": edits.zero()}):
        assert torch.equal(lin(x), lin.bias[None])


@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_a_region_recomputed_while_another_run_is_in_progress_gets_the_value_of_its_own(is_checkpointed):
    class Looks(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin, self.before = nn.Linear(2, 2, bias=False), None

        def forward(self, x):
            region = lambda t: torch.tanh(self.lin(t))  # noqa: E731
            y = (checkpoint(region, x, use_reentrant=False) if is_checkpointed else region(x)).sum()
            if self.before is not None:
                self.seen = torch.autograd.grad(*self.before)[0]
            self.before = y, x
            return y * 1

    model = Looks()
    x = [torch.ones(1, 2, requires_grad=True) for _ in range(2)]
    [true] = torch.autograd.grad(torch.tanh(model.lin(x[0])).sum(), x[0])
    with gaff.edit(model, {"lin.weight:param": edits.when(edits.scale(3.0), runs=[1])}):
        model(x[0])
        model(x[1])
    model.before = None  # the graph holds the region, which holds the model: torch frees no such circle by itself
    assert torch.equal(model.seen, true)


def test_a_model_that_returns_a_generator_is_refused():
    class Yields(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(2, 2)

        def forward(self, x):
            for _ in range(2):
                yield self.lin(x)

    with (
        pytest.raises(gaff.PlanError, match="returned what computes later"),
        gaff.edit(Yields(), {"lin.weight:param": edits.zero()}) as changed,
    ):
        list(changed._model(torch.ones(2)))


async def _async_of(h, w):
    yield h * w


class _Awaited:
    """As a coroutine, of which Python tells where nobody has awaited it."""

    def __init__(self, h, w):
        self.made = lambda: h * w

    def __await__(self):
        yield
        return self.made()


@pytest.mark.parametrize(
    "make",
    [
        lambda h, w: (part * w for part in h),
        lambda h, w: (h, iter([h * w])),
        lambda h, w: {"chunks": (part * w for part in h)},
        lambda h, w: [lambda: h * w],
        _async_of,
        _Awaited,
    ],
)
def test_what_computes_later_would_use_the_parameter_as_it_is(make):
    class Late(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin, self.w = nn.Linear(2, 2), nn.Parameter(torch.ones(2))

        def forward(self, x):
            return make(self.lin(x), self.w)

    model = Late()
    with (
        pytest.raises(gaff.PlanError, match="returned what computes later"),
        gaff.edit(model, {"w:param": edits.zero()}),
    ):
        model(torch.ones(2))


@pytest.mark.parametrize("make", [lambda h, w: {"y": h * w, "act": F.gelu}, lambda h, w: (h * w, sum)])
def test_a_function_beside_the_tensors_is_no_result_to_come(make):
    class Told(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(2))

        def forward(self, x):
            return make(x, self.w)

    with gaff.edit(model := Told(), {"w:param": edits.zero()}) as changed:
        made = model(torch.ones(2))
    assert changed.receipt.rows[0].fired == 1
    assert not (made["y"] if isinstance(made, dict) else made[0]).any()


BODIES = {
    "owner then bare": lambda m, x: F.linear(m.a(x).tanh(), m.a.weight),
    "bare then owner": lambda m, x: m.a(F.linear(x, m.a.weight).tanh()),
    "owner, bare, owner": lambda m, x: m.a(F.linear(m.a(x).tanh(), m.a.weight).tanh()),
    "owner only": lambda m, x: m.a(m.a(x).tanh()),
    "bare beside another": lambda m, x: m.b(F.linear(x, m.a.weight).tanh()),
    "nothing but bare": lambda m, x: F.linear(F.linear(x, m.a.weight).tanh(), m.a.weight, m.a.bias),
    "in a list": lambda m, x: F.linear(x, m.held[0]).tanh() @ m.a.weight.T,
    "a region inside": lambda m, x: checkpoint(lambda y: F.linear(y, m.a.weight).tanh(), m.a(x), use_reentrant=False),
    "a reentrant region inside": lambda m, x: m.a(checkpoint(
        lambda y: F.linear(y, m.a.weight).tanh(), x * 1, use_reentrant=True)),
}  # fmt: skip


class Region(nn.Module):
    """A checkpoint around a function, which is one of ``BODIES``."""

    def __init__(self, body, use_reentrant):
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
        self.held = [self.a.weight]
        self.body, self.use_reentrant = BODIES[body], use_reentrant

    def forward(self, x):
        if self.use_reentrant is None:
            return self.body(self, x)
        return checkpoint(self.body, self, x, use_reentrant=self.use_reentrant)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # of a reentrant one inside another
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("body", BODIES)
def test_a_checkpointed_function_is_recomputed_with_what_stood_in(body, use_reentrant):
    begin, forward = checkpoints._CheckpointFrame.__init__, checkpoints.CheckpointFunction.forward
    model, truth = Region(body, use_reentrant), Region(body, None)
    truth.load_state_dict(model.state_dict())
    x = torch.randn(4, 3)

    def passes(model, *, scaled):
        given = x.clone().requires_grad_()
        with gaff.edit(model, {"a.weight:param": edits.scale(2.0), "a.bias:param": edits.add(1.0)}) as editing:
            first = model(given)
            editing.strength(0.5)
            second = model(given * 2)  # another value stands in for the second run
            if not scaled:
                (first.square().sum() + second.square().sum()).backward()
        third = model(given)  # and none after the session
        if scaled:
            (first.square().sum() + second.square().sum()).backward()
        third.square().sum().backward()
        return [first, second, third, given.grad, *(one.grad for one in model.parameters() if one.grad is not None)]

    for scaled in (False, True):  # backward in the session, and after it
        model.zero_grad()
        truth.zero_grad()
        told, expected = passes(model, scaled=scaled), passes(truth, scaled=scaled)
        assert len(told) == len(expected)
        for one, other in zip(told, expected, strict=True):
            torch.testing.assert_close(one, other)
    assert type(model.a.weight) is nn.Parameter
    del told, expected, one, other  # edits stay as long as the graph of what was returned does
    assert checkpoints._CheckpointFrame.__init__ is begin
    assert checkpoints.CheckpointFunction.forward is forward


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("body", BODIES)
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_edits_of_several_sessions_stand_in_one_upon_the_other(body, use_reentrant):
    model, truth = Region(body, use_reentrant), Region(body, None)
    truth.load_state_dict(model.state_dict())
    x, both = torch.randn(4, 3), []
    for one in (model, truth):
        given = x.clone().requires_grad_()
        first = gaff.edit(one, {"a.weight:param": edits.scale(2.0)})
        with first, gaff.edit(one, {"a.weight:param": edits.add(1.0), "a.bias:param": edits.scale(3.0)}):
            one(given).square().sum().backward()
        both.append([given.grad, *(each.grad for each in one.parameters() if each.grad is not None)])
    for told, expected in zip(*both, strict=True):
        torch.testing.assert_close(told, expected)
    with torch.no_grad():
        truth.a.weight.mul_(2.0).add_(1.0)
        truth.a.bias.mul_(3.0)
    truth.zero_grad()
    given = x.clone().requires_grad_()
    truth(given).square().sum().backward()
    torch.testing.assert_close(both[0][0], given.grad)
    torch.testing.assert_close(both[0][1], truth.a.weight.grad * 2.0)


def test_weights_that_were_tied_when_the_session_was_opened():
    """Between two runs they are given to each module apart: what the address names now is edited, and nothing else."""
    model, x = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)), torch.randn(2, 3)
    model[1].weight = model[0].weight
    apart = {name: value.clone() for name, value in model.state_dict().items()}
    weight = model[0].weight.detach()
    with gaff.edit(model, {"0.weight:param": edits.scale(0.5)}) as changed:
        tied = model(x)
        model.load_state_dict(apart, assign=True)
        untied = model(x)
    assert torch.equal(tied, x @ (weight * 0.5).T @ (weight * 0.5).T)
    assert torch.equal(untied, x @ (weight * 0.5).T @ weight.T)
    assert changed.receipt.rows[0].fired == 2


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient * weight, (gradient * x).sum(0)


class Closed(nn.Module):
    """Reaches its parameter by a closure alone."""

    def __init__(self, use):
        super().__init__()
        weight = self.w = nn.Parameter(torch.ones(3))
        self.use = lambda x: use(x, weight)

    def forward(self, x):
        return self.use(x)


@pytest.mark.parametrize("use", [
    lambda x, w: x * w,
    Product.apply,
    lambda x, w: checkpoint(lambda a, b: a * b, x, w, use_reentrant=True),
    lambda x, w: checkpoint(lambda a, b: a * b, x, w, use_reentrant=False),
], ids=["a product", "a custom Function", "a reentrant checkpoint", "a checkpoint"])  # fmt: skip
def test_a_parameter_in_a_closure_that_is_handed_on(use):
    model, x = Closed(use), torch.full((2, 3), 5.0, requires_grad=True)
    with gaff.edit(model, {"w:param": edits.scale(2.0)}):
        y = model(x)
        y.sum().backward()
    assert (y[0, 0].item(), model.w.grad[0].item(), x.grad[0, 0].item()) == (10, 20, 2)
