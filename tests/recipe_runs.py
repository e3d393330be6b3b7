"""Tiny runs of all recipes for texts, images and optimizers, which several tests share."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tiny_run import results_of, shared_folder
from token_files import write_idx, write_pairs, write_sentences

from molflt.commands.cli import main

ORDERED = ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "one", "dog", "run", "far", "away"]
TOPICS = [["cat", "dog", "cow"], ["red", "blue", "green"], ["run", "walk", "jump"]]
FAMILIES = ("MKVL", "AWGD", "ERST")
SHAPES = ["bar", "block", "frame"]
SIDE = 4


def _texts(root: Path) -> None:
    """Writes lines in which most words are followed by their successor in a fixed order."""
    for seed, (name, lines) in enumerate({"train": 200, "val": 31, "test": 20}.items()):
        draw, text = np.random.default_rng(seed), []
        for _ in range(lines):
            place, line = int(draw.integers(len(ORDERED))), []
            for _ in range(int(draw.integers(3, 12))):
                line.append(ORDERED[place])
                place = int(draw.integers(len(ORDERED))) if draw.random() < 0.1 else place + 1
                place %= len(ORDERED)
            text.append(" ".join(line))
        (root / f"{name}.txt").write_text("\n".join(text) + "\n")


def _topics(root: Path) -> None:
    """Writes lines of 26 words of one topic each, from which a masked word can be inferred."""
    for seed, (name, lines) in enumerate({"train": 120, "val": 40}.items()):
        draw = np.random.default_rng(seed)
        topics = [TOPICS[draw.integers(len(TOPICS))] for _ in range(lines)]
        text = "".join(" ".join(draw.choice(topic, 26)) + "\n" for topic in topics)
        (root / f"{name}.txt").write_text(text)


def _proteins(root: Path) -> None:
    """Writes records whose residues come from one of several families of residues."""
    for seed, (name, count) in enumerate({"train": 120, "val": 30, "test": 9}.items()):
        draw = np.random.default_rng(seed)
        rows = ["".join(draw.choice(list(FAMILIES[draw.integers(3)]), 30)) for _ in range(count)]
        text = "".join(f">r{i}\n{letters}\n" for i, letters in enumerate(rows))
        (root / f"{name}.fasta").write_text(text)


def _sentences(root: Path) -> None:
    for task in ("RTE", "SST-2", "STS-B"):
        write_sentences(root, task, 240, 60)


def _pairs(root: Path) -> None:
    for seed, (name, count) in enumerate({"train": 600, "val": 40, "test": 20}.items()):
        write_pairs(root, name, count, seed)


def write_shapes(folder: Path, name: str, count: int, seed: int) -> None:
    """Writes bars, blocks and frames of 8 x 8 pixels in noise."""
    draw = np.random.default_rng(seed)
    labels = draw.integers(0, 3, count)
    images = draw.integers(0, 60, (count, 8, 8))
    for image, label in zip(images, labels, strict=True):
        row, column = draw.integers(0, 4, 2)
        if label == 0:
            image[row] += 180
        else:
            image[row : row + 4, column : column + 4] += 180
        if label == 2:
            image[row + 1 : row + 3, column + 1 : column + 3] -= 180
    write_idx(folder, name, images, labels)


def _shapes(root: Path) -> None:
    write_shapes(root, "train", 240, 0)
    write_shapes(root, "val", 75, 1)


def _stripes(root: Path) -> None:
    """Writes 8 x 8 images whose dark and light rows follow from the first row."""
    for name, count in (("train", 40), ("val", 12)):
        first = np.random.default_rng(count).integers(0, 2, (count, 1, 1))
        rows = (first + np.arange(8)[:, None] // 2) % 2
        write_idx(root, name, np.broadcast_to(40 + 160 * rows, (count, 8, 8)), first[:, 0, 0])


class Case(NamedTuple):
    """A recipe with small data and a small model."""

    recipe: str
    write: Callable[[Path], None]
    files: str
    """required options, in which {} is the folder of the files"""
    words: str
    """further options"""
    steps: str
    """options of the length of a shared run"""
    metric: str
    """measure in validation"""
    bound: float
    """the last value is at least this good"""
    resumed: str = ""
    """options of the test of resuming"""


_LINEAR = "--model.dim=16 --model.heads=2 --model.layers=1 --model.ffn_dim=16 "
_LINEAR += "--model.num_features=8 "
_SOFTMAX = "--model.dim=32 --model.heads=2 --model.layers=2 --model.ffn_dim=32 "
_SOFTMAX += "--model.max_length=32 --model.mixing=softmax --model.dropout=0.1 "
_RESIDUES = "--model.dim=32 --model.heads=2 --model.layers=1 --model.ffn_dim=16 "
_RESIDUES += "--model.feature_map=sigmoid --model.max_length=33 --data.batch_size=16 --task.lr=1e-2"

CASES = {
    "language": Case(
        "language",
        _texts,
        "--data.train={}/train.txt --data.val={}/val.txt --data.test={}/test.txt",
        f"{_LINEAR} --data.length=16 --data.batch_size=4 --task.lr=1e-2 --model.dropout=0.1 "
        "--task.warmup_steps=2 --model.position=spectral",
        "--trainer.max_steps=100 --trainer.val_every=50",
        "perplexity",
        4.5,
        "--task.redraw_every=2",
    ),
    "causal proteins": Case(
        "language",
        _proteins,
        "--data.train={}/train.fasta --data.val={}/val.fasta --data.test={}/test.fasta",
        f"--data.level=protein --data.length=31 --task.warmup_steps=5 {_RESIDUES}",
        "--trainer.max_steps=30 --trainer.val_every=15",
        "perplexity",
        9.0,
    ),
    "masked proteins": Case(
        "masked_language",
        _proteins,
        "--data.train={}/train.fasta --data.val={}/val.fasta --data.test={}/test.fasta",
        f"--data.kind=protein --data.length=33 --task.mask_rate=0.3 --task.warmup_steps=5 "
        f"{_RESIDUES}",
        "--trainer.max_steps=40 --trainer.val_every=20",
        "perplexity",
        9.0,
    ),
    "masked_language": Case(
        "masked_language",
        _topics,
        "--data.train={}/train.txt --data.val={}/val.txt",
        f"{_SOFTMAX} --data.pieces=60 --data.length=16 --data.batch_size=16 --task.lr=5e-3 "
        "--data.next_sentence=true --task.warmup_steps=5",
        "--trainer.max_steps=80 --trainer.val_every=40",
        "perplexity",
        5.0,
        "--model.dropout=0.1",
    ),
    "sentences": Case(
        "sentences",
        _sentences,
        "--data.root={} --data.task=SST-2",
        f"{_SOFTMAX} --data.pieces=80 --data.length=24 --task.lr=3e-3 --task.warmup_steps=5",
        "--trainer.max_steps=30 --trainer.val_every=15",
        "accuracy_percent",
        90.0,
    ),
    "scores": Case(
        "sentences",
        _sentences,
        "--data.root={} --data.task=STS-B",
        f"{_SOFTMAX} --data.pieces=80 --data.length=24 --task.lr=3e-3 --task.warmup_steps=5",
        "--trainer.max_steps=20 --trainer.val_every=10",
        "score_percent",
        -100.0,
    ),
    "translation": Case(
        "translation",
        _pairs,
        "--data.train={}/train --data.val={}/val --data.test={}/test --data.source=de "
        "--data.target=en",
        "--model.dim=32 --model.heads=2 --model.layers=1 --model.ffn_dim=48 --model.mixing=softmax "
        "--model.absolute=learned --model.max_length=40 --data.pieces=80 --data.batch_size=32 "
        "--task.lr=5e-3 --task.warmup_steps=10",
        "--trainer.max_steps=160 --trainer.val_every=80",
        "perplexity",
        5.0,
        "--model.dropout=0.1 --trainer.ema_decay=0.9 --model.mixing=linear --model.num_features=8 "
        "--task.redraw_every=2",
    ),
    "images": Case(
        "images",
        _shapes,
        "--data.train={}/train-images-idx3-ubyte --data.val={}/val-images-idx3-ubyte",
        f"{_LINEAR} --model.patch_size=2 --data.batch_size=8 --task.lr=1e-2 --task.warmup_steps=2 "
        f"--data.class_names {' '.join(SHAPES)}",
        "--trainer.max_steps=50 --trainer.val_every=25 --model.position=spectral "
        "--model.position_options.num_nodes=12 --task.label_smoothing=0.05",
        "top1_percent",
        80.0,
        "--task.augment=flip_crop",
    ),
    "image_generation": Case(
        "image_generation",
        _stripes,
        "--data.train={}/train-images-idx3-ubyte --data.val={}/val-images-idx3-ubyte",
        f"{_LINEAR} --data.batch_size=8 --task.lr=2e-2 --task.warmup_steps=2 "
        "--model.position=spectral --model.position_options.dim=3 "
        f"--model.position_options.num_nodes=4 --data.image_size={SIDE}",
        "--trainer.max_steps=60 --trainer.val_every=30",
        "bits_per_dim",
        3.0,
    ),
    "learned_optimizer": Case(
        "learned_optimizer",
        lambda root: None,
        "",
        "--model.dim=8 --model.num_features=4 --model.ffn_dim=8 --model.position=spectral "
        "--model.position_options.spectrum=gaussian_mixture --model.position_options.num_nodes=4 "
        "--data.batch_size=2 --data.val_problems=3 --data.problems=12 --task.unroll=4 "
        "--task.burn_in=4 --task.warmup_steps=0 --task.lr=0.01 --task.redraw_every=5",
        "--trainer.max_steps=9 --trainer.val_every=4",
        "mean_log_loss",
        0.0,
        "--trainer.ema_decay=0.9",
    ),
    "population_optimizer": Case(
        "population_optimizer",
        lambda root: None,
        "",
        "--model.dimension=3 --model.dim=8 --model.heads=2 --model.ffn_dim=8 --model.num_nodes=4 "
        "--model.num_features=8 --task.members=6 --task.generations=5 --task.window=3 "
        "--task.warmup_steps=0 --task.lr=0.02 --data.batch_size=2 --data.val_problems=3",
        "--trainer.max_steps=8 --trainer.val_every=4",
        "log10_best",
        5.0,
        "--task.schedule=inverse_sqrt",
    ),
}


@cache
def data_of(name: str) -> Path:
    """Returns a folder with the files of a case; only for reading."""
    folder = shared_folder(name.replace(" ", "-")) / "data"
    folder.mkdir()
    CASES[name].write(folder)
    return folder


def words_of(name: str, run: Path, *more: str) -> list[str]:
    case = CASES[name]
    files = [word.format(data_of(name)) for word in case.files.split()]
    given = ["train", f"--recipe={case.recipe}", "--trainer.accelerator=cpu"]
    return [*given, "--trainer.log_every=10", *case.words.split(), *files, f"--run={run}", *more]


@cache
def trained(name: str) -> Path:
    """Returns the run of a case; only for reading."""
    run = data_of(name).with_name("run")
    assert main(words_of(name, run, *CASES[name].steps.split())) == 0
    return run


@cache
def evaluated(name: str) -> dict[str, dict[str, Any]]:
    """Evaluates the run of a case, and returns the content of results.json."""
    return results_of(trained(name))
