"""``python -m fuzz [--minutes 1] [--seed N] [--count N] [--inside SETTING]``: fresh programs, and a table of what came out.

A setting is one of ``settings``, or the first word of several, from which the seed draws. Those of several ranks are
run by torchrun: ``python -m fuzz`` starts it.

Exits with 1 where gaff failed in a way that is not known (``known.py``); each sort of failure is shown once, as a
small script. ``--write DIR`` also writes these scripts.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fuzz.check import check
from fuzz.grammar import generate
from fuzz.known import known
from fuzz.program import Program
from fuzz.settings import SETTINGS, drawn, leave, ranks_of, start_ranks, variants
from fuzz.shrink import script, shrink
from fuzz.tally import COUNTS, Failure, Tally

RECORD = Path(__file__).parent / "counts.json"  # how much was asked in each kind of setting


def main() -> int:
    parser = argparse.ArgumentParser(prog="fuzz", description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, help="of the first program; fresh ones if left out")
    parser.add_argument("--count", type=int, help="how many programs, instead of minutes")
    parser.add_argument("--write", type=Path, help="a folder for the scripts of failures")
    parser.add_argument("--record", action="store_true", help="add what was asked to counts.json, for docs/limits.md")
    parser.add_argument("--all", action="store_true", help="also shrink and show known failures")
    names = {one.partition(":")[0] for one in SETTINGS}
    parser.add_argument("--inside", choices=[*SETTINGS, *sorted(names - {*SETTINGS})], help="where programs run")
    options = parser.parse_args()
    ranks = ranks_of(options.inside) if options.inside else 0
    if ranks and not dist.is_torchelastic_launched():
        return on_ranks(ranks)
    if ranks:
        start_ranks()
    first = agreed(options.seed if options.seed is not None else random.SystemRandom().randrange(10**9))
    end = time.monotonic() + 60 * options.minutes
    total, findings = Tally(), Counter()
    found: dict[tuple[str, ...], tuple[Program, Failure, str | None]] = {}
    seeds: dict[tuple[str, ...], list[int]] = {}
    seed = first
    while agreed(time.monotonic() < end) if options.count is None else (seed < first + options.count):
        program = generate(seed)
        setting = drawn(options.inside, seed) if options.inside else None
        if setting and SETTINGS[setting].kind == "compile":
            torch._dynamo.reset()
        tally = check(program, setting=setting)
        total.add(tally)
        for failure in tally.failures:
            name = known(program, failure)
            findings[name or "new"] += 1
            if name is None or options.all:
                found.setdefault((name or "", *failure.sort), (program, failure, setting))
                seeds.setdefault((name or "", *failure.sort), []).append(seed)
        seed += 1
    if not ranks or dist.get_rank() == 0:
        if options.record:
            record(SETTINGS[variants(options.inside)[0]].kind if options.inside else "eager", total)
        where = f", in {', '.join(variants(options.inside))}" if options.inside else ""
        print(f"seeds {first} to {seed - 1}{where}")
        print(table(total, findings))
        show(found, options.write)
        for sort, others in seeds.items():
            print(f"{' '.join(filter(None, sort))}: seeds {', '.join(map(str, dict.fromkeys(others)))}")
    return 1 if findings["new"] else 0


def show(found: dict[tuple[str, ...], tuple[Program, Failure, str | None]], folder: Path | None) -> None:
    """Print one failure of each sort as a small script, and write it into ``folder`` if there is one."""
    for (name, *_), (program, failure, setting) in found.items():
        is_here = setting is None or not SETTINGS[setting].ranks  # others would have to shrink it together
        small, failure = shrink(program, failure, setting=setting) if is_here else (program, failure)
        where = f"{f' in {setting}' if setting else ''}{f', known: {name}' if name else ''}"
        text = f"# seed {program.seed}{where}\n{script(small, failure)}"
        print(f"\n{'-' * 100}\n{text}# expected {failure.expected}\n# got      {failure.got}")
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{failure.kind}_{failure.port}_{program.seed}.py".replace(" ", "_")).write_text(text)


def on_ranks(ranks: int) -> int:
    """The same command on so many processes of this machine."""
    run = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(ranks),
    ]
    return subprocess.run([*run, "-m", "fuzz", *sys.argv[1:]], check=False).returncode


def agreed(value: Any) -> Any:
    """What the first rank has, on all of them."""
    if not dist.is_initialized():
        return value
    held = [value]
    dist.broadcast_object_list(held)
    return held[0]


def record(kind: str, total: Tally) -> None:
    """Add the numbers of a run to those of earlier ones in this kind of setting."""
    known = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    before = known.get(kind, {})
    told = {name: getattr(total, name) for name in COUNTS}
    told |= {"failures": len(total.failures), "refused": sum(total.refused.values())}
    known[kind] = {name: before.get(name, 0) + number for name, number in told.items()}
    RECORD.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")


def table(total: Tally, findings: Counter[str]) -> str:
    """What was asked and how it ended, as text."""
    refused = Counter()
    for reason, number in total.refused.items():
        refused[reason.split()[0]] += number
    gradients = sum(
        number
        for reason, number in total.refused.items()
        if "grad" in reason.split(":")[0] and reason.startswith("read")
    )
    rows = [
        ("programs", total.programs, f"{sum(total.rejected.values())} more fail bare"),
        ("values", total.values, "bit by bit"),
        (
            "gradients",
            total.gradients,
            f"{total.exact_gradients} of them bit by bit, {percent(gradients, total.gradients)} refused",
        ),
        ("edits", total.edits, f"{percent(refused['edit'], total.edits)} refused"),
        ("taken", total.taken, ""),
        ("at ops", total.ops, "of the values and gradients"),
        ("watched", total.watched, f"trained; {total.numbers} statistics compared"),
        ("guarded", total.guarded, "with a NaN in a parameter"),
        ("several", total.several, "values and gradients told beside two sessions that edit, whoever came first"),
        ("failures", len(total.failures), f"{findings['new']} new"),
    ]
    lines = [f"{name:10} {number:8}  {remark}" for name, number, remark in rows]
    titles = {
        "refused": total.refused,
        "without one truth": total.unclear,
        "fail bare": total.rejected,
        "not watched": total.unseen,
        "failures": findings,
    }
    for title, counts in titles.items():
        lines += [f"{title}:"] * bool(counts)
        lines += [f"  {number:6}  {name}" for name, number in counts.most_common()]
    return "\n".join(lines)


def percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.2f} %" if whole else "none"


if __name__ == "__main__":
    leave(main())
