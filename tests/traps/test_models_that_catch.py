"""A model that catches exceptions, as routers with a fallback do, must not swallow what gaff has to say to its user."""

import contextlib
import warnings

import pytest
import torch
from torch import nn

import gaff
from gaff import edits


class Falls(nn.Module):
    """Goes on with its input where its first layer fails."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.never = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        try:
            h = self.a(x)
        except Exception:
            h = x
        return self.b(h)


def fails(*given):
    raise ValueError("mine")


X = torch.ones(2, 4)
EDITS = {
    "does not fit": {"a": edits.add(torch.ones(5))},
    "of another shape": {"a": lambda value: value[:1]},
    "raises": {"a": fails},
    "at the input": {"a:input": edits.add(torch.ones(5))},
    "of an op": {"a/linear": edits.add(torch.ones(5))},
    "skips": {"a": edits.skip(fails)},
    "from what has not passed": {"a": edits.patch(source="b")},
    "by a key": {"a:output[0]": edits.zero()},
}


@pytest.mark.parametrize("case", EDITS)
@pytest.mark.parametrize("is_attached", [False, True])
def test_an_edit_that_fails_inside_is_told_when_the_run_ends(case, is_attached):
    model = Falls()
    editing = gaff.edit(model, EDITS[case])
    with pytest.raises(gaff.ExactnessError, match="the model caught an error"):
        if is_attached:
            editing.attach()
            model(X)
        else:
            with editing:
                model(X)
    if is_attached:
        with contextlib.suppress(gaff.NeverFiredError):
            editing.remove()
    assert not model.a._forward_hooks
    model(X)


def test_a_check_of_what_an_edit_makes_is_told():
    with (
        pytest.raises(gaff.ExactnessError, match="non-finite"),
        gaff.edit(Falls(), {"a": edits.scale(float("nan"))}, check_finite=True) as editing,
    ):
        editing._model(X)


@pytest.mark.parametrize("options", [{"reduce": fails}, {"budget": 1}])
def test_a_capture_or_a_feature_that_fails_inside_is_told(options):
    model = Falls()
    with pytest.raises(gaff.ExactnessError, match="the model caught"), gaff.capture(model, "a", **options):
        model(X)
    if "reduce" in options:
        with pytest.raises(gaff.ExactnessError, match="the model caught"):
            gaff.take(model, "a", **options)(X)


def test_an_error_that_the_user_has_heard_is_not_told_twice_and_hides_no_silent_pattern():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with gaff.edit(model, {"0": fails}), pytest.raises(ValueError, match="mine"):
        model(X)
    other = Falls()
    with pytest.raises(gaff.NeverFiredError, match="'never'"), gaff.edit(other, {"b": fails, "never": edits.zero()}):
        with pytest.raises(ValueError, match="mine"):
            other(X)


def test_what_a_model_raises_and_catches_itself_is_its_own_affair():
    class Tries(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(4, 4)

        def forward(self, x):
            try:
                return self.a(x[:, :3])
            except RuntimeError:
                return self.a(x)

    model = Tries()
    with gaff.capture(model, "a", "a/linear") as got, gaff.edit(model, {"a": edits.scale(2.0)}):
        model(X)
    assert torch.equal(got["a"], 2 * model.a(X))


def test_nothing_stays_where_warnings_are_errors():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for attach in (False, True):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            editing = gaff.edit(model, {"0": edits.scale(2.0), "1": edits.scale(0.0)}).attach()
            model(X)
            model[0] = nn.Linear(4, 4)
            with pytest.raises(UserWarning, match="replaced"):
                editing.remove()
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules()), attach
        assert model(X).any()


def test_it_is_told_inside_a_handler_of_the_user_too_and_of_a_model_that_returns_nothing():
    class Silent(Falls):
        def forward(self, x):
            super().forward(x)

    for model in (Falls(), Silent()):
        with pytest.raises(gaff.ExactnessError, match="the model caught"), gaff.edit(model, {"a": fails}):
            try:
                raise KeyError
            except KeyError:
                model(X)
