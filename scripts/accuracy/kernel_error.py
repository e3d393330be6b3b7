"""Distance of each placement of a mask from exact attention, at equal cost, on real slabs.

Costs are multiplications per atom and head of the linear-time forms (docs/results has them for
each): queries and keys are projected to m features, and each form gets the features that a budget
leaves it. Trigonometric features need half of that, which is not taken off.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from kit.rows import Promise, Row, Rows, markdown, names, pick
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm

from molflt.attention import FEATURE_MAPS, NODES, FeatureMap
from molflt.attention.mixing.forms import quadratic, softmax
from molflt.attention.nodes import ShellNodes
from molflt.attention.positions import MultiplicativePosition, SpectralPosition
from molflt.attention.positions.base import differences
from molflt.attention.positions.multiplicative import NearField
from molflt.attention.spectra import GaussianBasis, ShellWeights
from molflt.data.structures import open_dataset
from molflt.data.structures.sources import split_path

MASKS, DIM, CUTOFF = 8, 16, 5.0  # heads, d = dv, Å
MOST = 256  # nodes of additive forms with random features, whose errors are above 1 by then
AIM = 0.2  # what the near field is to make of the additive form's error
CONTACT, AMPLITUDE = (1.0, 3.0), 1.5  # Å, where the largest |f| is the amplitude
# |q| = |k| = 1 or standard normal times d^(-1/4), and feature maps that do not fail for them.
QK = {"unit": ("positive", "trigonometric"), "gaussian": ("positive",)}
SAMPLE = Path(__file__).resolve().parents[2] / "datasets" / "chgnet-sample"

Tokens = tuple[Tensor, ...]  # queries, keys, values, exact outputs


class Form(NamedTuple):
    """A placement and where its spectrum is sampled.

    "gaussian" and "sobol" have nodes and their sigma, "shells" (weights fitted) and "quadrature"
    (of a known spectrum) shells and their k_max, cycles/Å. "exact mask" errs by features alone.
    """

    placement: str
    rule: str = "constant"
    count: int = 0
    scale: float = 0.0

    def __str__(self) -> str:
        unit = "σ" if self.rule in NODES and self.rule != "shells" else "to"
        return f"{self.rule} {self.count} {unit} {self.scale:g}" if self.count else self.rule


SHELLS = ((1, 0.03), (1, 0.05), (2, 0.05), (4, 0.1), (8, 0.2))  # their number, and k_max, cycles/Å
NEAR = ("near field", "near exact")
PAPER = Form("additive", "gaussian", 16, 0.15)
FORMS = (
    Form("no mask"),
    Form("exact mask"),
    PAPER,
    Form("additive", "gaussian", 16, 0.05),
    *(Form("additive", "sobol", r, sigma) for r in (16, 64) for sigma in (0.05, 0.1)),
    *(Form("additive", "shells", n, k) for n, k in SHELLS),
    Form("additive", "quadrature", 4, 0.1),
    Form("multiplicative", "quadrature", 4, 0.1),
    *(Form("multiplicative", "shells", n, k) for n, k in SHELLS),
    *(Form(near) for near in NEAR),
    *(Form(near, "shells", n, k) for near in NEAR for n, k in ((1, 0.005), *SHELLS[:4])),
)


FEW = (*FORMS[:3], FORMS[17], FORMS[25], FORMS[30])  # one of a kind
QUICK = {"structures": 2, "seeds": 2, "features": (64, 256), "few": True}


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
    near = (pairs < CUTOFF).sum().item() / sum(x.shape[1] for x in positions)
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
) -> None:
    """Sets the amplitudes by weighted least squares to the target (heads, n) at distances (n,), Å.

    The ridge is 1e-6 of the largest diagonal element
    of the normal equations, so that weights of opposite signs do not grow without need.
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


class Mask(NamedTuple):
    """A form built for some slabs: what takes the place of exp(f)."""

    form: Form
    basis: GaussianBasis  # of f
    position: SpectralPosition | None  # None: constant 1
    near: NearField | None

    @property
    def nodes(self) -> int:
        return 0 if self.position is None else self.position.nodes.num_nodes

    def cost(self, m: int, neighbors: float) -> float:
        """Multiplications per atom and head of m features."""
        r, p = self.nodes, 2 * self.nodes + 1
        if self.form.placement in ("additive", "no mask", "exact mask"):
            return 2 * m * (DIM + 2 * r) + 2 * m * (DIM + 1)
        pair = m + p + DIM + 1 if self.near is not None else 0.0
        if self.form.placement == "near exact":
            pair += 2 * DIM + 1
        return 2 * m * DIM + 2 * m * p * (DIM + 1) + neighbors * pair

    def features(self, budget: float, neighbors: float) -> int:
        """The largest m of that cost; costs are linear in m. 0 where no draw is worth its time."""
        if self.form.placement == "additive" and self.nodes > MOST:
            return 0
        fixed = self.cost(0, neighbors)
        return int((budget - fixed) / (self.cost(1, neighbors) - fixed) + 1e-9)

    def factors(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """N1 and N2, or U and V: positions (1, n, 3) -> (1, heads, n, p)."""
        if self.position is not None:
            return self.position.factors(x, x)
        ones = x.new_ones(1, MASKS, x.shape[1], 1)
        return ones, ones

    def kernel(self, x: Tensor) -> Tensor:
        """Approximation of exp(f) as a matrix: positions (1, n, 3) -> (1, heads, n, n)."""
        if self.form.placement == "exact mask":
            return self.basis.mask(differences(x, x)).exp()
        left, right = self.factors(x)
        kernel = left @ right.mT
        if self.form.placement == "additive":
            return kernel.exp()
        if self.near is None:
            return kernel
        switch, near = self.near_part(x, self.near)
        return kernel - switch * kernel + near

    def near_part(self, x: Tensor, near: NearField) -> tuple[Tensor, Tensor]:
        """s and s exp(f) of all pairs: (1, 1, n, n) and (1, heads, n, n)."""
        delta = differences(x, x)
        switch = near.switch(delta.norm(dim=-1))[:, None]
        return switch, switch * self.basis.mask(delta).exp()


def build(form: Form, basis: GaussianBasis, data: Slabs, seed: int) -> Mask:
    """A form for given masks; fitted to the pairs that the data have."""
    near = NearField(basis, CUTOFF) if form.placement in NEAR else None
    if form.rule == "constant":
        return Mask(form, basis, None, near)
    additive = form.placement == "additive"
    if form.rule in ("gaussian", "sobol"):
        nodes = NODES[form.rule](MASKS, form.count, sigma=form.scale, learn_sigma=False).double()
        nodes.redraw_(torch.Generator().manual_seed(seed))
        return Mask(form, basis, SpectralPosition(basis, nodes), None)
    f, weight = along(basis, data.distance), data.share
    if near is not None:  # what the near field replaces may be anything
        weight = weight * (1 - near.switch(data.distance)).square()
    normalized = form.rule == "shells"
    shells = ShellNodes(data.diameter, form.scale, form.count, normalized=normalized).double()
    family: GaussianBasis | ShellWeights = GaussianBasis(MASKS, 16, 3, (0.25, 4.0))
    if normalized:
        family = ShellWeights(MASKS, shells.shell_radius)
    fit(family.double(), f if additive else f.exp() - 1, data.distance, weight)
    position = (SpectralPosition if additive else MultiplicativePosition)(family, shells)
    return Mask(form, basis, position, near)


def tokens(x: Tensor, basis: GaussianBasis, qk: str, seed: int) -> Tokens:
    """Random features, scaled, with the outputs of softmax and the exact mask: (1, heads, n, d)."""
    generator = torch.Generator().manual_seed(seed)
    shape = (3, 1, MASKS, x.shape[1], DIM)
    query, key, value = torch.randn(shape, dtype=torch.float64, generator=generator)
    scaled = [F.normalize(t, dim=-1) if qk == "unit" else t * DIM**-0.25 for t in (query, key)]
    exact = softmax(*scaled, value, basis.mask(differences(x, x)))
    return (*scaled, value, exact)


def relative(out: Tensor, exact: Tensor) -> Tensor:
    """|out - exact| / |exact| of each head."""
    return ((out - exact).norm(dim=(2, 3)) / exact.norm(dim=(2, 3))).flatten()


def drawn(mask: Mask, name: str, m: int, seed: int) -> FeatureMap | None:
    """The feature map of a form; None for exp(q . k) itself."""
    if name == "exact":
        return None
    torch.manual_seed(seed)
    width = DIM + 2 * mask.nodes if mask.form.placement == "additive" else DIM
    return FEATURE_MAPS[name](width, MASKS, m // 2 if name == "trigonometric" else m)


def output(mask: Mask, x: Tensor, kernel: Tensor, given: Tokens, phi: FeatureMap | None) -> Tensor:
    """Outputs by the N x N matrix: the same numbers as in linear time, faster for few atoms."""
    query, key, value, _ = given
    if phi is None:
        weights = (query @ key.mT).exp() * kernel
        return weights @ value / weights.sum(dim=-1, keepdim=True)
    if mask.form.placement == "additive":  # the mask is within the features
        left, right = mask.factors(x)
        query, key = torch.cat((left, query), dim=-1), torch.cat((right, key), dim=-1)
        kernel = torch.ones(())
    features = phi(query.float()), phi(key.float())
    if mask.near is not None and mask.form.placement == "near exact":
        near = mask.near_part(x, mask.near)[1]
        far = quadratic(*features, value.float(), kernel=(kernel - near).float())
        weights = (query @ key.mT).exp() * near
        total = far.normalizer * far.log_scale.exp() + weights.sum(dim=-1, keepdim=True)
        return (far.extensive() + weights @ value) / total
    return quadratic(*features, value.float(), kernel=kernel.float()).ratio().double()


def of_slabs(
    data: Slabs, forms: tuple[Form, ...], features: tuple[int, ...], seeds: int
) -> Iterator[Row]:
    """All forms at all budgets, and with exact q . k."""
    basis = masks()
    paper = build(PAPER, basis, data, 0)
    budgets = [paper.cost(m, data.neighbors) for m in features]
    given = {
        (s, qk): [tokens(x, basis, qk, 1000 * s + i) for i, x in enumerate(data.positions)]
        for s, qk in itertools.product(range(seeds), QK)
    }
    for form in tqdm(forms, desc=data.name, unit=" forms", leave=False):
        mask = build(form, basis, data, 0)
        affordable = [(b, m) for b in budgets if (m := mask.features(b, data.neighbors)) >= 2]
        points = [(qk, "exact", 0.0, 0) for qk in QK]
        points += [(qk, name, *p) for qk in QK for name in QK[qk] for p in affordable]
        errors: dict[tuple, list[Tensor]] = {point: [] for point in points}
        for s in range(seeds):
            built = build(form, basis, data, s)
            kernels = [built.kernel(x) for x in data.positions]
            for point in points:
                own = given[s, point[0]]
                phi = drawn(built, point[1], point[3], s)
                triples = zip(data.positions, kernels, own, strict=True)
                found = [relative(output(built, x, h, t, phi), t[3]) for x, h, t in triples]
                errors[point].append(torch.stack(found))
        for (qk, name, budget, m), each in errors.items():
            found = torch.stack(each)  # [draws, structures, heads]
            yield {
                **{"slabs": data.name, "qk": qk, "feature_map": name},
                **{"form": form.placement, "rule": str(form), "r": mask.nodes, "m": m},
                **{"budget": budget, "error": found.mean().item()},
                "sd": found.mean(dim=1).std().item(),  # between masks and draws
            }


@torch.no_grad()
def measure(
    data: Path = SAMPLE,
    oc20: Path | None = None,
    structures: int = 20,
    seeds: int = 8,
    features: tuple[int, ...] = (64, 256, 1024),
    few: bool = False,
) -> Rows:
    """Errors on val_id of a folder of data, and on records of OC20 if they are given."""
    sources = {data.absolute().name: split_path(data, "val_id")} | ({"OC20": oc20} if oc20 else {})
    every = [slabs(name, path, structures) for name, path in sources.items()]
    return [row for own in every for row in of_slabs(own, FEW if few else FORMS, features, seeds)]


def best(rows: Rows, **labels: object) -> float:
    """Least error of the rows with these labels; nan if there are none."""
    return min((row["error"] for row in pick(rows, **labels)), default=math.nan)


# Lines of the table: a name, and which of the measurements may stand for it.
LINES: dict[str, dict[str, object]] = {
    "no mask at all": {"form": "no mask"},
    "additive, papers' nodes, positive features": {
        **{"form": "additive", "rule": str(PAPER), "feature_map": "positive"},
    },
    "additive, best": {"form": "additive"},
    "multiplicative, best": {"form": "multiplicative"},
    "near field, best": {"form": "near field"},
    "near field with exact q·k of near pairs, best": {"form": "near exact"},
    "exact mask, features alone": {"form": "exact mask"},
}
PAPERS, ADDITIVE, _, NEAREST, EXACT = list(LINES.values())[1:6]


def verdict(rows: Rows, other: dict[str, object]) -> str:
    """Ratios of the near field, with exact q . k in brackets, against the aim of a fifth."""
    values = [best(rows, **near) / best(rows, **other) for near in (NEAREST, EXACT)]
    words = ["pass" if value <= AIM else "**fail**" for value in values]
    return "{:.3f} ({:.3f}) ".format(*values) + " / ".join(dict.fromkeys(words))


def table(rows: Rows) -> str:
    """Errors of unit queries and keys at equal cost, and ratios to the additive form."""
    unit, slabs = pick(rows, qk="unit"), names(rows, "slabs")
    budgets = names([row for row in unit if row["budget"]], "budget")
    at = [pick(unit, slabs=name, budget=budget) for name in slabs for budget in budgets]
    head = [f"{name} {budget:,.0f}" for name in slabs for budget in budgets]
    lines = [
        [line, *(f"{best(own, **labels):.2f}" for own in at)] for line, labels in LINES.items()
    ]
    errors = markdown(["", *head], lines)
    head = [f"of {what}: {name}" for what in ("the papers' form", "the best") for name in slabs]
    lines = []
    for budget in [*budgets, 0]:
        own = [pick(unit, slabs=name, budget=budget) for name in slabs]
        papers = PAPERS if budget else {**PAPERS, "feature_map": "exact"}
        cells = [verdict(part, other) for other in (papers, ADDITIVE) for part in own]
        lines.append([f"{budget:,.0f} multiplications" if budget else "mask alone", *cells])
    return f"{errors}\n\n{markdown(['near field / additive', *head], lines)}"


def worst(rows: Rows, near: dict[str, object], other: dict[str, object]) -> float:
    """Largest ratio over sources, q . k exact."""
    found = pick(rows, qk="unit", feature_map="exact")
    parts = [pick(found, slabs=name) for name in names(rows, "slabs")]
    return max(best(part, **near) / best(part, **other) for part in parts)


def at_cost(rows: Rows) -> float | None:
    """Largest ratio of the near exact form to the papers', from the second budget on."""
    unit = [row for row in pick(rows, qk="unit") if row["budget"] > 9000]
    pairs = dict.fromkeys((row["slabs"], row["budget"]) for row in unit)
    parts = (pick(unit, slabs=name, budget=budget) for name, budget in pairs)
    return max((best(part, **EXACT) / best(part, **PAPERS) for part in parts), default=None)


ALONE = {**PAPERS, "feature_map": "exact"}
PROMISES = [
    Promise("mask, near field / best additive", lambda r: worst(r, NEAREST, ADDITIVE), AIM),
    Promise("mask, near field / papers' form", lambda r: worst(r, NEAREST, ALONE), AIM),
    Promise("near field, exact q.k / papers' form, 2nd budget on", at_cost, AIM),
]
