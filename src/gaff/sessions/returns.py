"""Whether a forward returns a tuple, read from its source: a single tensor cannot stand in for one.

Only what is certain counts: each ``return`` gives a tuple that is written there or made by ``tuple()`` or a class of
tuples, or a name that holds one by then, as in ``outputs = (hidden,)``, ``outputs += (weights,)``, ``return outputs``.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from typing import Any

_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)  # names and returns inside are their own
_Before = list[ast.stmt]  # what has run by then, as far as it is certain that it has


def makes_tuples(function: Any) -> bool:
    """Whether each ``return`` of a Python function gives a tuple; False where its source cannot be read."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    except (OSError, TypeError, SyntaxError, IndexError):
        return False
    if not isinstance(tree, ast.FunctionDef):
        return False
    known = getattr(function, "__globals__", {}).items()
    makers = {"tuple", *(name for name, one in known if isinstance(one, type) and issubclass(one, tuple))}
    found = list(_returns(tree.body, []))
    return bool(found) and all(_is_tuple(value, before, makers) for value, before in found)


def _returns(block: list[ast.stmt], before: _Before) -> Iterator[tuple[ast.expr | None, _Before]]:
    """What each ``return`` in a block gives, with the statements before it.

    Of one inside a loop nothing is: what comes later in the loop may have run before it.
    """
    for at, statement in enumerate(block):
        earlier = [*before, *block[:at]]
        if isinstance(statement, ast.Return):
            yield statement.value, earlier
        elif not isinstance(statement, _SCOPES):
            known = [] if isinstance(statement, (ast.For, ast.While)) else earlier
            for name in ("body", "orelse", "finalbody"):
                yield from _returns(getattr(statement, name, []), known)
            for part in (*getattr(statement, "handlers", []), *getattr(statement, "cases", [])):
                yield from _returns(part.body, known)


def _is_tuple(value: ast.expr | None, before: _Before, makers: AbstractSet[str]) -> bool:
    """Whether an expression is a tuple for certain, after the statements ``before``; ``makers``: names of what makes
    tuples."""
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add):
        return _is_tuple(value.left, before, makers) or _is_tuple(value.right, before, makers)
    if isinstance(value, ast.IfExp):
        return _is_tuple(value.body, before, makers) and _is_tuple(value.orelse, before, makers)
    if isinstance(value, ast.Name):
        return _holds_tuple(value.id, before, makers)
    if isinstance(value, ast.Call):
        return isinstance(value.func, ast.Name) and value.func.id in makers
    return isinstance(value, ast.Tuple)


def _holds_tuple(name: str, before: _Before, makers: AbstractSet[str]) -> bool:
    """Whether a variable holds a tuple after the statements ``before``: by the last that has set it for certain."""
    for at in range(len(before) - 1, -1, -1):
        statement = before[at]
        setting = list(_setting(statement, name))
        if setting == [statement] and isinstance(statement, ast.Assign):
            return _is_tuple(statement.value, before[:at], makers)
        if next(_unknown(statement, setting, name), None) is not None:
            return False
        # what is set on some of the ways through a statement must be a tuple there, and before it
        if not all(isinstance(one, ast.AugAssign) or _is_tuple(one.value, before[:at], makers) for one in setting):
            return False
    return False


def _targets(node: ast.AST) -> list[ast.expr]:
    return node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AugAssign) else []


def _setting(statement: ast.stmt, name: str) -> Iterator[ast.Assign | ast.AugAssign]:
    """What in a statement sets a variable: ``name = ...``, and ``name += ...``, by which a tuple stays one."""
    for node in ast.walk(statement):
        if isinstance(node, (ast.Assign, ast.AugAssign)) and name in [getattr(one, "id", "") for one in _targets(node)]:
            yield node


def _unknown(statement: ast.stmt, setting: list[ast.Assign | ast.AugAssign], name: str) -> Iterator[ast.Name]:
    """Where a variable is set in a statement in another way than by ``setting``: by a loop, or taken out of a tuple."""
    known = {id(one) for node in setting for one in _targets(node)}
    for one in ast.walk(statement):
        if isinstance(one, ast.Name) and one.id == name and isinstance(one.ctx, ast.Store) and id(one) not in known:
            yield one
