"""Errors of feature maps.

features     mean squared errors relative to the mean square of the exact values, on a part of the
             rows of the matrix, which are independent
polynomial   relative errors of the output, and of the gradients of a random linear function of it,
             over all tokens of a head; random maps have as many features as the polynomial of
             degree 2
"""

import itertools
import math
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from kit import Benchmark
from kit.pictures import UNIFORM, error_panels
from kit.rows import Points, Rows, exponent, markdown, names, pick
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm

from molflt.attention import FEATURE_MAPS, PROJECTIONS, FeatureMap
from molflt.attention.mixing.forms import linear, softmax

BELOW = "normalizers <= 0"
MAPS = [name for name, phi in FEATURE_MAPS.items() if phi.estimates_exp and phi.random]
HEADS = 8  # one head is one sample
CLUSTERS = 8  # of queries and keys with similar directions, as in trained models
QUANTITIES = ("output", "gradient", "gradient by q, k")
Mix = Callable[[Tensor, Tensor, Tensor], Tensor]


def products(phi: FeatureMap, query: Tensor, key: Tensor, generator: torch.Generator) -> Tensor:
    """Estimates of exp(q . k) with a newly drawn projection."""
    phi.redraw_(generator)
    return phi(query).materialize() @ phi(key).materialize().mT


def relative(estimate: Tensor, exact: Tensor) -> float:
    """Mean squared error over mean square."""
    return float((estimate - exact).square().mean() / exact.square().mean())


@torch.no_grad()
def measure_features(
    features: tuple[int, ...] = (16, 32, 64, 128, 256, 512, 1024),
    scales: tuple[float, ...] = (0.5, 1.0),
    samples: int = 30,
    keys: int = 4096,
    queries: int = 512,
    dim: int = 16,
) -> Rows:
    """Errors of all maps, projections and numbers of features."""
    points, generator = Points(), torch.Generator().manual_seed(0)
    for scale, _ in tqdm(list(itertools.product(scales, range(samples))), leave=False):
        query, key, value = (
            torch.randn(1, 1, n, dim, generator=generator) * s
            for n, s in ((queries, scale * dim**-0.25), (keys, scale * dim**-0.25), (keys, 1.0))
        )
        exact, output = (query @ key.mT).exp(), softmax(query, key, value)
        flat = exact.mean(dim=-1, keepdim=True).expand_as(exact)  # the best constant of each row
        for name, m, projection in itertools.product(MAPS, features, (*PROJECTIONS, UNIFORM)):
            labels = {"feature_map": name, "scale": scale, "projection": projection, "m": m}
            estimate = flat
            if projection != UNIFORM:
                phi = FEATURE_MAPS[name](dim, 1, m // FEATURE_MAPS[name].per_row, projection)
                estimate = products(phi, query, key, generator)
            total = estimate.sum(dim=-1, keepdim=True)
            points.add(relative(estimate, exact), **labels, quantity="matrix")
            points.add(relative(estimate @ value / total, output), **labels, quantity="output")
            if projection != UNIFORM and not FEATURE_MAPS[name].positive_kernel:
                points.add((total <= 0).float().mean(), **labels, quantity=BELOW)
    return points.rows()


def table_features(rows: Rows) -> str:
    """Markdown: slopes of log error against log M, and errors relative to independent rows."""
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


def draw_features(png: Path, rows: Rows) -> None:
    """Draws a picture per scale, the first at `png`."""
    labels = ("features per token M", "relative mean squared error")
    for index, scale in enumerate(names(rows, "scale")):
        page = png.with_stem(f"{png.stem}-scale-{scale:g}") if index else png
        own = [row for row in pick(rows, scale=scale) if row["quantity"] != BELOW]
        panel = ("quantity", "feature_map")
        error_panels(page, own, panel, "projection", "m", labels, (2, 3), (7, 4.3))


@torch.no_grad()
def measure_norms(
    features: tuple[int, ...] = (4, 16, 64, 256, 1024),
    radii: tuple[float, ...] = tuple(0.25 * n for n in range(2, 17)),
    samples: int = 128,
    keys: int = 1024,
) -> Rows:
    """Errors of all maps and numbers of features at all norms."""
    points, generator = Points(), torch.Generator().manual_seed(0)
    heads, dim = 16, 64
    for radius, _ in tqdm(list(itertools.product(radii, range(samples // heads))), leave=False):
        query, key = (
            radius * F.normalize(torch.randn(1, heads, n, dim, generator=generator), dim=-1)
            for n in (1, keys)
        )
        exact = (query @ key.mT).softmax(dim=-1)
        for name in ("positive", "trigonometric"):
            for m in features:
                phi = FEATURE_MAPS[name](dim, heads, m // FEATURE_MAPS[name].per_row)
                estimate = products(phi, query, key, generator)
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


def table_norms(rows: Rows) -> str:
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


def taylor(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Weights 1 + x + x^2 / 2 of x = q . k."""
    x = query @ key.mT
    weights = 1 + x + x.square() / 2
    return weights @ value / weights.sum(dim=-1, keepdim=True)


def featured(name: str, dim: int, generator: torch.Generator, **options: object) -> Mix:
    """Linear attention with a newly drawn feature map."""
    phi = FEATURE_MAPS[name](dim, HEADS, **options)
    phi.redraw_(generator)
    return lambda query, key, value: linear(phi(query), phi(key), value).ratio()


def forms(dim: int, generator: torch.Generator) -> dict[str, Mix]:
    """Compared models, by name."""
    size = math.comb(dim + 2, 2)
    options: dict[str, dict[str, object]] = {
        "polynomial": {},
        "sketch, half": {"num_features": (size + dim) // 2},
        **({"degree 3": {"degree": 3}} if dim < 64 else {}),
    }
    found: dict[str, Mix] = {"Taylor": taylor}
    for name, own in options.items():
        found[name] = featured("polynomial", dim, generator, **own)
    for kind in ("iid", "orthogonal"):
        own = {"num_features": size, "projection": kind}
        found[f"positive, {kind}"] = featured("positive", dim, generator, **own)
    found["trigonometric"] = featured("trigonometric", dim, generator, num_features=size // 2)
    return found


def drawn(kind: str, tokens: int, dim: int, generator: torch.Generator) -> list[Tensor]:
    """Queries, keys, values and weights of the outputs: (1, heads, tokens, dim) each."""
    shape = (1, HEADS, tokens, dim)
    q, k, v, w = (torch.randn(shape, generator=generator) for _ in range(4))
    if kind == "clustered":
        centers = torch.randn(1, HEADS, CLUSTERS, dim, generator=generator)
        index = torch.randint(CLUSTERS, (2, tokens), generator=generator)
        q, k = (x / 2 + centers[:, :, i] for x, i in zip((q, k), index, strict=True))
    return [q, k, v, w]


def results(mix: Mix, inputs: list[Tensor], temperature: float) -> list[Tensor]:
    """The output, all gradients, and those by queries and keys: (heads, numbers) each."""
    *inputs, weights = (x.detach().requires_grad_() for x in inputs)
    query, key = (temperature**0.5 * F.normalize(x, dim=-1) for x in inputs[:2])
    out = mix(query, key, inputs[2])
    slopes = torch.autograd.grad((out * weights).sum(), inputs)
    parts = ([out.detach()], slopes, slopes[:2])
    return [torch.cat([x[0].flatten(1) for x in part], dim=-1) for part in parts]


def measure_polynomial(
    dims: tuple[int, ...] = (8, 16, 32, 64),
    temperatures: tuple[float, ...] = (0.5, 1.0, 2.0, 4.0),
    tokens: int = 256,
    samples: int = 8,
) -> Rows:
    """Errors of all forms at all widths of a head and temperatures."""
    points, generator = Points(), torch.Generator().manual_seed(0)
    cases = itertools.product(("uniform", "clustered"), dims, temperatures, range(samples // HEADS))
    for kind, dim, temperature, _ in tqdm(list(cases), leave=False):
        inputs = drawn(kind, tokens, dim, generator)
        exact = results(softmax, inputs, temperature)
        for name, mix in forms(dim, generator).items():
            found = results(mix, inputs, temperature)
            for quantity, a, b in zip(QUANTITIES, found, exact, strict=True):
                error = (a - b).norm(dim=-1) / b.norm(dim=-1)
                labels = {"directions": kind, "d": dim, "temperature": temperature}
                points.add(error, **labels, form=name, quantity=quantity)
    return points.rows()


def table_polynomial(rows: Rows) -> str:
    """Markdown: errors of the output and of the gradient by all inputs, percent."""
    forms = names(rows, "form")
    lines = []
    keys = ("directions", "d", "temperature")
    for kind, dim, temperature in itertools.product(*(names(rows, key) for key in keys)):
        own = pick(rows, directions=kind, d=dim, temperature=temperature)
        cells = []
        for form in forms:
            found = [pick(own, form=form, quantity=q) for q in QUANTITIES[:2]]
            shown = [f"{100 * row[0]['mean']:.2g}" for row in found if row]
            cells.append(", ".join(shown) or None)
        lines.append([kind, dim, math.comb(dim + 2, 2), f"{temperature:g}", *cells])
    return markdown(["directions", "d", "features", "τ", *forms], lines)


def draw_polynomial(png: Path, rows: Rows) -> None:
    """Draws the error of the output against the temperature."""
    labels = ("temperature", "relative error of outputs")
    panel = (("directions", "d"), "form", "temperature", labels, (2, 4), (9, 5))
    error_panels(png, pick(rows, quantity="output"), *panel)


NORM_LABELS = ("norm R of queries and keys", "L1 error of a row of attention")
BENCHMARKS = {
    "features": Benchmark(
        "Attention matrix and output against the number of features (arXiv:2006.03555, figure 2).",
        measure_features,
        table_features,
        {
            **{"keys": 256, "queries": 64, "samples": 8, "scales": (0.5,)},
            "features": (16, 32, 64, 128, 256),
        },
        draw_features,
    ),
    "norms": Benchmark(
        "One row of attention against the norm of queries and keys (arXiv:2106.12566, figure 1b).",
        measure_norms,
        table_norms,
        {"keys": 128, "samples": 32, "features": (4, 64), "radii": (0.5, 1.0, 2.0, 3.0, 4.0)},
        partial(
            error_panels,
            **{"panel": ("feature_map",), "curve": "m", "x": "R", "labels": NORM_LABELS},
            **{"shape": (1, 2), "figsize": (7.5, 3.2), "log_x": False},
        ),
    ),
    "polynomial": Benchmark(
        "Polynomial and random features against softmax of normalized queries and keys.",
        measure_polynomial,
        table_polynomial,
        {"dims": (8, 16), "temperatures": (0.5, 1.0), "tokens": 64, "samples": 8},
        draw_polynomial,
    ),
}
