"""A model in the first FSDP on two processes, and what gaff makes of it: for ``slow/test_first_fsdp.py``."""

import torch
from torch import nn

import gaff

WORLD, STEPS = 2, 3
LIMITS = {
    "norm": {"norm": 0.1},
    "value": {"value": 0.05},
    "tensor": {"norm": 0.05, "per": "tensor"},
    "maximum": {"norm": 0.05, "norm_type": float("inf")},
}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.act, self.out = nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)

    def forward(self, x):
        return self.out(self.act(self.fc(x)))


def build(is_flat, *, has_names=True):
    torch.manual_seed(0)
    model = Net()
    if is_flat:
        from torch.distributed.fsdp import FullyShardedDataParallel as Flat

        options = {"use_orig_params": has_names, "device_id": torch.device("cpu")}
        model.fc = Flat(model.fc, **options)
        model = Flat(model, **options)
    return model


def batch():
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(1))


def weights(model, is_flat):
    from torch.distributed.fsdp import FullyShardedDataParallel as Flat

    if is_flat:
        with Flat.summon_full_params(model):
            return {
                name.replace("_fsdp_wrapped_module.", ""): one.detach().clone()
                for name, one in model.named_parameters()
            }
    return {name: one.detach().clone() for name, one in model.named_parameters()}


def train(model, limits=None, nan_on=None):
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    clipping = gaff.clip_gradients(optimizer, model=model, **limits) if limits else None
    for step in range(STEPS):
        loss = model(batch()).square().sum()
        (loss * float("nan") if step == nan_on else loss).backward()
        optimizer.step()
        optimizer.zero_grad()
    return clipping


def clipped(is_flat, how, has_names=True):
    """The weights after training under limits, and the norms that the audit tells."""
    model = build(is_flat, has_names=has_names)
    clipping = train(model, LIMITS[how])
    return weights(model, is_flat), [row.norm for row in clipping.audit.rows]


def skipped(is_flat):
    model = build(is_flat)
    clipping = train(model, {"norm": 10.0, "nonfinite": "skip"}, nan_on=1)
    return weights(model, is_flat), clipping.audit.skipped


def looked_at(is_flat):
    """Values, gradients and an edit, at calls."""
    model = build(is_flat)
    edit = {"act": gaff.edits.scale(0.5), "fc:grad_output": gaff.edits.clamp(-0.1, 0.1)}
    with (
        gaff.edit(model, edit),
        gaff.capture(model, "fc", "act", "out:input", "fc:grad_output", "act:grad_input") as got,
    ):
        model(batch()).square().sum().backward()
    return {site: got[site].detach().clone() for site in got}


def watched(is_flat, out):
    model = build(is_flat)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with gaff.watch(model, optimizer, out=out, every=1):
        for _ in range(STEPS):
            model(batch()).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()


def refused():
    """What each of these says."""
    told = {}
    model = build(is_flat=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    asked = {
        "param": lambda: gaff.capture(model, "fc.weight:param").__enter__(),
        "grad": lambda: gaff.capture(model, "fc.weight:grad").__enter__(),
        "edit of a parameter": lambda: gaff.edit(model, {"fc.weight:param": gaff.edits.zero()}).__enter__(),
        "outer_grad": lambda: gaff.capture(model, "fc:outer_grad").__enter__(),
        "take": lambda: gaff.take(model, "fc")(batch()),
        "trace": lambda: gaff.trace(model, batch()),
        "guard": lambda: gaff.guard(model),
        "sample norms": lambda: gaff.sample_norms(model),
        "nonfinite": lambda: gaff.find_nonfinite(lambda: model(batch()).sum().backward(), model=model),
        "adaptive": lambda: gaff.clip_gradients(optimizer, model=model, adaptive=0.01),
        "backward": lambda: gaff.clip_gradients(optimizer, model=model, value=1.0, when="backward"),
    }
    for name, ask in asked.items():
        try:
            ask()
        except gaff.PlanError as error:
            told[name] = str(error)
        except Exception as error:
            told[name] = f"CRASH {type(error).__name__}: {error}"
        else:
            told[name] = "nothing"
    return told


def found_by(rank, out):
    """What this rank finds in all of these runs; the record of the watched one is in ``out``."""
    found = {how: clipped(True, how) for how in LIMITS}
    found["flat"] = clipped(True, "norm", has_names=False)[1]
    found["skipped"], found["looked"], found["refused"] = skipped(True), looked_at(True), refused()
    watched(True, f"{out}/watched")
    return found
