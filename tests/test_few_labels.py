"""Scripts about few labels, potentials, and structures of other sizes."""

import json

import ase.io
import numpy as np
import pytest
import torch
from ase.build import fcc111
from ase.constraints import FixAtoms
from ase.geometry import get_distances
from physics.test_adsorption import adsorbed, slab
from script_files import load_script
from tiny_run import SMALL, argon, start, structures, table, write_points, write_splits
from torch import nn

from molflt.adsorption import placements
from molflt.data.structures import open_dataset
from molflt.data.structures.ase_fields import Converter, fixed_atoms
from molflt.data.structures.sources import VAL_SPLITS
from molflt.data.structures.store import write_store

sizes = load_script("sizes")
from peers_kit.jobs import run_job  # noqa: E402


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("--ridge --jobs=2", "--jobs"),
        ("--ridge -- --task.lr=1", "--"),
        ("--label 3", "--label"),  # an abbreviation
        ("--seeds 1 --seeds 2", "--seeds"),
    ],
)
def test_idle_abbreviated_and_repeated_options_of_scripts(tmp_path, capsys, words, named) -> None:
    with pytest.raises(SystemExit) as stop:  # not before the message that names the option
        raise SystemExit(load_script("few_labels").main(["--data=x", *words.split()]))
    assert stop.value.code == 2 and f" {named}" in capsys.readouterr().err.splitlines()[-1]


def test_merged_sets_lose_their_references(tmp_path):
    """The second set has other references, and no relaxed positions."""
    shift = np.linspace(-1.0, 2.0, 119)
    for split, seed in (("train", 0), ("val_id", 1)):
        records = list(structures(9, seed))
        write_store(tmp_path / "one" / f"{split}.safetensors", records)
        for record in records:
            record.y_relaxed += shift[record.atomic_numbers[record.tags == 2]].sum()
            record.y_baseline = record.y_relaxed - 0.5
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
            assert float(two.y_relaxed - two.y_baseline) == pytest.approx(0.5)
            assert not bool((one.pos_relaxed == one.pos).all())
            assert bool((two.pos_relaxed == two.pos).all())


def test_larger_draws_contain_smaller_ones(tmp_path):
    script, data, drawn = load_script("few_labels"), tmp_path / "data", {}
    write_splits(data, train=structures(12), val_id=structures(2, 1))
    for count, seed in ((3, 0), (6, 0), (3, 1)):
        folder = tmp_path / f"{count}-{seed}"
        script.draw(data, folder, count, seed)
        dataset = open_dataset(folder / "train.safetensors")
        drawn[count, seed] = {int(record.sid) for record in dataset}
        assert len(open_dataset(folder / "val_id.safetensors")) == 2
    assert len(drawn[3, 0]) == 3 and drawn[3, 0] < drawn[6, 0] and drawn[3, 0] != drawn[3, 1]
    write_store(tmp_path / "other" / "train.safetensors", structures(12, 2))
    with pytest.raises(ValueError, match="3-0.*different data"):
        script.draw(tmp_path / "other", tmp_path / "3-0", 3, 0)
    words = ["--data", str(data), "--out", str(tmp_path), "--ridge", "--seeds", *"00", "--labels"]
    assert script.main([*words, "3", "6", "3"]) == 0
    rows = table(tmp_path / "few_labels.csv")
    assert [row["labels"] for row in rows] == ["3", "6"]
    assert all(0 < float(row["mae_eV"]) < 10 for row in rows)
    for count in (99, 0, -5):
        with pytest.raises(ValueError, match=f"--labels {count}: expected 1 to 12"):
            script.draw(data, tmp_path / str(count), count, 0)


def test_placements_are_relaxed_and_ranked(tmp_path, capsys, monkeypatch):
    script, data, out = load_script("placements"), tmp_path / "data", tmp_path / "out"
    placed = placements(fcc111("Cu", (2, 2, 2), vacuum=8.0, periodic=True), "OH")[0]
    write_splits(data, **dict.fromkeys(VAL_SPLITS, (Converter().record(placed),)))
    made = {"calculator": "emt", "references_eV": {"O": 1.25, "H": -0.5}}
    (data / "made.json").write_text(json.dumps(made))
    words = ["relax", str(data), str(out), "--pairs", "1", "--placements", "12"]
    with monkeypatch.context() as patch, pytest.raises(KeyError):
        patch.setattr(ase.io, "write", lambda path, *_: {}[path.write_text("1")])  # ends early
        script.main(words)
    assert script.main(words) == 0
    found = ase.io.read(out / "placements.extxyz", ":")
    assert 1 < len(found) < 12  # EMT breaks some bonds
    assert all(one.info["y_relaxed"] < one.info["y_init"] for one in found)
    before = (out / "pair0.extxyz").stat().st_mtime_ns
    assert script.main(words) == 0 and (out / "pair0.extxyz").stat().st_mtime_ns == before
    rows = [f"{one.info['y_relaxed']}" for one in found]
    (out / "exact.csv").write_text("\n".join(["energy_eV", *rows]))
    assert script.main(["rank", str(out), str(out / "exact.csv")]) == 0
    assert "| exact | 1.00 | 1.00 | 0.00 |" in capsys.readouterr().out
    (out / "exact.csv").write_text("\n".join(["energy_eV", *rows[1:]]))
    assert script.main(["rank", str(out), str(out / "exact.csv")]) == 2
    assert f"expected {len(rows)} energies; got {len(rows) - 1}" in capsys.readouterr().err
    assert script.main([*words, "--seed", "1"]) == 2
    assert "seed" in capsys.readouterr().err
    placed.numbers[-1] = 7
    write_splits(data, train=structures(9), val_id=(Converter().record(placed),))
    assert load_script("merge").main([str(out), f"a={data}"]) == 2
    assert "adsorbates with N in val_id, but not in train" in capsys.readouterr().err
    assert load_script("merge").main([str(out), "no-root"]) == 2
    assert "no-root: expected NAME=ROOT" in capsys.readouterr().err


# --- potentials -----------------------------------------------------------------------------------


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
    assert script.main([*told[:3], "0.001", *told[4:]]) == 2
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
    assert script.main([*words, "--seeds", *"00"]) == 0
    assert len(table(out / "potentials.csv")) == len(rows)
    assert script.main([*words, "--lr", "0.1"]) == 2  # results with other options are not reused
    capsys.readouterr()
    ase.io.write(points / "train.extxyz", argon(6, 5))  # results for other data are not reused
    assert script.main(words) == 2
    assert "made with different digests" in capsys.readouterr().err
    rows = [{"split": "a", "model": "m", "parameters": 9, "steps": n} for n in (10, 30)]
    assert script.table(rows).splitlines()[2].startswith("| a | m | 9 | 20 |")  # a mean


# --- other sizes ----------------------------------------------------------------------------------


def slab_with(name: str, n: int = 3):
    """Returns n x n Cu(111) with a fixed bottom layer, and a molecule wrapped into the cell."""
    both = adsorbed(slab(n, n, vacuum=6.0), name)
    both.set_constraint(FixAtoms(mask=both.get_tags() == 0))
    both.wrap()
    return both


def test_structures_of_other_sizes():
    systems = [sizes.separate(slab_with(name)) for name in ("CH3OH", "CO")]
    found = sizes.build(systems)
    assert {name: len(part[0]) for name, part in found.items()} == {
        **{"1x1": 33, "2x1": 60, "2x2": 114, "3x3": 249, "whole": 66, "slab": 27},
        **{"8 Å": 33, "12 Å": 33, "20 Å": 33, "vacuum": 33, "AB": 251, "A": 249, "B": 245},
    }
    area = np.linalg.det(systems[0].slab.cell[:2, :2])
    for one, *_ in found.values():
        cells = round(one.cell.volume / one.cell[2, 2] / area)
        assert (one.get_tags() < 2).sum() == 27 * cells and fixed_atoms(one).sum() == 9 * cells
        apart = get_distances(one.positions, cell=one.cell, pbc=True)[1]
        assert apart[~np.eye(len(one), dtype=bool)].min() > 0.9
    lifted, old = found["12 Å"][0], found["1x1"][0]
    moved = (lifted.positions - old.positions)[:, 2]
    assert moved == pytest.approx(12.0 * (old.get_tags() == 2))
    assert lifted.cell[2, 2] - old.cell[2, 2] == pytest.approx(12.0)
    (both,) = found["AB"]
    ends = both.positions[-8:-2], both.positions[-2:]
    assert 10.0 <= get_distances(*ends, both.cell, both.pbc)[1].min() < 13.0
    # changes of a model that sums atoms
    energy = {name: sizes.energies(Sum(), part) for name, part in found.items()}
    means = {name: np.abs(values).mean() for name, values in sizes.changes(energy).items()}
    expected = {"2x1": 0.27, "2x2": 0.81, "3x3": 2.16, "3x3 - 2x2": 1.35, "whole": 0.5}
    expected |= {"slab": 1.27, "8 Å": 2.73, "12 Å": 2.73, "20 Å": np.nan, "vacuum": 0.0}
    expected["two"] = 1.0 + 9 * 0.27
    assert means == pytest.approx(expected, nan_ok=True)


class Sum(nn.Module):
    """Predicts 1 - n_adsorbate + 0.01 n_slab, in eV, from numbers of atoms; refuses tall cells."""

    def forward(self, batch):
        atoms = torch.where(batch.tags == 2, -1.0, 0.01).double()
        energy = torch.ones(batch.num_graphs, dtype=torch.float64)
        if (batch.cell[:, 2, 2] > 30).any():
            raise ValueError("too high")
        return {"energy": energy.index_add(0, batch.batch, atoms)}


def record(name: str, sid: int):
    atoms = slab_with(name, n=2)
    atoms.info["y_relaxed"] = -1.0 - sid
    atoms.set_array("pos_relaxed", atoms.positions)
    return Converter().record(atoms, sid)


def test_the_table_of_a_run_and_of_a_peer_that_is_trained_once(tmp_path, capsys, monkeypatch):
    done = []

    def work(path, job):
        done.append(job["minutes"])
        path.parent.mkdir(parents=True)
        run_job(json.loads(json.dumps(job)), path)

    monkeypatch.setattr(sizes.pool, "_work", work)
    for split, names in {"train": ["CO", "H2O", "CH3OH"], "val_id": ["CH4", "N2"]}.items():
        write_splits(tmp_path, **{split: [record(name, i) for i, name in enumerate(names)]})
    run = str(tmp_path / "run")
    assert start(tmp_path, run, "--trainer.max_steps=1", "--trainer.val_every=1") == 0
    words = [run, "peer:painn", "--data", str(tmp_path), "--out", str(tmp_path / "out")]
    words += ["--systems", "2", "--minutes", "0.001", "--", *SMALL, "--task.lr=0.001"]
    assert sizes.main(words) == 0
    table = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert [line.split()[1] for line in table[2:]] == [run, "peer:painn"]
    found = json.loads((tmp_path / "out" / "sizes.json").read_text())
    assert found["structures"]["2x2"] == 2 and found["eV"][run]["2x2"] > 0
    # the energy of a trained net starts at the mean and does not change when it is read again
    assert 1 < found["eV"]["peer:painn"]["slab"] < 2.5
    assert sizes.main(words) == 0 and done == [0.001]
    assert json.loads((tmp_path / "out" / "sizes.json").read_text()) == found
    assert sizes.main(["peer:gemnet", *words[2:]]) == 2
    assert "peer:gemnet: expected one of schnet, " in capsys.readouterr().err
