"""Merged shards of predictions equal the file of one process; messages name damaged shards."""

import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from ase.io import write
from tiny_run import on_slab, printed, shared_run, structures, table, write_frames

import molflt
from molflt.commands.cli import main
from molflt.commands.merge import merge
from molflt.data.batches import Shard
from molflt.data.structures.base import to_atoms
from molflt.data.structures.store import write_store

COUNT = 3
CHANGES = {  # changes that keep the number of rows
    ".csv": ("^index", "indices", "index"),
    ".json": ('"index": ', '"index": 0.', "int"),
    ".extxyz": ("index=", "i=", "index"),
}


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("in") / "many.safetensors"
    write_store(path, structures(11))
    return path


def predict(*words: object, out: Path, model: object = None, batch_size: int = 2) -> None:
    """Runs a model, by default a small one, on six batches."""
    words = (model or shared_run(), *words, f"--batch_size={batch_size}", "--device=cpu")
    words += ("--out", out)
    assert main(["predict", *map(str, words)]) == 0


@pytest.fixture(scope="module")
def predicted(source, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    for suffix in CHANGES:
        predict(source, out=folder / f"whole{suffix}")
        for number in range(1, COUNT + 1):
            predict(source, f"--shard={number}/{COUNT}", out=folder / f"many{suffix}")
    return folder


@pytest.fixture
def out(predicted, tmp_path) -> Path:
    """Copies the shards for tests that damage them."""
    return shutil.copytree(predicted, tmp_path / "shards") / "many.csv"


def shard(out: Path, number: int) -> Path:
    return Shard(number, COUNT).path(out)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda out, _: shard(out, 2).unlink(), r"1 of 3 .*\[2\].*--shard 2/3"),
        (lambda out, source: predict(source, "--shard=1/2", out=out), "2, 3"),
        (
            lambda out, source: predict(source, "--shard=1/3", out=out, batch_size=3),
            r"1-of-3.* and .*2-of-3.*batch_size 3 and batch_size 2",
        ),
    ],
)
def test_shards_that_do_not_fit_together_are_named(out, source, damage, said) -> None:
    damage(out, source)
    with pytest.raises(ValueError, match=said):
        merge(out)
    assert not out.exists()


@pytest.mark.parametrize("keep", [0.0, 0.4, 0.99])
@pytest.mark.parametrize("suffix", CHANGES)
def test_truncated_shards_are_named(out, keep, suffix) -> None:
    out = out.with_suffix(suffix)
    path = shard(out, 3)
    text = path.read_text()
    path.write_text(text[: int(keep * len(text.rstrip()))])
    expected = rf"{re.escape(str(path))}: .*--shard 3/3"
    with pytest.raises(ValueError, match=expected):
        merge(out)


@pytest.mark.parametrize("suffix", CHANGES)
def test_merged_shards_equal_the_file_of_one_process(out, suffix, capsys) -> None:
    """The message names a shard with other rows."""
    out = out.with_suffix(suffix)
    assert printed(capsys, "merge", out).out == f"{out}: 11 structures\n"
    assert out.read_bytes() == out.with_stem("whole").read_bytes()
    old, new, said = CHANGES[suffix]
    text = shard(out, 2).read_text()
    shard(out, 2).write_text(re.sub(old, new, text, flags=re.M))
    with pytest.raises(ValueError, match=rf"^{re.escape(str(out.with_suffix('')))}.*{said}"):
        merge(out)


@pytest.mark.parametrize("suffix", CHANGES)
def test_energies_of_adsorbates_in_one_shard_only(tmp_path, suffix) -> None:
    one = on_slab()
    source = write_frames(tmp_path / "in.extxyz", [one, one, *2 * [one.repeat((2, 1, 1))]])
    whole = tmp_path / f"whole{suffix}"
    predict(source, "--tags=oc20", out=whole, model="game-net")
    for number in (1, 2):
        words = ("--tags=oc20", f"--shard={number}/2")
        predict(source, *words, out=tmp_path / f"many{suffix}", model="game-net")
    merge(tmp_path / f"many{suffix}")
    assert whole.read_text() == (tmp_path / f"many{suffix}").read_text()
    assert whole.read_text().count("by_adsorbate_eV") == (1 if suffix == ".csv" else 2)


@pytest.mark.parametrize("unlike", ["weights", "data"])
def test_shards_of_other_models_or_structures_are_refused(source, tmp_path, unlike) -> None:
    out, other, path, records = tmp_path / "e.csv", None, source, list(structures(11))
    if unlike == "data":
        records[3].pos += 0.01
        write_store(path := tmp_path / "moved.safetensors", records)
    else:
        model = molflt.load(shared_run())
        next(model.model.parameters()).data.add_(0.1)
        model.save_pretrained(other := tmp_path / "model")
    predict(source, "--shard=1/2", out=out)
    predict(path, "--shard=2/2", out=out, model=other)
    one, two = (str(Shard(number, 2).path(out)) for number in (1, 2))
    said = rf"^{re.escape(one)} and {re.escape(two)}.*'{unlike} \w+ and \w"
    with pytest.raises(ValueError, match=said):
        merge(out)


@pytest.mark.parametrize(("pattern", "suffix"), [("", ".csv"), ("*.extxyz", ".extxyz")])
def test_shards_depend_on_all_files_of_a_folder(tmp_path, pattern, suffix, capsys) -> None:
    folder, out = tmp_path / "in", tmp_path / f"many{suffix}"
    folder.mkdir()
    files = [folder / "a.extxyz", folder / 'b "c.extxyz']
    frames = [to_atoms(record) for record in structures(6)]
    for file, own in zip(files, (frames[:3], frames[3:]), strict=True):
        write(file, own)
    for number in (1, 2):
        predict(folder / pattern, f"--shard={number}/2", out=out)
    assert printed(capsys, "merge", out).out == f"{out}: 6 structures\n"
    predict(folder / pattern, out=out.with_stem("whole"))
    assert out.read_text() == out.with_stem("whole").read_text()
    frames[5].positions[-1] += 0.5
    write(files[1], frames[3:])
    predict(folder / pattern, "--shard=2/2", out=out)
    with pytest.raises(ValueError, match="'data "):
        merge(out)


def test_indices_count_omitted_structures(tmp_path, capsys) -> None:
    frames = [to_atoms(record) for record in structures(5)]
    frames[1].positions[0] = np.nan
    write(tmp_path / "some.traj", frames)
    for words in ([], ["--shard=1/2"], ["--shard=2/2"]):
        name = "many.csv" if words else "whole.csv"
        predict(tmp_path / "some.traj", "--skip-bad", *words, out=tmp_path / name)
    rows = table(tmp_path / "whole.csv")
    assert [(row["index"], row["sid"]) for row in rows] == [(i, i) for i in "0234"]
    assert printed(capsys, "merge", tmp_path / "many.csv").out.endswith(": 4 structures\n")
    assert (tmp_path / "many.csv").read_bytes() == (tmp_path / "whole.csv").read_bytes()
