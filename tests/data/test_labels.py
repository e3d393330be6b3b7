import math
from pathlib import Path

import numpy as np
import pytest
from ase import Atoms
from ase.build import bulk, fcc111
from ase.io import write
from oc20_files import old_record, record, write_lmdb
from tiny_run import error_of, inspected, printed, write_splits

from molflt.commands.cli import main
from molflt.data.structures import open_dataset
from molflt.data.structures.datamodule import IS2REData
from molflt.data.structures.labels import energy_kind, fit_element_energies, label_faults
from molflt.data.structures.records import make_record
from molflt.data.structures.store import write_store


def of_energies(energies: list[float | None]) -> list[object]:
    return [record(i, y_relaxed=energy) for i, energy in enumerate(energies)]


def test_only_adsorption_energies_are_limited_to_20_ev() -> None:
    natoms = np.full(4, 50)
    energies = np.array([-1.0, 20.0, -20.001, math.nan])
    found = label_faults(energies, natoms, required=False)
    assert list(found) == [2] and "the label is -20.001 eV; expected at most 20 eV" in found[2]
    assert list(label_faults(energies, natoms, required=True)) == [2, 3]
    totals = np.array([-200.0, -220.0, 3.0, -180.0])
    assert energy_kind(totals, natoms) == "total"
    assert label_faults(totals, natoms, required=True) == {}
    # single points: -0.3 eV per atom, in cells of 32 and of 108 atoms
    sizes = np.array([32, 32, 32, 108, 32])
    points = np.array([*(-0.3 * sizes[:4]), math.nan])
    assert energy_kind(points, sizes) == "adsorption"
    assert list(label_faults(points, sizes, required=True)) == [3, 4]
    assert list(label_faults(points, sizes, required=True, at_pos=True)) == [4]


def test_limit_of_adsorption_energies_counts_adsorbates(tmp_path: Path, capsys) -> None:
    """Two slabs have four O atoms; -40 eV is plausible for them, and -81 eV is not."""
    frames = []
    for energy, count in ((-40.0, 4), (-2.0, 1), (-2.1, 1), (-2.2, 1), (-81.0, 4)):
        slab = fcc111("Pt", (2, 2, 3), vacuum=8.0, periodic=True)
        slab.set_tags(1)
        places = slab.positions[-4:][:count] + np.array([0, 0, 1.5 + 0.01 * len(frames)])
        slab += Atoms("O" * count, places, tags=[2] * count)
        slab.info["y_relaxed"] = energy
        frames.append(slab)
    write(source := tmp_path / "oxygen.extxyz", frames)
    seen = " ".join(inspected(capsys, source)["warnings"])
    assert "-81.000 eV; expected at most 80 eV" in seen and "-40.000" not in seen
    words = ["data", "convert", source, tmp_path / "out.safetensors"]
    assert "-81.000 eV; expected at most 80 eV" in error_of(capsys, *words)
    data = IS2REData(source, skip_bad=True, val_fraction=0.5)
    with pytest.warns(UserWarning, match="expected at most 80 eV"):
        data.setup()
    kept = np.concatenate([part.y_relaxed for part in data.datasets.values()])
    assert sorted(kept) == [-40, -2.2, -2.1, -2]


def test_formation_energies_of_crystals_have_no_limit(tmp_path: Path) -> None:
    """A crystal is accepted. A slab of the same atoms without tags is rejected."""
    frames = [bulk("MgO", "rocksalt", 4.2, cubic=True).repeat(n) for n in (1, 1, 1, 2)]
    for number, crystal in enumerate(frames):
        crystal.rattle(0.01, seed=number)
        crystal.info["y_relaxed"] = -0.7 * len(crystal)
    frames[1].info["y_relaxed"] = -4.0
    write(source := tmp_path / "oxides.extxyz", frames)
    data = IS2REData(source, val_fraction=0.25)
    data.setup()
    assert sum(map(len, data.datasets.values())) == 4
    frames[3].center(vacuum=8.0, axis=2)
    write(source, frames)
    with pytest.raises(ValueError, match="-44.800 eV; expected at most 20 eV"):
        IS2REData(source, val_fraction=0.25).setup()


ENERGIES = [-1.0, -2.0, 514.25, None, 0.5, 1.5]
REASONS = {
    1002: "the label is 514.250 eV; expected at most 40 eV in magnitude",  # two adsorbates
    1003: "the label must be a finite energy in eV; got none",
}


def test_training_names_bad_labels_or_leaves_them_out(tmp_path: Path, capsys) -> None:
    path = tmp_path / "train.lmdb"
    write_lmdb(path, {str(i): old_record(i, y_relaxed=e) for i, e in enumerate(ENERGIES)})
    line = error_of(capsys, "train", f"--data.root={tmp_path}", "--data.val_split=train")
    assert f"{path}: sid 1002: {REASONS[1002]}" in line and "--data.skip_bad" in line
    assert "(2 of 6 structures)" in line

    data = IS2REData(tmp_path, val_split="train", batch_size=2, skip_bad=True)
    with pytest.warns(UserWarning, match="2 bad structure") as told:
        data.setup()
    texts = [str(each.message) for each in told]
    assert all(str(sid) in texts[0] for sid in REASONS)
    assert "training and validation use the same structures" in texts[1]
    train = data.datasets["train"]
    sids = [1000, 1001, 1004, 1005]
    assert [item.sid for item in train] == sids
    assert train.y_relaxed.tolist() == [-1.0, -2.0, 0.5, 1.5]
    assert train.natoms.tolist() == [7] * 4
    assert train.where(2) == f"{path}: key '4'"
    assert "train 4 systems (28 atoms, 2 bad skipped)" in data.describe()
    assert data.normalizer() == pytest.approx((-0.25, np.std([-1.0, -2.0, 0.5, 1.5])))
    assert sorted(sid for batch in data.val_dataloader() for sid in batch.sid.tolist()) == sids
    assert data.fingerprints()["train"]["systems"] == 4


@pytest.mark.parametrize(("more", "spread"), [(0.0, 1.0), (2e-9, 1e-9)])
def test_energies_that_are_all_the_same_have_no_spread(tmp_path: Path, more, spread) -> None:
    """Rounding of the mean does not count as spread, but differences of 2e-9 eV do."""
    records = of_energies([-0.1, -0.1 + more] * 11)
    write_splits(tmp_path, train=records, val_id=records)
    found = IS2REData(tmp_path).normalizer()
    assert found == pytest.approx((-0.1 + more / 2, spread), rel=1e-6)


@pytest.mark.parametrize("place", [0, 3])
def test_an_absurd_label_of_one_file_is_refused_in_either_part(tmp_path: Path, place: int) -> None:
    """If the validation part has only this label, it would look like a total energy."""
    path = tmp_path / "a.safetensors"
    write_store(path, of_energies([514.25 if i == place else -1.0 - i / 8 for i in range(8)]))
    message = rf"a\.safetensors: sid {1000 + place}: the label is 514.250 eV; expected at most 40"
    with pytest.raises(ValueError, match=message):
        IS2REData(path).setup()
    data = IS2REData(path, skip_bad=True, val_fraction=0.5)
    with pytest.warns(UserWarning, match="1 bad structure") as told:
        data.setup()
    assert len(told) == 1 and sum(map(len, data.datasets.values())) == 7


def test_validation_with_other_energies_gives_a_warning(tmp_path: Path) -> None:
    parts = of_energies([-1.0, -1.5]), of_energies([-314.25, -314.75])
    write_splits(tmp_path, train=parts[0], val_id=parts[1])
    with pytest.warns(UserWarning, match="look like total.*predicts adsorption"):
        IS2REData(tmp_path).setup()


def test_conversion_names_bad_labels_or_leaves_them_out(tmp_path: Path, capsys) -> None:
    """Splits without labels, total energies and single missing labels are kept."""
    path, out = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    words = ["data", "convert", str(path), str(out)]
    write_store(path, of_energies(ENERGIES))
    assert f"{path}: sid 1002: {REASONS[1002]}" in error_of(capsys, *words) and not out.exists()
    error = printed(capsys, *words, "--skip-bad").err
    assert all(f"{path}: sid {sid}: {reason}" in error for sid, reason in REASONS.items())
    kept = open_dataset(out)
    assert [item.sid for item in kept] == [1000, 1001, 1004, 1005] and kept.verify()
    for energies, more in (
        ([None, None], ["--skip-bad"]),
        ([-40.0, -38.0, 2.0], ["--skip-bad"]),
        ([-1.0, None], []),
    ):
        write_store(path, of_energies(energies))
        assert main([*words, *more]) == 0 and len(open_dataset(out)) == len(energies)


REFERENCES = {1: -13.6, 6: -1030.25, 8: -2041.5, 29: -45000.125, 78: -91000.75}


def of_elements(numbers: list[list[int]], noise: float = 0.0) -> list[object]:
    """Returns rows of atoms whose energy is the sum of references, with some noise."""
    draw = np.random.default_rng(0)
    return [
        make_record(
            pos=np.arange(3.0 * len(own)).reshape(-1, 3),
            atomic_numbers=own,
            sid=i,
            y_relaxed=sum(REFERENCES[z] for z in own) + noise * draw.standard_normal(),
        )
        for i, own in enumerate(numbers)
    ]


def test_references_are_recovered_exactly(tmp_path: Path, monkeypatch) -> None:
    """Total energies reach 1e6 eV; the fit uses one block or many blocks."""
    draw = np.random.default_rng(1)
    drawn = [draw.choice([*REFERENCES], int(draw.integers(3, 12))).tolist() for _ in range(60)]
    write_splits(tmp_path, a=of_elements(drawn), b=of_elements(drawn, 0.3))
    dataset, noisy = (open_dataset(tmp_path / f"{name}.safetensors") for name in "ab")
    found = fit_element_energies(dataset)
    for number, energy in REFERENCES.items():
        assert found.energies[number] == pytest.approx(energy, rel=1e-12, abs=1e-9)
    assert np.flatnonzero(found.present).tolist() == [*REFERENCES] and found.undetermined == 0
    assert np.count_nonzero(found.energies) == 5
    assert abs(found.mean) < 1e-8 and found.std == 0.0  # rounding does not count as spread
    fit = fit_element_energies(noisy)
    left = noisy.y_relaxed - noisy.compositions(np.arange(60)) @ fit.energies
    assert fit.mean == pytest.approx(left.mean(), abs=1e-8)
    assert fit.std == pytest.approx(left.std(), rel=1e-7)
    monkeypatch.setattr("molflt.data.structures.labels._BLOCK", 7)
    again = fit_element_energies(dataset)
    np.testing.assert_allclose(again.energies, found.energies, rtol=1e-12, atol=1e-9)


def test_compositions_that_determine_nothing_have_small_references(tmp_path: Path) -> None:
    """CO alone does not determine C and O, which is reported; energies of CO are still exact."""
    train = of_elements([[6, 8], [6, 6, 8, 8], [1]] * 3)
    write_splits(tmp_path, train=train, val_id=of_elements([[6, 8, 29]]))
    data = IS2REData(tmp_path)
    with pytest.warns(UserWarning) as said:
        found = data.element_energies()
    texts = [str(each.message) for each in said]
    assert "compositions leave 1 of 3 element energies undetermined" in texts[0]
    assert "val_id.safetensors: no reference energy for Cu, which the training" in texts[1]
    pair = REFERENCES[6] + REFERENCES[8]
    assert found.energies[6] == pytest.approx(pair / 2)  # the solution of smallest norm
    assert found.energies[6] + found.energies[8] == pytest.approx(pair, rel=1e-12)
    assert found.energies[1] == pytest.approx(REFERENCES[1])
