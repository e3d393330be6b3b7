from typing import Any

import torch
from torch import nn

from molflt.data.optimizers import generator_of
from molflt.optimizers import CoordinateOptimizer, LearnedOptimizer, PopulationOptimizer
from molflt.optimizers.functions import Functions
from molflt.optimizers.population import PopulationModel
from refusals import Refusal, refused

COORDINATE: list[tuple[dict[str, Any], str, str, str]] = [
    ({"memory": "lstm", "heads": 2}, "heads=2", "no effect", "memory='lstm'"),
    ({"states": 4}, "states=4", "no effect", "memory='attention'"),
    ({"position_scale": 0.1}, "position_scale=0.1", "no effect", "position='none'"),
    ({"position": "low_rank", "mixing": "softmax"}, "position_scale=0.01", "integer offsets", "1"),
    ({"window": 4}, "window=4", "mixing='softmax'", ""),
    ({"position": "toeplitz", "position_options": {"max_tokens": 9}}, "position", "", "toeplitz"),
]


def step(dtype: torch.dtype = torch.float32, **options: Any) -> None:
    LearnedOptimizer([nn.Parameter(torch.ones(3, dtype=dtype))], CoordinateOptimizer(), **options)


def decayed() -> None:
    group = {"params": [nn.Parameter(torch.ones(3))], "weight_decay": 0.01}
    LearnedOptimizer([group], CoordinateOptimizer())


def sparse() -> None:
    layer = nn.Embedding(4, 2, sparse=True)
    layer(torch.tensor([1])).sum().backward()
    LearnedOptimizer(layer.named_parameters(), CoordinateOptimizer()).step()


def population(**options: Any) -> PopulationOptimizer:
    return PopulationOptimizer(PopulationModel(3, dim=8, heads=2, ffn_dim=8), 6, **options)


def told(values: list[float]) -> None:
    optimizer = population()
    optimizer.ask()
    optimizer.tell(values)


ROWS = [
    *(Refusal(lambda _, o=o: CoordinateOptimizer(**o), *words) for o, *words in COORDINATE),
    refused(lambda: step(lr=-1.0), "lr of group 0", "at least 0", "-1"),
    refused(lambda: step(chunk=0), "chunk", "at least 1", "0"),
    refused(lambda: step(torch.bfloat16), "bfloat16", "float32"),
    refused(decayed, "weight_decay=0.01 of group 0", "no effect"),
    refused(sparse, "weight", "dense", "sparse"),
    refused(lambda: population().tell([1.0] * 6), "tell", "ask", "generation 0"),
    refused(lambda: population().best, "tell"),
    refused(lambda: told([1.0] * 5), "member", "(6,)", "(5,)"),
    refused(lambda: Functions.draw("rosenbrock", 1, [generator_of(0)]), "2"),
]
