"""Structures with two atoms at one place are named."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from molflt.commands.cli import main
from molflt.data.structures import open_dataset
from molflt.data.structures.datamodule import IS2REData
from molflt.data.structures.overlaps import (
    TOO_NEAR,
    atoms_coincide,
    equal_structures,
    fingerprint,
)
from molflt.data.structures.records import make_record
from molflt.data.structures.store import write_store


def distances(pos: np.ndarray, cell: np.ndarray, pbc: np.ndarray) -> np.ndarray:
    """Of all pairs, to all images around."""
    lattice = cell[pbc]
    images = np.array([*product(range(-9, 10), repeat=len(lattice))]) @ lattice
    first, second = np.triu_indices(len(pos), 1)
    apart = pos[first] - pos[second]
    if len(lattice):
        apart = apart - np.round(apart @ np.linalg.pinv(lattice)) @ lattice
    return np.linalg.norm(apart[:, None] + images.reshape(-1, 3), axis=2)


def test_overlaps_equal_a_search_over_all_images() -> None:
    draw, found = np.random.default_rng(0), []
    while len(found) < 300:
        count, pbc = int(draw.integers(2, 8)), draw.integers(0, 2, 3).astype(bool)
        pos, cell = draw.uniform(-5, 5, (count, 3)), draw.normal(scale=2, size=(3, 3))
        way = draw.normal(size=3)
        way *= draw.uniform(0, 2 * TOO_NEAR) / np.linalg.norm(way)
        pos[1] = pos[0] + way + (draw.integers(-3, 4, 3) * pbc) @ cell
        try:
            record = make_record(pos=pos, atomic_numbers=np.ones(count), cell=cell, pbc=pbc)
        except ValueError:
            continue  # too flat a cell
        nearest = distances(record.pos.double().numpy(), record.cell[0].double().numpy(), pbc).min()
        if abs(nearest - TOO_NEAR) > 1e-5:
            found.append((atoms_coincide(record), bool(nearest < TOO_NEAR)))
    assert all(got == expected for got, expected in found)
    assert 50 < sum(expected for _, expected in found) < 250


def test_overlapping_atoms_are_reported(tmp_path, capsys) -> None:
    """Across a boundary, too, where no viewer shows it."""
    draw, records = np.random.default_rng(0), []
    for sid in range(4):
        pos = np.array([[0, 0, z] for z in (1.0, 3.0, 5.0, 7.0)]) + draw.uniform(0, 0.3, (4, 3))
        if sid >= 2:
            pos[3] = pos[0] + [8, -8, 0.01]
        tags = [0, 1, 2, 2]
        records.append(
            make_record(
                pos=pos,
                atomic_numbers=[29, 29, 8, 1],
                cell=np.eye(3) * 8,
                tags=tags,
                sid=sid,
                y_relaxed=-1.0,
            )
        )
    path = tmp_path / "mine.safetensors"
    write_store(path, records)
    assert main(["data", "inspect", str(path)]) == 0
    told = "2 of 4 systems have two closer than 0.1 Å, for instance sid 2"
    assert f"warning: atoms at one place: {told}" in capsys.readouterr().out
    assert main(["predict", str(path), "--device=cpu"]) == 0
    words = "2 of 4 structures have two atoms closer than 0.1 Å, for instance sid 2; their energies"
    assert capsys.readouterr().err.count(words) == 1
    out = tmp_path / "out.safetensors"
    assert main(["data", "convert", str(path), str(out)]) == 0 and len(open_dataset(out)) == 4
    assert capsys.readouterr().err.count(f"molflt: warning: {path}: {words}") == 1
    write_store(path, records[:2])
    assert main(["predict", str(path), "--device=cpu"]) == 0
    assert main(["data", "convert", str(path), str(out)]) == 0
    assert "closer than" not in capsys.readouterr().err


def test_training_names_them_in_both_splits_once(tmp_path) -> None:
    for split, near in (("train", [1]), ("val_id", [0, 2])):
        records = []
        for sid in range(3):
            pos = [[0, 0, 0], [0, 0, 0.05 if sid in near else 1.0]]
            records.append(make_record(pos=pos, atomic_numbers=[1, 8], sid=sid, y_relaxed=-sid))
        write_store(tmp_path / f"{split}.safetensors", records)
    data = IS2REData(tmp_path)
    with pytest.warns(UserWarning) as told:
        data.files()
        data.files()
    texts = [str(each.message) for each in told]
    assert "train.safetensors: split 'train': 1 of 3 structures have two atoms closer" in texts[0]
    assert "val_id.safetensors: split 'val_id': 2 of 3 structures have two atoms" in texts[1]
    assert len(texts) == 2 and "for instance sid 0; their energies mean nothing" in texts[1]


def test_structures_of_two_charges_differ() -> None:
    made = [
        make_record(pos=[[0, 0, 0], [0, 0, 1.1]], atomic_numbers=[6, 8], charge=charge)
        for charge in (None, 0, 1, -1, 1)
    ]
    first, *others = equal_structures(np.array([fingerprint(record) for record in made]))
    assert [number == first for number in others] == [True, False, False, False]
    assert others[1] == others[3] != others[2]
