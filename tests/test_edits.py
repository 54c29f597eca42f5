"""Each edit against the same change written into a forward by hand: values and gradients."""

import copy
import math
from contextlib import nullcontext, suppress

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import gaff
from gaff import edits, keep
from zoo import ZOO, loss_of

WIDTH = 6
DIRECTION = torch.linspace(-1, 1, WIDTH)
BASIS = torch.linalg.qr(torch.arange(12.0).reshape(WIDTH, 2).sin()).Q.T
ROWS = torch.arange(18.0).reshape(3, WIDTH).cos()
MASK = torch.tensor([True, False] * (WIDTH // 2))


def clip(t, dims, norm=0.5):
    total = t.pow(2).sum(dims, keepdim=True).sqrt() if dims is not None else t.pow(2).sum().sqrt()
    return t * (norm / (total + 1e-6)).clamp(max=1.0)


def at_rows(t, rows, change):
    return torch.stack([change(row) if number in rows else row for number, row in enumerate(t)])


# name -> the edit, the same by hand
EDITS = {
    "scale": (edits.scale(0.5), lambda t: t * 0.5),
    "scale by a tensor": (edits.scale(DIRECTION), lambda t: t * DIRECTION),
    "add": (edits.add(DIRECTION, strength=2.0), lambda t: t + 2 * DIRECTION),
    "add a number": (edits.add(0.25), lambda t: t + 0.25),
    "fill": (edits.fill(0.3), lambda t: t * 0 + 0.3),
    "zero": (edits.zero(), lambda t: t * 0),
    "clamp": (edits.clamp(-0.2, 0.3), lambda t: t.clamp(-0.2, 0.3)),
    "clamp from above": (edits.clamp(high=0.1), lambda t: t.clamp(max=0.1)),
    "clip": (edits.clip(0.5), lambda t: clip(t, None)),
    "clip rows": (edits.clip(0.5, per="row"), lambda t: clip(t, 1)),
    "clip units": (edits.clip(0.5, per="unit", dim=1), lambda t: clip(t, 0)),
    "replace by a tensor": (edits.replace(ROWS), lambda t: t * 0 + ROWS),
    "replace by a function": (edits.replace(torch.sin), torch.sin),
    "patch": (edits.patch(ROWS), lambda t: t * 0 + ROWS),
    "patch rows": (edits.patch(ROWS, rows={0: 2, 2: 1}), lambda t: torch.stack([ROWS[2], t[1], ROWS[1]])),
    "patch positions": (
        edits.patch(ROWS, positions={0: 5, 1: 3}),
        lambda t: torch.cat([ROWS[:, [5, 3]], t[:, 2:]], 1),
    ),
    "patch both": (
        edits.patch(ROWS[:2], rows={2: 0}, positions={5: 0}),
        lambda t: torch.cat([t[:2], torch.cat([t[2:, :5], ROWS[:1, :1]], 1)]),
    ),
    "ablate": (edits.ablate(), lambda t: t * 0),
    "ablate to the mean": (edits.ablate("mean", ROWS), lambda t: t * 0 + ROWS.mean(0)),
    "project away": (edits.project(BASIS), lambda t: t - (t @ BASIS.T) @ BASIS),
    "project onto": (edits.project(BASIS[0] * 3, keep=True), lambda t: (t @ BASIS[:1].T) @ BASIS[:1]),
    "project dependent": (
        edits.project(torch.stack([BASIS[0], 2 * BASIS[0]])),
        lambda t: t - (t @ BASIS[:1].T) @ BASIS[:1],
    ),
    "at a row": (edits.at(keep.rows(1), edits.scale(3.0)), lambda t: at_rows(t, [1], lambda r: r * 3)),
    "at rows": (edits.at(keep.rows([0, -1]), edits.zero()), lambda t: at_rows(t, [0, 2], lambda r: r * 0)),
    "at a slice": (
        edits.at(keep.rows(slice(1, None)), edits.scale(2.0)),
        lambda t: at_rows(t, [1, 2], lambda r: r * 2),
    ),
    "at a mask": (edits.at(MASK, edits.scale(3.0)), lambda t: torch.where(MASK, t * 3, t)),
    "at heads": (
        edits.at(keep.heads(1, 3), edits.zero()),
        lambda t: torch.cat([t[:, :2], t[:, 2:4] * 0, t[:, 4:]], 1),
    ),
    "at heads of a row": (
        edits.at(keep.rows(2), edits.at(keep.heads([0, 2], 3), edits.scale(2.0))),
        lambda t: torch.cat([t[:2], t[2:] * torch.tensor([2.0, 2, 1, 1, 2, 2])]),
    ),
    "chain": (edits.chain(edits.scale(2.0), edits.add(1.0), torch.tanh), lambda t: torch.tanh(t * 2 + 1)),
    "a list": ([edits.add(1.0), edits.scale(2.0)], lambda t: (t + 1) * 2),
    "experiments by row": (
        [edits.at(keep.rows(0), edits.zero()), edits.at(keep.rows(1), edits.scale(-1.0))],
        lambda t: torch.stack([t[0] * 0, -t[1], t[2]]),
    ),
    "a function": (lambda t: t.exp(), lambda t: t.exp()),
}


class ByHand(nn.Module):
    """Two layers, with a change written in where ``at`` says."""

    def __init__(self, at=None, change=None):
        super().__init__()
        self.first, self.second = nn.Linear(4, WIDTH), nn.Linear(WIDTH, 2)
        self.at, self.change = at, change

    def forward(self, x):
        hidden = torch.tanh(self.first(x))
        if self.at == "value":
            hidden = self.change(hidden)
        elif self.at == "gradient":
            hidden.register_hook(lambda gradient: self.change(gradient))
        return self.second(hidden)


def run(model, x):
    x = x.clone().requires_grad_()
    model.zero_grad()
    y = model(x)
    y.pow(2).sum().backward()
    gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p in model.parameters()]
    return [y.detach(), x.grad if x.grad is not None else torch.zeros_like(x), *gradients]


@pytest.mark.parametrize("name", EDITS)
@pytest.mark.parametrize(("site", "kind"), [("second:input", "value"), ("second:grad_input", "gradient")])
def test_an_edit_does_what_the_same_change_by_hand_does(name, site, kind):
    edit, change = EDITS[name]
    model = ByHand()
    by_hand = ByHand(kind, change)
    by_hand.load_state_dict(model.state_dict())
    x = torch.randn(3, 4)
    true = run(by_hand, x)
    with gaff.edit(model, {site: edit}) as changed:
        found = run(model, x)
    for one, other in zip(found, true, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    row = changed.receipt.rows[0]
    assert (row.hits, row.measured, row.seen) == (1, 1, 3 * WIDTH)


GRADIENTS = ["scale", "clamp", "clip", "clip rows", "project away", "chain", "a function"]


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_of_weights_at_outputs_and_of_plain_tensors(name):
    edit, change = EDITS[name]
    model, x = ByHand(), torch.randn(3, 4)
    true = run(model, x)
    weight = next(number for number, (path, _) in enumerate(model.named_parameters()) if path == "second.weight") + 2
    with gaff.edit(model, {"second.weight:grad": lambda t: edits.as_edit(edit).change(t, edits.Event())}):
        found = run(model, x)
    for number, (one, other) in enumerate(zip(found, true, strict=True)):
        torch.testing.assert_close(one, change(other) if number == weight else other, rtol=1e-5, atol=1e-6)
    leaf = torch.randn(3, WIDTH, requires_grad=True)
    with gaff.edit({leaf: edit}):
        leaf.pow(2).sum().backward()
    torch.testing.assert_close(leaf.grad, change(2 * leaf.detach()), rtol=1e-5, atol=1e-6)


def test_reverse_and_stop_at_values_and_at_gradients():
    model, x = ByHand(), torch.randn(3, 4)
    plain = run(model, x)
    for site in ("second:input", "second:grad_input"):
        with gaff.edit(model, {site: edits.reverse(0.5)}):
            turned = run(model, x)
        assert torch.equal(turned[0], plain[0])
        torch.testing.assert_close(turned[1], -0.5 * plain[1])
        torch.testing.assert_close(turned[4:], plain[4:])
        with gaff.edit(model, {site: edits.stop()}):
            stopped = run(model, x)
        assert torch.equal(stopped[0], plain[0])
        assert not stopped[1].any()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_quantize_rounds_and_lets_gradients_through(dtype):
    model, x = ByHand(), torch.randn(3, 4)
    with gaff.edit(model, {"second:input": edits.quantize(dtype)}), gaff.capture(model, "second:input") as got:
        model(x)
    hidden = torch.tanh(model.first(x)).detach()
    assert torch.equal(got["second:input"], hidden.to(getattr(torch, dtype)).float())
    leaf = torch.randn(5, requires_grad=True)
    edits.quantize(dtype, scaled=True).change(leaf * 1000, edits.Event()).sum().backward()
    assert torch.equal(leaf.grad, torch.full((5,), 1000.0))
    scaled = edits.quantize(dtype, scaled=True).change(leaf.detach() * 1e6, edits.Event())
    torch.testing.assert_close(scaled, leaf.detach() * 1e6, rtol=0.15, atol=1e5)


def test_values_out_of_range_are_told():
    model = nn.Sequential(nn.Identity(), nn.Identity())
    x = torch.tensor([[1.0, 1e6, -1e6, math.inf]])
    with gaff.edit(model, {"0": edits.quantize("float16")}) as changed:
        model(x)
    assert changed.receipt.rows[0].added_nonfinite == 2
    assert "ADDED 2 NON-FINITE ELEMENTS" in str(changed.receipt)
    with (
        pytest.raises(gaff.PlanError, match="0: the edit made 2 non-finite"),
        gaff.edit(model, {"0": edits.quantize("float16")}, check_finite=True),
    ):
        model(x)


def test_noise_is_the_same_again_and_draws_from_nothing_global():
    model, x = ByHand(), torch.randn(3, 4)
    state = torch.get_rng_state()
    found = []
    for _ in range(2):
        with gaff.edit(model, {"second:input": edits.noise(0.5, seed=1)}):
            found += [model(x), model(x)]
    assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(found[0], found[2])
    assert torch.equal(found[1], found[3])
    assert not torch.equal(found[0], found[1])
    noise = edits.noise(2.0).change(torch.zeros(10_000), edits.Event())
    assert abs(noise.std() - 2) < 0.05
    assert abs(noise.mean()) < 0.1


def test_resampling_takes_rows_of_the_reference():
    model, x = ByHand(), torch.randn(3, 4)
    with (
        gaff.edit(model, {"second:input": edits.ablate("resample", ROWS, seed=3)}),
        gaff.capture(model, "second:input") as got,
    ):
        model(x)
    assert all(any(torch.equal(row, other) for other in ROWS) for row in got["second:input"])


def test_patches_and_ablations_from_a_capture_take_each_site_from_its_own():
    model, clean, corrupt = ByHand(), torch.randn(3, 4), torch.randn(3, 4)
    with gaff.capture(model, "first", "second:input") as got:
        y = model(clean)
    with gaff.edit(model, {"first": edits.patch(got)}):
        assert torch.equal(model(corrupt), y)
    with gaff.edit(model, {"first": edits.patch(got, rows={0: 2})}):
        assert torch.equal(model(corrupt)[0], y[2])
    with gaff.edit(model, {"second:input": edits.ablate("mean", got)}):
        averaged = model(corrupt)
    hidden = torch.tanh(model.first(clean)).mean(0, keepdim=True)
    torch.testing.assert_close(averaged, model.second(hidden).expand(3, 2))


def test_one_run_of_a_capture_is_a_source_as_the_capture_is():
    model, clean, other, corrupt = ByHand(), torch.randn(3, 4), torch.randn(3, 4), torch.randn(3, 4)
    with gaff.capture(model, "first") as got:
        model(clean)
        y = model(other)
    with pytest.raises(gaff.PlanError, match="fired 2 times"), gaff.edit(model, {"first": edits.patch(got)}):
        model(corrupt)
    for source in (edits.patch(got.run(1)), edits.patch(got, run=1), edits.patch(got.run(1), run=1)):
        with gaff.edit(model, {"first": source}):
            assert torch.equal(model(corrupt), y)
    with gaff.edit(model, {"first": edits.ablate("mean", got.run(1))}), gaff.capture(model, "first") as told:
        model(corrupt)
    torch.testing.assert_close(told["first"], got.run(1)["first"].mean(0).expand(3, -1))
    with pytest.raises(gaff.SiteError, match=r"run\(0\): these are the events of run 1 alone: ask the capture"):
        got.run(1).run(0)


def test_a_module_as_an_edit_trains_while_the_model_is_frozen():
    model, extra = ByHand(), nn.Linear(WIDTH, WIDTH)
    model.requires_grad_(False)
    optimizer = torch.optim.SGD(extra.parameters(), lr=0.1)
    x, losses = torch.randn(8, 4), []
    with gaff.edit(model, {"first": extra}):
        for _ in range(5):
            optimizer.zero_grad()
            loss = model(x).pow(2).sum()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert losses[-1] < losses[0]


def single_outputs(model, args, kwargs):
    """Paths of the modules that return one floating tensor, of which one belongs to the graph."""
    with gaff.capture(model, "**", ":output", graph=True) as got:
        model(*args, **kwargs)
    return [
        site
        for site in got
        if all(isinstance(value, torch.Tensor) and value.is_floating_point() for value in got.all(site))
    ]


@pytest.mark.parametrize("build", ZOO, ids=lambda build: build.__name__)
def test_multiplying_everything_by_one_changes_no_bit(build):
    model, args, kwargs = build()
    outputs = single_outputs(copy.deepcopy(model), args, kwargs)
    gradients = [f"{site}:grad_output" if site != ":output" else ":grad_output" for site in outputs]
    states = [f"{name}:{port}" for name, _ in model.named_parameters() for port in ("param", "grad")]
    bare = copy.deepcopy(model)
    found = []
    for one, sites in ((bare, []), (model, [*outputs, *gradients, *states])):
        changes = {gaff.maybe(site): [edits.scale(1.0), lambda t: t + 0] for site in sites}
        torch.manual_seed(1)
        with gaff.edit(one, changes or {gaff.maybe("nothing.*"): edits.zero()}):
            loss = loss_of(one(*args, **kwargs))
            loss.backward()
        found.append([loss, *(parameter.grad for parameter in one.parameters())])
    for one, other in zip(*found, strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other)


def test_a_function_that_names_no_module_of_its_own_is_an_edit():
    space = {}
    exec("def twice(value): return value * 2", {}, space)  # as notebooks and generated code make them
    space["twice"].__module__ = None
    model, x = nn.Linear(2, 2), torch.ones(1, 2)
    with gaff.edit(model, {":output": space["twice"]}):
        assert torch.equal(model(x), (x @ model.weight.t() + model.bias) * 2)


@pytest.mark.parametrize("index", [slice(None, None, -1), True, [True, False]])
def test_places_that_torch_takes_otherwise_or_not_at_all_are_refused_where_they_are_written(index):
    with pytest.raises(gaff.PlanError, match="given: "):
        gaff.keep.rows(index)


def test_a_number_is_added_to_integers():
    class Counts(nn.Module):
        def forward(self, x):
            return x.round().long()

    model = nn.Sequential(Counts())
    with gaff.edit(model, {"0": gaff.edits.add(1)}):
        assert model(torch.zeros(2)).tolist() == [1, 1]


def edited(module_output, edit, dtype=None):
    """What a module's output becomes by an edit of a session."""
    model = nn.Sequential(nn.Identity())
    value = module_output if dtype is None else module_output.to(dtype)
    with gaff.edit(model, {"0": edit}):
        return model(value)


@pytest.mark.parametrize("width", [64, 768, 4096])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_projections_by_directions_of_few_digits(dtype, width):
    """The rank is that of the directions as they are, however wide; what is left is what rounding leaves."""
    torch.manual_seed(0)
    directions = torch.zeros(2, width, dtype=dtype)
    directions[0, ::2], directions[1, 1::2] = 1.0, 0.5
    x = torch.randn(5, width).to(dtype)
    unit = directions.double() / directions.double().norm(dim=1, keepdim=True)
    inside = x.double() @ unit.T @ unit
    bound = torch.finfo(dtype).eps * float(x.abs().max())
    assert torch.allclose(edited(x, edits.project(directions)).double(), x.double() - inside, atol=bound)
    assert torch.allclose(edited(x, edits.project(directions, keep=True)).double(), inside, atol=bound)
    alike = torch.stack([directions[0], 3 * directions[0], directions[1]])
    assert torch.allclose(edited(x, edits.project(alike)).double(), x.double() - inside, atol=bound)


def test_projections_by_integers_and_complex_directions():
    x = torch.randn(3, 4)
    assert torch.equal(edited(x, edits.project(torch.tensor([0, 2, 0, 0])))[:, 1], torch.zeros(3))
    direction = torch.randn(4, dtype=torch.complex64)
    z = torch.randn(3, 4, dtype=torch.complex64)
    assert (edited(z, edits.project(direction)) @ direction.conj()).abs().max() < 1e-5
    with pytest.raises(gaff.PlanError, match="would lose something"):
        edited(x, edits.project(direction))


@pytest.mark.parametrize("order", [[0, 1], [1, 0], [-1, 0]])
def test_values_of_the_whole_at_all_places_in_any_order(order):
    whole, x = torch.arange(4.0).view(2, 2), torch.full((2, 2), 9.0)
    for edit in (edits.patch(whole), edits.replace(whole)):
        assert torch.equal(edited(x, edits.at(keep.rows(order), edit)), whole)
        assert torch.equal(edited(x, edits.at(keep.channels(order), edit)), whole)
    mean = whole.mean(0).expand(2, 2)
    assert torch.equal(edited(x, edits.at(keep.channels(order), edits.ablate("mean", whole))), mean)


@pytest.mark.parametrize(
    ("dtype", "size", "limit"), [(torch.float32, 1e20, 1.0), (torch.float16, 5e3, 1e-2), (torch.bfloat16, 1e30, 1.0)]
)
@pytest.mark.parametrize("per", ["tensor", "row"])
def test_clips_of_finite_values_whose_squares_are_not(dtype, size, limit, per):
    x = torch.full((2, 4), size, dtype=dtype)
    new = edited(x, edits.clip(limit, per=per)).double()
    norm = new.norm() if per == "tensor" else new.norm(dim=1)
    assert torch.allclose(norm, torch.full_like(norm, limit), rtol=torch.finfo(dtype).eps, atol=1e-4 * limit)


def test_complex_numbers_are_clipped_and_rounded_in_both_parts():
    z = torch.tensor([[3.0 + 4.0j, 0.0], [0.1 + 0.123456789j, 0.0]])
    assert torch.allclose(edited(z, edits.clip(1.0, per="row"))[0, 0], torch.tensor(0.6 + 0.8j))
    rounded = edited(z, edits.quantize("bfloat16"))
    assert torch.equal(torch.view_as_real(rounded), torch.view_as_real(z).bfloat16().float())
    found = keep.project(2)(z)
    assert torch.allclose(found.imag, keep.project(2)(z.imag))


@pytest.mark.parametrize(
    "runs", [-1, [0, -1], slice(-1, None), slice(None, -1), range(-1, 2), "12", 1.7, [1.7], True, slice(0, 4, 0)]
)
def test_numbers_that_count_nothing_are_refused(runs):
    with pytest.raises(gaff.PlanError, match="names no numbers counted from 0"):
        edits.when(edits.zero(), runs=runs)


@pytest.mark.parametrize("runs", [torch.tensor([1, 2]), {1, 2}, range(1, 3), slice(1, 3), (1, 2)])
def test_numbers_of_runs_in_each_form(runs):
    model, x = nn.Sequential(nn.Identity()), torch.ones(2)
    with gaff.edit(model, {"0": edits.when(edits.zero(), runs=runs)}):
        assert [int(model(x)[0]) for _ in range(4)] == [1, 0, 0, 1]


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (torch.tensor([300]), torch.uint8),
        (torch.tensor([-1]), torch.uint8),
        (torch.tensor([1e300], dtype=torch.float64), torch.float32),
    ],
)
def test_constants_out_of_range_are_refused(value, dtype):
    with pytest.raises(gaff.PlanError, match="holds numbers that torch.* has not"):
        edited(torch.ones(1, dtype=dtype), edits.replace(value))


def test_places_that_are_none():
    x = torch.ones(2, 2)
    assert torch.equal(edited(x, edits.at(keep.rows([]), edits.zero())), x)
    assert edited(torch.ones(2, 0), edits.patch(torch.ones(2, 0), rows={0: 1})).shape == (2, 0)
    model = nn.Sequential(nn.Identity())
    with gaff.capture(model, "0", reduce=keep.rows([])) as got:
        model(x)
    assert got["0"].shape == (0, 2)


def test_a_mean_of_whole_numbers_is_refused_and_rows_of_them_are_taken():
    given, reference = torch.zeros(1, 3, dtype=torch.long), torch.tensor([[1, 2, 3], [2, 3, 4]])
    with pytest.raises(gaff.PlanError, match="would lose its fraction"):
        edited(given, edits.ablate("mean", reference))
    assert edited(given, edits.ablate("resample", reference)).tolist()[0] in reference.tolist()


def test_noise_of_gradients_is_drawn_anew_for_each_backward_pass():
    torch.manual_seed(0)
    model, alone = nn.Linear(4, 4), torch.zeros(4, requires_grad=True)
    change = {"weight:grad": edits.noise(1.0), alone: edits.noise(1.0)}
    found = []
    for _ in range(2):
        drawn, apart = [], []
        with gaff.edit(model, change):
            y = model(torch.zeros(2, 4))
            for number in range(3):  # of one run
                model.zero_grad()
                y[number % 2].sum().backward(retain_graph=True)
                drawn.append(model.weight.grad)
            for _ in range(3):  # of none
                alone.grad = None
                (alone * 0).sum().backward()
                apart.append(alone.grad)
        found.append((drawn, apart))
    for drawn, apart in found:
        assert not any(torch.equal(drawn[0], other) for other in drawn[1:])
        assert not any(torch.equal(apart[0], other) for other in apart[1:])
    for one, other in zip(*found, strict=True):
        assert all(map(torch.equal, one, other))


def test_each_of_several_edits_at_one_site_draws_its_own_noise():
    """The first draws what it would draw alone; a recomputation and a second session draw the same again."""
    x = torch.zeros(4, 1000)
    alone = edited(x, edits.noise(1.0))
    two = edited(x, [edits.noise(1.0), edits.noise(1.0)])
    nested = edited(x, [[edits.noise(1.0), edits.noise(1.0)], edits.noise(1.0)])
    assert abs(float(two.std()) - math.sqrt(2)) < 0.05
    assert abs(float(nested.std()) - math.sqrt(3)) < 0.05
    assert torch.equal(edited(x, [edits.noise(1.0)]), alone)
    rows = edited(x, [edits.at(keep.rows(row), edits.noise(1.0)) for row in range(4)])
    assert len({float(row[0]) for row in rows}) == 4
    model = nn.Sequential(nn.Identity())
    with gaff.edit(model, {"0": edits.noise(1.0), "*": edits.noise(1.0)}):
        by_patterns = model(x)
    assert torch.equal(by_patterns - alone != alone, torch.ones_like(x, dtype=torch.bool))
    assert torch.equal(edited(x, [edits.noise(1.0), edits.noise(1.0)]), two)


def test_a_mapped_patch_and_functions_see_the_part_also_where_it_is_as_large_as_the_whole():
    x, value = torch.zeros(3, 2), torch.ones(3, 2)
    for order in ([2, 0, 1], [2, 0]):  # of three rows: all, or two
        part = value[: len(order)]
        patched = edited(x, edits.at(keep.rows(order), edits.patch(part, rows=0)))
        assert torch.equal(patched.sum(1), torch.tensor([0.0, 0.0, 2.0]))
    seen = []
    whole = torch.arange(6.0).view(3, 2)
    chain = [edits.replace(whole), lambda part: seen.append(part.clone()) or part]
    assert torch.equal(edited(x, edits.at(keep.rows([2, 0, 1]), chain)), whole)
    assert torch.equal(seen[0], whole[[2, 0, 1]])


def test_an_edit_that_its_user_switches_off_is_not_said_never_to_have_fired():
    model, x = nn.Sequential(nn.Linear(4, 4)), torch.randn(2, 4)
    for strength in (1.0, 0.0):
        with gaff.edit(model, {"0": edits.add(1.0)}) as editing:
            editing.strength(strength)
            model(x)
    assert "let pass 1 times, by when(), off() or a strength of 0" in editing.receipt.rows[0].reason
    with pytest.raises(gaff.NeverFiredError, match="let pass 1 times"):
        with gaff.edit(model, {"0": edits.when(edits.add(1.0), runs=7)}):
            model(x)


@pytest.mark.parametrize(("per", "dim"), [("tensor", 0), ("row", 0), ("unit", 1)])
def test_clip_of_single_sparse_elements(per, dim):
    values = torch.tensor([3.0, 4.0, 6.0, 8.0, 0.1])
    with torch.sparse.check_sparse_tensor_invariants(enable=True):
        sparse = torch.sparse_coo_tensor([[0, 0, 1, 1, 2], [0, 1, 1, 2, 2]], values, (3, 3))
    dense, other = sparse.to_dense().requires_grad_(), torch.arange(6.0).reshape(3, 2)
    sparse.requires_grad_()
    with gaff.edit({sparse: edits.clip(1.0, per=per, dim=dim), dense: edits.clip(1.0, per=per, dim=dim)}):
        torch.sparse.mm(sparse, other).sum().backward()
        (dense * (sparse.detach().to_dense() != 0) @ other).sum().backward()
    assert sparse.grad.is_sparse
    assert torch.allclose(sparse.grad.to_dense(), dense.grad)


def test_the_receipt_of_a_skip_does_not_say_that_nothing_changed():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    with gaff.edit(model, {"1": edits.skip()}) as editing:
        model(torch.randn(2, 4))
    assert "how much that changes is not known" in editing.receipt.rows[0].reason


@pytest.mark.filterwarnings(
    "ignore:The PyTorch API of MaskedTensors", "ignore:.*is not implemented in __torch_dispatch__"
)
def test_a_subclass_that_cannot_be_measured_is_refused():
    class Masks(nn.Module):
        def forward(self, x):
            return torch.masked.masked_tensor(x, x > 0)

    model = nn.Sequential(Masks())
    with (
        gaff.edit(model, {"0": gaff.edits.scale(0.5)}),
        pytest.raises(gaff.PlanError, match="a MaskedTensor does not have"),
    ):
        model(torch.randn(4, 6))


@pytest.mark.parametrize("edit", [edits.add, edits.project, lambda one: edits.replace(one.expand(1, WIDTH))])
def test_a_constant_is_as_it_is_now_however_it_was_written_to(edit):
    learnt = nn.Parameter(torch.eye(WIDTH)[0])
    optimizer = torch.optim.SGD([learnt], 1.0, fused=True)
    model, x = nn.Identity(), torch.ones(1, WIDTH, dtype=torch.bfloat16)
    with gaff.edit(model, {":output": edit(learnt.detach())}):
        model(x)
        learnt.grad = torch.eye(WIDTH)[0] - torch.eye(WIDTH)[1]
        optimizer.step()  # past the version counter
        fused = model(x)
        learnt.data.copy_(torch.eye(WIDTH)[2])
        written = model(x)
    for number, got in ((1, fused), (2, written)):
        with gaff.edit(model, {":output": edit(torch.eye(WIDTH)[number])}):
            assert torch.equal(got, model(x))


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0, dtype=torch.bfloat16))

    def forward(self, x):
        return self.scale * x


def test_clip_of_a_single_number_in_half_precision():
    model = Scaled()
    with gaff.edit(model, {"scale:grad": edits.clip(0.5)}):
        model(torch.tensor(3.0)).backward()
    assert (model.scale.grad, model.scale.grad.dtype) == (0.5, torch.bfloat16)


class Force(nn.Module):
    """Returns what its energy's gradient by its input is, or adds a loss of its own, which goes past its output."""

    def __init__(self, *, is_local):
        super().__init__()
        self.energy, self.is_local = nn.Linear(WIDTH, 1), is_local

    def forward(self, x):
        energy = self.energy(x).tanh().sum()
        if self.is_local:
            energy.backward(retain_graph=True)
            return self.energy(x)
        return torch.autograd.grad(energy, x, create_graph=True)[0]


@pytest.mark.parametrize("is_local", [False, True])
@pytest.mark.parametrize("edit", [edits.scale(2.0), edits.stop()], ids=["scale", "stop"])
def test_a_pass_that_a_forward_runs_itself_is_no_part_of_its_share(is_local, edit):
    def outcome(model, x):
        y = model(x)
        y.square().sum().backward()
        return y, model[0].bias.grad

    x, by_hand = torch.randn(3, WIDTH), 2.0 if edit.__class__.__name__ == "Scale" else 0.0
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Force(is_local=is_local))
    hooked = copy.deepcopy(model)
    hooked[1].register_full_backward_hook(lambda module, got, given: (got[0] * by_hand,))
    true = outcome(hooked, x)
    with gaff.edit(model, {"1:grad_input": edit}) as changed, gaff.capture(model, "1:grad_input") as got:
        assert all(map(torch.equal, outcome(model, x), true))
    assert [row.hits for row in changed.receipt.rows] == [1]
    assert len(got.all("1:grad_input")) == 1


class Region(nn.Module):
    """A forward that runs a pass of its own, in a checkpoint of a kind or in none."""

    def __init__(self, kind, *, is_local):
        super().__init__()
        self.lin, self.force, self.kind = nn.Linear(WIDTH, WIDTH), Force(is_local=is_local), kind

    def forward(self, x):
        hidden = self.lin(x)
        if self.kind is None:
            return self.force(hidden)
        return checkpoint(torch.enable_grad()(self.force.__call__), hidden, use_reentrant=self.kind)


@pytest.mark.parametrize("is_local", [False, True])
def test_a_pass_that_a_forward_runs_itself_in_a_checkpoint(is_local):
    """What the edit adds is the same in a reentrant one. In another the pass would not be repeated, and is refused."""
    plain, x = Region(None, is_local=is_local), torch.randn(3, WIDTH)
    doubled = {"force:grad_input": edits.scale(2.0)}

    def gradient(kind, edited):
        model = copy.deepcopy(plain)
        model.kind = kind
        with gaff.edit(model, edited) if edited else nullcontext():
            model(x).square().sum().backward()
        return model.lin.bias.grad

    added = [gradient(kind, doubled) - gradient(kind, {}) for kind in (None, True)]
    assert added[0].abs().sum() > 0
    torch.testing.assert_close(*added)
    with pytest.raises(gaff.ExactnessError, match="acts on a backward pass inside a checkpoint"):
        gradient(False, doubled)


class Left(nn.Module):
    def forward(self, x):
        self.kept = x * 3
        raise ValueError("left")


class Leaving(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin, self.left = nn.Linear(WIDTH, WIDTH), Left()

    def forward(self, x):
        hidden = self.lin(x)
        with suppress(ValueError):
            self.left(hidden)
        return hidden + self.left.kept


def test_the_share_of_a_module_that_was_left_by_an_exception_is_edited():
    model = Leaving()
    with gaff.edit(model, {"left:grad_input": edits.scale(2.0)}):
        model(torch.randn(3, WIDTH)).sum().backward()
    assert torch.equal(model.lin.bias.grad, torch.full((WIDTH,), 3 * (1 + 2 * 3.0)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mean_vector_takes_the_place_of_every_position(dtype):
    model, mean = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).to(dtype), torch.randn(4)
    with gaff.edit(model, {"0": gaff.edits.fill(mean)}):
        for length in (5, 1):  # as a prompt and a step of ``generate``
            out = model(torch.randn(2, length, 4, dtype=dtype))
            assert torch.equal(out, mean.to(dtype).expand(2, length, 4).relu())
    with gaff.edit(model, {"0": gaff.edits.at(gaff.keep.positions(1), gaff.edits.fill(mean))}):
        x = torch.randn(2, 3, 4, dtype=dtype)
        out = model(x)
    plain = model(x)
    assert torch.equal(out[:, 1], mean.to(dtype).expand(2, 4).relu())
    assert torch.equal(out[:, [0, 2]], plain[:, [0, 2]])


def test_a_fill_is_a_tensor_of_its_own_through_which_gradients_flow_to_the_vector():
    model, vector = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True)), torch.ones(4, requires_grad=True)
    with gaff.edit(model, {"0": gaff.edits.fill(vector)}):
        model(torch.randn(3, 4)).sum().backward()
    assert torch.equal(vector.grad, torch.full((4,), 3.0))
    assert torch.equal(vector.detach(), torch.ones(4))
    assert model[0].weight.grad is None


def test_what_does_not_broadcast_is_no_fill():
    model = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(gaff.PlanError, match=r"fill with shape \[3\] where \[2, 4\] passes"):
        with gaff.edit(model, {"0": gaff.edits.fill(torch.ones(3))}):
            model(torch.ones(2, 4))
    with pytest.raises(gaff.PlanError, match=r"edits\.fill\(tensor\) broadcasts"):
        with gaff.edit(model, {"0": gaff.edits.replace(torch.ones(4))}):
            model(torch.ones(2, 4))
