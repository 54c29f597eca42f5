"""The models of a run: whose module and whose parameter something is, under the name that the user gave it.

What is known of a module is worked out once, when its model is found (``WatchedModule``), so that a hook has only to
look it up. Everything of the user's is held weakly: a model that is dropped goes.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList
from torch.utils.weak import WeakTensorKeyDictionary

from gaff.address.exported import GraphTree, class_of
from gaff.address.grammar import Address, Site, parse
from gaff.address.resolve import is_container, iter_modules, join, resolve, unwrap
from gaff.engine.exported import trees_of
from gaff.engine.process.calls import is_compiled
from gaff.errors import SiteError
from gaff.record.sample import Key
from gaff.training.watch.held_parameter import HeldParameter
from gaff.training.watch.routers import Routing, routings_of
from gaff.training.watch.variable_names import holder_of, holder_of_parameter

_RECTIFIERS = (nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.SELU, nn.CELU, nn.Mish, nn.Softplus,
               nn.Hardswish, nn.PReLU, nn.RReLU, nn.Threshold)  # fmt: skip
_ALONG_ONE = (nn.modules.conv._ConvNd, nn.modules.batchnorm._NormBase, nn.GroupNorm)  # channels are dimension 1
_MIXING = (*_ALONG_ONE, nn.Linear, nn.LayerNorm, nn.Embedding, nn.Bilinear)
_NAMES_OF_RECTIFIERS = ("GELU", "SiLU", "ReLU", "Activation", "Swish")
_SHOWN = 3  # sites in one line

Place = tuple[int | str, ...]  # of a tensor in what a module returned


@dataclass(eq=False, slots=True)
class WatchedModule:
    """One module of a watched model, with what hooks need to know of it.

    ``kind`` says what is to be counted of its output besides the usual numbers. ``is_wanted``: the filters leave it in.
    ``keys`` are those made so far, since printing an address takes longer than looking one up.
    """

    model: str
    path: str
    kind: str  # "rectifier", "bounded", "dropout", "softmax", "attention", "mixing" or ""
    channels_at: int | None  # the dimension of its units; None: of those of what came before
    is_wanted: bool
    routing: Routing | None = None  # what it is to a mixture of experts
    flat_beyond: tuple[float, float] | None = None  # of a bounded function: values at which, and beyond, it is flat
    keys: dict[tuple[str, Place], Key] = field(default_factory=dict)

    def key(self, port: str, place: Place = ()) -> Key:
        """The key of one of the module's tensor streams: the model's name, and its address.

        ``port`` is ``output``, ``input`` or ``grad_output``; ``place`` leads to a tensor inside what was returned.
        """
        known = self.keys.get((port, place))
        if known is None:
            known = self.keys[port, place] = self.model, str(Site(self.path, port=port, key=place))
        return known


@dataclass(eq=False, slots=True)
class Model:
    """One outermost model, and the parameters in it by identity.

    ``root`` is what the user's variable holds, with wrappers such as DDP, weakly, for it is the user's to drop;
    ``kind`` is the class of the module inside them. ``parameters``: by identity the module that has it, its name there
    and the first path. The parameters themselves are not referred to, not even weakly: torch swaps no tensor that is.
    """

    name: str
    root: weakref.ref[nn.Module]
    kind: str
    is_compiled: bool
    parameters: dict[int, tuple[weakref.ref[nn.Module], str, str]] = field(default_factory=dict)
    graphs: weakref.WeakSet[GraphTree] = field(default_factory=weakref.WeakSet)  # trees of exported ones in it
    spread: dict[str, Any] = field(default_factory=dict)  # how it lies in the processes, as it was told last
    looks: int = 0  # since it was found, in a run of several processes
    has_run: bool = False  # whether a call of it was seen in training
    untrained: list[float] | None = None  # of a weight as torch initialises it; none if it is not; None: nobody asked

    def reread(self) -> None:
        """Read the parameters anew, for the user may have replaced them since; none, where the model is gone."""
        root = self.root()
        self.parameters = {}
        if root is None:
            return
        for path, module, _ in iter_modules(root):
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    self.parameters.setdefault(id(parameter), (weakref.ref(module), name, join(path, name)))

    def name_of(self, parameter: Tensor) -> str | None:
        """The path of a parameter in this model, told by identity; None where it is not in it."""
        known = self.parameters.get(id(parameter))
        module = known[0]() if known is not None else None
        if known is None or module is None or module._parameters.get(known[1]) is not parameter:
            return None
        return known[2]


class Missed:
    """What of models was not looked at, and why, to be told when the run is over.

    ``late``: the gradients that came after the look in which their forward was seen.
    """

    def __init__(self) -> None:
        self.late: set[Key] = set()
        self._notes: dict[str, None] = {}

    def note(self, text: str) -> None:
        """Have this line told, once."""
        self._notes[text] = None

    def lines(self) -> list[str]:
        """All that is to be told."""
        if not self.late:
            return list(self._notes)
        some = ", ".join(f"{model}.{site}" for model, site in sorted(self.late)[:_SHOWN])
        more = f" and {len(self.late) - _SHOWN} more" if len(self.late) > _SHOWN else ""
        told = f"gradients that came after the step of their forward were not looked at: {some}{more}"
        return [*self._notes, told]


@dataclass(eq=False, slots=True)
class Unowned:
    """The parameters that no optimizer owns. ``left_over``: by gradient of such a one its version at the last look,
    ``held``: by identity as they were then, ``newly_fed``: those that have got a gradient in this look."""

    left_over: MutableMapping[Tensor, int] = field(default_factory=WeakTensorKeyDictionary)
    held: dict[int, HeldParameter] = field(default_factory=dict)
    newly_fed: set[int] = field(default_factory=set)


class Models:
    """All watched models of a process, and their modules.

    ``only``, ``skip``: patterns of the modules that count; raises SiteError for one that names more than modules.
    ``is_given``: the user has said which they are, and no others are found. Used on the thread that trains.
    """

    def __init__(self, only: tuple[str, ...] = (), skip: tuple[str, ...] = (), *, is_given: bool = False) -> None:
        self.is_given = is_given
        self.all: list[Model] = []
        self.entries: weakref.WeakKeyDictionary[nn.Module, WatchedModule] = weakref.WeakKeyDictionary()
        self.called_often: set[Key] = set()  # outputs of modules that are called several times in a step
        self.is_fresh = False  # parameters were read again since the last window began
        self.missed = Missed()
        self._only = [_module_filter(one) for one in only]
        self._skip = [_module_filter(one) for one in skip]
        self._names: set[str] = set()  # of all that there have been
        self._passed_over: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._has_wanted = False
        self._stepped_by: weakref.WeakKeyDictionary[Any, tuple[tuple[int, int], set[str]]] = weakref.WeakKeyDictionary()
        self._strangers: MutableMapping[Tensor, bool] = WeakTensorKeyDictionary()
        self.unowned = Unowned()
        self.found: Callable[[Model, nn.Module], None] = lambda model, root: None  # called with a new one and its root

    @property
    def has_wanted(self) -> bool:
        """Whether the filters have left a module of the models met so far, if any was met."""
        return self._has_wanted or not self.all

    def named(self, name: str) -> Model:
        """The model that goes by this name; raises StopIteration where there is none."""
        return next(one for one in self.all if one.name == name)

    def path_of(self, module: nn.Module) -> str:
        """The path of a module in the model that it belongs to; empty for the model itself, and wrappers around it."""
        entry = self.entries.get(module)
        return "" if entry is None else entry.path

    def find(self, module: nn.Module) -> Model | None:
        """The model that an outermost call of ``module`` belongs to, made known if it is new.

        None for a module without parameters and without a holder that has some: a loss, an activation. None, too, for
        what makes a parameter of another module, which is called while it is registered.
        """
        if module in self._passed_over or isinstance(module, ParametrizationList):
            return None
        name, holder = holder_of(module)
        if next(holder.parameters(), None) is None and next(holder.buffers(), None) is None:
            self._passed_over.add(module)
            return None
        return self.add(name, holder)

    def add(self, name: str, root: nn.Module) -> Model:
        """The model whose root this is; made known if it is new, under a name of its own, and its modules are read.

        A name that another model has is numbered: ``net#2``. A model that is known already has its modules read once
        more, for it may have got new ones. So has one that is gone, when its parameters come in another module of its
        class: a container that is made anew for every call is one model.
        """
        known = next((one for one in self.all if one.root() is root), None) or self._same(root)
        if known is not None:
            known.root = weakref.ref(root)
            self._read(known, root)
            return known
        inner = unwrap(root)
        unique = next(one for one in _numbered(name) if one not in self._names)
        model = Model(unique, weakref.ref(root), type(inner).__name__, is_compiled(root))
        self._names.add(unique)
        self._read(model, root)
        self._forget_gone()
        self.all.append(model)
        self.found(model, root)
        return model

    def _forget_gone(self) -> None:
        """Let go of models of which nothing is left: a program may make a thousand, one after the other.

        The first stays, and those of compiled code, of which the end of the record tells.
        """
        alive = {entry.model for entry in self.entries.values()}
        self.all[1:] = [one for one in self.all[1:] if one.name in alive or one.is_compiled]

    def name_of(self, parameter: Tensor) -> tuple[str, str] | None:
        """The model and path of a parameter; None where no model has it.

        Reads all parameters once more before it gives up, at most once in each look: a lookup that fails would
        otherwise cost a walk over all models for each unknown parameter of an optimizer.
        """
        for attempt in range(2):
            for model in self.all:
                found = model.name_of(parameter)
                if found is not None:
                    return model.name, found
            if attempt == 0:
                if self.is_fresh:
                    return None
                self.reread()
        return None

    def reread(self) -> None:
        """Read the parameters of all models once more: they may have been replaced."""
        self.is_fresh = True
        for model in self.all:
            model.reread()

    def stepped_by(self, optimizer: Any) -> set[str]:
        """The names of the models that the parameters of an optimizer belong to, as far as these are known.

        Asked anew when their number has changed, or that of the models found.
        """
        size = sum(len(group["params"]) for group in optimizer.param_groups), len(self._names)
        known = self._stepped_by.get(optimizer)
        if known is None or known[0] != size:
            owners = {self.owner_of(one) for group in optimizer.param_groups for one in group["params"]} - {""}
            known = self._stepped_by[optimizer] = (size[0], len(self._names)), owners
        return known[1]

    def owner_of(self, leaf: Tensor | None) -> str:
        """The name of the model that a parameter belongs to; empty where none has it.

        A model that nobody was there to see called is made known, if a variable of a running function holds it, unless
        the models were given.
        """
        if leaf is None or leaf in self._strangers:
            return ""
        known = next((one.name for one in self.all if one.name_of(leaf)), None)
        if known is not None:
            return known
        found = holder_of_parameter(leaf)
        if found is None or self.is_given:
            roots = [root for one in self.all if (root := one.root()) is not None]
            is_ours = any(one is leaf for root in roots for one in root.parameters())
            self._strangers[leaf] = found is not None and not is_ours
            return ""
        return self.add(*found).name

    def is_of_another(self, leaf: Tensor) -> bool:
        """Whether a parameter, of which ``owner_of`` knows no owner, is that of a module that a running function holds
        and that is no part of ours. What FSDP2 gathers, and what no module holds, is not."""
        return bool(self._strangers.get(leaf))

    def select(self, root: nn.Module) -> set[int] | None:
        """The identities of the modules of ``root`` that the filters leave; None where there is no filter, for all.

        Raises SiteError where a filter names nothing in ``root``.
        """
        if not self._only and not self._skip:
            return None
        everything = {id(module) for _, module, _ in iter_modules(root)}
        kept = {id(found.module) for one in self._only for found in resolve(root, one)} if self._only else everything
        return kept - {id(found.module) for one in self._skip for found in resolve(root, one)}

    def _same(self, root: nn.Module) -> Model | None:
        """The model that is gone, of the class of ``root``, whose parameters were just those of ``root``."""
        kind, parameters = type(unwrap(root)).__name__, list(root.parameters())
        for one in self.all:
            is_like = one.root() is None and one.kind == kind and len(one.parameters) == len(parameters) > 0
            if is_like and all(one.name_of(parameter) is not None for parameter in parameters):
                return one
        return None

    def _read(self, model: Model, root: nn.Module) -> None:
        """Enter a model's parameters, and those of its modules that are not known yet and that somebody can call.

        A filter that names nothing in this model, one of perhaps several, is noted in ``missed``, and none of its
        modules is looked at.
        """
        model.reread()
        try:
            wanted = self.select(root)
        except SiteError as error:  # of one of several models; told when the run ends
            self.missed.note(f"{model.name}: {error}")
            wanted = set()
        self._has_wanted |= wanted is None or bool(wanted)
        routings = routings_of(unwrap(root))
        for path, module, _ in iter_modules(root):
            if module not in self.entries and not is_container(module):
                is_wanted = wanted is None or id(module) in wanted
                self.entries[module] = WatchedModule(
                    model.name, path, _kind_of(module), _channels_of(module), is_wanted, routings.get(module),
                    _flat_beyond(module),
                )  # fmt: skip
        model.graphs.update(trees_of(module for _, module, _ in iter_modules(root)))


def _module_filter(text: str) -> Address:
    """The pattern of a filter. Raises SiteError where it names more than modules: a port, an op, a call or a key."""
    pattern = parse(text)
    if pattern.port != "output" or pattern.op or pattern.call is not None or pattern.key:
        raise SiteError(f"filter {text!r} names more than modules: expected a path or pattern, such as 'layer4.*'")
    return pattern


def _numbered(name: str) -> Iterator[str]:
    yield name
    number = 2
    while True:
        yield f"{name}#{number}"
        number += 1


def _kind_of(module: nn.Module) -> str:
    """What is to be counted of a module's output; see ``WatchedModule.kind``.

    Activations of other libraries are told by the ends of their names, where nothing is inside them.
    """
    name, cls = type(module).__name__, class_of(module)
    if issubclass(cls, _RECTIFIERS) or (not list(module.children()) and name.endswith(_NAMES_OF_RECTIFIERS)):
        return "rectifier"
    if issubclass(cls, nn.Softmax):
        return "softmax" if module.dim in (-1, 3) else ""  # of attention's four dimensions the last
    for kind, classes in (
        ("bounded", (nn.Tanh, nn.Hardtanh, nn.Sigmoid, nn.Hardsigmoid)),
        ("dropout", (nn.Dropout,)),
        ("attention", (nn.MultiheadAttention,)),
        ("mixing", _MIXING),
    ):
        if issubclass(cls, classes):
            return kind
    return "mixing" if name == "Conv1D" else ""  # of transformers' GPT-2: a Linear


def _flat_beyond(module: Any) -> tuple[float, float] | None:
    """Between which values of a bounded function's its slope is 6 % of the largest or more; None of other modules.

    Those with corners are flat at their ends alone.
    """
    cls = class_of(module)
    if issubclass(cls, nn.Hardtanh):
        return float(module.min_val), float(module.max_val)
    known = ((nn.Tanh, (-0.97, 0.97)), (nn.Sigmoid, (0.015, 0.985)), (nn.Hardsigmoid, (0.0, 1.0)))
    return next((ends for one, ends in known if issubclass(cls, one)), None)


def _channels_of(module: Any) -> int | None:
    """The dimension in which the units of a module's output lie; None for one that has none of its own.

    That of convolutions is counted from the end: they may be given a single example without a batch.
    """
    cls = class_of(module)
    if issubclass(cls, nn.modules.conv._ConvNd):
        return -1 - len(module.kernel_size)
    if issubclass(cls, _ALONG_ONE):
        return 1
    return -1 if issubclass(cls, _MIXING) or cls.__name__ == "Conv1D" else None


def units_of(tensor: Tensor, channels_at: int) -> tuple[int, int] | None:
    """How many units a tensor has, and how many neighbours in memory each is wide.

    ``channels_at``: the dimension of the units. None where they do not lie in memory in turns of that width: the kernel
    reads a tensor in the order of its memory, and does not follow strides. Images in ``channels_last`` are known.
    """
    if tensor.dim() < 2 or not tensor.numel():
        return None
    at = channels_at % tensor.dim()
    if tensor.is_contiguous():
        return tensor.shape[at], math.prod(tensor.shape[at + 1 :])
    if at == 1 and tensor.dim() == 4 and tensor.permute(0, 2, 3, 1).is_contiguous():
        return tensor.shape[1], 1
    return None
