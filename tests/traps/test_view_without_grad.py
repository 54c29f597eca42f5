"""Views made without grad mode say that they require grad and get none; asking them anything may make torch raise."""

import pytest
import torch
from torch import nn

import gaff


class ViewFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class ByFunction(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.last = nn.Identity(), nn.Linear(3, 3)

    def forward(self, x):
        with torch.no_grad():
            y = ViewFunction.apply(x)
        return self.last(self.inner(y)) + x


class Logs(nn.Module):
    def forward(self, view):
        self.last = view.detach().abs().mean()
        return view.detach()


class WrittenToLater(nn.Module):
    """Nobody may use the view in a graph from then on; looking at it without one is allowed."""

    def __init__(self):
        super().__init__()
        self.lin, self.last = nn.Linear(3, 3), Logs()

    def forward(self, x):
        y = self.lin(x)
        with torch.no_grad():
            view = y[:, :1]
        y.mul_(2.0)
        self.last(view)
        return y


@pytest.mark.parametrize("port", ["input_grad", "grad_input"])
@pytest.mark.parametrize("build", [ByFunction, WrittenToLater])
def test_what_goes_into_a_module(build, port):
    model, x = build(), torch.randn(2, 3, requires_grad=True)
    with gaff.capture(model, f"last:{port}") as got:
        model(x * 1).sum().backward()
    assert got[f"last:{port}"] is None
    assert "a view made without grad mode" in str(got.receipt)


def test_what_a_module_returns():
    class Returns(nn.Module):
        def forward(self, y):
            with torch.no_grad():
                view = y[:, :1]
            y.mul_(2.0)
            return view

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin, self.part = nn.Linear(3, 3), Returns()

        def forward(self, x):
            y = self.lin(x)
            return {"view": self.part(y), "y": y}

    model = Net()
    with gaff.capture(model, "part", "part:grad_output", "lin.weight:grad") as got:
        model(torch.randn(2, 3))["y"].sum().backward()
    assert got["part:grad_output"] is None
    assert got["lin.weight:grad"] is not None


def test_grad_mode_on_inside_and_off_outside():
    class On(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(2, 2, bias=False)
            nn.init.eye_(self.lin.weight)

        @torch.enable_grad()
        def forward(self, x):
            return self.lin(x) * 2

    model, found = nn.Sequential(On()), []
    with gaff.edit(model, {"0:grad_output": gaff.edits.scale(10.0)}), gaff.capture(model, "0:grad_output") as got:
        for is_on in (True, False):
            model.zero_grad()
            with torch.set_grad_enabled(is_on):
                y = model(torch.ones(1, 2))
            y.sum().backward()
            found.append(model[0].lin.weight.grad[0, 0].item())
    assert found == [20.0, 20.0]
    assert [one.tolist() for one in got.all("0:grad_output")] == [[[10.0, 10.0]]] * 2  # what the edit has made of it


@pytest.mark.parametrize("port", ["input_grad", "grad_input", "grad_output"])
def test_gradients_at_calls_under_no_grad_that_turn_grad_mode_on(port):
    class On(nn.Module):
        def forward(self, x):
            with torch.enable_grad():
                return x * 2

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = On()

        def forward(self, x):
            h = x * 3
            g = self.a(x * 1)
            with torch.no_grad():
                y = self.a(h)
            return (y * 5 + g).sum()

    model, x = Both(), torch.ones(1, requires_grad=True)
    with gaff.capture(model, f"a:{port}") as got:
        model(x).backward()
    assert [one.item() for one in got.all(f"a:{port}")] == ([1.0, 5.0] if port == "grad_output" else [2.0, 10.0])
    x.grad = None
    with gaff.edit(model, {f"a:{port}": gaff.edits.scale(10.0)}):
        model(x).backward()
    assert x.grad.item() == 320.0
