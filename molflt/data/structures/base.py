"""Base class of sources of structures: map-style data sets with metadata."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from molflt.atoms import MAX_ATOMIC_NUMBER, Tag

if TYPE_CHECKING:
    from ase import Atoms
    from torch_geometric.data import Data

__all__ = ["ANY_TAGS", "AS_IT_IS", "AS_TRAINED", "AnyTags", "Held", "Reading", "Structures"]
__all__ += ["Tags", "grouped", "to_atoms", "with_bar"]

_Item = TypeVar("_Item")

_SHOWN = 5  # names of structures that are left out, and reasons, in a message
_BLOCK = 10_000  # structures whose compositions are counted at once

Tags = Literal["oc20", "ase", "guess"]
AnyTags = Literal["oc20", "ase", "guess", "any"]


class Reading(NamedTuple):
    """How to read entries of other formats, for sources whose `options` name these."""

    energy_key: str | None = None
    """name of the entry that is the energy, eV; by default y_relaxed, else energy"""
    tags: AnyTags = "oc20"
    """oc20: 0 subsurface, 1 surface, 2 adsorbate; ase: ase.build's numbers of layers from the top,
    1, 2, ..., and 0 for adsorbates; guess: not read, but found from the geometry by
    `molflt.data.structures.tags.guess_tags`; any: whole numbers that mean nothing, for potentials,
    which do not read them"""
    forces_key: str | None = None
    """name of the array of forces, (N, 3) eV/Å; by default forces, else REF_forces"""
    stress_key: str | None = None
    """name of the stress, (3, 3) or (6,), eV/Å^3; by default stress, else REF_stress"""
    for_prediction: bool = False
    """labels are not needed: an energy that is not finite counts as missing, forces are not read"""
    keep_atoms: bool = False
    """also keep structures as ASE reads them, with all their constraints"""
    surface: tuple[float, float] | None = None
    """least and largest share of a slab that is surface, for tags that are guessed"""


AS_IT_IS = Reading()
AS_TRAINED = "as trained"
"""value that takes the option from the training"""
ANY_TAGS = Reading(tags="any")


def grouped(bad: Iterable[tuple[str, str]], prefix: str = "") -> list[str]:
    """Each reason once, with the names that it is about; of names and reasons.

    Args:
        bad: (name, reason) pairs. Reasons that differ only in numbers count as one.
        prefix: left out of the names.
    """
    kinds: dict[str, tuple[str, list[str]]] = {}
    for name, reason in bad:
        _, names = kinds.setdefault(re.sub(r"-?\d[\d.e+-]*|nan|inf", "0", reason), (reason, []))
        names.append(name.removeprefix(prefix))
    lines = [
        ", ".join(names[:_SHOWN])
        + f" and {len(names) - _SHOWN} more" * (len(names) > _SHOWN)
        + f": {reason}"
        for reason, names in list(kinds.values())[:_SHOWN]
    ]
    return lines + [f"and {len(kinds) - _SHOWN} other reasons"] * (len(kinds) > _SHOWN)


def with_bar(items: Iterable[_Item], what: str) -> Iterable[_Item]:
    """The items, with a bar on a terminal if they take more than a few seconds."""
    from tqdm import tqdm

    return tqdm(items, desc=what, delay=5, leave=False, disable=None)


class Structures(Dataset["Data"], ABC):
    """Base of data sets of structures that one path holds; they can be sent to worker processes.

    A new source is a subclass with `suffixes`, ``__init__(path, skip_bad)``, ``len()``, ``[i]`` and
    `natoms`, and a line in `molflt.data.structures.SOURCES`. Structures are made by
    :func:`molflt.data.structures.records.make_record`, which checks them.

    Args:
        path: what to read.
        skip_bad: leave out structures that are not valid and list them in `bad`, instead of
            raising a ValueError for the first one.

    Attributes:
        suffixes: endings of the files that are for this class, lower case.
        path: as given.
        files: paths that are read; for a single source, its path.
        names: structures that have a name as their sid, by index in the source.
        bad: (name, reason) of every structure that was left out.
        hint: advice if labels are missing, from the part read so far.
        unused: labels in the file that are not read.
        for_potentials: labels that only potentials read.
        options: which of the entries of :class:`Reading` the constructor takes, by name.
        joins_files: the constructor takes several `files` at once.
    """

    suffixes: ClassVar[tuple[str, ...]] = ()
    options: ClassVar[tuple[str, ...]] = ()
    joins_files: ClassVar[bool] = False

    def __init__(self, path: str | Path, skip_bad: bool = False) -> None:
        self.path = Path(path)
        self.skip_bad = skip_bad
        self.files = [self.path]
        self.names: dict[int, str] = {}
        self.bad: list[tuple[str, str]] = []
        self.hint = ""
        self.unused: list[str] = []
        self.for_potentials: list[str] = []
        self._kept: np.ndarray | None = None  # indices in the file; None: all of them

    def left_out(self) -> str:
        """Count of structures left out as bad, and the reasons; "" if all are kept."""
        if not self.bad:
            return ""
        listed = "; ".join(grouped(self.bad, f"{self.path}: "))
        return f"{self.path}: {len(self.bad)} bad structure(s) left out: {listed}"

    @classmethod
    def to_read_once(cls, path: Path, skip_bad: bool) -> Structures:
        """Opens a source for who reads everything once and himself leaves out what raises then.

        Sources that must read everything to find bad records override it to read once.
        """
        return cls(path, skip_bad=skip_bad)

    @classmethod
    def takes(cls, path: Path) -> bool:
        """Returns True if this class opens a path, judging by its name."""
        return path.suffix.lower() in cls.suffixes

    @classmethod
    def find(cls, stem: Path) -> Path | None:
        """The path that holds structures called `stem`, such as a split of a data set, if any."""
        files = (stem.with_name(stem.name + suffix) for suffix in cls.suffixes)
        return next((file for file in files if file.is_file()), None)

    def verify(self) -> bool | None:
        """True if the file has a digest of its content; None for kinds that never have one."""
        return None

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, index: int) -> Data: ...

    def to_atoms(self, index: int) -> Atoms:
        """A structure for ASE: as it was given, where that is kept, else made of its record."""
        return to_atoms(self[index])

    @property
    @abstractmethod
    def natoms(self) -> np.ndarray:
        """Atoms in each structure, (len,) int64."""

    @property
    def y_relaxed(self) -> np.ndarray:
        """Relaxed energies, (len,) float64, eV; NaN if missing."""
        # A pickled LMDB of OC20's size takes minutes
        records = with_bar(self, "reading labels")
        return np.array([float(record.y_relaxed) for record in records], dtype=np.float64)

    def compositions(
        self, indices: NDArray[np.int64], of_adsorbates: bool = False
    ) -> NDArray[np.float64]:
        """Number of atoms, or of adsorbate atoms, of each element: (n,) -> (n, 119)."""
        counts = np.zeros((len(indices), MAX_ATOMIC_NUMBER + 1))
        for row, index in zip(counts, indices, strict=True):
            record = self[int(index)]
            counted = (record.tags == Tag.ADSORBATE) | (not of_adsorbates)
            row += np.bincount(record.atomic_numbers[counted].numpy(), minlength=len(row))
        return counts

    def composition_blocks(
        self, of_adsorbates: bool = False
    ) -> Iterator[tuple[NDArray[np.int64], NDArray[np.float64]]]:
        """Indices and `compositions` of all structures, in the memory of some."""
        for first in with_bar(range(0, len(self), _BLOCK), "reading elements"):
            indices = np.arange(first, min(first + _BLOCK, len(self)))
            yield indices, self.compositions(indices, of_adsorbates)

    def __iter__(self) -> Iterator[Data]:
        return map(self.__getitem__, range(len(self)))

    def where(self, index: int) -> str:
        """Returns the name of a structure in messages: file and place."""
        return f"{self.path}: structure {index}"

    def place(self, index: int) -> int:
        """Returns the index of a structure in its file, from 0, including skipped ones."""
        return self._stored(index)

    def file(self, index: int) -> Path:
        """The file that holds a structure."""
        return self.path

    def name(self, index: int, sid: int) -> str | int:
        """The sid as the user gave it, a number or a name."""
        return self.names.get(self._stored(index), sid)

    def origin(self, index: int) -> dict[str, str]:
        """Further columns of tables: the file if there are several, and the name if it has one."""
        found = {"file": str(self.file(index))} if len(self.files) > 1 else {}
        name = self.name(index, 0)
        return found | ({"name": name} if isinstance(name, str) else {})

    def with_unwrapped(self, index: int) -> tuple[Data, int]:
        """A structure, and how many of its free atoms the file has in another periodic image."""
        return self[index], 0

    def _stored(self, index: int) -> int:
        """Index in the file of an index into this data set, which may count from the end."""
        length = len(self)
        if not -length <= index < length:
            raise IndexError(f"{self.path}: index {index} is outside 0..{length - 1}")
        index = int(index) % length
        return index if self._kept is None else int(self._kept[index])


class Held(Structures):
    """Base of sources that hold their structures in memory, which `_hold` adds."""

    def __init__(self, path: str | Path, skip_bad: bool = False) -> None:
        super().__init__(path, skip_bad)
        self._records: list[dict[str, object]] = []

    def _hold(self, record: Data) -> None:
        """Adds a structure; an array of one value, such as absent labels, takes no memory."""
        held: dict[str, object] = {}
        for key, value in record.to_dict().items():
            if isinstance(value, torch.Tensor):
                value = value.numpy()
                if np.array_equal(value, np.full_like(value, value.flat[0]), equal_nan=True):
                    value = np.broadcast_to(value.flat[0], value.shape)
            held[key] = value
        self._records.append(held)

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> Data:
        from torch_geometric.data import Data

        held = self._records[self._stored(index)].items()
        arrays = {name: np.array(value) for name, value in held if isinstance(value, np.ndarray)}
        return Data(**dict(held) | {name: torch.from_numpy(own) for name, own in arrays.items()})

    @property
    def natoms(self) -> np.ndarray:
        """Atoms in each structure, (len,) int64."""
        return np.array([record["natoms"] for record in self._records], dtype=np.int64)


def to_atoms(record: Data) -> Atoms:
    """A record as `ase.Atoms`: positions, cell, tags, fixed atoms, and sid and charge in info."""
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
