"""baukit: ``TraceDict`` around the run; ``clone=True`` for values that may be overwritten later, as ``Trace`` explains.

Copies are made of tensors, dicts and lists; of other outputs a reference is kept, which is its default. Gradients: forward in the
block, backward after it, as in its example.
"""

import torch

import schemas

schemas.declare()  # what this torch may lack, and torchvision, which baukit imports, wants to find
from baukit import TraceDict  # noqa: E402

from traps.against.suite import Around, Cannot, of_entry, parts, split  # noqa: E402


class Baukit(Around):
    distributions = ("baukit",)

    def values_during(self, model, sites, program):
        ports = {split(site)[1] for site in sites}
        if not ports <= {"output", "input"}:
            raise Cannot
        paths = [split(site)[0] for site in sites]
        try:
            with TraceDict(model, paths, retain_input=True, clone=True) as traced:
                program()
        except (AssertionError, TypeError):  # what it cannot copy
            with TraceDict(model, paths, retain_input=True) as traced:
                program()
        return {site: _one(getattr(traced[split(site)[0]], split(site)[1], None)) for site in sites}

    def gradients(self, model, sites, loss, *args, passes=1, by_grad=None, **kwargs):
        if any(split(site)[1] != "grad_output" for site in sites):
            raise Cannot
        paths, found = [split(site)[0] for site in sites], {site: [] for site in sites}
        with TraceDict(model, paths, retain_grad=True) as traced:
            total = loss(model(*args, **kwargs))
        for left in range(passes)[::-1]:
            if by_grad is None:
                total.backward(retain_graph=left > 0)
            else:
                torch.autograd.grad(total, by_grad)
            for site, path in zip(sites, paths, strict=True):
                found[site] += _one(traced[path].output.grad)
                traced[path].output.grad = None  # it adds up, as torch says
        return found

    def changed_during(self, model, changes, program):
        given = {}
        for place, change in changes.items():
            path, call, key = parts(place)
            if call is not None:
                raise Cannot
            given[path] = of_entry(change, key)
        with TraceDict(model, list(given), edit_output=lambda output, layer: given[layer](output)):
            return program()

    def keeper(self, model, paths):
        def run(x):
            with TraceDict(model, paths):
                model(x)

        return run


def _one(value):
    """The list of the one value that a trace holds; a trace has no output where its module did not run."""
    return [] if value is None else [value]
