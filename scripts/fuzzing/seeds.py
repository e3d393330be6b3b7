"""Valid files, made once: small structures of the shipped sample in every form, and tiny runs."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import lzma
import pickle
import shutil
import struct
import tarfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from ase import Atoms
    from torch_geometric.data import Data

SAMPLE = Path(__file__).resolve().parents[2] / "datasets" / "chgnet-sample"
ASE_SUFFIXES = ("traj", "extxyz", "xyz", "cif", "vasp", "poscar", "xsf", "pdb", "gen", "db", "json")
STEPS = 2  # of the runs
SHARDS = 3
MODEL = ["--model.dim=16", "--model.heads=2", "--model.layers=1", "--model.ffn_dim=16"]
MODEL += ["--model.num_features=8", "--task.warmup_steps=1", "--trainer.accelerator=cpu"]
STEPWISE = [f"--trainer.max_steps={STEPS}", "--trainer.num_sanity=0", "--data.batch_size=2"]
LINES = [
    "the cat sat on a mat", "", "and saw one dog run far away", "ünïcödé ≤ 3 Å",
    *("one two three four five six seven eight nine ten",) * 3, "the dog sat", "a cat ran far",
]  # fmt: skip
ATTENTION = ["--model.dim=8", "--model.ffn_dim=8", "--model.num_features=4"]
ATTENTION += ["--task.warmup_steps=1", "--trainer.accelerator=cpu", "--data.val_problems=2"]
INNER = "is2res_train_val_test_lmdbs/data/is2re"


class MissingSeedError(RuntimeError):
    """A command that makes a seed has failed."""


def make(folder: Path) -> None:
    """Writes all seeds; takes about ten seconds, most of them for training."""
    _structures(folder)
    _texts(folder)
    _images(folder)
    for kind in KINDS:
        command(*training(kind, folder), f"--run={folder / kind}")
    _references(folder)
    _shards(folder)


def _shards(folder: Path) -> None:
    """Predictions of the run in one file, and in shards."""
    store = folder / "data" / "val_id.safetensors"
    (folder / "shards").mkdir()
    for ending in ("csv", "json", "extxyz"):
        words = ["predict", str(folder / "run"), str(store), "--batch_size=2", "--device=cpu"]
        words += [f"--out={folder / 'shards' / f'e.{ending}'}"]
        command(*words)
        for number in range(SHARDS):
            command(*words, f"--shard={number + 1}/{SHARDS}")


def training(kind: str, folder: Path) -> list[str]:
    """The command that makes the run of a kind, but for its folder.

    Args:
        kind: of `KINDS`.
        folder: of the seeds.
    """
    return ["train", *STEPWISE, *KINDS[kind](folder)]


def _on(file: Path, *words: str) -> list[str]:
    return [*words, f"--data.train={file}", f"--data.val={file}"]


KINDS: dict[str, Callable[[Path], list[str]]] = {
    "run": lambda folder: [
        *MODEL, "--recipe=is2re", "--data.allow_duplicates=true", f"--data.root={folder / 'data'}",
    ],
    "lm": lambda folder: _on(
        folder / "text" / "train.txt",
        *MODEL, "--recipe=language", "--data.level=char", "--data.length=8",
    ),
    "img": lambda folder: _on(
        folder / "idx" / "images-idx3-ubyte", *MODEL, "--recipe=images", "--model.patch_size=4"
    ),
    "pixels": lambda folder: _on(
        folder / "idx" / "images-idx3-ubyte",
        *MODEL, "--recipe=image_generation", "--data.image_size=4",
    ),
    "pop": lambda folder: [
        *ATTENTION, "--recipe=population_optimizer", "--model.heads=2", "--model.dimension=2",
        "--model.num_nodes=4", "--task.members=4", "--task.generations=4", "--task.window=2",
    ],
    "opt": lambda folder: [
        *ATTENTION, "--recipe=learned_optimizer", "--data.problems=4", "--model.position=spectral",
        '--model.position_options={"num_nodes": 4, "spectrum": "gaussian_mixture"}',
        "--task.unroll=2", "--task.burn_in=2",
    ],
    "mt": lambda folder: _on(
        folder / "text" / "pairs", *MODEL, "--recipe=translation", "--data.pieces=60",
        "--data.source=de", "--data.target=en", "--model.max_length=32",
    ),
}  # fmt: skip
"""A run of each: what to train it with."""
if not (find_spec("tokenizers") and find_spec("sacrebleu")):  # molflt[text]
    del KINDS["mt"]


def command(*words: str) -> None:
    """Runs a command that has to succeed.

    Raises:
        MissingSeedError: if it does not.
    """
    from molflt.commands.cli import main

    if status := main([*words]):
        raise MissingSeedError(f"molflt {' '.join(words)} ended with {status}")


def _references(folder: Path) -> None:
    """What undamaged runs give, to compare with."""
    store = folder / "data" / "val_id.safetensors"
    command("predict", str(folder / "run"), str(store), f"--out={folder / 'run.csv'}")
    command("export", str(folder / "run"), str(folder / "exported"), "--about=the sample")
    shutil.copytree(folder / "run", folder / "resumed")
    command("train", "--resume", str(folder / "resumed"), f"--trainer.max_steps={STEPS + 1}")


def _structures(folder: Path) -> None:
    import ase.io
    from torch_geometric.data import Data

    from molflt.data.structures import open_dataset
    from molflt.data.structures.store import write_store

    small = open_dataset(SAMPLE / "val_id.safetensors")
    chosen = [small[int(i)] for i in np.argsort(small.natoms)[:5]]
    for split in ("train", "val_id"):
        write_store(folder / "data" / f"{split}.safetensors", chosen, source="sample")
    frames = [atoms_of(record) for record in chosen[:3]]
    (folder / "ase").mkdir()
    single = ("vasp", "poscar")  # formats of one structure
    for suffix in ASE_SUFFIXES:
        name = folder / "ase" / f"seed.{suffix}"
        kind = {"xyz": "extxyz", "pdb": "proteindatabank", "poscar": "vasp"}.get(suffix, suffix)
        one = suffix in (*single, "gen")
        ase.io.write(str(name), frames[0] if one else frames, format=kind)
    records = folder / "records"
    records.mkdir()
    for index, record in enumerate(chosen):
        fields = published(record)
        (records / f"new-{index}").write_bytes(pickle.dumps(Data(**fields), 3 + index % 3))
        (records / f"old-{index}").write_bytes(old_layout(pickle.dumps(fields, 3)[2:-1]))
    contents = [(records / f"new-{index}").read_bytes() for index in range(len(chosen))]
    write_lmdb(folder / "seed.lmdb", contents)
    _archive(folder)


def _archive(folder: Path) -> None:
    """OC20's archive, of a small LMDB."""
    with tarfile.open(folder / "archive.tar", "w") as tar:
        for split in ("all/val_id", "all/val_ood_ads"):
            tar.add(folder / "seed.lmdb", f"{INNER}/{split}/data.lmdb")


def atoms_of(record: Data) -> Atoms:
    """A record as ASE's Atoms, with its label."""
    from molflt.data.structures.base import to_atoms

    atoms = to_atoms(record)
    atoms.info["y_relaxed"] = float(record.y_relaxed)
    return atoms


def published(record: Data) -> dict[str, object]:
    """Fields of a record with the names and types of OC20."""
    return {
        "pos": record.pos,
        "cell": record.cell,
        "atomic_numbers": record.atomic_numbers.float(),
        "natoms": int(record.natoms),
        "tags": record.tags,
        "fixed": record.fixed.float(),
        "sid": int(record.sid),
        "y_init": float(record.y_init),
        "y_relaxed": float(record.y_relaxed),
        "pos_relaxed": record.pos_relaxed,
    }


def old_layout(state: bytes) -> bytes:
    """A Data of PyG 1.x with a state given as opcodes."""
    return b"\x80\x03ctorch_geometric.data.data\nData\n)\x81" + state + b"b."


def write_lmdb(path: Path, records: list[bytes], length: bytes | None = b"") -> None:
    """An LMDB of records under the keys 0, 1, ...; `length` is their number if empty."""
    import lmdb

    environment = lmdb.open(str(path), subdir=False, map_size=1 << 24, lock=False)
    with environment.begin(write=True) as transaction:
        for index, content in enumerate(records):
            transaction.put(str(index).encode(), content)
        if length is not None:
            transaction.put(b"length", length or pickle.dumps(len(records)))
    environment.close()


def _texts(folder: Path) -> None:
    (folder / "text").mkdir()
    text = ("\n".join(LINES * 3) + "\n").encode()
    for language, lines in {"de": LINES, "en": LINES[::-1]}.items():
        pairs = "\n".join(filter(None, lines * 3)) + "\n"
        (folder / "text" / f"pairs.{language}").write_text(pairs)
    for name, content in {
        "train.txt": text, "train.gz": gzip.compress(text, mtime=0), "train.xz": lzma.compress(text)
    }.items():  # fmt: skip
        (folder / "text" / name).write_bytes(content)


def _images(folder: Path) -> None:
    from PIL import Image

    draw = np.random.default_rng(0)
    pixels = draw.integers(0, 256, (8, 8, 8)).astype(np.uint8)
    labels = np.arange(8, dtype=np.uint8) % 2
    (folder / "idx").mkdir()
    (folder / "idx" / "images-idx3-ubyte").write_bytes(idx(pixels))
    (folder / "idx" / "labels-idx1-ubyte").write_bytes(idx(labels))
    for index in range(4):
        kind = folder / "pictures" / str(index % 2)
        kind.mkdir(parents=True, exist_ok=True)
        image = Image.fromarray(draw.integers(0, 256, (8, 8, 3)).astype(np.uint8))
        for ending in ("png", "jpg"):
            buffer = io.BytesIO()
            image.save(buffer, "JPEG" if ending == "jpg" else "PNG")
            (kind / f"{index}.{ending}").write_bytes(buffer.getvalue())


def idx(array: np.ndarray) -> bytes:
    """An idx file of bytes."""
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()


def md5(path: Path) -> str:
    """As the downloader wants it."""
    return hashlib.md5(path.read_bytes()).hexdigest()


def tensors(path: Path) -> dict[tuple[str, str, tuple[int, ...]], bytes]:
    """(name, type, shape) and content of what a safetensors file has, read by hand."""
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    return {
        (name, entry["dtype"], tuple(entry["shape"])): data[slice(*entry["data_offsets"])]
        for name, entry in header.items()
        if name != "__metadata__"
    }
