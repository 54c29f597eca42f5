"""A training script like many, which knows nothing of gaff, and can be broken in one of many ways.

python train.py --task digits --fault no-zero-grad --seed 1

Tasks differ in model, data, optimizer and in how the loop is written. A fault changes one thing; ``none`` is healthy,
and so are the oddities, which look strange and are meant.
"""

import argparse
import math
from itertools import pairwise

import torch
import torch.nn.functional as F
from sklearn.datasets import load_diabetes, load_digits, load_sample_image
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

TASKS = ("digits", "images", "diabetes", "language", "rows", "photos")
HEALTHY = ("none", "oddity-frozen-body", "oddity-accumulate", "oddity-clip", "oddity-amp", "oddity-cosine-restarts",
           "oddity-label-noise", "oddity-label-smoothing", "oddity-large-lr", "oddity-weight-decay", "oddity-dropout",
           "oddity-small-batch", "oddity-onecycle", "oddity-sgd-low-momentum", "oddity-two-losses")  # fmt: skip
FAULTS = (
    "no-zero-grad", "lr-high", "lr-low", "labels-shuffled", "input-unused", "frozen", "replaced-head", "detached",
    "eval-mode", "no-eval", "double-softmax", "softmax-axis", "nll-of-scores", "sign", "broadcast", "decay",
    "raw-inputs", "dead-relu", "sum-not-mean", "same-batch", "constant-labels", "zero-init", "log-zero", "lr-to-zero",
    "wrong-loss-graph", "deep-sigmoid", "batch-norm-of-two", "low-precision", "clip-tiny", "exception", "by-hand",
    "forgotten-group", "no-warmup",
)  # fmt: skip


class Cnn(nn.Module):
    def __init__(self, classes=10):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())
        self.body = nn.Sequential(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2))
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(32 * 16, classes)

    def forward(self, x):
        x = self.body(self.stem(x.view(-1, 1, 8, 8)))
        return self.head(self.drop(x.flatten(1)))


class Rows(nn.Module):
    """Reads an image row by row."""

    def __init__(self, hidden=64, classes=10):
        super().__init__()
        self.drop = nn.Dropout(0.1)
        self.gru = nn.GRU(8, hidden, num_layers=2, batch_first=True)
        self.head = nn.Linear(hidden, classes)

    def forward(self, x):
        states, _ = self.gru(self.drop(x.view(-1, 8, 8)))
        return self.head(states[:, -1])


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(width, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1)
        self.norm1, self.norm2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)

    def forward(self, x):
        return F.relu(x + self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))))


class ResNet(nn.Module):
    """Tells from which part of which photo a patch is."""

    def __init__(self, width=24, classes=4):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, stride=2, padding=1)
        self.blocks = nn.Sequential(Residual(width), Residual(width))
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


class Block(nn.Module):
    def __init__(self, width, norm_first):
        super().__init__()
        self.norm_first = norm_first
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = nn.MultiheadAttention(width, 4, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def mix(self, x):
        size = x.shape[1]
        mask = torch.triu(torch.ones(size, size, dtype=torch.bool), 1)
        return self.attn(x, x, x, attn_mask=mask, need_weights=False)[0]

    def forward(self, x):
        if self.norm_first:
            x = x + self.mix(self.ln1(x))
            return x + self.mlp(self.ln2(x))
        x = self.ln1(x + self.mix(x))
        return self.ln2(x + self.mlp(x))


class Language(nn.Module):
    def __init__(self, letters, width=64, layers=4, context=32, norm_first=True):
        super().__init__()
        self.letters = nn.Embedding(letters, width)
        self.places = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, norm_first) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, letters)

    def forward(self, ids):
        x = self.letters(ids) + self.places(torch.arange(ids.shape[1]))
        return self.head(self.norm(self.blocks(x)))


def mlp(sizes, activation=nn.ReLU):
    layers = []
    for before, after in pairwise(sizes):
        layers += [nn.Linear(before, after), activation()]
    return nn.Sequential(*layers[:-1])


class Task:
    """Data, a model and an optimizer; ``batches(size)`` goes on for ever."""

    def __init__(self, name, fault, seed):
        self.name, self.fault = name, fault
        self.classes = 0
        getattr(self, name)(fault)

    def digits(self, fault):
        data = load_digits()
        x = torch.tensor(data.data, dtype=torch.float32) / 16
        y = torch.tensor(data.target)
        self.data(x, y, fault)
        self.classes, self.batch = 10, 64
        activation = nn.Sigmoid if fault == "deep-sigmoid" else nn.ReLU
        self.model = mlp([64, *([64] * 10 if fault == "deep-sigmoid" else [128, 64]), 10], activation)
        if fault == "deep-sigmoid":
            for layer in self.model:
                if isinstance(layer, nn.Linear):
                    nn.init.normal_(layer.weight, std=0.1)
        self.head_at = (self.model, str(len(self.model) - 1))
        self.optimizer_of = lambda parameters, lr=1e-3, **more: torch.optim.Adam(parameters, lr=lr, **more)
        self.lr = 1e-3

    def images(self, fault):
        data = load_digits()
        x = torch.tensor(data.images, dtype=torch.float32)
        x = (x - 5) / 6
        self.data(x, torch.tensor(data.target), fault)
        self.classes, self.batch = 10, 50
        self.model = Cnn()
        self.head_at = (self.model, "head")
        self.optimizer_of = lambda parameters, lr=0.02, **more: torch.optim.SGD(parameters, lr=lr, momentum=0.9, **more)
        self.lr = 0.02

    def diabetes(self, fault):
        data = load_diabetes()
        x = torch.tensor(data.data, dtype=torch.float32)
        x = (x - x.mean(0)) / x.std(0)
        y = torch.tensor(data.target, dtype=torch.float32)
        y = (y - y.mean()) / y.std()
        self.data(x, y[:, None], fault)
        self.batch = 32
        self.model = mlp([10, 64, 64, 1], nn.Tanh)
        self.head_at = (self.model, "4")
        self.optimizer_of = lambda parameters, lr=3e-3, **more: torch.optim.AdamW(parameters, lr=lr, **more)
        self.lr = 3e-3

    def language(self, fault):
        text = " ".join(f"{a} and {b} are {a + b}, {a} by {b} is {a * b}." for a in range(40) for b in range(40))
        letters = sorted(set(text))
        ids = torch.tensor([letters.index(letter) for letter in text])
        windows = ids[: len(ids) // 33 * 33].view(-1, 33)
        self.data(windows[:, :-1], windows[:, 1:], fault)
        self.classes, self.batch = len(letters), 32
        post = fault == "no-warmup"
        self.model = Language(len(letters), layers=8 if post else 3, norm_first=not post)
        self.head_at = (self.model, "head")
        self.lr = 2e-2 if post else 1e-3
        self.optimizer_of = lambda parameters, lr=self.lr, **more: torch.optim.AdamW(parameters, lr=lr, **more)

    def rows(self, fault):
        data = load_digits()
        x = torch.tensor(data.images, dtype=torch.float32) / 8 - 1
        self.data(x, torch.tensor(data.target), fault)
        self.classes, self.batch = 10, 48
        self.model = Rows()
        self.head_at = (self.model, "head")
        self.lr = 2e-3
        self.optimizer_of = lambda parameters, lr=2e-3, **more: torch.optim.RMSprop(parameters, lr=lr, **more)

    def photos(self, fault):
        patches, labels = [], []
        for number, name in enumerate(("china.jpg", "flower.jpg")):
            photo = torch.tensor(load_sample_image(name), dtype=torch.float32).permute(2, 0, 1) / 127.5 - 1
            for half in range(2):
                for _ in range(300):
                    top = int(torch.randint(0, 411, ()))
                    left = int(torch.randint(0, 300, ())) + half * 320
                    patches.append(photo[:, top : top + 16, left : left + 16])
                    labels.append(2 * number + half)
        self.data(torch.stack(patches), torch.tensor(labels), fault)
        self.classes, self.batch = 4, 40
        self.model = ResNet()
        self.head_at = (self.model, "head")
        self.lr = 2e-3
        self.optimizer_of = lambda parameters, lr=2e-3, **more: torch.optim.NAdam(parameters, lr=lr, **more)

    def data(self, x, y, fault):
        order = torch.randperm(len(x))
        x, y = x[order], y[order]
        if fault == "labels-shuffled":
            y = y[torch.randperm(len(y))]
        if fault == "raw-inputs" and x.is_floating_point():
            x = x * 3000 + 5000
        if fault == "constant-labels":
            y = torch.full_like(y, y.flatten()[0].item())
        if fault == "oddity-label-noise" and not y.is_floating_point():
            noisy = torch.rand(y.shape) < 0.2
            y = torch.where(noisy, y[torch.randperm(len(y))], y)
        cut = len(x) * 4 // 5
        self.train, self.test = TensorDataset(x[:cut], y[:cut]), TensorDataset(x[cut:], y[cut:])


def cut(output):
    return tuple(map(cut, output)) if isinstance(output, tuple) else output.detach()


def change_model(task):  # noqa: C901  # one fault after the other
    """The faults that are in the model; returns the model."""
    model, fault = task.model, task.fault
    if fault == "dead-relu":
        for layer in [one for one in model.modules() if isinstance(one, (nn.Linear, nn.Conv2d))][:-1]:
            nn.init.constant_(layer.bias, -20.0)
        for layer in [one for one in model.modules() if isinstance(one, nn.BatchNorm2d)]:
            nn.init.constant_(layer.bias, -20.0)
    if fault == "zero-init":
        for parameter in model.parameters():
            nn.init.zeros_(parameter)
    if fault in ("frozen", "oddity-frozen-body"):
        kept = [] if fault == "frozen" else list(task.head_at[0].get_submodule(task.head_at[1]).parameters())
        for number, parameter in enumerate(model.parameters()):
            last = fault == "frozen" and number >= len(list(model.parameters())) - 1
            parameter.requires_grad_(last or any(parameter is one for one in kept))
    if fault == "input-unused" and task.name != "digits":
        model.register_forward_pre_hook(lambda module, given: (torch.zeros_like(given[0]),))
    if fault == "detached":
        inside = [one for one in model.modules() if list(one.parameters(recurse=False))]
        inside[len(inside) - 2].register_forward_hook(lambda module, given, output: cut(output))
    if fault == "log-zero":
        task.head_at[0].get_submodule(task.head_at[1]).register_forward_pre_hook(
            lambda module, given: (torch.log(given[0].relu()),)
        )
    if fault == "low-precision":
        model.to(torch.bfloat16)
    return model


def loss_of(task, model, x, y):
    fault = task.fault
    if fault == "low-precision" and x.is_floating_point():
        x = x.bfloat16()
    out = model(x - x.clone() if fault == "input-unused" and task.name == "digits" else x)
    if not task.classes:
        out = out.float() if fault == "low-precision" else out
        if fault == "broadcast":
            y = y[:, 0]
        loss = F.mse_loss(out, y)
        return -loss if fault == "sign" else loss
    out, y = out.flatten(0, -2), y.flatten()
    out = out.float() if fault == "low-precision" else out
    if fault == "double-softmax":
        out = out.softmax(-1)
    if fault == "softmax-axis":
        return F.nll_loss(out.log_softmax(0), y)
    if fault == "nll-of-scores":
        return F.nll_loss(out, y)
    if fault == "exception":
        y = y + 3
    loss = F.cross_entropy(out, y, label_smoothing=0.1 * (fault == "oddity-label-smoothing"))
    if fault == "oddity-two-losses":
        loss = loss + 1e-3 * sum(one.square().sum() for one in model.parameters())
    return -loss if fault == "sign" else loss


def main():  # noqa: C901  # a script, written as scripts are
    parser = argparse.ArgumentParser()
    parser.add_argument("--task", choices=TASKS, default="digits")
    parser.add_argument("--fault", choices=(*HEALTHY, *FAULTS), default="none")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    fault = options.fault
    torch.manual_seed(options.seed)
    task = Task(options.task, fault, options.seed)
    model = change_model(task)
    lr = task.lr
    more = {"weight_decay": 1.0} if fault == "decay" else {}
    if fault == "decay" and isinstance(task.optimizer_of([nn.Parameter(torch.zeros(1))]), torch.optim.AdamW):
        more = {"weight_decay": 1 / lr * 0.3}
    if fault == "lr-high":
        lr = lr * 300
    if fault == "lr-low":
        lr = lr * 1e-5
    if fault == "oddity-large-lr":
        lr = lr * 3
    if fault == "low-precision":
        lr = lr / 30
    if fault == "oddity-weight-decay":
        more = {"weight_decay": 1e-3}
    owned = list(model.parameters())
    if fault == "forgotten-group":
        owned = owned[: len(owned) // 2]
    optimizer = task.optimizer_of([one for one in owned if one.requires_grad], lr=lr, **more)
    if fault == "replaced-head":
        owner, name = task.head_at
        parent = owner.get_submodule(name.rpartition(".")[0])
        old = owner.get_submodule(name)
        setattr(parent, name.rpartition(".")[2], nn.Linear(old.in_features, old.out_features))
    schedule = None
    if fault == "lr-to-zero":
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.01)
    if fault == "oddity-cosine-restarts":
        schedule = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 50)
    if fault == "oddity-onecycle":
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3 * lr, total_steps=options.steps + 1)
    size = {"batch-norm-of-two": 2, "oddity-small-batch": 8}.get(fault, task.batch)
    loader = DataLoader(task.train, batch_size=size, shuffle=fault != "same-batch", drop_last=True)
    batches = iter(loader)
    parts = {"sum-not-mean": 64, "oddity-accumulate": 2}.get(fault, 1)
    step = 0
    model.eval() if fault == "eval-mode" else model.train()
    while step < options.steps:
        if fault != "no-zero-grad":
            optimizer.zero_grad()
        for _ in range(parts):
            if fault == "same-batch":
                batches = iter(loader)
            try:
                x, y = next(batches)
            except StopIteration:
                batches = iter(loader)
                x, y = next(batches)
            with torch.autocast("cpu", torch.bfloat16, enabled=fault == "oddity-amp"):
                loss = loss_of(task, model, x, y)
            if fault == "oddity-accumulate":
                loss = loss / parts
            if fault == "wrong-loss-graph":
                loss = loss.detach().requires_grad_()
            loss.backward()
        if fault in ("clip-tiny", "oddity-clip"):
            nn.utils.clip_grad_norm_(model.parameters(), 1e-6 if fault == "clip-tiny" else 1.0)
        if fault == "by-hand":
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.05 * parameter.grad
                    parameter.grad = None
        else:
            optimizer.step()
        if schedule is not None:
            schedule.step()
        step += 1
        if step % 50 == 0:
            if fault != "no-eval":
                model.eval()
            with torch.no_grad():
                held = sum(
                    loss_of(task, model, x, y).item() for x, y in DataLoader(task.test, batch_size=64)
                ) / math.ceil(len(task.test) / 64)
            if fault != "eval-mode":
                model.train()
            print(f"step {step}: loss {loss.item():.4f}, held out {held:.4f}", flush=True)


if __name__ == "__main__":
    main()
