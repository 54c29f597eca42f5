"""The flight recorder: every step leaves a row, and what did harm can be run again as it was."""

import itertools
import math
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import gaff
from gaff.cli import main
from gaff.errors import RecordError
from gaff.record.flight import ROWS, STATE, Flight, RingWriter, read_ring
from gaff.training.watch.saved_batches import kept_of, read_kept

NAN = math.nan


def flight(step, **losses):
    return Flight(step, 1e9 + step, 0.5, 0.1, NAN, 8, f"{step:08x}", losses, bytes([step % 256]) * STATE)


def test_a_ring_keeps_the_last_rows_whole(tmp_path):
    ring = RingWriter(tmp_path / "rank0.ring")
    assert read_ring(tmp_path / "rank0.ring") == []
    for step in range(100):
        ring.write(flight(step, loss=step / 2, **({"odd": NAN} if step % 2 else {})))
        rows = read_ring(tmp_path / "rank0.ring")
        assert [row.step for row in rows] == list(range(max(0, step - ROWS + 1), step + 1))
    ring.close()
    assert repr(rows[-1]) == repr(flight(99, loss=49.5, odd=NAN))
    assert rows[-2].losses == {"loss": 49.0}


def test_a_row_that_was_not_finished_is_left_out(tmp_path):
    path = tmp_path / "rank0.ring"
    ring = RingWriter(path)
    for step in range(3):
        ring.write(flight(step))
    ring.close()
    data = path.read_bytes()
    size = (len(data) - 8 - 2048) // ROWS
    end = 8 + 2048 + 4 * size  # rows begin at the second: the third step's is the fourth
    path.write_bytes(data[: end - 8] + bytes(8) + data[end:])
    assert [row.step for row in read_ring(path)] == [0, 1]


def test_more_losses_than_there_is_room_for_and_long_names(tmp_path):
    ring = RingWriter(tmp_path / "rank0.ring")
    ring.write(flight(0, **{"x" * 5000: 1.0, **{f"l{at}": float(at) for at in range(20)}}))
    ring.close()
    assert read_ring(tmp_path / "rank0.ring")[0].losses == {f"l{at}": float(at) for at in range(8)}


@pytest.mark.parametrize("data", [b"", b"GAFFRNG1", b"x" * 1000])
def test_what_is_no_ring_is_told(tmp_path, data):
    (tmp_path / "rank0.ring").write_bytes(data)
    with pytest.raises(RecordError, match="is no ring"):
        read_ring(tmp_path / "rank0.ring")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.norm, self.drop, self.b = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1)
        self.seen = []

    def forward(self, x, scale=None):
        y = self.drop(self.norm(self.a(x)))
        self.seen.append(y.detach().clone())
        y = self.b(y)
        return y.log() if scale is None else y * scale


def build():
    torch.manual_seed(0)
    return Net()


def train(out, steps=5, bad=3, keep_batch=True, fail=None):
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    data = torch.Generator().manual_seed(1)
    with gaff.watch(model, optimizer, out=out, every=1, keep_batch=keep_batch):
        for step in range(steps):
            x = torch.randn(16, 4, generator=data)
            optimizer.zero_grad()
            loss = model(x, *([] if step == bad else [0.5])).sum()
            loss.backward()
            if step == bad:
                weights = {key: value.clone() for key, value in model.state_dict().items()}
                kept = x, weights, model.seen[step]
            if step == fail:
                raise KeyError("of the script's own")
            optimizer.step()
    return kept


def test_every_step_leaves_a_row(tmp_path):
    train(tmp_path / "run", bad=4)
    rows = gaff.load(tmp_path / "run").flight()
    assert [row.step for row in rows] == list(range(5))
    assert all(len(row.random) == STATE and row.samples == 16 for row in rows)
    assert len({row.batch for row in rows}) == 5
    assert all(math.isfinite(row.losses["loss"]) for row in rows[:4])
    assert math.isnan(rows[4].losses["loss"])
    assert all(row.random != other.random for row, other in itertools.pairwise(rows))  # of dropout


def test_a_finding_writes_the_last_steps_down_its_own_among_them(tmp_path):
    train(tmp_path / "run")
    events = gaff.load(tmp_path / "run").events("flight")
    step, told = next(one for one in events if "nonfinite" in one[1]["why"])
    assert [row["step"] for row in told["rows"]][:4] == [0, 1, 2, 3]
    assert math.isnan(told["rows"][3]["losses"]["loss"])
    assert step >= 3


def test_a_kept_batch_is_what_the_step_met_to_the_last_bit(tmp_path):
    x, weights, passed = train(tmp_path / "run")
    (path,) = kept_of(tmp_path / "run")
    assert path.name == "00000003-nonfinite.safetensors"
    kept = read_kept(path)
    assert (kept.step, kept.why, kept.model, kept.modes["drop"]) == (3, "nonfinite", "model", True)
    assert torch.equal(kept.batch.args[0], x)
    assert kept.weights.keys() == weights.keys()
    assert all(torch.equal(kept.weights[key], value) for key, value in weights.items())
    model = build()
    model.load_state_dict(kept.weights)
    torch.set_rng_state(kept.batch.random[0])
    model.train()(*kept.batch.args, **kept.batch.kwargs)
    assert torch.equal(model.seen[0], passed)  # the same units were dropped
    finding = next(one for one in gaff.load(tmp_path / "run").findings if one.rule == "nonfinite")
    assert finding.evidence["kept"] == str(path)


def test_keeping_changes_no_bit(tmp_path):
    weights = []
    for at, keep in enumerate((False, True)):
        torch.manual_seed(5)
        weights.append(train(tmp_path / str(at), keep_batch=keep)[1])
    assert all(torch.equal(one, weights[1][key]) for key, one in weights[0].items())
    assert not kept_of(tmp_path / "0")


def test_the_batch_of_an_exception_is_kept(tmp_path):
    with pytest.raises(KeyError, match="of the script's own"):
        train(tmp_path / "run", bad=2, fail=2)
    assert {path.name.partition("-")[2] for path in kept_of(tmp_path / "run")} == {
        "nonfinite.safetensors", "exception.safetensors",
    }  # fmt: skip
    assert any("KeyError" in one["why"] for _, one in gaff.load(tmp_path / "run").events("flight"))


def test_structures_tied_weights_and_what_cannot_be_kept(tmp_path):
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
            self.two.weight = self.one.weight

        def forward(self, given, *, more):
            return self.two(self.one(given["x"][0])) * float("nan") * more["scale"]

    model = Odd()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with gaff.watch(model, optimizer, out=tmp_path / "run", every=1, keep_batch=True):
        given = {"x": (torch.randn(2, 3), [1, "two", None, True]), "what": object()}
        model(given, more={"scale": 2.0}).sum().backward()
        optimizer.step()
    record = gaff.load(tmp_path / "run")
    assert any("is a object, which was not kept" in note for note in record.notes)
    with pytest.raises(RecordError, match="was not kept when the batch was"):
        read_kept(kept_of(tmp_path / "run")[0])


def test_replay_runs_the_batch_again_and_names_the_op(tmp_path, capsys):
    train(tmp_path / "run")
    spec = f"{__file__}:build"
    page = tmp_path / "page.html"
    assert main(["replay", str(tmp_path / "run"), "--model", spec, "--html", str(page)]) == 3
    text = capsys.readouterr().out
    assert "step 3 of" in text
    assert "kept for nonfinite" in text
    assert "/log" in text
    assert '"kind":"trace"' in page.read_text()
    assert main(["replay", str(tmp_path / "run"), "--model", spec, "--step", "9"]) == 1
    assert "has kept no batch of step 9: expected one of 3 (nonfinite)" in capsys.readouterr().err
    assert main(["replay", str(tmp_path / "run"), "--model", f"{__file__}:other"]) == 1
    assert "it is another model than model was" in capsys.readouterr().err


def other():
    return nn.Linear(2, 2)


def test_replay_of_what_is_fine_shows_the_ops(tmp_path, capsys):
    with pytest.raises(KeyError):
        train_fine(tmp_path / "run")
    assert main(["replay", str(tmp_path / "run"), "--model", f"{__file__}:build_linear"]) == 0
    text = capsys.readouterr().out
    assert "every op is finite" in text
    assert "/linear#0" in text


def build_linear():
    torch.manual_seed(0)
    return nn.Linear(4, 1)


def train_fine(out):
    model = build_linear()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with gaff.watch(model, optimizer, out=out, every=1, keep_batch=True):
        for step in range(3):
            model(torch.randn(2, 4)).sum().backward()
            if step == 2:
                raise KeyError("of the script's own")
            optimizer.step()


def test_a_run_without_kept_batches_and_garbage_are_told(tmp_path, capsys):
    train(tmp_path / "run", keep_batch=False)
    assert main(["replay", str(tmp_path / "run"), "--model", f"{__file__}:build"]) == 1
    assert "has kept no batch" in capsys.readouterr().err
    (tmp_path / "run" / "batches").mkdir()
    path = tmp_path / "run" / "batches" / "00000000-x.safetensors"
    for write in (lambda: path.write_bytes(b"garbage"), lambda: save_file({"a": torch.zeros(1)}, str(path))):
        write()
        assert main(["replay", str(tmp_path / "run"), "--model", f"{__file__}:build"]) == 1
        assert "is no batch that gaff has kept" in capsys.readouterr().err


def test_the_signal_asks_for_the_last_steps_unless_the_script_has_a_use_for_it(tmp_path):
    model, told = build_linear(), []
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    before = signal.SIG_DFL
    signal.signal(signal.SIGUSR1, before)
    with gaff.watch(model, optimizer, out=tmp_path / "run", tell=told.append):
        for step in range(200):
            model(torch.randn(2, 4)).sum().backward()
            optimizer.step()
            if step == 150:
                os.kill(os.getpid(), signal.SIGUSR1)
    assert signal.getsignal(signal.SIGUSR1) == before
    step, event = next(one for one in gaff.load(tmp_path / "run").events("flight") if "SIGUSR1" in one[1]["why"])
    assert [row["step"] for row in event["rows"]][-1] == step - 1
    assert any("the last steps up to step" in line for line in told)
    calls = []
    signal.signal(signal.SIGUSR1, lambda number, frame: calls.append(number))
    try:
        with gaff.watch(model, optimizer, out=tmp_path / "other"):
            os.kill(os.getpid(), signal.SIGUSR1)
            time.sleep(0)
        assert calls == [signal.SIGUSR1]
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_watching_from_another_thread_touches_no_signal(tmp_path):
    before = signal.getsignal(signal.SIGUSR1)
    errors = []

    def work():
        try:
            train(tmp_path / "run", bad=1)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not errors
    assert signal.getsignal(signal.SIGUSR1) == before


KILLED = """
import os, sys, torch, gaff
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
watch = gaff.watch(model, optimizer, out=sys.argv[1])
for step in range(100):
    loss = model(torch.randn(4, 2)).sum()
    loss.backward()
    optimizer.step()
    if step == 90:
        print(loss.item(), flush=True)
        os.kill(os.getpid(), 9)
"""


@pytest.mark.slow
def test_what_kills_the_process_leaves_its_very_last_step(tmp_path):
    ran = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path / "run")], capture_output=True, text=True, check=False
    )
    assert ran.returncode == -9
    rows = gaff.load(tmp_path / "run").flight()
    assert rows[-1].step == 90
    assert rows[-1].losses["loss"] == float(ran.stdout)
    assert len(rows) == ROWS
    loss = gaff.load(tmp_path / "run").scalar("loss")  # with the steps that the log does not have
    assert (loss.steps[-ROWS:], loss.values[-1]) == (list(range(91 - ROWS, 91)), float(ran.stdout))
    assert "no loss was seen" not in str(gaff.load(tmp_path / "run").verdict)
    assert gaff.load(tmp_path / "run").overhead is None


def test_the_step_of_a_second_optimizer_belongs_to_the_same_step(tmp_path):
    """Gradients that it is about to use are not those of before; what is bad in them is found in their step."""
    a, b = nn.Linear(4, 4), nn.Linear(4, 1)
    model = nn.ModuleDict({"a": a, "b": b})
    optimizers = [torch.optim.SGD(one.parameters(), 0.01) for one in (a, b)]
    with gaff.watch({"a": a, "b": b}, optimizers, out=tmp_path / "run", every=1, keep_batch=True) as watch:
        for step in range(30):
            model.zero_grad()
            x = torch.randn(8, 4)
            loss = b(a(x).detach())
            loss = (loss * 0).sqrt().sum() if step == 20 else loss.square().sum()  # sqrt'(0) is inf
            (loss + a(x).square().mean()).backward()
            for optimizer in optimizers:
                optimizer.step()
            assert watch.step == step + 1
    rules = {(one.rule, one.since) for one in gaff.load(tmp_path / "run").findings}
    assert not any(rule == "not_cleared" for rule, _ in rules)
    assert ("nonfinite", 20) in rules


def test_looking_for_the_origin_writes_into_no_batch_of_the_users(tmp_path):
    class InPlace(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 1)

        def forward(self, x, bad):
            x.div_(4)
            y = self.fc(x)
            return (y * float("nan") if bad else y).square().mean()

    data = torch.rand(3, 8, 4)
    wanted = data / 4
    model = InPlace()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with gaff.watch(model, optimizer, out=tmp_path / "run", keep_batch=True):
        for step in range(3):
            optimizer.zero_grad()
            model(data[step], step == 1).backward()
            optimizer.step()
    assert torch.equal(data, wanted)
    kept = read_kept(kept_of(tmp_path / "run")[0])
    assert kept.was_changed
    assert torch.equal(kept.batch.args[0], wanted[1])


def test_the_micro_batch_that_did_harm_is_kept_not_the_last(tmp_path):
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    bad, good = torch.full((4, 2), float("inf")), torch.ones(4, 2)
    with gaff.watch(model, optimizer, out=tmp_path / "run", every=1, keep_batch=True):
        for x in (bad, good):
            model(x).sum().backward()
        optimizer.step()
    assert torch.equal(read_kept(kept_of(tmp_path / "run")[0]).batch.args[0], bad)


def test_modes_buffers_and_odd_keys_are_kept(tmp_path):
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.fc = nn.BatchNorm1d(3), nn.Linear(3, 1)
            self.register_buffer("extra", torch.zeros(()), persistent=False)

        def forward(self, given):
            return self.fc(self.norm(given["a.b"] + given["a"]["b"])) * self.extra

    model = Odd()
    model.norm.eval()
    model.extra.fill_(float("nan"))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    given = {"a.b": torch.randn(4, 3), "a": {"b": torch.randn(4, 3)}, 7: 1}
    with gaff.watch(model, optimizer, out=tmp_path / "run", every=1, keep_batch=True):
        model(given).sum().backward()
        optimizer.step()
    kept = read_kept(kept_of(tmp_path / "run")[0])
    fresh = Odd().double()
    kept.restore(fresh)
    (found,) = kept.batch.args
    assert torch.equal(found["a.b"], given["a.b"])
    assert torch.equal(found["a"]["b"], given["a"]["b"])
    assert found[7] == 1
    assert not fresh.norm.training
    assert fresh.training
    assert math.isnan(fresh.extra)
    assert fresh.fc.weight.dtype == torch.float32


def test_a_checksum_copies_no_more_than_it_needs(monkeypatch):
    from gaff.training.watch import step_facts

    wide = torch.randn(64, 3, 50, 50).to(memory_format=torch.channels_last)
    assert step_facts.fingerprint((wide,), {}, 4096) == step_facts.fingerprint((wide.contiguous(),), {}, 4096)
    sizes = []
    real = torch.Tensor.reshape
    monkeypatch.setattr(torch.Tensor, "reshape", lambda self, *shape: sizes.append(self.numel()) or real(self, *shape))
    step_facts.fingerprint((wide, torch.ones(1).expand(1000, 1000)), {}, 4096)
    assert max(sizes) <= 8192


def test_losses_that_go_backward_together_keep_their_names(tmp_path):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    with gaff.watch(model, optimizer, out=tmp_path / "run"):
        small = model(torch.ones(1, 2)).sum() * 0 + 1
        large = model(torch.ones(1, 2)).sum() * 0 + 100
        torch.autograd.backward([small, large])
        optimizer.step()
    record = gaff.load(tmp_path / "run")
    assert record.scalar("loss:small").values == [1.0]
    assert record.scalar("loss:large").values == [100.0]


def two(tmp_path, loop, steps=12):
    """A training with two optimizers; ``loop`` makes one iteration."""
    torch.manual_seed(0)
    a, b = nn.Linear(4, 4), nn.Linear(4, 1)
    optimizers = torch.optim.SGD(a.parameters(), 0.1), torch.optim.SGD(b.parameters(), 0.001)
    with gaff.watch({"a": a, "b": b}, list(optimizers), out=tmp_path / "run", every=1) as watch:
        for step in range(steps):
            loop(a, b, *optimizers, step)
            assert watch.step == step + 1
    return gaff.load(tmp_path / "run")


def test_a_closure_of_the_second_optimizer_belongs_to_the_step(tmp_path):
    def loop(a, b, first, second, step):
        x = torch.randn(8, 4)

        def closure():
            second.zero_grad()
            loss = b(a(x).detach()).square().mean()
            loss.backward()
            return loss

        first.zero_grad()
        a(x).square().mean().backward()
        first.step()
        second.step(closure)

    record = two(tmp_path, loop)
    assert len(record.series("b.weight:grad", "rms")) >= 11
    assert len(record.series("b.weight:update", "rms")) >= 11
    assert not [one.rule for one in record.findings]


def test_numbers_of_the_second_optimizer_are_there_from_the_first_step_on(tmp_path):
    def loop(a, b, first, second, step):
        for one in (first, second):
            one.zero_grad()
        b(a(torch.randn(8, 4))).square().mean().backward()
        first.step()
        second.step()

    record = two(tmp_path, loop)
    assert record.series("b.weight:grad", "rms").steps == list(range(12))
    assert set(record.scalar("lr").values) == {0.1}  # the leader's


def test_accumulating_in_the_second_optimizer_is_no_fault(tmp_path):
    def loop(a, b, first, second, step):
        first.zero_grad()
        b(a(torch.randn(8, 4))).square().mean().backward()
        first.step()
        if step % 2:
            second.step()
            second.zero_grad()

    assert not [one.rule for one in two(tmp_path, loop, 24).findings if one.rule == "not_cleared"]


def test_who_asks_first_is_not_taken_for_the_thread_that_trains(tmp_path):
    model = build_linear()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    watch = gaff.watch(model, optimizer, out=tmp_path / "run")
    assert watch.step == 0
    assert watch.findings == []

    def work():
        for _ in range(5):
            model(torch.randn(2, 4)).sum().backward()
            optimizer.step()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert watch.step == 5
    watch.remove()


def test_a_nan_is_seen_in_whichever_loss_it_is(tmp_path):
    model = build_linear()
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    with gaff.watch(model, optimizer, out=tmp_path / "run") as watch:
        good, bad = model(torch.ones(1, 4)).sum(), (model(torch.ones(1, 4)) * NAN).sum()
        torch.autograd.backward([bad, good])
    assert [one.rule for one in watch.findings] == ["nonfinite"]


def test_a_model_that_writes_into_what_another_made_can_be_examined(tmp_path):
    class Log(nn.Module):
        def forward(self, x):
            return (x - x).log()

    backbone, head = nn.Linear(4, 4), nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4), Log())
    optimizer = torch.optim.SGD([*backbone.parameters(), *head.parameters()], 0.1)
    with gaff.watch({"backbone": backbone, "head": head}, optimizer, out=tmp_path / "run") as watch:
        (head(backbone(torch.randn(2, 4))).sum() * NAN).backward()
    assert "/log" in watch.findings[0].site


def test_what_is_expanded_is_not_written_out(tmp_path):
    from gaff.inspection.nonfinite.rerun import _Own

    wide = torch.ones(1, 3).expand(10**7, 3)
    own = _Own()
    found = own(wide)
    assert found.untyped_storage().nbytes() == 12
    assert found.shape == wide.shape
    assert own(wide) is found


def test_tied_weights_stay_tied_when_they_are_restored(tmp_path):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
            self.two.weight = self.one.weight

        def forward(self, x):
            return self.two(self.one(x)) * NAN

    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with gaff.watch(model, optimizer, out=tmp_path / "run", keep_batch=True):
        model(torch.randn(2, 3)).sum().backward()
    fresh = Tied().half()
    read_kept(kept_of(tmp_path / "run")[0]).restore(fresh)
    assert fresh.two.weight is fresh.one.weight
    assert torch.equal(fresh.one.weight, model.one.weight)
    with pytest.raises(gaff.errors.PlanError, match=r"it is another model than model was: one.weight is of shape"):
        other = Tied()
        other.one = nn.Linear(4, 3, bias=False)
        read_kept(kept_of(tmp_path / "run")[0]).restore(other)


def test_a_handler_that_another_thread_could_not_take_away_gives_way(tmp_path):
    import threading

    def train(model):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(2):
            model(torch.randn(2, model.weight.shape[1])).sum().backward()
            optimizer.step()

    before, model = signal.getsignal(signal.SIGUSR1), build_linear()
    first = gaff.watch(model, out=tmp_path / "first")
    assert signal.getsignal(signal.SIGUSR1) == before  # others look whether it is free when they begin
    train(model)
    closes = threading.Thread(target=first.remove)
    closes.start()
    closes.join()
    assert signal.getsignal(signal.SIGUSR1) != signal.SIG_DFL
    with gaff.watch(model, out=tmp_path / "second"):
        train(model)
        assert signal.getsignal(signal.SIGUSR1).__self__._before is not None
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL


def test_replay_of_a_fault_outside_of_the_model_repeats_what_the_run_told(tmp_path, capsys):
    torch.manual_seed(0)
    model = build_linear()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with gaff.watch(model, out=tmp_path / "run", every=1, keep_batch=True):
        for step in range(4):
            out = model(torch.randn(4, model.in_features))
            away = out - (out.detach() if step == 2 else torch.zeros_like(out))
            optimizer.zero_grad()
            away.square().sum(1).sqrt().mean().backward()
            optimizer.step()
            if step == 2:
                break
    assert main(["replay", str(tmp_path / "run"), "--model", f"{__file__}:build_linear"]) == 0
    text = capsys.readouterr().out
    assert "every op is finite" in text
    assert "note: what the run told of this step lies outside of the model, or is no NaN: " in text
    assert "sqrt" in text.partition("note: ")[2]
