"""FLT's mask against the number of nodes (arXiv:2302.01925, theorems 4.1, 4.2, A.3 and A.4).

Errors of sampled masks between points in a ball, and the bound of theorem 4.2. One head is one draw
of nodes. All masks have f(0) = 1. "bias" is the root mean square over pairs of points of the mean
error over draws, and "standard error of bias" the standard error of this mean.
"""

import itertools
import math
import statistics
from pathlib import Path

import torch
from kit.pictures import error_panels
from kit.rows import Points, Rows, exponent, markdown, names, pick
from torch.nn import functional as F
from tqdm import tqdm

from molflt.attention import SPECTRA
from molflt.attention.nodes import DensityNodes, GaussianNodes
from molflt.attention.positions import SpectralPosition
from molflt.attention.spectra import Laplace

CONFIDENCE = 0.95  # of the bound on the largest error
DRAWS = 16  # at once
# Families by label: key of SPECTRA, and how nodes are drawn: the standard deviation of Gaussian
# nodes in cycles/Å, "own" density, or "laplace", a proposal with heavier tails.
FAMILIES: dict[str, tuple[str, float | str]] = {
    "gaussian, own nodes": ("gaussian", "own"),
    "laplace, own nodes": ("laplace", "own"),
    "matern, own nodes": ("matern", "own"),
    "gaussian_basis, σ = 0.25": ("gaussian_basis", 0.25),
    "gaussian_basis, σ = 0.15": ("gaussian_basis", 0.15),
    "gaussian_mixture, σ = 0.25": ("gaussian_mixture", 0.25),
    "smooth_local, Laplace nodes": ("smooth_local", "laplace"),
    "smooth_local, σ = 0.25": ("smooth_local", 0.25),
    "local, σ = 0.25": ("local", 0.25),
}
QUICK = {"tokens": 12, "draws": 64, "nodes": (16, 32, 64, 128, 256)}


def family(label: str, heads: int, nodes: int, seed: int = 0) -> SpectralPosition:
    """A mask with f(0) = 1, the same in every head, in float64; lengths in Å."""
    name, rule = FAMILIES[label]
    torch.manual_seed(seed)
    single, spectrum = SPECTRA[name](1), SPECTRA[name](heads)
    with torch.no_grad():
        single.amplitude.fill_(1 / single.amplitude.numel())
        for parameter, source in zip(spectrum.parameters(), single.parameters(), strict=True):
            parameter.copy_(source.expand_as(parameter))
    if rule == "own":
        return SpectralPosition(spectrum, DensityNodes(spectrum, nodes)).double()
    if rule == "laplace":
        proposal = Laplace(heads, length_range=(2.0, 2.0))
        return SpectralPosition(spectrum, DensityNodes(proposal, nodes, shared=False)).double()
    return SpectralPosition(spectrum, GaussianNodes(heads, nodes, sigma=float(rule))).double()


@torch.no_grad()
def largest_ratio(position: SpectralPosition) -> float:
    """C = max |g| / p along rays; infinite where the ratio still grows when a ray ends."""
    generator = torch.Generator().manual_seed(0)
    corners = torch.tensor(list(itertools.product((0.0, 1.0), repeat=3)))[1:]
    rays = F.normalize(torch.cat((corners, torch.randn(250, 3, generator=generator))), dim=-1)
    radii = torch.logspace(-3, 3, 600, dtype=torch.float64)  # cycles/Å
    xi = (radii[:, None, None] * rays).view(1, -1, 3)
    log_g = position.spectrum.spectrum(xi).abs().log()
    log_ratio = log_g - position.nodes.log_density(xi)
    log_ratio[log_g < -600] = -math.inf  # g underflows far out
    log_ratio = log_ratio.view(len(radii), len(rays)).amax(dim=-1)
    log_ratio = log_ratio[log_ratio.isfinite()]
    far = log_ratio[radii[: len(log_ratio)] > radii[len(log_ratio) - 1] / 2]
    near = log_ratio[: -len(far)].max()
    return math.inf if far.max() > near + 1e-6 else math.exp(near)


@torch.no_grad()
def measure(
    nodes: tuple[int, ...] = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096),
    tokens: int = 32,
    draws: int = 256,
    radius: float = 5.0,
) -> Rows:
    """Errors of all families at all numbers of nodes."""
    points, generator = Points(), torch.Generator().manual_seed(0)
    direction = F.normalize(torch.randn(tokens, 3, generator=generator), dim=-1)
    distance = radius * torch.rand(tokens, 1, generator=generator) ** (1 / 3)
    positions = (direction * distance).double()[None]
    pairs = tokens * (tokens - 1) // 2 + 1  # f(z) = f(-z), and one z = 0
    ratios = {label: largest_ratio(family(label, 1, 1)) for label in FAMILIES}
    for label, r in tqdm(list(itertools.product(FAMILIES, nodes)), leave=False):
        position = family(label, DRAWS, r)
        exact = position.spectrum.mask(positions[:, :, None] - positions[:, None])
        errors = []
        for _ in range(draws // DRAWS):
            position.redraw_(generator)
            left, right = position.factors(positions, positions)
            errors.append((left @ right.mT - exact)[0].flatten(1))
        error = torch.cat(errors)  # [draws, pairs]
        labels = {"family": label, "largest g/p": ratios[label], "r": r}
        bound = ratios[label] * math.sqrt(2 / r * math.log(2 * pairs / (1 - CONFIDENCE)))
        for quantity, value in (
            ("rms error", error.square().mean(dim=-1).sqrt()),
            ("largest error", error.abs().amax(dim=-1)),
            (f"bound, {100 * CONFIDENCE:.0f} %", bound),
            ("bias", error.mean(dim=0).square().mean().sqrt()),
            ("standard error of bias", (error.var(dim=0) / len(error)).mean().sqrt()),
        ):
            points.add(value, **labels, quantity=quantity)
    return points.rows()


def table(rows: Rows) -> str:
    """Markdown: a line per family; some have no bound."""

    def ratios(one: str, other: str) -> list[float]:
        return [a / b for a, b in zip(means[one], means[other], strict=True)]

    lines = []
    for label in names(rows, "family"):
        own = pick(rows, family=label)
        quantities = {name.partition(",")[0]: name for name in names(own, "quantity")}
        means = {
            short: [row["mean"] for row in pick(own, quantity=name)]
            for short, name in quantities.items()
        }
        largest, bias = own[0]["largest g/p"], ratios("bias", "standard error of bias")
        bounded = ["∞", "-"]
        if largest < math.inf:
            bounded = [f"{largest:.3g}", f"{max(ratios('largest error', 'bound')):.2f}"]
        slope = exponent(list(zip(names(own, "r"), means["rms error"], strict=True)))
        last = [f"{means[name][-1]:.2g}" for name in ("rms error", "largest error")]
        biases = f"{statistics.fmean(bias):.2f} ({max(bias):.2f})"
        lines.append([label, bounded[0], f"{slope:.2f}", *last, bounded[1], biases])
    head = ["family, nodes", "C", "slope of rms", f"rms at r = {max(names(rows, 'r'))}"]
    return markdown([*head, "largest error", "of the bound", "bias"], lines)


def draw(png: Path, rows: Rows) -> None:
    """Draws errors and the bound, a panel per family."""
    seen = [row for row in rows if "bias" not in row["quantity"]]
    labels = ("nodes r", "error of the mask, f(0) = 1")
    error_panels(png, seen, ("family",), "quantity", "r", labels, (3, 3), (7, 5.4))
