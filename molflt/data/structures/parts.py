"""Sources made of parts of a source, or of several sources."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from molflt.data.structures.base import Structures
from molflt.data.structures.labels import energy_kind, label_faults, other_kind

if TYPE_CHECKING:
    from ase import Atoms
    from torch_geometric.data import Data

__all__ = ["Joined", "Part", "element_faults", "split_by_seed", "with_sound_labels", "without"]


class _View(Structures):
    """Structures of other sources, which `_at` locates."""

    @abstractmethod
    def _at(self, index: int) -> tuple[Structures, int]:
        """Returns the source of a structure, and its index there."""

    def __getitem__(self, index: int) -> Data:
        source, own = self._at(index)
        return source[own]

    def to_atoms(self, index: int) -> Atoms:
        source, own = self._at(index)
        return source.to_atoms(own)

    def where(self, index: int) -> str:
        source, own = self._at(index)
        return source.where(own)

    def place(self, index: int) -> int:
        source, own = self._at(index)
        return source.place(own)

    def file(self, index: int) -> Path:
        source, own = self._at(index)
        return source.file(own)

    def name(self, index: int, sid: int) -> str | int:
        source, own = self._at(index)
        return source.name(own, sid)

    def with_unwrapped(self, index: int) -> tuple[Data, int]:
        source, own = self._at(index)
        return self[index], source.with_unwrapped(own)[1]


class Joined(_View):
    """Structures of several sources, one after the other.

    Args:
        path: common name for messages.
        sources: sources of any kind.
    """

    def __init__(self, path: Path, sources: Sequence[Structures]) -> None:
        super().__init__(path, any(source.skip_bad for source in sources))
        self.sources, self._ends = list(sources), np.cumsum([len(source) for source in sources])
        self.files = [file for source in sources for file in source.files]
        self.bad = [one for source in sources for one in source.bad]
        self.unused = list(dict.fromkeys(n for source in sources for n in source.unused))
        used = dict.fromkeys(n for source in sources for n in source.for_potentials)
        self.for_potentials = list(used)
        self.hint = next((source.hint for source in sources if source.hint), "")

    def __len__(self) -> int:
        return int(self._ends[-1])

    def _at(self, index: int) -> tuple[Structures, int]:
        stored = self._stored(index)
        number = int(np.searchsorted(self._ends, stored, side="right"))
        source = self.sources[number]
        return source, stored - int(self._ends[number]) + len(source)

    def place(self, index: int) -> int:
        """Returns the index of a structure over all sources, including skipped structures."""
        number = int(np.searchsorted(self._ends, self._stored(index), side="right"))
        before = sum(len(source) + len(source.bad) for source in self.sources[:number])
        return before + super().place(index)

    def verify(self) -> bool | None:
        found = [source.verify() for source in self.sources]
        return None if None in found else all(found)

    @property
    def natoms(self) -> np.ndarray:
        """Number of atoms in each structure, (len,) int64."""
        return np.concatenate([source.natoms for source in self.sources])

    @property
    def y_relaxed(self) -> np.ndarray:
        """Relaxed energies, (len,) float64, eV; NaN where unknown."""
        return np.concatenate([source.y_relaxed for source in self.sources])


class Part(_View):
    """Selected structures of a source, in the order of the source.

    Args:
        source: source of any kind.
        kept: indices of these structures in the source, ascending.
        energies: y_relaxed of the whole source, (len,), eV, if it is known.
    """

    def __init__(
        self,
        source: Structures,
        kept: Sequence[int] | NDArray[np.int64],
        energies: NDArray[np.float64] | None = None,
    ) -> None:
        super().__init__(source.path, source.skip_bad)
        self.source, self.hint, self.unused = source, source.hint, source.unused
        self.for_potentials, self.files = source.for_potentials, source.files
        self.bad = list(source.bad)
        self._kept: NDArray[np.int64] = np.asarray(kept, dtype=np.int64)
        self._energies = energies

    def __len__(self) -> int:
        return len(self._kept)

    def _at(self, index: int) -> tuple[Structures, int]:
        return self.source, self._stored(index)

    def verify(self) -> bool | None:
        return self.source.verify()

    @property
    def natoms(self) -> np.ndarray:
        """Number of atoms in each structure, (len,) int64."""
        natoms: np.ndarray = self.source.natoms[self._kept]
        return natoms

    @property
    def y_relaxed(self) -> np.ndarray:
        """Relaxed energies, (len,) float64, eV; NaN where unknown."""
        if self._energies is None:
            return super().y_relaxed
        return self._energies[self._kept]

    def compositions(
        self, indices: NDArray[np.int64], of_adsorbates: bool = False
    ) -> NDArray[np.float64]:
        return self.source.compositions(self._kept[indices], of_adsorbates)


def without(
    source: Structures, energies: NDArray[np.float64] | None, faults: Mapping[int, str]
) -> Structures:
    """Returns the structures of a source that have no faults; others are listed in `bad`."""
    part = Part(source, np.setdiff1d(np.arange(len(source)), list(faults)), energies)
    part.bad += [(f"{source.path}: sid {int(source[i].sid)}", faults[i]) for i in faults]
    return part


def element_faults(source: Structures, undescribed: Collection[int]) -> dict[int, str]:
    """Returns faults, by index, for structures with elements that a model does not support."""
    from ase.data import chemical_symbols

    numbers, faults = np.array(sorted(undescribed), dtype=np.int64), {}
    for indices, atoms in source.composition_blocks() if len(numbers) else ():
        there = atoms[:, numbers] > 0
        for row in np.flatnonzero(there.any(axis=1)):
            symbols = ", ".join(chemical_symbols[number] for number in numbers[there[row]])
            faults[int(indices[row])] = f"no descriptors are known of {symbols}"
    return faults


def split_by_seed(source: Structures, fraction: float, seed: int) -> tuple[Part, Part]:
    """Splits a source at random, by seed, into a training part and a validation part."""
    count = len(source)
    if count < 2:
        raise ValueError(
            f"{source.path}: expected at least 2 structures, to train and to validate on; got "
            f"{count}; give a folder with a file for each split"
        )
    order = np.random.default_rng([seed, count]).permutation(count)
    held = min(count - 1, max(1, round(count * fraction)))
    return Part(source, np.sort(order[held:])), Part(source, np.sort(order[:held]))


def with_sound_labels(
    opened: Mapping[str, Structures], train: str, val: str
) -> dict[str, Structures]:
    """Refuses missing and absurd labels, or leaves out their structures.

    Labels of one file are judged together, across all splits. Warns if two files have labels of
    different kinds.
    """
    energies = {split: part.y_relaxed for split, part in opened.items() if len(part)}
    natoms = {split: opened[split].natoms for split in energies}
    kind = None
    if energies and len({part.path for part in opened.values()}) == 1:
        kind = energy_kind(*(np.concatenate([*of.values()]) for of in (energies, natoms)))
    sound = dict(opened)
    for split, own in energies.items():
        dataset = opened[split]
        faults = label_faults(own, natoms[split], required=True, kind=kind)
        if not faults:
            continue
        if not dataset.skip_bad:
            index, reason = next(iter(faults.items()))
            raise ValueError(
                f"{dataset.path}: sid {int(dataset[index].sid)}: {reason} ({len(faults)} such of "
                f"{len(dataset)}); "
                + (
                    dataset.hint
                    or "take a split with labels, or leave these out with --data.skip_bad"
                )
            )
        sound[split] = without(dataset, own, faults)
    if kind is None and train in energies and val in energies:
        learned = energy_kind(energies[train], natoms[train])
        if text := other_kind(energies[val], natoms[val], learned):
            warnings.warn(f"{opened[val].path}: {text}", stacklevel=5)
    return sound
