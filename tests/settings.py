"""What works where: the table of docs/limits.md, each cell of which is a test."""

import json
from pathlib import Path

ASKED = {
    "capture": "values of modules and parameters",
    "gradient": "gradients at outputs and of parameters",
    "edit": "values and gradients changed",
    "statistics": "`gaff.watch`",
    "early stop": "`gaff.take`",
    "ops": "functional calls inside a forward",
    "guard": "`gaff.guard`",
}
SETTINGS = {
    "eager": "",
    "compile": "`torch.compile`, `module.compile()`, block by block",
    "checkpoint": "activation checkpointing, both variants",
    "AMP": "autocast, GradScaler",
    "DDP": "DistributedDataParallel",
    "FSDP2": "`fully_shard`",
    "FSDP": "`FullyShardedDataParallel`, the first FSDP",
    "TP": "tensor parallel (DTensor)",
    "export": "`torch.export`, `ep.module()`",
}
INSIDE = "inside the graph"
EAGER = "runs eagerly"
# a cell that is not here works as in eager code
CELLS = {
    ("capture", "compile"): INSIDE,
    ("gradient", "compile"): INSIDE,
    ("edit", "compile"): INSIDE,
    ("statistics", "compile"): INSIDE,
    ("early stop", "compile"): EAGER,
    ("ops", "compile"): EAGER,
    ("guard", "compile"): INSIDE,
    ("capture", "export"): "outputs; what a module was given is refused",
    ("gradient", "export"): "of outputs",
    ("edit", "export"): "of outputs and parameters",
    ("gradient", "DDP"): "each rank's own share, before it is averaged",
    ("gradient", "FSDP2"): "reduced over ranks, this rank's shard",
    ("capture", "FSDP"): "at calls; of parameters it is refused",
    ("gradient", "FSDP"): "at calls; of parameters it is refused",
    ("edit", "FSDP"): "at calls; of parameters it is refused",
    ("statistics", "FSDP"): "a part for each rank",
    ("early stop", "FSDP"): "refused",
    ("guard", "FSDP"): "refused",
    ("capture", "TP"): "this rank's part where a module hands out one",
    ("statistics", "DDP"): "a part for each rank",
    ("statistics", "FSDP2"): "a part for each rank",
    ("statistics", "TP"): "a part for each rank",
}
BEGIN, END = "<!-- what works where: written by `python -m settings` from tests/settings.py -->", "<!-- end -->"
LIMITS = Path(__file__).parent.parent / "docs" / "limits.md"


# what of the runs of the fuzzer's random programs (`make fuzz SETTING=... RECORD=--record`) counts for a row
COUNTED = {
    "capture": "programs",
    "gradient": "programs",
    "edit": "programs",
    "statistics": "watched",
    "early stop": "programs",
    "ops": "programs",
    "guard": "guarded",
}
COUNTS = Path(__file__).parent / "fuzz" / "counts.json"


def cell(asked, setting):
    """What is true of a cell, without the number of programs."""
    return CELLS.get((asked, setting), "yes")


def programs(asked, setting):
    """In how many random programs a cell was tried against one eager process without gaff."""
    return json.loads(COUNTS.read_text()).get(setting, {}).get(COUNTED[asked], 0)


def counted(asked, setting):
    number = programs(asked, setting)
    return f"{cell(asked, setting)} ({number:,})" if number else cell(asked, setting)


def table():
    rows = [["", *SETTINGS], ["---"] * (len(SETTINGS) + 1)]
    rows += [[asked, *(counted(asked, setting) for setting in SETTINGS)] for asked in ASKED]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def page(text):
    """``text`` of docs/limits.md, with the table of today."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}"


if __name__ == "__main__":
    LIMITS.write_text(page(LIMITS.read_text()))
