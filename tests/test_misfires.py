"""What merely looks like a fault is not told as one, and what is told names what is there."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import gaff
from tests.faults import Chain


def rules(record):
    return {one.rule: one for one in record.findings}


class Sampling(nn.Module):
    """A model that draws random numbers by design, as a VAE does."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(8, 8)

    def forward(self, x):
        return self.body(x) + torch.randn_like(x)


class Careless(nn.Module):
    """Dropout that ignores the mode."""

    def __init__(self, drop):
        super().__init__()
        self.body, self.drop = nn.Linear(8, 8), drop

    def forward(self, x):
        return self.drop(self.body(x))


class Forgotten(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.drop = nn.Linear(8, 8), nn.Dropout(0.2)

    def eval(self):
        super().eval()
        self.drop.train()
        return self

    def forward(self, x):
        return self.drop(self.body(x))


class Attending(nn.Module):
    def forward(self, x):
        x = x[:, None, None].expand(-1, 1, 4, -1)
        return F.scaled_dot_product_attention(x, x, x, None, 0.1)[:, 0, 0]


def evaluated(model, tmp_path):
    optimizer = torch.optim.SGD([*model.parameters()], 1e-2)
    with gaff.watch(model, out=tmp_path / "run", every=5):
        for step in range(60):
            model.train()
            model(torch.randn(16, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step % 20 == 19:
                model.eval()
                with torch.no_grad():
                    model(torch.randn(16, 8))
    return gaff.load(tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "is_told"),
    [
        (Sampling(), False),
        (Careless(lambda x: F.dropout(x, 0.2)), True),
        (Careless(lambda x: F.dropout(x, 0.2, training=False)), False),
        (Careless(lambda x: F.dropout(x, p=0.0)), False),
        (Careless(lambda x: F.alpha_dropout(x, 0.2)), False),
        (Forgotten(), True),
        (Careless(Attending()), True),
        (nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2)), False),
    ],
)
def test_active_dropout_in_eval_mode_is_told_and_sampling_is_not(model, is_told, tmp_path):
    dropout = F.dropout
    record = evaluated(model, tmp_path)
    assert ("random_in_eval" in rules(record)) == is_told
    assert F.dropout is dropout


@pytest.mark.slow
def test_an_agents_loss_that_rises_with_its_returns_is_no_divergence(tmp_path):
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with gaff.watch(model, out=tmp_path / "run", every=1):
        for step in range(60):
            outputs = [model(torch.randn(1, 4)) for _ in range(20)]
            loss = torch.stack([one.square().mean() for one in outputs]).sum() * (1 + step)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    record = gaff.load(tmp_path / "run")
    assert record.verdict.state == "healthy"
    assert "diverging" not in rules(record)


def test_a_model_that_is_run_once_for_each_loss_still_diverges(tmp_path):
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with gaff.watch(model, out=tmp_path / "run", every=1):
        for step in range(60):
            (model(torch.randn(16, 4)) - step).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert "diverging" in rules(gaff.load(tmp_path / "run"))


class Masked(nn.Module):
    """A net without any rectifier, of whose units most do not reach the loss."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 64), nn.Linear(64, 1)
        self.act = nn.Tanh()

    def forward(self, x):
        hidden = self.act(self.first(x))
        return self.second(torch.cat([hidden[:, :8], hidden[:, 8:].detach()], 1))


def test_a_sparse_gradient_blames_no_rectifier_where_there_is_none(tmp_path):
    torch.manual_seed(0)
    model = Masked()
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    with gaff.watch(model, out=tmp_path / "run", every=1):
        for _ in range(30):
            (5 + 1e-6 * model(torch.randn(16, 8)).mean()).backward()  # a loss that does not fall
            optimizer.step()
            optimizer.zero_grad()
    found = rules(gaff.load(tmp_path / "run"))["sparse_gradient"]
    assert found.message == "88% of first.weight:grad is exactly zero"
    assert "a loss that depends on few of its outputs" in found.cause


def trained(
    tmp_path, steps=120, loss=F.cross_entropy, evaluated=lambda scores, labels: F.cross_entropy(scores, labels)
):
    torch.manual_seed(0)
    x, y = torch.randn(64, 8), torch.randint(0, 4, (64,))
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.2)
    told = []
    with gaff.watch(model, out=tmp_path / "run", every=5):
        for step in range(steps):
            optimizer.zero_grad()
            loss(model(x), y).backward()
            optimizer.step()
            if step % 20 == 19:
                model.eval()
                with torch.no_grad():
                    out = model(torch.randn(64, 8))
                    told.append(evaluated(out, torch.randint(0, 4, (64,))).item())
                model.train()
    return gaff.load(tmp_path / "run"), told


def test_losses_of_evaluations_are_kept_also_of_the_last(tmp_path):
    names = [getattr(F, name) for name in ("cross_entropy", "mse_loss", "dropout")]
    record, told = trained(tmp_path)
    kept = [one["losses"]["cross_entropy"] for _, one in record.part(0).events if one["kind"] == "evaluated"]
    assert kept == pytest.approx(told)
    assert len(kept) == 6
    assert [getattr(F, name) for name in ("cross_entropy", "mse_loss", "dropout")] == names


def test_what_is_learned_by_heart_is_suspicious(tmp_path):
    verdict = trained(tmp_path)[0].verdict
    assert (verdict.state, verdict.name) == ("suspicious", "labels_do_not_belong")
    assert "the model memorises the training examples and does not generalise" in verdict.cause
    assert verdict.experiments == ()  # none could refute it: labels that do not belong are learned by heart, too


@pytest.mark.parametrize("way", ["another loss", "fewer classes"])
def test_an_evaluation_is_not_held_against_what_guessing_gives_for_another_loss(tmp_path, way):
    loss = {
        "another loss": lambda scores, labels: F.mse_loss(scores, F.one_hot(labels, 4).float()),
        "fewer classes": lambda scores, labels: F.cross_entropy(scores[:, :2], labels % 2),
    }[way]
    assert trained(tmp_path, loss=loss)[0].verdict.name != "labels_do_not_belong"


def test_nothing_stands_in_torchs_functions_once_something_is_compiled(tmp_path):
    before = F.cross_entropy, F.dropout, F.scaled_dot_product_attention
    model = nn.Sequential(nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with gaff.watch(model, out=tmp_path / "run", every=1) as watch:
        for _ in range(8):
            model(torch.randn(4, 8)).sum().backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            model(torch.randn(4, 8))
            assert F.cross_entropy is not before[0]
            watch._watcher._looks.compiled(len)  # as torch.compile tells; calling it would be felt by other tests
            assert (F.cross_entropy, F.dropout, F.scaled_dot_product_attention) == before
            assert not watch._watcher._calls.is_on


def test_functions_are_put_back_in_whatever_order_who_listens_leaves():
    from gaff.engine.process.functions import FunctionCalls

    before, told = F.mse_loss, []
    one, other = (FunctionCalls(("mse_loss",), lambda *given, at=at: told.append(at)) for at in (1, 2))
    one.switch(is_on=True)
    other.switch(is_on=True)
    F.mse_loss(torch.ones(1), torch.ones(1))
    one.switch(is_on=False)
    F.mse_loss(torch.ones(1), torch.ones(1))
    other.switch(is_on=False)
    assert F.mse_loss is before
    assert told == [1, 2, 2]


@pytest.mark.filterwarnings("ignore:Using a target size")
def test_a_call_is_told_once_where_a_default_device_is_set():
    from gaff.engine.process.functions import FunctionCalls

    told = []
    calls = FunctionCalls(("mse_loss",), lambda *given: told.append(given[0]))
    calls.switch(is_on=True)
    try:
        with torch.device("cpu"):  # a function mode, which calls the function by its name once more
            F.mse_loss(torch.ones(1), torch.ones(1))
            with pytest.raises(RuntimeError, match="must match the size"):
                F.mse_loss(torch.ones(3), torch.ones(2, 2))
        F.mse_loss(torch.ones(1), torch.ones(1))
    finally:
        calls.switch(is_on=False)
    assert told == ["mse_loss"] * 3


@pytest.mark.parametrize("is_spoilt", [False, True])
def test_transitions_that_are_never_taken_are_no_alarm_and_one_that_gets_lost_is(tmp_path, is_spoilt):
    torch.manual_seed(0)
    model = Chain()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    with gaff.watch(model, out=tmp_path / "run", every=1):
        for step in range(12):
            loss = model(torch.randn(3, 4)) ** 2
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if is_spoilt and step == 6:
                with torch.no_grad():
                    model.moves[0, 3] = -torch.inf
    found = rules(gaff.load(tmp_path / "run")).get("nonfinite")
    assert (found is not None) == is_spoilt
    assert found is None or (found.site, found.evidence["negative_inf"]) == ("moves:param", 7)


@pytest.mark.parametrize("loss_of", [F.cross_entropy, lambda out, y: F.nll_loss(out.log_softmax(1), y) / 2])
def test_a_region_around_the_loss_is_not_run_once_more_to_look_at_it(tmp_path, loss_of):
    def train(watched):
        torch.manual_seed(0)
        body, head = nn.Linear(8, 16), nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 3))
        optimizer, calls = torch.optim.SGD([*body.parameters(), *head.parameters()], 0.1), []

        def region(hidden, y):
            calls.append(1)
            return loss_of(head(hidden), y)

        with gaff.watch(out=tmp_path / "run", every=1) if watched else contextlib.nullcontext():
            for _ in range(8):
                x = torch.randn(12, 8)
                optimizer.zero_grad()
                checkpoint(region, body(x), x[:, :3].argmax(1), use_reentrant=False).backward()
                optimizer.step()
        return len(calls), head[1].running_mean.clone()

    bare, watched = train(False), train(True)
    assert bare[0] == watched[0] == 16
    assert torch.equal(bare[1], watched[1])


def test_saved_tensors_that_are_handed_out_once_are_left_to_backward(tmp_path):
    kept = {}

    def pack(tensor):
        kept[len(kept)] = tensor
        return len(kept) - 1

    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with gaff.watch(model, optimizer, out=tmp_path / "run", every=1):
        for _ in range(4):
            kept.clear()
            with torch.autograd.graph.saved_tensors_hooks(pack, kept.pop):  # popped twice it raises
                loss = F.cross_entropy(model(torch.randn(5, 4)), torch.randint(0, 3, (5,)))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert gaff.load(tmp_path / "run").steps == 4


def test_losses_are_named_as_in_the_script_also_inside_a_function_mode(tmp_path):
    class Passes(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    one, other = nn.Linear(4, 2), nn.Linear(4, 2)
    optimizer = torch.optim.SGD([*one.parameters(), *other.parameters()], 0.1)
    with Passes(), gaff.watch(out=tmp_path / "run", every=1):
        for _ in range(3):
            optimizer.zero_grad()
            left_loss = one(torch.randn(3, 4)).square().mean()
            left_loss.backward()
            right_loss = other(torch.randn(3, 4)).abs().mean()
            right_loss.backward()
            optimizer.step()
    assert {"loss:left_loss", "loss:right_loss"} <= set(gaff.load(tmp_path / "run").scalars)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_loss_of_an_evaluation_is_the_mean_over_all_targets_whatever_the_batches(tmp_path, reduction):
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    inputs, targets = torch.randn(68, 4) * 3, torch.randint(0, 3, (68,))
    targets[5] = -100
    said = []
    with gaff.watch(model, optimizer, out=tmp_path / "run", every=1):
        for _ in range(3):
            for _ in range(5):
                optimizer.zero_grad()
                F.cross_entropy(model(torch.randn(8, 4)), torch.randint(0, 3, (8,))).backward()
                optimizer.step()
            with torch.no_grad():
                for part in (slice(0, 32), slice(32, 64), slice(64, 68)):  # the last batch is a small one
                    F.cross_entropy(model(inputs[part]), targets[part], reduction=reduction)
                known = torch.nn.functional.log_softmax(inputs @ model.weight.T + model.bias, 1)
                said.append(-known[targets >= 0].gather(1, targets[targets >= 0, None]).mean().item())
    told = [value for _, value in gaff.load(tmp_path / "run").evaluated()["cross_entropy"]]
    assert told == pytest.approx(said, rel=1e-5)


def digits(rows=512, classes=10):
    """Inputs in a cluster for each class."""
    drawn = torch.Generator().manual_seed(5)
    labels = torch.arange(rows) % classes
    return torch.randn(classes, 64, generator=drawn)[labels] + 0.5 * torch.randn(rows, 64, generator=drawn), labels


def test_heads_side_by_side_that_begin_with_zeros_are_no_fault(tmp_path):
    inputs, labels = digits()
    heads = nn.ModuleList(nn.Linear(64, 10) for _ in range(3))
    for one in heads.parameters():
        nn.init.zeros_(one)
    optimizer = torch.optim.Adam(heads.parameters(), 1e-2)
    with gaff.watch(heads, optimizer, out=tmp_path / "run", every=1):
        for _ in range(40):
            optimizer.zero_grad()
            sum(F.cross_entropy(head(inputs), labels) for head in heads).backward()
            optimizer.step()
    record = gaff.load(tmp_path / "run")
    assert "symmetric_units" not in {one.rule for one in record.findings}
    assert record.verdict.state == "healthy", record.verdict


@pytest.mark.slow
def test_clients_that_begin_from_one_state_are_no_fault(tmp_path):
    """Federated averaging in one process: the net is written back for each client, and averaged after five."""
    torch.manual_seed(0)
    inputs, labels = digits()
    net = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.SGD(net.parameters(), 0.3)
    common = {name: one.clone() for name, one in net.state_dict().items()}
    with gaff.watch(net, optimizer, out=tmp_path / "run"):
        for _ in range(40):
            total = None
            for client in range(5):
                net.load_state_dict(common)
                optimizer.zero_grad()
                F.cross_entropy(net(inputs[client::5]), labels[client::5]).backward()
                optimizer.step()
                state = net.state_dict()
                total = {k: v / 5 + (0 if total is None else total[k]) for k, v in state.items()}
            common = total
    verdict = gaff.load(tmp_path / "run").verdict
    assert verdict.name != "written_back", verdict


class TwoHeads(nn.Module):
    """A mean and the logarithm of a variance, ``[batch, 1]`` each."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.ReLU())
        self.mean, self.spread = nn.Linear(16, 1), nn.Linear(16, 1)

    def forward(self, x):
        h = self.body(x)
        return self.mean(h), self.spread(h)


def by_hand(mean, spread, y):
    return (0.5 * (spread + (mean - y) ** 2 / spread.exp())).mean()


def by_torch(mean, spread, y):
    return F.gaussian_nll_loss(mean, y, spread.exp())


@pytest.mark.parametrize("loss", [by_hand, by_torch])
@pytest.mark.parametrize("is_wrong", [True, False])
def test_likelihoods_of_a_normal_distribution_that_broadcast_are_told(tmp_path, loss, is_wrong):
    torch.manual_seed(0)
    model = TwoHeads()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    with gaff.watch(model, optimizer, out=tmp_path / "run", every=1):
        for _ in range(20):
            x = torch.randn(32, 8)
            optimizer.zero_grad()
            loss(*model(x), x[:, 0] if is_wrong else x[:, :1]).backward()
            optimizer.step()
    record = gaff.load(tmp_path / "run")
    assert ("broadcast" in {one.rule for one in record.findings}) == is_wrong
    if is_wrong:
        assert record.verdict.name == "broadcast"


def test_a_mode_that_turns_between_looks_is_told(tmp_path):
    """An evaluation after the densest looks are over, and no ``model.train()`` behind it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Dropout(0.2), nn.Linear(256, 10))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    inputs, labels = digits()
    with gaff.watch(model, optimizer, out=tmp_path / "run"):
        for step in range(300):
            if step == 60:
                model.eval()
                with torch.no_grad():
                    F.cross_entropy(model(inputs), labels)
            optimizer.zero_grad()
            F.cross_entropy(model(inputs[:64]), labels[:64]).backward()
            optimizer.step()
    record = gaff.load(tmp_path / "run")
    [found] = [one for one in record.findings if one.rule == "eval_mode_in_training"]
    assert found.since <= 64


@pytest.mark.parametrize("is_alone", [True, False])
def test_all_against_all_on_purpose_is_no_broadcast(tmp_path, is_alone):
    """An energy distance, and an error with a term that keeps outputs apart."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    with gaff.watch(model, optimizer, out=tmp_path / "run", every=1):
        for _ in range(20):
            x = torch.randn(32, 8)
            optimizer.zero_grad()
            p, y = model(x), x[:, 0]
            if is_alone:
                s = p[:, 0]
                loss = 2 * (s[:, None] - y[None]).abs().mean() - (s[:, None] - s[None]).abs().mean()
            else:
                loss = (p[:, 0] - y).square().mean() - 0.01 * (p - p.detach().T).abs().mean()
            loss.backward()
            optimizer.step()
    assert "broadcast" not in {one.rule for one in gaff.load(tmp_path / "run").findings}


@pytest.mark.parametrize("make", [
    lambda: nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.ConvTranspose2d(16, 3, 3, padding=1)),
    lambda: nn.Sequential(nn.Linear(3, 32), nn.Tanh(), nn.Linear(32, 1)),
])  # fmt: skip
def test_layers_behind_one_another_that_begin_alike_are_told(tmp_path, make):
    model = make()
    for one in model.parameters():
        nn.init.constant_(one, 0.1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    x = torch.randn(4, 3, 8, 8) if isinstance(model[0], nn.Conv2d) else torch.randn(16, 3)
    with gaff.watch(model, optimizer, out=tmp_path / "run", every=1):
        for _ in range(10):
            optimizer.zero_grad()
            (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
            optimizer.step()
    assert "symmetric_units" in {one.rule for one in gaff.load(tmp_path / "run").findings}


@pytest.mark.parametrize("idle", [None, 4])
def test_weights_that_are_written_back_are_told_though_some_steps_change_nothing(tmp_path, idle):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    kept = {name: one.clone() for name, one in model.state_dict().items()}
    with gaff.watch(model, optimizer, out=tmp_path / "run", every=1):
        for at in range(40):
            x = torch.randn(16, 8)
            optimizer.zero_grad()
            ((model(x) - x[:, :1]).square().mean() * (0.0 if idle and at % idle == 0 else 1.0)).backward()
            optimizer.step()
            model.load_state_dict(kept)
    assert "written_back" in {one.rule for one in gaff.load(tmp_path / "run").findings}


class Stack(nn.Module):
    """Blocks of which each gives the next one something and adds to the output, as in WaveNet and N-BEATS."""

    def __init__(self, cut):
        super().__init__()
        self.cut = cut
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"kept": nn.Linear(8, 8), "passed": nn.Linear(8, 8)}) for _ in range(3)
        )

    def forward(self, x):
        total = 0
        for at, block in enumerate(self.blocks):
            total = total + block["kept"](x)
            x = x + (block["passed"](x).detach() if at == self.cut else block["passed"](x)).tanh()
        return total


@pytest.mark.parametrize(("cut", "told"), [(None, set()), (1, {"blocks.1.passed.weight", "blocks.1.passed.bias"})])
def test_what_the_last_block_makes_for_one_that_would_follow_is_meant(cut, told, tmp_path):
    torch.manual_seed(0)
    model = Stack(cut)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    x, y = torch.randn(64, 8), torch.randn(64, 8).sin()
    with gaff.watch(model, optimizer, out=tmp_path / "run", every=1):
        for _ in range(40):
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
    found = [one for one in gaff.load(tmp_path / "run").findings if one.rule == "no_gradient"]
    names = {site.removesuffix(":param") for one in found for site in (one.site, *one.also)}
    assert {name for name in names if not name.startswith("blocks.2")} == told
    assert not [name for name in names if name.startswith("blocks.2")] or told


def test_a_loss_of_the_actions_that_were_taken_leaves_those_that_were_not(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 200))
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    with gaff.watch(model, optimizer, out=tmp_path / "run", every=1):
        for _ in range(40):
            taken = torch.randint(0, 200, (16, 1))
            optimizer.zero_grad()
            F.mse_loss(model(torch.randn(16, 8)).gather(1, taken), torch.randn(16, 1)).backward()
            optimizer.step()
    assert "sparse_gradient" not in {one.rule for one in gaff.load(tmp_path / "run").findings}


def test_layers_of_one_unit_have_none_that_would_stay_alike(tmp_path):
    torch.manual_seed(0)
    one, other = nn.Linear(12, 1), nn.Linear(20, 1)
    model = nn.ModuleList([one, other])
    for weight in model.parameters():
        nn.init.zeros_(weight)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x, z = torch.randn(256, 12), torch.randn(256, 20)
    y = (x[:, :1] + z[:, :1] > 0).float()
    with gaff.watch(out=tmp_path / "run", every=1):
        for _ in range(60):
            optimizer.zero_grad()
            F.binary_cross_entropy_with_logits(one(x) + other(z), y).backward()
            optimizer.step()
    assert "symmetric_units" not in {one.rule for one in gaff.load(tmp_path / "run").findings}
