import json
import re
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path
from statistics import mean, pstdev

import make_data as generator
import numpy as np
import pytest
from ase import Atoms
from ase.calculators.emt import EMT
from ase.io import read
from kit.runs import digest
from make_data import make
from making import calculators, slabs
from making import systems as make_systems

from molflt.data.structures.base import to_atoms
from molflt.data.structures.sources import VAL_SPLITS
from molflt.data.structures.store import StructureStore

SMALL = {"train": 2, "val": 1, "seed": 7, "frames": True}
# Relaxations end at larger forces (eV/Å), after fewer steps.
slabs._FORCE_TOLERANCE, make_systems._FORCE_TOLERANCE, make_systems._SETTLED = 0.5, 0.5, 1.0


def contents(directory: Path) -> dict[str, bytes]:
    files = (path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}


def in_this_process(most: int) -> Callable[..., Iterable[None]]:
    """Replaces workers, whose imports take seconds, and interrupts after `most` systems."""

    def relax(tasks: list[object], workers: int) -> Iterable[None]:
        yield from map(generator._relax_one, islice(tasks, most))
        if len(tasks) > most:
            raise KeyboardInterrupt

    return relax


@pytest.fixture(scope="module")
def made_here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("made") / "here"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generator, "_in_processes", in_this_process(99))
        make(directory, **SMALL)
    return directory


def test_frames_lead_from_the_initial_to_the_relaxed_structure(made_here: Path) -> None:
    store = StructureStore(made_here / "train.safetensors")
    frames = read(made_here / "frames" / "train.extxyz", ":")
    elements = json.loads((made_here / "made.json").read_text())["references_eV"]
    for record in (store[i] for i in range(len(store))):
        own = [frame for frame in frames if frame.info["sid"] == record.sid]
        for frame, pos in ((own[0], record.pos), (own[-1], record.pos_relaxed)):
            np.testing.assert_allclose(frame.positions, pos.numpy(), atol=1e-4)
        found = own[-1].get_potential_energy() - own[0].get_potential_energy()
        assert found == pytest.approx(float(record.y_relaxed - record.y_init), abs=1e-4)
        again = own[-1].copy()
        again.calc = EMT()
        np.testing.assert_allclose(again.get_forces(), own[-1].get_forces(), atol=1e-3)
        # compute the label from the calculator alone
        mine = record.tags.numpy() == 2
        slab = own[0][~mine]  # the adsorbate was placed on the relaxed clean slab
        slab.calc = EMT()
        known = sum(elements[symbol] for symbol in own[-1].symbols[mine])
        label = again.get_potential_energy() - slab.get_potential_energy() - known
        assert float(record.y_relaxed) == pytest.approx(label, abs=1e-4)


def test_interrupted_and_growing_data_sets_have_the_bytes_of_one_made_at_once(
    tmp_path: Path, made_here: Path, monkeypatch
) -> None:
    """The run is interrupted after one system, and later grows from one to two training systems."""
    directory = tmp_path / "data"
    monkeypatch.setattr(generator, "_in_processes", in_this_process(1))
    with pytest.raises(KeyboardInterrupt):
        make(directory, **{**SMALL, "train": 1})
    assert not list(directory.glob("*.safetensors"))
    monkeypatch.setattr(generator, "_in_processes", in_this_process(4))
    make(directory, **{**SMALL, "train": 1})
    monkeypatch.setattr(generator, "_in_processes", in_this_process(1))
    with monkeypatch.context() as patch, pytest.raises(NameError):
        patch.delattr(generator, "write_csv")  # ends after the frames were written
        make(directory, **SMALL)
    make(directory, **SMALL)
    assert contents(directory) == contents(made_here)


def test_references_and_adsorption_energy_by_hand() -> None:
    simple = calculators.linear_references({"H2": -7.0, "H2O": -14.0, "CO": -15.0, "N2": -16.0})
    assert simple == {"H": -3.5, "O": -7.0, "C": -8.0, "N": -8.0}
    # CH3OH: one C, four H, one O
    energy = calculators.adsorption_energy(-130.0, -100.0, ["C", "O", *"HHHH"], simple)
    assert energy == -130.0 + 100.0 + 8.0 + 7.0 + 14.0


def test_large_systems_have_energies_of_a_larger_slab() -> None:
    plan = make_systems._Plan("emt", 7, (("H", 0.5), ("C", -0.1), ("N", 0.1), ("O", 0.8)))
    system = make_systems._relax_system(plan, "val_large", 1)
    record, names = system.record, system.names["adsorbate"].split()
    tags = record.tags.numpy()
    cells = int((tags == 1).sum()) // 4
    assert (tags < 2).sum() == 16 * cells and len(names) <= cells in (2, 4, 6)
    relaxed = to_atoms(record)
    relaxed.positions, relaxed.calc = record.pos_relaxed.numpy(), EMT()
    adsorbed = relaxed.symbols[tags == 2]
    assert sorted(adsorbed) == sorted(s for name in names for s in Atoms(name).symbols)
    catalyst, name = system.names["catalyst"], system.names["facet"]  # they depend on rounding
    facets = slabs._FACETS[slabs.CATALYSTS[catalyst][0]]
    facet = next(one for one in facets if one.name == name.removesuffix("b"))
    surface = slabs._Surface(catalyst, facet, name.endswith("b"))
    _, energy = slabs._relaxed_slab("emt", surface)
    references = sum(dict(plan.references)[symbol] for symbol in adsorbed)
    expected = relaxed.get_potential_energy() - cells * energy - references
    assert float(record.y_relaxed) == pytest.approx(expected, abs=1e-3)


# --- the shipped sample ---------------------------------------------------------------------

ROOT = Path(__file__).resolve().parents[2]
SAMPLE = ROOT / "datasets" / "chgnet-sample"


def test_the_card_matches_the_files() -> None:
    card = (SAMPLE / "README.md").read_text(encoding="utf-8")
    for split in ("train", *VAL_SPLITS):
        file = SAMPLE / f"{split}.safetensors"
        y = StructureStore(file).y_relaxed.tolist()
        energies = f"{mean(y):.2f} ± {pstdev(y):.2f} | {min(y):.2f} to {max(y):.2f}"
        assert re.search(rf"\| {split} \| {len(y)} \| [^|]* \| {energies} \|", card)
        assert f"| `{file.name}` | {file.stat().st_size:,} | `{digest(file)}` |" in card
    assert sum(p.stat().st_size for p in SAMPLE.iterdir()) <= 5_000_000
