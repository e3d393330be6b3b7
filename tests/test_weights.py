"""The packaged weights against DFT energies, and their treatment of tags."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
from ase import Atoms
from ase.build import add_adsorbate, fcc111, molecule, sort
from ase.io import write

import molflt
from molflt.commands.cli import main

ROOT = Path(__file__).resolve().parents[1]
WEIGHTS = ROOT / "molflt" / "weights" / "game-net"
DFT = ROOT.parent / "shared" / "data" / "gamenet_fg"


@pytest.mark.skipif(not DFT.exists(), reason=f"no GAME-Net data in {DFT}")
def test_the_errors_on_the_card_are_those_on_dft() -> None:
    systems = np.load(DFT / "gamenet_fg.npz")
    splits = json.loads((DFT / "splits.json").read_text())
    first = np.concatenate([[0], systems["natoms"].cumsum()])
    place = {name: i for i, name in enumerate(systems["name"])}

    def structure(i: int) -> Atoms:
        own = slice(first[i], first[i + 1])
        numbers, pos, tags = (systems[key][own] for key in ("atomic_numbers", "pos", "tags"))
        return Atoms(numbers, pos, cell=systems["cell"][i], pbc=True, tags=tags)

    model = molflt.load()
    results = json.loads((WEIGHTS / "config.json").read_text())["results"]
    assert results
    for split, result in results.items():
        rows = [place[name] for name in splits[split]]
        found = model.predict([structure(i) for i in rows])
        errors = np.abs([one.energy for one in found] - systems["y_relaxed"][rows])
        assert len(rows) == result["n"]
        assert errors.mean() == pytest.approx(result["mae_eV"], abs=1e-4)


def on_copper(gas: str, tags: bool) -> Atoms:
    slab = fcc111("Cu", (3, 4, 4), vacuum=8.0, periodic=True)
    add_adsorbate(slab, molecule(gas), 2.0, "ontop")
    if not tags:
        slab.set_tags(0)
    return slab


@pytest.mark.parametrize("gas", ["CH3OH", "C2H6", "CH3CHO"])
def test_tags_are_required_and_can_be_guessed(gas: str) -> None:
    model, plain = molflt.load(), on_copper(gas, tags=False)
    with pytest.raises(ValueError, match="tags"):
        model.predict(plain)
    known = model.predict(on_copper(gas, True), tags="ase")
    guessed = model.predict(plain, tags="guess")
    assert abs(known.energy - guessed.energy) < 0.5
    # two of four layers are surface, as in the training data
    assert guessed.outside == () and "0.25" in known.outside[0]
    with pytest.raises(ValueError, match="tag"):
        model.predict(plain, force=True)


def test_wrong_tags_are_refused() -> None:
    model = molflt.load()
    for tag, reason in ((1, "no adsorbate"), (2, "no slab")):
        atoms = on_copper("CH3OH", tags=False)
        atoms.set_tags(tag)
        with pytest.raises(ValueError, match=reason):
            model.predict(atoms)
    thin = fcc111("Cu", (3, 4, 2), vacuum=8.0, periodic=True)
    add_adsorbate(thin, molecule("CH3OH"), 2.0, "ontop")  # the layers look like OC20's tags
    with pytest.raises(ValueError, match="geometry.*CH4O"):
        model.predict(thin)


@pytest.mark.parametrize("name", ["POSCAR", "slab.cif", "slab.xyz"])
def test_files_without_tags_from_the_command_line(name: str, tmp_path, capsys) -> None:
    out = tmp_path / "out.csv"
    write(tmp_path / name, sort(on_copper("CH3OH", tags=False)))
    words = ["predict", str(tmp_path / name), f"--out={out}", "--device=cpu"]
    assert main(words) == 2 and not out.exists()
    assert "--tags guess" in capsys.readouterr().err
    assert main([*words, "--tags", "guess"]) == 0
    assert "1 adsorbate CH4O, 24 surface, 24 subsurface atoms" in capsys.readouterr().err
    ((energy,),) = ([float(row["energy_eV"])] for row in csv.DictReader(out.open()))
    assert -1.0 < energy < 0.5
    assert main([*words, "--force", "true"]) == 2
    assert "tag > 0" in capsys.readouterr().err
