"""TransformerLens, on a module of one's own: ``HookedRootModule`` with a ``HookPoint`` wherever somebody wants to look.

Its documentation calls this "the supported way to add TransformerLens-style hooks to arbitrary nn.Module objects". The points are
put around the asked modules for the time of the question. Hooks keep what they are given: no page of it advises a copy for what
is overwritten later.
"""

from contextlib import contextmanager

from torch import nn
from transformer_lens.hook_points import HookPoint
from transformer_lens.HookedRootModule import HookedRootModule

from traps.against.suite import Around, Cannot, of_entry, parts, split


class Pointed(nn.Module):
    """A module with a point before and a point after it."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.hook_in, self.hook_out = inner, HookPoint(), HookPoint()

    def forward(self, *args, **kwargs):
        if args:
            args = (self.hook_in(args[0]), *args[1:])
        else:
            first = next(iter(kwargs))
            kwargs = {**kwargs, first: self.hook_in(kwargs[first])}
        return self.hook_out(self.inner(*args, **kwargs))


class Root(HookedRootModule):
    def __init__(self, model):
        super().__init__()
        self.model = model
        self.setup()

    def forward(self, *args, **kwargs):
        return self.model(*args, **kwargs)


class TransformerLens(Around):
    distributions = ("transformer-lens",)

    def values(self, model, sites, *args, loss=None, **kwargs):
        with _pointed(model, sites) as root:
            found = {site: [] for site in sites}
            hooks = [(_point(site), lambda value, hook, site=site: found[site].append(value)) for site in sites]
            output = root.run_with_hooks(*args, fwd_hooks=hooks, **kwargs)
            if loss is not None:
                loss(output).backward()
            return found

    def values_during(self, model, sites, program):
        return self._hooked(model, sites, program, "fwd_hooks")

    def gradients_during(self, model, sites, program):
        if any(split(site)[1] == "input_grad" for site in sites):
            raise Cannot  # a point before the module hears of its own share
        return {site: calls[::-1] for site, calls in self._hooked(model, sites, program, "bwd_hooks").items()}

    def changed_during(self, model, changes, program):
        hooks = []
        for place, change in changes.items():
            path, call, key = parts(place)
            if call is not None:
                raise Cannot
            change = of_entry(change, key)
            hooks.append((_point(f"{path}:output"), lambda value, hook, change=change: change(value)))
        with _pointed(model, [f"{parts(place)[0]}:output" for place in changes]) as root, root.hooks(fwd_hooks=hooks):
            return program()

    def keeper(self, model, paths):
        for path in paths:
            model.set_submodule(path, Pointed(model.get_submodule(path)))
        root, names = Root(model), [_point(f"{path}:output") for path in paths]
        return lambda x: root.run_with_cache(x, names_filter=names)

    def _hooked(self, model, sites, program, kind):
        found = {site: [] for site in sites}
        hooks = [(_point(site), lambda value, hook, site=site: found[site].append(value)) for site in sites]
        with _pointed(model, sites) as root, root.hooks(**{kind: hooks}):
            program()
        return found


def _point(site):
    """The name of the point for a site."""
    path, port = split(site)
    return f"model.{path}.{'hook_in' if port in ('input', 'grad_input') else 'hook_out'}"


@contextmanager
def _pointed(model, sites):
    """The model under a root, with points around the modules that are there; taken away at the end."""
    known = dict(model.named_modules())
    paths = {split(site)[0] for site in sites} & known.keys()
    try:
        for path in paths:
            model.set_submodule(path, Pointed(known[path]))
        yield Root(model)
    finally:
        for path in paths:
            model.set_submodule(path, known[path])
