"""The order of clearing, backward, clipping and stepping, and which tokens a model is asked for: told with the cause."""

import copy
import math
from collections import deque
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gaff
from gaff.views.run_text import reasons


def told(tmp_path, train, **options):
    """The findings of ``train``, watched at every step, by rule; and the record."""
    torch.manual_seed(0)
    with gaff.watch(out=tmp_path / "run", **{"every": 1, **options}):
        train()
    record = gaff.load(tmp_path / "run")
    return {one.rule: one for one in record.findings}, record


def net():
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))


def batches(count, rows=16):
    drawn = torch.Generator().manual_seed(1)
    for _ in range(count):
        x = torch.randn(rows, 8, generator=drawn)
        yield x, x[:, :3].argmax(1)


def cross_entropy(model, x, y):
    return getattr(F, "cross_entropy")(model(x), y)  # noqa: B009 (looked up while the watch is open)


@pytest.mark.parametrize("is_lost", [True, False])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_that_are_cleared_within_an_accumulation_are_told(tmp_path, is_lost, set_to_none):
    def train():
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for at, (x, y) in enumerate(batches(32)):
            if is_lost or at % 4 == 0:
                optimizer.zero_grad(set_to_none=set_to_none)
            (cross_entropy(model, x, y) / 4).backward()
            if at % 4 == 3:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()

    found, record = told(tmp_path, train)
    assert ("gradients_lost" in found) == is_lost
    if is_lost:
        assert found["gradients_lost"].evidence["lost"] == 3
        assert record.verdict.name == "gradients_lost"
        assert record.verdict.state in ("wrong", "not enough")
        assert "of 4 backward passes from" in record.verdict.cause


def perturbed(model, optimizer, x, y, *, by_data=False):
    """Sharpness-aware: a step up, a second pass from there, the same line for both; by ``.data`` past torch's count."""
    weights = [one.detach().clone() for one in model.parameters()]
    for number in range(2):
        optimizer.zero_grad()
        cross_entropy(model, x, y).backward()
        with torch.no_grad():
            for one in model.parameters() if number == 0 else ():
                (one.data if by_data else one).add_(0.05 * one.grad)
    with torch.no_grad():
        for one, known in zip(model.parameters(), weights, strict=True):
            (one.data if by_data else one).copy_(known)
    optimizer.step()


def put_together(model, optimizer, x, y, *, in_place=False):
    """One pass for each half of a batch, whose gradients are limited and added up by hand."""
    whole = [torch.zeros_like(one) for one in model.parameters()]
    for part in range(2):
        optimizer.zero_grad()
        cross_entropy(model, x[part::2], y[part::2]).backward()
        for total, one in zip(whole, model.parameters(), strict=True):
            total += one.grad.clamp(-0.1, 0.1)
    for total, one in zip(whole, model.parameters(), strict=True):
        if in_place:
            one.grad.copy_(total)
        else:
            one.grad = total
    optimizer.step()


def attacked(model, optimizer, x, y):
    """Examples moved by several passes of their own, then one pass that counts."""
    moved = x.clone().requires_grad_()
    for _ in range(3):
        model.zero_grad()
        cross_entropy(model, moved, y).backward()
        moved = (moved + 0.01 * moved.grad.sign()).detach().requires_grad_()
    optimizer.zero_grad()
    loss = cross_entropy(model, moved.detach(), y)
    loss.backward()
    optimizer.step()


@pytest.mark.parametrize(
    "step",
    [perturbed, partial(perturbed, by_data=True), put_together, partial(put_together, in_place=True), attacked],
    ids=["perturbed", "by data", "put together", "in place", "attacked"],
)
def test_passes_that_are_used_otherwise_are_not_lost(tmp_path, step):
    def train():
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for x, y in batches(10):
            step(model, optimizer, x, y)

    assert "gradients_lost" not in told(tmp_path, train)[0]


@pytest.mark.parametrize("when", ["before backward", "after step", "between"])
def test_clipping_at_the_wrong_moment_is_told(tmp_path, when):
    def train():
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for x, y in batches(10):
            optimizer.zero_grad()
            loss = cross_entropy(model, x, y)
            if when == "before backward":
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            loss.backward()
            if when == "between":
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if when == "after step":
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    assert ("clipped_too_early" in told(tmp_path, train)[0]) == (when != "between")


@pytest.mark.parametrize(("kind", "is_anew"), [("Adam", True), ("Adam", False), ("SGD", True)])
def test_an_optimizer_that_is_made_in_each_step_is_told_where_it_averages(tmp_path, kind, is_anew):
    def train():
        model = net()
        optimizer = getattr(torch.optim, kind)(model.parameters(), 0.01)
        for x, y in batches(12):
            if is_anew:
                optimizer = getattr(torch.optim, kind)(model.parameters(), 0.01)
            optimizer.zero_grad()
            loss = cross_entropy(model, x, y)
            loss.backward()
            optimizer.step()

    assert ("optimizer_made_anew" in told(tmp_path, train)[0]) == (kind == "Adam" and is_anew)


class Reader(nn.Module):
    """One layer of attention over tokens; ``mask``: what is given to torch's attention."""

    def __init__(self, mask):
        super().__init__()
        self.embed, self.place, self.head = nn.Embedding(12, 16), nn.Embedding(9, 16), nn.Linear(16, 12)
        self.mask = mask

    def forward(self, tokens):
        x = self.embed(tokens) + self.place(torch.arange(tokens.shape[1]))
        given = self.mask(tokens.shape[1])
        attend = getattr(F, "scaled_dot_product_attention")  # noqa: B009
        return self.head(x + attend(x, x, x, **given))


MASKS = {
    "none": (lambda n: {}, True),
    "turned around": (lambda n: {"attn_mask": torch.ones(n, n, dtype=torch.bool).triu()}, True),
    "of padding": (lambda n: {"attn_mask": torch.zeros(1, n)}, True),
    "causal": (lambda n: {"is_causal": True}, False),
    "causal, as numbers": (lambda n: {"attn_mask": torch.full((n, n), -1e9).triu(1)}, False),
}


class ByHand(nn.Module):
    """The same by hand in two heads, with a dropout of the weights, whose random numbers tell sequences apart."""

    def __init__(self, *, is_causal):
        super().__init__()
        self.embed, self.place, self.head = nn.Embedding(12, 16), nn.Embedding(9, 16), nn.Linear(16, 12)
        self.query, self.is_causal = nn.Linear(16, 16), is_causal

    def forward(self, tokens):
        x = self.embed(tokens) + self.place(torch.arange(tokens.shape[1]))
        keys, queries = (one.unflatten(-1, (2, 8)).transpose(1, 2) for one in (x, self.query(x)))
        scores = queries @ keys.transpose(-2, -1)
        if self.is_causal:
            scores = scores.masked_fill(torch.ones(9, 9).triu(1) == 1, -torch.inf)
        seen = F.dropout(scores.softmax(-1), 0.1) @ keys
        return self.head(x + seen.transpose(1, 2).flatten(2))


def read(model, shift, **layout):
    optimizer = torch.optim.Adam(model.parameters(), 0.05)
    drawn = torch.Generator().manual_seed(1)
    for _ in range(40):
        tokens = (
            torch.randint(0, 12, (24, 1), generator=drawn) + torch.randint(1, 3, (24, 10), generator=drawn).cumsum(1)
        ) % 12
        x, y = tokens[:, :9], tokens[:, shift : 9 + shift]
        logits = model(x)
        loss = getattr(F, "cross_entropy")(logits.flatten(0, 1), y.flatten())  # noqa: B009
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@pytest.mark.slow
@pytest.mark.parametrize("name", MASKS)
def test_attention_that_sees_the_next_token_is_told(tmp_path, name):
    mask, is_told = MASKS[name]
    found, record = told(tmp_path, lambda: read(Reader(mask), 1))
    assert ("sees_the_future" in found) == is_told
    assert (record.verdict.name == "sees_the_future") == is_told


@pytest.mark.parametrize(("shifts", "is_told"), [((1,), False), ((2,), True), ((1, 2), False)])
def test_targets_that_are_shifted_twice_are_told(tmp_path, shifts, is_told):
    """Not of a model that tells several tokens to come."""
    model = Reader(MASKS["causal"][0])
    optimizer = torch.optim.Adam(model.parameters(), 0.01)

    def train():
        for _ in range(40):
            tokens = torch.randint(0, 12, (24, 9))
            logits, loss = model(tokens), 0.0
            for shift in shifts:
                labels = torch.cat([tokens[:, shift:], torch.full((24, shift), -100)], 1)
                loss = loss + getattr(F, "cross_entropy")(logits.flatten(0, 1), labels.flatten())  # noqa: B009
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    found, record = told(tmp_path, train)
    assert ("targets_skip_a_token" in found) == is_told
    assert (record.verdict.name == "targets_skip_a_token") == is_told


@pytest.mark.slow
@pytest.mark.parametrize("is_shifted", [False, True])
def test_labels_of_transformers_that_are_shifted_by_hand_are_told(tmp_path, is_shifted):
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(vocab_size=40, n_positions=16, n_embd=16, n_layer=1, n_head=2))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)

    def train():
        for _ in range(40):
            tokens = torch.randint(0, 40, (8, 13))
            given = {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]} if is_shifted else \
                    {"input_ids": tokens, "labels": tokens}  # fmt: skip
            model(**given).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    assert ("targets_skip_a_token" in told(tmp_path, train)[0]) == is_shifted


@pytest.mark.slow
@pytest.mark.parametrize("way", ["copied", "padded", "shifted"])
def test_targets_that_are_not_shifted_are_told_under_dropout(tmp_path, way):
    from transformers import GPT2Config, GPT2LMHeadModel

    def train():
        model = GPT2LMHeadModel(GPT2Config(vocab_size=24, n_positions=16, n_embd=32, n_layer=1, n_head=2))
        optimizer = torch.optim.AdamW(model.parameters(), 5e-3)
        for _ in range(30):
            tokens = torch.arange(17) * torch.randint(1, 4, (16, 1)) % 20
            length = torch.randint(8, 17, (16, 1)) if way == "padded" else 16
            mask = (torch.arange(16) < length).long().expand(16, 16)
            targets = tokens[:, 1:] if way == "shifted" else tokens[:, :16].masked_fill(mask == 0, -100)
            scores = model(tokens[:, :16].masked_fill(mask == 0, 23), attention_mask=mask).logits
            F.cross_entropy(scores.flatten(0, 1), targets.flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()

    assert ("targets_are_inputs" in told(tmp_path, train)[0]) is (way != "shifted")


@pytest.mark.slow
@pytest.mark.parametrize("is_given", [True, False])
def test_a_decoder_that_is_given_its_own_targets_is_told(tmp_path, is_given):
    from transformers import T5Config, T5ForConditionalGeneration

    def train():
        sizes = {"vocab_size": 24, "d_model": 32, "d_ff": 64, "d_kv": 16, "num_layers": 1, "num_heads": 2}
        model = T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0, dropout_rate=0.0))
        optimizer = torch.optim.AdamW(model.parameters(), 5e-3)
        for _ in range(60):
            source = torch.randint(2, 24, (32, 12))
            targets = source.flip(1)[:, :8].contiguous()
            more = {"decoder_input_ids": targets} if is_given else {}
            model(input_ids=source, labels=targets, **more).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    assert ("targets_are_inputs" in told(tmp_path, train)[0]) is is_given


@pytest.mark.parametrize("is_causal", [True, False])
def test_attention_by_hand_that_sees_the_next_token_is_told_also_beside_dropout(tmp_path, is_causal):
    found, record = told(tmp_path, lambda: read(ByHand(is_causal=is_causal), 1))
    assert ("sees_the_future" in found) == (not is_causal)
    assert (record.verdict.name == "sees_the_future") == (not is_causal)


@pytest.mark.parametrize("is_causal", [True, False])
def test_targets_that_are_given_to_the_model_do_not_keep_its_sequences_from_being_compared(tmp_path, is_causal):
    def train():
        model = Summing(is_causal=is_causal)
        model.forward = lambda tokens, targets: Summing.forward(model, tokens)
        optimizer = torch.optim.Adam(model.parameters(), 0.05)
        drawn = torch.Generator().manual_seed(1)
        for _ in range(40):
            tokens = (
                torch.randint(0, 12, (24, 1), generator=drawn) + torch.arange(10) * torch.randint(1, 3, (24, 1))
            ) % 12
            logits = model(tokens[:, :9], tokens[:, 1:])
            loss = getattr(F, "cross_entropy")(logits.flatten(0, 1), tokens[:, 1:].flatten())  # noqa: B009
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    assert ("sees_the_future" in told(tmp_path, train)[0]) == (not is_causal)


def test_targets_that_are_not_shifted_are_told(tmp_path):
    found, _ = told(tmp_path, lambda: read(Reader(MASKS["causal"][0]), 0))
    assert "targets_are_inputs" in found
    assert "sees_the_future" not in found


@pytest.mark.parametrize("fault", ["all ignored", "a NaN"])
def test_targets_that_make_a_loss_not_finite_are_told(tmp_path, fault):
    def train():
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for at, (x, y) in enumerate(batches(8)):
            if fault == "all ignored":
                loss = cross_entropy(model, x, torch.full_like(y, -100) if at == 5 else y)
            else:
                target = x[:, :3].clone()
                target[2, 1] = torch.nan if at == 5 else 0.0
                loss = getattr(F, "mse_loss")(model(x), target)  # noqa: B009
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    found, _ = told(tmp_path, train)
    told_of = (
        "all 16 targets of the cross entropy are -100" if fault == "all ignored" else "1 of 48 targets are not finite"
    )
    assert told_of in found["nonfinite"].message
    assert found["nonfinite"].since == 5


class Summing(nn.Module):
    """Means over tokens by hand: over those before each position, or over all of them."""

    def __init__(self, *, is_causal, keeps=0.0):
        super().__init__()
        self.embed, self.mix, self.drop, self.head = (
            nn.Embedding(12, 16),
            nn.Linear(16, 16),
            nn.Dropout(keeps),
            nn.Linear(16, 12),
        )
        self.is_causal = is_causal

    def forward(self, tokens):
        x = self.drop(self.embed(tokens))
        count = torch.arange(1, x.shape[1] + 1)[:, None]
        seen = x.cumsum(1) / count if self.is_causal else x.mean(1, keepdim=True)
        return self.head(x + self.mix(seen))


class Stateful(nn.Module):
    """Goes on where it was: its first position depends on tokens of the batch before, and on none that come later."""

    def __init__(self):
        super().__init__()
        self.embed, self.cell, self.head = nn.Embedding(12, 16), nn.GRU(16, 16, batch_first=True), nn.Linear(16, 12)
        self.state = None

    def forward(self, tokens):
        out, state = self.cell(self.embed(tokens), self.state)
        self.state = state.detach()
        return self.head(out)


class BothWays(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.cell = nn.Embedding(12, 16), nn.GRU(16, 8, batch_first=True, bidirectional=True)
        self.head = nn.Linear(16, 12)

    def forward(self, tokens):
        return self.head(self.cell(self.embed(tokens))[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "is_told"),
    [
        (lambda: Summing(is_causal=False), True),
        (BothWays, True),
        (lambda: Summing(is_causal=True), False),
        (Stateful, False),
        (lambda: Summing(is_causal=True, keeps=0.5), False),
    ],
    ids=["mean of all", "both ways", "causal", "stateful", "dropout"],
)
def test_what_depends_on_later_tokens_is_told_by_sequences_that_begin_alike(tmp_path, model, is_told):
    found, record = told(tmp_path, lambda: read(model(), 1))
    assert ("sees_the_future" in found) == is_told
    assert (record.verdict.name == "sees_the_future") == is_told


@pytest.mark.slow
@pytest.mark.parametrize("ignored", [0, 5])
@pytest.mark.parametrize("parts", [1, 2])
def test_a_sum_that_is_divided_by_its_targets_is_known_for_the_mean_that_it_is(tmp_path, ignored, parts):
    """As transformers' Trainer has it, whose labels do not belong to their inputs."""

    def train():
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        drawn = torch.Generator().manual_seed(2)
        for _ in range(110):
            optimizer.zero_grad()
            for _ in range(parts):
                x, y = torch.randn(64, 8, generator=drawn), torch.randint(0, 3, (64,), generator=drawn)
                y[:ignored] = -100
                summed = getattr(F, "cross_entropy")(model(x), y, reduction="sum")  # noqa: B009
                (summed / torch.tensor(float(parts * (64 - ignored)))).backward()
            optimizer.step()

    _, record = told(tmp_path, train)
    looks = [one for _, one in record.events("look") if "guess" in one]
    assert looks[-1]["guess"] == pytest.approx(math.log(3) / parts, abs=0.05)
    assert record.verdict.name == "labels_do_not_belong"


def by_a_helper(model, optimizer, x, y):
    """A second model judges; one function steps both, and the first's pass leaves gradients in the judge."""
    judge, judging = model.judge, model.judging

    def update(one, loss):
        one.zero_grad()
        loss.backward()
        one.step()

    made = model(x)
    update(judging, F.softplus(judge(x[:, :3])).mean() + F.softplus(-judge(made.detach())).mean())
    update(optimizer, F.softplus(judge(made)).mean())


def test_what_a_pass_leaves_in_another_model_is_not_lost(tmp_path):
    def train():
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        judge = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
        object.__setattr__(model, "judge", judge)
        object.__setattr__(model, "judging", torch.optim.SGD(judge.parameters(), 0.05))
        for x, y in batches(10):
            by_a_helper(model, optimizer, x, y)

    assert "gradients_lost" not in told(tmp_path, train)[0]


def test_a_norm_that_is_only_read_is_no_clipping(tmp_path):
    def train():
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for x, y in batches(10):
            optimizer.zero_grad()
            loss = cross_entropy(model, x, y)
            loss.backward()
            optimizer.step()
            nn.utils.clip_grad_norm_(model.parameters(), math.inf)

    assert "clipped_too_early" not in told(tmp_path, train)[0]


class Translating(nn.Module):
    """torch's own transformer from one sequence to another; ``is_causal``: whether its decoder is given a mask."""

    def __init__(self, *, is_causal):
        super().__init__()
        self.embed, self.head = nn.Embedding(12, 16), nn.Linear(16, 12)
        self.body = nn.Transformer(16, 2, 1, 1, 32, dropout=0.0, batch_first=True)
        self.is_causal = is_causal

    def forward(self, source, target):
        size = target.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(size) if self.is_causal else None
        return self.head(self.body(self.embed(source), self.embed(target), tgt_mask=mask))


@pytest.mark.slow
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("length", [7, 10])
def test_a_decoder_without_a_mask_is_told(tmp_path, is_causal, length):
    def train():
        model = Translating(is_causal=is_causal)
        optimizer = torch.optim.Adam(model.parameters(), 0.01)
        drawn = torch.Generator().manual_seed(1)
        for _ in range(12):
            source = torch.randint(0, 12, (8, length), generator=drawn)
            made = torch.randint(0, 12, (8, 10), generator=drawn)
            logits = model(source, made[:, :-1])
            loss = getattr(F, "cross_entropy")(logits.flatten(0, 1), made[:, 1:].flatten())  # noqa: B009
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    found = told(tmp_path, train)[0]
    assert ("sees_the_future" in found) == (not is_causal)


def test_a_rate_that_comes_back_from_zero_is_not_gone(tmp_path):
    """Looks that fall on the zeros of a cycle alone."""

    def train():
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)
        for x, y in batches(120):
            optimizer.zero_grad()
            loss = cross_entropy(model, x, y)
            loss.backward()
            optimizer.step()
            schedule.step()

    torch.manual_seed(0)
    with gaff.watch(out=tmp_path / "run", every=5):
        train()
    record = gaff.load(tmp_path / "run")
    assert "lr_zero" in {one.rule for one in record.findings}
    assert record.verdict.state == "healthy"


def steps_with(loss_of, count=24, *, model=None, step=None, rate=0.01, **options):
    """A program of ``count`` steps of SGD; ``step(optimizer, scaler)`` makes one."""

    def train():
        mine = net() if model is None else model()
        optimizer = torch.optim.SGD(mine.parameters(), rate, **options)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        for x, y in batches(count):
            optimizer.zero_grad()
            loss_of(mine, x, y, scaler).backward()
            (step or (lambda one, _: one.step()))(optimizer, scaler)

    return train


def plain_loss(model, x, y, _):
    return cross_entropy(model, x, y)


def scaled_loss(model, x, y, scaler):
    return scaler.scale(cross_entropy(model, x, y))


def by_the_scaler(optimizer, scaler):
    scaler.step(optimizer)
    scaler.update()


def unscaled_by_hand(optimizer, scaler):
    for group in optimizer.param_groups:
        for one in group["params"]:
            one.grad.div_(scaler.get_scale())
    optimizer.step()


def unscaled_first(optimizer, scaler):
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 1.0)
    by_the_scaler(optimizer, scaler)


def test_steps_with_gradients_that_a_scaler_has_multiplied_are_told(tmp_path):
    found, record = told(tmp_path, steps_with(scaled_loss, step=lambda one, _: one.step()))
    assert found["stepped_while_scaled"].evidence["factor"] == 64
    assert record.verdict.name == "stepped_while_scaled"
    assert "gradients that are 64 times too large" in record.verdict.cause


@pytest.mark.parametrize("step", [by_the_scaler, unscaled_by_hand, unscaled_first])
def test_steps_of_a_scaler_are_in_order(tmp_path, step):
    found, _ = told(tmp_path, steps_with(scaled_loss, step=step))
    assert "stepped_while_scaled" not in found
    assert "divided_for_nothing" not in found


def scaled_aside(model, x, y, scaler):
    loss = cross_entropy(model, x, y)
    scaler.scale(loss)
    return loss


def scaled_in_part(model, x, y, scaler):
    """Two passes, of which the second begins at what nobody has multiplied."""
    scaler.scale(cross_entropy(model, x, y)).backward()
    return 1e-3 * sum(one.square().sum() for one in model.parameters())


@pytest.mark.parametrize("loss_of", [scaled_aside, scaled_in_part])
@pytest.mark.parametrize("step", [by_the_scaler, unscaled_first])
def test_gradients_that_a_scaler_divides_and_has_not_multiplied_are_told(tmp_path, loss_of, step):
    found, record = told(tmp_path, steps_with(loss_of, step=step))
    assert found["divided_for_nothing"].evidence["factor"] == 64
    assert "are 64 times too small" in found["divided_for_nothing"].message
    assert record.verdict.name == "divided_for_nothing"


@pytest.mark.parametrize("loss_of", [scaled_aside, scaled_loss])
def test_a_fused_step_divides_by_itself(tmp_path, loss_of):
    found, _ = told(tmp_path, steps_with(loss_of, step=by_the_scaler, fused=True))
    assert ("divided_for_nothing" in found) == (loss_of is scaled_aside)


def test_gradients_that_are_divided_by_halves_of_scaled_losses_are_in_order(tmp_path):
    def halves(model, x, y, scaler):
        scaler.scale(cross_entropy(model, x, y) / 2).backward()
        return sum([scaler.scale(cross_entropy(model, x, y) / 4)] * 2)

    found, _ = told(tmp_path, steps_with(halves, step=by_the_scaler))
    assert "divided_for_nothing" not in found


def test_a_second_step_with_the_same_gradients_is_told(tmp_path):
    def twice(optimizer, _):
        optimizer.step()
        optimizer.step()

    found, record = told(tmp_path, steps_with(plain_loss, step=twice))
    assert record.verdict.name == "stepped_again"
    assert "not_cleared" not in found


def test_a_second_step_with_gradients_made_by_hand_is_none(tmp_path):
    def twice(optimizer, _):
        optimizer.step()
        for one in optimizer.param_groups[0]["params"]:
            one.grad = torch.zeros_like(one)  # of a random direction, in evolution strategies
        optimizer.step()

    assert "stepped_again" not in told(tmp_path, steps_with(plain_loss, step=twice))[0]


@pytest.mark.parametrize("is_one", [True, False])
def test_a_cross_entropy_over_one_class_is_told(tmp_path, is_one):
    def loss(model, x, y, _):
        scores = model(x)[:, :1] if is_one else model(x)
        return getattr(F, "cross_entropy")(scores, y.float().gt(1).float()[:, None] if is_one else y)  # noqa: B009

    found, record = told(tmp_path, steps_with(loss))
    assert ("one_class" in found) == is_one
    if is_one:
        assert record.verdict.name == "one_class"
        assert "scores of shape [16, 1], of one class" in record.verdict.cause


@pytest.mark.parametrize(("top", "is_told"), [(1.0, True), (2.0, True), (12.0, False), (-12.0, True)])
def test_a_range_of_outputs_that_ends_before_the_targets_is_told(tmp_path, top, is_told):
    """Such as fastai's y_range: a sigmoid times the largest value that there is."""

    def loss(model, x, y, _):
        return F.mse_loss(model(x)[:, 0].sigmoid() * top, 8 + x[:, 0].sin())

    found, record = told(tmp_path, steps_with(loss))
    assert ("bounded_output" in found) == is_told, record.verdict


@pytest.mark.parametrize("given", ["softmax", "scores", "log_softmax", "log_density", "one another"])
def test_a_kl_divergence_of_probabilities_is_told(tmp_path, given):
    """A density on a grid may be above one, and is no probability: its targets do not add up to one."""

    def loss(model, x, y, _):
        scores, targets = model(x), F.one_hot(y, 3).float()
        if given == "log_density":
            return getattr(F, "kl_div")(scores.log_softmax(-1) + 3, 20 * targets, reduction="batchmean")  # noqa: B009
        if given == "one another":  # two passes that teach each other, as in R-Drop
            return plain_loss(model, x, y, 0) + F.kl_div(scores.softmax(-1), model(-x).softmax(-1), reduction="sum")
        mine = scores if given == "scores" else getattr(scores, given)(-1)
        return getattr(F, "kl_div")(mine, targets, reduction="batchmean")  # noqa: B009

    found, record = told(tmp_path, steps_with(loss))
    assert ("kl_of_probabilities" in found) == (given in ("softmax", "scores", "one another"))
    if given in ("softmax", "scores"):
        assert record.verdict.name == "kl_of_probabilities"
    assert "multiplied by" not in str(record.verdict)


class MadeAnew(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind, self.first, self.last = kind, nn.Linear(8, 16), nn.Linear(16, 3)
        self.kept = nn.Linear(16, 16)

    def forward(self, x):
        hidden = self.first(x)
        if self.kind == "linear":
            hidden = nn.Linear(16, 16)(hidden)
        elif self.kind == "norm":
            hidden = nn.LayerNorm(16)(hidden)
        elif self.kind == "without grad":
            with torch.no_grad():
                hidden = hidden + nn.Linear(16, 16)(hidden)
        else:
            hidden = self.kept(hidden)
        return self.last(hidden.tanh())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["linear", "norm", "without grad", "kept"])
def test_a_layer_that_is_made_in_each_forward_is_told(tmp_path, kind):
    found, record = told(tmp_path, steps_with(plain_loss, model=lambda: MadeAnew(kind)))
    assert ("made_in_forward" in found) == (kind == "linear")
    if kind == "linear":
        assert record.verdict.name == "made_in_forward"
        assert "a Linear is made anew in each forward of" in record.verdict.cause


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["prefix", "norms", "twice", "whole", "head anew", "later by a part"])
def test_a_file_that_matches_no_name_is_told(tmp_path, kind):
    def model():
        mine, state = net(), net().state_dict()
        if kind == "norms":  # torch itself adds how many batches such a one has seen
            mine = nn.Sequential(mine[0], nn.BatchNorm1d(mine[0].out_features), *mine[1:])
            state = copy.deepcopy(mine.state_dict())
        prefixed = {f"module.{name}": one for name, one in state.items()}
        if kind == "head anew":
            prefixed = {name: one for name, one in state.items() if name.startswith("0.")} | {
                "fc.weight": torch.ones(1)
            }
        if kind != "whole":
            mine.load_state_dict(prefixed, strict=False)
        if kind in ("twice", "whole"):
            mine.load_state_dict(state)
        if kind == "later by a part":
            mine[0].load_state_dict({"weight": state["0.weight"], "bias": state["0.bias"]})
            mine[2].load_state_dict({"weight": state["2.weight"], "bias": state["2.bias"]})
        return mine

    found, record = told(tmp_path, steps_with(plain_loss, model=model))
    assert ("nothing_loaded" in found) == (kind in ("prefix", "norms"))
    if kind in ("prefix", "norms"):
        assert record.verdict.name == "nothing_loaded"
        assert "'0.weight' is missing, and 'module.0.weight' was given" in record.verdict.cause


@pytest.mark.parametrize("is_reset", [True, False])
def test_an_optimizer_made_for_weights_that_are_reset_is_meant(tmp_path, is_reset):
    def train():
        model = net()
        state = {name: one.clone() for name, one in model.state_dict().items()}
        for x, y in batches(24):
            if is_reset:
                model.load_state_dict(state)
            optimizer = torch.optim.Adam(model.parameters(), 0.01)
            cross_entropy(model, x, y).backward()
            optimizer.step()
            model.zero_grad()

    assert ("optimizer_made_anew" in told(tmp_path, train)[0]) != is_reset


def copied_by_hand(model, x, y, _):
    """Gradients that are written over those of the step before, and not added to them."""
    found = torch.autograd.grad(cross_entropy(model, x, y), list(model.parameters()))
    for one, gradient in zip(model.parameters(), found, strict=True):
        one.grad = torch.empty_like(one) if one.grad is None else one.grad
        one.grad.copy_(gradient)


def healthy_programs():  # noqa: C901  # a list of them
    """By name, what trains well in an unusual way: nothing is to be told of it."""

    def overwritten():
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for x, y in batches(40):
            copied_by_hand(model, x, y, None)
            optimizer.step()

    def cleared_in_the_closure():
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for x, y in batches(40):

            def closure(x=x, y=y):
                optimizer.zero_grad()
                loss = cross_entropy(model, x, y)
                loss.backward()
                return loss

            optimizer.step(closure)
            optimizer.zero_grad()

    def one_of_two_losses_is_scaled():
        first, second = net(), net()
        ours, theirs = (torch.optim.SGD(one.parameters(), 0.1) for one in (first, second))
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        for x, y in batches(40):
            ours.zero_grad()
            theirs.zero_grad()
            scaler.scale(cross_entropy(first, x, y)).backward()
            cross_entropy(second, x, y).backward()
            theirs.step()
            scaler.step(ours)
            scaler.update()

    def both_ways_of_pairs():
        model = nn.Linear(8, 8)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for x, _ in batches(40):
            scores = (model(x) @ x.T) / 4
            target = torch.arange(len(x))
            one = F.nll_loss(scores.log_softmax(0).T, target)
            optimizer.zero_grad()
            one.backward()
            optimizer.step()

    def a_copy_in_forward():
        class Stopped(nn.Module):
            def __init__(self):
                super().__init__()
                self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 3)

            def forward(self, x):
                return copy.deepcopy(self.last)(self.first(x).tanh()) * 0.1 + self.last(self.first(x).tanh())

        steps_with(plain_loss, 40, model=Stopped, rate=0.1)()

    def fixed_filters():
        class Blurred(nn.Module):
            def __init__(self):
                super().__init__()
                self.last = nn.Linear(8, 3)

            def forward(self, x):
                blur = nn.Linear(8, 8, bias=False).requires_grad_(requires_grad=False)
                return self.last(x + 0.01 * blur(x))

        steps_with(plain_loss, 40, model=Blurred, rate=0.1)()

    def statistics_alone_are_loaded():
        model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 3))
        state = {name: one for name, one in model.state_dict().items() if "running" in name}
        model.load_state_dict({**state, "more": torch.ones(1)}, strict=False)
        steps_with(plain_loss, 40, model=lambda: model)()

    def filled_by_hand():
        model = net()
        state = {f"module.{name}": one.clone() + 0.1 for name, one in model.state_dict().items()}
        model.load_state_dict(state, strict=False)
        with torch.no_grad():
            for name, one in model.named_parameters():
                one.copy_(state[f"module.{name}"])
        steps_with(plain_loss, 40, model=lambda: model)()

    maximised = steps_with(lambda *given: -plain_loss(*given), 40, rate=0.1, maximize=True)
    return {name: one for name, one in locals().items() if callable(one)}


@pytest.mark.slow
@pytest.mark.parametrize("name", healthy_programs())
def test_unusual_programs_that_train_are_healthy(tmp_path, name):
    found, record = told(tmp_path, healthy_programs()[name])
    assert not [rule for rule, one in found.items() if one.severity in ("error", "warning")]
    assert record.verdict.state == "healthy"


def test_an_optimizer_that_raises_the_loss_is_told(tmp_path):
    found, record = told(tmp_path, steps_with(plain_loss, 30, maximize=True))
    assert "loss_sign" in found
    assert record.verdict.name == "loss_sign"
    assert "maximize=True" in record.verdict.cause


@pytest.mark.slow
@pytest.mark.parametrize("is_named", [True, False])
def test_a_scaled_loss_is_judged_without_its_factor(tmp_path, is_named):
    """Also where it is scaled in one line, and nobody holds the loss itself."""

    def train():
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
        drawn = torch.Generator().manual_seed(2)
        for x, _ in batches(60):
            y = torch.randint(0, 3, (len(x),), generator=drawn)
            optimizer.zero_grad()
            if is_named:
                loss = cross_entropy(model, x, y)
                scaler.scale(loss).backward()
            else:
                scaler.scale(cross_entropy(model, x, y)).backward()
            by_the_scaler(optimizer, scaler)

    told(tmp_path, train)
    text = str(gaff.load(tmp_path / "run").verdict)
    assert "multiplied by" not in text
    assert "guessing" in text


@pytest.mark.parametrize("what", ["a part of the batch", "the same batch", "one of its losses"])
def test_gradients_that_are_only_measured_are_not_lost(tmp_path, what):
    """For the noise scale, the norm of a part of the loss and the like: by one line, which clears them before."""

    def measured(model, optimizer, loss):
        optimizer.zero_grad()
        loss.backward(retain_graph=True)
        return sum(float(one.grad.norm()) for one in model.parameters())

    def train():
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for x, y in batches(20):
            if what == "one of its losses":
                loss = cross_entropy(model, x, y)
                measured(model, optimizer, 0.1 * loss)
            else:
                rows = 8 if what == "a part of the batch" else 16
                measured(model, optimizer, cross_entropy(model, x[:rows].clone(), y[:rows]))
                loss = cross_entropy(model, x, y)
            measured(model, optimizer, loss)
            optimizer.step()

    assert "gradients_lost" not in told(tmp_path, train)[0]


@pytest.mark.parametrize("is_copied", [True, False])
def test_copies_of_what_an_optimizer_owns_are_stepped_by_hand(tmp_path, is_copied):
    def train():
        model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 3)).bfloat16()
        masters = [one.detach().float().requires_grad_() for one in model.parameters()]
        optimizer = torch.optim.SGD(masters, 0.1)
        for x, y in batches(20):
            cross_entropy(model, x.bfloat16(), y).backward()
            for one, master in zip(model.parameters(), masters, strict=True):
                master.grad = one.grad.float()
            optimizer.step()
            for one, master in zip(model.parameters(), masters, strict=True):
                one.grad = None
                if is_copied:
                    one.data.copy_(master.data)

    assert ("not_owned" in told(tmp_path, train)[0]) is not is_copied


@pytest.mark.parametrize("way", ["copied", "averaged", "left"])
def test_a_net_into_which_another_is_copied_is_not_told_as_untrained(tmp_path, way):
    """The target of a critic, without ``detach``: it gets gradients that nobody uses."""

    def train():
        critic, target = (nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1)) for _ in range(2))
        if way != "left":
            target.load_state_dict(critic.state_dict())
        optimizer = torch.optim.Adam(critic.parameters(), 1e-3)
        for step, (x, y) in enumerate(batches(40)):
            wanted = y[:, None].float() + 0.9 * target(x.flip(0))
            loss = (critic(x) - wanted).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if way == "copied" and step % 8 == 7:
                target.load_state_dict(critic.state_dict())
            if way == "averaged":
                for one, other in zip(target.parameters(), critic.parameters(), strict=True):
                    one.data.copy_(0.99 * one.data + 0.01 * other.data)

    assert ("not_owned" in told(tmp_path, train)[0]) is (way == "left")


@pytest.mark.parametrize("way", ["forgotten", "stepped by hand", "in the optimizer", "a parameter", "made anew"])
def test_a_weight_that_is_no_parameter_is_told(tmp_path, way):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(8)) if way == "a parameter" else torch.ones(8, requires_grad=True)

        def forward(self, x):
            return x * self.scale

    def train():
        model = nn.Sequential(Scaled(), net())
        more = [model[0].scale] if way == "in the optimizer" else []
        optimizer = torch.optim.SGD([*model.parameters(), *more], 0.1)
        for x, y in batches(30):
            optimizer.zero_grad()
            model[0].scale.grad = None
            cross_entropy(model, x, y).backward()
            optimizer.step()
            if way == "stepped by hand":
                model[0].scale.data -= 0.1 * model[0].scale.grad
            if way == "made anew":  # as an input whose gradient is asked for, or fast weights
                model[0].scale = torch.rand(8, requires_grad=True)

    found, _ = told(tmp_path, train)
    assert ("not_owned" in found) is (way == "forgotten")
    if way == "forgotten":
        assert found["not_owned"].message.startswith("0.scale is a tensor and no nn.Parameter")


def test_a_loss_that_is_faded_in_is_judged_without_its_factor(tmp_path):
    def train():
        model = net()
        optimizer = torch.optim.Adam(model.parameters(), 3e-3)
        for at, (x, y) in enumerate(batches(120, rows=64)):
            optimizer.zero_grad()
            loss = min(1.0, (at + 1) / 100) * cross_entropy(model, x, y)
            loss.backward()
            optimizer.step()

    found, record = told(tmp_path, train)
    values = record.scalar("loss").values
    assert values[-1] > 3 * values[0]
    assert not found, found
    assert record.verdict.state == "healthy"


@pytest.mark.parametrize(
    ("what", "told_as"),
    [
        ("log", "between the model and its loss, log is given 0 or less at 16 of 16 elements"),
        ("division", "between the model and its loss, a division is by 0 at 1 of 1 elements"),
        ("root", "between the model and its loss, sqrt returns 0, where its slope is infinite, at 1 of 1 elements"),
        ("power", "between the model and its loss, pow is given 0, where its slope is infinite, at 48 of 48 elements"),
    ],
)
def test_an_op_of_the_loss_that_makes_a_nan_is_named(tmp_path, what, told_as):
    """Its forward or its gradient is not finite, and every op of the model is fine."""
    makers = {
        "log": lambda scores, y: -torch.log(torch.softmax(scores, 1)[torch.arange(16), y] * 0).mean(),
        "division": lambda scores, y: cross_entropy(nn.Identity(), scores, y) / (scores - scores).sum(),
        "root": lambda scores, y: cross_entropy(nn.Identity(), scores, y) + (scores - scores).pow(2).mean().sqrt(),
        "power": lambda scores, y: cross_entropy(nn.Identity(), scores, y) + ((scores - scores) ** 0.5).mean(),
    }

    def train():
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for at, (x, y) in enumerate(batches(12)):
            optimizer.zero_grad()
            scores = model(x)
            (makers[what](scores, y) if at == 6 else cross_entropy(nn.Identity(), scores, y)).backward()
            optimizer.step()

    found, record = told(tmp_path, train)
    assert told_as in found["nonfinite"].message
    assert found["nonfinite"].since == 6
    assert record.verdict.state == "wrong"


@pytest.mark.slow
@pytest.mark.parametrize(("lr", "offset"), [(1e-2, 5e4), (1e-4, 5e4), (1e-2, 0.0)])
def test_targets_in_their_own_units_are_told_where_they_do_harm(tmp_path, lr, offset):
    def train():
        model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr)
        for x, _ in batches(60, rows=64):
            optimizer.zero_grad()
            getattr(F, "mse_loss")(model(x)[:, 0], x[:, 0] + offset).backward()  # noqa: B009
            optimizer.step()

    verdict = told(tmp_path, train)[1].verdict
    if offset:
        assert verdict.name == "targets_far_from_zero", verdict
        assert "the targets of the loss lie between 5e+04 and 5e+04" in verdict.evidence[0]
    else:
        assert verdict.state == "healthy"


def test_gradients_that_are_clipped_by_value_to_nothing_are_told(tmp_path):
    def train():
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for x, y in batches(60):
            optimizer.zero_grad()
            cross_entropy(model, x, y).backward()
            nn.utils.clip_grad_value_(model.parameters(), 1e-6)
            optimizer.step()

    found, record = told(tmp_path, train)
    assert "most elements of the gradients are 1e-06 or -1e-06" in found["clipped_to_nothing"].message
    assert record.verdict.name == "clipped_to_nothing"


def test_a_softmax_over_a_single_output_is_told(tmp_path):
    def train():
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1), nn.Softmax(dim=-1))
        optimizer = torch.optim.Adam(model.parameters(), 0.01)
        for x, y in batches(60):
            optimizer.zero_grad()
            getattr(F, "binary_cross_entropy")(model(x)[:, 0], (y > 0).float()).backward()  # noqa: B009
            optimizer.step()

    found, record = told(tmp_path, train)
    assert "is given a softmax of shape [16, 1]" in found["one_class"].message
    assert record.verdict.name == "one_class"


def test_a_group_without_a_learning_rate_is_a_fact(tmp_path):
    def train():
        model = net()
        groups = [{"params": model[0].parameters(), "lr": 0.0}, {"params": model[2].parameters()}]
        optimizer = torch.optim.SGD(groups, 0.1)
        for x, y in batches(60):
            optimizer.zero_grad()
            cross_entropy(model, x, y).backward()
            optimizer.step()

    found, record = told(tmp_path, train)
    assert found["lr_zero_in_part"].severity == "info"
    assert found["lr_zero_in_part"].evidence["parameters"] == "2 of 4"
    assert record.verdict.state == "healthy"


def test_a_closure_that_clears_at_its_end_leaves_no_parameter_without_a_gradient(tmp_path):
    class Clearing(torch.optim.SGD):
        def step(self, closure):
            with torch.enable_grad():
                loss = closure()
            super().step()
            self.zero_grad()
            return loss

    def train():
        model = net()
        optimizer = Clearing(model.parameters(), lr=0.1)
        for x, y in batches(30):

            def closure(x=x, y=y):
                loss = cross_entropy(model, x, y)
                loss.backward()
                return loss

            optimizer.step(closure)

    assert not told(tmp_path, train)[0]


@pytest.mark.slow
def test_copies_that_are_trained_one_after_the_other_are_judged_together(tmp_path):
    """As Reptile trains: each task on a copy of its own, for three steps, and the model is moved towards it."""

    def train():
        model = net()
        outer = torch.optim.SGD(model.parameters(), 1.0)
        drawn = batches(150, rows=64)
        for _ in range(50):
            task = copy.deepcopy(model)
            inner = torch.optim.SGD(task.parameters(), 0.1)
            for _ in range(3):
                x, y = next(drawn)
                inner.zero_grad()
                loss = cross_entropy(task, x, y)
                loss.backward()
                inner.step()
            outer.zero_grad()
            for one, other in zip(model.parameters(), task.parameters(), strict=True):
                one.grad = (one - other).detach()
            outer.step()

    verdict = told(tmp_path, train)[1].verdict
    assert verdict.state == "healthy", verdict
    assert "for the first of 50 trainings, one after the other, and from about" in str(verdict)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["sum over count", "stacked", "dot over weights", "added"])
def test_a_mean_of_more_and_more_losses_has_no_factor(tmp_path, how):
    def train():
        model = net()
        optimizer = torch.optim.Adam(model.parameters(), 1e-3)
        drawn = batches(700, rows=32)
        for at in range(80):
            count = 1 + at // 10
            losses = [cross_entropy(model, *next(drawn)) for _ in range(count)]
            weights = torch.ones(count)
            loss = {
                "sum over count": lambda one=losses, many=count: sum(one) / many,
                "stacked": lambda one=losses: torch.stack(one).mean(),
                "dot over weights": lambda one=losses, w=weights: torch.dot(w, torch.stack(one)) / w.sum(),
                "added": lambda one=losses, many=count: sum(one) * (1.0 / many),
            }[how]()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    found, record = told(tmp_path, train)
    assert "diverging" not in found
    assert record.verdict.state == "healthy", record.verdict


@pytest.mark.parametrize("divisor", [math.inf, 0.0])
def test_a_loss_that_is_divided_by_what_is_no_number_costs_no_look(tmp_path, divisor):
    def train():
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for at, (x, y) in enumerate(batches(30)):
            optimizer.zero_grad()
            loss = cross_entropy(model, x, y)
            (loss / divisor if at % 10 == 0 and divisor else loss).backward()
            optimizer.step()

    record = told(tmp_path, train)[1]
    assert len(record.looks) == 30
    assert record.verdict.state == "healthy"


def test_a_softmax_of_one_that_is_a_weight_is_no_fault(tmp_path):
    class Mixture(nn.Module):
        """One expert, with its share."""

        def __init__(self):
            super().__init__()
            self.router, self.expert = nn.Linear(8, 1), net()

        def forward(self, x):
            return torch.softmax(self.router(x), -1) * self.expert(x)

    def train():
        model = Mixture()
        optimizer = torch.optim.Adam(model.parameters(), 0.01)
        for x, y in batches(60):
            optimizer.zero_grad()
            cross_entropy(model, x, y).backward()
            optimizer.step()

    assert "one_class" not in told(tmp_path, train)[0]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["scaled output", "fresh bias", "sentinel", "one bad batch"])
def test_large_targets_that_a_model_is_made_for_are_not_blamed(tmp_path, how):
    """The loss rises for another reason, a learning rate that is raised to 3 in the middle of the run."""

    def train():
        model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
        if how == "fresh bias":
            nn.init.constant_(model[2].bias, 300.0)
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        for at, (x, _) in enumerate(batches(120, rows=64)):
            optimizer.param_groups[0]["lr"] = 3.0 if at > 80 else 1e-3
            y, out = x[:, 0] + (300.0 if how == "fresh bias" else 0.0), model(x)[:, 0]
            if how == "scaled output":
                y, out = 127.5 + 50 * y, out * 50 + 127.5
            if how == "sentinel":
                y = torch.where(torch.arange(64) % 4 == 0, -999.0, y)
                out = torch.where(torch.arange(64) % 4 == 0, -999.0, out)
            if how == "one bad batch" and at == 100:
                y = y * 5000
            optimizer.zero_grad()
            getattr(F, "mse_loss")(out, y).backward()  # noqa: B009
            optimizer.step()

    assert told(tmp_path, train)[1].verdict.name != "targets_far_from_zero"


@pytest.mark.parametrize(
    ("loss_of", "blamed"),
    [
        (lambda out, y: (out[:, 0] - y).pow(2).mean().sqrt(), ""),  # of targets that hold a NaN
        (lambda out, y: torch.log(out[:, 0].abs() * 0 - 1).abs().sqrt().mean(), "log is given 0 or less at 16 of 16"),
        (lambda out, y: ((out[:, 0] * 0 - 2).pow(-2) + torch.log(out[:, 1] * 0 - 1)).mean(), "log is given 0 or less"),
        (lambda out, y: (out[:, 0] * 0 - 1).pow(1.5).mean(), "pow has no finite value at 16 of 16"),
        (lambda out, y: (out[:, 0] * 0).pow(-1).mean(), "pow has no finite value at 16 of 16"),
    ],
)
def test_the_op_that_is_blamed_for_a_nan_is_the_one_that_makes_it(tmp_path, loss_of, blamed):
    def train():
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        for at, (x, y) in enumerate(batches(12)):
            target = torch.where(torch.arange(16) == 3, math.nan, y.float()) if at == 8 else y.float()
            optimizer.zero_grad()
            (loss_of(model(x), target) if at == 8 else cross_entropy(model, x, y)).backward()
            optimizer.step()

    message = told(tmp_path, train)[0]["nonfinite"].message
    assert blamed in message
    assert blamed or "between the model and its loss" not in message


def test_signs_of_gradients_are_no_clipping(tmp_path):
    def train():
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), 1.0)
        for x, y in batches(120):
            optimizer.zero_grad()
            cross_entropy(model, x, torch.randint_like(y, 3)).backward()
            for one in model.parameters():
                one.grad = one.grad.sign() * 1e-4
            optimizer.step()

    assert "clipped_to_nothing" not in told(tmp_path, train)[0]


@pytest.mark.parametrize("touch", ["clamp", "load", "swap"])
def test_a_forgotten_parameter_that_something_touches_is_told(tmp_path, touch):
    def train():
        model = net()
        optimizer = torch.optim.SGD(model[2].parameters(), 0.1)
        for at, (x, y) in enumerate(batches(30)):
            optimizer.zero_grad()
            cross_entropy(model, x, y).backward()
            optimizer.step()
            with torch.no_grad():
                if touch == "clamp":
                    model[0].weight.clamp_(-10, 10)
                elif touch == "swap":
                    known = model[0].weight.clone()
                    model[0].weight.copy_(known * 0.99)
                    model[0].weight.copy_(known)
                elif at == 3:
                    model.load_state_dict(model.state_dict())

    assert "not_owned" in told(tmp_path, train)[0]


def test_gradients_of_batches_of_other_lengths_are_lost_as_well(tmp_path):
    def train():
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        drawn = torch.Generator().manual_seed(3)
        for at in range(60):
            rows = int(torch.randint(30, 50, (), generator=drawn))
            x = torch.randn(rows, 8, generator=drawn)
            optimizer.zero_grad()
            cross_entropy(model, x, x[:, :3].argmax(1)).backward()
            if at % 4 == 3:
                optimizer.step()

    assert "gradients_lost" in told(tmp_path, train)[0]


@pytest.mark.slow
@pytest.mark.parametrize("is_lost", [True, False])
def test_the_real_half_of_a_discriminator_that_is_cleared_before_its_step_is_told(tmp_path, is_lost):
    """What the generator's own pass leaves at the discriminator is cleared by all, and no loss."""

    def train():
        made, judge = nn.Linear(4, 8), nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
        first, second = (torch.optim.Adam(one.parameters(), 1e-3) for one in (made, judge))
        error = nn.BCEWithLogitsLoss()
        for x, _ in batches(40):
            fake = made(torch.randn(16, 4))
            if not is_lost:
                second.zero_grad()
            error(judge(x), torch.ones(16, 1)).backward()
            if is_lost:
                second.zero_grad()
            error(judge(fake.detach()), torch.zeros(16, 1)).backward()
            second.step()
            first.zero_grad()
            error(judge(fake), torch.ones(16, 1)).backward()
            first.step()

    found, _ = told(tmp_path, train)
    assert ("gradients_lost" in found) == is_lost
    if is_lost:
        assert "are cleared before a step of Adam has used them" in found["gradients_lost"].message


@pytest.mark.slow
@pytest.mark.parametrize("every", [1, 4])
@pytest.mark.parametrize("way", ["average", "restored", "clamped", "left"])
def test_weights_that_are_written_back_after_each_step_are_told(tmp_path, way, every):
    def train():
        model = net()
        optimizer = torch.optim.Adam(model.parameters(), 1e-2)
        before = [one.detach().clone() for one in model.parameters()]
        for x, y in batches(60):
            optimizer.zero_grad()
            cross_entropy(model, x, y).backward()
            optimizer.step()
            with torch.no_grad():
                for one, other in zip(model.parameters(), before, strict=True):
                    if way == "average":
                        one.copy_(other.lerp_(one, 1e-3))
                    elif way == "restored":
                        one.copy_(other)
                    elif way == "clamped":
                        one.clamp_(-0.3, 0.3)

    found, record = told(tmp_path, train, every=every)
    assert ("written_back" in found) == (way in ("average", "restored"))
    if "written_back" in found:
        assert record.verdict.name == "written_back"
        assert "of what a step of Adam has changed is there at the next" in record.verdict.cause


@pytest.mark.slow
def test_inner_loops_that_begin_anew_are_not_told_where_the_outer_one_learns(tmp_path):
    """The weights go back after each inner step, and a part of the way is kept, as in Reptile of one step."""

    def train():
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), 0.5)
        for x, y in batches(120):
            before = [one.detach().clone() for one in model.parameters()]
            optimizer.zero_grad()
            cross_entropy(model, x, y).backward()
            optimizer.step()
            with torch.no_grad():
                for one, other in zip(model.parameters(), before, strict=True):
                    one.copy_(other.lerp(one, 0.3))

    assert "written_back" not in told(tmp_path, train)[0]


@pytest.mark.slow
@pytest.mark.parametrize("where", ["first", "before backward", "last"])
@pytest.mark.parametrize("to_none", [True, False])
def test_of_several_optimizers_the_one_that_never_steps_is_told_wherever_gradients_are_cleared(
    tmp_path, where, to_none
):
    def train():
        parts = [nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 3)]
        model = nn.Sequential(parts[0], nn.ReLU(), parts[1], nn.ReLU(), parts[2])
        optimizers = [torch.optim.Adam(part.parameters(), 1e-2) for part in parts]

        def clear(at):
            for one in optimizers if at == where else ():
                one.zero_grad(set_to_none=to_none)

        for x, y in batches(60):
            clear("first")
            loss = F.cross_entropy(model(x), y % 3)
            clear("before backward")
            loss.backward()
            for one in optimizers[:-1]:
                one.step()
            clear("last")

    assert "never_stepped" in told(tmp_path, train)[0]


def test_a_learning_rate_of_zero_is_told_of_one_optimizer_of_two(tmp_path):
    def train():
        body, head = nn.Linear(8, 16), nn.Linear(16, 3)
        model = nn.Sequential(body, nn.ReLU(), head)
        optimizers = [torch.optim.Adam(body.parameters(), 0.0), torch.optim.Adam(head.parameters(), 1e-2)]
        for x, y in batches(60):
            model.zero_grad()
            F.cross_entropy(model(x), y % 3).backward()
            for one in optimizers:
                one.step()

    assert "lr_zero" in told(tmp_path, train)[0]


def test_heads_that_take_turns_are_no_spike(tmp_path):
    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.trunk, self.heads = nn.Linear(8, 8), nn.ModuleList(nn.Linear(8, 1) for _ in range(3))

        def forward(self, x):
            z = self.trunk(x)
            return torch.cat([head(z.detach()) for head in self.heads], 1), z

    def train():
        model = Heads()
        optimizer = torch.optim.SGD(model.parameters(), 1e-5)
        for step, (x, _) in enumerate(batches(60, rows=64)):
            optimizer.zero_grad()
            scores, z = model(x)
            ((scores[:, step % 3] - 5).square().mean() + 1e-2 * z.square().mean()).backward()
            optimizer.step()

    assert "gradient_spike" not in told(tmp_path, train)[0]


def test_an_embedding_that_the_step_never_changes_is_told(tmp_path):
    def train():
        embedding, head = nn.Embedding(500, 8), nn.Linear(8, 3)
        model = nn.Sequential(embedding, head)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        kept = embedding.weight.detach().clone()
        optimizer.register_step_post_hook(lambda *_: embedding.weight.data.copy_(kept))
        for _, y in batches(60):
            optimizer.zero_grad()
            F.cross_entropy(model(torch.randint(0, 500, (len(y),))), y % 3).backward()
            optimizer.step()

    assert "never_updated" in told(tmp_path, train)[0]


@pytest.mark.slow
@pytest.mark.parametrize(("deviation", "size", "name"), [
    (1.0, 1.0, "begins_too_large"), (None, 1e-5, "worse_than_guessing"), (None, 1.0, ""),
])  # fmt: skip
def test_a_regression_that_stays_above_guessing_is_told_by_its_weights_or_its_targets(tmp_path, deviation, size, name):
    def train():
        model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
        for one in model.parameters() if deviation else ():
            nn.init.normal_(one, std=deviation)
        optimizer = torch.optim.Adam(model.parameters(), 1e-3)
        for x, _ in batches(150, rows=64):
            optimizer.zero_grad()
            getattr(F, "mse_loss")(model(x)[:, 0], size * x.sum(1)).backward()  # noqa: B009
            optimizer.step()

    assert told(tmp_path, train)[1].verdict.name == name


@pytest.mark.slow
def test_targets_far_above_ten_thousand_are_told_whenever_gradients_explode(tmp_path):
    def train():
        model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
        optimizer = torch.optim.Adam(model.parameters(), 1e-2)
        for x, _ in batches(300, rows=64):
            optimizer.zero_grad()
            getattr(F, "mse_loss")(model(x)[:, 0], 1e5 * (2 + 0.5 * x[:, 0])).backward()  # noqa: B009
            optimizer.step()

    found, record = told(tmp_path, train)
    assert found["exploding"].since > 50
    assert record.verdict.name == "targets_far_from_zero"


@pytest.mark.slow
@pytest.mark.parametrize("spread", [0.3, 0.05])
def test_a_recurrence_that_explodes_from_the_first_step_is_told_by_its_weights(tmp_path, spread):
    class Sums(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell, self.last = nn.RNN(1, 64, nonlinearity="relu", batch_first=True), nn.Linear(64, 1)
            nn.init.normal_(self.cell.weight_hh_l0, std=spread)

        def forward(self, x):
            return self.last(self.cell(x)[0][:, -1])[:, 0]

    def train():
        model = Sums()
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        for _ in range(40):
            x = torch.rand(32, 40, 1)
            optimizer.zero_grad()
            getattr(F, "mse_loss")(model(x), x.mean((1, 2))).backward()  # noqa: B009
            optimizer.step()

    verdict = told(tmp_path, train)[1].verdict
    assert (verdict.name == "begins_too_large") == (spread == 0.3), verdict
    if spread == 0.3:
        assert "where guessing comes to" in verdict.evidence[0]
        assert "orthogonal ones for a recurrence" in verdict.remedy


NOTHING = {
    "of itself": (lambda out, y: F.mse_loss(out, out.detach()), True),
    "rounded": (lambda out, y: (out.round() - y[:, None]).square().mean(), True),
    "beyond the hinge": (lambda out, y: (out + 100).relu().mul(0).mean() + 1, True),
    "usual": (lambda out, y: (out - y[:, None]).square().mean(), False),
    "solved": (lambda out, y: (0.2 - out.abs().mean()).relu(), False),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", NOTHING)
def test_a_loss_that_hands_back_nothing_is_told(tmp_path, name):
    loss_of, is_told = NOTHING[name]

    def train():
        model = net()
        if name == "solved":
            nn.init.normal_(model[2].weight, 0, 1e-3)
            nn.init.zeros_(model[2].bias)
        optimizer = torch.optim.Adam(model.parameters(), 0.05)
        for x, y in batches(40):
            optimizer.zero_grad()
            loss = loss_of(model(x), y)
            loss.backward()
            optimizer.step()

    found, record = told(tmp_path, train)
    assert ("loss_gives_nothing" in found) == is_told
    assert (record.verdict.name == "loss_gives_nothing") == is_told
    assert "zero_gradient" not in found


@pytest.mark.parametrize("way", ["total", "mean of the total", "each", "in parts"])
def test_losses_that_are_added_up_over_steps_are_told(tmp_path, way):
    def train():
        model, total = nn.Linear(8, 3), 0.0
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        for number, (x, y) in enumerate(batches(30)):
            loss = getattr(F, "cross_entropy")(model(x), (y > 0).long())  # noqa: B009
            if way == "in parts":
                total = loss if number % 2 == 0 else total + loss
                if number % 2 == 0:
                    continue
            elif way != "each":
                total = total + loss
            optimizer.zero_grad()
            begins = {"each": loss, "mean of the total": total / (number + 1)}.get(way, total)
            begins.backward(retain_graph=True)  # of one layer no weight is needed in it
            optimizer.step()

    if way in ("total", "mean of the total"):
        found, record = told(tmp_path, train)
        assert record.verdict.name == "loss_holds_the_last"
        assert "holds that of the step before" in found["loss_holds_the_last"].message
    else:
        assert "loss_holds_the_last" not in told(tmp_path, train)[0]


class HeldByItself(torch.autograd.Function):
    """Keeps its output in its context, so that both are there until Python looks for cycles."""

    @staticmethod
    def forward(ctx, x):
        ctx.out = x * 1.0
        return ctx.out

    @staticmethod
    def backward(ctx, gradient):
        return gradient


HOLDING = ("total", "list", "second", "scaled", "part", "divided", "outputs", "late")


QUIET = ("item", "latest", "window", "many at once", "epoch", "cycle", "constant")
FEW = ("total", "outputs", "item", "window", "cycle")


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=() if way in FEW else pytest.mark.slow) for way in (*HOLDING, *QUIET)]
)
def test_graphs_of_losses_that_somebody_holds_are_told(tmp_path, way):
    model, x = net(), torch.randn(16, 8)
    y = torch.randint(3, (16,))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=way == "scaled")
    held = deque(maxlen=100 if way == "window" else None)
    constant = sum(one.square().sum() for one in nn.Linear(3, 3).parameters())

    def train():
        total, latest = 0.0, None
        for step in range(440):
            for _ in range(24 if way == "many at once" else 1):
                out = model(x)
                loss = F.cross_entropy(HeldByItself.apply(out) if way == "cycle" else out, y)
                whole = loss / 4 if way == "divided" else loss + out.square().mean() if way == "part" else loss
                whole = whole + constant if way == "constant" else whole
                scaler.scale(whole).backward(retain_graph=way == "constant")
                keeps = way in ("list", "window", "many at once", "epoch", "scaled", "part", "divided")
                held.extend([loss] * (keeps or (way == "late" and step > 40)))
                held.extend([out] * (way == "outputs"))
            if way == "second":  # of two losses the second is added up
                second = model(x).square().mean()
                second.backward()
                total = total + second
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            total = total + (loss if way == "total" else loss.item())
            latest = loss
            if way == "many at once" or (way == "epoch" and step % 44 == 0):
                held.clear()
        return latest

    found = told(tmp_path, train, every=10)[0]
    assert ("graphs_held" in found) == (way in HOLDING)
    if way == "second":
        assert "'second'" in found["graphs_held"].message
    assert "eval_graphs_held" not in found


EVALUATING = ("loss", "outputs", "at the end")


@pytest.mark.parametrize("way", [*EVALUATING, "no_grad", "let go", "perceptual", "gradients"])
def test_an_evaluation_that_holds_its_graphs_is_told(tmp_path, way):
    model, x = net(), torch.randn(160, 8)
    y = torch.randint(3, (160,))
    judge = nn.Sequential(nn.Linear(3, 4), nn.Tanh()).eval()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def evaluate():
        model.eval()
        seen, losses = [], []
        with torch.set_grad_enabled(way != "no_grad"):
            for part in range(0, 160, 16):
                out = model(x[part : part + 16])
                seen += [out] * (way == "outputs")
                loss = F.cross_entropy(out, y[part : part + 16])
                losses.append(loss.item() if way in ("let go", "perceptual") else loss)
        if way == "gradients":
            torch.autograd.grad(sum(losses), list(model.parameters()))

    def train():
        for epoch in range(3):
            model.train()
            for part in range(0, 160, 16):
                out = model(x[part : part + 16])
                loss = F.cross_entropy(out, y[part : part + 16])
                if way == "perceptual":  # a frozen model in eval mode, through which gradients go
                    loss = loss + sum(judge(one[None]).mean() for one in out)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            if way != "at the end" or epoch == 2:
                evaluate()

    found = told(tmp_path, train)[0]
    assert ("eval_graphs_held" in found) == (way in EVALUATING)
    assert "graphs_held" not in found


def test_a_loss_that_has_fallen_and_is_above_guessing_is_not_called_healthy(tmp_path):
    def train():
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
        optimizer = torch.optim.SGD(model.parameters(), 2e-4)
        for x, y in batches(150):
            optimizer.zero_grad()
            getattr(F, "mse_loss")(model(x)[:, 0], y.float() + 9).backward()  # noqa: B009
            optimizer.step()

    _, record = told(tmp_path, train)
    assert record.verdict.state == "suspicious"
    assert record.verdict.name == "worse_than_guessing"


def test_an_optimizer_for_each_parameter_steps_in_backward(tmp_path):
    torch.manual_seed(0)
    model, norms, seen = net(), [], []
    steps = {one: torch.optim.Adam([one], 1e-2) for one in model.parameters()}

    def act(parameter):
        seen.append(parameter.grad.norm())
        steps[parameter].step()
        steps[parameter].zero_grad()

    for one in model.parameters():
        one.register_post_accumulate_grad_hook(act)
    with gaff.watch(out=tmp_path / "run", every=1):
        for x, y in batches(6):
            cross_entropy(model, x, y).backward()
            norms.append(torch.stack(seen).norm().item())
            seen.clear()
    assert gaff.load(tmp_path / "run").scalar("grad_norm").values == pytest.approx(norms)


def test_an_optimizer_that_was_given_the_parameters_of_another_model(tmp_path):
    def train():
        torch.manual_seed(0)
        makes, judges = nn.Linear(4, 8), nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
        makes_step, judges_step = (torch.optim.Adam(makes.parameters(), 1e-3) for _ in range(2))
        ones, zeros = torch.ones(16, 1), torch.zeros(16, 1)
        lossy = F.binary_cross_entropy_with_logits
        for _ in range(40):
            made = makes(torch.randn(16, 4))
            judges_step.zero_grad()
            judges.zero_grad()
            (lossy(judges(torch.randn(16, 8)), ones) + lossy(judges(made.detach()), zeros)).backward()
            judges_step.step()
            makes_step.zero_grad()
            lossy(judges(made), ones).backward()
            makes_step.step()

    found, record = told(tmp_path, train)
    assert "never_trained" not in found
    assert "'makes' is in two optimizers" in found["not_owned"].message
    assert min(record.series("makes.weight:param", "update_ratio").values[2:]) > 0


@pytest.mark.parametrize("every", [10, None])
def test_heads_that_take_turns_in_the_rhythm_of_the_looks(tmp_path, every):
    torch.manual_seed(0)
    body, heads = nn.Linear(8, 16), nn.ModuleList([nn.Linear(16, 3), nn.Linear(16, 3)])
    model = nn.ModuleDict({"body": body, "heads": heads})
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    with gaff.watch(model, optimizer, out=tmp_path / "run", every=every):
        for number, (x, y) in enumerate(batches(120)):
            optimizer.zero_grad()
            F.cross_entropy(heads[number % 2](body(x)), y).backward()
            optimizer.step()
    record = gaff.load(tmp_path / "run")
    assert "no_gradient" not in {one.rule for one in record.findings}
    if every is None:
        assert {step % 2 for step in record.looks[-12:]} == {0, 1}


@pytest.mark.slow
@pytest.mark.parametrize("scale", [0.6, 0.1])
def test_a_recurrence_that_grows_before_the_scores_of_classes(tmp_path, scale):
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.step, self.inp, self.out = (
                nn.Parameter(torch.randn(32, 32) * scale),
                nn.Linear(1, 32),
                nn.Linear(32, 3),
            )

        def forward(self, x):
            h = torch.zeros(len(x), 32)
            for at in range(x.shape[1]):
                h = F.relu(self.inp(x[:, at : at + 1]) + h @ self.step)
            return self.out(h)

    def train():
        model, drawn = Recurrent(), torch.Generator().manual_seed(1)
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        for _ in range(30):
            x = torch.randn(16, 48, generator=drawn)
            optimizer.zero_grad()
            F.cross_entropy(model(x), (x[:, 0] > 0).long() + (x[:, 1] > 1).long()).backward()
            optimizer.step()

    name = told(tmp_path, train)[1].verdict.name
    assert (name == "begins_too_large") == (scale == 0.6), name


@pytest.mark.parametrize("elements", [0, 3])
def test_a_parameter_without_elements_here_misses_no_gradient(tmp_path, elements):
    """As the parts of parameters that lie in other processes alone."""

    def train():
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
        model.part = nn.Parameter(torch.ones(elements))
        optimizer = torch.optim.Adam(model.parameters(), 1e-3)
        for _ in range(20):
            x = torch.randn(16, 4)
            optimizer.zero_grad()
            F.mse_loss(model(x), x[:, :1]).backward()
            optimizer.step()

    rules = [one.rule for one in told(tmp_path, train)[1].findings]
    assert ("no_gradient" in rules) == (elements > 0)


@pytest.mark.parametrize("warm", [1, 10_000])
def test_small_updates_of_a_warm_up_are_no_finding(tmp_path, warm):
    def train():
        model = net()
        optimizer = torch.optim.Adam(model.parameters(), 1e-7)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / warm))
        for x, y in batches(60):
            optimizer.zero_grad()
            cross_entropy(model, x, y).backward()
            optimizer.step()
            schedule.step()

    found, record = told(tmp_path, train)
    assert ("update_small" in found) == (warm == 1)
    is_still = "still being warmed up" in str(record.verdict)
    assert is_still == (warm > 1), str(record.verdict)


@pytest.mark.parametrize("way", ["bags", "left alone"])
def test_outputs_in_eval_mode_that_are_trained_through_are_no_evaluation(tmp_path, way):
    """Multiple instances: an encoder in eval mode, whose BatchNorm is frozen, runs on each, then a head on all."""
    encoder, head = nn.Sequential(nn.Linear(8, 4), nn.Tanh()), nn.Linear(4, 3)
    optimizer = torch.optim.SGD([*encoder.parameters(), *head.parameters()], 0.1)
    outputs = []

    def train():
        for step in range(20):
            encoder.train(step < 5)
            parts = [encoder(torch.randn(2, 8)) for _ in range(10)]
            if way == "left alone":  # held for nothing: the head sees none of them
                outputs.append(parts)
                parts = [torch.randn(2, 4)]
            loss = F.cross_entropy(head(torch.stack(parts).mean((0, 1)))[None], torch.tensor([step % 3]))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            assert step != 12 or not any(one._backward_hooks for one in parts)  # no look

    found = told(tmp_path, train, every=20)[0]
    assert ("eval_graphs_held" in found) == (way == "left alone")


@pytest.mark.parametrize("more", [0, 3])
def test_an_evaluation_after_all_training_is_told_also_where_little_follows(tmp_path, more):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def steps(number):
        model.train()
        for _ in range(number):
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    def train():
        steps(30)
        model.eval()
        outputs = [model(torch.randn(4, 8)) for _ in range(20)]
        steps(more)
        return outputs

    assert "eval_graphs_held" in told(tmp_path, train, every=1000)[0]


def test_of_two_certain_mistakes_the_second_is_told_as_certain(tmp_path):
    def train():
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        for x, y in batches(24):
            F.cross_entropy(model(x).softmax(-1), y).backward()  # gradients are never cleared, either
            optimizer.step()

    _, record = told(tmp_path, train)
    both = {record.verdict.name, *(one.name for one in record.verdict.alternatives if one.certainty == "certain")}
    assert both == {"not_cleared", "double_softmax"}
    [line] = [one for one in reasons(record) if one.startswith("  also wrong: ")]
    assert line.removeprefix("  also wrong: ") in both - {record.verdict.name}
