"""Memory and CPU time of `molflt predict` on crystals of 10^4 and 10^5 atoms.

The default is the shipped model, which has a cutoff of 5 Å and no mesh. `run` is the folder of a
different model, and `mesh_order` applies to models with reciprocal nodes. The crystals are copper
on a cubic lattice with random displacements of 0.1 Å and 12 Å^3 per atom. Each prediction is
measured as a separate process, which prints the energies as CSV.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from ase import Atoms
from ase.io import write
from kit.layers import VOLUME
from kit.rows import Rows, formatted

QUICK = {"edges": (5,)}


def crystal(edge: int) -> Atoms:
    """Returns a crystal of edge^3 atoms, which are alternately tagged as adsorbate and surface."""
    step = VOLUME ** (1 / 3)
    places = np.stack(np.meshgrid(*[np.arange(edge)] * 3, indexing="ij"), axis=-1).reshape(-1, 3)
    shaken = step * places + np.random.default_rng(0).normal(0, 0.1, places.shape)
    atoms = Atoms(f"Cu{edge**3}", positions=shaken, cell=[edge * step] * 3, pbc=True)
    atoms.set_tags(2 - np.arange(len(atoms)) % 2)
    return atoms


def predict(words: list[str]) -> tuple[float, float]:
    """Runs `molflt predict` and returns its peak memory in GB and its CPU time in s."""
    command = [sys.executable, "-m", "molflt", "predict", *words, "--force"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        said = process.stdout.read() if process.stdout else ""
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command, said)
    unit = 1 if sys.platform == "darwin" else 1024  # unit of ru_maxrss in bytes
    return used.ru_maxrss * unit / 1e9, used.ru_utime + used.ru_stime


def measure(
    edges: tuple[int, ...] = (25, 47), mesh_order: int = 0, run: Path | None = None
) -> Rows:
    """Returns one row per crystal of edge^3 atoms."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for edge in edges:
            file = Path(folder) / f"copper{edge}.extxyz"
            write(file, crystal(edge))
            words = [str(path) for path in (run, file) if path is not None]
            words += ["--mesh_order", str(mesh_order)] if mesh_order else []
            peak, seconds = predict(words)
            row = {"atoms": edge**3, "edge": edge, "order": mesh_order, "GB": peak}
            rows.append({**row, "processor_s": seconds})
    return rows


def table(rows: Rows) -> str:
    cells = {"peak, GB": "{GB:.2f}", "CPU time, s": "{processor_s:.0f}"}
    return formatted(rows, {"atoms": "{atoms:,}", "mesh_order": "{order}", **cells})
