"""What is read belongs to the reader: his writes reach neither what is kept nor the caller, nor theirs what he read."""

import pytest
import torch
from torch import nn

import gaff


class Calls(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args):
        return self.function(*args)


class Sub(torch.Tensor):
    pass


KINDS = {
    "sparse": lambda x: x.to_sparse(),
    "compressed": lambda x: x.to_sparse_csr(),
    "subclass": lambda x: (x + 0).as_subclass(Sub),
    "quantised": lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("options", [{}, {"clone": True}, {"dtype": "float64"}], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_writes_do_not_stay(kind, options, tmp_path):
    model = nn.Sequential(Calls(KINDS[kind]))
    with gaff.capture(model, "0", **options) as got:
        model(torch.eye(2))
    read = [got]
    if kind != "quantised":  # which no file can hold
        got.save(tmp_path / "kept.safetensors")
        read.append(gaff.load(tmp_path / "kept.safetensors", "capture"))
    for kept in read:
        first = kept["0"]
        if kind == "quantised" and first.is_quantized:
            first.copy_(torch.zeros(2, 2))
        else:
            first.mul_(5)
        again = kept["0"].dequantize() if kept["0"].is_quantized else kept["0"].to_dense()
        assert again.tolist() == torch.eye(2).tolist()


def test_what_is_expanded_and_belongs_to_the_caller():
    model = nn.Sequential(Calls(lambda x: x + 1))
    base, read = torch.zeros(3, 1), []
    with gaff.capture(model, "0:input") as got:
        for number in range(3):
            base.fill_(number)
            model(base.expand(3, 4))
            read.append(got.run(number)["0:input"])
    assert [one[0, 0].item() for one in read] == [0, 1, 2]
    read[2][:, 0] = 7  # torch refuses none of this
    assert base.flatten().tolist() == [2, 2, 2]


@pytest.mark.parametrize("site", ["0", "1:input", "0:input"])
def test_features_of_a_loader_that_fills_one_buffer(site):
    def batches():
        buffer = torch.empty(2, 3)
        for number in range(3):
            yield buffer.fill_(number)

    model = nn.Sequential(nn.Flatten(), nn.Linear(3, 2))
    got = gaff.take(model, site).over(batches(), progress=False)[site]
    assert got[:, 0].tolist() == [0, 0, 1, 1, 2, 2]


def test_a_feature_does_not_follow_its_batch_and_keeps_its_graph():
    model, x = nn.Sequential(nn.Identity()), torch.zeros(2)
    value = gaff.take(model, "0")(x)["0"]
    sparse = gaff.take(model, "0")(torch.eye(2).to_sparse())["0"]
    x.fill_(9)
    assert value.tolist() == [0, 0]
    assert sparse.to_dense().tolist() == [[1, 0], [0, 1]]
    x.requires_grad_()
    [gradient] = torch.autograd.grad(gaff.take(model, "0")(x)["0"].sum(), x)
    assert gradient.tolist() == [1, 1]


def test_infinities_of_one_small_float_in_another():
    model = nn.Sequential(Calls(lambda x: x.to(torch.float8_e5m2)))
    with gaff.capture(model, "0", dtype="float8_e4m3fn") as got:
        model(torch.tensor([torch.inf, -torch.inf, 1.0]))
    assert got["0"].float().isnan().tolist() == [True, True, False]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("make", "keep"),
    [
        (lambda x: torch.nested.nested_tensor([x, x[:1]], layout=torch.jagged), gaff.keep.positions(0)),
        (lambda x: torch.masked.masked_tensor(x + 0, x > 2), gaff.keep.norm()),
    ],
)
def test_parts_that_a_class_of_tensors_does_not_tell_are_refused(make, keep):
    model = nn.Sequential(Calls(make))
    with gaff.capture(model, gaff.maybe("0"), reduce=keep):
        with pytest.raises(gaff.PlanError, match="cannot be kept of this value"):
            model(torch.arange(6.0).view(2, 3))
