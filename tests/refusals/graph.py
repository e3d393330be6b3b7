"""Refused options and inputs of layers, models and transforms of atoms."""

from collections.abc import Callable, Mapping
from typing import Any

import ase.build
import numpy as np
import torch
from torch_geometric.data import Batch, Data

from molflt.graph import EnergyRegressor, GraphAttention, PBCRadiusGraph, Potential
from molflt.graph.computation import EnergyComputation
from molflt.graph.mesh import use_mesh_
from molflt.graph.periodic import Reciprocal
from refusals import Refusal

Words = tuple[str, ...]
SMALL = {"dim": 16, "heads": 2, "layers": 1, "ffn_dim": 16, "num_features": 8}
MULTIPLIES = {"position": "multiplicative"}
NEAR = {**MULTIPLIES, "near_field": 3.0, "near_exact": True}
MESH = {**MULTIPLIES, "periodic": "mesh"}
MIXTURE = {"spectrum": "gaussian_mixture"}
NAN = float("nan")
META = torch.device("meta")  # another device that every machine has
ONE = torch.ones(6, dtype=torch.long)
ZEROS = torch.zeros(6, 3)
POS = 4 * torch.rand(6, 3, generator=torch.Generator().manual_seed(0))
CELL, TRUE = torch.eye(3), torch.ones(3, dtype=torch.bool)


def data(**change: Any) -> Data:
    """A small slab; None leaves an attribute out."""
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
    ({"dim": -2}, "dim", "at least 1", "-2"),
    ({"heads": 0}, "heads", "at least 1", "0"),
    ({"heads": 3}, "heads=3", "multiple of heads", "16"),
    ({"mixing": "fast"}, "mixing", "softmax", "'fast'"),
    ({"periodic": "yes"}, "periodic", "reciprocal", "'yes'"),
    ({"position": "rotary"}, "position", "multiplicative", "'rotary'"),
    ({"feature_map": "swish"}, "feature_map", "positive", "'swish'"),
    ({"causal": True}, "causal", "not ordered"),
    ({"position": "none", "periodic": "images"}, "periodic='images'", "no effect with position"),
    ({"position": "none", "position_options": {"num_nodes": 3}}, "position_options", "no effect"),
    ({"image_cutoff": 4.0}, "image_cutoff=4.0", "no effect with periodic='none'"),
    ({"periodic": Reciprocal(0.3), "image_cutoff": 4.0}, "image_cutoff", "periodic=Reciprocal"),
    ({"periodic": "images", "image_cutoff": -1.0}, "image_cutoff", "positive", "-1"),
    ({"periodic": "reciprocal", "max_frequency": 0.0}, "max_frequency", "positive", "0"),
    ({"periodic": "reciprocal", "feature_map": "elu"}, "'elu'", "projections", "use one of"),
    ({"near_field": 4.0}, "near_field=4.0", "kernel that multiplies", "'spectral'"),
    ({**MULTIPLIES, "near_field": -1.0}, "near_field", "positive", "-1"),
    ({**MULTIPLIES, "near_field": 0.1}, "near_field", "above 0.2", "0.1"),
    ({**NEAR, "periodic": "images"}, "near_field", "'reciprocal'", "Images"),
    ({"near_exact": True}, "near_exact", "without near_field"),
    ({**NEAR, "mixing": "softmax"}, "near_exact", "mixing='softmax'"),
    ({**NEAR, "feature_map": "relu"}, "near_exact", "positive, trigonometric", "'relu'"),
    ({**NEAR, "periodic": "reciprocal", "position_options": MIXTURE}, "near_field", "isotropic"),
    ({**MESH, "position": "spectral"}, "periodic='mesh'", "kernel that multiplies", "Spectral"),
    ({**MESH, "mixing": "softmax"}, "periodic='mesh'", "kernel that multiplies", "softmax"),
    ({**MESH, "mesh_order": 7}, "mesh_order", "4, 5, 6, 8", "7"),
    ({**MESH, "position_options": MIXTURE}, "", "", "GaussianMixture"),
]

# options of EnergyRegressor, option, expected, got
REGRESSORS: list[tuple[dict[str, Any], *Words]] = [
    ({"layers": 0}, "layers", "", "0"),
    ({"radial_basis": -1}, "radial_basis", "at least 0", "-1"),
    ({"neighbor_cutoff": NAN}, "neighbor_cutoff", "positive", "nan"),
    ({"neighbor_cutoff": 4.0, "position_head": False}, "neighbor_cutoff=4.0", "no effect"),
    ({"readout": "most"}, "readout", "contact", "'most'"),
    ({"message_pairs": "all"}, "message_pairs", "without messages"),
    ({"messages": 1, "message_pairs": "few"}, "message_pairs", "adsorbate", "'few'"),
    ({"messages": 1, "message_pairs": "adsorbate", "readout": "all"}, "message_pairs", "'all'"),
    ({"move_atoms": True}, "move_atoms", "2 passes or more", "refinements=1"),
    ({"near_field": 4.0, "position": "none"}, "near_field=4.0", "no effect"),
    ({"far_field": False, "near_field": 0}, "far_field", "leave one out", "near_field=0"),
    ({"far_field": False, "max_frequency": 0.2}, "max_frequency=0.2", "no effect with far_field"),
]

# options of Potential, option, expected, got
POTENTIALS: list[tuple[dict[str, Any], *Words]] = [
    ({"position": "spectral"}, "position", "'multiplicative'", "'spectral'"),
    ({"periodic": "images"}, "periodic", "'reciprocal'", "'images'"),
    ({"mixing": "softmax"}, "mixing='softmax'", "linear, quadratic or auto", "logarithm"),
    ({"feature_map": "relu"}, "feature_map='relu'", "polynomial", "kinks"),
    ({"feature_map": "polynomial", "num_features": None, "degree": 3}, "degree=3", "leave"),
    ({"feature_map": "polynomial", "num_features": 40}, "num_features=40", "leave it out"),
    ({"feature_map": "polynomial", "num_features": None, "normalize_qk": False}, "normalize_qk"),
    ({"floor": 0.1}, "floor", "leave it out"),
    ({"normalize": "unmasked"}, "normalize='unmasked'", "'none'", "energies per atom"),
    ({"position_options": {"background": 1.0}}, "position_options", "background"),
    ({"position_options": {"positive": False}}, "position_options", "positive=True"),
    ({"position_options": {"spectrum": "matern"}}, "position_options", "gaussian_basis"),
    ({"long_range_cutoff": 9.0}, "long_range_cutoff=9.0", "no effect without long_range"),
    ({"long_range": [1, 1]}, "powers", "each once", "[1, 1]"),
    ({"long_range": [3]}, "powers", "1, 2, 4, 6", "3"),
    ({"long_range": [1], "long_range_channels": 0}, "channels", "at least 1", "0"),
    ({"long_range": [1], "long_range_smearing": 2.0}, "smearing", "below 1.41", "2"),
    ({"total_charge": True}, "total_charge=True", "no effect without long_range"),
    ({"total_charge": True, "long_range": [6]}, "total_charge", "power 1", "[6]"),
]

# class, misspelt option, expected
MISSPELT: list[tuple[Callable[..., object], dict[str, Any], *Words]] = [
    (GraphAttention, {"num_feature": 3}, "'num_feature'", "num_features?"),
    (GraphAttention, {"near_feild": 3.0}, "'near_feild'", "near_field?"),
    (GraphAttention, {"xyz": 1}, "'xyz'", "help(GraphAttention)"),
    (EnergyRegressor, {"layer": 3}, "'layer'", "layers?"),
    (EnergyRegressor, {"causal": True}, "'causal'", "EnergyRegressor"),
    (Potential, {"readout": "all"}, "'readout'", "sets the argument"),
]

# change of six atoms with periodic="reciprocal", option, expected, got
LAYER_INPUT: list[tuple[dict[str, Any], *Words]] = [
    ({"x": torch.zeros(6, 4)}, "x must have shape", "(atoms, 16)", "(6, 4)"),
    ({"x": torch.zeros(6, 16).double()}, "x is torch.float64", "torch.float32"),
    ({"x": torch.zeros(6, 16).to(META)}, "x is on meta", "cpu"),
    ({"pos": None}, "pos", "(6, 3), Å", "None"),
    ({"pos": ZEROS.to(META)}, "pos is on meta", "cpu"),
    ({"pos": ZEROS[:3]}, "pos", "(6, 3), Å", "(3, 3)"),
    ({"pos": ZEROS.long()}, "pos", "real numbers", "torch.int64"),
    ({"pos": ZEROS.to(torch.complex64)}, "pos", "real numbers", "complex64"),
    ({"pos": 1e8 * POS}, "pos", "within 100000 Å", "atom 0"),
    ({"cell": None, "pbc": None}, "cell, (graphs, 3, 3), Å", "pbc of False"),
    ({"batch": (0 * ONE).to(META)}, "batch", "on cpu", "on meta"),
    ({"batch": torch.zeros(6)}, "batch", "whole numbers", "torch.float32"),
    ({"batch": ONE[:3]}, "batch", "(6,)", "(3,)"),
    ({"batch": torch.tensor([0, 1, 0, 1, 1, 1])}, "batch", "ascending", "after a later one"),
    ({"batch": torch.arange(6) - 1}, "batch", "0 to", "-1"),
    ({"batch": torch.arange(6), "batch_size": 3}, "batch must be 0 to 2", "batch_size", "5"),
    ({"batch_size": 0}, "batch is missing", "one graph", "batch_size=0"),
    ({"cell": CELL.expand(2, 3, 3)}, "batch is missing", "one graph", "2 by cell or pbc"),
    ({"pbc": TRUE.expand(2, 3)}, "batch is missing", "one graph", "2 by cell or pbc"),
    ({"batch": ONE, "cell": torch.zeros(6, 3)}, "cell", "store (1, 3, 3) in the", "(6, 3)"),
    ({"batch": ONE, "pbc": TRUE.repeat(2)}, "pbc", "store (1, 3) in the", "(6,)"),
    ({"batch": ONE, "cell": CELL.expand(3, 3, 3)}, "cell", "batch_size", "(3, 3, 3)"),
]

# change of `data`, option, expected, got
DATA: list[tuple[dict[str, Any], *Words]] = [
    ({"atomic_numbers": None}, "atomic_numbers", "int64", "cell, fixed, pbc, pos, tags"),
    ({"atomic_numbers": ONE.float()}, "atomic_numbers", "whole numbers", "torch.float32"),
    ({"atomic_numbers": 0 * ONE}, "atomic_numbers", "1 to 118", "0"),
    ({"atomic_numbers": 119 * ONE}, "atomic_numbers", "1 to 118", "119"),
    ({"atomic_numbers": ONE[:, None]}, "atomic_numbers", "(6,)", "(6, 1)"),
    ({"atomic_numbers": ONE.to(META)}, "atomic_numbers", "on cpu", "on meta"),
    ({"tags": 3 * ONE}, "tags", "0 to 2", "3"),
    ({"fixed": ONE.float()}, "fixed", "bool", "torch.float32"),
    ({"pos": torch.full((6, 3), NAN)}, "pos", "finite", "nan"),
    ({"pbc": torch.ones(1, 3)}, "pbc", "bool", "torch.float32"),
    ({"pbc": TRUE[:2]}, "pbc", "(1, 3) or (3,)", "(2,)"),
    ({"cell": None}, "pbc is True", "cell", "None"),
    ({"cell": torch.full((1, 3, 3), NAN)}, "cell", "finite", "NaN"),
    ({"cell": CELL.repeat(2, 1, 1)}, "batch is missing", "one graph", "2"),
    ({"charge": torch.tensor([2.0])}, "charge", "0", "2 of graph 0"),
    ({"charge": torch.tensor([2.0, 0.0])}, "charge", "(1,)", "(2,)"),
    ({"multiplicity": torch.tensor([3])}, "multiplicity", "1", "3 of graph 0"),
]
NO_DATA = [data()], data().to_dict(), ase.build.molecule("H2O"), "water.xyz"
NO_TENSORS: dict[str, object] = {
    "pos": np.zeros((6, 3)),
    "cell": np.eye(3),
    "pbc": [True, True, False],
    "tags": [0] * 6,
    "batch": (0,) * 6,
    "atomic_numbers": [1] * 6,
}

# field of Data, option, expected, got
EDGES: list[tuple[dict[str, Any], *Words]] = [
    ({"pos": ZEROS[:, :2]}, "pos", "(atoms, 3)", "(6, 2)"),
    ({"pbc": TRUE}, "lattice planes", "at least 0.5 Å", "got 0 Å"),
    ({"cell": torch.ones(3, 3)}, "lattice planes", "at least 0.5 Å", "graph 0"),
]

NOT_EXPORTED: list[dict[str, Any]] = [
    {"move_atoms": True, "refinements": 2},
    {"position": "spectral", "periodic": "images"},
    {"periodic": "mesh"},
    {"mixing": "softmax", "position": "none", "num_features": None},
]


def layer(change: Mapping[str, Any]) -> Callable[[Any], object]:
    whole = {"x": torch.zeros(6, 16), "pos": POS, "cell": 6 * CELL}
    made = GraphAttention(16, 2, num_features=8, periodic="reciprocal")
    return lambda _: made(**{**whole, **change})


def net(given: object) -> Callable[[Any], object]:
    return lambda _: EnergyRegressor(**SMALL, readout="all")(given)


def without_descriptors(_: object) -> None:
    model = EnergyRegressor(**SMALL, descriptors=True)
    model(Batch.from_data_list([data(atomic_numbers=10 * ONE)]))


def traced(_: object) -> None:
    torch.jit.trace(GraphAttention(16, 2), (torch.zeros(6, 16), POS), check_trace=False)


ROWS = [
    *(
        Refusal(lambda _, o=o: GraphAttention(**{"dim": 16, "heads": 2, **o}), *w)
        for o, *w in LAYERS
    ),
    *(Refusal(lambda _, o=o: EnergyRegressor(**{**SMALL, **o}), *w) for o, *w in REGRESSORS),
    *(Refusal(lambda _, o=o: Potential(**{**SMALL, **o}), *w) for o, *w in POTENTIALS),
    *(
        Refusal(lambda _, make=make, o=o: make(16, 2, **o), *w, error=TypeError)
        for make, o, *w in MISSPELT
    ),
    *(Refusal(layer(change), *w) for change, *w in LAYER_INPUT),
    *(
        Refusal(layer({name: [[1.0, 2.0]]}), name, "torch.Tensor", "list", TypeError)
        for name in ("x", "pos", "batch", "cell", "pbc")
    ),
    *(Refusal(net(data(**change)), *w) for change, *w in DATA),
    *(Refusal(net(given), "Data", "make_record", error=TypeError) for given in NO_DATA),
    *(
        Refusal(net(data(**{name: given})), name, "torch.as_tensor", error=TypeError)
        for name, given in NO_TENSORS.items()
    ),
    *(
        Refusal(lambda _, f=f: PBCRadiusGraph(1.0)(Data(**{"pos": ZEROS, **f})), *w)
        for f, *w in EDGES
    ),
    Refusal(lambda _: PBCRadiusGraph(NAN), "r must be", "positive", "nan"),
    Refusal(lambda _: PBCRadiusGraph("3"), "r must be", "number", "'3'", TypeError),
    Refusal(lambda _: PBCRadiusGraph(1.0, 0), "max_neighbors", "at least 1", "0"),
    *(
        Refusal(lambda _, o=o: EnergyComputation(EnergyRegressor(**{**SMALL, **o})), "exported")
        for o in NOT_EXPORTED
    ),
    Refusal(
        lambda _: use_mesh_(EnergyRegressor(**SMALL, periodic="none", near_field=0)), "mesh_order=5"
    ),
    Refusal(lambda _: use_mesh_(Potential(**SMALL)), "mesh_order=5", "sums over reciprocal nodes"),
    Refusal(without_descriptors, "descriptors", "", "element 10"),
    Refusal(traced, "torch.jit.trace", "torch.export"),
]
