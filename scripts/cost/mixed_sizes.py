"""Time of GraphAttention for graphs of different sizes, of equal sizes, or padded to equal size.

In "mixed", the layer receives graphs of different sizes. In "padded", all graphs are padded to the
size of the largest graph, as in PyG. In "equal", the batch has the same numbers of atoms and
graphs, but the sizes of the graphs differ by at most one atom.
"""

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from kit.layers import crystals, pyg_performer
from kit.rows import Rows, choose, markdown, pick
from kit.turns import paired, turns
from torch import Tensor, nn
from torch_geometric.data import Batch
from torch_geometric.utils import to_dense_batch

from molflt.graph import GraphAttention
from molflt.graph.geometry import Geometry

DIM, HEADS, FEATURES, NODES, NEAR = 128, 8, 64, 16, 4.5
PYG = "PyG performer, relu"
Inputs = dict[str, Tensor]


def made(**options: Any) -> Callable[[int], nn.Module]:
    """Returns a function that builds a layer with linear mixing for a given width."""
    return lambda dim: GraphAttention(
        dim, HEADS, mixing="linear", num_features=FEATURES, **{"periodic": "none", **options}
    )


SAMPLED = {"position_options": {"num_nodes": NODES}}
KERNEL = {"position": "multiplicative"}
MECHANISMS: dict[str, Callable[[int], nn.Module]] = {
    "performer": made(position="none", periodic=None),
    "additive": made(position="spectral", **SAMPLED),
    "multiplicative": made(**KERNEL, **SAMPLED),
    "multiplicative, near field": made(**KERNEL, **SAMPLED, near_field=NEAR),
    "images": made(position="spectral", **SAMPLED, periodic="images", image_cutoff=NEAR),
    "reciprocal, near field": made(**KERNEL, periodic="reciprocal", near_field=NEAR),
}
FIXED = tuple(MECHANISMS)[:4]  # mechanisms whose cost per atom does not depend on the cell


class Mix(NamedTuple):
    """Sizes of the graphs in a batch, and the mechanisms and variants to measure."""

    sizes: list[int]
    known: tuple[str, ...]
    ways: tuple[str, ...] = ("mixed", "equal", "padded")

    def equal(self) -> list[int]:
        """Returns graph sizes that distribute the same atoms as evenly as possible."""
        least, more = divmod(sum(self.sizes), len(self.sizes))
        return [least + 1] * more + [least] * (len(self.sizes) - more)


MIXES = {
    "1 of 2000, 63 of 20": Mix([20] * 40 + [2000] + [20] * 23, FIXED[:2]),
    "32 of 20 to 225": Mix([20 + 205 * (13 * n % 32) // 31 for n in range(32)], tuple(MECHANISMS)),
    "64 of 2 to 512": Mix(
        [round(2 ** (1 + 8 * (23 * n % 64) / 63)) for n in range(64)], FIXED, ("mixed", "equal")
    ),
}
MEASURED = LARGE, OC20, WIDE = tuple(MIXES)
MIXES["4 of 3 to 30"] = Mix([7, 30, 3, 12], tuple(MECHANISMS))
QUICK = {"rounds": 1, "mixes": ("4 of 3 to 30",), "dim": 16}


def inputs(sizes: list[int], dim: int) -> Inputs:
    """Returns the arguments of a layer for random crystals of the given sizes."""
    batch = Batch.from_data_list(crystals(sizes))
    x = torch.randn(len(batch.pos), dim, generator=torch.Generator().manual_seed(0))
    return {"x": x, "pos": batch.pos.float(), "batch": batch.batch, "cell": batch.cell.float()}


def mixed(layer: nn.Module, given: Inputs) -> Tensor:
    """Calls the layer on a batch."""
    if layer.encoding is None:
        return layer(given["x"], batch=given["batch"])
    return layer(**given)


def padded(layer: nn.Module, given: Inputs) -> Tensor:
    """Calls a layer of molflt or PyG on graphs that are padded to the size of the largest graph."""
    x, mask = to_dense_batch(given["x"], given["batch"])
    if not isinstance(layer, GraphAttention):
        return layer(x, mask)[mask]
    if layer.encoding is None:
        return layer.attention(x, key_mask=mask)[mask]
    geometry = Geometry.of(given["pos"], given["batch"], given["cell"])
    dense, encoding, _ = layer.encoding.padded(geometry)
    return layer.attention(x, encoding=encoding, **dense.keys)[mask]


def step(run: Callable[[nn.Module, Inputs], Tensor], layer: nn.Module, given: Inputs) -> None:
    """Runs one forward and backward pass."""
    run(layer, given).square().sum().backward()
    layer.zero_grad()


@torch.no_grad()
def difference(name: str, given: Inputs, dim: int) -> float:
    """Computes the relative difference between mixed and padded outputs in float64."""
    torch.manual_seed(0)
    layer = MECHANISMS[name](dim).double()
    given = {key: x.double() if x.is_floating_point() else x for key, x in given.items()}
    one, other = (run(layer, given) for run in (mixed, padded))
    return float((one - other).abs().max() / other.abs().max())


def measure(rounds: int = 3, mixes: tuple[str, ...] = MEASURED, dim: int = DIM) -> Rows:
    """Returns one row per mix, mechanism and variant."""
    rows: Rows = []
    for mix in choose(mixes, MIXES, "mix"):
        known, ways = MIXES[mix].known, MIXES[mix].ways
        same, even = (inputs(sizes, dim) for sizes in (MIXES[mix].sizes, MIXES[mix].equal()))
        works: dict[tuple[str, str], Callable[[], None]] = {}
        for name in known:
            torch.manual_seed(0)
            layer = MECHANISMS[name](dim)
            runs = {"mixed": (mixed, same), "equal": (mixed, even), "padded": (padded, same)}
            for way in ways:
                run, given = runs[way]
                works[name, way] = partial(step, run, layer, given)
        works[PYG, "padded"] = partial(step, padded, pyg_performer(dim, HEADS, FEATURES), same)
        once = mix == LARGE  # padded graphs take as long as everything else combined
        few = {key: 1 if once and key[1] == "padded" else rounds for key in works}
        apart = {
            name: difference(name, same, dim) for name in known if mix != LARGE and "padded" in ways
        }
        for (name, way), seconds in turns(works, few, time.process_time).items():
            found = apart.get(name) if way == "mixed" else None
            labels = {"mix": mix, "mechanism": name, "way": way}
            rows.append({**labels, "seconds": seconds, "difference": found})
    return rows


def ratio(rows: Rows, mix: str, name: str, way: str, other: str | None = None) -> float | None:
    """Returns the time of a variant divided by the time of the mixed batch; None if not measured.

    `other` is the mechanism of the variant and defaults to `name`.
    """
    of = pick(rows, mix=mix, mechanism=other or name, way=way)
    ours = pick(rows, mix=mix, mechanism=name, way="mixed")
    return paired(of[0]["seconds"], ours[0]["seconds"]) if of and ours else None


def table(rows: Rows) -> str:
    head = ["batch, atoms", "mechanism", "mixed, s", "mixed / equal", "padded / mixed"]
    head += ["PyG / mixed", "difference"]
    lines = []
    for row in pick(rows, way="mixed"):
        mix, name, seconds = row["mix"], row["mechanism"], row["seconds"]
        even, wide = (ratio(rows, mix, name, way) for way in ("equal", "padded"))
        theirs, apart = ratio(rows, mix, name, "padded", PYG), row["difference"]
        numbers = (1 / even if even else None, wide, theirs)
        cells = [None if x is None else f"{x:.2f}" for x in numbers]
        last = None if apart is None else f"{apart:.0e}"
        lines.append([mix, name, f"{statistics.median(seconds):.3g}", *cells, last])
    return markdown(head, lines)
