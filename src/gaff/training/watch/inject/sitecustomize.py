"""Put before everything on the path of a watched command: starts watching once torch has been imported.

Python imports this module at start-up, in every process of the command. It imports nothing heavy, hands on to a
``sitecustomize`` that was there before, and leaves no trace but an entry in ``sys.meta_path`` until torch is there.

That is how a script is watched without a line of it being changed, and how its children are: they inherit the path of
imports by ``PYTHONPATH``. Processes that never import torch are left as they are.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType


def _hand_on(here: str) -> None:
    """Run the ``sitecustomize`` that would have been found without this one, if there is one, in this one's place."""
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", _without(here))
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module  # instead of this one
        spec.loader.exec_module(module)


def _without(here: str) -> list[str]:
    """The path of imports without the folder of this file, which the watched program is not to find there."""
    return [path for path in sys.path if os.path.abspath(path or os.curdir) != here]


class _AfterTorch:
    """A finder that lets the import of torch go on as it would, and calls ``tell`` when it is done.

    Stands first in ``sys.meta_path``. For any other module than torch it finds nothing, and the import goes on.
    """

    def __init__(self, tell: Callable[[], None]) -> None:
        self._tell = tell
        self._is_asking = False

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Find torch as all other finders would, and have its loader call ``tell`` after it has run the module.

        Asking the others comes by here once more, which ``_is_asking`` tells. The loader's own function is restored,
        and this finder removed, before torch runs, so that torch and what it imports meet nothing of gaff's.
        """
        if name != "torch" or self._is_asking:
            return None
        self._is_asking = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._is_asking = False
        if spec is None or spec.loader is None:
            return spec
        loader, tell = spec.loader, self._tell
        run = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module  # as it was before
            sys.meta_path.remove(self)
            run(module)
            tell()

        loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _start() -> None:
    """Import gaff, by its place if this Python does not have it, and begin to watch; called once torch is imported.

    A command may run with another Python than ``gaff`` does, in an environment of its own: the folder of this file then
    leads to the package, which is entered into ``sys.modules`` without putting anything on the path.
    """
    if importlib.util.find_spec("gaff") is None:  # another Python than the one that has gaff
        root = os.path.abspath(os.path.join(os.path.dirname(__file__), *[os.pardir] * 3))
        spec = importlib.util.spec_from_file_location(
            "gaff", os.path.join(root, "__init__.py"), submodule_search_locations=[root]
        )
        if spec is None or spec.loader is None:
            return
        sys.modules["gaff"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["gaff"])
    from gaff.training.watch.launched import start

    start()


def _begin() -> None:
    """Do what is due at the start of Python: take our folder off the path, wait for torch, and hand on.

    Waits only where the variable with the settings is set: without it nobody has asked for watching.
    """
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = _without(here)
    if os.environ.get("GAFF_WATCH"):
        sys.meta_path.insert(0, _AfterTorch(_start))
    _hand_on(here)


_begin()
