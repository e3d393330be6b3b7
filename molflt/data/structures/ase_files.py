"""Structures from files that ASE reads, limited to formats whose readers run no code."""

from __future__ import annotations

import re
import sqlite3
import sys
import warnings
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from glob import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from molflt.data.structures.ase_fields import (
    atomic_number,
    check_fields,
    fixed_atoms,
    other_constraints,
    total_charge,
    unused_fields,
    unused_warning,
)
from molflt.data.structures.ase_formats import (
    DATABASES,
    ENDINGS,
    ase_format,
    opened,
    without_packing,
)
from molflt.data.structures.ase_labels import Labels, entries, layers_as_tags, tags_look_like
from molflt.data.structures.ase_text import (
    cif_frames,
    expect_counts_of_poscar,
    expect_elements_of_pdb,
    xyz_frames,
)
from molflt.data.structures.base import AS_IT_IS, AnyTags, Held, Reading
from molflt.data.structures.lmdb_file import LmdbFile
from molflt.data.structures.records import make_record
from molflt.files import shown

if TYPE_CHECKING:
    from ase import Atoms
    from torch_geometric.data import Data

__all__ = ["AseStructures", "rows_of_aselmdb", "text_sid"]

_MOST_BYTES = 2**28  # maximum size of a decompressed row


class AseStructures(Held):
    """Files or databases that ASE reads, held in memory.

    Reads positions, cell, periodic axes, ``atoms.get_tags()`` (0 subsurface, 1 surface, 2
    adsorbate; 0 without tags) and constraints that fix atoms in all directions; others are ignored
    with a message. ``y_relaxed`` is the entry `energy_key`, by default ``info["y_relaxed"]``, else
    the stored calculator's energy, else ``info["energy"]``. ``y_init`` is ``info["y_init"]``, and
    the relaxed positions are the array ``pos_relaxed``. The sid is ``info["sid"]``, else the number
    of the frame or row over all files; a textual sid is the name of the structure. In databases,
    key-value pairs count as info. Energies are in eV and not converted; those of OC20 are
    adsorption energies. For the total charge, see `molflt.data.structures.ase_fields.total_charge`.

    For potentials, it also reads ``energy`` (from the calculator or info, but not with relaxed
    positions, to which it would belong), ``forces`` and ``stress``. For VASP's OUTCAR and
    vasprun.xml, ASE's energy is "energy(sigma->0)"; ``energy_key="free_energy"`` takes the free
    energy.

    Args:
        path: file in a format of `molflt.data.structures.ase_formats`, which may be compressed with
            gzip, bzip2 or xz.
        skip_bad: leave out invalid structures; they are listed in ``bad`` as (frame, reason).
        energy_key, tags, forces_key, stress_key, for_prediction, keep_atoms: see :class:`Reading`;
            warns if tags look like those of the other convention.
        files: files to read, if `path` is a folder or a pattern.
    """

    suffixes = tuple(ENDINGS)
    options = Reading._fields
    joins_files = True

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
        files: Sequence[Path] = (),
    ) -> None:
        super().__init__(path, skip_bad)
        self.files = list(files) or [self.path]
        self.reading = Reading(energy_key, tags, forces_key, stress_key, for_prediction, keep_atoms)
        self.atoms: list[Atoms] = []  # as given, if they are kept
        self._places: list[int] = []
        self._at: list[tuple[int, int]] = []  # file and frame
        labels, seen, place = Labels(self.reading), _Seen(tags), -1
        for number, file in enumerate(self.files):
            for frame, (row, load) in enumerate(_frames(file, seen.said)):
                place += 1
                try:
                    atoms = load()
                    own = row if len(self.files) == 1 else place
                    self._hold(_record_from_atoms(atoms, own, self.reading, labels))
                except ValueError as error:
                    if not skip_bad:
                        raise ValueError(f"{file}: frame {frame}: {error}") from None
                    self.bad.append((f"{file}: frame {frame}", str(error)))
                    continue
                if (name := text_sid(atoms)) is not None:
                    self.names[len(self._at)] = name
                seen.take(atoms)
                self._places.append(place)
                self._at.append((number, frame))
                if keep_atoms:
                    self.atoms.append(atoms)
        if not self._records and not self.bad:
            raise ValueError(f"{self.path}: holds no structures; expected at least one")
        try:
            labels.check()
        except ValueError as error:
            raise ValueError(f"{self.path}: {error}") from None
        self.hint, self.unused = labels.hint, labels.unused
        self.for_potentials = labels.for_potentials
        seen.say(self.path, labels, self.reading)

    @classmethod
    def takes(cls, path: Path) -> bool:
        return not path.is_dir() and ase_format(path) is not None

    @classmethod
    def find(cls, stem: Path) -> Path | None:
        files = sorted(stem.parent.glob(f"{escape(stem.name)}.*"))
        return next((file for file in files if file.is_file() and cls.takes(file)), None)

    def place(self, index: int) -> int:
        return self._places[self._stored(index)]

    def file(self, index: int) -> Path:
        return self.files[self._at[self._stored(index)][0]]

    def to_atoms(self, index: int) -> Atoms:
        return self.atoms[index].copy() if self.atoms else super().to_atoms(index)

    def where(self, index: int) -> str:
        return f"{self.file(index)}: frame {self._at[self._stored(index)][1]}"


class _Seen:
    """Collects notes about the structures of a file, which are printed once all are read."""

    def __init__(self, tags: AnyTags) -> None:
        self.tags, self.count, self.others, self.steps, self.last = tags, 0, 0, 0, b""
        self.lost: Counter[str] = Counter()
        self.said: dict[str, None] = {}

    def take(self, atoms: Atoms) -> None:
        self.count += 1
        self.others += self.tags != "any" and tags_look_like(atoms) not in (None, self.tags)
        same = atoms.numbers.tobytes() + atoms.cell.array.tobytes()
        self.steps, self.last = self.steps + (same == self.last), same
        self.lost.update(other_constraints(atoms))

    def say(self, path: Path, labels: Labels, reading: Reading) -> None:
        say_tags(str(path), self.others, self.count, self.tags)
        of_steps = self.tags != "any" and not reading.for_prediction and labels.of_steps
        if of_steps and 2 * self.steps > self.count:
            warn(
                f"{path}: frames with forces look like steps of relaxations or dynamics; train on "
                "them with --recipe potential; relaxed energies need the first frame of each "
                "relaxation, with the energy of the last one as y_relaxed"
            )
        if self.lost and not reading.keep_atoms:
            found = ", ".join(f"{kind} in {count}" for kind, count in sorted(self.lost.items()))
            warn(
                f"{path}: constraints other than fixed atoms are left out: {found} structures; "
                "atoms that they hold count as free"
            )
        if labels.fields:
            warn(unused_warning(str(path), labels.fields))
        if said := list(self.said):
            more = f" (and {len(said) - 1} more)" if len(said) > 1 else ""
            warn(f"{path}: {said[0]}{more}")


def say_tags(name: str, others: int, count: int, tags: AnyTags) -> None:
    """Warns if the tags of more than half of the structures look like the other convention."""
    if 2 * others <= count:
        return
    found = (
        "look like ase.build's numbers of layers, from the top; if they are, read them with --tags "
        "ase, in training --data.tags ase, in Python tags='ase'"
        if tags == "oc20"
        else "were read as numbers of layers, but look like OC20's (0 below 1, 2 above it)"
    )
    warn(f"{name}: tags of {others} of {count} structures {found}")


def warn(text: str) -> None:
    """Prints a warning in one line."""
    print(f"molflt: warning: {text}", file=sys.stderr)


def _record_from_atoms(
    atoms: Atoms, number: int = 0, reading: Reading = AS_IT_IS, labels: Labels | None = None
) -> Data:
    """Converts an ASE structure to a record; see :class:`AseStructures`."""
    check_fields(atoms)
    info = entries(atoms)
    labels = labels or Labels(reading)
    labels.fields = {**unused_fields(atoms), **labels.fields}
    energy, at_pos = labels.energy(atoms), labels.at_pos(atoms)
    energies: dict[str, Any] = {"y_init": info.get("y_init"), "y_relaxed": energy}
    if reading.for_prediction:
        at_pos, energies = {}, {name: _if_finite(each) for name, each in energies.items()}
    relaxed = atoms.arrays.get("pos_relaxed")
    if relaxed is not None:  # the energy belongs to these positions
        at_pos.pop("energy", None)
    tags = atoms.get_tags() if atoms.has("tags") else None
    kept = tags if reading.tags == "any" else None  # not checked, but kept in outputs
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
            sid=info.get("sid", number) if text_sid(atoms) is None else number,
            pos_relaxed=relaxed,
            charge=total_charge(atoms),
            **energies,
            **at_pos,
        )
    except ValueError as error:  # use the name of the energy in the file
        raise ValueError(str(error).replace(": y_relaxed ", f": {labels.named} ")) from None
    if kept is not None:
        record.tags = torch.as_tensor(kept, dtype=torch.long)
    return record


def text_sid(atoms: Atoms) -> str | None:
    """Returns the sid of a structure if it is a name, not a number."""
    sid = entries(atoms).get("sid")
    return sid if isinstance(sid, str) and not re.fullmatch(r"\s*[+-]?[0-9]+\s*", sid) else None


def _if_finite(energy: object) -> object:
    """Returns an energy; None if it is NaN or infinite."""
    unknown = isinstance(energy, float | np.floating) and not np.isfinite(energy)
    return None if unknown else energy


def _frames(path: Path, said: dict[str, None]) -> Iterator[tuple[int, Callable[[], Atoms]]]:
    """Yields the number of each frame or row, and a function that reads the structure."""
    kind = ase_format(path) or "vasp"

    def explained(load: Callable[[], Atoms]) -> Atoms:
        try:
            with _heard(said):
                return load()
        except Exception as error:  # errors differ between the formats of ASE
            raise ValueError(f"cannot be read as {kind}: {_reason(error, path)}") from None

    frames, number = _loads(path, kind, said), -1
    while True:
        try:
            with _heard(said):
                number, load = next(frames)
        except StopIteration:
            return
        except Exception as error:
            yield number + 1, partial(explained, partial(_raise, error))
            return
        yield number, partial(explained, load)


def _raise(error: Exception) -> Any:
    raise error


def _reason(error: Exception, path: Path) -> str:
    """Returns the reason why a file cannot be read, in one line."""
    text = (str(error).strip().splitlines() or ["no reason given"])[0].removeprefix(f"{path}: ")
    text = text[:200]
    if isinstance(error, KeyError):  # mostly an unknown symbol
        try:
            atomic_number(name := str(error.args[0]), 0)
        except ValueError as unknown:
            return str(unknown).removeprefix("atom 0 is ")
        return f"{shown(name, 40)} is missing or not known"
    if isinstance(error, AssertionError):  # the order of blocks in ASE's XSF reader
        return f"expected what ASE reads, in XSF PRIMVEC, then CONVVEC, then PRIMCOORD; {text}"
    return text if isinstance(error, ValueError) else f"{type(error).__name__}: {text}"


@contextmanager
def _heard(said: dict[str, None]) -> Iterator[None]:
    """Collects ASE's warnings, which are later printed once each."""
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        yield
    for each in heard:
        said[f"ASE: {shown(' '.join(str(each.message).split()), 200)}"] = None


def _loads(
    path: Path, kind: str, said: dict[str, None]
) -> Iterator[tuple[int, Callable[[], Atoms]]]:
    """Yields the number of each structure in a file, and a function that reads the structure."""
    from ase.io.formats import ioformats, iread

    if not path.stat().st_size:
        raise ValueError("the file is empty; expected structures; write it again")
    if kind in DATABASES.values():
        yield from _rows(path, kind)
        return
    form = ioformats[kind]
    if path != without_packing(path) and not form.acceptsfd:
        raise ValueError(f"ASE reads {kind} unpacked; unpack it with `xz -d` or `gunzip`")
    with opened(path, "rb" if form.isbinary else "rt") as file:
        if kind == "extxyz":
            yield from enumerate(xyz_frames(file, said))
        elif kind == "cif":
            yield from enumerate(cif_frames(file))
        else:
            if kind == "proteindatabank":
                expect_elements_of_pdb(file)
            elif kind == "vasp":
                expect_counts_of_poscar(file)
            elif kind == "vasp-xml" and "</modeling>" not in "".join(deque(file, 3)):
                said["the file is cut; its last steps are not read"] = None
            file.seek(0)
            # an @ in a path would be read as ASE's file@index
            given: Any = file if form.acceptsfd else str(path)
            images = iread(given, index=":", format=kind, do_not_split_by_at_sign=True)
            for number, atoms in enumerate(images):
                yield number, partial(lambda same: same, atoms)


def _rows(path: Path, kind: str) -> Iterator[tuple[int, Callable[[], Atoms]]]:
    import ase.db

    if kind == "aselmdb":
        yield from rows_of_aselmdb(path)
        return
    if kind == "db":  # ASE would create missing tables
        source = f"{path.absolute().as_uri()}?mode=ro"
        with closing(sqlite3.connect(source, uri=True)) as tables:
            tables.execute("SELECT id FROM systems LIMIT 1")
    seen = set()
    with ase.db.connect(str(path), type=kind, use_lock_file=False) as database:
        for row in database.select():
            if row.id in seen:
                raise ValueError(f"row {row.id} comes twice")
            seen.add(row.id)
            yield row.id, partial(row.toatoms, add_additional_information=True)


def rows_of_aselmdb(path: Path) -> Iterator[tuple[int, Callable[[], Atoms]]]:
    """Yields the id of each row, and a function that reads the row.

    Missing rows that were not deleted raise a ValueError when they are read.
    """
    file = LmdbFile(path)
    there = {int(key) for key in file if key.isdigit() and key == b"%d" % int(key)}
    next_id, deleted = _entry(file, "nextid"), _entry(file, "deleted_ids")
    gone = set() if deleted is None else {int(number) for number in deleted}
    if next_id is None and not there:
        raise ValueError("has neither rows nor 'nextid'; expected an ASE database")
    expected = range(1, int(next_id or max(there) + 1))
    for number in sorted({*expected, *there} - gone):
        yield number, partial(_atoms, file, number)


def _atoms(file: LmdbFile, number: int) -> Atoms:
    from ase.calculators.calculator import all_properties
    from ase.db.row import AtomsRow

    fields = _entry(file, str(number))
    if not isinstance(fields, dict):
        problem = "is missing" if fields is None else "lacks fields"
        raise ValueError(f"row {number} {problem}; get the file again, or leave it out (skip_bad)")
    fields |= {name: np.array(fields[name]) for name in all_properties if name in fields}
    atoms: Atoms = AtomsRow(fields | {"id": number}).toatoms(add_additional_information=True)
    return atoms


def _entry(file: LmdbFile, key: str) -> Any:
    """Returns the decoded value of a key, or None."""
    from ase.io.jsonio import decode

    content = file.get(key.encode())
    if content is None:
        return None
    unpacker = zlib.decompressobj()
    try:
        text = unpacker.decompress(content, _MOST_BYTES)
    except zlib.error as error:
        raise ValueError(f"key {key!r} is damaged: {error}; get the file again") from None
    if not unpacker.eof:
        raise ValueError(f"key {key!r} is truncated or larger than {_MOST_BYTES:,} bytes unpacked")
    return decode(text.decode())
