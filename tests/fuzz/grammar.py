"""The productions: each a small function that adds a few statements to a forward, or to the driver.

``@forward(weight)`` and ``@driver(weight)`` make a function a production. It is given the ``Body`` to add to; ``pick``
is one of the variables that are there, ``new`` a name for another, ``child`` a submodule of its own. Everything is
drawn from the one ``random.Random`` of the seed.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from fuzz.program import Part, Program, Stmt

FORWARD: dict[str, tuple[float, Callable[[Body], None]]] = {}
DRIVER: dict[str, tuple[float, Callable[[Body], None]]] = {}


def forward(weight: float):
    def note(make):
        FORWARD[make.__name__] = weight, make
        return make

    return note


def driver(weight: float):
    def note(make):
        DRIVER[make.__name__] = weight, make
        return make

    return note


@dataclass
class Maker:
    """A program on its way: its classes so far, and what it must not hold as well."""

    rng: random.Random
    parts: list[Part] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)
    is_double: bool = True


@dataclass
class Body:
    """A forward, or the driver, on its way."""

    maker: Maker
    depth: int
    variables: list[str]
    init: list[str] = field(default_factory=list)
    statements: list[Stmt] = field(default_factory=list)
    used: int = 0
    kind: str = ""
    is_driver: bool = False

    @property
    def rng(self) -> random.Random:
        return self.maker.rng

    def pick(self) -> str:
        """One of the variables: mostly the latest."""
        return self.variables[-1] if self.rng.random() < 0.6 else self.rng.choice(self.variables)

    def number(self) -> int:
        self.used += 1
        return self.used

    def add(self, text: str, *body: Stmt) -> None:
        self.statements.append(Stmt(text, body, self.kind))

    def let(self, text: str) -> str:
        """A new variable with this value."""
        name = f"h{self.number()}"
        self.add(f"{name} = {text}")
        self.variables.append(name)
        return name

    def child(self, text: str) -> str:
        """A submodule, or an earlier one with the same text (shared), by the expression that names it."""
        shared = [line.split(" = ")[0] for line in self.init if line.endswith(f" = {text}")]
        if shared and self.rng.random() < 0.15:
            return shared[0]
        name = f"self.m{self.number()}"
        self.init.append(f"{name} = {text}")
        return name

    def part(self, make: Callable[[Body], None] | None = None, args: str = "h0", result: str = "") -> str:
        """A submodule of a new class of the program, or of one that is there already."""
        plain = [part for part in self.maker.parts if part.args == "h0" and part.body[-1].text in PLAIN]
        if make is None and args == "h0" and not result and plain and self.rng.random() < 0.2:
            return self.child(f"{self.rng.choice(plain).name}()")
        return self.child(f"{make_part(self.maker, self.depth + 1, args, result, make).name}()")


PLAIN = tuple(f"return h{number}" for number in range(60))
RESULTS = {"pair": "return {a}, {b}", "dict": "return dict(a={a}, b={b})", "object": "return Pair({a}, {b})"}


def make_part(maker: Maker, depth: int, args: str, result: str, make: Callable[[Body], None] | None) -> Part:
    """A class with a few random statements, or with those that ``make`` adds."""
    names = [name for name in ("h0", "h90") if name in args]
    body = Body(maker, depth, names)
    if make is not None:
        make(body)
    else:
        for _ in range(maker.rng.choice((1, 1, 2, 3)) if depth else maker.rng.choice((2, 3, 4, 5))):
            add_one(body, FORWARD)
    if not body.statements or not body.statements[-1].text.startswith("return"):
        body.kind = "result"
        body.add((RESULTS.get(result) or "return {a}").format(a=body.variables[-1], b=body.pick()))
    part = Part(f"Part{len(maker.parts)}", args, tuple(body.init), tuple(body.statements))
    maker.parts.append(part)
    return part


def add_one(body: Body, table: dict[str, tuple[float, Callable[[Body], None]]]) -> None:
    names = [name for name in table if body.depth < 3 or name not in DEEP]
    name = body.rng.choices(names, [table[one][0] for one in names])[0]
    before, body.kind = body.kind, name
    table[name][1](body)
    body.maker.kinds.append(name)
    body.kind = before


DEEP = ("part", "tuples", "structures", "keywords", "recursion", "reentrant", "checkpointed", "thread", "given_twice",
        "raising", "without_grad_part", "enable_grad_inside", "late_part", "writes_input", "straight_through",
        "returns_input", "only_looks", "closure_part", "view_part", "two_inputs")  # fmt: skip

# ---------------------------------------------------------------- modules


@forward(6)
def layer(body):
    kinds = ["nn.Linear(4, 4)"] * 4 + [
        "nn.LayerNorm(4)",
        "nn.BatchNorm1d(4)",
        "nn.PReLU()",
        "nn.Linear(4, 4, bias=False)",
    ]
    body.let(f"{body.child(body.rng.choice(kinds))}({body.pick()})")


@forward(3)
def activation(body):
    kinds = ["nn.Tanh()", "nn.ReLU()", "nn.SiLU()", "nn.GELU()", "nn.Sigmoid()", "nn.Softmax(1)", "nn.Dropout(0.3)"]
    body.let(f"{body.child(body.rng.choice(kinds))}({body.pick()})")


@forward(2)
def activation_in_place(body):
    body.let(f"{body.child('nn.ReLU(inplace=True)')}({body.pick()})")


@forward(2)
def sequential(body):
    inner = body.rng.choice(["nn.Tanh()", "nn.ReLU(inplace=True)", "nn.ReLU()", "nn.Flatten(), nn.ReLU(inplace=True)"])
    body.let(f"{body.child(f'nn.Sequential(nn.Linear(4, 4), {inner}, nn.Linear(4, 4))')}({body.pick()})")


@forward(1)
def module_list(body):
    layers = body.child("nn.ModuleList([nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)])")
    name = body.let(f"{body.pick()} * 1.0")
    body.add(f"for layer in {layers}:", Stmt(f"{name} = layer({name})", (), body.kind))


@forward(1)
def convolution(body):
    conv, flat = body.child("nn.Conv2d(1, 1, 3, padding=1)"), body.child("nn.Flatten()")
    body.let(f"{flat}({conv}({body.pick()}.reshape(2, 1, 2, 2)))")


@forward(1)
def flatten_then_write(body):
    conv, flat = body.child("nn.Conv2d(1, 1, 3, padding=1)"), body.child("nn.Flatten()")
    name = body.let(f"{flat}({conv}({body.pick()}.reshape(2, 1, 2, 2)))")
    body.add(f"{name}.{body.rng.choice(['mul_(2.0)', 'relu_()', 'add_(1.0)'])}")


@forward(1)
def attention(body):
    mha = body.child("nn.MultiheadAttention(4, 2, batch_first=True)")
    q, k, v = body.pick(), body.pick(), body.pick()
    body.let(f"{mha}({q}[:, None], {k}[:, None], {v}[:, None], need_weights=False)[0][:, 0]")


@forward(0.7)
def recurrent(body):
    body.let(f"{body.child('nn.GRU(4, 4, batch_first=True)')}({body.pick()}[:, None])[0][:, 0]")


@forward(0.7)
def embedding(body):
    table = body.child("nn.Embedding(5, 4)")
    body.let(f"{body.pick()} + {table}(torch.tensor([1, 3]))")


@forward(0.4)
def transformer(body):
    layer = body.child("nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)")
    body.let(f"{layer}({body.pick()}[:, None])[:, 0]")


@forward(0.4)
def written_buffer(body):
    """A buffer that each run changes."""
    name = f"b{body.number()}"
    body.init.append(f"self.register_buffer('{name}', torch.ones(4))")
    body.add(f"self.{name}.mul_(0.9)")
    body.let(f"{body.pick()} + self.{name}")


@forward(0.7)
def parametrised(body):
    body.let(f"{body.child('nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))')}({body.pick()})")


@forward(1.5)
def tied(body):
    first, second = body.child("nn.Linear(4, 4)"), body.child("nn.Linear(4, 4)")
    if first != second:
        body.init.append(f"{second}.weight = {first}.weight")
    body.let(f"{second}({first}({body.pick()}))")


@forward(1)
def identity(body):
    body.let(f"{body.child('nn.Identity()')}({body.pick()})")


@forward(1)
def own_weight(body):
    name = body.child("nn.Parameter(torch.randn(4, 4))")
    body.let(f"{body.pick()} @ {name}")


@forward(0.5)
def weight_held_elsewhere(body):
    first = body.child("nn.Linear(4, 4)")
    held = f"self.held{body.number()}"
    body.init.append(f"{held} = [{first}.weight]")
    body.let(f"{first}({body.pick()}) + F.linear({body.pick()}, {held}[0])")


@forward(4)
def part(body):
    body.let(f"{body.part()}({body.pick()})")


@forward(1.5)
def again(body):
    """A module that was called before, called again."""
    called = [
        line.split(" = ")[0] for line in body.init if line.split(" = ")[-1].startswith(("nn.Linear(4", "nn.Tanh"))
    ]
    if called:
        body.let(f"{body.rng.choice(called)}({body.pick()})")


# ---------------------------------------------------------------- functions


@forward(4)
def function(body):
    one, other = body.pick(), body.pick()
    texts = ["F.relu({a})", "torch.sigmoid({a})", "{a} * {b}", "{a} + {b}", "{a} * 2.0", "{a} - {b}", "1.0 - {a}",
             "torch.where({a} > 0, {a}, {b} * 0.1)", "F.softmax({a}, 1)", "{a} + {b}", "torch.tanh({a})",
             "torch.cat([{a}[:, :2], {b}[:, 2:]], 1)", "torch.stack([{a}, {b}]).mean(0)", "F.gelu({a})",
             "F.layer_norm({a}, (4,))", "F.dropout({a}, 0.3)", "torch.maximum({a}, {b})", "{a}.flip(1)",
             "{a} + {b}.mean(0)"]  # fmt: skip
    body.let(body.rng.choice(texts).format(a=one, b=other))


@forward(2)
def residual(body):
    body.let(f"{body.variables[-1]} + {body.rng.choice(body.variables)}")


@forward(2.5)
def write(body):
    """A write in place into what is there, or into a copy of it."""
    name = body.pick() if body.rng.random() < 0.6 else body.let(f"{body.pick()} * 1.5")
    other = body.pick()
    texts = ["{a}.mul_(2.0)", "{a}.add_({b})", "{a} += {b}", "{a}[:, :2] = {b}[:, 2:]", "{a}[:, 1:3].mul_(0.5)",
             "F.relu({a}, inplace=True)", "{a}.clamp_(-0.5, 0.5)", "{a}.mul_({b})", "{a}[:, 0] = 1.0", "{a}.tanh_()"]  # fmt: skip
    body.add(body.rng.choice(texts).format(a=name, b=other))


@forward(2)
def view(body):
    texts = [
        "{a}.view(2, 4)",
        "{a}.T.T",
        "{a}[:]",
        "{a}.view_as({a})",
        "{a}.unsqueeze(0)[0]",
        "{a}.reshape(4, 2).view(2, 4)",
    ]
    body.let(body.rng.choice(texts).format(a=body.pick()))


@forward(1.5)
def narrow_view(body):
    """A part of a tensor: used, and perhaps written to."""
    v = f"v{body.number()}"
    base = body.pick()
    body.add(f"{v} = {base}[:, :2]")
    if body.rng.random() < 0.4:
        body.add(f"{v}.{body.rng.choice(['mul_(2.0)', 'add_(1.0)', 'relu_()'])}")
    if body.rng.random() < 0.5:
        body.let(f"{body.child('nn.Linear(2, 4)')}({v})")
    else:
        body.let(f"torch.cat([{v}, {v} * 2.0], 1)")


@forward(1)
def custom_function(body):
    body.let(f"{body.rng.choice(['Cube', 'Alias'])}.apply({body.pick()})")


@forward(0.5)
def cast(body):
    if body.maker.is_double:
        body.let(f"{body.pick()}.float().double()")
    else:
        body.let(f"{body.pick()}.double().float()")


# ---------------------------------------------------------------- structures


@forward(1.5)
def tuples(body):
    inner = body.part(args="h0", result=body.rng.choice(["pair", "pair", "dict", "object"]))
    made = body.maker.parts[-1].body[-1].text
    o = f"o{body.number()}"
    body.add(f"{o} = {inner}({body.pick()})")
    first, second = (
        ("['a']", "['b']") if "dict" in made else (".first", ".second") if "Pair" in made else ("[0]", "[1]")
    )
    body.let(f"{o}{first} * 1.0")
    if body.rng.random() < 0.7:
        body.let(f"{o}{second} * 0.5 + {body.variables[-1]}")


@forward(1)
def structures(body):
    """A module that is given a tuple or a dict."""
    if body.rng.random() < 0.5:
        inner = body.part(lambda one: one.let("h0[0] * h0[1]"), args="h0")
        body.let(f"{inner}(({body.pick()}, {body.pick()} * 2.0))")
    else:
        inner = body.part(lambda one: one.let("h0['a'] * 2.0 + h0['b']"), args="h0")
        body.let(f"{inner}(dict(a={body.pick()}, b={body.pick()} * 2.0))")


@forward(1.5)
def two_inputs(body):
    inner = body.part(args="h0, h90")
    one, other = body.pick(), body.pick()
    if one == other:
        other = body.let(f"{other} * 1.0")
    body.let(f"{inner}({one}, {other})" if body.rng.random() < 0.5 else f"{inner}({one}, h90={other})")


@forward(0.5)
def given_twice(body):
    inner, name = body.part(args="h0, h90"), body.pick()
    body.let(f"{inner}({name}, {name})")


# ---------------------------------------------------------------- grad modes


@forward(1)
def without_grad(body):
    body.let(f"{body.pick()} * 1.0")
    name = f"h{body.number()}"
    source = body.pick()
    inner = body.rng.choice(["{a} * 3.0", "{a}.view(2, 4)", "Alias.apply({a})", "{a}[:]"])
    body.add("with torch.no_grad():", Stmt(f"{name} = {inner.format(a=source)}", (), body.kind))
    body.let(f"{body.pick()} + {name}")


@forward(1)
def without_grad_part(body):
    name = f"h{body.number()}"
    body.add("with torch.no_grad():", Stmt(f"{name} = {body.part()}({body.pick()})", (), body.kind))
    body.let(f"{body.child('nn.Linear(4, 4)')}({name})")


@forward(0.7)
def enable_grad_inside(body):
    def inner(one):
        first, second = one.child("nn.Linear(4, 4)"), one.child("nn.Linear(4, 4)")
        name = f"h{one.number()}"
        one.add("with torch.enable_grad():", Stmt(f"{name} = {first}(h0)", (), one.kind))
        one.let(f"{second}(h0) + {name} * 0.5")

    call = f"{body.part(inner)}"
    one = body.pick()
    body.let(f"checkpoint({call}, {one}, use_reentrant=True)" if body.rng.random() < 0.7 else f"{call}({one})")


@forward(1)
def detached(body):
    one = body.pick()
    body.let(body.rng.choice([f"{one}.detach() * {body.pick()}", f"{body.pick()} + {one}.detach()"]))


@forward(0.7)
def write_without_grad(body):
    name = body.let(f"{body.child('nn.Linear(4, 4)')}({body.pick()})")
    body.add("with torch.no_grad():", Stmt(f"{name}.clamp_(-0.3, 0.3)", (), body.kind))


@forward(0.7)
def straight_through(body):
    """A module that writes into its input without grad, and returns it."""

    def inner(one):
        one.add("with torch.no_grad():", Stmt("h0.clamp_(-0.1, 0.1)", (), one.kind))

    body.let(f"{body.part(inner)}({body.child('nn.Linear(4, 4)')}({body.pick()}))")


@forward(0.7)
def late_part(body):
    """A module whose output has no grad, which is then changed by something that has."""
    name = body.let(f"{body.part(lambda one: one.let('torch.ones_like(h0)'))}({body.pick()})")
    body.add(f"{name}.{body.rng.choice(['mul_', 'add_'])}({body.child('nn.Linear(4, 4)')}({body.variables[0]}))")


@forward(0.5)
def late_grad(body):
    name = body.let(f"{body.child('nn.Linear(4, 4)')}({body.pick()}).detach().requires_grad_()")
    body.let(f"{name} * {name}")


@forward(0.5)
def only_looks(body):
    """A view without grad of what is changed later, given to a module that only looks at it."""
    base = body.let(f"{body.child('nn.Linear(4, 4)')}({body.pick()})")
    v = f"v{body.number()}"
    looks = body.part(lambda one: one.add("return h0.detach().abs()"))
    body.add("with torch.no_grad():", Stmt(f"{v} = {base}[:, :1]", (), body.kind))
    body.add(f"{base}.mul_(2.0)")
    body.add(f"{looks}({v})")


# ---------------------------------------------------------------- checkpoints, threads, control flow


@forward(1)
def checkpointed(body):
    body.let(f"checkpoint({body.part()}, {body.pick()}, use_reentrant=False)")


@forward(1)
def reentrant(body):
    body.let(f"checkpoint({body.part()}, {body.pick()}, use_reentrant=True)")


@forward(0.4)
def thread(body):
    one = body.pick()
    body.let(f"in_thread({body.part()}, {one}) + {body.child('nn.Linear(4, 4)')}({one})")


@forward(0.3)
def op_in_thread(body):
    one = body.pick()
    body.let(f"in_thread(lambda: {one} * 3.0) + {one} * 5.0")


@forward(0.7)
def branch(body):
    one, name = body.pick(), body.let(f"{body.pick()} * 1.0")
    test = body.rng.choice([f"{one}.sum() > 0", "self.training", f"{one}[0, 0] > 0.1"])
    body.add(f"if {test}:", Stmt(f"{name} = {body.child('nn.Linear(4, 4)')}({name})", (), body.kind))


@forward(0.7)
def loop(body):
    inner = body.rng.choice(["nn.Linear(4, 4)", "nn.Tanh()"])
    name = body.let(f"{body.pick()} * 1.0")
    text = f"{name} = {body.child(inner)}({name})"
    body.add(f"for _ in range({body.rng.choice((2, 3))}):", Stmt(text, (), body.kind))


@forward(0.5)
def recursion(body):
    def inner(one):
        name = one.let(f"{one.child('nn.Linear(4, 4)')}(h0)")
        one.add("if depth:", Stmt(f"{name} = self({name}, depth - 1) * 0.5", (), one.kind))

    body.let(f"{body.part(inner, args='h0, depth=1')}({body.pick()})")


@forward(0.5)
def raising(body):
    def inner(one):
        one.let(f"{one.child('nn.Linear(4, 4)')}(h0)")
        one.add("raise ValueError")

    name = body.let(f"{body.pick()} * 1.0")
    call = Stmt(f"{name} = {body.part(inner)}({name})", (), body.kind)
    body.add("try:", call)
    body.add("except ValueError:", Stmt(f"{name} = {name} * 2.0", (), body.kind))


@forward(1.5)
def autocast(body):
    if body.maker.is_double:
        return
    name = f"h{body.number()}"
    one = body.pick()
    body.add(
        "with torch.autocast('cpu', torch.bfloat16):",
        Stmt(f"{name} = {body.child('nn.Linear(4, 4)')}({one})", (), body.kind),
    )
    body.let(f"{name}.float()")


# ---------------------------------------------------------------- odd modules


@forward(0.7)
def writes_input(body):
    texts = ["h0.mul_(2.0)", "h0.add_(1.0)", "h0[:, :2] = 0.5", "h0.relu_()"]
    text = body.rng.choice(texts)
    inner = body.part(lambda one: one.add(text))
    body.let(f"{inner}({body.pick()} * 1.0)" if body.rng.random() < 0.5 else f"{inner}({body.pick()})")


@forward(0.5)
def returns_input(body):
    inner = body.part(lambda one: one.let(f"{one.child('nn.Linear(4, 4)')}(h0)") and one.add("return h0"))
    body.let(f"{inner}({body.pick()})")


@forward(0.7)
def view_part(body):
    """A module that returns a view of its input, and perhaps a write into it."""
    text = body.rng.choice(["h0.view(2, 4)", "h0[:]", "Alias.apply(h0)", "h0.T.T"])
    name = body.let(f"{body.part(lambda one: one.let(text))}({body.pick()})")
    if body.rng.random() < 0.4:
        body.add(f"{name}.mul_(2.0)")


@forward(0.4)
def hook_changes_value(body):
    """A user's own forward hook that returns something else."""
    name = body.child("nn.Linear(4, 4)")
    body.init.append(f"{name}.register_forward_hook(lambda mod, given, out: out * 1.5)")
    body.let(f"{name}({body.pick()})")


@forward(0.5)
def unused(body):
    body.add(f"{body.child('nn.Linear(4, 4)')}({body.pick()})")


# ---------------------------------------------------------------- the driver


def make_input(body: Body, requires_grad: bool | None = None) -> str:
    name = f"x{body.number()}"
    double = ".double()" if body.maker.is_double else ""
    wants = body.rng.random() < 0.6 if requires_grad is None else requires_grad
    body.add(f"{name} = torch.randn(2, 4){double}{'.requires_grad_()' if wants else ''}")
    body.variables.append(name)
    return name


def call_model(body: Body, x: str | None = None) -> str:
    """A call of the model, with an input that there is or a new one."""
    xs = [name for name in body.variables if name.startswith("x")]
    x = x or (body.rng.choice(xs) if xs and body.rng.random() < 0.6 else make_input(body))
    name = f"y{body.number()}"
    body.add(f"{name} = model({x}{' * 1.0' if body.rng.random() < 0.3 else ''})")
    body.add(f"seen.append({name})")
    body.variables.append(name)
    return name


def loss_of(body: Body, y: str) -> str:
    return body.rng.choice(["{y}.sin().sum()", "{y}.sum()", "({y} ** 2).sum()", "{y}.cos().mean()"]).format(y=y)


@driver(5)
def one_backward(body):
    y = call_model(body)
    body.add(f"{loss_of(body, y)}.backward()")


@driver(1)
def two_backwards(body):
    y = call_model(body)
    loss = f"l{body.number()}"
    body.add(f"{loss} = {loss_of(body, y)}")
    body.add(f"{loss}.backward(retain_graph=True)")
    body.add(f"{loss}.backward()")


@driver(1)
def several_losses(body):
    y = call_model(body)
    body.add(f"{loss_of(body, y)}.backward(retain_graph=True)")
    body.add(f"({y} ** 3).sum().backward()")


@driver(1)
def two_runs_one_loss(body):
    one, other = call_model(body), call_model(body)
    body.add(f"({loss_of(body, one)} + ({other} ** 2).sum()).backward()")


@driver(0.7)
def other_order(body):
    one, other = call_model(body), call_model(body)
    body.add(f"{loss_of(body, other)}.backward()")
    body.add(f"{loss_of(body, one)}.backward()")


@driver(1)
def penalty(body):
    x = make_input(body, True)
    y, g = call_model(body, x), f"g{body.number()}"
    body.add(f"{g} = torch.autograd.grad({y}.sum(), {x}, create_graph=True)[0]")
    body.add(f"({loss_of(body, y)} + ({g} ** 2).sum()).backward()")


@driver(0.7)
def grad_of_input(body):
    x = make_input(body, True)
    y = call_model(body, x)
    body.add(f"seen.extend(torch.autograd.grad({loss_of(body, y)}, [{x}]))")


@driver(0.7)
def grad_of_parameters(body):
    y = call_model(body)
    body.add(f"seen.extend(torch.autograd.grad({loss_of(body, y)}, list(model.parameters()), allow_unused=True))")


@driver(0.7)
def step_between(body):
    y = call_model(body)
    body.add(f"{loss_of(body, y)}.backward()")
    step = Stmt("if p.grad is not None:", (Stmt("p.sub_(0.1 * p.grad)", (), body.kind),), body.kind)
    body.add("with torch.no_grad():", Stmt("for p in model.parameters():", (step,), body.kind))
    body.add("model.zero_grad()")
    y = call_model(body)
    body.add(f"{loss_of(body, y)}.backward()")


@driver(1)
def features(body):
    """A loss on what the user's own hook has collected."""
    if "reentrant" in body.maker.kinds or "enable_grad_inside" in body.maker.kinds:
        return
    feats, inner = f"o{body.number()}", child_of_root(body)
    body.add(f"{feats} = []")
    body.add(f"hook = {inner}.register_forward_hook(lambda mod, given, out: {feats}.append(out))")
    body.add(f"model({make_input(body)})")
    body.add(f"model({make_input(body)})")
    body.add("hook.remove()")
    how = body.rng.choice(["({f}[0] - {f}[1]).pow(2).sum()", "{f}[0].sin().sum()", "({f}[0] * {f}[1]).sum()"])
    body.add(f"{how.format(f=feats)}.backward()")


@driver(0.5)
def tensor_hook(body):
    y = call_model(body)
    body.add(f"{y}.register_hook(lambda g: g * 2.0)")
    body.add(f"{loss_of(body, y)}.backward()")


@driver(0.4)
def copied(body):
    """A copy that is made, and used, while a session is open: none of it is the model's."""
    y = f"y{body.number()}"
    copy = body.rng.choice(["deepcopy", "pickled"])
    body.add(f"{y} = {copy}(model)({make_input(body)})")
    body.add(f"seen.append({y})")
    body.add(f"{loss_of(body, y)}.backward()")
    one_backward(body)


@driver(0.3)
def replaced(body):
    """Another module in the place of one, between two runs."""
    between_runs(body, "{0} = new_linear({0})")


@driver(0.3)
def weight_replaced(body):
    """Another parameter in the place of one, between two runs."""
    between_runs(body, "{0}.weight = new_weight({0}.weight)")


@driver(0.3)
def cast_between(body):
    """The model computes in another type from here on: its parameters are the same, their memory is not."""
    one_backward(body)
    body.add("cast(model)")
    x, y = (f"{letter}{body.number()}" for letter in "xy")
    body.add(f"{x} = torch.randn(2, 4).requires_grad_()")
    body.add(f"{y} = model({x})")
    body.add(f"seen.append({y})")
    body.add(f"{loss_of(body, y)}.backward()")


@driver(0.3)
def without_backward(body):
    body.add("with torch.no_grad():", Stmt(f"seen.append(model({make_input(body, False)}))", (), body.kind))


@driver(0.4)
def evaluation(body):
    body.add("model.eval()")
    y = call_model(body)
    body.add(f"{loss_of(body, y)}.backward()")


def between_runs(body: Body, text: str) -> None:
    """Two runs, and something that is done to one of the root's linear layers in between."""
    one_backward(body)
    linear = [name for name in children_of_root(body) if name.endswith("nn.Linear(4, 4)")]
    if linear:
        body.add(text.format(body.rng.choice(linear).split(" = ")[0].replace("self.", "model.")))
        one_backward(body)


def children_of_root(body: Body) -> list[str]:
    """The lines that make submodules of the root whose output is one tensor."""
    kinds = ("nn.Linear", "nn.Tanh", "nn.Sequential", "Part")
    return [line for line in body.maker.parts[-1].init if line.split(" = ")[-1].startswith(kinds)]


def child_of_root(body: Body) -> str:
    """A submodule of the root, as the driver names it."""
    names = [line.split(" = ")[0].replace("self.", "model.") for line in children_of_root(body)]
    return body.rng.choice(names) if names else "model"


def generate(seed: int) -> Program:
    """The program of a seed."""
    rng = random.Random(seed)
    maker = Maker(rng, is_double=rng.random() < 0.9)
    make_part(maker, 0, "h0", "", None)
    body = Body(maker, 0, [], is_driver=True)
    for _ in range(rng.choice((1, 1, 1, 2))):
        add_one(body, DRIVER)
    for name in (one for one in body.variables if one.startswith("x")):
        body.add(f"seen.append({name}.grad)")
    return Program(seed, tuple(maker.parts), tuple(body.statements), maker.is_double, tuple(maker.kinds))
