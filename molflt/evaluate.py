"""``molflt evaluate``: finds out what a run has learned and evaluates it as such."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from molflt.checkpoint import read_config
from molflt.recipes import RECIPES, recipe_of

__all__ = ["evaluate"]


def evaluate(
    run: Path,
    splits: list[str] | None = None,
    data: Path | None = None,
    checkpoint: str = "best",
    out: Path | None = None,
    batch_size: int = 64,
    device: str = "auto",
    submission: Path | None = None,
    skip_bad: bool = False,
) -> dict[str, dict[str, Any]]:
    """Evaluates a run on splits of its data: a table, results.json, and pictures.

    Energies: MAE and EwT, errors by adsorbate and by size, parity. Language: perplexity per token.
    Images: top-1 and top-5 accuracy, the images that are classified wrongly. All: the learned
    relative encoding, if there is one.

    Args:
        run: folder of a training run.
        splits: names of splits; by default those for validation of OC20, or the validation and
            the test file. Structures without labels are only predicted.
        data: other data than those of the run's configuration: a folder with the splits of
            structures, or a file of text or images in place of the splits.
        checkpoint: best, last, or a safetensors file.
        out: folder to write; by default the run's.
        batch_size: structures, texts or images in a batch.
        device: auto, cpu, cuda or cuda:N.
        submission: energies only: also write this OC20 leaderboard file, .npz, from the four test
            splits.
        skip_bad: energies only: leave out structures that cannot be used, and list them.

    Returns:
        Metrics per split; the same is in results.json.

    Raises:
        FileNotFoundError: if the run, its checkpoint, or a split is missing.
        ValueError: if the data cannot be used, or an option does not fit them.
    """
    run = Path(run)
    recipe = recipe_of(read_config(run))
    options: dict[str, Any] = {"data": data, "checkpoint": checkpoint, "out": out}
    options |= {"splits": splits, "batch_size": batch_size, "device": device}
    if recipe is RECIPES["is2re"]:
        options |= {"submission": submission, "skip_bad": skip_bad}
    elif submission is not None or skip_bad:
        raise ValueError(f"{run}: submission and skip_bad are for energies; leave them out")
    results: dict[str, dict[str, Any]] = recipe.load("evaluate")(run, **options)
    return results
