"""Share of the machine's matrix-product rate in a whole training step of OC20's 12 layers.

Operations are those of matrix products, forward and backward, as counted by torch. Their rate is
compared with the rate of one large product, which takes turns with the steps.
"""

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from kit.layers import crystals, model_of
from kit.rows import Row, Rows, choose, markdown, pick
from kit.turns import paired, turns
from torch.utils.flop_counter import FlopCounterMode
from torch_geometric.data import Batch

from molflt.graph import EnergyRegressor
from molflt.tasks.is2re import IS2RETask

MECHANISMS = ("performer", "flt", "softmax")
SIZES = (40, 60, 80, 120) * 4  # atoms of the graphs of a batch, as in OC20
SIDE = 2048  # of the large product
PRODUCT = "one product"
QUICK = {"rounds": 1, "mechanisms": ("performer",), "sizes": (3, 4), "side": 64}


def made(mechanism: str) -> IS2RETask:
    """The task with the model of the papers and one pass."""
    options = model_of("oc20/base", f"oc20/{mechanism}")
    torch.manual_seed(0)
    return IS2RETask(EnergyRegressor(**{**options, "refinements": 1}))


def step(task: IS2RETask, optimizer: torch.optim.Optimizer, batch: Batch) -> None:
    """Forward, backward and update."""
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
    """A row for each mechanism, and one for the product."""
    one = torch.rand(side, side)
    works: dict[str, Callable[[], object]] = {PRODUCT: partial(torch.mm, one, one)}
    counts = {PRODUCT: 2.0 * side**3}
    batch = Batch.from_data_list(crystals(sorted(sizes)))
    batch.pos = batch.pos.float()
    batch.cell = batch.cell.float()
    batch.pos_relaxed, batch.y_relaxed = batch.pos + 0.1, torch.zeros(len(sizes))
    batch.fixed = torch.zeros(len(batch.pos), dtype=torch.bool)
    for name in choose(mechanisms, MECHANISMS):
        task = made(name)
        works[name] = partial(step, task, task.optimizer(), batch)
        with FlopCounterMode(display=False) as counter:
            works[name]()
        counts[name] = float(counter.get_total_flops())
    found = turns(works, rounds, time.process_time)
    return [
        {"mechanism": name, "operations": counts[name], "seconds": seconds}
        for name, seconds in found.items()
    ]


def share(rows: Rows, name: str) -> float | None:
    """Rate of a step in units of the product's; None if one of them was not measured."""
    own, product = pick(rows, mechanism=name), pick(rows, mechanism=PRODUCT)
    if not own or not product:
        return None
    faster = own[0]["operations"] / product[0]["operations"]
    return faster * paired(product[0]["seconds"], own[0]["seconds"])


def table(rows: Rows) -> str:
    """Markdown: a line for each mechanism."""

    def line(row: Row) -> list[object]:
        seconds = statistics.median(row["seconds"])
        rate, part = 1e-9 * row["operations"] / seconds, share(rows, row["mechanism"])
        return [row["mechanism"], f"{seconds:.3g}", f"{rate:.1f}", f"{100 * (part or 0):.0f}"]

    return markdown(["", "s", "10⁹ operations/s", "% of the product's"], map(line, rows))
