"""Refused batches, texts, tokenizers and images."""

import gzip
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from molflt.data.batches import SizeBucketedBatchSampler
from molflt.data.images.augment import augment
from molflt.data.images.datamodule import ImageData
from molflt.data.images.files import open_images
from molflt.data.images.unlabeled import read_alike
from molflt.data.problems import ProblemData
from molflt.data.text.datamodule import TextData
from molflt.data.text.glue import find_split, read_examples
from molflt.data.text.parallel import Pairs, ParallelData, ParallelText, read_parallel
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


def vocabulary(**fields: Any) -> Call:
    """Reads a vocabulary.json with these changed fields."""
    return lambda _: Vocabulary.from_json(json.dumps({**GOOD, **fields}).encode(), "v.json")


def text(train: str | bytes = LINES, make: Any = TextData, **options: Any) -> Call:
    """Sets up data with train.txt, val.txt, v.json (a vocabulary) and t.json (a tokenizer)."""

    def call(folder: Path) -> None:
        for name, content in (("train", train), ("val", LINES)):
            raw = content.encode() if isinstance(content, str) else content
            (folder / f"{name}.txt").write_bytes(raw)
        (folder / "v.json").write_text(json.dumps(GOOD))
        if "t.json" in options.values():
            made = Tokenizer.train("wordpiece", [LINES], 60, True)
            (folder / "t.json").write_bytes(made.to_json())
        paths = {
            name: folder / value if str(value).endswith(".json") else value
            for name, value in options.items()
        }
        make(folder / "train.txt", folder / "val.txt", **{"length": 8, **paths}).setup()

    return call


def subwords(train: str | bytes = LINES, **options: Any) -> Call:
    return text(train, TokenizedText, **options)


def rows(task: str, content: str) -> Call:
    """Reads a table of a task."""

    def call(folder: Path) -> None:
        (folder / "train.tsv").write_text(content)
        read_examples(folder / "train.tsv", task)

    return call


def sentences(task: str = "SST-2", **options: Any) -> Call:
    return lambda folder: SentenceData(task, folder, **options).setup()


def reviews(change: str = "", content: bytes | None = None, **options: Any) -> Call:
    """Sets up four reviews; `change` is a folder to make, or a file to overwrite."""

    def call(folder: Path) -> None:
        root = folder / "aclImdb" / "train"
        for name in ("neg", "pos"):
            (root / name).mkdir(parents=True)
            for i in range(2):
                (root / name / f"{i}_2.txt").write_text("a")
        if change and content is None:
            (root / change).mkdir()
        elif content is not None:
            (root / change).write_bytes(content)
        SentenceData("IMDb", folder, **options).setup()

    return call


def parallel(content: bytes | None) -> Call:
    """Reads three German lines and this English file."""

    def call(folder: Path) -> None:
        (folder / "x.de").write_text("eins\nzwei\ndrei\n")
        if content is not None:
            (folder / "x.en").write_bytes(content)
        read_parallel(str(folder / "x"), "de", "en")

    return call


def pairs(**options: Any) -> Call:
    def call(folder: Path) -> None:
        for language, content in (("de", "Жук жужжит\n" * 9), ("en", "a dog\n" * 9)):
            (folder / f"x.{language}").write_text(content)
        made = Tokenizer.train("bpe", ["a dog"] * 9, 40, False)
        (folder / "t.json").write_bytes(made.to_json())
        if "tokenizer" in options:
            options["tokenizer"] = folder / options["tokenizer"]
        given = {"source": "de", "target": "en", **options}
        ParallelData(folder / "x", folder / "x", **given).setup()

    return call


def fasta(content: str | bytes) -> Call:
    def call(folder: Path) -> None:
        raw = content.encode() if isinstance(content, str) else content
        (folder / "a.fasta").write_bytes(raw)
        list(_records(str(folder / "a.fasta")))

    return call


def split(words: str, table: str | None = None) -> Call:
    def prepare(folder: Path) -> None:
        (folder / "all.fa").write_text(PROTEINS)
        if table is not None:
            (folder / "t.tsv").write_text(table)

    table_words = "" if table is None else " --clusters={folder}/t.tsv"
    return command(f"data split {{folder}}/all.fa {{folder}}/out{table_words} {words}", prepare)


def idx(array: np.ndarray, kind: int = 8) -> bytes:
    head = struct.pack(f">BBBB{array.ndim}I", 0, 0, kind, array.ndim, *array.shape)
    return head + array.astype(np.uint8).tobytes()


SQUARES = idx(np.arange(12 * 64).reshape(12, 8, 8) % 251)


def idx_pair(
    images: bytes = SQUARES, labels: bytes = idx(np.arange(12) % 3), **options: Any
) -> Call:
    """Opens a pair of idx files."""

    def call(folder: Path) -> None:
        (folder / "a-images-idx3").write_bytes(images)
        if labels:
            (folder / "a-labels-idx1").write_bytes(labels)
        open_images(folder / "a-images-idx3", classes=["a", "b", "c"], **options)

    return call


def pictures(
    change: str = "", content: bytes | None = None, read: Callable[[Path], Any] | None = None
) -> Call:
    """Reads images of cats and dogs; `change` is a folder to make, or a file to overwrite."""

    def call(folder: Path) -> None:
        for name in ("cat", "dog"):
            (folder / name).mkdir()
            Image.new("RGB", (8, 8)).save(folder / name / "1.png")
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
        for name, array in {"a": np.zeros((12, 8, 8)), "b": np.zeros((12, 9, 9))}.items():
            (folder / name).write_bytes(idx(array))
            (folder / f"{name}-labels").write_bytes(idx(np.zeros(12)))
        (folder / "set" / "cat").mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(folder / "set" / "cat" / "1.png")
        paths = [folder / one for one in sources]
        labels = {
            f"{use}_labels": Path(f"{path}-labels")
            for use, path in zip(("train", "val"), paths, strict=False)
            if path.is_file()
        }
        ImageData(*paths, **{**labels, **options}).setup()

    return call


def validation(world: int) -> Call:
    def call(_: Path) -> None:
        data = ProblemData(batch_size=4, val_problems=8)
        data.setup()
        data.val_dataloader(0, world)

    return call


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
    Refusal(lambda _: Vocabulary.from_json(b"[" * 100_000, "v.json"), "v.json", "JSON"),
    Refusal(vocabulary(format="other"), "v.json", "molflt-vocabulary", "another"),
    Refusal(vocabulary(version=2), "v.json", "version 1", "2"),
    Refusal(vocabulary(level="line"), "level", "word, char", "'line'"),
    Refusal(vocabulary(tokens=["a", 1]), "v.json", "strings"),
    Refusal(vocabulary(tokens=["<eos>", "<unk>", "a", "a"]), "v.json", "once"),
    Refusal(vocabulary(tokens=["<unk>"]), "v.json", "<eos>"),
    Refusal(vocabulary(level="byte"), "v.json", "256 bytes"),
    Refusal(lambda _: Vocabulary("byte", ["a"]), "vocabulary", "256 bytes"),
    Refusal(lambda _: Vocabulary.count("word", ["a"])[0].decode([4]), "token id", "0 to 2", "4"),
    # texts
    Refusal(text(length=0), "data.length", "at least 1", "0"),
    Refusal(text(min_count=0), "data.min_count", "at least 1", "0"),
    Refusal(text(min_count=2, vocabulary="v.json"), "data.min_count", "data.vocabulary"),
    Refusal(text(min_count=2, level="byte"), "data.min_count", "data.level=byte"),
    Refusal(text(batch_size=0), "data.batch_size", "at least 1", "0"),
    Refusal(text(workers=-1), "data.workers", "at least 0", "-1"),
    Refusal(text(b""), "train.txt", "at least 8 tokens", "0"),
    Refusal(text("\n", level="byte"), "train.txt", "at least 8 tokens", "1"),
    Refusal(text(level="char", vocabulary="v.json"), "v.json", "'char'", "'word'"),
    Refusal(text("x y z\n" * 9, vocabulary="v.json"), "v.json", "train.txt", "75%"),
    Refusal(text(vocabulary="no.json"), "no.json", "vocabulary.json", error=FileNotFoundError),
    # tokenizers
    Refusal(lambda _: Tokenizer.train("words", [], 9, True), "data.kind", "wordpiece", "words"),
    Refusal(lambda _: Tokenizer.from_json(b"{}", "x.json"), "x.json", "tokenizer.json"),
    Refusal(subwords(tokenizer="t.json", pieces=60), "data.pieces", "data.tokenizer"),
    Refusal(subwords(kind="protein", lowercase=True), "data.lowercase", "data.kind=protein"),
    Refusal(subwords(kind="protein", tokenizer="t.json"), "t.json", "residues"),
    Refusal(subwords(pieces=5), "data.pieces", "at least 6", "5"),
    Refusal(subwords(length=2), "data.length", "at least 3", "2"),
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
    Refusal(sentences("IMDb", val_fraction=1), "data.val_fraction", "between 0 and 1", "1"),
    Refusal(rows("SST-2", ""), "train.tsv", "rows", "empty"),
    Refusal(rows("SST-2", "sentence\tlabel\n"), "train.tsv", "rows", "no row"),
    Refusal(rows("SST-2", "text\tlabel\na\t1\n"), "row 1", "sentence", "text"),
    Refusal(rows("SST-2", "sentence\tlabel\na\t1\n\nb\n"), "row 4", "at least 2", "1"),
    Refusal(rows("SST-2", "sentence\tlabel\na\t2\n"), "row 2", "0, 1", "'2'"),
    Refusal(rows("CoLA", "x\t1\t\n"), "row 1", "at least 4", "3"),
    Refusal(rows("STS-B", "sentence1\tsentence2\tscore\na\tb\tnan\n"), "row 2", "0 to 5", "'nan'"),
    Refusal(
        lambda folder: find_split(folder, "MRPC", "train"),
        "data.root",
        "MRPC/train.tsv",
        error=FileNotFoundError,
    ),
    Refusal(sentences("IMDb"), "data.root", "an unpacked folder", error=FileNotFoundError),
    Refusal(reviews("mixed"), "train", "neg and pos", "mixed"),
    Refusal(reviews("neg/1_2.txt", b""), "1_2.txt", "text", "empty"),
    Refusal(reviews(val_fraction=0.2), "data.val_fraction", "4 texts", "0.2"),
    Refusal(reviews("neg/1_2.txt", b"\xff", kind="wordpiece", val_fraction=0.5), "train", "UTF-8"),
    # translations
    Refusal(parallel(b"one\ntwo\n"), "x.de", "equally many", "3 and 2"),
    Refusal(parallel(b"one\n\n \n"), "x.en", "sentence", "2 empty lines, first line 2"),
    Refusal(parallel(b"one\ntwo\n\xff\n"), "x.en", "UTF-8", "byte 8"),
    Refusal(parallel(b""), "x.en", "sentence", "empty"),
    Refusal(parallel(None), "data.target", "x.en", error=FileNotFoundError),
    Refusal(pairs(target="de"), "data.target", "two languages", "'de'"),
    Refusal(pairs(length=1), "data.length", "at least 2", "1"),
    Refusal(pairs(max_tokens=20), "data.max_tokens", "data.length=256", "20"),
    Refusal(pairs(tokenizer="t.json"), "x.de", "knows", "unknown tokens"),
    Refusal(
        lambda _: Pairs(
            ParallelText(["a dog"], ["a dog"], ("a", "b")),
            Tokenizer.train("bpe", ["a dog"] * 9, 40, False),
            2,
        ),
        "data.length",
        "at most 2",
        "1",
    ),
    # proteins
    Refusal(fasta(">sp|P1 first\nWX*\n"), "'sp|P1'", "ACDEF", "'*' at residue 3"),
    Refusal(fasta(">a\nMÄ\n"), "a.fasta", "ACDEF", "'Ä'"),
    Refusal(fasta(">a\n>b\nMK\n"), "'a'", "ACDEF", "no residues"),
    Refusal(fasta("MKV\n"), "line 1", "FASTA", "'MKV'"),
    Refusal(fasta("\n \n"), "a.fasta", "FASTA", "empty"),
    Refusal(fasta(b">a\nM\xe9"), "a.fasta", "UTF-8", "byte 4"),
    Refusal(lambda _: Vocabulary.count("protein", ["MK"])[0].encode("MKJ"), "'J'", "ACDEF"),
    Refusal(split("", "r0\tc\n"), "t.tsv", "each record", "'r1'", Refused),
    Refusal(split("", "r0 c\n"), "t.tsv", "a tab", "'r0 c'", Refused),
    Refusal(split("", "r0\tc\nr0\td\n"), "line 2", "one cluster", "'r0'", Refused),
    Refusal(split("", "r0\tc\nr1\tc\nr2\tc\nr3\tc\n"), "all.fa", "val", "4 in 1 groups", Refused),
    Refusal(
        split("--val_fraction=0.6 --test_fraction=0.5"), "val_fraction", "below 1", "0.6", Refused
    ),
    Refusal(split("--clusters=gone.tsv"), "gone.tsv", "clusters", error=Refused),
    # idx files
    Refusal(idx_pair(SQUARES[:-1]), "idx3", "768 bytes", "767"),
    Refusal(idx_pair(SQUARES + b"x"), "idx3", "768 bytes", "769"),
    Refusal(idx_pair(SQUARES[:10]), "idx3", "header", "truncated"),
    Refusal(idx_pair(b""), "idx3", "00 00 08", "empty"),
    Refusal(idx_pair(b"\x89PNG\r\n"), "idx3", "00 00 08", "89 50 4e 47"),
    Refusal(idx_pair(idx(np.zeros((12, 8, 8)), 0x0D)), "idx3", "00 00 08", "00 00 0d 03"),
    Refusal(idx_pair(idx(np.arange(12))), "idx3", "images (3 axes)", "labels (1 axis)"),
    Refusal(idx_pair(gzip.compress(SQUARES)[:-20]), "idx3", "whole gzip", "truncated"),
    Refusal(idx_pair(labels=idx(np.arange(11))), "idx1", "12 images", "11 labels"),
    Refusal(idx_pair(labels=SQUARES), "idx1", "labels (1 axis)", "images"),
    Refusal(idx_pair(labels=idx(np.full(12, 7))), "idx1", "below 3", "7"),
    Refusal(idx_pair(labels=b""), "data.train_labels", "labels-idx1", error=FileNotFoundError),
    # folders of images
    Refusal(pictures(read=lambda f: open_images(f / "cat")), "cat", "folder of images", "none"),
    Refusal(pictures(read=lambda f: open_images(f, classes=["cat"])), "", "1 trained", "dog"),
    Refusal(pictures("fox"), "fox", ".png", "none"),
    Refusal(pictures("dog/1.png", b"not an image"), "dog/1.png", "an image", "decoded"),
    Refusal(pictures("dog/1.png", b"%!PS-Adobe-3.0 EPSF-3.0\n"), "dog/1.png", "image", "decoded"),
    Refusal(pictures(read=lambda f: list(read_alike(f / "dog", 8, 1))), "1.png", "1 channels", "3"),
    Refusal(pictures(read=lambda f: list(read_alike(f / "dog", 9, 3))), "--fit", "9 x 9", "8 x 8"),
    Refusal(
        pictures(read=lambda f: list(read_alike(f / "dog", 9, 3, True))), "1.png", "9 pixels", "8"
    ),
    Refusal(
        lambda f: open_images(f / "gone"), "gone", "folder of classes", error=FileNotFoundError
    ),
    # image data and augmentation
    Refusal(image_data("a"), "data.val_fraction", "either", "neither"),
    Refusal(image_data("a", "a", val_fraction=0.1), "data.val", "either", "both"),
    Refusal(image_data("a", val_fraction=0.1, val_labels="x"), "data.val_labels", "val_fraction"),
    Refusal(image_data("a", val_fraction=1.0), "data.val_fraction", "between 0 and 1", "1.0"),
    Refusal(image_data("a", val_fraction=0.01), "data.val_fraction", "12 images", "0.01"),
    Refusal(image_data("a", "a", image_size=0), "data.image_size", "at least 1", "0"),
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
