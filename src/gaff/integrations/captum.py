"""captum's layer attribution at any address: of a module, of a functional call, of a part of a tuple.

    from captum.attr import LayerGradCam, LayerIntegratedGradients
    from gaff.integrations.captum import at

    spot = at(model, "layer4/add#1")
    LayerGradCam(spot, spot.layer).attribute(x, target=3)

captum hangs hooks on a module; ``spot.layer`` is one through which what passes at the address is sent.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from gaff.sessions.edit import edit


class Spot(nn.Module):
    """A model whose value at one address passes through the module ``layer``, an identity; computes what it computed.

    Made by ``at``. Parameters and modes are the model's own. While it runs an edit of gaff is open on the model.
    """

    def __init__(self, model: nn.Module, address: str) -> None:
        super().__init__()
        self.model = model
        self.address = address
        self.layer = nn.Identity()
        edit(model, {address: self.layer}, {})  # raises for what is no address of the model, before anything runs

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the model returns."""
        with edit(self.model, {self.address: self.layer}, {}):
            return self.model(*args, **kwargs)


def at(model: nn.Module, address: str) -> Spot:
    """The model with a module at ``address``, for captum's ``Layer...`` methods: ``Method(spot, spot.layer)``.

    Raises SiteError for an address that names nothing in the model, PlanError for what cannot be changed.
    """
    return Spot(model, address)
