"""The scripts about few labels: merged training sets, draws, and the best of many placements."""

import csv
import json

import ase.io
import numpy as np
import pytest
from ase.build import fcc111
from script_files import load_script
from tiny_run import structures

from molflt.adsorption import placements
from molflt.data.structures import open_dataset
from molflt.data.structures.ase_fields import fixed_atoms
from molflt.data.structures.records import make_record
from molflt.data.structures.splits import VAL_SPLITS
from molflt.data.structures.store import write_store


def test_merged_sets_lose_their_references(tmp_path):
    """The second set has other references, and no relaxed positions."""
    shift = np.linspace(-1.0, 2.0, 119)
    for split, seed in (("train", 0), ("val_id", 1)):
        records = list(structures(9, seed))
        write_store(tmp_path / "one" / f"{split}.safetensors", records)
        for record in records:
            record.y_relaxed += shift[record.atomic_numbers[record.tags == 2]].sum()
            record.pos_relaxed[:] = np.nan
        write_store(tmp_path / "two" / f"{split}.safetensors", records)
    sets = [f"{name}={tmp_path / name}" for name in ("one", "two")]
    assert load_script("merge").main([str(tmp_path / "out"), *sets]) == 0
    found = json.loads((tmp_path / "out" / "references.json").read_text())
    for number, element in ((1, "H"), (8, "O"), (29, "Cu"), (78, "Pt")):
        assert found["two"][element] - found["one"][element] == pytest.approx(shift[number])
    for split in ("train", "val_id"):
        merged = list(open_dataset(tmp_path / "out" / f"{split}.safetensors"))
        assert [int(record.sid) for record in merged] == list(range(18))
        for one, two in zip(merged[:9], merged[9:], strict=True):
            assert float(one.y_relaxed) == pytest.approx(float(two.y_relaxed))
            assert not bool((one.pos_relaxed == one.pos).all())
            assert bool((two.pos_relaxed == two.pos).all())


def test_larger_draws_contain_smaller_ones(tmp_path):
    script, data, drawn = load_script("few_labels"), tmp_path / "data", {}
    write_store(data / "train.safetensors", structures(12))
    write_store(data / "val_id.safetensors", structures(2, 1))
    for count, seed in ((3, 0), (6, 0), (3, 1)):
        folder = tmp_path / f"{count}-{seed}"
        script.draw(data, folder, count, seed)
        dataset = open_dataset(folder / "train.safetensors")
        drawn[count, seed] = {int(record.sid) for record in dataset}
        assert len(open_dataset(folder / "val_id.safetensors")) == 2
    assert len(drawn[3, 0]) == 3 and drawn[3, 0] < drawn[6, 0] and drawn[3, 0] != drawn[3, 1]
    write_store(tmp_path / "other" / "train.safetensors", structures(12, 2))
    with pytest.raises(ValueError, match="3-0.*other data"):
        script.draw(tmp_path / "other", tmp_path / "3-0", 3, 0)
    words = ["--data", str(data), "--out", str(tmp_path), "--ridge", "--seeds", "0", "--labels"]
    assert script.main([*words, "3", "6"]) == 0
    with open(tmp_path / "few_labels.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["labels"] for row in rows] == ["3", "6"]
    assert all(0 < float(row["mae_eV"]) < 10 for row in rows)
    with pytest.raises(ValueError, match="--labels 99"):
        script.draw(data, tmp_path / "99", 99, 0)


def test_placements_are_relaxed_and_ranked(tmp_path, capsys):
    script, data, out = load_script("placements"), tmp_path / "data", tmp_path / "out"
    atoms = placements(fcc111("Cu", (2, 2, 2), vacuum=8.0, periodic=True), "OH")[0]
    own = {"pos": atoms.positions, "cell": atoms.cell.array, "fixed": fixed_atoms(atoms)}
    record = make_record(**own, atomic_numbers=atoms.numbers, tags=atoms.get_tags(), sid=0)
    for split in VAL_SPLITS:
        write_store(data / f"{split}.safetensors", [record])
    made = {"calculator": "emt", "references_eV": {"O": 1.25, "H": -0.5}}
    (data / "made.json").write_text(json.dumps(made))
    words = ["relax", str(data), str(out), "--pairs", "1", "--placements", "12"]
    assert script.main(words) == 0
    found = ase.io.read(out / "placements.extxyz", ":")
    assert 1 < len(found) < 12  # EMT breaks some bonds
    assert all(one.info["y_relaxed"] < one.info["y_init"] for one in found)
    before = (out / "pair0.extxyz").stat().st_mtime_ns
    assert script.main(words) == 0 and (out / "pair0.extxyz").stat().st_mtime_ns == before
    rows = [f"{one.info['y_relaxed']}" for one in found]
    (out / "exact.csv").write_text("\n".join(["energy_eV", *rows]))
    assert script.main(["rank", str(out), str(out / "exact.csv")]) == 0
    assert "| exact | 1.00 | 0.000 |" in capsys.readouterr().out
    (out / "exact.csv").write_text("\n".join(["energy_eV", *rows[1:]]))
    assert script.main(["rank", str(out), str(out / "exact.csv")]) == 2
    assert f"expected {len(rows)} energies; got {len(rows) - 1}" in capsys.readouterr().err
    assert script.main([*words, "--seed", "1"]) == 2
    assert "seed" in capsys.readouterr().err
    assert load_script("merge").main([str(out), "no-root"]) == 2
    assert "no-root: expected NAME=ROOT" in capsys.readouterr().err


def test_the_share_counts_pairs_whose_best_is_among_the_top_five():
    script, energy = load_script("placements"), np.tile(np.arange(8) * 0.06, 2)
    pair = np.repeat([0, 1], 8)
    assert script.share(pair, energy, energy) == 1.0
    # the top five of pair 1 are its five worst, 0.18 eV or more from its best
    assert script.share(pair, energy, np.where(pair == 1, -energy, energy)) == 0.5
