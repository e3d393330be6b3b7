import json
from pathlib import Path

import numpy as np
import pytest
from ase.build import add_adsorbate, fcc111
from tiny_run import write_data

from molflt.data.structures import open_dataset
from molflt.data.structures.datamodule import IS2REData
from molflt.data.structures.domain import Domain
from molflt.data.structures.in_memory import StructuresInMemory
from molflt.data.structures.records import make_record


def record(slab: str, adsorbate: str = "", tags: bool = True, pbc=(1, 1, 1), **more):
    """Returns bonded atoms in a row, slab atoms first; each symbol is one letter."""
    numbers = [{"H": 1, "C": 6, "N": 7, "O": 8, "K": 19}[one] for one in slab + adsorbate]
    pos = np.arange(3 * len(numbers)).reshape(-1, 3) * 0.22
    own = [1] * len(slab) + [2] * len(adsorbate)
    return make_record(
        pos=pos, atomic_numbers=numbers, cell=np.diag([8, 8, 20]) if any(pbc) else None, pbc=pbc,
        tags=own if tags else None, **more,
    )  # fmt: skip


def domain(*records) -> Domain:
    return Domain.of(StructuresInMemory(list(records)))


TRAINED = domain(record("KKKK", "HO", y_relaxed=-1.0), record("KKKKK", "HOO", y_relaxed=0.5))


def test_domain_summarizes_the_data() -> None:
    own = TRAINED.to_json()
    assert own["systems"] == 2 and own["atoms"] == [6, 8]
    assert own["elements"] == {"slab": ["K"], "adsorbate": ["H", "O"], "untagged": []}
    assert own["slab_atoms"] == [4, 5] and own["adsorbate_atoms"] == [2, 3]
    assert own["periodic"] == ["xyz"] and own["kind"] == "adsorption"
    assert own["energy_eV"] == [-1.0, 0.5] and own["relaxed"] == own["untagged"] == 0
    assert TRAINED.describe() == "2 systems of K with H, O; 6 to 8 atoms, 2 to 3 per adsorbate"


@pytest.mark.parametrize(
    ("structure", "reasons"),
    [
        (record("KKKK", "HO"), []),
        (record("KKKKN", "HO"), ["N not in training"]),
        (record("KKKKO", "HO"), ["O in the slab, in training only in adsorbates"]),
        (record("KKK", "HO"), ["atoms: 5, trained on 6 to 8"]),
        (record("KKKK", "HOOO"), ["adsorbate atoms: 4, trained on 2 to 3"]),
        (record("KKKK", "HH"), ["adsorbate atoms: 1, trained on 2 to 3"]),  # not bonded
        (record("KKKKKK"), ["no adsorbate (tag 2)"]),
        (record("", "HOOOOO"), ["no slab (tags 0 and 1)", "adsorbate atoms: 6, trained on 2 to 3"]),
        (record("KKKK", "HO", tags=False), ["no tags, unlike the training data"]),
        (record("KKKK", "HO", pbc=(1, 1, 0)),
         ["periodic along x, y, trained on periodic along x, y, z"]),
    ],
    ids=lambda value: "+".join(value)[:30] if isinstance(value, list) else "",
)  # fmt: skip
def test_each_way_to_lie_outside_has_its_reason(structure, reasons: list[str]) -> None:
    assert TRAINED.outside(structure) == reasons
    meant = not any(reason.startswith("no ") for reason in reasons)
    assert (TRAINED.refusal(structure) == "") == meant


def test_domains_without_tags_take_structures_without_tags() -> None:
    mixed = domain(record("KKKK", tags=False), record("KKKK", "HO"))
    for own in (mixed, TRAINED.without_tags()):
        assert own.refusal(record("KKKK", "HO", tags=False)) == ""
    assert TRAINED.kind == "adsorption" and TRAINED.beyond_labels(99.0)
    potential = TRAINED.without_tags()  # its energies grow with the size of the structure
    assert potential.kind == "unknown" and potential.beyond_labels(99.0) == ""
    records = [record("KKKK", tags=False), record("KKKK", "HO"), record("CCCC", pbc=(0, 0, 0))]
    own = domain(*records)
    assert [own.outside(one) for one in records] == [[], [], []]
    assert own.outside(record("CCCC", "OK")) == []  # C was seen without tags
    assert own.untagged == 1 and own.to_json()["periodic"] == ["", "xyz"]


def test_the_axis_of_the_vacuum_is_not_compared() -> None:
    atoms = fcc111("Cu", (2, 2, 2), vacuum=6.0, periodic=True)
    add_adsorbate(atoms, "O", 1.2)
    crystal, slab, other, cluster = (
        make_record(
            pos=atoms.positions, atomic_numbers=atoms.numbers, cell=atoms.cell.array, pbc=pbc,
            tags=[1] * 8 + [2],
        )
        for pbc in ((1, 1, 1), (1, 1, 0), (1, 0, 1), (0, 0, 0))
    )  # fmt: skip
    own = domain(crystal)
    assert own.outside(slab) == domain(slab).outside(crystal) == []
    assert own.outside(other) and own.outside(cluster)
    assert own.without_tags().outside(slab)  # long-range energies depend on it


def test_the_share_of_surface_atoms_is_compared() -> None:
    half, whole = record("KKKK", "HO"), record("KKKK", "HO")
    half.tags[:2] = 0
    own = domain(half)
    assert own.surface == (0.5, 0.5) and own.outside(half) == []
    (reason,) = own.outside(whole)
    assert "surface" in reason and "1.00, trained on 0.50" in reason
    old = own.to_json()
    del old["surface_share"]  # as in files of version 0.1
    assert Domain.from_json(old, "domain.json").outside(whole) == []


def test_domains_round_trip(tmp_path: Path) -> None:
    write_data(tmp_path, 9, 3)
    (content,) = IS2REData(tmp_path).files().values()
    own = Domain.of(open_dataset(tmp_path / "train.safetensors"))
    assert Domain.from_json(json.loads(content), "domain.json") == own
    assert own.relaxed == own.systems == 9
