"""Structures and layers for tests of attention over PyG batches, in all allowed combinations."""

from typing import NamedTuple

import torch
from ase import Atoms
from contract import EXACT
from torch import Tensor
from torch_geometric.data import Data

from molflt.graph import GraphAttention

DIM, HEADS = 16, 2
SHELLS = {"node_diameter": 12.0, "node_max_frequency": 0.2, "node_num_shells": 3}
NODES = {"gaussian": {"num_nodes": 5}, "sobol": {"num_nodes": 5}, "shells": SHELLS}
SCHEMES = {"images": {"image_cutoff": 4.0}}
SCHEMES |= {name: {"max_frequency": 0.2} for name in ("reciprocal", "mesh")}
TRICLINIC = torch.tensor([[7.0, 0.4, 0.1], [-2.0, 6.0, 0.3], [0.5, 1.0, 6.5]])
# not periodic along the third axis, which need not have a vector
SLAB = torch.tensor([[6.0, 0.3, 0.2], [1.5, 6.5, -0.4], [0.0, 0.0, 0.0]])
PBC = {"crystal": (True, True, True), "slab": (True, True, False), "molecule": (False,) * 3}
CELLS = {"crystal": TRICLINIC, "slab": SLAB, "molecule": torch.zeros(3, 3)}


class Graph(NamedTuple):
    x: Tensor
    pos: Tensor
    cell: Tensor
    pbc: Tensor


def graph(kind: str, atoms: int, seed: int = 0) -> Graph:
    """Returns random atoms in a ball of about 6 Å, which may lie outside the cell; float64."""
    generator = torch.Generator().manual_seed(100 * atoms + seed)
    x = torch.randn(atoms, DIM, dtype=torch.float64, generator=generator)
    pos = 2.5 * torch.randn(atoms, 3, dtype=torch.float64, generator=generator)
    return Graph(x, pos, CELLS[kind].double(), torch.tensor(PBC[kind]))


def mixed() -> list[Graph]:
    """Returns a crystal, a slab, a molecule, a single atom and an empty graph."""
    kinds = {"crystal": 7, "slab": 12, "molecule": 5}
    graphs = [graph(kind, atoms) for kind, atoms in kinds.items()]
    return [graphs[0], graph("molecule", 1), graphs[1], graph("slab", 0), graphs[2]]


def collated(graphs: list[Graph]) -> dict:
    sizes = torch.tensor([len(each.x) for each in graphs])
    return {
        "x": torch.cat([each.x for each in graphs]),
        "pos": torch.cat([each.pos for each in graphs]),
        "batch": torch.arange(len(graphs)).repeat_interleave(sizes),
        "cell": torch.stack([each.cell for each in graphs]),
        "pbc": torch.stack([each.pbc for each in graphs]),
        "batch_size": len(graphs),
    }


def run(layer: GraphAttention, graphs: list[Graph]) -> list[Tensor]:
    return list(layer(**collated(graphs)).split([len(each.x) for each in graphs]))


def data(atoms: Atoms, **more: Tensor) -> Data:
    """Returns the structure as PyG data, float64."""
    return Data(
        pos=torch.tensor(atoms.positions),
        atomic_numbers=torch.tensor(atoms.numbers),
        cell=torch.tensor(atoms.cell.array)[None],
        pbc=torch.tensor(atoms.pbc)[None],
        **more,
    )


class Kind(NamedTuple):
    position: str
    periodic: str
    near: bool | str  # "exact" also for q.k of near pairs
    nodes: str
    mixing: str

    def __str__(self) -> str:
        return "-".join(str(word) for word in self if word)

    def build(self, seed: int = 0, **options) -> GraphAttention:
        """Returns a float64 layer whose mask is far from uniform."""
        extra = {"num_gaussians": 6}
        lattice = self.periodic in ("reciprocal", "mesh")
        if not lattice and self.mixing != "softmax":
            extra |= {"nodes": self.nodes, **NODES[self.nodes]}
        if self.position == "multiplicative" and not lattice:
            extra["background"] = 4.0  # above the ripples, so no normalizer is near 0
        torch.manual_seed(seed)
        arguments = {
            "position": self.position,
            "periodic": self.periodic,
            "near_field": 3.0 if self.near else None,
            "near_exact": self.near == "exact",
            "mixing": self.mixing,
            **SCHEMES.get(self.periodic, {}),
            **({} if self.mixing == "softmax" else {"num_features": 16}),
        }
        options.setdefault("position_options", {})
        options["position_options"] = {**extra, **options["position_options"]}
        return uneven(GraphAttention(DIM, HEADS, **{**arguments, **options}).double())


def uneven(layer: GraphAttention) -> GraphAttention:
    """Makes the mask of a layer far from uniform, and returns the layer."""
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if name.endswith(".amplitude"):
                parameter.normal_(std=0.5)
            elif "to_" in name and parameter.ndim == 2:
                parameter.normal_(std=0.3)
    return layer


def kinds(*mixings: str) -> list[Kind]:
    """Returns the allowed combinations; rules of nodes vary only in graphs without images."""
    found = []
    for mixing in mixings:
        for periodic in ("none", "images", "reciprocal"):
            sampled = periodic == "none" and mixing != "softmax"
            for nodes in NODES if sampled else ["gaussian"]:
                found.append(Kind("spectral", periodic, False, nodes, mixing))
                for near in (False, True)[: 1 if periodic == "images" else 2]:
                    found.append(Kind("multiplicative", periodic, near, nodes, mixing))
        if mixing != "softmax":
            more = ("none", "exact"), ("reciprocal", "exact"), ("mesh", False), ("mesh", True)
            found += [Kind("multiplicative", *each, "gaussian", mixing) for each in more]
    return found


ALL = kinds("linear", "softmax", "auto")  # test_linear_equals_quadratic compares "quadratic"
FEW = [kind for kind in kinds("linear") if kind.nodes == "gaussian"]


def close(found: list[Tensor], expected: list[Tensor]) -> None:
    """Asserts that all values are finite and agree to 1e-10."""
    for one, other in zip(found, expected, strict=True):
        assert torch.isfinite(one).all()
        torch.testing.assert_close(one, other, **EXACT)
