"""A small archive in the layout of GAME-Net's FG set."""

import hashlib
import io
import lzma
import tarfile
from pathlib import Path

import numpy as np

METALS = ("ag", "cu", "ni")
FAMILIES = {"amides": 7, "oximes": 3}  # number of molecules
_CELL = np.array([[6.0, 0.0, 0.0], [3.0, 5.2, 0.0], [0.0, 0.0, 20.0]])


def places(shift: float = 0.0) -> np.ndarray:
    """Returns positions (6, 3) of three metal atoms, H, H and C; `shift` moves C."""
    slab = [[0.0, 0.0, 0.0], [0.5, 0.0, 0.0], [0.25, 0.5, 0.1]]
    return np.array([*slab, [0.1, 0.1, 0.2], [0.3, 0.1, 0.2], [0.02 - shift, 0.1, 0.25]])


def poscar(metal: str, shift: float = 0.0) -> str:
    """Returns the structure as VASP writes it, with all positions within the cell."""
    cell = "\n".join(" ".join(f"{x:.10f}" for x in row) for row in _CELL)
    symbol = metal.capitalize()
    lines = [f"{symbol} H C", "1.0", cell, f"{symbol} H C", "3 2 1", "Selective dynamics", "Direct"]
    for i, place in enumerate(places(shift)):
        flags = "F F F" if i < 2 else "T T T"
        lines.append(" ".join(f"{x % 1.0:.10f}" for x in place) + f" {flags}")
    return "\n".join(lines) + "\n"


def content() -> dict[str, str]:
    """Returns the files of a valid archive: 30 systems with names such as ag-00X3-a."""
    files, energies, initial, groups = {}, [], [], []
    for number, metal in enumerate(METALS):
        energies.append(f"{metal}-0000 {-100.0 - number}")
        for family, count in FAMILIES.items():
            for i in range(count):
                name = f"{metal}-00{family[0].upper()}{i}-a"
                files[f"{family}/structures/{name}.poscar"] = poscar(metal)
                files[f"{family}/structures/{name}.contcar"] = poscar(metal, 0.05)
                energies.append(f"{name} {-121.0 - number - 0.1 * i}")
                initial.append(f"{name} {-119.5 - number}")
                groups.append(f"{name} {family}")
    for family, count in FAMILIES.items():
        energies += [f"00{family[0].upper()}{i} -20.0" for i in range(count)]
    tables = {"energies.dat": energies, "energies_i.dat": initial, "groups.dat": groups}
    return {**files, **{name: "\n".join(rows) + "\n" for name, rows in tables.items()}}


def write_archive(path: Path, files: dict[str, str]) -> str:
    """Writes a tar.xz and returns its sha256."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, text in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(text.encode())
            tar.addfile(entry, io.BytesIO(text.encode()))
    packed = lzma.compress(buffer.getvalue())
    path.write_bytes(packed)
    return hashlib.sha256(packed).hexdigest()
