"""An exception that came through a model tells where it was raised, whichever verb was open, and is else as it was."""

import traceback
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import gaff
from gaff import edits


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x, *, mask=None):
        return self.fc(x if mask is None else mask)


class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.h = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x, mask=None, *, again=False):
        x = self.h[0](x)
        return checkpoint(self.h[1], x, use_reentrant=False) if again else self.h[1](x, mask=mask)


def notes(error):
    return getattr(error, "__notes__", [])


OPEN = {
    "capture": lambda model, bad: _inside(gaff.capture(model, "h.*"), model, bad),
    "edit": lambda model, bad: _inside(gaff.edit(model, {"h.0.fc": edits.scale(0.5)}), model, bad),
    "guard": lambda model, bad: _inside(gaff.guard(model), model, bad),
    "sample_norms": lambda model, bad: _inside(gaff.sample_norms(model), model, bad),
    "take": lambda model, bad: gaff.take(model, ":output")(bad),
    "trace": lambda model, bad: gaff.trace(model, bad),
    "sites": lambda model, bad: gaff.sites(model, bad),
    "ops": lambda model, bad: gaff.sites(model, bad, ops=True),
    "anatomy": lambda model, bad: gaff.anatomy(model, bad),
    "find_nonfinite": lambda model, bad: gaff.find_nonfinite(lambda: model(bad), model=model),
}


def _inside(session, model, bad):
    with session:
        model(bad)


@pytest.mark.parametrize("verb", OPEN)
def test_every_verb_names_the_innermost_module_and_what_it_was_given(verb):
    model, bad = Deep(), torch.randn(4, 7)
    with pytest.raises(RuntimeError) as bare:
        model(bad)
    with pytest.raises(RuntimeError) as caught:
        OPEN[verb](model, bad)
    told = [note for note in notes(caught.value) if note.startswith("gaff: raised in")]
    assert told == ["gaff: raised in h.0.fc (Linear), which was given Tensor float32 [4, 7]"]
    assert type(caught.value) is type(bare.value)
    assert caught.value.args == bare.value.args


def test_keywords_and_the_model_itself():
    model = Deep()
    with pytest.raises(RuntimeError) as caught, gaff.capture(model, "h.*"):
        model(torch.randn(2, 4), torch.ones(2, 3))
    assert notes(caught.value) == ["gaff: raised in h.1.fc (Linear), which was given Tensor float32 [2, 3]"]
    with pytest.raises(TypeError) as caught, gaff.capture(model, "h.*"):
        model(None, [2], more=3)
    [note] = notes(caught.value)
    assert note == "gaff: raised in the model itself (Deep), which was given None, list of 1, more=3"


def test_a_recomputation_tells_it_too():
    model = Deep()

    def breaks(module, args):
        if torch._C._current_graph_task_id() != -1:
            raise ValueError("not again")

    handle = model.h[1].fc.register_forward_pre_hook(breaks)
    with pytest.raises(ValueError, match="not again") as caught, gaff.capture(model, "h.0"):
        model(torch.randn(2, 4), again=True).sum().backward()
    handle.remove()
    assert notes(caught.value) == ["gaff: raised in h.1.fc (Linear), which was given Tensor float32 [2, 4]"]


def test_two_sessions_tell_it_once():
    model = Deep()
    with pytest.raises(RuntimeError) as caught:
        with gaff.capture(model, "h.*"), gaff.edit(model, {"h.0": edits.zero()}), gaff.guard(model):
            model(torch.randn(4, 7))
    assert len([note for note in notes(caught.value) if "raised in" in note]) == 1


def test_nothing_is_added_to_what_did_not_come_through_the_model():
    model = Deep()
    with pytest.raises(RuntimeError) as caught, gaff.capture(model, "h.0"):
        nn.Linear(2, 2)(model(torch.randn(2, 4)))  # a head that is no part of the model
    assert notes(caught.value) == []
    with pytest.raises(ZeroDivisionError) as caught, gaff.capture(model, gaff.maybe("h.0")):
        1 / 0
    assert notes(caught.value) == []
    with pytest.raises(ZeroDivisionError) as caught, gaff.edit({torch.ones(1, requires_grad=True): edits.zero()}):
        1 / 0
    assert notes(caught.value) == []


def test_what_gaff_says_itself_and_what_names_its_place_gets_no_second_note():
    model, x = Deep(), torch.randn(2, 4)
    with pytest.raises(gaff.PlanError) as caught, gaff.edit(model, {"h.0": edits.replace(torch.ones(1))}):
        model(x)
    assert notes(caught.value) == []
    with pytest.raises(ZeroDivisionError) as caught, gaff.edit(model, {"h.0": lambda t: 1 / 0}):
        model(x)
    assert notes(caught.value) == ["gaff: in the edit at h.0, run 0, call 0"]
    with pytest.raises(ZeroDivisionError) as caught, gaff.capture(model, "h.0", reduce=lambda t: 1 / 0):
        model(x)
    assert notes(caught.value) == ["gaff: while keeping h.0"]
    with pytest.raises(KeyboardInterrupt) as interrupted, gaff.edit(model, {"h.0": _interrupt}):
        model(x)
    assert not any("raised in" in note for note in notes(interrupted.value))


class Endless(nn.Module):
    def forward(self, x):
        with gaff.capture(self, ":output"):
            return self(x)


def test_where_the_stack_is_full_the_hooks_go_all_the_same():
    model = Endless()
    with pytest.raises(RecursionError) as caught:
        model(torch.ones(1))
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    assert notes(caught.value) == []


def _interrupt(tensor):
    raise KeyboardInterrupt


class Makes(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        made = x.new_ones(4, 7)
        self.alive = weakref.ref(made)
        return self.fc(made)


def test_neither_frames_nor_tensors_are_kept():
    model = Makes()
    try:
        with gaff.capture(model, ":output"):
            model(torch.randn(1))
    except RuntimeError as error:
        caught = error
    assert notes(caught) == ["gaff: raised in fc (Linear), which was given Tensor float32 [4, 7]"]
    traceback.clear_frames(caught.__traceback__)
    assert model.alive() is None
