"""The compact store: structures and labels of one split in one safetensors file.

Arrays are concatenated over all structures, and ``offsets`` holds the start of each structure.
Reading needs no unpickling or decompression. Edges are not stored, because attention does not need
them.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Collection, Iterable
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from molflt.atoms import FARTHEST, LOWEST, MAX_ATOMIC_NUMBER, Tag, lattice_heights
from molflt.data.structures.base import Structures
from molflt.data.structures.records import make_record
from molflt.files import clear_parts, expect_readable, save_tensors, shown, verify_tensors

if TYPE_CHECKING:
    from torch import Tensor
    from torch_geometric.data import Data

__all__ = ["STORE", "StructureStore", "write_store"]

STORE, _VERSION = "molflt-structures", "1"
# column: numpy type, shape of one entry, entries per "atom" or per "structure"
_COLUMNS: dict[str, tuple[str, tuple[int, ...], str]] = {
    "pos": ("<f4", (3,), "atom"),
    "pos_relaxed": ("<f4", (3,), "atom"),
    "atomic_numbers": ("|u1", (), "atom"),
    "tags": ("|u1", (), "atom"),
    "fixed": ("|b1", (), "atom"),
    "cell": ("<f4", (3, 3), "structure"),
    "pbc": ("|b1", (3,), "structure"),
    "sid": ("<i8", (), "structure"),
    "y_init": ("<f8", (), "structure"),
    "y_relaxed": ("<f8", (), "structure"),
    "energy": ("<f8", (), "structure"),
    "forces": ("<f4", (3,), "atom"),
    "stress": ("<f4", (3, 3), "structure"),
    "charge": ("<f8", (), "structure"),
}
# omitted if no structure has values
_OPTIONAL = ("pos_relaxed", "energy", "forces", "stress", "charge")
_BLOCK = 10_000  # structures per check
_BLOCK_WRITTEN = 1000  # structures per concatenation
_TYPES = {"F32": "<f4", "F64": "<f8", "I64": "<i8", "U8": "|u1", "BOOL": "|b1"}


def write_store(
    path: str | Path,
    records: Iterable[Data],
    *,
    source: str = "",
    left_out: Callable[[np.ndarray, np.ndarray, np.ndarray], Collection[int]] | None = None,
) -> int:
    """Writes structures to a compact store, completely or not at all.

    Args:
        path: file to write, ending in ``.safetensors``; an existing one is replaced.
        records: structures as :func:`molflt.data.structures.records.make_record` returns them,
            optionally with a `name`, which replaces the sid in tables.
        source: origin of the structures, stored in the header.
        left_out: function of the sids, y_relaxed (eV) and natoms of all structures, (structures,)
            each, that returns the indices of structures to leave out.

    Returns:
        Number of structures written.
    """
    path = Path(path)
    if path.suffix != ".safetensors":
        raise ValueError(f"{path}: a compact store ends in .safetensors; got {path.suffix!r}")
    blocks: dict[str, list[np.ndarray]] = {name: [] for name in _COLUMNS}
    names: dict[int, str] = {}
    natoms: list[int] = []
    remaining = iter(records)
    while some := list(islice(remaining, _BLOCK_WRITTEN)):
        names |= {len(natoms) + i: one.name for i, one in enumerate(some) if "name" in one}
        natoms += [len(record.pos) for record in some]
        rows = [_columns(record) for record in some]
        for name, arrays in blocks.items():
            arrays.append(np.concatenate([row[name] for row in rows]))
    kept = np.ones(len(natoms), dtype=bool)
    columns = {name: np.concatenate(arrays) for name, arrays in blocks.items() if arrays}
    if left_out is not None and natoms:
        absent = left_out(columns["sid"], columns["y_relaxed"], np.array(natoms))
        kept[list(absent)] = False
    if not kept.any():
        raise ValueError(f"{path}: no structures to write; expected at least one")
    if not kept.all():
        by = {"atom": np.repeat(kept, natoms), "structure": kept}
        columns = {name: own[by[_COLUMNS[name][2]]] for name, own in columns.items()}
    columns = {"offsets": np.append(0, np.cumsum(np.array(natoms)[kept])).astype("<i8"), **columns}
    for name in _OPTIONAL:
        if np.isnan(columns[name]).all():
            del columns[name]
    places = {int(index): place for place, index in enumerate(np.flatnonzero(kept))}
    named = {places[index]: name for index, name in names.items() if index in places}
    header = {"names": json.dumps(named)} if named else {}
    header |= {"format": STORE, "version": _VERSION, "source": source}
    clear_parts(path.parent)  # left by interrupted conversions
    save_tensors(path, columns, header)
    return int(kept.sum())


def _columns(record: Data) -> dict[str, np.ndarray]:
    """Returns the checked arrays of one structure, in the types of the store."""
    checked = make_record(
        pos=record.pos,
        atomic_numbers=record.atomic_numbers,
        cell=record.cell,
        pbc=record.pbc,
        tags=record.tags,
        fixed=record.fixed,
        sid=record.sid,
        y_init=_present(record.y_init),
        y_relaxed=_present(record.y_relaxed),
        **{name: _present(record[name]) for name in _OPTIONAL if name in record},
    )
    arrays = {}
    for name, (dtype, shape, per) in _COLUMNS.items():
        entries = checked.natoms if per == "atom" else 1
        arrays[name] = np.asarray(checked[name]).astype(dtype).reshape(entries, *shape)
    return arrays


def _present(label: Tensor) -> Tensor | None:
    """Returns a label; None if all of it is NaN."""
    tensor = torch.as_tensor(label)
    return None if bool(tensor.isnan().all()) else tensor


class StructureStore(Structures):
    """Memory-mapped compact store, which can be sent to worker processes.

    Args:
        path: a ``.safetensors`` file made by :func:`write_store`.
        skip_bad: leave out invalid structures instead of refusing them; they are listed in ``bad``
            as (sid, reason).
    """

    suffixes = (".safetensors",)

    def __init__(self, path: str | Path, skip_bad: bool = False) -> None:
        super().__init__(path, skip_bad)
        if not self.path.is_file():
            raise FileNotFoundError(
                f"{self.path}: no such compact store; make one with molflt data convert SRC DST"
            )
        self._maps: dict[str, np.ndarray] | None = None
        maps = self._open()
        faults = _structure_faults(maps)
        if faults and not skip_bad:
            index, reason = next(iter(faults.items()))
            raise ValueError(f"{self._sid(index)}: {reason}; read with --skip-bad to leave out")
        found = json.loads(self._noted("names") or "{}")
        self.names = {int(index): str(name) for index, name in found.items()}
        if skip_bad:
            count = len(maps["sid"])
            for first in range(0, count, _BLOCK):
                faults = {**_atom_faults(maps, first, min(first + _BLOCK, count)), **faults}
        if faults:
            self.bad = [(str(maps["sid"][index]), faults[index]) for index in sorted(faults)]
            self._kept = np.setdiff1d(np.arange(len(maps["sid"])), list(faults))

    def __len__(self) -> int:
        return len(self._open()["sid"]) if self._kept is None else len(self._kept)

    @property
    def natoms(self) -> np.ndarray:
        """Number of atoms in each structure, (len,) int64."""
        counts = np.diff(self._open()["offsets"])
        return counts if self._kept is None else counts[self._kept]

    @property
    def y_relaxed(self) -> np.ndarray:
        """Relaxed energies, (len,) float64, eV; NaN if missing."""
        energies = np.array(self._open()["y_relaxed"])
        return energies if self._kept is None else energies[self._kept]

    def compositions(
        self, indices: NDArray[np.int64], of_adsorbates: bool = False
    ) -> NDArray[np.float64]:
        maps = self._open()
        offsets, numbers = maps["offsets"], maps["atomic_numbers"]
        counts = np.zeros((len(indices), MAX_ATOMIC_NUMBER + 1))
        for row, index in zip(counts, indices, strict=True):
            stored = self._stored(index)
            atoms = slice(offsets[stored], offsets[stored + 1])
            counted = (maps["tags"][atoms] == Tag.ADSORBATE) | (not of_adsorbates)
            own = np.bincount(numbers[atoms][counted], minlength=len(row))
            if own[0] or len(own) > len(row):
                self[index]  # raises an error that names the fault
            row += own
        return counts

    @property
    def source(self) -> str:
        """Origin of the structures, as stored by the writer."""
        return self._noted("source")

    def _noted(self, name: str) -> str:
        with safe_open(self.path, framework="numpy") as file:
            return str((file.metadata() or {}).get(name, ""))

    def verify(self) -> bool:
        return verify_tensors(self.path)

    def where(self, index: int) -> str:
        return self._sid(self._stored(index))

    def __getitem__(self, index: int) -> Data:
        from torch_geometric.data import Data

        index, maps = self._stored(index), self._open()
        for reason in _atom_faults(maps, index, index + 1).values():
            raise ValueError(f"{self._sid(index)}: {reason}; read with --skip-bad to leave out")
        atoms = slice(int(maps["offsets"][index]), int(maps["offsets"][index + 1]))
        pos = np.array(maps["pos"][atoms])
        optional = {}
        for name in _OPTIONAL:
            dtype, shape, per = _COLUMNS[name]
            own = atoms if per == "atom" else slice(index, index + 1)
            none = np.full((len(pos) if per == "atom" else 1, *shape), np.nan, dtype)
            optional[name] = torch.from_numpy(np.array(maps[name][own]) if name in maps else none)
        return Data(
            **optional,
            pos=torch.from_numpy(pos),
            cell=torch.from_numpy(np.array(maps["cell"][index : index + 1])),
            pbc=torch.from_numpy(np.array(maps["pbc"][index : index + 1])),
            atomic_numbers=torch.from_numpy(maps["atomic_numbers"][atoms].astype(np.int64)),
            tags=torch.from_numpy(maps["tags"][atoms].astype(np.int64)),
            fixed=torch.from_numpy(np.array(maps["fixed"][atoms])),
            natoms=len(pos),
            sid=int(maps["sid"][index]),
            y_init=torch.from_numpy(np.array(maps["y_init"][index : index + 1])),
            y_relaxed=torch.from_numpy(np.array(maps["y_relaxed"][index : index + 1])),
        )

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_maps": None}  # each process maps the file itself

    def _open(self) -> dict[str, np.ndarray]:
        if self._maps is None:
            self._maps = _map_columns(self.path)
        return self._maps

    def _sid(self, stored: int) -> str:
        return f"{self.path}: sid {int(self._open()['sid'][stored])}"


def _map_columns(path: Path) -> dict[str, np.ndarray]:
    """Checks the header and returns read-only views of every array.

    ``safe_open`` checks that the header is valid and covers the file; slices are numpy views, which
    are faster than ``get_slice``.
    """
    expect_readable(path)
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
    except SafetensorError as error:
        raise ValueError(
            f"{path}: not a complete safetensors file; expected a compact store; "
            f"{str(error)[:200]}; copy or convert it again"
        ) from None
    if metadata.get("format") != STORE or metadata.get("version") != _VERSION:
        raise ValueError(
            f"{path}: expected a compact store with format {STORE!r} version {_VERSION!r}; got "
            f"format {shown(metadata.get('format'))} version {shown(metadata.get('version'))}; "
            "make one with molflt data convert SRC DST"
        )
    with open(path, "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    content = np.memmap(path, dtype=np.uint8, mode="r", offset=0)[8 + length :]
    columns = {}
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            # a plain ndarray: slicing np.memmap costs several times as much per structure
            raw = np.asarray(content[begin:end])
            if entry["dtype"] in _TYPES:
                raw = raw.view(_TYPES[entry["dtype"]]).reshape(entry["shape"])
            else:  # a type that no column may have
                raw = raw.view(np.void)
            columns[name] = raw
    _check_columns(path, columns)
    return columns


def _check_columns(path: Path, columns: dict[str, np.ndarray]) -> None:
    offsets = columns.get("offsets")
    if offsets is None or offsets.dtype != "<i8" or offsets.ndim != 1 or len(offsets) < 2:
        raise ValueError(f"{path}: key 'offsets' must be (structures + 1,) int64; convert it again")
    if offsets[0] != 0 or (offsets[1:] <= offsets[:-1]).any():  # differences could overflow
        raise ValueError(f"{path}: key 'offsets' must rise from 0; damaged, convert it again")
    entries = {"atom": int(offsets[-1]), "structure": len(offsets) - 1}
    for name, (dtype, shape, per) in _COLUMNS.items():
        if name not in columns and name in _OPTIONAL:
            continue
        expected = (entries[per], *shape)
        column = columns.get(name)
        if column is None or column.dtype != dtype or column.shape != expected:
            got = "nothing" if column is None else f"{column.dtype} {column.shape}"
            raise ValueError(
                f"{path}: key {name!r} must be {np.dtype(dtype).name} {expected}; got {got}; "
                "the file is damaged or from another version, convert it again"
            )


def _structure_faults(maps: dict[str, np.ndarray]) -> dict[int, str]:
    """Returns faults of cells, axes and labels by structure index."""
    cell, pbc = maps["cell"], maps["pbc"]
    finite = np.isfinite(cell).all(axis=(1, 2))
    heights = lattice_heights(np.where(finite[:, None, None], cell, 0.0).astype(float), pbc)
    wrong = {
        "cell must be finite": ~finite,
        "pbc must be 0 or 1": (pbc.view(np.uint8) > 1).any(axis=1),
        "periodic axes need linearly independent lattice vectors, whose planes are at least "
        f"{LOWEST} Å apart": finite & (heights.min(axis=1) < LOWEST),
        "y_init must be finite": np.isinf(maps["y_init"]),
        "y_relaxed must be finite": np.isinf(maps["y_relaxed"]),
    }
    for name in {"energy", "charge"} & maps.keys():
        wrong[f"{name} must be finite"] = np.isinf(maps[name])
    if "stress" in maps:
        parts = maps["stress"].reshape(-1, 9)
        wrong["stress must be finite, or NaN in all parts"] = ~(
            np.isfinite(parts).all(axis=1) | np.isnan(parts).all(axis=1)
        )
    faults: dict[int, str] = {}
    for reason, mask in wrong.items():
        for index in np.flatnonzero(mask):
            faults.setdefault(int(index), reason)
    return dict(sorted(faults.items()))


def _atom_faults(maps: dict[str, np.ndarray], first: int, last: int) -> dict[int, str]:
    """Returns faults of the atoms in structures `first` to `last` - 1, by structure index."""
    offsets = maps["offsets"][first : last + 1]
    columns: dict[str, np.ndarray] = {
        name: maps[name][offsets[0] : offsets[-1]]
        for name in ("pos", "pos_relaxed", "forces", "atomic_numbers", "tags", "fixed")
        if name in maps
    }
    starts = offsets[:-1] - offsets[0]
    numbers, fixed = columns["atomic_numbers"], columns["fixed"].view(np.uint8)
    wrong = {
        ("pos", f"finite and within {FARTHEST:g} Å"): _outside(columns["pos"], FARTHEST),
        ("atomic_numbers", f"1 to {MAX_ATOMIC_NUMBER}"): (numbers < 1)
        | (numbers > MAX_ATOMIC_NUMBER),
        ("tags", f"0 to {max(Tag):d}"): columns["tags"] > max(Tag),
        ("fixed", "0 or 1"): fixed > 1,
    }
    for name, within, most in (
        ("pos_relaxed", f" and within {FARTHEST:g} Å", FARTHEST),
        ("forces", "", float(np.finfo(np.float32).max)),
    ):
        if name in columns:
            unknown = np.isnan(columns[name]).all(axis=1)
            none = np.logical_and.reduceat(unknown, starts)
            known = ~np.repeat(none, np.diff(offsets))
            wrong[name, f"finite{within}, or NaN for all atoms"] = (
                _outside(columns[name], most) & known
            )
    faults: dict[int, str] = {}
    columns["fixed"] = fixed
    for (name, expected), mask in wrong.items():
        for atom in np.flatnonzero(mask):
            index = int(np.searchsorted(starts, atom, side="right")) - 1
            got = f"got {columns[name][atom].tolist()} for atom {atom - starts[index]}"
            faults.setdefault(first + index, f"{name} must be {expected}; {got}")
    return faults


def _outside(vectors: np.ndarray, most: float) -> np.ndarray:
    """Returns the mask (atoms,) of vectors with a component beyond `most` or not finite."""
    return ~(np.abs(vectors) <= most).all(axis=1)
