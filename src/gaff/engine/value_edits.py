"""Where edits of values take hold: at the exit and at the entry of a module. Those of gradients: ``gradients.edits``.

What an edit does to a tensor is its stream's affair; here the tensor is found in what passes, and the new one is put
in its place. Containers on the way to it are made anew, and the caller's own are left as they are; what a module writes
into a list or dict that it is given reaches the caller's when the call is over.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from gaff.address.grammar import Key, Site
from gaff.address.nested import Arguments, describe, dig, first_tensor, iter_tensors, put
from gaff.compat import autograd
from gaff.engine.crossing import Crossing
from gaff.engine.gradients.tensor_hooks import note_passed, place_of
from gaff.engine.streams import Act, EditStream
from gaff.errors import PlanError, SiteError

RETURNED = "the module returned its input itself: who ignores what it returns misses the edit"
TWINS = "the output holds one tensor several times: only the one at this key is edited"


class ValueChange(Act):
    """Puts an edited tensor in the place of what passes, or of one tensor inside it.

    At the entry the module sees the edited one; whoever called it keeps the tensor that it passed. Raises SiteError
    where the address leads nowhere or to several tensors, PlanError where what holds the tensor cannot be given another
    one.
    """

    _has_looked = False

    def __init__(self, site: Site, stream: EditStream, module: nn.Module) -> None:
        self._site = site
        self._stream = stream
        self._module = module
        self._is_whole = site.call is None and not site.key and site.port == "output"
        self.direct = stream.direct if self._is_whole else None

    def __call__(self, value: Any, given: Arguments, crossing: Crossing) -> Any:
        site = self._site
        if site.call is not None and site.call != crossing.call:
            return None
        if not self._has_looked and value is not given:
            self._remark(value, given)
        if self._is_whole and isinstance(value, Tensor):
            return self._stream.change(value, crossing)
        key, tensor = find(value, site)
        if tensor is None:
            self._stream.absent(crossing.run, crossing.call, f"there is no tensor in this {site.port}")
            return None
        new = self._stream.change(tensor, crossing)
        if site.port == "input" and new is not tensor and autograd.takes_gradient(new) and not new.is_leaf:
            note_passed(new, tensor, place_of(site, self._module, crossing.call))
        try:
            return put(value, key, new)
        except PlanError as error:
            raise PlanError(f"{site}: {error}") from None

    def _remark(self, output: Any, given: Arguments) -> None:
        """Remark once what the reader should know of this output: it was given, or holds one tensor twice."""
        self._has_looked = True
        if isinstance(output, Tensor):
            if any(output is one for one in given.args):
                self._stream.remark(RETURNED)
            return
        found = [tensor for _, tensor in iter_tensors(output)]
        if len({id(tensor) for tensor in found}) < len(found):
            self._stream.remark(TWINS)


def find(value: Any, site: Site) -> tuple[Key, Tensor | None]:
    """The tensor that the address of an edit means in ``value``, with its key; None in its place where there is none.

    Of arguments an address without a key means the first. Raises SiteError where the address leads nowhere, or to
    several tensors.
    """
    if type(value) is Arguments and not site.key:
        return first_tensor(value) or ((), None)
    try:
        return single(site, dig(value, site.key), site.key)
    except KeyError as error:
        raise SiteError(f"{site}: {error.args[0]}") from None


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
