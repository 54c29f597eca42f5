"""The house, measured from the code as it is: rooms, imports, circles, sizes, docstrings.

``make house`` prints the table and draws ``docs/house.svg``; ``test_architecture.py`` holds the project to it.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "gaff"

# From the top floor down: what stands on one floor imports from its own rooms, and from the floors below.
FLOORS = (
    ("cli", "__main__"),
    ("__init__", "api"),
    ("integrations",),
    ("training",),
    ("inspection",),
    ("harvesting",),
    ("sessions",),
    ("engine",),
    ("views",),
    ("edits", "keep"),
    ("record",),
    ("address",),
    ("compat",),
    ("errors", "version"),
)
MOST_LINES = 46_700
MOST_OF_CORE = 15_875
FACING_OTHERS = ("training/watch/", "cli/")  # somebody else's program runs there: whatever it raises is caught


@dataclass(frozen=True)
class File:
    """One file of the source, parsed."""

    path: Path
    text: str
    tree: ast.Module

    @property
    def name(self) -> str:
        """``engine/clock.py``."""
        return self.path.relative_to(SOURCE).as_posix()

    @property
    def module(self) -> str:
        """``gaff.engine.clock``."""
        parts = ("gaff", *self.path.relative_to(SOURCE).with_suffix("").parts)
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @property
    def room(self) -> str:
        """The folder right under ``src/gaff``, or the name of a loose file."""
        return self.path.relative_to(SOURCE).parts[0].removesuffix(".py")

    @property
    def floor(self) -> int:
        """The number of its floor, from the top; raises StopIteration for a room that is on none."""
        return next(number for number, rooms in enumerate(FLOORS) if self.room in rooms)


@cache
def files() -> tuple[File, ...]:
    """Every Python file of the package, in alphabetical order."""
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        found.append(File(path, text, ast.parse(text)))
    return tuple(found)


@cache
def imports() -> dict[str, frozenset[str]]:
    """By the name of a file: the files that it imports from, also for types only and inside functions."""
    by_module = {file.module: file.name for file in files()}
    found: dict[str, frozenset[str]] = {}
    for file in files():
        wanted: set[str] = set()
        for node in ast.walk(file.tree):
            if isinstance(node, ast.Import):
                wanted |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                inner = {f"{node.module}.{alias.name}" for alias in node.names}
                wanted |= {one if one in by_module else node.module for one in inner}
        found[file.name] = frozenset(by_module[one] for one in wanted if one in by_module) - {file.name}
    return found


def circles() -> list[list[str]]:
    """Files that import each other in a loop, whatever for; each loop sorted."""
    graph, order, seen = imports(), [], set()
    for start in graph:
        for name in _leaving(graph, start, seen):
            order.append(name)
    back = defaultdict(set)
    for name, targets in graph.items():
        for target in targets:
            back[target].add(name)
    found, seen = [], set()
    for start in reversed(order):
        loop = sorted(_leaving(back, start, seen))
        if len(loop) > 1:
            found.append(loop)
    return found


def _leaving(graph: dict[str, Iterable[str]], start: str, seen: set[str]) -> Iterator[str]:
    """Names reached from ``start`` and not seen before, each after all that it leads to."""
    if start in seen:
        return
    seen.add(start)
    waiting = [(start, iter(graph.get(start, ())))]
    while waiting:
        name, onward = waiting[-1]
        following = next((one for one in onward if one not in seen), None)
        if following is None:
            waiting.pop()
            yield name
        else:
            seen.add(following)
            waiting.append((following, iter(graph.get(following, ()))))


def upward() -> list[str]:
    """Imports from a lower floor to a higher one, ``file -> file``."""
    floor = {file.name: file.floor for file in files()}
    return [f"{name} -> {other}" for name, others in imports().items() for other in sorted(others)
            if floor[other] < floor[name]]  # fmt: skip


def hidden() -> list[str]:
    """Imports by a text, which no reader and no tool sees.

    The face alone may, and says which; ``compat/extras.py`` imports packages of others.
    """
    found = []
    for file in files():
        for node in ast.walk(file.tree):
            called = node.func if isinstance(node, ast.Call) else None
            name = getattr(called, "attr", getattr(called, "id", ""))
            if name in ("import_module", "__import__") and file.name not in ("__init__.py", "compat/extras.py"):
                first = ast.unparse(node.args[0])
                if "gaff" in first or not isinstance(node.args[0], ast.Constant):
                    found.append(f"{file.name}:{node.lineno}")
    return found


def docstring_lines(tree: ast.AST) -> set[int]:
    """The lines that docstrings take."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and body:
            first = body[0]
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                lines.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return lines


def code_lines(text: str, tree: ast.AST | None = None) -> int:
    """Lines that hold code: no blank, comment or docstring."""
    skipped = docstring_lines(tree or ast.parse(text))
    lines = enumerate(text.splitlines(), 1)
    return sum(
        number not in skipped and bool(line.strip()) and not line.strip().startswith("#") for number, line in lines
    )


def classes() -> Iterator[tuple[File, ast.ClassDef]]:
    """Every class of the source, nested ones too."""
    for file in files():
        for node in ast.walk(file.tree):
            if isinstance(node, ast.ClassDef):
                yield file, node


def functions() -> Iterator[tuple[File, ast.FunctionDef]]:
    """Every function and method of the source."""
    for file in files():
        for node in ast.walk(file.tree):
            if isinstance(node, ast.FunctionDef):
                yield file, node


def attributes(node: ast.ClassDef) -> set[str]:
    """What the instances of a class hold: names assigned to ``self``, and fields."""
    found = {item.target.id for item in node.body if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
             and "ClassVar" not in ast.unparse(item.annotation)}  # fmt: skip
    for inner in ast.walk(node):
        is_set = isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store)
        if is_set and isinstance(inner.value, ast.Name) and inner.value.id == "self":
            found.add(inner.attr)
    return found


def size(node: ast.AST) -> int:
    """Lines from the first to the last."""
    return (node.end_lineno or 0) - node.lineno + 1  # type: ignore[attr-defined]


def without_docstring() -> list[str]:
    """Public modules, classes, functions, methods and properties that say nothing of themselves."""
    found = [file.name for file in files() if not ast.get_docstring(file.tree)]
    for file in files():
        for node in file.tree.body:
            if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and not node.name.startswith("_"):
                is_overload = any("overload" in ast.unparse(one) for one in node.decorator_list)
                if not ast.get_docstring(node) and not is_overload:
                    found.append(f"{file.name}: {node.name}")
                inner = node.body if isinstance(node, ast.ClassDef) else []
                found += [
                    f"{file.name}: {node.name}.{item.name}"
                    for item in inner
                    if isinstance(item, ast.FunctionDef) and not item.name.startswith("_") and not ast.get_docstring(item)
                    and not any("overload" in ast.unparse(one) or ".setter" in ast.unparse(one) for one in item.decorator_list)
                ]  # fmt: skip
    return found


def twins() -> dict[str, list[str]]:
    """Names of public classes that live in several files."""
    places = defaultdict(list)
    for file, node in classes():
        if not node.name.startswith("_"):
            places[node.name].append(file.name)
    return {name: where for name, where in places.items() if len(where) > 1}


def blanket() -> list[str]:
    """``except Exception`` and wider, outside of the rooms that face somebody else's program, if it does not raise."""
    found = []
    for file in files():
        for node in ast.walk(file.tree):
            if isinstance(node, ast.ExceptHandler) and not file.name.startswith(FACING_OTHERS):
                caught = (
                    {one.strip() for one in ast.unparse(node.type).strip("()").split(",")}
                    if node.type
                    else {"BaseException"}
                )
                raises = any(isinstance(inner, ast.Raise) for inner in ast.walk(node))
                if caught & {"Exception", "BaseException"} and not raises:
                    found.append(f"{file.name}:{node.lineno}")
    return found


def measures() -> list[tuple[str, str, str]]:
    """What is measured, what it is now, what it may be."""
    lines = sum(len(file.text.splitlines()) for file in files())
    told = sum(len(docstring_lines(file.tree)) for file in files())
    rooms = {file.room for file in files() if file.name.count("/")}
    loose = [file for file in files() if not file.name.count("/")]
    largest = max(classes(), key=lambda pair: size(pair[1]))
    widest = max(classes(), key=lambda pair: len(attributes(pair[1])))
    longest = max(functions(), key=lambda pair: code_lines(ast.unparse(pair[1])))
    by_room: Counter[str] = Counter()
    all_lines: Counter[str] = Counter()
    told_lines: Counter[str] = Counter()
    for file in files():
        by_room[file.room] += code_lines(file.text, file.tree)
        all_lines[file.room] += len(file.text.splitlines())
        told_lines[file.room] += len(docstring_lines(file.tree))
    return [
        ("circles", str(len(circles())), "0"),
        ("imports upward", str(len(upward())), "0"),
        ("imports hidden in a text", str(len(hidden())), "0"),
        ("rooms", str(len(rooms)), "<= 12"),
        ("loose files", str(len(loose)), "<= 8"),
        ("largest class, lines", f"{size(largest[1])}  {largest[0].name}: {largest[1].name}", "<= 250"),
        ("most attributes", f"{len(attributes(widest[1]))}  {widest[0].name}: {widest[1].name}", "<= 15"),
        (
            "longest function, lines",
            f"{code_lines(ast.unparse(longest[1]))}  {longest[0].name}: {longest[1].name}",
            "<= 50",
        ),
        ("docstrings, share of lines", f"{told / lines:.1%}", ">= 15%"),
        ("public without a docstring", str(len(without_docstring())), "0"),
        ("class names in two files", str(len(twins())), "0"),
        ("blanket excepts elsewhere", str(len(blanket())), "0"),
        ("code lines", str(sum(by_room.values())), f"<= {MOST_LINES}"),
        *(
            (f"  {room}", f"{count:<6} docstrings {told_lines[room] / all_lines[room]:.1%}", "")
            for room, count in by_room.most_common()
        ),
    ]


def main() -> None:
    """Print the table, and what breaks it."""
    for name, value, wanted in measures():
        print(f"{name:28} {value:60} {wanted}".rstrip())
    for title, rows in (("circle", circles()), ("upward", upward()), ("hidden", hidden()), ("twins", twins().items()),
                        ("blanket", blanket())):  # fmt: skip
        for row in rows:
            print(f"{title}: {row}")
    if "--all" in sys.argv:
        print(*without_docstring(), sep="\n")


if __name__ == "__main__":
    main()
