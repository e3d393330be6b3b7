"""Training and evaluation of one model within a budget of CPU time."""

import json
import resource
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from kit.budget import CpuBudget
from lightning.pytorch import seed_everything
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch_geometric.data import Batch

from molflt.data.structures import Structures
from molflt.data.structures.base import Part
from molflt.data.structures.datamodule import IS2REData
from molflt.data.structures.sources import split_path
from molflt.evaluation.predictions import infer, open_structures
from molflt.files import save_tensors, write_atomically
from molflt.graph import EnergyRegressor
from molflt.tasks.base import Task
from molflt.tasks.is2re import IS2RETask
from molflt.training.config import plain
from molflt.training.start import build_parser
from peers_kit.models import FITS, NETS

Job = dict[str, Any]  # all settings of a result; see `pool.job_of`
WEIGHTS = ".safetensors"  # weights of a trained model, next to its result
Energies = dict[str, NDArray[np.float64]]  # energies in eV by split


class Diverged(Exception):
    """Raised if the loss or the gradient is not finite."""


def part_of(whole: Structures, fraction: float, seed: int) -> Structures:
    """Returns a random fraction of a data set; smaller fractions are subsets of larger ones."""
    if fraction == 1.0:
        return whole
    order = np.random.default_rng([seed, 1]).permutation(len(whole))
    kept = np.sort(order[: max(1, round(fraction * len(whole)))])
    return Part(whole, kept)


def run_job(job: Job, out: Path) -> None:
    """Trains a model and writes its errors and predictions as JSON."""
    torch.set_num_threads(1)
    # The tails of SchNet's Gaussians are denormal numbers, which make it five times slower.
    torch.set_flush_denormal(True)
    seed_everything(job["seed"], verbose=False)
    budget = CpuBudget(60 * job["minutes"])
    root = Path(job["data"])
    sets = {split: open_structures(split_path(root, split), False) for split in job["splits"]}
    if not np.isfinite(sets[job["splits"][0]].y_relaxed).any():
        raise ValueError(f"{root}: split {job['splits'][0]}: expected labels; got none")
    run = _fit if job["model"] in FITS else _train
    energies, about = run(job, sets, budget, out)
    result = {
        "job": job,
        **{"steps": None, "parameters": None, "diverged": None, **about},
        "cpu_seconds": budget.used,
        "longest_step_seconds": budget.longest,
        "peak_memory_MB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6,
        "splits": {
            split: {
                **_metrics(energies.get(split), dataset.y_relaxed),
                "n": int(np.isfinite(dataset.y_relaxed).sum()),
                "sid": [int(dataset[i].sid) for i in range(len(dataset))],
                # 1e-6 eV is finer than the precision of float32.
                "energy_eV": energies[split].round(6).tolist() if energies else None,
            }
            for split, dataset in sets.items()
        },
    }
    write_atomically(out, (json.dumps(result, allow_nan=False) + "\n").encode())


def _fit(
    job: Job, sets: Mapping[str, Structures], budget: CpuBudget, out: Path
) -> tuple[Energies, dict[str, Any]]:
    """Fits a model without gradients; returns energies by split, and entries of the result."""
    model, first = FITS[job["model"]](seed=job["seed"]), job["splits"][0]
    whole = open_structures(split_path(Path(job["data"]), "train"), False)
    with budget.running():
        model.fit(part_of(whole, job["fraction"], job["seed"]))
    energies = {split: model.predict(dataset) for split, dataset in sets.items()}
    errors = _metrics(energies[first], sets[first].y_relaxed)
    point = {"cpu_seconds": budget.used, "step": 0, **errors}
    return energies, {"chosen": model.chosen, "curve": [point]}


def _train(
    job: Job, sets: Mapping[str, Structures], budget: CpuBudget, out: Path
) -> tuple[Energies, dict[str, Any]]:
    """Trains a network and writes its weights next to `out`; returns the same as `_fit`."""
    task, data, options = prepare(job)
    count = sum(p.numel() for p in task.model.parameters() if p.requires_grad)
    about = {"chosen": {"lr": task.lr}, "parameters": count, "curve": []}
    first = job["splits"][0]

    def predict(model: nn.Module, split: str) -> NDArray[np.float64]:
        return infer(model, sets[split], data.batch_size, split).energy

    def evaluate(model: nn.Module) -> dict[str, Any]:
        return _metrics(predict(model, first), sets[first].y_relaxed)

    try:
        model, curve = train(task, data, budget, options, job["evaluations"], evaluate)
    except Diverged as error:
        return {}, {**about, "diverged": str(error)}
    # Some modules of SchNet share weights, which safetensors does not support.
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    save_tensors(out.with_suffix(WEIGHTS), weights, {})
    energies = {split: predict(model, split) for split in sets}
    return energies, {**about, "steps": budget.steps, "curve": curve}


def net_of(job: Job, result: Path) -> nn.Module:
    """Returns the trained model of a job."""
    model = prepare(job)[0].model
    model.load_state_dict(load_file(result.with_suffix(WEIGHTS)))
    return model


def averaged(model: nn.Module, decay: float) -> AveragedModel:
    """Returns a model with averaged weights; the average covers at most a tenth of the steps.

    Slow networks may complete only 400 steps. With a fixed decay of 0.999, the initial weights
    would then make up two thirds of the average.
    """

    def average(kept: tuple[Tensor, ...], new: tuple[Tensor, ...], count: Tensor | int) -> None:
        warm = (1 + int(count)) / (10 + int(count))
        get_ema_multi_avg_fn(min(decay, warm))(kept, new, count)

    return AveragedModel(model, multi_avg_fn=average, use_buffers=False)


def train(
    task: Task,
    data: IS2REData,
    budget: CpuBudget,
    options: Mapping[str, Any],
    evaluations: int = 0,
    evaluate: Callable[[nn.Module], dict[str, Any]] = lambda model: {},
) -> tuple[nn.Module, list[dict[str, float]]]:
    """Trains until the budget is used; the time of evaluations is not counted.

    Returns the model with its last or averaged weights, and its errors at `evaluations` times that
    are evenly spaced over the budget.
    """
    due, curve, decay = 1, [], options["ema_decay"]
    with budget.running():
        optimizer, batches = task.optimizer(), iter(data.train_dataloader())
        average = None if decay is None else averaged(task.model, decay)
    model = task.model if average is None else average.module
    while budget.used < budget.seconds:
        with budget.running():
            task.model.train()
            if task.redraw_every and budget.steps and budget.steps % task.redraw_every == 0:
                seed = np.random.SeedSequence([task.seed, budget.steps]).generate_state(1)[0]
                task.model.redraw_(torch.Generator().manual_seed(int(seed)))
            _learn(task, next(batches), optimizer, budget, options)
            if average is not None:
                average.update_parameters(task.model)
        budget.steps += 1
        if budget.share * evaluations >= due:
            due = int(budget.share * evaluations) + 1
            point = {"cpu_seconds": budget.used, "step": budget.steps}
            curve.append(point | evaluate(model.eval()))
    return model.eval(), curve


def _learn(
    task: Task,
    batch: Batch,
    optimizer: torch.optim.Optimizer,
    budget: CpuBudget,
    options: Mapping[str, Any],
) -> None:
    """Runs one training step; the learning rate depends on the used fraction of the budget."""
    share, span, limit = budget.share, options["max_steps"], options["gradient_clip"]
    for group in optimizer.param_groups:
        first = group.setdefault("initial_lr", group["lr"])  # includes task.lr_factors
        group["lr"] = first * task.lr_factor(int(share * span), span)
    optimizer.zero_grad()
    loss, _ = task.loss(batch, share)
    loss.backward()
    most = float("inf") if limit is None else limit
    norm = nn.utils.clip_grad_norm_(task.model.parameters(), most)
    if not (bool(loss.isfinite()) and bool(norm.isfinite())):
        raise Diverged(f"loss {loss.item()}, gradient norm {norm.item()} at step {budget.steps}")
    optimizer.step()


def prepare(job: Job) -> tuple[IS2RETask, IS2REData, dict[str, Any]]:
    """Returns the task with its model, the data, and the options of the trainer."""
    config = config_of(job["model"], job["words"])
    net = NETS.get(job["model"])
    if job["lr"] is not None:
        config["task"]["lr"] = job["lr"]
    # The budget does not include the CPU time of workers.
    own = {"root": Path(job["data"]), "train_split": "train", "workers": 0}
    data = IS2REData(**{**config["data"], **own})
    data.seed = job["seed"]
    data.splits["val"] = job["splits"][0]
    data.setup()
    data.datasets["train"] = part_of(data.datasets["train"], job["fraction"], job["seed"])
    model = EnergyRegressor(**config["model"]) if net is None else net.make()
    model.subsurface = config["model"]["subsurface"]  # all networks use the same atoms
    task = IS2RETask(model, seed=job["seed"], **config["task"])
    task.prepare(data)
    return task, data, config["trainer"]


def config_of(model: str, words: list[str]) -> dict[str, Any]:
    """Returns all options by section; `words` take precedence over a peer's usual options."""
    net = NETS.get(model)
    if net is None:
        return options_of(words)
    usual = [f"--task.lr={net.lr}"]
    usual += [] if net.batch_size is None else [f"--data.batch_size={net.batch_size}"]
    # The first words are --config FILE; options after the file take precedence over it.
    config = options_of([*words[:2], *usual, *words[2:]])
    if config["model"]["subsurface"] == "near":
        raise ValueError("model.subsurface: expected true or false for these networks; got near")
    config["task"]["rotate"] = "none"  # energies of these networks are invariant
    if config["model"]["readout"] == "adsorbate":  # for which molflt fits references by default
        config["task"]["references"] = config["task"]["references"] or "fit"
    return config


def options_of(words: list[str]) -> dict[str, Any]:
    """Returns all options by section; raises ValueError for values that comparisons exclude."""
    found = plain(build_parser(words).parse_args(["--run=none", *words]).as_dict())
    given = {"recipe": found["recipe"], "init": found["init"]}
    given |= {key: found["trainer"][key] for key in ("precision", "accumulate", "patience")}
    given["train_split"] = found["data"].get("train_split") or "train"
    usual = ("is2re", None, "32-true", 1, None, "train")
    for (key, value), known in zip(given.items(), usual, strict=True):
        if value != known:
            raise ValueError(f"{key}: expected {known} in a comparison of peers; got {value}")
    return found


def _metrics(energy: NDArray[np.float64] | None, target: NDArray[np.float64]) -> dict[str, Any]:
    """Computes MAE and EwT, which are None without predictions or labels."""
    known, names = np.isfinite(target), ("mae_eV", "ewt_percent")
    if energy is None or not known.any():
        return dict.fromkeys(names)
    pair = (torch.from_numpy(values[known]) for values in (energy, target))
    found = IS2RETask.sums.of(*pair).metrics()
    return {name: found[name] for name in names}
