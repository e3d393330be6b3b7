"""Assembly of the page of a run from its sections."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from importlib.resources import files
from pathlib import Path

from jinja2 import Environment

from molflt.evaluation.page import sections
from molflt.evaluation.page.contents import OF_STRUCTURES, Contents, read_contents
from molflt.evaluation.page.pictures import Pictures, Section
from molflt.evaluation.page.systems import parity, worst_systems
from molflt.version import __version__

__all__ = ["page_of"]

_LONGEST = 400  # maximum characters of a text


def page_of(run: Path) -> tuple[str, list[str]]:
    """Renders a run as one HTML page, and returns it with a line for each missing part."""
    found = read_contents(run)
    parts = list(_sections(found))
    environment = Environment(autoescape=True)
    environment.filters |= {"cut": _cut, "minus": _minus}
    source = files("molflt.evaluation.page").joinpath("page.html").read_text("utf-8")
    made = environment.from_string(source).render(
        title=f"Run {found.path.resolve().name}",
        summary=_summary(found),
        missing=found.missing,
        sections=parts,
        version=__version__,
    )
    return made, found.missing


def _cut(value: object, longest: int = _LONGEST) -> str:
    """Returns a value as text, shortened if it is too long."""
    whole = "–" if value is None else str(value)
    return whole if len(whole) <= longest else f"{whole[:longest]}… ({len(whole):,} characters)"


def _minus(cell: object) -> object:
    """Replaces the hyphen of a negative number by a minus sign."""
    return f"−{cell[1:]}" if isinstance(cell, str) and cell.startswith("-") else cell


def _sections(found: Contents) -> Iterator[Section]:
    """Yields the sections in order; sections that fail are recorded as missing."""
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
