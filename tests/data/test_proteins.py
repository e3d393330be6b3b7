"""Proteins: FASTA, residues as tokens, and splits without common sequences."""

from __future__ import annotations

import gzip
import lzma
from pathlib import Path

import numpy as np
import pytest

from molflt.commands.cli import main
from molflt.data.text.datamodule import TextData
from molflt.data.text.sources import _records, _text_blocks
from molflt.data.text.tokenized import TokenizedText
from molflt.data.text.tokenizer import Tokenizer
from molflt.data.text.vocabulary import RESIDUES, Vocabulary

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data" / "proteins"
GOOD = ">sp|P1 first\r\nMKv\r\n\r\nLU\r\n> P2\nWX\n"


def fasta(path: Path, content: str = GOOD) -> Path:
    pack = {".gz": gzip.compress, ".xz": lzma.compress}.get(path.suffix, bytes)
    path.write_bytes(pack(content.encode()))
    return path


def drawn(count: int, seed: int = 0) -> str:
    """Records of 5 to 40 amino acids; every fifth repeats the sequence of the one before."""
    draw, lines = np.random.default_rng(seed), []
    for i in range(count):
        if i % 5 != 4:
            letters = "".join(draw.choice(list(RESIDUES[:20]), int(draw.integers(5, 40))))
        lines.append(f">r{i} of {i // 3}\n{letters}\n")
    return "".join(lines)


@pytest.mark.parametrize("name", ["a.fasta", "a.gz", "a.xz"])
def test_records_are_read_plain_and_compressed(tmp_path, name):
    path = str(fasta(tmp_path / name))
    found = list(_records(path))
    assert [(one.name, one.residues) for one in found] == [("sp|P1", "MKVLU"), ("P2", "WX")]
    assert found[0].header == "sp|P1 first"
    assert list(_text_blocks(path, "protein")) == ["MKVLU\n", "WX\n"]


def test_vocabulary_and_tokenizer_agree(tmp_path):
    blocks = list(_text_blocks(str(fasta(tmp_path / "a.fasta")), "protein"))
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


def test_blocks_of_both_data_modules(tmp_path):
    pytest.importorskip("tokenizers")
    files = [fasta(tmp_path / f"{name}.fasta") for name in ("train", "val")]
    causal = TextData(*files, level="protein", length=4)
    assert causal.sizes() == {"vocabulary": 26} and causal.datasets["val"].tokens == 9
    masked = TokenizedText(*files, kind="protein", length=6)
    assert masked.sizes() == {"vocabulary": 30, "next_sentence": False}
    tokens = np.concatenate([masked.datasets["val"][i][0] for i in range(3)])
    letters = [*("[PAD]", "", "[CLS]", "[SEP]", "[MASK]"), *RESIDUES]
    assert "".join(letters[i] for i in tokens) == (
        "[CLS]MKVL[SEP][CLS]U[SEP]WX[SEP][CLS][SEP][SEP][PAD][PAD][PAD]"
    )


def sides(folder: Path) -> dict[str, list]:
    return {path.stem: list(_records(str(path))) for path in sorted(folder.glob("*.fasta"))}


def test_equal_sequences_stay_together(tmp_path):
    src = fasta(tmp_path / "all.fa", drawn(200))
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
    assert main([*words, "--test_fraction", "0"]) == 2  # records of test.fasta would be in train


def test_clusters_stay_together(tmp_path):
    src = fasta(tmp_path / "all.fa", drawn(200))
    table = tmp_path / "clusters.tsv"
    table.write_text("".join(f"r{i}\tc{i // 7}\n" for i in range(200)))
    words = ["data", "split", str(src), str(tmp_path), f"--clusters={table}"]
    assert main([*words, "--val_fraction=0.2", "--test_fraction=0"]) == 0
    found = sides(tmp_path)
    clusters = {use: {int(r.name[1:]) // 7 for r in part} for use, part in found.items()}
    assert clusters.keys() == {"train", "val"} and not clusters["train"] & clusters["val"]
    assert 33 < len(found["val"]) <= 40 and sum(map(len, found.values())) == 200


def test_published_files_are_read_as_by_biopython():
    path = SHARED / "swissprot_mitochondria.fasta.xz"
    if not path.is_file():
        pytest.skip(f"{path.name} is not in {SHARED}")
    parser = pytest.importorskip("Bio.SeqIO.FastaIO").SimpleFastaParser
    found = list(_records(str(path)))
    assert len(found) == 1273 and sum(len(one.residues) for one in found) == 346_132
    with lzma.open(path, "rt") as file:
        expected = [(header.strip(), letters.upper()) for header, letters in parser(file)]
    assert [(one.header, one.residues) for one in found] == expected
