import pickle
import re
from pathlib import Path

import ase.io
import numpy as np
import pytest
import torch
from oc20_files import old_record, record, same, write_lmdb
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from tiny_run import error_of, flip, inspected, printed
from torch_geometric.loader import DataLoader

from molflt.commands.cli import main
from molflt.data.structures import SOURCES, Structures, open_dataset
from molflt.data.structures.ase_files import AseStructures
from molflt.data.structures.base import to_atoms
from molflt.data.structures.datamodule import IS2REData
from molflt.data.structures.oc20 import Oc20Lmdb
from molflt.data.structures.records import make_record
from molflt.data.structures.sources import split_path
from molflt.data.structures.store import StructureStore, write_store
from molflt.evaluation.predictions import open_structures


def mixed():
    molecule = make_record(pos=[[0.0, 0.0, 0.0]], atomic_numbers=[1], sid=-3, y_init=2.5, charge=-1)
    unlabelled = record(1, y_relaxed=None, pos_relaxed=None, tags=None)
    slab = record(2, atoms=31, pbc=[True, True, False])
    return [record(0), molecule, unlabelled, slab, record(3, sid=2**40)]


@pytest.fixture
def store(tmp_path):
    path = tmp_path / "train.safetensors"
    assert write_store(path, mixed(), source="a test") == 5
    return path


def damage(path, **changes):
    columns = load_file(path)
    for name, change in changes.items():
        old = columns.pop(name)
        if change is not None:
            columns[name] = change(old.copy())
    with safe_open(path, framework="numpy") as file:
        metadata = file.metadata()
    metadata.pop("sha256", None)  # as in files of other programs or older versions
    save_file(columns, path, metadata=metadata)


def put(position, value):
    def change(column):
        raw = column.view("u1") if column.dtype == bool else column  # any byte
        raw[position] = value
        return column

    return change


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cell": None}, "key 'cell' must be float32 .* got nothing"),
        ({"pos": lambda c: c[:-1]}, r"key 'pos' must be float32 \(53, 3\); got .*\(52, 3\)"),
        ({"offsets": put(slice(1, 3), (2**63 - 1, -10))}, "'offsets' must be .* increase from 0"),
        ({"tags": lambda c: c[:0].astype("i4")}, "key 'tags' must be uint8 .*; got"),
    ],
)
def test_damaged(store, changes, message):
    damage(store, **changes)
    with pytest.raises(ValueError, match=message):
        open_dataset(store)


@pytest.mark.parametrize(
    ("changes", "index", "message"),
    [
        ({"pos": put(0, np.nan)}, 0, "sid 1000: pos must be finite"),
        ({"atomic_numbers": put(7, 200)}, 1, "sid -3: atomic_numbers must be 1 to 118; got 200"),
        ({"pos_relaxed": put(3, np.nan)}, 0, "sid 1000: pos_relaxed must be finite.* for atom 3"),
    ],
)
def test_structures_of_other_writers_are_checked(store, changes, index, message):
    damage(store, **changes)
    dataset, others = open_dataset(store), [i for i in range(5) if i != index]
    assert dataset.source == "a test"
    for i in others:
        same(dataset[i], mixed()[i])
    with pytest.raises(ValueError, match=rf"train\.safetensors: {message}"):
        dataset[index]
    kept = open_dataset(store, skip_bad=True)
    ((name, reason),) = kept.bad
    assert re.search(message, f"{name}: {reason}") and len(kept) == 4
    assert kept.natoms.tolist() == [dataset.natoms[i] for i in others]


EMT = "--calculator=ase.calculators.emt:EMT"


def test_a_changed_byte_is_found_by_whoever_reads(store, tmp_path, capsys):
    assert "verified: true" in printed(capsys, "data", "inspect", store).out
    flip(store)
    message = f"{store}: damaged since it was written"
    copy = tmp_path / "copy.safetensors"
    for words in (["inspect", store], ["convert", store, copy], ["baseline", store, copy, EMT]):
        assert message in error_of(capsys, "data", *words)
    assert not copy.exists()
    for read in (
        lambda: open_structures(store, skip_bad=False),
        IS2REData(tmp_path, val_split="train").setup,
    ):
        with pytest.raises(ValueError, match="damaged since it was written"):
            read()


def test_writing_fails_as_a_whole(store):
    before = store.read_bytes()

    def broken():
        yield record(0)
        raise ValueError("sid 9: something")

    with pytest.raises(ValueError, match="sid 9"):
        write_store(store, broken())
    invalid = record(5)
    invalid.pos[0] = float("inf")
    with pytest.raises(ValueError, match="sid 1005: pos must be finite"):
        write_store(store, [record(0), invalid])
    with pytest.raises(ValueError, match="no structures to write"):
        write_store(store, [])
    assert store.read_bytes() == before
    assert [p.name for p in store.parent.iterdir()] == [store.name]
    left = [store.with_name(f".{name}.99999999.part") for name in (store.name, "other")]
    for part in left:
        part.touch()
    write_store(store, [record(0)])
    assert [part.exists() for part in left] == [False, True]  # a machine may be writing the other


# --- the table of sources ---------------------------------------------------------------------


PAGE = Path(__file__).resolve().parents[2] / "docs" / "data.md"
(CODE,) = re.findall(r"^```python\n([^`]*class Diatomics.*?)^```", PAGE.read_text(), re.M | re.S)
exec(CODE, globals())  # the example of a new source
Diatomics: type[Structures] = globals()["Diatomics"]


def test_a_new_source_is_a_class_and_a_line(tmp_path, monkeypatch, capsys):
    path = tmp_path / "train.diatomics"
    path.write_text(Diatomics.example)
    with pytest.raises(ValueError, match=r"unknown ending '\.diatomics'; expected one of compact"):
        open_dataset(path)
    monkeypatch.setitem(SOURCES, Diatomics.kind, Diatomics)
    assert open_dataset(path).y_relaxed.tolist() == [-4.5, -11.1, -9.8]
    assert split_path(tmp_path, "train") == path
    path = path.rename(tmp_path / "train.v2.diatomics")
    assert split_path(tmp_path, "train") == path
    found = inspected(capsys, path)
    assert found["atoms_total"] == 6 and found["elements"] == {"H": 2, "C": 1, "N": 2, "O": 1}
    assert main(["data", "convert", str(path), str(tmp_path / "val_id.safetensors")]) == 0
    data = IS2REData(tmp_path, batch_size=3)
    assert data.normalizer() == pytest.approx((-25.4 / 3, np.std([-4.5, -11.1, -9.8])))
    with pytest.raises(ValueError, match=r"table of diatomics \(\.diatomics\)"):
        open_dataset(__file__)


def frames(path, records):
    found = []
    for item in records:
        found.append(to_atoms(item))
        found[-1].info |= {key: float(item[key]) for key in ("y_init", "y_relaxed")}
    ase.io.write(path, found)


def lmdb(path, records):
    write_lmdb(path, {str(i): old_record(i, pos_relaxed=None) for i in range(len(records))})


# The writer of each format that has no example as text, and the name of its third record.
WRITERS = {
    StructureStore: (write_store, "sid 1002"),
    Oc20Lmdb: (lmdb, "key '2'"),
    AseStructures: (frames, "frame 2"),
}


@pytest.mark.parametrize("source", [*SOURCES.values(), Diatomics], ids=lambda source: source.kind)
def test_every_source_keeps_the_protocol(tmp_path, monkeypatch, source):
    monkeypatch.setitem(SOURCES, source.kind, source)
    path = tmp_path / f"a{source.suffixes[0]}"
    if source.example:
        path.write_text(source.example)
        write_store(tmp_path / "copy.safetensors", open_dataset(path))
        expected, third = list(open_dataset(tmp_path / "copy.safetensors")), ".+"
    else:
        expected = [record(i, pos_relaxed=None) for i in range(4)]
        write, third = WRITERS[source]
        write(path, expected)
    count = len(expected)
    structures = open_dataset(path)
    assert type(structures) is source and structures.path == path and structures.bad == []
    for a, b in zip(expected, structures, strict=True):
        same(a, b)
    same(structures[-1], expected[-1])
    assert structures.natoms.tolist() == [item.natoms for item in expected]
    assert structures.natoms.dtype == np.int64
    labels = [float(item.y_relaxed) for item in expected]
    np.testing.assert_array_equal(structures.y_relaxed, labels)
    assert re.fullmatch(f"{re.escape(str(path))}: {third}", structures.where(2))
    assert structures.where(2) == structures.where(2 - count) != structures.where(1)
    with pytest.raises(IndexError):
        structures[count]
    structures[0].pos.zero_()
    same(structures[0], expected[0])  # neither the file nor the mapped memory changed

    loader = DataLoader(structures, 2, num_workers=1, multiprocessing_context="fork")
    found = torch.cat([batch.sid for batch in loader]).tolist()  # after a read here
    assert found == [item.sid for item in expected]
    same(structures[0], expected[0])  # this process can still read
    assert len(pickle.dumps(structures)) < 25_000


@pytest.mark.parametrize("below", ["is2re", "is2res_train_val_test_lmdbs/data/is2re"])
def test_layouts_of_the_download(tmp_path, below):
    base = tmp_path / below
    for name in ("10k/train", "all/val_id"):
        (base / name).mkdir(parents=True)
        (base / name / "data.lmdb").touch()
    for root in (tmp_path, base, base / "10k"):
        assert split_path(root, "train") == base / "10k/train"
        assert split_path(root, "val_id") == base / "all/val_id"
    assert split_path(tmp_path, "10k/train") == base / "10k/train"
    (base / "all/train").mkdir()
    (base / "all/train/data.lmdb").touch()
    with pytest.raises(ValueError, match=r"several train splits: .*10k/train, .*all/train"):
        split_path(tmp_path, "train")
    assert split_path(base / "10k", "train") == base / "10k/train"
    assert split_path(base / "all", "train") == base / "all/train"
