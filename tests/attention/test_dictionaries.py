"""Every entry of a dictionary passes its contract; a new entry is one class and one line."""

import inspect
import math

import contract
import pytest
import torch
from families import VARIANTS, make, randn
from torch import Tensor

from molflt.attention import (
    FEATURE_MAPS,
    NODES,
    POSITIONS,
    SPECTRA,
    Attention,
    FeatureMap,
    Features,
    Stack,
    make_position,
)
from molflt.attention.features.base import _joined
from molflt.attention.nodes import GaussianNodes, ShellNodes
from molflt.attention.spectra import Gaussian, Laplace, ShiftInvariant


def kernels() -> list[str]:
    return [v for v in VARIANTS if issubclass(SPECTRA[v.split(",")[0]], ShiftInvariant)]


def dims(variant: str) -> tuple[int, int]:
    """Returns 1 and 3 dimensions for functions of the distance, else 1 and 2, which is cheaper."""
    return (1, 3) if SPECTRA[variant.split(",")[0]].isotropic else (1, 2)


@pytest.mark.parametrize(("variant", "dim"), [(v, dim) for v in VARIANTS for dim in dims(v)])
def test_mask_and_spectrum_are_a_fourier_pair(variant, dim):
    contract.check_fourier_pair(make(variant, dim=dim))


@pytest.mark.parametrize("dim", [1, 3])
@pytest.mark.parametrize("variant", kernels())
def test_draws_follow_the_density(variant, dim):
    contract.check_draws(make(variant, dim=dim))


@pytest.mark.parametrize("dim", [1, 3])
@pytest.mark.parametrize("rule", NODES)
def test_nodes_give_the_mask(rule, dim):
    contract.check_nodes(rule, dim)


def uncovered() -> set[tuple[str, str | None, str]]:
    """Returns supported (position, spectrum, mixing) that no case covers."""
    claimed = set()
    for name, build in POSITIONS.items():
        mixings = getattr(build, "__self__", build).mixings
        spectra = SPECTRA if contract.has_spectrum(name) else (None,)
        claimed |= {(name, spectrum, mixing) for spectrum in spectra for mixing in mixings}
    found = set()
    for _, case, mixing, _ in contract.combinations():
        name, options = contract.CASES[case][:2]
        # Linear attention is compared with its quadratic form, see `check_oracle`.
        for each in {"linear": ("linear", "quadratic")}.get(mixing, (mixing,)):
            found.add((name, options.get("spectrum"), each))
    return claimed - found


def test_every_position_spectrum_and_mixing_has_a_case():
    assert not uncovered(), "add what it needs to OPTIONS or SPECTRUM_OPTIONS of tests/contract.py"
    assert {c.feature_map for c in contract.combinations()} == set(FEATURE_MAPS)


@pytest.mark.parametrize(
    ("case", "mixing"),
    [
        (name, mixing)
        for name, case in contract.CASES.items()
        for mixing in case.mixings
        if name != "none" and case.core and mixing != "quadratic"
    ],
)
def test_positions_compile(case, mixing):
    """Compiles the dense matrix, or rotated queries and keys, without a graph break."""
    position = contract.CASES[case].build().double()
    _, r = contract.ragged(case)[2]
    x = randn(1, contract.HEADS, len(r), contract.HEAD_DIM)

    def evaluated(r):
        encoding = position(mixing, r, r)
        dense = encoding.dense(len(x[0, 0]), len(x[0, 0]))
        return encoding.transform(x, x) if dense is None else dense

    torch._dynamo.reset()
    compiled = torch.compile(evaluated, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(r[None]), evaluated(r[None]), **contract.EXACT)


# --- wrong entries --------------------------------------------------------------------------


class WrongTransform(Gaussian):
    def spectrum(self, xi):
        return super().spectrum(1.1 * xi)


class Ripple(Laplace):
    """Off by a ripple of 5 percent."""

    def mask(self, delta):
        return super().mask(delta) * (1 + 0.05 * (3 * delta).cos().prod(dim=-1)[:, None])


class WrongDraws(Laplace):
    def draw(self, nodes, generator=None):
        return 1.1 * super().draw(nodes, generator)


class ForgetsTheNumber(GaussianNodes):
    def forward(self):
        xi, weights = super().forward()
        return xi, 1.05 * weights


class ForgetsTheVolume(GaussianNodes):
    """Density and weights agree with each other but not with the draws."""

    def _log_density(self, square):
        return super()._log_density(square) - 0.1 * self.log_sigma[:, None]


class UnevenShells(ShellNodes):
    def forward(self):
        xi, weights = super().forward()
        return xi, weights * (1 + 0.05 * self.shell_radius[self.shell])

    def sample(self, spectrum):
        xi, product = super().sample(spectrum)
        return xi, product * (1 + 0.05 * self.shell_radius[self.shell])


def failures(name: str) -> set[str]:
    """Returns the names of the checks that an entry of SPECTRA or NODES fails."""
    checks = []
    if name in SPECTRA:
        checks += [(contract.check_fourier_pair, (make(name, dim=dim),)) for dim in (1, 3)]
        if name in kernels():
            checks += [(contract.check_draws, (make(name, dim=dim),)) for dim in (1, 3)]
    if name in NODES:
        checks += [(contract.check_nodes, (name, dim)) for dim in (1, 3)]
    failed = set()
    for check, arguments in checks:
        try:
            check(*arguments)
        except AssertionError:
            failed.add(check.__name__)
    return failed


@pytest.mark.parametrize(
    ("entry", "caught"),
    [
        (Gaussian, set()),
        (WrongTransform, {"check_fourier_pair"}),
        (Ripple, {"check_fourier_pair"}),
        (WrongDraws, {"check_draws"}),
        (GaussianNodes, set()),
        (ForgetsTheNumber, {"check_nodes"}),
        (ForgetsTheVolume, {"check_nodes"}),
        (UnevenShells, {"check_nodes"}),
    ],
)
def test_wrong_entries_fail_their_checks(monkeypatch, entry, caught):
    dictionary = SPECTRA if issubclass(entry, ShiftInvariant) else NODES
    monkeypatch.setitem(dictionary, "new", entry)
    monkeypatch.setitem(VARIANTS, "new", {})
    if issubclass(entry, ShellNodes):
        monkeypatch.setitem(contract.NODE_OPTIONS, "new", contract.NODE_OPTIONS["shells"])
    assert failures("new") == caught


# --- one class and one line -----------------------------------------------------------------


class TaylorFeatures(FeatureMap):
    """Taylor map of Based (arXiv:2402.18668), phi(x) . phi(y) = 1 + x . y + (x . y)^2 / 2 > 0."""

    paper = "2402.18668, sec. 4.1"
    signed = True

    def _add(self, rows: int, projection: str) -> None:
        self.width = 1 + self.dim + self.dim**2

    def forward(self, *columns):
        x = _joined(*columns)
        square = (x[..., :, None] * x[..., None, :]).flatten(-2)
        return Features(torch.cat((torch.ones_like(x[..., :1]), x, square / 2**0.5), dim=-1))


class RationalQuadratic(ShiftInvariant):
    """K(z) = (1 + |z|^2)^(-(l + 1) / 2); p falls as exp(-2 pi |u|): Poisson's kernel."""

    isotropic = True

    def profile(self, z: Tensor) -> Tensor:
        return (1 + z.square().sum(dim=-1)) ** (-0.5 * (self.dim + 1))

    def unit_log_density(self, u: Tensor) -> Tensor:
        half = 0.5 * (self.dim + 1)
        radius = u.square().sum(dim=-1).clamp(min=1e-24).sqrt()
        return half * math.log(math.pi) - math.lgamma(half) - 2 * math.pi * radius

    def draw(self, nodes: int, generator: torch.Generator | None = None) -> Tensor:
        size = (self.heads, nodes, self.dim)
        uniform = torch.rand(size, dtype=torch.float64, generator=generator)
        normal = torch.randn(size, dtype=torch.float64, generator=generator)
        radius = -uniform.log().sum(dim=-1, keepdim=True) / (2 * math.pi)
        return radius * torch.nn.functional.normalize(normal, dim=-1)


def passes_the_contract(which) -> int:
    """Runs every applicable check on selected combinations and returns how many there are."""
    chosen = [c for c in contract.combinations() if which(c)]
    for combination in chosen:
        for check in contract.suite(combination):
            check(combination)
    return len(chosen)


def test_a_feature_map_is_one_class_and_one_line(monkeypatch):
    monkeypatch.setitem(FEATURE_MAPS, "taylor", TaylorFeatures)
    assert passes_the_contract(lambda c: c.feature_map == "taylor") >= 2 * len(POSITIONS) - 2
    phi = Attention(16, 2, feature_map="taylor").feature_map
    q, k = 3 * randn(2, 1, 2, 9, 8)
    product = phi(q).materialize() @ phi(k).materialize().mT
    dot = q @ k.mT
    torch.testing.assert_close(product, 1 + dot + dot**2 / 2)
    assert (product > 0).all() and (phi(q).materialize() < 0).any()


def test_a_spectrum_is_one_class_and_one_line(monkeypatch):
    monkeypatch.setitem(SPECTRA, "rational_quadratic", RationalQuadratic)
    monkeypatch.setitem(VARIANTS, "rational_quadratic", {})
    assert failures("rational_quadratic") == set()
    assert uncovered() == {
        (position, "rational_quadratic", mixing)
        for position in ("spectral", "multiplicative")
        for mixing in ("linear", "quadratic", "softmax")
    }
    monkeypatch.setattr(contract, "CASES", contract.cases())
    assert not uncovered()
    assert passes_the_contract(lambda c: "rational_quadratic" in c.case) == 12
    position = make_position("spectral", 2, 8, spectrum="rational_quadratic", length_range=(2, 3))
    assert type(position.nodes).__name__ == "DensityNodes"
    options = {"position": "multiplicative", "mixing": "auto"}
    stack = Stack(16, 2, 2, position_options={"spectrum": "rational_quadratic"}, **options)
    stack(torch.randn(1, 9, 16), torch.randn(1, 9, 3)).square().sum().backward()
    assert all(p.grad.abs().max() > 0 for p in stack.position.parameters())


def test_every_entry_names_its_source():
    for dictionary in (FEATURE_MAPS, SPECTRA, NODES, POSITIONS):
        for name, build in dictionary.items():
            entry = build if inspect.isclass(build) else build.__self__
            assert entry.paper, name
