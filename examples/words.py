"""Every word that MiniLM has a token for, harvested at two layers: what is near to what, and from which layer on.

python examples/words.py [FOLDER]

Stopped (Ctrl-C) and begun again it goes on where it was. Nothing is downloaded.
"""

import sys

import torch
from minilm import get_model_path, model
from torch import Tensor, nn
from transformers import AutoTokenizer, PreTrainedTokenizerBase

LAYERS = ("embeddings", "encoder.layer.2", "encoder.layer.5")
ASKED = ("monday", "piano", "happy", "seven", "france", "river")


def tokenizer() -> PreTrainedTokenizerBase:
    """That of the model."""
    return AutoTokenizer.from_pretrained(str(get_model_path()), local_files_only=True)


def words() -> list[str]:
    """All words of the vocabulary that are one token of at least three letters, in its order: some 20,000."""
    numbers = tokenizer().get_vocab()
    known = sorted(numbers, key=numbers.__getitem__)
    return [word for word in known if len(word) > 2 and word.isascii() and word.isalpha()]


def batches() -> list[dict[str, Tensor]]:
    """Batches of 256 words, each word between the two tokens that begin and end a text."""
    read, known = tokenizer(), words()
    return [dict(read(known[at : at + 256], return_tensors="pt")) for at in range(0, len(known), 256)]


def the_word(batch: dict[str, Tensor]) -> Tensor:
    """Of ``[CLS] word [SEP]`` the one in the middle: a mask over samples and positions."""
    return torch.tensor([False, True, False]).expand(batch["input_ids"].shape)


def probe(rows: Tensor, is_so: Tensor) -> float:
    """How often a linear classifier is right on the half of the words that it has not seen."""
    rows = nn.functional.normalize(rows - rows.mean(0))
    classifier = nn.Linear(rows.shape[1], 1)
    optimizer = torch.optim.Adam(classifier.parameters(), lr=0.03)
    for _ in range(150):
        optimizer.zero_grad()
        nn.functional.binary_cross_entropy_with_logits(classifier(rows[::2])[:, 0], is_so[::2].float()).backward()
        optimizer.step()
    return float(((classifier(rows[1::2])[:, 0] > 0) == is_so[1::2]).float().mean())


if __name__ == "__main__":
    import gaff

    store = gaff.harvest(model(), batches(), *LAYERS, out=(sys.argv[1:] or ["words"])[0], rows=the_word, shard=16)
    print(store)
    known = words()
    for layer in LAYERS:
        rows = store[layer][:]
        near = nn.functional.normalize(rows - rows.mean(0))
        print(f"\n{layer}")
        for word in ASKED:
            likeness = near @ near[known.index(word)]
            print(f"  {word:8}", ", ".join(known[place] for place in likeness.topk(6).indices.tolist()[1:]))
        torch.manual_seed(0)
        ends = torch.tensor([word.endswith("ing") for word in known])
        chosen = torch.cat((ends.nonzero().flatten(), (~ends).nonzero().flatten()[:: int((~ends).sum() / ends.sum())]))
        chosen = chosen[torch.randperm(len(chosen))]
        print(f"  a linear probe tells from it whether a word ends in -ing: {probe(rows[chosen], ends[chosen]):.1%}")
