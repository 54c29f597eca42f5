"""torchvision: ``create_feature_extractor``, by names of nodes; the asked module is a leaf, so that its node is its own output.

Its documentation says nothing about gradients.
"""

import inspect
import re

import torch

import schemas

schemas.declare()  # what this torch may lack, and torchvision wants to find
from torchvision.models.feature_extraction import create_feature_extractor, get_graph_node_names  # noqa: E402

from traps.against.suite import Cannot, Tool, split  # noqa: E402


class Torchvision(Tool):
    distributions = ("torchvision",)

    def values(self, model, sites, *args, loss=None, **kwargs):
        ((path, port),) = (split(site) for site in sites)
        if port != "output":
            raise Cannot
        names = inspect.signature(model.forward).parameters
        fixed = {name: one for name, one in zip(names, args, strict=False) if not isinstance(one, torch.Tensor)}
        module = dict(model.named_modules()).get(path)
        options = {
            "tracer_kwargs": {"leaf_modules": [type(module)]} if module is not None else None,
            "concrete_args": fixed or None,
        }
        known = get_graph_node_names(model, **options)[0]
        nodes = [one for one in known if re.fullmatch(re.escape(path) + r"(_\d+)?", one)] or [path]
        wanted = nodes if loss is None else [*nodes, known[-1]]
        extractor = create_feature_extractor(model, return_nodes=wanted, **options).train(model.training)
        features = extractor(*args, **kwargs)
        if loss is not None:
            loss(features[known[-1]]).backward()
        return {sites[0]: [features[node] for node in nodes]}

    def ops(self, model, wanted, *args):
        nodes = [name if number == 0 else f"{name}_{number}" for name, number in wanted]
        features = create_feature_extractor(model, return_nodes=nodes).train(model.training)(*args)
        return [features[node] for node in nodes]

    def keeper(self, model, paths):
        return create_feature_extractor(model, return_nodes=paths).train(model.training)
