"""Error of the attention matrix and the output against the number of features.

As in figure 2 of the Performer paper (arXiv:2006.03555), errors are mean squared errors. They are
divided by the mean square of the exact values and measured on some rows of the matrix, because the
rows are independent of each other.
"""

import itertools
import statistics
from pathlib import Path

import torch
from kit.pictures import UNIFORM, error_panels
from kit.rows import Points, Rows, exponent, markdown, names, pick
from torch import Tensor
from tqdm import tqdm

from molflt.attention import FEATURE_MAPS, PROJECTIONS
from molflt.attention.mixing.forms import softmax

BELOW = "normalizers <= 0"
MAPS = [name for name, phi in FEATURE_MAPS.items() if phi.estimates_exp and phi.random]
QUICK = {
    **{"keys": 256, "queries": 64, "samples": 2, "scales": (0.5,)},
    "features": (16, 32, 64, 128, 256),
}


def relative(estimate: Tensor, exact: Tensor) -> float:
    """Returns the mean squared error divided by the mean square of the exact values."""
    return float((estimate - exact).square().mean() / exact.square().mean())


@torch.no_grad()
def measure(
    features: tuple[int, ...] = (16, 32, 64, 128, 256, 512, 1024),
    scales: tuple[float, ...] = (0.5, 1.0),
    samples: int = 30,
    keys: int = 4096,
    queries: int = 512,
    dim: int = 16,
) -> Rows:
    """Returns one row per scale, feature map, projection, number of features and quantity."""
    points, generator = Points(), torch.Generator().manual_seed(0)
    for scale, _ in tqdm(list(itertools.product(scales, range(samples))), leave=False):
        query, key, value = (
            torch.randn(1, 1, n, dim, generator=generator) * s
            for n, s in ((queries, scale * dim**-0.25), (keys, scale * dim**-0.25), (keys, 1.0))
        )
        exact, output = (query @ key.mT).exp(), softmax(query, key, value)
        flat = exact.mean(dim=-1, keepdim=True).expand_as(exact)  # the best constant for each row
        for name, m, projection in itertools.product(MAPS, features, (*PROJECTIONS, UNIFORM)):
            labels = {"feature_map": name, "scale": scale, "projection": projection, "m": m}
            estimate = flat
            if projection != UNIFORM:
                phi = FEATURE_MAPS[name](dim, 1, m // FEATURE_MAPS[name].per_row, projection)
                phi.redraw_(generator)
                estimate = phi(query).materialize() @ phi(key).materialize().mT
            total = estimate.sum(dim=-1, keepdim=True)
            points.add(relative(estimate, exact), **labels, quantity="matrix")
            points.add(relative(estimate @ value / total, output), **labels, quantity="output")
            if projection != UNIFORM and not FEATURE_MAPS[name].positive_kernel:
                points.add((total <= 0).float().mean(), **labels, quantity=BELOW)
    return points.rows()


def table(rows: Rows) -> str:
    """Formats errors, slopes of log error against log M, and ratios to the errors of "iid"."""
    others = [name for name in names(rows, "projection") if name not in ("iid", UNIFORM)]
    head = ["map, scale, error", f"iid at M = {max(names(rows, 'm'))}", "uniform", "iid: slope"]
    head += [f"{name}: slope, / iid" for name in others]
    lines = []
    labels = (names(rows, "scale"), names(rows, "feature_map"), ("matrix", "output"))
    for scale, name, quantity in itertools.product(*labels):
        own = pick(rows, feature_map=name, scale=scale, quantity=quantity)
        found = {p: pick(own, projection=p) for p in ("iid", UNIFORM, *others)}
        means = {p: [row["mean"] for row in part] for p, part in found.items()}
        slopes = {p: exponent([(row["m"], row["mean"]) for row in found[p]]) for p in found}
        ratios = {p: [a / b for a, b in zip(means[p], means["iid"], strict=True)] for p in others}
        cells = [f"{slopes[p]:.2f}, {statistics.geometric_mean(ratios[p]):.2f}" for p in others]
        first = f"{means['iid'][-1]:.2g}", f"{means[UNIFORM][-1]:.2g}", f"{slopes['iid']:.2f}"
        lines.append([f"{name}, {scale:g}, {quantity}", *first, *cells])
    return markdown(head, lines)


def draw(png: Path, rows: Rows) -> None:
    """Draws a figure for each scale; writes the first to `png` and the others next to it."""
    labels = ("features per token M", "relative mean squared error")
    for index, scale in enumerate(names(rows, "scale")):
        page = png.with_stem(f"{png.stem}-scale-{scale:g}") if index else png
        own = [row for row in pick(rows, scale=scale) if row["quantity"] != BELOW]
        panel = ("quantity", "feature_map")
        error_panels(page, own, panel, "projection", "m", labels, (2, 3), (7, 4.3))
