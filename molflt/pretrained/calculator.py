"""A trained potential as an ASE calculator."""

import copy
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Literal

import numpy as np
import torch
from ase import Atoms
from ase.calculators.calculator import Calculator as AseCalculator
from ase.calculators.calculator import PropertyNotImplementedError, all_changes
from ase.outputs import Properties, all_outputs
from ase.stress import full_3x3_to_voigt_6_stress
from torch import nn

from molflt.atoms import MAX_ATOMIC_NUMBER
from molflt.attention.checks import one_of, whole
from molflt.data.structures.ase_fields import total_charge, unused_fields, unused_text
from molflt.data.structures.geometry import atoms_coincide, overlaps_of
from molflt.data.structures.records import origin_of
from molflt.evaluation.predictions import refuse_undescribed, warn_of_elements
from molflt.files import warn
from molflt.graph.heads import undescribed
from molflt.graph.potential import Potential
from molflt.memory import within_memory
from molflt.pretrained.base import Pretrained, read_trained
from molflt.training.checkpoint import device_named


def calculator_named(source: str, device: str = "auto") -> Any:
    """Creates an ASE calculator from module:Class, or a :class:`Calculator` from a potential."""
    if not is_class(source):
        try:
            return Calculator(source, device=device)
        except FileNotFoundError as error:
            raise FileNotFoundError(f"{error}; for other calculators, give module:Class") from None
    try:
        return resolve_name(source)()
    except (AttributeError, ImportError) as error:
        raise ValueError(
            f"{source}: expected module:Class of an installed ASE calculator; got {error}"
        ) from error


def is_class(source: str) -> bool:
    """Returns True for module:Class, and False for a trained potential."""
    module, _, name = source.partition(":")
    return bool(name) and module != "hf"


class Calculator(AseCalculator):
    """Energy, forces and stress from a potential trained with ``--recipe potential``.

    Use it like any ASE calculator: ``atoms.calc = molflt.Calculator("runs/mine")``. For a potential
    with a long-range part, `results` also contains energy_local, energy_near and energy_far, in eV.
    With power 1, it also contains charges (in e) and, for structures without periodic axes, dipole
    (in e Å); see `molflt.graph.Potential.forward`. The total charge is read from ``atoms.info``.

    Args:
        source: any source of a potential that `molflt.load` accepts; a potential returned by
            `molflt.load`; or a module.
        checkpoint: best (the default), last, or a safetensors file; requires a training run.
        device: auto, cpu, cuda or cuda:N; defaults to the device of a module, otherwise to auto.
        dtype: precision of the computation; float32 halves the time, with rounding errors of
            about 4e-5 eV/Å in forces.
        slab_stress: also compute the stress of structures that are not periodic along all axes: the
            derivative of the energy with respect to the strain, divided by the volume of the cell
            including vacuum.
        options: options of ASE calculators.

    Attributes:
        overlaps_told: True after a warning about two atoms at the same position.
    """

    implemented_properties = ["energy", "free_energy", "forces", "stress"]  # noqa: RUF012 (ASE's)

    def __init__(
        self,
        source: str | Path | Pretrained | nn.Module,
        checkpoint: str | None = None,
        device: str | None = None,
        dtype: Literal["float32", "float64"] = "float64",
        slab_stress: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        one_of("dtype", dtype, ("float32", "float64"))
        if isinstance(source, Pretrained):
            source = source.model
        if isinstance(source, nn.Module) and checkpoint is not None:
            raise ValueError(f"checkpoint={checkpoint!r} requires a run; got a model")
        if isinstance(source, nn.Module):
            name, model = "the model", copy.deepcopy(source).eval()
            if device is not None:
                model = model.to(device_named(device))
        else:
            name, model = str(source), read_trained(source, checkpoint, device or "auto").model
        if not isinstance(model, Potential):
            raise ValueError(
                f"{name}: a calculator requires a potential; got {type(model).__name__}, which has "
                "no forces; train with --recipe potential, or predict energies with molflt predict"
            )
        with torch.inference_mode(False):  # tensors made in this mode cannot be differentiated
            self.model = model.to(getattr(torch, dtype))
        if model.long_range is not None and 1 in model.long_range.powers:
            self.implemented_properties = [*self.implemented_properties, "charges", "dipole"]
        self.slab_stress = slab_stress
        self._warned_elements: set[int] = set()
        self._warned_fields: set[str] = set()
        self.overlaps_told = False

    def calculate(
        self,
        atoms: Atoms | None = None,
        properties: list[str] | None = None,
        system_changes: list[str] = all_changes,
    ) -> None:
        """Computes `results`; see `ase.calculators.calculator.Calculator.calculate`."""
        from torch_geometric.data import Data

        super().calculate(atoms, properties, system_changes)
        given = self.atoms
        assert given is not None  # ASE keeps a copy
        whole("atomic_numbers", torch.from_numpy(given.numbers), 1, MAX_ATOMIC_NUMBER, "elements")
        self._warn_of_unused(given)
        self._warn_of_elements(set(given.numbers.tolist()), given.get_chemical_formula())
        pos = torch.from_numpy(given.positions)
        data = Data(
            pos=pos - origin_of(pos) if len(pos) and pos.isfinite().all() else pos,
            atomic_numbers=torch.from_numpy(given.numbers).long(),
            cell=torch.from_numpy(given.cell.array)[None],
            pbc=torch.from_numpy(given.pbc)[None],
            charge=torch.from_numpy(np.array([total_charge(given) or 0.0])),
        )
        with within_memory(lambda: f"{len(given):,} atoms", "use fewer, or dtype='float32'"):
            out = self.model(copy.copy(data).to(self.model.energy_std.device))
        energy = float(out["energy"][0])
        forces = out["forces"].double().cpu().numpy()
        if not (np.isfinite(energy) and np.isfinite(forces).all()):
            raise ValueError(
                f"{given.get_chemical_formula()}: the energy ({energy} eV) or a force is not "
                "finite; atoms may overlap, or the weights may be damaged"
            )
        if not self.overlaps_told and atoms_coincide(data):
            self.overlaps_told = True
            warn(overlaps_of(given.get_chemical_formula()))
        self.results = {"energy": energy, "free_energy": energy, "forces": forces}
        parts = (name for name in out if name.startswith("energy_"))  # with a long-range part
        self.results |= {name: float(out[name][0]) for name in parts}
        if "charges" in out:
            self.results["charges"] = out["charges"].double().cpu().numpy()
            if not given.pbc.any():
                self.results["dipole"] = out["dipole"][0].double().cpu().numpy()
        stress = out["stress"][0].double().cpu().numpy()
        if np.isfinite(stress).all() and (self.slab_stress or given.pbc.all()):
            self.results["stress"] = full_3x3_to_voigt_6_stress(stress)
        elif "stress" in (properties or ()):
            raise PropertyNotImplementedError(
                f"stress requires pbc=True along all axes; got {given.pbc.tolist()}; set "
                "slab_stress=True in molflt.Calculator for any cell with three lattice vectors"
            )

    def export_properties(self) -> Properties:
        """Returns the results that ASE defines, without the parts of the energy."""
        return Properties({name: x for name, x in self.results.items() if name in all_outputs})

    def check_state(self, atoms: Atoms, tol: float = 1e-15) -> list[str]:
        """Returns the names of changed properties, as in ASE, and warns about unused fields."""
        self._warn_of_unused(atoms)
        changes: list[str] = super().check_state(atoms, tol)
        if self.atoms is not None and total_charge(atoms) != total_charge(self.atoms):
            changes.append("charge")
        return changes

    def _warn_of_unused(self, atoms: Atoms) -> None:
        unused = unused_fields(atoms.copy())  # without own results
        if not self._warned_fields.issuperset(unused):
            self._warned_fields.update(unused)
            warn(f"{atoms.get_chemical_formula()}: {unused_text(unused)}")

    def _warn_of_elements(self, present: set[int], name: str) -> None:
        if new := present - self._warned_elements:
            refuse_undescribed(new, undescribed(self.model), name)
            self._warned_elements |= new
            warn_of_elements(self.model, new, name)
