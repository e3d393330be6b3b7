"""Sections about predictions of structures: parity, errors by group, and the worst predictions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from molflt import plots
from molflt.data.structures.data_set import DataSet
from molflt.data.structures.potential_data import SinglePoints
from molflt.data.structures.sources import exists
from molflt.evaluation.groups import without_compositions
from molflt.evaluation.page.contents import Contents, Row
from molflt.evaluation.page.pictures import Details, Grid, Part, Pictures, Section, Table
from molflt.evaluation.runs import Run
from molflt.plots import GroupError

if TYPE_CHECKING:
    from torch_geometric.data import Data

    from molflt.data.structures import Structures

__all__ = ["parity", "worst_systems"]

_DRAWN = 6
_LISTED = 15
_TITLES = {
    "adsorbate": "adsorbate",
    "slab": "metal (elements of the slab)",
    "element": "element",
    "natoms": "number of atoms",
}

_Panel = Mapping[str, tuple[NDArray[np.float64], NDArray[np.float64]]]
_Names = Mapping[str, Sequence[str]]


class _System(NamedTuple):
    """A row of predictions.csv."""

    split: str
    place: int
    """index of the row in its split, which is also the index of the structure in the data"""
    sid: int
    name: str
    """adsorbate and slab, or formula"""
    natoms: int
    energy: float
    target: float
    """label; NaN without one"""
    force: float
    """mean error of its forces, eV/Å; NaN without forces"""


def _systems(found: Contents) -> list[_System]:
    """Reads the rows of predictions.csv; raises KeyError for missing columns."""
    counts: dict[str, int] = {}
    systems = []
    for row in found.predictions:
        split = row["split"]
        counts[split] = counts.get(split, -1) + 1
        own = (_name(row), int(row["natoms"]), float(row["energy_eV"]))
        force = row.get("force_mae_eV_per_A")
        numbers = (float(row["target_eV"] or "nan"), float(force or "nan"))
        systems.append(_System(split, counts[split], int(row["sid"]), *own, *numbers))
    return systems


def _name(row: Row) -> str:
    if "formula" in row:
        return row["formula"]
    slab = row.get("slab")
    return row["adsorbate"] + (f" on {slab}" if slab else "")


def parity(found: Contents, run: Run, pictures: Pictures) -> Section | None:
    """Shows predictions against labels, and errors by group."""
    if not found.predictions:
        return None
    of_forces = run.config["recipe"] == "potential"
    makers: list[Callable[[], Sequence[Part]]] = [
        partial(_parity, found, pictures, of_forces),
        partial(_groups, found, pictures, "meV/Å" if of_forces else "eV"),
    ]
    if not of_forces:
        makers.append(partial(_distribution, run, pictures))
    nothing: Sequence[Part] = ()
    parts = [part for make in makers for part in found.attempt(make, nothing)]
    return Section("errors", "Predictions and errors", parts) if parts else None


def _parity(found: Contents, pictures: Pictures, of_forces: bool) -> list[Part]:
    by_split: dict[str, list[_System]] = {}
    for system in _systems(found):
        if math.isfinite(system.target) and math.isfinite(system.energy):
            by_split.setdefault(system.split, []).append(system)
    unit = "meV/atom" if of_forces else "eV"
    quantity = "energy minus the mean of its formula" if of_forces else "energy"
    caption = f"Predicted against labeled {quantity}; the largest errors are named."
    figures = []
    for split, own in by_split.items():
        target, energy = (np.array([getattr(one, k) for one in own]) for k in ("target", "energy"))
        if of_forces:
            sizes = [one.natoms for one in own]
            target, energy = without_compositions([one.name for one in own], sizes, target, energy)
        names = {split: [f"sid {one.sid} {one.name}" for one in own]}
        mae = float(np.abs(energy - target).mean())
        said = f"mean absolute error {mae:.3f} {unit} over {len(own):,} systems"
        alt = f"Predicted against labeled {quantity}. {split}: {said}."
        panel = {split: (target, energy)}

        def draw(file: Path, panel: _Panel = panel, names: _Names = names) -> None:
            plots.parity(panel, file, names, quantity, unit)

        figures.append(pictures.drawn(alt, f"{split}: {caption}", draw))
    return [Grid(figures)]


def _groups(found: Contents, pictures: Pictures, unit: str) -> list[Part]:
    """Shows the errors over all splits for each kind of group, as a picture and a table."""
    key = "mae_eV" if unit == "eV" else "mae_meV_per_A"
    kinds: dict[str, list[GroupError]] = {}
    for row in found.groups:
        if row["split"] == "all" and row["kind"] in _TITLES:
            group = GroupError(row["group"], int(row["n"]), float(row[key]))
            kinds.setdefault(row["kind"], []).append(group)
    if not kinds:
        expected = found.path / "errors_by_group.csv"
        found.missing.append(f"{expected}: missing or empty; errors by group are not shown")
        return []
    if unit == "eV" and "slab" not in kinds:
        found.missing.append(
            f"{found.path / 'errors_by_group.csv'}: without errors by metal, as written by an "
            "earlier version; run molflt evaluate RUN"
        )
    figures, tables = [], []
    for kind, own in kinds.items():
        title = f"Mean absolute error by {_TITLES[kind]}, all splits, {unit}; lower is better."
        worst = max(own, key=lambda one: one.mae)
        alt = f"{title} Largest: {worst.group}, {worst.mae:.3f} {unit} (n = {worst.n:,})."
        figures.append(
            pictures.drawn(alt, title, partial(plots.errors, {kind: own}, {}, unit=unit))
        )
        rows = [(one.group, f"{one.n:,}", f"{one.mae:.4g}") for one in own]
        tables.append(Table((_TITLES[kind], "n", f"MAE / {unit}"), rows, title))
    return [Grid(figures), Details("The same as tables", tables)]


def _distribution(run: Run, pictures: Pictures) -> list[Part]:
    if not run.errors:
        return []
    medians = ", ".join(
        f"{split} {float(np.median(own)):.3f} eV" for split, own in run.errors.items()
    )
    alt = f"Share of systems with a smaller error, against the error. Medians: {medians}."
    draw = partial(plots.errors, {}, run.errors)
    return [pictures.drawn(alt, "Share of systems with a smaller error.", draw)]


def worst_systems(found: Contents, run: Run, pictures: Pictures) -> Section | None:
    """Shows the systems with the largest errors, as a table and in pictures."""
    systems: list[_System] = found.attempt(partial(_systems, found), [])
    of_forces = any(math.isfinite(one.force) for one in systems)
    unit = "meV/Å" if of_forces else "eV"

    def error(one: _System) -> float:
        return 1e3 * one.force if of_forces else one.energy - one.target

    known = [one for one in systems if math.isfinite(error(one))]
    known.sort(key=lambda one: -abs(error(one)))
    if not known:
        return None
    form = ".1f" if of_forces else "+.3f"
    rows = []
    for one in known[:_LISTED]:
        numbers = (f"{error(one):{form}}", f"{one.target:.3f}", f"{one.energy:.3f}")
        rows.append([one.name, *numbers, one.natoms, one.sid, one.split])
    what = "mean error of the forces" if of_forces else "error"
    caption = f"The {len(rows)} systems with the largest {what}, of {len(known):,}."
    named = "formula" if of_forces else "adsorbate and slab"
    head = (named, f"{what} / {unit}", "label / eV", "prediction / eV", "atoms", "sid", "split")
    parts: list[Part] = [Table(head, rows, caption)]
    figures = []
    for one, structure in _structures(found, run, known[:_DRAWN]):
        wrong = f"{error(one):{form}} {unit}".replace("-", "−")
        title = f"sid {one.sid} ({one.split}): {one.name}, {what} {wrong}"
        alt = f"{title}; {one.natoms} atoms seen from the top and from the side."
        figure = found.attempt(
            partial(pictures.drawn, alt, title, partial(plots.structure_views, structure)), None
        )
        figures += [figure] if figure is not None else []
    if figures:
        legend = (
            "Atoms of the adsorbate (tag 2) have thick edges, fixed atoms are hatched, the dashed "
            "line is the cell. The structures are the input of the model."
        )
        parts += [legend, Grid(figures, pairs=True)]
    return Section("worst", "The worst predictions", parts)


def _structures(found: Contents, run: Run, wanted: Sequence[_System]) -> list[tuple[_System, Data]]:
    """Finds structures in the data of the run, and records those that are missing."""
    drawn: list[tuple[_System, Data]] = []
    for split in dict.fromkeys(one.split for one in wanted):
        own = [one for one in wanted if one.split == split]
        records: list[Data] = found.attempt(partial(_records, run, split, own), [])
        drawn += list(zip(own, records, strict=False))
    return sorted(drawn, key=lambda pair: wanted.index(pair[0]))


def _records(run: Run, split: str, wanted: Sequence[_System]) -> list[Data]:
    """Reads structures of one split."""
    data = DataSet.of_run(run.config["data"], run.config["seed"])
    advice = "the worst structures are not drawn"
    if not exists(data.root):
        raise ValueError(f"{data.root}: the data of the run are missing; {advice}")
    for skip_bad in (False, True):  # evaluations may have omitted bad structures
        try:
            opened: Structures = data.open([split], skip_bad)[split]
            if run.config["recipe"] == "potential":
                opened = SinglePoints(opened)
            records = [opened[one.place] for one in wanted if one.place < len(opened)]
        except ValueError:
            continue
        except FileNotFoundError:
            raise ValueError(f"{data.root}: the data lack the split {split}; {advice}") from None
        same = [
            (int(record.sid), int(record.num_nodes)) == (one.sid, one.natoms)
            for record, one in zip(records, wanted, strict=False)
        ]
        if len(same) == len(wanted) and all(same):
            return records
    raise ValueError(
        f"{data.root}: split {split} no longer holds the structures of predictions.csv; {advice}"
    )
