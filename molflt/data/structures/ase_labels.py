"""Labels of ASE structures: which entry of a source is read as which label."""

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any, NamedTuple, Self

import numpy as np

from molflt.atoms import Atoms
from molflt.data.structures.base import Reading
from molflt.files import shown

# Label -> field of `Reading` with the name of its entry, and the names that are tried by default
_LABELS = {
    "y_relaxed": ("energy_key", ("y_relaxed", "energy")),
    "energy": ("energy_key", ("energy", "REF_energy")),
    "forces": ("forces_key", ("forces", "REF_forces")),
    "stress": ("stress_key", ("stress", "REF_stress")),
}
_KINDS = {  # patterns for the names of labels, by kind
    "energy": re.compile("energ|etot|^e([_-]|$)", re.IGNORECASE),
    "forces": re.compile("force|gradient|^f$", re.IGNORECASE),
    "stress": re.compile("stress|virial", re.IGNORECASE),
}
_ALSO_ENERGIES = re.compile("^y_|dft|pbe|beef", re.IGNORECASE)  # if --energy_key names them
_MOST_KEYS = 12  # maximum number of names in a message


class Entries(NamedTuple):
    """Named values of a structure."""

    info: Mapping[str, Any]  # includes the key-value pairs and data of a database row
    arrays: Mapping[str, Any]
    results: Mapping[str, Any]  # stored by a calculator

    @classmethod
    def of(cls, atoms: Atoms) -> Self:
        info = {name: value for name, value in atoms.info.items() if isinstance(name, str)}
        for inner in ("data", "key_value_pairs"):
            if isinstance(value := info.get(inner), Mapping):
                info |= {str(name): entry for name, entry in value.items()}
        return cls(info, atoms.arrays, getattr(atoms.calc, "results", None) or {})


class LabelReader:
    """Reads the labels of the structures of one source, and records the names of their entries.

    A label is read from one entry in the whole source, the first that occurs. Otherwise, energies
    of two levels of theory, or with two references, could be mixed.

    Attributes:
        quantity: name of the quantity in y_relaxed; "" for energies.
        used: names of the entries that are read, by label.
        names: names of all labels in the source.
    """

    def __init__(self, reading: Reading) -> None:
        key = reading.energy_key
        is_energy = not key or _kind(key) == "energy" or _ALSO_ENERGIES.search(key)
        self.quantity = "" if key is None or is_energy else key
        self.used: dict[str, str] = {}
        self.names: dict[str, None] = {}
        self._reading = reading
        self._others: dict[str, None] = {}  # names in structures without the energy in use
        self._numbers: dict[str, None] = {}  # names of other numbers, which may be energies

    def read(self, entries: Entries, volume: float) -> dict[str, Any]:
        """Returns the labels of a structure whose cell has this volume, in Å^3."""
        self._note_names(entries)
        labels = {label: self._value(label, entries) for label in _LABELS}
        name = self.used.get("stress", "").lower()
        if labels["stress"] is not None and "virial" in name and "stress" not in name:
            # the volume is 0 for molecules without a cell, which have no stress
            labels["stress"] = -np.asarray(labels["stress"]) / volume if volume else None
        labels["y_init"] = entries.info.get("y_init")
        labels["y_baseline"] = entries.info.get(self._reading.baseline_key or "y_baseline")
        relaxed = entries.arrays.get("pos_relaxed", entries.info.get("pos_relaxed"))
        if relaxed is not None:  # the energy refers to the relaxed positions
            del labels["energy"]
        if self._reading.for_prediction:
            names = ("y_init", "y_relaxed", "y_baseline")
            labels = {name: _if_finite(labels[name]) for name in names}
        return labels | {"pos_relaxed": relaxed}

    def _value(self, label: str, entries: Entries) -> Any:
        """Returns a label; None if the structure does not have the entry that is read as such."""
        option, defaults = _LABELS[label]
        key = getattr(self._reading, option)
        values = {**(entries.arrays if label == "forces" else entries.info), **entries.results}
        names = defaults if key is None else (key,)
        given = [name for name in names if _is_given(values.get(name), label)]
        if label == "y_relaxed":
            del given[1:]  # energy may be of another state
        if not given:
            return None
        used = self.used.setdefault(label, given[0])
        if label == "y_relaxed" and used not in given:
            self._others[given[0]] = None
        return values[used] if used in given else None

    def _note_names(self, entries: Entries) -> None:
        info, arrays, results = entries
        for name, value in info.items():
            if isinstance(value, Real) and not isinstance(value, Integral):
                self._numbers[name] = None
        named = [name for name in [*info, *arrays] if not isinstance(info.get(name), bool)]
        labels = (name for name in named if name == "y_relaxed" or _kind(name))
        names = dict.fromkeys([*results, *labels])
        if results.get("free_energy") == results.get("energy"):
            names.pop("free_energy", None)
        if "energy" in results:
            names.pop("energies", None)  # of the atoms
        self.names |= names

    def check(self, name: str) -> None:
        """Raises ValueError if no structure of file `name` has the entry that an option names."""
        for option in ("energy_key", "forces_key", "stress_key"):
            key = getattr(self._reading, option)
            if key is None or key in self.used.values():
                continue
            names = {*self._energies, *self._numbers} if option == "energy_key" else {*self.names}
            raise ValueError(
                f"{name}: no structure has the {option} {shown(key)}; expected one of "
                f"{_listed(sorted(names)) or 'no entries'}, or null for the default"
            )

    @property
    def fields(self) -> dict[str, str | None]:
        """Fields of records, keyed by the names of labels in the file; None for unread labels."""
        # if one entry is read as two labels, the label that was read first counts
        fields = {name: label for label, name in reversed(self.used.items())}
        read = {"y_init", self._reading.baseline_key}
        return {name: fields.get(name) for name in self.names if name not in read}

    @property
    def hint(self) -> str:
        """Advice about missing energies."""
        candidates = self._energies or list(self._numbers)
        used = self.used.get("y_relaxed")
        if self._others:
            return (
                f"the first structures have {used}, others only {_listed([*self._others])}; choose "
                "one with --energy_key (--data.energy_key when training)"
            )
        if used or not candidates:
            return ""
        key = shlex.quote(candidates[0])
        return (
            f"choose the energy with --energy_key {key} (--data.energy_key {key} when training); "
            f"the file has {_listed(candidates)}"
        )

    @property
    def _energies(self) -> list[str]:
        return [name for name in self.names if _kind(name) == "energy"]


def named_options(names: Iterable[str], kind: str) -> str:
    """Describes the options that select entries whose names suggest `kind`, such as "forces"."""
    keys = [_brief(name) for name in names if _kind(name) == kind]
    return "; ".join(
        f"forces are minus {key}; store them under another name"
        if "gradient" in key.lower()
        else f"--data.{kind}_key {shlex.quote(key)} reads {key}"
        for key in keys[:_MOST_KEYS]
    )


def _kind(name: str) -> str:
    """Returns the kind of label that a name suggests: "energy", "forces", "stress" or ""."""
    return next((kind for kind, names in _KINDS.items() if names.search(name)), "")


def _is_given(value: object, label: str) -> bool:
    """Returns True unless a label is absent, a bare word in a comment, or unknown (all NaN).

    For y_relaxed, NaN counts as given: it is an unknown energy, not a reason to read another entry.
    """
    if value is None or isinstance(value, bool):
        return False
    array = np.asarray(value)
    return label == "y_relaxed" or array.dtype.kind != "f" or not np.isnan(array).all()


def _if_finite(energy: object) -> object:
    unknown = isinstance(energy, float | np.floating) and not np.isfinite(energy)
    return None if unknown else energy


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_KEYS} more" if len(names) > _MOST_KEYS else ""
    return ", ".join(map(_brief, names[:_MOST_KEYS])) + more


def _brief(name: str) -> str:
    return shown(name, 40)[1:-1]  # without quotes
