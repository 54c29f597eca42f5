"""A guard over a model that lies on several processes names what it names in one, and all processes name the same."""

import pytest
import torch

import guard_runs
from guard_runs import FAULTS, SPREADS

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module", params=list(SPREADS))
def reports(request, tmp_path_factory):
    """By fault: the report of each rank."""
    out = tmp_path_factory.mktemp(request.param)
    world = SPREADS[request.param]
    finished = torch.multiprocessing.get_context("spawn").Barrier(world)
    arguments = (request.param, str(out / "store"), str(out), finished)
    torch.multiprocessing.spawn(guard_runs.rank_main, arguments, nprocs=world)
    found = [torch.load(out / f"{rank}.pt", weights_only=False) for rank in range(world)]
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
