"""Evaluation of learned optimizers for coordinates and populations on unseen problems."""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Adam, Optimizer
from tqdm import tqdm

from molflt import plots
from molflt.data.optimizers import generator_of, problem_seeds
from molflt.evaluation.common import draw_encoding
from molflt.evaluation.results import Evaluation, Results, align, write_csv
from molflt.files import shown
from molflt.memory import within_memory
from molflt.optimizers import functions as objectives
from molflt.optimizers.coordinate import AttentionMemory, CoordinateOptimizer
from molflt.optimizers.functions import FAMILIES, HALF_WIDTH, Functions
from molflt.optimizers.learned import LearnedOptimizer
from molflt.optimizers.population import PopulationModel, Populations
from molflt.optimizers.problems import UNSEEN, Problem, image_problems
from molflt.optional import require
from molflt.tasks.optimizers import SMALLEST
from molflt.training.config import Config

_RATES = tuple(round(10 ** (-4 + i / 3), 6) for i in range(10))  # 1e-4 to 0.1
_END = 0.1  # fraction of the steps, at the end, over which the final loss is averaged
_ROWS = 200  # maximum number of intervals of a curve in curves.csv
_REACH = 200  # steps in the figure of the encoding
_POINTS = 100  # points in a curve of best values
_CMA_STEP = 2.0  # initial step size of CMA-ES, usual for BBOB's domain [-5, 5]

_Curve = NDArray[np.float64]  # of one or more runs, against the step or the evaluation
_ProblemOf = Callable[[int, Tensor], Problem]  # of a seed and a tensor with dtype and device
_OptimizerOf = Callable[[list[Tensor]], Optimizer]
_Search = Callable[[Functions, list[int], int], _Curve]  # of functions, seeds, evaluations


class Raced(NamedTuple):
    """Loss curves of an optimizer on a task."""

    curves: _Curve  # (repeats, steps), loss before each step; infinite after divergence
    setting: str = ""  # tuned learning rate, shown in tables


def evaluate(
    run: Path,
    model: CoordinateOptimizer,
    config: Config,
    out: Path,
    steps: int = 500,
    repeats: int = 3,
    tasks: list[str] | None = None,
    data: Path | None = None,
    rates: list[float] | None = None,
) -> Evaluation:
    """Evaluates a learned optimizer: loss curves on unseen tasks, compared with Adam.

    For each task, Adam uses the learning rate with the smallest final loss in the same repeats. The
    tasks are the Rosenbrock function, a matrix factorization, a network that is deeper and larger
    than the training networks and, with `data`, a dense and a convolutional network on images.
    Writes curves.csv (mean losses over up to 200 intervals of steps), optimizations.png and, with a
    relative encoding, encoding.png.

    Args:
        steps: number of steps of each optimization.
        repeats: number of optimizations of each task, with different seeds.
        tasks: any of rosenbrock, factorization, deep_network, image_network and image_convolutions;
            by default all, with the image tasks only if `data` is set.
        data: folder of images with a subfolder for each class, or an idx file of images.
        rates: learning rates to try with Adam, by default 10 rates from 1e-4 to 0.1; an empty list
            omits Adam.

    Returns:
        Per task: final_loss, the geometric mean over repeats of the mean loss of the last 10 % of
        the steps, and final_loss_sd, the standard deviation over repeats of the decimal logarithm
        of this mean loss; with Adam, also adam_final_loss, adam_final_loss_sd and adam_lr.
    """
    rates = list(_RATES) if rates is None else rates
    problems = tasks_of(tasks, data)
    like = next(model.parameters())
    races: dict[str, dict[str, Raced]] = {}  # by task and optimizer
    state = f"{run}: the optimizer's state"
    with within_memory(lambda: state, "choose smaller tasks with --tasks"):
        for task, problem_of in tqdm(problems.items(), desc="tasks", leave=False, disable=None):
            learned = partial(LearnedOptimizer, model=model)
            races[task] = {run.resolve().name: _race(problem_of, learned, steps, repeats, like)}
            if rates:
                races[task]["Adam"] = tuned_adam(problem_of, steps, repeats, like, rates)
    write_csv(out / "curves.csv", curve_rows(races))
    curves = {
        task: {name: _intervals(raced.curves)[1] for name, raced in by_name.items()}
        for task, by_name in races.items()
    }
    plots.loss_curves(curves, out / "optimizations.png", steps)
    if isinstance(memory := model.memory, AttentionMemory):
        position, scale = memory.stack.position, memory.position_scale
        draw_encoding(position, scale, _REACH + 1, out / "encoding.png", "steps")
    results: Results = {}
    lines = [("task", "optimizer", "tuned", "final loss", "sd of log10")]
    for task, by_name in races.items():
        ends = {name: final_loss(raced.curves) for name, raced in by_name.items()}
        results[task] = _metrics(ends, "final_loss")
        if "Adam" in by_name:
            results[task]["adam_lr"] = float(by_name["Adam"].setting)
        for name, (loss, sd) in ends.items():
            lines.append((task, name, by_name[name].setting or "-", f"{loss:.4g}", _shown(sd)))
    note = "final loss: mean of the last 10 % of the steps, geometric mean over repeats"
    text = f"{align(lines, text_columns=2)}\n\n{note}"
    return Evaluation(results, f", {steps:,} steps, {repeats} repeats\n\n{text}\n")


def tasks_of(names: Sequence[str] | None, data: Path | None) -> dict[str, _ProblemOf]:
    """Returns tasks by name; None means all tasks, with image tasks only if `data` is set."""
    of_images = {} if data is None else image_problems(data)
    problems = {**UNSEEN, **of_images}
    names = names or list(problems)
    for name in names:
        if name not in problems:
            known = f"{', '.join(UNSEEN)} or, with --data, image_network or image_convolutions"
            raise ValueError(f"--tasks {shown(name)}: expected one or more of {known}")
    if data is not None and of_images.keys().isdisjoint(names):
        raise ValueError(f"--data {data} has no effect on {', '.join(names)}; omit it")
    return {name: problems[name] for name in names}


def _race(
    problem_of: _ProblemOf, optimizer_of: _OptimizerOf, steps: int, repeats: int, like: Tensor
) -> Raced:
    curves = np.full((repeats, steps), np.inf)
    for curve, seed in zip(curves, problem_seeds("test", repeats), strict=True):
        problem = problem_of(seed, like)
        theta = nn.Parameter(problem.start.detach().clone())
        optimizer = optimizer_of([theta])
        for step in range(steps):
            optimizer.zero_grad()
            with torch.enable_grad():
                loss = problem.loss(theta, step)
                loss.backward()
            assert theta.grad is not None
            if not bool(loss.isfinite()) or not bool(theta.grad.isfinite().all()):
                break
            curve[step] = loss.item()
            optimizer.step()
    return Raced(curves)


def tuned_adam(
    problem_of: _ProblemOf, steps: int, repeats: int, like: Tensor, rates: Iterable[float] = _RATES
) -> Raced:
    """Returns the loss curves of Adam with the learning rate that has the smallest final loss."""
    races = (
        _race(problem_of, partial(Adam, lr=lr), steps, repeats, like)._replace(setting=f"{lr:g}")
        for lr in rates
    )
    return min(races, key=lambda raced: final_loss(raced.curves)[0])


def final_loss(curves: _Curve) -> tuple[float, float]:
    """Returns the geometric mean of the final losses and the standard deviation of their log10."""
    count = max(1, round(_END * curves.shape[1]))
    mean, sd = _mean_and_sd(np.log10(np.maximum(curves[:, -count:].mean(axis=1), 1e-30)))
    return (float(10**mean), sd) if math.isfinite(mean) else (math.inf, math.nan)


def _metrics(ends: Mapping[str, tuple[float, float]], name: str) -> dict[str, float | None]:
    """Returns means and deviations; the keys of all but the first optimizer begin with its name."""
    metrics: dict[str, float | None] = {}
    for number, (optimizer, (mean, sd)) in enumerate(ends.items()):
        key = name if number == 0 else f"{optimizer.lower()}_{name}"
        metrics |= {key: mean, f"{key}_sd": None if math.isnan(sd) else sd}
    return metrics


def _shown(sd: float) -> str:
    return "-" if math.isnan(sd) else f"{sd:.2f}"


def _intervals(curves: _Curve) -> tuple[_Curve, _Curve]:
    """Divides curves into n intervals; returns middle steps (n,) and mean losses (repeats, n)."""
    steps = curves.shape[1]
    edges = np.linspace(0, steps, min(steps, _ROWS) + 1).round().astype(int)
    means = [curves[:, a:b].mean(axis=1) for a, b in itertools.pairwise(edges)]
    return (edges[:-1] + edges[1:] - 1) / 2, np.stack(means, axis=1)


def curve_rows(races: Mapping[str, Mapping[str, Raced]]) -> list[dict[str, Any]]:
    """Returns the rows of curves.csv; `races` contains loss curves by task and optimizer."""
    rows: list[dict[str, Any]] = []
    for task, by_name in races.items():
        for name, raced in by_name.items():
            label = {"task": task, "optimizer": name, "tuned": raced.setting}
            middle, means = _intervals(raced.curves)
            for repeat, losses in enumerate(means):
                pairs = zip(middle, losses, strict=True)
                rows += [{**label, "repeat": repeat, "step": s, "loss": x} for s, x in pairs]
    return rows


def evaluate_population(
    run: Path,
    model: PopulationModel,
    config: Config,
    out: Path,
    functions: list[str] | None = None,
    evaluations: int = 5000,
    runs: int = 10,
    dimension: int | None = None,
    members: int | None = None,
    baselines: list[Literal["cma-es", "random"]] | None = None,
) -> Evaluation:
    """Evaluates a population optimizer, with CMA-ES and random search as baselines.

    Writes best_values.csv and best_values.png. Each run uses its own shifted and rotated function,
    which is the same for all optimizers. Populations start from N(0, 2.5^2), as in training. CMA-ES
    (the package cma with its defaults, stopped only by the number of evaluations) starts from a
    uniformly distributed point in [-5, 5]^d with step size 2. Random search draws uniformly
    distributed points from the same domain.

    Args:
        functions: keys of `molflt.optimizers.functions.FAMILIES`; by default the families that
            training does not use: ellipsoid, rosenbrock, ackley, griewank and levy.
        evaluations: number of function evaluations per run of an optimizer.
        runs: number of functions of each family.
        dimension: dimension of the functions; defaults to the value used in training.
        members: size of the population; defaults to the value used in training.
        baselines: optimizers to compare with, by default cma-es and random; an empty list omits
            them.

    Returns:
        Per function: log10_best and log10_best_sd, the mean and standard deviation over runs of
        log10 of the best value; the same for each baseline, such as cma-es_log10_best; and n, the
        number of runs.
    """
    size: Any = config["task"]["members"] if members is None else members
    d = model.dimension if dimension is None else dimension
    if evaluations < size:
        raise ValueError(f"--evaluations must be at least {size}; got {evaluations}")
    others = list(BASELINES) if baselines is None else list(dict.fromkeys(baselines))
    if "cma-es" in others:
        require("cma", "CMA-ES", "bench")  # fails before anything is computed
    searches: dict[str, _Search] = {_label(config): partial(_by_model, model.of_dimension(d), size)}
    searches |= {name: BASELINES[name] for name in others}
    seeds = [*problem_seeds("test", runs)]
    counts = np.unique(np.linspace(size, evaluations, _POINTS).astype(int))
    curves: dict[str, dict[str, _Curve]] = {}
    rows: list[dict[str, object]] = []
    for family in tqdm(dict.fromkeys(functions or objectives.UNSEEN), leave=False, disable=None):
        drawn = Functions.draw(family, d, [generator_of(seed, 0) for seed in seeds])
        values = {name: search(drawn, seeds, evaluations) for name, search in searches.items()}
        for name, x in values.items():  # NaN from a diverged model is not an improvement
            best = np.minimum.accumulate(np.where(np.isnan(x), np.inf, x), axis=1)[:, counts - 1]
            curves.setdefault(family, {})[name] = best = np.log10(np.maximum(best, SMALLEST))
            for i, seed in enumerate(seeds):
                label = {"function": family, "optimizer": name, "run": i, "seed": seed}
                pairs = zip(counts.tolist(), best[i].tolist(), strict=True)
                rows += [{**label, "evaluations": n, "log10_best": value} for n, value in pairs]
    write_csv(out / "best_values.csv", rows)
    plots.best_values(curves, counts.astype(float), out / "best_values.png", runs)
    results, lines = {}, [("function", *searches)]
    for family, by_name in curves.items():
        ends = {name: _mean_and_sd(values[:, -1]) for name, values in by_name.items()}
        results[family] = {**_metrics(ends, "log10_best"), "n": runs}
        title = f"{family} (trained on)" if family == next(iter(FAMILIES)) else family
        lines.append((title, *(f"{mean:.2f} ± {_shown(sd)}" for mean, sd in ends.values())))
    note = (
        f"log10 of the best of {evaluations:,} values in {d} dimensions, mean ± standard deviation "
        f"over {runs} runs; the minimum is 0; values below -12 count as -12"
    )
    return Evaluation(results, f"\n\n{align(lines)}\n\n{note}\n")


def _label(config: Config) -> str:
    """Returns the name of a model in tables and figures."""
    masked = config["model"]["position"] != "none"
    if config["model"]["mixing"] == "softmax":
        return "softmax + mask" if masked else "softmax"
    return "FLT" if masked else "Performer"


@torch.no_grad()
def _by_model(
    model: PopulationModel, members: int, functions: Functions, seeds: list[int], evaluations: int
) -> _Curve:
    """Returns the values (runs, evaluations) of the learned optimizer, with all runs in a batch."""
    populations = Populations(model, seeds, members)
    functions = functions.to(populations.device)
    values: list[Tensor] = []
    for _ in range(-(-evaluations // members)):
        values.append(functions(populations.state.position))
        populations.tell(values[-1])
    return torch.cat(values, dim=1)[:, :evaluations].cpu().numpy()


def _cma_es(functions: Functions, seeds: list[int], evaluations: int) -> _Curve:
    """Runs CMA-ES with its defaults on one function after another; `ask` and `tell` never stop."""
    cma = require("cma", "CMA-ES", "bench")
    by_run = []
    for i, seed in enumerate(seeds):
        generator = generator_of(seed, 2)
        function = functions.only(i)
        start = _uniform(1, functions, generator)[0].numpy()
        number = int(torch.randint(1, 2**31, (1,), generator=generator))
        strategy = cma.CMAEvolutionStrategy(start, _CMA_STEP, {"seed": number, "verbose": -9})
        values: list[float] = []
        while len(values) < evaluations:
            points = strategy.ask()
            new_values = function(torch.as_tensor(np.array(points))[None])[0].tolist()
            strategy.tell(points, new_values)
            values += new_values
        by_run.append(values[:evaluations])
    return np.array(by_run)


def _random(functions: Functions, seeds: list[int], evaluations: int) -> _Curve:
    draws = [_uniform(evaluations, functions, generator_of(seed, 3)) for seed in seeds]
    return functions(torch.stack(draws)).numpy()


BASELINES: dict[str, _Search] = {"cma-es": _cma_es, "random": _random}
"""Baselines by name; each returns all values (runs, evaluations) in the order of evaluation."""


def _uniform(count: int, functions: Functions, generator: torch.Generator) -> Tensor:
    """Draws points (count, d) that are uniformly distributed in the search domain."""
    d = functions.minimizer.shape[1]
    return HALF_WIDTH * (2 * torch.rand(count, d, generator=generator, dtype=torch.float64) - 1)


def _mean_and_sd(values: NDArray[np.float64]) -> tuple[float, float]:
    defined = len(values) > 1 and bool(np.isfinite(values).all())
    return float(values.mean()), float(values.std(ddof=1)) if defined else math.nan
