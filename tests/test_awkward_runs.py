"""Runs that people make and that look odd from outside: what is healthy is not accused, and faults are named as they are."""

import copy
import math
import random

import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import gaff


def test_a_fit_that_is_perfect_is_not_called_one_that_does_not_move(tmp_path):
    """A coordinate network whose loss falls to 1e-15: steps of its last bias are lost to rounding then."""
    torch.manual_seed(0)
    line = torch.linspace(-1, 1, 8)
    at = torch.stack(torch.meshgrid(line, line, indexing="ij"), -1).view(-1, 2)
    target = torch.sin(3 * at[:, :1]) * at[:, 1:]

    class Sine(nn.Module):
        def __init__(self, given, made, bound):
            super().__init__()
            self.linear = nn.Linear(given, made)
            nn.init.uniform_(self.linear.weight, -bound, bound)

        def forward(self, x):
            return torch.sin(30 * self.linear(x))

    model = nn.Sequential(Sine(2, 64, 0.5), Sine(64, 64, math.sqrt(6 / 64) / 30), nn.Linear(64, 1))
    optimizer = torch.optim.Adam(model.parameters(), 1e-4)
    with gaff.watch(model, optimizer, out=tmp_path / "run"):
        for _ in range(400):
            optimizer.zero_grad()
            F.mse_loss(model(at), target).backward()
            optimizer.step()
    record = gaff.load(tmp_path / "run")
    assert min(record.scalar("loss").values) < 1e-12
    assert record.verdict.state == "healthy", str(record.verdict)


@pytest.mark.slow
@pytest.mark.parametrize("is_replayed", [True, False])
def test_an_agent_whose_targets_come_from_older_weights_is_no_run_whose_data_changes(tmp_path, is_replayed):
    """Loss jumps whenever the target network takes the newer weights; the same jumps without an agent are told."""
    torch.manual_seed(0)
    random.seed(0)
    states, eye = 8, torch.eye(8)
    online, target = (nn.Sequential(nn.Linear(states, 32), nn.ReLU(), nn.Linear(32, 2)) for _ in range(2))
    target.load_state_dict(online.state_dict())
    optimizer = torch.optim.Adam(online.parameters(), 2e-3)
    seen, state, made = [], 0, 0
    with gaff.watch(online, optimizer, out=tmp_path / "run"):
        for step in range(2400):
            if is_replayed and random.random() > 0.5:
                with torch.no_grad():
                    action = int(online(eye[state]).argmax())
            else:
                action = random.randrange(2)
            then = max(0, state - 1) if action == 0 else state + 1
            is_over = then == states - 1
            seen.append((state, action, 1.0 if is_over else -0.1, then, float(is_over)))
            state = 0 if is_over else then
            if len(seen) <= 64 or step % 2:
                continue
            old, action, reward, new, over = map(torch.tensor, zip(*random.sample(seen, 64), strict=True))
            with torch.no_grad():
                wanted = reward + 0.95 * (1 - over) * target(eye[new]).max(1).values
            optimizer.zero_grad()
            F.mse_loss(online(eye[old]).gather(1, action[:, None])[:, 0], wanted).backward()
            optimizer.step()
            made += 1
            if made % 150 == 0:
                target.load_state_dict(online.state_dict())
    verdict = gaff.load(tmp_path / "run").verdict
    assert (verdict.state == "healthy") is is_replayed, str(verdict)


def test_labels_with_noise_on_them_are_what_a_discriminator_may_be_given(tmp_path):
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))
    judge = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
    of_made, of_judge = (torch.optim.Adam(one.parameters(), 5e-4, betas=(0.5, 0.999)) for one in (made, judge))
    loss = nn.BCEWithLogitsLoss()
    with gaff.watch(out=tmp_path / "run"):
        for _ in range(60):
            angle = torch.rand(64) * 6.283
            true, false = torch.stack([angle.cos(), angle.sin()], 1), made(torch.randn(64, 8))
            of_judge.zero_grad()
            real = loss(judge(true), torch.empty(64, 1).uniform_(0.7, 1.2))
            (real + loss(judge(false.detach()), torch.empty(64, 1).uniform_(0, 0.3))).backward()
            of_judge.step()
            of_made.zero_grad()
            loss(judge(false), torch.ones(64, 1)).backward()
            of_made.step()
    assert "targets_no_probabilities" not in {one.rule for one in gaff.load(tmp_path / "run").findings}


def test_inputs_in_their_own_units_are_told_where_the_loss_breaks_at_once(tmp_path):
    torch.manual_seed(0)
    x = torch.stack(
        [torch.rand(512) * 5, torch.rand(512) * 50, torch.randn(512) * 800 + 1400, torch.randn(512) - 120], 1
    )
    y = 0.5 * x[:, :1] + 0.2 * torch.randn(512, 1)
    model = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with gaff.watch(model, optimizer, out=tmp_path / "run"):
        for _ in range(100):
            rows = torch.randint(512, (64,))
            optimizer.zero_grad()
            F.mse_loss(model(x[rows]), y[rows]).backward()
            optimizer.step()
    verdict = gaff.load(tmp_path / "run").verdict
    assert verdict.name == "input_scale", str(verdict)


@pytest.mark.parametrize("is_under_no_grad", [True, False])
def test_a_head_on_a_frozen_encoder_is_one_more_model(tmp_path, is_under_no_grad):
    """Whether the encoder runs under ``no_grad``, or in eval mode with parameters that ask for no gradient."""
    torch.manual_seed(0)
    x = torch.randn(512, 32)
    y = x[:, :5].argmax(1)
    encoder = nn.Sequential(nn.Linear(32, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 16))
    decoder, head = nn.Linear(16, 32), nn.Linear(16, 5)
    with gaff.watch(out=tmp_path / "run"):
        optimizer = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()], 2e-3)
        for at in range(100):
            rows = slice(at % 8 * 64, (at % 8 + 1) * 64)
            optimizer.zero_grad()
            loss = F.mse_loss(decoder(encoder(x[rows])), x[rows])
            loss.backward()
            optimizer.step()
        encoder.eval().requires_grad_(False)
        optimizer = torch.optim.SGD(head.parameters(), 0.1)
        for at in range(100):
            rows = slice(at % 8 * 64, (at % 8 + 1) * 64)
            optimizer.zero_grad()
            with torch.set_grad_enabled(not is_under_no_grad):
                given = encoder(x[rows])
            loss = F.cross_entropy(head(given), y[rows])
            loss.backward()
            optimizer.step()
    record = gaff.load(tmp_path / "run")
    assert len(record.scalar("loss").values) == 100
    assert len(record.scalar("loss#2").values) == 100
    assert "for the first of 2 trainings" in str(record.verdict)


def test_a_dropout_that_is_a_function_is_told_as_a_module_is(tmp_path):
    class Drops(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(16, 64), nn.Linear(64, 4)

        def forward(self, x):
            return self.last(F.dropout(F.relu(self.first(x)), 0.95, self.training))

    torch.manual_seed(0)
    x, model = torch.randn(512, 16), Drops()
    y = x[:, :4].argmax(1)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    with gaff.watch(model, optimizer, out=tmp_path / "run"):
        for at in range(60):
            rows = slice(at % 8 * 64, (at % 8 + 1) * 64)
            optimizer.zero_grad()
            F.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
    found = gaff.load(tmp_path / "run").findings
    assert [(one.rule, one.evidence["p"]) for one in found if one.rule == "dropout_high"] == [("dropout_high", 0.95)]


def steps_of(model, optimizer, out, count, batch, loss_of):
    with gaff.watch(model, optimizer, out=out):
        for _ in range(count):
            optimizer.zero_grad()
            loss_of(*batch()).backward()
            optimizer.step()
    return gaff.load(out)


def test_a_weight_that_never_moved_is_told_also_where_the_loss_has_fallen_far(tmp_path):
    """Updates of a LayerNorm in bfloat16 are lost to rounding, while the bias goes to targets near a hundred."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.LayerNorm(16), nn.Linear(16, 1))
    model[1].to(torch.bfloat16)
    weight, x = model[1].weight, torch.randn(64, 4)
    optimizer = torch.optim.SGD([{"params": [weight], "lr": 1e-12}, {"params": model[2].parameters()}], lr=0.05)
    model.forward = lambda x: model[2](model[1](model[0](x).bfloat16()).float())
    record = steps_of(
        model, optimizer, tmp_path / "run", 800, lambda: (x,), lambda x: F.mse_loss(model(x), torch.full((64, 1), 99.0))
    )
    assert record.scalar("loss").values[-1] < 1e-4 * record.scalar("loss").values[0]
    assert "never_updated" in {one.rule for one in record.findings}


@pytest.mark.parametrize("kind", ["pairs that are validated", "one example again", "batches of one"])
def test_ordinary_trainings_do_not_act(tmp_path, kind):
    """Ids of one dimension in an evaluation after each step, the same probe at each step, a teacher beside batches of one."""
    torch.manual_seed(0)
    if kind == "pairs that are validated":
        embed = nn.Embedding(50, 8)
        seen, held = torch.randint(50, (2, 64)), torch.randint(50, (2, 500))
        optimizer = torch.optim.SGD(embed.parameters(), 3.0)

        def loss():
            with torch.no_grad():
                embed(held[0])
            return (embed(seen[0]) * embed(seen[1])).sum(1).sub(1).square().mean()

        model = embed
    else:
        model, many = nn.Linear(6, 1), kind == "one example again"
        x, teacher = torch.randn(32 if many else 1, 6), nn.Linear(6, 1)
        optimizer = torch.optim.SGD(model.parameters(), 1.5)

        def loss():
            with torch.no_grad():
                if many:
                    model(x[:1])
                wanted = teacher(x)
            return F.mse_loss(model(x), wanted)

    record = steps_of(model, optimizer, tmp_path / "run", 60, tuple, loss)
    looks = [one for _, one in record.events("look") if one.get("phase") == "train"]
    assert looks
    assert sum(bool(one.get("acted")) for one in looks) <= 1


def test_two_models_of_one_optimizer_train_in_eval_mode(tmp_path):
    torch.manual_seed(0)
    first, second = (nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)).eval() for _ in range(2))
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], 0.01)
    with gaff.watch(out=tmp_path / "run", every=1):
        for _ in range(30):
            optimizer.zero_grad()
            scores = first(torch.randn(8, 6)) @ second(torch.randn(8, 6)).T
            F.cross_entropy(scores, torch.arange(8)).backward()
            optimizer.step()
    record = gaff.load(tmp_path / "run")
    assert {one.model for one in record.findings if one.rule == "eval_mode_in_training"} == {"first", "second"}
    assert set(record.scalar("samples").values) == {16}


@pytest.mark.slow
@pytest.mark.parametrize("way", ["mean", "sum", "weighted"])
@pytest.mark.parametrize("are_pairs", [True, False])
def test_a_loss_of_pairs_both_ways_is_held_against_guessing(tmp_path, way, are_pairs):
    torch.manual_seed(0)
    hidden = torch.randn(256, 8)
    a, b = hidden @ torch.randn(8, 16), hidden @ torch.randn(8, 12)
    first, second = (nn.Sequential(nn.Linear(n, 32), nn.GELU(), nn.Linear(32, 16)) for n in (16, 12))
    optimizer = torch.optim.Adam([*first.parameters(), *second.parameters()], 1e-3)

    def loss(rows):
        other = rows if are_pairs else rows[torch.randperm(32)]
        one, two = F.normalize(first(a[rows]), dim=-1), F.normalize(second(b[other]), dim=-1)
        scores, labels = 10 * one @ two.T, torch.arange(32)
        across, down = F.cross_entropy(scores, labels), F.cross_entropy(scores.T, labels)
        return {"mean": lambda: (across + down) / 2, "sum": lambda: across + down,
                "weighted": lambda: 0.25 * across + 0.75 * down}[way]()  # fmt: skip

    verdict = steps_of(nn.ModuleList([first, second]), optimizer, tmp_path / "run", 200,
                       lambda: (torch.randperm(256)[:32],), loss).verdict  # fmt: skip
    assert (verdict.state == "healthy") is are_pairs, str(verdict)
    if not are_pairs:
        assert "stays at the level of guessing" in str(verdict)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["logsigmoid", "softplus", "sigmoid", "half"])
@pytest.mark.parametrize("how", ["learned", "slowly", "random"])
def test_a_loss_of_preferred_ones_is_held_against_an_even_score(tmp_path, way, how):
    torch.manual_seed(0)
    users, items = (nn.Embedding(100, 8) for _ in range(2))
    for one in (users, items):
        nn.init.normal_(one.weight, std=0.1)
    liked = torch.randn(100, 3) @ torch.randn(3, 100)
    optimizer = torch.optim.Adam([*users.parameters(), *items.parameters()], 1e-2 if how != "slowly" else 1.5e-3)

    def loss(who, one, other):
        if how != "random":
            is_better = liked[who, one] > liked[who, other]
            one, other = torch.where(is_better, one, other), torch.where(is_better, other, one)
        score = (users(who) * (items(one) - items(other))).sum(1)
        return {"logsigmoid": lambda: -F.logsigmoid(score).mean(), "softplus": lambda: F.softplus(-score).mean(),
                "sigmoid": lambda: (-torch.log(torch.sigmoid(score) + 1e-8)).mean(),
                "half": lambda: F.logsigmoid(score).mean().neg() / 2}[way]()  # fmt: skip

    verdict = steps_of(nn.ModuleList([users, items]), optimizer, tmp_path / "run", 200,
                       lambda: tuple(torch.randint(0, 100, (3, 512))), loss).verdict  # fmt: skip
    assert (verdict.state == "healthy") is (how != "random"), str(verdict)
    if how == "random":
        assert verdict.name == "labels_do_not_belong"
        assert f"guessing gives {math.log(2) / (2 if way == 'half' else 1):.4g}" in str(verdict.evidence)


@pytest.mark.parametrize("wrong", ["model", "averaged", ""])
def test_each_of_two_models_is_looked_at_as_it_is_evaluated(tmp_path, wrong):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 4))
    averaged = copy.deepcopy(model).requires_grad_(requires_grad=False).train(wrong == "averaged")
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    with gaff.watch(out=tmp_path / "run", every=10) as watch:
        for step in range(60):
            model.train()
            optimizer.zero_grad()
            model(torch.randn(8, 16)).square().mean().backward()
            optimizer.step()
            if step % 10 == 9:
                model.train(wrong == "model")
                with torch.no_grad():
                    for one in (model, averaged):
                        for _ in range(4):
                            one(torch.randn(8, 16))
    assert watch.failure is None
    found = {one.model for one in gaff.load(tmp_path / "run").findings if one.rule == "train_mode_in_eval"}
    assert found == ({wrong} if wrong else set())


@pytest.mark.parametrize("kind", ["in the data", "a logarithm"])
def test_a_nan_of_known_origin_is_not_put_on_the_scale_of_inputs(tmp_path, kind):
    torch.manual_seed(0)
    x = (torch.rand(160, 32, 6) * 200 + 300) * 5
    y = x[..., :1] / 100
    model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), 3e-4)
    if kind == "in the data":
        x[120, 3, 2] = math.nan
    at = iter(range(160))

    def loss(step):
        made = model(x[step])
        return F.mse_loss(torch.log(made - made.max()) if kind == "a logarithm" and step >= 120 else made, y[step])

    verdict = steps_of(model, optimizer, tmp_path / "run", 160, lambda: (next(at),), loss).verdict
    assert (verdict.name, verdict.since) == ("nonfinite", 120), str(verdict)


def test_targets_beyond_one_are_told_where_two_optimizers_share_a_model(tmp_path):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)), torch.rand(64, 8) * 1.4 - 0.2
    first, last = torch.optim.SGD(model[0].parameters(), 0.1), torch.optim.AdamW(model[2].parameters(), 1e-3)
    with gaff.watch(out=tmp_path / "run", every=1):
        for _ in range(30):
            model.zero_grad()
            F.binary_cross_entropy_with_logits(model(x), x).backward()
            first.step()
            last.step()
    assert "targets_no_probabilities" in {one.rule for one in gaff.load(tmp_path / "run").findings}


@pytest.mark.parametrize("is_turned", [True, False])
def test_scores_with_classes_first_are_normalised_over_the_classes(tmp_path, is_turned):
    torch.manual_seed(0)
    x, model = torch.randn(96, 8), nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 5))
    y = x[:, :5].argmax(1)

    def loss():
        made = model(x)
        scores = torch.log((made.T if is_turned else made).softmax(0) + 1e-9)
        return F.nll_loss(scores.T if is_turned else scores, y)

    record = steps_of(model, torch.optim.Adam(model.parameters(), 1e-3), tmp_path / "run", 60, tuple, loss)
    assert ("softmax_axis" in {one.rule for one in record.findings}) is not is_turned


def test_autocast_around_the_whole_loop_is_no_running_total(tmp_path):
    """Its cache of converted weights goes from step to step: nodes are shared, losses are not added up."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)), torch.randn(8, 4)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    with torch.autocast("cpu", torch.bfloat16):
        record = steps_of(model, optimizer, tmp_path / "run", 20, lambda: (x,), lambda x: model(x).pow(2).mean())
    assert "loss_holds_the_last" not in {one.rule for one in record.findings}


@pytest.mark.slow
@pytest.mark.parametrize("is_set_back", [True, False])
def test_many_short_trainings_from_weights_set_back_do_not_diverge(tmp_path, is_set_back):
    """Reptile: each task has a loss and an optimizer of its own, and begins from weights between old and new ones.

    Where nobody writes weights anew, new optimizers are one training, and a loss that grows is told.
    """
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(1, 40), nn.Tanh(), nn.Linear(40, 1))
    with gaff.watch(model, out=tmp_path / "run", every=1):
        for task in range(40):
            size, shift = (0.4, 0.0) if task < 10 else (4.0, 3.0)  # later tasks are harder
            before = {name: value.clone() for name, value in model.state_dict().items()}
            optimizer = torch.optim.SGD(model.parameters(), 0.02)
            for _ in range(4):
                x = torch.rand(10, 1) * 10 - 5
                optimizer.zero_grad()
                F.mse_loss(model(x), size * torch.sin(x + shift)).backward()
                optimizer.step()
            after = model.state_dict()
            if is_set_back:
                model.load_state_dict({name: before[name] + 0.1 * (after[name] - before[name]) for name in before})
    record = gaff.load(tmp_path / "run")
    assert ("diverging" in {one.rule for one in record.findings}) is not is_set_back, str(record.verdict)


def test_what_adam_keeps_is_compared_with_the_gradient_of_the_same_elements(tmp_path):
    """State that lies in memory in another order, and rows of a sparse gradient, are left out; halves do not overflow.

    Both would look like moments that are far too small for their gradients.
    """
    torch.manual_seed(0)
    conv = nn.Conv2d(64, 96, 3, padding=1).to(memory_format=torch.channels_last)
    table = nn.Embedding(32, 16, sparse=True)
    half = nn.Linear(4, 4, bias=False).half()
    models = nn.ModuleDict({"conv": conv, "table": table, "low": half})
    adam, sparse = torch.optim.Adam(conv.parameters(), 1e-5), torch.optim.SparseAdam(table.parameters(), 1e-5)
    momentum = torch.optim.SGD(half.parameters(), 0.0, momentum=0.9)
    scale = torch.randn(96, 64, 3, 3)
    kept = {"step": torch.tensor(100.0), "exp_avg": torch.zeros_like(scale), "exp_avg_sq": scale.square() * 0.1}
    adam.state[conv.weight] = kept  # contiguous, as from a checkpoint
    with gaff.watch(models, out=tmp_path / "run", every=1):
        for _ in range(8):
            for optimizer in (adam, sparse, momentum):
                optimizer.zero_grad()
            ids = torch.randint(0, 32, (4, 8))  # as many as the table has rows
            loss = (conv.weight * scale).sum() + table(ids).square().sum() + (half.weight * 60000.0).float().sum()
            loss.backward()
            for optimizer in (adam, sparse, momentum):
                optimizer.step()
    record = gaff.load(tmp_path / "run")
    for site in ("conv.weight:param", "table.weight:param"):
        assert not [one for one in record.series(site, "adam_rms").values if one == one], site
    assert record.series("low.weight:param", "momentum").values[0] == pytest.approx(240000.0)


@pytest.mark.slow
@pytest.mark.parametrize("clears", [True, False])
def test_a_closure_that_adds_gradients_up(tmp_path, clears):
    """The loss of LBFGS explodes without ``zero_grad`` in the closure, at whatever rate: that is no rate too high."""
    torch.manual_seed(0)
    wave = torch.sin(torch.arange(0, 40, 0.2) + torch.arange(30)[:, None] * 0.3).unfold(1, 9, 9).reshape(-1, 9)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=10)

    def closure():
        if clears:
            optimizer.zero_grad()
        loss = F.mse_loss(model(wave[:, :8]), wave[:, 8:])
        loss.backward()
        return loss

    with gaff.watch(model, optimizer, out=tmp_path / "run"):
        for _ in range(25):
            optimizer.step(closure)
    record = gaff.load(tmp_path / "run")
    assert ("not_cleared" in {one.rule for one in record.findings}) is not clears
    assert ("gradients are not cleared" in record.verdict.cause) is not clears, str(record.verdict)


def _gan(tmp_path, *, in_one_batch):
    """A GAN of binary images, whose discriminator sees real and generated ones in one batch, or apart."""
    torch.manual_seed(0)
    data = torch.where(torch.rand(256, 64) < 0.15, 1.0, -1.0)
    data[:, ::2] = -1.0
    generator = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.Tanh())
    critic = nn.Sequential(nn.Linear(64, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
    of_g = torch.optim.Adam(generator.parameters(), 2e-3, betas=(0.5, 0.999))
    of_d = torch.optim.Adam(critic.parameters(), 2e-4, betas=(0.5, 0.999))
    judge, ones, zeros = F.binary_cross_entropy_with_logits, torch.ones(64, 1), torch.zeros(64, 1)
    with gaff.watch({"G": generator, "D": critic}, out=tmp_path / "run", every=4):
        for _ in range(300):
            real, made = data[torch.randint(256, (64,))], generator(torch.randn(64, 8))
            of_g.zero_grad()
            g_loss = judge(critic(made), ones)
            g_loss.backward()
            of_g.step()
            of_d.zero_grad()
            if in_one_batch:
                d_loss = judge(critic(torch.cat([real, made.detach()])), torch.cat([ones, zeros]))
            else:
                d_loss = (judge(critic(real), ones) + judge(critic(made.detach()), zeros)) / 2
            d_loss.backward()
            of_d.step()
    assert (made.abs() > 0.97).float().mean() > 0.5
    return gaff.load(tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("in_one_batch", [True, False])
def test_a_gan_at_rest_has_no_wrong_labels_and_no_saturated_output(tmp_path, in_one_batch):
    record = _gan(tmp_path, in_one_batch=in_one_batch)
    assert record.verdict.state == "healthy", str(record.verdict)


@pytest.mark.parametrize("share", [0.5, 0.25])
def test_guessing_a_coin_costs_no_more_than_a_bit(share):
    from gaff.training.watch.target_facts import _of_probabilities

    targets = (torch.arange(16)[:, None] < 16 * share).float()
    expected = -(share * math.log(share) + (1 - share) * math.log(1 - share))
    assert expected <= _of_probabilities(targets, None, {}).item() <= math.log(2) + 1e-6


def test_two_branches_of_a_model_are_not_one_chain(tmp_path):
    """An actor with a small weight in the loss, called before the critic: Adam takes the scale of gradients away."""
    torch.manual_seed(0)

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.actor, self.critic = (
                nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, size))
                for size in (4, 1)
            )

        def forward(self, x):
            return self.actor(x), self.critic(x)

    w, a = torch.randn(8), torch.randn(8, 4)
    model = Both()

    def loss(x):
        scores, value = model(x)
        return F.mse_loss(value[:, 0], 20 * (x @ w)) + 1e-4 * F.cross_entropy(scores, (x @ a).argmax(1))

    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    record = steps_of(model, optimizer, tmp_path / "run", 120, lambda: (torch.randn(64, 8),), loss)
    assert "vanishing" not in {one.rule for one in record.findings}


@pytest.mark.parametrize("kind", ["l1", "smooth_l1", "huber"])
def test_errors_that_stay_above_one_number_for_all_are_told(tmp_path, kind):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    x = torch.randn(256, 8)
    y = 60000 + 30000 * (x[:, :1] + 0.3 * torch.randn(256, 1))
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    record = steps_of(model, optimizer, tmp_path / "run", 150, tuple, lambda: getattr(F, f"{kind}_loss")(model(x), y))
    assert record.verdict.state == "suspicious", str(record.verdict)


class Codes(nn.Module):
    """Digits by way of a codebook; ``has_both``: with both losses of its paper, else vectors alone follow codes."""

    def __init__(self, *, has_both):
        super().__init__()
        self.encode, self.decode = nn.Linear(64, 16), nn.Linear(16, 64)
        self.book = nn.Embedding(32, 16)
        nn.init.uniform_(self.book.weight, -1 / 32, 1 / 32)
        self.has_both = has_both

    def forward(self, x):
        z = self.encode(x)
        codes = self.book(torch.cdist(z, self.book.weight).argmin(1))
        loss = 0.25 * F.mse_loss(z, codes.detach())
        if self.has_both:
            loss = loss + F.mse_loss(codes, z.detach())
        return self.decode(z + (codes - z).detach()), loss


@pytest.mark.parametrize("has_both", [True, False])
def test_a_codebook_and_its_vectors_are_targets_of_each_other(tmp_path, has_both):
    torch.manual_seed(0)
    x = torch.tensor(load_digits().data[:256], dtype=torch.float32) / 16
    model = Codes(has_both=has_both)

    def loss():
        made, kept = model(x)
        return F.mse_loss(made, x) / x.var() + 4 * kept

    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    record = steps_of(model, optimizer, tmp_path / "run", 60, tuple, loss)
    told = {one.get("own_targets") for _, one in record.events("look") if one.get("phase") == "train"}
    assert told == ({"loss"} if has_both else {None})
    if has_both:
        values = record.scalar("loss").values
        assert max(values) > 2 * values[0]
        named = {one.rule for one in record.findings} | {record.verdict.name}
        assert not named & {"diverging", "learning_rate_too_high"}


@pytest.mark.parametrize("other", ["squared", "weights", "activations"])
def test_losses_of_one_loop_are_not_taken_for_one(tmp_path, other):
    torch.manual_seed(0)
    body, classes, numbers = nn.Sequential(nn.Linear(8, 32), nn.ReLU()), nn.Linear(32, 3), nn.Linear(32, 4)
    model = nn.ModuleList([body, classes, numbers])
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    with gaff.watch(out=tmp_path / "run", every=1):
        for _ in range(20):
            x = torch.randn(32, 8)
            hidden = body(x)
            squared = F.mse_loss(numbers(hidden), 9 * x[:, :4])
            losses = {
                "squared": [F.cross_entropy(classes(hidden), x[:, :3].argmax(1)), squared],
                "weights": [
                    F.cross_entropy(classes(hidden), x[:, :3].argmax(1)),
                    1e-2 * sum(one.square().sum() for one in model.parameters()),
                ],
                "activations": [squared, 1e-3 * hidden.abs().sum(1).mean()],
            }[other]
            optimizer.zero_grad()
            for loss in losses:
                loss.backward(retain_graph=True)
            optimizer.step()
    found = {one.rule for one in gaff.load(tmp_path / "run").findings}
    assert not found & {"initial_loss", "bounded_output"}


@pytest.mark.slow
@pytest.mark.parametrize(("first", "then"), [(8, 1), (1, 8)])
def test_a_loss_that_is_divided_by_another_number_later_is_compared_with_nothing(tmp_path, first, then):
    torch.manual_seed(1)
    x = torch.randn(512, 8)
    y = (x @ torch.randn(8, 3)).argmax(1)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.02)
    with gaff.watch(model, optimizer, out=tmp_path / "run", every=1):
        for step in range(80):
            count = first if step < 40 else then
            for _ in range(count):
                at = torch.randint(512, (16,))
                (F.cross_entropy(model(x[at]), y[at]) / count).backward()
            optimizer.step()
            optimizer.zero_grad()
    record = gaff.load(tmp_path / "run")
    assert record.verdict.state == "healthy", str(record.verdict)
    assert not record.findings
    assert "no values to compare" in str(record.verdict)
    assert "guessing" not in str(record.verdict)


@pytest.mark.parametrize("is_cleared", [True, False])
def test_gradients_that_only_autograd_grad_has_asked_for_are_not_called_cleared(tmp_path, is_cleared):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with gaff.watch(model, optimizer, out=tmp_path / "run", every=1):
        for _ in range(12):
            loss = model(torch.randn(16, 4)).square().mean()
            if is_cleared:
                loss.backward()
                optimizer.zero_grad()
            else:
                torch.autograd.grad(loss, list(model.parameters()))
            optimizer.step()
    [told] = [one.message for one in gaff.load(tmp_path / "run").findings if one.rule == "cleared_before_step"]
    assert ("by torch.autograd.grad or to leaves that the optimizer does not own" in told) != is_cleared


def test_a_copy_that_is_asked_once_before_the_training_is_no_second_model(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    x = torch.randn(64, 4)
    with gaff.watch(out=tmp_path / "run", every=1):
        F.cross_entropy(copy.deepcopy(model)(x), x[:, :2].argmax(1)).item()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(60):
            loss = F.cross_entropy(model(x), x[:, :2].argmax(1))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    record = gaff.load(tmp_path / "run")
    assert [one for one in record.scalars if one.startswith("loss:")] == ["loss:loss"]
    assert "models" not in str(record.verdict)


def test_an_optimizer_of_the_next_part_takes_the_place_of_the_one_that_was_given(tmp_path):
    torch.manual_seed(0)
    model, other = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3)), nn.Linear(8, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    aside = torch.optim.SGD(other.parameters(), 0.1)
    with gaff.watch(model, optimizer, out=tmp_path / "run", every=1):
        for step in range(60):
            if step == 30:
                optimizer = torch.optim.SGD(model.parameters(), 3.0, momentum=0.95)
            x = torch.randn(64, 8)
            for one, its in ((other, aside), (model, optimizer)):
                its.zero_grad()
                F.cross_entropy(one(x), x[:, :3].argmax(1)).backward()
                its.step()
    record = gaff.load(tmp_path / "run")
    assert record.steps == 60
    assert len(record.scalar("loss").values) == 60
    assert record.verdict.name == "learning_rate_too_high"
    assert "a learning rate of 3 is too high" in str(record.verdict)


class LowRank(nn.Module):
    """A layer that stays as it is, plus a product of two factors, of which the second begins at zero."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 16).requires_grad_(False)
        self.down, self.up = nn.Parameter(0.3 * torch.randn(4, 16)), nn.Parameter(torch.zeros(16, 4))

    def forward(self, x):
        return self.layer(x) + x @ self.down.T @ self.up.T


def test_factors_that_begin_at_zero_are_not_said_to_vanish(tmp_path):
    torch.manual_seed(0)
    x = torch.randn(512, 16)
    model = nn.Sequential(LowRank(), nn.Tanh(), nn.Linear(16, 4))

    def loss():
        rows = x[torch.randint(512, (64,))]
        return F.cross_entropy(model(rows), rows[:, :4].argmax(1))

    optimizer = torch.optim.Adam((one for one in model.parameters() if one.requires_grad), 1e-8)
    record = steps_of(model, optimizer, tmp_path / "run", 60, tuple, loss)
    assert not [one for one in record.findings if one.rule == "vanishing"]


@pytest.mark.parametrize("is_mean", [True, False])
def test_a_mean_over_steps_of_a_sequence_is_of_one_scale_however_many_they_are(tmp_path, is_mean):
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with gaff.watch(model, optimizer, out=tmp_path / "run", every=1):
        for step in range(40):
            x = torch.randn(16, 2 + step // 8, 6)
            losses = [F.cross_entropy(model(one), one[:, :3].argmax(1)) for one in x.unbind(1)]
            optimizer.zero_grad()
            (sum(losses) / len(losses) if is_mean else losses[0] / len(losses)).backward()
            optimizer.step()
    assert ("no values to compare" in str(gaff.load(tmp_path / "run").verdict)) != is_mean


@pytest.mark.parametrize("trains", ["low", "both"])
def test_the_zero_factor_that_nobody_trains_is_the_cause_of_the_other_ones_gradient(tmp_path, trains):
    class Adapted(nn.Module):
        """A frozen layer with low-rank factors, the second of which begins at zero."""

        def __init__(self):
            super().__init__()
            self.base = nn.Linear(8, 8).requires_grad_(False)
            self.low, self.high = nn.Parameter(torch.randn(2, 8)), nn.Parameter(torch.zeros(8, 2))

        def forward(self, x):
            return self.base(x) + x @ self.low.T @ self.high.T

    torch.manual_seed(0)
    model, x = nn.Sequential(Adapted(), nn.Tanh(), Adapted()), torch.randn(64, 8)
    y = x.roll(1, 1)
    names = ("low",) if trains == "low" else ("low", "high")
    optimizer = torch.optim.Adam([one for name, one in model.named_parameters() if name.endswith(names)], 1e-2)
    with gaff.watch(model, optimizer, out=tmp_path / "run", every=1):
        for _ in range(60):
            optimizer.zero_grad()
            (model(x) - y).square().mean().backward()
            optimizer.step()
    verdict = gaff.load(tmp_path / "run").verdict
    if trains == "both":
        assert verdict.name != "not_owned"
    else:
        assert (verdict.name, verdict.certainty) == ("not_owned", "likely")
        assert "while it is zero, so is the gradient of what it is multiplied with, as of 0.low:grad" in verdict.cause


@pytest.mark.parametrize("given", ["one condition for a batch", "one for each example"])
def test_a_layer_beside_the_path_of_the_input_may_return_the_same_for_all(tmp_path, given):
    class Conditioned(nn.Module):
        """Shifts and scales by what becomes of a condition."""

        def __init__(self):
            super().__init__()
            self.layer, self.out = nn.Linear(8, 16), nn.Linear(16, 2)
            self.embed, self.act, self.film = nn.Embedding(4, 16), nn.SiLU(), nn.Linear(16, 32)

        def forward(self, x, condition):
            scale, shift = self.film(self.act(self.embed(condition))).chunk(2, -1)
            return self.out(torch.tanh(self.layer(x) * (1 + scale) + shift))

    torch.manual_seed(0)
    model = Conditioned()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    with gaff.watch(model, optimizer, out=tmp_path / "run", every=1):
        for step in range(80):
            x = torch.randn(32, 8)
            condition = torch.full((32,), step % 4) if given.startswith("one condition") else torch.randint(4, (32,))
            optimizer.zero_grad()
            (model(x, condition) - x[:, :2] * (1 + condition[:, None])).square().mean().backward()
            optimizer.step()
    record = gaff.load(tmp_path / "run")
    assert not [one for one in record.findings if one.rule in ("no_signal", "output_constant")]
    assert record.verdict.state == "healthy"


@pytest.mark.slow
def test_an_average_that_is_copied_back_is_told_though_the_loss_falls(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.98))
    optimizer, x = torch.optim.SGD(model.parameters(), 0.02), torch.randn(256, 8)
    with gaff.watch(model, optimizer, out=tmp_path / "run", every=1):
        for _ in range(350):
            optimizer.zero_grad()
            (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
            optimizer.step()
            average.update_parameters(model)
            with torch.no_grad():
                for one, other in zip(model.parameters(), average.module.parameters(), strict=True):
                    one.copy_(other)
    verdict = gaff.load(tmp_path / "run").verdict
    assert (verdict.state, verdict.name) == ("wrong", "written_back")


@pytest.mark.parametrize("what", ["statistics", "accuracy", "dropout"])
def test_statistics_that_are_taken_anew_before_an_evaluation_are_no_fault(tmp_path, what):
    """As precise BatchNorm does, by hand: batches in training mode, and then the evaluation in evaluation mode.

    Where a dropout acts as well, or the momentum is as ever, it may be an accuracy that is measured so.
    """
    torch.manual_seed(0)
    act = nn.Dropout(0.1) if what == "dropout" else nn.ReLU()
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), act, nn.Linear(16, 4))
    optimizer, x = torch.optim.SGD(model.parameters(), 0.05), torch.randn(32, 8)
    labels = x[:, :4].argmax(1)
    with gaff.watch(out=tmp_path / "run", every=5):
        for _ in range(4):
            model.train()
            for _ in range(20):
                optimizer.zero_grad()
                F.cross_entropy(model(x), labels).backward()
                optimizer.step()
            with torch.no_grad():
                model[1].momentum = 0.1 if what == "accuracy" else 1.0
                for _ in range(20):
                    model(x)
                model[1].momentum = 0.1
                model.eval()
                F.cross_entropy(model(x), labels)
    record = gaff.load(tmp_path / "run")
    assert {told["in_training_mode"] for _, told in record.events("evaluated")} == {0}
    verdict = record.verdict
    if what == "statistics":
        assert verdict.state == "healthy", str(verdict)
    else:
        assert (verdict.name, verdict.certainty) == ("train_mode_in_eval", "likely"), str(verdict)
