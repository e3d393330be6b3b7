from collections.abc import Callable, Mapping
from typing import Any

import ase.build
import torch
from graph_cases import SHELLS
from torch_geometric.data import Data

from molflt.graph import EnergyRegressor, GraphAttention, PBCRadiusGraph, Potential
from molflt.graph.computation import EnergyComputation, EnergyInputs
from molflt.graph.encoding import GraphEncoding
from molflt.graph.geometry import Geometry
from molflt.graph.long_range import LongRange
from molflt.graph.mesh import use_mesh_
from molflt.graph.neighbors import neighbor_list
from refusals import Refusal, refused

Words = tuple[str, ...]
SMALL = {"dim": 16, "heads": 2, "layers": 1, "ffn_dim": 16, "num_features": 8}
MULTIPLIES = {"position": "multiplicative"}
NEAR = {**MULTIPLIES, "near_field": 3.0, "near_exact": True}
TRITON: dict[str, Any] = {**MULTIPLIES, "mixing": "triton", "periodic": "reciprocal"}
WEIGHTS = {**SHELLS, "spectrum": "shell_weights"}
MESH = {**MULTIPLIES, "periodic": "mesh"}
NAN = float("nan")
ONE = torch.ones(6, dtype=torch.long)
ZEROS = torch.zeros(6, 3)
POS = 4 * torch.rand(6, 3, generator=torch.Generator().manual_seed(0))
CELL = torch.eye(3)
FLAT = CELL[:, [0, 1, 1]]
FAR = POS + torch.tensor([0.0, 0, 0, 0, 0, 9e4])[:, None]
AXES = torch.tensor([[True, False, False], [True, True, False]])
DESCRIBED = EnergyRegressor(**SMALL, descriptors=True)


def data(**change: Any) -> Data:
    """Returns a small slab; None leaves an attribute out."""
    whole = {
        "pos": POS,
        "atomic_numbers": torch.tensor([1, 8, 29, 29, 29, 78]),
        "tags": torch.tensor([2, 2, 1, 1, 0, 0]),
        "cell": 6 * torch.eye(3)[None],
        "pbc": torch.tensor([[True, True, False]]),
        "fixed": torch.zeros(6, dtype=torch.bool),
    }
    return Data(**{key: value for key, value in {**whole, **change}.items() if value is not None})


# options of GraphAttention, option, expected, got
LAYERS: list[tuple[dict[str, Any], *Words]] = [
    ({"periodic": "yes"}, "periodic", "reciprocal", "'yes'"),
    ({"periodic": "reciprocal", "feature_map": "elu"}, "'elu'", "takes_projected", "use one of"),
    ({**MULTIPLIES, "near_field": 0.1}, "near_field", "above 0.2", "0.1"),
    ({"near_exact": True}, "near_exact", "without near_field"),
    (
        {**NEAR, "periodic": "reciprocal", "position_options": {"spectrum": "gaussian_mixture"}},
        *("near_field", "isotropic", "GaussianMixture"),
    ),
    ({**MESH, "mixing": "softmax"}, "periodic='mesh'", "multiplicative kernel", "softmax"),
    ({**MESH, "position_options": {"spectrum": "gaussian_mixture"}}, "mesh", "", "GaussianMixture"),
    ({"position_options": {"dim": 2}}, "position_options dim", "one of 3", "2"),
    ({**MESH, "position_options": WEIGHTS}, "'shell_weights'", "another spectrum", "OnMesh"),
    ({**NEAR, "periodic": "images"}, "near_field", "'reciprocal'", "Images"),
    ({**NEAR, "mixing": "softmax"}, "near_exact", "mixing='softmax'"),
    ({"position": "multiplicative", "mixing": "triton", "periodic": "images"}, "triton", "Images"),
    ({**MESH, "mesh_order": 7}, "mesh_order", "4, 5, 6, 8", "7"),
]

# options of EnergyRegressor, option, expected, got
REGRESSORS: list[tuple[dict[str, Any], *Words]] = [
    ({"neighbor_cutoff": NAN}, "neighbor_cutoff", "positive", "nan"),
    ({"message_pairs": "all"}, "message_pairs", "without messages"),
    (
        {"messages": 1, "message_pairs": "adsorbate", "readout": "all"},
        *("message_pairs", "energies of adsorbates", "readout='all'"),
    ),
    ({"move_atoms": True}, "move_atoms", "2 passes or more", "refinements=1"),
    ({"far_field": False, "near_field": 0}, "far_field", "change one", "near_field=0"),
]

# options of Potential, option, expected, got
POTENTIALS: list[tuple[dict[str, Any], *Words]] = [
    ({"position": "spectral"}, "position", "'multiplicative'", "'spectral'"),
    ({"periodic": "images"}, "periodic", "'reciprocal'", "'images'"),
    ({"mixing": "softmax"}, "mixing='softmax'", "linear, quadratic or auto", "logarithm"),
    ({"mixing": "triton"}, "mixing='triton'", "linear, quadratic or auto", "second derivatives"),
    ({"feature_map": "relu"}, "feature_map='relu'", "polynomial", "kinks"),
    ({"feature_map": "polynomial", "num_features": None, "degree": 3}, "degree=3", "omit"),
    ({"normalize": "unmasked"}, "normalize='unmasked'", "'none'", "energies per atom"),
    ({"position_options": {"positive": False}}, "position_options", "positive=True"),
    ({"position_options": {"spectrum": "matern"}}, "position_options", "gaussian_basis"),
    ({"long_range": [1], "long_range_smearing": 2.0}, "smearing", "below 1.41", "2"),
    ({"total_charge": True, "long_range": [6]}, "total_charge", "power 1", "[6]"),
]

# change of six atoms with periodic="reciprocal", option, expected, got
LAYER_INPUT: list[tuple[dict[str, Any], *Words]] = [
    ({"x": torch.zeros(6, 4)}, "x must have shape", "(atoms, 16)", "(6, 4)"),
    ({"pos": 1e8 * POS}, "pos", "within 100000 Å", "atom 0"),
    ({"cell": None, "pbc": None}, "cell, (graphs, 3, 3), Å", "pbc of False"),
    ({"batch": torch.tensor([0, 1, 0, 1, 1, 1])}, "batch", "ascending", "after a later one"),
    ({"batch_size": 2}, "batch_size=2", "batch, (atoms,)", "None"),
    ({"cell": CELL.expand(2, 3, 3)}, "cell", "(1, 3, 3) or (3, 3)", "(2, 3, 3)"),
    ({"batch": ONE, "cell": torch.zeros(6, 3)}, "cell", "store (1, 3, 3) in the", "(6, 3)"),
]

# change of `data`, option, expected, got
DATA: list[tuple[dict[str, Any], *Words]] = [
    ({"atomic_numbers": None}, "atomic_numbers", "int64", "cell, fixed, pbc, pos, tags"),
    ({"atomic_numbers": ONE.float()}, "atomic_numbers", "integers", "torch.float32"),
    ({"atomic_numbers": 0 * ONE}, "atomic_numbers", "1 to 118", "0"),
    ({"atomic_numbers": ONE[:3]}, "atomic_numbers", "(6,)", "(3,)"),
    ({"tags": 3 * ONE}, "tags", "0 to 2", "3"),
    ({"charge": torch.tensor([2.0, 0.0])}, "charge", "(1,)", "(2,)"),
    ({"pos": torch.full((6, 3), NAN)}, "pos", "finite", "nan"),
    ({"charge": torch.tensor([2.0])}, "charge", "only potentials", "2 of the structure"),
    ({"multiplicity": torch.tensor([3])}, "multiplicity", "1", "3 of the structure"),
]
NO_DATA = [data()], data().to_dict(), ase.build.molecule("H2O"), "water.xyz"


def layer(
    change: Mapping[str, Any], periodic: str | None = "reciprocal"
) -> Callable[[Any], object]:
    whole = {"x": torch.zeros(6, 16), "pos": POS, "cell": 6 * CELL}
    made = GraphAttention(16, 2, num_features=8, periodic=periodic)
    return lambda _: made(**{**whole, **change})


def net(given: object) -> Callable[[Any], object]:
    return lambda _: EnergyRegressor(**SMALL, readout="all")(given)


def mapped(_: object) -> None:
    made = GraphAttention(16, 2, **NEAR)
    torch.func.vmap(lambda pos: made(torch.zeros(6, 16), pos))(POS.expand(3, -1, -1))


def traced(_: object) -> None:
    torch.jit.trace(GraphAttention(16, 2), (torch.zeros(6, 16), POS), check_trace=False)


def thin(_: object) -> None:
    neighbor_list(Geometry.of(POS, cell=torch.diag(torch.tensor([1.0, 1.0, 1e9]))), 0.6)


ROWS = [
    *(
        Refusal(lambda _, o=o: GraphAttention(**{"dim": 16, "heads": 2, **o}), *w)
        for o, *w in LAYERS
    ),
    *(Refusal(lambda _, o=o: EnergyRegressor(**{**SMALL, **o}), *w) for o, *w in REGRESSORS),
    *(Refusal(lambda _, o=o: Potential(**{**SMALL, **o}), *w) for o, *w in POTENTIALS),
    refused(
        lambda: GraphAttention(16, 2, num_feature=3),
        *("'num_feature'", "num_features?"),
        error=TypeError,
    ),
    *(Refusal(layer(change), *w) for change, *w in LAYER_INPUT),
    *(Refusal(net(data(**change)), *w) for change, *w in DATA),
    *(Refusal(net(given), "Data", "make_record", error=TypeError) for given in NO_DATA),
    refused(lambda: PBCRadiusGraph(1.0)(Data(pos=ZEROS[:, :2])), "pos", "x, y and z", "(6, 2)"),
    refused(lambda: EnergyComputation(EnergyRegressor(**SMALL, periodic="images")), "compiled"),
    refused(lambda: EnergyComputation(Potential(**SMALL)), "--compiled", "", "Potential"),
    Refusal(layer({"x": [[1.0, 2.0]]}), "x", "torch.Tensor", "list", TypeError),
    refused(lambda: DESCRIBED(data(atomic_numbers=10 * ONE)), "descriptors", "", "element 10"),
    refused(lambda: EnergyInputs.of(DESCRIBED, data(atomic_numbers=2 * ONE)), "element 2"),
    Refusal(layer({}, periodic=None), "has periodic=None"),
    Refusal(layer({"cell": None, "pbc": AXES[0]}, periodic=None), "has periodic=None"),
    # flat cells would have no images, and tiny cells too many
    *(
        Refusal(layer({"cell": cell}, "images"), "structure", "Å apart")
        for cell in (CELL / 10, FLAT)
    ),
    *(
        refused(
            lambda p=p, axes=axes: LongRange(3, p)(ZEROS, Geometry.of(POS, None, 6 * CELL, axes)),
            *("periodic axes", "structure"),
        )
        for p, axes in (((1,), AXES[0]), ((1, 6), AXES[1]))
    ),
    refused(lambda: Potential(**SMALL)(data(pos=FAR, cell=None, pbc=None)), "Å apart", "at most"),
    Refusal(mapped, "torch.func.vmap", "", "batch of 3"),
    Refusal(traced, "torch.jit.trace", "torch.export"),
    Refusal(thin, "the structure", "units", "one direction"),
    refused(lambda: neighbor_list(Geometry.of(POS)._replace(pos=NAN * POS), 3.0), "pos", "finite"),
    refused(
        lambda: use_mesh_(EnergyRegressor(**SMALL, periodic="none", near_field=0)), "mesh_order=5"
    ),
    refused(lambda: EnergyInputs.of(EnergyRegressor(**SMALL), data(tags=0 * ONE)), "tag > 0"),
    refused(lambda: use_mesh_(GraphEncoding(2, **TRITON)), "mesh_order=5", "", "mixing=['triton']"),
]
