"""An interatomic potential: energies, and forces and stress as their exact derivatives."""

# No `from __future__ import annotations`: jsonargparse would import all that stands below
# TYPE_CHECKING, PyG included, to read annotations that are strings.

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from molflt.atoms import Tag
from molflt.attention.features import FeatureMapName
from molflt.attention.positions.base import MixingName
from molflt.graph.encoding import GraphPositionName
from molflt.graph.periodic import PeriodicName, Reciprocal
from molflt.graph.regressor import EnergyRegressor

if TYPE_CHECKING:
    from torch_geometric.data import Data

_SMOOTH_MAPS = ("positive", "exp", "learnable_exp")  # analytic, and nowhere 0 or below


class Potential(EnergyRegressor):
    """`EnergyRegressor` in the one form whose energy is smooth, extensive and exactly periodic.

    The energy of N atoms is a sum over all of them, whatever their tags, and has two continuous
    derivatives: no cutoff, no image and no node comes or goes with a weight other than 0. Forces
    are -dE/dr, and the stress is dE/d(strain) / volume, by automatic differentiation.

    Arguments that are not here are those of `EnergyRegressor`; choices without such an energy are
    refused with the reason.

    Args:
        dim: width of tokens.
        heads: attention heads; `dim` is a multiple of it.
        mixing: "linear", "quadratic" or "auto", which are the same function.
        feature_map: "positive" by default, or "exp" or "learnable_exp".
        num_features: random features m per head, 64 by default.
        position: "multiplicative".
        position_options: of the kernel, see `molflt.graph.encoding.GraphEncoding`.
        periodic: "reciprocal".
        max_frequency: end of the spectrum of reciprocal nodes, 0.25 cycles/Å by default.
        near_field: distance within which the kernel is exact, Å; 5 by default.
        near_exact: within it, q.k is exact as well, without random features.
        neighbor_cutoff: radius of the embedding's radial summary, 5 Å by default.
        radial_basis: size of the radial summary; 0 leaves it out.
        descriptors: tell elements by period, group, radius, electronegativity and valence electrons
            as well.
        stack: further arguments of `molflt.attention.Stack`.

    Attributes:
        energy_std: eV, buffer: the unit of what each atom adds.
        element_energies: (119,) eV, buffer: what each atom adds to that, by its atomic number.

    Raises:
        TypeError: an unknown argument.
        ValueError: a choice whose energy is not smooth or not extensive, with the reason, or an
            option out of its range.
    """

    def __init__(
        self,
        dim: int = 128,
        heads: int = 8,
        *,
        mixing: MixingName = "auto",
        feature_map: FeatureMapName | None = None,
        num_features: int | None = None,
        position: GraphPositionName = "multiplicative",
        position_options: dict[str, Any] | None = None,
        periodic: PeriodicName = "reciprocal",
        max_frequency: float | None = None,
        near_field: float | None = None,
        near_exact: bool = False,
        neighbor_cutoff: float | None = None,
        radial_basis: int = 16,
        descriptors: bool = False,
        **stack: Any,
    ) -> None:
        _refuse_rough(mixing, feature_map, position, periodic, position_options or {}, stack)
        highest = {} if max_frequency is None else {"max_frequency": max_frequency}
        super().__init__(
            dim,
            heads,
            mixing=mixing,
            feature_map=feature_map,
            num_features=num_features,
            position=position,
            position_options=position_options,
            periodic=cast(PeriodicName, Reciprocal(**highest, smooth=True)),
            image_cutoff=None,
            max_frequency=None,
            near_field=near_field,
            near_exact=near_exact,
            neighbor_cutoff=neighbor_cutoff,
            radial_basis=radial_basis,
            descriptors=descriptors,
            subsurface=True,
            position_head=False,
            move_atoms=False,
            **stack,
        )

    def forward(self, batch: "Data") -> Mapping[str, Tensor]:
        """Energies and their derivatives; in training mode these can be differentiated again.

        Args:
            batch: as for `EnergyRegressor.forward`; tags are not read.

        Returns:
            "energy": (graphs,) float64, eV; "forces": (atoms, 3), eV/Å; if the batch has cells,
            "stress": (graphs, 3, 3), eV/Å^3, as ASE has its sign (positive where the energy rises
            with the volume), NaN for graphs without a volume.

        Raises:
            TypeError: something else than PyG's data.
            ValueError: naming the attribute that is missing or wrong.
        """
        # also inside of torch.inference_mode, where tensors of before cannot be differentiated
        with torch.inference_mode(False), torch.enable_grad():
            strained, pos, strain = _strained(batch)
            energy = self.energy(strained)
            wanted = [pos] if strain is None else [pos, strain]
            found = torch.autograd.grad(
                energy.sum(), wanted, create_graph=self.training, materialize_grads=True
            )
            out = {"energy": energy, "forces": -found[0]}
            if strain is not None:
                volume = torch.linalg.det(strained.cell.detach().reshape(-1, 3, 3)).abs()
                virial = (found[1] + found[1].mT) / 2
                there = (volume > 0)[:, None, None]
                # by 1, not by NaN: that would reach gradients of other graphs of the batch
                stress = virial / torch.where(there, volume[:, None, None], 1.0)
                out["stress"] = torch.where(there, stress, torch.nan)
        return out if self.training else {name: x.detach() for name, x in out.items()}

    def energy(self, batch: "Data") -> Tensor:
        """Energies alone, (graphs,) float64, eV, to be differentiated by whatever in `batch`."""
        untagged = copy.copy(batch)  # all atoms count alike
        untagged.tags = torch.full_like(batch.atomic_numbers, int(Tag.SURFACE))
        return super().forward(untagged)["energy"]


def _strained(batch: "Data") -> tuple["Data", Tensor, Tensor | None]:
    """A batch whose positions and cells follow a strain of 0, positions and strain that require
    gradients; no strain where there are no cells.
    """
    pos = batch.pos.detach().clone().requires_grad_()
    out = copy.copy(batch)
    for name, value in batch.to_dict().items():
        if isinstance(value, Tensor) and value.is_inference():
            out[name] = value.clone()
    if batch.get("cell") is None:
        out.pos = pos
        return out, pos, None
    cell = batch.cell.detach().clone().reshape(-1, 3, 3).to(pos.dtype)
    strain = torch.zeros_like(cell).requires_grad_()
    symmetric = (strain + strain.mT) / 2
    index = out.get("batch")
    own = symmetric[0].expand(len(pos), 3, 3) if index is None else symmetric[index]
    out.pos = pos + torch.einsum("nc,ncd->nd", pos, own)
    out.cell = cell + cell @ symmetric
    return out, pos, strain


def _refuse_rough(
    mixing: str,
    feature_map: str | None,
    position: str,
    periodic: str,
    options: Mapping[str, object],
    stack: Mapping[str, object],
) -> None:
    """Raises ValueError for forms whose energy is no smooth function of positions and cell."""
    why = {
        "spectral": "its random features see waves one by one, so that energies depend on where a "
        "structure lies and jump with the cell",
        "none": "energies would not depend on distances",
        "images": "images come and go with atoms, and energies depend on the choice of the cell",
        "softmax": "it takes a logarithm of the kernel that is cut off at 1e-9",
    }
    open_axes = "boundaries would be left out; molecules need no option, only pbc of False"
    for name, given, wanted, reason in (
        ("position", position, "multiplicative", why.get(position, "")),
        ("periodic", periodic, "reciprocal", open_axes if periodic == "none" else why["images"]),
    ):
        if given != wanted:
            raise ValueError(
                f"a potential needs {name}={wanted!r}; got {given!r}: {reason}; leave it out"
            )
    if mixing == "softmax":
        raise ValueError(
            f"a potential has no mixing='softmax': {why['softmax']}; use linear, quadratic or auto"
        )
    if feature_map is not None and feature_map not in _SMOOTH_MAPS:
        raise ValueError(
            f"feature_map={feature_map!r} has kinks or sums that pass 0, where forces jump; a "
            f"potential takes one of {', '.join(_SMOOTH_MAPS)}"
        )
    if stack.get("floor"):
        raise ValueError("floor cuts sums off, where forces jump; leave it out of a potential")
    if options.get("background") or options.get("positive") is False:
        raise ValueError(
            "position_options of a potential need background=0, as a constant for each pair would "
            "grow with the cell, and positive=True, as sums must not pass 0; leave them out"
        )
