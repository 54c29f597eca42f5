"""The documentation: every example runs, every name, port, error and command has its place."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import gaff
from gaff.address.grammar import PORTS
from gaff.training.rules import known, registry  # noqa: F401

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "docs"))
import made_pages  # noqa: E402

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
ALL_TEXT = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
EXAMPLES = [page for page in PAGES if "```python" in page.read_text(encoding="utf-8")]


@pytest.mark.parametrize("page", EXAMPLES, ids=lambda page: page.name)
def test_examples_run(page, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # some write files
    monkeypatch.setattr(registry, "RULES", dict(registry.RULES))  # an example declares one
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    names = {}
    for block in blocks:
        exec(compile(block, str(page), "exec"), names)


def test_every_public_name_port_error_and_command_is_documented():
    for name in gaff.__all__:
        assert name in ALL_TEXT, name
    for port in PORTS:
        assert f":{port}" in ALL_TEXT, port
    for command in (
        "gaff trace",
        "gaff take",
        "gaff harvest",
        "gaff check",
        "gaff sites",
        "gaff apply",
        "gaff nan",
        "gaff anatomy",
        "gaff watch",
        "gaff report",
        "gaff runs",
        "gaff diff",
        "gaff export",
        "gaff replay",
        "gaff doctor",
    ):
        assert command in ALL_TEXT, command
    for name in [
        name
        for name in vars(gaff.keep)
        if callable(getattr(gaff.keep, name)) and name in ("rows", "positions", "channels", "heads", "mean", "norm")
    ]:
        assert name in ALL_TEXT, name


def test_every_rule_is_documented_as_it_is():
    text = " ".join((ROOT / "docs" / "rules.md").read_text(encoding="utf-8").split()).lower()
    ours = [one for one in registry.RULES.values() if (one.check.__module__ or "").startswith("gaff.")]
    assert len(ours) > 25
    for one in ours:
        assert f"## `{one.name}`" in text, one.name
        for told in (one.means, one.cause, one.remedy, " ".join(one.check.__doc__.split())):
            assert " ".join(told.split()).lower() in text, (one.name, told)
    assert {"## `loss_spike`", "## `rank_divergence`"} <= {
        line for line in (ROOT / "docs" / "rules.md").read_text().splitlines() if line.startswith("## ")
    }


def test_every_option_of_watch_is_explained():
    from gaff.training.watch.settings import WatchOptions

    page = (ROOT / "docs" / "watch.md").read_text(encoding="utf-8")
    for option in (
        "--out",
        "--only",
        "--skip",
        "--budget",
        "--every",
        "--rules-off",
        "--interval",
        "--quiet",
        "--plain",
        "--live",
        "--keep-batch",
    ):
        assert option in page
    for option in ("model", "optimizer", *WatchOptions.__annotations__):
        assert f"{option}:" in gaff.watch.__doc__ or f"{option}, " in gaff.watch.__doc__, option


def test_every_option_of_capture_is_explained():
    from gaff.sessions.request import Options

    for option in Options.__dataclass_fields__:
        assert re.search(rf"\b{option}[:,] ", gaff.capture.__doc__ + gaff.edit.__doc__), option


def test_every_edit_and_every_limit_of_clipping_is_documented():
    from gaff.training.clipping_limits import Limits

    for name in gaff.edits.__all__:
        assert f"`{name}" in ALL_TEXT or name in ("Edit", "Event"), name
    for limit in Limits.__dataclass_fields__:
        assert f"{limit}" in gaff.clip_gradients.__doc__, limit
        assert limit in ALL_TEXT or limit == "norm_type", limit


def test_every_public_name_has_its_place_in_the_reference_with_an_example():
    pages = [page.read_text(encoding="utf-8") for page in (ROOT / "docs" / "reference").glob("*.md")]
    examples = "\n".join(block for page in pages for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL))
    for name in gaff.__all__:
        home = "gaff.errors\n" if name == "GaffError" else f"gaff.{name}"
        assert any(f":: {home}" in page for page in pages), name
        assert f"gaff.{name}" in examples or name == "GaffError", name
    for name in gaff.edits.__all__:
        assert any(f"gaff.edits.{name}\n" in page for page in pages), name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    prose = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    made = {ROOT / "docs" / "reference" / f"{name}.md" for name in made_pages.MADE}  # there once the site was built
    for target in re.findall(r"\]\(([^)#]+)\)", prose):
        path = (page.parent / target).resolve()
        assert path in made or path.exists(), target


@pytest.mark.parametrize("name", made_pages.MADE)
def test_pages_that_are_made_hold_what_they_tell(name):
    text = made_pages.MADE[name]()
    told = {"all-messages": "never fired in", "commands": "## gaff watch", "compared-tables": "| hooks by hand |"}
    assert told[name] in text


def test_every_decision_is_listed():
    pages = {page.name for page in (ROOT / "docs" / "decisions").glob("0*.md")}
    index = (ROOT / "docs" / "decisions" / "index.md").read_text(encoding="utf-8")
    assert pages
    assert all(page in index for page in pages)


def test_the_readme_names_the_two_commands():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for command in ("demo", "test"):
        assert f"make {command}" in text
        assert f"\n{command}:" in makefile


@pytest.mark.slow
@pytest.mark.parametrize("example", ["attention.py", "digits.py", "minilm.py", "resnet50.py", "train_digits.py"])
def test_the_examples_run(example):
    ran = subprocess.run([sys.executable, f"examples/{example}"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    expected = {"digits.py": "this digit is a 1", "minilm.py": "0.665  0.060", "resnet50.py": "(1, 2048, 7, 7)"}
    expected |= {"train_digits.py": "epoch 5: loss", "attention.py": "looking at [SEP]: 0.659"}
    assert expected[example] in ran.stdout


@pytest.mark.slow
def test_the_example_of_a_harvest_runs(tmp_path):
    command = [sys.executable, "examples/words.py", str(tmp_path / "words")]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert "3 sites, 21358 rows, 6 shards, complete" in ran.stdout
    assert "monday   tuesday, sunday" in ran.stdout


def printed_by(example, folder):
    command = [sys.executable, f"examples/{example}", str(folder)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.mark.slow
def test_the_example_of_influence_mends_the_mistake(tmp_path):
    sure = [float(one) for one in re.findall(r"^ +([0-9.]+)%", printed_by("influence.py", tmp_path), re.MULTILINE)]
    assert len(sure) == 3
    assert sure[1] > max(sure[0], sure[2]) + 20  # without those that speak against it the answer is right
    assert (tmp_path / "influence.png").stat().st_size > 10_000


@pytest.mark.slow
def test_the_example_of_a_sparse_autoencoder_keeps_the_layer(tmp_path):
    found = re.findall(r": ([0-9.]+)$", printed_by("dictionary.py", tmp_path), re.MULTILINE)
    bare, spliced, mean = map(float, found)
    assert bare < spliced < bare + (mean - bare) / 4
    assert "<mark>" in (tmp_path / "features.html").read_text(encoding="utf-8")
