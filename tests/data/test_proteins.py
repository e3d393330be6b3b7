"""Proteins: FASTA, residues as tokens, and splits that nothing is on two sides of."""

from __future__ import annotations

import gzip
import lzma
from pathlib import Path

import numpy as np
import pytest
from tiny_run import error_of

from molflt.commands.cli import main
from molflt.data.text.datamodule import TextData
from molflt.data.text.proteins import RESIDUES, read_records
from molflt.data.text.sources import _line_blocks, _records, _text_blocks
from molflt.data.text.tokenized import TokenizedText
from molflt.data.text.tokenizer import Tokenizer
from molflt.data.text.vocabulary import Vocabulary

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data" / "proteins"
TWO = ">sp|P1 first\r\nMKv\r\n\r\nLU\r\n> P2\nWX*\n"
GOOD = TWO.replace("*", "")


def fasta(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def drawn(count: int, seed: int = 0) -> str:
    """Records of 5 to 40 amino acids, of which every fifth has the sequence of the one before."""
    draw, lines = np.random.default_rng(seed), []
    for i in range(count):
        if i % 5 != 4:
            letters = "".join(draw.choice(list(RESIDUES[:20]), int(draw.integers(5, 40))))
        lines.append(f">r{i} of {i // 3}\n{letters}\n")
    return "".join(lines)


@pytest.mark.parametrize("packed", ["", ".gz", ".xz"])
def test_records_are_read_plain_and_packed(tmp_path, packed):
    pack = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress}[packed]
    path = fasta(tmp_path / f"a.fasta{packed}", pack(GOOD.encode()))
    found = list(_records(str(path)))
    assert [(one.name, one.residues) for one in found] == [("sp|P1", "MKVLU"), ("P2", "WX")]
    assert found[0].header == "sp|P1 first"
    assert list(_text_blocks(str(path), "protein")) == ["MKVLU\n", "WX\n"]


def test_pieces_of_a_file_make_no_difference():
    lines = GOOD.splitlines(keepends=True)
    assert list(read_records(lines, "a")) == list(read_records([GOOD], "a"))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (TWO, "a.fasta: record 'P2': residue 3 is '*'; expected the letters ACDEF"),
        (">a\nMKJ\n", "a.fasta: record 'a': residue 3 is 'J'; expected the letters ACDEF"),
        (">a\nMÄ\n", "a.fasta: record 'a': residue 2 is 'Ä'; expected"),
        (">a\n>b\nMK\n", "a.fasta: record 'a': no residues; expected"),
        (">\n\n", "a.fasta: record 'without a name': no residues; expected"),
        ("MKV\n", "a.fasta: line 1: 'MKV' before the first record; expected FASTA"),
        ("", "a.fasta: the file is empty; expected records of FASTA"),
        ("\n \n", "a.fasta: the file is empty; expected records of FASTA"),
        (b">a\nM\xe9", "a.fasta: byte 4 is not UTF-8"),
    ],
)
def test_files_that_are_none(tmp_path, content, words):
    path = fasta(tmp_path / "a.fasta", content)
    with pytest.raises(ValueError) as caught:
        list(_records(str(path)))
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_both_kinds_of_ids_say_the_same(tmp_path):
    """Residues and an end behind each record, <eos> or [SEP]; and back."""
    blocks = list(_text_blocks(str(fasta(tmp_path / "a.fasta", GOOD)), "protein"))
    vocabulary, ids = Vocabulary.count("protein", blocks)
    assert vocabulary.decode(ids) == "MKVLU\nWX\n" and vocabulary.unk is None
    assert ids.tolist() == [
        *(RESIDUES.index(x) for x in "MKVLU"),
        25,
        *map(RESIDUES.index, "WX"),
        25,
    ]
    assert vocabulary.encode("mkv").tolist() == ids[:3].tolist()
    again = Vocabulary.from_json(vocabulary.to_json())
    assert again.tokens == [*RESIDUES, "<eos>"] and again.level == "protein"
    with pytest.raises(ValueError, match="'J' is no residue; expected the letters A"):
        vocabulary.encode("MKJ")
    with pytest.raises(ValueError, match="a vocabulary of proteins has ACD"):
        Vocabulary("protein", ["A", "<eos>"])
    pytest.importorskip("tokenizers")
    tokenizer = Tokenizer.train("protein", [], 8, True)
    own = tokenizer.encode_blocks(blocks)
    assert (own - 5).tolist() == [i if i < 25 else tokenizer.sep - 5 for i in ids]
    assert tokenizer.encode(["MK[MASK]", "vlu"]) == [[*own[:2], tokenizer.mask], own[2:5].tolist()]
    assert tokenizer.decode(own) == "MKVLUWX" and len(tokenizer) == 30
    with pytest.raises(ValueError, match="'J' is no residue; expected the letters A"):
        tokenizer.encode(["MK", "AJ"])


def test_blocks_of_both_data_modules(tmp_path):
    pytest.importorskip("tokenizers")
    for name in ("train", "val"):
        fasta(tmp_path / f"{name}.fasta", GOOD)
    files = tmp_path / "train.fasta", tmp_path / "val.fasta"
    causal = TextData(*files, level="protein", length=4)
    assert causal.sizes() == {"vocabulary": 26} and causal.datasets["val"].tokens == 9
    masked = TokenizedText(*files, kind="protein", length=6)
    assert masked.sizes() == {"vocabulary": 30, "next_sentence": False}
    tokens = np.concatenate([masked.datasets["val"][i][0] for i in range(3)])
    letters = [*("[PAD]", "", "[CLS]", "[SEP]", "[MASK]"), *RESIDUES]
    assert "".join(letters[i] for i in tokens) == (
        "[CLS]MKVL[SEP][CLS]U[SEP]WX[SEP][CLS][SEP][SEP][PAD][PAD][PAD]"
    )
    (tmp_path / "tokenizer.json").write_bytes(masked.files()["tokenizer.json"])
    given = TokenizedText(*files, kind="protein", tokenizer=tmp_path, length=6)
    given.setup()
    assert given.fingerprints() == masked.fingerprints()


def test_options_that_do_not_go_with_proteins(tmp_path):
    pytest.importorskip("tokenizers")
    path = fasta(tmp_path / "a.fasta", GOOD)
    for name, value in {"pieces": 30, "lowercase": True}.items():
        with pytest.raises(ValueError, match=f"data.{name} has no effect with data.kind=protein"):
            TokenizedText(path, path, kind="protein", **{name: value})
    words = Tokenizer.train("wordpiece", ["a b c\n"], 30, True).to_json()
    (tmp_path / "tokenizer.json").write_bytes(words)
    with pytest.raises(ValueError, match="tokenizer.json: its tokens are no residues; expected"):
        TokenizedText(path, path, kind="protein", tokenizer=tmp_path, length=6).setup()


# --- splits --------------------------------------------------------------------------------------


def sides(folder: Path) -> dict[str, list]:
    return {path.stem: list(_records(str(path))) for path in sorted(folder.glob("*.fasta"))}


def test_records_of_one_sequence_stay_together(tmp_path, capsys):
    src = fasta(tmp_path / "all.fa", drawn(200))
    words = ["data", "split", str(src), str(tmp_path / "out"), "--val_fraction", "0.1"]
    assert main([*words, "--test_fraction", "0.2"]) == 0
    found = sides(tmp_path / "out")
    assert {use: len(part) for use, part in found.items()} == {"test": 40, "train": 140, "val": 20}
    assert sorted(r for part in found.values() for r in part) == sorted(_records(str(src)))
    own = [{record.residues for record in part} for part in found.values()]
    assert sum(map(len, own)) == len(set.union(*own)) == 160
    assert "val: 20 records" in capsys.readouterr().out
    assert main([*words, "--test_fraction", "0.2", "--seed", "1"]) == 0
    assert sides(tmp_path / "out") != found
    assert main([*words, "--test_fraction", "0.2"]) == 0
    assert sides(tmp_path / "out") == found


def test_no_cluster_is_on_two_sides(tmp_path):
    src = fasta(tmp_path / "all.fa", drawn(200))
    table = tmp_path / "clusters.tsv"
    table.write_text("".join(f"r{i}\tc{i // 7}\n" for i in range(200)))
    words = ["data", "split", str(src), str(tmp_path), f"--clusters={table}"]
    assert main([*words, "--val_fraction=0.2", "--test_fraction=0"]) == 0
    found = sides(tmp_path)
    clusters = {use: {int(r.name[1:]) // 7 for r in part} for use, part in found.items()}
    assert clusters.keys() == {"train", "val"} and not clusters["train"] & clusters["val"]
    assert 33 < len(found["val"]) <= 40 and sum(map(len, found.values())) == 200


@pytest.mark.parametrize(
    ("table", "more", "words"),
    [
        ("r0\tc\n", [], "t.tsv: no cluster of record 'r1'; expected one of each record"),
        ("r0 c\n", [], "t.tsv: line 1: 'r0 c'; expected the name of a record, a tab"),
        ("r0\tc\nr0\td\n", [], "t.tsv: line 2: record 'r0' is in two clusters; expected one"),
        ("r0\tc\nr1\tc\nr2\tc\nr3\tc\n", [], "all.fa: 4 records in 1 groups leave none for val"),
        (None, ["--val_fraction=0.6", "--test_fraction=0.5"], "must be below 1 together"),
        (None, ["--val_fraction=1.5"], "val_fraction"),
        (None, ["--clusters=gone.tsv"], "gone.tsv: no such file; expected names of records"),
    ],
)
def test_splits_that_cannot_be(tmp_path, capsys, table, more, words):
    src = fasta(tmp_path / "all.fa", drawn(4))
    if table is not None:
        (tmp_path / "t.tsv").write_text(table)
        more = [f"--clusters={tmp_path / 't.tsv'}", "--val_fraction=0.3", "--test_fraction=0.3"]
    assert words in error_of(capsys, "data", "split", str(src), str(tmp_path / "out"), *more)
    assert not list(tmp_path.glob("out/*"))


def test_a_split_leaves_no_older_test_set_behind(tmp_path, capsys):
    """Half of whose sequences could be in the new training set; nothing is written then."""
    src, out = fasta(tmp_path / "all.fasta", drawn(40)), tmp_path / "out"
    assert main(["data", "split", str(src), str(out)]) == 0
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    words = ["data", "split", str(src), str(out), "--test_fraction=0", "--seed=1"]
    assert "test.fasta: expected no such file" in error_of(capsys, *words)
    assert before == {path.name: path.read_bytes() for path in out.iterdir()}
    (out / "test.fasta").unlink()
    assert main(words) == 0 and not (out / "test.fasta").exists()


def test_a_split_does_not_replace_its_source(tmp_path, capsys):
    src = fasta(tmp_path / "train.fasta", drawn(40))
    line = error_of(capsys, "data", "split", str(src), str(tmp_path))
    assert "train.fasta: would replace its own source" in line
    assert src.read_text() == drawn(40)


# --- data that nobody here wrote -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "records", "residues"),
    [("swissprot_mitochondria", 1273, 346_132), ("scop_astral_domains", 10_246, 1_795_362)],
)
def test_files_as_biopython_reads_them(name, records, residues):
    path = SHARED / f"{name}.fasta.xz"
    if not path.is_file():
        pytest.skip(f"no {path.name} in {SHARED}")
    parser = pytest.importorskip("Bio.SeqIO.FastaIO").SimpleFastaParser
    found = list(read_records(_line_blocks(str(path)), path.name))
    assert len(found) == records and sum(len(one.residues) for one in found) == residues
    with lzma.open(path, "rt") as file:
        expected = [(header.strip(), letters.upper()) for header, letters in parser(file)]
    assert [(one.header, one.residues) for one in found] == expected
