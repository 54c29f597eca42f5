"""captum's layer methods at addresses: the same numbers as at modules, and at functional calls, where captum has none."""

import pytest
import torch
from torch import nn

from gaff.errors import PlanError
from gaff.integrations.captum import at

attr = pytest.importorskip("captum.attr")
pytestmark = pytest.mark.filterwarnings("ignore")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.fc = nn.Linear(4 * 36, 3)

    def forward(self, x):
        return self.fc(torch.relu(self.conv(x)).flatten(1))


def net():
    torch.manual_seed(0)
    return Net().eval(), torch.randn(2, 1, 8, 8)


@pytest.mark.parametrize(
    "method", ["LayerGradCam", "LayerIntegratedGradients", "LayerActivation", "LayerGradientXActivation"]
)
def test_the_numbers_are_those_at_the_module(method):
    model, x = net()
    more = {} if method == "LayerActivation" else {"target": 1}
    true = getattr(attr, method)(model, model.conv).attribute(x, **more)
    spot = at(model, "conv")
    found = getattr(attr, method)(spot, spot.layer).attribute(x, **more)
    torch.testing.assert_close(found, true)


def test_a_functional_call_has_an_attribution_of_its_own():
    model, x = net()
    spot = at(model, "/relu#0")
    found = attr.LayerGradientXActivation(spot, spot.layer).attribute(x, target=2)
    hidden = torch.relu(model.conv(x)).detach()
    torch.testing.assert_close(found, hidden * model.fc.weight[2].view(1, 4, 6, 6))


@pytest.mark.parametrize("method", ["LayerGradCam", "LayerIntegratedGradients", "LayerGradientXActivation"])
def test_an_op_in_place_may_come_next(method):
    model, x = net()
    twin = nn.Sequential(model.conv, nn.ReLU(inplace=True), nn.Flatten(), model.fc).eval()
    true = getattr(attr, method)(model, model.conv).attribute(x, target=1)
    spot = at(twin, "0")
    torch.testing.assert_close(getattr(attr, method)(spot, spot.layer).attribute(x, target=1), true)


def test_what_goes_into_a_layer_is_an_address_of_its_own():
    """captum's option would attribute to what comes out, without a word."""
    net, x = Net().eval(), torch.randn(2, 1, 8, 8)
    expected = attr.LayerActivation(net, net.fc).attribute(x, attribute_to_layer_input=True)
    spot = at(net, "fc:input")
    assert torch.equal(attr.LayerActivation(spot, spot.layer).attribute(x), expected)
    spot = at(net, "fc")
    with pytest.raises(PlanError, match=r"expected at\(model, 'fc:input'\) without that option"):
        attr.LayerActivation(spot, spot.layer).attribute(x, attribute_to_layer_input=True)
    for method in ("LayerIntegratedGradients", "LayerGradientXActivation"):
        with pytest.raises(PlanError, match="attribute_to_layer_input=True"):
            getattr(attr, method)(spot, spot.layer).attribute(x, target=1, attribute_to_layer_input=True)
