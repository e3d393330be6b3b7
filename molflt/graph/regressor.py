"""IS2RE model, which predicts relaxed energies and displacements from initial structures."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from molflt.atoms import MAX_ATOMIC_NUMBER, Data, Tag
from molflt.attention import Attention, Stack
from molflt.attention.checks import known_names, no_effect, not_negative, one_of, positive
from molflt.attention.features import FeatureMapName
from molflt.attention.positions.base import MixingName
from molflt.attention.stack import ATTENTION, Redrawn
from molflt.graph.encoding import GraphEncoding, GraphPositionName, _encode, _make_encoding
from molflt.graph.geometry import Atoms, Geometry
from molflt.graph.heads import AtomEmbedding, EnergyReadout, MessagePairs, PositionHead, ReadoutName
from molflt.graph.neighbors import Neighbors, neighbor_list
from molflt.graph.periodic import Near, Open, PeriodicName

_MAX_MOVE = 1.0  # Å; training diverges with unbounded moves
_ENERGIES = ("energy_mean", "energy_std", "element_energies")  # buffers in float64
_ATOM_AXES = {"displacement_by_pass": 1}  # axis of the atoms in outputs; in others 0


class EnergyRegressor(Redrawn):
    """Transformer that predicts the relaxed energy of an initial structure.

    The model has element and tag embeddings, attention blocks with a relative encoding that is
    learned per head and shared by all layers, several passes with shared weights, and a
    tag-weighted sum over atoms. This is FLT's OC20 model (arXiv:2302.01925) with 3D-Graphormer's
    recipe (arXiv:2203.04810). Unlike FLT's model, it has by default a multiplicative kernel that is
    exactly periodic and exact for near pairs, with smaller errors (docs/results).

    Args:
        dim: width of tokens.
        heads: number of attention heads; must divide `dim`.
        mixing: "linear" (O(atoms)), "quadratic" (the same result from the attention matrix, cheaper
            for few atoms), "auto" (the cheaper of these two), "softmax" (exact mask, O(atoms^2)) or
            "triton" (the linear form of a multiplicative position on a GPU).
        feature_map: feature map phi of kernelized attention, "positive" by default.
        num_features: number of features m per head, 64 by default.
        position: "multiplicative" (a kernel multiplies phi(q).phi(k)), "spectral" (FLT: its mask is
            added to the logit) or "none" (a Performer, or plain softmax).
        position_options: options of the position, such as spectrum, num_gaussians and nodes; see
            `molflt.graph.encoding.GraphEncoding`.
        periodic: "none"; "images", in-plane periodic images near the adsorbate as extra keys;
            "reciprocal", nodes on the reciprocal lattice of each cell, exactly periodic; "mesh",
            the same sums by splines, for large cells; or "auto", a mesh for cells of more than
            1,000 atoms and 500 nodes, and nodes for other cells. By default "auto" for a
            multiplicative position and "none" for other positions.
        image_cutoff: distance from the adsorbate within which images are kept, 8 Å by default.
        max_frequency: largest frequency of the reciprocal nodes, 0.25 cycles/Å by default; the
            number of nodes grows as its cube.
        mesh_order: order of the mesh splines: 4, 5 (default), 6 or 8; higher orders are more
            accurate but slower.
        near_field: cutoff, in Å, of a multiplicative kernel of neighbors, which replaces that of
            the nodes up to half of the cutoff and then fades out; by default 5, or 0 with images.
            With 0, the kernel uses only nodes.
        near_exact: compute exp(q.k) where the near field replaces the kernel, as in softmax,
            without random features; for feature maps that estimate exp(q.k).
        neighbor_cutoff: neighborhood radius of embedding, readout and position head, 5 Å by
            default.
        radial_basis: size of the embedding's radial summary; 0 omits it.
        messages: number of layers of PaiNN's equivariant messages between neighbors before
            attention, which add angles to tokens; see `molflt.graph.messages.EquivariantMessages`.
            0 omits them.
        message_pairs: pairs of neighbors that exchange messages: "all" (default), or "adsorbate"
            for pairs that include an adsorbate atom. Messages among slab atoms identify metals by
            their lattice constants, which is misleading for unseen metals.
        descriptors: also describe elements by period, group, radius, electronegativity and valence
            electrons. This generalizes to unseen elements; see `ElementEmbedding`.
        subsurface: False omits the atoms with tag 0, which are half of a slab or more. Predictions
            then do not depend on these atoms (as in PhAST, arXiv:2211.12020). "near" keeps those
            within `neighbor_cutoff` of an adsorbate atom, as surface atoms (tag 1), which reduces
            errors for alloys and steps.
        position_head: predict displacements to the relaxed positions as an auxiliary task.
        move_atoms: after each pass except the last, move each free atom by less than 1 Å, as
            predicted by the position head, and recompute the mask.
        readout: atoms that contribute to the energy; see `molflt.graph.heads.EnergyReadout`. Use
            "adsorbate" for adsorption energies, "contact" if these are relative to the free
            molecule, and "all" for total energies.
        far_field: False ends attention at the near field.
        stack: further arguments of `molflt.attention.Stack`.

    Attributes:
        energy_mean, energy_std: buffers, in eV, that convert the normalized output to energies.
        element_energies: (119,) buffer; reference energies of the elements, in eV, by atomic
            number; 0 without references.
        trained_elements: (119,) bool, buffer; True for atomic numbers seen in training. Without
            `descriptors`, energies of structures with other elements are arbitrary.
        adds_baseline: bool, buffer; True if the model learned the difference from baseline
            energies, which it then adds to its output.
        added_later: names of buffers that are missing from weights saved by earlier versions and
            are then set to defaults.
        of_data: names of buffers that each run computes from its data, even if it starts from the
            weights of a different run.
        seen_by: for each buffer that records the training data of a weight, the name of that
            weight. A run that starts from these weights copies either both the buffer and the
            weight, or neither.
    """

    added_later: tuple[str, ...] = ("element_energies", "readout.by_contact", "adds_baseline")
    of_data: tuple[str, ...] = (*_ENERGIES, "readout.by_contact", "adds_baseline")
    seen_by: ClassVar = {"trained_elements": "embedding.element.weight"}

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
        periodic: PeriodicName | None = None,
        image_cutoff: float | None = None,
        max_frequency: float | None = None,
        mesh_order: int | None = None,
        near_field: float | None = None,
        near_exact: bool = False,
        neighbor_cutoff: float | None = None,
        radial_basis: int = 0,
        messages: int = 0,
        message_pairs: MessagePairs | None = None,
        descriptors: bool = False,
        subsurface: bool | Literal["near"] = True,
        position_head: bool = True,
        move_atoms: bool = False,
        readout: ReadoutName = "adsorbate",
        far_field: bool = True,
        **stack: Any,
    ) -> None:
        super().__init__()
        known_names(EnergyRegressor, stack, Stack, Attention)
        not_negative(radial_basis=radial_basis, messages=messages)
        sees_neighbors = position_head or radial_basis or messages or subsurface == "near"
        if not sees_neighbors and readout == "all":
            why = "with readout='all', without position_head, radial_basis and messages"
            no_effect(why, neighbor_cutoff=neighbor_cutoff)
        one_of("subsurface", subsurface, (True, False, "near"))
        cutoff = 5.0 if neighbor_cutoff is None else neighbor_cutoff
        positive(neighbor_cutoff=cutoff)
        if not messages:
            no_effect("without messages", message_pairs=message_pairs)
        if message_pairs == "adsorbate" and readout == "all":
            raise ValueError(
                "message_pairs='adsorbate' is for energies of adsorbates; got readout='all', which "
                "also takes structures without tags; change one of them"
            )
        kernel = dict[str, Any](mixing=mixing, feature_map=feature_map, num_features=num_features)
        multiplicative = position == "multiplicative"
        scheme: str | Open = periodic or ("auto" if multiplicative else "none")
        if near_field is None and multiplicative and scheme != "images":
            near_field = 5.0
        if not far_field:
            why = "with far_field=False"
            no_effect(why, max_frequency=max_frequency, position_options=position_options)
            if scheme not in ("auto", "reciprocal") or not near_field:
                raise ValueError(
                    "far_field=False needs a multiplicative position with a near field and "
                    f"periodic 'auto' or 'reciprocal'; got periodic={scheme!r} and {near_field=}; "
                    "change one"
                )
            scheme = Near()
        self.encoding: GraphEncoding | None = _make_encoding(
            heads,
            position,
            kernel,
            periodic=scheme,
            near_field=near_field,
            position_options=position_options,
            image_cutoff=image_cutoff,
            max_frequency=max_frequency,
            mesh_order=mesh_order,
            near_exact=near_exact,
        )
        blocks = Stack(
            dim,
            heads,
            position=None if self.encoding is None else self.encoding.position,
            # not options of this model, nor of its command line
            causal=False,
            mixer=ATTENTION,
            mixer_options=None,
            attention_layers=None,
            **kernel,
            **stack,
        )
        blocks.share_position()
        passes = blocks.refinements
        if move_atoms and not (position_head and passes > 1 and self.encoding is not None):
            raise ValueError(
                "move_atoms needs position_head, 2 passes or more and a position; got "
                f"{position_head=}, refinements={passes} and {position=}"
            )
        self.embedding = AtomEmbedding(
            dim, radial_basis, cutoff, descriptors, messages, message_pairs or "all"
        )
        self.neighbor_cutoff, self.descriptors = cutoff, descriptors
        self.subsurface, self.move_atoms = subsurface, move_atoms
        self.stack, self.readout = blocks, EnergyReadout(dim, readout, cutoff)
        self.sees_neighbors = self.embedding.sees_neighbors or self.readout.sees_neighbors
        self.position_head = PositionHead(dim, cutoff) if position_head else None
        self.energy_mean = nn.Buffer(torch.zeros((), dtype=torch.float64))
        self.energy_std = nn.Buffer(torch.ones((), dtype=torch.float64))
        by_element = torch.zeros(MAX_ATOMIC_NUMBER + 1, dtype=torch.float64)
        self.element_energies = nn.Buffer(by_element)
        self.register_load_state_dict_pre_hook(_fill_added)
        self.trained_elements = nn.Buffer(torch.zeros_like(by_element, dtype=torch.bool))
        self.adds_baseline = nn.Buffer(torch.zeros((), dtype=torch.bool))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "EnergyRegressor":
        """Applies a function as in `torch.nn.Module`, but keeps the dtype of energy buffers."""
        originals = {name: self.get_buffer(name) for name in _ENERGIES}
        super()._apply(fn, recurse)
        for name, original in originals.items():
            converted = self.get_buffer(name)
            if converted.dtype != original.dtype:
                self.register_buffer(name, original.to(converted.device))
        return self

    def forward(self, batch: Data) -> Mapping[str, Tensor]:
        """Predicts energies and, with a position head, displacements.

        Args:
            batch: PyG structure or batch with pos (atoms, 3), in Å, and atomic_numbers (atoms,).
                Optional: cell (graphs, 3, 3), or (3, 3) for one structure, in Å, omitted for
                molecules; pbc (graphs, 3) bool, by default all periodic if a cell is given; tags
                (atoms,), required unless `readout` is "all"; with `move_atoms`, also fixed (atoms,)
                bool, by default all False; with `adds_baseline`, also y_baseline (graphs,), in eV.

        Returns:
            "energy": (graphs,) float64, in eV; "embedding": (atoms, dim), the final tokens. With a
            position head, "displacement": (atoms, 3), in Å, from the initial to the relaxed
            position. With `move_atoms`, "displacement_by_pass": (passes, atoms, 3), in Å, the
            displacement after each pass. Omitted atoms do not move and have an embedding of 0. In
            evaluation mode, unless `readout` is "all", also "adsorbate_energy": (atoms,) float64,
            in eV, the contribution of each adsorbate atom and of the slab atoms in contact with it;
            the sum over an adsorbate is its energy. Models with a baseline do not return this
            entry.
        """
        atoms = Atoms.of(batch, self.embedding.element.weight)
        references = self._references(atoms)
        if self.subsurface is True:
            out = self._predict(atoms)
        else:
            remaining, mask = self.without_subsurface(atoms)
            out = self._predict(remaining)
            for name in out.keys() - {"energy"}:
                kept, axis = out[name], _ATOM_AXES.get(name, 0)
                shape = (*kept.shape[:axis], len(mask), *kept.shape[axis + 1 :])
                out[name] = kept.new_zeros(shape).index_copy(axis, mask.nonzero()[:, 0], kept)
        out["energy"] = out["energy"] + atoms.geometry.sum(references) + self.baseline(batch)
        if "adsorbate_energy" in out:
            out["adsorbate_energy"] = out["adsorbate_energy"] + references
        return out

    def without_subsurface(self, atoms: Atoms) -> tuple[Atoms, Tensor]:
        """Omits atoms as `subsurface` states; returns the others, and the mask that selects them.

        Graphs that have only atoms with tag 0 are not changed.
        """
        geometry = atoms.geometry
        if self.subsurface == "near":
            assert geometry.tags is not None
            center, neighbor, *_ = neighbor_list(geometry, self.neighbor_cutoff)
            near = neighbor[geometry.tags[center] == Tag.ADSORBATE.value]
            tags = geometry.tags.clone()
            tags[near] = tags[near].clamp(min=Tag.SURFACE.value)
            atoms = atoms._replace(geometry=geometry._replace(tags=tags))
        return atoms.without_subsurface()

    def baseline(self, batch: Data) -> Tensor | float:
        """Returns the baseline energies (graphs,) to be added, in eV, or 0 without a baseline."""
        if not self.adds_baseline:
            return 0.0
        energies = batch.get("y_baseline")
        if energies is None or not bool(energies.isfinite().all()):
            raise ValueError(
                "the model corrects baseline energies; expected finite y_baseline in eV; got "
                "structures without it; compute it as for the training data (molflt data baseline)"
            )
        return energies.double()

    def _references(self, atoms: Atoms) -> Tensor:
        """Returns energies of elements (atoms,), float64, in eV; 0 for slab atoms by contact."""
        has_reference = (atoms.geometry.tags == Tag.ADSORBATE.value) | ~self.readout.by_contact[0]
        return self.element_energies[atoms.numbers] * has_reference

    def _predict(self, atoms: Atoms) -> dict[str, Tensor]:
        """Returns the outputs of `forward` without references and baselines."""
        geometry, numbers, fixed = atoms
        neighbors = None
        if self.position_head is not None or self.sees_neighbors:
            neighbors = neighbor_list(geometry, self.neighbor_cutoff)
        if self.training:
            self.trained_elements[numbers] = True
        tokens = self.embedding(numbers, geometry, neighbors)
        h, displacements = self._refine(geometry, tokens, neighbors, fixed)
        atomic, contacts = self.readout(h, geometry, neighbors)
        energy = geometry.sum(atomic.double()) * self.energy_std + self.energy_mean
        out = {"energy": energy, "embedding": h}
        # a baseline cannot be divided among adsorbates
        if contacts is not None and not self.training and not self.adds_baseline:
            assert neighbors is not None and geometry.tags is not None
            adsorbate = geometry.tags == Tag.ADSORBATE.value
            shared = self.readout.on_adsorbates(atomic, contacts, adsorbate, neighbors)
            out["adsorbate_energy"] = shared.double() * self.energy_std
        if displacements:
            out["displacement"] = displacements[-1]
            if len(displacements) > 1:
                out["displacement_by_pass"] = torch.stack(displacements)
        return out

    def _refine(
        self, geometry: Geometry, tokens: Tensor, neighbors: Neighbors | None, fixed: Tensor
    ) -> tuple[Tensor, list[Tensor]]:
        """Returns the tokens (atoms, dim), and displacements (atoms, 3) after each pass, in Å."""
        start, displacements = geometry.pos, []
        size_classes = _encode(self.encoding, geometry, self._in_near_field(neighbors))
        for _ in range(self.stack.refinements - 1):
            tokens = size_classes.apply(self.stack.one_pass, tokens)
            if self.move_atoms:
                assert self.position_head is not None and neighbors is not None
                step = self.position_head(self.stack.norm(tokens), neighbors)
                displacements.append(geometry.pos - start + step)
                # smoothly shortened to less than `_MAX_MOVE`
                move = step * (1 + (step / _MAX_MOVE).square().sum(dim=-1, keepdim=True)).rsqrt()
                geometry = geometry._replace(pos=geometry.pos + move * ~fixed[:, None])
                neighbors = neighbor_list(geometry, self.neighbor_cutoff)
                size_classes = _encode(self.encoding, geometry, self._in_near_field(neighbors))
        h = self.stack.norm(size_classes.apply(self.stack.one_pass, tokens))
        if self.position_head is not None:
            assert neighbors is not None
            displacements.append(geometry.pos - start + self.position_head(h, neighbors))
        return h, displacements

    def _in_near_field(self, neighbors: Neighbors | None) -> Neighbors | None:
        """Returns the neighbors if they are those of the near field; otherwise None."""
        near_field = None if self.encoding is None else self.encoding.near_field
        same_cutoff = near_field is not None and near_field.cutoff == self.neighbor_cutoff
        return neighbors if same_cutoff else None


def _fill_added(
    model: EnergyRegressor, weights: dict[str, Tensor], prefix: str, *_: object
) -> None:
    """Adds buffers that weights saved by earlier versions lack: False, or the initial numbers."""
    for name in model.added_later:
        initial = model.get_buffer(name)
        is_flag = initial.dtype == torch.bool
        weights.setdefault(prefix + name, torch.zeros_like(initial) if is_flag else initial)
