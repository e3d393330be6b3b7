"""Evaluation of trained models on a mesh."""

from torch import nn

from molflt.attention.encodings import TRITON
from molflt.graph.encoding import GraphEncoding
from molflt.graph.periodic import Auto, OnMesh, Reciprocal


def use_mesh_(model: nn.Module, order: int = 5) -> None:
    """Makes a model with reciprocal nodes compute the same sums on a mesh, in place.

    Parameters do not change. Time and memory per atom no longer grow with the cell. Sums have an
    interpolation error; see `OnMesh`.

    Args:
        model: model with periodic "reciprocal" or "auto", or a module that contains such a model.
        order: order of the splines: 4, 5, 6 or 8; see `Auto`.
    """
    encodings = [part for part in model.modules() if isinstance(part, GraphEncoding)]
    with_nodes = [(x, x.periodic) for x in encodings if isinstance(x.periodic, Reciprocal)]
    supported = [
        type(scheme) in (Reciprocal, OnMesh, Auto) and not scheme.smooth and part.mixing != TRITON
        for part, scheme in with_nodes
    ]
    if not with_nodes or not all(supported):
        raise ValueError(
            f"mesh_order={order} needs reciprocal nodes without triton; got periodic="
            f"{[part.periodic for part in encodings]}, mixing={[part.mixing for part in encodings]}"
        )
    for part, scheme in with_nodes:
        mesh = OnMesh(scheme.max_frequency, order)
        mesh.check(part.position, part.softmax, part.near_field is not None)
        part.periodic = mesh
