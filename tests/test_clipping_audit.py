"""What the audit of clipping tells: steps and names as they were, also where groups change or gradients come one by one."""

import math

import pytest
import torch
from torch import nn

import gaff

THREE = ("big.weight", "big.weight", "big.weight")


def two_layers():
    torch.manual_seed(0)
    model = nn.ModuleDict({"big": nn.Linear(4, 4, bias=False), "small": nn.Linear(4, 4, bias=False)})
    groups = [{"params": list(one.parameters())} for one in model.values()]
    return model, torch.optim.SGD(groups, lr=1e-3)


def step(model, optimizer, scale=100.0):
    optimizer.zero_grad()
    x = torch.ones(2, 4)
    (scale * model["big"](x).square().sum() + model["small"](x).square().sum()).backward()
    optimizer.step()


@pytest.mark.parametrize("limits", [{"norm": 1e-3}, {"norm": 1e-3, "per": "tensor"}, {"value": 1e-3}])
@pytest.mark.parametrize("change", ["in front", "gone"])
def test_history_keeps_the_names_that_parameters_had(limits, change):
    model, optimizer = two_layers()
    with gaff.clip_gradients(optimizer, model=model, **limits) as handle:
        for _ in range(3):
            step(model, optimizer)
        before = handle.audit.parameters
        if change == "gone":
            del optimizer.param_groups[0]
        else:
            optimizer.param_groups.insert(0, optimizer.param_groups.pop())
        step(model, optimizer)
        handle.audit.parameters.items()
        assert (
            handle.audit.parameters["big.weight"] == before["big.weight"] + (change != "gone") == 3 + (change != "gone")
        )
        assert "big.weight (" in str(handle)
        if "per" not in limits and "norm" in limits:
            last = "small.weight" if change == "gone" else "big.weight"
            assert [row.largest for row in handle.audit.rows] == [*THREE, last]


@pytest.mark.parametrize("limits", [{"value": 1e-3}, {"norm": 1e-3, "per": "tensor"}])
def test_gradients_that_are_limited_as_they_come_count_by_the_step(limits):
    model, optimizer = two_layers()
    with gaff.clip_gradients(optimizer, model=model, when="backward", nonfinite="zero", **limits) as handle:
        step(model, optimizer)
        step(model, optimizer, scale=float("nan"))
        optimizer.zero_grad()
        for _ in range(4):
            model["big"](torch.ones(1, 4)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.step()  # without any gradient
    audit = handle.audit
    assert (audit.steps, audit.clipped, audit.skipped) == (4, 3, 0)
    assert audit.nonfinite == {"big.weight": 1}
    assert audit.parameters == {"big.weight": 5, "small.weight": 2}
    assert [(row.step, row.norm, row.is_clipped, row.nonfinite) for row in audit.rows] == [
        (0, None, True, ()), (1, None, True, ("big.weight",)), (2, None, True, ()),
    ]  # fmt: skip
    assert "4 steps, 3 clipped, 0 skipped\nnot finite: big.weight (1x)" in str(handle)


def test_the_largest_share_is_named_where_types_are_several():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).bfloat16(), nn.Linear(4, 4).double())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    own = [nn.Parameter(one.detach().clone()) for one in model.parameters()]
    for at, (one, other) in enumerate(zip(model.parameters(), own, strict=True)):
        one.grad = torch.full_like(one, 9.0 if at == 2 else 1.0)
        other.grad = one.grad.clone()
    total = torch.nn.utils.clip_grad_norm_(own, 1.0)
    with gaff.clip_gradients(optimizer, norm=1.0, model=model) as handle:
        optimizer.step()
    assert (handle.audit.parameters, handle.audit.rows[0].largest) == ({"1.weight": 1}, "1.weight")
    assert handle.audit.rows[0].norm == float(total)
    assert all(torch.equal(one.grad, other.grad) for one, other in zip(model.parameters(), own, strict=True))


def test_a_skipped_spike_tells_the_limit_that_it_was_above():
    parameter = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    with gaff.clip_gradients(optimizer, norm=1.0, deviations=3.0, warmup=4, window=8, spike="skip") as handle:
        for norm in (10.0, 11.0, 9.0, 10.0, 500.0):
            parameter.grad = torch.tensor([norm, 0.0])
            optimizer.step()
    rows = handle.audit.rows
    assert [row.is_skipped for row in rows] == [False, False, False, False, True]
    assert [row.limit for row in rows[:4]] == [1.0] * 4
    assert 12 < rows[4].limit < 13  # mean 10, deviation 0.82


class SAM(torch.optim.Optimizer):
    """As it is often written, with a ``second_step`` for training loops and a ``step`` with a closure."""

    def __init__(self, params, base, **options):
        super().__init__(params, options)
        self.base_optimizer = base(self.param_groups, **options)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self):
        for group in self.param_groups:
            for one in group["params"]:
                self.state[one]["old"] = one.clone()
                one.add_(0.01 * one.grad)

    @torch.no_grad()
    def second_step(self):
        for group in self.param_groups:
            for one in group["params"]:
                one.copy_(self.state[one].pop("old"))
        self.base_optimizer.step()

    def step(self, closure):
        self.first_step()
        with torch.enable_grad():
            closure()
        self.second_step()


def test_limits_on_an_optimizer_whose_inner_one_is_stepped_alone_are_refused():
    model = nn.Linear(2, 2)
    sam = SAM(model.parameters(), torch.optim.SGD, lr=0.1)

    def evaluate():
        sam.zero_grad()
        model(torch.ones(1, 2)).sum().backward()

    with gaff.clip_gradients(sam, norm=0.01, model=model) as handle:
        evaluate()
        sam.step(evaluate)
        assert handle.audit.clipped == 1
        evaluate()
        sam.first_step()
        evaluate()
        with pytest.raises(
            gaff.PlanError, match=r"its 'base_optimizer' was stepped.*clip_gradients\(optimizer.base_opt"
        ):
            sam.second_step()
    evaluate()
    sam.second_step() if "old" in sam.state[model.weight] else sam.first_step()  # nothing of ours is left
    with gaff.clip_gradients(sam.base_optimizer, norm=0.01, model=model) as handle:
        evaluate()
        sam.base_optimizer.step()
    assert handle.audit.clipped == 1
    assert not sam.base_optimizer._optimizer_step_pre_hooks


def test_an_optimizer_that_takes_no_hooks_is_refused():
    class Wrapper(torch.optim.Optimizer):
        def __init__(self, inner):
            self.wrapped, self.param_groups = inner, inner.param_groups

    with pytest.raises(gaff.PlanError, match="a Wrapper that has not called Optimizer.__init__ takes no hooks"):
        gaff.clip_gradients(Wrapper(torch.optim.SGD([nn.Parameter(torch.ones(2))], 0.1)), norm=1.0)


class Counting(torch.optim.SGD):
    """Counts its steps in its groups, before it asks for gradients, as optimizers of several libraries do."""

    def __init__(self, parameters, kind, lr=0.1):
        super().__init__(parameters, lr)
        self._kind = kind

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            if self._kind == "tensor":
                group.setdefault("count", torch.zeros(())).add_(1)
            else:
                group["count"] = group.get("count", 0) + 1
        if closure is not None:
            with torch.enable_grad():
                closure()
        for group in self.param_groups:
            for one in group["params"]:
                if one.grad is not None:
                    one.sub_(one.grad, alpha=group["lr"] / float(group["count"]))


@pytest.mark.parametrize("kind", ["tensor", "number"])
@pytest.mark.parametrize("is_closure", [True, False])
@pytest.mark.parametrize("spoilt", [0, 2])
def test_a_skipped_step_counts_nowhere(kind, is_closure, spoilt):
    def train(is_clipped):
        torch.manual_seed(0)
        model = nn.Linear(4, 2)
        optimizer = Counting(model.parameters(), kind)
        handle = gaff.clip_gradients(optimizer, norm=1e6, nonfinite="skip") if is_clipped else None
        for at in range(5):
            x = torch.randn(8, 4)

            def closure(at=at, x=x):
                optimizer.zero_grad()
                loss = model(x).square().mean() * (math.nan if at == spoilt else 1.0)
                loss.backward()
                return loss

            if not is_clipped and at == spoilt:  # by hand
                continue
            if not is_closure:
                closure()
            optimizer.step(closure) if is_closure else optimizer.step()
        return model, optimizer.param_groups[0]["count"], handle

    bare, count, _ = train(False)
    clipped, same, handle = train(True)
    assert handle.audit.skipped == 1
    assert float(count) == float(same) == 4
    assert torch.equal(bare.weight, clipped.weight)


def test_an_optimizer_that_moves_its_weights_before_its_closure_cannot_skip():
    class Moving(SAM):
        @torch.no_grad()
        def step(self, closure):
            before = [one.clone() for one in self.param_groups[0]["params"]]
            for one in self.param_groups[0]["params"]:
                one.add_(1e-3)
            with torch.enable_grad():
                closure()
            for one, known in zip(self.param_groups[0]["params"], before, strict=True):
                one.copy_(known)
            self.base_optimizer.step()

    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = Moving(model.parameters(), torch.optim.SGD, lr=0.1)

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).square().mean()
        loss.backward()
        return loss

    with (
        gaff.clip_gradients(optimizer, norm=1.0, nonfinite="skip"),
        pytest.raises(gaff.PlanError, match="changes its parameters before it evaluates its closure, as SAM does"),
    ):
        optimizer.step(closure)
    with gaff.clip_gradients(optimizer, norm=1.0):
        optimizer.step(closure)


@pytest.mark.parametrize("kind", ["schedule", "max_norm", "added group", "learned rate", "modules in a group"])
def test_what_a_closure_changes_is_the_users(kind):
    """Steps with a closure, one of them skipped: the rate, the weights and the groups are those of the program."""

    def train(is_clipped):
        torch.manual_seed(0)
        names = nn.Embedding(10, 4, max_norm=0.5 if kind == "max_norm" else None)
        model = nn.Sequential(names, nn.Linear(4, 2))
        rate = torch.tensor(-2.0, requires_grad=True).exp() if kind == "learned rate" else 0.5
        optimizer = torch.optim.Adam(model[1].parameters(), 0.5)
        optimizer.param_groups[0]["rate"] = rate
        optimizer.param_groups[0]["layers"] = [model[1]]
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        handle = gaff.clip_gradients(optimizer, norm=1e6, nonfinite="skip") if is_clipped else None
        for at in range(4):

            def closure(at=at):
                optimizer.zero_grad()
                loss = model(torch.arange(10)).square().mean() * (math.nan if at == 2 else 1.0)
                loss.backward()
                if kind == "schedule":
                    schedule.step()
                if kind == "added group" and at == 0:
                    optimizer.add_param_group({"params": [names.weight]})
                return loss

            if not is_clipped and at == 2:
                with torch.enable_grad():
                    closure()
                continue
            optimizer.step(closure)
        assert optimizer.param_groups[0]["layers"][0] is model[1]
        return model[1].weight, optimizer.param_groups[0]["lr"], len(optimizer.param_groups), handle

    bare, clipped = train(False), train(True)
    assert clipped[3].audit.skipped == 1
    assert torch.equal(bare[0], clipped[0])
    assert bare[1:3] == clipped[1:3]


def test_parameters_are_counted_over_all_steps_also_beyond_those_told_one_by_one():
    model = nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    audit = gaff.clip_gradients(optimizer, norm=0.01, model=model).audit
    for _ in range(2500):
        model.weight.grad = torch.ones(1, 2)
        optimizer.step()
    assert (audit.steps, audit.clipped, audit.parameters) == (2500, 2500, {"weight": 2500})
    assert (len(audit.rows), audit.rows[0].step, audit.rows[-1].step) == (1000, 1500, 2499)


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_is_skipped_is_not_clipped_as_well(fused):
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters(), 0.1, fused=fused)
    with gaff.clip_gradients(optimizer, norm=1.0, nonfinite="skip") as clipping:
        (model(torch.ones(4, 3)).sum() * 0.01).backward()
        model.weight.grad[0, 0] = torch.inf
        optimizer.step()
    assert (clipping.audit.clipped, clipping.audit.skipped) == (0, 1)
    assert torch.isinf(model.weight.grad[0, 0])
    assert model.weight.grad[0, 1] > 0


@pytest.mark.parametrize("per", ["layer", "tensor"])
def test_where_each_has_its_own_factor_the_smallest_is_told(per):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    clipping = gaff.clip_gradients(optimizer, norm=0.1, per=per, model=model)
    (10 * model(torch.randn(16, 4)).square().mean()).backward()
    groups = [list(one.parameters()) for one in model] if per == "layer" else [[one] for one in model.parameters()]
    norms = [torch.stack([one.grad.norm() for one in group]).norm().item() for group in groups]
    optimizer.step()
    [row] = clipping.audit.rows
    assert row.is_clipped
    assert row.factor == pytest.approx(min(0.1 / max(norms), 1.0), rel=1e-4)
    assert row.largest == ""
    assert sum(clipping.audit.parameters.values()) == sum(norm > 0.1 for norm in norms) * (2 if per == "layer" else 1)
    clipping.remove()
