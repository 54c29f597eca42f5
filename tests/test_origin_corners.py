"""``find_nonfinite`` and ``guard`` where such tools miss, blame the wrong op, or change what they watch."""

import copy
import math
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gaff
from gaff.errors import NonFiniteError, PlanError, SiteError
from tests.faults import Apply, Function


def steep(x):
    return torch.sqrt(x * (x > 0))


class Own(nn.Module):
    """A function in the root's own forward."""

    def __init__(self, function):
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.function = function

    def forward(self, x):
        return self.function(self.lin(x))


class SpoilsGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * math.nan


@pytest.fixture
def x():
    torch.manual_seed(0)
    return torch.randn(3, 4)


def sgd(*models, lr=0.1):
    return torch.optim.SGD([one for model in models for one in model.parameters()], lr)


def find(model, x, loss=lambda y: y.sum()):
    return gaff.find_nonfinite(lambda: loss(model(x)).backward(), model=model)


def raised(model, run, **options):
    with pytest.raises(NonFiniteError) as caught, gaff.guard(model, **options):
        run()
    return caught.value.report


@pytest.mark.parametrize("has_grad", [False, True])
def test_the_guard_looks_at_what_the_root_itself_makes(x, has_grad):
    model = Own(lambda z: torch.log(z * 0 - 1))
    optimizer = sgd(model)

    def run():
        with torch.set_grad_enabled(has_grad):
            y = model(x)
        if has_grad:
            y.sum().backward()
            optimizer.step()

    assert raised(model, run).site == "/log#0"


def test_a_real_fault_that_makes_a_scaler_skip_every_step_is_told(x):
    model = Apply(steep)
    optimizer, scaler = sgd(model), torch.amp.GradScaler("cpu")

    def run():
        for _ in range(40):
            optimizer.zero_grad()
            scaler.scale(model(x).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()

    report = raised(model, run)
    assert (report.site, report.direction) == ("middle/sqrt#0", "backward")


def test_an_input_with_a_graph_behind_it_is_run_again_without_it(x):
    encoder, model = nn.Linear(4, 4), Apply(steep)
    optimizer = sgd(encoder, model, lr=0.0)
    kept = []

    def run():
        model(encoder(x)).sum().backward(retain_graph=True)
        kept.append(encoder.weight.grad.clone())
        optimizer.step()

    assert raised(model, run).site == "middle/sqrt#0"
    assert torch.equal(kept[0].nan_to_num(7), encoder.weight.grad.nan_to_num(7))


def test_a_closure_is_looked_at_before_the_weights_change(x):
    model = Apply(lambda x: torch.log(x.abs() * 0))
    optimizer = sgd(model)

    def closure():
        with torch.enable_grad():
            optimizer.zero_grad()
            loss = model(x).square().sum()
            loss.backward()
        return loss

    assert raised(model, lambda: optimizer.step(closure)).site == "middle/log#0"
    assert all(parameter.isfinite().all() for parameter in model.parameters())


def test_a_parameter_that_the_optimizer_spoiled_is_told(x):
    for way in ("find", "guard"):
        model = nn.Linear(4, 2)
        optimizer = sgd(model, lr=math.inf)

        def step(model=model, optimizer=optimizer):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()

        report = gaff.find_nonfinite(step, model=model) if way == "find" else raised(model, step)
        assert (report.direction, report.site) == ("update", "weight:param")
        assert "optimizer's step made it" in report.cause


def test_an_infinite_loss_of_a_masked_target_is_the_losss(x):
    model = nn.Linear(4, 2)
    closed = torch.tensor([[True, False]] * 3)

    def step():
        loss = F.cross_entropy(model(x).masked_fill(closed, -math.inf), torch.zeros(3, dtype=torch.long))
        loss.backward()
        return loss

    report = gaff.find_nonfinite(step, model=model)
    assert report.op == "cross_entropy"
    assert "a score of -inf is asked for" in report.cause


def test_each_of_two_backward_passes_is_looked_at(x):
    model = nn.Linear(4, 2)

    def step():
        model(x).sum().backward()
        torch.log(-model(x).abs() - 1).sum().backward()

    assert gaff.find_nonfinite(step, model=model).site == "(step)/log#0"


@pytest.mark.parametrize("way", ["find", "guard"])
def test_sparse_gradients_are_looked_at(way):
    model = nn.Sequential(nn.Embedding(5, 4, sparse=True), Function(steep))
    optimizer = torch.optim.SparseAdam(model.parameters())

    def step():
        model(torch.tensor([[1, 2]])).sum().backward()
        optimizer.step()

    report = gaff.find_nonfinite(step, model=model) if way == "find" else raised(model, step)
    assert report.site == "1/sqrt#0"


@pytest.mark.parametrize("is_returned", [False, True])
def test_autograd_grad_is_a_backward_pass(x, is_returned):
    model = Apply(steep)

    def step():
        gradients = torch.autograd.grad(model(x).sum(), list(model.parameters()))
        return gradients if is_returned else None

    report = gaff.find_nonfinite(step, model=model)
    assert (report.site, report.direction) == ("middle/sqrt#0", "backward")


def test_a_batch_that_the_model_takes_apart_is_run_again(x):
    class Pops(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(4, 4)

        def forward(self, batch):
            return steep(self.lin(batch.pop("x")))

    class Draws(Pops):
        def forward(self, batch):
            return steep(self.lin(next(batch)))

    for model, batch, site in ((Pops(), lambda: {"x": x}, "/sqrt#0"), (Draws(), lambda: iter([x]), "(step)")):
        optimizer = sgd(model)

        def run(model=model, batch=batch, optimizer=optimizer):
            model(batch()).sum().backward()
            optimizer.step()

        assert raised(model, run).site == site


def test_an_exception_of_the_users_own_is_told_what_was_behind_it(x):
    model = Apply(lambda x: torch.log(x - 9))

    def step():
        if model(x).sum().isnan():
            raise ValueError("loss is NaN")

    with pytest.raises(ValueError, match="loss is NaN") as caught, gaff.guard(model):
        step()
    assert "middle/log#0" in getattr(caught.value, "__notes__", ["middle/log#0"])[0]
    with pytest.raises(ValueError, match="loss is NaN") as caught:
        gaff.find_nonfinite(step, model=model)
    assert "middle/log#0" in getattr(caught.value, "__notes__", ["middle/log#0"])[0]


def scaled_row(x):
    y = x * 1
    y[0].mul_(1e39)
    return y


CASES = [
    (scaled_row, "middle/mul_#0", "forward", "overflow"),
    (SpoilsGradients.apply, "middle/SpoilsGradients", "backward", "of finite gradients"),
    (lambda x: x + math.nan, "middle/add#0", "forward", "put in by a constant"),
    (lambda x: x.masked_fill(x > 0, math.nan), "middle/masked_fill#0", "forward", "put in by a constant"),
    (lambda x: x + torch.full((4,), math.nan), "middle/full#0", "forward", "put in by a constant"),
    (lambda x: (x * 1e6).half().float(), "middle/half#0", "forward", "a cast of .* from float32 to float16"),
    (lambda x: F.normalize(x * 0, eps=0), "middle/normalize#0", "forward", "whose norm is 0"),
]


@pytest.mark.parametrize(("function", "site", "direction", "cause"), CASES)
def test_the_blame_is_where_it_belongs(x, function, site, direction, cause):
    report = find(Apply(function), x)
    assert (report.site, report.direction) == (site, direction)
    assert re.search(cause, report.cause), report.cause


def test_a_write_past_torch_is_told_as_such(x):
    class Spoils(nn.Module):
        def forward(self, x):
            x.detach().numpy()[0, 0] = math.nan
            return x * 2

    model = nn.Sequential(nn.Linear(4, 4), Spoils())
    assert "written to past torch" in find(model, x).cause


def test_hooks_of_others_are_named_as_such(x):
    model = Apply(lambda x: x)
    model.middle.register_forward_hook(lambda module, args, output: output.log().neg().sqrt())
    assert "somebody's hook" in find(model, x).cause
    model = Apply(lambda x: x)
    model.first.weight.register_hook(lambda gradient: gradient * math.nan)
    assert "a gradient hook" in find(model, x).cause


def test_a_gradient_from_before_the_step(x):
    model = Apply(lambda x: x)
    model.first.weight.grad = torch.full((4, 4), math.nan)
    report = find(model, x)
    assert (report.site, report.direction) == ("first.weight:grad", "before")


def test_a_target_that_is_infinite_is_there_before_the_step(x):
    model, target, criterion = nn.Linear(4, 2), torch.zeros(3, 2), nn.MSELoss()
    target[0] = math.inf
    report = gaff.find_nonfinite(lambda: criterion(model(x), target).backward(), model=model)
    assert (report.direction, report.op) == ("before", "")
    assert "held 2 +inf before the step" in report.cause


def test_of_two_guarded_models_the_one_that_made_it_is_told(x):
    first, second = nn.Linear(4, 4), Apply(steep)
    optimizer = sgd(first)
    with pytest.raises(NonFiniteError) as caught, gaff.guard(first), gaff.guard(second):
        second(first(x)).sum().backward()
        optimizer.step()
    assert caught.value.report.site == "middle/sqrt#0"


def test_attention_of_torch_is_looked_into(x):
    attention, closed = nn.MultiheadAttention(4, 1, batch_first=True), torch.ones(1, 3, dtype=torch.bool)
    step = lambda: attention(x[None], x[None], x[None], key_padding_mask=closed)[0].sum().backward()  # noqa: E731
    report = gaff.find_nonfinite(step, model=attention)
    assert report.site == "/softmax#0"
    assert "fully masked row" in report.cause


def test_nothing_stays_on_what_the_model_returned(x):
    model = Apply(lambda x: x)
    with gaff.guard(model):
        y = model(x)
    assert not y._backward_hooks


def test_a_slip_in_allow_is_told():
    with pytest.raises(SiteError, match="no module 'nonsense'"):
        gaff.guard(Apply(lambda x: x), allow=["nonsense/foo#7"])


class Spoil(torch.autograd.Function):
    """NaN, out of torch's sight."""

    @staticmethod
    def forward(ctx, x):
        return torch.from_numpy(x.detach().numpy() * float("nan"))

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Heal(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return torch.from_numpy(x.detach().numpy() * 0 + 1).nan_to_num()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Around(nn.Module):
    def __init__(self, func):
        super().__init__()
        self.a, self.b, self.func = nn.Linear(4, 4), nn.Linear(4, 4), func

    def forward(self, x):
        return self.b(self.func(self.a(x)))


CUSTOM = {
    "alone": Spoil.apply,
    "after something healed": lambda h: Spoil.apply(Heal.apply(torch.log(-h.abs()))),
    "given the good one of two outputs": lambda h: Spoil.apply(torch.stack([torch.log(-h.abs()), h]).unbind(0)[1]),
}


@pytest.mark.parametrize("func", CUSTOM.values(), ids=CUSTOM)
@pytest.mark.parametrize("has_grad", [True, False])
def test_what_no_op_made_is_blamed_on_no_op(func, has_grad):
    torch.manual_seed(0)
    model, x = Around(func), torch.randn(3, 4)
    with torch.set_grad_enabled(has_grad):
        report = gaff.find_nonfinite(lambda: model(x), model=model)
    assert report
    assert "log" not in report.site
    assert report.direction == "forward"
    assert "custom" in report.cause


@pytest.mark.parametrize("has_grad", [True, False])
def test_of_two_that_meet_the_one_that_ran_first_is_told(has_grad):
    def func(h):
        first, second = torch.log(-h.abs()), torch.sqrt(-h.abs())
        return second + first

    model, x = Around(func), torch.ones(3, 4)
    with torch.set_grad_enabled(has_grad):
        assert gaff.find_nonfinite(lambda: model(x), model=model).site == "/log#0"


def test_a_bad_tensor_from_outside_is_no_op_of_the_step():
    model, target = nn.Linear(4, 4), torch.full((3, 4), float("nan"))
    report = gaff.find_nonfinite(lambda: (model(torch.ones(3, 4)) - target).sum().backward(), model=model)
    assert report.direction == "before"


def test_what_a_custom_function_hands_on_is_told_where_it_began():
    class Passes(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient

    model = Around(lambda h: Passes.apply(torch.log(-h.abs())))
    assert gaff.find_nonfinite(lambda: model(torch.ones(3, 4)), model=model).site == "/log#0"


def test_a_bad_parameter_that_nothing_uses_was_not_made_by_an_optimizer():
    model = nn.Linear(4, 4)
    model.unused = nn.Parameter(torch.full((2,), float("nan")))
    report = gaff.find_nonfinite(lambda: model(torch.ones(3, 4)), model=model)
    assert (report.site, report.direction) == ("unused:param", "before")
    sgd = torch.optim.SGD(model.parameters(), lr=math.inf)

    def step():
        model(torch.ones(3, 4)).sum().backward()
        sgd.step()

    with torch.no_grad():
        model.unused.zero_()
    assert gaff.find_nonfinite(step, model=model).direction == "update"


def test_a_cast_that_overflowed_is_the_origin_of_what_a_custom_function_made_of_it():
    class Doubles(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            return gradient * 2

    model = Around(lambda h: Doubles.apply((h + 1e6).to(torch.float16)).float())
    assert gaff.find_nonfinite(lambda: model(torch.ones(3, 4)), model=model).site == "/to#0"


@pytest.mark.parametrize("steps", [True, False])
def test_gradients_that_overflow_as_backward_passes_add_them_up(steps):
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(passes=3):
        for _ in range(passes):
            (model(torch.ones(3, 4)) * 0.8e38).sum().backward()
        if steps:
            optimizer.step()

    report = gaff.find_nonfinite(step, model=model)
    assert (report.site, report.direction) == ("weight:grad", "added")
    assert "inf came of adding gradients up in weight:grad" in str(report)
    model, optimizer = nn.Linear(4, 4), None
    steps = False
    assert not gaff.find_nonfinite(lambda: step(1), model=model)


@pytest.mark.parametrize("how", ["vmap", "script"])
def test_an_unseen_op_belongs_to_the_module_around_what_it_is_given_to(how):
    scripted = torch.jit.trace(lambda h: torch.log(-h.abs()), torch.ones(3, 4), check_trace=False)
    hidden = scripted if how == "script" else torch.func.vmap(lambda row: torch.log(-row.abs()))

    class Around(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x):
            return self.b(hidden(self.a(x)))

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Around()

        def forward(self, x):
            return self.inner(x)

    model = Outer()
    report = gaff.find_nonfinite(lambda: model(torch.randn(3, 4)).sum().backward(), model=model)
    assert (report.site, report.module) == ("inner/Log", "inner")
    assert "it came from Log, in an op that nothing shows" in report.cause


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 2, dtype=torch.cfloat))

    def forward(self, x):
        return x @ self.weight


@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop])
def test_an_optimizer_that_views_complex_parameters_as_real_ones(make):
    model = Complex()
    optimizer = make(model.parameters(), lr=1e-2)

    def step():
        optimizer.zero_grad()
        model(torch.ones(3, 2, dtype=torch.cfloat)).abs().mean().backward()
        optimizer.step()

    bare = copy.deepcopy(model.weight)
    assert not gaff.find_nonfinite(step, model=model)
    assert not torch.equal(model.weight, bare)


def test_a_step_that_gives_lazy_parameters_their_shapes():
    model = nn.Sequential(nn.LazyLinear(4), nn.ReLU(), nn.LazyLinear(2))
    assert not gaff.find_nonfinite(lambda: model(torch.randn(2, 3)).sum().backward())


def test_a_generator_is_no_step():
    model = nn.Linear(2, 2)

    def step():
        yield model(torch.ones(1, 2))

    with pytest.raises(PlanError, match="nothing of it has run; expected a function"):
        gaff.find_nonfinite(step, model=model)


def _powers():
    exponent = torch.tensor([0.0, 0.5, 2.0])
    base, mask = torch.tensor([-1.0, 2.0, 3.0]), torch.tensor([False, False, True])
    scores = torch.tensor([85.0, 1.0, 2.0], requires_grad=True)
    learned = torch.tensor([2.0, 0.0, 3.0], requires_grad=True)
    below = torch.tensor([0.0, 1.0, 4.0], requires_grad=True)

    def masked():
        weights = scores.masked_fill(mask, -math.inf).exp()
        ((weights - weights.detach()) * 1e3).sum().backward()

    def attention(mask):
        q = torch.full((1, 1, 3, 8), 1e25)
        return lambda: F.scaled_dot_product_attention(q, q, q / 1e25, attn_mask=mask)

    closed = torch.tensor([[True, True, True], [True, True, True], [False, False, False]])
    as_numbers = torch.zeros(3, 3).masked_fill(~closed, -math.inf)
    return {
        "a number to a power": (lambda: 0.5 ** torch.tensor([-200.0, 1.0]), "overflow: pow gives"),
        "a negative number to a power": (lambda: (-2.0) ** exponent, "a negative number, down to -2"),
        "torch.pow of a number": (lambda: torch.pow(-2.0, exponent), "a negative number, down to -2"),
        "zero to a negative power": (lambda: 0.0**-exponent, "0 to the power of a negative number, for 2 of 3"),
        "a learned power": (
            lambda: base.pow(learned).sum().backward(),
            "the logarithm of the base, which goes down to",
        ),
        "exp behind a mask": (masked, "more than float32 holds"),
        "one over": (lambda: torch.where(below > 0, 1 / below, 0.0).sum().backward(), "where the divisor is 0"),
        "attention": (attention(closed), "overflow inside scaled_dot_product_attention"),
        "attention, additive": (attention(as_numbers), "overflow inside scaled_dot_product_attention"),
    }


@pytest.mark.parametrize("name", _powers())
def test_the_cause_is_the_one_that_is_there(name):
    step, cause = _powers()[name]
    found = gaff.find_nonfinite(step, model=None)
    assert cause in found.cause, found


@pytest.mark.parametrize("way", ["item", "float", "list", "tensor"])
def test_what_a_program_reads_out_of_a_tensor_keeps_its_origin(way):
    """A number that an op has spoilt, read out and given to another op: it was put in by no constant on purpose."""

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.out = nn.Linear(4, 1)

        def forward(self, x):
            scale = 1 / x.std()
            read = {"item": scale.item, "float": lambda: float(scale), "tensor": lambda: scale}
            return self.out(x * (torch.tensor([scale.item()]) if way == "list" else read[way]()))

    model, x = Scaled(), torch.ones(3, 4)
    report = gaff.find_nonfinite(lambda: model(x).square().mean().backward(), model=model)
    assert report.site == "/div#0"
    assert report.cause.startswith("division by zero")


def test_a_mask_beside_a_number_that_was_read_out_is_a_mask_still():
    class Masked(nn.Module):
        def forward(self, x):
            top = x.max().item()  # finite
            return x.masked_fill(x > top / 2, -math.inf).softmax(-1)

    model = Masked()
    assert not gaff.find_nonfinite(lambda: model(torch.randn(3, 8, requires_grad=True)).sum().backward(), model=model)


@pytest.mark.parametrize(("op", "below"), [("sqrt", -3.0), ("rsqrt", -3.0), ("acosh", -0.5), ("pow", -3.0)])
def test_a_where_that_keeps_the_values_of_an_op_outside_of_its_domain_is_told(op, below):
    weight = nn.Parameter(torch.tensor([below, 4.0]))

    def step():
        value = weight**0.5 if op == "pow" else getattr(torch, op)(weight)
        torch.where(weight > 1, value, 0 * weight).sum().backward()

    report = gaff.find_nonfinite(step)
    assert f"{op} is given numbers down to {below:g}, and is defined from" in report.cause
    assert "cleans its value, not its derivative" in report.cause


def test_a_whole_power_of_negative_numbers_is_defined():
    weight = nn.Parameter(torch.tensor([-3.0, 0.0]))
    report = gaff.find_nonfinite(lambda: torch.where(weight < 0, weight**-1, 0 * weight).sum().backward())
    assert "is defined from" not in report.cause
    assert "the gradient that came is 0 there" in report.cause


class Half(nn.Module):
    """What ``op`` makes of half-precision numbers, those of the first column far from zero, through a layer norm."""

    def __init__(self, op):
        super().__init__()
        self.first, self.out, self.op = nn.Linear(4, 4), nn.Linear(4, 2), op

    def forward(self, x):
        hidden = (0 * self.first(x) + torch.tensor([-40000.0, 1.0, 2.0, 3.0]) * (1 + x[:, :1] / 10)).half()
        return self.out(F.layer_norm(self.op(hidden).float(), (4,)))


@pytest.mark.parametrize(
    ("op", "site"), [(lambda h: h + h, "/add#2"), (lambda h: h * 2.0, "/mul#2"), (lambda h: h - -h, "/sub#0")]
)
def test_an_overflow_to_minus_infinity_is_no_mask(op, site):
    model, x = Half(op), torch.rand(3, 4)
    report = gaff.find_nonfinite(lambda: model(x).square().mean().backward(), model=model)
    assert report.site == site
    assert report.cause.startswith("overflow")


@pytest.mark.parametrize("factor", [1.0, 0.7])
def test_sums_of_masks_of_low_numbers_are_meant(factor):
    low = factor * torch.finfo(torch.float16).min
    masks = torch.full((2, 4, 4), low).half().triu(1)

    class Masked(nn.Module):
        def forward(self, x):
            return (x.half() + (masks[0] + masks[1])).float().softmax(-1)

    model = Masked()
    assert not gaff.find_nonfinite(lambda: model(torch.rand(4, 4, requires_grad=True)).sum().backward(), model=model)


@pytest.mark.parametrize(
    ("op", "site"),
    [(lambda s: s * 60.0, "/mul#0"), (lambda s: s + 65000.0, "/add#0"), (lambda s: s.float().exp(), "/exp#0")],
)
def test_an_overflow_beside_a_mask_is_that_of_its_op(op, site):
    class Scores(nn.Module):
        def forward(self, x):
            scores = x.half().masked_fill(~torch.ones(4, 4).tril().bool(), -math.inf)
            return op(scores)

    model = Scores()
    for x in (torch.full((4, 4), 3000.0), -torch.full((4, 4), 3000.0)):
        report = gaff.find_nonfinite(lambda: model(x.requires_grad_()).float(), model=model)
        if bool(model(x).isposinf().any()):
            assert (report.site, report.cause[:8]) == (site, "overflow")
        elif "mul" not in site:
            assert not report  # the mask alone


def test_an_overflow_to_minus_infinity_beside_a_mask_is_told():
    class Scores(nn.Module):
        def forward(self, x):
            return x.half().masked_fill(~torch.ones(4, 4).tril().bool(), -math.inf) * 60.0

    model = Scores()
    report = gaff.find_nonfinite(lambda: model(torch.full((4, 4), -3000.0)), model=model)
    assert (report.site, report.cause[:8]) == ("/mul#0", "overflow")


def test_a_bad_batch_is_not_blamed_on_a_healed_gradient_of_its_shape():
    model, bad = nn.Linear(4, 2), torch.randn(4, 4)
    bad[2, 3] = math.nan

    def step():
        x = torch.randn(4, 4)
        x[0] = 0
        x.requires_grad_()
        (gradient,) = torch.autograd.grad(model(x).sum() + x.square().sum(1).sqrt().sum(), x)
        model((x + torch.nan_to_num(gradient)).detach()).square().mean().backward()
        model(bad).square().mean().backward()

    report = gaff.find_nonfinite(step, model=model)
    assert (report.site, report.direction) == (":input[0]", "forward")


def test_a_hook_where_gradients_meet_is_no_overflow_of_their_sum():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    model[0].weight.register_hook(lambda gradient: gradient * math.nan)
    report = gaff.find_nonfinite(lambda: model(model(torch.randn(3, 4))).square().mean().backward(), model=model)
    assert report.cause.startswith("a gradient hook")


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.tensor([1 + 1j, 3e38]),
        lambda: torch.eye(3).mul(3e38).to_sparse(),
        lambda: torch.nested.nested_tensor([torch.full((2,), 3e38), torch.full((3,), 3e38)], layout=torch.jagged),
    ],
    ids=["complex", "sparse", "nested"],
)
def test_overflows_of_what_is_not_dense_are_looked_at_as_well(make):
    class Twice(nn.Module):
        def forward(self, x):
            return x * 3.0

    model = Twice()
    report = gaff.find_nonfinite(lambda: model(make()), model=model)
    assert report.site == "/mul#0"
