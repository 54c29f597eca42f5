"""``gaff doctor`` tells what is here, tries what is promised, and says by its exit code whether all of it works."""

import json

from gaff.cli import doctor, main
from gaff.compat import checkpoints, memory
from gaff.training.statistics import kernel


def test_all_is_told_and_works_here(capsys):
    assert main(["doctor", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["failed"] == []
    assert set(told["promises, tried now"].values()) == {"works"}
    assert told["versions"].keys() == {"gaff", "Python", "torch", "system"}
    assert "safetensors" in told["extras"]["files"]
    assert not {"dev", "peers"} & told["extras"].keys()
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert text.rstrip().endswith("everything that gaff relies on works here")


def test_what_does_not_work_is_named(capsys, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(memory, "lazy_clone", lambda: None)
        patch.setattr(checkpoints, "sees_checkpoints", lambda: False)
        known = doctor.grounds()
    monkeypatch.setattr(doctor, "grounds", lambda: known)
    monkeypatch.setitem(doctor._PROMISES, "a layer's own gradients", lambda: False)
    monkeypatch.setitem(doctor._PROMISES, "an edit under a checkpoint", lambda: 1 / 0)
    assert main(["doctor"]) == 3
    text = capsys.readouterr().out
    assert "missing: values are kept by reference, and checked on reading" in text
    assert "ZeroDivisionError: division by zero" in text
    assert "another number than the truth" in text
    assert text.rstrip().endswith("does not work here: copy-on-write copies, checkpoints told apart, a layer's own "
                                  "gradients, an edit under a checkpoint")  # fmt: skip


def test_a_choice_of_the_kernel_that_is_none_is_told(capsys, monkeypatch):
    monkeypatch.setenv("GAFF_KERNEL", "fastest")
    kernel.forget()
    assert doctor.kernel_facts()["loaded"].startswith("none: GAFF_KERNEL='fastest': expected one of native")
    kernel.forget()


def test_packages_that_are_missing_are_told(monkeypatch):
    monkeypatch.setattr(doctor.metadata, "requires", lambda name: ["no-such-package>=1; extra == 'thing'", "torch>=2"])
    assert doctor.extras() == {"thing": "no-such-package not installed"}
