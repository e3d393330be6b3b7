"""Batches of structures with energies, forces and stress at their positions."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from molflt.data.structures import Structures
from molflt.data.structures.ase_labels import named_options
from molflt.data.structures.base import AnyTags, Part, with_bar, without
from molflt.data.structures.datamodule import IS2REData
from molflt.data.structures.labels import point_fault, unit_fault
from molflt.data.structures.sources import DataSet


class SinglePoints(Part):
    """Structures of a source that have an energy at `pos`, which becomes the target `y_relaxed`.

    Attributes:
        without_energy: number of structures that were skipped.
        with_forces, with_stress: numbers of structures with this label.
        force_scale: root mean square of the force components, in eV/Å; NaN without forces.
        force_size: mean magnitude of the force components, in eV/Å; NaN without forces.
        absurd: descriptions of implausible forces or stress, by index in the source.
    """

    def __init__(self, source: Structures) -> None:
        energies = np.full(len(source), np.nan)
        self.absurd: dict[int, str] = {}
        self.with_forces = self.with_stress = 0
        sum_of_squares = sum_of_magnitudes = components = 0.0
        for index, record in enumerate(with_bar(source, "reading labels")):
            energies[index] = float(record.energy)
            if np.isnan(energies[index]):
                continue
            self.with_stress += bool(record.stress.isfinite().all())
            forces = record.forces.double()
            if bool(forces.isfinite().all()):
                self.with_forces += 1
                sum_of_squares += float(forces.square().sum())
                sum_of_magnitudes += float(forces.abs().sum())
                components += forces.numel()
            if fault := point_fault(record):
                self.absurd[index] = fault
        known = np.flatnonzero(np.isfinite(energies))
        super().__init__(source, known)
        self.y_relaxed = energies[known]
        self.without_energy = len(source) - len(self)
        self.force_scale = float(np.sqrt(sum_of_squares / components)) if components else np.nan
        self.force_size = sum_of_magnitudes / components if components else np.nan


class PotentialData(IS2REData):
    """Batches of structures with the energies, forces and optional stress for their positions.

    Structures without an energy are skipped and counted.

    Args:
        root: folder with a file or a folder per split, or other files, split with `split_seed`.
        forces_key: name of the forces, in eV/Å, in ASE's formats; by default the results of a
            calculator, else forces, else REF_forces.
        stress_key: name of the stress, in eV/Å^3, in info; by default the results of a calculator,
            else stress, else REF_stress. A name with "virial" but not "stress" means a virial, eV.
        tags: `any` ignores tags, which a potential does not need; `oc20` and `ase` check them.
        check_units: reject energies beyond all-electron energies, and forces and stress that
            disagree with energy differences between similar frames. Also reject forces above 1,000
            eV/Å and stress above 10 eV/Å^3, or, with `skip_bad`, skip these structures.
        options: see `molflt.data.structures.datamodule.IS2REData`.
    """

    def __init__(
        self,
        root: Path,
        forces_key: str | None = None,
        stress_key: str | None = None,
        check_units: bool = True,
        tags: AnyTags = "any",
        **options: Any,
    ) -> None:
        super().__init__(root, **options)
        self.reading = self.reading._replace(
            tags=tags, forces_key=forces_key, stress_key=stress_key
        )
        self.check_units = check_units

    def _unused(self, dataset: Structures) -> list[str]:
        return dataset.unused

    def _refuse_options(self, data: DataSet) -> None:
        if key := self.reading.baseline_key:
            raise ValueError(f"data.baseline_key={key} is for is2re, not for potentials; remove it")
        super()._refuse_options(data)

    def _labeled(self, opened: Mapping[str, Structures]) -> dict[str, Structures]:
        return {split: self._points(dataset) for split, dataset in opened.items()}

    def _points(self, dataset: Structures) -> SinglePoints:
        points, unchecked = SinglePoints(dataset), "--data.check_units false"
        if not len(points):
            hint = dataset.hint or (
                "potentials need energies and forces, as from ASE's calculators or in S2EF; for "
                "relaxed energies, use --recipe is2re"
            )
            raise ValueError(
                f"{dataset.path}: {len(dataset)} structures, all without an energy at their "
                f"positions; {hint}"
            )
        if self.check_units and (fault := unit_fault(points)):
            raise ValueError(
                f"{dataset.path}: {fault}; convert the labels, or accept them with {unchecked}"
            )
        if not points.absurd or not self.check_units:
            return points
        advice = f"convert the labels, skip them with --data.skip_bad, or set {unchecked}"
        return SinglePoints(without(dataset, points.absurd, advice=advice))

    def expect_forces(self) -> None:
        """Raises ValueError if the training split has no forces."""
        points = self._points_of("train")
        if points.with_forces:
            return
        advice = named_options(points.unused, "forces") or "select them with --data.forces_key"
        raise ValueError(
            f"{points.path}: {len(points)} structures, all without forces; {advice}; to "
            "learn only energies, set --task.force_weight 0"
        )

    def _described(self, use: str) -> str:
        text, points = super()._described(use), self._points_of(use)
        for name, count in (("forces", points.with_forces), ("stress", points.with_stress)):
            if count:
                text += f", {name} in {'all' if count == len(points) else count}"
        skipped = points.without_energy
        return f"{text}, {skipped:,} without energy skipped" if skipped else text

    def _points_of(self, use: str) -> SinglePoints:
        self.setup()
        points = self.datasets[use]
        assert isinstance(points, SinglePoints)
        return points

    def force_scale(self) -> float:
        """Returns the root mean square of training force components, in eV/Å; 1 if negligible."""
        points = self._points_of("train")
        return points.force_scale if points.force_scale > 1e-3 else 1.0  # 0 up to noise
