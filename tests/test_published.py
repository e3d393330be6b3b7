"""Comparison with published predictions, by name, over the systems that both have."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest

from molflt.data.structures.systems import System, write_systems
from molflt.evaluation.other_models import common_systems, compare, read_published
from molflt.evaluation.predictions import Predictions

NAMES = [f"cu-{i}" for i in range(8)]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Writes a data set of 8 systems, sids 100 to 107, in two families on two metals."""
    systems = [
        System(100 + i, name, f"m{i}", "amides" if i < 5 else "oximes", ("Cu", "Ag")[i % 2])
        for i, name in enumerate(NAMES)
    ]
    write_systems(tmp_path, [("val_id", systems[:5]), ("val_ood_cat", systems[5:])])
    return tmp_path


def predictions(*sids: int) -> Predictions:
    """Returns energies 0.1 eV above the labels; sid 101 has no label, 999 no name."""
    target = np.array([np.nan if sid == 101 else -0.01 * sid for sid in sids])
    words = ["X"] * len(sids)
    energy = np.nan_to_num(target) + 0.1
    return Predictions(np.array(sids), np.ones(len(sids), int), energy, target, words, words)


FOUND = {"val_id": predictions(100, 101, 102, 103), "val_ood_cat": predictions(107, 105, 999)}


def published(path: Path, names: list[str] = NAMES, **others: np.ndarray) -> Path:
    """Writes two trainings of model a, off by +0.3 and -0.1 eV, and one of b, off by 0.2 eV."""
    target = np.array([-0.01 * (100 + int(name[-1])) for name in names])
    models = {"a": np.stack([target + 0.3, target - 0.1], axis=1), "b": target + 0.2}
    np.savez(path, **{"name": np.array(names), "fold": np.arange(len(names)), **models, **others})
    return path


def table(path: Path) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_systems_are_matched_by_name_in_any_order(root: Path) -> None:
    names = [name for name in reversed(NAMES) if name != "cu-3"]  # 103 is only in the run
    others = read_published(published(root / "p.npz", names), root)
    text = compare(others, common_systems(others, FOUND), FOUND, root)
    assert "p.npz" in text and "4 of 7 systems" in text
    assert (root / "published.png").read_bytes()[:4] == b"\x89PNG"
    rows = table(root / "published.csv")
    assert [row["name"] for row in rows] == ["cu-0", "cu-2", "cu-7", "cu-5"]
    for row in rows:
        target = -0.01 * int(row["sid"])
        columns = {"target_eV": 0.0, "energy_eV": 0.1, "a_eV": 0.1, "b_eV": 0.2}
        for column, error in columns.items():
            assert float(row[column]) == pytest.approx(target + error)
    errors = {
        (row["kind"], row["group"], row["model"]): row
        for row in table(root / "published_errors.csv")
    }
    counts = {key[:2]: int(row["n"]) for key, row in errors.items()}
    assert counts == {
        ("split", "val_id"): 2, ("split", "val_ood_cat"): 2, ("split", "all"): 4,
        ("family", "amides"): 2, ("family", "oximes"): 2, ("metal", "Ag"): 2, ("metal", "Cu"): 2,
    }  # fmt: skip
    for (_, _, model), row in errors.items():
        single, mean = {"this run": (0.1, 0.1), "a": (0.2, 0.1), "b": (0.2, 0.2)}[model]
        assert float(row["mae_eV"]) == pytest.approx(single)
        assert float(row["mae_of_mean_eV"]) == pytest.approx(mean)
    head = next(line for line in text.splitlines() if line.startswith("split"))
    words = [word.strip() for word in head.split("  ") if word.strip()]
    assert words == ["split", "systems", "this run", "a", "a, mean of 2", "b"]


def test_missing_predictions_are_ignored(root: Path) -> None:
    gaps = np.full((8, 2), -1.0)
    gaps[2, 1] = np.nan
    others = read_published(published(root / "p.npz", a=gaps), root)
    text = compare(others, common_systems(others, FOUND), FOUND, root)
    assert "4 of 7 systems" in text  # 100, 103, 105, 107
    others = read_published(published(root / "p.npz", a=gaps * np.nan), root)
    with pytest.raises(ValueError, match="7 systems; got none"):
        common_systems(others, FOUND)
