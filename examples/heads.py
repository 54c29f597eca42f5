"""Which attention head matters? Every head of MiniLM is silenced once, all 72 experiments in one forward.

python examples/heads.py
"""

import sys
from pathlib import Path

import torch

import gaff
from gaff import edits, keep
from gaff.sessions.receipt import Receipt

sys.path.insert(0, str(Path(__file__).parent))
import minilm

HEADS = 12


def silence_each(layers: int) -> dict[str, list[edits.Edit]]:
    """Row ``layer * 12 + head`` of the batch runs without that head; the last row runs as it is."""
    return {
        f"encoder.layer.{layer}.attention.self:output[0]": [
            edits.at(keep.rows(layer * HEADS + head), edits.at(keep.heads(head, HEADS), edits.zero()))
            for head in range(HEADS)
        ]
        for layer in range(layers)
    }


def effects() -> tuple[torch.Tensor, Receipt]:
    """``[layer, head]``: how far the embedding of a sentence moves (1 - cosine) when that head is silent."""
    bert, batch = minilm.model(), minilm.sentences()
    layers = len(bert.encoder.layer)
    one = {name: tensor[:1].repeat(layers * HEADS + 1, 1) for name, tensor in batch.items()}
    with torch.no_grad(), gaff.edit(bert, silence_each(layers)) as changed:
        hidden = bert(**one).last_hidden_state
    rows = minilm.embeddings(hidden, one["attention_mask"])
    return (1 - rows[:-1] @ rows[-1]).view(layers, HEADS), changed.receipt


if __name__ == "__main__":
    moved, receipt = effects()
    print(f"{minilm.SENTENCES[0]!r}: how far its embedding moves without each head (1 - cosine, in thousandths)\n")
    print("layer " + "".join(f"{head:>6}" for head in range(HEADS)))
    for layer, row in enumerate(moved):
        print(f"{layer:>5} " + "".join(f"{1000 * value:>6.1f}" for value in row.tolist()))
    best = moved.argmax().item()
    print(f"\nthe head that matters most: layer {best // HEADS}, head {best % HEADS}")
    print(f"{moved.numel()} experiments at {len(receipt.rows)} sites, in {receipt.runs} forward")
