"""Records: atomic structures with labels, as returned by all readers."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import SupportsInt, TypeAlias

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from molflt.atoms import FARTHEST, LOWEST, MAX_ATOMIC_NUMBER, Data, Tag, lattice_heights
from molflt.files import shown

_Array: TypeAlias = ArrayLike | Tensor
_CENTERED = 64.0  # Å; structures closer to the origin are not moved
_APART = 256.0  # Å; atoms closer to the other atoms keep their periodic images
_VOIGT = [0, 5, 4, 5, 1, 3, 4, 3, 2]  # places of xx, xy, xz, yx, yy, ... in Voigt order
_SKIP = "--skip_bad (convert, predict, relax) or --data.skip_bad (train)"
_TAGS = ", ".join(f"{tag:d} ({tag.name.lower()})" for tag in Tag)


def make_record(
    *,
    pos: _Array,
    atomic_numbers: _Array,
    cell: _Array | None = None,
    pbc: _Array | None = None,
    tags: _Array | None = None,
    fixed: _Array | None = None,
    sid: SupportsInt | str = 0,
    y_init: _Array | None = None,
    y_relaxed: _Array | None = None,
    y_baseline: _Array | None = None,
    pos_relaxed: _Array | None = None,
    energy: _Array | None = None,
    forces: _Array | None = None,
    stress: _Array | None = None,
    charge: _Array | None = None,
) -> Data:
    """Checks a structure, casts it to the package's types and unwraps its relaxed positions.

    Args:
        pos: initial positions (N, 3) in Å, with coordinates within 1e5 Å. A structure whose center
            is more than 64 Å from the origin along an axis is translated, and an atom more than
            256 Å from the others is moved to a nearer image, because float32 rounds coordinates.
        atomic_numbers: atomic numbers (N,), 1 to 118; integers of floating-point type are accepted.
        cell: lattice vectors in Å, as rows, (3, 3) or (1, 3, 3); None for a molecule.
        pbc: flags (3,), True for periodic axes; by default all True with a cell, else all False.
        tags: tags (N,): 0 subsurface, 1 surface, 2 adsorbate; by default all 0 (unknown).
        fixed: mask (N,), True for atoms that are fixed in the relaxation; by default all are free.
        sid: identifier of the system, a 64-bit integer in any type that represents it exactly.
        y_init: energy of the initial structure, in eV; None if unknown.
        y_relaxed: energy of the relaxed structure, in eV; None if unknown.
        y_baseline: `y_relaxed` from a cheaper method, in eV, as in ``data.baseline_key``, or None.
        pos_relaxed: relaxed positions (N, 3) in Å, in any periodic image; None if unknown. OC20
            stores them in the cell; each atom is moved to the image nearest to its start.
        energy: energy at `pos`, in eV, for potentials; None if unknown.
        forces: forces (N, 3) at `pos`, in eV/Å; None if unknown.
        stress: stress at `pos`, in eV/Å^3 with ASE's sign, (3, 3), (1, 3, 3), or (6,) in Voigt
            order (xx, yy, zz, yz, xz, xy); None if unknown.
        charge: total charge, in units of e; None or NaN if unknown; models treat this as 0.

    Returns:
        A structure with ``pos`` and ``pos_relaxed`` ((N, 3) float32, in Å), ``cell`` ((1, 3, 3)
        float32, in Å), ``pbc`` ((1, 3) bool), ``atomic_numbers`` and ``tags`` ((N,) int64),
        ``fixed`` ((N,) bool), ``natoms`` and ``sid`` (int), ``y_init``, ``y_relaxed``,
        ``y_baseline`` and ``energy`` ((1,) float64, in eV), ``forces`` ((N, 3) float32), ``stress``
        ((1, 3, 3) float32), and ``charge`` ((1,) float64, in units of e). Absent values are NaN.
    """
    from torch_geometric.data import Data

    number = _sid_number(sid)
    name = f"sid {number}"
    initial = _positions(pos, "pos", name)
    count = len(initial)
    if count == 0:
        raise ValueError(f"{name}: a structure needs at least one atom; got none")
    numbers = _atom_integers(atomic_numbers, "atomic_numbers", count, name)
    outside = (numbers < 1) | (numbers > MAX_ATOMIC_NUMBER)
    if outside.any():
        raise ValueError(
            f"{name}: atomic_numbers must be 1 to {MAX_ATOMIC_NUMBER}; "
            f"got {int(numbers[outside][0])}; no such element"
        )
    lattice, periodic = _cell(cell, pbc, name)
    origin = _origin(initial, lattice, periodic)
    start = _nearest_images(initial - origin, lattice, periodic).float()
    end = torch.full_like(start, math.nan)
    if pos_relaxed is not None:
        wrapped = _positions(pos_relaxed, "pos_relaxed", name, count) - origin
        shift = _lattice_shift(wrapped - start.double(), lattice.float(), periodic)
        end = (wrapped - shift).float()
    if charge is not None and bool(_tensor(charge, "charge", name).isnan().all()):
        charge = None
    labels = {"y_init": y_init, "y_relaxed": y_relaxed, "y_baseline": y_baseline, "energy": energy}
    return Data(
        pos=start,
        pos_relaxed=end,
        cell=lattice.float(),
        pbc=periodic,
        atomic_numbers=numbers,
        tags=_known_tags(tags, count, name),
        fixed=_flags(_atom_integers(fixed, "fixed", count, name), "fixed", name),
        natoms=count,
        sid=number,
        **{key: _label(y, key, "eV", (1,), torch.float64, name) for key, y in labels.items()},
        forces=_label(forces, "forces", "eV/Å", (count, 3), torch.float32, name),
        stress=_label(stress, "stress", "eV/Å^3", (1, 3, 3), torch.float32, name),
        charge=_label(charge, "charge", "e", (1,), torch.float64, name),
    )


def _known_tags(tags: _Array | None, count: int, name: str) -> Tensor:
    kinds = _atom_integers(tags, "tags", count, name)
    unknown = (kinds < min(Tag)) | (kinds > max(Tag))
    if unknown.any():
        raise ValueError(
            f"{name}: tags must be {_TAGS}; got {int(kinds[unknown][0])}; for layers of ase.build, "
            "set --tags ase (--data.tags ase in training); for potentials, --recipe potential"
        )
    return kinds


def _tensor(value: _Array, key: str, name: str) -> Tensor:
    """Returns a tensor on the CPU; raises ValueError if the value is not an array of numbers."""
    try:
        if isinstance(value, Tensor):
            tensor = value.detach().cpu()
        else:
            tensor = torch.from_numpy(np.array(value))  # a copy: the source may be read-only
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{name}: {key} must be an array of numbers; {error}") from None
    if tensor.is_complex():
        raise ValueError(f"{name}: {key} must be real numbers; got {tensor.dtype}")
    return tensor


def _sid_number(sid: object) -> int:
    """Converts a sid, text or a number of any type, to a 64-bit integer, without rounding."""
    with suppress(TypeError, ValueError, OverflowError, RuntimeError):
        tensor = torch.as_tensor(int(sid) if isinstance(sid, str) else sid, device="cpu")
        number = tensor.item()
        if isinstance(number, int):
            return number
        is_whole = isinstance(number, float) and number.is_integer()
        if is_whole and abs(number) < 2 / torch.finfo(tensor.dtype).eps:  # larger ones are rounded
            return int(number)
    raise ValueError(f"sid must be an integer of at most 64 bits; got {shown(sid)}")


def _flags(tensor: Tensor, key: str, name: str) -> Tensor:
    wrong = (tensor != 0) & (tensor != 1)  # also True for NaN
    if wrong.any():
        raise ValueError(f"{name}: {key} must be 0 or 1; got {tensor[wrong][0].item()}")
    return tensor != 0


def _positions(value: _Array, key: str, name: str, count: int | None = None) -> Tensor:
    tensor = _tensor(value, key, name)
    if tensor.ndim != 2 or tensor.shape[1] != 3 or (count is not None and len(tensor) != count):
        expected = f"({'N' if count is None else count}, 3)"
        raise ValueError(f"{name}: {key} must be {expected} in Å; got shape {tuple(tensor.shape)}")
    tensor = tensor.double()
    valid = (tensor.abs() <= FARTHEST).all(dim=1)  # False for NaN
    if not valid.all():
        atom = int((~valid).nonzero()[0])
        raise ValueError(
            f"{name}: {key} must be finite and within {FARTHEST:g} Å; got {tensor[atom].tolist()} "
            f"for atom {atom}; skip the structure with {_SKIP}"
        )
    return tensor.contiguous()


def _atom_integers(value: _Array | None, key: str, count: int, name: str) -> Tensor:
    tensor = _tensor(np.zeros(count, np.int64) if value is None else value, key, name)
    if tuple(tensor.shape) != (count,):
        raise ValueError(
            f"{name}: {key} must have one number for each of {count} atoms, shape ({count},); "
            f"got shape {tuple(tensor.shape)}"
        )
    if tensor.is_floating_point():
        fractional = ~torch.isfinite(tensor) | (tensor != tensor.round())
        if fractional.any():
            raise ValueError(f"{name}: {key} must be integers; got {float(tensor[fractional][0])}")
    return tensor.to(torch.int64).contiguous()


def _cell(cell: _Array | None, pbc: _Array | None, name: str) -> tuple[Tensor, Tensor]:
    """Checks the cell and the periodic axes; returns a cell (1, 3, 3), in Å, and a mask (1, 3)."""
    tensor = _tensor(np.zeros((3, 3)) if cell is None else cell, "cell", name)
    shape = tuple(tensor.shape)
    if shape not in ((3, 3), (1, 3, 3)):
        raise ValueError(f"{name}: cell must be (3, 3) or (1, 3, 3) in Å; got shape {shape}")
    lattice = tensor.reshape(1, 3, 3).double().contiguous()
    if not torch.isfinite(lattice.float()).all():
        raise ValueError(f"{name}: cell must be finite; got {lattice[0].tolist()}")
    axes = _tensor(bool(lattice.any()) if pbc is None else pbc, "pbc", name)
    if axes.numel() not in (1, 3):
        raise ValueError(f"{name}: pbc must be three booleans; got shape {tuple(axes.shape)}")
    periodic = _flags(axes, "pbc", name).reshape(1, -1).expand(1, 3).contiguous()
    lowest = lattice_heights(lattice.numpy(), periodic.numpy()).min()
    if lowest < LOWEST:
        raise ValueError(
            f"{name}: expected planes of lattice vectors at least {LOWEST} Å apart; got "
            f"{lowest:.2g} Å of cell {lattice[0].tolist()}; set pbc to False along other axes"
        )
    return lattice, periodic


def origin_of(pos: Tensor) -> Tensor:
    """Returns the offset, in Å, to subtract from positions (N, 3); 0 near the origin."""
    center = pos.median(dim=0).values
    coarse = (center / 1000).round() * 1000  # a round offset preserves digits
    return torch.where((center - coarse).abs() <= _CENTERED, coarse, center.round())


def _origin(pos: Tensor, cell: Tensor, pbc: Tensor) -> Tensor:
    """Returns `origin_of` as whole lattice vectors, if possible, which keep structures equal."""
    origin = origin_of(pos)
    if not (origin.any() and pbc.any()):
        return origin
    shift = _lattice_shift(origin[None], cell, pbc)
    return shift + origin_of(pos - shift)


def _nearest_images(pos: Tensor, cell: Tensor, pbc: Tensor) -> Tensor:
    """Moves atoms that are far from the other atoms to nearer periodic images."""
    offset = pos - pos.median(dim=0).values
    far = (offset.abs() > _APART).any(dim=1)
    return pos - _lattice_shift(offset * far[:, None], cell, pbc) if far.any() else pos


def _lattice_shift(delta: Tensor, cell: Tensor, pbc: Tensor) -> Tensor:
    """Returns the lattice vectors (N, 3), in Å, to subtract from `delta` to make it shortest."""
    from ase.geometry import complete_cell, find_mic

    axes, vectors = pbc.flatten().numpy(), delta.double().numpy()
    lattice = np.where(axes[:, None], cell.reshape(3, 3).double().numpy(), 0.0)
    complete = complete_cell(lattice)
    nearest, lengths = find_mic(vectors, complete, axes)
    turns = np.round((vectors - nearest) @ np.linalg.inv(complete))
    # a tie within float32 rounding is not a jump
    turns[np.linalg.norm(vectors, axis=1) * (1 - 1e-6) <= lengths] = 0
    return torch.from_numpy(turns @ lattice)


def _label(
    value: _Array | None, key: str, unit: str, shape: tuple[int, ...], dtype: torch.dtype, name: str
) -> Tensor:
    """Checks a label and converts it to the given shape and dtype; None becomes NaN."""
    if value is None:
        return torch.full(shape, math.nan, dtype=dtype, device="cpu")
    tensor = _tensor(value, key, name).to(dtype)
    if key == "stress" and tensor.numel() == 6:
        tensor = tensor.flatten()[_VOIGT]
    if tensor.numel() != math.prod(shape) or (key == "forces" and tensor.shape != shape):
        raise ValueError(
            f"{name}: {key} must be {shape} in {unit}; got shape {tuple(tensor.shape)}"
        )
    tensor = tensor.reshape(shape)
    finite = tensor.isfinite().reshape(shape[0], -1).all(dim=1)  # by atom, or one flag
    if not finite.all():
        row = int((~finite).nonzero()[0])
        atom = f" for atom {row}" if key == "forces" else ""
        raise ValueError(
            f"{name}: {key} must be finite, in {unit}; got {tensor[row].tolist()}{atom}; omit the "
            f"label if it is unknown, or skip the structure with {_SKIP}"
        )
    return tensor.contiguous().clone()
