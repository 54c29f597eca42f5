"""What is another way in the whole process, as long as some session needs it: functions, and settings of torch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

Place = tuple[Any, str, Callable[[Any], Any]]  # a class or module, the name in it, what makes ours of what is there


class Held:
    """A setting of the process, held as long as any session needs it; sessions may close in any order.

    ``make`` gives the context manager of torch, which puts back what it found. So it is entered when the first holder
    comes and left when the last one goes; a lock guards the count.
    """

    def __init__(self, make: Callable[[], AbstractContextManager[Any]]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._holders = 0
        self._held: AbstractContextManager[Any] | None = None

    @property
    def is_held(self) -> bool:
        """Whether a session holds it: what is set may then be gaff's doing, and not the user's."""
        return self._holders > 0

    def __enter__(self) -> None:
        """Hold it; the first holder sets it."""
        with self._lock:
            if self._holders == 0:
                held = self._make()
                held.__enter__()
                self._held = held
            self._holders += 1  # only now: torch may refuse, and then nobody holds it

    def __exit__(self, *exc: object) -> None:
        """Hold it no longer; with the last holder what was there before comes back."""
        with self._lock:
            self._holders -= 1
            if self._holders == 0 and self._held is not None:
                self._held.__exit__(None, None, None)
                self._held = None


class Replacements(Held):
    """While open: ours stand at ``places``. One object for all sessions of the process, which are counted.

    What was there is put back by the last one that leaves, unless somebody has put another over ours since.
    """

    def __init__(self, *places: Place) -> None:
        super().__init__(lambda: _replaced(places))


class Announced(Held):
    """Something that torch does anywhere in the process; ``place`` lets it call a function of ours before or after.

    What an asked function raises comes out of the program's own call.
    """

    def __init__(self, place: Callable[[Callable[..., None]], AbstractContextManager[Any]]) -> None:
        super().__init__(lambda: place(self._ask))
        self._asked: dict[object, Callable[..., None]] = {}

    def at_each(self, ask: Callable[..., None]) -> ExitStack:
        """Until what this returns is closed ``ask`` is called each time."""
        with ExitStack() as asking:
            key = object()
            asking.enter_context(self)
            asking.callback(self._asked.pop, key, None)
            self._asked[key] = ask
            return asking.pop_all()

    def _ask(self, *given: Any) -> None:
        for ask in list(self._asked.values()):
            ask(*given)


@contextmanager
def _replaced(places: Sequence[Place]) -> Iterator[None]:
    before = []
    try:
        for owner, name, make in places:
            ours = make(getattr(owner, name))
            before.append((owner, name, vars(owner).get(name), ours))
            setattr(owner, name, ours)
        yield
    finally:
        for owner, name, own, ours in reversed(before):
            if vars(owner).get(name) is not ours:
                continue  # somebody has put another over it
            if own is None:
                delattr(owner, name)
            else:
                setattr(owner, name, own)
