"""The edges of compiled code: outputs that are used inside, code that calls backward, forwards of others."""

import collections
import contextlib
import inspect
import itertools
import math
import pickle
import subprocess
import sys
import types
import weakref
from functools import partial
from threading import Thread

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch._higher_order_ops import scan
from torch._higher_order_ops.map import map as control_map
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import gaff
from gaff import edits
from gaff.compat import compiler
from gaff.engine.compiled_behind import InSight

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:The .grad attribute")]  # Dynamo's own


AS_PYTHON = pytest.mark.filterwarnings("ignore:gaff. not bitwise. a session keeps code eager, where torch.cond")


class InACheckpoint(nn.Module):
    """A block under a checkpoint that saves tensors of one shape alone: torch cannot tell one from another."""

    def __init__(self):
        super().__init__()
        self.b, self.head = Gated(), nn.Linear(8, 1)

    def forward(self, x):
        return self.head(checkpoint(self.b, x, use_reentrant=False))


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(8, 8)

    def forward(self, x):
        return self.l(x).relu() * torch.sigmoid(x) + x.exp()


_BESIDE = {  # sessions on a compiled block under a checkpoint, with what of it they look at
    "guard": lambda m: gaff.guard(m),
    "b": lambda m: gaff.capture(m, gaff.maybe("b")),
    "inner": lambda m: gaff.capture(m, gaff.maybe("b.l")),
    "weight": lambda m: gaff.capture(m, gaff.maybe("b.l.weight:grad")),
    "gradient": lambda m: gaff.capture(m, gaff.maybe("b:grad_output")),
    "op": lambda m: gaff.capture(m, gaff.maybe("head/linear")),
    "edited parameter": lambda m: gaff.edit(m, {gaff.maybe("head.weight:param"): edits.scale(1.0)}),
}


def _in_a_checkpoint():
    torch.manual_seed(0)
    model, x = InACheckpoint(), torch.randn(8, 8, requires_grad=True)
    [true] = torch.autograd.grad(model(x).sum(), x)
    model.b.compile(backend="aot_eager")
    assert torch.equal(torch.autograd.grad(model(x).sum(), x)[0], true)
    return model, x, true


@pytest.mark.parametrize("name", _BESIDE)
def test_compiled_code_in_a_checkpoint_is_recomputed_as_it_ran_or_not_at_all(name):
    model, x, true = _in_a_checkpoint()
    is_eager = name in ("op", "edited parameter")
    with _BESIDE[name](model):
        loss = model(x).sum()
    for words in ("closed before its backward", "opened after its forward"):
        told = contextlib.nullcontext() if is_eager else pytest.raises(gaff.ExactnessError, match=words)
        with told, _BESIDE[name](model) if words.startswith("opened") else contextlib.nullcontext():
            assert torch.allclose(torch.autograd.grad(loss, x)[0], true)
        loss = model(x).sum()
    assert torch.equal(torch.autograd.grad(model(x).sum(), x)[0], true)
    with _BESIDE[name](model):
        assert torch.allclose(torch.autograd.grad(model(x).sum(), x)[0], true)


class Activated(nn.Module):
    """A block whose compiled function no code names as such."""

    def __init__(self):
        super().__init__()
        self.l = nn.Linear(8, 16)
        self._functions = [torch.compile(self._gate, backend="aot_eager")]

    def _gate(self, x):
        return torch.sigmoid(x[:, :8]) * x[:, 8:].exp() + self.l(x[:, :8]).tanh()[:, :8]

    def forward(self, x):
        return next(one(self.l(x)) for one in self._functions)


class Twice(nn.Module):
    """A block that is run compiled and as it is, in one checkpoint."""

    def __init__(self):
        super().__init__()
        self.l = Gated()
        self.l.compile(backend="aot_eager")

    def forward(self, x):
        return self.l.forward(self.l(x))


@pytest.mark.parametrize("block", [Activated, Twice])
def test_compiled_code_in_a_checkpoint_is_noticed_wherever_it_is_held(block):
    torch.manual_seed(0)
    model, x = InACheckpoint(), torch.randn(8, 8, requires_grad=True)
    model.b = block()
    [true] = torch.autograd.grad(model(x).sum(), x)
    with gaff.capture(model, "b.**.l<Linear>"):
        loss = model(x).sum()
    with pytest.raises(gaff.ExactnessError, match="closed before its backward"):
        torch.autograd.grad(loss, x)
    for inside in ("b.**/sigmoid", "head/linear"):  # it runs eagerly then
        with gaff.capture(model, gaff.maybe(inside)):
            loss = model(x).sum()
        assert torch.allclose(torch.autograd.grad(loss, x)[0], true)
    loss = model(x).sum()
    with gaff.capture(model, "head/linear"):
        assert torch.equal(torch.autograd.grad(loss, x)[0], true)
        assert torch.allclose(torch.autograd.grad(model(x).sum(), x)[0], true)


def test_a_checkpoint_of_another_model_is_recomputed_as_it_ran():
    generator, x, true = _in_a_checkpoint()
    judge = nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1))
    bare = torch.autograd.grad(judge(generator(x)).sum(), x)[0]
    made = generator(x)
    with gaff.capture(judge, "0:grad_input") as got:
        [told] = torch.autograd.grad(judge(made).sum(), x)
    assert torch.equal(told, bare)
    assert got["0:grad_input"].shape == (8, 1)
    assert torch.equal(torch.autograd.grad(generator(x).sum(), x)[0], true)


def test_a_session_that_is_opened_inside_a_checkpoint_is_opened_again_there():
    model, x, true = _in_a_checkpoint()
    inner, opened = model.b, []

    def looked_at(given):
        with gaff.capture(inner, "l") as got:
            opened.append(got)
            return inner(given)

    loss = model.head(checkpoint(looked_at, x, use_reentrant=False)).sum()
    assert torch.allclose(torch.autograd.grad(loss, x)[0], true)
    assert torch.equal(opened[0]["l"], inner.l(x))
    assert len(opened) == 2

    loss = model.head(checkpoint(lambda x: inner(x) if opened[2:] else looked_at(x), x, use_reentrant=False)).sum()
    with pytest.raises(gaff.ExactnessError, match="opened inside of it, and not again"):
        torch.autograd.grad(loss, x)


def test_what_a_compiled_function_may_come_upon_is_found_wherever_it_is_held():
    def calls(held):
        return lambda x: held

    class Holder:
        __slots__ = ("it",)

        def __init__(self, it):
            self.it = it

        @property
        def found(self):
            return _HELD

        def method(self):
            return self.found

    def marked(x):
        return x

    layer = nn.Linear(2, 2)
    marked.layer = layer
    held = [{layer: 1}, {"a": [layer]}, collections.deque([layer]), types.MappingProxyType({"a": layer}), marked,
            weakref.ref(layer), weakref.WeakValueDictionary(a=layer), Holder(layer), partial(print, layer),
            calls(layer), (lambda x: (lambda: layer)), Holder(0).method]  # fmt: skip
    for one in held[:-1]:
        assert InSight({layer}).may_run(calls(one))
        assert InSight({layer}).finds([one])
    in_sight = InSight({_HELD})
    assert not in_sight.finds([3, "a", torch.ones(1), (torch.ones(1),), *held[:-1]])
    assert in_sight.may_run(held[-1])
    assert in_sight.may_run(held[-1])


_HELD = nn.Linear(1, 1)


def test_a_thread_that_recomputes_leaves_what_others_keep_eager():
    model, x, true = _in_a_checkpoint()
    other = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    other.compile(backend="aot_eager")
    given, outputs = torch.randn(2, 4), []

    def edited():
        with gaff.edit(other, {"1/tanh": edits.scale(0.0)}):
            outputs.append(other(given))

    class Calling(nn.Module):
        def forward(self, x):
            if torch._C._current_graph_task_id() != -1:
                thread = Thread(target=edited)
                thread.start()
                thread.join()
            return model.b(x)

    loss = model.head(checkpoint(Calling(), x, use_reentrant=False)).sum()
    with gaff.capture(other, gaff.maybe("1/tanh")):
        assert torch.equal(torch.autograd.grad(loss, x)[0], true)
    assert len(outputs) == 1
    assert not outputs[0].any()


def test_what_is_first_compiled_inside_a_checkpoint_is_recomputed_as_it_ran():
    program = """
import functools, torch, gaff
from torch import nn
from torch.utils.checkpoint import checkpoint
@functools.cache
def core():
    return torch.compile(lambda x: torch.sigmoid(x) * x.exp() + x.tanh(), backend="aot_eager")
model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), torch.randn(8, 8, requires_grad=True)
bare = torch.autograd.grad(model(torch.sigmoid(x) * x.exp() + x.tanh()).sum(), x)[0]
with gaff.capture(model, "1/tanh"):
    loss = checkpoint(lambda x: model(core()(x)), x, use_reentrant=False).sum()
assert torch.allclose(torch.autograd.grad(loss, x)[0], bare)
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr


def test_gradients_in_a_reentrant_checkpoint_around_compiled_code_are_those_of_its_one_call():
    model, x, _ = _in_a_checkpoint()
    told = []
    for is_eager in (True, False):
        with torch.compiler.set_stance("force_eager" if is_eager else "default"):
            with gaff.capture(model, "b:grad_output", "b.l:grad_output", "b.l") as got:
                model.head(checkpoint(model.b, x, use_reentrant=True)).sum().backward()
            told.append([got["b:grad_output"], got["b.l:grad_output"]])
        assert "nothing recomputed" not in str(got.receipt)
    assert all(torch.allclose(one, other) for one, other in zip(*told, strict=True))


def test_a_selective_checkpoint_does_not_see_what_graphs_tell():
    def chosen(ctx, op, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if op is torch.ops.aten.addmm.default else CheckpointPolicy.PREFER_RECOMPUTE

    model, x, _ = _in_a_checkpoint()
    contexts = partial(create_selective_checkpoint_contexts, chosen)

    def gradient():
        loss = model.head(checkpoint(model.b, x, use_reentrant=False, context_fn=contexts)).sum()
        return torch.autograd.grad(loss, x)[0]

    bare = gradient()
    with gaff.capture(model, "b.l", "b.l:grad_output") as got, gaff.guard(model):
        assert torch.equal(gradient(), bare)
    assert torch.equal(got["b.l"], model.b.l(x))
    assert got["b.l:grad_output"].shape == (8, 8)


def test_what_lies_outside_of_a_checkpoint_may_be_looked_at_in_forward_alone():
    model, x, true = _in_a_checkpoint()
    with gaff.capture(model, "head", "head:input") as got:
        loss = model(x).sum()
    assert torch.equal(torch.autograd.grad(loss, x)[0], true)
    assert got["head"].shape == (8, 1)
    loss = gaff.take(model, "head")(x)["head"].sum()
    assert torch.allclose(torch.autograd.grad(loss, x)[0], true)


@pytest.mark.parametrize("way", ["method", "forward", "argument", "default", "attribute"])
def test_compiled_code_in_a_checkpoint_is_found_wherever_it_is(way):
    torch.manual_seed(0)
    block, norm, x = Gated(), nn.LayerNorm(8), torch.randn(8, 8, requires_grad=True)
    model = nn.ModuleDict({"b": block, "norm": norm})
    kept = types.SimpleNamespace(layer=block)
    if way == "forward":
        block.forward = torch.compile(block.forward, backend="aot_eager")
    else:
        block.compile(backend="aot_eager")
    functions = {
        "method": (block.__call__,),
        "forward": (block,),
        "argument": (lambda given, layer: layer(norm(given)), block),
        "default": (lambda given, *, layer=block: layer(norm(given)),),
        "attribute": (lambda given: kept.layer(norm(given)),),
    }
    function, *others = functions[way]

    def loss():
        return checkpoint(function, x, *others, use_reentrant=False).sum()

    loss().backward()
    with gaff.capture(model, "b.l"):
        total = loss()
    with pytest.raises(gaff.ExactnessError, match="closed before its backward"):
        total.backward()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoints_that_call_nothing_compiled_are_left_alone(use_reentrant):
    torch.manual_seed(0)
    mlp, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), torch.randn(8, 8, requires_grad=True)
    other = torch.compile(nn.Linear(2, 2), backend="aot_eager")
    other(torch.randn(1, 2))
    if use_reentrant:  # its backward builds all of its graph anew
        mlp.compile(backend="aot_eager")
    function = mlp if use_reentrant else torch.nn.functional.gelu

    def loss():
        return mlp(checkpoint(function, x, use_reentrant=use_reentrant)).sum()

    def gradient(total):
        x.grad = None
        total.backward()
        return x.grad

    true = gradient(loss())
    with gaff.capture(mlp, "0"):
        total = loss()
    assert torch.allclose(gradient(total), true)
    total = loss()
    with gaff.guard(other):
        assert torch.allclose(gradient(total), true)


def test_a_forward_that_the_program_calls_by_itself_is_no_call_of_the_module():
    model = nn.ModuleDict({"a": nn.Sequential(nn.Linear(4, 4), nn.Tanh()), "b": nn.Linear(4, 1)})
    model["a"].compile(backend="aot_eager")

    def step(x):
        model.zero_grad()
        with torch.no_grad():
            model["a"].forward(x)
        model["b"](model["a"](x)).sum().backward()
        return model["a"][0].bias.grad.clone()

    x = torch.randn(2, 4)
    bare = step(x)
    with gaff.capture(model, "a:grad_output") as got:
        step(x)
    assert len(got.all("a:grad_output")) == 1
    with gaff.edit(model, {"a:grad_output": edits.scale(2.0)}) as changed:
        assert torch.equal(step(x), 2 * bare)
    assert changed.receipt.rows[0].hits == 1


@pytest.mark.parametrize("is_first", [True, False])
def test_gradients_beside_an_edit_that_has_code_run_eagerly(is_first):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Tanh())
    x, told = torch.randn(2, 4), []
    for run in (model, torch.compile(model, backend="aot_eager")):
        capture, skip = gaff.capture(run, "*:grad_output"), gaff.edit(run, {"1": edits.skip()})
        with contextlib.ExitStack() as stack:
            for session in (capture, skip) if is_first else (skip, capture):
                stack.enter_context(session)
            run(x).square().sum().backward()
        told.append([capture[site] for site in ("0:grad_output", "1:grad_output", "2:grad_output")])
    assert all(map(torch.equal, *told))


class Two(nn.Module):
    """Returns a tensor that it also uses."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        h = self.a(x)
        return {"y": self.b(h), "hidden": h}


class Broken(Two):
    def forward(self, x):
        h = self.a(x)
        y = self.b(h)
        torch._dynamo.graph_break()
        return {"y": y * 2, "hidden": h}


class Around(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)


def made(kind=Two):
    torch._dynamo.reset()
    torch.manual_seed(0)
    return kind()


def loss_of(out):
    return out["y"].sum() + 3 * out["hidden"].sum()


def gradient(session_on, call, site=":grad_output[hidden]"):
    """Of the second of two runs."""
    x = torch.randn(2, 4, generator=torch.Generator().manual_seed(1))
    with gaff.capture(session_on, site) as got:
        for _ in range(2):
            loss_of(call(x)).backward()
    return got.run(1)[site]


def by_function(model, backend):
    return model, torch.compile(lambda x: model(x), backend=backend)


def by_model(model, backend):
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    return compiled, compiled


def by_inner(model, backend):
    return model, torch.compile(model, backend=backend)


def in_place(model, backend):
    model.compile(backend=backend)
    return model, model


def by_forward(model, backend):
    model.forward = torch.compile(model.forward, backend=backend)
    return model, model


def by_child(model, backend):
    model.compile(backend=backend)
    around = Around(model)
    return around, around


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("how", [by_function, by_model, by_inner, in_place])
def test_an_output_that_is_used_inside_brings_back_all(how, backend):
    model = made()
    truth = gradient(model, model)
    assert torch.allclose(gradient(*how(made(), backend)), truth)


@pytest.mark.parametrize("how", [by_forward, by_child])
def test_what_only_the_outside_tells_is_refused(how):
    with pytest.raises(gaff.ExactnessError, match="what its uses inside bring is not heard here"):
        gradient(*how(made(), "aot_eager"))


@pytest.mark.parametrize("how", [by_function, by_inner, in_place])
def test_what_passes_a_graph_break_is_refused(how):
    with pytest.raises(gaff.ExactnessError, match="compiled code that returns other tensors"):
        gradient(*how(made(Broken), "aot_eager"))
    model = made(Broken)
    truth = gradient(model, model, "a:grad_output")
    assert torch.allclose(gradient(*how(made(Broken), "aot_eager"), "a:grad_output"), truth)


def test_an_edit_there_is_made_on_all_or_refused():
    x = torch.ones(2, 4)

    def edited(session_on, call, model):
        with gaff.edit(session_on, {":grad_output[hidden]": gaff.edits.scale(0.5)}):
            loss_of(call(x)).backward()
        return model.a.weight.grad

    model = made()
    truth = edited(model, model, model)
    model = made()
    assert torch.allclose(edited(*by_inner(model, "aot_eager"), model), truth)
    model = made()
    with pytest.raises(gaff.ExactnessError):
        edited(*by_child(model, "aot_eager"), model)


def test_a_watched_model_tells_all_of_it(tmp_path):
    def norm(compiled, name):
        model = made()
        run = torch.compile(model, backend="aot_eager") if compiled else model
        optimizer = torch.optim.SGD(model.parameters(), 0.0)
        with gaff.watch(run, optimizer, out=tmp_path / name, every=1):
            for _ in range(3):
                optimizer.zero_grad()
                loss_of(run(torch.ones(2, 4))).backward()
                optimizer.step()
        return gaff.load(tmp_path / name).series(":grad_output[hidden]", "norm").values[-1]

    assert norm(True, "compiled") == pytest.approx(norm(False, "eager"), rel=1e-5)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("site", ["0", "0:grad_output"])
@pytest.mark.parametrize("write", [lambda t: t.mul_(2), lambda t: (t.view(-1).add_(1), t * 2)[1]])
def test_an_edit_may_not_write_into_its_input(backend, site, write):
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    with pytest.raises(gaff.PlanError, match="wrote into what it was given"), gaff.edit(compiled, {site: write}):
        compiled(torch.ones(2, 3)).sum().backward()
    with pytest.raises(gaff.PlanError, match="the edit returned"), gaff.edit(compiled, {site: lambda t: t[:1]}):
        compiled(torch.ones(2, 3)).sum().backward()


def steps(model):
    """Compiled code that calls backward."""

    @torch.compile(backend="aot_eager")
    def forward_and_backward(x):
        loss = model(x).square().mean()
        loss.backward()
        return loss

    parameters = list(model.parameters())
    gradients = torch.compile(lambda x: torch.autograd.grad(model(x).square().mean(), parameters), backend="aot_eager")
    return {"backward": forward_and_backward, "grad": gradients}


@pytest.mark.parametrize("how", ["backward", "grad"])
def test_code_that_calls_backward_is_compiled_as_before(how):
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
    sites = ["1", "1:grad_output", "*.weight:grad", "*.bias:grad", "0.weight:param"]

    def seen(call, model):
        with gaff.capture(model, *sites) as got:
            for _ in range(3):
                call(x)
        return got

    def model():
        torch._dynamo.reset()
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))

    eager = model()
    truth = seen(lambda x: eager(x).square().mean().backward(), eager)
    compiled = model()
    found = seen(steps(compiled)[how], compiled)
    for run in range(3):
        assert set(found.run(run)) == set(truth.run(run))
        for site, value in truth.run(run).items():
            assert torch.allclose(found.run(run)[site], value, atol=1e-6), site


def test_tensors_of_the_user_are_heard_in_code_that_calls_backward():
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    with gaff.capture(weight=model[0].weight, bias=model[2].bias) as got:
        steps(model)["backward"](torch.ones(3, 4))
    assert torch.equal(got["weight"], model[0].weight.grad)
    assert torch.equal(got["bias"], model[2].bias.grad)


def test_compiled_autograd_runs_the_session_eagerly():
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    compiled = torch.compile(model, backend="aot_eager")
    compiled(torch.ones(1, 4))
    with torch._dynamo.config.patch(compiled_autograd=True), gaff.capture(compiled, "0:grad_output") as got:
        compiled(torch.ones(1, 4)).sum().backward()
    assert "compiled autograd" in got.receipt.notes[0]
    assert torch.allclose(got["0:grad_output"], 1 - model(torch.ones(1, 4)).square())


def test_a_forward_keeps_its_signature_and_its_identity():
    torch._dynamo.reset()
    model = Two()
    before = inspect.signature(model.forward)
    compiled = torch.compile(model, backend="aot_eager")
    compiled(torch.ones(1, 4))
    with gaff.capture(compiled, "a"):
        assert inspect.signature(model.forward) == before
        compiled(torch.ones(1, 4))

    other = Two()
    other.forward = own = torch.compile(other.forward, backend="aot_eager")
    other(torch.ones(1, 4))
    with gaff.capture(other, "a", "b:grad_output") as got:
        assert other.forward is own
        loss_of(other(torch.ones(1, 4))).backward()
    assert got["a"].shape == (1, 4)
    assert other.forward is own

    third = Two()
    plain = third.forward

    def mine(x):
        """Somebody's own."""
        return plain(x)

    mine.note = 3
    third.forward = mine
    compiled = torch.compile(third, backend="aot_eager")
    compiled(torch.ones(1, 4))
    with gaff.capture(compiled, "a") as got:
        assert inspect.signature(third.forward) == inspect.signature(mine)
        assert third.forward.note == 3
        compiled(torch.ones(1, 4))
    assert third.forward is mine
    assert got["a"].shape == (1, 4)


LOADED_AGAIN = """
import torch
from torch import nn
from torch._higher_order_ops import scan
from torch._higher_order_ops.map import map as control_map

type = getattr = None  # names that code which stands for a forward must not look up here

class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x ** 3

    @staticmethod
    def backward(ctx, gradient):
        return 3 * ctx.saved_tensors[0] ** 2 * gradient

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x):
        return Cube.apply(self.a(x))
"""


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # Dynamo makes one of a custom Function
def test_modules_of_python_that_are_loaded_again_compile_as_they_do_alone(monkeypatch):
    for _ in range(3):
        module = types.ModuleType("loaded_again")
        monkeypatch.setitem(sys.modules, "loaded_again", module)
        exec(LOADED_AGAIN, vars(module))
        net = made(module.Net)
        compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
        x = torch.randn(2, 4, requires_grad=True)
        with gaff.capture(net, ":output", "a:grad_output") as got:
            out = compiled(x)
            out.sum().backward()
        assert torch.equal(got[":output"], out)
        assert torch.equal(got["a:grad_output"], 3 * net.a(x) ** 2)
        del module.Cube  # what a guard that looks into the first module would miss


class CallsItself(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x, depth=2):
        h = self.fc(x).tanh()
        return self(h, depth - 1) * 0.5 if depth else h


@pytest.mark.parametrize("sites", [("0:input",), ("0",), ("0", "0.fc", "1"), ("0.fc:grad_output", "0:grad_output")])
@pytest.mark.parametrize("how", ["model", "function"])
def test_a_module_that_calls_itself_is_one_run(how, sites):
    torch.manual_seed(0)
    model, x = nn.Sequential(CallsItself(), nn.Linear(4, 2)), torch.randn(3, 4)
    compiled = torch.compile(model if how == "model" else lambda x: model(x), backend="aot_eager")
    found = []
    for run in (model, compiled):
        with gaff.capture(model, *sites) as got:
            for _ in range(2):
                run(x).sum().backward()
        assert got.receipt.runs == 2
        found.append({site: got.all(site) for site in sites})
    for site in sites:
        for one, other in zip(found[0][site], found[1][site], strict=True):
            torch.testing.assert_close(other, one)


class WritesIntoInput(nn.Module):
    def forward(self, x):
        x.add_(1.0)
        return x


def test_the_gradient_of_what_came_into_a_graph_and_was_written_to_is_refused():
    """torch sets its hook on what came in, after the graph has run; what the graph made of it passes by."""
    model = nn.Sequential(WritesIntoInput(), nn.Linear(4, 2))
    compiled = torch.compile(model, backend="aot_eager")
    for _ in range(2):  # compiled, and again as it is
        with gaff.capture(compiled, gaff.maybe("0:grad_output"), "1:grad_output") as got:
            compiled(torch.randn(3, 4).requires_grad_() * 1.0).sum().backward()
        assert torch.equal(got["1:grad_output"], torch.ones(3, 2))
        with pytest.raises(gaff.ExactnessError, match="what came into it and was written to in place"):
            got.all("0:grad_output")
    torch._dynamo.reset()
    inner = torch.compile(nn.Sequential(nn.Linear(4, 4), model), backend="aot_eager")  # nothing comes in from outside
    with gaff.capture(inner, "1.0:grad_output") as got:
        inner(torch.randn(3, 4)).sum().backward()
    torch.testing.assert_close(got["1.0:grad_output"], model[1].weight.sum(0).expand(3, 4))


class ReturnsItsInput(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, h):
        self.lin(h)
        return h


class UnderCheckpoints(nn.Module):
    """A module that returns what it was given, under one reentrant checkpoint or two."""

    def __init__(self, depth):
        super().__init__()
        self.first, self.inner, self.depth = nn.Linear(4, 4), ReturnsItsInput(), depth

    def body(self, h):
        return checkpoint(self.inner, h, use_reentrant=True) if self.depth == 2 else self.inner(h)

    def forward(self, x):
        return torch.tanh(checkpoint(self.body, self.first(x), use_reentrant=True))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("depth", [1, 2])
def test_a_module_under_compiled_checkpoints_that_returns_what_it_was_given(depth, tmp_path):
    """Its gradient is refused; it does not keep the model from being compiled, watched ones least of all."""
    torch.manual_seed(0)
    model, x = UnderCheckpoints(depth), torch.randn(2, 4)
    with gaff.capture(model, "first:grad_output") as true:
        model(x).sum().backward()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with gaff.capture(compiled, "first:grad_output", "inner:grad_output") as got:
        compiled(x).sum().backward()
    torch.testing.assert_close(got["first:grad_output"], true["first:grad_output"])
    with pytest.raises(gaff.ExactnessError, match="belongs to the code around it: ask for it there"):
        got["inner:grad_output"]
    with pytest.raises(torch._dynamo.exc.TorchDynamoException, match="belongs to the code around it"):
        with gaff.edit(compiled, {"inner:grad_output": gaff.edits.scale(2.0)}):
            compiled(x).sum().backward()
    torch._dynamo.reset()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with gaff.watch(compiled, optimizer, out=tmp_path / "run", every=1):
        for _ in range(3):
            compiled(torch.randn(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert gaff.load(tmp_path / "run").steps == 3


def test_a_leaf_that_a_compiled_module_returns_belongs_to_the_run_whose_pass_it_is():
    """Hooks of all runs are on it; each run is told of its own pass alone."""
    model = nn.Sequential(nn.Identity(), nn.BatchNorm1d(4))
    compiled = torch.compile(model, backend="aot_eager")
    x, others = torch.randn(3, 4).requires_grad_(), [torch.randn(3, 4).requires_grad_() for _ in range(2)]
    with gaff.capture(compiled, "0:grad_output") as got:
        compiled(x)
        compiled(x).pow(3).sum().backward()
    assert torch.equal(got.run(1)["0:grad_output"], x.grad)
    assert got.run(0).all("0:grad_output") == []
    assert not x._backward_hooks
    with gaff.capture(compiled, "0:grad_output") as got:
        (compiled(others[0]).pow(2).sum() + compiled(others[1]).pow(3).sum()).backward()
    assert torch.equal(got.run(0)["0:grad_output"], others[0].grad)
    assert torch.equal(got.run(1)["0:grad_output"], others[1].grad)
    with gaff.capture(compiled, "0:grad_output") as got:
        compiled(x)
        (x * 2).sum().backward()
    with pytest.raises(gaff.ExactnessError, match="some runs used this leaf, and nothing tells whose pass it was"):
        got.all("0:grad_output")
    x.grad = None
    compiled(x).pow(3).sum().backward()
    bare, x.grad = x.grad, None
    with gaff.edit(compiled, {"0:grad_output": gaff.edits.scale(2.0)}):  # breaks the graph, and acts eagerly
        y, z = compiled(x), compiled(x)
        y.pow(3).sum().backward()
        torch.testing.assert_close(x.grad, 2 * bare)
        z.pow(3).sum().backward()
    torch.testing.assert_close(x.grad, 4 * bare)


def test_a_leaf_that_was_returned_and_gets_a_gradient_in_a_pass_of_another_run_is_refused():
    """By way of something that no run has made: the total belongs to the first run, which nothing tells."""
    compiled = torch.compile(nn.Sequential(nn.Identity(), nn.Linear(4, 2)), backend="aot_eager")
    x = torch.randn(3, 4).requires_grad_()
    with gaff.capture(compiled, "0:grad_output") as got:
        compiled(x).sum().backward()
        compiled(x * 1.0).sum().backward()
    with pytest.raises(gaff.ExactnessError, match="nothing tells whose pass it was"):
        got.all("0:grad_output")


class WritesLater(nn.Module):
    """A module returns what it was given, and another writes into that, in a graph of their own."""

    def __init__(self):
        super().__init__()
        self.lin, self.same, self.writes = nn.Linear(4, 4), Second(), WritesPart()

    def forward(self, x):
        h = self.lin(x) * 1.0
        torch._dynamo.graph_break()
        return self.writes(self.same(x, h))


class Second(nn.Module):
    def forward(self, x, h):
        return h


class WritesPart(nn.Module):
    def forward(self, h):
        h[:, :2] = 0.5
        return h


def test_what_came_into_a_graph_and_is_written_to_after_a_module_has_returned_it(tmp_path):
    """torch sets the hook of such a tensor after the graph has run: it hears of what was made of it."""
    torch.manual_seed(0)
    model, x = WritesLater(), torch.randn(3, 4)
    compiled = torch.compile(model, backend="aot_eager")
    for _ in range(2):
        with gaff.capture(compiled, "same:grad_output", "lin:grad_output") as got:
            compiled(x).pow(2).sum().backward()
        with gaff.capture(model, "lin:grad_output") as true:
            model(x).pow(2).sum().backward()
        assert torch.equal(got["lin:grad_output"], true["lin:grad_output"])
        with pytest.raises(gaff.ExactnessError, match="what came into it and was written to in place"):
            got.all("same:grad_output")
    with pytest.raises(gaff.ExactnessError, match="same:grad_output: .* was written to in place"):
        with gaff.edit(compiled, {"same:grad_output": gaff.edits.scale(2.0)}):
            compiled(x).pow(2).sum().backward()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with gaff.watch(compiled, optimizer, out=tmp_path / "run", every=1):
        for _ in range(3):
            compiled(x).pow(2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    record = gaff.load(tmp_path / "run")
    assert "lin:grad_output" in record.sites
    assert "same:grad_output" not in record.sites
    assert any("same: a view, or a tensor that is written to, inside compiled code" in note for note in record.notes)


class Pickled(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Tanh()])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def test_a_compiled_model_is_pickled_while_a_session_is_open():
    """Also one with modules that have no forward of their own."""
    model, x = Pickled(), torch.randn(2, 4)
    compiled = torch.compile(model, backend="aot_eager")
    with gaff.capture(compiled, "layers.0") as got:
        compiled(x)
        other = pickle.loads(pickle.dumps(model))
    assert torch.equal(other(x), model(x))
    assert torch.equal(got["layers.0"], model.layers[0](x))
    assert all("forward" not in vars(one) for one in model.modules())


# found by a reviewer: sessions in another order, state that a graph writes, operators with code of their own


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("first", ["edit", "capture"])
def test_a_gradient_is_that_of_the_edited_output_whichever_session_came_first(backend, first):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)), torch.randn(3, 4)
    y = (model[0](x) * 2).detach().requires_grad_()
    model[2](model[1](y)).sum().backward()
    run = torch.compile(model, backend=backend)
    captured, edited = gaff.capture(run, "0", "0:grad_output"), gaff.edit(run, {"0": gaff.edits.scale(2.0)})
    for outer, inner in [(edited, captured) if first == "edit" else (captured, edited)]:
        with outer, inner:
            run(x).sum().backward()
    assert torch.allclose(captured["0"], y)
    assert torch.allclose(captured["0:grad_output"], y.grad)


def test_a_capture_goes_on_to_tell_gradients_of_outputs_that_are_edited_for_a_while():
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)), torch.randn(3, 4)
    run, told = torch.compile(model, backend="aot_eager"), []
    with gaff.capture(model, "0:grad_output") as eager:
        model(x).sum().backward()
        with gaff.edit(model, {"0": gaff.edits.scale(2.0)}):
            model(x).sum().backward()
        model(x).sum().backward()
    with gaff.capture(run, "0:grad_output") as got:
        run(x).sum().backward()
        with gaff.edit(run, {"0": gaff.edits.scale(2.0)}):
            run(x).sum().backward()
        run(x).sum().backward()
    told = list(zip(got.all("0:grad_output"), eager.all("0:grad_output"), strict=True))
    assert len(told) == 3
    assert all(torch.allclose(one, other) for one, other in told)


class WritesWeight(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k = nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            self.k.weight.mul_(0.5).add_(self.q.weight, alpha=0.5)
            key = self.k(x)
        return (self.q(x) * key).sum(1)


def test_a_parameter_that_the_graph_has_written_to_is_refused_and_buffers_are_told_eagerly():
    model, x = WritesWeight(), torch.randn(3, 4)
    run = torch.compile(model, backend="aot_eager")
    with gaff.capture(run, "k.weight:param", "q.weight:param") as got:
        run(x)
    assert torch.equal(got["q.weight:param"], model.q.weight)
    with pytest.raises(gaff.ExactnessError, match="has written to it before"):
        got.all("k.weight:param")
    norm = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    both = torch.compile(lambda x: norm(x) + norm(x * 3), backend="aot_eager")
    both(x)
    with gaff.capture(norm, "1.num_batches_tracked:buffer") as got:
        both(x)
    assert [int(one) for one in got.all("1.num_batches_tracked:buffer")] == [2, 3]


class Decorated(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(4, 4)

    @torch.compile(backend="aot_eager")
    def forward(self, x):
        return self.l(x).relu()


def test_a_class_whose_forward_is_compiled_inside_a_compiled_model():
    model, x = nn.Sequential(nn.Linear(4, 4), Decorated(), nn.Linear(4, 2)), torch.randn(3, 4)
    run = torch.compile(model, backend="aot_eager")
    with gaff.capture(run, "1:grad_output") as got:
        run(x).sum().backward()
    assert torch.allclose(got["1:grad_output"], model[2].weight.sum(0).expand(3, 4))
    bare = model[0].weight.grad.clone()
    model.zero_grad()
    with gaff.edit(run, {"*:grad_output": gaff.edits.scale(0.5)}):
        run(x).sum().backward()
    assert torch.allclose(model[0].weight.grad, bare / 8)


class Breaks(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(4, 4)

    @torch.compiler.disable
    def forward(self, x):
        return self.l(x).relu()


@pytest.mark.parametrize("session", [gaff.watch, gaff.guard])
def test_a_compiled_sequential_with_a_graph_break_inside(session):
    model, x = nn.Sequential(nn.Linear(4, 4), Breaks(), nn.Linear(4, 2)), torch.randn(3, 4)
    run, optimizer = torch.compile(model, backend="aot_eager"), torch.optim.SGD(model.parameters(), 0.1)
    with session(run, optimizer) if session is gaff.watch else session(run):
        for _ in range(3):
            run(x).sum().backward()
            optimizer.step()


class Branch(nn.Module):
    def __init__(self):
        super().__init__()
        self.l, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.head(torch.cond(x.sum() > 0, lambda x: self.l(x), lambda x: self.l(x * 2), (x,)))


class Mapped(Branch):
    def forward(self, x):
        return self.head(torch.vmap(self.l)(x))


class Jagged(Branch):
    def forward(self, x):
        jagged = torch.nested.nested_tensor_from_jagged(x, torch.tensor([0, 1, 3]))
        return self.head(self.l(jagged).values())


@AS_PYTHON
@pytest.mark.parametrize("kind", [Branch, Mapped, Jagged])
def test_what_compiled_code_can_tell_nothing_of_is_refused_once_and_trains_as_it_is(kind, tmp_path):
    """The first session meets it as the code is compiled; a later one knows, and lets the code run eagerly."""
    torch.manual_seed(0)
    model, x = kind(), torch.randn(3, 4)
    run, optimizer = torch.compile(model, backend="aot_eager"), torch.optim.SGD(model.parameters(), 0.0)

    def gradients():
        model.zero_grad()
        run(x).square().sum().backward()
        optimizer.step()
        return [one.grad.clone() for one in model.parameters()]

    bare = gradients()
    with gaff.capture(run, gaff.maybe("l"), gaff.maybe("l:grad_output"), "head") as got:
        seen = [gradients()]
    with gaff.watch(run, optimizer, out=tmp_path / "run", every=1):
        seen += [gradients() for _ in range(3)]
    assert any("Linear in compiled code is not looked at" in one for one in gaff.load(tmp_path / "run").notes)
    with gaff.guard(run):
        seen.append(gradients())
    assert all(torch.allclose(one, other) for row in seen for one, other in zip(row, bare, strict=True))
    for site in ("l", "l:grad_output"):
        with pytest.raises(gaff.ExactnessError, match="it ran in a"):
            got.all(site)
    if kind is Mapped:
        with pytest.raises(gaff.ExactnessError, match="vmap"), gaff.edit(run, {"l": gaff.edits.scale(2.0)}):
            gradients()
        return
    with gaff.capture(run, "l", "l:grad_output") as again:
        assert all(torch.allclose(one, other) for one, other in zip(gradients(), bare, strict=True))
    with gaff.capture(model, "l", "l:grad_output") as eager, torch.compiler.set_stance("force_eager"):
        model(x).square().sum().backward()
    for site in ("l", "l:grad_output"):
        found, true = ((one.values() if one.is_nested else one) for one in (again[site], eager[site]))
        assert torch.allclose(found, true)
    assert "ran eagerly" in str(again.receipt)
    with gaff.edit(run, {"l": gaff.edits.scale(2.0)}):
        edited = gradients()
    hook = model.l.register_forward_hook(lambda module, args, output: output * 2)
    with gaff.guard(model):  # keeps code eager
        assert all(torch.allclose(one, other) for one, other in zip(edited, gradients(), strict=True))
    hook.remove()


class Loop(Branch):
    """Torch's loop whose body uses a module's weights."""

    def forward(self, x):
        start = (torch.zeros((), dtype=torch.int64), x)
        return self.head(torch.while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, torch.tanh(self.l(x))), start)[1])


class Rows(Branch):
    def forward(self, x):
        return self.head(control_map(lambda row: torch.tanh(self.l(row)), x))


class Scanned(Branch):
    def forward(self, x):
        last, rows = scan(lambda carry, row: (torch.tanh(self.l(carry) + row), carry * row), x[0], x)
        return self.head(torch.cat([last[None], rows]))


@AS_PYTHON
@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("kind", [Branch, Loop, Rows, Scanned])
def test_control_flow_of_torch_is_python_while_code_is_kept_eager(kind, is_compiled):
    """Gradients reach what the functions close over, values are told, and operations inside are counted."""
    torch.manual_seed(0)
    model, x = kind(), torch.randn(3, 4, requires_grad=True)  # else torch itself errs in a loop
    run = torch.compile(model, backend="eager") if is_compiled else model

    def gradients():
        model.zero_grad()
        run(x).square().sum().backward()
        return [one.grad.clone() for one in model.parameters()]

    bare = gradients()
    with gaff.guard(run):
        guarded = gradients()
    with gaff.capture(run, "l:grad_output", "l/linear") as got:
        captured = gradients()
    trace = gaff.trace(model, x, backward=lambda out: out.square().sum())
    for row in (guarded, captured):
        assert all(torch.allclose(one, other, atol=1e-6) for one, other in zip(row, bare, strict=True))
    assert sum(one.sum(0) if one.dim() > 1 else one for one in got.all("l:grad_output")).allclose(bare[1], atol=1e-6)
    assert trace.rows[0].flops == sum(row.flops for row in trace.rows[1:]) > 0
    assert [row.grad.norm for row in trace.parameters] == pytest.approx([float(one.norm()) for one in bare])


def test_a_branch_that_is_not_taken_has_no_gradient_in_code_that_is_kept_eager_which_is_told():
    class Other(Branch):
        def forward(self, x):
            return torch.cond(x.sum() > 0, lambda x: self.l(x).sum(-1), lambda x: self.head(x).sum(-1), (x,))

    model = Other()
    with gaff.guard(model), pytest.warns(UserWarning, match="torch.cond is a branch of Python"):
        model(torch.ones(2, 4)).sum().backward()
    assert model.head.weight.grad is None
    assert model.l.weight.grad is not None


@AS_PYTHON
@pytest.mark.parametrize("where", ["guard", "capture"])
def test_parameters_of_a_branch_train_while_code_is_kept_eager(where):
    model, x = Branch(), torch.randn(3, 4)
    model(x).sum().backward()  # torch has compiled the branches
    bare = model.l.weight.grad.clone()
    model.zero_grad()
    with gaff.guard(model) if where == "guard" else gaff.capture(model, "head/*"):
        model(x).sum().backward()
    assert torch.allclose(model.l.weight.grad, bare)


def test_a_session_that_was_opened_in_inference_mode_and_is_used_outside():
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.ones(2, 4)
    run = torch.compile(model, backend="aot_eager")
    for sites in ({"0": gaff.edits.scale(0.5)}, {"0:grad_output": gaff.edits.scale(0.5)}):
        with torch.inference_mode():
            handle = gaff.edit(run, sites).attach()
        run(x).sum().backward()
        handle.remove()


@pytest.mark.parametrize("site", ["0", "0:grad_output"])
def test_a_whole_tensor_is_brought_to_a_part_as_in_eager_code(site):
    whole, x = torch.arange(12.0).view(3, 4), torch.ones(3, 4)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    found = []
    for run in (model, torch.compile(model, backend="aot_eager")):
        model.zero_grad()
        with gaff.edit(run, {site: gaff.edits.at(gaff.keep.rows(1), gaff.edits.replace(whole))}):
            run(x).sum().backward()
        found.append(model[0].weight.grad.clone())
    assert torch.allclose(*found)


PART, WHOLE = torch.arange(6.0).view(2, 3), torch.arange(24.0).view(4, 6) / 7
AT = {
    "rows of the whole": (gaff.keep.rows([2, 0]), edits.patch(WHOLE)),
    "rows of their own": (gaff.keep.rows([2, 0]), edits.replace(WHOLE[1:3])),
    "all rows in another order": (gaff.keep.rows([3, 1, 0, 2]), edits.replace(WHOLE)),
    "heads of the whole": (gaff.keep.heads(1, 3), edits.patch(WHOLE)),
    "heads of their own": (gaff.keep.heads([0, 2], 3), edits.patch(WHOLE[:, None, :4].reshape(4, 2, 2))),
    "channels": (gaff.keep.channels([1, 4]), edits.replace(WHOLE[:, 2:4])),
    "zeros at channels": (gaff.keep.channels(2), edits.ablate("zero")),
    "a mask": (torch.tensor([True, False, True, False, False, True]), edits.patch(WHOLE)),
    "without a gradient to the values": (gaff.keep.rows(1), edits.patch(WHOLE, detach=True)),
}


@pytest.mark.parametrize("site", ["0", "0:grad_output"])
@pytest.mark.parametrize("name", AT)
def test_values_at_a_place_are_part_of_the_graph(name, site):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(6, 6), nn.Tanh()), torch.randn(4, 6)
    place, edit = AT[name]
    torch._dynamo.reset()
    told = []
    for run in (model, torch.compile(model, backend="aot_eager")):
        model.zero_grad()
        with gaff.edit(run, {site: edits.at(place, edit)}) as changed:
            out = run(x)
            out.square().sum().backward()
        told.append((out.detach(), model[0].weight.grad.clone(), changed.receipt.rows[0].fired))
    torch.testing.assert_close(told[0], told[1])
    assert "hooks were inside compiled code" in changed.receipt.notes[0]


def test_values_at_a_place_that_fit_neither_it_nor_the_whole_are_refused_as_in_eager_code():
    model, x = nn.Sequential(nn.Linear(6, 6), nn.Tanh()), torch.randn(4, 6)
    for run in (model, torch.compile(model, backend="aot_eager")):
        with (
            pytest.raises(
                gaff.PlanError, match=r"patch of shape \(2, 3\) given where \(4, 6\) passes|patch of shape 2x3"
            ),
            gaff.edit(run, {"0": edits.at(gaff.keep.rows([0, 1]), edits.patch(PART))}),
        ):
            run(x)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda got: edits.patch(got), "values come from a capture or the run"),
        (lambda got: edits.ablate("mean", got), "values come from a capture or the run"),
        (lambda got: edits.patch(got["0"], rows=[0]), "rows or positions are mapped"),
        (lambda got: edits.ablate("resample", got["0"]), "rows are drawn"),
        (lambda got: edits.at(gaff.keep.channels(1), edits.ablate("mean", got["0"])), "or a mean does"),
        (lambda got: edits.when(edits.scale(2.0), runs=0), "when asks when it acts"),
        (lambda got: edits.project(torch.ones(6, requires_grad=True)), "directions to project on are trained"),
        (lambda got: [edits.scale(2.0), edits.noise(std=0.1)], "noise asks when it acts, draws numbers"),
    ],
)
def test_why_an_edit_is_no_part_of_a_graph_is_told_as_it_is(make, why):
    model, x = nn.Sequential(nn.Linear(6, 6), nn.Tanh()), torch.randn(4, 6)
    run = torch.compile(model, backend="aot_eager")
    run(x)
    with gaff.capture(model, "0") as got:
        model(x)
    with gaff.edit(run, {"0": make(got)}) as changed:
        run(x)
    assert "ran eagerly" in changed.receipt.notes[0]
    assert f"0: {why}" in changed.receipt.notes[0] or why in changed.receipt.notes[0].partition("0: ")[2]


BEYOND = torch.tensor([[1e300]], dtype=torch.float64)


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize(
    ("edit", "dtype"),
    [
        (gaff.edits.replace(torch.tensor([[300]])), torch.uint8),
        (gaff.edits.patch(BEYOND), torch.float32),
        (gaff.edits.add(BEYOND), torch.float32),
        (gaff.edits.add(BEYOND, strength=0.5), torch.float32),
        (gaff.edits.scale(BEYOND), torch.float32),
        (gaff.edits.ablate("mean", reference=BEYOND), torch.float32),
        (gaff.edits.fill(300), torch.uint8),
        (gaff.edits.fill(1e39), torch.float32),
        (gaff.edits.clamp(-5, 200), torch.uint8),
        (gaff.edits.clamp(None, 1e39), torch.float16),
    ],
)
def test_numbers_that_the_type_has_not_are_refused_in_compiled_code_too(edit, dtype, is_compiled):
    model = nn.Sequential(nn.Identity())
    run = torch.compile(model, backend="aot_eager") if is_compiled else model
    with (
        pytest.raises(gaff.PlanError, match="holds numbers that torch.* has not|is out of the range of"),
        gaff.edit(run, {"0": edit}),
    ):
        run(torch.ones(1, 1, dtype=dtype))


@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_sweep_of_functions_leaves_torch_room_for_variants(fullgraph):
    """Each function is another variant for torch, which raises or runs eagerly beyond its limit."""
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(3, 4)
    run = torch.compile(model, backend="aot_eager", fullgraph=fullgraph)
    notes = []
    for factor in range(12):
        with gaff.edit(run, {"0": lambda value, factor=factor: value * factor}) as edit:
            found = run(x)
        assert torch.allclose(found, torch.tanh(model[0](x) * factor))
        notes.append(str(edit.receipt))
    assert "inside compiled code" in notes[0]
    assert "have been looked at or edited in" in notes[-1]


@pytest.mark.parametrize("site", ["0", "0:input", "0:grad_output"])
def test_an_edit_in_compiled_code_is_not_made_silently_on_another_thread(site):
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(3, 4)
    run = torch.compile(model, backend="aot_eager")
    raised = []

    def elsewhere():
        try:
            run(x)
        except gaff.ExactnessError as error:
            raised.append(str(error))

    with gaff.edit(run, {site: gaff.edits.scale(2.0)}) as edit:
        run(x).sum().backward()
        thread = Thread(target=elsewhere)
        thread.start()
        thread.join()
    assert "ran on another thread than that which opened the edit" in raised[0]
    assert edit.receipt.rows[0].hits == 1
    thread = Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert len(raised) == 1


def test_eager_models_are_told_nothing_of_compiled_code_elsewhere():
    torch.compile(nn.Linear(2, 2), backend="aot_eager")(torch.ones(1, 2))
    model = nn.Sequential(nn.Linear(4, 4))
    with gaff.edit(model, {"0": gaff.edits.scale(2.0)}) as edit, gaff.capture(model, "0") as got:
        model(torch.ones(1, 4))
    assert not edit.receipt.notes
    assert not got.receipt.notes


def test_a_function_that_is_made_anew_each_time_is_one_variant():
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(3, 4)
    run = torch.compile(model, backend="aot_eager")
    for _ in range(12):
        with gaff.edit(run, {"0": lambda value: value * 2}) as edit:
            run(x)
    assert "inside compiled code: 0 graphs" in str(edit.receipt)


def test_a_parameter_that_functional_call_replaces_in_compiled_code_is_refused():
    """The graph uses the other tensor; the module holds its own again when the graph tells."""

    class Hyper(nn.Module):
        def __init__(self):
            super().__init__()
            self.makes, self.target = nn.Linear(4, 24), nn.Linear(4, 6)

        def forward(self, x):
            weight = self.makes(x.mean(0)).view(6, 4)
            return torch.func.functional_call(self.target, {"weight": weight}, (x,))

    torch.manual_seed(0)
    model, x = Hyper(), torch.randn(3, 4)
    with gaff.capture(model, "target.weight:param", "makes") as got:
        model(x)
    assert torch.equal(got["target.weight:param"], got["makes"].view(6, 4))
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with gaff.capture(compiled, "target.weight:param", "target.bias:param") as got:
        compiled(x)
    with pytest.raises(gaff.ExactnessError, match="functional_call"):
        got["target.weight:param"]


class HandedOnAfterABreak(nn.Module):
    """``first`` and ``then`` return what came into the graph after the break."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.first = nn.Sequential(nn.Identity())
        self.then = nn.Identity()

    def forward(self, x):
        h = self.fc(x)
        torch._dynamo.graph_break()
        return self.then(self.first(h)).tanh()


@pytest.mark.parametrize("other", ["fc:grad_output", "first:grad_output", "first.0:grad_output"])
def test_edits_of_what_came_into_a_graph_keep_no_order_with_others_and_are_refused(other):
    model = HandedOnAfterABreak()
    model.compile(backend="aot_eager")
    x = torch.randn(3, 4)
    with gaff.edit(model, {other: edits.scale(2.0)}), gaff.capture(model, "then:grad_output") as seen:
        with contextlib.suppress(gaff.ExactnessError):  # of a second edit in that graph
            model(x).sum().backward()
        with pytest.raises(gaff.ExactnessError, match="then:grad_output.*edits of its gradient by other addresses"):
            seen["then:grad_output"]
    with (
        pytest.raises(gaff.ExactnessError, match="edits of its gradient by other addresses may be in another graph"),
        gaff.edit(model, {other: edits.scale(2.0)}),
        gaff.edit(model, {"then:grad_output": edits.scale(3.0)}),
    ):
        model(x).sum().backward()


def test_one_edit_of_what_came_into_a_graph_is_made():
    model = HandedOnAfterABreak()
    model.compile(backend="aot_eager")
    x = torch.randn(3, 4)
    model(x).sum().backward()
    bare, model.fc.weight.grad = model.fc.weight.grad, None
    with gaff.edit(model, {"then:grad_output": edits.scale(2.0)}):
        model(x).sum().backward()
    assert torch.equal(model.fc.weight.grad, 2 * bare)
    with gaff.capture(model, "then:grad_output") as seen:
        model(x).sum().backward()
    torch.testing.assert_close(seen["then:grad_output"], 1 - model.fc(x).tanh() ** 2)


def test_sessions_that_edit_one_tensor_in_another_order_do_not_share_a_graph():
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4)))
    model.compile(backend="aot_eager")
    x = torch.randn(3, 4)

    def grown(value):
        return value * 2

    def moved(value):
        return value + 1

    def found(first, second):
        model[1][0].bias.grad = None
        with first, second:
            model(x).sum().backward()
        return model[1][0].bias.grad[0].item()

    for _ in range(2):
        assert found(gaff.edit(model, {"1:grad_output": grown}), gaff.edit(model, {"1.0:grad_output": moved})) == 9
        assert found(gaff.edit(model, {"1.0:grad_output": moved}), gaff.edit(model, {"1:grad_output": grown})) == 12
    then = compiler.compile_counts()
    found(gaff.edit(model, {"1:grad_output": grown}), gaff.edit(model, {"1.0:grad_output": moved}))
    found(gaff.edit(model, {"1.0:grad_output": moved}), gaff.edit(model, {"1:grad_output": grown}))
    assert compiler.compile_counts() == then


@pytest.mark.parametrize("opened", list(itertools.permutations(range(4))))
def test_what_stands_as_a_forward_goes_with_its_session_whoever_closes_first(opened):
    """A capture in compiled code lets a module have a forward of its own, and so does an edit that skips it."""
    x = torch.randn(2, 4)
    for closed in itertools.permutations(opened):
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        model[1].compile(backend="eager")
        skips = [edits.skip(lambda x: x * 2.0), edits.skip(lambda x: x * 3.0)]
        sessions = [
            gaff.capture(model, gaff.maybe("1:output")),
            gaff.edit(model, {gaff.maybe("1:output"): skips[0]}),
            gaff.capture(model, gaff.maybe("1:grad_output")),
            gaff.edit(model, {gaff.maybe("1:output"): skips[1]}),
        ]
        for at in opened:
            sessions[at].__enter__()
        model(x).sum().backward()
        for at in closed:
            sessions[at].__exit__(None, None, None)
        assert "forward" not in vars(model[1])
        assert torch.equal(model(x), model[0](x).tanh())


class Mine(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        return self.inner(x).relu()


LAYERS = {
    "container": lambda: nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.LayerNorm(6), nn.Linear(6, 4)),
    "nested": lambda: type("Own", (nn.Sequential,), {})(nn.Linear(4, 4), nn.Sequential(nn.Tanh(), nn.Linear(4, 4))),
    "encoder": lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True),
    "around the user's": lambda: nn.Sequential(Mine(), nn.ReLU(), Mine()),
}


@pytest.mark.parametrize("kind", LAYERS)
def test_layers_of_torch_that_compile_nothing_by_themselves_run_as_they_do_without_gaff(kind, tmp_path):
    def trained(opened, *, is_compiled=True):
        torch._dynamo.reset()
        counters.clear()
        torch.manual_seed(0)
        model, x = LAYERS[kind](), torch.randn(3, 5, 4)
        if is_compiled:
            model.compile(backend="aot_eager")
        with opened(model) as session:
            losses = []
            for _ in range(2):
                losses.append(model(x).square().mean())
                losses[-1].backward()
        return session, counters["stats"]["unique_graphs"], [*losses, *(one.grad for one in model.parameters())]

    def captured(model):
        return gaff.capture(model, "**", "**:grad_output")

    _, graphs, bare = trained(lambda model: contextlib.nullcontext())
    truth, *_ = trained(captured, is_compiled=False)
    watch = partial(gaff.watch, every=1, out=tmp_path / "run")
    edit = {"0" if kind != "encoder" else "linear1": edits.scale(1.0)}
    for opened in (captured, watch, lambda model: gaff.edit(model, edit), gaff.guard):
        session, made_, numbers = trained(opened)
        assert made_ == graphs
        assert all(map(torch.equal, numbers, bare))
        if opened is captured:
            for site in truth:
                torch.testing.assert_close(session.run(1)[site], truth.run(1)[site], rtol=0, atol=0)


class DecoratedOutside(nn.Module):
    """Its forward is compiled by a decorator that torch itself wrote."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    @torch.compile(backend="aot_eager")
    def forward(self, x):
        return self.inner(x).relu()


def test_a_forward_that_was_decorated_stays_in_the_graph_of_what_is_compiled_around_it(tmp_path):
    def trained(opened):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model, x = nn.Sequential(DecoratedOutside(), nn.Tanh(), Mine()), torch.randn(3, 4)
        around = Around(model)
        around.compile(backend="aot_eager", fullgraph=True)
        with opened(around) as session:
            around(x).square().mean().backward()
        return session, [one.grad for one in model.parameters()]

    def captured(model):
        return gaff.capture(model, "inner.0", "inner.0.inner:grad_output")

    _, bare = trained(lambda model: contextlib.nullcontext())
    for opened in (captured, partial(gaff.watch, every=1, out=tmp_path / "run")):
        session, numbers = trained(opened)
        assert all(map(torch.equal, numbers, bare))
        if opened is captured:
            assert session["inner.0"].shape == session["inner.0.inner:grad_output"].shape == (3, 4)


class State:
    def __init__(self):
        self.gain, self.seen = 1.0, None


class WritesObject(Two):
    """Makes an object, and writes into it between and after its modules."""

    def forward(self, x):
        state = State()
        h = self.a(x)
        state.gain, state.seen, state.new = 3.0, h, 2.0
        return self.b(state.seen * state.gain * state.new)


class WritesSelf(Two):
    """Adds up a second loss in an attribute of its own, as mixtures of experts do."""

    def forward(self, x):
        self.aux = 0.0
        for block in (self.a, self.b):
            x = block(x)
            self.aux = self.aux + x.square().mean()
        return x


class WritesGiven(Two):
    """Fills a cache that it makes itself if it is given none, as language models do."""

    def forward(self, x, cache=None):
        cache = State() if cache is None else cache
        for block in (self.a, self.b):
            x = block(x)
            cache.seen = x if cache.seen is None else cache.seen + x
        return x * cache.seen


@pytest.mark.parametrize("fullgraph", [True, False])
@pytest.mark.parametrize("make", [WritesObject, WritesSelf, WritesGiven])
def test_what_a_forward_writes_into_objects_is_there_after_hooks_of_gradients(make, fullgraph, tmp_path):
    torch.manual_seed(0)
    model, x = make(), torch.randn(3, 4)

    def outcome(one):
        model.zero_grad(set_to_none=True)
        y = one(x)
        (y.sum() + getattr(model, "aux", 0.0)).backward()
        found = [y.detach().clone(), model.a.weight.grad.clone(), torch.as_tensor(getattr(model, "aux", 0.0)).detach()]
        model.__dict__.pop("aux", None)
        return found

    expected = outcome(model)
    ran = torch.compile(model, backend="aot_eager", fullgraph=fullgraph)
    counters.clear()
    torch.testing.assert_close(outcome(ran), expected)
    graphs = counters["stats"]["unique_graphs"]
    with gaff.capture(ran, "a:grad_output", "b") as got:
        torch.testing.assert_close(outcome(ran), expected)
    assert got["a:grad_output"] is not None
    with gaff.edit(ran, {"a:grad_output": edits.scale(1.0), "b:grad_output": edits.scale(1.0)}) as receipt:
        torch.testing.assert_close(outcome(ran), expected)
    assert [one.hits for one in receipt.receipt.rows] == [1, 1]
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    with gaff.watch(ran, optimizer, out=tmp_path / "run", every=1):
        for _ in range(3):
            torch.testing.assert_close(outcome(ran), expected)
            optimizer.step()
    told = gaff.load(tmp_path / "run").series("a:grad_output", "norm").values
    assert len(told) == 3
    assert all(map(math.isfinite, told))
    counters.clear()
    torch.testing.assert_close(outcome(ran), expected)  # by the graph that was there before
    assert (graphs, counters["stats"]["unique_graphs"]) == (1, 0)


def test_a_compiled_step_that_calls_backward_is_not_compiled_again_for_sessions():
    model, x = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), torch.randn(3, 4)

    @torch.compile(backend="eager")
    def step(x):
        model.zero_grad()
        loss = model(x).pow(2).mean()
        loss.backward()
        return loss

    step(x)
    with gaff.capture(model, "0.weight:grad", reduce=gaff.keep.norm()) as got:
        step(x)
        with torch._dynamo.config.patch(error_on_recompile=True):
            for _ in range(4):
                step(x)
    assert len(got.all("0.weight:grad")) == 5


def reads_a_value(tensor):
    return tensor * 3 if tensor.sum() > 0 else tensor * 2


def raises(tensor):
    raise ValueError("mine")


@pytest.mark.parametrize("port", ["b", "b:grad_output"])
@pytest.mark.parametrize("change", [reads_a_value, edits.add(torch.ones(7)), raises], ids=["reads", "misfit", "raises"])
@pytest.mark.parametrize("was_compiled", [True, False])
def test_an_edit_that_no_graph_can_hold_leaves_the_program_as_it_was_compiled(port, change, was_compiled):
    model, x, sizes = Two(), torch.randn(3, 4), []

    def backend(graph, given):
        size = sum(node.op.startswith("call") for node in graph.graph.nodes)

        def run(*args):
            sizes.append(size)
            return graph(*args)

        return run

    ran = torch.compile(model, backend=backend)

    def graphs():
        sizes.clear()
        ran(x)["y"].sum().backward()
        return list(sizes)

    before = graphs() if was_compiled else [2]
    edit = gaff.edit(ran, {port: change})
    with contextlib.suppress(Exception), edit:
        graphs()
    assert graphs() == before == [2]
    if change is reads_a_value:
        assert any("could not be compiled" in one for one in edit.receipt.notes)


def test_a_gradient_that_compiled_autograd_hides_is_refused():
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), torch.randn(3, 4)
    ran = torch.compile(model, backend="aot_eager")
    with gaff.capture(ran, "2:grad_output", "2.weight:grad") as got:
        loss = ran(x).sum()
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
            loss.backward()
    with pytest.raises(gaff.GaffError, match="compiled autograd was switched on while the session was open"):
        got["2:grad_output"]


class Remembering(nn.Linear):
    """Keeps what it returned, as a cache or an auxiliary loss does."""

    def forward(self, x):
        self.last = super().forward(x)
        return self.last


class Kept(nn.Module):
    """Writes into what its layer has returned, which the layer, or a hook on it, has kept."""

    def __init__(self, kind):
        super().__init__()
        self.lin = kind(4, 4)
        if kind is nn.Linear:
            self.lin.register_forward_hook(self.keep)

    @staticmethod
    def keep(module, args, output):
        module.last = output

    def forward(self, x):
        h = self.lin(x)
        h.mul_(2)
        return h + self.lin.last


@pytest.mark.parametrize("kind", [Remembering, nn.Linear])
def test_what_a_layer_returned_stays_the_tensor_that_somebody_keeps(kind):
    torch.manual_seed(0)
    model, x = Kept(kind), torch.randn(2, 3, 4)
    plain = model(x)
    compiled = torch.compile(model, backend="aot_eager")
    with gaff.capture(compiled, "lin:grad_output"):
        out = compiled(x)
        out.sum().backward()
    torch.testing.assert_close(out, plain)


class Static(nn.Module):
    @staticmethod
    def forward(x):
        return x * 2


class OfClass(nn.Module):
    factor = 2.0

    @classmethod
    def forward(cls, x):
        return x * cls.factor


class Read(nn.Module):
    @property
    def forward(self):
        return self.doubled

    def doubled(self, x):
        return x * 2


@pytest.mark.parametrize("kind", [Static, OfClass, Read])
def test_forwards_that_are_no_methods(tmp_path, kind):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 4), kind(), nn.Linear(4, 4)), torch.randn(3, 4)
    plain = model(x)
    compiled = torch.compile(model, backend="aot_eager")
    compiled(x)
    for one in (model, compiled):
        with gaff.capture(one, "1", "1:grad_output") as got:
            out = one(x)
            out.sum().backward()
        assert torch.equal(out, plain)
        assert torch.equal(got["1"], 2 * model[0](x))
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    with gaff.watch(compiled, optimizer, out=tmp_path / "run", every=1) as watch:
        out = compiled(x)
        out.sum().backward()
        optimizer.step()
    assert torch.equal(out, plain)
    assert watch.failure is None


def test_keys_of_dicts_in_compiled_code_are_those_of_eager_code():
    class Edges(nn.Module):
        def forward(self, given):
            return {key: 2 * value for key, value in given.items()}

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.edges = Edges()

        def forward(self, given):
            return sum(one.sum() for one in self.edges(given).values())

    given = {
        ("user", "rates", "item"): torch.ones(2),
        1.5: torch.zeros(2),
        "1.5": torch.full((2,), 3.0),
        7: torch.ones(1),
    }
    model = torch.compile(Net(), backend="aot_eager")
    with gaff.capture(model, "edges", "edges:input[0]") as got:
        model(given)
    for key, value in given.items():
        assert torch.equal(got["edges:input[0]"][key], value)
        assert torch.equal(got["edges"][key], 2 * value)


def test_a_stance_that_the_program_sets_inside_a_session_stays():
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
    model = nn.ReLU()
    try:
        with gaff.capture(model, "/relu"):
            torch.compiler.set_stance("fail_on_recompile")
            model(torch.ones(2))
        assert compiler.stance() == "fail_on_recompile"
    finally:
        torch.compiler.set_stance("default")
