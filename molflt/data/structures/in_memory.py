"""Source of structures in memory, from ASE or PyG."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, TypeGuard, cast

import numpy as np
import torch

from molflt.data.structures.ase_fields import unused_fields, unused_warning
from molflt.data.structures.ase_files import _record_from_atoms, say_tags, text_sid
from molflt.data.structures.ase_labels import tags_look_like
from molflt.data.structures.base import AS_IT_IS, Held, Reading
from molflt.data.structures.records import make_record

if TYPE_CHECKING:
    from ase import Atoms
    from torch import Tensor
    from torch_geometric.data import Data

__all__ = ["StructuresInMemory", "is_one"]

_EXPECTED = "expected ase.Atoms, PyG's Data or Batch, a list of them, or a data set of Data"


class StructuresInMemory(Held):
    """List of structures to predict, with the same checks as for files.

    Args:
        given: `ase.Atoms` (see `molflt.data.structures.ase_files.AseStructures`), `Data` or `Batch`
            of PyG with pos, atomic_numbers (or z) and optional cell, pbc, tags, fixed, sid, charge
            and y_relaxed; or a sequence of these.
        reading: convention of the tags of `Atoms`.
    """

    def __init__(self, given: object, reading: Reading = AS_IT_IS) -> None:
        super().__init__("structures")
        self.reading = reading._replace(for_prediction=True)
        self.given = list(_flat(given))
        if not self.given:
            raise ValueError(f"{self.path}: none given; {_EXPECTED}")
        fields: dict[str, str] = {}
        for index, one in enumerate(self.given):
            self._hold(self._record(index, one))
            fields |= unused_fields(one) if _is_atoms(one) else {}
        if fields:
            warning = unused_warning(str(self.path), fields)
            print(f"molflt: warning: {warning}", file=sys.stderr)
        if reading.tags != "any":
            own = [tags_look_like(one) for one in self.given if _is_atoms(one)]
            others = sum(one not in (None, reading.tags) for one in own)
            say_tags(str(self.path), others, len(own), reading.tags)

    def _record(self, index: int, one: object) -> Data:
        try:
            if _is_atoms(one):
                if (name := text_sid(one)) is not None:
                    self.names[index] = name
                return _record_from_atoms(one, index, self.reading)
            if _is_data(one):
                return _record_from_data(one, index)
        except ValueError as error:
            raise ValueError(f"{self.where(index)}: {error}") from None
        raise TypeError(f"{self.where(index)}: {_EXPECTED}; got {type(one).__name__}")

    def to_atoms(self, index: int) -> Atoms:
        own = self.given[index]
        return own.copy() if _is_atoms(own) else super().to_atoms(index)


def is_one(given: object) -> bool:
    """Returns True for a single structure, not a list or a batch."""
    return _is_atoms(given) or (_is_data(given) and not hasattr(given, "to_data_list"))


def _flat(given: object) -> Iterable[object]:
    """Yields the structures in a single structure, a batch, or a sequence of these."""
    if is_one(given):
        yield given
    elif hasattr(given, "to_data_list"):
        try:
            yield from given.to_data_list()
        except (RuntimeError, AttributeError) as error:
            raise ValueError(
                f"structures: a Batch that cannot be taken apart ({error}); make it with "
                "Batch.from_data_list"
            ) from None
    elif isinstance(given, Sequence) and not isinstance(given, str | bytes):
        for one in given:
            yield from _flat(one) if hasattr(one, "to_data_list") else [one]
    elif hasattr(given, "__len__") and hasattr(given, "__getitem__") and not _is_mapping(given):
        rows = cast("Sequence[object]", given)
        yield from (rows[i] for i in range(len(rows)))
    else:
        raise TypeError(f"structures: {_EXPECTED}; got {type(given).__name__}")


def _is_mapping(given: object) -> bool:
    return hasattr(given, "keys") or isinstance(given, str | bytes | np.ndarray | torch.Tensor)


def _is_atoms(given: object) -> TypeGuard[Atoms]:
    """Returns True for `ase.Atoms`, without loading ASE."""
    return hasattr(given, "get_chemical_formula") and hasattr(given, "positions")


def _is_data(given: object) -> TypeGuard[Data]:
    return hasattr(given, "stores") and hasattr(given, "to_dict")


def _record_from_data(data: Data, number: int) -> Data:
    """Converts PyG's `Data` to a record without relaxed positions."""
    numbers = data.get("atomic_numbers")
    numbers = data.get("z") if numbers is None else numbers
    if data.get("pos") is None or numbers is None:
        there = ", ".join(sorted(map(str, data.keys()))) or "nothing"
        raise ValueError(f"expected pos, (atoms, 3) Å, and atomic_numbers, (atoms,); got {there}")
    cell, sid = data.get("cell"), data.get("sid")
    return make_record(
        pos=data.pos,
        atomic_numbers=numbers,
        cell=cell,
        pbc=data.get("pbc"),
        tags=data.get("tags"),
        fixed=data.get("fixed"),
        sid=number if sid is None else sid,
        y_relaxed=_label(data.get("y_relaxed")),
        charge=data.get("charge"),
    )


def _label(value: Tensor | float | None) -> float | None:
    """Returns a finite energy, eV, or None."""
    found = torch.as_tensor(float("nan") if value is None else value, device="cpu")
    return float(found) if found.numel() == 1 and bool(torch.isfinite(found).all()) else None
