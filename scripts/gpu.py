"""Checks and times molflt on a GPU in about ten minutes.

    make gpu                                       # into runs/gpu
    python scripts/gpu.py --device cpu --tiny      # the same steps at tiny sizes

numbers   outputs and gradients of attention and models in float64, float32 and bfloat16, against
          float64 on the CPU; largest difference over the largest value
resume    a training that is interrupted and resumed, against one that is not
costs     time and peak memory of a layer of width 128 with 8 heads and m = 64, next to PyG's
          Performer and to softmax without positions by SDPA and by FlexAttention

Writes gpu.json and gpu.md. Exits with 1 if a number is out of its bound.
"""

from __future__ import annotations

import copy
import json
import signal
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from kit.layers import DenseBatch, pyg_performer
from kit.rows import Row, Rows, markdown
from kit.words import described
from safetensors.torch import load_file
from torch import Tensor, nn
from torch_geometric.data import Batch, Data
from tqdm import tqdm

import molflt
from molflt.attention import FEATURE_MAPS
from molflt.graph import EnergyRegressor, GraphAttention, Potential

SAMPLE = Path(__file__).resolve().parents[1] / "datasets" / "chgnet-sample" / "val_id.safetensors"
BOUNDS = {"float64": 1e-10, "float32": 1e-3, "bfloat16": 0.1}
GRAPHS = (40, 1, 12, 7)  # atoms
DIM, HEADS = 128, 8
SIZES = ((64, 80), (16, 2_000), (1, 32_000), (1, 1_000_000))  # graphs, atoms of each
TINY = ((3, 10), (1, 40))
KERNEL: dict[str, Any] = {"position": "multiplicative", "near_field": 3.0}
LAYERS: dict[str, dict[str, Any]] = {
    **{f"map {name}": {"feature_map": name, "position": "none"} for name in FEATURE_MAPS},
    "additive": {"periodic": "none"},
    "additive, images": {"periodic": "images", "image_cutoff": 4.0},
    "multiplicative": {**KERNEL, "periodic": "none"},
    "multiplicative, reciprocal": {**KERNEL, "periodic": "reciprocal"},
    "multiplicative, mesh": {**KERNEL, "periodic": "mesh"},
    "softmax, exact mask": {"mixing": "softmax", "periodic": "none"},
}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "EnergyRegressor": partial(EnergyRegressor, 32, 4, layers=2, messages=1, far_field=False),
    "Potential": partial(Potential, 32, 4, layers=1, messages=2),
}


def structures(sizes: tuple[int, ...]) -> Batch:
    """Random crystals of 12 Å^3 per atom, in float64."""
    generator, found = torch.Generator().manual_seed(0), []
    for atoms in sizes:
        side = (12.0 * atoms) ** (1 / 3)
        pos = side * torch.rand(atoms, 3, generator=generator, dtype=torch.float64)
        cell = side * torch.eye(3, dtype=torch.float64)[None]
        tags = (torch.arange(atoms) + 1) % 3
        numbers = torch.where(tags == 2, 6, 29)
        given = {"pos": pos, "cell": cell, "pbc": torch.ones(1, 3, dtype=torch.bool)}
        found.append(Data(**given, atomic_numbers=numbers, tags=tags, natoms=atoms))
    return Batch.from_data_list(found)


def outputs(model: nn.Module, batch: Batch, x: Tensor | None) -> list[Tensor]:
    """Outputs of a layer or a model, and gradients of their sum of squares by positions and
    weights.
    """
    batch.pos.requires_grad_()
    if x is None:
        found = model(batch)
        out = [found[key] for key in ("energy", "forces") if key in found]
    else:
        out = [model(x, batch.pos, batch.batch, batch.cell, batch.pbc)]
    parameters = [p for p in model.parameters() if p.requires_grad]
    loss = sum(each.double().square().sum() for each in out)
    grads = torch.autograd.grad(loss, [batch.pos, *parameters], allow_unused=True)
    kept = [*out, *(grad for grad in grads if grad is not None)]
    return [each.detach().double().cpu() for each in kept]


def difference(found: list[Tensor], expected: list[Tensor]) -> float:
    """Largest difference of a tensor over its largest value, without tensors of rounding errors."""
    least = 1e-8 * max(float(each.abs().max()) for each in expected if each.numel())
    pairs = zip(found, expected, strict=True)
    pairs = [(a, b) for a, b in pairs if b.numel() and b.abs().max() > least]
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)


def numbers(device: str, tiny: bool) -> Iterator[Row]:
    """Differences of all layers and models to those in float64 on the CPU."""
    builds: dict[str, Callable[[], nn.Module]] = {}
    for name, options in LAYERS.items():
        for mixing in ("linear", "quadratic") if "mixing" not in options else ("softmax",):
            build = partial(GraphAttention, 32, 4, **{**options, "mixing": mixing})
            builds[name if mixing == "softmax" else f"{name}, {mixing}"] = build
    builds |= MODELS
    if tiny:
        builds = dict([*builds.items()][-6:])
    batch = structures(GRAPHS)
    x = torch.randn(len(batch.pos), 32, generator=torch.Generator().manual_seed(1)).double()
    for name, build in tqdm(builds.items(), desc="numbers", leave=False):
        torch.manual_seed(0)
        model, given = build().double(), None if name in MODELS else x
        expected = outputs(model, batch.clone(), given)
        for kind in BOUNDS:
            own = torch.float64 if kind == "float64" else torch.float32
            there = copy.deepcopy(model).to(device, own)
            moved = batch.clone().to(device).apply(lambda t, own=own: _as(t, own))
            tokens = None if given is None else given.to(device, own)
            with torch.autocast(device, torch.bfloat16, enabled=kind == "bfloat16"):
                found = outputs(there, moved, tokens)
            yield {"case": name, "precision": kind, "difference": difference(found, expected)}


def _as(value: Tensor, kind: torch.dtype) -> Tensor:
    return value.to(kind) if value.is_floating_point() else value


def resume(device: str, folder: Path) -> Row:
    """Largest difference of weights between an interrupted and an uninterrupted training."""
    accelerator = "gpu" if device == "cuda" else "cpu"
    words = [sys.executable, "-m", "molflt", "train", "--config", "demo"]
    words += ["--trainer.max_steps", "24", "--trainer.val_every", "24", "--data.batch_size", "4"]
    words += ["--trainer.checkpoint_every", "2", "--trainer.accelerator", accelerator]
    words += ["--model.layers", "1", "--data.root", str(SAMPLE), "--data.val_fraction", "0.1"]
    runs = folder / "whole", folder / "resumed"
    subprocess.run([*words, "--run", str(runs[0])], check=True, capture_output=True)
    quiet = subprocess.DEVNULL
    started = subprocess.Popen([*words, "--run", str(runs[1])], stdout=quiet, stderr=quiet)
    while started.poll() is None and not (runs[1] / "checkpoints" / "last.ckpt").exists():
        time.sleep(0.05)
    started.send_signal(signal.SIGTERM)
    started.wait()
    again = [*words[:4], "--resume", str(runs[1])]
    subprocess.run(again, check=True, capture_output=True)
    one, other = (load_file(run / "checkpoints" / "last.safetensors") for run in runs)
    changes = ((one[key].double() - other[key].double()).abs() for key in one if one[key].numel())
    return {"difference": max(float(change.max()) for change in changes)}


class Flex(nn.Module):
    """FlexAttention over all atoms of a batch; pairs of different graphs are masked."""

    def __init__(self) -> None:
        from torch.nn.attention.flex_attention import flex_attention

        super().__init__()
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.attend: Callable[..., Tensor] = torch.compile(flex_attention)

    def forward(self, x: Tensor, batch: Tensor, **_: Any) -> Tensor:
        from torch.nn.attention.flex_attention import create_block_mask

        def one_graph(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return batch[q] == batch[k]

        blocks = create_block_mask(one_graph, None, None, len(x), len(x), device=x.device.type)
        heads = self.qkv(x)[None].unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        return self.out(self.attend(*heads, block_mask=blocks)[0].transpose(0, 1).flatten(1))


def costs(device: str, tiny: bool) -> Iterator[Row]:
    """Milliseconds and peak MiB of forward and backward in float32."""
    ours = {"performer": {"position": "none"}, "FLT": {"position_options": {"num_nodes": 16}}}
    ours["multiplicative, near field"] = {"position": "multiplicative", "near_field": 4.5}
    softmax = partial(GraphAttention, DIM, HEADS, position="none", mixing="softmax")
    builds: dict[str, Callable[[], nn.Module]] = {
        name: partial(GraphAttention, DIM, HEADS, num_features=64, **options)
        for name, options in ours.items()
    }
    builds |= {"SDPA, no positions": softmax, "FlexAttention, no positions": Flex}
    builds["PyG's Performer"] = lambda: DenseBatch(pyg_performer(DIM, HEADS, 64))
    for graphs, atoms in tqdm(TINY if tiny else SIZES, desc="costs", leave=False):
        pos = torch.rand(graphs * atoms, 3, device=device) * (12.0 * atoms) ** (1 / 3)
        x = torch.randn(graphs * atoms, DIM, device=device)
        batch = torch.arange(graphs, device=device).repeat_interleave(atoms)
        for name, build in builds.items():
            row: Row = {"graphs": graphs, "atoms": atoms, "mechanism": name}
            try:
                yield row | timed(build().to(device), {"x": x, "pos": pos, "batch": batch}, device)
            except (RuntimeError, ValueError) as error:  # out of memory, or not supported
                yield row | {"note": str(error).splitlines()[0][:80]}


def timed(layer: nn.Module, given: Mapping[str, Tensor], device: str) -> Row:
    """Median of five passes after two."""

    def once() -> float:
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        layer(**given).sum().backward()
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    once()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds = [once() for _ in range(6)][1:]
    peak = torch.cuda.max_memory_allocated() / 2**20 if device == "cuda" else None
    return {"ms": 1e3 * statistics.median(seconds), "peak_MiB": peak}


def page(found: Mapping[str, Any]) -> str:
    """The results as Markdown."""
    worst: dict[str, dict[str, float]] = {}
    for row in found["numbers"]:
        worst.setdefault(row["case"], {})[row["precision"]] = row["difference"]
    lines = [[name, *(f"{own[kind]:.1e}" for kind in BOUNDS)] for name, own in worst.items()]
    sizes = dict.fromkeys((row["graphs"], row["atoms"]) for row in found["costs"])
    cells: Rows = found["costs"]
    table = []
    for name in dict.fromkeys(row["mechanism"] for row in cells):
        own = {(row["graphs"], row["atoms"]): row for row in cells if row["mechanism"] == name}
        table.append([name, *(_cell(own[size]) for size in sizes)])
    resumed = found["resume"]["difference"]
    heads = [f"{graphs} x {atoms:,} atoms, ms, MiB" for graphs, atoms in sizes]
    return "\n".join(
        (
            f"# {found['device']}, torch {found['torch']}, molflt {found['molflt']}\n",
            markdown(["largest difference to float64 on the CPU", *BOUNDS], lines),
            f"\nlargest difference of weights after resuming: {resumed:.1e}\n",
            markdown(["forward and backward", *heads], table),
            "",
        )
    )


def _cell(row: Row) -> str:
    if "note" in row:
        return str(row["note"])
    peak = "" if row["peak_MiB"] is None else f", {row['peak_MiB']:.0f}"
    return f"{row['ms']:.2f}{peak}"


def main(words: list[str] | None = None) -> int:
    parser = described(__doc__)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="small sizes, for a test")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"))
    options = parser.parse_args(words)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: no GPU is visible to torch; use a machine with CUDA")
    if options.out.exists() and any(options.out.iterdir()):
        parser.error(f"--out {options.out}: the folder is not empty; choose another one")
    warnings.simplefilter("ignore")
    options.out.mkdir(parents=True, exist_ok=True)
    name = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    found: dict[str, Any] = {"device": name, "torch": torch.__version__}
    found["molflt"] = molflt.__version__
    found["numbers"] = list(numbers(options.device, options.tiny))
    found["resume"] = resume(options.device, options.out)
    found["costs"] = list(costs(options.device, options.tiny))
    (options.out / "gpu.json").write_text(json.dumps(found, indent=1) + "\n")
    (options.out / "gpu.md").write_text(page(found))
    print(page(found))
    wrong = [row for row in found["numbers"] if not row["difference"] <= BOUNDS[row["precision"]]]
    for row in wrong:
        print(f"out of its bound: {row}", file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
