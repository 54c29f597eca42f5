"""What the statistics cost beside one reading of memory, and what a watched training step costs beside a bare one."""

import contextlib
import copy
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

import gaff
from benchmarks.harness import measure, peer, table
from gaff.record.statistics import EMPTY
from gaff.training.statistics import kernel, plain


def usual(x):
    """The statistics as most tools take them: one op each."""
    return (x.mean(), x.std(), x.min(), x.max(), x.abs().max(), (x == 0).sum(), x.isnan().sum(), x.isinf().sum(),
            torch.histc(x, 64))  # fmt: skip


def kernels():
    """One tensor, and many small ones; the floor is one reading of memory."""
    compiled = kernel.load()
    assert compiled is not None, "python -m gaff.training.statistics.kernel builds it"
    row = torch.tensor(EMPTY, dtype=torch.float64)
    sizes = (("16 KB", 1 << 12, 200, 50), ("1 MB", 1 << 18, 100, 5), ("64 MB", 1 << 24, 15, 1))
    for name, elements, rounds, repeats in sizes:
        for dtype in (torch.float32, torch.bfloat16):
            x = torch.randn(elements).to(dtype)

            def often(function, repeats=repeats):
                return lambda: [function() for _ in range(repeats)]

            medians = measure(
                {
                    "torch.sum": often(lambda: x.sum()),
                    "sum, norm, aminmax": often(lambda: (x.sum(), torch.linalg.vector_norm(x), x.aminmax())),
                    "gaff moments": often(lambda: compiled.observe_(x, row, False)),
                    "gaff moments and histogram": often(lambda: compiled.observe_(x, row, True)),
                    "gaff in plain torch": often(lambda: plain.observe_(x, row, True)),
                    **({} if dtype == torch.bfloat16 else {"usual separate ops": often(lambda: usual(x))}),
                },
                rounds,
            )
            medians = {way: seconds / repeats for way, seconds in medians.items()}
            table(f"Statistics of {name} {dtype}".replace("torch.", ""), medians, base="torch.sum")
    many = [torch.randn(1 << 12) for _ in range(200)]
    rows = row.repeat(200, 1)
    medians = measure(
        {
            "gaff moments, one call": lambda: compiled.observe_many_(many, rows, False),
            "gaff moments and histogram, one call": lambda: compiled.observe_many_(many, rows, True),
            "foreach_norm": lambda: torch._foreach_norm(many),
            "usual separate ops": lambda: [usual(x) for x in many],
        },
        40,
    )
    table("Statistics of 200 tensors of 16 KB", medians, base="foreach_norm")


class Block(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        return self.relu(self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x))))) + x)


def resnet():
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), *(Block(32) for _ in range(6)),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10),
    )  # fmt: skip
    x, y = torch.randn(16, 3, 32, 32), torch.randint(0, 10, (16,))
    return model, lambda net: F.cross_entropy(net(x), y)


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=4, n_head=4, n_embd=256, vocab_size=2000, n_positions=128, bos_token_id=0, eos_token_id=0
    )
    x = torch.randint(0, 2000, (4, 128))
    return GPT2LMHeadModel(config), lambda net: net(input_ids=x, labels=x).loss


def mlp():
    model = nn.Sequential(*(layer for _ in range(16) for layer in (nn.Linear(64, 64), nn.ReLU())))
    x = torch.randn(64, 64)
    return model, lambda net: net(x).square().mean()


class Trained:
    """A copy of a model with an optimizer of its own, so that every way does the same."""

    def __init__(self, model, loss):
        self.model = copy.deepcopy(model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.loss = loss
        self.steps(3)

    def steps(self, count):
        for _ in range(count):
            self.optimizer.zero_grad()
            self.loss(self.model).backward()
            self.optimizer.step()

    def watched(self, count, **options):
        with gaff.watch(self.model, self.optimizer, **options):
            self.steps(count)


def steps():
    """A training step: bare, with gaff, and with others at the same frequency."""
    wandb = peer("wandb")
    for build, count, rounds in ((gpt2, 4, 9), (resnet, 6, 9), (mlp, 60, 9)):
        model, loss = build()
        bare, full, sampled = (Trained(model, loss) for _ in range(3))
        kept = Trained(model, loss)
        ways = {
            "bare": lambda bare=bare, count=count: bare.steps(count),
            "gaff, everything, every step": lambda full=full, count=count: full.watched(count, every=1),
            "gaff, the same, with a record": lambda kept=kept, count=count: _recorded(kept, count),
        }
        with contextlib.ExitStack() as stack:
            if wandb is not None:
                ways["wandb.watch(log='all', log_freq=1)"] = _wandb(stack, wandb, Trained(model, loss), count)
            if build is gpt2:
                ways["DebugUnderflowOverflow of transformers"] = _debug(Trained(model, loss), count)
            medians = {way: seconds / count for way, seconds in measure(ways, rounds, warmup=1).items()}
        table(f"A training step, {build.__name__}", medians, base="bare")
        distance = _distance(Trained(model, loss))
        chunk = max(count, distance) * (4 if build is mlp else 1)  # opening and closing is not the long run
        medians = measure(
            {
                "bare": lambda bare=bare, chunk=chunk: bare.steps(chunk),
                f"gaff, default: one look in {distance} steps": partial(sampled.watched, chunk, every=distance),
            },
            7,
            warmup=1,
        )
        medians = {way: seconds / chunk for way, seconds in medians.items()}
        table(f"A training step, {build.__name__}, default settings in the long run", medians, base="bare")


def _recorded(trained, count):
    with tempfile.TemporaryDirectory() as folder:
        trained.watched(count, every=1, out=f"{folder}/run")


def _distance(trained):
    """How far apart looks are when the allowance of the beginning is spent."""
    with gaff.watch(trained.model, trained.optimizer) as watch:
        while watch._watcher.pace.spent_s < 0.5:
            trained.steps(5)
        trained.steps(20)
        return watch._watcher.pace.distance


def _wandb(stack, wandb, trained, count):
    folder = stack.enter_context(tempfile.TemporaryDirectory())
    os.environ["WANDB_SILENT"] = "true"
    run = stack.enter_context(wandb.init(mode="offline", dir=folder, project="x"))
    run.watch(trained.model, log="all", log_freq=1)

    def way():
        for _ in range(count):
            trained.steps(1)
            run.log({})

    return way


def _debug(trained, count):
    from transformers.debug_utils import DebugUnderflowOverflow

    DebugUnderflowOverflow(trained.model, max_frames_to_save=21)
    return lambda: trained.steps(count)


def price():
    """What a watched loop costs by the processor's clock, in the long run, and what gaff tells of it.

    Bare and watched runs take turns; each watched one is a ``gaff.watch`` of its own. What is measured begins when the
    looks that a run may take freely at its beginning are over, and five have told what one costs. Medians and ranges of
    five rounds.
    """
    print("\n| loop | ms a step, bare | x bare, by process time | told by gaff |\n|---|---|---|---|")
    for name, make, seconds in (
        ("200 model calls a step (REINFORCE)", partial(_policy, 200), 4),
        ("20 model calls a step", partial(_policy, 20), 3),
        ("one model call a step, a small policy", partial(_policy, 1), 3),
        ("an MLP of 16 layers", _mlp_step, 3),
    ):
        step = make()
        began = time.process_time()
        for _ in range(5):
            step()
        count = max(5, int(seconds / ((time.process_time() - began) / 5)))
        bare, ratios, shares = [], [], []
        for _ in range(5):
            bare.append(_cpu(step, count))
            with gaff.watch() as watch:
                pace = watch._watcher.pace
                while pace.total_s < 5 and (
                    len(pace._costs) < 5 or pace._charged_s + pace._cost_s <= pace._limits.allowance_s
                ):
                    step()
                assert watch.findings is not None  # the looks so far are judged
                spent, total = pace.spent_s, pace.total_s
                ratios.append(_cpu(step, count) / bare[-1])
                told = (pace.spent_s - spent) / (pace.total_s - total)
                shares.append(1 / (1 - told))  # over the time without it, as the ratio is
            assert watch.failure is None, watch.failure
        each = statistics.median(bare) / count * 1e3
        print(f"| {name} | {each:.3g} | {_range(ratios)} | {_range(shares)} |", flush=True)


def _range(values):
    """Median and range, with three digits after the point."""
    return f"{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def _cpu(step, count):
    began = time.process_time()
    for _ in range(count):
        step()
    return time.process_time() - began


def _policy(calls):
    """A step of a policy that acts ``calls`` times before it learns, as in PyTorch's own examples of REINFORCE."""
    policy = nn.Sequential(nn.Linear(4, 128), nn.Dropout(0.6), nn.ReLU(), nn.Linear(128, 2))
    optimizer = torch.optim.Adam(policy.parameters(), 1e-2)

    def step():
        state, told = torch.randn(1, 4), []
        for _ in range(calls):
            chosen = torch.distributions.Categorical(torch.softmax(policy(state), 1))
            told.append(chosen.log_prob(chosen.sample()))
            state = state + 0.01
        optimizer.zero_grad()
        torch.cat(told).sum().backward()
        optimizer.step()

    return step


def _mlp_step():
    trained = Trained(*mlp())
    return partial(trained.steps, 1)


def many():
    """Looks at models of many small modules: processor time and memory, each model in a process of its own."""
    print("\n| modules | bare step, s | first look, s | second look, s | memory, x bare |\n|---|---|---|---|---|")
    for modules in (1250, 2500, 5000, 10_000):
        rows = []
        for _ in range(5):
            command = [sys.executable, "-m", "benchmarks.watch", str(modules)]
            rows.append([float(one) for one in subprocess.check_output(command, text=True).split()])
        cells = map(_range, zip(*rows, strict=True))
        print(f"| {modules} | " + " | ".join(cells) + " |", flush=True)


class Chain(nn.Module):
    """Modules of 20 weights each, in a row."""

    def __init__(self, modules):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(modules))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x) + x * 0.1
        return x


def _one_chain(modules):
    """Prints seconds of a bare step and of the first two looks over it, and the largest memory over that of before."""
    torch.set_num_threads(1)
    model = Chain(modules)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)

    def step():
        loss = model(torch.randn(2, 4)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    bare = min(_cpu(step, 1) for _ in range(4))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with tempfile.TemporaryDirectory() as folder, gaff.watch(out=f"{folder}/run") as watch:
        looks = []
        for _ in range(2):
            began = time.process_time()
            step()
            assert watch.findings is not None  # waits until the look is judged and written
            looks.append(time.process_time() - began - bare)
    print(bare, *looks, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / before)


if __name__ == "__main__":
    _one_chain(int(sys.argv[1]))
