"""Pieces of HTML; every string other than `Html` is escaped."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from typing import NamedTuple

__all__ = ["Html", "Section", "details", "joined", "pre", "table", "text"]

_LONGEST = 400  # characters in a cell
_SHOWN = 30  # rows in a table


class Html(str):
    """Markup in which text from data is already escaped."""


class Section(NamedTuple):
    """A section of the page with a heading."""

    name: str
    """target of links"""
    title: str
    body: Html


def text(value: object, longest: int = _LONGEST) -> Html:
    """Returns a value as escaped text, shortened if it is too long."""
    if isinstance(value, Html):
        return value
    whole = "–" if value is None else str(value)
    if len(whole) > longest:
        whole = f"{whole[:longest]}… ({len(whole):,} characters)"
    return Html(html.escape(whole))


def joined(parts: Iterable[Html], between: str = "\n") -> Html:
    """Joins pieces of markup."""
    return Html(between.join(parts))


def table(
    head: Sequence[str],
    rows: Sequence[Sequence[object]],
    caption: str,
    text_columns: int = 1,
    most: int = _SHOWN,
) -> Html:
    """Returns a table whose first column contains the row headers.

    Of `rows`, the first `most` are shown. The first `text_columns` columns contain text, and the
    others numbers, aligned right.
    """
    if len(rows) > most:
        caption += f" The first {most} of {len(rows):,}."
    kinds = ["" if i < text_columns else ' class="number"' for i in range(len(head))]
    titles = [
        f'<th scope="col"{kind}>{text(one)}</th>' for one, kind in zip(head, kinds, strict=True)
    ]
    lines = [
        f'<tr><th scope="row">{text(row[0])}</th>'
        + "".join(
            f"<td{kind}>{text(_minus(cell) if kind else cell)}</td>"
            for cell, kind in zip(row[1:], kinds[1:], strict=True)
        )
        + "</tr>"
        for row in rows[:most]
    ]
    whole = ' class="text"' if text_columns == len(head) else ""
    return Html(
        f'<div class="scroll" tabindex="0" role="region" aria-label="{text(caption)}">'
        f"<table{whole}>"
        f"<caption>{text(caption)}</caption>\n<thead><tr>{''.join(titles)}</tr></thead>\n"
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )


def _minus(cell: object) -> object:
    """Replaces the hyphen of a negative number by a minus sign."""
    return f"−{cell[1:]}" if isinstance(cell, str) and cell.startswith("-") else cell


def details(summary: str, body: Html) -> Html:
    """Returns a collapsed part."""
    return Html(f"<details><summary>{text(summary)}</summary>\n{body}\n</details>")


def pre(lines: Sequence[str]) -> Html:
    """Returns preformatted lines."""
    return Html(f'<pre tabindex="0">{text(chr(10).join(lines), 20_000)}</pre>')
