"""How far estimates are from what they estimate: the approximation figures of the papers, redrawn.

    python scripts/approximation.py --out runs/approximation
    python scripts/approximation.py --out runs/approximation --figures norms masks --quick

features: attention matrix and output against the number of features (arXiv:2006.03555, figure 2)
layers:   a softmax stack converted to kernelized attention, by depth (arXiv:2006.03555, figure 7)
norms:    one row of attention against the norm of queries and keys (arXiv:2106.12566, figure 1b)
masks:    FLT's mask against the number of nodes (arXiv:2302.01925, theorems 4.1, 4.2, A.3 and A.4)

Each figure gives a PNG and a CSV with a row per point; slopes go to approximation.md.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from collections.abc import Iterable
from pathlib import Path

import approximation_report as report
import torch
from approximation_report import UNIFORM, Layout, Points, Row
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm

from molflt.attention import mixing
from molflt.attention.feature_maps import FEATURE_MAPS
from molflt.attention.kernels import LaplaceKernel
from molflt.attention.layer import Attention
from molflt.attention.nodes import GaussianNodes, KernelNodes
from molflt.attention.projections import PROJECTIONS
from molflt.attention.spectra import SPECTRA
from molflt.attention.spectral import SpectralPosition
from molflt.attention.stack import Block

MAPS = ("positive", "trigonometric", "favor2020")
CONFIDENCE = 0.95  # of the bound on the largest error of a mask

# Families of masks by label: key of SPECTRA, and how nodes are drawn: the standard deviation of
# Gaussian nodes in cycles/Å, "own" density, or "laplace", a proposal with heavier tails.
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


def progress(name: str, *axes: Iterable) -> Iterable:
    """All combinations, with a bar."""
    return tqdm(list(itertools.product(*axes)), desc=name, unit=" points", leave=False)


def features(size: dict, generator: torch.Generator) -> list[Row]:
    """Mean squared errors of exp(q . k / sqrt(d)) and of the output, by number of features.

    Relative to the mean square of what is estimated. Queries, keys and values are the same for all
    mechanisms of a sample; rows of the matrix are independent, so that some of them are enough.
    """
    points, dim = Points(), size["dim"]
    for scale, _ in progress("features", size["scales"], range(size["samples"])):
        query, key, value = (
            torch.randn(1, 1, n, dim, generator=generator) * s
            for n, s in (
                (size["queries"], scale * dim**-0.25),
                (size["keys"], scale * dim**-0.25),
                (size["keys"], 1.0),
            )
        )
        exact = (query @ key.mT).exp()
        output = mixing.softmax(query, key, value)
        flat = exact.mean(dim=-1, keepdim=True).expand_as(exact)  # the best constant of each row
        for name, m in itertools.product(MAPS, size["features"]):
            for projection in (*PROJECTIONS, UNIFORM):
                labels = {"feature_map": name, "scale": scale, "projection": projection, "m": m}
                if projection == UNIFORM:
                    estimate = flat
                else:
                    rows = m // 2 if name == "trigonometric" else m  # a sine and a cosine each
                    phi = FEATURE_MAPS[name](dim, 1, rows, projection)
                    phi.redraw_(generator)
                    estimate = phi(query).materialize() @ phi(key).materialize().mT
                total = estimate.sum(dim=-1, keepdim=True)
                mixed = estimate @ value / total
                points.add(relative(estimate, exact), **labels, quantity="matrix")
                points.add(relative(mixed, output), **labels, quantity="output")
                if phi.signed and projection != UNIFORM:
                    share = (total <= 0).float().mean()
                    points.add(share, **labels, quantity="normalizers <= 0")
    return points.rows()


def relative(estimate: Tensor, exact: Tensor) -> float:
    """Mean squared error over mean square."""
    return float((estimate - exact).square().mean() / exact.square().mean())


def layers(size: dict, generator: torch.Generator) -> list[Row]:
    """Root-mean-square error of normalized outputs after each layer of a converted stack.

    Softmax blocks with random weights are converted by loading their weights into kernelized ones.
    `gain` multiplies the weights of queries and keys: it stands in for what training sharpens.
    """
    points, dim, heads = Points(), size["dim"], size["heads"]
    for gain, _ in progress("layers", size["gains"], range(size["samples"])):
        x = torch.randn(1, size["tokens"], dim, generator=generator)
        torch.manual_seed(int(torch.randint(2**31, (), generator=generator)))
        stack = [
            Block(Attention(dim, heads, mixing="softmax"), 4 * dim) for _ in range(size["depth"])
        ]
        for block in stack:
            block.attention.to_query.weight.data.mul_(gain)
            block.attention.to_key.weight.data.mul_(gain)
        exact = run(stack, x)
        for name, m in itertools.product(size["maps"], size["features"]):
            options = {"feature_map": name, "num_features": m // 2 if name == MAPS[1] else m}
            converted = [Block(Attention(dim, heads, **options), 4 * dim) for _ in stack]
            for old, new in zip(stack, converted, strict=True):
                new.load_state_dict(old.state_dict(), strict=False)  # projections stay as drawn
            record(points, exact, run(converted, x), feature_map=name, gain=gain, m=m)
        for block in stack:  # without queries all keys weigh the same
            block.attention.to_query.weight.data.zero_()
            block.attention.to_query.bias.data.zero_()
        for name in size["maps"]:
            record(points, exact, run(stack, x), feature_map=name, gain=gain, m=UNIFORM)
    return points.rows()


def run(stack: list[Block], x: Tensor) -> list[Tensor]:
    """Output after each layer, with LayerNorm as at the end of a pre-norm stack."""
    outputs = itertools.accumulate(stack, lambda x, block: block(x), initial=x)
    return [F.layer_norm(output, x.shape[-1:]) for output in outputs][1:]


def record(points: Points, exact: list[Tensor], found: list[Tensor], **labels: object) -> None:
    """Adds the error after each layer; outputs have unit variance, so it is a relative one."""
    for depth, (a, b) in enumerate(zip(exact, found, strict=True), start=1):
        points.add(float((a - b).square().mean().sqrt()), **labels, layers=depth)


def norms(size: dict, generator: torch.Generator) -> list[Row]:
    """L1 error of a row of attention, queries and keys on the sphere of radius R, logits q . k."""
    points, dim, heads = Points(), size["dim"], 16  # one head is one sample
    for radius, _ in progress("norms", size["radii"], range(size["samples"] // heads)):
        query, key = (
            radius * F.normalize(torch.randn(1, heads, n, dim, generator=generator), dim=-1)
            for n in (1, size["keys"])
        )
        exact = (query @ key.mT).softmax(dim=-1)
        flat = torch.full_like(exact, 1 / size["keys"])
        for name in MAPS[:2]:
            for m in size["features"]:
                phi = FEATURE_MAPS[name](dim, heads, m // 2 if name == MAPS[1] else m)
                phi.redraw_(generator)
                estimate = phi(query).materialize() @ phi(key).materialize().mT
                estimate = estimate / estimate.sum(dim=-1, keepdim=True)
                error = (estimate - exact).abs().sum(dim=-1)
                points.add(error, feature_map=name, m=m, R=radius)
            points.add((flat - exact).abs().sum(-1), feature_map=name, m=UNIFORM, R=radius)
    return points.rows()


def masks(size: dict, generator: torch.Generator) -> list[Row]:
    """Errors of sampled masks between points in a ball, and the bound of theorem 4.2.

    One head is one draw of nodes. All masks have f(0) = 1. "bias" is the root mean square, over
    pairs of points, of the mean error over draws; its sd is the standard error of that mean.
    """
    points, draws = Points(), 16
    direction = F.normalize(torch.randn(size["tokens"], 3, generator=generator), dim=-1)
    radius = size["radius"] * torch.rand(size["tokens"], 1, generator=generator) ** (1 / 3)
    positions = (direction * radius).double()[None]
    pairs = size["tokens"] * (size["tokens"] - 1) // 2 + 1  # f(z) = f(-z), and one z = 0
    ratios = {label: largest_ratio(mask_family(label, 1, 1)) for label in FAMILIES}
    for label, r in progress("masks", FAMILIES, size["nodes"]):
        position = mask_family(label, draws, r)
        ratio = ratios[label]
        exact = position("softmax", positions, positions).bias
        errors = []
        for _ in range(size["draws"] // draws):
            position.redraw_(generator)
            left, right = position("linear", positions, positions).factors
            errors.append((left @ right.mT - exact)[0].flatten(1))
        error = torch.cat(errors).detach()  # [draws, pairs]
        labels = {"family": label, "largest g/p": ratio, "r": r}
        points.add(error.square().mean(dim=-1).sqrt(), **labels, quantity="rms error")
        points.add(error.abs().amax(dim=-1), **labels, quantity="largest error")
        bound = ratio * math.sqrt(2 / r * math.log(2 * pairs / (1 - CONFIDENCE)))
        points.add(bound, **labels, quantity=f"bound, {100 * CONFIDENCE:.0f} %")
        bias = error.mean(dim=0).square().mean().sqrt()
        standard_error = (error.var(dim=0) / len(error)).mean().sqrt()
        points.add(bias, **labels, quantity="bias")
        points.add(standard_error, **labels, quantity="standard error of bias")
    return points.rows()


def mask_family(label: str, heads: int, nodes: int, seed: int = 0) -> SpectralPosition:
    """A mask with f(0) = 1, the same in every head, in float64; lengths in Å."""
    name, rule = FAMILIES[label]
    torch.manual_seed(seed)
    single, spectrum = SPECTRA[name](1), SPECTRA[name](heads)
    with torch.no_grad():
        single.amplitude.fill_(1 / single.amplitude.numel())
        for parameter, source in zip(spectrum.parameters(), single.parameters(), strict=True):
            parameter.copy_(source.expand_as(parameter))
    if rule == "own":
        return SpectralPosition(spectrum, KernelNodes(spectrum, nodes)).double()
    if rule == "laplace":
        proposal = LaplaceKernel(heads, length_range=(2.0, 2.0))
        return SpectralPosition(spectrum, KernelNodes(proposal, nodes, shared=False)).double()
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


POWERS = [2**n for n in range(4, 13)]
FIGURES = {
    "features": Layout(
        features,
        {"dim": 16, "keys": 4096, "queries": 512, "samples": 30, "scales": [0.5, 1.0]}
        | {"features": POWERS[:7]},
        {"dim": 16, "keys": 256, "queries": 64, "samples": 8, "scales": [0.5]}
        | {"features": POWERS[:5]},
        ("quantity", "feature_map"),
        "projection",
        "m",
        ("features per token M", "relative mean squared error"),
        3,
        (7, 4.3),
        page="scale",
    ),
    "layers": Layout(
        layers,
        {"dim": 64, "heads": 4, "tokens": 1024, "depth": 8, "samples": 10, "gains": [1.0, 2.0]}
        | {"maps": MAPS[:2], "features": [16, 64, 256, 1024]},
        {"dim": 32, "heads": 2, "tokens": 64, "depth": 3, "samples": 3, "gains": [1.0, 2.0]}
        | {"maps": MAPS[:2], "features": [16, 256]},
        ("feature_map", "gain"),
        "m",
        "layers",
        ("layers", "relative error of outputs"),
        4,
        (9, 2.8),
        log_x=False,
    ),
    "norms": Layout(
        norms,
        {"dim": 64, "keys": 1024, "samples": 128, "features": [4, 16, 64, 256, 1024]}
        | {"radii": [0.25 * n for n in range(2, 17)]},
        {"dim": 64, "keys": 128, "samples": 32, "features": [4, 64], "radii": [0.5, 1, 2, 3, 4]},
        ("feature_map",),
        "m",
        "R",
        ("norm R of queries and keys", "L1 error of a row of attention"),
        2,
        (7.5, 3.2),
        log_x=False,
    ),
    "masks": Layout(
        masks,
        {"tokens": 32, "radius": 5.0, "draws": 256, "nodes": POWERS},
        {"tokens": 12, "radius": 5.0, "draws": 64, "nodes": POWERS[:5]},
        ("family",),
        "quantity",
        "r",
        ("nodes r", "error of the mask, f(0) = 1"),
        3,
        (7, 5.4),
    ),
}


def main(words: list[str] | None = None) -> int:
    """Measures, draws and prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("runs/approximation"))
    parser.add_argument("--figures", nargs="+", choices=FIGURES, default=list(FIGURES))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="tiny sizes, in seconds")
    options = parser.parse_args(words)
    torch.set_num_threads(1)
    options.out.mkdir(parents=True, exist_ok=True)
    text = ""
    for name in options.figures:
        layout = FIGURES[name]
        generator = torch.Generator().manual_seed(options.seed)
        with torch.no_grad():
            rows = layout.compute(layout.quick if options.quick else layout.full, generator)
        report.write_csv(options.out / f"{name}.csv", rows)
        report.draw(options.out / f"{name}.png", rows, layout)
        text += f"### {name}\n\n{report.summarize(name, rows)}\n"
    (options.out / "approximation.md").write_text(text)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
