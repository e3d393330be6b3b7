"""``molflt adsorb``: places a molecule on slabs and ranks the placements."""

from collections.abc import Sequence
from itertools import product
from os.path import commonprefix
from pathlib import Path
from typing import Any

from ase import Atoms
from ase.data import atomic_numbers
from ase.io import write

from molflt import plots
from molflt.adsorption import cut, element, placements, ranked, varied
from molflt.commands.options import refuse_idle
from molflt.data.structures.ase_fields import warn_of_lost
from molflt.data.structures.base import ANY_TAGS, with_bar
from molflt.data.structures.in_memory import StructuresInMemory
from molflt.data.structures.sources import exists, files_of
from molflt.evaluation.predictions import open_structures
from molflt.evaluation.relaxation import Relaxed, relax_atoms
from molflt.evaluation.results import write_csv
from molflt.files import atomically, expect_ending, expect_writable, warn
from molflt.plots.figure import plain
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
    facet: tuple[int, ...] | None = None,
    layers: int | None = None,
    vacuum: float | None = None,
    relax: str | None = None,
    fmax: float | None = None,
    steps: int | None = None,
    device: str = "auto",
) -> int:
    """Places a molecule on all distinct sites of slabs and ranks the placements by energy.

    Writes the best placements on each slab (which differ in site or orientation), a table of all
    placements (.csv), and a figure (.png) of the first five or, with several slabs, of the best
    placement on each slab.

    Args:
        slabs: files of slabs with vacuum along the third cell vector, folders of such files, or
            quoted patterns. With --facet, crystals to cut: files, or names of elements.
        molecule: name, such as CH3OH or COOH; an element; a file; or smiles:TEXT.
        run: folder of a training run, an exported model, or hf:OWNER/NAME; by default the energy
            model that comes with the package.
        out: file to write, .extxyz or .traj; an existing file is replaced.
        best: number of placements to write for each slab.
        rotation: step of rotations about the surface normal, in degrees.
        repeat: numbers of repetitions, N M, of the slabs along their first two cell vectors.
        facet: Miller indices H K L of one facet, or of several: 1,1,1 1,0,0. They refer to the
            cubic cell for primitive fcc and bcc crystals.
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
    expect_ending(out, ".extxyz", ".traj")
    for ending in (out.suffix, ".csv", ".png"):
        expect_writable(out.with_suffix(ending), molecule, *files_of([*filter(exists, slabs)]))
    by_name = _slabs(slabs, facet, layers or 4, vacuum or 15.0)
    repeated = by_name if (*repeat,) == (1, 1) else _repeated(by_name, repeat)
    model = load(run, device)
    if not isinstance(model, EnergyPredictor):
        raise ValueError(f"{run}: expected an energy model; got recipe {model.trained.recipe}")
    calculator: Any = None if relax is None else calculator_named(relax, device)
    share = None if model.domain is None else model.domain.surface
    placed = placements(repeated, str(molecule), rotation=rotation, share=share)
    rows, frames = {}, []  # rows of the table by id of the placement, placements to write
    for ranks in _ranked_by_slab(model, placed, molecule):
        for rank, (atoms, predicted) in enumerate(ranks, start=1):
            energies = {"energy_eV": predicted.energy, "uncertainty_eV": predicted.uncertainty}
            outside = "; ".join(predicted.outside) or None
            rows[id(atoms)] = {"rank": rank, **atoms.info, **energies, "outside": outside}
            atoms.info |= {f"predicted_{k}": x for k, x in energies.items() if x is not None}
        print(_summary([rows[id(atoms)] for atoms, _ in ranks]))
        frames += [atoms for atoms, _ in varied(ranks, best)]
    warn_of_lost(out, frames)
    relaxed, order = list[Relaxed](), [*by_name].index
    _write(out, frames, [*rows.values()])
    try:
        for atoms in with_bar([] if calculator is None else [*frames], "relaxing placements"):
            result = relax_atoms(atoms, calculator, fmax=fmax or 0.05, steps=steps or 200)
            rows[id(atoms)] |= {"relaxed_energy_eV": result.after, "converged": result.converged}
            relaxed.append(result)
            relaxed.sort(key=lambda x: (order(x.atoms.info["slab"]), x.atoms.calc is None, x.after))
            frames[: len(relaxed)] = [result.atoms for result in relaxed]
            _write(out, frames, [*rows.values()])  # files are complete if the process is killed
    finally:
        _draw(frames, out.with_suffix(".png"))
        print(f"{out}: {len(frames)} placements; all are in {out.with_suffix('.csv')}")
    if failed := [result.why for result in relaxed if not result.converged]:
        warn(f"{out}: {len(failed)} of {len(frames)} relaxations did not converge: {failed[0]}")
    return 3 if failed else 0


def _repeated(slabs: dict[str, Atoms], repeat: tuple[int, int]) -> dict[str, Atoms]:
    try:
        return {name: slab.repeat((*repeat, 1)) for name, slab in slabs.items()}
    except NotImplementedError:
        raise ValueError(
            f"--repeat {repeat[0]} {repeat[1]}: expected constraints on single atoms; got others, "
            "which ASE cannot repeat, such as bond lengths; remove them"
        ) from None


def _ranked_by_slab(
    model: EnergyPredictor, placed: Sequence[Atoms], molecule: Path
) -> list[list[tuple[Atoms, Any]]]:
    charged = [atoms.info for atoms in placed if atoms.info.get("charge")]
    if charged and getattr(model.model, "charge_share", None) is None:
        raise ValueError(
            f"{charged[0]['slab']} with {molecule}: expected a total charge of 0; got "
            f"{charged[0]['charge']:g} e, which only potentials with model.total_charge read"
        )
    by_slab: dict[str, list[tuple[Atoms, Any]]] = {atoms.info["slab"]: [] for atoms in placed}
    for atoms, predicted in ranked(model, placed):
        by_slab[atoms.info["slab"]].append((atoms, predicted))
    return [*by_slab.values()]


def _slabs(
    paths: Sequence[Path], facets: tuple[int, ...] | None, layers: int, vacuum: float
) -> dict[str, Atoms]:
    """Reads slabs by name; with `facets`, reads or builds crystals and cuts them."""
    names = [path for path in paths if not exists(path)]
    if facets is None and (symbols := [*filter(atomic_numbers.get, map(str, names))]):
        raise ValueError(f"{symbols[0]}: expected a file of slabs; add --facet to cut this element")
    structures: dict[str, Atoms] = {}
    for path in files_of([path for path in paths if facets is None or path not in names]):
        data = open_structures(path, False, ANY_TAGS._replace(keep_atoms=True))
        structures |= {f"{path} {i}": data.to_atoms(i) for i in range(len(data))}
    if facets is None:
        return structures
    structures |= {str(name): element(str(name)) for name in names}
    slabs = {}
    for (name, crystal), i in product(structures.items(), range(0, len(facets) or 1, 3)):
        try:
            slabs[f"{name} {facets[i : i + 3]}"] = cut(crystal, facets[i : i + 3], layers, vacuum)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    return slabs


def _summary(rows: Sequence[dict[str, Any]]) -> str:
    first, interval = rows[0], ""
    if (half_width := first["uncertainty_eV"]) is not None:
        count = sum(row["energy_eV"] <= first["energy_eV"] + half_width for row in rows) - 1
        others = "1 other" if count == 1 else f"{count:,} others"
        interval = f" ± {half_width:.3f} eV, an interval that contains {others}"
    best = f"{first['energy_eV']:.3f}{interval or ' eV'}; {first['slab']}, {_site(first)}"
    return f"{len(rows):,} placements on {len({row['site'] for row in rows})} sites; best: {best}"


def _site(info: dict[str, Any]) -> str:
    return f"{info['site']}, {info['orientation']}, {info['rotation']:g}°"


def _write(out: Path, frames: Sequence[Atoms], rows: Sequence[dict[str, Any]]) -> None:
    with atomically(out) as file:
        write(str(file), frames, format=out.suffix[1:])
    write_csv(out.with_suffix(".csv"), rows)


def _draw(frames: Sequence[Atoms], file: Path) -> None:
    """Draws the first five placements on one slab, or the first one on each of up to 20 slabs."""
    records, views = StructuresInMemory(frames, ANY_TAGS), {}
    first = {atoms.info["slab"]: i for i, atoms in reversed([*enumerate(frames)])}
    several = len(first) > 1
    # commonpath would refuse a mixture of absolute and relative paths
    start = commonprefix([*first]).rfind("/") + 1  # noqa: RUF071
    for i in sorted(first.values())[:20] if several else range(min(5, len(frames))):
        info = frames[i].info
        slab = f"{plain(info['slab'][start:])}\n" if several else ""
        site = _site(info).replace(", ", "\n", 1)
        views[f"{slab}{i + 1}: {info['predicted_energy_eV']:.3f} eV\n{site}"] = records[i]
    plots.structure_views(views, file)
