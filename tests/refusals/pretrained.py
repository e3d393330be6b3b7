from pathlib import Path
from typing import Any

import numpy as np
import torch
from tiny_run import flip, structures

import molflt
from molflt.training.checkpoint import device_named
from refusals import Refusal, Refused, command, refused

OPTIONS: dict[str, Any] = {"dim": 16, "heads": 2, "layers": 1, "ffn_dim": 16}


def exported(folder: Path, **changes: object) -> None:
    """Writes an exported model with random weights and other content."""
    from molflt.graph import EnergyRegressor
    from molflt.training.checkpoint import write_exported

    content = {"recipe": "is2re", "models": [OPTIONS], "files": {}, "task": {}, "results": {}}
    content |= {"about": None, "license": None, "datasets": []}
    weights = EnergyRegressor(**OPTIONS).state_dict()
    write_exported(folder / "export", weights, {**content, **changes})


def changed(folder: Path) -> None:
    """Writes an exported model, and changes its last weight."""
    exported(folder)
    flip(folder / "export" / "model.safetensors")


def loaded(option: str, expected: str = "", got: str = "", **changes: object) -> Refusal:
    """Returns a row for a prediction with an exported model."""
    line = "predict {folder}/export in.extxyz"
    return Refusal(
        command(line, lambda folder: exported(folder, **changes)), option, expected, got, Refused
    )


def labeler() -> Any:
    from molflt.image import ImageClassifier
    from molflt.pretrained import ImageLabeler
    from molflt.pretrained.base import Trained

    model = ImageClassifier(2, 1, 4, patch_size=2, dim=4, heads=2, layers=1)
    files = {"classes.json": ["a", "b"]}
    return ImageLabeler(Trained(Path("x.safetensors"), "images", model, [{}], {}, {}, files))


def reader_of_pixels() -> Any:
    from molflt.pretrained import SentenceLabeler
    from molflt.pretrained.base import Trained
    from molflt.sequence import SequenceClassifier

    model = SequenceClassifier(260, classes=2, **OPTIONS)
    return SentenceLabeler(Trained(Path("x"), "sentences", model, [{}], {"name": "Image"}, {}, {}))


ROWS = [
    refused(
        lambda: molflt.load().predict(list(structures(1)), tags="ase"),
        *("tags='ase'", "ase.Atoms", "PyG data"),
    ),
    refused(lambda: reader_of_pixels().classify(["a text"]), "images", "molflt evaluate", "Image"),
    refused(lambda: molflt.Calculator("a", dtype="float16"), "dtype", "float32", "float16"),
    refused(lambda: device_named("cuda:99"), "device 'cuda:99'", "use auto"),
    refused(lambda: molflt.load("a", also="b"), "also='b'", "list of runs"),
    loaded("format", "1", "2", format=2),
    loaded("recipe", "is2re", "'alchemy'", recipe="alchemy"),
    loaded("(119, 16)", "(119, 32)", models=[{**OPTIONS, "dim": 32}]),
    Refusal(command("predict {folder}/export in.extxyz", changed), "sha256", "", "", Refused),
    loaded("models", models=[{**OPTIONS, "__class__": "os.system"}]),
    refused(lambda: labeler().classify(torch.ones(1, 1, 4)), "images", "(batch, 1, 4, 4)"),
    refused(lambda: labeler().classify(np.full((1, 1, 4, 4), 2.0)), "images", "[0, 1]", "2"),
]
