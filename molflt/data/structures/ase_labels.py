"""Labels and tags of an ASE structure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from numbers import Real
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from molflt.atoms import Tag
from molflt.data.structures.base import AnyTags, Reading, Tags
from molflt.files import shown

if TYPE_CHECKING:
    from ase import Atoms

__all__ = ["Labels", "entries", "layers_as_tags", "named_options", "tags_look_like"]

# Names of labels, by the option that reads them
_KINDS = {
    "energy": re.compile("energ|etot|^e([_-]|$)", re.IGNORECASE),
    "gradient": re.compile("grad", re.IGNORECASE),
    "forces": re.compile("force|^f$", re.IGNORECASE),
    "stress": re.compile("stress|virial", re.IGNORECASE),
}
_SETTING = re.compile("cut|tol|calc", re.IGNORECASE)  # settings, such as cut_off_energy
_MOST_KEYS = 12  # maximum number listed in a message


class Labels:
    """Records the labels in the structures of a file.

    The first structure that has a label determines its name for the whole file. Otherwise, energies
    of two levels of theory, or with two references, would be mixed.

    Args:
        reading: names of the entries that are labels.
    """

    def __init__(self, reading: Reading) -> None:
        if reading.tags not in get_args(AnyTags):
            known = ", ".join(get_args(AnyTags))
            raise ValueError(f"tags={reading.tags!r} is unknown; expected one of {known}")
        self.key = reading.energy_key
        self._derivatives = {"forces": reading.forces_key, "stress": reading.stress_key}
        self._used: dict[str, None] = {}  # in the order of their appearance
        self._others: dict[str, None] = {}  # found where the one in use is missing
        self._at_pos: dict[str, None] = {}
        self._chosen: dict[str, str] = {}  # by label
        self._there: dict[str, None] = {}
        self.fields: dict[str, str] = {}  # charge, spin, moments and fields, which are not read
        self._numbers: dict[str, None] = {}
        self.named = "y_relaxed"  # name of the entry of the last energy

    def energy(self, atoms: Atoms) -> object:
        """Returns the entry with the energy of a structure, eV, or None.

        The default is ``info["y_relaxed"]``, else the stored calculator's energy, else
        ``info["energy"]``.
        """
        info, results = entries(atoms), _results(atoms)
        self._numbers |= dict.fromkeys(name for name, value in info.items() if _is_number(value))
        named = (name for name in [*info, *atoms.arrays] if _kind(name))
        there = [*results, *(name for name in named if not _SETTING.search(name))]
        if results.get("free_energy") == results.get("energy"):
            there = [name for name in there if name != "free_energy"]
        if "energy" in results:
            there = [name for name in there if name != "energies"]  # energies of single atoms
        self._there |= dict.fromkeys(there)
        if self.key is not None:
            places: list[tuple[str, Mapping[str, object]]] = [(self.key, info), (self.key, results)]
        else:
            places = [("y_relaxed", info), ("energy", results), ("energy", info)]
        for name, place in places:
            if place.get(name) is not None and (not self._used or name in self._used):
                self._used[name] = None
                self.named = name
                return place[name]
        self._others |= {name: None for name, place in places if place.get(name) is not None}
        return None

    def at_pos(self, atoms: Atoms) -> dict[str, Any]:
        """Returns the available energy, forces and stress of a structure at its positions.

        The defaults are the results of a calculator, else ``energy``, ``forces`` and ``stress``,
        else the same with the prefix ``REF_``, as in data for MACE.
        """
        info, results = entries(atoms), _results(atoms)
        wanted: dict[str, tuple[str | None, Mapping[str, Any]]] = {"energy": (self.key, info)}
        wanted |= {name: (key, info) for name, key in self._derivatives.items()}
        wanted["forces"] = (self._derivatives["forces"], atoms.arrays)
        found: dict[str, Any] = {}
        for label, (key, store) in wanted.items():
            stored = {**store, **results}
            names = (key,) if key is not None else (label, f"REF_{label}")
            name = next((n for n in names if stored.get(n) is not None), None)
            if name is None or _all_nan(stored[name]):
                continue
            if self._chosen.setdefault(label, name) == name:
                self._at_pos[name] = None
                found[label] = stored[name]
                if label == "stress" and "virial" in name.lower() and "stress" not in name.lower():
                    found[label] = -np.asarray(stored[name]) / (atoms.cell.volume or np.nan)
        return found

    def check(self) -> None:
        """Raises ValueError if a named entry is missing from all structures."""
        if self.key is not None and not self._used:
            raise ValueError(
                f"no structure has the energy_key {shown(self.key)}; expected an entry of info or "
                f"of the results of a calculator; there are {_listed(self._candidates()) or 'none'}"
                "; null takes y_relaxed, else energy"
            )
        for label, key in self._derivatives.items():
            if key is not None and key not in self._at_pos:
                there = _listed(list(self._there)) or "none"
                raise ValueError(
                    f"no structure has the {label}_key {shown(key)}; there are {there}"
                )

    @property
    def unused(self) -> list[str]:
        """Names of existing labels that are not read."""
        read = {"y_init", *self._used, *self._at_pos}
        return [name for name in self._there if name not in read]

    @property
    def for_potentials(self) -> list[str]:
        """Names of labels that only potentials read."""
        return [name for name in self._there if name in self._at_pos and name not in self._used]

    @property
    def of_steps(self) -> bool:
        """True if energies belong to the given positions, as forces do."""
        return self.key is None and list(self._used) == ["energy"] and "forces" in self._chosen

    @property
    def hint(self) -> str:
        """Returns a hint about missing energies."""
        candidates = self._energies() or self._candidates()
        if self._used and self._others:
            return (
                f"the first structures have {_listed(list(self._used))}, others only "
                f"{_listed(list(self._others))}; name the one to take with --energy_key, in "
                "training --data.energy_key"
            )
        if self._used or not candidates:
            return ""
        return (
            f"name the energy with --energy_key {candidates[0]}, in training --data.energy_key "
            f"{candidates[0]}; there are {_listed(candidates)}"
        )

    def _candidates(self) -> list[str]:
        return list(dict.fromkeys([*self._energies(), *self._numbers]))

    def _energies(self) -> list[str]:
        return [name for name in self._there if _kind(name) == "energy"]


def named_options(names: Iterable[str], *kinds: str) -> str:
    """Names the options that read labels of these names; "" if no name looks like a label.

    Args:
        names: names of entries that are not read.
        kinds: one or more of energy, forces and stress; all three by default.
    """
    found = []
    for name in names:
        kind, key = _kind(name), shown(name, 40)[1:-1]
        if kind == "gradient" and (not kinds or "forces" in kinds):
            found.append(f"{key} looks like a gradient; forces are minus it, convert the file")
        elif kind and (not kinds or kind in kinds):
            found.append(f"--data.{kind}_key {key} reads {key}")
    return "; ".join(found[:_MOST_KEYS])


def entries(atoms: Atoms) -> dict[str, Any]:
    """Returns the entries of `info`, including the key-value pairs and data of a database."""
    info = {name: value for name, value in atoms.info.items() if isinstance(name, str)}
    for inner in ("data", "key_value_pairs"):
        value = info.get(inner)
        if isinstance(value, Mapping):
            info |= {str(name): each for name, each in value.items()}
    return info


def _kind(name: str) -> str:
    """Returns the label that a name looks like: energy, gradient, forces, stress or ""."""
    return next((kind for kind, names in _KINDS.items() if names.search(name)), "")


def _results(atoms: Atoms) -> dict[str, Any]:
    """Returns the stored results of the calculator, or an empty dict."""
    return getattr(atoms.calc, "results", None) or {}


def _all_nan(value: ArrayLike) -> bool:
    array = np.asarray(value)
    return array.dtype.kind == "f" and bool(np.isnan(array).all())


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool | np.bool_ | int | np.integer)


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _MOST_KEYS} more" if len(names) > _MOST_KEYS else ""
    return ", ".join(shown(name, 40)[1:-1] for name in names[:_MOST_KEYS]) + more


def layers_as_tags(layers: NDArray[np.int64]) -> NDArray[np.int64]:
    """Converts ASE's layer numbers to tags, (N,) -> (N,).

    ``ase.build`` numbers layers downward from the top layer, 1, and uses 0 for adsorbates. Without
    layers, all tags are 0, which means unknown. Negative numbers are kept and refused later.
    """
    if not (layers > 0).any():
        return layers
    known = [layers == 0, layers == 1, layers > 1]
    return np.select(known, [Tag.ADSORBATE, Tag.SURFACE, Tag.SUBSURFACE], layers)


def tags_look_like(atoms: Atoms) -> Tags | None:
    """Guesses the convention of tags from the heights of atoms; None if undecided."""
    tags, cell = atoms.get_tags(), atoms.cell.array
    normal = np.cross(cell[0], cell[1])
    normal = normal * np.sign(normal @ cell[2]) if (normal @ cell[2]) else np.array([0.0, 0, 1])
    heights = atoms.positions @ normal
    first, second, third = (heights[tags == tag] for tag in (0, 1, 2))
    if not second.size or not (first.size or third.size):
        return None
    # Adsorbates lie above the layer with tag 1; their tag is 0 in ASE and 2 here.
    middle = second.mean()
    if bool((first > middle).all() and (third < middle).all()):
        return "ase"
    return "oc20" if bool((first < middle).all() and (third > middle).all()) else None
