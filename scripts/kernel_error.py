"""How far each placement of a mask is from exact attention, at equal cost, on real slabs.

    python scripts/kernel_error.py --out docs/images/kernel_error --oc20 PATH/oc20_is2re_val20.lmdb

Exact: A_ij = exp(q_i . k_j + f(r_i - r_j)), free boundaries, f a sum of Gaussians of random
amplitudes. Error: |out - exact| / |exact| of the outputs, Frobenius norm over the atoms of one
structure and head. Costs are multiplications per atom and head of the linear-time forms, for

    additive        2 m (d + 2 r) + 2 m (dv + 1)
    multiplicative  2 m d + 2 m p (dv + 1), p = 2 r + 1
    near field      the same + neighbors (m + p + dv + 1)

with queries and keys projected, r nodes, p columns; each form gets the features m that a budget
leaves it. A budget is the cost of the papers' form, 16 Gaussian nodes, at 64 to 4096 features.
Writes kernel_error.csv and kernel_error.md, and prints the latter.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import statistics
import sys
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm

from molflt.attention import mixing
from molflt.attention.encoding import differences
from molflt.attention.feature_maps import FEATURE_MAPS
from molflt.attention.multiplicative import KernelPosition, NearField
from molflt.attention.nodes import NODES
from molflt.attention.quadrature import ShellNodes, ShellWeights
from molflt.attention.spectra import GaussianBasis
from molflt.attention.spectral import SpectralPosition
from molflt.data import open_dataset

MASKS, DIM, CUTOFF = 8, 16, 5.0  # heads, d = dv, Å
CONTACT, AMPLITUDE = (1.0, 3.0), 1.5  # Å, where the largest |f| is the amplitude
QK = ("unit", "gaussian")  # |q| = |k| = 1, or standard normal times d^(-1/4)
SAMPLE = Path(__file__).resolve().parents[1] / "datasets" / "emt-sample" / "val_id.safetensors"


class Form(NamedTuple):
    """A placement and where its spectrum is sampled.

    Rules: "gaussian", "sobol": nodes and their sigma, cycles/Å; "shells" (weights fitted) and
    "quadrature" (of a known spectrum): number of shells and k_max, cycles/Å; "constant": none.
    """

    placement: str
    rule: str = "constant"
    count: int = 0
    scale: float = 0.0

    def __str__(self) -> str:
        unit = "σ" if self.rule in NODES and self.rule != "shells" else "to"
        return f"{self.rule} {self.count} {unit} {self.scale:g}" if self.count else self.rule


PAPER = Form("additive", "gaussian", 16, 0.15)
FORMS = (
    Form("no mask"),
    PAPER,
    *(Form("additive", "gaussian", 16, sigma) for sigma in (0.05, 0.1)),
    *(Form("additive", "sobol", r, sigma) for r in (16, 64, 256) for sigma in (0.05, 0.1, 0.15)),
    *(Form("additive", "shells", n, k) for n, k in ((2, 0.05), (4, 0.1), (8, 0.2))),
    *(Form("multiplicative", "quadrature", n, k) for n, k in ((4, 0.1), (8, 0.2))),
    *(Form("multiplicative", "shells", n, k) for n, k in ((2, 0.05), (4, 0.1), (8, 0.2))),
    Form("near field"),
    *(Form("near field", "shells", n, k) for n, k in ((1, 0.03), (2, 0.05), (4, 0.1))),
)


class Sizes(NamedTuple):
    """How much is measured."""

    structures: int
    seeds: int
    features: tuple[int, ...]
    forms: tuple[Form, ...] = FORMS


FULL = Sizes(20, 8, (64, 256, 1024, 4096))
QUICK = Sizes(2, 2, (64, 256), (Form("no mask"), PAPER, FORMS[-6], FORMS[-4], FORMS[-3]))


class Slabs(NamedTuple):
    """Structures of one source, and what forms are fitted to."""

    name: str
    positions: list[Tensor]  # (1, n, 3) Å, centered, float64
    diameter: float  # Å
    neighbors: float  # per atom within the cutoff, itself included
    distance: Tensor  # (bins,) Å
    share: Tensor  # (bins,) of pairs


def slabs(name: str, path: Path, count: int) -> Slabs:
    """The first structures of a source."""
    data = open_dataset(path)
    positions = [data[i].pos.double()[None] for i in range(min(count, len(data)))]
    positions = [x - x.mean(dim=1, keepdim=True) for x in positions]
    pairs = torch.cat([differences(x, x).norm(dim=-1).flatten() for x in positions])
    edges = torch.arange(0.0, pairs.max().item() + 0.1, 0.1, dtype=torch.float64)
    counts = torch.histogram(pairs.clamp(max=edges[-1].item()), edges).hist
    middle = torch.cat((edges.new_zeros(1), (edges[1:-1] + edges[2:]) / 2))  # the first are selves
    atoms = sum(x.shape[1] for x in positions)
    near = (pairs < CUTOFF).sum().item() / atoms
    return Slabs(name, positions, pairs.max().item(), near, middle, counts / counts.sum())


def masks(seed: int = 0) -> GaussianBasis:
    """f of every head: Gaussians of widths 0.7 to 4 Å, the largest |f| near contact being 1.5."""
    torch.manual_seed(seed)
    basis = GaussianBasis(MASKS, 8, width_range=(0.7, 4.0), amplitude=1.0).double()
    contact = torch.linspace(*CONTACT, 41, dtype=torch.float64)
    largest = along(basis, contact).abs().amax(dim=-1, keepdim=True)
    basis.requires_grad_(False).amplitude.mul_(AMPLITUDE / largest)
    return basis


@torch.no_grad()
def along(spectrum: GaussianBasis | ShellWeights, distance: Tensor) -> Tensor:
    """Values at distances (n,) -> (heads, n)."""
    delta = F.pad(distance[None, :, None], (0, 2))
    return spectrum.mask(delta)[0]


def fit(
    spectrum: GaussianBasis | ShellWeights, target: Tensor, distance: Tensor, weight: Tensor
) -> float:
    """Sets the amplitudes by least squares and returns the root mean square of what is left.

    Args:
        spectrum: changed in place; linear in its amplitudes (heads, t).
        target: (heads, n).
        distance: (n,), Å.
        weight: (n,), of the squares; the ridge is 1e-6 of the largest diagonal element.
    """
    amplitude = spectrum.requires_grad_(False).amplitude
    columns = []
    for t in range(amplitude.shape[1]):
        amplitude.zero_()[:, t] = 1.0
        columns.append(along(spectrum, distance)[0])
    basis = torch.stack(columns, dim=-1)  # [n, t]
    gram = basis.T @ (weight[:, None] * basis)
    gram = gram + 1e-6 * gram.diagonal().max() * torch.eye(len(gram)).to(gram)
    amplitude.copy_(torch.linalg.solve(gram, basis.T @ (weight * target).T).T)
    left = (along(spectrum, distance) - target).square() @ weight / weight.sum()
    return left.mean().sqrt().item()


class Mask(NamedTuple):
    """A form built for some slabs: what takes the place of exp(f)."""

    form: Form
    position: SpectralPosition | None  # None: constant 1
    near: NearField | None
    residual: float = 0.0  # of the fit

    @property
    def nodes(self) -> int:
        return 0 if self.position is None else self.position.nodes.num_nodes

    def cost(self, m: int, neighbors: float) -> float:
        """Multiplications per atom and head, see above."""
        r, p = self.nodes, 2 * self.nodes + 1
        if self.form.placement in ("additive", "no mask"):
            return 2 * m * (DIM + 2 * r) + 2 * m * (DIM + 1)
        pairs = neighbors * (m + p + DIM + 1) if self.near is not None else 0.0
        return 2 * m * DIM + 2 * m * p * (DIM + 1) + pairs

    def features(self, budget: float, neighbors: float) -> int:
        """The largest m of that cost; costs are linear in m."""
        fixed = self.cost(0, neighbors)
        return int((budget - fixed) / (self.cost(1, neighbors) - fixed) + 1e-9)

    def factors(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """N1 and N2, or U and V: positions (1, n, 3) -> (1, heads, n, p)."""
        if self.position is not None:
            return self.position.factors(x, x)
        ones = x.new_ones(1, MASKS, x.shape[1], 1)
        return ones, ones

    def kernel(self, x: Tensor) -> Tensor:
        """What stands for exp(f) as a matrix: positions (1, n, 3) -> (1, heads, n, n)."""
        left, right = self.factors(x)
        kernel = left @ right.mT
        if self.form.placement == "additive":
            return kernel.exp()
        if self.near is not None:
            kernel = kernel + self.near(differences(x, x)[0].flatten(0, 1), kernel[0].flatten(1))\
                .view_as(kernel)
        return kernel


def build(form: Form, basis: GaussianBasis, data: Slabs, seed: int) -> Mask:
    """A form for given masks; fitted to the pairs that the data have."""
    near = NearField(basis, CUTOFF) if form.placement == "near field" else None
    if form.rule == "constant":
        return Mask(form, None, near)
    additive = form.placement == "additive"
    if form.rule in ("gaussian", "sobol"):
        nodes = NODES[form.rule](MASKS, form.count, sigma=form.scale, learn_sigma=False).double()
        nodes.redraw_(torch.Generator().manual_seed(seed))
        return Mask(form, SpectralPosition(basis, nodes), None)
    target, weight = along(basis, data.distance), data.share
    target = target if additive else target.exp() - 1
    if near is not None:  # what the near field replaces may be anything
        weight = weight * (1 - near.switch(data.distance)).square()
    normalized = form.rule == "shells"
    shells = ShellNodes(data.diameter, form.scale, form.count, normalized=normalized).double()
    family = (
        ShellWeights(MASKS, shells) if normalized else GaussianBasis(MASKS, 16, 3, (0.25, 4.0))
    ).double()
    residual = fit(family, target, data.distance, weight)
    position = (SpectralPosition if additive else KernelPosition)(family, shells)
    return Mask(form, position, near, residual)


class Tokens(NamedTuple):
    """Queries, keys and values of one structure, and exact outputs: (1, heads, n, d)."""

    query: Tensor
    key: Tensor
    value: Tensor
    exact: Tensor


def tokens(x: Tensor, basis: GaussianBasis, qk: str, seed: int) -> Tokens:
    """Random features, scaled, with the outputs of softmax and the exact mask."""
    generator = torch.Generator().manual_seed(seed)
    shape = (3, 1, MASKS, x.shape[1], DIM)
    query, key, value = torch.randn(shape, dtype=torch.float64, generator=generator)
    scaled = [F.normalize(t, dim=-1) if qk == "unit" else t * DIM**-0.25 for t in (query, key)]
    exact = mixing.softmax(*scaled, value, basis.mask(differences(x, x)))
    return Tokens(*scaled, value, exact)


def relative(out: Tensor, exact: Tensor) -> list[float]:
    """|out - exact| / |exact| of each head."""
    error = (out - exact).flatten(2).norm(dim=-1) / exact.flatten(2).norm(dim=-1)
    return error.flatten().tolist()


def exact_features(kernel: Tensor, given: Tokens) -> Tensor:
    """Outputs with exp(q . k) itself: the error of the mask alone."""
    weights = (given.query @ given.key.mT).exp() * kernel
    return weights @ given.value / weights.sum(dim=-1, keepdim=True)


def random_features(
    mask: Mask | None, x: Tensor, kernel: Tensor, given: Tokens, m: int, seed: int
) -> Tensor:
    """Outputs with m positive features: by the N x N matrix, the same numbers for fewer atoms."""
    query, key = given.query.float(), given.key.float()
    if mask is not None and mask.form.placement == "additive":
        left, right = (factor.float() for factor in mask.factors(x))
        query, key = torch.cat((left, query), dim=-1), torch.cat((right, key), dim=-1)
        kernel = torch.ones(())
    torch.manual_seed(seed)
    phi = FEATURE_MAPS["positive"](query.shape[-1], MASKS, m)
    sums = mixing.quadratic(phi(query), phi(key), given.value.float(), kernel=kernel.float())
    return sums.ratio().double()


class Row(NamedTuple):
    """Errors of one form at one budget; m = 0 stands for exact q . k."""

    slabs: str
    qk: str
    form: str
    rule: str
    r: int
    m: int
    budget: float
    cost: float
    error: float
    sd: float  # of the mean over structures, between heads and seeds
    spoiled: float  # share of heads and structures with an error above 1


def summary(
    data: Slabs, qk: str, mask: Mask, budget: float, m: int, found: list[list[float]]
) -> Row:
    """From errors by seed and structure, then head."""
    cost = mask.cost(m, data.neighbors)
    flat = list(itertools.chain.from_iterable(found))
    means = [
        statistics.fmean(column)
        for seed in range(0, len(found), len(data.positions))
        for column in zip(*found[seed : seed + len(data.positions)], strict=True)
    ]
    spoiled = sum(e > 1 for e in flat) / len(flat)
    names = mask.form.placement, str(mask.form)
    spread = statistics.stdev(means)
    error = statistics.fmean(flat)
    return Row(data.name, qk, *names, mask.nodes, m, budget, cost, error, spread, spoiled)


def measured(data: Slabs, sizes: Sizes, seed: int) -> Iterator[Row]:
    """All forms at all budgets, and with exact q . k."""
    basis = masks(seed)
    paper = build(PAPER, basis, data, seed)
    budgets = [paper.cost(m, data.neighbors) for m in sizes.features]
    everything = list(itertools.product(range(seed, seed + sizes.seeds), enumerate(data.positions)))
    given = {
        (s, i, qk): tokens(x, basis, qk, 1000 * s + i) for s, (i, x) in everything for qk in QK
    }
    for form in tqdm(sizes.forms, desc=data.name, leave=False):
        built = {s: build(form, basis, data, s) for s in range(seed, seed + sizes.seeds)}
        mask = built[seed]
        counts = [(b, m) for b in budgets if (m := mask.features(b, data.neighbors)) >= 1]
        points = [(0.0, 0), *counts]
        errors: dict[tuple, list[list[float]]] = {(qk, m): [] for qk in QK for _, m in points}
        for s, (i, x) in everything:
            kernel = built[s].kernel(x)
            for qk, (_, m) in itertools.product(QK, points):
                own = given[s, i, qk]
                if m:
                    out = random_features(built[s], x, kernel, own, m, s)
                else:
                    out = exact_features(kernel, own)
                errors[qk, m].append(relative(out, own.exact))
        for qk, (budget, m) in itertools.product(QK, points):
            yield summary(data, qk, mask, budget, m, errors[qk, m])
