"""Tokenizers, blocks of one and two parts, and the files of GLUE."""

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
from molflt.data.text.sentences import Sentences, padded
from molflt.data.text.tokenized import PieceBlocks, TokenizedText
from molflt.data.text.tokenizer import Tokenizer

pytest.importorskip("tokenizers")
LINES = [f"{a} {b} Walking, quickly!\n" for a in ("Über", "the", "a") for b in ("cat", "dog")] * 4


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train("wordpiece", LINES, 60, True)


@pytest.mark.parametrize("kind", ["wordpiece", "unigram", "bpe"])
def test_tokenizers_survive_json(kind):
    found = Tokenizer.train(kind, LINES, 60, True)
    again = Tokenizer.from_json(found.to_json())
    assert again.to_json() == found.to_json() and len(again) == len(found) <= 60
    assert (found.pad, found.unk, found.cls, found.sep, found.mask) == (0, 1, 2, 3, 4)
    assert found.special == [0, 1, 2, 3, 4]
    ids = again.encode(["the cat walking", "The Cat [MASK]", "a [SEP] cat [MASK] [PAD]"])
    assert ids[:2] == found.encode(["the cat walking", "The Cat [MASK]"])
    assert ids[0][:2] == ids[1][:2] and ids[1][-1] == found.mask
    assert [one for one in ids[2] if one in (0, 3, 4)] == [found.sep, found.mask, found.pad]
    assert found.decode(ids[0]).replace(" ", "") == "thecatwalking"
    cased = Tokenizer.train(kind, LINES, 60, False)
    assert found.ignores_case and not cased.ignores_case
    assert cased.encode(["The Cat"]) != cased.encode(["the cat"])


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_subwords_contain_no_line_breaks(kind, tmp_path):
    made = text_data(tmp_path, kind=kind)  # reads blocks of many lines
    made.setup()
    single = Tokenizer.train(kind, [line.strip() for line in LINES], 60, True)
    pieces = [{one.token(i) for i in range(len(one))} for one in (made.tokenizer, single)]
    assert pieces[0] == pieces[1] and not any("\n" in piece for piece in pieces[0])


def test_special_tokens_may_have_the_names_of_fnet(tokenizer):
    content = tokenizer.to_json().decode()
    found = Tokenizer.from_json(content.replace("[PAD]", "<pad>").encode())
    assert found.pad == 0 and found.special == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match=r"without \[MASK\]"):
        Tokenizer.from_json(content.replace("[MASK]", "[GAP]").encode())


def test_blocks_contain_the_text_once(tokenizer):
    ids = np.arange(5, 48)  # 43 tokens
    for pairs, inner in ((False, 8), (True, 7)):
        blocks = PieceBlocks(ids, 10, tokenizer, pairs, keep_last=True)
        assert len(blocks) == 6
        found = [blocks[i] for i in range(6)]
        text = [t for tokens, _, there in found for t in tokens[there].tolist() if t > 4]
        # The last token is too short for two parts
        assert text == (ids[:42].tolist() if pairs else ids.tolist())
        tokens, types, there = found[0]
        assert tokens[0] == tokenizer.cls and tokens[-1] == tokenizer.sep and there.all()
        assert types.tolist() == ([0] * 6 + [1] * 4 if pairs else [0] * 10)
        assert (tokens == tokenizer.sep).sum() == 1 + pairs
        assert len(PieceBlocks(ids, 10, tokenizer, pairs)) == 43 // inner
    last = PieceBlocks(ids, 10, tokenizer, keep_last=True)[5]
    assert last[0].tolist() == [2, 45, 46, 47, 3, 0, 0, 0, 0, 0] and last[2].sum() == 5


def text_data(folder: Path, **options) -> TokenizedText:
    for name in ("train", "val"):
        (folder / f"{name}.txt").write_text("".join(LINES))
    given = {"pieces": 60, "length": 12, "batch_size": 4, **options}
    return TokenizedText(folder / "train.txt", folder / "val.txt", **given)


def test_runs_and_exports_provide_their_tokenizer(tmp_path):
    first = text_data(tmp_path)
    kept = first.files()["tokenizer.json"]
    (tmp_path / "tokenizer.json").write_bytes(kept)
    again = text_data(tmp_path, pieces=30)
    again.kept = tmp_path
    assert again.files()["tokenizer.json"] == kept
    assert first.fingerprints() == again.fingerprints()
    again = text_data(tmp_path)
    again.kept = tmp_path / "gone"
    with pytest.raises(FileNotFoundError, match=r"gone/tokenizer.json.*torchrun"):
        again.setup()
    (tmp_path / "export").mkdir()
    export = {"files": {"tokenizer.json": json.loads(kept)}}
    (tmp_path / "export" / "config.json").write_text(json.dumps(export))
    for source in (tmp_path, tmp_path / "export"):
        given = text_data(tmp_path, pieces=None, tokenizer=source)
        assert given.files()["tokenizer.json"] == kept
        assert given.sizes() == {"vocabulary": len(first.tokenizer), "next_sentence": False}


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


def test_published_files_are_read_unchanged(tmp_path):
    """With a byte order mark, single quotation marks, \\r\\n, no header, or missing columns."""
    mrpc = '\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\r\n1\t2\t3\tHe said, "yes\t"No.\r\n'
    (tmp_path / "MRPC.train.tsv.xz").write_bytes(lzma.compress(mrpc.encode()))
    path = find_split(tmp_path, "MRPC", "train")
    assert read_examples(path, "MRPC") == [Example('He said, "yes', '"No.', 1)]
    path.rename(tmp_path / "MRPC.msr_paraphrase_train.txt.xz")  # contains GLUE's dev.tsv
    with pytest.raises(FileNotFoundError):
        find_split(tmp_path, "MRPC", "train")
    sts = "g\tf\t2012\t0001\t4.750\tA plane.\tAn air plane.\textra\n"
    (tmp_path / "STS-B").mkdir()
    (tmp_path / "STS-B/sts-train.csv.gz").write_bytes(gzip.compress(sts.encode()))
    path = find_split(tmp_path, "STS-B", "train")
    assert read_examples(path, "STS-B") == [Example("A plane.", "An air plane.", 4.75)]
    rows = "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n1\t2\t3\ta\n1\t2\t3\ta\tb\t0\n"
    (tmp_path / "QQP.train.tsv").write_text(rows)
    assert len(read_examples(tmp_path / "QQP.train.tsv", "QQP")) == 1


def test_the_longer_sentence_of_a_pair_is_cut(tokenizer):
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
    short = Sentences([Example("cat", None, 1.0)], tokenizer, 11)[0]
    ids, types, there, labels = padded([short, rows[1]], tokenizer.pad)
    assert ids.shape == types.shape == there.shape == (2, 11) and labels.tolist() == [1.0, 0.0]
    assert torch.equal(there.sum(1), torch.tensor([3, 11])) and ids[0, 3:].eq(tokenizer.pad).all()
