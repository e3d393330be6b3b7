"""The commands of docs/commands.md run from top to bottom."""

import re
import shlex
from pathlib import Path

import pytest
from ase.build import add_adsorbate, fcc111
from ase.io import write
from tiny_run import structures, write_data, write_points

from molflt.commands.cli import main
from molflt.data.batches import Shard
from molflt.data.structures.store import write_store

PAGE = Path(__file__).parents[1] / "docs" / "commands.md"
SHORT = ["--trainer.max_steps=1", "--trainer.val_every=1", "--trainer.checkpoint_every=1"]
SMALL = ["--model.dim=16", "--model.heads=2", "--model.ffn_dim=16", "--data.batch_size=4"]
NAMES = {"DIR": "data", "PATH": "structures.extxyz", "SRC": "structures.extxyz"}
NAMES |= {"DST": "converted.safetensors", "FOLDER": "exported", "many.lmdb": "many.extxyz"}
NAMES |= {"5000": "1"}
DEMO = ["--data.root=data", "--data.batch_size=32"]  # one step sees all elements
SPLITS = ("val_ood_ads", "val_ood_cat", "val_ood_both")
ELSEWHERE = ("data download", "lm/wikitext2", "runs/lm", "image/", "runs/vit")  # other data


def lines() -> list[list[str]]:
    """Returns the words of each command on structures."""
    blocks = re.findall(r"^```\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    found = [line.partition(" #")[0] for line in "".join(blocks).splitlines()]
    kept = [line for line in found if line and not any(word in line for word in ELSEWHERE)]
    return [[NAMES.get(word, word) for word in shlex.split(line)[1:]] for line in kept]


def run(words: list[str]) -> None:
    if words[0] == "train" and "--resume" not in words:
        words = [*words, *(SMALL if "--init" not in words else SMALL[-1:])]
        words += [*SHORT, *(DEMO if "demo" in words else [])]
    if words[:2] == ["data", "make"]:
        words = ["data", "make", "made", *words[3:], "--val", "1", "--workers", "1"]
    if words[0] == "relax":  # whether a minimum is found depends on rounding
        words = [*words, "--fmax=1000"]
    assert main(words) == 0, words


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns a folder with the files that the page assumes."""
    atoms = fcc111("Cu", (2, 2, 3), vacuum=8.0, periodic=True)
    add_adsorbate(atoms, "O", height=1.2, position="fcc")
    atoms.set_tags([0] * 4 + [1] * 8 + [2])
    for name, count in {"mine": 6, "structures": 2, "many": 9, "slab": 1}.items():
        frames = [atoms.copy() for _ in range(count)]
        for seed, frame in enumerate(frames):
            frame.rattle(0.05, seed=seed)
            frame.info["y_relaxed"] = -1.0 - 0.1 * seed
        write(tmp_path / f"{name}.extxyz", frames)
    write_data(tmp_path / "data")
    for seed, split in enumerate(SPLITS, 2):
        write_store(tmp_path / "data" / f"{split}.safetensors", structures(8, seed, 1000 * seed))
    monkeypatch.chdir(tmp_path)
    points = [f"--data.root={write_points(tmp_path / 'points')}", "--run=runs/potential"]
    assert main(["train", "--recipe=potential", *points, *SHORT, "--model.dim=16"]) == 0
    run(["train", "--config", "demo", "--run", "runs/mine2", "--seed", "1"])
    return tmp_path


def test_commands_of_the_page(reader: Path) -> None:
    done = []
    for words in lines():
        if words[0] == "merge":  # the page shows one shard of eight
            for number in (n for n in range(1, 9) if not Shard(n, 8).path(Path(words[1])).exists()):
                run([*done[-1][:-1], f"{number}/8"])
        if "--shard" in words:  # few structures here
            words = [*words[:-2], "--batch_size=1", *words[-2:]]
        run(words)
        done.append(words)
    assert len(done) >= 16 and (reader / "energies.csv").exists()
    assert {"train", "evaluate", "predict", "merge", "relax", "data"} <= {w[0] for w in done}
