"""Errors of polynomial and random features relative to softmax of normalized queries and keys.

The errors of outputs, and of the gradients of a random linear function of the outputs, are relative
errors over all tokens of a head. Random maps have as many features as the polynomial of degree 2.
"""

import itertools
import math
from collections.abc import Callable
from pathlib import Path

import torch
from kit.pictures import error_panels
from kit.rows import Points, Rows, markdown, names, pick
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm

from molflt.attention import FEATURE_MAPS
from molflt.attention.mixing.forms import linear, softmax

HEADS = 8  # each head is one sample
CLUSTERS = 8  # groups of queries and keys with similar directions, as in trained models
QUANTITIES = ("output", "gradient", "gradient of q, k")
Mix = Callable[[Tensor, Tensor, Tensor], Tensor]
QUICK = {"dims": (8, 16), "temperatures": (0.5, 1.0), "tokens": 64, "samples": 8}


def taylor(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Computes attention with the weights 1 + x + x^2 / 2, where x = q . k."""
    x = query @ key.mT
    weights = 1 + x + x.square() / 2
    return weights @ value / weights.sum(dim=-1, keepdim=True)


def featured(name: str, dim: int, generator: torch.Generator, **options: object) -> Mix:
    """Returns a function that computes linear attention with a newly drawn feature map."""
    phi = FEATURE_MAPS[name](dim, HEADS, **options)
    phi.redraw_(generator)
    return lambda query, key, value: linear(phi(query), phi(key), value).ratio()


def forms(dim: int, generator: torch.Generator) -> dict[str, Mix]:
    """Returns functions that approximate softmax attention, keyed by name."""
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
    """Draws queries, keys, values and output weights, each of shape (1, heads, tokens, dim)."""
    shape = (1, HEADS, tokens, dim)
    q, k, v, w = (torch.randn(shape, generator=generator) for _ in range(4))
    if kind == "clustered":
        centers = torch.randn(1, HEADS, CLUSTERS, dim, generator=generator)
        index = torch.randint(CLUSTERS, (2, tokens), generator=generator)
        q, k = (x / 2 + centers[:, :, i] for x, i in zip((q, k), index, strict=True))
    return [q, k, v, w]


def results(mix: Mix, inputs: list[Tensor], temperature: float) -> list[Tensor]:
    """Returns the output and two sets of gradients: for all inputs, and for queries and keys only.

    Each of the three results is a tensor (heads, number of values).
    """
    *inputs, weights = (x.detach().requires_grad_() for x in inputs)
    query, key = (temperature**0.5 * F.normalize(x, dim=-1) for x in inputs[:2])
    out = mix(query, key, inputs[2])
    slopes = torch.autograd.grad((out * weights).sum(), inputs)
    parts = ([out.detach()], slopes, slopes[:2])
    return [torch.cat([x[0].flatten(1) for x in part], dim=-1) for part in parts]


def measure(
    dims: tuple[int, ...] = (8, 16, 32, 64),
    temperatures: tuple[float, ...] = (0.5, 1.0, 2.0, 4.0),
    tokens: int = 256,
    samples: int = 8,
) -> Rows:
    """Returns the errors of all approximations for all head widths and temperatures."""
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


def table(rows: Rows) -> str:
    """Formats the errors of outputs and of gradients with respect to all inputs, in percent."""
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


def draw(png: Path, rows: Rows) -> None:
    """Draws the error of the output against the temperature."""
    labels = ("temperature", "relative error of outputs")
    panel = (("directions", "d"), "form", "temperature", labels, (2, 4), (9, 5))
    error_panels(png, pick(rows, quantity="output"), *panel)
