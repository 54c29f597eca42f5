"""The pictures of docs/gallery.md, made of real runs and models: ``make gallery``."""

import sys
from pathlib import Path

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


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()
