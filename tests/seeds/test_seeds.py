"""Every snippet of the tutorials that gaff grew from, with their numbers and shapes, next to how gaff does it."""

import warnings

import pytest
import torch
from torch import nn

import gaff


class MyNet(nn.Module):
    """The network of the first and third tutorial."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 10, 2, stride=2)
        self.relu = nn.ReLU()
        self.flatten = lambda x: x.view(-1)
        self.fc1 = nn.Linear(160, 5)

    def forward(self, x):
        x = self.relu(self.conv(x))
        return self.fc1(self.flatten(x))


def test_gradient_shapes_of_conv_and_fc1_with_none_named():
    """The tutorials print [5] and [1, 5] for fc1 and wonder; the gradients are these."""
    net, inp = MyNet(), torch.randn(1, 3, 8, 8)
    with gaff.capture(
        net, "conv", "fc1:grad_input", "fc1:grad_output", "conv:grad_output", "conv:grad_input", "*.*:grad"
    ) as got:
        (1 - net(inp).mean()).backward()
    assert got["fc1:grad_output"].shape == (5,)
    assert got["fc1:grad_output"].tolist() == pytest.approx([-0.2] * 5)
    assert got["fc1:grad_input"].shape == (160,)
    assert got["conv:grad_output"].shape == (1, 10, 4, 4)
    assert got["conv:grad_input"] is None
    assert got["conv.weight:grad"].shape == (10, 3, 2, 2)
    assert got["conv.bias:grad"].shape == (10,)
    assert got["fc1.weight:grad"].shape == (5, 160)
    trace = gaff.trace(net, inp, backward=lambda y: 1 - y.mean())
    assert "None: the tensor does not require grad" in str(trace)


def test_what_the_legacy_hook_shows_instead():
    net, inp = MyNet(), torch.randn(1, 3, 8, 8)
    shown = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        net.conv.register_backward_hook(lambda m, i, o: shown.update(conv=(i, o)))
        net.fc1.register_backward_hook(lambda m, i, o: shown.update(fc1=(i, o)))
        (1 - net(inp).mean()).backward()
    assert [None if g is None else tuple(g.shape) for g in shown["conv"][0]] == [None, (10, 3, 2, 2), (10,)]
    assert shown["fc1"][1][0].shape == (5,)


def test_tensor_gradients_without_retain_grad():
    """a.grad 0.4, b.grad 0.2: the numbers of the tutorials on Tensor.register_hook."""
    a = torch.ones(5, requires_grad=True)
    b = 2 * a
    c = b.mean()
    with gaff.capture(a=a, b=b) as got:
        c.backward()
    assert got["a"].tolist() == pytest.approx([0.4] * 5)
    assert got["b"].tolist() == pytest.approx([0.2] * 5)
    assert a.grad.tolist() == pytest.approx([0.4] * 5)
    assert not b.retains_grad


def test_changing_b_grad_after_backward_changes_nothing():
    a = torch.ones(5, requires_grad=True)
    b = 2 * a
    b.retain_grad()
    b.mean().backward()
    b.grad *= 2
    assert a.grad.tolist() == pytest.approx([0.4] * 5)


class Sigmoids(nn.Module):
    """The network of the fourth tutorial, with its weights."""

    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(2, 2)
        self.s1 = nn.Sigmoid()
        self.fc2 = nn.Linear(2, 2)
        self.s2 = nn.Sigmoid()
        self.fc1.weight = nn.Parameter(torch.tensor([[0.15, 0.2], [0.250, 0.30]]))
        self.fc1.bias = nn.Parameter(torch.tensor([0.35]))
        self.fc2.weight = nn.Parameter(torch.tensor([[0.4, 0.45], [0.5, 0.55]]))
        self.fc2.bias = nn.Parameter(torch.tensor([0.6]))

    def forward(self, x):
        return self.s2(self.fc2(self.s1(self.fc1(x))))


def test_inputs_and_outputs_of_every_layer_forward_and_backward():
    net, x = Sigmoids(), torch.tensor([0.05, 0.1])
    with gaff.capture(net, "*", "*:input", "*:grad_output", "*:grad_input") as got:
        out = net(x)
        out.backward(torch.tensor([1, 1], dtype=torch.float), retain_graph=True)
    assert torch.equal(got["s2"], out)
    assert got["fc1"].tolist() == pytest.approx([0.3775, 0.3925])
    assert torch.equal(got["s1:input"], got["fc1"])
    assert got["fc1:grad_input"] is None
    true = torch.autograd.grad(net.s2(net.fc2(hidden := got["s1"].clone().requires_grad_())), hidden, torch.ones(2))[0]
    assert torch.equal(got["fc2:grad_input"], true)
    assert got["fc2:grad_input"].tolist() == pytest.approx([0.1625, 0.1806], abs=5e-5)


def test_the_legacy_hooks_value_is_another_one():
    """The hook of the tutorial shows 0.1868 and 0.1755 at fc2, where the gradient is 0.1625 and 0.1806."""
    net, x = Sigmoids(), torch.tensor([0.05, 0.1])
    shown = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        net.fc2.register_backward_hook(lambda m, i, o: shown.append(i))
        net(x).backward(torch.ones(2))
    assert shown[0][0].flatten().tolist() == pytest.approx([0.1868, 0.1755], abs=5e-5)


RESNET_SHAPES = [
    ("conv1", "10x64x112x112"),
    ("bn1", "10x64x112x112"),
    ("relu", "10x64x112x112"),
    ("maxpool", "10x64x56x56"),
    ("layer1", "10x256x56x56"),
    ("layer2", "10x512x28x28"),
    ("layer3", "10x1024x14x14"),
    ("layer4", "10x2048x7x7"),
    ("avgpool", "10x2048x1x1"),
    ("fc", "10x1000"),
]


@pytest.mark.slow
def test_verbose_execution_and_feature_extraction_on_resnet50():
    from examples.resnet50 import ResNet50

    torch.manual_seed(0)
    model, x = ResNet50().eval(), torch.ones(10, 3, 224, 224)
    with torch.no_grad():
        rows = {row.site: row.output for row in gaff.trace(model, x, flops=False).rows}
        features = gaff.take(model, "layer4", "avgpool")(x)
    assert [(name, rows[name]) for name, _ in RESNET_SHAPES] == RESNET_SHAPES
    assert {name: tuple(value.shape) for name, value in features.items()} == {
        "layer4": (10, 2048, 7, 7),
        "avgpool": (10, 2048, 1, 1),
    }


def test_a_gradient_replaced_by_ones_and_true_gradients_of_the_weights():
    """The tutorial's hook replaces everything in grad_in, the weight's gradient too; here only what is asked for."""
    linear, a = nn.Linear(10, 20), torch.randn(3, 10, requires_grad=True)
    with gaff.edit(linear, {":grad_input": gaff.edits.fill(1.0)}):
        linear(a).sum().backward()
    assert torch.equal(a.grad, torch.ones(3, 10))
    assert torch.equal(linear.weight.grad, a.detach().sum(0).expand(20, 10))


def test_a_gradient_changed_at_a_tensor_reaches_what_comes_before_it():
    """Changing ``b.grad`` after backward changes nothing; an edit of b's gradient reaches a."""
    a = torch.ones(5, requires_grad=True)
    b = 2 * a
    with gaff.edit({b: gaff.edits.scale(10.0)}):
        b.mean().backward()
    assert a.grad.tolist() == pytest.approx([4.0] * 5)


@pytest.mark.parametrize("how", ["edit", "clip_gradients"])
def test_gradients_clipped_at_a_thousandth(how):
    model, theirs, x = MyNet(), MyNet(), torch.randn(1, 3, 8, 8)
    theirs.load_state_dict(model.state_dict())
    for parameter in theirs.parameters():
        parameter.register_hook(lambda grad: grad.clamp_(-0.001, 0.001))
    if how == "edit":
        with gaff.edit(model, {"**:grad": gaff.edits.clamp(-0.001, 0.001)}) as changed:
            model(x).pow(2).mean().backward()
        assert all(row.hits == 1 for row in changed.receipt.rows)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with gaff.clip_gradients(optimizer, value=0.001, when="backward"):
            model(x).pow(2).mean().backward()
    theirs(x).pow(2).mean().backward()
    for one, other in zip(model.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


def test_the_lambda_that_no_hook_sees_is_a_site():
    """``self.flatten = lambda x: x.view(-1)`` is no module: tutorials cannot hook it."""
    net, inp = MyNet(), torch.randn(1, 3, 8, 8)
    with gaff.capture(net, "/view", "/view:input[0]", "/view:grad_output", "fc1:grad_input", "relu") as got:
        (1 - net(inp).mean()).backward()
    assert got["/view"].shape == (160,)
    assert torch.equal(got["/view"], got["relu"].view(-1))
    assert torch.equal(got["/view:input[0]"], got["relu"])
    assert torch.equal(got["/view:grad_output"], got["fc1:grad_input"])
    with gaff.edit(net, {"/view": gaff.edits.zero()}):
        assert torch.equal(net(inp), net.fc1.bias)


def test_why_the_legacy_hook_shows_what_it_shows():
    """Three entries for a convolution; [5] and [1, 5] for a linear layer that is given a vector: a view is its last node."""
    net, inp = MyNet(), torch.randn(1, 3, 8, 8)
    told = gaff.anatomy(net.conv, inp)
    assert [edge.whose for edge in told.legacy_input] == [":input[0]", "weight:param", "bias:param"]
    assert "inputs of an autograd node (bias, input, weight), not those of the module" in str(told)
    told = gaff.anatomy(net.fc1, torch.randn(160))
    shown = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        net.fc1.register_backward_hook(lambda m, i, o: shown.append((i, o)))
        net.fc1(torch.randn(160, requires_grad=True)).sum().backward()
    assert [edge.shape for edge in told.legacy_input] == ["x".join(map(str, one.shape)) for one in shown[0][0]]
    assert ([edge.shape for edge in told.legacy_input], [edge.shape for edge in told.legacy_output]) == (["1x5"], ["5"])
    assert "[1, 5] is the gradient of the result of Addmm inside /linear#0" in str(told)
    assert [edge.shape for edge in told.legacy_output] == ["x".join(map(str, one.shape)) for one in shown[0][1]]


def test_a_tensor_hook_on_the_way_forward():
    """ "Tensors have no forward hook": an op site is one."""
    net, inp = MyNet(), torch.randn(1, 3, 8, 8)
    seen = []
    with gaff.edit(net, {"/view": lambda tensor: seen.append(tensor.shape) or tensor}):
        net(inp)
    assert seen == [(160,)]
