"""What create_feature_extractor and features_only are used for, on their own models; bits, values, early stop."""

import copy
import json

import pytest
import torch
import torchvision
from timm import create_model
from torchvision.models.feature_extraction import create_feature_extractor

import gaff
from gaff.cli import main
from zoo import loss_of

pytestmark = pytest.mark.filterwarnings("ignore")

TORCHVISION = {
    "resnet18": ["layer1", "layer4", "avgpool"],
    "vgg11_bn": ["features.6", "features.28", "avgpool"],
    "densenet121": ["features.denseblock1", "features.norm5"],
    "mobilenet_v3_small": ["features.3", "avgpool"],
    "efficientnet_b0": ["features.2", "features.8"],
    "regnet_y_400mf": ["trunk_output.block1", "avgpool"],
    "convnext_tiny": ["features.1", "features.7"],
    "shufflenet_v2_x0_5": ["stage2", "conv5"],
    "vit_b_32": ["encoder.layers.encoder_layer_3", "encoder.ln"],
    "swin_t": ["features.1", "features.5"],
}
TIMM = ["resnet18", "efficientnet_lite0", "convnext_atto", "mobilenetv3_small_050", "regnetx_002", "hrnet_w18_small"]
TRAINED = ["resnet18", "densenet121", "mobilenet_v3_small", "shufflenet_v2_x0_5", "efficientnet_b0", "regnet_y_400mf"]


@pytest.mark.parametrize("name", TORCHVISION)
def test_features_equal_those_of_torchvisions_extractor(name):
    model = torchvision.models.get_model(name, weights=None).eval()
    x = torch.randn(1, 3, 224, 224)
    sites = TORCHVISION[name]
    with torch.no_grad():
        true = create_feature_extractor(model, sites)(x)
        found = gaff.take(model, *sites)(x)
    assert list(found) == sites
    assert all(torch.equal(found[site], true[site]) for site in sites)


def test_before_an_in_place_relu_the_two_differ_and_gaff_is_right():
    model = torchvision.models.vgg11_bn(weights=None).eval()
    x, true = torch.randn(1, 3, 64, 64), []
    with torch.no_grad():
        handle = model.features[5].register_forward_hook(lambda module, args, output: true.append(output.clone()))
        model(x)
        handle.remove()
        theirs = create_feature_extractor(model, ["features.5", "features.6"])(x)["features.5"]
        ours = gaff.take(model, "features.5", "features.6")(x)["features.5"]
    assert torch.equal(ours, true[0])
    assert not torch.equal(theirs, true[0])


@pytest.mark.parametrize("name", TIMM)
def test_features_equal_those_of_timm(name):
    extractor = create_model(name, features_only=True).eval()
    x = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        true = extractor(x)
        with gaff.capture(extractor, ":output", "**") as got:
            extractor(x)
    assert all(torch.equal(one, other) for one, other in zip(got[":output"], true, strict=True))
    assert sum(row.fired for row in got.receipt.rows) > 10


@pytest.mark.parametrize("name", TRAINED)
def test_a_training_step_has_the_bits_of_a_bare_one(name):
    model = torchvision.models.get_model(name, weights=None)
    x = torch.randn(2, 3, 64, 64)

    def step(model):
        torch.manual_seed(1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss_of(model(x)).backward()
        optimizer.step()
        return [*model.state_dict().values(), torch.rand(2)]

    bare = step(copy.deepcopy(model))
    everything = [gaff.maybe(f"**:{port}") for port in ("output", "input", "grad_output", "grad_input", "grad")]
    with gaff.capture(model, *everything):
        watched = step(model)
    assert all(torch.equal(one, other) for one, other in zip(bare, watched, strict=True))


def test_an_early_site_stops_early():
    model = torchvision.models.resnet18(weights=None).eval()
    model.layer3.register_forward_pre_hook(lambda module, args: pytest.fail("ran too far"))
    assert gaff.take(model, "layer1")(torch.randn(1, 3, 64, 64))["layer1"].shape == (1, 64, 16, 16)


def test_models_by_name_and_a_photo_with_the_models_own_preprocessing(capsys, tmp_path):
    from PIL import Image
    from sklearn.datasets import load_sample_image

    Image.fromarray(load_sample_image("china.jpg")).save(tmp_path / "china.png")
    for model, size in (("torchvision:resnet18", 224), ("timm:resnet18", 224)):
        assert main(["trace", model, str(tmp_path / "china.png"), "--json", "--no-flops"]) == 0
        printed = capsys.readouterr()
        assert json.loads(printed.out)["rows"][0]["input"] == f"1x3x{size}x{size}"
        assert f"gaff: {model} has random weights (of seed 0): for trained ones name a file" in printed.err
    assert main(["sites", "torchvision:resnet51"]) == 1
    assert "torchvision has no model 'resnet51': expected one of resnet" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["torchvision", "timm"])
def test_weights_of_a_file_behind_the_name(capsys, tmp_path, kind):
    import timm
    import torchvision
    from safetensors.torch import load_file, save_file

    torch.manual_seed(1)
    model = (torchvision.models.resnet18 if kind == "torchvision" else timm.create_model)(
        *(() if kind == "torchvision" else ("resnet18",))
    )
    torch.save(model.state_dict(), tmp_path / "w.pth")
    save_file(model.state_dict(), tmp_path / "w.safetensors")
    x = torch.randn(1, 3, 64, 64)
    save_file({"x": x}, tmp_path / "x.safetensors")
    expected = gaff.take(model.eval(), "layer4")(x)["layer4"]
    for weights in ("w.pth", "w.safetensors"):
        out = tmp_path / f"{weights}.out.safetensors"
        spec = f"{kind}:resnet18@{tmp_path / weights}"
        assert main(["take", spec, "layer4", "--input", str(tmp_path / "x.safetensors"), "--out", str(out)]) == 0
        assert "random weights" not in capsys.readouterr().err
        assert torch.equal(next(iter(load_file(out).values())), expected)
    assert main(["sites", f"{kind}:resnet34@{tmp_path / 'w.pth'}"]) == 1
    assert f"w.pth' does not fit {kind}:resnet34: Missing key(s)" in capsys.readouterr().err
    (tmp_path / "bad.pth").write_bytes(b"nothing")
    assert main(["sites", f"{kind}:resnet18@{tmp_path / 'bad.pth'}"]) == 1
    assert "cannot be read: expected a state dict" in capsys.readouterr().err
    assert main(["sites", f"{kind}:resnet18@nosuch.pth"]) == 1
    assert "'nosuch.pth' is no file: expected weights" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore:gaff. not bitwise")
@pytest.mark.parametrize("name", ["resnet18", "vit_b_16", "convnext_tiny", "swin_t"])
def test_ops_of_torchvision_nets(name):
    torch.manual_seed(0)
    model = torchvision.models.get_model(name).train()
    x = torch.randn(2, 3, 64, 64) if name != "vit_b_16" else torch.randn(1, 3, 224, 224)
    bare = copy.deepcopy(model)
    torch.manual_seed(1)
    plain = bare(x)
    plain.sum().backward()
    torch.manual_seed(1)
    with gaff.capture(model, gaff.maybe("/*"), "**/*", "**/*:grad_output") as got:
        watched = model(x)
        watched.sum().backward()
    assert torch.equal(plain, watched)
    for one, other in zip(bare.parameters(), model.parameters(), strict=True):
        assert one.grad is other.grad is None or torch.equal(one.grad, other.grad)
    assert sum(row.fired for row in got.receipt.rows) > 60
    if name == "resnet18":
        with gaff.capture(model, "layer1.0/add_", "layer1.0.bn2", "maxpool") as got:
            model(x)
        assert torch.equal(got["layer1.0/add_"], got["layer1.0.bn2"] + got["maxpool"])
    assert not gaff.find_nonfinite(lambda: model(x).sum().backward(), model=model)


@pytest.mark.parametrize("name", ["resnet18", "densenet121", "mobilenet_v3_small", "vit_b_32"])
def test_nodes_and_extractors_by_torchvisions_names(name):
    """Its own names, its own numbers, each node by itself: one import is all that changes."""
    from torchvision.models.feature_extraction import get_graph_node_names as true_names

    from gaff.integrations import torchvision as ours

    model, x = torchvision.models.get_model(name, weights=None).eval(), torch.randn(1, 3, 224, 224)
    nodes = [node for node in true_names(model)[1] if is_module_or_sum(model, node)]
    nodes = nodes[:: len(nodes) // 12]
    assert len(nodes) >= 12
    for node in nodes:
        with torch.no_grad():
            true = create_feature_extractor(model, [node])(x)[node]
            torch.testing.assert_close(ours.create_feature_extractor(model, [node])(x)[node], true)


def is_module_or_sum(model, node):
    """Arithmetic with sizes is nodes in a traced graph, and none of a run: ``floordiv``, ``getattr``."""
    base = node.rpartition(".")[2].rstrip("0123456789").rstrip("_")
    return node in dict(model.named_modules()) or base in ("add", "cat", "flatten")


@pytest.mark.parametrize(
    ("name", "size", "least"),
    [("resnet26", 64, 20), ("vit_tiny_patch16_224", 224, 60), ("deit_tiny_patch16_224", 224, 60)],
)
def test_standard_names_of_timm(name, size, least):
    model = create_model(name)
    for one in model.modules():
        if isinstance(one, torch.nn.BatchNorm2d):  # the last of each block begins as zero, and then adds nothing
            torch.nn.init.uniform_(one.weight, 0.5, 1.5)
    named = gaff.sites(model, torch.randn(1, 3, size, size), names=True)
    assert not named.refused
    assert sum(bool(row.identity) for row in named.rows) >= least


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_gradients_through_kinks_in_half_precision_are_equal_within_rounding(dtype):
    """Numbers that rounding moves across the kink of a ReLU open or shut it: that is rounding, and no parting."""
    torch.manual_seed(0)
    model, x, targets = torchvision.models.resnet18(num_classes=10).eval(), torch.randn(2, 3, 64, 64), [1, 2]

    def trace(model, x):
        return gaff.trace(
            model, x, backward=lambda made: torch.nn.functional.cross_entropy(made.float(), torch.tensor(targets))
        )

    def half(model):
        return copy.deepcopy(model).to(dtype)

    found = gaff.diff(trace(model, x), trace(half(model), x.to(dtype)))
    assert not found, found.verdict
    assert "215 places" in found.verdict
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.layer3[0].conv1.weight[::2] *= -1
    assert gaff.diff(trace(model, x), trace(half(other), x.to(dtype))).first.site.startswith("layer3.0")
