"""Domain of a training set; energies of structures outside are extrapolations or meaningless."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from molflt.atoms import MAX_ATOMIC_NUMBER, Data, Tag, symbol
from molflt.data.structures.base import Structures, with_bar
from molflt.data.structures.geometry import adsorbates, touches_image
from molflt.data.structures.labels import energy_kind
from molflt.data.structures.tags import guess_tags, heights_agree, open_axes, sides_agree
from molflt.files import read_json, shown

DOMAIN = "domain.json"
"""name of the file in the folder of a run"""

_ONLY_INITIAL = " (seen only by the initial weights)"
_FAR = 0.1  # tolerated distance beyond the range of labels, in units of the range
_ROUNDED = 0.02  # tolerance of the share of surface atoms
_RANGES = ("atoms", "adsorbate_atoms", "slab_atoms", "energy", "surface")
_JSON_KEYS = {"energy": "energy_eV", "surface": "surface_share"}
_Range = tuple[int, int]
_Aspect = tuple[str, str]  # name, and the element or ""


def read_domain(path: Path) -> object:
    """Reads the domain.json of a run, for `Domain.from_json`; None if the file is missing."""
    return read_json(path, "JSON", "restore the file that training wrote", missing_ok=True)


class Elements(NamedTuple):
    """Atomic numbers of slabs (tags 0 and 1), adsorbates (tag 2), and structures without tags."""

    slab: frozenset[int]
    adsorbate: frozenset[int]
    untagged: frozenset[int]

    @property
    def all(self) -> frozenset[int]:
        return self.slab | self.adsorbate | self.untagged


@dataclass(frozen=True)
class Domain:
    """Summary of a training set.

    Attributes:
        systems: number of systems.
        elements: atomic numbers, separately for each part of the structure.
        atoms: smallest and largest number of atoms in a structure.
        adsorbate_atoms: smallest and largest number of atoms of an adsorbate, connected atoms with
            tag 2, in structures with tags; None if no structure has tags.
        slab_atoms: smallest and largest number of atoms with tags 0 and 1 in these structures.
        untagged: number of structures without tags.
        periodic: kinds of periodic boundaries, such as "xyz" or "xy"; "" if no axis is periodic.
        relaxed: number of structures with relaxed positions.
        kind: kind of energies, see `molflt.data.structures.labels.energy_kind`, or the name of
            another quantity.
        energy: smallest and largest relaxed energy, in eV; None without labels.
        surface: smallest and largest share of tag 1 in a slab; None without tags, and
            for files from version 0.1.
        baseline: calculator and options of the baseline energies that the model adds, if known.
        initial: domains of the initial weights, of their initial weights, and so on; empty for
            random initial weights. `kind` and `energy` refer to the most recent data.
        zero: flags for clean slabs and for molecules without a slab, True if their energy is 0 by
            definition. If the first flag is set, the number of atoms is not compared. domain.json
            does not contain the flags.
    """

    systems: int
    elements: Elements
    atoms: _Range
    adsorbate_atoms: _Range | None
    slab_atoms: _Range | None
    untagged: int
    periodic: frozenset[str]
    relaxed: int
    kind: str
    energy: tuple[float, float] | None
    surface: tuple[float, float] | None = None
    baseline: str | None = None
    initial: tuple[Domain, ...] = ()
    zero: tuple[bool, bool] = field(default=(False, False), compare=False)

    @staticmethod
    def of(dataset: Structures, look: Callable[[Data], object] = lambda record: None) -> Domain:
        """Determines the domain of a nonempty data set in one pass; calls `look` on each record."""
        present = np.zeros((3, MAX_ATOMIC_NUMBER + 1), dtype=bool)  # rows as in `Elements`
        slab, adsorbate, surface, periodic = [], [], [], set()
        relaxed = 0
        for record in with_bar(dataset, "reading structures"):
            parts = _parts(record)
            slab_numbers, _, untagged = parts
            for row, numbers in zip(present, parts, strict=True):
                row[numbers] = True
            if not len(untagged):
                slab.append(len(slab_numbers))
                adsorbate += _adsorbate_sizes(record)
            if len(slab_numbers):
                surface.append(_surface_share(record))
            periodic.add(_axes(record.pbc[0]))
            relaxed += not bool(torch.isnan(record.pos_relaxed).any())
            look(record)
        natoms, energies = dataset.natoms, dataset.y_relaxed
        known = energies[np.isfinite(energies)]
        return Domain(
            systems=len(dataset),
            elements=Elements(*(frozenset(np.flatnonzero(row).tolist()) for row in present)),
            atoms=(int(natoms.min()), int(natoms.max())),
            adsorbate_atoms=(min(adsorbate), max(adsorbate)) if adsorbate else None,
            slab_atoms=(min(slab), max(slab)) if slab else None,
            untagged=len(dataset) - len(slab),
            periodic=frozenset(periodic),
            relaxed=relaxed,
            kind=dataset.quantity or energy_kind(energies, natoms),
            energy=(float(known.min()), float(known.max())) if len(known) else None,
            surface=(min(surface), max(surface)) if surface else None,
        )

    def without_tags(self) -> Domain:
        """Returns the domain for a potential, whose tags and ranges of energies do not matter."""
        untagged = Elements(frozenset(), frozenset(), self.elements.all)
        return replace(
            self,
            elements=untagged,
            adsorbate_atoms=None,
            slab_atoms=None,
            surface=None,
            untagged=self.systems,
            kind="unknown",
            energy=None,
            initial=tuple(domain.without_tags() for domain in self.initial),
        )

    def after(self, initial: Domain) -> Domain:
        """Returns the domain of a run whose initial weights have the domain `initial`."""
        return replace(self, initial=(replace(initial, initial=()), *initial.initial))

    def refusal(self, record: Data) -> str:
        """Returns the reason why a model trained with tags cannot predict a structure, or ""."""
        if self.adsorbate_atoms is None or self.slab_atoms is None or self.untagged:
            return ""
        slab, adsorbate, untagged = _parts(record)
        if len(untagged):
            return "no tags, unlike the training data"
        slabs_are_zero, molecules_are_zero = self.zero
        if (not len(adsorbate) and slabs_are_zero) or (not len(slab) and molecules_are_zero):
            guess = guess_tags(record)
            what = "no slab (tags 0 and 1)" if len(adsorbate) else "no adsorbate (tag 2)"
            return f"{what}, but the geometry has {guess.text}" if guess.tags.any() else ""
        if not len(adsorbate) and self.adsorbate_atoms[0]:
            return "no adsorbate (tag 2), unlike the training data"
        if not len(slab) and self.slab_atoms[0]:
            return "no slab (tags 0 and 1), unlike the training data"
        exchanged = any(aspect in ("slab", "adsorbate") for aspect, _ in self._beyond(record))
        if exchanged or not heights_agree(record):
            guess = guess_tags(record)
            guessed = torch.from_numpy(guess.tags == Tag.ADSORBATE)
            if bool(guessed.any()) and not bool((guessed & (record.tags == Tag.ADSORBATE)).any()):
                return f"tags that contradict the geometry, which has {guess.text}"
        if molecules_are_zero and not sides_agree(record):  # its energy would be 0
            return "an adsorbate on a side of the slab without surface atoms (tag 1)"
        return ""

    def new_elements(self, record: Data) -> str:
        """Returns the elements of a structure that do not occur in training, such as "Cu-Pd"."""
        new = set(record.atomic_numbers.tolist()) - self.elements.all
        return "-".join(sorted(map(symbol, new)))

    def beyond_labels(self, energy: float) -> str:
        """Returns a description of an energy, in eV, that is far outside the training range, or "".

        Total energies are not compared, because they grow with the size of the structure.
        """
        if self.energy is None or self.kind == "total":
            return ""
        low, high = self.energy
        margin = _FAR * (high - low)
        if low - margin <= energy <= high + margin:
            return ""
        return f"energy: {energy:.2f} eV, trained on {low:.2f} to {high:.2f}"

    def outside(self, record: Data) -> list[str]:
        """Returns descriptions of the ways in which a structure differs from the training data.

        Properties that occur only in the data of the initial weights are marked, because the
        model may be less accurate for them.
        """
        differences = self._beyond(record)
        earlier = [domain._beyond(record) for domain in self.initial]
        names: dict[str, list[str]] = {}  # names of elements by text
        for (aspect, name), text in differences.items():
            is_described = aspect != "element" and ("element", name) in differences
            if not text or is_described:
                continue
            if any((aspect, name) not in other for other in earlier):
                text += _ONLY_INITIAL
            names.setdefault(text, []).append(name)
        reasons = [f"{', '.join(elements)} {text}".strip() for text, elements in names.items()]
        if touches_image(record):
            reasons.append("adsorbate bonded to its periodic image")
        return reasons

    def _beyond(self, record: Data) -> dict[_Aspect, str]:
        """Describes each way in which a structure differs from these data; "" if unknown."""
        slab, adsorbate, untagged = _parts(record)
        known, count = self.elements, len(record.atomic_numbers)
        differences: dict[_Aspect, str] = {}
        for aspect, numbers, trained, text in (
            ("element", record.atomic_numbers, known.all, "not in training"),
            ("slab", slab, known.slab | known.untagged,
             "in the slab, in training only in adsorbates"),
            ("adsorbate", adsorbate, known.adsorbate | known.untagged,
             "in the adsorbate, in training only in slabs"),
        ):  # fmt: skip
            new = sorted(set(numbers.tolist()) - trained)
            differences |= {(aspect, symbol(number)): text for number in new}
        sizes = {}
        slabs_are_zero, _ = self.zero
        if not slabs_are_zero and not self.atoms[0] <= count <= self.atoms[1]:
            sizes["atoms"] = f"atoms: {count}, trained on {_span(self.atoms)}"
        if len(untagged) and not self.untagged:
            sizes["tags"] = "no tags, unlike the training data"
        elif not len(untagged):
            sizes |= self._beyond_parts(record, len(slab), len(adsorbate))
        if not self._has_axes(record):
            kinds = " or ".join(map(_along, sorted(self.periodic)))
            sizes["periodic"] = f"{_along(_axes(record.pbc[0]))}, trained on {kinds}"
        return differences | {(aspect, ""): text for aspect, text in sizes.items()}

    def _has_axes(self, record: Data) -> bool:
        """Returns True if the periodic axes occur in training, except along the vacuum of a slab.

        Adsorption energies hardly depend on images beyond the vacuum.
        """
        pbc = record.pbc[0].clone()
        if _axes(pbc) in self.periodic or self.adsorbate_atoms is None:
            return _axes(pbc) in self.periodic
        axes = open_axes(record)
        pbc[axes] ^= True
        return len(axes) == 1 and _axes(pbc) in self.periodic

    def _beyond_parts(self, record: Data, slab: int, adsorbate: int) -> dict[str, str]:
        """Describes unusual numbers of `slab` and `adsorbate` atoms and shares of the surface."""
        sizes = {}
        slabs_are_zero, molecules_are_zero = self.zero
        for part, count, known, is_zero in (
            ("no slab (tags 0 and 1)", slab, self.slab_atoms, molecules_are_zero),
            ("no adsorbate (tag 2)", adsorbate, self.adsorbate_atoms, slabs_are_zero),
        ):
            if count == 0 and not is_zero and (known is None or known[0] > 0):
                sizes[part] = "" if known is None else part
        known = self.adsorbate_atoms
        if known:
            present = dict.fromkeys(_adsorbate_sizes(record))
            beyond = [f"{n}" for n in present if n and not known[0] <= n <= known[1]]
            if beyond:
                text = f"adsorbate atoms: {', '.join(beyond)}, trained on {_span(known)}"
                sizes["size of adsorbate"] = text
        elif adsorbate:
            sizes["size of adsorbate"] = ""
        if slab and adsorbate and self.surface is not None:
            share, (low, high) = _surface_share(record), self.surface
            if not low - _ROUNDED <= share <= high + _ROUNDED:
                span = " to ".join(dict.fromkeys(f"{bound:.2f}" for bound in (low, high)))
                text = f"share of surface (tag 1) in the slab: {share:.2f}, trained on {span}"
                sizes["surface"] = text
        return sizes

    def describe(self) -> str:
        """Summarizes the number, elements and sizes of the systems."""
        symbols = (", ".join(map(symbol, sorted(numbers))) for numbers in self.elements)
        slab, adsorbate, untagged = symbols
        elements = f"{slab} with {adsorbate}".strip() if adsorbate else slab
        if untagged:
            elements = f"{elements} and {untagged} without tags" if elements else untagged
        sizes = f"{_span(self.atoms)} atoms"
        if self.adsorbate_atoms is not None and self.adsorbate_atoms[1]:
            sizes += f", {_span(self.adsorbate_atoms)} per adsorbate"
        text = f"{self.systems:,} systems of {elements}; {sizes}"
        initial = [domain.describe() for domain in self.initial]
        return "; from weights trained on ".join([text, *initial])

    def to_json(self) -> dict[str, object]:
        """Returns the domain as plain numbers, strings and lists."""
        content: dict[str, Any] = {}
        for name in _STORED:
            value = getattr(self, name)
            content[_JSON_KEYS.get(name, name)] = list(value) if isinstance(value, tuple) else value
        parts = self.elements._asdict().items()
        content["elements"] = {part: [*map(symbol, sorted(numbers))] for part, numbers in parts}
        content["periodic"] = sorted(self.periodic)
        if self.initial:
            content["initial"] = [domain.to_json() for domain in self.initial]
        return content

    def to_bytes(self) -> bytes:
        """Returns the content of domain.json."""
        return (json.dumps(self.to_json(), indent=1) + "\n").encode()

    @staticmethod
    def from_json(content: object, name: str) -> Domain:
        """Reads the result of :meth:`to_json`; `name` is the file name in messages."""
        from ase.data import atomic_numbers

        stored: Any = content
        try:
            values = {key: stored.get(_JSON_KEYS.get(key, key)) for key in _STORED}
            symbols = [values["elements"][part] for part in Elements._fields]
            numbers = [frozenset(atomic_numbers[text] for text in part) for part in symbols]
            values["elements"] = Elements(*numbers)
            values["periodic"] = frozenset(values["periodic"])
            for key in _RANGES:
                values[key] = values[key] and tuple(values[key])
            initial = stored.get("initial") or ()
            values["initial"] = tuple(Domain.from_json(x, f"{name}: initial") for x in initial)
            return Domain(**values)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(
                f"{name}: expected the domain of a training run; {type(error).__name__}: "
                f"{shown(str(error))}; restore the file that training wrote"
            ) from None


_STORED = [entry.name for entry in fields(Domain) if entry.name not in ("initial", "zero")]


def domain_of(runs: Iterable[Path]) -> Domain | None:
    """Returns the first run's domain, limited to common elements, with the baselines of all runs.

    Runs from earlier versions, without domain.json, are ignored; None if no run has this file.
    """
    files = {str(file): read_domain(file) for run in runs if (file := run / DOMAIN).is_file()}
    domains = [Domain.from_json(content, file) for file, content in files.items()]
    if not domains:
        return None
    shared = frozenset.intersection(*(domain.elements.all for domain in domains))
    elements = Elements(*(part & shared for part in domains[0].elements))
    baselines = dict.fromkeys(domain.baseline for domain in domains if domain.baseline)
    return replace(domains[0], elements=elements, baseline="; ".join(baselines) or None)


def _parts(record: Data) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the atomic numbers of slab and adsorbate, and of all atoms if they are untagged."""
    numbers, tags = record.atomic_numbers, record.tags
    none = numbers[:0]
    if not bool((tags > Tag.SUBSURFACE).any()):
        return none, none, numbers
    return numbers[tags != Tag.ADSORBATE], numbers[tags == Tag.ADSORBATE], none


def _adsorbate_sizes(record: Data) -> list[int]:
    """Returns the number of atoms of each adsorbate; [0] for a clean slab."""
    labels = adsorbates(record)
    return np.bincount(labels[labels >= 0], minlength=1).tolist()


def _surface_share(record: Data) -> float:
    slab = record.tags[record.tags != Tag.ADSORBATE]
    return float((slab == Tag.SURFACE).float().mean())


def _axes(pbc: Tensor) -> str:
    return "".join(axis for axis, on in zip("xyz", pbc.tolist(), strict=True) if on)


def _along(axes: str) -> str:
    return f"periodic along {', '.join(axes)}" if axes else "not periodic"


def _span(bounds: _Range) -> str:
    return " to ".join(f"{bound:,}" for bound in dict.fromkeys(bounds))
