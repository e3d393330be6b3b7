"""Interatomic potential: energies, with forces and stress as exact derivatives."""

import copy
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from molflt.atoms import Data, Tag
from molflt.attention.checks import no_effect
from molflt.attention.features import FEATURE_MAPS, FeatureMapName
from molflt.graph.encoding import GraphPositionName
from molflt.graph.geometry import Atoms, Geometry
from molflt.graph.long_range import ChargeShare, LongRange, dipole
from molflt.graph.neighbors import Neighbors
from molflt.graph.periodic import PeriodicName, Reciprocal
from molflt.graph.regressor import EnergyRegressor

_CHARGE_UNIT = 10.0  # scale of tokens per e; shares of 0.1 e are common
# smooth feature maps whose products, and thus normalizers, are positive
_SMOOTH_MAPS = [name for name, phi in FEATURE_MAPS.items() if phi.smooth and phi.positive_kernel]


class Potential(EnergyRegressor):
    """`EnergyRegressor` with a smooth, extensive and exactly periodic energy.

    The energy is a sum over all atoms, regardless of their tags. It is twice continuously
    differentiable, because pairs, images and nodes have weight 0 when they appear or disappear.
    Forces -dE/dr and the stress dE/d(strain) / volume are computed by automatic differentiation.
    Options that make the energy not smooth or not extensive raise ValueError.

    Two layers of `messages` instead of the radial summary are recommended (configs/potential.yaml).
    Without messages, energies depend on angles only through distances.

    Args:
        dim: width of tokens.
        heads: number of attention heads; must divide `dim`.
        feature_map: "positive" (default) or another smooth map with positive products, such as
            "exp" or "polynomial" of degree 2.
        position: must be "multiplicative".
        periodic: must be "reciprocal".
        max_frequency: largest frequency of the reciprocal nodes, 0.25 cycles/Å by default.
        radial_basis: size of the radial summary; 0 omits it.
        far_field: False ends attention at `near_field`. With L layers and R refinements, an atom
            depends on atoms at distances of up to L R times `near_field`, plus `neighbor_cutoff`
            for the radial summary and for each layer of messages, but not across a gap wider than
            both. `long_range` covers larger distances.
        long_range: one or more of the powers p = 1 (charges), 2, 4 and 6 (dispersion), which add
            energies of 1 / r^p between latent charges and all their images; see
            `molflt.graph.long_range.LongRange`.
        long_range_channels: number of charges per atom and power, 4 by default.
        long_range_cutoff: cutoff of near pairs, 8 Å by default; above 5.66 times the smearing.
        long_range_smearing: width sigma of the smeared charges, 1 Å by default; see `LongRange`.
        long_range_neutral: with True (the default), charges of p = 1 and 2 flow between atoms
            closer than 5 Å, and separate molecules are neutral. Use False for unknown charges.
        total_charge: use the total charge of each graph, `charge`, as an input to the tokens and to
            the charges of p = 1; see `ChargeShare`. Otherwise, charged data are rejected.
        options: further arguments of `EnergyRegressor`.

    Attributes:
        energy_std: buffer; unit of atomic energies, in eV.
        element_energies: (119,) buffer; in eV, by atomic number, added to atomic energies.
    """

    # excludes energy_std, which scales the forces of the original model
    of_data = ("energy_mean", "element_energies", "readout.by_contact")

    def __init__(
        self,
        dim: int = 128,
        heads: int = 8,
        *,
        feature_map: FeatureMapName | None = None,
        position: GraphPositionName = "multiplicative",
        periodic: PeriodicName = "reciprocal",
        max_frequency: float | None = None,
        radial_basis: int = 16,
        far_field: bool = True,
        long_range: list[int] | None = None,
        long_range_channels: int | None = None,
        long_range_cutoff: float | None = None,
        long_range_smearing: float | None = None,
        long_range_neutral: bool | None = None,
        total_charge: bool = False,
        **options: Any,
    ) -> None:
        named = {"position": position, "periodic": periodic, "feature_map": feature_map}
        _expect_smooth({**options, **named}, far_field)
        frequency = {} if max_frequency is None else {"max_frequency": max_frequency}
        scheme = Reciprocal(**frequency, smooth=True) if far_field else periodic
        # arguments that appear here are not options of the command line
        super().__init__(
            dim,
            heads,
            feature_map=feature_map,
            position=position,
            periodic=cast(PeriodicName, scheme),
            max_frequency=None if far_field else max_frequency,
            radial_basis=radial_basis,
            message_pairs=None,
            subsurface=True,
            position_head=False,
            move_atoms=False,
            readout="all",
            far_field=far_field,
            **options,
        )
        nn.init.ones_(self.readout.factor.weight)  # all tags are equal
        long_range_options = dict[str, Any](
            channels=long_range_channels,
            cutoff=long_range_cutoff,
            smearing=long_range_smearing,
            neutral=long_range_neutral,
        )
        self.long_range: LongRange | None = None
        if long_range:
            chosen = {name: x for name, x in long_range_options.items() if x is not None}
            self.long_range = LongRange(dim, long_range, total_charge=total_charge, **chosen)
            self.added_later = (*self.added_later, "long_range.neutral")
        else:
            unused = {f"long_range_{name}": value for name, value in long_range_options.items()}
            no_effect("without long_range", total_charge=total_charge or None, **unused)
        self.charge_share = ChargeShare(dim) if total_charge else None
        if total_charge:
            self.charge_vector = nn.Parameter(torch.zeros(dim))

    def forward(self, batch: Data) -> Mapping[str, Tensor]:
        """Computes energies, forces and stress, which are differentiable in training mode.

        Args:
            batch: see `EnergyRegressor.forward`; tags are ignored. With `total_charge`, also charge
                (graphs,), in units of e, which is 0 by default.

        Returns:
            "energy": (graphs,) float64, in eV; "forces": (atoms, 3), in eV/Å; "embedding": (atoms,
            dim), the tokens from which energies are read. If the batch has cells, also "stress":
            (graphs, 3, 3), in eV/Å^3, with ASE's sign (positive if the energy rises with the
            volume), NaN for graphs without a volume. With `long_range`, also the parts of the
            energy, "energy_local", "energy_near" and "energy_far"; see `parts`. With power 1, also
            "charges": (atoms,), in units of e, of the first channel, and "dipole": (graphs, 3), in
            e Å, about the mean position of the atoms, NaN with periodic axes.
        """
        # also works inside torch.inference_mode, where existing tensors cannot be differentiated
        with torch.inference_mode(False), torch.enable_grad():
            strained, pos, strain = _strained(batch)
            parts, others = self._parts(strained)
            energy = torch.stack(list(parts.values())).sum(dim=0)
            variables = [pos] if strain is None else [pos, strain]
            with torch.autocast(pos.device.type, enabled=False):  # in the precision of `forward`
                gradients = torch.autograd.grad(
                    energy.sum(), variables, create_graph=self.training, materialize_grads=True
                )
            out = {"energy": energy, "forces": -gradients[0], **others}
            if self.long_range is not None:
                out |= {f"energy_{name}": part for name, part in parts.items()}
            if strain is not None:
                volume = torch.linalg.det(strained.cell.detach()).abs()[:, None, None]
                strain_gradient = (gradients[1] + gradients[1].mT) / 2
                # NaN instead of 1 would reach the gradients of other graphs in the batch
                stress = strain_gradient / torch.where(volume > 0, volume, 1.0)
                out["stress"] = torch.where(volume > 0, stress, torch.nan)
        return out if self.training else {name: x.detach() for name, x in out.items()}

    def parts(self, batch: Data) -> dict[str, Tensor]:
        """Returns differentiable contributions to the energies, each float64 (graphs,), in eV.

        They are "local", from elements and attention, and, with `long_range`, also "near" and
        "far", the sharp and smooth parts of the interaction of latent charges.
        """
        return self._parts(batch)[0]

    def _parts(self, batch: Data) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Returns the parts of the energies, and the other outputs of `forward`."""
        untagged = copy.copy(batch)  # all atoms count equally
        untagged.tags = torch.full(batch.pos.shape[:1], int(Tag.SURFACE), device=batch.pos.device)
        weight = self.embedding.element.weight
        atoms = Atoms.of(untagged, weight, charged=self.charge_share is not None)
        geometry, out = atoms.geometry, self._predict(atoms)
        parts = {"local": out["energy"] + geometry.sum(self._references(atoms))}
        others = {"embedding": out["embedding"]}
        if self.long_range is not None:
            parts["near"], parts["far"], charges = self.long_range(out["embedding"], geometry)
            if 1 in self.long_range.powers:
                coulomb = charges[:, self.long_range.powers.index(1), 0]
                others |= {"charges": coulomb, "dipole": dipole(coulomb, geometry)}
        return parts, others

    def _refine(
        self, geometry: Geometry, tokens: Tensor, neighbors: Neighbors | None, fixed: Tensor
    ) -> tuple[Tensor, list[Tensor]]:
        if self.charge_share is not None:
            share = _CHARGE_UNIT * self.charge_share(tokens, geometry)
            tokens = tokens + share[:, None].to(tokens.dtype) * self.charge_vector
        return super()._refine(geometry, tokens, neighbors, fixed)


def _strained(batch: Data) -> tuple[Data, Tensor, Tensor | None]:
    """Applies zero strain; returns the batch, its positions and the strain (None without cells)."""
    pos = Geometry.of_data(batch).pos.detach().clone().requires_grad_()
    out = copy.copy(batch)
    for name, value in batch.to_dict().items():
        if isinstance(value, Tensor) and value.is_inference():  # autograd cannot save it
            out[name] = value.clone()
    if batch.get("cell") is None:
        out.pos = pos
        return out, pos, None
    cell = batch.cell.detach().clone().reshape(-1, 3, 3).to(pos.dtype)
    strain = torch.zeros_like(cell).requires_grad_()
    symmetric = (strain + strain.mT) / 2
    index = out.get("batch")
    by_atom = symmetric[0].expand(len(pos), 3, 3) if index is None else symmetric[index]
    with torch.autocast(pos.device.type, enabled=False):  # not in half precision
        out.pos = pos + torch.einsum("nc,ncd->nd", pos, by_atom)
        out.cell = cell + cell @ symmetric
    return out, pos, strain


def _expect_smooth(options: Mapping[str, Any], far_field: bool) -> None:
    """Raises ValueError for options with which energies are not smooth or not extensive."""
    kernel = options.get("position_options") or {}
    polynomial = options["feature_map"] == "polynomial"
    rules = {
        "position": (
            options["position"] == "multiplicative",
            "'multiplicative'; with others, energies jump with the cell or ignore distances",
        ),
        "periodic": (
            options["periodic"] == "reciprocal",
            "'reciprocal', also for molecules, with pbc of False; with others, energies depend on "
            "the choice of the cell or mesh",
        ),
        "mixing": (
            options.get("mixing") not in ("softmax", "triton"),
            "linear, quadratic or auto; softmax takes the logarithm of a kernel clipped at 1e-9, "
            "and triton has no second derivatives, which training on forces needs",
        ),
        "feature_map": (
            options["feature_map"] in (None, *_SMOOTH_MAPS),
            f"one of {', '.join(_SMOOTH_MAPS)}; others have kinks or sums that can be 0",
        ),
        "num_features": (
            not (polynomial and options.get("num_features")),
            "None with the polynomial; projected products can be negative",
        ),
        "degree": (options.get("degree") in (None, 2), "2; products of degree 3 can be negative"),
        "normalize_qk": (
            not (polynomial and options.get("normalize_qk") is False),
            "True with the polynomial; products can otherwise be negative",
        ),
        "floor": (not options.get("floor"), "0; clipped sums have kinks"),
        "normalize": (
            options.get("normalize") != "unmasked",
            "'none' or the default; energies per atom would depend on the size of the cell",
        ),
        "position_options": (
            not kernel.get("background")
            and kernel.get("positive") is not False
            and (kernel.get("spectrum", "gaussian_basis") == "gaussian_basis" or not far_field),
            "without a background, which would grow with the cell, and with spectrum "
            "gaussian_basis and positive=True, because sums must not be 0",
        ),
    }
    for name, (holds, expected) in rules.items():
        if not holds:
            raise ValueError(
                f"{name} of a potential must be {expected}; got {name}={options[name]!r}; omit it"
            )
