"""Hooks of torch, as its documentation explains them: keep what they are given, full backward hooks for gradients.

Hooks are taken away when the forward is over; those for gradients when the backward pass is.
"""

from contextlib import ExitStack

from traps.against.suite import Around, Cannot, of_entry, parts, split


class RawHooks(Around):
    distributions = ("torch",)

    def values_during(self, model, sites, program):
        found = {site: [] for site in sites}
        with ExitStack() as stack:
            for site in sites:
                stack.callback(self._hook(model, site, found[site]).remove)
            program()
        return found

    def gradients_during(self, model, sites, program):
        found = self.values_during(model, sites, program)
        return {site: calls[::-1] for site, calls in found.items()}  # the backward pass comes to the last call first

    def changed_during(self, model, changes, program):
        with ExitStack() as stack:
            for place, change in changes.items():
                path, call, key = parts(place)
                if call is not None:
                    raise Cannot
                change = of_entry(change, key)
                module = model.get_submodule(path)
                handle = module.register_forward_hook(lambda module, args, output, change=change: change(output))
                stack.callback(handle.remove)
            return program()

    def keeper(self, model, paths):
        found = {}
        modules = {path: model.get_submodule(path) for path in paths}

        def run(x):
            handles = [
                module.register_forward_hook(
                    lambda module, args, output, path=path: found.update({path: output.detach()})
                )
                for path, module in modules.items()
            ]
            model(x)
            for handle in handles:
                handle.remove()

        return run

    def _hook(self, model, site, store):
        path, port = split(site)
        module, keep = model.get_submodule(path), Keep(store, port)
        if port == "output":
            return module.register_forward_hook(keep)
        if port == "input":
            return module.register_forward_pre_hook(keep, with_kwargs=True)
        return module.register_full_backward_hook(keep)


class Keep:
    """A hook that a copy or a pickle of its module can take along, into a list of its own."""

    def __init__(self, store, port):
        self.store, self.port = store, port

    def __call__(self, module, *given):
        if self.port == "output":
            self.store.append(given[1])
        elif self.port == "input":
            self.store.append([*given[0], *given[1].values()][0])
        else:
            self.store.append(given[1 if self.port == "grad_output" else 0][0])
