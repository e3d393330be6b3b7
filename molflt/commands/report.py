"""``molflt report``: a self-contained HTML page about a run, rendered from page.html."""

import base64
import csv
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment

from molflt.commands.compare import Run, flat_options, standard_error
from molflt.evaluation.results import COLUMNS, FIGURES, RESULTS, number_format
from molflt.files import expect_ending, readable_size, shown, verify_tensors, warn, write_atomically
from molflt.metrics import Metric
from molflt.plots.figure import DPI
from molflt.training.config import defaults, plain
from molflt.training.run_folder import draw_curve, read_versions
from molflt.version import __version__

_WORST = 15  # rows in the table of the worst predictions
_NAMES = {
    "bleu": "BLEU ↑",
    "chrf": "chrF ↑",
    "nearest": "attention to the nearest 10 % of the tokens",
    "farthest": "attention to the farthest 10 % of the tokens",
}
_EXPECTED = {  # files of a finished run, and the effect if one is missing
    "checkpoints/last.ckpt": "time and data of the training are unknown",
    "checkpoints/best.safetensors": "the best weights are lost, or the run was never validated",
    "metrics.csv": "curves are not shown",
    "versions.json": "versions are unknown",
}

_Part = Mapping[str, Any]  # a table or a figure


def report(run: Path, out: Path | None = None) -> None:
    """Writes an HTML page about a run: curves, metrics, errors, figures, settings.

    The page does not load other files. For a run that is unfinished, not evaluated or damaged, the
    page lists the missing parts and shows the other parts.

    Args:
        run: folder of a training run.
        out: file to write; by default report.html in the run folder.
    """
    out = run / "report.html" if out is None else out
    expect_ending(out, ".html", ".htm")
    page = Page(run)
    sections = {title: page.attempt(partial(make, page), []) for title, make in _SECTIONS.items()}
    environment = Environment(autoescape=True)
    source = files("molflt.commands").joinpath("page.html").read_text("utf-8")
    html = environment.from_string(source).render(
        title=f"Run {page.name}",
        missing=page.missing,
        sections={title: parts for title, parts in sections.items() if parts},
        version=__version__,
    )
    content = html.encode("utf-8", "backslashreplace")
    write_atomically(out, content)
    if page.missing:
        warn(" | ".join(page.missing))
    print(f"written: {out} ({readable_size(len(content))})")


class Page(Run):
    """Contents of a run folder; `missing` has a line for each missing or damaged part."""

    def __init__(self, path: Path) -> None:
        self.missing: list[str] = []
        super().__init__(path, path.resolve().name)
        self.versions: Mapping[str, object] = self.attempt(lambda: read_versions(path), {})
        self.missing += [
            f"{path / name}: missing; {lost}"
            for name, lost in _EXPECTED.items()
            if not (path / name).is_file()
        ]
        if (best := path / "checkpoints" / "best.safetensors").is_file():
            self.attempt(lambda: verify_tensors(best), False)
        max_steps = self.config["trainer"]["max_steps"]
        if self.step is not None and self.step < max_steps and "stopped" not in self.provenance:
            done = f"{self.step:,} of {max_steps:,} steps are done"
            self.missing.append(f"{path}: {done}; resume with molflt train --resume")
        if self.unmeasured:
            self.missing.append(f"{self.unmeasured}; not shown; run molflt evaluate RUN")
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
        if line not in self.missing:
            self.missing.append(line)
        return otherwise

    def figure(self, file: Path, text: str) -> list[_Part]:
        """Returns a list with a PNG file, or an empty list if it is missing."""
        content = file.read_bytes() if file.is_file() else b""
        if not content:
            return []
        width = int.from_bytes(content[16:20], "big") * 96 // DPI  # pixels, from the PNG header
        src = f"data:image/png;base64,{base64.b64encode(content).decode()}"
        return [{"src": src, "width": width, "text": text}]


def _table(
    head: Sequence[str], rows: Sequence[Sequence[object]], caption: str, text_columns: int = 1
) -> list[_Part]:
    """Returns a list with a table, whose first `text_columns` columns contain text."""
    return [{"head": head, "rows": rows, "caption": caption, "text_columns": text_columns}]


def _overview(run: Page) -> list[_Part]:
    data, best, measure = run.config["data"], run.best, run.metrics[run.measure]
    sets = []
    for part, counts in run.provenance.get("data", {}).items():
        numbers = [f"{n:,} {name}" for name, n in counts.items() if isinstance(n, int)]
        sets.append(f"{part}: {', '.join(numbers)}")
    steps = "unknown" if run.step is None else f"{run.step:,}"
    validation = f"{measure.shown(best.value)} at step {best.step:,}" if best else "none"
    rows = [
        ("recipe", f"{run.config['recipe']}, seed {run.config['seed']}"),
        ("data", ", ".join(f"{k} {v}" for k, v in data.items() if isinstance(v, str))),
        ("sets", "; ".join(sets) or "unknown"),
        ("parameters", f"{run.parameters:,}" if run.parameters else "unknown"),
        ("steps", f"{steps} of {run.config['trainer']['max_steps']:,}"),
        ("time of training", run.time if run.seconds is not None else "unknown"),
        ("best validation", validation),
    ]
    return _table(("property", "value"), rows, "Summary of the run.", 2)


def _heading(name: str, metrics: Mapping[str, Metric]) -> str:
    if name in metrics:
        return f"{metrics[name].axis} {'↑' if metrics[name].largest_is_best else '↓'}"
    of_baseline = name.removeprefix("baseline_")
    if of_baseline in metrics:
        return f"baseline {metrics[of_baseline].axis}"
    return _NAMES.get(name) or COLUMNS.get(name, (name.replace("_", " "), 0))[0]


def _number(name: str, value: float | None, error: float | None, metric: Metric | None) -> str:
    if value is None or not math.isfinite(value):
        return "–"
    if isinstance(value, int):
        return f"{value:,}"
    form = ",.1f" if abs(value) >= 1000 else number_format(name, metric)
    return f"{value:{form}}" + ("" if error is None else f" ± {error:{form}}")


def _results(page: Page) -> list[_Part]:
    metrics, rows = page.metrics, []
    for name in dict.fromkeys(name for row in page.results.values() for name in row):
        cells = [
            _number(name, row.get(name), standard_error(page, split, name), metrics.get(name))
            for split, row in page.results.items()
        ]
        rows.append([_heading(name, metrics), *cells])
    text = "Metrics by split (results.json); ↓ lower is better, ↑ higher is better"
    text += "; ± standard error." if " ± " in str(rows) else "."
    return _table(["metric", *page.results], rows, text) if rows else []


def _training(page: Page) -> list[_Part]:
    if not page.columns:
        return []
    text = "Loss, metrics and learning rate against the step."
    text += " The star marks the best weights." if page.best else ""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "curve.png"
        draw_curve(page.path, file, page.metrics)
        return page.figure(file, text)


def _pictures(page: Page) -> list[_Part]:
    figures = FIGURES.items() if page.results else ()
    return [part for name, text in figures for part in page.figure(page.path / f"{name}.png", text)]


def _worst(page: Page) -> list[_Part]:
    """Returns a table of the structures with the largest force MAEs or energy errors."""
    rows = page.predictions
    if page.config["recipe"] not in ("is2re", "potential") or not page.results:
        return []
    if not rows:
        raise ValueError(f"{page.path / 'predictions.csv'}: missing or empty; evaluate again")
    of_forces = any(row.get("force_mae_eV_per_A") for row in rows)
    quantity, unit, form = ("force MAE", "meV/Å", ".1f") if of_forces else ("error", "eV", "+.3f")
    lines = []  # |error| and cells
    for row in rows:
        label, energy = float(row["target_eV"] or "nan"), float(row["energy_eV"])
        force = 1e3 * float(row.get("force_mae_eV_per_A") or "nan")
        error = force if of_forces else energy - label
        name = row["formula"] if "formula" in row else f"{row['adsorbate']} on {row['slab']}"
        cells = (f"{error:{form}}", f"{label:.3f}", f"{energy:.3f}")
        if math.isfinite(error):
            sid = row.get("name") or row["sid"]  # a textual sid is a name
            lines.append((abs(error), [name, *cells, row["natoms"], sid, row["split"]]))
    lines.sort(key=lambda line: -line[0])
    worst = [cells for _, cells in lines[:_WORST]]
    head = ("structure", f"{quantity} / {unit}", "label / eV", "prediction / eV")
    caption = f"The {len(worst)} systems with the largest {quantity}, of {len(lines):,}."
    return _table((*head, "atoms", "sid", "split"), worst, caption) if worst else []


def _settings(page: Page) -> list[_Part]:
    by_default = dict(flat_options(plain(defaults(page.config["recipe"]))))
    options = flat_options(page.config)
    rows = [(name, value) for name, value in options if by_default.get(name) != value]
    caption = "Options that differ from their defaults; config.yaml contains all options."
    return _table(("option", "value"), rows, caption, 2)


def _versions(page: Page) -> list[_Part]:
    rows = [(name, value) for name, value in page.versions.items() if value is not None]
    caption = "Versions at the start of the run (versions.json)."
    return _table(("package", "version"), rows, caption, 2) if rows else []


_SECTIONS: Mapping[str, Callable[[Page], list[_Part]]] = {
    "Overview": _overview,
    "Results": _results,
    "Training": _training,
    "Figures of the evaluation": _pictures,
    "The worst predictions": _worst,
    "Settings": _settings,
    "Versions": _versions,
}
