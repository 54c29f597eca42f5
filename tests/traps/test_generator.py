"""A session inside a generator closes when the generator does."""

import torch
from torch import nn

import gaff


def test_closing_a_generator_closes_its_session():
    model = nn.Linear(3, 3)

    def steps():
        with gaff.capture(model, ":output") as got:
            while True:
                model(torch.randn(2, 3))
                yield got.all(":output")[-1]

    running = steps()
    assert next(running).shape == (2, 3)
    assert model._forward_hooks
    running.close()
    assert not model._forward_hooks
