"""Which place of a hooked module a stream hangs on."""

from __future__ import annotations

from typing import Any

from gaff.address.grammar import Site
from gaff.address.nested import dig, dig_argument
from gaff.engine.clock import Run
from gaff.engine.gradients.edits import EntryGradient, ExitGradient, ShareChange
from gaff.engine.gradients.pending import Gradients
from gaff.engine.gradients.ports import InputGradient, OutputGradient, find_input, report_missing
from gaff.engine.gradients.share import InputShare
from gaff.engine.modules import Node
from gaff.engine.streams import EditStream, EntryTap, ExitTap, Stream
from gaff.engine.value_edits import InputChange, OutputChange


def connect(node: Node, site: Site, stream: Stream, is_exact: bool, gradients: Gradients) -> None:
    """Hang a stream on the right place of a hooked module."""
    if site.port == "output":
        node.exits += (_output_tap(site, stream, is_exact),)
    elif site.port == "input":
        node.entries += (_input_tap(site, stream, is_exact),)
    elif site.port == "grad_output":
        node.arms += (OutputGradient(gradients, node, stream, site, is_exact),)
    elif site.port == "input_grad":
        node.entry_arms += (InputGradient(gradients, node, stream, site, is_exact),)
    else:
        share = InputShare(gradients, node, stream, site, is_exact)
        node.entry_arms += (share,)
        node.arms += (share.exit_arm(),)


def connect_edit(node: Node, site: Site, stream: EditStream, gradients: Gradients) -> None:
    """Hang an edit on the right place: total gradients, then values, then what the edited values get back."""
    if site.port == "output":
        values = [change for change in node.exit_changes if not change.is_gradient]
        node.exit_changes = (*values, OutputChange(site, stream), *node.exit_changes[len(values) :])
    elif site.port == "input":
        node.entry_changes = _before_last(node.entry_changes, ShareChange, InputChange(site, stream))
    elif site.port == "grad_output":
        node.exit_changes += (ExitGradient(OutputGradient(gradients, node, stream, site, True)),)
    elif site.port == "input_grad":
        total = EntryGradient(InputGradient(gradients, node, stream, site, True))
        node.entry_changes = _before_last(node.entry_changes, (InputChange, ShareChange), total)
    else:
        share = ShareChange(gradients, node, stream, site, True)
        node.entry_changes += (share,)
        node.exit_changes += (share.exit_half(),)


def _before_last(changes: tuple[Any, ...], kinds: Any, new: Any) -> tuple[Any, ...]:
    """``changes`` with ``new`` before those of ``kinds``, which stay last."""
    first = tuple(change for change in changes if not isinstance(change, kinds))
    return (*first, new, *(change for change in changes if isinstance(change, kinds)))


def _output_tap(site: Site, stream: Stream, is_exact: bool) -> ExitTap:
    if site.call is None and not site.key:
        return stream.add  # the common case pays nothing for the others

    def tap(output: Any, run: Run, call: int) -> None:
        if site.call is None or site.call == call:
            try:
                value = dig(output, site.key)
            except KeyError as error:
                report_missing(site, stream, is_exact, error)
            else:
                stream.add(value, run, call)

    return tap


def _input_tap(site: Site, stream: Stream, is_exact: bool) -> EntryTap:
    def tap(args: tuple[Any, ...], kwargs: dict[str, Any], run: Run, call: int) -> None:
        if site.call is not None and site.call != call:
            return
        if not site.key:
            tensor = find_input(args, kwargs, site, stream, is_exact)
            if tensor is not None:
                stream.add(tensor, run, call)
            return
        try:
            value = dig_argument(args, kwargs, site.key)
        except KeyError as error:
            report_missing(site, stream, is_exact, error)
        else:
            stream.add(value, run, call)

    return tap
