"""``python -m fuzz [--minutes 1] [--seed N] [--count N] [--inside SETTING]``: fresh programs, and a table of what came out.

Exits with 1 where gaff failed in a way that is not known (``known.py``); each sort of failure is shown once, as a
small script. ``--write DIR`` also writes these scripts.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import Counter
from pathlib import Path

import torch.distributed as dist

from fuzz.check import check
from fuzz.grammar import generate
from fuzz.known import known
from fuzz.program import Program
from fuzz.settings import PORTS, RANKS, leave, start_ranks
from fuzz.shrink import script, shrink
from fuzz.tally import Failure, Tally


def main() -> int:
    parser = argparse.ArgumentParser(prog="fuzz", description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, help="of the first program; fresh ones if left out")
    parser.add_argument("--count", type=int, help="how many programs, instead of minutes")
    parser.add_argument("--write", type=Path, help="a folder for the scripts of failures")
    parser.add_argument("--all", action="store_true", help="also shrink and show known failures")
    parser.add_argument("--inside", choices=PORTS, help="compiled, or on the ranks that torchrun has started")
    options = parser.parse_args()
    is_first = True
    if options.inside in RANKS:
        if options.seed is None or options.count is None:
            parser.error("ranks do the same programs: expected --seed and --count")
        start_ranks()
        is_first = dist.get_rank() == 0
    first = options.seed if options.seed is not None else random.SystemRandom().randrange(10**9)
    end = time.monotonic() + 60 * options.minutes
    total, findings = Tally(), Counter()
    found: dict[tuple[str, ...], tuple[Program, Failure]] = {}
    seed = first
    while (time.monotonic() < end) if options.count is None else (seed < first + options.count):
        program = generate(seed)
        tally = check(program, setting=options.inside)
        total.add(tally)
        for failure in tally.failures:
            name = known(program, failure)
            findings[name or "new"] += 1
            if name is None or options.all:
                found.setdefault((name or "", *failure.sort), (program, failure))
        seed += 1
    if is_first:
        print(f"seeds {first} to {seed - 1}")
        print(table(total, findings))
    for (name, *_), (program, failure) in found.items() if is_first else ():
        small, failure = shrink(program, failure) if options.inside is None else (program, failure)
        text = f"# seed {program.seed}{name and f', known: {name}'}\n{script(small, failure)}"
        print(f"\n{'-' * 100}\n{text}# expected {failure.expected}\n# got      {failure.got}")
        if options.write is not None:
            options.write.mkdir(parents=True, exist_ok=True)
            (options.write / f"{failure.kind}_{failure.port}_{program.seed}.py".replace(" ", "_")).write_text(text)
    return 1 if findings["new"] else 0


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
        ("failures", len(total.failures), f"{findings['new']} new"),
    ]
    lines = [f"{name:10} {number:8}  {remark}" for name, number, remark in rows]
    titles = {
        "refused": total.refused,
        "without one truth": total.unclear,
        "fail bare": total.rejected,
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
