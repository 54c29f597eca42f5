"""The command line: exit codes, one-line errors, data, nothing unpickled, no torch for --help."""

import importlib
import json
import pickle
import re
import shlex
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import nn

import gaff
from gaff.cli import COMMANDS, export, inputs, main, parser_of, tensors
from gaff.cli.models import Loaded

DIGITS = "examples/digits.py:model"
IMAGE = "examples/digits.py:image"


def run(capsys, *argv):
    code = main(list(argv))
    out, err = capsys.readouterr()
    return code, out, err


def test_trace_prints_a_table_a_tree_and_data(capsys, tmp_path):
    code, out, _ = run(capsys, "trace", DIGITS, IMAGE, "--backward", "--out", str(tmp_path / "t.json"))
    assert code == 0
    assert out.startswith("DigitNet on cpu: 12 calls, 3674 parameters")
    assert "head.classes.bias:param" in out
    code, out, _ = run(capsys, "trace", DIGITS, IMAGE, "--tree", "--no-flops")
    assert "    head.hidden  Linear  1x64 -> 1x32  2080 params" in out
    code, out, _ = run(capsys, "trace", DIGITS, IMAGE, "--json")
    assert json.loads(out)["rows"][0]["cls"] == "DigitNet"
    code, out, _ = run(capsys, "trace", DIGITS, IMAGE, "--depth", "0")
    assert "calls deeper inside left out" in out.splitlines()[3]
    code, out, _ = run(capsys, "trace", DIGITS, "randn:2x1x8x8", "--plain")
    assert out.splitlines()[1].split("\t")[:3] == ["site", "class", "input"]
    assert (tmp_path / "t.json").exists()


def test_take_says_that_the_model_is_in_training_mode(capsys, tmp_path):
    (tmp_path / "net.py").write_text(
        "from torch import nn\n"
        "def trains():\n    return nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5))\n"
        "def fixed():\n    return trains().eval()\n"
        "def plain():\n    return nn.Linear(3, 4)\n"
    )
    for name, is_told in (("trains", True), ("fixed", False), ("plain", False)):
        code, _, told = run(capsys, "take", f"{tmp_path}/net.py:{name}", ":output", "--input", "randn:2x3")
        assert (code, "the model is in training mode" in told) == (0, is_told)


def test_take_writes_safetensors(capsys, tmp_path):
    out_file = tmp_path / "new" / "f.safetensors"
    code, out, _ = run(capsys, "take", DIGITS, "features", "head.*", "--input", IMAGE, "--out", str(out_file))
    assert code == 0
    assert "features      1x16x2x2  float32    256B" in out
    assert {name: tuple(x.shape) for name, x in load_file(out_file).items()} == {
        "features": (1, 16, 2, 2),
        "head.hidden": (1, 32),
        "head.classes": (1, 10),
    }
    code, out, _ = run(capsys, "take", DIGITS, "features", "--input", IMAGE, "--json")
    assert json.loads(out) == {"features": {"shape": [1, 16, 2, 2], "dtype": "float32"}}


@pytest.fixture
def plan(tmp_path):
    def save(changes):
        path = tmp_path / "plan.json"
        gaff.Plan.edit(changes).save(path)
        return str(path)

    return save


def test_apply_runs_a_model_under_a_plan_and_tells_what_changed(capsys, tmp_path, plan):
    out_file = tmp_path / "f.safetensors"
    code, out, _ = run(capsys, "apply", "examples/half.json", DIGITS, IMAGE, "--out", str(out_file))
    assert code == 0
    assert "features     features        1    60/64     1    0.5" in out
    assert re.search(r":output  1x10 +10/10", out)
    assert load_file(out_file)[":output"].shape == (1, 10)
    path = plan({"features": gaff.edits.add(torch.ones(16, 1, 1)), "head.hidden:grad_output": gaff.edits.clip(0.1)})
    code, out, _ = run(capsys, "apply", path, DIGITS, IMAGE, "--backward", "--json")
    told = json.loads(out)
    assert [row["hits"] for row in told["receipt"]] == [1, 1]
    assert told["outputs"][0]["changed"] == "10/10"
    code, _, err = run(capsys, "apply", path, DIGITS, IMAGE)
    assert code == 1
    assert "the plan edits gradients: add --backward or --loss" in err


ODD_MODELS = """
import torch
from torch import nn

class Odd(nn.Module):
    def __init__(self, run):
        super().__init__()
        torch.manual_seed(0)
        self.lin, self.run, self.count = nn.Linear(4, 4), run, 0
        self.register_buffer("out", torch.zeros(2, 4))

    def forward(self, x):
        with torch.no_grad():
            return self.run(self, x)

def counts(self, x):
    self.count += 1
    return self.lin(x) * self.count

returns_a_buffer = Odd(lambda self, x: self.out.copy_(self.lin(x)))
writes_into_its_input = Odd(lambda self, x: x.add_(self.lin(x)))
sparse = Odd(lambda self, x: self.lin(x).to_sparse())
nested = Odd(lambda self, x: torch.nested.as_nested_tensor([self.lin(x)[0], x[1][:2]], layout=torch.jagged))
small = Odd(lambda self, x: self.lin(x).to(torch.float8_e4m3fn))
counting = Odd(counts)
x = torch.ones(2, 4)
"""


@pytest.mark.parametrize("name", ["returns_a_buffer", "writes_into_its_input", "sparse", "nested", "small", "counting"])
@pytest.mark.filterwarnings("ignore")
def test_apply_compares_what_two_runs_gave(capsys, tmp_path, plan, name):
    file = tmp_path / f"odd_{name}.py"
    file.write_text(ODD_MODELS)
    found = {}
    for factor in (1.0, 3.0):
        path = plan({"lin": gaff.edits.scale(factor)})
        code, out, err = run(capsys, "apply", path, f"{file}:{name}", f"{file}:x", "--json")
        assert code == 0, err
        found[factor] = json.loads(out)["outputs"][0]["changed"]
        assert ("it keeps something that is no buffer" in err) == (name == "counting")
    if name != "counting":
        assert found == {1.0: "0/6" if name == "nested" else "0/8", 3.0: "4/6" if name == "nested" else "8/8"}


def test_apply_says_what_does_not_fit(capsys, tmp_path, plan):
    for changes, message in (
        ({"nosuch": gaff.edits.zero()}, "no module 'nosuch' in DigitNet"),
        ({"features": gaff.edits.add(torch.ones(7))}, "features: the edit does not fit 1x16x2x2 float32"),
    ):
        code, _, err = run(capsys, "apply", plan(changes), DIGITS, IMAGE)
        assert (code, err.count("\n")) == (1, 1)
        assert message in err
    code, _, err = run(capsys, "apply", str(tmp_path / "none.json"), DIGITS, IMAGE)
    assert "cannot be read" in err


def test_sites_as_tree_data_and_with_shapes(capsys):
    code, out, _ = run(capsys, "sites", DIGITS)
    assert (code, out.splitlines()[0]) == (0, ":output  <DigitNet>  (3674 params)")
    code, out, _ = run(capsys, "sites", DIGITS, "--json")
    assert json.loads(out)["modules"][2]["path"] == "features.0"
    code, out, _ = run(capsys, "sites", DIGITS, "**<Linear>", "--input", IMAGE, "--plain")
    assert out.splitlines()[0].split("\t") == ["head.hidden", "Linear", "2080", "1x64", "1x32", "float32"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("trace", "nowhere.py:model"), "gaff: 'nowhere.py' is no file"),
        (
            ("trace", "examples/digits.py:nothing"),
            "gaff: examples/digits.py:nothing: .* has no 'nothing': expected one of Head, DigitNet, digits, model, image",
        ),
        (("trace", "examples/digits.py:TEST_FROM"), "is of type int: expected a torch module"),
        (("trace", "digits"), "gaff: 'digits' is no model: expected file.py:name"),
        (("trace", "no_such.part:model"), "gaff: no module 'no_such': expected one of this folder or one that is inst"),
        (("trace", "examples/digits:model"), "gaff: 'examples/digits' is no name of a module: expected package.module"),
        (("trace", "torch.nn:Identiy"), "torch.nn has no 'Identiy': expected one of Identity"),
        (("nan", DIGITS, IMAGE, "--json"), "'--json' comes too late: expected options, with what is given"),
        (("trace", DIGITS, "randn:1xa"), "gaff: input 'randn:1xa' has no shape: expected randn:1x3x224x224"),
        (("trace", DIGITS, "some words"), "gaff: input 'some words' is not understood"),
        (("trace", DIGITS, "no.npy"), "gaff: input 'no.npy' is no file"),
        (("trace", DIGITS, "randn:1x3x8x8"), "gaff: RuntimeError: Given groups=1"),
        (
            ("take", DIGITS, "head.hiden", "--input", IMAGE),
            "gaff: no module 'head.hiden' in DigitNet .*nearest: head.hidden",
        ),
        (("take", DIGITS, "head", "--out", "x.pt"), "gaff: --out 'x.pt' has another ending"),
        (("trace", "examples/digits.py:modle"), "has no 'modle': expected one of model, Head, DigitNet, digits, image"),
        (
            ("trace", DIGITS),
            "could not be called: .*missing 1 required positional argument.*give an input, such as randn:",
        ),
        (("take", DIGITS, IMAGE, "features"), "looks like an input, where a site is expected: give it as --input"),
        (("trace", "transformers:/nowhere"), "holds no config.json"),
        (("trace", "nothing.pt2"), "gaff: 'nothing.pt2' is no file"),
    ],
)
def test_errors_are_lines_of_gaffs_own(capsys, argv, message):
    code, out, err = run(capsys, *argv)
    assert (code, out) == (1, "")
    assert all(line.startswith("gaff: ") for line in err.splitlines())
    assert len(err.splitlines()) == (3 if "RuntimeError" in message else 1)  # of a model: its module and line, too

    assert re.search(message, err), err


def test_debug_shows_the_traceback():
    with pytest.raises(RuntimeError, match="Given groups"):
        main(["trace", DIGITS, "randn:1x3x8x8", "--debug"])


def test_nothing_asked_for_shows_the_help_and_exits_with_two(capsys):
    assert main([]) == 2
    assert "usage: gaff" in capsys.readouterr().out


def left(capsys, *argv):
    """What a command that leaves by SystemExit does: its code and its output."""
    with pytest.raises(SystemExit) as caught:
        main(list(argv))
    out, err = capsys.readouterr()
    return caught.value.code, out, err


@pytest.mark.parametrize(
    ("argv", "usage", "message"),
    [
        ("tarce", "gaff [-h]", "'tarce' is no command: expected one of trace, take, .*; did you mean 'trace'?"),
        ("TRACE m", "gaff [-h]", "'TRACE' is no command: expected one of trace, .*; did you mean 'trace'?"),
        ("hlep", "gaff [-h]", "'hlep' is no command: expected one of trace, .*; did you mean 'help'?"),
        ("help tarce", "gaff [-h]", "'tarce' is no command: expected one of trace, .*; did you mean 'trace'?"),
        ("zzzz", "gaff [-h]", "'zzzz' is no command: expected one of trace, .*, replay; gaff --help tells more"),
        ("--halp", "gaff [-h]", "'--halp' is no option of gaff: expected one of .*; did you mean '--help'?"),
        (
            "watch --evry 3 -- python train.py",
            "gaff watch [options] -- COMMAND",
            "'--evry' is no option of gaff watch: expected one of --help, --out, .*; did you mean '--every'?",
        ),
        (
            "trace m --no-flosp",
            "gaff trace [-h]",
            "'--no-flosp' is no option of gaff trace: .*; did you mean '--no-flops'?",
        ),
        ("trace m --zzz=1", "gaff trace [-h]", "'--zzz' is no option of .*, --debug; gaff trace --help tells more"),
        ("nan --agian x.py", "gaff nan [-h]", "'--agian' is no option of gaff nan: .*; did you mean '--again'?"),
        ("replay r --modle x", "gaff replay [-h]", "'--modle' is no option of .*; did you mean '--model'?"),
        (
            "trace",
            "gaff trace [-h]",
            "nothing is given for MODEL: expected it as in the usage above; gaff trace --help tells more",
        ),
        ("nan", "gaff nan [-h]", "nothing is given for SCRIPT-OR-MODEL: expected it .*"),
        ("export runs/a", "gaff export [-h]", "nothing is given for --to: expected it as in the usage above; .*"),
        (
            "export runs/a --to cvs",
            "gaff export [-h]",
            "--to 'cvs' is unknown: expected one of csv, jsonl, .*, zarr; did you mean 'csv'?",
        ),
        (
            "watch --every x -- ls",
            "gaff watch [options]",
            "--every 'x' is no whole number: expected one such as 10; gaff watch --help tells more",
        ),
        (
            "watch --interval soon -- ls",
            "gaff watch [options]",
            "--interval 'soon' is no number: expected one such as 0.5; gaff watch --help tells more",
        ),
        (
            "watch --every",
            "gaff watch [options]",
            "--every has no value: expected one after it; gaff watch --help tells more",
        ),
        (
            "trace m --json=3",
            "gaff trace [-h]",
            "--json takes no value: expected it alone, got '3'; gaff trace --help tells more",
        ),
        (
            "trace m --h",
            "gaff trace [-h]",
            "--h is the beginning of several options: expected one of --help, --html; gaff trace --help tells more",
        ),
        (
            "runs a b",
            "gaff runs [-h]",
            "'b' is one word too many: expected no more than in the usage above; gaff runs --help tells more",
        ),
    ],
)
def test_a_slip_shows_the_usage_of_its_command_and_what_was_meant(capsys, argv, usage, message):
    code, out, err = left(capsys, *argv.split())
    assert (code, out) == (2, "")
    assert err.startswith(f"usage: {usage}")
    assert re.fullmatch(f"gaff: {message}".replace("?", r"\?"), err.splitlines()[-1]), err


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_a_command_has_an_example_that_is_understood(capsys, name):
    code, out, err = left(capsys, name, "--help")
    assert (code, err) == (0, "")
    assert out.startswith(f"usage: gaff {name} ")
    assert left(capsys, "help", name) == (0, out, "")
    program, command, *words = shlex.split(parser_of(name).epilog.removeprefix("example: "))
    assert (program, command) == ("gaff", name)
    assert parser_of(name).read(words)


def test_help_lists_every_file_that_is_a_command(capsys):
    files = {
        path.stem.rstrip("_")
        for path in Path(gaff.cli.__file__).parent.glob("*.py")
        if "\ndef add_to(" in path.read_text()
    }
    assert files == set(COMMANDS)
    code, out, _ = left(capsys, "--help")
    assert code == 0
    assert left(capsys, "help") == left(capsys, "help", "help") == (0, out, "")
    for name, command in COMMANDS.items():
        assert re.search(rf"^  {name} +{re.escape(command.SUMMARY)}$", out, re.MULTILINE)


def test_the_beginning_of_an_option_is_enough():
    assert parser_of("trace").read(["net.py:model", "--ou=t.json"]).out == "t.json"


def test_options_and_inputs_may_be_mixed(capsys):
    code, out, _ = run(capsys, "trace", DIGITS, "--no-flops", "randn:2x1x8x8", "--plain")
    assert code == 0
    assert out.splitlines()[1].split("\t")[:3] == ["site", "class", "input"]


@pytest.mark.parametrize(
    ("argv", "package", "message"),
    [
        (
            ("trace", "timm:resnet18"),
            "timm",
            "gaff: model 'timm:resnet18' needs the package 'timm', which is not installed: pip install timm\n",
        ),
        (
            ("trace", DIGITS, "x.npy"),
            "numpy",
            "gaff: input 'x.npy' needs the package 'numpy', which is not installed: pip install 'gaff[files]'\n",
        ),
        (
            ("take", DIGITS, "features", "--input", "randn:1x1x8x8", "--out", "x.safetensors"),
            "safetensors",
            "gaff: --out needs the package 'safetensors', which is not installed: pip install 'gaff[files]'\n",
        ),
    ],
)
def test_a_package_that_is_missing_is_named_with_how_to_install_it(capsys, monkeypatch, argv, package, message):
    def absent(name):
        if name.partition(".")[0] == package:
            raise ModuleNotFoundError(f"No module named {package!r}", name=package)
        return importlib.import_module(name)

    monkeypatch.setattr("gaff.compat.extras.import_module", absent)
    assert run(capsys, *argv) == (1, "", message)


@pytest.mark.parametrize(("name", "cls"), [("wandb", "Wandb"), ("mlflow", "MLflow"), ("trackio", "Trackio")])
def test_each_tracker_gets_the_sender_of_its_own(monkeypatch, name, cls):
    monkeypatch.setattr(f"gaff.integrations.{name}.{cls}", lambda **chosen: (name, chosen))
    assert export.TRACKERS[name]({"sites": ["fc1"]}) == (name, {"sites": ["fc1"]})


def test_inputs_of_every_kind(capsys, tmp_path):
    numpy.save(tmp_path / "x.npy", numpy.zeros((1, 1, 8, 8), dtype="float32"))
    save_file({"x": torch.zeros(2, 1, 8, 8)}, tmp_path / "x.safetensors")
    (tmp_path / "flat.py").write_text(
        "import torch\nmodel = torch.nn.Conv2d(3, 2, 1)\ndef preprocess(image):\n    return torch.ones(1, 3, 5, 5)\n"
    )
    Image.new("RGB", (6, 4)).save(tmp_path / "x.png")
    for spec, shape in (("x.npy", "1x1x8x8"), ("x.safetensors", "2x1x8x8")):
        code, out, err = run(capsys, "trace", DIGITS, str(tmp_path / spec), "--json")
        assert (code, err) == (0, "")
        assert json.loads(out)["rows"][0]["input"] == shape
    code, out, _ = run(capsys, "trace", f"{tmp_path}/flat.py:model", str(tmp_path / "x.png"), "--json")
    assert json.loads(out)["rows"][0]["input"] == "1x3x5x5"
    code, out, _ = run(capsys, "trace", "torch.nn:Identity", str(tmp_path / "x.png"), "--json")
    assert json.loads(out)["rows"][0]["input"] == "1x3x4x6"


def test_pickles_are_refused(capsys, tmp_path):
    numpy.save(tmp_path / "bad.npy", numpy.array([{}], dtype=object), allow_pickle=True)
    code, _, err = run(capsys, "trace", DIGITS, str(tmp_path / "bad.npy"))
    assert code == 1
    assert "allow_pickle=False" in err
    for members, message in (
        ({"m/models/model.json": b"{}"}, "older format that is unpickled on loading"),
        ({"m/archive_format": b"pt2", "m/data/sample_inputs/model.pt": pickle.dumps({1})}, "reads no pickles"),
        ({"m/archive_format": b"pt2", "m/data/weights/model.pt": b""}, "reads no pickles"),
        (
            {"m/archive_format": b"pt2", "m/data/weights/m_config.json": b'{"config": {"w": {"use_pickle": true}}}'},
            "reads no pickles",
        ),
        ({"m/archive_format": b"pt2", "m/data/constants/custom_obj_0": b""}, "reads no pickles"),
    ):
        with zipfile.ZipFile(tmp_path / "bad.pt2", "w") as archive:
            for name, content in members.items():
                archive.writestr(name, content)
        code, _, err = run(capsys, "trace", str(tmp_path / "bad.pt2"))
        assert code == 1
        assert message in err
    (tmp_path / "bad.pt2").write_bytes(b"nothing")
    assert "cannot be read" in run(capsys, "trace", str(tmp_path / "bad.pt2"))[2]


def test_a_saved_transformer_and_a_text(capsys, tmp_path):
    from transformers import BertConfig, BertModel, BertTokenizerFast

    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "fish"]))
    BertTokenizerFast(str(tmp_path / "vocab.txt")).save_pretrained(tmp_path)
    config = BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, vocab_size=7)
    BertModel(config).save_pretrained(tmp_path)
    capsys.readouterr()
    code, out, err = run(capsys, "trace", f"transformers:{tmp_path}", "a fish", "--json")
    assert (code, err) == (0, ""), err
    assert json.loads(out)["rows"][0]["output"] == "1x4x8, 1x8"
    model = f"transformers:{tmp_path}"
    code, _, err = run(capsys, "trace", model, "a fish", "a")
    assert code == 1
    assert "input 'a' gives attention_mask once more: expected one" in err
    (tmp_path / "texts.txt").write_text("a fish")
    code, _, err = run(capsys, "trace", model, str(tmp_path / "texts.txt"))
    assert code == 1
    assert "is a file, of a kind that is not known here: expected the text itself" in err
    assert run(capsys, "trace", model, "a fish " * 100)[0] == 0
    (tmp_path / "empty.npy").write_bytes(b"")
    assert (
        "empty.npy' cannot be read: No data left in file" in run(capsys, "trace", model, str(tmp_path / "empty.npy"))[2]
    )


def test_texts_are_lines_of_their_file_and_padded_behind(capsys, tmp_path):
    from transformers import BertConfig, BertModel, BertTokenizerFast

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "fish"]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    BertTokenizerFast(str(tmp_path / "vocab.txt"), padding_side="left").save_pretrained(tmp_path)
    config = BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, vocab_size=7)
    BertModel(config).save_pretrained(tmp_path)
    (tmp_path / "texts.txt").write_text("a fish\u2028a fish\na\n", encoding="utf-8")
    arguments = ("harvest", f"transformers:{tmp_path}", str(tmp_path / "texts.txt"), "embeddings", "--rows", "token")
    code, _, err = run(capsys, *arguments, "--out", str(tmp_path / "acts"))
    assert code == 0, err
    labels = gaff.load(tmp_path / "acts").labels
    found = sorted(zip(labels["sample"][:].tolist(), labels["position"][:].tolist(), strict=True))
    assert found == [(0, at) for at in range(6)] + [(1, at) for at in range(3)]
    assert "cut to" not in err
    BertTokenizerFast(str(tmp_path / "vocab.txt"), model_max_length=5).save_pretrained(tmp_path)
    code, _, err = run(capsys, *arguments, "--out", str(tmp_path / "cut"))
    assert "gaff: 1 text of 2 cut to 5 tokens, the most that this tokenizer gives" in err
    assert len(gaff.load(tmp_path / "cut").labels["token"]) == 5 + 3
    (tmp_path / "texts.txt").write_bytes("fisch und käse".encode("latin-1"))
    code, _, err = run(capsys, *arguments, "--out", str(tmp_path / "other"))
    assert code == 1
    assert "is no UTF-8 at byte 11: expected texts in UTF-8" in err


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_an_exported_program(capsys, tmp_path):
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    torch.export.save(torch.export.export(model, (torch.randn(2, 3),)), tmp_path / "m.pt2")
    _, out, _ = run(capsys, "trace", str(tmp_path / "m.pt2"), "randn:2x3", "--json")
    assert [row["path"] for row in json.loads(out)["rows"]] == ["", "0", "1"]


NO_TORCH = """
import sys
from gaff.cli import COMMANDS, main
for words in (["--help"], ["help"], ["tarce"], ["watch", "--evry", "3"], *([name, "--help"] for name in COMMANDS)):
    try:
        main(words)
    except SystemExit:
        pass
assert not {"torch", "numpy"} & set(sys.modules)
"""


def test_help_slips_and_import_load_neither_torch_nor_numpy():
    subprocess.run([sys.executable, "-c", NO_TORCH], check=True, capture_output=True)
    code = "import sys; from gaff.inspection.trace import Trace; from gaff import Site, errors; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


BROKEN = """
import sys
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 2)

    def forward(self, x):
        return torch.log(torch.relu(self.lin(x)))

model = Net()
if __name__ == "__main__":
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    print("arguments", sys.argv[1:])
    for step in range(3):
        x = torch.randn(3, 4)
        y = model(x) if "bad" in sys.argv else model.lin(x)
        loss = torch.sqrt(y * 0).sum() if "loss" in sys.argv else y.sum()
        loss.backward()
        if "catch" in sys.argv:
            try:
                optimizer.step()
            except Exception:
                pass
        else:
            optimizer.step()
    if "exit" in sys.argv:
        sys.exit(5)
    if "raise" in sys.argv:
        raise ValueError("of its own")
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train_once.py"
    path.write_text(BROKEN)
    return str(path)


def test_nan_of_a_model(capsys, script):
    code, out, _ = run(capsys, "nan", f"{script}:model", "randn:5x4")
    assert code == 3
    assert "made by /log#0, train_once.py:12" in out
    assert "cause: log of 0" in out
    code, out, _ = run(capsys, "nan", "--json", f"{script}:model", "randn:5x4")
    assert json.loads(out)["op"] == "log"
    code, out, _ = run(capsys, "nan", DIGITS, IMAGE)
    assert code == 0
    assert "no NaN or inf in" in out


UNUSUAL = """
import torch
from torch import nn
lazy, scripted = nn.LazyLinear(4), torch.jit.script(nn.Sequential(nn.Linear(4, 2)))
for _ in range(3):
    scripted(lazy(torch.randn(2, 3))).sum().backward()
print("at its end")
"""


def test_nan_of_a_script_with_models_that_cannot_be_guarded_or_not_yet(capsys, tmp_path):
    (tmp_path / "script.py").write_text(UNUSUAL)
    code, out, err = run(capsys, "nan", str(tmp_path / "script.py"))
    assert code == 0
    assert "at its end" in out
    assert "looked at 1 model" in out
    assert "is not looked at: the model is TorchScript" in err


@pytest.mark.parametrize(
    ("arguments", "code", "expected"),
    [
        ((), 0, "no NaN or inf"),
        (("bad",), 3, "by /log#0, train_once.py:12"),
        (("bad", "catch"), 3, "by /log#0, train_once.py:12"),
        (("bad", "exit"), 3, "by /log#0, train_once.py:12"),
        (("loss",), 3, "gaff nan --again runs the script once more"),
        (("raise",), 1, "arguments ['raise']"),
    ],
)
def test_nan_of_a_script(capsys, script, arguments, code, expected):
    original = nn.Module.__call__
    try:
        found, out, err = run(capsys, "nan", script, *arguments)
    except SystemExit as stop:
        found, (out, err) = stop.code, capsys.readouterr()
    assert (found, expected in out) == (code, True), out
    assert ("ValueError: of its own" in err) == ("raise" in arguments)
    assert nn.Module.__call__ is original


def test_nan_of_a_script_with_its_python_before_it(capsys, script, tmp_path):
    code, out, _ = run(capsys, "nan", "--", sys.executable, script, "bad")
    assert (code, "by /log#0, train_once.py:12" in out) == (3, True), out
    code, _, err = run(capsys, "nan", sys.executable, "-u", script, "bad")
    assert (code, "option '-u' of Python comes too late" in err) == (1, True), err
    other = tmp_path / "python3.9"
    other.write_text("#!/bin/sh\n")
    other.chmod(0o755)
    code, _, err = run(capsys, "nan", str(other), script, "bad")
    assert (code, "is another Python than the one that runs gaff" in err) == (1, True), err


def test_nan_of_a_script_keeps_its_exit_code(script):
    with pytest.raises(SystemExit) as stop:
        main(["nan", script, "exit"])
    assert stop.value.code == 5


def test_nan_looks_again_at_the_loss_of_a_script(capsys, script):
    code, out, _ = run(capsys, "nan", "--again", script, "loss")
    assert code == 3
    assert "backward pass of (step)/sqrt#" in out
    assert "torch.sqrt(y * 0).sum()" in out


IGNORED = """
import torch
import torch.nn.functional as F

model = torch.nn.Linear(8, 4)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for count in range(5):
    targets = torch.full((16,), -100 if count == 3 else 1)
    loss = F.cross_entropy(model(torch.randn(16, 8)), targets)
    optimizer.zero_grad()
    loss.backward()
    assert all(one.grad.isfinite().all() for one in model.parameters())
    optimizer.step()
"""


@pytest.mark.parametrize("again", [False, True])
def test_nan_of_a_loss_whose_gradients_are_finite(capsys, tmp_path, again):
    path = tmp_path / "ignored.py"
    path.write_text(IGNORED)
    code, out, _ = run(capsys, "nan", *(["--again"] if again else []), str(path))
    assert code == 3
    if again:
        assert "NaN made by (step)/cross_entropy#3, ignored.py:9" in out
        assert "every target is -100, the ignore_index" in out
    else:
        assert "seen after 3 optimizer steps" in out
        assert (
            "cause: the loss is not finite; what the models returned and the gradients of the step after it are" in out
        )
        assert "gaff nan --again runs the script once more" in out
    path.write_text(IGNORED.replace("-100", "2"))
    assert run(capsys, "nan", str(path))[0] == 0


def test_nan_of_a_loss_whose_step_a_scaler_leaves_out_is_none(capsys, tmp_path):
    path = tmp_path / "scaled.py"
    path.write_text("""
import torch

model = torch.nn.Linear(8, 4)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
scaler = torch.amp.GradScaler("cpu")
for count in range(5):
    loss = (model(torch.randn(16, 8)) * (1e38 if count == 2 else 1)).square().mean()
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
print("scale", scaler.get_scale())
""")
    code, out, _ = run(capsys, "nan", str(path))
    assert "scale 32768.0" in out  # one step was left out
    assert (code, "no NaN or inf" in out) == (0, True), out


def test_nan_says_what_it_expects(capsys, script):
    assert run(capsys, "nan", "nowhere.py")[2].startswith("gaff: 'nowhere.py' is no file")
    assert "--loss goes with a model" in run(capsys, "nan", "--loss", f"{script}:model", script)[2]


def test_anatomy_tells_and_draws(capsys, tmp_path):
    picture = tmp_path / "backward.svg"
    code, out, _ = run(capsys, "anatomy", DIGITS, IMAGE, "head.hidden", "--out", str(picture))
    assert code == 0
    assert "AddmmBackward0" in out
    assert "the legacy register_backward_hook hangs on one node" in out
    assert picture.read_text().startswith("<svg")
    code, out, _ = run(capsys, "anatomy", DIGITS, IMAGE, "--json")
    assert json.loads(out)["module"] == "DigitNet"
    assert "no module 'nowhere'" in run(capsys, "anatomy", DIGITS, IMAGE, "nowhere")[2]


def test_ops_on_the_command_line(capsys):
    code, out, _ = run(capsys, "trace", DIGITS, IMAGE, "--ops", "--no-flops", "--plain")
    assert code == 0
    assert any(line.startswith("head/relu#0\tdigits.py:") for line in out.splitlines())
    code, out, _ = run(capsys, "sites", DIGITS, "--ops", "--input", IMAGE)
    assert "head/flatten#0" in out
    assert "--ops needs an input" in run(capsys, "sites", DIGITS, "--ops")[2]


def test_nan_of_losses_all_of_whose_steps_a_scaler_leaves_out(capsys, tmp_path):
    path = tmp_path / "for_ever.py"
    path.write_text("""
import torch

model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
for _ in range(40):
    optimizer.zero_grad()
    scaler.scale(model(torch.randn(6, 4)).pow(2).mean() / 0).backward()
    scaler.step(optimizer)
    scaler.update()
""")
    code, out, _ = run(capsys, "nan", str(path))
    assert code == 3
    assert "the loss is not finite in 20 steps after one another, all of which a GradScaler leaves out" in out
    code, out, _ = run(capsys, "nan", "--again", str(path))
    assert code == 3
    assert "inf made by (step)/div#" in out


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("model.weight.data.div_(0)", "inf made by (step)/div_#0, spoilt.py:9"),
        ("model.weight.grad.div_(0)", "inf made by (step)/div_#0, spoilt.py:9"),
        ("optimizer.param_groups[0]['lr'] = float('inf')", "inf made by the optimizer's step, in weight:param"),
    ],
)
def test_nan_looks_again_at_what_is_done_between_backward_and_step(capsys, tmp_path, fault, told):
    path = tmp_path / "spoilt.py"
    path.write_text(f"""
import torch

model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for count in range(5):
    optimizer.zero_grad()
    model(torch.randn(6, 4)).pow(2).mean().backward()
    if count == 2: {fault}
    optimizer.step()
""")
    code, out, _ = run(capsys, "nan", "--again", str(path))
    assert code == 3
    assert told in out


def test_features_are_arrays_of_numpy_by_the_ending(tmp_path, capsys):
    one, several = tmp_path / "one.npy", tmp_path / "several.npz"
    assert main(["take", DIGITS, "head.hidden", "--input", IMAGE, "--out", str(one)]) == 0
    assert main(["take", DIGITS, "head.hidden", "features", "--input", IMAGE, "--out", str(several)]) == 0
    capsys.readouterr()
    arrays = numpy.load(several)
    assert set(arrays) == {"head.hidden", "features"}
    assert numpy.array_equal(numpy.load(one), arrays["head.hidden"])
    assert main(["take", DIGITS, "head.hidden", "features", "--input", IMAGE, "--out", str(one)]) == 1
    assert "holds one array, and there are 2 tensors: expected .npz" in capsys.readouterr().err
    assert numpy.array_equal(numpy.load(one), arrays["head.hidden"])  # what was there stays


def test_a_type_that_numpy_lacks_is_refused_by_its_address():
    with pytest.raises(gaff.PlanError, match="a: NumPy takes no torch.bfloat16 of torch.strided"):
        tensors.save_values({"a": torch.ones(2, dtype=torch.bfloat16)}, None, "x.npy", "")


def test_nan_of_a_script_that_prints_leaves_stdout_to_the_report(capsys, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\nprint('hello')\nmodel = torch.nn.Linear(2, 2)\nmodel(torch.full((1, 2), float('nan')))\n"
    )
    code, out, err = run(capsys, "nan", "--json", str(script))
    assert code == 3
    assert json.loads(out)["found"] is True
    assert "hello" in err


def test_nan_of_a_script_that_fails_tells_its_traceback_alone(capsys, tmp_path):
    script = tmp_path / "train.py"
    script.write_text("import torch\ntorch.nn.Linear(2, 2)(torch.ones(1, 2))\nraise KeyError('x')\n")
    with pytest.raises(SystemExit):
        run(capsys, "nan", str(script))
    told = capsys.readouterr().err
    assert "KeyError: 'x'" in told
    assert "runpy" not in told


LOUD = """
import math
import atexit
import os

import torch
from torch import nn

print("a banner, at import")
atexit.register(print, "a word at the end")


class Loud(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(3, 2)

    def forward(self, x):
        print("a word from the forward")
        os.system("echo a word of a child")
        return self.lin(x)


class Odd(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.lin, self.make = nn.Linear(3, 3), make

    def forward(self, x):
        return self.make(self.lin(x))


class Apart(nn.Module):
    def forward(self, x, y):
        return (x - y).abs().sum().sqrt()


model = Loud()
torch.manual_seed(0)
phase = Odd(lambda y: torch.complex(torch.ones_like(y), y))
broken = Odd(lambda y: torch.full_like(y, math.nan))
nothing = Odd(lambda y: y * 0)
endless = Odd(lambda y: y / 0)
apart = Apart()
"""


@pytest.fixture
def loud(tmp_path):
    (tmp_path / "loud.py").write_text(LOUD)
    return f"{tmp_path / 'loud.py'}:"


def outcome(*words, **options):
    return subprocess.run(
        [sys.executable, "-m", "gaff", *words], capture_output=True, text=True, check=False, timeout=120, **options
    )


@pytest.mark.slow
@pytest.mark.parametrize("words", [["trace"], ["take", "lin"], ["sites"], ["anatomy"], ["nan"]], ids=lambda one: one[0])
def test_data_stands_alone_whatever_a_model_prints(words, loud, tmp_path):
    given = ["--input", "randn:2x3"] if words[0] in ("take", "sites") else ["randn:2x3"]
    more = [*words[1:], *given]
    command = (
        [words[0], "--json", loud + "model", *more]
        if words[0] == "nan"
        else [words[0], loud + "model", *more, "--json"]
    )
    found = outcome(*command)
    json.loads(found.stdout)
    for word in ("a word from the forward", "a word of a child", "a word at the end"):
        assert word in found.stderr


@pytest.mark.parametrize(
    ("name", "factor", "changed", "delta"),
    [
        ("phase", 2.0, "6/6", 0.1),
        ("broken", 2.0, "0/6", 0.0),
        ("nothing", 2.0, "0/6", 0.0),
        ("endless", 2.0, "0/6", 0.0),
    ],
)
def test_apply_tells_what_differs_of_any_output(name, factor, changed, delta, loud, tmp_path, capsys):
    gaff.Plan.edit({"lin": gaff.edits.scale(factor)}).save(tmp_path / "p.json")
    code, out, _ = run(capsys, "apply", str(tmp_path / "p.json"), loud + name, "randn:2x3", "--json")
    assert code == 0
    told = json.loads(out)["outputs"][0]
    assert told["changed"] == changed
    assert float(told["delta"]) >= delta
    assert delta or float(told["delta"]) == 0


@pytest.mark.slow
def test_numbers_that_are_not_finite_are_objects_in_data(loud, tmp_path):
    found = outcome("anatomy", loud + "endless", "randn:2x3", "--json")
    json.loads(found.stdout, parse_constant=lambda word: pytest.fail(word))


def test_random_inputs_differ_from_one_another_and_come_again(loud, capsys):
    code, out, _ = run(capsys, "nan", loud + "apart", "randn:2x8", "randn:2x8")
    assert (code, "no NaN or inf" in out) == (0, True)
    _, first, _ = run(capsys, "trace", loud + "apart", "randn:2x8", "randn:2x8", "--json", "--no-flops")
    _, second, _ = run(capsys, "trace", loud + "apart", "randn:2x8", "randn:2x8", "--json", "--no-flops")
    assert json.loads(first)["rows"][0]["statistics"] == json.loads(second)["rows"][0]["statistics"]
    code, _, err = run(capsys, "trace", loud + "model", "randn:2x3:7")
    assert (code, "'randn:2x3:7' has no shape" in err) == (1, True)


def test_an_image_of_16_bits_is_not_cut_off(tmp_path, loud, capsys):
    pixels = numpy.linspace(0, 65535, 64, dtype="uint16").reshape(8, 8)
    Image.fromarray(pixels).save(tmp_path / "deep.png")
    found = inputs.load_inputs([str(tmp_path / "deep.png")], Loaded(nn.Identity()))[0][0]
    torch.testing.assert_close(found, torch.from_numpy(pixels.astype("float32") / 65535).expand(1, 3, 8, 8))


def test_a_file_of_a_package_may_import_relatively(tmp_path, capsys, monkeypatch):
    package = tmp_path / "a_net_of" / "parts"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (package / "__init__.py").touch()
    (package / "widths.py").write_text("width = 3\n")
    (package / "net.py").write_text(
        "import torch\nfrom .widths import width\nmodel, x = torch.nn.Linear(width, 2), torch.ones(1, width)\n"
    )
    monkeypatch.chdir(tmp_path)
    for net in ("a_net_of/parts/net.py", "a_net_of.parts.net"):
        code, out, err = run(capsys, "trace", f"{net}:model", f"{net}:x")
        assert (code, err) == (0, "")
        assert "8 parameters" in out


def test_a_model_file_that_reads_arguments_when_it_is_imported(tmp_path, capsys):
    text = "import argparse\nfrom torch import nn\noptions = argparse.ArgumentParser(){}.parse_args()\nmodel = nn.Linear(3, 2)\n"
    (tmp_path / "reads.py").write_text(text.format(""))
    code, out, _ = run(capsys, "trace", f"{tmp_path / 'reads.py'}:model", "randn:2x3")
    assert (code, "Linear on cpu" in out) == (0, True)
    (tmp_path / "wants.py").write_text("import sys\nsys.exit(4)\n")
    code, _, err = run(capsys, "trace", f"{tmp_path / 'wants.py'}:model", "randn:2x3")
    assert (code, "ended with exit code 4 while it was imported" in err) == (1, True)


@pytest.mark.parametrize("command", ["trace", "diff"])
def test_a_page_has_the_ending_of_one(command, tmp_path, capsys):
    words = [DIGITS, IMAGE] if command == "trace" else ["a.json", "b.json"]
    code, _, err = run(capsys, command, *words, "--html", str(tmp_path / "page.txt"))
    assert (code, "expected a name that ends in .html" in err) == (1, True)


@pytest.mark.slow
def test_what_was_found_is_the_exit_code_though_the_reader_has_gone(tmp_path, loud):
    for name in ("model", "nothing"):
        outcome("trace", loud + name, "randn:2x3", "--out", str(tmp_path / f"{name}.json"))
    words = [
        sys.executable,
        "-m",
        "gaff",
        "diff",
        str(tmp_path / "model.json"),
        str(tmp_path / "nothing.json"),
        "--json",
    ]
    for _ in range(3):
        found = subprocess.run(["bash", "-c", f"set -o pipefail; {shlex.join(words)} | true"], check=False, timeout=120)
        assert found.returncode == 3


STEPS = """
import os, sys, torch
from torch import nn
{before}
layer = nn.Linear(2, 1)
optimizer = torch.optim.SGD(layer.parameters(), 0.1)
for _ in range(3):
    optimizer.zero_grad()
    {loss}.backward()
    optimizer.step()
{after}
"""
BAD = "(layer(torch.ones(4, 2)) * 0).log().sum()"


@pytest.mark.slow
def test_a_script_that_changes_its_folder_is_run_again_all_the_same(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "train.py").write_text(STEPS.format(before="os.chdir('data')", loss=BAD, after=""))
    found = outcome("nan", "--again", "train.py", cwd=tmp_path)
    assert (found.returncode, "log of 0" in found.stdout) == (3, True)


@pytest.mark.slow
def test_a_script_that_cannot_run_twice_keeps_what_was_found(tmp_path):
    before = "import multiprocessing\nmultiprocessing.set_start_method('spawn')"
    (tmp_path / "train.py").write_text(STEPS.format(before=before, loss=BAD, after=""))
    found = outcome("nan", "--again", "train.py", cwd=tmp_path)
    assert (found.returncode, "could not be run once more: RuntimeError: context has" in found.stdout) == (3, True)


@pytest.mark.slow
def test_a_module_of_a_package_is_run_as_python_runs_it(tmp_path):
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "__init__.py").write_text("")
    (tmp_path / "pkg" / "net.py").write_text("SCALE = 0\n")
    text = STEPS.format(
        before="from .net import SCALE\nprint(sys.argv[1:])", loss=BAD.replace("* 0", "* SCALE"), after=""
    )
    (tmp_path / "pkg" / "train.py").write_text(text)
    found = outcome("nan", "-m", "pkg.train", "--epochs", "3", cwd=tmp_path)
    assert (found.returncode, "['--epochs', '3']" in found.stdout) == (3, True)


@pytest.mark.slow
def test_a_script_that_fails_with_the_code_of_a_find_says_that_nothing_was_found(tmp_path):
    (tmp_path / "train.py").write_text(
        STEPS.format(before="", loss="layer(torch.ones(4, 2)).sum()", after="sys.exit(3)")
    )
    found = outcome("nan", "train.py", cwd=tmp_path)
    assert found.returncode == 3
    assert "the script ended with exit code 3, and no NaN or inf was found before" in found.stderr
    found = outcome("nan", "--allow", "zz/log#0", "train.py", cwd=tmp_path)
    assert found.returncode == 1
    assert "Traceback" not in found.stderr


@pytest.mark.parametrize("words", [("broken.py",), ("-m", "broken")])
@pytest.mark.parametrize("text", ["x = (1\n", "def f():\n    raise KeyError('mine')\nf()\n"], ids=["syntax", "raises"])
def test_a_script_that_fails_is_told_by_its_own_frames(capfd, monkeypatch, tmp_path, text, words):
    (tmp_path / "broken.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        main(["nan", *words])
    told = capfd.readouterr().err.splitlines()
    files = [line.split('"')[1] for line in told if line.startswith("  File ")]
    assert stop.value.code == 1
    assert {Path(file).name for file in files} == {"broken.py"}
    assert len(files) == (1 if text.startswith("x") else 2)


def test_an_error_of_a_model_tells_the_module_and_the_users_line(capsys, tmp_path):
    (tmp_path / "conv.py").write_text(
        "from torch import nn\nclass N(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.c = nn.Conv2d(3, 4, 3)\n    def forward(self, x):\n        return self.c(x)\n"
        "def broken():\n    raise ValueError('mine')\n"
    )
    assert main(["trace", f"{tmp_path}/conv.py:N", "randn:2x1x8"]) == 1
    first, *more = capsys.readouterr().err.splitlines()
    assert first.startswith("gaff: RuntimeError: Given groups=1")
    assert more == [
        "gaff: raised in c (Conv2d), which was given Tensor float32 [2, 1, 8]",
        f"gaff: at {tmp_path}/conv.py:7; --debug shows all of it",
    ]
    assert main(["trace", f"{tmp_path}/conv.py:broken", "randn:2"]) == 1
    assert capsys.readouterr().err == (
        f"gaff: ValueError: mine\ngaff: at {tmp_path}/conv.py:9; --debug shows all of it\n"
    )
    assert main(["harvest", f"{tmp_path}/conv.py:N", "nosuch", "c", "--out", str(tmp_path / "acts")]) == 1
    assert (
        "'nosuch' is no data: expected file.py:name or package.module:name of a DataLoader" in capsys.readouterr().err
    )
    assert main(["apply", f"{tmp_path}/conv.py", f"{tmp_path}/conv.py:N", "randn:1x3x8x8"]) == 1
    assert f"plan '{tmp_path}/conv.py' cannot be read" in capsys.readouterr().err


SCRIPTS_OF_NAN = {
    "a loss that overflows before its gradients": (
        "net = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))\n"
        "optimizer = torch.optim.SGD(net.parameters(), lr=0.5)\n"
        "x = torch.randn(64, 8) * 10\n"
        "for step in range(6):\n"
        "    optimizer.zero_grad()\n"
        "    nn.functional.mse_loss(net(x), x.sum(1, keepdim=True)).backward()\n"
        "    optimizer.step()\n",
        "inf made by (step)/mse_loss#2",
        "overflow: mse_loss gives",
    ),
    "a loss inside a closure": (
        "net = nn.Linear(4, 1)\n"
        "optimizer = torch.optim.LBFGS(net.parameters(), lr=20.0)\n"
        "x = torch.rand(32, 4)\n"
        "with torch.no_grad():\n"
        "    net.weight.fill_(1.0)\n"
        "    net.bias.fill_(0.5)\n"
        "def closure():\n"
        "    optimizer.zero_grad()\n"
        "    loss = (torch.log(net(x) + 0.1) - torch.log(x.sum(1, keepdim=True) + 0.1)).pow(2).mean()\n"
        "    loss.backward()\n"
        "    return loss\n"
        "for step in range(2):\n"
        "    optimizer.step(closure)\n",
        "NaN made by (step)/log#2",
        "log of numbers below 0",
    ),
    "a NaN in the data": (
        "net = nn.Linear(4, 2)\n"
        "optimizer = torch.optim.Adam(net.parameters())\n"
        "for step in range(4):\n"
        "    optimizer.zero_grad()\n"
        "    net(torch.full((3, 4), float('nan') if step == 2 else 1.0)).square().mean().backward()\n"
        "    optimizer.step()\n",
        "NaN made by (step)/full#2",
        "was put in by a constant",
    ),
    "an op between two models": (
        "first, second = nn.Sequential(nn.Linear(8, 16), nn.ReLU()), nn.Linear(16, 8)\n"
        "optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)\n"
        "for step in range(8):\n"
        "    x = torch.randn(16, 8)\n"
        "    if step == 3:\n"
        "        x[:] = x[:1]\n"
        "    optimizer.zero_grad()\n"
        "    h = first(x)\n"
        "    h = (h - h.mean(0)) / h.std(0)\n"
        "    second(h).square().mean().backward()\n"
        "    optimizer.step()\n",
        "NaN made by (step)/div#3",
        "16 of 16 elements of the divisor are 0",
    ),
    "an update by hand": (
        "net = nn.Linear(4, 1)\n"
        "for step in range(4):\n"
        "    net.zero_grad()\n"
        "    (net(torch.ones(2, 4)) * (0.0 if step == 2 else 1.0)).sum().backward()\n"
        "    with torch.no_grad():\n"
        "        for one in net.parameters():\n"
        "            one -= 0.1 * one.grad / one.grad.norm()\n",
        "NaN made by (step)/div",
        "1 of 1 elements of the divisor are 0",
    ),
}


@pytest.mark.parametrize("name", SCRIPTS_OF_NAN)
def test_what_is_seen_in_a_model_and_began_outside_of_it_is_looked_for_again(capsys, tmp_path, name):
    script, origin, cause = SCRIPTS_OF_NAN[name]
    path = tmp_path / "train.py"
    path.write_text(f"import torch\nfrom torch import nn\n\ntorch.manual_seed(0)\n{script}")
    code, out, _ = run(capsys, "nan", "--again", str(path))
    assert code == 3
    assert origin in out
    assert cause in out
    code, out, _ = run(capsys, "nan", str(path))
    assert "gaff nan --again runs the script once more" in out


@pytest.mark.parametrize(
    ("place", "told"),
    [("x", ":input[0]"), ("net[1].weight", "1.weight:param"), ("net[0].running_var", "0.running_var:buffer")],
)
def test_a_loss_is_not_blamed_for_what_was_loaded(tmp_path, capsys, place, told):
    (tmp_path / "train.py").write_text(
        "import torch\nfrom torch import nn\n"
        "net = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2)).eval()\n"
        "optimizer = torch.optim.Adam(net.parameters())\n"
        "x = torch.ones(3, 4)\n"
        f"{place}.data.view(-1)[0] = float('nan')\n"
        "net(x).square().mean().backward()\n"
        "optimizer.step()\n"
    )
    code, out, _ = run(capsys, "nan", str(tmp_path / "train.py"))
    assert (code, f"NaN was there before the step, in {told}" in out) == (3, True), out


def test_a_package_whose_parts_import_each_other(tmp_path, capsys, monkeypatch):
    package = tmp_path / "a_ring_of"
    package.mkdir()
    (package / "__init__.py").write_text("from .net import Net\n")
    (package / "widths.py").write_text("width = 3\n")
    (package / "net.py").write_text(
        "import torch\nfrom .widths import width\n\n\ndef Net():\n    return torch.nn.Linear(width, 2)\n"
    )
    (package / "alone.py").write_text("import torch\nfrom widths import width\nmodel = torch.nn.Linear(width, 2)\n")
    monkeypatch.chdir(tmp_path)
    assert run(capsys, "sites", "a_ring_of/net.py:Net")[0] == 0
    assert run(capsys, "sites", "a_ring_of/alone.py:model")[0] == 0  # as a script that is run there


def test_a_factory_that_reads_its_arguments_has_none(capsys, tmp_path):
    file = tmp_path / "made.py"
    file.write_text(
        "import argparse\nfrom torch import nn\n\ndef build():\n    parser = argparse.ArgumentParser()\n"
        "    parser.add_argument('--width', type=int, default=3)\n"
        "    return nn.Linear(4, parser.parse_args().width)\n"
    )
    code, out, err = run(capsys, "sites", f"{file}:build")
    assert (code, err) == (0, "")
    assert "Linear" in out


def test_an_error_inside_a_model_is_not_one_of_its_input(capsys, tmp_path):
    (tmp_path / "net.py").write_text(
        "from torch import nn\n"
        "class Net(nn.Module):\n    def forward(self, x):\n        return x + None\n"
        "class Two(nn.Module):\n    def forward(self, x, y):\n        return x\n"
        "def inside():\n    return Net()\ndef two():\n    return Two()\n"
    )
    for command in ("trace", "take"):
        words = [f"{tmp_path}/net.py:inside", *([":output", "--input"] if command == "take" else [])]
        code, _, told = run(capsys, command, *words, "randn:2x3")
        assert code != 0
        assert "could not be called" not in told
        assert "unsupported operand" in told
    code, _, told = run(capsys, "trace", f"{tmp_path}/net.py:two", "randn:2x3")
    assert code != 0
    assert "the model could not be called: Two.forward() missing 1 required positional argument: 'y'" in told


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["trace", DIGITS, "randint:2x4:0"], "input 'randint:2x4:0' has no shape"),
        (["trace", DIGITS, "randint:2x²:4"], "has no shape"),
        (["nan", "--again", DIGITS, "randn:1x1x8x8"], "--again runs a script once more"),
    ],
)
def test_slips_in_words_are_told(capsys, words, told):
    code, _, error = run(capsys, *words)
    assert code == 1
    assert told in error


def test_a_clean_step_is_no_row(capsys):
    code, out, _ = run(capsys, "nan", "--plain", DIGITS, "randn:1x1x8x8")
    assert (code, out.strip()) == (0, "")


def test_a_column_that_is_empty_can_be_chosen(capsys, tmp_path):
    (tmp_path / "net.py").write_text("from torch import nn\ndef relu():\n    return nn.ReLU()\n")
    code, out, _ = run(capsys, "trace", f"{tmp_path}/net.py:relu", "randn:2x4", "--columns", "params")
    assert code == 0
    assert [line.split() for line in out.splitlines()[1:3]] == [["site", "params"], [":output"]]
