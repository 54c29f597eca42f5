"""Functions of Python or torch that stand aside for one of ours, as long as some session needs it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

Place = tuple[Any, str, Callable[[Any], Any]]  # a class or module, the name in it, what makes ours of what is there


class Replacements:
    """While open: ours stand at ``places``. One object for all sessions of the process, which are counted.

    What was there is put back by the last one that leaves, unless somebody has put another over ours since.
    """

    def __init__(self, *places: Place) -> None:
        self._places: Sequence[Place] = places
        self._lock = threading.Lock()
        self._holders = 0
        self._before: list[tuple[Any, str, Any, Any]] = []

    def __enter__(self) -> None:
        with self._lock:
            self._holders += 1
            if self._holders == 1:
                for owner, name, make in self._places:
                    own = vars(owner).get(name)
                    ours = make(getattr(owner, name))
                    self._before.append((owner, name, own, ours))
                    setattr(owner, name, ours)

    def __exit__(self, *exc: object) -> None:
        with self._lock:
            self._holders -= 1
            while not self._holders and self._before:
                owner, name, own, ours = self._before.pop()
                if vars(owner).get(name) is not ours:
                    continue  # somebody has put another over it
                if own is None:
                    delattr(owner, name)
                else:
                    setattr(owner, name, own)
