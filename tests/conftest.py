"""Every test ends as it began: no hook, mode, flag or random draw of ours is left anywhere."""

import gc
import sys

import pytest
import torch
from hypothesis import settings
from torch.nn.modules import module as module_hooks
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import inside
from gaff.compat.compiler import has_asked_to_compile, has_compiled
from gaff.training.watch.shield import Shield
from shares import is_due

settings.register_profile("untimed", deadline=None)  # how long an example takes is the machine's
settings.load_profile("untimed")
Shield.is_strict = True  # what may fail by itself fails a test

GLOBAL_TABLES = (
    "_global_forward_hooks",
    "_global_forward_pre_hooks",
    "_global_backward_hooks",
    "_global_backward_pre_hooks",
    "_global_forward_hooks_always_called",
    "_global_forward_hooks_with_kwargs",
)


def global_state():
    optimizer = sys.modules["torch.optim.optimizer"]
    stance = sys.modules.get("torch._dynamo.eval_frame")
    return {
        **{name: _named(getattr(module_hooks, name)) for name in GLOBAL_TABLES},
        "optimizer hooks": _named(optimizer._global_optimizer_post_hooks)
        + _named(optimizer._global_optimizer_pre_hooks),
        "dispatch modes": len(_get_current_dispatch_mode_stack()),
        "function modes": torch._C._len_torch_function_stack(),
        "grad mode": torch.is_grad_enabled(),
        "stance": getattr(getattr(stance, "_stance", None), "stance", "default"),
    }


def _named(hooks):
    """Each hook by the function that it is, so that what is left behind says whose it is."""
    return [
        f"{hook.__module__}.{hook.__qualname__}" if hasattr(hook, "__qualname__") else repr(hook)
        for hook in hooks.values()
    ]


def pytest_addoption(parser):
    parser.addoption(
        "--inside",
        help="compile every model that a session is opened on, with this backend; or fsdp2, ddp; or a device, cuda",
    )


@pytest.hookimpl(tryfirst=True)  # xdist reads the groups in the same hook
def pytest_collection_modifyitems(config, items):
    """With ``--inside`` those tests are left out that mean something else there; tests/inside.py has each reason.

    Of these, and of the cases of slow tests, a share is run where one is asked for.
    """
    where = config.getoption("--inside")
    others = [item for item in items if where is not None and inside.why(item.nodeid, where) is not None]
    others += [item for item in items if (where is not None or _is_slow_case(item)) and not is_due(_case(item))]
    config.hook.pytest_deselected(items=others)
    items[:] = [item for item in items if item not in others]
    for item in items:
        if shared := _shared_by_its_file(item):
            item.add_marker(pytest.mark.xdist_group(shared))


def _is_slow_case(item):
    """Whether a slow test has more cases than this one."""
    return hasattr(item, "callspec") and item.get_closest_marker("slow") is not None


def _case(item):
    """A name for a case: that of the fixture which all its tests share, where that is made once for each."""
    shared = _shared_by_its_file(item)
    return shared if "-" in shared else item.nodeid


def _shared_by_its_file(item):
    """One name for all tests of a file that use fixtures made once for it, or once for this parameter: they go to one worker."""
    made_once = [
        name
        for name, (*_, made) in item._fixtureinfo.name2fixturedefs.items()
        if made.scope == "module" and made.baseid == item.parent.nodeid
    ]
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    names = [item.path.stem, *(str(parameters[name]) for name in made_once if name in parameters)]
    return "-".join(names) if made_once else ""  # no brackets: xdist looks for the group behind the last one


def pytest_collection_finish():
    """What imports and the collection have made stays: no search for garbage goes through it again."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish(session, exitstatus):
    session.config.code = int(exitstatus)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config):
    """Ranks of torchrun end together."""
    if config.getoption("--inside") in inside.SPREAD_OVER:
        inside.leave_together(config.code)


@pytest.fixture(autouse=True)
def _inside(request, monkeypatch):
    """With ``--inside``: sessions meet compiled or sharded models, and tests that say nothing of it must not notice."""
    where = request.config.getoption("--inside")
    if where is None:
        yield
        return
    if where in inside.SPREAD_OVER:
        setting = inside.spread(monkeypatch, where)
    elif where.startswith(inside.DEVICES):
        setting = inside.on_device(where, monkeypatch)
    else:
        setting = inside.compiled(monkeypatch, where)
    with setting:
        yield


@pytest.fixture(autouse=True)
def _compiles_for_itself(request):
    """What one test compiles must not change what the next one does: sessions behave otherwise from then on."""
    yield
    where = request.config.getoption("--inside")
    if (where is None or where in (*inside.SPREAD_OVER, *inside.DEVICES)) and (
        has_compiled() or has_asked_to_compile()
    ):
        torch._dynamo.reset()


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _no_residue():
    before = global_state()
    yield
    if global_state() != before:
        gc.collect()  # edits of a graph stay as long as it does, and a test may leave one in a cycle
    assert global_state() == before
