"""The batches of the step in progress: for a look at what went wrong while it runs, and for counting samples."""

from __future__ import annotations

from typing import Any
from weakref import ref

from torch import Tensor, nn

from gaff.address.nested import size_bytes
from gaff.inspection.nonfinite.rerun import Batch
from gaff.training.watch.loss_graph import is_of_others, leaves_behind
from gaff.training.watch.models import Model, Models

_KEPT = 16  # batches of one step
_FIRST = 4  # runs of a step of which each is kept
_THEN = 64  # of so many one
_KEPT_BYTES = 1 << 28


class StepBatches:
    """The batches that models were given in training mode since the step began, for a look at what goes wrong in it.

    Holds the user's tensors, by reference and not copied, only until the step is over; then the watcher calls
    ``clear``. Used on the thread that trains. A step may have several batches, where gradients are accumulated or
    several models train. Where it has hundreds, as the step of a policy that acts once a call, all are counted, and
    beyond the first 4 every 64th is kept: with each goes a random state of 5 KB, and to ask for so much memory between
    many small tensors takes longer than to run a small model.
    """

    def __init__(self) -> None:
        self.kept: list[tuple[Model, Batch]] = []
        self.samples = 0  # that models were given since they were last taken
        self.has_unseen = False  # a loss of the step is of a model that nobody has seen called
        self._runs = 0  # of the step
        self._ran: set[str] = set()  # models, since a loss has asked
        self._together: dict[frozenset[str], str] = {}  # by models that ran: what they are called
        self._called: dict[frozenset[str], str] = {}  # the same by models that the first loss behind them was of
        self._whose = ""
        self._size = self._largest = 0
        self._counted: dict[str, str] = {}  # by model: the path of the part of it that was first called in the step
        self._bytes: list[int] = []  # of the inputs of the batches that are kept, as far as they were counted

    @property
    def counted_only(self) -> int:
        """How many of the runs that come next in this step need only be counted."""
        return _THEN - 1 if self._runs >= _FIRST else 0

    @property
    def latest(self) -> Batch | None:
        """What the latest run in the step was given, as far as it is kept; None before the first."""
        return self.kept[-1][1] if self.kept else None

    def add(self, model: Model, part: nn.Module, path: str, args: Any, kwargs: Any) -> Batch:
        """Keep what a run of ``model`` that begins is given, and return it, with the random state that it meets.

        ``part``, at ``path``: what was called, the model itself or a part of it by itself; the samples of a step are
        those that the first part is given. At most 16 batches of a step are held, the latest ones that were added, and
        at most 256 MB of inputs, but always the latest one. Waits for no device.
        """
        batch = Batch.of(args, kwargs, holds_graphs=False)
        batch.part = (path, ref(part)) if path else None
        tensors = [tensor for tensor, _ in batch.versions]
        self.kept.append((model, batch))
        self._ran.add(model.name)
        self._runs += 1
        if len(self.kept) > 1:
            self._make_room()
        self._size = next((int(tensor.size(0)) for tensor in tensors if tensor.dim()), 1)
        self._largest = max(self._largest, self._size)
        if tensors and self._counted.setdefault(model.name, path) == path:  # keywords are not always seen
            self.samples += self._size
        return batch

    def whose(self, models: Models, loss: Tensor) -> str | None:
        """The names of the models that ran since this was last asked; where none did, what was told then.

        Others that ran by themselves among them, as a copy that is looked at before the training, make no difference:
        where the first loss behind them is of the same models as one behind others, they are called as those. That is
        so where no model was seen to run, too: if the parameter behind ``loss`` is of another one, it is that. None
        where the models were given, and this is the loss of another one, as far as the nodes behind it tell.
        """
        if models.is_given and is_of_others(loss, models):
            return None
        if self._ran:
            ran = frozenset(self._ran)
            self._ran.clear()
            if ran not in self._together:
                leaves, is_all = leaves_behind(loss)
                owners = ran & frozenset(map(models.owner_of, leaves)) if is_all else ran
                self._together[ran] = self._called.setdefault(owners or ran, ", ".join(sorted(ran)))
            self._whose = self._together[ran]
            return self._whose
        if models.is_given:
            return self._whose
        self.has_unseen = not self._runs
        leaves, _ = leaves_behind(loss)
        owner = models.owner_of(next(iter(leaves), None))
        return owner if owner and owner not in self._whose.split(", ") else self._whose

    def is_rest(self) -> bool:
        """Whether the latest batch is less than half of the largest: the rest of a data set, whose loss is noisier."""
        return bool(self.kept) and 2 * self._size < self._largest

    def take_samples(self) -> int:
        """How many samples models were given since this was last asked; counting begins anew."""
        samples, self.samples = self.samples, 0
        return samples

    def clear(self) -> None:
        """The step is over: let go of its batches, and of how many samples were in them."""
        self.samples = 0
        self.kept.clear()
        self._bytes.clear()
        self._counted.clear()
        self._runs, self.has_unseen = 0, False

    def _make_room(self) -> None:
        """Let go of the oldest batches beyond what may be kept; what several share counts in each of them."""
        for _, batch in self.kept[len(self._bytes) :]:
            self._bytes.append(sum(size_bytes(tensor) for tensor, _ in batch.versions))
        held = sum(self._bytes)
        while len(self.kept) > 1 and (len(self.kept) > _KEPT or held > _KEPT_BYTES):
            del self.kept[0]
            held -= self._bytes.pop(0)
