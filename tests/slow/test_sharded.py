"""DistributedDataParallel, FSDP2 and tensor parallelism: the numbers are those of one process with the whole batch."""

import re

import pytest
import torch

import gaff
import spread_runs
from ranks import of_ranks
from spread_runs import EDITS, ROWS, SITES

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

KINDS = {"ddp": 2, "fsdp2": 2, "fsdp2-keep": 2, "fsdp2-checkpoint": 2, "fsdp2-compile": 2, "hsdp": 4, "tp": 2, "2d": 4}


def replicas(kind):
    return {"tp": 1, "2d": 2}.get(kind, KINDS[kind])


@pytest.fixture(scope="module", params=list(KINDS))
def runs(request, tmp_path_factory):
    """What every rank found, and what one process finds with all rows."""
    kind, world = request.param, KINDS[request.param]
    out = tmp_path_factory.mktemp(kind)
    found = of_ranks(spread_runs.found_by, world, world, kind, str(out))
    spread_runs.OUT[0] = str(out)
    data = spread_runs.batch(None, replicas(kind))
    alone = {
        name: run(spread_runs.build(), data, None)
        for name, run in spread_runs.RUNS.items()
        if name not in ("divergent", "unlike")
    }
    found[0]["records"] = gaff.load(out / "record"), gaff.load(out / "alone")
    return kind, found, alone


def same(one, other):
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def same_all(ones, others):
    assert set(ones) == set(others)
    for name, one in ones.items():
        same(one, others[name])


def test_captured_values_are_those_of_the_whole_batch(runs):
    kind, found, alone = runs
    count = replicas(kind)
    for rank, one in enumerate(found):
        replica = {"tp": 0, "2d": rank // 2}.get(kind, rank)
        mine = slice(replica * ROWS, (replica + 1) * ROWS)
        for site in ("blocks.1", "blocks.1:input"):
            same(one["capture"][site], alone["capture"][site][mine])
        for site in ("blocks.1:grad_output", "blocks.1:grad_input"):  # of this rank's loss, a mean over its rows
            same(one["capture"][site], alone["capture"][site][mine] * count)
        same(one["capture"]["blocks.1.fc.weight:param"], alone["capture"]["blocks.1.fc.weight:param"])
        same_all(one["capture"]["after"], alone["capture"]["after"])


def test_gradients_of_parameters_are_reduced_but_with_ddp(runs):
    kind, found, alone = runs
    for site in ("blocks.1.fc.weight:grad", "inp.weight:grad"):
        values = [one["capture"][site] for one in found]
        if kind == "ddp":  # each rank's own contribution, before it is averaged
            same(sum(values) / len(values), alone["capture"][site])
        else:
            for value in values:
                same(value, alone["capture"][site])
    if kind.startswith("fsdp2") or kind in ("tp", "2d"):
        assert "Shard" in found[0]["capture"]["placements"][SITES.index("blocks.1.fc.weight:grad")]


def test_edits_act_as_in_one_process_and_leave_nothing(runs):
    _, found, alone = runs
    assert len(EDITS) == 7
    for one in found:
        same_all(one["edit"]["edited"], alone["edit"]["edited"])
        same_all(one["edit"]["bare"], alone["edit"]["bare"])


def test_a_forward_that_was_stopped_early_leaves_the_next_step_right(runs):
    kind, found, alone = runs
    for rank, one in enumerate(found):
        replica = {"tp": 0, "2d": rank // 2}.get(kind, rank)
        same(one["take"]["feature"], alone["take"]["feature"][replica * ROWS : (replica + 1) * ROWS])
        same_all(one["take"]["after"], alone["take"]["after"])


def test_clipping_takes_the_norm_of_all_parts(runs):
    _, found, alone = runs
    for one in found:
        assert one["clip"]["norms"] == pytest.approx(alone["clip"]["norms"], rel=1e-4)
        same_all(one["clip"]["weights"], alone["clip"]["weights"])


def test_a_nan_on_one_rank_stops_the_guarded_run_and_hangs_nobody(runs):
    _, found, alone = runs
    assert alone["guard"]["raised"]
    assert found[0]["guard"]["raised"]
    assert all(one["guard"]["raised"] for one in found)


def test_a_nan_that_averaging_brings_is_told_as_one_that_others_may_have_made(runs):
    kind, found, alone = runs
    assert "averaged over processes" not in alone["averaged"]["cause"]
    if kind == "ddp":
        assert "look first at what the guards of the others tell" in found[1]["averaged"]["cause"]


def test_an_edit_that_one_rank_alone_asks_for_is_refused(runs):
    kind, found, alone = runs
    assert "did not within 1 s: expected the same on all" in found[0]["divergent"]["told"]
    for one in found:
        assert re.search("asks for .*, and rank .* for .*: expected the same on all", one["unlike"]["grad"]), one
        assert ("expected the same on all" in one["unlike"]["value"]) == (kind in ("tp", "2d")), one["unlike"]
    for one in found:
        same_all(one["divergent"]["after"], alone["capture"]["after"])


def test_statistics_of_all_ranks_are_those_of_the_whole(runs):
    kind, found, _ = runs
    record, alone = found[0]["records"]
    assert record.ranks == list(range(KINDS[kind]))
    stats = ("count", "mean", "std", "min", "max", "norm")
    name = next(one for one in alone.sites if one in ("blocks.1", "blocks.1:output"))
    weight = "blocks.1.fc.weight:param"
    for site in (weight, name):
        for stat in stats:
            whole, together = alone.series(site, stat), record.series(site, stat, rank="all")
            assert together.steps == whole.steps == [0]
            assert together.values == pytest.approx(whole.values, rel=1e-4, abs=1e-6), (site, stat)
    if replicas(kind) < KINDS[kind]:
        with pytest.raises(gaff.errors.RecordError, match="the numbers of a part of it"):
            record.series("blocks.1.fc", "mean", rank="all")
    with pytest.raises(gaff.errors.RecordError, match="does not add up"):
        record.series(weight, "entropy", rank="all")
    whole, together = alone.scalar("grad_norm"), record.scalar("grad_norm", rank="all")
    assert together.steps == whole.steps
    assert together.values == pytest.approx(whole.values, rel=1e-4)
    assert (record.scalar("grad_norm", rank=1).values == pytest.approx(whole.values, rel=1e-4)) is (kind == "ddp")
    with pytest.raises(gaff.RecordError, match="'all' is for 'grad_norm'"):
        record.scalar("lr", rank="all")


def test_gradients_add_up_also_after_an_exception(runs):
    _, found, alone = runs
    for one in found:
        same_all(one["accumulate"]["accumulated"], alone["accumulate"]["accumulated"])
        same_all(one["accumulate"]["captured"], one["accumulate"]["bare"])  # whatever torch leaves after it


def test_a_constant_takes_its_part_and_one_that_is_trained_is_refused():
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    from gaff.edits.event import like

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        value = distribute_tensor(torch.zeros(3, 2), init_device_mesh("cpu", (1,)), [Shard(0)])
        assert torch.equal(like(torch.tensor([1, 2]), value).full_tensor(), torch.tensor([[1.0, 2.0]] * 3))
        with pytest.raises(gaff.PlanError, match="a constant that is trained meets a tensor that is spread"):
            like(torch.ones(3, 2, requires_grad=True), value)
    finally:
        torch.distributed.destroy_process_group()


def test_the_watch_tells_the_norm_before_clipping_or_leaves_it_out_and_nothing_else(runs):
    _, found, _ = runs
    one, alone = found[0]["records"]
    assert one.scalar("loss").values
    assert not [note for note in one.notes if "could not" in note]
    try:
        told = one.scalar("unclipped_norm").values
    except gaff.RecordError:  # each process has a part of it
        return
    assert told == pytest.approx(alone.scalar("unclipped_norm").values, rel=1e-3)
