"""Parts of the watch that are asked for rarely: what is kept of a batch, the copy that runs it again, past losses."""

import random
import statistics

import pytest
import torch
from torch import nn

import gaff
from gaff.record.flight import RingWriter, read_left
from gaff.record.log import EVENT, LogReader, LogWriter
from gaff.training.rules.registry import Past
from gaff.training.rules.steps import has_fallen
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


def test_a_loss_below_zero_has_fallen_where_it_is_lower():
    def fallen(first, recent, to=0.9):
        past = Past()
        past.losses["loss"], past.recent["loss"] = [first] * 3, [recent] * 3
        return has_fallen(past, "loss", to)

    assert not fallen(-5.0, -5.0)
    assert not fallen(-5.0, -2.6, 0.5)
    assert fallen(-5.0, -6.0)
    assert fallen(5.0, 4.4)
    assert not fallen(5.0, 4.6)


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64])
def test_unsigned_targets_are_looked_at(tmp_path, dtype):
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with gaff.watch(model, optimizer, out=tmp_path / "run", every=1) as watch:
        for _ in range(3):
            optimizer.zero_grad()
            targets = torch.arange(8).to(dtype)[:, None]
            torch.nn.functional.mse_loss(model(torch.randn(8, 4)), targets).backward()
            optimizer.step()
    assert watch.failure is None


@pytest.mark.parametrize("kind", ["Muon", "Adafactor"])
def test_decay_that_is_taken_off_the_weight_is_known_of_torchs_own(tmp_path, kind):
    model = nn.Sequential(nn.Linear(16, 16, bias=False), nn.Tanh(), nn.Linear(16, 16, bias=False))
    optimizer = getattr(torch.optim, kind)(model.parameters(), weight_decay=0.1)
    with gaff.watch(model, optimizer, out=tmp_path / "run", every=1) as watch:
        for _ in range(30):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(torch.randn(64, 16)), torch.randn(64, 16)).backward()
            optimizer.step()
    assert not [one for one in watch.findings if one.rule == "weight_decay_too_high"]


def test_a_place_that_a_rule_names_twice_in_a_look_counts_once(tmp_path):
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    zeros = torch.tensor([0.0, 1.0] * 4)
    with gaff.watch(model, optimizer, out=tmp_path / "run", every=1) as watch:
        for steps in (1, 3):
            for _ in range(steps):
                optimizer.zero_grad()
                out = model(torch.randn(8, 4))
                sum(torch.nn.functional.soft_margin_loss(out[:, at], zeros) for at in (0, 1)).backward()
                optimizer.step()
            found = [one for one in watch.findings if one.rule == "targets_no_signs"]
            assert [one.share for one in found] == ([1.0] if steps == 3 else [])


def test_attempts_that_fail_one_after_another_come_to_an_end(tmp_path):
    saver = BatchSaver(tmp_path / "gone" / "run")
    for step in range(8):
        with pytest.raises(FileNotFoundError):
            saver.keep(step, "nonfinite", "model", Tied(), batch())
    assert saver.keep(8, "nonfinite", "model", Tied(), batch()) is None
