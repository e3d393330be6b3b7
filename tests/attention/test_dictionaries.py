"""Every entry of a dictionary passes its contract; a new entry is one class and one line."""

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
    PROJECTIONS,
    SPECTRA,
    TOKEN_MIXERS,
    Stack,
    make_position,
)
from molflt.attention.spectra import Gaussian, ShiftInvariant


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


REDRAWN = {
    **{f"map {name}": lambda make=make: make(8, 2) for name, make in FEATURE_MAPS.items()},
    **{f"rows {name}": lambda make=make: make(2, 20, 7) for name, make in PROJECTIONS.items()},
    **{
        f"nodes {name}": lambda rule=rule: rule(**rule.sizes(Gaussian(2), 8))
        for name, rule in NODES.items()
        if rule.random
    },
    "low rank": lambda: make_position("low_rank", 2, 8, max_tokens=9, rank=3),
    "sines": lambda: make_position("sine_spe", 2, 8),
    "convolutions": lambda: make_position("conv_spe", 2, 8, max_tokens=9),
    "mixer": lambda: TOKEN_MIXERS["random"](8, 6),
}


@pytest.mark.parametrize("name", REDRAWN)
def test_redraw_follows_its_generator(name):
    """All buffers, and nothing else, depend on the seed alone."""
    module = REDRAWN[name]()
    buffers = {key for key, _ in module.named_buffers() if key in module.state_dict()}

    def drawn(seed: int) -> dict[str, Tensor]:
        torch.rand(7)
        module.redraw_(torch.Generator().manual_seed(seed))
        return {key: value.clone() for key, value in module.state_dict().items()}

    first, other, again = drawn(5), drawn(6), drawn(5)
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert {key for key in first if not torch.equal(first[key], other[key])} == buffers


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


def test_a_spectrum_is_one_class_and_one_line(monkeypatch):
    monkeypatch.setitem(SPECTRA, "rational_quadratic", RationalQuadratic)
    monkeypatch.setitem(VARIANTS, "rational_quadratic", {})
    for dim in (1, 3):
        contract.check_fourier_pair(make("rational_quadratic", dim=dim))
        contract.check_draws(make("rational_quadratic", dim=dim))
    assert uncovered() == {
        (position, "rational_quadratic", mixing)
        for position in ("spectral", "multiplicative")
        for mixing in ("linear", "quadratic", "softmax")
    }
    monkeypatch.setattr(contract, "CASES", contract.cases())
    assert not uncovered()
    chosen = [c for c in contract.combinations() if "rational_quadratic" in c.case]
    assert len(chosen) == 12
    for combination in chosen:
        for check in contract.suite(combination):
            check(combination)
    position = make_position("spectral", 2, 8, spectrum="rational_quadratic", length_range=(2, 3))
    assert type(position.nodes).__name__ == "DensityNodes"
    options = {"position": "multiplicative", "mixing": "auto"}
    stack = Stack(16, 2, 2, position_options={"spectrum": "rational_quadratic"}, **options)
    stack(torch.randn(1, 9, 16), torch.randn(1, 9, 3)).square().sum().backward()
    assert all(p.grad.abs().max() > 0 for p in stack.position.parameters())
