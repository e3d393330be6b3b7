import pytest
import torch
from contract import EXACT
from families import randn
from torch.utils.checkpoint import checkpoint

from molflt.attention import FEATURE_MAPS, Attention, Block, Encoding
from molflt.attention.encodings import (
    SOFTMAX,
    Bias,
    Factors,
    Kernel,
    MeshNodes,
    RaggedKernel,
    Rotation,
    Terms,
    Toeplitz,
)
from molflt.attention.features.base import Operand
from molflt.attention.mixing.pairs import Pairs
from molflt.attention.nodes.lattice import Lattice
from molflt.attention.positions.multiplicative import MultiplicativePosition

TOKENS, DIM, HEADS = 7, 4, 2


def pairs(exact: bool = False) -> Pairs:
    """Returns three pairs of tokens of the second sequence, one of them twice."""
    places = torch.tensor([[1, 1, 1, 1], [3, 0, 6, 3], [3, 2, 5, 3]])
    f, switch = randn(HEADS, 4, seed=6), randn(4, seed=7).sigmoid()
    return Pairs(*places, randn(HEADS, 4, seed=5), (f, switch) if exact else None)


def rows(seed: int, width: int = 3) -> torch.Tensor:
    return randn(2, HEADS, TOKENS, width, seed=seed)


def on_mesh(near: Pairs | None = None) -> MeshNodes:
    """Returns a kernel on a mesh in two different cells."""
    torch.manual_seed(0)
    position = MultiplicativePosition.build(HEADS, sampled=False).double()
    mask = torch.ones(2, TOKENS, dtype=torch.bool)
    cell = randn(2, 3, 3, seed=8) + 8 * torch.eye(3)
    lattice = Lattice.of(cell, torch.ones(2, 3, dtype=torch.bool), torch.zeros(2, 3))
    return MeshNodes(position.on_mesh(5 * randn(2, TOKENS, 3), mask, lattice, 0.2, 5), near)


BUILDS = {
    "nothing": Encoding,
    "factors": lambda: Factors(rows(1), rows(2)),
    "kernel": lambda: Kernel(rows(1, 2), rows(2, 2)),
    "kernel, pairs": lambda: Kernel(rows(1), rows(2), pairs()),
    "kernel, exact pairs": lambda: Kernel(rows(1), rows(2), pairs(exact=True)),
    "mesh": on_mesh,
    "mesh, pairs": lambda: on_mesh(pairs()),
    "mesh, exact pairs": lambda: on_mesh(pairs(exact=True)),
    "Toeplitz": lambda: Toeplitz(randn(HEADS, 2 * TOKENS - 1, seed=1)),
    "Toeplitz, fft": lambda: Toeplitz(randn(HEADS, 2 * TOKENS - 1, seed=1), "fft"),
    "rotation": lambda: Rotation(lambda q: q.flip(-1), lambda k: k * rows(2, 1)),
}


def kinds(kind: type[Encoding]) -> set[type[Encoding]]:
    return {kind}.union(*(kinds(each) for each in kind.__subclasses__()))


def test_every_kind_is_here():
    elsewhere = {Bias, RaggedKernel}  # RaggedKernel is tested in test_ragged.py
    built = {type(build()) for build in BUILDS.values()} | elsewhere
    public = {kind for kind in kinds(Encoding) if not kind.__name__.startswith("_")}
    assert public == built, "add the new kind to BUILDS"


@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
@pytest.mark.parametrize("feature_map", ["identity", "positive", "relu"])
@pytest.mark.parametrize("build", BUILDS)
def test_fast_form_matrix_and_definition_agree(build, feature_map, causal, monkeypatch):
    encoding = BUILDS[build]()
    query, key, value = rows(10, DIM), rows(11, DIM), rows(12, 5)
    left, right = encoding.columns
    width = DIM + (0 if left is None else left.shape[-1])
    phi = FEATURE_MAPS[feature_map](width, HEADS, width).double()
    if feature_map == "identity":  # products of the queries and keys themselves
        phi.projection.rows.copy_(torch.eye(width))
    turned = encoding.transform(query, key)
    operands = [Operand(phi, x, c) for x, c in zip(turned, (left, right), strict=True)]
    weight = randn(2, 1, TOKENS, seed=13)
    operands[1] = operands[1]._replace(log_weight=weight)
    phi_q, phi_k = (operand.features() for operand in operands)
    matrix = phi_q.materialize() @ phi_k.materialize().mT
    if isinstance(encoding, Factors):
        if feature_map == "identity":
            logits = query @ key.mT + left @ right.mT
            torch.testing.assert_close(matrix, logits * weight.exp()[:, None], **EXACT)
    elif (dense := encoding.dense(TOKENS, TOKENS)) is not None:
        matrix = matrix * dense
    near = getattr(encoding, "pairs", None)
    if near is not None and near.exact is not None:
        f, switch = near.exact
        for p, (b, i, j) in enumerate(zip(near.batch, near.query, near.key, strict=True)):
            dot = (query[b, :, i] * key[b, :, j]).sum(-1)
            matrix[b, :, i, j] += switch[p] * (dot + f[:, p] + weight[b, 0, j]).exp()
    if causal:
        matrix = matrix.tril()
        if near is not None or isinstance(encoding, MeshNodes):
            with pytest.raises(ValueError):
                encoding.attend(*operands, value, causal=True)
            return
    expected = matrix @ value, matrix.sum(-1, keepdim=True)
    found = [encoding.attend(*operands, value, form=f, causal=causal)[0] for f in FORMS]
    if near is not None:  # as on devices without sparse products
        monkeypatch.setattr("molflt.attention.mixing.pairs.has_sparse_products", lambda _: False)
        found.append(BUILDS[build]().attend(*operands, value)[0])
    if near is None or near.exact is None:
        found.append(encoding.mix(Terms(phi_q, phi_k, value, causal))[0])
        found.append(encoding.by_matrix(Terms(phi_q, phi_k, value, causal)))
    for sums in found:
        scale = sums.log_scale.exp()
        torch.testing.assert_close(sums.numerator * scale, expected[0], **EXACT)
        torch.testing.assert_close(sums.normalizer * scale, expected[1], **EXACT)


FORMS = ("linear", "quadratic", "auto")


def test_a_bias_is_added_to_the_logits():
    attention = Attention(8, HEADS, mixing="softmax").double()
    x, encoding = randn(2, TOKENS, 8), Bias(randn(2, HEADS, TOKENS, TOKENS, seed=1))
    query, key, *_ = attention._split(x)
    weights = (query @ key.mT + encoding.bias).softmax(dim=-1)
    torch.testing.assert_close(attention.weights(x, encoding=encoding), weights, **EXACT)
    assert encoding.supports == (SOFTMAX,)


@pytest.mark.parametrize("form", ["linear", "quadratic"])
@pytest.mark.parametrize("near", [False, True], ids=["kernel", "pairs"])
def test_tensors_that_layers_share_have_their_gradient(form, near):
    """Includes passes after an evaluation without gradients, and checkpointed blocks."""
    blocks = [Block(Attention(2 * HEADS, HEADS, mixing=form), 8).double() for _ in range(2)]
    weights = [x.requires_grad_() for x in (rows(1), rows(2), randn(HEADS, 4, seed=5))]
    x = randn(2, TOKENS, 2 * HEADS)

    def gradients(*checkpointed: int, before: bool = False):
        left, right, weight = (2 * each for each in weights)
        own = pairs()._replace(weight=weight) if near else None
        encoding, out = Kernel(left, right, own), x
        if before:
            with torch.no_grad():
                blocks[0](x, encoding=encoding)
        for i, block in enumerate(blocks):
            if i in checkpointed:
                out = checkpoint(block, out, None, encoding=encoding, use_reentrant=False)
            else:
                out = block(out, encoding=encoding)
        return torch.autograd.grad(out.square().sum(), weights[: 2 + near])

    expected = gradients()
    for found in (gradients(before=True), gradients(0, 1), gradients(0), gradients(1)):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-10)
