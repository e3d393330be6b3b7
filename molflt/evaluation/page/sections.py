"""Sections that the pages of all recipes share."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Mapping
from functools import partial

import numpy as np

from molflt.evaluation.page.contents import OF_STRUCTURES, Contents
from molflt.evaluation.page.pictures import Details, Lines, Part, Pictures, Section, Table
from molflt.evaluation.runs import Run, flat_options, standard_error
from molflt.files import readable_size
from molflt.metrics import Metric
from molflt.training.config import defaults, plain
from molflt.training.outcome import draw_curve

__all__ = ["encodings", "files", "overview", "repeat", "results", "settings", "training"]

_UNITS = {
    "eV": "eV",
    "eV2": "eV²",
    "percent": "%",
    "A": "Å",
    "meV_per_atom": "meV/atom",
    "meV_per_A": "meV/Å",
    "meV_per_A3": "meV/Å³",
    "nats": "nats",
    "bits": "bits",
}
_UNIT = re.compile(rf"^(.+)_({'|'.join(sorted(_UNITS, key=len, reverse=True))})$")
_NAMES = {
    "bleu": "BLEU ↑",
    "chrf": "chrF ↑",
    "nearest": "attention on the nearest 10 % of the tokens",
    "farthest": "attention on the farthest 10 % of the tokens",
}
_NAMED_BY = {"learned_optimizer": "--tasks", "population_optimizer": "--functions"}
_VALIDATIONS = 20  # rows in the table of validations
_FILES = 200
_KEPT = {  # pictures of evaluations -> title, description
    "encoding.png": (
        "Learned relative encodings",
        "The relative positional encoding of each head against the offset between two tokens, "
        "added to the logit or multiplied with the weight, see the label of the axis.",
    ),
    "attention.png": (
        "Attention of the last layer",
        "Attention matrices of queries (rows) and keys (columns), a panel per head.",
    ),
    "cross-attention.png": (
        "Attention of the target on the source",
        "Attention matrices of the decoder on the source, a panel per head.",
    ),
    "losses.png": (
        "Loss against the position in the block",
        "Mean loss per token, in nats, against the number of preceding tokens.",
    ),
    "substitutions.png": (
        "Similarity of amino acids",
        "The learned similarity of pairs of amino acids, and BLOSUM62 if it is installed.",
    ),
    "confusion.png": (
        "Confusions",
        "The share of the images of each class (row) that were assigned to each class (column).",
    ),
    "wrong.png": ("Confident mistakes", "The misclassified images with the largest probabilities."),
    "best_values.png": (
        "Unseen functions",
        "The best value so far against the number of function evaluations, a panel per function: "
        "mean and standard deviation over runs.",
    ),
    "forces.png": (
        "Forces",
        "Predicted against labeled components of the forces, in eV/Å, a panel per split.",
    ),
    "optimizations.png": (
        "Unseen tasks",
        "Loss against the step on unseen tasks: mean and range over repeats.",
    ),
    "published.png": (
        "Comparison with published models",
        "Predicted against labeled energies, in eV, a panel per model.",
    ),
}


def overview(run: Run) -> Section:
    """Describes the run."""
    data = run.config["data"]
    sets = "; ".join(
        f"{use}: "
        + ", ".join(f"{_counted(n)} {name}" for name, n in own.items() if name != "sha256")
        for use, own in run.data.items()
    )
    best = run.best
    measure = run.metrics[run.measure]
    most = run.config["trainer"]["max_steps"]
    rows = [
        ("recipe", f"{run.config['recipe']}, seed {run.config['seed']}"),
        ("data", ", ".join(f"{k} {v}" for k, v in data.items() if isinstance(v, str))),
        ("sets", sets or "unknown"),
        ("parameters", f"{run.parameters:,}" if run.parameters else "unknown"),
        ("steps", f"{'unknown' if run.step is None else f'{run.step:,}'} of {most:,}"),
        ("time of training", run.time if run.seconds is not None else "unknown"),
        (
            "best validation",
            "none" if best is None else f"{measure.shown(best[0])} at step {best[1]:,}",
        ),
    ]
    body = Table(("property", "value"), rows, "The run at a glance.", text_columns=2)
    return Section("overview", "Overview", [body])


def _counted(count: object) -> str:
    return f"{count:,}" if isinstance(count, int) else str(count)


def heading(name: str, metrics: Mapping[str, Metric]) -> str:
    """Returns a metric with its unit and an arrow that shows which direction is better."""
    if name in metrics:
        return f"{metrics[name].axis} {'↑' if metrics[name].largest_is_best else '↓'}"
    if name in _NAMES:
        return _NAMES[name]
    inner = name.removeprefix("baseline_")
    if inner != name and inner in metrics:
        return f"baseline {metrics[inner].axis}"
    found = _UNIT.match(name)
    return f"{found[1].replace('_', ' ')} / {_UNITS[found[2]]}" if found else name.replace("_", " ")


def results(found: Contents) -> Section:
    """Shows the metrics by split."""
    run = found.run
    metrics = {} if run is None else run.metrics
    rows: list[list[str]] = []
    for name in dict.fromkeys(name for row in found.results.values() for name in row):
        cells = []
        for split, row in found.results.items():
            error = None if run is None or name not in row else standard_error(run, split, name)
            cells.append(_number(row.get(name), error, metrics.get(name)))
        rows.append([heading(name, metrics), *cells])
    text = "Metrics by split (results.json)"
    if metrics:
        text += "; ↓ lower is better, ↑ higher is better"
    if any(" ± " in cell for row in rows for cell in row):
        text += "; ± is the standard error over the systems"
    return Section("results", "Results", [Table(["metric", *found.results], rows, f"{text}.")])


def _number(value: float | None, error: float | None = None, metric: Metric | None = None) -> str:
    if value is None or not math.isfinite(value):
        return "–"
    if isinstance(value, int):
        return f"{value:,}"
    # as in tables of evaluations and comparisons
    form = f".{metric.digits + (metric.digits > 2)}f" if metric is not None else ".4g"
    form = ",.1f" if abs(value) >= 1000 else form
    return f"{value:{form}}" + ("" if error is None else f" ± {error:{form}}")


def training(found: Contents, pictures: Pictures) -> Section | None:
    """Shows training curves and the last validations."""
    if not found.columns:
        return None
    run = found.run
    metrics = {} if run is None else run.metrics
    measure = "" if run is None else run.measure
    parts: list[Part] = []
    draw = partial(draw_curve, found.path, metrics=metrics, measure=measure)
    steps = found.columns["step"]
    last = int(np.nanmax(steps)) if np.isfinite(steps).any() else 0
    alt = f"Loss, metrics and learning rate against the step, up to step {last:,}."
    if run is not None and run.best is not None:
        alt += f" Best validation: {metrics[measure].shown(run.best[0])} at step {run.best[1]:,}."
    figure = found.attempt(lambda: pictures.drawn(alt, "Training and validation.", draw), None)
    parts += [figure] if figure is not None else []
    names = [name for name in found.columns if name.startswith("val_")]
    known = [
        place
        for place in range(len(steps))
        if any(np.isfinite(found.columns[name][place]) for name in names)
    ]
    if known:
        rows = [
            [f"{steps[i]:.0f}", *(_validated(found, name, i, metrics) for name in names)]
            for i in known[-_VALIDATIONS:]
        ]
        head = ["step", *(heading(name.removeprefix("val_"), metrics) for name in names)]
        caption = f"The last {len(rows)} of {len(known)} validations (metrics.csv)."
        parts.append(Details("Validations", [Table(head, rows, caption)]))
    return Section("training", "Training", parts)


def _validated(found: Contents, name: str, place: int, metrics: Mapping[str, Metric]) -> str:
    return _number(float(found.columns[name][place]), None, metrics.get(name.removeprefix("val_")))


def encodings(found: Contents, pictures: Pictures) -> Section | None:
    """Shows the pictures of the evaluation, encodings first."""
    figures = []
    for name, (title, alt) in _KEPT.items():
        file = found.path / name
        if file.is_file():
            figure = found.attempt(partial(pictures.kept, file, alt, f"{title}. {alt}"), None)
            figures += [figure] if figure is not None else []
    title = "Encodings and pictures of the evaluation"
    return Section("pictures", title, figures) if figures else None


def settings(run: Run) -> Section:
    """Shows options that differ from their defaults, and all options."""
    own = dict(flat_options(run.config))
    usual = dict(flat_options(plain(defaults(run.config["recipe"]))))  # type: ignore[arg-type]
    chosen = [(key, value) for key, value in own.items() if usual.get(key) != value]
    head = ("option", "value")
    changed = Table(head, chosen, "Options that differ from their defaults.", 2, 500)
    everything = Table(head, list(own.items()), "config.yaml.", 2, 500)
    return Section("settings", "Settings", [changed, Details("All options", [everything])])


def files(found: Contents) -> Section:
    """Shows versions and the files in the folder."""
    parts: list[Part] = []
    if found.versions:
        rows = [(name, value) for name, value in found.versions.items() if value is not None]
        caption = "Versions at the start of the run (versions.json)."
        parts.append(Table(("package", "version"), rows, caption, 2, 100))
    there = sorted(path for path in found.path.rglob("*") if path.is_file())
    sizes = [
        (path.relative_to(found.path).as_posix(), readable_size(path.stat().st_size))
        for path in there
        if path.name != "report.html"
    ]
    listing = Table(("file", "size"), sizes, "Files of the run.", most=_FILES)
    parts.append(Details("Files", [listing]))
    return Section("versions", "Versions and files", parts)


def repeat(found: Contents) -> Section:
    """Shows the commands that repeat the run."""
    config = shlex.quote(str(found.path / "config.yaml"))
    lines = []
    if version := found.versions.get("molflt"):
        commit = found.versions.get("git_commit")
        made = f"molflt {version}" + (f", commit {commit}" if commit else "")
        lines.append(f"# {' '.join(made.split())}")  # on one line, as a comment
    lines.append(f"molflt train --config {config} --run AGAIN")
    lines.append(shlex.join(["molflt", "evaluate", "AGAIN", *_of_results(found)]))
    lines.append("molflt report AGAIN")
    said = "AGAIN is the name of a new folder."
    return Section("repeat", "How to repeat it", [said, Lines(lines)])


def _of_results(found: Contents) -> list[str]:
    """Returns the options of the evaluation that wrote the results."""
    recipe = "" if found.run is None else str(found.run.config["recipe"])
    if not found.results:
        return []
    data = [] if found.given is None else ["--data", found.given]
    if data and recipe not in (*OF_STRUCTURES, *_NAMED_BY):
        return data
    return [_NAMED_BY.get(recipe, "--splits"), *found.results, *data]
