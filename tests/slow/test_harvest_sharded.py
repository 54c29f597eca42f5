"""A harvest of a model whose weights lie on several processes is that of a model that is whole in one."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset

import gaff
from ranks import of_ranks

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
SITES = ("0.up", "0.down", "1.up:input", "1")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


def net():
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block())


def data(rows=45):
    made = torch.Generator().manual_seed(1)
    return DataLoader(TensorDataset(torch.randn(rows, 8, generator=made)), batch_size=4)


def batches():
    return [batch[0] for batch in data()]


def loss(output, batch):
    return (output**2).sum()


def spread(kind, ranks):
    model = net()
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    mesh = None
    if kind in ("tp", "2d"):
        shape = (ranks,) if kind == "tp" else (ranks // 2, 2)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("tp",) if kind == "tp" else ("dp", "tp"))
        for block in model:
            parallelize_module(block, mesh["tp"], dict(plan))
    if kind in ("fsdp2", "2d"):
        own = init_device_mesh("cpu", (ranks,)) if mesh is None else mesh["dp"]
        for block in model:
            fully_shard(block, mesh=own)
        fully_shard(model, mesh=own)
    return model


def harvested(rank, kind, ranks, out, options, source, part):
    given = {"data": data, "batches": batches}[source]()
    if part:  # some shards are there already, so that ranks have unequal work
        given = given[:part]
    store = gaff.harvest(spread(kind, ranks), given, *options.pop("sites", SITES), out=out, shard=2, **options)
    assert store.check() == []
    return store.is_complete


@pytest.mark.parametrize("source", ["data", "batches"])
@pytest.mark.parametrize(("kind", "ranks"), [("fsdp2", 2), ("tp", 2), ("2d", 4), ("fsdp2", 3)])
def test_rows_are_those_of_one_process(kind, ranks, source, tmp_path):
    assert of_ranks(harvested, ranks, kind, ranks, tmp_path / "acts", {}, source, None) == [True] * ranks
    whole = gaff.harvest(net(), data(), *SITES, out=tmp_path / "whole", shard=2)
    store = gaff.load(tmp_path / "acts")
    assert set(store) == set(whole)
    for site in SITES:
        assert store[site].shape == whole[site].shape
        torch.testing.assert_close(store[site][:], whole[site][:])
    assert torch.equal(store.labels["sample"][:], whole.labels["sample"][:])
    assert not (tmp_path / "acts" / "open").exists()


@pytest.mark.parametrize(("kind", "ranks"), [("fsdp2", 2), ("tp", 2)])
def test_gradients_and_reductions_are_those_of_one_process(kind, ranks, tmp_path):
    options = {"sites": ("0.up:grad_output", "0.up"), "loss": loss, "reduce": gaff.keep.mean(-1)}
    of_ranks(harvested, ranks, kind, ranks, tmp_path / "acts", dict(options), "data", None)
    sites = options.pop("sites")
    whole = gaff.harvest(net(), data(), *sites, out=tmp_path / "whole", shard=2, **options)
    store = gaff.load(tmp_path / "acts")
    for site in sites:
        torch.testing.assert_close(store[site][:], whole[site][:])


def test_more_ranks_than_shards(tmp_path):
    """A rank without a batch of its own runs the model for the others."""
    of_ranks(harvested, 3, "fsdp2", 3, tmp_path / "acts", {}, "batches", 3)
    assert gaff.load(tmp_path / "acts").rows == 12


def test_weights_are_compared_as_wholes(tmp_path):
    of_ranks(harvested, 2, "tp", 2, tmp_path / "acts", {}, "data", None)
    told = gaff.load(tmp_path / "acts").manifest["model"]["weights"]
    gaff.harvest(net(), data(), "0", out=tmp_path / "whole")
    assert gaff.load(tmp_path / "whole").manifest["model"]["weights"] == told
