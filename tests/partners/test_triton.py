"""The kernels for GPUs, run by Triton's interpreter on the CPU: another process, since Triton asks once whether to."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import math, sys
import torch
from test_statistics import DTYPES, EXACT, new_row, tensors
from gaff.record.statistics import Numbers
from gaff.training.statistics import fused, plain

dtype = getattr(torch, sys.argv[1])
several = [one.to(dtype) for one in tensors().values()] + [torch.randn(1001).to(dtype)[1:]]
several.append(torch.view_as_complex(torch.randn(50, 2) + 3).conj().imag.to(dtype))  # negated by a flag
known = torch.stack([new_row() for _ in several])
plain.observe_many_(several, known, True)
together, alone = known.clone(), known.clone()
for rows in (together, alone):
    rows.copy_(torch.stack([new_row() for _ in several]))
fused.observe_many_(several, together, True)
for one, row in zip(several, alone, strict=True):
    fused.observe_(one, row, True)
for rows in (together, alone):
    assert torch.equal(rows[:, EXACT], known[:, EXACT])
    for row, other in zip(rows.tolist(), known.tolist(), strict=True):
        one, right = Numbers(row), Numbers(other)
        if right.count:
            assert math.isclose(one.mean, right.mean, rel_tol=1e-12, abs_tol=1e-6 * right.std), (one.mean, right.mean)
            assert math.isclose(one.std, right.std, rel_tol=2e-6), (one.std, right.std)
fused.observe_(several[0], alone[0], True)  # a row is added to
assert alone[0, 0] == 2 * known[0, 0]
for shape in ((6, 5), (4, 3, 7, 9), (3, 70, 8), (2, 2, 4000)):
    x = torch.randn(shape).to(dtype)
    x.view(-1)[3] = math.nan
    units = torch.tensor([[-math.inf], [math.inf], [0.0]], dtype=torch.float64).repeat(1, shape[1])
    fused.observe_units_(x, units, x[0, 0].numel())
    rest = [0, *range(2, x.dim())]
    assert torch.equal(units[0], x.double().nan_to_num(-math.inf).amax(rest))
    assert torch.equal(units[1], x.double().nan_to_num(math.inf).amin(rest))
    sizes = x.double().abs().sum(rest)
    torch.testing.assert_close(units[2], sizes, rtol=1e-5, atol=0, equal_nan=True)
print("the same")
"""


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
def test_they_count_what_plain_torch_counts(dtype):
    tests = Path(__file__).parents[1]
    surroundings = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(tests)}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM, dtype], env=surroundings, capture_output=True, text=True
    )
    assert done.stdout == "the same\n", done.stderr[-2000:]
