"""Attention matrix and output against the number of features (arXiv:2006.03555, figure 2).

Mean squared errors are relative to the mean square of the exact values. Rows of the matrix are
independent; a part of them is enough.
"""

import itertools
import statistics
from pathlib import Path

import torch
from kit.pictures import UNIFORM, error_panels
from kit.rows import Points, Rows, choose, exponent, markdown, names, pick
from torch import Tensor
from tqdm import tqdm

from molflt.attention import FEATURE_MAPS, PROJECTIONS
from molflt.attention.mixing.forms import softmax

MAPS = ("positive", "trigonometric", "favor2020")
BELOW = "normalizers <= 0"
QUICK = {
    **{"keys": 256, "queries": 64, "samples": 8, "scales": (0.5,)},
    "features": (16, 32, 64, 128, 256),
}


def relative(estimate: Tensor, exact: Tensor) -> float:
    """Mean squared error over mean square."""
    return float((estimate - exact).square().mean() / exact.square().mean())


@torch.no_grad()
def measure(
    features: tuple[int, ...] = (16, 32, 64, 128, 256, 512, 1024),
    scales: tuple[float, ...] = (0.5, 1.0),
    maps: tuple[str, ...] = MAPS,
    projections: tuple[str, ...] = tuple(PROJECTIONS),
    samples: int = 30,
    keys: int = 4096,
    queries: int = 512,
    dim: int = 16,
) -> Rows:
    """Errors of all maps, projections and numbers of features."""
    choose(maps, FEATURE_MAPS, "map")
    choose(projections, PROJECTIONS, "projection")
    points, generator = Points(), torch.Generator().manual_seed(0)
    for scale, _ in tqdm(list(itertools.product(scales, range(samples))), leave=False):
        query, key, value = (
            torch.randn(1, 1, n, dim, generator=generator) * s
            for n, s in ((queries, scale * dim**-0.25), (keys, scale * dim**-0.25), (keys, 1.0))
        )
        exact, output = (query @ key.mT).exp(), softmax(query, key, value)
        flat = exact.mean(dim=-1, keepdim=True).expand_as(exact)  # the best constant of each row
        for name, m, projection in itertools.product(maps, features, (*projections, UNIFORM)):
            labels = {"feature_map": name, "scale": scale, "projection": projection, "m": m}
            estimate = flat
            if projection != UNIFORM:
                rows = m // 2 if name == "trigonometric" else m
                phi = FEATURE_MAPS[name](dim, 1, rows, projection)
                phi.redraw_(generator)
                estimate = phi(query).materialize() @ phi(key).materialize().mT
            total = estimate.sum(dim=-1, keepdim=True)
            points.add(relative(estimate, exact), **labels, quantity="matrix")
            points.add(relative(estimate @ value / total, output), **labels, quantity="output")
            if projection != UNIFORM and name != "positive":
                points.add((total <= 0).float().mean(), **labels, quantity=BELOW)
    return points.rows()


def means(rows: Rows, **labels: object) -> list[float]:
    """Mean errors of a curve."""
    return [row["mean"] for row in pick(rows, **labels)]


def slope(rows: Rows, **labels: object) -> float:
    """Slope of log error against log M."""
    return exponent([(row["m"], row["mean"]) for row in pick(rows, **labels)])


def to_iid(rows: Rows, projection: str, **labels: object) -> float:
    """Geometric mean over M of the error in units of that of independent rows."""
    both = (means(rows, projection=name, **labels) for name in (projection, "iid"))
    return statistics.geometric_mean(a / b for a, b in zip(*both, strict=True))


def table(rows: Rows) -> str:
    """Markdown: slopes of log error against log M, and errors relative to independent rows."""
    others = [name for name in names(rows, "projection") if name not in ("iid", UNIFORM)]
    head = ["map, scale, error", f"iid at M = {max(names(rows, 'm'))}", "uniform", "iid: slope"]
    head += [f"{name}: slope, / iid" for name in others]
    lines = []
    for scale, name in itertools.product(names(rows, "scale"), names(rows, "feature_map")):
        for quantity in ("matrix", "output"):
            labels = {"feature_map": name, "scale": scale, "quantity": quantity}
            iid, uniform = (means(rows, projection=p, **labels)[-1] for p in ("iid", UNIFORM))
            cells = [
                f"{slope(rows, projection=p, **labels):.2f}, {to_iid(rows, p, **labels):.2f}"
                for p in others
            ]
            first = f"{slope(rows, projection='iid', **labels):.2f}"
            lines.append(
                [f"{name}, {scale:g}, {quantity}", f"{iid:.2g}", f"{uniform:.2g}", first, *cells]
            )
    return markdown(head, lines)


def draw(png: Path, rows: Rows) -> None:
    """Draws a picture per scale, the first at `png`."""
    labels = ("features per token M", "relative mean squared error")
    for index, scale in enumerate(names(rows, "scale")):
        page = png.with_stem(f"{png.stem}-scale-{scale:g}") if index else png
        own = [row for row in pick(rows, scale=scale) if row["quantity"] != BELOW]
        panel = ("quantity", "feature_map")
        error_panels(page, own, panel, "projection", "m", labels, (2, 3), (7, 4.3))
