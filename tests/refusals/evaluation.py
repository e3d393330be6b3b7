from pathlib import Path
from typing import Any

import numpy as np
from tiny_run import structures

from molflt.commands.merge import merge
from molflt.data.structures.in_memory import StructuresInMemory
from molflt.evaluation.calibration import Calibration
from molflt.evaluation.common import named_sources
from molflt.evaluation.predictions import infer
from molflt.evaluation.translation import evaluate
from molflt.graph import EnergyRegressor
from molflt.metrics import locality
from refusals import Refusal, refused


def fit(count, spread=0.1):
    errors = np.linspace(0.1, 1, count)
    return lambda _: Calibration.fit(errors, np.full(count, spread), "val_id", ("a", "b"))


def results(folder: Path) -> None:
    (folder / "results.json").write_text('{"val": {}}')
    Calibration.read(folder / "results.json")


def local(weights: Any, distances: Any, option: str, got: str = "") -> Refusal:
    return refused(lambda: locality(weights, distances), option, "", got)


def of_charged(sid: int) -> None:
    """Predicts structures in one batch, of which the one with this sid is charged."""
    records = list(structures(3, first_sid=sid - 1))
    records[1].charge[:] = 1.0
    model = EnergyRegressor(8, 2, layers=1, ffn_dim=8, num_features=8).eval()
    infer(model, StructuresInMemory(records), 3, "x")


EYE = np.eye(3)
APART = np.abs(np.arange(3)[:, None] - np.arange(3)).astype(float)
DATA = {"train": "a.txt", "val": "b.txt", "test": None}

ROWS = [
    Refusal(fit(19), "val_id", "at least 20", "19"),
    Refusal(fit(30, spread=0.0), "val_id", "spread", "0 eV"),
    Refusal(results, "results.json", "calibration", "evaluate these runs"),
    Refusal(lambda folder: merge(folder / "e.csv"), "e.csv", "--shard", "no shards"),
    Refusal(lambda folder: merge(folder / "missing" / "e.csv"), "e.csv", "--shard", "no shards"),
    refused(lambda: of_charged(101), "charge", "must be 0", "1 of sid 101"),
    refused(lambda: named_sources(DATA, ["val"], Path("x")), "--splits", "--data", "both"),
    refused(
        lambda: evaluate(Path(), None, {}, Path(), beam=1, length_penalty=2.0),
        *("length_penalty", "a beam of 1", "2.0"),
    ),
    refused(lambda: locality(EYE, APART, fraction=10), "fraction", "(0, 1]", "10"),
    local(2 * EYE, APART, "sum to 1", "2.0"),
    local(EYE, APART + np.diag([np.inf, 0, 0]), "unmasked", "0.0"),
]
