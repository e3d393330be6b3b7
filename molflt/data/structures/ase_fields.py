"""Conversion of ASE structures to records: checks, constraints, charge, and unused fields."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from molflt.atoms import Atoms, Data
from molflt.data.structures.ase_labels import Entries, LabelReader
from molflt.data.structures.base import AS_IT_IS, AnyTags, Reading
from molflt.data.structures.records import make_record
from molflt.data.structures.tags import layers_as_tags, tags_look_like
from molflt.files import shown, warn

_NEAR_ONE = 1e-3  # tolerance of occupancies
_DENSEST = 1.0  # Å^3 per atom; metallic hydrogen at 500 GPa has 1.3
# Arrays that .traj files store
_IN_TRAJ = {
    "numbers", "positions", "tags", "momenta", "masses", "initial_magmoms", "initial_charges",
}  # fmt: skip
# Words in the names of entries that models do not use, unless a word of `_HARMLESS` also occurs
_NOT_READ = {
    "charge", "spin", "multiplicity", "magmom", "moment", "magnetization", "nelect", "field",
    "efield", "uhf", "nupdown", "unpaired", "mult", "fixed", "frozen", "selective", "ghost",
    "vacancy",
}  # fmt: skip
_NOT_READ |= {f"{word}s" for word in _NOT_READ}
_HARMLESS = {"nuclear", "born", "dipole", "quadrupole", "inertia", "force"}
# Entries that molflt predict writes
_PREDICTED = (
    "spread_eV", "uncertainty_eV", "by_adsorbate_eV", "outside", "molflt_index", "molflt_file",
    "molflt_shard",
)  # fmt: skip


class Converter:
    """Converts the structures of one source to records, and warns about what is not used."""

    def __init__(self, reading: Reading = AS_IT_IS) -> None:
        if reading.tags not in get_args(AnyTags):
            known = ", ".join(get_args(AnyTags))
            raise ValueError(f"tags={reading.tags!r} is unknown; expected one of {known}")
        self.reading = reading
        self.labels = LabelReader(reading)
        self._systems: list[int] = []  # hashes of elements and cell, equal within a relaxation
        self._other_tags = 0  # structures whose tags look like those of another convention
        self._ignored: Counter[str] = Counter()  # structures by kind of constraint
        self._unused: dict[str, None] = {}  # names of spins, moments and fields

    def record(self, atoms: Atoms | ValueError, number: int = 0) -> Data:
        """Converts a structure with the default sid `number`; if given an error, raises it."""
        if isinstance(atoms, ValueError):  # the file has a structure that cannot be read
            raise atoms
        check_fields(atoms)
        entries, convention = Entries.of(atoms), self.reading.tags
        is_number = text_sid(entries.info) is None
        labels = self.labels.read(entries, atoms.cell.volume)
        tags = layers_as_tags(atoms.get_tags()) if convention == "ase" else atoms.get_tags()
        fixed, ignored = constraints_of(atoms)
        try:
            record = make_record(
                pos=atoms.positions,
                atomic_numbers=atoms.numbers,
                cell=atoms.cell.array,
                pbc=atoms.pbc,
                tags=None if convention == "any" else tags,
                fixed=fixed,
                sid=entries.info.get("sid", number) if is_number else number,
                charge=charge_in(entries.info),
                **labels,
            )
        except ValueError as error:
            name = self.labels.used.get("y_relaxed", "y_relaxed")  # in the file
            raise ValueError(str(error).replace(": y_relaxed ", f": {name} ")) from None
        if convention == "any":  # not checked, but written to outputs
            record.tags = torch.as_tensor(tags, dtype=torch.long)
        self._systems.append(hash(atoms.numbers.tobytes() + atoms.cell.array.tobytes()))
        self._other_tags += convention != "any" and tags_look_like(atoms) not in (None, convention)
        self._ignored.update(ignored)
        self._unused |= dict.fromkeys(unused_fields(atoms))
        return record

    def warn(self, name: str) -> None:
        """Prints warnings about the structures; `name` is the name of their file."""
        for text in self._warnings():
            warn(f"{name}: {text}")

    def _warnings(self) -> Iterator[str]:
        reading, used, count = self.reading, self.labels.used, len(self._systems)
        if 2 * self._other_tags > count:
            text = (
                "look like the layer numbers of ase.build; to read them as such, set --tags ase "
                "(--data.tags ase when training, tags='ase' in Python)"
                if reading.tags == "oc20"
                else "were read as layer numbers, but look like OC20's (0 below 1, 2 above it)"
            )
            yield f"tags of {self._other_tags} of {count} structures {text}"
        steps = sum(a == b for a, b in pairwise(self._systems))
        of_steps = reading.energy_key is None and used.get("y_relaxed") == "energy"
        for_energies = reading.tags != "any" and not reading.for_prediction
        if of_steps and for_energies and "forces" in used and 2 * steps > count:
            yield (
                "frames with forces look like steps of relaxations or dynamics; set --recipe "
                "potential, or keep the first frame of each relaxation and set y_relaxed"
            )
        if self._ignored and not reading.keep_atoms:
            kinds = ", ".join(f"{kind} in {n}" for kind, n in sorted(self._ignored.items()))
            yield (
                f"constraints other than fixed atoms are ignored: {kinds} structures; the atoms "
                "are treated as free"
            )
        reads_stress = used.get("stress") == "stress" and not reading.for_prediction
        labels = {used.get("energy"), used.get("forces")}
        has_both = {"energy", "forces"} <= self.labels.names.keys()
        if reads_stress and has_both and not labels & {"energy", "free_energy", "forces", None}:
            yield (
                "stress belongs to energy and forces, which are not used; name the stress with "
                "--data.stress_key, or set --task.stress_weight 0"
            )
        if self._unused:
            yield unused_text(self._unused)


def check_fields(atoms: Atoms) -> None:
    """Rejects dummy atoms, partially occupied sites, and cells that are too small."""
    dummies = np.flatnonzero(atoms.numbers == 0)
    if len(dummies):
        raise ValueError(
            f"atom {dummies[0]} is 'X', a dummy atom or a vacancy; expected an element; remove it"
        )
    if partial := _partial_site(atoms):
        raise ValueError(
            f"{partial}; expected sites with one atom each; use an ordered structure, such as a "
            "supercell with one element on each site"
        )
    volume = atoms.cell.volume / max(1, len(atoms))
    if atoms.pbc.all() and 0 < volume < _DENSEST:
        raise ValueError(
            f"the cell has {volume:.2g} Å^3 per atom; expected at least {_DENSEST:g}; specify the "
            "cell in Å, or remove it if it is a placeholder"
        )


def _partial_site(atoms: Atoms) -> str:
    """Describes the first site with an occupancy other than 1, or returns ""."""
    of_sites = atoms.info.get("occupancy")
    if isinstance(of_sites, Mapping):  # from CIF: shares of elements, by site
        for site, shares in of_sites.items():
            if len(shares) > 1 or any(map(_is_partial, shares.values())):
                listed = ", ".join(f"{symbol} {share}" for symbol, share in shares.items())
                return f"site {site} has the occupancy {listed}"
    names = [name for name in ("occupancy", "occupancies", "occ") if name in atoms.arrays]
    of_atoms = atoms.arrays[names[0]] if names else np.zeros(0)
    partial = [atom for atom, share in enumerate(of_atoms) if _is_partial(share)]
    if partial and of_atoms.any():  # all 0 means unknown
        return f"atom {partial[0]} has the occupancy {of_atoms[partial[0]]}"
    return ""


def _is_partial(share: object) -> bool:
    try:
        return abs(float(share) - 1) > _NEAR_ONE  # type: ignore[arg-type]
    except (TypeError, ValueError):  # "?" and "." in a CIF file mean unknown
        return False


def fixed_atoms(atoms: Atoms) -> NDArray[np.bool_]:
    """Returns a mask (N,) of atoms that are fixed in all three directions."""
    return constraints_of(atoms)[0]


def constraints_of(atoms: Atoms) -> tuple[NDArray[np.bool_], set[str]]:
    """Returns the mask of `fixed_atoms`, and the kinds of constraints that it does not describe."""
    from ase.constraints import FixAtoms, FixCartesian, FixScaled

    fixed, others = np.zeros((len(atoms), 3), dtype=bool), set()
    for constraint in atoms.constraints:
        mask = np.asarray(getattr(constraint, "mask", True))
        oblique = isinstance(constraint, FixScaled) and mask.any() and not mask.all()
        if oblique or not isinstance(constraint, FixAtoms | FixCartesian | FixScaled):
            others.add(type(constraint).__name__)
            continue
        try:
            fixed[np.asarray(constraint.index)] |= mask
        except IndexError as error:
            raise ValueError(
                f"a constraint fixes an atom that does not exist ({error}); expected atoms 0 to "
                f"{len(atoms) - 1}; correct the constraint"
            ) from None
    if (fixed.any(axis=1) & ~fixed.all(axis=1)).any():
        others.add("FixCartesian")
    return np.logical_and.reduce(fixed, axis=1), others


def text_sid(entries: Mapping[str, Any] | Data) -> str | None:
    """Returns the sid among named values if it is text, such as "007"; None for "7" and numbers."""
    sid = entries.get("sid")
    number = r"0|-?[1-9][0-9]{0,17}"  # in the only form that a 64-bit integer keeps
    return sid if isinstance(sid, str) and not re.fullmatch(number, sid) else None


def total_charge(atoms: Atoms) -> float | None:
    """Returns the total charge, in units of e, from ``info`` or a database row; None if unknown."""
    return charge_in(Entries.of(atoms).info)


def charge_in(entries: Mapping[str, Any]) -> float | None:
    """Returns the total charge, in units of e, among named values; None if unknown.

    The entry is called charge, total_charge or net_charge, in upper or lower case. Raises
    ValueError for a multiplicity other than 1; 0 means unknown.
    """
    charges: dict[str, float] = {}
    for name, value in entries.items():
        is_multiplicity = "multiplicity" in _words(name)
        if not (is_multiplicity or _is_total(name, value)):
            continue
        number = _number(name, value)
        if np.isnan(number):
            continue
        if not is_multiplicity:
            charges[name] = number
        elif number not in (0, 1):
            raise ValueError(
                f"{name} must be 1, because models do not use it; got {number:g}; remove the "
                "structure or the entry"
            )
    if len(set(charges.values())) > 1:
        got = ", ".join(f"{name}={number:g}" for name, number in charges.items())
        raise ValueError(f"expected one total charge; got {got}; remove one")
    return next(iter(charges.values()), None)


def _number(name: str, value: Any) -> float:
    value = value.tolist() if isinstance(value, torch.Tensor) else value
    if isinstance(value, bool):
        raise ValueError(f"{name} must be one number; got a word without a value; write {name}=0")
    try:
        return float(np.asarray(value, dtype=np.float64).item())
    except (TypeError, ValueError):
        raise ValueError(f"{name} must be one number; got {shown(value, 40)}") from None


def _is_total(name: str, value: Any) -> bool:
    """Returns True if an entry is one number called charge, total_charge or net_charge."""
    words = _words(name)
    size = value.numel() if isinstance(value, torch.Tensor) else np.size(value)
    is_charge = "charge" in words and words <= {"charge", "total", "net"}
    return is_charge and value is not None and size == 1


def unused_fields(atoms: Atoms) -> list[str]:
    """Returns the names of charges, spins, magnetic moments and fields that are not used.

    Zeros, a spin or multiplicity of 1, and the total charge are omitted.
    """
    entries = Entries.of(atoms)
    info = {name: value for name, value in entries.info.items() if not _is_total(name, value)}
    for name in info.keys() - {"data", "key_value_pairs"}:
        if isinstance(inner := info[name], Mapping):
            info |= {f"{name}.{key}": value for key, value in inner.items()}
    return [
        name
        for name, value in {**entries.results, **entries.arrays, **info}.items()
        if _words(name) & _NOT_READ and not _words(name) & _HARMLESS and _matters(name, value)
    ]


def _matters(name: str, value: object) -> bool:
    """Returns True unless a value is unknown, zero, or a spin or multiplicity of one."""
    try:
        numbers = np.nan_to_num(np.asarray(value, dtype=np.float64))
    except (TypeError, ValueError):
        return value is not None
    neutral = (
        (0, 1) if numbers.size == 1 and _words(name) & {"spin", "multiplicity", "mult"} else (0,)
    )
    return not bool(np.isin(numbers, neutral).all())


@lru_cache  # called for each entry of each record
def _words(name: str) -> set[str]:
    """Splits "initial_charges", "totalCharge" or "Electric field" into words in lower case."""
    apart = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name)
    return set(re.split(r"[^a-z]+", apart.lower()))


def unused_text(names: Iterable[str]) -> str:
    """Describes the unused fields of a structure or file."""
    return f"{', '.join(names)} not used; predictions do not depend on it"


def drop_labels_(atoms: Atoms, moved: bool = False) -> None:
    """Removes labels and fields of earlier predictions; if `moved`, also references and virials."""
    names = ["energy", "free_energy", "forces", "stress"]
    if moved:
        names += ["virial", "virials"]
        names += [f"REF_{name}" for name in names]
    for name in names:
        atoms.arrays.pop(name, None)
    dropped = {*names, *_PREDICTED}
    for inner in ("data", "key_value_pairs"):  # of a database
        if isinstance(value := atoms.info.get(inner), Mapping):
            atoms.info[inner] = {name: value[name] for name in value if name not in dropped}
    for name in dropped:
        atoms.info.pop(name, None)


def warn_of_lost(out: Path, frames: Iterable[Atoms]) -> None:
    """Warns about constraints or arrays that `out`, an .extxyz or .traj file, cannot store."""
    lost, other = set[str](), ".extxyz" if out.suffix == ".traj" else ".traj"
    for atoms in frames:
        if out.suffix == ".traj":
            lost |= {f"array {name}" for name in atoms.arrays.keys() - _IN_TRAJ}
        else:
            kinds = {type(constraint).__name__ for constraint in atoms.constraints}
            lost |= kinds - {"FixAtoms", "FixCartesian"}
    for kind in sorted(lost):
        warn(f"{out}: {out.suffix} cannot store {kind}; write {other} to keep it")
