"""The scripts about few labels: merged training sets, draws, and the best of many placements."""

import json

import ase.io
import numpy as np
import pytest
from ase.build import fcc111
from script_files import load_script
from tiny_run import table

from molflt.adsorption import placements
from molflt.data.structures import open_dataset
from molflt.data.structures.ase_fields import fixed_atoms
from molflt.data.structures.records import make_record
from molflt.data.structures.splits import VAL_SPLITS
from molflt.data.structures.store import write_store

REFERENCES = {"O": 1.25, "H": -0.5}  # eV


def records(references, count=8, relaxed=True):
    """Returns O and OH on copper, with energies 0.01 i + the references of the adsorbate."""
    slab = fcc111("Cu", (2, 2, 2), vacuum=8.0, periodic=True)
    frames = [placements(slab, name)[:count] for name in ("O", "OH")]
    made = []
    for i, atoms in enumerate([atoms for pair in zip(*frames, strict=False) for atoms in pair]):
        energy = 0.01 * i + sum(references[one] for one in atoms.symbols[atoms.get_tags() == 2])
        own = {"pos": atoms.positions, "cell": atoms.cell.array, "fixed": fixed_atoms(atoms)}
        own |= {"pos_relaxed": atoms.positions + 0.1} if relaxed else {}
        numbers, tags = atoms.numbers, atoms.get_tags()
        made.append(
            make_record(
                **own, atomic_numbers=numbers, tags=tags, sid=i, y_init=energy, y_relaxed=energy
            )
        )
    return made


def test_merged_sets_lose_their_references(tmp_path):
    zero = dict.fromkeys(REFERENCES, 0.0)
    for name, references in (("one", zero), ("two", REFERENCES)):
        own = records(references, 4, relaxed=name == "one")
        for split, part in (("train", own[2:]), ("val_id", own[:2])):
            write_store(tmp_path / name / f"{split}.safetensors", part)
    sets = [f"{name}={tmp_path / name}" for name in ("one", "two")]
    assert load_script("merge").main([str(tmp_path / "out"), *sets]) == 0
    found = json.loads((tmp_path / "out" / "references.json").read_text())
    for element, energy in REFERENCES.items():
        assert found["two"][element] - found["one"][element] == pytest.approx(energy)
    for split in ("train", "val_id"):
        merged = list(open_dataset(tmp_path / "out" / f"{split}.safetensors"))
        half = len(merged) // 2
        assert [int(record.sid) for record in merged] == list(range(2 * half))
        for one, two in zip(merged[:half], merged[half:], strict=True):
            assert float(one.y_relaxed) == pytest.approx(float(two.y_relaxed))
            assert np.allclose(one.pos_relaxed - one.pos, 0.1, atol=1e-5)
            assert bool((two.pos_relaxed == two.pos).all())


def test_larger_draws_contain_smaller_ones(tmp_path):
    script, data = load_script("few_labels"), tmp_path / "data"
    write_store(data / "train.safetensors", records(REFERENCES))
    write_store(data / "val_id.safetensors", records(REFERENCES, 1))
    drawn = {}
    for count, seed in ((3, 0), (6, 0), (3, 1)):
        folder = tmp_path / f"{count}-{seed}"
        script.draw(data, folder, count, seed)
        dataset = open_dataset(folder / "train.safetensors")
        drawn[count, seed] = {int(record.sid) for record in dataset}
        assert len(open_dataset(folder / "val_id.safetensors")) == 2
    assert len(drawn[3, 0]) == 3 and drawn[3, 0] < drawn[6, 0] and drawn[3, 0] != drawn[3, 1]
    with pytest.raises(ValueError, match="--labels 99"):
        script.draw(data, tmp_path / "99", 99, 0)


def test_placements_are_relaxed_and_ranked(tmp_path, capsys):
    script, data, out = load_script("placements"), tmp_path / "data", tmp_path / "out"
    for split in VAL_SPLITS:
        write_store(data / f"{split}.safetensors", records(REFERENCES, 1))
    made = {"calculator": "emt", "references_eV": REFERENCES}
    (data / "made.json").write_text(json.dumps(made))
    words = ["relax", str(data), str(out), "--pairs", "1", "--placements", "12"]
    assert script.main(words) == 0
    found = ase.io.read(out / "placements.extxyz", ":")
    assert 1 < len(found) < 12  # EMT breaks some bonds
    assert all(one.info["y_relaxed"] < one.info["y_init"] for one in found)
    before = (out / "pair0.extxyz").stat().st_mtime_ns
    assert script.main(words) == 0 and (out / "pair0.extxyz").stat().st_mtime_ns == before
    rows = [{"energy_eV": one.info["y_relaxed"]} for one in found]
    (out / "exact.csv").write_text("energy_eV\n" + "\n".join(f"{r['energy_eV']}" for r in rows))
    assert script.main(["rank", str(out), str(out / "exact.csv")]) == 0
    assert "| exact | 1.00 | 0.000 |" in capsys.readouterr().out
    assert len(table(out / "exact.csv")) == len(found)


def test_the_share_counts_pairs_whose_best_is_among_the_top_five():
    script, energy = load_script("placements"), np.tile(np.arange(8) * 0.06, 2)
    pair = np.repeat([0, 1], 8)
    assert script.share(pair, energy, energy) == 1.0
    # the top five of pair 1 are its five worst, 0.18 eV or more from its best
    assert script.share(pair, energy, np.where(pair == 1, -energy, energy)) == 0.5
