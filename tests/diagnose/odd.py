"""Healthy training that looks strange: adversaries, agents, several optimizers, losses that rise or are negative.

python odd.py --program gan --seed 1
"""

import argparse
import copy
import itertools
import math

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def mlp(*sizes, act=nn.ReLU):
    layers = []
    for at, (before, after) in enumerate(itertools.pairwise(sizes)):
        layers += [nn.Linear(before, after)] + ([act()] if at < len(sizes) - 2 else [])
    return nn.Sequential(*layers)


def digits():
    data = load_digits()
    return torch.tensor(data.data, dtype=torch.float32) / 16, torch.tensor(data.target)


def batches(size, steps, *tensors):
    step = 0
    while True:
        for batch in DataLoader(TensorDataset(*tensors), batch_size=size, shuffle=True, drop_last=True):
            if step >= steps:
                return
            step += 1
            yield batch


def gan(steps):
    x, _ = digits()
    maker, judge = mlp(16, 64, 64), mlp(64, 64, 1, act=nn.LeakyReLU)
    adam_m, adam_j = (torch.optim.Adam(one.parameters(), 2e-4, betas=(0.5, 0.999)) for one in (maker, judge))
    for (real,) in batches(32, steps, x):
        fake = maker(torch.randn(32, 16)).sigmoid()
        ones, zeros = torch.ones(32, 1), torch.zeros(32, 1)
        loss_j = F.binary_cross_entropy_with_logits(judge(real), ones)
        loss_j = loss_j + F.binary_cross_entropy_with_logits(judge(fake.detach()), zeros)
        adam_j.zero_grad()
        loss_j.backward()
        adam_j.step()
        loss_m = F.binary_cross_entropy_with_logits(judge(fake), ones)
        adam_m.zero_grad()
        loss_m.backward()
        adam_m.step()


def wasserstein(steps):
    x, _ = digits()
    maker, critic = mlp(16, 64, 64), mlp(64, 64, 1, act=nn.LeakyReLU)
    rms_m, rms_c = (torch.optim.RMSprop(one.parameters(), 1e-4) for one in (maker, critic))
    for at, (real,) in enumerate(batches(32, 4 * steps, x)):
        fake = maker(torch.randn(32, 16)).sigmoid()
        between = (0.3 * real + 0.7 * fake.detach()).requires_grad_()
        (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
        critic_loss = critic(fake.detach()).mean() - critic(real).mean() + 10 * (slope.norm(dim=1) - 1).square().mean()
        rms_c.zero_grad()
        critic_loss.backward()
        rms_c.step()
        if at % 4 == 3:
            maker_loss = -critic(maker(torch.randn(32, 16)).sigmoid()).mean()
            rms_m.zero_grad()
            maker_loss.backward()
            rms_m.step()


class Vae(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = mlp(64, 64, 16), mlp(8, 64, 64)

    def forward(self, x):
        mean, log_variance = self.encoder(x).chunk(2, -1)
        code = mean + torch.randn_like(mean) * (log_variance / 2).exp()
        return self.decoder(code), mean, log_variance


def vae(steps):
    x, _ = digits()
    model = Vae()
    adam = torch.optim.Adam(model.parameters(), 2e-3)
    for at, (batch,) in enumerate(batches(64, steps, x)):
        out, mean, log_variance = model(batch)
        made = F.binary_cross_entropy_with_logits(out, batch, reduction="sum") / 64
        divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum() / 64
        loss = made + min(1.0, at / 100) * divergence
        adam.zero_grad()
        loss.backward()
        adam.step()
        if at % 50 == 49:
            model.eval()
            with torch.no_grad():
                model(x[:200])
            model.train()


def contrastive(steps):
    x, _ = digits()
    model = mlp(64, 128, 32)
    adam = torch.optim.Adam(model.parameters(), 1e-3)
    for (batch,) in batches(64, steps, x):
        one, other = (F.normalize(model(batch + 0.1 * torch.randn_like(batch)), dim=-1) for _ in range(2))
        loss = F.cross_entropy(one @ other.T / 0.1, torch.arange(64))
        adam.zero_grad()
        loss.backward()
        adam.step()


class Line:
    """A walk on a line of 16 places; the last one is worth 1, each step costs a little."""

    def begin(self):
        self.at, self.left = 4, 40
        return self.seen()

    def seen(self):
        return F.one_hot(torch.tensor(self.at), 16).float()

    def act(self, right):
        self.at = max(0, min(15, self.at + (1 if right else -1)))
        self.left -= 1
        reward = 1.0 if self.at == 15 else -0.01
        return self.seen(), reward, self.at == 15 or self.left == 0


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.actor, self.critic = nn.Linear(16, 32), nn.Linear(32, 2), nn.Linear(32, 1)

    def forward(self, x):
        hidden = self.body(x).relu()
        return self.actor(hidden), self.critic(hidden)


def actor_critic(steps):
    model, line = ActorCritic(), Line()
    adam = torch.optim.Adam(model.parameters(), 5e-3)
    for _ in range(steps):
        seen, is_over, logs, values, rewards = line.begin(), False, [], [], []
        while not is_over:
            scores, value = model(seen)
            choice = torch.distributions.Categorical(logits=scores)
            action = choice.sample()
            seen, reward, is_over = line.act(bool(action))
            logs.append(choice.log_prob(action))
            values.append(value.squeeze())
            rewards.append(reward)
        returns, total = [], 0.0
        for reward in reversed(rewards):
            total = reward + 0.99 * total
            returns.insert(0, total)
        returns = torch.tensor(returns) * 10  # a return that grows as it learns: so does the loss
        values = torch.stack(values)
        loss = (-torch.stack(logs) * (returns - values.detach())).sum() + F.smooth_l1_loss(
            values, returns, reduction="sum"
        )
        adam.zero_grad()
        loss.backward()
        adam.step()


def reinforce(steps):
    model, line = mlp(16, 32, 2, act=nn.Tanh), Line()
    adam = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(steps):
        seen, is_over, logs, rewards = line.begin(), False, [], []
        while not is_over:
            choice = torch.distributions.Categorical(logits=model(seen))
            action = choice.sample()
            logs.append(choice.log_prob(action))
            seen, reward, is_over = line.act(bool(action))
            rewards.append(reward)
        policy_loss = -torch.stack(logs).sum() * (sum(rewards) + 0.2)
        adam.zero_grad()
        policy_loss.backward()
        adam.step()


def q_learning(steps):
    model, line, memory = mlp(16, 32, 2), Line(), []
    target = copy.deepcopy(model)
    adam = torch.optim.Adam(model.parameters(), 1e-3)
    seen, made = line.begin(), 0
    while made < steps:
        with torch.no_grad():
            action = int(model(seen).argmax()) if torch.rand(()) > 0.3 else int(torch.rand(()) > 0.5)
        then, reward, is_over = line.act(action)
        memory.append((seen, action, reward, then, is_over))
        seen = line.begin() if is_over else then
        if len(memory) < 64:
            continue
        rows = [memory[int(at)] for at in torch.randint(0, len(memory), (32,))]
        before, after = torch.stack([row[0] for row in rows]), torch.stack([row[3] for row in rows])
        with torch.no_grad():
            best = target(after).amax(-1) * torch.tensor([0.0 if row[4] else 0.95 for row in rows])
        asked = model(before)[torch.arange(32), torch.tensor([row[1] for row in rows])]
        loss = F.smooth_l1_loss(asked, torch.tensor([row[2] for row in rows]) + best)
        adam.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        adam.step()
        made += 1
        if made % 50 == 0:
            target.load_state_dict(model.state_dict())


def proximal(steps):
    model, line = ActorCritic(), Line()
    adam = torch.optim.Adam(model.parameters(), 3e-3)
    made = 0
    while made < steps:
        seen, rows = line.begin(), []
        for _ in range(128):
            with torch.no_grad():
                scores, value = model(seen)
            choice = torch.distributions.Categorical(logits=scores)
            action = choice.sample()
            then, reward, is_over = line.act(bool(action))
            rows.append((seen, action, choice.log_prob(action), reward, value.squeeze(), is_over))
            seen = line.begin() if is_over else then
        returns, total = [], 0.0
        for row in reversed(rows):
            total = row[3] + 0.97 * total * (not row[5])
            returns.insert(0, total)
        states, actions, old, returns = (
            torch.stack([row[0] for row in rows]), torch.stack([row[1] for row in rows]),
            torch.stack([row[2] for row in rows]), torch.tensor(returns),
        )  # fmt: skip
        advantages = returns - torch.stack([row[4] for row in rows])
        for _ in range(4):
            for part in torch.randperm(128).split(32):
                scores, values = model(states[part])
                ratio = (torch.distributions.Categorical(logits=scores).log_prob(actions[part]) - old[part]).exp()
                gain = torch.min(ratio * advantages[part], ratio.clamp(0.8, 1.2) * advantages[part])
                loss = -gain.mean() + 0.5 * F.mse_loss(values.squeeze(-1), returns[part])
                adam.zero_grad()
                loss.backward()
                adam.step()
                made += 1


def distillation(steps):
    x, y = digits()
    teacher, student = mlp(64, 128, 10), mlp(64, 16, 10)
    adam = torch.optim.Adam(teacher.parameters(), 2e-3)
    for batch, labels in batches(64, 100, x, y):
        adam.zero_grad()
        F.cross_entropy(teacher(batch), labels).backward()
        adam.step()
    teacher.eval()
    adam = torch.optim.Adam(student.parameters(), 2e-3)
    for batch, _ in batches(64, steps, x, y):
        with torch.no_grad():
            wanted = (teacher(batch) / 3).softmax(-1)
        loss = F.kl_div((student(batch) / 3).log_softmax(-1), wanted, reduction="batchmean") * 9
        adam.zero_grad()
        loss.backward()
        adam.step()


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(64, 4)
        self.experts = nn.ModuleList([mlp(64, 32, 10) for _ in range(4)])

    def forward(self, x):
        shares = (self.gate(x) + 0.5 * torch.randn(len(x), 4)).softmax(-1)
        weight, chosen = shares.topk(2, -1)
        out = torch.zeros(len(x), 10)
        for at, expert in enumerate(self.experts):
            rows, which = (chosen == at).nonzero(as_tuple=True)
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows]) * weight[rows, which, None])
        return out, 4 * (shares.mean(0) * (chosen[:, 0, None] == torch.arange(4)).float().mean(0)).sum()


def mixture(steps):
    x, y = digits()
    model = Mixture()
    adam = torch.optim.Adam(model.parameters(), 2e-3)
    for batch, labels in batches(64, steps, x, y):
        out, balance = model(batch)
        loss = F.cross_entropy(out, labels) + 0.1 * balance
        adam.zero_grad()
        loss.backward()
        adam.step()


class LowRank(nn.Module):
    def __init__(self, layer, rank=4):
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, layer.in_features) / math.sqrt(layer.in_features))
        self.up = nn.Parameter(torch.zeros(layer.out_features, rank))

    def forward(self, x):
        return self.layer(x) + x @ self.down.T @ self.up.T


def low_rank(steps):
    x, y = digits()
    model = mlp(64, 128, 64, 10)
    adam = torch.optim.Adam(model.parameters(), 2e-3)
    for batch, labels in batches(64, 60, x, y):
        adam.zero_grad()
        F.cross_entropy(model(batch), labels).backward()
        adam.step()
    model = nn.Sequential(*[LowRank(one) if isinstance(one, nn.Linear) else one for one in model])
    adam = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], 1e-3)
    for batch, labels in batches(64, steps, x.flip(1), y):
        adam.zero_grad()
        F.cross_entropy(model(batch), labels).backward()
        adam.step()


def mean_teacher(steps):
    x, y = digits()
    model = nn.Sequential(mlp(64, 128, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10))
    teacher = copy.deepcopy(model)
    sgd = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    for batch, labels in batches(64, steps, x, y):
        with torch.no_grad():
            wanted = teacher(batch + 0.05 * torch.randn_like(batch)).softmax(-1)
        out = model(batch)
        loss = F.cross_entropy(out, labels) + F.mse_loss(out.softmax(-1), wanted)
        sgd.zero_grad()
        loss.backward()
        sgd.step()
        with torch.no_grad():
            for mean, new in zip(teacher.parameters(), model.parameters(), strict=True):
                mean.lerp_(new, 0.02)


def sharpness(steps):
    x, y = digits()
    model = mlp(64, 64, 10)
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    for batch, labels in batches(64, steps, x, y):
        F.cross_entropy(model(batch), labels).backward()
        with torch.no_grad():
            norm = torch.stack([one.grad.norm() for one in model.parameters()]).norm()
            moves = [one.grad * 0.05 / norm for one in model.parameters()]
            torch._foreach_add_(list(model.parameters()), moves)
        sgd.zero_grad()
        F.cross_entropy(model(batch), labels).backward()
        with torch.no_grad():
            torch._foreach_sub_(list(model.parameters()), moves)
        sgd.step()
        sgd.zero_grad()


def closure(steps):
    x, y = digits()
    model = mlp(64, 32, 10, act=nn.Tanh)
    lbfgs = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, history_size=5)
    for _ in range(steps // 4):

        def loss_of():
            lbfgs.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        lbfgs.step(loss_of)


def fooling(steps):
    x, y = digits()
    model = mlp(64, 64, 10)
    adam = torch.optim.Adam(model.parameters(), 2e-3)
    for batch, labels in batches(64, 100, x, y):
        adam.zero_grad()
        F.cross_entropy(model(batch), labels).backward()
        adam.step()
    noise = nn.Parameter(torch.zeros(64))
    adam = torch.optim.Adam([noise], 1e-2)
    for batch, labels in batches(64, steps, x, y):
        loss = -F.cross_entropy(model(batch + noise), labels)
        adam.zero_grad()
        loss.backward()
        adam.step()


def likelihood(steps):
    x, _ = digits()
    model = mlp(32, 64, 64)
    adam = torch.optim.Adam(model.parameters(), 1e-3)
    x = x + 0.05 * torch.randn_like(x)
    for (batch,) in batches(64, steps, x):
        mean, scale = model(batch[:, :32]).chunk(2, -1)
        normal = torch.distributions.Normal(mean, F.softplus(scale) + 1e-2)
        loss = -normal.log_prob(batch[:, 32:]).mean()  # becomes negative, as densities are above one
        adam.zero_grad()
        loss.backward()
        adam.step()


def denoising(steps):
    x, _ = digits()
    model = nn.Sequential(nn.Linear(64, 24), nn.Tanh(), nn.Linear(24, 64), nn.Sigmoid())
    adagrad = torch.optim.Adagrad(model.parameters(), 0.05)
    for (batch,) in batches(50, steps, x):
        loss = F.binary_cross_entropy(model(batch + 0.2 * torch.randn_like(batch)), batch)
        adagrad.zero_grad(set_to_none=False)
        loss.backward()
        adagrad.step()


def triplets(steps):
    x, y = digits()
    model = mlp(64, 64, 16)
    adam = torch.optim.Adam(model.parameters(), 1e-3)
    for batch, labels in batches(96, steps, x, y):
        codes = F.normalize(model(batch), dim=-1)
        far = torch.cdist(codes, codes)
        same = labels[:, None] == labels
        hardest = (far * same).amax(1) - (far + 10 * same).amin(1)
        loss = F.relu(hardest + 0.3).mean()
        adam.zero_grad()
        loss.backward()
        adam.step()


def inner_loop(steps):
    model = mlp(1, 32, 32, 1, act=nn.Tanh)
    adam = torch.optim.Adam(model.parameters(), 2e-3)
    for _ in range(steps):
        outer = 0.0
        for _ in range(4):
            shift, x = torch.rand(()) * 6, torch.rand(20, 1) * 6
            weights = dict(model.named_parameters())
            first = F.mse_loss(torch.func.functional_call(model, weights, (x[:10],)), (x[:10] + shift).sin())
            slopes = torch.autograd.grad(first, list(weights.values()), create_graph=True)
            weights = {name: one - 0.05 * slope for (name, one), slope in zip(weights.items(), slopes, strict=True)}
            outer = outer + F.mse_loss(torch.func.functional_call(model, weights, (x[10:],)), (x[10:] + shift).sin())
        adam.zero_grad()
        (outer / 4).backward()
        adam.step()


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.digit, self.even = mlp(64, 64, 32), nn.Linear(32, 10), nn.Linear(32, 1)

    def forward(self, x):
        hidden = self.body(x).relu()
        return self.digit(hidden), self.even(hidden).squeeze(-1)


def multitask(steps):
    x, y = digits()
    model = TwoHeads()
    body = torch.optim.AdamW(model.body.parameters(), 1e-3)
    heads = torch.optim.SGD([*model.digit.parameters(), *model.even.parameters()], 0.05)
    for batch, labels in batches(64, steps, x, y):
        digit, even = model(batch)
        first = F.cross_entropy(digit, labels)
        second = F.binary_cross_entropy_with_logits(even, (labels % 2 == 0).float())
        body.zero_grad()
        heads.zero_grad()
        first.backward(retain_graph=True)
        second.backward()
        body.step()
        heads.step()


DEVELOP = (gan, vae, contrastive, actor_critic, mixture, low_rank, sharpness, fooling, likelihood, wasserstein, closure)
HELD_OUT = (reinforce, q_learning, proximal, distillation, mean_teacher, denoising, triplets, inner_loop, multitask)
PROGRAMS = {one.__name__: one for one in (*DEVELOP, *HELD_OUT)}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--program", choices=PROGRAMS, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    PROGRAMS[options.program](options.steps)


if __name__ == "__main__":
    main()
