"""Schemes for periodic boundaries in attention, with one class per scheme."""

import copy
import inspect
import math
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from torch import Tensor

from molflt.atoms import Tag
from molflt.attention.checks import no_effect, one_of, positive
from molflt.attention.mixing.mesh import MeshKernel
from molflt.attention.nodes.lattice import Lattice, free_extent
from molflt.attention.nodes.mesh import OVERSAMPLING
from molflt.attention.nodes.reciprocal import reciprocal_nodes, tapered_mask
from molflt.attention.numerics import distances, fade, opaque, uncompiled
from molflt.attention.positions.multiplicative import MultiplicativePosition
from molflt.attention.positions.spectral import GraphNodes, SpectralPosition
from molflt.attention.spectra import SPECTRA
from molflt.graph.dense import DenseAtoms, padded, places_of
from molflt.graph.geometry import Geometry, _starts
from molflt.graph.neighbors import _neighbors, expect_lattice, images_are_far

_FADE = 1.0  # distance before the cutoff, in Å, over which an image fades out
_MOST_PAIRED = 1000  # all pairs are computed in molecules with up to this number of atoms
_MOST_BY_NODES = 1000  # `Auto` uses a mesh if atoms and vectors both exceed this number
_ALONE = 200.0  # Å of vacuum beyond which the kernel of an image is below 1e-8


class Open:
    """Open boundaries without images of atoms; also the base class of all schemes.

    A new scheme overrides the methods that differ and is registered in `PERIODIC`. The arguments of
    its constructor are its options.

    Attributes:
        needs_cell: True if the scheme requires the cell of periodic structures.
        lattice: True if the scheme provides the nodes; neighbors then include images.
    """

    needs_cell: ClassVar[bool] = False
    lattice: ClassVar[bool] = False

    def defaults(self, position: str, spectrum: str) -> dict[str, object]:
        """Returns the options of the position whose defaults differ in this scheme."""
        return {}

    def check(self, position: SpectralPosition, softmax: bool, near: bool) -> None:
        """Raises ValueError if the scheme does not support the position, softmax or near field."""

    def dense(self, geometry: Geometry) -> DenseAtoms:
        """Returns atoms and keys in the format that attention expects."""
        return DenseAtoms.of(geometry, self.lattice)

    def nodes(
        self, geometry: Geometry, position: SpectralPosition, left_out: Tensor | None = None
    ) -> GraphNodes | None:
        """Returns the nodes of each graph in float64; None for schemes that do not compute nodes.

        Weights are 0 for the graphs in the mask `left_out` (graphs,).
        """
        return None

    def images(self, geometry: Geometry) -> Tensor | None:
        """Estimates the number of images per atom of each graph: (graphs,), or None if unused."""
        return None

    def without_nodes(self, geometry: Geometry) -> Tensor | None:
        """Returns a mask of graphs whose far field uses pairs, not nodes: (graphs,) or None."""
        return None

    def on_mesh(self, geometry: Geometry) -> Tensor | None:
        """Returns a mask of graphs whose far field uses a mesh: (graphs,) or None."""
        return None

    def profile(self, position: MultiplicativePosition, r: Tensor, farthest: float) -> Tensor:
        """Returns the exact kernel h (heads, n) of one image at distances (n,) <= `farthest`, in Å.

        On a lattice, it is the far field of pairs.
        """
        return position.radial_profile(r).exp()

    def __repr__(self) -> str:
        options = ", ".join(f"{name}={value:g}" for name, value in vars(self).items() if value)
        return f"{type(self).__name__}({options})"


class Images(Open):
    """Adds periodic images within a cutoff as keys.

    With tags, this is 3D-Graphormer's recipe (arXiv:2203.04810): it adds copies of substrate atoms
    in the 8 neighboring cells of the surface plane that are within the cutoff of an adsorbate atom.
    The plane is that of the periodic axes, or of a and b if all axes are periodic.
    In a graph without an adsorbate, copies of any atom near any atom are added.

    The weight of an image is 1 - prod_c (1 - s(d_c)), with a product over the atoms c near which
    images are kept. The switch s is twice differentiable and falls from 1 to 0 over the last 1 Å
    before the cutoff, `image_cutoff`. Energies are therefore differentiable.
    """

    needs_cell = True

    def __init__(self, image_cutoff: float = 8.0) -> None:
        positive(image_cutoff=image_cutoff)
        self.image_cutoff = image_cutoff

    def check(self, position: SpectralPosition, softmax: bool, near: bool) -> None:
        if near:
            raise ValueError(
                f"near_field finds images itself; got {self!r}; use periodic='none' or 'reciprocal'"
            )

    def dense(self, geometry: Geometry) -> DenseAtoms:
        mask, positions, *_ = DenseAtoms.of(geometry)
        if geometry.tags is None:
            centers = sources = mask
        else:
            tagged = (geometry.tags == Tag.ADSORBATE.value)[:, None]
            adsorbate = padded(tagged, mask, places_of(geometry, mask))[..., 0]
            has_adsorbate = adsorbate.any(dim=1, keepdim=True)
            centers = torch.where(has_adsorbate, adsorbate, mask)
            sources = torch.where(has_adsorbate, ~adsorbate & mask, mask)
        cell, in_plane = geometry.cell.to(positions.dtype), geometry.tags is not None
        atoms = positions.detach(), mask, cell.detach(), geometry.pbc
        with torch.autocast(mask.device.type, enabled=False):
            source, step, exists = _images(*atoms, centers, sources, self.image_cutoff, in_plane)
            images = positions.gather(1, source[..., None].expand(-1, -1, 3)) + step @ cell
        weight = self._weight(images, positions, centers)
        exists = exists & (weight > 0)
        own_index = torch.arange(mask.shape[1], device=mask.device).expand(mask.shape[0], -1)
        own_weight = torch.ones_like(positions[..., 0])
        return DenseAtoms(
            mask,
            positions,
            key_mask=torch.cat((mask, exists), dim=1),
            key_positions=torch.cat((positions, images), dim=1),
            key_index=torch.cat((own_index, source), dim=1),
            key_weight=torch.cat((own_weight, weight.masked_fill(~exists, 1.0)), dim=1),
        )

    def images(self, geometry: Geometry) -> Tensor:
        expect_lattice(geometry)  # checked here, where errors can refer to graphs
        if geometry.tags is not None:
            return torch.full_like(geometry.ptr[1:], 8)  # in the plane
        inverse_heights = torch.linalg.pinv(geometry.cell.detach()).norm(dim=1)
        most = (1 + self.image_cutoff * inverse_heights).floor() * geometry.pbc
        return (2 * most + 1).prod(dim=1) - 1

    def _weight(self, images: Tensor, positions: Tensor, centers: Tensor) -> Tensor:
        """Returns weights (graphs, images) from positions of images and atoms; see the class."""
        width = min(_FADE, self.image_cutoff)
        distance = distances(images[:, :, None] - positions[:, None])
        switch = fade((distance - self.image_cutoff) / width + 1)
        factors = 1 - switch.masked_fill(~centers[:, None], 0.0)
        if torch.compiler.is_compiling():  # the gradient of `prod` searches for zeros
            return 1 - factors.clamp(min=torch.finfo(factors.dtype).tiny).log().sum(dim=-1).exp()
        return 1 - factors.prod(dim=-1)


def _unknown_images(positions: Tensor, mask: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    """Returns empty outputs of `_images`, with an unknown number of images, for the compiler."""
    images = torch.library.get_ctx().new_dynamic_size()
    exists = mask.new_empty(mask.shape[0], images)  # `len` would fix the size of the example
    return exists.long(), positions.new_empty(*exists.shape, 3), exists


@opaque(_unknown_images)
def _images(
    positions: Tensor,
    mask: Tensor,
    cell: Tensor,
    pbc: Tensor,
    centers: Tensor,
    sources: Tensor,
    cutoff: float,
    in_plane: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Finds images of `sources` near `centers`, both masks of atoms.

    Returns indices of atoms (graphs, images), cells (graphs, images, 3), and the mask of images.
    """
    if in_plane:  # for three periodic axes, the surface is along a and b
        pbc = pbc & ~(pbc.all(dim=1, keepdim=True) & (torch.arange(3, device=mask.device) == 2))
    ptr = _starts(mask.sum(dim=1))
    (center, neighbor), step, graph = _neighbors(positions[mask], cell, pbc, ptr, cutoff)
    kept = centers[mask][center] & sources[mask][neighbor] & (step != 0).any(dim=1)
    if in_plane:
        kept = kept & (step.abs() <= 1).all(dim=1)
    atom = mask.nonzero()[neighbor, 1:]
    # an image may be near several atoms
    found = torch.cat((graph[:, None], step, atom), dim=1)[kept].unique(dim=0)
    counts = torch.bincount(found[:, 0], minlength=len(mask))
    place = torch.arange(max(counts.tolist(), default=0), device=mask.device)
    exists = place < counts[:, None]
    index, steps = exists.long(), positions.new_zeros(*exists.shape, 3)
    index[exists], steps[exists] = found[:, 4], found[:, 1:4].to(steps.dtype)
    return index, steps, exists


class Reciprocal(Open):
    """Nodes on the reciprocal lattice of each graph, for exactly periodic masks and kernels.

    Args:
        max_frequency: largest |G|, in cycles/Å; the number of nodes grows as its cube.
        smooth: make nodes analytic functions of positions along nonperiodic directions. Otherwise,
            forces jump by about 1e-4 eV/Å when a different atom becomes the outermost. With
            `smooth`, molecules of up to 1,000 atoms, also in cells larger than 200 Å along all
            periodic axes, use all pairs; their energy does not depend on the orientation.
    """

    lattice = True
    needs_cell = True

    def __init__(self, max_frequency: float = 0.25, smooth: bool = False) -> None:
        positive(max_frequency=max_frequency)
        self.max_frequency = max_frequency
        self.smooth = smooth

    def defaults(self, position: str, spectrum: str) -> dict[str, object]:
        if position != "multiplicative":
            return {}
        # Sums over images must converge, and supercells must give the same result.
        if spectrum == "gaussian_basis":
            return {"background": 0.0, "positive": True}
        return {"background": 0.0}

    def check(self, position: SpectralPosition, softmax: bool, near: bool) -> None:
        if near:
            _expect_isotropic(position, "near_field with reciprocal nodes")

    def nodes(
        self, geometry: Geometry, position: SpectralPosition, left_out: Tensor | None = None
    ) -> GraphNodes | None:
        # float64, because random features amplify rounding errors of the nodes
        cell, pbc = geometry.cell.double(), geometry.pbc
        if left_out is not None:  # an arbitrary small cell, whose few nodes get weight 0
            pbc = pbc | left_out[:, None]
            small = torch.eye(3, dtype=cell.dtype, device=cell.device)
            cell = torch.where(left_out[:, None, None], small, cell)
        extent = free_extent(geometry.pos.double(), geometry.batch, cell, pbc, self.smooth)
        xi, weights = reciprocal_nodes(cell, pbc, self.max_frequency, extent, taper=position.taper)
        if left_out is not None:
            weights = weights.masked_fill(left_out[:, None], 0.0)
        return GraphNodes(xi, weights)

    def without_nodes(self, geometry: Geometry) -> Tensor | None:
        if not self.smooth:
            return None
        return images_are_far(geometry, _ALONE) & (geometry.ptr.diff() <= _MOST_PAIRED)

    def profile(self, position: MultiplicativePosition, r: Tensor, farthest: float) -> Tensor:
        return tapered_mask(position.spectrum, r, self.max_frequency, position.taper, farthest)


def _expect_isotropic(position: SpectralPosition, option: str) -> None:
    if not position.spectrum.isotropic:
        usable = ", ".join(k for k, v in SPECTRA.items() if v.isotropic and not v.on_shells)
        kind = type(position.spectrum).__name__
        raise ValueError(f"{option} needs an isotropic spectrum; got {kind}; use one of {usable}")


class Near(Reciprocal):
    """Scheme of far_field=False: attention ends at the cutoff of the near field."""

    def nodes(
        self, geometry: Geometry, position: SpectralPosition, left_out: Tensor | None = None
    ) -> GraphNodes:
        zeros = geometry.pos.new_zeros(geometry.graphs, 1, 3, dtype=torch.float64)
        return GraphNodes(zeros, zeros[..., 0])

    def profile(self, position: MultiplicativePosition, r: Tensor, farthest: float) -> Tensor:
        return r.new_zeros(position.spectrum.heads, len(r))


class Auto(Reciprocal):
    """Uses nodes for small cells, like `Reciprocal`, and a mesh for large cells, like `OnMesh`.

    A graph uses a mesh if it has more than 1,000 atoms, and its reciprocal lattice more than 1,000
    vectors, which are 500 nodes. The choice depends on the graph alone, not on its batch. Compiled
    models, and positions that a mesh does not support, always use nodes.

    Args:
        max_frequency: largest |G|, in cycles/Å.
        mesh_order: order of the splines: 4, 5, 6 or 8, with errors of attention up to 3e-3, 6e-4,
            6e-6 and 2e-7; orders 6 and 8 also use more points.
    """

    nodes_only = False

    def __init__(self, max_frequency: float = 0.25, mesh_order: int = 5) -> None:
        super().__init__(max_frequency)
        one_of("mesh_order", mesh_order, OVERSAMPLING)
        self.mesh_order = mesh_order

    def check(self, position: SpectralPosition, softmax: bool, near: bool) -> None:
        multiplicative = isinstance(position, MultiplicativePosition)
        self.nodes_only = softmax or not (multiplicative and position.spectrum.isotropic)
        super().check(position, softmax, near)

    def on_mesh(self, geometry: Geometry) -> Tensor | None:
        many_atoms = geometry.ptr.diff() > _MOST_BY_NODES
        if self.nodes_only or torch.compiler.is_compiling() or not many_atoms.any():
            return None
        vectors = 4 / 3 * math.pi * self.max_frequency**3 * _lattice(geometry).volume
        mask = many_atoms & (vectors > _MOST_BY_NODES)
        return mask if mask.any() else None

    @uncompiled
    def mesh(
        self, geometry: Geometry, dense: DenseAtoms, position: MultiplicativePosition
    ) -> MeshKernel:
        """Returns the far field of the graphs that `on_mesh` selects, all of `geometry`."""
        return position.on_mesh(
            dense.positions, dense.mask, _lattice(geometry), self.max_frequency, self.mesh_order
        )


class OnMesh(Auto):
    """Uses a mesh for all cells; the cost per atom does not grow with the cell.

    A mesh is faster than nodes for large cells: at least 1,000 atoms for a `max_frequency` of 0.25
    cycles/Å, and at least 5,000 atoms for 0.1. It supports multiplicative kernels with an isotropic
    spectrum. The invariances of nodes hold only up to the interpolation error.
    """

    def check(self, position: SpectralPosition, softmax: bool, near: bool) -> None:
        if softmax or not isinstance(position, MultiplicativePosition):
            raise ValueError(
                "periodic='mesh' needs a multiplicative kernel and kernelized attention; got "
                f"{'mixing=softmax' if softmax else type(position).__name__}; use 'reciprocal'"
            )
        _expect_isotropic(position, "periodic='mesh'")

    def on_mesh(self, geometry: Geometry) -> Tensor:
        return torch.ones_like(geometry.ptr[1:], dtype=torch.bool)


def _lattice(geometry: Geometry) -> Lattice:
    """Returns the float64 lattice, with virtual vectors that enclose the atoms along open axes."""
    cell, pbc = geometry.cell.double(), geometry.pbc
    return Lattice.of(cell, pbc, free_extent(geometry.pos.double(), geometry.batch, cell, pbc))


PERIODIC: dict[str, type[Open]] = {
    "none": Open,
    "images": Images,
    "auto": Auto,
    "reciprocal": Reciprocal,
    "mesh": OnMesh,
}

# The command line takes the choices of this option from its type.
if TYPE_CHECKING:
    PeriodicName = str
else:
    PeriodicName = Literal[tuple(PERIODIC)]


def make_periodic(periodic: str | Open, **options: float | None) -> Open:
    """Builds a scheme from its name and options, or copies an existing scheme."""
    why = f"with periodic={periodic!r}"
    if isinstance(periodic, Open):
        no_effect(why, **options)
        return copy.copy(periodic)  # each encoding changes its own scheme
    one_of("periodic", periodic, PERIODIC)
    known = inspect.signature(PERIODIC[periodic]).parameters
    no_effect(why, **{name: value for name, value in options.items() if name not in known})
    return PERIODIC[periodic](**{k: v for k, v in options.items() if v is not None})
