"""Parts of the watch that are asked for rarely: what is kept of a batch, the copy that runs it again, past losses."""

import random
import statistics

import pytest
import torch
from torch import nn

from gaff.record.flight import RingWriter, read_left
from gaff.record.log import EVENT, LogReader, LogWriter
from gaff.training.watch.incidents import _copy
from gaff.training.watch.losses import PastLosses
from gaff.training.watch.saved_batches import Batch, BatchSaver, kept_of, read_kept


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(20, 4), nn.Linear(4, 20, bias=False)
        self.out.weight = self.embed.weight
        self.register_buffer("one", torch.ones(3), persistent=False)
        self.register_buffer("two", self.one, persistent=False)


def batch():
    return Batch((torch.ones(1),), {}, [], [], True, [])


def test_tied_weights_and_buffers_are_kept_once_and_are_one_again(tmp_path):
    saver = BatchSaver(tmp_path)
    path = saver.keep(3, "nonfinite", "model", Tied(), batch())
    found = read_kept(path)
    assert found.weights["embed.weight"] is found.weights["out.weight"]
    assert found.buffers["one"] is found.buffers["two"]
    assert path.stat().st_size < 2 * 20 * 4 * 4 + 1500


def test_a_batch_that_could_not_be_written_takes_no_other_batchs_place(tmp_path):
    saver = BatchSaver(tmp_path / "gone" / "run")
    for step in range(5):
        with pytest.raises(FileNotFoundError):
            saver.keep(step, "nonfinite", "model", Tied(), batch())
    (tmp_path / "gone" / "run").mkdir(parents=True)
    assert saver.keep(5, "nonfinite", "model", Tied(), batch()) is not None
    assert len(kept_of(tmp_path / "gone" / "run")) == 1


def test_the_copy_that_runs_a_batch_again_has_no_hook_of_the_program():
    model, called = nn.Sequential(nn.Linear(2, 2)), []
    for register in (
        model[0].register_forward_pre_hook,
        model[0].register_forward_hook,
        model[0].register_full_backward_pre_hook,
        model[0].register_full_backward_hook,
    ):
        register(lambda *_args, name=register.__name__: called.append(name))
    _copy(model)(torch.ones(1, 2)).sum().backward()
    assert called == []


def test_the_spread_of_losses_forgets_a_jump_with_it():
    random.seed(0)
    values = [0.5 + random.gauss(0, 0.02) for _ in range(300)]
    values[100] = 1e8
    past = PastLosses(1e6)
    past.values.extend(values)
    mean, spread = past.moments()
    assert mean == pytest.approx(statistics.fmean(values[-128:]))
    assert spread == pytest.approx(statistics.pstdev(values[-128:]))


def test_a_second_shorter_reason_leaves_nothing_of_the_first(tmp_path):
    ring = RingWriter(tmp_path / "ring")
    ring.leave("[Errno 28] No space left on device")
    ring.leave("closed")
    ring.close()
    assert read_left(tmp_path / "ring") == "closed"


def test_a_log_that_is_read_again_after_one_frame_goes_on_behind_it(tmp_path):
    writer = LogWriter(tmp_path / "run.gaff")
    for step in range(3):
        writer.write_json(EVENT, {"step": step}, step)
    reader = LogReader(tmp_path / "run.gaff")
    assert [next(iter(reader.frames())).step for _ in range(3)] == [0, 1, 2]
