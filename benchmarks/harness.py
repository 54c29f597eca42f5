"""Interleaved measurement: every way runs once a round, in shuffled order; medians of CPU time are compared."""

import gc
import random
import statistics
import time


def measure(ways, rounds, warmup=3):
    """``ways``: name -> function. Median CPU seconds for each, in one process, interleaved."""
    for way in ways.values():
        for _ in range(warmup):
            way()
    times = {name: [] for name in ways}
    order = list(ways)
    gc.collect()
    for _ in range(rounds):
        random.shuffle(order)
        for name in order:
            started = time.process_time()
            ways[name]()
            times[name].append(time.process_time() - started)
    return {name: statistics.median(values) for name, values in times.items()}


def table(title, medians, *, base, bare=None, sites=None):
    """A Markdown table: ratio to ``base`` and, with ``sites``, microseconds a site over ``bare``."""
    print(f"\n### {title}\n")
    head = ["way", "ms", f"x {base}"] + (["us a site over no hooks"] if sites else [])
    print("| " + " | ".join(head) + " |\n|" + "---|" * len(head))
    for name, seconds in medians.items():
        cells = [name, f"{seconds * 1e3:.3g}", f"{seconds / medians[base]:.3f}"]
        if sites:
            cells.append(f"{(seconds - medians[bare]) / sites * 1e6:.2f}")
        print("| " + " | ".join(cells) + " |")


def peer(name):
    """An installed peer's module, or None with a line that says so."""
    try:
        return __import__(name, fromlist=["_"])
    except Exception as error:  # noqa: BLE001  # a peer that cannot be imported here is left out, and said
        print(f"left out: {name} ({type(error).__name__}: {str(error).splitlines()[0][:80]})")
        return None
