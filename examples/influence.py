"""Which training digits made a network read one digit wrongly: influence by the gradients of each sample.

python examples/influence.py [FOLDER]

The gradient of a linear layer's weight for one sample is the outer product of the layer's input and the gradient at its
output, so the dot product of two samples' gradients is the product of two dot products (TracIn at the last checkpoint:
Pruthi et al., "Estimating training data influence by tracing gradient descent", 2020). A harvest keeps both for every
sample. A picture shows the digits that speak most against the right answer, and for it; then the network is trained
without the worst, and without as many others, to see whether that was so.
"""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import gaff

LAYERS = ("0", "2")
REMOVED, TIMES = 60, 5


def digits() -> tuple[TensorDataset, TensorDataset, Tensor]:
    """The 1,797 digits of scikit-learn, 8 x 8: 900 to learn from, the others, and which got a wrong label."""
    given, known = load_digits(return_X_y=True)
    pixels, labels = torch.tensor(given / 16, dtype=torch.float32), torch.tensor(known)
    drawn = torch.Generator().manual_seed(0)
    order = torch.randperm(len(pixels), generator=drawn)
    pixels, labels = pixels[order], labels[order]
    wrong = torch.randperm(900, generator=drawn)[:75]
    mislabelled = torch.zeros(900, dtype=torch.bool)
    mislabelled[wrong] = True
    labels[wrong] = (labels[wrong] + torch.randint(1, 10, (75,), generator=drawn)) % 10
    return TensorDataset(pixels[:900], labels[:900]), TensorDataset(pixels[900:], labels[900:]), mislabelled


def trained(table: TensorDataset, seed: int = 0) -> nn.Module:
    """A network of two layers after 40 passes."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    for _ in range(40):
        for pixels, labels in DataLoader(table, batch_size=50, shuffle=True):
            optimizer.zero_grad()
            F.cross_entropy(net(pixels), labels).backward()
            optimizer.step()
    return net


def loss(output: Tensor, batch: list[Tensor]) -> Tensor:
    """A sum, so that each row is its sample's own gradient."""
    return F.cross_entropy(output, batch[1], reduction="sum")


def gradients(net: nn.Module, table: TensorDataset, out: Path) -> dict[str, tuple[Tensor, Tensor]]:
    """By layer: its inputs and the gradients at its output, a row for each sample."""
    sites = [f"{layer}:{port}" for layer in LAYERS for port in ("input", "grad_output")]
    store = gaff.harvest(net, DataLoader(table, batch_size=128), *sites, out=out, loss=loss)
    return {layer: (store[f"{layer}:input"][:], store[f"{layer}:grad_output"][:]) for layer in LAYERS}


def influence(train: dict[str, tuple[Tensor, Tensor]], one: dict[str, tuple[Tensor, Tensor]]) -> Tensor:
    """Of every training sample: by how much a step on it lowers the loss of ``one``, up to the step's length."""
    total = torch.zeros(())
    for layer in LAYERS:
        (inputs, grads), (given, grad) = train[layer], one[layer]
        total = total + (inputs @ given[0] + 1) * (grads @ grad[0])  # 1: the bias, whose input is 1
    return total


def right_answer(table: TensorDataset, pixels: Tensor, label: int) -> float:
    """How sure networks of several seeds are of the right answer, on average."""
    return sum(float(trained(table, seed)(pixels).detach().softmax(-1)[0, label]) for seed in range(TIMES)) / TIMES


def draw(path: Path, rows: list[tuple[str, Tensor, list[str]]]) -> None:
    """Rows of digits with a title and a line below each."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 1.9 * len(rows)), layout="constrained")
    parts = figure.subfigures(len(rows), 1, squeeze=False)[:, 0]
    for part, (title, pixels, lines) in zip(parts, rows, strict=True):
        part.suptitle(title, fontsize=10)
        for axes, digit, line in zip(part.subplots(1, 10), list(pixels) + [None] * 10, lines + [""] * 10, strict=False):
            axes.set_axis_off()
            if digit is not None:
                axes.imshow(digit.view(8, 8), cmap="gray_r")
                axes.set_title(line, fontsize=8)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    out = Path((sys.argv[1:] or ["influence"])[0])
    train, test, mislabelled = digits()
    net = trained(train)
    with torch.no_grad():
        sure = net(test.tensors[0]).softmax(-1)
    is_wrong = sure.argmax(1) != test.tensors[1]
    at = int((sure[torch.arange(len(sure)), test.tensors[1]] * is_wrong).argmax())
    pixels, label = test.tensors[0][at : at + 1], int(test.tensors[1][at])
    print(f"{1 - float(is_wrong.float().mean()):.1%} of the other digits are read rightly")
    print(f"the closest mistake: a {label} that is read as {int(sure[at].argmax())}")

    scores = influence(gradients(net, train, out / "train"),
                       gradients(net, TensorDataset(*test[at : at + 1]), out / f"digit-{at}"))  # fmt: skip
    against, speaks_for = scores.argsort()[:REMOVED], scores.argsort(descending=True)[:REMOVED]
    rest = torch.ones(len(train), dtype=torch.bool)
    rest[against] = False
    others = torch.randperm(len(train), generator=torch.Generator().manual_seed(1))[REMOVED:]
    print(f"{int(mislabelled[against].sum())} of the {REMOVED} that speak most against it have a wrong label, "
          f"{int(mislabelled[speaks_for].sum())} of those that speak most for it, "
          f"{int(mislabelled.sum())} of all {len(train)}")  # fmt: skip
    print(f"sure of {label}, over {TIMES} networks:")
    print(f"  {right_answer(train, pixels, label):6.1%}  trained on all {len(train)} digits")
    for chosen, told in ((rest, "that speak most against it"), (others, "that were drawn")):
        print(f"  {right_answer(TensorDataset(*train[chosen]), pixels, label):6.1%}  without {REMOVED} {told}")

    shown = [("the digit", pixels, [f"{label}, read as {int(sure[at].argmax())}"])]
    for title, chosen in (("speak most against the right answer", against), ("speak most for it", speaks_for)):
        few = chosen[:10]
        shown.append((title, train.tensors[0][few], [f"labelled {one}" for one in train.tensors[1][few].tolist()]))
    draw(out / "influence.png", shown)
    print(f"{out / 'influence.png'} shows them")
