"""MODEL and file.py:name on the command line. Imports torch.

What a spec names is imported, built or read here. A model of torchvision or timm gets the weights of a file behind an
``@``, or random ones, the same each time, and says so. Nothing but tensors is unpickled, nothing is downloaded.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import pickle
import pkgutil
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from gaff.cli.exported import load_exported
from gaff.compat.extras import need
from gaff.errors import PlanError


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model and how it wants its inputs. ``image``: PIL image -> tensor with a batch dimension."""

    model: nn.Module
    image: Callable[[Any], Any] | None = None
    folder: str | None = None  # of a transformers model: its tokenizer and image processor are there


_WEIGHTS = (".pt", ".pth", ".bin", ".ckpt", ".safetensors")
_FEW = 8  # names of which all are offered


def load_model(spec: str) -> Loaded:
    """The model that ``spec`` names, made or read here.

    Raises PlanError that says what was expected; import errors of the user's own file pass through.
    """
    scheme, _, name = spec.partition(":")
    loaders = {"torchvision": _torchvision, "timm": _timm, "transformers": _transformers}
    if scheme in loaders and name:
        return loaders[scheme](name)
    if spec.endswith(".pt2"):
        return Loaded(load_exported(spec))
    if Path(spec).suffix in _WEIGHTS and Path(spec).is_file():
        raise PlanError(
            f"{spec!r} is a file of weights, without the code of their model: expected file.py:name of a function that "
            "builds the model and loads them, or a .pt2 file of torch.export"
        )
    if (Path(spec) / "config.json").is_file():
        raise PlanError(f"{spec!r} is a folder: expected transformers:{spec} for a model of transformers")
    module, value = load_name(spec, "model", ", torchvision:NAME, timm:NAME, transformers:FOLDER or a .pt2 file")
    with _without_words(spec):
        built = value if isinstance(value, nn.Module) else value() if callable(value) else value
    if not isinstance(built, nn.Module):
        raise PlanError(
            f"{spec!r} is of type {type(built).__name__}: expected a torch module, or a function that builds one"
        )
    return Loaded(built, getattr(module, "preprocess", None))


def load_name(spec: str, what: str = "name", others: str = "") -> tuple[ModuleType, Any]:
    """The module and the object behind ``file.py:name`` or ``package.module:name``; raises PlanError for neither.

    ``what`` it is to be, and what ``others`` than these two it could have been, for the message.
    """
    source, _, name = spec.rpartition(":")
    if not source or not name:
        raise PlanError(f"{spec!r} is no {what}: expected file.py:name or package.module:name{others}")
    module = _import_file(Path(source)) if source.endswith(".py") else _import_module(source)
    value: Any = module
    for part in name.split("."):
        if not hasattr(value, part):
            own = [key for key, item in vars(module).items() if _is_own(item, module)]
            offered = _offered(part, own, vars(module), more=_FEW)
            expected = f"expected one of {offered}" if offered else "nothing is defined there"
            raise PlanError(f"{spec}: {source} has no {part!r}: {expected}")
        value = getattr(value, part)
    return module, value


def _is_own(item: Any, module: ModuleType) -> bool:
    """Whether something was made in ``module``, and could be a model or an input."""
    return isinstance(item, (nn.Module, Tensor)) or getattr(item, "__module__", None) == module.__name__


def _import_file(path: Path) -> ModuleType:
    """A file as a module, its folder first on the path, as if it were run; imported once.

    One that imports relatively is imported as a part of its package, by the name that it has there.
    """
    if not path.is_file():
        raise PlanError(f"{str(path)!r} is no file: expected a Python file that defines the name after the colon")
    file = path.resolve()
    name, above, is_part = file.stem, file.parent, _imports_relatively(file)
    while is_part and (above / "__init__.py").is_file():
        name, above = f"{above.name}.{name}", above.parent
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise PlanError(f"{str(path)!r} cannot be imported: expected a Python file")
    known = sys.modules.get(name)
    if known is not None and getattr(known, "__file__", None) == str(file):
        return known
    sys.path[:0] = dict.fromkeys((str(file.parent), str(above)))
    try:
        with _without_words(str(path)):
            if "." in name:
                found: ModuleType = pkgutil.resolve_name(f"{name}:")
                return found
            module = sys.modules[name] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
    except SystemExit as stop:
        raise PlanError(f"{str(path)!r} ended with exit code {stop.code} while it was imported: expected a file that "
                        "runs its program below if __name__ == '__main__'") from stop  # fmt: skip
    return module


@contextmanager
def _without_words(name: str) -> Iterator[None]:
    """Whatever reads the arguments of the command line has none: those that there are, are gaff's."""
    words, sys.argv = sys.argv, [name]
    try:
        yield
    finally:
        sys.argv = words


def _imports_relatively(file: Path) -> bool:
    """Whether a file says ``from .x import y`` anywhere."""
    try:
        parts = ast.walk(ast.parse(file.read_bytes()))
    except (SyntaxError, ValueError):  # told where it is run
        return False
    return any(isinstance(one, ast.ImportFrom) and one.level > 0 for one in parts)


def _import_module(name: str) -> ModuleType:
    """A module of the user's, from the folder that gaff is run in or from what is installed."""
    if not all(part.isidentifier() for part in name.split(".")):
        raise PlanError(f"{name!r} is no name of a module: expected package.module:name, or file.py:name")
    sys.path.insert(0, os.getcwd())
    try:
        module: ModuleType = pkgutil.resolve_name(f"{name}:")
    except ModuleNotFoundError as error:
        if not error.name or not f"{name}.".startswith(f"{error.name}."):
            raise  # the module is there, and something that it imports is not
        raise PlanError(f"no module {error.name!r}: expected one of this folder or one that is installed") from None
    return module


def _torchvision(name: str) -> Loaded:
    """A model of torchvision by name, ``NAME`` or ``NAME@FILE``, and the preparation that its weights would want."""
    name, _, file = name.partition("@")
    models = need("torchvision.models", for_=f"model 'torchvision:{name}'")
    if name not in models.list_models():
        raise PlanError(f"torchvision has no model {name!r}: expected one of {_offered(name, models.list_models())}")
    transform = models.get_model_weights(name).DEFAULT.transforms()
    model = _with_weights(lambda: models.get_model(name, weights=None), f"torchvision:{name}", file)
    return Loaded(model, lambda image: transform(image).unsqueeze(0))


def _timm(name: str) -> Loaded:
    """A model of timm by name, ``NAME`` or ``NAME@FILE``, and its preparation of images."""
    name, _, file = name.partition("@")
    timm = need("timm", for_=f"model 'timm:{name}'")
    if not timm.is_model(name):
        raise PlanError(f"timm has no model {name!r}: expected one of {_offered(name, timm.list_models())}")
    model = _with_weights(lambda: timm.create_model(name, pretrained=False), f"timm:{name}", file)
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
    return Loaded(model, lambda image: transform(image).unsqueeze(0))


def _with_weights(build: Callable[[], nn.Module], spec: str, file: str) -> nn.Module:
    """The model that ``build`` makes, in eval mode, with the weights of ``file``; of seed 0, and told, where it is "".

    The file is a state dict, as safetensors or of ``torch.save``. Raises PlanError for one that does not fit.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = build().eval()
    if not file:
        print(
            f"gaff: {spec} has random weights (of seed 0): for trained ones name a file of them, {spec}@weights.pth, "
            "or what builds the model, file.py:name",
            file=sys.stderr,
        )
        return model
    if not Path(file).is_file():
        raise PlanError(f"{file!r} is no file: expected weights of {spec}, a state dict as .safetensors or .pth")
    if file.endswith(".safetensors"):
        state = need("safetensors.torch", "files", for_=f"weights {file!r}").load_file(file)
    else:
        try:
            state = torch.load(file, map_location="cpu", weights_only=True)
        except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
            raise PlanError(
                f"{file!r} cannot be read: expected a state dict, which holds nothing but tensors"
            ) from error
    try:
        model.load_state_dict(state)
    except (RuntimeError, TypeError, AttributeError) as error:
        first = str(error).strip().partition("\n")[2].strip() or str(error)
        raise PlanError(f"{file!r} does not fit {spec}: {first.splitlines()[0]:.300}") from error
    return model


def _transformers(folder: str) -> Loaded:
    """A saved model of transformers, from its folder alone: safetensors, no code of the folder's own."""
    if not Path(folder, "config.json").is_file():
        raise PlanError(f"transformers:{folder} holds no config.json: expected the folder of a saved model")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    transformers = need("transformers", "transformers", for_=f"model 'transformers:{folder}'")
    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModel.from_pretrained(
        folder, local_files_only=True, use_safetensors=True, trust_remote_code=False
    )
    return Loaded(model.eval(), None, folder)


def _offered(name: str, names: list[str], others: Iterable[str] = (), more: int = 0) -> str:
    """The names to offer in place of ``name``: the nearest, those among ``others`` where none is near, or the first.

    The nearest of up to ``more`` names are followed by all others of them.
    """
    from gaff.address.grammar import nearest

    near = nearest(name, names, 5)
    if near and len(names) <= more:
        near += [one for one in names if one not in near]
    return ", ".join(near or nearest(name, list(others), 5) or names[:5])
