"""Energies of structures, predicted by a trained model."""

from __future__ import annotations

import sys
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeGuard, cast, overload

import numpy as np
from numpy.typing import NDArray
from torch import nn

from molflt.data.structures import Structures, source_of
from molflt.data.structures.base import ANY_TAGS, AS_IT_IS, Reading, Tags
from molflt.data.structures.domain import DOMAIN, Domain
from molflt.data.structures.in_memory import StructuresInMemory, is_one
from molflt.data.structures.sources import Paths, files_of
from molflt.data.structures.tags import Tagged
from molflt.evaluation.calibration import Calibration
from molflt.evaluation.ensemble import ENSEMBLE, EnsembleRegressor
from molflt.evaluation.predictions import Predictions, infer, open_structures
from molflt.evaluation.uncertainty import CALIBRATION, calibration_of, expect_theirs, uncertainty_of
from molflt.graph import EnergyRegressor
from molflt.graph.geometry import Geometry
from molflt.graph.heads import by_contact
from molflt.graph.mesh import use_mesh_
from molflt.graph.potential import Potential
from molflt.pretrained.base import Pretrained
from molflt.pretrained.compiled import load_compiled, save_compiled
from molflt.pretrained.trained import Trained

if TYPE_CHECKING:
    from ase import Atoms
    from torch_geometric.data import Data

__all__ = ["EnergyPredictor", "Prediction"]

_Energies = NDArray[np.float64]


class Prediction(NamedTuple):
    """A model's prediction for one structure."""

    energy: float
    """of the relaxed structure, eV, as the labels of training; of a potential, of this structure"""
    uncertainty: float | None = None
    """eV, made to hold 68 % of the errors; None unless an ensemble was calibrated"""
    spread: float | None = None
    """standard deviation over the members of an ensemble, eV; None for one model"""
    relaxed: Atoms | None = None
    """guess of the relaxed structure, by its constraints; None where they cannot be met, or
    training gave no relaxed positions"""
    outside: tuple[str, ...] = ()
    """differences of the structure, and of its energy, from all that was trained on"""
    embedding: NDArray[np.float32] | None = None
    """(atoms, dim), or pooled (dim,); None unless it was asked for"""
    forces: NDArray[np.float32] | None = None
    """(atoms, 3), eV/Å, of a potential; None of other models, whose energies have no forces"""
    by_adsorbate: tuple[float, ...] | None = None
    """energies of the adsorbates of a slab, in the order of their first atoms, eV, which sum to the
    energy; None of models that read all atoms"""


class EnergyPredictor(Pretrained):
    """Energies of relaxed structures from initial ones; `molflt.load` makes it."""

    models = (EnergyRegressor, EnsembleRegressor)

    def __init__(self, trained: Trained) -> None:
        super().__init__(trained)
        held = trained.files.get(DOMAIN)
        known = None if held is None else Domain.from_json(held, trained.label(DOMAIN))
        if known is not None and self.predicts_forces:
            known = known.without_tags()
        if known is not None:
            known = replace(known, zero=by_contact(self.model))
        self.domain: Domain | None = known
        self.compiled: nn.Module | None = None

    @property
    def summary(self) -> str:
        trained_on = "" if self.domain is None else f"; trained on {self.domain.describe()}"
        return super().summary + trained_on + self._measured

    @property
    def _measured(self) -> str:
        """Its error on the first split that it was evaluated on, if it was."""
        for split, row in self.trained.results.items():
            error = row.get("mae_eV") if isinstance(row, dict) else None
            if isinstance(error, float):
                return f"; MAE {error:.3f} eV on {split}"
        return ""

    def use_compiled(self) -> None:
        """Computes energies with the machine code beside an exported model, and nothing else.

        Raises:
            FileNotFoundError: there is none.
            ValueError: it is not of these weights, this torch and this processor.
        """
        if not self.trained.path.is_file():
            raise ValueError(
                f"{self.trained.path}: a run has no machine code; expected an exported model; "
                "molflt export RUN FOLDER --compiled true"
            )
        self.compiled = load_compiled(self.model, self.trained.path)

    def save_compiled(self, folder: Path) -> list[Path]:
        """Writes machine code of the energies beside what `save_pretrained` has written.

        It runs faster by a factor, on processors like this one, with this version of torch.

        Raises:
            RuntimeError: without a C++ compiler.
            ValueError: a model that cannot be compiled, see `molflt.graph.computation`.
        """
        return save_compiled(self.model, Path(folder) / "model.safetensors")

    @property
    def predicts_positions(self) -> bool:
        """Whether training has taught it the way to the relaxed positions."""
        task, domain = self.trained.task, self.domain
        weights = [task.get(f"position_weight{end}") for end in ("", "_final")]
        return any(weights) and (domain is None or domain.relaxed > 0)

    @property
    def predicts_forces(self) -> bool:
        """Whether it is a potential."""
        return isinstance(self.model, Potential)

    def use_mesh_(self, order: int = 5) -> None:
        """Computes sums over reciprocal nodes on a mesh from now on: for large cells.

        The model stays as it was trained; see `molflt.graph.mesh.use_mesh_`.

        Args:
            order: of the splines: 4, 5, 6 or 8, for errors of attention up to 3e-3, 6e-4, 6e-6 and
                2e-7.

        Raises:
            ValueError: an unknown order, or a model without reciprocal nodes.
        """
        if self.compiled is not None:
            raise ValueError(f"mesh_order={order}: machine code has no mesh; leave one of them out")
        use_mesh_(self.model, order)

    @overload
    def predict(
        self,
        structures: str | Path | list[Any] | tuple[Any, ...],
        batch_size: int = ...,
        embedding: Literal["atoms", "pooled"] | None = ...,
        tags: Tags | None = ...,
        force: bool = ...,
    ) -> list[Prediction]: ...

    @overload
    def predict(
        self,
        structures: Atoms | Data,
        batch_size: int = ...,
        embedding: Literal["atoms", "pooled"] | None = ...,
        tags: Tags | None = ...,
        force: bool = ...,
    ) -> Prediction: ...

    @overload
    def predict(
        self,
        structures: object,
        batch_size: int = ...,
        embedding: Literal["atoms", "pooled"] | None = ...,
        tags: Tags | None = ...,
        force: bool = ...,
    ) -> list[Prediction]: ...

    def predict(
        self,
        structures: object,
        batch_size: int = 64,
        embedding: Literal["atoms", "pooled"] | None = None,
        tags: Tags | None = None,
        force: bool = False,
    ) -> Prediction | list[Prediction]:
        """Predicts structures; warns of those that lie outside of what was trained on.

        Args:
            structures: `ase.Atoms`, PyG's `Data` or `Batch` (whose tags are OC20's), any number of
                these, a data set, or a file, folder or pattern of names that holds one, or
                several of these.
            batch_size: structures in a batch.
            embedding: also give the tokens that energies are read from: of "atoms" (0 for those
                that the model leaves out), or "pooled", their mean over the atoms that the energy
                sums over: those with tag > 0 where there are tags; of a potential, all.
            tags: what the tags of `ase.Atoms` and of ASE's files mean: oc20 (0 subsurface, 1
                surface, 2 adsorbate) or ase (numbers of layers from the top, and 0 for
                adsorbates); guess finds them from the geometry, in any source; None for what they
                meant in training. Potentials read none.
            force: predict also structures without tags, or with tags that cannot be meant, by a
                model whose training structures all had tags. Their `outside` says so.

        Returns:
            For one structure its prediction, else a list in the order of the structures.

        Raises:
            TypeError: something else than structures.
            ValueError: naming the structure that cannot be used, or whose tags cannot be meant, or
                an embedding of an ensemble.
        """
        if embedding not in (None, "atoms", "pooled"):
            raise ValueError(f"embedding={embedding!r}; expected atoms, pooled or None")
        if embedding and isinstance(self.model, EnsembleRegressor):
            raise ValueError("embedding: expected one model; got an ensemble; load one of its runs")
        if embedding and self.compiled is not None:
            raise ValueError("embedding: machine code has energies alone; load without compiled")
        dataset = self._opened(structures, tags)
        kept = ["displacement"] * self.predicts_positions + ["embedding"] * bool(embedding)
        kept += ["forces"] * self.predicts_forces
        found = self.infer(dataset, batch_size, dataset.path.name, kept, force)
        columns = uncertainty_of(self.model, found, self.calibration())
        out = [self._prediction(i, dataset, found, columns, embedding) for i in range(len(dataset))]
        return out[0] if is_one(structures) else out

    def reading_of(self, files: Paths | None, tags: Tags | None = None) -> Reading:
        """How to read structures: by default tags mean what they meant in training.

        A potential takes any tags, unless they are said to be layers, which are checked.

        Args:
            files: as for :func:`molflt.data.structures.open_dataset`; None for structures in
                memory.
            tags: what they mean instead.

        Raises:
            FileNotFoundError: if there is nothing.
            ValueError: a file of an unknown kind.
        """
        if tags == "guess" and self.predicts_forces:
            raise ValueError("tags='guess' has no effect: a potential reads no tags; leave it out")
        found = [] if files is None else files_of(files)
        if tags is None and all("tags" in source_of(file).options for file in found):
            tags = cast("Tags | None", self.trained.task.get("tags"))
        if self.predicts_forces and tags in (None, "oc20", "guess"):
            return ANY_TAGS
        surface = self.domain.surface if tags == "guess" and self.domain is not None else None
        return AS_IT_IS if tags is None else Reading(tags=tags, surface=surface)

    def _opened(self, structures: object, tags: Tags | None) -> Structures:
        if isinstance(structures, Structures):
            if tags == "guess":
                return Tagged(structures, self.reading_of(None, tags).surface)
            if tags is not None:
                raise ValueError(
                    f"tags={tags!r} has no effect on a data set that is open; open it with "
                    "molflt.data.structures.open_dataset and a Reading"
                )
            return structures
        if _are_paths(structures):
            return open_structures(structures, False, self.reading_of(structures, tags))
        reading = self.reading_of(None, tags)
        if reading.tags == "guess":
            return Tagged(StructuresInMemory(structures, ANY_TAGS), reading.surface)
        return StructuresInMemory(structures, reading)

    def _prediction(
        self,
        i: int,
        dataset: Structures,
        found: Predictions,
        columns: dict[str, _Energies],
        embedding: str | None,
    ) -> Prediction:
        spread, known = columns.get("spread_eV"), columns.get("uncertainty_eV")
        tokens = None
        if embedding is not None:
            tokens = found.by_atom["embedding"][i]
            if embedding == "pooled":
                whole = self.predicts_forces
                tokens = tokens.mean(axis=0) if whole else _pooled(tokens, dataset[i])
        relaxed = None
        if "displacement" in found.by_atom:
            relaxed = _moved(dataset, i, found.by_atom["displacement"][i])
        return Prediction(
            float(found.energy[i]),
            None if known is None else float(known[i]),
            None if spread is None else float(spread[i]),
            relaxed,
            tuple(found.outside[i]),
            tokens,
            found.by_atom["forces"][i] if "forces" in found.by_atom else None,
            found.by_adsorbate[i] if found.by_adsorbate else None,
        )

    def infer(
        self,
        dataset: Structures,
        batch_size: int,
        name: str,
        by_atom: Collection[str] = (),
        force: bool = False,
    ) -> Predictions:
        """Calls `molflt.evaluation.predictions.infer` with the domain of the training."""
        model = self.model if self.compiled is None else self.compiled
        return infer(model, dataset, batch_size, name, self.domain, by_atom, force)

    def calibration(self, file: Path | None = None) -> Calibration | None:
        """That of an ensemble; None of one that has none, which is said, and of a single model.

        Args:
            file: that an evaluation of the same runs wrote; by default what is known.

        Raises:
            FileNotFoundError: if the calibration is missing.
            ValueError: if it is damaged or that of others, or the model is no ensemble.
        """
        model, trained = self.model, self.trained
        held = trained.files.get(CALIBRATION)
        own = file is None and held is not None and trained.path.is_file()
        if own and isinstance(model, EnsembleRegressor):
            label = trained.label(CALIBRATION)
            return expect_theirs(model, Calibration.from_json(held, label), label)
        return calibration_of(model, file, trained.path / ENSEMBLE / CALIBRATION)


def _are_paths(structures: object) -> TypeGuard[Paths]:
    """True if structures are given as a path or several paths."""
    several = structures if isinstance(structures, list | tuple) and structures else [structures]
    return all(isinstance(one, str | Path) for one in several)


def _pooled(tokens: NDArray[np.float32], record: Data) -> NDArray[np.float32]:
    """Mean over the atoms that count: (atoms, dim) -> (dim,)."""
    counted = Geometry.of_data(record).above_subsurface().numpy()
    return cast("NDArray[np.float32]", tokens[counted].mean(axis=0))


def _moved(dataset: Structures, i: int, displacement: NDArray[np.float32]) -> Atoms | None:
    """A structure with its free atoms moved, (atoms, 3) Å, as far as its constraints let them.

    What else it holds stays. None, with a warning, where constraints cannot be met.
    """
    atoms, free = dataset.to_atoms(i), (~dataset[i].fixed).numpy()
    try:
        atoms.set_positions(atoms.positions + np.where(free[:, None], displacement, 0.0))
    except (RuntimeError, ValueError) as error:  # of those that are met by iteration
        kinds = ", ".join(type(one).__name__ for one in atoms.constraints)
        print(
            f"molflt: warning: {dataset.where(i)}: no relaxed structure, as {kinds} cannot be met: "
            f"{error}",
            file=sys.stderr,
        )
        return None
    return atoms
