"""The page of a harvest: one file without a script, of what is kept and which rows make a feature large.

It is given plain data, and knows neither torch nor the store.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from gaff.compat.files import write_text
from gaff.version import __version__
from gaff.views.page.document import asset

_WIDE, _HIGH = 360, 90  # of a histogram
# The page's style follows the system's theme: the page of a run has a script that does.
_STYLE = """
@media (prefers-color-scheme: dark) {
  :root { color-scheme: dark; --ground: #14161b; --card: #1c1f26; --ink: #e6e9ef; --quiet: #98a1b0; --line: #323843;
          --accent: #7db0ff; --error: #ff7b72; --warning: #e3a340; --fine: #56c98a }
}
main { max-width: 1080px; margin: 0 auto }
section { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 6px 16px 14px;
          margin: 14px 0 }
section th { background: var(--card) }
table { width: 100% }
mark { background: var(--accent); color: var(--card); border-radius: 3px; padding: 0 2px }
svg { max-width: 100%; height: auto }
svg rect { fill: var(--accent) }
svg text { fill: var(--quiet); font-size: 11px }
td.number:first-child { width: 6em }
summary { cursor: pointer; padding: 3px 0 }
img { height: 64px; image-rendering: pixelated; border-radius: 4px }
"""


@dataclass(frozen=True, slots=True)
class Histogram:
    """How many rows have a norm in each of the bins between ``low`` and ``high``."""

    counts: Sequence[int]
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Example:
    """A row: the value of the feature there, what is known of it, and its text or picture, where there is one.

    ``text``: before, the part that is meant, and after. ``picture``: a data URL.
    """

    value: float
    known: str
    text: tuple[str, str, str] | None = None
    picture: str | None = None


@dataclass(frozen=True, slots=True)
class SiteTold:
    """A site: how it is kept, the L2 norms of its rows, and for some features the rows that make them largest."""

    address: str
    shape: str
    dtype: str
    size: str
    nonfinite: int
    norms: Histogram
    features: Sequence[tuple[int, float, Sequence[Example]]]  # number, largest value over root mean square, rows


@dataclass(frozen=True, slots=True)
class HarvestTold:
    """What a page tells. ``facts`` and ``labels``: names with what is said of them; ``looked``: rows read."""

    title: str
    facts: Sequence[tuple[str, str]]
    labels: Sequence[tuple[str, str]]
    sites: Sequence[SiteTold]
    looked: str


def save(told: HarvestTold, path: str | os.PathLike[str]) -> int:
    """Write the page, and return its size in bytes. Raises RecordError where it cannot be written."""
    return write_text(path, to_html(told))


def to_html(told: HarvestTold) -> str:
    """The page as one HTML text. All texts are escaped, and its policy allows no script and no network."""
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
    body = [_table(("", ""), told.facts, "what was harvested"), _overview(told.sites)]
    body += [_site(at, one, told.looked) for at, one in enumerate(told.sites)]
    body.append(f"<section><h2>Labels</h2>{_table(('label', 'values'), told.labels, 'labels')}</section>")
    inside = "\n".join(body)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(told.title)} · gaff</title>\n<style>{asset('page.css')}{_STYLE}</style>\n</head>\n<body>\n"
        f'<header><span class="brand">gaff</span><h1>{escape(told.title)}</h1>'
        f'<span class="quiet">{escape(__version__)}</span></header>\n<main>\n{inside}\n</main>\n</body>\n</html>\n'
    )


def _overview(sites: Sequence[SiteTold]) -> str:
    rows = "".join(
        f'<tr><td><a href="#site-{at}">{escape(one.address)}</a></td><td>{escape(one.shape)}</td>'
        f'<td>{escape(one.dtype)}</td><td class="number">{escape(one.size)}</td>'
        f'<td class="number">{one.nonfinite}</td></tr>'
        for at, one in enumerate(sites)
    )
    heads = (
        '<th>site</th><th>shape</th><th>dtype</th><th class="number">on disk</th>'
        '<th class="number">rows with NaN or inf</th>'
    )
    return f'<section class="wide"><h2>Sites</h2><table><tr>{heads}</tr>{rows}</table></section>'


def _site(at: int, site: SiteTold, looked: str) -> str:
    features = "".join(_feature(one, is_open=not place) for place, one in enumerate(site.features))
    told = (
        f"<h3>Rows that make a feature largest</h3><p class=quiet>Features whose largest value stands out most from "
        f"their root mean square, with the rows where they are largest; {escape(looked)}.</p>{features}"
        if features
        else ""
    )
    return (
        f'<section id="site-{at}"><h2>{escape(site.address)}</h2>'
        f"<h3>Norms of rows</h3>{_histogram(site.norms, site.address)}{told}</section>"
    )


def _feature(feature: tuple[int, float, Sequence[Example]], *, is_open: bool) -> str:
    number, peak, rows = feature
    lines = "".join(
        f'<tr><td class="number">{one.value:.4g}</td><td>{_shown(one)}</td>'
        f'<td class="quiet">{escape(one.known)}</td></tr>'
        for one in rows
    )
    return (
        f"<details{' open' * is_open}><summary>feature {number} <span class=quiet>largest is {peak:.1f} times the root "
        'mean square</span></summary><table><tr><th class="number">value</th><th>row</th><th></th></tr>'
        f"{lines}</table></details>"
    )


def _shown(one: Example) -> str:
    if one.picture is not None:
        return f'<img src="{escape(one.picture)}" alt="sample: {escape(one.known)}">'
    if one.text is None:
        return ""
    before, meant, after = map(escape, one.text)
    return f"{before}<mark>{meant}</mark>{after}" if meant else before + after


def _histogram(norms: Histogram, address: str) -> str:
    if not norms.counts:
        return "<p class=quiet>no row with a finite norm</p>"
    most, step = max(norms.counts), _WIDE / len(norms.counts)
    width = (norms.high - norms.low) / len(norms.counts)
    bars = "".join(
        f'<rect x="{at * step:.1f}" y="{_HIGH * (1 - count / most):.1f}" width="{max(1.0, step - 1):.1f}" '
        f'height="{_HIGH * count / most:.1f}"><title>{count} rows with norms from {norms.low + at * width:.4g} to '
        f"{norms.low + (at + 1) * width:.4g}</title></rect>"
        for at, count in enumerate(norms.counts)
    )
    told = f"norms of the rows of {address}, from {norms.low:.4g} to {norms.high:.4g}"
    return (
        f'<svg role="img" aria-label="{escape(told)}" viewBox="0 0 {_WIDE} {_HIGH + 18}" width="{_WIDE}" '
        f'height="{_HIGH + 18}">{bars}<text x="0" y="{_HIGH + 14}">{norms.low:.4g}</text>'
        f'<text x="{_WIDE}" y="{_HIGH + 14}" text-anchor="end">{norms.high:.4g}</text></svg>'
    )


def _table(heads: tuple[str, str], rows: Sequence[tuple[str, str]], told: str) -> str:
    first = f"<tr><th>{escape(heads[0])}</th><th>{escape(heads[1])}</th></tr>" if any(heads) else ""
    lines = "".join(f'<tr><th scope="row">{escape(name)}</th><td>{escape(value)}</td></tr>' for name, value in rows)
    return f'<div class="wide"><table aria-label="{escape(told)}">{first}{lines}</table></div>'
