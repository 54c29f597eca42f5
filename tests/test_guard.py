"""``gaff.guard``: the first NaN or inf of a training run stops it, with its origin."""

import copy
import gc
import math
import weakref
from contextlib import ExitStack, nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import gaff
from gaff.errors import NonFiniteError, PlanError
from tests.clean import CLEAN, steady_scaler
from tests.faults import Apply, Chain, Function


def make(function):
    torch.manual_seed(0)
    model = Apply(function)
    return model, torch.optim.SGD(model.parameters(), 0.1), [torch.randn(3, 4) for _ in range(6)]


def train(model, optimizer, batches, loss=lambda y: y.square().mean()):
    for x in batches:
        optimizer.zero_grad()
        loss(model(x)).backward()
        optimizer.step()


def test_a_forward_fault_stops_before_the_optimizer_changes_anything():
    model, optimizer, batches = make(lambda x: torch.log(x.abs() + 1e-3))
    batches[3][1] = 0
    with torch.no_grad():
        model.first.bias.zero_()
        model.first.bias.requires_grad_(False)
    model.middle.function = lambda x: torch.log(x.abs())
    with (
        pytest.raises(NonFiniteError, match=r"middle/log#0.*\n.*\n.*log of 0: 4 of 12") as caught,
        gaff.guard(model) as guard,
    ):
        train(model, optimizer, batches)
    assert guard.steps == 4
    assert caught.value.report.direction == "forward"
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_backward_fault_is_told_with_its_op():
    model, optimizer, batches = make(lambda x: torch.sqrt(x * (x > 0)))
    with pytest.raises(NonFiniteError) as caught, gaff.guard(model):
        train(model, optimizer, batches)
    report = caught.value.report
    assert (report.site, report.direction) == ("middle/sqrt#0", "backward")


def test_a_fault_of_the_loss_is_outside_the_model():
    model, optimizer, batches = make(lambda x: x)
    with pytest.raises(NonFiniteError, match="outside the model") as caught, gaff.guard(model):
        train(model, optimizer, batches, loss=lambda y: torch.sqrt(y * (y > 9)).sum())
    assert caught.value.report.site == "(step)"


def test_the_replay_draws_the_same_random_numbers():
    model, optimizer, batches = make(lambda x: torch.log(F.dropout(x.abs() + 1, 0.02)))
    torch.manual_seed(3)
    with pytest.raises(NonFiniteError, match="middle/log#0"), gaff.guard(model):
        train(model, optimizer, batches * 20)


def test_the_state_is_as_it_was_after_an_examination():
    model, optimizer, batches = make(lambda x: torch.sqrt(x * (x > 0)))
    bare, other, _ = make(lambda x: torch.sqrt(x * (x > 0)))
    for one, its in ((model, optimizer), (bare, other)):
        torch.manual_seed(7)
        if one is model:
            with pytest.warns(UserWarning, match="middle/sqrt#0"), gaff.guard(one, action="warn") as guard:
                train(one, its, batches[:1])
        else:
            train(one, its, batches[:1])
        drawn = torch.rand(3)
        if one is model:
            first = drawn
    assert torch.equal(first, drawn)
    assert guard.reports
    for own, its in zip(model.parameters(), bare.parameters(), strict=True):
        assert torch.equal(own.grad.nan_to_num(), its.grad.nan_to_num())


def test_without_grad_every_run_is_looked_at():
    model, _, batches = make(lambda x: torch.log(x - 9))
    with pytest.raises(NonFiniteError, match="middle/log#0"), torch.no_grad(), gaff.guard(model):
        model(batches[0])


def test_of_several_micro_batches_the_bad_one_is_found():
    model, optimizer, batches = make(lambda x: torch.log(x.abs()))
    with torch.no_grad():
        model.first.bias.zero_()
    batches[2][0] = 0
    with pytest.raises(NonFiniteError, match=r"log of 0: 4 of 12"), gaff.guard(model):
        for x in batches[:4]:
            model(x).sum().backward()
        optimizer.step()


def test_infinite_values_that_are_meant_are_no_alarm_and_NaN_beside_them_is():
    class Masks(nn.Module):
        def __init__(self):
            super().__init__()
            self.mask = Function(lambda x: x.masked_fill(torch.eye(3, dtype=torch.bool), float("-inf")))
            self.inner = nn.Linear(4, 4)
            self.breaks = False

        def forward(self, x):
            x = self.inner(x)
            scores = self.mask(x @ x.T)
            if self.breaks:
                scores = scores * 0
            return F.softmax(scores, -1) @ x

    torch.manual_seed(0)
    model = Masks()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with gaff.guard(model) as guard:
        train(model, optimizer, [torch.randn(3, 4) for _ in range(3)])
    assert guard.steps == 3
    assert not guard.reports
    assert guard.notes == ["mask returns infinite values that are meant: only NaN is told"]
    with pytest.raises(NonFiniteError, match="/mul#0"), gaff.guard(model):
        train(model, optimizer, [torch.randn(3, 4)])
        model.breaks = True
        train(model, optimizer, [torch.randn(3, 4)])


def test_a_step_that_a_scaler_skips_is_no_alarm():
    torch.manual_seed(0)
    model, step = next(build for build in CLEAN if build.__name__ == "overflow_that_the_scaler_skips")()
    with gaff.guard(model) as guard:
        step()
    assert not guard.reports
    model, step = steady_scaler()
    with gaff.guard(model) as guard:
        for _ in range(20):
            step()
    assert not guard.reports


@pytest.mark.parametrize("is_fused", [False, True])
def test_a_scaler_that_finds_its_factor_is_no_alarm(is_fused):
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), fused=is_fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    with gaff.guard(model) as guard:
        for _ in range(20):
            optimizer.zero_grad()
            scaler.scale((model(torch.ones(5, 4)) ** 2).mean() * 1e3).backward()
            scaler.step(optimizer)
            scaler.update()
    assert not guard.reports
    assert all(parameter.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize("build", CLEAN, ids=lambda build: build.__name__)
def test_no_alarm_on_a_clean_step_and_no_bit_changed(build):
    results = []
    for is_guarded in (False, True):
        torch.manual_seed(0)
        model, step = build()
        torch.manual_seed(1)
        if is_guarded:
            with gaff.guard(model) as guard:
                step()
                step()
            assert not guard.reports
        else:
            step()
            step()
        results.append([parameter.grad for parameter in model.parameters()])
    for bare, guarded in zip(*results, strict=True):
        assert bare is guarded is None or torch.equal(bare.nan_to_num(7), guarded.nan_to_num(7))


def test_bad_arguments_are_told():
    with pytest.raises(PlanError, match="action='stop': expected 'raise' or 'warn'"):
        gaff.guard(nn.Linear(2, 2), action="stop")
    with pytest.raises(PlanError, match="cannot be called: expected a function"):
        gaff.find_nonfinite(torch.zeros(2))


def test_what_cannot_be_run_again_is_not_taken_for_meant():
    class Draws(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Function(lambda x: 1 / (x * 0))

        def forward(self, batch):
            return self.inner(next(batch)).clamp(-1, 1)

    model = Draws()
    with pytest.raises(NonFiniteError, match="could not be run again") as caught, gaff.guard(model), torch.no_grad():
        model(iter([torch.ones(3)]))
    assert caught.value.report.site == "inner"


class Warming(nn.Module):
    """Divides by how often it was called, less one: it depends on a buffer that it writes to."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count += 1
        return x / (self.count - 1)


@pytest.mark.parametrize("grad", [True, False])
def test_what_is_not_so_again_is_told_as_that(grad):
    model = nn.Sequential(nn.Linear(4, 4), Warming(), nn.Linear(4, 2))
    with (
        pytest.raises(gaff.NonFiniteError, match="the first module to return something that was not finite") as caught,
        gaff.guard(model) as guard,
        torch.set_grad_enabled(grad),
    ):
        out = model(torch.ones(2, 4))
        if grad:
            out.sum().backward()
            torch.optim.SGD(model.parameters()).step()
    report = caught.value.report
    assert (report.site, report.module, report.direction) == ("1", "1", "forward")
    assert not any("meant" in note for note in guard.notes)


def test_a_parameter_that_was_bad_from_the_beginning_is_not_blamed_on_the_optimizer():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.other = nn.Linear(2, 2), nn.Linear(2, 2)
            self.is_late = False

        def forward(self, x):
            return self.used(x) + self.other(x) if self.is_late else self.used(x)

    for is_late in (False, True):  # never used, or used in the third step only
        model = Net()
        with torch.no_grad():
            model.other.weight[0, 0] = torch.nan
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with pytest.raises(gaff.NonFiniteError) as raised, gaff.guard(model):
            for step in range(3):
                model.is_late = is_late and step == 2
                model(torch.ones(1, 2)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        assert raised.value.report.site == "other.weight:param"
        assert raised.value.report.direction == "before"
        assert "optimizer's step made it" not in str(raised.value)


class Normalized(nn.Module):
    """A norm, made before the layer that it comes after; ``function`` stands between them."""

    def __init__(self, norm, function=lambda h: h):
        super().__init__()
        self.norm, self.lin, self.function = norm, nn.Linear(4, 4), function

    def forward(self, x):
        return self.norm(self.function(self.lin(x)))


class Averaging(nn.Module):
    """Takes away the running mean of what it is given."""

    def __init__(self):
        super().__init__()
        self.register_buffer("average", torch.zeros(4))

    def forward(self, x):
        with torch.no_grad():
            self.average.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return x - self.average


@pytest.mark.parametrize("norm", [nn.BatchNorm1d(4), Averaging()], ids=["batch norm", "own buffer"])
@pytest.mark.parametrize("is_weight", [True, False])
def test_running_statistics_that_the_run_has_spoiled_are_not_the_origin(norm, is_weight):
    model = Normalized(copy.deepcopy(norm), (lambda h: h) if is_weight else lambda h: torch.log(h - 100))
    if is_weight:
        with torch.no_grad():
            model.lin.weight[0, 0] = math.nan
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(NonFiniteError) as caught, gaff.guard(model):
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()
    assert caught.value.report.site == ("lin.weight:param" if is_weight else "/log#0")


def test_a_buffer_that_is_the_origin_is_told_as_one():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()
    model[1].running_var[2] = math.nan
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(NonFiniteError, match="when the batch was run again") as caught, gaff.guard(model):
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()
    assert caught.value.report.site == "1.running_var:buffer"


def test_statistics_that_a_norm_only_updates_are_no_origin_of_what_it_returns_but_of_what_evaluation_will():
    for norm, shape in ((nn.BatchNorm1d(4), (3, 4)), (nn.InstanceNorm1d(4, track_running_stats=True), (3, 4, 5))):
        model = nn.Sequential(norm)
        norm.running_mean[0] = math.nan
        x = torch.randn(shape)
        told = gaff.find_nonfinite(lambda: model(x), model=model)
        assert (told.direction, told.site, told.passed) == ("before", "0.running_mean:buffer", ()), norm
        with gaff.guard(model) as guard:
            model(x)
        assert not guard.reports
        x[0, 0] = math.inf
        assert gaff.find_nonfinite(lambda: model(x), model=model).site != "0.running_mean:buffer"
        norm.eval()
        x = torch.randn(shape)
        assert gaff.find_nonfinite(lambda: model(x), model=model).site == "0.running_mean:buffer"


class LogInPlace(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.lin, self.how = nn.Linear(6, 6), how

    def forward(self, x):
        hidden = self.lin(x)
        if self.how == "log":
            hidden.log_()
        else:
            hidden /= 0
        return hidden


@pytest.mark.parametrize("grad", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize(
    "model",
    [
        LogInPlace("log"),
        nn.Sequential(LogInPlace("log")),
        LogInPlace("div"),
        nn.Sequential(LogInPlace("log"), nn.ReLU(True)),
    ],
)
def test_what_is_made_in_place_of_an_output_that_was_looked_at(model, grad):
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    with pytest.raises(NonFiniteError) as caught, gaff.guard(model), grad():
        out = model(x)
        if out.requires_grad:
            out.sum().backward()
            optimizer.step()
    assert caught.value.report.op in ("log_", "div_")


@pytest.mark.parametrize("shape", [(6, 8), (6, 3, 8)])
def test_what_came_in_through_an_autograd_graph_was_there_before(shape):
    """The copy that a guard runs again is not the maker of what it copies."""
    head = nn.Linear(8, 2)
    encoder = nn.Linear(8, 8)
    hidden = encoder(torch.randn(shape, generator=torch.Generator().manual_seed(0))).log()
    with pytest.raises(NonFiniteError) as caught, gaff.guard(head):
        head(hidden).sum().backward()
        torch.optim.SGD(head.parameters(), 0.1).step()
    assert caught.value.report.direction == "before"
    assert str(caught.value.report.site) == ":input[0]"


def test_a_warning_guard_says_that_a_spoiled_parameter_followed_from_what_it_told_first():
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(factor):
        optimizer.zero_grad()
        (model(torch.ones(4, 3)).mean() * factor).backward()
        optimizer.step()

    with gaff.guard(model, action="warn") as guard:
        step(1.0)
        with pytest.warns(UserWarning, match="not finite"):
            step(math.nan)
        step(1.0)
    first, then = guard.reports
    assert first.direction == "backward"
    assert then.direction == "update"
    assert "before what was told first" in then.cause


@pytest.mark.parametrize("other", ["another guard", "a hook of the user's", "a watch inside"])
def test_a_warning_guard_lets_the_step_go_on_beside_hooks_that_come_later(other, tmp_path):
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with gaff.guard(model, action="warn") as guard, ExitStack() as stack:
        if other == "another guard":
            stack.enter_context(gaff.guard(model[0], action="warn"))
        elif other == "a watch inside":
            stack.enter_context(gaff.watch(model, optimizer, out=tmp_path / "run"))
        else:
            stack.callback(register_optimizer_step_pre_hook(lambda *given: None).remove)
        torch.log(model(torch.ones(4, 3)).mean() * 0).backward()
        with pytest.warns(UserWarning, match="not finite"):
            optimizer.step()
    assert len(guard.reports) == 1


def test_transitions_that_are_never_taken_are_no_alarm():
    torch.manual_seed(0)
    model = Chain()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def step(x=None):
        optimizer.zero_grad()
        model(torch.randn(3, 4) if x is None else x).square().backward()
        optimizer.step()

    assert not gaff.find_nonfinite(step, model=model)
    with gaff.guard(model) as guard:
        for _ in range(3):
            step()
    assert not guard.reports
    with torch.no_grad():
        model.moves[0, 0] = math.nan
    assert gaff.find_nonfinite(step, model=model).site == "moves:param"


def test_what_is_found_at_the_end_of_the_block_has_a_line_of_the_user():
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)).eval()
    model[1].running_var[2] = -1.0
    with pytest.raises(gaff.NonFiniteError, match=r"NaN made by 1/batch_norm#0, test_guard\.py:\d+"):
        with gaff.guard(model):
            model(torch.randn(8, 4)).sum().backward()


@pytest.mark.parametrize("has_gradients", [True, False])
def test_a_program_that_catches_what_a_guard_raises_goes_on_with_other_batches(has_gradients):
    model, optimizer, batches = make(lambda x: x * 1.0)
    batches[1][0, 0] = math.nan
    made = []
    with gaff.guard(model):
        for step, x in enumerate(batches):
            optimizer.zero_grad()
            y = model(x)
            (y if has_gradients else y.nan_to_num()).square().mean().backward()
            try:
                optimizer.step()
            except NonFiniteError:
                continue
            made.append(step)
    assert made == [0, 2, 3, 4, 5]


def test_runs_that_no_step_has_followed_are_told_as_unread():
    model, x = nn.Sequential(nn.Linear(4, 4)), torch.randn(2, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with gaff.guard(model) as guard:
        model(x).sum().backward()
    assert "no optimizer of the model made a step: gradients were not looked at" in repr(guard)
    with gaff.guard(model) as guard:
        model(x).sum().backward()
        optimizer.step()
    assert not guard.notes
    with gaff.guard(model) as guard, torch.no_grad():
        model(x)
    assert not guard.notes


def test_the_model_goes_with_its_guard():
    model = nn.Linear(4, 2)
    held = weakref.ref(model)
    gc.collect()
    gc.disable()
    try:
        with gaff.guard(model) as guard:
            model(torch.ones(1, 4)).sum().backward()
        del model, guard
        assert held() is None
    finally:
        gc.enable()


class Hidden(nn.Module):
    """A mask of -inf that a softmax heals."""

    def forward(self, x):
        return torch.zeros_like(x).masked_fill(torch.arange(x.shape[-1]) % 3 == 2, float("-inf"))


class Masked(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.first, self.norm, self.mask, self.last = nn.Linear(4, 6), norm, Hidden(), nn.Linear(6, 2)

    def forward(self, x):
        h = self.norm(self.first(x))
        return self.last((h + self.mask(h)).softmax(-1))


def in_backward(model, way):
    """Optimizers that step within the backward pass; returns how often they did, one by one."""
    made = []
    if way == "hooks":
        own = {one: torch.optim.SGD([one], 0.1) for one in model.parameters()}

        def step(parameter):
            made.append(1)
            own[parameter].step()
            own[parameter].zero_grad()

        for one in model.parameters():
            one.register_post_accumulate_grad_hook(step)
    elif way == "torch's own":
        from torch.distributed.optim import _apply_optimizer_in_backward

        _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    else:
        for one in model.parameters():
            one.main_grad = torch.zeros_like(one)

            def add(parameter):
                made.append(1)
                parameter.main_grad.add_(parameter.grad)
                parameter.grad = None

            one.register_post_accumulate_grad_hook(add)
    return made


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.parametrize("action", ["raise", "warn"])
@pytest.mark.parametrize("norm", [nn.BatchNorm1d(6), nn.LayerNorm(6), nn.Identity()], ids=["batch", "layer", "none"])
@pytest.mark.parametrize("way", ["hooks", "torch's own", "added elsewhere"])
def test_gradients_that_are_used_within_backward_are_used_once(way, norm, action):
    def train(context):
        torch.manual_seed(0)
        model = Masked(copy.deepcopy(norm))
        made = in_backward(model, way)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with context(model) as guard:
            for _ in range(3):
                model(torch.randn(8, 4)).square().mean().backward()
                if way == "added elsewhere":
                    for one in model.parameters():
                        one.grad, one.main_grad = one.main_grad, torch.zeros_like(one)
                    optimizer.step()
        return model, len(made), guard

    bare, times, _ = train(lambda _: nullcontext())
    guarded, again, guard = train(lambda model: gaff.guard(model, action=action))
    assert again == times
    assert guard.reports == []
    for one, other in zip(bare.state_dict().values(), guarded.state_dict().values(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.parametrize("way", ["hooks", "torch's own"])
def test_a_nan_is_told_where_an_optimizer_steps_within_backward(way):
    torch.manual_seed(0)
    model = Masked(nn.BatchNorm1d(6))
    in_backward(model, way)
    x = torch.randn(8, 4)
    before = copy.deepcopy(model.state_dict())
    with gaff.guard(model) as guard, pytest.raises(NonFiniteError):
        (model(x) * 0).sum().log().mul(0).backward()  # NaN comes back from the loss
    assert guard.reports
    for name in ("last.weight", "first.weight"):
        assert torch.equal(model.state_dict()[name], before[name])
    x[0, 0] = math.nan
    with gaff.guard(model, action="warn") as guard, pytest.warns(UserWarning, match="gaff: "):
        model(x).sum().backward()
    assert guard.reports[0].site == ":input" or guard.reports[0].direction == "before", guard.reports[0]


class Logarithm(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.last(self.first(x).relu().log())


def test_an_op_is_named_though_the_optimizer_steps_within_backward():
    torch.manual_seed(0)
    model = Logarithm()
    in_backward(model, "hooks")
    with gaff.guard(model, action="warn") as guard, pytest.warns(UserWarning, match="log of 0"):
        model(torch.randn(16, 4)).square().mean().backward()
    assert guard.reports[0].site.startswith("/log"), guard.reports[0]


def test_an_overflow_of_another_models_optimizer_does_not_make_the_guard_forget():
    class Bad(nn.Module):
        def forward(self, x):
            return torch.log(x - x.detach() - 1)

    guarded, other = nn.Sequential(nn.Linear(4, 1), Bad()), nn.Linear(4, 1)
    own = torch.optim.SGD(guarded.parameters(), 0.1)
    others = torch.optim.Adam(other.parameters(), 0.1, fused=True)
    scaler, x = torch.amp.GradScaler("cpu"), torch.randn(8, 4)
    with pytest.raises(NonFiniteError, match="log"), gaff.guard(guarded):
        guarded(x).mean().backward()
        scaler.scale(other(x).mean() * torch.inf).backward()
        scaler.step(others)
        scaler.update()
        own.step()


class Steep(nn.Module):
    """Two layers with a root between them that is steep where ``is_steep``."""

    def __init__(self):
        super().__init__()
        self.first, self.last, self.is_steep = nn.Linear(8, 8), nn.Linear(8, 3), False

    def forward(self, x):
        hidden = self.first(x)
        return self.last(torch.sqrt(hidden * 0) if self.is_steep else hidden)


def steep_step(model, *, between=None, halves=False):
    """The origin that a guard tells of the third of three steps, whose gradients are not finite."""
    parts = [model.last, model.first] if halves else [model]
    optimizers = [torch.optim.SGD(one.parameters(), 0.1) for one in parts]
    with pytest.raises(gaff.NonFiniteError) as raised, gaff.guard(model):
        for step in range(3):
            model.is_steep = step == 2
            model.zero_grad()
            model(torch.randn(4, 8)).square().mean().backward()
            if between:
                between(model)
            for one in optimizers:
                one.step()
    return raised.value.report


def test_the_second_of_two_optimizers_is_told_where_its_gradient_began():
    report = steep_step(Steep(), halves=True)
    assert (report.site, report.direction) == ("/sqrt#0", "backward")


def test_a_run_without_gradients_before_the_step_takes_no_batch_away():
    def measured(model):
        with torch.no_grad():
            model(torch.randn(4, 8))

    report = steep_step(Steep(), between=measured)
    assert (report.site, report.direction) == ("/sqrt#0", "backward")


def test_no_batch_is_held_where_one_optimizer_has_all_parameters():
    model = Steep()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with gaff.guard(model):
        x = torch.randn(4, 8)
        given = weakref.ref(x)
        model(x).square().mean().backward()
        optimizer.step()
        del x
        assert given() is None


def test_a_batch_that_was_written_to_before_the_step_is_told_as_such():
    model = Steep()
    optimizer, x = torch.optim.SGD(model.parameters(), 0.1), torch.full((4, 8), math.nan)
    with pytest.raises(gaff.NonFiniteError) as raised, gaff.guard(model):
        model(x).square().mean().backward()
        x.zero_()
        optimizer.step()
    assert any("written to after the run" in one for one in raised.value.report.notes)


def test_a_gradient_that_the_loss_has_spoilt_says_what_names_the_op():
    model = nn.Linear(3, 2)
    x = torch.ones(4, 3)

    def step():
        out = model(x)
        target = torch.cat([out[:1].detach(), out[1:].detach() + 1])
        (out - target).square().sum(1).sqrt().mean().backward()

    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step()
    with gaff.guard(model), pytest.raises(gaff.NonFiniteError, match="made outside the model; gaff.find_nonfinite"):
        optimizer.zero_grad()
        step()
        optimizer.step()
    assert gaff.find_nonfinite(step, model=model).op == "sqrt"
