"""Sources of structures, map-style data sets with metadata, and their parts and concatenations."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections import ChainMap
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import ClassVar, Literal, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from molflt.atoms import MAX_ATOMIC_NUMBER, Atoms, Data, Tag, symbol
from molflt.files import counted

_Item = TypeVar("_Item")

_SHOWN = 5  # maximum number of names and of reasons in a message

Tags = Literal["oc20", "ase", "guess"]
AnyTags = Literal["oc20", "ase", "guess", "any"]


class Reading(NamedTuple):
    """Interpretation of entries in files; a source uses only the fields in its `options`."""

    energy_key: str | None = None
    """name of the energy, eV; by default y_relaxed or energy (potentials: energy or REF_energy)"""
    tags: AnyTags = "oc20"
    """convention of tags: oc20 (0 subsurface, 1 surface, 2 adsorbate); ase (ase.build's layer
    numbers from the top, 1, 2, ..., and 0 for adsorbates); guess (from the geometry; see
    `molflt.data.structures.tags.guess_tags`); or any (any integers, for potentials)"""
    forces_key: str | None = None
    """name of the array of forces (N, 3) in eV/Å; by default forces, else REF_forces"""
    stress_key: str | None = None
    """name of the stress, (3, 3) or (6,) in eV/Å^3; by default stress, else REF_stress"""
    for_prediction: bool = False
    """True if labels are optional: energies may be missing or not finite; forces are not read"""
    keep_atoms: bool = False
    """True to also store the structures as ASE reads them, with all constraints"""
    surface: tuple[float, float] | None = None
    """smallest and largest share of surface atoms in a slab, for guessed tags"""
    baseline_key: str | None = None
    """name of the entry with the baseline energy in eV; by default y_baseline"""


AS_IT_IS = Reading()
AS_TRAINED = "as trained"
"""value of an option that stands for its value in the training run"""
ANY_TAGS = Reading(tags="any")


def grouped(bad: Iterable[tuple[str, str]], prefix: str = "") -> list[str]:
    """Returns the distinct reasons in `bad`, each preceded by its names without `prefix`.

    Reasons that differ only in numbers are combined.
    """
    groups: dict[str, tuple[str, list[str]]] = {}  # by reason with each number replaced by 0
    for name, reason in bad:
        _, names = groups.setdefault(re.sub(r"-?\d[\d.e+-]*|nan|inf", "0", reason), (reason, []))
        names.append(name.removeprefix(prefix))
    lines = []
    for reason, names in list(groups.values())[:_SHOWN]:
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        lines.append(f"{', '.join(names[:_SHOWN])}{more}: {reason}")
    if len(groups) > _SHOWN:
        lines.append(f"and {len(groups) - _SHOWN} other reasons")
    return lines


def locate(ends: NDArray[np.int64], index: int) -> tuple[int, int]:
    """Returns the part to which an index over all parts belongs, and the index within this part.

    `ends` (parts,) contains the end of each part: the cumulative number of structures.
    """
    part = int(np.searchsorted(ends, index, side="right"))
    return part, index - int(ends[part - 1] if part else 0)


def with_bar(items: Iterable[_Item], title: str) -> Iterable[_Item]:
    """Iterates over items; shows a progress bar on a terminal after a few seconds."""
    from tqdm import tqdm

    return tqdm(items, desc=title, delay=5, leave=False, disable=None)


class Structures(Dataset[Data], ABC):
    """Base class for data sets of structures at one path; worker processes can share them.

    A new source needs a subclass with `kind`, `suffixes`, ``__init__(path, skip_bad)``, ``len()``
    and ``[i]``, or a subclass of `LoadedStructures` with the first three, and an entry in
    `molflt.data.structures.SOURCES`. :func:`molflt.data.structures.records.make_record` makes them.

    Args:
        path: source to read.
        skip_bad: skip invalid structures and list them in `bad`, instead of raising a
            ValueError at the first invalid structure.

    Attributes:
        kind: name of the format in messages.
        suffixes: file extensions that this class reads, in lower case.
        example: content of a valid file with three structures, for text formats; used by tests.
        path: path of the source.
        files: files that are read.
        names: names of structures with a textual sid, by index in the source.
        bad: (name, reason) of each skipped structure.
        labels: fields of records, by the names of labels in the file; None for unread labels.
        baseline: calculator and options of y_baseline in a compact store; "" if unknown.
        quantity: name of the quantity in y_relaxed; "" for energies.
        is_checked: True if structures are valid, and reading them does not raise an error.
        options: names of the fields of :class:`Reading` that the constructor accepts.
        joins_files: True if the constructor accepts several `files`.
    """

    kind: ClassVar[str]
    suffixes: ClassVar[tuple[str, ...]] = ()
    example: ClassVar[str] = ""
    options: ClassVar[tuple[str, ...]] = ()
    joins_files: ClassVar[bool] = False
    is_checked = False

    def __init__(self, path: str | Path, skip_bad: bool = False) -> None:
        self.path = Path(path)
        self.skip_bad = skip_bad
        self.files = [self.path]
        self.names: dict[int, str] = {}
        self.bad: list[tuple[str, str]] = []
        self._hint = ""
        self.labels: dict[str, str | None] | ChainMap[str, str | None] = {}
        self.baseline = self.quantity = ""

    @property
    def hint(self) -> str:
        """Advice about missing labels, based on the structures read so far."""
        return self._hint

    @property
    def unused(self) -> list[str]:
        """Names of labels in the file that are not read."""
        return [name for name, field in self.labels.items() if field is None]

    def skipped(self) -> str:
        """Returns a description of the skipped structures, with reasons, or ""."""
        if not self.bad:
            return ""
        listed = "; ".join(grouped(self.bad, f"{self.path}: "))
        return f"{self.path}: {counted(len(self.bad), 'bad structure')} skipped: {listed}"

    @classmethod
    def takes(cls, path: Path) -> bool:
        """Returns True if this class opens an existing file or folder, judged by its name."""
        return not path.is_dir() and path.suffix.lower() in cls.suffixes

    def verify(self) -> bool | None:
        """Returns True if the digest of a compact store matches, False if the store has no digest.

        The result is None for other formats, which do not have digests.
        """
        return None

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, index: int) -> Data: ...

    def to_atoms(self, index: int) -> Atoms:
        """Returns a structure for ASE: the stored original, or else the converted record."""
        return to_atoms(self[index])

    @cached_property
    def natoms(self) -> np.ndarray:
        """Number of atoms in each structure, as an int64 array (len,)."""
        return self._numbers[0].astype(np.int64)

    @cached_property
    def y_relaxed(self) -> np.ndarray:
        """Relaxed energies in eV, as a float64 array (len,); NaN if missing."""
        return self._numbers[1]

    @cached_property
    def y_baseline(self) -> np.ndarray:
        """Baseline energies in eV, as a float64 array (len,); NaN if missing."""
        return self._numbers[2]

    @cached_property  # reading OC20's LMDB files takes minutes
    def _numbers(self) -> NDArray[np.float64]:
        """Rows `natoms`, `y_relaxed` and `y_baseline`: (3, len)."""
        return _numbers_of(with_bar(self, f"{self.path.name}: reading labels"))

    def compositions(
        self, indices: NDArray[np.int64], of_adsorbates: bool = False
    ) -> NDArray[np.float64]:
        """Counts atoms, or only adsorbate atoms, by structure and atomic number: (n, 119)."""
        counts = np.zeros((len(indices), MAX_ATOMIC_NUMBER + 1))
        for row, index in zip(counts, indices, strict=True):
            record = self[int(index)]
            numbers = record.atomic_numbers
            if of_adsorbates:
                numbers = numbers[record.tags == Tag.ADSORBATE]
            row += np.bincount(numbers.numpy(), minlength=len(row))
        return counts

    def __iter__(self) -> Iterator[Data]:
        return map(self.__getitem__, range(len(self)))

    def where(self, index: int) -> str:
        """Returns the file and position of a structure, for messages."""
        return f"{self.path}: structure {index}"

    def place(self, index: int) -> int:
        """Returns the index of a structure in its source, counting skipped structures."""
        return self._stored(index)

    def file(self, index: int) -> Path:
        """Returns the file of a structure."""
        return self.path

    def name(self, index: int, sid: int) -> str | int:
        """Returns the name of a structure if its sid is text; otherwise the sid."""
        return self.names.get(self._stored(index), sid)

    def origin(self, index: int) -> dict[str, str]:
        """Returns table columns: the file, if the source has several, and the name, if known."""
        columns = {"file": str(self.file(index))} if len(self.files) > 1 else {}
        name = self.name(index, 0)
        return columns | ({"name": name} if isinstance(name, str) else {})

    def note_bad(self, index: int, error: Exception) -> None:
        """Adds a structure that raised an error to `bad`."""
        name = self.where(index)
        self.bad.append((name, str(error).removeprefix(f"{name}: ")))

    def _stored(self, index: int) -> int:
        """Converts an index, which may be negative, to the index in the source."""
        length = len(self)
        if not -length <= index < length:
            raise IndexError(f"{self.path}: index {index} is outside 0..{length - 1}")
        return int(index) % length


class LoadedStructures(Structures):
    """Base class for sources that keep their structures in memory.

    The constructor of a subclass calls `add` for each structure in the file.
    """

    is_checked = True

    def __init__(self, path: str | Path, skip_bad: bool = False) -> None:
        super().__init__(path, skip_bad)
        self._records: list[Data] = []
        self._places: list[tuple[int, str]] = []  # index in the source, name for messages

    def add(self, where: str, make: Callable[[], Data]) -> bool:
        """Adds a structure; returns False if the structure is invalid and therefore skipped.

        `where` names the structure in messages; `make` returns the record or raises ValueError.
        """
        place = len(self._records) + len(self.bad)
        try:
            self._records.append(make())
        except ValueError as error:
            if not self.skip_bad:
                raise ValueError(f"{where}: {error}") from None
            self.bad.append((where, str(error)))
            return False
        self._places.append((place, where))
        return True

    def place(self, index: int) -> int:
        return self._places[self._stored(index)][0]

    def where(self, index: int) -> str:
        return self._places[self._stored(index)][1]

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> Data:
        return self._records[self._stored(index)].clone()

    @cached_property
    def _numbers(self) -> NDArray[np.float64]:
        return _numbers_of(self._records)  # without copies of the records


class Part(Structures):
    """Selected structures of a source, or of several concatenated sources.

    Args:
        sources: one or more sources of any kind.
        kept: ascending indices of the selected structures over all sources; None for all.
        path: common name of several sources for messages.
    """

    def __init__(
        self,
        sources: Structures | Sequence[Structures],
        kept: Sequence[int] | NDArray[np.int64] | None = None,
        path: Path | None = None,
    ) -> None:
        self.sources = [sources] if isinstance(sources, Structures) else list(sources)
        first = self.sources[0]
        super().__init__(path or first.path, any(source.skip_bad for source in self.sources))
        self._ends = np.cumsum([len(source) for source in self.sources])
        self.files = [file for source in self.sources for file in source.files]
        self.bad = [fault for source in self.sources for fault in source.bad]
        baselines = dict.fromkeys(source.baseline for source in self.sources if source.baseline)
        self.baseline = "; ".join(baselines)  # a baseline may contain commas
        self.quantity = first.quantity
        # shared with the sources, which may add names while they are read
        self.labels = ChainMap(*(source.labels for source in reversed(self.sources)))
        self._kept = np.arange(self._ends[-1]) if kept is None else np.asarray(kept, np.int64)

    @property
    def hint(self) -> str:
        return next((source.hint for source in self.sources if source.hint), "")

    def __len__(self) -> int:
        return len(self._kept)

    def _stored(self, index: int) -> int:
        return int(self._kept[super()._stored(index)])

    def _locate(self, index: int) -> tuple[Structures, int]:
        number, local = locate(self._ends, self._stored(index))
        return self.sources[number], local

    def __getitem__(self, index: int) -> Data:
        source, local = self._locate(index)
        return source[local]

    def to_atoms(self, index: int) -> Atoms:
        source, local = self._locate(index)
        return source.to_atoms(local)

    def where(self, index: int) -> str:
        source, local = self._locate(index)
        return source.where(local)

    def place(self, index: int) -> int:
        """Returns the index of a structure over all sources, including skipped structures."""
        number, local = locate(self._ends, self._stored(index))
        earlier = sum(len(source) + len(source.bad) for source in self.sources[:number])
        return earlier + self.sources[number].place(local)

    def file(self, index: int) -> Path:
        source, local = self._locate(index)
        return source.file(local)

    def name(self, index: int, sid: int) -> str | int:
        source, local = self._locate(index)
        return source.name(local, sid)

    def verify(self) -> bool | None:
        results = [source.verify() for source in self.sources]
        return None if None in results else all(results)

    @cached_property
    def _numbers(self) -> NDArray[np.float64]:
        parts = [np.array([x.natoms, x.y_relaxed, x.y_baseline]) for x in self.sources]
        return np.concatenate(parts, axis=1).take(self._kept, axis=1)


def _numbers_of(records: Iterable[Data]) -> NDArray[np.float64]:
    """Returns the rows of `Structures._numbers`."""
    rows = [(each.natoms, float(each.y_relaxed), float(each.y_baseline)) for each in records]
    return np.array(rows, dtype=np.float64).reshape(-1, 3).T.copy()


def quantity_of(sources: Iterable[Structures]) -> str:
    """Returns the quantity in y_relaxed; raises ValueError if it differs between the sources."""
    paths = {source.quantity: source.path for source in sources}
    if len(paths) > 1:
        found = ", ".join(f"{name or 'energies'} in {path}" for name, path in paths.items())
        raise ValueError(f"expected labels of one quantity; got {found}; use files with one label")
    return next(iter(paths))


def valid(source: Structures) -> Iterator[tuple[int, Data]]:
    """Yields the index and the record of each structure, with a progress bar.

    If `skip_bad` is set, structures that raise a ValueError are listed in `bad` and left out.
    """
    for index in with_bar(range(len(source)), f"{source.path.name}: structures"):
        try:
            record = source[index]
        except ValueError as error:
            if not source.skip_bad:
                raise
            source.note_bad(index, error)
        else:
            yield index, record


def readable(source: Structures) -> Structures:
    """Reads all structures; returns those without an error, and lists the others in `bad`."""
    rows = [
        (index, record.natoms, float(record.y_relaxed), float(record.y_baseline))
        for index, record in valid(source)
    ]
    if not source.bad:
        return source
    part = Part(source, [index for index, *_ in rows])
    part._numbers = np.array(rows, dtype=np.float64).reshape(-1, 4)[:, 1:].T.copy()
    return part


def without(source: Structures, faults: Mapping[int, str], advice: str = "") -> Structures:
    """Returns a source without the structures in `faults`, which are listed in `bad`.

    `faults` contains the reasons by index. Unless the source skips invalid structures, raises
    ValueError with `advice` for the first of them.
    """
    if not faults:
        return source
    if not source.skip_bad:
        first = next(iter(faults))
        raise ValueError(
            f"{source.path}: sid {int(source[first].sid)}: {faults[first]} ({len(faults)} of "
            f"{len(source)} structures); {advice}"
        )
    part = Part(source, np.setdiff1d(np.arange(len(source)), list(faults)))
    part.bad += [(f"{source.path}: sid {int(source[i].sid)}", faults[i]) for i in faults]
    return part


def element_faults(source: Structures, undescribed: Collection[int]) -> dict[int, str]:
    """Describes, by index, the structures with elements that a model does not support."""
    faults: dict[int, str] = {}
    if not undescribed:
        return faults
    for index, record in enumerate(with_bar(source, "reading elements")):
        if numbers := sorted(set(record.atomic_numbers.tolist()) & set(undescribed)):
            faults[index] = f"descriptors do not exist for {', '.join(map(symbol, numbers))}"
    return faults


def to_atoms(record: Data) -> Atoms:
    """Converts a record to `ase.Atoms`, with tags, fixed atoms, and sid and charge in info."""
    from ase import Atoms
    from ase.constraints import FixAtoms

    atoms = Atoms(
        record.atomic_numbers.numpy(),
        positions=record.pos.numpy(),
        cell=record.cell[0].numpy(),
        pbc=record.pbc[0].numpy(),
        tags=record.tags.numpy(),
        info={"sid": int(record.sid)},
    )
    if charge := float(record.charge.nan_to_num()):
        atoms.info["charge"] = charge
    if bool(record.fixed.any()):
        atoms.set_constraint(FixAtoms(mask=record.fixed.numpy()))
    return atoms
