"""``gaff.anatomy``: which gradient is whose, and what the legacy hook shows beside the truth."""

import json
import warnings
import xml.etree.ElementTree as ElementTree

import pytest
import torch
from torch import nn

import gaff
from gaff.errors import PlanError
from gaff.inspection.explanation import explain_inside
from tests.test_ops import Block


class Two(nn.Module):
    """Two outputs, the first without a graph where asked."""

    def __init__(self, detached=False):
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.detached = detached

    def forward(self, x):
        y = self.lin(x)
        return (y.detach() if self.detached else y, (y * 2).relu())


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


class Custom(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        return self.inner(Double.apply(x))


MODULES = [
    (lambda: nn.Linear(4, 5), (1, 4)),
    (lambda: nn.Linear(4, 5, bias=False), (2, 3, 4)),
    (lambda: nn.Conv2d(3, 2, 2), (1, 3, 4, 4)),
    (lambda: nn.LayerNorm(4), (2, 4)),
    (lambda: nn.BatchNorm1d(4), (3, 4)),
    (Block, (3, 4)),
    (lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh()), (3, 4)),
    (lambda: nn.ReLU(), (3, 4)),
    (lambda: nn.GELU(), (3, 4)),
    (lambda: nn.LSTM(4, 3), (5, 2, 4)),
    (Two, (3, 4)),
    (lambda: Two(detached=True), (3, 4)),
]


def legacy(module, x):
    seen = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        handle = module.register_backward_hook(lambda m, given, came: seen.append((given, came)))
        output = module(x)
    outputs = [one for one in (output if isinstance(output, tuple) else (output,)) if isinstance(one, torch.Tensor)]
    nested = [one for part in (output if isinstance(output, tuple) else ()) if isinstance(part, tuple) for one in part]
    tensors = [one for one in (*outputs, *nested) if one.requires_grad]
    torch.autograd.backward(tensors, [torch.ones_like(one) for one in tensors])
    handle.remove()
    return seen


@pytest.mark.parametrize(("build", "shape"), MODULES)
def test_what_the_legacy_hook_shows_is_told_as_it_is(build, shape):
    torch.manual_seed(0)
    module, x = build(), torch.randn(shape, requires_grad=True)
    told = gaff.anatomy(module, x)
    seen = legacy(module, x)
    if not seen:
        assert not told.legacy_input
        assert "would not be called" in str(told)
        return
    for edges, gradients in zip((told.legacy_input, told.legacy_output), seen[0], strict=True):
        assert [edge.norm is None for edge in edges] == [one is None for one in gradients]
        for edge, gradient in zip(edges, gradients, strict=True):
            if gradient is not None:
                assert edge.shape == "x".join(map(str, gradient.shape))
                assert edge.norm == pytest.approx(gradient.norm().item(), rel=1e-4)


@pytest.mark.parametrize(("build", "shape"), MODULES)
def test_gradients_of_inputs_and_parameters_are_true_and_nothing_is_left(build, shape):
    torch.manual_seed(0)
    module, x = build(), torch.randn(shape)
    told = gaff.anatomy(module, x)
    assert all(parameter.grad is None for parameter in module.parameters())
    assert not any(inner._forward_hooks or inner._forward_pre_hooks for inner in module.modules())
    leaf = x.clone().requires_grad_()
    legacy(module, leaf)
    assert told.grad_input[0].norm == pytest.approx(leaf.grad.norm().item(), rel=1e-4)
    norms = {edge.whose.removesuffix(":param"): edge.norm for edge in told.parameters}
    for name, parameter in module.named_parameters():
        assert norms[name] == pytest.approx(parameter.grad.norm().item(), rel=1e-4)


def test_the_question_of_the_tutorials_is_answered_in_words():
    text = str(gaff.anatomy(nn.Linear(4, 5), torch.randn(1, 4)))
    assert "[5] is the gradient of bias:param, norm" in text
    assert "[1, 4] is the gradient of :input[0], norm" in text
    assert "[4, 5] is the gradient of weight:param, by way of TBackward0, norm" in text
    assert "inputs of an autograd node (bias, input, weight), not those of the module" in text
    assert len(gaff.anatomy(nn.Conv2d(3, 2, 2), torch.randn(1, 3, 4, 4)).legacy_input) == 3
    assert "here both agree" in str(gaff.anatomy(nn.ReLU(), torch.randn(3, 4)))
    text = str(gaff.anatomy(Block(), torch.randn(3, 4)))
    assert "so it tells of one node only, of /relu#1" in text


def test_nodes_are_in_order_with_op_and_line():
    told = gaff.anatomy(Block(), torch.randn(3, 4))
    rows = [(row.name, row.site) for row in told.nodes[:4]]
    assert rows[:3] == [("ReluBackward0", "/relu#1"), ("AddBackward0", "/add#0"), ("MulBackward0", "/mul#0")]
    assert told.nodes[1].place.startswith("test_ops.py:")
    assert "x + y" in told.nodes[1].code
    assert told.tree().splitlines()[1].startswith("  AddBackward0  /add#0")


def test_a_custom_function_is_the_module_s_that_calls_it():
    told = gaff.anatomy(Custom(), torch.randn(3, 4))
    assert next(row.site for row in told.nodes if row.name == "DoubleBackward") == "/Double"


def test_a_tensor_given_several_times_is_told_as_one():
    x = torch.randn(5, 2, 8)
    told = gaff.anatomy(nn.MultiheadAttention(8, 2), x, x, x)
    assert [edge.whose for edge in told.grad_input] == [
        ":input[0] = :input[1] = :input[2], one tensor: the total of all its uses"
    ]


def test_a_module_that_writes_into_its_input_is_given_a_copy():
    told = gaff.anatomy(nn.ReLU(inplace=True), torch.randn(3, 4))
    assert "was given a copy" in str(told)
    assert told.nodes[0].name == "ReluBackward0"


def test_the_picture_is_whole_and_escaped():
    class Odd(nn.Module):
        def forward(self, x):
            return x * 2

    Odd.__name__ = "<Odd & co>"
    told = gaff.anatomy(Odd(), torch.randn(3, 4))
    root = ElementTree.fromstring(told.to_svg())
    assert root.find("{http://www.w3.org/2000/svg}title").text == "backward of <Odd & co>"
    assert len(root.findall("{http://www.w3.org/2000/svg}g")) == len(told.nodes)


def test_what_has_no_graph_is_refused():
    with pytest.raises(PlanError, match="without a graph"):
        gaff.anatomy(nn.Flatten(), torch.zeros(2, 3, dtype=torch.long))
    with pytest.raises(PlanError, match="inference_mode"), torch.inference_mode():
        gaff.anatomy(nn.Linear(2, 2), torch.zeros(1, 2))


def test_json_is_what_any_reader_takes_and_reads_back(tmp_path):
    class Divided(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x):
            h = self.a(x)
            return self.b(h / (h - h).sum(-1, keepdim=True))

    told = gaff.anatomy(Divided(), torch.randn(1, 2))
    text = told.to_json()
    json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    assert '"number": "nan"' in " ".join(text.split())
    told.save(tmp_path / "a.json")
    assert gaff.load(tmp_path / "a.json").to_json() == text


class Mixed(nn.Module):
    """Runs a part of it in bfloat16, and the rest as it is."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(4, 4), nn.Linear(4, 2), nn.Linear(2, 2)

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            made = self.second(self.first(x))
        return self.last(made.float())


def test_a_module_is_explained_under_the_autocast_that_is_around_it():
    model, x = Mixed(), torch.randn(2, 4)
    for path, is_cast in (("first", True), ("second", True), ("last", False)):
        names = [row.name for row in explain_inside(model, path, (x,), {}).nodes]
        assert any(name.startswith("ToCopyBackward") for name in names) is is_cast, names
    with torch.autocast("cpu", torch.bfloat16):
        names = [row.name for row in explain_inside(model, "first", (x,), {}).nodes]
        assert any(name.startswith("ToCopyBackward") for name in names)
    assert not torch.is_autocast_enabled("cpu")
