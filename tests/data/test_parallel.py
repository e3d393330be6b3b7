"""Parallel texts: byte pair encoding, files and batches."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
import torch
from translation_files import write_pairs

from molflt.data.text.parallel import ParallelData, paired, read_parallel
from molflt.data.text.tokenizer import Tokenizer

pytest.importorskip("tokenizers")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for seed, (name, count) in enumerate({"train": 60, "val": 12}.items()):
        write_pairs(tmp_path, name, count, seed)
    return tmp_path


def data(folder: Path, **options) -> ParallelData:
    given = {"source": "de", "target": "en", "pieces": 60, **options}
    return ParallelData(folder / "train", folder / "val", **given)


def test_byte_pairs_are_decoded_to_the_text():
    """Case and umlauts survive, and punctuation marks are tokens."""
    lines = ["Ein Mann, der läuft.", "A man's dog: (two) dogs!", "Ein Hund."] * 20
    tokenizer = Tokenizer.train("bpe", lines, 200, False)
    for line, ids in zip(lines, tokenizer.encode(lines), strict=True):
        assert tokenizer.decode(ids) == line
        pieces = [tokenizer.token(i) for i in ids]
        assert all(len(piece) == 1 for piece in pieces if set(piece) & set(",.:!()'"))
    assert tokenizer.unk in tokenizer.encode(["漢"])[0]
    assert len(tokenizer.encode(["Hund 漢"])[0]) > 1


def test_batches_contain_both_sides(folder):
    made = data(folder)
    made.setup()
    pairs, tokenizer = made.datasets["train"], made.tokenizer
    items = [pairs[i] for i in (0, 3, 5)]
    source, there, seen, following = paired(items, tokenizer.pad)
    for row, (ids, target) in enumerate(items):
        assert torch.equal(source[row][there[row]], ids) and ids[-1] == tokenizer.sep
        known = following[row] >= 0
        assert torch.equal(following[row][known], target[1:]) and target[0] == tokenizer.cls
        assert torch.equal(seen[row][known], target[:-1]) and target[-1] == tokenizer.sep
        assert (source[row][~there[row]] == tokenizer.pad).all()
    assert made.sizes() == {"vocabulary": len(tokenizer)}
    assert made.describe() == ["train 60 pairs de-en", "val 12 pairs de-en"]


def test_long_pairs_are_left_out_and_counted(folder):
    with open(folder / "train.de", "a") as de, open(folder / "train.en", "a") as en:
        de.write(30 * "ein " + "\n")
        en.write("one\n")
    made = data(folder, length=25)
    assert made.sizes() and "60 pairs" in made.describe()[0] and "1 longer" in made.describe()[0]
    assert made.datasets["train"].left_out == 1


def test_lines_end_with_a_line_feed_only(tmp_path):
    """Other line breaks occur within sentences, and would shift all lines after them."""
    (tmp_path / "x.de").write_bytes("\ufeffa\u2028b\x0bc\r\nd".encode())
    with gzip.open(tmp_path / "x.en.gz", "wb") as file:
        file.write(b"one\ntwo\n")
    text = read_parallel(str(tmp_path / "x"), "de", "en")
    assert text[:2] == (["a\u2028b\x0bc", "d"], ["one", "two"])
    assert text.files[1].endswith("x.en.gz")
