"""nnsight: a trace around one call or around a function, ``tracer.iter`` for the calls of a module, ``edit`` for changes, and
``with loss.backward()`` for gradients.

Its documentation advises ``.clone()`` for what may be written to later, which is done here, and to take gradients in reverse
order. A copy would have no gradient, so outputs are not copied there. (``h = m.output; m.output = h.clone()`` would make gradients
before an in-place operation right; its documentation does not say so.) What follows a loop over calls is reached where the loop
has an end, which a first run with its cache tells.
"""

import nnsight
from nnsight import NNsight

from traps.against.suite import Cannot, Tool, of_entry, parts, split


class Nnsight(Tool):
    distributions = ("nnsight",)

    def values(self, model, sites, *args, loss=None, **kwargs):
        ((path, port),) = (split(site) for site in sites)
        if port not in ("output", "input"):
            raise Cannot
        envoy = NNsight(model)
        if loss is not None:
            return {sites[0]: self._with_backward(envoy, path, port, loss, args, kwargs)}
        with envoy.trace(*args, **kwargs) as tracer:
            found = nnsight.save([])
            for _ in tracer.iter[:]:
                value = getattr(envoy.get(path), port)
                found.append(value.clone() if hasattr(value, "clone") else value)
        return {sites[0]: list(found)}

    def _with_backward(self, envoy, path, port, loss, args, kwargs):
        calls = _calls(envoy, path, args, kwargs)
        with envoy.trace(*args, **kwargs) as tracer:
            found = nnsight.save([])
            for _ in tracer.iter[:calls]:
                found.append(getattr(envoy.get(path), port).clone())
            loss(tracer.result).backward()
        return list(found)

    def gradients(self, model, sites, loss, *args, passes=1, by_grad=None, **kwargs):
        ((path, port),) = (split(site) for site in sites)
        if port not in ("grad_output", "input_grad") or by_grad is not None:
            raise Cannot
        envoy = NNsight(model)
        name = "output" if port == "grad_output" else "input"
        calls = _calls(envoy, path, args, kwargs)
        with envoy.trace(*args, **kwargs) as tracer:
            values, found = [], nnsight.save([])
            for _ in tracer.iter[:calls]:
                values.append(getattr(envoy.get(path), name))
            total = loss(tracer.result)
            for left in range(passes)[::-1]:
                with total.backward(retain_graph=left > 0):
                    for value in values[::-1]:
                        found.append(value.grad)
        return {sites[0]: list(found)[::-1]}

    def changed(self, model, changes, *args, loss=None, **kwargs):
        with _edited(model, changes).trace(*args, **kwargs) as tracer:
            result = nnsight.save(tracer.result)
            if loss is not None:
                loss(result).backward()
        return result

    def values_during(self, model, sites, program):
        ((path, port),) = (split(site) for site in sites)
        envoy = NNsight(model)
        with envoy.trace(None, fn=lambda _: program()) as tracer:
            found = nnsight.save([])
            for _ in tracer.iter[:]:
                found.append(getattr(envoy.get(path), port).clone())
        return {sites[0]: list(found)}

    def changed_during(self, model, changes, program):
        with _edited(model, changes).trace(None, fn=lambda _: program()) as tracer:
            result = nnsight.save(tracer.result)
        return result

    def ops(self, model, wanted, *args):
        ((name, number),) = wanted
        envoy = NNsight(model)
        with envoy.trace(*args):
            if name == "matmul":  # an operator has no name of its own: it is what the call around it is given
                found = nnsight.save(envoy.source.torch_relu_1.input.clone())
            else:
                found = nnsight.save(getattr(envoy.source, f"torch_{name}_{number}").output.clone())
        return [found]

    def keeper(self, model, paths):
        envoy = NNsight(model)
        modules = [envoy.get(path) for path in paths]

        def run(x):
            with envoy.trace(x) as tracer:
                tracer.cache(modules=modules)

        return run


def _edited(model, changes):
    """The model with a lasting change at one place."""
    ((place, change),) = changes.items()
    path, call, key = parts(place)
    change = of_entry(change, key)
    with NNsight(model).edit() as (tracer, edited):
        for _ in tracer.iter[:] if call is None else tracer.iter[call]:
            module = edited.get(path)
            module.output = change(module.output)
    return edited


def _calls(envoy, path, args, kwargs):
    """How often a module is called in a run; at least 1, so that nnsight itself tells of one that is not."""
    one = envoy.get(path)
    with envoy.trace(*args, **kwargs) as tracer:
        cache = tracer.cache(modules=[one])
    return len(cache[one.path]) if one.path in cache else 1
