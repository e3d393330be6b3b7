"""Structures from files that ASE reads, limited to formats that cannot carry code."""

from __future__ import annotations

import sqlite3
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from molflt.data.structures.ase_constraints import fixed_atoms, other_constraints
from molflt.data.structures.ase_guards import bounded, check_counts, xyz_properties
from molflt.data.structures.ase_labels import Labels, entries, layers_as_tags, tags_look_like
from molflt.data.structures.base import AS_IT_IS, AnyTags, Reading, Structures
from molflt.data.structures.records import make_record
from molflt.data.structures.unused_fields import unused_fields, unused_warning
from molflt.files import shown

if TYPE_CHECKING:
    from ase import Atoms
    from torch_geometric.data import Data

__all__ = ["AseStructures"]

# Ending -> ASE's name of the format. Formats that unpickle or run Python are not here.
_FORMATS = {
    ".traj": "traj",
    ".extxyz": "extxyz",
    ".xyz": "extxyz",
    ".cif": "cif",
    ".vasp": "vasp",
    ".poscar": "vasp",
    ".xsf": "xsf",
    ".pdb": "proteindatabank",
    ".gen": "gen",
}
_NAMES = ("poscar", "contcar")  # of VASP's files, which have no ending
_DATABASES = {".db": "db", ".json": "json", ".aselmdb": "aselmdb"}


class AseStructures(Structures):
    """An ASE-readable file or database, held in memory.

    What is taken: positions, cell, periodic axes, ``atoms.get_tags()`` (0 subsurface, 1 surface,
    2 adsorbate; without tags all 0), constraints that hold atoms in all directions as fixed atoms
    (of others it says that they are left out), ``y_relaxed`` from
    `energy_key`, by default ``info["y_relaxed"]``, else the stored calculator's energy, else
    ``info["energy"]``,
    ``y_init`` from ``info["y_init"]``, relaxed positions from an array ``pos_relaxed``, and the
    sid from ``info["sid"]``, else the frame's or row's number. In databases, key-value pairs
    count as info. Energies are taken as they are, in eV: OC20's are adsorption energies.

    For potentials also ``energy`` (that of the calculator or of info, if there are no relaxed
    positions, to which it would belong), ``forces`` and ``stress``.

    Args:
        path: a file ending in .traj, .extxyz, .xyz, .cif, .vasp, .xsf, .pdb, .gen, .db or .json,
            or named POSCAR or CONTCAR; .aselmdb with the package that adds it to ASE.
        skip_bad: leave out structures that are not valid; they are listed in ``bad`` as
            (frame, reason).
        energy_key, tags, forces_key, stress_key, for_prediction, keep_atoms: see
            :class:`Reading`; says so if tags look like the other ones.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: for another format, an unreadable file, an invalid structure, or if no structure
            has the `energy_key`.
    """

    suffixes = (*_FORMATS, *_DATABASES)
    options = Reading._fields

    def __init__(
        self,
        path: str | Path,
        skip_bad: bool = False,
        energy_key: str | None = None,
        tags: AnyTags = "oc20",
        forces_key: str | None = None,
        stress_key: str | None = None,
        for_prediction: bool = False,
        keep_atoms: bool = False,
    ) -> None:
        super().__init__(path, skip_bad)
        if not self.path.is_file():
            raise FileNotFoundError(f"{self.path}: no such file; expected structures for ASE")
        self._records: list[Data] = []
        self._frames: list[int] = []
        reading = Reading(energy_key, tags, forces_key, stress_key, for_prediction)
        labels, others, steps, last = Labels(reading), 0, 0, b""
        self.atoms: list[Atoms] = []  # as they are, if they are kept
        lost: Counter[str] = Counter()
        for frame, (number, atoms) in enumerate(_frames(self.path)):
            name = f"{self.path}: frame {frame}"
            try:
                self._records.append(_record_from_atoms(atoms, number, reading, labels))
                others += tags != "any" and tags_look_like(atoms) not in (None, tags)
                self._frames.append(frame)
                same = atoms.numbers.tobytes() + atoms.cell.array.tobytes()
                steps, last = steps + (same == last), same
                if keep_atoms:
                    self.atoms.append(atoms)
                else:
                    lost.update(other_constraints(atoms))
            except ValueError as error:
                if not skip_bad:
                    raise ValueError(f"{name}: {error}") from None
                self.bad.append((name, str(error)))
        if not self._records and not self.bad:
            raise ValueError(f"{self.path}: holds no structures; expected at least one")
        try:
            labels.check()
        except ValueError as error:
            raise ValueError(f"{self.path}: {error}") from None
        self.hint, self.unused = labels.hint, labels.unused
        self.for_potentials = labels.for_potentials
        say_tags(str(self.path), others, len(self._records), tags)
        if (
            tags != "any"
            and not for_prediction
            and labels.of_steps
            and 2 * steps > len(self._records)
        ):
            _say_steps(self.path)
        if lost:
            _say_constraints(self.path, lost)
        if labels.fields:
            warning = unused_warning(str(self.path), labels.fields)
            print(f"molflt: warning: {warning}", file=sys.stderr)

    @classmethod
    def takes(cls, path: Path) -> bool:
        return super().takes(path) or path.name.lower() in _NAMES

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> Data:
        return self._records[self._stored(index)].clone()

    def place(self, index: int) -> int:
        return self._frames[self._stored(index)]

    def to_atoms(self, index: int) -> Atoms:
        return self.atoms[index].copy() if self.atoms else super().to_atoms(index)

    def where(self, index: int) -> str:
        return f"{self.path}: frame {self._frames[index]}"

    @property
    def natoms(self) -> np.ndarray:
        """Atoms in each structure, (len,) int64."""
        return np.array([record.natoms for record in self._records], dtype=np.int64)


def say_tags(name: str, others: int, count: int, tags: AnyTags) -> None:
    """Warns if more than half of the structures have tags that look like the other kind."""
    if 2 * others <= count:
        return
    found = (
        "look like ase.build's numbers of layers, from the top; if they are, read them with --tags "
        "ase, in training --data.tags ase, in Python tags='ase'"
        if tags == "oc20"
        else "were read as numbers of layers, but look like OC20's (0 below 1, 2 above it)"
    )
    message = f"molflt: warning: {name}: tags of {others} of {count} structures {found}"
    print(message, file=sys.stderr)


def _say_steps(path: Path) -> None:
    print(
        f"molflt: warning: {path}: frames with forces look like steps of relaxations or dynamics; "
        "train on them with --recipe potential; relaxed energies need the first frame of each "
        "relaxation, with the energy of the last one as y_relaxed",
        file=sys.stderr,
    )


def _say_constraints(path: Path, lost: Counter[str]) -> None:
    found = ", ".join(f"{kind} in {count}" for kind, count in sorted(lost.items()))
    print(
        f"molflt: warning: {path}: constraints other than fixed atoms are left out: {found} "
        "structures; atoms that they hold count as free",
        file=sys.stderr,
    )


def _record_from_atoms(
    atoms: Atoms, number: int = 0, reading: Reading = AS_IT_IS, labels: Labels | None = None
) -> Data:
    """One ASE structure as a record; see :class:`AseStructures` for what is taken.

    Args:
        atoms: the structure; nothing is computed, only stored results are read.
        number: sid if ``atoms.info`` has none.
        reading: which entry is the energy, and whose the tags are.
        labels: keeps account of the entries.

    Raises:
        ValueError: naming the sid, as :func:`molflt.data.structures.records.make_record`.
    """
    info = entries(atoms)
    labels = labels or Labels(reading)
    labels.fields = {**unused_fields(atoms), **labels.fields}
    energy, at_pos = labels.energy(atoms), labels.at_pos(atoms)
    energies: dict[str, Any] = {"y_init": info.get("y_init"), "y_relaxed": energy}
    if reading.for_prediction:
        at_pos, energies = {}, {name: _if_finite(each) for name, each in energies.items()}
    relaxed = atoms.arrays.get("pos_relaxed")
    if relaxed is not None:  # the energy would belong to these
        at_pos.pop("energy", None)
    tags = atoms.get_tags() if atoms.has("tags") else None
    kept = tags if reading.tags == "any" else None  # neither checked nor lost in what is written
    if tags is not None and reading.tags != "oc20":
        tags = layers_as_tags(tags) if reading.tags == "ase" else None
    try:
        record = make_record(
            pos=atoms.positions,
            atomic_numbers=atoms.numbers,
            cell=atoms.cell.array,
            pbc=atoms.pbc,
            tags=tags,
            fixed=fixed_atoms(atoms),
            sid=info.get("sid", number),
            pos_relaxed=relaxed,
            **energies,
            **at_pos,
        )
    except ValueError as error:  # by the name that the energy has in the file
        raise ValueError(str(error).replace(": y_relaxed ", f": {labels.named} ")) from None
    if kept is not None:
        record.tags = torch.as_tensor(kept, dtype=torch.long)
    return record


def _if_finite(energy: object) -> object:
    """An energy; None if it is NaN or infinite."""
    unknown = isinstance(energy, float | np.floating) and not np.isfinite(energy)
    return None if unknown else energy


def _frames(path: Path) -> Iterator[tuple[int, Atoms]]:
    """(number, structure) pairs; ASE's many kinds of failure become one ValueError."""
    suffix = path.suffix.lower()
    name = _DATABASES.get(suffix) or _FORMATS.get(suffix, "vasp")
    try:
        check_counts(path, name)
        with bounded(path, name) as count:
            images = _rows(path, name) if suffix in _DATABASES else enumerate(_images(path, name))
            for number, atoms in images:
                yield number, count(atoms)
    except Exception as error:  # each format of ASE fails in its own way
        reason = (str(error).strip().splitlines() or ["no reason given"])[0]
        if isinstance(error, MemoryError):
            reason = f"more memory than there is ({reason})"
        hint = "; install ase-db-backends to read it" if suffix == ".aselmdb" else ""
        raise ValueError(
            f"{path}: cannot be read; expected ASE's {name} format; "
            f"got {type(error).__name__}: {reason[:200]}{hint}"
        ) from None


def _images(path: Path, kind: str) -> Iterator[Atoms]:
    """Structures of a file; what ASE warns of is said in one line, unless it refuses the file."""
    import ase.io

    options: dict[str, Any] = {}
    if kind == "extxyz":
        options["properties_parser"] = xyz_properties
    # an @ in a path would otherwise be read as ASE's file@index
    images: Iterator[Atoms] = ase.io.iread(
        str(path), index=":", format=kind, do_not_split_by_at_sign=True, **options
    )
    said: list[str] = []
    while True:
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            atoms = next(images, None)
        said += [" ".join(str(each.message).split()) for each in heard]
        if atoms is None:
            break
        yield atoms
    if said:
        more = f" (and {len(said) - 1} more)" if len(said) > 1 else ""
        print(f"molflt: warning: {path}: ASE: {shown(said[0], 200)}{more}", file=sys.stderr)


def _rows(path: Path, kind: str) -> Iterator[tuple[int, Atoms]]:
    import ase.db

    if kind == "db":  # ASE would make its tables in a file that has none
        source = f"{path.absolute().as_uri()}?mode=ro"
        with closing(sqlite3.connect(source, uri=True)) as tables:
            tables.execute("SELECT id FROM systems LIMIT 1")
    seen = set()
    with ase.db.connect(str(path), type=kind, use_lock_file=False) as database:
        for row in database.select():
            if row.id in seen:
                raise ValueError(f"row {row.id} comes twice")
            seen.add(row.id)
            yield row.id, row.toatoms(add_additional_information=True)
