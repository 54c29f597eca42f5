"""A guard over replicas runs batches again by itself: it asks no other process, and tells only what is wrong."""

import math

import pytest

import replica_runs
from ranks import of_ranks

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("way", ["around", "inside"])
def test_infinite_values_that_are_meant_on_one_rank_disturb_none(way):
    bare, guarded = of_ranks(replica_runs.found_by, 2, "bare"), of_ranks(replica_runs.found_by, 2, way)
    assert [norms for norms, _ in guarded] == [norms for norms, _ in bare]
    assert [reports for _, reports in guarded] == [[], []]


def test_a_forward_that_asks_all_ranks_is_not_run_again_by_one_of_them():
    norms, reports = zip(*of_ranks(replica_runs.found_by, 2, "counts"), strict=True)
    assert str(norms[0]) == str(norms[1])
    assert [math.isnan(one) for one in norms[0]] == [False, False, True, True]
    assert "it talks to other processes (c10d::allreduce_), which are not at this place" in str(reports[0][0])
    assert "look first at what the guards of the others tell" in str(reports[1][0])


@pytest.mark.parametrize(
    ("way", "told"),
    [
        ("ddp", "another process did, whose gradients are averaged with this one's"),
        ("forward", "written to past torch's ops, by a collective (another process sent it)"),
    ],
)
def test_what_another_process_has_sent_is_called_that(way, told):
    first, second = of_ranks(replica_runs.received_by, 2, way)
    assert (first.site, first.direction) == (":input[0]", "before")
    assert told in second.cause
