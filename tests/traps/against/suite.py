"""What a tool is asked, and what counts as an answer.

A trap is a function of a tool. It makes a model, works out by bare torch what is true, asks the tool, and compares. It ends in
one of these ways: the answers are *right*; they are *wrong*, and nobody was told (an AssertionError); something is *missing*,
and nobody was told (Missing); what was there before is no longer as it was (*left*, in ``traceless``); the tool *refuses*, by any
exception; or it *cannot*: its documentation knows no way to ask.
"""

import warnings

import torch


class Cannot(Exception):
    """The tool's documentation knows no way to ask this."""


class Missing(AssertionError):
    """Something is not there, or did not happen, and nobody was told."""


class Tool:
    """What a tool may offer. Sites are ``path:port``, in the order of the run. Ports: output, input; grad_output; grad_input, what
    the module passes back to its input; input_grad, all that comes to the tensor that came in.

    Answers are lists, one entry for each call of the module, in order.
    """

    distributions = ()  # the packages whose versions are told

    def values(self, model, sites, *args, loss=None, **kwargs):
        """Call ``model(*args, **kwargs)`` once, and with ``loss`` ``loss(output).backward()``: by site, what passed."""
        raise Cannot

    def values_during(self, model, sites, program):
        """The same while ``program()`` runs, which calls the model itself, and which nobody may change."""
        raise Cannot

    def gradients(self, model, sites, loss, *args, passes=1, by_grad=None, **kwargs):
        """Call the model, and ``loss(output).backward()`` so many times: by site, the gradients that arrived.

        ``by_grad``: a tensor for which ``torch.autograd.grad`` is called in place of ``backward``.
        """
        raise Cannot

    def changed(self, model, changes, *args, loss=None, **kwargs):
        """Call the model while the outputs of modules are what ``changes`` (path -> function) makes of them.

        ``path@1`` is the second call alone, ``path[key]`` one entry of an output that is a dict. With ``loss``,
        ``loss(output).backward()`` follows, as the tool wants it. Returns the output.
        """
        raise Cannot

    def changed_during(self, model, changes, program):
        """The same while ``program()`` runs; returns what it returns."""
        raise Cannot

    def ops(self, model, wanted, *args):
        """Call the model: the outputs of calls of functions, ``("relu", 1)`` being the second ``relu`` of the run."""
        raise Cannot

    def keeper(self, model, paths):
        """For the price: a function of the model's input that runs it and keeps the outputs at all paths.

        By the cheapest way that the tool's documentation shows for the same sites again and again; what can be set up once is
        set up here.
        """
        raise Cannot


class Around(Tool):
    """A tool whose documentation has a context manager, or hooks, around code that runs as it is."""

    def values(self, model, sites, *args, loss=None, **kwargs):
        outputs = []
        found = self.values_during(model, sites, lambda: outputs.append(model(*args, **kwargs)))
        if loss is not None:
            loss(outputs[0]).backward()
        return found

    def gradients_during(self, model, sites, program):
        """By site the gradients that arrive while ``program()`` runs, which calls model and autograd itself."""
        raise Cannot

    def gradients(self, model, sites, loss, *args, passes=1, by_grad=None, **kwargs):
        def program():
            backward(loss(model(*args, **kwargs)), passes, by_grad)

        return self.gradients_during(model, sites, program)

    def changed(self, model, changes, *args, loss=None, **kwargs):
        def program():
            output = model(*args, **kwargs)
            if loss is not None:
                loss(output).backward()
            return output

        return self.changed_during(model, changes, program)


def backward(total, passes=1, by_grad=None):
    """So many backward passes from ``total``, or ``torch.autograd.grad`` for a tensor."""
    if by_grad is not None:
        torch.autograd.grad(total, by_grad)
        return
    for left in range(passes)[::-1]:
        total.backward(retain_graph=left > 0)


def split(site):
    """``path:port`` in two."""
    path, _, port = site.rpartition(":")
    return path, port


def parts(path):
    """``path@1[key]`` in three: the path, the number of the call or None, the key or None."""
    path, _, key = path.partition("[")
    path, _, call = path.partition("@")
    return path, int(call) if call else None, key.rstrip("]") or None


def of_entry(change, key):
    """The change of a whole output that changes the entry ``key`` of it; ``change`` itself where there is no key."""
    return change if key is None else lambda output: {**output, key: change(output[key])}


def same(found, true):
    """Raise AssertionError unless both lists hold bitwise equal tensors, and None in the same places."""
    for one, other in _pairs(found, true):
        assert one.dtype == other.dtype, f"{one.dtype} where {other.dtype} was expected"
        assert torch.equal(one, other), f"off by up to {(one.double() - other.double()).abs().max():.3g}"


def close(found, true):
    """The same up to rounding: where torch itself may add up in another order."""
    for one, other in _pairs(found, true):
        assert torch.allclose(one, other, atol=1e-6), f"off by up to {(one - other).abs().max():.3g}"


def _pairs(found, true):
    """What was found beside what is true; raises Missing where something is not there."""
    if len(found) < len(true) or any(
        one is None and other is not None for one, other in zip(found, true, strict=False)
    ):
        raise Missing(f"{sum(one is not None for one in found)} values, expected {len(true)}")
    assert len(found) == len(true), f"{len(found)} values, expected {len(true)}"
    for one, other in zip(found, true, strict=True):
        assert isinstance(one, torch.Tensor), f"{type(one).__name__} where a tensor was expected"
        assert one.shape == other.shape, f"shape {list(one.shape)} where {list(other.shape)} was expected"
    return zip(found, true, strict=True)


def refused(ask, *names):
    """Whether the tool says that what is asked cannot be answered truly: by an error, or by a warning with one of ``names``."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            ask()
        except Cannot:
            raise
        except Exception:  # whatever it says, it says something
            return True
    return any(name in str(one.message) for one in told for name in names)


def must_be_told(ask, *names):
    """Raise Missing unless the tool refuses, or warns by one of ``names``."""
    if not refused(ask, *names):
        raise Missing("nothing was said")


def nothing_told(ask, site):
    """Raise AssertionError unless the tool says that nothing passed at ``site``: by an error, or by an empty answer."""
    try:
        found = ask()
    except Cannot:
        raise
    except Exception:  # whatever it says, it says something
        return
    assert not [one for one in found[site] if one is not None], "a value where there was none"
