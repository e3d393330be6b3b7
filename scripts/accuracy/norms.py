"""One row of attention against the norm of queries and keys (arXiv:2106.12566, figure 1b)."""

import itertools
import math
from pathlib import Path

import torch
from kit.pictures import UNIFORM, error_panels
from kit.rows import Points, Rows, choose, markdown, names, pick
from torch.nn import functional as F
from tqdm import tqdm

from molflt.attention import FEATURE_MAPS

HEADS = 16  # one head is one sample
QUICK = {"keys": 128, "samples": 32, "features": (4, 64), "radii": (0.5, 1.0, 2.0, 3.0, 4.0)}


@torch.no_grad()
def measure(
    features: tuple[int, ...] = (4, 16, 64, 256, 1024),
    radii: tuple[float, ...] = tuple(0.25 * n for n in range(2, 17)),
    maps: tuple[str, ...] = ("positive", "trigonometric"),
    samples: int = 128,
    keys: int = 1024,
    dim: int = 64,
) -> Rows:
    """Errors of all maps and numbers of features at all norms."""
    choose(maps, FEATURE_MAPS, "map")
    points, generator = Points(), torch.Generator().manual_seed(0)
    for radius, _ in tqdm(list(itertools.product(radii, range(samples // HEADS))), leave=False):
        query, key = (
            radius * F.normalize(torch.randn(1, HEADS, n, dim, generator=generator), dim=-1)
            for n in (1, keys)
        )
        exact = (query @ key.mT).softmax(dim=-1)
        for name in maps:
            for m in features:
                phi = FEATURE_MAPS[name](dim, HEADS, m // 2 if name == "trigonometric" else m)
                phi.redraw_(generator)
                estimate = phi(query).materialize() @ phi(key).materialize().mT
                estimate = estimate / estimate.sum(dim=-1, keepdim=True)
                error = (estimate - exact).abs().sum(dim=-1)
                points.add(error, feature_map=name, m=m, R=radius)
            flat = (1 / keys - exact).abs().sum(dim=-1)
            points.add(flat, feature_map=name, m=UNIFORM, R=radius)
    return points.rows()


def better(rows: Rows, baseline: Rows, x: str) -> str:
    """The range in which a curve lies below another, interpolated in logarithms."""
    place = [math.log(row[x]) for row in rows]
    gap = [math.log(a["mean"] / b["mean"]) for a, b in zip(rows, baseline, strict=True)]
    below = [i for i, value in enumerate(gap) if value < 0]
    if not below:
        return "nowhere"

    def between(i: int, j: int) -> str:
        return f"{math.exp(place[i] - gap[i] * (place[j] - place[i]) / (gap[j] - gap[i])):.2f}"

    first, last = below[0], below[-1]
    low = between(first - 1, first) if first else f"{rows[0][x]:g} or less"
    high = between(last, last + 1) if last + 1 < len(rows) else f"{rows[-1][x]:g} or more"
    return f"{low} to {high}"


def table(rows: Rows) -> str:
    """Markdown: a line per map and number of features."""
    radii = [radius for radius in names(rows, "R") if radius in (1, 2, 3)]
    lines = []
    for name, m in itertools.product(names(rows, "feature_map"), names(rows, "m")):
        own = pick(rows, feature_map=name)
        curve = pick(own, m=m)
        cells = [f"{pick(curve, R=radius)[0]['mean']:.3f}" for radius in radii]
        where = None if m == UNIFORM else better(curve, pick(own, m=UNIFORM), "R")
        lines.append([name, m, *cells, where])
    head = ["map", "m", *(f"R = {radius:g}" for radius in radii), "better than uniform for R of"]
    return markdown(head, lines)


def draw(png: Path, rows: Rows) -> None:
    """Error against the norm."""
    labels = ("norm R of queries and keys", "L1 error of a row of attention")
    error_panels(*(png, rows, ("feature_map",), "m", "R", labels, (1, 2), (7.5, 3.2)), log_x=False)
