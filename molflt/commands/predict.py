"""``molflt predict``: predictions for structures, sentences and images."""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from molflt.commands.merge import ENDINGS, noted
from molflt.commands.options import refuse_idle
from molflt.data.batches import Shard
from molflt.data.images.files import read_images
from molflt.data.structures import Structures
from molflt.data.structures.ase_fields import drop_labels_, warn_of_lost
from molflt.data.structures.base import Part, Tags
from molflt.data.structures.sources import exists, files_of
from molflt.data.text.parallel import read_lines
from molflt.evaluation.calibration import Calibration, uncertainty_of
from molflt.evaluation.predictions import Predictions, counted_reasons, open_structures
from molflt.evaluation.results import finite_row, write_csv
from molflt.files import (
    atomically,
    counted,
    csv_text,
    expect_ending,
    expect_writable,
    write_atomically,
)
from molflt.pretrained import EnergyPredictor, GapFiller, ImageLabeler, SentenceLabeler, load
from molflt.pretrained.base import Pretrained
from molflt.training.checkpoint import is_trained

_STRUCTURE_FILES = (".extxyz", ".traj")
_TABLES = (".csv", ".json")


def predict(
    file: list[Path],
    *,
    run: str | None = None,
    out: Path | None = None,
    checkpoint: str | None = None,
    batch_size: int | None = None,
    device: str = "auto",
    skip_bad: bool = False,
    also: list[Path] | None = None,
    calibration: Path | None = None,
    tags: Tags | None = None,
    force: bool = False,
    mesh_order: int | None = None,
    compiled: bool = False,
    shard: str | None = None,
) -> None:
    """Predicts energies of structures, in eV, or classes of sentences or images.

    Differences between the structures and the training data are printed.

    Args:
        file: structures: files that ASE reads, compact stores, OC20 LMDBs, folders of these, or
            quoted patterns such as 'runs/*/CONTCAR'; all frames are predicted. Sentences: a text
            file with one sentence, or two separated by a tab, per line; for masked language models,
            lines with [MASK]. Images: an image, a folder of images, or an idx file. If the first of
            several names is a model, it is used as `run`.
        run: folder of a training run, an exported model, or hf:OWNER/NAME; by default the energy
            model that comes with the package.
        out: file to write. .csv or .json: for structures the index, the file if there are several,
            sid or name, formula, number of atoms, differences from training and energy in eV.
            .extxyz or .traj: structures with the predicted energy and, for a potential, the forces
            and, if they are periodic along all axes, the stress. An existing file is replaced. By
            default the CSV is printed.
        checkpoint: best (the default), last, or a safetensors file; requires a training run.
        batch_size: number of structures, sentences or images per batch, 64 by default.
        device: auto, cpu, cuda or cuda:N.
        skip_bad: skip and list invalid structures; only for energy models.
        also: further runs that form an ensemble with `run`; only for energy models. The output
            contains the mean, the standard deviation over the runs (spread_eV) and, if calibrated,
            half the width of the 68 % interval (uncertainty_eV).
        calibration: uncertainty.json of an evaluation of the same runs; by default the file in the
            subfolder ensemble of `run`, if it exists; only for energy models.
        tags: convention of the tags in files that ASE reads: oc20 (0 subsurface, 1 surface, 2
            adsorbate) or ase (layer numbers from the top, 1, 2, ..., and 0 for adsorbates); by
            default that of training. guess derives the tags of any source from the geometry (bonds,
            constraints, heights) and prints a summary.
        force: also predict structures without tags or with implausible tags, which models trained
            with tags reject.
        mesh_order: for cells of thousands of atoms, compute sums over reciprocal nodes on a mesh
            with splines of order 4, 5, 6 or 8; attention errors are at most 3e-3, 6e-4, 6e-6 or
            2e-7, respectively.
        compiled: load the machine code that `molflt export --compiled` wrote; only from folders you
            trust.
        shard: I/N, the I-th of N parts of the structures, for N processes or machines. With --out
            energies.csv, each process writes energies.I-of-N.csv (or .json, .extxyz); molflt merge
            energies.csv joins these files into the file of a single process.
    """
    run, files = _model_and_files(run, file)
    if shard is not None and out is None:
        raise ValueError(f"option --shard {shard}: expected --out FILE; got none")
    expect_ending(out, *(_TABLES + _STRUCTURE_FILES if shard is None else ENDINGS))
    part = None if shard is None else Shard.of(shard)
    device = "cpu" if compiled and device == "auto" else device
    model = load(run, device, checkpoint=checkpoint, also=also or (), compiled=compiled)
    if out is not None:
        inputs = files_of(files) if isinstance(model, EnergyPredictor) else files
        for output in (out, part.path(out)) if part else (out,):  # molflt merge writes `out`
            expect_writable(output, *inputs)
    if not isinstance(model, EnergyPredictor):
        values = {"skip_bad": skip_bad or None, "also": also, "calibration": calibration}
        more = {"mesh_order": mesh_order, "tags": tags, "shard": shard, "force": force or None}
        more |= {"batch_size": batch_size if isinstance(model, GapFiller) else None}
        refuse_idle(model.name, f"a model of the recipe {model.trained.recipe}", {**values, **more})
        return _label(model, files, out, batch_size or 64)
    batch_size = batch_size or 64
    if mesh_order is not None:
        model.use_mesh_(mesh_order)
    writes_structures = out is not None and out.suffix in _STRUCTURE_FILES
    reading = model.reading_of(files, tags)._replace(keep_atoms=writes_structures)
    domain = None if force else model.domain
    dataset = open_structures(files, skip_bad, reading, model.model, domain, model.reading_of(None))
    calibrated = model.calibration(calibration)
    note: dict[str, object] = {}
    if part is not None and out is not None:
        options: dict[str, object] = {"mesh_order": mesh_order, "compiled": compiled}
        options |= {"batch_size": batch_size, "tags": reading.tags}
        options |= {"calibration": calibrated.label} if calibrated else {}
        indices = part.indices(dataset.natoms, batch_size)
        note = noted(model.model, dataset, len(indices), **options)
        dataset, out = Part(dataset, indices), part.path(out)
    name = files[0].name if len(files) == 1 else f"{len(files)} files"
    _predict_energies(model, dataset, name, batch_size, force, calibrated, note, out)


def _predict_energies(
    model: EnergyPredictor,
    dataset: Structures,
    name: str,
    batch_size: int,
    force: bool,
    calibration: Calibration | None,
    note: Mapping[str, object],
    out: Path | None,
) -> None:
    """Writes energies and their uncertainties to `out`, or prints them as CSV if it is None."""
    if model.about is not None:
        print(f"molflt: {model.summary}", file=sys.stderr)
    writes_structures = out is not None and out.suffix in _STRUCTURE_FILES
    by_atom = ["forces", "stress"] if writes_structures and model.predicts_forces else []
    predictions = model.infer(dataset, batch_size, name, by_atom, force)
    columns = {"energy_eV": predictions.energy}
    columns |= uncertainty_of(model.model, predictions, calibration)
    rows = _rows(dataset, predictions, columns, note)
    if out is not None and writes_structures:
        _write_structures(out, dataset, rows, predictions)
    else:
        _write_rows(out, rows)
    if out is not None:
        print(f"{out}: {_summary(columns, predictions)}")


def _label(model: Pretrained, files: Sequence[Path], out: Path | None, batch_size: int) -> None:
    """Predicts gaps, classes or scores of text, or classes of images."""
    expect_ending(out, *_TABLES)
    if not isinstance(model, GapFiller | ImageLabeler | SentenceLabeler):
        raise ValueError(f"{model.name}: the model generates text or images; use molflt generate")
    if len(files) > 1:
        raise ValueError(f"{model.name}: expected one file or folder to predict; got {len(files)}")
    if isinstance(model, GapFiller):
        rows = list(_gaps(model, files[0]))
    elif isinstance(model, SentenceLabeler):
        rows = _sentences(model, files[0], batch_size)
    else:
        rows = list(_images(model, files[0], batch_size))
    _write_rows(out, rows)


def _model_and_files(run: str | None, files: list[Path]) -> tuple[str | None, list[Path]]:
    """Returns the model and the files; the model may be the first of several paths."""
    if run is not None:
        return run, files
    first = files[0]
    is_model = is_trained(first)
    if len(files) > 1 and (is_model or first.suffix == ".yaml" or not exists(first)):
        return str(first), files[1:]
    if is_model:
        raise ValueError(
            f"{first}: a trained model; expected a file to predict after it; got none; the "
            "command is molflt predict RUN FILE"
        )
    return None, files


def _write_rows(out: Path | None, rows: Sequence[Mapping[str, object]]) -> None:
    if out is None:
        print(csv_text(rows), end="")
    elif out.suffix == ".csv":
        write_csv(out, rows)
    else:
        write_atomically(out, (json.dumps(rows, indent=1) + "\n").encode())


def _summary(columns: Mapping[str, NDArray[np.float64]], predictions: Predictions) -> str:
    """Describes the range of each column, and energies far outside the training range."""
    energy = columns["energy_eV"]
    count = counted(len(energy), "structure")
    parts = [f"energies of {count}, {energy.min():.3f} to {energy.max():.3f} eV"]
    for name, values in list(columns.items())[1:]:
        if len(finite := values[np.isfinite(values)]):
            parts.append(f"{name} {finite.min():.3f} to {finite.max():.3f}")
    outside = predictions.outside
    reasons = [[text for text in texts if text.startswith("energy: ")] for texts in outside]
    return "; ".join([*parts, *counted_reasons(reasons)])


def _rows(
    dataset: Structures,
    predictions: Predictions,
    columns: Mapping[str, NDArray[np.float64]],
    note: Mapping[str, object],
) -> list[dict[str, object]]:
    """Returns a row per structure, whose keys depend on this structure only, as merging needs."""
    rows = []
    for i, energies in enumerate(predictions.by_adsorbate):
        row = {
            "index": dataset.place(i),
            **({"file": str(dataset.file(i))} if len(dataset.files) > 1 else {}),
            **note,
            "sid": dataset.name(i, int(predictions.sid[i])),
            "formula": predictions.formula[i],
            "natoms": int(predictions.natoms[i]),
            "outside": "; ".join(predictions.outside[i]) or None,
            **finite_row(columns, i),
        }
        if energies is not None and len(energies) > 1:
            row["by_adsorbate_eV"] = " ".join(f"{energy:.6f}" for energy in energies)
        rows.append(row)
    return rows


def _write_structures(
    out: Path, dataset: Structures, rows: Sequence[Mapping[str, object]], predictions: Predictions
) -> None:
    from ase.calculators.singlepoint import SinglePointCalculator
    from ase.io import write
    from ase.stress import full_3x3_to_voigt_6_stress

    frames = []
    for i, row in enumerate(rows):
        atoms = dataset.to_atoms(i)
        drop_labels_(atoms)
        info = {k: v for k, v in row.items() if k not in ("formula", "natoms", "energy_eV")}
        origin = {k: info.pop(k) for k in ("index", "file", "shard") if k in info}
        if len(origin) > 1:  # an index alone is the position in the file
            info |= {f"molflt_{name}": value for name, value in origin.items()}
        atoms.info |= {name: value for name, value in info.items() if value is not None}
        by_atom = {name: values[i] for name, values in predictions.by_atom.items()}
        stress = by_atom.pop("stress", None)
        if stress is not None and atoms.pbc.all():
            by_atom["stress"] = full_3x3_to_voigt_6_stress(stress[0])
        energy = float(predictions.energy[i])
        atoms.calc = SinglePointCalculator(atoms, energy=energy, **by_atom)
        frames.append(atoms)
    with atomically(out) as part:
        write(str(part), frames, format=out.suffix.removeprefix("."))
    warn_of_lost(out, frames)


def _gaps(model: GapFiller, source: Path) -> Iterator[dict[str, object]]:
    for number, line in enumerate(read_lines(str(source)), 1):
        try:
            gaps = model.fill(line)
        except ValueError as error:
            raise ValueError(f"{source}: line {number}: {error}") from None
        for gap, guesses in enumerate(gaps, 1):
            for rank, (piece, probability) in enumerate(guesses, 1):
                row = {"line": number, "gap": gap, "rank": rank, "piece": piece}
                yield {**row, "probability": probability}


def _sentences(model: SentenceLabeler, source: Path, batch_size: int) -> list[dict[str, object]]:
    lines = [tuple(line.split("\t")) for line in read_lines(str(source))]
    columns = len(lines[0])
    for number, cells in enumerate(lines, 1):
        if len(cells) != columns or columns > 2 or not all(cells):
            raise ValueError(
                f"{source}: line {number}: expected a sentence, or two separated by a tab, and as "
                f"many as in line 1, {columns}; got {len([*filter(None, cells)])}"
            )
    texts = [(cells[0], cells[1]) if columns == 2 else cells[0] for cells in lines]
    labels = enumerate(model.classify(texts, batch_size=batch_size), 1)
    if model.model.classes == 1:  # a regression, such as of similarity
        return [{"line": number, "score": label.probability} for number, label in labels]
    return [
        {"line": number, "label": label.name, "probability": label.probability}
        for number, label in labels
    ]


def _images(model: ImageLabeler, source: Path, batch_size: int) -> Iterator[dict[str, object]]:
    side, channels = model.model.image_size, model.model.channels
    resize: Any = model.trained.task.get("resize") or side
    images = read_images(source, side, channels, resize)
    while batch := list(islice(images, batch_size)):
        labels = model.classify(torch.stack([image for _, image in batch]), batch_size)
        for (name, _), label in zip(batch, labels, strict=True):
            yield {"image": name, "label": label.name, "probability": label.probability}
