import ase.io
import numpy as np
import pytest
from script_files import load_script
from tiny_run import argon, table


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
