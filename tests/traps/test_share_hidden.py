"""Shares that no node of the call brings, or not all of it: refused, never told as None or in part."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import gaff
from gaff import edits


def test_a_view_of_the_input_that_is_changed_in_place_later():
    model = nn.Sequential(nn.Conv2d(1, 2, 2), nn.Flatten(), nn.ReLU(inplace=True), nn.Linear(8, 1))
    with gaff.capture(model, "1:grad_input", "0:grad_output") as got:
        model(torch.randn(1, 1, 3, 3)).sum().backward()
    with pytest.raises(gaff.ExactnessError, match="returned a view of its input, which was changed in place later"):
        got["1:grad_input"]
    assert got["0:grad_output"].shape == (1, 2, 2, 2)


def test_a_view_of_the_input_that_nobody_changes():
    model = nn.Sequential(nn.Conv2d(1, 2, 2), nn.Flatten(), nn.ReLU(), nn.Linear(8, 1))
    with gaff.capture(model, "1:grad_input", "0:grad_output") as got:
        model(torch.randn(1, 1, 3, 3)).sum().backward()
    assert torch.equal(got["1:grad_input"], got["0:grad_output"])


class Clips(nn.Module):
    def forward(self, x):
        with torch.no_grad():
            x.clamp_(-0.1, 0.1)
        return x


def test_an_input_that_is_written_to_without_grad_mode_and_returned():
    model = nn.Sequential(nn.Linear(3, 3), Clips(), nn.Linear(3, 1))
    with gaff.capture(model, "1:grad_input", "1:input_grad") as got:
        model(torch.randn(2, 3)).sum().backward()
    with pytest.raises(gaff.ExactnessError, match="the module returned its input itself"):
        got["1:grad_input"]
    assert torch.equal(got["1:input_grad"], model[2].weight.expand(2, 3))


class OnTwoThreads(nn.Module):
    def __init__(self, pool):
        super().__init__()
        self.one, self.other, self.pool = nn.Linear(3, 3), nn.Linear(3, 3), pool

    def forward(self, x):
        running = self.pool.submit(self.other, x)
        return self.one(x) + running.result()


@pytest.fixture
def on_two_threads():
    with ThreadPoolExecutor(1) as pool:
        model = nn.Sequential(nn.Linear(3, 3), OnTwoThreads(pool))
        for _ in range(5):  # autograd numbers the nodes of each thread: this one is ahead
            model(torch.randn(2, 3))
        yield model


def test_a_forward_with_a_branch_on_another_thread(on_two_threads):
    with gaff.capture(on_two_threads, "1:grad_input", "1:input_grad") as got:
        on_two_threads(torch.randn(2, 3)).sum().backward()
    with pytest.raises(gaff.ExactnessError, match="by a worker thread, or before the call"):
        got["1:grad_input"]
    weight = on_two_threads[1].one.weight + on_two_threads[1].other.weight
    torch.testing.assert_close(got["1:input_grad"], weight.sum(0).expand(2, 3))


@pytest.mark.parametrize("is_input", [True, False])
def test_a_worker_that_writes_into_what_came_in(is_input):
    class Writes(nn.Module):
        def forward(self, x, other):
            written = x if is_input else other
            with ThreadPoolExecutor(1) as pool:
                pool.submit(lambda: written[:, :2].add_(x[:, :1] * 2)).result()
            return written * 3

    model, x = Writes(), torch.randn(2, 4, requires_grad=True)
    for _ in range(64):
        x * 1.0  # the numbers of this thread are higher than those of the worker
    with gaff.capture(model, ":grad_input") as got:
        model(x * 1.0, torch.zeros(2, 4)).sum().backward()
    with pytest.raises(gaff.ExactnessError, match="by a worker thread, or before the call"):
        got[":grad_input"]


def test_an_edit_of_a_share_with_a_branch_on_another_thread(on_two_threads):
    with gaff.edit(on_two_threads, {"1:grad_input": edits.zero()}):
        on_two_threads(torch.randn(2, 3)).sum().backward()
    assert not on_two_threads[0].weight.grad.any()


def test_something_older_that_is_not_made_of_the_input_is_no_reason_to_refuse():
    class Adds(nn.Module):
        def forward(self, x):
            return x * self.kept

    block, x = Adds(), torch.randn(2, requires_grad=True)
    block.kept = torch.randn(2, requires_grad=True) * 2
    with gaff.capture(block, ":grad_input") as got:
        block(x * 1).sum().backward()
    assert torch.equal(got[":grad_input"], block.kept)


def test_something_older_that_is_made_of_the_input_is_refused():
    class Adds(nn.Module):
        def forward(self, x):
            return x * self.kept

    model, x = Adds(), torch.randn(2, requires_grad=True)
    h = x * 1
    model.kept = h.sin()
    with gaff.capture(model, ":grad_input") as got:
        model(h).sum().backward()
    with pytest.raises(gaff.ExactnessError, match="before the call and kept"):
        got[":grad_input"]


def test_an_argument_that_another_thread_made_of_the_input_is_not_the_modules_own():
    class Adds(nn.Module):
        def forward(self, x, y):
            return x * 3 + y

    model, x = Adds(), torch.randn(2, requires_grad=True)
    h = x * 1
    with ThreadPoolExecutor(1) as pool:
        pool.submit(lambda: [x * 1 for _ in range(20000)]).result()  # its nodes have higher numbers than ours
        y = pool.submit(lambda: h * 5).result()
    with gaff.capture(model, ":grad_input[0]", ":input_grad[0]") as got:
        model(h, y).sum().backward()
    assert torch.equal(got[":grad_input[0]"], torch.full((2,), 3.0))
    assert torch.equal(got[":input_grad[0]"], torch.full((2,), 8.0))


def test_a_tensor_that_requires_grad_late_inside_a_reentrant_checkpoint():
    from torch.utils.checkpoint import checkpoint

    class Late(nn.Module):
        def forward(self, h):
            return h.detach().requires_grad_()

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin, self.late = nn.Linear(4, 4), Late()

        def forward(self, x):
            return checkpoint(self.late, self.lin(x), use_reentrant=True)

    model = Net()
    with gaff.capture(model, "late/detach:grad_output", "late:grad_output") as got:
        model(torch.randn(2, 4)).sum().backward()
    assert torch.equal(got["late/detach:grad_output"], torch.ones(2, 4))
    assert torch.equal(got["late:grad_output"], torch.ones(2, 4))


class Held:
    def __init__(self, tensor):
        self.tensor = tensor


@pytest.mark.parametrize("hold", [Held, lambda tensor: {Held(tensor)}, lambda tensor: [Held(tensor)]])
def test_a_part_that_leaves_inside_an_object(hold):
    class Caches(nn.Module):
        def forward(self, x):
            return x * 5, hold(x * 2)

    model, x = nn.Sequential(Caches()), torch.ones(2, requires_grad=True)
    with gaff.capture(model, "0:grad_input") as got:
        y, held = model(x * 1)
        held = next(iter(held)) if not isinstance(held, Held) else held
        (y + held.tensor * 3).sum().backward()
    assert torch.equal(got["0:grad_input"], torch.full((2,), 11.0))
