"""``molflt export``: writes a trained model for use and for sharing."""

from pathlib import Path

from molflt.data.structures.domain import DOMAIN
from molflt.files import warn
from molflt.graph.computation import expect_compilable
from molflt.pretrained import EnergyPredictor, load
from molflt.training.config import HUB


def export(
    run: str,
    out: str,
    *,
    about: str | None = None,
    license: str | None = None,
    datasets: list[str] | None = None,
    checkpoint: str | None = None,
    also: list[Path] | None = None,
    half: bool = False,
    compiled: bool = False,
) -> None:
    """Writes the files needed to use a model: model.safetensors, config.json and README.md.

    `molflt predict`, `molflt.load` and `from_pretrained` read the folder. Evaluate the run first:
    the model card contains the results of `molflt evaluate`.

    Args:
        run: folder of a training run, or an exported model.
        out: folder to write to, or hf:OWNER/NAME to upload the model to the Hugging Face Hub.
        about: one line about the model, required for a training run: the predicted quantity; for
            energies also the structures, the references and the level of theory.
        license: license of the weights, as named on the Hub, such as mit or cc-by-4.0.
        datasets: names of the training data sets on the Hub.
        checkpoint: best (the default), last, or a safetensors file; requires a training run.
        also: further runs that form an ensemble with `run`.
        half: store weights as float16, in half the space; `molflt predict` uses the rounded weights
            in float32.
        compiled: also compile the energy prediction for processors like this one, for use with
            `molflt predict FOLDER FILE --compiled true`; requires a C++ compiler and takes minutes.
    """
    model = load(run, checkpoint=checkpoint, also=also or ())
    model.about = model.about if about is None else about
    model.license = model.license if license is None else license
    model.datasets = model.datasets if datasets is None else datasets
    if isinstance(model, EnergyPredictor) and model.domain is None:
        warn(f"{run}: no {DOMAIN}; predictions will not be compared with the training data")
    if model.about is None:
        raise ValueError(
            "--about: expected one line about the predicted quantity and, for energies, the "
            "structures, the references and the level of theory; got none"
        )
    if compiled and out.startswith(HUB):
        raise ValueError(f"{out}: --compiled requires a local folder")
    if compiled:
        expect_compilable(model.model)
    if not model.trained.results:
        why = model.trained.unmeasured or f"{run}: no results.json"
        warn(f"{why}; the model card contains no errors; run `molflt evaluate` first")
    if out.startswith(HUB):
        print(f"uploaded: {model.push_to_hub(out.removeprefix(HUB), half=half)}")
        return
    model.save_pretrained(out, half)
    if compiled:
        EnergyPredictor.from_pretrained(out).save_compiled(Path(out))
    size = (Path(out) / "model.safetensors").stat().st_size
    print(f"{out}: {size / 1e6:.1f} MB; {model.summary}")
