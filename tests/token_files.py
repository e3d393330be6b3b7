"""Small files of texts and images whose labels, translations or order can be learned."""

import gzip
import lzma
import struct
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from molflt.data.text.sentences import GLUE

NOUNS = ["cat", "dog", "car", "tree", "lamp", "boat", "bird", "house"]
GOOD, BAD = ["good", "fine", "great"], ["bad", "poor", "awful"]
TRANSLATED = {"ein": "one", "Hund": "dog", "Mann": "man", "rot": "red", "und": "and"}


def _row(task: str, draw: np.random.Generator) -> dict[str, str]:
    """Returns a row: sentences are good or bad, and pairs agree if their nouns agree."""
    noun, right = str(draw.choice(NOUNS)), bool(draw.integers(2))
    if "second" not in GLUE[task].columns:
        first = f"the {noun} is {draw.choice(GOOD if right else BAD)}"
        return {"first": first, "label": f"{right:d}"}
    other = noun if right else str(draw.choice([n for n in NOUNS if n != noun]))
    labels = GLUE[task].labels
    label = f"{4.0 * right + 0.5:.3f}" if labels is None else labels[right]
    return {"first": f"this is a {noun}", "second": f"a {other} it is", "label": label}


def packed(path: Path, content: str | bytes) -> Path:
    """Writes a text, compressed if the name ends in .gz or .xz; returns the path."""
    raw = content.encode() if isinstance(content, str) else content
    pack = {".gz": gzip.compress, ".xz": lzma.compress}.get(path.suffix, bytes)
    path.write_bytes(pack(raw))
    return path


def write_sentences(root: Path, task: str, train: int, val: int) -> None:
    """Writes ROOT/TASK/train.tsv and dev.tsv with these numbers of rows."""
    (root / task).mkdir(parents=True, exist_ok=True)
    columns = GLUE[task].columns
    for seed, (name, count) in enumerate({"train": train, "dev": val}.items()):
        draw = np.random.default_rng(seed)
        rows = [_row(task, draw) for _ in range(count)]
        if task == "CoLA":
            lines = [f"x\t{row['label']}\t\t{row['first']}" for row in rows]
        else:
            lines = ["\t".join(["index", *columns.values()])]
            lines += ["\t".join([str(i), *(row[k] for k in columns)]) for i, row in enumerate(rows)]
        (root / task / f"{name}.tsv").write_text("\n".join(lines) + "\n")


def write_pairs(root: Path, name: str, count: int, seed: int) -> None:
    """Writes NAME.de and NAME.en, whose sentences are translated word by word, in reverse."""
    draw = np.random.default_rng(seed)
    sides: dict[str, list[str]] = {"de": [], "en": []}
    for _ in range(count):
        words = [str(word) for word in draw.choice(list(TRANSLATED), int(draw.integers(2, 5)))]
        sides["de"].append(" ".join(words) + ".\n")
        sides["en"].append(" ".join(TRANSLATED[word] for word in reversed(words)) + ".\n")
    for language, lines in sides.items():
        (root / f"{name}.{language}").write_text("".join(lines))


def write_reviews(root: Path, count: int = 20, uses: str = "train test") -> Path:
    """Writes ROOT/aclImdb/train/pos/0_9.txt and so on; the words depend on the class."""
    for use in uses.split():
        for name, word in (("neg", b"awful \xff\xfe"), ("pos", "great é".encode())):
            folder = root / "aclImdb" / use / name
            folder.mkdir(parents=True)
            for i in range(count):
                (folder / f"{i}_{9 if name == 'pos' else 2}.txt").write_bytes(word + b"%d" % i)
    (root / "aclImdb" / "train" / "unsup").mkdir(exist_ok=True)
    return root


def idx(array: np.ndarray[Any, Any], kind: int = 8) -> bytes:
    """Returns the content of an idx file of bytes."""
    head = struct.pack(f">BBBB{array.ndim}I", 0, 0, kind, array.ndim, *array.shape)
    return head + array.astype(np.uint8).tobytes()


def pixels(count: int = 12, side: int = 8, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 256, (count, side, side), dtype=np.uint8)


def write_idx(
    folder: Path,
    prefix: str = "train",
    images: np.ndarray[Any, Any] | None = None,
    labels: np.ndarray[Any, Any] | None = None,
) -> Path:
    """Writes a pair of idx files, by default with labels 0, 1, 2, 0, ...; returns the images."""
    folder.mkdir(exist_ok=True)
    images = pixels() if images is None else images
    labels = np.arange(len(images)) % 3 if labels is None else labels
    path = folder / f"{prefix}-images-idx3-ubyte"
    path.write_bytes(idx(images))
    (folder / f"{prefix}-labels-idx1-ubyte").write_bytes(idx(labels))
    return path


def write_folder(root: Path, count: int = 4, side: int = 8, classes: str = "cat dog eel") -> Path:
    for c, name in enumerate(classes.split()):
        (root / name).mkdir(parents=True)
        for i in range(count):
            color = np.random.default_rng(10 * c + i).integers(0, 256, (side, side, 3))
            Image.fromarray(color.astype(np.uint8)).save(root / name / f"{i}.png")
    return root
