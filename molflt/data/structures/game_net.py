"""GAME-Net's FG set, from its public archive: organic molecules on 14 metals, by DFT (PBE + D2).

Pablo-Garcia et al., "Fast evaluation of the adsorption energy of organic molecules on metals via
graph neural networks", Nat. Comput. Sci. 3, 433 (2023). The archive holds an initial (POSCAR) and a
relaxed (CONTCAR) structure of each system and tables of total energies.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

import numpy as np

from molflt.atoms import Tag
from molflt.data.structures.ase_constraints import fixed_atoms
from molflt.data.structures.ase_guards import check_poscar
from molflt.data.structures.base import Structures
from molflt.data.structures.game_net_archive import (
    _AGAIN,
    _END,
    _FAMILIES,
    _INITIAL,
    _RELAXED,
    _START,
    _TABLES,
    GAME_NET,
    _read,
    _sha256,
)
from molflt.data.structures.labels import MOST_ADSORPTION
from molflt.data.structures.records import make_record
from molflt.data.structures.systems import System
from molflt.files import shown

if TYPE_CHECKING:
    from ase import Atoms
    from torch_geometric.data import Data

__all__ = ["GameNet"]


_NAME = re.compile(r"([a-z]{2})-(\w{1,16})-([a-z]{1,4})", re.ASCII)  # metal, molecule, placing
_SURFACE = "0000"  # in place of a molecule
_SAME = 1e-3  # Å, of lattice vectors
_HELD = 0.01  # Å that a fixed atom may move


class GameNet(Structures):
    """GAME-Net's FG set, held in memory.

    Energies are those of adsorption, eV: of the initial (``y_init``) and the relaxed structure
    (``y_relaxed``), less those of the relaxed clean surface and the relaxed molecule. Tags: 0 fixed
    metal, 1 free metal, 2 adsorbate. A sid is the place of the system among the sorted names.
    Where the tables have a name twice, the last row counts, as it does for the authors' models.

    Args:
        path: ``FG_dataset_lite.tar.xz``.
        skip_bad: leave out systems that are not valid; they are listed in ``bad`` as
            (name, reason).

    Attributes:
        systems: of each structure.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if the archive is damaged or another one, or naming a system without initial or
            relaxed structure, family or energy, whose two structures differ in atoms or cell, or
            whose adsorption energy is beyond 20 eV.
    """

    suffixes = (".tar.xz",)

    def __init__(self, path: str | Path, skip_bad: bool = False) -> None:
        from tqdm import tqdm

        super().__init__(path, skip_bad)
        if not self.path.is_file():
            raise FileNotFoundError(f"{self.path}: no such file; {_AGAIN}")
        self.systems: list[System] = []
        self._records: list[Data] = []
        self._moved: list[int] = []
        content = _Content(self.path)
        for system in tqdm(content.systems(), desc=self.path.name, unit=" systems", disable=None):
            try:
                record, moved = content.record(system)
            except ValueError as error:
                name = f"{self.path}: {system.name}"
                if not skip_bad:
                    raise ValueError(f"{name}: {error}") from None
                self.bad.append((name, str(error)))
                continue
            self.systems.append(system)
            self._records.append(record)
            self._moved.append(moved)

    @classmethod
    def takes(cls, path: Path) -> bool:
        return path.name.lower().endswith(cls.suffixes)

    def verify(self) -> bool:
        """Whether this is the archive as published."""
        return _sha256(self.path) == GAME_NET.sha256

    def place(self, index: int) -> int:
        return int(self._records[self._stored(index)].sid)

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> Data:
        return self._records[self._stored(index)].clone()

    def with_unwrapped(self, index: int) -> tuple[Data, int]:
        return self[index], self._moved[self._stored(index)]

    def where(self, index: int) -> str:
        return f"{self.path}: {self.systems[self._stored(index)].name}"

    @property
    def natoms(self) -> np.ndarray:
        """Atoms in each structure, (len,) int64."""
        return np.array([record.natoms for record in self._records], dtype=np.int64)


class _Content:
    """Texts of the archive and what they say of a system."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files = _read(path)
        absent = [name for name in _TABLES if name not in self.files]
        if absent:
            raise ValueError(
                f"{path}: expected GAME-Net's FG set, with {', '.join(_TABLES)}; got an archive "
                f"without {', '.join(absent)}; {_AGAIN}"
            )
        self.energies = {name: self._energies(name) for name in (_RELAXED, _INITIAL)}
        self.families = dict(self._rows(_FAMILIES))

    def systems(self) -> list[System]:
        """All that have a row in the table of families or a structure, sorted by name."""
        stems = {PurePosixPath(name).stem for name in self.files if name not in _TABLES}
        found: list[System] = []
        for name in sorted(stems | self.families.keys()):
            match = _NAME.fullmatch(name)
            if match is not None:
                metal, molecule = match[1].capitalize(), match[2]
                family = self.families.get(name, "")
                found.append(System(len(found), name, molecule, family, metal))
        if not found:
            raise ValueError(f"{self.path}: holds no systems; expected names like ag-1211-a")
        return found

    def record(self, system: System) -> tuple[Data, int]:
        """A system, and how many of its free atoms the archive has in another periodic image.

        Raises:
            ValueError: saying what is wrong; its name is left to the caller.
        """
        from ase.data import atomic_numbers

        if not system.family:
            raise ValueError(f"it has no row in {_FAMILIES}; expected its family")
        relaxed, initial = (self._adsorption(system, table) for table in (_RELAXED, _INITIAL))
        if not abs(relaxed) <= MOST_ADSORPTION:
            raise ValueError(
                f"its adsorption energy is {relaxed:.3f} eV; expected at most {MOST_ADSORPTION:g} "
                f"eV from 0; look at {_RELAXED}, or leave it out with --skip-bad"
            )
        start, end = self._structure(system, _START), self._structure(system, _END)
        _compare(start, end)
        metal = start.numbers == atomic_numbers.get(system.metal, 0)
        if not metal.any() or metal.all():
            raise ValueError(f"expected {system.metal} with an adsorbate; got {start.symbols}")
        fixed = fixed_atoms(start)
        tags = np.where(metal, np.where(fixed, Tag.SUBSURFACE, Tag.SURFACE), Tag.ADSORBATE)
        record = make_record(
            pos=start.positions,
            atomic_numbers=start.numbers,
            cell=start.cell.array,
            pbc=start.pbc,
            tags=tags,
            fixed=fixed,
            sid=system.sid,
            y_init=initial,
            y_relaxed=relaxed,
            pos_relaxed=end.positions,
        )
        way = (record.pos_relaxed - record.pos).norm(dim=1).numpy()
        if fixed.any() and way[fixed].max() > _HELD:
            atom = int(np.argmax(np.where(fixed, way, 0)))
            raise ValueError(
                f"atom {atom} is fixed, but lies {way[atom]:.3f} Å away in {_END}; expected the "
                "same atoms in the same order"
            )
        moved = np.abs(record.pos_relaxed.numpy() - end.positions).max(axis=1) > _SAME
        return record, int((moved & ~fixed).sum())

    def _adsorption(self, system: System, table: str) -> float:
        """Adsorption energy, eV, of the structure that the table is of."""
        references = self.energies[_RELAXED]
        surface = f"{system.metal.lower()}-{_SURFACE}"
        for name, energies in (
            (system.name, self.energies[table]),
            (surface, references),
            (system.molecule, references),
        ):
            if not math.isfinite(energies.get(name, math.nan)):
                where = table if name == system.name else _RELAXED
                raise ValueError(f"no energy of {name} in {where}; expected a number in eV")
        return self.energies[table][system.name] - references[surface] - references[system.molecule]

    def _structure(self, system: System, ending: str) -> Atoms:
        from ase.io.vasp import read_vasp_configuration

        name = f"{system.family}/structures/{system.name}{ending}"
        if name not in self.files:
            raise ValueError(f"no {name} in the archive; expected {_START} and {_END} of each")
        try:
            check_poscar(self.files[name])
            text = io.StringIO(self.files[name].decode("ascii"))
            atoms: Atoms = read_vasp_configuration(text)
        except Exception as error:  # ASE fails in many ways
            reason = (str(error).strip().splitlines() or ["no reason given"])[0]
            raise ValueError(
                f"{name}: expected a POSCAR of VASP 5; got {type(error).__name__}: {reason[:200]}"
            ) from None
        return atoms

    def _energies(self, table: str) -> Mapping[str, float]:
        found = {}
        for name, word in self._rows(table):
            try:
                found[name] = float(word)
            except ValueError:
                raise ValueError(
                    f"{self.path}: {table}: {shown(name)}: expected an energy in eV; got "
                    f"{shown(word)}; {_AGAIN}"
                ) from None
        return found

    def _rows(self, table: str) -> list[tuple[str, str]]:
        rows = []
        for number, line in enumerate(self.files[table].decode("ascii", "replace").splitlines()):
            words = line.split()
            if len(words) != 2:
                raise ValueError(
                    f"{self.path}: {table}: line {number + 1}: expected a name and a value; got "
                    f"{shown(line)}; {_AGAIN}"
                )
            rows.append((words[0], words[1]))
        return rows


def _compare(start: Atoms, end: Atoms) -> None:
    """Refuses two structures that are not of the same atoms in the same cell."""
    if len(start) != len(end):
        raise ValueError(
            f"{_START} has {len(start)} atoms, {_END} {len(end)}; expected the same atoms"
        )
    other = np.flatnonzero(start.numbers != end.numbers)
    if len(other):
        atom = int(other[0])
        raise ValueError(
            f"atom {atom} is {start[atom].symbol} in {_START} and {end[atom].symbol} in {_END}; "
            "expected the same atoms in the same order"
        )
    apart = np.abs(start.cell.array - end.cell.array).max()
    if not apart <= _SAME:
        raise ValueError(
            f"the cells of {_START} and {_END} differ by {apart:.3f} Å; expected the same cell"
        )
