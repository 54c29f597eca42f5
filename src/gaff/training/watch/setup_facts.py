"""How a training is set up, as far as torch's own functions tell it: targets of losses, DataLoaders, what is loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from gaff.address.resolve import join, unwrap
from gaff.compat import elements
from gaff.compat.compiler import has_asked_to_compile
from gaff.engine.process.functions import (
    ATTENTION,
    DROPOUTS,
    LOSSES,
    SIGNED,
    FunctionCalls,
    calling_module,
    drops,
    loss_calls,
)
from gaff.training.watch import step_facts, target_facts
from gaff.training.watch.batch_layout import BatchLayout
from gaff.training.watch.models import Models
from gaff.training.watch.shield import Shield
from gaff.training.watch.token_facts import TokenFacts
from gaff.training.watch.variable_names import caller

_OF_ATTENTION = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
_SAMPLERS = (SequentialSampler, RandomSampler, DistributedSampler)
_TOKENS, _LAYOUT = "sequences of tokens", "what lies where in a batch"
_MOST_TARGETS = 8  # calls of loss functions in a step


@dataclass(slots=True)
class _Seen:
    """What targets have come in all looks, of each loss by itself: by the place in the program where its function is
    called, and the ``model`` that ran last."""

    model: str = ""
    pools: dict[Any, dict[tuple[str, int], Tensor]] = field(default_factory=dict)

    def here(self) -> dict[tuple[str, int], Tensor]:
        """Those of the loss function that is being called."""
        return self.pools.setdefault((caller(), self.model), {})


class SetupFacts:
    """Collects them for the step that is looked at; between looks only DataLoaders and ``load_state_dict`` are heard.

    ``attended`` is told of each fused attention meanwhile, as ``FunctionCalls`` tells it. Used on the thread that
    trains.
    """

    def __init__(self, models: Models, shield: Shield, attended: Callable[..., None]) -> None:
        self._models = models
        self._attempt = shield.attempt
        self._note_target = shield.around(self._target)
        self._attended = attended
        heard = FunctionCalls((ATTENTION,), shield.around(self._attention_called), is_after=True)
        dropped = FunctionCalls(DROPOUTS, shield.around(self._dropped))
        self._calls = loss_calls(self._loss_called, {*LOSSES, *SIGNED}), heard, dropped
        self._shares: dict[tuple[str, str], float] = {}  # that dropouts set to zero, by model and path
        self._targets: list[dict[str, Any]] = []
        self._seen = _Seen()
        self._tokens = TokenFacts()
        self._layout = BatchLayout()
        # what the look before was given, as checksums, and how many looks before that the same; tensors of a device's
        self._latest: tuple[list[str | Tensor], int | Tensor] = [], 0
        self._given: list[str | Tensor] = []  # those of this one
        self._rows = 0  # of what was given first
        # of DataLoaders: the "count" of batches of the largest, how often it has "begun", and how many rows one has at
        # "most"; of a sampler what rules ask
        self._loader: dict[str, int] = {}
        self._unmatched: WeakKeyDictionary[nn.Module, dict[str, Any]] = WeakKeyDictionary()

    def look(self, *, is_on: bool) -> None:
        """A look begins, or has ended. torch's functions are followed meanwhile, unless code is compiled somewhere."""
        for calls in self._calls:
            calls.switch(is_on=is_on and not has_asked_to_compile())
        if is_on:
            self._targets, self._tokens, self._layout, self._shares = [], TokenFacts(), BatchLayout(), {}
            self._latest, self._given = (self._given or self._latest[0], self._latest[1]), []

    def batch_given(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """A model is called that trains, in a step that is looked at: batches get a checksum.

        Parts that no file has matched, and that somebody has filled by hand before the first one, are in order.
        """
        for known, told in list(self._unmatched.items()):
            if told.get("digests", ()) and told.pop("digests") != step_facts.digests(known):
                del self._unmatched[known]
        entry = self._models.entries.get(module)
        self._seen.model = entry.model if entry is not None else ""
        self._rows = self._rows if self._given else step_facts.batch_size(args, kwargs)
        self._mark(args, kwargs)
        self._attempt(_TOKENS, self._tokens.given, module, args, kwargs)
        self._attempt(_LAYOUT, self._layout.given, module, args, kwargs)

    def returned(self, module: nn.Module, output: Any) -> None:
        """A module has returned, in a step that is looked at."""
        self._attempt(_TOKENS, self._tokens.returned, module, output)

    def iterated(self, loader: Any) -> None:
        """A DataLoader begins anew; one whose length is not known does not count."""
        batches, known = _length_of(loader) if torch.is_grad_enabled() else 0, self._loader.get("count", 0)
        if batches >= max(2, known):
            begun = self._loader["begun"] + 1 if batches == known else 1
            self._loader |= {"count": batches, "begun": begun, "most": loader.batch_size or 0}
        self._loader |= _missing_weights(loader)

    def loaded(self, module: nn.Module, keys: Any) -> None:
        """``load_state_dict`` has run: note a module of whose parameters it found none, but others that it has not.

        What is loaded later into it, into a part of it, or into what it is a part of, takes that back.
        """
        names = [name for name, _ in module.named_parameters()]
        missing = set(keys.missing_keys)
        is_unmatched = names and keys.unexpected_keys and {*names, *_buffers_of(module)} <= missing
        for known in list(self._unmatched) if not is_unmatched else ():
            if any(one is known for one in module.modules()) or any(one is module for one in known.modules()):
                del self._unmatched[known]
        if is_unmatched:
            told = {"parameters": len(names), "missing": names[0], "given": keys.unexpected_keys[0]}
            self._unmatched[module] = {**told, "digests": step_facts.digests(module)}

    def _mark(self, args: Any, kwargs: Any) -> None:
        on_device = step_facts.device_checksum(args, kwargs)
        mark = step_facts.fingerprint(args, kwargs) if on_device is None else on_device
        if (on_device is not None or mark) and len(self._given) < _MOST_TARGETS:
            self._given.append(mark)

    def take(self) -> dict[str, Any]:
        """The facts of the step that was looked at; tensors in them may be on a device."""
        facts: dict[str, Any] = {"targets": tuple(self._targets), "dropped": self._shares,
                                 **(self._attempt(_TOKENS, self._tokens.take) or {}),
                                 **(self._attempt(_LAYOUT, self._layout.take) or {})}  # fmt: skip
        entries = self._models.entries
        unmatched = [(entries.get(unwrap(module)), told) for module, told in self._unmatched.items()]
        facts["unmatched"] = [{**told, "model": one.model, "path": one.path} for one, told in unmatched if one]
        if self._given:
            facts["fingerprint"] = self._given[0]
            before, repeats = self._latest
            is_same: Any = len(self._given) == len(before)
            for one, other in zip(self._given, before, strict=False):
                is_same = is_same & (type(one) is type(other) and one == other)
            facts["repeats"] = (repeats + 1) * is_same
            self._latest = before, facts["repeats"]
        if "count" in self._loader:
            facts["batches"] = {**self._loader, "rows": self._rows, "given": tuple(self._given)}
        if "weights" in self._loader:
            facts["sampler"] = dict(self._loader)
        return facts

    def _dropped(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A dropout is called, by a module of its own or as a function inside another."""
        module = calling_module() if torch.is_grad_enabled() else None
        entry = self._models.entries.get(module) if module is not None else None
        if entry is not None and (share := drops(name, args, kwargs)):
            self._shares[entry.model, entry.path] = max(share, self._shares.get((entry.model, entry.path), 0.0))

    def _loss_called(self, name: str, output: Any, target: Tensor, known: dict[str, Any]) -> Tensor:
        self._note_target(name, output, target, known)
        return target

    def _target(self, name: str, output: Any, target: Tensor, known: dict[str, Any]) -> None:
        is_plain = type(target) is Tensor and elements.is_plain(target) and elements.is_readable(target)
        is_constant = not target.requires_grad or name == "kl_div"  # of which each side may teach the other
        is_wanted = torch.is_grad_enabled() and is_constant and len(self._targets) < _MOST_TARGETS
        if is_plain and is_wanted:
            told = self._attempt("targets", target_facts.target_of, name, output, target, self._seen.here(), known)
            self._targets += [told] if told is not None else []
            if self._given and (not target.dim() or len(target) != self._rows):  # as of a part of what was given
                self._mark((target,), {})
            if name in target_facts.OVER_CLASSES:
                self._attempt(_TOKENS, self._tokens.target, target)
                self._attempt(_LAYOUT, self._layout.target, target, known)

    def _attention_called(self, name: str, args: Any, kwargs: Any, output: Any) -> None:
        if torch.is_grad_enabled():
            known = {**dict(zip(_OF_ATTENTION, args, strict=False)), **kwargs}
            query, key, mask = (known.get(one) for one in ("query", "key", "attn_mask"))
            is_causal = bool(known.get("is_causal", False))
            self._attempt(_TOKENS, partial(self._tokens.attended, query, key, mask, is_causal=is_causal))
            self._attempt(_LAYOUT, partial(self._layout.attended, query, key, mask, is_causal=is_causal))
        self._attended(name, args, kwargs, output)


def _buffers_of(module: nn.Module) -> set[str]:
    """The names of the buffers of a module that its state dict must have.

    Not of those that count batches, which batch norm gives a state dict that is older than they are, or that has none.
    """
    return {
        join(path, name)
        for path, one in module.named_modules()
        for name in one._buffers
        if name not in one._non_persistent_buffers_set
        and one._buffers[name] is not None
        and name != "num_batches_tracked"
    }


def _length_of(loader: Any) -> int:
    """How many batches a DataLoader has; 0 where only somebody else's code could tell, which nobody has asked.

    A data set is asked for its length, as torch's own samplers do when the loader begins.
    """
    batches = loader.batch_sampler
    is_own = type(loader).__len__ is DataLoader.__len__ and type(loader.sampler) in _SAMPLERS
    if not is_own or type(batches) not in (BatchSampler, type(None)) or isinstance(loader.dataset, IterableDataset):
        return 0
    try:
        return len(loader)
    except Exception:  # noqa: BLE001  # whatever it is, the program meets it when its loader asks
        return 0


def _missing_weights(loader: Any) -> dict[str, int]:
    """How many ``weights`` a WeightedRandomSampler has, and ``examples`` the data set of its DataLoader, if these are
    more; empty where there is none such."""
    sampler = loader.sampler
    if type(sampler) is not WeightedRandomSampler:
        return {}
    try:
        weights, examples = len(sampler.weights), len(loader.dataset)
    except Exception:  # noqa: BLE001  # somebody else's code, which nobody else has asked
        return {}
    return {"weights": weights, "examples": examples} if weights < examples else {}
