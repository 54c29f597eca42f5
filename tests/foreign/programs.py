"""Programs that would notice if they were watched: each prints what it sees, and must print the same when it is.

A program is a function that prints. It does what torch's own tests do with hooks, autograd, parametrisations and the
like, in small, and knows nothing of gaff.
"""

import copy
import functools
import gc
import inspect
import io
import pickle
import sys
import threading
import warnings
import weakref
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils.checkpoint import checkpoint, checkpoint_sequential
from torch.utils.data import DataLoader, IterableDataset, Sampler, TensorDataset

PROGRAMS: dict[str, Callable[[], None]] = {}


def program(function):
    PROGRAMS[function.__name__] = function
    return function


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 4))
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 2)

    def forward(self, x, scale=1.0):
        return self.head(self.norm(self.body(x)) * scale)


class Nest(nn.Module):
    def __init__(self, depth):
        super().__init__()
        self.inner = Nest(depth - 1) if depth else nn.Linear(1, 1)

    def forward(self, x):
        return self.inner(x)


def batch():
    return torch.randn(6, 4)


def show(*values):
    for value in values:
        print(value.detach().double().sum().item().hex() if isinstance(value, torch.Tensor) else value)


def train(model, optimizer, steps=3):
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(batch()).square().mean()
        loss.backward()
        optimizer.step()
        show(loss)


# module hooks


@program
def hooks_fire_in_their_order():
    model = Net()
    told = []
    for at in range(2):
        model.body.register_forward_pre_hook(lambda module, args, at=at: told.append(f"pre {at}"))
        model.body.register_forward_hook(lambda module, args, out, at=at: told.append(f"post {at}"))
        model.body.register_full_backward_pre_hook(lambda module, grads, at=at: told.append(f"back pre {at}"))
        model.body.register_full_backward_hook(lambda module, given, grads, at=at: told.append(f"back {at}"))
    model.body.register_forward_hook(lambda module, args, out: told.append("first"), prepend=True)
    model(batch()).sum().backward()
    show(told)


@program
def hooks_are_counted():
    model = Net()
    tables = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    handles = [module.register_forward_hook(lambda *_: None) for module in model.modules()]
    model.body.register_forward_hook(lambda module, *_: show([len(getattr(module, name)) for name in tables]))
    model(batch())
    for handle in handles[1:]:
        handle.remove()
    model(batch())
    show([len(getattr(module, name)) for module in model.modules() for name in tables])


@program
def a_hook_removes_itself():
    model = Net()

    def hook(module, args, output):
        handle.remove()
        show(len(module._forward_hooks))
        return output * 2

    handle = model.body.register_forward_hook(hook)
    show(model(batch()), model(batch()))


@program
def a_hook_is_added_while_hooks_run():
    model = Net()

    def hook(module, args):
        if len(module._forward_hooks) < 3:
            module.register_forward_hook(lambda *_: show("added"))

    model.body.register_forward_pre_hook(hook)
    for _ in range(3):
        model(batch())


@program
def a_hook_is_always_called():
    model = Net()
    model.head.register_forward_hook(lambda *_: show("head"), always_call=True)
    model.register_forward_hook(lambda module, args, out: show("root", out is None), always_call=True)
    model.norm.register_forward_hook(lambda *_: 1 / 0)
    for _ in range(2):
        try:
            model(batch())
        except ZeroDivisionError as error:
            show(type(error).__name__, str(error))


@program
def hooks_see_keywords():
    model = Net()
    model.register_forward_pre_hook(
        lambda module, args, kwargs: (args, {"scale": kwargs["scale"] * 2}), with_kwargs=True
    )
    model.register_forward_hook(lambda module, args, kwargs, out: show(len(args), kwargs), with_kwargs=True)
    show(model(batch(), scale=2.0))


@program
def global_hooks_fire():
    told = []
    hooks = torch.nn.modules.module
    handles = [
        hooks.register_module_forward_pre_hook(lambda module, args: told.append(f"in {type(module).__name__}")),
        hooks.register_module_forward_hook(lambda module, args, out: told.append(f"out {type(module).__name__}")),
        hooks.register_module_full_backward_hook(lambda module, *_: told.append(f"back {type(module).__name__}")),
    ]
    Net()(batch()).sum().backward()
    for handle in handles:
        handle.remove()
    show(told)


@program
def parameters_and_buffers_are_registered_with_hooks():
    hooks = torch.nn.modules.module
    told = []
    handles = [
        hooks.register_module_parameter_registration_hook(lambda module, name, value: told.append(name)),
        hooks.register_module_module_registration_hook(lambda module, name, value: told.append(name)),
        hooks.register_module_buffer_registration_hook(lambda module, name, value: told.append(name)),
    ]
    model = Net()
    model(batch()).sum().backward()
    for handle in handles:
        handle.remove()
    show(told)


@program
def a_hook_changes_gradients():
    model = Net()
    model.head.register_full_backward_hook(lambda module, given, grads: tuple(one * 2 for one in given))
    model.head.register_full_backward_pre_hook(lambda module, grads: tuple(one * 3 for one in grads))
    model(batch()).sum().backward()
    show(*(one.grad for one in model.parameters()))


@program
def state_dict_hooks_fire():
    model = Net()
    model.register_state_dict_pre_hook(lambda module, prefix, keep: show("pre", prefix))
    model.register_state_dict_post_hook(lambda module, state, prefix, meta: show(len(state), prefix))
    model.register_load_state_dict_pre_hook(lambda module, state, *_: show("load", len(state)))
    model.register_load_state_dict_post_hook(lambda module, keys: show(keys))
    model(batch())
    show(model.load_state_dict(model.state_dict()))


@program
def a_model_has_no_attributes_of_others():
    model = Net()
    before = {path: sorted(vars(module)) for path, module in model.named_modules()}
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model.register_forward_hook(lambda module, *_: show(sorted(vars(module)) == before[""], "__call__" in vars(module)))
    train(model, optimizer, 2)
    show({path: sorted(vars(module)) for path, module in model.named_modules()} == before)
    show(repr(model), [type(one).__name__ for one in model.modules()])


# autograd


@program
def tensor_hooks_fire_in_their_order():
    x = batch().requires_grad_()
    model, told = Net(), []
    y = model.body(x)
    y.register_hook(lambda grad: told.append("one"))
    y.register_hook(lambda grad: told.append("two") or grad * 2)
    y.retain_grad()
    x.register_post_accumulate_grad_hook(lambda tensor: told.append("added"))
    model.norm(y).square().sum().backward()
    show(told, y.grad, x.grad)


@program
def gradients_of_gradients():
    model, x = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)), batch().requires_grad_()
    (first,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    first.square().sum().backward()
    show(first, x.grad, *(one.grad for one in model.parameters() if one.grad is not None))


@program
def gradients_are_batched():
    model, x = nn.Linear(3, 3), torch.randn(2, 3, requires_grad=True)
    y = model(x)
    show(*torch.autograd.grad(y, (x, model.weight), torch.eye(6).view(6, 2, 3), is_grads_batched=True))


@program
def jacobians():
    model, x = nn.Sequential(nn.Linear(3, 3), nn.Tanh()), torch.randn(3)
    functional = torch.autograd.functional
    show(functional.jacobian(model, x), functional.jacobian(model, x, vectorize=True))
    show(functional.jacobian(model, x, vectorize=True, strategy="forward-mode"))
    show(
        functional.hessian(lambda x: model(x).sum(), x), functional.hessian(lambda x: model(x).sum(), x, vectorize=True)
    )
    show(functional.vhp(lambda x: model(x).sum(), x, x)[1], functional.jvp(model, x, x)[1])


@program
def forward_mode():
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), batch()
    with forward_ad.dual_level():
        out = forward_ad.unpack_dual(model(forward_ad.make_dual(x, torch.ones_like(x))))
        show(out.primal, out.tangent)


@program
def gradcheck():
    model, x = (
        nn.Sequential(nn.Linear(3, 2), nn.Tanh()).double(),
        torch.randn(2, 3, dtype=torch.double, requires_grad=True),
    )
    show(torch.autograd.gradcheck(model, x), torch.autograd.gradgradcheck(model, x))
    show(torch.autograd.gradcheck(model, x, check_forward_ad=True, check_batched_grad=True))


@program
def anomaly_is_detected():
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        try:
            with torch.autograd.detect_anomaly():
                model, x = nn.Linear(4, 4), batch().requires_grad_()
                torch.sqrt(model(x) * 0).sum().backward()
        except RuntimeError as error:
            show(str(error).partition("\n")[0])


@program
def saved_tensors_are_packed():
    model, told = Net(), []
    with torch.autograd.graph.saved_tensors_hooks(lambda one: told.append(tuple(one.shape)) or one, lambda one: one):
        loss = model(batch()).square().sum()
    loss.backward()
    show(told)
    with torch.autograd.graph.save_on_cpu():
        model(batch()).sum().backward()
    show(model.head.weight.grad)


@program
def a_graph_has_the_nodes_that_it_had():
    model, x = Net(), batch().requires_grad_()
    out = model(x)
    waiting, names = [out.grad_fn], []
    while waiting:
        node = waiting.pop()
        if node is not None:
            names.append(node.name())
            waiting += [one for one, _ in node.next_functions]
    show(names)


@program
def custom_functions():
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * 2, x.long()

        @staticmethod
        def backward(ctx, grad, nothing):
            show(grad, ctx.saved_tensors[0])
            return grad * 2

    class Module(nn.Module):
        def forward(self, x):
            return Double.apply(x)

    model = nn.Sequential(nn.Linear(4, 4), Module())
    out, _ = model(batch())
    out.sum().backward()
    show(model[0].weight.grad)


@program
def in_place_on_views_of_outputs():
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True)), batch().requires_grad_()
    out = model(x)
    out = out * 1
    out[:, :2].mul_(3)
    out.add_(1)
    show(out._version)
    out.square().sum().backward()
    show(x.grad, model[0].weight.grad)


@program
def a_second_backward_is_refused():
    out = Net()(batch()).sum()
    out.backward()
    try:
        out.backward()
    except RuntimeError as error:
        show(str(error).partition(".")[0])


@program
def a_model_runs_inside_a_gradient_hook():
    model, x = Net(), batch().requires_grad_()
    y = model(x)
    y.register_hook(lambda grad: show(model(x.detach())))
    y.sum().backward()
    show(x.grad)


@program
def grad_of_a_few():
    model = Net()
    out = model(batch())
    show(*torch.autograd.grad(out.sum(), [model.head.weight, model.norm.weight], retain_graph=True))
    out.sum().backward(inputs=[model.head.bias])
    show([one.grad is None for one in model.parameters()])


# torch.func


@program
def per_sample_gradients():
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    values = {name: one.detach() for name, one in model.named_parameters()}

    def loss(values, x):
        return torch.func.functional_call(model, values, (x.unsqueeze(0),)).square().sum()

    show(*torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(values, batch()).values())


@program
def transforms():
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), batch()
    show(torch.func.vmap(model)(x), torch.func.jacrev(model)(x[0]), torch.func.jacfwd(model)(x[0]))
    show(*torch.func.vjp(model, x)[1](torch.ones(6, 4)))
    show(*torch.func.jvp(model, (x,), (x,)))
    show(torch.func.hessian(lambda x: model(x).sum())(x[0]), *torch.func.grad_and_value(lambda x: model(x).sum())(x))
    show(torch.func.functionalize(model)(x))


@program
def ensembles():
    models = [nn.Linear(4, 2) for _ in range(3)]
    values, buffers = torch.func.stack_module_state(models)
    base = copy.deepcopy(models[0]).to("meta")

    def call(values, buffers, x):
        return torch.func.functional_call(base, (values, buffers), (x,))

    show(torch.func.vmap(call, in_dims=(0, 0, None))(values, buffers, batch()))


@program
def functional_calls_train():
    model = Net()
    values = {name: one.detach().clone().requires_grad_() for name, one in model.named_parameters()}
    optimizer = torch.optim.SGD(values.values(), 0.1)
    for _ in range(3):
        optimizer.zero_grad()
        torch.func.functional_call(model, values, (batch(),)).square().mean().backward()
        optimizer.step()
    show(*values.values(), *model.parameters())


@program
def linearised():
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), batch()
    out, forward = torch.func.linearize(model, x)
    show(out, forward(x))


# checkpoints


@program
def checkpoints():
    for reentrant in (False, True):
        torch.manual_seed(1)
        model, x = Net(), batch().requires_grad_()
        calls = []
        model.body.register_forward_hook(lambda *_, calls=calls: calls.append(torch.is_grad_enabled()))
        out = model.head(model.norm(checkpoint(model.body, x, use_reentrant=reentrant)))
        out.sum().backward()
        show(calls, x.grad, *(one.grad for one in model.parameters()))


@program
def checkpoints_in_checkpoints():
    model, x = Net(), batch().requires_grad_()

    def inner(x):
        return checkpoint(model.body, x, use_reentrant=False)

    checkpoint(lambda x: model.head(inner(x)), x, use_reentrant=False).sum().backward()
    show(x.grad)
    checkpoint_sequential(model.body, 2, x, use_reentrant=False).sum().backward()
    show(x.grad)


@program
def selective_checkpoints():
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    told = []

    def policy(ctx, op, *args, **kwargs):
        told.append((str(op), ctx.is_recompute))
        return CheckpointPolicy.MUST_SAVE if op is torch.ops.aten.addmm.default else CheckpointPolicy.PREFER_RECOMPUTE

    model, x = Net(), batch().requires_grad_()
    checkpoint(
        model, x, use_reentrant=False, context_fn=lambda: create_selective_checkpoint_contexts(policy)
    ).sum().backward()
    show(told, x.grad)


# parameters


@program
def parametrised():
    class Symmetric(nn.Module):
        def forward(self, x):
            return x.triu() + x.triu(1).transpose(-1, -2)

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    parametrize.register_parametrization(model[0], "weight", Symmetric())
    parametrizations.orthogonal(model[1])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    train(model, optimizer)
    with parametrize.cached():
        show(model(batch()))
    parametrize.remove_parametrizations(model[0], "weight")
    show(model[0].weight, sorted(name for name, _ in model.named_parameters()), type(model[0]).__name__)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    train(model, optimizer)


@program
def normed():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        old = nn.utils.weight_norm(nn.Linear(4, 4))
    model = nn.Sequential(
        parametrizations.weight_norm(nn.Linear(4, 4)), parametrizations.spectral_norm(nn.Linear(4, 4)), old
    )
    train(model, torch.optim.Adam(model.parameters()))
    show(*model.parameters(), *model.buffers())


@program
def pruned():
    model = Net()
    prune.l1_unstructured(model.head, "weight", amount=0.5)
    prune.random_structured(model.body[0], "weight", amount=2, dim=0)
    train(model, torch.optim.SGD(model.parameters(), 0.1))
    show(len(model.head._forward_pre_hooks), prune.is_pruned(model))
    prune.remove(model.head, "weight")
    show(len(model.head._forward_pre_hooks), model.head.weight)


@program
def tensors_are_swapped():
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        train(model, optimizer)
        show(model.load_state_dict(Net().state_dict()))
        model.double()
        show(model(batch().double()).dtype)
        model.float()
        first, second = model.head.weight, nn.Parameter(torch.zeros(2, 4))
        torch.utils.swap_tensors(first, second)
        show(first, second)
        train(model, optimizer)
        out, other = model(batch()).detach(), torch.zeros(1)
        torch.utils.swap_tensors(out, other)
        show(out, other)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


@program
def wrapped_parameters_are_swapped():
    from torch.testing._internal.two_tensor import TwoTensor

    class Wrap(nn.Module):
        def forward(self, x):
            return TwoTensor(x, x)

    class Unwrap(nn.Module):
        def forward(self, x):
            return x.a

    class Inverse(nn.Module):
        def forward(self, x):
            return x

        def right_inverse(self, x):
            return TwoTensor(x, x)

    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        for kind, is_wrapped, stays in [
            (one, one is Unwrap, stays) for one in (Wrap, Unwrap, Inverse) for stays in (0, 1)
        ]:
            model = nn.Linear(2, 2)
            if is_wrapped:
                model._apply(lambda one: TwoTensor(one, one))
            parametrize.register_parametrization(model, "weight", kind())
            parametrize.register_parametrization(model, "bias", kind())
            show(type(model.weight).__name__, type(model.parametrizations.weight.original).__name__)
            parametrize.remove_parametrizations(model, "weight", leave_parametrized=bool(stays))
            parametrize.remove_parametrizations(model, "bias", leave_parametrized=bool(stays))
            show(type(model.weight).__name__, type(model.bias).__name__)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


@program
def lazy_modules():
    model = nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.LazyLinear(2))
    show(type(model[0]).__name__, len(model[0]._forward_pre_hooks))
    model(batch())
    show(type(model[0]).__name__, len(model[0]._forward_pre_hooks))
    train(model, torch.optim.SGD(model.parameters(), 0.1))


@program
def models_are_copied_while_they_run():
    model = Net()
    model.body.register_forward_hook(
        lambda module, *_: show(len(pickle.dumps(module)), len(copy.deepcopy(module)._forward_hooks))
    )

    class Around(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x):
            stream = io.BytesIO()
            torch.save(self.inner.state_dict(), stream)
            show(len(pickle.dumps(self.inner)), len(stream.getvalue()))
            return copy.deepcopy(self.inner)(x)

    show(Around()(batch()))


@program
def modules_go_when_they_are_dropped():
    model = Net()
    alive = weakref.ref(model)
    out = model(batch())
    kept = weakref.ref(out)
    out.sum().backward()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    optimizer.step()
    del optimizer, out
    gc.collect()
    show(kept() is None)
    del model
    gc.collect()
    show(alive() is None)


@program
def classes_are_as_they_were():
    model = Net()
    kinds = {type(one) for one in model.modules()}
    model(batch())
    show(sorted("__call__" in vars(kind) for kind in kinds - {Net}))
    show(nn.Module.__call__.__name__, callable(model), Net.forward.__name__)


@program
def subclasses_of_tensor():
    class Told(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            told.append(getattr(func, "__name__", str(func)))
            return super().__torch_function__(func, types, args, kwargs or {})

    told = []
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    out = model(batch().as_subclass(Told))
    show(type(out).__name__, told)


@program
def modes_see_the_same_ops():
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode

    class Functions(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            told.append(getattr(func, "__name__", str(func)))
            return func(*args, **(kwargs or {}))

    class Ops(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            told.append(str(func))
            return func(*args, **(kwargs or {}))

    told = []
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for mode in (Functions, Ops):
        with mode():
            for _ in range(2):
                model(batch()).sum().backward()
                optimizer.step()
        show(told)


@program
def random_numbers_are_the_same():
    model = Net()
    for at in range(4):
        model.train(at % 2 == 0)
        with torch.set_grad_enabled(at > 1):
            model(batch())
        show(torch.rand(1))


# optimizers


@program
def optimizers_with_closures():
    model = Net()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    x = batch()

    def closure():
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    for _ in range(2):
        show(optimizer.step(closure))


@program
def optimizers_have_hooks():
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.register_step_pre_hook(lambda optimizer, args, kwargs: show("pre", len(args), kwargs))
    optimizer.register_step_post_hook(lambda optimizer, args, kwargs: show("post", len(args), kwargs))
    train(model, optimizer, 2)
    show(len(optimizer._optimizer_step_pre_hooks), sorted(vars(optimizer)))
    show(sorted(optimizer.state_dict()), pickle.loads(pickle.dumps(optimizer)).state_dict().keys())


@program
def a_step_inside_a_step():
    class Twice(torch.optim.SGD):
        def step(self, closure=None):
            loss = super().step(closure)
            show("own")
            return loss

    model = Net()
    train(model, Twice(model.parameters(), 0.1))
    show(Twice.step.__name__)


@program
def schedules():
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=10)
    averaged = torch.optim.swa_utils.AveragedModel(model)
    for _ in range(4):
        train(model, optimizer, 1)
        schedule.step()
        averaged.update_parameters(model)
        show(schedule.get_last_lr())
    torch.optim.swa_utils.update_bn([batch()], averaged)
    show(averaged(batch()))


@program
def weights_are_moved_by_hand():
    model = Net()
    for _ in range(3):
        model.zero_grad()
        loss = model(batch()).square().mean()
        loss.backward()
        with torch.no_grad():
            for one in model.parameters():
                one -= 0.1 * one.grad
        show(loss)


@program
def scaled_losses():
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu")
    for _ in range(3):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(batch()).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        show(loss, scaler.get_scale())


@program
def updates_inside_backward():
    model = Net()
    optimizers = {one: torch.optim.SGD([one], 0.1) for one in model.parameters()}
    for one, optimizer in optimizers.items():
        one.register_post_accumulate_grad_hook(lambda one, optimizer=optimizer: optimizer.step())
    for _ in range(3):
        model(batch()).square().mean().backward()
    show(*model.parameters())


# the Python around


@program
def the_recursion_limit_is_the_programs():
    class Deep(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            sys.setrecursionlimit(limit + 500)
            return self.layer(x)

    limit = sys.getrecursionlimit()
    try:
        Deep()(batch())
        show(sys.getrecursionlimit() - limit)
    finally:
        sys.setrecursionlimit(limit)
    show(sys.gettrace(), sys.getprofile())


@program
def an_exception_has_the_programs_frames():
    class Fails(nn.Module):
        def forward(self, x):
            raise KeyError("mine")

    model = nn.Sequential(nn.Linear(4, 4), Fails())
    for _ in range(2):
        try:
            model(batch())
        except KeyError as error:
            trace, names = error.__traceback__, []
            while trace is not None:
                names.append(trace.tb_frame.f_code.co_name)
                trace = trace.tb_next
            show([one for one in names if one == "forward"], error.args, error.__cause__, error.__context__)


@program
def a_call_that_raised_is_followed_by_others():
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for bad in (True, False, True, False):
        try:
            show(model(torch.randn(6, 3 if bad else 4)))
        except RuntimeError as error:
            show(str(error).partition("(")[0])
    train(model, optimizer)


@program
def threads_run_models():
    model, told = Net().eval(), []

    def work(at):
        told.append((at, model(torch.full((2, 4), float(at))).detach().sum().item()))

    model(batch())
    threads = [threading.Thread(target=work, args=(at,)) for at in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    show(sorted(told), threading.active_count() >= 1)


class OfNoLength(Sampler):
    """Batches of two, whose number nobody may ask for."""

    def __iter__(self):
        return iter([[at, at + 1] for at in range(0, 8, 2)])

    def __len__(self):
        raise ValueError("how many there will be is not known")


@program
def a_loader_is_not_asked_for_its_length():
    model, asked = nn.Linear(4, 2), []

    class Estimated(IterableDataset):
        def __iter__(self):
            return iter(torch.randn(8, 4))

        def __len__(self):
            asked.append(len(asked))
            return 3  # torch warns of more, once somebody has asked

    data = TensorDataset(torch.randn(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for loader in (DataLoader(data, batch_sampler=OfNoLength()), DataLoader(Estimated(), batch_size=None)):
        for given in loader:
            optimizer.zero_grad()
            loss = model(given if isinstance(given, torch.Tensor) else given[0]).square().mean()
            loss.backward()
            optimizer.step()
            show(loss)
    show(asked)


@program
def functions_ask_for_their_variables():
    def main(rate=0.1):
        config = locals()
        model = Net()
        train(model, torch.optim.SGD(model.parameters(), lr=rate))
        show(*config.items())

    def inside(rate=0.1):
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        for _ in range(3):
            state = locals()
            state["loss"] = model(batch()).square().mean()
            state["loss"].backward()
            optimizer.step()
            show(state["loss"], *sorted(state))

    def freed(rate=0.1):
        model, large = Net(), torch.ones(1000)
        held = weakref.ref(large)
        train(model, torch.optim.SGD(model.parameters(), lr=rate))
        del large
        show(held() is None)

    main()
    inside()
    freed()


@program
def variables_that_do_something_when_they_are_asked():
    class Lazy:
        __slots__ = ()

        @property
        def __class__(self):
            print("resolved")
            return int

    class Strict:
        __slots__ = ()

        def __getattr__(self, name):
            raise RuntimeError(f"not connected: {name}")

    class Told(dict):
        def items(self):
            print("asked")
            return super().items()

        def __iter__(self):
            print("asked")
            return super().__iter__()

    lazy, strict, told, model = Lazy(), Strict(), Told(a=1), Net()
    train(model, torch.optim.SGD(model.parameters(), lr=0.1))
    show(type(lazy).__name__, type(strict).__name__, len(told))


class Partial(Net):
    def run(self, x, scale=1.0):
        return nn.Module.__call__(self, x) * scale

    __call__ = functools.partialmethod(run, scale=2.0)


class Dispatching(Net):
    @functools.singledispatchmethod
    def __call__(self, x):
        return nn.Module.__call__(self, x)


class Frozen(type):
    def __setattr__(cls, name, value):
        print("set", name)
        raise AttributeError("frozen")

    def __delattr__(cls, name):
        print("deleted", name)
        raise AttributeError("frozen")


class OfFrozenClass(Net, metaclass=Frozen):
    pass


class Plain:
    def __call__(self, x):
        return x.sum() * torch.ones((), requires_grad=True)


class CallsAnObject(Net):
    __call__ = Plain()


@program
def classes_are_called_in_their_own_way():
    for kind in (Partial, Dispatching, OfFrozenClass, CallsAnObject):
        torch.manual_seed(0)
        model = kind()
        train(model, torch.optim.SGD(model.parameters(), lr=0.1))
        show(model.body[0].weight)


@program
def calls_look_as_they_are():
    model = Net()
    for _ in range(3):
        model(batch()).sum().backward()
        show(inspect.signature(model), model.__call__.__name__, type(model).__call__.__qualname__)
        show(inspect.isfunction(type(model).__call__), len(inspect.getsource(type(model).__call__)))
        show(type(model).__call__(model.eval(), torch.ones(2, 4)))


@program
def a_model_is_entered_through_many_doors():
    model, x = Net().eval(), batch()
    show(model(x), model.forward(x), model.__call__(x), type(model).__call__(model, x), nn.Module.__call__(model, x))
    show(model._call_impl(x), next(map(model, [x])), F.relu(model(input := x)), input is x)
    call = model.__call__
    show(call(x), call.__self__ is model, callable(type(model).__call__))


@program
def warnings_lead_to_the_same_lines():
    class Warns(nn.Module):
        def forward(self, x):
            warnings.warn("mine", stacklevel=1)
            return x * self.weight

        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

    model = Warns()
    model.register_full_backward_hook(lambda *_: None)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        train(model, optimizer)
    show([(one.filename == __file__, one.lineno, str(one.message)) for one in told])


@program
def exported_and_scripted():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval(), batch()
        model(x)
        show(torch.jit.trace(model, x)(x), torch.jit.script(model)(x))
        show(torch.export.export(model, (x,)).graph_module.code.count("\n"))
        show(torch.fx.symbolic_trace(model)(x))


@program
def packed_sequences_and_attention():
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2, enable_nested_tensor=True)
    x, mask = torch.randn(2, 5, 8), torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    show(model(x, src_key_padding_mask=mask))
    model.eval()
    with torch.no_grad():
        show(model(x, src_key_padding_mask=mask))
    lstm = nn.LSTM(8, 4, batch_first=True)
    packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([5, 3]), batch_first=True)
    out, _ = lstm(packed)
    out.data.sum().backward()
    show(lstm.weight_ih_l0.grad)


@program
def odd_numbers():
    model = nn.Sequential(nn.Linear(4, 4), nn.Identity())
    show(model(torch.randn(0, 4)), model.bfloat16()(batch().bfloat16()))
    show(nn.Linear(4, 4, dtype=torch.complex64)(batch() + 0j).abs())
    model.float()
    with torch.inference_mode():
        show(model(batch()))
    with torch.device("meta"):
        hollow = nn.Linear(4, 4)
        show(hollow(torch.empty(2, 4)).shape)
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        show(nn.Linear(4, 4)(torch.randn(2, 4)).shape)
    show(nn.Embedding(5, 4, sparse=True)(torch.tensor([1, 2])))


def depths():
    """How deep a program gets, in calls of models and of functions, before Python's limit of 400 frames ends it."""

    class Root(nn.Module):
        def __init__(self, depth):
            super().__init__()
            self.inner = Nest(depth)

        def forward(self, x):
            return self.inner(x)

    class Own(nn.Module):
        def __init__(self, depth):
            super().__init__()
            self.depth, self.layer = depth, nn.Linear(1, 1)

        def forward(self, x, depth=0):
            return self.layer(x) if depth == self.depth else self(x, depth + 1)

    def under(frames, call):
        return call() if not frames else under(frames - 1, call)

    def is_fine(call):
        try:
            call()
        except RecursionError:
            return False
        return True

    def deepest(call):
        low, high = 1, 400
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if is_fine(lambda middle=middle: call(middle)) else (low, middle)
        return low

    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(400)
    try:
        x = torch.ones(1, 1)
        small = nn.Sequential(nn.Linear(1, 1), nn.ReLU())
        found = [deepest(lambda depth, kind=kind: kind(depth)(x)) for _ in range(2) for kind in (Nest, Root, Own)]
        found.append(deepest(lambda depth: under(depth, lambda: small(x))))
        found.append(deepest(lambda depth: under(depth, lambda: small(x).sum().backward())))
        return found, sys.getrecursionlimit()
    finally:
        sys.setrecursionlimit(limit)
