"""Where a NaN or inf began: planted faults are found, clean models raise no alarm."""

import re

import pytest
import torch

import gaff
from tests.clean import CLEAN
from tests.faults import FAULTS


@pytest.mark.filterwarnings("ignore:std")
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_found_where_it_is(fault):
    model, step = fault.build()
    report = gaff.find_nonfinite(step, model=model)
    assert report, report
    assert (report.op, report.direction) == (fault.op, fault.direction), report
    if fault.direction != "before":
        assert report.module == fault.module, report
        assert report.site.startswith(f"{fault.module}/{fault.op}#"), report
        assert report.line.startswith("faults.py:"), report
    else:
        assert report.site.startswith(fault.module), report
    assert re.search(fault.cause, report.cause), report


@pytest.mark.parametrize("build", CLEAN, ids=lambda build: build.__name__)
def test_no_alarm_on_a_clean_step(build):
    torch.manual_seed(0)
    model, step = build()
    report = gaff.find_nonfinite(step, model=model)
    assert not report, report
    assert report.ops
