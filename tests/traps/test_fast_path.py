"""nn.Transformer's fused path never calls the modules inside: asked for one, gaff takes the slow path and says so."""

import pytest
import torch
from torch import nn

import gaff


def encoder():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    return nn.Sequential(nn.TransformerEncoder(layer, 2), nn.Linear(8, 2)).eval()


def test_a_site_inside_fires_and_the_receipt_says_not_bitwise():
    model, x = encoder(), torch.randn(2, 5, 8)
    with torch.no_grad(), pytest.warns(UserWarning, match="not bitwise"):
        with gaff.capture(model, "0.layers.0.linear1") as got:
            model(x)
    assert got["0.layers.0.linear1"].shape == (2, 5, 16)
    assert "fast path was not taken" in got.receipt.notes[0]


@pytest.mark.parametrize("site", ["0", "0:input"])
def test_a_whole_encoder_is_looked_at_without_a_word(site):
    """Its layers are fused each by itself, and take the fused path all the same."""
    model, x = encoder(), torch.randn(2, 5, 8)
    with torch.no_grad():
        bare = model(x)
        with gaff.capture(model, site) as got:
            assert torch.equal(model(x), bare)
    assert not any("fast path" in note for note in got.receipt.notes)


def test_a_site_outside_leaves_the_fast_path_alone():
    model, x = encoder(), torch.randn(2, 5, 8)
    with torch.no_grad():
        bare = model(x)
        with gaff.capture(model, "1") as got:
            assert torch.equal(model(x), bare)
    assert got.receipt.notes == ()
    assert torch.equal(got["1"], bare)
