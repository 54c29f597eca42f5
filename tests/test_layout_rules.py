"""What lies where in a batch: each fault is named by the verdict, and what merely looks like it is not."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gaff

STEPS = 40
PADDED = 0


def watched(model, step, tmp_path, steps=STEPS):
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    with gaff.watch(out=tmp_path / "run", every=1):
        for _ in range(steps):
            optimizer.zero_grad()
            step(model).backward()
            optimizer.step()
    return gaff.load(tmp_path / "run").verdict


class OverTime(nn.Module):
    """Reads sequences with a layer of torch's, and classifies them by what it returns at the last position."""

    def __init__(self, layer, width=12):
        super().__init__()
        self.layer = layer
        self.head = nn.Linear(width, 3)

    def forward(self, x):
        found = self.layer(x)
        found = found[0] if isinstance(found, tuple) else found
        return self.head(found[:, -1])


LAYERS = {
    "lstm": lambda first: nn.LSTM(6, 12, batch_first=first),
    "gru": lambda first: nn.GRU(6, 12, num_layers=2, batch_first=first),
    "encoder": lambda first: nn.Sequential(
        nn.Linear(6, 12), nn.TransformerEncoderLayer(12, 2, 16, dropout=0.0, batch_first=first)
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("is_first", [False, True])
def test_a_layer_that_runs_along_the_batch(layer, is_first, tmp_path):
    torch.manual_seed(0)
    x, y = torch.randn(256, 7, 6), torch.randint(0, 3, (256,))

    def step(model):
        rows = torch.randint(0, 256, (16,))
        return F.cross_entropy(model(x[rows]), y[rows])

    told = watched(OverTime(LAYERS[layer](is_first)), step, tmp_path)
    assert (told.name == "batch_as_time") is not is_first
    if not is_first:
        assert told.state == "wrong"
        assert "runs along the 16 examples of the batch, not along the 7 positions" in told.cause


def test_positions_first_is_meant(tmp_path):
    torch.manual_seed(0)

    class PositionsFirst(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.head = nn.LSTM(6, 12), nn.Linear(12, 3)

        def forward(self, x):
            return self.head(self.layer(x)[0][-1])

    told = watched(
        PositionsFirst(),
        lambda model: F.cross_entropy(model(torch.randn(9, 16, 6)), torch.randint(0, 3, (16,))),
        tmp_path,
    )
    assert told.name != "batch_as_time"


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["rows", "columns"])
@pytest.mark.parametrize("is_first", [False, True])
def test_a_language_model_that_runs_along_the_batch(layout, is_first, tmp_path):
    torch.manual_seed(0)
    text = torch.arange(4000) * 7 % 23

    class Language(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(23, 12), nn.Linear(12, 23)
            self.layer = nn.GRU(12, 12, batch_first=is_first)

        def forward(self, tokens):
            return self.head(self.layer(self.embed(tokens))[0])

    def step(model):
        starts = torch.randint(0, 3900, (6,))
        rows = torch.stack([text[at : at + 21] for at in starts])
        rows = rows if layout == "rows" else rows.T
        given, told = (rows[:, :-1], rows[:, 1:]) if layout == "rows" else (rows[:-1], rows[1:])
        return F.cross_entropy(model(given).flatten(0, 1), told.reshape(-1))

    told = watched(Language(), step, tmp_path)
    assert (told.name == "batch_as_time") is ((layout == "rows") is not is_first)


class ByHand(nn.Module):
    """One layer of attention by hand, whose softmax runs along ``dim``."""

    def __init__(self, dim, dropout=0.1):
        super().__init__()
        self.put, self.project, self.head = nn.Linear(6, 12), nn.Linear(12, 36), nn.Linear(12, 3)
        self.dim, self.dropout = dim, dropout

    def forward(self, x):
        found = self.put(x)
        query, key, value = self.project(found).unflatten(-1, (3, 2, 6)).permute(2, 0, 3, 1, 4)
        weights = F.dropout((query @ key.mT / math.sqrt(6)).softmax(self.dim), self.dropout, self.training)
        return self.head((found + (weights @ value).transpose(1, 2).flatten(2)).mean(1))


@pytest.mark.parametrize("dim", [-1, 2, 1, 0])
def test_attention_that_normalises_along_something_else(dim, tmp_path):
    torch.manual_seed(0)
    x = torch.randn(16, 7, 6)
    told = watched(ByHand(dim), lambda model: F.cross_entropy(model(x), (x.sum((1, 2)) > 0).long()), tmp_path)
    assert (told.name == "attention_axis") is (dim != -1)
    if dim != -1:
        assert f"of shape [16, 2, 7, 7], runs along dimension {dim}" in told.cause
        assert "is summed along dimension 3" in told.cause


_SCORES = {  # what a model of [batch, positions, classes] or [batch, classes, height, width] may do with its scores
    "viewed": (lambda scores: scores.view(6, 5, 7), True),
    "transposed": (lambda scores: scores.transpose(1, 2), False),
    "flattened": (lambda scores: scores.reshape(-1, 5), False),
    "image, flattened": (lambda scores: scores.transpose(1, 2).unflatten(2, (7, 1)).reshape(-1, 5), True),
    "image, permuted": (lambda scores: scores.transpose(1, 2).unsqueeze(3).permute(0, 2, 3, 1).reshape(-1, 5), False),
    "pooled": (lambda scores: scores.mean(1)[:, :, None, None].flatten(1), False),
    "pooled, one dimension": (lambda scores: scores.transpose(1, 2).amax(-1, keepdim=True).flatten(1), False),
    "image, positions in a row": (lambda scores: scores.transpose(1, 2).unsqueeze(3).flatten(2), False),
}


@pytest.mark.parametrize("way", _SCORES)
def test_classes_that_a_view_has_made_of_positions(way, tmp_path):
    torch.manual_seed(0)
    arrange, is_told = _SCORES[way]
    model, x = nn.Linear(8, 5), torch.randn(6, 7, 8)
    targets = x[..., :5].argmax(-1)

    def step(model):
        scores = arrange(model(x))
        return F.cross_entropy(scores, targets[:, 0] if len(scores) == 6 and scores.dim() == 2 else
                               targets if scores.dim() == 3 else targets.flatten())  # fmt: skip

    told = watched(model, step, tmp_path)
    assert (told.name == "classes_viewed") is is_told
    if is_told:
        assert "are viewed as [" in told.cause


@pytest.mark.parametrize("rows", [16, 2, 4])
@pytest.mark.parametrize("way", ["viewed", "transposed", "one layer", "permuted and flattened"])
def test_examples_that_a_view_has_made_of_one_another(way, rows, tmp_path):
    torch.manual_seed(0)

    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            is_single = way == "one layer"
            self.layer = nn.LSTM(6, 5, 1 if is_single else 3, batch_first=True)
            self.head = nn.Linear(5 if is_single else 15, 3)

        def forward(self, x):
            state = self.layer(x)[1][0]  # [layers, batch, 5]
            if way == "transposed":
                state = state.transpose(0, 1)
            return self.head(state.reshape(len(x), -1))

    class Turned(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.head = nn.Conv1d(6, 5, 3), nn.Linear(25, 3)

        def forward(self, x):
            return self.head(self.layer(x.mT).permute(1, 0, 2).reshape(len(x), -1))

    x = torch.randn(rows, 7, 6)
    model = Turned() if way.startswith("permuted") else Last()
    told = watched(model, lambda model: F.cross_entropy(model(x), (x.sum((1, 2)) > 0).long()), tmp_path)
    assert (told.name == "examples_viewed") is (way in ("viewed", "permuted and flattened"))


def test_clusters_and_linear_attention_normalise_as_they_mean_it(tmp_path):
    torch.manual_seed(0)

    class Pooled(nn.Module):
        """Positions are dealt out to clusters, and these are summed by a softmax over positions."""

        def __init__(self):
            super().__init__()
            self.deal, self.key, self.value, self.head = (nn.Linear(6, width) for width in (4, 4, 8, 3))
            self.head = nn.Linear(8, 3)

        def forward(self, x):
            dealt = self.deal(x).softmax(-1)
            linear = dealt @ (self.key(x).softmax(1).mT @ self.value(x))
            return self.head(linear.mean(1) + (dealt.mT @ self.value(x)).mean(1))

    x = torch.randn(16, 7, 6)
    told = watched(Pooled(), lambda model: F.cross_entropy(model(x), (x.sum((1, 2)) > 0).long()), tmp_path)
    assert told.name != "attention_axis"


def test_the_same_example_again_and_again(tmp_path):
    torch.manual_seed(0)
    x, y = torch.randn(64, 6), torch.randint(0, 3, (64,))
    told = watched(
        nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3)),
        lambda model: F.cross_entropy(model(x[:1].repeat(16, 1)), y[torch.randint(0, 64, (16,))]),
        tmp_path,
    )
    assert (told.state, told.name) == ("wrong", "examples_alike")
    assert "the examples of a batch of 16 are the same, and their targets are not" in told.cause


@pytest.mark.parametrize("what", ["one target", "a step", "a mask"])
def test_examples_that_may_be_alike(what, tmp_path):
    """One example that is to be learned by heart; a batch that is alike once; a mask beside what differs."""
    torch.manual_seed(0)
    count = 0

    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))

        def forward(self, x, mask):
            return self.layers(x * mask)

    def step(model):
        nonlocal count
        count += 1
        x = torch.randn(16, 6)
        y = (x[:, 0] > 0).long()
        if what == "one target" or (what == "a step" and count % 3 == 0):
            x = x[:1].repeat(16, 1)
        y = y[:1].repeat(16) if what == "one target" else y
        return F.cross_entropy(model(x, torch.ones(16, 6)), y)

    assert watched(Masked(), step, tmp_path).name != "examples_alike"


class Encoder(nn.Module):
    """Two layers of torch's encoder over tokens, and a mean over what they return."""

    def __init__(self, mask, *, at_each=False):
        super().__init__()
        self.embed = nn.Embedding(30, 12)
        layer = nn.TransformerEncoderLayer(12, 2, 16, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(12, 3)
        self.mask, self.at_each = mask, at_each

    def forward(self, tokens):
        padded = tokens == PADDED
        mask = {"right": padded, "inverted": ~padded, "none": None}[self.mask]
        found = self.head(self.layers(self.embed(tokens), src_key_padding_mask=mask))
        return found if self.at_each else found.mean(1)


def padded_tokens(*, at_end=True, longest=9):
    tokens = torch.randint(1, 30, (16, 11))
    lengths = torch.randint(3, longest + 1, (16,))
    places = torch.arange(11) if at_end else torch.arange(11).flip(0)
    return tokens.masked_fill(places >= lengths[:, None], PADDED)


@pytest.mark.slow
@pytest.mark.parametrize("at_end", [True, False])
@pytest.mark.parametrize("mask", ["right", "inverted", "none"])
def test_masks_of_padding(mask, at_end, tmp_path):
    torch.manual_seed(0)

    def step(model):
        tokens = padded_tokens(at_end=at_end)
        return F.cross_entropy(model(tokens), (tokens == 5).any(1).long())

    told = watched(Encoder(mask), step, tmp_path)
    expected = {"right": "", "inverted": "mask_inverted", "none": "padding_attended"}[mask]
    assert (told.name if told.name in ("mask_inverted", "padding_attended") else "") == expected
    if mask == "inverted":
        assert told.state == "wrong"
        assert "attention sees no token that is not padding" in told.cause
    if mask == "none":
        assert "without a mask it lets every position through" in told.cause


def test_tokens_without_padding_need_no_mask(tmp_path):
    """Sequences of one length, of which some end with the same number, and numbers that come elsewhere, too."""
    torch.manual_seed(0)

    def step(model):
        tokens = torch.randint(0, 4, (16, 11))
        tokens[:8, -2:] = 0
        return F.cross_entropy(model(tokens), (tokens == 2).any(1).long())

    assert watched(Encoder("none"), step, tmp_path).name != "padding_attended"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["all", "ignored", "by hand", "short"])
def test_targets_at_padding(kind, tmp_path):
    torch.manual_seed(0)

    def step(model):
        tokens = padded_tokens() if kind != "short" else padded_tokens(longest=11)
        told = (tokens % 3).masked_fill(tokens == PADDED, 0)
        scores = model(tokens).flatten(0, 1)
        if kind == "ignored":
            told = told.masked_fill(tokens == PADDED, -100)
        if kind == "by hand":
            each = F.cross_entropy(scores, told.flatten(), reduction="none")
            return each[tokens.flatten() != PADDED].mean()
        if kind == "short":
            scores = scores[: 16 * 11]
            told = torch.where(tokens == PADDED, torch.randint(0, 3, tokens.shape), told)
        return F.cross_entropy(scores, told.flatten())

    told = watched(Encoder("right", at_each=True), step, tmp_path)
    assert (told.name == "padding_in_loss") is (kind == "all")
    if kind == "all":
        assert "of the targets stand at padding, and are 0: they count in the loss" in told.cause


@pytest.mark.slow
def test_padding_in_the_loss_of_a_language_model(tmp_path):
    """A tiny model of transformers, with labels that are the tokens as they are, and as they should be."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=30, n_positions=16, n_embd=12, n_layer=1, n_head=2, bos_token_id=None, eos_token_id=None
    )

    def told_of(is_masked, out):
        def step(model):
            tokens = padded_tokens()
            mask = (tokens != PADDED).long()
            labels = tokens.masked_fill(mask == 0, -100) if is_masked else tokens
            return model(input_ids=tokens, attention_mask=mask, labels=labels).loss

        return watched(transformers.GPT2LMHeadModel(config), step, out)

    assert told_of(False, tmp_path / "plain").name == "padding_in_loss"
    assert told_of(True, tmp_path / "masked").name not in ("padding_in_loss", "padding_attended", "mask_inverted")


class Reused(nn.Module):
    """One rectifier in two places, with other numbers of units; the second is dead."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = nn.Linear(8, 16), nn.Linear(16, 12), nn.Linear(12, 2)
        self.act = nn.ReLU()
        nn.init.constant_(self.second.bias, -100.0)

    def forward(self, x):
        return self.head(self.act(self.second(self.act(self.first(x)))))


def test_a_module_in_two_places_is_not_judged_by_the_units_of_one(tmp_path):
    torch.manual_seed(0)
    model = Reused()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with gaff.watch(model, optimizer, out=tmp_path / "run", every=1) as watch:
        for _ in range(12):
            x = torch.randn(16, 8)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), (x[:, 0] > 0).long()).backward()
            optimizer.step()
    told = {finding.rule: finding for finding in watch.findings}
    assert not any(finding.site == "act" and finding.rule in ("no_signal", "dead_units") for finding in watch.findings)
    assert told["output_constant"].site == ":output"
