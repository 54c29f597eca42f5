"""load_state_dict(assign=True) puts new parameters in place: the site follows them."""

import weakref

import pytest
import torch
from torch import nn
from torch.func import functional_call

import gaff


def test_the_gradient_is_that_of_the_new_parameter():
    model, x = nn.Linear(3, 2), torch.randn(2, 3)
    with gaff.capture(model, "weight:grad", "weight:param") as got:
        model.load_state_dict({name: value * 2 for name, value in model.state_dict().items()}, assign=True)
        model(x).sum().backward()
    assert torch.equal(got["weight:grad"], model.weight.grad)
    assert torch.equal(got["weight:param"], model.weight)
    assert "replaced" in str(got.receipt)


def test_the_gradient_of_the_old_one_is_still_told_where_another_stands_in_for_a_while():
    model, x = nn.Linear(3, 2), torch.randn(2, 3)
    teacher = {name: value.detach().clone() for name, value in model.named_parameters()}
    with gaff.capture(model, "weight:grad") as got:
        student = model(x)
        with torch.no_grad():
            target = functional_call(model, teacher, (x,))
        (student - target - 1).square().sum().backward()
    assert torch.equal(got["weight:grad"], model.weight.grad)
    with gaff.edit(model, {"weight:grad": gaff.edits.zero()}):
        for _ in range(2):
            model.zero_grad()
            student = model(x)
            with torch.no_grad():
                functional_call(model, teacher, (x,))
            student.sum().backward()
            assert model.weight.grad.count_nonzero() == 0


def test_what_stands_in_and_is_no_leaf_has_a_gradient_of_its_own():
    model, x = nn.Linear(3, 2), torch.randn(2, 3)
    heard = []
    model.weight.register_hook(lambda gradient: heard.append(gradient.clone()))
    with gaff.capture(model, "weight:grad") as got:
        given = dict(model.named_parameters())
        loss = functional_call(model, given, (x,)).square().mean()
        gradients = torch.autograd.grad(loss, list(given.values()), create_graph=True)
        fast = {name: value - 0.1 * one for (name, value), one in zip(given.items(), gradients, strict=True)}
        functional_call(model, fast, (x,)).sin().sum().backward()
    assert len(heard) == len(got.all("weight:grad"))
    assert all(map(torch.equal, heard, got.all("weight:grad")))


@pytest.mark.parametrize("is_edit", [False, True])
def test_a_parameter_that_is_frozen_when_the_session_opens_is_heard_of_once_it_is_not(is_edit):
    model, x = nn.Linear(3, 2), torch.randn(2, 3)
    model.weight.requires_grad_(False)
    session = gaff.edit(model, {"*:grad": gaff.edits.zero()}) if is_edit else gaff.capture(model, "weight:grad")
    with session as got:
        model(x).sum().backward()
        model.weight.requires_grad_(True)
        model(x).sum().backward()
    if is_edit:
        assert model.weight.grad.count_nonzero() == 0
    else:
        assert torch.equal(got["weight:grad"], model.weight.grad)


def test_a_parameter_that_another_tensor_was_swapped_into_is_refused():
    model, x = nn.Linear(3, 2), torch.randn(2, 3)
    with gaff.capture(model, "weight:grad") as got:
        torch.utils.swap_tensors(model.weight, nn.Parameter(torch.randn(2, 3)))
        model(x).sum().backward()
    with pytest.raises(gaff.ExactnessError, match="swap_tensors"):
        got.all("weight:grad")
    model = nn.Linear(3, 2)
    with pytest.raises(gaff.GaffError, match="swap_tensors"), gaff.edit(model, {"*:grad": gaff.edits.zero()}):
        model(x).sum().backward()
        torch.utils.swap_tensors(model.weight, nn.Parameter(torch.randn(2, 3)))
        model(x).sum().backward()


def test_all_that_stand_in_for_a_parameter_are_followed_however_many():
    model, x = nn.Linear(3, 2), torch.randn(2, 3)
    members = [
        {name: value.detach().clone().requires_grad_() for name, value in model.named_parameters()} for _ in range(12)
    ]
    with gaff.capture(model, "weight:grad") as got:
        sum(functional_call(model, member, (x,)).sum() for member in members).backward()
    assert len(got.all("weight:grad")) == len(members)
    with gaff.edit(model, {"weight:grad": gaff.edits.zero()}):
        for member in members:
            member["weight"].grad = None
        sum(functional_call(model, member, (x,)).sum() for member in members).backward()
    assert not any(member["weight"].grad.any() for member in members)


def test_what_stood_in_for_a_parameter_is_freed():
    model, x = nn.Linear(3, 2), torch.randn(2, 3)
    gone = []
    with gaff.capture(model, "weight:grad", last=1):
        for _ in range(20):
            own = {name: value.detach().clone().requires_grad_() for name, value in model.named_parameters()}
            functional_call(model, own, (x,)).sum().backward()
            gone.append(weakref.ref(own["weight"]))
            del own
        assert not any(one() is not None for one in gone[:-1])
