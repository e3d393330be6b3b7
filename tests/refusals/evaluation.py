import json
from pathlib import Path
from typing import Any

import numpy as np
from kit.systems import read_systems

from molflt.evaluation.calibration import Calibration
from molflt.evaluation.common import named_sources
from molflt.evaluation.ensemble import load_ensemble
from molflt.evaluation.shard_files import merge_shards
from molflt.metrics import locality
from refusals import Refusal, refused


def fit(count, spread=0.1):
    errors = np.linspace(0.1, 1, count)
    return lambda _: Calibration.fit(errors, np.full(count, spread), "val_id", ("a", "b"))


def calibration(**change):
    def read(folder: Path) -> None:
        path = folder / "u.json"
        Calibration(1.0, 0.1, "val_id", 30, ("a", "b")).save(path)
        path.write_text(json.dumps(json.loads(path.read_text()) | change))
        Calibration.read(path)

    return read


def systems(folder: Path) -> None:
    (folder / "systems.csv").write_text("sid,name,molecule,family,metal\n1,a,b,c,Cu,extra\n")
    read_systems(folder)


def local(weights: Any, distances: Any, option: str, got: str = "") -> Refusal:
    return refused(lambda: locality(weights, distances), option, "", got)


EYE = np.eye(3)
APART = np.abs(np.arange(3)[:, None] - np.arange(3)).astype(float)
DATA = {"train": "a.txt", "val": "b.txt", "test": None}
AGAIN = "evaluate these runs"

ROWS = [
    Refusal(fit(19), "val_id", "at least 20", "19"),
    Refusal(fit(30, spread=0.0), "val_id", "spread", "0 eV"),
    Refusal(calibration(factor=float("nan")), "factor", "above 0", "nan"),
    Refusal(
        lambda folder: Calibration.read(folder / "u.json"), "u.json", AGAIN, "", FileNotFoundError
    ),
    refused(lambda: load_ensemble([Path("a"), Path("b")], "w.pt"), "--checkpoint", "best", "w.pt"),
    Refusal(lambda folder: merge_shards(folder / "e.csv"), "e.csv", "--shard", "no shards"),
    Refusal(
        lambda folder: merge_shards(folder / "missing" / "e.csv"), "e.csv", "--shard", "no shards"
    ),
    refused(lambda: named_sources(DATA, ["val"], Path("x")), "--splits", "--data", "both"),
    Refusal(systems, "systems.csv", "as the header"),
    refused(lambda: locality(EYE, APART, fraction=10), "fraction", "(0, 1]", "10"),
    local(2 * EYE, APART, "sum to 1", "2.0"),
    local(EYE, APART + np.diag([np.inf, 0, 0]), "unmasked", "0.0"),
]
