"""Time of a training step of the variants of scripts/compare.py, in turns, one thread.

    python scripts/step_time.py --data datasets/emt-sample/train.safetensors

Forward and backward of one batch, without the optimizer and without loading. Ratios are medians of
the ratios to the first variant within each round, so that a busy moment hits both.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import torch
import yaml
from compare import VARIANTS
from torch_geometric.data import Batch
from tqdm import tqdm

from molflt.data import open_dataset
from molflt.graph import EnergyRegressor


def model_of(variant: str) -> EnergyRegressor:
    """The model that scripts/compare.py trains under this name."""
    own = (word for word in VARIANTS[variant] if word.startswith("--model."))
    words = (word.removeprefix("--model.").split("=") for word in own)
    torch.manual_seed(0)
    return EnergyRegressor(**{key: yaml.safe_load(value) for key, value in words})


def step(model: EnergyRegressor, batch: Batch) -> float:
    """Seconds of one forward and backward pass."""
    model.zero_grad(set_to_none=True)
    start = time.perf_counter()
    out = model(batch)
    (out["energy"].sum() + out["displacement"].abs().sum()).backward()
    return time.perf_counter() - start


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=Path("datasets/emt-sample/train.safetensors"))
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--batch_size", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args(words)
    torch.set_num_threads(1)
    try:
        structures = open_dataset(options.data)
    except FileNotFoundError as error:
        parser.error(str(error))
    models = {variant: model_of(variant) for variant in options.variants}
    seconds: dict[str, list[float]] = {variant: [] for variant in models}
    draw = torch.Generator().manual_seed(0)
    for turn in tqdm(range(-1, options.rounds), unit=" rounds", leave=False):
        chosen = torch.randperm(len(structures), generator=draw)[: options.batch_size]
        batch = Batch.from_data_list([structures[int(i)] for i in chosen])
        for variant, model in models.items():
            spent = step(model, batch)
            if turn >= 0:
                seconds[variant].append(spent)
    first = seconds[options.variants[0]]
    print(f"| variant | ms per step | in units of {options.variants[0]} |\n|---|---|---|")
    for variant, own in seconds.items():
        ratio = statistics.median(a / b for a, b in zip(own, first, strict=True))
        print(f"| {variant} | {1e3 * statistics.median(own):.0f} | {ratio:.2f} |")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
