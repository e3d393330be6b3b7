"""Damaged files are read correctly or refused in one line; hostile files do not run code.

`make fuzz` checks the same properties on MOLFLT_FUZZ examples per format.
"""

import gzip
import json
import os
import pickle
import struct
from functools import cache
from pathlib import Path

import ase.io
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oc20_files import Evil, old_record, write_lmdb
from tiny_run import error_of, shared_folder
from token_files import pixels, write_idx

from molflt.data.images.files import open_images
from molflt.data.structures import SOURCES, open_dataset
from molflt.data.structures.base import to_atoms
from molflt.data.structures.store import write_store

SAMPLE = Path(__file__).resolve().parents[2] / "datasets/chgnet-sample/val_id.safetensors"
EXAMPLES = int(os.environ.get("MOLFLT_FUZZ", "40"))
TEXTS = [source for source in SOURCES.values() if source.example]
property_test = settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=EXAMPLES <= 40,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


@cache
def originals() -> Path:
    """Returns a folder with a small valid file of each format."""
    folder = shared_folder("damaged")
    small = open_dataset(SAMPLE)
    records = [small[int(i)] for i in np.argsort(small.natoms)[:3]]
    write_store(folder / "a.safetensors", records, source="sample")
    frames = []
    for record in records:
        frames.append(to_atoms(record))
        frames[-1].info["y_relaxed"] = float(record.y_relaxed)
    for name in ("traj", "extxyz", "cif", "db", "json", "xsf"):
        ase.io.write(folder / f"a.{name}", frames)
    ase.io.write(folder / "a.vasp", frames[0], format="vasp")
    content = (folder / "a.extxyz").read_bytes()
    (folder / "a.extxyz.gz").write_bytes(gzip.compress(content, mtime=0))
    for source in TEXTS:
        (folder / f"a{source.suffixes[0]}").write_text(source.example)
    pickles = {str(i): old_record(i) for i in range(3)}
    write_lmdb(folder / "a.lmdb", {**pickles, "length": pickle.dumps(3)})
    write_idx(folder, "a", pixels(4))
    return folder


SPECIAL = [b"\0" * 8, b"\xff" * 8, b"nan ", b"-1", b"1e300", struct.pack("<d", float("inf"))]
SPECIAL += [struct.pack("<Q", 2**n) for n in (31, 32, 40, 62)]
damages = st.lists(
    st.tuples(
        st.sampled_from(("put", "insert", "remove", "cut")),
        st.floats(0, 1),
        st.one_of(st.binary(min_size=1, max_size=8), st.sampled_from(SPECIAL)),
    ),
    min_size=1,
    max_size=3,
)


def damaged(content: bytes, damage: list[tuple[str, float, bytes]]) -> bytes:
    for how, where, new in damage:
        # half of the damage is in the first 200 bytes, where headers are
        end = len(content) if where < 0.5 else min(200, len(content))
        at = int((where * 2 % 1) * end)
        kept = {"put": at + len(new), "insert": at, "remove": at + len(new), "cut": len(content)}
        content = content[:at] + (new if how in ("put", "insert") else b"") + content[kept[how] :]
    return content


def refusal(error: Exception, path: Path) -> None:
    """Asserts that an error is for users: one line that names the file."""
    assert isinstance(error, (ValueError, OSError, EOFError)), repr(error)
    assert path.name in str(error) and "\n" not in str(error)


STRUCTURES = ["a.safetensors", "a.lmdb", "a.traj", "a.extxyz", "a.extxyz.gz", "a.cif", "a.vasp"]
STRUCTURES += ["a.db", "a.json", "a.xsf", *(f"a{source.suffixes[0]}" for source in TEXTS)]


@pytest.mark.parametrize("name", STRUCTURES)
def test_damaged_structures(name: str, tmp_path: Path) -> None:
    content = (originals() / name).read_bytes()
    truth = open_dataset(originals() / name)
    path = tmp_path / name

    @property_test
    @given(damages)
    def check(damage: list[tuple[str, float, bytes]]) -> None:
        path.write_bytes(damaged(content, damage))
        try:
            found = open_dataset(path, skip_bad=name != "a.safetensors")
            found.verify()
            records = [found[i] for i in range(len(found))]
        except Exception as error:
            refusal(error, path)
            return
        for record in records:
            assert record.pos.shape == (record.natoms, 3) and record.pos.isfinite().all()
            assert ((record.atomic_numbers > 0) & (record.atomic_numbers < 119)).all()
            assert record.cell.isfinite().all()
        if name == "a.safetensors":  # its digest reveals every change of the content
            assert [r.sid for r in records] == [truth[i].sid for i in range(len(truth))]
            assert all(torch.equal(r.pos, truth[i].pos) for i, r in enumerate(records))

    check()


@pytest.mark.parametrize("name", ["a-images-idx3-ubyte", "a-labels-idx1-ubyte"])
def test_damaged_idx_files(name: str, tmp_path: Path) -> None:
    for file in originals().glob("*-ubyte"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    content = (originals() / name).read_bytes()
    path = tmp_path / "a-images-idx3-ubyte"

    @property_test
    @given(damages)
    def check(damage: list[tuple[str, float, bytes]]) -> None:
        (tmp_path / name).write_bytes(damaged(content, damage))
        try:
            images = open_images(path)
        except Exception as error:
            assert isinstance(error, (ValueError, OSError)) and "ubyte" in str(error)
            return
        assert len(images) == len(images.labels) and images[0][0].dtype == torch.uint8

    check()


@pytest.fixture
def canary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Returns the file that code in a hostile file would create."""
    monkeypatch.chdir(tmp_path)
    yield Path("CANARY")
    assert not Path("CANARY").exists()


def test_objects_in_json_run_nothing(canary: Path) -> None:
    tree = json.loads((originals() / "a.json").read_text())
    tree["1"]["constraints"] = [{"name": "os.system", "kwargs": {"command": "touch CANARY"}}]
    path = Path("a.json")
    path.write_text(json.dumps(tree))
    try:
        found = open_dataset(path, skip_bad=True)
        assert [len(found[i].pos) for i in range(len(found))] == list(found.natoms)
    except (ValueError, OSError) as error:
        refusal(error, path)


@pytest.mark.parametrize("name", ["w.ckpt", "s.lmdb", "s.traj"])
def test_pickles_under_any_name_are_refused(name: str, canary: Path, capsys) -> None:
    Path(name).write_bytes(pickle.dumps(Evil("CANARY")))
    if name.startswith("w"):
        words = ["predict", name, str(SAMPLE), "--out=e.csv"]
    else:
        words = ["data", "convert", name, "out.safetensors"]
    assert name in error_of(capsys, *words)
