"""Measure how well a potential conserves energy in NVE molecular dynamics.

    python scripts/conservation.py runs/potential ethanol.xyz --ps 20 --out runs/conservation

The integrator is velocity Verlet, in float64. Initial velocities are drawn for --temperature, with
a total momentum of 0. The drift is the slope of the total energy multiplied by the length of the
run. It is large if the energy is discontinuous or the forces are wrong. Otherwise, it decreases
with the time step. Writes conservation.csv and conservation.png.
"""

import argparse
from pathlib import Path

import ase.io
import numpy as np
from ase import units
from ase.md.velocitydistribution import MaxwellBoltzmannDistribution, Stationary
from ase.md.verlet import VelocityVerlet
from kit.rows import Row, Rows, write_csv
from kit.words import described, guarded
from tqdm import tqdm

import molflt
from molflt.files import expect_writable
from molflt.plots.figure import picture


def simulate(options: argparse.Namespace) -> Rows:
    """Returns rows of time, energies and temperature at the start and after every `every` steps."""
    steps = round(options.ps * 1e3 / options.timestep) if options.timestep > 0 else 0
    if not 0 < options.every <= steps:
        raise ValueError(
            f"--ps {options.ps:g} with --timestep {options.timestep:g} is {steps} steps; expected "
            f"--every to be between 1 and this number; got {options.every}"
        )
    atoms = ase.io.read(options.structure)  # the last structure
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
                "structure differs from the training data; use a lower --temperature"
            )
    return rows


def drift(rows: Rows) -> tuple[float, float]:
    """Returns the drift of the total energy and the rms deviation from a linear fit.

    Both are in meV/atom.
    """
    time, total = (np.array([row[key] for row in rows]) for key in ("fs", "total_meV_per_atom"))
    slope, offset = np.polyfit(time, total, 1)
    rest = total - slope * time - offset
    return float(slope * (time[-1] - time[0])), float(np.sqrt((rest**2).mean()))


def draw(rows: Rows, png: Path) -> None:
    """Plots the total energy against time."""
    with picture(png, figsize=(6.0, 3.0)) as figure:
        axes = figure.subplots()
        axes.plot([row["fs"] / 1e3 for row in rows], [row["total_meV_per_atom"] for row in rows])
        axes.set_xlabel("time, ps")
        axes.set_ylabel("total energy, meV/atom")


@guarded
def main(words: list[str] | None = None) -> None:
    parser = described(__doc__)
    parser.add_argument("potential", help="folder of a run of the recipe potential")
    parser.add_argument("structure", type=Path, help="ASE file; its last structure is used")
    parser.add_argument("--ps", type=float, default=20.0, help="length of the run, ps")
    parser.add_argument("--timestep", type=float, default=0.5, help="time step, fs")
    parser.add_argument("--temperature", type=float, default=300.0, help="initial temperature, K")
    parser.add_argument("--every", type=int, default=20, help="number of steps between rows")
    parser.add_argument("--seed", type=int, default=0, help="seed of the initial velocities")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=Path("runs/conservation"))
    options = parser.parse_args(words)
    expect_writable(options.out / "conservation.csv")
    rows = simulate(options)
    write_csv(options.out / "conservation.csv", rows)
    draw(rows, options.out / "conservation.png")
    slope, rest = drift(rows)
    mean = np.mean([row["temperature_K"] for row in rows])
    print(
        f"{rows[-1]['fs'] / 1e3:g} ps at {mean:.0f} K: drift {slope:.4f} meV/atom, "
        f"rms deviation {rest:.4f} meV/atom"
    )


if __name__ == "__main__":
    raise SystemExit(main())
