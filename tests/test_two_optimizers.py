"""Numbers of runs with several optimizers, losses or clippings: whose they are, and by what they were multiplied."""

import math

import pytest
import torch
from torch import nn

import gaff

BCE = nn.functional.binary_cross_entropy_with_logits


class Net(nn.Module):
    def __init__(self, given, returned):
        super().__init__()
        self.a, self.b = nn.Linear(given, 20), nn.Linear(20, returned)

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)))


@pytest.fixture
def gan():
    torch.manual_seed(0)
    generator, judge = Net(4, 6), Net(6, 1)
    return generator, judge, torch.optim.Adam(generator.parameters(), 1e-3), torch.optim.Adam(judge.parameters(), 1e-3)


def gradients_of(module, into):
    """An own hook: each gradient at the output of a module."""
    module.register_forward_hook(
        lambda _, args, out: (out.requires_grad and out.register_hook(lambda g: into.append(g.clone()))) and None
    )


def norm_of(several):
    return math.sqrt(sum(float(one.square().sum()) for one in several))


@pytest.mark.parametrize("scales", [(65536.0, 1.0), (1.0, 65536.0), (256.0, 65536.0)])
def test_gradients_of_losses_with_other_scales_are_each_of_its_loss(tmp_path, gan, scales):
    generator, judge, of_generator, of_judge = gan
    scalers = [torch.amp.GradScaler("cpu", init_scale=one, enabled=one != 1.0) for one in scales]
    came, truth, kept = [], [], []
    gradients_of(judge.b, came)

    def step(loss, optimizer, number):
        optimizer.zero_grad()
        scalers[number].scale(loss).backward()
        scalers[number].step(optimizer)
        scalers[number].update()
        kept.extend(one / scales[number] for one in came)
        came.clear()

    with gaff.watch({"G": generator, "D": judge}, [of_judge, of_generator], out=tmp_path / "run", every=1):
        for _ in range(4):
            with torch.no_grad():
                fake = generator(torch.randn(32, 4))
            real = BCE(judge(torch.randn(32, 6)), torch.ones(32, 1)) + BCE(judge(fake), torch.zeros(32, 1))
            step(real, of_judge, 0)
            truth.append(norm_of(kept))
            kept.clear()
            step(BCE(judge(generator(torch.randn(32, 4))), torch.ones(32, 1)), of_generator, 1)
    told = gaff.load(tmp_path / "run").series("D.b:grad_output", "norm").values
    assert told[:4] == pytest.approx(truth, rel=1e-5)


def test_a_penalty_on_gradients_that_is_not_scaled_counts_as_it_is(tmp_path):
    torch.manual_seed(0)
    judge, came, truth = Net(6, 1), [], []
    optimizer, scaler = torch.optim.Adam(judge.parameters(), 1e-3), torch.amp.GradScaler("cpu", init_scale=65536.0)
    gradients_of(judge.a, came)
    with gaff.watch(judge, optimizer, out=tmp_path / "run", every=1):
        for _ in range(3):
            optimizer.zero_grad()
            x = torch.randn(32, 6, requires_grad=True)
            y = judge(x)
            (slope,) = torch.autograd.grad(y, x, grad_outputs=torch.ones_like(y), create_graph=True)
            first = [one.detach().clone() for one in came]
            came.clear()
            scaler.scale(y.mean() + (slope.norm(dim=1) - 1).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            truth.append(norm_of([*first, *(one.detach() / 65536 for one in came)]))
            came.clear()
    assert gaff.load(tmp_path / "run").series("a:grad_output", "norm").values == pytest.approx(truth, rel=1e-5)


def test_the_halves_of_a_gan_that_share_a_forward_share_a_step(tmp_path, gan):
    """As in torch's own tutorial: what the generator made before the judge's step has its gradient after it."""
    generator, judge, of_generator, of_judge = gan
    came, truth = [], []
    gradients_of(generator.a, came)
    with gaff.watch({"G": generator, "D": judge}, [of_judge, of_generator], out=tmp_path / "run", every=1) as watching:
        for _ in range(6):
            of_judge.zero_grad()
            BCE(judge(torch.randn(32, 6)), torch.ones(32, 1)).backward()
            fake = generator(torch.randn(32, 4))
            BCE(judge(fake.detach()), torch.zeros(32, 1)).backward()
            of_judge.step()
            of_generator.zero_grad()
            BCE(judge(fake), torch.ones(32, 1)).backward()
            of_generator.step()
            truth.append(norm_of(came))
            came.clear()
    record = gaff.load(tmp_path / "run")
    told = dict(record.series("G.a:grad_output", "norm"))
    assert {step: told[step] for step in range(2, 6)} == pytest.approx(dict(enumerate(truth[2:], 2)), rel=1e-5)
    assert watching.step == 6
    assert not any("after the step" in one for one in record.notes)


def test_gradients_that_come_after_the_step_of_a_lone_optimizer_are_named(tmp_path):
    torch.manual_seed(0)
    model, other = Net(4, 3), Net(3, 1)
    optimizer = torch.optim.SGD(other.parameters(), 1e-3)
    with gaff.watch({"M": model, "O": other}, optimizer, out=tmp_path / "run", every=1):
        for _ in range(4):
            h = model(torch.randn(8, 4))
            other(h.detach()).mean().backward()
            optimizer.step()
            h.square().mean().backward()
    told = [one for one in gaff.load(tmp_path / "run").notes if "after the step" in one]
    assert told == ["gradients that came after the step of their forward were not looked at: M.a:grad_output, "
                    "M.b:grad_output"]  # fmt: skip


@pytest.mark.parametrize("is_first", [True, False])
def test_the_loss_of_a_model_that_is_not_watched_is_left_out_wherever_it_stands(tmp_path, gan, is_first):
    generator, judge, of_generator, of_judge = gan
    truth = []
    with gaff.watch({"G": generator}, of_generator, out=tmp_path / "run", every=1):
        for _ in range(4):
            fake = generator(torch.randn(32, 4)) if is_first else None
            of_judge.zero_grad()
            theirs = BCE(judge(torch.randn(32, 6)), torch.ones(32, 1))
            theirs.backward()
            of_judge.step()
            of_generator.zero_grad()
            loss = BCE(judge(generator(torch.randn(32, 4)) if fake is None else fake), torch.ones(32, 1))
            loss.backward()
            of_generator.step()
            truth.append(loss.item())
    record = gaff.load(tmp_path / "run")
    assert record.scalar("loss").values == pytest.approx(truth, rel=1e-6)
    assert [name for name in record.scalars if name.startswith("loss")] == ["loss:loss"]


@pytest.mark.parametrize("way", ["once", "in parts", "each", "measured after", "measured before", "largest"])
def test_the_norm_before_clipping_is_that_of_all_that_was_clipped(tmp_path, way):
    torch.manual_seed(0)
    model, truth = Net(4, 3), []
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    utils = torch.nn.utils
    with gaff.watch(model, optimizer, out=tmp_path / "run", every=1):
        for _ in range(4):
            optimizer.zero_grad()
            (model(torch.randn(8, 4)).square().mean() * 100).backward()
            truth.append(norm_of([one.grad for one in model.parameters()]))
            if way == "measured before":
                utils.clip_grad_norm_(model.parameters(), math.inf)
            if way in ("once", "measured after", "measured before"):
                utils.clip_grad_norm_(model.parameters(), 1.0)
            elif way == "in parts":
                utils.clip_grad_norm_(model.b.parameters(), 1.0)
                utils.clip_grad_norm_(model.a.parameters(), 1.0)
            elif way == "each":
                for one in model.parameters():
                    utils.clip_grad_norm_(one, 1.0)
            else:
                utils.clip_grad_norm_(model.parameters(), 1.0, norm_type=math.inf)
            if way == "measured after":
                utils.clip_grad_norm_(model.parameters(), math.inf)
            optimizer.step()
    record = gaff.load(tmp_path / "run")
    if way == "largest":
        assert "unclipped_norm" not in record.scalars
    else:
        assert record.scalar("unclipped_norm").values == pytest.approx(truth, rel=1e-5)


def test_moments_of_large_numbers_and_of_half_precision_are_finite(tmp_path):
    torch.manual_seed(0)
    model = nn.Linear(20, 20)
    optimizer = torch.optim.SGD(model.parameters(), 1e-25, momentum=0.9)
    with gaff.watch(model, optimizer, out=tmp_path / "large", every=1):
        (model(torch.randn(8, 20)).mean() * 1e22).backward()
        optimizer.step()
    truth = optimizer.state[model.weight]["momentum_buffer"].double().norm().item()
    told = gaff.load(tmp_path / "large").series("weight:param", "momentum").values
    assert told[0] == pytest.approx(truth, rel=1e-5)

    model = nn.Linear(20, 20).half()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3, eps=1e-4)
    with gaff.watch(model, optimizer, out=tmp_path / "half", every=1):
        (model(torch.randn(8, 20).half()).square().mean() * 0.1).backward()
        optimizer.step()
    state = optimizer.state[model.weight]
    expected = (state["exp_avg_sq"].double() / (1 - 0.999)).clamp(min=1e-8)
    truth = (model.weight.grad.double().square() / expected).mean().sqrt().item()
    told = gaff.load(tmp_path / "half").series("weight:param", "adam_rms").values
    assert told[0] == pytest.approx(truth, rel=1e-3)


def test_the_penalty_of_torchs_own_recipe_is_told_as_it_is(tmp_path):
    """A scaled pass by ``torch.autograd.grad`` with a graph, then a scaled backward pass: both are unscaled."""
    torch.manual_seed(0)
    model, came, truth = Net(6, 1), [], []
    optimizer, scaler = torch.optim.SGD(model.parameters(), 1e-3), torch.amp.GradScaler("cpu", init_scale=65536.0)
    gradients_of(model.a, came)
    with gaff.watch(model, optimizer, out=tmp_path / "run", every=1):
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(torch.randn(32, 6)).square().mean()
            scaled = torch.autograd.grad(scaler.scale(loss), list(model.parameters()), create_graph=True)
            penalty = sum((one / 65536).square().sum() for one in scaled).sqrt()
            scaler.scale(loss + penalty).backward()
            scaler.step(optimizer)
            scaler.update()
            truth.append(norm_of([one.detach() / 65536 for one in came]))
            came.clear()
    assert gaff.load(tmp_path / "run").series("a:grad_output", "norm").values == pytest.approx(truth, rel=1e-5)


@pytest.mark.parametrize("way", ["frozen with a new head", "given by hand"])
def test_losses_of_parameters_that_are_new_are_those_of_the_watched_model(tmp_path, way):
    torch.manual_seed(0)
    model = Net(6, 1)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with gaff.watch(model, optimizer, out=tmp_path / "run", every=1):
        if way == "frozen with a new head":
            model.requires_grad_(False)
            model.b = nn.Linear(20, 2)
        given = {name: one.detach().clone().requires_grad_() for name, one in model.named_parameters()}
        for _ in range(3):
            x = torch.randn(8, 6)
            out = model(x) if way != "given by hand" else torch.func.functional_call(model, given, (x,))
            out.square().mean().backward()
            optimizer.step()
    assert len(gaff.load(tmp_path / "run").scalar("loss").values) == 3
