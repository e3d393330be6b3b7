import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from molflt.data.optimizers import generator_of
from molflt.optimizers import LearnedOptimizer
from molflt.optimizers.coordinate import CoordinateOptimizer, OptimizerState
from molflt.optimizers.problems import Problem, draw_problem
from molflt.optimizers.unroll import Unrolled, unroll
from molflt.tasks.optimizers import OptimizerTask

MASK = {"spectrum": "gaussian_mixture", "num_gaussians": 3}
SMALL = {"dim": 8, "layers": 2}
ATTENTION = {**SMALL, "ffn_dim": 8, "num_features": 4}
MEMORIES: dict[str, dict[str, Any]] = {
    "flt": {**ATTENTION, "position": "spectral", "position_options": {**MASK, "num_nodes": 4}},
    "performer": ATTENTION,
    "softmax": {**SMALL, "mixing": "softmax", "position": "spectral", "position_options": MASK},
    "window": {**SMALL, "mixing": "softmax", "window": 3},
    "lstm": {**SMALL, "memory": "lstm"},
    "state_space": {**SMALL, "memory": "state_space", "states": 3},
}
STEPS, COORDINATES = 9, 6
every_memory = pytest.mark.parametrize("name", MEMORIES)


def learned(name: str = "flt", std: float = 0.1) -> CoordinateOptimizer:
    torch.manual_seed(0)
    model = CoordinateOptimizer(**MEMORIES[name])
    nn.init.normal_(model.head.weight, std=std)
    return model


def model_of(name: str) -> CoordinateOptimizer:
    """Returns a float64 model with large updates."""
    return learned(name, std=1.0).double()


def gradients(seed: int = 1) -> Tensor:
    drawn = torch.randn(STEPS, COORDINATES, generator=generator_of(seed)).double()
    drawn[2, 1], drawn[:, 0] = 1e-9, 0.0  # a tiny gradient, and a gradient of 0
    return drawn * 10.0 ** torch.arange(-2, 4)


def by_steps(model: CoordinateOptimizer, shown: Tensor) -> tuple[Tensor, OptimizerState]:
    state: OptimizerState | None = None
    found = []
    for gradient in shown:
        update, state = model.step(gradient, state)
        found.append(update)
    assert state is not None
    return torch.stack(found, dim=1), state


def all_at_once(model: CoordinateOptimizer, shown: Tensor) -> Tensor:
    moments, features, directions = None, [], []
    for step, gradient in enumerate(shown):
        seen = model.observe(gradient, moments, step)
        moments = seen.moments
        features.append(seen.features)
        directions.append(seen.direction)
    updates: Tensor = model(torch.stack(features, 1), torch.stack(directions, 1), (), 0)
    return updates


@every_memory
def test_steps_are_the_causal_pass_with_gradients(name: str) -> None:
    model, shown = model_of(name), gradients()
    stepped, state = by_steps(model, shown)
    assert name != "window" or state.memory[0].shape[2] == 3  # earlier steps are dropped
    whole = all_at_once(model, shown)
    torch.testing.assert_close(stepped, whole, rtol=0, atol=1e-10)
    weight = torch.randn(whole.shape, generator=generator_of(3)).double()
    learned = [p for p in model.parameters() if p.requires_grad]
    one, other = (torch.autograd.grad((x * weight).sum(), learned) for x in (stepped, whole))
    assert all(part.abs().max() > 0 for part in one)  # every parameter is used
    torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


@every_memory
def test_coordinates_are_independent(name: str) -> None:
    model, shown = model_of(name), gradients()
    whole = by_steps(model, shown)[0]
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    permuted = by_steps(model, shown[:, order])[0]
    torch.testing.assert_close(permuted, whole[order], rtol=0, atol=1e-12)
    alone = [by_steps(model, part)[0] for part in shown.split([1, 3, 2], dim=1)]
    torch.testing.assert_close(torch.cat(alone), whole, rtol=0, atol=1e-12)


def test_untrained_optimizer_equals_adam() -> None:
    model = CoordinateOptimizer(memory="lstm", lr=0.02).double()
    torch.nn.init.zeros_(model.head.weight)
    x = torch.nn.Parameter(torch.ones(COORDINATES, dtype=torch.double))
    adam, state = torch.optim.Adam([x], lr=0.02), None
    for gradient in gradients():
        before, x.grad = x.detach().clone(), gradient
        adam.step()
        update, state = model.step(gradient, state)
        torch.testing.assert_close(update, x.detach() - before, rtol=1e-9, atol=1e-12)


def backpropagated(model: CoordinateOptimizer, problem: Problem, steps: int, before: int) -> Tensor:
    """Returns the meta-loss by backpropagation through the steps, with constant gradients."""
    theta, state, logs = problem.start, None, []
    first = problem.loss(theta, 0)
    for step in range(before + steps):
        shown = theta.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(problem.loss(shown, step), shown)
        if step == before and state is not None:
            theta = theta.detach()
            state = OptimizerState(step, state.moments, tuple(m.detach() for m in state.memory))
        update, state = model.step(gradient, state)
        theta = theta + update
        if step >= before:
            logs.append(((problem.loss(theta, step + 1) + 1e-3 * first) / first).log())
    return torch.stack(logs).mean()


@every_memory
@pytest.mark.parametrize("before", [0, 3])
def test_unrolls_have_the_gradient_of_backpropagation(name: str, before: int) -> None:
    model = model_of(name)
    like = torch.zeros((), dtype=torch.double)
    problems = [draw_problem(seed, like) for seed in (2, 3)]
    found = unroll(model, problems, 5, before)
    losses = torch.stack([backpropagated(model, problem, 5, before) for problem in problems])
    torch.testing.assert_close(found.mean, losses.detach(), rtol=0, atol=1e-10)
    assert found.loss.item() == pytest.approx(losses.mean().item(), abs=1e-10)
    learned = [p for p in model.parameters() if p.requires_grad]
    one = torch.autograd.grad(found.loss, learned)
    other = torch.autograd.grad(losses.mean(), learned)
    torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("burn_in", [0, 1, 2])
def test_numbers_of_preceding_steps_are_0_to_burn_in(burn_in: int, monkeypatch) -> None:
    task, seen = OptimizerTask(learned(), unroll=1, burn_in=burn_in), []

    def unrolled(model: object, problems: object, steps: int, before: int) -> Unrolled:
        seen.append(before)
        return Unrolled(torch.zeros(()), torch.zeros(1), torch.zeros(1))

    monkeypatch.setattr("molflt.tasks.optimizers.unroll", unrolled)
    torch.manual_seed(0)
    for _ in range(60):
        task.loss(torch.tensor([0]), 0.0)
    assert {*seen} == {*range(burn_in + 1)}


def test_problems_depend_only_on_seed_and_step() -> None:
    like = torch.zeros((), dtype=torch.double)
    noisy = []
    for seed in range(40):
        one, other = draw_problem(seed, like), draw_problem(seed, like)
        torch.testing.assert_close(one.start, other.start, rtol=0, atol=0)
        loss = one.loss(one.start, 5)
        assert loss == other.loss(one.start, 5) >= 0
        noisy.append(bool(loss != one.loss(one.start, 6)))
    assert set(noisy) == {False, True}  # quadratics, and problems in minibatches


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        draw = torch.Generator().manual_seed(step)
        x = torch.randn(8, 3, generator=draw)
        optimizer.zero_grad()
        (model(x) - x[:, :2]).square().mean().backward()
        optimizer.step()


def weights(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


@every_memory
def test_state_dicts_resume_bit_for_bit(name: str) -> None:
    whole, part = net(), net()
    train(whole, LearnedOptimizer(whole.parameters(), learned(name)), range(7))
    first = LearnedOptimizer(part.parameters(), learned(name))
    train(part, first, range(4))
    buffer = io.BytesIO()
    torch.save(first.state_dict(), buffer)
    buffer.seek(0)
    second = LearnedOptimizer(part.parameters(), learned(name))
    second.load_state_dict(torch.load(buffer, weights_only=True))
    train(part, second, range(4, 7))
    torch.testing.assert_close(weights(part), weights(whole), rtol=0, atol=0)


def test_chunks_do_not_change_steps() -> None:
    nets = [net().double() for _ in range(2)]
    for own, chunk in zip(nets, (5, 100), strict=True):
        optimizer = LearnedOptimizer(own.parameters(), learned(), chunk=chunk)
        for _ in range(3):
            own.zero_grad()
            own(torch.ones(1, 3, dtype=torch.double)).square().sum().backward()
            optimizer.step()
    torch.testing.assert_close(*map(weights, nets), rtol=0, atol=1e-12)
    model, x = learned(), nn.Parameter(torch.tensor([1.0, -2.0, 3.0]))
    x.grad = torch.tensor([0.1, 0.2, -0.3])
    expected = x.detach() + model.step(x.grad)[0].detach()
    LearnedOptimizer([x], model).step()
    torch.testing.assert_close(x.detach(), expected, rtol=0, atol=0)


def test_groups_closures_schedules_and_missing_gradients() -> None:
    a, b, c = (nn.Parameter(torch.ones(2)) for _ in range(3))
    optimizer = LearnedOptimizer(
        [{"params": [a]}, {"params": [b], "lr": 0.5}, {"params": [c], "lr": 0.0}], learned("lstm")
    )
    idle = nn.Parameter(torch.ones(2))
    optimizer.add_param_group({"params": [idle]})

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (a.square() + b.square() + c.square()).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) == 6
    torch.testing.assert_close(b.detach() - 1, 0.5 * (a.detach() - 1))
    assert torch.equal(c, torch.ones(2)) and torch.equal(idle, torch.ones(2))
    assert idle not in optimizer.state and optimizer.state[c]["step"] == 1
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 0.0)
    kept = a.detach().clone()
    optimizer.step(closure)
    assert torch.equal(a, kept) and schedule.get_last_lr() == [0.0] * 4


def test_a_refused_step_changes_nothing() -> None:
    good, bad = (nn.Parameter(torch.ones(3)) for _ in range(2))
    good.grad, bad.grad = torch.ones(3), torch.tensor([0.0, float("nan"), 1.0])
    with pytest.raises(ValueError, match=r"gradient of parameter 1 of group 0, shape \(3,\)"):
        LearnedOptimizer([good, bad], learned("lstm")).step()
    assert torch.equal(good, torch.ones(3))
