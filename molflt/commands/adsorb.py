"""``molflt adsorb``: places a molecule on slabs and ranks the placements."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ase import Atoms

from molflt import plots
from molflt.adsorption import comparable, cut, element, placements, ranked, varied
from molflt.commands.options import expect_ending, refuse_idle
from molflt.data.structures.base import ANY_TAGS, with_bar
from molflt.data.structures.in_memory import StructuresInMemory
from molflt.data.structures.sources import exists, files_of
from molflt.evaluation.predictions import open_structures
from molflt.evaluation.relaxation import Relaxed, relax_atoms
from molflt.evaluation.results import write_csv
from molflt.files import atomically, expect_writable, warn
from molflt.pretrained import EnergyPredictor, load
from molflt.pretrained.calculator import calculator_named


def adsorb(
    slabs: list[Path],
    molecule: Path,
    *,
    run: str | None = None,
    out: Path = Path("adsorbed.extxyz"),
    best: int = 10,
    rotation: float = 30.0,
    repeat: tuple[int, int] = (1, 1),
    facet: tuple[int, int, int] | None = None,
    layers: int | None = None,
    vacuum: float | None = None,
    relax: str | None = None,
    fmax: float | None = None,
    steps: int | None = None,
    device: str = "auto",
) -> int:
    """Places a molecule on all distinct sites of slabs and ranks the placements by energy.

    Writes the best placements (which differ from each other in slab, site or orientation), a table
    of all placements (.csv), and a figure of the first five (.png).

    Args:
        slabs: files of slabs with vacuum along the third cell vector, folders of such files, or
            quoted patterns. With --facet, crystals to cut: files, or names of elements.
        molecule: name in ase.build.molecule, such as CH3OH; an element; a file; or smiles:TEXT.
        run: folder of a training run, an exported model, or hf:OWNER/NAME; by default the energy
            model that comes with the package.
        out: file to write, .extxyz.
        best: number of placements to write; for total energies, number for each slab.
        rotation: step of rotations about the surface normal, in degrees.
        repeat: numbers of repetitions, N M, of the slabs along their first two cell vectors.
        facet: Miller indices H K L. For primitive fcc and bcc crystals, they refer to the cubic
            cell.
        layers: number of layers in `ase.build.surface`, with --facet; 4 by default.
        vacuum: distance between the slab and its next image, in Å, with --facet; 15 by default.
        relax: relax the best placements with a potential: a run, an exported potential, or
            module:Class of an ASE calculator. The relaxed placements are ordered by slab and
            relaxed energy.
        fmax: largest force on a free atom at convergence, in eV/Å, with --relax; 0.05 by default.
        steps: maximum number of relaxation steps, with --relax; 200 by default.
        device: auto, cpu, cuda or cuda:N.

    Returns:
        0, or 3 if a relaxation did not converge.
    """
    if facet is None:
        refuse_idle("molflt adsorb", "no --facet", {"layers": layers, "vacuum": vacuum})
    if relax is None:
        refuse_idle("molflt adsorb", "no --relax", {"fmax": fmax, "steps": steps})
    expect_ending(out, ".extxyz")
    for ending in (".extxyz", ".csv", ".png"):
        expect_writable(out.with_suffix(ending), molecule, *files_of([*filter(exists, slabs)]))
    given: dict[str, Atoms] = {}
    for path in slabs:
        there = facet is None or exists(path)
        given |= _read(path) if there else {str(path): element(str(path))}
    if facet is not None:
        size = layers or 4, vacuum or 15.0
        given = {name: cut(one, facet, *size) for name, one in given.items()}
    repeated = [one.repeat((*repeat, 1)) for one in given.values()]
    model = load(run, device)
    if not isinstance(model, EnergyPredictor):
        raise ValueError(f"{run}: expected an energy model; got recipe {model.trained.recipe}")
    calculator: Any = None if relax is None else calculator_named(relax, device)
    share = None if model.domain is None else model.domain.surface
    placed = ranked(model, placements(repeated, str(molecule), rotation=rotation, share=share))
    rows, frames = {}, []
    for ranks in comparable(model, placed):
        for place, (atoms, found) in enumerate(ranks, start=1):
            atoms.info["slab"] = list(given)[atoms.info["slab"]]
            energies = {"energy_eV": found.energy, "uncertainty_eV": found.uncertainty}
            outside = "; ".join(found.outside) or None
            rows[id(atoms)] = {"rank": place, **atoms.info, **energies, "outside": outside}
            atoms.info |= {f"predicted_{k}": one for k, one in energies.items() if one is not None}
        print(_summary([rows[id(atoms)] for atoms, _ in ranks]))
        frames += [atoms for atoms, _ in varied(ranks, best)]
    done: list[Relaxed] = []
    try:
        for atoms in with_bar(frames, "relaxing placements") if calculator is not None else ():
            done += [one := relax_atoms(atoms, calculator, fmax=fmax or 0.05, steps=steps or 200)]
            rows[id(atoms)] |= {"relaxed_energy_eV": one.after, "converged": one.converged}
    finally:  # finished relaxations are also kept after Ctrl-C and errors of the calculator
        order = sorted(done, key=lambda one: (one.atoms.info["slab"], one.after))
        _write(out, [*(one.atoms for one in order), *frames[len(done) :]], list(rows.values()))
    failed = [one.why for one in done if not one.converged]
    if failed:
        warn(f"{out}: {len(failed)} of {len(frames)} relaxations did not converge: {failed[0]}")
    return 3 if failed else 0


def _read(path: Path) -> dict[str, Atoms]:
    data = open_structures(path, False, ANY_TAGS._replace(keep_atoms=True))
    return {f"{data.file(i)} {data.place(i)}": data.to_atoms(i) for i in range(len(data))}


def _summary(rows: Sequence[dict[str, Any]]) -> str:
    first, more = rows[0], " eV"
    if (half := first["uncertainty_eV"]) is not None:
        close = sum(row["energy_eV"] <= first["energy_eV"] + half for row in rows) - 1
        more = f" ± {half:.3f} eV, an interval that contains {close:,} other{'s' * (close != 1)}"
    sites = len({(row["slab"], row["site"]) for row in rows})
    best = f"{first['energy_eV']:.3f}{more}; {first['slab']}, {_place(first)}"
    return f"{len(rows):,} placements on {sites} sites; best: {best}"


def _place(info: dict[str, Any]) -> str:
    return f"{info['site']}, {info['orientation']}, {info['rotation']:g}°"


def _write(out: Path, frames: Sequence[Atoms], rows: Sequence[dict[str, Any]]) -> None:
    from ase.io import write

    with atomically(out) as part:
        write(str(part), frames, format="extxyz")
    write_csv(out.with_suffix(".csv"), rows)
    records, shown = StructuresInMemory(frames[:5], ANY_TAGS), {}
    for number, (record, one) in enumerate(zip(records, frames, strict=False), start=1):
        note = _place(one.info).replace(", ", "\n", 1)
        shown[f"{number}: {one.info['predicted_energy_eV']:.3f} eV\n{note}"] = record
    plots.structure_views(shown, out.with_suffix(".png"))
    print(f"{out}: {len(frames)} placements; all are in {out.with_suffix('.csv')}")
