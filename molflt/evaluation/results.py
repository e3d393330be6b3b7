"""Of which weights and which data the results of an evaluation are: a note beside results.json."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from molflt.data.structures.base import AS_TRAINED
from molflt.evaluation.report import _warn
from molflt.files import clear_parts, read_json, shown, write_atomically
from molflt.plots.figure import FORMATS
from molflt.training.checkpoint import weights_digest
from molflt.training.config import Config, absolute

__all__ = ["Origin", "begin_results", "given_data", "origin_of", "run_weights", "why_of_others"]
__all__ += ["results_there", "warn_of_replaced", "write_results"]

RESULTS = "results.json"
"""Name of the file with the metrics by split, in the folder of an evaluation."""

_NOTE = "results_of.json"
_MOST_BYTES = 1_000_000
_SPLITS = ("train", "val", "test")  # what the usual names of a data set's own splits begin with

Origin = dict[str, object]
"""checkpoint, weights (sha256 of each member, sorted), data (None: the run's own), and given, what
--data was (None: nothing)"""


def origin_of(weights: Iterable[Path], checkpoint: str) -> Origin:
    """What an evaluation is of.

    Args:
        weights: files of the members; to be read before the evaluation, which may take long.
        checkpoint: what they are called.
    """
    digests = sorted(weights_digest(path) for path in weights)
    return {"checkpoint": checkpoint, "weights": digests, "data": None}


def begin_results(out: Path, *names: str) -> None:
    """Removes the results of an earlier evaluation, to be called before the first file is written.

    What a failed evaluation leaves would otherwise pass for files of the older results, and what
    an older one wrote in addition for files of the newer results.

    Args:
        out: folder.
        names: of all files that such an evaluation may write; of pictures, in every format.
    """
    clear_parts(out)
    pictures = [Path(name).stem for name in names if name.endswith(".png")]
    others = [f"{stem}.{ending}" for stem in pictures for ending in FORMATS]
    for name in (RESULTS, _NOTE, *names, *others):  # the note last of the two: alone it is nothing
        (out / name).unlink(missing_ok=True)


def results_there(out: Path) -> dict[str, object]:
    """Splits that results in a folder are of, with their data where these are not the run's own.

    Damaged results are none: they are asked for where new ones replace them.

    Returns:
        Split -> checkpoint; None where an earlier version has not written it.
    """
    try:
        found = read_json(out / RESULTS, _MOST_BYTES, "metrics by split in JSON", "")
        note = _note(out)
    except (OSError, ValueError):
        return {}
    of_data = "" if note.get("data") is None else f" of {shown(note['data'])}"
    splits = found if isinstance(found, dict) else {}
    return {f"{split}{of_data}": note.get("checkpoint") for split in splits}


def warn_of_replaced(out: Path, before: Mapping[str, object]) -> None:
    """Warns of results that new ones have replaced without being of the same.

    Args:
        out: folder.
        before: `results_there` before the evaluation.
    """
    now = results_there(out)
    gone = [split for split in before if split not in now]
    gone += [
        f"{split} with checkpoint {shown(checkpoint)}"
        for split, checkpoint in before.items()
        if split in now and checkpoint not in (None, now[split])
    ]
    if gone:
        _warn(
            f"{out / RESULTS}: replaces the results of {', '.join(gone)}; to have both, evaluate "
            "all splits at once, or write to another folder with --out"
        )


def write_results(
    out: Path,
    results: Mapping[str, Mapping[str, float | None]],
    origin: Origin,
    config: Config,
    data: object,
    reading: Mapping[str, object] | None = None,
) -> list[Path]:
    """Writes results.json, and beside it what it is of.

    Args:
        out: folder.
        results: split -> metrics, finite ones or None.
        origin: as `origin_of` gives it.
        config: of the run.
        data: what was given as the data of the evaluation; None for the run's own.
        reading: options of how data are read, such as energy_key and tags.

    Returns:
        What was written.
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
    known = {**origin, "data": others, "given": given}
    texts = [json.dumps(content, indent=2, allow_nan=False) + "\n" for content in (results, known)]
    paths[1].unlink(missing_ok=True)  # never that of other results
    for path, text in zip(paths, texts, strict=True):
        write_atomically(path, text.encode())
    return paths


def _others(own: Mapping[str, object], data: object, splits: Iterable[str]) -> str | None:
    """The data, if they are not the run's and their results do not have their name, either."""
    sources = [str(own[key]) for key in ("root", "train", "val", "test") if own.get(key)]
    if data is None or not sources:  # of learned optimizers, they are part of a task
        return None
    path = Path(str(data))
    if any(_is_within(path, Path(source)) for source in sources):
        return None
    taken = {own.get("train_split"), own.get("val_split")}
    named = all(
        one in {path.name, path.stem} - taken and not one.startswith(_SPLITS) for one in splits
    )
    return None if named else str(data)


def _is_within(data: Path, source: Path) -> bool:
    """Whether data are a run's, or a file of them; what has moved still has its name."""
    if source.exists():
        return source.resolve() in (data.resolve(), *data.resolve().parents)
    return data == source or data.name == source.name


def run_weights(run: Path) -> list[Path]:
    """Weights that a run as a whole stands for: the best ones; without them the last ones."""
    files = [run / "checkpoints" / f"{name}.safetensors" for name in ("best", "last")]
    return [path for path in files if path.is_file()][:1]


def why_of_others(folder: Path, weights: Sequence[Path]) -> str:
    """Why results are not of these weights and of the data of their run, in words; "" if they are.

    Those of earlier versions, which have not said what they are of, pass.

    Args:
        folder: of the evaluation.
        weights: files of all members; without any, only the data count.

    Raises:
        ValueError: naming the note, if it is damaged.
    """
    path = folder / RESULTS
    if not (found := _note(folder)):
        return ""
    if found["data"] is not None:
        return f"{path}: of other data, {shown(found['data'])}"
    if weights and found["weights"] != sorted(weights_digest(one) for one in weights):
        return f"{path}: of other weights, checkpoint {shown(found['checkpoint'])} at that time"
    return ""


def given_data(folder: Path) -> str | None:
    """What --data was in the evaluation whose results lie in a folder; None if it was left out.

    Raises:
        ValueError: naming the note, if it is damaged.
    """
    given = _note(folder).get("given")  # not in those of earlier versions
    return given if isinstance(given, str) else None


def _note(folder: Path) -> Origin:
    """What the results in a folder are of; nothing without results, or without a note."""
    note = folder / _NOTE
    if not (folder / RESULTS).is_file() or not note.is_file():
        return {}
    expected, hint = "weights and data of results.json", "evaluate the run again"
    found = read_json(note, _MOST_BYTES, expected, hint)
    if not isinstance(found, dict) or not {"checkpoint", "weights", "data"} <= found.keys():
        raise ValueError(f"{note}: expected {expected}; got {shown(found)}; {hint}")
    return found
