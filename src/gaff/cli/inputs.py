"""INPUT on the command line: what a model is called with. Imports torch.

A shape to be filled, an image, arrays in a file, a name in a Python file, or a text for a model that has a tokenizer.
Nothing is unpickled, and nothing is downloaded.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gaff.address.nested import map_tensors
from gaff.cli.models import Loaded, load_name
from gaff.compat import libraries
from gaff.compat.extras import need
from gaff.errors import PlanError

_IMAGES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff"}
_MAKERS = ("randn", "zeros", "ones", "randint")
_IN_MODULE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d][\w.]*")
Call = tuple[tuple[Any, ...], dict[str, Any]]


def refuse_call(model: Any, specs: Sequence[str], error: TypeError) -> None:
    """Raises PlanError where an error says that a model cannot be called with ``specs``; often it was given nothing.

    Returns where the error is one of what runs inside, which is to be told as any other.
    """
    is_of_call = str(error).startswith((f"{type(model).forward.__qualname__}()", "forward()"))
    if specs and not is_of_call:
        return
    hint = "" if specs else "; give an input, such as randn:1x3x224x224 or an image file"
    raise PlanError(f"the model could not be called: {error}{hint}") from error


def load_inputs(specs: Sequence[str], loaded: Loaded) -> Call:
    """Positional and keyword arguments for the model, on its device, as each of ``specs`` describes a part of them.

    Raises PlanError that says what was expected, or which package to install.
    """
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for number, spec in enumerate(specs):
        more_args, more_kwargs = _read(spec, loaded, number)
        args += more_args
        if twice := sorted(kwargs.keys() & more_kwargs.keys()):
            raise PlanError(f"input {spec!r} gives {twice[0]} once more: expected one, since the model is called once; "
                            "gaff harvest takes many texts from a file")  # fmt: skip
        kwargs.update(more_kwargs)
    device = libraries.device_of(loaded.model)
    moved: Call = map_tensors((tuple(args), kwargs), lambda tensor: tensor.to(device))
    return moved


def _read(spec: str, loaded: Loaded, number: int) -> Call:
    """The input of this number; what a library says of a file that it cannot read becomes a PlanError with its name."""
    try:
        return _load(spec, loaded, number)
    except PlanError:
        raise
    except Exception as error:
        if not os.path.isfile(spec):  # of a long text Path would raise
            raise
        raise PlanError(f"input {spec!r} cannot be read: {error or type(error).__name__}") from error


def _load(spec: str, loaded: Loaded, number: int) -> Call:
    """One input by its form: the name of a maker, the ending of a file, a name in a file, else a text."""
    maker, _, rest = spec.partition(":")
    suffix = Path(spec).suffix.lower()
    if maker in _MAKERS:
        return (_made(spec, maker, rest, number),), {}
    if suffix in _IMAGES:
        return _image(spec, loaded)
    if suffix == ".npy":
        return (_npy(spec),), {}
    if suffix == ".safetensors":
        return _safetensors(spec)
    if ".py:" in spec:
        return _named(load_name(spec)[1])
    if loaded.folder is None and _IN_MODULE.fullmatch(spec):
        return _named(load_name(spec)[1])
    if loaded.folder is not None and not os.path.isfile(spec):
        return _text(spec, loaded.folder)
    if loaded.folder is not None:
        raise PlanError(f"input {spec!r} is a file, of a kind that is not known here: expected the text itself, as in "
                        "--input 'some words', or gaff harvest for a file of texts")  # fmt: skip
    raise PlanError(
        f"input {spec!r} is not understood: expected randn:1x3x8x8, an image, .npy, .safetensors, file.py:name or "
        "package.module:name; "
        "a text needs a transformers:FOLDER model, whose tokenizer reads it"
    )


def _is_number(text: str) -> bool:
    """Whether a text is digits alone, as ``int`` reads them."""
    return text.isascii() and text.isdigit()


def _made(spec: str, maker: str, rest: str, seed: int) -> Tensor:
    """A tensor of the shape that was asked for; random ones are the same each time, and others for each input."""
    sizes, _, high = rest.partition(":")
    parts = sizes.split("x")
    is_high = not high or (_is_number(high) and int(high) > 0 and maker == "randint")
    if not all(map(_is_number, parts)) or not is_high:
        raise PlanError(
            f"input {spec!r} has no shape: expected {maker}:1x3x224x224" + (":100" if maker == "randint" else "")
        )
    shape = [int(part) for part in parts]
    generator = torch.Generator().manual_seed(seed)
    if maker == "randn":
        return torch.randn(shape, generator=generator, device="cpu")
    if maker == "randint":
        return torch.randint(int(high or 100), shape, generator=generator, device="cpu")
    return torch.zeros(shape, device="cpu") if maker == "zeros" else torch.ones(shape, device="cpu")


def _image(spec: str, loaded: Loaded) -> Call:
    """An image as the model wants it: by its own preparation, its folder's, or plainly as numbers from 0 to 1."""
    what = f"input {spec!r}"
    pillow = need("PIL.Image", "images", for_=what)
    image = pillow.open(_file(spec))
    if image.mode == "F":
        raise PlanError(
            f"{what} holds floating numbers, whose white nothing tells: expected one of whole numbers, or .npy"
        )
    if image.mode.startswith("I"):  # 16 bits, which Pillow would cut off at 255
        pixels = torch.from_numpy(need("numpy", "images", for_=what).array(image).astype("float32")) / 65535
        if loaded.image is None and loaded.folder is None:
            return (pixels.expand(1, 3, *pixels.shape).clone(),), {}
        image = pillow.fromarray((pixels * 255).round().to(torch.uint8).numpy())
    image = image.convert("RGB")
    if loaded.image is not None:
        return (loaded.image(image),), {}
    if loaded.folder is not None:
        processors = need("transformers", "transformers", for_=what).AutoImageProcessor
        processor = processors.from_pretrained(loaded.folder, local_files_only=True)
        return (), dict(processor(images=image, return_tensors="pt"))
    numpy = need("numpy", "images", for_=what)
    pixels = torch.from_numpy(numpy.array(image)).permute(2, 0, 1).float() / 255
    return (pixels.unsqueeze(0),), {}


def _npy(spec: str) -> Tensor:
    """The array of a file, as it is; an array of Python objects, which would be unpickled, is refused by numpy."""
    array = need("numpy", "files", for_=f"input {spec!r}").load(_file(spec), allow_pickle=False)
    return torch.from_numpy(array)


def _safetensors(spec: str) -> Call:
    """The only tensor of a file as a positional argument; several as keyword arguments, by their names."""
    tensors = need("safetensors.torch", "files", for_=f"input {spec!r}").load_file(_file(spec))
    return (tuple(tensors.values()), {}) if len(tensors) == 1 else ((), dict(tensors))


def _named(value: Any) -> Call:
    """What ``file.py:name`` holds, or returns: a dict has keyword arguments, a tuple positional ones."""
    value = value() if callable(value) and not isinstance(value, Tensor) else value
    if isinstance(value, dict):
        return (), value
    return (tuple(value), {}) if isinstance(value, tuple) else ((value,), {})


def _text(spec: str, folder: str) -> Call:
    """A text as the keyword arguments that the tokenizer in the folder of the model makes of it."""
    made = dict(tokenizer_of(folder, f"input {spec!r}")(spec, return_tensors="pt"))
    if not made["input_ids"].numel():
        raise PlanError(
            f"input {spec!r}: the tokenizer of {folder!r} makes no token of it: expected another text, or the files of "
            "a tokenizer (tokenizer.json ...) in that folder"
        )
    return (), made


def tokenizer_of(folder: str, what: str) -> Any:
    """The tokenizer in the folder of a transformers model; ``what`` needs it, and begins the message without it."""
    if not Path(folder).is_dir():
        raise PlanError(f"{what}: {folder!r} is no folder: expected that of a transformers model")
    tokenizers = need("transformers", "transformers", for_=what).AutoTokenizer
    return tokenizers.from_pretrained(folder, local_files_only=True)


def is_image(path: Path) -> bool:
    """Whether a path ends as files of images do."""
    return path.suffix.lower() in _IMAGES


def _file(spec: str) -> str:
    """The path itself; raises PlanError where there is no file."""
    if not Path(spec).is_file():
        raise PlanError(f"input {spec!r} is no file: expected the path of one, from the folder that gaff is run in")
    return spec
