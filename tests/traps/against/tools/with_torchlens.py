"""TorchLens: ``trace`` of one call, its records of modules, ops and gradients; ``intervene=`` for edits."""

import torch
import torchlens as tl
from torchlens.options import CaptureOptions

from traps.against.suite import Cannot, Tool, of_entry, parts, split


class TorchLens(Tool):
    distributions = ("torchlens",)

    def values(self, model, sites, *args, loss=None, **kwargs):
        ((path, port),) = (split(site) for site in sites)
        if port not in ("output", "input"):
            raise Cannot
        capture = CaptureOptions(
            backward_ready=loss is not None, random_seed=torch.initial_seed(), unwrap_when_done=True
        )
        trace = tl.trace(model, args, input_kwargs=kwargs, capture=capture)
        if loss is not None:
            loss(trace[trace.output_layers[0]].out).backward()
        calls = trace.modules[path].calls
        found = [calls[number] for number in range(len(calls))]
        if port == "input":
            return {sites[0]: [trace[call.input_ops[0]].out for call in found]}
        return {sites[0]: [_output(call, trace) for call in found]}

    def gradients(self, model, sites, loss, *args, passes=1, by_grad=None, **kwargs):
        ((path, port),) = (split(site) for site in sites)
        if port not in ("grad_output", "input_grad"):
            raise Cannot
        capture = CaptureOptions(save_grads=True, backward_ready=True)
        trace = tl.trace(model, args, input_kwargs=kwargs, capture=capture)
        total = loss(trace[trace.output_layers[0]].out)
        for left in range(passes)[::-1] if by_grad is None else ():
            trace.log_backward(total, retain_graph=left > 0)
        if by_grad is not None:
            torch.autograd.grad(total, by_grad)
        if port == "input_grad":
            calls = trace.modules[path].calls
            ops = [trace[calls[number].input_ops[0]] for number in range(len(calls))]
        else:
            ops = trace.find_sites(tl.module(path))
        return {sites[0]: [one for op in ops for one in _gradients(op)]}

    def changed(self, model, changes, *args, loss=None, **kwargs):
        ((place, change),) = changes.items()
        path, call, key = parts(place)
        if key is not None:  # "Raw PyTorch Forward Hooks": its edits are of an op's value, wherever that goes
            change = of_entry(change, key)
            handle = model.get_submodule(path).register_forward_hook(lambda module, args, output: change(output))
            try:
                trace = tl.trace(model, args, input_kwargs=kwargs)
            finally:
                handle.remove()
            return trace[trace.output_layers[0]].out
        if call is not None:
            if loss is not None:
                raise Cannot
            trace = tl.trace(model, args, input_kwargs=kwargs, capture=CaptureOptions(intervention_ready=True))
            branch = trace.fork()
            branch.set(tl.label(trace.find_sites(tl.module(path))[call].label), change)
            branch.push()
            return branch[branch.output_layers[0]].out
        trace = tl.trace(
            model,
            args,
            input_kwargs=kwargs,
            intervene=tl.when(tl.module(path), lambda value, *, hook: change(value)),
            capture=CaptureOptions(backward_ready=True),
        )
        output = trace[trace.output_layers[0]].out
        if loss is not None:
            loss(output).backward()
        return output

    def ops(self, model, wanted, *args):
        trace = tl.trace(model, args)
        return [trace.find_sites(tl.func(name))[number].out for name, number in wanted]

    def keeper(self, model, paths):
        selector = tl.module(paths[0])
        for path in paths[1:]:
            selector = selector | tl.module(path)
        return lambda x: tl.record(model, x, save=selector)


def _gradients(op):
    """Those of all passes; where there is none, TorchLens says why."""
    if len(op.grads) == 0:
        return [op.grad]
    return [op.grads[number].grad for number in range(len(op.grads))]


class Structure(dict):
    """The tensors of a structure by their first key, which is also an attribute."""

    def __getattr__(self, name):
        return self[name]

    def __missing__(self, number):
        return list(self.values())[number]


def _output(call, trace):
    """What a call returned: its tensor, or its tensors by the name that TorchLens gives each (``multi_output_name``)."""
    if len(call.outs) == 1:
        first = (*call.output_paths[0], None)[0]
        name = getattr(first, "name", getattr(first, "key", None))
        return call.out if name is None else Structure({name: call.out})
    ops = [trace.ops[label] for label in call.output_ops]  # in another order than ``output_paths``
    return Structure((str(op.multi_output_name).partition(".")[0].partition("[")[0], op.out) for op in ops)
