"""Dicts, dataclasses, named tuples, lists, None and numbers inside an output."""

import pytest
import torch

import gaff
from zoo import Outputs, Pair, Structured


def test_a_bare_address_gives_the_structure_and_keys_lead_into_it():
    model, x = Structured(), torch.randn(2, 4)
    with gaff.capture(model, ":output", "pair", "pair:output[second]") as got:
        y = model(x)
    value = got[":output"]
    assert type(value) is Outputs
    assert type(got["pair"]) is Pair
    assert torch.equal(value.hidden, y.hidden)
    assert torch.equal(got[":output[hidden]"], y.hidden)
    assert torch.equal(got[":output[extra][second]"], y.extra["second"])
    assert torch.equal(got[":output[extra][3][0]"], y.extra[3][0])
    assert got[":output[extra][3][1]"] is None
    assert got[":output[extra][3][2]"] == 7
    assert torch.equal(got["pair:output[second]"], got["pair"].second)
    assert not value.hidden.requires_grad


def test_gradients_inside_a_structure_need_a_key():
    model, x = Structured(), torch.randn(2, 4)
    with gaff.capture(model, ":grad_output[hidden]", "pair:grad_output[first]") as got:
        y = model(x)
        (y.hidden * torch.arange(4.0)).sum().backward()
    assert torch.equal(got[":grad_output[hidden]"], torch.arange(4.0).expand(2, 4))
    assert got["pair:grad_output[first]"].shape == (2, 4)
    with pytest.raises(
        gaff.SiteError,
        match=r"pair:grad_output: its value holds 2 tensors.*pair:grad_output\[first\], pair:grad_output\[second\]",
    ):
        with gaff.capture(model, "pair:grad_output"):
            model(x)


def test_a_pattern_takes_every_tensor_of_a_structure():
    model, x = Structured(), torch.randn(2, 4)
    with gaff.capture(model, "p*:grad_output") as got:
        y = model(x)
        (y.hidden.sum() + y.extra["second"].sum()).backward()
    assert list(got) == ["pair:grad_output[first]", "pair:grad_output[second]"]
    assert torch.equal(got["pair:grad_output[second]"], torch.ones(2, 4))


def test_a_missing_key_lists_the_keys_that_were_there():
    model, x = Structured(), torch.randn(2, 4)
    with pytest.raises(
        gaff.SiteError,
        match=r":output\[hiden\]: the value has no \[hiden\]: it is a Outputs with \[hidden\], \[extra\]",
    ):
        with gaff.capture(model, ":output[hiden]"):
            model(x)
    with pytest.raises(gaff.SiteError, match="keys do not index into tensors"):
        with gaff.capture(model, ":output[hidden][0]"):
            model(x)
