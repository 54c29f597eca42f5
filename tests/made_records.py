"""Records as a recorder writes them, of numbers that a test can foresee."""

import json
import math

from gaff.integrations.rows import DERIVED, sound
from gaff.record.finding import Finding
from gaff.record.log import EVENT, LAYOUT, MATRIX, SERIES, LogWriter
from gaff.record.matrix import Layout, pack, pack_series, share_of, to_bytes

CORE = ("count", "mean", "std", "min", "max", "zeros", "nan", "positive_inf", "negative_inf")
EXTRAS = ("saturated", "dead")
COLUMNS = tuple((name, "d" if name == "count" else "f") for name in (*CORE, *EXTRAS))
SITES = ["fc1", "fc1.weight:grad", ":output"]
HOSTILE = [
    "=1+1",
    "-2",
    "@cmd",
    "a\nb\r\nc",
    'a,"b";c',
    "<script>alert(1)</script>",
    "x" * 3000,
    "half \ud800",
    "tab\there",
    "..",
    "a/../b",
    "/etc",
    "**bold** [x](y)",
    "[Ünï]",
]
NAN, INF = math.nan, math.inf


def number(step, row, column):
    """Exact in float32; the second site has no ``saturated``; in step 1 the first site is all NaN."""
    name = COLUMNS[column][0]
    if name == "saturated" and row == 1:
        return NAN
    if step == 1 and row == 0:
        special = {"count": 0.0, "mean": NAN, "std": NAN, "min": INF, "max": -INF, "nan": 7.0}
        return special.get(name, 0.0)
    return float(step + 1) + row / 4 + column / 8


def byte_of(share):
    """The byte that stands for the nearest share."""
    return min(range(256), key=lambda byte: abs(share_of(byte) - share))


class MadeRun:
    """Writes one part of a record, look by look."""

    def __init__(self, folder, rank=0, sites=SITES, model="m"):
        folder.mkdir(exist_ok=True)
        self.log = LogWriter(folder / f"rank{rank}.gaff")
        self.rank, self.sites = rank, sites
        self.log.write_json(LAYOUT, Layout(0, "activations", tuple((model, one) for one in sites), COLUMNS, True).to_json())  # fmt: skip

    def look(self, step, phase="train", absent=()):
        rows = range(len(self.sites))
        columns = [
            to_bytes(code, [NAN if row in absent and name == "count" else number(step, row, at) + 100 * self.rank for row in rows])
            for at, (name, code) in enumerate(COLUMNS)
        ]  # fmt: skip
        magnitudes = bytearray(64 * len(self.sites))
        for row in rows:  # half from 1 to 2, a quarter from 2 to 4, the rest zeros
            magnitudes[42 * len(self.sites) + row] = byte_of(0.5)
            magnitudes[43 * len(self.sites) + row] = byte_of(0.25)
        self.log.write(MATRIX, pack(0, phase, [*columns, bytes(magnitudes)]), step)

    def steps(self, first, losses):
        columns = {"step": [], "seconds": [], "loss:l": [], "lr": []}
        for at, loss in enumerate(losses):
            for name, value in zip(columns, (float(first + at), 0.5, loss, 0.1 if at else NAN), strict=True):
                columns[name].append(value)
        self.log.write(SERIES, pack_series(columns), first)

    def finding(self, step, site="fc1", **more):
        found = Finding(
            "dead_units", site, "m", 1, "warning", "most are zero", "a step", "lower it", {"dead": NAN}, **more
        )
        self.log.write_json(EVENT, {"kind": "findings", "findings": [found.to_dict()]}, step)


def make(folder, ranks=(0,), sites=SITES):
    """Three steps with losses, of which one is NaN and one inf; three looks and one in evaluation; a finding."""
    for rank in ranks:
        run = MadeRun(folder, rank, sites)
        run.steps(0, [0.25, NAN, INF])
        for step in range(3):
            run.look(step, absent=(2,) if step == 2 else ())
        run.look(2, "eval")
        run.finding(2)
        run.log.close()
    (folder / "run.json").write_text(json.dumps({"version": 1}))
    return folder


def series_of(record, stats=None):
    """(rank, phase, site, stat) to [(step, value as text)] of all that ``record.series`` and ``scalar`` tell."""
    found = {}
    for rank in record.ranks:
        for name in record.scalars:
            told = [(step, repr(value)) for step, value in record.scalar(name, rank)]
            if told:
                found[rank, "train", "", name] = told
        for site in record.sites:
            for phase in ("train", "eval"):
                for stat in (*CORE, *EXTRAS, *DERIVED):
                    pairs = record.series(site, stat, phase, rank)
                    told = [(step, repr(value)) for step, value in pairs if stat not in EXTRAS or not math.isnan(value)]
                    if told and (stats is None or stat in stats):
                        found[rank, phase, sound(site), stat] = told
    return found


def metrics_of(record, stats=None):
    """What a tracker must have: by name of the metric, the (step, value as text) of each number."""
    found = {}
    for (rank, phase, site, stat), pairs in series_of(record, stats).items():
        start = "gaff/" if rank == 0 else f"gaff/rank{rank}/"
        name = stat if phase == "train" else f"{phase}_{stat}"
        if not site:
            name = stat.replace("loss:", "loss/") if stat.startswith("loss:") else f"run/{stat}"
        found[f"{start}{site}/{name}" if site else f"{start}{name}"] = pairs
    return found
