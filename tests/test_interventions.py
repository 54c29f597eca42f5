"""What people do with interventions: interchange, path patching, ablation, steering; on a small transformer."""

import pytest
import torch
from torch import nn

import gaff
from gaff import edits, keep

WIDTH, HEADS, LENGTH = 8, 4, 5


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.mix, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Identity(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = (one.unflatten(-1, (HEADS, -1)).transpose(1, 2) for one in self.qkv(x).chunk(3, -1))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(self.mix(mixed.transpose(1, 2).flatten(2)))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = Attention()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x):
        x = x + self.attn(x)
        return x + self.mlp(x)


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 11)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.fixture
def setting():
    torch.manual_seed(0)
    model = Transformer().eval()
    base, source = torch.randint(11, (2, LENGTH)), torch.randint(11, (2, LENGTH))
    with gaff.capture(model, "embed", "blocks.*", "blocks.*.attn.mix", "blocks.*.attn", "blocks.*.mlp") as got:
        model(source)
    return model, base, source, got


def test_interchange_of_the_whole_residual_stream_gives_the_output_of_the_source(setting):
    model, base, source, got = setting
    true = model(source)
    for layer in range(3):
        with gaff.edit(model, {f"blocks.{layer}": edits.patch(got)}):
            assert torch.equal(model(base), true)


def test_interchange_with_itself_changes_no_bit(setting):
    model, _, source, got = setting
    with gaff.edit(model, {"blocks.*.attn.mix": edits.patch(got), "blocks.*.mlp": edits.patch(got)}) as changed:
        assert torch.equal(model(source), model(source))
    assert all(row.changed == 0 for row in changed.receipt.rows)


def test_a_position_is_mapped_to_another_and_earlier_positions_stay(setting):
    model, base, _, got = setting
    with gaff.edit(model, {"blocks.0": edits.patch(got, positions={3: 1})}), gaff.capture(model, "blocks.0") as seen:
        found = model(base)
    assert torch.equal(seen["blocks.0"][:, 3], got["blocks.0"][:, 1])
    assert torch.equal(found[:, :3], model(base)[:, :3])  # attention is causal
    assert not torch.equal(found[:, 3:], model(base)[:, 3:])


def test_one_head_of_one_row_is_interchanged(setting):
    model, base, _, got = setting
    place = edits.at(keep.rows(1), edits.at(keep.heads(2, HEADS), edits.patch(got)))
    with gaff.edit(model, {"blocks.1.attn.mix": place}), gaff.capture(model, "blocks.1.attn.mix") as seen:
        model(base)
    with gaff.capture(model, "blocks.1.attn.mix") as plain:
        model(base)
    true = plain["blocks.1.attn.mix"].clone()
    true[1, :, 4:6] = got["blocks.1.attn.mix"][1, :, 4:6]
    assert torch.equal(seen["blocks.1.attn.mix"], true)


def test_two_sources_on_disjoint_rows_of_one_batch(setting):
    model, base, source, got = setting
    other = torch.randint(11, (2, LENGTH))
    with gaff.capture(model, "blocks.1") as second:
        model(other)
    rows = [edits.at(keep.rows(0), edits.patch(got)), edits.at(keep.rows(1), edits.patch(second))]
    with gaff.edit(model, {"blocks.1": rows}):
        found = model(base)
    torch.testing.assert_close(found, torch.stack([model(source)[0], model(other)[1]]))


def test_interchange_within_a_subspace_keeps_what_is_orthogonal_to_it(setting):
    model, base, _, got = setting
    basis = torch.linalg.qr(torch.randn(WIDTH, 3)).Q.T
    inside = edits.project(basis, keep=True).change(got["blocks.0"], edits.Event())
    changes = {"blocks.0": [edits.project(basis), edits.add(inside)]}
    with gaff.edit(model, changes), gaff.capture(model, "blocks.0") as seen:
        model(base)
    with gaff.capture(model, "blocks.0") as plain:
        model(base)
    found, was, new = seen["blocks.0"], plain["blocks.0"], got["blocks.0"]
    torch.testing.assert_close(found @ basis.T, new @ basis.T)
    rest = torch.eye(WIDTH) - basis.T @ basis
    torch.testing.assert_close(found @ rest, was @ rest, rtol=1e-4, atol=1e-5)


def test_path_patching_freezes_what_is_not_on_the_path(setting):
    """The effect of block 0's attention on block 2's attention alone: block 1, and both MLPs, as in the base run."""
    model, base, _, got = setting
    with gaff.capture(model, "blocks.*.mlp", "blocks.1.attn") as clean:
        true = model(base)
    frozen = {"blocks.0.mlp": edits.patch(clean), "blocks.1.*": edits.patch(clean), "blocks.2.mlp": edits.patch(clean)}
    with (
        gaff.edit(model, {"blocks.0.attn": edits.patch(got), **frozen}),
        gaff.capture(model, "blocks.2.attn:input") as seen,
    ):
        model(base)
    with gaff.capture(model, "blocks.2.attn:input", "blocks.0.attn") as plain:
        model(base)
    direct = plain["blocks.2.attn:input"] - plain["blocks.0.attn"] + got["blocks.0.attn"]
    torch.testing.assert_close(seen["blocks.2.attn:input"], direct)
    with gaff.edit(model, frozen):
        assert torch.equal(model(base), true)


def test_mean_ablation_over_a_reference_is_the_same_for_every_example(setting):
    model, base, _, got = setting
    with gaff.edit(model, {"blocks.*": edits.ablate("mean", got)}):
        found = model(base)
    assert torch.equal(found[0], found[1])
    with gaff.edit(model, {"blocks.2": edits.ablate("resample", got, seed=5)}):
        found = model(base)
    with gaff.edit(model, {"blocks.2": edits.ablate("resample", got, seed=5)}):
        assert torch.equal(model(base), found)


def test_a_skipped_block_is_a_model_without_it(setting):
    model, base, _, _ = setting
    with gaff.edit(model, {"blocks.1": edits.skip()}), gaff.capture(model, gaff.maybe("blocks.1.attn")) as seen:
        found = model(base)
    assert "blocks.1.attn" not in seen
    x = model.blocks[2](model.blocks[0](model.embed(base)))
    assert torch.equal(found, model.head(x))


def test_gradients_flow_through_what_was_patched_from_a_leaf(setting):
    model, base, _, _ = setting
    vector = torch.zeros(WIDTH, requires_grad=True)
    with gaff.edit(model, {"blocks.0": edits.add(vector)}):
        loss = model(base).pow(2).sum()
    loss.backward()
    x = model.blocks[0](model.embed(base)).detach().requires_grad_()
    model.head(model.blocks[2](model.blocks[1](x))).pow(2).sum().backward()
    torch.testing.assert_close(vector.grad, x.grad.sum((0, 1)))


def test_an_attribution_by_gradients_of_a_mask_over_heads(setting):
    """A scale per head, all ones, changes nothing; its gradient tells each head's effect to first order."""
    model, base, _, _ = setting
    gates = {f"blocks.{layer}.attn.mix": torch.ones(HEADS, requires_grad=True) for layer in range(3)}
    width = WIDTH // HEADS
    changes = {site: lambda t, gate=gate: t * gate.repeat_interleave(width) for site, gate in gates.items()}
    with gaff.edit(model, changes):
        y = model(base)
        y.logsumexp(-1).sum().backward()
    assert torch.equal(y, model(base))
    step = 1e-3
    place = edits.at(keep.heads(3, HEADS), edits.scale(1 - step))
    with gaff.edit(model, {"blocks.1.attn.mix": place}), torch.no_grad():
        moved = model(base).double().logsumexp(-1).sum() - y.detach().double().logsumexp(-1).sum()
    assert (-moved / step).item() == pytest.approx(gates["blocks.1.attn.mix"].grad[3].item(), rel=0.05, abs=1e-3)


class Writes(nn.Module):
    """A module that writes into what it is given, and a model that uses that tensor once more."""

    def forward(self, h):
        return h.mul_(2)


class Reuses(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.writes = nn.Linear(4, 4), Writes()

    def forward(self, x):
        h = self.linear(x) * 1.0
        return self.writes(h).sum() + h.pow(2).sum()


@pytest.mark.parametrize("edit", [edits.stop(), lambda t: t.detach(), lambda t: t.data, lambda t: t.view_as(t)])
def test_what_a_module_writes_into_an_edited_input_does_not_reach_the_old_one(edit):
    model, x = Reuses(), torch.randn(3, 4)
    h = model.linear(x)
    with gaff.edit(model, {"writes:input": edit}):
        loss = model(x)
    torch.testing.assert_close(loss, 2 * h.sum() + h.pow(2).sum())


def test_a_skip_that_another_forward_has_taken_the_place_of_is_an_error():
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(3, 4)
    with pytest.raises(gaff.ExactnessError, match="1: the edit cannot be made: another forward was put on the module"):
        with gaff.edit(model, {"1": edits.skip()}):
            assert torch.equal(model(x), model[0](x))
            model[1].forward = lambda t: t * 9
            model(x)
    del model[1].forward
    with gaff.edit(model, {"1": edits.skip()}):
        known = model[1].forward
        model[1].forward = lambda t: known(t)  # asks the one that was there: all is well
        assert torch.equal(model(x), model[0](x))
    del model[1].forward


def test_an_edit_that_makes_infinities_changes_infinitely_much():
    model = nn.Linear(4, 6)
    with gaff.edit(model, {":output": edits.fill(float("inf"))}) as editing:
        model(torch.randn(5, 4))
    [row] = editing.receipt.rows
    assert (row.changed, row.added_nonfinite, row.delta) == (30, 30, float("inf"))


def test_parameters_are_edited_where_hooks_on_what_is_saved_are_forbidden():
    model, x = nn.Linear(4, 3), torch.randn(5, 4)
    truth = torch.nn.functional.linear(x, model.weight * 0.5, model.bias)
    with torch.autograd.graph.disable_saved_tensors_hooks("none here"):
        with gaff.edit(model, {"weight:param": edits.scale(0.5)}):
            assert torch.equal(model(x), truth)


def test_of_two_skips_of_one_module_the_first_says_who_came_before_it():
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(3, 4)
    with pytest.raises(gaff.NeverFiredError, match="another session skips the module, too"):
        with gaff.edit(model, {"1": edits.skip()}), gaff.edit(model, {"1": edits.skip()}):
            assert torch.equal(model(x), model[0](x))
