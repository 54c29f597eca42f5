"""Where a NaN or inf began: looked for once in a watched run, while the batch and the weights are still there.

Only once, since what is not finite comes again in every step that follows, and looking takes as long as running the
model anew, op by op.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from gaff.inspection.nonfinite.unsafe_ops import UnsafeOp, unsafe_op
from gaff.training.watch import incidents
from gaff.training.watch.batches import StepBatches
from gaff.training.watch.flight_recorder import FlightRecorder
from gaff.training.watch.loss_graph import bad_target
from gaff.training.watch.model_calls import ModelCalls
from gaff.training.watch.reporter import Reporter
from gaff.training.watch.sampled_step import SampledStep


class Origin:
    """Runs the batches of a step again, with every op looked at, and reports what that shows. Only the first time.

    The watcher asks it, on the thread that trains, at the first loss or gradient that is not finite.
    """

    def __init__(self, calls: ModelCalls, batches: StepBatches, flight: FlightRecorder, reporter: Reporter) -> None:
        self._calls = calls
        self._batches = batches
        self._flight = flight
        self._reporter = reporter
        self._is_found = False

    def find(
        self,
        what: str,
        step: int,
        sampled: SampledStep | None,
        *,
        loss: Tensor | None = None,
        steep: Sequence[UnsafeOp] = (),
    ) -> None:
        """Look for the origin of ``what``, a loss or a gradient that is not finite in this step.

        ``sampled``: the look at this step, if it is one; ``loss``: the loss itself, of which its targets and the ops
        behind it are asked, None of a gradient; ``steep``: ops ahead of the loss that may have an infinite slope.
        What is run is not watched. The batch is kept, where the user wants that: the one in which it began, else the
        step's last.
        """
        if self._is_found:
            return
        self._is_found = True
        batches = self._batches.kept
        resume = self._calls.pause()
        try:
            seen = sampled.first_nan() if sampled is not None else None
            ops = unsafe_op(loss) if loss is not None else next((str(one) for one in steep if int(one.found)), "")
            finding, batch = incidents.of_nonfinite(what, step, batches, has_gradients=loss is None, seen=seen,
                                                    targets=bad_target(loss) if loss is not None else "",
                                                    ops=ops)  # fmt: skip
        finally:
            resume()
        self._reporter.add(self._flight.keep_for(finding, batch or batches[-1:]), step)
