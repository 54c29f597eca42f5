"""A module that is replaced while the session is open has not fired: said, not silent."""

import pytest
import torch
from torch import nn

import gaff


def test_a_replaced_module_is_reported():
    model, x = nn.Sequential(nn.Linear(3, 3), nn.Tanh()), torch.randn(2, 3)
    with pytest.raises(gaff.NeverFiredError, match="'1' never fired.*replaced"), gaff.capture(model, "0", "1"):
        model[1] = nn.ReLU()
        model(x)


@pytest.mark.parametrize("is_wrapped", [True, False])
def test_a_module_that_is_replaced_between_runs_is_not_told_by_its_old_value(is_wrapped):
    model, x = nn.Sequential(nn.Linear(3, 3), nn.Tanh()), torch.randn(2, 3)
    first = model[0](x)

    def captured():
        with gaff.capture(model, "0") as got:
            model(x)
            model[0] = nn.Sequential(model[0]) if is_wrapped else nn.Linear(3, 3)
            model(x)
        return got

    with pytest.warns(UserWarning, match="0: the module was replaced"):
        got = captured()
    with pytest.raises(gaff.SiteError, match="fired 2 times, in runs 0 and 1"):
        got["0"]
    assert torch.equal(got.run(0)["0"], first)
    with pytest.raises(gaff.ExactnessError, match="what is at this address now was not seen"):
        got.run(1)["0"]


def test_gradients_of_runs_before_the_replacement_are_told():
    model, x = nn.Sequential(nn.Linear(2, 2), nn.Tanh()), torch.randn(3, 2)

    def captured():
        with gaff.capture(model, "0:grad_output") as got:
            first = model(x)
            model[0] = nn.Linear(2, 2)
            second = model(x)
            (first.sum() + second.sum()).backward()
        return got, first.detach()

    with pytest.warns(UserWarning, match="grad_output: the module was replaced"):
        got, first = captured()
    torch.testing.assert_close(got.run(0)["0:grad_output"], 1 - first**2)
    with pytest.raises(gaff.ExactnessError, match="the module was replaced"):
        got.run(1)["0:grad_output"]
