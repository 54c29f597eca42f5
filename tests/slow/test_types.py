"""Types that users can rely on: strict type checkers read every public name in use, README, examples, notebooks."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jupytext
import pytest

import gaff

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parent.parent.parent
USAGE = ROOT / "tests" / "typed_usage.py"
# What is off is torch's own: Tensor.backward has no types. An expression alone is what a README shows.
STRICT = "# pyright: strict, reportUnknownMemberType=false, reportUnusedExpression=false\n"
# What is off is what torch, scikit-learn and transformers leave untyped.
UNTYPED = (
    "reportUnknownMemberType",
    "reportMissingTypeStubs",
    "reportUnknownVariableType",
    "reportUnknownArgumentType",
)


@pytest.fixture(params=["usage", "readme"])
def file(request, tmp_path):
    path = tmp_path / f"{request.param}.py"
    if request.param == "usage":
        text = USAGE.read_text().partition("\n")[2]
    else:
        text = "\n".join(re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL))
    path.write_text(STRICT + text)
    return path


def test_every_public_name_is_in_use():
    text = USAGE.read_text()
    assert [name for name in gaff.__all__ if f"gaff.{name}" not in text] == []


def pyright(*arguments):
    if shutil.which("node") is None:
        pytest.skip("pyright runs on node, and there is none here")
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def test_pyright_strict(file):
    told = pyright(str(file))
    assert told.returncode == 0, told.stdout


def test_pyright_strict_of_examples_and_notebooks(tmp_path):
    shutil.copytree(ROOT / "examples", tmp_path / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "notebooks").mkdir()
    for notebook in (ROOT / "docs" / "notebooks").glob("[01]*.md"):
        jupytext.write(jupytext.read(notebook), tmp_path / "notebooks" / f"{notebook.stem}.py", fmt="py:percent")
    places = [{"root": "examples"}, {"root": "notebooks", "reportUnusedExpression": False}]
    settings = {"typeCheckingMode": "strict", **dict.fromkeys(UNTYPED, False), "executionEnvironments": places}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    told = json.loads(pyright("--project", str(tmp_path), "--outputjson").stdout)
    found = [
        f"{one['file']}:{one['range']['start']['line'] + 1}: {one['message']}" for one in told["generalDiagnostics"]
    ]
    assert not found, "\n".join(found)
    assert told["summary"]["filesAnalyzed"] == len(list(tmp_path.rglob("*.py"))) > 20


def test_mypy_strict(file, tmp_path):
    settings = tmp_path / "mypy.ini"
    settings.write_text("[mypy]\nstrict = True\nuntyped_calls_exclude = torch\n")
    command = [sys.executable, "-m", "mypy", "--config-file", str(settings), "--cache-dir", str(tmp_path), str(file)]
    told = subprocess.run(command, capture_output=True, text=True)
    assert told.returncode == 0, told.stdout


def test_a_wrong_option_is_told_by_the_type_checker(tmp_path):
    path = tmp_path / "wrong.py"
    path.write_text(
        "import gaff\nfrom torch import nn\n"
        "gaff.capture(nn.ReLU(), 'x', evict='newest')\n"
        "gaff.clip_gradients(None, nrom=1.0)\n"
        "gaff.watch(evry=2)\n"
    )
    settings = tmp_path / "mypy.ini"
    settings.write_text("[mypy]\nstrict = True\n")
    command = [sys.executable, "-m", "mypy", "--config-file", str(settings), "--cache-dir", str(tmp_path), str(path)]
    told = subprocess.run(command, capture_output=True, text=True).stdout
    assert all(f"wrong.py:{line}: error" in told for line in (3, 4, 5)), told
