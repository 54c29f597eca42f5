"""``gaff.harvest``: what is on disk is what passed, once, in files that others read; what is damaged is told."""

import json
import os
import random
import shutil
import signal
import time
from contextlib import nullcontext
from functools import partial

import numpy
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

import gaff
from gaff.cli import main
from gaff.harvesting import making

ROWS, WIDTH = 210, 8


class Tokens(nn.Module):
    """Blocks over sequences: ``[samples, positions, width]``, and one row a sample at its end."""

    def __init__(self):
        super().__init__()
        self.embed, self.block, self.drop = nn.Embedding(50, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, input_ids, attention_mask=None):
        hidden = self.drop(self.block(self.embed(input_ids)))
        return self.head(hidden.mean(1))


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 3))


def table(rows=ROWS):
    made = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(rows, 4, generator=made), torch.randint(0, 3, (rows,), generator=made))


def loader(**options):
    return DataLoader(table(), **{"batch_size": 16, **options})


def texts():
    made = torch.Generator().manual_seed(2)
    for size in (5, 3, 7, 4):
        ids = torch.randint(1, 50, (6, size), generator=made)
        mask = torch.arange(size) < torch.randint(1, size + 1, (6, 1), generator=made)
        yield {"input_ids": ids * mask, "attention_mask": mask.long()}


def labelled():
    return ({**batch, "kind": torch.arange(6) % 2} for batch in texts())


def flat(lists):
    return [one for several in lists for one in several]


def tree(folder):
    return {one.relative_to(folder).as_posix(): one.read_bytes() for one in folder.rglob("*") if one.is_file()}


@pytest.mark.parametrize("options", [{}, {"shuffle": True}, {"num_workers": 2}, {"drop_last": True}])
def test_rows_are_what_passed_and_samples_are_those_of_the_data_set(tmp_path, options):
    model, data = net(), loader(**options)
    store = gaff.harvest(model, data, "0", "1", out=tmp_path / "acts", labels={"target": 1}, shard=3)
    samples = store.labels["sample"][:]
    x, y = data.dataset.tensors
    assert sorted(samples.tolist()) == sorted(set(samples.tolist()))
    assert len(samples) == store.rows == (ROWS // 16 * 16 if options.get("drop_last") else ROWS)
    torch.testing.assert_close(store["0"][:], model[0](x[samples]).detach())
    torch.testing.assert_close(store["1"][:], model[0](x[samples]).detach().relu())
    assert torch.equal(store.labels["target"][:], y[samples])
    assert store.is_complete
    assert store.check() == []


def test_the_bits_are_those_of_the_batch_that_was_run(tmp_path):
    model = net()
    store = gaff.harvest(model, loader(), "0", out=tmp_path / "acts")
    with torch.no_grad():
        expected = torch.cat([model[0](x) for x, _ in loader()])
    assert torch.equal(store["0"][:], expected)


def test_any_reader_of_safetensors_opens_a_shard(tmp_path):
    store = gaff.harvest(net(), loader(), "0", out=tmp_path / "acts", shard=4)
    parts = [load_file(tmp_path / "acts" / "shards" / f"{n:06d}" / "0.safetensors")["0"] for n in range(4)]
    assert torch.equal(torch.cat(parts), store["0"][:])


def test_tokens_without_padding_and_what_is_known_of_each(tmp_path):
    model = Tokens()
    store = gaff.harvest(
        model, labelled(), "block", "drop", out=tmp_path / "acts", rows="token", labels={"kind": "kind"}
    )
    model.eval()
    rows, known = [], []
    for number, batch in enumerate(texts()):
        hidden = model.block(model.embed(batch["input_ids"]))
        for sample, position in batch["attention_mask"].nonzero().tolist():
            rows.append(hidden[sample, position])
            token = int(batch["input_ids"][sample, position])
            known.append((6 * number + sample, position, token, sample % 2))
    torch.testing.assert_close(store["block"][:], torch.stack(rows).detach())
    assert torch.equal(store["drop"][:], store["block"][:])  # in evaluation mode
    names = ("sample", "position", "token", "kind")
    assert list(zip(*(store.labels[name][:].tolist() for name in names), strict=True)) == known


def test_modes_of_modules_are_as_before(tmp_path):
    model = Tokens()
    model.drop.eval()
    gaff.harvest(model, texts(), "block", out=tmp_path / "acts", rows="position")
    assert (model.training, model.block.training, model.drop.training) == (True, True, False)


def test_positions_keep_padding_and_a_function_chooses_rows(tmp_path):
    all_of_them = gaff.harvest(Tokens(), texts(), "block", out=tmp_path / "all", rows="position")
    assert all_of_them.rows == 6 * (5 + 3 + 7 + 4)
    last = gaff.harvest(Tokens(), texts(), "block", out=tmp_path / "last",
                        rows=lambda batch: F.one_hot(batch["attention_mask"].sum(1) - 1, batch["input_ids"].shape[1]))  # fmt: skip
    assert last.rows == 24
    assert last.labels["sample"][:].tolist() == list(range(24))


def test_gradients_of_every_sample_and_none_of_them_stays(tmp_path):
    model = net()
    model[0].weight.grad = kept = torch.ones_like(model[0].weight)
    store = gaff.harvest(model, loader(), "1:grad_output", "1", out=tmp_path / "acts",
                         loss=lambda output, batch: F.cross_entropy(output, batch[1], reduction="sum"))  # fmt: skip
    x, y = table().tensors
    hidden = model[1](model[0](x))
    expected = torch.autograd.grad(F.cross_entropy(model[2](hidden), y, reduction="sum"), hidden)[0]
    torch.testing.assert_close(store["1:grad_output"][:], expected)
    assert model[0].weight.grad is kept
    assert bool((kept == 1).all())
    assert model[2].weight.grad is None


def test_reduced_and_in_another_dtype_at_the_source(tmp_path):
    store = gaff.harvest(Tokens(), texts(), "block", out=tmp_path / "acts", reduce=gaff.keep.mean(1), dtype="bfloat16")
    assert store["block"].dtype == torch.bfloat16
    assert list(store["block"].shape) == [24, WIDTH]


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_harvest_that_was_killed_ends_with_the_bytes_of_one_that_was_not(tmp_path, shuffle):
    """A child process does it and is killed at any moment, again and again; the order of the first start counts."""
    model = net()

    def harvest(folder):
        data = loader(shuffle=shuffle, generator=torch.Generator().manual_seed(3))
        return gaff.harvest(model, data, "0", "2", out=folder, labels={"target": 1}, shard=2, progress=False)

    whole, killed, kills = tmp_path / "whole", tmp_path / "killed", 0
    begun = time.perf_counter()
    harvest(whole)
    took, drawn = time.perf_counter() - begun, random.Random(0)
    for _ in range(200):
        child = os.fork()
        if child == 0:
            torch.set_num_threads(1)
            try:
                harvest(killed)
            finally:
                os._exit(0)
        time.sleep(drawn.uniform(0, took / 3))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        kills += os.WIFSIGNALED(status)
        if (killed / "harvest.json").exists():
            assert gaff.load(killed).check() == []  # whatever is there is right
        if kills >= 12:
            break
    assert kills >= 12
    assert harvest(killed).is_complete
    expected = tree(whole)
    assert {name: one for name, one in tree(killed).items() if not name.startswith("order")} == {
        name: one for name, one in expected.items() if not name.startswith("order")
    }


def test_what_is_there_is_not_run_again(tmp_path):
    model, calls = net(), []
    model.register_forward_pre_hook(lambda *_: calls.append(1))
    gaff.harvest(model, loader(), "0", out=tmp_path / "acts", shard=4)
    assert len(calls) == 14
    shutil.rmtree(tmp_path / "acts" / "shards" / "000001")
    gaff.harvest(model, loader(), "0", out=tmp_path / "acts", shard=4)
    assert len(calls) == 14 + 1 + 4  # the first batch that is there, to see that the model gives what it gave


def test_an_iterable_goes_on_where_it_was(tmp_path):
    model = Tokens()
    gaff.harvest(model, texts(), "block", out=tmp_path / "again", rows="token", shard=2)
    before = tree(tmp_path / "again")
    shutil.rmtree(tmp_path / "again" / "shards" / "000001")
    (tmp_path / "again" / "end.json").unlink()
    gaff.harvest(model, texts(), "block", out=tmp_path / "again", rows="token", shard=2)
    assert tree(tmp_path / "again") == before


def test_data_that_is_another_is_told(tmp_path):
    model, out = Tokens(), tmp_path / "acts"
    gaff.harvest(model, texts(), "block", out=out, rows="token", shard=2)
    batches = list(texts())
    batches[1]["input_ids"] = batches[1]["input_ids"] + 1
    with pytest.raises(gaff.errors.RecordError, match="batches 0 to 1 of the data are not what they were when shard 0"):
        gaff.harvest(model, (one for one in batches), "block", out=out, rows="token", shard=2)
    with pytest.raises(gaff.PlanError, match=r"data.iterable: 'builtins.generator', now 'builtins.list'"):
        gaff.harvest(model, list(texts())[:3], "block", out=out, rows="token", shard=2)
    with pytest.raises(gaff.errors.RecordError, match="shard 1 holds batches 2 to 3, and the data has 3 now"):
        gaff.harvest(model, (one for one in list(texts())[:3]), "block", out=out, rows="token", shard=2)


@pytest.mark.parametrize("changed", ["weights", "data.fingerprint", "batch_size", "sites", "options.rows"])
def test_what_has_changed_is_told_and_refused(tmp_path, changed):
    model, out = net(), tmp_path / "acts"
    gaff.harvest(model, loader(), "0", out=out, shard=4)
    sites, data, options = ["0"], loader(), {"shard": 4}
    if changed == "weights":
        with torch.no_grad():
            model[2].bias += 1
    elif changed == "data.fingerprint":
        data.dataset.tensors[0][3, 1] += 1
    elif changed == "batch_size":
        data = loader(batch_size=8)
    elif changed == "sites":
        sites = ["1"]
    else:
        options["rows"] = "position"
    with pytest.raises(gaff.PlanError, match=changed):
        gaff.harvest(model, data, *sites, out=out, **options)
    if changed in ("weights", "data.fingerprint"):
        shutil.rmtree(out / "shards" / "000002")
        store = gaff.harvest(model, data, *sites, out=out, accept_changes=True, **options)
        assert store.is_complete
        assert changed in store.changes[0]
        assert store.changes[0].startswith("shard 2: ")


@pytest.mark.parametrize("damage", ["bit", "short", "long", "gone", "header", "other", "json"])
def test_a_damaged_shard_is_refused_by_name(tmp_path, damage):
    out = tmp_path / "acts"
    gaff.harvest(net(), loader(), "0", out=out, shard=4)
    file = out / "shards" / "000001" / "0.safetensors"
    data = bytearray(file.read_bytes())
    if damage == "bit":
        data[-1] ^= 1
    elif damage == "short":
        data = data[:-1]
    elif damage == "long":
        data += b"\0"
    elif damage == "header":
        data[20] ^= 1
    elif damage == "other":
        data = bytearray((out / "shards" / "000000" / "0.safetensors").read_bytes())
    file.write_bytes(data)
    if damage == "gone":
        file.unlink()
    if damage == "json":
        file = out / "shards" / "000001" / "shard.json"
        file.write_text(file.read_text()[:-5])
    if damage in ("bit", "header", "other"):  # found when they are read, and not before
        store = gaff.load(out)
        assert store["0"][:64].shape == (64, WIDTH)
        assert len(store.check()) == 1
        with pytest.raises(gaff.errors.RecordError, match="000001/0.safetensors"):
            store["0"][64 + 63]
        with pytest.raises(gaff.errors.RecordError, match="000001/0.safetensors"):
            store["0"][[1, 64 + 63, 2]]
    else:
        with pytest.raises(gaff.errors.RecordError, match=f"000001/{file.name}"):
            gaff.load(out)


def test_rows_are_read_by_number_slice_list_and_mask(tmp_path):
    store = gaff.harvest(net(), loader(), "0", out=tmp_path / "acts", shard=2)
    column, whole = (
        store["0"],
        torch.cat([load_file(one)["0"] for one in sorted((tmp_path / "acts").rglob("0.safetensors"))]),
    )
    assert torch.equal(column[:], whole)
    for index in (0, 5, 64, -1, torch.tensor(33), slice(3, 40), slice(-5, None), slice(30, 10), slice(None, None, 7),
                  slice(None, None, 3), [1, 200, 33, 33, -1], [], torch.tensor([100, 3]), whole[:, 0] > 0):  # fmt: skip
        expected = torch.tensor([], dtype=torch.int64) if isinstance(index, list) and not index else index
        assert torch.equal(column[index], whole[expected]), index
    assert torch.equal(column[::-1], whole.flip(0))
    assert torch.equal(torch.stack(list(column)), whole)
    for outside in (ROWS, -ROWS - 1, [0, ROWS], torch.ones(3, dtype=torch.bool), 1.5, [[1]]):
        with pytest.raises((IndexError, TypeError)):
            column[outside]
    for index in (0, slice(0, 5), [0, 1]):
        column[index].zero_()  # the reader's own
        assert torch.equal(column[0], whole[0])


def test_nothing_but_what_was_harvested_can_be_asked_for(tmp_path):
    store = gaff.harvest(net(), loader(), "0", out=tmp_path / "acts")
    with pytest.raises(gaff.SiteError, match=r"'2' is not in .*: expected one of 0"):
        store["2"]
    with pytest.raises(gaff.SiteError, match="'kind' is no label of .*: expected one of sample"):
        store.loader("0", labels=["kind"])


@pytest.mark.parametrize("policy", ["count", "mark", "refuse"])
def test_rows_that_are_not_finite(tmp_path, policy):
    model, data = net(), table()
    data.tensors[0][37, 0] = float("nan")
    batches = DataLoader(data, batch_size=16)
    out = tmp_path / "acts"
    if policy == "refuse":
        with pytest.raises(gaff.PlanError, match="0: a NaN or an infinity in batch 2, sample 37"):
            gaff.harvest(model, batches, "0", out=out, nonfinite=policy)
        return
    with pytest.warns(UserWarning, match="0: 1 of 210 rows hold a NaN or an infinity"):
        store = gaff.harvest(model, batches, "0", out=out, nonfinite=policy)
    assert store.nonfinite == {"0": 1}
    if policy == "mark":
        assert (~store.labels["finite"][:]).nonzero().flatten().tolist() == [37]


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, "float8_e5m2"])
def test_infinities_are_told_of_rows_in_a_dtype_that_may_have_none(tmp_path, dtype):
    model = nn.Sequential(nn.Identity())
    batch = torch.tensor([[1.0, 2.0], [float("inf"), 1.0], [-float("inf"), 1.0], [float("nan"), 1.0], [400.0, 0.5]])
    with pytest.raises(gaff.PlanError, match="a NaN or an infinity.* in batch 0, sample 1"):
        gaff.harvest(model, [batch], "0", out=tmp_path / "refused", dtype=dtype, nonfinite="refuse")
    with pytest.warns(UserWarning, match="3 of 5 rows hold a NaN or an infinity"):
        store = gaff.harvest(model, [batch], "0", out=tmp_path / "marked", dtype=dtype, nonfinite="mark")
    assert store.labels["finite"][:].tolist() == [True, False, False, False, True]
    kind = getattr(torch, str(dtype).removeprefix("torch."))
    assert torch.equal(store["0"][[0, 4]].float(), batch[[0, 4]].to(kind).float())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"sites": []}, "harvest was given no site"),
        ({"sites": ["9"]}, "'9'"),
        ({"rows": "line"}, "rows='line' is not known"),
        ({"shard": 0}, "shard=0 is no number of batches"),
        ({"nonfinite": "drop"}, "nonfinite='drop' is not known"),
        ({"mask": "m"}, "mask='m' is for rows='token'"),
        ({"sites": ["0:grad_output"]}, "is a gradient: expected loss="),
        ({"loss": len}, "loss= is given and no gradient is asked for"),
        ({"labels": {"kind": 7}}, "label 'kind': the batch has no 7"),
        ({"data": loader(sampler=DistributedSampler(table(), 2, 0))}, "DistributedSampler gives each process other"),
        ({"data": 3}, "data is a int: expected a DataLoader"),
        ({"data": []}, "the data gave no batch"),
        ({"rows": "position"}, r"0: has shape \[16, 8\]"),
        ({"sites": ["0.weight:param"]}, "0.weight:param: belongs to a parameter or a buffer"),
        ({"sites": ["0.bias:grad"], "loss": lambda output, batch: output.sum()}, "belongs to a parameter or a buffer"),
        ({"labels": {"sample": 1}}, "label 'sample' is a name of gaff's own"),
        ({"labels": lambda batch: {"finite": batch[1]}}, "label 'finite' is a name of gaff's own"),
        ({"labels": {"kind": 1}, "data": [(torch.ones(16, 4), torch.ones(3))]}, r"label 'kind' has shape \[3\]"),
    ],
)
def test_what_cannot_be_is_told_and_leaves_no_shard(tmp_path, given, message):
    given = {"sites": ["0"], "data": loader(), **given}
    sites, data = given.pop("sites"), given.pop("data")
    if given.get("rows") == "position":
        data = [torch.randn(16, 4)]
        given["reduce"] = gaff.keep.mean(1)
        message = r"0: has shape \[16\]"
    with pytest.raises(gaff.GaffError, match=message):
        gaff.harvest(net(), data, *sites, out=tmp_path / "acts", **given)
    left = tree(tmp_path / "acts") if (tmp_path / "acts").exists() else {}
    assert not [name for name in left if "shard" in name or "open" in name]


def test_a_folder_of_something_else_is_left_alone(tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(gaff.PlanError, match="holds something else"):
        gaff.harvest(net(), loader(), "0", out=tmp_path)
    assert tree(tmp_path) == {"mine.txt": b"mine"}


def test_a_harvest_that_is_deleted_while_it_is_made_says_so(tmp_path, monkeypatch):
    model, out = net(), tmp_path / "acts"
    first, calls = model[0].forward, iter(range(1000))

    def deleted_by_somebody(x):
        if next(calls) == 3:
            shutil.rmtree(out)
        return first(x)

    monkeypatch.setattr(model[0], "forward", deleted_by_somebody)
    with pytest.raises(gaff.RecordError, match=r"acts/harvest.json is gone: the harvest was deleted, or moved, while"):
        gaff.harvest(model, loader(), "0", out=out, shard=2)
    assert tree(out) == {}


def test_a_shard_that_another_process_was_faster_with_stays(tmp_path, monkeypatch):
    model, out = net(), tmp_path / "acts"
    gaff.harvest(model, loader(), "0", out=tmp_path / "other", shard=4)
    first = model[0].forward

    def and_another_process(x):
        place = out / "shards" / "000000"
        if not place.exists():
            shutil.copytree(tmp_path / "other" / "shards" / "000000", place)
        return first(x)

    monkeypatch.setattr(model[0], "forward", and_another_process)
    assert gaff.harvest(model, loader(), "0", out=out, shard=4).check() == []
    told = json.loads((tmp_path / "other" / "shards" / "000000" / "shard.json").read_text())
    told["sites"]["0"]["blocks"][0][1] ^= 1
    (tmp_path / "other" / "shards" / "000000" / "shard.json").write_text(json.dumps(told))
    shutil.rmtree(out / "shards")
    with pytest.raises(gaff.errors.RecordError, match="another process has written other rows into this shard"):
        gaff.harvest(model, loader(), "0", out=out, shard=4)


def test_ranks_take_shards_by_number(tmp_path, monkeypatch):
    whole = gaff.harvest(net(), loader(), "0", out=tmp_path / "whole", shard=3)
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in "01":
        monkeypatch.setenv("RANK", rank)
        store = gaff.harvest(net(), loader(), "0", out=tmp_path / "parts", shard=3)
        assert store.is_complete == (rank == "1")
    assert tree(tmp_path / "parts") == tree(tmp_path / "whole")
    assert torch.equal(store["0"][:], whole["0"][:])


def test_one_label_is_no_list_of_them(tmp_path):
    store = gaff.harvest(net(), loader(), "0", out=tmp_path / "acts")
    with pytest.raises(gaff.PlanError, match=r"labels='sample': expected a list of names, such as \['sample'\]"):
        store.loader("0", labels="sample")


@pytest.mark.parametrize("shuffle", [None, 0])
def test_the_loader_gives_every_row_once_in_an_order_that_comes_again(tmp_path, shuffle):
    store = gaff.harvest(net(), loader(), "0", out=tmp_path / "acts", shard=2)

    def passed(rows):
        return [one["sample"].tolist() for one in rows]

    rows = store.loader("0", batch=32, shuffle=shuffle, labels=["sample"])
    first, second = passed(rows), passed(rows)
    assert len(rows) == len(first) == 7
    assert sorted(flat(first)) == sorted(flat(second)) == list(range(ROWS))
    assert (flat(first) == list(range(ROWS))) == (shuffle is None)
    assert first == second
    rows.set_epoch(1)
    assert (passed(rows) == first) == (shuffle is None)
    rows.set_epoch(0)
    assert next(iter(rows))["sample"].tolist() == first[0]
    assert passed(rows) == first  # a look at the first batch takes nothing away
    assert [one for pair in zip(rows, rows, strict=True) for one in pair][:2] != []
    again = store.loader("0", batch=32, shuffle=shuffle, labels=["sample"])
    assert passed(again) == first
    again.set_epoch(0)
    begun = iter(again)
    assert [next(begun)["sample"].tolist() for _ in range(3)] == first[:3]
    resumed = store.loader("0", batch=32, shuffle=shuffle, labels=["sample"])
    resumed.load_state_dict(again.state_dict())
    assert passed(resumed) == first[3:]
    values = next(iter(store.loader("0", batch=32, shuffle=shuffle)))
    assert torch.equal(values, store["0"][first[0]])


def test_the_loader_is_shared_by_ranks_and_workers(tmp_path, monkeypatch):
    store = gaff.harvest(net(), loader(), "0", out=tmp_path / "acts")
    monkeypatch.setenv("WORLD_SIZE", "2")
    seen = []
    for rank in "01":
        monkeypatch.setenv("RANK", rank)
        rows = store.loader("0", batch=8, shuffle=1, labels=["sample"])
        seen += [one for batch in DataLoader(rows, batch_size=None, num_workers=2) for one in batch["sample"].tolist()]
    assert sorted(seen) == list(range(ROWS))


def test_large_pools_are_mixed_and_complete():
    from gaff.harvesting.loader import RowLoader

    class Numbers:
        def __len__(self):
            return 200_001

        def gather(self, wanted):
            return wanted

    rows = torch.cat(list(RowLoader({"n": Numbers()}, batch=1000, shuffle=5)))
    assert torch.equal(rows.sort().values, torch.arange(200_001))
    assert int((rows[1:] - rows[:-1] == 1).sum()) < 200


class Endless(IterableDataset):
    def __iter__(self):
        return iter(torch.arange(40.0).view(10, 4))


def test_a_data_set_without_indices(tmp_path):
    store = gaff.harvest(net(), DataLoader(Endless(), batch_size=4), "0", out=tmp_path / "acts")
    assert store.rows == 10
    assert store.labels["sample"][:].tolist() == list(range(10))


def test_load_tells_its_kind(tmp_path):
    gaff.harvest(net(), loader(), "0", out=tmp_path / "acts")
    assert gaff.load(tmp_path / "acts", "harvest").rows == ROWS
    with pytest.raises(gaff.errors.RecordError, match="is of kind 'harvest'"):
        gaff.load(tmp_path / "acts", "run")


def test_int8_with_a_scale_for_each_row(tmp_path):
    model, data = net(), table()
    data.tensors[0][5] = 0  # a row of zeros where there is no bias
    data.tensors[0][7, 0] = float("inf")
    with torch.no_grad():
        model[0].bias.zero_()
    with pytest.warns(UserWarning, match="1 of 210 rows"):
        store = gaff.harvest(model, DataLoader(data, batch_size=16), "0", out=tmp_path / "acts", dtype="int8", shard=3)
    with torch.no_grad():
        exact = model[0](data.tensors[0])
    column = store["0"]
    assert column.dtype == torch.float32
    largest = exact.abs().amax(1, keepdim=True)
    good = torch.arange(ROWS) != 7
    assert bool(((column[:] - exact).abs() <= largest / 127 / 2 * 1.001)[good].all())
    assert bool(column[7].isnan().all())
    assert torch.equal(column[5], torch.zeros(WIDTH))
    for index in (3, slice(40, 60), [100, 2]):
        assert torch.equal(column[index], column[:][index])
    assert store.nbytes == ROWS * (WIDTH + 4)
    assert load_file(tmp_path / "acts" / "shards" / "000000" / "0.safetensors")["0"].dtype == torch.int8


def test_a_function_that_does_something_else_is_told(tmp_path):
    """By its instructions: a name alone, such as that of a lambda, tells nothing."""
    gaff.harvest(net(), loader(), "0", out=tmp_path / "acts", reduce=lambda x: x * 2)
    with pytest.raises(gaff.PlanError, match="functions.reduce"):
        gaff.harvest(net(), loader(), "0", out=tmp_path / "acts", reduce=lambda x: x * 3)


class Spiked(nn.Module):
    """One number in each row is far larger than the others, as in the residual stream of a language model."""

    def forward(self, x):
        return torch.cat((x[:, :1] * 1e4, x[:, 1:]), 1)


@pytest.mark.parametrize("change", ["sign", "one number", "gelu"])
def test_a_hook_or_a_setting_that_changes_small_numbers_is_told_when_a_harvest_goes_on(tmp_path, change):
    model = nn.Sequential(nn.Linear(4, WIDTH), Spiked(), nn.GELU())
    site = "2" if change == "gelu" else "1"

    with pytest.raises(ZeroDivisionError):
        gaff.harvest(model, Ends(5), site, out=tmp_path / "acts", shard=2)
    if change == "gelu":
        model[2].approximate = "tanh"
    else:
        kept, signs = model[1].forward, torch.ones(WIDTH)
        signs[1 if change == "sign" else 7 :] = -1.0
        model[1].forward = lambda x: kept(x) * signs
    with pytest.raises(gaff.errors.RecordError, match="gives other rows than it did"):
        gaff.harvest(model, Ends(99), site, out=tmp_path / "acts", shard=2)


class Ends:
    """Batches of one data set, of which a later one fails."""

    def __init__(self, most):
        self.most = most

    def __iter__(self):
        made = torch.Generator().manual_seed(3)
        for number in range(8):
            if number == self.most:
                raise ZeroDivisionError
            yield torch.randn(16, 4, generator=made)


@pytest.mark.parametrize("what", ["labels", "mask"])
def test_labels_and_masks_that_are_others_are_told_when_a_harvest_goes_on(tmp_path, what):
    model = net()

    def batches(most, more):
        for number in range(6):
            if number == most:
                raise ZeroDivisionError
            made = torch.Generator().manual_seed(number)
            labels = torch.arange(8.0).double() + (more if number == 1 else 0)
            yield torch.randn(8, 4, generator=made), labels, torch.arange(8) > (more if number == 1 else 0)

    options = {"labels": {"time": 1}, "shard": 2}
    options |= {"rows": lambda batch: batch[2]} if what == "mask" else {}
    with pytest.raises(ZeroDivisionError):
        gaff.harvest(model, batches(3, 0), "0", out=tmp_path / "acts", **options)
    with pytest.raises(gaff.errors.RecordError, match="are not what they were"):
        gaff.harvest(model, batches(9, 1), "0", out=tmp_path / "acts", **options)


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64])
def test_columns_of_types_that_torch_indexes_with_nothing(tmp_path, dtype):
    values = torch.arange(40).to(dtype)
    data = [(torch.randn(8, 4), values[at : at + 8]) for at in range(0, 40, 8)]
    store = gaff.harvest(net(), data, "0", out=tmp_path / "acts", labels={"number": 1}, shard=2)
    column = store.labels["number"]
    assert column.dtype == dtype
    for index in ([1, 2, 30], slice(0, 40, 3), torch.arange(40) % 2 == 0):
        expected = torch.arange(40)[index]
        assert column[index].tolist() == expected.tolist()
    shown = [batch["number"].tolist() for batch in store.loader("0", labels=["number"], batch=8)]
    assert sorted(flat(shown)) == list(range(40))


def test_whole_numbers_of_the_largest_floats_come_back_finite(tmp_path):
    most = torch.finfo(torch.float32).max
    store = gaff.harvest(
        nn.Identity(), [torch.tensor([[most, 0.0], [-most, 1.0]])], ":output", out=tmp_path / "acts", dtype="int8"
    )
    assert store[":output"][:].isfinite().all()


def test_floats_of_python_stay_as_long_as_they_are(tmp_path):
    times = [1.7e9 + one for one in range(8)]
    store = gaff.harvest(net(), [(torch.randn(8, 4), times)], "0", out=tmp_path / "acts", labels={"time": 1})
    assert store.labels["time"][:].tolist() == times


def test_what_a_data_set_makes_of_its_samples_is_what_the_model_is_given(tmp_path):
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"input_ids": datasets.Sequence(datasets.Value("int64")),
                                  "time": datasets.Value("float64"), "short": datasets.Value("float32")})  # fmt: skip
    table = datasets.Dataset.from_dict(
        {"input_ids": [[5, 6, 7], [8, 9], [10]], "time": [1.7e9, 1.7e9 + 1, 1.7e9 + 2], "short": [0.5, 1.5, 2.5]},
        features=features,
    )
    labels = {"time": "time", "short": "short"}
    plain = gaff.harvest(Tokens(), table, "embed", out=tmp_path / "a", rows="token", labels=labels)
    assert plain.labels["time"][:].unique().tolist() == [1.7e9, 1.7e9 + 1, 1.7e9 + 2]
    assert (plain.labels["time"].dtype, plain.labels["short"].dtype) == (torch.float64, torch.float32)
    begun = table.with_transform(lambda batch: {"input_ids": [[1, *ids] for ids in batch["input_ids"]]})
    store = gaff.harvest(Tokens(), begun, "embed", out=tmp_path / "b", rows="token")
    tokens, samples = store.labels["token"][:], store.labels["sample"][:]
    assert [tokens[samples == one].tolist() for one in range(3)] == [[1, 5, 6, 7], [1, 8, 9], [1, 10]]


def test_modes_and_gradients_are_put_back_where_changing_them_fails(tmp_path):
    class Fails(nn.Linear):
        def train(self, mode=True):
            if not mode:
                raise RuntimeError("no evaluation")
            return super().train(mode)

    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(), Fails(4, 4))
    with pytest.raises(RuntimeError, match="no evaluation"):
        gaff.harvest(model, [torch.randn(8, 4)], "0", out=tmp_path / "acts")
    assert all(module.training for module in model.modules())


def test_gradients_by_a_projection_keep_their_products(tmp_path):
    """As influence functions need them: thousands of numbers of each sample on a few."""
    project = gaff.keep.project(512, seed=4)
    rows = torch.randn(20, 4000, generator=torch.Generator().manual_seed(0))
    small = project(rows)
    assert small.shape == (20, 512)
    assert torch.equal(small, gaff.keep.project(512, seed=4)(rows))
    assert not torch.equal(small, gaff.keep.project(512, seed=5)(rows))
    one, other = rows @ rows.T, small @ small.T
    assert float((other.diagonal() / one.diagonal() - 1).abs().max()) < 0.25
    assert torch.equal(gaff.keep.project(3, dim=1)(rows.T[None]), gaff.keep.project(3)(rows[None]).transpose(1, 2))
    store = gaff.harvest(net(), loader(), "0", out=tmp_path / "acts", reduce=gaff.keep.project(3, seed=1))
    assert list(store["0"].shape) == [ROWS, 3]
    plan = gaff.Plan.of("0", reduce=gaff.keep.project(3, seed=1))
    plan.save(tmp_path / "plan.json")
    assert gaff.Plan.load(tmp_path / "plan.json") == plan
    for wrong in (0, 2.0, True):
        with pytest.raises(gaff.PlanError, match="expected 1 or more"):
            gaff.keep.project(wrong)
    with pytest.raises(gaff.PlanError, match="dimension 3 asked of a tensor"):
        gaff.keep.project(2, dim=3)(rows)


def test_what_a_plan_keeps_is_part_of_the_harvest(tmp_path):
    gaff.harvest(net(), loader(), gaff.Plan.of("0", reduce=lambda v: v * 1), out=tmp_path / "acts")
    with pytest.raises(gaff.PlanError, match="functions.plan.reduce"):
        gaff.harvest(net(), loader(), gaff.Plan.of("0", reduce=lambda v: v * 100), out=tmp_path / "acts")
    with pytest.raises(gaff.PlanError, match="options.plan"):
        gaff.harvest(net(), loader(), gaff.Plan.of("0", reduce=gaff.keep.mean(1)), out=tmp_path / "acts")


def test_data_that_has_grown_is_told_before_anything_is_written(tmp_path):
    model, data = net(), [torch.randn(2, 4) for _ in range(5)]
    gaff.harvest(model, data[:3], "0", out=tmp_path / "acts", shard=2)
    before = tree(tmp_path / "acts")
    with pytest.raises(gaff.errors.RecordError, match="the data had 3 batches, and has more now"):
        gaff.harvest(model, data, "0", out=tmp_path / "acts", shard=2)
    assert tree(tmp_path / "acts") == before
    (tmp_path / "acts" / "end.json").unlink()
    with pytest.raises(gaff.errors.RecordError, match="the data had 3 batches, and has more now"):
        gaff.harvest(model, data, "0", out=tmp_path / "acts", shard=2)
    assert gaff.harvest(model, data[:3], "0", out=tmp_path / "acts", shard=2).is_complete
    assert tree(tmp_path / "acts") == before


def test_rows_that_are_others_in_a_later_shard_are_refused_before_it_is_there(tmp_path):
    data = [torch.randn(2, 5, 4), torch.randn(2, 7, 4)]
    with pytest.raises(gaff.PlanError, match=r"0: a row was float32 \[5, 8\] and is float32 \[7, 8\] in shard 1"):
        gaff.harvest(net(), data, "0", out=tmp_path / "acts", shard=1)
    assert gaff.load(tmp_path / "acts")["0"].shape == (2, 5, WIDTH)
    with pytest.raises(gaff.PlanError, match="in shard 1: rows of one site or label must be alike"):
        gaff.harvest(net(), data, "0", out=tmp_path / "acts", shard=1)


class Pooled(Tokens):
    def forward(self, input_ids):
        return self.head(self.embed(input_ids).mean(1))


def test_what_has_other_positions_than_the_tokens_is_refused(tmp_path):
    with pytest.raises(gaff.SiteError, match=r"head: has shape \[2, 3\]: expected it to begin with \[2, 5\]"):
        gaff.harvest(Pooled(), [{"input_ids": torch.ones(2, 5).long()}], "head", out=tmp_path / "acts", rows="token")


def test_features_are_not_taken_for_positions(tmp_path):
    """Of a plain batch nothing tells what the second dimension of ``[samples, features]`` is."""
    data = [torch.randn(2, 4)]
    with pytest.raises(gaff.SiteError, match=r"0: has shape \[2, 8\], and nothing in the batch tells"):
        gaff.harvest(net(), data, "0", out=tmp_path / "acts", rows="token")
    reduce = partial(torch.unsqueeze, dim=-1)
    assert gaff.harvest(net(), data, "0", out=tmp_path / "b", rows="token", reduce=reduce)["0"].shape == (16, 1)


def test_a_site_and_a_label_of_one_name(tmp_path):
    model = nn.ModuleDict({"sample": nn.Linear(4, 3)})
    model.forward = lambda x: model["sample"](x)
    store = gaff.harvest(model, [torch.randn(6, 4)], "sample", out=tmp_path / "acts")
    assert store["sample"].shape == (6, 3)
    assert store.labels["sample"].shape == (6,)
    with pytest.raises(gaff.PlanError, match="asked for as a site and as a label"):
        store.loader("sample", labels=["sample"])


def test_a_state_does_not_go_to_workers(tmp_path):
    store = gaff.harvest(net(), loader(), "0", out=tmp_path / "acts")
    rows = store.loader("0", batch=8)
    rows.load_state_dict({"epoch": 0, "batches": 3})
    with pytest.raises(gaff.PlanError, match="expected num_workers=0"):
        list(DataLoader(rows, batch_size=None, num_workers=1))


@pytest.mark.slow
def test_batches_without_any_row_and_int8(tmp_path):
    batch = {"input_ids": torch.ones(2, 3).long(), "attention_mask": torch.zeros(2, 3).long()}
    full = {**batch, "attention_mask": torch.ones(2, 3).long()}
    store = gaff.harvest(Tokens(), [batch, full], "block", out=tmp_path / "acts", rows="token", dtype="int8", shard=1)
    assert store.rows == 6
    assert store.check() == []


@pytest.mark.slow
def test_a_callable_object_is_the_same_in_another_process(tmp_path):
    for _ in range(2):  # objects at other places in memory
        store = gaff.harvest(net(), loader(), "0", out=tmp_path / "acts", reduce=partial(torch.clamp, min=0.0))
    assert store.rows == ROWS


@pytest.mark.parametrize("index", [(0, 1), (slice(3), 0), ..., None, True])
def test_there_is_no_second_index(tmp_path, index):
    store = gaff.harvest(net(), loader(), "0", out=tmp_path / "acts")
    with pytest.raises(IndexError, match="no second index"):
        store["0"][index]


def test_a_model_that_is_not_made_yet(tmp_path):
    model = nn.Sequential(nn.LazyLinear(3))
    with pytest.raises(gaff.PlanError, match="'0.weight' is not made yet"):
        gaff.harvest(model, [torch.randn(2, 4)], "0", out=tmp_path / "acts")
    model(torch.randn(2, 4))
    assert gaff.harvest(model, [torch.randn(2, 4)], "0", out=tmp_path / "acts").rows == 2


def test_a_model_that_is_all_frozen_is_told(tmp_path):
    with pytest.raises(gaff.PlanError, match="the loss has no gradient: .* .all may be frozen"):
        gaff.harvest(net().requires_grad_(False), loader(), "0:grad_output", out=tmp_path / "acts",
                     loss=lambda output, batch: output.sum())  # fmt: skip


def test_the_largest_numbers_and_their_places(tmp_path):
    model, data = net(), loader()
    whole = gaff.harvest(model, data, "0", out=tmp_path / "whole")["0"][:]
    store = gaff.harvest(model, data, "0", out=tmp_path / "top", top=3)
    places = store.labels["place of 0"][:]
    assert (store["0"].shape, places.dtype) == ((ROWS, 3), torch.int32)
    expected = whole.abs().topk(3, dim=-1).indices
    assert torch.equal(places.long(), expected)
    assert torch.equal(store["0"][:], whole.gather(-1, expected))
    small = gaff.harvest(model, data, "0", out=tmp_path / "small", top=2, dtype="int8")
    torch.testing.assert_close(small["0"][:], store["0"][:][:, :2], atol=0.02, rtol=0)
    tokens = gaff.harvest(Tokens(), texts(), "block", out=tmp_path / "tokens", rows="token", top=2)
    assert tokens.labels["place of block"].shape == tokens["block"].shape == (tokens.rows, 2)
    with pytest.raises(gaff.SiteError, match="0: has shape .*expected a dense tensor with 9 numbers or more"):
        gaff.harvest(model, data, "0", out=tmp_path / "more", top=9)
    with pytest.raises(gaff.PlanError, match="top=0 is no number of numbers"):
        gaff.harvest(model, data, "0", out=tmp_path / "none", top=0)
    with pytest.raises(gaff.PlanError, match=r"options.top: 3, now 2"):
        gaff.harvest(model, data, "0", out=tmp_path / "top", top=2)


def summed(output, batch):
    return F.cross_entropy(output, batch[1], reduction="sum")


def test_norms_of_the_gradients_of_each_sample(tmp_path):
    model = net()
    store = gaff.harvest(model, loader(), "2:grad_output", out=tmp_path / "acts", loss=summed, sample_norms=["0", "2"])
    x, y = table().tensors
    for number in (0, 17, ROWS - 1):
        model.zero_grad()
        summed(model(x[number : number + 1]), (None, y[number : number + 1])).backward()
        for name, one in model.named_parameters():
            torch.testing.assert_close(store.labels[f"gradient norm of {name}"][number], one.grad.norm())
    assert set(store.labels) == {"sample", *(f"gradient norm of {name}" for name, _ in model.named_parameters())}
    assert all(one.grad is not None for one in model.parameters())
    only = gaff.harvest(model, loader(), "0", out=tmp_path / "only", loss=summed, sample_norms="2")
    assert set(only.labels) == {"sample", "gradient norm of 2.weight", "gradient norm of 2.bias"}
    with pytest.raises(gaff.PlanError, match="sample_norms= wants a loss"):
        gaff.harvest(model, loader(), "0", out=tmp_path / "none", sample_norms=["0"])


def test_gradients_of_a_head_outside_of_the_model_are_as_before(tmp_path):
    model, head = net(), nn.Linear(3, 1)
    head.weight.grad = torch.ones(1, 3)
    gaff.harvest(model, loader(), "0:grad_output", out=tmp_path / "acts", loss=lambda output, batch: head(output).sum())
    assert torch.equal(head.weight.grad, torch.ones(1, 3))
    assert head.bias.grad is None
    assert all(one.grad is None for one in model.parameters())


def test_a_data_set_of_hugging_face(tmp_path):
    datasets = pytest.importorskip("datasets")
    drawn, ids = random.Random(0), []
    for _ in range(30):
        ids.append([drawn.randrange(1, 50) for _ in range(drawn.randint(2, 9))])
    rows = {"input_ids": ids, "kind": [number % 3 for number in range(30)], "title": ["x"] * 30}
    table, model = datasets.Dataset.from_dict(rows), Tokens()
    store = gaff.harvest(model, table, "embed", out=tmp_path / "acts", rows="token", labels={"kind": "kind"}, batch=4)
    samples, positions = store.labels["sample"][:], store.labels["position"][:]
    assert store.rows == sum(map(len, ids))
    assert torch.equal(store.labels["kind"][:], samples % 3)
    tokens = torch.tensor([ids[sample][position] for sample, position in zip(samples, positions, strict=True)])
    assert torch.equal(store.labels["token"][:], tokens)
    assert torch.equal(store["embed"][:], model.embed(tokens).detach())
    sizes = [len(ids[number]) for number in samples.unique_consecutive()]
    assert sizes == sorted(sizes)  # so that little is padded
    other = datasets.Dataset.from_dict({**rows, "input_ids": ids[::-1]})
    with pytest.raises(gaff.PlanError, match=r"data.fingerprint: .*, now"):
        gaff.harvest(model, other, "embed", out=tmp_path / "acts", rows="token", labels={"kind": "kind"}, batch=4)
    with pytest.raises(gaff.PlanError, match="label 'sort': the batch has no 'sort'"):
        gaff.harvest(model, table, "embed", out=tmp_path / "none", labels={"sort": "sort"})
    with pytest.raises(gaff.PlanError, match="has the columns kind and no 'input_ids'"):
        gaff.harvest(model, table.select_columns(["kind"]), "embed", out=tmp_path / "none")
    for name, options in {
        "mask": {"rows": "token", "mask": "keep"},
        "rows": {"rows": lambda batch: batch["keep"]},
        "loss": {"rows": "token", "loss": lambda output, batch: output[batch["kind"] > 0].sum()},
        "labels": {"rows": "token", "labels": lambda batch: {"kind": batch["kind"]}},
    }.items():
        kept = table.add_column("keep", [[1] * len(one) for one in ids]).with_format(
            "torch" if name == "mask" else None
        )
        site = "embed:grad_output" if name == "loss" else "embed"
        assert gaff.harvest(model, kept, site, out=tmp_path / name, batch=4, **options).rows == store.rows
    with pytest.raises(gaff.PlanError, match="sample 1 of the data set has no token"):
        gaff.harvest(model, datasets.Dataset.from_dict({"input_ids": [[1], []]}), "embed", out=tmp_path / "none")
    with pytest.raises(gaff.PlanError, match=r"has the parts train: expected one of them"):
        gaff.harvest(model, datasets.DatasetDict({"train": table}), "embed", out=tmp_path / "none")
    with pytest.raises(gaff.PlanError, match="batch=0 is no number of samples"):
        gaff.harvest(model, table, "embed", out=tmp_path / "none", batch=0)


def test_an_index_says_what_the_shards_say(tmp_path, monkeypatch):
    pytest.importorskip("pyarrow")
    from gaff.harvesting import index

    monkeypatch.setattr(index, "WORTH", 5)
    out = tmp_path / "acts"
    store = gaff.harvest(net(), loader(), "0", out=out, shard=2)
    [file] = out.glob("index-*.parquet")
    for number in range(7):  # nothing of them is read: the index tells it
        (out / "shards" / f"{number:06d}" / "shard.json").write_text("{}")
    assert torch.equal(gaff.load(out)["0"][:], store["0"][:])
    assert gaff.load(out).check() == []
    shutil.rmtree(out / "shards" / "000003")
    assert gaff.load(out).rows == ROWS - 32
    assert not gaff.load(out).is_complete
    content = bytearray(file.read_bytes())
    for place in (4, len(content) // 3, len(content) - 9):
        content[place] ^= 255
        file.write_bytes(content)
        with pytest.raises(gaff.RecordError, match=rf"{file.name}: is damaged"):
            gaff.load(out)
        content[place] ^= 255
    file.unlink()
    with pytest.raises(gaff.RecordError, match=r"shard.json: is damaged"):
        gaff.load(out)


def test_the_largest_are_those_of_a_row_and_never_of_several(tmp_path):
    model = nn.Sequential(nn.Linear(4, 1), nn.Flatten(0))  # one number a sample, and no dimension behind
    with pytest.raises(
        gaff.SiteError, match=r"1: has shape \[16\]: expected a dense tensor .* behind those of the rows"
    ):
        gaff.harvest(model, loader(), "1", out=tmp_path / "acts", top=8)
    with pytest.raises(gaff.SiteError, match="behind those of the rows"):
        gaff.harvest(Tokens(), texts(), "embed", out=tmp_path / "mask", rows="token", top=3, reduce=lambda x: x.sum(-1))


def test_what_stands_around_the_model_is_compared(tmp_path):
    model, out = net(), tmp_path / "acts"
    gaff.harvest(model, loader(), "2", out=out)
    with gaff.edit(model, {"0": lambda value: value * 0}):
        model(torch.zeros(1, 4))  # an edit that never acts would be told
        with pytest.raises(gaff.PlanError, match=r"was begun otherwise: model.hooks: .*now .*'0: gaff"):
            gaff.harvest(model, loader(), "2", out=out)
    with torch.autocast("cpu", torch.bfloat16):
        with pytest.raises(gaff.PlanError, match=r"model.autocast.cpu: None, now 'torch.bfloat16'"):
            gaff.harvest(model, loader(), "2", out=out)
    assert gaff.harvest(model, loader(), "2", out=out).changes == []


def test_what_would_train_the_model_or_is_misspelt_is_refused_before_anything_is_written(tmp_path):
    model = net()
    with pytest.raises(gaff.SiteError, match="nope"):
        gaff.harvest(model, loader(), "0", out=tmp_path / "acts", loss=summed, sample_norms="nope")
    assert not (tmp_path / "acts").exists()
    model[0].weight.register_post_accumulate_grad_hook(lambda weight: None)
    with pytest.raises(gaff.PlanError, match=r"0\.weight: has post-accumulate hooks, or .* harvest without loss="):
        gaff.harvest(model, loader(), "0:grad_output", out=tmp_path / "acts", loss=summed)


def test_weights_that_a_hook_updates_are_those_of_every_batch(tmp_path):
    model, plain = net(), net()
    plain.load_state_dict(model.state_dict())
    for parameter in model.parameters():

        def update(gradient, parameter=parameter):
            with torch.no_grad():
                parameter.sub_(0.5 * gradient)

        parameter.register_hook(update)
    data = list(loader())
    stores = [
        gaff.harvest(one, data, "0:grad_output", out=tmp_path / str(at), loss=summed)
        for at, one in enumerate((model, plain))
    ]
    assert torch.equal(*(one["0:grad_output"][:] for one in stores))
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), plain.parameters(), strict=True))


def test_another_process_that_begins_meanwhile(tmp_path, monkeypatch):
    from gaff.harvesting.folder import Folder

    names, out = Folder.names, tmp_path / "acts"

    def slow(self):
        monkeypatch.setattr(Folder, "names", names)
        gaff.harvest(net(), loader(), "0", out=out)
        return names(self)

    monkeypatch.setattr(Folder, "names", slow)
    assert gaff.harvest(net(), loader(), "0", out=out).rows == ROWS


def test_a_store_is_a_mapping_also_without_rows(tmp_path):
    def none(batch):
        return torch.zeros(len(batch[0]), dtype=torch.bool)

    store = gaff.harvest(net(), loader(), "0", out=tmp_path / "acts", rows=none)
    assert "0" in store
    assert "9" not in store
    assert store.get("9") is None
    assert (store["0"].shape, store["0"][:].shape, store.labels["sample"].shape) == ((0, 8), (0, 8), (0,))
    assert store.check() == []
    assert list(store.loader("0")) == []


def test_numbers_beyond_float32_are_no_int8(tmp_path):
    data = [torch.full((4, 4), 1e300, dtype=torch.float64)]
    with pytest.raises(gaff.PlanError, match="holds numbers beyond those of float32"):
        gaff.harvest(nn.Sequential(nn.Identity()), data, "0", out=tmp_path / "acts", dtype="int8")


def test_rows_below_float32_are_no_int8(tmp_path):
    rows = torch.tensor([[1e-60, 2e-60], [0.0, 0.0], [1.0, 1e-60]], dtype=torch.float64)
    with pytest.raises(gaff.PlanError, match="holds rows below the numbers of float32"):
        gaff.harvest(nn.Identity(), [rows], ":output", out=tmp_path / "acts", dtype="int8")
    store = gaff.harvest(nn.Identity(), [rows[1:]], ":output", out=tmp_path / "more", dtype="int8")
    assert store[":output"][:].tolist() == [[0.0, 0.0], [1.0, 0.0]]


def test_a_batch_whose_loss_does_not_depend_on_a_site_is_told_so(tmp_path):
    class Branch(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            h = self.a(x)
            extra = self.b(x)
            return h + extra if x.sum() > 0 else h

    data = [torch.ones(3, 4), -torch.ones(3, 4)]
    with pytest.raises(
        gaff.SiteError, match="b:grad_output: is None in this batch: a gradient is where its loss does not"
    ):
        gaff.harvest(Branch(), data, "b:grad_output", out=tmp_path / "acts", loss=lambda out, batch: out.sum())


def test_float8_rows_have_largest_numbers(tmp_path):
    model, data = nn.Sequential(nn.Identity()), [torch.randn(6, 8).to(torch.float8_e4m3fn)]
    store = gaff.harvest(model, data, "0", out=tmp_path / "acts", top=2)
    expected = data[0].float().abs().topk(2).indices
    assert torch.equal(store["0"][:].float(), data[0].float().gather(1, expected))


def test_a_shard_of_another_harvest_is_noticed(tmp_path):
    gaff.harvest(net(), loader(), "0", out=tmp_path / "acts", shard=2)
    torch.manual_seed(5)
    other = nn.Sequential(nn.Linear(4, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 3))
    gaff.harvest(other, loader(), "0", out=tmp_path / "other", shard=2)
    shutil.rmtree(tmp_path / "acts" / "shards" / "000001")
    shutil.copytree(tmp_path / "other" / "shards" / "000001", tmp_path / "acts" / "shards" / "000001")
    with pytest.raises(gaff.RecordError, match="000001/shard.json: belongs to another harvest"):
        gaff.load(tmp_path / "acts")


def test_a_model_that_writes_into_its_input_is_harvested_in_several_starts(tmp_path):
    class Scales(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, WIDTH)

        def forward(self, x):
            return self.inner(x.mul_(2))

    model = Scales()
    whole = gaff.harvest(model, [x.clone() for x, _ in loader()], "inner", out=tmp_path / "whole", shard=1)
    assert whole.is_complete
    given = [x.clone() for x, _ in loader()]
    gaff.harvest(model, [x.clone() for x in given], "inner", out=tmp_path / "acts", shard=1)
    shutil.rmtree(tmp_path / "acts" / "shards" / "000001")
    again = gaff.harvest(model, [x.clone() for x in given], "inner", out=tmp_path / "acts", shard=1)
    assert torch.equal(again["inner"][:], whole["inner"][:])


def test_a_relative_place_stays_where_it_was_when_the_program_goes_elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store = gaff.harvest(net(), loader(), "0", out="acts")
    expected = store["0"][:].clone()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert torch.equal(store["0"][:], expected)
    assert str(store.place) == "acts"


@pytest.mark.parametrize("told", ['{"gaff_harvest": 1}', '{"gaff_harvest": 1, "batches": "x"}'])
def test_a_damaged_end_is_told(tmp_path, told):
    store = gaff.harvest(net(), loader(), "0", out=tmp_path / "acts")
    (tmp_path / "acts" / "end.json").write_text(told)
    for ask in (lambda: store.is_complete, lambda: gaff.harvest(net(), loader(), "0", out=tmp_path / "acts")):
        with pytest.raises(gaff.RecordError, match=r"end.json: is damaged: it says that the data had"):
            ask()


@pytest.mark.parametrize("odd", [torch.tensor([0, 3, 1] * 5 + [2]), torch.tensor([-100] * 16)])
def test_numbers_of_rows_are_no_mask(tmp_path, odd):
    with pytest.raises(gaff.PlanError, match="expected a tensor of booleans or 0 and 1"):
        gaff.harvest(net(), loader(), "0", out=tmp_path / "acts", rows=lambda batch: odd[: len(batch[0])])


@pytest.mark.parametrize("key", ["mask", "attn_mask"])
def test_a_mask_by_another_name_is_asked_for(tmp_path, key):
    model, ids = nn.Embedding(9, WIDTH), torch.tensor([[1, 2, 0, 0], [3, 4, 5, 0]])
    batches = [{"input_ids": ids, key: ids > 0}]
    options = {"rows": "token", "inputs": lambda batch: batch["input_ids"]}
    with pytest.raises(gaff.PlanError, match=f"no 'attention_mask' in the batch, which has '{key}': expected mask="):
        gaff.harvest(model, batches, ":output", out=tmp_path / "asked", **options)
    store = gaff.harvest(model, batches, ":output", out=tmp_path / "acts", mask=key, **options)
    assert store.labels["token"][:].tolist() == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("is_loader", [True, False])
@pytest.mark.parametrize("is_complete", [True, False])
@pytest.mark.parametrize("change", ["edit", "hook", "closure", "setting", None])
def test_a_start_that_would_give_other_rows_is_refused_though_every_name_is_the_same(
    tmp_path, change, is_loader, is_complete
):
    model = nn.Sequential(nn.Linear(4, WIDTH), nn.LeakyReLU(0.1), nn.Linear(WIDTH, 3))

    def harvest(factor):
        data = loader() if is_loader else [x for x, _ in loader()]
        if change == "setting":
            model[1].negative_slope = 0.1 * factor
        reduce = (lambda value: value * factor) if change == "closure" else None
        hook = model[0].register_forward_hook(lambda m, args, out: out * factor) if change == "hook" else None
        with gaff.edit(model, {"0": gaff.edits.scale(factor)}) if change == "edit" else nullcontext():
            try:
                return gaff.harvest(model, data, "1", out=tmp_path / "acts", shard=2, reduce=reduce)
            finally:
                if hook is not None:
                    hook.remove()

    harvest(1.0)
    if not is_complete:
        shutil.rmtree(tmp_path / "acts" / "shards" / "000001")
    if change is None:
        assert harvest(1.0).is_complete
        return
    with pytest.raises(gaff.RecordError, match="1: the first batch of shard 0 gives other rows than it did"):
        harvest(1.5)


@pytest.mark.parametrize("is_loader", [True, False])
@pytest.mark.parametrize("change", ["data", "function"])
def test_what_no_name_tells_can_be_accepted_and_is_told(tmp_path, change, is_loader):
    class Numbers(torch.utils.data.Dataset):
        def __init__(self, first):
            self.first = first

        def __len__(self):
            return 6

        def __getitem__(self, at):
            return torch.full((4,), float(self.first + at))

    def harvest(number, **options):
        data = DataLoader(Numbers(number if change == "data" else 0), 2)
        factor = number if change == "function" else 0
        data = data if is_loader else list(data)
        return gaff.harvest(
            nn.Identity(),
            data,
            ":output",
            out=tmp_path / "acts",
            shard=1,
            reduce=lambda value: value + factor,
            **options,
        )

    harvest(0)
    shutil.rmtree(tmp_path / "acts" / "shards" / "000002")
    with pytest.raises(gaff.RecordError, match="expected the same again, another out=, or accept_changes=True"):
        harvest(10)
    store = harvest(10, accept_changes=True)
    assert store[":output"][:][:, 0].tolist() == [0.0, 1.0, 2.0, 3.0, 14.0, 15.0]
    [told] = store.changes
    assert told.startswith("shard 2: ")
    assert ("of the data" in told) == (change == "data")


@pytest.mark.skipif(not hasattr(signal, "SIGXFSZ"), reason="this system has no largest size of a file")
def test_a_disk_that_takes_no_more_is_told_and_the_harvest_goes_on_later(tmp_path):
    import resource

    model, data = nn.Linear(64, 64), torch.randn(64, 64).split(16)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (6_000, hard))
    try:
        with pytest.raises(gaff.errors.RecordError, match=r"out: cannot be written: .*; shards that are whole stay"):
            gaff.harvest(model, data, ":output", out=tmp_path / "out", shard=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    store = gaff.harvest(model, data, ":output", out=tmp_path / "out", shard=2)
    assert torch.equal(store[":output"][:], model(torch.cat(data)).detach())


def test_a_place_where_nobody_may_write_is_told(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(gaff.harvesting.folder.os, "link", refuse)
    with pytest.raises(gaff.errors.RecordError, match="cannot be written: Permission denied"):
        gaff.harvest(nn.Linear(2, 2), [torch.ones(2, 2)], ":output", out=tmp_path / "out")


def test_conjugates_are_written_as_what_they_are(tmp_path):
    given = torch.randn(6, 3, dtype=torch.complex64)
    model = nn.Sequential(nn.Identity())
    model[0].register_forward_hook(lambda module, args, output: output.conj())
    store = gaff.harvest(model, DataLoader(TensorDataset(given), 2), "0", out=tmp_path / "acts")
    assert torch.equal(store["0"][:], given.conj().resolve_conj())


def test_labels_that_are_others_are_told_when_a_harvest_goes_on(tmp_path):
    model, out = net(), tmp_path / "acts"
    drawn = torch.Generator().manual_seed(3)
    ways = {"labels": lambda batch: {"kind": torch.randint(0, 9, (len(batch[1]),), generator=drawn)}, "shard": 4}
    gaff.harvest(model, loader(), "0", out=out, **ways)
    shutil.rmtree(out / "shards" / "000002")
    (out / "end.json").unlink()
    with pytest.raises(gaff.errors.RecordError, match="kind: the first batch of shard 0 gives other rows than it did"):
        gaff.harvest(model, loader(), "0", out=out, **ways)
    drawn.manual_seed(3)
    assert gaff.harvest(model, loader(), "0", out=out, **ways).is_complete


@pytest.mark.parametrize("damaged", ["order", "shard"])
def test_check_tells_of_every_file(tmp_path, capsys, damaged):
    out = tmp_path / "acts"
    gaff.harvest(net(), loader(), "0", out=out, shard=4)
    assert main(["check", str(out)]) == 0
    if damaged == "order":
        file = next(out.glob("order-*"))
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
    else:
        (out / "shards" / "000001" / "0.safetensors").unlink()
    capsys.readouterr()
    assert main(["check", str(out)]) == 3
    assert ("order-" if damaged == "order" else "000001") in capsys.readouterr().out


def test_a_model_that_writes_into_its_batch_changes_neither_rows_nor_labels(tmp_path):
    class Writes(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(10, 3)

        def forward(self, input_ids, attention_mask):
            input_ids[input_ids == 5] = 0
            attention_mask.zero_()
            return self.embedding(input_ids)

    tokens = torch.tensor([[1, 5, 2], [5, 5, 3]])
    batch = {"input_ids": tokens.clone(), "attention_mask": torch.ones(2, 3, dtype=torch.long)}
    store = gaff.harvest(
        Writes(), [batch], "embedding", out=tmp_path / "acts", rows="token", labels={"mine": "input_ids"}
    )
    assert store.labels["token"][:].tolist() == tokens.flatten().tolist()
    assert store.labels["mine"][range(6)].tolist() == tokens.flatten().tolist()
    assert torch.equal(batch["input_ids"], tokens)


@pytest.mark.parametrize("dtype", ["float8_e5m2", "float8_e4m3fn"])
def test_numbers_that_float8_cannot_hold_are_counted(tmp_path, dtype):
    rows = torch.tensor([[1.0, -2.0], [1e6, 0.0]])
    with pytest.warns(UserWarning, match="1 of 2 rows"):
        store = gaff.harvest(nn.Identity(), [rows], ":output", out=tmp_path / "a", dtype=dtype, progress=False)
    assert store.nonfinite == {":output": 1}
    with pytest.raises(gaff.PlanError, match="or a number beyond (57344|448)"):
        gaff.harvest(
            nn.Identity(), [rows], ":output", out=tmp_path / "b", dtype=dtype, nonfinite="refuse", progress=False
        )


@pytest.mark.parametrize("own", [False, True])
def test_a_shuffling_loader_is_harvested_in_the_order_that_it_would_give(tmp_path, own):
    data = torch.utils.data.TensorDataset(torch.arange(20.0).reshape(20, 1))
    draw = torch.Generator() if own else None
    loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True, generator=draw)
    (draw or torch.default_generator).manual_seed(5)
    expected = torch.cat([x for (x,) in loader])
    (draw or torch.default_generator).manual_seed(5)
    store = gaff.harvest(nn.Identity(), loader, ":output", out=tmp_path / "out", progress=False)
    assert torch.equal(torch.as_tensor(store[":output"][:]), expected)


def test_rows_of_one_element_are_compared_whatever_their_stride(tmp_path):
    class First(nn.Module):
        def forward(self, x):
            return x[:, 0]

    for _ in range(2):
        store = gaff.harvest(First(), [torch.full((1, 4), 2.0)], ":output", out=tmp_path / "acts")
        assert store[":output"][:].tolist() == [2.0]


class Boxes(nn.Module):
    """Takes more of each token than its id, and one number of each sample."""

    def __init__(self):
        super().__init__()
        self.embed, self.block = nn.Embedding(50, 4), nn.Linear(4, 4)

    def forward(self, input_ids, attention_mask=None, bbox=None, weight=None, labels=None):
        assert labels is None
        return self.block(self.embed(input_ids) + bbox + weight.view(-1, 1, 1))


def test_a_data_set_gives_every_column_that_the_model_takes(tmp_path):
    datasets = pytest.importorskip("datasets")
    ids = [[5, 6, 7], [8, 9]]
    boxes = [[[at, at + 1, 2, number] for at in range(len(one))] for number, one in enumerate(ids)]
    rows = {"input_ids": ids, "bbox": boxes, "weight": [0.5, 2.0], "labels": [0, 1], "text": ["a", "b"]}
    model = Boxes()
    store = gaff.harvest(model, datasets.Dataset.from_dict(rows), "block", out=tmp_path / "acts", rows="token")
    samples = store.labels["sample"][:]
    for number, one in enumerate(ids):
        with torch.no_grad():
            wanted = model(
                torch.tensor([one]), None, torch.tensor([boxes[number]]), torch.tensor([rows["weight"][number]])
            )
        torch.testing.assert_close(store["block"][:][samples == number], wanted[0])

    class Wrapper(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, *args, **kwargs):
            return self.inner(*args, **kwargs)

    again = gaff.harvest(Wrapper(), datasets.Dataset.from_dict(rows), "inner.block", out=tmp_path / "b", rows="token")
    assert torch.equal(again["inner.block"][:], store["block"][:])
    rows["bbox"] = [[[1, 2, 3, 4]], [[1, 2, 3, 4]]]  # not one for each token
    with pytest.raises(gaff.PlanError, match="the model takes 'bbox', a column of the data set which is neither"):
        gaff.harvest(model, datasets.Dataset.from_dict(rows), "block", out=tmp_path / "other", rows="token")


@pytest.mark.parametrize("indices", [[0.5, 1.5], ["1", "0"]])
def test_samplers_that_give_no_whole_numbers_are_refused(tmp_path, indices):
    loader = DataLoader(TensorDataset(torch.randn(4, 3)), sampler=indices)
    with pytest.raises(gaff.PlanError, match=r"the sampler gives .* for a sample: expected a whole number"):
        gaff.harvest(nn.Identity(), loader, ":output", out=tmp_path / "acts")


def test_rows_are_not_named_by_what_may_be_a_mask_or_numbers(tmp_path):
    store = gaff.harvest(nn.Identity(), [torch.randn(4, 3)], ":output", out=tmp_path / "acts")
    mask = torch.tensor([0, 0, 1, 1])
    with pytest.raises(IndexError, match="a mask or numbers: expected bool for a mask, int64 for numbers"):
        store[":output"][mask.to(torch.uint8)]
    assert len(store[":output"][mask.bool()]) == 2


@pytest.mark.parametrize("kind", [list, numpy.array])
def test_tokens_may_be_lists_or_arrays_where_a_function_makes_tensors_of_them(tmp_path, kind):
    ids = [[1, 2], [3, 4]]
    store = gaff.harvest(
        nn.Embedding(10, 4), [{"input_ids": kind(ids)}], ":output", out=tmp_path / "acts", rows="position",
        inputs=lambda batch: torch.as_tensor(batch["input_ids"]),
    )  # fmt: skip
    assert store.labels["token"][:].tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ({1: "y"}, r"labels={1: 'y'}: expected {'name': key of the batch}"),
        ({"y": ["y"]}, r"labels={'y': \['y'\]}: expected"),
        (lambda batch: None, "labels gave None for a batch: expected a dict of names and columns"),
        (lambda batch: {1: batch[:, 0]}, "for a batch: expected a dict of names and columns"),
    ],
)
def test_slips_in_labels(tmp_path, labels, message):
    with pytest.raises(gaff.PlanError, match=message):
        gaff.harvest(nn.Identity(), [torch.randn(4, 3)], ":output", out=tmp_path / "acts", labels=labels)


def test_rows_rounded_to_int8_are_alike_where_one_step_is_rounded_otherwise():
    rows = torch.tensor([[1, -127, 5]], dtype=torch.int8)
    assert making._is_alike(rows, rows + torch.tensor([1, 0, -1], dtype=torch.int8), 1)
    assert not making._is_alike(rows, rows + torch.tensor([2, 0, 0], dtype=torch.int8), 1)
    assert not making._is_alike(rows, rows + torch.tensor([1, 0, 0], dtype=torch.int8))
