"""Programs that people write, in which nothing is wrong, or in which the fault is another than it seems."""

import math
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

import gaff

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def nothing_is_compiled():
    """What tests before have compiled in this process would keep torch's functions from being heard."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


def watched(tmp_path, program, **options):
    """The run that a program leaves, which is watched at every step."""
    torch.manual_seed(0)
    with gaff.watch(out=tmp_path / "run", every=1, **options):
        program()
    return gaff.load(tmp_path / "run")


def fit(model, loss_of, steps=120, optimizer=None, lr=1e-2):
    optimizer = optimizer or torch.optim.Adam(model.parameters(), lr)
    for _ in range(steps):
        loss = loss_of(model)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


X = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long()


def classes(model):
    return F.cross_entropy(model(X), Y)


def test_evaluation_losses_that_are_summed_up_are_told_as_means(tmp_path):
    def program():
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
        for _ in range(4):
            fit(model, classes, 30)
            model.eval()
            with torch.no_grad():
                sum(F.cross_entropy(model(part), target, reduction="sum").item()
                    for part, target in zip(X.split(16), Y.split(16), strict=True))  # fmt: skip
            model.train()

    run = watched(tmp_path, program)
    assert "healthy" in str(run.verdict), run.verdict
    (values,) = run.evaluated(0).values()
    assert max(value for _, value in values) < 1.5, values


def test_what_makes_a_parameter_is_no_model_though_it_is_called_while_it_is_registered(tmp_path):
    def program():
        fit(nn.Sequential(spectral_norm(nn.Linear(8, 16)), nn.ReLU(), spectral_norm(nn.Linear(16, 2))), classes, 150)

    run = watched(tmp_path, program)
    assert not [one for one in run.findings if one.rule in ("output_constant", "loss_spike")], run.findings
    assert [name for name in run.scalars if name.startswith("loss:")] == ["loss:loss"]


@pytest.mark.parametrize("every", [1, 25])
def test_two_models_that_one_function_trains_have_a_loss_each(tmp_path, every):
    target = X.sin().sum(1, keepdim=True)

    def program():
        for width in (32, 64):
            model = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 1))
            fit(model, lambda model: F.mse_loss(model(X), target))

    torch.manual_seed(0)
    with gaff.watch(out=tmp_path / "run", every=every):
        program()
    run = gaff.load(tmp_path / "run")
    steps = {
        name: [step for step, value in run.scalar(name) if value == value]
        for name in run.scalars
        if name.startswith("loss:")
    }
    assert list(steps.values()) == [list(range(120)), list(range(120, 240))], steps
    assert not run.findings, run.findings


def test_a_gradient_that_an_earlier_training_has_left_is_no_new_one(tmp_path):
    def program():
        encoder, decoder, head = nn.Linear(8, 4), nn.Linear(4, 8), nn.Linear(4, 2)
        both = nn.Sequential(encoder, decoder)
        fit(both, lambda model: F.mse_loss(model(X), X), 40)
        whole = nn.Sequential(encoder, head)
        fit(whole, lambda model: F.cross_entropy(model[1](model[0](X).detach()), Y), 40,
            torch.optim.Adam(head.parameters(), 1e-2))  # fmt: skip

    assert "not_owned" not in [one.rule for one in watched(tmp_path, program).findings]


def test_gradients_whose_squares_overflow_explode_and_are_not_lost_to_a_low_learning_rate(tmp_path):
    def program():
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
        fit(model, lambda model: ((model(X) - 1) * 1e12).square().mean(), 60, lr=1e-3)

    run = watched(tmp_path, program)
    rules = [one.rule for one in run.findings]
    assert "exploding" in rules
    assert not {"never_updated", "update_small"} & set(rules), rules


def test_a_usual_weight_decay_is_not_to_blame_for_small_gradients(tmp_path):
    def program():
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
        fit(model, lambda model: F.cross_entropy(model(X) * 1e-9, Y), 60,
            torch.optim.SGD(model.parameters(), 0.01, weight_decay=1e-4))  # fmt: skip

    assert "weight_decay_too_high" not in [one.rule for one in watched(tmp_path, program).findings]


def test_a_ctc_loss_of_scores_is_named(tmp_path):
    def program():
        model = nn.Linear(8, 5)
        lengths, targets = torch.full((4,), 16), torch.randint(1, 5, (4, 6))

        def loss(model):
            return F.ctc_loss(model(X.view(16, 4, 8)), targets, lengths, torch.full((4,), 6))

        fit(model, loss, 60)

    run = watched(tmp_path, program)
    assert "nll_of_scores" in [one.rule for one in run.findings], run.findings


def test_a_nan_is_told_by_the_guard_of_the_model_that_made_it():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(8, 2)

        def forward(self, x):
            return torch.log(self.a(x))

    torch.manual_seed(0)
    net, criterion = Net(), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu")

    def steps():
        for _ in range(30):
            optimizer.zero_grad()
            scaler.scale(criterion(net(X), Y)).backward()
            scaler.step(optimizer)
            scaler.update()

    with pytest.raises(gaff.NonFiniteError, match=r"NaN made by /log#0"), gaff.guard(criterion), gaff.guard(net):
        steps()


def test_a_loss_that_a_step_does_not_have_is_no_nan_and_a_nan_is_no_missing_loss(tmp_path):
    def program():
        model = nn.Linear(8, 2)
        optimizer = torch.optim.SGD(model.parameters(), 0.0)
        for step in range(30):
            optimizer.zero_grad()
            even = F.cross_entropy(model(X), Y)
            odd = F.cross_entropy(model(X), Y) * (float("nan") if step == 21 else 1.0)
            if step % 2:
                odd.backward()
            else:
                even.backward()
            optimizer.step()

    run = watched(tmp_path, program)
    even, odd = (list(run.scalar(f"loss:{name}")) for name in ("even", "odd"))
    assert [step for step, _ in even] == list(range(0, 30, 2))
    assert [step for step, _ in odd] == list(range(1, 30, 2))
    assert [step for step, value in odd if value != value] == list(range(21, 30, 2))  # the weights are NaN, too, then
    assert "to nan" not in str(run)


class Factors(nn.Module):
    """Embeddings and nothing else, of which a step touches a few rows."""

    def __init__(self, sparse):
        super().__init__()
        self.users = nn.Embedding(2000, 8, sparse=sparse)
        self.items = nn.Embedding(2000, 8, sparse=sparse)

    def forward(self, users, items):
        return (self.users(users) * self.items(items)).sum(1)


@pytest.mark.parametrize("sparse", [True, False])
@pytest.mark.parametrize(("lr", "is_low"), [(1e-9, True), (1e-3, False)])
def test_a_low_learning_rate_is_seen_in_a_model_of_embeddings_alone(tmp_path, sparse, lr, is_low):
    def program():
        model = Factors(sparse)
        optimizer = (torch.optim.SparseAdam if sparse else torch.optim.Adam)(list(model.parameters()), lr)

        def loss(model):
            users, items = torch.randint(2000, (64,)), torch.randint(2000, (64,))
            return F.mse_loss(model(users, items), torch.randn(64))

        fit(model, loss, 80, optimizer)

    rules = [one.rule for one in watched(tmp_path, program).findings]
    assert ("update_small" in rules) == is_low, rules


def encoded(begins):
    """A training of an encoder and a head, with an optimizer each; the encoder's steps from step ``begins`` on."""

    def program():
        encoder, head = nn.Sequential(nn.Linear(8, 16), nn.Tanh()), nn.Linear(16, 2)
        optimizers = [torch.optim.Adam(one.parameters(), 1e-2) for one in (head, encoder)]
        for step in range(80):
            for one in optimizers:
                one.zero_grad()
            classes(nn.Sequential(encoder, head)).backward()
            for one in optimizers[: 1 + (step >= begins)]:
                one.step()

    return program


def test_an_optimizer_that_never_steps_beside_one_that_does(tmp_path):
    run = watched(tmp_path, encoded(begins=80))
    assert "wrong, probably: Adam holds 2 of the 4 parameters of 'model', and never makes a step" in str(run.verdict)
    assert [one.rule for one in run.findings] == ["never_stepped"]


@pytest.mark.parametrize("begins", [0, 5, 30])
def test_an_optimizer_that_steps_from_later_on(tmp_path, begins):
    assert "healthy" in str(watched(tmp_path, encoded(begins)).verdict)


def test_a_missing_step_of_the_only_optimizer(tmp_path):
    def program(accumulated):
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
        optimizer = torch.optim.Adam(model.parameters(), 1e-2)
        for count in range(1, 41):
            classes(model).backward()
            if accumulated and count % accumulated == 0:
                optimizer.step()
                optimizer.zero_grad()

    run = watched(tmp_path / "never", lambda: program(0))
    assert "wrong: Adam holds all 4 parameters of 'model', and never makes a step" in str(run.verdict), run.verdict
    run = watched(tmp_path / "late", lambda: program(20))
    assert "never" not in str(run.verdict), run.verdict


@pytest.mark.parametrize("is_counted", [True, False], ids=["in place", "through data"])
def test_weights_that_are_changed_by_hand_need_no_step_of_an_optimizer(tmp_path, is_counted):
    def program():
        model = nn.Linear(8, 2)
        schedule = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(40):
            model.zero_grad()
            classes(model).backward()
            with torch.no_grad():
                for one in model.parameters():
                    (one if is_counted else one.data).sub_(one.grad, alpha=schedule.param_groups[0]["lr"])

    assert "updates made by hand are not followed" in str(watched(tmp_path, program).verdict)


def test_a_container_that_is_made_anew_for_every_step_is_one_model(tmp_path):
    def program():
        body, head = nn.Sequential(nn.Linear(8, 16), nn.Tanh()), nn.Linear(16, 2)
        optimizer = torch.optim.Adam([*body.parameters(), *head.parameters()], 1e-2)
        for _ in range(60):
            loss = classes(nn.Sequential(body, head))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    run = watched(tmp_path, program)
    assert [name for name in run.scalars if name.startswith("loss:")] == ["loss:loss"]
    assert len(run.sites) == len(set(run.sites)), run.sites
    assert "healthy" in str(run.verdict)


def test_a_net_without_an_optimizer_that_judges_is_no_fault(tmp_path):
    """A perceptual loss: its parameters get gradients that nobody uses, called inside of the model and outside."""

    class Judged(nn.Module):
        def __init__(self, judge):
            super().__init__()
            self.body, self.hidden = nn.Linear(8, 8), [judge]

        def forward(self, x):
            return self.hidden[0](self.body(x))

    def program(*, is_inside):
        judge = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2)).requires_grad_(not is_inside)
        nn.init.normal_(judge[0].weight)  # as training leaves it
        model = Judged(judge) if is_inside else nn.Linear(8, 8)
        fit(model, lambda model: F.cross_entropy(model(X) if is_inside else judge(model(X)), Y))

    for is_inside in (True, False):
        run = watched(tmp_path / str(is_inside), lambda is_inside=is_inside: program(is_inside=is_inside))
        assert not {"unregistered", "wrong_parameters", "not_owned"} & {one.rule for one in run.findings}, run.findings


def test_a_layer_that_is_added_to_a_model_as_it_runs_is_part_of_it(tmp_path):
    class Growing(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(8, 16)

        def forward(self, x):
            if not hasattr(self, "second"):
                self.second = nn.Linear(16, 2)
            return self.second(self.first(x).relu())

    def program():
        model = Growing()
        optimizer = torch.optim.Adam(model.parameters(), 1e-2)
        classes(model)
        optimizer.add_param_group({"params": model.second.parameters()})
        fit(model, classes, optimizer=optimizer)

    assert "unregistered" not in {one.rule for one in watched(tmp_path, program).findings}


def test_losses_of_evaluations_are_all_heard_where_the_function_is_looked_up_before_the_model_runs(tmp_path):
    said = []

    def program():
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
        for _ in range(6):
            fit(model, classes, 13)
            model.eval()
            with torch.no_grad():
                said.append(F.cross_entropy(model(X), Y).item())
            model.train()

    with gaff.watch(out=tmp_path / "run", every=7):
        program()
    assert [value for _, value in gaff.load(tmp_path / "run").evaluated()["cross_entropy"]] == pytest.approx(said)


@pytest.mark.parametrize("steps", [1, 40, 57])
def test_what_a_watched_program_exports_is_what_it_is_without(tmp_path, steps):
    class WithLoss(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.loss = nn.Linear(8, 2), nn.CrossEntropyLoss()

        def forward(self, x, y: torch.Tensor):
            return F.cross_entropy(self.body(x), y) + self.loss(self.body(x), y)

    def program():
        model = WithLoss()
        fit(model, lambda model: model(X, Y), steps)
        return [
            torch.jit.script(model)(X, Y),
            torch.jit.trace(model, (X, Y))(X, Y),
            torch.fx.symbolic_trace(model)(X, Y),
        ]

    torch.manual_seed(0)
    alone, function = program(), F.cross_entropy
    torch.manual_seed(0)
    with gaff.watch(out=tmp_path / "run"):
        assert program() == alone
    assert F.cross_entropy is function


def adversaries(*, clears=True, samples_in="eval", detaches=False):
    """A generator and what judges it, each with an optimizer; the generator is sampled from now and then."""

    def program():
        made = nn.Sequential(nn.Linear(4, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 8))
        judge = nn.Sequential(nn.Linear(8, 32), nn.LeakyReLU(), nn.Linear(32, 1))
        makes, judges = (torch.optim.Adam(one.parameters(), 1e-3, betas=(0.5, 0.9)) for one in (made, judge))
        real, fake = torch.ones(64, 1), torch.zeros(64, 1)
        for step in range(120):
            told = made(torch.randn(64, 4))
            loss = F.binary_cross_entropy_with_logits(judge(X), real)
            loss = loss + F.binary_cross_entropy_with_logits(judge(told.detach()), fake)
            judges.zero_grad()
            loss.backward()
            judges.step()
            fooled = F.binary_cross_entropy_with_logits(judge(told.detach() if detaches else told), real)
            if clears:
                makes.zero_grad()
            fooled.backward()
            makes.step()
            if step % 20 == 19:
                made.train(samples_in == "train")
                with torch.no_grad():
                    made(torch.randn(64, 4))
                made.train()

    return program


@pytest.mark.parametrize("samples_in", ["train", "eval"])
def test_samples_of_a_generator_are_no_evaluation(tmp_path, samples_in):
    run = watched(tmp_path, adversaries(samples_in=samples_in))
    assert run.verdict.state == "healthy", run.verdict


def test_gradients_that_the_second_optimizer_does_not_clear(tmp_path):
    run = watched(tmp_path, adversaries(clears=False))
    assert run.verdict.name == "not_cleared", run.verdict
    assert {one.model for one in run.findings if one.rule == "not_cleared"} == {"made"}


def test_a_model_whose_optimizer_steps_and_that_no_gradient_reaches(tmp_path):
    run = watched(tmp_path, adversaries(detaches=True, samples_in="train"))
    assert "wrong: no parameter of 'made' has a gradient" in str(run.verdict)


@pytest.mark.parametrize("is_fresh", [True, False])
def test_an_encoder_in_no_optimizer(tmp_path, is_fresh):
    """One that nobody has trained was forgotten; one that was trained before, elsewhere, may be meant to stay."""

    def program():
        encoder, head = nn.Sequential(nn.Linear(8, 16), nn.Tanh()), nn.Linear(16, 2)
        if not is_fresh:
            nn.init.normal_(encoder[0].weight)
        fit(head, lambda head: classes(lambda x: head(encoder(x))))

    run = watched(tmp_path, program)
    assert (run.verdict.name, run.verdict.state) == (("not_owned", "suspicious") if is_fresh else ("", "healthy"))
    assert not is_fresh or "'encoder' gets gradients, none of its parameters is in an optimizer" in str(run.verdict)


def regression(model):
    return F.mse_loss(model(X).squeeze(1), 100 + 20 * X[:, 0])


@pytest.mark.parametrize(("lr", "name"), [(1e-7, ("loss_does_not_fall", "learning_rate_too_low")), (1.0, ("",))])
def test_a_regression_that_learns_nothing_is_not_healthy(tmp_path, lr, name):
    run = watched(tmp_path, lambda: fit(nn.Linear(8, 1), regression, 300, lr=lr))
    assert run.verdict.name in name, run.verdict


def test_targets_that_are_noise_of_a_regression(tmp_path):
    def program():
        fit(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)),
            lambda model: F.mse_loss(model(torch.randn(256, 8)), torch.randn(256, 4)), 200, lr=1e-3)  # fmt: skip

    run = watched(tmp_path, program)
    assert run.verdict.name == "labels_do_not_belong"
    assert "guessing gives 1" in run.verdict.evidence[0] or "guessing gives 0.99" in run.verdict.evidence[0]


@pytest.mark.parametrize(("often", "name"), [(1, "learning_rate_is_gone"), (40, "")])
def test_a_schedule_that_counts_batches_for_epochs(tmp_path, often, name):
    def program():
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
        optimizer = torch.optim.Adam(model.parameters(), 1e-3)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
        for count in range(1, 121):
            optimizer.zero_grad()
            classes(model).backward()
            optimizer.step()
            if count % often == 0:
                schedule.step()

    assert watched(tmp_path, program).verdict.name == name


def test_models_one_after_the_other_of_which_a_later_one_learns(tmp_path):
    def program():
        for lr in (1e-6, 1e-2):
            fit(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2)), classes, 120, lr=lr)

    assert "labels" not in str(watched(tmp_path, program).verdict)


def test_losses_that_look_like_faults_and_are_meant(tmp_path):
    """A kernel over pairs of outputs, scores between -1 and 1 that are scaled, an output within its activation's range."""

    def pairs(model):
        told = model(X)[:, :1]
        return (told - told.detach().T).abs().mean() - 0.1 * told.mean().abs() + F.mse_loss(told[:, 0], X[:, 0])

    losses = (
        pairs,
        lambda model: F.cross_entropy(5 * model(X).tanh(), Y),
        lambda model: F.mse_loss(model(X)[:, 0].sigmoid(), Y.float()),
        lambda model: F.binary_cross_entropy(model(X)[:, 0].sigmoid(), Y.float()),
        lambda model: F.l1_loss(model(X)[:, 0].relu(), X[:, 0].abs()),
    )
    for number, loss in enumerate(losses):
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
        run = watched(tmp_path / str(number), lambda model=model, loss=loss: fit(model, loss))
        assert not {"broadcast", "bounded_output"} & {one.rule for one in run.findings}, (number, run.findings)


@pytest.mark.parametrize("inside", ["arithmetic", "a norm", "nothing"])
def test_inputs_that_the_model_brings_to_scale_itself(tmp_path, inside):
    class Scaling(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(8) if inside == "a norm" else nn.Identity()
            self.body = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))

        def forward(self, x):
            return self.body(self.norm((x - 100) / 50 if inside == "arithmetic" else x))

    run = watched(tmp_path, lambda: fit(Scaling(), lambda model: F.cross_entropy(model(100 + 50 * X), Y)))
    assert ("input_scale" in {one.rule for one in run.findings}) == (inside == "nothing"), run.findings


def test_what_one_model_gives_another_is_no_input(tmp_path):
    def program():
        body, head = nn.Sequential(nn.Linear(8, 16), nn.ReLU()), nn.Linear(16, 2)
        with torch.no_grad():
            body[0].weight.mul_(60)
        optimizer = torch.optim.Adam([*body.parameters(), *head.parameters()], 1e-3)
        for _ in range(60):
            optimizer.zero_grad()
            F.cross_entropy(head(body(X)), Y).backward()
            optimizer.step()

    assert "input_scale" not in {one.rule for one in watched(tmp_path, program).findings}


@pytest.mark.parametrize(("limit", "name"), [(1.0, "exploding"), (1e-5, "clipped_to_nothing")])
def test_gradients_that_explode_and_are_clipped_to_a_usual_norm(tmp_path, limit, name):
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell, self.out = nn.RNN(1, 32, batch_first=True, nonlinearity="tanh"), nn.Linear(32, 2)
            gain = 1.0 if limit < 0.1 else 6.0
            nn.init.orthogonal_(self.cell.weight_hh_l0, gain)

        def forward(self, x):
            return self.out(self.cell(x)[0][:, -1])

    x, y = torch.randn(64, 40, 1), torch.randint(0, 2, (64,))

    def program():
        model = Recurrent()
        optimizer = torch.optim.SGD(model.parameters(), 1e-2)
        for _ in range(60):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
            optimizer.step()

    found = [one.rule for one in watched(tmp_path, program).findings]
    assert name in found, found
    assert not {"exploding", "clipped_to_nothing"} - {name} & set(found), found


def test_a_parameter_that_is_made_anew_in_every_step_ends_nothing(tmp_path, capsys):
    def program():
        body, head = nn.Linear(8, 16), nn.Linear(16, 2)
        optimizer = torch.optim.Adam(head.parameters(), 1e-2)
        for _ in range(40):
            body.weight = nn.Parameter(body.weight.detach().clone())
            optimizer.zero_grad()
            classes(nn.Sequential(body, head)).backward()
            optimizer.step()

    assert watched(tmp_path, program).steps == 40
    assert "watching has stopped" not in capsys.readouterr().err


@pytest.mark.parametrize("times", [1.1, 1.0])
def test_a_search_for_a_learning_rate_is_told_as_one(tmp_path, times):
    def program():
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
        optimizer = torch.optim.SGD(model.parameters(), 3e-2)
        for step in range(160):
            optimizer.param_groups[0]["lr"] = 1e-4 * times**step if times > 1 else 1e-4 * (step + 1)
            optimizer.zero_grad()
            classes(model).backward()
            optimizer.step()

    told = str(watched(tmp_path, program).verdict)
    assert ("a search for a learning rate, which rises from" in told) == (times > 1), told


def test_a_pooler_that_the_loss_does_not_use(tmp_path):
    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.pooler, self.head = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 2)

        def forward(self, x):
            hidden = self.body(x).relu()
            self.pooler(hidden).tanh()
            return self.head(hidden)

    assert "healthy" in str(watched(tmp_path, lambda: fit(Encoder(), classes)).verdict)


def test_a_second_task_is_told_as_other_data_and_not_as_a_bad_batch(tmp_path):
    x = torch.randn(512, 16)
    first, second = (x @ torch.randn(16, 8)).argmax(1) // 2, 4 + (x @ torch.randn(16, 8)).argmax(1) // 2

    def program():
        model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 8))
        optimizer = torch.optim.Adam(model.parameters(), 3e-3)
        fit(model, lambda model: F.cross_entropy(model(x), first), 150, optimizer)
        fit(model, lambda model: F.cross_entropy(model(x), second), 150, optimizer)

    verdict = watched(tmp_path, program).verdict
    assert (verdict.name, verdict.since) == ("data_changes", 150), verdict
    assert "median loss of steps 150 to 159" in verdict.evidence[1]


def test_a_loss_that_jumps_where_the_learning_rate_was_raised_is_the_learning_rate(tmp_path):
    def program():
        model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 2))
        fit(model, classes, 100, lr=1e-3)
        fit(model, classes, 60, lr=3.0)

    verdict = watched(tmp_path, program).verdict
    assert (verdict.name, verdict.certainty) == ("learning_rate_too_high", "likely"), verdict
    assert "raised from 0.001 to 3" in verdict.cause


class Rows(nn.Module):
    """Returns the very tensor of its last layer; its rows are alike where ``is_mean``."""

    def __init__(self, is_mean):
        super().__init__()
        self.body, self.head, self.is_mean = nn.Linear(8, 16), nn.Linear(16, 2), is_mean

    def forward(self, x):
        h = torch.tanh(self.body(x))
        return self.head(h.mean(0, keepdim=True).expand(len(x), -1) if self.is_mean else h)


@pytest.mark.parametrize("is_mean", [True, False])
def test_a_model_that_returns_the_tensor_of_its_last_layer_is_asked_whether_its_rows_differ(tmp_path, is_mean):
    run = watched(tmp_path, lambda: fit(Rows(is_mean), classes, 60))
    assert (run.verdict.name == "input_not_used") == is_mean, run.verdict


@pytest.mark.parametrize(
    "loss_of",
    [
        lambda model: -((model(X)[:, 0] - X[:, 0]) ** 2).mean(),
        lambda model: -F.l1_loss(model(X)[:, 0], X[:, 0]),
        lambda model: -1.0 * (X[:, 0] - model(X)[:, 0]).abs().sum(),
    ],
)
def test_a_loss_by_hand_with_a_minus_is_the_wrong_way_round(tmp_path, loss_of):
    run = watched(tmp_path, lambda: fit(nn.Sequential(nn.Linear(8, 2)), loss_of, 60))
    assert (run.verdict.name, run.verdict.certainty) == ("loss_sign", "certain"), run.verdict


def test_what_is_meant_to_be_made_large_is_no_loss_with_a_minus(tmp_path):
    """Distances of two outputs, odd powers and squares of activations are pushed apart or up by intention."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
    for at, loss_of in enumerate((
        lambda model: -(model(X) - model(-X)).square().mean(),
        lambda model: -model(X).square().mean(),
        lambda model: -((model(X)[:, 0] - X[:, 0]) ** 3).mean(),
    )):  # fmt: skip
        run = watched(tmp_path / str(at), lambda loss_of=loss_of: fit(model, loss_of, 30, lr=1e-4))
        assert not [one for one in run.findings if one.rule == "loss_sign"], at


def test_a_softmax_before_a_cross_entropy_of_some_rows_is_seen(tmp_path):
    model = nn.Sequential(nn.Linear(8, 2), nn.Softmax(-1))
    some = X[:, 1] > 0
    run = watched(tmp_path, lambda: fit(model, lambda model: F.cross_entropy(model(X)[some], Y[some]), 30))
    assert run.verdict.name == "double_softmax", run.verdict


def test_data_in_the_order_of_its_labels_is_the_cause_of_what_it_does_to_the_loss(tmp_path):
    x, y = torch.randn(640, 8), torch.arange(640) // 128

    def program():
        model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 5))
        optimizer = torch.optim.SGD(model.parameters(), 0.5)
        for _ in range(3):
            for at in range(0, 640, 16):
                loss = F.cross_entropy(model(x[at : at + 16]), y[at : at + 16])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    run = watched(tmp_path, program)
    assert (run.verdict.name, run.verdict.certainty) == ("labels_constant", "certain"), run.verdict
    assert "5 were seen alone" in run.verdict.cause


def test_rare_labels_are_no_order(tmp_path):
    rare = (torch.rand(4096) < 0.01).long()

    def program():
        model = nn.Sequential(nn.Linear(8, 2))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for at in range(0, 4096, 32):
            loss = F.cross_entropy(model(torch.randn(32, 8)), rare[at : at + 32])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    assert not [one for one in watched(tmp_path, program).findings if one.rule == "labels_constant" and not one.is_over]


@pytest.mark.parametrize("is_cut", [True, False])
def test_a_generator_that_gets_no_gradient_is_found_though_it_steps_in_every_fifth_step(tmp_path, is_cut):
    def program():
        maker, critic = nn.Sequential(nn.Linear(4, 8)), nn.Sequential(nn.Linear(8, 1))
        of_maker, of_critic = (torch.optim.Adam(one.parameters(), 1e-3) for one in (maker, critic))
        for step in range(200):
            made = maker(torch.randn(16, 4))
            loss = critic(made.detach()).mean() - critic(X[:16]).mean()
            of_critic.zero_grad()
            loss.backward()
            of_critic.step()
            if step % 5 == 4:
                made = maker(torch.randn(16, 4))
                of_maker.zero_grad()
                (-critic(made.detach() if is_cut else made).mean()).backward()
                of_maker.step()

    verdict = watched(tmp_path, program).verdict
    assert (verdict.name == "never_trained") == is_cut, verdict


@pytest.mark.parametrize("is_empty", [True, False])
def test_a_closure_that_does_nothing_clears_nothing(tmp_path, is_empty):
    def program():
        model = nn.Sequential(nn.Linear(8, 2))
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)

        def closure():
            optimizer.zero_grad()
            loss = classes(model)
            loss.backward()
            return loss

        for _ in range(60):
            if is_empty:
                classes(model).backward()
            optimizer.step((lambda: None) if is_empty else closure)

    verdict = watched(tmp_path, program).verdict
    assert (verdict.name == "not_cleared") == is_empty, verdict


def test_one_hard_batch_of_each_epoch_is_no_learning_rate(tmp_path):
    def program():
        model = nn.Sequential(nn.Linear(8, 2))
        turn = iter(range(1000))
        fit(model, lambda model: classes(model) * (40.0 if next(turn) % 10 == 9 else 1.0), 121, lr=2e-3)

    verdict = watched(tmp_path, program).verdict
    assert verdict.name != "learning_rate_too_high", verdict


def test_a_model_that_returns_zeros_returns_the_same_for_all(tmp_path):
    class Silent(nn.Sequential):
        def forward(self, x):
            return super().forward(x) * 0.0

    many = torch.randn(300, 8)
    run = watched(
        tmp_path, lambda: fit(Silent(nn.Linear(8, 4)), lambda model: F.mse_loss(model(many), many[:, :4]), 40)
    )
    assert run.verdict.name == "input_not_used", run.verdict
    assert not [one for one in run.findings if one.rule == "dead_units"]


@pytest.mark.parametrize("is_unscaled", [False, True])
def test_gradients_that_are_clipped_while_they_are_scaled(tmp_path, is_unscaled):
    def program():
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 10))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        scaler = torch.amp.GradScaler("cpu")
        for _ in range(40):
            optimizer.zero_grad()
            scaler.scale(F.cross_entropy(model(X), Y)).backward()
            if is_unscaled:
                scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()

    record = watched(tmp_path, program)
    assert (record.verdict.name == "clipped_while_scaled") is not is_unscaled
    assert ("clipped_while_scaled" in {one.rule for one in record.findings}) is not is_unscaled
    if not is_unscaled:
        assert "call scaler.unscale_(optimizer) ahead of clip_grad_norm_" in record.verdict.remedy


def test_a_backward_pass_that_is_forgotten_is_told_as_that(tmp_path):
    def program():
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 10))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(20):
            optimizer.zero_grad()
            F.cross_entropy(model(X), Y)
            optimizer.step()

    told = watched(tmp_path, program).verdict
    assert told.name == "never_trained"
    assert "no loss was seen to run backward" in told.cause
    assert "call loss.backward() ahead of the step" in told.remedy


def test_a_batch_given_by_keywords_to_a_model_that_nobody_knew_is_run_again(tmp_path):
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(8, 4)

        def forward(self, x=None):
            if x is None:
                raise ValueError("x is missing")
            return self.a(x).log()

    def program():
        model = Named()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(4):
            optimizer.zero_grad()
            model(x=X).mean().backward()
            optimizer.step()

    finding = next(one for one in watched(tmp_path, program).findings if one.rule == "nonfinite")
    assert "/log#0" in finding.message


@pytest.mark.parametrize("shift", [0.0, 1.0])
def test_targets_that_are_no_probabilities(tmp_path, shift):
    def program():
        model = nn.Linear(8, 1)
        optimizer = torch.optim.Adam(model.parameters(), 1e-2)
        for _ in range(40):
            optimizer.zero_grad()
            F.binary_cross_entropy_with_logits(model(X)[:, 0], Y * (1 + shift) - shift).backward()
            optimizer.step()

    record = watched(tmp_path, program)
    assert (record.verdict.name == "targets_no_probabilities") is bool(shift)
    assert ("its targets go from -1 to 1" in record.verdict.cause) is bool(shift)


def test_shuffled_labels_of_sequences_are_told_as_those_of_rows_are(tmp_path):
    def program():
        model = nn.Conv1d(8, 5, 1)
        optimizer = torch.optim.Adam(model.parameters(), 1e-2)
        for _ in range(150):
            x = torch.randn(16, 8, 20)
            optimizer.zero_grad()
            F.cross_entropy(model(x), x[:, :5].argmax(1)[torch.randperm(16)]).backward()
            optimizer.step()

    assert watched(tmp_path, program).verdict.name == "labels_do_not_belong"


def test_a_loss_that_begins_near_zero_and_falls_below_it_is_healthy(tmp_path):
    def program():
        model = nn.Linear(8, 2)
        nn.init.zeros_(model.weight)
        nn.init.zeros_(model.bias)
        optimizer = torch.optim.Adam(model.parameters(), 2e-2)
        for _ in range(80):
            optimizer.zero_grad()
            gained = model(X).log_softmax(1).gather(1, Y[:, None]).mean() + torch.log(torch.tensor(2.0))
            (-2 * gained).backward()
            optimizer.step()

    assert "diverging" not in {one.rule for one in watched(tmp_path, program).findings}


@pytest.mark.parametrize("is_contrast", [False, True])
def test_the_right_answer_may_always_be_the_first_of_pairs(tmp_path, is_contrast):
    def program():
        model = nn.Linear(8, 4)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        others = torch.randn(32, 4)
        for _ in range(60):
            made = model(X)
            right = (made * model(X + 0.1).detach()).sum(1, keepdim=True)
            scores = torch.cat([right, made @ others.T], 1) if is_contrast else made
            optimizer.zero_grad()
            F.cross_entropy(scores, torch.zeros(64, dtype=torch.long)).backward()
            optimizer.step()

    found = {one.rule for one in watched(tmp_path, program).findings}
    assert ("labels_constant" in found) is not is_contrast


@pytest.mark.parametrize("name", ["binary_cross_entropy_with_logits", "l1_loss", "mse_loss"])
@pytest.mark.parametrize("is_shuffled", [False, True])
def test_targets_that_do_not_belong_are_told_of_losses_that_are_no_classes(tmp_path, name, is_shuffled):
    is_binary = name.startswith("binary")

    def program():
        model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1))
        optimizer = torch.optim.Adam(model.parameters(), 3e-4 if is_shuffled else 5e-3)
        for _ in range(250):
            x = torch.randn(64, 8)
            y = (x[:, 0] > 0).float() if is_binary else x[:, 0] + x[:, 1]
            optimizer.zero_grad()
            getattr(F, name)(model(x)[:, 0], y[torch.randperm(64)] if is_shuffled else y).backward()
            optimizer.step()

    told = watched(tmp_path, program).verdict
    assert (told.name in ("labels_do_not_belong", "loss_does_not_fall")) is is_shuffled, told
    assert (told.state == "healthy") is not is_shuffled


def test_statistics_of_a_norm_that_never_settle_are_not_learning_by_heart(tmp_path):
    def program():
        model = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32, momentum=1.0), nn.ReLU(), nn.Linear(32, 2))
        optimizer = torch.optim.Adam(model.parameters(), 3e-3)
        for step in range(160):
            model.train()
            optimizer.zero_grad()
            rows = torch.randint(0, 64, (4,))
            F.cross_entropy(model(X[rows] * 10), Y[rows]).backward()
            optimizer.step()
            if step % 20 == 19:
                model.eval()
                with torch.no_grad():
                    F.cross_entropy(model(X * 100), Y)

    record = watched(tmp_path, program)
    assert "batch_norm_momentum" in {one.rule for one in record.findings}
    assert "overfits" not in record.verdict.cause


def test_a_run_that_is_stopped_by_hand_says_so(tmp_path):
    def program():
        fit(nn.Linear(8, 2), lambda model: F.cross_entropy(model(X), Y), steps=5)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        watched(tmp_path, program)
    told = gaff.load(tmp_path / "run").verdict
    assert (told.state, told.cause, told.remedy) == ("failed", "the run was stopped by Ctrl-C", "")


@pytest.mark.parametrize("rates", [(1e-5, 1e-1), (30.0, 1e-2)])
def test_no_learning_rate_is_blamed_in_a_search_for_one(tmp_path, rates):
    def program():
        for rate in rates:
            model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
            optimizer = torch.optim.SGD(model.parameters(), rate, momentum=0.9)
            fit(model, lambda model: F.cross_entropy(model(X), Y), optimizer=optimizer)

    told = watched(tmp_path, program).verdict
    assert told.name not in ("learning_rate_too_low", "learning_rate_too_high", "learning_rate_is_gone"), told


@pytest.mark.parametrize("has_nan", [False, True])
def test_models_that_were_not_given_are_not_judged(tmp_path, has_nan):
    """Another model is trained in the same process, with dead units or NaN in it: its losses are none of ours."""
    torch.manual_seed(0)
    model, other = (nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2)) for _ in range(2))
    nn.init.constant_(other[0].bias, math.nan if has_nan else -100.0)
    optimizer, theirs = torch.optim.SGD(model.parameters(), 0.05), torch.optim.SGD(other.parameters(), 0.05)
    x = torch.randn(32, 4)
    with gaff.watch(model, optimizer, every=1, out=tmp_path / "run") as seen:
        for _ in range(40):
            optimizer.zero_grad()
            (model(x) - x[:, :2]).square().mean().backward()
            optimizer.step()
            theirs.zero_grad()
            other(x).square().mean().backward()
            theirs.step()
    record = gaff.load(tmp_path / "run")
    assert not seen.findings
    assert len([name for name in record.scalars if name.startswith("loss:")]) == 1
    assert len(record.series("1", "rms").values) == 40  # as there is one model, it needs no name


def test_a_layer_that_is_given_zeros_alone_is_told_so(tmp_path):
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Sequential(nn.Linear(6, 16), nn.ReLU()), nn.Linear(16, 3)

        def forward(self, x):
            return self.head(self.body(x) * 0)

    def program():
        torch.manual_seed(0)
        model = Masked()
        optimizer = torch.optim.Adam(model.parameters(), 0.01)
        for _ in range(30):
            x = torch.randn(64, 6)
            optimizer.zero_grad()
            F.cross_entropy(model(x), x[:, :3].argmax(1)).backward()
            optimizer.step()

    finding = next(one for one in watched(tmp_path, program).findings if one.rule == "dead_units")
    assert "what this layer is given is all zeros" in finding.message


class Flow(nn.Module):
    """A model that is given one number for a whole batch, beside the batch."""

    def __init__(self):
        super().__init__()
        self.time, self.first, self.last = nn.Linear(1, 32), nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, t, x):
        return self.last(F.silu(self.first(x) + self.time(t)))


def flow(model):
    t, noise = torch.rand(1).expand(64, 1), torch.randn(64, 8)
    return F.mse_loss(model(t, X * t + noise * (1 - t)), X - noise)


def boundary(model):
    """A term that is to be one everywhere, beside another."""
    x = torch.rand(64, 1)
    return F.mse_loss(model(torch.zeros(64, 1)), torch.ones(64, 1)) + (model(x) - torch.exp(-x)).square().mean()


def solved(model):
    made = model(X)
    return F.relu(0.1 - (made[Y == 0].mean(0) - made[Y == 1].mean(0)).square().sum())


def judge_of(model):
    """A perturbation that is to fool a model which stays as it is."""
    torch.manual_seed(1)
    judge = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))
    fit(judge, classes, 100)
    judge.requires_grad_(False)
    fit(model, lambda made: -F.cross_entropy(judge(X + 0.3 * torch.tanh(made(X))), Y), 150)


def one_large_image(model):
    x = F.interpolate(torch.randn(1, 1, 6, 6), size=32, mode="bilinear")
    return F.l1_loss(model(x + 0.1 * torch.randn_like(x)), torch.tanh(2 * x))


def settled(model):
    """A schedule that waits until the loss falls no more, and it does not at the level of the noise."""
    y = X @ torch.linspace(-1, 1, 8)[:, None] + 0.3 * torch.randn(64, 1, generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.Adam(model.parameters(), 5e-2)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=2, threshold=1e-3)
    for _ in range(60):
        fit(model, lambda one: F.mse_loss(one(X), y), 8, optimizer)
        with torch.no_grad():
            schedule.step(F.mse_loss(model(X), y))


def noisy(model):
    """Two examples a batch, of a target that can hardly be told: single losses differ by ten times."""
    order = torch.Generator().manual_seed(3)
    target = 0.4 * X[:, :1] + torch.randn(64, 1, generator=torch.Generator().manual_seed(2))

    def loss_of(one):
        at = torch.randint(64, (2,), generator=order)
        return F.mse_loss(one(X[at]), target[at])

    fit(model, loss_of, 400, torch.optim.SGD(model.parameters(), 1e-2))


@pytest.mark.parametrize(
    ("make", "program"),
    [
        (Flow, lambda model: fit(model, flow, 150)),
        (lambda: nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1)), lambda model: fit(model, boundary, 150)),
        (lambda: nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)), lambda model: fit(model, solved, 150)),
        (lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)), judge_of),
        (
            lambda: nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 1, 1)),
            lambda model: fit(model, one_large_image, 150, lr=2e-3),
        ),
        (lambda: nn.Linear(8, 1), settled),
        (lambda: nn.Linear(8, 1), noisy),
    ],
    ids=["flow", "boundary", "solved", "judge_of", "one_large_image", "settled", "noisy"],
)
def test_no_alarm_of(tmp_path, make, program):
    def run():
        program(make())

    assert "healthy" in str(watched(tmp_path, run).verdict), watched(tmp_path / "again", run).verdict


def test_a_target_that_is_nan_is_told_and_no_learning_rate(tmp_path):
    """The few losses before it, of small batches, are no rise."""
    target = X[:, :1].clone()
    target[20] = math.nan

    def program():
        model = nn.Linear(8, 1)
        optimizer = torch.optim.Adam(model.parameters(), 1e-3)
        for at in range(30):
            rows = torch.arange(4 * at, 4 * at + 4) % 64
            loss = F.mse_loss(model(X[rows]), target[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    run = watched(tmp_path, program)
    assert "1 of 4 targets are not finite" in str(run.verdict), run.verdict
    assert "learning rate" not in str(run.verdict), run.verdict


def test_what_guessing_gives_is_that_of_the_labels_of_all_batches(tmp_path):
    labels = (torch.arange(2000) % 25 == 0).long()

    def program():
        model, order = nn.Linear(8, 2), torch.Generator().manual_seed(0)
        inputs = torch.randn(2000, 8, generator=order)
        optimizer = torch.optim.SGD(model.parameters(), 3e-2)
        for _ in range(150):
            at = torch.randint(2000, (16,), generator=order)
            loss = F.cross_entropy(model(inputs[at]), labels[at])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    verdict = watched(tmp_path, program).verdict
    truth = -(0.04 * math.log(0.04) + 0.96 * math.log(0.96))
    assert "labels may not belong to their inputs" in str(verdict)
    told = float(verdict.evidence[0].partition("guessing gives ")[2].partition(";")[0])
    assert told == pytest.approx(truth, rel=0.2)
