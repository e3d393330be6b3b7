"""What a training set held: within it a model interpolates, outside of it energies are guesses."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from molflt.atoms import MAX_ATOMIC_NUMBER, Tag
from molflt.data.structures.base import with_bar
from molflt.data.structures.domain_reader import DomainReader
from molflt.data.structures.labels import EnergyKind, energy_kind
from molflt.files import read_json

if TYPE_CHECKING:
    from torch import Tensor
    from torch_geometric.data import Data

    from molflt.data.structures.base import Structures

__all__ = ["DOMAIN", "Domain", "read_domain"]

DOMAIN = "domain.json"
"""Name of the file in the folder of a run."""

_MOST_BYTES = 10_000_000
_AXES = "xyz"
_KINDS: tuple[EnergyKind, ...] = ("adsorption", "total", "unknown")
_SEEN = " (seen by the initial weights alone)"
_Range = tuple[int, int]
_Aspect = tuple[str, str]  # and the element that it is about, if it is about one


def read_domain(path: Path) -> object:
    """What a run's domain.json holds, for `Domain.from_json`; None if it is not there.

    Raises:
        ValueError: naming the file, if it is no JSON.
    """
    if not path.is_file():
        return None
    return read_json(path, _MOST_BYTES, "JSON", "put back the file that training wrote")


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
        initial: those of the weights that training started from, of theirs, and so on; nothing
            where it started from new ones. Kind and energies are those of the last data.
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
    initial: tuple[Domain, ...] = ()

    @staticmethod
    def of(dataset: Structures, look: Callable[[Data], object] = lambda record: None) -> Domain:
        """That of a data set of at least one structure; reads it once.

        Args:
            dataset: what is trained on.
            look: is shown each structure on the way.
        """
        seen = np.zeros((3, MAX_ATOMIC_NUMBER + 1), dtype=bool)  # slab, adsorbate, untagged
        slab, adsorbate, periodic = [], [], set()
        relaxed = 0
        for record in with_bar(dataset, "reading what there is"):
            parts = _parts(record)
            for row, numbers in zip(seen, parts, strict=True):
                row[numbers] = True
            if not len(parts[2]):
                slab.append(len(parts[0]))
                adsorbate.append(len(parts[1]))
            periodic.add(_axes(record))
            relaxed += not bool(torch.isnan(record.pos_relaxed).any())
            look(record)
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
            initial=tuple(one.without_tags() for one in self.initial),
        )

    def after(self, initial: Domain) -> Domain:
        """That of a training which started from weights with a domain of their own."""
        return replace(self, initial=(replace(initial, initial=()), *initial.initial))

    def outside(self, record: Data) -> list[str]:
        """In what a structure differs from all that was trained on; nothing, if it does not.

        What the initial weights had seen is said to be so: they may have kept it, or not.
        """
        own, before = self._beyond(record), [one._beyond(record) for one in self.initial]
        found: dict[str, list[str]] = {}
        for (aspect, symbol), text in own.items():
            if not text or (aspect != "element" and ("element", symbol) in own):
                continue
            seen = any((aspect, symbol) not in one for one in before)
            found.setdefault(text + _SEEN * seen, []).append(symbol)
        return [f"{', '.join(symbols)} {text}".strip() for text, symbols in found.items()]

    def _beyond(self, record: Data) -> dict[_Aspect, str]:
        """In what a structure differs from these data, in words; "" where they cannot tell."""
        slab, adsorbate, untagged = _parts(record)
        own, count = self.elements, len(record.atomic_numbers)
        found: dict[_Aspect, str] = {}
        for aspect, numbers, known, text in (
            ("element", record.atomic_numbers, own.all, "not in training"),
            ("slab", slab, own.slab | own.untagged, "in the slab, in training only in adsorbates"),
            ("adsorbate", adsorbate, own.adsorbate | own.untagged,
             "in the adsorbate, in training only in slabs"),
        ):  # fmt: skip
            unknown = sorted(set(numbers.tolist()) - known)
            found |= {(aspect, _symbol(number)): text for number in unknown}
        sizes = {}
        if not self.atoms[0] <= count <= self.atoms[1]:
            sizes["atoms"] = f"atoms: {count}, trained on {_span(self.atoms)}"
        if len(untagged):
            sizes |= {} if self.untagged else {"tags": "no tags, which training had"}
        else:
            sizes |= _lacking(len(slab), self.slab_atoms, "slab (tags 0 and 1)")
            sizes |= _lacking(len(adsorbate), self.adsorbate_atoms, "adsorbate (tag 2)")
            sizes |= self._size_of_adsorbate(len(adsorbate))
        if _axes(record) not in self.periodic:
            kinds = " or ".join(map(_along, sorted(self.periodic)))
            sizes["periodic"] = f"{_along(_axes(record))}, trained on {kinds}"
        return found | {(aspect, ""): text for aspect, text in sizes.items()}

    def _size_of_adsorbate(self, count: int) -> dict[str, str]:
        known = self.adsorbate_atoms
        if count == 0 or (known is not None and known[0] <= count <= known[1]):
            return {}
        text = "" if known is None else f"adsorbate atoms: {count}, trained on {_span(known)}"
        return {"size of adsorbate": text}

    def describe(self) -> str:
        """In words: how many systems, of what, how large."""
        parts = [_named(numbers) for numbers in self.elements]
        of = [f"{parts[0]}" if parts[0] else "", f"with {parts[1]}" if parts[1] else ""]
        if parts[2]:
            of.append(f"and {parts[2]} without tags" if any(parts[:2]) else parts[2])
        sizes = f"{_span(self.atoms)} atoms"
        if self.adsorbate_atoms is not None and self.adsorbate_atoms[1]:
            sizes += f", {_span(self.adsorbate_atoms)} of them adsorbate"
        own = f"{self.systems:,} systems of {' '.join(filter(None, of))}; {sizes}"
        return "; from weights trained on ".join([own, *(one.describe() for one in self.initial)])

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
            **({"initial": [one.to_json() for one in self.initial]} if self.initial else {}),
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
        values = DomainReader(content, name)
        kind = values.take("kind")
        periodic = values.take("periodic")
        axes = ["", "x", "y", "z", "xy", "xz", "yz", "xyz"]
        if kind not in _KINDS:
            raise values.wrong("kind", f"one of {', '.join(_KINDS)}")
        if not isinstance(periodic, list) or not all(one in axes for one in periodic):
            raise values.wrong("periodic", "a list of axes, as xyz")
        return Domain(
            systems=values.count("systems"),
            elements=Elements(*values.elements(Elements._fields)),
            atoms=values.range("atoms") or (0, 0),
            adsorbate_atoms=values.range("adsorbate_atoms", optional=True),
            slab_atoms=values.range("slab_atoms", optional=True),
            untagged=values.count("untagged"),
            periodic=frozenset(periodic),
            relaxed=values.count("relaxed"),
            kind=next(one for one in _KINDS if one == kind),
            energy=values.energies(),
            initial=tuple(Domain.from_json(one, f"{name}: initial") for one in values.initial()),
        )


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


def _lacking(count: int, known: _Range | None, part: str) -> dict[str, str]:
    if count or (known is not None and known[0] == 0):
        return {}
    return {f"no {part}": "" if known is None else f"no {part}"}


def _named(numbers: frozenset[int]) -> str:
    return ", ".join(_symbol(number) for number in sorted(numbers))


def _symbol(number: int) -> str:
    from ase.data import chemical_symbols

    return str(chemical_symbols[number])


def _span(known: _Range) -> str:
    return f"{known[0]:,}" if known[0] == known[1] else f"{known[0]:,} to {known[1]:,}"
