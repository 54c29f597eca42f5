"""Which faults and healthy runs there are, and what is the right answer to each.

A case is a task and a fault of ``train.py``, the same under somebody else's loop (``stacks.py``), or a program that looks
strange and is healthy (``odd.py``). They are split in two: rules and causes are developed with one half (``develop``),
figures are published of the other (``held out``), whose failures are not looked into.
"""

from __future__ import annotations

from dataclasses import dataclass

from diagnose.odd import DEVELOP, HELD_OUT
from diagnose.train import HEALTHY, TASKS

HALVES = {
    "develop": ("digits", "diabetes", "images", "language", "trainer/digits", "accelerate/images"),
    "held out": ("rows", "photos", "trainer/photos", "lightning/rows", "accelerate/rows"),
}
_ODD = {"develop": DEVELOP, "held out": HELD_OUT}
_UNDER_STACKS = ("lr-high", "lr-low", "labels-shuffled", "frozen", "replaced-head", "detached", "double-softmax",
                 "softmax-axis", "nll-of-scores", "sign", "decay", "raw-inputs", "dead-relu", "constant-labels",
                 "zero-init", "log-zero", "exception", "forgotten-group")  # fmt: skip
_HEALTHY_UNDER_STACKS = ("none", "oddity-frozen-body", "oddity-label-noise", "oddity-label-smoothing",
                         "oddity-large-lr", "oddity-weight-decay", "oddity-two-losses")  # fmt: skip
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
    "wrong-loss-graph": (("no_gradient", "never_trained"), _ALL),
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
    """``causes``: what may be named; none for a run in which nothing is wrong.

    ``task`` is one of ``train.py``, with a stack before it, such as ``trainer/rows``, or ``odd``.
    """

    task: str
    fault: str
    causes: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.task}/{self.fault}"

    def command(self, seed: int) -> list[str]:
        """The script of this case, with its arguments."""
        stack, _, task = self.task.rpartition("/")
        if self.task == "odd":
            return ["odd.py", "--program", self.fault, "--seed", str(seed)]
        which = ["stacks.py", "--stack", stack] if stack else ["train.py"]
        return [*which, "--task", task, "--fault", self.fault, "--seed", str(seed)]


def cases(half: str | None = None) -> list[Case]:
    """All of one half, or of both: healthy ones first."""
    halves = HALVES if half is None else (half,)
    tasks = [task for one in halves for task in HALVES[one]]
    found = [Case("odd", program.__name__, ()) for one in halves for program in _ODD[one]]
    for fault in HEALTHY:
        found += [Case(task, fault, ()) for task in tasks if "/" not in task or fault in _HEALTHY_UNDER_STACKS]
    for fault, (causes, where) in TRUTH.items():
        able = [task for task in tasks if task.rpartition("/")[2] in where]
        found += [Case(task, fault, causes) for task in able if "/" not in task or fault in _UNDER_STACKS]
    return found
