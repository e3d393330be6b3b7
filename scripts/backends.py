"""The linear and the quadratic form of the same attention by size, beside what "auto" chooses.

    python scripts/backends.py            # forward and backward, one thread, in turns

The rule is `molflt.attention.mixing.cheaper`, a count of multiplications. The last column says what
it costs to follow it: time of its choice over that of the faster form.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from tqdm import tqdm

from molflt.attention import Features, linear, linear_with_kernel, quadratic
from molflt.attention.mixing import cheaper

HEADS, FEATURES, HEAD_DIM = 8, 64, 16
ATOMS = (16, 32, 64, 128, 256, 512)
COLUMNS = (1, 33, 129)  # of the positional kernel: without one, 16 nodes, 64 nodes


def forms(atoms: int, columns: int, batch: int) -> dict[str, Callable[[], None]]:
    """Both forms on the same random features."""
    shape = (batch, HEADS, atoms)
    query, key = (Features(None, torch.randn(*shape, FEATURES).requires_grad_()) for _ in "qk")
    value = torch.randn(*shape, HEAD_DIM).requires_grad_()
    kernel = [torch.rand(batch, HEADS, atoms, columns).requires_grad_() for _ in "uv"]

    def run_linear() -> None:
        if columns == 1:
            sums = linear(query, key, value)
        else:
            sums = linear_with_kernel(query, key, value, (kernel[0], kernel[1]))
        sums.ratio().sum().backward()

    def run_quadratic() -> None:
        dense = None if columns == 1 else kernel[0] @ kernel[1].mT
        quadratic(query, key, value, kernel=dense).ratio().sum().backward()

    return {"linear": run_linear, "quadratic": run_quadratic}


def seconds(works: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """Median seconds of each, taking turns."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(-1, rounds):
        for name, work in works.items():
            start = time.perf_counter()
            work()
            if turn >= 0:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(own) for name, own in times.items()}


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--atoms", type=int, nargs="+", default=list(ATOMS))
    parser.add_argument("--columns", type=int, nargs="+", default=list(COLUMNS))
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args(words)
    torch.set_num_threads(1)
    head = ("atoms", "columns p", "linear, ms", "quadratic, ms", "auto", "auto / faster")
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    sizes = [(p, n) for p in options.columns for n in options.atoms]
    for columns, atoms in tqdm(sizes, unit=" sizes", leave=False):
        batch = max(1, 1024 // atoms)
        spent = seconds(forms(atoms, columns, batch), options.rounds)
        choice = cheaper(atoms, atoms, FEATURES, HEAD_DIM, columns)
        cells = [f"{1e3 * spent[name] / batch:.2f}" for name in ("linear", "quadratic")]
        ratio = spent[choice] / min(spent.values())
        lines.append(f"| {atoms} | {columns} | {' | '.join(cells)} | {choice} | {ratio:.2f} |")
    print(f"{HEADS} heads, m = {FEATURES}, d = {HEAD_DIM}; milliseconds of one graph\n")
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
