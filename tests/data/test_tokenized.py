import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from token_files import packed, write_folder, write_pairs, write_reviews, write_sentences

from molflt.data.text.datamodule import PieceBlocks, TokenizedText
from molflt.data.text.parallel import ParallelData, paired, read_parallel
from molflt.data.text.sentences import (
    GLUE,
    Example,
    SentenceData,
    Sentences,
    find_split,
    padded,
    read_examples,
    read_splits,
)
from molflt.data.text.tokenizer import Tokenizer
from molflt.data.text.vocabulary import BYTES, text_of

tokenizers = pytest.importorskip("tokenizers")
LINES = [f"{a} {b} Walking, quickly!\n" for a in ("Über", "the", "a") for b in ("cat", "dog")] * 4
SPECIAL = 5


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
    assert not any("\n" in found.token(i) for i in range(len(found)))
    renamed = Tokenizer.from_json(found.to_json().replace(b"[PAD]", b"<pad>"))  # as in FNet
    assert renamed.pad == 0 and renamed.special == [0, 1, 2, 3, 4]
    cased = Tokenizer.train(kind, LINES, 60, False)
    assert found.ignores_case and not cased.ignores_case
    assert cased.encode(["The Cat"]) != cased.encode(["the cat"])


def test_byte_pairs_are_decoded_to_the_text():
    """Case and umlauts survive, and punctuation marks are tokens."""
    lines = ["Ein Mann, der läuft.", "A man's dog: (two) dogs!", "Ein Hund."] * 20
    learned = Tokenizer.train("bpe", lines, 200, False)
    for line, ids in zip(lines, learned.encode(lines), strict=True):
        assert learned.decode(ids) == line
        pieces = [learned.token(i) for i in ids]
        assert all(len(piece) == 1 for piece in pieces if set(piece) & set(",.:!()'"))
    assert learned.unk in learned.encode(["漢"])[0]
    assert len(learned.encode(["Hund 漢"])[0]) > 1


def test_tokens_are_bytes():
    of_bytes = Tokenizer.train("byte", [], 8, True)
    assert (of_bytes.fixed, len(of_bytes), len(set(BYTES))) == ("byte", 256 + SPECIAL, 256)
    whole = bytes(range(256)) + np.random.default_rng(0).bytes(500)
    assert of_bytes.encode([text_of(whole)]) == [[SPECIAL + byte for byte in whole]]
    assert of_bytes.encode(["[MASK]"]) == [[SPECIAL + byte for byte in b"[MASK]"]]
    assert of_bytes.encode(["é[MASK]"], special=True)[0][2:] == [of_bytes.mask]
    inner = tokenizers.Tokenizer.from_str(of_bytes.to_json().decode())
    texts = ["Zażółć <br />\x00\n\t 🎬", "", "  two  spaces ", bytes(range(128)).decode()]
    found = Tokenizer.from_json(of_bytes.to_json()).encode(texts)
    assert [one.ids for one in inner.encode_batch(texts, add_special_tokens=False)] == found
    assert [of_bytes.decode(ids) for ids in found] == texts


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
    (tmp_path / "export").mkdir()
    export = {"files": {"tokenizer.json": json.loads(kept)}}
    (tmp_path / "export" / "config.json").write_text(json.dumps(export))
    given = text_data(tmp_path, pieces=None, tokenizer=tmp_path / "export")
    assert given.files()["tokenizer.json"] == kept


def test_lines_of_bytes_need_not_be_utf8(tmp_path):
    """Lines end with a line feed only, and spaces count."""
    path = tmp_path / "a.txt"
    lines = [b" \xff\xc3", "a\u2028b\x0cc\r".encode(), b"end"]
    path.write_bytes(b"\n".join([*lines, b"", b""]))
    data = TokenizedText(path, path, kind="byte", length=8, batch_size=2)
    data.setup()
    own = [[*(SPECIAL + byte for byte in line), data.tokenizer.sep] for line in lines]
    assert data.datasets["val"].ids.tolist() == [one for line in own for one in line]


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
    """Files have a byte order mark, single quotation marks, \\r\\n, no header, or few columns."""
    mrpc = '\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\r\n1\t2\t3\tHe said, "yes\t"No.\r\n'
    packed(tmp_path / "MRPC.train.tsv.xz", mrpc)
    path = find_split(tmp_path, "MRPC", "train")
    assert read_examples(path, "MRPC") == [Example('He said, "yes', '"No.', 1)]
    path.rename(tmp_path / "MRPC.msr_paraphrase_train.txt.xz")  # contains GLUE's dev.tsv
    with pytest.raises(FileNotFoundError):
        find_split(tmp_path, "MRPC", "train")
    sts = "g\tf\t2012\t0001\t4.750\tA plane.\tAn air plane.\textra\n"
    (tmp_path / "STS-B").mkdir()
    packed(tmp_path / "STS-B/sts-train.csv.gz", sts)
    path = find_split(tmp_path, "STS-B", "train")
    assert read_examples(path, "STS-B") == [Example("A plane.", "An air plane.", 4.75)]
    rows = "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n1\t2\t3\ta\n1\t2\t3\ta\tb\t0\n"
    (tmp_path / "QQP.train.tsv").write_text(rows)
    assert len(read_examples(tmp_path / "QQP.train.tsv", "QQP")) == 1


def test_the_longer_sentence_of_a_pair_is_cut(tokenizer):
    a, b = " ".join(["cat"] * 9), " ".join(["dog"] * 5)
    examples = [Example(a, b, 1.0), Example(a, "dog", 0.0), Example(a, None, 2.0)]
    rows = Sentences([*examples, Example("dog", a, 0.0)], tokenizer, 11)
    assert rows.cut == 3
    (cat,), (dog,) = tokenizer.encode(["cat", "dog"])
    cls, sep = tokenizer.cls, tokenizer.sep
    assert rows[0][0].tolist() == [cls, *[cat] * 4, sep, *[dog] * 4, sep]
    assert rows[0][1].tolist() == [0] * 6 + [1] * 5
    assert rows[1][0].tolist() == [cls, *[cat] * 7, sep, dog, sep]
    assert rows[2][0].tolist() == [cls, *[cat] * 9, sep]
    assert rows[3][0].tolist() == [cls, dog, sep, *[cat] * 7, sep]
    short = Sentences([Example("cat", None, 1.0)], tokenizer, 11)[0]
    ids, types, there, labels = padded([short, rows[1]], tokenizer.pad)
    assert ids.shape == types.shape == there.shape == (2, 11) and labels.tolist() == [1.0, 0.0]
    assert torch.equal(there.sum(1), torch.tensor([3, 11])) and ids[0, 3:].eq(tokenizer.pad).all()


def test_reviews_are_held_out_in_order(tmp_path):
    root = write_reviews(tmp_path)
    data = SentenceData("IMDb", root, length=11, val_fraction=0.25)
    assert data.sizes() == {"vocabulary": 261, "classes": 2}
    assert data.files()["classes.json"] == b'["neg", "pos"]\n'
    assert data.datasets["train"].cut == 10 and len(data.datasets["train"]) == 30
    found = read_splits(root, "IMDb", ("train", "val", "test"), 0.25)
    last = [f"{i}".encode() for i in (15, 16, 17, 18, 19)]  # sorted by number
    held = [one.first.encode("utf-8", "surrogateescape")[-2:] for one in found["val"][1]]
    assert held == last * 2
    assert [one.label for one in found["val"][1]] == [0] * 5 + [1] * 5
    texts = {use: {one.first for one in rows} for use, (_, rows) in found.items()}
    assert not texts["train"] & texts["val"] and texts["train"] | texts["val"] == texts["test"]
    ids, _, label = data.datasets["val"][0]
    own = [SPECIAL + byte for byte in b"awful \xff\xfe15"[:9]]
    assert ids.tolist() == [data.tokenizer.cls, *own, data.tokenizer.sep] and label == 0


def test_pixels_are_the_gray_levels_of_pillow(tmp_path):
    folder = write_folder(tmp_path / "Image" / "train", 3, 32, "cat ship")
    data = SentenceData("Image", tmp_path, length=1026, val_fraction=0.34)
    data.setup()
    ids, _, label = data.datasets["val"][1]
    with Image.open(folder / "ship" / "2.png") as image:
        assert [one - SPECIAL for one in ids.tolist()[1:-1]] == [*image.convert("L").tobytes()]
    assert label == 1


def test_batches_contain_both_sides(tmp_path):
    for seed, (name, count) in enumerate({"train": 60, "val": 12}.items()):
        write_pairs(tmp_path, name, count, seed)
    with open(tmp_path / "train.de", "a") as de, open(tmp_path / "train.en", "a") as en:
        de.write(30 * "ein " + "\n")
        en.write("one\n")
    files = tmp_path / "train", tmp_path / "val"
    made = ParallelData(*files, source="de", target="en", pieces=60, length=25)
    made.setup()
    pairs, own = made.datasets["train"], made.tokenizer
    items = [pairs[i] for i in (0, 3, 5)]
    for side, language in enumerate(("de", "en")):
        line = (tmp_path / f"train.{language}").read_text().splitlines()[0]
        assert own.decode(items[0][side]) == line
    source, there, seen, following = paired(items, own.pad)
    for row, (ids, target) in enumerate(items):
        assert torch.equal(source[row][there[row]], ids) and ids[-1] == own.sep
        known = following[row] >= 0
        assert torch.equal(following[row][known], target[1:]) and target[0] == own.cls
        assert torch.equal(seen[row][known], target[:-1]) and target[-1] == own.sep
        assert (source[row][~there[row]] == own.pad).all()
        assert pairs.sizes[(0, 3, 5)[row]] == max(len(ids), len(target) - 1)
    assert made.sizes() == {"vocabulary": len(own)} and not own.ignores_case
    train = "train 60 pairs de-en, 1 longer than 25 skipped"
    assert made.describe() == [train, "val 12 pairs de-en"]


def test_lines_end_with_a_line_feed_only(tmp_path):
    """Other line breaks occur within sentences, and would shift all lines after them."""
    (tmp_path / "x.de").write_bytes("\ufeffa\u2028b\x0bc\r\nd".encode())
    packed(tmp_path / "x.en.gz", "one\ntwo\n")
    text = read_parallel(str(tmp_path / "x"), "de", "en")
    assert text[:2] == (["a\u2028b\x0bc", "d"], ["one", "two"])
    assert text.files[1].endswith("x.en.gz")
