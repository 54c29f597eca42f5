"""MODEL and file.py:name on the command line. Imports torch.

What a spec names is imported, built or read here; a model of torchvision or timm gets random weights. Nothing is
unpickled, nothing is downloaded.
"""

from __future__ import annotations

import importlib.util
import os
import pkgutil
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

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
    module, value = load_name(spec)
    built = value if isinstance(value, nn.Module) else value() if callable(value) else value
    if not isinstance(built, nn.Module):
        raise PlanError(
            f"{spec!r} is of type {type(built).__name__}: expected a torch module, or a function that builds one"
        )
    return Loaded(built, getattr(module, "preprocess", None))


def load_name(spec: str) -> tuple[ModuleType, Any]:
    """The module and the object behind ``file.py:name`` or ``package.module:name``; raises PlanError for neither."""
    source, _, name = spec.rpartition(":")
    if not source or not name:
        raise PlanError(f"{spec!r} is no model: expected file.py:name, package.module:name, torchvision:NAME, "
                        "timm:NAME, transformers:FOLDER or a .pt2 file")  # fmt: skip
    module = _import_file(Path(source)) if source.endswith(".py") else _import_module(source)
    value: Any = module
    for part in name.split("."):
        if not hasattr(value, part):
            own = [key for key, item in vars(module).items() if _is_own(item, module)]
            raise PlanError(f"{spec}: {source} has no {part!r}: expected one of {_offered(part, own, vars(module))}")
        value = getattr(value, part)
    return module, value


def _is_own(item: Any, module: ModuleType) -> bool:
    """Whether something was made in ``module``, and could be a model or an input."""
    return isinstance(item, (nn.Module, Tensor)) or getattr(item, "__module__", None) == module.__name__


def _import_file(path: Path) -> ModuleType:
    """A file as a module, its folder first on the path, as if it were run; imported once."""
    if not path.is_file():
        raise PlanError(f"{str(path)!r} is no file: expected a Python file that defines the name after the colon")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise PlanError(f"{str(path)!r} cannot be imported: expected a Python file")
    known = sys.modules.get(path.stem)
    if known is not None and getattr(known, "__file__", None) == str(path.resolve()):
        return known
    module = importlib.util.module_from_spec(spec)
    module.__file__ = str(path.resolve())
    sys.path.insert(0, str(path.resolve().parent))
    sys.modules[path.stem] = module
    words, sys.argv = sys.argv, [str(path)]  # a file that reads its arguments when it is imported has none
    try:
        spec.loader.exec_module(module)
    except SystemExit as stop:
        raise PlanError(f"{str(path)!r} ended with exit code {stop.code} while it was imported: expected a file that "
                        "runs its program below if __name__ == '__main__'") from stop  # fmt: skip
    finally:
        sys.argv = words
    return module


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
    """A model of torchvision by name, with random weights, and the preparation that its weights would want."""
    models = need("torchvision.models", for_=f"model 'torchvision:{name}'")
    if name not in models.list_models():
        raise PlanError(f"torchvision has no model {name!r}: expected one of {_offered(name, models.list_models())}")
    weights = models.get_model_weights(name).DEFAULT
    transform = weights.transforms()
    return Loaded(models.get_model(name, weights=None).eval(), lambda image: transform(image).unsqueeze(0))


def _timm(name: str) -> Loaded:
    """A model of timm by name, with random weights, and its preparation of images."""
    timm = need("timm", for_=f"model 'timm:{name}'")
    if not timm.is_model(name):
        raise PlanError(f"timm has no model {name!r}: expected one of {_offered(name, timm.list_models())}")
    model = timm.create_model(name, pretrained=False).eval()
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
    return Loaded(model, lambda image: transform(image).unsqueeze(0))


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


def _offered(name: str, names: list[str], others: Iterable[str] = ()) -> str:
    """The names to offer in place of ``name``: the nearest, those among ``others`` where none is near, or the first."""
    from gaff.address.grammar import nearest

    return ", ".join(nearest(name, names, 5) or nearest(name, list(others), 5) or names[:5])
