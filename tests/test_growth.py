"""Twice as many modules are twice the work, and no more: counted in calls of functions, which no machine changes."""

import sys

import pytest
import torch
from torch import nn

import gaff

SIZES = 60, 120
X = torch.ones(1, 2)


def model_of(size):
    return nn.Sequential(*[nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(size)])


def captured(model, *addresses):
    with gaff.capture(model, *addresses) as got:
        model(X).sum().backward()
    return got


def saved(got, folder):
    got.save(folder / "got.safetensors")
    return gaff.load(folder / "got.safetensors")


def edited(model, address):
    with gaff.edit(model, {address: gaff.edits.scale(0.5)}) as editing:
        model(X).sum().backward()
    return editing


def normed(model):
    with gaff.sample_norms(model) as norms:
        model(X).sum().backward()
    return norms.total


# by name: what is made of a model first, and what is then asked of that
ACTIONS = {
    "capture outputs": (lambda model, _: model, lambda model: captured(model, "**:output")),
    "capture ops": (lambda model, _: model, lambda model: captured(model, "**/*")),
    "capture gradients": (lambda model, _: model, lambda model: captured(model, "**:grad_output", "**:grad_input")),
    "capture gradients of parameters": (lambda model, _: model, lambda model: captured(model, "**.weight:grad")),
    "capture parameters": (lambda model, _: model, lambda model: captured(model, "**.weight:param")),
    "read": (lambda model, _: captured(model, "**:output"), lambda got: [got[key] for key in got]),
    "read all": (lambda model, _: captured(model, "**:output"), lambda got: got.all("**:output")),
    "read by module": (
        lambda model, _: (captured(model, "**:output"), list(model)),
        lambda given: [given[0][one] for one in given[1]],
    ),
    "read ops": (
        lambda model, _: (captured(model, "**/*"), len(model)),
        lambda given: [given[0][f"{at}.0/linear"] for at in range(given[1])],
    ),
    "read what was saved": (
        lambda model, folder: saved(captured(model, "**:output"), folder),
        lambda got: [got[key] for key in got],
    ),
    "receipt": (lambda model, _: captured(model, "**:output"), lambda got: str(got.receipt)),
    "edit outputs": (lambda model, _: model, lambda model: edited(model, "**:output")),
    "edit parameters": (lambda model, _: model, lambda model: edited(model, "**.weight:param")),
    "edit ops": (lambda model, _: model, lambda model: edited(model, "**/relu")),
    "norms of examples": (lambda model, _: model, normed),
    "sites": (lambda model, _: model, lambda model: str(gaff.sites(model, X))),
    "trace": (lambda model, _: model, lambda model: gaff.trace(model, X, backward=lambda y: y.sum())),
    "trace as text": (lambda model, _: gaff.trace(model, X, backward=lambda y: y.sum()), str),
    "diff": (lambda model, _: (gaff.trace(model, X), gaff.trace(model, X)), lambda both: str(gaff.diff(*both))),
    "anatomy": (lambda model, _: model, lambda model: str(gaff.anatomy(model, X))),
}


def calls_of(action):
    """How many functions are called, Python's and those of C."""
    count = 0

    def note(frame, event, arg):
        nonlocal count
        count += event in ("call", "c_call")

    known = sys.getprofile()
    sys.setprofile(note)
    try:
        action()
    finally:
        sys.setprofile(known)
    return count


@pytest.mark.slow
@pytest.mark.parametrize("name", ACTIONS)
def test_work_grows_with_the_model_and_no_faster(name, tmp_path):
    prepare, ask = ACTIONS[name]
    for size in (2, *SIZES):
        ask(prepare(model_of(size), tmp_path))  # what is imported, and looked up, once
    counts = []
    for size in SIZES:
        given = prepare(model_of(size), tmp_path)
        counts.append(calls_of(lambda given=given: ask(given)))
    assert counts[1] < 2.2 * counts[0], counts


@pytest.mark.slow
def test_as_many_parameters_are_edited_as_a_model_has():
    """A run is no deeper for it: each edit once stood around the model's forward."""
    model = model_of(400)
    editing = edited(model, "**.*:param")
    assert editing.receipt.rows[-1].fired == 1
    assert len(editing.receipt.rows) == 800
