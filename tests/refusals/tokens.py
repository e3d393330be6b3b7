"""Refused batches, texts, tokenizers and images."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from token_files import idx, pixels, write_folder, write_idx

from molflt.data.batches import SizeBucketedBatchSampler
from molflt.data.images.augment import augment
from molflt.data.images.datamodule import ImageData
from molflt.data.images.files import open_images
from molflt.data.images.unlabeled import read_alike
from molflt.data.problems import ProblemData
from molflt.data.text.datamodule import TextData
from molflt.data.text.glue import read_examples
from molflt.data.text.parallel import ParallelData, read_parallel
from molflt.data.text.sentences import SentenceData
from molflt.data.text.sources import _records
from molflt.data.text.tokenized import TokenizedText
from molflt.data.text.tokenizer import Tokenizer
from molflt.data.text.vocabulary import Vocabulary
from refusals import Refusal, Refused, command

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
    """Returns a call that writes files by name, and then reads the folder."""

    def call(folder: Path) -> None:
        for name, content in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            raw = content.encode() if isinstance(content, str) else content
            (folder / name).write_bytes(raw)
        read(folder)

    return call


def vocabulary(**fields: Any) -> Call:
    """Reads a vocabulary.json with these changed fields."""
    return lambda _: Vocabulary.from_json(json.dumps({**GOOD, **fields}).encode(), "v.json")


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


def sentences(task: str = "SST-2", **options: Any) -> Call:
    return lambda folder: SentenceData(task, folder, **options).setup()


def reviews(changes: dict[str, str | bytes] | None = None, **options: Any) -> Call:
    """Sets up four reviews, and other files."""
    files = {f"{name}/{i}_2.txt": "a" for name in ("neg", "pos") for i in range(2)}
    named = {f"aclImdb/train/{name}": text for name, text in {**files, **(changes or {})}.items()}
    return given(sentences("IMDb", **options), named)


def parallel(content: bytes) -> Call:
    """Reads three German lines and this English file."""
    files = {"x.de": "eins\nzwei\ndrei\n", "x.en": content}
    return given(lambda folder: read_parallel(str(folder / "x"), "de", "en"), files)


def pairs(**options: Any) -> Call:
    def read(folder: Path) -> None:
        made = Tokenizer.train("bpe", ["a dog"] * 9, 40, False)
        (folder / "t.json").write_bytes(made.to_json())
        languages = {"source": "de", "target": "en", "tokenizer": folder / "t.json"}
        ParallelData(folder / "x", folder / "x", **{**languages, **options}).setup()

    return given(read, {"x.de": "Жук жужжит\n" * 9, "x.en": "a dog\n" * 9})


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
    """Opens a pair of idx files."""
    return given(
        lambda folder: open_images(folder / "a-images-idx3", classes=["a", "b", "c"]),
        {"a-images-idx3": images, **({"a-labels-idx1": labels} if labels else {})},
    )


def pictures(read: Call | None = None, change: str = "", content: bytes | None = None) -> Call:
    """Reads images of cats and dogs; `change` is a folder to make, or a file to overwrite."""

    def call(folder: Path) -> None:
        write_folder(folder, 1, classes="cat dog")
        if change and content is None:
            (folder / change).mkdir()
        elif content is not None:
            (folder / change).write_bytes(content)
        if read is None:
            list(zip(range(2), open_images(folder), strict=False))
        else:
            read(folder)

    return call


def image_data(*sources: str, **options: Any) -> Call:
    """Sets up `ImageData` with an idx file (a), one of 9 pixels (b), or a folder (set)."""

    def call(folder: Path) -> None:
        zeros = np.zeros(12)
        paths = {
            "a": write_idx(folder, "a", labels=zeros),
            "b": write_idx(folder, "b", pixels(side=9), zeros),
            "set": write_folder(folder / "set", 1, classes="cat"),
        }
        ImageData(*(paths[name] for name in sources), **options).setup()

    return call


def validation(world: int) -> Call:
    def call(_: Path) -> None:
        data = ProblemData(batch_size=4, val_problems=8)
        data.setup()
        data.val_dataloader(0, world)

    return call


def alike(side: int, channels: int, fit: bool = False) -> Call:
    return pictures(lambda folder: list(read_alike(folder / "dog", side, channels, fit)))


ROWS = [
    # batches
    Refusal(lambda _: SizeBucketedBatchSampler([10, 90], 4, 80), "max_atoms", "80", "90"),
    Refusal(lambda _: SizeBucketedBatchSampler([10], 0), "batch_size", "at least 1", "0"),
    Refusal(lambda _: SizeBucketedBatchSampler([], 4), "natoms", "at least 1", "(0,)"),
    Refusal(lambda _: SizeBucketedBatchSampler([10], 4, rank=2, world=2), "rank", "0..1", "2"),
    Refusal(lambda _: ProblemData(problems=0), "data.problems", "2,147,483,648", "0"),
    Refusal(validation(3), "--data.batch_size", "3 processes", "2 batches"),
    # vocabularies
    Refusal(lambda _: Vocabulary.from_json(b"{", "v.json"), "v.json", "JSON"),
    Refusal(vocabulary(format="other"), "v.json", "molflt-vocabulary", "other"),
    Refusal(vocabulary(level="line"), "level", "word, char", "'line'"),
    Refusal(vocabulary(tokens=["<eos>", "<unk>", "a", "a"]), "v.json", "once"),
    Refusal(vocabulary(level="byte"), "v.json", "all tokens of level byte"),
    Refusal(lambda _: Vocabulary.count("word", ["a"])[0].decode([4]), "token id", "0 to 2", "4"),
    # texts
    Refusal(text(min_count=2, vocabulary="v.json"), "data.min_count", "data.vocabulary"),
    Refusal(text(min_count=2, level="byte"), "data.min_count", "data.level=byte"),
    Refusal(text(batch_size=0), "data.batch_size", "at least 1", "0"),
    Refusal(text(workers=-1), "data.workers", "at least 0", "-1"),
    Refusal(text(b""), "train.txt", "at least 8 tokens", "0"),
    Refusal(text(level="char", vocabulary="v.json"), "v.json", "'char'", "'word'"),
    # tokenizers
    Refusal(lambda _: Tokenizer.train("words", [], 9, True), "data.kind", "wordpiece", "words"),
    Refusal(lambda _: Tokenizer.from_json(b"{}", "x.json"), "x.json", "tokenizer.json"),
    Refusal(subwords(tokenizer="t.json", pieces=60), "data.pieces", "data.tokenizer"),
    Refusal(subwords(kind="protein", lowercase=True), "data.lowercase", "data.kind=protein"),
    Refusal(subwords(kind="protein", tokenizer="t.json"), "t.json", "data.kind=protein"),
    Refusal(subwords(length=4, next_sentence=True), "data.length", "at least 5", "4"),
    Refusal(subwords(next_sentence=True, batch_size=1), "data.batch_size", "at least 2", "1"),
    Refusal(subwords(length=4000), "train.txt", "at least 3998 tokens"),
    Refusal(subwords(tokenizer="away.json"), "away.json", "a tokenizer", error=FileNotFoundError),
    Refusal(subwords(b"good\nb\xe9d\n"), "train.txt", "UTF-8", "byte 6"),
    Refusal(subwords(" \n"), "train.txt", "text", "no words"),
    Refusal(subwords("日本語\n" * 90, tokenizer="t.json"), "train.txt", "knows", "100%"),
    Refusal(subwords("1 [AVG 2 ]\n", kind="listops"), "train.txt", "[MIN", "'[AVG'"),
    # labeled sentences
    Refusal(sentences("Words"), "data.task", "SST-2", "'Words'"),
    Refusal(sentences(length=4), "data.length", "at least 5", "4"),
    Refusal(sentences(), "data.root", "SST-2/train.tsv", error=FileNotFoundError),
    Refusal(sentences(val_fraction=0.2), "data.val_fraction", "SST-2"),
    Refusal(rows("SST-2", ""), "train.tsv", "rows", "empty"),
    Refusal(rows("SST-2", "sentence\tlabel\n"), "train.tsv", "rows", "no row"),
    Refusal(rows("SST-2", "text\tlabel\na\t1\n"), "row 1", "sentence", "text"),
    Refusal(rows("SST-2", "sentence\tlabel\na\t1\n\nb\n"), "row 4", "at least 2", "1"),
    Refusal(rows("SST-2", "sentence\tlabel\na\t2\n"), "row 2", "0, 1", "'2'"),
    Refusal(rows("STS-B", "sentence1\tsentence2\tscore\na\tb\tnan\n"), "row 2", "0 to 5", "'nan'"),
    Refusal(sentences("IMDb"), "data.root", "an unpacked folder", error=FileNotFoundError),
    Refusal(reviews({"mixed/1.txt": "a"}), "train", "neg and pos", "mixed"),
    Refusal(reviews(val_fraction=0.2), "data.val_fraction", "4 texts", "0.2"),
    Refusal(reviews({"neg/1_2.txt": b"\xff"}, kind="wordpiece", val_fraction=0.5), "UTF-8"),
    # translations
    Refusal(parallel(b"one\ntwo\n"), "x.de", "equally many", "3 and 2"),
    Refusal(parallel(b"one\n\n \n"), "x.en", "sentence", "empty line 2"),
    Refusal(parallel(b""), "x.en", "sentence", "empty"),
    Refusal(
        lambda folder: read_parallel(str(folder / "x"), "de", "en"),
        "data.target",
        "x.de",
        error=FileNotFoundError,
    ),
    Refusal(pairs(max_tokens=20), "data.max_tokens", "data.length=256", "20"),
    Refusal(pairs(), "x.de", "knows", "unknown tokens"),
    # proteins
    Refusal(fasta(">sp|P1 first\nWX*\n"), "'sp|P1'", "ACDEF", "'*' at residue 3"),
    Refusal(fasta(">a\n>b\nMK\n"), "'a'", "ACDEF", "no residues"),
    Refusal(fasta("MKV\n"), "line 1", "FASTA", "'MKV'"),
    Refusal(fasta("\n \n"), "a.fasta", "FASTA", "empty"),
    Refusal(lambda _: Vocabulary.count("protein", ["MK"])[0].encode("MKJ"), "'J'", "ACDEF"),
    Refusal(split("", "r0\tc\n"), "t.tsv", "each record", "'r1'", Refused),
    Refusal(split("", "r0\tc\nr0\td\n"), "line 2", "one cluster", r"'r0\td'", Refused),
    Refusal(split("", "r0\tc\nr1\tc\nr2\tc\nr3\tc\n"), "all.fa", "test", "4 in 1 groups", Refused),
    Refusal(
        split("--val_fraction=0.6 --test_fraction=0.5"), "val_fraction", "below 1", "0.6", Refused
    ),
    # idx files
    Refusal(idx_pair(SQUARES[:-1]), "idx3", "768 bytes", "767"),
    Refusal(idx_pair(SQUARES[:10]), "idx3", "header", "truncated"),
    Refusal(idx_pair(b"\x89PNG\r\n"), "idx3", "00 00 08", "89 50 4e 47"),
    Refusal(idx_pair(idx(np.arange(12))), "idx3", "images (3 axes)", "labels (1 axis)"),
    Refusal(idx_pair(gzip.compress(SQUARES)[:-20]), "idx3", "whole gzip", "truncated"),
    Refusal(idx_pair(labels=idx(np.arange(11))), "idx1", "12 images", "11 labels"),
    Refusal(idx_pair(labels=idx(np.full(12, 7))), "idx1", "below 3", "7"),
    Refusal(idx_pair(labels=b""), "data.train_labels", "labels-idx1", error=FileNotFoundError),
    # folders of images
    Refusal(pictures(lambda f: open_images(f / "cat")), "cat", "folder of images", "none"),
    Refusal(pictures(lambda f: open_images(f, classes=["cat"])), "", "1 trained", "dog"),
    Refusal(pictures(change="fox"), "fox", ".png", "none"),
    Refusal(pictures(None, "dog/0.png", b"%!PS-Adobe-3.0 EPSF-3.0\n"), "dog/0.png", "image"),
    Refusal(alike(8, 1), "0.png", "1 channels", "3"),
    Refusal(alike(9, 3), "--fit", "9 x 9", "8 x 8"),
    Refusal(alike(9, 3, True), "0.png", "9 pixels", "8"),
    Refusal(
        lambda f: open_images(f / "gone"), "gone", "folder of classes", error=FileNotFoundError
    ),
    # image data and augmentation
    Refusal(image_data("a"), "data.val_fraction", "either", "neither"),
    Refusal(image_data("a", val_fraction=0.1, val_labels="x"), "data.val_labels", "val_fraction"),
    Refusal(image_data("a", val_fraction=0.01), "data.val_fraction", "12 images", "0.01"),
    Refusal(image_data("a", "a", image_size=9, resize=8), "data.resize", "image_size=9", "8"),
    Refusal(image_data("a", "b"), "data.image_size", "8 pixels", "9"),
    Refusal(image_data("a", "set", class_names=["cat"]), "set", "1 channels", "3"),
    Refusal(image_data("set", "set", val_labels="x"), "data.val_labels", "no effect", "set"),
    Refusal(
        lambda _: augment(torch.zeros(1, 1, 10, 10), "flip", 12), "images", "12 x 12", "10 x 10"
    ),
    Refusal(
        lambda _: augment(torch.zeros(1, 1, 10, 10), "turn"), "augment", "none, flip", "'turn'"
    ),
]
