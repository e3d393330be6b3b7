"""Sequences of bytes: tokens, reviews in folders, and gray pixels."""

from __future__ import annotations

import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from molflt.data.text.glue import read_splits
from molflt.data.text.sentences import SentenceData
from molflt.data.text.tokenized import TokenizedText
from molflt.data.text.tokenizer import Tokenizer
from molflt.data.text.vocabulary import BYTES, text_of

tokenizers = pytest.importorskip("tokenizers")
SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"
REVIEWS = SHARED / "imdb" / "aclImdb_labelled.tar.xz"
SPECIAL = 5


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


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train("byte", [], 8, True)


def test_tokens_are_bytes(tokenizer) -> None:
    assert (tokenizer.fixed, len(tokenizer), len(set(BYTES))) == ("byte", 256 + SPECIAL, 256)
    whole = bytes(range(256)) + np.random.default_rng(0).bytes(5000)
    assert tokenizer.encode([text_of(whole)]) == [[SPECIAL + byte for byte in whole]]
    assert tokenizer.encode(["[MASK]"]) == [[SPECIAL + byte for byte in b"[MASK]"]]
    assert tokenizer.encode(["é[MASK]"], special=True)[0][2:] == [tokenizer.mask]


def test_the_library_reads_the_file_in_the_same_way(tokenizer) -> None:
    inner = tokenizers.Tokenizer.from_str(tokenizer.to_json().decode())
    texts = ["Zażółć <br />\x00\n\t 🎬", "", "  two  spaces ", bytes(range(128)).decode()]
    found = Tokenizer.from_json(tokenizer.to_json()).encode(texts)
    assert [one.ids for one in inner.encode_batch(texts, add_special_tokens=False)] == found
    assert [tokenizer.decode(ids) for ids in found] == texts


def test_lines_of_bytes_need_not_be_utf8(tmp_path: Path) -> None:
    """Lines end with a line feed only, and spaces count."""
    path = tmp_path / "a.txt"
    lines = [b" \xff\xc3", "a\u2028b\x0cc\r".encode(), b"end"]
    path.write_bytes(b"\n".join([*lines, b"", b""]))
    data = TokenizedText(path, path, kind="byte", length=8, batch_size=2)
    data.setup()
    own = [[*(SPECIAL + byte for byte in line), data.tokenizer.sep] for line in lines]
    assert data.datasets["val"].ids.tolist() == [one for line in own for one in line]


def test_reviews_are_held_out_in_order(tmp_path: Path) -> None:
    root = write_reviews(tmp_path)
    data = SentenceData("IMDb", root, length=11, val_fraction=0.25)
    assert data.sizes() == {"vocabulary": 261, "classes": 2}
    assert data.files()["classes.json"] == b'["neg", "pos"]\n'
    assert data.datasets["train"].cut == 10 and len(data.datasets["train"]) == 30
    found = read_splits(root, "IMDb", ("train", "val", "test"), 0.25)
    last = [f"{i}".encode() for i in (15, 16, 17, 18, 19)]  # in the order of numbers, not of names
    held = [one.first.encode("utf-8", "surrogateescape")[-2:] for one in found["val"][1]]
    assert held == last * 2
    assert [one.label for one in found["val"][1]] == [0] * 5 + [1] * 5
    texts = {use: {one.first for one in rows} for use, (_, rows) in found.items()}
    assert not texts["train"] & texts["val"] and len(texts["train"]) == 30
    assert texts["train"] | texts["val"] == texts["test"]
    ids, _, label = data.datasets["val"][0]
    own = [SPECIAL + byte for byte in b"awful \xff\xfe15"[:9]]
    assert ids.tolist() == [data.tokenizer.cls, *own, data.tokenizer.sep] and label == 0
    by_default = SentenceData("IMDb", root)
    by_default.setup()
    assert len(by_default.datasets["val"]) == 4


def test_published_reviews_keep_their_bytes(tokenizer) -> None:
    if not REVIEWS.is_file():
        pytest.skip(f"{REVIEWS} is missing")
    seen = 0
    with tarfile.open(REVIEWS, "r|xz") as archive:
        for member, _ in zip(archive, range(400), strict=False):
            file = archive.extractfile(member)
            if file is not None:
                content = file.read()
                ids = tokenizer.encode([text_of(content)])[0]
                assert bytes(one - SPECIAL for one in ids) == content
                seen += any(byte > 127 for byte in content)
    assert seen > 10  # texts that are not ASCII


def test_pixels_are_the_gray_levels_of_pillow(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    for name in ("ship", "cat"):
        folder = tmp_path / "Image" / "train" / name
        folder.mkdir(parents=True)
        for i in range(3):
            image = Image.fromarray(draw.integers(0, 256, (32, 32, 3), dtype=np.uint8))
            image.save(folder / f"{i}.png")
    data = SentenceData("Image", tmp_path, length=1026, val_fraction=0.34)
    assert data.files()["classes.json"] == b'["cat", "ship"]\n'
    ids, _, label = data.datasets["val"][1]
    with Image.open(folder.parent / "ship" / "2.png") as image:
        gray = image.convert("L").tobytes()
    assert [one - SPECIAL for one in ids.tolist()[1:-1]] == [*gray] and label == 1
    with pytest.raises(ValueError, match="data.kind byte"):
        SentenceData("Image", tmp_path, kind="listops", val_fraction=0.34).setup()
