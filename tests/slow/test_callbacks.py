"""Callbacks of Lightning and of transformers: they watch a training run, compute nothing else, and end with it."""

import copy
import logging
import math
import pickle
import time

import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from pytorch_lightning.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel, PrinterCallback, Trainer, TrainingArguments

import gaff
from gaff.errors import PlanError, RecordError
from gaff.integrations import lightning, transformers

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)


class Lit(pl.LightningModule):
    def __init__(self, fails_at=None):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
        self.fails_at = fails_at

    def training_step(self, batch, number):
        if number == self.fails_at:
            raise ZeroDivisionError("in the user's step")
        return F.cross_entropy(self.body(batch[0]), batch[1])

    def validation_step(self, batch, number):
        self.log("val", F.cross_entropy(self.body(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


class Sparse(Lit):
    """One whose gradients are sparse in part, as those of large embeddings are."""

    def __init__(self, fails_at=None):
        super().__init__(fails_at)
        self.names = nn.Embedding(10, 6, sparse=True)

    def training_step(self, batch, number):
        return F.cross_entropy(self.body(batch[0] + self.names(batch[1])), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-2)


def fit(folder, *callbacks, logger=False, fails_at=None, make=Lit):
    torch.manual_seed(3)
    lit = make(fails_at)
    loader = DataLoader(TensorDataset(torch.randn(40, 6), torch.randint(0, 3, (40,))), 5, shuffle=True)
    trainer = pl.Trainer(
        max_epochs=2, logger=logger, callbacks=list(callbacks), accelerator="cpu", enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, log_every_n_steps=4, default_root_dir=str(folder),
    )  # fmt: skip
    trainer.fit(lit, loader, loader)
    return lit, trainer


PLAIN = torch.autograd.backward  # replaced while anything is watched


def backward_is_plain():
    return torch.autograd.backward is PLAIN


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True))


def test_a_lightning_fit_has_the_bits_of_a_bare_one_and_is_watched(tmp_path):
    bare, _ = fit(tmp_path)
    drawn = torch.rand(3)
    callback = lightning.LightningWatch(out=tmp_path / "run", every=1)
    lit, _ = fit(tmp_path, callback)
    assert torch.equal(torch.rand(3), drawn)
    assert same(bare, lit)
    assert callback.watch.failure is None
    record = gaff.load(tmp_path / "run")
    assert record.steps == callback.watch.step == 16
    assert record.is_complete
    assert len(record.series("body.0", "rms")) == 16
    assert len(record.series("body.0", "rms", phase="eval")) > 0
    assert [one.rule for one in record.findings] == [one.rule for one in callback.findings]
    assert backward_is_plain()


@pytest.mark.parametrize("make", [Lit, Sparse])
def test_lightnings_loggers_get_findings_and_the_norm_of_all_gradients(tmp_path, make):
    norms = {}

    class Norms(pl.Callback):
        def on_before_optimizer_step(self, trainer, module, optimizer):
            gradients = [one.grad.to_dense() for one in module.parameters() if one.grad is not None]
            norms[trainer.global_step] = sum(one.square().sum() for one in gradients).sqrt().item()

    logger = CSVLogger(tmp_path)
    told = []
    logger.log_metrics = lambda metrics, step=None: told.append((step, dict(metrics)))
    callback = lightning.LightningWatch(every=1)
    bare, _ = fit(tmp_path, make=make)
    lit, _ = fit(tmp_path, Norms(), callback, logger=logger, make=make)
    assert same(bare, lit)
    ours = [(step, metrics) for step, metrics in told if "gaff/findings" in metrics]
    assert [step for step, _ in ours] == [3, 7, 11, 15, 15]
    for step, metrics in ours[:4]:
        assert metrics["gaff/grad_norm"] == pytest.approx(norms[step], rel=1e-5)
    assert ours[-1][1] == {"gaff/findings": float(sum(not one.is_over for one in callback.findings))}


def test_an_exception_in_a_fit_ends_the_watching_and_is_in_the_record(tmp_path):
    callback = lightning.LightningWatch(out=tmp_path / "run", every=1)
    with pytest.raises(ZeroDivisionError, match="in the user's step"):
        fit(tmp_path, callback, fails_at=3)
    assert backward_is_plain()
    record = gaff.load(tmp_path / "run")
    assert record.is_complete
    assert "ZeroDivisionError: in the user's step" in record.describe("end")["error"]


def train(folder, *callbacks):
    torch.manual_seed(0)
    config = GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=32, n_positions=8, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config)
    data = [{"input_ids": row, "labels": row} for row in torch.randint(0, 32, (32, 8))]
    arguments = TrainingArguments(
        str(folder), max_steps=6, per_device_train_batch_size=4, gradient_accumulation_steps=2, report_to=[],
        disable_tqdm=True, logging_steps=2, use_cpu=True, save_strategy="no", seed=1,
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=data, callbacks=list(callbacks))
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return model, trainer


def test_a_transformers_training_has_the_bits_of_a_bare_one_and_is_watched(tmp_path):
    bare, plain = train(tmp_path)
    drawn = torch.rand(3)
    callback = transformers.TransformersWatch(out=tmp_path / "run", every=1)
    model, trainer = train(tmp_path, callback)
    assert torch.equal(torch.rand(3), drawn)
    assert same(bare, model)
    assert callback.watch.failure is None
    record = gaff.load(tmp_path / "run")
    assert record.steps == 6
    assert record.is_complete
    assert len(record.series("transformer.h.0", "rms")) == 6
    assert backward_is_plain()
    counts = [one["gaff_findings"] for one in trainer.state.log_history]
    assert len(counts) == len(plain.state.log_history) == 4
    assert counts[-1] == sum(not one.is_over for one in callback.findings)
    losses = [one.get("loss") for one in trainer.state.log_history]
    assert losses == [one.get("loss") for one in plain.state.log_history]


def test_after_an_exception_in_transformers_it_can_be_removed(tmp_path):
    class Failing(transformers._Callback):
        def on_step_end(self, args, state, control, **kwargs):
            raise ZeroDivisionError

    callback = transformers.TransformersWatch(out=tmp_path / "run", every=1)
    with pytest.raises(ZeroDivisionError):
        train(tmp_path, callback, Failing())
    assert not backward_is_plain()
    callback.remove()
    assert backward_is_plain()
    assert "the Trainer's loop was left" in gaff.load(tmp_path / "run").describe("end")["error"]
    with pytest.raises(ZeroDivisionError):
        train(tmp_path, callback, Failing())
    train(tmp_path, callback)  # ends what the one before has left
    assert gaff.load(tmp_path / "run-2").verdict.state == "failed"
    assert not gaff.load(tmp_path / "run-3").describe("end").get("error")


def test_what_evaluate_returns_is_not_written_to(tmp_path):
    callback = transformers.TransformersWatch(every=1)
    _, trainer = train(tmp_path, callback)
    callback.on_train_begin(None, trainer.state, None, model=trainer.model)  # as while it trains
    told = trainer.evaluate(trainer.train_dataset)
    callback.on_train_end(None, trainer.state, None)
    assert "eval_loss" in told
    assert "gaff_findings" not in told
    assert "gaff_findings" in trainer.state.log_history[-1]


@pytest.mark.parametrize("kind", [lightning.LightningWatch, transformers.TransformersWatch])
def test_what_cannot_be_is_told(kind, tmp_path):
    with pytest.raises(TypeError, match="unexpected keyword argument 'evry'"):
        kind(evry=2)
    run = fit if kind is lightning.LightningWatch else train
    with pytest.raises(PlanError, match="every=0: expected a number of steps, 1 or more"):
        run(tmp_path, kind(every=0))
    run(tmp_path, kind(out=tmp_path / "run"))
    with pytest.raises(RecordError, match="holds a run already"):
        run(tmp_path, kind(out=tmp_path / "run"))
    assert backward_is_plain()


@pytest.mark.parametrize("kind", [lightning.LightningWatch, transformers.TransformersWatch])
def test_a_second_training_has_a_record_of_its_own(tmp_path, kind):
    run = fit if kind is lightning.LightningWatch else train
    callback = kind(out=tmp_path / "run", every=1)
    for _ in range(3):
        run(tmp_path, callback)
    for name in ("run", "run-2", "run-3"):
        assert gaff.load(tmp_path / name).is_complete
        assert gaff.load(tmp_path / name).steps == gaff.load(tmp_path / "run").steps
    with pytest.raises(gaff.GaffError, match="holds a run already"):
        run(tmp_path, kind(out=tmp_path / "run", every=1))


class Adversaries(Lit):
    """Two optimizers that step in each batch, as those of a GAN."""

    automatic_optimization = False

    def training_step(self, batch, number):
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            loss = F.cross_entropy(self.body(batch[0]), batch[1])
            self.log("loss", loss)
            self.manual_backward(loss)
            optimizer.step()

    def configure_optimizers(self):
        layers = self.body[0], self.body[2]
        return [torch.optim.SGD(one.parameters(), 1e-2) for one in layers], []


def test_numbers_stand_at_lightnings_own_steps_with_two_optimizers(tmp_path):
    logger, told = CSVLogger(tmp_path), []
    logger.log_metrics = lambda metrics, step=None: told.append((step, set(metrics)))
    fit(tmp_path, lightning.LightningWatch(every=1), logger=logger, make=Adversaries)
    own = [step for step, names in told if "loss" in names]
    assert own == [3, 7, 11, 15]
    assert [step for step, names in told if "gaff/grad_norm" in names] == own


def told_of(folder, make):
    """What a fit gave to its logger: the norm of all gradients by step."""
    logger, told = CSVLogger(folder), {}
    logger.log_metrics = lambda metrics, step=None: told.setdefault(step, metrics.get("gaff/grad_norm"))
    fit(folder, lightning.LightningWatch(every=1), logger=logger, make=make)
    return told


class Rare(Lit):
    """One that steps at every eighth batch alone."""

    automatic_optimization = False

    def training_step(self, batch, number):
        self.manual_backward(F.cross_entropy(self.body(batch[0]), batch[1]))
        if number % 8 == 7:
            self.optimizers().step()


def test_no_norm_is_told_of_a_step_that_no_optimizer_made(tmp_path):
    told = told_of(tmp_path, Rare)
    assert [step for step, norm in told.items() if norm is not None] == [7, 15]


class Clipping(Adversaries):
    norms = ()

    def training_step(self, batch, number):
        norms = []
        for optimizer, layer in zip(self.optimizers(), (self.body[0], self.body[2]), strict=True):
            self.zero_grad()
            self.manual_backward(F.cross_entropy(self.body(batch[0]), batch[1]))
            norms += [one.grad.norm().item() for one in layer.parameters()]
            optimizer.step()
            nn.utils.clip_grad_norm_(layer.parameters(), 1e-3)
        Clipping.norms = (*Clipping.norms, math.hypot(*norms))


def test_of_two_optimizers_each_has_its_own_gradients(tmp_path, monkeypatch):
    monkeypatch.setattr(Clipping, "norms", ())
    told = told_of(tmp_path, Clipping)
    assert [told[step] for step in (3, 7)] == pytest.approx([Clipping.norms[step] for step in (3, 7)], rel=1e-5)


class Huge(Lit):
    def training_step(self, batch, number):
        return 1e25 * super().training_step(batch, number)


def test_a_norm_whose_square_overflows_is_told(tmp_path):
    told = told_of(tmp_path, Huge)
    assert 1e22 < told[3] < 1e27


@pytest.mark.parametrize("kind", [lightning.LightningWatch, transformers.TransformersWatch])
def test_a_callback_that_has_watched_can_be_copied(kind, tmp_path):
    run = fit if kind is lightning.LightningWatch else train
    callback = kind(out=tmp_path / "run", every=1)
    run(tmp_path, callback)
    for copied in (copy.deepcopy(callback), pickle.loads(pickle.dumps(callback))):
        assert copied.watch is None
        assert callback.watch is not None


def test_processes_that_a_trainer_starts_have_a_record_of_each_fit(tmp_path, monkeypatch):
    """Each is given a copy of the callback as it was before, and has begun after the fits of those before it."""
    callback = pickle.dumps(lightning.LightningWatch(out=tmp_path / "run", every=1))
    for number in range(3):
        time.sleep(0.05)  # longer than the clock of files takes
        monkeypatch.setattr(lightning, "_BEGAN", [time.time()])
        time.sleep(0.05)
        copied = pickle.loads(callback)
        fit(tmp_path, copied)
        assert gaff.load(tmp_path / f"run{f'-{number + 1}' if number else ''}").steps == 16
    left = pickle.loads(callback)
    assert [one.path.name for one in left._records(time.time())] == ["run", "run-2", "run-3"]
    assert left.findings == list(gaff.load(tmp_path / "run-3").findings)
