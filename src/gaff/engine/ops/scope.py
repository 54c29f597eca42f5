"""What is asked of the ops of one module in one session, and what has been found out about them.

Here nothing runs: ``mode`` sees the ops and asks what is wanted of each, ``calls`` handles those that are.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from gaff.address.grammar import ATTENTIONS, WEIGHTS, Site, fits_op
from gaff.engine.node import Node
from gaff.engine.ops.calls import OpNode
from gaff.engine.taps import OpTap
from gaff.errors import PlanError

LEFT_OUT = "ops inside torch.func transforms (vmap, grad ...) are left out, and not numbered"
_LOOKS = 4  # at how many ops of a name that nobody asked for it is found out whether the module itself runs it


_making = threading.RLock()
_numbers = itertools.count()


class Want(NamedTuple):
    """An op site that somebody asked for. ``connect`` hangs its stream on the node of one op.

    The op of ``site`` may be a glob and its index None: then the stream is asked for one for each op that is met.
    """

    site: Site  # the op may be a glob, its index None
    stream: Any
    connect: Callable[[Node, Site, Any], None]


class NamedOps:
    """The ops of one name in one module and session, by their number within a call; ``wants`` may be empty.

    ``nodes`` grows as higher numbers are met, None where nobody asks for that one. ``looks``: for a name that nobody
    asked for, how often it is still found out whether the module itself runs it, for the message about ops that never
    came.
    """

    __slots__ = ("has_left_out", "is_silent", "is_wanted", "looks", "name", "nodes", "scope", "wants")

    def __init__(self, scope: Scope, name: str, wants: list[Want], *, is_wanted: bool) -> None:
        self.scope = scope
        self.name = name
        self.wants = wants
        self.is_wanted = is_wanted
        self.nodes: list[OpNode | None] = []
        self.looks = _LOOKS
        self.has_left_out = False
        self.is_silent = False  # the last one has returned nothing

    def leave_out(self) -> None:
        """Leave out an op inside a torch.func transform, unnumbered: its values are wrappers that mean nothing outside.

        Streams get a remark. Raises PlanError for an edit of all ops of this name, which would then miss some.
        """
        for want in self.wants:
            if self.scope.is_edit and want.site.op_index is None:
                raise PlanError(f"{want.site}: one of these ops runs inside a torch.func transform (vmap, grad ...), "
                                "where it cannot be edited; name the others by number, which leave it out")  # fmt: skip
            want.stream.remark(LEFT_OUT)
        self.has_left_out = True
        for node in self.nodes:
            for stream in node.streams if node is not None else ():
                stream.remark(LEFT_OUT)


class Scope:
    """What is asked of the ops of one module, in one session; hung on the module's node while the session prepares.

    ``owner`` is that node, ``path`` the module's. It holds what was asked (``wants``, ``listeners``), and what was
    found out: the rows of ops by name, and those for the short way by function (``plain``). ``known`` are the
    identities of the model's modules; what another module runs, made on the fly, belongs to its caller.
    """

    def __init__(self, owner: Node, path: str) -> None:
        self.owner = owner
        self.path = path
        self.number = next(_numbers)  # in the order in which sessions are opened
        self.wants: list[Want] = []
        self.listeners: list[OpTap] = []
        self.notes: list[str] = []  # of the session
        self.at_end: list[Callable[[], None]] = []  # of its calls
        self.rows: dict[str, NamedOps] = {}
        self.plain: dict[Any, NamedOps] = {}  # by function, where nothing but outputs is asked for
        self.ran: set[str] = set()  # names of ops that the module itself ran
        self.was_called = False
        self.repeats = False  # something must happen again in a recomputation
        self.is_edit = False
        self.is_plain = True  # nothing but outputs is looked at
        self.known: set[int] = set()  # modules of the model; what another runs, made on the fly, is its caller's

    def row(self, name: str) -> NamedOps:
        """The ops with this name, made when one is first met; patterns are matched once."""
        wants = [want for want in self.wants if fits_op(want.site.op or "", name)]
        if name not in ATTENTIONS:
            wants = [want for want in wants if want.site.port != WEIGHTS]
        return self.rows.setdefault(name, NamedOps(self, name, wants, is_wanted=bool(wants or self.listeners)))

    def node(self, row: NamedOps, index: int) -> OpNode | None:
        """What is asked of the op with this number, None for nothing; made when it is first met, under a lock."""
        with _making:  # of several threads
            while len(row.nodes) <= index:
                row.nodes.append(self._make(row, len(row.nodes)))
        return row.nodes[index]

    def nodes(self) -> Iterator[OpNode]:
        """The ops that somebody asks for, as far as they have come."""
        return (node for row in list(self.rows.values()) for node in row.nodes if node is not None)

    def _make(self, row: NamedOps, index: int) -> OpNode | None:
        """Make the node of one op and connect all streams that ask for it; equal sites share one stream."""
        wants = [want for want in row.wants if want.site.op_index in (None, index)]
        if not wants:
            return None
        node = OpNode(self.owner.module, self.owner.clock)
        made: dict[tuple[Any, ...], Any] = {}
        for want in wants:
            site = replace(want.site, op=row.name, op_index=index)
            known = made.get((site.call, site.port, site.key))
            stream = want.stream if want.site == site and known is None else want.stream.spawn(site, known)
            if stream is not known:
                made[site.call, site.port, site.key] = stream
                want.connect(node, site, stream)
                if row.has_left_out:
                    stream.remark(LEFT_OUT)
        node.streams = tuple(made.values())
        return node

    def let_go(self) -> None:
        """Break the circle with its owner, which would otherwise wait for a collector, when the session is over."""
        self.owner.scope = None
        self.rows.clear()
        self.plain.clear()
        self.wants.clear()
        self.listeners.clear()

    def settle(self) -> None:
        """Say of every op that was asked for and never came what the module ran instead; the session closes."""
        if not self.was_called:
            return
        where = f"the own forward of {self.path or 'the model'} <{type(self.owner.module).__name__}>"
        ran = ", ".join(self._numbered(name) for name in sorted(self.ran)) or "none"
        for want in self.wants:
            rows = [row for row in list(self.rows.values()) if want in row.wants]  # a thread may go on adding
            if not any(len(row.nodes) > (want.site.op_index or 0) for row in rows):
                want.stream.skip(f"there is no such op in {where}, which ran {ran}{self._hint(want.site)}")
            elif want.site.port != "input" and all(row.is_silent for row in rows):
                silent = {id(one): one for row in rows for node in row.nodes if node for one in node.streams}
                for stream in silent.values():
                    stream.skip(f"it ran in {where}, and returned nothing: ask for what it is given, as :input")

    def _hint(self, site: Site) -> str:
        """Where the weights of attention are to be had, for who asked for them where they are not."""
        fused = next((name for name in ATTENTIONS if name in self.ran), None)
        if site.port == WEIGHTS and "softmax" in self.ran:
            return f"; it writes attention out: ask {Site(self.path, 'softmax')}"
        if site.op == "softmax" and fused is not None:
            return f"; attention is fused there: ask {Site(self.path, fused, port=WEIGHTS)}"
        return ""

    def _numbered(self, name: str) -> str:
        """The name of an op with its numbers, ``add#0 to #2``, where it is known how many there were."""
        row = self.rows.get(name)
        count = len(row.nodes) if row is not None else 0
        return name if not count else f"{name}#0" if count == 1 else f"{name}#0 to #{count - 1}"
