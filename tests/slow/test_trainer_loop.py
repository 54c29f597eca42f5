"""A training loop as large models have it, on four processes: what gaff tells and changes is that of one process."""

import pytest
import torch

import gaff
import trainer_runs as runs
from ranks import of_ranks

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
IN_PARTS = ("layers.1.act", "layers.0.wq", "layers.1.up:grad_output")  # under tensor parallelism


@pytest.fixture(scope="module", params=runs.HOWS, ids="-".join)
def how(request):
    return request.param


@pytest.fixture(scope="module")
def ranks(how, tmp_path_factory):
    out = tmp_path_factory.mktemp("trainer")
    return out, of_ranks(runs.found_by, runs.WORLD, str(out), how)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    out = tmp_path_factory.mktemp("alone")
    return {is_edited: runs.train((), out / str(is_edited), is_edited=is_edited) for is_edited in (False, True)}


@pytest.mark.parametrize("is_edited", [False, True])
def test_it_trains_as_one_process_does(ranks, alone, is_edited):
    """Edited in the second step and clipped in each: losses, norms before clipping, and the weights at the end."""
    truth, found = alone[is_edited], [one[is_edited] for one in ranks[1]]
    losses = torch.tensor([one["losses"] for one in found]).mean(0)  # each replica has its own rows
    torch.testing.assert_close(losses, torch.tensor(truth["losses"]), rtol=1e-4, atol=1e-5)
    for one in found:
        assert one["norms"] == pytest.approx(truth["norms"], rel=1e-4)
        for name, weight in truth["weights"].items():
            torch.testing.assert_close(one["weights"][name], weight, rtol=1e-3, atol=1e-4)


def test_what_is_captured_is_the_logical_tensor_of_the_rows(ranks, alone, how):
    """Or, where compiled code hands out a part of which nothing tells where it lies, a refusal; never a part."""
    truth, is_hidden = alone[False]["seen"], {"tp", "compile"} <= {*how}
    for rank, one in enumerate(ranks[1]):
        for site, whole in truth.items():
            told = one[False]["seen"][site]
            if is_hidden and site in IN_PARTS:
                assert "nothing tells which" in str(told), site
                continue
            rows = whole.chunk(2)[rank // 2] * (2 if "grad" in site else 1)  # the loss is a mean over half the rows
            torch.testing.assert_close(told, rows, rtol=1e-3, atol=1e-4, msg=f"{site} on rank {rank}")


def test_the_record_tells_the_numbers_of_one_process(ranks, alone, how, tmp_path):
    runs.train((), tmp_path / "alone")
    truth, record = gaff.load(tmp_path / "alone"), gaff.load(ranks[0] / "False")
    sites = ("layers.0.wq.weight:param", "layers.1.down.weight:grad", "head.weight:update", "layers.0", "head")
    for site in (*sites, "layers.1:grad_output"):
        for stat in ("rms", "min", "max"):
            factor = 2 if site.endswith(":grad_output") else 1  # the loss is a mean over half the rows
            told = record.series(site, stat, rank="all")
            expected = [factor * one for one in truth.series(site, stat).values]
            assert list(told.values) == pytest.approx(expected, rel=1e-3, abs=1e-5), (site, stat)
    if "tp" in how:
        with pytest.raises(gaff.RecordError, match="numbers of a part of it"):
            record.series("layers.1.act", "mean", rank="all")
