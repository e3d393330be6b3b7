"""Operations per second in a training step of the 12-layer OC20 model and in a matrix product.

PyTorch counts the operations of matrix products in a forward and backward pass. In each round, the
steps and one large matrix product are timed in turn.
"""

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from kit.layers import crystals, model_of
from kit.rows import Rows, choose, markdown, pick
from kit.turns import paired, turns
from torch.utils.flop_counter import FlopCounterMode
from torch_geometric.data import Batch

from molflt.graph import EnergyRegressor
from molflt.tasks.is2re import IS2RETask

MECHANISMS = ("performer", "flt", "softmax")
SIZES = (40, 60, 80, 120) * 4  # atoms in each graph of a batch, as in OC20
SIDE = 2048  # size of the matrices in the product
PRODUCT = "one product"
QUICK = {"rounds": 1, "mechanisms": ("performer",), "sizes": (3, 4), "side": 64}


def step(task: IS2RETask, optimizer: torch.optim.Optimizer, batch: Batch) -> None:
    """Runs one training step."""
    loss, _ = task.loss(batch, 0.5)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def measure(
    rounds: int = 5,
    mechanisms: tuple[str, ...] = MECHANISMS,
    sizes: tuple[int, ...] = SIZES,
    side: int = SIDE,
) -> Rows:
    """Returns one row per mechanism and one row for the matrix product."""
    one = torch.rand(side, side)
    works: dict[str, Callable[[], object]] = {PRODUCT: partial(torch.mm, one, one)}
    counts = {PRODUCT: 2.0 * side**3}
    batch = Batch.from_data_list(crystals(sorted(sizes)))
    batch.pos = batch.pos.float()
    batch.cell = batch.cell.float()
    batch.pos_relaxed, batch.y_relaxed = batch.pos + 0.1, torch.zeros(len(sizes))
    batch.fixed = torch.zeros(len(batch.pos), dtype=torch.bool)
    for name in choose(mechanisms, MECHANISMS):
        torch.manual_seed(0)
        options = {**model_of("oc20/base", f"oc20/{name}"), "refinements": 1}  # a single pass
        task = IS2RETask(EnergyRegressor(**options))
        works[name] = partial(step, task, task.optimizer(), batch)
        with FlopCounterMode(display=False) as counter:
            works[name]()
        counts[name] = float(counter.get_total_flops())
    found = turns(works, rounds, time.process_time)
    return [
        {"mechanism": name, "operations": counts[name], "seconds": seconds}
        for name, seconds in found.items()
    ]


def share(rows: Rows, name: str) -> float:
    """Returns the operations per second of a step, as a fraction of those of the matrix product."""
    own, product = (pick(rows, mechanism=key)[0] for key in (name, PRODUCT))
    return own["operations"] / product["operations"] * paired(product["seconds"], own["seconds"])


def table(rows: Rows) -> str:
    """Formats the times and the operations per second of the mechanisms and the matrix product."""
    lines = []
    for row in rows:
        seconds, part = statistics.median(row["seconds"]), share(rows, row["mechanism"])
        rate = f"{1e-9 * row['operations'] / seconds:.1f}"
        lines.append([row["mechanism"], f"{seconds:.3g}", rate, f"{100 * part:.0f}"])
    return markdown(["", "s", "10⁹ operations/s", "% of the product's"], lines)
