"""The prices on a GPU: ``python -m benchmarks.gpu [eager] [compiled] [graphs]``.

Wall time with the device waited for, medians, interleaved.
"""

import contextlib
import random
import statistics
import sys
import time

import torch

import gaff
from benchmarks.compiled import transformer
from benchmarks.harness import table


def measure(ways, rounds=30, warmup=5):
    for way in ways.values():
        for _ in range(warmup):
            way()
    times = {name: [] for name in ways}
    order = list(ways)
    for _ in range(rounds):
        random.shuffle(order)
        for name in order:
            torch.cuda.synchronize()
            began = time.perf_counter()
            ways[name]()
            torch.cuda.synchronize()
            times[name].append(time.perf_counter() - began)
    return {name: statistics.median(values) for name, values in times.items()}


def step_of(watch, *, width=1024, sequences=16, mode=None, is_compiled=False):
    torch.manual_seed(0)
    model, x = transformer(width=width)
    model, x = model.cuda().bfloat16(), x.repeat(sequences // 2, 4, 1).cuda().bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    run = torch.compile(model, mode=mode, fullgraph=True) if is_compiled else model
    opened = contextlib.ExitStack().enter_context(watch(model, optimizer))

    def step():
        optimizer.zero_grad()
        run(x).float().square().mean().backward()
        optimizer.step()
        if isinstance(opened, gaff.sessions.capture.Capture):
            opened.clear()

    return step


def raw(model, optimizer):
    """What a careful expert writes by hand: keep ``detach()`` of every block and its gradient."""
    kept = {}

    def hook(number):
        def keep(module, args, output):
            kept[number] = output.detach()
            output.register_hook(lambda gradient: kept.update({-number - 1: gradient.detach()}))

        return keep

    for number, block in enumerate(model):
        block.register_forward_hook(hook(number))
    return contextlib.nullcontext()


SITES = ("?", "??", "?:grad_output", "??:grad_output")
WAYS = {
    "bare": lambda model, optimizer: contextlib.nullcontext(),
    "raw hooks that keep blocks and their gradients": raw,
    "gaff.capture of the same": lambda model, optimizer: gaff.capture(
        model, "?", "??", "?:grad_output", "??:grad_output"
    ),
    "the same, to pinned memory": lambda model, optimizer: gaff.capture(model, *SITES, to="cpu", last=1),
    "gaff.watch, every 10th step": lambda model, optimizer: gaff.watch(model, optimizer, every=10),
    "gaff.watch, every step": lambda model, optimizer: gaff.watch(model, optimizer, every=1),
    "gaff.guard": lambda model, optimizer: gaff.guard(model),
}


SETTINGS = {
    "eager": ("of width 1024, 16 sequences of 1024, eager", {}),
    "large": ("of width 2048, 32 sequences of 1024, eager", {"width": 2048, "sequences": 32}),
    "compiled": ("of width 1024, compiled", {"is_compiled": True}),
    "graphs": ("of width 1024, compiled with CUDA graphs", {"is_compiled": True, "mode": "reduce-overhead"}),
}


def main():
    if not torch.cuda.is_available():
        sys.exit("no CUDA device: these prices are those of a GPU")
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}")
    for name in sys.argv[1:] or SETTINGS:
        title, options = SETTINGS[name]
        is_compiled = "is_compiled" in options
        ways = {name: step_of(watch, **options) for name, watch in WAYS.items() if not (is_compiled and watch is raw)}
        rounds = 8 if name == "large" else 30
        table(f"Training step of 12 blocks in bfloat16, {title}", measure(ways, rounds), base="bare")


if __name__ == "__main__":
    main()
