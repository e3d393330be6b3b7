"""Energy conservation of a potential in molecular dynamics at constant energy, NVE.

    python scripts/conservation.py runs/potential ethanol.xyz --ps 20 --out runs/conservation

Velocity Verlet from velocities of --temperature without a net momentum. Drift is the slope of the
total energy times the length of the run: what a kink, a cutoff or wrong forces would leave behind;
it is smaller with smaller steps if these are all that is wrong. Writes conservation.csv and .png.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import ase.io
import numpy as np
from ase import Atoms, units
from ase.md.velocitydistribution import MaxwellBoltzmannDistribution, Stationary
from ase.md.verlet import VelocityVerlet
from kit.rows import Row, Rows, write_csv
from kit.words import described
from tqdm import tqdm

import molflt
from molflt.files import expect_writable, shown
from molflt.plots.figure import picture


def read(path: Path) -> Atoms:
    """The last structure of a file."""
    try:
        return ase.io.read(path)
    except Exception as error:  # ASE's readers fail in any way, as an OSError too
        if isinstance(error, OSError) and error.filename:
            raise
        reason = " ".join(str(error).split()) or "nothing in it"
        raise ValueError(
            f"{path}: expected a structure that ASE reads; got {type(error).__name__}: "
            f"{shown(reason)}; convert the file, or get it again"
        ) from None


def simulate(options: argparse.Namespace) -> Rows:
    """A row every so many steps: time, fs, energies, meV/atom, and temperature, K."""
    steps = round(options.ps * 1e3 / options.timestep) if options.timestep > 0 else 0
    if not 0 < options.every <= steps:
        raise ValueError(
            f"--ps {options.ps:g} with --timestep {options.timestep:g} is {steps} steps; expected "
            f"at least --every, {options.every}, and these more than 0"
        )
    atoms = read(options.structure)
    draw = np.random.default_rng(options.seed)
    MaxwellBoltzmannDistribution(atoms, temperature_K=options.temperature, rng=draw)
    Stationary(atoms)
    atoms.calc = molflt.Calculator(options.potential, device=options.device)
    dynamics = VelocityVerlet(atoms, timestep=options.timestep * units.fs)
    count = len(atoms)
    start = atoms.get_total_energy()

    def row(step: int) -> Row:
        total = atoms.get_total_energy()
        return {
            "fs": step * options.timestep,
            "total_meV_per_atom": 1e3 * (total - start) / count,
            "kinetic_meV_per_atom": 1e3 * atoms.get_kinetic_energy() / count,
            "temperature_K": atoms.get_temperature(),
        }

    rows = [row(0)]
    for step in tqdm(range(options.every, steps + 1, options.every), disable=None):
        dynamics.run(options.every)
        rows.append(row(step))
        if not np.isfinite(rows[-1]["total_meV_per_atom"]):
            raise ValueError(
                f"{options.structure}: energy is not finite after {rows[-1]['fs']:g} fs; the "
                "potential has left what it was trained on; use a lower --temperature"
            )
    return rows


def drift(rows: Rows) -> tuple[float, float]:
    """Slope of the total energy times the length, and what is left around it, meV/atom."""
    time, total = (np.array([row[key] for row in rows]) for key in ("fs", "total_meV_per_atom"))
    slope, offset = np.polyfit(time, total, 1)
    rest = total - slope * time - offset
    return float(slope * (time[-1] - time[0])), float(np.sqrt((rest**2).mean()))


def draw(rows: Rows, png: Path) -> None:
    """Total energy over time."""
    with picture(png, figsize=(6.0, 3.0)) as figure:
        axes = figure.subplots()
        axes.plot([row["fs"] / 1e3 for row in rows], [row["total_meV_per_atom"] for row in rows])
        axes.set_xlabel("time, ps")
        axes.set_ylabel("total energy, meV/atom")


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """Options of the script."""
    parser = described(__doc__)
    parser.add_argument("potential", help="folder of a run of the recipe potential")
    parser.add_argument("structure", type=Path, help="any file that ASE reads; its last structure")
    parser.add_argument("--ps", type=float, default=20.0, help="length, ps")
    parser.add_argument("--timestep", type=float, default=0.5, help="fs")
    parser.add_argument("--temperature", type=float, default=300.0, help="of the velocities, K")
    parser.add_argument("--every", type=int, default=20, help="steps between rows")
    parser.add_argument("--seed", type=int, default=0, help="of the velocities")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=Path("runs/conservation"))
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> int:
    """Simulates, and prints the drift."""
    options = parse(words)
    try:
        expect_writable(options.out / "conservation.csv")
        rows = simulate(options)
    except (ValueError, OSError) as error:
        missing = isinstance(error, OSError) and error.filename
        text = f"{error.filename}: {error.strerror}" if missing else error
        print(f"conservation.py: error: {text}", file=sys.stderr)
        return 2
    write_csv(options.out / "conservation.csv", rows)
    draw(rows, options.out / "conservation.png")
    slope, rest = drift(rows)
    mean = np.mean([row["temperature_K"] for row in rows])
    print(
        f"{rows[-1]['fs'] / 1e3:g} ps at {mean:.0f} K: drift {slope:.4f} meV/atom, "
        f"{rest:.4f} meV/atom around it"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
