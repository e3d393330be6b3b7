import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from shared_files import shared
from token_files import packed

from molflt.data.text import sources
from molflt.data.text.datamodule import TextData, TokenBlocks
from molflt.data.text.sources import _text_blocks
from molflt.data.text.vocabulary import Vocabulary

TEXT = " = Title = \n\na b <unk> b\r\n ä b\tc\n"
WORDS = ["=", "Title", "=", "<eos>", "<eos>"]
WORDS += ["a", "b", "<unk>", "b", "<eos>", "ä", "b", "c", "<eos>"]


def read(path: Path | str, level: str = "word") -> tuple[Vocabulary, np.ndarray]:
    return Vocabulary.count(level, _text_blocks(str(path), level))


@pytest.mark.parametrize("name", ["t.txt", "t.xz"])
@pytest.mark.parametrize("block", [1, 1000])
def test_every_line_ends_with_one_eos(tmp_path, monkeypatch, name, block):
    monkeypatch.setattr(sources, "_BLOCK", block)
    vocabulary, ids = read(packed(tmp_path / name, TEXT))
    assert [vocabulary.tokens[i] for i in ids] == WORDS
    counts = {token: WORDS.count(token) for token in WORDS}
    assert vocabulary.tokens == sorted(counts, key=lambda t: (-counts[t], t))
    assert ids.dtype == np.int32
    again = vocabulary.encode_blocks(_text_blocks(str(tmp_path / name)))
    np.testing.assert_array_equal(again, ids)
    vocabulary, ids = read(packed(tmp_path / "t", "\ufeffa b\nc"))  # no line break at the end
    assert vocabulary.decode(ids) == "a b\nc\n"
    expected = [vocabulary.ids[token] for token in ("a", "<eos>", "<eos>", "c")]
    assert vocabulary.encode("a\n\nc").tolist() == expected


@pytest.mark.parametrize("level", ["char", "byte"])
def test_characters_and_bytes(tmp_path, level):
    content = "aäb\n\n😀 aa\u2028"
    vocabulary, ids = read(packed(tmp_path / "t", content), level)
    assert len(ids) == len(content if level == "char" else content.encode())
    assert vocabulary.decode(ids) == content
    assert vocabulary.decode([vocabulary.eos, *ids]) == content
    np.testing.assert_array_equal(vocabulary.encode(content).numpy(), ids)
    if level == "byte":
        assert read(packed(tmp_path / "t", b"\xff\x00a"), "byte")[1].tolist() == [255, 0, 97]
        assert ids.tolist() == list(content.encode()) and len(vocabulary) == 257
        assert vocabulary.decode([0xC3]) == "\ufffd"
    else:
        assert vocabulary.encode("xa").tolist() == [vocabulary.unk, vocabulary.ids["a"]]


@pytest.mark.parametrize("level", ["word", "char", "byte", "protein"])
def test_vocabularies_survive_json_and_pickle(level):
    text = "MKV\nWX\n" if level == "protein" else '"ä"\n\u2028 😀 \\ \x00'
    vocabulary, _ = Vocabulary.count(level, [text])
    found = Vocabulary.from_json(vocabulary.to_json())
    assert (found.level, found.tokens) == (level, vocabulary.tokens)
    assert pickle.loads(pickle.dumps(found)).ids == vocabulary.ids  # for worker processes


@pytest.mark.parametrize("count", [1, 6, 13])
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


def data(folder: Path, train: str = TEXT * 9, val: str = TEXT, **options) -> TextData:
    paths = packed(folder / "train.txt", train), packed(folder / "val.txt", val)
    return TextData(*paths, **{"length": 8, "batch_size": 3, **options})


def test_data_module(tmp_path):
    module = data(tmp_path, test=packed(tmp_path / "test.txt.gz", "a b\n"))
    assert module.sizes() == {"vocabulary": 8} and set(module.datasets) == {"train", "val"}
    tokens = len(WORDS)
    inputs, targets = next(iter(module.train_dataloader()))
    assert inputs.shape == targets.shape == (3, 8)
    assert sum(int((t >= 0).sum()) for _, t in module.val_dataloader()) == tokens
    module.setup("test")
    assert module.datasets["test"].tokens == 3
    again = data(tmp_path, vocabulary=tmp_path / "v.json")
    (tmp_path / "v.json").write_bytes(module.files()["vocabulary.json"])
    again.setup()
    again.start_step = 2
    stream = iter(module.train_dataloader())
    third = [next(stream) for _ in range(3)][2]
    assert torch.equal(third[0], next(iter(again.train_dataloader()))[0])


def test_rare_tokens_and_unknown_validation_texts(tmp_path):
    vocabulary, ids = Vocabulary.count("word", ["a a b c c c\n"], min_count=2)
    assert vocabulary.tokens == ["c", "a", "<eos>", "<unk>"]
    assert vocabulary.decode(ids) == "a a <unk> c c c\n"
    assert vocabulary.encode("b z a").tolist() == [3, 3, 1]
    with pytest.warns(UserWarning, match=r"val.txt: 75%"):
        data(tmp_path, val="x y z\n").setup()


def test_wikitext2_has_its_published_counts():
    names = ("train.article_order_differs.txt.xz", "valid.txt.xz", "test.txt.xz")
    module = TextData(*(str(shared("wikitext2", name)) for name in names))
    module.setup("test")
    assert [d.tokens for d in module.datasets.values()] == [2_088_628, 217_646, 245_569]
    assert module.sizes() == {"vocabulary": 33_278}
    assert module.vocabulary.tokens[:4] == ["the", ",", ".", "of"]
    start = module.vocabulary.decode(module.datasets["val"].ids[:8])
    assert start == "\n= Homarus gammarus =\n\nHomarus"
