"""Harvests at their edges: what is given twice, resumed, read while files change, and what random numbers come after."""

import os
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader, TensorDataset

import gaff
from gaff import keep
from gaff.errors import PlanError, RecordError


class Asks(nn.Module):
    """Returns another number where its two arguments are one tensor."""

    def forward(self, query, key):
        return query + (1.0 if query is key else 2.0)


class Rare(nn.Module):
    """Tokens as vectors, times a setting that has no name in the state."""

    def __init__(self):
        super().__init__()
        self.embed, self.hidden, self.scale = nn.Embedding(100, 4), nn.Identity(), 1.0

    def forward(self, input_ids):
        return self.hidden(self.embed(input_ids) * self.scale)


def test_a_tensor_that_is_given_twice_stays_one(tmp_path):
    x = torch.zeros(2, 3)
    found = gaff.harvest(Asks(), [{"x": x}], ":output", out=tmp_path / "values", inputs=lambda batch: (batch["x"],) * 2)
    assert found[":output"][:].tolist() == torch.ones(2, 3).tolist()


def test_the_state_of_a_loader_is_of_that_loader(tmp_path):
    store = gaff.harvest(nn.Identity(), [torch.randn(100, 3)], ":output", out=tmp_path / "rows")
    one = store.loader(":output", batch=16, shuffle=1)
    pass_ = iter(one)
    for _ in range(3):
        next(pass_)
    state = one.state_dict()
    same = store.loader(":output", batch=16, shuffle=1)
    same.load_state_dict(state)
    assert torch.equal(torch.cat(list(same)), torch.cat(list(pass_)))
    for name, other in (("batch", {"batch": 32, "shuffle": 1}), ("shuffle", {"batch": 16, "shuffle": 2})):
        with pytest.raises(PlanError, match=f"of a loader with {name}="):
            store.loader(":output", **other).load_state_dict(state)


@pytest.mark.parametrize("is_indexed", [True, False])
def test_a_setting_is_compared_by_the_first_batch_that_gives_rows(tmp_path, is_indexed):
    torch.manual_seed(0)
    model = Rare().eval()
    ids = torch.cat([torch.randint(0, 90, (8, 6)), torch.randint(80, 100, (24, 6))])
    batches = [{"input_ids": one} for one in ids.split(4)]
    loader = DataLoader([{"input_ids": one} for one in ids], batch_size=4)

    def harvest():
        data = loader if is_indexed else batches
        return gaff.harvest(model, data, "hidden", out=tmp_path / "rows", rows=lambda b: b["input_ids"] >= 90, shard=4)

    whole = harvest()
    assert len(whole["hidden"]) > 20
    for name in ("000001", "end.json"):
        found = next((tmp_path / "rows").rglob(name))
        found.rename(tmp_path / name)
    model.scale = 3.0
    with pytest.raises(RecordError, match="the first batch of shard 0 gives other rows"):
        harvest()
    model.scale = 1.0
    assert torch.equal(harvest()["hidden"][:], whole["hidden"][:])


def test_a_feature_that_is_another_in_every_row_is_noticed(tmp_path):
    class Scales(nn.Module):
        factor = 1.0

        def forward(self, x):
            return torch.cat([x[:, :7], x[:, 7:8] * self.factor, x[:, 8:]], 1)

    model, x = Scales(), torch.randn(20, 1024)
    gaff.harvest(model, [x, x], ":output", out=tmp_path / "rows", shard=1, dtype="bfloat16")
    next((tmp_path / "rows").rglob("000001")).rename(tmp_path / "gone")
    next((tmp_path / "rows").rglob("end.json")).rename(tmp_path / "end")
    model.factor = 1.3
    with pytest.raises(RecordError, match="gives other rows"):
        gaff.harvest(model, [x, x], ":output", out=tmp_path / "rows", shard=1, dtype="bfloat16")


def test_packed_sequences_are_refused(tmp_path):
    packed = pack_sequence([torch.randn(3, 4), torch.randn(2, 4)])
    with pytest.raises(PlanError, match="rows are steps of several samples"):
        gaff.harvest(nn.GRU(4, 5), [[packed]], ":output[0]", out=tmp_path / "rows")


@pytest.mark.parametrize("own", [True, False])
def test_random_numbers_are_the_same_afterwards_whatever_was_there(tmp_path, own):
    generator = torch.Generator() if own else None
    loader = DataLoader(TensorDataset(torch.randn(20, 3)), batch_size=4, shuffle=True, generator=generator)

    def after():
        torch.manual_seed(3)
        if generator is not None:
            generator.manual_seed(5)
        gaff.harvest(nn.Identity(), loader, ":output", out=tmp_path / "rows")
        return torch.rand(()).item(), None if generator is None else torch.rand((), generator=generator).item()

    assert after() == after()


def test_norms_and_sums_of_half_precision_are_beyond_its_range():
    x = torch.full((2, 1000, 1000), 100.0)
    for dtype in (torch.float16, torch.bfloat16):
        torch.testing.assert_close(keep.norm(1, 2)(x.to(dtype)), torch.full((2,), 1e5), rtol=1e-3, atol=0)
        torch.testing.assert_close(keep.Reduce("sum", (1, 2))(x.to(dtype)), torch.full((2,), 1e8), rtol=1e-3, atol=0)
        assert keep.mean(1, 2)(x.to(dtype)).dtype == dtype


def test_a_file_that_is_cut_short_while_it_is_open_or_cannot_be_opened(tmp_path, monkeypatch):
    store = gaff.harvest(nn.Identity(), [torch.randn(4000, 64)], ":output", out=tmp_path / "rows")
    rows = store[":output"]
    first = rows[:5]
    pickle.loads(pickle.dumps(store.loader(":output", batch=16)))
    [file] = (tmp_path / "rows").rglob("%3Aoutput.safetensors")
    size = file.stat().st_size
    os.truncate(file, 8192)
    with pytest.raises(RecordError, match="has been cut short"):
        rows[3000:3010]
    os.truncate(file, size)
    assert torch.equal(rows[:5], first)

    def full(*args, **kwargs):
        raise OSError(24, "Too many open files")

    again = gaff.load(tmp_path / "rows")[":output"]
    monkeypatch.setattr(torch, "from_file", full)
    with pytest.raises(RecordError, match=r"cannot be read just now.*Too many open files"):
        again[:2]


def test_the_largest_of_unsigned_numbers_and_a_loss_in_inference_mode(tmp_path):
    x = torch.tensor([[1, 60_000, 7], [3, 2, 40_000]], dtype=torch.uint16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = gaff.harvest(nn.Identity(), [x], ":output", out=tmp_path / "rows", top=2)
    assert found[":output"][:].tolist() == [[60_000, 7], [40_000, 3]]
    model = nn.Linear(3, 2)
    with torch.inference_mode(), pytest.raises(PlanError, match=r"in torch.inference_mode\(\)"):
        gaff.harvest(model, [torch.randn(4, 3)], ":grad_output", out=tmp_path / "gradients",
                     loss=lambda output, batch: output.sum())  # fmt: skip


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("size", [1, 3])
def test_positions_do_not_depend_on_who_shares_the_batch(side, size, tmp_path):
    texts = [[5, 6, 7], [1, 2, 3, 4, 8, 9], [3, 2]]

    def batches():
        for at in range(0, 3, size):
            longest = max(map(len, texts[at : at + size]))
            padded = []
            for text in texts[at : at + size]:
                fill = [0] * (longest - len(text))
                padded.append(fill + text if side == "left" else text + fill)
            ids = torch.tensor(padded)
            yield {"input_ids": ids, "attention_mask": (ids > 0).long()}

    def of(name, **options):
        model = torch.nn.Embedding(10, 2)
        inputs = lambda batch: batch["input_ids"]  # noqa: E731
        return gaff.harvest(model, batches(), ":output", out=tmp_path / name, inputs=inputs, **options).labels

    every = of("tokens", rows="token")
    assert every["position"][:].tolist() == [0, 1, 2, 0, 1, 2, 3, 4, 5, 0, 1]
    assert every["token"][:].tolist() == [one for text in texts for one in text]
    chosen = of("chosen", rows=lambda batch: batch["input_ids"] % 2 == 1)
    assert chosen["position"][:].tolist() == [0, 2, 0, 2, 5, 0]
    if size == 3:
        assert of("all", rows="position")["position"][:].tolist() == [0, 1, 2, 3, 4, 5] * 3


def test_a_mask_of_planes_tells_the_place_in_the_plane(tmp_path):
    x = torch.arange(24.0).reshape(2, 3, 4, 1)
    store = gaff.harvest(torch.nn.Identity(), [x], ":output", out=tmp_path, rows=lambda batch: batch[..., 0] % 5 == 0)
    places = store.labels["sample"][:] * 12 + store.labels["position"][:]
    assert places.tolist() == store[":output"][:][:, 0].tolist() == [0, 5, 10, 15, 20]


def test_rows_that_another_process_has_not_written_are_warned_of(tmp_path):
    data = torch.arange(40.0).view(10, 4)
    model = nn.Linear(4, 2)
    gaff.harvest(model, [data[at : at + 2] for at in range(0, 10, 2)], ":output", out=tmp_path / "acts", shard=2)
    store = gaff.load(tmp_path / "acts")
    assert len(store[":output"][:]) == 10
    del store.shards[1]
    with pytest.warns(
        UserWarning, match="has no rows of 2 of the batches before those that are there: another process"
    ):
        store[":output"]
    store[":output"]  # told once
