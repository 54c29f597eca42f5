"""The batches of the step in progress: for a look at what went wrong while it runs, and for counting samples."""

from __future__ import annotations

from typing import Any

from gaff.address.nested import iter_tensors, size_bytes
from gaff.inspection.nonfinite.rerun import Batch
from gaff.training.watch import step_facts
from gaff.training.watch.models import Model

_KEPT = 16  # batches of one step: the last ones
_KEPT_BYTES = 1 << 28


class StepBatches:
    """The batches that models were given in training mode since the step began, for a look at what goes wrong in it.

    Holds the user's tensors, by reference and not copied, only until the step is over; then the watcher calls
    ``clear``. Used on the thread that trains. A step may have several batches, where gradients are accumulated or
    several models train.
    """

    def __init__(self) -> None:
        self.kept: list[tuple[Model, Batch]] = []
        self.samples = 0  # that models were given since they were last taken
        self._size = self._largest = 0

    def add(self, model: Model, args: Any, kwargs: Any) -> Batch:
        """Keep what a run of ``model`` that begins is given, and return it, with the random state that it meets.

        At most the last 16 batches of a step are held, and at most 256 MB of inputs, but always the latest one. Waits
        for no device.
        """
        batch = Batch.of(args, kwargs)
        self.kept.append((model, batch))
        while len(self.kept) > 1 and (len(self.kept) > _KEPT or self._bytes() > _KEPT_BYTES):
            del self.kept[0]
        self._size = step_facts.batch_size(args, kwargs)
        self.samples += self._size * any(True for _ in iter_tensors((args, kwargs)))  # keywords are not always seen
        self._largest = max(self._largest, self._size)
        return batch

    def is_rest(self) -> bool:
        """Whether the latest batch is less than half of the largest: the rest of a data set, whose loss is noisier."""
        return bool(self.kept) and 2 * self._size < self._largest

    def take_samples(self) -> int:
        """How many samples models were given since this was last asked; counting begins anew."""
        samples, self.samples = self.samples, 0
        return samples

    def clear(self) -> None:
        """The step is over: let go of its batches."""
        self.kept.clear()

    def _bytes(self) -> int:
        """The bytes of all inputs that are held; a tensor that several batches share counts in each of them."""
        return sum(size_bytes(one) for _, batch in self.kept for _, one in iter_tensors((batch.args, batch.kwargs)))
