"""Runs the cases and prints how often the cause is named: ``python -m diagnose --half "held out" --seeds 0 1 2``."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gaff
from diagnose.cases import HALVES, Case, cases
from gaff.record.verdict import Verdict


def verdict_of(case: Case, seed: int, folder: Path, how: list[str]) -> Verdict | None:
    """What gaff says of one run, as a user would ask it; None where it says nothing at all."""
    out = folder / f"{case.name.replace('/', '-')}-{seed}"
    script, *more = case.command(seed)
    run = [sys.executable, str(Path(__file__).with_name(script)), *more]
    subprocess.run(
        [sys.executable, "-m", "gaff", *how, "--out", str(out), "--", *run], capture_output=True, check=False
    )
    try:
        return gaff.load(out).verdict
    except gaff.errors.RecordError:
        return None


def grade(case: Case, verdict: Verdict | None) -> str:
    """``first``, ``among three``, ``missed``, ``wrong`` or ``wrong, as certain``; of a healthy run quiet or ``alarm``."""
    if verdict is None:
        return "missed"
    named = [verdict.name, *(one.name for one in verdict.alternatives)]
    if not case.causes:
        return (
            "alarm"
            if verdict.state in ("wrong", "failed")
            else "suspicion"
            if verdict.state == "suspicious"
            else "quiet"
        )
    if named[0] in case.causes:
        return "first"
    if set(named[:3]) & set(case.causes):
        return "among three"
    if verdict.state in ("healthy", "not enough"):
        return "missed"
    return "wrong, as certain" if verdict.state == "wrong" else "wrong"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--half", choices=tuple(HALVES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--only", nargs="+", help="faults")
    parser.add_argument("--task", nargs="+")
    parser.add_argument("--try", dest="tried", action="store_true", help="by gaff try instead of gaff watch")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--healthy", choices=("with", "without", "alone"), default="with")
    options = parser.parse_args()
    wanted = [
        one
        for one in cases(options.half)
        if (not options.only or one.fault in options.only)
        and (not options.task or one.task in options.task)
        and (options.healthy == "with" or bool(one.causes) == (options.healthy == "without"))
    ]
    how = ["try", "--steps", "200"] if options.tried else ["watch", "--quiet"]
    faults, healthy = Counter(), Counter()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.jobs) as pool:

        def judged(pair: tuple[Case, int]) -> tuple[Case, int, Verdict | None]:
            return *pair, verdict_of(*pair, Path(folder), how)

        told: Iterator[tuple[Case, int, Verdict | None]] = pool.map(
            judged, [(case, seed) for seed in options.seeds for case in wanted]
        )
        for case, seed, verdict in told:
            found = grade(case, verdict)
            (faults if case.causes else healthy)[found] += 1
            if found not in ("first", "quiet"):
                said = "nothing" if verdict is None else f"{verdict.name or verdict.state}: {verdict.cause[:110]}"
                print(f"{case.name:28} seed {seed}  {found:12} {said}", flush=True)
    for title, counts in (("faults", faults), ("healthy runs", healthy)):
        total = sum(counts.values())
        print(f"{total} {title}: " + ", ".join(f"{count} {what}" for what, count in counts.most_common()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
