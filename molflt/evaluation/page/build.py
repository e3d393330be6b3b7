"""Assembly of the page of a run from its sections."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from importlib.resources import files
from pathlib import Path
from string import Template

from molflt.evaluation.page import sections
from molflt.evaluation.page.contents import OF_STRUCTURES, Contents, read_contents
from molflt.evaluation.page.html import Html, Section, joined, text
from molflt.evaluation.page.pictures import Pictures
from molflt.evaluation.page.systems import parity, worst_systems
from molflt.version import __version__

__all__ = ["page_of"]


def page_of(run: Path) -> tuple[str, list[str]]:
    """Renders a run as one HTML page, and returns it with a line for each missing part."""
    found = read_contents(run)
    parts = list(_sections(found))
    name = found.path.resolve().name
    page = Template(files("molflt.evaluation.page").joinpath("page.html").read_text("utf-8"))
    made = page.substitute(
        title=text(f"Run {name}", 200),
        summary=text(_summary(found)),
        missing=_missing(found),
        contents=joined(
            Html(f'<li><a href="#{part.name}">{text(part.title)}</a></li>') for part in parts
        ),
        main=joined(
            Html(
                f'<section aria-labelledby="{part.name}"><h2 id="{part.name}">{text(part.title)}'
                f"</h2>\n{part.body}\n</section>"
            )
            for part in parts
        ),
        version=text(__version__),
    )
    return made, found.missing


def _sections(found: Contents) -> Iterator[Section]:
    """Yields the sections in their order; failures are recorded as missing."""
    pictures, run = Pictures(), found.run
    makers: list[Callable[[], Section | None]] = []
    if run is not None:
        makers.append(partial(sections.overview, run))
    if found.results:
        makers.append(partial(sections.results, found))
    makers.append(partial(sections.training, found, pictures))
    if run is not None and run.config["recipe"] in OF_STRUCTURES and found.evaluated:
        makers += [partial(make, found, run, pictures) for make in (parity, worst_systems)]
    if found.evaluated:
        makers.append(partial(sections.encodings, found, pictures))
    if run is not None:
        makers.append(partial(sections.settings, run))
    makers.append(partial(sections.files, found))
    if run is not None:
        makers.append(partial(sections.repeat, found))
    made = (found.attempt(make, None) for make in makers)
    yield from (section for section in made if section is not None)


def _summary(found: Contents) -> str:
    """Returns a line about the result of the run."""
    run = found.run
    if run is None:
        return "Its configuration cannot be read."
    best = run.best
    said = f"Recipe {run.config['recipe']}, {run.parameters:,} parameters"
    if run.step is not None:
        said += f", {run.step:,} steps"
    if best is None:
        return f"{said}; not yet validated."
    return f"{said}; best validation {run.metrics[run.measure].shown(best[0])}, step {best[1]:,}."


def _missing(found: Contents) -> Html:
    if not found.missing:
        return Html("")
    items = joined(Html(f"<li>{text(line)}</li>") for line in found.missing)
    return Html(
        '<section class="missing" aria-labelledby="missing"><h2 id="missing">Missing</h2>'
        f"\n<ul>{items}</ul></section>"
    )
