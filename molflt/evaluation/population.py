"""Evaluation of learned population optimizers: best values on unseen functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm

from molflt import plots
from molflt.data.problems import ProblemSeeds, generator_of
from molflt.evaluation.results import Evaluation, align, begin_results, write_csv, written
from molflt.optimizers.functions import FAMILIES, HALF_WIDTH, UNSEEN, Functions
from molflt.optimizers.population import Populations
from molflt.optimizers.population_model import PopulationModel
from molflt.training.config import Config

__all__ = ["BASELINES", "evaluate"]

_FILES = ("best_values.csv", "best_values.png")
_SMALLEST = 1e-12  # smaller best values are rounding errors
_POINTS = 100  # points in a curve
_CMA_STEP = 2.0  # initial step size of CMA-ES, usual for BBOB's domain [-5, 5]

_Values = NDArray[np.float64]
_Search = Callable[[Functions, list[int], int], _Values]


def evaluate(
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

    Writes best_values.csv and best_values.png. Each run has its own shifted and rotated function,
    which is the same for all optimizers. Populations start from N(0, 2.5^2), as in training. CMA-ES
    (the package cma with its defaults, stopped only by the number of evaluations) starts from a
    uniform point in [-5, 5]^d with step size 2. Random search draws uniform points from the same
    domain.

    Args:
        functions: keys of `molflt.optimizers.functions.FAMILIES`; by default those that training
            never uses: ellipsoid, rosenbrock, ackley, griewank and levy.
        evaluations: number of function evaluations in a run of an optimizer.
        runs: number of functions of each kind.
        dimension: dimension of the functions; by default that of training.
        members: size of the population; by default that of training.
        baselines: optimizers to compare with, by default cma-es and random; an empty list omits
            them.

    Returns:
        Per function: log10_best and log10_best_sd, the mean and standard deviation over runs of
        log10 of the best value; the same for each baseline, such as cma-es_log10_best; and n, the
        number of runs.
    """
    trained: Any = config["task"]["members"]
    size = trained if members is None else members
    d = model.dimension if dimension is None else dimension
    for name, value, low in (("evaluations", evaluations, size), ("runs", runs, 1)):
        if value < low:
            raise ValueError(f"--{name} must be at least {low}; got {value}")
    if size < 2 or d < 1:
        raise ValueError(f"--members must be at least 2, --dimension 1; got {size} and {d}")
    wanted = list(BASELINES) if baselines is None else list(dict.fromkeys(baselines))
    if "cma-es" in wanted:
        _cma()  # fails without the package, before anything is computed
    own = _own_name(config)
    searches: dict[str, _Search] = {own: _of_model(model.of_dimension(d), size)}
    searches |= {name: BASELINES[name] for name in wanted}
    problems = ProblemSeeds("test", runs)
    seeds = [int(problems[place]) for place in range(runs)]
    counts = np.unique(np.linspace(size, evaluations, _POINTS).astype(int))
    curves: dict[str, dict[str, _Values]] = {}
    for name in tqdm(dict.fromkeys(functions or UNSEEN), leave=False, disable=None):
        drawn = Functions.draw(name, d, [generator_of(seed, 0) for seed in seeds])
        found = {key: search(drawn, seeds, evaluations) for key, search in searches.items()}
        curves[name] = {key: _best(values)[:, counts - 1] for key, values in found.items()}
    results = {name: _summary(found, own) for name, found in curves.items()}
    rows = _rows(curves, counts, seeds)
    begin_results(out, *_FILES)
    write_csv(out / "best_values.csv", rows)
    plots.best_values(curves, counts.astype(float), out / "best_values.png", runs)
    text = f"\n\n{_table(curves, evaluations, d, runs)}\n"
    return Evaluation(results, text, written(out, *_FILES))


def _own_name(config: Config) -> str:
    """Returns the name of the model in tables."""
    options = config["model"]
    masked, softmax = options["position"] != "none", options["mixing"] == "softmax"
    if softmax:
        return "softmax + mask" if masked else "softmax"
    return "FLT" if masked else "Performer"


def _of_model(model: PopulationModel, members: int) -> _Search:
    """Returns a search with the populations of all runs in one batch."""

    @torch.no_grad()
    def search(functions: Functions, seeds: list[int], evaluations: int) -> _Values:
        populations = Populations(model, seeds, members)
        functions = functions.to(populations.device)
        values: list[Tensor] = []
        for _ in range(-(-evaluations // members)):
            values.append(functions(populations.state.position))
            populations.tell(values[-1])
        found: _Values = torch.cat(values, dim=1)[:, :evaluations].cpu().numpy()
        return found

    return search


def _cma_es(functions: Functions, seeds: list[int], evaluations: int) -> _Values:
    """Runs CMA-ES one run at a time, with its default population size."""
    cma, found = _cma(), []
    never: dict[str, float] = dict.fromkeys(("tolfun", "tolfunhist", "tolfunrel", "tolx"), 0)
    never |= {"tolstagnation": 10**9, "tolflatfitness": 10**9, "tolconditioncov": 1e300}
    for place, seed in enumerate(seeds):
        generator = generator_of(seed, 2)
        function = functions.only(place)
        start = _uniform(1, functions, generator)[0].numpy()
        number = int(torch.randint(1, 2**31, (1,), generator=generator))
        options = {"seed": number, "verbose": -9, "maxfevals": 10 * evaluations, **never}
        strategy = cma.CMAEvolutionStrategy(start, _CMA_STEP, options)
        known: list[float] = []
        while len(known) < evaluations:
            asked = strategy.ask()
            points = torch.as_tensor(np.array(asked))[None]
            values = function(points)[0].tolist()
            strategy.tell(asked, values)
            known += values
        found.append(known[:evaluations])
    return np.array(found)


def _random(functions: Functions, seeds: list[int], evaluations: int) -> _Values:
    """Evaluates points drawn uniformly from the search domain."""
    draws = [_uniform(evaluations, functions, generator_of(seed, 3)) for seed in seeds]
    found: _Values = functions(torch.stack(draws)).numpy()
    return found


BASELINES: dict[str, _Search] = {"cma-es": _cma_es, "random": _random}
"""Searches by name: (functions, seeds, evaluations) -> values in order of evaluation, (runs, .)"""


def _uniform(count: int, functions: Functions, generator: torch.Generator) -> Tensor:
    """Draws uniform points from the search domain, (count, d)."""
    d = functions.minimizer.shape[1]
    return HALF_WIDTH * (2 * torch.rand(count, d, generator=generator, dtype=torch.float64) - 1)


def _cma() -> Any:
    try:
        import cma
    except ImportError:
        raise ModuleNotFoundError(
            "CMA-ES needs the package cma, which is not installed; run: pip install molflt[bench], "
            "or omit it with --baselines random"
        ) from None
    return cma


def _best(values: _Values) -> _Values:
    """Returns log10 of the best value so far, (runs, evaluations)."""
    # NaN of a diverged model never counts as an improvement
    known = np.where(np.isnan(values), np.inf, values)
    found: _Values = np.log10(np.maximum(np.minimum.accumulate(known, axis=1), _SMALLEST))
    return found


def _summary(found: Mapping[str, _Values], own: str) -> dict[str, float | None]:
    """Returns the mean and standard deviation of the final values over runs."""
    summary: dict[str, float | None] = {}
    for name, curves in found.items():
        prefix, last = "" if name == own else f"{name}_", curves[:, -1]
        summary[f"{prefix}log10_best"] = float(last.mean())
        known = len(last) > 1 and bool(np.isfinite(last).all())
        summary[f"{prefix}log10_best_sd"] = float(last.std(ddof=1)) if known else None
    return {**summary, "n": len(found[own])}


def _rows(
    curves: Mapping[str, Mapping[str, _Values]], counts: NDArray[np.int64], seeds: list[int]
) -> list[dict[str, object]]:
    return [
        {
            "function": name,
            "optimizer": optimizer,
            "run": place,
            "seed": seed,
            "evaluations": int(count),
            "log10_best": float(value),
        }
        for name, found in curves.items()
        for optimizer, values in found.items()
        for place, seed in enumerate(seeds)
        for count, value in zip(counts, values[place], strict=True)
    ]


def _table(
    curves: Mapping[str, Mapping[str, _Values]], evaluations: int, dimension: int, runs: int
) -> str:
    names = list(next(iter(curves.values())))
    lines = [("function", *names)]
    for function, found in curves.items():
        last = [found[name][:, -1] for name in names]
        cells = (f"{x.mean():.2f} ± {x.std(ddof=min(1, len(x) - 1)):.2f}" for x in last)
        known = function not in UNSEEN and function == next(iter(FAMILIES))
        lines.append((f"{function} (trained on)" if known else function, *cells))
    note = (
        f"log10 of the best of {evaluations:,} values in {dimension} dimensions, mean ± standard "
        f"deviation over {runs} runs; the minimum is 0; values below -12 count as -12"
    )
    return f"{align(lines)}\n\n{note}"
