"""Rows and labels of batches that are pairs, that losses write into, and whose columns are called nearly as others."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gaff
from gaff.integrations import harvests, ray, rows


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(20, 4)

    def forward(self, input_ids, attention_mask=None):
        return self.table(input_ids)


IDS, MASK, LABEL = torch.tensor([[5, 6, 7], [8, 0, 0]]), torch.tensor([[1, 1, 1], [1, 0, 0]]), torch.tensor([0, 1])


@pytest.mark.parametrize("form", ["dict", "pair", "inputs"])
def test_the_mask_that_a_model_is_given_tells_padding(tmp_path, form):
    encoded = {"input_ids": IDS, "attention_mask": MASK}
    batch = {"dict": {**encoded, "y": LABEL}, "pair": (encoded, LABEL), "inputs": ["a b c", "d"]}[form]
    more = {
        "dict": {"labels": {"y": "y"}},
        "pair": {"labels": {"y": 1}},
        "inputs": {"inputs": lambda texts: dict(encoded)},
    }[form]
    store = gaff.harvest(Tokens(), [batch], "table", rows="token", out=tmp_path / "acts", progress=False, **more)
    assert store.rows == 4
    assert store.labels["token"][:].tolist() == [5, 6, 7, 8]
    assert store.labels["position"][:].tolist() == [0, 1, 2, 0]


def test_labels_are_told_as_they_came_though_a_loss_writes_into_them(tmp_path):
    model, x, y = nn.Linear(4, 5), torch.randn(6, 4), torch.tensor([0, 1, 2, 0, 3, 4])

    def loss(output, batch):
        target = batch[1]
        target[target == 0] = -100
        return F.cross_entropy(output, target, reduction="sum")

    data = [(x, y.clone())]
    for _ in range(2):  # the same call again is accepted
        store = gaff.harvest(
            model, data, ":grad_output", loss=loss, out=tmp_path / "acts", labels={"y": 1}, progress=False
        )
        assert store.labels["y"][:].tolist() == y.tolist()


@pytest.mark.parametrize("dtype", [None, "float16", "bfloat16", "int8", "float8_e4m3fn"])
@pytest.mark.filterwarnings("ignore:.*infinity")
def test_the_largest_numbers_are_picked_before_they_are_rounded(tmp_path, dtype):
    x = torch.tensor([[7e4, 1.0, 1e9, 3.0], [1.0, 2.0001, 2.0003, 0.0]])
    store = gaff.harvest(nn.Identity(), [x], ":output", top=1, dtype=dtype, out=tmp_path / "acts", progress=False)
    assert store.labels["place of :output"][:].tolist() == [[2], [2]]


def test_a_column_that_is_the_mask_alone_does_not_go_to_the_model(tmp_path):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 6)

        def forward(self, x):
            return self.fc(x)

    keep = torch.tensor([[True, False, True], [True, True, False]])
    store = gaff.harvest(
        Model(), [{"x": torch.randn(2, 3, 4), "keep": keep}], "fc", rows="token", mask="keep", out=tmp_path / "acts",
        progress=False,
    )  # fmt: skip
    assert store.rows == 4


def test_masks_and_weights_of_labels_are_no_labels(tmp_path):
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_dict(
        {"input_ids": [[1, 2, 3, 4], [5, 6]], "labels": [[1, 2, 0, 1], [2, 2]], "label_mask": [[1, 0, 1, 1], [1, 1]],
         "target_weights": [[1, 2, 3, 4], [5, 6]]}
    )  # fmt: skip
    seen = {}

    def loss(output, batch):
        seen.update({name: value.tolist() for name, value in batch.items()})
        return output.sum()

    gaff.harvest(Tokens(), table, "table:grad_output", loss=loss, rows="token", out=tmp_path / "acts", progress=False)
    assert [2, 2, -100, -100] in seen["labels"]
    assert [1, 1, 0, 0] in seen["label_mask"]
    assert [5, 6, 0, 0] in seen["target_weights"]


def test_a_text_is_no_list_of_sites(tmp_path):
    store = gaff.harvest(
        nn.Sequential(nn.Linear(2, 2)), [torch.randn(3, 2)], "0", out=tmp_path / "acts", progress=False
    )
    with pytest.raises(gaff.PlanError, match="sites='0' is a text"):
        harvests.to_numpy(store, tmp_path / "numpy", sites="0")
    with pytest.raises(gaff.PlanError, match="is a text: expected a list of patterns"):
        rows.site_filter("**:grad")


def test_features_of_whole_numbers_are_refused():
    with pytest.raises(gaff.PlanError, match="no floating type"):
        ray.Extract(lambda: nn.Linear(2, 2), [":output"], ["x"], dtype=torch.int8)


class TwoTexts(nn.Module):
    """The embedded tokens of two texts of a batch."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Embedding(100, 3), nn.Embedding(100, 3)

    def forward(self, input_ids, attention_mask, decoder_input_ids=None, decoder_attention_mask=None):
        self.first(input_ids)
        return self.second(input_ids if decoder_input_ids is None else decoder_input_ids)


PADDED = {
    "input_ids": torch.tensor([[0, 0, 11, 12], [0, 13, 14, 15]]),
    "attention_mask": torch.tensor([[0, 0, 1, 1], [0, 1, 1, 1]]),
    "decoder_input_ids": torch.tensor([[21, 22, 23, 0], [24, 25, 0, 0]]),
    "decoder_attention_mask": torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]]),
}


def harvested(tmp_path, site, batch=PADDED, **options):
    return gaff.harvest(TwoTexts(), [batch], site, out=tmp_path / "acts", progress=False, **options)


@pytest.mark.parametrize(
    ("mask", "tokens", "positions"),
    [
        ("decoder_attention_mask", [21, 22, 23, 24, 25], [0, 1, 2, 0, 1]),
        ("attention_mask", [11, 12, 13, 14, 15], [0, 1, 0, 1, 2]),
    ],
)
def test_tokens_and_positions_are_those_of_the_text_whose_mask_was_named(tmp_path, mask, tokens, positions):
    store = harvested(tmp_path, "second", rows="token", mask=mask)
    assert store.labels["token"][:].tolist() == tokens
    assert store.labels["position"][:].tolist() == positions


def test_a_mask_of_one_of_two_texts_is_to_be_named(tmp_path):
    with pytest.raises(gaff.PlanError, match="and 'decoder_attention_mask' of the same shape"):
        harvested(tmp_path, "second", rows="token")
    longer = {**PADDED, "decoder_input_ids": torch.ones(2, 5).long(), "decoder_attention_mask": torch.ones(2, 5).long()}
    with pytest.raises(gaff.SiteError, match="mask='decoder_attention_mask' is of another text"):
        harvested(tmp_path / "longer", "second", longer, rows="token")


def test_tokens_of_positions_are_told_where_there_is_one_text(tmp_path):
    one = {name: PADDED[name] for name in ("input_ids", "attention_mask")}
    assert harvested(tmp_path / "one", "first", one, rows="position").labels["token"][:].tolist() == [
        0,
        0,
        11,
        12,
        0,
        13,
        14,
        15,
    ]
    assert "token" not in harvested(tmp_path / "two", "second", rows="position").labels


def test_tokens_of_a_mask_without_ids_of_its_own_are_left_out(tmp_path):
    without = {name: value for name, value in PADDED.items() if name != "decoder_input_ids"}
    store = harvested(tmp_path, "second", without, rows="token", mask="decoder_attention_mask")
    assert "token" not in store.labels
    assert store.labels["position"][:].tolist() == [0, 1, 2, 0, 1]
