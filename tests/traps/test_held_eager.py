"""Compiled code runs eagerly as long as a session needs it to, whoever else needed it before or refused it."""

import subprocess
import sys

import pytest
import torch
from torch import nn

import gaff
from gaff.engine.force_eager import forced_eager

LATE = """
import torch
from torch import nn
import gaff

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x):
        return (self.lin(x) * 2).relu()

model, x = Net(), torch.randn(2, 4)
first = gaff.capture(model, "/mul").__enter__()  # Dynamo is not loaded: the first call of torch.compile is waited for
import torch._dynamo
second = gaff.capture(model, "lin").__enter__()
torch.compile(nn.Linear(1, 1))
compiled = torch.compile(model, backend="eager")
compiled(x)
second.__exit__(None, None, None)
for run in range(1, 4):
    compiled(x + run)
first.__exit__(None, None, None)
for run in range(4):
    assert torch.equal(first.run(run)["/mul"], model.lin(x + run) * 2), run
"""


@pytest.mark.slow
def test_a_session_that_closes_does_not_end_it_for_one_that_was_opened_before():
    ran = subprocess.run([sys.executable, "-W", "ignore", "-c", LATE], check=False, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_what_torch_has_refused_is_not_held():
    """A session cannot be opened inside of compiled code; those after it do not take its refusal for their stance."""
    torch._dynamo.reset()
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.randn(2, 4, requires_grad=True)
    compiled = torch.compile(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), backend="eager")
    compiled(x)

    @torch.compile(backend="eager")
    def step(x):
        with gaff.capture(model, "0", "0:grad_input"):
            return model(x)

    with pytest.raises(gaff.PlanError, match="a session cannot be opened inside compiled code"):
        step(x)
    assert not forced_eager.is_held
    with gaff.edit(compiled, {"0:input": gaff.edits.scale(0.0)}):
        made = compiled(x)
    assert torch.equal(made, compiled._orig_mod[0].bias.relu().expand(2, 4))
    torch._dynamo.reset()


def test_steps_are_seen_of_an_optimizer_that_is_given_the_model_later():
    body, head = nn.Linear(3, 3), nn.Linear(3, 1)
    optimizer = torch.optim.SGD(head.parameters(), 0.1)
    with gaff.guard(body) as guard:
        for step in range(4):
            if step == 2:
                optimizer.add_param_group({"params": list(body.parameters())})
            head(body(torch.randn(2, 3))).sum().backward()
            optimizer.step()
    assert guard.steps == 2


def test_a_session_that_stays_open_forgets_old_backward_passes():
    model = nn.Linear(2, 2)
    with gaff.edit(model, {"weight:grad": gaff.edits.scale(1.0)}) as edits:
        for _ in range(400):
            model(torch.ones(1, 2)).sum().backward()
        assert not edits._session._wiring.gradients._passes._known
