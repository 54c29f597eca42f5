"""What was set, loaded or scheduled for nothing is named, and what is meant is not."""

import copy

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

import gaff


def net():
    return nn.Sequential(nn.Sequential(nn.Linear(64, 32), nn.ReLU()), nn.Linear(32, 10))


def sgd(model):
    return torch.optim.SGD(model.parameters(), 0.1)


def trained(folder, *, make=sgd, before=None, each=None, after=None, loss=F.cross_entropy, steps=120, **options):
    """The verdict of a training on digits: ``before``, ``each`` and ``after`` get the model, the optimizer, the step."""
    torch.manual_seed(0)
    digits = load_digits()
    x, y = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16, torch.tensor(digits.target)
    model = net()
    optimizer = make(model)
    with gaff.watch(out=folder / "run", tell=lambda line: None, **options):
        if before:
            before(model, optimizer)
        for step in range(steps):
            at = slice(step * 32 % 1760, step * 32 % 1760 + 32)
            told = loss(model(x[at]), y[at])
            optimizer.zero_grad()
            told.backward()
            optimizer.step()
            if each:
                each(model, optimizer, step)
        if after:
            after(model, optimizer)
    return gaff.load(folder / "run").verdict


def set_rate(model, optimizer, step):
    optimizer.lr = 0.1 * 0.5 ** (step // 40)


def set_group(model, optimizer, step):
    for group in optimizer.param_groups:
        group["lr"] = 0.1 * 0.5 ** (step // 40)


def nearly(model, optimizer):
    for one in model[0].parameters():
        one.require_grad = False


def of_module(model, optimizer):
    model[0].requires_grad = False


def rightly(model, optimizer):
    model[0].requires_grad_(False)


@pytest.mark.parametrize(
    ("given", "is_wrong"),
    [
        ({"each": set_rate}, True),
        ({"each": set_group}, False),
        ({"before": nearly}, True),
        ({"before": of_module}, True),
        ({"before": rightly}, False),
    ],
)
def test_an_attribute_that_torch_does_not_read_is_named(tmp_path, given, is_wrong):
    told = trained(tmp_path, every=10, **given)
    assert (told.name == "set_for_nothing") is is_wrong, told
    assert told.state == ("wrong" if is_wrong else "healthy"), told
    assert ("does nothing" in told.cause) is is_wrong


class Own(torch.optim.SGD):
    """An optimizer of somebody else's, which has a rate of its own."""

    def __init__(self, parameters):
        super().__init__(parameters, 0.1)
        self.lr = 3.0


def test_attributes_of_classes_that_are_none_of_torchs_are_theirs(tmp_path):
    assert trained(tmp_path, make=lambda model: Own(model.parameters()), every=10).state == "healthy"


@pytest.mark.parametrize(("betas", "is_wrong"), [((0.999, 0.9), True), ((0.9, 0.999), False), ((0.5, 0.9), False)])
def test_betas_in_the_wrong_order_are_named(tmp_path, betas, is_wrong):
    told = trained(tmp_path, make=lambda model: torch.optim.Adam(model.parameters(), 1e-3, betas=betas))
    assert (told.name == "betas_swapped") is is_wrong, told


@pytest.mark.parametrize("copied", [False, True])
def test_a_state_that_is_no_copy_is_named_when_it_is_loaded(tmp_path, copied):
    kept = {}

    def each(model, optimizer, step):
        if step == 40:
            kept["best"] = copy.deepcopy(model.state_dict()) if copied else model.state_dict()

    told = trained(tmp_path, each=each, after=lambda model, optimizer: model.load_state_dict(kept["best"]))
    assert (told.name == "loads_itself") is not copied, told


def test_a_model_that_is_loaded_with_its_own_before_it_trains_is_nothing_to_tell(tmp_path):
    def before(model, optimizer):
        state = model.state_dict()
        state.update({"1.bias": torch.zeros(10)})
        model.load_state_dict(model.state_dict())
        model.load_state_dict(state)

    assert trained(tmp_path, before=before, every=10).state == "healthy"


@pytest.mark.parametrize(("every", "is_wrong"), [(12, True), (1, False)])
def test_a_schedule_in_steps_that_is_stepped_by_epochs_is_named(tmp_path, every, is_wrong):
    schedules = []

    def before(model, optimizer):
        schedules.append(torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=121))

    def each(model, optimizer, step):
        if step % every == every - 1:
            schedules[0].step()

    told = trained(tmp_path, before=before, each=each)
    assert (told.name == "schedule_not_finished") is is_wrong, told
    assert not is_wrong or "the OneCycleLR is 121 steps long, as the run was, and has made 10 of them" in told.cause


@pytest.mark.parametrize("epochs", [100, 1000])
def test_a_schedule_in_epochs_that_ends_early_is_nothing_to_tell(tmp_path, epochs):
    schedules = []

    def before(model, optimizer):
        schedules.append(torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs))

    def each(model, optimizer, step):
        if step % 12 == 11:
            schedules[0].step()

    assert trained(tmp_path, before=before, each=each, every=10).state == "healthy"


@pytest.mark.parametrize("is_told", [False, True])
def test_logarithms_as_targets_of_kl_div_are_named(tmp_path, is_told):
    teacher = F.log_softmax(torch.randn(10), 0)

    def loss(scores, labels):
        targets = teacher.expand(len(scores), 10)
        return F.kl_div(F.log_softmax(scores, 1), targets, reduction="batchmean", log_target=is_told)

    told = trained(tmp_path, loss=loss)
    assert (told.name == "kl_of_log_targets") is not is_told, told


@pytest.mark.parametrize(("targets", "is_wrong"), [(torch.zeros, True), (torch.ones, False)])
def test_targets_that_are_all_zero_are_told(tmp_path, targets, is_wrong):
    def loss(scores, labels):
        return F.binary_cross_entropy_with_logits(scores, targets(scores.shape))

    told = trained(tmp_path, loss=loss)
    assert (told.name == "labels_constant") is is_wrong, told


@pytest.mark.parametrize("is_by_class", [True, False])
def test_weights_of_a_sampler_that_are_fewer_than_examples_are_named(tmp_path, is_by_class):
    torch.manual_seed(0)
    digits = load_digits()
    x, y = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16, torch.tensor(digits.target)
    each = 1.0 / torch.bincount(y)
    sampler = WeightedRandomSampler(each if is_by_class else each[y], len(y))
    loader, model = DataLoader(TensorDataset(x, y), 64, sampler=sampler), net()
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    with gaff.watch(model, optimizer, out=tmp_path / "run", tell=lambda line: None):
        for _ in range(4):
            for inputs, labels in loader:
                optimizer.zero_grad()
                F.cross_entropy(model(inputs), labels).backward()
                optimizer.step()
    told = gaff.load(tmp_path / "run").verdict
    assert (told.name == "sampler_weights") is is_by_class, told
    assert told.state == ("wrong" if is_by_class else "healthy"), told
    assert not is_by_class or "has 10 weights, and the data set 1797 examples" in told.cause


def test_a_schedule_that_runs_on_below_zero_is_named(tmp_path):
    schedules = []

    def before(model, optimizer):
        schedules.append(torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 60))

    told = trained(tmp_path, before=before, each=lambda model, optimizer, step: schedules[0].step(), every=10)
    assert told.name == "lr_negative", told
    assert "steps go up the gradient" in told.cause
