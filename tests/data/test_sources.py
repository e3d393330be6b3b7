"""The table of sources: a new one is a class and a line, and all else finds it by itself."""

from __future__ import annotations

import json
import pickle
import re
import subprocess
import sys
from pathlib import Path

import ase.io
import numpy as np
import pytest
import torch
from ase import Atoms
from ase.constraints import FixAtoms
from oc20_files import SHARED, old_record, record, same, write_lmdb
from torch_geometric.loader import DataLoader

from molflt.commands.cli import main
from molflt.data.structures import SOURCES, open_dataset
from molflt.data.structures.datamodule import IS2REData
from molflt.data.structures.sources import split_path
from molflt.data.structures.splits import OC20_FILES, TEST_SPLITS, VAL_SPLITS
from molflt.data.structures.store import write_store


def diatomics():
    """The class that docs/data.md shows as an example."""
    page = Path(__file__).resolve().parents[2] / "docs" / "data.md"
    examples = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S)
    found = {}
    exec(next(code for code in examples if "class Diatomics" in code), found)
    return found["Diatomics"]


def test_a_new_source_is_a_class_and_a_line(tmp_path, monkeypatch, capsys):
    path = tmp_path / "train.diatomics"
    path.write_text("1 1 0.74 -4.5\n6 8 1.13 -11.1\n7 7 1.10 -9.8\n")
    with pytest.raises(ValueError, match=r"unknown ending '\.diatomics'; expected one of compact"):
        open_dataset(path)
    monkeypatch.setitem(SOURCES, "table of diatomics", diatomics())

    molecules = open_dataset(path)
    assert [item.sid for item in molecules] == [0, 1, 2]
    assert molecules.y_relaxed.tolist() == [-4.5, -11.1, -9.8] and molecules.bad == []
    assert molecules.where(1) == f"{path}: structure 1"
    assert split_path(tmp_path, "train") == path
    capsys.readouterr()  # the example prints as well
    assert main(["data", "inspect", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["atoms_total"] == 6 and found["elements"] == {"H": 2, "C": 1, "N": 2, "O": 1}
    store = tmp_path / "val_id.safetensors"
    assert main(["data", "convert", str(path), str(store)]) == 0
    for a, b in zip(molecules, open_dataset(store), strict=True):
        same(a, b)
    data = IS2REData(tmp_path, batch_size=3)
    assert data.normalizer() == pytest.approx((-25.4 / 3, np.std([-4.5, -11.1, -9.8])))
    with pytest.raises(ValueError, match=r"table of diatomics \(\.diatomics\)"):
        open_dataset(__file__)


def frames(path, records):
    found = []
    for item in records:
        atoms = Atoms(item.atomic_numbers.numpy(), item.pos.numpy(), pbc=True)
        atoms.cell[:] = item.cell[0].numpy()
        atoms.set_tags(item.tags.numpy())
        atoms.set_constraint(FixAtoms(mask=item.fixed.numpy()))
        labels = {key: float(item[key]) for key in ("y_init", "y_relaxed")}
        atoms.info = {"sid": item.sid, **labels}
        found.append(atoms)
    ase.io.write(path, found)


def lmdb(path, records):
    write_lmdb(path, {str(i): old_record(i, pos_relaxed=None) for i in range(len(records))})


# How each entry of the table would hold the records 0 to 3, and what it calls the third of them.
EXAMPLES = {
    "compact store": ("a.safetensors", write_store, "sid 1002"),
    "OC20 LMDB": ("a.lmdb", lmdb, "key '2'"),
    "file that ASE reads": ("a.traj", frames, "frame 2"),
}


@pytest.mark.parametrize("name", SOURCES)
def test_every_source_keeps_the_protocol(tmp_path, name):
    file, write, third = EXAMPLES[name]
    path, expected = tmp_path / file, [record(i, pos_relaxed=None) for i in range(4)]
    write(path, expected)
    structures = open_dataset(path)
    assert type(structures) is SOURCES[name] and structures.path == path and structures.bad == []
    for a, b in zip(expected, structures, strict=True):
        same(a, b)
    same(structures[-1], expected[3])
    assert structures.natoms.tolist() == [item.natoms for item in expected]
    assert structures.natoms.dtype == np.int64
    assert structures.y_relaxed.tolist() == [float(item.y_relaxed) for item in expected]
    assert structures.where(2) == structures.where(-2) == f"{path}: {third}"
    same(structures.with_unwrapped(1)[0], expected[1])
    with pytest.raises(IndexError, match=r"index 4 is outside 0\.\.3"):
        structures[4]
    structures[0].pos.zero_()
    same(structures[0], expected[0])  # neither the file nor memory was written to

    loader = DataLoader(structures, 2, num_workers=1, multiprocessing_context="fork")
    found = torch.cat([batch.sid for batch in loader]).tolist()  # after use here
    assert found == [item.sid for item in expected]
    same(structures[0], expected[0])  # this process still reads
    assert len(pickle.dumps(structures)) < 20_000


MODULES = [f"structures.{name}" for name in ["convert", "download", "splits", "summary"]]
MODULES += ["text.sources", "images.files"]


def test_reading_signatures_loads_nothing_heavy():
    modules = ", ".join(f"molflt.data.{name}" for name in MODULES)
    code = f"import sys, {modules}\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    heavy = {"torch_geometric", "lightning", "ase", "lmdb", "matplotlib", "datasets", "PIL"}
    assert not heavy & set(done.stdout.split())


def touch(*paths: Path) -> None:
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")


@pytest.mark.parametrize("below", ["is2re", "is2res_train_val_test_lmdbs/data/is2re"])
def test_layouts_of_the_download(tmp_path, below):
    base = tmp_path / below
    touch(base / "10k/train/data.lmdb", base / "all/val_id/data.lmdb")
    for root in (tmp_path, base, base / "10k"):
        assert split_path(root, "train") == base / "10k/train"
        assert split_path(root, "val_id") == base / "all/val_id"
    assert split_path(tmp_path, "10k/train") == base / "10k/train"
    touch(base / "all/train/data.lmdb")
    with pytest.raises(ValueError, match=r"several train splits: .*10k/train, .*all/train"):
        split_path(tmp_path, "train")
    assert split_path(base / "10k", "train") == base / "10k/train"
    assert split_path(base / "all", "train") == base / "all/train"


def test_table_names_every_split_with_published_sums():
    names = ["10k/train", "100k/train", "all/train"]
    names += [f"all/{split}" for split in VAL_SPLITS + TEST_SPLITS]
    assert list(OC20_FILES) == names
    sums = SHARED / "oc20_lmdb_md5sums.txt"
    if not sums.is_file():
        pytest.skip(f"the published md5 sums are not at {sums}")
    published = dict(reversed(line.split()) for line in sums.read_text().splitlines())
    for name, file in OC20_FILES.items():
        assert published[f"is2re/{name}/data.lmdb"] == file.md5
