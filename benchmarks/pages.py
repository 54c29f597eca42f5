"""Pages: writing one of a large run, opening it in a browser, and what a live viewer costs the training."""

import math
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn

import gaff
from benchmarks.harness import measure, table
from gaff.record.log import EVENT, LAYOUT, MATRIX, SERIES, LogWriter
from gaff.record.matrix import Layout, pack, pack_series

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
import chromium  # where the tests find a browser

SITES, LOOKS = 1000, 2000
CORE = ("count", "mean", "std", "min", "max", "zeros", "nan", "positive_inf", "negative_inf")
EXTRAS = (("saturated", "entropy", "dead", "outlier"), ("update_ratio", "adam_rms", "momentum", "lr"))


def large_record(folder):
    """A made-up run whose numbers walk at random: a quarter activations and their gradients, the rest parameters."""
    folder.mkdir()
    log = LogWriter(folder / "rank0.gaff")
    rng = np.random.default_rng(0)
    ports = (("", ":grad_output"), (".weight:param", ".weight:grad", ".weight:update"))
    counts = (SITES // 4 // 2, SITES * 3 // 4 // 3)
    layouts = []
    for number, group in enumerate(("activations", "parameters")):
        rows = tuple(("model", f"block.{at}{port}") for port in ports[number] for at in range(counts[number]))
        columns = tuple((name, "d" if name == "count" else "f") for name in (*CORE, *EXTRAS[number]))
        layouts.append(Layout(number, group, rows, columns, True))
        log.write_json(LAYOUT, layouts[-1].to_json())
    levels = [np.exp(rng.normal(size=len(layout.rows))) for layout in layouts]
    for step in range(LOOKS):
        for layout, level in zip(layouts, levels, strict=True):
            level *= np.exp(0.02 * rng.normal(size=len(level)))
            log.write(MATRIX, pack(layout.number, "train", columns_of(level, rng)), step)
        log.write_json(EVENT, {"kind": "look", "phase": "train", "notes": []}, step)
    steps = np.arange(LOOKS, dtype=float)
    losses = 3 * np.exp(-steps / 500) + 0.1 * rng.random(LOOKS)
    log.write(SERIES, pack_series({"step": list(steps), "seconds": [0.1] * LOOKS, "loss:loss": list(losses)}))
    log.close()
    return folder


def columns_of(level, rng):
    count = len(level)
    std = level * (1 + 0.05 * rng.normal(size=count))
    zeros = np.zeros(count)
    floats = [0.1 * std * rng.normal(size=count), std, -4 * std, 4 * std, rng.random(count) / 2, zeros, zeros, zeros]
    floats += [rng.random(count), std * 1e-3, rng.random(count), std]
    magnitudes = np.zeros((64, count), np.uint8)
    middle = (42 + np.log2(level)).astype(int)
    for away in range(-6, 3):
        shares = 200 + 10 * away - 20 * abs(away) + rng.integers(-4, 4, count)
        magnitudes[np.clip(middle + away, 0, 63), np.arange(count)] = np.clip(shares, 1, 255)
    return [np.full(count, 4096.0).tobytes(), *(one.astype("<f4").tobytes() for one in floats), magnitudes.tobytes()]


def report(folder):
    """Seconds of the whole command, its start included, and the bytes of the page."""
    page = folder.parent / "page.html"
    command = [sys.executable, "-m", "gaff", "report", str(folder), "--html", str(page)]
    times = []
    for _ in range(5):
        began = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        times.append(time.perf_counter() - began)
    return statistics.median(times), page


def opened(page):
    """Seconds until the first view is drawn, until a site's page is, and until a map of all sites is, in Chromium."""
    sites = ["block.7", "block.70:grad_output", "block.99.weight:param", "block.12", "block.201.weight:grad"]
    first, each, maps = [], [], []
    with chromium.opened() as browser:
        for _ in range(5):
            tab = browser.new_page(viewport={"width": 1400, "height": 1000})
            began = time.perf_counter()
            tab.goto(f"file://{page}")
            tab.wait_for_selector("main *")
            first.append(time.perf_counter() - began)
            tab.wait_for_timeout(1500)
            for site in sites:
                each.append(tab.evaluate(OPEN, ["site", {"site": site}]) / 1000)
            maps.append(tab.evaluate(OPEN, ["map", {"stat": "std"}]) / 1000)
            tab.close()
    return statistics.median(first), statistics.median(each), max(each), statistics.median(maps)


def frames(folder):
    """Milliseconds from one frame of a live page to the next, while it is updated about once a second: ten seconds."""
    (folder.parent / "train.py").write_text(TRAIN)
    training = subprocess.Popen([sys.executable, str(folder.parent / "train.py"), str(folder)])
    server = subprocess.Popen([sys.executable, "-m", "gaff", "report", str(folder), "--live", "--idle", "100"],
                              stderr=subprocess.PIPE, text=True)  # fmt: skip
    try:
        url = server.stderr.readline().split()[-1]
        with chromium.opened() as browser:
            tab = browser.new_page(viewport={"width": 1400, "height": 1000})
            tab.goto(url)
            tab.wait_for_selector(".plot canvas")
            tab.wait_for_timeout(2000)
            return tab.evaluate(FRAMES)
    finally:
        for process in (training, server):
            process.kill()
            process.wait()
        server.stderr.close()


TRAIN = """
import sys, time, torch, gaff
from torch import nn
torch.set_num_threads(1)
model = nn.Sequential(*(layer for _ in range(12) for layer in (nn.Linear(64, 64), nn.GELU())), nn.Linear(64, 10))
optimizer = torch.optim.Adam(model.parameters())
with gaff.watch(model, optimizer, out=sys.argv[1]):
    while True:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(torch.randn(32, 64)), torch.randint(0, 10, (32,))).backward()
        optimizer.step()
        time.sleep(0.02)
"""

FRAMES = """async () => {
  const times = [];
  let versions = 0;
  new MutationObserver(() => versions++).observe(document.getElementById('page'), { childList: true });
  const end = performance.now() + 10000;
  await new Promise((done) => {
    const next = (now) => { times.push(now); now < end ? requestAnimationFrame(next) : done(); };
    requestAnimationFrame(next);
  });
  const gaps = times.slice(1).map((time, at) => time - times[at]).sort((a, b) => a - b);
  const late = gaps.filter((one) => one > 25).length / gaps.length;
  return { median: gaps[gaps.length >> 1], late, longest: gaps[gaps.length - 1], versions };
}"""


OPEN = """async ([view, options]) => {
  const began = performance.now();
  location.hash = `#/${view}?` + new URLSearchParams(options);
  const frame = document.getElementById('page');
  while (frame.dataset.shown !== location.hash) await new Promise((done) => setTimeout(done));
  await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
  return performance.now() - began;
}"""


def live(folder):
    """A step of a watched training, wall time, with nobody looking and with a live page open, in turns."""
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(12) for layer in (nn.Linear(256, 256), nn.GELU())), nn.Linear(256, 10))
    optimizer = torch.optim.Adam(model.parameters())
    x, y = torch.randn(512, 256), torch.randint(0, 10, (512,))
    times = {"nobody looks": [], "a live page is open": []}
    with gaff.watch(model, optimizer, out=folder):

        def step():
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()

        for _ in range(200):
            step()
        for turn in range(20):
            name = list(times)[turn % 2]
            server = None
            if turn % 2:
                command = [sys.executable, "-m", "gaff", "report", str(folder), "--live"]
                server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
                url = server.stderr.readline().split()[-1]
                viewer = subprocess.Popen([sys.executable, "-c", VIEWER, url], stdout=subprocess.DEVNULL)
                time.sleep(2)
            for _ in range(150):
                began = time.perf_counter()
                step()
                times[name].append(time.perf_counter() - began)
            if server is not None:
                for process in (viewer, server):
                    process.kill()
                    process.wait()
                server.stderr.close()
    return {name: statistics.median(values) for name, values in times.items()}


VIEWER = """
import sys, urllib.request
token = sys.argv[1].partition("token=")[2]
base = sys.argv[1].partition("?")[0]
with urllib.request.urlopen(base + "events?token=" + token) as events:
    for line in events:
        if line.startswith(b"data:"):
            urllib.request.urlopen(base + "head?token=" + token).read()
"""


def pages():
    with tempfile.TemporaryDirectory() as name:
        folder = large_record(Path(name) / "run")
        seconds, page = report(folder)
        print(f"\n### A page of {SITES} sites and {LOOKS} looks\n\n| what | |\n|---|---|")
        print(f"| the record | {sum(one.stat().st_size for one in folder.iterdir()) / 1e6:.1f} MB |")
        print(f"| gaff report --html, as a command | {seconds:.2f} s |")
        print(f"| the page | {page.stat().st_size / 1e6:.2f} MB |")
        if chromium.executable():
            first, middle, worst, whole = opened(page)
            print(f"| until it can be used | {first:.2f} s |")
            print(f"| opening a site, median and longest | {middle * 1e3:.0f} ms, {worst * 1e3:.0f} ms |")
            print(f"| a map of all sites | {whole * 1e3:.0f} ms |")
    if chromium.executable():
        with tempfile.TemporaryDirectory() as name:
            told = frames(Path(name) / "run")
            print(f"\nframes of a live page: median {told['median']:.1f} ms, longest {told['longest']:.0f} ms, "
                  f"{told['late']:.1%} over 25 ms, drawn anew {told['versions']} times in 10 s")  # fmt: skip
    with tempfile.TemporaryDirectory() as name:
        table("A training step beside a live page", live(Path(name) / "run"), base="nobody looks")


def recorder():
    """The row that the flight recorder writes for each step."""
    from gaff.record.flight import STATE, Flight, RingWriter

    with tempfile.TemporaryDirectory() as name:
        ring = RingWriter(Path(name) / "rank0.ring")
        row = Flight(1, time.time(), 0.1, 0.1, math.nan, 32, "0123abcd", {"loss": random.random()}, bytes(STATE))
        medians = measure({"200 rows": lambda: [ring.write(row) for _ in range(200)]}, rounds=50)
        ring.close()
    print(f"\na row of the flight recorder: {medians['200 rows'] / 200 * 1e6:.1f} us")
