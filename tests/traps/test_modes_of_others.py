"""Dispatch modes count and keep operations: those of gaff are none of the program's."""

import functools
import subprocess
import sys
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

import gaff

ASKING = ("__get__", "_is_view", "is_inference", "_set_grad_enabled")  # reads of what a tensor is, and grad mode
OPTIONS = [{}, {"reduce": gaff.keep.project(3)}, {"reduce": gaff.keep.mean(1)}, {"clone": True}, {"dtype": torch.float64},
           {"reduce": lambda value: value.mm(value.t())}]  # fmt: skip


class Block(nn.Module):
    def __init__(self, policy):
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3, bias=False)
        self.policy = policy

    def inside(self, x):
        return self.b(torch.sigmoid(self.b(torch.sigmoid(self.a(x)))))

    def forward(self, x):
        contexts = functools.partial(create_selective_checkpoint_contexts, self.policy)
        return checkpoint(self.inside, x, use_reentrant=False, context_fn=contexts)


def save_all(ctx, op, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("policy", [[torch.ops.aten.mm.default], save_all])
def test_a_selective_checkpoint_keeps_no_operation_of_gaff(policy, options):
    model, x = nn.Sequential(Block(policy)), torch.randn(2, 3)
    model(x).sum().backward()
    bare = [one.grad.clone() for one in model.parameters()]
    model.zero_grad()
    with gaff.capture(model, "0.a", "0.b", **options):
        model(x).sum().backward()
    assert all(torch.equal(one.grad, grad) for one, grad in zip(model.parameters(), bare, strict=True))


@pytest.mark.parametrize("options", OPTIONS)
def test_a_mode_of_the_program_sees_what_the_program_does(options):
    class Log(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.ops = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.ops.append(str(func))
            return func(*args, **(kwargs or {}))

    model, x = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), torch.randn(3, 3)
    with Log() as bare, FlopCounterMode(display=False) as flops:
        model(x).sum().backward()
    model.zero_grad()
    with gaff.capture(model, "*", "*:grad_output", **options), Log() as seen, FlopCounterMode(display=False) as counted:
        model(x).sum().backward()
    assert seen.ops == bare.ops
    assert counted.get_total_flops() == flops.get_total_flops()


class Coarse(TorchDispatchMode):
    """Rounds what every operation returns, as who simulates another precision does."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        told = func(*args, **(kwargs or {}))
        return told.bfloat16().to(told.dtype) if isinstance(told, torch.Tensor) and told.is_floating_point() else told


class CoarseFunctions(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        told = func(*args, **(kwargs or {}))
        is_value = isinstance(told, torch.Tensor) and func.__name__ not in ASKING
        return told.bfloat16().to(told.dtype) if is_value and told.is_floating_point() else told


@pytest.mark.parametrize("mode", [Coarse, CoarseFunctions, FakeTensorMode])
def test_what_is_read_inside_a_mode_of_the_program_is_what_was_kept(mode):
    model, x = nn.Sequential(nn.Linear(3, 3), nn.Tanh()), torch.randn(4, 3, requires_grad=True)
    with gaff.capture(model, "0", "1:input", "0:grad_output", "0.weight:param", "0.weight:grad") as got:
        model(x).sum().backward()
    truth = {address: got[address] for address in got}
    with mode():
        told = {address: got[address] for address in got}
        stacked = got.stack("0", "1:input")
    for address, value in truth.items():
        assert torch.equal(told[address], value)
    assert torch.equal(stacked[0], truth["0"])


@pytest.mark.parametrize("mode", [Coarse, CoarseFunctions])
def test_what_is_put_in_is_what_was_given_whatever_a_mode_makes_of_operations(mode):
    model, x, value = nn.Sequential(nn.Linear(3, 3), nn.Tanh()), torch.randn(4, 3), torch.randn(4, 3)
    with gaff.capture(model, "0") as got:
        model(x)
    for edit, wanted in [(gaff.edits.replace(value), value), (gaff.edits.patch(value), value),
                         (gaff.edits.patch(got), got["0"])]:  # fmt: skip
        seen = []
        handle = model[1].register_forward_pre_hook(lambda module, args, seen=seen: seen.extend(args))
        with gaff.edit(model, {"0": edit}), mode():
            model(x)
        handle.remove()
        assert torch.equal(seen[0], wanted)


@pytest.mark.slow
def test_what_a_process_tries_first_is_tried_outside_of_modes():
    program = """
import torch, gaff, functools
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts as contexts
with FakeTensorMode():
    model = nn.Sequential(nn.Linear(3, 2))
    with gaff.capture(model, "0", reduce=gaff.keep.project(4)) as got: model(torch.randn(5, 3))
    assert got["0"].shape == (5, 4)
class Model(nn.Module):
    def __init__(self): super().__init__(); self.a = nn.Linear(3, 3)
    def forward(self, x):
        save = functools.partial(contexts, lambda *args, **kwargs: CheckpointPolicy.MUST_SAVE)
        return checkpoint(self.a, x, use_reentrant=False, context_fn=save)
model = Model()
with gaff.edit(model, {"a": gaff.edits.scale(2.0)}): model(torch.randn(2, 3)).sum().backward()
model = nn.Sequential(nn.Linear(3, 2))
with gaff.capture(model, "0", reduce=gaff.keep.project(4)) as got: model(torch.randn(5, 3))
assert got["0"].shape == (5, 4) and type(got["0"]) is torch.Tensor
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_projection_has_the_precision_that_it_says_under_autocast():
    model, x = nn.Sequential(nn.Linear(3, 3)), torch.randn(2, 3)
    with torch.autocast("cpu", torch.bfloat16), gaff.capture(model, "0", reduce=gaff.keep.project(3)) as got:
        output = model(x)
    assert got["0"].dtype == torch.float32
    assert torch.equal(got["0"], gaff.keep.project(3)(output))


def test_a_fake_value_is_kept_as_one():
    with FakeTensorMode():
        model = nn.Sequential(nn.Linear(3, 2))
        with gaff.capture(model, "0") as got:
            model(torch.randn(5, 3))
    assert got["0"].shape == (5, 2)


@pytest.mark.parametrize("address", ["0:outer_grad", "0:grad_output", "0:grad_input", "0:input_grad", "0.weight:grad"])
@pytest.mark.parametrize("session", [gaff.capture, lambda model, one: gaff.edit(model, {one: lambda grad: grad})])
def test_a_function_mode_of_the_program_sees_and_changes_what_the_program_does(session, address):
    """As a mode that injects faults: what gaff calls is none of the program's functions."""

    class Log(TorchFunctionMode):
        def __init__(self):
            super().__init__()
            self.names = []

        def __torch_function__(self, func, types, args=(), kwargs=None):
            if func.__name__ not in ASKING:
                self.names.append(func.__name__)
            told = func(*args, **(kwargs or {}))
            is_value = isinstance(told, torch.Tensor) and func.__name__ in ("linear", "tanh", "view_as", "detach")
            return told * 1.001 if is_value else told

    model, x, both = nn.Sequential(nn.Linear(3, 3), nn.Tanh()), torch.randn(2, 3), []
    for is_open in (False, True):
        model.zero_grad()
        given, log = x.clone().requires_grad_(), Log()
        with session(model, address) if is_open else nullcontext():
            with log:
                y = model(given)
            y.sum().backward()
        both.append((y, given.grad, model[0].weight.grad, log.names))
    for one, other in zip(*both, strict=True):
        assert one == other if isinstance(one, list) else torch.equal(one, other)
