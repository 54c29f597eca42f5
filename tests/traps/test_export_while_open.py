"""Exporting or tracing a model while a session is open on it is refused, not polluted."""

import pytest
import torch
from torch import nn

import gaff


@pytest.mark.filterwarnings("ignore")
def test_jit_trace_is_refused():
    model, x = nn.Sequential(nn.Linear(2, 2)), torch.randn(1, 2)
    with gaff.capture(model, gaff.maybe("0")):
        with pytest.raises(gaff.PlanError, match="torch exports or traces the model while a gaff session is open"):
            torch.jit.trace(model, x)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_export_is_refused():
    model, x = nn.Sequential(nn.Linear(2, 2)), torch.randn(1, 2)
    with gaff.capture(model, gaff.maybe("0")):
        with pytest.raises(Exception, match="a gaff session is open"):
            torch.export.export(model, (x,))


@pytest.mark.parametrize("port", ["0", "0.weight:param"])
def test_graphs_of_functorch_are_refused(port):
    """An edit would stay in the graph for good."""
    from functorch.compile import aot_module, nop
    from torch.fx.experimental.proxy_tensor import make_fx

    model, x = nn.Sequential(nn.Linear(2, 2), nn.Tanh()), torch.randn(1, 2)
    ahead = aot_module(model, fw_compiler=nop)
    with gaff.edit(model, {gaff.maybe(port): gaff.edits.scale(2.0)}):
        for make in (lambda: ahead(x), lambda: make_fx(model)(x)):
            with pytest.raises(gaff.PlanError, match="torch exports or traces the model while a gaff session is open"):
                make()
    assert torch.equal(ahead(x), model(x))


def test_symbolic_traces_are_refused():
    """The graph would have nodes of its own for what the session has read, and a proxy would count as a run."""
    model, x = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Tanh()), nn.ReLU()), torch.randn(1, 2)
    bare = [str(node.target) for node in torch.fx.symbolic_trace(model).graph.nodes]
    for session in (gaff.capture(model, gaff.maybe("0")), gaff.edit(model, {gaff.maybe("0"): gaff.edits.scale(2.0)})):
        with session:
            with pytest.raises(gaff.PlanError, match="torch exports or traces the model while a gaff session is open"):
                torch.fx.symbolic_trace(model)
            model(x)
        assert session.receipt.runs == 1
    assert [str(node.target) for node in torch.fx.symbolic_trace(model).graph.nodes] == bare
