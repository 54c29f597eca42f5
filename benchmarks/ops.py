"""What op sites and the guard against NaN cost, beside a bare run and a bare function mode."""

import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

import gaff
from benchmarks.harness import measure, table


class Chain(nn.Module):
    """Sixteen small ops in its own forward."""

    def forward(self, x):
        for _ in range(4):
            x = F.relu(x + 1)
            x = x * 0.5
            x = x.view(-1, 4).view(-1, 16)
        return x


class Chains(nn.Module):
    def __init__(self, count=12):
        super().__init__()
        self.chains = nn.ModuleList(Chain() for _ in range(count))

    def forward(self, x):
        for chain in self.chains:
            x = chain(x)
        return x


class Bare(TorchFunctionMode):
    """The least that a function mode can do."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Keeping(TorchFunctionMode):
    """What a careful expert writes by hand: keep every tensor that is returned, detached."""

    def __init__(self):
        super().__init__()
        self.kept = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        if isinstance(output, torch.Tensor):
            self.kept.append(output.detach())
        return output


def ops():
    """Capture of every op: of small ones, where nothing hides the price, and of GPT-2 as users have it."""
    for has_grad in (False, True):
        x = torch.randn(2, 16, requires_grad=has_grad)
        _captured(Chains(), x, 12 * 20, f"240 small ops ({'grad mode' if has_grad else 'no_grad'})", 150)
    from transformers import GPT2Config, GPT2Model

    model = GPT2Model(GPT2Config(attn_implementation="eager", use_cache=False, n_layer=6)).eval()
    ids = torch.randint(1000, (1, 128))
    with torch.no_grad():
        count = sum(row.calls for row in gaff.sites(model, ids, ops=True).rows if hasattr(row, "op"))
        _captured(model, ids, count, f"all {count} ops of 6 blocks of GPT-2", 15)


def _captured(model, x, count, title, rounds):
    bare, watched, other, moded, handed = (copy.deepcopy(model) for _ in range(5))
    paths = [path for path, module in watched.named_modules() if path and not isinstance(module, nn.ModuleList)]
    with (
        gaff.capture(watched, gaff.maybe("/*"), "**/*") as got,
        gaff.capture(other, f"{paths[0]}/*") as one,
    ):

        def run():
            watched(x)
            got.clear()

        def run_one():
            other(x)
            one.clear()

        def run_mode():
            with Bare():
                moded(x)

        def run_by_hand():
            with Keeping():
                handed(x)

        ways = {
            "bare": lambda: bare(x),
            "a function mode that does nothing": run_mode,
            "a function mode that keeps every output, detached": run_by_hand,
            "gaff.capture of every op": run,
            f"gaff.capture of the ops of {paths[0]} only": run_one,
        }
        medians = measure(ways, rounds)
    table(f"Ops: {title}", medians, base="bare", bare="bare", sites=count)


def guard():
    """One training step of a small transformer."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=4, n_embd=256, n_head=4, vocab_size=2000, n_positions=128)
    ids = torch.randint(2000, (4, 128))
    torch.manual_seed(0)
    steps = {}
    for name in ("bare", "gaff.guard", "set_detect_anomaly", "isfinite at every module"):
        model = GPT2LMHeadModel(config)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
        steps[name] = _step(model, optimizer, ids)
        if name == "gaff.guard":
            guarded = gaff.guard(model)
        if name.startswith("isfinite"):
            for module in model.modules():
                module.register_forward_hook(_check)
    plain = steps["set_detect_anomaly"]

    def anomaly():
        with torch.autograd.set_detect_anomaly(True):
            plain()

    steps["set_detect_anomaly"] = anomaly
    with guarded:
        medians = measure(steps, 40)
    table("Guard: one AdamW step of a GPT-2 with 4 blocks of width 256, 512 tokens", medians, base="bare")


def _step(model, optimizer, ids):
    def step():
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()

    return step


def _check(module, args, output):
    if isinstance(output, torch.Tensor) and not output.isfinite().all():
        raise ValueError("not finite")
