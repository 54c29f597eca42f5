"""A sparse autoencoder on a tiny GPT: harvested rows, features that mean something, and the loss when it is spliced in.

python examples/dictionary.py [FOLDER]

A GPT of three layers learns to continue the documentation of this project, letter by letter. What passes behind its
second layer is harvested once; a sparse autoencoder (Bricken et al., "Towards monosemanticity", 2023; of the k largest
features: Gao et al., "Scaling and evaluating sparse autoencoders", 2024) learns from the store. Put back into the model
by ``gaff.edit``, it shows how much of the layer it has kept. A page shows the letters that make a feature large.
"""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import gaff
from gaff.harvesting.overview import save_page

SITE, WIDTH, FEATURES, KEPT, LONG = "blocks.1", 64, 512, 12, 64


class Block(nn.Module):
    """Attention to what came before, and a small network."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        wide = 4 * WIDTH
        self.mlp = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, wide), nn.GELU(), nn.Linear(wide, WIDTH))

    def forward(self, hidden: Tensor) -> Tensor:
        """``[texts, letters, width]`` to the same."""
        size, given = hidden.shape[1], self.norm(hidden)
        later = torch.ones(size, size, dtype=torch.bool).triu(1)
        hidden = hidden + self.attention(given, given, given, attn_mask=later, need_weights=False)[0]
        return hidden + self.mlp(hidden)


class LetterGPT(nn.Module):
    """Letters to the logits of the next ones."""

    def __init__(self, letters: int) -> None:
        super().__init__()
        self.letters, self.places = nn.Embedding(letters, WIDTH), nn.Embedding(LONG, WIDTH)
        self.blocks = nn.Sequential(Block(), Block(), Block())
        self.head = nn.Linear(WIDTH, letters)

    def forward(self, input_ids: Tensor) -> Tensor:
        """``[texts, letters]`` of int64 to ``[texts, letters, kinds of letters]``."""
        return self.head(self.blocks(self.letters(input_ids) + self.places.weight[: input_ids.shape[1]]))


class Dictionary(nn.Module):
    """A sparse autoencoder: of all features the largest few are kept."""

    def __init__(self, mean: Tensor) -> None:
        super().__init__()
        self.mean = nn.Parameter(mean.clone())
        self.encode, self.decode = nn.Linear(WIDTH, FEATURES), nn.Linear(FEATURES, WIDTH, bias=False)
        self.encode.weight.data.copy_(self.decode.weight.data.T)

    def features(self, rows: Tensor) -> Tensor:
        """``[..., width]`` to ``[..., features]``, all but a few of which are zero."""
        large = self.encode(rows - self.mean).relu().topk(KEPT, dim=-1)
        return torch.zeros(*rows.shape[:-1], FEATURES).scatter(-1, large.indices, large.values)

    def forward(self, rows: Tensor) -> Tensor:
        """The rows, put together again of their features."""
        return self.decode(self.features(rows)) + self.mean


def letters() -> tuple[Tensor, str]:
    """The documentation as numbers, ``[texts, 64]``, and the letters that they stand for."""
    folder = Path(__file__).resolve().parent.parent / "docs"
    text = "".join(one.read_text(encoding="utf-8") for one in sorted(folder.rglob("*.md")))
    known = "".join(sorted(set(text)))
    number = {letter: place for place, letter in enumerate(known)}
    numbers = torch.tensor([number[letter] for letter in text])
    return numbers[: len(numbers) // LONG * LONG].view(-1, LONG), known


def loss_of(model: nn.Module, texts: Tensor) -> Tensor:
    """Of the next letters, in nats."""
    return F.cross_entropy(model(texts[:, :-1]).flatten(0, 1), texts[:, 1:].flatten())


def learn(model: nn.Module, batches: list[Tensor], rate: float, loss: Callable[[nn.Module, Tensor], Tensor]) -> None:
    """One pass of Adam over the batches, its rate falling to zero."""
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    falling = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, len(batches))
    for batch in batches:
        optimizer.zero_grad()
        loss(model, batch).backward()
        optimizer.step()
        falling.step()


if __name__ == "__main__":
    out = Path((sys.argv[1:] or ["dictionary"])[0])
    torch.manual_seed(0)
    texts, known = letters()
    texts = texts[torch.randperm(len(texts))[:4000]]
    held, texts = texts[:200], texts[200:]
    model = LetterGPT(len(known))
    learn(model, [one for _ in range(4) for one in texts.split(32)], 3e-3, loss_of)

    data = DataLoader(TensorDataset(texts), batch_size=128)
    store = gaff.harvest(model, data, SITE, out=out / "acts", rows="position", shard=4)
    print(store)

    torch.manual_seed(0)
    dictionary = Dictionary(store[SITE][:20_000].mean(0))
    loader, batches = store.loader(SITE, batch=1024, shuffle=0), []
    for epoch in range(3):
        loader.set_epoch(epoch)
        batches += list(loader)
    learn(dictionary, batches, 2e-3, lambda one, rows: F.mse_loss(one(rows), rows))

    rows = store[SITE][:: store.rows // 5000]
    with torch.no_grad():
        kept = 1 - float((dictionary(rows) - rows).square().sum() / (rows - rows.mean(0)).square().sum())
        used = float((dictionary.features(rows) > 0).any(0).float().mean())
        print(f"{KEPT} of {FEATURES} features a row keep {kept:.1%} of the variance; {used:.0%} of all are used")
        print(f"loss on texts that were held back: {float(loss_of(model, held)):.3f}")
        with gaff.edit(model, {SITE: dictionary}):
            print(f"  with the dictionary in place of {SITE}: {float(loss_of(model, held)):.3f}")
        with gaff.edit(model, {SITE: lambda hidden: hidden.mean((0, 1)).expand_as(hidden)}):
            print(f"  with its mean: {float(loss_of(model, held)):.3f}")

    class Features(nn.Module):
        """The model as far as the site, and its features: to harvest those in turn."""

        def __init__(self) -> None:
            super().__init__()
            self.model, self.dictionary = gaff.take(model, SITE), dictionary

        def forward(self, input_ids: Tensor) -> Tensor:
            return self.dictionary.features(self.model(input_ids)[SITE])

    features = gaff.harvest(Features(), data, ":output", out=out / "features", rows="position", top=KEPT)

    def in_context(row: int, labels: Mapping[str, int]) -> tuple[str, str, str]:
        text, at = "".join(known[one] for one in texts[labels["sample"]]), labels["position"]
        return text[max(0, at - 40) : at], text[at], text[at + 1 : at + 20]

    size = save_page(features, out / "features.html", show=in_context, features=60)
    print(f"{out / 'features.html'} shows the letters that make a feature large ({size / 1e6:.1f} MB)")
