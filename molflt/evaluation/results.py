"""Evaluation results: tables, CSV files, results.json and results_of.json.

results_of.json records the weights and the data to which results.json belongs.
"""

import csv
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from molflt.data.structures.base import AS_TRAINED
from molflt.files import csv_rows, csv_text, read_json, shown, warn, write_atomically
from molflt.metrics import Metric
from molflt.plots.figure import FORMATS
from molflt.training.checkpoint import weights_digest
from molflt.training.config import Config

RESULTS = "results.json"
"""Name of the file with the metrics of each split in the folder of an evaluation."""

_NOTE = "results_of.json"
_SPLITS = ("train", "val", "test")  # usual prefixes of split names
_READING = ("energy_key", "tags", "forces_key", "stress_key")  # options for reading the data
_TABLES = ["predictions.npz", "predictions.csv", "errors_by_group.csv", "translations-*.txt"]
_TABLES += ["curves.csv", "best_values.csv"]

FIGURES = {
    "parity": "Predicted against labeled energies, with one panel per split. Errors are "
    "predictions minus labels; the largest are named.",
    "forces": "Predicted against labeled force components, with one panel per split.",
    "encoding": "Learned relative positional encoding of each head against the offset between "
    "two tokens. It is added to the logit or multiplies the weight, as stated in the axis label.",
    "attention": "Attention of the last layer by head, with queries as rows and keys as columns.",
    "cross-attention": "Attention of the target to the source, with one panel per head.",
    "losses": "Mean loss per token, in nats, against the position in the block or image.",
    "substitutions": "Learned similarity of pairs of amino acids, and BLOSUM62 if Biopython is "
    "installed.",
    "best_values": "Logarithm of the best value so far: mean and standard deviation over runs.",
    "optimizations": "Loss against the step: geometric mean and range over repeats.",
    "uncertainty": "Coverage of the intervals, and errors against the uncertainty.",
}
"""Captions of the figures of evaluations, by name."""

COLUMNS = {
    "n": ("n", 0),
    "mae_eV": ("MAE / eV", 4),
    "ewt_percent": ("EwT / %", 2),
    "baseline_mae_eV": ("baseline MAE / eV", 4),
    "adwt_percent": ("ADwT / %", 3),
    "initial_adwt_percent": ("ADwT of initial positions / %", 3),
    "position_error_A": ("position error / Å", 3),
    "energy_mae_meV_per_atom": ("E MAE / meV/atom", 2),
    "baseline_energy_mae_meV_per_atom": ("baseline / meV/atom", 2),
    "force_mae_meV_per_A": ("F MAE / meV/Å", 2),
    "force_rmse_meV_per_A": ("F RMSE / meV/Å", 2),
    "baseline_force_mae_meV_per_A": ("baseline / meV/Å", 2),
    "stress_mae_meV_per_A3": ("stress MAE / meV/Å³", 2),
    "coverage_n": ("systems", 0),
    "coverage_percent": ("coverage / %", 1),
    "coverage_se_percent": ("standard error / %", 1),
    "coverage_crossed_percent": ("cross-coverage / %", 1),
    "uncertainty_eV": ("uncertainty / eV", 4),
    "spread_eV": ("spread / eV", 4),
    "rank_correlation": ("rank correlation", 2),
    "member_mae_eV": ("MAE of one member / eV", 4),
    "bleu": ("BLEU", 2),
    "chrf": ("chrF", 2),
    "length_ratio": ("length ratio", 2),
    "perplexity": ("perplexity", 2),
    "bits_per_token": ("bits/token", 3),
    "tokens": ("tokens", 0),
    "nearest": ("nearest 10 %", 3),
    "farthest": ("farthest 10 %", 3),
    "next_sentence_percent": ("next sentence / %", 2),
    "gaps": ("gaps", 0),
    "residue_perplexity": ("perplexity", 2),
    "residue_accuracy_percent": ("accuracy / %", 2),
    "unigram_perplexity": ("unigram perplexity", 2),
    "unigram_accuracy_percent": ("unigram accuracy / %", 2),
    "residues": ("residues", 0),
    "pairs": ("pairs", 0),
    "accuracy_percent": ("accuracy / %", 2),
    "f1_percent": ("f1 / %", 2),
    "matthews_percent": ("matthews / %", 2),
    "pearson_percent": ("pearson / %", 2),
    "spearman_percent": ("spearman / %", 2),
    "top1_percent": ("top-1 / %", 2),
    "top5_percent": ("top-5 / %", 2),
    "cross_entropy": ("cross-entropy / nats", 4),
    "bits_per_dim": ("bits/dim", 3),
    "histogram_bits_per_dim": ("histogram bits/dim", 3),
    "uniform_bits_per_dim": ("uniform bits/dim", 3),
}
"""Headings and numbers of decimal places of metrics in tables."""

ResultsOf = dict[str, object]
"""Content of results_of.json: checkpoint, weights (sorted SHA-256 digests) and data (None for the
data of the run, otherwise a description of the data)."""

Results = dict[str, dict[str, float | None]]
"""Values of metrics by split and name; None if a metric is undefined or unknown."""


def number_format(name: str, metric: Metric | None) -> str:
    """Returns the format of a metric: decimal places as in `COLUMNS`, or as in `metric`."""
    if name in COLUMNS:
        return f".{COLUMNS[name][1]}f"
    return ".4g" if metric is None else f".{metric.digits}f"


class Evaluation(NamedTuple):
    """The result of an evaluation."""

    results: Results
    text: str  # tables to print after the name of the run


def results_table(
    title: str,
    results: Mapping[str, Mapping[str, float | None]],
    names: Iterable[str] = COLUMNS,
    **others: tuple[str, int],
) -> str:
    """Formats metrics as text, with one line per split under the heading `title`.

    Columns are the metrics among `names` that occur in any split, formatted as in `COLUMNS` or
    `others`. Missing values become hyphens.
    """
    measured = {name for row in results.values() for name in row}
    formats = COLUMNS | others
    columns = {name: formats[name] for name in names if name in measured}

    def cell(value: float | None, digits: int) -> str:
        if value is None or math.isnan(value):
            return "-"
        return f"{value:,}" if isinstance(value, int) else f"{value:.{digits}f}"

    lines = [[title, *(heading for heading, _ in columns.values())]]
    for split, row in results.items():
        lines.append([split, *(cell(row.get(key), digits) for key, (_, digits) in columns.items())])
    return align(lines)


def align(lines: Sequence[Sequence[str]], text_columns: int = 1) -> str:
    """Formats a table; left-aligns the first `text_columns` columns and right-aligns the others."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]

    def aligned(i: int, cell: str) -> str:
        return cell.ljust(widths[i]) if i < text_columns else cell.rjust(widths[i])

    rows = ("  ".join(aligned(i, cell) for i, cell in enumerate(line)) for line in lines)
    return "\n".join(row.rstrip() for row in rows)


def write_csv(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    """Writes rows as CSV, formatted by `csv_text`."""
    write_atomically(path, csv_text(rows).encode())


def read_rows(path: Path) -> list[dict[str, str]]:
    """Returns the rows of a CSV file of an evaluation, or an empty list if it is missing."""
    if not path.is_file():
        return []
    try:
        return csv_rows(path.read_text(encoding="utf-8"))
    except (ValueError, csv.Error) as error:
        raise ValueError(f"{path}: expected CSV; {shown(str(error))}; evaluate again") from None


def finite_row(columns: Mapping[str, NDArray[np.float64]], i: int) -> dict[str, float | None]:
    """Returns row i of a table, with NaN replaced by None."""
    return {name: None if np.isnan(x[i]) else float(x[i]) for name, x in columns.items()}


def write_results(
    out: Path,
    created: Path,
    results: Results,
    inputs: ResultsOf,
    config: Config,
    options: Mapping[str, object],
) -> list[Path]:
    """Writes results.json, results_of.json and the files of an evaluation, and returns their paths.

    The files are moved from the folder `created` to `out`, where they replace earlier files.
    Metrics that JSON cannot represent, such as an infinite perplexity, become None. `options`
    contains the value of --data, under the key "data", and the options for reading this data set.
    """
    finite = {
        split: {k: None if x is None or not math.isfinite(x) else x for k, x in row.items()}
        for split, row in results.items()
    }
    note = {**inputs, "data": _data_note(config["data"], options, results)}
    _warn_of_replaced(out, results, note)
    files = {path.name: path.read_bytes() for path in sorted(created.iterdir())}
    for name, content in {RESULTS: finite, _NOTE: note}.items():
        files[name] = f"{json.dumps(content, indent=2, allow_nan=False)}\n".encode()
    figures = [f"{name}.{ending}" for name in FIGURES for ending in FORMATS]
    if (out / RESULTS).is_file():  # other folders may hold unrelated files of these names
        for name in (*figures, *_TABLES, RESULTS, _NOTE):
            for path in [*out.glob(name)]:
                path.unlink()
    for name, content in files.items():  # results.json is written after the files it belongs to
        write_atomically(out / name, content)
    return [out / name for name in files]


def _warn_of_replaced(out: Path, results: Results, note: ResultsOf) -> None:
    """Warns about earlier results of other splits, another checkpoint or other data."""
    try:
        splits = read_json(out / RESULTS, "metrics by split", "")
        before = _note(out)
    except (OSError, ValueError):  # missing or damaged
        return
    same = all(before.get(key, note[key]) == note[key] for key in ("checkpoint", "data"))
    if replaced := [split for split in splits if split not in results or not same]:
        source = f"checkpoint {shown(before['checkpoint'])}, " if before else ""
        source += f"data {shown(before['data'])}, " if before.get("data") else ""
        warn(
            f"{out / RESULTS}: replaces earlier results ({source}splits {', '.join(replaced)}); to "
            "keep both, evaluate all splits at once, or write to another folder with --out"
        )


def _data_note(
    trained: Mapping[str, object], options: Mapping[str, object], splits: Iterable[str]
) -> str | None:
    """Describes the data; None for those of the run, or if the splits are named after --data."""
    data = options.get("data")
    reading = {key: options.get(key, AS_TRAINED) for key in _READING}
    reading["tags"] = reading["tags"] or AS_TRAINED  # None stands for the tags of training
    changes = [
        f"{key} {value}"
        for key, value in reading.items()
        if value not in (AS_TRAINED, trained.get(key))
    ]
    sources = [Path(str(trained[k])) for k in ("root", "train", "val", "test") if trained.get(k)]
    path = Path(str(data))
    # the data of learned optimizers, which have no sources, are part of a task
    if data is not None and sources and not any(is_within(path, source) for source in sources):
        names = {path.name, path.stem} - {trained.get("train_split"), trained.get("val_split")}
        if not all(split in names and not split.startswith(_SPLITS) for split in splits):
            return str(data)
    if changes:
        return f"{trained.get('root') if data is None else data} with {', '.join(changes)}"
    return None


def is_within(data: Path, source: Path) -> bool:
    """Returns True if `data` is `source` or part of it; a missing `source` is compared by name."""
    if source.exists():
        return source.resolve() in (data.resolve(), *data.resolve().parents)
    return data == source or data.name == source.name


def own_results(folder: Path, weights: Sequence[Path]) -> tuple[Results, str]:
    """Returns results.json if it belongs to these weights and to the data of the run.

    Otherwise, returns no results and the reason, which is empty if the file is missing. Without
    results_of.json, as in earlier versions, results belong to both. Without `weights`, only the
    data are compared.
    """
    path, note = folder / RESULTS, _note(folder)
    if note and note["data"] is not None:
        return {}, f"{path}: belongs to different data, {shown(note['data'])}"
    if note and weights and note["weights"] != sorted(map(weights_digest, weights)):
        return {}, f"{path}: belongs to different weights, checkpoint {shown(note['checkpoint'])}"
    advice = "evaluate the run again"
    content = read_json(path, "metrics by split in JSON", advice, missing_ok=True)
    return content if isinstance(content, dict) else {}, ""


def _note(folder: Path) -> ResultsOf:
    """Reads results_of.json; returns an empty record if this file or results.json is missing."""
    if not (folder / RESULTS).is_file():
        return {}
    expected, advice = "the weights and data of results.json", "evaluate the run again"
    return read_json(folder / _NOTE, expected, advice, missing_ok=True) or {}
