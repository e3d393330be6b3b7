"""Report of a run as one self-contained HTML page, rendered from the template page.html."""

from __future__ import annotations

import base64
import csv
import io
import math
import shlex
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jinja2 import Environment

from molflt import plots
from molflt.data.structures.data_set import DataSet
from molflt.data.structures.potential_data import SinglePoints
from molflt.evaluation.results import FIGURES, RESULTS, given_data
from molflt.evaluation.runs import Run, flat_options, standard_error
from molflt.files import readable_size, shown, verify_tensors
from molflt.metrics import Metric
from molflt.plots.figure import DPI
from molflt.training.config import defaults, plain
from molflt.training.run_folder import draw_curve, read_versions
from molflt.version import __version__

__all__ = ["Page", "page_of"]

_OF_STRUCTURES = ("is2re", "potential")  # recipes whose predictions.csv has a row per structure
_LONGEST = 400  # maximum number of characters in a text
_VALIDATIONS = 20  # rows in the table of validations
_DRAWN, _LISTED = 6, 15  # worst predictions in figures and in the table
_NAMES = {
    "bleu": "BLEU ↑",
    "chrf": "chrF ↑",
    "nearest": "attention to the nearest 10 % of the tokens",
    "farthest": "attention to the farthest 10 % of the tokens",
}
_NAMED_BY = {"learned_optimizer": "--tasks", "population_optimizer": "--functions"}
_LARGEST_PNG = 500_000  # bytes; larger figures are reduced to a palette
_BUDGET = 2_500_000  # total bytes of all figures, for a page of up to 3 MB
_EXPECTED = {  # files of a finished run, and the consequences if they are missing
    "checkpoints/last.ckpt": "time and data of the training are unknown",
    "checkpoints/best.safetensors": "the best weights are lost, or the run was never validated",
    "metrics.csv": "curves are not shown",
    "versions.json": "versions are unknown",
}

_Part = Mapping[str, Any] | str  # a table, a figure or a row of figures; a string is a paragraph


class Page:
    """Contents of a run folder for its report.

    Attributes:
        missing: one line for each missing or damaged part.
    """

    def __init__(self, path: Path) -> None:
        self.path = path = Path(path)
        self.missing: list[str] = []
        self._left = _BUDGET
        self.run = run = Run(path, path.resolve().name, self.attempt)
        self.recipe = str(run.config["recipe"])
        self.versions: Mapping[str, object] = self.attempt(lambda: read_versions(path), {})
        self.given = self.attempt(lambda: given_data(path), None)
        self.missing += [
            f"{path / name}: missing; {lost}"
            for name, lost in _EXPECTED.items()
            if not (path / name).is_file()
        ]
        if (best := path / "checkpoints" / "best.safetensors").is_file():
            self.attempt(lambda: verify_tensors(best), False)
        most = int(str(run.config["trainer"]["max_steps"]))
        if run.step is not None and run.step < most and "stopped" not in run.own:
            done = f"{run.step:,} of {most:,} steps are done"
            self.missing.append(f"{path}: {done}; resume with molflt train --resume")
        if run.unmeasured:
            self.missing.append(f"{run.unmeasured}; not shown; run molflt evaluate RUN")
        elif not (path / RESULTS).is_file():
            self.missing.append(f"{path}: not evaluated; run molflt evaluate RUN")

    def attempt(self, read: Callable[[], Any], otherwise: Any) -> Any:
        """Returns `read()`; if it fails, adds the reason to `missing` and returns `otherwise`."""
        try:
            return read()
        except KeyError as error:
            line = f"{self.path}: a table has no column {shown(error.args[0])}"
        except (ValueError, OSError, ArithmeticError, csv.Error) as error:
            line = " ".join(str(error).split())
        self.missing += [line] * (line not in self.missing)
        return otherwise

    def drawn(self, text: str, draw: Callable[[Path], object]) -> list[_Part]:
        """Returns a list with one figure, captioned `text`; the list is empty if `draw` fails."""

        def make() -> list[_Part]:
            with tempfile.TemporaryDirectory() as folder:
                file = Path(folder) / "picture.png"
                draw(file)
                return self._embedded(file, text, text)

        return list(self.attempt(make, []))

    def pictures(self) -> list[_Part]:
        """Returns the existing figures of the evaluation."""
        parts: list[_Part] = []
        for name, text in FIGURES.items() if self.run.results else ():
            if (file := self.path / f"{name}.png").is_file():
                parts += self.attempt(partial(self._embedded, file, str(file), text), [])
        return parts

    def _embedded(self, file: Path, name: str, text: str) -> list[_Part]:
        content, width = _png(file.read_bytes(), name)
        data = base64.b64encode(content).decode()
        if len(data) > self._left:
            raise ValueError(f"{name}: not shown, because the page would be larger than 3 MB")
        self._left -= len(data)
        return [{"src": f"data:image/png;base64,{data}", "width": width, "text": text}]


def _png(content: bytes, name: str) -> tuple[bytes, int]:
    """Returns a PNG file (with a palette if it is large) and its width on the page."""
    from PIL import Image

    try:
        with Image.open(io.BytesIO(content), formats=["PNG"]) as image:
            width = round(image.width * 96 / DPI)
            image.load()
            if len(content) <= _LARGEST_PNG:
                return content, width
            buffer = io.BytesIO()
            image.convert("RGB").quantize(256).save(buffer, "PNG", optimize=True)
            return buffer.getvalue(), width
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(
            f"{name}: expected a PNG file; {shown(str(error), 100)}; evaluate the run again"
        ) from None


def _table(
    head: Sequence[str],
    rows: Sequence[Sequence[object]],
    caption: str,
    text_columns: int = 1,
    most: int = 30,
) -> _Part:
    """Returns a table of up to `most` rows; the first `text_columns` columns contain text."""
    parts = {"head": head, "rows": rows, "caption": caption}
    return {**parts, "text_columns": text_columns, "most": most}


def page_of(path: Path) -> tuple[str, list[str]]:
    """Renders a run as one HTML page; returns the page and a line for each missing part."""
    page = Page(path)
    sections = []
    for name, (title, make) in _SECTIONS.items():
        if parts := page.attempt(partial(make, page), []):
            sections.append({"name": name, "title": title, "parts": parts})
    environment = Environment(autoescape=True)
    environment.filters["cut"] = _cut
    source = files("molflt.evaluation").joinpath("page.html").read_text("utf-8")
    made = environment.from_string(source).render(
        title=f"Run {page.run.name}", missing=page.missing, sections=sections, version=__version__
    )
    return made, page.missing


def _cut(value: object, longest: int = _LONGEST) -> str:
    whole = "–" if value is None else str(value)
    return whole if len(whole) <= longest else f"{whole[:longest]}… ({len(whole):,} characters)"


def _overview(page: Page) -> list[_Part]:
    run = page.run
    data, best, measure = run.config["data"], run.best, run.metrics[run.measure]
    sets = (
        (use, [f"{n:,} {key}" for key, n in own.items() if isinstance(n, int)])
        for use, own in run.own.get("data", {}).items()
    )
    steps = "unknown" if run.step is None else f"{run.step:,}"
    rows = [
        ("recipe", f"{page.recipe}, seed {run.config['seed']}"),
        ("data", ", ".join(f"{k} {v}" for k, v in data.items() if isinstance(v, str))),
        ("sets", "; ".join(f"{use}: {', '.join(own)}" for use, own in sets) or "unknown"),
        ("parameters", f"{run.parameters:,}" if run.parameters else "unknown"),
        ("steps", f"{steps} of {run.config['trainer']['max_steps']:,}"),
        ("time of training", run.time if run.seconds is not None else "unknown"),
        ("best validation", f"{measure.shown(best[0])} at step {best[1]:,}" if best else "none"),
    ]
    return [_table(("property", "value"), rows, "Summary of the run.", 2)]


def _heading(name: str, metrics: Mapping[str, Metric]) -> str:
    if name in metrics:
        return f"{metrics[name].axis} {'↑' if metrics[name].largest_is_best else '↓'}"
    inner = name.removeprefix("baseline_")
    if inner in metrics:
        return f"baseline {metrics[inner].axis}"
    return _NAMES.get(name, name.replace("_", " "))


def _number(value: float | None, error: float | None = None, metric: Metric | None = None) -> str:
    if value is None or not math.isfinite(value):
        return "–"
    if isinstance(value, int):
        return f"{value:,}"
    # The format is the same as in evaluations and comparisons.
    form = f".{metric.digits + (metric.digits > 2)}f" if metric is not None else ".4g"
    form = ",.1f" if abs(value) >= 1000 else form
    return f"{value:{form}}" + ("" if error is None else f" ± {error:{form}}")


def _results(page: Page) -> list[_Part]:
    run, metrics = page.run, page.run.metrics
    rows = []
    for name in dict.fromkeys(name for row in run.results.values() for name in row):
        cells = [
            _number(row.get(name), standard_error(run, split, name), metrics.get(name))
            for split, row in run.results.items()
        ]
        rows.append([_heading(name, metrics), *cells])
    text = "Metrics by split (results.json); ↓ lower is better, ↑ higher is better"
    if any(" ± " in cell for row in rows for cell in row):
        text += "; ± is the standard error over the systems"
    return [_table(["metric", *run.results], rows, f"{text}.")] if rows else []


def _training(page: Page) -> list[_Part]:
    run, columns, metrics = page.run, page.run.columns, page.run.metrics
    if not columns:
        return []
    text = "Loss, metrics and learning rate against the step, up to step "
    text += f"{int(columns['step'].max(initial=0)):,}."
    if run.best is not None:
        text += f" Best validation: {metrics[run.measure].shown(run.best[0])} at step "
        text += f"{run.best[1]:,}."
    draw = partial(draw_curve, page.path, metrics=metrics)
    names = {name.removeprefix("val_"): name for name in columns if name.startswith("val_")}
    known = np.flatnonzero(np.isfinite([columns[name] for name in names.values()]).any(axis=0))
    rows = [
        [
            f"{columns['step'][i]:.0f}",
            *(_number(columns[n][i], None, metrics.get(key)) for key, n in names.items()),
        ]
        for i in known[-_VALIDATIONS:]
    ]
    head = ["step", *(_heading(name, metrics) for name in names)]
    caption = f"The last {len(rows)} of {len(known)} validations (metrics.csv)."
    details = {"summary": "Validations", "inside": [_table(head, rows, caption)]}
    return page.drawn(text, draw) + ([details] if rows else [])


def _settings(page: Page) -> list[_Part]:
    own = dict(flat_options(page.run.config))
    usual = dict(flat_options(plain(defaults(page.recipe))))
    chosen = [(key, value) for key, value in own.items() if usual.get(key) != value]
    head = ("option", "value")
    changed = _table(head, chosen, "Options that differ from their defaults.", 2, 500)
    everything = _table(head, list(own.items()), "All options (config.yaml).", 2, 500)
    return [changed, {"summary": "All options", "inside": [everything]}]


def _files(page: Page) -> list[_Part]:
    parts: list[_Part] = []
    if rows := [(name, value) for name, value in page.versions.items() if value is not None]:
        caption = "Versions at the start of the run (versions.json)."
        parts.append(_table(("package", "version"), rows, caption, 2, 100))
    sizes = [
        (path.relative_to(page.path).as_posix(), readable_size(path.stat().st_size))
        for path in sorted(page.path.rglob("*"))
        if path.is_file() and path.name != "report.html"
    ]
    listing = _table(("file", "size"), sizes, "Files in the run folder.", most=200)
    return [*parts, {"summary": "Files", "inside": [listing]}]


def _repeat(page: Page) -> list[_Part]:
    lines = []
    if version := page.versions.get("molflt"):
        commit = page.versions.get("git_commit")
        made = f"molflt {version}" + (f", commit {commit}" if commit else "")
        lines.append(f"# {' '.join(made.split())}")  # on one line, as a comment
    lines.append(f"molflt train --config {shlex.quote(str(page.path / 'config.yaml'))} --run AGAIN")
    options: list[str] = []
    if page.run.results:
        options = [] if page.given is None else ["--data", page.given]
        if not options or page.recipe in (*_OF_STRUCTURES, *_NAMED_BY):
            named = _NAMED_BY.get(page.recipe, "--splits")
            options = [named, *page.run.results, *options]
    lines.append(shlex.join(["molflt", "evaluate", "AGAIN", *options]))
    lines.append("molflt report AGAIN")
    return ["AGAIN is the name of a new folder.", {"lines": lines}]


class _System(NamedTuple):
    """A row of predictions.csv."""

    split: str
    place: int  # index in the split
    sid: int
    name: str  # adsorbate and slab, or formula
    natoms: int
    energy: float
    target: float
    error: float  # error of the energy in eV, or MAE of the forces in meV/Å


def _systems(page: Page) -> list[_System]:
    """Returns the systems with a known error, largest errors first."""
    counts: Counter[str] = Counter()
    systems = []
    of_forces = any(row.get("force_mae_eV_per_A") for row in page.run.predictions)
    for row in page.run.predictions:
        split, force = row["split"], float(row.get("force_mae_eV_per_A") or "nan")
        slab = f" on {row['slab']}" if row.get("slab") else ""
        name = row["formula"] if "formula" in row else row["adsorbate"] + slab
        energy, target = float(row["energy_eV"]), float(row["target_eV"] or "nan")
        error = 1e3 * force if of_forces else energy - target
        own = (split, counts[split], int(row["sid"]), name, int(row["natoms"]), energy, target)
        systems += [_System(*own, error)] if math.isfinite(error) else []
        counts[split] += 1
    return sorted(systems, key=lambda one: -abs(one.error))


def _worst(page: Page) -> list[_Part]:
    if page.recipe not in _OF_STRUCTURES or not page.run.results:
        return []
    if not page.run.predictions:
        raise ValueError(f"{page.path / 'predictions.csv'}: missing or empty; evaluate again")
    if not (systems := _systems(page)):
        return []
    unit, form, what, named = "eV", "+.3f", "error", "adsorbate and slab"
    if page.recipe == "potential":
        named = "formula"
        if page.path.joinpath("forces.png").is_file():
            unit, form, what = "meV/Å", ".1f", "mean error of the forces"
    rows = []
    for one in systems[:_LISTED]:
        numbers = (f"{one.error:{form}}", f"{one.target:.3f}", f"{one.energy:.3f}")
        rows.append([one.name, *numbers, one.natoms, one.sid, one.split])
    caption = f"The {len(rows)} systems with the largest {what}, of {len(systems):,}."
    head = (named, f"{what} / {unit}", "label / eV", "prediction / eV", "atoms", "sid", "split")
    worst, structures = systems[:_DRAWN], dict[_System, Any]()
    for split in dict.fromkeys(one.split for one in worst):
        own = [one for one in worst if one.split == split]
        structures |= page.attempt(partial(_structures, page.run, split, own), {})
    figures: list[_Part] = []
    for one in filter(structures.__contains__, worst):
        text = f"sid {one.sid} ({one.split}): {one.name}, {one.natoms} atoms, viewed from the top "
        text += f"and from the side; {what} {one.error:{form}} {unit}"
        figures += page.drawn(text, partial(plots.structure_views, {"": structures[one]}))
    legend = (
        "Atoms of the adsorbate (tag 2) have thick edges, fixed atoms are hatched, and dashed "
        "lines show the cell. The structures are the inputs of the model."
    )
    parts = [_table(head, rows, caption)]
    return parts + ([legend, {"parts": figures}] if figures else [])


def _structures(run: Run, split: str, wanted: Sequence[_System]) -> dict[_System, Any]:
    data = DataSet.of_run(run.config["data"], run.config["seed"])
    for skip_bad in (False, True):  # finding the bad structures that are omitted reads all data
        with suppress(ValueError):
            opened: Any = data.open([split], skip_bad)[split]
            opened = SinglePoints(opened) if run.config["recipe"] == "potential" else opened
            found = {one: opened[one.place] for one in wanted if one.place < len(opened)}
            there = {(int(record.sid), record.num_nodes) for record in found.values()}
            if there == {(one.sid, one.natoms) for one in wanted}:
                return found
    raise ValueError(
        f"{data.root}: split {split} does not contain the structures of predictions.csv; the worst "
        "structures are not drawn"
    )


_SECTIONS: Mapping[str, tuple[str, Callable[[Page], list[_Part]]]] = {
    "overview": ("Overview", _overview),
    "results": ("Results", _results),
    "training": ("Training", _training),
    "pictures": ("Figures of the evaluation", Page.pictures),
    "worst": ("The worst predictions", _worst),
    "settings": ("Settings", _settings),
    "versions": ("Versions and files", _files),
    "repeat": ("How to reproduce it", _repeat),
}
