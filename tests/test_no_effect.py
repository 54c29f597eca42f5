"""An observed run computes the same bits as a bare one: outputs, gradients, weights, buffers, random state."""

import copy

import pytest
import torch

import gaff
from gaff.address.nested import iter_tensors
from zoo import ZOO, loss_of

EVERYTHING = [
    *(gaff.maybe(f"{head}:{port}") for port in ("output", "input", "grad_output", "grad_input", "input_grad") for head in ("", "**")),
    *(gaff.maybe(f"**:{port}") for port in ("param", "grad", "buffer")),
]  # fmt: skip


def step(model, args, kwargs):
    """One training step; everything that a step leaves behind."""
    torch.manual_seed(7)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    output = model(*args, **kwargs)
    loss_of(output).backward()
    grads = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    optimizer.step()
    outputs = [tensor.detach().clone() for _, tensor in iter_tensors(output)]
    inputs = [x.grad for _, x in iter_tensors((args, kwargs)) if x.grad is not None]
    return [*outputs, *grads, *inputs, *model.state_dict().values(), torch.rand(3)]


@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize("build", ZOO, ids=lambda build: build.__name__)
def test_a_step_with_everything_captured_has_the_bits_of_a_bare_one(build, is_training):
    model, args, kwargs = build()
    model.train(is_training)
    twin, args2, kwargs2 = copy.deepcopy((model, args, kwargs))
    bare = step(twin, args2, kwargs2)
    with gaff.capture(model, *EVERYTHING):
        watched = step(model, args, kwargs)
    assert len(bare) == len(watched)
    assert all(torch.equal(one, other) for one, other in zip(bare, watched, strict=True))


@pytest.mark.parametrize("build", ZOO, ids=lambda build: build.__name__)
def test_a_trace_leaves_the_model_and_the_random_state_as_they_were(build):
    model, args, kwargs = build()
    before = copy.deepcopy((model.state_dict(), [module.training for module in model.modules()]))
    state = torch.get_rng_state()
    gaff.trace(model, *args, backward=loss_of, **kwargs)
    after = (model.state_dict(), [module.training for module in model.modules()])
    assert after[1] == before[1]
    assert all(torch.equal(after[0][name], before[0][name]) for name in before[0])
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("build", ZOO, ids=lambda build: build.__name__)
def test_a_closed_session_leaves_no_hook_and_no_attribute(build):
    model, args, kwargs = build()
    before = [{name: dict(value) if isinstance(value, dict) else value for name, value in vars(m).items()} for m in model.modules()]  # fmt: skip
    with gaff.capture(model, *EVERYTHING) as got:
        loss_of(model(*args, **kwargs)).backward()
    for module, known in zip(model.modules(), before, strict=True):
        assert list(vars(module)) == list(known)
        for name, value in vars(module).items():
            if "hooks" in name:
                assert dict(value) == known[name]
    assert all(not parameter._backward_hooks for parameter in model.parameters())
    assert got.receipt.rows
