import ase.io
import pytest
from ase.calculators.singlepoint import SinglePointCalculator
from script_files import load_script
from tiny_run import start, structures, table, train_potential, write_data

from molflt.data.structures.base import to_atoms
from molflt.evaluation.relaxation import relax_atoms


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_both_ways_and_a_second_start(tmp_path, monkeypatch, capsys):
    script = load_script("by_relaxation")
    data, points = write_data(tmp_path / "data"), tmp_path / "points"
    (data / "frames").mkdir()
    points.mkdir()
    frames = []
    for record in structures(13, seed=1, first_sid=1000):
        atoms = to_atoms(record)
        total = float(record.y_relaxed) - 100.0  # of slab and molecule
        forces = 0.1 * (atoms.positions - atoms.positions.mean(axis=0))
        atoms.calc = SinglePointCalculator(atoms, energy=total, forces=forces)
        frames.append(atoms)
    ase.io.write(data / "frames" / "val_id.extxyz", frames)
    for split in ("train", "val_id"):
        ase.io.write(points / f"{split}.traj", frames)
    words = ["--data.allow_duplicates=true", "--trainer.max_steps=3", "--task.warmup_steps=1"]
    train_potential(points, tmp_path / "potential", *words)
    assert start(data, tmp_path / "direct", "--trainer.max_steps=3") == 0
    out = tmp_path / "out"
    told = [str(data), "--direct", str(tmp_path / "direct"), "--steps", "2", "--count", "3"]
    told += ["--potential", str(tmp_path / "potential"), "--out", str(out)]
    assert script.main(told) == 0
    rows = {row["way"]: row for row in table(out / "by_relaxation.csv")}
    assert float(rows["direct"]["mae_eV"]) > 0 and float(rows["relaxation"]["mae_eV"]) > 0
    assert rows["relaxation"]["converged"].endswith("of 3")
    lines = out / "val_id" / "relaxed.jsonl"
    before = lines.read_text()
    assert len(before.splitlines()) == 3
    lines.write_text("".join(before.splitlines(keepends=True)[:2]))  # before the third
    relaxed = []

    def relax(*words, **options):
        relaxed.append(relax_atoms(*words, **options))
        return relaxed[-1]

    monkeypatch.setattr(script, "relax_atoms", relax)
    assert script.main(told) == 0
    again = lines.read_text().splitlines()
    assert again[:2] == before.splitlines()[:2] and len(again) == 3
    assert len(relaxed) == 1  # finished systems are not relaxed again
    store = script.open_dataset(data / "val_id.safetensors")
    own = script.offsets(data / "frames" / "val_id.extxyz", store)
    assert list(own.values()) == pytest.approx([-100.0] * 13, abs=1e-5)
    assert script.main([str(data), "--splits", "train", *told[1:]]) == 2
    assert script.main([*told, "--fmax", "0.1"]) == 2
    ase.io.write(data / "frames" / "val_id.extxyz", frames[::-1])
    assert script.main(told) == 2  # relaxations of other frames are not reused
    assert "other digests" in capsys.readouterr().err
