"""A trained potential as a torch-sim model."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.data import Batch

from molflt.pretrained.base import Pretrained
from molflt.pretrained.calculator import Calculator

try:
    from torch_sim.models.interface import ModelInterface
    from torch_sim.state import SimState
except ImportError as error:
    raise ImportError(
        "torch-sim is not installed, or incomplete; pip install molflt[torch-sim]"
    ) from error


class TorchSimModel(ModelInterface):
    """Energies, forces and stress from a potential, for functions like `torch_sim.integrate`.

    Args:
        source, checkpoint, device, slab_stress: see `molflt.Calculator`.
        dtype: "float32" or "float64"; should match the dtype of the positions in the state.
    """

    def __init__(
        self,
        source: str | Path | Pretrained | nn.Module,
        checkpoint: str | None = None,
        device: str | None = None,
        dtype: str = "float64",
        slab_stress: bool = False,
    ) -> None:
        super().__init__()
        self.slab_stress = slab_stress
        self._calculator = Calculator(source, checkpoint, device, dtype)  # type: ignore[arg-type]
        self.model = self._calculator.model
        weight = self.model.embedding.element.weight
        self._device, self._dtype = weight.device, weight.dtype
        self._compute_stress = self._compute_forces = True
        self._memory_scales_with = "n_atoms"

    def forward(self, state: SimState | dict[str, Any], **_: object) -> dict[str, Tensor]:
        """Computes all systems of a state.

        Returns:
            "energy" (systems,) in eV, "forces" (atoms, 3) in eV/Å, and "stress" (systems, 3, 3) in
            eV/Å^3. The stress is NaN for systems that are not periodic along all axes, unless
            `slab_stress` is True.
        """
        if isinstance(state, dict):
            state = SimState(**state, masses=torch.ones_like(state["positions"][:, 0]))
        index, charge = state.system_idx, getattr(state, "charge", None)
        if charge is None and self.model.charge_share is not None:
            raise ValueError(
                "total_charge=True needs the charge of each system, in e; got None; pass "
                "system_extras_map={'charge': 'charge'} to atoms_to_state of torch-sim 0.5 or newer"
            )
        present = set(state.atomic_numbers.unique().tolist())
        self._calculator._warn_of_elements(present, "state")
        cell = state.row_vector_cell
        pbc = torch.as_tensor(state.pbc, device=cell.device).expand(len(cell), 3)
        ends = torch.bincount(index, minlength=len(cell)).cumsum(0)
        batch = Batch(
            batch=index,
            ptr=torch.cat((ends.new_zeros(1), ends)),
            pos=state.positions.to(self._dtype),
            atomic_numbers=state.atomic_numbers.long(),
            cell=cell.to(self._dtype),
            pbc=pbc,
            charge=charge,
        )
        out = dict(self.model(batch))
        has_stress = pbc.all(dim=1)[:, None, None] | self.slab_stress
        out["stress"] = torch.where(has_stress, out["stress"], torch.nan)
        return {name: out[name].to(self._dtype) for name in ("energy", "forces", "stress")}
