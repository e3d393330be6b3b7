"""``molflt evaluate``: evaluates a run as its recipe specifies."""

import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from jsonargparse import ArgumentParser

from molflt.evaluation.results import Evaluation, ResultsOf, write_results
from molflt.files import expect_writable
from molflt.plots import further_formats
from molflt.training.checkpoint import load_run, weights_digest, weights_of
from molflt.training.config import read_config
from molflt.training.recipes import Recipe
from molflt.training.run_folder import draw_curve


def evaluate(
    run: Path,
    checkpoint: str = "best",
    out: Path | None = None,
    device: str = "auto",
    also: list[Path] | None = None,
    pictures: list[Literal["svg", "pdf"]] | None = None,
    **options: object,
) -> dict[str, dict[str, float | None]]:
    """Evaluates a run on splits of its data and writes results.json and figures.

    Energies: MAE, EwT, errors by adsorbate, slab and size, parity plots. Potentials: errors of
    energies, forces and stress. Language: perplexity per token. Masked language: perplexity and
    accuracy of masked tokens. Sentences: the metrics of GLUE. Translation: BLEU, chrF. Images:
    top-1 and top-5 accuracy. Pixels: bits per dimension. Learned optimizers: losses or best values.

    Args:
        run: folder of a training run; its recipe determines the other options.
        checkpoint: best, last, or a safetensors file.
        out: folder to write to; by default the run folder or, with `also`, its subfolder ensemble.
        device: auto, cpu, cuda or cuda:N.
        also: further runs that form an ensemble with `run` (energies only). The ensemble predicts
            the mean, and its spread is calibrated as an uncertainty.
        pictures: additional formats for all figures, including the training curve.
        options: arguments of the recipe's evaluation, such as
            `molflt.evaluation.energies.evaluate`.

    Returns:
        Metrics per split, as in results.json; results_of.json records the weights and the data.
    """
    members = [run, *(also or [])]
    digests = sorted(weights_digest(weights_of(path, checkpoint)) for path in members)
    inputs: ResultsOf = {"checkpoint": checkpoint, "weights": digests}
    if also is None:
        model, config = load_run(run, checkpoint, device)
    else:
        from molflt.evaluation.ensemble import ENSEMBLE, load_ensemble

        model, config = load_ensemble(members, checkpoint, device)
        out = run / ENSEMBLE if out is None else out
    out = run if out is None else out
    expect_writable(out / "results.json")
    recipe = Recipe.of(config)
    with tempfile.TemporaryDirectory() as folder, further_formats(pictures or []):
        created = Path(folder)  # a failed evaluation keeps the files of an earlier one
        report: Evaluation = recipe.load("evaluate")(run, model, config, created, **options)
        if pictures and (run / "metrics.csv").is_file():
            task: Any = recipe.load("task")
            draw_curve(run, created / "curve.png", task.metrics)
        files = write_results(out, created, report.results, inputs, config, options)
    print(f"{' + '.join(map(str, members))}, checkpoint {checkpoint}{report.text}")
    print("written: " + ", ".join(map(str, files)))
    return report.results


def build_parser(words: Sequence[str] = ()) -> ArgumentParser:
    """Returns the parser for ``molflt evaluate`` with the recipe of the first run in `words`."""
    positional = [word for before, word in pairwise(["", *words]) if not before.startswith("--")]
    candidates = map(Path, [*positional, *words])  # RUN may also follow a flag
    run = next((path for path in candidates if (path / "config.yaml").is_file()), None)
    recipe = Recipe.of({} if run is None else read_config(run))
    parser = ArgumentParser()
    parser.add_function_arguments(evaluate, as_group=False, as_positional=True)
    parser.add_function_arguments(recipe.load("evaluate"), skip={"run", "model", "config", "out"})
    return parser
