"""Structures with energies, forces and stress at their positions, in batches."""

# No `from __future__ import annotations`: jsonargparse would import all that stands below
# TYPE_CHECKING, PyG included, to read annotations that are strings.

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from molflt.data.structures import Structures
from molflt.data.structures.datamodule import IS2REData
from molflt.data.structures.force_units import energy_unit_fault, force_unit_fault
from molflt.data.structures.labels import label_faults

if TYPE_CHECKING:
    from torch_geometric.data import Data

__all__ = ["PotentialData", "SinglePoints"]

_MOST_COMPOSITIONS = 1000  # of which the unit of energies is judged


class SinglePoints(Structures):
    """Structures of a source with energies of their own, at `pos`; the others are left out.

    Args:
        source: any.

    Attributes:
        without_energy: how many were left out.
        with_forces: how many have forces; likewise with_stress.
        force_scale: root mean square component of the forces, eV/Å; NaN without any.
        force_size: mean magnitude of a component, eV/Å; NaN without any.
    """

    def __init__(self, source: Structures) -> None:
        super().__init__(source.path, source.skip_bad)
        self.source, self.bad, self.hint = source, list(source.bad), source.hint
        from tqdm import tqdm

        energies = np.full(len(source), np.nan)
        counts = {"forces": 0, "stress": 0}
        square = size = numbers = 0.0
        for index, record in enumerate(tqdm(source, desc="reading labels", delay=5, leave=False)):
            energies[index] = float(record.energy)
            if np.isnan(energies[index]):
                continue
            for name in counts:
                counts[name] += bool(record[name].isfinite().all())
            forces = record.forces.double()
            if bool(forces.isfinite().all()):
                square += float(forces.square().sum())
                size += float(forces.abs().sum())
                numbers += forces.numel()
        self._kept = np.flatnonzero(np.isfinite(energies))
        self._energies = energies[self._kept]
        self.without_energy = len(energies) - len(self._kept)
        self.with_forces, self.with_stress = counts["forces"], counts["stress"]
        self.force_scale = float(np.sqrt(square / numbers)) if numbers else float("nan")
        self.force_size = size / numbers if numbers else float("nan")

    def __len__(self) -> int:
        return len(self._energies)

    def __getitem__(self, index: int) -> "Data":
        return self.source[self._stored(index)]

    @property
    def natoms(self) -> np.ndarray:
        """Atoms in each structure, (len,) int64."""
        natoms: np.ndarray = self.source.natoms[self._kept]
        return natoms

    @property
    def y_relaxed(self) -> np.ndarray:
        """What is learned: energies at `pos`, (len,) float64, eV."""
        return self._energies

    def compositions(self, indices: NDArray[np.int64]) -> NDArray[np.float64]:
        assert self._kept is not None
        return self.source.compositions(self._kept[indices])

    def where(self, index: int) -> str:
        return self.source.where(self._stored(index))

    def verify(self) -> bool | None:
        return self.source.verify()


class PotentialData(IS2REData):
    """Structures with energies and forces at their positions, perhaps stress, in batches.

    Structures without an energy are left out, and counted; forces and stress are used where they
    are.

    Args:
        root: folder of the data set, with a file or a folder per split.
        forces_key: array of forces in files that ASE reads, eV/Å; by default what a calculator
            has stored, forces, or REF_forces.
        stress_key: name of the stress in info, eV/Å^3; by default likewise.
        check_units: refuse energies beyond what all electrons can give, and forces that do not fit
            differences of energies between near frames.
        options: as for relaxed energies.
    """

    def __init__(
        self,
        root: Path,
        forces_key: str | None = None,
        stress_key: str | None = None,
        check_units: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(root, **options)
        self.reading = self.reading._replace(forces_key=forces_key, stress_key=stress_key)
        self.check_units = check_units

    def _unused(self, dataset: Structures) -> list[str]:
        return dataset.unused

    def _labeled(self, dataset: Structures) -> Structures:
        points = SinglePoints(dataset)
        if not len(points):
            raise ValueError(
                f"{dataset.path}: none of {len(dataset)} structures has an energy at its positions"
                "; expected energy and forces, as ASE's calculators and S2EF have them; for "
                "relaxed energies take --recipe is2re"
            )
        if not points.with_forces:
            raise ValueError(
                f"{dataset.path}: none of {len(points)} structures has forces; expected some; name "
                "them with --data.forces_key, or learn energies alone: --recipe is2re "
                "--task.references fit"
            )
        _check_labels(points, self.check_units)
        return points

    def describe(self) -> list[str]:
        said = []
        for text, dataset in zip(super().describe(), self.datasets.values(), strict=True):
            assert isinstance(dataset, SinglePoints)
            known = {"forces": dataset.with_forces, "stress": dataset.with_stress}
            said.append(text + _counts(known, len(dataset), dataset.without_energy))
        return said

    def force_scale(self) -> float:
        """Root mean square component of the forces of the training split, eV/Å."""
        self.setup()
        points = self.datasets["train"]
        assert isinstance(points, SinglePoints)
        return points.force_scale or 1.0


def _counts(known: Mapping[str, int], total: int, without: int) -> str:
    """Which structures have which labels, where it is not all or none of them."""
    said = ", ".join(
        f"{name} in {'all' if count == total else f'{count:,}'}"
        for name, count in known.items()
        if count
    )
    return f", {said}" + (f", {without:,} without energy left out" if without else "")


def _check_labels(points: SinglePoints, units: bool) -> None:
    """Raises ValueError for energies or forces that cannot be what they should."""
    faults = label_faults(points.y_relaxed, points.natoms, required=True)
    fault = next((f"sid {int(points[i].sid)}: {why}" for i, why in faults.items()), "")
    advice = "take it out of the data"
    if units and not fault:
        some = np.arange(len(points))[:: -(-len(points) // _MOST_COMPOSITIONS)]
        fault = energy_unit_fault(points.y_relaxed[some], points.compositions(some))
        fault = fault or force_unit_fault(points)
        advice = "convert the labels, or take them as they are with --data.check_units false"
    if fault:
        raise ValueError(f"{points.path}: {fault}; {advice}")
