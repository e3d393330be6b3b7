"""Energies of a regressor as machine code of AOTInductor, one program for all sizes."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from molflt.graph.computation import EnergyInputs, export_energies, takes_matrix
from molflt.graph.regressor import EnergyRegressor

if TYPE_CHECKING:
    from torch_geometric.data import Data

__all__ = ["CompiledEnergies", "compile_energies"]

_MOST_IN_MATRIX = 2048
"""most atoms of a graph; N x N matrices of more would fill the memory"""


def compile_energies(model: EnergyRegressor, path: Path) -> Path:
    """Compiles `EnergyComputation` for this machine's processor; takes minutes.

    Args:
        model: a trained regressor, on the CPU.
        path: package to write, ending in .pt2.
    """
    from torch._inductor import aoti_compile_and_package
    from torch._inductor.exc import InvalidCxxCompiler

    program = export_energies(model, _example(model))
    try:
        aoti_compile_and_package(program, package_path=str(path))
    except InvalidCxxCompiler:
        raise RuntimeError(
            "compiling needs a C++ compiler; got none; install g++ or clang++, or name one in the "
            "environment variable CXX"
        ) from None
    return path


class CompiledEnergies(nn.Module):
    """Energies of a regressor, computed by machine code.

    Args:
        model: the regressor that was compiled, which prepares batches.
        path: package written by `compile_energies`. It is machine code, which may do anything: load
            only files that you trust.

    Raises:
        RuntimeError: if it was compiled for another kind of processor.
    """

    def __init__(self, model: EnergyRegressor, path: Path) -> None:
        super().__init__()
        from torch._inductor import aoti_load_package

        self.model = model
        self.program = aoti_load_package(str(path))
        self.matrix = takes_matrix(model)
        self.trained_elements, self.descriptors = model.trained_elements, model.descriptors
        self.element_energies = model.element_energies

    def forward(self, batch: "Data") -> Mapping[str, Tensor]:
        """Energies (graphs,), float64, eV, as `EnergyRegressor.forward`.

        Graphs are padded to the largest; batches should have graphs of similar size. The model
        itself computes graphs whose matrix does not fit, with the same sums.
        """
        inputs = EnergyInputs.of(self.model, batch)
        if self.matrix and inputs.mask.shape[1] > _MOST_IN_MATRIX:
            return {"energy": self.model(batch)["energy"]}
        return {"energy": self.program(*inputs)}


def _example(model: EnergyRegressor) -> "Data":
    """Returns two graphs, of three and of two atoms, that every model accepts."""
    from torch_geometric.data import Batch, Data

    dtype = model.embedding.element.weight.dtype
    pos = torch.tensor([[0.0, 0.0, 0.0], [0.0, 0.0, 1.5], [1.5, 0.0, 3.0]], dtype=dtype)
    made = [
        Data(
            pos=pos[:atoms],
            atomic_numbers=torch.tensor([29, 29, 8])[:atoms],
            tags=torch.tensor([1, 2, 2])[:atoms],
            cell=8 * torch.eye(3, dtype=dtype)[None],
            pbc=torch.ones(1, 3, dtype=torch.bool),
        )
        for atoms in (3, 2)
    ]
    return Batch.from_data_list(made)
