"""The few pieces of HTML that the page consists of; whatever is no `Html` is escaped."""

from __future__ import annotations

import html
import unicodedata
from collections.abc import Iterable, Sequence
from typing import NamedTuple

__all__ = ["Html", "Section", "details", "joined", "pre", "table", "text"]

_LONGEST = 400  # characters of a cell
_SHOWN = 30  # rows of a long table


class Html(str):
    """Markup, in which everything that comes from data is escaped already."""


class Section(NamedTuple):
    """A part of the page with a heading of its own."""

    name: str
    """letters, for links"""
    title: str
    body: Html


def text(value: object, longest: int = _LONGEST) -> Html:
    """Anything as text: escaped, without control characters, and cut where it is too long."""
    if isinstance(value, Html):
        return value
    whole = "–" if value is None else str(value)
    if len(whole) > longest:
        whole = f"{whole[:longest]}… ({len(whole):,} characters)"
    plain = "".join(
        ascii(one)[1:-1] if unicodedata.category(one)[0] == "C" and one != "\n" else one
        for one in whole
    )
    return Html(html.escape(plain))


def joined(parts: Iterable[Html], between: str = "\n") -> Html:
    """Pieces of markup, one after the other."""
    return Html(between.join(parts))


def table(
    head: Sequence[str],
    rows: Sequence[Sequence[object]],
    caption: str,
    text_columns: int = 1,
    most: int = _SHOWN,
) -> Html:
    """A table whose first column names its rows.

    Args:
        head: titles of the columns.
        rows: their cells.
        caption: what the table shows, with its units.
        text_columns: how many columns hold text; those after them hold numbers, to the right.
        most: rows that are shown; the caption says how many there are.
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
    """A number with a minus sign in place of a hyphen."""
    return f"−{cell[1:]}" if isinstance(cell, str) and cell.startswith("-") else cell


def details(summary: str, body: Html) -> Html:
    """What opens when it is asked for."""
    return Html(f"<details><summary>{text(summary)}</summary>\n{body}\n</details>")


def pre(lines: Sequence[str]) -> Html:
    """Lines as they are."""
    return Html(f'<pre tabindex="0">{text(chr(10).join(lines), 20_000)}</pre>')
