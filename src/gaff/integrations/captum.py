"""captum's layer attribution at any address: of a module, of a functional call, of a part of a tuple.

    from captum.attr import LayerGradCam, LayerIntegratedGradients
    from gaff.integrations.captum import at

    spot = at(model, "layer4/add#1")
    LayerGradCam(spot, spot.layer).attribute(x, target=3)

captum hangs hooks on a module; ``spot.layer`` is one through which what passes at the address is sent.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from gaff.address.grammar import VALUE_PORTS, WEIGHTS, Site, parse
from gaff.errors import PlanError
from gaff.sessions.edit import edit
from gaff.sessions.plan import Plan


class Spot(nn.Module):
    """A model whose value at one address passes through the module ``layer``, an identity; computes what it computed.

    Made by ``at``. Parameters and modes are the model's own. While it runs an edit of gaff is open on the model.
    """

    def __init__(self, model: nn.Module, address: str | nn.Module) -> None:
        super().__init__()
        if isinstance(address, nn.Module):
            address = next((path for path, one in model.named_modules() if one is address), address)
        if not isinstance(address, str):
            kind = type(address).__name__
            raise PlanError(f"a {kind} was given: expected one address such as 'layer4.1', or a module of the model")
        self.model = model
        self.training = model.training
        self.address = address
        self.layer = nn.Identity()
        found = Plan.edit({address: self.layer}).check(model)
        asked = parse(address)
        is_exact = isinstance(asked, Site) or asked.is_single
        port = found[0].found.site.port if len(found) == 1 else ""
        if not is_exact or port not in (*VALUE_PORTS, WEIGHTS):
            raise PlanError(
                f"{address!r} is no single value: expected one exact address of an output, an input or an op"
            )

        self._is_output = port != "input"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the model returns."""
        with edit(self.model, {self.address: self._through}, {}):
            return self.model(*args, **kwargs)

    def _through(self, value: Tensor) -> Tensor:
        """What the model goes on with: a copy, for captum may put a leaf there, and an in-place op may come next.

        Raises PlanError where captum asks for what goes into the layer, which is what comes out at the address.
        """
        if self.layer._forward_pre_hooks and self._is_output:
            raise PlanError(
                "attribute_to_layer_input=True asks for what goes into a layer, and what goes into spot.layer is what "
                f"{self.address!r} returns: expected at(model, '{self.address.removesuffix(':output')}:input') without "
                "that option"
            )
        found: Tensor = self.layer(value)
        return found.clone()


def at(model: nn.Module, address: str | nn.Module) -> Spot:
    """The model with a module at ``address``, for captum's ``Layer...`` methods: ``Method(spot, spot.layer)``.

    ``address`` may be a module of the model: its output. Where it is called several times in a run, each call passes
    through the module. Raises SiteError for an address that names nothing in the model, PlanError for one that is no
    single value.
    """
    return Spot(model, address)
