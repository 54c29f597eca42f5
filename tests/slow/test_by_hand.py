"""Several processes: code that goes on by hand, ranks that do not see the same, and what is refused for it."""

import pytest

import by_hand_runs
from ranks import of_ranks

pytestmark = pytest.mark.slow
LINEAR = ("scale", "zero")


def test_edits_of_summands_are_those_of_one_process_or_refused():
    both = of_ranks(by_hand_runs.summands, 2)
    for found in both:
        for (site, name), one in found.items():
            if site in ("5", "1") or name in LINEAR:  # whole
                assert one is True, (site, name)
            else:
                assert "this process holds a part of the tensor here" in str(one), (site, name)
    assert both[0] == both[1]


def test_placements_that_code_tells_changes_or_turns():
    for found in of_ranks(by_hand_runs.places, 2):
        assert found["gradients"]
        assert found["summed"]
        assert "nothing tells which" in found["turned"]


def test_every_rank_says_the_same_of_a_part_of_one_value_and_of_parts_with_equal_sums():
    both = of_ranks(by_hand_runs.one_value, 2)
    assert both[0] == both[1]
    assert all("nothing tells which" in one for one in both[0])


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_a_rank_that_looks_for_the_origin_of_a_nan_leaves_the_others_alone(kind):
    both = of_ranks(by_hand_runs.bad_rows, 2, kind)
    assert [one[0] for one in both] == [3, 3]
    findings = {rank: (site, cause) for rule, rank, site, cause in both[0][1] if rule == "nonfinite"}
    assert findings[1][0].startswith(":input")
    if kind == "ddp":
        assert "in another process" in findings[0][1]


def test_the_origin_on_a_rank_whose_own_rows_are_fine():
    healthy, bad = of_ranks(by_hand_runs.origin, 2)
    assert "another process did" in healthy
    assert "the input held" in bad


def test_guarding_uneven_batches_inside_join():
    assert of_ranks(by_hand_runs.uneven, 2) == [True, True]


def test_what_has_no_answer_is_refused_on_every_rank():
    both = of_ranks(by_hand_runs.refusals, 2)
    assert both[0] == both[1]
    assert "that are spread over processes" in both[0]["norms"]
    assert "differ between processes" in both[0]["mixed"]
    assert "over tensor parallelism" in both[0]["localized"]
    assert "over tensor parallelism" in both[0]["clipped"]
    assert "skip with a value" in both[0]["skip"]


@pytest.mark.parametrize("kind", ["fsdp2", "tp"])
def test_an_edited_weight_stands_in_for_what_a_checkpoint_recomputes(kind):
    assert of_ranks(by_hand_runs.recomputed_regions, 2, kind) == [{False: True, True: True}] * 2
