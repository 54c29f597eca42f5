"""Which faults and healthy runs there are, and what is the right answer to each.

A case is a task and a fault of ``train.py``. The tasks are split in two: rules and causes are developed with digits,
diabetes, images and a language model (``develop``), figures are published of others (``held out``).
"""

from __future__ import annotations

from dataclasses import dataclass

from diagnose.train import HEALTHY, TASKS

HALVES = {"develop": ("digits", "diabetes", "images", "language"), "held out": ("rows", "photos")}
_ALL = TASKS
_CLASSIFIERS = tuple(task for task in TASKS if task != "diabetes")

# The names of causes that are right, and the tasks that can have the fault.
TRUTH: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "no-zero-grad": (("not_cleared",), _ALL),
    "lr-high": (("learning_rate_too_high",), _ALL),
    "lr-low": (("learning_rate_too_low",), _ALL),
    "labels-shuffled": (("labels_do_not_belong",), _CLASSIFIERS),
    "input-unused": (("input_not_used",), _CLASSIFIERS),
    "frozen": (("frozen_by_accident",), _ALL),
    "replaced-head": (("not_owned",), _ALL),
    "detached": (("no_gradient",), _ALL),
    "eval-mode": (("eval_mode_in_training",), ("images", "rows", "photos")),
    "no-eval": (("train_mode_in_eval",), ("images", "rows", "photos")),
    "double-softmax": (("double_softmax",), _CLASSIFIERS),
    "softmax-axis": (("softmax_axis",), _CLASSIFIERS),
    "nll-of-scores": (("nll_of_scores",), _CLASSIFIERS),
    "sign": (("loss_sign",), _ALL),
    "broadcast": (("broadcast",), ("diabetes",)),
    "decay": (("weight_decay_too_high",), _ALL),
    "raw-inputs": (("input_scale",), ("digits", "diabetes", "images", "photos")),
    "dead-relu": (("dead_units",), ("digits", "images", "photos")),
    "sum-not-mean": (("learning_rate_too_high", "gradients_summed"), ("images",)),
    "same-batch": (("same_batch",), _ALL),
    "constant-labels": (("labels_constant",), _ALL),
    "zero-init": (("symmetric_units",), _ALL),
    "log-zero": (("nonfinite",), _ALL),
    "lr-to-zero": (("lr_zero",), _ALL),
    "wrong-loss-graph": (("no_gradient",), _ALL),
    "deep-sigmoid": (("vanishing",), ("digits",)),
    "batch-norm-of-two": (("batch_norm_of_few",), ("images", "photos")),
    "low-precision": (("updates_round_away",), _ALL),
    "clip-tiny": (("clipped_to_nothing",), ("images",)),  # Adam divides the size of gradients out
    "exception": (("failed",), _CLASSIFIERS),
    "by-hand": (("no_steps",), _ALL),
    "forgotten-group": (("not_owned",), _ALL),
    "no-warmup": (("learning_rate_too_high",), ("language",)),
}


@dataclass(frozen=True)
class Case:
    """``causes``: what may be named; none for a run in which nothing is wrong."""

    task: str
    fault: str
    causes: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.task}/{self.fault}"


def cases(half: str | None = None) -> list[Case]:
    """All of one half, or of both: healthy ones first."""
    tasks = _ALL if half is None else HALVES[half]
    found = [Case(task, fault, ()) for fault in HEALTHY for task in tasks]
    return found + [
        Case(task, fault, causes) for fault, (causes, where) in TRUTH.items() for task in tasks if task in where
    ]
