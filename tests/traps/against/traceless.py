"""What is left behind: a model that was looked at is the model that it was, also for pickle, export and other people's hooks."""

import copy
import inspect
import pickle
import warnings

import torch
from torch import nn

from traps.against.suite import Cannot, same

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def _net():
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh())


def _state(model):
    """What somebody could notice of a model, apart from its numbers."""
    return {
        name: (
            type(one),
            type(one.forward),
            "forward" in vars(one),
            [list(vars(one)[kind]) for kind in HOOKS],
            one.training,
            sorted(vars(one)),
        )
        for name, one in model.named_modules()
    }


def trap_model_is_as_before(tool):
    """Classes, attributes, ``forward``, hooks, flags, names of the state: all as before."""
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(2, 4)
    model[1].requires_grad_(False)
    before, names = _state(model), list(model.state_dict())
    flags = [one.requires_grad for one in model.parameters()]
    tool.values(model, ["0:output"], x)
    assert list(model.state_dict()) == names, "the names of the state are others"
    assert [one.requires_grad for one in model.parameters()] == flags, "parameters are frozen"
    after = _state(model)
    assert list(after) == list(before), "modules have come or gone"
    for name, state in before.items():
        assert after[name] == state, f"module {name!r}: {after[name]} where {state} was"


def trap_pickle_afterwards(tool):
    """``pickle`` writes the model, and what it reads back computes the same."""
    model, x = _net(), torch.randn(2, 4)
    true = model(x)
    tool.values(model, ["0:output"], x)
    same([pickle.loads(pickle.dumps(model))(x)], [true])


def trap_pickle_during(tool):
    """A checkpoint of the whole model is written while somebody looks: it holds the bare model."""
    model, x = _net(), torch.randn(2, 4)
    true = model[0](x)

    def program():
        pickle.loads(pickle.dumps(model))(2 * x)
        model(x)

    same(tool.values_during(model, ["0:output"], program)["0:output"], [true])


def trap_deepcopy_during(tool):
    """A copy made meanwhile (an averaged model, say) is not looked at."""
    model, x = _net(), torch.randn(2, 4)
    true = model[0](x)

    def program():
        copy.deepcopy(model)(2 * x)
        model(x)

    same(tool.values_during(model, ["0:output"], program)["0:output"], [true])


def trap_export_afterwards(tool):
    """``torch.export`` of the model."""
    model, x = _net(), torch.randn(2, 4)
    true = model(x)
    tool.values(model, ["0:output"], x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            program = torch.export.export(model, (x,))
        except Exception as error:
            raise AssertionError(f"the model can no longer be exported: {type(error).__name__}") from error
    same([program.module()(x)], [true])


def trap_hooks_of_others(tool):
    """Hooks that the user had registered fire once a call, and are still there afterwards."""
    model, x, fired = _net(), torch.randn(2, 4), []
    model[0].register_forward_hook(lambda module, args, output: fired.append("forward"))
    tool.values(model, ["0:output"], x)
    assert fired == ["forward"], f"fired {len(fired)} times in one call"
    model(x)
    assert fired == ["forward"] * 2, "the user's hook is gone"


class Fails(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin, self.is_failing = nn.Linear(4, 4), True

    def forward(self, x):
        y = self.lin(x)
        if self.is_failing:
            raise ValueError("the model's own")
        return y


def trap_model_that_raises(tool):
    """The model's own error gets out, no hook stays, and the next run is right."""
    model, x = Fails(), torch.randn(2, 4)
    told = None
    try:
        tool.values(model, ["lin:output"], x)
    except Cannot:
        raise
    except Exception as error:  # a tool may wrap it
        told = str(error)
    assert told is not None, "the model's error was lost"
    assert "the model's own" in told, f"another error took its place: {told}"
    assert not any(vars(one)[kind] for one in model.modules() for kind in HOOKS), "hooks have stayed"
    model.is_failing = False
    same(tool.values(model, ["lin:output"], x)["lin:output"], [model.lin(x)])


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x, *, scale=2.0):
        return self.lin(x) * scale


def trap_signature_of_forward(tool):
    """Trainers look at ``inspect.signature(model.forward)`` to choose columns."""
    model, x = Named(), torch.randn(2, 4)
    true = inspect.signature(model.forward)
    tool.values(model, ["lin:output"], x)
    assert inspect.signature(model.forward) == true, f"{inspect.signature(model.forward)} where {true} was"


def trap_functions_of_torch(tool):
    """torch's own functions and methods are torch's own after use."""
    model, x = _net(), torch.randn(2, 4)
    tool.values(model, ["0:output"], x)
    assert type(torch.relu) is type(len), "torch.relu is another function"
    assert type(torch.Tensor.add) is type(str.join), "torch.Tensor.add is another method"
    backward = torch.Tensor.backward.__code__.co_filename.replace("\\", "/")
    assert backward.endswith("torch/_tensor.py"), "torch.Tensor.backward is another method"
