import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from token_files import idx, pixels, write_folder, write_reviews

from molflt.data.images.datamodule import ImageData
from molflt.data.images.files import open_images, read_alike
from molflt.data.text.datamodule import TextData, TokenizedText
from molflt.data.text.parallel import ParallelData, read_parallel
from molflt.data.text.sentences import SentenceData, _read_texts, read_examples
from molflt.data.text.sources import _records
from molflt.data.text.tokenizer import Tokenizer
from molflt.data.text.vocabulary import Vocabulary
from refusals import Refusal, Refused, command, refused

Call = Callable[[Path], Any]
LINES = "the cat walks, quickly!\na dog walks\n" * 9
GOOD = {
    "format": "molflt-vocabulary",
    "version": 1,
    "level": "word",
    "tokens": ["<eos>", "<unk>", "a"],
}
PROTEINS = ">r0\nMK\n>r1\nMKV\n>r2\nWX\n>r3\nWXU\n"


def given(read: Call, files: dict[str, str | bytes]) -> Call:
    """Returns a function that writes files by name, and then reads the folder."""

    def call(folder: Path) -> None:
        for name, content in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            raw = content.encode() if isinstance(content, str) else content
            (folder / name).write_bytes(raw)
        read(folder)

    return call


def text(train: str | bytes = LINES, make: Any = TextData, **options: Any) -> Call:
    """Sets up data with train.txt, val.txt, v.json (a vocabulary) and t.json (a tokenizer)."""

    def read(folder: Path) -> None:
        if "t.json" in options.values():
            made = Tokenizer.train("wordpiece", [LINES], 60, True)
            (folder / "t.json").write_bytes(made.to_json())
        paths = {
            name: folder / value if str(value).endswith(".json") else value
            for name, value in options.items()
        }
        make(folder / "train.txt", folder / "val.txt", **{"length": 8, **paths}).setup()

    return given(read, {"train.txt": train, "val.txt": LINES, "v.json": json.dumps(GOOD)})


def subwords(train: str | bytes = LINES, **options: Any) -> Call:
    return text(train, TokenizedText, **options)


def rows(task: str, content: str) -> Call:
    return given(lambda f: read_examples(f / "train.tsv", task), {"train.tsv": content})


def parallel(content: bytes) -> Call:
    files = {"x.de": "eins\nzwei\ndrei\n", "x.en": content}
    return given(lambda folder: read_parallel(str(folder / "x"), "de", "en"), files)


def fasta(content: str | bytes) -> Call:
    return given(lambda folder: list(_records(str(folder / "a.fasta"))), {"a.fasta": content})


def split(words: str, table: str | None = None) -> Call:
    def prepare(folder: Path) -> None:
        (folder / "all.fa").write_text(PROTEINS)
        if table is not None:
            (folder / "t.tsv").write_text(table)

    table_words = "" if table is None else " --clusters={folder}/t.tsv"
    return command(f"data split {{folder}}/all.fa {{folder}}/out{table_words} {words}", prepare)


SQUARES = idx(pixels())


def idx_pair(images: bytes = SQUARES, labels: bytes = idx(np.arange(12) % 3)) -> Call:
    return given(
        lambda folder: open_images(folder / "a-images-idx3", classes=["a", "b", "c"]),
        {"a-images-idx3": images, **({"a-labels-idx1": labels} if labels else {})},
    )


def pictures(read: Call, content: bytes | None = None) -> Call:
    """Reads images of cats and dogs; `content` replaces the image of a dog."""

    def call(folder: Path) -> None:
        write_folder(folder, 1, classes="cat dog")
        if content is not None:
            (folder / "dog/0.png").write_bytes(content)
        read(folder)

    return call


ROWS = [
    # vocabularies
    refused(lambda: Vocabulary.from_json(b"{", "v.json"), "v.json", "JSON"),
    # texts
    Refusal(text(min_count=2, vocabulary="v.json"), "data.min_count", "data.vocabulary"),
    Refusal(text(min_count=2, level="byte"), "data.min_count", "data.level=byte"),
    Refusal(text(b""), "train.txt", "at least 8 tokens", "0"),
    Refusal(text(level="char", vocabulary="v.json"), "v.json", "'char'", "'word'"),
    # tokenizers
    Refusal(subwords(b"good\nb\xe9d\n"), "train.txt", "UTF-8", "byte 6"),
    Refusal(subwords("日本語\n" * 90, tokenizer="t.json"), "train.txt", "knows", "100%"),
    Refusal(subwords(f"{'x' * 101}\n" * 9), "train.txt", "100%", "data.kind"),
    Refusal(subwords("1 [AVG 2 ]\n", kind="listops"), "train.txt", "[MIN", "'[AVG'"),
    # labeled sentences
    Refusal(
        lambda f: SentenceData("IMDb", write_reviews(f), kind="wordpiece").setup(),
        "aclImdb/train",
        "UTF-8",
        "data.kind byte",
    ),
    Refusal(rows("SST-2", "text\tlabel\na\t1\n"), "row 1", "sentence", "text"),
    Refusal(rows("SST-2", "sentence\tlabel\na\t1\n\nb\n"), "row 4", "at least 2", "1"),
    Refusal(rows("SST-2", "sentence\tlabel\na\t2\n"), "row 2", "0, 1", "'2'"),
    Refusal(rows("STS-B", "sentence1\tsentence2\tscore\na\tb\tnan\n"), "row 2", "0 to 5", "'nan'"),
    # translations
    refused(lambda: ParallelData("a", "b", "de", "de"), "data.target", "differ", "'de'"),
    Refusal(parallel(b"one\ntwo\n"), "x.de", "same number", "3 and 2"),
    Refusal(parallel(b"one\n\n \n"), "x.en", "sentence", "empty line 2"),
    # proteins
    Refusal(fasta(">sp|P1 first\nWX*\n"), "'sp|P1'", "ACDEF", "'*' at residue 3"),
    Refusal(fasta("MKV\n"), "line 1", "FASTA", "'MKV'"),
    Refusal(split("", "r0\tc\n"), "t.tsv", "each record", "'r1'", Refused),
    Refusal(split("", "r0\tr0\nr0\tr1\n"), "t.tsv: line 2", "swap", "MMseqs2", Refused),
    Refusal(
        split("--val_fraction=0.01 --test_fraction=0.01"),
        "fractions",
        "records for",
        "0.01",
        Refused,
    ),
    Refusal(
        split("--val_fraction=0.6 --test_fraction=0.5"), "val_fraction", "below 1", "0.6", Refused
    ),
    # idx files
    Refusal(idx_pair(SQUARES[:-1]), "idx3", "768 bytes", "767"),
    Refusal(idx_pair(idx(np.arange(12))), "idx3", "00 00 08 03", "00 00 08 01"),
    Refusal(idx_pair(labels=idx(np.arange(11))), "idx1", "12 images", "11 labels"),
    Refusal(idx_pair(labels=idx(np.full(12, 7))), "idx1", "below 3", "7"),
    # folders of images
    Refusal(pictures(lambda f: open_images(f, f / "labels")), "labels", "no effect", "classes"),
    refused(
        lambda: ImageData("a", val_labels="b", val_fraction=0.1), "data.val_labels", "val_fraction"
    ),
    Refusal(
        command("data download game-net {folder} --splits val_id"),
        "--splits",
        "oc20-is2re",
        "game-net",
        Refused,
    ),
    Refusal(
        given(lambda f: list(_read_texts(f, ["neg"])), {"neg/a.csv": ""}), "neg", ".txt", "none"
    ),
    Refusal(
        pictures(lambda f: open_images(f)[1], b"%!PS-Adobe-3.0 EPSF-3.0\n"), "dog/0.png", "image"
    ),
    Refusal(pictures(lambda f: list(read_alike(f / "dog", 9, 3))), "--fit", "9 x 9", "8 x 8"),
]
