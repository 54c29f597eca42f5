"""Faults in training runs: what a rule must say, and where. Built from the healthy runs, one thing changed."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from tests.training_clean import (
    DIGITS,
    Attention,
    Cnn,
    ResNet,
    Rows,
    Run,
    Unet,
    batch,
    classifier,
    image_batch,
    mlp,
)


@dataclass
class Fault:
    """``rule``: any of these names is right, in the first place; ``sites``: any of these is; none: the run as a whole."""

    build: object
    rule: tuple
    sites: tuple = ("",)

    @property
    def name(self):
        return self.build.__name__


FAULTS = []


def fault(rule, *sites):
    def register(build):
        rules = (rule,) if isinstance(rule, str) else rule
        FAULTS.append(Fault(build, rules, sites or ("",)))
        return build

    return register


def loop(model, optimizer, loss_of, data=batch, steps=80, clear=True):
    def step(number):
        x, y = data()
        loss = loss_of(model, x, y, number)
        if clear:
            optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return Run(model, optimizer, step, steps=steps)


def cross_entropy(model, x, y, number):
    return F.cross_entropy(model(x), y)


def adam(model, lr=1e-3):
    return torch.optim.Adam(model.parameters(), lr=lr)


# gradients and steps


@fault("not_cleared", "0.weight:grad")
def no_zero_grad():
    model = mlp()
    return loop(model, adam(model), cross_entropy, clear=False)


@fault("not_cleared", "stem.weight:grad")
def no_zero_grad_in_resnet():
    model = ResNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    return loop(model, optimizer, cross_entropy, image_batch, clear=False, steps=40)


@fault("not_cleared", "0.weight:grad")
def zero_grad_of_another_optimizer():
    model, other = mlp(), mlp()
    optimizer, wrong = adam(model), adam(other)

    def step(number):
        x, y = batch()
        wrong.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    return Run(model, optimizer, step, steps=60)


@fault("never_stepped")
def optimizer_step_forgotten():
    model = mlp()
    optimizer = adam(model)

    def step(number):
        x, y = batch()
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()

    return Run(model, optimizer, step, steps=40)


@fault("wrong_parameters")
def model_made_anew_after_the_optimizer():
    optimizer = adam(mlp())
    return loop(mlp(), optimizer, cross_entropy)


@fault("wrong_parameters")
def optimizer_of_the_teacher():
    teacher = mlp()

    def loss(model, x, y, number):
        with torch.no_grad():
            told = teacher(x).softmax(-1)
        return F.kl_div(model(x).log_softmax(-1), told, reduction="batchmean")

    return loop(mlp(), adam(teacher), loss)


@fault("unregistered")
def layers_in_a_list():
    class Listed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = [nn.Linear(64, 32), nn.Linear(32, 32)]
            self.head = nn.Linear(32, 10)

        def forward(self, x):
            for layer in self.layers:
                x = layer(x).relu()
            return self.head(x)

    model = Listed()
    return loop(model, adam(model), cross_entropy)


@fault("cleared_before_step")
def zero_grad_between_backward_and_step():
    model = mlp()
    optimizer = adam(model)

    def step(number):
        x, y = batch()
        F.cross_entropy(model(x), y).backward()
        optimizer.zero_grad()
        optimizer.step()

    return Run(model, optimizer, step, steps=60)


@fault("zero_at_the_step")
def gradients_multiplied_by_zero():
    model = mlp()
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient * 0)
    return loop(model, adam(model), cross_entropy)


@fault("zero_at_the_step")
def zeros_in_the_place_of_gradients():
    model = mlp()
    optimizer = adam(model)

    def step(number):
        x, y = batch()
        F.cross_entropy(model(x), y).backward()
        optimizer.zero_grad(set_to_none=False)
        optimizer.step()

    return Run(model, optimizer, step, steps=60)


@fault("never_trained")
def forward_under_no_grad():
    def loss(model, x, y, number):
        with torch.no_grad():
            told = model(x)
        return F.cross_entropy(told.requires_grad_(), y)

    model = mlp()
    return loop(model, adam(model), loss)


@fault("broadcast")
def every_output_with_every_target_by_hand():
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1))

    def loss(model, x, y, number):
        return (y.float() - model(x)).pow(2).mean()

    return loop(model, adam(model), loss)


@fault("bounded_output")
def relu_after_the_last_layer():
    model = nn.Sequential(*mlp(), nn.ReLU())
    return loop(model, adam(model), cross_entropy)


@fault("bounded_output")
def targets_out_of_the_range_of_tanh():
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1), nn.Tanh())

    def loss(model, x, y, number):
        return F.mse_loss(model(x).squeeze(1), 10.0 * y)

    return loop(model, adam(model), loss)


@fault("dropout_high", "2")
def dropout_that_keeps_next_to_nothing():
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.95), nn.Linear(32, 10))
    return loop(model, adam(model), cross_entropy)


@fault("not_owned", "4.weight:param")
def head_not_given_to_the_optimizer():
    model = mlp()
    return loop(model, torch.optim.Adam(model[:4].parameters(), lr=1e-3), cross_entropy)


@fault("not_owned", "fc2.weight:param")
def layer_replaced_after_the_optimizer():
    model = Cnn()
    optimizer = adam(model)
    model.fc2 = nn.Linear(64, 10)
    return loop(model, optimizer, cross_entropy, image_batch)


@fault("not_owned", "place:param")
def only_some_groups_in_the_optimizer():
    model = Attention()
    parameters = [one for name, one in model.named_parameters() if "weight" in name or "bias" in name]
    return loop(model, torch.optim.AdamW(parameters, lr=1e-3), cross_entropy, image_batch, steps=40)


@fault("no_gradient", "0.weight:param")
def features_detached():
    model = mlp()

    def loss(model, x, y, number):
        return F.cross_entropy(model[2:](model[:2](x).detach()), y)

    return loop(model, adam(model), loss)


@fault("no_gradient", "extra.weight:param")
def layer_never_called():
    model = mlp()
    model.extra = nn.Linear(3, 3)
    forward = nn.Sequential(*list(model.children())[:-1])

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = forward
            self.extra = nn.Linear(3, 3)

        def forward(self, x):
            return self.body(x)

    net = Net()
    return loop(net, adam(net), cross_entropy)


@fault("no_gradient", "conv1.weight:param")
def no_grad_around_the_first_layer():
    class Net(Cnn):
        def forward(self, x):
            with torch.no_grad():
                x = F.max_pool2d(F.relu(self.bn(self.conv1(x))), 2)
            x = F.max_pool2d(F.relu(self.conv2(x)), 2)
            return self.fc2(F.relu(self.fc1(x.flatten(1))))

    model = Net()
    return loop(model, adam(model), cross_entropy, image_batch)


@fault("no_gradient", "rnn.weight_ih_l0:param")
def hidden_state_detached():
    class Net(Rows):
        def forward(self, x):
            return self.head(self.rnn(x.squeeze(1))[0][:, -1].data)

    model = Net()
    return loop(model, adam(model), cross_entropy, image_batch)


@fault("lr_zero")
def learning_rate_zero():
    model = mlp()
    return loop(model, adam(model, 0.0), cross_entropy)


@fault("lr_zero")
def scheduler_at_its_end():
    model = mlp()
    optimizer = adam(model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / 5))
    return classifier(model, optimizer, scheduler=schedule, has_eval=False)


@fault("update_small")
def learning_rate_far_too_low():
    model = mlp()
    return loop(model, torch.optim.SGD(model.parameters(), lr=1e-6), cross_entropy)


@fault(("update_small", "never_updated"), "", "encoder.layers.0.norm1.weight:param")
def learning_rate_far_too_low_in_transformer():
    model = Attention()
    return loop(model, torch.optim.AdamW(model.parameters(), lr=1e-8, weight_decay=0), cross_entropy, image_batch, 40)


@fault("updates_round_away")
def bfloat16_swallows_updates():
    model = mlp().bfloat16()
    with torch.no_grad():
        for one in model.parameters():
            one.add_(1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def loss(model, x, y, number):
        return F.cross_entropy(model(x.bfloat16()).float() / 1000, y)

    return loop(model, optimizer, loss)


@fault("never_updated", "0.weight:param")
def optimizer_works_on_a_copy():
    """What a broken back end looks like: the step runs, the weights stay."""

    class Broken(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for one in group["params"]:
                    one.clone().sub_(one.grad, alpha=group["lr"])

    model = mlp()
    return loop(model, Broken(model.parameters(), lr=0.1), cross_entropy)


@fault(("update_large", "diverging", "dead_units"), "", "0.weight:param", "2.weight:param", "4.weight:param", "1", "3")
def learning_rate_far_too_high():
    model = mlp()
    return loop(model, adam(model, 1.0), cross_entropy)


@fault("loss_sign")
def sign_of_the_loss_flipped():
    model = mlp()
    return loop(model, adam(model, 2e-3), lambda *given: -cross_entropy(*given), steps=150)


@fault(("exploding", "update_large", "diverging", "nonfinite", "initial_loss"), "", "0.weight:grad", "rnn.weight_ih_l0:grad",
       "rnn.weight_hh_l0:grad", "head.weight:param", "rnn.weight_ih_l0:param")  # fmt: skip
def recurrent_weights_too_large():
    class Net(Rows):
        def __init__(self):
            super().__init__()
            self.rnn = nn.RNN(8, 48, nonlinearity="relu", batch_first=True)
            with torch.no_grad():
                self.rnn.weight_hh_l0.mul_(6)

    model = Net()
    return loop(model, torch.optim.SGD(model.parameters(), lr=1e-4), cross_entropy, image_batch)


# activations


@fault("dead_units", "1")
def dead_relu_by_its_bias():
    model = mlp()
    with torch.no_grad():
        model[0].bias.fill_(-20)
    return loop(model, adam(model), cross_entropy)


@fault("dead_units", "blocks.0.relu")
def dead_relu_in_resnet():
    model = ResNet(blocks=1)
    with torch.no_grad():
        model.blocks[0].bn1.bias.fill_(-9)
        model.blocks[0].bn2.bias.fill_(-9)
        model.stem.weight.mul_(0.01)
    return loop(model, adam(model, 1e-4), cross_entropy, image_batch)


@fault("dead_units", "conv2:input", "fc1:input", "fc2:input")
def dead_functional_relu():
    model = Cnn()
    with torch.no_grad():
        model.fc1.bias.fill_(-30)
    return loop(model, adam(model), cross_entropy, image_batch)


@fault(("dead_units", "diverging"), "1", "3", "")
def relus_die_of_one_huge_step():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def loss(model, x, y, number):
        return cross_entropy(model, x, y, number) * (4000 if number == 10 else 1)

    return loop(model, optimizer, loss, steps=120)


@fault("saturated", "1", "3")
def tanh_saturated_by_its_weights():
    model = mlp(activation=nn.Tanh)
    with torch.no_grad():
        for layer in (model[0], model[2]):
            layer.weight.mul_(40)
    return loop(model, adam(model), cross_entropy)


@fault("saturated", "1")
def sigmoid_saturated_by_raw_input():
    model = mlp(activation=nn.Sigmoid, depth=1)
    with torch.no_grad():
        model[0].weight.mul_(30)
    return loop(model, adam(model), lambda model, x, y, number: F.cross_entropy(model(x * 4), y))


@fault("vanishing", "0.weight:grad")
def deep_sigmoid_net():
    model = mlp(depth=10, activation=nn.Sigmoid)
    return loop(model, torch.optim.SGD(model.parameters(), lr=0.1), cross_entropy)


@fault("vanishing", "0.weight:grad")
def deep_net_with_tiny_weights():
    model = mlp(depth=6, activation=nn.Tanh)
    with torch.no_grad():
        for layer in model:
            if isinstance(layer, nn.Linear):
                layer.weight.mul_(0.1)
    return loop(model, torch.optim.SGD(model.parameters(), lr=0.05), cross_entropy)


@fault("symmetric_units", "0.weight:param")
def all_weights_zero():
    model = mlp()
    with torch.no_grad():
        for one in model.parameters():
            one.zero_()
    return loop(model, torch.optim.SGD(model.parameters(), lr=0.05), cross_entropy)


@fault("init_imbalance", "10")
def initial_weights_too_large():
    model = mlp(depth=5)
    with torch.no_grad():
        for layer in model:
            if isinstance(layer, nn.Linear):
                layer.weight.mul_(12)
    return loop(model, adam(model, 1e-5), cross_entropy)


@fault("initial_loss")
def last_layer_too_sure():
    model = mlp()
    with torch.no_grad():
        model[-1].weight.mul_(200)
    return loop(model, adam(model, 1e-3), cross_entropy)


@fault("input_scale", ":input")
def raw_pixels():
    model = mlp()
    return loop(model, adam(model), lambda model, x, y, number: F.cross_entropy(model(x * 255), y))


@fault("input_scale", ":input")
def raw_photo_into_unet():
    model = Unet()
    optimizer = adam(model)

    def step(number):
        x = torch.rand(4, 3, 16, 16) * 255
        optimizer.zero_grad()
        F.mse_loss(model(x), x / 255).backward()
        optimizer.step()

    return Run(model, optimizer, step, steps=40)


# losses


@fault("double_softmax")
def softmax_before_cross_entropy():
    model = nn.Sequential(*mlp(), nn.Softmax(dim=1))
    return loop(model, adam(model), cross_entropy)


@fault("double_softmax")
def sigmoid_before_bce_with_logits():
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10), nn.Sigmoid())

    def loss(model, x, y, number):
        return F.binary_cross_entropy_with_logits(model(x), F.one_hot(y, 10).float())

    return loop(model, adam(model), loss)


@fault("softmax_axis")
def softmax_over_the_batch():
    model = mlp()
    return loop(model, adam(model), lambda model, x, y, number: F.nll_loss(F.log_softmax(model(x), 0), y))


@fault("train_mode_in_eval")
def evaluated_at_once_in_training_mode():
    model = mlp(dropout=0.3)
    run = classifier(model, adam(model))

    def evaluate():
        with torch.no_grad():
            model(DIGITS)

    run.evaluate = evaluate
    return run


@fault("nll_of_scores")
def nll_loss_of_probabilities():
    model = nn.Sequential(*mlp(), nn.Softmax(dim=1))
    return loop(model, adam(model), lambda model, x, y, number: F.nll_loss(model(x), y))


@fault("loss_spike")
def one_bad_batch():
    model = mlp()

    def loss(model, x, y, number):
        if number == 70:
            x = x.clone()
            x[5] *= 50_000
        return F.cross_entropy(model(x), y)

    return loop(model, torch.optim.SGD(model.parameters(), lr=0.01), loss, steps=100)


@fault("nonfinite", "/log#0")
def logarithm_of_zero():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = mlp()

        def forward(self, x):
            return self.body(torch.log(x.clamp(min=0)) * x)

    model = Net()
    return loop(model, adam(model), cross_entropy, steps=10)


@fault("nonfinite", ":input[0]")
def nan_in_the_data():
    model = mlp()

    def loss(model, x, y, number):
        if number == 13:
            x = x.clone()
            x[3, 7] = math.nan
        return F.cross_entropy(model(x), y)

    return loop(model, adam(model), loss, steps=30)


@fault("nonfinite", "/sqrt#0")
def root_at_zero_in_backward():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = mlp()

        def forward(self, x):
            y = self.body(x)
            return y + torch.sqrt((y * 0).abs()).sum()

    model = Net()
    return loop(model, adam(model), cross_entropy, steps=10)


@fault(
    ("nonfinite", "exploding", "diverging"),
    "",
    "0/linear#0",
    "2/linear#0",
    "4/linear#0",
    "4.weight:grad",
    "0.weight:grad",
)
def overflow_of_the_weights():
    model = mlp()
    return loop(model, torch.optim.SGD(model.parameters(), lr=1e4), lambda model, x, y, n: model(x).pow(2).mean() * 1e3,
                steps=40)  # fmt: skip


@fault(("scaler_stuck", "nonfinite"), "/sqrt#0")
def scaler_that_never_steps():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = mlp()

        def forward(self, x):
            y = self.body(x)
            return y + torch.sqrt((y * 0).abs()).sum()

    model = Net()
    optimizer = adam(model)
    scaler = torch.amp.GradScaler("cpu")

    def step(number):
        x, y = batch()
        optimizer.zero_grad()
        scaler.scale(F.cross_entropy(model(x), y)).backward()
        scaler.step(optimizer)
        scaler.update()

    return Run(model, optimizer, step, steps=40)


@fault("half_range", "grow")
def near_the_end_of_float16():
    class Grow(nn.Module):
        def forward(self, x):
            return x * 20_000

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1 = nn.Linear(64, 64)
            self.grow = Grow()
            self.fc2 = nn.Linear(64, 10)

        def forward(self, x):
            return self.fc2(F.relu(self.grow(self.fc1(x)) / 20_000))

    model = Net()
    optimizer = adam(model)

    def step(number):
        x, y = batch()
        with torch.autocast("cpu", torch.float16):
            loss = F.cross_entropy(model(x).float(), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return Run(model, optimizer, step, steps=40)


# train and eval


def evaluated_in_batches(model):
    """Trained, and evaluated in the mode that it is in."""
    run = classifier(model, adam(model))

    def evaluate():
        with torch.no_grad():
            for at in range(0, 600, 30):
                model(DIGITS[at : at + 30])

    run.evaluate = evaluate
    return run


@fault("train_mode_in_eval")
def evaluated_in_training_mode():
    return evaluated_in_batches(mlp(dropout=0.3))


class Functional(nn.Module):
    """A model whose dropout is a function, as in many tutorials."""

    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(64, 64), nn.Linear(64, 10)

    def forward(self, x):
        return self.fc2(F.dropout(F.relu(self.fc1(x)), 0.3, training=self.training))


@fault("train_mode_in_eval")
def evaluated_in_training_mode_with_a_dropout_that_is_a_function():
    return evaluated_in_batches(Functional())


@fault("random_in_eval")
def dropout_that_ignores_the_mode():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1 = nn.Linear(64, 64)
            self.fc2 = nn.Linear(64, 10)

        def forward(self, x):
            return self.fc2(F.dropout(F.relu(self.fc1(x)), 0.3))

    model = Net()
    return classifier(model, adam(model))


@fault("eval_drift", "blocks.0.bn1", "blocks.0.bn2", "blocks.0.relu", "blocks.0", "blocks.0.conv1")
def running_statistics_that_do_not_settle():
    model = ResNet()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 0.0
            with torch.no_grad():
                module.running_var.fill_(1e4)
    return classifier(model, adam(model), image_batch)


@fault("attention_collapse", "encoder.layers.0.self_attn", "attend", "attend.softmax", "attend:output[0]")
def attention_that_looks_at_one_place():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Linear(8, 32)
            self.attend = nn.MultiheadAttention(32, 1, batch_first=True)
            self.head = nn.Linear(32, 10)
            self.gain = 1.0
            self.place = nn.Parameter(torch.randn(8, 32))

        def forward(self, x):
            x = self.embed(x.squeeze(1)) + self.place
            return self.head((x + self.attend(x * self.gain, x, x)[0]).mean(1))

    model = Net()
    optimizer = adam(model)

    def loss(model, x, y, number):
        model.gain = 1.0 + 1e6 * number
        return F.cross_entropy(model(x), y)

    return loop(model, optimizer, loss, image_batch)


@fault(("sparse_gradient", "dead_units"), "2.weight:grad", "3")
def nearly_dead_layer():
    model = mlp()
    with torch.no_grad():
        model[2].bias.fill_(-0.33)
    return loop(model, adam(model, 1e-5), cross_entropy)


@fault("loss_gives_nothing")
def multiplied_by_zero():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = mlp()
            self.scale = 0.0

        def forward(self, x):
            return self.body(x)

    model = mlp()
    return loop(model, adam(model), lambda model, x, y, number: F.cross_entropy(model(x) * 0.0, y))
