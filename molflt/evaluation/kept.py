"""Files that a training keeps in its run: the vocabulary, the tokenizer, the classes."""

from __future__ import annotations

import json
from pathlib import Path

from molflt.data.text.sentences import CLASSES
from molflt.data.text.tokenizer import TOKENIZER, Tokenizer
from molflt.data.text.vocabulary import Vocabulary

__all__ = ["classes_of", "load_classes", "load_tokenizer", "load_vocabulary", "tokenizer_of"]
__all__ += ["vocabulary_of"]

_RESTORE = "restore the file that was written in training"


def load_vocabulary(run: Path, size: int) -> Vocabulary:
    """Loads the vocabulary of a run.

    Args:
        run: folder of the training run.
        size: number of token ids of its model.
    """
    path = run / "vocabulary.json"
    return vocabulary_of(_read(path, "vocabulary"), str(path), size)


def vocabulary_of(content: bytes, name: str, size: int) -> Vocabulary:
    """Parses the content of vocabulary.json; `name` is its path for messages."""
    vocabulary = Vocabulary.from_json(content, name)
    _expect_size(name, len(vocabulary), size, "tokens")
    return vocabulary


def load_tokenizer(run: Path, size: int) -> Tokenizer:
    """Loads the tokenizer of a run, see `load_vocabulary`."""
    path = run / TOKENIZER
    return tokenizer_of(_read(path, "tokenizer"), str(path), size)


def tokenizer_of(content: bytes, name: str, size: int) -> Tokenizer:
    """Parses the content of tokenizer.json; `name` is its path for messages."""
    tokenizer = Tokenizer.from_json(content, name)
    _expect_size(name, len(tokenizer), size, "tokens")
    return tokenizer


def load_classes(run: Path, count: int) -> list[str]:
    """Loads the names of the classes of a run, as many as its model has."""
    path = run / CLASSES
    return classes_of(_read(path, "classes"), str(path), count)


def classes_of(content: bytes, name: str, count: int) -> list[str]:
    """Parses the content of classes.json; `name` is its path for messages."""
    try:
        classes: list[str] = json.loads(content)
    except (ValueError, RecursionError):
        classes = []
    if not isinstance(classes, list) or not all(isinstance(one, str) for one in classes):
        classes = []
    if not classes:
        raise ValueError(
            f"{name}: expected a JSON list of the names of classes; got something else; {_RESTORE}"
        )
    _expect_size(name, len(classes), count, "classes")
    return classes


def _read(path: Path, what: str) -> bytes:
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; expected the {what} of this run")
    return path.read_bytes()


def _expect_size(name: str, found: int, size: int, what: str) -> None:
    if found != size:
        raise ValueError(
            f"{name}: {found:,} {what}, but the checkpoint has {size:,}; expected those of the "
            f"training; {_RESTORE}"
        )
