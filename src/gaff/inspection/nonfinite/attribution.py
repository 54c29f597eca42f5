"""Whose a tensor is that is not finite: what an op has returned, and what no op of a module has made.

The examination sees the ops of modules, and asks ``judge`` of each that returned something bad. A bad tensor that came
from none of them (but from a hook, another process, the past) is met sooner or later, as an input of an op or of a
module, and has to be blamed on something: ``Now`` knows what runs.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gaff.address.grammar import Address, Site, fits_op, parse
from gaff.address.nested import map_tensors
from gaff.address.resolve import join
from gaff.compat import distributed
from gaff.compat.anomaly import AnomalyCheck
from gaff.compat.autograd import maker_of
from gaff.engine.gradients.nodes import NodeWatch
from gaff.engine.ops.calls import OpCall
from gaff.errors import PlanError, SiteError
from gaff.inspection.nonfinite.backward import Trail
from gaff.inspection.nonfinite.case import Case
from gaff.inspection.nonfinite.causes import LOSSES, UNINITIALISED, cause_of
from gaff.inspection.nonfinite.provenance import RETURNED, Made, own_path, shown, users_place
from gaff.inspection.nonfinite.ranges import has_nan, plain, range_of
from gaff.inspection.nonfinite.report import Range
from gaff.inspection.op_log import Producers

_LATE = sys.maxsize  # the number of an origin that is told only where there is no other
_OF_AN_ORDER = (
    "normalize",
    "norm",
    "vector_norm",
    "matrix_norm",
    "linalg_norm",
    "linalg_vector_norm",
    "linalg_matrix_norm",
    "cdist",
    "pdist",
    "dist",
    "pairwise_distance",
    "renorm",
)  # which may be inf
_STATISTICS_AT = {F.batch_norm: 1, F.instance_norm: 1, torch.batch_norm: 3, torch.instance_norm: 3}  # first argument


class Begun(NamedTuple):
    """An op that has begun. ``came``: what it is given, each tensor with what made it bad.

    ``ranges`` are of those tensors as they were before, None where they can still be read afterwards. ``scalars``: bad
    tensors of one element by now, with what made them bad: a program may have read one out, as by ``item``.
    """

    call: OpCall
    came: list[tuple[Tensor, Made | None]]
    ranges: tuple[Range, ...] | None
    scalars: Sequence[tuple[Range, Made]] = ()


class Now:
    """What runs at this moment. The fields are kept by the examination, which watches the ops.

    ``inside`` is a stack: its last path is the module in whose forward the next op will be.
    """

    def __init__(self) -> None:
        self.inside = [""]  # paths of the modules that run now
        self.scalars: list[tuple[Range, Made]] = []  # bad tensors of one element by now, with what made them so
        self.modules: dict[str, nn.Module] = {}  # by path
        self.ops = 0  # that have run
        self.latest: Made | None = None  # of the last op
        self.outside: Made | None = None  # of the last op outside the model, if it was not meant
        self.is_spread = False  # whether other processes have parts of the model
        self.anomaly = AnomalyCheck()  # torch's, which is left out meanwhile

    def made_of(self, tensor: Tensor, trail: Trail, producers: Producers, site: Site) -> Made:
        """Whose a tensor is that is not finite. ``site``: what it is where it was met.

        Asked are, in this order: parameters that are gathered from other processes, the autograd node that made it,
        the backward passes that ran, whether it came up while the step ran. What nobody has made was there before the
        step. Waits for the device.
        """
        made = self._held(tensor) or self._handed_on(tensor, trail.nodes) or trail.made_of(tensor, producers)
        if made is None and (
            maker_of(tensor) is not None or (self.ops and (self.is_spread or self.inside[-1] or site == RETURNED))
        ):
            made = self._made_here(tensor, site)
        return made or before(tensor, site, is_meant=is_mask(tensor))

    def _held(self, tensor: Tensor) -> Made | None:
        """The origin of a parameter that is gathered from several processes for as long as a module runs.

        Such a parameter is another tensor than the one that was looked at before the step.
        """
        for path, module in self.modules.items() if self.is_spread else ():
            for name, parameter in module._parameters.items():
                if parameter is tensor:
                    return before(tensor, Site(join(path, name), port="param"))
        return None

    def _handed_on(self, tensor: Tensor, nodes: NodeWatch) -> Made | None:
        """The origin of what something was given that is no op of a module, and hands on what was bad already.

        Nodes of conversions between processes are looked past. Values that were meant (a mask's -inf) account for what
        is handed on only as far as it is of their kind: a NaN, or a +inf that was not there, is a new one, and None is
        returned. With other processes, and without an autograd node, the last op is taken: what came between is moving
        between processes.
        """
        found = (ran.bad.get(which) for ran, which in nodes.owners_behind(tensor, distributed.CONVERSIONS))
        made = next((one for one in found if one is not None), None)
        if made is None and self.is_spread and maker_of(tensor) is None:
            made = self.latest  # what came between is moving between processes
        if made is None or not made.is_meant:
            return made
        is_new = has_nan(tensor) or (_has_positive(tensor) and not made.output.positive_inf)
        return None if is_new else made

    def _made_here(self, tensor: Tensor, site: Site) -> Made:
        """The origin of what this step made in no op of a module: in a custom Function, a hook, or another process.

        The name of the autograd node tells which Function; without one, and with other processes in the model, it is
        theirs. What a module is given was made in the forward of the module around it.
        """
        maker = maker_of(tensor)
        name = maker.name().rpartition("::")[2] if maker is not None else ""
        name = name.rstrip("0123456789").removesuffix("Backward")
        hidden = "of a custom autograd Function or of somebody's hook, under vmap, in TorchScript, on another thread"
        cause = f"it came from {name}, in an op that nothing shows: {hidden}"
        if self.is_spread and (not name or name in distributed.CONVERSIONS):
            name, cause = "", "another process made it: what this one had here was finite"
        elif not name:
            unseen = "NumPy, a custom Function, a hook or another thread"
            unseen = f"another process by a collective, {unseen}" if distributed.has_others() else unseen
            cause = f"no op of a module made it: it was there before, or came from {unseen}"
        where = Site(site.path or self.inside[-1], name or None)
        if site.path and site.port == "input":
            where = Site(self.inside[-2] if len(self.inside) > 1 else "", name) if name else site
        is_meant = not name and is_mask(tensor)
        return Made(where, "forward", None, cause, range_of(tensor, "output"), position=self.ops, is_meant=is_meant)


def before(tensor: Tensor, site: Site, *, is_meant: bool = False, is_again: bool = False) -> Made:
    """The origin of what was there before the step: a parameter, a buffer, a gradient, an input.

    ``is_again``: the step has run before. A buffer may then hold what that run has written there, as running statistics
    do, so that whatever else is found comes first. Waits for the device.
    """
    output = range_of(tensor, "value")
    kind = {"param": "the parameter", "buffer": "the buffer", "grad": "the gradient"}.get(site.port, "the input")
    cause = f"{kind} held {output.kinds} before the step; what made it lies before this"
    made = Made(site, "before", None, cause, output, is_meant=is_meant)
    if is_again and site.port == "buffer":
        made.number = _LATE
        made.cause = f"the buffer held {output.kinds} when the batch was run again: it did before, or the run wrote it"
    return made


def judge(begun: Begun, tensor: Tensor, producers: Producers, position: int, allow: Iterable[Address]) -> Made:
    """Whose the NaN or inf in ``tensor`` is, which an op returned: of something that came in, meant, or of this op.

    ``position``: how many ops ran before; ``allow``: patterns of sites whose values are meant. Waits for the device.
    """
    call, op = begun.call, begun.call.site.op or ""
    unread = only_written(call)
    came = [made for one, made in begun.came if made is not None and not _is_among(one, unread)]
    output = range_of(tensor, "output")
    real = [made for made in came if not (made.is_meant or (output.nan and _is_kept(made)))]
    read_out = [made for held, made in begun.scalars if any(_is_as(one, held) for one in _odd_constants(call))]
    if real or read_out:
        return min([*real, *read_out], key=lambda made: made.number)
    is_allowed = _is_allowed(call.site, allow)
    is_meant = is_allowed or op in UNINITIALISED or _is_deliberate(call) or is_scaling(call)
    lasting = [made for made in came if made.output.nan]  # a NaN that was put in stays one
    is_asked = op in LOSSES and output.positive_inf and not any(_has_positive(one) for one, _ in begun.came)
    is_new = _is_new(tensor, [one for one, _ in begun.came])
    if lasting or (came and not output.nan and not is_asked and not is_new):
        return (lasting or came)[0]
    if not is_meant and not output.nan and not output.positive_inf:
        is_meant = _adds_masks(op, tensor, [one for one, _ in begun.came])
    given = ranges_of((one for one, _ in begun.came), producers) if begun.ranges is None else begun.ranges
    place = users_place(call.place)
    read = [(one, made) for one, (other, made) in zip(given, begun.came, strict=True) if not _is_among(other, unread)]
    given = tuple(one for one, _ in read)
    unseen = [one for one, made in read if made is None and not one.is_finite]
    if unseen:
        what = f"{unseen[0].name} held {unseen[0].kinds} that no op put there"
        theirs = "a collective (another process sent it), " if distributed.has_others() else ""
        cause = f"{what}: it was written to past torch's ops, by {theirs}.data or NumPy"
        return Made(call.site, "forward", place, cause, output, given, position)
    args, kwargs = map_tensors((call.args, call.kwargs), distributed.local_of)  # other processes are not here now
    case = Case(op, call.func, args, kwargs, given, output)
    if came and is_new:  # the cause is that of the others
        args, kwargs = map_tensors((args, kwargs), _without_infinite)
        pairs = zip(begun.came, given, strict=False)
        finite = tuple(range_of(_without_infinite(one), known.name) for (one, _), known in pairs)
        case = Case(op, call.func, args, kwargs, finite, output)
    is_constant = is_meant and op not in UNINITIALISED and not is_allowed
    cause = _of_constant(call, output) if is_constant else cause_of(case)
    return Made(call.site, "forward", place, cause, output, given, position, is_meant, is_scaling(call))


def _is_kept(made: Made) -> bool:
    """Whether it is an infinite constant that a forward holds: a NaN that an op makes of it is that op's."""
    return made.direction == "forward" and made.place is None and made.site.op is None and not made.output.nan


def _is_among(tensor: Tensor, others: Iterable[Any]) -> bool:
    """Whether a tensor is one of the others, by identity."""
    return any(tensor is other for other in others)


def only_written(call: OpCall) -> Sequence[Any]:
    """The running statistics of a normalization that normalizes by its input: it updates them, and uses them not."""
    at = _STATISTICS_AT.get(call.func)
    if at is None:
        return ()
    name = "training" if "batch" in call.func.__name__ else "use_input_stats"
    is_of_input = call.args[5] if len(call.args) > 5 else call.kwargs.get(name, name != "training")
    named = [call.kwargs.get("running_mean"), call.kwargs.get("running_var")]
    return [*call.args[at : at + 2], *named] if is_of_input else ()


def ranges_of(given: Iterable[Tensor], producers: Producers) -> tuple[Range, ...]:
    """The ranges of an op's inputs, each named by its number and by what made it. Waits for the device."""
    names = ((one, producers.of(one)) for one in given)
    return tuple(
        range_of(one, f"input[{number}]" + (f" <- {shown(name)}" if name else ""))
        for number, (one, name) in enumerate(names)
    )


def is_scaling(call: OpCall) -> bool:
    """Whether a GradScaler runs the op: what overflows there it skips by itself."""
    return call.place.f_code.co_filename.endswith("grad_scaler.py")


def _is_deliberate(call: OpCall) -> bool:
    """Whether a constant among the arguments is itself infinite or NaN: it was put there on purpose.

    The order of a norm is no value.
    """
    return any(True for _ in _odd_constants(call))


def _odd_constants(call: OpCall) -> Iterator[float]:
    """The numbers among the arguments of an op that are NaN or infinite, but for the order of a norm."""
    if (call.site.op or "") not in _OF_AN_ORDER:
        yield from (one for one in _constants([*call.args, *call.kwargs.values()]) if not math.isfinite(one))


def _is_as(constant: float, output: Range) -> bool:
    """Whether a number that is not finite is what a tensor of one element held."""
    held = output.nan if math.isnan(constant) else output.positive_inf if constant > 0 else output.negative_inf
    return bool(held)


def _constants(values: Any) -> Iterator[float]:
    """The floating numbers among arguments, in lists of lists too, as ``torch.tensor`` takes them."""
    for value in values:
        if isinstance(value, float):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _constants(value)


def _of_constant(call: OpCall, output: Range) -> str:
    """What is said of a value that is infinite, or NaN, by a constant among the arguments."""
    constants = list(_constants([*call.args, *call.kwargs.values()]))
    if output.nan and not any(math.isnan(one) for one in constants) and any(math.isinf(one) for one in constants):
        return "an infinite constant among its arguments made a NaN of finite numbers: 0 * inf, or inf - inf"
    return "it was put in by a constant"


def meant_by(allow: Iterable[str]) -> list[Address]:
    """The patterns of ops and modules whose non-finite values are meant.

    Raises PlanError for what is no list of texts, and SiteError for one that says more than a path and an op: what is
    meant is meant at every call, and in whatever it returns.
    """
    texts = [allow] if isinstance(allow, str) or not isinstance(allow, Iterable) else list(allow)
    if texts == [allow] or not all(isinstance(one, str) for one in texts):
        raise PlanError(f"allow={allow!r} is no list of patterns: expected ['**.attn/masked_fill']")
    patterns = [(text, parse(text)) for text in texts]
    for text, pattern in patterns:
        if pattern.port != "output" or pattern.call is not None or pattern.key:
            raise SiteError(f"allow={text!r} says more than a module or an op: expected 'attn/masked_fill', say")
    return [pattern for _, pattern in patterns]


def _is_allowed(site: Site, patterns: Iterable[Address]) -> bool:
    """Whether one of ``patterns`` stands for the op at a site within the step, or for its whole module."""
    path = own_path(site.path)
    for pattern in patterns:
        is_op = pattern.op is None or fits_op(pattern.op, site.op or "")
        is_index = pattern.op_index in (None, site.op_index)
        is_path = pattern.path == path if isinstance(pattern, Site) else pattern.matches(path) or not pattern.names
        if is_op and is_index and is_path:
            return True
    return False


def _is_new(output: Tensor, given: list[Tensor]) -> bool:
    """Whether an element of what an op returned is infinite where all that it was given is finite, element by element.

    False where that cannot be told: of other shapes, and of what was written in place.
    """
    if any(one is output for one in given) or not all(_fits(one, output) for one in given):
        return False
    was_finite = torch.ones_like(plain(output), dtype=torch.bool)
    for one in given:
        was_finite &= plain(one).isfinite()
    return bool((plain(output).isinf() & was_finite).any())


def _without_infinite(tensor: Tensor) -> Tensor:
    """A copy with zeros for what is infinite; the tensor itself where nothing is."""
    is_any = tensor.is_floating_point() and not tensor.is_nested and bool(plain(tensor).isinf().any())
    return torch.where(tensor.isinf(), 0, tensor) if is_any else tensor


def _fits(one: Tensor, output: Tensor) -> bool:
    """Whether a tensor may have been expanded to the shape of what an op returned; both dense, and of real numbers."""
    if any(each.is_nested or each.is_complex() or plain(each).shape != each.shape for each in (one, output)):
        return False
    sizes = zip(reversed(one.shape), reversed(output.shape), strict=False)
    return one.dim() <= output.dim() and all(size in (1, whole) for size, whole in sizes)


def _adds_masks(op: str, output: Tensor, given: list[Tensor]) -> bool:
    """Whether an op adds to the lowest number of a type, as masks do: the -inf that it gives there is meant as well.

    A mask is what holds nothing but 0 and one number, from half of the lowest on, too.
    """
    if op.strip("_") not in ("add", "sub", "mul"):
        return False
    if not _fits(output, output):
        return False
    is_closed = torch.zeros_like(plain(output), dtype=torch.bool)
    for one in given:
        if one.is_floating_point() and _fits(one, output):
            value, lowest = plain(one), torch.finfo(one.dtype).min
            is_mask = len(value.unique()) == 2 and float(value.max()) == 0
            is_closed |= value <= (0.5 if is_mask else 0.99) * lowest
    return bool(is_closed[plain(output) == -math.inf].all())


def is_mask(tensor: Tensor) -> bool:
    """Whether a tensor from outside holds -inf, 0 and nothing else that is not finite: an additive mask."""
    value = plain(tensor)
    if tensor.is_complex() or not bool((value == -math.inf).any()):
        return False
    rest = value[value != -math.inf]
    return bool(torch.isfinite(rest).all()) and bool((rest == 0).all())


def _has_positive(tensor: Tensor) -> bool:
    """Whether an element is +inf. Waits for the device."""
    return bool((plain(tensor) == math.inf).any())
