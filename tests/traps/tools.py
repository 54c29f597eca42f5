"""What a trap is sprung on: gaff, hand-written hooks, and the usual dictionary where the last call wins.

A tool answers one question: run ``step`` and say what passed at ``sites`` (``path:port``, ports output, input,
grad_output, grad_input), every call in order. And it does one thing: ``changed(model, {path: function})`` is a context
in which outputs are what the function makes of them. A trap passes if the answers, or the gradients, are true.
"""

from contextlib import contextmanager

import torch

import gaff


class Gaff:
    """gaff itself."""

    def seen(self, model, sites, step):
        with gaff.capture(model, *sites) as got:
            step()
        return {site: got.all(site) for site in sites}

    def changed(self, model, changes):
        return gaff.edit(model, changes)


class RawHooks:
    """Hooks as most people write them: keep references, and full backward hooks for gradients."""

    def seen(self, model, sites, step):
        found = {site: [] for site in sites}
        handles = []
        for site in sites:
            path, _, port = site.rpartition(":")
            handles.append(self._hook(model.get_submodule(path), port, found[site]))
        try:
            step()
        finally:
            for handle in handles:
                handle.remove()
        return found

    @contextmanager
    def changed(self, model, changes):
        handles = [self._change(model.get_submodule(path), change) for path, change in changes.items()]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _change(self, module, change):
        return module.register_forward_hook(lambda m, args, output: change(output))

    def _hook(self, module, port, store):
        if port == "output":
            return module.register_forward_hook(lambda m, args, output: store.append(output))
        if port == "input":
            return module.register_forward_hook(lambda m, args, output: store.append(args[0]))
        position = 1 if port == "grad_input" else 2
        return module.register_full_backward_hook(lambda *given: store.append(given[position][0]))


class LastCallWins(RawHooks):
    """One slot a site, filled with the output itself, whose gradient is retained: the common tracing dictionary."""

    def seen(self, model, sites, step):
        slots = {}
        handles = []
        for site in sites:
            path, _, port = site.rpartition(":")
            module = model.get_submodule(path)

            def hook(m, args, output, site=site, port=port):
                slots[site] = args[0] if port in ("input", "grad_input") else output
                if port.startswith("grad") and slots[site].requires_grad:
                    slots[site].retain_grad()

            handles.append(module.register_forward_hook(hook))
        try:
            step()
        finally:
            for handle in handles:
                handle.remove()
        return {site: [slots[site].grad if ":grad" in site else slots[site]] for site in sites if site in slots}


TOOLS = {"gaff": Gaff, "raw hooks": RawHooks, "last call wins": LastCallWins}


def same(found, true):
    """Raises AssertionError unless both lists hold bitwise equal tensors."""
    assert len(found) == len(true), f"{len(found)} values, expected {len(true)}"
    for one, other in zip(found, true, strict=True):
        assert (one is None) == (other is None), f"{one} where {other} was expected"
        assert one is None or torch.equal(one, other), f"{one} where {other} was expected"
