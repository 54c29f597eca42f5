"""Standard names: found by structure, held to identities, usable as addresses, compared with what the models themselves tell."""

import pytest
import torch
from torch import nn

import gaff
from gaff import edits
from gaff.address.grammar import parse, parse_site
from gaff.cli import main
from gaff.errors import PlanError, SiteError

transformers = pytest.importorskip("transformers")


def llama():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        intermediate_size=48, vocab_size=99,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def tokens():
    return torch.randint(3, 90, (2, 7), generator=torch.Generator().manual_seed(1))


def test_names_are_those_that_the_model_itself_tells():
    model, ids = llama(), tokens()
    model.set_attn_implementation("eager")
    with torch.no_grad():
        told = model.model(ids, output_hidden_states=True, output_attentions=True)
        logits = model(ids).logits
    model.set_attn_implementation("sdpa")
    with torch.no_grad(), gaff.capture(model, "names:resid_pre.*", "names:attn.pattern.*", "names:ln_final",
                                       "names:unembed") as got:  # fmt: skip
        model(ids)
    for one, other in zip(got.all("names:resid_pre.*"), told.hidden_states, strict=False):
        torch.testing.assert_close(one, other)
    for one, other in zip(got.all("names:attn.pattern.*"), told.attentions, strict=True):
        torch.testing.assert_close(one, other)
    torch.testing.assert_close(got["names:ln_final"], told.hidden_states[-1])
    torch.testing.assert_close(got["names:unembed"], logits)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_weights_that_are_computed_in_another_type_than_values(dtype):
    model = llama()
    model.set_attn_implementation("eager")  # whose softmax is in float32
    named = gaff.sites(model.to(dtype), tokens(), names=True)
    assert {"attn.z.0", "attn.pattern.0"} <= {*named}
    assert not named.refused


def test_the_list_tells_addresses_and_the_identities_that_hold():
    model = llama()
    plain = gaff.sites(model, names=True)
    assert plain["resid_pre.1"] == "model.layers.1:input"
    assert plain["resid_post.0"] == plain["resid_pre.1"]
    assert plain["resid_post.1"] == "model.norm:input"
    assert plain["attn.pattern.0"] == "model.layers.0.self_attn/scaled_dot_product_attention#0:weights"
    assert "found by structure alone" in str(plain)
    named = gaff.sites(model, tokens(), names=True)
    assert list(named) == list(plain)
    assert not named.refused
    rows = {row.name: row.identity for row in named.rows}
    assert rows["attn.out.1"] == rows["resid_mid.1"] == "resid_mid.1 = resid_pre.1 + attn.out.1"
    assert rows["attn.z.0"] == "attn.z.0 = attn.pattern.0 @ attn.v.0"
    assert rows["unembed"] == "unembed = what the model returns"
    assert sum(map(bool, rows.values())) == len(rows) - 1  # all but the embedding
    assert named.to_dict()["names"][0]["address"] == "model.embed_tokens"
    assert "<table" in named._repr_html_()


def test_looking_for_names_leaves_the_model_as_it_was():
    model = llama().train()
    state = {name: one.clone() for name, one in model.state_dict().items()}
    before = torch.get_rng_state()
    gaff.sites(model, tokens(), names=True)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(module.training for module in model.modules())
    assert all(torch.equal(one, state[name]) for name, one in model.state_dict().items())
    assert not any(module._forward_hooks for module in model.modules())


def test_a_name_whose_identity_fails_is_refused_from_then_on():
    model = llama()
    layer = model.model.layers[1]
    plain = layer.self_attn.forward

    def scaled(*args, **kwargs):
        output, weights = plain(*args, **kwargs)
        return output * 0.5, weights

    layer.self_attn.forward = scaled
    gaff.sites(model, names=True)
    gaff.capture(model, "names:attn.out.1")  # nobody has looked yet
    named = gaff.sites(model, tokens(), names=True)
    assert "attn.out.1" not in named
    assert named.refused["attn.out.1"].startswith(
        "resid_mid.1 = resid_pre.1 + attn.out.1 does not hold: they differ by"
    )
    assert "note: attn.out.1 is refused: " in str(named)
    assert named.refused["ln2.1"].startswith("it is a norm of resid_mid.1, and resid_mid.1 = ")
    with pytest.raises(
        PlanError,
        match=r"names:attn.out.1: attn.out.1 is refused in this model: resid_mid.1 = .* by structure it would be",
    ):
        gaff.capture(model, "names:attn.out.1")
    with pytest.raises(PlanError, match=r"names:attn.out.\*: attn.out.1 is refused"):
        gaff.capture(model, "names:attn.out.*")  # none is left out without a word
    gaff.sites(model, tokens()[:1], names=True)
    with pytest.raises(PlanError, match="attn.out.1 is refused"):
        gaff.capture(model, "names:attn.out.1")
    gaff.capture(llama(), "names:attn.out.1")  # of this model alone


def test_what_is_added_is_compared_with_its_own_size():
    # beside numbers of thousands, as large models have, what attention adds would be rounding of the sum
    model, ids = llama(), tokens()
    with torch.no_grad():
        model.model.embed_tokens.weight[ids[0, 0], 3] = 3000.0
    assert not gaff.sites(model, ids, names=True).refused
    model = llama()
    with torch.no_grad():
        model.model.embed_tokens.weight[ids[0, 0], 3] = 3000.0
    plain = model.model.layers[0].self_attn.forward
    model.model.layers[0].self_attn.forward = lambda *args, **kwargs: (plain(*args, **kwargs)[0] * 0.2, None)
    assert "attn.out.0" in gaff.sites(model, ids, names=True).refused


def test_a_batch_that_is_padded_on_the_left_refuses_no_pattern():
    """A query that may see nothing has a row of zeros."""
    model, x = llama(), tokens()
    mask = torch.ones_like(x)
    mask[1, :2] = 0
    told = gaff.sites(model, input_ids=x, attention_mask=mask, names=True)
    assert "rows of attn.pattern.0 sum to 1" in str(told)
    with gaff.capture(model, "names:attn.pattern.0") as got:
        model(x)
    assert torch.allclose(got["names:attn.pattern.0"].sum(-1), torch.ones(1))


class AcrossChannels(nn.Module):
    """Attention whose rows are channels, not positions."""

    fused_attn = False  # as timm says that it is written out

    def __init__(self):
        super().__init__()
        self.qkv, self.proj = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 4, 1)
        return self.proj(((q @ k.transpose(-2, -1)).softmax(-1) @ v).permute(0, 3, 1, 2).flatten(2))


class ChannelBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(8), AcrossChannels()
        self.norm2, self.mlp = nn.LayerNorm(8), nn.Sequential()
        self.mlp.fc1, self.mlp.act, self.mlp.fc2 = nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


def test_weights_between_channels_are_no_pattern():
    model, x = nn.Sequential(), torch.randn(2, 6, 8)
    model.blocks = nn.Sequential(ChannelBlock(), ChannelBlock())
    assert "attn.z.0" in str(gaff.sites(model, x, names=True))
    with pytest.raises(gaff.PlanError, match=r"attn.pattern.0 has a row for each position of attn.z.0 does not hold"):
        gaff.capture(model, "names:attn.pattern.0")


def test_what_adds_nothing_is_neither_held_nor_refused():
    model = llama()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
    named = gaff.sites(model, tokens(), names=True)
    assert "attn.out.0" in named
    assert {row.name: row.identity for row in named.rows}["resid_mid.1"] in (
        "",
        "resid_post.1 = resid_mid.1 + mlp.out.1",
    )


def test_blocks_that_are_one_module_have_no_names_by_number():
    model = llama()
    model.model.layers[1] = model.model.layers[0]
    with pytest.raises(PlanError, match="LlamaForCausalLM has no standard names"):
        gaff.sites(model, names=True)


def test_running_statistics_and_hooks_notice_one_run():
    model, calls = llama().to(torch.bfloat16).train(), []
    model.model.layers[0].input_layernorm.register_forward_hook(lambda *given: calls.append(1))
    named = gaff.sites(model, tokens(), names=True)
    assert len(calls) == 1
    assert not named.refused  # rounding of half precision is none
    with pytest.raises(PlanError, match="has no values"):
        gaff.sites(llama().to("meta"), tokens(), names=True)


def test_names_are_addresses_everywhere():
    model, ids = llama(), tokens()
    with gaff.capture(model, "names:mlp.out.0", "names:resid_pre.1:grad_output", "names:mlp.post.1") as got:
        model(ids).logits.sum().backward()
    assert got["names:mlp.out.0"].shape == (2, 7, 32)
    assert torch.equal(got["names:mlp.out.0"], got["model.layers.0.mlp.down_proj"])
    assert got["names:resid_pre.1:grad_output"].shape == (2, 7, 32)
    assert "names:resid_pre.1:grad_output" in got
    features = gaff.take(model, "names:resid_post.0")
    assert list(features(ids)) == ["names:resid_post.0"]
    several = gaff.take(model, "names:resid_post.*", "names:embed", "model.norm")(ids)
    assert list(several) == ["names:resid_post.0", "names:resid_post.1", "names:embed", "model.norm"]
    assert torch.equal(several["names:resid_post.0"], features(ids)["names:resid_post.0"])
    with gaff.edit(model, {"names:mlp.out.*": gaff.edits.zero()}) as changed:
        model(ids)
    assert [row.changed for row in changed.receipt.rows] == [2 * 7 * 32] * 2
    plan = gaff.Plan.of("names:resid_pre.0")
    assert str(gaff.Plan.from_json(plan.to_json())) == str(plan)
    assert gaff.sites(model, "names:resid_mid.0")[0].site == "model.layers.0.post_attention_layernorm:input"


def test_queries_that_come_out_of_one_matrix_with_others_are_told_as_that():
    model = transformers.GPT2Model(
        transformers.GPT2Config(n_layer=1, n_embd=32, n_head=4, vocab_size=50, n_positions=8)
    )
    parts = "its queries, keys and values are parts of one tensor, what h.0.attn.c_attn returns; nearest: attn.z.0"
    with pytest.raises(SiteError, match=f"names:attn.q.0: GPT2Model has no such name: {parts}"):
        gaff.capture(model, "names:attn.q.0")


def test_what_is_no_name_is_told():
    model = llama()
    with pytest.raises(SiteError, match=r"names:resid_pst.1: LlamaForCausalLM has no such name; nearest: resid_post.1"):
        gaff.capture(model, "names:resid_pst.1")
    with pytest.raises(
        PlanError, match="names:attn.out.0:param: a standard name is a value: expected it alone, or with"
    ):
        gaff.capture(model, "names:attn.out.0:param")
    with pytest.raises(PlanError, match="has no gradient"):
        gaff.capture(model, "names:attn.pattern.0:grad_output")
    with pytest.raises(SiteError, match="'names:mlp/relu': a standard name has no op and no class"):
        gaff.capture(model, "names:mlp/relu")
    with pytest.raises(PlanError, match="Linear has no standard names: no list of blocks"):
        gaff.sites(nn.Linear(2, 2), names=True)
    with pytest.raises(PlanError, match="names=True lists standard names alone"):
        gaff.sites(model, "model.*", names=True)
    with pytest.raises(SiteError, match="nearest: none: no blocks with attention and an MLP"):
        gaff.capture(nn.Linear(2, 2), "names:resid_pre.0")


def test_a_module_that_is_called_names_keeps_its_ports():
    model = nn.Module()
    model.names = nn.Linear(2, 2)
    assert str(gaff.sites(model, "names:input")[0].site) == "names:input"
    assert parse("names:output").path == "names"
    assert str(parse("names:attn.pattern.*")) == "names:attn.pattern.*"


def test_stacks_of_an_encoder_and_a_decoder_are_told_apart():
    torch.manual_seed(0)
    config = transformers.T5Config(d_model=32, d_kv=8, d_ff=37, num_layers=2, num_heads=4, vocab_size=99,
                                   decoder_start_token_id=0)  # fmt: skip
    model = transformers.T5ForConditionalGeneration(config)
    named = gaff.sites(model, names=True, input_ids=tokens(), decoder_input_ids=tokens())
    assert {"encoder.resid_pre.0", "decoder.resid_pre.0", "decoder.resid_cross.1", "decoder.cross.out.0"} <= set(named)
    assert "encoder.unembed" not in named
    assert set(named.refused) <= {"decoder.unembed"}  # scaled, where weights are tied


def test_on_the_command_line(capsys, tmp_path):
    from gaff.cli import main

    (tmp_path / "net.py").write_text("from test_names import llama, tokens\nmodel = llama()\nids = tokens()\n")
    assert main(["sites", f"{tmp_path}/net.py:model", "--names", "--input", f"{tmp_path}/net.py:ids"]) == 0
    assert "resid_mid.1 = resid_pre.1 + attn.out.1" in capsys.readouterr().out
    assert main(["sites", f"{tmp_path}/net.py:model", "--names", "--ops", "--input", f"{tmp_path}/net.py:ids"]) == 1


def test_an_edit_of_the_stream_between_attention_and_mlp_reaches_what_goes_around_the_mlp():
    model, ids = llama(), torch.randint(3, 90, (2, 7))
    with pytest.raises(PlanError, match=r"an edit there would miss what goes around that module: gaff\.sites"):
        gaff.edit(model, {"names:resid_mid.1": edits.zero()})
    gaff.sites(model, ids, names=True)
    other = torch.randint(3, 90, (2, 7))
    with torch.no_grad():
        clean = model(ids).logits
        with gaff.capture(model, "names:resid_mid.1") as got:
            model(ids)
        with gaff.edit(model, {"names:resid_mid.1": edits.patch(got)}) as patched:
            restored = model(other).logits
        assert not torch.equal(model(other).logits, clean)
    assert torch.equal(restored, clean)  # everything behind depends on the stream alone
    assert patched.receipt.rows[0].site == "model.layers.1/add#0"


def test_a_saved_capture_is_read_by_the_names_that_were_asked_for(tmp_path):
    model, ids = llama(), torch.randint(3, 90, (2, 7))
    with torch.no_grad(), gaff.capture(model, "names:mlp.out.0", "names:resid_post.*") as got:
        model(ids)
    got.save(tmp_path / "x.safetensors")
    known = gaff.load(tmp_path / "x.safetensors")
    assert torch.equal(known["names:mlp.out.0"], got["names:mlp.out.0"])
    assert dict(known).keys() == dict(got).keys()
    assert len(known.all("names:resid_post.*")) == 2
    with pytest.raises(SiteError, match="the standard names that were asked for: expected one of names:mlp.out.0"):
        known.all("names:resid_mid.*")
    with pytest.raises(SiteError, match="is a standard name, whose address is another in each model"):
        parse_site("names:mlp.out.0")
    with gaff.edit(model, {"names:mlp.out.1": edits.patch(known, source="names:mlp.out.0")}):
        with gaff.capture(model, "names:mlp.out.1") as told:
            model(ids)
    assert torch.equal(told["names:mlp.out.1"], got["names:mlp.out.0"])


def test_an_edit_by_name_in_a_run_that_makes_the_stream_otherwise_raises():
    model, ids = llama(), tokens()
    gaff.sites(model, ids, names=True)
    block = model.model.layers[1]
    with torch.no_grad(), gaff.edit(model, {"names:resid_mid.1": edits.zero()}) as changed:
        model(ids)
        with pytest.raises(ZeroDivisionError):  # a run that ends before the norm leaves nothing to the next one
            handle = block.self_attn.register_forward_hook(lambda *given: 1 / 0)
            try:
                model(ids)
            finally:
                handle.remove()
        model(ids)
    assert changed.receipt.rows[0].hits == 2
    plain = type(block).forward

    def forward(self, hidden_states, **given):
        return plain(self, hidden_states + 0, **given)

    block.forward = forward.__get__(block)
    with torch.no_grad(), gaff.edit(model, {"names:resid_mid.1": edits.zero()}):
        with pytest.raises(PlanError, match="is not what comes to model.layers.1.post_attention_layernorm:input"):
            model(ids)


def test_an_input_that_cannot_be_copied_is_refused():
    with pytest.raises(PlanError, match="which cannot be copied"):
        gaff.sites(llama(), tokens(), some=(one for one in ()), names=True)


def test_a_standard_name_without_its_prefix_is_found_out():
    with pytest.raises(SiteError, match="it is one of its standard names; address it as names:resid_post.0"):
        gaff.capture(llama(), "resid_post.0")


def test_names_that_a_pattern_has_found_are_those_of_the_file_too(tmp_path):
    model = llama()
    with gaff.capture(model, "names:resid_post.*") as got:
        model(tokens())
    got.save(tmp_path / "x.safetensors")
    again = gaff.load(tmp_path / "x.safetensors")
    assert list(again) == list(got)
    assert "names:resid_post.0" in got
    assert torch.equal(again["names:resid_post.0"], got["names:resid_post.0"])


def values_of(got):
    return {name: got[name].clone() for name in got}


def test_a_capture_is_read_by_what_names_and_patterns_meant_then():
    model = llama()
    with gaff.capture(model, "names:resid_post.*") as got, gaff.capture(model, "model.layers.*") as blocks:
        model(tokens())
    before, whole = values_of(got), blocks.stack("model.layers.*")
    last = model.model.layers[-1]
    model.model.layers = model.model.layers[:-1]
    after = values_of(got)
    assert list(after) == list(before)
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert got.stack("names:resid_post.*").shape[0] == len(before)
    assert torch.equal(blocks.stack("model.layers.*"), whole)
    model.model.layers.extend([last, last])  # one more than there were
    with pytest.raises(SiteError, match=r"names:resid_post\.\d was not captured by that name, and the model has other"):
        got[f"names:resid_post.{len(before)}"]


def test_a_patch_by_name_takes_what_the_name_meant_in_the_other_model():
    whole = llama()
    part = llama()
    part.load_state_dict(whole.state_dict())
    part.model.layers = part.model.layers[:-1]
    last = len(part.model.layers) - 1
    with gaff.capture(whole, "names:resid_post.*") as got:
        whole(tokens())
    name = f"names:resid_post.{last}"
    for source in (got, gaff.edits.patch(got).values):
        with gaff.edit(part, {name: edits.patch(source)}), gaff.capture(part, name) as told:
            part(tokens())
        assert torch.equal(told[name], got[name])
        assert not torch.equal(told[name], got[f"names:resid_post.{last + 1}"])


def test_a_patch_takes_from_a_standard_name_of_another_run_and_of_the_same():
    model = llama()
    x, other = tokens(), tokens().flip(1)
    with gaff.capture(model, "names:resid_post.0") as got:
        model(x)
    with gaff.capture(model, "names:resid_post.0") as same:
        model(other)
    for edit, expected in (
        (edits.patch(got, source="names:resid_post.0"), got),
        (edits.patch(source="names:resid_post.0"), same),
    ):
        with gaff.edit(model, {"names:resid_post.1": edit}), gaff.capture(model, "names:resid_post.1") as told:
            model(other)
        assert torch.equal(told["names:resid_post.1"], expected["names:resid_post.0"])
    with pytest.raises(SiteError, match=r"names:resid_pst\.0: .* has no such name; nearest: resid_p"):
        gaff.edit(model, {"names:resid_post.1": edits.patch(source="names:resid_pst.0")})
    with pytest.raises(SiteError, match=r"'names:resid_post\.\*' is a pattern: expected one exact site"):
        edits.patch(got, source="names:resid_post.*")


@pytest.mark.parametrize("asked", [
    ["names:mlp.out.*", "names:mlp.out.*:grad_output"],
    ["names:mlp.out.*:grad_output", "names:mlp.out.*"],
    ["names:mlp.out.0", "names:mlp.out.0:grad_output", "names:mlp.out.1", "names:mlp.out.1:grad_output"],
])  # fmt: skip
def test_a_value_and_its_gradient_by_one_name_are_told_apart(asked, tmp_path):
    model, ids = llama(), tokens()
    truth = {}
    for number, layer in enumerate(model.model.layers):
        layer.mlp.down_proj.register_forward_hook(lambda _, __, y, number=number: truth.update({number: y.clone()}))
        layer.mlp.down_proj.register_full_backward_hook(
            lambda _, __, g, number=number: truth.update({f"grad {number}": g[0].clone()})
        )
    with gaff.capture(model, *asked) as got:
        model(ids).logits.square().sum().backward()
    got.save(tmp_path / "x.safetensors")
    for told in (got, gaff.load(tmp_path / "x.safetensors")):
        for number in (0, 1):
            assert torch.equal(told[f"names:mlp.out.{number}"], truth[number])
            assert torch.equal(told[f"names:mlp.out.{number}:grad_output"], truth[f"grad {number}"])
        assert torch.equal(told.stack("names:mlp.out.*"), torch.stack([truth[0], truth[1]]))
        gradients = torch.stack([truth["grad 0"], truth["grad 1"]])
        assert torch.equal(told.stack("names:mlp.out.*:grad_output"), gradients)
    model.model.layers = model.model.layers[:1]  # names mean what they meant then, by then's ports
    assert torch.equal(got["names:mlp.out.1:grad_output"], truth["grad 1"])


def test_a_gradient_that_was_not_asked_for_is_not_the_value(tmp_path):
    model, ids = llama(), tokens()
    with gaff.capture(model, "names:mlp.out.*") as got:
        model(ids)
    got.save(tmp_path / "x.safetensors")
    for told in (got, gaff.load(tmp_path / "x.safetensors")):
        assert "names:mlp.out.1:grad_output" not in told
        with pytest.raises(SiteError, match=r"names:mlp\.out\.1:grad_output.*expected one of"):
            told["names:mlp.out.1:grad_output"]


def test_one_site_of_two_names_is_read_by_both(tmp_path):
    model, ids = llama(), tokens()
    states = model(ids, output_hidden_states=True).hidden_states
    for asked in (["names:resid_post.*", "names:resid_pre.*"], ["names:resid_*.*"], ["names:resid_pre.1", "names:**"]):
        with gaff.capture(model, *asked) as got:
            model(ids)
        got.save(tmp_path / "x.safetensors")
        for told in (got, gaff.load(tmp_path / "x.safetensors")):
            assert torch.equal(told.stack("names:resid_pre.*"), torch.stack(states[:2]))
            assert torch.equal(told["names:resid_post.0"], states[1])
            assert torch.equal(told["names:resid_pre.1"], states[1])
    with gaff.capture(model, "model.layers.0:input", "names:resid_pre.1") as got:
        model(ids)
    assert torch.equal(got.stack("names:resid_pre.*"), torch.stack(states[:2]))


def test_what_an_mlp_as_a_whole_returns_is_not_what_its_first_layer_does():
    """A block by hand whose MLP is called as another family calls its first layer."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.ln1, self.ln2 = nn.LayerNorm(8), nn.LayerNorm(8)
            self.attn = nn.ModuleDict({name: nn.Linear(8, 8) for name in ("q_proj", "k_proj", "v_proj", "o_proj")})
            self.ffn = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

        def forward(self, x):
            h = self.ln1(x)
            x = x + self.attn["o_proj"](self.attn["q_proj"](h) * self.attn["k_proj"](h) + self.attn["v_proj"](h))
            return x + self.ffn(self.ln2(x))

    names = gaff.sites(nn.Sequential(Block(), Block()), torch.randn(2, 3, 8), names=True)
    assert (names["mlp.pre.0"], names["mlp.out.0"]) == ("0.ffn.0", "0.ffn.2")


def test_an_mlp_with_a_router_beside_it_hands_out_one_tensor():
    config = transformers.GptOssConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8, vocab_size=99,
        intermediate_size=48, num_local_experts=4, num_experts_per_tok=2, layer_types=["full_attention"] * 2,
    )  # fmt: skip
    model = transformers.GptOssForCausalLM(config).eval()
    with gaff.capture(model, "names:mlp.out.*", "names:resid_mid.*", "names:resid_post.*") as got:
        model(tokens())
    for number in (0, 1):
        added = got[f"names:resid_mid.{number}"] + got[f"names:mlp.out.{number}"]
        torch.testing.assert_close(added, got[f"names:resid_post.{number}"])
    with gaff.edit(model, {"names:mlp.out.0": edits.zero()}) as changed:
        model(tokens())
    assert changed.receipt.rows[0].hits == 1


def test_cross_attention_in_blocks_that_normalise_what_they_have_added():
    torch.manual_seed(0)
    config = transformers.BartConfig(
        d_model=32, encoder_layers=1, decoder_layers=2, encoder_attention_heads=2, decoder_attention_heads=2,
        encoder_ffn_dim=48, decoder_ffn_dim=48, vocab_size=99,
    )  # fmt: skip
    model, ids = transformers.BartModel(config).eval(), tokens()
    names = gaff.sites(model, names=True, input_ids=ids, decoder_input_ids=ids.flip(1))
    held = {row.name: row.identity for row in names.rows}
    assert held["decoder.cross.out.1"] == "resid_mid.1 = norm(resid_cross.1 + cross.out.1)"
    assert held["decoder.resid_post.1"] == "resid_post.1 = norm(resid_mid.1 + mlp.out.1)"
    wanted = [f"names:decoder.{one}.1" for one in ("resid_cross", "cross.out", "resid_mid", "mlp.out", "resid_post")]
    with gaff.capture(model, *wanted) as got:
        model(input_ids=ids, decoder_input_ids=ids.flip(1))
    crossed, added, mid, out, post = (got[name] for name in wanted)
    layer = model.decoder.layers[1]
    torch.testing.assert_close(layer.encoder_attn_layer_norm(crossed + added), mid)
    torch.testing.assert_close(layer.final_layer_norm(mid + out), post)


class Mixing(nn.Module):
    """Attention written by hand, one head after the other."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(width, width // heads) for _ in range(heads))
        self.proj, self.dropout = nn.Linear(width, width), nn.Dropout(0.1)

    def forward(self, x):
        rows = [one(x) for one in self.heads]
        return self.dropout(self.proj(torch.cat([(one @ one.mT).softmax(-1) @ one for one in rows], -1)))


class Feed(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(width, 24), nn.ReLU(), nn.Linear(24, width), nn.Dropout(0.1))

    def forward(self, x):
        return self.net(x)


class Handmade(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.sa, self.ffwd = Mixing(width, 2), Feed(width)
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x):
        x = x + self.sa(self.ln1(x))
        return x + self.ffwd(self.ln2(x))


def test_blocks_written_by_hand_have_names():
    model, x = nn.Sequential(Handmade(), Handmade()), torch.randn(2, 5, 16)
    named = gaff.sites(model, x, names=True)
    assert named["mlp.pre.1"] == "1.ffwd.net.0"
    assert named["mlp.out.0"] == "0.ffwd.net.2"
    assert {row.name: row.identity for row in named.rows}["attn.out.1"] == "resid_mid.1 = resid_pre.1 + attn.out.1"
    assert set(named.refused) == {"attn.pattern.0", "attn.pattern.1"}  # of each head apart


@pytest.mark.filterwarnings("ignore:enable_nested_tensor", "ignore:.*fast path was not taken")
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
def test_the_transformers_of_torch_have_names(norm_first, batch_first):
    torch.manual_seed(0)
    kinds = {
        "d_model": 16,
        "nhead": 2,
        "dim_feedforward": 24,
        "norm_first": norm_first,
        "batch_first": batch_first,
        "dropout": 0.0,
    }
    model = nn.Transformer(num_encoder_layers=2, num_decoder_layers=2, **kinds)
    x, y = torch.randn(2, 2, 5, 16)
    named = gaff.sites(model, x, y, names=True)
    assert not named.refused
    held = {row.name: row.identity for row in named.rows}
    assert held["decoder.cross.out.0"].endswith("resid_cross.0 + cross.out.0" + ")" * (not norm_first))
    assert held["encoder.mlp.out.1"].endswith("resid_mid.1 + mlp.out.1" + ")" * (not norm_first))
    wanted = [f"names:decoder.{one}.1" for one in ("resid_cross", "cross.out", "resid_mid")]
    with gaff.capture(model, *wanted, "decoder.layers.1.multihead_attn:output[0]") as got:
        model(x, y)
    crossed, added, mid = (got[name] for name in wanted)
    torch.testing.assert_close(added, got["decoder.layers.1.multihead_attn:output[0]"])
    torch.testing.assert_close(crossed + added if norm_first else model.decoder.layers[1].norm2(crossed + added), mid)


def test_the_command_takes_one_standard_name_into_a_file(tmp_path, capsys):
    script = tmp_path / "net.py"
    script.write_text(
        "import torch, transformers\n"
        "torch.manual_seed(0)\n"
        "config = transformers.LlamaConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4,\n"
        "                                  intermediate_size=48, vocab_size=99)\n"
        "model, ids = transformers.LlamaForCausalLM(config).eval(), torch.arange(7)[None]\n"
    )
    out = tmp_path / "f.safetensors"
    assert main(["take", f"{script}:model", "names:resid_post.0", "--input", f"{script}:ids", "--out", str(out)]) == 0
    assert "names:resid_post.0  1x7x32" in capsys.readouterr().out
    known = gaff.load(out)
    assert torch.equal(known["names:resid_post.0"], known["model.layers.1:input"])


def test_a_residual_that_is_added_in_place_is_edited_by_its_name():
    def forward(self, hidden_states, **given):
        x = hidden_states.clone()
        x += self.self_attn(hidden_states=self.input_layernorm(x), **given)[0]
        x += self.mlp(self.post_attention_layernorm(x))
        return x

    model, ids, extra = llama(), tokens(), torch.randn(32)
    for block in model.model.layers:
        block.forward = forward.__get__(block)
    gaff.sites(model, ids, names=True)
    handle = model.model.layers[1].self_attn.o_proj.register_forward_hook(lambda module, args, out: out + extra)
    with torch.no_grad():
        want = model(ids).logits
    handle.remove()
    with torch.no_grad(), gaff.edit(model, {"names:resid_mid.1": edits.add(extra)}) as changed:
        got = model(ids).logits
    torch.testing.assert_close(got, want)
    assert changed.receipt.rows[0].hits == 1
    assert not torch.allclose(got, model(ids).logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_is_near_in_half_precision_only_is_refused(dtype):
    """Logits that are capped behind the unembedding, and layers whose output is scaled before it is added."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "intermediate_size": 64}  # fmt: skip
    capped = transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**sizes, head_dim=8)).eval().to(dtype)
    refused = gaff.sites(capped, tokens(), names=True).refused
    assert "unembed = what the model returns does not hold" in refused["unembed"]
    assert len(refused) == 1
    scaled = transformers.GraniteConfig(**sizes, residual_multiplier=1.05, initializer_range=0.3)
    model = transformers.GraniteForCausalLM(scaled).eval().to(dtype)
    refused = gaff.sites(model, tokens(), names=True).refused
    assert {"mlp.out.0", "resid_post.1", "attn.out.1"} <= set(refused), refused
    plain = transformers.GraniteConfig(**sizes, residual_multiplier=1.0, initializer_range=0.3)
    assert not gaff.sites(transformers.GraniteForCausalLM(plain).eval().to(dtype), tokens(), names=True).refused


def test_a_name_that_did_not_pass_in_one_run_is_there_when_it_passes_in_another():
    config = transformers.T5Config(d_model=32, d_kv=8, d_ff=37, num_layers=2, num_heads=4, vocab_size=99,
                                   decoder_start_token_id=0)  # fmt: skip
    model, ids = transformers.T5ForConditionalGeneration(config).eval(), tokens()
    whole = gaff.sites(model, names=True, input_ids=ids, decoder_input_ids=ids)
    encoded = model.encoder(ids)
    less = gaff.sites(model, names=True, encoder_outputs=encoded, decoder_input_ids=ids)
    assert "it did not pass in the latest run" in less.refused["encoder.resid_pre.0"]
    with pytest.raises(PlanError, match="did not pass in the latest run that gaff.sites looked at"):
        gaff.capture(model, "names:encoder.resid_pre.0")
    assert list(gaff.sites(model, names=True, input_ids=ids, decoder_input_ids=ids)) == list(whole)
    with gaff.capture(model, "names:encoder.resid_pre.0") as got:
        model(input_ids=ids, decoder_input_ids=ids)
    assert got["names:encoder.resid_pre.0"].shape == (*ids.shape, 32)


def test_a_reference_of_runs_of_several_lengths_says_so():
    model = llama()
    with torch.no_grad(), gaff.capture(model, "names:mlp.out.0") as got:
        model(torch.ones(1, 7, dtype=torch.long))
        model(torch.ones(1, 5, dtype=torch.long))
    with (
        pytest.raises(gaff.GaffError, match="runs of the reference have examples of the shapes"),
        gaff.edit(model, {"names:mlp.out.0": gaff.edits.ablate("mean", got)}),
    ):
        model(torch.ones(1, 7, dtype=torch.long))


_SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 37,
          "vocab_size": 99, "max_position_embeddings": 64}  # fmt: skip


def test_weights_over_landmarks_are_no_pattern():
    config = transformers.NystromformerConfig(**_SMALL, segment_means_seq_len=8, num_landmarks=4)
    model = transformers.NystromformerModel(config).eval()
    named = gaff.sites(model, torch.arange(8)[None], names=True)
    assert "attn.v.0" in named
    assert "attn.pattern.0 has a column for each position of attn.v.0" in named.refused["attn.pattern.0"]


def test_a_layer_that_asserts_what_its_model_does_around_it_fails_its_identity_alone():
    model = transformers.IBertModel(transformers.IBertConfig(**_SMALL, pad_token_id=0, quant_mode=True)).eval()
    named = gaff.sites(model, torch.arange(1, 8)[None], names=True)
    assert "AssertionError" in " ".join(named.refused.values())


def test_stacks_of_which_one_path_is_shorter_are_told_apart():
    config = transformers.FunnelConfig(block_sizes=[1, 1], num_decoder_layers=1, d_model=32, n_head=4, d_head=8,
                                       d_inner=37, vocab_size=99)  # fmt: skip
    model = transformers.FunnelModel(config).eval()
    names = list(gaff.sites(model, names=True))
    assert names
    assert not [name for name in names if name.startswith(".")]
    with gaff.capture(model, f"names:{names[0]}") as got:
        model(torch.arange(8)[None])
    assert got.receipt.rows[0].fired


def test_an_output_whose_keys_were_set_in_another_order_than_its_fields_is_captured_and_edited():
    class Head(nn.Module):
        def forward(self, x):
            made = transformers.modeling_outputs.CausalLMOutput(logits=x * 2, hidden_states=(x,))
            made["loss"] = made["logits"].square().mean()
            made.attentions = (x + 1,)
            return made

    model, x = nn.ModuleDict({"head": Head()}), torch.ones(2, 3)
    model.forward = lambda x: (lambda out: (list(out), out["logits"], out.loss))(model["head"](x))
    with gaff.capture(model, "head") as got:
        keys, _, loss = model(x)
    assert keys == list(got["head"]) == ["logits", "hidden_states", "loss", "attentions"]
    assert torch.equal(got["head"].logits, x * 2)
    assert torch.equal(got["head"].loss, loss)
    with gaff.edit(model, {"head:output[logits]": gaff.edits.zero()}):
        edited, logits, loss = model(x)
    assert edited == keys
    assert not logits.any()
    assert loss == 4


def test_an_edit_of_what_a_block_hands_on_acts_where_it_is_made_once_that_is_known():
    model, x = llama(), tokens()
    edit = {"names:resid_post.0": gaff.edits.scale(2.0)}
    with torch.no_grad():
        bare = model(x, output_hidden_states=True)
        with gaff.edit(model, edit) as before:
            first = model(x, output_hidden_states=True)
        gaff.sites(model, x, names=True)
        with gaff.edit(model, edit) as after:
            second = model(x, output_hidden_states=True)
    assert before.receipt.rows[0].site == "model.layers.1:input"
    assert after.receipt.rows[0].site == "model.layers.0"
    assert torch.equal(first.logits, second.logits)
    assert torch.equal(first.hidden_states[1], bare.hidden_states[1])
    assert torch.equal(second.hidden_states[1], bare.hidden_states[1] * 2)
