"""A learned optimizer in place of one of torch's: groups, resume, closures, refusals."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from test_coordinate import MEMORIES
from torch import Tensor, nn

from molflt.optimizers import CoordinateOptimizer, LearnedOptimizer


def learned(name: str = "flt") -> CoordinateOptimizer:
    torch.manual_seed(0)
    model = CoordinateOptimizer(**MEMORIES[name])
    nn.init.normal_(model.head.weight, std=0.1)
    return model


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


@pytest.mark.parametrize("name", MEMORIES)
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
    for one, other in zip(weights(whole), weights(part), strict=True):
        assert torch.equal(one, other)


def test_copies_go_on_bit_for_bit() -> None:
    model = net()
    optimizer = LearnedOptimizer(model.parameters(), learned(), chunk=5)
    train(model, optimizer, range(3))
    one, own = copy.deepcopy((model, optimizer))
    assert own.chunk == 5
    train(model, optimizer, range(3, 5))
    train(one, own, range(3, 5))
    for a, b in zip(weights(one), weights(model), strict=True):
        assert torch.equal(a, b)


def test_chunks_do_not_change_steps() -> None:
    nets = [net().double() for _ in range(2)]
    for own, chunk in zip(nets, (5, 100), strict=True):
        optimizer = LearnedOptimizer(own.parameters(), learned(), chunk=chunk)
        for _ in range(3):
            own.zero_grad()
            own(torch.ones(1, 3, dtype=torch.double)).square().sum().backward()
            optimizer.step()
    for one, other in zip(weights(nets[0]), weights(nets[1]), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
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


def refusal(parameters: Any, **options: Any) -> str:
    with pytest.raises(ValueError) as error:
        LearnedOptimizer(parameters, learned("lstm"), **options).step()
    return str(error.value)


def test_refusals_change_nothing() -> None:
    good, bad = (nn.Parameter(torch.ones(3)) for _ in range(2))
    good.grad, bad.grad = torch.ones(3), torch.tensor([0.0, float("nan"), 1.0])
    assert "gradient of parameter 1 of group 0, shape (3,)" in refusal([good, bad])
    assert torch.equal(good, torch.ones(3))
    assert "gradient of layer.weight, shape (3,)" in refusal([("layer.weight", bad)])
    assert "lr of group 0 must be at least 0 and finite; got -1" in refusal([good], lr=-1.0)
    assert "chunk must be at least 1; got 0" in refusal([good], chunk=0)
    half = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    assert "torch.bfloat16; expected float32 or float64" in refusal([half])
