"""One program against gaff: what is captured, what is edited, what is taken, and that looking changes nothing.

Each question has one of four answers: equal; refused by name; a ``Failure``; or not asked, where the truth itself has
no answer. Values are compared bit by bit with what passed in an unwatched run; gradients, and what a run under an edit
leaves, within rounding of the truth, whose sums are in another order; a watched run bit by bit with a bare one.
"""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

import gaff
from fuzz.formulas import EDITS, EditKind
from fuzz.program import Program
from fuzz.running import Outcome, execute, quiet, run, run_truth, seed
from fuzz.settings import SETTINGS, Setting, lies_in_parts, means_the_same, parts_mix, whole, why_not
from fuzz.several import Asked, Comparison, drawn, of_one_tensor
from fuzz.tally import Failure, Tally, Where, address_of, identical, show
from fuzz.training import check_training
from fuzz.truth import Change, Event

EDITABLE = ("output", "input", "grad_output", "outer_grad", "grad_input", "input_grad", "grad", "param")


UNUSABLE = (
    "this checkpoint() is not necessary",  # where an edit cuts the graph inside of it
    "A view was created in no_grad mode and its base",  # of which the formula of an edit makes something
    "a view of a leaf Variable that requires grad is being used in an in-place",  # which a skipped module handed on
    "a leaf Variable that requires grad is being used in an in-place",
    "is a view and is being modified inplace",
    "unsupported operand type(s) for *: 'dict'",
    "multiply sequence by non-int",  # a function in the place of a module that is given a container
    "needed for gradient computation has been modified by an inplace",  # which the formula of an edit saves
    "Expected to mark a variable ready only once",
    "object has no attribute '_local_tensor'",  # of DTensor, where an edit leaves nothing that requires grad
    "Cannot manually unshard parameters during forward/backward",  # of the first FSDP, whose backward did not come by
    "Expected to have finished reduction in the prior iteration",  # of DistributedDataParallel, which misses a gradient
    "Your training graph has changed in this iteration",
)
IN_GRAPHS = ("output", "input", "grad_output", "outer_grad", "grad")  # for which compiled code stays compiled


class Checker:
    """A program, its truths, and what gaff says. ``only``: ask for this address alone (to shrink a failure)."""

    def __init__(self, program: Program, only: Failure | None = None, name: str | None = None) -> None:
        setting = SETTINGS[name] if name else None
        self.program = program = setting.program(program) if setting else program
        self.only, self.tally, self.setting, self.name = only, Tally(), setting, name
        self.also_random: Tensor | None = None  # of a run that draws other numbers than the bare one
        text = program.source
        self.has_checkpoint = "checkpoint(" in text or (setting is not None and setting.kind == "checkpoint")
        self.is_reentrant = "use_reentrant=True" in text
        self.has_other_parameters = bool(re.search(r"new_weight\(model|^ +cast\(model", text, re.M))
        self.has_threads = "in_thread(" in text  # runs are seen on one thread: a layer on another marks none
        is_double = ".double()" in text and not re.search(r"autocast|\.float\(\)", text)
        self.rtol, self.atol = (1e-9, 1e-10) if is_double else (2e-2, 2e-3)
        if setting:
            self.rtol, self.atol = max(self.rtol, setting.rtol), max(self.atol, setting.rtol / 10)

    def close(self, one: Tensor | None, other: Tensor | None) -> bool:
        """Equal within rounding; a gradient of zeros is as good as none."""
        if one is None or other is None:
            found = one if other is None else other
            return found is None or not (found.abs() > self.atol).any()
        if one.shape != other.shape:
            return False
        with torch.no_grad():  # of views that torch allows nothing else
            one, other, atol = one.detach().double(), other.detach().double(), self.atol
        if self.rtol >= 1e-3 and one.numel():  # in half precision sums are as exact as their largest term
            atol = max(atol, self.rtol * one.abs().nan_to_num(0, 0, 0).max().item())
        return torch.allclose(one, other, rtol=self.rtol, atol=atol, equal_nan=True)

    def fail(self, kind: str, where: Where, call: int | None, expected: Any, got: Any, edit: str = "") -> None:
        port = where[1] if "/" not in where[0] else f"op {where[1]}"
        self.tally.failures.append(Failure(kind, port, address_of(where, call), show(expected), show(got), edit))

    def check(self, number_of_edits: int) -> Tally:
        try:
            self.run_bare()
        except Exception as error:
            self.tally.rejected[f"{type(error).__name__}: {error}"[:60]] += 1
            return self.tally
        self.tally.programs = 1
        if not self.know_truth():
            return self.tally
        if self.only is None or (not self.only.edit and self.only.kind != "taken"):
            for wanted in self.apart():
                self.check_capture(wanted)
        if self.only is None or self.only.kind == "taken":
            self.check_take()
        if self.only is None or self.only.kind != "several":
            self.check_edits(number_of_edits)
        if self.only is None or self.only.kind == "several":
            self.check_several()
        if self.setting is not None and (self.only is None or self.only.kind in ("watched", "guard")):
            check_training(self.program, self.setting, self.rtol, self.tally)
        return self.tally

    def run_bare(self) -> None:
        """Run the program without gaff, in its setting, too. Raises where it does not run or is not to be compared."""
        if self.setting and (reason := why_not(self.program.source, self.setting)):
            raise RuntimeError(reason)
        is_aliased = "no_grad()" in self.program.source and "Alias.apply" in self.program.source
        is_sharded = self.setting is not None and self.setting.has_parts
        if (is_aliased and is_sharded) or re.search(r"no_grad\(\):\n\s+\w+ = Alias\.apply", self.program.source):
            raise RuntimeError("a custom Function's view, made without grad, which torch lets require grad")
        self.bare = run(self.program)
        if self.setting is not None:
            elsewhere = self.run()
            if not self.is_same(elsewhere):
                raise RuntimeError(f"{self.setting.kind} computes something else")
            self.bare.surroundings = elsewhere.surroundings
        ran = [self.bare, elsewhere] if self.setting is not None else [self.bare]
        if self.has_checkpoint and not all(map(self.is_pure, ran)):
            raise RuntimeError("a checkpoint around what is no pure function")
        if self.setting is not None:  # which may run some forwards again
            self.bare.state = elsewhere.state
            if self.setting.kind == "compile":  # which leaves out numbers that nobody uses, unless it runs eagerly
                self.also_random = elsewhere.random

    def run(self, open_session: Callable[[nn.Module], AbstractContextManager[Any]] | None = None) -> Outcome:
        """The program, in its setting if it has one."""
        return run(self.program, open_session, setting=self.setting)

    def know_truth(self) -> bool:
        """Run both truths, and ask of each whether it leaves what the bare program leaves."""
        try:
            outcome, self.record = run_truth(self.program, is_functional=False)
            self.differs(outcome, "truth", exact=True)
            outcome, self.truth = run_truth(self.program)
            self.differs(outcome, "truth", exact=False)
        except Exception as error:
            if "does not require grad" in str(error) and "no_grad()" in self.program.source:
                self.tally.rejected["a loss on a view made without grad, which torch lets require grad"] += 1
                self.tally.programs = 0
                return False
            self.fail("truth", ("", "truth", ()), None, "the program runs", f"{type(error).__name__}: {error}")
        return not self.tally.failures

    def is_pure(self, outcome: Outcome) -> bool:
        """Whether checkpoints make no difference to ``outcome``, the bare program in its setting."""
        other = run(self.program, without_checkpoints=True)
        return self.is_same(other) and all(self.close(one, other.state[name]) for name, one in outcome.state.items())

    def is_same(self, other: Outcome) -> bool:
        """Whether a run of the bare program has left what ``self.bare`` has."""
        return all(self.close(a, b) for a, b in zip(self.bare.seen, other.seen, strict=True)) and all(
            self.close(self.bare.gradients[name], other.gradients[name]) for name in other.gradients
        )

    def differs(self, outcome: Outcome, kind: str, exact: bool, where: Where = ("", "", ()), edit: str = "") -> bool:
        """Note where a run has left something else than ``self.bare``."""
        return self.compare(self.bare, outcome, kind, exact, where, edit)

    def compare(self, expected: Outcome, got: Outcome, kind: str, exact: bool, where: Where, edit: str = "") -> bool:
        pairs = [(f"seen[{at}]", *pair) for at, pair in enumerate(zip(expected.seen, got.seen, strict=False))]
        pairs += [(f"{name}.grad", one, got.gradients[name]) for name, one in expected.gradients.items()]
        if kind == "effect":
            pairs += [(name, one, got.state[name]) for name, one in expected.state.items()]
            pairs += [("random state", expected.random, got.random)]
            if self.also_random is not None and torch.equal(self.also_random, got.random):
                pairs.pop()
        for name, one, other in pairs:
            is_same = (
                (one is other or (one is not None and other is not None and identical(one, other)))
                if exact
                else self.close(one, other)
            )
            if not is_same:
                self.fail(kind, where, None, f"{name} = {show(one)}", show(other), edit)
                return True
        is_left = kind == "edit" and self.has_checkpoint  # for as long as it may be recomputed
        if kind != "truth" and not is_left and expected.surroundings != got.surroundings:
            name = next(name for name in expected.surroundings if expected.surroundings[name] != got.surroundings[name])
            self.fail(kind, where, None, f"{name} as before", "another one", edit)
            return True
        return False

    # ---------------------------------------------------------------- captures

    def apart(self) -> Iterator[list[tuple[Where, list[Event]]]]:
        """What is asked, together; what comes from outside each by itself, since it gives others a view: a few of them."""
        wanted = self.questions()
        found = [one for one in wanted if one[0][1] != "outer_grad"]
        is_compiled = self.setting is not None and self.setting.kind == "compile"
        in_graphs = [one for one in found if one[0][1] in IN_GRAPHS and "/" not in one[0][0]] if is_compiled else []
        yield from filter(None, (in_graphs, [one for one in found if one not in in_graphs]))
        outer = [one for one in wanted if one[0][1] == "outer_grad"]
        for one in random.Random(self.program.seed).sample(outer, min(2, len(outer))):
            yield [one]

    def check_capture(self, wanted: list[tuple[Where, list[Event]]]) -> None:
        addresses = [address_of(where) for where, _ in wanted]
        everything = ("", "everything" if self.only is None else wanted[0][0][1], ())
        is_exact = wanted[0][0][1] != "outer_grad" and self.setting is None  # others may add up in another order
        try:
            outcome = self.run(lambda model: self.session_of(model, list(dict.fromkeys(addresses))))
        except gaff.GaffError as error:
            self.one_by_one(wanted, error)
            return
        except Exception as error:
            if self.only is None and len(wanted) > 1:
                self.one_by_one(wanted, error)
            else:
                self.crash(wanted[0][0], error)
            return
        self.differs(outcome, "effect", is_exact, where=everything if self.only is None else wanted[0][0])
        for where, events in wanted:
            self.read(outcome.session, where, events)

    def session_of(self, model: nn.Module, addresses: list[str]) -> Any:
        """A capture of all addresses: by reference, with copies at once, or as two sessions around an edit by one.

        Not around an edit where there is a checkpoint: it stays for the recomputation, until the graph is gone.
        """
        how = self.program.seed // 7 % 3
        if how == 2 and len(addresses) > 1 and not self.has_checkpoint:
            return Sessions(model, addresses)
        threads = "own" if self.has_threads or how else "all"
        return gaff.capture(model, gaff.maybe(*addresses), clone=how == 1, threads=threads)

    def one_by_one(self, wanted: list[tuple[Where, list[Event]]], error: BaseException) -> None:
        """A session of all ports failed: each by itself."""
        for where, events in wanted:
            try:
                outcome = self.run(lambda model: gaff.capture(model, gaff.maybe(address_of(where))))
            except gaff.GaffError as refusal:
                self.tally.values += len(events) if events[0].value is not None else 0
                self.tally.gradients += len(events) if events[0].value is None else 0
                self.tally.refuse("capture", refusal, where, events[0])
            except Exception as failure:
                self.crash(where, failure)
            else:
                is_exact = where[1] != "outer_grad" and self.setting is None
                if not self.differs(outcome, "effect", is_exact, where=where):
                    self.read(outcome.session, where, events)

    def crash(self, where: Where, error: BaseException, edit: str = "") -> None:
        self.fail("crash", where, None, "what the bare program does", f"{type(error).__name__}: {error}"[:300], edit)

    def questions(self) -> list[tuple[Where, list[Event]]]:
        """What is asked: values of the recorded run, gradients of the functional one."""
        record, truth = self.record.events, self.truth.events
        found = [(where, events) for where, events in record.items()]
        found += [
            (where, events) for where, events in truth.items() if where[1] not in ("output", "input") or "/" in where[0]
        ]
        found = [(where, events) for where, events in found if not any(event.in_thread for event in events)]
        if ".append(out)" in self.program.source:  # what a hook has collected is the output, not the view of it
            found = [(where, events) for where, events in found if where[1] != "outer_grad"]
        if self.has_other_parameters:
            found = [(where, events) for where, events in found if not is_of_parameter(where)]
        found = [(where, events) for where, events in found if self.means_the_same(where)]
        if self.only is not None:
            address = re.sub(r"@\d+", "", self.only.address)
            exact = [one for one in found if address_of(one[0]) == address]
            return exact or [one for one in found if one[0][1] == self.only.port]
        return found

    def means_the_same(self, where: Where) -> bool:
        return self.setting is None or means_the_same(self.truth.model, where[0], where[1], self.setting)

    def lies_in_parts(self, where: Where) -> bool:
        """Whether what passes there is this rank's part: ``take`` hands out what passes."""
        if self.setting is None or self.setting.kind != "TP":
            return False
        return lies_in_parts(dict(self.truth.model.named_modules()).get(where[0].rpartition(".")[0]))

    def read(self, got: Any, where: Where, events: list[Event]) -> None:
        if where[1] == "grad":
            self.read_parameter(got, where, events[0])
            return
        for event in events:
            self.tally.ops += "/" in where[0]
            if event.value is not None:
                self.read_value(got, where, event)
            else:
                self.read_gradient(got, where, event, events)

    def read_value(self, got: Any, where: Where, event: Event) -> None:
        self.tally.values += 1
        try:
            told = [whole(one) for one in got.run(event.run).all(address_of(where, event.call))]
        except gaff.GaffError as error:
            self.tally.refuse("read", error, where)
            return
        is_equal = self.close if "/" in where[0] or self.setting else identical
        if len(told) != 1 or told[0] is None or not is_equal(event.value, told[0]):
            self.fail("value", where, event.call, event.value, told[0] if len(told) == 1 else told)

    def read_gradient(self, got: Any, where: Where, event: Event, events: list[Event]) -> None:
        self.tally.gradients += 1
        if event.is_leaf and self.setting is not None and self.setting.has_parts:
            self.tally.unclear["a leaf that several runs use: FSDP2 gives each run a tensor of its own"] += 1
            return
        try:
            told = [whole(one) for one in got.run(event.run).all(address_of(where, event.call)) if one is not None]
        except gaff.GaffError as error:
            self.tally.refuse("read", error, where, event)
            return
        true = [event.passes[number] for number in sorted(event.passes)]
        if len(told) == len(true) and all(map(identical, true, told)):
            self.tally.exact_gradients += 1
            return
        if self.alike(true, told):
            return
        has_own_inputs = (
            self.setting is not None and self.setting.has_parts
        )  # FSDP2 gives a unit a tensor for each input
        if event.unclear and (
            event.is_open
            or has_own_inputs
            or any(self.alike([one[number] for number in sorted(one)], told) for one in event.also)
        ):
            self.tally.unclear[event.unclear] += 1
            return
        if event.is_leaf and self.is_reentrant and self.is_told_in_parts(got, where, true):
            self.tally.unclear["a leaf that several reentrant checkpoints used: told in parts"] += 1
            return
        if event.without_grad and not told:
            self.tally.unclear["grad mode was off in this call"] += 1
            return
        kind = "none" if not told else "number" if len(told) == len(true) else "passes"
        self.fail(kind, where, event.call, true[0] if len(true) == 1 else true, told[0] if len(told) == 1 else told)

    def is_told_in_parts(self, got: Any, where: Where, true: list[Tensor]) -> bool:
        """Whether what all runs are told of a leaf is the whole, in parts."""
        try:
            parts = [one for run in range(self.truth.run + 1) for one in got.run(run).all(address_of(where))]
        except gaff.GaffError:
            return False
        parts = [one for one in parts if one is not None]
        return bool(parts) and self.close(sum(parts), sum(true))

    def alike(self, true: list[Tensor], told: list[Tensor]) -> bool:
        """The same gradients in the same order, not counting those that are zero."""
        true, told = ([one for one in some if not self.close(one, None)] for some in (true, told))
        return len(true) == len(told) and all(map(self.close, true, told))

    def read_parameter(self, got: Any, where: Where, event: Event) -> None:
        self.tally.gradients += 1
        told: list[tuple[int, Tensor]] = []
        try:
            for number in range(-1, self.truth.run + 1):
                told += [(number, whole(one)) for one in got.run(number).all(address_of(where)) if one is not None]
        except gaff.GaffError as error:
            self.tally.refuse("read", error, where, event)
            return
        true = [(event.spot.contributors.get(number, set()), event.passes[number]) for number in sorted(event.passes)]
        if self.is_reentrant:  # told in parts, one for each checkpoint
            parts, total = [one for _, one in told], [one for _, one in true]
            if not self.close(sum(parts) if parts else None, sum(total) if total else None):
                self.fail("number", where, None, total, parts)
            return
        true = [(runs, one) for runs, one in true if not self.close(one, None)]
        told = [(number, one) for number, one in told if not self.close(one, None)]
        for runs, one in true:
            alike = [pair for pair in told if self.close(one, pair[1])]
            labelled = [pair for pair in alike if not runs or pair[0] in runs or (self.has_threads and pair[0] == -1)]
            if not labelled:
                kind = "run" if alike else "none" if not told else "number"
                self.fail(kind, where, None, f"with run {sorted(runs)}: {show(one)}", [(n, show(t)) for n, t in told])
                return
            told = [pair for pair in told if pair is not labelled[0]]
        if told:
            self.fail("passes", where, None, [one for _, one in true], [one for _, one in told])
            return
        self.tally.exact_gradients += 1

    # ---------------------------------------------------------------- take

    def check_take(self) -> None:
        found = [(where, events) for where, events in self.record.events.items()
                 if where[1] in ("output", "input") and events[0].run == 0 and not events[0].in_thread]  # fmt: skip
        found = [one for one in found if self.means_the_same(one[0]) and not self.lies_in_parts(one[0])]
        if self.only is not None:
            found = [one for one in found if address_of(one[0]) == self.only.address]
        rng = random.Random(self.program.seed)
        for where, events in rng.sample(found, min(2, len(found))):
            self.tally.taken += 1
            address = address_of(where)
            try:
                told = taken(self.program, address, self.setting)
            except gaff.GaffError as error:
                self.tally.refuse("take", error, where)
                continue
            except Exception as error:
                if "no_grad()" in self.program.source and any(word in str(error) for word in UNUSABLE):
                    continue  # with a graph, which the program has not made there
                self.crash(where, error)
                continue
            is_equal = self.close if self.setting else identical
            if told is not None and not is_equal(events[0].value, told):
                self.fail("taken", where, None, events[0].value, told)

    # ---------------------------------------------------------------- edits

    def check_several(self) -> None:
        """Ask what several sessions at once may not change for one another.

        Of every other program, and not where there is a checkpoint: an edit stays for the recomputation.
        """
        if self.has_checkpoint or self.has_threads or self.has_other_parameters:
            return
        if self.only is not None:
            Comparison(self, Asked(*ast.literal_eval(self.only.edit))).check()
            return
        if self.program.seed // 2 % 2:
            return
        places = [where for where in {**self.record.events, **self.truth.events} if self.means_the_same(where)]
        asked = drawn(places, of_one_tensor(self.record.events), self.program.seed)
        if asked is not None:
            Comparison(self, asked).check()

    def check_edits(self, number: int) -> None:
        if self.setting is not None and self.setting.kind == "TP" and "create_graph=True" in self.program.source:
            return  # torch's collectives lose second derivatives, which the bare run may not show: they may be zero
        rng = random.Random(self.program.seed)
        events = {**self.record.events, **self.truth.events}
        if ".append(out)" in self.program.source:
            events = {where: told for where, told in events.items() if where[1] != "outer_grad"}
        if self.has_other_parameters:
            events = {where: told for where, told in events.items() if not is_of_parameter(where)}
        places = [where for where, told in events.items() if where[1] in EDITABLE
                  and not any(one.in_thread or (one.value is not None and not one.value.is_floating_point()) for one in told)]  # fmt: skip
        places = [where for where in places if self.means_the_same(where)]
        if self.only is not None:
            if self.only.edit:
                where = next((one for one in places if address_of(one) == self.only.address), None)
                kind = next(one for one in EDITS if one.text == self.only.edit)
                if where is not None:
                    self.check_edit(where, kind)
            return
        by_port: dict[str, list[Where]] = {}
        for where in places:
            by_port.setdefault(f"{where[1]} {'/' in where[0]}", []).append(where)
        for _ in range(number if places else 0):
            where = rng.choice(by_port[rng.choice(sorted(by_port))])
            shape = self.shape_at(where)
            fits = [kind for kind in EDITS if kind.width is None or (len(shape) == 2 and shape[-1] == kind.width)]
            is_module = where[1] == "output" and "/" not in where[0] and not where[2]
            fits = [kind for kind in fits if is_module or not kind.is_skip]
            self.check_edit(where, rng.choice(fits))

    def shape_at(self, where: Where) -> torch.Size:
        """The shape of what passes there; an empty one where several shapes do, or it is not known."""
        path, port, key = where
        named = {"grad": "param", "grad_output": "output", "outer_grad": "output", "input_grad": "input",
                 "grad_input": "input"}  # fmt: skip
        for events in (self.record.events, self.truth.events):
            shapes = {event.value.shape for event in events.get((path, named.get(port, port), key), [])}
            if len(shapes) == 1:
                return shapes.pop()
        return torch.Size()

    def check_edit(self, where: Where, kind: EditKind) -> None:
        self.tally.edits += 1
        change = Change(*where, kind.value, kind.gradient, kind.is_skip)
        address, expected = address_of(where), None
        beside: list[tuple[Where, list[Event]]] = []
        try:
            expected, edited = run_truth(self.program, change=change)
            expected.surroundings = self.bare.surroundings
            beside = self.beside(where, edited.events)
        except Exception:
            expected = None  # the program does not survive the edit
        try:
            space = {"gaff": gaff, "torch": torch, "__name__": "program"}
            edit = eval(kind.text, space)
            got = self.run(lambda model: self.editing(model, address, edit, beside))
        except gaff.GaffError as error:
            event = self.truth.events.get(where, [None])
            unclear = next((one for one in event if one is not None and one.unclear), None)
            self.tally.refuse("edit", error, where, unclear)
            return
        except Exception as error:
            if any(word in str(error) for word in UNUSABLE):
                self.tally.unclear["an edit of which torch says that it cannot be"] += 1
            elif expected is not None:
                self.crash(where, error, kind.text)
            return
        if expected is None:
            self.tally.edits -= 1
        elif reason := self.why_no_truth(where, kind, expected):
            self.tally.unclear[reason] += 1
        elif not self.compare(expected, got, "edit", False, where, kind.text):
            self.read_beside(got, beside)

    def read_beside(self, got: Outcome, beside: list[tuple[Where, list[Event]]]) -> None:
        """Compare what a capture beside an edit has been told."""
        for where, events in beside:
            for event in events:
                self.read_gradient(got.session, where, event, events)

    def beside(self, where: Where, events: dict[Where, list[Event]]) -> list[tuple[Where, list[Event]]]:
        """Gradients at outputs that a capture is asked for while a value is edited, in every other program.

        Not where there is a checkpoint: an edit stays for the recomputation.
        """
        is_asked = where[1] in ("output", "input") and "/" not in where[0] and self.program.seed % 2
        if not is_asked or self.has_checkpoint or self.only is not None:
            return []
        return [
            (one, told)
            for one, told in events.items()
            if one[1] == "grad_output" and "/" not in one[0] and self.means_the_same(one)
            and not any(event.in_thread for event in told)
        ]  # fmt: skip

    def editing(self, model: nn.Module, address: str, edit: Any, beside: list[tuple[Where, list[Event]]]) -> Any:
        """An edit, and beside it a capture where something is asked for, the one or the other opened first."""
        session = gaff.edit(model, {gaff.maybe(address): edit})
        if not beside:
            return session
        capture = gaff.capture(model, gaff.maybe(*dict.fromkeys(address_of(one) for one, _ in beside)))
        return Beside(capture, [capture, session] if self.program.seed // 2 % 2 else [session, capture])

    def why_not_averaged(self, expected: Outcome) -> str:
        """Why DistributedDataParallel may leave other gradients than one process; empty where it may not."""
        if self.setting is None or self.setting.kind != "DDP" or "unused" in (self.name or ""):
            return ""
        gone = [
            name for name, one in expected.gradients.items() if one is None and self.bare.gradients[name] is not None
        ]
        return "DistributedDataParallel does not average where a gradient is missing" if gone else ""

    def why_no_truth(self, where: Where, kind: EditKind, expected: Outcome) -> str:
        """Why an edit may leave something else than its formula does; empty where it may not."""
        is_op = "/" in where[0]
        if reason := self.why_not_averaged(expected):
            return reason
        has_own_inputs = self.setting is not None and self.setting.has_parts
        brings_zeros = has_own_inputs or (self.setting is not None and self.setting.kind == "compile")
        if brings_zeros and "grad" in where[1] and not any(one.passes for one in self.truth.events.get(where, [])):
            return "FSDP2 and compiled code may bring zeros where one process has no gradient"
        is_given_back = where[1] in ("grad_output", "outer_grad") and not is_op
        if is_given_back and self.truth.model.get_submodule(where[0])._forward_hooks:
            return "edit of a gradient at an output that a hook replaces"
        if is_op and kind.text == "gaff.edits.stop()" and re.search(r"\w_\(|\] = |[-+*]= ", self.program.source):
            return "what is written into a view behind which no gradient goes"
        is_unclear = any(event.unclear or event.without_grad for event in self.truth.events.get(where, []))
        return "edit" if is_unclear else ""


def is_of_parameter(where: Where) -> bool:
    """Whether a site is about a parameter, also as the input of a parametrisation."""
    return where[1] in ("param", "grad") or "parametrizations" in where[0]


class Together:
    """Several sessions, opened in their order, and closed in the same one."""

    sessions: list[Any]

    def __enter__(self) -> Any:
        with ExitStack() as opening:
            for session in self.sessions:
                opening.enter_context(session)
            opening.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        closing = ExitStack()  # all of them, also where one refuses
        for session in reversed(self.sessions):
            closing.push(session)
        closing.__exit__(*error)


class Sessions(Together):
    """Two captures, each of every other address, and between them an edit by one; closed in the order of opening."""

    def __init__(self, model: nn.Module, addresses: list[str]) -> None:
        self.captures = [gaff.capture(model, gaff.maybe(*addresses[at::2])) for at in range(2)]
        edit = gaff.edit(model, {gaff.maybe("**.weight:grad"): gaff.edits.scale(1.0)})
        self.sessions = [self.captures[0], edit, self.captures[1]]
        self.holder = {address: self.captures[at] for at in range(2) for address in addresses[at::2]}

    def run(self, number: int) -> Any:
        """What both captures have of a run."""
        return SimpleNamespace(all=lambda address: self.holder[re.sub(r"@\d+", "", address)].run(number).all(address))


class Beside(Together):
    """A capture and an edit, in the order in which they are opened."""

    def __init__(self, capture: Any, sessions: list[Any]) -> None:
        self.run = capture.run
        self.sessions = sessions


class Grabbed(BaseException):
    """The first call of the model: its arguments."""


def taken(program: Program, address: str, setting: Setting | None = None) -> Any:
    """What ``gaff.take`` makes of the first call of the model; None where the driver never calls it."""
    space = execute(program)
    model = space["build"]()
    used = setting.prepare(model) if setting else model
    seed(program)

    class Stand:
        def __getattr__(self, name: str) -> Any:
            return getattr(model, name)

        def __deepcopy__(self, memo: Any) -> nn.Module:
            return deepcopy(model)

        def __reduce__(self) -> Any:
            return deepcopy, (model,)

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            raise Grabbed(args, kwargs)

    is_replicated = setting is not None and setting.kind == "DDP"  # of which take wants that nothing is trained
    with quiet(), parts_mix(setting), setting.around() if setting else nullcontext():
        try:
            space["drive"](Stand())
        except Grabbed as found:
            extract = gaff.take(setting.asked(used) if setting else used, address)
            with torch.set_grad_enabled(torch.is_grad_enabled() and not is_replicated):
                return whole(next(iter(extract(*found.args[0], **found.args[1]).values())))
    return None


def check(program: Program, only: Failure | None = None, edits: int = 3, setting: str | None = None) -> Tally:
    """Everything about one program, with so many random edits; or what ``only`` asks for.

    In one of the ``SETTINGS``, for which each rank asks alike, only the ports are asked for that mean the same.
    """
    with one_thread():
        return Checker(program, only, setting).check(edits)


@contextmanager
def one_thread() -> Iterator[None]:
    """Small tensors are quicker on one thread, and sums keep their order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
