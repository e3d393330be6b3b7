"""One job: a model, a seed, a share of the training set and a budget; what comes of it."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

import numpy as np
import torch
from lightning.pytorch import seed_everything
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor, nn

from molflt.data.structures import Structures
from molflt.data.structures.datamodule import IS2REData
from molflt.data.structures.sources import split_path
from molflt.evaluation.predictions import infer, open_structures
from molflt.files import save_tensors, write_atomically
from molflt.graph import EnergyRegressor
from molflt.tasks.is2re import IS2RETask
from molflt.training.config import plain
from molflt.training.parser import build_parser
from peers_kit.models import FITS, NETS, load
from peers_kit.training import CpuBudget, Diverged, Point, Settings, train

_Metrics = dict[str, Any]
WEIGHTS = ".safetensors"  # next to the result
# of the parts of a configuration; what else they have belongs to other loops and other data
USED = {
    "data": ("train_split", "batch_size", "max_atoms", "bucket", "skip_bad"),
    "trainer": (
        *("max_steps", "precision", "gradient_clip", "ema_decay"),
        *("accumulate", "patience"),  # refused wherever they come from
    ),
}


class Job(TypedDict):
    """Identity of a job, as stored in its result."""

    model: str
    words: list[str]
    """options of `molflt train`"""
    digests: dict[str, str]
    """sha256 of the files that it reads"""
    data: str
    splits: list[str]
    """to predict; the curve is that of the first one"""
    seed: int
    minutes: float
    fraction: float
    lr: float | None
    """None: the usual one"""
    evaluations: int


class Part(Structures):
    """Some structures of a data set, by their indices."""

    def __init__(self, whole: Structures, indices: NDArray[np.int64]) -> None:
        super().__init__(whole.path)
        self.whole = whole
        self.indices = indices

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Any:
        return self.whole[int(self.indices[index])]

    @property
    def natoms(self) -> NDArray[np.int64]:
        return self.whole.natoms[self.indices]

    @property
    def y_relaxed(self) -> NDArray[np.float64]:
        return self.whole.y_relaxed[self.indices]


def part_of(whole: Structures, fraction: float, seed: int) -> Structures:
    """A share of a data set, drawn by the seed alone; a smaller share lies in a larger one."""
    if fraction == 1.0:
        return whole
    order = np.random.default_rng([seed, 1]).permutation(len(whole))
    return Part(whole, np.sort(order[: max(1, round(fraction * len(whole)))]))


class Outcome(NamedTuple):
    """Result of a job."""

    energies: dict[str, NDArray[np.float64]]
    """by split"""
    curve: list[Point]
    steps: int | None
    parameters: int | None
    chosen: Mapping[str, float]
    diverged: str | None = None
    weights: Mapping[str, Tensor] | None = None


def run_job(job: Job, out: Path) -> None:
    """Does a job and writes its result, a JSON file, and the weights of a net next to it."""
    start = time.perf_counter()
    torch.set_num_threads(1)
    # Tails of SchNet's Gaussians are denormal numbers, with which a step takes five times as long
    torch.set_flush_denormal(True)
    seed_everything(job["seed"], verbose=False)
    budget = CpuBudget(60 * job["minutes"])
    root = Path(job["data"])
    sets = {split: open_structures(split_path(root, split), False) for split in job["splits"]}
    if not np.isfinite(sets[job["splits"][0]].y_relaxed).any():
        raise ValueError(
            f"{root}: split {job['splits'][0]}: expected labels for the curve of errors; got none"
        )
    done = (_fit if job["model"] in FITS else _train)(job, sets, budget)
    result = {
        "job": job,
        "parameters": done.parameters,
        "steps": done.steps,
        "cpu_seconds": budget.used,
        "longest_step_seconds": budget.longest,
        "wall_seconds": time.perf_counter() - start,
        "peak_memory_MB": peak_memory(),
        "chosen": dict(done.chosen),
        "diverged": done.diverged,
        "curve": [point._asdict() for point in done.curve],
        "splits": {
            split: {
                **_metrics(done.energies.get(split), dataset.y_relaxed),
                "sid": [int(dataset[i].sid) for i in range(len(dataset))],
                # 1e-6 eV, a tenth of what float32 gives, keeps results small
                "energy_eV": done.energies[split].round(6).tolist() if done.energies else None,
            }
            for split, dataset in sets.items()
        },
    }
    if done.weights is not None:
        save_tensors(out.with_suffix(WEIGHTS), done.weights, {})
    write_atomically(out, (json.dumps(result, allow_nan=False) + "\n").encode())


def _fit(job: Job, sets: Mapping[str, Structures], budget: CpuBudget) -> Outcome:
    """Jobs without gradients."""
    model = load(FITS[job["model"]])(seed=job["seed"])
    whole = open_structures(split_path(Path(job["data"]), "train"), False)
    with budget.running():
        model.fit(part_of(whole, job["fraction"], job["seed"]))
    energies = {split: model.predict(dataset) for split, dataset in sets.items()}
    first = job["splits"][0]
    found = _metrics(energies[first], sets[first].y_relaxed)
    point = Point(budget.used, 0, found["mae_eV"], found["ewt_percent"])
    return Outcome(energies, [point], None, None, model.chosen)


def _train(job: Job, sets: Mapping[str, Structures], budget: CpuBudget) -> Outcome:
    """Jobs that train step by step."""
    task, data, settings = prepare(job)
    parameters = sum(p.numel() for p in task.model.parameters() if p.requires_grad)
    first = job["splits"][0]

    def predict(model: nn.Module, split: str) -> NDArray[np.float64]:
        return infer(model, sets[split], data.batch_size, split).energy

    def evaluate(model: nn.Module) -> tuple[float, float]:
        found = _metrics(predict(model, first), sets[first].y_relaxed)
        return found["mae_eV"], found["ewt_percent"]

    try:
        model, steps, curve = train(task, data, budget, settings, evaluate)
    except Diverged as error:
        return Outcome({}, [], None, parameters, {"lr": task.lr}, str(error))
    energies = {split: predict(model, split) for split in sets}
    # SchNet's modules share weights, which safetensors refuses
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    return Outcome(energies, curve, steps, parameters, {"lr": task.lr}, weights=weights)


def net_of(job: Job, result: Path) -> nn.Module:
    """The trained net of a job, in evaluation mode."""
    path = result.with_suffix(WEIGHTS)
    if not path.is_file():
        raise FileNotFoundError(
            f"{path}: no weights of {job['model']}; remove {result.name} to train it again"
        )
    model = prepare(job)[0].model
    model.load_state_dict(load_file(path))
    return model.eval()


def prepare(job: Job) -> tuple[IS2RETask, IS2REData, Settings]:
    """Task with its model, prepared, and data, set up."""
    config = config_of(job["model"], job["words"])
    net = NETS.get(job["model"])
    if job["lr"] is not None:
        config["task"]["lr"] = job["lr"]
    # no workers, whose CPU time the budget would not see
    own = {"root": Path(job["data"]), "train_split": "train", "workers": 0}
    data = IS2REData(**{**config["data"], **own})
    data.seed = job["seed"]
    data.splits["val"] = job["splits"][0]
    data.setup()
    data.datasets["train"] = part_of(data.datasets["train"], job["fraction"], job["seed"])
    model = EnergyRegressor(**config["model"]) if net is None else load(net.make)()
    model.subsurface = config["model"]["subsurface"]  # the same atoms for all
    task = IS2RETask(model, seed=job["seed"], **config["task"])
    task.prepare(data)
    limits = (config["trainer"][key] for key in ("max_steps", "gradient_clip", "ema_decay"))
    return task, data, Settings(*limits, job["evaluations"])


def config_of(model: str, words: list[str]) -> dict[str, Any]:
    """Options by part for a model: of a peer its usual ones, where words name no others."""
    config = options_of(words)
    if net := NETS.get(model):
        config["task"]["rotate"] = "none"  # no turn changes these nets' energies
        # The words do not say what they name: a file may, or --task '{lr: 0.1}'. Impossible values
        # behind --config are still there if nothing behind them does.
        probed = _parsed([*words[:2], "--task.lr=-1", "--data.batch_size=-1", *words[2:]])
        if probed["task"]["lr"] == -1:
            config["task"]["lr"] = net.lr
        if net.batch_size is not None and probed["data"]["batch_size"] == -1:
            config["data"]["batch_size"] = net.batch_size
    return config


def options_of(words: list[str]) -> dict[str, Any]:
    """Options of `molflt train` by part; refuses those that have no effect in a comparison.

    What files say of such options may stay, where it does not change what is trained.
    """
    found = _parsed(words)
    data, trainer = found["data"], found["trainer"]
    idle = {
        "init": found["init"] is not None,
        "data.train_split": data.get("train_split") not in (None, "train"),
        "trainer.accumulate": trainer["accumulate"] != 1,
        "trainer.patience": trainer["patience"] is not None,
    }
    # the words themselves do not say it: the parser knows --trainer '{devices: 2}' too
    pairs = itertools.pairwise(["", *words])
    files = [b for a, b in pairs if "--config" in (a, b) or b.startswith("--config=")]
    without, now = _without_effect(_parsed(files)), _without_effect(found)
    idle |= {name: name in without and now[name] != without[name] for name in now}
    if named := [name for name, is_given in idle.items() if is_given]:
        raise ValueError(f"peers have no {', '.join(named)}; expected none; leave it out")
    if found["recipe"] != "is2re" or trainer["precision"] != "32-true":
        raise ValueError(
            "peers are compared on energies, with recipe is2re and trainer.precision 32-true; got "
            f"{found['recipe']} and {trainer['precision']}; choose another --config"
        )
    return found


def _parsed(words: list[str]) -> dict[str, Any]:
    """All options by part; the folder, by default named after the time, is the same each time."""
    found: Any = plain(build_parser(words).parse_args(["--run=none", *words]).as_dict())
    return found


def _without_effect(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options that comparisons set themselves or do not use."""
    parts = {key: options[key] for key in ("run", "seed", "resume")}
    for part, used in USED.items():
        own = options[part].items()
        parts |= {f"{part}.{key}": value for key, value in own if key not in used}
    return parts


def _metrics(energy: NDArray[np.float64] | None, target: NDArray[np.float64]) -> _Metrics:
    """MAE and EwT of systems with a label, and their number; no errors without predictions."""
    known = np.isfinite(target)
    if energy is None or not known.any():
        return {"mae_eV": None, "ewt_percent": None, "n": int(known.sum())}
    pair = (torch.from_numpy(values[known]) for values in (energy, target))
    found = IS2RETask.sums.of(*pair).metrics()
    return {key: found[key] for key in ("mae_eV", "ewt_percent")} | {"n": int(known.sum())}


def peak_memory() -> float:
    """Most memory that this process has had so far, MB."""
    try:
        text = Path("/proc/self/status").read_text()
        return int(text.partition("VmHWM:")[2].split()[0]) * 1024 / 1e6
    except OSError:  # not Linux
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
