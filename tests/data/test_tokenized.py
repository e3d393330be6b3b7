"""Pieces of words: tokenizers, blocks of one and two parts, and the files of GLUE."""

from __future__ import annotations

import gzip
import json
import lzma
from pathlib import Path

import numpy as np
import pytest
import torch
from sentence_files import write_sentences

from molflt.data.text.glue import GLUE, Example, find_split, read_examples
from molflt.data.text.sentences import SentenceData, Sentences, padded
from molflt.data.text.tokenized import PieceBlocks, TokenizedText
from molflt.data.text.tokenizer import Tokenizer

pytest.importorskip("tokenizers")
LINES = [f"{a} {b} Walking, quickly!\n" for a in ("Über", "the", "a") for b in ("cat", "dog")] * 4


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train("wordpiece", LINES, 60, True)


@pytest.mark.parametrize("kind", ["wordpiece", "unigram"])
def test_a_tokenizer_is_kept_as_it_is(kind):
    found = Tokenizer.train(kind, LINES, 60, True)
    again = Tokenizer.from_json(found.to_json())
    assert again.to_json() == found.to_json() and len(again) == len(found) <= 60
    assert (found.pad, found.unk, found.cls, found.sep, found.mask) == (0, 1, 2, 3, 4)
    assert found.special == [0, 1, 2, 3, 4]
    ids = again.encode(["the cat walking", "The Cat [MASK]"])
    assert ids == found.encode(["the cat walking", "The Cat [MASK]"])
    assert ids[0][:2] == ids[1][:2] and ids[1][-1] == found.mask
    assert found.decode(ids[0]).replace(" ", "") == "thecatwalking"
    cased = Tokenizer.train(kind, LINES, 60, False)
    assert found.ignores_case and not cased.ignores_case
    assert cased.encode(["The Cat"]) != cased.encode(["the cat"])


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_no_piece_goes_beyond_a_line(kind, tmp_path):
    """Lines are encoded one by one: such a piece would never be used."""
    made = text_data(tmp_path, kind=kind)  # which reads in blocks of many lines
    made.setup()
    alone = Tokenizer.train(kind, [line.strip() for line in LINES], 60, True)
    pieces = [{one.token(i) for i in range(len(one))} for one in (made.tokenizer, alone)]
    assert pieces[0] == pieces[1] and not any("\n" in piece for piece in pieces[0])


@pytest.mark.parametrize("kind", ["wordpiece", "unigram", "bpe"])
def test_special_tokens_written_in_a_text_are_these(kind):
    found = Tokenizer.train(kind, LINES, 60, True)
    (ids,) = found.encode(["a [SEP] cat [MASK] [PAD]"])
    assert [one for one in ids if one in (0, 3, 4)] == [found.sep, found.mask, found.pad]


def test_names_of_published_special_tokens(tokenizer):
    """FNet's files say <pad>; one without any such token is refused."""
    content = tokenizer.to_json().decode()
    found = Tokenizer.from_json(content.replace("[PAD]", "<pad>").encode())
    assert found.pad == 0 and found.special == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match=r"tokenizer.json: a tokenizer without \[MASK\]; expected"):
        Tokenizer.from_json(content.replace("[MASK]", "[GAP]").encode())
    for damaged in (b"{}", b"\xff", b'{"model": 3}'):
        with pytest.raises(ValueError, match="x.json: not a tokenizer in JSON; .* expected tok"):
            Tokenizer.from_json(damaged, "x.json")


def test_blocks_hold_the_text_once(tokenizer):
    ids = np.arange(5, 48)  # 43 tokens
    for pairs, room in ((False, 8), (True, 7)):
        blocks = PieceBlocks(ids, 10, tokenizer, pairs, keep_last=True)
        assert len(blocks) == 6
        found = [blocks[i] for i in range(6)]
        text = [t for tokens, _, there in found for t in tokens[there].tolist() if t > 4]
        # of two parts, a rest that is too short for a second one is left out
        assert text == (ids[:35].tolist() + ids[35:42].tolist() if pairs else ids.tolist())
        tokens, types, there = found[0]
        assert tokens[0] == tokenizer.cls and tokens[-1] == tokenizer.sep and there.all()
        assert types.tolist() == ([0] * 6 + [1] * 4 if pairs else [0] * 10)
        assert (tokens == tokenizer.sep).sum() == 1 + pairs
        assert len(PieceBlocks(ids, 10, tokenizer, pairs)) == 43 // room
    last = PieceBlocks(ids, 10, tokenizer, keep_last=True)[5]
    assert last[0].tolist() == [2, 45, 46, 47, 3, 0, 0, 0, 0, 0] and last[2].sum() == 5


def text_data(folder: Path, **options) -> TokenizedText:
    for name in ("train", "val"):
        (folder / f"{name}.txt").write_text("".join(LINES))
    given = {"pieces": 60, "length": 12, "batch_size": 4, **options}
    return TokenizedText(folder / "train.txt", folder / "val.txt", **given)


def test_a_run_goes_on_with_its_tokenizer(tmp_path):
    """Two trainings number pieces differently; what a run keeps is what it reads again."""
    first = text_data(tmp_path)
    kept = first.files()["tokenizer.json"]
    (tmp_path / "tokenizer.json").write_bytes(kept)
    again = text_data(tmp_path, pieces=30)
    again.kept = tmp_path
    assert again.files()["tokenizer.json"] == kept
    assert first.fingerprints() == again.fingerprints()
    again = text_data(tmp_path)
    again.kept = tmp_path / "gone"
    with pytest.raises(
        FileNotFoundError, match="gone/tokenizer.json: no such file; expected the t"
    ):
        again.setup()
    given = text_data(tmp_path, pieces=None, tokenizer=tmp_path)
    assert given.files()["tokenizer.json"] == kept
    assert given.sizes() == {"vocabulary": len(first.tokenizer), "next_sentence": False}
    export = {"files": {"tokenizer.json": json.loads(kept)}}
    (tmp_path / "export").mkdir()
    (tmp_path / "export" / "config.json").write_text(json.dumps(export))
    given = text_data(tmp_path, pieces=None, tokenizer=tmp_path / "export")
    assert given.files()["tokenizer.json"] == kept


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tokenizer": "."}, "data.pieces has no effect with data.tokenizer"),
        ({"kind": "words"}, "data.kind='words'; expected one of wordpiece, unigram"),
        ({"length": 2}, "data.length must be at least 3"),
        ({"length": 4, "next_sentence": True}, "data.length must be at least 5"),
        ({"next_sentence": True, "batch_size": 1}, "data.batch_size of at least 2; got 1"),
        ({"length": 4000}, "train.txt: expected at least 3998 tokens for one block; got"),
        ({"pieces": None, "tokenizer": "away"}, "away: no such file; expected a tokenizer"),
    ],
)
def test_bad_options_of_text(options, words, tmp_path):
    with pytest.raises((ValueError, FileNotFoundError), match=words):
        text_data(tmp_path, **options).setup()


def test_bad_texts(tmp_path, tokenizer):
    data = text_data(tmp_path)
    (tmp_path / "train.txt").write_bytes(b"good\nb\xe9d\n")
    with pytest.raises(ValueError, match=r"train.txt: byte 6 is not UTF-8 .*; convert it$"):
        data.setup()
    (tmp_path / "train.txt").write_text(" \n")
    with pytest.raises(ValueError, match="train.txt: no words in it; expected text"):
        data.setup()
    (tmp_path / "tokenizer.json").write_bytes(tokenizer.to_json())
    data = text_data(tmp_path, pieces=None, tokenizer=tmp_path)
    (tmp_path / "train.txt").write_text("日本語 テキスト 漢字\n" * 90)
    with pytest.raises(ValueError, match=r"train.txt: 100% of it is unknown to this tokenizer"):
        data.setup()


@pytest.mark.parametrize("task", GLUE)
def test_files_of_every_task(task, tmp_path):
    write_sentences(tmp_path, task, 7, 3)
    if task == "MNLI":
        (tmp_path / "MNLI/dev.tsv").rename(tmp_path / "MNLI/dev_matched.tsv")
    found = read_examples(find_split(tmp_path, task, "train"), task)
    assert len(found) == 7 and len(read_examples(find_split(tmp_path, task, "val"), task)) == 3
    assert (found[0].second is not None) == ("second" in GLUE[task].columns)
    classes = {one.label for one in found}
    assert classes <= ({0.5, 4.5} if GLUE[task].labels is None else {0.0, 1.0, 2.0})


def test_quotation_marks_packing_and_forms(tmp_path):
    """As the public files have them: a mark of byte order, single marks, no header, \\r\\n."""
    mrpc = '\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\r\n1\t2\t3\tHe said, "yes\t"No.\r\n'
    (tmp_path / "MRPC.train.tsv.xz").write_bytes(lzma.compress(mrpc.encode()))
    path = find_split(tmp_path, "MRPC", "train")
    assert read_examples(path, "MRPC") == [Example('He said, "yes', '"No.', 1)]
    path.rename(tmp_path / "MRPC.msr_paraphrase_train.txt.xz")  # GLUE's dev.tsv is a part of it
    with pytest.raises(FileNotFoundError, match=r"no train file of MRPC; expected MRPC/train.tsv"):
        find_split(tmp_path, "MRPC", "train")
    sts = "g\tf\t2012\t0001\t4.750\tA plane.\tAn air plane.\textra\n"
    (tmp_path / "STS-B").mkdir()
    (tmp_path / "STS-B/sts-train.csv.gz").write_bytes(gzip.compress(sts.encode()))
    path = find_split(tmp_path, "STS-B", "train")
    assert read_examples(path, "STS-B") == [Example("A plane.", "An air plane.", 4.75)]
    rows = "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n1\t2\t3\ta\n1\t2\t3\ta\tb\t0\n"
    (tmp_path / "QQP.train.tsv").write_text(rows)
    assert len(read_examples(tmp_path / "QQP.train.tsv", "QQP")) == 1


@pytest.mark.parametrize(
    ("task", "text", "words"),
    [
        ("SST-2", "", "empty; expected rows of SST-2"),
        ("SST-2", "sentence\tlabel\n", "no row behind the header"),
        ("SST-2", "text\tlabel\na\t1\n", "row 1: no column 'sentence'; expected a header with"),
        ("SST-2", "sentence\tlabel\na\t1\n\nb\n", "row 4: 1 columns; expected at least 2"),
        ("SST-2", "sentence\tlabel\na\t2\n", "row 2: label '2'; expected one of 0, 1; correct"),
        ("CoLA", "x\t1\t\n", "row 1: 3 columns; expected at least 4"),
        ("STS-B", "sentence1\tsentence2\tscore\na\tb\t5.1\n", "row 2: score '5.1'; expected a num"),
        ("STS-B", "sentence1\tsentence2\tscore\na\tb\tnan\n", "row 2: score 'nan'; expected a num"),
    ],
)
def test_bad_files(task, text, words, tmp_path):
    path = tmp_path / "train.tsv"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"train.tsv: .*{words}"):
        read_examples(path, task)
    with pytest.raises(FileNotFoundError, match=f"no train file of {task}; expected {task}/"):
        SentenceData(task, tmp_path / "away").setup()


def test_pairs_lose_the_ends_of_the_longer_one(tokenizer):
    a, b = " ".join(["cat"] * 9), " ".join(["dog"] * 5)
    rows = Sentences(
        [Example(a, b, 1.0), Example(a, "dog", 0.0), Example(a, None, 2.0)], tokenizer, 11
    )
    assert rows.cut == 2
    (cat,), (dog,) = tokenizer.encode(["cat", "dog"])
    cls, sep = tokenizer.cls, tokenizer.sep
    assert rows[0][0].tolist() == [cls, *[cat] * 4, sep, *[dog] * 4, sep]
    assert rows[0][1].tolist() == [0] * 6 + [1] * 5
    assert rows[1][0].tolist() == [cls, *[cat] * 7, sep, dog, sep]
    assert rows[2][0].tolist() == [cls, *[cat] * 9, sep]
    ids, types, there, labels = padded([rows[1], rows[0]], tokenizer.pad)
    assert ids.shape == types.shape == there.shape == (2, 11) and labels.tolist() == [0.0, 1.0]
    short = Sentences([Example("cat", None, 1.0)], tokenizer, 11)[0]
    ids, types, there, _ = padded([short, rows[0]], tokenizer.pad)
    assert torch.equal(there.sum(1), torch.tensor([3, 11])) and ids[0, 3:].eq(tokenizer.pad).all()
