"""``molflt export``: what a run has learned, in a form to use, share and package."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from molflt.data.structures.domain import DOMAIN, Domain
from molflt.pretrained import EnergyPredictor, load
from molflt.training.config import read_config
from molflt.training.recipes import Recipe
from molflt.training.sources import HUB

__all__ = ["export"]


def export(
    run: str,
    out: str,
    *,
    about: str | None = None,
    license: str | None = None,
    datasets: list[str] | None = None,
    checkpoint: str | None = None,
    also: list[Path] | None = None,
    compiled: bool = False,
) -> None:
    """Writes a model with all that is needed to use it: model.safetensors, config.json, README.md.

    The folder is what `molflt predict`, `molflt.load` and `from_pretrained` take. The card holds
    the table of the run's results.json, so evaluate it first.

    Args:
        run: folder of a training run, or an exported model.
        out: folder to write, or hf:OWNER/NAME to upload it to the Hugging Face Hub.
        about: one line for users: what is predicted; of energies, of what, against which
            references, at which level of theory.
        license: of the weights, as the Hub calls it, such as mit or cc-by-4.0.
        datasets: data sets on the Hub that it was trained on.
        checkpoint: of a run: best (the default), last, or a safetensors file.
        also: further runs that make an ensemble with `run`.
        compiled: also write machine code of the energies, for processors like this one, which
            `molflt predict FOLDER FILE --compiled true` uses; needs a C++ compiler and minutes.

    Raises:
        FileNotFoundError: if the run or its checkpoint is missing.
        RuntimeError: without a C++ compiler, where machine code is asked for.
        ValueError: if nobody has said what is predicted, `out` is a file or holds files of the same
            names that are of no export, the Hub refuses, or there is no machine code of such a
            model.
    """
    model = load(run, checkpoint=checkpoint, also=also or ())
    model.about = model.about if about is None else about
    model.license = model.license if license is None else license
    model.datasets = model.datasets if datasets is None else datasets
    if isinstance(model, EnergyPredictor) and model.domain is None:
        _find_domain(model)
    if model.about is None:
        raise ValueError(
            "--about: expected one line that says what is predicted, of what, against which "
            "references, at which level of theory; got none"
        )
    if not model.trained.results:
        why = model.trained.unmeasured or f"{run}: no results.json"
        print(
            f"molflt: warning: {why}; the card has no measured errors; run `molflt evaluate` "
            "before",
            file=sys.stderr,
        )
    if compiled and (out.startswith(HUB) or not isinstance(model, EnergyPredictor)):
        raise ValueError(
            f"{out}: machine code is made of energies, into a folder here; got a model of the "
            f"recipe {model.trained.recipe}, or the Hub; leave --compiled out"
        )
    if out.startswith(HUB):
        print(f"uploaded: {model.push_to_hub(out.removeprefix(HUB))}")
        return
    if Path(out).exists() and not Path(out).is_dir():
        raise ValueError(f"{out}: is a file; expected a folder; choose another")
    if (Path(out) / "config.yaml").exists():
        raise ValueError(f"{out}: is the folder of a run; expected another one; choose it")
    model.save_pretrained(out)
    if compiled and isinstance(model, EnergyPredictor):
        model.save_compiled(Path(out))
    size = (Path(out) / "model.safetensors").stat().st_size
    print(f"{out}: {size / 1e6:.1f} MB; {model.summary}")


def _find_domain(model: EnergyPredictor) -> None:
    """Reads the training data of a run of an earlier version again, if they are where they were.

    Says so if they are not, or have other elements than the weights have seen.
    """
    run = model.trained.path
    try:
        config = read_config(run)
        data = Recipe.of(config).load("data")(**config["data"])
        data.seed = config["seed"]  # of the split, where training made one
        read = Domain.from_json(json.loads(data.files()[DOMAIN]), DOMAIN)
    except (OSError, ValueError, KeyError) as error:
        why = str(error)
    else:
        seen = getattr(model.model, "trained_elements", None)
        if seen is not None and set(seen.nonzero()[:, 0].tolist()) == read.elements.all:
            kept = {**model.trained.files, DOMAIN: read.to_json()}
            model.trained, model.domain = model.trained._replace(files=kept), read
            return
        why = "the data have other elements than the weights have seen"
    print(
        f"molflt: warning: {run}: no {DOMAIN}, and it cannot be made again ({why}); what lies "
        "outside of training will not be told",
        file=sys.stderr,
    )
