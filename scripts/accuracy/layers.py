"""A softmax stack converted to kernelized attention, by depth (arXiv:2006.03555, figure 7).

`gain` multiplies the weights of queries and keys, to imitate the sharper attention of trained
models.
"""

import itertools
from pathlib import Path

import torch
from kit.pictures import UNIFORM, error_panels
from kit.rows import Points, Rows, choose, markdown, names, pick
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm

from molflt.attention import FEATURE_MAPS, Attention, Block

QUICK = {
    **{"dim": 32, "heads": 2, "tokens": 64, "depth": 3, "samples": 3},
    "features": (16, 256),
}


def run(stack: list[Block], x: Tensor) -> list[Tensor]:
    """Output of each layer after a LayerNorm, as at the end of a pre-norm stack."""
    outputs = itertools.accumulate(stack, lambda x, block: block(x), initial=x)
    return [F.layer_norm(output, x.shape[-1:]) for output in outputs][1:]


def record(points: Points, exact: list[Tensor], found: list[Tensor], **labels: object) -> None:
    """Adds the error after each layer; outputs have unit variance, so it is a relative one."""
    for depth, (a, b) in enumerate(zip(exact, found, strict=True), start=1):
        points.add(float((a - b).square().mean().sqrt()), **labels, layers=depth)


@torch.no_grad()
def measure(
    features: tuple[int, ...] = (16, 64, 256, 1024),
    maps: tuple[str, ...] = ("positive", "trigonometric"),
    gains: tuple[float, ...] = (1.0, 2.0),
    samples: int = 10,
    tokens: int = 1024,
    depth: int = 8,
    dim: int = 64,
    heads: int = 4,
) -> Rows:
    """Errors of all maps, numbers of features and gains."""
    choose(maps, FEATURE_MAPS, "map")
    points, generator = Points(), torch.Generator().manual_seed(0)

    def block(**options: object) -> Block:
        return Block(Attention(dim, heads, **options), 4 * dim)

    for gain, _ in tqdm(list(itertools.product(gains, range(samples))), leave=False):
        x = torch.randn(1, tokens, dim, generator=generator)
        torch.manual_seed(int(torch.randint(2**31, (), generator=generator)))
        stack = [block(mixing="softmax") for _ in range(depth)]
        for layer in (each.attention for each in stack):
            layer.to_query.weight.mul_(gain)
            layer.to_key.weight.mul_(gain)
        exact = run(stack, x)
        for name, m in itertools.product(maps, features):
            rows = m // 2 if name == "trigonometric" else m
            converted = [block(feature_map=name, num_features=rows) for _ in stack]
            for old, new in zip(stack, converted, strict=True):
                new.load_state_dict(old.state_dict(), strict=False)  # projections stay as drawn
            record(points, exact, run(converted, x), feature_map=name, gain=gain, m=m)
        for layer in (each.attention for each in stack):  # without queries all keys weigh the same
            layer.to_query.weight.zero_()
            layer.to_query.bias.zero_()
        for name in maps:
            record(points, exact, run(stack, x), feature_map=name, gain=gain, m=UNIFORM)
    return points.rows()


def table(rows: Rows) -> str:
    """Markdown: the first and the last layer, by map, number of features and gain."""
    gains, deepest = names(rows, "gain"), max(names(rows, "layers"))
    ends = list(itertools.product(gains, (1, deepest)))
    head = ["map", "m", *(f"gain {gain:g}: layer {depth}" for gain, depth in ends)]
    lines = []
    for name, m in itertools.product(names(rows, "feature_map"), names(rows, "m")):
        found = [pick(rows, feature_map=name, m=m, gain=g, layers=d)[0] for g, d in ends]
        lines.append([name, m, *(f"{row['mean']:.3f} ± {row['sd']:.3f}" for row in found)])
    return markdown(head, lines)


def draw(png: Path, rows: Rows) -> None:
    """Error against depth."""
    labels = ("layers", "relative error of outputs")
    error_panels(
        *(png, rows, ("feature_map", "gain"), "m", "layers", labels, (1, 4), (9, 2.8)), log_x=False
    )
