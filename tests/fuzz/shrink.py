"""A failure made small: pieces of the program are left out for as long as gaff fails in the same way."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from dataclasses import replace

from fuzz.check import check
from fuzz.program import Part, Program, Stmt
from fuzz.tally import Failure


def shrink(
    program: Program, failure: Failure, seconds: float = 30.0, setting: str | None = None
) -> tuple[Program, Failure]:
    """The smallest program found that still fails in the same way, and its failure.

    Where asking for its address alone does not show it, all addresses are asked for each time.
    """
    end = time.process_time() + seconds
    is_alone = fails_alike(program, failure, is_alone=True, setting=setting) is not None
    is_smaller = True
    while is_smaller and time.process_time() < end:
        is_smaller = False
        for smaller in candidates(program):
            if time.process_time() > end:
                break
            found = fails_alike(smaller, failure, is_alone, setting)
            if found is not None:
                program, failure, is_smaller = smaller, found, True
                break
    return program, failure


def fails_alike(program: Program, failure: Failure, is_alone: bool, setting: str | None = None) -> Failure | None:
    """The failure of the same sort that a program has, asked for at the same address and then at any of its port."""
    tally = check(program, failure, setting=setting) if is_alone else check(program, edits=0, setting=setting)
    for alike in tally.failures:
        if alike.sort == failure.sort and alike.edit == failure.edit:
            return alike
    return None


def candidates(program: Program) -> Iterator[Program]:
    """Programs with a little less: large pieces first."""
    for body in smaller_bodies(program.driver):
        yield replace(program, driver=body)
    for at in reversed(range(len(program.parts))):
        part = program.parts[at]
        for body in smaller_bodies(part.body):
            yield tidy(with_part(program, at, replace(part, body=body)))
        for line in range(len(part.init)):
            init = part.init[:line] + part.init[line + 1 :]
            yield with_part(program, at, replace(part, init=init))
        for init in simpler_children(part):
            yield tidy(with_part(program, at, replace(part, init=init)))
    if not program.is_double:
        yield replace(program, is_double=True)
    if len(program.parts) > 1:  # a part of it as the whole model
        yield tidy(replace(program, parts=program.parts[:-1]))


def smaller_bodies(body: tuple[Stmt, ...]) -> Iterator[tuple[Stmt, ...]]:
    """Without one statement, whose variable is replaced by one that it used; or without the block around some."""
    for at in reversed(range(len(body))):
        one = body[at]
        if one.text.startswith("return") or one.text == "except ValueError:":
            continue
        rest = body[at + 1 :]
        if one.text == "try:":
            yield body[:at] + rest[1:]
            continue
        yield body[:at] + rest
        for name in one.used if one.made else ():
            yield body[:at] + tuple(later.renamed(one.made, name) for later in rest)
        if one.body:
            yield body[:at] + one.body + rest
            for inner in smaller_bodies(one.body):
                if inner:
                    yield (*body[:at], replace(one, body=inner), *rest)
    yield from simpler_lines(body)


SIMPLER = (
    (r"^([hxv]\d+ = )(.*\b([hxv]\d+)\b.*)$", r"\1\3 * 1.0"),
    (r"\.(sin|cos)\(\)\.(sum|mean)", ".sum"),
    (r" \*\* 2\)\.sum", ").sum"),
    (r" \* 1\.0\)", ")"),
    (r"retain_graph=True", ""),
)


def simpler_lines(body: tuple[Stmt, ...]) -> Iterator[tuple[Stmt, ...]]:
    """With one line in a shorter form."""
    for at, one in enumerate(body):
        for pattern, shorter in SIMPLER:
            text = re.sub(pattern, shorter, one.text, count=1)
            if len(text) < len(one.text) and not text.startswith("return"):
                yield (*body[:at], replace(one, text=text), *body[at + 1 :])


def simpler_children(part: Part) -> Iterator[tuple[str, ...]]:
    """With a plain layer, or none at all, in the place of a submodule."""
    for line, text in enumerate(part.init):
        name, _, made = text.partition(" = ")
        for simple in ("nn.Linear(4, 4)", "nn.Identity()"):
            if made.startswith(("Part", "nn.")) and made not in (simple, "nn.Identity()"):
                yield (*part.init[:line], f"{name} = {simple}", *part.init[line + 1 :])


def with_part(program: Program, at: int, part: Part) -> Program:
    return replace(program, parts=(*program.parts[:at], part, *program.parts[at + 1 :]))


def tidy(program: Program) -> Program:
    """Without children that no line uses, and classes that nobody has."""
    parts: list[Part] = []
    wanted = {program.parts[-1].name}
    for part in reversed(program.parts):
        if part.name not in wanted:
            continue
        text = "\n".join(line for one in part.body for line in one.lines(""))
        init = tuple(line for at, line in enumerate(part.init) if is_used(line, text + "\n".join(part.init[at + 1 :])))
        parts.insert(0, replace(part, init=init))
        wanted.update(re.findall(r"\bPart\d+\b", "\n".join(init)))
    return replace(program, parts=tuple(parts))


def is_used(line: str, text: str) -> bool:
    name = re.match(r"self\.\w+(?= = )", line)
    return name is None or re.search(rf"{re.escape(name[0])}\b", text) is not None


def script(program: Program, failure: Failure) -> str:
    """The failure as a script of its own, which prints what was expected and what came."""
    bare = re.sub(r"@\d+", "", failure.address)
    asked = (
        f"{failure.kind if failure.kind == 'several' else 'edit'} {bare} with {failure.edit}"
        if failure.edit
        else f"{'take' if failure.kind == 'taken' else 'capture'} {bare}"
    )
    lines = [f"# ask {asked}", *program.source.strip().split("\n"), "import gaff", "model = build()"]
    lines.append(f"torch.manual_seed({program.seed + 1})")
    address = bare
    if failure.kind == "several":
        lines.append("from fuzz.several import Asked")
        lines.append(f"asked = Asked(*{failure.edit})")
        lines.append("with asked.opened(model) as got: seen = drive(model)")
        lines.append(
            "print([got.told(one) for one in asked.captured], {name: p.grad for name, p in model.named_parameters()})"
        )
    elif failure.edit:
        lines.append(f"with gaff.edit(model, {{{address!r}: {failure.edit}}}): seen = drive(model)")
        lines.append(f"print('expected', {failure.expected!r})")
        lines.append("print('got', [*seen, {name: p.grad for name, p in model.named_parameters()}])")
    elif failure.kind == "taken":
        lines.append(
            f"print('expected', {failure.expected!r}, 'got', gaff.take(model, {address!r})(torch.randn(2, 4)))"
        )
    else:
        lines.append(f"with gaff.capture(model, gaff.maybe({address!r})) as got: seen = drive(model)")
        lines.append(f"print('expected', {failure.expected!r})")
        lines.append(f"print('got', got.all({address!r}))")
        lines.append("print(got.receipt)")
    return "\n".join(lines) + "\n"
