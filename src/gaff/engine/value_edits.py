"""Where edits of values take hold: at the exit and at the entry of a module. Those of gradients: ``gradients.edits``.

What an edit does to a tensor is its stream's affair; here the tensor is found in what passes, and the new one is put
in its place. Containers on the way to it are made anew, and the caller's own are left as they are.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from gaff.address.grammar import Key, Site
from gaff.address.nested import describe, dig, dig_argument, first_tensor, iter_tensors, put, put_argument
from gaff.engine.recomputation import Passage
from gaff.engine.streams import EditStream, EntryChange, ExitChange
from gaff.errors import PlanError, SiteError

RETURNED = "the module returned its input itself: who ignores what it returns misses the edit"
TWINS = "the output holds one tensor several times: only the one at this key is edited"


class OutputChange(ExitChange):
    """Puts an edited tensor in the place of a module's output, or of one tensor inside it.

    Acts in the first pass and again in each recomputation. Raises SiteError where the address leads nowhere or to
    several tensors, PlanError where the output is an object that cannot be given another tensor. ``direct`` is the
    short way of its stream, for an edit of the whole output of every call; else None.
    """

    is_gradient = False
    _has_looked = False

    def __init__(self, site: Site, stream: EditStream) -> None:
        self._site = site
        self._stream = stream
        self.direct = stream.direct if site.call is None and not site.key else None

    def __call__(self, output: Any, given: tuple[Any, Any], passage: Passage, is_again: bool) -> Any:
        site = self._site
        if site.call is not None and site.call != passage.call:
            return output
        if isinstance(output, Tensor) and not site.key:
            if not self._has_looked:
                self._has_looked = True
                if any(output is one for one in given[0]):
                    self._stream.remark(RETURNED)
            return self._stream.change(output, passage, is_again)
        if not self._has_looked:
            self._look_for_twins(output)
        try:
            key, tensor = single(site, dig(output, site.key), site.key)
        except KeyError as error:
            raise _missing(site, error) from None
        if tensor is None:
            self._stream.absent(passage.run, passage.call, "there is no tensor in this output")
            return output
        new = self._stream.change(tensor, passage, is_again)
        try:
            return put(output, key, new)
        except PlanError as error:
            raise PlanError(f"{site}: {error}") from None

    def _look_for_twins(self, output: Any) -> None:
        """Remark once that the output holds one tensor twice: only one place gets the edited one."""
        self._has_looked = True
        found = [tensor for _, tensor in iter_tensors(output)]
        if len({id(tensor) for tensor in found}) < len(found):
            self._stream.remark(TWINS)


class InputChange(EntryChange):
    """Puts an edited tensor in the place of an argument, or of one tensor inside it.

    The module sees the edited one; whoever called it keeps the tensor that it passed. Raises like ``OutputChange``.
    """

    is_gradient = False

    def __init__(self, site: Site, stream: EditStream) -> None:
        self._site = site
        self._stream = stream

    def __call__(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], passage: Passage, is_again: bool
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if self._site.call is not None and self._site.call != passage.call:
            return None
        found = find_argument(args, kwargs, self._site)
        if found is None:
            self._stream.absent(passage.run, passage.call, "there is no tensor in this input")
            return None
        new = self._stream.change(found[1], passage, is_again)
        try:
            return put_argument(args, kwargs, found[0], new)
        except PlanError as error:
            raise PlanError(f"{self._site}: {error}") from None


def find_argument(args: tuple[Any, ...], kwargs: dict[str, Any], site: Site) -> tuple[Key, Tensor] | None:
    """The tensor that an input address means, with its key; None where there is none.

    An address without a key means the first tensor, positional arguments before keywords. Raises SiteError where the
    call has no such argument, or where the address leads to several tensors.
    """
    if not site.key:
        return first_tensor(args, kwargs)
    try:
        key, tensor = single(site, dig_argument(args, kwargs, site.key), site.key)
    except KeyError as error:
        raise _missing(site, error) from None
    return None if tensor is None else (key, tensor)


def single(site: Site, value: Any, key: Key) -> tuple[Key, Tensor | None]:
    """The one tensor in ``value``, with its key; ``key`` is where ``value`` stands. None in its place if there is none.

    Raises SiteError where there are several, with their addresses: an edit must say which.
    """
    found = list(iter_tensors(value))
    if len(found) > 1:
        names = [f"{replace(site, key=(*key, *one))} ({describe(tensor)})" for one, tensor in found[:8]]
        more = f" and {len(found) - 8} more" if len(found) > 8 else ""
        raise SiteError(
            f"{site}: its value is a {describe(value)} and holds {len(found)} tensors, an edit changes one: say which, "
            f"or give an edit for each: {', '.join(names)}{more}"
        )
    return ((*key, *found[0][0]), found[0][1]) if found else (key, None)


def _missing(site: Site, error: KeyError) -> SiteError:
    return SiteError(f"{site}: {error.args[0]}")
