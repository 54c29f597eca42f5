"""The first FSDP (``FullyShardedDataParallel``): right as one process is, or refused with what to do."""

import pytest
import torch

import first_fsdp_runs as runs
import gaff
from ranks import of_ranks

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    out = tmp_path_factory.mktemp("first_fsdp")
    return out, of_ranks(runs.found_by, runs.WORLD, str(out))


@pytest.mark.parametrize("how", runs.LIMITS)
def test_gradients_are_clipped_as_in_one_process(ranks, how):
    weights, norms = runs.clipped(False, how)
    for found, told in (one[how] for one in ranks[1]):
        assert told == pytest.approx(norms, rel=1e-5)
        for name, one in weights.items():
            torch.testing.assert_close(found[name], one)


def test_norms_of_flat_parameters_are_those_of_the_model(ranks):
    for one in ranks[1]:
        assert one["flat"] == pytest.approx(runs.clipped(False, "norm")[1], rel=1e-5)


def test_a_step_with_a_nan_is_skipped_on_all(ranks):
    weights, number = runs.skipped(False)
    for found, told in (one["skipped"] for one in ranks[1]):
        assert told == number == 1
        for name, one in weights.items():
            torch.testing.assert_close(found[name], one)


def test_values_gradients_and_edits_at_calls_are_those_of_one_process(ranks):
    truth = runs.looked_at(False)
    for one in ranks[1]:
        for site, value in truth.items():
            torch.testing.assert_close(one["looked"][site], value)


def test_statistics_are_put_together(ranks, tmp_path):
    runs.watched(False, tmp_path / "alone")
    alone, record = gaff.load(tmp_path / "alone"), gaff.load(ranks[0] / "watched")
    for site in ("fc", "act", "fc.weight:param", "out.bias:param", "fc.weight:update"):
        for stat in ("mean", "rms", "min", "max"):
            found = record.series(site, stat, rank="all")
            assert list(found.values) == pytest.approx(list(alone.series(site, stat).values), rel=1e-4, abs=1e-6)


def test_what_cannot_be_is_refused_with_what_to_do(ranks):
    for one in ranks[1]:
        for name, told in one["refused"].items():
            assert "fully_shard (FSDP2)" in told, (name, told)
            assert not told.startswith("CRASH")
