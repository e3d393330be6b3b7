"""Periodic boundaries on a mesh: the far field of large cells."""

from typing import Any

from torch import nn

from molflt.attention.mixing.mesh import MeshKernel
from molflt.attention.nodes.lattice import Lattice, free_extent
from molflt.attention.nodes.mesh import check_order
from molflt.attention.numerics import uncompiled
from molflt.attention.positions.multiplicative import MultiplicativePosition
from molflt.attention.positions.spectral import SpectralPosition
from molflt.graph.dense import DenseAtoms
from molflt.graph.geometry import Geometry
from molflt.graph.periodic import Reciprocal


class OnMesh(Reciprocal):
    """Computes kernels of `Reciprocal` at a cost per atom that does not grow with the cell.

    Use a mesh for large cells: 1,000 atoms or more at 0.25 cycles/Å, and 5,000 or more at 0.1. It
    supports multiplicative kernels with an isotropic spectrum. The invariances of nodes (shifts of
    all atoms, the choice of the cell, supercells except with normalize="unmasked") hold up to the
    interpolation error.

    Args:
        max_frequency: largest |G|, cycles/Å.
        mesh_order: order of the splines: 4, 5, 6 or 8, with errors of attention up to 3e-3, 6e-4,
            6e-6 and 2e-7; orders 6 and 8 also use more points.
    """

    def __init__(self, max_frequency: float = 0.25, mesh_order: int = 5) -> None:
        super().__init__(max_frequency)
        check_order(mesh_order)
        self.mesh_order = mesh_order

    def check(self, position: SpectralPosition, softmax: bool) -> None:
        """Raises ValueError for softmax or an unsupported position; see `Open.check`."""
        if softmax or not isinstance(position, MultiplicativePosition):
            raise ValueError(
                "periodic='mesh' is for a kernel that multiplies in kernelized attention; got "
                f"{'mixing=softmax' if softmax else type(position).__name__}; use "
                "position='multiplicative', or periodic='reciprocal'"
            )
        position.check_isotropic()

    def nodes(self, geometry: Geometry, position: SpectralPosition) -> None:
        """Returns None; see `Open.nodes`."""

    @uncompiled
    def mesh(self, geometry: Geometry, dense: DenseAtoms, position: SpectralPosition) -> MeshKernel:
        """Returns the far field on a mesh; see `Open.mesh`."""
        assert isinstance(position, MultiplicativePosition)
        cell, pbc = geometry.cell.double(), geometry.pbc
        extent = free_extent(geometry.pos.double(), geometry.batch, cell, pbc)
        lattice = Lattice.of(cell, pbc, extent)
        where = self.max_frequency, self.mesh_order
        return position.on_mesh(dense.positions, dense.mask, lattice, *where)


def use_mesh_(model: nn.Module, order: int = 5) -> None:
    """Makes a model with reciprocal nodes compute the same sums on a mesh, in place.

    Parameters do not change. Time and memory per atom no longer grow with the cell, and sums have
    an interpolation error; see `OnMesh`.

    Args:
        model: model with periodic="reciprocal", or a module that contains such a model.
        order: order of the splines; see `OnMesh`.
    """
    found = [part for part in model.modules() if isinstance(_scheme(part), Reciprocal)]
    if not found:
        raise ValueError(
            f"mesh_order={order} puts sums over reciprocal nodes on a mesh; got "
            f"{type(model).__name__} without any; leave it out"
        )
    for part in found:
        scheme = _scheme(part)
        if type(scheme) not in (Reciprocal, OnMesh) or scheme.smooth:
            raise ValueError(
                f"mesh_order={order}: expected sums over reciprocal nodes; got {scheme!r}, whose "
                "nodes a mesh does not have; leave it out"
            )
        own = OnMesh(scheme.max_frequency, order)
        encoding: Any = part
        own.check(encoding.position, encoding.softmax)
        encoding.periodic = own


def _scheme(part: nn.Module) -> Any:
    return getattr(part, "periodic", None)
