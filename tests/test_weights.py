"""The weights that come with the package, against the DFT energies they were trained to predict."""

import json
from pathlib import Path

import numpy as np
import pytest
from ase import Atoms

import molflt

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


def test_without_any_file_a_slab_has_an_energy_and_what_is_unknown_is_told() -> None:
    from ase.build import add_adsorbate, fcc111, molecule

    slab = fcc111("Pt", (3, 4, 4), vacuum=8.0, periodic=True)
    slab.set_tags(np.where(slab.get_tags() > 2, 0, 1))
    gas = molecule("CH3OH")
    gas.set_tags(2)
    add_adsorbate(slab, gas, 2.2, "ontop")
    known, unknown = molflt.load().predict([slab, Atoms("Na", tags=[2])], force=True)
    assert -2.0 < known.energy < 0.5 and known.outside == ()
    assert any("Na not in training" in reason for reason in unknown.outside)
