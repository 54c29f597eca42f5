"""``python -m benchmarks [NAME...]``, NAME as in ``main`` below. One thread, medians of CPU time."""

import copy
import subprocess
import sys

import torch
from torch import nn

import gaff
from benchmarks import compiled as compiled_prices
from benchmarks import edits as edit_prices
from benchmarks import exported as exported_prices
from benchmarks import harvest as harvest_prices
from benchmarks import ops as op_prices
from benchmarks import pages as page_prices
from benchmarks import sharded as sharded_prices
from benchmarks import watch as watch_prices
from benchmarks.harness import measure, peer, table
from benchmarks.models import BLOCKS, Blocks

# torchvision's wheel beside a CPU build of torch: its operators are missing, declaring two lets it be imported
if torch.version.cuda is None:
    _LIBRARY = torch.library.Library("torchvision", "DEF")
    _LIBRARY.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _LIBRARY.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def raw_hooks(modules, store, *, gradient=False):
    """What a careful expert writes by hand: keep ``detach()`` in a list for each site."""

    def value(number):
        return lambda module, args, output: store[number].append(output.detach())

    def grad(number):
        def hook(module, args, output):
            output.register_hook(lambda g: store[number].append(g.detach()))

        return hook

    make = grad if gradient else value
    return [module.register_forward_hook(make(number)) for number, module in enumerate(modules)]


class TraceDict:
    """The usual tracing dictionary, written anew: looks names up, last call wins, hooks removed at the end."""

    def __init__(self, model, names):
        self.values = {}
        self.handles = []
        for name in names:
            module = dict(model.named_modules())[name]
            self.handles.append(module.register_forward_hook(lambda m, a, o, name=name: self.values.update({name: o})))

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        for handle in self.handles:
            handle.remove()


def blocks():
    for has_grad in (False, True):
        with torch.set_grad_enabled(has_grad):
            _blocks_open("grad mode" if has_grad else "no_grad")
    with torch.no_grad():
        _blocks_once()


def _blocks_open(mode):
    x, bare = torch.randn(2, 16), Blocks()
    empty, raw, watched = copy.deepcopy(bare), copy.deepcopy(bare), copy.deepcopy(bare)
    store = [[] for _ in range(BLOCKS)]
    raw_hooks(raw.blocks, store)
    for block in empty.blocks:
        block.register_forward_hook(lambda module, args, output: None)

    def run_raw():
        for values in store:
            values.clear()
        raw(x)

    ways = {
        "no hooks": lambda: bare(x),
        "empty hooks": lambda: empty(x),
        "raw hooks, detach()": run_raw,
    }
    with gaff.capture(watched, "blocks.*") as got:

        def run_gaff():
            got.clear()
            watched(x)

        ways["gaff.capture, open"] = run_gaff
        medians = measure(ways, 800)
    title = f"48 blocks, every output kept, session open ({mode})"
    table(title, medians, base="raw hooks, detach()", bare="no hooks", sites=BLOCKS)


def _blocks_once():
    x, bare = torch.randn(2, 16), Blocks()
    raw, watched, dictionary, peers = (copy.deepcopy(bare) for _ in range(4))
    names = [f"blocks.{number}" for number in range(BLOCKS)]

    def run_raw():
        handles = raw_hooks(raw.blocks, [[] for _ in range(BLOCKS)])
        raw(x)
        for handle in handles:
            handle.remove()

    def run_gaff(*patterns):
        with gaff.capture(watched, *patterns):
            watched(x)

    def run_dictionary():
        with TraceDict(dictionary, names):
            dictionary(x)

    again = gaff.capture(copy.deepcopy(watched), *names)
    reopened = again._model

    def run_again():
        with again:
            reopened(x)

    ways = {
        "no hooks": lambda: bare(x),
        "raw hooks, detach()": run_raw,
        "gaff.capture, opened again": run_again,
        "gaff.capture, one pattern": lambda: run_gaff("blocks.*"),
        "gaff.capture, 48 addresses": lambda: run_gaff(*names),
        "tracing dictionary": run_dictionary,
    }
    if nnsight := peer("nnsight"):
        wrapped = nnsight.NNsight(peers)

        def run_nnsight():
            with wrapped.trace(x):
                for block in wrapped.blocks:
                    block.output.save()

        ways["nnsight trace"] = run_nnsight
    title = "48 blocks, open + run + close (no_grad)"
    table(title, measure(ways, 150), base="raw hooks, detach()", bare="no hooks", sites=BLOCKS)


def gradients():
    x = torch.randn(2, 16)
    base = Blocks()
    models = {name: copy.deepcopy(base) for name in ("none", "raw", "gaff", "full")}
    store = [[] for _ in range(BLOCKS)]
    raw_hooks(models["raw"].blocks, store, gradient=True)
    for block in models["full"].blocks:
        block.register_full_backward_hook(lambda module, grad_in, grad_out: None)
    session = gaff.capture(models["gaff"], "blocks.*:grad_output")
    session.__enter__()

    def watched():
        session.clear()
        models["gaff"](x).sum().backward()

    def raw():
        for values in store:
            values.clear()
        models["raw"](x).sum().backward()

    ways = {
        "no hooks": lambda: models["none"](x).sum().backward(),
        "raw tensor hooks, detach()": raw,
        "gaff.capture :grad_output, open": watched,
        "full backward hooks, empty": lambda: models["full"](x).sum().backward(),
    }
    medians = measure(ways, 300)
    session.__exit__(None, None, None)
    table(
        "48 blocks, forward + backward, gradient at every output",
        medians,
        base="raw tensor hooks, detach()",
        bare="no hooks",
        sites=BLOCKS,
    )


def resnet():
    from examples.resnet50 import ResNet50

    model, x = ResNet50().eval(), torch.randn(2, 3, 224, 224)
    truncated = nn.Sequential(model.conv1, model.bn1, model.relu, model.maxpool, model.layer1)
    extractor = gaff.take(model, "layer1")
    ways = {
        "truncated model": lambda: truncated(x),
        "gaff.take": lambda: extractor(x),
        "full forward": lambda: model(x),
    }
    if vision := peer("torchvision.models.feature_extraction"):
        graph = vision.create_feature_extractor(model, ["layer1"])
        ways["torchvision create_feature_extractor"] = lambda: graph(x)
    if timm := peer("timm"):
        features = timm.create_model("resnet50", features_only=True, out_indices=[1]).eval()
        ways["timm features_only (its own model)"] = lambda: features(x)
    if captum := peer("captum.attr"):
        layer = captum.LayerActivation(model, model.layer1)
        ways["captum LayerActivation"] = lambda: layer.attribute(x)
    with torch.no_grad():
        medians = measure(ways, 12, warmup=1)
    table("ResNet-50, features of layer1, batch 2", medians, base="truncated model")


def gpt():
    from transformers import GPT2Config, GPT2Model

    model = GPT2Model(GPT2Config(attn_implementation="eager", use_cache=False)).eval()
    raw_model = copy.deepcopy(model)
    tokens = torch.randint(1000, (1, 128))
    held = []

    def raw_hook(module, args, output):
        held.append((output[0] if isinstance(output, tuple) else output).detach())

    for block in raw_model.h:
        block.register_forward_hook(raw_hook)
        block.attn.register_forward_hook(raw_hook)

    def raw():
        held.clear()
        raw_model(tokens)

    session = gaff.capture(model, "h.*", "h.*.attn:output[0]", last=1)
    session.__enter__()
    bare = copy.deepcopy(model)
    with torch.no_grad():
        medians = measure(
            {"no hooks": lambda: bare(tokens), "raw hooks": raw, "gaff.capture": lambda: model(tokens)}, 15, 2
        )
        kept = sum(tensor.nbytes for tensor in held)
        model(tokens)
        exact = session._ledger._count()
    session.__exit__(None, None, None)
    table("GPT-2 size, 12 blocks, residual and attention output kept", medians, base="raw hooks")
    print(f"\nmemory held: raw hooks {kept / 1e6:.2f} MB, gaff {exact / 1e6:.2f} MB (every distinct memory once)")


def idle():
    code = "import time, torch; t = time.process_time(); import gaff; gaff.capture; print(time.process_time() - t)"
    times = sorted(
        float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
        for _ in range(7)
    )
    print(f"\n### Idle\n\nimport of gaff after torch, up to gaff.capture: {times[3] * 1e3:.1f} ms")
    code = (
        "import sys, time; t = time.perf_counter(); import gaff.cli\n"
        "try: gaff.cli.main(['--help'])\n"
        "except SystemExit: pass\n"
        "print(time.perf_counter() - t, file=sys.stderr); assert 'torch' not in sys.modules"
    )
    times = sorted(
        float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stderr)
        for _ in range(7)
    )
    print(f"gaff --help inside Python: {times[3] * 1e3:.1f} ms, torch not imported")
    x, base = torch.randn(2, 16), Blocks()
    used = copy.deepcopy(base)
    with gaff.capture(used, "**", "**:grad_output"):
        used(x).sum().backward()
    with torch.no_grad():
        medians = measure({"never touched by gaff": lambda: base(x), "after a closed session": lambda: used(x)}, 600)
    table("48 blocks, nothing open", medians, base="never touched by gaff")


def edits():
    edit_prices.edits(Blocks)


clip, samples = edit_prices.clip, edit_prices.samples
ops, guard = op_prices.ops, op_prices.guard
kernels, steps = watch_prices.kernels, watch_prices.steps
pages, recorder = page_prices.pages, page_prices.recorder


def price():
    """Watched loops over bare ones, by process time, beside what gaff tells."""
    watch_prices.price()


def many():
    """Looks at models of thousands of modules."""
    watch_prices.many()


def compiled():
    """Compiled training steps, looked at and not."""
    compiled_prices.prices()


def sharded():
    """Training steps of FSDP2 on two processes, looked at and not."""
    sharded_prices.prices()


def exported():
    """A forward of an exported graph, looked at and not."""
    exported_prices.prices()


def harvest():
    harvest_prices.prices()


def main():
    torch.set_num_threads(1)
    wanted = sys.argv[1:] or [
        "blocks",
        "gradients",
        "resnet",
        "gpt",
        "edits",
        "clip",
        "samples",
        "ops",
        "guard",
        "kernels",
        "steps",
        "price",
        "many",
        "pages",
        "recorder",
        "idle",
        "compiled",
        "sharded",
        "exported",
        "harvest",
    ]
    print(f"torch {torch.__version__}, one thread, medians of CPU time")
    for name in wanted:
        globals()[name]()


if __name__ == "__main__":
    main()
