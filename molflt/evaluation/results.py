"""Results of evaluations: tables, CSV files, results.json and results_of.json.

results_of.json records the weights and the data with which results.json was made.
"""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from molflt.data.structures.base import AS_TRAINED
from molflt.files import clear_parts, read_json, shown, write_atomically
from molflt.plots.figure import FORMATS
from molflt.training.checkpoint import weights_digest
from molflt.training.config import Config, absolute

__all__ = ["RESULTS", "Evaluation", "Provenance", "Results", "align", "begin_results", "csv_rows"]
__all__ += ["csv_text", "fixed", "given_data", "is_within", "provenance_of", "results_table"]
__all__ += ["run_weights"]
__all__ += ["warn", "why_of_others", "write_csv", "write_results", "written"]

RESULTS = "results.json"
"""Name of the file with the metrics by split in the folder of an evaluation."""

_NOTE = "results_of.json"
_SPLITS = ("train", "val", "test")  # prefixes of usual names of splits

Provenance = dict[str, object]
"""checkpoint, weights (sha256 of each member, sorted), data (None for the data of the run), and
given (the value of --data, or None)"""


Results = dict[str, dict[str, float | None]]
"""split -> metric -> value; None where it is undefined or unknown"""


class Evaluation(NamedTuple):
    """The result of an evaluation."""

    results: Results
    text: str  # tables, to be printed after the name of the run
    files: list[Path]  # the files that were written


def fixed(value: float | None, digits: int) -> str:
    """Formats a number with a fixed number of decimals, or a count; None becomes a hyphen."""
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:.{digits}f}"


def results_table(
    title: str,
    columns: Mapping[str, tuple[str, int]],
    results: Mapping[str, Mapping[str, float | None]],
) -> str:
    """Formats metrics as text, one line per split; `title` is the heading of the splits.

    `columns` are metric -> heading and number of decimals; missing values become hyphens.
    """
    lines = [[title, *(heading for heading, _ in columns.values())]]
    for split, row in results.items():
        cells = (fixed(row.get(key), digits) for key, (_, digits) in columns.items())
        lines.append([split, *cells])
    return align(lines)


def align(lines: Sequence[Sequence[str]], text_columns: int = 1) -> str:
    """Aligns the first `text_columns` columns to the left and the other columns to the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    cells = [f"{{:{'<' if i < text_columns else '>'}{n}}}" for i, n in enumerate(widths)]
    return "\n".join("  ".join(cells).format(*line).rstrip() for line in lines)


def write_csv(path: Path, rows: Sequence[Mapping[str, object]]) -> Path:
    """Writes rows as CSV (see `csv_text`) and returns the path."""
    write_atomically(path, csv_text(rows).encode())
    return path


def csv_text(rows: Sequence[Mapping[str, object]]) -> str:
    """Formats rows as CSV; the header has the keys of all rows, and None becomes an empty cell."""
    buffer = io.StringIO()
    names = list(dict.fromkeys(name for row in rows for name in row))
    writer = csv.DictWriter(buffer, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return buffer.getvalue()


def csv_rows(text: str) -> list[dict[str, str]]:
    """Parses a table; raises ValueError or csv.Error if it is damaged."""
    rows: list[dict[str, str]] = list(csv.DictReader(io.StringIO(text), strict=True))
    if any(None in row or None in row.values() for row in rows):
        raise ValueError("a line has another number of cells than the first")
    return rows


def warn(text: str) -> None:
    """Prints a warning to stderr."""
    print(f"molflt: warning: {text}", file=sys.stderr)


def provenance_of(weights: Iterable[Path], checkpoint: str) -> Provenance:
    """Returns a record of the evaluated weights; call it before the evaluation."""
    digests = sorted(weights_digest(path) for path in weights)
    return {"checkpoint": checkpoint, "weights": digests, "data": None}


def begin_results(out: Path, *names: str) -> None:
    """Removes the results of an earlier evaluation; call it before writing the first file.

    Otherwise files of a failed evaluation would be mixed with those of an earlier one. `names` are
    all files that the evaluation may write; pictures are removed in all formats.
    """
    clear_parts(out)
    pictures = [Path(name).stem for name in names if name.endswith(".png")]
    others = [f"{stem}.{ending}" for stem in pictures for ending in FORMATS]
    for name in (RESULTS, _NOTE, *names, *others):  # RESULTS first
        (out / name).unlink(missing_ok=True)


def written(out: Path, *names: str) -> list[Path]:
    """Returns the files of `begin_results` that the evaluation has written."""
    return [out / name for name in names if (out / name).is_file()]


def write_results(
    out: Path,
    results: Results,
    provenance: Provenance,
    config: Config,
    data: object,
    reading: Mapping[str, object] | None = None,
) -> list[Path]:
    """Writes results.json and results_of.json, and returns them.

    Metrics are finite or None; `data` is the value of --data; `reading` are options for reading the
    data, such as energy_key and tags.
    """
    paths = [out / RESULTS, out / _NOTE]
    own = config["data"]
    others = _others(own, data, results)
    unlike = {
        key: x
        for key, x in (reading or {}).items()
        if x not in (AS_TRAINED, own.get(key)) and (x or key != "tags")
    }
    if others is None and unlike:
        how = ", ".join(f"{key} {value}" for key, value in unlike.items())
        others = f"{own.get('root') if data is None else data} with {how}"
    given = None if data is None else str(absolute(data))
    known = {**provenance, "data": others, "given": given}
    texts = [json.dumps(content, indent=2, allow_nan=False) + "\n" for content in (results, known)]
    paths[1].unlink(missing_ok=True)  # it must never describe other results
    for path, text in zip(paths, texts, strict=True):
        write_atomically(path, text.encode())
    return paths


def _others(own: Mapping[str, object], data: object, splits: Iterable[str]) -> str | None:
    """Returns the data as text; None if they belong to the run or the splits are named for them."""
    sources = [str(own[key]) for key in ("root", "train", "val", "test") if own.get(key)]
    if data is None or not sources:  # data of learned optimizers are part of a task
        return None
    path = Path(str(data))
    if any(is_within(path, Path(source)) for source in sources):
        return None
    taken = {own.get("train_split"), own.get("val_split")}
    named = all(
        one in {path.name, path.stem} - taken and not one.startswith(_SPLITS) for one in splits
    )
    return None if named else str(data)


def is_within(data: Path, source: Path) -> bool:
    """Returns True if `data` is `source` or part of it, or has its name if `source` was moved."""
    if source.exists():
        return source.resolve() in (data.resolve(), *data.resolve().parents)
    return data == source or data.name == source.name


def run_weights(run: Path) -> list[Path]:
    """Returns the file of the best weights of a run, or else of the last weights."""
    files = [run / "checkpoints" / f"{name}.safetensors" for name in ("best", "last")]
    return [path for path in files if path.is_file()][:1]


def why_of_others(folder: Path, weights: Sequence[Path]) -> str:
    """Explains why results do not match these weights and the data of their run; "" if they do.

    Without weights, only the data are compared. Results of earlier versions without results_of.json
    are accepted.
    """
    path = folder / RESULTS
    if not (found := _note(folder)):
        return ""
    if found["data"] is not None:
        return f"{path}: results of other data, {shown(found['data'])}"
    if weights and found["weights"] != sorted(weights_digest(one) for one in weights):
        checkpoint = shown(found["checkpoint"])
        return f"{path}: results of other weights, checkpoint {checkpoint} at that time"
    return ""


def given_data(folder: Path) -> str | None:
    """Returns the value of --data of the evaluation in a folder; None if it was not given."""
    given = _note(folder).get("given")  # missing in earlier versions
    return given if isinstance(given, str) else None


def _note(folder: Path) -> Provenance:
    """Reads results_of.json; the result is empty without this file or without results."""
    note = folder / _NOTE
    if not (folder / RESULTS).is_file() or not note.is_file():
        return {}
    expected, hint = "weights and data of results.json", "evaluate the run again"
    found = read_json(note, expected, hint)
    if not isinstance(found, dict) or not {"checkpoint", "weights", "data"} <= found.keys():
        raise ValueError(f"{note}: expected {expected}; got {shown(found)}; {hint}")
    return found
