"""Texts as token ids: counting, files of all kinds, blocks, and what is refused."""

from __future__ import annotations

import gzip
import json
import lzma
import pickle
import sys
import tracemalloc
import types
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from molflt.data import packed
from molflt.data.hub import dataset_loader
from molflt.data.text import sources as text_sources
from molflt.data.text.datamodule import TextData, TokenBlocks, read_blocks
from molflt.data.text.sources import _line_blocks, _text_blocks
from molflt.data.text.vocabulary import Vocabulary

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"
TEXT = " = Title = \n\na b <unk> b\r\n ä b\tc\n"
WORDS = ["=", "Title", "=", "<eos>", "<eos>"]
WORDS += ["a", "b", "<unk>", "b", "<eos>", "ä", "b", "c", "<eos>"]


def write(path: Path, content: str | bytes) -> str:
    raw = content.encode() if isinstance(content, str) else content
    pack = {".gz": gzip.compress, ".xz": lzma.compress}.get(path.suffix, bytes)
    path.write_bytes(pack(raw))
    return str(path)


def read(path: str, level: str = "word") -> tuple[Vocabulary, np.ndarray]:
    return Vocabulary.count(level, _text_blocks(path, level))


@pytest.mark.parametrize("name", ["t.txt", "t.tokens", "t.gz", "t.xz"])
@pytest.mark.parametrize("block", [1, 2, 5, 1000])
def test_words_of_files(tmp_path, monkeypatch, name, block):
    """Every line, empty ones too, ends with one <eos>; wherever the reading is interrupted."""
    monkeypatch.setattr(text_sources, "_BLOCK", block)
    vocabulary, ids = read(write(tmp_path / name, TEXT))
    assert [vocabulary.tokens[i] for i in ids] == WORDS
    counts = {token: WORDS.count(token) for token in WORDS}
    assert vocabulary.tokens == sorted(counts, key=lambda t: (-counts[t], t))
    assert ids.dtype == np.int32
    again = vocabulary.encode_blocks(_text_blocks(str(tmp_path / name)))
    np.testing.assert_array_equal(again, ids)


@pytest.mark.parametrize("block", [1, 1000])
def test_a_byte_order_mark_is_no_text(tmp_path, monkeypatch, block):
    """At the beginning; of bytes, it is what is modelled."""
    monkeypatch.setattr(text_sources, "_BLOCK", block)
    path = write(tmp_path / "t", "\ufeffa b\n\ufeffc\n")
    assert set(read(path)[0].tokens) == {"a", "b", "\ufeffc", "<eos>", "<unk>"}
    assert (
        read(path, "char")[1].tolist()
        == read(write(tmp_path / "u", "a b\n\ufeffc\n"), "char")[1].tolist()
    )
    assert "".join(_line_blocks(path)) == "a b\n\ufeffc\n"
    assert "".join(_line_blocks(path, any_bytes=True)) == "\ufeffa b\n\ufeffc\n"
    assert read(path, "byte")[1][:3].tolist() == [0xEF, 0xBB, 0xBF]
    with pytest.raises(ValueError, match="the file is empty"):
        read_blocks(write(tmp_path / "mark", "\ufeff"), read(path)[0], 4)


def test_last_line_without_an_end(tmp_path):
    vocabulary, ids = read(write(tmp_path / "t", "a b\nc"))
    assert vocabulary.decode(ids) == "a b\nc\n"
    expected = [vocabulary.ids[token] for token in ("a", "<eos>", "<eos>", "c")]
    assert vocabulary.encode("a\n\nc").tolist() == expected


@pytest.mark.parametrize("level", ["char", "byte"])
@pytest.mark.parametrize("block", [1, 3, 1000])
def test_characters_and_bytes(tmp_path, monkeypatch, level, block):
    monkeypatch.setattr(text_sources, "_BLOCK", block)
    content = "aäb\n\n😀 aa\u2028"
    vocabulary, ids = read(write(tmp_path / "t", content), level)
    assert len(ids) == len(content if level == "char" else content.encode())
    assert vocabulary.decode(ids) == content
    assert vocabulary.decode([vocabulary.eos, *ids]) == content
    np.testing.assert_array_equal(vocabulary.encode(content).numpy(), ids)
    if level == "byte":
        assert read(write(tmp_path / "t", b"\xff\x00a"), "byte")[1].tolist() == [255, 0, 97]
        assert ids.tolist() == list(content.encode()) and len(vocabulary) == 257
        assert vocabulary.decode([0xC3]) == "\ufffd"
    else:
        assert vocabulary.tokens[0] == "a"
        assert vocabulary.encode("xa").tolist() == [vocabulary.unk, 0]


def test_rare_tokens_are_unknown():
    vocabulary, ids = Vocabulary.count("word", ["a a b c c c\n"], min_count=2)
    assert vocabulary.tokens == ["c", "a", "<eos>", "<unk>"]
    assert vocabulary.decode(ids) == "a a <unk> c c c\n"
    assert vocabulary.encode("b z a").tolist() == [3, 3, 1]
    with pytest.raises(ValueError, match="token id 4; expected 0 to 3"):
        vocabulary.decode([1, 4])


@pytest.mark.parametrize("level", ["word", "char", "byte"])
def test_json_round_trip(level):
    vocabulary, _ = Vocabulary.count(level, ['"ä"\n\u2028 😀 \\ \x00'])
    found = Vocabulary.from_json(vocabulary.to_json())
    assert (found.level, found.tokens) == (level, vocabulary.tokens)
    assert pickle.loads(pickle.dumps(found)).ids == vocabulary.ids  # for worker processes


GOOD = {"format": "molflt-vocabulary", "version": 1, "level": "word"}
GOOD["tokens"] = ["<eos>", "<unk>", "a"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"\xff", "in JSON"),
        (b"{", "in JSON"),
        (b"[]", "another file"),
        ({"format": "other"}, "another file"),
        ({"version": 2}, "version 1"),
        ({"level": "line"}, "level='line'"),
        ({"level": []}, "level="),
        ({"tokens": None}, "list of texts"),
        ({"tokens": ["a", 1]}, "list of texts"),
        ({"tokens": ["<eos>", "<unk>", "a", "a"]}, "'a' stands twice"),
        ({"tokens": ["<unk>"]}, "no <eos>"),
        ({"tokens": ["<eos>"]}, "no <unk>"),
        ({"level": "char", "tokens": ["<eos>", "<unk>", "ab"]}, "token 'ab'"),
        ({"level": "byte"}, "256 bytes"),
        (b"[" * 100_000, "in JSON"),
        (b'{"version": ' + b"9" * 5000 + b"}", "in JSON"),
        ({"version": "9" * 5000}, "version 1"),
        ({"level": "x" * 5000}, "level="),
        ({"tokens": ["<eos>", "<unk>", *["a" * 5000] * 2]}, "'a+' stands twice"),
    ],
)
def test_bad_vocabularies(content, words):
    raw = content if isinstance(content, bytes) else json.dumps({**GOOD, **content}).encode()
    assert Vocabulary.from_json(json.dumps(GOOD).encode()).ids["a"] == 2
    with pytest.raises(ValueError, match=f"v.json: .*{words}"):
        Vocabulary.from_json(raw, "v.json")
    with pytest.raises(ValueError) as caught:
        Vocabulary.from_json(raw, "v.json")
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("block", [1, 4, 1000])
@pytest.mark.parametrize(
    ("raw", "offset"),
    [(b"abc\xff", 3), (b"a\xc3\xa4\xc3(", 3), (b"line\nab\xe2\x82", 7), (b"\x80", 0)],
)
def test_not_utf8(tmp_path, monkeypatch, raw, offset, block):
    monkeypatch.setattr(text_sources, "_BLOCK", block)
    for level in ("word", "char"):
        with pytest.raises(ValueError, match=rf"t.txt: byte {offset} is not UTF-8"):
            read(write(tmp_path / "t.txt", raw), level)


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(FileNotFoundError, match="none.txt: no such file"):
        read(str(tmp_path / "none.txt"))
    for name in ("t.gz", "t.xz"):
        path = tmp_path / name
        for content in (b"plain text", Path(write(path, "ab " * 999)).read_bytes()[:-9]):
            path.write_bytes(content)
            with pytest.raises(ValueError, match=f"{name}: expected a whole"):
                read(str(path))


@pytest.mark.parametrize("block", [1, 7, 100, 1000])
def test_a_line_without_an_end_is_read_in_words(tmp_path, monkeypatch, block):
    monkeypatch.setattr(text_sources, "_BLOCK", block)
    words = ["ab", "c\u00a0d", "e" * 30] * 10
    separators = [" ", "\t", "\u2003\x0b"] * 10
    text = "".join(word + gap for word, gap in zip(words, separators, strict=True))
    blocks = list(_text_blocks(write(tmp_path / "t.gz", text)))
    assert "".join(blocks) == f"{text}\n" and len(blocks) > 200 // max(block, 30)
    assert len(Vocabulary.count("word", blocks)[1]) == len(text.split()) + 1


def test_a_word_without_an_end_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(text_sources, "_BLOCK", 7)
    monkeypatch.setattr(text_sources, "_LONGEST", 50)
    path = write(tmp_path / "t", "ab " + "x" * 50 + " " + "y" * 50)
    assert len(read(path)[1]) == 4
    path = write(tmp_path / "t", "ab " + "x" * 60)
    with pytest.raises(ValueError, match="t: expected words of at most 50 characters; got .*byte"):
        read(path)
    assert len(read(path, "char")[1]) == 63


def test_words_that_are_all_different_are_no_words(tmp_path, monkeypatch):
    monkeypatch.setattr("molflt.data.text.vocabulary._MANY", 50)
    path = write(tmp_path / "t", " ".join(map(str, range(60))))
    with pytest.raises(ValueError, match="t: expected words that .* got 59 different .* first 59;"):
        TextData(path, path, length=4).setup()
    TextData(path, path, length=4, level="char").setup()
    path = write(tmp_path / "t", " ".join(map(str, [*range(60)] * 9)))
    TextData(path, path, length=4).setup()


@pytest.mark.parametrize("level", ["word", "char", "byte"])
@pytest.mark.parametrize("name", ["t.gz", "t.xz"])
@pytest.mark.parametrize("unit", ["x", "a b ", "\n"])
def test_bombs_are_refused_before_they_burst(tmp_path, monkeypatch, name, level, unit):
    """100 MB of one kind in 100 kB: refused, and with it never in memory."""
    monkeypatch.setattr(packed, "_FREE", 2**17)
    monkeypatch.setattr(packed, "_BLOCK", 2**16)
    monkeypatch.setattr(text_sources, "_BLOCK", 2**16)
    pack = gzip.compress if name == "t.gz" else lzma.compress
    path = tmp_path / name
    path.write_bytes(pack((unit * 10**7)[: 10**7].encode()) * 10)
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=f"{name}: expected to unpack to at most 100|words of"):
            read(str(path), level)
        assert tracemalloc.get_traced_memory()[1] < 20e6
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("level", ["char", "byte"])
def test_tokens_are_in_memory_once(tmp_path, level):
    """4 bytes for each, and some blocks: not the half dozen copies that indexing makes."""
    rng = np.random.default_rng(0)
    path = write(tmp_path / "t", rng.integers(32, 127, 2**24, dtype=np.uint8).tobytes())
    module = TextData(path, path, level=level, length=64)
    tracemalloc.start()
    try:
        vocabulary, ids = read(path, level)
        blocks = TokenBlocks(ids, module.length, vocabulary.eos)
        assert tracemalloc.get_traced_memory()[1] < 4 * 2**24 * 1.1 + 60e6
    finally:
        tracemalloc.stop()
    assert blocks.tokens == 2**24


@pytest.mark.parametrize("count", [1, 6, 7, 12, 13])
def test_every_token_is_predicted_once(count):
    length, eos = 6, 99
    stream = [eos, *range(count)]
    blocks = TokenBlocks(np.arange(count), length, eos, keep_last=True)
    inputs, targets = (torch.cat(parts) for parts in zip(*blocks, strict=True))
    assert inputs.dtype == targets.dtype == torch.int64 and len(inputs) % length == 0
    assert inputs[:count].tolist() == stream[:-1] and (inputs[count:] == eos).all()
    assert targets[:count].tolist() == stream[1:] and (targets[count:] == -1).all()
    if count >= length:
        train = TokenBlocks(np.arange(count), length, eos)
        assert len(train) == count // length
        assert all((pair[1] >= 0).all() for pair in train)
        assert torch.equal(train[0][0], blocks[0][0])
    with pytest.raises(IndexError):
        blocks[len(blocks)]


def data(folder: Path, train: str = TEXT * 9, val: str = TEXT, **options) -> TextData:
    paths = write(folder / "train.txt", train), write(folder / "val.txt", val)
    return TextData(*paths, **{"length": 8, "batch_size": 3, **options})


def test_data_module(tmp_path):
    module = data(tmp_path, test=write(tmp_path / "test.txt.gz", "a b\n"))
    assert module.sizes() == {"vocabulary": 8}
    assert Vocabulary.from_json(module.files()["vocabulary.json"]).tokens[0] == "<eos>"
    before = dict(module.datasets)
    module.setup("fit")
    assert module.datasets == before and set(before) == {"train", "val"}
    tokens = len(WORDS)
    train, val = f"train {9 * tokens} tokens (train.txt)", f"val {tokens} tokens (val.txt)"
    assert module.describe() == [train, val]
    inputs, targets = next(iter(module.train_dataloader()))
    assert inputs.shape == targets.shape == (3, 8)
    counted = sum(int((t >= 0).sum()) for _, t in module.val_dataloader())
    assert counted == tokens
    module.setup("test")
    assert module.datasets["test"].tokens == 3
    one, two = data(tmp_path), data(tmp_path)
    one.setup()
    two.setup()
    two.start_step = 2
    stream = iter(one.train_dataloader())
    third = [next(stream) for _ in range(3)][2]
    assert torch.equal(third[0], next(iter(two.train_dataloader()))[0])


def test_a_given_vocabulary(tmp_path):
    first = data(tmp_path)
    path = tmp_path / "vocabulary.json"
    path.write_bytes(first.files()["vocabulary.json"])
    again = data(tmp_path, train="b a new\n" * 9, vocabulary=path)
    assert again.sizes() == first.sizes()
    with pytest.raises(ValueError, match="is a vocabulary of level 'word'; expected 'char'"):
        data(tmp_path, level="char", vocabulary=path).setup()
    with pytest.raises(ValueError, match="vocabulary.json: 75% of the tokens of .*train.txt"):
        data(tmp_path, train="x y z\n" * 9, vocabulary=path).setup()
    with pytest.raises(FileNotFoundError, match="no.json: no such file"):
        data(tmp_path, vocabulary=tmp_path / "no.json").setup()


def test_unknown_validation_text(tmp_path):
    with pytest.warns(UserWarning, match=r"val.txt: 75% of the tokens are not in the vocabulary"):
        data(tmp_path, val="x y z\n").setup()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        data(tmp_path, val="a y z\n").setup()  # 50 %


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length": 0}, "data.length"),
        ({"min_count": 0}, "data.min_count"),
        ({"min_count": 2, "vocabulary": "v.json"}, "no effect with data.vocabulary=v.json, of whi"),
        ({"min_count": 2, "level": "byte"}, "data.min_count has no effect with data.level=byte"),
        ({"min_count": 2, "level": "protein"}, "has no effect with data.level=protein, of which"),
        ({"batch_size": 0}, "data.batch_size"),
        ({"workers": -1}, "data.workers"),
        *(
            ({"level": level, **content}, message)
            for level in ("word", "char", "byte")
            for content, message in (
                ({"train": ""}, "train.txt: .*empty"),
                ({"val": ""}, "val.txt: .*empty"),
                ({"train": "\n"}, "train.txt: expected at least 8 tokens.*got 1"),
            )
        ),
    ],
)
def test_bad_options_and_empty_texts(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        data(tmp_path, **options).setup()


class Rows(list):
    column_names = ("text", "label")


def test_hugging_face_names(monkeypatch):
    """Parts of a name, splits and columns; rows are lines, as in its WikiText."""
    asked = []

    def load_dataset(*name: str, split: str) -> Rows:
        asked.append((*name, split))
        if split == "none":
            raise RuntimeError("no such split")
        return Rows([{"text": line, "label": 1} for line in ("", " = Title = \n", "a b")])

    fake = types.SimpleNamespace(load_dataset=load_dataset)
    monkeypatch.setitem(sys.modules, "datasets", fake)
    for source in ("hf:o/wiki/v1", "hf:o/wiki:test", "hf:o/wiki:train[:5].text"):
        vocabulary, ids = read(source)
        assert vocabulary.decode(ids) == "\n= Title =\na b\n"
    assert asked == [("o/wiki", "v1", "train"), ("o/wiki", "test"), ("o/wiki", "train[:5]")]
    assert read_blocks("hf:o/wiki", vocabulary, 4, "val").tokens == len(ids)
    assert asked[-1] == ("o/wiki", "validation")
    for name, message in (
        ("hf:o/wiki:train.body", "no column 'body'; expected one of text, label"),
        ("hf:o/wiki:train.label", "column 'label' must hold texts; got 1"),
        ("hf:o/wiki:none", "hf:o/wiki:none: cannot be loaded .*no such split"),
    ):
        with pytest.raises(ValueError, match=message):
            read(name)
    for missing in (None, types.ModuleType("datasets")):  # not there, or a folder of that name
        monkeypatch.setitem(sys.modules, "datasets", missing)
        with pytest.raises(ModuleNotFoundError, match="hf:o/wiki: needs the package datasets"):
            read("hf:o/wiki")


@pytest.mark.parametrize(
    "name", ["../../etc", "/etc", "wiki", "a/..", "a/../b", "a//b", "a/b/c/d", ""]
)
def test_names_that_are_paths_are_not_of_the_hub(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    loaded = []
    fake = types.SimpleNamespace(load_dataset=lambda *name, **_: loaded.append(name))
    monkeypatch.setitem(sys.modules, "datasets", fake)
    (tmp_path / "owner" / "set").mkdir(parents=True)
    for source in (f"hf:{name}", f"hf:{name}:train", "hf:owner/set"):
        with pytest.raises(ValueError, match="expected hf:OWNER/NAME"):
            read(source)
        with pytest.raises(ValueError, match="expected hf:OWNER/NAME"):
            dataset_loader(source)
    assert not loaded


def test_wikitext2_as_it_is_published():
    """2,088,628 / 217,646 / 245,569 tokens and 33,278 types."""
    folder = SHARED / "wikitext2"
    if not folder.is_dir():
        pytest.skip(f"WikiText-2 is not at {folder}")
    names = ("train.article_order_differs.txt.xz", "valid.txt.xz", "test.txt.xz")
    module = TextData(*(str(folder / name) for name in names))
    module.setup("test")
    assert [d.tokens for d in module.datasets.values()] == [2_088_628, 217_646, 245_569]
    assert module.sizes() == {"vocabulary": 33_278}
    vocabulary = module.vocabulary
    assert (module.datasets["val"].ids < len(vocabulary)).all()
    assert vocabulary.tokens[:4] == ["the", ",", ".", "of"]
    start = vocabulary.decode(module.datasets["val"].ids[:8])
    assert start == "\n= Homarus gammarus =\n\nHomarus"


def test_tinyshakespeare_characters():
    path = SHARED / "tinyshakespeare" / "input.txt.xz"
    if not path.is_file():
        pytest.skip(f"tinyshakespeare is not at {path}")
    vocabulary, ids = read(str(path), "char")
    assert (len(ids), len(vocabulary)) == (1_115_394, 67)  # 65 characters, <eos> and <unk>
    assert vocabulary.decode(ids[:14]) == "First Citizen:"
