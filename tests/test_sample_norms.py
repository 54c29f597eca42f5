"""Gradient norms of single examples, against a loop of autograd.grad."""

import math

import pytest
import torch
from torch import nn

import gaff


class Tied(nn.Module):
    """Embedding and head share their weight; a linear layer is called twice."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 4, padding_idx=0)
        self.twice = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = torch.tanh(self.twice(torch.tanh(self.twice(self.embed(tokens)))))
        return self.head(self.norm(x))


def tied():
    return Tied(), torch.randint(7, (5, 3))


def dense():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Linear(8, 3)), torch.randn(5, 4)


def sequence():
    layers = [nn.Linear(4, 6), nn.LayerNorm(6), nn.Tanh(), nn.RMSNorm(6), nn.Linear(6, 2)]
    return nn.Sequential(*layers), torch.randn(5, 9, 4)


def long_sequence():
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2)), torch.randn(4, 50, 2)


def images():
    layers = [
        nn.Conv2d(3, 8, 3, padding=1, stride=2),
        nn.GroupNorm(2, 8),
        nn.ReLU(),
        nn.Conv2d(8, 4, (3, 2), groups=2, dilation=(1, 2), padding="same", padding_mode="reflect"),
        nn.InstanceNorm2d(4, affine=True),
        nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1, groups=2),
        nn.BatchNorm2d(6),
    ]
    return nn.Sequential(*layers).eval(), torch.randn(3, 3, 9, 8)


def signals():
    return nn.Sequential(
        nn.Conv1d(2, 4, 3), nn.BatchNorm1d(4), nn.ConvTranspose1d(4, 2, 4, dilation=2)
    ).eval(), torch.randn(3, 2, 12)


def volumes():
    return nn.Sequential(nn.Conv3d(1, 2, 2, stride=(1, 2, 1)), nn.ConvTranspose3d(2, 1, 2)), torch.randn(2, 1, 4, 5, 4)


MODELS = [dense, sequence, long_sequence, tied, images, signals, volumes]


def truth(model, x):
    """Norm of each example's gradient, by parameter, one example at a time."""
    rows = []
    for example in x:
        loss = model(example[None]).pow(2).mean()
        gradients = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
        rows.append([torch.zeros(()) if one is None else one.norm() for one in gradients])
    return {
        name: torch.stack(column)
        for (name, _), column in zip(model.named_parameters(), zip(*rows, strict=True), strict=True)
    }


@pytest.mark.parametrize("build", MODELS, ids=lambda build: build.__name__)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_norms_are_those_of_a_loop_over_the_examples(build, reduction):
    model, x = build()
    true = truth(model, x)
    with gaff.sample_norms(model, reduction=reduction) as norms:
        each = model(x).pow(2).flatten(1).mean(1)
        (each.mean() if reduction == "mean" else each.sum()).backward()
    for name, column in true.items():
        torch.testing.assert_close(norms[name], column, rtol=1e-4, atol=1e-5)
    total = torch.stack(list(true.values())).square().sum(0).sqrt()
    torch.testing.assert_close(norms.total, total, rtol=1e-4, atol=1e-5)


def test_patterns_limit_what_is_followed():
    model = nn.Sequential(nn.Linear(4, 4), nn.GRU(4, 3, batch_first=True))
    x = torch.randn(5, 2, 4)
    with pytest.raises(
        gaff.PlanError, match=r"1 \(GRU\): no rule for its parameters, or for an option of it: expected Linear"
    ):
        gaff.sample_norms(model)
    with gaff.sample_norms(model, "**<Linear>") as norms:
        model(x)[0].pow(2).mean().backward()
    assert list(norms.run(0)) == ["0.weight", "0.bias"]


def test_several_runs_are_kept_apart():
    model, x = dense()
    with gaff.sample_norms(model, reduction="sum") as norms:
        for factor in (1.0, 2.0):
            model(x * factor).sum().backward()
    with pytest.raises(gaff.SiteError, match="2 runs had a backward pass"):
        _ = norms.total
    assert not torch.equal(norms.run(0)["0.weight"], norms.run(1)["0.weight"])


class Shared(nn.Module):
    """Position embeddings that all examples share."""

    def __init__(self):
        super().__init__()
        self.position = nn.Embedding(3, 4)
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x + self.position(torch.arange(3)[None]))


def test_what_cannot_be_told_apart_is_refused():
    with gaff.sample_norms(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))) as norms:
        norms._session._model(torch.randn(5, 4)).sum().backward()
    with pytest.raises(
        gaff.ExactnessError, match=r"1: BatchNorm1d mixes the examples of a batch: expected model\.eval"
    ):
        _ = norms.total
    model = Shared()
    with gaff.sample_norms(model) as norms:
        model(torch.randn(2, 3, 4)).sum().backward()
    with pytest.raises(gaff.ExactnessError, match=r"position: Embedding was given \(1, 3\) in a batch of 2"):
        _ = norms.total
    with gaff.sample_norms(model, "linear") as norms:
        model(torch.randn(2, 3, 4)).sum().backward()
    assert norms.total.shape == (2,)
    with pytest.raises(gaff.NeverFiredError, match="saw no gradient"), gaff.sample_norms(model):
        model(torch.randn(2, 3, 4))
    with pytest.raises(gaff.PlanError, match="reduction='none' is not known"):
        gaff.sample_norms(model, reduction="none")


def test_a_frozen_model_has_nothing_to_follow():
    model = nn.Linear(4, 4).requires_grad_(False)
    with pytest.raises(gaff.PlanError, match="no layer with trainable parameters of its own there"):
        gaff.sample_norms(model)


def norms_of(model, x, *patterns):
    with gaff.sample_norms(model, *patterns) as norms:
        model(x).pow(2).flatten(1).sum(1).mean().backward()
    return norms


class Functional(nn.Module):
    """A weight that is also used without its layer."""

    def __init__(self):
        super().__init__()
        self.embed, self.lin = nn.Embedding(7, 3), nn.Linear(3, 3)

    def forward(self, x):
        return nn.functional.linear(torch.tanh(self.lin(self.embed(x))), self.embed.weight)


class Unused(nn.Module):
    """A layer whose weight is used, and which is never called."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(3, 3)

    def forward(self, x):
        return nn.functional.linear(x, self.lin.weight, self.lin.bias)


@pytest.mark.parametrize(
    ("build", "x", "patterns"),
    [
        (Functional, torch.randint(7, (4, 6)), ()),
        (Unused, torch.randn(4, 3), ()),
        (Tied, torch.randint(1, 7, (4, 6)), ("head",)),
        (lambda: nn.MultiheadAttention(4, 2, batch_first=True), torch.randn(4, 3, 4), ("**<Linear>",)),
    ],
)
def test_a_parameter_that_is_used_in_another_way_as_well_is_refused(build, x, patterns):
    model = build()
    run = model
    if isinstance(model, nn.MultiheadAttention):
        run = nn.Sequential(model)
        run.forward = lambda t: model(t, t, t)[0]
    norms = norms_of(run, x, *patterns)
    with pytest.raises(gaff.ExactnessError, match="account for a part of its gradient only"):
        _ = norms.total


class Scaled(nn.Linear):
    """A linear layer with a forward of its own."""

    def forward(self, x):
        return nn.functional.linear(x, self.weight * 0.1, self.bias)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_layers_with_another_forward_or_other_parameters_have_no_rule():
    patched = nn.Linear(3, 3)
    patched.forward = lambda x: x @ patched.weight
    for model in (
        Scaled(3, 3),
        patched,
        torch.nn.utils.weight_norm(nn.Linear(3, 3)),
        nn.Embedding(5, 3, scale_grad_by_freq=True),
    ):
        with pytest.raises(gaff.PlanError, match="no rule for its parameters"):
            gaff.sample_norms(model)


def test_what_comes_after_backward_changes_nothing():
    model, x = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).eval(), torch.randn(5, 3)
    true = truth(model, x)
    with gaff.sample_norms(model) as norms:
        model(x).pow(2).mean(1).mean().backward()
    model.train()
    model(torch.randn(5, 3) * 9)
    x.mul_(10)
    with torch.autocast("cpu", torch.bfloat16):
        for name, column in true.items():
            torch.testing.assert_close(norms[name], column, rtol=1e-4, atol=1e-6)


def test_an_input_that_the_model_changes_is_noticed():
    model, x = nn.Sequential(nn.Linear(3, 3, bias=False)), torch.randn(4, 3)
    loss = None
    with gaff.sample_norms(model) as norms:
        loss = (model(x) * 1).sum()
        x.data.add_(0)
        loss.backward()
    assert norms.total.shape == (4,)


def test_large_numbers_that_cancel_leave_the_small_truth():
    layer, x = nn.Linear(50, 50, bias=False), torch.randn(2, 20, 50)
    x[:, 10:] = x[:, :10] + 1e-4 * torch.randn(2, 10, 50)
    signs = torch.cat([torch.ones(10), -torch.ones(10)])[None, :, None]
    with gaff.sample_norms(layer) as norms:
        (layer(x) * signs).sum((1, 2)).mean().backward()
    for row, example in zip(norms["weight"], x, strict=True):
        [gradient] = torch.autograd.grad((layer.double()(example[None].double()) * signs).sum(), layer.weight)
        layer.float()
        assert row.item() == pytest.approx(gradient.norm().item(), rel=1e-3)


def test_a_linear_layer_tied_with_a_transposed_one():
    conv1d = pytest.importorskip("transformers.pytorch_utils").Conv1D

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = conv1d(5, 3), nn.Linear(5, 3, bias=False)
            self.two.weight = self.one.weight

        def forward(self, x):
            return self.two(torch.tanh(self.one(x)))

    model, x = Both(), torch.randn(4, 3)
    true = truth(model, x)
    with gaff.sample_norms(model) as norms:
        model(x).pow(2).mean(1).mean().backward()
    for name, column in true.items():
        torch.testing.assert_close(norms[name], column, rtol=1e-4, atol=1e-6)


def test_rms_norms_that_models_write_themselves():
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    more = {"vocab_size": 20, "num_key_value_heads": 1, "head_dim": 8, "attn_implementation": "eager"}
    for kind in ("Llama", "Gemma", "Qwen3"):
        torch.manual_seed(0)
        config = getattr(transformers, kind + "Config")(**sizes, **more, pad_token_id=0)
        model, x = getattr(transformers, kind + "Model")(config), torch.randint(1, 20, (3, 5))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.add_(0.3 * torch.rand_like(parameter) * ("norm" in name))
        followed = ["layers.0.input_layernorm", "norm"] if kind == "Gemma" else []  # its embedding is its own
        with gaff.sample_norms(model, *followed) as norms:
            model(x).last_hidden_state.pow(3).mean((1, 2)).mean().backward()
        for name in norms:
            parameter = model.get_parameter(name)
            alone = [
                torch.autograd.grad(model(one[None]).last_hidden_state.pow(3).mean(), parameter)[0].norm() for one in x
            ]
            torch.testing.assert_close(norms[name], torch.stack(alone), rtol=1e-3, atol=1e-6, msg=f"{kind}: {name}")


class PlainRMSNorm(nn.Module):
    """Called an RMS norm, and none."""

    def __init__(self):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.rand(4)), 1e-6

    def forward(self, x):
        return self.weight * (x - x.mean(-1, keepdim=True))


def test_what_is_only_called_an_rms_norm_is_found_out():
    model = nn.Sequential(nn.Linear(3, 4), PlainRMSNorm())
    with gaff.sample_norms(model) as norms:
        model(torch.randn(5, 3)).pow(2).mean().backward()
    with pytest.raises(gaff.ExactnessError, match=r"1\.weight"):
        _ = norms["1.weight"]


@pytest.mark.parametrize("affine", [False, True])
def test_batch_norm_that_is_not_followed_is_refused_where_it_mixes_what_followed_layers_made(affine):
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, affine=affine), nn.Linear(4, 2))
    x = torch.randn(5, 3)
    for patterns in (["**<Linear>"], ["0"]):
        with gaff.sample_norms(model, *patterns) as norms:
            model(x).sum().backward()
        with pytest.raises(gaff.ExactnessError, match="1: BatchNorm1d mixes the examples"):
            _ = norms.total
    with gaff.sample_norms(model, "2", reduction="sum") as norms:  # what is mixed before it is given to it as it is
        model(x).square().sum().backward()
    hidden = model[1](model[0](x)).detach()
    alone = [torch.autograd.grad(model[2](one[None]).square().sum(), model[2].weight)[0].norm() for one in hidden]
    torch.testing.assert_close(norms["2.weight"], torch.stack(alone))


def test_batches_without_examples_and_nan_are_refused_by_what_they_are():
    model = nn.Linear(3, 2)
    for x, message in ((torch.ones(0, 3), "nothing to measure"), (torch.full((2, 3), math.nan), "is not finite")):
        with gaff.sample_norms(model) as norms:
            model(x).sum().backward()
        with pytest.raises(gaff.ExactnessError, match=message):
            _ = norms.total


def test_inputs_without_examples_and_names_that_are_not_followed_are_refused():
    for model, x in (
        (nn.Conv2d(2, 3, 2), torch.randn(2, 5, 5)),
        (nn.Linear(3, 3), torch.randn(3)),
        (nn.LayerNorm((2, 3)), torch.randn(2, 3)),
    ):
        with gaff.sample_norms(model) as norms:
            model(x).sum().backward()
        with pytest.raises(gaff.ExactnessError, match="its first dimension is not the examples"):
            _ = norms.total
    model, x = dense()
    norms = norms_of(model, x)
    with pytest.raises(gaff.SiteError, match=r"'0\.wieght' is not followed: expected one of 0\.weight"):
        _ = norms["0.wieght"]
    with pytest.raises(gaff.SiteError, match="1 runs had a backward pass"):
        norms.run(5)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed_layers(use_reentrant):
    from torch.utils.checkpoint import checkpoint

    body = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4), nn.Tanh())
    model, x = nn.Sequential(body, nn.Linear(4, 2)), torch.randn(5, 4)
    true = truth(model, x)
    model.forward = lambda t: model[1](
        checkpoint(body, checkpoint(nn.Identity(), t, use_reentrant=False), use_reentrant=use_reentrant)
    )
    with gaff.sample_norms(model) as norms:
        model(x.requires_grad_()).pow(2).mean(1).mean().backward()
    for name, column in true.items():
        torch.testing.assert_close(norms[name], column, rtol=1e-4, atol=1e-6)


def test_long_sequences_of_an_embedding_are_compared_in_blocks():
    model, x = nn.Embedding(9, 2), torch.randint(9, (2, 6000))
    norms = norms_of(model, x)
    for row, example in zip(norms["weight"], x, strict=True):
        [gradient] = torch.autograd.grad(model(example[None]).pow(2).sum(), model.weight)
        assert row.item() == pytest.approx(gradient.norm().item(), rel=1e-4)


@pytest.mark.parametrize("seed", range(10))
def test_autocast_is_no_other_use(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 1))
    x = torch.randn(64, 16)
    with gaff.sample_norms(model) as norms:
        with torch.autocast("cpu", torch.bfloat16):
            y = model(x)
        (y.float() - 1).square().mean().backward()
    assert norms.total.isfinite().all()


MASK = (torch.arange(10) < 3).float()[:, None]


@pytest.mark.parametrize(
    "change", [lambda g: g * MASK, lambda g: g - g.mean(1, keepdim=True), lambda g: g.clamp(min=0), lambda g: g * 0.5]
)
@pytest.mark.parametrize("is_edit", [False, True])
def test_gradients_that_somebody_projects_are_refused(change, is_edit):
    """A projection of the sum has the inner product with the sum that its own square is."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 3)), torch.randn(8, 6)
    if not is_edit:
        model[0].weight.register_hook(change)
    edit = gaff.edit(model, {gaff.maybe("0.weight:grad"): change}) if is_edit else torch.enable_grad()
    with edit, gaff.sample_norms(model) as norms:
        model(x).square().mean().backward()
    with pytest.raises(gaff.ExactnessError, match="account for a part of its gradient only"):
        norms["0.weight"]


@pytest.mark.parametrize("size", [1e-20, 1e20])
def test_squares_that_float32_cannot_add_up_are_refused(size):
    model = nn.Linear(6, 10)
    with gaff.sample_norms(model) as norms:
        (model(torch.ones(8, 6)).mean() * size).backward()
    with pytest.raises(gaff.ExactnessError, match="out of float32's range"):
        norms["weight"]


def test_complex_parameters_are_refused():
    with pytest.raises(gaff.PlanError, match="0: its parameters are complex: expected real ones"):
        gaff.sample_norms(nn.Sequential(nn.Linear(4, 3, dtype=torch.complex64)))


def test_norms_beside_an_edited_parameter():
    """Other parameters' norms are told; of the edited one the layer accounts for another gradient, which is refused."""
    model, x = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)), torch.randn(5, 4)
    for names in (("2",), ("0", "2")):
        with gaff.edit(model, {"0.weight:param": gaff.edits.scale(0.5)}), gaff.sample_norms(model, *names) as norms:
            model(x).pow(2).sum(1).mean().backward()
        if "0" in names:
            with pytest.raises(gaff.ExactnessError, match="0.weight: the layers that are followed account for a part"):
                norms["0.weight"]
        else:
            hidden = torch.tanh(torch.nn.functional.linear(x, model[0].weight * 0.5, model[0].bias))
            truth = (2 * model[2](hidden)).norm(dim=1)
            torch.testing.assert_close(norms["2.bias"], truth.detach())


def test_a_nested_input_is_refused_when_the_norms_are_read():
    model = nn.Linear(6, 2)
    x = torch.nested.nested_tensor([torch.randn(rows, 6) for rows in (2, 3, 1)], layout=torch.jagged)
    with gaff.sample_norms(model, reduction="sum") as norms:
        model(x).values().square().sum().backward()
    with pytest.raises(gaff.ExactnessError, match=r"the model: its input is a NestedTensor of torch.jagged: expected"):
        _ = norms.total
    assert model.weight.grad is not None


@pytest.mark.parametrize("how", ["backward", "grad"])
def test_what_a_pass_for_chosen_inputs_leaves_out_has_no_norms_of_zero(how):
    model, x = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2), nn.Linear(2, 2)), torch.randn(5, 4)

    def norms_of(chosen, *patterns):
        model.zero_grad()
        with gaff.sample_norms(model, *patterns) as norms:
            loss = model(x).pow(2).mean()
            if how == "backward":
                loss.backward(inputs=chosen)
            else:
                torch.autograd.grad(loss, chosen, allow_unused=True)
        return norms.run(0)

    for chosen in ([model[2].weight], [*model[2].parameters(), *model[3].parameters()], [model[0].bias]):
        with pytest.raises(
            gaff.ExactnessError, match="its gradient was not asked of the backward pass, which was for some"
        ):
            norms_of(chosen, "0", "2", "3")
    every, later = norms_of(list(model.parameters()), "0", "2", "3"), norms_of([*model[2].parameters()], "2")
    assert list(later) == ["2.weight", "2.bias"]
    for name in later:
        torch.testing.assert_close(later[name], every[name])


@pytest.mark.parametrize("change", [torch.zeros_like, lambda gradient: gradient * 0.5])
def test_a_hook_set_before_that_changes_a_gradient_is_noticed_whatever_it_makes_of_it(change):
    model = nn.Linear(4, 3)
    model.weight.register_hook(change)
    with gaff.sample_norms(model) as norms:
        model(torch.randn(5, 4)).square().sum(1).mean().backward()
    with pytest.raises(gaff.ExactnessError, match="account for a part of its gradient only"):
        norms["weight"]


def test_a_gradient_that_is_truly_zero_has_norms_of_zero():
    model = nn.Linear(4, 3)
    with gaff.sample_norms(model) as norms:
        (model(torch.randn(5, 4)) * 0).sum().backward()
    assert norms["weight"].tolist() == [0.0] * 5
    x = torch.randn(1, 4).expand(2, 4)
    with gaff.sample_norms(model) as norms:  # those of two examples cancel
        (model(x) * torch.tensor([[1.0], [-1.0]])).sum().backward()
    assert model.weight.grad.abs().max() < 1e-6
    assert (norms["weight"] > 1).all()


def test_norms_of_a_layer_are_those_of_all_its_parameters_and_messages_say_how_to_ask():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Sequential(nn.Tanh(), nn.Linear(8, 2)))
    with gaff.sample_norms(model) as norms:
        model(torch.randn(5, 4)).square().sum(1).mean().backward()
    assert torch.allclose(norms["1.1"].square(), norms["1.1.weight"].square() + norms["1.1.bias"].square())
    assert torch.allclose(norms.total.square(), norms["0"].square() + norms["1.1"].square())
    with pytest.raises(gaff.SiteError, match=r"'1\.2' is not followed: expected one of .*1\.1"):
        norms["1.2"]
    assert repr(norms) == "<gaff sample norms: 4 parameters, 1 run, of a loss that is a mean over examples>"
    with pytest.raises(gaff.PlanError, match=r"'1' has some inside: expected '\*\*' for all that is inside"):
        gaff.sample_norms(model, "1")
    place = nn.ModuleDict({"at": nn.Embedding(6, 4), "last": nn.Linear(4, 2)})
    place.forward = lambda x: place["last"](x + place["at"](torch.arange(6)))
    for pattern in ((), (lambda site: site.path != "at",)):
        with gaff.sample_norms(place, *pattern) as norms:
            place(torch.randn(5, 6, 4)).square().mean((1, 2)).mean().backward()
        if pattern:
            assert norms["last"].shape == (5,)
        else:
            with pytest.raises(gaff.ExactnessError, match=r"sample_norms\(model, lambda site: site.path != 'at'\)"):
                norms["last"]
