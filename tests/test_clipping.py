"""Clipping beside torch's own, on kind and on hostile gradients; skipped steps; every shape of training loop."""

import contextlib
import copy
import gc
import math
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import gaff

SHAPES = [(4, 3), (3,), (), (0,), (2, 3, 2, 2)]


def parameters(dtype=torch.float32, scale=1.0, seed=0):
    draw = torch.Generator().manual_seed(seed)
    made = []
    for shape in SHAPES:
        parameter = nn.Parameter(torch.randn(shape, generator=draw).to(dtype))
        parameter.grad = (torch.randn(shape, generator=draw) * scale).to(dtype)
        made.append(parameter)
    return made


def copies(given):
    made = [nn.Parameter(one.detach().clone()) for one in given]
    for one, other in zip(made, given, strict=True):
        one.grad = other.grad.clone()
    return made


def clipped_by_gaff(made, optimizer=torch.optim.SGD, **limits):
    """Gradients as the optimizer got them."""
    opt = optimizer(made, lr=0.1)
    handle = gaff.clip_gradients(opt, **limits)
    opt.step()
    handle.remove()
    return [one.grad for one in made], handle


@pytest.mark.parametrize("norm_type", [2.0, 1.0, 3.0])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_global_norm_has_the_bits_of_torch(dtype, scale, norm_type):
    ours, theirs = parameters(dtype, scale), parameters(dtype, scale)
    found, _ = clipped_by_gaff(ours, norm=1.0, norm_type=norm_type)
    torch.nn.utils.clip_grad_norm_(theirs, 1.0, norm_type)
    assert all(torch.equal(one, other.grad) for one, other in zip(found, theirs, strict=True))


@settings(max_examples=60)
@given(
    st.lists(st.lists(st.floats(-(2.0**50), 2.0**50, width=32), min_size=0, max_size=5), min_size=1, max_size=4),
    st.floats(1e-3, 1e3),
)
def test_any_finite_gradients_have_the_bits_of_torch(rows, limit):
    made = [nn.Parameter(torch.zeros(len(row))) for row in rows]
    for parameter, row in zip(made, rows, strict=True):
        parameter.grad = torch.tensor(row)
    theirs, by_value = copies(made), copies(made)
    value_too = copies(made)
    found, _ = clipped_by_gaff(made, norm=limit)
    torch.nn.utils.clip_grad_norm_(theirs, limit)
    assert all(torch.equal(one, other.grad) for one, other in zip(found, theirs, strict=True))
    found, _ = clipped_by_gaff(by_value, value=limit)
    torch.nn.utils.clip_grad_value_(value_too, limit)
    assert all(torch.equal(one, other.grad) for one, other in zip(found, value_too, strict=True))


def test_several_types_at_once_have_the_bits_of_torch():
    ours = parameters() + parameters(torch.bfloat16, seed=1) + parameters(torch.float64, seed=2)
    theirs = copies(ours)
    found, _ = clipped_by_gaff(ours, norm=0.5)
    torch.nn.utils.clip_grad_norm_(theirs, 0.5)
    assert all(torch.equal(one, other.grad) for one, other in zip(found, theirs, strict=True))


def test_zero_gradients_stay_zero_and_missing_ones_missing():
    made = parameters(scale=0.0)
    made[1].grad = None
    found, handle = clipped_by_gaff(made, norm=1.0)
    assert found[1] is None
    assert not any(one.any() for one in found if one is not None)
    assert handle.audit.clipped == 0


def test_sparse_gradients_are_summed_up_first():
    embedding, dense = nn.Embedding(5, 3, sparse=True), nn.Embedding(5, 3)
    dense.load_state_dict(embedding.state_dict())
    for one in (embedding, dense):
        one(torch.tensor([1, 1, 4])).pow(2).sum().backward()
    found, _ = clipped_by_gaff(list(embedding.parameters()), norm=0.1)
    torch.nn.utils.clip_grad_norm_(dense.parameters(), 0.1)
    torch.testing.assert_close(found[0].to_dense(), dense.weight.grad)


def test_each_tensor_by_itself():
    ours, theirs = parameters(), parameters()
    found, handle = clipped_by_gaff(ours, norm=0.5, per="tensor")
    for one, other in zip(found, theirs, strict=True):
        torch.nn.utils.clip_grad_norm_([other], 0.5)
        torch.testing.assert_close(one, other.grad, rtol=1e-6, atol=0)
    assert handle.audit.parameters["group 0, parameter 0"] == 1


@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
@pytest.mark.parametrize("per", ["layer", "group"])
def test_the_parameters_of_a_layer_or_a_group_have_one_limit(per, norm_type):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Sequential(nn.Linear(8, 3), nn.ReLU()))
    model[1].bias.requires_grad_(False)
    model(torch.randn(6, 4)).square().sum().backward()
    other = copy.deepcopy(model)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        two.grad = None if one.grad is None else one.grad.clone()
    groups = [{"params": list(model[0].parameters())}, {"params": list(model[1:].parameters()), "lr": 0.0}]
    optimizer = torch.optim.SGD(groups, 0.1)
    with gaff.clip_gradients(optimizer, norm=0.05, per=per, norm_type=norm_type, model=model) as handle:
        optimizer.step()
    for part in [other[0], other[1], other[2][0]] if per == "layer" else [other[0], other[1:]]:
        torch.nn.utils.clip_grad_norm_(part.parameters(), 0.05, norm_type)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert (one.grad is None and two.grad is None) or torch.equal(one.grad, two.grad)
    assert handle.audit.parameters["0.weight"] == 1


def test_a_group_that_is_added_has_a_limit_of_its_own():
    one, two = (nn.Parameter(torch.ones(4)) for _ in range(2))
    optimizer = torch.optim.SGD([one], 0.1)
    with gaff.clip_gradients(optimizer, norm=1.0, per="group"):
        optimizer.add_param_group({"params": [two]})
        one.grad, two.grad = torch.full((4,), 2.0), torch.full((4,), 0.1)
        optimizer.step()
    assert one.grad.norm().item() == pytest.approx(1.0)
    assert torch.equal(two.grad, torch.full((4,), 0.1))


class Units(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.embedding = nn.Linear(4, 3), nn.Embedding(6, 4)
        self.conv = nn.Conv2d(4, 6, 3, groups=2)
        self.up = nn.ConvTranspose2d(4, 6, 3, groups=2)
        self.attention = nn.MultiheadAttention(4, 2)


def by_hand(weight, gradient, units, ratio=0.01):
    """Adaptive clipping as the paper writes it; ``units``: index of the unit of each element."""
    new = gradient.clone()
    for unit in units.unique():
        here = units == unit
        most = max(weight[here].norm().item(), 1e-3) * ratio
        norm = gradient[here].norm().item()
        if norm > most:
            new[here] = gradient[here] * (most / norm)
    return new


def test_adaptive_clipping_finds_the_units_of_every_layer():
    model = Units()
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    model.linear.weight.grad[1] = 1e-6  # a unit that is let alone
    true = {}
    for name, one in model.named_parameters():
        units = torch.zeros(one.shape, dtype=torch.long)
        if name == "up.weight":  # [in, out / groups, ...]: outputs of two groups
            units += torch.arange(4).div(2, rounding_mode="floor").view(4, 1, 1, 1) * 3 + torch.arange(3).view(
                1, 3, 1, 1
            )
        elif one.dim() > 1:
            units += torch.arange(len(one)).view(-1, *[1] * (one.dim() - 1))
        true[name] = by_hand(one.detach(), one.grad, units)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with gaff.clip_gradients(optimizer, adaptive=0.01, model=model) as handle:
        optimizer.step()
    for name, one in model.named_parameters():
        torch.testing.assert_close(one.grad, true[name], rtol=1e-5, atol=1e-9)
    assert handle.audit.parameters["up.weight"] == 1


def losses(optimizer, model, steps, spoil=(), **limits):
    """A run on fixed data; at ``spoil`` the gradient is made NaN."""
    handle = gaff.clip_gradients(optimizer, model=model, **limits)
    found = []
    for step in range(steps):
        draw = torch.Generator().manual_seed(step)
        x = torch.randn(8, 4, generator=draw)
        optimizer.zero_grad()
        loss = model(x).pow(2).mean()
        loss.backward()
        if step in spoil:
            next(iter(model.parameters())).grad[0, 0] = math.nan
        optimizer.step()
        found.append(loss.item())
    handle.remove()
    return found, handle


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD])
def test_a_skipped_step_changes_neither_parameters_nor_state(kind, fused):
    model = nn.Linear(4, 3)
    options = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    optimizer = kind(model.parameters(), lr=0.1, fused=fused, **options)
    losses(optimizer, model, 2, norm=1.0)
    before, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    _, handle = losses(optimizer, model, 1, spoil=[0], norm=1.0, nonfinite="skip")
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())
    for key, row in optimizer.state_dict()["state"].items():
        for name, value in row.items():
            known = state["state"][key][name]
            assert torch.equal(value, known) if isinstance(value, torch.Tensor) else value == known, name
    assert handle.audit.skipped == 1
    assert not hasattr(optimizer, "found_inf")
    found, _ = losses(optimizer, model, 2, norm=1.0, nonfinite="skip")
    assert all(map(math.isfinite, found))


class Counting(torch.optim.Optimizer):
    """Keeps a count of its own, as many optimizers outside torch do."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1, "count": 0})

    @torch.no_grad()
    def step(self, closure=None):
        with torch.enable_grad():
            loss = closure() if closure is not None else None
        for group in self.param_groups:
            group["count"] += 1
            self.state["calls"] = self.state.get("calls", 0) + 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(group["lr"] * parameter.grad)
        return loss


def test_an_optimizer_with_a_count_of_its_own_is_skipped_too():
    model = nn.Linear(4, 3)
    optimizer = Counting(model.parameters())
    losses(optimizer, model, 3, spoil=[1], nonfinite="skip")
    assert optimizer.param_groups[0]["count"] == 2
    assert optimizer.state["calls"] == 2


def test_raising_names_the_parameters_and_steps_nothing():
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(gaff.NonFiniteError, match=r"^0\.weight: the gradient is NaN or inf; nothing was stepped"):
        losses(optimizer, model, 1, spoil=[0], norm=1.0)
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())
    optimizer._optimizer_step_pre_hooks.clear()


@pytest.mark.parametrize("nonfinite", ["raise", "zero", "skip"])
def test_finite_gradients_whose_norm_overflows_are_clipped_by_their_true_norm(nonfinite):
    made, small = parameters(scale=1e25), parameters(scale=1.0)
    found, handle = clipped_by_gaff(made, norm=1.0, nonfinite=nonfinite)
    torch.nn.utils.clip_grad_norm_(small, 1.0)
    for one, other in zip(found, small, strict=True):
        torch.testing.assert_close(one, other.grad, rtol=1e-4, atol=1e-6)
    assert handle.audit.rows[0].norm == pytest.approx(
        1e25 * torch.stack([o.grad.norm() for o in parameters()]).norm().item(), rel=1e-4
    )
    by_value, _ = clipped_by_gaff(parameters(scale=1e25), value=2.0, nonfinite=nonfinite)
    assert all(one.abs().max() <= 2 for one in by_value if one.numel())


def test_zeroing_lets_the_rest_go_on():
    made = parameters()
    made[0].grad[0, 0], made[1].grad[1] = math.nan, -math.inf
    theirs = copies(made)
    found, handle = clipped_by_gaff(made, norm=1.0, nonfinite="zero")
    for one in theirs:
        one.grad.nan_to_num_(0, 0, 0)
    torch.nn.utils.clip_grad_norm_(theirs, 1.0)
    assert all(torch.equal(one, other.grad) for one, other in zip(found, theirs, strict=True))
    assert handle.audit.nonfinite == {"group 0, parameter 0": 1, "group 0, parameter 1": 1}


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("user_unscales", [False, True])
def test_a_grad_scaler_unscales_first(fused, user_unscales):
    found = {}
    for scale in (1.0, 1024.0):
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        handle = gaff.clip_gradients(optimizer, norm=0.01, model=model, views=("weight",))
        for _ in range(2):
            optimizer.zero_grad()
            scaler.scale(model(torch.ones(2, 4)).pow(2).sum()).backward()
            if user_unscales:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        handle.remove()
        found[scale] = [*model.parameters(), *(torch.tensor(row.norm) for row in handle.audit.rows)]
        views = handle.views("weight")
        torch.testing.assert_close(views["scaled"], views["unscaled"] * scale)
        assert views["clipped"].norm() <= 0.0100001
        assert views["unscaled"].norm() > 0.1
        assert views["applied"].abs().max() > 0
    for one, other in zip(*found.values(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("fused", [False, True])
def test_an_overflow_of_the_scaler_is_its_own_business(fused):
    model = nn.Linear(4, 3)
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=1e38)
    with gaff.clip_gradients(optimizer, norm=1.0) as handle:
        scaler.scale(model(torch.full((2, 4), 1e3)).pow(2).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())
    assert handle.audit.skipped == int(fused)  # others are not even called


def test_accumulated_gradients_are_clipped_once_at_the_step():
    model, theirs = nn.Linear(4, 3), nn.Linear(4, 3)
    theirs.load_state_dict(model.state_dict())
    for one in (model, theirs):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
        handle = gaff.clip_gradients(optimizer, norm=0.1) if one is model else None
        for number in range(4):
            one(torch.full((2, 4), float(number))).pow(2).sum().backward()
            if number % 2:
                if handle is None:
                    torch.nn.utils.clip_grad_norm_(one.parameters(), 0.1)
                optimizer.step()
                optimizer.zero_grad()
        if handle is not None:
            assert (handle.audit.steps, handle.audit.clipped) == (2, 2)
            handle.remove()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), theirs.parameters(), strict=True))


def test_closures_are_clipped_after_each_evaluation():
    model = nn.Linear(4, 3)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
    seen = []

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).pow(2).sum()
        loss.backward()
        return loss

    with gaff.clip_gradients(optimizer, norm=0.01) as handle:
        original = optimizer._gather_flat_grad
        optimizer._gather_flat_grad = lambda: seen.append(original()) or seen[-1]
        optimizer.step(closure)
    assert len(seen) > 1
    assert all(one.norm() < 0.0101 for one in seen)
    assert handle.audit.steps == len(seen)
    with pytest.raises(gaff.PlanError, match="LBFGS evaluates several times"):
        gaff.clip_gradients(optimizer, nonfinite="skip")


@pytest.mark.parametrize(
    ("bad", "words"), [(1, "nothing was stepped"), (3, "at evaluation 3 of this step, which may have")]
)
def test_a_refused_evaluation_says_whether_earlier_ones_have_stepped(bad, words):
    model = nn.Linear(4, 3)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
    weight, seen = model.weight.detach().clone(), []

    def closure():
        seen.append(1)
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).pow(2).sum() * (float("nan") if len(seen) == bad else 1.0)
        loss.backward()
        return loss

    with gaff.clip_gradients(optimizer, norm=0.5), pytest.raises(gaff.NonFiniteError, match=words):
        optimizer.step(closure)
    assert torch.equal(model.weight, weight) is (bad == 1)


@pytest.mark.parametrize("kind", [torch.optim.Adam, Counting])
def test_a_step_with_a_closure_is_skipped(kind):
    model = nn.Linear(4, 3)
    optimizer = kind(model.parameters())
    before = copy.deepcopy(model.state_dict())

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).sum() * math.nan
        loss.backward()
        return loss

    with gaff.clip_gradients(optimizer, nonfinite="skip"):
        assert math.isnan(optimizer.step(closure).item())
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())
    assert all(one.grad is not None for one in model.parameters())


def test_several_optimizers_each_have_their_own_limits():
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in model]
    handles = [gaff.clip_gradients(one, norm=limit) for one, limit in zip(optimizers, (0.1, 0.2), strict=True)]
    model(torch.full((2, 4), 10.0)).pow(2).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
    for layer, limit, handle in zip(model, (0.1, 0.2), handles, strict=True):
        total = torch.stack([one.grad.norm() for one in layer.parameters()]).norm().item()
        assert total == pytest.approx(limit, rel=1e-4)
        handle.remove()


@pytest.mark.parametrize("spike", ["clip", "skip"])
@pytest.mark.parametrize("fused", [False, True])
def test_a_spike_is_seen_after_a_nan_step(fused, spike):
    parameter = nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([parameter], lr=1.0, fused=fused)
    with gaff.clip_gradients(optimizer, deviations=3.0, warmup=5, window=10, spike=spike, nonfinite="skip") as handle:
        for step in range(12):
            parameter.grad = torch.tensor([1.0, 0.1 * (step % 3), 0.0])
            if step == 6:
                parameter.grad[0] = math.nan
            optimizer.step()
        before = parameter.detach().clone()
        parameter.grad = torch.tensor([1e6, 0.0, 0.0])
        optimizer.step()
        change = (parameter.detach() - before).norm()
        assert change == 0 if spike == "skip" else change < 1.5
        parameter.grad = torch.tensor([1.0, 0.0, 0.0])
        optimizer.step()
    assert handle.audit.skipped == 1 + (spike == "skip")
    assert handle.audit.rows[-2].limit < 1.5


def test_clipping_in_backward_acts_on_each_gradient_as_it_comes():
    model, theirs = nn.Linear(4, 3), nn.Linear(4, 3)
    theirs.load_state_dict(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gaff.clip_gradients(optimizer, value=0.001, when="backward", model=model) as handle:
        for _ in range(2):
            model(torch.ones(2, 4)).pow(2).sum().backward()
    for parameter in theirs.parameters():
        parameter.register_hook(lambda gradient: gradient.clamp(-0.001, 0.001))
    for _ in range(2):
        theirs(torch.ones(2, 4)).pow(2).sum().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), theirs.parameters(), strict=True))
    assert handle.audit.parameters == {"weight": 2, "bias": 2}
    assert not model.weight._backward_hooks


def test_the_audit_is_readable():
    model = nn.Linear(4, 3)
    _, handle = losses(torch.optim.SGD(model.parameters(), lr=0.1), model, 3, norm=0.05)
    text = repr(handle)
    assert "3 steps, 3 clipped, 0 skipped" in text
    assert "weight" in text
    row = handle.audit.rows[0]
    assert row.factor == pytest.approx(0.05 / (row.norm + 1e-6), rel=1e-5)


def test_a_removed_handle_leaves_nothing():
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = gaff.clip_gradients(optimizer, norm=1.0, nonfinite="skip", views=("group 0, parameter 0",))
    assert handle.audit.steps == 0
    handle.remove()
    handle.remove()
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    assert not model.weight._post_accumulate_grad_hooks


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"norm": -1}, "norm=-1 is no limit: expected a positive number"),
        ({"norm": 1.0, "value": 1.0}, "three ways to clip"),
        ({"nonfinite": "ignore"}, "nonfinite='ignore' is not known: expected one of 'raise', 'skip', 'zero'"),
        ({"adaptive": 0.01}, "adaptive= and per='layer' need model="),
        ({"norm": 1.0, "per": "layer"}, "adaptive= and per='layer' need model="),
        ({"norm": 1.0, "per": "layer", "model": nn.Linear(2, 2)}, "is not in the model: expected the model it is in"),
        ({"per": "group"}, "per='group' is given and no norm is limited"),
        ({"norm": 1.0, "per": "block"}, "expected one of 'global', 'group', 'layer', 'tensor'"),
        ({"norm": 1.0, "when": "backward"}, "sees one gradient at a time"),
        ({"value": 1.0, "when": "backward", "nonfinite": "skip"}, "cannot skip a step"),
        ({"deviations": 2.0, "per": "tensor"}, "deviations limit the global norm"),
        ({"deviations": 2.0, "warmup": 1}, "expected 2 <= warmup <= window"),
        ({"max_norm": 1.0}, "option 'max_norm' is not known to clip_gradients: expected norm, value"),
        ({"norm": 1.0, "views": ("w",)}, "views='w' is no parameter of the optimizer"),
        ({"norm": 1.0, "norm_type": "abc"}, "norm_type='abc' is no norm"),
        ({"norm": True}, "norm=True is no limit"),
        ({"deviations": 2.0, "window": 30.5}, "window=30.5: expected a number of steps"),
        ({"norm": 1.0, "spike": "skip"}, "spike='skip' needs deviations="),
        ({"value": 1.0, "when": "backward", "views": "weight"}, "expected when='step'"),
        ({"norm": 1.0, "model": 3}, "expected a model"),
    ],
)
def test_limits_that_do_not_go_together_are_refused_before_anything_is_installed(limits, message):
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(gaff.PlanError, match=message):
        gaff.clip_gradients(optimizer, **limits)
    assert not optimizer._optimizer_step_pre_hooks
    with pytest.raises(gaff.PlanError, match="expected a torch optimizer, got a Linear"):
        gaff.clip_gradients(model, norm=1.0)


def test_groups_added_later_are_clipped_and_guarded():
    first, second = (nn.Parameter(torch.zeros(3)) for _ in range(2))
    optimizer = torch.optim.SGD([first], lr=1.0)
    with gaff.clip_gradients(optimizer, norm=1.0) as handle:
        optimizer.add_param_group({"params": [second]})
        first.grad, second.grad = torch.zeros(3), torch.full((3,), math.nan)
        with pytest.raises(gaff.NonFiniteError, match="group 1, parameter 0"):
            optimizer.step()
        second.grad = torch.full((3,), 5.0)
        optimizer.step()
    assert second.norm().item() == pytest.approx(1.0, rel=1e-5)
    assert handle.audit.rows[-1].largest == "group 1, parameter 0"


def test_parameters_unfrozen_later_are_clipped_in_backward_after_a_step():
    parameter = nn.Parameter(torch.zeros(3), requires_grad=False)
    other = nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([parameter, other], lr=1.0)
    with gaff.clip_gradients(optimizer, value=0.1, when="backward") as handle:
        (other * 50).sum().backward()
        parameter.requires_grad_()
        optimizer.step()
        (parameter * 50).sum().backward()
    assert torch.equal(parameter.grad, torch.full((3,), 0.1))
    assert handle.audit.steps == 1


def test_two_handles_on_one_fused_optimizer_leave_nothing_behind():
    parameter = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.Adam([parameter], lr=0.1, fused=True)
    parameter.grad = torch.ones(3)
    optimizer.step()
    handles = [gaff.clip_gradients(optimizer, nonfinite="skip", **limit) for limit in ({"norm": 1.0}, {"value": 0.5})]
    before = parameter.detach().clone()
    parameter.grad = torch.full((3,), math.nan)
    optimizer.step()
    assert torch.equal(parameter, before)
    assert not hasattr(optimizer, "found_inf")
    parameter.grad = torch.ones(3)
    optimizer.step()
    assert not torch.equal(parameter, before)
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize("fused", [False, True])
def test_an_exception_in_the_step_leaves_nothing_behind(fused):
    def fail(*args):
        raise KeyboardInterrupt

    parameter = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.Adam([parameter], lr=0.1, fused=fused)
    parameter.grad = torch.ones(3)
    optimizer.step()
    with pytest.raises(KeyboardInterrupt), gaff.clip_gradients(optimizer, norm=1.0, nonfinite="skip"):
        optimizer.register_step_pre_hook(fail)
        parameter.grad = torch.full((3,), math.nan)
        optimizer.step()
    assert not hasattr(optimizer, "found_inf")
    assert parameter.grad.isnan().all()


def test_the_first_step_of_fused_momentum_can_be_skipped():
    parameter = nn.Parameter(torch.ones(4000))
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9, fused=True)
    with gaff.clip_gradients(optimizer, norm=1.0, nonfinite="skip") as handle:
        parameter.grad = torch.full((4000,), math.nan)
        optimizer.step()
        assert not optimizer.state[parameter].get("momentum_buffer", torch.zeros(1)).any()
        parameter.grad = torch.zeros(4000)
        optimizer.step()
    assert torch.equal(parameter, torch.ones(4000))
    assert handle.audit.skipped == 1


class Wrapping(torch.optim.Optimizer):
    """Steps by another optimizer inside, as SAM and Lookahead do."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})
        self.inner = torch.optim.SGD(self.param_groups, lr=0.1)

    def step(self, closure=None):
        return self.inner.step()


class Calling(torch.optim.SGD):
    """Calls the step of its base class, whose hooks torch calls as well."""

    def step(self, closure=None):
        return super().step(closure)


def test_a_wrapping_optimizer_is_skipped():
    parameter = nn.Parameter(torch.ones(2))
    optimizer = Wrapping([parameter])
    with gaff.clip_gradients(optimizer, nonfinite="skip"):
        parameter.grad = torch.full((2,), math.nan)
        optimizer.step()
    assert torch.equal(parameter, torch.ones(2))
    assert parameter.grad.isnan().all()


def test_a_step_inside_a_step_counts_once():
    torch.optim.SGD([nn.Parameter(torch.ones(1))])  # from here on both classes call hooks
    model = nn.Linear(4, 3)
    optimizer = Calling(model.parameters(), lr=0.1)
    x = torch.randn(8, 4)
    steps = []
    with (
        gaff.clip_gradients(optimizer, norm=0.3, model=model) as handle,
        gaff.edit(model, {":output": gaff.edits.with_event(lambda t, event: steps.append(event.step) or t * 1)}),
    ):
        for _ in range(3):
            optimizer.zero_grad()
            model(x).pow(2).sum().backward()
            true = [parameter.grad.clone() for parameter in model.parameters()]
            theirs = [nn.Parameter(one) for one in true]
            for one, gradient in zip(theirs, true, strict=True):
                one.grad = gradient.clone()
            torch.nn.utils.clip_grad_norm_(theirs, 0.3)
            optimizer.step()
            assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), theirs, strict=True))
    assert handle.audit.steps == 3
    assert steps == [0, 1, 2]


@pytest.mark.parametrize("with_closure", [False, True])
def test_a_skipped_step_is_no_step_for_sessions(with_closure):
    model = nn.Linear(4, 3)
    optimizer = torch.optim.Adam(model.parameters())
    steps = []
    with (
        gaff.clip_gradients(optimizer, nonfinite="skip"),
        gaff.edit(model, {":output": gaff.edits.with_event(lambda t, event: steps.append(event.step) or t * 1)}),
    ):
        for number in range(4):

            def closure(number=number):
                optimizer.zero_grad()
                loss = model(torch.ones(2, 4)).sum() * (math.nan if number == 1 else 1.0)
                loss.backward()
                return loss

            if with_closure:
                optimizer.step(closure)
            else:
                closure()
                optimizer.step()
    assert steps == [0, 1, 1, 2]


def test_a_fixed_norm_clips_and_only_deviations_skip():
    parameter = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    with gaff.clip_gradients(optimizer, norm=1.0, deviations=3.0, spike="skip", warmup=5) as handle:
        for step in range(20):
            parameter.grad = torch.tensor([2.0 + step % 5])
            optimizer.step()
    assert (handle.audit.skipped, handle.audit.clipped) == (0, 20)
    assert parameter.item() == pytest.approx(-1.0, abs=1e-4)


def test_infinite_norms_do_not_enter_the_window_either():
    parameter = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.Adam([parameter], fused=True)
    with gaff.clip_gradients(optimizer, deviations=3.0, nonfinite="skip", warmup=3, window=8) as handle:
        for value in (1.0, 2.0, 3.0, 1.0, 2.0, math.inf, math.inf):
            parameter.grad = torch.tensor([value])
            optimizer.step()
    assert sorted(handle._norms._norms[:5].tolist()) == [1.0, 1.0, 2.0, 2.0, 3.0]
    assert not handle._norms._norms[5:].isfinite().any()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("spike", ["clip", "skip"])
def test_a_norm_that_is_not_finite_drives_none_out_of_a_full_window(fused, spike):
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1, fused=fused)
    with gaff.clip_gradients(optimizer, deviations=2.0, nonfinite="skip", spike=spike, warmup=4, window=4) as handle:
        for value in (1.0, 2.0, 3.0, 1.0, 2.0, math.nan, 1000.0):
            parameter.grad = torch.tensor([value])
            optimizer.step()
    last = torch.tensor([2.0, 3.0, 1.0, 2.0])
    row = handle.audit.rows[-1]
    assert row.limit == pytest.approx((last.mean() + 2 * last.std()).item())
    assert (row.is_clipped, row.is_skipped) == (spike == "clip", spike == "skip")


def test_views_of_a_skipped_step_are_not_those_of_the_next():
    model = nn.ModuleDict({"a": nn.Linear(4, 1), "b": nn.Linear(4, 1)})
    optimizer, scaler, x = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu"), torch.ones(2, 4)
    with gaff.clip_gradients(optimizer, norm=0.5, model=model, views="b.weight") as handle:
        scaler.scale((model["a"](x) + model["b"](x)).sum() * math.inf).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scaler.scale(model["a"](x).sum()).backward()
        scaler.step(optimizer)
        views = handle.views("b.weight")
    assert views["scaled"] is None
    assert views["unscaled"] is None


def test_views_are_those_of_the_last_step():
    parameter = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    name = "group 0, parameter 0"
    with gaff.clip_gradients(optimizer, norm=1.0, nonfinite="skip", views=name) as handle:
        (parameter * 5).sum().backward()
        optimizer.step()
        assert [handle.views(name)[one].item() for one in ("scaled", "unscaled")] == [5.0, 5.0]
        assert handle.views(name)["applied"].item() == pytest.approx(-0.1)
        optimizer.zero_grad()
        (parameter * math.inf).sum().backward()
        optimizer.step()
        assert handle.views(name)["clipped"] is None
        assert handle.views(name)["applied"].item() == 0
        optimizer.zero_grad()
        optimizer.step()
        assert handle.views(name)["scaled"] is None
    with pytest.raises(gaff.PlanError, match="were removed"), handle:
        pass


@pytest.mark.parametrize("how", ["step", "remove"])
def test_a_new_gradient_is_not_replaced_by_one_that_was_kept_from_a_step(how):
    fails = [True]

    class Fails(torch.optim.SGD):
        def step(self, closure=None):
            if fails:
                fails.clear()
                raise KeyboardInterrupt
            super().step(closure)

    model = nn.Linear(2, 1, bias=False)
    optimizer = Fails(model.parameters(), lr=0.1)
    handle = gaff.clip_gradients(optimizer, norm=1.0, nonfinite="skip")
    model(torch.full((1, 2), math.nan)).sum().backward()
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    optimizer.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    if how == "remove":
        handle.remove()
    optimizer.step()
    assert model.weight.grad.isfinite().all()
    assert handle.audit.skipped == 1
    handle.remove()


def test_a_norm_that_overflows_float64_is_an_error():
    parameter = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    parameter.grad = torch.full((3,), 1e300, dtype=torch.float64)
    optimizer = torch.optim.SGD([parameter])
    with pytest.raises(gaff.NonFiniteError, match="overflows float64"), gaff.clip_gradients(optimizer, norm=1.0):
        optimizer.step()


def test_steps_count_again_after_a_skipped_one_and_the_end_of_the_limits():
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps = []
    with gaff.edit(model, {":output": gaff.edits.with_event(lambda t, event: steps.append(event.step) or t * 1)}):
        handles = [gaff.clip_gradients(optimizer, nonfinite="skip", norm=limit) for limit in (1.0, 2.0)]
        for is_bad in (False, True, False, False):
            optimizer.zero_grad()
            (model(torch.ones(2, 4)).sum() * (math.nan if is_bad else 1.0)).backward()
            optimizer.step()
            if is_bad:
                for handle in handles:
                    handle.remove()
    assert steps == [0, 1, 1, 2]


class Ignores(torch.autograd.Function):
    """Hands None to what it was given second."""

    @staticmethod
    def forward(ctx, x, weight):
        return x * weight.detach().sum()

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


def test_a_parameter_that_gets_no_gradient_is_left_alone_in_backward():
    kept, ignored = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([kept, ignored], lr=0.1)
    clipping = gaff.clip_gradients(optimizer, value=0.5, when="backward")
    (Ignores.apply(kept, ignored) * 10).sum().backward()
    clipping.remove()
    assert kept.grad.tolist() == [0.5] * 3
    assert ignored.grad is None


@pytest.mark.parametrize("nonfinite", ["skip", "raise", "zero"])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_a_first_step_that_a_scaler_skips_makes_no_state(kind, nonfinite):
    model = nn.Linear(4, 3)
    options = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    optimizer = kind(model.parameters(), 0.01, fused=True, **options)
    scaler = torch.amp.GradScaler("cpu")
    before = [one.detach().clone() for one in model.parameters()]
    with gaff.clip_gradients(optimizer, norm=1.0, nonfinite=nonfinite) as clipping:
        for factor in (math.inf, 1.0):
            optimizer.zero_grad()
            scaler.scale(model(torch.ones(3, 4)).square().mean() * factor).backward()
            scaler.step(optimizer)
            scaler.update()
            if factor == math.inf:
                assert not optimizer.state
                assert all(torch.equal(one, old) for one, old in zip(model.parameters(), before, strict=True))
    assert clipping.audit.skipped == 1
    assert all((one - old).abs().max() < 0.1 for one, old in zip(model.parameters(), before, strict=True))
    assert optimizer.state


class Lookahead(torch.optim.Optimizer):
    """Steps another optimizer inside its own step."""

    def __init__(self, base):
        self.base = base
        super().__init__(base.param_groups, {})

    def step(self, closure=None):
        return self.base.step(closure)


class Wrapper(torch.optim.Optimizer):
    """Holds another optimizer under the name that torch's PostLocalSGDOptimizer has for it."""

    def __init__(self, optim):
        self.optim = optim

    def step(self):
        self.optim.step()


def test_a_step_inside_another_of_the_same_parameters_is_one_step(tmp_path):
    model = nn.Linear(4, 4)
    optimizer = Lookahead(torch.optim.SGD(model.parameters(), 0.1))
    steps = []
    change = {"weight:grad": gaff.edits.with_event(lambda gradient, event: steps.append(event.step) or gradient)}
    with gaff.guard(model) as guard, gaff.edit(model, change), gaff.watch(model, out=tmp_path / "run"):
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
    assert steps == [0, 1, 2, 3]
    assert guard.steps == 4
    assert len(gaff.load(tmp_path / "run").scalar("loss").values) == 4


def test_clipping_an_optimizer_inside_a_wrapper():
    model = nn.Linear(4, 4)
    optimizer = Wrapper(torch.optim.SGD(model.parameters(), 0.1))
    with gaff.clip_gradients(optimizer, norm=0.01):
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
    norm = torch.stack([one.grad.norm() for one in model.parameters()]).norm()
    assert float(norm) == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize("parts", [(1, 1), (0, 1)])
def test_complex_gradients_whose_squares_overflow_are_clipped(parts):
    parameter = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    parameter.grad = torch.tensor([complex(parts[0], 1e30), complex(2e30 * parts[0], 3e30)], dtype=torch.complex64)
    true = parameter.grad.to(torch.complex128).norm().item()
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    with gaff.clip_gradients(optimizer, norm=1.0) as clip:
        optimizer.step()
    assert clip.audit.rows[0].norm == pytest.approx(true)
    assert parameter.grad.to(torch.complex128).norm().item() == pytest.approx(1.0)


def test_complex_gradients_are_clipped_as_they_come_though_their_squares_overflow():
    parameter = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    with gaff.clip_gradients(optimizer, norm=1.0, per="tensor", when="backward"):
        torch.view_as_real(parameter).mul(torch.tensor([[0, 1e30], [0, 3e30]])).sum().backward()
    assert parameter.grad.to(torch.complex128).norm().item() == pytest.approx(1.0)


def test_a_limit_of_each_element_needs_no_norm():
    parameter = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    parameter.grad = torch.tensor([1e200, -0.5], dtype=torch.float64)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    with gaff.clip_gradients(optimizer, value=1.0):
        optimizer.step()
    assert parameter.tolist() == [-1.0, 0.5]


def test_parameters_that_are_new_are_limited_in_their_first_step_too():
    """What backward brought them, before anybody followed them, is limited when the step comes."""
    torch.manual_seed(0)
    model, more, x = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)), nn.Linear(3, 3), torch.randn(5, 4)
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gaff.clip_gradients(optimizer, norm=0.1, per="tensor", when="backward", model=model) as handle:
        model[0].requires_grad_(True)
        optimizer.add_param_group({"params": list(more.parameters())})
        before = {one: one.detach().clone() for one in [*model.parameters(), *more.parameters()]}
        more(model(x)).pow(2).sum().backward()
        assert max(one.grad.norm() for one in before) > 1
        optimizer.step()
    assert all((one - old).norm() <= 0.1001 * 0.1 for one, old in before.items())
    assert (handle.audit.clipped, sum(handle.audit.parameters.values())) == (1, 6)


def test_a_batched_pass_is_refused_by_clipping_as_it_comes():
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    each = torch.eye(10).view(10, 5, 2)
    with gaff.clip_gradients(optimizer, value=0.01, when="backward"):
        output = model(torch.randn(5, 4))
        with pytest.raises(gaff.PlanError, match="a batched pass"):
            torch.autograd.grad(output, list(model.parameters()), each, is_grads_batched=True)
    with pytest.raises(gaff.NeverFiredError, match="this backward pass was batched"), gaff.sample_norms(model):
        torch.autograd.grad(model(torch.randn(5, 4)), list(model.parameters()), each, is_grads_batched=True)


def test_limits_may_be_numbers_of_numpy():
    np = pytest.importorskip("numpy")
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with gaff.clip_gradients(optimizer, norm=np.float32(0.5)):
        (100 * model(torch.ones(2, 3)).sum()).backward()
        optimizer.step()
    assert model.weight.grad.norm() <= 0.5


@pytest.mark.parametrize(
    "options", [{"value": 1e38}, {"norm": 1e38, "per": "tensor"}, {"value": 1e38, "nonfinite": "zero"}]
)
@pytest.mark.parametrize("fused", [False, True])
def test_an_overflow_in_backward_is_left_to_the_scaler(options, fused):
    def trained(**limits):
        torch.manual_seed(0)
        model, x = nn.Linear(4, 2), torch.randn(3, 4)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=1000)
        with gaff.clip_gradients(optimizer, when="backward", **limits) if limits else contextlib.nullcontext():
            for _ in range(6):
                optimizer.zero_grad()
                scaler.scale(model(x).square().mean() * 8).backward()
                scaler.step(optimizer)
                scaler.update()
        return scaler.get_scale(), model.weight

    scale, weight = trained(**options)
    bare_scale, bare = trained()
    assert scale == bare_scale < 2.0**127
    assert torch.equal(weight, bare)


def test_what_no_scaler_skips_is_dealt_with_at_the_step():
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    with gaff.clip_gradients(optimizer, value=1.0, when="backward"):
        scaler.scale(model(torch.full((3, 4), math.inf)).mean()).backward()
        with pytest.raises(
            gaff.NonFiniteError, match="nothing was stepped: expected finite ones, or nonfinite='zero'$"
        ):
            optimizer.step()
    assert model.weight.isfinite().all()
    assert not hasattr(torch.amp.GradScaler.scale, "__wrapped__")


def test_a_model_that_has_none_of_the_parameters_is_refused_before_anything_is_installed():
    model, other = nn.Linear(3, 3), nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(gaff.PlanError, match="model= is a Linear that has none of the optimizer's parameters"):
        gaff.clip_gradients(optimizer, norm=1.0, model=other)
    assert not optimizer._optimizer_step_pre_hooks
    gaff.clip_gradients(optimizer, norm=1.0, model=nn.Sequential(other, model)).remove()


def test_a_parameter_that_is_swapped_is_limited_as_before():
    """A conversion may swap a parameter's memory for another; it must not be held weakly then, and loses its hooks."""
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        with gaff.clip_gradients(optimizer, value=0.1, when="backward"):
            for convert in (model.float, model.double):
                convert()
                for _ in range(2):
                    optimizer.zero_grad()
                    model(torch.ones(3, 4, dtype=model.weight.dtype)).sum().backward()
                    optimizer.step()
                assert model.weight.grad.abs().max().item() == pytest.approx(0.1)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def test_what_an_optimizer_no_longer_has_is_followed_no_more():
    kept, gone = nn.Linear(2, 1), nn.Linear(2, 1)
    optimizer = torch.optim.SGD([{"params": kept.parameters()}, {"params": gone.parameters()}], 0.0)
    with gaff.clip_gradients(optimizer, value=0.1, when="backward"):
        del optimizer.param_groups[1]
        optimizer.step()
        assert not gone.weight._backward_hooks
        held = weakref.ref(gone)
        del gone
        gc.collect()
        assert held() is None
        kept(torch.ones(1, 2)).sum().backward()
        assert kept.weight.grad.abs().max().item() == pytest.approx(0.1)


@pytest.mark.parametrize("hooks", [1, 2])
def test_gradients_are_clipped_behind_step_hooks_that_are_set_later(hooks):
    model, calls = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)), []
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def enlarged(optimizer, args, kwargs):
        calls.append(1)
        for parameter in model.parameters():
            parameter.grad.mul_(10)

    with gaff.clip_gradients(optimizer, norm=0.1, model=model) as clip:
        handles = [optimizer.register_step_pre_hook(enlarged) for _ in range(hooks)]
        before = dict(optimizer._optimizer_step_pre_hooks)
        for step in range(3):
            weights = [one.detach().clone() for one in model.parameters()]
            optimizer.zero_grad()
            model(torch.randn(8, 4)).square().sum().backward()
            total = torch.cat([one.grad.flatten() for one in model.parameters()]).norm()
            optimizer.step()
            moved = torch.cat(
                [(a - b.detach()).flatten() for a, b in zip(weights, model.parameters(), strict=True)]
            ).norm()
            assert float(moved) == pytest.approx(0.1, rel=1e-4)
            assert clip.audit.rows[step].norm == pytest.approx(float(total) * 10**hooks, rel=1e-4)
            assert dict(optimizer._optimizer_step_pre_hooks) == before
    assert len(calls) == 3 * hooks
    for handle in handles:
        handle.remove()
    assert not optimizer._optimizer_step_pre_hooks


def test_a_later_step_hook_that_raises_leaves_nothing_of_ours_in_its_place():
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def first(optimizer, args, kwargs):
        raise RuntimeError("bang")

    def second(optimizer, args, kwargs):
        pass

    with gaff.clip_gradients(optimizer, norm=0.1, model=model):
        optimizer.register_step_pre_hook(first)
        optimizer.register_step_pre_hook(second)
        model(torch.randn(8, 4)).sum().backward()
        with pytest.raises(RuntimeError, match="bang"):
            optimizer.step()
    assert list(optimizer._optimizer_step_pre_hooks.values()) == [first, second]
