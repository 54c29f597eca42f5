"""Pages that are made from the code when the site is built: every message, the help of commands, the tables of the
comparison with other tools, and ``llms.txt``.

``docs/messages.md`` is written by hand and tells what to do about the messages that people meet; the page made here,
``reference/all-messages.md``, lists every one with the place that raises it, from the source itself.
"""

import ast
import json
import os
from pathlib import Path

SOURCE = Path(__file__).resolve().parent.parent / "src" / "gaff"
DOCS = Path(__file__).resolve().parent
AGAINST = SOURCE.parent.parent / "tests" / "traps" / "against"
NAMED = {"raw": "hooks by hand", "torchlens": "TorchLens", "transformer_lens": "TransformerLens"}
SIGNS = {
    "right": '<span class="compared-right">right</span>',
    "wrong": '<b class="compared-wrong">wrong</b>',
    "missing": '<b class="compared-wrong">missing</b>',
    "left": '<b class="compared-wrong">left</b>',
    "refuses": "<em>says no</em>",
    "cannot": "-",
}
GROUPS = {"values": "Values", "gradients": "Gradients", "edits": "Edits", "traceless": "What is left behind"}
ERRORS = ("SiteError", "PlanError", "NeverFiredError", "ExactnessError", "RecordError", "NonFiniteError", "GaffError")


def template(node):
    """The text of a message as it stands in the source, with ``...`` where a value comes; None where it is no text."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(one.value if isinstance(one, ast.Constant) else "..." for one in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        parts = [template(one) or "..." for one in (node.left, node.right)]
        return "".join(parts)
    if isinstance(node, ast.IfExp):
        return template(node.body)
    return None


def messages():
    """By class of error the messages, each with the file that raises it, in the order of the files."""
    found = {name: {} for name in ERRORS}
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            call = node.exc if isinstance(node, ast.Raise) else None
            if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.func.id not in found:
                continue
            text = template(call.args[0]) if call.args else None
            if text is not None and text.strip(". ") != "":
                found[call.func.id].setdefault(" ".join(text.split()), path.relative_to(SOURCE).as_posix())
    return found


def message_page():
    """The page of all messages, as Markdown."""
    told = messages()
    count = sum(map(len, told.values()))
    lines = [
        "# Every message",
        "",
        f"All {count} messages of gaff's errors, from its source. `...` stands for a value. Each says what was asked,",
        "what is there and what to do; [Messages](../messages.md) tells more of those that people meet most.",
        "",
    ]
    for name, texts in told.items():
        if not texts:
            continue
        lines += [f"## {name}", "", "| message | raised in |", "|---|---|"]
        for text, path in sorted(texts.items(), key=lambda pair: pair[0].strip(".'\" ").lower()):
            safe = text.replace("|", "\\|").replace("`", "'")
            lines.append(f"| `` {safe} `` | `{path}` |")
        lines.append("")
    return "\n".join(lines)


def command_page():
    """The page of the command line: each command's own help."""
    from gaff.cli import COMMANDS, parser_of

    lines = [
        "# Commands",
        "",
        "What `gaff COMMAND --help` prints. Exit codes: 0 done, 1 an error told in one line, 2 words not understood,",
        "3 a command that looks for something has found it; `gaff watch` returns the code of the command that it ran.",
        "",
    ]
    os.environ["COLUMNS"] = "100"
    for name, command in COMMANDS.items():
        lines += [
            f"## gaff {name}",
            "",
            f"{command.SUMMARY[0].upper()}{command.SUMMARY[1:]}.",
            "",
            "```text",
            parser_of(name).format_help().rstrip(),
            "```",
            "",
        ]
    return "\n".join(lines)


def compared_page():
    """The tables of ``compared.md``: which tool comes how out of which trap, and what it costs."""
    told = json.loads((AGAINST / "answers.json").read_text(encoding="utf-8"))
    tools, traps = told["tools"], _trap_titles(told["groups"])
    names = [NAMED.get(tool, tool) for tool in tools]
    lines = [
        "## In short",
        "",
        "| tool | version | right | wrong | missing | left behind | says no | knows no way to ask |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for tool, answer in tools.items():
        kinds = [kind for kind, _ in answer["traps"].values()]
        counts = " | ".join(str(kinds.count(kind)) for kind in SIGNS)
        version = next(iter(answer["versions"].values())).partition("+")[0]
        lines.append(f"| {NAMED.get(tool, tool)} | {version} | {counts} |")
    for group, title in GROUPS.items():
        lines += ["", f"## {title}", "", f"| asked | {' | '.join(names)} |", f"|---|{'---|' * len(names)}"]
        for trap, about in traps.items():
            if trap.startswith(f"{group}."):
                cells = [SIGNS[answer["traps"][trap][0]] for answer in tools.values()]
                lines.append(f"| {about} | {' | '.join(cells)} |")
    lines += ["", "## What it costs", "", *_prices()]
    return "\n".join(lines) + "\n"


def _trap_titles(groups):
    """By name of each trap the first sentence of its docstring."""
    found = {}
    for group in groups:
        for node in ast.parse((AGAINST / f"{group}.py").read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("trap_"):
                found[f"{group}.{node.name.removeprefix('trap_')}"] = ast.get_docstring(node).rstrip(".")
    return found


def _prices():
    """The table of prices: how many times the bare model, and hooks by hand in the same process."""
    told = json.loads((AGAINST / "prices.json").read_text(encoding="utf-8"))
    works = list(next(iter(told.values()))["works"])
    head = " | ".join(f"{work}: x the bare model | x hooks by hand" for work in works)
    lines = [f"| tool | {head} |", f"|---|{'---|---|' * len(works)}"]
    for tool, one in told.items():
        cells = [
            f"{seconds['tool'] / seconds['bare']:.2f} | {seconds['tool'] / seconds['raw']:.2f}"
            for seconds in one["works"].values()
        ]
        lines.append(f"| {NAMED.get(tool, tool)} | {' | '.join(cells)} |")
    return lines


def llms_text():
    """What an assistant that writes code is told first: what there is, and where; see https://llmstxt.org."""
    lines = [
        "# gaff",
        "",
        "> gaff shows, keeps and changes any tensor that flows through any PyTorch model, forward and backward,",
        "> without editing the model, and tells what is wrong with a training. The core needs torch alone.",
        "",
        "## Docs",
        "",
    ]
    for path in sorted(DOCS.glob("*.md")):
        text = path.read_text(encoding="utf-8")
        title = text.partition("\n")[0].lstrip("# ")
        rest = [line for line in text.splitlines()[1:] if line and not line.startswith(("#", "`", "|", "!", ":", "-"))]
        about = rest[0] if rest else ""
        lines.append(f"- [{title}]({path.stem}.html): {about[:200]}")
    return "\n".join([*lines, "", "## Short", "", (DOCS / "skill.md").read_text(encoding="utf-8")])


MADE = {"all-messages": message_page, "commands": command_page, "compared-tables": compared_page}  # in reference/


def setup(app):
    """Write the pages before Sphinx reads its sources, and ``llms.txt`` beside the site when it is done."""

    def begin(app):
        for name, make in MADE.items():
            page, text = DOCS / "reference" / f"{name}.md", make()
            if not page.exists() or page.read_text(encoding="utf-8") != text:
                page.write_text(text, encoding="utf-8")

    def end(app, error):
        if error is None:
            (Path(app.outdir) / "llms.txt").write_text(llms_text(), encoding="utf-8")

    app.connect("builder-inited", begin)
    app.connect("build-finished", end)
    return {"parallel_read_safe": True}
