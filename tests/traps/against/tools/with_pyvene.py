"""pyvene: a function as the intervention at ``path.output``, as its introduction (pyvene 101) collects and changes values.

It wants models with a ``config``, and inputs by name; both are supplied here. Gradients are no components of it.
"""

import copy
import inspect

import pyvene as pv
from transformers import PretrainedConfig

from traps.against.suite import Cannot, Tool, parts, split


class Pyvene(Tool):
    distributions = ("pyvene", "transformers")

    def values(self, model, sites, *args, loss=None, **kwargs):
        found = {site: [] for site in sites}

        def keep(site):
            def collect(base, source):
                found[site].append(copy.deepcopy(base.data) if hasattr(base, "data") else copy.deepcopy(base))

            return collect

        components = []
        for site in sites:
            path, port = split(site)
            components.append({"component": f"{path}.{port}", "intervention": keep(site)})
        output = self._run(model, components, args, kwargs, is_training=loss is not None)
        if loss is not None:
            loss(output).backward()
        return found

    def changed(self, model, changes, *args, loss=None, **kwargs):
        components = []
        for place, change in changes.items():
            path, call, key = parts(place)
            if call is not None or key is not None:  # of a dict or a tuple it changes the first tensor
                raise Cannot
            components.append(
                {"component": f"{path}.output", "intervention": lambda base, source, change=change: change(base)}
            )
        output = self._run(model, components, args, kwargs, is_training=loss is not None)
        if loss is not None:
            loss(output).backward()
        return output

    def keeper(self, model, paths):
        found = {}

        def keep(path):
            def collect(base, source):
                found[path] = base.detach()

            return collect

        model.config = PretrainedConfig()
        components = [{"component": f"{path}.output", "intervention": keep(path)} for path in paths]
        intervenable = pv.IntervenableModel(components, model=model)
        name = next(iter(inspect.signature(model.forward).parameters))
        return lambda x: intervenable({name: x})

    def _run(self, model, components, args, kwargs, is_training=False):
        named = dict(zip(inspect.signature(getattr(model, "_orig_mod", model).forward).parameters, args, strict=False))
        model.config = PretrainedConfig()
        try:
            is_in_training = model.training
            intervenable = pv.IntervenableModel(components, model=model)
            intervenable.train(is_in_training)  # it has put the model into evaluation mode
            if is_training:
                intervenable.enable_model_gradients()
            return intervenable({**named, **kwargs})[1]
        finally:
            del model.config
