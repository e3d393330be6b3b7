"""Families of functions: published values, least values, and what they are invariant to."""

from __future__ import annotations

import math

import cma
import pytest
import torch

from molflt.data.problems import generator_of
from molflt.optimizers.functions import FAMILIES, UNSEEN, Functions, haar_rotation

D = 4
PUBLISHED = {  # another package's, at z
    "sphere": cma.ff.sphere,
    "ellipsoid": cma.ff.elli,
    "rosenbrock": cma.ff.rosen,
    "rastrigin": cma.ff.rastrigin,
    "griewank": lambda z: cma.ff.griewank(z / 120),
}


def drawn(family: str, count: int = 3) -> Functions:
    return Functions.draw(family, D, [generator_of(seed, 0) for seed in range(count)])


def points(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, D, generator=generator_of(9), dtype=torch.float64)


@pytest.mark.parametrize("family", PUBLISHED)
def test_values_of_another_package(family: str) -> None:
    z = 2 * points(5)
    expected = torch.tensor([float(PUBLISHED[family](x.numpy())) for x in z], dtype=z.dtype)
    torch.testing.assert_close(FAMILIES[family].base(z, {}), expected, rtol=1e-12, atol=1e-12)


def test_values_in_the_literature() -> None:
    ones = torch.ones(1, 2, dtype=torch.float64)
    assert float(FAMILIES["ackley"].base(ones, {})) == pytest.approx(3.6253849384403627, abs=1e-12)
    z = [0.3, -1.7, 2.2, 5.0]
    w = [1 + (one - 1) / 4 for one in z]  # Laguna and Marti's function 18, term by term
    expected = math.sin(math.pi * w[0]) ** 2
    for one in w[:-1]:
        expected += (one - 1) ** 2 * (1 + 10 * math.sin(math.pi * one + 1) ** 2)
    expected += (w[-1] - 1) ** 2 * (1 + math.sin(2 * math.pi * w[-1]) ** 2)
    levy = FAMILIES["levy"].base(torch.tensor([z], dtype=torch.float64), {})
    assert float(levy) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_least_value_is_zero_at_the_minimizer(family: str) -> None:
    functions = drawn(family)
    x = functions.minimizer[:, None].clone().requires_grad_()
    values = functions(x)
    assert float(values.detach().abs().max()) < 1e-12
    (slope,) = torch.autograd.grad(values.sum(), x)
    assert float(slope.abs().max()) < 1e-6
    others = functions.minimizer[:, None] + 3 * points(3, 200)
    assert float(functions(others).min()) > 0
    assert float(functions.minimizer.abs().max()) < 4


@pytest.mark.parametrize("family", FAMILIES)
def test_a_turned_function_of_turned_points(family: str) -> None:
    functions, x = drawn(family), 3 * points(3, 6)
    turn = haar_rotation(D, generator_of(5))
    turned = functions._replace(
        minimizer=functions.minimizer @ turn.mT + 1, rotation=functions.rotation @ turn.mT
    )
    torch.testing.assert_close(turned(x @ turn.mT + 1), functions(x), rtol=1e-10, atol=1e-10)


def test_functions_depend_only_on_their_seed() -> None:
    functions, x = drawn("rastrigin_like"), points(3, 2, 2)
    alone = Functions.draw("rastrigin_like", D, [generator_of(1, 0)])
    assert torch.equal(alone(x[1:2]), functions.only(1)(x[1:2]))
    torch.testing.assert_close(alone(x[1:2])[0], functions(x)[1], rtol=1e-13, atol=0)
    values = functions(x[:1].expand(3, -1, -1, -1))[:, 0, 0]
    assert len(values.unique()) == 3
    assert next(iter(FAMILIES)) not in UNSEEN


def test_rotations_are_haar() -> None:
    """Moments of an entry: 0, 1/d, 3/(d (d + 2)); of the trace 0; half of all are reflections."""
    generator = generator_of(0)
    turns = torch.stack([haar_rotation(D, generator) for _ in range(1500)])
    torch.testing.assert_close(turns @ turns.mT, torch.eye(D).double().expand_as(turns))
    assert float(turns.mean(dim=0).abs().max()) < 0.05
    assert float((turns.square().mean(dim=0) - 1 / D).abs().max()) < 0.03
    assert float((turns.pow(4).mean(dim=0) - 3 / (D * (D + 2))).abs().max()) < 0.03
    assert abs(float(torch.linalg.det(turns).mean())) < 0.1


@pytest.mark.parametrize(("family", "d", "said"), [("none", 3, "'none'"), ("rosenbrock", 1, "2")])
def test_refused(family: str, d: int, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Functions.draw(family, d, [generator_of(0)])
