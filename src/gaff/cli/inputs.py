"""INPUT on the command line: what a model is called with."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gaff.address.nested import map_tensors
from gaff.cli.models import Loaded, load_name
from gaff.compat import libraries
from gaff.errors import PlanError

_IMAGES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff"}
_MAKERS = ("randn", "zeros", "ones", "randint")
Call = tuple[tuple[Any, ...], dict[str, Any]]


def need_input(specs: Sequence[str], error: TypeError) -> PlanError:
    """What to say when a model could not be called: most often it was given nothing."""
    hint = "" if specs else "; give an input, such as randn:1x3x224x224 or an image file"
    return PlanError(f"the model could not be called: {error}{hint}")


def load_inputs(specs: Sequence[str], loaded: Loaded) -> Call:
    """Positional and keyword arguments for the model, on its device."""
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for spec in specs:
        more_args, more_kwargs = _load(spec, loaded)
        args += more_args
        kwargs.update(more_kwargs)
    device = libraries.device_of(loaded.model)
    moved: Call = map_tensors((tuple(args), kwargs), lambda tensor: tensor.to(device))
    return moved


def _load(spec: str, loaded: Loaded) -> Call:
    maker, _, rest = spec.partition(":")
    suffix = Path(spec).suffix.lower()
    if maker in _MAKERS:
        return (_made(spec, maker, rest),), {}
    if suffix in _IMAGES:
        return _image(spec, loaded)
    if suffix == ".npy":
        return (_npy(spec),), {}
    if suffix == ".safetensors":
        return _safetensors(spec)
    if ".py:" in spec:
        return _named(load_name(spec)[1])
    if loaded.folder is not None:
        return _text(spec, loaded.folder)
    raise PlanError(
        f"input {spec!r} is not understood: expected randn:1x3x8x8, an image, .npy, .safetensors or file.py:name; "
        "a text needs a transformers:FOLDER model, whose tokenizer reads it"
    )


def _made(spec: str, maker: str, rest: str) -> Tensor:
    sizes, _, high = rest.partition(":")
    parts = sizes.split("x")
    if not all(part.isdigit() for part in parts) or (high and not high.isdigit()):
        raise PlanError(
            f"input {spec!r} has no shape: expected {maker}:1x3x224x224" + (":100" if maker == "randint" else "")
        )
    shape = [int(part) for part in parts]
    generator = torch.Generator().manual_seed(0)
    if maker == "randn":
        return torch.randn(shape, generator=generator)
    if maker == "randint":
        return torch.randint(int(high or 100), shape, generator=generator)
    return torch.zeros(shape) if maker == "zeros" else torch.ones(shape)


def _image(spec: str, loaded: Loaded) -> Call:
    image = _need("PIL.Image", "images").open(_file(spec)).convert("RGB")
    if loaded.image is not None:
        return (loaded.image(image),), {}
    if loaded.folder is not None:
        processor = _need("transformers", "transformers").AutoImageProcessor.from_pretrained(
            loaded.folder, local_files_only=True
        )
        return (), dict(processor(images=image, return_tensors="pt"))
    numpy = _need("numpy", "images")
    pixels = torch.from_numpy(numpy.array(image)).permute(2, 0, 1).float() / 255
    return (pixels.unsqueeze(0),), {}


def _npy(spec: str) -> Tensor:
    array = _need("numpy", "files").load(_file(spec), allow_pickle=False)
    return torch.from_numpy(array)


def _safetensors(spec: str) -> Call:
    tensors = _need("safetensors.torch", "files").load_file(_file(spec))
    return (tuple(tensors.values()), {}) if len(tensors) == 1 else ((), dict(tensors))


def _named(value: Any) -> Call:
    value = value() if callable(value) and not isinstance(value, Tensor) else value
    if isinstance(value, dict):
        return (), value
    return (tuple(value), {}) if isinstance(value, tuple) else ((value,), {})


def _text(spec: str, folder: str) -> Call:
    tokenizer = _need("transformers", "transformers").AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return (), dict(tokenizer(spec, return_tensors="pt"))


def _file(spec: str) -> str:
    if not Path(spec).is_file():
        raise PlanError(f"input {spec!r} is no file")
    return spec


def _need(name: str, extra: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise PlanError(f"{name} cannot be imported ({error}): install it, for example with gaff[{extra}]") from None
