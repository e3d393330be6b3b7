"""Source for structures in memory, created with ASE or PyG."""

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, TypeGuard

import numpy as np
import torch

from molflt.atoms import Atoms, Data
from molflt.data.structures.ase_fields import Converter, charge_in, text_sid
from molflt.data.structures.ase_labels import Entries
from molflt.data.structures.base import AS_IT_IS, LoadedStructures, Reading
from molflt.data.structures.records import make_record

_EXPECTED = "expected ase.Atoms, PyG Data or Batch, a list of them, or a data set of Data"


class StructuresInMemory(LoadedStructures):
    """Structures to predict, which are checked in the same way as structures from files.

    Args:
        given: structure or sequence of structures: `ase.Atoms` (see
            `molflt.data.structures.ase_files.AseStructures`), or PyG `Data` or `Batch` with pos,
            atomic_numbers or z; optional: cell, pbc, tags, fixed, sid, charge, y_relaxed and
            y_baseline.
        reading: interpretation of the entries of `Atoms`.
    """

    def __init__(self, given: object, reading: Reading = AS_IT_IS) -> None:
        super().__init__("structures")
        self.given = list(_flat(given))
        if not self.given:
            raise ValueError(f"{self.path}: {_EXPECTED}; got none")
        converter = Converter(reading._replace(for_prediction=True, keep_atoms=True))
        for index, structure in enumerate(self.given):
            where = f"{self.path}: structure {index}"
            make: Callable[..., Data]
            if is_atoms(structure):
                make, name = converter.record, text_sid(Entries.of(structure).info)
            elif _is_data(structure):
                make, name = _record, text_sid(structure)
            else:
                raise TypeError(f"{where}: {_EXPECTED}; got {type(structure).__name__}")
            self.add(where, partial(make, structure, index))
            if name is not None:
                self.names[index] = name
        converter.warn(str(self.path))

    def to_atoms(self, index: int) -> Atoms:
        structure = self.given[index]
        return structure.copy() if is_atoms(structure) else super().to_atoms(index)


def is_one(given: object) -> bool:
    """Returns True for a single structure, and False for a list or a batch."""
    return is_atoms(given) or (_is_data(given) and not hasattr(given, "to_data_list"))


def _flat(given: object) -> Iterable[object]:
    """Yields the structures in a structure, batch or sequence of both."""
    if is_atoms(given) or _is_data(given):
        given = [given]
    elif isinstance(given, str | bytes | np.ndarray | torch.Tensor | Mapping) or not (
        hasattr(given, "__len__") and hasattr(given, "__getitem__")
    ):
        raise TypeError(f"structures: {_EXPECTED}; got {type(given).__name__}")
    for item in map(given.__getitem__, range(len(given))):
        yield from _unbatched(item) if hasattr(item, "to_data_list") else [item]


def _unbatched(batch: Any) -> list[Data]:
    """Divides a batch, as PyG does by stored sizes; rejects batches whose atoms were changed."""
    with suppress(RuntimeError):
        parts: list[Data] = batch.to_data_list()
        sizes = [part.num_nodes if part.get("pos") is None else len(part.pos) for part in parts]
        if np.repeat(np.arange(len(sizes)), sizes).tolist() == batch.batch.tolist():
            return parts
    raise ValueError(
        "structures: expected the atoms that Batch.from_data_list stored; got a batch whose atoms "
        "were added, removed or reordered; pass a list of Data"
    )


def is_atoms(given: object) -> TypeGuard[Atoms]:
    """Returns True for `ase.Atoms`, without loading ASE."""
    return hasattr(given, "get_chemical_formula") and hasattr(given, "positions")


def _is_data(given: object) -> TypeGuard[Data]:
    return hasattr(given, "stores") and hasattr(given, "to_dict")


def _record(data: Data, default_sid: int) -> Data:
    numbers = data.get("atomic_numbers")
    numbers = data.get("z") if numbers is None else numbers
    if data.get("pos") is None or numbers is None:
        names = ", ".join(sorted(map(str, data.keys()))) or "nothing"
        raise ValueError(f"expected pos, (atoms, 3) Å, and atomic_numbers, (atoms,); got {names}")
    charge = charge_in({name: data[name] for name in data.keys()})  # noqa: SIM118 (not a dict)
    energies = {name: _finite_or_none(data.get(name)) for name in ("y_relaxed", "y_baseline")}
    others = {name: data.get(name) for name in ("cell", "pbc", "tags", "fixed")}
    return make_record(
        pos=data.pos,
        atomic_numbers=numbers,
        sid=default_sid if data.get("sid") is None or text_sid(data) is not None else data.sid,
        charge=data.get("charge") if charge is None else charge,
        **energies,
        **others,
    )


def _finite_or_none(energy: Any) -> Any:
    value = torch.as_tensor(math.nan if energy is None else energy, device="cpu")
    return value if value.numel() == 1 and bool(value.isfinite().all()) else None
