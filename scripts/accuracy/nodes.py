"""Error of a three-dimensional mask and its scatter under rotations, for each node rule.

The mask is exp(-|z|^2 / 2 s^2), and positions are uniform in a ball of diameter 2 R. Random rules
draw nodes from the spectral density of the mask, which is the optimal density. `suggest_nodes`
selects the shells.
"""

import math
from pathlib import Path

import torch
from kit.pictures import error_panels
from kit.rows import Rows, formatted, pick
from torch import Tensor

from molflt.attention import NODES, SPECTRA, Nodes, Spectrum, suggest_nodes

RULES = ("gaussian", "orthogonal", "sobol", "shells")
OWN_SIGMA = 1 / (2 * math.pi)  # width of the spectral density, in cycles per width s
MOST = 4096  # maximum number of nodes on shells
TOLERANCES = (0.04, 0.03, 0.02, *(c * 10**-k for k in (3, 4) for c in (10, 5, 3, 2)), 0.0001)
SHOWN = (16, 128, 512, 4096)  # numbers of nodes in the table; shells have at most this number
QUICK = {"nodes": (16, 256), "tolerances": (0.03, 0.01), "pairs": 50, "draws": 2, "turned": 2}


def ball_pairs(count: int, ratio: float, generator: torch.Generator) -> Tensor:
    """Returns differences (count, 3) between random points in a ball of diameter `ratio`."""
    points = torch.randn(2 * count, 3, dtype=torch.float64, generator=generator)
    draw = torch.rand(2 * count, 1, dtype=torch.float64, generator=generator)
    points = ratio / 2 * draw ** (1 / 3) * points / points.norm(dim=-1, keepdim=True)
    return points[:count] - points[count:]


@torch.no_grad()
def sampled(nodes: Nodes, spectrum: Spectrum, z: Tensor) -> Tensor:
    """Returns the values (heads, n) of the mask sampled with `nodes`, at differences z (n, 3)."""
    xi, coefficients = nodes.sample(spectrum)
    rows = [
        (2 * math.pi * z @ own.T).cos() @ row
        for own, row in zip(xi.expand(len(coefficients), -1, -1), coefficients, strict=True)
    ]
    return torch.stack(rows)


def errors(nodes: Nodes, ratio: float, heads: int, pairs: int, turned: int) -> dict[str, float]:
    """Computes the rms error of the mask and the rms of its standard deviation over rotations."""
    generator = torch.Generator().manual_seed(0)
    spectrum = SPECTRA["gaussian"](heads, length_range=(1.0, 1.0)).double()
    spectrum.amplitude.requires_grad_(False).fill_(1.0)
    z = ball_pairs(pairs, ratio, generator)
    error = sampled(nodes, spectrum, z) - (-0.5 * z.square().sum(dim=-1)).exp()
    # Random directions with the lengths of the pairs represent rotations.
    length = z[:turned].norm(dim=-1)
    shape = (turned, 8 * turned, 3)
    vectors = torch.randn(shape, dtype=torch.float64, generator=generator)
    vectors = vectors / vectors.norm(dim=-1, keepdim=True) * length[:, None, None]
    values = sampled(nodes, spectrum, vectors.flatten(0, 1))
    spread = values.unflatten(-1, shape[:2]).var(dim=-1)
    return {"error": error.square().mean().sqrt().item(), "scatter": spread.mean().sqrt().item()}


def measure(
    nodes: tuple[int, ...] = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096),
    tolerances: tuple[float, ...] = TOLERANCES,
    pairs: int = 2000,
    draws: int = 8,
    turned: int = 16,
) -> Rows:
    """Returns a row of errors for each diameter, rule and number of nodes."""
    rows: Rows = []
    for ratio in (5.0, 10.0):
        for rule in RULES[:3]:
            for r in nodes:
                drawn = NODES[rule](heads=draws, num_nodes=r, sigma=OWN_SIGMA).double()
                drawn.redraw_(torch.Generator().manual_seed(0))
                found = errors(drawn, ratio, draws, pairs, turned)
                rows.append({"ratio": ratio, "rule": rule, "nodes": r, **found})
        for tolerance in tolerances:
            shells = suggest_nodes(ratio / 2, 1.0, tolerance).nodes.double()
            labels = {"ratio": ratio, "rule": "shells", "nodes": shells.num_nodes}
            if shells.num_nodes <= MOST and not pick(rows, **labels):
                # Errors of shells are largest for the nearest and farthest pairs, which are rare.
                rows.append({**labels, **errors(shells, ratio, 1, 10 * pairs, turned)})
    return rows


def table(rows: Rows) -> str:
    """Formats some of the rows as a table.

    For each ratio and rule, the table contains one row per bound in `SHOWN`, with the largest
    number of nodes that does not exceed the bound.
    """
    labels = {"2R / s": "{ratio:g}", "rule": "{rule}", "nodes r": "{nodes}"}
    numbers = {"rms error": "{error:.1e}", "scatter over rotations": "{scatter:.1e}"}
    shown = {}
    for row in rows:
        bound = min((n for n in SHOWN if n >= row["nodes"]), default=MOST)
        shown[row["ratio"], row["rule"], bound] = row
    return formatted(list(shown.values()), {**labels, **numbers})


def draw(png: Path, rows: Rows) -> None:
    """Plots the error and the scatter against the number of nodes; each diameter has a column."""
    points = [
        {"what": what, "2R / s": row["ratio"], **row, "mean": row[column], "sd": 0.0}
        for what, column in (("rms error", "error"), ("scatter over rotations", "scatter"))
        for row in rows
    ]
    labels = ("nodes r (pairs of columns)", "of a mask with f(0) = 1")
    error_panels(png, points, ("what", "2R / s"), "rule", "nodes", labels, (2, 2), (7, 5))
