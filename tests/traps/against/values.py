"""Values: what passed at a module is what the tool gives, whatever happened to the memory, the call or the mode around it."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from traps.against.suite import Cannot, must_be_told, nothing_told, refused, same
from zoo import Checkpointed


def trap_value_before_an_in_place_op(tool):
    """The output of a layer whose memory the next one writes into."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True))
    x = torch.randn(3, 4)
    true = F.linear(x, model[0].weight, model[0].bias)
    same(tool.values(model, ["0:output"], x)["0:output"], [true])


def trap_input_of_an_in_place_module(tool):
    """What came in, though the module writes into it."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True))
    x = torch.randn(3, 4)
    true = F.linear(x, model[0].weight, model[0].bias)
    same(tool.values(model, ["1:input"], x)["1:input"], [true])


class Cut(nn.Module):
    def forward(self, y):
        return y[:, :2]


class Views(nn.Module):
    """The base of a view is written to after the view passed, and then the view."""

    def __init__(self):
        super().__init__()
        self.cut = Cut()

    def forward(self, x):
        y = x * 2
        view = self.cut(y)
        y.add_(1)
        view.mul_(5)
        return y


def trap_view_whose_base_changes_later(tool):
    """A slice, which is written to afterwards, as is the tensor that it is of."""
    model, x = Views(), torch.randn(3, 4)
    same(tool.values(model, ["cut:output"], x)["cut:output"], [(x * 2)[:, :2]])


def trap_output_that_the_caller_overwrites(tool):
    """The caller writes into what the model returned."""
    model, x = nn.Sequential(nn.Linear(4, 4)), torch.randn(3, 4)
    true = model(x)

    def program():
        with torch.no_grad():
            model(x).zero_()

    same(tool.values_during(model, ["0:output"], program)["0:output"], [true])


class Loop(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x, times):
        for _ in range(times):
            x = self.lin(x)
        return x


def trap_module_called_in_a_loop(tool):
    """Every call of a loop, in order."""
    model, x = Loop(), torch.randn(2, 4)
    true, y = [], x
    for _ in range(3):
        y = model.lin(y)
        true.append(y)
    same(tool.values(model, ["lin:output"], x, 3)["lin:output"], true)


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x):
        return self.lin(torch.tanh(self.lin(x)))


def trap_module_that_serves_twice(tool):
    """A layer with shared weights, called in two places."""
    model, x = Shared(), torch.randn(2, 4)
    one = model.lin(x)
    true = [one, model.lin(torch.tanh(one))]
    same(tool.values(model, ["lin:output"], x)["lin:output"], true)


class Keywords(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        return self.inner(input=x)


def trap_input_given_by_keyword(tool):
    """The input of a layer that is called by keyword."""
    model, x = Keywords(), torch.randn(2, 4)
    same(tool.values(model, ["inner:input"], x)["inner:input"], [x])


class Branches(nn.Module):
    """Which branch runs, and how, is decided by the data."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.one(x) if x.sum() > 0 else self.two(x)


def trap_branch_that_the_data_choose(tool):
    """Python control flow that depends on values."""
    model, x = Branches(), torch.ones(2, 4)
    same(tool.values(model, ["one:output"], x)["one:output"], [model.one(x)])


class Skips(nn.Module):
    """One of its modules is never called."""

    def __init__(self):
        super().__init__()
        self.used, self.skipped = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.used(x)


def trap_module_that_does_not_run(tool):
    """A module that is never called: the tool says so, or gives nothing."""
    model, x = Skips(), torch.ones(2, 4)
    nothing_told(lambda: tool.values(model, ["skipped:output"], x), "skipped:output")


def trap_path_that_is_not_there(tool):
    """A name with a typing error."""
    model, x = Skips(), torch.ones(2, 4)
    must_be_told(lambda: tool.values(model, ["usde:output"], x), "usde")


@dataclass
class Record:
    hidden: torch.Tensor
    size: int


class Pair(NamedTuple):
    hidden: torch.Tensor
    rest: torch.Tensor


class Makes(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.lin, self.make = nn.Linear(4, 4), make

    def forward(self, x):
        return self.make(self.lin(x))


class Inside(nn.Module):
    def __init__(self, make, read):
        super().__init__()
        self.inner, self.read = Makes(make), read

    def forward(self, x):
        return self.read(self.inner(x)) * 2


def _structure(tool, make, read):
    model, x = Inside(make, read), torch.randn(2, 4)
    true = model.inner.lin(x)
    found = tool.values(model, ["inner:output"], x)["inner:output"]
    assert len(found) == 1, f"{len(found)} values, expected 1"
    try:  # tools that give the first tensor of a structure give the one that is asked for
        entry = found[0] if isinstance(found[0], torch.Tensor) else read(found[0])
    except (LookupError, TypeError, AttributeError):
        raise AssertionError(f"a {type(found[0]).__name__} without that entry") from None
    same([entry], [true])


def trap_output_that_is_a_dict(tool):
    """A module that returns a dict, by its key."""
    _structure(tool, lambda y: {"rest": [y * 2, None], "hidden": y}, lambda out: out["hidden"])


def trap_output_that_is_a_named_tuple(tool):
    """A module that returns a named tuple."""
    _structure(tool, lambda y: Pair(y, y * 2), lambda out: out[0])


def trap_output_that_is_a_dataclass(tool):
    """A module that returns a plain dataclass."""
    _structure(tool, lambda y: Record(y, 3), lambda out: out.hidden)


def _recomputed(tool, use_reentrant):
    model, x = Checkpointed(use_reentrant), torch.randn(2, 4, requires_grad=True)
    true = model.first[0](x)
    found = tool.values(model, ["first.0:output"], x, loss=lambda y: y.pow(2).sum())
    same(found["first.0:output"], [true])


def trap_values_under_a_checkpoint(tool):
    """A layer inside an activation checkpoint, and the backward pass afterwards."""
    _recomputed(tool, use_reentrant=False)


def trap_values_under_a_reentrant_checkpoint(tool):
    """A layer inside a reentrant checkpoint, and the backward pass afterwards."""
    _recomputed(tool, use_reentrant=True)


def trap_somebodys_training_step_under_a_checkpoint(tool):
    """Somebody's training step under a checkpoint: that the backward pass runs the layer again is no second value."""
    model, x = Checkpointed(False), torch.randn(2, 4, requires_grad=True)
    true = model.first[0](x)
    found = tool.values_during(model, ["first.0:output"], lambda: model(x).pow(2).sum().backward())
    same(found["first.0:output"], [true])


class Casts(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.lin(x).float()


def trap_dtype_under_autocast(tool):
    """Under autocast: the dtype that passed."""
    model, x = Casts(), torch.randn(2, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        true = model.lin(x)
    same(tool.values(model, ["lin:output"], x)["lin:output"], [true])


def trap_value_in_inference_mode(tool):
    """Inference mode, with a layer that is overwritten: there is no version counter to go by."""
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True)), torch.randn(2, 4)
    true = F.linear(x, model[0].weight, model[0].bias)
    with torch.inference_mode():
        found = tool.values(model, ["0:output"], x)
    same(found["0:output"], [true])


def trap_run_inside_vmap(tool):
    """Inside ``torch.func.vmap`` values are wrappers of one row: the batch, or a refusal."""
    model, x = nn.Sequential(nn.Linear(3, 3)), torch.randn(2, 3)
    true = model(x)
    found = {}

    def ask():
        values = tool.values_during(model, ["0:output"], lambda: torch.func.vmap(model)(x))
        found["0:output"] = [one + 0 for one in values["0:output"]]  # a wrapper raises when it is used

    if not refused(ask):
        same(found["0:output"], [true])


class Gate(nn.Module):
    """Before it lets the first value through, it has another thread do something."""

    def __init__(self):
        super().__init__()
        self.other = None

    def forward(self, x):
        other, self.other = self.other, None
        if other is not None:
            with ThreadPoolExecutor(1) as pool:
                pool.submit(other).result(timeout=20)
        return x


def trap_another_thread_runs_the_model(tool):
    """A server's other thread runs the model meanwhile: its values are not among ours, and its answer is right."""
    model = nn.Sequential(nn.Linear(4, 4), Gate(), nn.Tanh())
    ours, theirs, answers = torch.zeros(2, 4), torch.ones(2, 4), []
    true, answer = model[0](ours), model(theirs)
    model[1].other = lambda: answers.append(model(theirs))
    same(tool.values(model, ["0:output"], ours)["0:output"], [true])
    same(answers, [answer])


class Drops(nn.Module):
    def __init__(self):
        super().__init__()
        self.drop, self.norm = nn.Dropout(0.5), nn.BatchNorm1d(4)

    def forward(self, x):
        return self.norm(self.drop(x))


def trap_random_numbers_of_the_run(tool):
    """Random numbers: dropout draws what it draws without the tool."""
    model, x = Drops(), torch.randn(8, 4)
    torch.manual_seed(1)
    true = model.drop(x)
    torch.manual_seed(1)
    same(tool.values(model, ["drop:output"], x)["drop:output"], [true])


def trap_model_runs_once(tool):
    """Running statistics are those of one call at most."""
    model, x = Drops(), torch.randn(8, 4)
    tool.values(model, ["drop:output"], x)
    assert model.norm.num_batches_tracked <= 1, f"the batch was counted {model.norm.num_batches_tracked} times"


def trap_code_that_calls_the_model_itself(tool):
    """Somebody's function calls the model several times: every call, in order."""
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(2, 4)
    true = [model[0](x * scale) for scale in (1, 2, 3)]

    def program():
        return sum(model(x * scale) for scale in (1, 2, 3))

    same(tool.values_during(model, ["0:output"], program)["0:output"], true)


def trap_model_that_is_compiled_already(tool):
    """``torch.compile`` has compiled the model, which has run; now somebody wants to look inside."""
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(2, 4)
    true = model[0](x)
    compiled = torch.compile(model, backend="aot_eager")
    compiled(x)
    try:
        found = tool.values_during(model, ["0:output"], lambda: compiled(x))
    except Cannot:
        found = tool.values(compiled, ["0:output"], x)
    same(found["0:output"], [true])


class Quantizes(nn.Module):
    def forward(self, x):
        return torch.quantize_per_tensor(x, 0.1, 0, torch.qint8)


def trap_quantized_tensor(tool):
    """A quantized tensor with its scale."""
    model, x = nn.Sequential(Quantizes()), torch.randn(2, 3)
    true = model(x).dequantize()
    found = tool.values(model, ["0:output"], x)["0:output"]
    same([one.dequantize() for one in found], [true])


class Functions(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x):
        x = torch.relu(self.lin(x))
        x = torch.relu(x @ self.lin.weight)
        return x * 2


def trap_function_that_is_no_module(tool):
    """The second ``torch.relu`` of a forward."""
    model, x = Functions(), torch.randn(2, 4)
    true = torch.relu(torch.relu(model.lin(x)) @ model.lin.weight)
    same(tool.ops(model, [("relu", 1)], x), [true])


def trap_operator_inside_an_expression(tool):
    """The product in ``torch.relu(x @ w)``, which has no name of its own."""
    model, x = Functions(), torch.randn(2, 4)
    true = torch.relu(model.lin(x)) @ model.lin.weight
    same(tool.ops(model, [("matmul", 0)], x), [true])
