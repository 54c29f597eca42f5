"""The pictures of docs/gallery.md and of the README, made of real runs and models: ``make gallery``."""

import io
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import chromium
import gaff
import shots
from gaff.views import figures

OUT = shots.ROOT / "docs/gallery"


def main():
    folder = shots.ROOT / "shots"
    folder.mkdir(exist_ok=True)
    runs = shots.make_runs(folder / "runs")
    photo, text = shots.traces()
    healthy, faster, dead = (gaff.load(runs / name) for name in ("healthy", "faster", "dead"))
    made = {
        "loss": figures.loss([healthy, faster], smoothing=0.8),
        "loss-with-events": figures.loss(dead),
        "signal-by-depth": figures.signal_by_depth(healthy, port="grad_output"),
        "heat-map": figures.heat_map(healthy),
        "attention": figures.attention(
            text, "encoder.layer.0.attention.self/scaled_dot_product_attention#0", heads=range(8)
        ),
        "features": figures.features(photo, "maxpool"),
        "class-activation": figures.picture(photo, "layer3", "class activation"),
    }
    OUT.mkdir(exist_ok=True)
    for name, figure in made.items():
        figure.savefig(OUT / f"{name}.png", dpi=90, metadata={"Software": None})
        print(OUT / f"{name}.png")
    terminal(OUT / "terminal.svg")
    page(OUT / "page.png")


def terminal(out):
    """What ``gaff watch`` prints of a broken training, in the colours that a terminal shows."""
    from rich.console import Console
    from rich.terminal_theme import MONOKAI

    from gaff.cli import colors

    line = ["gaff", "watch", "--out", "runs/a", "--", "python", "train_digits.py", "--bug", "lr-too-high"]
    command = [sys.executable, "-m", "gaff", *line[1:5], sys.executable, str(shots.ROOT / "examples/train_digits.py")]
    with tempfile.TemporaryDirectory() as folder:
        ran = subprocess.run([*command, *line[-2:]], cwd=folder, check=True, capture_output=True, text=True)
    told = ran.stderr[ran.stderr.index("runs/a: ") :]
    console = Console(record=True, width=112, file=io.StringIO(), force_terminal=True)
    console.print(f"[bold]$[/bold] {' '.join(line)}")
    colors.paint(told[: told.index("site  ")].rstrip().replace(f"{sys.executable} {shots.ROOT}/examples/", "python "),
                 console)  # fmt: skip
    out.write_text(console.export_svg(title="gaff watch", theme=MONOKAI), encoding="utf-8")


def page(out):
    """The first glance of a training's page, beside a healthy one; commands are told as they were typed."""
    here = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "HOME": os.environ.get("HOME", "")}
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(shots.ROOT / "tests/shots_training.py", Path(folder) / "train.py")
        (Path(folder) / "train_digits.py").write_text((shots.ROOT / "examples/train_digits.py").read_text())
        for name, options in (("healthy", ()), ("dead", ("--bug", "dead-relu"))):
            command = [
                "gaff",
                "watch",
                "--quiet",
                "--out",
                name,
                "--",
                "python",
                "train.py",
                "--epochs",
                "150",
                *options,
            ]
            subprocess.run(command, cwd=folder, check=True, env=here, stdout=subprocess.DEVNULL)
        command = ["gaff", "report", "healthy", "dead", "--html", "page.html"]
        subprocess.run(command, cwd=folder, check=True, env=here, stdout=subprocess.DEVNULL)
        picture_of(Path(folder) / "page.html", out)


def picture_of(made, out):
    """The first view of the second run, on a screen of usual size."""
    with chromium.opened() as browser:
        tab = browser.new_context(viewport={"width": 1200, "height": 760}, color_scheme="light").new_page()
        tab.goto(f"file://{made}#/verdict?run=1")
        tab.wait_for_selector("canvas")
        tab.wait_for_timeout(500)
        tab.screenshot(path=out)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()
