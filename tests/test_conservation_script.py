"""scripts/conservation.py: the drift of energies, and a short run of a potential."""

import csv

import ase.io
import numpy as np
import pytest
from script_files import load_script
from tiny_run import argon

from molflt.commands.cli import main


def test_drift_is_the_slope_of_the_total_energy():
    script = load_script("conservation")
    rows = [{"fs": t, "total_meV_per_atom": 2.0 + 0.01 * t} for t in np.arange(0.0, 101.0, 5.0)]
    assert script.drift(rows) == pytest.approx((1.0, 0.0), abs=1e-9)


def test_energy_is_conserved_better_with_smaller_steps(tmp_path, capsys):
    script = load_script("conservation")
    for split, seed in (("train", 0), ("val_id", 1)):
        ase.io.write(tmp_path / f"{split}.traj", argon(6, seed))
    sizes = {"dim": 16, "heads": 2, "layers": 1, "ffn_dim": 16, "num_features": 8}
    words = [f"--model.{name}={value}" for name, value in sizes.items()]
    words += ["--recipe=potential", f"--data.root={tmp_path}", f"--run={tmp_path / 'run'}"]
    words += ["--trainer.max_steps=3", "--task.warmup_steps=1", "--trainer.accelerator=cpu"]
    assert main(["train", *words]) == 0
    ase.io.write(tmp_path / "in.xyz", argon(1, 2))
    spread = []
    for name, step, every in (("long", 8.0, 1), ("short", 2.0, 4)):
        told = [str(tmp_path / "run"), str(tmp_path / "in.xyz"), "--ps", "0.08"]
        told += ["--timestep", str(step), "--every", str(every), "--out", str(tmp_path / name)]
        assert script.main(told) == 0
        with (tmp_path / name / "conservation.csv").open() as file:
            total = [float(row["total_meV_per_atom"]) for row in csv.DictReader(file)]
        assert len(total) == 11 and (tmp_path / name / "conservation.png").is_file()
        spread.append(np.std(total))
    assert spread[1] < 0.2 * spread[0]
    assert "0.08 ps at " in capsys.readouterr().out
    assert script.main([str(tmp_path / "run"), str(tmp_path / "none.xyz")]) == 2
    assert "none.xyz: No such file" in capsys.readouterr().err
    assert script.main([*told, "--ps", "0.001"]) == 2
    assert "--ps 0.001 with --timestep 2 is 0 steps; expected --every" in capsys.readouterr().err
