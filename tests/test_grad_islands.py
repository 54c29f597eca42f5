"""Tensors that have a gradient though grad mode was off where they passed, or that come to require grad later."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import gaff
from gaff import edits, keep
from gaff.compat import memory


class Backbone(nn.Module):
    """A part without grad mode whose features are made to require grad, as for class maps."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        with torch.no_grad():
            h = self.a(x)
        self.h = h.requires_grad_()
        return self.b(h)


class Teacher(nn.Module):
    """What is given to a part without grad mode is used with it, too."""

    def __init__(self):
        super().__init__()
        self.student, self.teacher = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        y = self.student(x)
        with torch.no_grad():
            z = self.teacher(y)
        return (y - z).pow(2).sum()


class Force(nn.Module):
    """A force field: the input is made to require grad inside, and a backward pass is run there."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))

    def forward(self, position):
        position.requires_grad_()
        energy = self.net(position).sum()
        return energy, -torch.autograd.grad(energy, position, create_graph=True)[0]


@pytest.fixture
def x():
    return torch.randn(3, 4)


def test_an_output_made_without_grad_mode_that_comes_to_require_grad(x):
    model = Backbone()
    model(x).sum().backward()
    truth = model.h.grad.clone()
    with gaff.capture(model, "*:grad_output") as got:
        model(x).sum().backward()
    assert torch.equal(got["a:grad_output"], truth)
    with gaff.edit(model, {"*:grad_output": edits.scale(2.0)}) as edit:
        model(x).sum().backward()
    assert torch.allclose(model.h.grad, 4 * truth)
    assert [row.fired for row in edit.receipt.rows] == [1, 1]


def test_the_total_of_what_came_into_a_part_without_grad_mode(x):
    model = Teacher()
    with gaff.capture(model, "*:input_grad", "student:grad_output") as got:
        model(x).backward()
    assert torch.equal(got["teacher:input_grad"], got["student:grad_output"])
    x.requires_grad_()
    model(x).backward()
    bare = x.grad.clone()
    x.grad = None
    with gaff.edit(model, {"*:input_grad": edits.scale(2.0)}):
        model(x).backward()
    assert torch.allclose(x.grad, 4 * bare)


def test_a_pass_inside_the_forward_comes_by_an_input_that_came_to_require_grad_there(x):
    model = Force()
    truth = -model(x.clone())[1].detach()
    with gaff.capture(model, ":input_grad") as got:
        model(x.clone())
    assert torch.equal(got[":input_grad"], truth)
    with gaff.capture(model, ":input_grad") as got:
        energy, force = model(x.clone())
        (energy + force.pow(2).sum()).backward()
    assert len(got.all(":input_grad")) == 2
    with gaff.edit(model, {":input_grad": edits.scale(2.0)}):
        assert torch.allclose(model(x.clone())[1], -2 * truth)


def test_the_share_of_an_input_that_came_to_require_grad_inside_is_refused(x):
    model = Force()
    with gaff.capture(model, ":grad_input") as got:
        model(x.clone())
    with pytest.raises(gaff.errors.ExactnessError, match="came to require grad inside the module: ask for :input_grad"):
        got[":grad_input"]
    with pytest.raises(gaff.errors.ExactnessError, match="came to require grad inside the module"):
        with gaff.edit(model, {":grad_input": edits.scale(2.0)}):
            model(x.clone())


def test_two_passes_of_their_own_are_no_parts_of_one():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x):
            return checkpoint(self.fc, x, use_reentrant=True)

    model, x = Net(), torch.randn(2, 4, requires_grad=True)
    with gaff.edit(model, {"fc.weight:grad": edits.scale(2.0)}):
        model(x).sum().backward()
        first = model.fc.weight.grad.clone()
        (model.fc.weight**2).sum().backward()
    assert torch.equal(model.fc.weight.grad, first + 4 * model.fc.weight)


def test_a_run_that_ends_on_another_thread_settles_nothing_of_this_one(x):
    class Waits(Backbone):
        def forward(self, x, other=None):
            with torch.no_grad():
                h = self.a(x)
            if other is not None:
                thread = threading.Thread(target=other)
                thread.start()
                thread.join()
            self.h = h.requires_grad_()
            return self.b(h)

    model = Waits()
    session = gaff.edit(model, {"a:grad_output": edits.scale(2.0)}).attach()
    model(x, lambda: model(x).sum().backward()).sum().backward()
    edited = model.h.grad.clone()
    session.remove()
    model(x).sum().backward()
    assert torch.allclose(edited, 2 * model.h.grad)


@pytest.mark.parametrize("is_first", [False, True])
def test_gradients_of_a_checkpoint_and_of_what_is_outside_are_parts(is_first):
    class Once(nn.Module):
        def __init__(self):
            super().__init__()
            self.shared = nn.Linear(4, 4)

        def forward(self, x):
            apart = lambda x: checkpoint(self.shared, x, use_reentrant=True)  # noqa: E731
            return self.shared(apart(x).tanh()) if is_first else apart(self.shared(x).tanh())

    model, x = Once(), torch.randn(2, 4, requires_grad=True)
    with (
        pytest.raises(gaff.ExactnessError, match="comes in parts"),
        gaff.edit(model, {"shared.weight:grad": edits.clamp(-0.1, 0.1)}),
    ):
        model(x).sum().backward()


class Region(nn.Module):
    """A region under torch's checkpoint, or none, whose last op is one that an edit makes."""

    def __init__(self, *, is_checkpointed):
        super().__init__()
        self.a, self.b, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Identity()
        self.is_checkpointed = is_checkpointed

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False) if self.is_checkpointed else self.inner(x)

    def inner(self, x):
        return self.last(torch.tanh(self.b(torch.tanh(self.a(x)))))


@pytest.mark.parametrize("strength", [1.0, 0.5])
@pytest.mark.parametrize("site", ["last", "last:input", "/tanh#1", "b.weight:param"])
@pytest.mark.parametrize("name", ["scale", "clip", "project", "row", "function"])
def test_a_recomputation_may_end_inside_an_edit(site, name, strength):
    """torch ends it by an exception as soon as the last tensor is saved that its backward pass asks for."""
    made = {
        "scale": edits.scale(torch.tensor([0.5, 2.0, -1.0, 3.0])),
        "clip": edits.clip(0.5),
        "project": edits.project(torch.tensor([[1.0, 2.0, 0.0, 1.0]])),
        "row": edits.at(keep.rows(1), edits.scale(torch.tensor([0.5, 2.0, -1.0, 3.0]))),
        "function": lambda value: value.exp() * value,
    }[name]
    gradients = []
    for is_checkpointed in (False, True):
        torch.manual_seed(0)
        model = Region(is_checkpointed=is_checkpointed)
        with gaff.edit(model, {site: made}) as changed:
            changed.strength(strength)
            model(torch.randn(3, 4)).square().sum().backward()
        gradients.append(model.a.weight.grad)
    assert torch.equal(*gradients)


class Marked(torch.Tensor):
    """A subclass that adds nothing, and goes through torch's protocol for subclasses."""


@pytest.mark.parametrize("port", ["0:grad_input", "0:input_grad", ":grad_input"])
def test_a_leaf_of_a_subclass_has_its_gradient(port):
    model, x = nn.Sequential(nn.Linear(3, 3), nn.Tanh()), torch.randn(2, 3)
    leaf = x.as_subclass(Marked).requires_grad_()
    with gaff.capture(model, port) as got:
        model(leaf).sum().backward()
    plain = x.clone().requires_grad_()
    model(plain).sum().backward()
    assert torch.equal(got[port].as_subclass(torch.Tensor), plain.grad)


def test_the_first_share_of_a_process_saves_nothing_in_a_checkpoint_of_the_model():
    """What gaff tries out once a process, it tries without an autograd graph: a checkpoint counts what is saved."""

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))

        def forward(self, x):
            return checkpoint(self.inner, x, use_reentrant=False)

    memory._is_held_by_torch.cache_clear()
    model = Checkpointed()
    with gaff.capture(model, "inner.1:grad_input") as got:
        model(torch.randn(2, 4, requires_grad=True)).sum().backward()
    assert got["inner.1:grad_input"].shape == (2, 4)


@pytest.mark.parametrize("is_view", [False, True])
def test_a_tensor_made_before_several_runs_is_that_of_the_pass_that_comes(is_view):
    """As an encoder's output that a decoder is given twice: no leaf, and older than both runs."""
    encoder, decoder, x = nn.Linear(3, 3), nn.Linear(3, 3), torch.randn(2, 3)
    middle = encoder(x)
    hidden = middle.view(2, 3) if is_view else middle
    with gaff.capture(decoder, ":input_grad") as got:
        first, second = decoder(hidden).sum(), decoder(hidden).square().sum()
        second.backward(retain_graph=True)
    expected = torch.autograd.grad(second, hidden, retain_graph=True)[0]
    assert torch.equal(got.run(1)[":input_grad"], expected)
    with pytest.raises(gaff.SiteError, match="no event in run 0"):
        got.run(0)[":input_grad"]
    encoder.zero_grad()
    with gaff.edit(decoder, {":input_grad": gaff.edits.scale(2.0)}) as changed:
        first, second = decoder(hidden).sum(), decoder(hidden).square().sum()
        second.backward()
    bias = expected.sum(0)
    torch.testing.assert_close(encoder.bias.grad, 2 * bias)
    assert "  1  " in str(changed.receipt).splitlines()[-1]
    assert first.requires_grad


def test_a_module_that_returns_what_is_older_does_not_claim_its_passes():
    """Also where its own gradient is asked for: run 0 has none, whatever else is looked at."""

    class Passes(nn.Module):
        def __init__(self):
            super().__init__()
            self.same, self.lin = nn.Identity(), nn.Linear(3, 3)

        def forward(self, x):
            return self.lin(self.same(x))

    model, hidden = Passes(), nn.Linear(3, 3)(torch.randn(2, 3))
    with gaff.capture(model, "lin:input_grad", "same:grad_output") as got:
        model(hidden)
        model(hidden).square().sum().backward()
    for address in ("lin:input_grad", "same:grad_output"):
        assert got.run(1)[address] is not None
        with pytest.raises(gaff.SiteError, match="no event in run 0"):
            got.run(0)[address]


def test_what_a_worker_thread_has_made_marks_its_run():
    class Threaded(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = OnAnotherThread()

        def forward(self, x):
            return self.inner(x) * 2

    class OnAnotherThread(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(3, 3)

        def forward(self, x):
            with ThreadPoolExecutor(1) as pool:
                return pool.submit(torch.nn.functional.linear, x, self.lin.weight).result()

    model = Threaded()
    with gaff.capture(model, "inner.lin.weight:grad") as got:
        for _ in range(2):
            model(torch.randn(2, 3)).sum().backward()
    assert got.run(0)["inner.lin.weight:grad"] is not None
    assert got.run(1)["inner.lin.weight:grad"] is not None
