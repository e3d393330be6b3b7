"""What a training set held: within it a model interpolates, outside of it energies are guesses."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from molflt.atoms import MAX_ATOMIC_NUMBER, Tag
from molflt.data.structures.labels import EnergyKind, energy_kind
from molflt.files import shown

if TYPE_CHECKING:
    from torch import Tensor
    from torch_geometric.data import Data

    from molflt.data.structures.base import Structures

__all__ = ["DOMAIN", "Domain"]

DOMAIN = "domain.json"
"""Name of the file in the folder of a run."""

_AXES = "xyz"
_KINDS: tuple[EnergyKind, ...] = ("adsorption", "total", "unknown")
_MOST = 10**12
_Range = tuple[int, int]


class Elements(NamedTuple):
    """Atomic numbers by the part of a structure that they occur in."""

    slab: frozenset[int]
    """of atoms with tag 0 or 1"""
    adsorbate: frozenset[int]
    """of atoms with tag 2"""
    untagged: frozenset[int]
    """of structures without tags"""

    @property
    def all(self) -> frozenset[int]:
        """Wherever they occur."""
        return self.slab | self.adsorbate | self.untagged


@dataclass(frozen=True)
class Domain:
    """What a training set held.

    Attributes:
        systems: their number.
        elements: atomic numbers in slabs, adsorbates, and structures without tags.
        atoms: fewest and most atoms of a structure.
        adsorbate_atoms: fewest and most atoms with tag 2 of a structure with tags; None if no
            structure has tags.
        slab_atoms: likewise, with tags 0 and 1.
        untagged: number of structures without tags.
        periodic: kinds of periodic boundaries, as "xyz", "xy" or "" for none.
        relaxed: number of structures with relaxed positions.
        kind: what the energies look like; see `molflt.data.structures.labels.energy_kind`.
        energy: least and largest relaxed energy, eV; None without labels.
    """

    systems: int
    elements: Elements
    atoms: _Range
    adsorbate_atoms: _Range | None
    slab_atoms: _Range | None
    untagged: int
    periodic: frozenset[str]
    relaxed: int
    kind: EnergyKind
    energy: tuple[float, float] | None

    @staticmethod
    def of(dataset: Structures) -> Domain:
        """That of a data set of at least one structure; reads it once."""
        from tqdm import tqdm

        seen = np.zeros((3, MAX_ATOMIC_NUMBER + 1), dtype=bool)  # slab, adsorbate, untagged
        slab, adsorbate, periodic = [], [], set()
        relaxed = 0
        # Silent where it is quick
        for record in tqdm(dataset, desc="reading what there is", delay=5, leave=False):
            parts = _parts(record)
            for row, numbers in zip(seen, parts, strict=True):
                row[numbers] = True
            if not len(parts[2]):
                slab.append(len(parts[0]))
                adsorbate.append(len(parts[1]))
            periodic.add(_axes(record))
            relaxed += not bool(torch.isnan(record.pos_relaxed).any())
        natoms, energies = dataset.natoms, dataset.y_relaxed
        known = energies[np.isfinite(energies)]
        return Domain(
            systems=len(dataset),
            elements=Elements(*(frozenset(np.flatnonzero(row).tolist()) for row in seen)),
            atoms=(int(natoms.min()), int(natoms.max())),
            adsorbate_atoms=(min(adsorbate), max(adsorbate)) if adsorbate else None,
            slab_atoms=(min(slab), max(slab)) if slab else None,
            untagged=len(dataset) - len(slab),
            periodic=frozenset(periodic),
            relaxed=relaxed,
            kind=energy_kind(energies, natoms),
            energy=(float(known.min()), float(known.max())) if len(known) else None,
        )

    def without_tags(self) -> Domain:
        """The same for a model that does not read tags."""
        untagged = Elements(frozenset(), frozenset(), self.elements.all)
        return replace(
            self,
            elements=untagged,
            adsorbate_atoms=None,
            slab_atoms=None,
            untagged=self.systems,
        )

    def outside(self, record: Data) -> list[str]:
        """In what a structure differs from all that was trained on; nothing, if it does not."""
        slab, adsorbate, untagged = _parts(record)
        numbers = record.atomic_numbers
        found = []
        if unknown := _symbols(numbers, self.elements.all):
            found.append(f"{unknown} not in training")
        found += self._other_parts(slab, adsorbate)
        if not self.atoms[0] <= len(numbers) <= self.atoms[1]:
            found.append(f"atoms: {len(numbers)}, trained on {_span(self.atoms)}")
        if len(untagged):
            found += [] if self.untagged else ["no tags, which training had"]
        else:
            found += _lacking(len(slab), self.slab_atoms, "slab (tags 0 and 1)")
            found += _lacking(len(adsorbate), self.adsorbate_atoms, "adsorbate (tag 2)")
            found += self._size_of_adsorbate(len(adsorbate))
        if _axes(record) not in self.periodic:
            kinds = " or ".join(map(_along, sorted(self.periodic)))
            found.append(f"{_along(_axes(record))}, trained on {kinds}")
        return found

    def _other_parts(self, slab: Tensor, adsorbate: Tensor) -> list[str]:
        """Elements that were trained on, but in the other part of a structure."""
        own, found = self.elements, []
        if moved := _symbols(slab, own.slab | own.untagged, own.adsorbate):
            found.append(f"{moved} in the slab, trained on in adsorbates alone")
        if moved := _symbols(adsorbate, own.adsorbate | own.untagged, own.slab):
            found.append(f"{moved} in the adsorbate, trained on in slabs alone")
        return found

    def _size_of_adsorbate(self, count: int) -> list[str]:
        known = self.adsorbate_atoms
        if known is None or count == 0 or known[0] <= count <= known[1]:
            return []
        return [f"adsorbate atoms: {count}, trained on {_span(known)}"]

    def describe(self) -> str:
        """In words: how many systems, of what, how large."""
        parts = [_named(numbers) for numbers in self.elements]
        of = [f"{parts[0]}" if parts[0] else "", f"with {parts[1]}" if parts[1] else ""]
        if parts[2]:
            of.append(f"and {parts[2]} without tags" if any(parts[:2]) else parts[2])
        sizes = f"{_span(self.atoms)} atoms"
        if self.adsorbate_atoms is not None and self.adsorbate_atoms[1]:
            sizes += f", {_span(self.adsorbate_atoms)} of them adsorbate"
        return f"{self.systems:,} systems of {' '.join(filter(None, of))}; {sizes}"

    def to_json(self) -> dict[str, object]:
        """As plain numbers and lists."""
        return {
            "systems": self.systems,
            "elements": {
                part: [_symbol(number) for number in sorted(numbers)]
                for part, numbers in self.elements._asdict().items()
            },
            "atoms": list(self.atoms),
            "adsorbate_atoms": None if self.adsorbate_atoms is None else [*self.adsorbate_atoms],
            "slab_atoms": None if self.slab_atoms is None else [*self.slab_atoms],
            "untagged": self.untagged,
            "periodic": sorted(self.periodic),
            "relaxed": self.relaxed,
            "kind": self.kind,
            "energy_eV": None if self.energy is None else [*self.energy],
        }

    def to_bytes(self) -> bytes:
        """As the file in a run."""
        return (json.dumps(self.to_json(), indent=1) + "\n").encode()

    @staticmethod
    def from_json(content: object, name: str) -> Domain:
        """Reads what :meth:`to_json` gave.

        Args:
            content: of the file.
            name: of the file, for messages.

        Raises:
            ValueError: naming the key that is wrong.
        """
        values = _Reader(content, name)
        kind = values.take("kind")
        periodic = values.take("periodic")
        axes = ["", "x", "y", "z", "xy", "xz", "yz", "xyz"]
        if kind not in _KINDS:
            raise values.wrong("kind", f"one of {', '.join(_KINDS)}")
        if not isinstance(periodic, list) or not all(one in axes for one in periodic):
            raise values.wrong("periodic", "a list of axes, as xyz")
        return Domain(
            systems=values.count("systems"),
            elements=values.elements(),
            atoms=values.range("atoms") or (0, 0),
            adsorbate_atoms=values.range("adsorbate_atoms", optional=True),
            slab_atoms=values.range("slab_atoms", optional=True),
            untagged=values.count("untagged"),
            periodic=frozenset(periodic),
            relaxed=values.count("relaxed"),
            kind=next(one for one in _KINDS if one == kind),
            energy=values.energies(),
        )


class _Reader:
    """The keys of a domain that a file holds, each checked."""

    def __init__(self, content: object, name: str) -> None:
        self.content: Mapping[object, object] = content if isinstance(content, dict) else {}
        self.name = name

    def take(self, key: str) -> object:
        return self.content.get(key)

    def wrong(self, key: str, expected: str) -> ValueError:
        got = shown(self.content[key]) if key in self.content else "no such key"
        return ValueError(
            f"{self.name}: key {key}: expected {expected}; got {got}; put back the file that "
            "training wrote"
        )

    def count(self, key: str) -> int:
        value = self.take(key)
        if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _MOST:
            return value
        raise self.wrong(key, "a number")

    def range(self, key: str, optional: bool = False) -> _Range | None:
        value = self.take(key)
        if value is None and optional and key in self.content:
            return None
        if isinstance(value, list) and len(value) == 2:
            low, high = value
            if type(low) is type(high) is int and 0 <= low <= high < _MOST:
                return low, high
        raise self.wrong(key, "two numbers, the first not above the second")

    def energies(self) -> tuple[float, float] | None:
        value = self.take("energy_eV")
        if value is None:
            return None
        if isinstance(value, list) and len(value) == 2:
            low, high = value
            number = all(type(one) in (int, float) and math.isfinite(one) for one in value)
            if number and low <= high:
                return float(low), float(high)
        raise self.wrong("energy_eV", "two energies, the first not above the second")

    def elements(self) -> Elements:
        from ase.data import atomic_numbers

        value = self.take("elements")
        parts = value if isinstance(value, dict) else {}
        found = []
        for part in Elements._fields:
            symbols = parts.get(part)
            known = isinstance(symbols, list) and all(
                isinstance(one, str) and 0 < atomic_numbers.get(one, 0) <= MAX_ATOMIC_NUMBER
                for one in symbols
            )
            if not known:
                raise self.wrong("elements", "lists of symbols by part of a structure")
            found.append(frozenset(atomic_numbers[one] for one in symbols or ()))
        return Elements(*found)


def _parts(record: Data) -> tuple[Tensor, Tensor, Tensor]:
    """Atomic numbers in the slab, in the adsorbate, and of a structure without tags."""
    numbers, tags = record.atomic_numbers, record.tags
    none = numbers[:0]
    if not bool((tags > Tag.SUBSURFACE).any()):
        return none, none, numbers
    return numbers[tags != Tag.ADSORBATE], numbers[tags == Tag.ADSORBATE], none


def _axes(record: Data) -> str:
    return "".join(
        axis for axis, on in zip(_AXES, record.pbc.flatten().tolist(), strict=True) if on
    )


def _along(axes: str) -> str:
    return f"periodic along {', '.join(axes)}" if axes else "not periodic"


def _lacking(count: int, known: _Range | None, part: str) -> list[str]:
    return [f"no {part}"] if known is not None and known[0] > 0 and count == 0 else []


def _symbols(numbers: Tensor, but: frozenset[int], among: frozenset[int] | None = None) -> str:
    """Symbols of the elements that do not belong to one set, and belong to the other if any."""
    present = set(numbers.tolist()) - but
    return _named(frozenset(present if among is None else present & among))


def _named(numbers: frozenset[int]) -> str:
    return ", ".join(_symbol(number) for number in sorted(numbers))


def _symbol(number: int) -> str:
    from ase.data import chemical_symbols

    return str(chemical_symbols[number])


def _span(known: _Range) -> str:
    return f"{known[0]:,}" if known[0] == known[1] else f"{known[0]:,} to {known[1]:,}"
