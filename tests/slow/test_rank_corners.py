"""Runs in which processes differ as they are meant to, or hold parts: numbers of the whole, and no false findings."""

import math

import pytest
import torch

import gaff
import rank_corners
from ranks import of_ranks

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def test_updates_of_uneven_parts_count_by_their_size(tmp_path):
    truth = of_ranks(rank_corners.uneven_updates, 2, tmp_path / "run")[0]
    told = gaff.load(tmp_path / "run").series("weight:update", "rms", rank="all").values
    assert told == pytest.approx(truth, rel=0.02)  # of the larger part every third element is told


def test_a_part_without_a_gradient_is_no_weight_without_one(tmp_path):
    of_ranks(rank_corners.half_of_the_rows, 2, tmp_path / "run")
    run = gaff.load(tmp_path / "run")
    assert run.series("0.weight:grad", "zeros", rank=1).values[-1] == 1.0
    assert run.series("0.weight:grad", "zeros", rank="all").values[-1] == pytest.approx(0.55, abs=0.01)
    assert [one.rule for one in run.findings] == []


def test_parameters_of_each_rank_count_each_and_are_compared_with_none(tmp_path):
    first = of_ranks(rank_corners.meant_to_differ, 2, "own expert", tmp_path / "run")
    run = gaff.load(tmp_path / "run")
    assert "rank_divergence" not in [one.rule for one in run.findings]
    told = run.series("expert.weight:grad", "norm", rank="all").values[0]
    assert told == pytest.approx(math.hypot(*(one["expert.weight"] for one in first)), rel=1e-4)
    own = [norm for name, norm in first[1].items() if name.startswith("expert")]
    assert run.scalar("grad_norm", rank="all").values[0] == pytest.approx(
        math.hypot(*first[0].values(), *own), rel=1e-4
    )


@pytest.mark.parametrize(
    ("kind", "found"),
    [("averaged", []), ("one skips", ["warning"]), ("averaged unseen", ["warning"]), ("one moves", ["error"])],
)
def test_replicas_that_are_averaged_now_and_then_are_no_fault(tmp_path, kind, found):
    """Where gradients are never reduced, weights may be averaged at steps that no look has seen."""
    of_ranks(rank_corners.meant_to_differ, 2, kind, tmp_path / "run")
    told = [one for one in gaff.load(tmp_path / "run").findings if one.rule == "rank_divergence"]
    assert [one.severity for one in told] == found
    assert all(("averaged at steps that were not looked at" in one.cause) == (found == ["warning"]) for one in told)


def test_a_loss_of_which_each_process_has_a_summand_is_told_by_nobody(tmp_path):
    placed = of_ranks(rank_corners.partial_loss, 2, tmp_path / "run")
    assert all(map(all, placed))
    run = gaff.load(tmp_path / "run")
    assert "loss" not in run.scalars
    assert any("the loss 'loss' is a sum over processes that is still due (Partial)" in note for note in run.notes)


def test_gradients_that_fsdp2_has_not_reduced_yet():
    for found in of_ranks(rank_corners.put_off, 2):
        value, receipt = found["put off"]
        assert value is None
        assert "has put the reduction of this gradient off" in receipt
        for kind in ("capture", "edit"):
            assert "0.weight:grad: FSDP2 holds gradients of backward passes before this session" in found[kind]
        torch.testing.assert_close(found["both"], 2 * found["one"])


def test_units_across_parts_are_refused_before_anything_is_clipped():
    for told in of_ranks(rank_corners.spread_groups, 2):
        assert "1.weight" in told
        assert "units lie across its parts" in told


def test_what_is_kept_is_copied_beside_the_threads_of_gloo():
    assert of_ranks(rank_corners.kept_beside_gloo, 2) == [(False, True)] * 2
    assert rank_corners.kept_beside_gloo(0) == (True, True)  # without a process group


def test_stages_of_a_pipeline_with_the_same_names_are_not_one_model(tmp_path):
    """What is not one tensor is not put together; the loss is told by the process that has it."""
    losses = of_ranks(rank_corners.two_stages, 2, tmp_path / "run")[1]
    run = gaff.load(tmp_path / "run")
    for read in (
        lambda: run.scalar("grad_norm", rank="all"),
        lambda: run.series("0.weight:grad", "norm", rank="all"),
        lambda: run.series("0.weight:param", "rms", rank="all"),
    ):
        with pytest.raises(gaff.RecordError, match="ranks 0 and 1 tell different numbers of it"):
            read()
    assert run.scalar("loss", rank=1).values == pytest.approx(losses)
    assert "the loss 'loss' went from about" in str(run.verdict), str(run.verdict)


def test_steps_that_processes_count_apart_are_not_put_together(tmp_path):
    of_ranks(rank_corners.one_probes, 2, tmp_path / "run")
    run = gaff.load(tmp_path / "run")
    for read in (lambda: run.scalar("grad_norm", rank="all"), lambda: run.series("0", "rms", rank="all")):
        with pytest.raises(gaff.RecordError, match="where something else was trained as well: expected one rank"):
            read()
    assert len(run.series("0", "rms", rank=1)) == 12


def test_the_norm_of_several_models_is_that_of_each_replica(tmp_path):
    """Optimizers count steps of their own; of replicas together the norm is what each of them tells."""
    of_ranks(rank_corners.two_models, 2, tmp_path / "run")
    run = gaff.load(tmp_path / "run")
    together = run.scalar("grad_norm", rank="all")
    for rank in (0, 1):
        alone = run.scalar("grad_norm", rank=rank)
        assert together.steps == alone.steps
        assert together.values == pytest.approx(alone.values)


def test_gradients_of_a_method_that_is_another_forward_are_edited_from_the_first_step():
    for true, halved, captured in of_ranks(rank_corners.another_forward, 2):
        assert halved == pytest.approx([true / 2, true / 2], rel=1e-5)
        assert captured == pytest.approx(true, rel=1e-5)


def test_limits_beside_a_scaler_are_made_by_all_that_hold_parts():
    """One that let its part pass left the others waiting for it."""
    for changed, is_itself in of_ranks(rank_corners.limited_beside_a_scaler, 2):
        assert changed == pytest.approx([0.0, -1.0, -0.5, -0.25], abs=1e-6)
        assert not is_itself


@pytest.mark.parametrize("how", ["around", "inside another", "late"])
def test_replicas_that_drift_apart_are_told_however_they_are_wrapped(tmp_path, how):
    of_ranks(rank_corners.wrapped, 2, how, tmp_path / "run")
    assert "rank_divergence" in [one.rule for one in gaff.load(tmp_path / "run").findings]


def test_a_model_that_is_spread_after_its_first_run_has_the_norm_of_the_whole(tmp_path):
    truth = of_ranks(rank_corners.sharded_late, 2, tmp_path / "run")[0]
    told = gaff.load(tmp_path / "run").scalar("grad_norm", rank="all").values
    assert told[-len(truth) :] == pytest.approx(truth, rel=1e-4)


def test_each_process_keeps_batches_of_its_own(tmp_path):
    of_ranks(rank_corners.kept_batches, 2, tmp_path / "run")
    record = gaff.load(tmp_path / "run")
    kept = sorted(one.name for one in (tmp_path / "run" / "batches").iterdir())
    assert any("rank1" in one for one in kept)
    first = record.findings[0]
    assert (first.rule, first.rank, first.site) == ("nonfinite", 1, ":input[0]")
    assert "rank1" in first.evidence["kept"]
