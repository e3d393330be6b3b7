"""Sequences of bytes: their tokens, reviews in folders, and grey pixels."""

from __future__ import annotations

import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from molflt.data.text.fixed import BYTES, text_of
from molflt.data.text.glue import find_split, read_examples, read_splits
from molflt.data.text.sentences import SentenceData
from molflt.data.text.tokenized import TokenizedText
from molflt.data.text.tokenizer import Tokenizer

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"
REVIEWS = SHARED / "imdb" / "aclImdb_labelled.tar.xz"
SPECIAL = 5


def write_reviews(root: Path, count: int = 20, uses: str = "train test") -> Path:
    """ROOT/aclImdb/train/pos/0_9.txt and so on; the words tell the class."""
    for use in uses.split():
        for name, word in (("neg", b"awful \xff\xfe"), ("pos", "great é".encode())):
            folder = root / "aclImdb" / use / name
            folder.mkdir(parents=True)
            for i in range(count):
                (folder / f"{i}_{9 if name == 'pos' else 2}.txt").write_bytes(word + b"%d" % i)
    (root / "aclImdb" / "train" / "unsup").mkdir(exist_ok=True)
    return root


def byte_tokenizer() -> Tokenizer:
    pytest.importorskip("tokenizers")
    return Tokenizer.train("byte", [], 8, True)


def test_tokens_are_bytes_whatever_they_say() -> None:
    tokenizer = byte_tokenizer()
    assert (tokenizer.fixed, len(tokenizer), len(set(BYTES))) == ("byte", 256 + SPECIAL, 256)
    whole = bytes(range(256)) + np.random.default_rng(0).bytes(5000)
    assert tokenizer.encode([text_of(whole)]) == [[SPECIAL + byte for byte in whole]]
    assert tokenizer.encode(["[MASK]"]) == [[SPECIAL + byte for byte in b"[MASK]"]]
    assert tokenizer.encode(["é[MASK]"], special=True)[0][2:] == [tokenizer.mask]


def test_the_kept_file_means_the_same_to_the_library() -> None:
    kept = byte_tokenizer().to_json()
    tokenizer = Tokenizer.from_json(kept)
    inner = pytest.importorskip("tokenizers").Tokenizer.from_str(kept.decode())
    texts = ["Zażółć <br />\x00\n\t 🎬", "", "  two  spaces ", bytes(range(128)).decode()]
    found = tokenizer.encode(texts)
    assert [one.ids for one in inner.encode_batch(texts, add_special_tokens=False)] == found
    assert [tokenizer.decode(ids) for ids in found] == texts


def test_lines_with_gaps_need_not_be_utf8(tmp_path: Path) -> None:
    """Only a line feed ends a line, and spaces count."""
    path = tmp_path / "a.txt"
    lines = [b" \xff\xc3", "a\u2028b\x0cc\r".encode(), b"end"]
    path.write_bytes(b"\n".join([*lines, b"", b""]))
    data = TokenizedText(path, path, kind="byte", length=8, batch_size=2)
    data.setup()
    own = [[*(SPECIAL + byte for byte in line), data.tokenizer.sep] for line in lines]
    assert data.datasets["val"].ids.tolist() == [one for line in own for one in line]
    for kind in ("wordpiece", "listops"):
        with pytest.raises(ValueError, match="byte 1 is not UTF-8"):
            TokenizedText(path, path, kind=kind, length=8).setup()


def test_reviews_and_what_is_held_out(tmp_path: Path) -> None:
    root = write_reviews(tmp_path)
    byte_tokenizer()
    data = SentenceData("IMDb", root, length=11, val_fraction=0.25)
    assert data.sizes() == {"vocabulary": 261, "classes": 2}
    assert data.files()["classes.json"] == b'["neg", "pos"]\n'
    assert "train 30 sentences of IMDb, 10 of them cut" in data.describe()
    found = read_splits(root, "IMDb", ("train", "val", "test"), 0.25)
    last = [f"{i}".encode() for i in (15, 16, 17, 18, 19)]  # not 5 to 9, which end a list of names
    held = [one.first.encode("utf-8", "surrogateescape")[-2:] for one in found["val"][1]]
    assert held == last * 2
    assert [one.label for one in found["val"][1]] == [0] * 5 + [1] * 5
    texts = {use: {one.first for one in rows} for use, (_, rows) in found.items()}
    assert not texts["train"] & texts["val"] and len(texts["train"]) == 30
    assert texts["train"] | texts["val"] == texts["test"]  # here the same words
    ids, _, label = data.datasets["val"][0]
    own = [SPECIAL + byte for byte in b"awful \xff\xfe15"[:9]]
    assert ids.tolist() == [data.tokenizer.cls, *own, data.tokenizer.sep] and label == 0
    by_default = SentenceData("IMDb", root)
    by_default.setup()
    assert len(by_default.datasets["val"]) == 4
    with pytest.raises(ValueError, match=r"train: 'awful .* is not UTF-8; expected a text"):
        SentenceData("IMDb", root, kind="wordpiece").setup()


def test_published_reviews() -> None:
    if not REVIEWS.is_file():
        pytest.skip(f"no reviews; expected {REVIEWS}")
    tokenizer, seen = byte_tokenizer(), 0
    with tarfile.open(REVIEWS, "r|xz") as archive:
        for member, _ in zip(archive, range(400), strict=False):
            file = archive.extractfile(member)
            if file is not None:
                content = file.read()
                ids = tokenizer.encode([text_of(content)])[0]
                assert bytes(one - SPECIAL for one in ids) == content
                seen += any(byte > 127 for byte in content)
    assert seen > 10  # which are more than ASCII


BAD = {
    "rmdir": ("train/pos", "train: no folder pos; expected neg and pos, with a .txt file"),
    "mkdir": ("train/mixed", "train: unknown class mixed; expected neg and pos"),
    "clear": ("train/neg", r"train/neg: no \.txt file; expected"),
    "empty": ("train/neg/3_2.txt", r"3_2\.txt: expected a text of 1 to .* got an empty file"),
    "gone": ("train", "no train file of IMDb; expected aclImdb/train, an unpacked folder; change"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_folders_are_named(tmp_path: Path, what: str) -> None:
    name, message = BAD[what]
    path = write_reviews(tmp_path, 4, "train") / "aclImdb" / name
    if what in ("rmdir", "gone"):
        path.rename(tmp_path / "elsewhere")
    elif what == "mkdir":
        path.mkdir()
    elif what == "empty":
        path.write_bytes(b"")
    else:
        for file in path.iterdir():
            file.unlink()
    with pytest.raises((ValueError, FileNotFoundError), match=message) as error:
        SentenceData("IMDb", tmp_path).setup()
    assert "\n" not in str(error.value)


def test_shares_that_cannot_be(tmp_path: Path) -> None:
    root = write_reviews(tmp_path, 4, "train")
    with pytest.raises(ValueError, match=r"train: data.val_fraction=0.2 of 8 texts leaves none"):
        SentenceData("IMDb", root, val_fraction=0.2).setup()
    with pytest.raises(ValueError, match="data.val_fraction must be between 0 and 1; got 1"):
        SentenceData("IMDb", root, val_fraction=1)
    with pytest.raises(ValueError, match="data.val_fraction has no effect on RTE, which has files"):
        SentenceData("RTE", root, val_fraction=0.2)
    with pytest.raises(ValueError, match=r"0_2.txt: a file; expected neg and pos"):
        read_examples(root / "aclImdb" / "train" / "neg" / "0_2.txt", "IMDb")


def test_pixels_are_the_grey_levels_of_pillow(tmp_path: Path) -> None:
    """Colors by ITU-R 601, to the last bit; classes are the names of the folders."""
    draw = np.random.default_rng(0)
    for name in ("ship", "cat"):
        folder = tmp_path / "Image" / "train" / name
        folder.mkdir(parents=True)
        for i in range(3):
            image = Image.fromarray(draw.integers(0, 256, (32, 32, 3), dtype=np.uint8))
            image.save(folder / f"{i}.png")
    byte_tokenizer()
    data = SentenceData("Image", tmp_path, length=1026, val_fraction=0.34)
    assert data.files()["classes.json"] == b'["cat", "ship"]\n'
    ids, _, label = data.datasets["val"][1]
    with Image.open(folder.parent / "ship" / "2.png") as image:
        grey = image.convert("L").tobytes()
    assert [one - SPECIAL for one in ids.tolist()[1:-1]] == [*grey] and label == 1
    with pytest.raises(ValueError, match="grey levels are bytes; got a tokenizer of other tokens"):
        SentenceData("Image", tmp_path, kind="listops", val_fraction=0.34).setup()


def test_published_grey_images() -> None:
    folder = SHARED / "fashion_mnist"
    if not (folder / "t10k-images-idx3-ubyte.gz").is_file():
        pytest.skip(f"no images; expected {folder}")
    rows = read_examples(folder / "t10k-images-idx3-ubyte.gz", "Image")
    assert len(rows) == 10_000 and len({one.label for one in rows}) == 10
    content = rows[-1].first.encode("utf-8", "surrogateescape")
    assert len(content) == 28 * 28 and rows[0].label == 9  # an ankle boot


def test_idx_files_are_found(tmp_path: Path) -> None:
    for name in ("train-images-idx3-ubyte.gz", "t10k-images-idx3-ubyte"):
        (tmp_path / "Image").mkdir(exist_ok=True)
        (tmp_path / "Image" / name).write_bytes(b"")
    assert find_split(tmp_path, "Image", "val").name == "train-images-idx3-ubyte.gz"
    assert find_split(tmp_path, "Image", "test").name == "t10k-images-idx3-ubyte"
