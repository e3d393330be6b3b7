"""``molflt predict``: energies of structures in any readable file."""

from __future__ import annotations

import json
import sys
from argparse import SUPPRESS
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from jsonargparse import ArgumentParser
from numpy.typing import NDArray

from molflt.commands.options import normalized
from molflt.data.structures import Reading, Structures
from molflt.data.structures.base import Tags
from molflt.data.structures.in_memory import to_atoms
from molflt.evaluation.ensemble import load_ensemble
from molflt.evaluation.predictions import Predictions, open_structures
from molflt.evaluation.report import csv_text, write_csv
from molflt.files import atomically, write_atomically
from molflt.pretrained import EnergyPredictor, load
from molflt.training.sources import is_trained

__all__ = ["build_parser", "predict"]

_USAGE = "molflt predict [RUN] STRUCTURES [--OPTION VALUE ...]"
_OF_ATOMS = (".extxyz", ".traj")
_SUFFIXES = (".csv", ".json", *_OF_ATOMS)


def predict(
    run: str,
    structures: Path,
    *,
    out: Path | None = None,
    checkpoint: str = "best",
    batch_size: int = 64,
    device: str = "auto",
    skip_bad: bool = False,
    also: list[Path] | None = None,
    calibration: Path | None = None,
    tags: Tags = "oc20",
    compiled: bool = False,
) -> None:
    """Predicts energies, in eV, of the structures in a file: molflt predict [RUN] FILE.

    Says what lies outside of what the model was trained on.

    Args:
        run: folder of a training run, an exported model, or hf:OWNER/NAME; without it, the model
            that comes with the package.
        structures: a file that ASE reads, a compact store, or an OC20 LMDB.
        out: file to write: .csv or .json (sid, formula, number of atoms, energy in eV), or .extxyz
            or .traj (the structures, with the predicted relaxed energy as their energy, and forces
            of a potential); by default the CSV is printed.
        checkpoint: best, last, or a safetensors file.
        batch_size: structures in a batch.
        device: auto, cpu, cuda or cuda:N.
        skip_bad: leave out structures that cannot be used, and list them.
        also: further runs, which together with `run` predict as one model, an ensemble: the mean,
            the standard deviation over the runs (spread_eV) and, calibrated, its 68 % interval
            (uncertainty_eV).
        calibration: uncertainty.json of an evaluation of the same runs; by default that in the
            folder ensemble of `run`, if it is there.
        tags: what tags mean in a file that ASE reads: oc20 (0 subsurface, 1 surface, 2 adsorbate)
            or ase (numbers of layers from the top, 1, 2, ..., and 0 for adsorbates).
        compiled: use the machine code that `molflt export --compiled true` wrote into the folder.

    Raises:
        FileNotFoundError: if the run, its checkpoint, or the structures are missing.
        ValueError: if `out` has another ending, there is nothing to predict, the runs make no
            ensemble, the model predicts no energies, or the calibration is not theirs.
    """
    structures = Path(structures)
    if out is not None and out.suffix not in _SUFFIXES:
        raise ValueError(
            f"{out}: expected a name that ends in {', '.join(_SUFFIXES)}; "
            f"got {out.suffix or 'no ending'!r}"
        )
    if not run and is_trained(structures):
        raise ValueError(
            f"{structures}: a trained model; expected structures to predict; got none; molflt "
            "predict RUN STRUCTURES"
        )
    model = _load(run, checkpoint, device, also, compiled)
    dataset = open_structures(structures, skip_bad, Reading(tags=tags))
    if model.about is not None:
        print(f"molflt: {model.summary}", file=sys.stderr)
    atoms = out is not None and out.suffix in _OF_ATOMS
    forces = ["forces"] if atoms and model.predicts_forces else []
    found = model.infer(dataset, batch_size, structures.name, forces)
    columns = {"energy_eV": found.energy, **model.uncertainties(found, calibration)}
    if out is None:
        print(csv_text(_rows(found, columns)), end="")
        return
    if out.suffix == ".csv":
        write_csv(out, _rows(found, columns))
    elif out.suffix == ".json":
        write_atomically(out, (json.dumps(_rows(found, columns), indent=1) + "\n").encode())
    else:
        _write_atoms(out, dataset, columns, found)
    low, high = found.energy.min(), found.energy.max()
    ranges = [f"{len(found.energy):,} energies, {low:.3f} to {high:.3f} eV"]
    for name, values in list(columns.items())[1:]:
        ranges.append(f"{name} {values.min():.3f} to {values.max():.3f}")
    print(f"{out}: {'; '.join(ranges)}")


def build_parser(words: Sequence[str] = ()) -> ArgumentParser:
    """Parser of ``molflt predict``, whose first word may be left out.

    Args:
        words: the command line.
    """
    whole = ArgumentParser(usage=_USAGE)
    whole.add_function_arguments(predict, as_group=False, as_positional=True)
    given = [word for word in normalized(words, whole) if not word.startswith("-")]
    if len(given) != 1:
        return whole
    parser = ArgumentParser(usage=_USAGE)
    parser.add_argument("--run", default="", help=SUPPRESS)
    parser.add_function_arguments(predict, as_group=False, as_positional=True, skip={"run"})
    return parser


def _load(
    run: str, checkpoint: str, device: str, also: list[Path] | None, compiled: bool
) -> EnergyPredictor:
    if also == []:  # an empty list asks for an ensemble all the same
        load_ensemble([Path(run)])
    device = "cpu" if compiled and device == "auto" else device
    model = load(run or None, device, checkpoint=checkpoint, also=also or (), compiled=compiled)
    if not isinstance(model, EnergyPredictor):
        raise ValueError(
            f"{run}: a model of the recipe {model.trained.recipe}; expected one that predicts "
            "energies; molflt generate writes text, molflt evaluate judges images"
        )
    return model


def _rows(
    found: Predictions, columns: Mapping[str, NDArray[np.float64]]
) -> list[dict[str, object]]:
    return [
        {
            "index": i,
            "sid": int(sid),
            "formula": formula,
            "natoms": int(natoms),
            "outside": "; ".join(outside) or None,
            **{name: float(values[i]) for name, values in columns.items()},
        }
        for i, (sid, formula, natoms, outside) in enumerate(
            zip(found.sid, found.formula, found.natoms, found.outside, strict=True)
        )
    ]


def _write_atoms(
    out: Path,
    dataset: Structures,
    columns: Mapping[str, NDArray[np.float64]],
    found: Predictions,
) -> None:
    """Writes structures with their energies; the file appears complete or not at all."""
    from ase.calculators.singlepoint import SinglePointCalculator
    from ase.io import write

    frames = []
    for i, energy in enumerate(columns["energy_eV"]):
        atoms = to_atoms(dataset[i])
        more = {name: float(values[i]) for name, values in columns.items() if name != "energy_eV"}
        atoms.info.update(more)
        if found.outside[i]:
            atoms.info["outside"] = "; ".join(found.outside[i])
        by_atom = {name: values[i] for name, values in found.by_atom.items()}
        atoms.calc = SinglePointCalculator(atoms, energy=float(energy), **by_atom)
        frames.append(atoms)
    with atomically(out) as part:
        write(str(part), frames, format=out.suffix.removeprefix("."))
