"""Under tensor parallelism an address means the logical tensor: edits are those of one process."""

import pytest
import torch

import gaff
import logical_runs
from logical_runs import SETTINGS
from ranks import of_ranks

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
MOST_REFUSED = 0.02  # of all


@pytest.fixture(scope="module")
def alone():
    """What one process without any parallelism makes of each edit."""
    return {one: logical_runs.outcome(logical_runs.build(None, one[0]), *one[1:]) for one in logical_runs.every()}


@pytest.fixture(scope="module", params=list(SETTINGS))
def ranks(request):
    return request.param, of_ranks(logical_runs.found_by, SETTINGS[request.param], request.param)


def differences(found, truth):
    """Of one edit: what is not as in one process. Of quantised values one step of rounding may be another."""
    if isinstance(found, str) or isinstance(truth, str):
        return [] if isinstance(found, str) and isinstance(truth, str) else [found if isinstance(found, str) else truth]
    return [
        key
        for key, one in truth.items()
        if (one is None) != (found[key] is None)
        or (one is not None and found[key].shape != one.shape)
        or (one is not None and not torch.allclose(found[key], one, rtol=1e-3, atol=1e-4))
    ]


def test_every_edit_is_that_of_one_process(ranks, alone):
    setting, found = ranks
    wrong, refused = {}, {}
    for one, truth in alone.items():
        for rank, (rows, _) in enumerate(found):
            different = differences(rows[one], truth)
            if different and isinstance(rows[one], str) and not rows[one].startswith("CRASH"):
                refused[one] = rows[one]
            elif different:
                wrong[(*one, rank)] = different
    assert not wrong, f"{setting}: {len(wrong)} of {len(alone)}: {list(wrong.items())[:12]}"
    assert len(refused) <= MOST_REFUSED * len(alone), f"{setting}: {len(refused)}: {list(refused.items())[:12]}"


def test_parts_are_put_together_and_fit(ranks):
    setting, found = ranks
    truth, _ = logical_runs.whole(None)
    for one, reasons in (row for _, row in found):
        for name, value in truth.items():
            torch.testing.assert_close(one[name], value, rtol=1e-4, atol=1e-5)
        if setting in ("tp", "2d"):
            assert "dimension 2 over 2" in " ".join(reasons)


def test_a_plain_tensor_is_full_already():
    model = torch.nn.Linear(2, 2)
    with gaff.capture(model, ":output") as got:
        y = model(torch.ones(1, 2))
    assert torch.equal(got.full(":output"), y)
