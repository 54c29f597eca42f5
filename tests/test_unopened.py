"""What does nothing until it is opened says so when it is let go of unopened."""

import gc
import warnings

import pytest
import torch
from torch import nn

import gaff


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda model: gaff.edit(model, {"0": gaff.edits.zero()}), "<gaff edit, not opened"),
        (lambda model: gaff.guard(model), "<gaff guard of Sequential"),
    ],
)
def test_what_was_never_opened_warns(make, what):
    model = nn.Sequential(nn.Linear(2, 2))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        make(model)
        gc.collect()
    [one] = [one for one in told if what in str(one.message)]
    assert one.category is RuntimeWarning
    assert "was never opened, and has done nothing: expected it in a with block" in str(one.message)


def test_what_was_opened_or_refused_does_not():
    model = nn.Sequential(nn.Linear(2, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with gaff.edit(model, {"0": gaff.edits.zero()}), gaff.guard(model):
            model(torch.ones(1, 2))
        attached = gaff.edit(model, {"0": gaff.edits.zero()}).attach()
        model(torch.ones(1, 2))
        attached.remove()
        for refused in (lambda: gaff.edit(model, {"1": gaff.edits.zero()}), lambda: gaff.guard(3)):
            with pytest.raises(gaff.GaffError):
                refused()
        del attached
        gc.collect()
