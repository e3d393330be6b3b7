"""A folder of made data whose files are damaged: named, or made again, but never joined."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from script_files import load_script  # makes the fuzzer's modules importable
from tiny_run import error_of, structures

from molflt.commands.cli import main
from molflt.data.structures import make, open_dataset
from molflt.data.structures.store import write_store

load_script("fuzz")
from fuzzing import parts  # noqa: E402

GROW = ["--train=2", "--val=2", *parts.MADE[2:]]


@pytest.fixture(scope="module")
def joined(tmp_path_factory) -> Path:
    """One system in each split, and parts for one more."""
    root = tmp_path_factory.mktemp("made")
    write_store(root / "five.safetensors", structures(5))
    parts.write_parts(root / "made", root / "five.safetensors", 0)
    assert main(["data", "make", str(root / "made"), *parts.MADE]) == 0
    parts.write_parts(root / "made", root / "five.safetensors", 1)
    return root / "made"


@pytest.fixture
def made(joined, tmp_path) -> Path:
    return Path(shutil.copytree(joined, tmp_path / "made"))


def test_the_whole_folder_grows(made) -> None:
    assert main(["data", "make", str(made), *GROW]) == 0
    assert all(len(open_dataset(made / f"{split}.safetensors")) == 2 for split in parts.SPLITS)
    assert len((made / "systems.csv").read_text().splitlines()) == 11


def settings(made: Path, rejected: object) -> None:
    found = json.loads((made / "made.json").read_text())
    (made / "made.json").write_text(json.dumps({**found, "rejected": rejected}))


def moved(made: Path) -> None:
    content = bytearray((made / "train.safetensors").read_bytes())
    content[-100] ^= 1
    (made / "train.safetensors").write_bytes(content)


def text(made: Path, name: str, old: str, new: str) -> None:
    changed = (made / name).read_text().replace(old, new, 1)
    (made / name).write_bytes(changed.encode("latin-1"))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda made: settings(made, {"train": 3}), "made.json: rejected must be numbers"),
        (lambda made: settings(made, {"train": {"slab": "x"}}), "made.json: rejected must be"),
        (lambda made: text(made, "systems.csv", "facet", "facets"), "systems.csv: expected the"),
        (lambda made: text(made, "systems.csv", "\n0,", "\nnone,"), "systems.csv: expected the"),
        (lambda made: text(made, "systems.csv", "\n0,", "\n7777,"), "csv: no row of sid 0, which"),
        (
            lambda made: text(made, "frames/train.extxyz", "sid=0", "sid=x"),
            "train.extxyz: expected",
        ),
        (lambda made: text(made, "frames/train.extxyz", "sid", "s\xff"), "train.extxyz: expected"),
        (lambda made: (made / "frames/train.extxyz").unlink(), "train.extxyz: no such file"),
        (moved, "train.safetensors: damaged since it was written"),
    ],
)
def test_what_is_damaged_is_named(made, capsys, damage, said) -> None:
    damage(made)
    line = error_of(capsys, "data", "make", str(made), *GROW)
    assert line.startswith(str(made)) and said in line


def test_a_damaged_part_is_made_again(made, monkeypatch) -> None:
    """Another bit, or a note that is none; what joins them asks for these two alone."""
    train, val = (made / ".parts" / split / "0000001.safetensors" for split in parts.SPLITS[:2])
    content = bytearray(train.read_bytes())
    content[-5] ^= 1
    train.write_bytes(content)
    save_file(load_file(val), val, metadata={"format": "molflt-structures", "version": "1"})
    asked = []

    def relaxed(tasks, workers):
        asked.extend(task.part for task in tasks if not make._is_whole(task))
        raise KeyboardInterrupt

    monkeypatch.setattr(make, "_relax_all", relaxed)
    with pytest.raises(KeyboardInterrupt):
        make.make(made, train=2, val=2, workers=1, frames=True)
    assert asked == [train, val]
