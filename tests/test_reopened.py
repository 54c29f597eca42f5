"""A capture that is entered again: what was kept is let go, everything is counted from nothing, and nothing stays."""

import gc
import weakref

import pytest
import torch
from torch import nn

import gaff


@pytest.fixture
def model():
    return nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 2))


PATTERNS = [
    ["*"],
    ["0:input", "2"],
    ["*", "0:grad_output", "2.weight:grad", "**:grad_input"],
    ["0/linear"],
    ["0.weight:param"],
    [gaff.maybe("nope"), "1"],
]


def told(got):
    return {name: None if value is None else value.clone() for name, value in got.items()}


@pytest.mark.parametrize("patterns", PATTERNS)
def test_each_opening_tells_what_a_new_capture_tells(model, patterns):
    again = gaff.capture(model, *patterns)
    for number in range(3):
        x = torch.full((2, 3), 1.0 + number, requires_grad=True)
        with again:
            model(x).sum().backward()
        with gaff.capture(model, *patterns) as new:
            model(x).sum().backward()
        mine, its = told(again), told(new)
        assert list(mine) == list(its)
        assert all(torch.equal(one, its[name]) for name, one in mine.items())
        assert str(again.receipt) == str(new.receipt)
        assert again.receipt.runs == 1


def test_what_was_kept_before_is_let_go(model):
    got = gaff.capture(model, "0")
    with got:
        model(torch.ones(1, 3))
    kept = weakref.ref(next(iter(got._by_object.values())).records[0][2])
    with got:
        model(torch.ones(1, 3))
    gc.collect()
    assert kept() is None


def test_the_wiring_is_made_once_for_values(model):
    got = gaff.capture(model, "*")
    seen = []
    for _ in range(2):
        with got:
            model(torch.ones(1, 3))
            seen.append(got._session._wiring)
    assert seen[0] is seen[1]


def test_a_module_that_was_replaced_between_two_openings_is_looked_up_anew(model):
    got = gaff.capture(model, "0")
    with got:
        model(torch.ones(1, 3))
    model[0] = nn.Linear(3, 3)
    with got:
        model(torch.ones(1, 3))
    assert torch.equal(got["0"], model[0](torch.ones(1, 3)))


def test_a_parameter_that_was_replaced_between_two_openings_is_still_not_shared():
    class Returns(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self):
            return self.weight

    model = Returns()
    got = gaff.capture(model, ":output")
    with got:
        model()
    model.weight = nn.Parameter(torch.zeros(3))
    with got:
        model()
    with torch.no_grad():
        model.weight.add_(1)
    assert torch.equal(got[":output"], torch.zeros(3))


def test_another_thread_may_open_it_the_next_time(model):
    from threading import Thread

    got = gaff.capture(model, "0")
    with got:
        model(torch.ones(1, 3))

    def work():
        with got:
            model(torch.zeros(1, 3))

    thread = Thread(target=work)
    thread.start()
    thread.join()
    assert torch.equal(got["0"], model[0].bias[None])


def test_an_open_one_is_not_opened_again(model):
    with gaff.capture(model, "0") as got:
        with pytest.raises(gaff.PlanError, match="is open already"), got:
            pass
        model(torch.ones(1, 3))
    assert got["0"].shape == (1, 3)


def test_one_of_plain_tensors_is_opened_once():
    x = torch.ones(2, requires_grad=True)
    got = gaff.capture(x=x)
    with got:
        (x * 2).sum().backward()
    with pytest.raises(gaff.PlanError, match="of plain tensors, and is entered once"), got:
        pass


def test_an_opening_in_which_nothing_ran_says_so(model):
    got = gaff.capture(model, "0")
    with got:
        model(torch.ones(1, 3))
    with pytest.raises(gaff.NeverFiredError), got:
        pass


def test_a_module_that_was_added_since_is_found_by_a_pattern():
    model = nn.Sequential(nn.Tanh(), nn.Sequential(nn.Linear(2, 2)))
    got = gaff.capture(model, "**<Tanh>")
    with got:
        model(torch.ones(1, 2))
    assert len(got.all("**<Tanh>")) == 1
    model[1].append(nn.Tanh())
    with got:
        model(torch.ones(1, 2))
    assert len(got.all("**<Tanh>")) == 2


def test_what_was_refused_at_the_first_opening_is_refused_with_the_same_words_at_the_second():
    model = nn.Sequential(nn.Linear(2, 2, device="meta"))
    edited = gaff.edit(model, {"0.weight:param": gaff.edits.scale(2.0)})
    told = []
    for _ in range(2):
        with pytest.raises(gaff.PlanError, match="lies on the meta device") as caught:
            edited.__enter__()
        told.append(str(caught.value))
    assert told[0] == told[1]
    assert "never opened" in str(edited.receipt)
