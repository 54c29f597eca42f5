"""Where a NaN or inf began: planted faults are found, clean models raise no alarm."""

import contextlib
import math
import re
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gaff
from tests.clean import CLEAN
from tests.faults import FAULTS


@pytest.mark.filterwarnings("ignore:std")
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_found_where_it_is(fault):
    if fault.name == "running variance of zero" and torch.__version__.startswith("2.10"):
        pytest.skip("torch 2.10 itself refuses eps=0")
    model, step = fault.build()
    report = gaff.find_nonfinite(step, model=model)
    assert report, report
    assert (report.op, report.direction) == (fault.op, fault.direction), report
    if fault.direction != "before":
        assert report.module == fault.module, report
        assert report.site.startswith(f"{fault.module}/{fault.op}#"), report
        assert report.line.startswith("faults.py:"), report
    else:
        assert report.site.startswith(fault.module), report
    assert re.search(fault.cause, report.cause), report


@pytest.mark.parametrize("build", CLEAN, ids=lambda build: build.__name__)
def test_no_alarm_on_a_clean_step(build):
    torch.manual_seed(0)
    model, step = build()
    report = gaff.find_nonfinite(step, model=model)
    assert not report, report
    assert report.ops


class Kept(nn.Linear):
    def __init__(self):
        super().__init__(2, 2)
        self.register_buffer("ema", torch.ones(2))


class Aliased(nn.Linear):
    """Spoils what it returns by way of another tensor in the same memory."""

    def __init__(self, way):
        super().__init__(2, 2)
        self.way = way

    def forward(self, x):
        h = super().forward(x)
        alias = h.detach() if self.way == "detach" else h.data
        alias.sub_(100.0).log_()
        return h * 2.0


@pytest.mark.parametrize("way", ["detach", "data"])
def test_what_is_written_by_way_of_another_tensor_is_found_where_it_was_written(way):
    model = Aliased(way)
    report = gaff.find_nonfinite(lambda: model(torch.ones(1, 2)).sum().backward(), model=model)
    assert report.site == "/log_#0"
    assert "log of numbers below 0" in report.cause


def divided(tensor):
    with torch.no_grad():
        tensor.div_(0)


@pytest.mark.parametrize(
    ("spoil", "direction", "site"),
    [
        (lambda model, optimizer: divided(model.weight), "forward", "(step)/div_#0"),
        (lambda model, optimizer: divided(model.ema), "forward", "(step)/div_#0"),
        (lambda model, optimizer: divided(model.weight.grad), "forward", "(step)/div_#0"),
        (lambda model, optimizer: model.weight.data.fill_(float("nan")), "forward", "(step)/fill_#0"),
        (lambda model, optimizer: model.weight.detach()[0].div_(0), "forward", "(step)/div_#0"),
        (lambda model, optimizer: (optimizer.step(), model.weight.data.div_(0)), "forward", "(step)/div_#0"),
        (lambda model, optimizer: model.weight.data.numpy().fill(math.nan), "written", "weight:param"),
        (
            lambda model, optimizer: (optimizer.step(), model.weight.data.numpy().fill(math.nan)),
            "written",
            "weight:param",
        ),
    ],
)
def test_state_that_code_spoils_is_not_blamed_on_an_optimizer(spoil, direction, site):
    model = Kept()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step():
        model(torch.ones(1, 2)).sum().backward()
        spoil(model, optimizer)

    report = gaff.find_nonfinite(step, model=model)
    assert (report.direction, report.site) == (direction, site)


@pytest.mark.parametrize("own", [None, 1])
def test_asking_what_an_op_overflowed_draws_no_number_and_writes_no_buffer(own):
    """The op is run again in float64."""
    norm = nn.BatchNorm1d(2, dtype=torch.float64)
    norm.weight.data.fill_(1e308)
    x = torch.tensor([[1.0, 2.0], [3.0, 1e3]], dtype=torch.float64)

    def step():
        generator = None if own is None else torch.Generator().manual_seed(own)
        torch.manual_seed(0)
        norm.running_mean.zero_()
        out = norm(x) * 10
        big = torch.full((2,), 6e4).half()
        drawn = torch.normal(big.float() * 1e34, 1e38, generator=generator).half()
        later = torch.rand(2) if generator is None else torch.rand(2, generator=generator)
        return out, drawn, later, norm.running_mean.clone()

    bare = step()
    found = []
    assert gaff.find_nonfinite(lambda: found.append(step()) or found[0][0])
    assert torch.equal(found[0][2], bare[2])
    assert torch.equal(found[0][3], bare[3])


def test_a_normalization_that_overflows_is_not_told_as_a_buffer_that_somebody_wrote():
    """It writes its running statistics itself, and does not use them in training."""
    norm, x = nn.BatchNorm1d(2), torch.full((8, 2), 3e38)
    x[:, 1] = torch.arange(8.0)
    report = gaff.find_nonfinite(lambda: norm(x), model=norm)
    assert report.op == "batch_norm"
    assert report.cause.startswith("overflow inside batch_norm")


INF = math.inf
of = torch.tensor


def closed(*values):
    """Infinities that were put in on purpose, where the values have them."""
    given = of(values)
    return torch.where(given.isinf(), 0.0, given).masked_fill(given.isinf(), INF)


@pytest.mark.filterwarnings("ignore:var")
@pytest.mark.parametrize(
    ("run", "cause"),
    [
        (lambda: torch.lgamma(of([0.0, 1.0])), "lgamma has poles at 0"),
        (lambda: of([0.0, 1.0]).digamma_(), "digamma has poles at 0"),
        (lambda: torch.lgamma(of([-0.5, 3e38])), "^overflow: lgamma gives"),
        (lambda: torch.xlogy(torch.ones(2), of([0.0, 1.0])), "log of 0 in xlogy: 1 of 2"),
        (lambda: of([0.0, 1.0]) ** of(-1.0), "0 to the power of a negative number, for 1 of 2"),
        (lambda: of([-2.0, 1.0]) ** of(0.5), "a negative number, down to -2, to the power of a fraction"),
        (lambda: of([0.0, 1.0]).reciprocal_(), "division by zero: 1 of 2"),
        (lambda: (lambda x: x.div_(x))(of([0.0, 1.0])), "division by zero: 1 of 2"),
        (lambda: of([-1.0, 1.0]).log1p_(), "log1p of -1"),
        (lambda: of([1.0, 0.5]).atanh_(), "atanh is defined between -1 and 1"),
        (lambda: of([0.0, 1.0]).acosh_(), "acosh is defined from 1 on"),
        (lambda: torch.var(of([1.0, 3.0]) * 1, correction=2), "divides by n - correction = 0"),
        (lambda: torch.logdet(torch.zeros(2, 2)), "singular"),
        (lambda: torch.logdet(torch.diag(of([1.0, -1.0]))), "log of a negative number"),
        (lambda: torch.log(torch.zeros(4, dtype=torch.complex64)).real, "4 of 4 elements"),
        (lambda: torch.nn.functional.layer_norm(of([1e30, -3e30]), (2,), eps=0.0), "^overflow inside layer_norm"),
        (lambda: torch.nn.functional.layer_norm(torch.ones(2), (2,), eps=0.0), "variance: layer_norm with eps=0"),
        (lambda: torch.tensor(np.array([np.nan, 1.0])) * 1, "in the numbers that the tensor was made of"),
        (lambda: torch.tensor([1e39, 1.0]) * 1, "^overflow: numbers up to 1e.39"),
        (lambda: torch.softmax(torch.tensor([[-INF, -INF]]), 1), "fully masked"),
        (lambda: of([0.0, 1.0]) * INF, "an infinite constant .* 0 . inf, or inf - inf"),
        (lambda: closed(INF, 2.0) @ of([0.0, 1.0]), "met a 0: 0 . inf"),
        (lambda: closed(INF, INF) @ of([1.0, -1.0]), "met another: inf - inf"),
        (lambda: (lambda x: x / x)(closed(INF, 1.0)), "inf / inf"),
        (lambda: torch.sin(closed(INF, 1.0)), "went into sin, which has no value there"),
        (lambda: torch.nn.functional.cross_entropy(-closed(1.0, 2.0, INF)[None], of([[0.5, 0.5, 0.0]])), "share of"),
        (lambda: torch.nn.functional.cross_entropy(-closed(1.0, INF)[None], of([0]), label_smoothing=0.1),
         "label_smoothing asks for every class"),
    ],
)  # fmt: skip
def test_the_cause_is_the_one_of_these_numbers(run, cause):
    report = gaff.find_nonfinite(run)
    assert re.search(cause, report.cause), report


@pytest.mark.parametrize(
    ("run", "factor", "cause"),
    [
        (lambda x: of([0.0, 1.0]) / (x * 1e-25), 1.0, "more than float32 holds"),
        (lambda x: x / of([0.0, 1.0]).requires_grad_(), 1.0, "divisor is 0 .1 of 2 elements"),
        (lambda x: torch.acos((x * 0.95).half()), 60000.0, "overflow: the gradient that came"),
        (lambda x: (x * of([0.0, 100.0])).half() ** 1.5, 60000.0, "overflow: the gradient that came"),
        (lambda x: torch.acos(x), 1.0, "acos at -1 and 1"),
        (lambda x: torch.std((x * of([1e-3, 2e-3])).half()), 60000.0, "overflow: the gradient that came"),
        (lambda x: torch.xlogy(x * 0, x - 1), 1.0, "xlogy at 0 is infinite .2 of 2 elements"),
    ],
)
def test_the_cause_in_backward_is_the_one_of_these_numbers(run, factor, cause):
    model = nn.Module()
    model.w = nn.Parameter(torch.ones(2))

    def step():
        (run(model.w).float().nan_to_num(posinf=1.0) * factor).sum().backward()

    report = gaff.find_nonfinite(step, model=model)
    assert re.search(cause, report.cause), report


def test_running_statistics_that_overflow_are_told_though_nothing_uses_them_yet():
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1))
    report = gaff.find_nonfinite(lambda: model(torch.randn(8, 4) * 1e20), model=model)
    assert report.site == "0/batch_norm#0"
    assert "running statistics overflowed" in report.cause


def test_what_an_optimizer_keeps_is_told_where_it_overflows_and_later_as_there_before():
    model = nn.Linear(4, 1)
    optimizer = torch.optim.Adam(model.parameters())

    def step():
        optimizer.zero_grad()
        (model(torch.ones(8, 4)) * 1e21).sum().backward()
        optimizer.step()

    first, second = gaff.find_nonfinite(step, model=model), gaff.find_nonfinite(step, model=model)
    assert (first.direction, first.site) == ("update", "weight:param")
    assert "exp_avg_sq, overflowed in its step, of a finite gradient up to 8e+21" in first.cause
    assert (second.direction, second.site) == ("kept", "weight:param")
    assert "exp_avg_sq, was not finite before this step" in second.cause


def test_what_an_optimizer_keeps_that_was_bad_before_is_told_where_it_makes_a_weight_bad():
    model = nn.Linear(4, 1)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.state[model.weight]["exp_avg"][0, 0] = math.nan
    told = gaff.find_nonfinite(optimizer.step, model=model)
    assert (told.direction, told.site) == ("kept", "weight:param")
    assert "exp_avg, was not finite before this step" in told.cause


@pytest.mark.parametrize("first", ["backward", "optimizer", "user"])
def test_of_several_steps_in_one_the_first_that_was_bad_is_told(first):
    model, x = nn.Linear(4, 4), torch.randn(6, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=math.inf if first == "optimizer" else 0.1)

    def step():
        for _ in range(2):
            optimizer.zero_grad()
            y = model(x)
            loss = (y * 0).sqrt().mean() if first == "backward" else y.pow(2).mean()
            loss.backward()
            if first == "user":
                with torch.no_grad():
                    model.weight.div_(0)
            optimizer.step()

    told = gaff.find_nonfinite(step, model=model)
    expected = {"backward": ("backward", "(step)/sqrt#0"), "optimizer": ("update", "weight:param"),
                "user": ("forward", "(step)/div_#0")}  # fmt: skip
    assert (told.direction, told.site) == expected[first]


def test_what_is_allowed_and_reaches_the_loss_is_told_with_its_own_cause():
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    model.forward = lambda x: torch.log(torch.relu(model[0](x)) * 0)
    report = gaff.find_nonfinite(lambda: model(torch.ones(1, 2)).mean().backward(), model=model, allow=["/log"])
    assert report.site == "/log#0"
    assert report.cause.startswith("log of 0")


class Distance(nn.Module):
    """Its derivative by the input is not finite where that is zero, and its output is."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(2, 1)

    def forward(self, x):
        return self.fc(x) * x.pow(2).sum(-1, keepdim=True).sqrt()


@pytest.mark.parametrize("graph", [True, False])
@pytest.mark.parametrize("way", ["handed out", "handed out of two", "of the leaf"])
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
def test_a_gradient_that_the_step_goes_on_with_began_in_its_backward_pass(way, graph):
    model, points = Distance(), torch.tensor([[0.0, 0.0], [1.0, 2.0]])

    def step():
        x = points.clone().requires_grad_()
        y = model(x).sum() + (x.pow(2).sum() if way == "handed out of two" else 0.0)
        if way == "of the leaf":
            y.backward(create_graph=graph)
            slope = x.grad
        else:
            (slope,) = torch.autograd.grad(y, x, create_graph=graph, retain_graph=True)
        model(x.detach() + slope).mean().backward()

    report = gaff.find_nonfinite(step, model=model)
    assert (report.direction, report.site) == ("backward", "/sqrt#0")
    assert report.cause.startswith("the derivative of sqrt at 0 is infinite (1 of 2 elements are 0)")


def test_what_a_gradients_shape_has_and_no_backward_pass_made_was_there_before():
    model, points = Distance(), torch.tensor([[float("nan"), 0.0], [1.0, 2.0]])

    def step():
        x = torch.ones(2, 2, requires_grad=True)
        (slope,) = torch.autograd.grad(model(x).sum(), x)
        model(points + slope).mean().backward()

    report = gaff.find_nonfinite(step, model=model)
    assert (report.direction, report.module) == ("before", "(step)")


def test_an_infinity_that_the_forward_pass_has_healed_is_the_origin_of_what_backward_makes_of_it():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    with torch.no_grad():
        model[0].weight[0, 0] = math.inf
    told = gaff.find_nonfinite(lambda: model(torch.randn(3, 4)).sum().backward(), model=model)
    assert (told.direction, told.site) == ("before", "0.weight:param")


class Applied(nn.Module):
    """A linear layer, and what a function makes of its output."""

    def __init__(self, function):
        super().__init__()
        self.linear, self.function = nn.Linear(4, 4), function

    def forward(self, x):
        return self.function(self.linear(x))


HELD, CLOSED = torch.full((4,), math.inf), torch.tensor([-math.inf, 0.0, 0.0, 0.0])


@pytest.mark.parametrize(
    ("function", "site", "cause"),
    [
        (lambda h: (h * 0) * HELD, "/mul", "met a 0: 0 * inf is NaN"),
        (lambda h: (h - HELD) - (h - HELD), "/sub", "met another: inf - inf is NaN"),
        (lambda h: (h + CLOSED) * 0, "/mul", "met a 0: 0 * inf is NaN"),
        (lambda h: (h + CLOSED).mul_(0.0), "/mul_", "met a 0: 0 * inf is NaN"),
    ],
)
def test_a_nan_made_of_an_infinity_that_a_forward_holds_is_that_ops(function, site, cause):
    model = Applied(function)
    report = gaff.find_nonfinite(lambda: model(torch.randn(3, 4)).sum().backward(), model=model)
    assert report.site.startswith(site)
    assert cause in report.cause


def test_a_target_of_zero_at_a_closed_class_of_kl_div_is_told_as_that():
    target = torch.tensor([[0.5, 0.5, 0.0, 0.0]]).expand(3, 4)
    model = Applied(lambda h: torch.log_softmax(h.masked_fill(torch.tensor([0, 0, 0, 1]).bool(), -math.inf), -1))
    report = gaff.find_nonfinite(
        lambda: nn.functional.kl_div(model(torch.randn(3, 4)), target, reduction="sum").backward(), model=model
    )
    assert "has a target of exactly 0, and 0 * inf is NaN" in report.cause


def _stepped(kind):
    """A step that spoils a parameter or statistics, by an optimizer or by hand, and what is told of it."""
    layer = nn.Linear(2, 1)
    if kind == "statistics":
        norm = nn.BatchNorm1d(2)
        norm.running_var[0] = math.nan
        return lambda: norm(torch.randn(3, 2)), "before"
    if kind == "by hand":

        def written():
            with torch.no_grad():
                layer.weight.mul_(1e38).mul_(1e38)

        return written, "forward"
    options = {"lr": 1e10, "foreach": False} if kind == "plain" else {"lr": 1e10}
    optimizer = (
        torch.optim.Adam(layer.parameters()) if kind == "kept" else torch.optim.SGD(layer.parameters(), **options)
    )
    size = math.nan if kind == "gradient" else 1.0 if kind == "kept" else 1e38
    layer.weight.grad, layer.bias.grad = torch.full((1, 2), size), torch.ones(1)
    if kind == "kept":
        optimizer.step()
        optimizer.state[layer.weight]["exp_avg_sq"].fill_(math.nan)
    return optimizer.step, {"kept": "kept", "gradient": "arrived"}.get(kind, "update")


@pytest.mark.parametrize("kind", ["default", "plain", "gradient", "kept", "by hand", "statistics"])
def test_a_step_without_a_model_that_spoils_parameters_is_told(kind):
    step, direction = _stepped(kind)
    report = gaff.find_nonfinite(step)
    assert report
    assert report.direction == direction
    assert report.site.startswith("(step)")


def test_a_parameter_without_a_model_that_forbids_what_it_always_did_is_none():
    layer = nn.Linear(2, 2)
    with torch.no_grad():
        layer.bias[0] = -math.inf
    assert not gaff.find_nonfinite(lambda: layer(torch.randn(3, 2)).exp().sum().item())


@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_that_a_scaler_leaves_out_are_not_those_of_the_step_before(to_none):
    """They overflow in each call, and each begins with clearing them; where nobody clears them they are told."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30)

    def step(clears=True):
        if clears:
            optimizer.zero_grad(set_to_none=to_none)
        with torch.autocast("cpu", dtype=torch.float16):
            output = model(torch.randn(4, 8))
        scaler.scale(output.float().sum()).backward()
        scaler.step(optimizer)
        scaler.update()

    for _ in range(3):
        report = gaff.find_nonfinite(step, model=model)
        assert not report, str(report)
    model[0].weight.grad.fill_(math.nan)
    assert gaff.find_nonfinite(lambda: step(clears=False), model=model).direction == "before"


@pytest.mark.parametrize("name", ["exp", "exp2"])
def test_an_exponential_that_overflows_in_a_branch_that_is_discarded(name):
    """Its value is replaced, and its derivative is 0 * inf all the same."""
    model = nn.Linear(4, 4)

    def step(clean=False):
        h = model(torch.ones(2, 4) * 1e4).abs() + 1000.0
        inner = h.clamp(max=5) if clean else h
        torch.where(h < 5, getattr(torch, name)(inner), h).sum().backward()

    report = gaff.find_nonfinite(step, model=model)
    assert (report.op, report.direction) == (name, "backward")
    assert f"{name} overflows: it is given up to" in report.cause
    assert f"clamp the input of {name} before it" in report.cause
    model.zero_grad()
    assert not gaff.find_nonfinite(lambda: step(clean=True), model=model)


ZEROS, NARROW = torch.zeros(2, 8), torch.zeros(2, 8, dtype=torch.float16)


@pytest.mark.filterwarnings("ignore:std")
@pytest.mark.parametrize(
    ("step", "cause"),
    [
        (
            lambda: torch.ones(2, 3).masked_fill(torch.tensor([True, False, False]), math.inf).softmax(-1),
            "softmax of +inf, which was put in on purpose",
        ),
        (lambda: F.cosine_similarity(NARROW, NARROW), "cosine_similarity with eps=1e-08, which is 0 in float16, of a"),
        (lambda: F.normalize(NARROW), "normalize with eps=1e-12, which is 0 in float16, of a vector whose norm is 0"),
        (lambda: F.normalize(ZEROS, p=math.inf, eps=0.0), "normalize with eps=0 of a vector whose norm is 0"),
        (lambda: ZEROS[ZEROS > 1].std(), "std of no elements at all"),
    ],
    ids=["closed with +inf", "cosine in half", "normalize in half", "order inf", "std of nothing"],
)
def test_the_cause_is_not_one_that_looks_alike(step, cause):
    report = gaff.find_nonfinite(step)
    assert report
    assert cause in report.cause


def test_what_autocast_cannot_hold_is_told_of_the_input():
    model, x = nn.Linear(8, 8), torch.randn(4, 8) * 1e5

    def step():
        with torch.autocast("cpu", torch.float16):
            return model(x)

    report = gaff.find_nonfinite(step)
    assert report.cause.startswith("overflow: input[0] goes up to ")
    assert "in float32, and autocast runs linear in float16, which holds up to 6.55e+04" in report.cause


@pytest.mark.parametrize("place", ["around", "inside"])
def test_under_anomaly_mode_a_nan_of_a_backward_pass_is_told_as_well(place):
    model, x = nn.Linear(4, 4), torch.randn(3, 4)

    def step():
        with torch.autograd.set_detect_anomaly(True) if place == "inside" else contextlib.nullcontext():
            y = model(x) * 0
            torch.where(y > 0, y.sqrt(), torch.zeros(())).sum().backward()

    with torch.autograd.set_detect_anomaly(True) if place == "around" else contextlib.nullcontext():
        report = gaff.find_nonfinite(step, model=model)
        assert (report.direction, report.site) == ("backward", "(step)/sqrt#0")
        assert (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()) == (place == "around", True)
        if place == "around":
            with pytest.raises(RuntimeError, match="returned nan values"), gaff.guard(model):
                step()  # torch's own check is back, and a guard leaves it alone


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize(("act", "value"), [(nn.Dropout, 3e38), (partial(nn.LeakyReLU, 1e10), -1e30)])
def test_an_op_that_overwrites_its_input_is_told_by_what_that_was(act, value, inplace):
    torch.manual_seed(0)
    act, weight = act(inplace=inplace), torch.ones(8, requires_grad=True)
    report = gaff.find_nonfinite(lambda: (weight * act(torch.full((8,), value))).sum().backward())
    assert "overflow" in report.cause
    assert (report.inputs[0].min, report.inputs[0].max) == pytest.approx((value, value))
