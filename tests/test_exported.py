"""Exported graphs: the same addresses as in the model that they were made from, and the same numbers."""

import copy
import gc
import io
import threading
import weakref

import pytest
import torch
from torch import nn

import gaff
from gaff.errors import PlanError, SiteError

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*isinstance.treespec, LeafSpec.*",
    "ignore:The .grad attribute of a Tensor",
    "ignore:You are calling torch.compile inside torch.export region",
)
SCALE = {"scale": torch.tensor(2.0)}
WAYS = ("export", "strict", "decomposed", "dynamic")


class Block(nn.Module):
    def __init__(self, *, in_place=True):
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.fc, self.out = nn.Linear(4, 6), nn.Linear(6, 4)
        self.act = nn.ReLU(inplace=in_place)

    def forward(self, x):
        return x + self.out(self.act(self.fc(self.norm(x))))


class Wrapped(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        return self.inner(x)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block(in_place=bool(number % 2)) for number in range(3))
        self.twice = Block()
        self.wrapped = Wrapped()
        self.drop = nn.Dropout(0.5)
        self.same = nn.Identity()
        self.register_buffer("shift", torch.ones(4))

    def forward(self, x, *, scale=None):
        for block in self.blocks:
            x = block(x)
        x = self.same(self.drop(self.twice(self.twice(x))))
        x = self.wrapped(x) + self.shift
        return {"out": x if scale is None else x * scale, "mean": x.mean()}


def data(rows=3):
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(1))


def program(model, way="export", rows=3):
    shapes = {"x": {0: torch.export.Dim.DYNAMIC}, "scale": None} if way == "dynamic" else None
    made = torch.export.export(model, (data(rows),), SCALE, strict=way == "strict", dynamic_shapes=shapes)
    return (made.run_decompositions() if way == "decomposed" else made).module()


@pytest.fixture
def net():
    return Net().eval()


@pytest.fixture(autouse=True)
def _fresh():
    yield
    torch._dynamo.reset()  # torch 2.15 counts an export as compiled code


def run(model, rows=3):
    return model(data(rows), **SCALE)


@pytest.mark.parametrize("way", WAYS)
def test_values_and_gradients_are_those_of_the_model(net, way):
    exported, rows = program(net, way), 5 if way == "dynamic" else 3
    calls = "wrapped", "wrapped.inner", "blocks.0", "blocks.1", "blocks.1.act", "blocks.2.norm", ":output[out]"
    sites = [
        *calls,
        *(f"{site}:grad_output" for site in calls[:-1]),
        "blocks.0.fc.weight:grad",
        "blocks.1.fc.bias:param",
    ]
    found = []
    for model in (net, exported):
        net.zero_grad()
        exported.zero_grad()
        with gaff.capture(model, *sites) as got:
            sum(value.sum() for value in run(model, rows).values()).backward()
        found.append(got)
    for site in sites:
        if way == "decomposed":  # other operations: they round differently
            torch.testing.assert_close(found[1][site], found[0][site])
        else:
            assert torch.equal(found[1][site], found[0][site]), site


@pytest.mark.parametrize("way", ["export", "decomposed"])
def test_what_the_graph_returns_is_bit_for_bit_the_same_while_it_is_looked_at(net, way):
    exported = program(net, way)
    bare = run(exported)
    with gaff.capture(exported, "**"):
        watched = run(exported)
    assert all(torch.equal(watched[key], bare[key]) for key in bare)
    assert "forward" not in vars(exported)


def test_calls_of_a_shared_module_are_counted(net):
    exported = program(net)
    for model in (net, exported):
        with gaff.capture(model, "twice", "twice.act") as got:
            run(model)
        assert len(got.all("twice")) == len(got.all("twice.act")) == 2
    assert not torch.equal(got["twice@0"], got["twice@1"])


def test_ops_have_the_addresses_of_the_model(net):
    exported, found = program(net), []
    for model in (net, exported):
        with gaff.capture(model, "blocks.1.fc/linear", "blocks.1/add#0", "/add#0") as got:
            run(model)
        found.append(got)
    for site in ("blocks.1.fc/linear#0", "/add#0"):
        assert torch.equal(found[0][site], found[1][site])


def test_ops_have_the_lines_of_the_model(net):
    lines = [{row.site: row.cls for row in _ops_of(model)} for model in (net, program(net))]
    for site in ("blocks.0.fc/linear#0", "blocks.1/add#0", "/mul#0"):
        assert lines[0][site] == lines[1][site]


def _ops_of(model):
    return [row for row in gaff.trace(model, data(), **SCALE, ops=True).rows if "/" in row.site]


def test_edits_of_values_gradients_and_parameters_act_as_on_the_model(net):
    changes = {
        "blocks.0": gaff.edits.scale(0.5),
        "blocks.1.act": gaff.edits.clamp(high=0.1),
        "wrapped:grad_output": gaff.edits.scale(3.0),
        "blocks.2.out.weight:param": gaff.edits.scale(0.0),
    }
    exported, found = program(net), []
    for model in (net, exported):
        model.zero_grad()
        with gaff.edit(model, changes) as changed:
            run(model)["out"].sum().backward()
        assert [row.hits for row in changed.receipt.rows] == [1, 1, 1, 1]
        found.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for name, gradient in found[0].items():
        other = found[1][name]
        assert (gradient is None and other is None) or torch.equal(gradient, other), name


def test_take_stops_early_and_trace_shows_the_tree(net):
    exported = program(net)
    taken = gaff.take(exported, "blocks.1")(data(), **SCALE)
    with gaff.capture(net, "blocks.1") as got:
        run(net)
    assert torch.equal(taken["blocks.1"], got["blocks.1"])
    shown, whole = str(gaff.trace(exported, data(), **SCALE)), str(gaff.trace(net, data(), **SCALE))
    assert "blocks.1.act" in shown
    assert "blocks.1.fc" in whole
    assert "<Block>" in str(gaff.sites(exported))


def test_patterns_by_class_and_by_path(net):
    exported = program(net)
    with gaff.capture(exported, "**<Linear>") as got, gaff.capture(net, "**<Linear>") as want:
        run(exported), run(net)
    assert [row.site for row in got.receipt.rows] == [row.site for row in want.receipt.rows]


def test_a_nan_is_found_in_the_module_that_made_it(net):
    exported = program(net)
    with torch.no_grad():
        exported.blocks._modules["1"].fc.weight[0, 0] = float("inf")
    with pytest.raises(gaff.NonFiniteError, match=r"blocks\.1"), gaff.guard(exported):
        run(exported)


def test_watch_has_a_row_for_each_module(net, tmp_path):
    net.drop.p, sites = 0.0, []
    net.train()
    for name, model in (("net", copy.deepcopy(net)), ("exported", program(net))):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with gaff.watch(model, optimizer, out=tmp_path / name, every=1):
            for _ in range(2):
                run(model)["out"].square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        record = gaff.load(tmp_path / name)
        assert "forward" not in vars(model)
        assert record.series("blocks.1.act", "dead").values  # what is told of rectifiers
        sites.append({site: record.series(site, "norm").values for site in record.sites})
    for site in ("blocks.1", "blocks.0.fc.weight:grad", "blocks.1.fc:grad_output"):
        assert sites[1][site] == pytest.approx(sites[0][site])


def test_a_graph_in_a_larger_model_and_inside_another_session(net):
    exported = program(net)

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = exported, nn.Linear(4, 2)

        def forward(self, x):
            return self.head(self.body(x, **SCALE)["out"])

    outer = Outer()
    first = gaff.capture(outer, "body.blocks.1", "head")
    with gaff.capture(exported, "blocks.1") as inner:
        first.__enter__()
        outer(data())
    outer(data())  # the first one is still open
    first.__exit__(None, None, None)
    assert torch.equal(first.run(0)["body.blocks.1"], inner["blocks.1"])
    assert torch.equal(first.run(1)["body.blocks.1"], inner["blocks.1"])
    assert "forward" not in vars(exported)


def test_each_thread_has_a_run_of_its_own(net):
    exported, found = program(net, "dynamic"), {}
    want = {rows: run(exported, rows)["out"].detach() for rows in range(2, 8)}

    def work(rows):
        for _ in range(20):
            found[rows] = run(exported, rows)["out"].detach()

    with gaff.capture(exported, "blocks.1", threads="all"):
        threads = [threading.Thread(target=work, args=(rows,)) for rows in want]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert all(torch.equal(found[rows], want[rows]) for rows in want)


def test_copies_and_pickles_made_during_a_session_are_bare(net):
    exported = program(net)
    with gaff.capture(exported, "blocks.1") as got:
        copied = copy.deepcopy(exported)
        with torch.no_grad():
            copied.blocks._modules["1"].out.bias.add_(1.0)
        run(copied)
        file = io.BytesIO()
        torch.save(exported.state_dict(), file)
        run(exported)
    assert len(got.all("blocks.1")) == 1
    assert "forward" not in vars(copied) or vars(copied)["forward"].__self__ is copied
    assert not torch.equal(run(copied)["out"], run(exported)["out"])


def test_nothing_keeps_a_graph_alive(net):
    exported = program(net)
    with gaff.capture(exported, "blocks.1") as got:
        run(exported)
    alive = weakref.ref(exported)
    del exported, got
    gc.collect()
    assert alive() is None


def test_an_exception_in_the_middle_leaves_nothing(net):
    exported = program(net)

    def fail(value):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"), gaff.edit(exported, {"blocks.1": fail}):
        run(exported)
    assert "forward" not in vars(exported)
    with gaff.capture(exported, "blocks.1") as got:
        run(exported)
    assert len(got.all("blocks.1")) == 1


def test_compiled_it_runs_eagerly_and_says_so(net):
    torch._dynamo.reset()
    exported = program(net)
    compiled = torch.compile(exported, backend="eager")
    run(compiled)
    with gaff.capture(compiled, "blocks.1") as got:
        run(compiled)
    assert "an exported graph runs node by node" in got.receipt.notes[0]
    with gaff.capture(net, "blocks.1") as want:
        run(net)
    assert torch.equal(got["blocks.1"], want["blocks.1"])
    torch._dynamo.reset()


def test_arguments_of_modules_are_refused(net):
    exported = program(net)
    words = "does not keep what its modules were called with"
    for site in ("blocks.1:input", "blocks.1:grad_input", "blocks.1:input_grad"):
        with pytest.raises(PlanError, match=words), gaff.capture(exported, site):
            pass
    with pytest.raises(PlanError, match=words), gaff.edit(exported, {"blocks.1": gaff.edits.skip()}):
        pass
    with gaff.capture(exported, ":input") as got:  # the graph itself knows
        run(exported)
    assert torch.equal(got[":input"], data())


def test_a_module_without_operations_is_named(net):
    with pytest.raises(SiteError, match="an exported graph knows only modules that ran operations"):
        gaff.capture(program(net), "same")


class Odd(nn.Module):
    """Modules that a graph cannot tell, or cannot let be edited."""

    class Pair(nn.Module):
        def forward(self, x):
            return x + 1, x * 2

    class Same(nn.Module):
        def forward(self, x):
            return x.to(torch.float32)

    class Doubled(nn.Module):
        def forward(self, x):
            return x.mul_(2)

    class Norm(nn.Module):
        def forward(self, x):
            x = x.to(torch.float32)
            return x / x.norm()

    def __init__(self):
        super().__init__()
        self.pair, self.same, self.doubled, self.norm = Odd.Pair(), Odd.Same(), Odd.Doubled(), Odd.Norm()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        a, b = self.pair(x)
        x = self.fc(a) + b
        x = x + self.norm(x)
        x = x + self.fc(self.same(x))
        x = x + self.fc(self.doubled(x))
        with torch.no_grad():
            return x + self.fc(x)


def test_what_a_graph_cannot_tell_is_said():
    exported = torch.export.export(Odd(), (data(),)).module()
    with pytest.raises(SiteError, match="pair: .* 2 values leave it, and the graph keeps no structure"):
        gaff.capture(exported, "pair")
    with pytest.raises(
        SiteError, match="fc: .* a call of it is in 'submod_1', a graph inside this one: see submod_1.fc"
    ):
        gaff.capture(exported, "fc")
    with gaff.capture(exported, "*", "submod_1.fc") as got:
        exported(data())
    rows = {row.site: row for row in got.receipt.rows}
    assert (rows["pair"].fired, rows["pair"].skipped) == (0, 1)
    assert "2 values leave it" in rows["pair"].reason
    assert rows["norm"].fired == rows["same"].fired == rows["submod_1.fc"].fired == 1
    with pytest.raises(PlanError, match="pair cannot be edited in an exported graph: 2 values leave it"):
        with gaff.edit(exported, {"p*": gaff.edits.scale(2.0)}):
            pass


@pytest.mark.parametrize("path", ["same", "doubled"])
def test_what_returns_the_tensor_that_it_was_given_is_told_and_not_edited(path):
    model = Odd()
    exported, found = torch.export.export(model, (data(),)).module(), []
    for one in (model, exported):
        with gaff.capture(one, path) as got:
            one(data())
        found.append(got[path])
    assert torch.equal(*found)
    with pytest.raises(PlanError, match=f"{path} cannot be edited .* the tensor that it was given, which others use"):
        with gaff.edit(exported, {path: gaff.edits.scale(2.0)}):
            pass


def test_a_module_that_converts_nothing_can_be_edited():
    model = Odd()
    exported, found = torch.export.export(model, (data(),)).module(), []
    for one in (model, exported):
        with gaff.edit(one, {"norm": gaff.edits.scale(2.0)}):
            found.append(one(data()))
    assert torch.equal(*found)


@pytest.mark.slow
def test_buffers_that_a_module_updates_do_not_leave_it():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 2))
    x = torch.randn(5, 3, 6, 6)
    exported, found = torch.export.export(model, (x,)).run_decompositions().module(), []
    for one in (model, exported):
        with gaff.capture(one, "1", "1.running_mean:buffer") as got:
            one(x)
        found.append(got["1"])
    torch.testing.assert_close(*found)
    torch.testing.assert_close(exported.get_buffer("1.running_mean"), model[1].running_mean)


class Ignored(nn.Module):
    """Modules that return their argument, as torch has it: uses of the one are uses of the other in a graph."""

    def __init__(self, how):
        super().__init__()
        self.body, self.out, self.how = Of(how), nn.Linear(4, 4), how
        self.first = nn.Linear(4, 4)

    def forward(self, x):
        h = self.first(x)
        return h + self.out(self.body(h))


class Of(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.how = how

    def forward(self, x):
        return self.how(x)


@pytest.mark.slow
@pytest.mark.parametrize("is_decomposed", [False, True])
@pytest.mark.parametrize(
    "how",
    [lambda x: x.type_as(x), lambda x: x.flatten(1), lambda x: +x, lambda x: x.relu_(), torch.atleast_2d],
    ids=["type_as", "flatten", "positive", "relu_", "atleast_2d"],
)
def test_an_edit_never_reaches_others_who_use_the_argument(how, is_decomposed):
    model = Ignored(how)
    made = torch.export.export(model, (data(),))
    exported = (made.run_decompositions() if is_decomposed else made).module()
    with gaff.edit(model, {"body": gaff.edits.scale(0.5)}):
        want = model(data())
    refusal, found = "", want
    try:
        with gaff.edit(exported, {"body": gaff.edits.scale(0.5)}):
            found = exported(data())
    except gaff.GaffError as error:
        refusal = str(error)
    assert not refusal or "exported graph" in refusal  # by name
    torch.testing.assert_close(found, want)


def test_a_view_of_what_was_written_in_place_is_not_guessed_after_decompositions():
    model = nn.Sequential(Of(_view_of_what_is_written), nn.Linear(3, 2))
    made = torch.export.export(model, (data(),))
    with gaff.capture(model, "0") as want:
        model(data())
    with gaff.capture(plain := made.module(), "0") as got:
        plain(data())
    assert torch.equal(got["0"], want["0"])
    with pytest.raises(SiteError, match="does not tell which view of that it returned"):
        gaff.capture(made.run_decompositions().module(), "0")


def _view_of_what_is_written(x):
    y = x * 2
    z = y.t()
    y.relu_()
    return z


class Twins(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.b = self.a

    def forward(self, x):
        return self.b(self.a(x))


@pytest.mark.parametrize("strict", [False, True])
def test_one_module_under_two_names_is_told_with_all_of_its_calls_or_not_at_all(strict):
    model = Twins()
    exported, calls = torch.export.export(model, (data(),), strict=strict).module(), []
    for site in ("a", "a.0", "a.1"):
        try:
            with gaff.capture(exported, site) as got:
                exported(data())
        except SiteError:
            continue
        else:
            calls.append(len(got.all(site)))
    assert set(calls) <= {2}


def test_a_module_called_in_a_branch_that_names_none_is_not_told():
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x):
            x = self.fc(x)
            return torch.cond(x.sum() > 0, lambda x: self.fc(x), lambda x: x.clone(), (x,))

    with pytest.raises(SiteError, match="fc: .* a graph inside this one"):
        gaff.capture(torch.export.export(Branches(), (data(),)).module(), "fc")


def test_what_a_pass_has_added_without_saying_where_is_no_modules_output(net):
    exported = program(net)

    def pattern(x):
        return torch.ops.aten.relu_.default(x)

    def replacement(x):
        return torch.ops.aten.tanh.default(x)

    torch.fx.subgraph_rewriter.replace_pattern(exported, pattern, replacement)
    with pytest.raises(SiteError, match=r"blocks\.1\.fc: .* what follows it belongs to no module"):
        gaff.capture(exported, "blocks.1.fc")


def test_hooks_of_the_user_on_the_graph_come_before_ours(net):
    exported, found = program(net), []
    for model in (net, exported):
        before = list(model._forward_hooks)
        handle = model.register_forward_hook(lambda module, args, output: {**output, "out": output["out"] * 2})
        with gaff.capture(model, ":output[out]") as got:
            found += [run(model)["out"], got[":output[out]"]]
        handle.remove()
        assert list(model._forward_hooks) == before
    assert all(torch.equal(found[0], other) for other in found[1:])


def test_hooks_on_all_modules_are_told(net, tmp_path):
    exported = program(net)
    optimizer = torch.optim.SGD(exported.parameters(), lr=0.1)
    with gaff.watch(exported, optimizer, out=tmp_path / "run", every=1), gaff.capture(exported, "blocks.1") as got:
        run(exported)
    told = "hooks of others on all modules saw those of the exported graph too"
    assert told not in got.receipt.notes  # ours are no others'
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, output: None)
    with gaff.capture(exported, "blocks.1") as got:
        run(exported)
    handle.remove()
    assert told in got.receipt.notes


def test_a_graph_with_a_forward_of_somebody_else_has_no_modules(net):
    exported = program(net)
    own = exported.forward
    exported.forward = lambda *args, **kwargs: {key: value * 10 for key, value in own(*args, **kwargs).items()}
    with pytest.raises(SiteError, match=r"blocks\.1\.fc"):
        gaff.capture(exported, "blocks.1.fc")
    with gaff.capture(exported, ":output[out]") as got:
        assert torch.equal(run(exported)["out"], run(net)["out"] * 10)
    assert torch.equal(got[":output[out]"], run(net)["out"] * 10)


def test_a_graph_that_is_changed_while_it_is_looked_at(net, tmp_path):
    exported = program(net)
    optimizer = torch.optim.SGD(exported.parameters(), lr=0.1)
    with gaff.watch(exported, optimizer, out=tmp_path / "run", every=1):
        for step in range(3):
            if step == 1:
                node = next(node for node in exported.graph.nodes if node.op == "call_module")
                exported.graph.erase_node(node)
                exported.recompile()
            run(exported)["out"].sum().backward()
            optimizer.step()
    with pytest.raises(PlanError, match="was changed while a gaff session is open"), gaff.capture(exported, "blocks.1"):
        exported.recompile()
        exported.graph.lint()
        exported.add_module("more", nn.Linear(1, 1))
        run(exported)


def test_what_is_exported_again_during_a_session_knows_nothing_of_it(net, tmp_path):
    exported = program(net)
    optimizer = torch.optim.SGD(exported.parameters(), lr=0.1)
    with gaff.watch(exported, optimizer, out=tmp_path / "run", every=1):
        again = torch.export.export(exported, (data(),), SCALE).module()
    assert torch.equal(run(again)["out"], run(exported)["out"])
    with gaff.edit(exported, {"blocks.1": gaff.edits.scale(0.0)}), gaff.capture(exported, "blocks.1") as got:
        again = torch.export.export(exported, (data(),), SCALE).module()
        run(exported)
    assert len(got.all("blocks.1")) == 1
    assert torch.equal(run(again)["out"], run(exported)["out"])


def test_a_module_that_was_replaced_in_the_graph_is_seen():
    traced = torch.fx.symbolic_trace(nn.Sequential(Block(), Block()))
    gaff.sites(traced)
    traced.get_submodule("0").fc = nn.Linear(4, 6)
    with gaff.edit(traced, {"0.fc.weight:param": gaff.edits.scale(0.0)}), gaff.capture(traced, "0.fc") as got:
        traced(data())
    assert torch.equal(got["0.fc"][0], traced.get_submodule("0").fc.bias)


def test_a_module_of_the_graph_itself_is_an_address(net):
    exported = program(net)
    with gaff.capture(exported, exported.get_submodule("wrapped.inner")) as got:
        run(exported)
    assert got["wrapped.inner"].shape == (3, 4)


def test_a_graph_that_was_edited_by_hand(net):
    exported = program(net)
    gaff.sites(exported)
    node = next(node for node in exported.graph.nodes if "relu" in node.name)
    with exported.graph.inserting_after(node):
        new = exported.graph.call_function(torch.ops.aten.mul.Tensor, (node, 0.0))
        node.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)
    with pytest.raises(PlanError, match=r"changed after its code was made: call \.recompile\(\)"):
        gaff.capture(exported, "blocks.0").__enter__()
    exported.recompile()
    bare = run(exported)["out"]
    with gaff.capture(exported, "blocks.1") as got:
        assert torch.equal(run(exported)["out"], bare)
    with gaff.capture(net, "blocks.1") as want:
        run(net)
    assert not torch.equal(got["blocks.1"], want["blocks.1"])


def test_fx_graphs_whose_blocks_are_inlined_have_them_again():
    model = nn.Sequential(Block(), Block())
    traced = torch.fx.symbolic_trace(model)  # calls leaves, not blocks
    found = []
    for one in (model, traced):
        with gaff.capture(one, "0", "1", "1.fc", "1.fc:input") as got:
            one(data())
        found.append(got)
    for site in ("0", "1", "1.fc", "1.fc:input"):
        assert torch.equal(found[0][site], found[1][site]), site


@pytest.mark.slow
@pytest.mark.parametrize("around", ["no_grad", "autocast"])
@pytest.mark.parametrize("is_decomposed", [False, True])
def test_calls_in_a_block_that_was_decomposed_away_are_not_left_out_in_silence(around, is_decomposed):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.enc = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
            self.head = nn.Linear(4, 2)

        def forward(self, x):
            online = self.head(self.enc(x))
            with torch.no_grad() if around == "no_grad" else torch.autocast("cpu", torch.bfloat16):
                target = self.enc(x + 1)
            return online.sum() + target.sum()

    exported = torch.export.export(Twice(), (data(),))
    graph = (exported.run_decompositions() if is_decomposed else exported).module()
    why = "a no_grad or autocast block was decomposed into" if is_decomposed else "a graph inside this one"
    for path in ("enc", "enc.0", "enc.1"):
        with pytest.raises(SiteError, match=f"{path}: .*{why}"):
            gaff.capture(graph, path)
        with pytest.raises(SiteError, match=why):
            gaff.edit(graph, {path: gaff.edits.zero()})
    with gaff.capture(graph, "head") as got:
        graph(data())
    assert got["head"].shape[-1] == 2
