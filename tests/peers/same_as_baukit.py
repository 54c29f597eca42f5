"""``gaff.integrations.baukit`` beside the library itself: the same lines give the same tensors, gradients and edited outputs.

Run by ``make compare`` in the environment of baukit.
"""

import sys

import torch
from torch import nn

import schemas

schemas.declare()  # what this torch may lack, and torchvision, which baukit imports, wants to find
import baukit  # noqa: E402

from gaff.integrations import baukit as ours  # noqa: E402


def net():
    """A model whose parts baukit traces rightly: nothing in place, every layer called once."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 2))


def shown(library):
    """What a script with ``library`` sees, by name."""
    model, x, found = net(), torch.arange(12.0).view(3, 4) / 12, {}
    with library.Trace(model, "1") as one:
        found["the model's output"] = model(x)
    found["output"] = one.output
    with library.Trace(model, "2.0", retain_input=True, detach=True) as one:
        model(x)
    found["input"], found["detached"] = one.input, one.output
    with library.TraceDict(model, ["1", "2.1"], retain_grad=True) as several:
        model(x).pow(2).sum().backward()
    found["gradients"] = torch.cat([several[name].output.grad.flatten() for name in ("1", "2.1")])
    with library.TraceDict(model, ["0", "2"], edit_output=lambda output, layer: output * 2 if layer == "2" else output):
        found["edited"] = model(x)
    with library.Trace(model, "2.0", stop=True) as one:
        model(x)
    found["stopped"] = one.output
    found["afterwards"] = model(x)
    return found


def main():
    one, other = shown(ours), shown(baukit)
    for name, tensor in other.items():
        assert torch.equal(one[name], tensor), f"{name}: {one[name]} where baukit has {tensor}"
    print(f"the same as baukit, bit by bit: {', '.join(other)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
