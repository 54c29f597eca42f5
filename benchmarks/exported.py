"""What it costs that an exported graph runs node by node while a session is open."""

import torch

import gaff
from benchmarks.compiled import transformer
from benchmarks.harness import measure, table


def prices(rounds=60):
    """A forward of an exported transformer of 12 blocks, and of the model itself, with every block captured."""
    torch.manual_seed(0)
    model, x = transformer(blocks=12)
    graph = torch.export.export(model.eval(), (x,)).module()

    def captured(one):
        def run():
            with gaff.capture(one, "*"):
                one(x)

        return run

    with torch.no_grad():
        ways = {
            "exported graph": lambda: graph(x),
            "captured": captured(graph),
            "model": lambda: model(x),
            "model, captured": captured(model),
        }
        table("An exported transformer of 12 blocks", measure(ways, rounds), base="exported graph")
