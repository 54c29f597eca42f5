"""The model of a program, trained for three steps: what ``gaff.watch`` tells of it, and where ``gaff.guard`` finds a NaN.

Asked in a setting and in one process without it. Numbers of a watched run are means, roots of mean squares and extremes,
which ranks with the same rows have in common with one process; parts are put together by ``rank="all"``.
"""

from __future__ import annotations

import math
import os
import random
import shutil
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import gaff
from fuzz.program import Program
from fuzz.running import execute, quiet
from fuzz.settings import Setting, lies_in_parts, parts_mix
from fuzz.tally import Tally

STEPS = 3
REFUSED = "refused:"
STATS = ("mean", "rms", "min", "max")
Numbers = dict[tuple[str, str], list[tuple[int, float]]]  # by site and statistic: steps and values


def trained(program: Program, setting: Setting | None, look: Any, planted: str = "") -> list[float]:
    """The losses of three steps of the program's model; ``look`` opens what looks at them.

    ``planted``: the parameter that holds a NaN from the beginning.
    """
    space = execute(program)
    model: nn.Module = space["build"]()
    if planted:
        with torch.no_grad():
            dict(model.named_parameters())[planted].flatten()[0] = math.nan
    dtype = next(model.parameters()).dtype
    used = setting.prepare(model) if setting else model
    optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], 0.01)
    torch.manual_seed(program.seed)
    around = setting.around() if setting else nullcontext()
    with quiet(), parts_mix(setting), around, look(setting.asked(used) if setting else used, optimizer):
        losses = []
        for _ in range(STEPS):
            loss = used(torch.randn(2, 4, dtype=dtype)).pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
    return losses


def numbers(program: Program, setting: Setting | None) -> Numbers:
    """What a watched run tells of every site."""
    is_spread = setting is not None and setting.ranks > 0
    owner = os.environ["TORCHELASTIC_RUN_ID"] if is_spread else os.getpid()
    folder = Path(tempfile.gettempdir()) / f"fuzz-{owner}-{program.seed}"
    try:
        trained(program, setting, lambda model, optimizer: gaff.watch(model, optimizer, out=folder, every=1))
        if is_spread:
            dist.barrier()
        record = gaff.load(folder)
        return {(site, stat): series(record, site, stat, is_spread) for site in record.sites for stat in STATS}
    finally:
        if is_spread:
            dist.barrier()
        shutil.rmtree(folder, ignore_errors=True)


def is_of_part(path: str, modules: dict[str, nn.Module]) -> bool:
    """Whether a module is given or makes a part; what torch makes of it around the module is not looked at."""
    around = modules.get(path.rpartition(".")[0])
    return lies_in_parts(around) or isinstance(modules[path], (nn.Linear, nn.LayerNorm))


def series(record: Any, site: str, stat: str, is_spread: bool) -> list[tuple[int, float]]:
    """Steps and values, put together of all ranks; where these share their rows or hold what only they have, of one."""
    try:
        found = record.series(site, stat, rank="all" if is_spread else record.ranks[0])
    except gaff.RecordError as error:
        if not any(words in str(error) for words in ("share rows", "these are no replicas of one tensor")):
            raise
        found = record.series(site, stat, rank=0)
    return list(zip(found.steps, found.values, strict=True))


def first_bad(program: Program, setting: Setting | None, planted: str) -> str:
    """The parameter that ``gaff.guard`` names, or what it said instead."""
    try:
        trained(program, setting, lambda model, optimizer: gaff.guard(model), planted)
    except gaff.NonFiniteError as error:
        told = str(error).split("\n")[0]
        if "could not be run again" in str(
            error
        ):  # as where torch's replicas miss a parameter that the NaN has cut off
            return f"{REFUSED} the batch could not be run again"
        return planted if told.startswith(f"NaN was there before the step, in {planted}:param") else told
    except gaff.PlanError as error:
        return f"{REFUSED} {str(error)[:60]}"
    return "nothing"


def compare(
    expected: Numbers, got: Numbers, modules: dict[str, nn.Module], setting: Setting, rtol: float, tally: Tally
) -> None:
    """Note the first number that is another one, and how many were compared."""
    for (site, stat), wanted in expected.items():
        path, _, port = site.partition(":")
        if setting.casts and port == "input":
            continue  # in one process it is what another module returned, which is not looked at again
        owner = path if path in modules else path.rpartition(".")[0]
        if setting.kind == "TP" and (owner == path or setting.has_rows) and is_of_part(owner, modules):
            continue  # the numbers are those of this rank's part
        told = dict(got.get((site, stat), []))
        largest = max((abs(value) for _, value in expected[site, "max"] + expected[site, "min"]), default=0.0)
        for step, value in wanted:
            near = {"rel_tol": max(rtol, 1e-4), "abs_tol": max(rtol, 1e-5) * max(largest, 1.0)}
            if step not in told or not math.isfinite(value):  # of inf and inf some make NaN
                tally.unseen[site.partition(":")[2]] += 1
            elif not math.isclose(told[step], value, **near):
                tally.fail("watched", stat, f"{site} at step {step}", value, told[step])
                return
            else:
                tally.numbers += 1


def check_training(program: Program, setting: Setting, rtol: float, tally: Tally) -> None:
    """Ask both of a program that can be trained. Notes failures in ``tally``, and how much was asked."""
    try:
        alone = trained(program, None, lambda *_: nullcontext())
        there = trained(program, setting, lambda *_: nullcontext())
    except Exception:  # it cannot be trained in this way
        return
    if not all(math.isclose(a, b, rel_tol=max(rtol, 1e-8), abs_tol=1e-10) for a, b in zip(alone, there, strict=True)):
        return  # the setting itself trains otherwise, as where a list holds a weight that is sharded elsewhere
    expected, got = numbers(program, None), numbers(program, setting)
    tally.watched += 1
    modules = dict(execute(program)["build"]().named_modules())
    has_hooks = any(one._forward_hooks for one in modules.values())
    if setting.kind != "compile" or not has_hooks:  # these come after a look eagerly, and before it in a graph
        compare(expected, got, modules, setting, rtol, tally)
    if setting.kind == "TP" and has_hooks:
        return  # what a hook makes of a part is no op of a module
    named = [name for name, one in execute(program)["build"]().named_parameters() if one.requires_grad]
    planted = random.Random(program.seed).choice(named)
    try:
        trained(program, None, lambda *_: nullcontext(), planted)
    except RuntimeError:  # what it computes of a NaN has no gradient
        return
    if (expected_bad := first_bad(program, None, planted)) == planted:
        told_bad = first_bad(program, setting, planted)
        if told_bad.startswith(REFUSED):
            tally.refused[f"guard: {told_bad}"] += 1
            return
        tally.guarded += 1
        if told_bad != expected_bad:
            tally.fail("guard", "param", planted, expected_bad, told_bad)
