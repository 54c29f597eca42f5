"""Patches from another site: of another run, and of the very run that is edited."""

import gc
import random
import threading
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import gaff
from gaff import edits, keep
from gaff.errors import PlanError


class Blocks(nn.Module):
    """Five linear layers; ``around`` gives each block to a checkpoint, ``hand`` repeats by hand what a patch does."""

    def __init__(self):
        super().__init__()
        self.h = nn.ModuleList(nn.Linear(4, 4) for _ in range(5))

    def forward(self, x, around=None, hand=None, in_place=False):
        seen = {}
        for at, layer in enumerate(self.h):
            run = lambda x, layer=layer: layer(torch.tanh(x))  # noqa: E731
            x = run(x) if around is None else around(run, x)
            if hand is not None:
                x = hand(at, x, seen)
            seen[at] = x
            if in_place:
                x = x.mul_(2)
        return x


def put(at, source, *, detach=False):
    """The same as a patch from ``source`` at ``at``, written into the model."""

    def hand(here, x, seen):
        if here != at:
            return x
        return seen[source].detach().clone() if detach else seen[source].clone()

    return hand


def gradients(model, x, **options):
    y = model(x, **options)
    found = torch.autograd.grad(y.square().sum(), [x, *model.parameters()], allow_unused=True)
    return y, found


def assert_equal(one, other):
    assert torch.equal(one[0], other[0])
    for left, right in zip(one[1], other[1], strict=True):
        assert (left is None) == (right is None)
        assert left is None or torch.equal(left, right)


@pytest.fixture
def model():
    return Blocks()


@pytest.fixture
def x():
    return torch.randn(3, 4, requires_grad=True)


AROUND = {
    "bare": None,
    "checkpoint": lambda run, x: checkpoint(run, x, use_reentrant=False),
    "nested": lambda run, x: checkpoint(lambda x: checkpoint(run, x, use_reentrant=False), x, use_reentrant=False),
}


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("detach", [False, True])
def test_a_value_of_the_same_run_goes_in_as_if_the_model_had_used_it(model, x, around, detach):
    true = gradients(model, x, around=AROUND[around], hand=put(3, 1, detach=detach))
    with gaff.edit(model, {"h.3": edits.patch(source="h.1", detach=detach)}) as changed:
        found = gradients(model, x, around=AROUND[around])
    assert_equal(found, true)
    assert not torch.equal(found[0], model(x))
    assert changed.receipt.rows[0].hits == 1
    assert (found[1][0] is None) is detach  # nothing flows to what came before the source


def test_backward_may_come_after_the_session_and_all_in_one_checkpoint(model, x):
    def whole(x):
        return checkpoint(model, x, use_reentrant=False)

    true = gradients(model, x, hand=put(3, 1))
    with gaff.edit(model, {"h.3": edits.patch(source="h.1")}):
        y = whole(x)
    found = torch.autograd.grad(y.square().sum(), [x, *model.parameters()], allow_unused=True)
    for left, right in zip(found, true[1], strict=True):
        assert left is None or torch.equal(left, torch.zeros_like(left) if right is None else right)
    assert torch.equal(y, true[0])


def test_a_recomputation_keeps_no_graph_alive(model, x):
    with gaff.edit(model, {"h.3": edits.patch(source="h.1")}) as changed:
        for _ in range(2):
            given = x * 1
            y = model(given, around=AROUND["checkpoint"])
            alive = weakref.ref(given)
            del y, given
        gc.collect()
        assert alive() is None
    assert changed.receipt.armed == 0


def test_a_reentrant_checkpoint_needs_detach(model, x):
    def around(run, x):
        return checkpoint(run, x, use_reentrant=True)

    def hand(at, x, seen):
        return torch.cat([seen[1][:1].detach(), x[1:]]) if at == 3 else x

    with gaff.edit(model, {"h.3": edits.at(keep.rows(0), edits.patch(source="h.1", detach=True))}):
        y = model(x, around=around)
        y.square().sum().backward()
    found = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model(x, around=around, hand=hand).square().sum().backward()
    for left, p in zip(found, model.parameters(), strict=True):
        assert (left is None) == (p.grad is None)
        assert left is None or torch.equal(left, p.grad)
    message = (
        "h.3: it is patched from h.1 of the same run, which passed without grad mode or into a reentrant checkpoint"
    )
    with gaff.edit(model, {"h.3": edits.patch(source="h.1")}):
        with torch.no_grad():
            model(x)  # no gradient is asked for
        with pytest.raises(gaff.PlanError, match=message):
            model(x, around=around).sum().backward()

    def only_last(run, x, count=[0]):  # noqa: B006
        count[0] += 1
        return checkpoint(run, x, use_reentrant=True) if count[0] == 4 else run(x)

    with gaff.edit(model, {"h.3": edits.patch(source="h.1")}), pytest.raises(gaff.PlanError, match=message):
        model(x, around=only_last).sum().backward()


def test_the_source_must_come_first(model, x):
    for site, source in (("h.1", "h.3"), ("h.1", "h.1"), ("h.1:input", "h.1")):
        where = (
            f"{site}: it is patched from {source} of the same run, which has not passed before it in run 0, call 0: exp"
        )
        with pytest.raises(gaff.PlanError, match=where), gaff.edit(model, {site: edits.patch(source=source)}):
            model(x)
    with gaff.edit(model, {"h.1": edits.patch(source="h.1:input")}):
        found = model(x)
    true = torch.tanh(model.h[0](torch.tanh(x)))
    for at in (2, 3, 4):
        true = model.h[at](torch.tanh(true))
    assert torch.equal(found, true)
    with gaff.edit(model, {"h.3": edits.patch(source="h.1")}):  # another run's value is none of this one
        model(x)
        with pytest.raises(gaff.PlanError, match="h.3: it is patched from h.1 of the same run, which has not passed"):
            model.h[3](x)


def test_the_source_is_as_the_model_goes_on_with_it(model, x):
    def hand(at, x, seen):
        return x * 2 if at == 1 else seen[1].clone() if at == 2 else seen[2].clone() if at == 3 else x

    true = model(x, hand=hand)
    patches = {"h.1": edits.scale(2.0), "h.2": edits.patch(source="h.1"), "h.3": edits.patch(source="h.2")}
    with gaff.edit(model, patches):
        assert torch.equal(model(x), true)
    with gaff.edit(model, dict(reversed(list(patches.items())))):
        assert torch.equal(model(x), true)


def test_the_source_is_what_passed_also_where_it_is_overwritten(model):
    x = torch.randn(3, 4)
    with torch.no_grad(), gaff.capture(model, "h.1", clone=True) as got:
        model(x, in_place=True)
    with torch.no_grad(), gaff.edit(model, {"h.3": edits.patch(source="h.1")}):
        with gaff.capture(model, "h.3", clone=True) as seen:
            model(x, in_place=True)
    assert torch.equal(seen["h.3"], got["h.1"])
    inner, given = nn.Sequential(nn.Identity(), nn.ReLU(inplace=True), nn.Identity()), torch.randn(3)
    passed = given.clone()
    with gaff.edit(inner, {"2": edits.patch(source="0:input")}):
        assert torch.equal(inner(given), passed)


class Loop(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.block, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        x = self.first(x)
        for _ in range(3):
            x = self.last(self.block(x))
        return x


def test_calls_go_with_calls_of_the_same_number_or_the_one_that_is_named(x):
    model = Loop()
    with gaff.edit(model, {"last": edits.patch(source="block")}):
        found = model(x)
    one = model.block(model.block(model.block(model.first(x))))
    assert torch.equal(found, one)
    with gaff.edit(model, {"last": edits.patch(source="first@0")}):
        assert torch.equal(model(x), model.first(x))
    with gaff.edit(model, {"block@2": edits.patch(source="block@0")}), gaff.capture(model, "block") as got:
        model(x)
    assert torch.equal(got["block@2"], got["block@0"])
    with pytest.raises(
        gaff.PlanError, match=r"run 0, call 1; it passed with calls \[0\], say which, as first@n: expected"
    ):
        with gaff.edit(model, {"last": edits.patch(source="first")}):
            model(x)


def test_places_runs_and_other_edits(model, x):
    with gaff.capture(model, "h.1", "h.3") as bare:
        model(x)
    place = [edits.at(keep.rows(0), edits.patch(source="h.1")), edits.patch(source="h.1", rows={2: 0})]
    with gaff.edit(model, {"h.3": place}), gaff.capture(model, "h.3") as got:
        model(x)
    assert torch.equal(got["h.3"], torch.stack([bare["h.1"][0], bare["h.3"][1], bare["h.1"][0]]))
    sometimes = edits.chain(edits.when(edits.patch(source="h.1"), runs=1), edits.scale(1.0))
    with gaff.edit(model, {"h.3": sometimes}), gaff.capture(model, "h.3") as got:
        gradients(model, x, around=AROUND["checkpoint"])
        gradients(model, 2 * x, around=AROUND["checkpoint"])
    assert torch.equal(got.run(0)["h.3"], bare["h.3"])
    assert torch.equal(got.run(1)["h.3"], got.run(1)["h.3"])
    with gaff.edit(model, {"h.3": edits.patch(source="h.1")}) as changed, gaff.capture(model, "h.3") as got:
        changed.strength(0.5)
        model(x)
    assert torch.equal(got["h.3"], torch.lerp(bare["h.3"], bare["h.1"], 0.5))


def test_nothing_is_kept_when_the_run_has_ended(model):
    with torch.no_grad(), gaff.edit(model, {"h.3": edits.patch(source="h.1")}) as changed:
        model(torch.randn(3, 4))
        [passed] = changed._sources._passed.values()
        assert not passed._values
        with pytest.raises(RuntimeError):
            model(torch.randn(3, 4), hand=lambda at, x, seen: x[:, :2] if at == 1 else x)
        assert not passed._values


def test_other_threads_have_their_own_values(model):
    inputs, found = [torch.randn(3, 4) for _ in range(4)], {}
    handle = gaff.edit(model, {"h.3": edits.patch(source="h.1")}).attach()

    def work(at):
        with torch.no_grad():
            found[at] = model(inputs[at])

    threads = [threading.Thread(target=work, args=(at,)) for at in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    handle.remove()
    for at in range(4):
        assert torch.equal(found[at], model(inputs[at], hand=put(3, 1)))


class Tuples(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.end = nn.LSTM(4, 4, batch_first=True), nn.Identity()

    def forward(self, x):
        return self.end(self.lstm(x)[0].relu())


def test_sources_inside_structures_inputs_and_ops():
    model, x = Tuples(), torch.randn(2, 3, 4)
    whole = model.lstm(x)[0]
    for source, true in (("lstm:output[0]", whole), ("end:input", whole.relu()), ("/relu#0", whole.relu())):
        with gaff.edit(model, {"end": [edits.zero(), edits.patch(source=source)]}):
            assert torch.equal(model(x), true)
    message = (
        r"lstm: its value is a tuple of 2, a patch takes one tensor of it: lstm:output\[0\], lstm:output\[1\]\[0\]"
    )
    with pytest.raises(gaff.SiteError, match=message), gaff.edit(model, {"end": edits.patch(source="lstm")}):
        model(x)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"h.3": {"source": "h.9"}}, gaff.SiteError, "no module 'h.9' in Blocks"),
        ({"h.3": {"source": "h.*"}}, gaff.SiteError, "is a pattern: expected one exact site"),
        (
            {"h.3": {"source": "h.1:grad_output"}},
            gaff.PlanError,
            "h.3: patched from h.1:grad_output of the same run: exp",
        ),
        (
            {"h.3:grad_output": {"source": "h.1"}},
            gaff.PlanError,
            "h.3:grad_output: patched from h.1 of the same run: exp",
        ),
        ({"h.3.weight:param": {"source": "h.1"}}, gaff.PlanError, "expected outputs and inputs, whose values pass"),
        ({"h.3": {"source": "/tanh"}}, gaff.PlanError, "h.3: patched from /tanh, which may be several ops: .*/tanh#0"),
        (
            {"h.3": {}},
            gaff.PlanError,
            "patch was given nothing to patch from: expected a tensor, a capture, or source=",
        ),
        ({"h.3": {"source": "h.1", "run": 1}}, gaff.PlanError, "patch was given nothing to patch from"),
        (
            {"h.3": {"values": "h.1"}},
            gaff.PlanError,
            r"was given the address 'h.1' first: expected patch\(source='h.1'\)",
        ),
        ({"h.3": {"source": 3}}, gaff.PlanError, "source=3 is no address: expected one exact site as text"),
        ({"h.3": {"source": "h.1", "detach": 1}}, gaff.PlanError, "detach=1 is no truth value"),
        (
            {"h.3": {"values": torch.ones(1), "source": "h.1"}},
            gaff.PlanError,
            "patch has a tensor and source='h.1': expect",
        ),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_installed(model, changes, error, message):
    with pytest.raises(error, match=message):
        gaff.edit(model, {site: edits.patch(**how) for site, how in changes.items()})
    with pytest.raises(gaff.PlanError, match="a patch from 'h.1' of the same run acts in a session only"):
        edits.patch(source="h.1").change(torch.ones(1), edits.Event())


def test_another_site_of_another_run(model, x):
    with gaff.capture(model, "h.1", graph=True) as got:
        model(x)
    with gaff.edit(model, {"h.3": edits.patch(got, source="h.1@0")}), gaff.capture(model, "h.3") as seen:
        y = model(torch.randn(3, 4))
    assert torch.equal(seen["h.3"], got["h.1"])
    assert torch.autograd.grad(y.sum(), model.h[0].weight, allow_unused=True, retain_graph=True)[0] is not None
    with gaff.edit(model, {"h.3": edits.patch(got, source=gaff.Site("h.1"), detach=True)}):
        y = model(torch.randn(3, 4))
    assert torch.autograd.grad(y.sum(), model.h[0].weight, allow_unused=True)[0] is None
    with gaff.edit(model, {"h.3": edits.patch(got, source="h.2")}):
        with pytest.raises(gaff.SiteError, match="h.3: 'h.2@0' was not captured: expected one of h.1"):
            model(x)


def test_plans_with_a_source_are_saved(model, x, tmp_path):
    plan = gaff.Plan.edit({"h.3": edits.at(keep.rows(0), edits.patch(source="h.1@0:output", detach=True))})
    plan.save(tmp_path / "p.json")
    again = gaff.Plan.load(tmp_path / "p.json")
    assert again.digest == plan.digest
    assert "patch(source='h.1@0', detach=True)" in str(again)
    with gaff.edit(model, plan):
        true = model(x)
    with gaff.edit(model, again):
        assert torch.equal(model(x), true)
    assert plan.digest == again.digest  # a session leaves the plan as it was


def test_compiled_models_run_eagerly_for_it(model, x):
    true = gradients(model, x, hand=put(3, 1))
    compiled = torch.compile(model, backend="eager")
    compiled(x)
    with gaff.edit(compiled, {"h.3": edits.patch(source="h.1")}) as changed:
        y = compiled(x)
    assert_equal((y, torch.autograd.grad(y.square().sum(), [x, *model.parameters()], allow_unused=True)), true)
    assert changed.receipt.notes


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda got: edits.at(keep.rows([1, 2]), edits.patch(got, rows={2: 0})), "its numbers count in that part"),
        (lambda got: edits.patch(got, rows=[3, -1]), "names a place twice"),
        (lambda got: edits.patch(got, rows={3: 1, -1: 2}), "names a place twice"),
    ],
)
def test_places_that_cannot_be_meant_are_refused(edit, message):
    model, given = nn.Sequential(nn.Identity()), torch.randn(4, 3)
    with gaff.capture(model, "0") as got:
        model(torch.randn(4, 3))
    with pytest.raises(PlanError, match=message), gaff.edit(model, {"0": edit(got)}):
        model(given)


@pytest.mark.parametrize(("place", "here"), [([2, 3], 0), ([3, 0, 2], 2), (slice(1, 4), 1), (2, 0)])
def test_rows_of_a_patch_count_in_the_part_at_a_place(place, here):
    model, given = nn.Sequential(nn.Identity()), torch.zeros(4, 3)
    with gaff.capture(model, "0") as got:
        model(torch.arange(4.0)[:, None].expand(4, 3) + 1)
    with gaff.edit(model, {"0": edits.at(keep.rows(place), edits.patch(got, rows={here: 1}))}):
        assert model(given)[:, 0].tolist() == [0, 0, 2, 0]


def test_one_clean_example_goes_into_another_position_of_each_row():
    model, given = nn.Sequential(nn.Identity()), torch.zeros(3, 3, 2)
    with gaff.capture(model, "0") as got:
        model(torch.arange(3.0)[None, :, None].expand(1, 3, 2) + 1)
    places = [edits.at(keep.rows(n), edits.patch(got, positions=n)) for n in range(3)]
    with gaff.edit(model, {"0": places}):
        assert torch.equal(model(given)[..., 0], torch.diag(torch.tensor([1.0, 2.0, 3.0])))


def test_values_keep_their_places_however_places_nest():
    draw = random.Random(0)
    for _ in range(300):
        rows, positions = draw.choice([1, 2, 3]), draw.choice([1, 2, 3, 5])
        x, whole = torch.randn(rows, positions, 3), torch.arange(rows * positions * 4).view(rows, positions, 4)
        model = nn.Linear(3, 4)
        parts, places = [whole], []
        for _ in range(draw.choice([1, 2, 3])):
            if parts[-1].dim() == 3 and not parts[-1].shape[-1] % 2 and draw.random() < 0.2:
                places.append(keep.heads(draw.choice([[0], [1], [1, 0]]), 2))
            else:
                dim = draw.randrange(parts[-1].dim())
                chosen = draw.sample(range(parts[-1].shape[dim]), draw.randint(1, parts[-1].shape[dim]))
                places.append(keep.rows(draw.choice([chosen, chosen[0]]), dim=dim))
            parts.append(places[-1](parts[-1]))
        values = torch.randn(draw.choice(parts).shape)
        level = max(at for at, part in enumerate(parts) if part.shape == values.shape)
        while level and parts[level - 1].shape == values.shape:
            level -= 1  # what has the shape of several is of the outermost of them
        given = values
        for place in places[level:]:
            given = place(given)
        edit = draw.choice([edits.patch, edits.replace])(values)
        for place in reversed(places):
            edit = edits.at(place, edit)
        with torch.no_grad(), gaff.edit(model, {":output": edit}):
            edited = model(x).flatten()
        want = model(x).detach().flatten()
        want[parts[-1].flatten()] = given.flatten()
        assert torch.equal(edited, want), (places, values.shape, whole.shape)


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1], [1, 0]])
def test_rows_in_another_order_get_their_own_values_whatever_lies_inside(order):
    model, clean, corrupt = nn.Linear(3, 4), torch.randn(3, 5, 3), torch.randn(3, 5, 3)
    mask = torch.rand(5, 4) < 0.5
    with gaff.capture(model, ":output") as got:
        model(clean)
    theirs, ours = model(clean).detach(), model(corrupt).detach()
    cases = [
        (edits.patch(got, positions=2), (slice(None), [2])),
        (edits.patch(got, positions={2: 1}), (slice(None), [2])),
        (edits.at(mask, edits.patch(got)), (slice(None), mask)),
        (edits.at(keep.positions([4, 1, 2, 3, 0]), edits.at(keep.heads(0, 2), edits.patch(got))),
         (slice(None), slice(None), slice(2))),
        (edits.when(edits.at(keep.heads(1, 2), edits.replace(theirs)), runs=0),
         (slice(None), slice(None), slice(2, 4))),
    ]  # fmt: skip
    for number, (edit, at) in enumerate(cases):
        want, given = ours.clone(), theirs[:, [1]] if number == 1 else theirs[at]
        want[at] = given
        want = torch.stack([want[row] if row in order else ours[row] for row in range(3)])
        with torch.no_grad(), gaff.edit(model, {":output": edits.at(keep.rows(order), edit)}):
            assert torch.equal(model(corrupt), want), number


def test_a_source_that_lies_in_the_callers_memory_is_as_it_was_when_it_passed():
    model, x = nn.Sequential(nn.Identity(), nn.ReLU(inplace=True), nn.Linear(4, 4)), torch.randn(3, 4)
    expected = model[2](x.clone())
    with gaff.edit(model, {"2:input": edits.patch(source="0")}):
        assert torch.equal(model(x), expected)


def test_a_patch_of_somebody_else_around_a_checkpoint_acts_and_stays(monkeypatch):
    from torch.utils.checkpoint import _CheckpointFrame as Frame

    called, plain = [], Frame.__init__

    def theirs(self, *args, **kwargs):
        called.append(1)
        plain(self, *args, **kwargs)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(2, 2)

        def forward(self, x):
            return checkpoint(self.lin, x, use_reentrant=False)

    model, x = Net(), torch.ones(1, 2, requires_grad=True)
    with gaff.edit(model, {"lin.weight:param": edits.scale(2.0)}):
        model(x).sum().backward()
    monkeypatch.setattr(Frame, "__init__", theirs)
    with gaff.edit(model, {"lin.weight:param": edits.scale(2.0)}):
        model(x).sum().backward()
    assert called == [1]
    assert Frame.__init__ is theirs


def test_a_patch_that_was_put_over_ours_and_stays_does_not_make_a_checkpoint_count_twice(monkeypatch):
    from torch.utils.checkpoint import _CheckpointFrame as Frame

    from gaff.compat import checkpoints

    before, wrapped = Frame.__init__, []

    def wrap(function):
        wrapped.append(function)
        return function

    end = checkpoints.follow_regions(wrap)
    ours = Frame.__init__
    monkeypatch.setattr(Frame, "__init__", lambda self, *args, **kwargs: ours(self, *args, **kwargs))
    end()  # ours stays below theirs
    assert Frame.__init__ not in (before, ours)
    end = checkpoints.follow_regions(wrap)
    x = torch.ones(2, requires_grad=True)
    checkpoint(torch.sin, x, use_reentrant=False)
    end()
    assert len(wrapped) == 1
    monkeypatch.undo()
    Frame.__init__ = before
