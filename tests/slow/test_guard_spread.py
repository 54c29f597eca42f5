"""A guard over a model that lies on several processes names what it names in one, and all processes name the same."""

import pytest
import torch

import guard_runs
from guard_runs import FAULTS, SPREADS
from ranks import of_ranks

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module", params=list(SPREADS))
def reports(request):
    """By fault: the report of each rank."""
    found = of_ranks(guard_runs.found_by, SPREADS[request.param], request.param)
    return {fault: [one[fault] for one in found] for fault in FAULTS}


@pytest.mark.parametrize("fault", FAULTS)
def test_all_processes_name_what_one_process_alone_names(reports, fault):
    torch.manual_seed(0)
    alone = guard_runs.guarded(guard_runs.Net(fault), fault, slice(None))
    for one in reports[fault]:
        assert (one.site, one.direction, one.line) == (alone.site, alone.direction, alone.line)
        assert one.cause.split(":")[0].split(" of ")[0] == alone.cause.split(":")[0].split(" of ")[0]


@pytest.mark.parametrize("fault", ["part", "backward"])
def test_the_process_is_told_and_numbers_are_of_its_part(reports, fault):
    last = len(reports[fault]) - 1
    for one in reports[fault]:
        assert one.rank == last
        assert f", on rank {last}" in str(one).splitlines()[0]
        rows, columns = (int(size) for size in one.output.shape.split("x"))
        assert one.output.elements == rows * columns
        assert one.output.first == (rows - 1, columns - 1)
