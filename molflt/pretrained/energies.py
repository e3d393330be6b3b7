"""Prediction of the energies of structures."""

from __future__ import annotations

import hashlib
import json
import platform
import shutil
import tempfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeGuard, cast, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from molflt.atoms import Atoms, Data
from molflt.data.structures import Structures, source_of
from molflt.data.structures.base import ANY_TAGS, Reading, Tags
from molflt.data.structures.domain import DOMAIN, Domain
from molflt.data.structures.in_memory import StructuresInMemory, is_atoms, is_one
from molflt.data.structures.sources import Paths, files_of
from molflt.data.structures.tags import Tagged
from molflt.evaluation.calibration import CALIBRATION, EVALUATE, Calibration, uncertainty_of
from molflt.evaluation.ensemble import ENSEMBLE, EnsembleRegressor
from molflt.evaluation.predictions import Predictions, domain_for, infer, open_structures
from molflt.evaluation.results import finite_row
from molflt.files import atomically, read_json, shown, warn, write_atomically
from molflt.graph import EnergyRegressor
from molflt.graph.computation import CompiledEnergies, compile_energies
from molflt.graph.geometry import Geometry
from molflt.graph.mesh import use_mesh_
from molflt.graph.potential import Potential
from molflt.pretrained.base import Card, Pretrained, Trained

_PACKAGE, _RECORD = "energies.pt2", "energies.json"
_AGAIN = "export the run again, with --compiled true"


class Prediction(NamedTuple):
    """Prediction for one structure."""

    energy: float
    """energy, in eV, of the relaxed structure or, for a potential, of the given structure"""
    uncertainty: float | None = None
    """half the width of the 68 % interval, in eV; None without a calibrated ensemble, and for new
    elements that the calibration does not cover"""
    spread: float | None = None
    """sample standard deviation over the members of an ensemble, in eV; None for one model"""
    relaxed: Atoms | None = None
    """estimate of the relaxed structure, subject to its constraints; None if constraints cannot be
    met, if the model was trained without relaxed positions, and for compiled models"""
    outside: tuple[str, ...] = ()
    """differences between the structure or its energy and the training data"""
    embedding: NDArray[np.float32] | None = None
    """tokens before the readout, (atoms, dim), or (dim,) if pooled; None by default"""
    forces: NDArray[np.float32] | None = None
    """forces (atoms, 3) in eV/Å; None for models that are not potentials"""
    by_adsorbate: tuple[float, ...] | None = None
    """energies, in eV, of the adsorbates on a slab, ordered by their first atoms; their sum is the
    energy. None for compiled models and models that read out all atoms or add a baseline"""


class EnergyPredictor(Pretrained):
    """Predicts energies of structures; see `molflt.load`."""

    models = (EnergyRegressor, EnsembleRegressor)

    @property
    def card(self) -> Card:  # type: ignore[override]  # of the recipe
        """Tags, metric and examples of the model card."""
        fields = ["chemistry", "materials-science", "pytorch-geometric"]
        if self.predicts_forces:
            python = "atoms.calc = molflt.Calculator(model)  # of ASE: energy, forces, stress"
            command = "relax structures.extxyz --run {} --out relaxed.extxyz"
            return Card([*fields, "interatomic-potential", "forces"], "mae", python, command)
        python = (
            'model.predict("structures.extxyz")[0].energy  # eV; also Atoms, lists, PyG batches'
        )
        command = "predict {} structures.extxyz"
        return Card([*fields, "adsorption", "IS2RE"], "mae", python, command)

    def __init__(self, trained: Trained) -> None:
        super().__init__(trained)
        self.domain: Domain | None = None
        if (content := trained.files.get(DOMAIN)) is not None:
            known = Domain.from_json(content, trained.label(DOMAIN))
            self.domain = domain_for(self.model, known)
        self.compiled: nn.Module | None = None

    @property
    def summary(self) -> str:
        trained_on = "" if self.domain is None else f"; trained on {self.domain.describe()}"
        results = self.trained.results.items()
        errors = {split: row.get("mae_eV") for split, row in results if isinstance(row, dict)}
        measured = [f"; MAE {e:.3f} eV on {s}" for s, e in errors.items() if isinstance(e, float)]
        return super().summary + trained_on + "".join(measured[:1])

    def use_compiled(self) -> None:
        """Loads the machine code stored with an exported model, which computes only energies."""
        weights = self.trained.path
        package, record = weights.with_name(_PACKAGE), weights.with_name(_RECORD)
        if not package.is_file() or not record.is_file():
            raise FileNotFoundError(f"{package}: no machine code, or no {_RECORD}; {_AGAIN}")
        compiled_for = read_json(record, "a JSON object", _AGAIN)
        for key, value in _record(weights, package).items():  # the code contains the weights
            if compiled_for.get(key) != value:
                raise ValueError(
                    f"{package}: compiled for {key} {shown(compiled_for.get(key), 40)}; got "
                    f"{shown(value, 40)}; {_AGAIN}"
                )
        self.compiled = CompiledEnergies(cast(EnergyRegressor, self.model), package)

    def save_compiled(self, folder: Path) -> None:
        """Writes machine code for the energies to a folder that `save_pretrained` wrote.

        The code requires a similar processor and the same version of torch; compiling it requires a
        C++ compiler. See `molflt.graph.computation` for models that cannot be compiled.
        """
        weights = Path(folder) / "model.safetensors"
        package, record = weights.with_name(_PACKAGE), weights.with_name(_RECORD)
        record.unlink(missing_ok=True)  # describes older code
        model = cast(EnergyRegressor, self.model)
        with tempfile.TemporaryDirectory() as directory, atomically(package) as part:
            shutil.copyfile(compile_energies(model, Path(directory) / _PACKAGE), part)
        write_atomically(record, json.dumps(_record(weights, package), indent=1).encode())

    @property
    def predicts_positions(self) -> bool:
        """True if the model was trained on relaxed positions."""
        task, domain = self.trained.task, self.domain
        weighted = bool(task.get("position_weight") or task.get("position_weight_final"))
        return weighted and (domain is None or domain.relaxed > 0)

    @property
    def predicts_forces(self) -> bool:
        """True for a potential."""
        return isinstance(self.model, Potential)

    def use_mesh_(self, order: int = 5) -> None:
        """Computes sums over reciprocal nodes on a mesh, which is faster for large cells.

        Args:
            order: order of the splines: 4, 5, 6 or 8; see `molflt.graph.periodic.Auto`.
        """
        if self.compiled is not None:
            raise ValueError(f"mesh_order={order} does not apply to machine code; omit one of them")
        use_mesh_(self.model, order)

    @overload
    def predict(
        self, structures: Paths | Sequence[Any] | Structures, *args: Any, **options: Any
    ) -> list[Prediction]: ...

    @overload
    def predict(self, structures: Atoms | Data, *args: Any, **options: Any) -> Prediction: ...

    def predict(
        self,
        structures: object,
        batch_size: int = 64,
        embedding: Literal["atoms", "pooled"] | None = None,
        tags: Tags | None = None,
        force: bool = False,
    ) -> Prediction | list[Prediction]:
        """Predicts structures and warns if they differ from the training data.

        Args:
            structures: `ase.Atoms`, PyG `Data` or `Batch` (with OC20's tags), a sequence of these,
                a data set, or one or more names or patterns of files or folders.
            batch_size: number of structures per batch.
            embedding: also return the tokens before the readout: "atoms" for all atoms (0 for atoms
                that the model omits), or "pooled" for the mean over the atoms that contribute to
                the energy (atoms with tag > 0 if there are tags, and subsurface atoms that
                model.subsurface near keeps; all atoms for a potential).
            tags: convention of the tags of `ase.Atoms` and of files that ASE reads: oc20 (0
                subsurface, 1 surface, 2 adsorbate) or ase (layer numbers from the top, 0 for
                adsorbates); by default that of training. guess derives the tags of any source from
                the geometry. Potentials do not read tags.
            force: also predict structures without tags or with implausible tags, which models
                trained with tags reject; `outside` contains the reason.

        Returns:
            A prediction for a single structure, or a list in the order of the structures.
        """
        if embedding not in (None, "atoms", "pooled"):
            raise ValueError(f"embedding={embedding!r}; expected atoms, pooled or None")
        if embedding and isinstance(self.model, EnsembleRegressor):
            raise ValueError("embedding requires a single model; got an ensemble; load one run")
        if embedding and self.compiled is not None:
            raise ValueError("embedding does not apply to machine code; load without compiled")
        dataset = self._opened(structures, tags)
        by_atom = ["displacement"] if self.predicts_positions else []
        by_atom += ["embedding"] if embedding else []
        by_atom += ["forces"] if self.predicts_forces else []
        found = self.infer(dataset, batch_size, dataset.path.name, by_atom, force)
        columns = uncertainty_of(self.model, found, self.calibration())
        out = []
        for i in range(len(dataset)):
            atomic = {name: values[i] for name, values in found.by_atom.items()}
            row = finite_row(columns, i)
            tokens = atomic.get("embedding")
            if embedding == "pooled" and tokens is not None:
                if getattr(self.model, "subsurface", True) == "near":
                    tokens = tokens[tokens.any(axis=1)]
                elif not self.predicts_forces:
                    tokens = tokens[Geometry.of_data(dataset[i]).above_subsurface().numpy()]
                tokens = tokens.mean(axis=0)
            moves = atomic.get("displacement")
            prediction = Prediction(
                energy=float(found.energy[i]),
                uncertainty=row.get("uncertainty_eV"),
                spread=row.get("spread_eV"),
                relaxed=None if moves is None else _moved(dataset, i, moves),
                outside=tuple(found.outside[i]),
                embedding=tokens,
                forces=atomic.get("forces"),
                by_adsorbate=found.by_adsorbate[i],
            )
            out.append(prediction)
        return out[0] if is_one(structures) else out

    def reading_of(self, files: Paths | None, tags: Tags | None = None) -> Reading:
        """Returns the options for reading structures; a potential accepts any tags.

        Args:
            files: see :func:`molflt.data.structures.open_dataset`; None for structures in memory.
            tags: convention of the tags; by default that of training.
        """
        if self.predicts_forces:
            if tags is not None:
                raise ValueError(f"tags={tags!r} has no effect on a potential; remove it")
            return ANY_TAGS
        trained = cast("Tags | None", self.trained.task.get("tags"))
        by_ase = files is None or any("tags" in source_of(f).options for f in files_of(files))
        if by_ase or trained == "guess":  # guesses also replace the tags of other sources
            tags = tags or trained
        baseline: Any = self.trained.task.get("baseline_key") if by_ase else None
        surface = self.domain.surface if tags == "guess" and self.domain is not None else None
        return Reading(tags=tags or "oc20", surface=surface, baseline_key=baseline)

    def _opened(self, structures: object, tags: Tags | None) -> Structures:
        if isinstance(structures, Structures):
            if tags == "guess":
                return Tagged(structures, self.reading_of(None, tags).surface)
            if tags is not None:
                raise ValueError(
                    f"tags={tags!r} has no effect on an open data set; pass a Reading to "
                    "molflt.data.structures.open_dataset"
                )
            return structures
        if _are_paths(structures):
            reading = self.reading_of(structures, tags)
            return open_structures(structures, False, reading, trained=self.reading_of(None))
        reading = self.reading_of(None, tags)
        if reading.tags == "guess":
            plain = reading._replace(tags="any", surface=None)
            return Tagged(StructuresInMemory(structures, plain), reading.surface)
        memory = StructuresInMemory(structures, reading)
        if tags == "ase" and not any(map(is_atoms, memory.given)):
            raise ValueError("tags='ase' is for ase.Atoms and files; got PyG data; remove it")
        return memory

    def infer(
        self,
        dataset: Structures,
        batch_size: int,
        name: str,
        by_atom: Collection[str] = (),
        force: bool = False,
    ) -> Predictions:
        """Calls `molflt.evaluation.predictions.infer` with the domain of the training data."""
        if force and self.predicts_forces:
            raise ValueError("force=True has no effect on a potential; remove it")
        model = self.model if self.compiled is None else self.compiled
        return infer(model, dataset, batch_size, name, self.domain, by_atom, force)

    def calibration(self, file: Path | None = None) -> Calibration | None:
        """Returns the calibration of an ensemble, or None if it has no calibration.

        Args:
            file: uncertainty.json of an evaluation of the same runs; by default the file of the run
                or the export.
        """
        model, trained = self.model, self.trained
        if file is not None:
            return Calibration.read(file, model)
        if not isinstance(model, EnsembleRegressor):
            return None
        label = trained.label(f"{ENSEMBLE}/{CALIBRATION}" if trained.path.is_dir() else CALIBRATION)
        if (content := trained.files.get(CALIBRATION)) is None:
            warn(
                f"{label}: missing, or belongs to other weights; {EVALUATE}; until then, only the "
                "spread, spread_eV, is known"
            )
            return None
        return Calibration.from_json(content, label)


def _are_paths(structures: object) -> TypeGuard[Paths]:
    if isinstance(structures, list | tuple) and structures:
        return all(isinstance(path, str | Path) for path in structures)
    return isinstance(structures, str | Path)


def _moved(dataset: Structures, i: int, displacement: NDArray[np.float32]) -> Atoms | None:
    """Returns a structure with moved free atoms, or None if its constraints cannot be met."""
    atoms, free = dataset.to_atoms(i), (~dataset[i].fixed).numpy()
    try:
        atoms.set_positions(atoms.positions + np.where(free[:, None], displacement, 0.0))
    except (RuntimeError, ValueError) as error:  # from constraints that ASE solves iteratively
        kinds = ", ".join(type(constraint).__name__ for constraint in atoms.constraints)
        warn(f"{dataset.where(i)}: no relaxed structure, because {kinds} cannot be met: {error}")
        return None
    return atoms


def _record(weights: Path, package: Path) -> Mapping[str, str]:
    """Returns properties that must not change between compiling and loading the machine code."""
    properties = {
        "torch": torch.__version__,
        "processor": f"{platform.system()} {platform.machine()} "
        f"{torch.backends.cpu.get_cpu_capability()}",
    }
    for name, path in {"weights": weights, "package": package}.items():
        with open(path, "rb") as file:
            properties[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return properties
