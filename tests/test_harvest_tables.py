"""Data sets of Hugging Face, harvested: every row is that of its sample alone, however the batches were padded."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

import gaff

datasets = pytest.importorskip("datasets")

LENGTHS = (5, 2, 4, 5, 1, 2)
TOKENS = [torch.randint(2, 20, (size,), generator=torch.Generator().manual_seed(size + at)).tolist()
          for at, size in enumerate(LENGTHS)]  # fmt: skip
LABELS = [[one % 3 for one in some] for some in TOKENS]


def table(**columns):
    return datasets.Dataset.from_dict({"input_ids": TOKENS, "labels": LABELS, **columns})


class ByPadding(nn.Module):
    """Finds the last token of each text by the number of padding, as classifiers on decoders do."""

    def __init__(self):
        super().__init__()
        self.config = SimpleNamespace(pad_token_id=1)
        self.names, self.head = nn.Embedding(20, 6), nn.Linear(6, 3)

    def forward(self, input_ids, attention_mask=None):
        last = (input_ids != self.config.pad_token_id).sum(1) - 1
        return self.head(self.names(input_ids).cumsum(1)[torch.arange(len(last)), last])


class WithoutMask(nn.Module):
    """A mean over all positions: nothing tells it which of them are padding."""

    def __init__(self):
        super().__init__()
        self.names, self.head = nn.Embedding(20, 6), nn.Linear(6, 3)

    def forward(self, input_ids):
        return self.head(self.names(input_ids).mean(1))


class OfTokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.names, self.head = nn.Embedding(20, 6), nn.Linear(6, 3)

    def forward(self, input_ids, attention_mask=None, token_type_ids=None):
        added = 0 if token_type_ids is None else token_type_ids.unsqueeze(-1)
        return self.head(self.names(input_ids) + added)


@pytest.mark.parametrize("make", [ByPadding, WithoutMask])
def test_rows_are_those_of_each_sample_alone(tmp_path, make):
    torch.manual_seed(0)
    model = make().eval()
    store = gaff.harvest(model, table(), ":output", out=tmp_path / "h", batch=4, progress=False)
    for at, row in zip(store.labels["sample"][:].tolist(), store[":output"][:], strict=True):
        torch.testing.assert_close(row, model(torch.tensor([TOKENS[at]]))[0])
    assert sorted(store.labels["sample"][:].tolist()) == list(range(len(TOKENS)))


def test_padding_has_no_part_in_a_loss_over_labels(tmp_path):
    torch.manual_seed(0)
    model = OfTokens().eval()

    def loss(output, batch):
        return F.cross_entropy(output.flatten(0, 1), batch["labels"].flatten(), reduction="sum")

    store = gaff.harvest(
        model, table(), "head:grad_output", out=tmp_path / "h", batch=4, loss=loss, rows="token",
        sample_norms=["head"], labels={"class": "labels"}, progress=False,
    )  # fmt: skip
    samples, norms = store.labels["sample"][:], store.labels["gradient norm of head.weight"][:]
    assert store.labels["class"][:].min() >= 0
    for at, tokens in enumerate(TOKENS):
        scores = model(torch.tensor([tokens]))
        (gradient,) = torch.autograd.grad(loss(scores, {"labels": torch.tensor([LABELS[at]])}), model.head.weight)
        assert norms[samples == at].unique().tolist() == pytest.approx([gradient.norm().item()], rel=1e-5)


def test_columns_that_a_format_leaves_out_are_no_input(tmp_path):
    torch.manual_seed(0)
    model, data = OfTokens().eval(), table(token_type_ids=LABELS)
    whole = gaff.harvest(model, data, ":output", out=tmp_path / "a", rows="token", batch=1, progress=False)
    data.set_format("torch", columns=["input_ids"])
    less = gaff.harvest(model, data, ":output", out=tmp_path / "b", rows="token", batch=1, progress=False)
    expected = torch.cat([model(torch.tensor([TOKENS[at]]))[0] for at in sorted(range(6), key=LENGTHS.__getitem__)])
    torch.testing.assert_close(less[":output"][:], expected)
    assert not torch.allclose(whole[":output"][:], expected)


class Own(DataLoader[int]):
    """A loader of somebody's own that changes nothing about batches."""

    told: str = ""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.told = "mine"


class Bar:
    """What a progress bar makes of a loader."""

    def __init__(self, iterable):
        self.iterable = iterable

    def __iter__(self):
        yield from self.iterable


def test_samples_have_their_numbers_wherever_a_loader_tells_them(tmp_path):
    data = TensorDataset(torch.randn(12, 4), torch.arange(12))
    model = nn.Sequential(nn.Linear(4, 3))
    store = gaff.harvest(model, Own(data, 4, shuffle=True), "0", out=tmp_path / "a", labels={"i": 1}, progress=False)
    assert torch.equal(store.labels["sample"][:], store.labels["i"][:])
    hidden = BatchSampler(RandomSampler(data), 4, False)
    for at, loader in enumerate(
        [Bar(DataLoader(data, 4, shuffle=True)), DataLoader(data, batch_size=None, sampler=hidden)]
    ):
        with pytest.warns(UserWarning, match="the label 'sample' will be the number in which each came"):
            store = gaff.harvest(model, loader, "0", out=tmp_path / f"{at}", labels={"i": 1}, progress=False)
        assert store.labels["sample"][:].tolist() == list(range(12))
    gaff.harvest(model, Bar(DataLoader(data, 4)), "0", out=tmp_path / "d", labels={"i": 1}, progress=False)  # in order


class Meta:
    """An object whose text holds its address in memory."""


def labelled(helper, names, batch):
    return {"one": torch.ones(len(batch))}


def test_a_partial_is_the_same_in_another_process(tmp_path):
    model, data = nn.Sequential(nn.Linear(4, 3)), [torch.ones(2, 4)]
    for _ in range(2):  # other objects, as another process has them
        given = partial(labelled, Meta(), {"b", "a"})
        gaff.harvest(model, data, "0", out=tmp_path / "h", labels=given, progress=False)
    with pytest.raises(gaff.PlanError, match="keeps something else"):
        other = partial(labelled, Meta(), {"c"})
        gaff.harvest(model, data, "0", out=tmp_path / "h", labels=other, progress=False)


def test_rows_are_asked_for_by_columns_of_tables_and_nothing_else(tmp_path):
    pandas = pytest.importorskip("pandas")
    data = torch.arange(12.0).reshape(6, 2)
    store = gaff.harvest(nn.Identity(), [data], ":output", out=tmp_path / "h", progress=False)
    column = store[":output"]
    frame = pandas.DataFrame({"row": range(6), "loss": [0, 0, 1, 0, 2, 3]})
    assert torch.equal(column[frame[frame.loss > 0.5]["row"]], data[[2, 4, 5]])
    assert torch.equal(column[frame.loss > 0.5], data[[2, 4, 5]])
    for index in ([None], [10**30], ["a"]):
        with pytest.raises(IndexError, match="expected whole numbers, or one bool for each row"):
            column[index]
    with pytest.raises(IndexError, match="no second index"):
        column[torch.tensor(True)]


class Scaling(DataLoader):
    """A loader that changes what it gives, as loaders of graphs and of streams do."""

    def _get_iterator(self):
        return ([2 * one for one in batch] for batch in super()._get_iterator())


def test_a_loader_that_changes_its_batches_is_gone_through_as_it_is(tmp_path):
    x = torch.arange(12.0).reshape(6, 2)
    store = gaff.harvest(nn.Identity(), Scaling(TensorDataset(x), 2), ":output", out=tmp_path / "h",
                         inputs=lambda batch: batch[0], progress=False)  # fmt: skip
    assert torch.equal(store[":output"][:], 2 * x)


class ByNumber:
    """Batches that are asked for by their number."""

    def __getitem__(self, at):
        if at == 3:
            raise IndexError
        return torch.full((2, 4), float(at))


def test_features_of_batches_by_number():
    found = gaff.take(nn.Sequential(nn.Identity()), "0").over(ByNumber(), progress=False)
    assert found["0"][:, 0].tolist() == [0, 0, 1, 1, 2, 2]
