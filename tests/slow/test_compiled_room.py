"""Hooks of ours in compiled code take none of the variants that torch keeps for the program."""

import pytest
import torch
from torch import nn
from torch._dynamo import config
from torch._dynamo.exc import FailOnRecompileLimitHit

import gaff
from gaff.compat import compiler

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not compiler.traces_gradient_hooks(), reason="hooks inside graphs need torch 2.13"),
    pytest.mark.filterwarnings("ignore:The .grad attribute"),
]


@pytest.fixture(autouse=True)
def anew():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def made():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    return model, torch.compile(model, backend="aot_eager", dynamic=False, fullgraph=True)


def run(compiled, sizes):
    for size in sizes:
        compiled(torch.ones(size, 4)).sum().backward()


def test_after_a_session_the_program_has_all_of_its_own_variants():
    _, compiled = made()
    limit = config.recompile_limit
    run(compiled, range(2, 7))
    with gaff.capture(compiled, "0") as got:
        run(compiled, range(2, 9))  # each once more, with a hook inside
    assert [len(one) for one in got.all("0")] == list(range(2, 9))
    assert config.recompile_limit == limit
    with gaff.edit(compiled, {"2": gaff.edits.scale(2.0)}) as change:
        run(compiled, range(2, 4))
    assert "ran eagerly" not in str(change.receipt)
    run(compiled, range(2, 2 + limit))  # as many as without any session
    with pytest.raises(FailOnRecompileLimitHit):
        run(compiled, [40])


@pytest.mark.parametrize("first", [0, 1])
def test_sessions_that_are_open_at_once_leave_the_limit_as_it_was(first):
    _, compiled = made()
    limit = config.recompile_limit
    both = [gaff.capture(compiled, "0"), gaff.capture(compiled, "2")]
    run(compiled, [2])
    for one in both:
        one.__enter__()
    assert config.recompile_limit == limit
    run(compiled, range(2, 6))
    both[first].__exit__(None, None, None)
    run(compiled, range(2, 12))
    both[1 - first].__exit__(None, None, None)
    assert config.recompile_limit == limit
    run(compiled, range(2, 2 + limit))


def test_a_limit_that_the_program_sets_meanwhile_stays():
    _, compiled = made()
    limit = config.recompile_limit
    try:
        run(compiled, [2])
        with gaff.capture(compiled, "0"):
            config.recompile_limit = 17
            run(compiled, [2])
        assert config.recompile_limit == 17
    finally:
        config.recompile_limit = limit


def test_a_watched_training_has_all_of_its_own_variants(tmp_path):
    model, compiled = made()
    limit = config.recompile_limit
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with gaff.watch(compiled, optimizer, out=tmp_path / "run", every=1) as watch:
        for step in range(3 * limit):
            optimizer.zero_grad()
            run(compiled, [2 + step % limit])
            optimizer.step()
    assert (watch.failure, config.recompile_limit) == (None, limit)
    record = gaff.load(tmp_path / "run")
    assert record.steps == 3 * limit
    assert len(record.series("0", "rms")) >= limit - 1
    run(compiled, range(2, 2 + limit))


@pytest.mark.parametrize("count", [4, 12])
def test_blocks_that_are_compiled_one_by_one_are_one_way_of_looking(count):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(4, 4)

        def forward(self, x):
            return x + self.a(x).relu()

    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(count)))
    for one in model:
        one.compile(backend="aot_eager")
    for pattern in ("*", "*.a", "*.a:grad_output"):
        with gaff.capture(model, pattern) as got:
            model(torch.ones(2, 4)).sum().backward()
        assert "ran eagerly" not in str(got.receipt), pattern
        assert len(got) == count
