"""Parts of a source, and concatenations of several sources."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from molflt.atoms import Atoms, Data, symbol
from molflt.data.structures.base import Structures, locate, with_bar


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
        self.baseline = " and ".join(baselines)
        self.quantity = first.quantity
        self.hint = next((source.hint for source in self.sources if source.hint), "")
        labels = {name: field for source in self.sources for name, field in source.labels.items()}
        # shared with a single source, which may add names while it is read
        self.labels = first.labels if len(self.sources) == 1 else labels
        self._kept = np.arange(self._ends[-1]) if kept is None else np.asarray(kept, np.int64)

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
    def natoms(self) -> np.ndarray:
        return np.concatenate([source.natoms for source in self.sources])[self._kept]

    @cached_property
    def y_relaxed(self) -> np.ndarray:
        return np.concatenate([source.y_relaxed for source in self.sources])[self._kept]


def quantity_of(sources: Iterable[Structures]) -> str:
    """Returns the quantity in y_relaxed; raises ValueError if it differs between the sources."""
    paths = {source.quantity: source.path for source in sources}
    if len(paths) > 1:
        found = ", ".join(f"{name or 'energies'} in {path}" for name, path in paths.items())
        raise ValueError(f"expected labels of one quantity; got {found}; use files with one label")
    return next(iter(paths))


def readable(source: Structures) -> Structures:
    """Reads all structures; returns those without an error, and lists the others in `bad`."""
    valid, natoms, energies = [], [], []
    for index in with_bar(range(len(source)), f"{source.path.name}: checking"):
        try:
            record = source[index]
        except ValueError as error:
            source.note_bad(index, error)
            continue
        valid.append(index)
        natoms.append(record.natoms)
        energies.append(float(record.y_relaxed))
    if not source.bad:
        return source
    part = Part(source, valid)
    part.natoms, part.y_relaxed = np.array(natoms, dtype=np.int64), np.array(energies)
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
