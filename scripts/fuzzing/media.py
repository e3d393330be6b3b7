"""Formats of texts, images, and the archive of the downloader."""

from __future__ import annotations

import csv
import gzip
import io
import json
import lzma
import shutil
import struct
import tarfile
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random

import numpy as np

from fuzzing import oracles
from fuzzing.cases import Case, Format
from fuzzing.grammar import WORDS, damage_text
from fuzzing.mutate import damage
from fuzzing.seeds import MODEL, STEPWISE, md5

_UNPACK: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.decompress, "xz": lzma.decompress, "txt": bytes
}  # fmt: skip
_PACK: dict[str, Callable[[bytes], bytes]] = {
    "gz": partial(gzip.compress, mtime=0), "xz": lzma.compress, "txt": bytes
}  # fmt: skip
_HUGE = 1 << 28  # bytes that a bomb unpacks to


def _text(draw: Random, folder: Path, seeds: Path) -> Case:
    """A text to evaluate a model of characters on, or to train one of any level."""
    ending = draw.choice(("txt", "gz", "xz"))
    content = (seeds / "text" / f"train.{ending}").read_bytes()
    inside = draw.random() < 0.5
    if inside:  # damage before packing, of the text itself
        content, what = draw.choice((damage, damage_text))(draw, _UNPACK[ending](content))
        if draw.random() < 0.01:
            content, what = b"a" * _HUGE, "a bomb"
            ending = "gz" if ending == "txt" else ending
        content = _PACK[ending](content)
    else:
        content, what = damage(draw, content)
    file = folder / f"input.{ending}"
    file.write_bytes(content)
    what = f"{ending}, {'inside' if inside else 'outside'}: {what}"
    if draw.random() < 0.6:
        words = ["evaluate", str(seeds / "lm"), "--data", file.name, "--out=out", "--device=cpu"]
        check = partial(_tokens_of_results, file)
    else:
        level = draw.choice(("char", "word", "byte"))
        small = ["--recipe=language", f"--data.level={level}", "--data.length=8", "--run=out/run"]
        words = ["train", *MODEL, *STEPWISE, *small]
        words += [f"--data.train={file.name}", f"--data.val={seeds / 'text' / 'train.txt'}"]
        check = partial(_vocabulary, file, level)
    return Case(words, (file.name,), file.stat().st_size, f"{what}; {words[0]}", check)


def _tokens_of_results(file: Path) -> str | None:
    """Whether as many characters were judged as the text has."""
    results = json.loads((file.parent / "out/results.json").read_text())
    (found,) = (row["tokens"] for row in results.values())
    expected = len(_UNPACK[file.suffix[1:]](file.read_bytes()).decode())
    return None if found == expected else f"{found} tokens for {expected} characters"


def _vocabulary(file: Path, level: str) -> str | None:
    """Whether the tokens of a text are those of its vocabulary."""
    known = json.loads((file.parent / "out/run/vocabulary.json").read_text())["tokens"]
    raw = _UNPACK[file.suffix[1:]](file.read_bytes())
    if level == "byte":
        return None
    text = raw.decode()
    expected = set(text.split() if level == "word" else text) | {"<eos>", "<unk>"}
    return None if set(known) == expected else f"{len(known)} tokens for {len(expected)}"


def _idx(draw: Random, folder: Path, seeds: Path) -> Case:
    shutil.copytree(seeds / "idx", folder / "idx")
    name = draw.choice(("images-idx3-ubyte", "images-idx3-ubyte", "labels-idx1-ubyte"))
    file = folder / "idx" / name
    content, what = damage(draw, file.read_bytes())
    if draw.random() < 0.3:
        content = draw.choice((gzip.compress(content), damage(draw, gzip.compress(content))[0]))
        what += ", gzipped"
    file.write_bytes(content)
    check = partial(_idx_values, folder)
    names = ("images-idx3-ubyte", "labels-idx1-ubyte")
    return _pictures(draw, seeds, folder / "idx" / names[0], names, what, check)


def _pictures(
    draw: Random,
    seeds: Path,
    source: Path,
    names: tuple[str, ...],
    what: str,
    check: Callable[[], str | None],
) -> Case:
    """Images through an evaluation or a training."""
    size = sum(file.stat().st_size for file in source.parent.rglob("*") if file.is_file())
    path = str(source.relative_to(source.parents[1]))
    if draw.random() < 0.5 and source.is_file():
        words = ["evaluate", str(seeds / "img"), "--data", path, "--out=out", "--device=cpu"]
    else:
        words = ["train", *MODEL, *STEPWISE, "--recipe=images", "--model.patch_size=4"]
        words += [f"--data.train={path}", f"--data.val={path}", "--run=out/run"]
        if draw.random() < 0.5:
            words.append("--data.image_size=8")
    return Case(words, names, size, f"{what}; {words[0]}", check)


def _as_read(source: Path) -> tuple[np.ndarray, np.ndarray]:
    """Images and labels, as the package hands them out."""
    from molflt.data.images.datamodule import ImageData

    data = ImageData(source, source)
    data.setup()
    images = data.datasets["train"]
    return np.stack([images[i][0].numpy() for i in range(len(images))]), images.labels.numpy()


def _idx_values(folder: Path) -> str | None:
    truth = []
    for name in ("images-idx3-ubyte", "labels-idx1-ubyte"):
        content = (folder / "idx" / name).read_bytes()
        content = gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content
        truth.append(oracles.idx_bytes(content))
    evaluated = folder / "out/predictions.csv"
    if evaluated.is_file():
        with evaluated.open(newline="") as file:
            classes = [int(row["class"]) for row in csv.DictReader(file)]
        return None if classes == truth[1].tolist() else "other labels than the file has"
    images, labels = _as_read(folder / "idx" / "images-idx3-ubyte")
    same = np.array_equal(images[:, 0], truth[0]) and np.array_equal(labels, truth[1])
    return None if same else "other images or labels than the file has"


def _folder(draw: Random, folder: Path, seeds: Path) -> Case:
    """A folder of PNG and JPEG files, one of which is damaged."""
    ending = draw.choice(("png", "jpg"))
    source = folder / "in" / "pictures"
    chosen = sorted((seeds / "pictures").rglob(f"*.{ending}"))
    for path in chosen:
        copied = source / path.relative_to(seeds / "pictures")
        copied.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copied)
    file = draw.choice(sorted(source.rglob(f"*.{ending}")))
    content, what = damage(draw, file.read_bytes())
    if ending == "png" and draw.random() < 0.3:
        content, what = _other_chunk(draw, file.read_bytes())
    file.write_bytes(content)
    check = partial(_pixels, source)
    return _pictures(draw, seeds, source, (str(file.relative_to(source)), "pictures"), what, check)


def _other_chunk(draw: Random, content: bytes) -> tuple[bytes, str]:
    """A PNG with other width, height, depth or kind, whose sum is right."""
    head = bytearray(content[16:29])  # of the chunk IHDR
    at = draw.choice((0, 4, 8, 9, 10, 11, 12))
    new = draw.choice((0, 1, 16, 255, 10000, 60000, 2**31 - 1, 2**32 - 1))
    field = struct.pack(">I", new) if at < 8 else bytes([new % 256])
    head[at : at + len(field)] = field
    total = struct.pack(">I", zlib.crc32(b"IHDR" + head))
    return content[:16] + bytes(head) + total + content[33:], f"IHDR at {at}: {new}"


def _pixels(source: Path) -> str | None:
    """Whether the images are those that Pillow decodes."""
    from PIL import Image

    files = sorted(path for path in source.rglob("*.*") if path.is_file())
    truth = [np.array(Image.open(path).convert("RGB")) for path in files]
    if any(image.shape != truth[0].shape or len({*image.shape[:2]}) > 1 for image in truth):
        return None  # resized, which the package's own tests compare
    images, _ = _as_read(source)
    same = np.array_equal(images, np.stack(truth).transpose(0, 3, 1, 2))
    return None if same else "other pixels than Pillow decodes"


def _archive(draw: Random, folder: Path, seeds: Path) -> Case:
    """OC20's archive, already downloaded, with its own sum."""
    content = (seeds / "archive.tar").read_bytes()
    what = "whole"
    if draw.random() < 0.5:
        content, what = _other_header(draw, content)
    packed = gzip.compress(content, 1, mtime=0)
    if draw.random() < 0.5:
        packed, what = damage(draw, packed)
    return unpacking(folder, packed, what)


def unpacking(folder: Path, packed: bytes, what: str, check: bool = True) -> Case:
    """An archive through the downloader, which finds it in place."""
    file = folder / "out" / "is2res_train_val_test_lmdbs.tar.gz"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(packed)
    copied = folder / "copy.tar.gz"
    copied.write_bytes(packed)
    words = ["data", "download", "oc20-is2re", "out", "--splits", "val_id"]
    words += [f"--md5={md5(file)}"]
    names = (file.name, "val_id", "out")
    truth = partial(_unpacked, folder / "out", copied) if check else None
    return Case(words, names, len(packed), what, truth)


def _other_header(draw: Random, content: bytes) -> tuple[bytes, str]:
    """A tar whose first or second member has another field, and mostly a right sum."""
    begin = 0 if draw.random() < 0.7 else 512 + -(-int(content[124:135], 8) // 512) * 512
    fields = {"name": (0, 100), "mode": (100, 8), "size": (124, 12), "type": (156, 1)}
    fields |= {"link": (157, 100), "magic": (257, 8), "prefix": (345, 155), "mtime": (136, 12)}
    name = draw.choice(sorted(fields))
    at, width = fields[name]
    values = [b"\xff" * width, b"7" * (width - 1), b"0", b"../../x", b"/tmp/x", b"-1", b"1", b"2"]
    values += [draw.choice(WORDS).encode()[:width], b"x", b"g", b"S", b"L"]
    block = bytearray(content[begin : begin + 512])
    block[at : at + width] = draw.choice(values)[:width].ljust(width, b"\0")
    if draw.random() < 0.9:
        block[148:156] = b" " * 8
        block[148:156] = f"{sum(block):06o}\0 ".encode()
    return content[:begin] + bytes(block) + content[begin + 512 :], f"field {name}"


def _unpacked(folder: Path, archive: Path) -> str | None:
    """Whether the unpacked file is the archive's member."""
    found = (folder / "is2re" / "all" / "val_id" / "data.lmdb").read_bytes()
    try:
        whole = gzip.decompress(archive.read_bytes())
    except (OSError, EOFError, zlib.error) as error:
        return f"accepted, but gzip says: {error}"
    with tarfile.open(fileobj=io.BytesIO(whole)) as tar:
        members = [tar.extractfile(member) for member in tar if member.isfile()]
        names = [member.name for member in tar if member.isfile()]
    truth = [m.read() for n, m in zip(names, members, strict=True) if m and "val_id/" in n]
    return None if found in truth else "another file than the archive's"


FORMATS = {
    "text": Format(_text, 7, trains=True),
    "idx": Format(_idx, 4, trains=True),
    "pictures": Format(_folder, 4, trains=True),
    "archive": Format(_archive, 5),
}
