"""Exported programs (.pt2), read without unpickling.

``torch.export.load`` falls back to plain pickle for some parts of an archive. What would make it do so is looked for
first, and refused.
"""

from __future__ import annotations

import io
import json
import pickle
import warnings
import zipfile

import torch
from torch import nn

from gaff.errors import PlanError


def load_exported(path: str) -> nn.Module:
    """The program in the file at ``path``, with its module hierarchy back, so that its sites have the original paths.

    Raises PlanError for a file that is none of ``torch.export.save``, or that would have to be unpickled.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            _refuse_pickles(archive, path)
    except FileNotFoundError:
        raise PlanError(f"{path!r} is no file: expected what torch.export.save wrote") from None
    except (zipfile.BadZipFile, OSError) as error:
        raise PlanError(f"{path!r} cannot be read: {error}; expected what torch.export.save wrote") from None
    return torch.export.unflatten(torch.export.load(path))


def _refuse_pickles(archive: zipfile.ZipFile, path: str) -> None:
    """Raises PlanError where any member of the archive is pickled; ``path`` is for the message."""
    names = [name.partition("/")[2] for name in archive.namelist()]
    root = archive.namelist()[0].partition("/")[0] if names else ""
    if "archive_format" not in names:
        raise PlanError(f"{path!r} is of an older format that is unpickled on loading: save it again with torch>=2.10")
    for name in names:
        if _is_pickled(archive, f"{root}/{name}", name):
            raise PlanError(f"{path!r} holds {name!r}, which would have to be unpickled: gaff reads no pickles")


def _is_pickled(archive: zipfile.ZipFile, member: str, name: str) -> bool:
    """Whether torch would unpickle a member of the archive, whose name without the archive's own folder is ``name``."""
    folder, _, file = name.rpartition("/")
    if folder == "data/sample_inputs":
        try:  # torch's restricted reader; torch.export.load would fall back to the other one
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                torch.load(io.BytesIO(archive.read(member)), weights_only=True)
        except (pickle.UnpicklingError, RuntimeError):
            return True
        return False
    if folder in ("data/weights", "data/constants"):
        if file.endswith("_config.json"):
            rows = json.loads(archive.read(member))["config"].values()
            return any(row.get("use_pickle") for row in rows)
        return file.endswith(".pt") or "_obj" in file
    return False
