"""What editing, clipping and sample norms cost, beside the same done by hand."""

import copy

import torch
from torch import nn

import gaff
from benchmarks.harness import measure, table


def edits(blocks):
    """``scale`` at every block: small ones (overhead shows) and those of GPT-2 (as users have them)."""
    x = torch.randn(2, 16)
    for has_grad in (False, True):
        with torch.set_grad_enabled(has_grad):
            mode = "grad mode" if has_grad else "no_grad"
            _scaled(blocks(), x, "blocks.*", lambda model: model.blocks, f"48 small blocks ({mode})", 500, 48)
    from transformers import GPT2Config, GPT2Model

    model = GPT2Model(GPT2Config(attn_implementation="eager", use_cache=False, n_layer=6)).eval()
    with torch.no_grad():
        _scaled(
            model, torch.randint(1000, (1, 128)), "h.*.mlp", lambda m: [b.mlp for b in m.h], "6 blocks of GPT-2", 20, 6
        )


def _scaled(model, x, pattern, find, title, rounds, sites):
    raw, unmeasured = copy.deepcopy(model), copy.deepcopy(model)
    bare = copy.deepcopy(model)
    for block in find(raw):
        block.register_forward_hook(lambda module, args, output: output * 0.5)
    ways = {"no hooks": lambda: bare(x), "raw hooks, output * 0.5": lambda: raw(x)}
    with (
        gaff.edit(model, {pattern: gaff.edits.scale(0.5)}),
        gaff.edit(unmeasured, {pattern: gaff.edits.scale(0.5)}) as changed,
    ):
        for stream in changed._streams:
            stream.size.add = lambda old, new: None  # the same without a receipt
        ways["gaff.edit, scale(0.5)"] = lambda: model(x)
        ways["the same, receipt not kept"] = lambda: unmeasured(x)
        medians = measure(ways, rounds)
    table(f"Edits: {title}, scaled", medians, base="raw hooks, output * 0.5", bare="no hooks", sites=sites)


def clip():
    """The gradients of GPT-2 small: 148 tensors, 124 million numbers."""
    from transformers import GPT2Config, GPT2Model

    parameters = list(GPT2Model(GPT2Config()).parameters())
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter) * 0.01
    _clipped(parameters, 1e9, 1.0, "nothing to clip")
    _clipped(parameters, 0.5, 1.01, "always clipped")


def _clipped(parameters, limit, growth, title):
    """``growth``: gradients are multiplied with it after every step, so that there is something to clip again."""
    plain, guarded, skipping = (_Still(parameters) for _ in range(3))

    def after(step):
        step()
        if growth != 1.0:
            torch._foreach_mul_([parameter.grad for parameter in parameters], growth)

    def by_torch():
        torch.nn.utils.clip_grad_norm_(parameters, limit, foreach=True)
        plain.step()

    base = "clip_grad_norm_ (foreach) before the step"
    with (
        gaff.clip_gradients(guarded, norm=limit),
        gaff.clip_gradients(skipping, norm=limit, nonfinite="skip"),
    ):
        ways = {
            base: lambda: after(by_torch),
            "gaff.clip_gradients": lambda: after(guarded.step),
            'gaff.clip_gradients, nonfinite="skip"': lambda: after(skipping.step),
        }
        table(f"Clipping by global norm, {title}", measure(ways, 15, 2), base=base)


class _Still(torch.optim.Optimizer):
    """An optimizer whose step does nothing: only the clipping is measured."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    def step(self, closure=None):
        return None


def samples():
    """Norms of 32 examples' gradients, beside a plain step and beside the gradients themselves by vmap."""
    layers = [nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2), nn.ReLU(), nn.Flatten()]
    model = nn.Sequential(*layers, nn.Linear(32 * 15 * 15, 128), nn.ReLU(), nn.Linear(128, 10))
    x, y = torch.randn(32, 3, 32, 32), torch.randint(10, (32,))

    def step():
        nn.functional.cross_entropy(model(x), y).backward()

    def norms():
        with gaff.sample_norms(model) as found:
            step()
        return found.total

    def one(parameters, image, label):
        output = torch.func.functional_call(model, parameters, (image[None],))
        return nn.functional.cross_entropy(output, label[None])

    each = torch.func.vmap(torch.func.grad(one), (None, 0, 0))
    plain = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def by_vmap():
        gradients = each(plain, x, y)
        return torch.stack([g.flatten(1).norm(dim=1) for g in gradients.values()]).norm(dim=0)

    torch.testing.assert_close(norms(), by_vmap(), rtol=1e-3, atol=1e-4)
    ways = {"a plain step": step, "gaff.sample_norms": norms, "torch.func.vmap of grad": by_vmap}
    table("Gradient norms of 32 examples, a small convolutional net", measure(ways, 12, 2), base="a plain step")
