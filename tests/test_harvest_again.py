"""A harvest that is begun again hands out what lies there only where the same call would make the same."""

import random

import numpy
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, SubsetRandomSampler, TensorDataset, WeightedRandomSampler

import gaff

ROWS = 40
VALUES = torch.arange(ROWS, dtype=torch.float32).reshape(ROWS, 1)


class Own(torch.utils.data.Sampler):
    """Any order of any samples; ``is_random``: shuffled each time, by Python's random numbers."""

    def __init__(self, numbers, *, is_random=False):
        self.numbers, self.is_random = list(numbers), is_random

    def __iter__(self):
        numbers = list(self.numbers)
        if self.is_random:
            random.shuffle(numbers)
        return iter(numbers)

    def __len__(self):
        return len(self.numbers)


def pairs(numbers):
    return [list(numbers[at : at + 4]) for at in range(0, len(numbers), 4)]


def harvest(out, data, **options):
    return gaff.harvest(nn.Identity(), data, ":output", out=out, shard=2, **options)


def loader(rows=ROWS, **options):
    return DataLoader(TensorDataset(VALUES[:rows]), **{"batch_size": 4, **options})


FIRST, OTHERS = range(20), range(20, 40)
SAMPLERS = {
    "random subset": lambda of: {"sampler": SubsetRandomSampler(of)},
    "own": lambda of: {"sampler": Own(of)},
    "own, shuffled": lambda of: {"sampler": Own(of, is_random=True)},
    "a list": lambda of: {"sampler": list(of)},
    "a list of batches": lambda of: {"batch_sampler": pairs(list(of)), "batch_size": 1},
}


@pytest.mark.parametrize("accept_changes", [False, True])
@pytest.mark.parametrize("kind", SAMPLERS)
def test_other_samples_of_the_same_data_are_another_harvest(kind, accept_changes, tmp_path):
    store = harvest(tmp_path / "acts", loader(**SAMPLERS[kind](FIRST)))
    assert sorted(store.labels["sample"][:].tolist()) == list(FIRST)
    again = harvest(tmp_path / "acts", loader(**SAMPLERS[kind](FIRST)))
    assert torch.equal(again.labels["sample"][:], store.labels["sample"][:])
    with pytest.raises(
        gaff.PlanError, match=r"gives other samples .* \(20 then, 20 now, such as sample 20\): expected"
    ):
        harvest(tmp_path / "acts", loader(**SAMPLERS[kind](OTHERS)), accept_changes=accept_changes)


def test_one_that_draws_other_samples_each_time_goes_on_with_the_first(tmp_path):
    def drawing(weights, count=20):
        return loader(sampler=WeightedRandomSampler(weights, count))

    store = harvest(tmp_path / "acts", drawing(torch.ones(ROWS)))
    torch.randn(7)
    assert torch.equal(
        harvest(tmp_path / "acts", drawing(torch.ones(ROWS))).labels["sample"][:], store.labels["sample"][:]
    )
    with pytest.raises(gaff.PlanError, match=r"begun otherwise: data.weights: "):
        harvest(tmp_path / "acts", drawing(torch.arange(1.0, ROWS + 1)))
    with pytest.raises(gaff.PlanError, match=r"20 then, 24 now"):
        harvest(tmp_path / "acts", drawing(torch.ones(ROWS), 24), accept_changes=True)
    halves = harvest(tmp_path / "halves", loader(shuffle=True, drop_last=True, batch_size=16))  # leaves out others
    assert len(harvest(tmp_path / "halves", loader(shuffle=True, drop_last=True, batch_size=16)).labels["sample"]) == 32
    assert halves.rows == 32


@pytest.mark.parametrize("rows", [20, 36])
def test_data_that_has_grown_or_shrunk_is_another_harvest_even_where_changes_are_accepted(rows, tmp_path):
    harvest(tmp_path / "acts", loader(28))
    with pytest.raises(gaff.PlanError, match=f"28 then, {rows} now, such as sample {min(rows, 28)}"):
        harvest(tmp_path / "acts", loader(rows), accept_changes=True)


def test_a_batch_sampler_that_refills_one_list(tmp_path):
    class Refilling:
        def __iter__(self):
            batch = []
            for number in range(ROWS):
                batch.append(number)
                if len(batch) == 4:
                    yield batch
                    batch.clear()

        def __len__(self):
            return ROWS // 4

    store = harvest(tmp_path / "acts", loader(batch_sampler=Refilling(), batch_size=1))
    assert store.labels["sample"][:].tolist() == list(range(ROWS))
    assert torch.equal(store[":output"][:], VALUES)


@pytest.mark.parametrize("kind", ["list", "array", "texts"])
def test_a_label_that_is_no_tensor_is_compared_too(kind, tmp_path):
    def batches(of_batch_3):
        for number in range(5):
            label = [of_batch_3 if number == 3 else 1, 2]
            if kind == "array":
                label = numpy.array(label)
            yield {"x": torch.ones(2, 1) * number, "y": list(map(str, label)) if kind == "texts" else label}

    def labelled(value):
        def labels(batch):
            return {"y": [int(one) for one in batch["y"]]}

        return harvest(tmp_path / "acts", batches(value), labels=labels, inputs=lambda batch: batch["x"])

    assert labelled(5).labels["y"][:].tolist() == [1, 2, 1, 2, 1, 2, 5, 2, 1, 2]
    assert labelled(5).rows == 10
    with pytest.raises(gaff.RecordError, match="of the data are not what they were when shard 1 was written"):
        labelled(99)


@pytest.mark.parametrize("later", [2, 0, 4])
def test_a_function_that_keeps_more_or_fewer_rows_is_told(later, tmp_path):
    def some(kept):
        def rows(batch):
            return torch.arange(4) < kept

        return harvest(tmp_path / "acts", loader(), rows=rows)

    assert some(3).rows == 30
    assert some(3).rows == 30
    with pytest.raises(gaff.RecordError, match="the first batch of shard 0 gives other rows than it did"):
        some(later)


def test_labels_that_come_or_go_are_told(tmp_path):
    def labelled(*names):
        return harvest(tmp_path / "acts", loader(), labels=lambda batch: dict.fromkeys(names, batch[0][:, 0]))

    labelled("a")
    for names in (("a", "b"), ()):
        with pytest.raises(gaff.RecordError, match=r"^[ab]: the first batch of shard 0 gives other rows than it did"):
            labelled(*names)


def test_what_is_whole_is_not_made_anew_for_another_model_and_that_is_told(tmp_path):
    torch.manual_seed(0)
    models = [nn.Linear(1, 2), nn.Linear(1, 2)]
    store = gaff.harvest(models[0], loader(), ":output", out=tmp_path)
    with pytest.warns(
        UserWarning, match="nothing was left to make, and all rows are from before .* model.weights: oth"
    ):
        again = gaff.harvest(models[1], loader(), ":output", out=tmp_path, accept_changes=True)
    assert torch.equal(again[":output"][:], store[":output"][:])


def test_a_label_of_a_batch_does_not_go_to_a_compiled_model(tmp_path):
    class Net(nn.Module):
        def forward(self, x):
            return x * 2

    data = [{"x": torch.ones(2, 1), "y": torch.tensor([3, 4])}]
    model = torch.compile(Net(), backend="eager")
    assert gaff.harvest(model, data, ":output", out=tmp_path, labels={"y": "y"}).labels["y"][:].tolist() == [3, 4]


class Merging(nn.Linear):
    """Low-rank factors that are merged into the weight in evaluation mode, as in Microsoft's loralib."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.low, self.is_merged = nn.Parameter(torch.randn(sizes[1], sizes[0])), False

    def train(self, mode=True):
        super().train(mode)
        if self.is_merged == mode:
            self.weight.data += -self.low if mode else self.low
            self.is_merged = not mode
        return self

    def forward(self, x):
        weight = self.weight if self.is_merged else self.weight + self.low
        return nn.functional.linear(x, weight, self.bias)


def test_layers_that_act_in_train_are_in_training_afterwards(tmp_path):
    model = nn.Sequential(Merging(1, 2), nn.Dropout(), Merging(2, 2))
    model[2].eval()
    gaff.harvest(model, loader(), "0", out=tmp_path)
    assert [one.training for one in model] == [True, True, False]
    assert [model[0].is_merged, model[2].is_merged] == [False, True]


def test_a_shard_is_there_before_the_next_batch_is_asked_for(tmp_path):
    def batches():
        for number in range(4):
            if number == 2:
                assert (tmp_path / "acts" / "shards" / "000000").is_dir()
                raise KeyboardInterrupt
            yield torch.ones(2, 1)

    with pytest.raises(KeyboardInterrupt):
        harvest(tmp_path / "acts", batches())
