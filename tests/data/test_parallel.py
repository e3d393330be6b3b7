"""Parallel texts: byte pair encoding, batches, and what is refused with one line."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
import torch
from translation_files import write_pairs

from molflt.data.text.parallel import Pairs, ParallelData, ParallelText, paired, read_parallel
from molflt.data.text.tokenizer import Tokenizer

pytest.importorskip("tokenizers")
MULTI30K = Path(__file__).resolve().parents[3] / "shared" / "data" / "multi30k"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for seed, (name, count) in enumerate({"train": 60, "val": 12}.items()):
        write_pairs(tmp_path, name, count, seed)
    return tmp_path


def data(folder: Path, **options) -> ParallelData:
    given = {"source": "de", "target": "en", "pieces": 60, **options}
    return ParallelData(folder / "train", folder / "val", **given)


def test_pieces_join_to_the_text_again():
    """Case, marks and umlauts; and marks are pieces of their own."""
    lines = ["Ein Mann, der läuft.", "A man's dog: (two) dogs!", "Ein Hund."] * 20
    tokenizer = Tokenizer.train("bpe", lines, 200, False)
    for line, ids in zip(lines, tokenizer.encode(lines), strict=True):
        assert tokenizer.decode(ids) == line
        pieces = [tokenizer.token(i) for i in ids]
        assert all(len(piece) == 1 for piece in pieces if set(piece) & set(",.:!()'"))
    again = Tokenizer.from_json(tokenizer.to_json())
    assert again.to_json() == tokenizer.to_json() and again.encode(lines) == tokenizer.encode(lines)
    assert (
        len(tokenizer.encode(["Hund 漢"])[0]) > 1 and tokenizer.unk in tokenizer.encode(["漢"])[0]
    )


def test_multi30k_is_read_as_its_table_says():
    if not MULTI30K.is_dir():
        pytest.skip(f"Multi30k is not at {MULTI30K}")
    counts = {"val": 1014, "test_2016_flickr": 1000, "test_2017_mscoco": 461}
    for name, count in counts.items():
        text = read_parallel(str(MULTI30K / name), "de", "en")
        assert len(text.source) == len(text.target) == count
    assert text.files[0].endswith("test_2017_mscoco.de.gz")


def test_a_batch_holds_both_sides(folder):
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


def test_batches_hold_so_many_tokens(folder):
    made = data(folder, length=24, max_tokens=48, bucket=4)
    made.setup()
    sizes = made.datasets["train"].sizes
    batches = made._sampler("train", 0, 1).batches(0)
    assert sorted(i for batch in batches for i in batch.tolist()) == list(range(60))
    assert max(len(batch) * max(sizes[i] for i in batch) for batch in batches) <= 48
    first = next(iter(made.train_dataloader()))
    assert first[0].shape[0] == len(batches[0])


def test_long_pairs_are_left_out_and_counted(folder):
    with open(folder / "train.de", "a") as de, open(folder / "train.en", "a") as en:
        de.write(30 * "ein " + "\n")
        en.write("one\n")
    made = data(folder, length=25)
    assert made.sizes() and made.describe()[0].endswith("60 pairs de-en, 1 longer than 25 left out")
    with pytest.raises(ValueError, match=r"all 1 pairs have more than 2 tokens; .* raise data.len"):
        Pairs(ParallelText(["ein Hund"], ["one dog"], ("a", "b")), made.tokenizer, 2)


def test_lines_end_with_a_line_feed_alone(tmp_path):
    """Other ends of lines stand within sentences, and would shift all that follow."""
    (tmp_path / "x.de").write_bytes("\ufeffa\u2028b\x0bc\r\nd".encode())  # the mark is no text
    with gzip.open(tmp_path / "x.en.gz", "wb") as file:
        file.write(b"one\ntwo\n")
    text = read_parallel(str(tmp_path / "x"), "de", "en")
    assert text[:2] == (["a\u2028b\x0bc", "d"], ["one", "two"])
    assert text.files[1].endswith("x.en.gz")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"one\ntwo\n", r"x.de has 3 lines, .*x.en 2; expected as many, .*; align them"),
        (b"one\n\n \n", r"x.en: 2 empty lines, the first is line 2; .* and in .*x.de"),
        (b"one\ntwo\n\xff\n", "x.en: byte 8 is not UTF-8"),
        (b"", "x.en: the file is empty; expected a sentence in each line"),
        (None, "x.en: no such file; expected a text, plain or as .gz or .xz; data.source"),
    ],
)
def test_damaged_files_are_told(tmp_path, content, words):
    (tmp_path / "x.de").write_text("eins\nzwei\ndrei\n")
    if content is not None:
        (tmp_path / "x.en").write_bytes(content)
    with pytest.raises((ValueError, FileNotFoundError), match=words) as caught:
        read_parallel(str(tmp_path / "x"), "de", "en")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"target": "de"}, "both 'de'; expected two languages"),
        ({"length": 1}, "data.length must be at least 2"),
        ({"max_tokens": 20}, "data.max_tokens must be at least data.length=256"),
        ({"tokenizer": "gone"}, "no effect with data.tokenizer=gone"),
        ({"tokenizer": "gone", "pieces": None}, "gone: no such file; expected a tokenizer"),
        ({"kind": "words"}, "data.kind='words'; expected one of wordpiece, unigram, bpe"),
    ],
)
def test_options_are_refused(folder, options, words):
    with pytest.raises((ValueError, FileNotFoundError), match=words):
        data(folder, **options).setup()


def test_a_tokenizer_of_another_script_is_refused(folder):
    (folder / "t.json").write_bytes(Tokenizer.train("bpe", ["Жук жужжит"] * 9, 40, False).to_json())
    with pytest.raises(ValueError, match=r"train.de: \d+% of it is unknown to this tokenizer"):
        data(folder, tokenizer=folder / "t.json", pieces=None).setup()
