"""What an evaluation leaves behind: metrics, tables, CSV and npz files, groups of systems."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from molflt.data.splits import PUBLISHED, VAL_SPLITS
from molflt.evaluation.inference import Predictions
from molflt.files import write_atomically
from molflt.metrics import energy_mae, energy_within_threshold
from molflt.plots import GroupError

__all__ = [
    "csv_text",
    "errors_by_group",
    "group_tables",
    "metrics",
    "published_table",
    "results_table",
    "write_files",
    "write_results",
]

SIZE_BINS = 6
PRINTED_GROUPS = 12
NOTHING = "-"

Results = Mapping[str, Mapping[str, Any]]


def metrics(found: Predictions, median: float | None) -> dict[str, float | int | None]:
    """OC20's metrics of one split.

    Args:
        found: predictions of the split.
        median: median of the training energies, eV, if known.

    Returns:
        energy_mae, eV; energy_within_threshold, 0 to 1; baseline_mae, eV, of predicting `median`;
        and n, the number of systems with a label. Where no system has one, the errors are None
        and n is the number of systems.
    """
    energy, target = found.only_labeled()
    if not len(target):
        errors = dict.fromkeys(("energy_mae", "energy_within_threshold", "baseline_mae"))
        return {**errors, "n": len(found.energy)}
    return {
        "energy_mae": energy_mae(energy, target),
        "energy_within_threshold": energy_within_threshold(energy, target),
        "baseline_mae": None
        if median is None
        else energy_mae(np.full_like(target, median), target),
        "n": len(target),
    }


def errors_by_group(
    found: Mapping[str, Predictions],
) -> dict[str, dict[str, list[GroupError]]]:
    """Errors by adsorbate, most systems first, and by size, smallest first.

    Args:
        found: split -> predictions; systems without a label do not count.

    Returns:
        split, or "all" for all splits together -> "adsorbate" or "natoms" -> groups. Ranges of
        sizes hold about equally many systems of all splits.
    """
    parts: dict[str, tuple[NDArray[Any], ...]] = {}
    for split, part in found.items():
        error = np.abs(part.energy - part.target)[part.labeled]
        if len(error):
            adsorbate = np.array(part.adsorbate)[part.labeled]
            parts[split] = (error, adsorbate, part.natoms[part.labeled])
    if not parts:
        return {}
    parts["all"] = tuple(np.concatenate(values) for values in zip(*parts.values(), strict=True))
    edges = np.unique(np.quantile(parts["all"][2], np.linspace(0, 1, SIZE_BINS + 1)).astype(int))
    groups = {}
    for split, (error, adsorbate, natoms) in parts.items():
        # the first edge is the smallest size; each bin begins at its edge, the last also ends at it
        bins = np.searchsorted(edges[1:-1], natoms, side="right")
        sizes = [
            _group(_size_label(edges, i), error[bins == i])
            for i in range(max(1, len(edges) - 1))
            if (bins == i).any()
        ]
        adsorbates = [_group(str(name), error[adsorbate == name]) for name in np.unique(adsorbate)]
        adsorbates.sort(key=lambda group: (-group.n, group.group))
        groups[split] = {"adsorbate": adsorbates, "natoms": sizes}
    return groups


def _group(name: str, error: NDArray[np.float64]) -> GroupError:
    return GroupError(name, len(error), float(error.mean()))


def _size_label(edges: NDArray[np.int64], i: int) -> str:
    """Range of the sizes in bin i, ends included."""
    low = int(edges[i])
    high = int(edges[-1] if i + 2 >= len(edges) else edges[i + 1] - 1)
    return f"{low}-{high}" if high > low else f"{low}"


def results_table(results: Results) -> str:
    """A line per split and their average, in plain text."""
    lines = [["split", "systems", "MAE / eV", "EwT / %", "baseline MAE / eV"]]
    rows = [_numbers(split, row) for split, row in results.items()]
    known = [row for row in results.values() if row["energy_mae"] is not None]
    if len(known) > 1:
        average: dict[str, Any] = {"n": sum(row["n"] for row in known)}
        for key in ("energy_mae", "energy_within_threshold", "baseline_mae"):
            values = [row[key] for row in known]
            average[key] = None if None in values else float(np.mean(values))
        rows.append(_numbers("average", average))
    return align([*lines, *rows])


def _numbers(name: str, row: Mapping[str, Any]) -> list[str]:
    share = row["energy_within_threshold"]
    return [
        name,
        f"{row['n']:,}",
        _fixed(row["energy_mae"], 4),
        _fixed(None if share is None else 100 * share, 2),
        _fixed(row["baseline_mae"], 4),
    ]


def _fixed(value: float | None, digits: int) -> str:
    return NOTHING if value is None else f"{value:.{digits}f}"


def published_table(results: Results, is_oc20: bool) -> str:
    """Published validation results on OC20, and how they relate to `results`.

    Args:
        results: split -> metrics.
        is_oc20: whether these were obtained on whole splits of OC20.
    """
    lines = [["model", "training", *VAL_SPLITS, "EwT val_id / %"]]
    for entry in PUBLISHED:
        values = [_fixed(getattr(entry, split), 4) for split in VAL_SPLITS]
        lines.append([entry.model, entry.setting, *values, _fixed(entry.ewt_id, 2)])
    heading = "published, on OC20 (other data than the above, so not comparable with it)"
    if is_oc20:
        ours = [_fixed(results.get(split, {}).get("energy_mae"), 4) for split in VAL_SPLITS]
        share = results.get("val_id", {}).get("energy_within_threshold")
        ewt = _fixed(None if share is None else 100 * share, 2)
        lines.append(["this run", "see its config.yaml", *ours, ewt])
        heading = "published, on OC20"
    return f"{heading}: MAE / eV on the validation splits\n{align(lines, 2)}"


def group_tables(groups: Mapping[str, Sequence[GroupError]]) -> str:
    """Errors over all splits by adsorbate, the largest groups, and by size, in plain text."""
    names = {"adsorbate": "adsorbate", "natoms": "atoms"}
    tables = []
    for kind, title in names.items():
        shown = groups[kind][:PRINTED_GROUPS]
        rows = [[group.group, f"{group.n:,}", f"{group.mae:.4f}"] for group in shown]
        text = align([[title, "systems", "MAE / eV"], *rows])
        if len(shown) < len(groups[kind]):
            text += f"\n({len(groups[kind]) - len(shown)} more in errors_by_group.csv)"
        tables.append(text)
    return "\n\n".join(tables)


def align(lines: Sequence[Sequence[str]], text_columns: int = 1) -> str:
    """Cells in columns: the first `text_columns` to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = []
    for line in lines:
        cells = [
            cell.ljust(width) if i < text_columns else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        text.append("  ".join(cells).rstrip())
    return "\n".join(text)


def csv_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows as CSV; the keys of the first are the header, None is an empty cell."""
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return buffer.getvalue()


def write_files(
    out: Path,
    found: Mapping[str, Predictions],
    results: Results,
    groups: Mapping[str, Mapping[str, Sequence[GroupError]]],
) -> list[Path]:
    """Writes results.json, predictions.npz, predictions.csv and errors_by_group.csv.

    Args:
        out: folder.
        found: split -> predictions.
        results: split -> metrics.
        groups: as :func:`errors_by_group` returns them; without any, their file is left out.

    Returns:
        The files written.

    Raises:
        OSError: naming the file that cannot be written.
    """
    arrays: dict[str, NDArray[Any]] = {}
    for split, part in found.items():
        arrays[f"{split}_ids"], arrays[f"{split}_energy"] = part.ids, part.energy
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)  # type: ignore[arg-type]
    contents = {
        "predictions.npz": buffer.getvalue(),
        "predictions.csv": csv_text(_prediction_rows(found)).encode(),
    }
    if groups:
        rows = [
            {"split": split, "kind": kind, "group": group.group, "n": group.n, "mae_eV": group.mae}
            for split, kinds in groups.items()
            for kind, members in kinds.items()
            for group in members
        ]
        contents["errors_by_group.csv"] = csv_text(rows).encode()
    write_results(out, results)
    for name, content in contents.items():
        write_atomically(out / name, content)
    return [out / name for name in ("results.json", *contents)]


def write_results(out: Path, results: Results) -> None:
    """Writes results.json: metrics per split, finite numbers or null.

    Args:
        out: folder.
        results: split -> metrics.

    Raises:
        OSError: naming the file that cannot be written.
    """
    content = json.dumps(results, indent=2, allow_nan=False) + "\n"
    write_atomically(out / "results.json", content.encode())


def _prediction_rows(found: Mapping[str, Predictions]) -> list[dict[str, Any]]:
    rows = []
    for split, part in found.items():
        known = part.labeled.tolist()
        columns = (part.sid, part.adsorbate, part.natoms, part.energy, part.target)
        for label, sid, adsorbate, natoms, energy, target in zip(known, *columns, strict=True):
            rows.append(
                {
                    "split": split,
                    "sid": sid,
                    "adsorbate": adsorbate,
                    "natoms": natoms,
                    "energy_eV": float(energy),
                    "target_eV": float(target) if label else None,
                    "error_eV": float(energy - target) if label else None,
                }
            )
    return rows
