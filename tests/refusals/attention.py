import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from molflt.attention import (
    TOKEN_MIXERS,
    Attention,
    Block,
    Decoder,
    FeatureMap,
    Features,
    Stack,
    convert_weights_,
    make_position,
    suggest_nodes,
)
from molflt.attention.encodings import Bias
from molflt.attention.mixing.toeplitz import toeplitz
from molflt.attention.nodes import GaussianNodes, ShellNodes
from molflt.attention.nodes.lattice import Lattice
from molflt.attention.nodes.mesh import Mesh
from molflt.attention.nodes.reciprocal import reciprocal_nodes
from molflt.attention.positions.gaussian_bias import GaussianBias
from molflt.attention.positions.grid import BucketedPosition, LowRankPosition, ToeplitzPosition
from molflt.attention.positions.rotary import RotaryPosition
from molflt.attention.positions.spectral import SpectralPosition
from molflt.attention.positions.stochastic import ConvSPE
from molflt.attention.spectra import GaussianBasis, InversePower, Matern, ShellWeights, SmoothLocal
from refusals import Refusal, refused

DIM, HEADS = 16, 2


def layer(position: Any = None, **options: Any) -> Attention:
    return Attention(DIM, HEADS, position=position, **options)


def stack(**options: Any) -> Stack:
    return Stack(DIM, HEADS, 1, **options)


def position(name: str = "spectral", **options: Any) -> Any:
    small = {"low_rank": {"max_tokens": 9, "rank": 3}, "toeplitz": {"max_tokens": 9}}
    return make_position(name, HEADS, DIM // HEADS, **small.get(name, {}), **options)


def decoded_again(before: str, after: str, batch: int = 1, normalize: str = "masked") -> Tensor:
    """Continues one sequence of mixing `after` with the state of a `batch` of mixing `before`."""
    first = layer(P, mixing=before, causal=True, normalize=normalize)
    state = first.decode(X.repeat(batch, 1, 1), R)[1]
    return layer(mixing=after, causal=True).decode(X, state=state)[0]


def stepped(x: Tensor) -> Tensor:
    """Decodes x, with two remembered sequences."""
    decoder = Decoder(DIM, HEADS, 1)
    return decoder.step(x, decoder.remember(torch.ones(2, 5, DIM)))[0]


def line(tokens: int = 5) -> Tensor:
    return torch.arange(float(tokens))[None, :, None]


X, R = torch.ones(1, 5, DIM), line().expand(1, 5, 3)
ODD = torch.tensor([[[0.0], [1.5], [2.0]]])
BEYOND = torch.tensor([[[0.0], [-1.0], [2.0]]])
MASK = torch.ones(1, 5, dtype=torch.bool)
CELL, PERIODIC = 7 * torch.eye(3).repeat(2, 1, 1), torch.tensor([[1, 1, 1], [1, 1, 0]]).bool()
HUGE = Lattice.of(1e4 * CELL, PERIODIC | True, torch.zeros(2, 3))
KERNEL = torch.zeros(HEADS, 8)
P = position()
MADE, TURNS = P("linear", R, R), RotaryPosition(8)("", line(4), line(4))
UNIT = {"normalize_qk": True}
BIAS = Bias(torch.zeros(1, HEADS, 5, 5))
PHI = Features(torch.ones(1, HEADS, 4, 2))
FLAT = torch.stack((CELL[0], torch.tensor([[7.0, 0, 0], [14.0, 1e-9, 0], [0, 0, 8.0]])))


def softmax(position: Any = None) -> Attention:
    return layer(position, mixing="softmax")


def toeplitz_layer(**options: Any) -> Attention:
    return layer(position("toeplitz"), causal=True, **options)


def cells(*words: str, **change: Any) -> Refusal:
    arguments = {"cell": CELL, "pbc": PERIODIC, "extent": torch.zeros(2, 3), "max_frequency": 0.3}
    return refused(lambda: reciprocal_nodes(**{**arguments, **change}), *words)


def shells(option: str, expected: str, got: str, *sizes: Any, **options: Any) -> Refusal:
    return refused(lambda: ShellNodes(*sizes, **options), option, expected, got)


def polynomial(option: str, expected: str, got: str = "", **options: Any) -> Refusal:
    given = {"dim": 32, "heads": 2, "feature_map": "polynomial", **options}
    return refused(lambda: Attention(**given), option, expected, got)


def stack_of(shared: Any, *mixers: Any) -> Stack:
    return Stack.of([Block(mixer, 24) for mixer in mixers], shared)


def weighted_shells(**options: Any) -> ShellNodes:
    return ShellNodes(5.0, 0.3, normalized=True, **options)


def shell_weights() -> ShellWeights:
    return ShellWeights(2, weighted_shells().shell_radius)


def converted(source: dict[str, Any], target: dict[str, Any]) -> Callable[[], object]:
    return lambda: convert_weights_(
        Attention(**{"dim": 32, "heads": 2, **source}),
        Attention(**{"dim": 32, "heads": 2, **target}),
    )


ROWS = [
    # options of a layer
    refused(lambda: layer(mixing="fast"), "mixing", "quadratic", "'fast'"),
    refused(lambda: Attention(DIM, 3), "dim=16", "multiple", "heads=3"),
    refused(lambda: layer(num_features=0), "num_features", "at least 1", "0"),
    refused(lambda: layer(dropout=2.0), "dropout", "[0, 1)", "2.0"),
    refused(lambda: layer(floor=-1.0), "floor", "at least 0", "-1.0"),
    refused(lambda: layer("spectral"), "position", "make_position", "'spectral'", TypeError),
    refused(lambda: toeplitz_layer(gate=True), "gate", "state", "Toep"),
    refused(lambda: layer(mixing="triton"), "mixing='triton'", "multiplicative", "NoneType"),
    refused(lambda: layer(position(), mixing="triton"), "mixing='triton'", "linear", "Spectral"),
    refused(lambda: layer(gate=True), "gate=True", "causal=True"),
    refused(lambda: layer(position("gaussian_bias")), "mixing", "softmax", "'linear'"),
    refused(lambda: FeatureMap(4, 1).project(X), "random=True", "got False", "FeatureMap"),
    # options without effect
    refused(lambda: layer(feature_map="elu", num_features=8), "num_features=8", "no effect", "Elu"),
    refused(lambda: layer(normalize="none", floor=0.1), "floor=0.1", "no effect", "'none'"),
    refused(lambda: layer(normalize="unmasked"), "normalize", "no effect"),
    # inputs of a layer
    refused(lambda: layer()(X, encoding=BIAS), "Bias", "softmax", "'linear'"),
    refused(lambda: softmax().sums(X), "softmax", "weights()"),
    refused(lambda: layer(position())(X, R, encoding=MADE), "positions", "one"),
    refused(lambda: softmax()(X[:, :4], encoding=BIAS), "encoding", "4 queries", "(5, 5)"),
    refused(lambda: softmax()(X, encoding=TURNS), "encoding", "4 positions", "5 tokens"),
    refused(lambda: layer(position())(X, R[..., 0]), "positions", "(batch", "(1, 5)"),
    refused(lambda: layer()(X, key_mask=MASK[:, :3]), "key_mask", "(1, 5)", "(1, 3)"),
    refused(lambda: layer()(X, key_weight=-X[..., 0]), "key_weight", "finite", "-1"),
    refused(lambda: layer()(X, key_weight=X[:, :3, 0]), "key_weight", "(1, 5)", "(1, 3)"),
    refused(lambda: layer()(X, key_index=MASK.long() + 4), "key_index", "0 to 4", "5"),
    refused(
        lambda: layer()(X.repeat(2, 1, 1), key_index=MASK.long()), "key_index", "(2,", "(1, 5)"
    ),
    refused(lambda: layer(position())(X, R, key_index=MASK.long()), "key_index", "key_positions"),
    refused(lambda: layer()(X, R), "positions", "position="),
    refused(lambda: layer(causal=True)(X, context=X), "context", "causal=False"),
    refused(lambda: layer(position())(X, R, context=X), "context", "key_positions"),
    *(
        refused(lambda p=p: layer(p)(X, R, context=X, key_positions=R[:, :1]), "1 positions", "5")
        for p in (position(), position("multiplicative"))
    ),
    refused(lambda: layer(position())(X), "SpectralPosition", "(batch, tokens, 3)"),
    refused(lambda: toeplitz_layer().decode(X, line()), "Toeplitz", "spectral"),
    *(
        refused(lambda m=m: decoded_again(m, m, 2), "state", "1 sequences", "2")
        for m in ("linear", "softmax")
    ),
    refused(lambda: decoded_again("linear", "softmax"), "state", "another layer"),
    refused(lambda: decoded_again("linear", "linear", normalize="unmasked"), "another layer"),
    refused(lambda: layer()(X.tolist()), "x", "torch.as_tensor", "list", error=TypeError),
    refused(lambda: layer()(X, attn_mask=MASK), "Attention.forward", "", "attn_m", error=TypeError),
    refused(lambda: layer()(X.double()), "x", "torch.float32", "torch.float64"),
    refused(lambda: stack()(X.half()), "x", "torch.float32", "torch.float16"),
    refused(lambda: stack()(X[0]), "x", "(batch, tokens, 16)", "(5, 16)"),
    refused(lambda: stack(position=P)(X, R[:, :4]), "positions", "(1, 5)", "(1, 4)"),
    refused(lambda: Attention(-4, 2), "dim=-4", "above 0"),
    # stacks
    refused(lambda: stack(num_feature=3), "'num_feature'", "num_features", error=TypeError),
    refused(lambda: Decoder(16, 2, 1)(X.double(), X), "x", "torch.float32", "torch.float64"),
    refused(lambda: stack(mixer="fourier", causal=True), "mixer", "causal=False", "True"),
    refused(lambda: stepped(torch.ones(3, 1, DIM)), "x", "multiple of 2", "3"),
    refused(lambda: Stack.of([]), "block", "at least one"),
    refused(lambda: stack_of(None, layer(position())), "block 0", "", "SpectralPosition"),
    refused(lambda: stack_of(position(), TOKEN_MIXERS["fourier"](DIM)), "Spectral", "attention"),
    refused(lambda: stack(mixer="dense"), "mixer_options.max_tokens", "missing", "LinearMixer"),
    refused(lambda: stack(mixer="fourier", attention_layers=1), "attention_layers", "0 to 0", "1"),
    refused(lambda: stack_of(P, layer(P), softmax(P))(X, R), "Factors", "'softmax'"),
    # feature maps
    polynomial("degree", "2 or 3", "4", degree=4),
    polynomial("num_features=153", "18 to 152", num_features=153),
    polynomial("degree 3", "16384", "47905", degree=3, heads=1, dim=64),
    # conversion of weights
    refused(lambda: convert_weights_(torch.nn.Linear(3, 3), layer()), "Linear and Attention"),
    refused(converted({"heads": 4}, {}), "scaling", "2 in the target", "heads=4"),
    refused(converted({}, UNIT), "scaling", "normalize_qk=False", "True in the target"),
    refused(converted({**UNIT, "learn_temperature": True}, UNIT), "learn_temperature=True"),
    # token mixers
    refused(lambda: TOKEN_MIXERS["dense"](DIM, 4)(X), "max_tokens=4", "at most", "5"),
    refused(lambda: TOKEN_MIXERS["fourier"](DIM)(X[0]), "x", "(batch, tokens, 16)", "(5, 16)"),
    # positions by name
    refused(lambda: position(width=1.0), "width", "num_gaussians"),
    refused(lambda: position(nodes="shells"), "node_diameter", "ShellNodes"),
    refused(lambda: position(sampled=False).factors(R, R), "GraphNodes"),
    refused(lambda: position(spectrum="shell_weights", nodes="sobol"), "nodes='shells'", "sobol"),
    refused(lambda: position("toeplitz", radius=3), "radius", "max_tokens", "Toeplitz"),
    refused(lambda: position(sampled=False, num_nodes=8), "num_nodes", "no effect", "softmax"),
    # positions on a grid
    refused(lambda: ToeplitzPosition(2, 4)("linear", line(), line()), "5 tokens", "4 places"),
    refused(lambda: ToeplitzPosition(2, 4)("softmax", line(), line()), "differ", "at most 3", "4"),
    *(
        refused(lambda p=p, r=r: p("linear", r, r), "grid")
        for p in (ToeplitzPosition(2, 9), ToeplitzPosition(2, shape=(3, 3)), BucketedPosition(2))
        for r in (
            (x if p.dim == 1 else torch.cat((x // 3, x % 3), dim=2))
            for x in (line().flip(1), 2 * line(), line().log(), torch.cat((line(), line().flip(1))))
        )
    ),
    refused(lambda: ToeplitzPosition(2, 9)("linear", line(), line() + 1), "first key"),
    refused(lambda: ToeplitzPosition(2, shape=(0, 3)), "shape", "at least 1", "0"),
    refused(lambda: BucketedPosition(2, num_buckets=31), "num_buckets=31", "equally many"),
    refused(lambda: RotaryPosition(5, 3), "head_dim", "at least 6", "5"),
    *(
        refused(lambda p=p, m=m: Attention(16, 4, mixing=m, position=p), f"{size}={n}", "same", "4")
        for p, m, size, n in (
            (RotaryPosition(8), "linear", "head_dim", 8),
            (make_position("sine_spe", 4, 8), "softmax", "head_dim", 8),
            (make_position("spectral", 2, 4), "linear", "heads", 2),
            (ToeplitzPosition(2, 9), "softmax", "heads", 2),
            (BucketedPosition(2), "linear", "heads", 2),
            (make_position("gaussian_bias", 2, 4), "softmax", "heads", 2),
        )
    ),
    refused(lambda: toeplitz(PHI, PHI, PHI.materialize(), KERNEL), "(heads, 7)", "(2, 8)"),
    refused(lambda: LowRankPosition(2, max_tokens=8, rank=9), "rank=9", "max_tokens=8"),
    refused(lambda: position("low_rank")("linear", BEYOND, BEYOND), "positions", "[0, 9)", "-1"),
    refused(lambda: ConvSPE(2, 3, max_tokens=8)("linear", ODD, ODD), "integers", "fractions"),
    # spectra and nodes
    shells("degree", "at most 131", "133", 100.0, 1.0),
    shells("dim", "1, 2 or 3", "4", 5.0, 0.3, dim=4),
    shells("radial", "'gauss' in two", "'midpoint'", 5.0, 0.3, dim=2, radial="midpoint"),
    shells("degrees", "3, one per shell", "2", 5.0, 0.3, 3, degrees=[3, 5]),
    refused(lambda: GaussianNodes(2, sigma="a"), "sigma", "number", "'a'", TypeError),
    refused(lambda: GaussianBasis(2, width_range=(5.0, 1.0)), "width_range", "smallest", "(5.0"),
    refused(lambda: GaussianBasis(2, width_range=(1.0, math.inf)), "width_range", "finite", "inf"),
    refused(lambda: GaussianBasis(2, width_range=(1.0,)), "width_range", "two", "(1.0,)"),
    refused(lambda: GaussianBasis(2, positive=True, amplitude=0.0), "amplitude", "positive", "0.0"),
    refused(lambda: InversePower(3, 1.0), "power", "1, 2, 4, 6", "3"),
    refused(lambda: Matern(2, nu=2.0), "nu", "0.5, 1.5 or 2.5", "2.0"),
    refused(lambda: SmoothLocal(2, order=1), "order", "2 to 8", "1"),
    refused(lambda: ShellWeights(2, torch.ones(3), dim=2), "dim", "1 or 3", "2"),
    refused(lambda: position(nodes="density"), "density", "kernel", "GaussianBasis"),
    *(
        refused(lambda g=g, nodes=nodes: SpectralPosition(g(), nodes()), *words)
        for g, nodes, *words in (
            (shell_weights, lambda: GaussianNodes(2), "ShellWeights", "GaussianNodes"),
            (lambda: GaussianBasis(2), weighted_shells, "ShellWeights", "GaussianBasis"),
            (lambda: ShellWeights(2, torch.ones(3)), weighted_shells, "radii", "1."),
        )
    ),
    refused(lambda: suggest_nodes(2.5, 1.0, widest=0.5), "widest", "width=1", "0.5"),
    refused(lambda: suggest_nodes(2.5, 1.0, 1e-7), "tol", "1e-6", "1e-07"),
    refused(lambda: suggest_nodes(10.0, 1.0, 3e-2), "tol", "0.035", "0.03"),
    refused(lambda: Mesh.of(HUGE, 0, 0.3, 5), "max_frequency=0.3", "reduce", "sides"),
    # cells
    refused(lambda: Decoder(16, 2, 2, refinements=2), "refinements", "remove", "2"),
    refused(lambda: Decoder(16, 2, 2, causal=True), "causal", "remove", "True"),
    refused(lambda: Decoder(16, 2, 2, mixer="fourier"), "mixer", "all tokens", "'fourier'"),
    *(
        refused(lambda f=f: f(X, context_mask=MASK[:, :3]), "context_mask", "(1, 5)", "(1, 3)")
        for f in (partial(Decoder(DIM, HEADS, 1), X), Decoder(DIM, HEADS, 1).remember)
    ),
    refused(lambda: GaussianBias(2, 8, std_range=(-1.0, 3.0)), "std_range", "above 0", "-1.0"),
    cells("max_frequency", "reduce", "graph", max_frequency=1e4),
    cells("pbc", "linearly independent", "graph 1", cell=FLAT),
]
