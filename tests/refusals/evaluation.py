"""Refusals of evaluations: calibrations, submissions, published predictions, ensembles."""

import json
from pathlib import Path

import numpy as np
import torch
from torch import nn

from molflt.data.structures.systems import System, write_systems
from molflt.evaluation.calibration import Calibration
from molflt.evaluation.common import classes_of, load_classes, named_sources
from molflt.evaluation.energies import submission_splits
from molflt.evaluation.ensemble import (
    EnsembleRegressor,
    _expect_same_aim,
    expect_same_totals,
    load_ensemble,
)
from molflt.evaluation.other_models import read_published
from molflt.evaluation.runs import read_results, read_runs
from refusals import Refusal


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


def file(name, content, read):
    """Writes a file and reads it."""

    def call(folder: Path) -> None:
        path = folder / name
        path.write_bytes(content)
        read(path)

    return call


def published(**arrays):
    def read(folder: Path) -> None:
        write_systems(folder, [("val_id", [System(1, "x", "m", "f", "Cu")])])
        names = np.array(["x", "y", "z"])
        np.savez(folder / "p.npz", **({"name": names, "a": np.zeros(3)} | arrays))
        read_published(folder / "p.npz", folder)

    return read


class Member(nn.Module):
    """Buffers of an energy regressor."""

    def __init__(self, elements=(1, 8, 29), mean=-1.0, std=0.5, references=0.0) -> None:
        super().__init__()
        self.register_buffer("trained_elements", torch.zeros(119, dtype=torch.bool))
        self.trained_elements[list(elements)] = True
        self.register_buffer("energy_mean", torch.tensor(mean))
        self.register_buffer("energy_std", torch.tensor(std))
        self.register_buffer("element_energies", torch.full((119,), references))


def aims(other):
    return lambda _: _expect_same_aim(Path("two"), other, Path("one"), Member())


class Hydrogen:
    """A data set of hydrogen molecules."""

    path = Path("h2")

    def __len__(self) -> int:
        return 3

    def compositions(self, indices, contact):
        return np.eye(119)[np.ones(len(indices), dtype=int)] * 2


def totals(other):
    members = EnsembleRegressor([Member(), other])
    return lambda _: expect_same_totals(members, Hydrogen())


DATA = {"train": "a.txt", "val": "b.txt", "test": None}
AGAIN = "evaluate these runs"

ROWS = [
    Refusal(fit(19), "val_id", "at least 20", "19"),
    Refusal(fit(30, spread=0.0), "val_id", "spread", "0 eV"),
    Refusal(calibration(factor=float("nan")), "factor", "above 0", "nan"),
    Refusal(calibration(level=0.9), "level", "0.68", "0.9"),
    Refusal(file("u.json", b"{", Calibration.read), "u.json", "JSON"),
    Refusal(
        lambda folder: Calibration.read(folder / "u.json"), "u.json", AGAIN, "", FileNotFoundError
    ),
    Refusal(lambda _: submission_splits(Path("a.json"), []), "a.json", ".npz", ".json"),
    Refusal(
        lambda _: submission_splits(Path("a.npz"), ["val_id"]), "--splits", "test_id", "val_id"
    ),
    Refusal(published(name=np.array(["x"] * 3)), "name", "different"),
    Refusal(published(a=np.zeros(2)), "'a'", "(3,)", "(2,)"),
    Refusal(published(energy=np.zeros(3)), "'energy'", "another model", "reserved"),
    Refusal(published(a=np.arange(3)), "p.npz", "at least one model", "name"),
    Refusal(lambda f: read_published(f / "p.npz", f), "p.npz", "npz", "no such", FileNotFoundError),
    Refusal(aims(Member((1, 8))), "two", "elements of one", "Cu"),
    Refusal(aims(Member((1, 8, 29, 78, 79))), "one", "elements of two", "Pt, Au"),
    Refusal(aims(Member(references=1.0)), "two", "references", "others"),
    Refusal(totals(Member(mean=-400.0, std=90.0)), "model 2", "at most 90 eV", "399 eV"),
    Refusal(lambda _: EnsembleRegressor([nn.Linear(1, 1)]), "members", "two", "1"),
    Refusal(
        lambda _: load_ensemble([Path("a"), Path("b")], "w.pt"), "--checkpoint", "best", "w.pt"
    ),
    Refusal(lambda _: read_runs([Path("a")]), "runs", "two", "1"),
    Refusal(file("r.json", b'{"a": {"b": "x"}}', read_results), "r.json", "metrics", "'x'"),
    Refusal(lambda _: named_sources(DATA, ["test"], None), "split", "train, val", "'test'"),
    Refusal(lambda _: named_sources(DATA, ["val"], Path("x")), "--splits", "--data", "both"),
    Refusal(lambda _: classes_of(b"{}", "c.json", 2), "c.json", "JSON list", "something else"),
    Refusal(lambda _: classes_of(b'["a"]', "c.json", 2), "c.json", "2", "1 classes"),
    Refusal(lambda f: load_classes(f, 2), "classes.json", "classes", "no such", FileNotFoundError),
]
