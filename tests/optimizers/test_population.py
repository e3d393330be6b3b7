import math

import cma
import pytest
import torch
from torch import Tensor

from molflt.attention.numerics import haar_rotation
from molflt.attention.spectra import GaussianBasis
from molflt.data.optimizers import generator_of
from molflt.optimizers.functions import FAMILIES, UNSEEN, Functions
from molflt.optimizers.population import (
    Noise,
    PopulationMask,
    PopulationModel,
    PopulationOptimizer,
    PopulationState,
)
from molflt.tasks.optimizers import PopulationTask

D, MEMBERS, BATCH = 3, 6, 2
KINDS = {
    "flt": {"num_nodes": 5, "num_gaussians": 3},
    "linear": {"num_nodes": 5, "mixing": "linear"},
    "performer": {"position": "none"},
    "softmax": {"position": "none", "mixing": "softmax"},
    "softmax-mask": {"mixing": "softmax"},
}


def made(kind: str = "flt", d: int = D) -> PopulationModel:
    torch.manual_seed(0)
    options = {"dim": 16, "heads": 2, "ffn_dim": 16, **KINDS[kind]}
    options |= {} if "softmax" in kind else {"num_features": 8}
    model = PopulationModel(d, **options).double()
    with torch.no_grad():  # like a trained model, with large gains and masks
        model.head.weight.mul_(20)
        if isinstance(model.stack.position, PopulationMask):
            model.stack.position.spectrum.amplitude.mul_(8)
    return model


def noise(generator: torch.Generator) -> Noise:
    shapes = (BATCH, MEMBERS, MEMBERS), (BATCH, MEMBERS, D)
    return Noise(*(torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes))


def normal(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=generator_of(seed), dtype=torch.float64)


def walked(model, turn=None, shift=0.0, scale=1.0, order=None, steps: int = 4) -> Tensor:
    """Returns positions after some generations of a rotated, shifted and reordered population.

    The function is rotated and shifted in the same way, so its values do not change.
    """
    turn = torch.eye(D, dtype=torch.float64) if turn is None else turn
    order = torch.arange(MEMBERS) if order is None else order
    functions = Functions.draw("rastrigin_like", D, [generator_of(s) for s in range(BATCH)])
    position, waves = normal(BATCH, MEMBERS, D), normal(BATCH, model.waves, D, seed=2)
    state = model.start(scale * position[:, order] @ turn.mT + shift, waves @ turn.mT)
    generator = generator_of(3)
    for _ in range(steps):
        pairs, vectors = noise(generator)
        own = Noise(pairs[:, order][:, :, order], vectors[:, order] @ turn.mT)
        state = model(state, functions((state.position - shift) / scale @ turn), own)
    return state.position


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_commutes_with_motions_of_space_and_permutations(kind: str) -> None:
    model = made(kind)
    plain = walked(model)
    assert float((plain - walked(model, steps=3)).abs().max()) > 0.01
    turn, order = haar_rotation(D, generator_of(4)), torch.tensor([3, 0, 5, 1, 4, 2])
    mirror = turn * torch.tensor([1.0, 1.0, -1.0]).double()  # rotations and reflections
    shift = torch.tensor([2.0, -7.0, 0.5], dtype=torch.float64)
    close = {"rtol": 0, "atol": 1e-10}
    torch.testing.assert_close(walked(model, shift=shift), plain + shift, **close)
    torch.testing.assert_close(walked(model, turn), plain @ turn.mT, **close)
    torch.testing.assert_close(walked(model, mirror), plain @ mirror.mT, **close)
    torch.testing.assert_close(walked(model, order=order), plain[:, order], **close)
    torch.testing.assert_close(walked(model, scale=0.01) * 100, plain, **close)


@torch.no_grad()
def test_the_origin_does_not_limit_the_precision_of_converged_populations() -> None:
    """Weights in single precision, whose sums over members are rounded, do not move the mean."""
    model = made().float()
    position, waves = 1e-6 * normal(1, MEMBERS, D), normal(1, model.waves, D, seed=2)
    still = Noise(torch.zeros(1, MEMBERS, MEMBERS).double(), torch.zeros_like(position))
    values = position.square().sum(dim=-1)
    plain, far = (
        model(model.start(position + shift, waves), values, still).position
        for shift in (0.0, 100.0)
    )
    torch.testing.assert_close(far - 100, plain, rtol=0, atol=1e-9)


def test_noise_has_the_covariance_that_attention_sees() -> None:
    """J = dx_i / d(noise) has J J' = c^2 sum_j w_ij (p_j - m_i)(p_j - m_i)'."""
    best = normal(1, MEMBERS, D)
    state = made().start(best, normal(1, 5, D))
    w = normal(1, MEMBERS, MEMBERS, seed=5).softmax(dim=-1)
    out = torch.zeros(1, MEMBERS, 5, dtype=torch.float64)

    def moved(pairs: Tensor) -> Tensor:
        noise = Noise(pairs[None, None].expand(1, MEMBERS, -1), torch.zeros_like(best))
        return PopulationModel._moved(state, w, out, noise)[0]

    zero = torch.zeros(MEMBERS, dtype=torch.float64)
    for i, jacobian in enumerate(torch.autograd.functional.jacobian(moved, zero)):
        mean = w[0, i] @ best[0]
        away = best[0] - mean
        expected = away.T @ (w[0, i, :, None] * away)
        torch.testing.assert_close(jacobian @ jacobian.T, expected, rtol=0, atol=1e-10)
        torch.testing.assert_close(moved(zero)[i], best[0, i] + 0.7 * (mean - best[0, i]))


@pytest.mark.parametrize("count", [4, 8, 12])
@torch.no_grad()
def test_few_nodes_have_the_exact_mask_as_their_mean(count: int) -> None:
    """The number of nodes need not be a multiple of the number of Gaussians."""
    draws, basis = 20_000, GaussianBasis(2, 8, D, (0.2, 2.0), amplitude=0.5)
    mask, x = PopulationMask(basis, count), 0.6 * normal(1, 3, D)
    exact = mask.evaluate("softmax", x, normal(1, 1, D)).bias
    nodes = normal(draws, count, D, seed=6)
    left, right = mask.evaluate("linear", x.expand(draws, -1, -1), nodes).columns
    spread, mean = torch.std_mean(left @ right.mT, dim=0)
    assert float(((mean - exact[0]).abs() * draws**0.5 / spread).max()) < 4


def test_resumes_to_the_bit() -> None:
    model = made()

    def go(optimizer: PopulationOptimizer, steps: int) -> PopulationOptimizer:
        for _ in range(steps):
            with torch.device("meta"):  # a default device other than that of the model
                optimizer.tell(optimizer.ask().square().sum(dim=1).tolist())
        return optimizer

    whole = go(PopulationOptimizer(model, MEMBERS, seed=1, start=[1, 2, 3], scale=0.5), 7)
    first = go(PopulationOptimizer(model, MEMBERS, seed=1, start=[1, 2, 3], scale=0.5), 3)
    kept = first.state_dict()
    go(first, 2)  # does not change the saved state
    second = PopulationOptimizer(model, MEMBERS, seed=9)
    second.load_state_dict(kept)
    go(second, 4)
    for name, part in whole.state_dict().items():
        assert torch.equal(part, second.state_dict()[name]), name
    assert second.best.value == whole.best.value and second.evaluations == 7 * MEMBERS
    assert whole.best.value < 14  # the value at the start


def test_a_generation_has_one_answer() -> None:
    """Refused answers change nothing."""
    optimizer = PopulationOptimizer(made(), MEMBERS)
    members = optimizer.ask()
    with pytest.raises(ValueError, match="member 4 in generation 0.*got nan"):
        optimizer.tell([1.0, 2, 3, 4, math.nan, 6])
    assert torch.equal(optimizer.ask(), members)
    optimizer.tell([3.0, 1, 3, 3, 3, 3])
    assert torch.equal(optimizer.best.position, members[1])


def test_windows_cut_the_gradient_and_nothing_else() -> None:
    seeds = torch.tensor([3, 4])
    found = {}
    for window in (2, 6):
        model = made()
        task = PopulationTask(model, members=MEMBERS, generations=6, window=window)
        loss, sums = task.loss(seeds, 0.0)
        loss.backward()
        found[window] = loss.detach(), sums.best, model.head.bias.grad
    assert torch.equal(found[2][0], found[6][0]) and torch.equal(found[2][1], found[6][1])
    assert float((found[2][2] - found[6][2]).abs().max()) > 1e-4
    assert torch.equal(task.validation_sums(seeds).best, sums.best)


def test_the_gradient_is_that_of_the_values() -> None:
    model = made("performer")
    functions = Functions.draw("levy", D, [generator_of(0), generator_of(1)])
    start = model.start(normal(BATCH, MEMBERS, D), normal(BATCH, 0, D))
    state = PopulationState(*(part.detach() for part in start))
    generator = generator_of(3)
    drawn = noise(generator)

    def best() -> Tensor:
        moved = model(state, functions(state.position), drawn)
        return functions(moved.position).amin(dim=1).sum()

    best().backward()
    with torch.no_grad():
        model.head.bias[-2] += 1e-6
        above = best()
        model.head.bias[-2] -= 2e-6
        slope = (above - best()) / 2e-6
    torch.testing.assert_close(model.head.bias.grad[-2], slope, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("kind", KINDS)
def test_every_parameter_learns(kind: str) -> None:
    model = made(kind)
    task = PopulationTask(model, members=MEMBERS, generations=6)
    task.loss(torch.arange(6), 0.0)[0].backward()
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        assert grad is not None and bool(grad.isfinite().all()) and bool((grad != 0).any()), name


AXES = 4
PUBLISHED = {  # functions of the package cma, at z
    "sphere": cma.ff.sphere,
    "ellipsoid": cma.ff.elli,
    "rosenbrock": cma.ff.rosen,
    "rastrigin": cma.ff.rastrigin,
    "griewank": lambda z: cma.ff.griewank(z / 120),
}


def drawn(family: str, count: int = 3) -> Functions:
    return Functions.draw(family, AXES, [generator_of(seed, 0) for seed in range(count)])


def points(*shape: int) -> Tensor:
    return normal(*shape, AXES, seed=9)


@pytest.mark.parametrize("family", PUBLISHED)
def test_values_of_another_package(family: str) -> None:
    z = 2 * points(5)
    expected = torch.tensor([float(PUBLISHED[family](x.numpy())) for x in z], dtype=z.dtype)
    torch.testing.assert_close(FAMILIES[family].base(z, {}), expected, rtol=1e-12, atol=1e-12)


def test_values_in_the_literature() -> None:
    ones = torch.ones(1, 2, dtype=torch.float64)
    assert float(FAMILIES["ackley"].base(ones, {})) == pytest.approx(3.6253849384403627, abs=1e-12)
    z = [0.3, -1.7, 2.2, 5.0]
    w = [1 + (one - 1) / 4 for one in z]  # function 18 of Laguna and Marti, term by term
    expected = math.sin(math.pi * w[0]) ** 2
    for one in w[:-1]:
        expected += (one - 1) ** 2 * (1 + 10 * math.sin(math.pi * one + 1) ** 2)
    expected += (w[-1] - 1) ** 2 * (1 + math.sin(2 * math.pi * w[-1]) ** 2)
    levy = FAMILIES["levy"].base(torch.tensor([z], dtype=torch.float64), {})
    assert float(levy) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_least_value_is_zero_at_the_minimizer(family: str) -> None:
    functions = drawn(family)
    x = functions.minimizer.clone().requires_grad_()
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
    turn = haar_rotation(AXES, generator_of(5))
    turned = functions._replace(
        minimizer=functions.minimizer @ turn.mT + 1, rotation=functions.rotation @ turn.mT
    )
    torch.testing.assert_close(turned(x @ turn.mT + 1), functions(x), rtol=1e-10, atol=1e-10)


def test_functions_depend_only_on_their_seed() -> None:
    functions, x = drawn("rastrigin_like"), points(3, 2, 2)
    alone = Functions.draw("rastrigin_like", AXES, [generator_of(1, 0)])
    assert torch.equal(alone(x[1:2]), functions.only(1)(x[1:2]))
    torch.testing.assert_close(alone(x[1:2])[0], functions(x)[1], rtol=1e-13, atol=0)
    values = functions(x[:1].expand(3, -1, -1, -1))[:, 0, 0]
    assert len(values.unique()) == 3
    assert next(iter(FAMILIES)) not in UNSEEN
