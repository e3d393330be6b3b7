"""Check numerical results and resuming on a GPU.

    make gpu                                       # writes to runs/gpu
    python scripts/gpu.py --device cpu --tiny      # only some of the layers

The first check computes outputs and gradients of attention and of models in float64, float32 and
bfloat16. The largest difference from float64 on the CPU is divided by the largest value.
The second check compares the weights of a training run that was interrupted and resumed with those
of an uninterrupted run. The script also measures the time and peak memory of a layer with mixing
"triton" and "auto". Triton kernels run on a GPU and, with TRITON_INTERPRET=1, slowly on the CPU.
Writes gpu.json and gpu.md. The exit status is 1 if a difference exceeds its bound. On a GPU, a
resumed run has no bound, because sums are not reproducible; its weights must be finite.
"""

import copy
import io
import itertools
import json
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from kit.layers import VOLUME, crystals
from kit.rows import Row, markdown, names, pick
from kit.runs import publish
from kit.words import described
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.benchmark import Timer
from torch_geometric.data import Batch

import molflt
from molflt.attention import FEATURE_MAPS
from molflt.attention.mixing.ragged import expect_triton
from molflt.commands import cli
from molflt.graph import EnergyRegressor, GraphAttention, Potential

SAMPLE = Path(__file__).resolve().parents[1] / "datasets" / "chgnet-sample" / "val_id.safetensors"
BOUNDS = {"float64": 1e-10, "float32": 1e-3, "bfloat16": 0.1}
GRAPHS = (40, 1, 12, 7)  # atoms
KERNEL: dict[str, Any] = {"position": "multiplicative", "near_field": 3.0}
LAYERS: dict[str, dict[str, Any]] = {
    **{f"map {name}": {"feature_map": name, "position": "none"} for name in FEATURE_MAPS},
    "additive": {"periodic": "none"},
    "additive, images": {"periodic": "images", "image_cutoff": 4.0},
    "multiplicative": {**KERNEL, "periodic": "none"},
    "multiplicative, reciprocal": {**KERNEL, "periodic": "reciprocal"},
    "multiplicative, mesh": {**KERNEL, "periodic": "mesh"},
    "softmax, exact mask": {"mixing": "softmax", "periodic": "none"},
    "triton": {**KERNEL, "mixing": "triton", "periodic": "none"},
    "triton, reciprocal": {**KERNEL, "mixing": "triton", "periodic": "reciprocal"},
}
# (graphs, atoms per graph), with 8 heads of width 16, 64 features and 16 nodes
SIZES = ((64, 80), (16, 2_000), (1, 32_000), (1, 1_000_000))
ROUNDS = 5
MODELS: dict[str, Callable[[], nn.Module]] = {
    "EnergyRegressor": partial(EnergyRegressor, 32, 4, layers=2, messages=1, far_field=False),
    "Potential": partial(Potential, 32, 4, layers=1, messages=2),
}


def outputs(model: nn.Module, batch: Batch, x: Tensor | None) -> list[Tensor]:
    """Returns the outputs of a model, followed by gradients.

    The sum of the squared outputs is differentiated with respect to positions and weights.
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
    """Returns the largest relative difference; ignores tensors as small as rounding errors."""
    least = 1e-8 * max(float(each.abs().max()) for each in expected if each.numel())
    pairs = zip(found, expected, strict=True)
    pairs = [(a, b) for a, b in pairs if b.numel() and not b.abs().max() <= least]
    # Python's max ignores a NaN that is not in the first place.
    return float(torch.stack([(a - b).abs().max() / b.abs().max() for a, b in pairs]).max())


def numbers(device: str, tiny: bool) -> Iterator[Row]:
    """Yields a row for each case and precision, with the difference from float64 on the CPU."""
    builds: dict[str, Callable[[], nn.Module]] = {}
    for name, options in LAYERS.items():
        if options.get("mixing") == "triton" and without_kernels():
            continue
        for mixing in [options["mixing"]] if "mixing" in options else ("linear", "quadratic"):
            build = partial(GraphAttention, 32, 4, **{**options, "mixing": mixing})
            builds[name if "mixing" in options else f"{name}, {mixing}"] = build
    builds |= MODELS
    if tiny:
        builds = dict([*builds.items()][-6:])
    batch = Batch.from_data_list(crystals(GRAPHS))
    batch.tags = (torch.arange(len(batch.pos)) + 1) % 3
    x = torch.randn(len(batch.pos), 32, generator=torch.Generator().manual_seed(1)).double()
    for name, build in builds.items():
        torch.manual_seed(0)
        model, given = build().double(), None if name in MODELS else x
        reference = model
        if name.startswith("triton"):
            reference = GraphAttention(32, 4, **{**LAYERS[name], "mixing": "linear"}).double()
            reference.load_state_dict(model.state_dict())
        expected = outputs(reference, batch.clone(), given)
        for kind in BOUNDS:
            own = torch.float64 if kind == "float64" else torch.float32
            there = copy.deepcopy(model).to(device, own)
            moved = batch.clone().to(device)
            moved = moved.apply(lambda t, own=own: t.to(own) if t.is_floating_point() else t)
            tokens = None if given is None else given.to(device, own)
            with torch.autocast(device, torch.bfloat16, enabled=kind == "bfloat16"):
                found = outputs(there, moved, tokens)
            yield {"case": name, "precision": kind, "difference": difference(found, expected)}


def without_kernels() -> str:
    """Returns the reason why Triton kernels cannot run, or an empty string."""
    try:
        expect_triton()
    except ValueError as error:
        return str(error)
    return ""


def kernels(device: str, tiny: bool) -> Iterator[Row]:
    """Yields rows with the time and memory of a forward pass, with or without a backward pass."""
    if without_kernels():
        return
    sizes, heads, features, nodes = ([(2, 9)], 1, 8, 2) if tiny else (SIZES, 8, 64, 16)
    for (graphs, atoms), mixing in itertools.product(sizes, ("auto", "triton")):
        torch.manual_seed(0)
        form: dict[str, Any] = {"position": "multiplicative", "periodic": "none", "mixing": mixing}
        form["position_options"] = {"num_nodes": nodes}
        layer = GraphAttention(16 * heads, heads, num_features=features, **form).to(device)
        x = torch.randn(graphs * atoms, 16 * heads, device=device)
        pos = (VOLUME * atoms) ** (1 / 3) * torch.rand(graphs * atoms, 3, device=device)
        where = pos, torch.arange(graphs, device=device).repeat_interleave(atoms)
        for backward in (False, True):
            seconds, peak = measured(partial(one_pass, layer, x, where, backward), device, tiny)
            row = {"graphs": graphs, "atoms": atoms, "mixing": mixing, "backward": backward}
            yield {**row, "ms": 1e3 * seconds, "peak_mib": peak}


def one_pass(layer: nn.Module, x: Tensor, where: tuple[Tensor, ...], backward: bool) -> None:
    with torch.set_grad_enabled(backward):
        out = layer(x.requires_grad_(backward), *where)
    if backward:
        out.square().sum().backward()


def measured(work: Callable[[], None], device: str, tiny: bool) -> tuple[float, float]:
    """Returns the mean time of one call in s, and the increase of peak GPU memory in MiB."""
    peak = 0
    work()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        peak = torch.cuda.max_memory_allocated() - before
    timer = Timer("work()", globals={"work": work})  # waits for the GPU
    return timer.timeit(1 if tiny else ROUNDS).mean, peak / 2**20


def resume(device: str, folder: Path) -> float:
    """Returns the largest difference in weights between a resumed and an uninterrupted run."""
    words = ["train", "--config", "demo", "--data.root", str(SAMPLE), "--data.val_fraction", "0.1"]
    words += ["--trainer.max_steps", "24", "--trainer.val_every", "24", "--data.batch_size", "4"]
    words += ["--trainer.checkpoint_every", "2", "--model.layers", "1"]
    words += ["--trainer.accelerator", "gpu" if device == "cuda" else "cpu"]
    runs = folder / "whole", folder / "resumed"
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()) as errors:
        found = [cli.main([*words, "--run", str(runs[0])])]
        Thread(target=interrupt, args=[runs[1] / "checkpoints" / "last.ckpt"], daemon=True).start()
        found.append(cli.main([*words, "--run", str(runs[1])]))
        found.append(cli.main(["train", "--resume", str(runs[1])]))
    if found != [0, 128 + signal.SIGTERM, 0]:
        raise RuntimeError(f"exit statuses {found}: {errors.getvalue()}")
    one, other = (load_file(run / "checkpoints" / "last.safetensors") for run in runs)
    apart = [(tensor.double() - other[name].double()).abs().max() for name, tensor in one.items()]
    return float(torch.stack(apart).max())


def interrupt(checkpoint: Path) -> None:
    """Stops this process after its first checkpoint."""
    while not checkpoint.exists():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGTERM)


def page(found: dict[str, Any]) -> str:
    """Formats the results as Markdown."""
    rows = found["numbers"]
    lines = [
        [case, *(f"{row['difference']:.1e}" for row in pick(rows, case=case))]
        for case in names(rows, "case")
    ]
    head = ["graphs", "atoms", "mixing", "backward", "ms", "peak, MiB"]
    costs = [
        [*(str(row[key]) for key in head[:4]), f"{row['ms']:.2f}", f"{row['peak_mib']:.0f}"]
        for row in found["kernels"]
    ]
    return (
        f"# {found['device']}, torch {found['torch']}, molflt {found['molflt']}\n\n"
        f"{markdown(['largest difference from float64 on the CPU', *BOUNDS], lines)}\n\n"
        f"{markdown(head, costs) if costs else found['without_kernels']}\n\n"
        f"largest difference of weights after resuming: {found['resume']:.1e}"
    )


def main(words: list[str] | None = None) -> int:
    parser = described(__doc__)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="only some of the layers")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"))
    options = parser.parse_args(words)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: no GPU is visible to torch; use a machine with CUDA")
    if options.out.exists() and any(options.out.iterdir()):
        parser.error(f"--out {options.out}: the folder is not empty; choose a different folder")
    warnings.simplefilter("ignore")
    options.out.mkdir(parents=True, exist_ok=True)
    name = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    found: dict[str, Any] = {"device": name, "torch": torch.__version__}
    found |= {"molflt": molflt.__version__, "without_kernels": without_kernels()}
    found["numbers"] = list(numbers(options.device, options.tiny))
    found["kernels"] = list(kernels(options.device, options.tiny))
    found["resume"] = resume(options.device, options.out)
    (options.out / "gpu.json").write_text(json.dumps(found, indent=1) + "\n")
    publish(options.out / "gpu.md", page(found))
    wrong = [row for row in found["numbers"] if not row["difference"] <= BOUNDS[row["precision"]]]
    if not found["resume"] <= (float("inf") if options.device == "cuda" else 0.0):
        wrong.append({"case": "weights after resuming", "difference": found["resume"]})
    for row in wrong:
        print(f"above the bound: {row}", file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
