"""Time and peak memory of one pass through a layer against the length of its input.

In each round, all mechanisms are timed in turn, after a call of each that is not timed. Passes that
take more than half of the budget have one round.

Peak memory is always measured, which requires Linux. Each measurement runs in a process that is
forked from a process that has not computed anything. It warms up on 64 tokens, builds the layer and
the input, resets the kernel's record of peak resident memory (/proc/self/clear_refs), and returns
the increase of the peak during one pass, including that of all libraries. Blocks above 64 KiB are
returned to the system when they are freed (MALLOC_MMAP_THRESHOLD_), because reused blocks would not
be counted. `Study.allocator` can keep the allocator's defaults instead; the peak then depends on
the unused memory of the process.
"""

import contextlib
import math
import multiprocessing
import os
import re
import statistics
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import yaml
from torch import Tensor, nn
from torch_geometric.data import Data
from tqdm import tqdm

from kit.pictures import curves
from kit.rows import Row, Rows, choose, exponent, markdown, names, pick, upper_half
from kit.turns import paired, turns
from molflt.graph import GraphAttention
from molflt.plots.figure import legend_outside, picture

VOLUME = 12.0  # Å^3 per atom
SKIPPED = "skipped"  # start of the note of a skipped pass
FORWARD, TRAINING = PASSES = ("forward", "forward+backward")
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}
SLOW = ("torch_geometric.nn.attention", "transformers.models.fnet.modeling_fnet")  # slow imports
SCRIPTS = Path(__file__).resolve().parents[1]
DIM, HEADS, FEATURES, NODES = 128, 8, 64, 16  # sizes of layers on atoms

Key = tuple[str, bool, int, str]  # mechanism, causal, length, pass
Costs = dict[Key, dict[str, Any]]


class Study(NamedTuple):
    """Layers of a benchmark and settings for measurements and plots.

    Attributes:
        module: module that defines the study as STUDY.
        unit: unit of the lengths, such as "tokens".
        mechanisms: functions that build a layer from the length and `causal`, keyed by name.
        inputs: function of the length that returns the input.
        styles: color and line style of each curve.
        causal: layers that are also measured in their causal form.
        passes: passes that are measured by default.
        budget: seconds for all rounds of a pass.
        clock: function that returns the time in seconds.
        allocator: environment variables of the processes that measure memory.
    """

    module: str
    unit: str
    mechanisms: Mapping[str, Callable[[int, bool], nn.Module]]
    inputs: Callable[[int], Tensor]
    styles: Mapping[str, tuple[int, str]] = {}
    causal: Collection[str] = ()
    passes: tuple[str, ...] = (TRAINING,)
    budget: float = 12.0
    clock: Callable[[], float] = time.process_time
    allocator: Mapping[str, str] = ALLOCATOR

    def draw(self, png: Path, rows: Rows, limit: float = math.nan) -> None:
        """Draws training (or else forward) passes, and a line at the memory `limit` in GB."""
        rows = pick(rows, **{"pass": TRAINING}) or rows
        kinds, which = names(rows, "causal"), rows[0]["pass"]
        titles = {"seconds": f"{which.replace('+', ' and ')}, s", "MiB": "peak memory, MiB"}
        with picture(png, figsize=(7.6, 4.2) if len(kinds) < 2 else (8.2, 6.6)) as figure:
            grid = figure.subplots(len(kinds), 2, sharex=True, sharey="col", squeeze=False)
            for line, causal in zip(grid, kinds, strict=True):
                for axes, (quantity, what) in zip(line, titles.items(), strict=True):
                    points = {n: curve(rows, n, quantity, causal, which) for n in self.styles}
                    curves(axes, points, self.styles, ylabel=f"{what}{', causal' * causal}")
                    sizes = names(rows, "length")
                    axes.set_xticks(sizes, [str(n) for n in sizes], fontsize="small")
                    axes.minorticks_off()
                line[1].axhline(limit * 1e9 / 2**20, color="gray", linewidth=0.8)
            for axes in grid[-1]:
                axes.set_xlabel(self.unit)
            legend_outside(figure, grid[0, 0], "lower", 4, fontsize="small")


def model_of(*files: str) -> dict[str, Any]:
    """Returns the model options from configuration files; later files take precedence."""
    paths = [SCRIPTS.parent / "configs" / f"{file}.yaml" for file in files]
    read = [yaml.safe_load(path.read_text()) for path in paths]
    return {key: value for part in read for key, value in part.get("model", {}).items()}


def one_pass(study: Study, name: str, causal: bool, length: int, which: str) -> Callable[[], None]:
    """Returns a function that runs one pass and deletes the gradients."""
    torch.manual_seed(0)
    with contextlib.redirect_stdout(sys.stderr):  # some layers print
        layer = study.mechanisms[name](length, causal)
    back = which == TRAINING
    x = study.inputs(length).requires_grad_(back)

    def once() -> None:
        with torch.set_grad_enabled(back):
            out = layer(x)
        if back:
            out.sum().backward()
            x.grad = None
            layer.zero_grad(set_to_none=True)

    return once


def resident(field: str) -> float:
    """Returns the resident memory of this process in MiB; `field` is VmRSS or VmHWM (the peak)."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) / 1024 if found else math.nan


def growth(work: Callable[[], object]) -> float:
    """Calls `work` and returns the increase of peak resident memory in MiB."""
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    work()
    return resident("VmHWM") - before


def cost(module: str, name: str, causal: bool, length: int, which: str) -> dict[str, Any]:
    """Returns the costs of one pass and the peak memory of the process, or an error message."""
    torch.set_num_threads(1)
    study: Study = import_module(module).STUDY
    try:
        one_pass(study, name, causal, 64, which)()
        work = one_pass(study, name, causal, length, which)
        start = study.clock()
        found = {"MiB": growth(work), "seconds": study.clock() - start}
        return {**found, "process": resident("VmHWM")}
    except (ImportError, ValueError, RuntimeError, MemoryError) as error:
        return {"note": f"{type(error).__name__}: {error}".splitlines()[0]}


def ask(module: str, key: Key, allocator: Mapping[str, str] = ALLOCATOR) -> dict[str, Any]:
    """Calls `cost` in a new process, forked from a process that has only imported the module."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([module, *SLOW])
    path = os.pathsep.join([str(SCRIPTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    # The environment is read when the first process starts.
    with patch.dict(os.environ, {**allocator, "PYTHONPATH": path}):
        try:
            with ProcessPoolExecutor(1, context) as pool:
                return pool.submit(cost, module, *key).result()
        except BrokenProcessPool:
            return {"note": "the process was killed"}


def expected(costs: Costs, key: Key, quantity: str) -> float:
    """Extrapolates a cost from the last two lengths (at most as N^2), or linearly from one."""
    name, causal, length, which = key
    known = [
        (other[2], found[quantity])
        for other, found in costs.items()
        if (other[0], other[1], other[3]) == (name, causal, which) and found.get(quantity, 0) > 0
    ]
    if not known:
        return 0.0
    slope = min(exponent(known[-2:]), 2.0) if len(known) > 1 else 1.0
    return known[-1][1] * (length / known[-1][0]) ** slope


def measure_layers(
    study: Study,
    sizes: tuple[int, ...],
    mechanisms: tuple[str, ...] = (),
    rounds: int = 9,
    seconds: float = 60.0,
    gigabytes: float = 6.0,
    passes: tuple[str, ...] = (),
) -> Rows:
    """Returns a row, with the times of all rounds, for each mechanism, size and pass.

    A pass is skipped if its extrapolated time exceeds `seconds` or its memory exceeds `gigabytes`.
    """
    chosen = choose(mechanisms, study.mechanisms)
    passes = choose(passes, PASSES, "pass") if passes else study.passes
    costs: Costs = {}
    spent: dict[Key, list[float]] = {}
    groups = [(n, c, p) for n in sorted(sizes) for c in (False, True) for p in passes]
    for length, causal, which in tqdm(groups, unit=" groups", leave=False):
        works, most = {}, {}
        for name in (n for n in chosen if not causal or n in study.causal):
            key = (name, causal, length, which)
            needs = [expected(costs, key, "MiB") * 2**20 / 1e9, expected(costs, key, "seconds")]
            if needs[0] > gigabytes or needs[1] > seconds:
                needed = "would need about {:.1f} GB and {:.0f} s".format(*needs)
                costs[key] = {"note": f"{SKIPPED}: {needed}"}
                continue
            costs[key] = found = ask(study.module, key, study.allocator)
            if "note" in found:
                continue
            works[key] = work = one_pass(study, *key)
            most[key] = max(1, min(rounds, int(study.budget / found["seconds"])))
            if most[key] == 1:  # `turns` skips the warm-up for a single round
                work()
        spent.update(turns(works, most, study.clock))
    return [row(key, found, spent.get(key, [])) for key, found in costs.items()]


def row(key: Key, found: Mapping[str, Any], seconds: list[float]) -> Row:
    """Returns a row of the CSV file; its note states why a pass was skipped or failed."""
    columns = ("mechanism", "causal", "length", "pass", "seconds", "peak_MiB", "process_MiB")
    memory = found.get("MiB"), found.get("process")
    numbers = dict(zip(columns, (*key, seconds, *memory), strict=True))
    return {**numbers, "rounds": len(seconds), "note": found.get("note")}


def curve(
    rows: Rows, name: str, quantity: str, causal: bool = False, which: str = TRAINING
) -> list[tuple[float, float]]:
    """Returns pairs: a measured length, and its median time in s or its peak memory in MiB."""
    return [
        (r["length"], statistics.median(r["seconds"]) if quantity == "seconds" else r["peak_MiB"])
        for r in rows
        if (r["mechanism"], r["causal"], r["pass"]) == (name, causal, which) and not r["note"]
    ]


def cost_table(rows: Rows, unit: str, which: str = TRAINING) -> str:
    """Formats the time and memory of a pass at every size, their exponents, and skipped passes.

    Exponents are fitted to the larger half of the sizes.
    """
    rows, parts = pick(rows, **{"pass": which}), []
    sizes, note = names(rows, "length"), "" if which == TRAINING else f", {which}"
    for causal in names(rows, "causal"):
        for title, quantity, form in (("time, s", "seconds", ".3g"), ("memory, MiB", "MiB", ".0f")):
            lines = []
            for name in names(pick(rows, causal=causal), "mechanism"):
                points = curve(rows, name, quantity, causal, which)
                cells = {size: format(value, form) for size, value in points}
                power = exponent(upper_half(points))
                last = f"{power:.2f}" if math.isfinite(power) else None
                lines.append([name, *(cells.get(size, "–") for size in sizes), last])
            head = [f"{title}{note}, {unit}{', causal' * causal}", *sizes, "~ N^"]
            parts.append(markdown(head, lines))
    skipped = [
        f"- {r['mechanism']}{', causal' * r['causal']}, {r['length']} {unit}: {r['note']}"
        for r in rows
        if r["note"]
    ]
    return "\n\n".join(filter(None, [*parts, "\n".join(skipped)]))


def trained(rows: Rows, name: str, length: int, causal: bool = False, which: str = TRAINING) -> Row:
    """Returns the row of a mechanism and length, or an empty row if it was not measured."""
    labels = {"mechanism": name, "length": length, "causal": causal, "pass": which, "note": None}
    return (pick(rows, **labels) or [{}])[0]


def cost_ratio(
    rows: Rows, quantity: str, one: str, other: str, length: int, causal: bool = False
) -> float | None:
    """Returns the time or memory of `one` relative to `other` in training; None if not measured."""
    a, b = (trained(rows, name, length, causal) for name in (one, other))
    if not a or not b:
        return None
    if quantity == "time":
        return paired(a["seconds"], b["seconds"])
    return float(a["peak_MiB"] / b["peak_MiB"])


def processes_table(rows: Rows, keys: Sequence[Key], unit: str) -> str:
    """Formats the peak memory of whole processes in GB; returns "" if no key was measured."""
    lines = []
    for name, length, causal, which in keys:
        if found := trained(rows, name, length, causal, which):
            gigabytes = found["process_MiB"] * 2**20 / 1e9
            label = f"{name}, {length:,} {unit}{', causal' * causal}, {which}"
            lines.append([label, f"{gigabytes:.3g}"])
    return markdown(["process", "GB"], lines) if lines else ""


def crystals(sizes: Sequence[int]) -> list[Data]:
    """Returns a cubic cell of random atoms for each size, with 12 Å^3 per atom, in float64."""
    draw = torch.Generator().manual_seed(0)
    numbers = torch.tensor([1, 6, 8, 29, 78])
    made = []
    for atoms in sizes:
        side = (VOLUME * atoms) ** (1 / 3)
        data = Data(pos=torch.rand(atoms, 3, generator=draw, dtype=torch.float64) * side)
        data.atomic_numbers = numbers[torch.randint(5, (atoms,), generator=draw)]
        data.tags = 2 - torch.arange(atoms) % 2  # alternately adsorbate and surface
        data.cell = side * torch.eye(3, dtype=torch.float64)[None]
        data.pbc = torch.ones(1, 3, dtype=torch.bool)
        made.append(data)
    return made


class AtomLayer(nn.Module):
    """GraphAttention on graphs of equal size, with random positions and 12 Å^3 per atom.

    Args:
        atoms: number of atoms in a graph.
        causal: not used.
        least: minimum total number of atoms in a batch.
        options: options of GraphAttention. With `periodic`, graphs have cubic cells.
    """

    def __init__(self, atoms: int, causal: bool = False, least: int = 1, **options: Any) -> None:
        super().__init__()
        graphs, side = -(-least // atoms), (VOLUME * atoms) ** (1 / 3)
        self.pos = torch.rand(graphs * atoms, 3) * side
        self.batch = torch.arange(graphs).repeat_interleave(atoms)
        self.cells: dict[str, Tensor] = {}
        if "periodic" in options:
            self.cells["cell"] = (side * torch.eye(3)).expand(graphs, 3, 3)
            self.cells["pbc"] = torch.ones(graphs, 3, dtype=torch.bool)
        if options.get("mixing") != "softmax":  # exact softmax has no random features
            options = {"num_features": FEATURES, **options}
            if not self.cells and options["position"] != "none":  # lattices have their own nodes
                options["position_options"] = {"num_nodes": NODES}
        self.layer = GraphAttention(DIM, HEADS, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, self.pos, self.batch, **self.cells)


class DenseBatch(nn.Module):
    """Calls an attention module from PyG on dense batches, as PyG's own models do."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, x: Tensor, batch: Tensor | None = None, **_: Any) -> Tensor:
        """Maps features (atoms, channels) to the same shape; `batch` defaults to a single graph."""
        from torch_geometric.utils import to_dense_batch

        dense, mask = to_dense_batch(x, batch)
        return self.attention(dense, mask)[mask]


def pyg_performer(dim: int, heads: int, features: int) -> nn.Module:
    """Returns PyG's Performer with ReLU features.

    PyG has no option for the number of features. The number that it uses, d log d, is replaced.
    """
    from torch_geometric.nn.attention import PerformerAttention
    from torch_geometric.nn.attention.performer import orthogonal_matrix

    layer = PerformerAttention(dim, heads, head_channels=dim // heads)
    layer.fast_attn.num_rows = features
    layer.fast_attn.projection_matrix = orthogonal_matrix(features, dim // heads)
    return layer
