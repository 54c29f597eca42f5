"""What works where: the table of docs/limits.md, each cell of which is a test."""

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
    ("capture", "TP"): "this rank's part where a module hands out one",
    ("statistics", "DDP"): "a part for each rank",
    ("statistics", "FSDP2"): "a part for each rank",
    ("statistics", "TP"): "a part for each rank",
}
BEGIN, END = "<!-- what works where: written by `python -m settings` from tests/settings.py -->", "<!-- end -->"
LIMITS = Path(__file__).parent.parent / "docs" / "limits.md"


def cell(asked, setting):
    return CELLS.get((asked, setting), "yes")


def table():
    rows = [["", *SETTINGS], ["---"] * (len(SETTINGS) + 1)]
    rows += [[asked, *(cell(asked, setting) for setting in SETTINGS)] for asked in ASKED]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def page(text):
    """``text`` of docs/limits.md, with the table of today."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}"


if __name__ == "__main__":
    LIMITS.write_text(page(LIMITS.read_text()))
