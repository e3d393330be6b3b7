import itertools
import locale
import lzma
import random
import re
import sys
from collections import Counter
from pathlib import Path
from statistics import median

import listops
import numpy as np
import pytest
from listops import expressions
from scipy.stats import ks_2samp
from shared_files import shared
from token_files import packed

from molflt.commands.cli import main
from molflt.data.text.datamodule import TokenizedText
from molflt.data.text.sentences import SentenceData, find_split, read_examples
from molflt.data.text.sources import _records, _text_blocks
from molflt.data.text.tokenizer import Tokenizer
from molflt.data.text.vocabulary import LISTOPS as SYMBOLS
from molflt.data.text.vocabulary import RESIDUES, Vocabulary

GOOD = ">sp|P1 first\r\nMKv\r\n\r\nLU\r\n> P2\nWX\n"


def drawn(count: int, seed: int = 0) -> str:
    """Returns records of 5 to 40 amino acids; every fifth record repeats the previous sequence."""
    draw, lines = np.random.default_rng(seed), []
    for i in range(count):
        if i % 5 != 4:
            letters = "".join(draw.choice(list(RESIDUES[:20]), int(draw.integers(5, 40))))
        lines.append(f">r{i} of {i // 3}\n{letters}\n")
    return "".join(lines)


def evaluate(expression: str) -> int:
    """Returns the value of an expression, from the innermost lists outward."""
    rules = {"MIN": min, "MAX": max, "SM": lambda x: sum(x) % 10, "MED": lambda x: int(median(x))}

    def value(found: re.Match) -> str:
        return str(rules[found[1]](list(map(int, found[2].split()))))

    text, more = re.sub(r"[() ]+", " ", expression), 1
    while more:
        text, more = re.subn(r"\[([A-Z]+) ([\d ]+) \]", value, text)
    return int(text)


@pytest.mark.parametrize("name", ["a.fasta", "a.xz"])
def test_records_are_read_plain_and_compressed(tmp_path, name):
    path = str(packed(tmp_path / name, GOOD))
    found = list(_records(path))
    assert [(one.name, one.residues) for one in found] == [("sp|P1", "MKVLU"), ("P2", "WX")]
    assert found[0].header == "sp|P1 first"
    assert list(_text_blocks(path, "protein")) == ["MKVLU\n", "WX\n"]
    damaged = packed(tmp_path / "a.bz2", b"BZh9" + b"x" * 99)
    with pytest.raises(ValueError, match=r"a\.bz2.*damaged"):
        list(_text_blocks(str(damaged), "text"))


def test_vocabulary_and_tokenizer_agree(tmp_path):
    blocks = list(_text_blocks(str(packed(tmp_path / "a.fasta", GOOD)), "protein"))
    vocabulary, ids = Vocabulary.count("protein", blocks)
    assert vocabulary.decode(ids) == "MKVLU\nWX\n" and vocabulary.unk is None
    assert ids.tolist() == [RESIDUES.index(x) if x in RESIDUES else 25 for x in "MKVLU.WX."]
    assert vocabulary.encode("mkv").tolist() == ids[:3].tolist()
    pytest.importorskip("tokenizers")
    tokenizer = Tokenizer.train("protein", [], 8, True)
    own = tokenizer.encode_blocks(blocks)
    assert (own - 5).tolist() == [i if i < 25 else tokenizer.sep - 5 for i in ids]
    assert tokenizer.encode(["MK[MASK]", "vlu"]) == [[*own[:2], tokenizer.mask], own[2:5].tolist()]
    assert tokenizer.decode(own) == "MKVLUWX" and len(tokenizer) == 30
    with pytest.raises(ValueError, match="'J'"):
        tokenizer.encode(["MK", "AJ"])


def test_the_last_block_of_a_validation_is_padded(tmp_path):
    pytest.importorskip("tokenizers")
    files = [packed(tmp_path / f"{name}.fasta", GOOD) for name in ("train", "val")]
    masked = TokenizedText(*files, kind="protein", length=6)
    assert masked.sizes() == {"vocabulary": 30, "next_sentence": False}
    tokens = np.concatenate([masked.datasets["val"][i][0] for i in range(3)])
    letters = [*("[PAD]", "", "[CLS]", "[SEP]", "[MASK]"), *RESIDUES]
    assert "".join(letters[i] for i in tokens) == (
        "[CLS]MKVL[SEP][CLS]U[SEP]WX[SEP][CLS][SEP][SEP][PAD][PAD][PAD]"
    )


def sides(folder: Path) -> dict[str, list]:
    return {path.stem: list(_records(str(path))) for path in sorted(folder.glob("*.fasta"))}


def test_equal_sequences_stay_together(tmp_path, capsys):
    src = packed(tmp_path / "all.fa", drawn(200))
    words = ["data", "split", str(src), str(tmp_path / "out"), "--val_fraction", "0.1"]
    assert main([*words, "--test_fraction", "0.2"]) == 0
    found = sides(tmp_path / "out")
    assert {use: len(part) for use, part in found.items()} == {"test": 40, "train": 140, "val": 20}
    assert sorted(r for part in found.values() for r in part) == sorted(_records(str(src)))
    own = [{record.residues for record in part} for part in found.values()]
    assert sum(map(len, own)) == len(set.union(*own)) == 160
    assert main([*words, "--test_fraction", "0.2", "--seed", "1"]) == 0
    assert sides(tmp_path / "out") != found
    assert main([*words, "--test_fraction", "0.2"]) == 0
    assert sides(tmp_path / "out") == found
    table = tmp_path / "clusters.tsv"
    table.write_text("".join(f"r{i}\tc{i // 7}\n" for i in range(200)))
    assert main([*words, f"--clusters={table}", "--test_fraction=0.2"]) == 0
    found = sides(tmp_path / "out")
    clusters = [{int(r.name[1:]) // 7 for r in part} for part in found.values()]
    assert sum(map(len, clusters)) == len(set.union(*clusters)) == 29
    assert sum(map(len, found.values())) == 200
    out, before = tmp_path / "out", (tmp_path / "out" / "train.fasta").read_bytes()
    again = ["data", "split", str(out / "val.fasta"), str(out), "--val_fraction=0.3"]
    assert main([*again, "--test_fraction=0.3"]) == 2 and "source file" in capsys.readouterr().err
    assert (out / "train.fasta").read_bytes() == before


@pytest.mark.skipif(sys.flags.utf8_mode, reason="Python ignores the locale in UTF-8 mode")
def test_names_are_written_in_utf_8_in_every_locale(tmp_path):
    src = packed(tmp_path / "all.fa", "".join(f">é{i}\nMK{x}\n" for i, x in enumerate(RESIDUES)))
    before = locale.setlocale(locale.LC_CTYPE)
    locale.setlocale(locale.LC_CTYPE, "C")  # files are in ASCII by default
    try:
        assert main(["data", "split", str(src), str(tmp_path / "out")]) == 0
    finally:
        locale.setlocale(locale.LC_CTYPE, before)
    assert {record.name[0] for part in sides(tmp_path / "out").values() for record in part} == {"é"}


def test_published_files_are_read_as_by_biopython():
    path = shared("proteins", "swissprot_mitochondria.fasta.xz")
    parser = pytest.importorskip("Bio.SeqIO.FastaIO").SimpleFastaParser
    found = list(_records(str(path)))
    assert len(found) == 1273 and sum(len(one.residues) for one in found) == 346_132
    with lzma.open(path, "rt") as file:
        expected = [(header.strip(), letters.upper()) for header, letters in parser(file)]
    assert [(one.header, one.residues) for one in found] == expected


# --- ListOps ---------------------------------------------------------------------------------

# 3 (the mean of 3 and 4, rounded down) + 7 + 5
TWO = "[SM [MED 3 1 8 4 ] [MIN 7 9 ] [MAX 2 5 4 ] ]"


def test_random_expressions_are_distributed_as_published():
    found = read_examples(shared("listops", "test_d20s.tsv.xz"), "ListOps")
    assert [evaluate(one.first) for one in found] == [one.label for one in found]
    published = [([x for x in one.first.split() if x not in "()"], one.label) for one in found]
    assert len(published) == 10_000
    assert {one for text, _ in published for one in text} == set(SYMBOLS)
    drawn = expressions(random.Random(1), depth=20, arguments=5, min_length=6, max_length=2000)
    mine = [(text.split(), value) for text, value in itertools.islice(drawn, 4000)]
    theirs = [pair for pair in published if len(pair[0]) > 6]  # see configs/lra/README.md
    sizes = [[len(text) for text, _ in some] for some in (mine, theirs)]
    assert ks_2samp(*sizes).pvalue > 0.01
    for what in (lambda text, value: [value], lambda text, value: text):
        counts = [Counter(x for pair in some for x in what(*pair)) for some in (mine, theirs)]
        keys = sorted(set(counts[0]) | set(counts[1]))
        shares = [np.array([count[k] for k in keys]) / count.total() for count in counts]
        assert np.abs(shares[0] - shares[1]).max() < 0.012  # three standard errors of the values


def test_files_become_tokens_and_labels(tmp_path):
    assert evaluate(TWO) == 5 and evaluate("( ( ( [MAX 2 ) 9 ) ] )") == 9
    assert evaluate("[MED 1 9 8 ]") == 8 and evaluate("[MED 1 2 ]") == 1
    words = ["--train=30", "--val=5", "--test=4", "--depth=4", "--arguments=3", "--min_length=4"]
    folder = tmp_path / "ListOps"
    words.append("--max_length=30")
    with pytest.raises(SystemExit):
        listops.main([str(folder), *words[:2], "--test=0", *words[3:]])
    assert listops.main([str(folder), *words]) == 0
    rows = {use: read_examples(find_split(tmp_path, "ListOps", use), "ListOps") for use in FILES}
    assert {use: len(found) for use, found in rows.items()} == FILES
    texts = [one.first for found in rows.values() for one in found]
    assert len(set(texts)) == 39 and all(4 < len(text.split()) < 30 for text in texts)
    assert all(evaluate(one.first) == one.label for found in rows.values() for one in found)
    pytest.importorskip("tokenizers")
    data = SentenceData("ListOps", tmp_path, length=20, batch_size=2)
    assert data.sizes() == {"vocabulary": 20, "classes": 10}
    ids, types, label = data.datasets["val"][0]
    own = [SYMBOLS.index(one) + 5 for one in rows["val"][0].first.split()]
    assert ids.tolist() == [data.tokenizer.cls, *own[:18], data.tokenizer.sep]
    assert not types.any() and label == rows["val"][0].label
    path = tmp_path / "a.txt"
    path.write_text(f"{TWO}\n\n( [MAX 1 2 ] )\n")
    lines, encode = TokenizedText(path, path, kind="listops", length=12), data.tokenizer.encode
    lines.setup()
    assert encode(["3 [MASK]"]) == [[5 + SYMBOLS.index("3"), data.tokenizer.mask]]
    expected = [*encode([TWO])[0], data.tokenizer.sep, *encode(["[MAX 1 2 ]"])[0]]
    assert lines.datasets["val"].ids.tolist() == [*expected, data.tokenizer.sep]
    cut = sum(len(one.first.split()) > 18 for one in rows["train"])
    assert cut and data.datasets["train"].cut == cut


FILES = {"train": 30, "val": 5, "test": 4}
