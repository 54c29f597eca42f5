"""Names that users of other libraries know: what their examples do comes out the same here."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gaff
from gaff.errors import PlanError, SiteError
from gaff.integrations.baukit import Trace, TraceDict
from gaff.integrations.captum import at
from gaff.integrations.torchvision import create_feature_extractor, get_graph_node_names
from gaff.integrations.transformer_lens import _by_head, run_with_cache, run_with_hooks
from test_names import llama, tokens, transformers


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)
        self.relu = nn.ReLU()

    def forward(self, x):
        y = self.relu(self.conv(x))
        return self.relu(y + x)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer1 = nn.Sequential(Block(), Block())
        self.fc = nn.Linear(3, 5)

    def forward(self, x):
        x = self.layer1(x)
        x = F.adaptive_avg_pool2d(x, 1)
        return self.fc(torch.flatten(x, 1))


def net():
    torch.manual_seed(0)
    return Net().eval(), torch.randn(2, 3, 6, 6)


def test_torchvisions_nodes_are_features_by_their_names():
    model, x = net()
    nodes = {
        "layer1.0.conv": "a",
        "layer1.1.relu_1": "b",
        "layer1.0.add": "c",
        "flatten": "d",
        "layer1": "e",
        "fc": "f",
    }
    found = create_feature_extractor(model, nodes)(x)
    first = model.layer1[0]
    sums = first.relu(first.conv(x)) + x
    assert torch.equal(found["a"], first.conv(x))
    assert torch.equal(found["c"], sums)
    assert torch.equal(found["b"], model.layer1(x))
    assert torch.equal(found["e"], model.layer1(x))
    assert torch.equal(found["d"], F.adaptive_avg_pool2d(model.layer1(x), 1).flatten(1))
    assert torch.equal(found["f"], model(x))
    extractor = create_feature_extractor(model, ["fc"])
    extractor(x)["fc"].sum().backward()
    assert model.fc.weight.grad is not None
    with pytest.raises(SiteError, match="no node 'layer9.0.add': the model has no module 'layer9.0'; nearest: layer1"):
        create_feature_extractor(model, ["layer9.0.add"])


def test_the_names_of_nodes():
    model, x = net()
    training, evaluation = get_graph_node_names(model, x)
    assert training == evaluation
    assert {"layer1.0.conv", "layer1.0.relu", "layer1.0.relu_1", "layer1.0.add", "flatten", "fc"} <= set(training)
    assert get_graph_node_names(model)[0] == ["layer1.0.conv", "layer1.0.relu", "layer1.1.conv", "layer1.1.relu", "fc"]
    assert not any(module.training for module in model.modules())
    create_feature_extractor(model, training)(x)  # every one of them is a node


def test_baukits_trace_keeps_changes_and_stops():
    model, x = net()
    with Trace(model, "layer1.0", retain_input=True) as ret:
        model(x)
    assert torch.equal(ret.output, model.layer1[0](x))
    assert torch.equal(ret.input, x)
    ret.output.sum().backward()  # with its graph, as there
    twin = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True))
    given = torch.randn(3, 4)
    for options in ({}, {"clone": True}, {"detach": True}, {"edit_output": lambda output, more=1.0: output * more}):
        with Trace(twin, "0", **options) as kept:
            twin(given)
        assert torch.equal(kept.output, F.linear(given, twin[0].weight, twin[0].bias))
    with Trace(twin, "0", edit_output=torch.neg) as kept:  # no signature can be read
        twin(given)
    assert torch.equal(kept.output, -F.linear(given, twin[0].weight, twin[0].bias))
    assert model.layer1[0].conv.weight.grad is not None

    with TraceDict(
        model, ["layer1.1", "fc"], edit_output=lambda output, layer: output * (layer == "fc"), detach=True
    ) as ret:
        out = model(x)
    assert list(ret) == ["layer1.1", "fc"]
    assert not ret["layer1.1"].output.any()
    assert torch.equal(out, model.fc(torch.zeros(2, 3)))
    assert not ret["fc"].output.requires_grad

    reached = []
    with Trace(model, "layer1.0", stop=True) as ret:
        model(x)
        reached.append("the end")
    assert not reached
    assert torch.equal(ret.output, model.layer1[0](x))
    with pytest.raises(SiteError, match="no module 'layer9'"), Trace(model, "layer9"):
        model(x)
    with Trace(twin, "0", retain_grad=True) as kept:
        out = twin(given)
    out.sum().backward()  # after the block, as there
    value = F.linear(given, twin[0].weight, twin[0].bias)
    assert torch.equal(kept.output, value)
    assert torch.equal(kept.output.grad, (value > 0).float())
    frozen = nn.Sequential(nn.Identity(), nn.Linear(4, 4))
    with Trace(frozen, "0", retain_grad=True) as kept:
        out = frozen(given)
    out.sum().backward()
    torch.testing.assert_close(kept.output.grad, frozen[1].weight.sum(0).expand(3, 4))
    assert not given.requires_grad  # what the caller gave stays as it was
    with Trace(twin, "0", retain_grad=True, stop=True) as kept:
        twin(given)
    assert torch.equal(kept.output, value)
    with pytest.raises(ZeroDivisionError), Trace(model, "fc"):
        raise ZeroDivisionError
    with Trace(model, "fc") as ret:
        model(x)
    with pytest.raises(PlanError, match="fc: its input was not kept: expected retain_input=True"):
        _ = ret.input


def test_transformer_lens_names_and_shapes():
    model, ids = llama(), tokens()
    output, cache = run_with_cache(model, ids)
    assert torch.equal(output.logits, model(ids).logits)
    assert cache["q", 0].shape == (2, 7, 4, 8)
    assert cache["k", 0].shape == (2, 7, 2, 8)
    assert cache["z", 1].shape == (2, 7, 4, 8)
    assert cache["pattern", 1].shape == (2, 4, 7, 7)
    assert torch.equal(cache["resid_post", -1], cache["blocks.1.hook_resid_post"])
    torch.testing.assert_close(cache["resid_mid", 0], cache["resid_pre", 0] + cache["attn_out", 0])
    assert cache.stack_activation("resid_pre").shape == (2, 2, 7, 32)
    assert cache.accumulated_resid(incl_mid=True).shape == (5, 2, 7, 32)
    assert torch.equal(cache.accumulated_resid(1)[-1], cache["resid_pre", 1])
    assert len(run_with_cache(model, ids, names_filter=lambda name: name.endswith("resid_pre"))[1]) == 2
    first = run_with_cache(model, ids, names_filter=lambda name: name.startswith("blocks.0."))[1]
    with pytest.raises(SiteError, match=r"'blocks.1.hook_resid_post' is not in the cache"):
        first["resid_post", -1]
    one = run_with_cache(model, ids[:1], names_filter="hook_embed", remove_batch_dim=True)[1]
    assert one["hook_embed"].shape == (7, 32)
    assert ("resid_pre", 1) in cache
    assert cache.get("hook_nothing") is None
    assert "hook_nothing" not in cache
    assert ("resid_pre", 7) not in cache
    for wrong in (("resid_pre", 7), ("resid_pre", None), 3):
        with pytest.raises(SiteError, match="layer 7: there are 2 blocks|names no activation"):
            cache[wrong]
    with pytest.raises(SiteError, match="layer 5: there are 2 blocks"):
        cache.accumulated_resid(5)
    with pytest.raises(PlanError, match="remove_batch_dim=True is for a batch of one"):
        run_with_cache(model, ids, remove_batch_dim=True)
    with pytest.raises(
        SiteError, match=r"'blocks.0.hook_resid_pst' is not in the cache; nearest: blocks.0.hook_resid_post"
    ):
        cache["blocks.0.hook_resid_pst"]


def test_transformer_lens_hooks_change_heads():
    model, ids = llama(), tokens()
    seen = []

    def without_head(z, hook):
        seen.append((hook.name, hook.layer(), tuple(z.shape)))
        z[:, :, 2] = 0  # of a copy
        return z

    changed = run_with_hooks(model, ids, fwd_hooks=[("blocks.1.attn.hook_z", without_head)]).logits
    assert seen == [("blocks.1.attn.hook_z", 1, (2, 7, 4, 8))]
    heads = gaff.edits.at(gaff.keep.heads(2, 4), gaff.edits.zero())
    with gaff.edit(model, {"model.layers.1.self_attn.o_proj:input": heads}):
        torch.testing.assert_close(changed, model(ids).logits)
    same = run_with_hooks(model, ids, fwd_hooks=[(lambda name: name.endswith("resid_post"), lambda value, hook: None)])
    assert torch.equal(same.logits, model(ids).logits)
    assert torch.equal(run_with_hooks(model, ids).logits, model(ids).logits)
    with pytest.raises(
        SiteError, match="no hook 'blocks.9.hook_mlp_out' in this model; nearest: blocks.1.hook_mlp_out"
    ):
        run_with_hooks(model, ids, fwd_hooks=[("blocks.9.hook_mlp_out", without_head)])
    with pytest.raises(PlanError, match=r"hook_z: the function returned shape \[2, 4, 7, 8\]: expected \[2, 7, 4, 8\]"):
        run_with_hooks(model, ids, fwd_hooks=[("blocks.1.attn.hook_z", lambda z, hook: z.transpose(1, 2))])
    with pytest.raises(PlanError, match="Linear has no"):
        run_with_cache(nn.Linear(2, 2), torch.ones(1, 2))


@pytest.mark.parametrize("run", [run_with_cache, run_with_hooks])
def test_a_text_has_no_tokens_here(run):
    with pytest.raises(PlanError, match="a text was given: expected tokens"):
        run(llama(), "some words")


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ({"bwd_hooks": []}, "bwd_hooks= of TransformerLens is not done here"),
        ({"incl_bwd": True}, "is not done here"),
        ({"pos_slice": -1}, "is not done here"),
        ({"stop_at_layer": 1}, "gaff.take"),
        ({"fwd_hook": []}, "expected fwd_hooks="),
        ({"name_filter": "hook_embed"}, "expected names_filter="),
    ],
)
@pytest.mark.parametrize("run", [run_with_cache, run_with_hooks])
def test_options_that_the_model_would_swallow_are_refused(run, option, words):
    with pytest.raises(PlanError, match=words):
        run(llama(), tokens(), **option)


def test_transformer_lens_hooks_have_positions_where_the_model_has_them_as_rows():
    config = transformers.OPTConfig(vocab_size=99, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
                                    ffn_dim=48, word_embed_proj_dim=32, max_position_embeddings=64)  # fmt: skip
    model = transformers.OPTForCausalLM(config).eval()
    ids = torch.randint(3, 90, (2, 7))

    def without_last(value, hook):
        assert value.shape == (2, 7, 32)
        value[:, -1] = 0
        return value

    with torch.no_grad():
        changed = run_with_hooks(model, ids, fwd_hooks=[("blocks.1.hook_mlp_out", without_last)]).logits
        differs = (changed - model(ids).logits).abs().amax((0, 2)) > 1e-6
    assert differs.tolist() == [False] * 6 + [True]
    for which in ("blocks.1.mlp.hook_post", lambda hook: "mlp" in hook):
        assert run_with_cache(model, ids, names_filter=which)[1]["post", 1].shape == (2, 7, 48)
        alone = run_with_cache(model, ids[:1], names_filter=which, remove_batch_dim=True)[1]
        assert alone["post", 1].shape == (7, 48)


def test_transformer_lens_more_ways_to_name():
    model, ids = llama(), tokens()
    cache = run_with_cache(model, ids, use_cache=False)[1]
    assert torch.equal(cache["embed"], cache["hook_embed"])
    assert torch.equal(cache["normalized", 0, "ln1"], cache["blocks.0.ln1.hook_normalized"])
    assert torch.equal(cache["pre", 0, "mlp"], cache["pre", 0])
    with pytest.raises(SiteError, match="not in the cache"):
        cache["pre", 0, "attn"]
    with pytest.raises(SiteError, match="accepts none of the"):
        run_with_hooks(model, ids, fwd_hooks=[(lambda name: False, lambda value, hook: value)])
    with pytest.raises(PlanError, match="expected a tensor, or None"):
        run_with_hooks(model, ids, fwd_hooks=[("hook_embed", lambda value, hook: 3)])


def test_baukit_arguments_by_place_and_what_stop_hands_out():
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.randn(2, 4)
    with TraceDict(model, ["0"], True, True) as ret:
        model(x)
    assert torch.equal(ret["0"].input, x)
    with Trace(model) as ret:
        y = model(x)
    assert torch.equal(ret.output, y)
    with TraceDict(model, ["0", "1"], edit_output=lambda out, name: out * 0 if name == "1" else out):
        assert not model(x).any()
    with Trace(model, "0", stop=True, detach=True) as ret:
        model(x)
    assert not ret.output.requires_grad
    with Trace(model, "0", stop=True, retain_output=False) as ret:
        model(x)
    with pytest.raises(PlanError, match="not kept"):
        _ = ret.output


def test_torchvision_keywords_that_are_not_known_are_refused():
    with pytest.raises(PlanError, match="train_return_nodes= is not known"):
        create_feature_extractor(Net(), ["fc"], train_return_nodes=["fc"])
    with pytest.raises(PlanError, match="expected a list of names"):
        create_feature_extractor(Net(), "fc")
    create_feature_extractor(Net(), ["fc"], tracer_kwargs={}, suppress_diff_warning=True)


def test_a_spot_for_captum_is_the_model_with_a_module_at_an_address():
    model, x = net()
    spot = at(model, "layer1.0/add#0")
    seen = []
    handle = spot.layer.register_forward_hook(lambda module, args, output: seen.append(output))
    assert torch.equal(spot(x), model(x))
    handle.remove()
    first = model.layer1[0]
    assert torch.equal(seen[0], first.relu(first.conv(x)) + x)
    with pytest.raises(SiteError, match="no module 'layer9'"):
        at(model, "layer9")
    for wrong in ("*", "fc.weight:param", "fc:grad_output"):
        with pytest.raises(PlanError, match="is no single value: expected one exact address"):
            at(model, wrong)


def test_names_of_torchvision_that_may_mean_another_node_are_refused():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.relu, self.tanh = nn.ReLU(), nn.Tanh()

        def forward(self, x):
            y = x.clone().add_(1.0)
            return self.tanh(self.relu(torch.relu(y + x) - 0.5))

    model, x = Mixed(), torch.randn(2, 3)
    for node, told in (("add", "they? ran|it ran /add_#0, /add#0"), ("relu", "is a module, and 'the model' calls a"),
                       ("relu_1", "is a module")):  # fmt: skip
        with pytest.raises(gaff.errors.SiteError, match=told):
            create_feature_extractor(model, [node])(x)
    kept = create_feature_extractor(model, ["/add#0", "relu:output", "tanh"])(x)
    assert torch.equal(kept["/add#0"], x + 1 + x)
    assert torch.equal(kept["tanh"], kept["relu:output"].tanh())


def test_a_layer_of_baukits_trace_that_was_not_called_is_told_also_where_it_stops():
    model, x = Net(), torch.randn(2, 3, 4, 4)
    model.spare = nn.Linear(3, 3)
    with pytest.raises(gaff.NeverFiredError, match="'spare' never fired"), TraceDict(model, ["spare", "fc"], stop=True):
        model(x)


def test_what_baukit_does_otherwise_is_told():
    model, x = nn.Sequential(nn.Linear(3, 3), nn.ReLU()), torch.randn(2, 3)
    with pytest.raises(gaff.PlanError, match="nothing is kept outside of the block: expected with Trace"):
        Trace(model, "0").output
    with pytest.raises(gaff.PlanError, match="detach=.* is no truth value"):
        TraceDict(model, ["0", "1"], detach={"0": True})
    with pytest.raises(gaff.PlanError, match="edit_output=.* is no function"):
        TraceDict(model, ["0", "1"], edit_output={"0": torch.neg})
    with pytest.raises(gaff.PlanError, match="asks for inputs=, which is not told here"):
        Trace(model, "0", edit_output=lambda output, inputs: output).__enter__()

    def in_place(layer, output):
        assert layer == "0"
        output[:, 0] = 0
        return output

    with Trace(model, "0", edit_output=in_place) as ret:
        changed = model(x)
    assert not changed[:, 0].any()
    assert torch.equal(ret.output[:, 1:], model[0](x)[:, 1:])


def test_the_first_run_with_hooks_runs_on_what_the_caller_gives_once():
    model, ids = llama(), tokens()
    kept = transformers.DynamicCache(config=model.config)
    model(ids, past_key_values=kept)
    with gaff.capture(model, ":output[logits]") as got:
        run_with_cache(model, ids[:, :1], past_key_values=kept)
    assert kept.get_seq_length() == ids.shape[1] + 1
    assert len(got.all(":output[logits]")) == 1
    fresh = llama()
    kept = transformers.DynamicCache(config=fresh.config)
    fresh(ids, past_key_values=kept)
    names = run_with_cache(fresh, ids[:, :1], past_key_values=kept)[1]  # identities are asked beside a cache, too
    assert kept.get_seq_length() == ids.shape[1] + 1
    assert {"blocks.0.attn.hook_pattern", "blocks.1.hook_resid_mid"} <= set(names)


def test_functions_at_one_place_act_in_the_order_of_the_model_and_get_the_hook_by_its_name():
    model, ids = llama(), tokens()

    def double(value, *, hook):
        return value * 2 if hook.name == "blocks.1.hook_resid_pre" else value

    def add(value, hook):
        return value + 1

    ways = [("blocks.1.hook_resid_pre", double), ("blocks.0.hook_resid_post", add)]
    one, other = (run_with_hooks(model, ids, fwd_hooks=order).logits for order in (ways, ways[::-1]))
    assert torch.equal(one, other)
    with gaff.edit(model, {"model.layers.1:input": lambda value: (value + 1) * 2}):
        assert torch.equal(model(ids).logits, one)


class Wrapped(nn.Module):
    """A model of one's own around another: it has no config."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, ids):
        return self.inner(ids)


def test_heads_are_those_of_the_attention_and_not_of_a_config():
    """A wrapper has none, and that of an encoder and decoder tells the heads of the encoder."""
    ids, model = tokens(), llama()
    _, bare = run_with_cache(model, ids, names_filter="blocks.1.attn.hook_z")
    _, cache = run_with_cache(Wrapped(model), ids, names_filter="blocks.1.attn.hook_z")
    assert cache["z", 1].shape == bare["z", 1].shape == (*ids.shape, 4, 8)
    config = transformers.BartConfig(
        vocab_size=99, d_model=32, decoder_layers=2, encoder_attention_heads=2, decoder_attention_heads=4,
        decoder_ffn_dim=37, max_position_embeddings=40,
    )  # fmt: skip
    bart = transformers.BartForCausalLM(config).eval()
    _, cache = run_with_cache(bart, ids, names_filter=["blocks.1.attn.hook_z", "blocks.1.attn.hook_k"])
    assert cache["z", 1].shape == cache["k", 1].shape == (*ids.shape, 4, 8)


def test_heads_that_nothing_tells_are_not_taken_for_features():
    model = Wrapped(llama())
    for module in model.inner.model.layers.modules():
        for name in ("head_dim", "config"):
            vars(module).pop(name, None)
    with pytest.raises(PlanError, match=r"attn.q.1: nothing in .*self_attn tells how many heads share the 32 features"):
        _by_head(model, "attn.q.1", torch.ones(1, 3, 32))


def test_a_spot_for_captum_takes_a_standard_name_of_fused_attention():
    model, ids = llama(), tokens()
    spot = at(model, "names:attn.pattern.1")
    with torch.no_grad(), gaff.capture(model, "names:attn.pattern.1") as got:
        expected = model(ids).logits
    seen = []
    with torch.no_grad(), spot.layer.register_forward_hook(lambda module, given, output: seen.append(output)):
        torch.testing.assert_close(spot(ids).logits, expected)
    torch.testing.assert_close(seen[0], got["names:attn.pattern.1"])


def test_heads_of_keys_are_as_wide_as_those_of_queries():
    """Where nothing known tells how many there are, such as ``num_groups``."""
    model = Wrapped(llama())
    for module in model.inner.model.layers.modules():
        for name in ("head_dim", "config"):
            vars(module).pop(name, None)
    for block in model.inner.model.layers:
        block.self_attn.num_heads = 4
    width = model.inner.model.layers[1].self_attn.k_proj.weight.shape[0]
    assert width == 16
    assert _by_head(model, "attn.q.1", torch.ones(1, 3, 32)).shape == (1, 3, 4, 8)
    assert _by_head(model, "attn.k.1", torch.ones(1, 3, width)).shape == (1, 3, 2, 8)


def test_a_layer_for_captum_may_be_a_module_and_has_the_mode_of_the_model():
    from gaff.integrations.captum import at

    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU()).eval()
    spot = at(model, model[0])
    assert spot.address == "0"
    assert not spot.training
    for wrong in (nn.Linear(2, 2), ["0", "1"]):
        with pytest.raises(
            PlanError, match="was given: expected one address such as 'layer4.1', or a module of the model"
        ):
            at(model, wrong)


class Repeated(nn.Module):
    """Calls what it holds in another order than that of its layers, and the block at the end twice."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.block = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    def forward(self, x):
        for layer in reversed(self.layers):
            x = layer(x)
        return self.block(self.block(x))


def test_a_node_of_a_block_is_its_last_call_as_it_is_there():
    model, x = Repeated(), torch.randn(2, 4)
    found = create_feature_extractor(model, ["layers", "block", "block.0"])(x)
    inner = model.layers[0](model.layers[1](model.layers[2](x)))
    assert torch.equal(found["layers"], inner)
    assert torch.equal(found["block.0"], model.block[0](inner))
    assert torch.equal(found["block"], model.block(model.block(inner)))
    model.unused = nn.ModuleList([nn.Linear(4, 4)])
    with pytest.raises(SiteError, match="no node 'unused': nothing at 'unused' was called in the run"):
        create_feature_extractor(model, ["unused"])(x)
