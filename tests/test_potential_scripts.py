"""Scripts about potentials."""

import ase.io
import numpy as np
import pytest
from script_files import load_script
from tiny_run import argon, table, write_points


def test_drift_is_the_slope_of_the_total_energy():
    script = load_script("conservation")
    rows = [{"fs": t, "total_meV_per_atom": 2.0 + 0.01 * t} for t in np.arange(0.0, 101.0, 5.0)]
    assert script.drift(rows) == pytest.approx((1.0, 0.0), abs=1e-9)


def test_energy_is_conserved_better_with_smaller_steps(potential_run, tmp_path, capsys):
    script, spread = load_script("conservation"), []
    ase.io.write(tmp_path / "in.xyz", argon(1, 2))
    for name, step, every in (("long", 8.0, 1), ("short", 2.0, 4)):
        told = [str(potential_run), str(tmp_path / "in.xyz"), "--ps", "0.08"]
        told += ["--timestep", str(step), "--every", str(every), "--out", str(tmp_path / name)]
        assert script.main(told) == 0
        rows = table(tmp_path / name / "conservation.csv")
        total = [float(row["total_meV_per_atom"]) for row in rows]
        assert len(total) == 11 and (tmp_path / name / "conservation.png").is_file()
        spread.append(np.std(total))
    assert spread[1] < 0.2 * spread[0]
    assert "0.08 ps at " in capsys.readouterr().out
    assert script.main([str(potential_run), str(tmp_path / "none.xyz")]) == 2
    assert "none.xyz: No such file" in capsys.readouterr().err
    assert script.main([*told, "--ps", "0.001"]) == 2
    assert "--ps 0.001 with --timestep 2 is 0 steps; expected --every" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_both_models_learn_and_a_second_start_repeats_nothing(tmp_path, monkeypatch, capsys):
    script = load_script("potentials")
    points, out = write_points(tmp_path / "points"), tmp_path / "out"
    words = [str(points), "--out", str(out), "--seconds", "0.3", "--dim", "16", "--layers", "1"]
    assert script.main(words) == 0
    rows = {row["model"]: row for row in table(out / "potentials.csv")}
    assert rows.keys() == {"mean", "molflt", "schnet", "painn"}
    assert all(float(row["force_mae_meV_per_A"]) > 0 for row in rows.values())
    assert int(rows["schnet"]["steps"]) >= 1 and (out / "potentials.md").is_file()
    monkeypatch.setattr(script, "train", None)
    assert script.main(words) == 0
    assert script.main([*words, "--lr", "0.1"]) == 2  # results with other options are not reused
    capsys.readouterr()
    ase.io.write(points / "train.extxyz", argon(6, 5))  # results for other data are not reused
    assert script.main(words) == 2
    assert "made with different digests" in capsys.readouterr().err
    rows = [{"split": "a", "model": "m", "parameters": 9, "steps": n} for n in (10, 30)]
    assert script.table(rows).splitlines()[2].startswith("| a | m | 9 | 20 |")  # a mean
