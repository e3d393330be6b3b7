"""Compares Triton kernels, run in Triton's interpreter, with the linear form of the layer."""

import importlib.util
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_run import python
from torch import Tensor

from molflt.attention import Attention, make_position
from molflt.attention.mixing import ragged
from molflt.graph import EnergyRegressor, GraphAttention

ROOT = Path(__file__).resolve().parents[2]
CONFIGURATIONS = 200 if os.environ.get("MOLFLT_FULL") == "1" else 8
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets small pieces and blocks, which cut even short graphs into several."""
    sizes = {"_BLOCK": 16, "_LEAST_PIECE": 16, "_MOST_PIECES": 2, "_FEATURES": 16}
    for name, size in sizes.items():
        monkeypatch.setattr(ragged, name, size)


def outcome(layer: GraphAttention, graphs: dict[str, Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Returns the output and gradients for atoms, positions and all parameters."""
    layer = layer.to(dtype)
    x, pos, cell = (graphs[name].detach().to(dtype) for name in ("x", "pos", "cell"))
    leaves = [x.requires_grad_(), pos.requires_grad_(), *layer.parameters()]
    where = pos, graphs["batch"], cell, graphs["pbc"], len(cell)
    out = layer(x, *where)
    weight = torch.linspace(-1, 1, out.numel()).view_as(out).to(dtype)
    found = torch.autograd.grad((out * weight).sum(), leaves, allow_unused=True)
    return [out.detach(), *(grad for grad in found if grad is not None)]


def configuration(seed: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Returns options of a layer, and a ragged batch that includes graphs of 0 and 1 atoms."""
    draw = random.Random(seed)
    heads, width = draw.choice((1, 2, 3)), draw.choice((1, 3, 5, 8, 17))
    feature_map = draw.choice(("positive", "relu", "polynomial", "elu", "learnable_exp", "exp"))
    options: dict[str, Any] = {"dim": heads * width, "heads": heads, "feature_map": feature_map}
    if feature_map in ("positive", "relu", "learnable_exp", "exp"):
        options["num_features"] = draw.choice((1, 6, 16, 19))
    lattice = draw.random() < 0.3
    options["periodic"] = "reciprocal" if lattice else "none"
    options["near_field"] = draw.choice((None, None, 2.0))
    if lattice:
        options |= {"max_frequency": 0.12, "position_options": {"background": 1.0}}
    else:
        spectrum = draw.choice(({}, {"spectrum": "gaussian_mixture", "asymmetric": True}))
        nodes = {"num_nodes": draw.choice((1, 3, 4)), "background": draw.choice((4.0, 9.0))}
        options["position_options"] = {**spectrum, **nodes}
        if spectrum:
            options["near_field"] = None
    options["normalize"] = draw.choice(("masked", "masked", "none"))
    sizes = [draw.choice((0, 1, 2, 5, 17, 40)) for _ in range(draw.choice((1, 2, 3)))]
    sizes = sizes if sum(sizes) else [3, *sizes]
    generator = torch.Generator().manual_seed(seed)
    x, pos = (torch.randn(sum(sizes), n, generator=generator) for n in (heads * width, 3))
    cell, pbc = torch.zeros(3, 3), torch.zeros(3, dtype=torch.bool)
    if lattice:
        cell, pbc = 6.0 * torch.eye(3) + 0.3, torch.tensor([True, True, draw.random() < 0.5])
    return options, {
        "x": x,
        "pos": 2.0 * pos,
        "batch": torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes)),
        "cell": cell.expand(len(sizes), 3, 3),
        "pbc": pbc.expand(len(sizes), 3),
    }


RUNS = [(torch.float32, seed) for seed in range(CONFIGURATIONS)]
RUNS += [(torch.float64, seed) for seed in range(CONFIGURATIONS // 4)]


@needs_triton
@pytest.mark.parametrize(("dtype", "seed"), RUNS, ids=lambda each: str(each)[-7:])
def test_outputs_and_gradients_equal_those_of_the_linear_form(dtype, seed: int) -> None:
    options, graphs = configuration(seed)
    layers = []
    for mixing in ("linear", "triton"):
        torch.manual_seed(seed)
        layers.append(GraphAttention(**options, position="multiplicative", mixing=mixing))
    kernels = outcome(layers[1], graphs, dtype)
    linear = outcome(layers[0], graphs, dtype)  # its rounding errors set the bound
    exact = outcome(layers[0], graphs, torch.float64)
    share = 2e-5 if dtype == torch.float32 else 1e-11
    least = 0.1 * max(float(each.abs().max()) for each in exact if each.numel())
    for one, rounded, other in zip(kernels, linear, exact, strict=True):
        if other.numel():  # sums that cancel have the rounding errors of their terms
            bound = share * max(float(other.abs().max()), least)
            bound = max(bound, 4 * float((rounded - other).abs().max()))
            torch.testing.assert_close(one.double(), other, rtol=0.0, atol=bound)


def pair(**options: Any) -> list[Attention]:
    """Returns two identical layers, one in linear form and one with Triton.

    They have a kernel in three dimensions.
    """
    layers = []
    for mixing in ("linear", "triton"):
        torch.manual_seed(0)
        position = make_position("multiplicative", 2, 5, num_nodes=3, background=4.0)
        made = Attention(10, 2, position=position, num_features=8, mixing=mixing, **options)
        layers.append(made.double())
    return layers


@needs_triton
def test_rows_of_a_batch_with_other_keys_weights_and_masks() -> None:
    generator = torch.Generator().manual_seed(0)
    x, r, context, places = (
        torch.randn(2, tokens, n, generator=generator, dtype=torch.float64)
        for tokens, n in ((5, 10), (5, 3), (18, 10), (18, 3))
    )
    mask = torch.arange(18) < torch.tensor([[18], [3]])
    weight = 0.5 + torch.rand(2, 18, generator=generator, dtype=torch.float64)
    keys = {"context": context, "key_positions": places, "key_mask": mask, "key_weight": weight}
    for feature_map in ("positive", "relu"):
        linear, kernels = pair(feature_map=feature_map)
        torch.testing.assert_close(kernels(x, r, **keys), linear(x, r, **keys))
        torch.testing.assert_close(kernels.weights(x, r, **keys), linear.weights(x, r, **keys))


@needs_triton
def test_nodes_in_chunks_and_repeated_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of nodes give the same sums; the same run gives the same bits."""
    options, graphs = configuration(0)
    assert len(graphs["cell"]) == 3
    layer = GraphAttention(**options, position="multiplicative", mixing="triton")
    whole, again = (outcome(layer, graphs, torch.float32) for _ in range(2))
    assert all(map(torch.equal, whole, again))
    monkeypatch.setattr(ragged, "_STATE", 1)
    pieces = outcome(layer, graphs, torch.float32)
    torch.testing.assert_close(pieces, whole, rtol=1e-3, atol=1e-5)


@needs_triton
def test_a_model_has_the_same_energies_and_exports_without_kernels() -> None:
    from molflt.graph.computation import EnergyComputation, EnergyInputs, _example

    batch, energies, models = None, [], []
    for mixing in ("auto", "triton"):
        torch.manual_seed(0)
        models.append(EnergyRegressor(12, 2, layers=2, num_features=8, mixing=mixing).eval())
        batch = _example(models[-1])
        energies.append(models[-1](batch)["energy"])
    torch.testing.assert_close(energies[1], energies[0], rtol=0, atol=1e-5)
    assert energies[1].grad_fn is not None
    plain = EnergyComputation(models[1])(*EnergyInputs.of(models[1], batch))
    torch.testing.assert_close(plain, energies[1], rtol=0, atol=1e-5)


@needs_triton
def test_second_derivatives_are_refused() -> None:
    _, layer = pair()
    x, r = torch.randn(1, 3, 10).double(), torch.randn(1, 3, 3).double().requires_grad_()
    out = layer(x, r).sum()
    with pytest.raises(ValueError, match="first derivatives"):
        torch.autograd.grad(out, r, create_graph=True)


@pytest.mark.parametrize(("found", "word"), [(False, r"molflt\[gpu\]"), (True, "CUDA")])
def test_layers_need_the_package_and_a_gpu(found: bool, word: str, monkeypatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: object() if found else None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=word):
        pair()


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from molflt.attention.mixing import triton_kernels as kernels

real, whole = "*fp32", "*i64"
state = {"phi": real, "w": "*bf16", "pos": real, "xi": real, "counts": whole, "pieces": whole}
tokens = {**state, "state": real, "to_w": real, "to_phi": real, "to_pos": real, "to_xi": real}
sizes = {"BLOCK": 16, "M": 16, "N": 16, "L": 4}
no_w = dict.fromkeys(("w", "to_phi", "to_pos", "to_xi"))
no_turns = dict.fromkeys(("to_w", "to_pos", "to_xi"))
for function, types, constants in (
    (kernels.sum_kernel, {"x": real, "ends": whole, "out": real}, {"BLOCK": 1024}),
    (kernels.state_kernel, {**state, "out": real}, sizes),
    (kernels.token_kernel, tokens, sizes),
    (kernels.token_kernel, tokens, {**no_w, **sizes}),
    (kernels.token_kernel, tokens, {**no_turns, **sizes}),
):
    signature = {
        name: "constexpr" if name in constants else types.get(name, "i32")
        for name in function.arg_names
    }
    source = ASTSource(function, signature, constants)
    assert triton.compile(source, target=GPUTarget("cuda", 80, 32)).asm["cubin"]
"""


@needs_triton
def test_kernels_compile_for_a_gpu(tmp_path: Path) -> None:
    """Compilation needs no GPU and rejects some code that the interpreter accepts."""
    (tmp_path / "main.py").write_text(COMPILE)
    options = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    python(tmp_path / "main.py", cwd=ROOT, **options)
