"""What the health rules find in faulty runs, and that healthy ones raise no alarm: both rates are in the benchmarks."""

import pytest
import torch

import gaff
from tests.training_clean import CLEAN
from tests.training_faults import FAULTS

pytestmark = pytest.mark.slow
SEEDS = (0, 1, 2)


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def watched(build, seed, **options):
    torch.manual_seed(seed)
    run = build()
    with gaff.watch(run.model, run.optimizer, every=2, **options) as watch:
        run.go()
    assert watch.failure is None
    return watch.findings


@pytest.mark.filterwarnings("ignore:.*lr_scheduler.*:UserWarning")
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_named_first_with_its_site(fault, seed):
    found = watched(fault.build, seed)
    assert found, "nothing was found"
    assert (found[0].rule, found[0].site) in [(rule, site) for rule in fault.rule for site in fault.sites], found
    assert not found[0].is_over
    assert found[0].evidence or found[0].message


@pytest.mark.filterwarnings("ignore:.*lr_scheduler.*:UserWarning")
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("build", CLEAN, ids=lambda build: build.__name__)
def test_a_healthy_run_raises_no_alarm(build, seed):
    told = []
    found = watched(build, seed, tell=lambda text: told.append(text) if "gaff ·" in text else None)
    assert [one for one in found if one.severity != "info" and not one.is_over] == []
    assert told == []
