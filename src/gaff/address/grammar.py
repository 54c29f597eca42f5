"""Addresses: one grammar for Python, the command line, files and reports. Needs no torch.

``path <Class> /op#k @call :port [key]``, in this order, every part optional. An address without wildcards is a
``Site``; one with ``*``, ``?`` or ``<Class>`` is a ``Pattern``. ``str`` of either parses back to the same value.

``parse`` reads a text from left to right: each ``_read_*`` function takes the text and the position at which its part
would begin, and returns the part (None, or the default, where it is absent) and the position behind it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import lru_cache

from gaff.errors import SiteError

OUTPUT = "output"
VALUE_PORTS = ("output", "input")
GRADIENT_PORTS = ("grad_output", "grad_input", "input_grad", "outer_grad")
STATE_PORTS = ("param", "grad", "buffer")  # of a parameter or a buffer; the others belong to a module
WEIGHTS = "weights"  # of an op of attention only: its probabilities, which it does not return
ATTENTIONS = ("scaled_dot_product_attention", "flex_attention")
NAMED = "names:"  # what an address begins with that is a standard name
OP_PORTS = VALUE_PORTS + GRADIENT_PORTS[:3]  # what comes from outside is told of modules alone
PORTS = (*VALUE_PORTS, *GRADIENT_PORTS, WEIGHTS, *STATE_PORTS)

Key = tuple[int | str, ...]

_MOST_DEPTHS = 4  # of ** in one pattern: each multiplies the ways in which a path can match

_PLAIN_NAME = re.compile(r"[A-Za-z0-9_-]+")
_BARE = re.compile(r"[^\W\d]\w*")
_SEGMENT = re.compile(r"`(?:[^`]|``)+`|[A-Za-z0-9_*?-]+")
_ESCAPE = re.compile(r"\\(?:x[0-9a-f]{2}|u[0-9a-f]{4}|U[0-9a-f]{8}|[nrt\\])")
_MOST_DIGITS = 18
_CLASS = re.compile(r"<([^<>]+)>")
_OP = re.compile(r"/([A-Za-z0-9_*?]+)(?:#(\d+))?")
_CALL = re.compile(r"@(\d+)")
_PORT = re.compile(r":(\w+)")
_KEY = re.compile(r"""\[(?:(-?\d+)|([^\W\d]\w*)|('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"))\]""", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Site:
    """The address of one tensor stream: exactly one place in a model, though it may name no module that exists.

    ``path`` is the module's name as ``named_modules(remove_duplicate=False)`` gives it, empty for the root; at the
    ports ``param``, ``grad`` and ``buffer`` it ends with the name of the parameter or buffer. ``op`` is an op in the
    module's own forward and ``op_index`` counts the ops of that name in one call from 0; None there means every op of
    that name. ``call`` is the nth call of the module in a run, from 0; None means every call. ``key`` leads into a
    nested value.
    """

    path: str = ""
    op: str | None = None
    op_index: int | None = None
    call: int | None = None
    port: str = OUTPUT
    key: Key = ()

    def __str__(self) -> str:
        return _print_site(self)

    @property
    def inside(self) -> tuple[object, ...]:
        """What tells two sites of one module, or of one parameter, apart."""
        return self.port, self.key, self.call, self.op, self.op_index

    def owner(self, name: str) -> str:
        """The path of the module here; of a parameter or buffer (``name``) that of the module that owns it."""
        return self.path.removesuffix(name).removesuffix(".") if name else self.path


@dataclass(frozen=True, slots=True)
class Name:
    """One name of a pattern's path: literal text, or a glob where ``*`` and ``?`` stand for characters.

    A module may be called ``*`` in earnest (``setattr`` allows it), so that the text alone does not tell: such a name
    is written in backticks and has ``is_glob`` False.
    """

    text: str
    is_glob: bool

    def matches(self, name: str) -> bool:
        """Whether one name of a path, without dots, fits this one as a whole."""
        return _glob(self.text).fullmatch(name) is not None if self.is_glob else self.text == name

    def __str__(self) -> str:
        return self.text if self.is_glob else _print_name(self.text)


ANY_DEPTH = Name("**", is_glob=True)  # zero or more names, never the root itself


@dataclass(frozen=True, slots=True)
class Pattern:
    """Many sites at once: what a text with ``*``, ``?`` or ``<Class>`` means, to be looked up in a model.

    ``names`` are matched against the names of a path one by one, where ``**`` stands for any number of them, none
    included. ``cls`` leaves only modules that have a class of this name among their bases. ``op`` may be a glob of its
    own; the other fields mean what they mean in a ``Site``, and go into each site that the pattern finds. ``is_named``:
    the names are standard names (``names:resid_post.3``), which ``gaff.address.names`` looks up in a model.
    """

    names: tuple[Name, ...] = ()
    cls: str | None = None
    op: str | None = None
    op_index: int | None = None
    call: int | None = None
    port: str = OUTPUT
    key: Key = ()
    is_named: bool = False

    def __str__(self) -> str:
        head = ".".join(str(name) for name in self.names) + (f"<{self.cls}>" if self.cls else "")
        return (NAMED if self.is_named else "") + head + _print_tail(self, head)

    @property
    def is_single(self) -> bool:
        """Whether it means one site: a standard name without a glob."""
        return self.is_named and not any(name.is_glob for name in self.names)

    def matches(self, path: str) -> bool:
        """Whether ``path`` (of a module, parameter or buffer) fits the names; classes are the caller's business.

        The empty path never fits: no pattern means the root itself.
        """
        return bool(path) and _match_names(self.names, path.split("."))


Address = Site | Pattern


def print_key(key: Key) -> str:
    """A key as an address has it: ``("state", 0, "a b")`` as ``[state][0]['a b']``; the empty key as empty text."""
    return "".join(f"[{part}]" if isinstance(part, int) or _BARE.fullmatch(part) else f"[{part!r}]" for part in key)


@lru_cache(maxsize=4096)
def parse(text: str) -> Address:
    """The site or pattern that ``text`` names. Raises SiteError with the place where reading stopped.

    Spaces are refused outside backticks and quotes. What a text gives is frozen, and cached.
    """
    if not text:
        raise SiteError("address '' is empty: expected 'path:port'; the root module's own output is ':output'")
    if text.startswith(NAMED) and (_PORT.match(text, len(NAMED) - 1) or [""])[0][1:] not in PORTS:
        return _named(text)
    names, at = _read_names(text)
    cls, at = _read_class(text, at)
    op, op_index, at = _read_op(text, at)
    call, at = _read_call(text, at)
    port, key_at = _read_port(text, port_at := at)
    key, at = _read_keys(text, key_at)
    if at != len(text):
        if port == WEIGHTS and text[at] == ":":
            raise SiteError(
                f"address {text!r}: :{WEIGHTS} have no {text[at:]}, fused attention never makes them: expected "
                f"attention written out, which has them as /softmax{text[at:]}"
            )
        again = _PORT.match(text, at)
        if key and again and again.group(1) in PORTS:
            told = "grad_output" if again.group(1) == "grad" else again.group(1)
            meant = f"{text[:port_at]}:{told}{text[key_at:at]}{text[again.end() :]}"
            raise SiteError(f"address {text!r}: a port comes once, ahead of its key: expected {meant!r}")
        raise SiteError(
            f"address {text!r} cannot be read from {text[at:]!r} on: expected 'path <Class> /op#k @call :port [key]' "
            "in this order; other characters in a name go in backticks"
        )
    is_op_glob = op is not None and ("*" in op or "?" in op)
    if cls or is_op_glob or any(name.is_glob for name in names):
        return Pattern(names, cls, op, op_index, call, port, key)
    return Site(".".join(name.text for name in names), op, op_index, call, port, key)


def _named(text: str) -> Pattern:
    """The pattern for a text that begins with ``names:``. Raises SiteError for classes and ops, which names are not."""
    inside = parse(text[len(NAMED) :])
    if inside.op is not None or (isinstance(inside, Pattern) and inside.cls is not None):
        raise SiteError(
            f"address {text!r}: a standard name has no op and no class: expected such as names:resid_post.3"
        )
    names = inside.names if isinstance(inside, Pattern) else _read_names(inside.path)[0]
    return Pattern(names, None, None, None, inside.call, inside.port, inside.key, is_named=True)


def parse_site(text: str) -> Site:
    """Read the address of one exact site, for places where a pattern makes no sense, such as ``got[address]``.

    Raises SiteError for a pattern, and for what ``parse`` cannot read.
    """
    address = parse(text)
    if isinstance(address, Pattern) and address.is_single:
        name = text.removeprefix(NAMED)
        raise SiteError(f"{text!r} is a standard name, whose address is another in each model: expected what "
                        f"gaff.sites(model, names=True)[{name!r}] gives")  # fmt: skip
    if isinstance(address, Pattern):
        raise SiteError(f"address {text!r} is a pattern: expected one exact site, without *, ? or <Class>")
    return address


def parse_single(text: str) -> Address:
    """Read what means one site: its exact address, or a standard name. Raises SiteError as ``parse_site`` does."""
    address = parse(text)
    return address if isinstance(address, Pattern) and address.is_single else parse_site(text)


def fits_op(wanted: str, name: str) -> bool:
    """Whether ``name``, of an op, is the one that an address wants: ``wanted`` may be a glob, such as ``*_softmax``."""
    return _glob(wanted).fullmatch(name) is not None


def every_call(site: Site) -> Site:
    """``site`` without its ``@call``: the address of all calls of the module. Itself where it names no call."""
    return replace(site, call=None) if site.call is not None else site


def nearest(wanted: str, names: Sequence[str], count: int = 3) -> list[str]:
    """The names most like ``wanted``, best first: close spellings, then names that share its last part.

    For messages about addresses that name nothing: at most ``count`` names, fewer or none where nothing is similar.
    The least similarity, 0.6, is the default of ``difflib.get_close_matches``.
    """
    close = get_close_matches(wanted, names, n=count, cutoff=0.6)
    close = close or [name for name in names if name.lower() == wanted.lower()]
    last = wanted.rpartition(".")[2]
    tails = [name for name in names if last and last in name.split(".") and name not in close]
    return (close + tails)[:count]


def _read_names(text: str) -> tuple[tuple[Name, ...], int]:
    """The names of the path, up to the first character that belongs to none. Raises SiteError for an empty name.

    The number of ``**`` is limited, since each multiplies the ways in which a path can match.
    """
    names: list[Name] = []
    at = 0
    while found := _SEGMENT.match(text, at):
        names.append(_name(found.group(), text))
        at = found.end()
        if at == len(text) or text[at] != ".":
            break
        at += 1
        if not _SEGMENT.match(text, at):
            odd = text[at : at + 1].strip(".:@/")
            what = f"{odd!r}" if odd else "an empty name"
            hint = "; one with other characters is written in backticks" if odd else ""
            raise SiteError(f"address {text!r} has {what} at character {at}: expected a name after '.'{hint}")
    if names.count(ANY_DEPTH) > _MOST_DEPTHS:
        raise SiteError(f"address {text!r:.60} has {names.count(ANY_DEPTH)} '**': expected {_MOST_DEPTHS} at most")
    return tuple(names), at


def _name(raw: str, text: str) -> Name:
    """One name as it is written: in backticks (a doubled one stands for itself) and so literal, or perhaps a glob."""
    if raw.startswith("`"):
        name = _ESCAPE.sub(lambda one: str(ast.literal_eval(f"'{one[0]}'")), raw[1:-1].replace("``", "`"))
        if "." in name:
            raise SiteError(f"address {text!r} has a dot inside {raw}: expected one module name, no name holds a dot")
        return Name(name, is_glob=False)
    if "**" in raw and raw != "**":
        raise SiteError(f"address {text!r} mixes '**' with other characters in {raw!r}: expected '**' as a whole name")
    return Name(raw, is_glob="*" in raw or "?" in raw)


def _read_class(text: str, at: int) -> tuple[str | None, int]:
    """The text between ``<`` and ``>``, without them."""
    found = _CLASS.match(text, at)
    return (found.group(1), found.end()) if found else (None, at)


def _read_op(text: str, at: int) -> tuple[str | None, int | None, int]:
    """The name of an op after ``/``, which may be a glob, and its number after ``#``."""
    found = _OP.match(text, at)
    if not found:
        return None, None, at
    return found.group(1), _number(found.group(2)) if found.group(2) else None, found.end()


def _read_call(text: str, at: int) -> tuple[int | None, int]:
    """The number after ``@``."""
    found = _CALL.match(text, at)
    return (_number(found.group(1)), found.end()) if found else (None, at)


def _number(digits: str) -> int:
    """The whole number in an address. Raises SiteError for one that counts nothing that there may be."""
    if len(digits) > _MOST_DIGITS:
        raise SiteError(f"a number of {len(digits)} digits in an address: expected {_MOST_DIGITS} at the most")
    return int(digits)


_PARAMETERS = ("weight", "bias")
_MEANT = {"output_grad": "grad_output", "gradient": "grad_output", "grad_out": "grad_output", "out": "output",
          "activation": "output"}  # fmt: skip


def _read_port(text: str, at: int) -> tuple[str, int]:
    """The word after ``:``, or ``output`` where there is none. Raises SiteError for a port that does not exist."""
    found = _PORT.match(text, at)
    if not found:
        return OUTPUT, at
    port = found.group(1)
    if port not in PORTS:
        if port in _PARAMETERS:
            meant = f"{text[:at]}.{port}{text[found.end() :]}"
            meant += "" if text[found.end() :].startswith(":") else ":param"
            raise SiteError(f"address {text!r} has no port {port!r}: a parameter is part of the path, {meant!r}")
        meant_port = [_MEANT[port]] if port in _MEANT else get_close_matches(port, PORTS, n=1)
        near = "".join(f"; did you mean ':{name}'?" for name in meant_port)
        raise SiteError(f"address {text!r} has no port {port!r}: expected one of {', '.join(PORTS)}{near}")
    return port, found.end()


def _read_keys(text: str, at: int) -> tuple[Key, int]:
    """All keys in brackets: an integer, a bare word, or a Python string in quotes for any other text."""
    keys: list[int | str] = []
    while found := _KEY.match(text, at):
        number, word, quoted = found.groups()
        keys.append(_number(number) if number else word or _unquote(quoted, text))
        at = found.end()
    return tuple(keys), at


def _unquote(quoted: str, text: str) -> str:
    """The text that a quoted key stands for; a Python literal, so that every character has a way to be written."""
    try:
        return str(ast.literal_eval(quoted))
    except (SyntaxError, ValueError) as error:
        raise SiteError(f"address {text!r} has a key {quoted} that is no Python string: {error}") from None


@lru_cache(maxsize=16384)
def _print_site(site: Site) -> str:
    """A site as text. Cached: the same sites are printed again and again."""
    names = ".".join(_print_name(name) for name in site.path.split(".")) if site.path else ""
    return names + _print_tail(site, names)


def _print_name(name: str) -> str:
    """A name as an address has it: as it is where that cannot be misread, else in backticks.

    What a terminal would act on instead of showing it (a newline, an escape, a change of direction) is written as
    Python escapes it. All that prints an address is safe by that, and reads back to the same name.
    """
    if _PLAIN_NAME.fullmatch(name):
        return name
    shown = (one if one.isprintable() and one != "\\" else repr(one)[1:-1] for one in name)
    return "`" + "".join(shown).replace("`", "``") + "`"


def _print_tail(address: Address, head: str) -> str:
    """What follows path and class: op, call, port and key; the port ``output`` only where something depends on it.

    ``head`` is what stands before. A key needs its port before it, and the root's own output would be empty text.
    """
    text = ""
    if address.op is not None:
        text += f"/{address.op}" + (f"#{address.op_index}" if address.op_index is not None else "")
    if address.call is not None:
        text += f"@{address.call}"
    if address.port != OUTPUT or address.key or not (head or text):
        text += f":{address.port}"
    return text + print_key(address.key)


@lru_cache(maxsize=4096)
def _glob(text: str) -> re.Pattern[str]:
    """A glob as a regular expression, in which neither ``*`` nor ``?`` stands for a dot. Cached."""
    parts = {"*": "[^.]*", "?": "[^.]"}
    return re.compile("".join(parts.get(char) or re.escape(char) for char in text))


def _match_names(wanted: Sequence[Name], names: Sequence[str]) -> bool:
    """Whether a pattern's names fit those of a path, first to last; at a ``**`` every number of names is tried."""
    if not wanted:
        return not names
    if wanted[0] == ANY_DEPTH:
        return any(_match_names(wanted[1:], names[skip:]) for skip in range(len(names) + 1))
    return bool(names) and wanted[0].matches(names[0]) and _match_names(wanted[1:], names[1:])
