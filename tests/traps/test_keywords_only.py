"""Inputs given by keyword are inputs."""

import pytest
import torch

import gaff
from zoo import Keywords


def test_inputs_and_their_gradients_by_keyword():
    model, x = Keywords(), torch.randn(2, 4, requires_grad=True)
    with gaff.capture(
        model,
        "inner:input",
        "inner:input[tensor]",
        "inner:input[scale]",
        "inner:input_grad",
        "inner:grad_input[tensor]",
    ) as got:
        model(x=x, scale=3.0).sum().backward()
    assert torch.equal(got["inner:input"], x)
    assert torch.equal(got["inner:input[tensor]"], x)
    assert got["inner:input[scale]"] == 3.0
    assert torch.equal(got["inner:input_grad"], x.grad)
    assert torch.equal(got["inner:grad_input[tensor]"], x.grad)


def test_a_keyword_that_was_not_given_is_named():
    model, x = Keywords(), torch.randn(2, 4)
    with pytest.raises(
        gaff.SiteError,
        match=r"inner:input\[mask\]: the call has no argument \[mask\]: it was given \[tensor\], \[scale\]",
    ):
        with gaff.capture(model, "inner:input[mask]"):
            model(x=x)
