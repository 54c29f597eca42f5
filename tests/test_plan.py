"""Plans: frozen, checked before anything is installed, saved when they hold no function."""

import dataclasses
import functools

import pytest
import torch
from torch import nn

import gaff
from gaff import Plan, edits, keep
from gaff.errors import RecordError
from zoo import Net


def test_a_plan_survives_saving(tmp_path):
    plan = Plan.of(
        "**<Conv2d>",
        gaff.maybe("x.y:grad"),
        {"fc1": keep.rows([0, 2]), "relu:input": keep.positions(slice(1, None, 2)), "conv": keep.heads(1, 4)},
        dtype="float16",
        last=3,
        budget="2 GiB",
        reduce=keep.mean(0),
        to="cpu",
    )
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    assert plan.options.budget == 2 * 2**30


def test_a_plan_is_frozen_and_can_be_opened_again_and_again():
    model, x = Net(), torch.randn(1, 3, 8, 8)
    plan = Plan.of("conv", "fc1:grad_output")
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.requests = ()
    for _ in range(2):
        with gaff.capture(model, plan) as got:
            model(x).sum().backward()
        assert got["conv"].shape == (1, 10, 4, 4)
    with gaff.capture(model, plan, dtype=torch.float64) as got:
        model(x).sum().backward()
    assert got["conv"].dtype == torch.float64


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Plan.of(lambda site: True).to_json(), "plan cannot be saved: <predicate <lambda>> is no address"),
        (lambda: Plan.of(nn.Linear(1, 1)).to_json(), "plan cannot be saved: <module Linear> is no address"),
        (lambda: Plan.of("a", reduce=abs).to_json(), "is a function: a plan that holds one cannot be saved"),
        (lambda: Plan.of("a", lost=3), "option 'lost' is not known: expected to, dtype"),
        (lambda: Plan.of("a", last=0), "last=0: expected a whole number of events"),
        (lambda: Plan.of("a", to="gpu"), "to='gpu' is no device"),
        (lambda: Plan.of("a", dtype="half precision"), "dtype='half precision' is no type of torch"),
        (lambda: Plan.of("a", dtype=torch.int8), "is no floating type"),
        (lambda: Plan.of("a", budget="lots"), "budget='lots' is no size"),
        (lambda: Plan.of("a", budget=0), "budget=0: expected a whole number of bytes"),
        (lambda: Plan.of("a", evict="newest"), "evict='newest' is not known: expected one of 'raise', 'oldest'"),
        (lambda: Plan.of("a", threads="some"), "threads='some' is not known"),
        (lambda: Plan.of("a", reduce=3), "reduce=3 cannot be called"),
        (lambda: Plan.of({"a": 3}), "'a': 3 cannot be called"),
        (lambda: Plan.of(3), "pattern 3 is a int: expected an address"),
        (lambda: Plan.of(torch.ones(1)), "a tensor was given as a pattern: expected it by keyword"),
        (lambda: gaff.capture(Net()), "capture was given nothing to capture"),
        (lambda: gaff.capture("conv"), "capture was given 'conv' first: expected a model"),
        (lambda: gaff.capture(None, "conv"), "pattern 'conv' needs a model"),
        (lambda: keep.from_dict({"kind": "part", "dim": 1}), "cannot be read"),
        (lambda: keep.Reduce("median"), "reduction 'median' is not known"),
    ],
)
def test_messages(make, message):
    with pytest.raises(gaff.PlanError, match=message):
        make()


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"gaff_plan": 9}', '{"gaff_plan": 1, "requests": [{}], "options": {}}']
)
def test_hostile_files_are_refused(text):
    with pytest.raises(gaff.RecordError, match="plan cannot be read"):
        Plan.from_json(text)


def test_models_that_cannot_be_seen_truly_are_refused_before_a_hook():
    class FullyShardedDataParallel(nn.Sequential):
        pass

    class DataParallel(nn.Sequential):
        device_ids = (0, 1)

    class DeepSpeedEngine(nn.Sequential):
        pass

    class ZeROOrderedDict(dict):
        pass

    with pytest.raises(gaff.PlanError, match="0: FullyShardedDataParallel: the first FSDP lays parameters"):
        gaff.guard(nn.Sequential(FullyShardedDataParallel(nn.Linear(2, 2))))
    with pytest.raises(gaff.PlanError, match="0: DataParallel runs replicas on several devices"):
        gaff.capture(nn.Sequential(DataParallel()), gaff.maybe("x"), "**")
    with pytest.raises(gaff.PlanError, match="DeepSpeedEngine: DeepSpeed reduces gradients in buffers of its own"):
        gaff.capture(DeepSpeedEngine(nn.Linear(2, 2)), "0")
    parted = nn.Sequential(nn.Linear(2, 2))
    parted[0]._parameters = ZeROOrderedDict(parted[0]._parameters)
    with pytest.raises(gaff.PlanError, match="0: Linear: .*ZeRO 3 keeps parameters in parts"):
        gaff.capture(parted, "0")
    with pytest.raises(gaff.PlanError, match="is TorchScript, which takes no hooks"):
        gaff.capture(torch.jit.script(nn.Sequential(nn.Linear(1, 1))), ":output")


def test_what_says_that_it_returns_a_tuple_is_not_skipped_by_a_tensor():
    model = nn.ModuleDict({"attention": nn.MultiheadAttention(4, 2), "lstm": nn.LSTM(4, 4), "linear": nn.Linear(4, 4)})
    for name in ("attention", "lstm"):
        with pytest.raises(gaff.PlanError, match=rf"{name}: \w+ returns a tuple, which a tensor cannot stand in for"):
            gaff.edit(model, {name: gaff.edits.skip()})
        gaff.edit(model, {name: gaff.edits.skip(lambda x, *args, **kwargs: (x, None))})
    gaff.edit(model, {"linear": gaff.edits.skip()})


def cached(forward):
    @functools.wraps(forward)
    def outer(self, *args):
        return forward(self, *args)

    return outer


class Returns:
    """Forwards, by what they return."""

    def bare(self, x):
        return x, None

    def either(self, x):
        if x.sum() > 0:
            return x, x
        return x, x, x

    @cached
    def decorated(self, x):
        return x, None

    def told(self, x) -> tuple[torch.Tensor, int] | tuple[torch.Tensor] | None:
        return x.new_ones(2).unbind()

    def sometimes(self, x):
        return (x, x) if x.sum() > 0 else x

    def maybe_one(self, x) -> torch.Tensor | tuple[torch.Tensor, int]:
        return x.new_ones(2).unbind()

    def named(self, x):
        outputs = (x,)
        if x.sum() > 0:
            outputs += (x,)
        return outputs

    def joined(self, x):
        outputs = self.inner(x)
        outputs = (x,) + outputs[1:]  # noqa: RUF005
        return outputs if x.sum() > 0 else (x,)

    def reused(self, x):
        out = (x, x)
        out = out[0]
        return out

    def taken_apart(self, x):
        out = (x, x)
        for out in out:  # noqa: B020
            x = out
        return out

    def inside(self, x):
        def pair():
            return x, x

        return pair()[0]

    def elsewhere(self, x):
        pair = x, x
        return pair[0]


@pytest.mark.parametrize("name", [one for one in vars(Returns) if not one.startswith("_")])
def test_a_tuple_is_known_by_the_code_of_a_forward_and_by_unions(name):
    kind = type("Own", (nn.Module,), {"forward": vars(Returns)[name]})
    model = nn.Sequential(kind())
    if name in ("bare", "either", "decorated", "told", "named", "joined"):
        with pytest.raises(gaff.PlanError, match="0: Own returns a tuple, which a tensor cannot stand in for"):
            gaff.edit(model, {"0": gaff.edits.skip()})
    else:
        gaff.edit(model, {"0": gaff.edits.skip()})
    gaff.edit(model, {"0": gaff.edits.skip(lambda x: (x, None))})


def test_a_mask_of_the_first_dimensions_is_told_how_it_fits():
    model, mask = nn.Linear(2, 2), torch.ones(4, 5, dtype=torch.bool)
    with pytest.raises(
        gaff.PlanError, match=r"\(4, 5\) does not fit what passes, \(4, 5, 3, 2\): expected mask\[..., None, None\]"
    ):
        with gaff.edit(model, {":output": gaff.edits.at(mask, gaff.edits.zero())}):
            model(torch.ones(4, 5, 3, 2))
    with pytest.raises(gaff.PlanError, match=r"\(4, 5\) does not fit what passes, \(3, 2\)$"):
        with gaff.edit(model, {":output": gaff.edits.at(mask, gaff.edits.zero())}):
            model(torch.ones(3, 2))


@pytest.mark.parametrize("place", [keep.rows([0, 0]), keep.rows([0, -3]), keep.channels([1, 1]), keep.heads([0, 0], 2)])
def test_a_place_that_names_an_index_twice_is_refused(place):
    model = nn.Linear(2, 2)
    with pytest.raises(gaff.PlanError, match=r"places \[.*\] name one twice"):
        with gaff.edit(model, {":output": gaff.edits.at(place, gaff.edits.add(1.0))}):
            model(torch.ones(3, 2))


class Keeps(nn.Module):
    """Keeps a view of its weight, made before anybody edits that."""

    def __init__(self, view):
        super().__init__()
        self.w = nn.Parameter(torch.full((4, 4), 0.5))
        self.kept = view(self.w)

    def forward(self, x):
        return x @ self.w @ self.kept


@pytest.mark.parametrize("view", [lambda w: w.t(), lambda w: w.data, lambda w: w.detach()[:, :2]])
def test_a_parameter_of_which_a_view_is_kept_is_not_edited(view):
    model = Keeps(view)
    with pytest.raises(gaff.PlanError, match="w:param: kept is a view of it that is kept"):
        gaff.edit(model, {"w:param": gaff.edits.scale(2.0)}).__enter__()
    assert torch.equal(model.w, torch.full((4, 4), 0.5))


def test_what_stands_in_for_a_parameter_goes_for_one():
    class Asks(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(2, 2))

        def forward(self, x):
            assert isinstance(self.w, nn.Parameter)
            return x @ self.get_parameter("w")

    model, new = Asks(), torch.full((2, 2), 3.0)
    with gaff.edit(model, {"w:param": gaff.edits.replace(new)}):
        assert torch.equal(model(torch.eye(2)), new)
    assert not isinstance(new, nn.Parameter)
    assert vars(new) == {}


def strip_while_open(session, model):
    with session:
        model(torch.ones(1, 2))
        model[0]._forward_hooks.clear()
        model(torch.ones(1, 2))
    return session.receipt.rows


def test_hooks_that_somebody_takes_away_are_told_when_the_session_closes():
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    for session in (gaff.edit(model, {"0": gaff.edits.zero()}), gaff.capture(model, "0", "1")):
        with pytest.warns(UserWarning, match="0: hooks were taken from its module while the session was open"):
            rows = strip_while_open(session, model)
        assert "calls after that were not seen" in rows[0].reason
        assert not any(row.reason for row in rows[1:])


def test_hooks_that_were_taken_away_are_told_of_that_opening_alone():
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    got = gaff.capture(model, "0")
    with pytest.warns(UserWarning, match="hooks were taken"):
        strip_while_open(got, model)
    with got:
        model(torch.ones(1, 2))
    assert not got.receipt.rows[0].reason


def test_what_spectral_norm_makes_in_each_call_is_no_view_that_is_kept():
    model = nn.Sequential(nn.utils.spectral_norm(nn.Linear(3, 3)))
    with gaff.edit(model, {"0.weight_orig:param": gaff.edits.scale(2.0)}):
        model(torch.ones(1, 3))


def test_a_plan_that_cannot_be_written_says_so_and_leaves_nothing(tmp_path):
    plan = gaff.Plan.edit({"0": edits.add(torch.ones(3))})
    with pytest.raises(RecordError, match="cannot be written"):
        plan.save(tmp_path / "nowhere" / "plan.json")
    (tmp_path / "folder.json").mkdir()
    with pytest.raises(RecordError, match="cannot be written"):
        plan.save(tmp_path / "folder.json")
    assert not list((tmp_path / "folder.json").iterdir())


def test_torchscript_is_told_why_it_cannot_compile():
    model = nn.Linear(4, 3)
    with (
        gaff.capture(model, gaff.maybe(":output")),
        pytest.raises(Exception, match="while a gaff session is open on it"),
    ):
        torch.jit.script(model)


def test_a_file_that_is_no_plan_says_so(tmp_path):
    (tmp_path / "plan.json").write_text("{}")
    with pytest.raises(gaff.RecordError, match="it is none that gaff has written"):
        gaff.Plan.load(tmp_path / "plan.json")


class HalfCalled(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x):
        return self.a(x)


ALIKE = {
    "modules": lambda m: (m.a, m.b),
    "predicates": lambda m: (lambda site: site.path == "a", lambda site: site.path == "b"),
}


@pytest.mark.parametrize("kind", ALIKE)
def test_patterns_that_read_alike_are_told_apart(kind):
    """What acted of one module or predicate says nothing of another of the same name."""
    model, x = HalfCalled(), torch.randn(1, 2)
    first, second = ALIKE[kind](model)
    with pytest.raises(gaff.NeverFiredError, match=", 2>' never fired"), gaff.capture(model, first, second):
        model(x)
    with (
        pytest.raises(gaff.NeverFiredError, match=", 2>' never fired"),
        gaff.edit(model, {first: edits.scale(2.0), second: edits.scale(3.0)}),
    ):
        model(x)
    assert len(Plan.of(first, second, first).optional | {str(one) for one in Plan.of(first, first).requests}) == 1
    with gaff.capture(model, first, gaff.maybe(second)):
        model(x)


def test_tensors_of_one_shape_are_told_apart_and_switched_apart():
    a, b = (torch.ones(3, requires_grad=True) for _ in range(2))
    changes = {a: edits.scale(2.0), b: edits.scale(5.0)}
    with pytest.raises(gaff.NeverFiredError, match="'<tensor 3, 2>' never fired"), gaff.edit(changes):
        a.sum().backward()
    a.grad = None
    with gaff.edit(changes) as changed:
        changed.strength(0.5, b)
        changed.off(a)
        (a.sum() + b.sum()).backward()
        changed.on("<tensor 3>")
        (a.sum() + b.sum()).backward()
    assert a.grad.tolist() == [3.0] * 3
    assert b.grad.tolist() == [6.0] * 3
    with pytest.raises(gaff.SiteError, match="is not edited"):
        changed.off(torch.ones(3))


def test_a_plan_that_holds_one_element_of_any_stride_has_a_digest_and_is_saved(tmp_path):
    value = torch.randn(1, 4)[:, 0]
    assert value.stride() == (4,)
    plan = Plan.edit({"a": gaff.edits.replace(value)})
    assert (
        plan.digest == Plan.edit({"a": gaff.edits.replace(value.clone(memory_format=torch.contiguous_format))}).digest
    )
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json").digest == plan.digest


def test_a_plan_without_tensors_is_saved_over_one_with_some(tmp_path):
    path, beside = tmp_path / "p.json", tmp_path / "p.json.safetensors"
    Plan.edit({"tensor": edits.add(torch.ones(2))}).save(path)
    assert beside.exists()
    plan = Plan.edit({"tensor": edits.clip(norm=0.5), "digest": edits.zero()})
    plan.save(path)
    assert not beside.exists()
    beside.write_bytes(b"of somebody else")
    assert Plan.load(path).to_json() == plan.to_json()
