# pyright: strict, reportUnknownMemberType=false
"""Every public name as a user's own code would use it; ``tests/slow/test_types.py`` has type checkers read it."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

import gaff
from gaff.address.grammar import Site


def look(model: nn.Module, x: Tensor, loss: Tensor) -> str:
    with gaff.capture(
        model, "0", gaff.maybe("1"), model, ["2", "3"], {"4": gaff.keep.rows(0)}, last=2, to="cpu"
    ) as got:
        model(x)
    with gaff.capture(model, "fc", budget="2GB", evict="oldest", threads="all", dtype=torch.float16, loss=loss) as more:
        model(x)
    keys: list[str] = list(more)
    with gaff.capture(b=x) as plain:
        x.sum().backward()
    plan = gaff.Plan.of("0", last=1, clone=True)
    with gaff.capture(model, plan):
        model(x)
    site = Site("fc", port="grad")
    stacked: Tensor = got.stack("h.*", [model, "fc"], Site("fc"))
    got.save(Path("x.safetensors"))
    saved = gaff.load("x.safetensors", "capture")
    shapes = {name: value.shape for name, value in saved.run(0).items()}
    store = gaff.harvest(model, [x], "fc", out="rows", rows="token", reduce=gaff.keep.project(8), labels={"y": 1})
    first: Tensor = store["fc"][0]
    again = gaff.load("rows", "harvest").labels["sample"][[1, 2]]
    row_batches = list(store.loader("fc", batch=8, shuffle=0))
    kept = [saved.get("fc", stacked), got[model], saved.receipt.runs, "fc" in saved, shapes, *saved.values()]
    tree: str = str(gaff.sites(model, x, ops=True))
    return f"{first} {again} {row_batches} {kept} {got['0']} {got.receipt} {got.all('0')} {keys} {plain['b']} {site} {tree}"


def take(model: nn.Module, x: Tensor) -> Tensor:
    features = gaff.take(model, "layer4", "avgpool", to="cpu", clone=True)
    found: Tensor = features(x)["avgpool"]
    return found


def change(model: nn.Module, x: Tensor, optimizer: torch.optim.Optimizer) -> None:
    with gaff.edit(
        model, {"0": gaff.edits.scale(0.5), "1": torch.relu, "2": [nn.ReLU()]}, check_finite=True
    ) as changed:
        model(x)
    print(changed.receipt)
    with gaff.capture(model, "0") as got:
        model(x)
    patches = {"1": gaff.edits.patch(got, source="0"), "2": gaff.edits.patch(source=Site("0"), detach=True)}
    with gaff.edit(model, {**patches, "3": gaff.edits.patch(gaff.load("x.safetensors", "capture"), rows=0)}):
        model(x)
    with gaff.edit({x: gaff.edits.zero()}):
        x.sum().backward()
    plan = gaff.Plan.edit({"0": gaff.edits.clamp(-1, 1)}, threads="own")
    handle = gaff.edit(model, plan).attach()
    handle.remove()
    with gaff.clip_gradients(optimizer, norm=1.0, nonfinite="skip", when="step") as limits:
        optimizer.step()
    print(limits.audit)


def explain(model: nn.Module, x: Tensor) -> str:
    def loss_of(output: Tensor) -> Tensor:
        return output.mean()

    trace = gaff.trace(model, x, backward=loss_of)
    trace.save(Path("t.json"))
    again = gaff.load("t.json", "trace")
    anatomy = gaff.anatomy(model, x)
    report = gaff.find_nonfinite(lambda: model(x).sum().backward(), model=model, allow=["0"])
    with gaff.guard(model, action="warn") as guard:
        model(x)
    with gaff.sample_norms(model, "fc", reduction="sum") as norms:
        model(x).sum().backward()
    parted = gaff.diff(trace, again, tolerance=1e-5)
    total: Tensor = norms.total
    return f"{again.tree()} {anatomy.tree()} {bool(report)} {guard.reports} {total} {parted.verdict}"


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    with gaff.watch({"net": model}, optimizer, out="runs/a", only=["layer*"], every=10, keep_batch=True) as w:
        optimizer.step()
    try:
        run = gaff.load(Path("runs") / "a", "run")
    except gaff.errors.RecordError as error:
        raise gaff.GaffError("no run") from error
    steps: list[int] = run.series("fc", "rms").steps
    return [one.message for one in (*w.findings, *run.findings)] + [str(steps)]
