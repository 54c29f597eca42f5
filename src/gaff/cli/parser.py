"""argparse with errors that say what was meant: the usage of the command that was asked for, then one line.

Every message has the form that messages of gaff have: what was given, what is wrong with it, what was expected, and
what to do next, a name that was probably meant or the help to read. Nothing here imports torch.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import NoReturn

# What argparse says, in the project's words; the last one is for the messages of the readers of values below.
_REWORDED = (
    (r"argument (\S+): expected .*argument.*", r"\1 has no value: expected one after it"),
    (r"argument (\S+): ignored explicit argument (.+)", r"\1 takes no value: expected it alone, got \2"),
    (r"ambiguous option: (\S+) could match (.+)", r"\1 is the beginning of several options: expected one of \2"),
    (
        r"the following arguments are required: (.+?)(?:, \.{3})?",
        r"nothing is given for \1: expected it as in the usage above",
    ),
    (r"argument (\S+): (.*)", r"\1 \2"),
)


class Parser(argparse.ArgumentParser):
    """The arguments of one command; whatever is wrong with them is told on standard error, with exit code 2.

    A subclass, since the method ``error`` is the one place that argparse offers for messages other than its own.
    """

    _words: Sequence[str] = ()  # what was typed after the command

    def read(self, words: Sequence[str]) -> argparse.Namespace:
        """The options in ``words``. Options and other words may be mixed, unless the last ones go to another program.

        Leaves by SystemExit: with 2 where something is not understood, with 0 after ``--help`` was printed.
        """
        self._words = words
        hands_on = any(action.nargs == argparse.REMAINDER for action in self._actions)
        parse = self.parse_known_args if hands_on else self.parse_known_intermixed_args
        options, left = parse(list(words))
        for word in left:
            if word.startswith("-") and word != "-":
                self.error(self._unknown(word))
        if left:
            self.error(f"{left[0]!r} is one word too many: expected no more than in the usage above")
        return options

    def error(self, message: str) -> NoReturn:
        """Print the usage of this command and ``message``, reworded, on standard error; exit with code 2."""
        slip = next((word for word in self._words if self._is_unknown(word)), None)
        if slip is not None and "are required" in message:  # most often a required option, misspelt
            message = self._unknown(slip)
        for pattern, words in _REWORDED:
            found = re.fullmatch(pattern, message, re.DOTALL)
            if found:
                message = found.expand(words)
                break
        self.print_usage(sys.stderr)
        step = "" if message.endswith("?") else f"; {self.prog} --help tells more"
        self.exit(2, f"gaff: {message}{step}\n")

    def _is_unknown(self, word: str) -> bool:
        """Whether a word looks like an option and is not even the beginning of one."""
        name = word.partition("=")[0]
        return name.startswith("--") and not any(one.startswith(name) for one in self._option_string_actions)

    def _unknown(self, word: str) -> str:
        """What to say of an option that the command has not, with the nearest that it has."""
        name = word.partition("=")[0]
        known = [one for one in self._option_string_actions if one.startswith("--")]
        return f"{name!r} is no option of {self.prog}: expected one of {', '.join(known)}{did_you_mean(name, known)}"


def did_you_mean(word: str, names: Iterable[str]) -> str:
    """The end of a message: ``; did you mean 'trace'?``, the name most like ``word``; empty where none is like it."""
    from difflib import get_close_matches

    known = {name.lower(): name for name in names}
    low = word.lower()
    near = [name for name in known if low and name.startswith(low)] or get_close_matches(low, known, 1)
    return f"; did you mean {known[near[0]]!r}?" if near else ""


def whole(text: str) -> int:
    """Read the value of an option as a whole number, for ``type=`` of argparse."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number: expected one such as 10") from None


def number(text: str) -> float:
    """Read the value of an option as a number, for ``type=`` of argparse."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number: expected one such as 0.5") from None


def one_of(names: Sequence[str]) -> Callable[[str], str]:
    """What reads the value of an option as one of ``names``, for ``type=`` of argparse.

    In place of ``choices=``, whose message offers no nearest name and differs between versions of Python.
    """

    def read(text: str) -> str:
        if text in names:
            return text
        known = ", ".join(names)
        raise argparse.ArgumentTypeError(f"{text!r} is unknown: expected one of {known}{did_you_mean(text, names)}")

    return read
