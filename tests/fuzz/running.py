"""Running a program: bare, under a session of gaff, or as the truth."""

from __future__ import annotations

import itertools
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as tables
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from fuzz.program import Program
from fuzz.settings import Setting, parts_mix, whole
from fuzz.truth import Change, World, leaves, plain

TABLES = [name for name in vars(tables) if name.startswith("_global_") and isinstance(vars(tables)[name], dict)]


@dataclass
class Outcome:
    """What a run of a program leaves: tensors that it showed, gradients and state of the model, and torch's state."""

    seen: list[Tensor | None]
    gradients: dict[str, Tensor | None]
    state: dict[str, Tensor]
    random: Tensor
    surroundings: dict[str, Any]
    session: Any = None


def surroundings(model: nn.Module) -> dict[str, Any]:
    """What a session must leave as it was: hooks, modes, flags, attributes."""
    return {
        "hooks": {name: len(vars(tables)[name]) for name in TABLES},
        "modes": (len(_get_current_dispatch_mode_stack()), torch._C._len_torch_function_stack()),
        "grad": torch.is_grad_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "attributes": [(path, sorted(vars(module)), module.training) for path, module in model.named_modules()],
        "module hooks": [
            [len(value) for name, value in sorted(vars(module).items()) if name.endswith("_hooks")]
            for module in model.modules()
        ],
    }


_NUMBERS = itertools.count()


def execute(program: Program) -> dict[str, Any]:
    """The names of the program, run as a module of its own: Dynamo knows modules by their names for good."""
    number = next(_NUMBERS)
    name = f"program{number}"
    sys.modules.pop(f"program{number - 8}", None)
    module = sys.modules[name] = types.ModuleType(name)  # where a pickle looks for its classes
    exec(compile(program.source, f"<program {program.seed}>", "exec"), vars(module))
    return vars(module)


def run(
    program: Program,
    open_session: Callable[[nn.Module], AbstractContextManager[Any]] | None = None,
    *,
    without_checkpoints: bool = False,
    setting: Setting | None = None,
) -> Outcome:
    """The program, on a new model, inside a session if one is given; in one of the ``settings`` where that is named."""
    space = execute(program)
    if without_checkpoints:
        space["checkpoint"] = lambda function, *args, use_reentrant: function(*args)
    model = space["build"]()
    used = setting.prepare(model) if setting else model
    seed(program)
    with (
        quiet(),
        parts_mix(setting),
        setting.around() if setting else nullcontext(),
        workers_of(space),
        open_session(setting.asked(used) if setting else used) if open_session else nullcontext() as session,
    ):
        seen = space["drive"](used)
    with setting.gathered(used) if setting else nullcontext():
        return finished(model, seen, session)


def seed(program: Program) -> None:
    """What a run of a program begins with; quicker than ``torch.manual_seed``, which thinks of other devices, too."""
    torch.default_generator.manual_seed(program.seed + 1)


def finished(model: nn.Module, seen: list[Any], session: Any = None) -> Outcome:
    tensors = [one for value in seen for one in _each(value)]
    return Outcome(
        [None if one is None else whole(one).detach().clone() for one in tensors],
        {bare(path): None if one.grad is None else whole(one.grad).clone() for path, one in model.named_parameters()},
        {bare(path): whole(one).detach().clone() for path, one in model.state_dict().items()},
        torch.get_rng_state(),
        surroundings(model),
        session,
    )


def bare(path: str) -> str:
    """A path without the wrappers of the first FSDP."""
    return path.replace("_fsdp_wrapped_module.", "")


def run_truth(program: Program, is_functional: bool = True, change: Change | None = None) -> tuple[Outcome, World]:
    """The program as the truth tells it: what it leaves, and what passed where."""
    space = execute(program)
    model = space["build"]()
    seed(program)
    world = World(model, is_functional, change)
    space["deepcopy"] = space["pickled"] = world.copied
    if is_functional:
        for name in ("new_linear", "new_weight"):
            if name in space:
                space[name] = plain(space[name])
        space["cast"] = world.cast
        space.update(checkpoint=world.checkpoint, in_thread=world.at_once)
        for one in space.values():
            if isinstance(one, type) and issubclass(one, torch.autograd.Function):
                one.apply = applied(world, one.apply)
    with quiet(), workers_of(space), world.watching():
        seen = space["drive"](model)
        if is_functional:
            seen = [None if one is None else one.read() for value in seen for one in _each(value)]
    return finished(model, seen), world


def applied(world: World, apply: Any) -> Any:
    """A custom Function's ``apply``, which torch hands to no mode."""

    def function(*args: Any) -> Any:
        return world.dispatch(apply, args, {})

    return staticmethod(function).__func__


@contextmanager
def workers_of(space: dict[str, Any]) -> Iterator[None]:
    """Lets the worker threads of a program end with it."""
    try:
        yield
    finally:
        if "pool" in space:
            space["pool"].shutdown()


@contextmanager
def quiet() -> Iterator[None]:
    """Without the warnings of programs that are odd on purpose."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _each(value: Any) -> list[Any]:
    return [None] if value is None else [one for _, one in leaves(value)]
