"""A module's own share where it is hard to tell: right, or refused, never another number."""

import gc
import threading
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.autograd import Variable

import gaff

ONE = torch.ones(1, 2)


class Around(nn.Module):
    """Gives the inner module a tensor that is no leaf; ``seen``: what arrives at a view of it, which is the truth."""

    def __init__(self, inner, seen=None):
        super().__init__()
        self.inner, self.pre, self.seen = inner, nn.Linear(2, 2, bias=False), seen
        nn.init.eye_(self.pre.weight)

    def forward(self, x):
        t = self.pre(x)
        if self.seen is not None:
            t = t.view_as(t)
            t.register_hook(lambda g: self.seen.append(g.clone()))
        return self.inner(t)


def told(make, program):
    """The truth, and what gaff tells; a text where it refuses."""
    torch.manual_seed(0)
    seen = []
    program(Around(make(), seen))
    torch.manual_seed(0)
    model = Around(make())
    with gaff.capture(model, "inner:grad_input") as got:
        program(model)
    try:
        return seen, got.all("inner:grad_input")
    except gaff.ExactnessError as error:
        return seen, str(error)


class Keeps(nn.Module):
    def forward(self, x):
        self.last = x
        return x * 2


class UsesTheOneBefore(nn.Module):
    before = None

    def forward(self, x):
        y = x * 2 if self.before is None else x * 2 + self.before * 5
        self.before = x
        return y


class Later(nn.Module):
    def forward(self, x):
        return (x * factor for factor in range(3))


@pytest.mark.parametrize(
    ("make", "program"),
    [
        (Keeps, lambda m: (m(ONE).sum() + (m.inner.last * 5).sum()).backward()),
        (UsesTheOneBefore, lambda m: (m(ONE).sum() + m(ONE).sum()).backward()),
        (Later, lambda m: sum(t.sum() for t in m(ONE)).backward()),
    ],
)
def test_what_is_made_of_the_input_after_the_call_is_refused(make, program):
    seen, got = told(make, program)
    assert seen
    assert "or the module kept the input" in got


def test_an_input_that_is_kept_and_not_used_again_is_no_trouble():
    seen, got = told(Keeps, lambda m: m(ONE).sum().backward())
    assert torch.equal(got[0], seen[0])


@pytest.mark.parametrize("way", ["attribute", "object"])
def test_a_tensor_that_comes_by_another_way_too_is_refused(way):
    class Two(nn.Module):
        def forward(self, x, more=None):
            return x * 2 + (self.held[0] if more is None else more.x) * 5

    model, t = Two(), torch.ones(2, requires_grad=True) * 1.0
    model.held = [t] if way == "attribute" else []
    with gaff.capture(model, ":grad_input") as got:
        model(t, *([SimpleNamespace(x=t)] if way == "object" else [])).sum().backward()
    with pytest.raises(gaff.ExactnessError, match="holds this tensor as an attribute|came in 2 times"):
        got[":grad_input"]


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(2, 2, bias=False)

    def forward(self, x):
        return self.lin(x).unflatten(-1, (2, 1)).transpose(0, 1)


def test_second_derivatives_behind_a_view_that_is_written_to():
    def program(model):
        q = model(ONE)
        q *= 0.5
        (grad,) = torch.autograd.grad(q.pow(2).sum(), model.inner.lin.weight, create_graph=True)
        grad.pow(2).sum().backward()

    seen, got = told(Heads, program)
    assert torch.allclose(got[0], seen[0])


@pytest.mark.parametrize("is_returned", [True, False])
def test_second_derivatives_of_a_pass_that_begins_inside_the_module(is_returned):
    collected = []

    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x):
            h = self.a(x).tanh()
            collected.append(h)
            return self.b(h if is_returned else x)

    def program(model):
        collected.clear()
        out = model(ONE)
        (grad,) = torch.autograd.grad(collected[0].pow(2).sum(), model.inner.a.weight, create_graph=True)
        (out.sum() + grad.pow(2).sum()).backward()

    seen, got = told(Inner, program)
    if is_returned:
        assert torch.allclose(got[0], seen[0])
    else:
        assert "somebody kept something" in got


def test_a_pass_inside_another_one_has_a_sum_of_its_own():
    class Both(nn.Module):
        def forward(self, x):
            return x * 2.0, x * 3.0

    def program(model):
        a, b = model(ONE)
        aux, inside = (a.sum() + b.sum()) * 10, []

        def nested(gradient):
            if not inside:
                inside.append(True)
                torch.autograd.grad(aux, model.pre.weight, retain_graph=True)

        a.register_hook(nested)
        (a.sum() + b.sum()).backward(retain_graph=True)

    seen, got = told(Both, program)
    assert [one.tolist() for one in got] == [one.tolist() for one in seen] == [[[50.0, 50.0]], [[5.0, 5.0]]]


def test_what_another_thread_has_made_is_none_of_the_call():
    x = torch.ones(2, requires_grad=True)
    for _ in range(500):
        t = x * 1.0
    made, out = t * 5, []

    class Adds(nn.Module):
        def forward(self, x):
            return x * 2 + made

    def work():
        with gaff.capture(Adds(), ":grad_input") as got:
            got._model(t).sum().backward()
        with pytest.raises(gaff.ExactnessError, match="outside of this call"):
            got[":grad_input"]
        out.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert out


def test_the_copy_that_autocast_keeps_of_a_leaf_is_refused():
    model, x = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]), torch.ones(1, 2, requires_grad=True)

    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = model

        def forward(self, x):
            return self.a(x) + 10 * self.b(x)

    with gaff.capture(Sum(), "a:grad_input") as got, torch.autocast("cpu", torch.bfloat16):
        got._model(x).sum().backward()
    with pytest.raises(gaff.ExactnessError, match="autocast keeps the copy of a leaf"):
        got["a:grad_input"]


def test_a_pass_that_nobody_can_look_through_is_refused():
    collected = []

    class Collects(nn.Module):
        def forward(self, x):
            collected.append(x * 3)
            return x * 2

    model = Around(Collects())
    with gaff.capture(model, "inner:grad_input") as got:
        loss = model(ONE).sum() + collected[0].sum()
        Variable._execution_engine.run_backward(
            (loss,), (torch.ones(()),), False, False, (), allow_unreachable=True, accumulate_grad=True
        )
    with pytest.raises(gaff.ExactnessError, match="somebody kept something"):
        got["inner:grad_input"]


class Cell(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin, self.hist = nn.Linear(2, 2), []

    def forward(self, x):
        h = self.lin(x).tanh()
        self.hist.append(h)
        return h


def test_graphs_of_earlier_calls_that_a_module_keeps_go_with_them():
    class Token:
        pass

    model, alive = Cell(), []
    with gaff.capture(model, ":grad_input"):
        for _ in range(20):
            x = torch.ones(1, 2, requires_grad=True) * 1.0
            for _ in range(3):
                x = model(x * 1.0)
            token = Token()
            model.hist[0].grad_fn.metadata["token"] = token
            alive.append(weakref.ref(token))
            del token
            sum(h.sum() for h in model.hist).backward()
            model.hist = []
            del x
        gc.collect()
        assert not [one for one in alive if one() is not None]


def test_hooks_on_a_base_that_outlives_many_views_stay_few():
    class Cut(nn.Module):
        def forward(self, base):
            return base[0]

    base = torch.ones(3, 2, requires_grad=True) * 1.0
    with gaff.capture(Cut(), ":grad_output", last=1) as got:
        for _ in range(1500):
            got._model(base).sum().backward(retain_graph=True)
        assert len(base._backward_hooks or ()) < 700
    assert not base._backward_hooks


def test_a_differentiable_pass_of_one_run_gives_the_next_run_no_wrong_label():
    class Drops(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(2, 2))

        def forward(self, x):
            x * 1.0  # made for nothing
            return x @ self.weight

    model, x = Drops(), torch.ones(1, 2, requires_grad=True)
    with gaff.capture(model, "weight:grad", ":grad_input") as got:
        torch.autograd.grad(model(x).sum(), x, create_graph=True)
        model(x).sum().backward()
    assert [len(got.run(run).all("weight:grad")) for run in (0, 1)] == [0, 1]
    assert [torch.equal(got.run(run)[":grad_input"], model.weight.sum(1)[None]) for run in (0, 1)] == [True, True]


def test_second_derivatives_of_another_thread_with_the_same_numbers_are_none_of_the_call():
    class Cube(nn.Module):
        def forward(self, x):
            return x**3

    model, x, made = Cube(), torch.full((1,), 2.0, requires_grad=True), []
    with gaff.capture(model, ":grad_input") as got:
        t = x * 1.0
        number = torch._C._autograd._get_sequence_nr()

        def work():
            while torch._C._autograd._get_sequence_nr() < number:
                t * 1.0
            made.append(t**3)

        y = model(t)
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        (grad,) = torch.autograd.grad((y + 5 * made[0]).sum(), t, create_graph=True)
        grad.sum().backward()
    assert [one.item() for one in got.all(":grad_input")] == [12.0, 12.0]


def test_a_function_whose_backward_hands_on_its_saved_input_is_refused_in_second_derivatives():
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * x / 2

        @staticmethod
        def backward(ctx, g):
            return ctx.saved_tensors[0] if bool((g == 1).all()) else g * ctx.saved_tensors[0]

    class Calls(nn.Module):
        def forward(self, x):
            return Square.apply(x)

    def program(model):
        out = model(ONE)
        (grad,) = torch.autograd.grad(out.sum(), model.pre.weight, create_graph=True)
        (out.sum() + grad.sum()).backward()

    assert "hands on its input itself" in told(Calls, program)[1]


def test_an_input_that_is_kept_in_an_object_and_used_later_is_refused():
    class Holds(nn.Module):
        def forward(self, x):
            self.state = SimpleNamespace(x=x)
            return x * 2

    got = told(Holds, lambda m: (m(ONE).sum() + (m.inner.state.x * 3).sum()).backward())[1]
    assert "or the module kept the input" in got


@pytest.mark.parametrize("written", [0, 1])
def test_a_write_into_memory_that_two_inputs_show_is_refused(written):
    """What is written through the one is a change of the other: torch sends both gradients through one node."""

    class Writes(nn.Module):
        def forward(self, *given):
            return given[written].clamp_(-0.5, 0.5)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Writes()

        def forward(self, x):
            h = self.seen = x * 1.0
            return self.inner(h, h.view_as(h))

    model = Net()
    with gaff.capture(model, "inner:grad_input", "inner:grad_input[1]", "inner:input_grad") as got:
        model(torch.tensor([0.1, 2.0], requires_grad=True)).sum().backward()
    for address in ("inner:grad_input", "inner:grad_input[1]"):
        with pytest.raises(gaff.ExactnessError, match="outside of this call|changed in place|another of its inputs"):
            got[address]
    assert torch.equal(got["inner:input_grad"], torch.tensor([1.0, 0.0]))
    with gaff.edit(model, {gaff.maybe("inner:grad_input"): gaff.edits.scale(10.0)}):
        with pytest.raises(gaff.ExactnessError, match="cannot be told apart"):
            model(torch.tensor([0.1, 2.0], requires_grad=True))
