"""Clean steps with infinite values that are meant, random layers, mixed precision: none may raise an alarm."""

import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.faults import Apply, Function, transformer


def trained(model, *args, loss=lambda y: y.float().square().mean(), **kwargs):
    return model, lambda: loss(model(*args, **kwargs)).backward()


def causal_mask():
    return transformer(lambda model, mask: mask)()


def additive_mask():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    mask = nn.Transformer.generate_square_subsequent_mask(5)
    return trained(layer, torch.randn(2, 5, 8), src_mask=mask, is_causal=True)


def padding_mask():
    layer = nn.MultiheadAttention(8, 2, batch_first=True)
    x = torch.randn(2, 5, 8)
    padding = torch.tensor([[False] * 5, [False, False, True, True, True]])
    return layer, lambda: layer(x, x, x, key_padding_mask=padding)[0].sum().backward()


def lowest_number_mask():
    def attend(x):
        lowest = torch.finfo(x.dtype).min
        scores = x @ x.T + torch.full((3, 3), lowest).triu(1) + torch.full((3, 3), lowest).triu(2)
        return F.softmax(scores, -1) @ x

    return trained(Apply(attend), torch.randn(3, 4))


def diagonal_left_out():
    def contrast(x):
        scores = x @ x.T
        scores.fill_diagonal_(-math.inf)
        return F.log_softmax(scores, -1).exp() @ x

    return trained(Apply(contrast), torch.randn(3, 4))


def written_mask():
    def mask(x):
        scores = x @ x.T
        scores[:, 0] = float("-inf")
        return F.softmax(scores, -1) @ x

    return trained(Apply(mask), torch.randn(3, 4))


def running_minimum():
    def least(x):
        best = torch.full((x.shape[0],), math.inf)
        for column in x.unbind(1):
            best = torch.minimum(best, column)
        return x - best[:, None]

    return trained(Apply(least), torch.randn(3, 4))


def memory_that_is_filled():
    def fill(x):
        out = torch.empty(x.shape)
        out.fill_(float("nan"))
        out.copy_(x)
        return out

    return trained(Apply(fill), torch.randn(3, 4))


def healed_with_a_double_where():
    def safe(x):
        is_good = x > 0
        return torch.where(is_good, torch.log(torch.where(is_good, x, torch.ones(()))), torch.zeros(()))

    return trained(Apply(safe), torch.randn(3, 4))


def healed_before_it_matters():
    def healed(x):
        ratio = x.detach() / (x.detach() * 0)
        return x * torch.nan_to_num(ratio, 0.0, 1.0, -1.0)

    return trained(Apply(healed), torch.randn(3, 4))


def logits_with_closed_classes():
    model = Apply(lambda x: x)
    allowed = torch.tensor([0.0, -math.inf])
    x = torch.randn(3, 4)
    return model, lambda: model(x) + allowed


def best_of_sampling():
    def filtered(x):
        kept = x.topk(2).values[:, -1:]
        return x.masked_fill(x < kept, -math.inf)

    model = nn.Sequential(nn.Linear(4, 4), Function(filtered))
    x = torch.randn(3, 4)
    return model, lambda: torch.multinomial(F.softmax(model(x), -1), 1)


def pooled_with_padding():
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.MaxPool2d(2, padding=1), nn.Dropout(0.5))
    return trained(net, torch.randn(2, 1, 9, 9))


def recurrent():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(3, 4, 2, dropout=0.3)
            self.gru = nn.GRU(4, 4)

        def forward(self, x):
            return self.gru(self.lstm(x)[0])[0]

    return trained(Net(), torch.randn(5, 2, 3))


def large_sums():
    return trained(
        Function(lambda x: (x * 1e36).clamp(max=3e38) * 0 + x), torch.full((4, 4), 300.0, requires_grad=True)
    )


def bfloat16_autocast():
    model, x = transformer(lambda model, mask: mask)()[0], torch.randint(0, 11, (2, 5))

    def step():
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x, torch.ones(5, 5, dtype=torch.bool).tril()).float().logsumexp(-1).mean()
        loss.backward()

    return model, step


def half_precision():
    net = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 2)).half()
    return trained(net, torch.randn(3, 4).half())


def overflow_that_the_scaler_skips():
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(net.parameters(), fused=False)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**126)
    x = torch.randn(3, 4) * 1000

    def step():
        loss = (net(x) * 100).square().sum()
        scaler.scale(loss * 1e-3).backward()
        scaler.step(optimizer)
        scaler.update()

    return net, step


def steady_scaler():
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu")
    x = torch.randn(3, 4)

    def step():
        scaler.scale(net(x).square().sum()).backward()
        scaler.step(optimizer)
        scaler.update()

    return net, step


def checkpointed_masks():
    model = transformer(lambda model, mask: mask)()[0]
    ids, mask = torch.randint(0, 11, (2, 5)), torch.ones(5, 5, dtype=torch.bool).tril()

    class Around(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, ids):
            x = model.embed(ids)
            for number, block in enumerate(model.blocks):
                x = checkpoint(block, x, mask, use_reentrant=bool(number))
            return model.head(x)

    return trained(Around(), ids)


def connectionist_loss():
    net = nn.Linear(4, 5)
    x, target = torch.randn(7, 2, 4), torch.randint(1, 5, (2, 3))

    def step():
        scores = F.log_softmax(net(x), -1)
        F.ctc_loss(scores, target, torch.tensor([7, 7]), torch.tensor([3, 3])).backward()

    return net, step


CLEAN = [
    causal_mask,
    additive_mask,
    padding_mask,
    lowest_number_mask,
    diagonal_left_out,
    written_mask,
    running_minimum,
    memory_that_is_filled,
    healed_with_a_double_where,
    healed_before_it_matters,
    logits_with_closed_classes,
    best_of_sampling,
    pooled_with_padding,
    recurrent,
    large_sums,
    bfloat16_autocast,
    half_precision,
    overflow_that_the_scaler_skips,
    steady_scaler,
    checkpointed_masks,
    connectionist_loss,
]
