"""Put before everything on the path of a watched command: starts watching once torch has been imported.

Python imports this module at start-up, in every process of the command. It imports nothing heavy, hands on to a
``sitecustomize`` that was there before, and leaves no trace but an entry in ``sys.meta_path`` until torch is there.
"""

import importlib.util
import os
import sys


def _hand_on(here: str) -> None:
    """Run the sitecustomize that would have been found without this one."""
    kept = [path for path in sys.path if os.path.abspath(path or os.curdir) != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", kept)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


class _AfterTorch:
    """A finder that lets the import of torch go on as it would, and is told when it is done."""

    def __init__(self, tell):
        self._tell = tell

    def find_spec(self, name, path=None, target=None):
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        loader = spec.loader
        run = loader.exec_module

        def exec_module(module):
            del loader.exec_module  # as it was before
            run(module)
            self._tell()

        loader.exec_module = exec_module
        return spec


def _begin() -> None:
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [path for path in sys.path if os.path.abspath(path or os.curdir) != here]
    if os.environ.get("GAFF_WATCH"):

        def tell():
            from gaff.watching.launched import start

            start()

        sys.meta_path.insert(0, _AfterTorch(tell))
    try:
        _hand_on(here)
    except ImportError:
        pass


_begin()
