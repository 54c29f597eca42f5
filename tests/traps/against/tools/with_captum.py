"""captum: ``LayerActivation``, and ``LayerGradientXActivation(multiply_by_inputs=False)``, which its documentation calls the gradient."""

from captum.attr import LayerActivation, LayerGradientXActivation

from traps.against.suite import Cannot, Tool, split


class Captum(Tool):
    distributions = ("captum",)

    def values(self, model, sites, *args, loss=None, **kwargs):
        ((path, port),) = (split(site) for site in sites)
        if port not in ("output", "input") or kwargs:
            raise Cannot
        method = LayerActivation(model, model.get_submodule(path))
        inputs, rest = args[0], args[1:] or None
        found = method.attribute(inputs, additional_forward_args=rest, attribute_to_layer_input=port == "input")
        return {sites[0]: [found]}

    def gradients(self, model, sites, loss, *args, passes=1, by_grad=None, **kwargs):
        ((path, port),) = (split(site) for site in sites)
        if port not in ("grad_output", "input_grad") or passes > 1 or by_grad is not None or kwargs:
            raise Cannot
        method = LayerGradientXActivation(
            lambda *given: loss(model(*given)).reshape(1), model.get_submodule(path), multiply_by_inputs=False
        )
        inputs, rest = args[0], args[1:] or None
        of_input = port == "input_grad"
        return {sites[0]: [method.attribute(inputs, additional_forward_args=rest, attribute_to_layer_input=of_input)]}

    def keeper(self, model, paths):
        method = LayerActivation(model, [model.get_submodule(path) for path in paths])
        return lambda x: method.attribute(x)
