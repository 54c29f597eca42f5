"""From addresses to modules: shared ones, wrapped ones, predicates, and what a miss says."""

import pytest
import torch
from torch import nn

import gaff
from gaff.address.resolve import iter_modules, resolve
from zoo import Net, Shared, Tied


def paths(model, wanted):
    return [str(found.site) for found in resolve(model, wanted)]


def test_globs_classes_and_ports():
    model = nn.Sequential(nn.Sequential(nn.Conv2d(1, 1, 1), nn.ReLU()), nn.Conv1d(1, 1, 1), nn.ModuleList([nn.ReLU()]))
    assert paths(model, "**<Conv2d>") == ["0.0"]
    assert paths(model, "*") == ["0", "1"]  # a ModuleList is never called
    assert paths(model, "2.*") == ["2.0"]
    assert paths(model, "**<_ConvNd>") == ["0.0", "1"]  # any class among the bases
    assert paths(model, "**.weight:grad") == ["0.0.weight:grad", "1.weight:grad"]
    assert paths(model, "**<Conv1d>:param") == ["1.weight:param", "1.bias:param"]


def test_predicates_modules_and_lists():
    model, x = Net(), torch.randn(1, 3, 8, 8)
    with gaff.capture(model, lambda site: site.path.startswith("c"), [model.fc1, "relu"]) as got:
        model(x)
    assert list(got) == ["conv", "fc1", "relu"]
    with pytest.raises(gaff.SiteError, match="accepted none of the sites of Net"):
        gaff.capture(model, lambda site: False)
    with pytest.raises(gaff.SiteError, match="module Linear given as a pattern is not part of Net"):
        gaff.capture(model, nn.Linear(1, 1))


def test_shared_modules_and_tied_parameters_are_found_once_by_patterns():
    assert paths(Shared(), "**<Linear>") == ["shared", "head"]
    assert paths(Shared(), "again") == ["again"]
    assert paths(Tied(), "**:param") == ["embed.weight:param"]


def test_paths_skip_wrappers():
    class CheckpointWrapper(nn.Module):
        def __init__(self, module):
            super().__init__()
            self._checkpoint_wrapped_module = module

        def forward(self, x):
            return self._checkpoint_wrapped_module(x)

    class DistributedDataParallel(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

        def forward(self, x):
            return self.module(x)

    model = DistributedDataParallel(nn.Sequential(CheckpointWrapper(nn.Sequential(nn.Linear(2, 2)))))
    assert [path for path, _, _ in iter_modules(model)] == ["", "0", "0.0"]
    x = torch.randn(1, 2)
    with gaff.capture(model, ":output", "0.0", "module.0:input", "0.0.weight:param") as got:
        y = model(x)
    assert torch.equal(got[":output"], y)
    assert torch.equal(got["0.0"], y)
    assert got.receipt.runs == 1


def test_names_with_any_character():
    model = nn.ModuleDict({"a b": nn.Linear(2, 2), "c*": nn.Linear(2, 2)})
    model.forward = lambda x: model["c*"](model["a b"](x))
    x = torch.randn(1, 2)
    with gaff.capture(model, "`a b`", "`c*`:input") as got:
        model(x)
    assert torch.equal(got["`c*`:input"], got["`a b`"])
    assert paths(model, "*") == ["`a b`", "`c*`"]


def test_what_is_near_is_told_as_an_address():
    model = nn.ModuleDict({"a b": nn.Linear(2, 2), "x:y": nn.Linear(2, 2), "c/d": nn.Linear(2, 2)})
    for missed, near in (
        ("a_b", "`a b`"),
        ("x_y", "`x:y`"),
        ("c_d", "`c/d`"),
        ("a_b.weight:param", "`a b`.weight:param"),
    ):
        with pytest.raises(gaff.SiteError) as told:
            gaff.capture(model, missed)
        first = str(told.value).rpartition("nearest: ")[2].split(", ")[0]
        assert first == near
        gaff.capture(model, first)


@pytest.mark.parametrize(
    ("address", "error", "message"),
    [
        ("fc9", gaff.SiteError, "no module 'fc9' in Net of 3 modules; nearest: fc1"),
        ("fc1.wight:grad", gaff.SiteError, "no parameter 'fc1.wight' in Net of 4 parameters; nearest: fc1.weight:grad"),
        ("fc1:param", gaff.SiteError, "'fc1' is a module, not a parameter: it has fc1.weight:param, fc1.bias:param"),
        ("fc1.output", gaff.SiteError, "what passes there is addressed with a colon, fc1:output"),
        ("fc1.weight.grad", gaff.SiteError, "a gradient is addressed with a colon, fc1.weight:grad"),
        ("fc1.weight", gaff.SiteError, "it is a parameter; address it as fc1.weight:param or fc1.weight:grad"),
        ("**<Conv3d>", gaff.SiteError, "matches nothing in Net of 3 modules; classes here: Conv2d"),
        ("cnv*", gaff.SiteError, "pattern 'cnv\\*' matches nothing in Net of 3 modules; nearest: conv"),
        ("*:grad", gaff.SiteError, ":grad ends the path of a parameter; '\\*\\*:grad' is that of every one"),
        ("fc1<Linear>:grad", gaff.SiteError, ":grad ends the path of a parameter; "),
        ("<Conv2d>", gaff.SiteError, "names no path: expected names before <Conv2d>; say '\\*\\*<Conv2d>'"),
        ("relu/add:param", gaff.PlanError, "relu/add:param: an op has no :param: expected output, input, grad_output"),
    ],
)
def test_what_a_miss_says(address, error, message):
    with pytest.raises(error, match=message):
        gaff.capture(Net(), address)


def test_a_container_is_refused_with_what_is_inside():
    model = nn.Sequential(nn.ModuleList([nn.ReLU(), nn.ReLU()]))
    with pytest.raises(
        gaff.SiteError, match="'0' is a ModuleList, a container that is never called itself; .* 0.0, 0.1"
    ):
        gaff.capture(model, "0")
